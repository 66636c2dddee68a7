"""``kvtier cache evict`` and ``compact-index``."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys

import pytest

from kvtier.keys import short_key
from kvtier.tiers.slab import maintain
from kvtier.tiers.slab.inspect import find_namespaces
from tests.support.faulty_io import FaultyIo
from tests.unit.cache_shell import ROOT, Shell, flat
from tests.unit.stores import KEYS, SLOTS, Store


class TestEvict:
    def test_keys_leave_and_nothing_else(self, shell: Shell, store: Store) -> None:
        store.filled()
        gone = [KEYS[2].hex(), short_key(KEYS[5])]
        ran = shell("evict", store.root, *gone, "--yes")
        assert (ran.code, ran.err) == (0, "")
        assert ran.out.splitlines()[-1] == "removed 2 chunks (16.0 KiB)"
        assert store.start() == [KEYS[slot] for slot in range(SLOTS) if slot not in {2, 5}]

    def test_a_chunk_named_twice_is_one_chunk(self, shell: Shell, store: Store) -> None:
        ran = shell("evict", store.filled().root, KEYS[2].hex(), short_key(KEYS[2]), "--yes")
        assert (ran.code, ran.out.splitlines()[-1]) == (0, "removed 1 chunk (8.00 KiB)")

    def test_chunks_that_were_not_used_for_long_are_removed(
        self, shell: Shell, store: Store
    ) -> None:
        store.filled()
        store.sql("UPDATE chunks SET stored_at = stored_at - 86400, used_at = used_at - 86400")
        store.sql("UPDATE chunks SET used_at = used_at + 80000 WHERE slot = 3")
        store.sql("UPDATE chunks SET stored_at = 0, used_at = 0 WHERE slot = 4")
        document = shell.json("evict", store.root, "--older-than", "12h", "--yes")
        (left,) = document["namespaces"]
        assert left["chunks"] == 14
        assert store.start() == [KEYS[3], KEYS[4]]

    @pytest.mark.parametrize(("answer", "code", "left"), [("y\n", 0, 0), ("n\n", 1, SLOTS)])
    def test_evict_asks_before_it_removes(
        self,
        store: Store,
        answer: str,
        code: int,
        left: int,
    ) -> None:
        store.filled()
        ran = subprocess.run(
            [sys.executable, "-m", "kvtier", "cache", "evict", "--all", str(store.root)],
            input=answer,
            capture_output=True,
            text=True,
            check=False,
            cwd=ROOT,
        )
        assert ran.returncode == code
        assert "Remove 16 chunks (128 KiB)? [y/N]" in ran.stderr
        assert len(store.start()) == left

    @pytest.mark.parametrize(
        "arguments", [[], ["--all", "--older-than", "1d"], ["ab" * 8, "--all"]]
    )
    def test_one_way_to_choose_is_needed(
        self, shell: Shell, store: Store, arguments: list[str]
    ) -> None:
        ran = shell("evict", store.filled().root, *arguments)
        assert (ran.code, ran.err) == (
            2,
            "error: give exactly one of KEYs, --older-than and --all\n",
        )

    def test_a_key_that_is_not_there_stops_everything(self, shell: Shell, store: Store) -> None:
        store.filled()
        ran = shell("evict", store.root, KEYS[0].hex(), KEYS[30].hex(), "--yes")
        assert ran.code == 2
        assert f"no chunk has the key {KEYS[30].hex()}; nothing was removed" in ran.err
        assert len(store.start()) == SLOTS

    def test_an_age_without_a_unit_is_refused(self, shell: Shell, store: Store) -> None:
        ran = shell("evict", store.filled().root, "--older-than", "7")
        assert ran.code == 2
        assert ran.err.startswith("error: --older-than 7: 7 has no unit; write 7d")

    def test_when_an_engine_last_used_the_store_is_not_forgotten(
        self, shell: Shell, store: Store
    ) -> None:
        lock = store.filled().directory / "lock"
        os.utime(lock, ns=(1_000, 2_000))
        assert shell("evict", store.root, "--all", "--yes").code == 0
        assert lock.stat().st_mtime_ns == 2_000


class TestCompactIndex:
    def test_compaction_frees_room_and_keeps_every_chunk(
        self, shell: Shell, store: Store
    ) -> None:
        store.filled()
        store.sql("CREATE TABLE ballast AS SELECT randomblob(1000000)")
        store.sql("DROP TABLE ballast")
        (sizes,) = shell.json("compact-index", store.root)
        assert sizes["before_nbytes"] > 1_000_000
        assert sizes["after_nbytes"] == store.index.stat().st_size < 100_000
        text = flat(shell("compact-index", store.root).out)
        assert f"{store.directory.name} some/model" in text
        assert store.start() == KEYS[:SLOTS]

    def test_where_room_is_short_the_places_that_need_it_are_named(
        self, shell: Shell, store: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        io = FaultyIo()
        monkeypatch.setattr(maintain, "BlockIo", lambda: io)
        io.fail("sql VACUUM", sqlite3.SQLITE_FULL)
        ran = shell("compact-index", store.filled().root)
        assert (ran.code, ran.out) == (2, "")
        assert ran.err.startswith(f"error: {store.index}: injected SQLite error 13; make room")
        assert "SQLITE_TMPDIR" in ran.err
        assert store.start() == KEYS[:SLOTS]

    def test_another_of_these_commands_is_not_called_an_engine(
        self, shell: Shell, store: Store
    ) -> None:
        (space,) = find_namespaces(store.filled().root)
        with maintain.hold(space, "stop it"):
            ran = shell("compact-index", store.root)
        assert (ran.code, ran.out) == (2, "")
        assert ran.err.endswith(", for kvtier cache; let it finish, or end it\n")

    def test_a_damaged_index_is_left_as_it_is(self, shell: Shell, store: Store) -> None:
        store.filled().index.write_bytes(b"no database" * 1000)
        ran = shell("compact-index", store.root)
        assert ran.code == 2
        assert "cannot be used" in ran.err
        assert store.index.read_bytes() == b"no database" * 1000
