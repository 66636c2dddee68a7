"""GDS reads in a worker: right bytes or a failed load, whatever the disk does, and in time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtier.errors import UnsupportedError
from kvtier.memory.copiers import open_gds
from kvtier.memory.gds_staging import GdsStaging
from kvtier.memory.slot_layout import RankShare
from kvtier.transfer import TransferEngine
from kvtier.types import Outcome, TransferResult
from tests.unit.gds_rig import BLOCKS, SLOT_NBYTES, GdsRig, open_rig
from tests.unit.warned import warnings_in

DONE, FAILED, CORRUPT = Outcome.DONE, Outcome.FAILED, Outcome.CORRUPT
PAGE = 4096
EXPIRED, REFUSED = Outcome.EXPIRED, Outcome.REFUSED


@pytest.fixture(
    params=[None, 0, 1, 2, 3], ids=lambda seed: "cpu" if seed is None else f"{seed}"
)
def rig(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[GdsRig]:
    """A rank on a CPU, or on a fake GPU that runs things in an order of its own."""
    with open_rig(tmp_path, seed=request.param) as opened:
        yield opened


@pytest.fixture
def cpu(tmp_path: Path) -> Iterator[GdsRig]:
    with open_rig(tmp_path) as opened:
        yield opened


def flip(rig: GdsRig, slot: int, *, at: int = 100) -> None:
    """Change a bit of a slot in the file."""
    with rig.path.open("r+b") as file:
        file.seek(slot * SLOT_NBYTES + at)
        (byte,) = file.read(1)
        file.seek(slot * SLOT_NBYTES + at)
        file.write(bytes([byte ^ 16]))


def test_chunks_are_read_into_other_blocks_bit_for_bit(rig: GdsRig) -> None:
    rig.store(range(8), [9, 3, 4, 5, 0, 1, 12, 2])
    slots = [5, 0, 12, 9, 2, 4, 3]
    assert rig.outcomes(slots) == [DONE] * 7
    chunks = {9: 0, 3: 1, 4: 2, 5: 3, 0: 4, 1: 5, 12: 6, 2: 7}
    assert all(rig.loaded(chunks[slot], at) for at, slot in enumerate(slots))
    assert rig.untouched(7)


def test_adjacent_slots_are_read_with_one_call(cpu: GdsRig) -> None:
    cpu.store(range(5), [3, 4, 7, 8, 9])
    assert cpu.outcomes([9, 3, 8, 4, 7]) == [DONE] * 5
    assert cpu.files.calls == [
        (3 * SLOT_NBYTES, 2 * SLOT_NBYTES),
        (7 * SLOT_NBYTES, 2 * SLOT_NBYTES),
        (9 * SLOT_NBYTES, SLOT_NBYTES),
    ]


@pytest.mark.parametrize("at", [0, 1023, 1024, 2047, 2048, SLOT_NBYTES - 1])
def test_a_flipped_bit_fails_its_chunk_alone_and_never_reaches_a_block(
    rig: GdsRig, at: int
) -> None:
    rig.store(range(4), range(4))
    flip(rig, 2, at=at)
    rig.load([1, 2, 3])
    result = rig.end()
    assert result.outcomes == [DONE, CORRUPT, DONE]
    assert "slot 2: hash mismatch" in result.error
    assert rig.untouched(1)
    assert rig.loaded(1, 0)
    assert rig.loaded(3, 2)


def test_another_chunk_in_the_slot_is_not_loaded(rig: GdsRig) -> None:
    rig.store(range(4), range(4))
    hashes = [rig.hashes[slot] for slot in (0, 1)]
    assert rig.outcomes([2, 1], hashes=hashes) == [CORRUPT, DONE]
    assert rig.untouched(0)


def test_an_unreadable_sector_fails_its_chunk_alone(rig: GdsRig) -> None:
    rig.store(range(4), range(4))
    rig.files.bad = {2 * SLOT_NBYTES + 5}
    rig.load([1, 2, 3])
    result = rig.end()
    assert result.outcomes == [DONE, FAILED, DONE]
    assert "slot 2: Input/output error" in result.error


def test_a_file_that_was_cut_short_fails_the_chunks_beyond_its_end(rig: GdsRig) -> None:
    rig.store(range(4), range(4))
    with rig.path.open("r+b") as file:
        file.truncate(2 * SLOT_NBYTES + 100)
    assert rig.outcomes([0, 1, 2, 3]) == [DONE, DONE, FAILED, FAILED]


def test_chunks_in_ram_are_loaded_with_those_on_disk(rig: GdsRig) -> None:
    rig.store(range(4), range(4))
    rig.load([3, 2], ram=[(1, 1), (0, 1)])
    result = rig.end()
    assert result.outcomes == [DONE] * 4
    assert [rig.loaded(chunk, at) for at, chunk in enumerate([3, 2, 1, 0])] == [True] * 4
    assert rig.region.control.all_acknowledged([0, 1]) == [True, True]


def test_a_slot_in_ram_with_another_generation_fails_and_the_reads_do_not(cpu: GdsRig) -> None:
    cpu.store(range(2), range(2))
    cpu.load([1], ram=[(0, 7)])
    result = cpu.end()
    assert result.outcomes[0] is DONE
    assert result.outcomes[1] is not DONE
    assert cpu.region.control.loaded([0], [7]) == [False]


def test_several_loads_take_turns_with_the_buffers(rig: GdsRig) -> None:
    rig.store(range(6), range(6))
    jobs = [rig.load([at, 5 - at]) for at in range(3)]
    ended: list[TransferResult] = []
    while len(ended) < 3:
        assert rig.device.wait_any(timeout_s=30)
        ended += rig.device.poll()
    assert sorted(each.job_id for each in ended) == jobs
    assert all(each.is_whole for each in ended)


def test_a_buffer_is_not_filled_again_before_it_was_emptied(tmp_path: Path) -> None:
    for seed in range(12):
        folder = tmp_path / str(seed)
        folder.mkdir()
        with open_rig(folder, buffer_slots=1, seed=seed) as rig:
            rig.store(range(12), range(12))
            assert rig.outcomes(range(12)) == [DONE] * 12
            assert all(rig.loaded(chunk, chunk) for chunk in range(12))


def test_an_error_in_a_buffer_does_not_end_a_load_before_its_other_buffers(
    cpu: GdsRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    verify = GdsStaging.verify

    def verify_second(staging: GdsStaging, staged: range, *expected: Any) -> list[bool]:
        if not staged.start:
            raise MemoryError("no memory to hash the first buffer")
        return verify(staging, staged, *expected)

    monkeypatch.setattr(GdsStaging, "verify", verify_second)
    cpu.store(range(4), range(4))
    assert cpu.outcomes(range(4)) == [REFUSED, REFUSED, DONE, DONE]
    assert cpu.untouched(0)
    assert cpu.loaded(2, 2)


def test_a_copy_to_blocks_follows_the_computation_of_the_step(tmp_path: Path) -> None:
    with open_rig(tmp_path, seed=0) as rig:
        rig.store(range(2), range(2))
        assert rig.cuda is not None
        kv = rig.kv.tensors[0]
        release = rig.cuda.hold()
        rig.cuda.run_on_device(lambda: kv.__setitem__(slice(BLOCKS // 2, None), 1))
        rig.load([0, 1])
        assert not rig.device.wait_any(timeout_s=0.1)
        release()
        assert rig.end().is_whole
        rig.cuda.finish()
        assert rig.loaded(0, 0)
        assert rig.loaded(1, 1)


@pytest.mark.parametrize("part", [0, 1, 3])
@pytest.mark.parametrize("seed", [None, 0])
def test_a_rank_reads_and_verifies_its_own_part_only(
    tmp_path: Path, part: int, seed: int | None
) -> None:
    with open_rig(tmp_path, seed=seed, share=RankShare(part, 4), page_nbytes=PAGE) as rig:
        rig.store(range(4), [6, 7, 1, 3])
        content = bytearray(rig.path.read_bytes())
        for start in range(0, len(content), PAGE):  # a rank's part of a page
            if start // PAGE % 4 != part:
                content[start : start + PAGE] = b"another." * 512
        rig.path.write_bytes(content)
        assert rig.outcomes([1, 7, 6]) == [DONE] * 3
        assert [rig.loaded(chunk, at) for at, chunk in enumerate([2, 1, 0])] == [True] * 3
        assert sorted(rig.files.calls) == [
            (start, PAGE)
            for start in range(0, len(content), PAGE)
            if start // PAGE % 4 == part and start // rig.slot_nbytes in {1, 6, 7}
        ]
        flip(rig, 4 * 4 * 7, at=part * PAGE + 5)
        flip(rig, 4 * 4 * 6, at=(part + 1) % 4 * PAGE + 5)
        assert rig.outcomes([6, 7]) == [DONE, CORRUPT]


def test_a_part_that_is_unreadable_fails_its_chunk_alone(tmp_path: Path) -> None:
    with open_rig(tmp_path, share=RankShare(1, 4), page_nbytes=PAGE) as rig:
        rig.store(range(3), range(3))
        rig.files.bad = {rig.slot_nbytes + PAGE + 7}
        assert rig.outcomes([0, 1, 2]) == [DONE, FAILED, DONE]


def test_short_parts_of_several_ranks_are_not_read(tmp_path: Path) -> None:
    with (
        open_rig(tmp_path, share=RankShare(1, 4)) as rig,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr("kvtier.memory.gds_staging.SHORTEST_NBYTES", 64 << 10)
        with pytest.raises(UnsupportedError, match=r"1\.00 KiB, which is too short"):
            open_gds(
                "require",
                rig.kv,
                rig.region,
                share=rig.share,
                blocks_per_chunk=2,
                files=rig.files,
            )


# -- time --------------------------------------------------------------------------------------


def test_a_read_that_hangs_fails_its_load_at_the_deadline_and_stops_gds_reads(
    cpu: GdsRig, caplog: pytest.LogCaptureFixture
) -> None:
    cpu.store(range(4), range(4))
    assert cpu.region.control.gds_ranks() == 1
    cpu.files.gate.clear()
    assert cpu.outcomes([0, 1, 2], wait_s=0.05) == [EXPIRED] * 3
    assert cpu.region.control.gds_ranks() == 0
    assert any("hung" in text for text in warnings_in(caplog))
    assert cpu.outcomes([3], wait_s=0.05) == [EXPIRED]
    assert cpu.untouched(0)
    cpu.files.gate.set()
    assert cpu.outcomes([3, 0]) == [DONE, DONE]


def test_no_read_begins_after_the_deadline(cpu: GdsRig) -> None:
    cpu.store(range(6), range(6))
    assert cpu.outcomes([0], wait_s=0.0) == [EXPIRED]
    assert cpu.files.calls == []
    assert cpu.region.control.gds_ranks() == 1, "nothing hung"


def test_closing_ends_a_load_between_two_reads(
    cpu: GdsRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, closing = threading.Event(), threading.Event()
    close = TransferEngine.close

    def close_and_note(engine: TransferEngine, *, timeout_s: float) -> bool:
        closing.set()
        return close(engine, timeout_s=timeout_s)

    def wait_for_close() -> None:
        reading.set()
        assert closing.wait(30)

    monkeypatch.setattr(TransferEngine, "close", close_and_note)
    cpu.store(range(6), range(6))
    cpu.files.before = wait_for_close
    cpu.load(range(6))
    assert reading.wait(30)
    cpu.device.close()
    assert list(cpu.end().outcomes) == [DONE, DONE, *[EXPIRED] * 4]


# -- giving up ---------------------------------------------------------------------------------


def test_a_file_that_cannot_be_opened_stops_gds_reads_and_blames_no_chunk(
    cpu: GdsRig, caplog: pytest.LogCaptureFixture
) -> None:
    cpu.store(range(2), range(2))
    cpu.files.open_error = RuntimeError("cuFile is broken")
    assert cpu.outcomes([0, 1]) == [REFUSED] * 2
    assert cpu.region.control.gds_ranks() == 0
    assert any("cuFile is broken" in text for text in warnings_in(caplog))


def test_reads_that_fail_five_times_in_a_row_stop_gds_reads(cpu: GdsRig) -> None:
    cpu.store(range(4), range(4))
    for _ in range(2):
        cpu.files.bad = {SLOT_NBYTES}
        for _ in range(4):
            assert cpu.outcomes([0, 1]) == [DONE, FAILED]
        cpu.files.bad = set()
        assert cpu.outcomes([0, 1]) == [DONE, DONE]
    assert cpu.region.control.gds_ranks() == 1
    cpu.files.bad = {SLOT_NBYTES}
    for _ in range(5):
        cpu.outcomes([0, 1])
    assert cpu.region.control.gds_ranks() == 0


def test_wrong_bytes_do_not_stop_gds_reads(cpu: GdsRig) -> None:
    cpu.store(range(2), range(2))
    flip(cpu, 1)
    for _ in range(6):
        assert cpu.outcomes([0, 1]) == [DONE, CORRUPT]
    assert cpu.region.control.gds_ranks() == 1


# -- at start ----------------------------------------------------------------------------------


def test_require_on_a_cpu_is_refused_with_the_reason(cpu: GdsRig) -> None:
    with pytest.raises(UnsupportedError, match=r"gds: require, .* on the cpu"):
        open_gds("require", cpu.kv, cpu.region, share=RankShare(), blocks_per_chunk=2)


def test_auto_on_a_cpu_says_once_why_not(cpu: GdsRig, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        assert (
            open_gds("auto", cpu.kv, cpu.region, share=RankShare(), blocks_per_chunk=2) is None
        )
    assert "no GDS reads" in caplog.text
    assert not warnings_in(caplog)
    assert open_gds("off", cpu.kv, cpu.region, share=RankShare(), blocks_per_chunk=2) is None
