"""Replays a recording of calls: the same manager, asked the same, must answer the same.

The manager is pure, so its calls in their order, with what the workers and the disks reported,
are all that its decisions follow from. Every answer is compared with the recorded one: hits,
the slots and victims of stores, and every chunk of every job. The first that differs ends the
replay, for from there on the recording no longer fits what the manager holds.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvtier.config import KvtierConfig
from kvtier.keys import ChunkKey
from kvtier.manager import NO_TERMS, RequestTerms
from kvtier.manager.building import build_manager, build_tiers
from kvtier.recording import LETTERS, ManagerSetup
from kvtier.sim._recording import Line, recorded_lines, recorded_setup
from kvtier.sim._truth import HonestTruth
from kvtier.sim.ladder import ReplayedTier, replayed_tiers
from kvtier.sim.single import Progress
from kvtier.sim.traces._source import Source, open_source
from kvtier.types import Outcome, TransferResult

__all__ = ["ReplayResult", "replay_calls"]

_TOLD_EVERY: Final = 1024


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """A recording whose every answer was given again.

    Attributes:
        trace: The recording's name.
        trace_sha256: Of its file.
        calls: Calls replayed.
        answers: Answers compared: one per looked-up, stored, evicted, loaded or moved chunk.
        requests: Requests that began.
        refs: Chunk references: what each request asked for, loaded or offered, each once.
        chunk_tokens: Tokens of a chunk.
        tiers: One result per tier, fastest first.
        total_hit_ratio: Chunks loaded from any tier, of all references.
        writes_per_ref: Chunks written to the slower tiers, per reference.
        promotions_per_ref: Chunks promoted, per reference.
        seconds: Time the replay took.
    """

    trace: str
    trace_sha256: str
    calls: int
    answers: int
    requests: int
    refs: int
    chunk_tokens: int
    tiers: Sequence[ReplayedTier]
    total_hit_ratio: float
    writes_per_ref: float
    promotions_per_ref: float
    seconds: float


def replay_calls(
    path: Path, config: KvtierConfig, *, progress: Progress | None = None
) -> ReplayResult:
    """Replay the recording at ``path``.

    Args:
        path: A file of calls, plain or compressed.
        config: The configuration it was recorded with; its directories are not touched.
        progress: Told the share done now and then.

    Raises:
        TraceError: The file is damaged, or an answer differs from the recorded one; it names
            the line.
        ConfigError: The configuration decides otherwise than the recorded one.
    """
    begun = time.perf_counter()
    source = open_source(path)
    lines = recorded_lines(source)
    number, header = next(lines, (1, {}))
    setup = recorded_setup(source, number, header, config)
    replay = _Replay(source, setup)
    calls = 0
    total = source.content.count(b"\n")
    for number, line in lines:
        replay.call(number, line)
        calls += 1
        if progress is not None and (number == total or not calls % _TOLD_EVERY):
            progress(number / total)
    return replay.result(calls, time.perf_counter() - begun)


class _Recalled(HonestTruth):
    """Workers that say again what they said then: yes, unless it was noted."""

    def __init__(self) -> None:
        super().__init__()
        self._said: deque[str] = deque()

    def remember(self, said: Sequence[str]) -> None:
        """Take what the next questions are to be answered with."""
        self._said = deque(said)

    def stored(self, slots: Sequence[int], generations: Sequence[int]) -> list[bool]:
        return self._next() or super().stored(slots, generations)

    def loaded(self, slots: Sequence[int], generations: Sequence[int]) -> list[bool]:
        return self._next() or super().loaded(slots, generations)

    def quiet(self, slots: Sequence[int]) -> list[bool]:
        return self._next() or super().quiet(slots)

    def _next(self) -> list[bool]:
        return [letter == "1" for letter in self._said.popleft()] if self._said else []


class _Replay:
    """One manager and the calls made to it so far."""

    def __init__(self, source: Source, setup: ManagerSetup) -> None:
        self._source = source
        self._setup = setup
        self._tiers = build_tiers(setup.config, setup.capacities)
        self._truth = _Recalled()
        self._manager = build_manager(
            setup.config,
            self._tiers,
            slot_nbytes=setup.slot_nbytes,
            chunk_tokens=setup.chunk_tokens,
            truth=self._truth,
            record_events=False,
            counting_group=setup.counting_group,
        )
        self._keys: list[ChunkKey] = []
        self._recovering: list[tuple[ChunkKey, int]] = []
        self._line = 0
        self._answers = 0
        self._requests = 0
        self._refs = 0
        self._asked: dict[int, set[int]] = {}
        self._handlers: dict[str, Callable[[Line], None]] = {
            "begin_request": self._begin_request,
            "end_request": self._end_request,
            "lookup": self._lookup,
            "prepare_load": self._prepare_load,
            "complete_load": self._complete_load,
            "prepare_store": self._prepare_store,
            "complete_store": self._complete_store,
            "retain": self._retain,
            "end_step": self._end_step,
            "give_up": self._give_up,
            "set_out_of_service": self._set_out_of_service,
            "take_jobs": self._take_jobs,
            "apply": self._apply,
            "computed": self._computed,
            "flush": self._flush,
            "recover": self._recover,
            "reset": self._reset,
        }

    def call(self, number: int, line: Line) -> None:
        """Make the call of line ``number`` and compare the answer."""
        self._line = number
        try:
            self._keys += map(bytes.fromhex, line.get("new", ()))
            self._truth.remember(line.get("said", ()))
            handler = self._handlers[line["call"]]
            handler(line)
        except (LookupError, TypeError, ValueError) as error:
            problem = f"not a call that can be replayed here ({error!r})"
            remedy = "the recording is damaged, or of another version of kvtier"
            raise self._source.error(number, problem, remedy) from error

    def result(self, calls: int, seconds: float) -> ReplayResult:
        """Return what happened."""
        refs = max(self._refs + sum(map(len, self._asked.values())), 1)
        tiers = replayed_tiers(self._setup.config, self._tiers, refs=refs)
        return ReplayResult(
            trace=self._source.name,
            trace_sha256=self._source.sha256,
            calls=calls,
            answers=self._answers,
            requests=self._requests,
            refs=refs,
            chunk_tokens=self._setup.chunk_tokens,
            tiers=tiers,
            total_hit_ratio=sum(tier.hits for tier in tiers) / refs,
            writes_per_ref=sum(tier.chunks_written for tier in tiers[1:]) / refs,
            promotions_per_ref=sum(tier.chunks_promoted for tier in tiers) / refs,
            seconds=seconds,
        )

    def _chain(self, line: Line) -> tuple[list[ChunkKey], str]:
        """Return the chunks and the request of ``line``, and count what is new to it."""
        self._asked.setdefault(line["request"], set()).update(line["keys"])
        return self._named(line["keys"]), str(line["request"])

    def _named(self, numbers: Sequence[int]) -> list[ChunkKey]:
        return [self._keys[number] for number in numbers]

    def _compare(self, what: str, now: object, then: object, *, count: int) -> None:
        """Make sure that an answer is the recorded one; ``count`` chunks are in it."""
        if now != then:
            problem = f"{what}: the engine had {_short(then)}, the replay has {_short(now)}"
            remedy = (
                "replay with the configuration and the version of kvtier that recorded it; to "
                "try another configuration, replay the recorded requests"
            )
            raise self._source.error(self._line, problem, remedy)
        self._answers += count

    # -- calls ---------------------------------------------------------------------------------

    def _begin_request(self, line: Line) -> None:
        self._requests += 1
        self._manager.begin_request(str(line["request"]), _terms(line.get("terms")))

    def _end_request(self, line: Line) -> None:
        self._refs += len(self._asked.pop(line["request"], ()))
        self._manager.end_request(str(line["request"]))

    def _lookup(self, line: Line) -> None:
        keys, req_id = self._chain(line)
        found = "".join(LETTERS[self._manager.lookup(key, req_id)] for key in keys)
        self._compare("hits", found, line["answers"], count=len(keys))

    def _prepare_load(self, line: Line) -> None:
        plan = self._manager.prepare_load(*self._chain(line))
        self._compare("slots loaded", list(plan.slots), line["slots"], count=len(plan.slots))
        self._compare("tiers loaded from", list(plan.origins), line["origins"], count=0)

    def _complete_load(self, line: Line) -> None:
        self._manager.complete_load(str(line["request"]))

    def _prepare_store(self, line: Line) -> None:
        plan = self._manager.prepare_store(*self._chain(line))
        self._compare("taken", plan is not None, "stored" in line, count=0)
        if plan is None:
            return
        stored, evicted = self._named(line["stored"]), self._named(line["evicted"])
        self._compare("chunks stored", list(plan.keys), stored, count=len(stored))
        self._compare("slots stored to", list(plan.slots), line["slots"], count=0)
        self._compare("chunks evicted", list(plan.evicted), evicted, count=len(evicted))

    def _complete_store(self, line: Line) -> None:
        self._manager.complete_store(self._named(line["keys"]))

    def _retain(self, line: Line) -> None:
        kept = self._manager.retain(self._named(line["keys"]), line["until"])
        self._compare("chunks kept", kept, line["kept"], count=kept)

    def _end_step(self, line: Line) -> None:
        self._manager.end_step(
            started=map(str, line["started"]),
            preempted=map(str, line["preempted"]),
            now=line["now"],
        )

    def _give_up(self, line: Line) -> None:
        self._manager.give_up(str(line["request"]))

    def _set_out_of_service(self, line: Line) -> None:
        self._manager.set_out_of_service(line["tiers"])

    def _take_jobs(self, line: Line) -> None:
        jobs = self._manager.take_jobs()
        self._compare("jobs", len(jobs), len(line["jobs"]), count=0)
        for job, then in zip(jobs, line["jobs"], strict=True):
            now = {
                "id": job.job_id,
                "source": job.source,
                "destination": job.destination,
                "keys": list(job.keys),
                "source_slots": list(job.source_slots),
                "destination_slots": list(job.destination_slots),
            }
            self._compare(
                f"job {job.job_id}",
                now,
                then | {"keys": self._named(then["keys"])},
                count=len(job.keys),
            )

    def _apply(self, line: Line) -> None:
        result = line["result"]
        outcomes = [Outcome(outcome) for outcome in result["outcomes"]]
        self._manager.apply(
            TransferResult(
                result["id"],
                outcomes,
                settled=result["settled"],
                seconds=result["seconds"],
                queued_s=result["queued_s"],
            )
        )

    def _computed(self, line: Line) -> None:
        self._manager.computed(line["tokens"], line["seconds"])

    def _flush(self, line: Line) -> None:  # noqa: ARG002 - a call without arguments
        self._manager.flush()

    def _recover(self, line: Line) -> None:
        self._recovering += zip(self._named(line["keys"]), line["slots"], strict=True)
        if not line["more"]:
            self._manager.recover(line["tier"], self._recovering)
            self._recovering = []

    def _reset(self, line: Line) -> None:  # noqa: ARG002 - a call without arguments
        self._manager.reset()


def _terms(told: Line | None) -> RequestTerms:
    if told is None:
        return NO_TERMS
    load, store = told["load_tiers"], told["store_tiers"]
    return RequestTerms(
        load_tiers=None if load is None else frozenset(load),
        store_tiers=None if store is None else frozenset(store),
        session=told["session"],
    )


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) < 200 else f"{text[:200]}..."
