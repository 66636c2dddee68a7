"""``kvtier cache export``."""

from __future__ import annotations

import errno
import subprocess
from pathlib import Path

import pytest

from kvtier.archive import export_chunks, open_archive, open_location
from kvtier.archive.reading import Archive
from kvtier.keys import ChunkKey, short_key
from kvtier.tiers.slab.inspect import find_namespaces
from tests.support.faulty_io import FaultyIo
from tests.unit.cache_shell import Shell, flat
from tests.unit.stores import KEYS, SLOTS, Store


def opened(path: Path) -> Archive:
    return open_archive(open_location(str(path)))


def keys_in(path: Path) -> list[ChunkKey]:
    """Return the keys of an archive, which must be whole."""
    keys = []
    for header in opened(path).headers():
        assert not hasattr(header, "problem"), header
        keys += [record.key for record in header.records]
    return keys


class TestExport:
    @pytest.mark.parametrize("form", [[], ["--zstd"]])
    def test_every_chunk_of_a_store_is_in_its_archive(
        self, shell: Shell, store: Store, out: Path, form: list[str]
    ) -> None:
        store.filled()
        before = store.seen()
        ran = shell("export", store.root, out, *form)
        assert (ran.code, ran.err) == (0, "")
        assert ran.out.startswith("exported 16 chunks (128 KiB) in ")
        assert f"{out} has 16 chunks" in flat(ran.out)
        assert keys_in(out) == KEYS[:SLOTS]
        assert shell("verify", out).code == 0
        assert store.seen() == before

    def test_only_the_owner_can_read_an_archive(self, archive: Path) -> None:
        modes = {path.stat().st_mode & 0o777 for path in archive.iterdir()}
        assert (archive.stat().st_mode & 0o777, modes) == (0o700, {0o600})

    def test_a_second_export_adds_what_is_new(
        self, shell: Shell, store: Store, out: Path
    ) -> None:
        store.filled(count=5)
        shell("export", store.root, out)
        store.start()
        store.put(KEYS[5:9], range(5, 9))
        store.stop()
        found = shell.json("export", store.root, out)
        assert (found["chunks"], found["present"], found["archive_chunks"]) == (4, 5, 9)
        assert sorted(keys_in(out)) == sorted(KEYS[:9])

    def test_a_chunk_that_left_the_store_stays_in_the_archive(
        self, shell: Shell, store: Store, archive: Path
    ) -> None:
        shell("evict", store.root, "--all", "--yes")
        assert shell.json("export", store.root, archive)["archive_chunks"] == SLOTS

    def test_a_killed_export_goes_on_with_the_parts_that_it_lacks(
        self, shell: Shell, store: Store, out: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("kvtier.archive.buffers._MOST_SLOTS", 3)
        store.filled()
        shell("export", store.root, out)
        parts = sorted(out.glob("*.kvtier"))
        assert len(parts) == 6
        (out / "manifest.json").unlink()
        parts[2].rename(out / f"{parts[2].name}.draft")
        untouched = {part: part.stat().st_mtime_ns for part in parts if part != parts[2]}
        assert "has 5 parts and no manifest.json" in flat(shell("verify", out).err)
        found = shell.json("export", store.root, out)
        assert (found["chunks"] in {1, 3}, found["archive_chunks"]) == (True, SLOTS)
        assert {part: part.stat().st_mtime_ns for part in untouched} == untouched
        assert not list(out.glob("*.draft"))
        assert shell("verify", out).code == 0

    def test_keys_of_a_file_are_exported_and_nothing_else(
        self, shell: Shell, store: Store, out: Path, tmp_path: Path
    ) -> None:
        listed = tmp_path / "keys.txt"
        listed.write_text(f"{KEYS[3].hex()}\n\n  {short_key(KEYS[7])}\n{KEYS[40].hex()}\n")
        found = shell.json("export", store.filled().root, out, "--keys", listed)
        assert found["missing_keys"] == [KEYS[40].hex()]
        assert keys_in(out) == [KEYS[3], KEYS[7]]

    def test_an_export_of_absent_keys_alone_fails(
        self, shell: Shell, store: Store, out: Path, tmp_path: Path
    ) -> None:
        listed = tmp_path / "keys.txt"
        listed.write_text(f"{KEYS[40].hex()}\n")
        ran = shell("export", store.filled().root, out, "--keys", listed)
        assert ran.code == 1
        assert "none of the given keys is in the cache" in ran.out

    @pytest.mark.parametrize(
        ("line", "problem"),
        [
            ("no key", "keys.txt:2: 'no key' is not a key; write 8 or more hex digits"),
            ("0123456789", "keys.txt:2: 0123456789 is too short; write 16 digits or more"),
        ],
    )
    def test_a_line_that_is_no_key_is_named(
        self, shell: Shell, store: Store, out: Path, tmp_path: Path, line: str, problem: str
    ) -> None:
        listed = tmp_path / "keys.txt"
        listed.write_text(f"{KEYS[3].hex()}\n{line}\n")
        ran = shell("export", store.filled().root, out, "--keys", listed)
        assert (ran.code, ran.out, problem in ran.err) == (2, "", True)
        assert not out.exists()

    def test_a_bad_chunk_is_named_and_left_out(
        self, shell: Shell, store: Store, out: Path
    ) -> None:
        store.filled().flip(slot=9)
        ran = shell("export", store.root, out)
        assert ran.code == 1
        assert f"bad: {short_key(KEYS[9])} in slot 9: not the bytes stored" in flat(ran.out)
        assert keys_in(out) == [*KEYS[:9], *KEYS[10:SLOTS]]
        assert shell("verify", out).code == 0

    def test_an_export_may_run_beside_an_engine(
        self, shell: Shell, store: Store, out: Path, other_engine: subprocess.Popen[bytes]
    ) -> None:
        assert other_engine.poll() is None
        assert shell("export", store.root, out).code == 0
        assert keys_in(out) == KEYS[:SLOTS]

    def test_a_chunk_that_an_engine_replaces_meanwhile_is_not_bad(
        self, store: Store, out: Path
    ) -> None:
        store.start()
        store.fill()
        store.flip(slot=9)
        later = iter([KEYS[SLOTS]])

        def replace(_: int) -> None:
            for key in later:
                store.put([key], [9])

        (space,) = find_namespaces(store.root)
        location = open_location(str(out))
        found = export_chunks(space, location, on_progress=replace, pause=lambda _: None)
        assert (found.chunks, found.changed, found.bad) == (15, 1, [])

    def test_a_store_that_was_reset_is_refused(
        self, shell: Shell, store: Store, out: Path
    ) -> None:
        store.start()
        store.reset()
        store.fill()
        store.stop()
        ran = shell("export", store.root, out)
        assert ran.code == 2
        assert "may be of other weights; start an engine, which drops it" in ran.err
        assert not out.exists()

    def test_one_of_several_caches_is_chosen_by_name(
        self, shell: Shell, store: Store, out: Path, other: Store
    ) -> None:
        store.filled(count=3)
        other.start(model="another")
        other.stop()
        (another,) = other.root.iterdir()
        another.rename(store.root / another.name)
        ran = shell("export", store.root, out)
        assert (ran.code, "has several caches; give --namespace " in ran.err) == (2, True)
        assert shell("export", store.root, out, "-n", store.directory.name).code == 0
        assert keys_in(out) == KEYS[:3]


class TestRefusals:
    def test_an_archive_of_another_cache_is_refused_setting_by_setting(
        self, shell: Shell, store: Store, archive: Path, other: Store
    ) -> None:
        other.start(model="another")
        other.stop()
        ran = shell("export", other.root, archive)
        assert ran.code == 2
        assert (
            f"{archive} has an archive of another cache: "
            "model is 'some/model' there and 'another' here; name another location"
        ) in flat(ran.err)
        assert keys_in(archive) == KEYS[:SLOTS]

    def test_a_directory_with_something_else_is_refused(
        self, shell: Shell, store: Store, tmp_path: Path
    ) -> None:
        ran = shell("export", store.filled().root, tmp_path)
        assert ran.code == 2
        assert "so it is no archive; name another" in flat(ran.err)

    def test_a_place_without_its_parent_is_refused(
        self, shell: Shell, store: Store, tmp_path: Path
    ) -> None:
        ran = shell("export", store.filled().root, tmp_path / "a" / "b")
        assert (ran.code, "No such file or directory; name a new" in ran.err) == (2, True)

    def test_two_exports_to_one_place_do_not_mix(
        self, shell: Shell, store: Store, out: Path
    ) -> None:
        location = open_location(str(out))
        with location.writing():
            ran = shell("export", store.filled().root, out)
        assert (ran.code, "another process writes" in ran.err) == (2, True)

    def test_a_full_disk_is_named_and_the_export_goes_on_later(
        self, shell: Shell, store: Store, out: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        io = FaultyIo()
        io.fail("pwritev", errno.ENOSPC)
        with monkeypatch.context() as patch:
            patch.setattr("kvtier.archive.locations.BlockIo", lambda: io)
            ran = shell("export", store.filled().root, out)
        assert ran.code == 2
        assert "No space left on device; make room, and run the command again" in flat(ran.err)
        assert shell("export", store.root, out).code == 0
        assert keys_in(out) == KEYS[:SLOTS]
