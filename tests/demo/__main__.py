"""Run three engines, one after the other, on one set of prompts: ``nox -s demo``.

1. vLLM alone: its tokens are the reference.
2. vLLM with kvtier, the GPU cache and the RAM tier both far too small, so most KV goes to NVMe.
3. A new vLLM process on the same store: what the second one computed is loaded, not computed.

It fails unless every token is the reference's and nearly every prompt token of the third engine
came from NVMe.
"""

from __future__ import annotations

import json
import random
import shutil
import statistics
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from kvtier.errors import KvtierError
from tests.demo.model import BLOCK_TOKENS, KV_NBYTES_PER_BLOCK, VOCABULARY, write_model
from tests.demo.runner import run_engine
from tests.demo.scenario import (
    Prompt,
    Report,
    Scenario,
    Wave,
    WaveReport,
    store_yaml,
)

__all__ = ["main"]

REQUIRED_NVME_SHARE = 0.95
SEED = 20
FIRST_WORD = 2  # 0 and 1 are the model's begin and end tokens
MAX_PROMPT_TOKENS = 4000
PROMPTS_IN_GPU = 2.2
PROMPTS_IN_RAM = 4


@dataclass(frozen=True, slots=True)
class Row:
    """One pass over the prompts."""

    name: str
    prompts: int
    prompt_tokens: int
    computed_tokens: int
    """Prompt tokens the model ran on."""
    gpu_tokens: int
    """Prompt tokens that vLLM's own prefix cache still had."""
    ram_tokens: int
    """Prompt tokens kvtier had in RAM when they were asked for."""
    nvme_tokens: int
    """Prompt tokens kvtier fetched from NVMe."""
    seconds: float
    first_token_s: float
    """Median time from sending a prompt to its first token; all are sent at once."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the demo found."""

    rows: tuple[Row, ...]
    tokens_identical: bool
    reusable_tokens: int
    """Prompt tokens in whole blocks: what a restarted engine can find."""
    nvme_share_after_restart: float
    """Part of the reusable tokens that the restarted engine loaded from NVMe."""

    @property
    def passed(self) -> bool:
        """Whether kvtier kept its promises."""
        enough = self.nvme_share_after_restart >= REQUIRED_NVME_SHARE
        return self.tokens_identical and enough


def make_prompts(count: int, tokens: int) -> tuple[Prompt, ...]:
    """Draw ``count`` prompts of ``tokens`` random tokens; always the same ones."""
    draw = random.Random(SEED)
    return tuple(
        Prompt(tokens=tuple(draw.randrange(FIRST_WORD, VOCABULARY) for _ in range(tokens)))
        for _ in range(count)
    )


def row(name: str, wave: WaveReport) -> Row:
    """Sum up one pass."""
    part = Report(waves=(wave,))
    cached = sum(answer.cached_tokens for answer in wave.answers)
    ram, nvme = (int(part.count("kvtier_hit_tokens", tier=tier)) for tier in ("ram", "nvme"))
    return Row(
        name=name,
        prompts=len(wave.answers),
        prompt_tokens=part.prompt_tokens(),
        computed_tokens=part.prompt_tokens() - cached,
        gpu_tokens=max(0, cached - ram - nvme),
        ram_tokens=ram,
        nvme_tokens=nvme,
        seconds=wave.seconds,
        first_token_s=statistics.median(answer.first_token_s for answer in wave.answers),
    )


def compare(reference: Report, tiered: Report, restarted: Report) -> Outcome:
    """Judge the three engines' reports."""
    expected = {answer.prompt: answer.tokens for answer in reference.answers()}
    seen = [*reference.answers(), *tiered.answers(), *restarted.answers()]
    reusable = sum(
        len(answer.prompt) // BLOCK_TOKENS * BLOCK_TOKENS for answer in restarted.answers()
    )
    return Outcome(
        rows=(
            row("alone", reference.waves[0]),
            row("alone, again", reference.waves[1]),
            row("kvtier", tiered.waves[0]),
            row("kvtier, again", tiered.waves[1]),
            row("restarted", restarted.waves[0]),
        ),
        tokens_identical=all(answer.tokens == expected[answer.prompt] for answer in seen),
        reusable_tokens=reusable,
        nvme_share_after_restart=restarted.count("kvtier_hit_tokens", tier="nvme") / reusable,
    )


def run_demo(directory: Path, console: Console, *, prompts: int, prompt_tokens: int) -> Outcome:
    """Run the three engines with their files in ``directory``.

    Raises:
        EngineFailedError: One of them did not get to its end.
    """
    write_model(directory / "model")
    first = Wave(prompts=make_prompts(prompts, prompt_tokens))
    # The other way round, so that what was used last is asked for while it is still near.
    again = Wave(prompts=first.prompts[::-1])
    prompt_blocks = -(-prompt_tokens // BLOCK_TOKENS)
    alone = Scenario(
        model=directory / "model",
        waves=(first, again),
        gpu_blocks=int(prompt_blocks * PROMPTS_IN_GPU),
        context_tokens=(prompt_blocks + 1) * BLOCK_TOKENS,
    )
    config = store_yaml(
        directory / "kvtier.yaml",
        store=directory / "store",
        ram_nbytes=PROMPTS_IN_RAM * prompt_blocks * KV_NBYTES_PER_BLOCK,
        nvme_nbytes=2 * prompts * prompt_blocks * KV_NBYTES_PER_BLOCK,
    )
    tiered = alone.model_copy(update={"config": config})
    restarted = tiered.model_copy(update={"waves": (first,)})
    console.print("1/3 vLLM alone ...")
    reference_report = run_engine(alone, directory, "alone")
    console.print("2/3 vLLM with kvtier ...")
    tiered_report = run_engine(tiered, directory, "tiered")
    console.print("3/3 a new vLLM on the same store ...")
    return compare(
        reference_report, tiered_report, run_engine(restarted, directory, "restarted")
    )


def show(outcome: Outcome, console: Console) -> None:
    """Print the table and the verdict."""
    table = Table(
        title="prompt tokens by where their KV came from",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    table.add_column("run", no_wrap=True)
    headings = ("prompts", "tokens", "computed", "GPU", "RAM", "NVMe", "seconds", "TTFT p50")
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for line in outcome.rows:
        counts = (
            line.prompts,
            line.prompt_tokens,
            line.computed_tokens,
            line.gpu_tokens,
            line.ram_tokens,
            line.nvme_tokens,
        )
        seconds = (line.seconds, line.first_token_s)
        table.add_row(line.name, *map(str, counts), *(f"{value:.2f}" for value in seconds))
    console.print(table)
    share = outcome.nvme_share_after_restart
    console.print(
        f"after the restart {share:.1%} of {outcome.reusable_tokens} reusable tokens "
        f"came from NVMe (required: {REQUIRED_NVME_SHARE:.0%})",
        soft_wrap=True,
    )
    console.print(f"tokens identical: {'yes' if outcome.tokens_identical else 'NO'}")


def demo(
    prompts: Annotated[int, typer.Option(min=1, help="How many prompts.")] = 16,
    prompt_tokens: Annotated[
        int, typer.Option(min=BLOCK_TOKENS, max=MAX_PROMPT_TOKENS, help="Tokens of each.")
    ] = 2048,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the figures to this file, too.")
    ] = None,
) -> None:
    """Run vLLM without kvtier, with it, and again on the store it left; compare the tokens."""
    console = Console()
    directory = Path(tempfile.mkdtemp(prefix="kvtier-demo-"))
    try:
        outcome = run_demo(directory, console, prompts=prompts, prompt_tokens=prompt_tokens)
    except KvtierError as error:
        console.print(str(error), markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(1) from error
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    show(outcome, console)
    if json_file is not None:
        figures = asdict(outcome) | {"passed": outcome.passed}
        json_file.write_text(json.dumps(figures, indent=2) + "\n")
    if not outcome.passed:
        raise typer.Exit(1)


def main() -> None:
    """Run the command line."""
    typer.run(demo)


if __name__ == "__main__":
    main()
