"""``python -m tests.bench.connector``: what a hit saves, and what kvtier costs without one.

Real vLLM engines on the CPU with the demo model, each in a process of its own.

*First token*: one request at a time, of 2,048 tokens. Without kvtier it is computed;
with it, from RAM in the engine that stored it and from NVMe in the next one. A prompt's last
block is always computed. The page cache is cold as far as direct I/O makes it so.

*Layers*: prompts of 2,048 tokens are asked for again with more behind them, and loaded from RAM
ahead of the forward pass or within it, in pairs of engines that run one after the other.

*Steps*: waves of requests that hit nothing, through two engines that are up at the same time,
one with kvtier and one without. They take turns, so that what else the machine does falls on
both. A step is what vLLM's engine core does between two rounds of its loop: schedule, compute,
update. The tiers are full, so storing means evicting.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import yaml
from rich.console import Console
from rich.table import Table

from kvtier.config import Door
from kvtier.vllm.demo.model import BLOCK_TOKENS, KV_NBYTES_PER_BLOCK, VOCABULARY, write_model
from kvtier.vllm.demo.runner import EngineProcess, run_engine
from kvtier.vllm.demo.scenario import (
    Prompt,
    Report,
    Scenario,
    StepTimes,
    Wave,
    WaveReport,
    store_yaml,
)

PROMPT_TOKENS = 2048
WARM_UP = 2
PROMPTS = 8
NVME_BAR, RAM_BAR, STEP_BAR = 0.25, 0.20, 1.01
PATHS = ("staged", "direct")
WAVE_PROMPTS, WAVE_PROMPT_TOKENS, WAVE_TOKENS = 8, 200, 48
WAVES_PER_ROUND = 8
WAVES_IN_RAM = 8
MORE_TOKENS = (32, 512)
"""Tokens that are computed behind those that are loaded; they make the forward pass longer."""


class Figure(NamedTuple):
    """One measurement against its bar."""

    what: str
    median_ms: float
    least_ms: float
    most_ms: float
    ratio: float | None
    bar: float | None


Value = Callable[[WaveReport], float]
"""What is measured of a wave, in seconds."""


class Bench:
    """Engines that share a model and a directory.

    Args:
        directory: Where model, stores and logs go.
        rounds: Prompts per figure, and eighths of the pairs of waves.
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
        """Yield what steps that hit nothing take, with kvtier against without."""
        waves = tuple(
            self._wave() for _ in range(WAVES_IN_RAM + WARM_UP + WAVES_PER_ROUND * self._rounds)
        )
        plain, cached = self._take_turns(waves, self._step_config(path))
        pairs = list(zip(plain.waves, cached.waves, strict=True))[WAVES_IN_RAM + WARM_UP :]
        yield paired(
            "step, median", pairs, lambda wave: statistics.median(steps_s(wave)), STEP_BAR
        )
        yield paired("step, mean", pairs, lambda wave: statistics.fmean(steps_s(wave)))
        yield paired(
            "prefill step, mean", pairs, lambda wave: statistics.fmean(timed(wave).prefill_s)
        )
        yield paired(
            "decode step, median", pairs, lambda wave: statistics.median(timed(wave).decode_s)
        )
        yield paired(
            "decode step, mean", pairs, lambda wave: statistics.fmean(timed(wave).decode_s)
        )
        yield paired("whole wave", pairs, lambda wave: wave.seconds)
        yield paired(
            "processor time per step, engine",
            pairs,
            lambda wave: timed(wave).engine_cpu_s / len(steps_s(wave)),
        )
        hosts_ms = [timed(wave).hosts_cpu_s / len(steps_s(wave)) * 1e3 for _, wave in pairs]
        # The kernel counts it in hundredths of a second, so only the mean says something.
        yield figure("processor time per step, tier host, mean", [statistics.fmean(hosts_ms)])

    def _take_turns(self, waves: tuple[Wave, ...], config: Path) -> tuple[Report, Report]:
        """Run ``waves`` without kvtier and with it; who goes first changes every time."""
        with ExitStack() as stack:
            engines = [
                stack.enter_context(EngineProcess(scenario, self._directory, name))
                for name, scenario in (
                    ("plain", self._scenario(waves, None, timed=True)),
                    ("cached", self._scenario(waves, config, timed=True)),
                )
            ]
            for engine in engines:
                engine.wait_for("ready")
            for number in range(len(waves)):
                for engine in engines if number % 2 else reversed(engines):
                    engine.go()
                    engine.wait_for("wave")
            plain, cached = (engine.result() for engine in engines)
        if plain.tokens() != cached.tokens():
            raise SystemExit("the two engines did not generate the same tokens")
        if cached.count("kvtier_hit_tokens"):
            raise SystemExit("prompts that should have been new were hits")
        return plain, cached

    def _prompt(self, tokens: int) -> Prompt:
        return Prompt(tokens=tuple(self._draw.randrange(2, VOCABULARY) for _ in range(tokens)))

    def _wave(self) -> Wave:
        prompts = tuple(self._prompt(WAVE_PROMPT_TOKENS) for _ in range(WAVE_PROMPTS))
        return Wave(prompts=prompts, max_tokens=WAVE_TOKENS)

    def _config(self, path: str, load_mode: str = "ahead") -> Path:
        """Write a configuration whose tiers hold everything, over an empty store."""
        blocks = 2 * (max(self._rounds, PROMPTS) + WARM_UP) * PROMPT_TOKENS // BLOCK_TOKENS
        return self._write_config(blocks, {"load_path": path, "load_mode": load_mode})

    def _step_config(self, path: str) -> Path:
        """Write a configuration whose tiers are full before anything is measured."""
        tokens = WAVE_PROMPTS * (WAVE_PROMPT_TOKENS + WAVE_TOKENS)
        blocks = WAVES_IN_RAM * tokens // BLOCK_TOKENS
        return self._write_config(blocks, {"load_path": path})

    def _write_config(self, blocks: int, transfer: Mapping[str, str]) -> Path:
        file = self._directory / f"{self._draw.getrandbits(32):08x}.yaml"
        store_yaml(
            file,
            store=file.with_suffix(""),
            ram_nbytes=blocks * KV_NBYTES_PER_BLOCK,
            nvme_nbytes=blocks * KV_NBYTES_PER_BLOCK,
        )
        settings = yaml.safe_load(file.read_text())
        settings["transfer"] = dict(transfer)
        file.write_text(yaml.safe_dump(settings))
        return file

    def _scenario(
        self, waves: tuple[Wave, ...], config: Path | None, *, timed: bool = False
    ) -> Scenario:
        return Scenario(
            model=self._model,
            config=config,
            waves=waves,
            door=Door.CONNECTOR,
            gpu_blocks=140,
            timed=timed,
        )

    def _run(self, waves: tuple[Wave, ...], name: str, config: Path | None = None) -> Report:
        return run_engine(self._scenario(waves, config), self._directory, name)


def first_tokens_ms(report: Report, count: int) -> list[float]:
    """Return the last ``count`` times to first token, those of the warm-up left out."""
    times = [answer.first_token_s * 1e3 for answer in report.answers()[-count:]]
    return times[WARM_UP:]


def timed(wave: WaveReport) -> StepTimes:
    if wave.steps is None:
        raise SystemExit("the engine did not time its steps")
    return wave.steps


def steps_s(wave: WaveReport) -> Sequence[float]:
    return (*timed(wave).prefill_s, *timed(wave).decode_s)


def require_hits(report: Report, tier: str) -> None:
    """Make sure that what is timed was loaded: the whole prompt but its last block or so."""
    least = len(report.waves) * (PROMPT_TOKENS - 2 * BLOCK_TOKENS)
    found = report.count("kvtier_hit_tokens", tier=tier)
    if found < least:
        raise SystemExit(f"only {found:.0f} of {least} tokens came from {tier}")


def figure(
    what: str, times_ms: Sequence[float], base: float | None = None, bar: float | None = None
) -> Figure:
    middle = statistics.median(times_ms)
    ratio = None if base is None else middle / base
    return Figure(what, middle, min(times_ms), max(times_ms), ratio, bar)


def paired(
    what: str,
    pairs: Sequence[tuple[WaveReport, WaveReport]],
    value: Value,
    bar: float | None = None,
) -> Figure:
    """Return what waves with kvtier take, and the median of their ratios to those without."""
    with_ms = [value(cached) * 1e3 for _, cached in pairs]
    ratios = [value(cached) / value(plain) for plain, cached in pairs]
    return figure(what, with_ms)._replace(ratio=statistics.median(ratios), bar=bar)


def main() -> None:
    """Run what is asked for and print it against the bars."""
    parser = argparse.ArgumentParser(prog="nox -s bench -- connector", description=__doc__)
    parser.add_argument(
        "--rounds", type=int, default=7, help="prompts; eight pairs of waves each"
    )
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
        met = "" if each.bar is None else "yes" if (each.ratio or 0) <= each.bar else "no"
        table.add_row(
            each.what,
            *(f"{ms:.2f}" for ms in (each.median_ms, each.least_ms, each.most_ms)),
            "" if each.ratio is None else f"{each.ratio:.3f}",
            "" if each.bar is None else f"{each.bar:g}",
            met,
        )
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
