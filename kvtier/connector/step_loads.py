"""Loads that happen within a forward pass: RAM slots to blocks, layer by layer.

A load that goes ahead of its request keeps the request out of the batch until every byte is
there. But a model reads its KV layer by layer: while it computes one layer, the KV of the next
can be on its way. So the request may join the batch at once if somebody waits, before each
layer, for that layer's KV. The copies run in a thread of their own, in the order of the forward
pass; the model's thread does nothing but wait.

* **Batches of layers.** A copy for each layer would be many small ones, and for each the two
  threads must hand the interpreter to one another. So consecutive layers go together until a
  batch has some megabytes, and a wait for one of them is a wait for its batch.
* **All or nothing.** A forward pass that read a layer too early, or read bytes that were not
  those promised, cannot be taken back. So a load of a step is whole when every layer arrived
  before the model asked for it and all slots bore their stamps before the first byte was read
  and after the last. Otherwise all of its blocks are invalid, and what the step computed from
  them is worth nothing.
* **Nobody waits for long.** When a layer does not come in time the step is *abandoned*: the
  model goes on without, no other batch is begun, and all loads of the step failed.
* **Nothing is written afterwards.** The engine gives a failed load's blocks to whoever needs
  some, so a step ends only when the thread has left the copy it was in. A copy of some
  megabytes cannot be interrupted; one that does not end at all is an error, and better the end
  of the engine than another request's KV overwritten.
* **A model that does not wait** (a layer without the engine's hook, such as the cache of an
  indexer, or a graph that was recorded without it) is found out at the end of the step, because
  not every layer was asked for. All layers are copied before the steps that follow.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from kvtier.errors import KvtierError
from kvtier.iopool import start_thread
from kvtier.logs import get_logger
from kvtier.memory.threads import compute_alone
from kvtier.types import JobId

if TYPE_CHECKING:
    from kvtier.memory import ControlBlock
    from kvtier.memory.copy import BlockCopier, BlockCopyPlan
    from kvtier.memory.streams import Fence

__all__ = ["StepLoad", "StepLoader", "batches_of_layers"]

logger = get_logger(__name__)

_BATCH_NBYTES: Final = 4 << 20
"""Least bytes copied between two looks at what the model waits for, all loads together."""
_LEAVE_TIMEOUT_S: Final = 60.0
"""How long the copy that was begun last may take to end."""


@dataclass(slots=True)
class StepLoad:
    """One load of a step, and what came of it.

    Attributes:
        job_id: The job.
        plan: What to copy where, in one KV cache group.
        generations: The stamp that each slot must bear.
        after: What the copies must come after.
        error: What went wrong; empty as long as nothing did.
        seconds: Time that was spent copying.
    """

    job_id: JobId
    plan: BlockCopyPlan
    generations: Sequence[int]
    after: Fence | None
    error: str = ""
    seconds: float = 0.0


@dataclass(slots=True)
class _Step:
    """The loads of one forward pass. What the thread changes is changed under the lock."""

    loads: Sequence[StepLoad]
    batches: Sequence[slice]
    batches_until: dict[str, int]
    """By layer, how many batches must be done before the model may read it."""
    asked: set[str] = field(default_factory=set)
    done: int = 0
    abandoned: bool = False
    ended: bool = False


class StepLoader:
    """One rank's loads within the forward pass. All methods belong to the model's thread.

    Args:
        copier: Copies blocks; nobody else uses it, and it is closed with the loader.
        control: The workers' record.
        rank: This rank.
        layers: The layers as the model names them, in the order of their pages in a block;
            empty where pages are not layers. Then a step's loads are copied before it begins.
        page_nbytes: Bytes of each page of a block.
        timeout_s: Longest wait for one layer.
        batch_nbytes: Least bytes of a batch of layers.
    """

    def __init__(  # noqa: PLR0913 - one keyword for each part
        self,
        copier: BlockCopier,
        control: ControlBlock,
        *,
        rank: int,
        layers: Sequence[str],
        page_nbytes: Sequence[int],
        timeout_s: float,
        batch_nbytes: int = _BATCH_NBYTES,
    ) -> None:
        self._copier = copier
        self._control = control
        self._rank = rank
        self._layers = tuple(layers)
        self._page_nbytes = page_nbytes
        self._timeout_s = timeout_s
        self._batch_nbytes = batch_nbytes
        self._added: list[StepLoad] = []
        self._step: _Step | None = None
        self._changed = threading.Condition()
        self._steps: queue.SimpleQueue[_Step | None] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=self._work, name=f"kvtier-layers-{rank}", daemon=True
        )
        self._ready = threading.Event()
        start_thread(self._thread)
        self._ready.wait()

    def add(self, load: StepLoad) -> None:
        """Note a load of the step that :meth:`start` begins."""
        self._added.append(load)

    def start(self) -> None:
        """Start copying what was added; the step before was ended."""
        if not self._added:
            return
        loads, self._added = self._added, []
        batches = self._batches(loads)
        until = {
            layer: number
            for number, batch in enumerate(batches, start=1)
            for layer in self._layers[batch]
        }
        self._step = step = _Step(loads, batches, until)
        self._steps.put(step)
        if not self._layers:
            self._wait(step, lambda: step.ended)

    def wait_for(self, layer: str) -> None:
        """Block until the model may read ``layer``, or the step is abandoned.

        Returns at once where no load is under way. A name that is not among the layers, as of
        one that reads another's KV, waits for all of them.
        """
        step = self._step
        if step is None:
            return
        step.asked.add(layer)
        until = step.batches_until.get(layer, len(step.batches))
        if step.done < until and not step.abandoned:
            self._wait(step, lambda: step.done >= until or step.ended)

    def end(self) -> list[StepLoad]:
        """Return what came of the step's loads; their blocks are not written to any more.

        Raises:
            KvtierError: A copy does not end.
        """
        step, self._step = self._step, None
        if step is None:
            return []
        if not step.ended:
            self._wait(step, lambda: step.ended)
        with self._changed:
            if not self._changed.wait_for(lambda: step.ended, _LEAVE_TIMEOUT_S):
                raise KvtierError(
                    f"a copy from RAM to KV blocks did not end in {_LEAVE_TIMEOUT_S:.0f} s"
                )
        error = self._verdict(step)
        for load in step.loads:
            load.error = load.error or error
        if self._unasked(step) and not step.abandoned:
            logger.warning(
                "%s; from now on all layers are copied before the forward pass", error
            )
            self._layers = ()
        return list(step.loads)

    def close(self, *, timeout_s: float) -> bool:
        """Abandon the step under way, if any, and end the thread. Idempotent.

        Returns:
            Whether the thread ended, so that nothing is copied any more.
        """
        if self._step is not None:
            with self._changed:
                self._step.abandoned = True
        self._steps.put(None)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            return False
        self._copier.close()
        return True

    # -- the model's thread --------------------------------------------------------------------

    def _batches(self, loads: Sequence[StepLoad]) -> list[slice]:
        if not self._layers:
            return [slice(0, len(self._page_nbytes))]
        blocks = sum(len(copy.blocks) for load in loads for copy in load.plan.groups)
        return batches_of_layers(self._page_nbytes, blocks, batch_nbytes=self._batch_nbytes)

    def _wait(self, step: _Step, is_over: Callable[[], bool]) -> None:
        with self._changed:
            if not self._changed.wait_for(is_over, self._timeout_s):
                step.abandoned = True
                logger.error(
                    "KV was not copied from RAM in %.1f s: the step goes on without it",
                    self._timeout_s,
                )

    def _verdict(self, step: _Step) -> str:
        """Return why no load of a step may be used; empty if there is no reason."""
        if step.abandoned:
            return "a layer was not copied in time"
        unasked = self._unasked(step)
        if unasked:
            return f"the model did not wait for layer {unasked[0]}"
        return ""

    def _unasked(self, step: _Step) -> list[str]:
        """Return the layers that the model did not wait for in a step."""
        return [layer for layer in self._layers if layer not in step.asked]

    # -- the copying thread --------------------------------------------------------------------

    def _work(self) -> None:
        try:
            compute_alone()
        except Exception:  # a slower copy, and no reason to be without one
            logger.exception("copies layer by layer may disturb the model")
        finally:
            self._ready.set()
        while (step := self._steps.get()) is not None:
            try:
                self._copy(step)
            except Exception as error:
                logger.exception("copying from RAM layer by layer")
                _fail(step.loads, error)
            with self._changed:
                step.ended = True
                self._changed.notify_all()
            # Without this the thread keeps the last step, and its plans, alive.
            del step

    def _copy(self, step: _Step) -> None:
        for load in step.loads:
            self._check(load, "a slot's stamp is not the one promised")
        for batch in step.batches:
            for load in step.loads:
                if step.abandoned:
                    return
                if not load.error:
                    self._copy_batch(load, batch)
            with self._changed:
                step.done += 1
                self._changed.notify_all()
        for load in step.loads:
            self._check(load, "a slot was given away while it was read")

    def _copy_batch(self, load: StepLoad, batch: slice) -> None:
        started_s = time.monotonic()
        try:
            self._copier.load(load.plan, after=load.after, pages=batch)
        except Exception as error:  # noqa: BLE001 - told to whoever ends the step
            _fail([load], error)
        load.seconds += time.monotonic() - started_s

    def _check(self, load: StepLoad, complaint: str) -> None:
        """Fail a load whose slots do not bear their stamps."""
        if load.error:
            return
        if not all(load.generations):
            load.error = "there was no RAM slot for a chunk after all"
        elif not self._control.bears(self._rank, load.plan.slots, load.generations):
            load.error = complaint


def _fail(loads: Sequence[StepLoad], error: Exception) -> None:
    for load in loads:
        load.error = load.error or f"{type(error).__name__}: {error}"


def batches_of_layers(
    page_nbytes: Sequence[int], blocks: int, *, batch_nbytes: int
) -> list[slice]:
    """Return which consecutive layers to copy together, in order.

    Args:
        page_nbytes: Bytes of a block in each layer.
        blocks: Blocks to copy.
        batch_nbytes: Least bytes of a batch. The last may have fewer.
    """
    batches: list[slice] = []
    first = nbytes = 0
    for number, page in enumerate(page_nbytes, start=1):
        nbytes += page * blocks
        if nbytes >= batch_nbytes or number == len(page_nbytes):
            batches.append(slice(first, number))
            first, nbytes = number, 0
    return batches
