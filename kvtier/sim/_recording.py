"""Reads a recording of calls: its lines, and the setup that its first line names."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvtier.config import KvtierConfig
from kvtier.errors import ConfigError
from kvtier.recording import CALLS_MARK, ManagerSetup
from kvtier.sim.traces._source import Source, open_source

__all__ = ["Line", "is_recording", "recorded_lines", "recorded_setup"]

Line = dict[str, Any]


def is_recording(path: Path) -> bool:
    """Return whether the file at ``path`` is a recording of calls.

    Raises:
        TraceError: It cannot be read.
    """
    return f'"{CALLS_MARK}"'.encode() in open_source(path).content[:64]


def recorded_lines(source: Source) -> Iterator[tuple[int, Line]]:
    """Yield the numbered lines of ``source``; the last may be cut short, as by a SIGKILL."""
    lines = source.content.split(b"\n")
    whole = len(lines) - 1
    for number, raw in enumerate(lines[:whole], start=1):
        try:
            line = json.loads(raw)
        except ValueError as error:
            raise source.error(number, f"not JSON: {error}", "the file is damaged") from error
        if not isinstance(line, dict):
            raise source.error(number, "not an object", "the file is damaged")
        yield number, line


def recorded_setup(
    source: Source, number: int, header: Line, config: KvtierConfig
) -> ManagerSetup:
    """Return what the recorded manager was built from.

    Raises:
        TraceError: The first line does not say.
        ConfigError: ``config`` is another one.
    """
    try:
        then = dict(header["decides"])
        setup = ManagerSetup(
            config=_as_loaded(config, then),
            capacities=[int(slots) for slots in header["capacities"]],
            slot_nbytes=int(header["slot_bytes"]),
            chunk_tokens=int(header["block_tokens"]),
            counting_group=int(header.get("counting_group", 0)),
        )
        version = header[CALLS_MARK]
    except (KeyError, TypeError, ValueError) as error:
        remedy = "name a file calls-*.jsonl of a recording"
        raise source.error(number, "not the beginning of a recording", remedy) from error
    now = json.loads(setup.line())
    if version != now[CALLS_MARK]:
        problem = f"recorded in format {version}, this is {now[CALLS_MARK]}"
        raise source.error(number, problem, "use the version of kvtier that recorded it")
    problems = [
        f"{key}: {config.origin.source or 'the configuration'} has "
        f"{now['decides'].get(key)}, the recording {then.get(key)}"
        for key in sorted(then.keys() | now["decides"].keys())
        if then.get(key) != now["decides"].get(key)
    ]
    if problems:
        remedy = (
            "a recording of calls fits one configuration; replay the recorded requests to "
            "try another"
        )
        raise ConfigError("\n".join([*problems, remedy]))
    return setup


def _as_loaded(config: KvtierConfig, then: Line) -> KvtierConfig:
    """Return ``config`` with the load path that the door chose where it left the choice."""
    chosen = then.get("transfer.load_path")
    if config.transfer.load_path != "auto" or chosen is None:
        return config
    transfer = config.transfer.model_copy(update={"load_path": chosen})
    return config.model_copy(update={"transfer": transfer})
