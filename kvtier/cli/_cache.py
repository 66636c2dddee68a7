"""``kvtier cache``: the commands and their options.

Each command imports its implementation when it runs.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, cast

import typer

from kvtier.cli._options import AsJson, Commands, choice

if TYPE_CHECKING:
    from kvtier.tiers.slab.inspect import Order

__all__ = ["cache"]

cache = Commands(name="cache", help="Inspect and clean the store of an NVMe tier.")

_ORDERS: Final[tuple[str, ...]] = ("last-use", "stored", "hits")
_DIR = "The path of an nvme tier, or one model's directory in it."

Store = Annotated[Path, typer.Argument(metavar="DIR", help=_DIR, readable=False)]
Only = Annotated[
    str | None,
    typer.Option("--namespace", "-n", metavar="NAME", help="Only this directory of DIR."),
]


@cache.command()
def stat(directory: Store, *, namespace: Only = None, as_json: AsJson = False) -> None:
    """Print what a store holds and who uses it.

    Only reads, and may run beside an engine.
    """
    from kvtier.cli import _cache_actions as actions  # noqa: PLC0415

    actions.stat(directory, namespace, as_json=as_json)


@cache.command()
def ls(
    directory: Store,
    *,
    namespace: Only = None,
    sort: Annotated[
        str, typer.Option(metavar="ORDER", help=f"Order: {', '.join(_ORDERS)}.")
    ] = "last-use",
    limit: Annotated[
        int, typer.Option("--limit", min=0, metavar="N", help="Chunks to list; 0 is all.")
    ] = 50,
    as_json: AsJson = False,
) -> None:
    """List the chunks of a store.

    Only reads, and may run beside an engine.
    """
    from kvtier.cli import _cache_actions as actions  # noqa: PLC0415

    order = cast("Order", choice("--sort", sort, _ORDERS))
    actions.ls(directory, namespace, sort=order, limit=limit, as_json=as_json)


@cache.command()
def verify(
    directory: Store,
    *,
    namespace: Only = None,
    limit: Annotated[
        int, typer.Option("--limit", min=0, metavar="N", help="Bad chunks to list; 0 is all.")
    ] = 20,
    as_json: AsJson = False,
) -> None:
    """Compare every chunk of a store with its checksum.

    Exits with 1 if a chunk is bad: an engine would recompute that chunk. Only reads, and may
    run beside an engine, but takes bandwidth of the disk.
    """
    from kvtier.cli import _cache_actions as actions  # noqa: PLC0415

    if not actions.verify(directory, namespace, limit=limit, as_json=as_json):
        raise typer.Exit(1)


@cache.command()
def explain(
    key: Annotated[
        str,
        typer.Argument(
            metavar="KEY",
            help="A chunk's key as in ls and in the log: 8 hex digits or more, with or without "
            "/GROUP.",
        ),
    ],
    directory: Store,
    *,
    namespace: Only = None,
    as_json: AsJson = False,
) -> None:
    """Print where a chunk is, or why it is gone.

    Also prints since when, and how often the chunk was loaded. Exits with 1 if the chunk is
    gone. Only reads, and may run beside an engine.
    """
    from kvtier.cli import _cache_actions as actions  # noqa: PLC0415

    if not actions.explain(key, directory, namespace, as_json=as_json):
        raise typer.Exit(1)


@cache.command()
def evict(  # noqa: PLR0913 - each is an option of the command
    *,
    keys: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY", help="Chunks to remove; written as for explain."),
    ] = None,
    directory: Store,
    older_than: Annotated[
        str | None,
        typer.Option(metavar="AGE", help="Remove chunks not stored or used for AGE, as in 7d."),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Remove all chunks.")] = False,
    namespace: Only = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Remove without asking.")] = False,
    as_json: AsJson = False,
) -> None:
    """Remove chunks from a store that no engine uses.

    Give keys, --older-than or --all. The slots are free at the engine's next start; the files
    keep their size. Without --yes the command shows what it would remove and asks.
    """
    from kvtier.cli import _cache_actions as actions  # noqa: PLC0415

    selection = actions.Selection(tuple(keys or ()), older_than, everything=everything)
    actions.evict(directory, namespace, selection, ask=not yes, as_json=as_json)


@cache.command()
def compact_index(directory: Store, *, namespace: Only = None, as_json: AsJson = False) -> None:
    """Rewrite the index of a store without gaps.

    No engine may be using the store.
    """
    from kvtier.cli import _cache_actions as actions  # noqa: PLC0415

    actions.compact_index(directory, namespace, as_json=as_json)
