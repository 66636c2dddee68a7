"""What ``kvtier cache`` shows on a terminal while it works, and that it can be interrupted."""

from __future__ import annotations

import contextlib
import os
import pty
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence

import pytest

from kvtier.keys import short_key
from kvtier.tiers.slab import maintain
from kvtier.tiers.slab.index_reader import IndexReader
from kvtier.tiers.slab.inspect import StoredNamespace, find_namespaces
from tests.unit.cache_shell import Shell
from tests.unit.stores import KEYS, SLOTS, Store

FILLING = """
WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n WHERE x < 20000)
INSERT INTO removals SELECT x, 1, 'evicted', x'' FROM n
"""
"""Rows that take SQLite a while to copy."""


class Terminal:
    """Takes the place of stderr, and keeps what is shown."""

    def __init__(self) -> None:
        self._master, slave = pty.openpty()
        self.stderr = os.fdopen(slave, "w")
        self._shown = bytearray()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        with contextlib.suppress(OSError):  # EIO when the other side is closed
            while some := os.read(self._master, 4096):
                self._shown += some

    def close(self) -> str:
        self.stderr.close()
        self._reader.join()
        os.close(self._master)
        return self._shown.decode()


@pytest.fixture
def on_terminal(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Sequence[object]], str]:
    """Runs a command; returns what a terminal showed of it."""

    def run(command: Sequence[object]) -> str:
        terminal = Terminal()
        try:
            with monkeypatch.context() as patch:
                patch.setenv("TERM", "xterm")
                patch.setattr(sys, "stderr", terminal.stderr)
                assert shell(*command).code == 0
        finally:
            shown = terminal.close()
        return shown

    return run


@pytest.fixture
def space(store: Store) -> Iterator[StoredNamespace]:
    store.filled().sql(FILLING)
    (space,) = find_namespaces(store.root)
    with maintain.hold(space, "stop that engine"):
        yield space


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        (["verify"], ["100%"]),
        (["evict", "--yes", *map(short_key, KEYS[:3])], ["looking", "100%", "removing"]),
        (["evict", "--yes", "--all"], ["looking", "removing"]),
        (["compact-index"], ["compacting"]),
    ],
    ids=["verify", "evict-keys", "evict-all", "compact-index"],
)
def test_long_commands_show_a_bar_on_a_terminal(
    on_terminal: Callable[[Sequence[object]], str],
    store: Store,
    command: list[str],
    shown: list[str],
) -> None:
    terminal = on_terminal([command[0], store.filled().root, *command[1:]])
    assert "\u2501" in terminal  # of which bars are made
    assert store.directory.name in terminal
    for words in shown:
        assert words in terminal


def test_sqlite_gives_signs_of_life_while_an_index_is_compacted(space: StoredNamespace) -> None:
    signs: list[None] = []
    maintain.compact_index(space, lambda: signs.append(None))
    assert len(signs) > 5


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Have SIGINT interrupt; a shell starts what runs in the background with it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_a_user_can_interrupt_a_compaction_and_nothing_is_changed(
    space: StoredNamespace,
) -> None:
    with IndexReader(space) as reader:
        before = reader.totals()
    with pytest.raises(KeyboardInterrupt):
        maintain.compact_index(space, lambda: signal.raise_signal(signal.SIGINT))
    with IndexReader(space) as reader:
        assert reader.totals() == before
    maintain.compact_index(space, lambda: None)


@pytest.mark.usefixtures("interruptible")
def test_a_user_can_interrupt_a_removal_and_nothing_is_removed(
    space: StoredNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtier.tiers.slab.index._INSTRUCTIONS_PER_CALLBACK", 1)
    with IndexReader(space) as reader:
        entries = reader.entries("stored", -1)
    with pytest.raises(KeyboardInterrupt):
        maintain.drop_chunks(space, entries, lambda: signal.raise_signal(signal.SIGINT))
    with IndexReader(space) as reader:
        assert reader.totals().chunks == SLOTS
