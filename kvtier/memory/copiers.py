"""Open a rank's copier for RAM slots and its staging buffers for GDS reads."""

from __future__ import annotations

from kvtier.errors import UnsupportedError
from kvtier.logs import get_logger
from kvtier.memory import kvikio_files
from kvtier.memory.copy import BlockCopier, Copier, KVBlocks
from kvtier.memory.cuda_copy import CudaCopier
from kvtier.memory.cuda_driver import CudaDriver
from kvtier.memory.direct_files import DirectFiles
from kvtier.memory.gds_staging import GdsStaging
from kvtier.memory.host_region import HostRegion
from kvtier.memory.slot_layout import RankShare
from kvtier.types import GdsMode

__all__ = ["open_copier", "open_gds"]

logger = get_logger(__name__)


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


def open_gds(
    mode: GdsMode,
    kv: KVBlocks,
    region: HostRegion,
    *,
    share: RankShare,
    blocks_per_chunk: int,
    files: DirectFiles | None = None,
) -> GdsStaging | None:
    """Return the staging buffers through which a rank reads chunks from an NVMe tier.

    Args:
        mode: ``off``, ``auto`` (use GDS reads if possible) or ``require``.
        kv: The rank's KV memory.
        region: The RAM slots, which have the shape of the tier's slots.
        share: The rank's share of each slot.
        blocks_per_chunk: Blocks of a chunk.
        files: Opens the tier's slot file; None to use kvikio.

    Returns:
        The buffers; None if ``mode`` is ``off``, or is ``auto`` and GDS reads cannot work.

    Raises:
        ConfigError: kvikio is installed for another version of CUDA than torch.
        UnsupportedError: ``mode`` is ``require``, and GDS reads cannot work.
    """
    if mode == "off":
        return None
    device = kv.device
    try:
        return GdsStaging(
            kv,
            region.geometry,
            share=share,
            blocks_per_chunk=blocks_per_chunk,
            files=files or kvikio_files.open_direct_files(device),
            driver=None if device.type == "cpu" else CudaDriver(device),
        )
    except (UnsupportedError, RuntimeError) as error:
        if mode == "require":
            raise UnsupportedError(
                f"gds: require, but no GDS reads are possible: {error}; or set gds: auto"
            ) from error
        logger.info("no GDS reads, chunks are loaded through RAM: %s", error)
        return None
