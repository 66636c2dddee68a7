/* Stands in for libcuda.so.1: writes down its arguments, and copies between host addresses.

   With -DHAVE_CUDA_H the definitions are compared with CUDA's own header, where the compiler
   refuses a signature or a structure that differs. */
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#ifdef HAVE_CUDA_H
#define __CUDA_API_VERSION_INTERNAL /* declares the functions of earlier versions too */
#include <cuda.h>
_Static_assert(CU_MEMCPY_SRC_ACCESS_ORDER_STREAM == 1, "order");
_Static_assert(CU_MEMCPY_SRC_ACCESS_ORDER_ANY == 3, "order");
_Static_assert(CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM == 91, "attribute");
_Static_assert(sizeof(CUmemcpyAttributes) == 24, "size of the attributes");
#else
typedef int CUresult, CUdevice, CUdevice_attribute, CUdriverProcAddressQueryResult;
typedef void *CUcontext, *CUstream;
typedef uint64_t cuuint64_t;
typedef unsigned long long CUdeviceptr;
typedef struct { int type; int id; } CUmemLocation;
typedef struct {
    int srcAccessOrder;
    CUmemLocation srcLocHint;
    CUmemLocation dstLocHint;
    unsigned int flags;
} CUmemcpyAttributes;
#endif

char shim_log[1 << 16];     /* a line for each call */
char shim_failing[64];      /* the call that fails, */
int shim_error;             /* and its error */
int shim_has_batches = 1;
int shim_uses_host_addresses = 1;

static int answer(const char *call, const char *format, ...) {
    size_t used = strlen(shim_log);
    va_list arguments;
    used += snprintf(shim_log + used, sizeof shim_log - used, "%s", call);
    va_start(arguments, format);
    used += vsnprintf(shim_log + used, sizeof shim_log - used, format, arguments);
    va_end(arguments);
    snprintf(shim_log + used, sizeof shim_log - used, "\n");
    return strcmp(call, shim_failing) ? 0 : shim_error;
}

CUresult cuInit(unsigned int flags) { return answer("cuInit", " %u", flags); }

CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    *device = 40 + ordinal;
    return answer("cuDeviceGet", " %d", ordinal);
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    *value = shim_uses_host_addresses;
    return answer("cuDeviceGetAttribute", " %d %d", (int)attribute, (int)device);
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    *context = (CUcontext)(uintptr_t)(0x7000000000000000u + device);
    return answer("cuDevicePrimaryCtxRetain", " %d", (int)device);
}

CUresult cuCtxSetCurrent(CUcontext context) {
    return answer("cuCtxSetCurrent", " %llx", (unsigned long long)(uintptr_t)context);
}

CUresult cuGetErrorName(CUresult error, const char **name) {
    if ((int)error != 2) return 1;
    *name = "CUDA_ERROR_OUT_OF_MEMORY";
    return 0;
}

CUresult cuMemHostRegister_v2(void *address, size_t nbytes, unsigned int flags) {
    return answer("cuMemHostRegister_v2", " %p %zu %u", address, nbytes, flags);
}

CUresult cuMemHostUnregister(void *address) {
    return answer("cuMemHostUnregister", " %p", address);
}

CUresult cuMemcpyBatchAsync(CUdeviceptr *destinations, CUdeviceptr *sources, size_t *nbytes,
                            size_t count, CUmemcpyAttributes *attributes, size_t *first,
                            size_t number, size_t *failed, CUstream stream) {
    for (size_t at = 0; at < count; at++)
        memcpy((void *)(uintptr_t)destinations[at], (void *)(uintptr_t)sources[at], nbytes[at]);
    *failed = 0;
    return answer("cuMemcpyBatchAsync", " %zu order %d hints %d %d %d %d flags %u first %zu of %zu stream %llx",
                  count, (int)attributes->srcAccessOrder, (int)attributes->srcLocHint.type,
                  attributes->srcLocHint.id, (int)attributes->dstLocHint.type,
                  attributes->dstLocHint.id, attributes->flags, first[0], number,
                  (unsigned long long)(uintptr_t)stream);
}

CUresult cuGetProcAddress_v2(const char *name, void **function, int version, cuuint64_t flags,
                             CUdriverProcAddressQueryResult *status) {
    int known = shim_has_batches && version == 12080 && !strcmp(name, "cuMemcpyBatchAsync");
    *function = known ? (void *)cuMemcpyBatchAsync : 0;
    *status = known ? 0 : 1;
    return answer("cuGetProcAddress_v2", " %s %d %llu", name, version, (unsigned long long)flags);
}
