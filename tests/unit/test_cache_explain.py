"""``kvtier cache explain``: where a chunk is, and every reason why it may be gone."""

from __future__ import annotations

import time

import pytest

from kvtier.keys import ADAPTER_NBYTES, ADAPTER_OFFSET, make_key, short_key
from tests.unit.cache_shell import Shell, flat
from tests.unit.stores import KEYS, Store


class TestExplain:
    def test_explain_says_where_a_chunk_is_and_how_it_was_used(
        self, shell: Shell, store: Store
    ) -> None:
        store.start()
        store.fill()
        store.tier.touch([3, 3])
        store.stop()
        text = flat(shell("explain", store.root, KEYS[3].hex()).out)
        assert text.startswith(KEYS[3].hex())
        assert "slot 3, byte 24,576 of" in text
        assert "loaded 2 times, last at 20" in text
        assert "15 chunks were used less recently" in text
        (answer,) = shell.json("explain", store.root, KEYS[3].hex())["answers"]
        assert (answer["slot"], answer["hits"], answer["offset_nbytes"]) == (3, 2, 24576)

    @pytest.mark.parametrize("digits", [8, 9, 64, 72])
    def test_a_beginning_of_eight_digits_is_enough(
        self, shell: Shell, store: Store, digits: int
    ) -> None:
        store.filled()
        ran = shell("explain", store.root, KEYS[3].hex()[:digits].upper())
        assert (ran.code, ran.out.split()[0]) == (0, KEYS[3].hex())
        assert shell("explain", store.root, f"{KEYS[3].hex()[:8]}/1").code == 1

    def test_a_beginning_of_two_keys_is_refused(self, shell: Shell, store: Store) -> None:
        twin = KEYS[0][:-4] + b"\0\0\0\1"
        store.start()
        store.put([KEYS[0], twin], [0, 1])
        store.stop()
        ran = shell("explain", store.root, KEYS[0].hex()[:16])
        assert ran.code == 2
        assert "2 keys begin with" in ran.err
        ran = shell("explain", store.root, f"{KEYS[0].hex()[:16]}/1")
        assert (ran.code, ran.out.split()[0]) == (0, twin.hex())

    @pytest.mark.parametrize("form", ["whole key", "hash and group", "hash", "kvtier's own"])
    def test_the_engine_s_name_of_a_chunk_with_an_adapter_finds_it(
        self, shell: Shell, store: Store, form: str
    ) -> None:
        known = KEYS[0]
        own = known[:ADAPTER_OFFSET] + b"\x5a" * ADAPTER_NBYTES + known[ADAPTER_OFFSET:]
        store.start()
        store.put([own, KEYS[1]], [0, 1])
        store.stop()
        text = {
            "whole key": known.hex(),
            "hash and group": f"{known[:-4].hex()}/0",
            "hash": known[:-4].hex(),
            "kvtier's own": own.hex(),
        }[form]
        ran = shell("explain", store.root, text)
        assert (ran.code, ran.out.split()[0]) == (0, own.hex())
        assert shell("explain", store.root, f"{text[:20]}ffff").code == 1
        assert shell("evict", store.root, text, "--yes").code == 0
        assert shell("explain", store.root, text).code == 1

    def test_a_key_without_its_adapter_is_refused_if_several_match(
        self, shell: Shell, store: Store
    ) -> None:
        known = KEYS[0]
        digests = [bytes([digest]) * ADAPTER_NBYTES for digest in (1, 2)]
        keys = [known[:ADAPTER_OFFSET] + digest + known[ADAPTER_OFFSET:] for digest in digests]
        store.start()
        store.put(keys, [0, 1])
        store.stop()
        ran = shell("explain", store.root, known.hex())
        assert ran.code == 2
        assert all(key.hex() in ran.err for key in keys)

    @pytest.mark.parametrize("key", ["abcdef", "nothex00", "abcdef00/x", ""])
    def test_an_invalid_key_is_refused(self, shell: Shell, store: Store, key: str) -> None:
        ran = shell("explain", store.filled().root, key)
        assert ran.code == 2
        assert "is not a key; write 8 or more hex digits" in ran.err

    def purpose(self, shell: Shell, store: Store, slot: int) -> str:
        key = KEYS[slot]
        (answer,) = shell.json("explain", store.root, key.hex(), code=1)["answers"]
        others = [f"{key[:-4].hex()}/0", short_key(key), key.hex()[:16], f"{key.hex()[:8]}/0"]
        for other in others:
            (same,) = shell.json("explain", store.root, other, code=1)["answers"]
            assert same == answer, other
        assert answer["short_key"] == short_key(key)
        assert answer["left_at"] > 1_700_000_000
        return str(answer["reason"])

    def test_explain_says_that_a_chunk_was_evicted(self, shell: Shell, store: Store) -> None:
        store.filled()
        store.start()
        store.put([KEYS[20]], [7])
        store.stop()
        assert self.purpose(shell, store, 7) == "evicted"
        out = shell("explain", store.root, KEYS[7].hex()).out
        assert "another chunk was written into its slot" in out

    def test_explain_says_that_the_engine_dropped_a_chunk(
        self, shell: Shell, store: Store
    ) -> None:
        store.filled()
        store.start()
        store.tier.forget([7])
        store.stop()
        assert self.purpose(shell, store, 7) == "corrupt"

    def test_explain_says_that_the_tier_was_made_smaller(
        self, shell: Shell, store: Store
    ) -> None:
        store.filled()
        store.start(slots=8)
        store.stop()
        assert self.purpose(shell, store, 8) == "beyond"
        assert shell("explain", store.root, KEYS[7].hex()).code == 0

    def test_explain_says_that_the_cache_was_reset(self, shell: Shell, store: Store) -> None:
        store.filled()
        store.start()
        store.reset()
        store.fill(1)
        store.stop()
        assert self.purpose(shell, store, 7) == "reset"
        assert shell("explain", store.root, KEYS[0].hex()).code == 0

    def test_explain_says_that_a_chunk_was_stored_after_a_reset(
        self, shell: Shell, store: Store
    ) -> None:
        store.start()
        store.reset()
        store.fill()
        store.stop()
        assert shell("explain", store.root, KEYS[7].hex()).code == 0
        store.start()
        store.stop()
        assert self.purpose(shell, store, 7) == "after-reset"
        out = shell("explain", store.root, KEYS[7].hex()).out
        assert "it was stored after a reset of the cache" in out

    def test_explain_says_that_an_operator_removed_a_chunk(
        self, shell: Shell, store: Store
    ) -> None:
        store.filled()
        assert shell("evict", store.root, KEYS[7].hex(), "--yes").code == 0
        assert self.purpose(shell, store, 7) == "dropped"

    def test_explain_says_that_a_chunk_was_lost_with_an_index(
        self, shell: Shell, store: Store
    ) -> None:
        store.filled().index.write_bytes(b"no database" * 1000)
        store.start()
        store.stop()
        ran = shell("explain", store.root, KEYS[7].hex())
        assert ran.code == 1
        assert "what it held is not known" in flat(ran.out)

    def test_explain_says_that_a_chunk_was_never_seen(self, shell: Shell, store: Store) -> None:
        ran = shell("explain", store.filled().root, KEYS[30].hex())
        assert ran.code == 1
        assert "never stored, or removed before the log begins" in ran.out
        assert "hint" not in ran.out

    @pytest.mark.parametrize("digits", range(8, 17))
    def test_a_chunk_of_another_group_that_is_gone_is_another_chunk(
        self, shell: Shell, store: Store, digits: int
    ) -> None:
        store.filled()
        store.start()
        store.tier.forget([7])
        store.stop()
        ran = shell("explain", store.root, f"{KEYS[7].hex()[:digits]}/1")
        assert "never stored, or removed before the log begins" in ran.out
        ran = shell("explain", store.root, f"{KEYS[7].hex()[:digits]}/0")
        assert ran.out.startswith(f"{short_key(KEYS[7])}\n")
        assert "dropped by the engine" in ran.out

    def test_a_beginning_of_two_chunks_that_are_gone_is_refused(
        self, shell: Shell, store: Store
    ) -> None:
        twin = make_key(KEYS[0][:-4], 1)
        store.start()
        store.put([KEYS[0], twin], [0, 1])
        store.tier.forget([0])
        store.put([KEYS[1]], [1])
        store.stop()
        for digits in (8, 16, 64):
            ran = shell("explain", store.root, KEYS[0].hex()[:digits])
            assert (ran.code, ran.out) == (2, "")
            assert f"{short_key(KEYS[0])}, {short_key(twin)}; give one key" in ran.err
        for key, reason in ((KEYS[0], "corrupt"), (twin, "evicted")):
            for written in (short_key(key), key.hex()):
                (answer,) = shell.json("explain", store.root, written, code=1)["answers"]
                assert (answer["reason"], answer["short_key"]) == (reason, short_key(key))

    def test_a_chunk_that_came_back_and_left_again_has_the_latest_reason(
        self, shell: Shell, store: Store
    ) -> None:
        store.start()
        store.put([KEYS[40]], [3])
        store.put([KEYS[3]], [3])
        store.put([KEYS[40]], [3])
        store.tier.forget([3])
        store.stop()
        assert self.purpose(shell, store, 40) == "corrupt"

    def test_the_last_reason_counts(self, shell: Shell, store: Store) -> None:
        store.filled()
        store.start()
        store.tier.forget([7])
        store.stop()
        store.start()
        store.put([KEYS[7]], [7])
        store.put([KEYS[20]], [7])
        store.stop()
        assert self.purpose(shell, store, 7) == "evicted"

    def test_an_eviction_can_be_explained_within_moments(
        self, shell: Shell, store: Store
    ) -> None:
        store.start()
        store.fill()
        store.put([KEYS[20]], [7])
        deadline = time.monotonic() + 20
        while "evicted" not in shell("explain", store.root, KEYS[7].hex()).out:
            assert time.monotonic() < deadline
