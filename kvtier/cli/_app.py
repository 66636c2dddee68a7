"""The root of the command line, which imports a command's module when the command runs.

Listing the commands therefore costs no more than typer, and each command pays for what it uses.
"""

from __future__ import annotations

import importlib
from typing import Annotated, Any, Final

import typer
from typer.core import TyperCommand
from typing_extensions import override

import kvtier
from kvtier.cli._help import Commands

__all__ = ["app"]

_COMMANDS: Final = {
    "example": ("_example:example", "Print a configuration to start from."),
    "check": ("_commands:check", "Check FILE, and the disks and memory of this machine."),
    "doctor": ("_commands:doctor", "Say what makes FILE slow or unsafe on this machine."),
    "plan": ("_commands:plan", "Say how many tokens of a model each tier of FILE holds."),
    "vllm-args": ("_commands:vllm_args", "Print the vLLM arguments that load FILE."),
    "schema": ("_commands:print_schema", "Print the JSON Schema of configuration files."),
    "replay": (
        "_replay:replay",
        "Replay TRACE with real bytes, and the simulator's prediction.",
    ),
    "cache": ("_cache:cache", "Look into the store of an NVMe tier, and tidy it up."),
    "sim": ("_sim:sim_app", "Replay traces against policies and ladders."),
    "trace": ("_trace:trace_app", "Describe, convert and generate traces."),
}
"""The function or group behind each command, and the first sentence of its help."""


class _Deferred(TyperCommand):
    """Stands in the root's list for a command or group, and imports it when it is called."""

    # Any, because the classes are click's or, by version, typer's own copies of them.

    @override
    def make_context(
        self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any
    ) -> Any:
        target, _ = _COMMANDS[self.name or ""]
        return _load(target).make_context(info_name, args, parent, **extra)


def _load(target: str) -> Any:  # noqa: ANN401 - see above
    """Import ``module:attribute`` of this package as a command."""
    module, _, attribute = target.partition(":")
    found = getattr(importlib.import_module(f"kvtier.cli.{module}"), attribute)
    if not isinstance(found, typer.Typer):
        single = Commands()
        single.command()(found)
        found = single
    return typer.main.get_command(found)


def _show_version(wanted: bool) -> None:  # noqa: FBT001 - typer's contract
    if wanted:
        typer.echo(f"kvtier {kvtier.__version__}")
        raise typer.Exit


app = Commands(
    name="kvtier",
    help="Keep an LLM engine's KV cache in tiers: GPU, pinned RAM, NVMe.",
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
    """Implement no command; the real one is called in its place."""


for _name, (_, _summary) in _COMMANDS.items():
    app.command(_name, cls=_Deferred, help=_summary)(_defer)
