"""The whole path: stored, demoted, a new engine, and read straight into blocks.

``kvtier replay``'s engine has both sides of the connector, a real store and a real process for
it, and compares every loaded block with what was stored. There is no GPU: the twin of kvikio's
reads fills memory of this process.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from kvtier.config import KvtierConfig, parse_config
from kvtier.memory.paged import PagedMemory
from kvtier.replay import make_requests, open_engine
from kvtier.sim.cache import StepModel
from kvtier.sim.time_model import TierSpeed
from kvtier.sim.traces import Trace

pytestmark = pytest.mark.usefixtures("forked_hosts")

CHUNK_NBYTES, CHUNK_TOKENS = 64 << 10, 128
PER_CHUNK = 2
RAM, NVME = 24, 32
MODEL = StepModel(
    prefill_tokens_per_s=1e6,
    concurrency=4,
    speeds={name: TierSpeed(1e9, 1e9, 1e-3) for name in ("ram", "nvme")},
    step_tokens=2048,
    step_s=0.0001,
)


def make_trace(chains: Sequence[Sequence[int]]) -> Trace:
    count = len(chains)
    return Trace(
        name="made",
        format="keys",
        sha256="",
        ids=np.array([chunk for chain in chains for chunk in chain], np.int64),
        offsets=np.cumsum([0, *map(len, chains)]),
        timestamps_s=np.arange(count, dtype=np.float64) * 0.02,
        input_tokens=np.array([len(chain) * CHUNK_TOKENS for chain in chains]),
        output_tokens=np.full(count, 1),
        chunk_tokens=CHUNK_TOKENS,
        distinct=1 + max(map(max, chains)),
        sessions=(),
    )


def config_of(
    tmp_path: Path, *, own_process: bool = True, gds: str = "require", ram: int = RAM
) -> KvtierConfig:
    return parse_config(
        f"tiers:\n- kind: ram\n  capacity: {ram * CHUNK_NBYTES}B\n  huge_pages: 'off'\n"
        f"- kind: nvme\n  path: {tmp_path / 'store'}\n  capacity: {NVME * CHUNK_NBYTES}B\n"
        f"  own_process: {str(own_process).lower()}\n  gds: '{gds}'\n"
        "placement:\n  load_if: always\n  backlog_limit: 100%\n"
        f"engine:\n  blocks_per_chunk: {PER_CHUNK}\n",
        source="test",
    )


@dataclass(frozen=True)
class Served:
    """What an engine did."""

    loaded_chunks: int
    failed_loads: int
    moved: dict[str, int]
    corrupt_chunks: int
    expired_chunks: int
    shut_out_chunks: int
    gds_ranks: int


def serve(
    config: KvtierConfig,
    chains: Sequence[Sequence[int]],
    *,
    opened_hook: Callable[[], object] = lambda: None,
) -> Served:
    """Let a new engine serve requests; it checks every block that it loads."""
    trace = make_trace(chains)
    memory = PagedMemory(layers=4, blocks=97, block_nbytes=CHUNK_NBYTES // PER_CHUNK)
    with open_engine(trace, config, CHUNK_NBYTES, memory, MODEL) as engine:
        opened_hook()
        requests = list(make_requests(trace, blocks_per_chunk=PER_CHUNK))
        engine.serve(requests, progress=lambda _: None)
        figures = engine.cache.statistics()
        moved = engine.cache.take_transfers().totals()
        return Served(
            loaded_chunks=engine.counts.loaded_blocks // PER_CHUNK,
            failed_loads=engine.counts.failed_loads,
            moved={name: nbytes // CHUNK_NBYTES for name, (nbytes, _) in moved.items()},
            corrupt_chunks=figures.tiers[1].corrupt_chunks,
            expired_chunks=figures.tiers[1].expired_chunks,
            shut_out_chunks=figures.tiers[1].shut_out_chunks,
            gds_ranks=figures.gds_ranks,
        )


CHAINS = [list(range(start, start + 8)) for start in (0, 8, 16)]


@pytest.mark.parametrize("own_process", [True, False])
def test_a_new_engine_reads_what_the_last_one_stored_straight_into_blocks(
    tmp_path: Path, own_process: bool
) -> None:
    config = config_of(tmp_path, own_process=own_process)
    first = serve(config, CHAINS)
    assert (first.loaded_chunks, first.gds_ranks) == (0, 1)
    second = serve(config, [*CHAINS, CHAINS[0]])
    assert second.failed_loads == 0
    assert second.loaded_chunks == 4 * 8
    assert second.moved["nvme_to_gpu"] == 4 * 8
    assert "nvme_to_ram" not in second.moved


def test_the_same_engine_reads_what_left_its_ram(tmp_path: Path) -> None:
    served = serve(config_of(tmp_path, ram=10), [*CHAINS, *CHAINS])
    assert served.failed_loads == 0
    assert served.moved["nvme_to_gpu"] > 0
    assert "nvme_to_ram" not in served.moved


def test_chunks_of_an_engine_without_gds_reads_come_through_ram(tmp_path: Path) -> None:
    serve(config_of(tmp_path, gds="off"), CHAINS[:1])
    served = serve(config_of(tmp_path), CHAINS[:1])
    assert served.loaded_chunks == 8
    assert served.moved["nvme_to_ram"] == 8
    assert "nvme_to_gpu" not in served.moved


def test_an_engine_without_gds_reads_uses_what_one_with_them_stored(tmp_path: Path) -> None:
    serve(config_of(tmp_path), CHAINS[:1])
    served = serve(config_of(tmp_path, gds="off"), CHAINS[:1])
    assert (served.loaded_chunks, served.gds_ranks) == (8, 0)
    assert served.moved["nvme_to_ram"] == 8


def test_a_flipped_bit_on_disk_is_computed_again_and_forgotten(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    serve(config, CHAINS[:1])
    (path,) = (tmp_path / "store").glob("*/slots.bin")
    content = bytearray(path.read_bytes())
    at = next(at for at in range(0, len(content), CHUNK_NBYTES) if any(content[at : at + 8]))
    content[at + 999] ^= 1
    path.write_bytes(content)
    served = serve(config, CHAINS[:1])
    assert served.failed_loads == 1
    assert served.corrupt_chunks == 1
    again = serve(config, CHAINS[:1])
    assert (again.failed_loads, again.corrupt_chunks) == (0, 0)
    assert again.loaded_chunks == 8, "what was computed again was stored again"


def test_reads_of_a_file_that_was_replaced_count_as_refused(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    serve(config, CHAINS[:1])
    (path,) = (tmp_path / "store").glob("*/slots.bin")

    def replace_file() -> None:
        path.rename(path.with_name("moved"))
        shutil.copyfile(path.with_name("moved"), path)

    served = serve(config, CHAINS[:1], opened_hook=replace_file)
    assert served.failed_loads == 1
    assert (served.shut_out_chunks, served.expired_chunks, served.corrupt_chunks) == (8, 0, 0)
    assert served.gds_ranks == 0
