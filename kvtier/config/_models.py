"""The models of the configuration.

In a file the unit is in the value, in Python it is in the name: ``capacity: 64GiB`` is
``capacity_bytes``. The docstrings below the fields are the descriptions in the JSON Schema.
"""

from __future__ import annotations

import ast
import inspect
import os
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple, Self, cast

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    InstanceOf,
    PrivateAttr,
    SerializeAsAny,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError
from typing_extensions import override

from kvtier.config._fields import (
    Duration,
    FilePath,
    Fraction,
    Label,
    Size,
    path_problem,
    refusal,
)
from kvtier.config._yaml import Origin
from kvtier.errors import ConfigError
from kvtier.os.packages import installed_kvikio
from kvtier.types import GdsMode
from kvtier.units import format_size

__all__ = [
    "NAME_PATTERN",
    "EngineConfig",
    "IdentityConfig",
    "KvtierConfig",
    "LocalStore",
    "NvmeTierConfig",
    "PlacementConfig",
    "RamTierConfig",
    "Remark",
    "TierConfig",
    "TraceConfig",
    "TransferConfig",
    "check_chunk_fits",
    "slot_nbytes",
]


NAME_PATTERN: Final = r"^[a-z][a-z0-9_-]*$"
"""Names of tiers, for logs and metrics."""
_SLOT_ALIGNMENT_NBYTES: Final = 4096
"""A slot is a multiple of this: direct I/O moves whole pages only."""


@dataclass(frozen=True, slots=True)
class LocalStore:
    """A directory of this machine that a tier fills.

    Attributes:
        path: The directory. The tier creates it if its parent exists.
        key: The key of the tier's section that names the directory.
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
    """What is wrong."""
    remedy: str
    """What to do about it."""


def _describe_fields(schema: dict[str, Any], model: type[BaseModel]) -> None:
    """Describe each field in a model's JSON Schema by the docstring below the field.

    With ``use_attribute_docstrings`` pydantic would read the sources each time the models are
    imported, which is a tenth of the time that ``kvtier check`` takes.
    """
    for owner in model.__mro__:
        if owner is BaseModel:
            return
        try:
            source = inspect.getsource(owner)
        except OSError:  # typed into an interpreter
            continue
        body = ast.parse(textwrap.dedent(source)).body[0]
        assert isinstance(body, ast.ClassDef)
        for field, below in pairwise(body.body):
            match field, below:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str(text))),
                ) if name in model.model_fields:
                    key = model.model_fields[name].serialization_alias or name
                    schema["properties"][key].setdefault("description", inspect.cleandoc(text))


class _Section(BaseModel):
    model_config = ConfigDict(
        strict=True,
        frozen=True,
        extra="forbid",
        populate_by_name=True,
        json_schema_extra=_describe_fields,
    )


class TierConfig(_Section):
    """One tier. The ``Options`` of a custom tier derive from this class.

    The commands call the methods. Override a method if its default does not fit.
    """

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
    """Bytes of chunks the tier may hold; an index comes on top."""
    eviction: str = "lhd"
    """Policy that chooses which chunk to evict, by name or as `module:Class`."""

    @field_validator("capacity_bytes")
    @classmethod
    def _capacity_holds_something(cls, nbytes: int) -> int:
        if nbytes < _SLOT_ALIGNMENT_NBYTES:
            raise refusal("less than the 4KiB of the smallest slot", "write one such as 64GiB")
        return nbytes

    def local_store(self) -> LocalStore | None:
        """Return the directory of this machine that the tier fills; None if there is none.

        By default this is the field ``path`` if its type is ``Path``. The commands check this
        directory and its disk.
        """
        path = getattr(self, "path", None)
        return LocalStore(path) if isinstance(path, Path) else None

    def remarks(self) -> Iterable[Remark]:
        """Return warnings about this section, for ``kvtier check`` and ``kvtier doctor``.

        This method may read files of the machine, and may block.

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
    """Absolute directory of the store; kvtier creates it if its parent exists.
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
    """Read, write and checksum in a separate process, so the engine's is not slowed down."""
    gds: GdsMode = "off"
    """Read chunks straight into GPU memory (GPUDirect Storage, needs kvikio): `auto` if all
    workers can, `require` or refuse to start, `off`. One tier at most."""

    @override
    def local_store(self) -> LocalStore:
        return LocalStore(self.path, direct_io=self.direct_io)

    @override
    def remarks(self) -> Iterable[Remark]:
        """Return a warning if kvikio is missing and chunks then go through RAM.

        Raises:
            ConfigError: The installed packages do not suit ``gds``: the engine will not start.
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


_TIERED_KEYS = ("write", "write_after", "promote")


class PlacementConfig(_Section):
    """Rules for copying chunks between tiers."""

    policy: str = "tiered"
    """`tiered` with the next three keys, or another policy, by name or as `module:Class`."""
    write: Literal["through", "evict"] = "through"
    """Demote chunks as soon as they are stored (`through`), or when RAM is full (`evict`)."""
    write_after: int = Field(default=1, ge=1)
    """Uses after which `write: through` demotes a chunk; storing it is the first."""
    promote: Literal["copy", "move"] = "copy"
    """Whether the slower tier keeps a promoted chunk (`copy`) or not (`move`)."""
    admit: str = "all"
    """Policy that chooses which chunks may be demoted: `all`, by name, or `module:Class`."""
    write_budget_per_day_bytes: Size | None = Field(
        default=None,
        validation_alias="write_budget_per_day",
        serialization_alias="write_budget_per_day",
    )
    """Bytes a day that may be written to each slower tier; more is not demoted."""
    pin_budget: Fraction = 0.5
    """Share of RAM that chunks promoted for waiting requests may hold."""
    backlog_limit: Fraction = 0.5
    """Share of RAM that may wait for demotion; newer chunks then stay in RAM only."""
    retain_quota: Fraction = 0.0
    """Share of RAM for chunks that requests retain until a deadline."""
    retain_s: Duration | None = Field(
        default=None, validation_alias="retain", serialization_alias="retain"
    )
    """Time that a chunk is retained after its last use if the request names no time."""

    load_if: Literal["always", "worthwhile"] = "worthwhile"
    """Load chunks `always`, or only if computing them is estimated to take longer."""
    recompute_per_token_s: Duration | None = Field(
        default=None,
        validation_alias="recompute_per_token",
        serialization_alias="recompute_per_token",
    )
    """Time to compute a prompt token, for `load_if: worthwhile`; measured if not given."""

    @property
    def settings(self) -> dict[str, Any]:
        """The arguments of the policy's constructor besides the number of tiers."""
        names = _TIERED_KEYS if self._is_tiered else ()
        return {name: getattr(self, name) for name in names}

    @property
    def writes_through(self) -> bool:
        """Whether chunks are copied to all slower tiers before they are evicted."""
        return self._is_tiered and self.write == "through"

    @property
    def _is_tiered(self) -> bool:
        return self.policy == "tiered"

    @model_validator(mode="after")
    def _keys_belong_to_the_policy(self) -> Self:
        if not self._is_tiered:
            for name in _TIERED_KEYS:
                if name in self.model_fields_set:
                    _refuse(name, "a key of policy: tiered only", "leave it out")
        return self

    @model_validator(mode="after")
    def _keys_agree(self) -> Self:
        if self.write_after > 1 and self.write != "through":
            _refuse("write_after", "used with write: through only", "leave it out")
        if self.promote == "move" and self.write != "evict":
            _refuse("promote", "move would keep the only copy in RAM", "add write: evict")
        if self.retain_s is not None and not self.retain_quota:
            _refuse("retain", "no effect without a quota", "add retain_quota: 25%")
        if self.retain_quota + self.pin_budget > 1:
            _refuse("retain_quota", "more than pin_budget leaves of RAM", "lower one of them")
        return self


class TransferConfig(_Section):
    """Limits and deadlines of transfers."""

    io_threads: int = Field(default=4, ge=1, le=256)
    """Threads for blocking I/O calls, for each slower tier."""
    queue_limit_bytes: Size = Field(
        default=512 << 20, validation_alias="queue_limit", serialization_alias="queue_limit"
    )
    """Bytes queued or in flight per tier and direction; more is refused."""
    piece_bytes: Size = Field(
        default=8 << 20, validation_alias="piece", serialization_alias="piece"
    )
    """Largest single I/O call; a multiple of 4 KiB, at most `queue_limit`."""
    load_timeout_s: Duration = Field(
        default=10.0, validation_alias="load_timeout", serialization_alias="load_timeout"
    )
    """Longest wait of a request for a promotion; then it recomputes."""
    load_path: Literal["auto", "direct", "staged"] = "auto"
    """Load from slower tiers as chunks arrive (`direct`), or once all are in RAM (`staged`)."""
    store_timeout_s: Duration = Field(
        default=60.0, validation_alias="store_timeout", serialization_alias="store_timeout"
    )
    """Longest a copy to a slower tier may take."""
    close_timeout_s: Duration = Field(
        default=30.0, validation_alias="close_timeout", serialization_alias="close_timeout"
    )
    """Longest time for demoting the remaining chunks and closing everything."""
    breaker_backoff_s: Duration = Field(
        default=5.0, validation_alias="breaker_backoff", serialization_alias="breaker_backoff"
    )
    """Time until a tier out of service is tried again."""

    @model_validator(mode="after")
    def _piece_fits(self) -> Self:
        if self.piece_bytes % 4096:
            _refuse("piece", "not a multiple of 4096 bytes", "write a multiple of 4KiB")
        if self.piece_bytes > self.queue_limit_bytes:
            _refuse("piece", "larger than queue_limit", "lower piece or raise queue_limit")
        return self


class TraceConfig(_Section):
    """A recording of the engine's requests, for `kvtier sim` and `kvtier replay`."""

    record: FilePath | None = None
    """Absolute directory for the recording; kvtier creates it if its parent exists.
    `{data_parallel_rank}` in the path becomes the engine's data-parallel rank, or 0."""
    file_size_bytes: Size = Field(
        default=64 << 20, validation_alias="file_size", serialization_alias="file_size"
    )
    """Bytes per file of the recording."""
    files: int = Field(default=8, ge=1)
    """Number of files; the oldest is removed first."""


class EngineConfig(_Section):
    """Settings for what an engine stores: blocks per chunk, and KV of generated tokens."""

    blocks_per_chunk: int = Field(default=1, ge=1, le=65536)
    """Engine blocks per stored chunk; more means fewer, larger I/Os and coarser reuse."""
    store_decode: bool = True
    """Store the KV of generated tokens too; conversations of several turns need it."""


class IdentityConfig(_Section):
    """Values besides model and layout that must be equal for engines to share stored chunks."""

    name: Label | None = Field(default=None, min_length=1)
    """Name of the model, instead of the engine's `--model`."""
    model_revision: Label | None = None
    """Revision of the weights, if the engine is not given one."""
    weights_epoch: int = Field(default=0, ge=0)
    """Raise it when weights change under the same name; older chunks are then ignored."""


def _is_one(path: Path, other: Path) -> bool:
    return os.path.realpath(path) == os.path.realpath(other)


def _overlap(path: Path, other: Path) -> bool:
    one, two = Path(os.path.realpath(path)), Path(os.path.realpath(other))
    return one.is_relative_to(two) or two.is_relative_to(one)


def _as_tuple(value: Any) -> Any:  # noqa: ANN401 - pydantic's contract
    return tuple(value) if isinstance(value, list) else value


def _refuse(key: str, problem: str, remedy: str) -> None:
    """Raise an error about ``key``, written as in a file and relative to the section."""
    context = {"problem": problem, "key": key, "remedy": remedy}
    raise PydanticCustomError("kvtier", "{key}: {problem}; {remedy}", context)


class KvtierConfig(_Section):
    """A whole configuration."""

    tiers: Annotated[
        tuple[SerializeAsAny[InstanceOf[TierConfig]], ...],
        Field(min_length=1),
        BeforeValidator(_as_tuple),
    ]
    """The tiers, fastest first. The first is `ram`."""
    placement: PlacementConfig = Field(default_factory=PlacementConfig)
    """Rules for copying chunks between tiers."""
    transfer: TransferConfig = Field(default_factory=TransferConfig)
    """Limits and deadlines of transfers."""
    trace: TraceConfig = Field(default_factory=TraceConfig)
    """A recording of the engine's requests, for `kvtier sim` and `kvtier replay`."""
    shadow: Annotated[tuple[str, ...], BeforeValidator(_as_tuple)] = ()
    """Eviction policies that run beside each tier's own, on keys only, and report hits."""
    engine: EngineConfig = Field(default_factory=EngineConfig)
    """Settings that the engine must share."""
    identity: IdentityConfig = Field(default_factory=IdentityConfig)
    """Values that must be equal, besides model and layout, to reuse stored chunks."""

    _origin: Origin = PrivateAttr(default_factory=Origin)

    @property
    def origin(self) -> Origin:
        """File and lines of the configuration."""
        return self._origin

    @property
    def ram(self) -> RamTierConfig:
        """The RAM tier, always the first."""
        return cast("RamTierConfig", self.tiers[0])  # its kind was checked

    def model_post_init(self, context: Any, /) -> None:  # noqa: ANN401 - pydantic's contract
        """Keep the file and the lines of the configuration, which the loader passes."""
        if context is not None:
            self._origin = context["origin"]

    @field_validator("shadow")
    @classmethod
    def _shadows_differ(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(names)) < len(names):
            raise refusal("a policy is named twice", "name each once")
        return names

    @model_validator(mode="after")
    def _tiers_agree(self) -> Self:
        for number, tier in enumerate(self.tiers):
            self._check_tier(number, tier, self.tiers[:number])
        return self

    @property
    def gds(self) -> GdsMode:
        """Whether workers read chunks straight into GPU memory; staged loads never do."""
        if self.transfer.load_path == "staged":
            return "off"
        return next((mode for tier in self.tiers if (mode := _gds_of(tier)) != "off"), "off")

    @property
    def gds_tier(self) -> str | None:
        """Name of the tier that workers read straight into GPU memory, if there is one."""
        names = [tier.name for tier in self.tiers if _gds_of(tier) != "off"]
        return None if self.gds == "off" else names[0]

    @model_validator(mode="after")
    def _gds_can_work(self) -> Self:
        modes = [(f"tiers[{at}].gds", _gds_of(tier)) for at, tier in enumerate(self.tiers)]
        used = [(key, mode) for key, mode in modes if mode != "off"]
        if len(used) > 1:
            _refuse(used[1][0], "another tier has it", "set gds: off in one of them")
        if self.transfer.load_path == "staged" and used and used[0][1] == "require":
            remedy = "leave out load_path, or set gds: auto"
            _refuse(used[0][0], "load_path: staged loads through RAM", remedy)
        return self

    @model_validator(mode="after")
    def _recording_is_not_a_store(self) -> Self:
        record = self.trace.record
        for number, tier in enumerate(self.tiers):
            store = tier.local_store()
            if record and store and _overlap(record, store.path):
                problem = f"in the path of tiers[{number}], or around it"
                remedy = "use two directories, neither in the other"
                _refuse("trace.record", problem, remedy)
        return self

    @staticmethod
    def _check_tier(number: int, tier: TierConfig, faster: tuple[TierConfig, ...]) -> None:
        key = f"tiers[{number}]"
        if number == 0 and tier.kind != "ram":
            _refuse(f"{key}.kind", "the first tier is not ram", "start the list with kind: ram")
        if number > 0 and tier.kind == "ram":
            _refuse(f"{key}.kind", "ram is a tier already", "keep one ram tier, the first")
        names = [other.name for other in faster]
        if tier.name in names:
            twin = names.index(tier.name)
            remedy = "add name: to one of them"
            _refuse(f"{key}.name", f"tiers[{twin}] has the same name", remedy)
        store = tier.local_store()
        if store is not None:
            _check_store(store, f"{key}.{store.key}", faster)


def _check_store(store: LocalStore, key: str, faster: Iterable[TierConfig]) -> None:
    if (problem := path_problem(store.path)) is not None:
        _refuse(key, *problem)
    paths = [other.path for tier in faster if (other := tier.local_store())]
    if any(_is_one(store.path, path) for path in paths):
        _refuse(key, "another tier has the same path", "use two directories")


def _gds_of(tier: TierConfig) -> GdsMode:
    return tier.gds if isinstance(tier, NvmeTierConfig) else "off"


def _name_of(kind: str) -> str:
    """Return the default name of a tier: ``kind``, or only the class of ``module:Class``."""
    return kind.rpartition(":")[2].lower().strip("_") if ":" in kind else kind


def slot_nbytes(chunk_nbytes: int) -> int:
    """Return the bytes of a slot for one chunk of ``chunk_nbytes``, all ranks included.

    >>> slot_nbytes(1), slot_nbytes(8192)
    (4096, 8192)
    """
    return -(-chunk_nbytes // _SLOT_ALIGNMENT_NBYTES) * _SLOT_ALIGNMENT_NBYTES


def check_chunk_fits(config: KvtierConfig, chunk_nbytes: int) -> None:
    """Check that every tier has room for at least one chunk.

    Args:
        config: The configuration.
        chunk_nbytes: Bytes of one chunk over all ranks.

    Raises:
        ConfigError: A tier is too small; the message has its key, capacity and needed size.
    """
    need = slot_nbytes(chunk_nbytes)
    problems = [
        config.origin.format_problem(
            f"tiers[{number}].capacity",
            f"smaller than one chunk, which takes {format_size(need)}",
            "raise the capacity or lower engine.blocks_per_chunk",
            value=format_size(tier.capacity_bytes),
        )
        for number, tier in enumerate(config.tiers)
        if tier.capacity_bytes < need
    ]
    if problems:
        raise ConfigError("\n".join(problems))
