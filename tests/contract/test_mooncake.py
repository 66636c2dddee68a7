"""The Mooncake tier, with a master and another host as processes over TCP."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest

from kvtier.testing.shared_tier_contract import SharedTierContract
from kvtier.testing.shared_tier_harness import SharedTierHarness
from kvtier.tiers.shared import PROOF_NBYTES, SharedTier
from kvtier.tiers.shared.mooncake import MooncakeTier

pytest.importorskip("mooncake", reason="Mooncake has no wheel for this platform")

from tests.support.mooncake_service import MooncakeService, running_service


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MooncakeService]:
    with running_service(tmp_path_factory.mktemp("mooncake")) as service:
        yield service


class TestMooncake(SharedTierContract):
    tier_class: ClassVar[type[SharedTier]] = MooncakeTier

    @pytest.fixture(autouse=True)
    def _address(self, service: MooncakeService) -> None:
        self.address = service.address

    def section(self, directory: Path) -> str:
        return f"master: {self.address}"
