"""A storage tier in a process of its own, the *host*.

Moving a chunk takes little Python code, but that code needs the interpreter lock: after every
system call and during the checksum. In the engine's process the scheduler has the lock most of
the time. A thread waits for the lock for up to 5 ms, the switch interval; a disk delivers 30 MB
in that time. A thread that hashes at 10 GB/s holds the lock for 0.1 s per gigabyte, and the
scheduler cannot run in that time. Threads and ``io_uring`` do not help, because both need the
lock.

So the tier runs in another process, which maps the same host region. For each job the engine
sends one small frame with keys, slots and offsets in the region. The host answers with one
small frame. No payload crosses the socket.

* :class:`HostedTier` is the engine's side, a :class:`~kvtier.tiers.base.StorageTier`.
* :mod:`kvtier.tiers.hosted.host` is the other process. It opens the real tier through the
  registry and serves frames.

When the engine dies, the host finishes the engine's calls, commits the index, closes the cache
and exits. The host has the cache's lock, so no new engine can open the cache before the host
exits. When the host dies, the calls in flight fail, and the next job starts a new host.
"""

from __future__ import annotations

from kvtier.tiers.hosted.client import HostedTier

__all__ = ["HostedTier"]
