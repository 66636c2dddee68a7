"""``kvtier cache coverage`` and ``kvtier warmup`` as commands."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kvtier.coverage import BlockHasher
from kvtier.keys import make_key
from tests.unit.cache_shell import Shell
from tests.unit.stores import BLOCK_TOKENS, SLOT, Store

MODEL = "some/model"


def tokens(blocks: int, own: int = 0) -> list[int]:
    """Return a prompt of whole blocks and one token."""
    return [own, *range(blocks * BLOCK_TOKENS)]


def write(path: Path, prompts: Sequence[Sequence[int] | str]) -> Path:
    lines = (
        each if isinstance(each, str) else json.dumps({"prompt_token_ids": each})
        for each in prompts
    )
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


@pytest.fixture
def warm(store: Store) -> Store:
    """A store with four blocks of a prompt of six, and all of another one's."""
    store.start()
    hasher = BlockHasher(BLOCK_TOKENS)
    keys = [make_key(each, 0) for each in hasher.hashes(tokens(6))[:4]]
    keys += [make_key(each, 0) for each in hasher.hashes(tokens(2, own=9))]
    store.put(keys, range(len(keys)))
    store.stop()
    return store


def coverage(shell: Shell, store: Store, prompts: Path, *options: object) -> Any:
    (answer,) = shell.json(
        "coverage", store.root, "--prompts", prompts, "--model", MODEL, *options
    )
    return answer


def test_coverage_reports_the_hit_of_each_prompt(
    shell: Shell, warm: Store, tmp_path: Path
) -> None:
    prompts = write(tmp_path / "p", [tokens(2, own=9), tokens(6), tokens(1, own=5)])
    seen = warm.seen()
    answer = coverage(shell, warm, prompts)
    assert (answer["prompts"], answer["whole"], answer["partly"]) == (3, 1, 1)
    assert answer["hit_tokens"] == 6 * BLOCK_TOKENS
    assert answer["reusable_tokens"] == 9 * BLOCK_TOKENS
    assert [line["line"] for line in answer["lines"]] == [2, 3, 1]
    assert answer["lines"][0]["hit_tokens"] == 4 * BLOCK_TOKENS
    assert warm.seen() == seen
    assert len(coverage(shell, warm, prompts, "--limit", 1)["lines"]) == 1


def test_coverage_prints_a_line_for_each_fact(
    shell: Shell, warm: Store, tmp_path: Path
) -> None:
    prompts = write(tmp_path / "p", [tokens(2, own=9), tokens(6)])
    ran = shell("coverage", warm.root, "--prompts", prompts, "--model", MODEL)
    assert (ran.code, ran.err) == (0, "")
    lines = ran.out.splitlines()
    assert lines[0] == f"{warm.directory.name}  {MODEL}"
    assert [line.split()[0] for line in lines[1:6]] == [
        "prompts",
        "tokens",
        "stored",
        "covered",
        "line",
    ]
    assert f"{6 * SLOT >> 10}.0 KiB to load" in ran.out
    assert "75.0% of the reusable tokens" in ran.out


def test_coverage_beside_an_engine_sees_what_is_written(
    shell: Shell, warm: Store, tmp_path: Path
) -> None:
    prompts = write(tmp_path / "p", [tokens(6)])
    warm.start()
    rest = [make_key(each, 0) for each in BlockHasher(BLOCK_TOKENS).hashes(tokens(6))[4:]]
    warm.put(rest, [10, 11])
    assert coverage(shell, warm, prompts)["share"] == 1


def test_an_export_may_take_the_chunks_of_prompts_only(
    shell: Shell, warm: Store, tmp_path: Path
) -> None:
    prompts = write(tmp_path / "p", [tokens(2, own=9), tokens(1, own=5)])
    choice = ["--prompts", prompts, "--model", MODEL]
    for command in (
        ["export", warm.root, tmp_path / "archive", *choice],
        ["import", tmp_path / "archive", tmp_path / "copy"],
    ):
        ran = shell(*command)
        assert (ran.code, ran.err) == (0, "")
    (answer,) = shell.json("coverage", tmp_path / "copy", *choice)
    assert (answer["whole"], answer["hit_tokens"]) == (1, 2 * BLOCK_TOKENS)
    everything = write(tmp_path / "all", [tokens(6)])
    (answer,) = shell.json(
        "coverage", tmp_path / "copy", "--prompts", everything, "--model", MODEL
    )
    assert answer["hit_tokens"] == 0


def test_an_export_of_prompts_needs_the_model(
    shell: Shell, warm: Store, tmp_path: Path
) -> None:
    prompts = write(tmp_path / "p", [tokens(1)])
    ran = shell("export", warm.root, tmp_path / "archive", "--prompts", prompts)
    assert ran.code == 2
    assert "--prompts needs --model, and cannot be combined with --keys" in ran.err
    assert not (tmp_path / "archive").exists()


def test_another_model_has_nothing_there(shell: Shell, warm: Store, tmp_path: Path) -> None:
    prompts = write(tmp_path / "p", [tokens(6)])
    ran = shell("coverage", warm.root, "--prompts", prompts, "--model", "org/other")
    assert ran.code == 2
    assert ran.err == (
        f"error: {warm.root} has nothing of --model org/other; it has chunks of {MODEL}\n"
    )


def test_a_bad_line_is_fatal_or_skipped_by_choice(
    shell: Shell, warm: Store, tmp_path: Path
) -> None:
    prompts = write(tmp_path / "p", [tokens(6), "{}"])
    asked = ("coverage", warm.root, "--prompts", prompts, "--model", MODEL)
    ran = shell(*asked)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith(f"error: {prompts}:2: has no prompt; write one of ")
    ran = shell(*asked, "--on-bad-line", "skip")
    assert ran.code == 0
    assert ran.err.startswith(f"note: {prompts}:2: has no prompt")
    ran = shell(*asked, "--on-bad-line", "ignore")
    assert (ran.code, ran.out) == (2, "")
    assert "--on-bad-line ignore: not a choice" in ran.err


def test_a_store_of_an_earlier_kvtier_is_looked_into_after_the_next_start(
    shell: Shell, warm: Store, tmp_path: Path
) -> None:
    prompts = write(tmp_path / "p", [tokens(2, own=9)])
    layout = warm.directory / "layout.json"
    content = json.loads(layout.read_text())
    del content["groups"]
    layout.write_text(json.dumps(content))
    ran = shell("coverage", warm.root, "--prompts", prompts, "--model", MODEL)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.endswith("start an engine on it once\n")
    assert len(warm.start()) == 6
    warm.stop()
    assert coverage(shell, warm, prompts)["share"] == 1


def test_an_argument_of_the_engine_belongs_behind_two_dashes(
    shell: Shell, warm: Store, tmp_path: Path
) -> None:
    prompts = write(tmp_path / "p", [tokens(6)])
    asked = ("coverage", warm.root, "--prompts", prompts, "--model", MODEL)
    ran = shell(*asked, "--max-model-len", "9")
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith("error: no such option: --max-model-len")
    assert "; write arguments of vllm serve after --, or see kvtier cache" in ran.err


def test_coverage_counts_prompts_that_are_too_short(
    shell: Shell, warm: Store, tmp_path: Path
) -> None:
    prompts = write(tmp_path / "p", [tokens(2, own=9), [1, 2]])
    answer = coverage(shell, warm, prompts)
    assert (answer["prompts"], answer["whole"], answer["short"]) == (2, 1, 1)
    ran = shell("coverage", warm.root, "--prompts", prompts, "--model", MODEL)
    assert "2: 1 stored, 0 in part, 0 not, 1 too short to store" in ran.out
