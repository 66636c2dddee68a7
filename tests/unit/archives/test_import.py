"""``kvtier cache import`` and ``merge``."""

from __future__ import annotations

import asyncio
import errno
import subprocess
from pathlib import Path

import pytest

from kvtier.archive import open_location
from kvtier.testing.tier_harness import make_sources
from kvtier.tiers.slab import maintain
from kvtier.tiers.slab.inspect import find_namespaces
from kvtier.types import Outcome, Purpose
from tests.support.faulty_io import FaultyIo
from tests.unit.cache_shell import Shell, flat
from tests.unit.stores import KEYS, SLOT, SLOTS, Store


def read_all(store: Store, slots: int = SLOTS) -> list[bytes]:
    """Start an engine and read every chunk that it finds, through its tier."""
    store.start(slots=slots)
    places = store.sql("SELECT key, slot FROM chunks")
    views = [memoryview(bytearray(SLOT)) for _ in places]
    keys, numbers = [key for key, _ in places], [slot for _, slot in places]
    read = asyncio.run(store.tier.read(keys, numbers, views, purpose=Purpose.LOAD))
    assert set(read.outcomes) <= {Outcome.DONE}
    for key, view in zip(keys, views, strict=True):
        assert view == make_sources([key], SLOT)[0]
    store.stop()
    return keys


class TestImport:
    @pytest.mark.parametrize("form", [[], ["--zstd"]])
    def test_an_engine_finds_every_chunk_in_the_order_of_their_last_use(
        self, shell: Shell, store: Store, out: Path, other: Store, form: list[str]
    ) -> None:
        store.start()
        store.fill()
        store.tier.touch([3, 1])
        store.stop()
        shell("export", store.root, out, *form)
        ran = shell("import", out, other.root)
        assert (ran.code, ran.err) == (0, "")
        assert ran.out.startswith("imported 16 chunks (128 KiB) in ")
        order = [key for key in KEYS[:SLOTS] if key not in {KEYS[1], KEYS[3]}]
        assert other.start() == [*order, KEYS[3], KEYS[1]]
        other.stop()
        assert sorted(read_all(other)) == sorted(KEYS[:SLOTS])
        assert shell("verify", other.root).code == 0

    def test_a_second_import_copies_what_the_store_lacks(
        self, shell: Shell, archive: Path, other: Store
    ) -> None:
        shell("import", archive, other.root)
        gone = [KEYS[2].hex(), KEYS[5].hex()]
        shell("evict", other.root, *gone, "--yes")
        found = shell.json("import", archive, other.root)
        assert (found["chunks"], found["present"]) == (2, 14)
        assert sorted(read_all(other)) == sorted(KEYS[:SLOTS])

    def test_chunks_that_the_cache_had_keep_their_slots(
        self, shell: Shell, archive: Path, other: Store
    ) -> None:
        other.start(slots=20)
        other.put(KEYS[20:23], [0, 7, 19])
        other.stop()
        found = shell.json("import", archive, other.root)
        assert (found["chunks"], found["left_out"]) == (SLOTS, 0)
        kept = other.sql(
            "SELECT slot FROM chunks WHERE slot IN (0, 7, 19) AND key IN (?,?,?)", *KEYS[20:23]
        )
        assert len(kept) == 3
        assert other.start(slots=20)[:3] == KEYS[20:23]

    def test_where_room_is_short_the_most_recently_used_chunks_are_copied(
        self, shell: Shell, archive: Path, other: Store
    ) -> None:
        other.start(slots=6)
        other.put(KEYS[20:21], [2])
        other.stop()
        ran = shell("import", archive, other.root)
        assert ran.code == 0
        assert "11 chunks have no room; --capacity gives more" in flat(ran.out)
        assert other.start(slots=6) == [KEYS[20], *KEYS[11:SLOTS]]
        assert (other.directory / "slots.bin").stat().st_size == 6 * SLOT

    def test_a_capacity_makes_a_store_larger_and_never_smaller(
        self, shell: Shell, archive: Path, other: Store
    ) -> None:
        shell("import", archive, other.root, "--capacity", "32KiB")
        assert other.start(slots=4) == KEYS[12:SLOTS]
        other.stop()
        refused = shell("import", archive, other.root, "--capacity", "24KiB")
        assert refused.code == 2
        assert "--capacity 24.0 KiB" in refused.err
        found = shell.json("import", archive, other.root, "--capacity", "256KiB")
        assert (found["chunks"], found["present"]) == (12, 4)
        assert (other.directory / "slots.bin").stat().st_size == 256 << 10
        assert sorted(read_all(other, slots=32)) == sorted(KEYS[:SLOTS])

    def test_one_cache_of_a_store_can_be_named_by_its_directory(
        self, shell: Shell, archive: Path, other: Store
    ) -> None:
        other.start()
        other.stop()
        assert shell("import", archive, other.directory).code == 0
        assert sorted(read_all(other)) == sorted(KEYS[:SLOTS])

    def test_a_disk_without_room_is_named_before_anything_is_written(
        self,
        shell: Shell,
        archive: Path,
        other: Store,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        io = FaultyIo()
        io.offer(1 << 20)
        monkeypatch.setattr("kvtier.archive.target.BlockIo", lambda: io)
        ran = shell("import", archive, other.root)
        assert ran.code == 2
        assert "does not fit" in ran.err
        assert not (other.directory / "slots.bin").exists()

    def test_a_disk_that_fails_is_named_and_the_import_goes_on_later(
        self,
        shell: Shell,
        archive: Path,
        other: Store,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        io = FaultyIo()
        io.fail("pwritev", errno.EIO, offsets=range(SLOT, 2 * SLOT))
        with monkeypatch.context() as patch:
            patch.setattr("kvtier.archive.target.BlockIo", lambda: io)
            assert shell("import", archive, other.root).code == 2
        assert shell("import", archive, other.root).code == 0
        assert sorted(read_all(other)) == sorted(KEYS[:SLOTS])


class TestRefusals:
    def test_a_store_that_an_engine_has_open_is_refused(
        self,
        shell: Shell,
        store: Store,
        out: Path,
        other_engine: subprocess.Popen[bytes],
    ) -> None:
        shell("export", store.root, out)
        ran = shell("import", out, store.root)
        assert ran.code == 2
        assert f"in use by pid {other_engine.pid} on host" in ran.err
        assert ran.err.endswith("; stop that engine first\n")

    def test_a_running_import_is_not_called_an_engine(
        self, shell: Shell, archive: Path, other: Store
    ) -> None:
        shell("import", archive, other.root)
        (space,) = find_namespaces(other.root)
        with maintain.hold(space, "stop it"):
            ran = shell("import", archive, other.root)
        assert ran.err.endswith(", for kvtier cache; let it finish, or end it\n")

    def test_a_store_of_another_cache_is_refused_setting_by_setting(
        self, shell: Shell, archive: Path, other: Store
    ) -> None:
        other.start(model="another")
        other.stop()
        before = other.seen()
        ran = shell("import", archive, other.root)
        assert (ran.code, other.seen()) == (2, before)
        assert (
            "the archive is of another cache: "
            f"{next(other.root.iterdir())}: model is 'another' there and 'some/model' here; "
            "give it its own path"
        ) in flat(ran.err)

    def test_chunks_that_the_next_start_would_drop_are_not_added_to(
        self, shell: Shell, archive: Path, other: Store
    ) -> None:
        other.start()
        other.reset()
        other.fill(3)
        other.stop()
        ran = shell("import", archive, other.root)
        assert (ran.code, "kvtier cache evict --all, then import again" in ran.err) == (2, True)
        shell("evict", other.root, "--all", "--yes")
        assert shell("import", archive, other.root).code == 0
        assert sorted(read_all(other)) == sorted(KEYS[:SLOTS])

    @pytest.mark.parametrize(
        ("place", "problem"),
        [
            ("nowhere", "No such file or directory; name an archive"),
            ("ftp://host/a", "no such location; give a path, or s3://, gs://, az://"),
            (".", "so it is no archive; name another"),
        ],
    )
    def test_a_place_without_an_archive_is_refused(
        self, shell: Shell, other: Store, place: str, problem: str
    ) -> None:
        ran = shell("import", place, other.root)
        assert (ran.code, problem in flat(ran.err)) == (2, True), ran.err
        assert not other.root.exists()

    def test_a_parent_that_does_not_exist_is_named(
        self, shell: Shell, archive: Path, tmp_path: Path
    ) -> None:
        ran = shell("import", archive, tmp_path / "a" / "b")
        assert (ran.code, "a does not exist; create it" in flat(ran.err)) == (2, True)


class TestMerge:
    def test_an_archive_of_several_has_the_chunks_of_all_once(
        self, shell: Shell, archive: Path, other: Store, tmp_path: Path
    ) -> None:
        other.start(slots=20)
        other.put(KEYS[10:25], range(15))
        other.stop()
        shell("export", other.root, tmp_path / "second", "--zstd")
        merged = tmp_path / "merged"
        found = shell.json("merge", archive, tmp_path / "second", merged)
        assert (found["chunks"], found["present"], found["archive_chunks"]) == (25, 6, 25)
        assert shell("verify", merged).code == 0
        target = Store(tmp_path / "target", other.pool)
        shell("import", merged, target.root)
        assert sorted(read_all(target, slots=25)) == sorted(KEYS[:25])

    def test_archives_of_different_caches_are_refused_setting_by_setting(
        self, shell: Shell, archive: Path, other: Store, tmp_path: Path
    ) -> None:
        other.start(model="another")
        other.fill(2)
        other.stop()
        shell("export", other.root, tmp_path / "second")
        ran = shell("merge", archive, tmp_path / "second", tmp_path / "merged")
        assert ran.code == 2
        assert "model is 'another' there and 'some/model' here" in flat(ran.err)
        assert not (tmp_path / "merged").exists()

    def test_a_damaged_record_is_named_and_the_others_are_copied(
        self, shell: Shell, archive: Path, tmp_path: Path
    ) -> None:
        (part,) = archive.glob("*.kvtier")
        data = bytearray(part.read_bytes())
        data[-1] ^= 1
        part.write_bytes(data)
        found = shell.json("merge", archive, tmp_path / "merged", code=1)
        assert (found["chunks"], found["damaged"]) == (15, 1)
        assert shell("verify", tmp_path / "merged").code == 0
        assert open_location(str(archive)).names()
