"""``kvtier example``, ``vllm-args`` and ``schema``."""

from __future__ import annotations

import json
import shlex
from importlib import resources
from typing import Annotated, Final

import typer

from kvtier.cli._options import EngineModel, File, choice
from kvtier.cli._render import show_json
from kvtier.config import (
    VllmEntryPoint,
    load_config,
    schema,
    vllm_transfer_config,
    with_staged_loads,
)
from kvtier.errors import ConfigError

__all__ = ["EXAMPLES", "example", "print_schema", "vllm_args"]

EXAMPLES: Final = {
    "demo": "half a gigabyte of memory and two of disk",
    "ram": "memory only",
    "ram_nvme": "every key with its default",
    "ram_nvme_gds": "chunks are read from the disk straight into GPU memory",
    "ram_nvme_shared": "below the disk, a tier that many machines share",
}
"""A description of each example configuration, by the example's name."""
_EXAMPLES_HELP: Final = "; ".join(f"{name}: {text}" for name, text in EXAMPLES.items())


def example(
    name: Annotated[str, typer.Argument(metavar="NAME", help=f"{_EXAMPLES_HELP}.")] = "demo",
) -> None:
    """Print a configuration to start from.

    Write it to a file, change it, and run 'kvtier check'.
    """
    file = f"examples/{choice('NAME', name, EXAMPLES)}.yaml"
    text = resources.files("kvtier.cli").joinpath(file).read_text("utf-8")
    typer.echo(text, nl=False)


def vllm_args(
    file: File,
    *,
    entry_point: Annotated[
        str,
        typer.Option(
            metavar="NAME", help=f"How vLLM loads kvtier: {' or '.join(VllmEntryPoint)}."
        ),
    ] = VllmEntryPoint.CONNECTOR.value,
    model: EngineModel = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print only the JSON value.")] = False,
) -> None:
    """Print the vLLM arguments that load kvtier with FILE.

    Append the line, which is quoted for a shell, to 'vllm serve MODEL'. Exits with 2 if another
    engine has the cache open, or if the engine would refuse to start with the cache.
    """
    # Examining stores takes a quarter of a second to import, and `example` needs none of it.
    from kvtier.doctor import Status, examine_existing_caches  # noqa: PLC0415
    from kvtier.vllm.identity import declared_identity  # noqa: PLC0415

    chosen = VllmEntryPoint(choice("--entry-point", entry_point, VllmEntryPoint))
    config = load_config(file)
    if chosen is VllmEntryPoint.SPEC:
        config = with_staged_loads(config)
    stores = examine_existing_caches(config, declared_identity(config, model))
    if problems := stores.lines(Status.PROBLEM):
        raise ConfigError("\n".join(problems))
    for status in (Status.NOTE, Status.WARNING):
        for line in stores.lines(status):
            typer.echo(f"{status}: {line}", err=True)
    value = json.dumps(vllm_transfer_config(file, config, entry_point=chosen))
    typer.echo(value if as_json else f"--kv-transfer-config {shlex.quote(value)}")


def print_schema() -> None:
    """Print the JSON Schema of configuration files.

    Editors that know YAML check and complete a file with it.
    """
    show_json(schema())
