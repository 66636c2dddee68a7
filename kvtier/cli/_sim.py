"""The command ``kvtier sim`` simulates policies and configurations without moving bytes."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, cast

import typer

from kvtier.cli._options import AsJson, Commands, choice, finite, quantity
from kvtier.cli._progress import show_progress
from kvtier.cli._render import show_json
from kvtier.cli._sim_render import show_cache, show_sweep
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
from kvtier.sim.capacity import chunk_nbytes, parse_chunk_bytes
from kvtier.sim.hybrid import ONE_GROUP
from kvtier.sim.plot import check_plot, write_plot
from kvtier.sim.recommend import RecommendRequest, recommend
from kvtier.sim.routing import ROUTINGS
from kvtier.sim.single import BELADY, TouchOrder
from kvtier.sim.sweep import sweep, write_csv
from kvtier.sim.time_model import TimeModel, parse_speed
from kvtier.sim.traces import Trace
from kvtier.units import parse_size

__all__ = ["ChunkBytes", "PrefillRate", "Speeds", "chunk_bytes_of", "sim_app"]

sim_app = Commands(help="Simulate traces against policies and configurations.")

_ORDERS = ("policy", "forward", "reverse")

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


@sim_app.command()
def run(  # noqa: PLR0913 - each is an option of the command
    trace: TraceFile,
    *,
    config: Annotated[
        Path,
        typer.Option(metavar="FILE", help="Configuration of each engine.", readable=False),
    ],
    engines: Annotated[
        int, typer.Option(min=1, max=10_000, metavar="N", help="Number of engines.")
    ] = 1,
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
    """Simulate TRACE with all tiers of a configuration.

    The manager of a live engine runs in simulated time. No bytes are moved. Several engines
    have local tiers of their own, and may share the last tier.
    """
    chosen = choice("--routing", routing, ROUTINGS)
    settings = load_config(config)
    loaded = read(trace, format_name, tokens_per_id)
    with show_progress("replaying") as progress:
        result = simulate_cache(
            loaded,
            settings,
            chunk_bytes=chunk_bytes_of(loaded, chunk_bytes),
            model=_time_model(loaded, settings, prefill_rate, tier_speed, engines),
            progress=progress,
            engines=engines,
            routing=chosen,
        )
    if as_json:
        show_json(asdict(result) | loaded.reading())
    else:
        show_cache(result, loaded)


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
            help="Eviction policies, separated by commas: "
            f"{', '.join(sorted([*EVICTIONS.built_in, BELADY]))}, "
            "installed ones, or module:Class.",
        ),
    ],
    capacities: Annotated[
        str,
        typer.Option(
            metavar="SIZES",
            help="Sizes of the tier, separated by commas: 5% (of the trace's chunks), 9140 "
            "(chunks) or 64GiB.",
        ),
    ],
    csv: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Table to write or replace.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Picture to write: PNG, SVG or PDF.")
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, metavar="N", help="Processes to use.")] = 1,
    format_name: FormatOption = "auto",
    tokens_per_id: TokensPerId = None,
    touch_order: Annotated[
        str,
        typer.Option(
            metavar="ORDER",
            help="Order in which a request's chunks are used: forward, reverse, or the "
            "policy's.",
        ),
    ] = "policy",
    groups: Annotated[
        str,
        typer.Option(
            metavar="KINDS",
            help="KV cache groups of the model, separated by commas: prefix, window:TOKENS, "
            "local:TOKENS or state.",
        ),
    ] = ONE_GROUP,
    chunk_bytes: ChunkBytes = None,
) -> None:
    """Compare eviction policies in one tier of several sizes."""
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
            touch_order=cast("TouchOrder", choice("--touch-order", touch_order, _ORDERS)),
            groups=groups,
            jobs=jobs,
            progress=progress,
        )
    for (option, path), write in zip(outputs.items(), (write_csv, write_plot), strict=True):
        if path is not None:
            write_output(option, path, partial(write, results))
    show_sweep(results)
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
    engines: int,
) -> TimeModel:
    given = dict(map(parse_speed, speeds or ()))
    for name in given:
        choice("--tier-speed", name, [tier.name for tier in config.tiers])
    return default_time_model(
        config, trace, engines=engines, prefill_tokens_per_s=rate, speeds=given
    )
