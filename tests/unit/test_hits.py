"""How far a hit reaches: the rules, against a definition that tries every end."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.keys import ChunkKey, make_key
from kvtier.manager import GroupReach, HitRules, Prompt, Reach

PREFIX, WINDOW, LOCAL, STATE = Reach.PREFIX, Reach.WINDOW, Reach.LOCAL, Reach.STATE


class There:
    """A set of chunks."""

    def __init__(self, keys: Collection[ChunkKey]) -> None:
        self.keys = keys

    def lead(self, keys: Sequence[ChunkKey]) -> int:
        return next((at for at, key in enumerate(keys) if not self.has(key)), len(keys))

    def has(self, key: ChunkKey) -> bool:
        return key in self.keys


def chunks_of(groups: Sequence[GroupReach], tokens: int) -> list[list[ChunkKey]]:
    """Return the keys of a prompt's whole chunks, group by group."""
    return [
        [make_key(str(at).encode(), number) for at in range(tokens // group.chunk_tokens)]
        for number, group in enumerate(groups)
    ]


def hit(
    *groups: GroupReach,
    tokens: int,
    missing: Collection[tuple[int, int]] = (),
    local: int = 0,
) -> int:
    """Return where the hit of a prompt of ``tokens`` ends.

    Args:
        *groups: The KV cache groups.
        tokens: Of the prompt.
        missing: Chunks that are not there, as (group, number).
        local: Tokens that the engine has.
    """
    keys = chunks_of(groups, tokens)
    lost = {keys[group][number] for group, number in missing}
    there = {key for some in keys for key in some} - lost
    return HitRules(groups).longest(Prompt(keys, local, tokens), There(there))


# -- one group -------------------------------------------------------------------------------


def test_full_attention_hits_up_to_its_first_missing_chunk() -> None:
    group = GroupReach(16)
    assert hit(group, tokens=100) == 96
    assert hit(group, tokens=100, missing=[(0, 3)]) == 48
    assert hit(group, tokens=100, missing=[(0, 0)]) == 0


def test_a_window_needs_the_chunks_of_its_last_tokens_only() -> None:
    # The token behind the hit reads itself and the 32 before it: two chunks.
    group = GroupReach(16, WINDOW, 33)
    early = [(0, 0), (0, 1), (0, 2)]
    assert hit(group, tokens=96, missing=early) == 96
    assert hit(group, tokens=96, missing=[*early, (0, 4)]) == 0
    assert hit(group, tokens=96, missing=[(0, 4)]) == 64
    # One token more is in a third chunk.
    assert hit(GroupReach(16, WINDOW, 34), tokens=96, missing=[(0, 3)]) == 48


def test_a_window_is_shorter_at_the_root() -> None:
    assert hit(GroupReach(16, WINDOW, 1000), tokens=96, missing=[(0, 1)]) == 16


def test_local_attention_needs_the_chunks_since_its_last_boundary() -> None:
    group = GroupReach(16, LOCAL, 64)
    assert hit(group, tokens=96, missing=[(0, 3)]) == 96
    assert hit(group, tokens=96, missing=[(0, 4)]) == 64, "at a boundary nothing is read"
    assert hit(group, tokens=48, missing=[(0, 0)]) == 0


def test_recurrent_layers_need_the_last_state_only() -> None:
    group = GroupReach(16, STATE)
    assert hit(group, tokens=100, missing=[(0, 0), (0, 1), (0, 2)]) == 96
    assert hit(group, tokens=100, missing=[(0, 4), (0, 5)]) == 64


# -- several groups --------------------------------------------------------------------------


def test_every_group_has_its_say() -> None:
    full, window, state = GroupReach(16), GroupReach(16, WINDOW, 33), GroupReach(16, STATE)
    assert hit(full, window, state, tokens=96) == 96
    assert hit(full, window, state, tokens=96, missing=[(0, 4)]) == 64
    assert hit(full, window, state, tokens=96, missing=[(1, 5), (2, 4)]) == 64
    assert hit(full, window, state, tokens=96, missing=[(1, 5), (2, 4), (1, 3)]) == 48


def test_a_group_that_comes_later_sends_an_earlier_one_back() -> None:
    window, state = GroupReach(16, WINDOW, 33), GroupReach(16, STATE)
    # The window is whole before 96 and before 48, the state is there before 64 and 48.
    missing = [(0, 3), (1, 5), (1, 4)]
    assert hit(window, state, tokens=96, missing=missing) == 48


def test_a_hit_ends_where_all_groups_have_the_end_of_a_chunk() -> None:
    groups = (GroupReach(16), GroupReach(48, STATE))
    assert HitRules(groups).alignment_tokens == 48
    assert hit(*groups, tokens=100) == 96
    assert hit(*groups, tokens=100, missing=[(0, 5)]) == 48
    assert hit(*groups, tokens=47) == 0


def test_a_limit_cuts_the_hit() -> None:
    keys = chunks_of([GroupReach(16)], 96)
    rules, there = HitRules([GroupReach(16)]), There(keys[0])
    assert [rules.longest(Prompt(keys, 0, limit), there) for limit in (95, 33, 15, 0)] == [
        80,
        32,
        0,
        0,
    ]


# -- tokens that the engine has --------------------------------------------------------------


def test_a_hit_may_lack_chunks_that_the_engine_has() -> None:
    assert hit(GroupReach(16), tokens=96, local=48, missing=[(0, 0), (0, 2)]) == 96
    assert hit(GroupReach(16), tokens=96, local=48, missing=[(0, 3)]) == 48
    assert hit(GroupReach(16, WINDOW, 65), tokens=96, local=48, missing=[(0, 2)]) == 96


def test_a_hit_shorter_than_the_alignment_of_all_groups_is_a_miss() -> None:
    assert hit(GroupReach(32), tokens=64, local=16) == 64
    assert hit(GroupReach(32), tokens=32, local=16) == 16
    assert hit(GroupReach(16), tokens=96, local=96) == 96
    assert hit(GroupReach(16), tokens=96, local=90) == 90


def test_a_load_has_the_chunks_behind_the_local_tokens_that_each_group_reads() -> None:
    groups = (
        GroupReach(16),
        GroupReach(32),
        GroupReach(16, WINDOW, 33),
        GroupReach(16, LOCAL, 64),
        GroupReach(16, STATE),
    )
    keys = chunks_of(groups, 112)
    needed = HitRules(groups).needed(Prompt(keys, 16, 112), 96)
    assert (
        needed
        == [
            *keys[0][1:6],
            *keys[1][0:3],  # the engine has half of the first
            *keys[2][4:6],
            *keys[3][4:6],
            *keys[4][5:6],
        ]
    )


# -- against a definition --------------------------------------------------------------------


def reads(group: GroupReach, end: int) -> range:
    """Return the tokens of a prefix of ``end`` that the group's next token depends on."""
    first = {
        PREFIX: 0,
        WINDOW: end + 1 - group.window_tokens,
        LOCAL: end // max(group.window_tokens, 1) * group.window_tokens,
        STATE: end - 1,
    }[group.reach]
    return range(max(first, 0), end)


def can_end(
    groups: Sequence[GroupReach], prompt: Prompt, there: Collection[ChunkKey], end: int
) -> bool:
    """Return whether every group has what it reads of a prefix of ``end`` tokens."""
    for group, keys in zip(groups, prompt.keys, strict=True):
        for token in reads(group, end):
            chunk = token // group.chunk_tokens
            if token >= prompt.local_tokens and (
                chunk >= len(keys) or keys[chunk] not in there
            ):
                return False
    return True


def longest_of_all(
    groups: Sequence[GroupReach], prompt: Prompt, there: Collection[ChunkKey]
) -> int:
    """Try every end."""
    step = math.lcm(*(group.chunk_tokens for group in groups))
    local = prompt.local_tokens
    ends = [
        end
        for end in range(0, prompt.limit_tokens + 1, step)
        if end - local >= step and can_end(groups, prompt, there, end)
    ]
    return max(ends, default=local)


any_group = st.builds(
    GroupReach,
    chunk_tokens=st.sampled_from([1, 2, 3, 4]),
    reach=st.sampled_from(Reach),
    window_tokens=st.integers(1, 9),
)


@pytest.mark.untraced
@given(
    groups=st.lists(any_group, min_size=1, max_size=4),
    tokens=st.integers(0, 40),
    local=st.integers(0, 40),
    shorter=st.integers(0, 3),
    data=st.data(),
)
def test_the_search_finds_the_longest_of_all_ends(
    groups: list[GroupReach], tokens: int, local: int, shorter: int, data: st.DataObject
) -> None:
    keys = chunks_of(groups, tokens)
    every = [key for some in keys for key in some]
    missing = data.draw(st.sets(st.sampled_from(every), max_size=6)) if every else set()
    there = {*every} - missing
    prompt = Prompt(keys, min(local, tokens), max(tokens - shorter, 0))
    rules = HitRules(groups)
    end = rules.longest(prompt, There(there))
    assert end == longest_of_all(groups, prompt, there)
    needed = rules.needed(prompt, end)
    assert there.issuperset(needed)
    assert len(needed) == len({*needed})
    if end > prompt.local_tokens:
        loaded = {key for key in every if key in needed}
        assert can_end(groups, prompt, loaded, end), "the load is all that it takes"
