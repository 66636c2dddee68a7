"""``python -m tests.bench.connector.calls SCENARIO``: Python time of a connector's calls.

Every method of vLLM's connector base class is timed
in both of the connector's objects, of the scheduler and of the worker; a step counts if each
request computed one token in it. Prints the microseconds of each such step as JSON.

The prompts have one length, so 31 of 32 steps complete no chunk. The time holds what vLLM's
calls cost any connector, and about 0.3 us for timing each: a connector that does nothing shows
how much that is.
"""

from __future__ import annotations

import functools
import inspect
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vllm import SamplingParams
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

from tests.demo.engine import open_engine, silence_stdout
from tests.demo.scenario import Scenario


class CallTimer:
    """Adds up the time of calls from outside; a call within a call counts once."""

    def __init__(self) -> None:
        self.spent_s = 0.0
        self._depth = 0

    def watch(self, connector: object) -> None:
        """Time every method of the base class that ``connector`` has."""
        for name, method in inspect.getmembers(KVConnectorBase_V1, inspect.isfunction):
            if not name.startswith("_"):
                setattr(connector, name, self._timed(getattr(connector, name, method)))

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def timed(*arguments: Any, **options: Any) -> Any:
            if self._depth:
                return call(*arguments, **options)
            self._depth = 1
            start = time.perf_counter()
            try:
                return call(*arguments, **options)
            finally:
                self.spent_s += time.perf_counter() - start
                self._depth = 0

        return timed


def step_times_us(scenario: Scenario) -> list[float]:
    """Return the microseconds of the connector's calls in each step that only generated."""
    (wave,) = scenario.waves
    prompts = [{"prompt_token_ids": list(prompt.tokens)} for prompt in wave.prompts]
    llm = open_engine(scenario)
    core = llm.llm_engine.engine_core.engine_core
    timer = CallTimer()
    for connector in (core.scheduler.connector, get_kv_transfer_group()):
        timer.watch(connector)
    scheduled: list[int] = []
    schedule, step = core.scheduler.schedule, core.step_fn
    times: list[float] = []

    def watched_schedule(*arguments: Any, **options: Any) -> Any:
        output = schedule(*arguments, **options)
        scheduled[:] = output.num_scheduled_tokens.values()
        return output

    def watched_step() -> Any:
        timer.spent_s = 0.0
        result = step()
        if scheduled == [1] * len(prompts):
            times.append(timer.spent_s * 1e6)
        return result

    core.scheduler.schedule, core.step_fn = watched_schedule, watched_step
    terms = SamplingParams(max_tokens=wave.max_tokens, temperature=0, ignore_eos=True)
    llm.generate(prompts, terms, use_tqdm=False)
    return times


if __name__ == "__main__":
    answer = silence_stdout()
    scenario = Scenario.model_validate_json(Path(sys.argv[1]).read_text())
    json.dump(step_times_us(scenario), answer)
    answer.flush()
