"""The galloping search finds the leading keys of a chain with few questions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from hypothesis import given
from hypothesis import strategies as st

from kvtier.tiers.shared.gallop import AT_ONCE, count_leading, count_rounds

COUNTS = st.integers(0, 1 << 20)


class Service:
    """Answers questions about positions and records them."""

    def __init__(self, has: Callable[[int], bool]) -> None:
        self.rounds: list[list[int]] = []
        self._has = has

    async def ask(self, positions: Sequence[int]) -> list[bool]:
        self.rounds.append(list(positions))
        return [self._has(position) for position in positions]


@given(data=st.data(), count=COUNTS, at_once=st.integers(1, 32))
async def test_a_chain_without_holes_is_counted_exactly(
    data: st.DataObject, count: int, at_once: int
) -> None:
    stored = data.draw(st.integers(0, count))
    service = Service(lambda position: position < stored)
    assert await count_leading(count, service.ask, at_once=at_once) == stored


@given(data=st.data(), count=st.integers(1, 1 << 20), at_once=st.integers(1, 32))
async def test_the_number_of_questions_is_logarithmic(
    data: st.DataObject, count: int, at_once: int
) -> None:
    stored = data.draw(st.integers(0, count))
    service = Service(lambda position: position < stored)
    await count_leading(count, service.ask, at_once=at_once)
    assert len(service.rounds) <= 2 + math.log(count) / math.log(at_once + 1)
    for asked in service.rounds:
        assert 1 <= len(asked) <= at_once
        assert asked == sorted(set(asked))
        assert 0 <= asked[0] <= asked[-1] < count


@given(there=st.lists(st.booleans(), max_size=200))
async def test_with_holes_the_count_ends_at_a_missing_key(there: list[bool]) -> None:
    service = Service(there.__getitem__)
    count = await count_leading(len(there), service.ask)
    assert count_rounds(there) == len(service.rounds)
    assert count == len(there) or not there[count]
    assert count == 0 or there[0]
    assert count == 0 or there[count - 1]


@given(count=st.integers(1, 1 << 20))
async def test_one_round_finds_that_all_keys_or_no_keys_are_there(count: int) -> None:
    for stored in (0, count):
        service = Service(lambda position, stored=stored: position < stored)  # type: ignore[misc]
        assert await count_leading(count, service.ask) == stored
        assert len(service.rounds) == 1


async def test_a_short_chain_is_asked_about_in_one_round() -> None:
    for stored in range(AT_ONCE + 1):
        service = Service(lambda position, stored=stored: position < stored)  # type: ignore[misc]
        assert await count_leading(AT_ONCE, service.ask) == stored
        assert service.rounds == [list(range(AT_ONCE))]


async def test_no_keys_need_no_question() -> None:
    service = Service(lambda _: True)
    assert await count_leading(0, service.ask) == 0
    assert service.rounds == []
