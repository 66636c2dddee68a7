"""What a request may and may not do with the tiers."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["NO_TERMS", "RequestTerms", "session_terms"]


@dataclass(frozen=True, slots=True)
class RequestTerms:
    """What whoever sent a request asks of the cache; tiers by index, 0 is RAM.

    Attributes:
        load_tiers: Tiers its chunks may come from, None for any. A chunk that is in none of
            them is a miss, wherever else it is.
        store_tiers: Tiers its new chunks may be in, None for any. RAM is on the way to every
            other tier and cannot be left out.
        session: What it belongs to, for policies; empty if nobody said.
    """

    load_tiers: frozenset[int] | None = None
    store_tiers: frozenset[int] | None = None
    session: str = ""

    def may_store_in(self, tier: int | None) -> bool:
        """Whether new chunks may be in ``tier``; None, no tier, is no place to be in."""
        return self.store_tiers is None or tier in self.store_tiers


NO_TERMS = RequestTerms()


def session_terms(session: str) -> RequestTerms:
    """Return the terms of a request that says at most what it belongs to."""
    return RequestTerms(session=session) if session else NO_TERMS
