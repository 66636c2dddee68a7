"""A thread that copies alone takes no processors from the model's threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import pytest
import torch

from kvtier.memory.streams import use_one_torch_thread

T = TypeVar("T")


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Let torch spread its operations over two threads, whatever this machine has."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def in_a_thread(*calls: Callable[[], T]) -> T:
    """Run ``calls`` in one new thread; return what the last returned."""
    with ThreadPoolExecutor(1) as thread:
        return [thread.submit(call).result() for call in calls][-1]


def threads_started_by_a_large_operation() -> int:
    before = threads()
    torch.ones(1 << 20).add_(1)
    return len(threads() - before)  # by their numbers: meanwhile those of others may end


def threads() -> set[str]:
    return {task.name for task in Path("/proc/self/task").iterdir()}


@pytest.mark.usefixtures("two_threads")
def test_a_thread_that_computes_alone_starts_no_team() -> None:
    assert in_a_thread(threads_started_by_a_large_operation) == 1
    assert in_a_thread(use_one_torch_thread, threads_started_by_a_large_operation) == 0


@pytest.mark.usefixtures("two_threads")
def test_the_other_threads_keep_theirs() -> None:
    assert in_a_thread(use_one_torch_thread, torch.get_num_threads) == 1
    assert torch.get_num_threads() == 2
    assert in_a_thread(torch.get_num_threads) == 2
