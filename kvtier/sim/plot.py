"""Plots the results of a sweep."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Final

from kvtier.errors import ConfigError
from kvtier.sim.single import BELADY
from kvtier.sim.sweep import SweepResult

__all__ = ["check_plot", "write_plot"]


_PICTURES: Final = (".png", ".svg", ".pdf")


def check_plot(path: Path) -> None:
    """Raise a ConfigError if matplotlib is missing or does not support the format."""
    try:
        import_module("matplotlib")
    except ImportError as error:
        remedy = "install it with: pip install 'kvtier[plots]', or leave out --plot"
        raise ConfigError(f"--plot needs the package matplotlib; {remedy}") from error
    if path.suffix.lower() not in _PICTURES:
        raise ConfigError(f"--plot {path}: no such picture format; name it .png, .svg or .pdf")


def write_plot(results: Sequence[SweepResult], path: Path) -> None:
    """Plot the prefix hit ratio over the size, with a panel per trace and a line per policy.

    The suffix of ``path`` determines the format.
    """
    check_plot(path)
    from matplotlib import colormaps  # noqa: PLC0415
    from matplotlib.figure import Figure  # noqa: PLC0415

    traces = list(dict.fromkeys(result.of for result in results))
    figure = Figure(figsize=(6.4 * len(traces), 4.8), layout="constrained")
    # The colour map's dark shades first, then its light shades.
    colours = [colormaps["tab20"](at) for at in (*range(0, 20, 2), *range(1, 20, 2))]
    panels = figure.subplots(1, len(traces), squeeze=False)[0]
    for panel, trace in zip(panels, traces, strict=True):
        panel.set_prop_cycle(color=colours)
        for policy in dict.fromkeys(result.policy for result in results):
            rows = [row for row in results if (row.of, row.policy) == (trace, policy)]
            rows.sort(key=lambda row: row.capacity_chunks)
            panel.plot(
                [row.capacity_share * 100 for row in rows],
                [row.prefix_hit_ratio * 100 for row in rows],
                marker="o",
                markersize=3,
                linewidth=1.2,
                linestyle="--" if policy == BELADY else "-",
                label=policy,
            )
        panel.set(
            title=trace[0],
            xlabel=f"size, % of distinct chunks of {_tokens(results, trace)} tokens",
            ylabel="prefix hit ratio, %",
            xscale="log",
            ylim=(0, None),
        )
        sizes = {row.capacity_share * 100: _size(row) for row in results if row.of == trace}
        panel.set_xticks(list(sizes), list(sizes.values()), minor=False)
        panel.set_xticks([], minor=True)
        panel.grid(visible=True, alpha=0.3)
    panels[-1].legend(fontsize="small", loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.savefig(path, dpi=120)


def _tokens(results: Sequence[SweepResult], trace: tuple[str, str]) -> int:
    return next(row.chunk_tokens for row in results if row.of == trace)


def _size(row: SweepResult) -> str:
    """Return the size in percent of distinct chunks, or the percentage that the user wrote."""
    asked = row.capacity.strip()
    return asked.rstrip("% ") if asked.endswith("%") else f"{row.capacity_share * 100:.3g}"
