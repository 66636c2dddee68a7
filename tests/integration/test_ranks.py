"""A store is read with another number of ranks than it was written with.

What a load is to be compared with is not obvious: another number of ranks rounds sums in
another order, so an engine may pick another token without anything being wrong. Prompts are
taken whose answers plain vLLM gives alike with one rank and with two; any other answer on
loaded KV is then the load's fault.
"""

from __future__ import annotations

import random
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvtier.archive import export_chunks, import_chunks, open_archive, open_location
from kvtier.tiers.slab.inspect import find_namespaces
from tests.demo.model import BLOCK_TOKENS, KV_NBYTES_PER_BLOCK, write_model
from tests.demo.runner import run_engine
from tests.demo.scenario import Prompt, Report, Scenario, Wave, store_yaml
from tests.integration.harness import words

PROMPTS = 8
STORE_NBYTES = 120 * KV_NBYTES_PER_BLOCK


@dataclass(frozen=True, slots=True)
class Alike:
    """What plain vLLM answers with one rank and with two."""

    model: Path
    answers: dict[tuple[int, ...], tuple[int, ...]]

    def run(self, directory: Path, config: Path | None, ranks: int) -> Report:
        """Ask all prompts of an engine that starts anew."""
        prompts = tuple(Prompt(tokens=prompt) for prompt in self.answers)
        scenario = Scenario(
            model=self.model,
            config=config,
            waves=(Wave(prompts=prompts, max_tokens=6),),
            context_tokens=512,
            ranks=ranks,
        )
        return run_engine(scenario, directory, f"ranks-{ranks}")


@pytest.fixture(scope="module")
def alike(tmp_path_factory: pytest.TempPathFactory) -> Alike:
    directory = tmp_path_factory.mktemp("ranks")
    write_model(directory / "model")
    draw = random.Random(11)
    asked = Alike(directory / "model", {words(draw, 170, 230): () for _ in range(PROMPTS)})
    one, two = (
        {answer.prompt: answer.tokens for answer in asked.run(directory, None, ranks).answers()}
        for ranks in (1, 2)
    )
    equal = {prompt: tokens for prompt, tokens in one.items() if two[prompt] == tokens}
    assert len(equal) > PROMPTS // 2
    return Alike(asked.model, equal)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("writers", "readers"), [(1, 2), (2, 1)])
@pytest.mark.parametrize("carried", [False, True], ids=["in place", "as an archive"])
def test_a_store_written_with_one_number_of_ranks_is_read_with_another(
    alike: Alike, tmp_path: Path, writers: int, readers: int, *, carried: bool
) -> None:
    config = store_yaml(
        tmp_path / "kvtier.yaml",
        store=tmp_path / "store",
        ram_nbytes=STORE_NBYTES,
        nvme_nbytes=STORE_NBYTES,
        blocks_per_chunk=2,
    )
    wrote = alike.run(tmp_path, config, writers)
    if carried:
        (space,) = find_namespaces(tmp_path / "store")
        archive = open_location(str(tmp_path / "archive"))
        exported = export_chunks(space, archive)
        shutil.rmtree(tmp_path / "store")
        imported = import_chunks(open_archive(archive), tmp_path / "store")
        assert imported.chunks == exported.chunks > 0
    read = alike.run(tmp_path, config, readers)
    for report in (wrote, read):
        assert {answer.prompt: answer.tokens for answer in report.answers()} == alike.answers
        assert report.count("kvtier_internal_errors") == 0
        assert report.count("kvtier_failed_chunks") == 0
    assert wrote.count("kvtier_hit_tokens") == 0
    assert all(
        answer.cached_tokens > len(answer.prompt) - 3 * BLOCK_TOKENS
        for answer in read.answers()
    )
    assert read.count("kvtier_hit_tokens", tier="nvme") > 0
    assert len(list((tmp_path / "store").rglob("slots.bin"))) == 1
