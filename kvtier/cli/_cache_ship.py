"""``kvtier cache export``, ``import`` and ``merge`` copy a cache to other machines."""

from __future__ import annotations

import contextlib
import errno
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.text import Text

from kvtier.archive import (
    export_chunks,
    import_chunks,
    merge_archives,
    namespace_for,
    open_archive,
    open_location,
    verify_archive,
)
from kvtier.cli._cache_keys import KeyList
from kvtier.cli._cache_ship_render import (
    Report,
    report_export,
    report_import,
    report_merge,
    report_verify,
)
from kvtier.cli._coverage import EngineArguments, needed_by
from kvtier.cli._options import AsJson, BadLimit, Only, Store, filled, quantity
from kvtier.cli._progress import show_bars
from kvtier.cli._render import make_console, show_json
from kvtier.errors import ConfigError
from kvtier.keys import ChunkKey
from kvtier.printable import printable
from kvtier.tiers.slab.explain import explained
from kvtier.tiers.slab.inspect import StoredNamespace, find_namespaces
from kvtier.tiers.slab.namespace import SLOTS, nbytes_of
from kvtier.units import parse_size

__all__ = ["export_cache", "import_cache", "merge_caches", "verify_parts"]

_NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
_LOCATION: Final = "a directory, or s3://, gs:// or az:// with a bucket and a prefix."

Zstd = Annotated[bool, typer.Option("--zstd", help="Compress each chunk with zstd.")]
Out = Annotated[str, typer.Argument(metavar="OUT", help=f"The archive to write: {_LOCATION}")]


def export_cache(  # noqa: PLR0913 - each is an option of the command
    directory: Store,
    out: Out,
    arguments: EngineArguments = None,
    *,
    keys: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Export only these chunks: a key per line, as ls shows it.",
            readable=False,
        ),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Export only the chunks of these prompts, JSON Lines as warmup reads them.",
            readable=False,
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(metavar="MODEL", help="The engine's --model, for --prompts.")
    ] = None,
    zstd: Zstd = False,
    namespace: Only = None,
    limit: BadLimit = 20,
    as_json: AsJson = False,
) -> None:
    """Copy the chunks of a cache into an archive.

    Only reads the cache, and may run beside an engine. Run the command again after an
    interrupt, or later: it writes what the archive lacks. Exits with 1 if a chunk is bad.
    """
    space = _one_of(filled(find_namespaces(directory, namespace)), directory)
    chosen = None if keys is None else KeyList.read(keys)
    wanted: Callable[[ChunkKey], bool] = chosen.take if chosen else lambda _: True
    if prompts is not None:
        if chosen or model is None:
            raise ConfigError("--prompts needs --model, and cannot be combined with --keys")
        wanted = needed_by(prompts, space, model, arguments or ())
    location = open_location(out)
    slots = nbytes_of(space.directory / SLOTS) // space.layout.slot_nbytes
    began_s = time.monotonic()
    with explained(space), _resumable(), _progress(f"exporting {space.name}", slots) as advance:
        found = export_chunks(
            space,
            location,
            compression="zstd" if zstd else "none",
            wanted=wanted,
            on_progress=advance,
        )
    missing = chosen.missing() if chosen else []
    seconds = time.monotonic() - began_s
    _finish(report_export(location, space, found, missing, seconds, limit), as_json=as_json)


def import_cache(
    archive: Annotated[
        str, typer.Argument(metavar="ARCHIVE", help=f"The archive: {_LOCATION}")
    ],
    directory: Store,
    *,
    capacity: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Largest size of the cache, such as the tier's capacity; by default the "
            "cache's present size, or the archive's size for a new cache.",
        ),
    ] = None,
    limit: BadLimit = 20,
    as_json: AsJson = False,
) -> None:
    """Copy the chunks of an archive into a cache.

    No engine may use the cache. Nothing is evicted: if room is short, the most recently used
    chunks of the archive are copied. Run the command again after an interrupt: it copies what
    the cache lacks. Exits with 1 if a part of the archive is damaged.
    """
    capacity_bytes = None if capacity is None else quantity("--capacity", capacity, parse_size)
    with _resumable():
        source = open_archive(open_location(archive))
    space = namespace_for(source.manifest.layout, directory)
    began_s = time.monotonic()
    total = source.manifest.chunks
    with explained(space), _resumable(), _progress(f"importing {space.name}", total) as advance:
        found = import_chunks(
            source, directory, capacity_bytes=capacity_bytes, on_progress=advance
        )
    seconds = time.monotonic() - began_s
    _finish(report_import(source, found, seconds, limit), as_json=as_json)


def merge_caches(
    archives: Annotated[
        list[str], typer.Argument(metavar="ARCHIVE", help=f"Archives to copy: {_LOCATION}")
    ],
    out: Out,
    *,
    zstd: Zstd = False,
    limit: BadLimit = 20,
    as_json: AsJson = False,
) -> None:
    """Copy the chunks of several archives into one.

    All are archives of one cache. Run the command again after an interrupt: it writes what OUT
    lacks. Exits with 1 if a part of an ARCHIVE is damaged.
    """
    with _resumable():
        sources = [open_archive(open_location(each)) for each in archives]
    location = open_location(out)
    layout = sources[0].manifest.layout
    began_s = time.monotonic()
    total = sum(each.manifest.chunks for each in sources)
    with _resumable(), _progress("merging", total) as advance:
        compression = "zstd" if zstd else "none"
        found = merge_archives(sources, location, compression=compression, on_progress=advance)
    seconds = time.monotonic() - began_s
    _finish(report_merge(location, layout, found, seconds, limit), as_json=as_json)


def verify_parts(text: str, limit: int, *, as_json: bool) -> None:
    """Verify the archive at ``text``, a directory or a URL, and print the result."""
    with _resumable():
        archive = open_archive(open_location(text))
    began_s = time.monotonic()
    with _resumable(), _progress("verifying", archive.manifest.chunks) as advance:
        damaged = verify_archive(archive, advance)
    seconds = time.monotonic() - began_s
    _finish(report_verify(archive, damaged, seconds, limit), as_json=as_json)


def _one_of(spaces: Sequence[StoredNamespace], directory: Path) -> StoredNamespace:
    if len(spaces) > 1:
        names = " or ".join(f"--namespace {space.name}" for space in spaces)
        raise ConfigError(f"{printable(str(directory))} has several caches; give {names}")
    return spaces[0]


@contextlib.contextmanager
def _progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show a progress bar; yield a function that moves it."""
    with show_bars() as progress:
        yield functools.partial(progress.advance, progress.add_task(what, total=total))


@contextlib.contextmanager
def _resumable() -> Iterator[None]:
    """Convert an ``OSError`` to a ConfigError that names the file and a remedy."""
    try:
        yield
    except OSError as error:
        location = printable(str(error.filename or "the archive"))
        remedy = "check the disk and its permissions"
        if error.errno in _NO_ROOM:
            remedy = "make room, and run the command again, which goes on where it stopped"
        raise ConfigError(f"{location}: {error.strerror or error}; {remedy}") from error


def _finish(report: Report, *, as_json: bool) -> None:
    """Print ``report``; exit with 1 if the report is bad."""
    if as_json:
        show_json(report.document)
    else:
        console = make_console()
        for line in report.lines:
            console.print(Text(line), soft_wrap=True)
    if report.is_bad:
        raise typer.Exit(1)
