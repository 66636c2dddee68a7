"""``kvtier cache explain FILE KEY``: asks a shared tier for a chunk, and verifies the bytes."""

from __future__ import annotations

import asyncio
import mmap
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from kvtier.config import TIERS, KvtierConfig, SharedTierConfig, load_config
from kvtier.errors import ConfigError, TierUnavailableError
from kvtier.keys import ChunkKey, group_of
from kvtier.os.iopool import IoPool
from kvtier.os.timed_calls import call_within
from kvtier.tiers.shared import (
    SharedContext,
    SharedTier,
    Value,
    is_proof_of,
    value_key,
    with_proof_buffers,
)
from kvtier.tiers.slab.inspect import StoredNamespace, find_namespaces
from kvtier.types import Outcome

__all__ = ["SharedExplanation", "explain_shared"]

_TIMEOUT_S: Final = 30.0
_PAGE_NBYTES: Final = 4096


@dataclass(frozen=True, slots=True)
class SharedExplanation:
    """A shared tier's answer about a chunk.

    Attributes:
        value: Key of the chunk's value in the service.
        is_whole: Whether the value's bytes match the proof; None if the value was not verified.
        answered_s: Seconds until the service answered whether it has the value.
    """

    tier: str
    kind: str
    value: str
    is_stored: bool
    is_whole: bool | None
    answered_s: float

    def as_dict(self) -> dict[str, Any]:
        """Return the answer as a dict for JSON."""
        return asdict(self)

    def lines(self) -> dict[str, str]:
        """Return the answer as a dict of labels and texts."""
        stored = "yes" if self.is_stored else "no: never stored, or evicted by the service"
        whole = {True: "yes", False: "no: an engine computes the chunk and stores it again"}
        lines = {"tier": f"{self.tier}  {self.kind}", "value": self.value, "stored": stored}
        if self.is_whole is not None:
            lines["whole"] = whole[self.is_whole]
        lines["answered"] = f"in {self.answered_s * 1e3:.1f} ms"
        return lines


def explain_shared(
    file: Path, key: str, namespace: str | None, *, timeout_s: float = _TIMEOUT_S
) -> SharedExplanation:
    """Ask the shared tier of a configuration for a chunk. This function blocks.

    The value is verified only if a local tier of the file has the namespace, because the
    namespace's layout gives the size of a value.

    Args:
        file: The configuration.
        key: The whole key in hex digits.
        namespace: Namespace of the engines; None for the only namespace of the local tiers.
        timeout_s: Longest wait for the service.

    Raises:
        ConfigError: The file has no shared tier, ``key`` is not a whole key, or ``namespace``
            must be given.
        TierUnavailableError: The service failed or did not answer in time.
    """
    config = load_config(file)
    options = config.tiers[-1]
    if not isinstance(options, SharedTierConfig):
        raise ConfigError(f"{file}: no shared tier; name the directory of an nvme tier instead")
    spaces = {space.name: space for space in _local_namespaces(config)}
    name = namespace or (next(iter(spaces)) if len(spaces) == 1 else None)
    if name is None:
        raise ConfigError("add --namespace, which kvtier_info and the engine's log name")
    space = spaces.get(name)
    nbytes = _PAGE_NBYTES if space is None else space.layout.slot_nbytes
    kind = TIERS.find_derived(options.kind, SharedTier)
    (value,) = with_proof_buffers([memoryview(mmap.mmap(-1, nbytes))])
    value_name = value_key(name, _whole_key(key))
    pool = IoPool(2, name="kvtier-explain")

    def ask() -> SharedExplanation:
        context = SharedContext(nbytes, pool, value.payload, is_nbytes_known=space is not None)
        tier = kind.open(options, context)
        return asyncio.run(_ask(tier, options, value_name, None if space is None else value))

    try:
        # A call that hangs cannot be cancelled, so the thread is left alone.
        return call_within(ask, timeout_s, name="kvtier-explain")
    except TimeoutError as error:
        raise TierUnavailableError(options.name, f"no answer for {timeout_s:g} s") from error
    finally:
        pool.close(timeout_s=0)


def _local_namespaces(config: KvtierConfig) -> Iterator[StoredNamespace]:
    for tier in config.tiers:
        place = tier.local_directory()
        if place is not None and place.path.is_dir():
            yield from find_namespaces(place.path)


def _whole_key(text: str) -> ChunkKey:
    try:
        key = bytes.fromhex(text)
        group_of(key)
    except ValueError as error:
        raise ConfigError(
            f"{text!r} is not a whole key; ls --json prints whole keys"
        ) from error
    if len(key) < 2 * 8:
        raise ConfigError(
            f"{text!r} is only the beginning of a key; ls --json prints whole keys"
        )
    return key


async def _ask(
    tier: SharedTier, options: SharedTierConfig, name: str, value: Value | None
) -> SharedExplanation:
    """Ask whether the tier has the value ``name``; verify its bytes if ``value`` is given."""
    is_whole = None
    begin_s = time.monotonic()
    try:
        (is_stored,) = await tier.contains([name])
        answered_s = time.monotonic() - begin_s
        if is_stored and value is not None:
            (outcome,) = await tier.get([name], [value])
            is_whole = outcome is Outcome.DONE and is_proof_of(value.proof, name, value.payload)
    except TierUnavailableError:
        raise
    except Exception as error:  # a client raises errors of its own library
        problem = str(error) or type(error).__name__
        raise TierUnavailableError(options.name, problem) from error
    finally:
        await tier.aclose()
    return SharedExplanation(options.name, options.kind, name, is_stored, is_whole, answered_s)
