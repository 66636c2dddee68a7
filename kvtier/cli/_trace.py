"""The command ``kvtier trace`` describes and generates traces.

The module also writes the output files of other commands.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, cast

import typer

from kvtier.cli._options import AsJson, Commands, choice, finite
from kvtier.cli._render import make_console, show_facts, show_json, show_line
from kvtier.errors import ConfigError
from kvtier.printable import printable
from kvtier.sim.traces import (
    FORMAT_NAMES,
    GENERATORS,
    Trace,
    TraceFormat,
    describe,
    generate,
    read_trace,
    write_trace,
)

_REMEDY = "name a file in a directory you may write to"
__all__ = [
    "FormatOption",
    "TokensPerId",
    "TraceFile",
    "check_outputs",
    "read",
    "show_assumptions",
    "trace_app",
    "write_output",
]

trace_app = Commands(help="Describe and generate traces.")

TraceFile = Annotated[
    Path,
    typer.Argument(metavar="TRACE", help="Trace file; may be gzip or zstd.", readable=False),
]
FormatOption = Annotated[
    str,
    typer.Option(
        "--format", metavar="NAME", help=f"Format of TRACE: {', '.join(FORMAT_NAMES)}."
    ),
]
TokensPerId = Annotated[
    int | None,
    typer.Option(
        "--tokens-per-id",
        min=1,
        max=1 << 20,
        metavar="N",
        help="Tokens per chunk id; by default as in the records.",
    ),
]


def read(path: Path, format_name: str, tokens_per_id: int | None) -> Trace:
    """Read a trace; print its warnings on stderr."""
    name = cast("TraceFormat", choice("--format", format_name, FORMAT_NAMES))
    trace = read_trace(path, format_name=name, tokens_per_id=tokens_per_id)
    for warning in trace.warnings:
        typer.echo(f"warning: {printable(str(path))}: {warning}", err=True)
    return trace


def show_assumptions(trace: Trace) -> None:
    """Print the assumptions under which ``trace`` was read."""
    show_line(make_console(), f"assumed for {trace.name}: {'; '.join(trace.assumed)}")


@trace_app.command()
def info(
    trace: TraceFile,
    *,
    format_name: FormatOption = "auto",
    tokens_per_id: TokensPerId = None,
    as_json: AsJson = False,
) -> None:
    """Print figures of TRACE and the highest possible hit ratios."""
    loaded = read(trace, format_name, tokens_per_id)
    facts = describe(loaded)
    if as_json:
        show_json(facts | loaded.reading())
        return
    show_facts({**facts, "sha256": facts["sha256"][:16]})
    show_assumptions(loaded)


@trace_app.command("generate")
def generate_trace(
    workload: Annotated[
        str, typer.Argument(metavar="WORKLOAD", help=f"One of: {', '.join(GENERATORS)}.")
    ],
    *,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="File to write or replace.")
    ],
    sessions: Annotated[
        int, typer.Option(min=1, metavar="N", help="Number of sessions.")
    ] = 1000,
    per_s: Annotated[
        float,
        typer.Option(
            min=1e-6, callback=finite, metavar="N", help="Sessions that start per second."
        ),
    ] = 1.0,
    chunk_tokens: Annotated[
        int, typer.Option(min=1, metavar="N", help="Tokens of one chunk.")
    ] = 512,
    seed: Annotated[int, typer.Option(metavar="N", help="Equal seeds give equal traces.")] = 0,
) -> None:
    """Generate the traffic of sessions that start at random.

    WORKLOAD is chat (conversations), agents (long tool loops) or shared (single questions after
    shared prompts). The manual's page on the command line lists the distributions.
    """
    choice("WORKLOAD", workload, GENERATORS)
    check_outputs({"--output": output}, [])
    trace = generate(
        workload, sessions=sessions, per_s=per_s, chunk_tokens=chunk_tokens, seed=seed
    )
    write_output("--output", output, partial(write_trace, trace))
    name = printable(str(output))
    typer.echo(f"{name}: {trace.requests:,} requests, {trace.refs:,} references")


def check_outputs(outputs: Mapping[str, Path | None], traces: Iterable[Path]) -> None:
    """Check that output files can be written and do not replace an input.

    ``outputs`` has the file of each option, or None; the command reads ``traces``.

    Raises:
        ConfigError: An output cannot be written, is one of the traces, or is named twice.
    """
    taken = [(trace, "the trace itself") for trace in traces]
    for option, path in outputs.items():
        if path is None:
            continue
        _check_writable(option, path)
        for other, what in taken:
            if _is_one_file(path, other):
                name = printable(str(path))
                raise ConfigError(f"{option} {name}: is {what}; name another file")
        taken.append((path, f"the file of {option} as well"))


def write_output(option: str, path: Path, write: Callable[[Path], None]) -> None:
    """Call ``write(path)``; convert an OSError to a ConfigError that names the option."""
    try:
        write(path)
    except OSError as error:
        raise _refusal(option, path, error.strerror or str(error)) from error


def _check_writable(option: str, path: Path) -> None:
    try:
        problem = _obstacle(path)
    except OSError as error:  # a directory above may not be entered, or the name is too long
        raise _refusal(option, path, error.strerror or str(error)) from error
    if problem:
        raise _refusal(option, path, problem)


def _obstacle(path: Path) -> str:
    """Return why ``path`` cannot be written; an empty text if ``path`` can be written."""
    if path.is_dir():
        return "is a directory"
    if not path.parent.is_dir():
        return f"there is no directory {printable(str(path.parent))}"
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        return "permission denied"
    return ""


def _is_one_file(path: Path, other: Path) -> bool:
    """Return whether both paths lead to the same regular file, directly or through links."""
    try:
        if path.exists() and other.exists():
            return path.is_file() and path.samefile(other)
        return path.resolve() == other.resolve()
    except OSError:  # reading the trace reports the error
        return False


def _refusal(option: str, path: Path, problem: str) -> ConfigError:
    name = printable(str(path))
    return ConfigError(f"{option} {name}: cannot be written: {problem}; {_REMEDY}")
