"""``kvtier cache verify``: every bad chunk is found, and no good one is called bad."""

from __future__ import annotations

import errno
import os
import re

import pytest

from kvtier.keys import short_key
from kvtier.tiers.slab.index_reader import IndexReader
from kvtier.tiers.slab.inspect import find_namespaces
from kvtier.tiers.slab.verify import verify
from tests.support.faulty_io import FaultyIo
from tests.unit.cache_shell import Shell, flat
from tests.unit.stores import KEYS, SLOT, SLOTS, Store


class TestVerify:
    def test_a_good_store_is_good(self, shell: Shell, store: Store) -> None:
        store.filled()
        ran = shell("verify", store.root)
        assert (ran.code, ran.err) == (0, "")
        assert "good 16 chunks bad 0 chunks" in flat(ran.out)
        assert re.search(r"[0-9] [MG]B/s", ran.out)
        (found,) = shell.json("verify", store.root)
        assert (found["good"], found["nbytes"]) == (16, 16 * SLOT)
        assert found["bytes_per_s"] > 0

    def test_a_flipped_bit_is_found(self, shell: Shell, store: Store) -> None:
        store.filled().flip(slot=9)
        ran = shell("verify", store.root)
        assert ran.code == 1
        assert f"{short_key(KEYS[9])} not the bytes stored 9" in flat(ran.out)
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

    def test_chunks_behind_the_end_of_a_short_file_are_bad(
        self, shell: Shell, store: Store
    ) -> None:
        store.filled()
        os.truncate(store.directory / "slots.bin", 10 * SLOT + 4096)
        (found,) = shell.json("verify", store.root, code=1)
        assert (found["good"], found["bad"]) == (10, 6)

    @pytest.mark.parametrize("whole", [0, 10])
    def test_chunks_behind_the_end_of_a_short_file_count_no_bytes(
        self, shell: Shell, store: Store, whole: int
    ) -> None:
        store.filled()
        os.truncate(store.directory / "slots.bin", whole * SLOT + 4096)
        (found,) = shell.json("verify", store.root, code=1)
        assert (found["good"], found["bad"]) == (whole, SLOTS - whole)
        assert found["nbytes"] == whole * SLOT

    def test_unreadable_chunks_count_no_bytes(
        self, store: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store.filled()
        io = FaultyIo()
        monkeypatch.setattr("kvtier.tiers.slab.verify.BlockIo", lambda: io)
        (space,) = find_namespaces(store.root)
        with IndexReader(space) as reader:
            io.fail("preadv", errno.EIO)
            found = verify(space, reader)
        assert {bad.unreadable for bad in found.bad} == {True}
        assert (found.chunks, len(found.bad), found.nbytes) == (SLOTS, SLOTS, 0)

    def test_an_index_with_odd_values_has_bad_chunks(self, shell: Shell, store: Store) -> None:
        store.filled().sql("UPDATE chunks SET checksum = 'x' WHERE slot = 3")
        (found,) = shell.json("verify", store.root, code=1)
        assert [bad["slot"] for bad in found["bad_chunks"]] == [3]


def start_another(store: Store) -> None:
    """Start an engine with another model, once."""
    if store.directory.exists():
        store.start(model="another", on_mismatch="remove")


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

    def test_a_chunk_that_stays_wrong_is_bad(self, store: Store) -> None:
        store.start()
        store.fill()
        store.flip(slot=4)
        (space,) = find_namespaces(store.root)
        with IndexReader(space) as reader:
            found = verify(space, reader, pause=lambda _: None)
        assert [bad.entry.slot for bad in found.bad] == [4]

    def test_a_store_that_leaves_for_another_model_meanwhile_is_not_called_bad(
        self, store: Store
    ) -> None:
        store.filled()
        (space,) = find_namespaces(store.root)
        with IndexReader(space) as reader, pytest.raises(FileNotFoundError) as caught:
            verify(space, reader, on_progress=lambda _: start_another(store))
        assert caught.value.filename == str(store.directory / "slots.bin")

    def test_an_engine_that_starts_meanwhile_is_noticed(self, store: Store) -> None:
        store.filled()
        (space,) = find_namespaces(store.root)
        with IndexReader(space) as reader:
            assert (reader.totals().chunks, reader.live) == (SLOTS, False)
            store.start()
            store.put([KEYS[20]], [0])
            assert reader.entries_of_slots(0, 1)[0].key == KEYS[20]
            assert reader.live
