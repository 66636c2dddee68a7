"""The commands. Each reads a configuration, calls one function and shows what it returned."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from kvtier.cli._choice import choice, finite
from kvtier.cli._help import AsJson
from kvtier.cli._plan import PlanRequest, make_plan
from kvtier.cli._quantity import quantity
from kvtier.cli._render import make_console, show_json, show_line, show_plan, show_tiers
from kvtier.config import (
    KvtierConfig,
    VllmEntryPoint,
    load_config,
    resolve_load_path,
    schema,
    vllm_transfer_config,
)
from kvtier.errors import ConfigError
from kvtier.model_geometry import KvDtype, read_model_geometry
from kvtier.printable import printable
from kvtier.units import parse_rate

__all__ = ["check", "doctor", "plan", "print_schema", "vllm_args"]

_MOST_RANKS = 4096
_DTYPES = f"Element type of the KV cache: {', '.join(KvDtype)}."

# Not asked of typer, in any command: whoever reads a file says what to do if it cannot be read.
File = Annotated[
    Path,
    typer.Argument(metavar="FILE", help="Configuration, a YAML file.", readable=False),
]
EngineModel = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="MODEL",
        help="What the engine is started with: says which cache in the store is its own.",
    ),
]


def check(
    file: File,
    *,
    data_parallel_size: Annotated[
        int,
        typer.Option(min=1, metavar="N", help="Data-parallel ranks that run on this machine."),
    ] = 1,
    model: EngineModel = None,
    as_json: AsJson = False,
) -> None:
    """Check FILE, and the disks and memory of this machine.

    Exits with 2 and one line per problem if kvtier could not start with FILE here.
    Run it as the user that runs the engine.
    """
    # The manager and the policies are loaded for those who ask for them only.
    from kvtier.cli._check import check_start, notes_on_ranks  # noqa: PLC0415

    if data_parallel_size > _MOST_RANKS:
        problem = "more ranks than any machine runs"
        raise ConfigError(
            f"--data-parallel-size {data_parallel_size}: {problem}; write {_MOST_RANKS} or less"
        )
    config = load_config(file)
    report = check_start(config, ranks=data_parallel_size, model=model)
    notes = [*notes_on_ranks(config, ranks=data_parallel_size), *report.notes]
    if as_json:
        document = config.model_dump(mode="json", by_alias=True)
        found = {"warnings": report.warnings, "notes": notes}
        show_json({"file": str(file), **found, "config": document})
        return
    console = make_console()
    show_tiers(console, config)
    for note in notes:
        show_line(console, note)
    _warn(report.warnings)
    typer.echo(f"{printable(str(file))}: ok")


def doctor(
    file: File,
    *,
    seconds: Annotated[
        float,
        typer.Option(
            min=0.1,
            callback=finite,
            metavar="S",
            help="How long to read, and to write, each disk.",
        ),
    ] = 2.0,
    measure: Annotated[
        bool, typer.Option("--measure/--no-measure", help="Measure the disks.")
    ] = True,
    model: EngineModel = None,
    as_json: AsJson = False,
) -> None:
    """Say what makes FILE slow or unsafe on this machine.

    Says what to do about it, too, and exits with 1 if there is a problem. Measures each disk
    with up to 4 GiB of its free space. Run it as the user that runs the engine, best before
    the engine runs.
    """
    # The storage tier and its packages are loaded for those who ask for them only.
    from kvtier.cli._doctor import examination_document, show_examination  # noqa: PLC0415
    from kvtier.doctor import Verdict, examine  # noqa: PLC0415
    from kvtier.vllm.identity import declared_identity  # noqa: PLC0415

    config = load_config(file)
    identity = declared_identity(config, model)
    examination = examine(config, seconds=seconds if measure else None, identity=identity)
    if as_json:
        show_json(examination_document(file, examination))
    else:
        show_examination(make_console(), examination)
    if examination.verdict is Verdict.PROBLEM:
        raise typer.Exit(1)


def plan(  # noqa: PLR0913 - each is an option of the command
    file: File,
    *,
    model: Annotated[
        Path,
        typer.Option(
            metavar="DIR", help="Directory of the model, with its config.json.", readable=False
        ),
    ],
    tp: Annotated[int, typer.Option(min=1, metavar="N", help="Tensor-parallel ranks.")] = 1,
    kv_dtype: Annotated[str, typer.Option(metavar="TYPE", help=_DTYPES)] = KvDtype.AUTO.value,
    block_tokens: Annotated[
        int, typer.Option(min=1, metavar="N", help="Tokens per engine block.")
    ] = 16,
    fill_rate: Annotated[
        str, typer.Option(metavar="RATE", help="How fast new KV arrives, as in 500MiB/s.")
    ] = "2GiB/s",
    as_json: AsJson = False,
) -> None:
    """Say how many tokens of a model each tier of FILE holds.

    Reads the model's config.json; looks at no weights, no GPU and no disk.
    """
    dtype = KvDtype(choice("--kv-dtype", kv_dtype, KvDtype))
    config = load_config(file)
    rate = quantity("--fill-rate", fill_rate, parse_rate)
    request = PlanRequest(tp, dtype, block_tokens, rate)
    result = make_plan(config, read_model_geometry(model), request)
    if as_json:
        show_json(result.as_dict())
        return
    show_plan(make_console(), result)


def vllm_args(
    file: File,
    *,
    entry_point: Annotated[
        str,
        typer.Option(metavar="NAME", help=f"The way into vLLM: {' or '.join(VllmEntryPoint)}."),
    ] = VllmEntryPoint.CONNECTOR.value,
    model: EngineModel = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print only the JSON value.")] = False,
) -> None:
    """Print the vLLM arguments that load FILE.

    Append the line, which is quoted for a shell, to 'vllm serve MODEL'. Exits with 2 if an
    engine has the store open here, or could not start with what is in it.
    """
    from kvtier.cli._check import check_stores  # noqa: PLC0415

    way = VllmEntryPoint(choice("--entry-point", entry_point, VllmEntryPoint))
    config: KvtierConfig = resolve_load_path(load_config(file), way)
    report = check_stores(config, model=model)
    for note in report.notes:
        typer.echo(f"note: {note}", err=True)
    _warn(report.warnings)
    value = json.dumps(vllm_transfer_config(file, config, entry_point=way))
    typer.echo(value if as_json else f"--kv-transfer-config {shlex.quote(value)}")


def _warn(lines: Iterable[str]) -> None:
    for line in lines:
        typer.echo(f"warning: {line}", err=True)


def print_schema() -> None:
    """Print the JSON Schema of configuration files.

    Editors that know YAML check and complete a file with it.
    """
    show_json(schema())
