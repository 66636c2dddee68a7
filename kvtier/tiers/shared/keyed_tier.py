"""Use a shared tier as a storage tier.

The manager addresses chunks by slot, and a shared tier addresses them by key. The slots of a
:class:`KeyedTier` contain no bytes. A slot only records that the service had a chunk when this
engine last stored the chunk or asked for the chunk. So the manager treats a shared tier like
any other tier. An eviction only deletes this record.

A shared tier differs from other tiers in two ways. First, the manager does not know what other
engines stored, so it asks (:meth:`KeyedTier.find`). Second, a chunk may be missing when it is
read. The chunk's outcome is then :attr:`Outcome.MISSING <kvtier.types.Outcome.MISSING>`.

**Keys.** A value's key is ``kv1-FINGERPRINT/GROUP-HASH``, so engines with another model or
layout have other keys. After a reset, the weights may have changed. So, unless
``keep_after_reset`` is set, the engine then uses ``kv1-FINGERPRINT-EPOCH/GROUP-HASH``, with a
random epoch that no other engine has.

**Repairs.** An engine marks values with wrong bytes, and replaces such a value when it stores
the chunk again. Another engine may have replaced the value since, and others may be reading
it. So the tier reads the value once more, and keeps it if it is right.
"""

from __future__ import annotations

import asyncio
import ctypes
import functools
import math
import mmap
import operator
import secrets
from collections.abc import Awaitable, Iterable, Sequence
from itertools import accumulate, compress, repeat
from typing import ClassVar, Final, Self, TypeVar

from typing_extensions import override

from kvtier.config import TIERS, SharedTierConfig, TierConfig
from kvtier.errors import ClosedError, KvtierError, TierUnavailableError
from kvtier.keys import ChunkKey, group_of, hash_part
from kvtier.tiers.base import KeyFinder, SlotOutcomes, StorageTier, TierContext, check_batch
from kvtier.tiers.shared.base import SharedContext, SharedTier, Value, with_proof_buffers
from kvtier.tiers.shared.proof import is_proof_of, make_proof
from kvtier.types import Outcome, Purpose, QuestionPart

__all__ = ["KeyedTier", "value_key"]

_FORMAT: Final = "kv1"
"""Beginning of every key. A new format of values needs another beginning."""
_T = TypeVar("_T")
_DONE = Outcome.DONE
_DOUBTFUL: Final = (Outcome.CORRUPT, Outcome.MISSING)
_MOST_DOUBTED: Final = 1 << 16
"""Largest number of keys that count as missing until this engine stores them again, or reads
right bytes. The tier forgets the oldest."""
_MOST_LAST_CHUNKS: Final = 256
"""Largest number of chunks to ask for in a sliding window; longer windows are not found."""
_BEFORE_READS: Final = min(Purpose) - 1
"""Priority for verifying values, above the priorities of all other calls."""
_WRONG: Final = "the value has no matching proof"


class KeyedTier(StorageTier, KeyFinder):
    """Adapts a shared tier to the interface of a storage tier; owns the shared tier.

    ``scratch`` is memory for one chunk that is read again before a repair.
    """

    Options: ClassVar[type[TierConfig]] = SharedTierConfig
    is_local = False

    def __init__(
        self,
        options: SharedTierConfig,
        context: TierContext,
        shared: SharedTier,
        scratch: memoryview,
    ) -> None:
        self.name = options.name
        self.capacity_slots = options.known_chunks
        self.slot_nbytes = context.slot_nbytes
        self._shared = shared
        self._scratch = scratch
        self._reading_again = asyncio.Lock()
        self._pool = context.pool
        self._keeps_epoch = options.keep_after_reset
        self._fingerprint = context.fingerprint.namespace()
        self._space = self._fingerprint
        self._doubted: dict[ChunkKey, Outcome] = {}
        self._closed = False
        if context.was_reset:
            self._begin_epoch()

    @classmethod
    @override
    def open(cls, options: TierConfig, context: TierContext) -> Self:
        """Open the shared tier of kind ``options.kind``; see :meth:`StorageTier.open`."""
        assert isinstance(options, SharedTierConfig)
        kind = TIERS.find_derived(options.kind, SharedTier)
        nbytes, memory = context.slot_nbytes, _memory_of(context)
        scratch = memoryview(mmap.mmap(-1, nbytes))  # untouched pages take no memory
        shared = SharedContext(nbytes, context.pool, memory, scratch=scratch)
        return cls(options, context, kind.open(options, shared), scratch)

    @override
    def recovered(self) -> Iterable[tuple[ChunkKey, int]]:
        return ()

    @override
    async def find(
        self, keys: Sequence[ChunkKey], parts: Sequence[QuestionPart]
    ) -> SlotOutcomes:
        """See :meth:`kvtier.tiers.base.KeyFinder.find`.

        The tier first asks for the groups whose chunks a hit needs from the prompt's start. The
        answers limit the length of the hit. In every other group, the tier then asks only for
        the last chunks before this limit: a sliding window or a recurrent state.
        """
        self._require_open()
        names = self._names(keys)
        starts = list(accumulate((part.chunks for part in parts), initial=0))
        found = [False] * len(keys)
        end_token = math.inf
        for at, part in zip(starts, parts, strict=False):
            if part.is_prefix:
                there = await self._reach(
                    self._shared.contains_leading(names[at : at + part.chunks])
                )
                found[at : at + part.chunks] = there
                leading = there.index(False) if False in there else part.chunks
                end_token = min(end_token, part.first_token + leading * part.chunk_tokens)
        for at, part in zip(starts, parts, strict=False):
            if not part.is_prefix:
                asked = _last_chunks(part, end_token)
                wanted = slice(at + asked.start, at + asked.stop)
                found[wanted] = await self._reach(self._shared.contains(names[wanted]))
        return SlotOutcomes(
            [
                _DONE if is_there and key not in self._doubted else Outcome.MISSING
                for key, is_there in zip(keys, found, strict=True)
            ]
        )

    @override
    async def write(
        self,
        keys: Sequence[ChunkKey],
        slots: Sequence[int],
        sources: Sequence[memoryview],
        *,
        purpose: Purpose,
    ) -> SlotOutcomes:
        """Store the chunks that the service lacks, and replace values that have wrong bytes.

        See :meth:`kvtier.tiers.base.StorageTier.write`; a service may evict accepted chunks.
        """
        self._require_open()
        check_batch(self, keys, slots, sources)
        names = self._names(keys)
        found: Iterable[bool] = [False] * len(keys)
        if self._shared.asks_before_adding:
            found = await self._reach(self._shared.contains(names))
        await self._read_again(keys, purpose)
        lacking = [
            not is_there or key in self._doubted
            for key, is_there in zip(keys, found, strict=True)
        ]
        if not any(lacking):
            return SlotOutcomes([_DONE] * len(keys))
        keys, names = list(compress(keys, lacking)), list(compress(names, lacking))
        sources = list(compress(sources, lacking))
        stored = iter(await self._store(keys, names, sources, purpose))
        outcomes = [next(stored) if is_lacking else _DONE for is_lacking in lacking]
        return _with_error(outcomes, "the service did not store a value")

    @override
    async def read(
        self,
        keys: Sequence[ChunkKey],
        slots: Sequence[int],
        into: Sequence[memoryview],
        *,
        purpose: Purpose,
    ) -> SlotOutcomes:
        self._require_open()
        check_batch(self, keys, slots, into)
        names, values = self._names(keys), with_proof_buffers(into)
        outcomes = list(await self._reach(self._shared.get(names, values)))
        got = [at for at, outcome in enumerate(outcomes) if outcome is _DONE]

        def is_whole(at: int) -> bool:
            return is_proof_of(values[at].proof, names[at], into[at])

        checks = [functools.partial(is_whole, at) for at in got]
        verified = await self._pool.run_all(checks, priority=_BEFORE_READS)
        for at in compress(got, map(operator.not_, verified)):
            outcomes[at] = Outcome.CORRUPT
        for key, outcome in zip(keys, outcomes, strict=True):
            if outcome is not Outcome.FAILED:
                self._doubted.pop(key, None)
            # MISSING too: a service may report a value of another size, and never return it.
            if outcome in _DOUBTFUL:
                self._doubted[key] = outcome  # the latest is the last
                if len(self._doubted) > _MOST_DOUBTED:
                    del self._doubted[next(iter(self._doubted))]
        return _with_error(outcomes, _WRONG if Outcome.CORRUPT in outcomes else "")

    @override
    def forget(self, slots: Sequence[int]) -> None:
        """Do nothing. If a stored value is corrupt, the next write of its key replaces it."""

    @override
    def touch(self, slots: Sequence[int]) -> None:
        """Do nothing: the service has its own eviction order."""

    @override
    async def reset(self) -> None:
        """Use keys of a new epoch from now on, unless ``keep_after_reset`` is set.

        Other engines' values stay valid.
        """
        self._begin_epoch()

    @override
    async def aclose(self) -> None:
        self._closed = True
        await self._shared.aclose()

    async def _read_again(self, keys: Sequence[ChunkKey], purpose: Purpose) -> None:
        """Read the known corrupt values of ``keys`` again, in case they were repaired."""
        for key in keys:
            if self._doubted.get(key) is Outcome.CORRUPT:
                async with self._reading_again:
                    await self.read([key], [0], [self._scratch], purpose=purpose)

    async def _store(
        self,
        keys: Sequence[ChunkKey],
        names: Sequence[str],
        sources: Sequence[memoryview],
        purpose: Purpose,
    ) -> Sequence[Outcome]:
        """Store values by ``add``, or by ``put`` where the stored value has wrong bytes."""
        values = with_proof_buffers(sources)

        def prove(name: str, value: Value) -> None:
            value.proof[:] = make_proof(name, value.payload)

        proofs = map(functools.partial, repeat(prove), names, values)
        await self._pool.run_all(list(proofs), priority=int(purpose))
        outcomes = [Outcome.FAILED] * len(keys)
        damaged = [self._doubted.get(key) is Outcome.CORRUPT for key in keys]
        for is_damaged, send in ((False, self._shared.add), (True, self._shared.put)):
            sent = [at for at in range(len(keys)) if damaged[at] is is_damaged]
            if sent:
                answers = await self._reach(
                    send([names[at] for at in sent], [values[at] for at in sent])
                )
                for at, outcome in zip(sent, answers, strict=True):
                    outcomes[at] = outcome
        for key in compress(keys, (outcome is _DONE for outcome in outcomes)):
            self._doubted.pop(key, None)
        return outcomes

    async def _reach(self, calling: Awaitable[_T]) -> _T:
        """Await a call of the service; convert its library's errors to TierUnavailableError."""
        try:
            return await calling
        except KvtierError:
            raise
        except Exception as error:  # a client raises errors of its own library
            cause = f"{type(error).__name__}: {error}".splitlines()[0]
            raise TierUnavailableError(self.name, cause) from error

    def _names(self, keys: Sequence[ChunkKey]) -> list[str]:
        """Return the service's key for each of the engine's ``keys``."""
        return [value_key(self._space, key) for key in keys]

    def _begin_epoch(self) -> None:
        if not self._keeps_epoch:
            self._space = f"{self._fingerprint}-{secrets.token_hex(8)}"
            self._doubted.clear()

    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError(f"tier {self.name} is closed")


def _last_chunks(part: QuestionPart, end_token: float) -> slice:
    """Return the slice of ``part`` with the last chunks that end at or before ``end_token``."""
    end = part.chunks
    if end_token < part.first_token + part.chunks * part.chunk_tokens:
        end = max(int(end_token) - part.first_token, 0) // part.chunk_tokens
    return slice(max(end - _MOST_LAST_CHUNKS, 0), end)


def value_key(space: str, key: ChunkKey) -> str:
    """Return the key of a chunk's value in a shared tier.

    ``space`` is the layout's fingerprint; after a reset, the fingerprint and the epoch.
    """
    return f"{_FORMAT}-{space}/{group_of(key)}-{hash_part(key).hex()}"


def _with_error(outcomes: Sequence[Outcome], error: str) -> SlotOutcomes:
    whole = {_DONE, Outcome.MISSING, Outcome.REFUSED}.issuperset(outcomes)
    return SlotOutcomes(outcomes, "" if whole else error or "the service did not return it")


def _memory_of(context: TierContext) -> memoryview | None:
    """Return the shared memory, as this process maps it; None without shared memory."""
    if context.mapped is not None or context.memory is None:
        return context.mapped
    memory = context.memory
    return memoryview((ctypes.c_char * memory.nbytes).from_address(memory.address)).cast("B")
