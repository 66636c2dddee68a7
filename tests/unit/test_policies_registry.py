"""Policies are found by name, wherever they come from, and refused with a remedy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvtier.build import build_manager, build_tiers, check_policies
from kvtier.config import parse_config, schema
from kvtier.errors import ConfigError, KvtierError
from kvtier.manager import TieredOffloadingManager
from kvtier.policies import (
    Eviction,
    build_admission,
    build_eviction,
    build_placement,
)
from kvtier.policies.eviction import Lru
from kvtier.policies.registry import (
    ADMISSIONS,
    EVICTIONS,
    PLACEMENTS,
    PolicyRole,
)
from kvtier.policies.shadow import ShadowTier
from kvtier.sim.cache import simulate_cache
from kvtier.sim.single import BELADY, TouchOrder, simulate_single
from kvtier.sim.traces import generate
from tests.support.fakes import FakeSlotStatus
from tests.support.workbench import prefix
from tests.unit.cost_models import kept, measure

ROOT = Path(__file__).parents[2]
PICKS_NONE = (
    "^eviction policy kvtier_mine:Never picks too few victims although more chunks may leave; "
    "repair its pick$"
)
PICKS_FIVE = (
    "^eviction policy kvtier_mine:Five picks 5, which is no ChunkCopy; repair its pick$"
)
BAD_PICKS = [("kvtier_mine:Never", PICKS_NONE), ("kvtier_mine:Five", PICKS_FIVE)]
PLUGIN = """
from kvtier.policies import Admission, Eviction, Placement, TieredPlacement
from kvtier.policies.eviction import Lru


class Mine(Lru):
    pass


class Down(TieredPlacement):
    def __init__(self, tiers):
        super().__init__(tiers, write="evict")


class Eager(TieredPlacement):
    pass


class Half(Placement):
    def place(self, copy, ctx):
        return ()


class Greedy(TieredPlacement):
    def __init__(self, tiers, appetite):
        super().__init__(tiers)


class Deep(Admission):
    def admits(self, copy, tier, ctx):
        return copy.depth > 3


class Wrong:
    pass


class Never(Lru):
    pick_many = Eviction.pick_many

    def pick(self, evictable, ctx):
        return None


class Five(Never):
    def pick(self, evictable, ctx):
        return 5


class Uninitialised(Lru):
    def __init__(self, capacity):
        self.capacity = capacity


class Adrift(TieredPlacement):
    def __init__(self, tiers):
        pass


class Boundless(Deep):
    def __init__(self, capacity):
        pass
"""
METADATA = "Metadata-Version: 2.1\nName: kvtier-mine\nVersion: 1.0\n"
ENTRY_POINTS = """
[kvtier.eviction]
mine = kvtier_mine:Mine
wrong = kvtier_mine:Wrong
gone = kvtier_mine_that_is_gone:Mine

[kvtier.placement]
down = kvtier_mine:Down
eager = kvtier_mine:Eager
half = kvtier_mine:Half
wrong = kvtier_mine:Mine
gone = kvtier_mine_that_is_gone:Down

[kvtier.admission]
deep = kvtier_mine:Deep
wrong = kvtier_mine:Down
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


def with_placement(*lines: str) -> str:
    """Return a file whose placement section has ``lines``, from line 8 on."""
    section = "".join(f"  {line}\n" for line in lines)
    return (
        "tiers:\n  - kind: ram\n    capacity: 1GiB\n"
        f"  - kind: nvme\n    path: /nowhere\n    capacity: 4GiB\nplacement:\n{section}"
    )


def managed_by(*lines: str) -> TieredOffloadingManager:
    """Return a manager of a file with ``lines``: 8 chunks in RAM, 16 on disk."""
    config = parse_config(with_placement(*lines), source="a.yaml")
    return build_manager(
        config,
        build_tiers(config, [8, 16]),
        slot_nbytes=1 << 20,
        chunk_tokens=16,
        slot_status=FakeSlotStatus(),
        record_events=False,
    )


def written_at_once(manager: TieredOffloadingManager) -> set[int]:
    """Store six chunks; return the depths of those that are written to disk at once."""
    keys = prefix(6)
    plan = manager.prepare_store(keys, "writer")
    assert plan is not None
    manager.complete_store(plan.keys)
    manager.end_step()
    return {keys.index(key) for job in manager.take_jobs() for key in job.keys}


@pytest.mark.parametrize(
    "role", [EVICTIONS, PLACEMENTS, ADMISSIONS], ids=lambda role: role.what
)
def test_every_built_in_policy_loads_and_a_file_may_name_it(role: PolicyRole[Any]) -> None:
    for name in role.built_in:
        assert issubclass(role.load(name), role.base)
        assert role.make(name, 3)
    assert set(role.installed()) >= role.built_in.keys()


def test_the_schema_has_the_names_and_takes_any_class() -> None:
    definitions = schema()["$defs"]
    for field, names in (
        (definitions["tier-ram"]["properties"]["eviction"], EVICTIONS),
        (definitions["PlacementConfig"]["properties"]["policy"], PLACEMENTS),
        (definitions["PlacementConfig"]["properties"]["admit"], ADMISSIONS),
    ):
        known, pattern = field["anyOf"]
        assert set(known["enum"]) == set(names.installed())
        assert set(pattern) == {"pattern"}


@pytest.mark.parametrize("name", sorted(EVICTIONS.built_in))
def test_every_built_in_policy_may_order_a_live_tier(name: str) -> None:
    config = parse_config(with_eviction(name), source="a.yaml")
    built = build_eviction(config.tiers[0].eviction, capacity=3)
    assert (type(built), built.capacity) == (EVICTIONS.load(name), 3)


@pytest.mark.usefixtures("mine")
@pytest.mark.parametrize("name", ["mine", "kvtier_mine:Mine"])
def test_a_policy_of_another_package_may_order_a_tier(name: str) -> None:
    config = parse_config(with_eviction(name), source="a.yaml")
    built: Eviction = build_eviction(config.tiers[0].eviction, capacity=3)
    assert type(built).__name__ == "Mine"
    assert isinstance(built, Lru)


def test_no_live_tier_may_have_belady() -> None:
    with pytest.raises(ConfigError, match=r"^a\.yaml:4: tiers\[0\]\.eviction = belady: "):
        parse_config(with_eviction(BELADY), source="a.yaml")


@pytest.mark.usefixtures("mine")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mru", r"unknown eviction policy 'mru'; installed: .*lru, .*mine.*module:Class"),
        ("lruu", r"unknown eviction policy 'lruu'; .*; did you mean lru\?$"),
        ("gone", r"'gone' .*does not load: No module.*repair or remove"),
        ("kvtier_mine:Absent", r"does not load: .*Absent.*; name a class that kvtier_mine has"),
        (
            "kvtier_away:Lru",
            r"No module.*; put the directory of kvtier_away on PYTHONPATH, the engine's too$",
        ),
        ("wrong", r"'wrong': kvtier_mine:Wrong is no Eviction; derive it from"),
        ("kvtier_mine:PLUGIN", r"does not load"),
        ("kvtier_mine:k", r"no attribute 'k'; name a class that kvtier_mine has"),
        (
            "kvtier_mine:Uninitialised",
            r"'kvtier_mine:Uninitialised' has no tracks_misses; its __init__ must c",
        ),
    ],
)
def test_a_policy_that_cannot_be_built_says_why(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_eviction(name, capacity=3)


def test_a_file_that_names_a_class_which_does_not_load_is_refused_with_its_line() -> None:
    with pytest.raises(
        ConfigError,
        match=r"^a\.yaml:4: tiers\[0\]\.eviction = nowhere:Lru: does not load: No mod.*; "
        "put the directory of nowhere on PYTHONPATH, the engine's too$",
    ):
        parse_config(with_eviction("nowhere:Lru"), source="a.yaml")


# -- placement and admission -----------------------------------------------------------------


@pytest.mark.usefixtures("mine")
@pytest.mark.parametrize("name", ["down", "kvtier_mine:Down"])
def test_a_policy_of_another_package_may_place(name: str) -> None:
    assert written_at_once(managed_by("policy: tiered"))
    assert not written_at_once(managed_by(f"policy: {name}"))


@pytest.mark.parametrize(("load_if", "loaded"), [("worthwhile", 0), ("always", 8)])
def test_slow_loads_are_skipped_unless_the_file_says_always(load_if: str, loaded: int) -> None:
    model = managed_by(f"load_if: {load_if}", "recompute_per_token: 1us").cost_model
    measure(model, 1, 8, seconds=1.0)
    assert model.figures().load_costs[1] is not None
    assert kept(model, [1] * 8) == loaded
    assert model.would_load(1, 8, counted=8, now=0.0) == bool(loaded)


@pytest.mark.usefixtures("mine")
@pytest.mark.parametrize("name", ["deep", "kvtier_mine:Deep"])
@pytest.mark.parametrize("policy", ["tiered", "eager"])
def test_an_admission_of_another_package_works_with_any_placement(
    name: str, policy: str
) -> None:
    manager = managed_by(f"policy: {policy}", f"admit: {name}", "write_budget_per_day: 50MiB")
    # The budget pays for two chunks, and is asked last: a refusal by Deep costs nothing.
    assert written_at_once(manager) == {4, 5}


@pytest.mark.usefixtures("mine")
@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (
            ["policy: tierd"],
            (
                "a.yaml:8: placement.policy = tierd: no such placement policy is installed; "
                "installed: down, eager, gone, half, tiered, wrong; did you mean tiered?"
            ),
        ),
        (["policy: gone"], "a.yaml:8: placement.policy = gone: does not load: No module"),
        (["policy: no:Where"], "a.yaml:8: placement.policy = no:Where: does not load: No mod"),
        (["policy: 3"], "a.yaml:8: placement.policy = 3: not text; put it in quotes"),
        (
            ["policy: wrong"],
            (
                "a.yaml:8: placement.policy = wrong: placement policy 'wrong': "
                "kvtier_mine:Mine is no Placement; derive it from kvtier.policies.Placement"
            ),
        ),
        (
            ["policy: half"],
            (
                "a.yaml:8: placement.policy = half: placement policy 'half': kvtier_mine:Half "
                "leaves out demote, promote; kvtier.policies.Placement says"
            ),
        ),
        (
            ["policy: kvtier_mine:Greedy"],
            (
                "cannot be made from one number: missing a required argument: 'appetite'; "
                "`__init__` must accept one number, like kvtier.policies.Placement"
            ),
        ),
        (
            ["admit: secnd-touch"],
            (
                "a.yaml:8: placement.admit = secnd-touch: no such admission policy is "
                "installed; installed: all, deep, second-touch, wrong; "
                "did you mean second-touch?"
            ),
        ),
        (
            ["write: evict", "admit: wrong"],
            (
                "a.yaml:9: placement.admit = wrong: admission policy 'wrong': kvtier_mine:Down "
                "is no Admission; derive it from kvtier.policies.Admission"
            ),
        ),
        (
            ["policy: down", "write: through"],
            "a.yaml:9: placement.write = through: a key of policy: tiered only; leave it out",
        ),
        (
            ["policy: down", "write_after: 1"],
            "a.yaml:9: placement.write_after = 1: a key of policy: tiered only; leave it out",
        ),
    ],
)
def test_a_placement_that_cannot_be_built_says_where_and_why(
    lines: list[str], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        managed_by(*lines)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("mine")
@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("policy: kvtier_mine:Adrift", "'kvtier_mine:Adrift' has no tiers; its __init__ must"),
        ("admit: kvtier_mine:Boundless", "'kvtier_mine:Boundless' has no capacity; its __in"),
    ],
)
def test_a_policy_that_leaves_out_its_base_s_constructor_is_named(
    line: str, message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        managed_by(line)
    assert message in str(caught.value)
    assert str(caught.value).startswith("a.yaml:8: placement.")


@pytest.mark.usefixtures("mine")
@pytest.mark.parametrize(("policy", "message"), BAD_PICKS)
@pytest.mark.parametrize("order", ["forward", "reverse"])
def test_a_policy_that_picks_no_victim_is_named(
    policy: str, message: str, order: TouchOrder
) -> None:
    trace = generate("chat", sessions=6, per_s=0.1, chunk_tokens=64, seed=1)
    with pytest.raises(KvtierError, match=message):
        simulate_single(trace, policy=policy, capacity=3, touch_order=order)


@pytest.mark.usefixtures("mine")
@pytest.mark.parametrize(("policy", "message"), BAD_PICKS)
@pytest.mark.parametrize("write", ["through", "evict"])
@pytest.mark.parametrize("tier", [0, 1])
def test_a_policy_without_a_victim_ends_a_simulation_of_all_tiers(
    policy: str, message: str, write: str, tier: int
) -> None:
    trace = generate("chat", sessions=20, per_s=0.1, chunk_tokens=64, seed=1)
    evictions = ["lru", "lru"]
    evictions[tier] = policy
    ram, nvme = evictions
    config = parse_config(
        f"tiers:\n  - {{kind: ram, capacity: 8MiB, eviction: '{ram}'}}\n"
        f"  - {{kind: nvme, path: /nowhere, capacity: 8MiB, eviction: '{nvme}'}}\n"
        f"placement: {{write: {write}, promote: copy}}\n",
        source="a.yaml",
    )
    with pytest.raises(KvtierError, match=message):
        simulate_cache(trace, config, chunk_bytes=1 << 20)


@pytest.mark.usefixtures("mine")
@pytest.mark.parametrize(("policy", "message"), BAD_PICKS)
def test_a_shadow_that_picks_no_victim_is_named(policy: str, message: str) -> None:
    shadow = ShadowTier(2, [policy])
    with pytest.raises(KvtierError, match=message):
        shadow.serve([bytes([at]) * 8 for at in range(3)], 0.0)


@pytest.mark.usefixtures("mine")
def test_policies_are_built_by_name_without_a_file_too() -> None:
    assert build_placement("tiered", tiers=3).tiers == 3
    evicting = build_placement("tiered", tiers=3, write="evict")
    assert evicting.demotion_targets(0) == (1,)
    assert build_admission("second-touch", capacity=8).capacity == 8
    with pytest.raises(
        ConfigError, match=r"unknown placement policy 'up'; installed: .*tiered"
    ):
        build_placement("up", tiers=2)
    with pytest.raises(ConfigError, match=r"unknown admission policy 'none'; installed: .*sec"):
        build_admission("none", capacity=2)


@pytest.mark.usefixtures("mine")
@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            with_placement("policy: half"),
            r"^a\.yaml:8: placement\.policy = half: .* leaves out",
        ),
        (with_placement("admit: wrong"), r"^a\.yaml:8: placement\.admit = wrong: .* is no Adm"),
        (
            with_eviction("wrong"),
            r"^a\.yaml:4: tiers\[0\]\.eviction = wrong: .* is no Eviction",
        ),
        (
            with_eviction("mine") + "shadow: [lru, wrong]\n",
            r"^a\.yaml:5: shadow\[1\] = wrong: .* is no Eviction",
        ),
    ],
)
def test_a_check_makes_every_policy_once(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_policies(parse_config(text, source="a.yaml"))


@pytest.mark.usefixtures("mine")
def test_a_check_is_content_with_policies_that_can_be_made() -> None:
    text = with_placement("policy: down", "admit: deep") + "shadow: [mine, arc]\n"
    check_policies(parse_config(text, source="a.yaml"))
