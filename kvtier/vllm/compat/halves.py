"""vLLM's own offloading halves, of which kvtier reads what is nobody's interface.

What is read of their state is looked for by name. What follows from how they work cannot be
looked for: it was read in their source, so they are known by that.
"""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from kvtier.vllm.compat.checks import Load, missing_members

__all__ = [
    "blocks_can_be_struck_out",
    "bounds_aborted",
    "event_payloads",
    "half_is_known",
    "loads_before_the_pass",
    "moving_states",
    "offers_can_be_bounded",
    "offers_can_be_repeated",
    "offers_late",
    "parts_go_astray",
    "source_was_read",
    "uses_second_runner",
    "writes_to_blocks_first",
]

_PACKAGE: Final = "vllm.distributed.kv_transfer.kv_connector"
_SCHEDULER: Final = f"{_PACKAGE}.v1.offloading.scheduler"
_MODULES: Final = (
    f"{_PACKAGE}.utils",
    f"{_PACKAGE}.v1.offloading_connector",
    f"{_PACKAGE}.v1.offloading.common",
    _SCHEDULER,
    f"{_PACKAGE}.v1.offloading.worker",
)
_DIGESTS: Final[Mapping[str, str]] = {
    "bfeabaf72a0c724bd0c0bdf4fa62113cb8145081fe1ab39e5dbcd43744192580": "0.31.0",
    "d301233e72f46e78529e962272ad1b3b052041c6e94dd4e9f9aad83e3e75e53c": "0.32.0",
}
"""Releases whose source was read, by the digest of these modules."""

_STATE: Final[Mapping[str, tuple[str, ...]]] = {
    "RequestOffloadState": (
        "group_states",
        "num_locally_computed_tokens",
        "partial_tail_boundary",
        "req",
        "req_context",
        "transfer_jobs",
    ),
    "RequestGroupState": ("next_stored_chunk_idx", "offload_keys"),
    "SchedulerOffloadConfig": ("kv_group_configs", "tokens_per_hash"),
    "GroupOffloadConfig": ("tokens_per_block", "tokens_per_chunk"),
}
"""What is read of the scheduler half's state to load within the forward pass."""

_LIMITS: Final[Mapping[str, tuple[str, ...]]] = {"RequestOffloadState": ("max_offload_tokens",)}
"""What is read of it to bound what is offered of a request."""

_JOBS: Final[Mapping[str, tuple[str, ...]]] = {
    "RequestOffloadState": ("req", "transfer_jobs"),
    "TransferJobStatus": ("is_store",),
}
"""What is read of it to leave that to the half."""

_PLACES: Final[Mapping[str, tuple[str, ...]]] = {
    "RequestOffloadState": (
        "group_states",
        "num_locally_computed_tokens",
        "req",
        "transfer_jobs",
    ),
    "RequestGroupState": ("next_stored_chunk_idx",),
    "SchedulerOffloadConfig": ("kv_group_configs",),
    "GroupOffloadConfig": ("tokens_per_block", "tokens_per_chunk"),
}
"""What is read of it to let a request offer again what it computes after a failed load."""

_TABLES: Final[Mapping[str, tuple[str, ...]]] = {
    "RequestOffloadState": ("group_states",),
    "RequestGroupState": ("block_ids", "next_stored_chunk_idx"),
    "SchedulerOffloadConfig": ("blocks_per_chunk", "kv_group_configs"),
    "GroupOffloadConfig": ("group_idx", "sliding_window_size_in_chunks"),
}
"""What is read of it to strike out blocks that are not a request's any more."""


def source_was_read(load: Load = importlib.import_module) -> bool:
    """Return whether the installed vLLM's halves are some whose source was read.

    Args:
        load: Imports a module by name.
    """
    digest = hashlib.sha256()
    for name in _MODULES:
        try:
            source = Path(load(name).__file__)
            digest.update(hashlib.sha256(source.read_bytes()).digest())
        except (ImportError, OSError, TypeError):
            return False  # it is not there, or not as a file of source
    return digest.hexdigest() in _DIGESTS


def half_is_known(half: object, load: Load = importlib.import_module) -> bool:
    """Return whether all that loads within the forward pass read of a half is there.

    Args:
        half: vLLM's ``OffloadingConnectorScheduler``.
        load: Imports a module by name.
    """
    return _has(half, ("_jobs", "_req_status"), _STATE, load)


def offers_can_be_bounded(half: object, load: Load = importlib.import_module) -> bool:
    """Return whether a half keeps, for each request, a limit to what it offers of it.

    Args:
        half: vLLM's ``OffloadingConnectorScheduler``.
        load: Imports a module by name.
    """
    return _has(half, ("_req_status",), _LIMITS, load)


def bounds_aborted(half: object, load: Load = importlib.import_module) -> bool:
    """Return whether a half offers no more of an aborted request than was computed.

    Since 0.30, whose half also stores the tail of each sliding window before that end.

    Args:
        half: vLLM's ``OffloadingConnectorScheduler``.
        load: Imports a module by name.
    """
    return _has(half, ("_final_swa_alignment_blocks", "_jobs"), _JOBS, load)


def offers_can_be_repeated(half: object, load: Load = importlib.import_module) -> bool:
    """Return whether a half keeps how far each request was offered, and its jobs.

    Args:
        half: vLLM's ``OffloadingConnectorScheduler``.
        load: Imports a module by name.
    """
    return _has(half, ("_jobs", "_req_status", "config"), _PLACES, load)


def blocks_can_be_struck_out(half: object, load: Load = importlib.import_module) -> bool:
    """Return whether a half keeps each request's block tables, and how far it passed them.

    Args:
        half: vLLM's ``OffloadingConnectorScheduler``.
        load: Imports a module by name.
    """
    members = ("_current_batch_allocated_block_ids", "_req_status", "config")
    return _has(half, members, _TABLES, load)


def offers_late(
    vllm_config: Any,  # noqa: ANN401 - vLLM's
    groups: Iterable[tuple[int, Any]],
    *,
    blocks_per_chunk: int,
    load: Load = importlib.import_module,
) -> bool:
    """Return whether a half offers chunks of a window late: some that it had passed over.

    Since 0.30, where all ends of windows are kept that a chunk of full attention may end with.
    Between two of these ends there must be a whole chunk of the window, to be passed over.

    Args:
        vllm_config: vLLM's configuration.
        groups: Per KV cache group, the tokens of a block and what its layers keep; not looked
            at where vLLM is configured otherwise.
        blocks_per_chunk: Blocks of a chunk.
        load: Imports a module by name.
    """
    half = getattr(load(_SCHEDULER), "OffloadingConnectorScheduler", None)
    interval = getattr(vllm_config.cache_config, "prefix_cache_retention_interval", 0)
    if interval is not None or not hasattr(half, "_final_swa_alignment_blocks"):
        return False
    kinds = load("vllm.v1.kv_cache_interface")
    known = list(groups)
    full = {tokens for tokens, kind in known if isinstance(kind, kinds.FullAttentionSpec)}
    if len(full) > 1:
        return False  # then it offers all
    apart_tokens = blocks_per_chunk * max(full or (tokens for tokens, _ in known))

    def passes_over(tokens: int, kind: Any) -> bool:  # noqa: ANN401 - vLLM's
        seen = kind.sliding_window - 1 + getattr(kind, "extra_retained_tokens", 0)
        blocks = -(-seen // tokens) + blocks_per_chunk
        return apart_tokens % tokens == 0 and blocks <= apart_tokens // tokens

    return any(
        isinstance(kind, kinds.SlidingWindowSpec) and passes_over(tokens, kind)
        for tokens, kind in known
    )


def _has(
    half: object, members: Sequence[str], state: Mapping[str, Sequence[str]], load: Load
) -> bool:
    """Return whether a half has ``members``, and its state's classes those named for each."""
    module = load(_SCHEDULER)
    classes = ((getattr(module, name, None), names) for name, names in state.items())
    return not any(
        missing_members(thing, *names) for thing, names in [(half, members), *classes]
    )


def event_payloads(half: object) -> dict[Any, Any] | None:
    """Return what a half knows of the chunks its events name, to be changed in place.

    Args:
        half: vLLM's ``OffloadingConnectorScheduler``.

    Returns:
        By key; None where its events do not describe themselves.
    """
    tracker = getattr(half, "_events_tracker", None)
    payloads = getattr(tracker, "_pending_event_metadata", None)
    return payloads if isinstance(payloads, dict) else None


def loads_before_the_pass(connector: type[Any], output: type[Any]) -> bool:
    """Return whether vLLM starts the loads of a step before its forward pass.

    Args:
        connector: The base class of vLLM's connectors.
        output: What vLLM's scheduler decides for a step.
    """
    return hasattr(connector, "bind_kv_cache_manager") and not missing_members(
        output, "has_sync_kv_loads"
    )


def parts_go_astray(
    vllm_config: Any,  # noqa: ANN401 - vLLM's
    kv_cache_config: Any,  # noqa: ANN401 - vLLM's
) -> bool:
    """Return whether vLLM may compute the later parts of a prompt from what is not theirs.

    A request whose prompt comes in parts goes on without the last token that it generated. Its
    state has that token in it where the next step was under way; and where that is not so, the
    tokens that were accepted behind the last one count as computed.

    Args:
        vllm_config: vLLM's configuration.
        kv_cache_config: The engine's KV cache groups.
    """
    ahead = bool(vllm_config.scheduler_config.async_scheduling)
    guesses = vllm_config.speculative_config is not None
    has_states = bool(getattr(kv_cache_config, "has_mamba_layers", False))
    return has_states if ahead else guesses


def writes_to_blocks_first(
    vllm_config: Any,  # noqa: ANN401 - vLLM's
    kv_cache_config: Any,  # noqa: ANN401 - vLLM's
) -> bool:
    """Return whether workers write to blocks before they end the stores that read them.

    Model Runner V2 does so with blocks that are to be cleared, and with those that states move
    into (:func:`moving_states`); where there are states, blocks are cleared.

    Args:
        vllm_config: vLLM's configuration.
        kv_cache_config: The engine's KV cache groups.
    """
    clears = bool(getattr(kv_cache_config, "needs_kv_cache_zeroing", False))
    return clears and uses_second_runner(vllm_config)


def moving_states(kv_cache_config: Any) -> dict[int, int]:  # noqa: ANN401 - vLLM's
    """Return the groups whose states move from block to block, with the tokens of a block.

    With ``mamba_cache_mode: align`` a request's state is left in a full block, and goes on in
    a copy in the next one.

    Args:
        kv_cache_config: The engine's KV cache groups.
    """
    kinds = (group.kv_cache_spec for group in kv_cache_config.kv_cache_groups)
    return {
        number: int(kind.block_size)
        for number, kind in enumerate(kinds)
        if getattr(kind, "mamba_cache_mode", None) == "align"
    }


def uses_second_runner(vllm_config: Any) -> bool:  # noqa: ANN401 - vLLM's
    """Return whether workers run the model with Model Runner V2."""
    return bool(getattr(vllm_config, "use_v2_model_runner", False))
