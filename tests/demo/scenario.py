"""What one engine shall do, and what it reports: values that travel as JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field

from kvtier.config import VllmEntryPoint

__all__ = [
    "Adapter",
    "Answer",
    "Prompt",
    "Report",
    "Scenario",
    "StepTimes",
    "Wave",
    "WaveReport",
    "replayed",
    "store_yaml",
]


class _Value(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Adapter(_Value):
    """A LoRA adapter, as a request names it."""

    name: str
    number: int
    """One number for each name and path that an engine hears of."""
    path: Path


class Prompt(_Value):
    """One request."""

    tokens: tuple[int, ...]
    """Token ids; appended to the conversation so far when there is one."""
    after: int | None = None
    """The earlier request that this one continues, counted over all waves."""
    transfer_params: dict[str, Any] = Field(default_factory=dict)
    """Its ``kv_transfer_params``."""
    adapter: Adapter | None = None
    """Its LoRA adapter."""
    salt: str | None = None
    """Its ``cache_salt``."""
    embeds: Path | None = None
    """A file of ``torch.save`` with the prompt's embeddings; sent in place of ``tokens``."""
    images: tuple[Path, ...] = ()
    """Images, each one token of ``tokens``: files, or features of ``torch.save`` (``.pt``)."""
    sampling: dict[str, Any] = Field(default_factory=dict)
    """Sampling parameters besides the wave's."""
    priority: int = 0
    """Lower is earlier, with ``scheduling_policy: priority``."""


class Wave(_Value):
    """Requests that are sent at once and awaited together."""

    prompts: tuple[Prompt, ...]
    max_tokens: Annotated[int, Field(ge=1)] = 8
    """Tokens to generate for each prompt."""
    detached: bool = False
    """Run it as if the engine had no connector; needs an engine of one rank."""
    reset_first: bool = False
    """Forget every cached prefix before, in kvtier too."""
    damage_every: Annotated[int, Field(ge=0)] = 0
    """Before, give every n-th GPU block its neighbour's KV: a negative control; 0 for none."""
    abort: tuple[int, ...] = ()
    """Prompts of this wave that are aborted."""
    abort_after_steps: int = 2
    """Engine steps before the abort."""
    files: dict[Path, str] = Field(default_factory=dict)
    """Files to write before, by which a test talks to what it put into the engine."""
    reset_after_steps: Annotated[int, Field(ge=0)] = 0
    """Engine steps before everything cached is forgotten, amid traffic; 0 for never."""
    reweigh: bool = False
    """Change the model's weights just before that, so that KV of before is wrong after."""


class Scenario(_Value):
    """One engine's life."""

    model: Path
    config: Path | None = None
    """kvtier's YAML file; None runs vLLM alone."""
    connector: dict[str, Any] | None = None
    """The ``--kv-transfer-config`` of another connector, to compare with kvtier."""
    waves: tuple[Wave, ...]
    gpu_blocks: int = 140
    entry_point: VllmEntryPoint = VllmEntryPoint.CONNECTOR
    """The way into vLLM."""
    ranks: int = 1
    """Tensor-parallel workers."""
    context_tokens: int = 4096
    """Longest prompt and answer together; the GPU must have blocks for one such request."""
    step_tokens: int = 2048
    """Most tokens the engine computes in one step."""
    events: str | None = None
    """Where to publish what is cached, as a ZeroMQ endpoint."""
    breaker_failures: int | None = None
    """Failed jobs in a row that take a tier out of service; None for kvtier's own number."""
    load_failures: Literal["recompute", "fail"] = "recompute"
    """What becomes of a request whose KV could not be loaded."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of the engine, or others in place of the demo's."""
    timed: bool = False
    """Begin each wave when the parent says so, and report what each step of it took."""
    compute_threads: int = 0
    """Threads of a forward pass; 0 leaves it to PyTorch, which has one for each processor."""


class Answer(_Value):
    """What became of one request."""

    prompt: tuple[int, ...]
    """The prompt as it was sent, the continued conversation included."""
    tokens: tuple[int, ...]
    others: tuple[tuple[int, ...], ...] = ()
    """Tokens of its further samples, where ``n`` was more than one."""
    prompt_logprobs: tuple[float, ...] = ()
    """Of each prompt token but the first, where they were asked for."""
    cached_tokens: int
    """Prompt tokens whose KV was not computed."""
    first_token_s: float
    aborted: bool = False
    failed: bool = False
    """Whether it ended with an error."""
    after_reset: bool = False
    """Whether it ended after a reset in the midst of its wave."""


class StepTimes(_Value):
    """What the engine core's steps of one wave took: schedule, compute, update."""

    prefill_s: tuple[float, ...]
    """Steps that computed part of a prompt."""
    decode_s: tuple[float, ...]
    """Steps that only generated."""
    engine_cpu_s: float
    """Processor time of the engine's process during the wave, all threads."""
    hosts_cpu_s: float
    """Processor time of its child processes, until nothing was in flight."""


class WaveReport(_Value):
    """What became of one wave."""

    answers: tuple[Answer, ...]
    seconds: float
    counters: dict[str, float]
    """Every counter's growth during the wave and every gauge's value after it."""
    steps: StepTimes | None = None
    """Of a scenario that is timed."""


class Report(_Value):
    """What one engine did."""

    waves: tuple[WaveReport, ...]

    def answers(self) -> list[Answer]:
        """Return the answers of all waves, in order."""
        return [answer for wave in self.waves for answer in wave.answers]

    def tokens(self) -> list[tuple[int, ...]]:
        """Return the generated tokens of all waves, in order."""
        return [answer.tokens for answer in self.answers()]

    def prompt_tokens(self) -> int:
        """Count the tokens of all prompts."""
        return sum(len(answer.prompt) for answer in self.answers())

    def count(self, counter: str, **labels: str) -> float:
        """Sum ``counter`` over the waves and over the series that have ``labels``.

        Args:
            counter: Its name as declared, without Prometheus' ``_total``.
            labels: Labels a series must have to be counted.
        """
        wanted = {f"{name}={value}" for name, value in labels.items()}
        return sum(
            value
            for wave in self.waves
            for series, value in wave.counters.items()
            if series_name(series) == counter and wanted <= series_labels(series)
        )


def series_name(series: str) -> str:
    """Return the name in ``name{label=value,...}``."""
    return series.partition("{")[0]


def series_labels(series: str) -> set[str]:
    """Return the labels in ``name{label=value,...}``."""
    return set(series.partition("{")[2].rstrip("}").split(","))


def replayed(waves: tuple[Wave, ...], report: Report) -> tuple[Wave, ...]:
    """Return ``waves`` with each prompt as ``report`` says it was sent.

    A conversation's later prompts contain the engine's own answers. Replaying the literal
    prompts keeps one wrong token from changing everything that follows it.
    """
    return tuple(
        wave.model_copy(
            update={"prompts": tuple(Prompt(tokens=answer.prompt) for answer in done.answers)}
        )
        for wave, done in zip(waves, report.waves, strict=True)
    )


def store_yaml(
    file: Path, *, store: Path, ram_nbytes: int, nvme_nbytes: int, blocks_per_chunk: int = 1
) -> Path:
    """Write a configuration with a RAM tier over an NVMe tier; the shape of configs/demo.yaml.

    Args:
        file: What to write.
        store: Directory of the NVMe tier.
        ram_nbytes: Capacity of the RAM tier.
        nvme_nbytes: Capacity of the NVMe tier.
        blocks_per_chunk: Blocks kvtier stores together.

    Returns:
        ``file``.
    """
    tiers = [
        {"kind": "ram", "capacity": f"{ram_nbytes}B"},
        {"kind": "nvme", "path": str(store), "capacity": f"{nvme_nbytes}B"},
    ]
    settings = {
        "tiers": tiers,
        # A model this small computes faster than a busy disk reads; here it is to read.
        "placement": {"load_if": "always"},
        "engine": {"blocks_per_chunk": blocks_per_chunk},
    }
    file.write_text(yaml.safe_dump(settings, sort_keys=False))
    return file
