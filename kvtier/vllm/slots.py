"""How slots are laid out for vLLM's KV memory; only a worker can tell."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from kvtier.config import KvtierConfig, check_chunk_fits, slot_nbytes
from kvtier.errors import UnsupportedError
from kvtier.logs import get_logger
from kvtier.memory import RegionGeometry
from kvtier.memory.slot_layout import STRIPES, PageMapping, RankShare, shard_of, share_pages
from kvtier.transfer import relay_slots
from kvtier.vllm.compat import EngineFacts, page_mapping

if TYPE_CHECKING:
    import torch

    from kvtier.vllm.contract import CanonicalKVCaches

__all__ = ["lay_out_slots", "require_same_file"]

logger = get_logger(__name__)


def lay_out_slots(
    engine: EngineFacts, config: KvtierConfig, kv_caches: CanonicalKVCaches, *, content: str
) -> tuple[RegionGeometry, RankShare]:
    """Return the shape of the RAM tier and this rank's part of each slot.

    Slots are portable, so that an engine with another number of ranks finds the same bytes,
    wherever vLLM says of every layer how its pages are split over the ranks. All ranks come to
    the same answer: vLLM says it of all of them or of none.

    Args:
        engine: The engine.
        config: kvtier's configuration.
        kv_caches: This rank's KV memory.
        content: What its bytes are (:func:`~kvtier.vllm.compat.kv_content`).

    Raises:
        ConfigError: A tier is smaller than one chunk.
        UnsupportedError: It is not all that a block holds.
    """
    _require_whole_blocks(engine, kv_caches)
    groups: list[list[PageMapping | None]] = [
        list(map(page_mapping, refs)) for refs in kv_caches.group_data_refs
    ]
    try:
        share = share_pages([mapping for mappings in groups for mapping in mappings])
    except UnsupportedError as error:
        logger.info(
            "chunks can be read with --tensor-parallel-size %d only: %s",
            engine.world_size,
            error,
        )
        shard_nbytes = engine.worker_kv_bytes_per_block * engine.blocks_per_chunk
        geometry = _geometry(engine, config, engine.world_size, shard_nbytes, content=content)
        return geometry, shard_of(engine.rank)
    stripe_nbytes = max(map(_stripe_nbytes, groups)) * engine.blocks_per_chunk
    geometry = _geometry(
        engine, config, STRIPES, stripe_nbytes, content=content, is_portable=True
    )
    return geometry, share


def require_same_file(
    geometry: RegionGeometry, engine: EngineFacts, config: KvtierConfig
) -> None:
    """Refuse a RAM tier that was made from another configuration than this process reads.

    Raises:
        UnsupportedError: Its shape is not the one that ``config`` gives.
    """
    slots = config.tiers[0].capacity_bytes // geometry.slot_nbytes
    relay = relay_slots(config, geometry.slot_nbytes)
    found = geometry.slots, geometry.ranks, geometry.relay_slots
    if found != (slots, engine.world_size, relay):
        raise UnsupportedError(
            f"the workers' RAM tier has another shape: {geometry} instead of {slots} slots for "
            f"{engine.world_size} ranks; all processes of an engine must read the same "
            "configuration file"
        )


def _require_whole_blocks(engine: EngineFacts, kv_caches: CanonicalKVCaches) -> None:
    """Refuse KV memory of which vLLM's worker half hands over a part, or another one.

    It takes layers whose blocks are farther apart than their pages are long for layers that lie
    side by side in a block, and hands over one tensor for all of them. So it does where pages
    are only padded, and then that is the first layer. States it takes to lie apart from each
    other, also where they lie side by side.
    """
    for (_, layers), refs in zip(engine.groups, kv_caches.group_data_refs, strict=True):
        whole_nbytes = engine.worker_kv_bytes_per_block
        if len(refs) == 1 < len(layers) and refs[0].page_size_bytes != whole_nbytes:
            raise UnsupportedError(
                f"vLLM hands over {refs[0].page_size_bytes} bytes of a block of {len(layers)} "
                f"layers, which has {whole_nbytes}: this KV layout is not supported"
            )
    if engine.kv_layout is None:
        return  # before 0.29 keys may lie apart from values
    extents = sorted({extent for each in kv_caches.tensors for extent in _extent(each.tensor)})
    if any(end > start for (_, end), (start, _) in pairwise(extents)):
        raise UnsupportedError(
            "vLLM hands over layers whose blocks are in each other's: this KV layout is not "
            "supported; start vLLM with VLLM_KV_CACHE_LAYOUT=LBHNC"
        )


def _extent(tensor: torch.Tensor) -> list[tuple[int, int]]:
    """Return where a tensor of blocks begins and ends, if these follow each other."""
    blocks, nbytes = tensor.shape
    if tensor.stride(0) != nbytes:
        return []
    start = tensor.data_ptr()
    return [(start, start + blocks * nbytes)]


def _geometry(
    engine: EngineFacts,
    config: KvtierConfig,
    stripes: int,
    stripe_nbytes: int,
    *,
    content: str,
    is_portable: bool = False,
) -> RegionGeometry:
    check_chunk_fits(config, stripes * stripe_nbytes)
    size = slot_nbytes(stripes * stripe_nbytes)
    return RegionGeometry(
        slots=config.tiers[0].capacity_bytes // size,
        slot_nbytes=size,
        stripe_nbytes=stripe_nbytes,
        stripes=stripes,
        ranks=engine.world_size,
        is_portable=is_portable,
        content=content,
        relay_slots=relay_slots(config, size),
    )


def _stripe_nbytes(mappings: Sequence[PageMapping | None]) -> int:
    """Return the bytes of one block in a stripe: its part of every layer's canonical page."""
    return sum(mapping.canonical_page_size_bytes // STRIPES for mapping in mappings if mapping)
