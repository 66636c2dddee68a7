"""Eviction policies, one module each."""

from __future__ import annotations

from kvtier.policies.eviction.arc import Arc
from kvtier.policies.eviction.belady import Belady
from kvtier.policies.eviction.fifo import Fifo
from kvtier.policies.eviction.gdsf import Gdsf
from kvtier.policies.eviction.hedged_lhd import HedgedLhd
from kvtier.policies.eviction.lfu import Lfu
from kvtier.policies.eviction.lirs import Lirs
from kvtier.policies.eviction.lru import Lru
from kvtier.policies.eviction.prefix_lru import PrefixLru
from kvtier.policies.eviction.s3_fifo import S3Fifo
from kvtier.policies.eviction.sieve import Sieve
from kvtier.policies.eviction.slru import Slru
from kvtier.policies.eviction.slru4 import Slru4
from kvtier.policies.eviction.two_q import TwoQ
from kvtier.policies.eviction.w_tinylfu import WTinyLfu, WTinyLfuExact

__all__ = [
    "Arc",
    "Belady",
    "Fifo",
    "Gdsf",
    "HedgedLhd",
    "Lfu",
    "Lirs",
    "Lru",
    "PrefixLru",
    "S3Fifo",
    "Sieve",
    "Slru",
    "Slru4",
    "TwoQ",
    "WTinyLfu",
    "WTinyLfuExact",
]
