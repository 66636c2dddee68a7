"""Contract suites and verified fakes for those who write tiers and policies.

A suite that fails shows the values that it compared, as a test of one's own does. pytest has to
be told so before a suite is imported, and it is where it runs; an engine that uses a fake here
does not import pytest for it.
"""

from __future__ import annotations

import sys

if "pytest" in sys.modules:
    import pytest

    pytest.register_assert_rewrite(
        "kvtier.testing.admission_contract",
        "kvtier.testing.decision_contract",
        "kvtier.testing.eviction_contract",
        "kvtier.testing.placement_contract",
        "kvtier.testing.tier_contract",
    )
