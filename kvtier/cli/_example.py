"""``kvtier example``: configurations to start from, which the package brings along."""

from __future__ import annotations

from importlib import resources
from typing import Annotated, Final

import typer

from kvtier.cli._choice import choice

__all__ = ["EXAMPLES", "example"]

EXAMPLES: Final = {
    "demo": "half a gigabyte of memory and two of disk",
    "ram": "memory only",
    "ram_nvme": "every key with its default",
}
"""What there is, by name, and what it is for."""

_WORDS: Final = "; ".join(f"{name}: {purpose}" for name, purpose in EXAMPLES.items())


def example(
    name: Annotated[str, typer.Argument(metavar="NAME", help=f"{_WORDS}.")] = "demo",
) -> None:
    """Print a configuration to start from.

    Write it to a file, change it, and run kvtier check.
    """
    file = f"examples/{choice('NAME', name, EXAMPLES)}.yaml"
    text = resources.files("kvtier.cli").joinpath(file).read_text("utf-8")
    typer.echo(text, nl=False)
