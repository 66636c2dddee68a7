"""The commands ``kvtier check`` and ``kvtier doctor``. Both print findings as a table."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.table import Table
from rich.text import Text

from kvtier.cli._options import AsJson, EngineModel, File, finite
from kvtier.cli._render import make_console, show_json, show_prose
from kvtier.config import load_config
from kvtier.doctor import Examination, Finding, Status, examine
from kvtier.printable import printable
from kvtier.vllm.identity import declared_identity

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["check", "doctor", "show_examination"]

_STYLES: Final = {
    Status.OK: "green",
    Status.NOTE: "cyan",
    Status.WARNING: "yellow",
    Status.PROBLEM: "bold red",
}

Ranks = Annotated[
    int,
    typer.Option(
        "--data-parallel-size",
        min=1,
        max=4096,
        metavar="N",
        help="Data-parallel ranks that run on this machine.",
    ),
]


def check(
    file: File, *, ranks: Ranks = 1, model: EngineModel = None, as_json: AsJson = False
) -> None:
    """Check whether kvtier can start with FILE on this machine.

    Examines the file, the machine and the caches. Writes and measures nothing. Exits with 1 if
    there is a problem, and with 2 if FILE is invalid. Run it as the user that runs the engine.
    """
    _examine(file, ranks, model, None, as_json=as_json)


def doctor(
    file: File,
    *,
    ranks: Ranks = 1,
    seconds: Annotated[
        float,
        typer.Option(
            min=0.1,
            callback=finite,
            metavar="S",
            help="Seconds to read, and to write, each disk.",
        ),
    ] = 2.0,
    model: EngineModel = None,
    as_json: AsJson = False,
) -> None:
    """Check FILE and measure its disks.

    Does what 'kvtier check' does, tries O_DIRECT and measures each disk. The measurement uses
    up to half of the free space, 4 GiB at most, and frees it. With several data-parallel ranks,
    only the first rank's disks are measured. Exits with 1 if there is a problem, and with 2 if
    FILE is invalid. Run it before the engine runs.
    """
    _examine(file, ranks, model, seconds, as_json=as_json)


def _examine(
    file: Path, ranks: int, model: str | None, measure_s: float | None, *, as_json: bool
) -> None:
    config = load_config(file)
    identity = declared_identity(config, model)
    examination = examine(config, identity, ranks=ranks, measure_s=measure_s)
    if as_json:
        document = config.model_dump(mode="json", by_alias=True)
        show_json({"file": str(file), **examination.as_dict(), "config": document})
    else:
        show_examination(make_console(), file, examination)
    if examination.status is Status.PROBLEM:
        raise typer.Exit(1)


def show_examination(console: Console, file: Path, examination: Examination) -> None:
    """Print each finding with its line in the file and its remedy, then a summary."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold", max_width=max(22, console.width // 4))
    table.add_column(overflow="fold")
    for finding in examination.findings:
        status = Text(finding.status, style=_STYLES[finding.status])
        table.add_row(status, Text(finding.check), _text(finding))
    show_prose(console, table)
    summary = f"{printable(str(file))}: {_summary(examination)}"
    console.print(Text(summary), soft_wrap=True)


def _text(finding: Finding) -> Text:
    text = Text(printable(finding.reason))
    if finding.place and finding.status is not Status.OK:
        text.append(f"\nat: {finding.place}", style="dim")
    if finding.remedy:
        text.append(f"\nremedy: {finding.remedy}", style="dim")
    return text


def _summary(examination: Examination) -> str:
    def count(status: Status) -> str:
        number = sum(finding.status is status for finding in examination.findings)
        return f"{number} {status}{'s' if number > 1 else ''}" if number else ""

    counts = filter(None, map(count, (Status.PROBLEM, Status.WARNING, Status.NOTE)))
    words = [] if examination.status.severity > Status.NOTE.severity else ["ok"]
    return ", ".join([*words, *counts])
