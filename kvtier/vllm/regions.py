"""The RAM tier's memory, which the workers of an engine and its scheduler share."""

from __future__ import annotations

from kvtier.config import KvtierConfig, check_chunk_fits, slot_nbytes
from kvtier.errors import UnsupportedError
from kvtier.memory import HostRegion, RegionGeometry
from kvtier.transfer import bounce_slots_for
from kvtier.vllm.compat.engine import EngineFacts
from kvtier.vllm.pages import SlotShape

__all__ = ["MEET_TIMEOUT_S", "offer_region", "require_same_file"]

MEET_TIMEOUT_S = 600.0
"""How long the processes of one engine wait for each other; loading weights comes before it."""

_OFFER_TIMEOUT_S = 24 * 3600.0
"""How long the first worker offers its memory. vLLM makes the scheduler when all workers have
warmed up, which has no bound; if it makes none, the worker is ended."""


def offer_region(
    engine: EngineFacts, settings: KvtierConfig, shape: SlotShape, *, content: str
) -> HostRegion:
    """Create the RAM tier's memory in the first rank, or attach to it in the others.

    Args:
        engine: The engine.
        settings: kvtier's configuration.
        shape: How slots are cut.
        content: What their bytes are.

    Raises:
        ConfigError: The RAM tier is smaller than one chunk.
    """
    geometry = _geometry(engine, settings, shape, content=content)
    if engine.rank:
        return HostRegion.attach(engine.engine_id, geometry, timeout_s=MEET_TIMEOUT_S)
    return HostRegion.create(
        engine.engine_id,
        geometry,
        attachers=engine.world_size,
        timeout_s=_OFFER_TIMEOUT_S,
        huge_pages=settings.ram.huge_pages,
    )


def require_same_file(
    geometry: RegionGeometry, engine: EngineFacts, settings: KvtierConfig
) -> None:
    """Refuse a RAM tier that was made from another configuration than this process reads.

    Raises:
        UnsupportedError: Its shape is not the one that ``settings`` gives.
    """
    slots = settings.tiers[0].capacity_bytes // geometry.slot_nbytes
    relay = bounce_slots_for(settings, geometry.slot_nbytes)
    found = geometry.slots, geometry.ranks, geometry.bounce_slots
    if found != (slots, engine.world_size, relay):
        raise UnsupportedError(
            f"the workers' RAM tier has another shape: {geometry} instead of {slots} slots for "
            f"{engine.world_size} ranks; all processes of an engine must read the same "
            "configuration file"
        )


def _geometry(
    engine: EngineFacts, settings: KvtierConfig, shape: SlotShape, *, content: str
) -> RegionGeometry:
    payload_nbytes = shape.stripes * shape.stripe_nbytes
    check_chunk_fits(settings, payload_nbytes)
    size = slot_nbytes(payload_nbytes)
    return RegionGeometry(
        slots=settings.tiers[0].capacity_bytes // size,
        slot_nbytes=size,
        stripe_nbytes=shape.stripe_nbytes,
        stripes=shape.stripes,
        ranks=engine.world_size,
        is_portable=shape.is_portable,
        content=content,
        bounce_slots=bounce_slots_for(settings, size),
    )
