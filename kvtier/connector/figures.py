"""The table of all figures (metrics) that kvtier reports: name, meaning, kind and source.

Each figure is a field of a class in this module, and the field's annotation is the figure's row
in the table. :mod:`kvtier.connector.metrics` makes the Prometheus metrics from the table, and
``docs/reference/metrics.md`` lists them. To add a figure of a tier, add a field to
:class:`TierFigures` and a row to that page.
"""

# The annotations are read at run time, so they must not be strings.

import enum
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, NamedTuple, get_type_hints

from kvtier.manager import ManagerSnapshot, TierSnapshot
from kvtier.recording import RecorderStatistics
from kvtier.transfer import ChannelStatistics

__all__ = [
    "EngineStatistics",
    "Figure",
    "Kind",
    "ShadowPolicyFigures",
    "StoreInfo",
    "TierFigures",
    "collect_statistics",
    "figures_of",
]


class Kind(enum.Enum):
    """How a figure changes."""

    COUNTER = "counter"
    """Only grows while the engine runs."""
    GAUGE = "gauge"
    """Has a current value, which may rise and fall."""
    HISTOGRAM = "histogram"
    """Counts observations by size."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One row of the table of figures.

    Attributes:
        kind: How the figure changes.
        help: Meaning of the figure in one sentence; empty if ``cause`` is set.
        source: Attribute path to the value of the figure.
        cause: Cause of the failed chunks that the figure counts; empty for other figures.
    """

    kind: Kind
    help: str = ""
    source: str = ""
    cause: str = ""


def _counter(source: str, text: str) -> Figure:
    return Figure(Kind.COUNTER, text, source)


def _gauge(source: str, text: str) -> Figure:
    return Figure(Kind.GAUGE, text, source)


def _failed(cause: str, source: str = "") -> Figure:
    return Figure(Kind.COUNTER, source=source, cause=cause)


class TierFigures(NamedTuple):
    """The figures of one tier: counters since the engine's start, and gauges."""

    name: str
    hit_chunks: Annotated[
        int,
        _counter(
            "tier.counters.hits",
            "Chunks loaded into the GPU, by source tier. A failed load counts the chunks "
            "before its failure.",
        ),
    ]
    hit_tokens: Annotated[
        int,
        _counter(
            "hit_tokens",
            "Prompt tokens not computed, by the tier their KV came from; rounded up to whole "
            "chunks.",
        ),
    ]
    miss_chunks: Annotated[
        int,
        _counter(
            "tier.counters.misses",
            "Missing chunks. The first chunk found in no tier counts once per request. In RAM, "
            "chunks found in a slower tier count too.",
        ),
    ]
    stranded_chunks: Annotated[
        int,
        _counter(
            "tier.counters.stranded",
            "Chunks in the tier that were computed because an earlier chunk was in no tier.",
        ),
    ]
    skipped_load_chunks: Annotated[
        int,
        _counter(
            "skipped_chunks",
            "Chunks computed because loading them was estimated to be slower or too late.",
        ),
    ]
    skipped_load_tokens: Annotated[
        int, _counter("skipped_tokens", "Prompt tokens of the chunks whose load was skipped.")
    ]
    stored_chunks: Annotated[
        int, _counter("tier.counters.stored", "Chunks that became resident in the tier.")
    ]
    evicted_chunks: Annotated[
        int, _counter("tier.counters.evicted", "Chunks evicted from the tier to make room.")
    ]
    followed_chunks: Annotated[
        int,
        _counter(
            "tier.counters.followed",
            "Evicted chunks that kvtier_evict_reuse_gap_seconds follows; a sample in a large "
            "tier.",
        ),
    ]
    promoted_chunks: Annotated[
        int, _counter("tier.counters.promoted", "Chunks promoted from the tier to RAM.")
    ]
    demoted_chunks: Annotated[
        int, _counter("tier.counters.demoted", "Chunks demoted from the tier to a slower one.")
    ]
    refused_chunks: Annotated[
        int,
        _counter("tier.counters.refused", "Chunks refused for lack of room or by the policy."),
    ]
    lost_chunks: Annotated[
        int,
        _counter(
            "tier.counters.lost", "Chunks of the tier that failed to reach a slower tier."
        ),
    ]
    unretained_chunks: Annotated[
        int,
        _counter(
            "tier.counters.unretained",
            "Chunks that a request asked to retain and that left RAM early.",
        ),
    ]
    dropped_chunks: Annotated[
        int,
        _counter(
            "tier.counters.dropped",
            "New chunks dropped because a disk was too slow: not sent to this tier or, for "
            "RAM, refused because chunks that wait for a slower tier filled it.",
        ),
    ]
    corrupt_chunks: Annotated[
        int,
        _counter(
            "tier.counters.corrupt",
            "Chunks dropped because their bytes differ from those stored.",
        ),
        _failed("corrupt"),
    ]
    missing_chunks: Annotated[int, _failed("missing", "tier.counters.missing")]
    failed_reads: Annotated[int, _failed("read", "tier.counters.read_failed")]
    failed_writes: Annotated[int, _failed("write", "tier.counters.failed")]
    failed_loads: Annotated[int, _failed("load", "tier.counters.load_failed")]
    expired_chunks: Annotated[int, _failed("expired", "tier.counters.expired")]
    shut_out_chunks: Annotated[int, _failed("refused", "tier.counters.shut_out")]
    read_bytes: Annotated[
        int, _counter("traffic.read_bytes", "Bytes read from the tier by completed transfers.")
    ]
    written_bytes: Annotated[
        int,
        _counter("traffic.written_bytes", "Bytes written to the tier by completed transfers."),
    ]
    transfer_seconds: Annotated[
        float,
        _counter("traffic.seconds", "Time spent in transfers of the tier, queueing excluded."),
    ]
    queue_seconds: Annotated[
        float, _counter("traffic.queued_s", "Time that transfers of the tier were queued.")
    ]
    questions: Annotated[
        int,
        _counter("traffic.questions", "Questions to a shared tier: which chunks has it?"),
    ]
    question_seconds: Annotated[
        float, _counter("traffic.question_s", "Time until a shared tier answered questions.")
    ]
    refused_jobs: Annotated[
        int,
        _counter("traffic.refused", "Transfers refused: queue full or tier out of service."),
    ]
    expired_jobs: Annotated[
        int, _counter("traffic.expired", "Transfers that missed their deadline.")
    ]
    capacity_chunks: Annotated[int, _gauge("tier.capacity", "Slots of the tier.")]
    used_chunks: Annotated[int, _gauge("tier.used", "Slots of the tier that are in use.")]
    held_chunks: Annotated[
        int, _gauge("tier.held", "Chunks that cannot be evicted at the moment.")
    ]
    dirty_chunks: Annotated[
        int, _gauge("tier.dirty", "Chunks that must still reach a slower tier.")
    ]
    queued_bytes: Annotated[
        int, _gauge("traffic.queued_bytes", "Bytes queued or running to and from the tier.")
    ]
    recovered_chunks: Annotated[
        int, _gauge("recovered", "Chunks of earlier engines that the tier had at start.")
    ]
    load_seconds_per_gb: Annotated[
        float,
        _gauge(
            "load_seconds_per_gb",
            "Estimated time to load a gigabyte from the tier; 0 before the first measurement.",
        ),
    ]
    out_of_service: Annotated[
        int,
        _gauge(
            "traffic.is_out_of_service",
            "1 while reads or writes of the tier are suspended after repeated failures.",
        ),
    ]


class StoreInfo(NamedTuple):
    """Describes where one tier keeps its chunks.

    Attributes:
        tier: The tier's name.
        kind: The tier's kind, such as ``ram``.
        namespace: Name of the directory within ``path`` for one model and layout.
        path: The cache directory; empty if the tier has no cache directory.
    """

    tier: str
    kind: str
    namespace: str
    path: str


@dataclass(frozen=True, slots=True)
class ShadowPolicyFigures:
    """The figures of one shadow policy in one tier, counted since the engine's start."""

    tier: str
    policy: str
    asked_chunks: Annotated[
        int, _counter("", "Chunks looked up in a shadow policy; a sample in a large tier.")
    ]
    hit_chunks: Annotated[int, _counter("", "Chunks that a shadow policy would have had.")]
    hit_ratio: Annotated[
        float,
        _gauge("", "Share of lookups that a shadow policy would have hit, since the start."),
    ]


@dataclass(frozen=True, slots=True)
class EngineStatistics:
    """All figures of one engine.

    Attributes:
        tiers: Fastest first.
        shadows: Shadow policies, tier by tier.
        stores: For each tier, where the tier keeps its chunks; constant.
    """

    tiers: Sequence[TierFigures]
    waiting_requests: Annotated[
        int, _gauge("", "Requests that wait for promotions to RAM, or for their turn.")
    ]
    granted_chunks: Annotated[int, _gauge("", "RAM slots granted to waiting requests.")]
    retained_chunks: Annotated[
        int, _gauge("", "RAM slots of chunks retained until a deadline.")
    ]
    recompute_seconds_per_token: Annotated[
        float,
        _gauge(
            "",
            "Estimated time to compute a prompt token; 0 before the first measurement.",
        ),
    ]
    pageable_ranks: Annotated[
        int,
        _gauge("", "Workers whose copies are slow because the RAM tier is not page-locked."),
    ]
    gds_ranks: Annotated[
        int,
        _gauge("", "Workers that read chunks from an NVMe tier straight into their GPU."),
    ]
    internal_errors: Annotated[
        int,
        _counter(
            "", "Unexpected errors in kvtier, treated as misses; anything but 0 is a bug."
        ),
    ]
    trace_records: Annotated[int, _counter("", "Records written to the trace.")]
    trace_dropped: Annotated[int, _counter("", "Records of the trace that were dropped.")]
    shadows: Sequence[ShadowPolicyFigures]
    stores: Sequence[StoreInfo] = ()


def figures_of(owner: type[Any]) -> Iterator[tuple[str, Figure]]:
    """Yield the field name and the :class:`Figure` of each figure in ``owner``, in order."""
    for field, hint in get_type_hints(owner, include_extras=True).items():
        for figure in getattr(hint, "__metadata__", ()):
            yield field, figure


def _reader_of_tiers() -> Callable[[object], tuple[Any, ...]]:
    """Return a function that reads the values of all :class:`TierFigures` fields at once."""
    sources = {field: each.source for field, each in figures_of(TierFigures) if each.source}
    assert tuple(sources) == TierFigures._fields[1:], "every figure has one source"
    return operator.attrgetter("tier.name", *sources.values())


_read_tier: Final = _reader_of_tiers()


@dataclass(slots=True)
class _Traffic:
    """The transfers of one tier, summed over its channels."""

    read_bytes: int = 0
    written_bytes: int = 0
    seconds: float = 0.0
    queued_s: float = 0.0
    queued_bytes: int = 0
    refused: int = 0
    expired: int = 0
    is_out_of_service: int = 0
    questions: int = 0
    question_s: float = 0.0


@dataclass(frozen=True, slots=True)
class _TierSources:
    """The objects that hold the figures of one tier."""

    tier: TierSnapshot
    traffic: _Traffic
    hit_tokens: int
    skipped_chunks: int
    skipped_tokens: int
    load_seconds_per_gb: float
    recovered: int


def collect_statistics(  # noqa: PLR0913 - one keyword for each source
    manager: ManagerSnapshot,
    channels: Mapping[tuple[str, str], ChannelStatistics],
    *,
    tokens_per_chunk: int,
    pageable_ranks: int,
    gds_ranks: int,
    internal_errors: int,
    shadows: Sequence[ShadowPolicyFigures],
    recorder: RecorderStatistics | None,
    recovered: Mapping[str, int],
    stores: Sequence[StoreInfo],
) -> EngineStatistics:
    """Collect the figures of one engine from the objects that count them.

    Args:
        manager: The manager's snapshot.
        channels: Transfers between tiers, by (source, destination).
        tokens_per_chunk: Number of tokens of a chunk of the counting group.
        pageable_ranks: Number of workers that could not page-lock the RAM tier.
        gds_ranks: Number of workers that can read chunks from an NVMe tier straight into their
            GPU.
        internal_errors: Number of unexpected errors so far.
        shadows: Shadow policies, tier by tier.
        recorder: The recorder's figures; None without a recorder.
        recovered: Number of chunks found at the start, by tier name.
        stores: Where the tiers keep chunks.
    """
    model = manager.cost_model
    fastest = manager.tiers[0].name
    tiers = []
    for number, tier in enumerate(manager.tiers):
        price = model.load_costs[number]
        sources = _TierSources(
            tier=tier,
            traffic=_traffic(tier.name, channels, fastest),
            hit_tokens=tier.counters.prompt_hits * tokens_per_chunk,
            skipped_chunks=model.skipped_chunks[number],
            skipped_tokens=model.skipped_tokens[number],
            load_seconds_per_gb=0.0 if price is None else price.seconds(10**9),
            recovered=recovered.get(tier.name, 0),
        )
        tiers.append(TierFigures._make(_read_tier(sources)))
    return EngineStatistics(
        tiers=tiers,
        waiting_requests=manager.waiting,
        granted_chunks=manager.granted,
        retained_chunks=manager.retained,
        recompute_seconds_per_token=model.recompute_s_per_token or 0.0,
        pageable_ranks=pageable_ranks,
        gds_ranks=gds_ranks,
        internal_errors=internal_errors,
        trace_records=0 if recorder is None else recorder.written,
        trace_dropped=0 if recorder is None else recorder.dropped,
        shadows=shadows,
        stores=stores,
    )


def _traffic(
    tier: str, channels: Mapping[tuple[str, str], ChannelStatistics], fastest: str
) -> _Traffic:
    total = _Traffic()
    for ends, channel in channels.items():
        if tier not in ends:
            continue
        is_question = ends[0] == ends[1]
        if is_question:
            total.questions += channel.jobs
            total.question_s += channel.seconds
        else:
            total.read_bytes += channel.nbytes if tier == ends[0] else 0
            total.written_bytes += channel.nbytes if tier == ends[1] else 0
            total.seconds += channel.seconds
            total.queued_s += channel.queued_s
        total.queued_bytes += channel.queued_bytes
        total.refused += channel.refused
        total.expired += channel.expired
        # A suspended channel between two slower tiers does not suspend either tier.
        if channel.out_of_service and tier != fastest and (is_question or fastest in ends):
            total.is_out_of_service = 1
    return total
