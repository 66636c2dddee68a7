"""Imports and exports that are killed before each of their system calls, one after the other.

This process stays single-threaded, so that it may fork. Each run is a child that kills itself
before a call of a given number. Another child then opens the store as an engine, and a third
one runs the command again. Every line of the output is the result of one kill, as JSON.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

os.putenv("OPENBLAS_NUM_THREADS", "1")  # read when numpy is loaded: no threads before the fork

from typing_extensions import override

import kvtier.archive.exporting
import kvtier.archive.locations
import kvtier.archive.target
import kvtier.tiers.slab.maintain
from kvtier.archive import export_chunks, import_chunks, open_archive, open_location
from kvtier.os.iopool import IoPool
from kvtier.tiers.slab.index_reader import IndexReader
from kvtier.tiers.slab.inspect import find_namespaces
from kvtier.tiers.slab.verify import verify
from tests.support.faulty_io import Fault, FaultyIo
from tests.unit.stores import SLOTS, Store

_USERS: Final = (kvtier.archive.locations, kvtier.archive.target, kvtier.tiers.slab.maintain)


class KillingIo(FaultyIo):
    """Kills this process before the call of a given number; 0 is the first."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self._left = number

    @override
    def _note(self, call: str, offset: int = 0, nbytes: int = 0) -> Fault | None:
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        self._left -= 1
        return super()._note(call, offset, nbytes)


def in_child(action: Callable[[], Any]) -> Any:
    """Run ``action`` in a child; return its result, or None if it was killed."""
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            os.write(writing, json.dumps(action()).encode())
            os._exit(0)
        except BaseException:  # noqa: BLE001 - the top of a process; the test reports it
            traceback.print_exc()
        finally:
            os._exit(1)
    os.close(writing)
    with open(reading, "rb") as result:  # noqa: PTH123 - a descriptor
        text = result.read()
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if status == -signal.SIGKILL:
        return None
    assert status == 0, "a child failed; its traceback is above"
    return json.loads(text)


def killed_at(number: int, action: Callable[[], int]) -> int | None:
    """Run ``action``, killed before call ``number``; return its result if it ended first."""

    def run() -> int:
        io = KillingIo(number)
        for module in _USERS:
            module.BlockIo = lambda: io  # type: ignore[attr-defined]
        return action()

    found: int | None = in_child(run)
    return found


def engine_finds(root: Path) -> int:
    """Open the store as an engine, and return how many chunks it finds; all must be good."""
    store = Store(root, IoPool(2, name="kvtier-engine"))
    found = len(store.start())
    store.stop()
    (space,) = find_namespaces(root)
    with IndexReader(space) as reader:
        assert not verify(space, reader).bad
    return found


def import_once(archive: Path, root: Path) -> int:
    return import_chunks(open_archive(open_location(str(archive))), root).chunks


def export_once(root: Path, archive: Path) -> int:
    (space,) = find_namespaces(root)
    return export_chunks(space, open_location(str(archive))).archive_chunks


def main() -> None:
    kvtier.archive.buffers._MOST_SLOTS = 3  # type: ignore[misc] # several parts
    source, work = Path(sys.argv[1]), Path(sys.argv[2])
    number, ended = 0, None
    while ended is None:
        archive, root = work / f"archive-{number}", work / f"store-{number}"
        ended = killed_at(number, lambda at=archive: export_once(source, at))  # type: ignore[misc]
        whole = in_child(lambda at=archive: export_once(source, at))  # type: ignore[misc]
        print(json.dumps({"what": "export", "at": number, "whole": whole}))  # noqa: T201
        number += 1
    number, ended = 0, None
    while ended is None:
        root = work / f"store-{number}"
        ended = killed_at(number, lambda to=root: import_once(archive, to))  # type: ignore[misc]
        kept = in_child(lambda to=root: engine_finds(to))  # type: ignore[misc]
        in_child(lambda to=root: import_once(archive, to))  # type: ignore[misc]
        whole = in_child(lambda to=root: engine_finds(to))  # type: ignore[misc]
        said = {"what": "import", "at": number, "kept": kept, "whole": whole}
        print(json.dumps(said))  # noqa: T201
        number += 1
    assert ended == SLOTS


if __name__ == "__main__":
    main()
