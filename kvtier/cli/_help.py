"""How a command's help reads: metavars for arguments, limits in words, one ``--json``.

typer writes the Python type of an argument beside its metavar, braces around it in the usage
line, and the limit of a number as ``x>=1``. Those are for who reads the source.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated, Any, Final, TypeVar

import typer
from typer.core import TyperCommand
from typing_extensions import override

__all__ = ["AsJson", "Commands"]

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]

_Function = TypeVar("_Function", bound=Callable[..., Any])

_TYPE: Final = re.compile(r" <[^<>]*>$")
_LIMIT: Final = re.compile(r"\bx>=(?=\d)")
_RANGE: Final = re.compile(r"(?<=\d)<=x<=(?=\d)")


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
    """A group of commands whose help is for who runs them.

    Args:
        settings: The group's name, help and what else typer takes.
    """

    def __init__(self, **settings: Any) -> None:  # noqa: ANN401 - typer's
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
        """Return a decorator that makes a function a command of the group."""
        return super().command(name, cls=cls, **settings)
