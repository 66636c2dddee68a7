"""The NVMe tier: a slab of slots, and an index of what each slot holds.

::

    <path>/                           locked while a namespace is opened or removed
    <path>/<namespace>/               locked as long as the tier is open
                       layout.json    meaning of the bytes: fingerprint, slot size, version
                       slots.bin      slot i at byte i * slot_nbytes; payload and nothing else
                       index.sqlite   slot -> key, checksum, generation, last use, hits; trail
                       lock           names the holder, for people

**Why it cannot serve wrong bytes.** A payload is written first and its row is committed after.
In between, and after a crash at any point, three things may lie on the disk: a row whose
payload is gone (a later chunk was being written over it), a payload without a row (lost with
the crash), or half a payload. The last two are harmless, and the first is caught because every
read is checked against the checksum in the row. The key is mixed into the checksum, so a whole
and healthy payload in the wrong slot does not verify either. Hence nothing needs to be synced
or deleted in any order: whatever was or was not flushed, a read yields the stored bytes or a
miss. Only with ``checksum: off`` does the order matter, and then it is kept: the old row is
deleted, durably as configured, before its payload is touched.

**Why it is fast.** The limit is not the system call but how often a thread must take the
interpreter lock back from a busy engine: each time may cost the switch interval, 5 ms. So the
unit of work is a piece: neighbouring slots, one vectored call, all their checksums, one trip
through the thread pool. The index follows the same rule: a batch is one SQL statement, and
batches that arrive while one is being committed share the next commit.

**Why a full disk is no surprise.** ``slots.bin`` is allocated whole when the tier is opened,
and namespaces of other models give way first, so ``capacity`` is a cap across model upgrades.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvtier.tiers.slab.store import SlabTier

__all__ = ["SlabTier"]


def __getattr__(name: str) -> Any:  # noqa: ANN401 - the signature PEP 562 asks for
    # `kvtier check` reads stores in half a second and opens none: it does without asyncio.
    if name == "SlabTier":
        from kvtier.tiers.slab.store import SlabTier  # noqa: PLC0415

        return SlabTier
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
