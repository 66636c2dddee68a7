"""Run one vLLM engine through a scenario: ``python -m tests.demo.engine IN OUT``.

Standard output carries one word per event, for the parent; everything else, vLLM's log and that
of its workers included, goes to standard error.
"""

from __future__ import annotations

import itertools
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import prometheus_client
import torch
from PIL import Image
from vllm import LLM, SamplingParams
from vllm.config import KVEventsConfig, KVTransferConfig
from vllm.lora.request import LoRARequest

from kvtier.config import load_config, vllm_transfer_config
from kvtier.connector import storage
from kvtier.connector.metrics import METRICS, Kind
from kvtier.transfer.channel import EngineLimits
from tests.demo.connection import Connection
from tests.demo.model import BLOCK_TOKENS
from tests.demo.scenario import Answer, Prompt, Report, Scenario, Wave, WaveReport
from tests.demo.timing import StepTimer

__all__ = ["growth", "main"]

logger = logging.getLogger(__name__)

IDLE_S = 0.001
DRAIN_S = 30.0
GAUGES = tuple(f"{name}{{" for name, metric in METRICS.items() if metric.kind is Kind.GAUGE)
WATCHED = ("kvtier_", "vllm:num_preemptions", "vllm:spec_decode_num")
IRRELEVANT_LABELS = {"engine", "model_name"}


def open_engine(scenario: Scenario) -> LLM:
    """Start the engine that ``scenario`` describes."""
    arguments: dict[str, Any] = {
        "model": str(scenario.model),
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "dtype": "float32",
        "block_size": BLOCK_TOKENS,
        "max_model_len": scenario.context_tokens,
        "max_num_batched_tokens": scenario.step_tokens,
        "num_gpu_blocks_override": scenario.gpu_blocks,
        "enable_prefix_caching": True,
        "disable_log_stats": False,
        "seed": 0,
        "kv_transfer_config": connector(scenario),
        "kv_events_config": publisher(scenario),
    }
    return LLM(**arguments | workers(scenario.ranks) | scenario.arguments)


def workers(ranks: int) -> dict[str, Any]:
    """Return the engine arguments that ask for ``ranks`` workers."""
    if ranks == 1:
        return {}
    return {"tensor_parallel_size": ranks, "distributed_executor_backend": "mp"}


def connector(scenario: Scenario) -> KVTransferConfig | None:
    """Return vLLM's argument for kvtier, or for the connector to compare with."""
    if scenario.connector is not None:
        return KVTransferConfig(**scenario.connector)
    if scenario.config is None:
        return None
    settings = load_config(scenario.config)
    arguments = vllm_transfer_config(
        scenario.config, settings, entry_point=scenario.entry_point
    )
    if "kv_load_failure_policy" in arguments:
        arguments["kv_load_failure_policy"] = scenario.load_failures
    return KVTransferConfig(**arguments)


def publisher(scenario: Scenario) -> KVEventsConfig | None:
    """Return where vLLM publishes what is cached."""
    if scenario.events is None:
        return None
    return KVEventsConfig(
        enable_kv_cache_events=True, publisher="zmq", endpoint=scenario.events
    )


class Driver:
    """Sends waves to an engine and collects what it answers.

    Args:
        llm: The engine, its core in this process.
        timed: Whether to report what steps take.
    """

    def __init__(self, llm: LLM, *, timed: bool) -> None:
        self._engine = llm.llm_engine
        self._llm = llm
        core = self._engine.engine_core.engine_core
        self._scheduler = core.scheduler
        self._connection = Connection(core.scheduler)
        self._timer = StepTimer(core) if timed else None
        self._ids = itertools.count()
        self._answers: list[Answer] = []
        self._counters = dict(read_counters())

    def run(self, wave: Wave) -> WaveReport:
        """Run ``wave`` to its end, the background work it caused included."""
        self._prepare(wave)
        if self._timer is not None:
            self._timer.begin()
        started_s = time.monotonic()
        prompts = [self._literal(prompt) for prompt in wave.prompts]
        names = [
            self._send(tokens, wave.max_tokens, prompt)
            for tokens, prompt in zip(prompts, wave.prompts, strict=True)
        ]
        outputs: dict[str, Any] = {}
        before_reset: frozenset[str] | None = None
        for step in itertools.count(1):
            outputs.update(self._step())
            if step == wave.abort_after_steps and wave.abort:
                self._engine.abort_request([names[number] for number in wave.abort])
            if step == wave.reset_after_steps:
                self._reset_amid_traffic(wave, outputs)
                before_reset = frozenset(outputs)
            if not self._engine.has_unfinished_requests():
                break
        seconds = time.monotonic() - started_s
        if self._timer is not None:
            self._timer.answered()
        self._drain()
        answers = [
            answer_of(prompt, outputs.get(name)).model_copy(
                update={"after_reset": before_reset is not None and name not in before_reset}
            )
            for prompt, name in zip(prompts, names, strict=True)
        ]
        self._answers += answers
        return WaveReport(
            answers=tuple(answers),
            seconds=seconds,
            counters=self._growth(),
            steps=None if self._timer is None else self._timer.take(),
        )

    def _prepare(self, wave: Wave) -> None:
        self._connection.use(detached=wave.detached)
        if wave.reset_first and not self._llm.reset_prefix_cache(reset_connector=True):
            raise RuntimeError("the engine refused to reset its prefix cache")
        if wave.damage_every:
            self._engine.collective_rpc(damage_kv, args=(wave.damage_every,))
        for file, text in wave.files.items():
            file.write_text(text)

    def _reset_amid_traffic(self, wave: Wave, outputs: dict[str, Any]) -> None:
        """Forget everything cached, running requests' KV included, as soon as vLLM can.

        It cannot while a request's load is in flight. Then the connector alone is reset, so
        that no other load begins, and after a step or more vLLM can.
        """
        if wave.reweigh:
            self._engine.collective_rpc(reweigh)
        deadline_s = time.monotonic() + DRAIN_S
        while time.monotonic() < deadline_s:
            try:
                self._llm.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
            except RuntimeError as error:
                logger.info("not reset yet: %s", error)
                self._llm.reset_prefix_cache(reset_connector=True)
                outputs.update(self._step())
            else:
                return
        raise TimeoutError(f"no reset within {DRAIN_S} s")

    def _literal(self, prompt: Prompt) -> tuple[int, ...]:
        if prompt.after is None:
            return prompt.tokens
        before = self._answers[prompt.after]
        return before.prompt + before.tokens + prompt.tokens

    def _send(self, tokens: Sequence[int], max_tokens: int, prompt: Prompt) -> str:
        name = str(next(self._ids))
        usual: dict[str, Any] = {
            "temperature": 0,
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "detokenize": False,
            "extra_args": {"kv_transfer_params": dict(prompt.transfer_params)}
            if prompt.transfer_params
            else None,
        }
        parameters = SamplingParams(**usual | prompt.sampling)
        self._engine.add_request(
            name,
            request_of(tokens, prompt),
            parameters,
            lora_request=adapter_of(prompt),
            priority=prompt.priority,
        )
        return name

    def _step(self) -> dict[str, Any]:
        finished = {o.request_id: o for o in self._engine.step() if o.finished}
        if not self._scheduler.running:
            # As vLLM's own loop does: a request waits for kvtier, whose threads need the GIL.
            time.sleep(IDLE_S)
        return finished

    def _drain(self) -> None:
        """Step on until nothing is in flight, as a server's engine does when it is idle."""
        deadline_s = time.monotonic() + DRAIN_S
        while self._scheduler.has_requests():
            if time.monotonic() > deadline_s:
                raise TimeoutError(
                    f"the engine has work left after {DRAIN_S} s without requests"
                )
            self._step()

    def _growth(self) -> dict[str, float]:
        before, self._counters = self._counters, dict(read_counters())
        return growth(before, self._counters)


def request_of(tokens: Sequence[int], prompt: Prompt) -> dict[str, Any]:
    """Return a prompt in vLLM's words."""
    request: dict[str, Any] = {"prompt_token_ids": list(tokens)}
    if prompt.embeds is not None:
        request = {"prompt_embeds": torch.load(prompt.embeds)}
    if prompt.images:
        request["multi_modal_data"] = {"image": [image_of(file) for file in prompt.images]}
    if prompt.salt is not None:
        request["cache_salt"] = prompt.salt
    return request


def image_of(file: Path) -> Image.Image | torch.Tensor:
    """Return an image, or what another encoder made of it, in vLLM's words."""
    if file.suffix == ".pt":
        features: torch.Tensor = torch.load(file)
        return features
    with Image.open(file) as image:
        return image.convert("RGB")


def adapter_of(prompt: Prompt) -> LoRARequest | None:
    """Return a prompt's adapter in vLLM's words."""
    if (adapter := prompt.adapter) is None:
        return None
    return LoRARequest(adapter.name, adapter.number, str(adapter.path))


def growth(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """Return what every counter grew by, and what every gauge is, series by series."""
    return {
        series: value if series.startswith(GAUGES) else value - before.get(series, 0)
        for series, value in after.items()
    }


def answer_of(prompt: tuple[int, ...], output: Any) -> Answer:
    """Return the answer to ``prompt``; ``output`` is None when it was aborted."""
    if output is None or output.outputs[0].finish_reason == "abort":
        return Answer(prompt=prompt, tokens=(), cached_tokens=0, first_token_s=0, aborted=True)
    first, *others = (tuple(sample.token_ids) for sample in output.outputs)
    return Answer(
        prompt=prompt,
        tokens=first,
        others=tuple(others),
        prompt_logprobs=logprobs_of(prompt, output.prompt_logprobs),
        cached_tokens=output.num_cached_tokens or 0,
        first_token_s=output.metrics.first_token_latency,
        failed=output.outputs[0].finish_reason == "error",
    )


def logprobs_of(prompt: tuple[int, ...], found: Any) -> tuple[float, ...]:
    """Return vLLM's log probability of each prompt token but the first."""
    pairs = zip(prompt[1:], (found or [None])[1:], strict=False)
    return tuple(each[token].logprob for token, each in pairs)


def damage_kv(worker: Any, every: int) -> None:
    """Give every ``every``-th block of the GPU cache its neighbour's KV, in every layer."""
    for cache in worker.model_runner.kv_caches:
        dimension = list(cache.shape).index(worker.cache_config.num_gpu_blocks)
        blocks = cache.movedim(dimension, 0)
        neighbours = blocks.roll(1, dims=0)
        blocks[::every] = neighbours[::every]


def reweigh(worker: Any) -> None:
    """Give every token its neighbour's embedding, so that every block's right KV changes.

    The CPU's matrix products use packed copies of their weights; no such layer can be changed.
    """
    for name, weights in worker.model_runner.model.named_parameters():
        if "embed_tokens" in name:
            weights.data.copy_(weights.data.roll(1, dims=0))


def read_counters() -> Iterator[tuple[str, float]]:
    """Yield the watched series of this process as ``name{label=value,...}`` and value."""
    for metric in prometheus_client.REGISTRY.collect():
        if metric.type not in {"counter", "gauge"} or not metric.name.startswith(WATCHED):
            continue
        for sample in metric.samples:
            if sample.name.endswith("_created"):
                continue
            labels = ",".join(
                f"{name}={value}"
                for name, value in sorted(sample.labels.items())
                if name not in IRRELEVANT_LABELS
            )
            yield f"{metric.name}{{{labels}}}", sample.value


def main(arguments: Sequence[str]) -> None:
    """Run the scenario in the first file and write the report to the second."""
    go = die_with_parent()
    events = silence_stdout()
    # vLLM configures its own loggers only; kvtier's belong in the same log.
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    source, target = map(Path, arguments)
    scenario = Scenario.model_validate_json(source.read_text())
    if scenario.breaker_failures is not None:
        limits = partial(EngineLimits, breaker_failures=scenario.breaker_failures)
        setattr(storage, "EngineLimits", limits)  # noqa: B010 - mypy takes it for a type
    llm = open_engine(scenario)
    events.write("ready\n")
    driver = Driver(llm, timed=scenario.timed)
    waves = []
    for wave in scenario.waves:
        if scenario.timed:
            go.acquire()
        waves.append(driver.run(wave))
        events.write("wave\n")
    llm.llm_engine.engine_core.shutdown()
    target.write_text(Report(waves=tuple(waves)).model_dump_json())
    events.write("done\n")


def die_with_parent() -> threading.Semaphore:
    """End this process with the parent, which holds the other end of standard input.

    Returns:
        What is released once for each byte that the parent sends.
    """
    go = threading.Semaphore(0)

    def wait_for_end() -> None:
        # Not sys.stdin: its lock, held by a daemon thread, breaks the interpreter's own exit.
        while os.read(0, 1):
            go.release()
        os._exit(1)

    threading.Thread(target=wait_for_end, name="die-with-parent", daemon=True).start()
    return go


def silence_stdout() -> TextIO:
    """Send what this process and its children print to standard error.

    Returns:
        What standard output was, line buffered.
    """
    events = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return events


if __name__ == "__main__":
    main(sys.argv[1:])
