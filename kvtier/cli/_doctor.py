"""The doctor's report, for a person and for a program."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rich.table import Table
from rich.text import Text

from kvtier.cli._render import show_prose
from kvtier.doctor import Examination, Finding, Verdict

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["examination_document", "show_examination"]

_STYLES: Final = {
    Verdict.OK: "green",
    Verdict.NOTE: "cyan",
    Verdict.WARNING: "yellow",
    Verdict.PROBLEM: "bold red",
}


def show_examination(console: Console, examination: Examination) -> None:
    """Print one row per finding, its remedy below it, and the count of what is not well."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold", max_width=max(22, console.width // 4))
    table.add_column(overflow="fold")
    for finding in examination.findings:
        verdict = Text(finding.verdict, style=_STYLES[finding.verdict])
        table.add_row(verdict, Text(finding.check), _words(finding))
    show_prose(console, table)
    console.print(_sum_up(examination), soft_wrap=True)


def examination_document(file: Path, examination: Examination) -> dict[str, Any]:
    """Return the report as plain values; keys of figures carry their units."""
    return {
        "file": str(file),
        "verdict": examination.verdict.value,
        "findings": [
            {
                "check": finding.check,
                "verdict": finding.verdict.value,
                "found": finding.found,
                "remedy": finding.remedy,
                "key": finding.key,
            }
            for finding in examination.findings
        ],
        "measured": {name: rates.as_dict() for name, rates in examination.rates.items()},
    }


def _words(finding: Finding) -> Text:
    text = Text(finding.found)
    if finding.remedy:
        text.append(f"\nremedy: {finding.remedy}", style="dim")
    return text


def _sum_up(examination: Examination) -> str:
    counts = [
        (sum(finding.verdict is verdict for finding in examination.findings), verdict.value)
        for verdict in (Verdict.PROBLEM, Verdict.WARNING, Verdict.NOTE)
    ]
    words = [f"{count} {name}{'s' if count > 1 else ''}" for count, name in counts if count]
    return ", ".join(words) or "nothing to remedy"
