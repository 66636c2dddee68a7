"""The machine: GPU, driver, bus, memory, packages, and the code that runs."""

from __future__ import annotations

import hashlib
import os
import platform
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from tests.gpu.bench import Bench
from tests.gpu.machine import driver_has, output_of, read_text, versions
from tests.gpu.runner import ROOT

_QUERIES: Final = (
    *("name", "memory.total", "driver_version", "pci.bus_id"),
    *("pcie.link.gen.current", "pcie.link.gen.max"),
    *("pcie.link.width.current", "pcie.link.width.max"),
)
_PACKAGES: Final = (
    *("torch", "triton", "cupy-cuda13x", "cuda-bindings", "nvidia-cufile", "kvikio-cu13"),
    *("numpy", "pydantic", "pytest", "pytest-asyncio", "hypothesis", "xxhash", "vllm"),
)
_HUGE_PAGES: Final = ("HugePages_Total", "HugePages_Free", "Hugepagesize", "MemAvailable")


def run(bench: Bench) -> None:
    """Record the facts. What may take long or fail comes last."""
    facts: dict[str, Callable[[], object]] = {
        "code": _code,
        "machine": _machine,
        "memory": _memory,
        "page-locked memory may be": _lockable,
        "GPU": _gpu,
        "NUMA nodes": lambda: read_text("/sys/devices/system/node/online"),
        "NUMA node of the GPU": _gpu_node,
        "versions": lambda: ", ".join(versions(_PACKAGES)),
        "cuMemcpyBatchAsync of 12.8": lambda: driver_has("cuMemcpyBatchAsync", 12080),
        "cuMemcpyBatchAsync of 13.0": lambda: driver_has("cuMemcpyBatchAsync", 13000),
        "nvidia-fs": lambda: read_text("/proc/driver/nvidia-fs/version"),
        "kvikio": _kvikio,
    }
    if bench.device == "cuda":
        facts["torch"] = _torch
    for name in bench.while_time(facts):
        try:
            bench.fact(name, facts[name]())
        except Exception as error:  # noqa: BLE001 - the next facts do not depend on it
            bench.fact(name, f"{type(error).__name__}: {error}")


def _code() -> str:
    """Return the commit and, because a copy may have none, a digest of the package."""
    digest = hashlib.sha256()
    for path in sorted((ROOT / "kvtier").rglob("*.py")):
        digest.update(path.read_bytes())
    commit = output_of("git", "-C", str(ROOT), "describe", "--always", "--dirty")
    return f"commit {commit}; kvtier/**/*.py {digest.hexdigest()[:12]}"


def _machine() -> str:
    models = [line for line in read_text("/proc/cpuinfo").split("\n") if "model name" in line]
    model = models[0].partition(":")[2].strip() if models else platform.machine()
    system = f"Linux {platform.release()}, Python {platform.python_version()}"
    return f"{os.cpu_count()} x {model}, {system}"


def _memory() -> str:
    lines = read_text("/proc/meminfo").splitlines()
    return ", ".join(" ".join(line.split()) for line in lines if line.startswith(_HUGE_PAGES))


def _lockable() -> str:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return "unlimited" if soft == resource.RLIM_INFINITY else f"{soft} bytes by RLIMIT_MEMLOCK"


def _gpu() -> str:
    values = output_of(
        "nvidia-smi", f"--query-gpu={','.join(_QUERIES)}", "--format=csv,noheader"
    )
    return f"{values} ({', '.join(_QUERIES)})"


def _gpu_node() -> str:
    """Return the NUMA node of each NVIDIA device on the bus."""
    devices = Path("/sys/bus/pci/devices")
    found = [
        f"{path.name}: {read_text(f'{path}/numa_node')}"
        for path in sorted(devices.glob("*"))
        if read_text(f"{path}/vendor") == "0x10de"
    ]
    return ", ".join(found) or "unknown"


def _kvikio() -> str:
    import kvikio  # noqa: PLC0415 - optional
    from kvikio import cufile_driver, defaults  # noqa: PLC0415

    route = "POSIX calls" if defaults.is_compat_mode_preferred() else "GDS"
    libcufile = ".".join(map(str, cufile_driver.libcufile_version()))
    return f"{kvikio.__version__} with libcufile {libcufile} reads by {route}"


def _torch() -> str:
    begun = time.perf_counter()
    import torch  # noqa: PLC0415 - may take long

    imported = time.perf_counter()
    device = torch.cuda.get_device_name(0)
    torch.zeros(1, device="cuda")
    ready = time.perf_counter()
    return (
        f"{torch.__version__}, device {device}; imported in {imported - begun:.1f} s, "
        f"its first tensor after {ready - imported:.1f} s"
    )
