"""The models of tiers: the base that custom tiers derive from, RAM and NVMe."""

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
"""Names of tiers, for logs and metrics."""
_SLOT_ALIGNMENT_NBYTES: Final = 4096
"""Alignment of a slot's size, because direct I/O moves whole pages only."""


@dataclass(frozen=True, slots=True)
class LocalDirectory:
    """A directory of this machine in which a tier keeps chunks.

    Attributes:
        path: The directory. The tier creates it if its parent exists.
        key: The key in the tier's section whose value is the directory.
        direct_io: Whether the tier bypasses the page cache; None if unknown.
    """

    path: Path
    key: str = "path"
    direct_io: Literal["auto", "require", "off"] | None = None


class Remark(NamedTuple):
    """A warning about one key of a tier's section."""

    key: str
    """The key, as a file writes it."""
    problem: str
    """The problem."""
    remedy: str
    """What the user can do."""


class TierConfig(Section):
    """One tier. The ``Options`` of a custom tier derive from this class.

    The commands call the methods. Override a method if its default does not fit.
    """

    is_shared: ClassVar[bool] = False
    """Whether the tier is a shared tier (:class:`kvtier.tiers.shared.SharedTier`)."""

    kind: str
    """`ram`, `nvme`, a kind of an installed package, or `module:Class`."""
    name: str = Field(
        default_factory=lambda values: _name_of(values["kind"]), pattern=NAME_PATTERN
    )
    """Name in logs and metrics; the kind unless two tiers share it."""
    capacity_bytes: Size = Field(
        validation_alias="capacity",
        serialization_alias="capacity",
        json_schema_extra={"examples": ["64GiB"]},
    )
    """Bytes of chunks that the tier may have; the index takes more room."""
    eviction: str = "hedged-lhd"
    """Policy that chooses which chunk to evict, by name or as `module:Class`."""

    @field_validator("capacity_bytes")
    @classmethod
    def _capacity_holds_something(cls, nbytes: int) -> int:
        if nbytes < _SLOT_ALIGNMENT_NBYTES:
            raise refusal("less than the 4KiB of the smallest slot", "write one such as 64GiB")
        return nbytes

    def local_directory(self) -> LocalDirectory | None:
        """Return the tier's directory on this machine; None if there is none.

        The default is the field ``path`` if its type is ``Path``. The commands check this
        directory and its disk.
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
    """Reserved huge pages (`vm.nr_hugepages`): `auto` if enough are free, `require`, `off`."""


class NvmeTierConfig(TierConfig):
    """A directory on a local file system."""

    kind: str = Field(default="nvme", pattern="^nvme$")
    """A local disk."""
    path: FilePath
    """Absolute path of the cache directory; kvtier creates it if its parent exists.
    `{data_parallel_rank}` in the path becomes the engine's data-parallel rank, or 0."""
    direct_io: Literal["auto", "require", "off"] = "auto"
    """Bypass the page cache: `auto` if the disk can, `require` or refuse to start, `off`."""
    durability: Literal["process", "power"] = "process"
    """Whether chunks survive a killed `process` or also loss of `power` (fsync, slower)."""
    keep_after_reset: bool = False
    """Whether chunks stored after a cache reset survive a restart; leave off if weights
    are updated while the engine runs."""
    on_mismatch: Literal["refuse", "remove"] = "refuse"
    """If the cache of another identity leaves too little of `capacity`: `remove` that cache, or
    `refuse` to start if it was used within `keep_for`."""
    keep_for_s: Duration = Field(
        default=7 * 86400.0, validation_alias="keep_for", serialization_alias="keep_for"
    )
    """Time after its last use in which `on_mismatch: refuse` keeps a cache."""
    retain_quota: Fraction = 0.5
    """Share of the tier for chunks that `kvtier warmup --retain` keeps until a time."""
    own_process: bool = True
    """Read, write and checksum in a separate process, so as not to slow the engine's down."""
    gds: GdsMode = "off"
    """Read chunks straight into GPU memory (GPUDirect Storage, needs kvikio): `auto` if all
    workers can, `require` or refuse to start, `off`. One tier at most."""

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
        """Return a warning if kvikio is missing, so that chunks go through RAM.

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
    """Return the default name of a tier: ``kind``, or only the class of ``module:Class``."""
    return kind.rpartition(":")[2].lower().strip("_") if ":" in kind else kind


def slot_nbytes(chunk_nbytes: int) -> int:
    """Return the bytes of a slot for one chunk of ``chunk_nbytes``, of all ranks together.

    >>> slot_nbytes(1), slot_nbytes(8192)
    (4096, 8192)
    """
    return -(-chunk_nbytes // _SLOT_ALIGNMENT_NBYTES) * _SLOT_ALIGNMENT_NBYTES
