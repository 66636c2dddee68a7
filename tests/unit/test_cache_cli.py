"""``kvtier cache``, as a shell runs it, with and without an engine on the store."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kvtier.cli import main
from kvtier.iopool import IoPool
from kvtier.keys import short
from kvtier.tiers.slab.inspect import IndexReader, find_namespaces
from kvtier.tiers.slab.verify import verify
from tests.unit.stores import KEYS, SLOT, SLOTS, Store

ROOT = Path(__file__).parents[2]
READING = [["stat"], ["ls"], ["verify"], ["explain", KEYS[0].hex()]]
CHANGING = [["evict", "--all", "--yes"], ["compact-index"]]

ENGINE = """
import pathlib, sys
from kvtier.iopool import IoPool
from tests.unit.stores import Store
store = Store(pathlib.Path(sys.argv[1]), IoPool(2, name="kvtier-engine"))
store.start()
store.fill()
print("running", flush=True)
sys.stdin.read()
store.stop()
"""


class Ran(NamedTuple):
    """What a command left behind."""

    code: int | str | None
    out: str
    err: str


class Shell:
    """Runs ``kvtier cache`` in this process."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        self._monkeypatch = monkeypatch
        self._capsys = capsys

    def __call__(self, *arguments: object) -> Ran:
        self._monkeypatch.setattr(sys, "argv", ["kvtier", "cache", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            main()
        return Ran(caught.value.code, *self._capsys.readouterr())

    def json(self, *arguments: object, code: int = 0) -> Any:
        ran = self(*arguments, "--json")
        assert (ran.code, ran.err) == (code, "")
        return json.loads(ran.out)


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    return Shell(monkeypatch, capsys)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    pool = IoPool(2, name="kvtier-test")
    store = Store(tmp_path / "store", pool)
    yield store
    store.stop()
    assert pool.close(timeout_s=10)


@pytest.fixture
def other_engine(store: Store) -> Iterator[subprocess.Popen[bytes]]:
    """An engine in another process that has the store open."""
    with subprocess.Popen(
        [sys.executable, "-c", ENGINE, str(store.root)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
    ) as engine:
        assert engine.stdout is not None
        assert engine.stdout.readline() == b"running\n"
        yield engine
        engine.kill()


def flat(text: str) -> str:
    """Return ``text`` without the line breaks and blanks that a table's width puts in."""
    return " ".join(text.split())


class TestStat:
    def test_it_says_whose_the_store_is_and_what_is_in_it(
        self, shell: Shell, store: Store
    ) -> None:
        before = int(time.time())  # noqa: TID251 - the index keeps wall-clock times
        store.start()
        store.fill(12)
        store.tier.touch([0, 0, 3])
        store.put([KEYS[20]], [5])
        store.stop()
        ran = shell("stat", store.root)
        assert (ran.code, ran.err) == (0, "")
        text = flat(ran.out)
        assert f"{store.directory.name} some/model" in text
        assert "in use by nobody" in text
        assert "capacity 128 KiB, 16 slots of 8.00 KiB" in text
        assert "used 96.0 KiB, 12 chunks (75%)" in text
        assert "hits 3 by" in text
        assert "left lately 1 evicted" in text
        assert "model=some/model, tp_size=2" in text
        (report,) = shell.json("stat", store.root)["namespaces"]
        assert report["chunks"] == 12
        assert report["capacity_nbytes"] == 16 * SLOT
        assert before <= report["oldest_at"] <= report["newest_at"] <= before + 60
        assert report["index_nbytes"] == store.index.stat().st_size
        assert report["disk_nbytes"] >= 16 * SLOT
        assert (report["in_use_by"], report["problem"]) == (None, None)

    def test_a_namespace_may_be_given_instead_of_the_store(
        self, shell: Shell, store: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store.filled()
        monkeypatch.chdir(store.directory)
        for place in (store.root, store.directory, "."):
            (report,) = shell.json("stat", place)["namespaces"]
            assert report["namespace"] == store.directory.name

    def test_each_model_has_its_part_and_one_can_be_chosen(
        self, shell: Shell, store: Store
    ) -> None:
        store.start()
        other = Store(store.root, store._pool)
        other.start(model="another/model")
        other.stop()
        parts = {part["model"]: part for part in shell.json("stat", store.root)["namespaces"]}
        assert parts.keys() == {"some/model", "another/model"}
        chosen = parts["another/model"]["namespace"]
        (only,) = shell.json("stat", store.root, "-n", chosen)["namespaces"]
        assert only["model"] == "another/model"

    def test_a_damaged_index_is_reported_and_not_fatal(
        self, shell: Shell, store: Store
    ) -> None:
        store.filled().index.write_bytes(b"no database" * 1000)
        ran = shell("stat", store.root)
        assert ran.code == 0
        assert "problem" in ran.out
        assert "index.sqlite cannot be used" in flat(ran.out).replace(" ", " ")
        for command in READING[1:]:
            ran = shell(*command, store.root)
            assert ran.code == 2
            assert ran.err.startswith(f"error: {store.index} cannot be used: file is not a")


class TestDisturbingNobody:
    @pytest.mark.parametrize("command", READING, ids=lambda command: command[0])
    def test_nothing_changes_when_no_engine_runs(
        self, shell: Shell, store: Store, command: list[str]
    ) -> None:
        seen = store.filled().seen()
        assert shell(*command, store.root).code == 0
        assert store.seen() == seen

    @pytest.mark.parametrize("command", READING, ids=lambda command: command[0])
    def test_what_a_killed_engine_left_is_read_and_left_as_it_is(
        self,
        shell: Shell,
        store: Store,
        other_engine: subprocess.Popen[bytes],
        command: list[str],
    ) -> None:
        other_engine.kill()
        other_engine.wait()
        assert (store.directory / "index.sqlite-wal").stat().st_size > 0
        seen = store.seen()
        ran = shell(*command, store.root)
        assert ran.code == 0
        assert store.seen() == seen
        assert shell.json("stat", store.root)["namespaces"][0]["chunks"] == SLOTS
        assert len(store.start()) == SLOTS

    @pytest.mark.parametrize("command", READING, ids=lambda command: command[0])
    def test_a_running_engine_is_named_and_works_on(
        self, shell: Shell, store: Store, command: list[str]
    ) -> None:
        store.start()
        store.fill()
        assert shell(*command, store.root).code == 0
        (report,) = shell.json("stat", store.root)["namespaces"]
        assert report["in_use_by"].startswith(f"pid {os.getpid()} on host ")
        assert report["chunks"] == SLOTS
        store.put([KEYS[20]], [0])
        store.stop()
        assert KEYS[20] in store.start()

    @pytest.mark.parametrize("command", READING, ids=lambda command: command[0])
    def test_an_engine_in_another_process_is_named(
        self,
        shell: Shell,
        store: Store,
        other_engine: subprocess.Popen[bytes],
        command: list[str],
    ) -> None:
        assert shell(*command, store.root).code == 0
        (report,) = shell.json("stat", store.root)["namespaces"]
        assert report["in_use_by"].startswith(f"pid {other_engine.pid} on host ")
        other_engine.send_signal(signal.SIGTERM)

    @pytest.mark.parametrize("command", [*READING, *CHANGING], ids=lambda command: command[0])
    def test_a_read_only_file_system_can_be_read_and_not_changed(
        self, store: Store, command: list[str], tmp_path: Path
    ) -> None:
        store.filled()
        place = str(store.root)
        mounted = 'mount --bind "$0" "$0" && mount -o remount,bind,ro "$0"'
        inside = ["unshare", "--mount", "sh", "-c", mounted + ' && exec "$@"', place]
        if subprocess.run([*inside, "true"], capture_output=True, check=False).returncode:
            pytest.skip("this user may not mount")
        run = [sys.executable, "-m", "kvtier.cli", "cache", *command, place]
        ran = subprocess.run(
            [*inside, *run], capture_output=True, text=True, check=False, cwd=ROOT
        )
        if command in READING:
            assert (ran.returncode, ran.stderr) == (0, "")
        else:
            assert ran.returncode == 2
            assert "Read-only file system" in ran.stderr
            assert len(ran.stderr.splitlines()) == 1

    @pytest.mark.parametrize("command", CHANGING, ids=lambda command: command[0])
    def test_a_store_in_use_is_not_changed(
        self, shell: Shell, store: Store, command: list[str]
    ) -> None:
        store.start()
        store.fill()
        ran = shell(*command, store.root)
        assert (ran.code, ran.out) == (2, "")
        assert f"is in use by pid {os.getpid()} on host" in ran.err
        assert "; stop that engine first" in ran.err
        store.stop()
        assert len(store.start()) == SLOTS

    def test_an_index_of_version_1_is_read_and_not_upgraded(
        self, shell: Shell, store: Store
    ) -> None:
        store.filled().become_version_1()
        seen = store.seen()
        (report,) = shell.json("stat", store.root)["namespaces"]
        assert (report["chunks"], report["oldest_at"], report["departures"]) == (16, None, {})
        assert "unknown" in shell("ls", store.root).out
        assert "stored unknown" in flat(shell("explain", KEYS[2].hex(), store.root).out)
        assert shell("verify", store.root).code == 0
        assert store.seen() == seen


class TestLs:
    def test_chunks_are_in_the_order_asked_for(self, shell: Shell, store: Store) -> None:
        store.start()
        store.fill(4)
        store.tier.touch([1, 1, 0])
        store.tier.touch([3])
        store.stop()

        def order(*options: object) -> list[int]:
            (listing,) = shell.json("ls", *options, store.root)
            assert listing["chunks"] == 4
            return [row["slot"] for row in listing["listed"]]

        assert order() == order("--sort", "last-use") == [3, 0, 1, 2]
        assert order("--sort", "stored") == [3, 2, 1, 0]
        assert order("--sort", "hits") == [1, 3, 0, 2]
        assert order("--limit", 2) == [3, 0]
        assert order("--limit", 0) == [3, 0, 1, 2]

    def test_the_table_fits_a_terminal_and_its_keys_can_be_asked_for(
        self, shell: Shell, store: Store
    ) -> None:
        store.filled()
        ran = shell("ls", store.root, "--limit", 3)
        assert max(map(len, ran.out.splitlines())) <= 80
        assert ran.out.splitlines()[-1] == "3 of 16 chunks"
        assert short(KEYS[15]) in ran.out
        assert shell("explain", short(KEYS[15]), store.root).code == 0


class TestVerify:
    def test_a_good_store_is_good(self, shell: Shell, store: Store) -> None:
        store.filled()
        ran = shell("verify", store.root)
        assert (ran.code, ran.err) == (0, "")
        assert "good 16 chunks bad 0 chunks" in flat(ran.out)
        assert " GB/s" in ran.out
        (found,) = shell.json("verify", store.root)
        assert (found["good"], found["nbytes"]) == (16, 16 * SLOT)
        assert found["bytes_per_s"] > 0

    def test_a_flipped_bit_is_found(self, shell: Shell, store: Store) -> None:
        store.filled().flip(slot=9)
        ran = shell("verify", store.root)
        assert ran.code == 1
        assert f"{short(KEYS[9])} not the bytes stored 9" in flat(ran.out)
        (found,) = shell.json("verify", store.root, code=1)
        assert found["bad_chunks"] == [
            {"key": KEYS[9].hex(), "slot": 9, "problem": "corrupt"},
        ]
        assert (found["good"], found["bad"], found["changed"]) == (15, 1, 0)

    def test_no_more_bad_chunks_are_listed_than_asked_for(
        self, shell: Shell, store: Store
    ) -> None:
        store.filled()
        for slot in range(5):
            store.flip(slot)
        ran = shell("verify", store.root, "--limit", 2)
        assert ran.out.count("not the bytes stored") == 2
        assert "and 3 more" in ran.out
        assert shell("verify", store.root, "--limit", 0).out.count("not the bytes stored") == 5

    def test_what_a_shorter_file_lost_is_bad(self, shell: Shell, store: Store) -> None:
        store.filled()
        os.truncate(store.directory / "slots.bin", 10 * SLOT + 4096)
        (found,) = shell.json("verify", store.root, code=1)
        assert (found["good"], found["bad"]) == (10, 6)

    def test_without_checksums_it_says_that_nothing_is_proved(
        self, shell: Shell, store: Store
    ) -> None:
        store.filled(checksum="off").flip(slot=3)
        ran = shell("verify", store.root)
        assert ran.code == 0
        assert "nothing but readability was checked" in flat(ran.out)

    def test_an_index_with_odd_values_has_bad_chunks(self, shell: Shell, store: Store) -> None:
        store.filled().sql("UPDATE chunks SET checksum = 'x' WHERE slot = 3")
        (found,) = shell.json("verify", store.root, code=1)
        assert [bad["slot"] for bad in found["bad_chunks"]] == [3]


class TestVerifyBesideAnEngine:
    def test_a_chunk_replaced_after_its_row_was_read_is_not_bad(self, store: Store) -> None:
        store.start()
        store.fill()
        store.flip(slot=4)  # as if the engine were just overwriting it

        def overwrite(_: int) -> None:
            store.put([KEYS[20]], [4])

        (space,) = find_namespaces(store.root)
        with IndexReader(space) as reader:
            found = verify(
                space, reader, on_progress=overwrite, pause=lambda _: pytest.fail("it waited")
            )
        assert (found.changed, found.bad) == (1, [])

    def test_a_row_that_follows_its_payload_late_is_waited_for(self, store: Store) -> None:
        store.start()
        store.fill()
        store.flip(slot=4)
        waited = []

        def commit(seconds: float) -> None:
            waited.append(seconds)
            store.put([KEYS[20]], [4])

        (space,) = find_namespaces(store.root)
        with IndexReader(space) as reader:
            found = verify(space, reader, pause=commit)
        assert (found.changed, found.bad, len(waited)) == (1, [], 1)

    def test_what_stays_wrong_is_bad(self, store: Store) -> None:
        store.start()
        store.fill()
        store.flip(slot=4)
        (space,) = find_namespaces(store.root)
        with IndexReader(space) as reader:
            found = verify(space, reader, pause=lambda _: None)
        assert [bad.entry.slot for bad in found.bad] == [4]

    def test_an_engine_that_starts_meanwhile_is_noticed(self, store: Store) -> None:
        store.filled()
        (space,) = find_namespaces(store.root)
        with IndexReader(space) as reader:
            assert (reader.totals().chunks, reader.live) == (SLOTS, False)
            store.start()
            store.put([KEYS[20]], [0])
            assert reader.entries_of_slots(0, 1)[0].key == KEYS[20]
            assert reader.live


class TestExplain:
    def test_it_says_where_a_chunk_is_and_how_it_was_used(
        self, shell: Shell, store: Store
    ) -> None:
        store.start()
        store.fill()
        store.tier.touch([3, 3])
        store.stop()
        text = flat(shell("explain", KEYS[3].hex(), store.root).out)
        assert text.startswith(KEYS[3].hex())
        assert "slot 3, byte 24,576 of" in text
        assert "loaded 2 times, last at 20" in text
        assert "15 chunks were used less recently" in text
        (answer,) = shell.json("explain", KEYS[3].hex(), store.root)["answers"]
        assert (answer["slot"], answer["hits"], answer["offset_nbytes"]) == (3, 2, 24576)

    @pytest.mark.parametrize("digits", [8, 9, 64, 72])
    def test_a_beginning_of_eight_digits_is_enough(
        self, shell: Shell, store: Store, digits: int
    ) -> None:
        store.filled()
        ran = shell("explain", KEYS[3].hex()[:digits].upper(), store.root)
        assert (ran.code, ran.out.split()[0]) == (0, KEYS[3].hex())
        assert shell("explain", f"{KEYS[3].hex()[:8]}/1", store.root).code == 1

    def test_a_beginning_of_two_keys_is_refused(self, shell: Shell, store: Store) -> None:
        twin = KEYS[0][:-4] + b"\0\0\0\1"
        store.start()
        store.put([KEYS[0], twin], [0, 1])
        store.stop()
        ran = shell("explain", KEYS[0].hex()[:16], store.root)
        assert ran.code == 2
        assert "2 keys begin with" in ran.err
        ran = shell("explain", f"{KEYS[0].hex()[:16]}/1", store.root)
        assert (ran.code, ran.out.split()[0]) == (0, twin.hex())

    @pytest.mark.parametrize("key", ["abcdef", "nothex00", "abcdef00/x", ""])
    def test_what_is_no_key_is_refused(self, shell: Shell, store: Store, key: str) -> None:
        ran = shell("explain", key, store.filled().root)
        assert ran.code == 2
        assert "is not a key; write 8 or more hex digits" in ran.err

    def why(self, shell: Shell, store: Store, slot: int) -> str:
        key = KEYS[slot]
        (answer,) = shell.json("explain", key.hex(), store.root, code=1)["answers"]
        (same,) = shell.json("explain", f"{key[:-4].hex()}/0", store.root, code=1)["answers"]
        assert same["reason"] == answer["reason"]
        assert answer["left_at"] > 1_700_000_000
        return str(answer["reason"])

    def test_evicted(self, shell: Shell, store: Store) -> None:
        store.filled()
        store.start()
        store.put([KEYS[20]], [7])
        store.stop()
        assert self.why(shell, store, 7) == "evicted"
        out = shell("explain", KEYS[7].hex(), store.root).out
        assert "another chunk was written into its slot" in out

    def test_dropped_by_the_engine(self, shell: Shell, store: Store) -> None:
        store.filled()
        store.start()
        store.tier.forget([7])
        store.stop()
        assert self.why(shell, store, 7) == "corrupt"

    def test_made_smaller(self, shell: Shell, store: Store) -> None:
        store.filled()
        store.start(slots=8)
        store.stop()
        assert self.why(shell, store, 8) == "beyond"
        assert shell("explain", KEYS[7].hex(), store.root).code == 0

    def test_reset(self, shell: Shell, store: Store) -> None:
        store.filled()
        store.start()
        store.reset()
        store.fill(1)
        store.stop()
        assert self.why(shell, store, 7) == "reset"
        assert shell("explain", KEYS[0].hex(), store.root).code == 0

    def test_distrusted(self, shell: Shell, store: Store) -> None:
        store.filled(checksum="off")
        store.start(checksum="xxh3")
        store.stop()
        assert self.why(shell, store, 7) == "doubted"

    def test_removed_by_an_operator(self, shell: Shell, store: Store) -> None:
        store.filled()
        assert shell("evict", KEYS[7].hex(), "--yes", store.root).code == 0
        assert self.why(shell, store, 7) == "dropped"

    def test_lost_with_an_index(self, shell: Shell, store: Store) -> None:
        store.filled().index.write_bytes(b"no database" * 1000)
        store.start()
        store.stop()
        ran = shell("explain", KEYS[7].hex(), store.root)
        assert ran.code == 1
        assert "what it held is not known" in flat(ran.out)

    def test_never_seen(self, shell: Shell, store: Store) -> None:
        ran = shell("explain", KEYS[30].hex(), store.filled().root)
        assert ran.code == 1
        assert "never seen, or so long ago that the trail has forgotten" in ran.out

    def test_the_last_reason_counts(self, shell: Shell, store: Store) -> None:
        store.filled()
        store.start()
        store.tier.forget([7])
        store.stop()
        store.start()
        store.put([KEYS[7]], [7])
        store.put([KEYS[20]], [7])
        store.stop()
        assert self.why(shell, store, 7) == "evicted"

    def test_beside_an_engine_it_is_told_within_moments(
        self, shell: Shell, store: Store
    ) -> None:
        store.start()
        store.fill()
        store.put([KEYS[20]], [7])
        deadline = time.monotonic() + 20
        while "evicted" not in shell("explain", KEYS[7].hex(), store.root).out:
            assert time.monotonic() < deadline


class TestEvict:
    def test_keys_leave_and_nothing_else(self, shell: Shell, store: Store) -> None:
        store.filled()
        gone = [KEYS[2].hex(), short(KEYS[5])]
        ran = shell("evict", *gone, "--yes", store.root)
        assert (ran.code, ran.err) == (0, "")
        assert ran.out.splitlines()[-1] == "removed 2 chunks (16.0 KiB)"
        assert store.start() == [KEYS[slot] for slot in range(SLOTS) if slot not in {2, 5}]

    def test_what_was_not_used_for_long_leaves(self, shell: Shell, store: Store) -> None:
        store.filled()
        store.sql("UPDATE chunks SET stored_at = stored_at - 86400, used_at = used_at - 86400")
        store.sql("UPDATE chunks SET used_at = used_at + 80000 WHERE slot = 3")
        store.sql("UPDATE chunks SET stored_at = 0, used_at = 0 WHERE slot = 4")
        document = shell.json("evict", "--older-than", "12h", "--yes", store.root)
        (left,) = document["namespaces"]
        assert (document["removed"], left["chunks"]) == (True, 14)
        assert store.start() == [KEYS[3], KEYS[4]]

    def test_a_dry_run_removes_nothing_even_beside_an_engine(
        self, shell: Shell, store: Store
    ) -> None:
        store.start()
        store.fill()
        ran = shell("evict", "--all", "--dry-run", store.root)
        assert (ran.code, ran.out.splitlines()[-1]) == (0, "would remove 16 chunks (128 KiB)")
        store.stop()
        assert len(store.start()) == SLOTS

    @pytest.mark.parametrize(("answer", "code", "left"), [("y\n", 0, 0), ("n\n", 1, SLOTS)])
    def test_it_asks_first(
        self,
        store: Store,
        answer: str,
        code: int,
        left: int,
    ) -> None:
        store.filled()
        ran = subprocess.run(
            [sys.executable, "-m", "kvtier.cli", "cache", "evict", "--all", str(store.root)],
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
        ran = shell("evict", *arguments, store.filled().root)
        assert (ran.code, ran.err) == (
            2,
            "error: give KEYs, or --older-than, or --all: one of them\n",
        )

    def test_a_key_that_is_not_there_stops_everything(self, shell: Shell, store: Store) -> None:
        store.filled()
        ran = shell("evict", KEYS[0].hex(), KEYS[30].hex(), "--yes", store.root)
        assert ran.code == 2
        assert f"{KEYS[30].hex()} is not there; nothing was removed" in ran.err
        assert len(store.start()) == SLOTS

    def test_an_age_without_a_unit_is_refused(self, shell: Shell, store: Store) -> None:
        ran = shell("evict", "--older-than", "7", store.filled().root)
        assert ran.code == 2
        assert ran.err.startswith("error: --older-than 7: 7 has no unit; write 7s")

    def test_when_an_engine_last_used_the_store_is_not_forgotten(
        self, shell: Shell, store: Store
    ) -> None:
        lock = store.filled().directory / "lock"
        os.utime(lock, ns=(1_000, 2_000))
        assert shell("evict", "--all", "--yes", store.root).code == 0
        assert lock.stat().st_mtime_ns == 2_000


class TestCompactIndex:
    def test_it_gives_room_back_and_keeps_every_chunk(self, shell: Shell, store: Store) -> None:
        store.filled()
        store.sql("CREATE TABLE ballast AS SELECT randomblob(1000000)")
        store.sql("DROP TABLE ballast")
        (sizes,) = shell.json("compact-index", store.root)
        assert sizes["before_nbytes"] > 1_000_000
        assert sizes["after_nbytes"] == store.index.stat().st_size < 100_000
        text = flat(shell("compact-index", store.root).out)
        assert f"{store.directory.name} some/model" in text
        assert store.start() == KEYS[:SLOTS]

    def test_a_damaged_index_is_left_as_it_is(self, shell: Shell, store: Store) -> None:
        store.filled().index.write_bytes(b"no database" * 1000)
        ran = shell("compact-index", store.root)
        assert ran.code == 2
        assert "cannot be used" in ran.err
        assert store.index.read_bytes() == b"no database" * 1000


class TestWrongDirectory:
    @pytest.mark.parametrize("command", [*READING, *CHANGING], ids=lambda command: command[0])
    def test_it_is_named_with_a_remedy(
        self, shell: Shell, tmp_path: Path, command: list[str]
    ) -> None:
        (tmp_path / "file").touch()
        for place, problem in (
            (tmp_path / "nowhere", "does not exist"),
            (tmp_path / "file", "is not a directory"),
            (tmp_path, "holds no kvtier store"),
        ):
            ran = shell(*command, place)
            expected = f"error: {place} {problem}; give the path of an nvme tier\n"
            assert ran == Ran(2, "", expected)

    def test_a_namespace_that_is_not_there_is_answered_with_those_that_are(
        self, shell: Shell, store: Store
    ) -> None:
        ran = shell("stat", store.filled().root, "--namespace", "abc")
        assert ran.code == 2
        assert f"has no namespace abc; it has {store.directory.name}" in ran.err


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("command", READING, ids=lambda command: command[0])
def test_everything_fits_the_terminal(
    shell: Shell, store: Store, command: list[str], width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    ran = shell(*command, store.filled().root)
    assert max(map(len, ran.out.splitlines())) <= width


@pytest.mark.parametrize(
    "command", ["stat", "ls", "verify", "explain", "evict", "compact-index"]
)
def test_every_command_has_help_that_fits_a_terminal(shell: Shell, command: str) -> None:
    ran = shell(command, "--help")
    assert ran.code == 0
    usage = ran.out.splitlines()[0]
    assert usage.startswith(f"Usage: kvtier cache {command} ")
    assert usage.split()[-1].strip("{}") == "DIR"
    assert max(map(len, ran.out.splitlines())) <= 80


def test_it_runs_as_a_program(store: Store) -> None:
    command = [sys.executable, "-m", "kvtier.cli", "cache", "stat", "--json"]
    ran = subprocess.run(
        [*command, str(store.filled().root)], capture_output=True, check=False, cwd=ROOT
    )
    assert (ran.returncode, ran.stderr) == (0, b"")
    assert json.loads(ran.stdout)["namespaces"][0]["chunks"] == SLOTS
