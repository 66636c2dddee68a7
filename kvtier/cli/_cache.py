"""``kvtier cache``: inspect and clean a cache."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Final, cast

import typer

from kvtier.archive import has_archive
from kvtier.cli import _cache_render as render
from kvtier.cli._cache_keys import KeyPattern
from kvtier.cli._cache_ship import export_cache, import_cache, merge_caches, verify_parts
from kvtier.cli._coverage import coverage
from kvtier.cli._options import (
    AsJson,
    BadLimit,
    Commands,
    Only,
    Store,
    choice,
    filled,
    quantity,
)
from kvtier.cli._progress import pulse, show_bars
from kvtier.cli._render import make_console, show_json
from kvtier.errors import ConfigError
from kvtier.keys import ChunkKey
from kvtier.tiers.slab import maintain
from kvtier.tiers.slab.explain import explained, missing_cache
from kvtier.tiers.slab.index_reader import Entry, IndexReader, Order
from kvtier.tiers.slab.inspect import StoredNamespace, find_namespaces, holder_of, index_nbytes
from kvtier.tiers.slab.namespace import SLOTS
from kvtier.tiers.slab.removals import RemovalReason, find_marks
from kvtier.tiers.slab.schema import Removal
from kvtier.tiers.slab.verify import verify as verify_namespace
from kvtier.units import parse_duration

__all__ = ["cache"]

cache = Commands(name="cache", help="Inspect, clean and ship the cache of an NVMe tier.")
cache.command()(coverage)

_ORDERS: Final[tuple[str, ...]] = ("last-use", "stored", "hits")
_MOST_ROWS = (1 << 63) - 1  # the largest integer of SQLite
_STOP_FIRST = "stop that engine first"
_STOP_OR_RESET = (
    f"{_STOP_FIRST}, or empty all tiers: with llm.reset_prefix_cache(reset_connector=True), on "
    "a server with VLLM_SERVER_DEV_MODE=1 by POST /reset_prefix_cache?reset_external=true"
)


@cache.command()
def stat(directory: Store, *, namespace: Only = None, as_json: AsJson = False) -> None:
    """Print what a cache holds and who uses it.

    Only reads, and may run beside an engine.
    """
    reports = [_report(space) for space in find_namespaces(directory, namespace)]
    if as_json:
        show_json({"path": str(directory), "namespaces": [r.as_dict() for r in reports]})
    else:
        render.show_reports(make_console(), reports)


@cache.command()
def ls(
    directory: Store,
    *,
    namespace: Only = None,
    sort: Annotated[
        str, typer.Option(metavar="ORDER", help=f"Order: {', '.join(_ORDERS)}.")
    ] = "last-use",
    limit: Annotated[
        int, typer.Option("--limit", min=0, metavar="N", help="Chunks to list; 0 lists all.")
    ] = 50,
    as_json: AsJson = False,
) -> None:
    """List the chunks of a cache.

    Only reads, and may run beside an engine.
    """
    order = cast("Order", choice("--sort", sort, _ORDERS))
    listings = []
    for space in filled(find_namespaces(directory, namespace)):
        with explained(space), IndexReader(space) as reader:
            entries = reader.entries(order, min(limit, _MOST_ROWS) or -1)
            chunks, reset_at = reader.totals().chunks, reader.reset_at()
            listings.append(render.Listing(space, entries, chunks, reset_at))
    if as_json:
        show_json([listing.as_dict() for listing in listings])
    else:
        render.show_listings(make_console(), listings)


@cache.command()
def verify(
    where: Annotated[
        str,
        typer.Argument(
            metavar="DIR",
            help="A tier's path, one model's directory in it, or an archive (directory or "
            "bucket URL).",
        ),
    ],
    *,
    namespace: Only = None,
    limit: BadLimit = 20,
    as_json: AsJson = False,
) -> None:
    """Compare every chunk with its checksum.

    Exits with 1 if a chunk is bad: an engine would recompute that chunk. Only reads, and may
    run beside an engine, but takes bandwidth of the disk.
    """
    if has_archive(where):
        verify_parts(where, limit, as_json=as_json)
        return
    checks: list[render.Check] = []
    spaces = filled(find_namespaces(Path(where), namespace))
    with show_bars() as progress:
        for space in spaces:
            task = progress.add_task(space.name, total=_slots(space))
            advance = functools.partial(progress.advance, task)
            with explained(space), IndexReader(space) as reader:
                found = verify_namespace(space, reader, on_progress=advance)
                checks.append(render.Check(space, found, reader.reset_at()))
    if as_json:
        show_json([render.verification_document(check, limit) for check in checks])
    else:
        render.show_verifications(make_console(), checks, limit)
    if any(check.found.bad for check in checks):
        raise typer.Exit(1)


@cache.command()
def explain(
    directory: Store,
    key: Annotated[
        str,
        typer.Argument(
            metavar="KEY",
            help="A chunk's key as in ls and in the log: 8 hex digits or more, with or without "
            "/GROUP.",
        ),
    ],
    *,
    namespace: Only = None,
    as_json: AsJson = False,
) -> None:
    """Print where a chunk is, or why it was removed.

    Also prints the time of the store and the number of loads. Exits with 1 if the chunk is
    not in the cache. Only reads, and may run beside an engine. Pass a configuration file as DIR
    to ask its shared tier.
    """
    if directory.is_file() and directory.suffix in {".yaml", ".yml"}:
        _explain_shared(directory, key, namespace, as_json=as_json)
        return
    pattern = KeyPattern.parse(key)
    spaces = filled(find_namespaces(directory, namespace))
    answers = [_explanation(space, pattern) for space in spaces]
    found = [answer for answer in answers if answer.entry]
    telling = found or [answer for answer in answers if answer.reason] or answers
    if as_json:
        show_json({"key": key, "answers": [answer.as_dict() for answer in telling]})
    else:
        render.show_explanations(make_console(), key, telling)
    if not found:
        raise typer.Exit(1)


@cache.command()
def evict(  # noqa: PLR0913 - each is an option of the command
    directory: Store,
    keys: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY", help="Chunks to remove; written as for explain."),
    ] = None,
    *,
    older_than: Annotated[
        str | None,
        typer.Option(metavar="AGE", help="Remove chunks not stored or used for AGE, as in 7d."),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Remove all chunks.")] = False,
    namespace: Only = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Remove without asking.")] = False,
    as_json: AsJson = False,
) -> None:
    """Remove chunks from a cache that no engine uses.

    Give keys, --older-than or --all. The slots are free at the engine's next start; the files
    keep their size. Without --yes the command shows what it would remove and asks.
    """
    ways = [bool(keys), older_than is not None, everything]
    if sum(ways) != 1:
        raise ConfigError("give exactly one of KEYs, --older-than and --all")
    spaces = filled(find_namespaces(directory, namespace))
    with _held(spaces, _STOP_OR_RESET):
        chosen = _find_keys(spaces, keys) if keys else _find_unused(spaces, older_than)
        if not yes and any(entries for _, entries in chosen):
            typer.confirm(f"Remove {render.removal_words(chosen)}?", abort=True, err=True)
        _remove(chosen)
    if as_json:
        show_json(render.removal_document(chosen))
    else:
        render.show_removal(make_console(), chosen)


@cache.command()
def compact_index(directory: Store, *, namespace: Only = None, as_json: AsJson = False) -> None:
    """Remove unused space from the index of a cache.

    Rewrites the whole index. Stop the engine that uses the cache first.
    """
    spaces = filled(find_namespaces(directory, namespace))
    done: list[tuple[StoredNamespace, tuple[int, int]]] = []
    with _held(spaces, _STOP_FIRST), show_bars() as progress:
        for space in spaces:
            with explained(space), pulse(progress, f"compacting {space.name}") as sign:
                with IndexReader(space) as reader:
                    reader.totals()  # fails if the index is missing or damaged
                done.append((space, maintain.compact_index(space, sign)))
    if as_json:
        show_json([render.compaction_document(*one) for one in done])
    else:
        render.show_compactions(make_console(), done)


cache.command("export")(export_cache)
cache.command("import")(import_cache)
cache.command("merge")(merge_caches)


def _report(space: StoredNamespace) -> render.Report:
    report = render.Report(space, slots=_slots(space))
    try:
        with explained(space):
            report.holder = holder_of(space.directory)
            report.disk_nbytes = _disk_nbytes(space.directory)
            report.index_nbytes = index_nbytes(space)
            with IndexReader(space) as reader:
                report.totals = reader.totals()
                report.reset_at = reader.reset_at()
                report.retained, report.retained_until = reader.retained(_now())
                report.problem = _problem_of_slots(space, reader)
    except ConfigError as error:
        report.problem = str(error)
    return report


def _problem_of_slots(space: StoredNamespace, reader: IndexReader) -> str:
    """Return an error text if the slot file is too short for the index, else an empty text."""
    path = space.directory / SLOTS
    lost = reader.chunks_from(_slots(space))
    if not lost:
        return ""
    if not path.exists():
        return missing_cache(path)
    return (
        f"{path} ends before {lost:,} of the chunks; an engine would start without them; "
        "if this is a copy, make it again"
    )


def _explain_shared(file: Path, key: str, namespace: str | None, *, as_json: bool) -> None:
    from kvtier.cli._cache_shared import explain_shared  # noqa: PLC0415 - imports asyncio

    answer = explain_shared(file, key, namespace)
    if as_json:
        show_json({"key": key, "answers": [answer.as_dict()]})
    else:
        render.show_pairs(make_console(), key, answer.lines())
    if not answer.is_stored:
        raise typer.Exit(1)


def _explanation(space: StoredNamespace, pattern: KeyPattern) -> render.Explanation:
    with explained(space), IndexReader(space) as reader:
        entry = _one_entry(pattern, reader)
        answer = render.Explanation(space, entry)
        if entry is not None:
            answer.less_recent = reader.less_recent(entry)
            answer.reset_at = reader.reset_at()
        else:
            _explain_absence(answer, pattern, list(reader.removals()))
    return answer


def _explain_absence(
    answer: render.Explanation, pattern: KeyPattern, removals: Sequence[Removal]
) -> None:
    """Add to ``answer`` when and why the chunk that matches ``pattern`` was removed.

    The ``removals`` are newest first. Several matching keys are a ConfigError.
    """
    marks = pattern.of_marks()
    found = find_marks(removals, marks)
    if len(found) > 1:
        some = ", ".join(sorted(map(marks.short_of, found))[:3])
        raise ConfigError(
            f"{len(found)} removed chunks match {pattern.digits}: {some}; give one key"
        )
    for mark, removal in found.items():
        answer.short_key = marks.short_of(mark)
        answer.left_at, answer.reason = removal.at, removal.reason
    answer.removal_log_begins_at = removals[-1].at if removals else 0
    damaged = RemovalReason.DAMAGED.value
    answer.damaged_at = next((row.at for row in removals if row.reason == damaged), 0)


def _one_entry(pattern: KeyPattern, reader: IndexReader) -> Entry | None:
    """Return the newest entry of the only matching key; None if no key matches."""
    found: dict[ChunkKey, Entry] = {}
    for entry in reader.entries_of_prefix(pattern.common_digits):
        if pattern.matches(entry.key):
            rival = found.setdefault(entry.key, entry)
            found[entry.key] = max(entry, rival, key=lambda entry: entry.generation)
    if len(found) > 1:
        some = ", ".join(key.hex() for key in sorted(found)[:3])
        raise ConfigError(
            f"{len(found)} keys begin with {pattern.digits}: {some}; give more digits"
        )
    return next(iter(found.values()), None)


def _find_unused(
    spaces: Sequence[StoredNamespace], older_than: str | None
) -> list[tuple[StoredNamespace, list[Entry]]]:
    """Return the chunks neither stored nor used for ``older_than`` (``7d``); all if None."""
    since = None
    if older_than is not None:
        days = functools.partial(parse_duration, likely_unit="d")
        since = _now() - int(quantity("--older-than", older_than, days))
    chosen = []
    with show_bars() as progress, pulse(progress, "looking"):
        for space in spaces:
            with explained(space), IndexReader(space) as reader:
                if since is None:
                    entries = reader.entries("stored", -1)
                else:
                    entries = reader.entries_unused_since(since)
                chosen.append((space, entries))
    return chosen


def _find_keys(
    spaces: Sequence[StoredNamespace], keys: Sequence[str]
) -> list[tuple[StoredNamespace, list[Entry]]]:
    """Return the chunks with the given keys.

    Raises:
        ConfigError: A key is invalid, matches several chunks, or matches none.
    """
    patterns = {text: KeyPattern.parse(text) for text in keys}
    chosen, missing = [], set(patterns)
    with show_bars() as progress:
        task = progress.add_task("looking", total=len(spaces) * len(patterns))
        for space in spaces:
            with explained(space), IndexReader(space) as reader:
                found = []
                for text, pattern in patterns.items():
                    if entry := _one_entry(pattern, reader):
                        found.append(entry)
                        missing.discard(text)
                    progress.advance(task)
            chosen.append((space, list(dict.fromkeys(found))))
    for text in patterns:
        if text in missing:
            raise ConfigError(f"no chunk has the key {text}; nothing was removed")
    return chosen


def _remove(chosen: Sequence[tuple[StoredNamespace, Sequence[Entry]]]) -> None:
    with show_bars() as progress:
        for space, entries in chosen:
            if entries:
                with explained(space), pulse(progress, f"removing {space.name}") as sign:
                    maintain.drop_chunks(space, entries, sign)


@contextlib.contextmanager
def _held(spaces: Sequence[StoredNamespace], remedy: str) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for space in spaces:
            with explained(space):
                stack.enter_context(maintain.hold(space, remedy))
        yield


def _slots(space: StoredNamespace) -> int:
    try:
        return (space.directory / SLOTS).stat().st_size // space.layout.slot_nbytes
    except FileNotFoundError:
        return 0


def _disk_nbytes(directory: Path) -> int:
    nbytes = 0
    for path in directory.iterdir():
        with contextlib.suppress(FileNotFoundError):  # the log is removed when its engine ends
            nbytes += path.lstat().st_blocks * 512
    return nbytes


def _now() -> int:
    return int(datetime.now(UTC).timestamp())
