"""Which vLLM this is: told by its features, never by its version string.

Forks and nightlies carry any version, and vLLM changes its offloading contract in most
releases. So whatever differs between two of the releases kvtier works with is looked up here,
and only here; what all of them have is imported by :mod:`kvtier.vllm.contract`.

========  ====================================================================================
release   what came with it, and what kvtier does about its absence
========  ====================================================================================
0.25      ``get_worker``, ``LookupResult``: without them vLLM is refused
0.26      ``OffloadingConfig``: read from vLLM's own configuration before; the key
          ``blocks_per_chunk`` is set on the spec, whose base knows only ``block_size``
0.27      ``Medium``: events carried strings before
0.28      ``canonical_layout``: nobody can have asked for it before; the KV cache's element type
          also where it is the model's
0.29      ``kv_cache_layout``: before, a worker tells what both follow from; a constant hash
          seed: before, PYTHONHASHSEED must be set
0.30      ``group_id``: a group's index before; ``CHUNK_LEVEL``: it was called
          ``BLOCK_LEVEL``; ``has_sync_kv_loads``: without it no load happens within the forward
          pass
0.32      ``CacheHitSource``: nobody asked for it before
0.33      ``submit_load(expedited)``: kvtier copies at once either way; ``lock``,
          ``on_reset_flushed`` and ``config_info`` have defaults that suit a manager entered
          from one thread that knows by itself when a slot is quiet
========  ====================================================================================

What cannot be recognised is refused when the engine starts. A method that a newer vLLM made
abstract, or calls with an argument kvtier does not take, would otherwise end the engine in the
middle of a request.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from kvtier.errors import UnsupportedError
from kvtier.keys import counting_group

__all__ = [
    "FULL_GROUPS",
    "EngineFacts",
    "adopt_chunk_size",
    "chunk_level",
    "full_attention_groups",
    "hashes_are_seeded_at_random",
    "hit_pending",
    "hit_sources",
    "kv_content",
    "media",
    "missing_members",
    "read_engine",
    "refusal",
    "require_members",
    "require_supported_vllm",
]

FULL_GROUPS = "kvtier_full_attention_groups"
"""Under this name the connector tells its spec :func:`full_attention_groups`."""
SUPPORTED = "kvtier works with vLLM 0.25 to 0.33"

Load = Callable[[str], Any]
"""Imports a module by name; tests pass modules of their own making."""

_BASE = "vllm.v1.kv_offload.base"
_CONFIG = "vllm.v1.kv_offload.config"
_NEEDED: Mapping[str, Sequence[str]] = {
    _BASE: (
        "CanonicalKVCaches",
        "GPULoadStoreSpec",
        "LoadStoreSpec",
        "LookupResult",
        "OffloadKey",
        "OffloadPolicy",
        "OffloadingCounterMetadata",
        "OffloadingEvent",
        "OffloadingGaugeMetadata",
        "OffloadingHistogramMetadata",
        "OffloadingManager",
        "OffloadingMetricMetadata",
        "OffloadingSpec",
        "OffloadingWorker",
        "PrepareStoreOutput",
        "ReqContext",
        "RequestOffloadingContext",
        "ScheduleEndContext",
        "TransferResult",
    ),
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics": (
        "OffloadingConnectorStats",
    ),
}


# -- refusals ----------------------------------------------------------------------------------


def require_supported_vllm(*doors: type[Any], load: Load = importlib.import_module) -> None:
    """Check the installed vLLM against what ``doors`` implement.

    Args:
        doors: kvtier's implementations of vLLM's abstract classes.
        load: Imports a module.

    Raises:
        UnsupportedError: The contract differs; says where, and which versions work.
    """
    problems = [*_missing(load), *(problem for door in doors for problem in _unmet(door))]
    if problems:
        raise UnsupportedError(f"this vLLM {'; it '.join(problems)}: {SUPPORTED}")


def refusal(error: ImportError, *, load: Load = importlib.import_module) -> UnsupportedError:
    """Return what to raise when the contract could not be imported.

    Args:
        error: Why not.
        load: Imports a module.
    """
    problems = list(_missing(load)) or [f"cannot be imported ({error})"]
    return UnsupportedError(f"this vLLM {'; it '.join(problems)}: {SUPPORTED}")


def _missing(load: Load) -> Iterator[str]:
    for module_name, names in _NEEDED.items():
        try:
            module = load(module_name)
        except ImportError as error:
            yield f"has no usable {module_name} ({error})"
            continue
        missing = [name for name in names if not hasattr(module, name)]
        if missing:
            yield f"has no {', '.join(missing)} in {module_name}"


def _unmet(door: type[Any]) -> Iterator[str]:
    """Say what the base classes of ``door`` ask for and it does not do."""
    unknown = sorted(getattr(door, "__abstractmethods__", ()))
    if unknown:
        yield f"asks {door.__name__} for {', '.join(unknown)}, which kvtier does not know"
    for base in door.__mro__[1:]:
        for name, theirs in vars(base).items():
            ours = vars(door).get(name)
            if name.startswith("__") or not (
                inspect.isfunction(theirs) and inspect.isfunction(ours)
            ):
                continue
            if not _takes(ours, theirs):
                yield (
                    f"calls {door.__name__}.{name}{_untyped(theirs)}, and kvtier's takes "
                    f"{_untyped(ours)}"
                )


def _untyped(method: Callable[..., Any]) -> inspect.Signature:
    signature = inspect.signature(method)
    return inspect.Signature(
        [each.replace(annotation=each.empty) for each in signature.parameters.values()]
    )


def _takes(ours: Callable[..., Any], theirs: Callable[..., Any]) -> bool:
    """Return whether any call that fits ``theirs``, by place or by name, fits ``ours``."""
    pairs = zip_longest(
        inspect.signature(ours).parameters.values(),
        inspect.signature(theirs).parameters.values(),
    )
    return all(
        mine is not None
        and (
            (yours is None and mine.default is not mine.empty)
            or (yours is not None and yours.name == mine.name and _as_optional(mine, yours))
        )
        for mine, yours in pairs
    )


def _as_optional(mine: inspect.Parameter, yours: inspect.Parameter) -> bool:
    return yours.default is yours.empty or mine.default is not mine.empty


def require_members(thing: object, *names: str) -> None:
    """Check that what kvtier reads of vLLM's own state, which is nobody's interface, is there.

    Args:
        thing: An object of vLLM's, or a dataclass or named tuple of it.
        names: Its attributes, or fields.

    Raises:
        UnsupportedError: One is not; says which.
    """
    missing = missing_members(thing, *names)
    if missing:
        kind = thing if isinstance(thing, type) else type(thing)
        raise UnsupportedError(
            f"this vLLM's {kind.__name__} has no {', '.join(missing)}: {SUPPORTED}"
        )


def missing_members(thing: object, *names: str) -> list[str]:
    """Return which of ``names`` are no attribute of ``thing``, or no field if it is a type."""
    if isinstance(thing, type):
        fields = {*getattr(thing, "__dataclass_fields__", ()), *getattr(thing, "_fields", ())}
        return [name for name in names if name not in fields]
    return [name for name in names if not hasattr(thing, name)]


# -- names that changed ------------------------------------------------------------------------


def chunk_level(policies: Any) -> Any:  # noqa: ANN401 - an enumeration of vLLM's
    """Return the policy that offers a request's chunks one by one, of vLLM's enumeration.

    Raises:
        UnsupportedError: It has neither of the names known.
    """
    for name in ("CHUNK_LEVEL", "BLOCK_LEVEL"):
        if hasattr(policies, name):
            return getattr(policies, name)
    raise UnsupportedError(f"this vLLM's OffloadPolicy has no CHUNK_LEVEL: {SUPPORTED}")


def hit_pending(results: Any) -> Any:  # noqa: ANN401 - an enumeration of vLLM's
    """Return the answer for a chunk that is there but not loadable yet, of vLLM's enumeration.

    Where there is none it is the one for a chunk of which nothing is known yet: what is asked
    for is then more than a sliding window needs.
    """
    return getattr(results, "HIT_PENDING", results.RETRY)


def media(load: Load = importlib.import_module) -> tuple[Any, Any]:
    """Return what vLLM's residency events call host memory and storage."""
    medium = getattr(load(_BASE), "Medium", None)
    return ("CPU", "STORAGE") if medium is None else (medium.CPU, medium.STORAGE)


def hit_sources(load: Load = importlib.import_module) -> tuple[Any, Any]:
    """Return what vLLM calls hits in host memory and on disk; None where it does not ask."""
    try:
        sources = load("vllm.v1.metrics.cache_hit_source").CacheHitSource
    except ImportError:
        return None, None
    return sources.HOST, sources.DISK


def hashes_are_seeded_at_random(load: Load = importlib.import_module) -> bool:
    """Return whether the next engine will hash blocks otherwise unless PYTHONHASHSEED is set.

    To be asked when the first request arrives: vLLM seeds its hashes after it built the
    connector.
    """
    hashing = load("vllm.v1.core.kv_cache_utils")
    constant = getattr(hashing, "DEFAULT_NONE_HASH_SEED", None)
    return constant is None or getattr(hashing, "_NONE_HASH_SEED", None) not in {None, constant}


# -- the engine's configuration ----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What kvtier needs to know of the engine it serves, whatever vLLM calls it.

    Attributes:
        engine_id: The engine's name; the same in all its processes.
        extra_config: What ``kv_connector_extra_config`` says.
        records_events: Whether somebody listens to residency events.
        model_name: The model as it was given: a path or a hub's name.
        kv_dtype: Element type of the KV cache.
        kv_layout: How a block's bytes are laid out; None where vLLM does not tell a spec, and
            :func:`kv_content` does.
        canonical_layout: Whether vLLM was asked for its parallelism-free pages.
        groups: Per KV cache group, the tokens of a block and the names of the layers.
        group_ids: What each is called in keys.
        counting_group: Which of these is the :func:`~kvtier.keys.counting_group`.
        tokens_per_hash: Tokens that one block hash covers.
        blocks_per_chunk: Blocks that are stored together.
        worker_kv_bytes_per_block: Bytes one worker keeps for a block, all layers.
        rank: This worker; 0 in the scheduler's process.
        world_size: Workers.
        tp_size: Workers that share every layer.
        pp_size: Stages the layers are split into.
        pcp_size: Workers that share a prompt's prefill.
        dcp_size: Workers that share a sequence's decode.
    """

    engine_id: str
    extra_config: Mapping[str, Any]
    records_events: bool
    model_name: str
    kv_dtype: str
    kv_layout: str | None
    canonical_layout: bool
    groups: tuple[tuple[int, tuple[str, ...]], ...]
    group_ids: tuple[int, ...]
    counting_group: int
    tokens_per_hash: int
    blocks_per_chunk: int
    worker_kv_bytes_per_block: int
    rank: int
    world_size: int
    tp_size: int
    pp_size: int
    pcp_size: int
    dcp_size: int

    @property
    def chunk_tokens(self) -> int:
        """Tokens of a chunk of the counting group."""
        tokens_per_block, _ = self.groups[self.group_ids.index(self.counting_group)]
        return tokens_per_block * self.blocks_per_chunk


def adopt_chunk_size(spec: Any, arguments: Sequence[Any]) -> None:  # noqa: ANN401 - a spec
    """Give a spec of vLLM 0.25 the chunk size that later ones read from the configuration.

    Args:
        spec: kvtier's spec, whose base class was just initialised.
        arguments: What vLLM built it with.
    """
    wanted = spec.extra_config.get("blocks_per_chunk")
    if len(arguments) == 2 and wanted is not None:
        spec.block_size_factor = int(wanted)


def read_engine(
    spec: Any,  # noqa: ANN401 - a spec
    arguments: Sequence[Any],
    *,
    load: Load = importlib.import_module,
) -> EngineFacts:
    """Return what kvtier needs to know of the engine.

    Args:
        spec: kvtier's spec, whose base class was just initialised.
        arguments: What vLLM built it with: its offloading configuration, or its own
            configuration and that of its KV cache.
        load: Imports a module.

    Raises:
        UnsupportedError: They are something else.
    """
    try:
        if len(arguments) == 1:
            return _from_offloading_config(arguments[0])
        if len(arguments) == 2:
            vllm_config, kv_cache_config = arguments
            full = full_attention_groups(kv_cache_config, load=load)
            return _from_vllm_config(spec, vllm_config, kv_cache_config, full)
    except AttributeError as error:
        raise UnsupportedError(
            f"this vLLM's configuration is not one kvtier can read ({error}): {SUPPORTED}"
        ) from error
    kinds = ", ".join(type(argument).__name__ for argument in arguments)
    raise UnsupportedError(f"this vLLM builds an offloading spec from ({kinds}): {SUPPORTED}")


def _from_offloading_config(config: Any) -> EngineFacts:  # noqa: ANN401 - vLLM's
    parallel = config.parallel
    group_ids = tuple(
        getattr(group, "group_id", at)  # named since 0.30
        for at, group in enumerate(config.groups)
    )
    return EngineFacts(
        engine_id=config.engine_id,
        extra_config=config.extra_config,
        records_events=config.enable_kv_cache_events,
        model_name=config.model.name,
        kv_dtype=config.model.dtype,
        kv_layout=(config.kv_cache_layout or "")
        if hasattr(config, "kv_cache_layout")
        else None,
        canonical_layout=getattr(config, "canonical_layout", False),
        groups=tuple(
            (group.tokens_per_block, tuple(group.layer_names)) for group in config.groups
        ),
        group_ids=group_ids,
        counting_group=_counting_group(
            group_ids, config.extra_config.get(FULL_GROUPS, group_ids)
        ),
        tokens_per_hash=config.cache.tokens_per_hash,
        blocks_per_chunk=config.cache.blocks_per_chunk,
        worker_kv_bytes_per_block=config.worker_kv_bytes_per_block,
        rank=parallel.rank,
        world_size=parallel.world_size,
        tp_size=parallel.tp_size,
        pp_size=parallel.pp_size,
        pcp_size=parallel.pcp_size,
        dcp_size=parallel.dcp_size,
    )


def _from_vllm_config(
    spec: Any,  # noqa: ANN401 - a spec
    vllm_config: Any,  # noqa: ANN401 - vLLM's
    kv_cache_config: Any,  # noqa: ANN401 - vLLM's
    full_groups: Collection[int],
) -> EngineFacts:
    parallel = vllm_config.parallel_config
    groups = zip(spec.gpu_block_size, kv_cache_config.kv_cache_groups, strict=True)
    group_ids = tuple(range(len(kv_cache_config.kv_cache_groups)))
    return EngineFacts(
        engine_id=vllm_config.kv_transfer_config.engine_id,
        extra_config=spec.extra_config,
        records_events=spec.kv_events_config.enable_kv_cache_events,
        model_name=vllm_config.model_config.model,
        kv_dtype=str(vllm_config.cache_config.cache_dtype).removeprefix("torch."),
        kv_layout=None,
        canonical_layout=False,
        groups=tuple((tokens, tuple(group.layer_names)) for tokens, group in groups),
        group_ids=group_ids,
        counting_group=_counting_group(group_ids, full_groups),
        tokens_per_hash=spec.hash_block_size,
        blocks_per_chunk=spec.block_size_factor,
        worker_kv_bytes_per_block=_bytes_per_block(kv_cache_config),
        rank=parallel.rank,
        world_size=parallel.world_size,
        tp_size=parallel.tensor_parallel_size,
        pp_size=parallel.pipeline_parallel_size,
        pcp_size=parallel.prefill_context_parallel_size,
        dcp_size=parallel.decode_context_parallel_size,
    )


def full_attention_groups(
    kv_cache_config: Any,  # noqa: ANN401 - vLLM's
    *,
    load: Load = importlib.import_module,
) -> list[int]:
    """Return the indices of the KV cache groups whose layers read the whole prefix.

    Since 0.26 a spec is told the groups but not this. A connector is, and tells its spec.
    """
    full = load("vllm.v1.kv_cache_interface").FullAttentionSpec
    kinds = (group.kv_cache_spec for group in kv_cache_config.kv_cache_groups)
    return [number for number, kind in enumerate(kinds) if isinstance(_of_a_layer(kind), full)]


def _of_a_layer(kind: Any) -> Any:  # noqa: ANN401 - vLLM's
    """Return what a group's layers keep, all of one type, for the first of them."""
    each = getattr(kind, "kv_cache_specs", None)
    return next(iter(each.values())) if each else kind


def _counting_group(group_ids: Sequence[int], full_groups: Collection[int]) -> int:
    return counting_group({group: group in full_groups for group in group_ids})


def _bytes_per_block(kv_cache_config: Any) -> int:  # noqa: ANN401 - vLLM's
    """Return what one worker keeps for a block, all layers."""
    tensors = kv_cache_config.kv_cache_tensors
    if not kv_cache_config.num_blocks:
        return 0
    # A tensor with a block stride is a window into one allocation that holds all of them.
    packed = any(tensor.block_stride for tensor in tensors)
    nbytes = tensors[0].size if packed else sum(tensor.size for tensor in tensors)
    return int(nbytes // kv_cache_config.num_blocks)


def kv_content(engine: EngineFacts, *, load: Load = importlib.import_module) -> str:
    """Return what stored bytes are, in a vLLM that does not tell a spec.

    To be asked where a worker registers its KV memory. The layout and the element type then
    follow from the attention backends, a setting, the model and vLLM's version, so a store is
    bound to these: who changes one finds an empty store, not bytes that mean something else.

    Args:
        engine: The engine.
        load: Imports a module.

    Returns:
        Nothing where ``engine.kv_layout`` says it.

    Raises:
        UnsupportedError: vLLM does not say here either.
    """
    if engine.kv_layout is not None:
        return ""
    config = load("vllm.config").get_current_vllm_config_or_none()
    try:
        layers = config.compilation_config.static_forward_context
        names = [name for _, group in engine.groups for name in group]
        backends = sorted({layers[name].get_attn_backend().get_name() for name in names})
        layout = load("vllm.v1.attention.backends.utils").get_kv_cache_layout()
        what = (layout, *backends, str(config.model_config.dtype), load("vllm").__version__)
    except (AttributeError, KeyError) as error:
        raise UnsupportedError(
            f"this vLLM does not say how its KV cache is laid out ({error!r}): {SUPPORTED}"
        ) from error
    return " ".join(map(str, what))
