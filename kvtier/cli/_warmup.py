"""The command ``kvtier warmup`` fills the persistent tiers before the first user comes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvtier.cli._coverage import (
    BAD_LINES,
    EngineArguments,
    OnBadLine,
    Prompts,
    coverage_rows,
    show_rows,
)
from kvtier.cli._options import AsJson, File, choice, numpy_needed, quantity
from kvtier.cli._progress import show_bars
from kvtier.cli._render import make_console, show_json, show_line
from kvtier.units import approximate_duration, approximate_size, parse_duration, parse_size

if TYPE_CHECKING:
    from rich.progress import Progress as Bars

    from kvtier.warmup import (
        Finished,
        Planned,
        Progress,
        Saving,
        WarmupEvent,
        WarmupJob,
        WarmupReport,
    )

__all__ = ["warmup"]

_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
_GO_ON = "run the same command again to go on"


def warmup(  # noqa: PLR0913 - each is an option of the command
    file: File,
    arguments: EngineArguments = None,
    *,
    model: Annotated[
        str, typer.Option(metavar="MODEL", help="The model, as in 'vllm serve MODEL'.")
    ],
    prompts: Prompts,
    budget: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Write at most SIZE to each tier, as in 500GiB."),
    ] = None,
    retain: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="Keep the prompts' chunks for TIME, as in 30d, within retain_quota.",
        ),
    ] = None,
    on_bad_line: OnBadLine = "fail",
    new_cache: Annotated[
        bool,
        typer.Option(
            "--new-cache",
            help="Fill a new cache even if the model has one with other settings.",
        ),
    ] = False,
    server: Annotated[
        str | None,
        typer.Option(
            metavar="URL[,URL]",
            help="Send the prompts to these running servers, to every data-parallel rank.",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be computed.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Compute known prompts and store their KV.

    Runs vLLM with FILE and the arguments after --, which must be those of the deployment, and
    computes every prompt that is not stored yet. With --server, running servers compute them.
    Stop it with Ctrl-C; run it again to continue.
    Exits with 1 if a prompt could not be stored.
    """
    with numpy_needed("kvtier warmup", "vllm"):
        from kvtier.warmup import WarmupJob, WarmupOptions  # noqa: PLC0415 - imports numpy

    job = WarmupJob(
        file,
        model=model,
        prompts=prompts,
        arguments=arguments or (),
        options=WarmupOptions(
            budget_bytes=None if budget is None else quantity("--budget", budget, parse_size),
            skip_bad_lines=choice("--on-bad-line", on_bad_line, BAD_LINES) == "skip",
            new_cache=new_cache,
            dry_run=dry_run,
            servers=tuple(server.split(",")) if server else (),
            retain_s=None if retain is None else quantity("--retain", retain, _days),
        ),
    )
    try:
        with _stdout_kept(), show_bars() as bars:
            last = asyncio.run(_follow(job, prompts, bars))
    except KeyboardInterrupt:
        typer.echo(f"interrupted; {_GO_ON}", err=True)
        raise
    if not _show(last, as_json=as_json):
        raise typer.Exit(1)


def _days(text: str) -> float:
    return parse_duration(text, likely_unit="d")


async def _follow(job: WarmupJob, prompts: Path, bars: Bars) -> WarmupEvent:
    """Run ``job``, show its progress and return its last event.

    After a signal, SystemExit has 128 plus the signal's number, as in shells.
    """
    from kvtier import warmup as events  # noqa: PLC0415 - as above

    bar = bars.add_task("reading prompts, starting vLLM", total=None)
    last: WarmupEvent | None = None
    with _cancelled_by_signals() as signals:
        try:
            async for last in job:
                if isinstance(last, events.LineSkipped):
                    typer.echo(f"note: {last.bad.error(prompts)}", err=True)
                elif isinstance(last, events.Progress):
                    bars.update(bar, **_shown(last))
        except asyncio.CancelledError:
            for number in signals:
                typer.echo(f"stopped; {_GO_ON}", err=True)
                raise SystemExit(128 + number) from None
            raise
    assert last is not None, "a job without an error has an event"
    return last


def _shown(progress: Progress) -> dict[str, Any]:
    """Return the values of ``progress`` that a progress bar shows."""
    what = f"{progress.tokens_per_s:,.0f} tokens/s"
    if progress.unwritten_chunks:
        what = f"{what}, {progress.unwritten_chunks:,} chunks to write"
    return {
        "description": what,
        "completed": progress.tokens,
        "total": max(progress.planned_tokens, 1),
    }


@contextlib.contextmanager
def _cancelled_by_signals() -> Iterator[list[int]]:
    """Cancel the current task on SIGTERM or SIGHUP; yield a list that collects the signals.

    On Ctrl-C, asyncio itself cancels the task. An ignored signal stays ignored.
    """
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    came: list[int] = []
    taken = [each for each in _SIGNALS if signal.getsignal(each) is signal.SIG_DFL]

    def cancel(number: int) -> None:
        came.append(number)
        if task is not None:
            task.cancel()

    for number in taken:
        loop.add_signal_handler(number, cancel, number)
    try:
        yield came
    finally:
        for number in taken:
            loop.remove_signal_handler(number)


@contextlib.contextmanager
def _stdout_kept() -> Iterator[None]:
    """Redirect vLLM's output from stdout to stderr; stdout is for the command's result."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


def _show(last: WarmupEvent, *, as_json: bool) -> bool:
    """Print the result; return False if a planned prompt could not be stored."""
    from kvtier import warmup as events  # noqa: PLC0415 - as above

    if isinstance(last, events.Planned):
        if as_json:
            show_json(_plan_document(last))
        else:
            show_rows(make_console(), _plan_rows(last))
        return True
    assert isinstance(last, events.Finished), last
    if as_json:
        show_json(_document(last))
    else:
        _show_report(last.report)
    return last.report.is_complete


def _plan_document(planned: Planned) -> dict[str, Any]:
    return asdict(planned) | {"before": planned.before.as_dict()}


def _document(finished: Finished) -> dict[str, Any]:
    report = finished.report
    return asdict(report) | {
        "planned": _plan_document(report.planned),
        "coverage": report.coverage and report.coverage.as_dict(),
        "is_complete": report.is_complete,
    }


def _plan_rows(planned: Planned) -> Iterator[tuple[str, str]]:
    size = "" if planned.nbytes is None else f", {approximate_size(planned.nbytes)}"
    yield "to compute", f"{planned.prompts:,} prompts, {planned.tokens:,} tokens{size}"
    for count, name, why in (
        (planned.stored, "stored", "already"),
        (planned.shared, "shared", "contained in others"),
        (planned.short, "too short", "less than one chunk, which no tier stores"),
        (planned.left_out, "left out", "no room in the budget or the capacity"),
    ):
        if count:
            yield name, f"{count:,} prompts: {why}"


def _report_rows(report: WarmupReport) -> Iterator[tuple[str, str]]:
    yield from _plan_rows(report.planned)
    if report.coverage is not None:
        yield from coverage_rows(report.coverage, nbytes_per_token=report.nbytes_per_token)
    if report.computed_tokens:
        rate = report.computed_tokens / max(report.seconds, 1e-9)
        seconds = approximate_duration(report.seconds)
        yield (
            "computed",
            f"{report.computed_tokens:,} tokens in {seconds}, {rate:,.0f} tokens/s",
        )
    for each in report.verified:
        yield "verified", f"{each.chunks:,} chunks of {each.tier}, {each.bad:,} bad"
    if report.retained_chunks:
        yield "retained", f"{report.retained_chunks:,} chunks"
    if report.saving is not None:
        yield "saves", _saving(report.saving)


def _show_report(report: WarmupReport) -> None:
    console = make_console()
    show_rows(console, _report_rows(report))
    for bad in report.failed:
        show_line(console, f"line {bad.line}: {bad.problem}")
    if not report.is_complete:
        show_line(console, f"not all of it is stored; {_GO_ON}")


def _saving(saving: Saving) -> str:
    return (
        f"loading all prompts takes {approximate_duration(saving.load_s)} in place of "
        f"{approximate_duration(saving.compute_s)}"
    )
