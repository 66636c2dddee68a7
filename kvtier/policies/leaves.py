"""Evicting leaves only: what the live tiers, their ghosts and the simulator do alike."""

from __future__ import annotations

from kvtier.policies.base import ChunkCopy, Eviction, PolicyContext

__all__ = ["is_unpinned_leaf", "pick_leaf"]


def is_unpinned_leaf(copy: ChunkCopy) -> bool:
    """Return whether nobody needs ``copy`` and no resident chunk continues it."""
    return not copy.pins and copy.child_count <= 0


def pick_leaf(
    eviction: Eviction, ctx: PolicyContext, *, but: ChunkCopy | None
) -> ChunkCopy | None:
    """Pick a victim for a newcomer without stranding it.

    Args:
        eviction: A policy that evicts leaves only.
        ctx: What it is told besides.
        but: What the newcomer continues, which therefore stays; None for a root.

    Returns:
        The victim; None when ``but`` is all that could go.
    """
    if but is None:
        return eviction.pick(is_unpinned_leaf, ctx)
    but.pins += 1
    victim = eviction.pick(is_unpinned_leaf, ctx)
    but.pins -= 1
    return victim
