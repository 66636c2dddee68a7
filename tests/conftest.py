"""Fixtures of every test: event loops, hypothesis profiles, and a check for leftovers."""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import inspect
import logging
import pathlib
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import hypothesis
import pytest
import uvloop
from blockbuster import blockbuster_ctx

ROOT = pathlib.Path(__file__).parent.parent
GRACE_S = 20.0

# Without deadlines: tests share two cores with whatever else runs.
hypothesis.settings.register_profile("dev", max_examples=50, deadline=None)
# CI draws the same examples every time and does not shrink them: shrinking a hanging example
# would repeat it without a time limit.
hypothesis.settings.register_profile(
    "ci",
    max_examples=100,
    deadline=None,
    derandomize=True,
    report_multiple_bugs=False,
    phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],
)
hypothesis.settings.register_profile(
    "nightly", max_examples=2000, stateful_step_count=100, deadline=None
)
hypothesis.settings.load_profile("dev")


NEEDS_VLLM = (
    "kvtier/memory/cuda_hash.py",
    "kvtier/memory/cuda_kernel.py",
    "kvtier/vllm/connector.py",
    "kvtier/vllm/events.py",
    "kvtier/vllm/offline.py",
    "kvtier/vllm/metrics.py",
    "kvtier/vllm/spec.py",
    "tests/integration",
)
VLLM_IS_MISSING = importlib.util.find_spec("vllm") is None


def pytest_configure(config: pytest.Config) -> None:
    logging.setLogRecordFactory(make_record_without_frames)
    if VLLM_IS_MISSING:
        # Their modules import vllm at the top, so collecting them would fail.
        hidden = [str(ROOT / path) for path in NEEDS_VLLM]
        config.option.ignore = [*(config.option.ignore or ()), *hidden]


def make_record_without_frames(*args: Any, **kwargs: Any) -> logging.LogRecord:
    """Make a log record that keeps the text of an exception only.

    pytest keeps log records until the fixtures of a test are torn down. An exception refers to
    every frame below it with its buffers, and :func:`_nothing_is_left_behind` would find them.
    """
    record = logging.LogRecord(*args, **kwargs)
    if any(isinstance(each, BaseException) for each in record.args or ()):
        record.msg, record.args = record.getMessage(), None
    if record.exc_info:
        record.exc_text = "".join(traceback.format_exception(*record.exc_info)).rstrip()
        record.exc_info = None
    return record


def pytest_report_header() -> str | None:
    return f"no vLLM here: {' and '.join(NEEDS_VLLM)} left out" if VLLM_IS_MISSING else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if on_gpu and not cuda_is_available():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def pytest_collection_finish() -> None:
    """Exempt what is there from garbage collection; a full one took a quarter of a second."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Let Python free what it frees at its end; libraries report the rest as leaks."""
    gc.unfreeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Run tests marked ``untraced`` without coverage, which is up to six times as fast.

    The mark ``no_cover`` of pytest-cov has no effect under xdist: a worker has two collectors,
    and it stops one of them.
    """
    tracer = sys.gettrace()
    if tracer is None or not item.get_closest_marker("untraced"):
        return (yield)
    sys.settrace(None)
    try:
        return (yield)
    finally:
        sys.settrace(tracer)


def cuda_is_available() -> bool:
    import torch  # noqa: PLC0415 - seconds to import, and only GPU tests ask

    return torch.cuda.is_available()


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Run coroutine tests on asyncio's loop, as kvtier does; nightly on uvloop as well.

    A program that embeds kvtier may make uvloop the default, as ``uvloop.install`` does.
    """
    loops = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
    if config.getoption("--hypothesis-profile") != "nightly":
        del loops["uvloop"]
    return loops


@pytest.fixture
def forked_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork the hosts of tiers from a process that has imported kvtier."""
    forked_hosts = importlib.import_module("tests.support.forked_hosts")
    process = importlib.import_module("kvtier.tiers.hosted.process")
    monkeypatch.setattr(process, "run_host", forked_hosts.run_host)


@pytest.fixture(autouse=True)
def _nothing_blocks_the_loop(request: pytest.FixtureRequest) -> Iterator[None]:
    function = getattr(request.node, "function", None)
    if not inspect.iscoroutinefunction(function):
        yield
        return
    with blockbuster_ctx("kvtier"):
        yield


@pytest.fixture(autouse=True)
def _nothing_is_left_behind() -> Iterator[None]:
    """Fail a test that leaves a thread, a shared-memory file or a memory file."""
    before = leftovers()
    yield
    deadline_s = time.monotonic() + GRACE_S
    # Stopping threads and memory of another test process disappear within moments.
    while (left := leftovers() - before) and time.monotonic() < deadline_s:
        gc.collect()
        time.sleep(0.01)
    assert not left, f"left behind: {', '.join(sorted(name for name, _ in left))}"


def leftovers() -> set[tuple[str, int]]:
    """Return threads and files that a test must not leave, each with a distinct number."""
    threads = {
        (f"thread {thread.name}", thread.ident or 0)
        for thread in threading.enumerate()
        # The executor of the event loop ends with the loop, which may outlive this fixture.
        if thread.name.startswith("kvtier")
        or not (thread.daemon or thread.name.startswith("asyncio_"))
    }
    shared = {
        (str(path), 0) for path in pathlib.Path("/dev/shm").glob("*") if "kvtier" in path.name
    }
    return threads | shared | memory_files()


def memory_files() -> set[tuple[str, int]]:
    """Return the open memory files of this process that kvtier named."""
    found = set()
    for descriptor in pathlib.Path("/proc/self/fd").iterdir():
        try:
            target = str(descriptor.readlink())
        except FileNotFoundError:
            continue  # the descriptor that listed the directory
        if target.startswith("/memfd:kvtier"):
            found.add((target, int(descriptor.name)))
    return found
