"""Options that several commands share, and the format of a command's help.

typer prints the Python type of an argument, braces around optional arguments, and limits as
``x>=1``. The classes here remove types and braces, and print limits in words.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar

import typer
from typer.core import TyperCommand
from typing_extensions import override

from kvtier.errors import ConfigError, did_you_mean
from kvtier.printable import printable
from kvtier.units import UnitError

if TYPE_CHECKING:
    from kvtier.tiers.slab.inspect import StoredNamespace

__all__ = [
    "AsJson",
    "BadLimit",
    "Commands",
    "EngineModel",
    "File",
    "Only",
    "Store",
    "choice",
    "filled",
    "finite",
    "numpy_needed",
    "quantity",
]

T = TypeVar("T")
_Function = TypeVar("_Function", bound=Callable[..., Any])

_TYPE: Final = re.compile(r" <[^<>]*>$")
_LIMIT: Final = re.compile(r"\bx>=(?=\d)")
_RANGE: Final = re.compile(r"(?<=\d)<=x<=(?=\d)")

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
# typer does not check that files are readable: the reader's error has a remedy.
File = Annotated[
    Path,
    typer.Argument(metavar="FILE", help="Configuration, a YAML file.", readable=False),
]
EngineModel = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="MODEL",
        help="The engine's --model; identifies the engine's cache in a cache directory.",
    ),
]


Store = Annotated[
    Path,
    typer.Argument(
        metavar="DIR",
        help="The path of an nvme tier, or one model's directory in it.",
        readable=False,
    ),
]
Only = Annotated[
    str | None,
    typer.Option("--namespace", "-n", metavar="NAME", help="Only this directory of DIR."),
]
BadLimit = Annotated[
    int, typer.Option("--limit", min=0, metavar="N", help="Bad chunks to list; 0 lists all.")
]


@contextlib.contextmanager
def numpy_needed(command: str, extra: str | None) -> Iterator[None]:
    """Convert a failed import of numpy to a ConfigError that names the extra to install."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name != "numpy" or extra is None:
            raise
        remedy = f"install it with: pip install 'kvtier[{extra}]'"
        raise ConfigError(f"{command} needs the package numpy; {remedy}") from error


def filled(spaces: Sequence[StoredNamespace]) -> list[StoredNamespace]:
    """Return the namespaces that have an index or slots; if there are none, return all.

    Print a note for each namespace that is left out.
    """
    found = [space for space in spaces if not space.is_blank]
    if not found:
        return list(spaces)
    for space in spaces:
        if space.is_blank:
            where = printable(str(space.directory))
            typer.echo(f"note: {where} is left out: it has no index and no slots", err=True)
    return found


def choice(option: str, value: str, known: Iterable[str]) -> str:
    """Return ``value`` if it is one of ``known``; else raise a ConfigError."""
    names = list(known)
    if value not in names:
        hint = did_you_mean(value, names)
        remedy = f"write one of {', '.join(names)}{hint}"
        raise ConfigError(f"{option} {printable(value)}: not a choice; {remedy}")
    return value


def quantity(option: str, text: str, parse: Callable[[str], T]) -> T:
    """Parse ``text``, the number with a unit that the user gave for ``option``.

    ``parse`` is a function of :mod:`kvtier.units`; a refused text is a ConfigError.
    """
    try:
        return parse(text)
    except UnitError as error:
        raise ConfigError(f"{option} {printable(text)}: {error}") from error


def finite(value: float | None) -> float | None:
    """Return ``value`` unless it is infinite or not a number. typer calls this function."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter("not a finite number")
    return value


class _Command(TyperCommand):
    # Any, because the base is click's class or, by version, typer's own copy of it.

    @override
    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        pieces = super().collect_usage_pieces(ctx)
        return [piece.replace("{", "").replace("}", "") for piece in pieces]

    @override
    def format_options(self, ctx: Any, formatter: Any) -> None:
        arguments, options = [], []
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is None:
                continue
            name, text = record
            text = _RANGE.sub(" to ", _LIMIT.sub("at least ", text))
            if param.param_type_name == "argument":
                arguments.append((_TYPE.sub("", name), text))
            else:
                options.append((name, text))
        for heading, rows in (("Arguments", arguments), ("Options", options)):
            if rows:
                with formatter.section(heading):
                    formatter.write_dl(rows)


class Commands(typer.Typer):
    """A group of commands with plain-text help; ``settings`` are arguments of ``Typer``."""

    def __init__(self, **settings: Any) -> None:  # noqa: ANN401 - typer has no public type for it
        super().__init__(
            no_args_is_help=True,
            rich_markup_mode=None,
            add_completion=False,
            pretty_exceptions_enable=False,
            **settings,
        )

    @override
    def command(
        self,
        name: str | None = None,
        *,
        cls: type[TyperCommand] | None = _Command,
        **settings: Any,
    ) -> Callable[[_Function], _Function]:
        """Return a decorator that adds a function as a command."""
        return super().command(name, cls=cls, **settings)
