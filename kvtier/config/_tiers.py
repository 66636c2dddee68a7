"""Models of the RAM and NVMe tiers, and their base class, which custom tiers also use."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Final, Literal, NamedTuple

from pydantic import Field, field_validator
from typing_extensions import override

from kvtier.config._fields import Duration, FilePath, Fraction, Size, refusal
from kvtier.config._section import Section
from kvtier.errors import ConfigError
from kvtier.os.packages import installed_kvikio
from kvtier.types import GdsMode

__all__ = [
    "NAME_PATTERN",
    "LocalDirectory",
    "NvmeTierConfig",
    "RamTierConfig",
    "Remark",
    "TierConfig",
    "slot_nbytes",
]


NAME_PATTERN: Final = r"^[a-z][a-z0-9_-]*$"
"""Pattern for the names of tiers in logs and metrics."""
_SLOT_ALIGNMENT_NBYTES: Final = 4096
"""Alignment of a slot's size, because direct I/O moves whole pages only."""


@dataclass(frozen=True, slots=True)
class LocalDirectory:
    """A directory of this machine in which a tier keeps chunks.

    Attributes:
        path: The directory. The tier creates it if its parent exists.
        key: The key for the directory in the tier's section.
        direct_io: Whether the tier bypasses the page cache; None if unknown.
    """

    path: Path
    key: str = "path"
    direct_io: Literal["auto", "require", "off"] | None = None


class Remark(NamedTuple):
    """A warning about one key of a tier's section."""

    key: str
    """The key, as written in a file."""
    problem: str
    """The problem."""
    remedy: str
    """What the user can do."""


class TierConfig(Section):
    """One tier. The ``Options`` of a custom tier derive from this class.

    ``kvtier check`` and other commands call the methods. Override a method if the default does
    not fit.
    """

    is_shared: ClassVar[bool] = False
    """Whether the tier is a shared tier (:class:`kvtier.tiers.shared.SharedTier`)."""

    kind: str
    """`ram`, `nvme`, a kind of an installed package, or `module:Class`."""
    name: str = Field(
        default_factory=lambda values: _name_of(values["kind"]), pattern=NAME_PATTERN
    )
    """Name of the tier in logs and metrics. The default is the kind; names must differ."""
    capacity_bytes: Size = Field(
        validation_alias="capacity",
        serialization_alias="capacity",
        json_schema_extra={"examples": ["64GiB"]},
    )
    """Largest total size of the chunks in the tier. The index takes additional space."""
    eviction: str = "lhd"
    """Policy that chooses which chunk to evict, by name or as `module:Class`."""

    @field_validator("capacity_bytes")
    @classmethod
    def _capacity_holds_something(cls, nbytes: int) -> int:
        if nbytes < _SLOT_ALIGNMENT_NBYTES:
            raise refusal("less than the 4KiB of the smallest slot", "write one such as 64GiB")
        return nbytes

    def local_directory(self) -> LocalDirectory | None:
        """Return the tier's directory on this machine; None if there is none.

        By default, this is the value of the field ``path`` if it is a ``Path``. The commands
        check the directory and its disk.
        """
        path = getattr(self, "path", None)
        return LocalDirectory(path) if isinstance(path, Path) else None

    def has_own_process(self) -> bool:
        """Return whether the tier runs in its own process; by default False."""
        return False

    def retained_share(self) -> float:
        """Return the share of the tier for retained chunks, from 0 to 1; by default 0."""
        return 0.0

    def remarks(self) -> Iterable[Remark]:
        """Return warnings about this section, for ``kvtier check`` and ``kvtier doctor``.

        This method may read files of the machine and may block.

        Raises:
            ConfigError: The tier cannot work here; the message has a remedy.
        """
        return ()


class RamTierConfig(TierConfig):
    """Pinned host memory, always the first tier."""

    kind: str = Field(default="ram", pattern="^ram$")
    """Pinned host memory."""
    huge_pages: Literal["auto", "require", "off"] = "auto"
    """Use huge pages (`vm.nr_hugepages`): `auto` (if enough are free), `require` or `off`."""


class NvmeTierConfig(TierConfig):
    """A directory on a local file system."""

    kind: str = Field(default="nvme", pattern="^nvme$")
    """A local disk."""
    path: FilePath
    """Absolute path of the cache directory. kvtier creates the directory if the parent exists.
    `{data_parallel_rank}` in the path becomes the engine's data-parallel rank, or 0."""
    direct_io: Literal["auto", "require", "off"] = "auto"
    """Bypass the page cache: `auto` (if possible), `require` (else refuse to start), `off`."""
    durability: Literal["process", "power"] = "process"
    """What chunks survive: a killed `process`, or also a loss of `power` (fsync, slower)."""
    keep_after_reset: bool = False
    """Whether a restart keeps chunks that were stored after a cache reset. Leave this off if
    weights are updated while the engine runs."""
    on_mismatch: Literal["refuse", "remove"] = "refuse"
    """What to do if the cache of another identity takes needed space: `remove` it, or `refuse`
    to start. A cache that was not used within `keep_for` is removed in both cases."""
    keep_for_s: Duration = Field(
        default=7 * 86400.0, validation_alias="keep_for", serialization_alias="keep_for"
    )
    """How long `on_mismatch: refuse` keeps a cache after its last use."""
    retain_quota: Fraction = 0.5
    """Largest share of the tier for chunks that `kvtier warmup --retain` protects."""
    own_process: bool = True
    """Read, write and compute checksums in a separate process, to keep the engine fast."""
    gds: GdsMode = "off"
    """Read chunks straight into GPU memory (GPUDirect Storage, needs kvikio): `auto` (if
    all workers can), `require` (else refuse to start), `off`. Only one tier can have GDS."""

    @override
    def local_directory(self) -> LocalDirectory:
        return LocalDirectory(self.path, direct_io=self.direct_io)

    @override
    def has_own_process(self) -> bool:
        return self.own_process

    @override
    def retained_share(self) -> float:
        return self.retain_quota

    @override
    def remarks(self) -> Iterable[Remark]:
        """Return a warning if kvikio is missing. Chunks then go through RAM.

        Raises:
            ConfigError: The installed packages do not suit ``gds``, so the engine would not
                start.
        """
        found = () if self.gds == "off" else installed_kvikio()
        if self.gds == "off" or len(found) == 1:
            return
        if found:
            raise ConfigError(
                f"gds: {' and '.join(found)} are installed, so the engine will not start; "
                "keep the one for the CUDA of torch"
            )
        missing = "kvikio is not installed, so"
        remedy = "pip install 'kvtier[gds-cu13]', or gds-cu12 if torch is built for CUDA 12"
        if self.gds == "require":
            raise ConfigError(f"gds: {missing} the engine will not start; {remedy}")
        yield Remark("gds", f"{missing} chunks go through RAM", remedy)


def _name_of(kind: str) -> str:
    """Return the default name: ``kind``, or for ``module:Class`` the class in lower case."""
    return kind.rpartition(":")[2].lower().strip("_") if ":" in kind else kind


def slot_nbytes(chunk_nbytes: int) -> int:
    """Return the size of a slot for a chunk of ``chunk_nbytes`` on all ranks together.

    >>> slot_nbytes(1), slot_nbytes(8192)
    (4096, 8192)
    """
    return -(-chunk_nbytes // _SLOT_ALIGNMENT_NBYTES) * _SLOT_ALIGNMENT_NBYTES
