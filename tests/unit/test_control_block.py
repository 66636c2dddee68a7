"""Words of the control block, written by workers and the transfer engine."""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from kvtier.memory import ControlBlock

SLOTS, RANKS = 4, 2


@pytest.fixture
def block() -> ControlBlock:
    nbytes = ControlBlock.nbytes(SLOTS, RANKS)
    return ControlBlock(memoryview(bytearray(nbytes)), slots=SLOTS, ranks=RANKS)


def test_a_slot_is_stored_when_every_rank_has_its_generation(block: ControlBlock) -> None:
    block.set_generation(0, [0, 1], 5)
    assert block.stored([0, 1], [5, 5]) == [False, False]
    block.set_generation(1, [0, 1], 5)
    assert block.stored([0, 1], [5, 5]) == [True, True]
    assert block.stored([0], [6]) == [False]


def test_all_is_acknowledged_when_every_rank_acknowledged_every_job(
    block: ControlBlock,
) -> None:
    assert block.all_acknowledged([0, 1]) == [True, True]
    block.issue([0, 1])
    block.issue([1])
    for rank in range(RANKS):
        block.acknowledge(rank, [0, 1])
    assert block.all_acknowledged([0, 1]) == [True, False]
    block.acknowledge(0, [1])
    assert block.all_acknowledged([1]) == [False]
    block.acknowledge(1, [1])
    assert block.all_acknowledged([1]) == [True]


def test_a_worker_may_load_what_it_stored_or_what_was_published(block: ControlBlock) -> None:
    block.set_generation(0, [2], 9)
    block.publish([3], [10])
    assert block.has_generations(0, [2, 3], [9, 10])
    assert not block.has_generations(1, [2, 3], [9, 10])
    assert block.has_generations(1, [3], [10])


def test_a_rank_retracts_its_own_generations_and_no_others(block: ControlBlock) -> None:
    for rank in range(RANKS):
        block.set_generation(rank, [0, 1, 3], 5)
    block.publish([3], [6])
    block.retract(1, [1, 3], [5, 5])
    assert block.stored([0, 1], [5, 5]) == [True, False]
    assert block.has_generations(0, [1], [5])
    assert block.stored([3], [6]) == [True]


def test_no_acknowledgement_is_lost_when_two_threads_of_a_rank_make_them_at_once(
    block: ControlBlock,
) -> None:
    slots, rounds = [0, 2, 3], 4000
    ready = threading.Barrier(2)

    def acknowledge() -> None:
        ready.wait()
        for _ in range(rounds):
            block.acknowledge(0, slots)
            block.acknowledge(1, slots)

    threads = [threading.Thread(target=acknowledge) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for _ in range(2 * rounds):
        block.issue(slots)
    assert block.all_acknowledged(slots) == [True, True, True]


def test_every_rank_sees_lost_chunks_and_cleared_generations(
    block: ControlBlock,
) -> None:
    block.publish([0, 1, 2], [5, 6, 7])
    block.clear_generations([0])
    block.mark_lost([1], [6])
    for rank in range(RANKS):
        whole, lost = block.arrivals(rank, [0, 1, 2], [5, 6, 7])
        assert whole == [False, False, True]
        assert lost == [False, True, False]


@contextlib.contextmanager
def before_line(number: int, act: Callable[[], object]) -> Iterator[None]:
    """Let ``act`` be called before line ``number`` of :meth:`ControlBlock.arrivals`."""
    lines = itertools.count()

    def on_event(frame: types.FrameType, event: str, _: object) -> Any:
        if frame.f_code is not ControlBlock.arrivals.__code__:
            return None
        if event == "line" and next(lines) == number:
            act()
        return on_event

    before = sys.gettrace()
    sys.settrace(on_event)
    try:
        yield
    finally:
        sys.settrace(before)


@pytest.mark.parametrize("slots", [[0, 1, 2], [0, 2]])
def test_a_chunk_that_arrives_during_a_look_is_not_lost(
    block: ControlBlock, slots: list[int]
) -> None:
    generations = [5] * len(slots)
    nowhere = [False] * len(slots)
    arrived = []
    for number in itertools.count():
        block.clear_generations(slots)
        with before_line(number, lambda: block.publish(slots, generations)):
            whole, lost = block.arrivals(0, slots, generations)
        assert lost == nowhere
        arrived.append(whole)
        if block.arrivals(0, slots, generations)[0] == nowhere:
            break  # there is no such line
    assert arrived[0] == [True] * len(slots)
    assert arrived[1:] == [nowhere] * len(arrived[1:])
    assert len(arrived) > 2


def test_clearing_the_failed_loads_of_a_slot_clears_them_for_all_ranks(
    block: ControlBlock,
) -> None:
    block.record_failed_loads(0, [1, 2], [5, 6])
    block.record_failed_loads(1, [2, 3], [6, 7])
    block.clear_failed_loads([2])
    assert block.loaded([1, 2, 3], [5, 6, 7]) == [False, True, False]
    block.clear_failed_loads([])
    assert block.loaded([1, 3], [5, 7]) == [False, False]


def test_slots_in_any_order_are_those_that_were_named(block: ControlBlock) -> None:
    """Also where the first and the last are as far apart as if they stood in order."""
    slots, generations = [0, 2, 1, 3], [5, 6, 7, 8]
    block.publish(slots, generations)
    assert block.has_generations(0, [0, 1, 2, 3], [5, 7, 6, 8])


def test_an_empty_query_has_an_empty_answer(block: ControlBlock) -> None:
    block.publish([], [])
    block.issue([])
    assert block.stored([], []) == []
    assert block.all_acknowledged([]) == []
    assert block.has_generations(0, [], [])


def test_its_size_is_whole_pages() -> None:
    assert ControlBlock.nbytes(1, 1) == 4096
    assert ControlBlock.nbytes(4096, 1) == 37 * 4096


def test_ranks_that_could_not_lock_the_memory_are_counted(block: ControlBlock) -> None:
    assert block.pageable_ranks() == 0
    block.report_pageable(1)
    block.report_pageable(1)
    assert block.pageable_ranks() == 1


def test_a_load_that_one_rank_refused_did_not_work_until_the_slot_is_written_again(
    block: ControlBlock,
) -> None:
    block.publish([2, 3], [9, 10])
    block.record_failed_loads(1, [3], [10])
    assert block.loaded([2, 3], [9, 10]) == [True, False]
    assert block.has_generations(0, [2, 3], [9, 10])
    block.publish([3], [11])
    assert block.loaded([2, 3], [9, 11]) == [True, True]
    block.record_failed_loads(0, [], [])
    assert block.loaded([], []) == []


# -- GDS reads ---------------------------------------------------------------------------------


def test_gds_reads_are_possible_only_while_every_rank_can(block: ControlBlock) -> None:
    assert (block.gds_parts(), block.gds_ranks()) == (0, 0)
    block.report_gds(1, 1)
    assert (block.gds_parts(), block.gds_ranks()) == (0, 1)
    block.report_gds(0, 0)
    assert (block.gds_parts(), block.gds_ranks()) == (2, 2)
    block.withdraw_gds(1)
    assert (block.gds_parts(), block.gds_ranks()) == (0, 1)


def test_each_rank_hashes_its_part_of_a_generation(block: ControlBlock) -> None:
    for rank in range(RANKS):
        block.report_gds(rank, rank)
        block.set_hashes(rank, [1, 3], np.array([10 + rank, 20 + rank], np.uint64), 5)
    assert block.part_hashes([1, 3], [5, 5]).tolist() == [[10, 11], [20, 21]]
    assert block.part_hashes([3, 1, 0], [5, 6, 5]).tolist() == [[20, 21], [0, 0], [0, 0]]


def test_a_hash_that_one_rank_has_not_written_yet_is_unknown(block: ControlBlock) -> None:
    for rank in range(RANKS):
        block.report_gds(rank, rank)
    block.set_hashes(0, [2], np.array([9], np.uint64), 5)
    block.set_hashes(1, [2], np.array([9], np.uint64), 4)
    assert not block.part_hashes([2], [5]).any()


def test_hashes_of_a_promoted_chunk_are_unknown(block: ControlBlock) -> None:
    for rank in range(RANKS):
        block.report_gds(rank, rank)
        block.set_hashes(rank, [2], np.array([9], np.uint64), 5)
        block.set_generation(rank, [2], 5)
    block.publish([2], [6])
    assert not block.part_hashes([2], [6]).any()


def test_ranks_that_take_turns_writing_one_part_add_up_modulo_2_to_64(
    block: ControlBlock,
) -> None:
    for rank, value in enumerate([(1 << 64) - 1, 3]):
        block.report_gds(rank, 0)
        block.set_hashes(rank, [0], np.array([value], np.uint64), 5)
    assert block.part_hashes([0], [5]).tolist() == [[2]]


def test_hashes_are_apart_from_the_other_words(block: ControlBlock) -> None:
    everything = list(range(SLOTS))
    for rank in range(RANKS):
        block.set_hashes(rank, everything, np.full(SLOTS, (1 << 64) - 1, np.uint64), 1 << 62)
        block.report_gds(rank, 7)
    assert block.pageable_ranks() == 0
    assert block.loaded(everything, [5] * SLOTS) == [True] * SLOTS
    assert block.all_acknowledged(everything) == [True] * SLOTS
    assert block.stored(everything, [1 << 62] * SLOTS) == [False] * SLOTS
