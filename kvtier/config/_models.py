"""The models of the configuration.

In a file, a value has a unit: ``capacity: 64GiB``. In Python, the field's name has the unit:
``capacity_bytes``. The docstring below a field is the field's description in the JSON Schema.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal, Self, cast

from pydantic import (
    BeforeValidator,
    Field,
    InstanceOf,
    PrivateAttr,
    SerializeAsAny,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from kvtier.config._fields import (
    Duration,
    FilePath,
    Fraction,
    Label,
    Size,
    path_problem,
    refusal,
)
from kvtier.config._section import Section
from kvtier.config._tiers import (
    LocalDirectory,
    NvmeTierConfig,
    RamTierConfig,
    TierConfig,
    slot_nbytes,
)
from kvtier.config._yaml import Origin
from kvtier.errors import ConfigError
from kvtier.types import GdsMode
from kvtier.units import format_size

__all__ = [
    "EngineConfig",
    "IdentityConfig",
    "KvtierConfig",
    "PlacementConfig",
    "TraceConfig",
    "TransferConfig",
    "check_chunk_fits",
]


_TIERED_KEYS = ("write", "write_after", "promote")


class PlacementConfig(Section):
    """Rules for copying chunks between tiers."""

    policy: str = "tiered"
    """Name of the policy, or `module:Class`. The next three keys are only for `tiered`."""
    write: Literal["through", "evict"] = "through"
    """Demote chunks as soon as they are stored (`through`), or when RAM is full (`evict`)."""
    write_after: int = Field(default=1, ge=1)
    """Number of uses at which `write: through` demotes a chunk. The store is the first use."""
    promote: Literal["copy", "move"] = "copy"
    """Whether the slower tier keeps a promoted chunk (`copy`) or not (`move`)."""
    admit: str = "all"
    """Name of the policy that chooses which chunks may be demoted, or `module:Class`."""
    write_budget_per_day_bytes: Size | None = Field(
        default=None,
        validation_alias="write_budget_per_day",
        serialization_alias="write_budget_per_day",
    )
    """Limit of bytes written to each slower tier per day. Further chunks are not demoted."""
    pin_budget: Fraction = 0.5
    """Largest share of RAM for chunks that are promoted for waiting requests."""
    backlog_limit: Fraction = 0.5
    """Largest share of RAM for chunks that wait for demotion. Beyond it, chunks stay in RAM."""
    retain_quota: Fraction = 0.0
    """Largest share of RAM for chunks that requests retain until a deadline."""
    retain_s: Duration | None = Field(
        default=None, validation_alias="retain", serialization_alias="retain"
    )
    """How long a chunk is retained after each use, if the request names no time."""

    load_if: Literal["always", "worthwhile"] = "worthwhile"
    """Load chunks `always`, or only if computing them would take longer (`worthwhile`)."""
    recompute_per_token_s: Duration | None = Field(
        default=None,
        validation_alias="recompute_per_token",
        serialization_alias="recompute_per_token",
    )
    """Time to compute a prompt token, for `load_if: worthwhile`; measured if not given."""

    @property
    def settings(self) -> dict[str, Any]:
        """Keyword arguments for the policy's constructor, without the number of tiers."""
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


class TransferConfig(Section):
    """Limits and deadlines of transfers."""

    io_threads: int = Field(default=4, ge=1, le=256)
    """Number of threads for blocking I/O calls, for each slower tier."""
    queue_limit_bytes: Size = Field(
        default=512 << 20, validation_alias="queue_limit", serialization_alias="queue_limit"
    )
    """Largest amount queued or in flight per tier and direction. Further jobs are refused."""
    piece_bytes: Size = Field(
        default=8 << 20, validation_alias="piece", serialization_alias="piece"
    )
    """Largest single I/O call; a multiple of 4 KiB, at most `queue_limit`."""
    load_timeout_s: Duration = Field(
        default=10.0, validation_alias="load_timeout", serialization_alias="load_timeout"
    )
    """Longest wait of a request for a promotion. Then the engine computes the tokens."""
    load_path: Literal["direct", "staged"] = "direct"
    """Load each chunk once it is in RAM (`direct`), or all chunks together (`staged`)."""
    store_timeout_s: Duration = Field(
        default=60.0, validation_alias="store_timeout", serialization_alias="store_timeout"
    )
    """Longest time of a copy to a slower tier."""
    close_timeout_s: Duration = Field(
        default=30.0, validation_alias="close_timeout", serialization_alias="close_timeout"
    )
    """Longest time of a shutdown, which demotes the remaining chunks and closes the tiers."""
    breaker_backoff_s: Duration = Field(
        default=5.0, validation_alias="breaker_backoff", serialization_alias="breaker_backoff"
    )
    """Time after which kvtier tries a failed tier again."""

    @model_validator(mode="after")
    def _piece_fits(self) -> Self:
        if self.piece_bytes % 4096:
            _refuse("piece", "not a multiple of 4096 bytes", "write a multiple of 4KiB")
        if self.piece_bytes > self.queue_limit_bytes:
            _refuse("piece", "larger than queue_limit", "lower piece or raise queue_limit")
        return self


class TraceConfig(Section):
    """Settings for recording the engine's requests, for `kvtier sim` and `kvtier replay`."""

    record: FilePath | None = None
    """Absolute directory for the recording; kvtier creates it if its parent exists.
    `{data_parallel_rank}` in the path becomes the engine's data-parallel rank, or 0."""
    file_size_bytes: Size = Field(
        default=64 << 20, validation_alias="file_size", serialization_alias="file_size"
    )
    """Largest size of one file of the recording."""
    files: int = Field(default=8, ge=1)
    """Number of files to keep. Older files are removed."""


class EngineConfig(Section):
    """Settings for what an engine stores: blocks per chunk, and KV of generated tokens."""

    blocks_per_chunk: int = Field(default=1, ge=1, le=65536)
    """Number of engine blocks per chunk. More blocks mean fewer, larger I/Os, coarser reuse."""
    store_decode: bool = True
    """Store the KV of generated tokens too. Conversations of several turns reuse this KV."""


class IdentityConfig(Section):
    """Engines share stored chunks only if these values, the model and the layout are equal."""

    name: Label | None = Field(default=None, min_length=1)
    """Name of the model, used in place of the engine's `--model`."""
    model_revision: Label | None = None
    """Revision of the weights, used if the engine has no `--revision`."""
    weights_epoch: int = Field(default=0, ge=0)
    """A number to raise when weights change under the same name. Older chunks are ignored."""


def _is_one(path: Path, other: Path) -> bool:
    return os.path.realpath(path) == os.path.realpath(other)


def _overlap(path: Path, other: Path) -> bool:
    one, two = Path(os.path.realpath(path)), Path(os.path.realpath(other))
    return one.is_relative_to(two) or two.is_relative_to(one)


def _as_tuple(value: Any) -> Any:  # noqa: ANN401 - pydantic's contract
    return tuple(value) if isinstance(value, list) else value


def _refuse(key: str, problem: str, remedy: str) -> None:
    """Raise an error about ``key``, which is a key of this section in the file."""
    context = {"problem": problem, "key": key, "remedy": remedy}
    raise PydanticCustomError("kvtier", "{key}: {problem}; {remedy}", context)


class KvtierConfig(Section):
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
    """Settings for recording the engine's requests, for `kvtier sim` and `kvtier replay`."""
    shadow: Annotated[tuple[str, ...], BeforeValidator(_as_tuple)] = ()
    """Eviction policies to simulate for each tier. They see keys only, and report hits."""
    engine: EngineConfig = Field(default_factory=EngineConfig)
    """Settings for what the engine stores."""
    identity: IdentityConfig = Field(default_factory=IdentityConfig)
    """Engines share stored chunks only if these values, the model and the layout are equal."""

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
        """Set the origin, which the loader passes as pydantic's context."""
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
        """Mode of GDS reads, from the tier that sets it; `off` if loads are staged."""
        if self.transfer.load_path == "staged":
            return "off"
        return next((mode for tier in self.tiers if (mode := _gds_of(tier)) != "off"), "off")

    @property
    def gds_tier(self) -> str | None:
        """Name of the tier with GDS reads; None if no tier has them."""
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
    def _recording_is_outside_the_caches(self) -> Self:
        record = self.trace.record
        for number, tier in enumerate(self.tiers):
            store = tier.local_directory()
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
        if any(other.is_shared for other in faster):
            _refuse(key, "below a shared tier", "put the shared tier last; there can be one")
        if number > 0 and tier.kind == "ram":
            _refuse(f"{key}.kind", "ram is a tier already", "keep one ram tier, the first")
        names = [other.name for other in faster]
        if tier.name in names:
            twin = names.index(tier.name)
            remedy = "add name: to one of them"
            _refuse(f"{key}.name", f"tiers[{twin}] has the same name", remedy)
        store = tier.local_directory()
        if store is not None:
            _check_directory(store, f"{key}.{store.key}", faster)


def _check_directory(store: LocalDirectory, key: str, faster: Iterable[TierConfig]) -> None:
    if (problem := path_problem(store.path)) is not None:
        _refuse(key, *problem)
    paths = [other.path for tier in faster if (other := tier.local_directory())]
    if any(_is_one(store.path, path) for path in paths):
        _refuse(key, "another tier has the same path", "use two directories")


def _gds_of(tier: TierConfig) -> GdsMode:
    return tier.gds if isinstance(tier, NvmeTierConfig) else "off"


def check_chunk_fits(config: KvtierConfig, chunk_nbytes: int) -> None:
    """Check that every tier has room for at least one chunk.

    Args:
        config: The configuration.
        chunk_nbytes: Number of bytes of one chunk on all ranks together.

    Raises:
        ConfigError: A tier is too small. The message has the tier's capacity and the needed
            size.
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
