"""Hedged least hit density is never much worse than LRU, and better where it can be."""

from __future__ import annotations

import random
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.keys import make_key
from kvtier.policies import ChunkCopy, PolicyContext
from kvtier.policies.eviction import Lru
from kvtier.policies.eviction._hit_density import HitDensity
from kvtier.policies.eviction._lhd_history import RegretBudget, Timeline
from kvtier.policies.eviction.hedged_lhd import HedgedLhd
from kvtier.sim.single import simulate_single
from kvtier.sim.traces import Trace, generate, read_trace
from kvtier.testing.model_tier import ModelTier
from kvtier.testing.probes import count_steps
from tests.unit.sim_traces import TRACES, needs_traces

SHARES = (0.01, 0.05, 0.1, 0.2)
MOST_LOST = 0.003
KEEP = 0.99
LOST_SHARE, ODDS = 0.002, 4
"""The regret budget of decision 14: share of the uses, and for each hit ahead of LRU."""


def lead_over_lru(trace: Trace, share: float) -> float:
    """Return by how much the prefix-hit ratio is above that of LRU."""
    capacity = max(1, int(share * trace.distinct + 0.5))
    ours, theirs = (
        simulate_single(trace, policy=name, capacity=capacity).prefix_hit_ratio
        for name in ("hedged-lhd", "lru")
    )
    return ours - theirs


@pytest.fixture(scope="module")
def chat() -> Trace:
    return generate("chat", sessions=100, per_s=2.0, chunk_tokens=64, seed=7)


@pytest.fixture(scope="module")
def agents() -> Trace:
    return generate("agents", sessions=8, per_s=0.2, chunk_tokens=512, seed=5)


@needs_traces
@pytest.mark.slow
@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("name", ["mooncake_synthetic", "mooncake_conversation"])
def test_on_public_traces_it_does_not_lose_to_lru(name: str, share: float) -> None:
    trace = read_trace(TRACES / f"{name}.jsonl")
    assert lead_over_lru(trace, share) > -MOST_LOST


@needs_traces
@pytest.mark.slow
def test_it_closes_a_tenth_of_what_lru_leaves_to_the_future() -> None:
    trace = read_trace(TRACES / "mooncake_conversation.jsonl")
    assert lead_over_lru(trace, 0.05) > 0.1 * (0.374 - 0.200)


@pytest.mark.untraced
@pytest.mark.parametrize("share", [0.02, 0.1])
def test_on_made_up_chats_and_agents_it_does_not_lose_to_lru(
    share: float, chat: Trace, agents: Trace
) -> None:
    assert lead_over_lru(chat, share) > -MOST_LOST
    assert lead_over_lru(agents, share) > -MOST_LOST


def test_where_prompts_share_their_beginning_it_learns_to_keep_that() -> None:
    trace = generate("shared", sessions=1500, per_s=4.0, chunk_tokens=256, seed=8)
    assert lead_over_lru(trace, 0.1) > 0.03


@pytest.mark.parametrize(("capacity", "is_lru"), [(20, True), (200, True), (400, False)])
def test_in_a_tier_of_few_prompts_it_hits_what_lru_hits(
    chat: Trace, capacity: int, is_lru: bool
) -> None:
    ours, theirs = (
        simulate_single(chat, policy=name, capacity=capacity).hits
        for name in ("hedged-lhd", "lru")
    )
    assert (ours == theirs) is is_lru


def test_the_same_trace_has_the_same_hits_again(chat: Trace) -> None:
    first, again = (
        simulate_single(chat, policy="hedged-lhd", capacity=200).hits for _ in range(2)
    )
    assert first == again


def chain(length: int, start: int = 0) -> list[ChunkCopy]:
    """Return the copies of one prompt, root to leaf."""
    keys = [make_key((start + depth).to_bytes(8, "big"), 0) for depth in range(length)]
    return [
        ChunkCopy(key, depth, parent, depth)
        for depth, (key, parent) in enumerate(zip(keys, [None, *keys], strict=False))
    ]


def in_group(copies: list[ChunkCopy], group: int) -> list[ChunkCopy]:
    """Return ``copies`` as they are of another KV cache group."""
    for copy in copies:
        copy.key = make_key(copy.key[:8], group)
        copy.parent = copy.parent and make_key(copy.parent[:8], group)
    return copies


def _way(copies: list[ChunkCopy], downwards: bool) -> list[ChunkCopy]:
    return copies if downwards else copies[::-1]


class _Filled:
    """A tier that serves prompts whole, in bulk or chunk by chunk."""

    def __init__(self, policy: HedgedLhd, *, in_bulk: bool) -> None:
        self.members: dict[bytes, ChunkCopy] = {}
        self._policy = policy
        self._in_bulk = in_bulk
        self._ctx = PolicyContext()

    def serve(self, prompt: list[ChunkCopy], pinned: set[int]) -> None:
        """Use what is here of ``prompt``, evict what may go for the rest, and let that in."""
        here, new = self.members, [copy for copy in prompt if copy.key not in self.members]
        used = [here[copy.key] for copy in reversed(prompt) if copy.key in here]
        policy, ctx = self._policy, self._ctx

        def may_go(copy: ChunkCopy) -> bool:
            return int.from_bytes(copy.key[:8], "big") not in pinned

        short = max(len(here) + len(new) - policy.capacity, 0)
        if self._in_bulk:
            policy.on_hit_many(used, ctx)
            victims = policy.pick_many(short, may_go, ctx)
        else:
            for copy in used:
                policy.on_hit(copy, ctx)
            victims = []
            while len(victims) < short and (victim := policy.pick(may_go, ctx)) is not None:
                victims.append(victim)
        for victim in victims:
            del here[victim.key]
        new = new[: policy.capacity - len(here)]
        if self._in_bulk:
            policy.on_insert_many(new, ctx)
        else:
            for copy in reversed(new):
                policy.on_insert(copy, ctx)
        here.update((copy.key, copy) for copy in new)


@pytest.mark.parametrize("downwards", [True, False])
def test_a_prompt_goes_leaf_first_however_it_came(downwards: bool) -> None:
    policy, ctx, copies = HedgedLhd(16), PolicyContext(), chain(8)
    if downwards:
        policy.on_insert_many(copies, ctx)
    else:
        for copy in reversed(copies):
            policy.on_insert(copy, ctx)
    assert policy.pick_many(8, lambda _: True, ctx) == copies[::-1]


@pytest.mark.parametrize("downwards", [True, False])
def test_chunks_of_several_groups_go_leaf_first_in_each(downwards: bool) -> None:
    policy, ctx = HedgedLhd(16), PolicyContext()
    # Groups of layers may hold different parts of a prompt: the first here is the deeper one.
    groups = [in_group(chain(9)[4:], 0), in_group(chain(3), 1)]
    policy.on_insert_many([copy for group in groups for copy in _way(group, downwards)], ctx)
    victims = policy.pick_many(8, lambda _: True, ctx)
    for number, group in enumerate(groups):
        assert [copy for copy in victims if copy.key.endswith(bytes([number]))] == group[::-1]


def test_chunks_of_unknown_prompts_enter_in_bulk_as_one_by_one() -> None:
    single, batch, ctx = HedgedLhd(600), HedgedLhd(600), PolicyContext()
    for policy in (single, batch):
        copies = chain(5)
        policy.on_insert_many(copies, ctx)
        survivors = [ChunkCopy(copy.key, copy.slot) for copy in chain(500, start=5)]
        if policy is batch:
            policy.on_insert_many(survivors, ctx)
        else:
            for copy in survivors:
                policy.on_insert(copy, ctx)
    orders = [
        [copy.slot for copy in policy.pick_many(600, lambda _: True, ctx)]
        for policy in (single, batch)
    ]
    assert orders[0] == orders[1]
    assert len(orders[0]) == 505


@pytest.mark.parametrize("downwards", [True, False])
def test_recovered_chunks_cost_no_more_however_they_stand(downwards: bool) -> None:
    single, batch, ctx = HedgedLhd(8192), HedgedLhd(8192), PolicyContext()
    orders, lines = [], 0
    for policy in (single, batch):
        survivors = [ChunkCopy(copy.key, copy.slot) for copy in chain(512)]
        policy.on_insert_many(survivors, ctx)
        used = _way(survivors, downwards)
        if policy is batch:
            lines = count_steps(partial(policy.on_hit_many, used, ctx))
        else:
            for copy in used:
                policy.on_hit(copy, ctx)
        orders.append([copy.slot for copy in policy.pick_many(512, lambda _: True, ctx)])
    assert lines < 8 * 512
    assert orders[0] == orders[1] == [copy.slot for copy in _way(chain(512), downwards)]


def test_a_victim_may_stay_after_its_key_was_forgotten() -> None:
    policy, ctx = HedgedLhd(4), PolicyContext()
    first, *others = chain(20)
    policy.on_insert(first, ctx)
    assert policy.pick(lambda _: True, ctx) is first
    for copy in others:
        policy.on_insert(copy, ctx)
        assert policy.pick(lambda _: True, ctx) is copy
    policy.on_stay(first, ctx)
    assert policy.pick_many(2, lambda _: True, ctx) == [first]


def test_a_search_without_a_victim_visits_each_chunk_once_and_moves_none() -> None:
    policy, ctx, asked, members = HedgedLhd(400), PolicyContext(), 0, 400
    for start in range(0, members, 40):
        policy.on_insert_many(chain(40, start), ctx)

    def refuse(_: ChunkCopy) -> bool:
        nonlocal asked
        asked += 1
        return False

    lines = count_steps(lambda: policy.pick_many(5, refuse, ctx))
    assert asked == members
    assert lines < 10 * members
    leaf_first = [depth + start for start in range(0, 400, 40) for depth in range(40)[::-1]]
    victims = policy.pick_many(members, lambda _: True, ctx)
    assert [int.from_bytes(copy.key[:8], "big") for copy in victims] == leaf_first


def test_what_one_batch_uses_twice_moves_twice() -> None:
    single, batch, ctx = HedgedLhd(16), HedgedLhd(16), PolicyContext()
    orders = []
    for policy in (single, batch):
        copies = chain(8)
        policy.on_insert_many(copies, ctx)
        used = [copies[place] for place in (5, 2, 1, 5, 0, 0, 6)]
        if policy is batch:
            policy.on_hit_many(used, ctx)
        else:
            for copy in used:
                policy.on_hit(copy, ctx)
        orders.append([copy.slot for copy in policy.pick_many(8, lambda _: True, ctx)])
    assert orders[0] == orders[1]
    assert sorted(orders[0]) == list(range(8))


def test_a_use_of_what_may_go_next_takes_back_the_choice() -> None:
    policy, ctx, copies = HedgedLhd(16), PolicyContext(), chain(8)
    policy.on_insert_many(copies, ctx)
    first = policy.pick_many(2, lambda _: True, ctx)
    assert first == [copies[7], copies[6]]
    policy.on_hit(copies[4], ctx)
    policy.on_remove(copies[3])
    rest = policy.pick_many(8, lambda _: True, ctx)
    assert rest == [copies[place] for place in (5, 2, 1, 0, 4)]


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 2**16), capacity=st.sampled_from([8, 48, 200]), is_pinning=st.booleans()
)
def test_bulk_calls_choose_as_single_ones_do(
    seed: int, capacity: int, is_pinning: bool
) -> None:
    rng = random.Random(seed)
    ours = [_Filled(HedgedLhd(capacity), in_bulk=in_bulk) for in_bulk in (True, False)]
    for _ in range(40):
        start, length = 100 * rng.randrange(12), rng.randint(1, capacity // 2)
        pinned = rng.sample(range(1200), 300 if is_pinning else 0)
        for tier in ours:
            tier.serve(chain(length, start), set(pinned))
        assert ours[0].members.keys() == ours[1].members.keys()


def test_the_reach_of_lru_moves_on_with_every_key_from_beyond_it() -> None:
    timeline = Timeline(4)
    runs = [timeline.open(0, since) for since in range(3)]
    for run, copies in zip(runs, (chain(2), chain(2, 2), chain(2, 4)), strict=True):
        run.live = len(copies)
        timeline.enter(2)
    assert [run.beyond for run in runs] == [True, False, False]


def budget_after(capacity: int, lead: float) -> RegretBudget:
    """Return a regret_budget that saw 10,000 uses in prompts of ten chunks."""
    regret_budget = RegretBudget(capacity, KEEP)
    regret_budget.uses, regret_budget.depths, regret_budget.lead = 10_000.0, 100_000.0, lead
    return regret_budget


def test_wins_raise_the_budget_and_losses_lower_it() -> None:
    at_first = budget_after(1000, 0.0).limit
    assert 0 < at_first <= MOST_LOST * 10_000
    assert budget_after(1000, 100.0).limit > at_first + 100
    assert budget_after(1000, -10.0).limit == at_first - 10
    assert budget_after(1000, -at_first).limit == 0.0


def test_a_tier_of_few_prompts_stays_with_lru() -> None:
    assert budget_after(159, 100.0).limit == 0.0
    assert budget_after(160, 100.0).limit > 0.0


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    regimes=st.lists(
        st.tuples(st.sampled_from(["new", "few", "again"]), st.integers(1, 60)), max_size=30
    ),
)
def test_losses_are_bounded_by_counting_whatever_comes(
    seed: int, regimes: list[tuple[str, int]]
) -> None:
    capacity, rng, uses = 32, random.Random(seed), 0
    ours, theirs = ModelTier(HedgedLhd(capacity)), ModelTier(Lru(capacity))
    seen, most_lead = [0], 0
    for regime, length in regimes:
        for _ in range(10 * length):
            if regime == "new":
                seen.append(len(seen))
            number = {
                "new": seen[-1],
                "few": rng.choice(seen[:20]),
                "again": seen[-min(len(seen), rng.choice((capacity // 2, capacity - 2)))],
            }[regime]
            key, uses = make_key(number.to_bytes(8, "big"), 0), uses + 1
            ours.access(key)
            theirs.access(key)
            lead = ours.hits - theirs.hits
            most_lead = max(most_lead, lead)
            # Cohorts blur where LRU's reach ends, by a cohort's length.
            assert -lead <= LOST_SHARE * uses + ODDS * most_lead + 8


def test_density_prefers_the_class_that_is_used_and_the_young() -> None:
    density = HitDensity(64, [[], []], KEEP, interval=64)
    for kind in (0, 1):
        density.add(kind, 0, 200)
    density.record_uses(1, 0, 20, 100)
    for now in range(60, 1000, 60):
        density.advance(now)
    density.renew()
    assert density.table[1][0] > 2 * density.table[0][0]
    assert density.table[0][7] > density.table[0][-1]


def test_a_prefix_is_worth_no_less_than_what_continues_it() -> None:
    density = HitDensity(64, [[], [0]], KEEP, interval=64)
    density.add(0, 0, 100)
    density.record_uses(0, 0, 20, 100)
    density.renew()
    assert all(map(float.__le__, density.table[0], density.table[1]))
