"""``kvtier cache``: what a store holds, asked without disturbing anybody."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.keys import short_key
from kvtier.os.block_io import BlockIo
from kvtier.tiers.slab.index_reader import IndexReader
from kvtier.tiers.slab.inspect import find_namespaces
from tests.unit.cache_shell import CHANGING, READING, ROOT, Ran, Shell, flat
from tests.unit.stores import KEYS, SLOT, SLOTS, Store


class TestStat:
    def test_stat_says_who_owns_a_cache_and_what_it_holds(
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
        assert "hits 3 of" in text
        assert "removed lately 1 evicted" in text
        assert "model=some/model, tp_size=2" in text
        (report,) = shell.json("stat", store.root)["namespaces"]
        assert report["chunks"] == 12
        assert report["capacity_nbytes"] == 16 * SLOT
        assert before <= report["oldest_at"] <= report["newest_at"] <= before + 60
        assert report["index_nbytes"] == store.index.stat().st_size
        assert report["disk_nbytes"] >= 16 * SLOT
        assert (report["in_use_by"], report["problem"]) == (None, None)

    def test_a_log_that_an_engine_removes_meanwhile_is_no_problem(
        self, shell: Shell, store: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store.filled()
        listed = Path.iterdir
        gone = store.directory / "index.sqlite-wal"
        monkeypatch.setattr(Path, "iterdir", lambda path: iter([gone, *listed(path)]))
        (report,) = shell.json("stat", store.root)["namespaces"]
        assert report["problem"] is None
        assert report["disk_nbytes"] >= 16 * SLOT

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
        other = Store(store.root, store.pool)
        other.start(model="another/model")
        other.stop()
        parts = {part["model"]: part for part in shell.json("stat", store.root)["namespaces"]}
        assert parts.keys() == {"some/model", "another/model"}
        chosen = parts["another/model"]["namespace"]
        (only,) = shell.json("stat", store.root, "-n", chosen)["namespaces"]
        assert only["model"] == "another/model"

    @pytest.mark.parametrize("keeps", [False, True])
    def test_commands_report_a_reset_until_the_next_start(
        self, shell: Shell, store: Store, keeps: bool
    ) -> None:
        before = int(time.time())  # noqa: TID251 - as above
        store.start(keep_after_reset=keeps)
        store.reset()
        store.fill(1)
        for live in (True, False):
            if not live:
                store.stop()
            for command in READING:
                text = flat(shell(command[0], store.root, *command[1:]).out)
                assert ("reset at 20" in text) is not keeps, command
                documents = shell.json(command[0], store.root, *command[1:])
                key = {"stat": "namespaces", "explain": "answers"}.get(command[0])
                (document,) = documents[key] if key else documents
                assert document["was_reset"] is not keeps
                assert keeps or before <= document["reset_at"] <= before + 60

    def test_a_damaged_index_is_reported_and_not_fatal(
        self, shell: Shell, store: Store
    ) -> None:
        store.filled().index.write_bytes(b"no database" * 1000)
        ran = shell("stat", store.root)
        assert ran.code == 0
        assert "problem" in ran.out
        assert "index.sqlite cannot be used" in flat(ran.out).replace(" ", " ")
        for command in READING[1:]:
            ran = shell(command[0], store.root, *command[1:])
            assert ran.code == 2
            assert ran.err.startswith(f"error: {store.index} cannot be used: file is not a")

    @pytest.mark.parametrize("command", READING[1:], ids=lambda command: command[0])
    def test_an_index_that_is_not_there_is_not_said_to_be_set_aside(
        self, shell: Shell, store: Store, command: list[str]
    ) -> None:
        store.filled().index.unlink()
        ran = shell(command[0], store.root, *command[1:])
        assert ran.code == 2
        assert flat(ran.err) == (
            f"error: {store.index} is missing; an engine would start with an empty cache"
        )

    def test_a_slot_file_that_was_cut_off_is_reported_with_what_it_costs(
        self, shell: Shell, store: Store
    ) -> None:
        slots = store.filled().directory / "slots.bin"
        assert "problem" not in shell("stat", store.root).out
        os.truncate(slots, (SLOTS - 2) * SLOT)
        problem = f"{slots} ends before 2 of the chunks; an engine would start without"
        ran = shell("stat", store.root)
        assert ran.code == 0
        assert "ends before 2 of the chunks; an engine" in flat(ran.out)
        (report,) = shell.json("stat", store.root)["namespaces"]
        assert report["problem"].startswith(problem)
        assert len(store.start()) == SLOTS - 2

    def test_a_slot_file_that_is_not_there_is_said_to_be_missing(
        self, shell: Shell, store: Store
    ) -> None:
        slots = store.filled().directory / "slots.bin"
        slots.unlink()
        missing = f"{slots} is missing; an engine would start with an empty cache"
        assert shell.json("stat", store.root)["namespaces"][0]["problem"] == missing
        ran = shell("verify", store.root)
        assert ran.code == 2
        assert flat(ran.err) == f"error: {missing}"
        assert store.start() == []


class TestDisturbingNobody:
    @pytest.mark.parametrize("command", READING, ids=lambda command: command[0])
    def test_nothing_changes_when_no_engine_runs(
        self, shell: Shell, store: Store, command: list[str]
    ) -> None:
        seen = store.filled().seen()
        assert shell(command[0], store.root, *command[1:]).code == 0
        assert store.seen() == seen

    def test_the_cache_of_a_killed_engine_is_read_and_not_changed(
        self, shell: Shell, store: Store, other_engine: subprocess.Popen[bytes]
    ) -> None:
        other_engine.kill()
        other_engine.wait()
        assert (store.directory / "index.sqlite-wal").stat().st_size > 0
        seen = store.seen()
        for command in READING:
            assert shell(command[0], store.root, *command[1:]).code == 0, command
            assert store.seen() == seen, command
        assert shell.json("stat", store.root)["namespaces"][0]["chunks"] == SLOTS
        assert len(store.start()) == SLOTS

    def test_a_copy_of_what_a_killed_engine_left_has_no_name_while_it_is_read(
        self,
        store: Store,
        other_engine: subprocess.Popen[bytes],
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        other_engine.kill()
        other_engine.wait()
        copies = tmp_path / "copies"
        copies.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(copies))
        (space,) = find_namespaces(store.root)
        with IndexReader(space) as reader:
            assert reader.totals().chunks == SLOTS
            assert list(copies.iterdir()) == [], "a kill now would leave it for ever"
            assert len(reader.entries("last-use", -1)) == SLOTS

    @pytest.mark.parametrize("obstacle", ["no directory", "no room"])
    def test_a_failed_copy_of_an_index_is_not_reported_as_a_missing_cache(
        self,
        shell: Shell,
        store: Store,
        other_engine: subprocess.Popen[bytes],
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        obstacle: str,
    ) -> None:
        other_engine.kill()
        other_engine.wait()
        place = tmp_path / "temporary"
        monkeypatch.setattr(tempfile, "tempdir", str(place))
        with contextlib.ExitStack() as stack:
            if obstacle == "no room":
                place.mkdir()
                stack.enter_context(longest_file(4096))
            ran = shell("verify", store.root)
        assert (ran.code, ran.out) == (2, "")
        assert ran.err.startswith(f"error: {store.index}: a killed engine left a log, ")
        assert ran.err.endswith("; name one with room in TMPDIR\n")
        assert len(ran.err.splitlines()) == 1

    @pytest.mark.parametrize("seconds", [-1, 253402300800, 2**62])
    @pytest.mark.parametrize("command", READING, ids=lambda command: command[0])
    def test_a_time_that_no_calendar_has_is_unknown(
        self, shell: Shell, store: Store, command: list[str], seconds: int
    ) -> None:
        store.filled()
        store.sql("UPDATE chunks SET stored_at = ?, used_at = ?", seconds, seconds)
        ran = shell(command[0], store.root, *command[1:])
        assert (ran.code, ran.err) == (0, "")
        (space,) = find_namespaces(store.root)
        with IndexReader(space) as reader:
            assert {each.stored_at for each in reader.entries("last-use", -1)} == {0}

    @pytest.mark.parametrize("command", READING, ids=lambda command: command[0])
    def test_a_running_engine_is_named_and_works_on(
        self, shell: Shell, store: Store, command: list[str]
    ) -> None:
        store.start()
        store.fill()
        assert shell(command[0], store.root, *command[1:]).code == 0
        (report,) = shell.json("stat", store.root)["namespaces"]
        assert report["in_use_by"].startswith(f"pid {os.getpid()} on host ")
        assert report["chunks"] == SLOTS
        store.put([KEYS[20]], [0])
        store.stop()
        assert KEYS[20] in store.start()

    def test_an_engine_in_another_process_is_named(
        self, shell: Shell, store: Store, other_engine: subprocess.Popen[bytes]
    ) -> None:
        for command in READING:
            assert shell(command[0], store.root, *command[1:]).code == 0, command
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
        run = [sys.executable, "-m", "kvtier", "cache", command[0], place, *command[1:]]
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
        ran = shell(command[0], store.root, *command[1:])
        assert (ran.code, ran.out) == (2, "")
        assert f"is in use by pid {os.getpid()} on host" in ran.err
        assert "; stop that engine first" in ran.err
        store.stop()
        assert len(store.start()) == SLOTS

    def test_an_index_of_another_version_is_refused(self, shell: Shell, store: Store) -> None:
        store.filled().sql("PRAGMA user_version=9")
        ran = shell("ls", store.root)
        assert (ran.code, ran.out) == (2, "")
        assert "it has version 9, and this kvtier reads 1; use the kvtier" in flat(ran.err)


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
        assert order("--limit", 1 << 63) == [3, 0, 1, 2]

    def test_the_table_fits_a_terminal_and_its_keys_can_be_asked_for(
        self, shell: Shell, store: Store
    ) -> None:
        store.filled()
        ran = shell("ls", store.root, "--limit", 3)
        assert max(map(len, ran.out.splitlines())) <= 80
        assert ran.out.splitlines()[-1] == "3 of 16 chunks"
        assert short_key(KEYS[15]) in ran.out
        assert shell("explain", store.root, short_key(KEYS[15])).code == 0


@contextlib.contextmanager
def longest_file(nbytes: int) -> Iterator[None]:
    """Let this process write no longer files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


class TestWrongDirectory:
    def test_a_name_that_no_file_system_has_is_named(
        self, shell: Shell, tmp_path: Path
    ) -> None:
        place = tmp_path / ("x" * 300)
        remedy = "give the path of an nvme tier"
        expected = f"error: {place}: File name too long; {remedy}\n"
        assert shell("stat", place) == Ran(2, "", expected)

    @pytest.mark.parametrize("command", [*READING, *CHANGING], ids=lambda command: command[0])
    def test_it_is_named_with_a_remedy(
        self, shell: Shell, tmp_path: Path, command: list[str]
    ) -> None:
        (tmp_path / "file").touch()
        for place, problem in (
            (tmp_path / "nowhere", f"{tmp_path / 'nowhere'} does not exist"),
            (tmp_path / "file", f"{tmp_path / 'file'} is not a directory"),
            (tmp_path, f"no cache of an nvme tier in {tmp_path}"),
        ):
            ran = shell(command[0], place, *command[1:])
            expected = f"error: {problem}; give the path of an nvme tier\n"
            assert ran == Ran(2, "", expected)

    @pytest.mark.parametrize(
        "refusing", [(Path, "is_dir"), (Path, "iterdir"), (BlockIo, "read_bytes")]
    )
    def test_a_cache_of_another_user_is_not_reported_as_missing(
        self,
        shell: Shell,
        store: Store,
        monkeypatch: pytest.MonkeyPatch,
        refusing: tuple[type[Path | BlockIo], str],
    ) -> None:
        def refuse(*_: object) -> None:
            raise PermissionError(13, "Permission denied")

        root = store.filled().root
        monkeypatch.setattr(os, "access", lambda *_, **__: False)
        monkeypatch.setattr(*refusing, refuse)
        ran = shell("stat", root)
        assert (ran.code, ran.out) == (2, "")
        assert ran.err.startswith(f"error: {root}")
        assert ran.err.endswith(
            ": Permission denied; run this as the user that runs the engine\n"
        )

    @pytest.mark.parametrize("text", ["{", "{}", "[" * 200_000], ids=["cut", "empty", "deep"])
    def test_a_layout_that_cannot_be_understood_is_named(
        self, shell: Shell, store: Store, text: str
    ) -> None:
        layout = store.filled().directory / "layout.json"
        layout.write_text(text)
        for place in (store.root, store.directory):
            ran = shell("stat", place)
            assert (ran.code, ran.out) == (2, "")
            assert ran.err.startswith(f"error: {layout}: ")
            assert "; copy it again, " in ran.err

    def test_a_neighbour_that_cannot_be_understood_is_passed_over(
        self, shell: Shell, store: Store
    ) -> None:
        neighbour = store.filled().root / "0123456789abcdef"
        neighbour.mkdir()
        (neighbour / "layout.json").write_text("[" * 200_000)
        (report,) = shell.json("stat", store.root)["namespaces"]
        assert report["namespace"] == store.directory.name

    def test_control_characters_of_a_model_are_escaped(
        self, shell: Shell, store: Store
    ) -> None:
        store.start(model="mean\x1b[2J\r\nmodel")
        store.fill(1)
        store.stop()
        for command in (*READING, ["compact-index"]):
            ran = shell(command[0], store.root, *command[1:])
            assert r"mean\x1b[2J\r\nmodel" in ran.out
            assert "\x1b" not in ran.out + ran.err

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
    ran = shell(command[0], store.filled().root, *command[1:])
    assert max(map(len, ran.out.splitlines())) <= width


@pytest.mark.parametrize(
    "command", [*READING[1:], *CHANGING, ["export"]], ids=lambda command: command[0]
)
def test_a_namespace_that_was_never_filled_is_named_and_left_out(
    shell: Shell, store: Store, tmp_path: Path, command: list[str]
) -> None:
    store.filled()
    blank = store.root / "0123456789abcdef"
    blank.mkdir(mode=0o700)
    shutil.copy(store.directory / "layout.json", blank)
    out = [tmp_path / "archive"] if command == ["export"] else []
    ran = shell(command[0], store.root, *command[1:], *out)
    assert ran.code == 0
    assert f"note: {blank} is left out: it has no index and no slots" in ran.err


def test_a_store_with_nothing_but_a_blank_namespace_is_an_error(
    shell: Shell, store: Store
) -> None:
    store.filled()
    (store.directory / "slots.bin").unlink()
    store.index.unlink()
    ran = shell("ls", store.root)
    assert ran.code == 2
    assert "index.sqlite is missing" in ran.err
