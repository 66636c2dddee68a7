"""``python -m tests.bench.connector``: what a hit saves, and what kvtier costs without one.

Real vLLM engines on the CPU with the demo model, each in a process of its own.

*First token*: one request at a time, of 2,048 tokens. Without kvtier it is computed;
with it, from RAM in the engine that stored it and from NVMe in the next one. A prompt's last
block is always computed. The page cache is cold as far as direct I/O makes it so.

*Layers*: prompts of 2,048 tokens are asked for again with more behind them, and loaded from RAM
ahead of the forward pass or within it, in pairs of engines that run one after the other.

*Steps*: waves of requests that hit nothing, with kvtier and without, in pairs of engines that
run one after the other; a pair's figure is the ratio of the medians of its waves.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import yaml
from rich.console import Console
from rich.table import Table

from kvtier.config import Door
from kvtier.vllm.demo.model import BLOCK_TOKENS, KV_NBYTES_PER_BLOCK, VOCABULARY, write_model
from kvtier.vllm.demo.runner import run_engine
from kvtier.vllm.demo.scenario import Prompt, Report, Scenario, Wave, store_yaml

PROMPT_TOKENS = 2048
WARM_UP = 2
PROMPTS = 8
NVME_BAR, RAM_BAR, STEP_BAR = 0.25, 0.20, 1.01
PATHS = ("staged", "direct")
MORE_TOKENS = (32, 512)
"""Tokens that are computed behind those that are loaded; they make the forward pass longer."""


class Figure(NamedTuple):
    """One measurement against its bar."""

    what: str
    median_ms: float
    least_ms: float
    most_ms: float
    ratio: float
    bar: float | None


class Bench:
    """Engines that share a model and a directory.

    Args:
        directory: Where model, stores and logs go.
        rounds: Prompts per figure, and pairs of engines.
    """

    def __init__(self, directory: Path, rounds: int) -> None:
        self._directory = directory
        self._rounds = rounds
        self._draw = random.Random(11)
        self._model = directory / "model"
        write_model(self._model)

    def first_tokens(self, paths: Sequence[str]) -> Iterator[Figure]:
        """Yield the time to first token: computed, from RAM, from NVMe after a restart."""
        prompts = [self._prompt(PROMPT_TOKENS) for _ in range(self._rounds + WARM_UP)]
        waves = tuple(Wave(prompts=(prompt,), max_tokens=1) for prompt in prompts)
        computed = first_tokens_ms(self._run(waves, "computed"), len(waves))
        base = statistics.median(computed)
        yield figure("computed", computed, base, None)
        for path in paths:
            config = self._config(path)
            stored = self._run((*waves, *waves), f"{path}-ram", config)
            yield figure(f"{path}, RAM", first_tokens_ms(stored, len(waves)), base, RAM_BAR)
            loaded = self._run(waves, f"{path}-nvme", config)
            require_hits(loaded, "nvme")
            times = first_tokens_ms(loaded, len(waves))
            yield figure(f"{path}, NVMe after a restart", times, base, NVME_BAR)

    def layers(self) -> Iterator[Figure]:
        """Yield the time to first token with hits in RAM: ahead, and layer by layer."""
        times: dict[tuple[int, str], list[list[float]]] = defaultdict(list)
        for number in range(self._rounds):
            for mode in ("ahead", "layerwise"):
                for more, found in self._follow_ups(mode, f"{mode}-{number}").items():
                    times[more, mode].append(found)
        for more in MORE_TOKENS:
            base = [statistics.median(found) for found in times[more, "ahead"]]
            for mode in ("ahead", "layerwise"):
                found = [statistics.median(each) for each in times[more, mode]]
                ratios = [here / there for here, there in zip(found, base, strict=True)]
                yield Figure(
                    f"RAM and {more} more tokens, {mode}, of {len(ratios)} pairs",
                    statistics.median(found),
                    min(found),
                    max(found),
                    statistics.median(ratios),
                    None,
                )

    def _follow_ups(self, mode: str, name: str) -> dict[int, list[float]]:
        """Return times to first token by the tokens that are computed behind a hit."""
        prompts = [self._prompt(PROMPT_TOKENS) for _ in range(PROMPTS + WARM_UP)]
        again = {
            more: [
                Prompt(tokens=prompt.tokens + self._prompt(more).tokens) for prompt in prompts
            ]
            for more in MORE_TOKENS
        }
        waves = tuple(
            Wave(prompts=(prompt,), max_tokens=1)
            for prompt in itertools.chain(prompts, *again.values())
        )
        report = self._run(waves, name, self._config("direct", load_mode=mode))
        served = Report(waves=report.waves[len(prompts) :])
        require_hits(served, "ram")
        times = [answer.first_token_s * 1e3 for answer in served.answers()]
        each = len(prompts)
        return {
            more: times[at * each + WARM_UP : (at + 1) * each]
            for at, more in enumerate(MORE_TOKENS)
        }

    def steps(self, path: str) -> Iterator[Figure]:
        """Yield the time of waves that hit nothing, with kvtier against without."""
        ratios = []
        with_ms: list[float] = []
        for number in range(self._rounds):
            waves = tuple(self._wave() for _ in range(8))
            plain = waves_ms(self._run(waves, f"plain-{number}"))
            cached = waves_ms(self._run(waves, f"cached-{number}", self._config(path)))
            ratios.append(statistics.median(cached) / statistics.median(plain))
            with_ms += cached
        yield Figure(
            f"waves without hits, {path}, of {len(ratios)} pairs",
            statistics.median(with_ms),
            min(with_ms),
            max(with_ms),
            statistics.median(ratios),
            STEP_BAR,
        )

    def _prompt(self, tokens: int) -> Prompt:
        return Prompt(tokens=tuple(self._draw.randrange(2, VOCABULARY) for _ in range(tokens)))

    def _wave(self) -> Wave:
        return Wave(prompts=tuple(self._prompt(200) for _ in range(8)), max_tokens=48)

    def _config(self, path: str, load_mode: str = "ahead") -> Path:
        """Write a configuration whose tiers hold everything, over an empty store."""
        file = self._directory / f"{path}-{self._draw.getrandbits(32):08x}.yaml"
        blocks = 2 * (max(self._rounds, PROMPTS) + WARM_UP) * PROMPT_TOKENS // BLOCK_TOKENS
        store_yaml(
            file,
            store=file.with_suffix(""),
            ram_nbytes=blocks * KV_NBYTES_PER_BLOCK,
            nvme_nbytes=blocks * KV_NBYTES_PER_BLOCK,
        )
        settings = yaml.safe_load(file.read_text())
        settings["transfer"] = {"load_path": path, "load_mode": load_mode}
        file.write_text(yaml.safe_dump(settings))
        return file

    def _run(self, waves: tuple[Wave, ...], name: str, config: Path | None = None) -> Report:
        scenario = Scenario(
            model=self._model, config=config, waves=waves, door=Door.CONNECTOR, gpu_blocks=140
        )
        return run_engine(scenario, self._directory, name)


def first_tokens_ms(report: Report, count: int) -> list[float]:
    """Return the last ``count`` times to first token, those of the warm-up left out."""
    times = [answer.first_token_s * 1e3 for answer in report.answers()[-count:]]
    return times[WARM_UP:]


def waves_ms(report: Report) -> list[float]:
    return [wave.seconds * 1e3 for wave in report.waves[WARM_UP:]]


def require_hits(report: Report, tier: str) -> None:
    """Make sure that what is timed was loaded: the whole prompt but its last block or so."""
    least = len(report.waves) * (PROMPT_TOKENS - 2 * BLOCK_TOKENS)
    found = report.count("kvtier_hit_tokens", tier=tier)
    if found < least:
        raise SystemExit(f"only {found:.0f} of {least} tokens came from {tier}")


def figure(what: str, times: Sequence[float], base: float, bar: float | None) -> Figure:
    middle = statistics.median(times)
    return Figure(what, middle, min(times), max(times), middle / base, bar)


def main() -> None:
    """Run what is asked for and print it against the bars."""
    parser = argparse.ArgumentParser(prog="nox -s bench -- connector", description=__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="prompts, and pairs of engines")
    parser.add_argument("--only", choices=["first", "layers", "steps"], help="one bench")
    parser.add_argument("--path", choices=PATHS, help="one of the two load paths")
    parser.add_argument("--dir", type=Path, help="a directory on the disk to measure")
    arguments = parser.parse_args()
    paths = [arguments.path] if arguments.path else [*PATHS]
    table = Table("figure", "median ms", "least", "most", "ratio", "bar", "met", box=None)
    with tempfile.TemporaryDirectory(prefix="kvtier-bench-", dir=arguments.dir) as scratch:
        bench = Bench(Path(scratch), arguments.rounds)
        figures: list[Figure] = []
        if arguments.only in (None, "first"):
            figures += bench.first_tokens(paths)
        if arguments.only in (None, "layers"):
            figures += bench.layers()
        if arguments.only in (None, "steps"):
            figures += bench.steps(paths[-1])
    for each in figures:
        met = "" if each.bar is None else "yes" if each.ratio <= each.bar else "no"
        table.add_row(
            each.what,
            *(f"{ms:.1f}" for ms in (each.median_ms, each.least_ms, each.most_ms)),
            f"{each.ratio:.3f}",
            "" if each.bar is None else f"{each.bar:g}",
            met,
        )
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
