"""Test suites for authors of tiers and policies, and helpers for these suites.

The modules of this package import pytest only in a test run, so an engine may use
:class:`~kvtier.testing.file_tier.FileTier` without pytest.
"""

from __future__ import annotations

import sys

if "pytest" in sys.modules:
    import pytest

    # Before the suites are imported, so that failed assertions show the compared values.
    pytest.register_assert_rewrite(
        "kvtier.testing.admission_contract",
        "kvtier.testing.decision_contract",
        "kvtier.testing.eviction_contract",
        "kvtier.testing.placement_contract",
        "kvtier.testing.shared_tier_contract",
        "kvtier.testing.tier_contract",
    )
