"""The root command ``kvtier``, which imports the module of a command when the command runs.

So ``kvtier --help`` imports only typer, and each command imports only the modules it needs.
"""

from __future__ import annotations

import importlib
from typing import Annotated, Any, Final

import typer
from typer.core import TyperCommand
from typing_extensions import override

import kvtier
from kvtier.cli._options import Commands, numpy_needed
from kvtier.errors import KvtierError
from kvtier.printable import printable

__all__ = ["app", "run"]

_REFUSED: Final = 1
_FAILED: Final = 2
# The class is click's or, by version, typer's own copy of it.
_UsageError: Final[type[Any]] = typer.BadParameter.__mro__[1]

_COMMANDS: Final = {
    "example": ("_commands:example", "Print a configuration to start from."),
    "check": ("_examine:check", "Check whether kvtier can start with FILE on this machine."),
    "doctor": ("_examine:doctor", "Check FILE and measure its disks."),
    "plan": ("_plan:plan", "Print how many tokens of a model each tier of FILE holds."),
    "vllm-args": (
        "_commands:vllm_args",
        "Print the vLLM arguments that load kvtier with FILE.",
    ),
    "schema": ("_commands:print_schema", "Print the JSON Schema of configuration files."),
    "warmup": ("_warmup:warmup", "Compute known prompts and store their KV."),
    "replay": ("_replay:replay", "Replay TRACE through real tiers, beside a simulation."),
    "cache": ("_cache:cache", "Inspect, clean and ship the cache of an NVMe tier."),
    "sim": ("_sim:sim_app", "Simulate traces against policies and configurations."),
    "trace": ("_trace:trace_app", "Describe and generate traces."),
}
"""Function or group of each command, as ``module:attribute``, and the command's summary."""


_EXTRAS: Final = {"replay": "torch", "sim": "sim", "trace": "sim"}
"""Extra to install, ``kvtier[EXTRA]``, for each command that needs one."""


class _Deferred(TyperCommand):
    """A stand-in that imports the real command or group when the user calls it."""

    # Any, because the classes are click's or, by version, typer's own copies of them.

    @override
    def make_context(
        self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any
    ) -> Any:
        name = self.name or ""
        target, _ = _COMMANDS[name]
        with numpy_needed(f"kvtier {name}", _EXTRAS.get(name)):
            command = _load(target)
        return command.make_context(info_name, args, parent, **extra)


def _load(target: str) -> Any:  # noqa: ANN401 - typer has no public type for it
    """Import the function or group ``module:attribute`` of this package; return a command."""
    module, _, attribute = target.partition(":")
    found = getattr(importlib.import_module(f"kvtier.cli.{module}"), attribute)
    if not isinstance(found, typer.Typer):
        single = Commands()
        single.command()(found)
        found = single
    return typer.main.get_command(found)


def _show_version(wanted: bool) -> None:  # noqa: FBT001 - typer requires it
    if wanted:
        typer.echo(f"kvtier {kvtier.__version__}")
        raise typer.Exit


app = Commands(
    name="kvtier",
    help="Keep an LLM engine's KV cache in tiers: GPU, pinned RAM, NVMe and a shared store.",
    epilog="Start with: kvtier example > kvtier.yaml",
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def _options(
    *,
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_show_version,
            is_eager=True,
            help="Print the version and exit.",
        ),
    ] = False,
) -> None:
    pass


def _defer() -> None:
    """Do nothing. The class ``_Deferred`` runs the real command in place of this function."""


for _name, (_, _summary) in _COMMANDS.items():
    app.command(_name, cls=_Deferred, help=_summary)(_defer)


def run() -> int:
    """Run the command line and return the exit code. Raise for a closed pipe and for Ctrl-C."""
    try:
        return app(prog_name="kvtier", standalone_mode=False) or 0
    except KvtierError as error:
        for line in str(error).split("\n"):
            typer.echo(f"error: {printable(line)}", err=True)
        return _FAILED
    except _UsageError as error:
        typer.echo(_usage(error), err=True)
        return _FAILED
    except typer.Abort:
        typer.echo("aborted", err=True)
        return _REFUSED
    except SystemExit as leaving:
        # typer and rich turn a closed pipe into exit code 1, which means "problem" here.
        if isinstance(leaving.__context__, BrokenPipeError):
            raise leaving.__context__ from None
        raise


def _usage(error: Any) -> str:  # noqa: ANN401 - typer has no public type for it
    """Return a usage error as one line. If no command was given, return the help."""
    text = error.format_message()
    command = error.ctx.command_path if error.ctx else "kvtier"
    if text.startswith("Usage: "):
        return str(text)
    words = " ".join(text.split()).rstrip(".")
    remedy = f"see {command} --help"
    if hasattr(error, "option_name") and error.ctx and _takes_engine_arguments(error.ctx):
        remedy = f"write arguments of vllm serve after --, or {remedy}"
    return f"error: {words[:1].lower()}{words[1:]}; {remedy}"


def _takes_engine_arguments(context: Any) -> bool:  # noqa: ANN401 - typer has no public type
    return any(each.name == "arguments" for each in context.command.params)
