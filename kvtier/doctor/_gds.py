"""Whether GPUDirect storage could work: read from files and package metadata only.

kvtier moves bytes through host memory and has no use for it yet; an operator who plans for it
learns what a machine lacks.

Nothing is imported or loaded. Importing torch takes seconds and may claim a GPU, and kvikio
fails at its first I/O, with no way back, where there is no CUDA driver.
"""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Final

from kvtier.doctor._finding import Finding, Verdict
from kvtier.doctor._machine import Machine
from kvtier.doctor._memory import find_gpus

__all__ = ["GdsParts", "check_gds", "cuda_of_torch", "find_gds_parts"]

_NOT_YET: Final = "kvtier does not use it yet: bytes go through host memory"
_CUFILE_GLOBS: Final = (
    "usr/local/cuda*/lib64/libcufile.so.0",
    "usr/local/cuda*/targets/*/lib/libcufile.so.0",
    "usr/lib/*/libcufile.so.0",
    "usr/lib64/libcufile.so.0",
)


@dataclass(frozen=True, slots=True)
class GdsParts:
    """What GPUDirect storage is made of.

    Attributes:
        gpus: CUDA devices.
        kvikio: Versions of the installed kvikio packages by the CUDA major they are built for.
        torch_cuda: CUDA version that torch is built for, such as ``13.0``; empty for none, and
            None where torch is not installed.
        cufile: Whether libcufile is installed.
        module: Whether the kernel module nvidia-fs is loaded.
    """

    gpus: int
    kvikio: Mapping[int, str]
    torch_cuda: str | None
    cufile: bool
    module: bool


def find_gds_parts(machine: Machine) -> GdsParts:
    """Look at this machine and this Python."""
    packages = {
        (distribution.metadata["Name"] or "").lower(): distribution.version
        for distribution in metadata.distributions()
    }
    return GdsParts(
        gpus=len(find_gpus(machine)),
        kvikio=_kvikio_majors(packages),
        torch_cuda=_installed_torch_cuda(),
        cufile=_has_cufile(packages),
        module=(machine.sys / "module/nvidia_fs").exists(),
    )


def check_gds(parts: GdsParts) -> Finding:
    """Say whether GPUDirect storage is available, and if not what is missing first."""
    check = "GPUDirect"
    if not parts.gpus:
        return Finding(check, Verdict.NOTE, f"no GPU; {_NOT_YET}")
    if not parts.kvikio:
        return Finding(check, Verdict.NOTE, f"kvikio is not installed; {_NOT_YET}")
    if parts.torch_cuda is None:
        found = "torch is not installed: its CUDA version is not compared with kvikio's"
        return Finding(check, Verdict.NOTE, found, "pip install 'kvtier[torch]'")
    torch_major = int(parts.torch_cuda.partition(".")[0] or 0)
    if set(parts.kvikio) != {torch_major}:
        built = ", ".join(f"CUDA {major}" for major in sorted(parts.kvikio))
        found = f"kvikio is built for {built}, torch for CUDA {parts.torch_cuda or 'none'}"
        remedy = f"keep one kvikio, of torch's CUDA major: kvikio-cu{torch_major or 13}"
        return Finding(check, Verdict.WARNING, found, remedy)
    return _check_driver(check, parts, torch_major)


def _check_driver(check: str, parts: GdsParts, torch_major: int) -> Finding:
    """Say whether what is below a matching kvikio is there."""
    version = parts.kvikio[torch_major]
    if not parts.cufile:
        found = f"kvikio {version}, but no libcufile: kvikio copies through host memory"
        remedy = f"pip install nvidia-cufile, or the CUDA {torch_major} toolkit"
        return Finding(check, Verdict.NOTE, found, remedy)
    if not parts.module:
        found = f"kvikio {version} and libcufile, but the module nvidia-fs is not loaded"
        return Finding(check, Verdict.NOTE, found, "as root: modprobe nvidia-fs")
    found = f"available: kvikio {version}, libcufile, nvidia-fs, CUDA {parts.torch_cuda}"
    return Finding(check, Verdict.OK, f"{found}; {_NOT_YET}")


def cuda_of_torch(source: str) -> str:
    """Return ``torch.version.cuda`` from the text of ``torch/version.py``; empty for None.

    >>> cuda_of_torch("cuda: Optional[str] = '13.0'")
    '13.0'
    """
    for statement in ast.parse(source).body:
        match statement:
            case (
                ast.AnnAssign(target=ast.Name(id="cuda"), value=ast.Constant(value=str(cuda)))
                | ast.Assign(targets=[ast.Name(id="cuda")], value=ast.Constant(value=str(cuda)))
            ):
                return cuda
            case _:
                pass
    return ""


def _kvikio_majors(packages: Mapping[str, str]) -> dict[int, str]:
    found = {}
    for name, version in packages.items():
        match = re.fullmatch(r"kvikio-cu(\d+)", name)
        if match:
            found[int(match[1])] = version
    return found


def _installed_torch_cuda() -> str | None:
    spec = importlib.util.find_spec("torch")
    if spec is None:
        return None
    if not spec.submodule_search_locations:
        return ""
    version = Path(spec.submodule_search_locations[0]) / "version.py"
    return cuda_of_torch(version.read_text("utf-8")) if version.exists() else ""


def _has_cufile(packages: Iterable[str]) -> bool:
    if any(name.startswith("nvidia-cufile") for name in packages):
        return True
    return any(next(Path("/").glob(pattern), None) is not None for pattern in _CUFILE_GLOBS)
