"""A storage tier in a process of its own.

Moving a chunk takes little Python, but that little needs the interpreter lock: after every
system call, and all through the checksum. In the engine's process the lock belongs to the
scheduler most of the time. A thread that asks for it waits up to the switch interval, 5 ms, in
which a disk could have delivered 30 MB; and a thread that hashes at 10 GB/s holds it for a
tenth of a second per gigabyte, in which the scheduler stands still. Neither threads nor
``io_uring`` help, for both come back to the same lock.

So the tier runs in another process, the *host*, which maps the same host region. The engine
sends it one small frame per job, keys, slots and where in the region the bytes are, and gets
one small frame back. No payload crosses the socket.

* :class:`HostedTier` is the engine's end: a :class:`~kvtier.tiers.base.StorageTier` like any
  other, so nothing above it knows.
* :mod:`kvtier.tiers.hosted.host` is the other process: it opens the real tier through the
  registry and serves frames.

When the engine dies, however it dies, the host finishes the calls it is in, commits its index,
closes the store and exits; the store's lock is the host's, so no new engine can open the store
before that. When the host dies, what it was doing fails, and the next job starts a new one.
"""

from __future__ import annotations

from kvtier.tiers.hosted.client import HostedTier

__all__ = ["HostedTier"]
