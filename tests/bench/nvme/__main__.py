"""The command: ``python -m tests.bench.nvme [--json FILE] [--markdown FILE] [--quick] ...``."""

from __future__ import annotations

import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console

from tests.bench.nvme.against_itself import aged, busy
from tests.bench.nvme.against_peers import against_peers
from tests.bench.nvme.errors import BenchError
from tests.bench.nvme.fio import Fio
from tests.bench.nvme.fixed_costs import manager, opening
from tests.bench.nvme.lab import Lab, Plan
from tests.bench.nvme.machine import describe, require_disk
from tests.bench.nvme.report import print_table, write_json, write_markdown
from tests.bench.nvme.rows import Row

GIB = 1 << 30
RAM_NBYTES = 512 << 20
PIPED_WIDTH = 160
COMMAND = "nox -s bench -- nvme"
RUNS: tuple[tuple[tuple[str, ...], Callable[[Lab], Iterator[Row]]], ...] = (
    (("promote", "store", "cpu", "jitter"), against_peers),
    (("busy",), busy),
    (("aged",), aged),
    (("manager",), manager),
    (("open",), opening),
)
BENCHES = tuple(name for names, _ in RUNS for name in names)


def main(
    json: Annotated[Path | None, typer.Option(help="Write the rows there.")] = None,
    markdown: Annotated[
        Path | None, typer.Option(help="Write the table of docs/benchmarks.md there.")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="2 rounds over 1 GiB instead of 5 over 4 GiB.")
    ] = False,
    only: Annotated[
        str, typer.Option(help=f"Benches to run, separated by commas: {', '.join(BENCHES)}.")
    ] = ",".join(BENCHES),
    directory: Annotated[
        Path | None, typer.Option("--dir", help="A directory on the disk to measure.")
    ] = None,
) -> None:
    """Compare kvtier's NVMe tier with fio and with vLLM's own tiering."""
    plan = Plan(
        rounds=2 if quick else 5,
        working_set_nbytes=GIB if quick else 4 * GIB,
        ram_nbytes=RAM_NBYTES,
        only=_chosen(only),
    )
    console = Console(width=None if sys.stdout.isatty() else PIPED_WIDTH)
    parent = directory or Path(tempfile.gettempdir())
    require_disk(parent, plan.disk_nbytes)
    with tempfile.TemporaryDirectory(prefix="kvtier-bench-", dir=parent) as scratch:
        machine = describe(Path(scratch)) | {"fio": Fio.version()}
        rows: list[Row] = []
        with Lab(plan, Path(scratch), console) as lab:
            for row in _run(lab):
                rows.append(row)
                if json is not None:
                    write_json(json, rows)  # at once: the whole takes half an hour
    print_table(console, rows, machine)
    if markdown is not None:
        write_markdown(markdown, rows, machine, f"{COMMAND}{' --quick' if quick else ''}")


def _run(lab: Lab) -> Iterator[Row]:
    for names, bench in RUNS:
        if lab.plan.only.intersection(names):
            yield from (row for row in bench(lab) if row.bench in lab.plan.only)


def _chosen(only: str) -> frozenset[str]:
    """Return the names in ``only``.

    Raises:
        BenchError: There is no such bench.
    """
    names = frozenset(filter(None, only.split(",")))
    unknown = ", ".join(sorted(names - set(BENCHES)))
    if unknown:
        raise BenchError(f"--only {unknown}: no such bench; there are {', '.join(BENCHES)}")
    return names


def _stop(*_: object) -> NoReturn:
    """Leave by an exception, so that what was created is removed."""
    raise SystemExit(143)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _stop)
    try:
        app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)
        app.command()(main)
        app()
    except BenchError as error:
        sys.exit(f"nvme bench: {error}")
