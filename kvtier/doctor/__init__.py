"""Why the tiers may be slow here, fail to start, or not be what they seem; and what to do.

Three parts, so that a test can show every verdict on any machine: *probes* read the machine
into plain values, *checks* turn values into :class:`Finding`, and :func:`examine` joins them.
A probe that fails becomes a finding of its own, so one odd mount never hides the rest.
"""

from __future__ import annotations

from kvtier.doctor._examine import Examination, examine, examine_pages
from kvtier.doctor._finding import Finding, Verdict
from kvtier.doctor._rates import MeasuredRates, measure_tier_rates

__all__ = [
    "Examination",
    "Finding",
    "MeasuredRates",
    "Verdict",
    "examine",
    "examine_pages",
    "measure_tier_rates",
]
