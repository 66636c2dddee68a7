"""Policies are found by name, wherever they come from, and refused with a remedy."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from kvtier.config import parse_config, schema
from kvtier.errors import ConfigError
from kvtier.policies import Eviction, build_eviction
from kvtier.policies.eviction import Belady, Lru
from kvtier.policies.registry import BUILT_IN_EVICTIONS, EVICTION_GROUP

ROOT = Path(__file__).parents[2]
PLUGIN = """
from kvtier.policies.eviction import Belady, Lru


class Mine(Lru):
    pass


class Seer(Belady):
    pass


class Wrong:
    pass
"""
METADATA = "Metadata-Version: 2.1\nName: kvtier-mine\nVersion: 1.0\n"
ENTRY_POINTS = """
[kvtier.eviction]
mine = kvtier_mine:Mine
wrong = kvtier_mine:Wrong
gone = kvtier_mine_that_is_gone:Mine
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install a package with policies."""
    (tmp_path / "kvtier_mine.py").write_text(PLUGIN)
    metadata = tmp_path / "kvtier_mine-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(METADATA)
    (metadata / "entry_points.txt").write_text(ENTRY_POINTS)
    monkeypatch.syspath_prepend(tmp_path)


def with_eviction(name: str) -> str:
    return f"tiers:\n  - kind: ram\n    capacity: 1GiB\n    eviction: {name}\n"


def test_what_is_built_in_is_what_the_package_provides_and_a_file_may_name() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        provided = tomllib.load(file)["project"]["entry-points"][EVICTION_GROUP]
    assert provided == {
        name: f"kvtier.policies.eviction:{policy.__name__}"
        for name, policy in BUILT_IN_EVICTIONS.items()
    }
    names, pattern = schema()["$defs"]["tier-ram"]["properties"]["eviction"]["anyOf"]
    assert set(names["enum"]) == BUILT_IN_EVICTIONS.keys() - {"belady"}
    assert set(pattern) == {"pattern"}


@pytest.mark.parametrize("name", sorted(BUILT_IN_EVICTIONS.keys() - {"belady"}))
def test_every_policy_but_belady_may_order_a_live_tier(name: str) -> None:
    config = parse_config(with_eviction(name), source="a.yaml")
    built = build_eviction(config.tiers[0].eviction, capacity=3)
    assert (type(built), built.capacity) == (BUILT_IN_EVICTIONS[name], 3)


@pytest.mark.usefixtures("mine")
@pytest.mark.parametrize("name", ["mine", "kvtier_mine:Mine"])
def test_a_policy_of_another_package_may_order_a_tier(name: str) -> None:
    config = parse_config(with_eviction(name), source="a.yaml")
    built: Eviction = build_eviction(config.tiers[0].eviction, capacity=3)
    assert type(built).__name__ == "Mine"
    assert isinstance(built, Lru)


def test_only_who_knows_the_future_may_have_belady() -> None:
    assert isinstance(build_eviction("belady", capacity=3, future=True), Belady)
    with pytest.raises(
        ConfigError, match=r"'belady' must know the future; use it in kvtier sim"
    ):
        build_eviction("belady", capacity=3)
    with pytest.raises(
        ConfigError, match=r"^a\.yaml:4: tiers\[0\]\.eviction = belady: .*future; use it with"
    ):
        parse_config(with_eviction("belady"), source="a.yaml")


@pytest.mark.usefixtures("mine")
def test_a_policy_of_ones_own_that_needs_the_future_is_refused_too() -> None:
    with pytest.raises(ConfigError, match="must know the future"):
        build_eviction("kvtier_mine:Seer", capacity=3)


@pytest.mark.usefixtures("mine")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mru", r"unknown eviction policy 'mru'; installed: .*lru, .*mine.*module:Class"),
        ("gone", r"'gone' .*does not load: No module.*repair or remove"),
        ("kvtier_mine:Absent", r"does not load: .*Absent.*repair or remove"),
        ("wrong", r"'wrong': kvtier_mine:Wrong is no Eviction; derive it from"),
        ("kvtier_mine:PLUGIN", r"does not load"),
    ],
)
def test_a_policy_that_cannot_be_built_says_why(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_eviction(name, capacity=3)


def test_a_file_that_names_a_class_which_does_not_load_is_refused_with_its_line() -> None:
    with pytest.raises(
        ConfigError,
        match=r"^a\.yaml:4: tiers\[0\]\.eviction = nowhere:Lru: does not load: No mod",
    ):
        parse_config(with_eviction("nowhere:Lru"), source="a.yaml")
