"""``python -m tests.bench.connector``: what a hit saves, and what kvtier costs without one.

Real vLLM engines on the CPU with the demo model, each in a process of its own.

*First token*: one request at a time, of 2,048 tokens. Without kvtier it is computed;
with it, from RAM in the engine that stored it and from NVMe in the next one. A prompt's last
block is always computed. The page cache is cold as far as direct I/O makes it so.

*Calls*: the Python time of all calls of the connector in a step in which 64 requests
generate, with kvtier and with a connector that does nothing (calls.py).

*Steps*: waves of requests that hit nothing, through an engine whose connector is taken out for
every other wave: what a wave takes with it is compared with the wave next to it, in the same
engine, without. Two engines do so in turn, one with kvtier and one whose connector does
nothing. A step is what vLLM's engine core does between two rounds of its loop: schedule,
compute, update. The tiers are full, so storing means evicting. What an engine has besides its
connector's calls, such as threads and other memory, is in both waves of a pair: so the first
engine with its connector is also compared with the second without, which is an engine without
kvtier. Engines that are started alike differ by more than kvtier costs, so each is started
several times, and that figure is one of starts.
The forward pass leaves one processor to whatever else there is, as vLLM's workers on a CPU do
(vllm.utils.ompmultiprocessing). The demo's engine has no workers and would take them all, and
then each thread that wakes up delays all that compute. ``--compute-threads`` chooses.
The demo's model takes a few milliseconds for a step, most of them vLLM's Python; a larger one,
whose steps take as long as those of a model in use, shows what a user would see. A shared
machine gets slower and faster by several per cent from minute to minute, so one per cent takes
many short waves. The interval beside a ratio is where the median of ever more of them would be,
19 times out of 20.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple, TypeVar

import yaml
from rich.console import Console
from rich.table import Table

from kvtier.config import VllmEntryPoint
from tests.demo.model import (
    BLOCK_TOKENS,
    TINY,
    VOCABULARY,
    ModelShape,
    write_model,
)
from tests.demo.runner import EngineProcess, command, run_engine
from tests.demo.scenario import (
    Prompt,
    Report,
    Scenario,
    StepTimes,
    Wave,
    WaveReport,
    store_yaml,
)

T = TypeVar("T")

PROMPT_TOKENS = 2048
WARM_UP = 2
NVME_BAR, RAM_BAR, STEP_BAR = 0.25, 0.20, 1.01
PATHS = ("staged", "direct")
WAVE_PROMPTS = 8
STEPS_TIMEOUT_S = 3600.0
IDLE = {
    "kv_connector": "IdleConnector",
    "kv_connector_module_path": "tests.bench.connector.idle",
    "kv_role": "kv_both",
}
PAIRS_PER_START = 24
WAVES_IN_RAM = 8
CALL_STEPS = 400
CALLS_AIM_MS = 0.04
REQUESTS = 64


class StepModel(NamedTuple):
    """A model whose steps are measured, and the requests of a wave of them.

    Generating fills a block of each request once, so a wave stores in its prefill and later.
    """

    shape: ModelShape
    prompt_tokens: int
    generated_tokens: int


LARGE = ModelShape(hidden=1024, layers=8, heads=16, kv_heads=4, inner=2816)
"""94 million parameters, 376 MB that every step reads."""
MODELS = {"tiny": StepModel(TINY, 200, 48), "large": StepModel(LARGE, 24, 16)}


class Figure(NamedTuple):
    """One measurement against its bar.

    Attributes:
        what: What was measured.
        median_ms: Its median.
        least_ms: The least.
        most_ms: The most.
        ratio: To what it is compared with.
        half: Between which the middle half of the pairs' ratios are.
        interval: Between which their median would be with ever more pairs, at 95 %.
        bar: The most that the ratio may be.
    """

    what: str
    median_ms: float
    least_ms: float
    most_ms: float
    ratio: float | None = None
    half: tuple[float, float] | None = None
    interval: tuple[float, float] | None = None
    bar: float | None = None


Value = Callable[[T], float]
"""What is measured of a wave, or of several, in seconds."""
Pair = tuple[WaveReport, WaveReport]
"""A wave without the connector and one with it."""


class Start(NamedTuple):
    """What one start of two engines gave.

    Attributes:
        cached: Pairs of the engine with kvtier.
        idle: Pairs of the engine whose connector does nothing.
    """

    cached: Sequence[Pair]
    idle: Sequence[Pair]

    def between_engines(self) -> tuple[Sequence[float], Sequence[float]]:
        """Return medians of steps without any connector, and with kvtier in another engine."""
        plain = [median_step_s(wave) for wave, _ in self.idle]
        return plain, [median_step_s(wave) for _, wave in self.cached]


class Bench:
    """Engines that share a model and a directory.

    Args:
        directory: Where model, stores and logs go.
        rounds: Prompts per figure, and starts of the engines whose steps are timed.
        compute_threads: Of a forward pass whose steps are timed.
    """

    def __init__(self, directory: Path, rounds: int, compute_threads: int) -> None:
        self._directory = directory
        self._rounds = rounds
        self._compute_threads = compute_threads
        self._draw = random.Random(11)
        self._console = Console(stderr=True, highlight=False)
        self.use_model("tiny")

    def use_model(self, name: str) -> None:
        """Use one of the models from now on."""
        self._steps = MODELS[name]
        self._model = self._directory / name
        write_model(self._model, shape=self._steps.shape)

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

    def calls(self) -> Iterator[Figure]:
        """Yield the time of the connector's calls in a step in which 64 requests generate."""
        times: dict[str, list[float]] = {"kvtier": [], "idle": []}
        wave = Wave(
            prompts=tuple(self._prompt(48) for _ in range(REQUESTS)), max_tokens=CALL_STEPS
        )
        for _ in range(self._rounds):
            with_kvtier = self._scenario((wave,), self._write_config(1024, {})).model_copy(
                update={"gpu_blocks": 2048, "compute_threads": self._compute_threads}
            )
            with_kvtier.arguments["max_num_seqs"] = REQUESTS
            with_idle = with_kvtier.model_copy(update={"config": None, "connector": IDLE})
            for name, scenario in (("kvtier", with_kvtier), ("idle", with_idle)):
                times[name].append(statistics.median(self._call_times_us(scenario)) / 1e3)
        what = f"calls in a step, {REQUESTS} requests generate"
        own = [kvtier - idle for kvtier, idle in zip(*times.values(), strict=True)]
        yield figure(f"{what}, kvtier", times["kvtier"])
        yield figure(f"{what}, connector that does nothing", times["idle"])
        yield figure(f"{what}, difference, against {CALLS_AIM_MS} ms", own, CALLS_AIM_MS, 1.0)

    def _call_times_us(self, scenario: Scenario) -> list[float]:
        """Run an engine whose connector's calls are timed, in a process of its own."""
        file = self._directory / "calls.json"
        file.write_text(scenario.model_dump_json())
        *interpreter, _ = command(scenario)
        done = subprocess.run(
            [*interpreter, "tests.bench.connector.calls", str(file)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=STEPS_TIMEOUT_S,
            check=True,
        )
        times: list[float] = json.loads(done.stdout)
        return times

    def steps(self, path: str) -> Iterator[Figure]:
        """Yield what steps that hit nothing take, with kvtier against without."""
        starts: list[Start] = []
        for number in range(1, self._rounds + 1):
            starts.append(self._start_for_steps(self._step_config(path)))
            for name, pairs in zip(("kvtier", "idle"), starts[-1], strict=True):
                so_far = paired("", pairs, median_step_s)
                self._console.print(f"start {number}, {name}: {so_far.ratio:.3f}")
        cached = [pair for start in starts for pair in start.cached]
        idle = [pair for start in starts for pair in start.idle]
        yield paired("step, median", cached, median_step_s, STEP_BAR)
        yield paired("step, median, connector that does nothing", idle, median_step_s)
        yield paired(
            "step, median, beside another engine, by starts",
            [start.between_engines() for start in starts],
            statistics.fmean,
        )
        yield paired("step, mean", cached, lambda wave: statistics.fmean(steps_s(wave)))
        yield paired(
            "prefill step, mean", cached, lambda wave: statistics.fmean(timed(wave).prefill_s)
        )
        yield paired(
            "decode step, median", cached, lambda wave: statistics.median(timed(wave).decode_s)
        )
        yield paired(
            "decode step, mean", cached, lambda wave: statistics.fmean(timed(wave).decode_s)
        )
        yield paired("whole wave", cached, lambda wave: wave.seconds)
        yield paired(
            "processor time per step, engine",
            cached,
            lambda wave: timed(wave).engine_cpu_s / len(steps_s(wave)),
        )
        hosts_ms = [timed(wave).hosts_cpu_s / len(steps_s(wave)) * 1e3 for _, wave in cached]
        # The kernel counts it in hundredths of a second, so only the mean says something.
        yield figure("processor time per step, tier host, mean", [statistics.fmean(hosts_ms)])

    def _start_for_steps(self, config: Path) -> Start:
        """Start an engine with kvtier and one whose connector does nothing, and run waves."""
        before = [self._wave() for _ in range(WAVES_IN_RAM + WARM_UP)]
        measured = [
            # Whether the first of a pair or the second is without changes every time.
            self._wave().model_copy(update={"detached": (number + 1) // 2 % 2 == 0})
            for number in range(2 * PAIRS_PER_START)
        ]
        waves = (*before, *measured)
        with_kvtier = self._scenario(waves, config, timed=True).model_copy(
            update={"compute_threads": self._compute_threads}
        )
        with_idle = with_kvtier.model_copy(update={"config": None, "connector": IDLE})
        idled, cached = self._alternate({"idle": with_idle, "cached": with_kvtier}, in_a_turn=2)
        if cached.count("kvtier_hit_tokens"):
            raise SystemExit("prompts that should have been new were hits")
        reports = (report.waves[len(before) :] for report in (cached, idled))
        return Start(*(without_and_with(measured, waves) for waves in reports))

    def _alternate(
        self, scenarios: Mapping[str, Scenario], *, in_a_turn: int = 1
    ) -> list[Report]:
        """Run timed scenarios by turns; they have as many waves, and their order changes."""
        with ExitStack() as stack:
            engines = [
                stack.enter_context(
                    EngineProcess(scenario, self._directory, name, timeout_s=STEPS_TIMEOUT_S)
                )
                for name, scenario in scenarios.items()
            ]
            for engine in engines:
                engine.wait_for("ready")
            turns = len(next(iter(scenarios.values())).waves) // in_a_turn
            for number in range(turns):
                for engine in engines if number % 2 else reversed(engines):
                    for _ in range(in_a_turn):
                        engine.go()
                        engine.wait_for("wave")
            reports = [engine.result() for engine in engines]
        if any(report.tokens() != reports[0].tokens() for report in reports):
            raise SystemExit("the engines did not generate the same tokens")
        return reports

    def _prompt(self, tokens: int) -> Prompt:
        return Prompt(tokens=tuple(self._draw.randrange(2, VOCABULARY) for _ in range(tokens)))

    def _wave(self) -> Wave:
        prompts = tuple(self._prompt(self._steps.prompt_tokens) for _ in range(WAVE_PROMPTS))
        return Wave(prompts=prompts, max_tokens=self._steps.generated_tokens)

    def _config(self, path: str) -> Path:
        """Write a configuration whose tiers hold everything, over an empty store."""
        blocks = 2 * (self._rounds + WARM_UP) * PROMPT_TOKENS // BLOCK_TOKENS
        return self._write_config(blocks, {"load_path": path})

    def _step_config(self, path: str) -> Path:
        """Write a configuration whose tiers are full before anything is measured."""
        blocks = (self._steps.prompt_tokens + self._steps.generated_tokens) // BLOCK_TOKENS
        blocks *= WAVES_IN_RAM * WAVE_PROMPTS
        return self._write_config(blocks, {"load_path": path})

    def _write_config(self, blocks: int, transfer: Mapping[str, str]) -> Path:
        file = self._directory / f"{self._draw.getrandbits(32):08x}.yaml"
        store_yaml(
            file,
            store=file.with_suffix(""),
            ram_nbytes=blocks * self._steps.shape.kv_nbytes_per_block,
            nvme_nbytes=blocks * self._steps.shape.kv_nbytes_per_block,
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
            entry_point=VllmEntryPoint.CONNECTOR,
            gpu_blocks=140,
            timed=timed,
        )

    def _run(self, waves: tuple[Wave, ...], name: str, config: Path | None = None) -> Report:
        return run_engine(self._scenario(waves, config), self._directory, name)


def first_tokens_ms(report: Report, count: int) -> list[float]:
    """Return the last ``count`` times to first token, those of the warm-up left out."""
    times = [answer.first_token_s * 1e3 for answer in report.answers()[-count:]]
    return times[WARM_UP:]


def first_token_s(wave: WaveReport) -> float:
    (answer,) = wave.answers
    return answer.first_token_s


def timed(wave: WaveReport) -> StepTimes:
    if wave.steps is None:
        raise SystemExit("the engine did not time its steps")
    return wave.steps


def steps_s(wave: WaveReport) -> Sequence[float]:
    return (*timed(wave).prefill_s, *timed(wave).decode_s)


def median_step_s(wave: WaveReport) -> float:
    return statistics.median(steps_s(wave))


def without_and_with(waves: Sequence[Wave], reports: Sequence[WaveReport]) -> list[Pair]:
    """Return what came of waves, two next to each other in a pair, that without first."""
    pairs = []
    for number in range(0, len(waves), 2):
        first, second = reports[number : number + 2]
        pairs.append((first, second) if waves[number].detached else (second, first))
    return pairs


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
    return Figure(what, middle, min(times_ms), max(times_ms), ratio, bar=bar)


def paired(
    what: str, pairs: Sequence[tuple[T, T]], value: Value[T], bar: float | None = None
) -> Figure:
    """Return what the second ones take, and the median of their ratios to the first ones."""
    with_ms = [value(second) * 1e3 for _, second in pairs]
    ratios = [value(second) / value(first) for first, second in pairs]
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return figure(what, with_ms)._replace(
        ratio=middle, half=(low, high), interval=median_interval(ratios), bar=bar
    )


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return an interval that holds the median of what ``values`` are drawn from, at 95 %.

    Whatever their distribution: how many of them are below that median is binomial, so it lies
    between the k-th least and the k-th greatest unless fewer than k are on one side (Conover,
    Practical Nonparametric Statistics, 3.2).
    """
    ordered, count = sorted(values), len(values)
    below, left_out = 0.0, 0
    while (below := below + math.comb(count, left_out) / 2**count) <= 0.025:
        left_out += 1
    return ordered[max(left_out - 1, 0)], ordered[count - max(left_out, 1)]


def main() -> None:
    """Run what is asked for and print it against the bars."""
    parser = argparse.ArgumentParser(prog="nox -s bench -- connector", description=__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="prompts, or starts")
    parser.add_argument("--only", choices=["first", "calls", "steps"], help="one bench")
    parser.add_argument("--model", choices=MODELS, help="steps of one of the two models")
    parser.add_argument("--path", choices=PATHS, help="one of the two load paths")
    parser.add_argument(
        "--compute-threads",
        type=int,
        default=max(1, len(os.sched_getaffinity(0)) - 1),
        help="threads of a forward pass whose steps are timed; all processors but one",
    )
    parser.add_argument("--dir", type=Path, help="a directory on the disk to measure")
    arguments = parser.parse_args()
    if arguments.rounds < 2:
        parser.error("--rounds: a spread needs 2 or more")
    if arguments.compute_threads < 1:
        parser.error("--compute-threads: a forward pass needs 1 or more")
    paths = [arguments.path] if arguments.path else [*PATHS]
    times, ratios = ("median ms", "least", "most"), ("ratio", "middle half", "95 %")
    table = Table("figure", *times, *ratios, "bar", "met", box=None)
    with tempfile.TemporaryDirectory(prefix="kvtier-bench-", dir=arguments.dir) as scratch:
        bench = Bench(Path(scratch), arguments.rounds, arguments.compute_threads)
        figures: list[Figure] = []
        if arguments.only in (None, "first"):
            figures += bench.first_tokens(paths)
        if arguments.only in (None, "calls"):
            figures += bench.calls()
        if arguments.only in (None, "steps"):
            for name in [arguments.model] if arguments.model else MODELS:
                bench.use_model(name)
                figures += (
                    each._replace(what=f"{name} model: {each.what}")
                    for each in bench.steps(paths[-1])
                )
    for each in figures:
        met = "" if each.bar is None else "yes" if (each.ratio or 0) <= each.bar else "no"
        table.add_row(
            each.what,
            *(f"{ms:.4g}" for ms in (each.median_ms, each.least_ms, each.most_ms)),
            "" if each.ratio is None else f"{each.ratio:.3f}",
            *(
                "" if span is None else "{:.3f}..{:.3f}".format(*span)
                for span in (each.half, each.interval)
            ),
            "" if each.bar is None else f"{each.bar:g}",
            met,
        )
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
