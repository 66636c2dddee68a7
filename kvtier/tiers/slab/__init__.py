"""The NVMe tier: a file of slots, and an index of the chunks in the slots.

::

    <path>/                           locked while a namespace is opened or removed
    <path>/<namespace>/               locked as long as the tier is open
                       layout.json    meaning of the bytes: fingerprint, slot size, version
                       slots.bin      slot i at byte i * slot_nbytes; only payloads
                       index.sqlite   slot -> key, checksum, generation, last use, hits;
                                      metadata; removal log
                       lock           name of the holder, for people

**Why it cannot serve wrong bytes.** A payload is written first, and its row is committed
afterwards. Between the write and the commit, and after a crash, a slot may be in one of three
states:

* A row without its payload, because a later chunk was being written over the payload.
* A payload without a row.
* An incomplete payload.

The last two states are harmless. The first state is detected, because every read compares the
bytes with the row's checksum. The key is part of the checksum, so a whole payload in the wrong
slot fails the check too. So the writes and deletions may reach the disk in any order: a read
returns the stored bytes or a miss.

**Why it is fast.** The main cost is not the system call, but the wait for the interpreter lock
after the call. In a busy engine that wait may last the switch interval, 5 ms. So the unit of
work is a piece: consecutive slots, which one thread of the pool moves in one vectored call and
hashes. The index follows the same rule: a batch is one SQL statement, and batches that arrive
during a commit are committed together.

**Why the disk does not fill up later.** ``slots.bin`` is allocated whole when the tier is
opened, and namespaces of other models are removed first. So ``capacity`` limits the files of
all models together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvtier.tiers.slab.tier import SlabTier

__all__ = ["SlabTier"]


def __getattr__(name: str) -> Any:  # noqa: ANN401 - the signature PEP 562 asks for
    # `kvtier check` opens no cache, and is faster without asyncio.
    if name == "SlabTier":
        from kvtier.tiers.slab.tier import SlabTier  # noqa: PLC0415

        return SlabTier
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
