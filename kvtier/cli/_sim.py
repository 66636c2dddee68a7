"""The command ``kvtier sim`` simulates policies and configurations without moving bytes."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, cast

import typer

from kvtier.cli._options import AsJson, Commands, choice, finite, quantity
from kvtier.cli._progress import show_progress
from kvtier.cli._render import make_console, make_table, show_facts, show_json, show_table
from kvtier.cli._sim_render import show_cache, show_fleet
from kvtier.cli._trace import (
    FormatOption,
    TokensPerId,
    TraceFile,
    check_outputs,
    read,
    show_assumptions,
    write_output,
)
from kvtier.config import KvtierConfig, load_config
from kvtier.errors import ConfigError
from kvtier.policies.registry import EVICTIONS
from kvtier.printable import printable
from kvtier.sim.cache import default_time_model, simulate_cache
from kvtier.sim.capacity import chunk_nbytes, parse_capacity, parse_chunk_bytes
from kvtier.sim.fleet import ROUTINGS, simulate_fleet
from kvtier.sim.hybrid import ONE_GROUP
from kvtier.sim.plot import check_plot, write_plot
from kvtier.sim.recommend import RecommendRequest, recommend
from kvtier.sim.single import BELADY, SingleResult, TouchOrder, distinct_chunks, simulate_single
from kvtier.sim.sweep import SweepResult, sweep, write_csv
from kvtier.sim.time_model import TimeModel, parse_speed
from kvtier.sim.traces import Trace
from kvtier.units import parse_size

__all__ = ["ChunkBytes", "PrefillRate", "Speeds", "chunk_bytes_of", "sim_app"]

sim_app = Commands(help="Simulate traces against policies and configurations.")

_ORDERS = ("policy", "forward", "reverse")

Order = Annotated[
    str,
    typer.Option(
        "--touch-order",
        metavar="ORDER",
        help="Order in which a request's chunks are used: forward, reverse, or the policy's.",
    ),
]
Groups = Annotated[
    str,
    typer.Option(
        metavar="KINDS",
        help="KV cache groups of the model, separated by commas: prefix, window:TOKENS, "
        "local:TOKENS or state.",
    ),
]
ChunkBytes = Annotated[
    str | None,
    typer.Option(
        "--chunk-bytes", metavar="SIZE", help="Bytes of a chunk; by default 128KiB per token."
    ),
]
PrefillRate = Annotated[
    float | None,
    typer.Option(
        "--prefill-rate",
        min=1.0,
        callback=finite,
        metavar="N",
        help="Prompt tokens computed per second; by default the rate that keeps the engine "
        "busy 70 % of the time without a cache.",
    ),
]
Speeds = Annotated[
    list[str] | None,
    typer.Option(
        "--tier-speed",
        metavar="TIER=SPEED",
        help="Read rate, write rate and latency of a tier, as in "
        "nvme=6GiB/s,3GiB/s,200us; may be repeated.",
    ),
]


_OF_TRACES = frozenset({"trace", "format_name", "tokens_per_id", "chunk_bytes"})
_BY_POLICY = _OF_TRACES | {"policy", "capacity", "touch_order", "groups"}
_BY_CONFIG = _OF_TRACES | {"config", "prefill_rate", "tier_speed"}
"""Parameters that a simulation of a whole configuration uses."""


@sim_app.command()
def run(  # noqa: PLR0913 - each is an option of the command
    context: typer.Context,
    trace: TraceFile,
    *,
    format_name: FormatOption = "auto",
    tokens_per_id: TokensPerId = None,
    policy: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Eviction policy of a single tier: "
            f"{', '.join(sorted([*EVICTIONS.built_in, BELADY]))}, "
            "an installed one, or module:Class.",
        ),
    ] = None,
    capacity: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Size of that tier: 5% (of the trace's chunks), 9140 (chunks) or 64GiB.",
        ),
    ] = None,
    touch_order: Order = "policy",
    groups: Groups = ONE_GROUP,
    config: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Configuration with all tiers.", readable=False),
    ] = None,
    chunk_bytes: ChunkBytes = None,
    prefill_rate: PrefillRate = None,
    tier_speed: Speeds = None,
    as_json: AsJson = False,
) -> None:
    """Simulate TRACE with one policy or a whole configuration.

    With --config, the manager of a live engine runs in simulated time. No bytes are moved.
    """
    if (policy is None) == (config is None):
        raise ConfigError("give either --policy or --config")
    if config is None:
        remedy = "simulate all tiers with --config"
        _refuse_others(context, _BY_POLICY, "--policy", remedy)
    else:
        remedy = "simulate one tier with --policy"
        _refuse_others(context, _BY_CONFIG, "--config", remedy)
    loaded = read(trace, format_name, tokens_per_id)
    nbytes = chunk_bytes_of(loaded, chunk_bytes)
    if config is not None:
        settings = load_config(config)
        model = _time_model(loaded, settings, prefill_rate, tier_speed)
        with show_progress("replaying") as progress:
            whole = simulate_cache(
                loaded, settings, chunk_bytes=nbytes, model=model, progress=progress
            )
        show_cache(whole, loaded, as_json=as_json)
        return
    with show_progress("replaying") as progress:
        one = simulate_single(
            loaded,
            policy=policy or "",
            capacity=_capacity(loaded, capacity, groups, nbytes),
            touch_order=_order(touch_order),
            groups=groups,
            progress=progress,
        )
    _show_single(one, loaded, as_json=as_json)


@sim_app.command("fleet")
def run_fleet(  # noqa: PLR0913 - each is an option of the command
    trace: TraceFile,
    *,
    config: Annotated[
        Path,
        typer.Option(metavar="FILE", help="Configuration of each engine.", readable=False),
    ],
    engines: Annotated[int, typer.Option(min=1, max=10_000, metavar="N", help="Engines.")],
    routing: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="How requests are sent to engines: round-robin, or prefix, to the engine "
            "that has seen most of the prompt.",
        ),
    ] = "round-robin",
    format_name: FormatOption = "auto",
    tokens_per_id: TokensPerId = None,
    chunk_bytes: ChunkBytes = None,
    prefill_rate: PrefillRate = None,
    tier_speed: Speeds = None,
    as_json: AsJson = False,
) -> None:
    """Simulate TRACE on several engines, which may share the last tier.

    Each engine has local tiers of its own. No bytes are moved.
    """
    chosen = choice("--routing", routing, ROUTINGS)
    settings = load_config(config)
    loaded = read(trace, format_name, tokens_per_id)
    with show_progress("replaying") as progress:
        result = simulate_fleet(
            loaded,
            settings,
            engines=engines,
            routing=chosen,
            chunk_bytes=chunk_bytes_of(loaded, chunk_bytes),
            model=_time_model(loaded, settings, prefill_rate, tier_speed, engines=engines),
            progress=progress,
        )
    show_fleet(result, loaded, as_json=as_json)


@sim_app.command("sweep")
def run_sweep(  # noqa: PLR0913 - each is an option of the command
    traces: Annotated[
        list[Path],
        typer.Argument(
            metavar="TRACE", help="Trace files; may be gzip or zstd.", readable=False
        ),
    ],
    *,
    policies: Annotated[
        str,
        typer.Option(
            metavar="NAMES",
            help="Eviction policies, separated by commas; kvtier sim run --help lists them.",
        ),
    ],
    capacities: Annotated[
        str,
        typer.Option(metavar="SIZES", help="Sizes, separated by commas, as in 1%,9140,64GiB."),
    ],
    csv: Annotated[Path, typer.Option(metavar="FILE", help="Table to write or replace.")],
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Picture to write: PNG, SVG or PDF.")
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, metavar="N", help="Processes to use.")] = 1,
    format_name: FormatOption = "auto",
    tokens_per_id: TokensPerId = None,
    touch_order: Order = "policy",
    groups: Groups = ONE_GROUP,
    chunk_bytes: ChunkBytes = None,
) -> None:
    """Simulate every TRACE with every policy at every size."""
    outputs = {"--csv": csv, "--plot": plot}
    check_outputs(outputs, traces)
    if plot is not None:
        check_plot(plot)
    loaded = [read(path, format_name, tokens_per_id) for path in traces]
    with show_progress("sweeping") as progress:
        results = sweep(
            loaded,
            _names("--policies", policies),
            _names("--capacities", capacities),
            chunk_bytes=[chunk_bytes_of(trace, chunk_bytes) for trace in loaded],
            touch_order=_order(touch_order),
            groups=groups,
            jobs=jobs,
            progress=progress,
        )
    for (option, path), write in zip(outputs.items(), (write_csv, write_plot), strict=True):
        if path is not None:
            write_output(option, path, partial(write, results))
    _show_sweep(results)
    for trace in loaded:
        show_assumptions(trace)
    for path in filter(None, outputs.values()):
        typer.echo(f"wrote {printable(str(path))}")


@sim_app.command("recommend")
def run_recommend(  # noqa: PLR0913 - each is an option of the command
    trace: TraceFile,
    *,
    ram: Annotated[str, typer.Option(metavar="SIZE", help="Memory the cache may take.")],
    nvme: Annotated[str, typer.Option(metavar="SIZE", help="Disk the cache may take.")],
    chunk_bytes: ChunkBytes = None,
    path: Annotated[
        Path, typer.Option(metavar="DIR", help="Directory of the cache, on that disk.")
    ] = Path("/var/lib/kvtier"),
    format_name: FormatOption = "auto",
    tokens_per_id: TokensPerId = None,
    prefill_rate: PrefillRate = None,
    tier_speed: Speeds = None,
) -> None:
    """Print the best configuration found for TRACE.

    The output is a YAML file. Its comments list what was tried.
    """
    loaded = read(trace, format_name, tokens_per_id)
    request = RecommendRequest(
        ram_bytes=quantity("--ram", ram, parse_size),
        nvme_bytes=quantity("--nvme", nvme, parse_size),
        path=path,
        chunk_bytes=chunk_bytes_of(loaded, chunk_bytes),
        prefill_tokens_per_s=prefill_rate,
        speeds=dict(parse_speed(text) for text in tier_speed or ()),
    )
    with show_progress("trying") as progress:
        text = recommend(loaded, request, progress=progress)
    typer.echo(text, nl=False)


def chunk_bytes_of(trace: Trace, text: str | None) -> int:
    """Return the chunk size in bytes: ``--chunk-bytes``, or the default for ``trace``."""
    return chunk_nbytes(trace) if text is None else parse_chunk_bytes(text)


def _refuse_others(
    context: typer.Context, used: Collection[str], kind: str, remedy: str
) -> None:
    """Refuse options that have no effect on this kind of simulation.

    ``used`` are the parameters that it uses, besides ``as_json``. ``kind`` is the option that
    selected it, and ``remedy`` says how to use the refused option.
    """
    for parameter in context.command.params:
        name = parameter.name or ""
        source = context.get_parameter_source(name)
        given = source is not None and source.name == "COMMANDLINE"
        if given and name not in used and name != "as_json":
            option = parameter.opts[0]
            raise ConfigError(f"{option} has no effect with {kind}; remove it, or {remedy}")


def _capacity(trace: Trace, text: str | None, groups: str, chunk_bytes: int) -> int:
    if text is None:
        raise ConfigError("--capacity is missing; write one such as --capacity 5%")
    return parse_capacity(
        text, distinct=distinct_chunks(trace, groups), chunk_bytes=chunk_bytes
    )


def _order(text: str) -> TouchOrder:
    return cast("TouchOrder", choice("--touch-order", text, _ORDERS))


def _names(option: str, text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise ConfigError(f"{option} {text}: an empty name; write a,b,c")
    return list(dict.fromkeys(names))


def _time_model(
    trace: Trace,
    config: KvtierConfig,
    rate: float | None,
    speeds: list[str] | None,
    *,
    engines: int = 1,
) -> TimeModel:
    given = dict(map(parse_speed, speeds or ()))
    for name in given:
        choice("--tier-speed", name, [tier.name for tier in config.tiers])
    return default_time_model(
        config, trace, engines=engines, prefill_tokens_per_s=rate, speeds=given
    )


def _show_single(result: SingleResult, trace: Trace, *, as_json: bool) -> None:
    """Print the result of a simulation with one policy."""
    if as_json:
        show_json(asdict(result) | trace.reading())
        return
    show_facts(asdict(result))
    show_assumptions(trace)


def _show_sweep(results: Sequence[SweepResult]) -> None:
    """Print the prefix hit ratios of a sweep, one table per trace."""
    console = make_console()
    for trace in dict.fromkeys(result.of for result in results):
        rows = [result for result in results if result.of == trace]
        sizes = list(dict.fromkeys(row.capacity for row in rows))
        console.print(f"{trace[0]}: prefix hit ratio, %", soft_wrap=True)
        table = make_table("policy", numbers=tuple(sizes))
        for policy in dict.fromkeys(row.policy for row in rows):
            cells = {row.capacity: row for row in rows if row.policy == policy}
            table.add_row(
                policy, *(f"{cells[size].prefix_hit_ratio * 100:.2f}" for size in sizes)
            )
        show_table(console, table)
