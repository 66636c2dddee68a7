"""Opens the copier of one rank: what copies between its KV blocks and RAM slots."""

from __future__ import annotations

from kvtier.errors import UnsupportedError
from kvtier.memory.copy import BlockCopier, Copier, KVBlocks
from kvtier.memory.cuda_copy import CudaCopier
from kvtier.memory.cuda_driver import CudaDriver
from kvtier.memory.host_region import HostRegion
from kvtier.memory.slot_layout import RankShare

__all__ = ["open_copier"]


def open_copier(
    kv: KVBlocks, region: HostRegion, *, share: RankShare, blocks_per_chunk: int
) -> Copier:
    """Return the copier for a rank's device.

    Args:
        kv: The rank's KV memory.
        region: The RAM slots.
        share: The rank's share of each slot.
        blocks_per_chunk: Blocks of a chunk.

    Raises:
        UnsupportedError: A group's block does not fit its place in the slot, or kvtier cannot
            copy to such a device.
    """
    device = kv.device
    if device.type == "cpu":
        return BlockCopier(kv, region, share=share, blocks_per_chunk=blocks_per_chunk)
    if device.type == "cuda":
        return CudaCopier(
            CudaDriver(device), kv, region, share=share, blocks_per_chunk=blocks_per_chunk
        )
    raise UnsupportedError(f"kvtier copies to and from CPU and CUDA devices, not {device}")
