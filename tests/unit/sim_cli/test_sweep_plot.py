"""The pictures of ``kvtier sim sweep``."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from kvtier.cli import _sim
from kvtier.errors import ConfigError
from kvtier.sim import plot
from tests.unit.sim_cli.commands import refusal, sweep


def test_a_picture_names_sizes_as_they_were_asked_for(trace: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "curves.svg"
    sweep(trace, "--plot", picture)
    assert "<!-- 5 -->" in picture.read_text()


def test_a_sweep_draws_a_picture(trace: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "curves.png"
    sweep(trace, "--plot", picture)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size > 5000
    assert "no such picture format" in refusal(
        *("sim", "sweep", trace, "--policies", "lru", "--capacities", "5%"),
        *("--csv", tmp_path / "x.csv", "--plot", tmp_path / "curves.docx"),
    )


def test_without_matplotlib_a_picture_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"pip install 'kvtier\[plots\]'"):
        plot.write_plot([], tmp_path / "x.png")


def test_without_matplotlib_no_cell_of_a_sweep_with_a_picture_is_run(
    trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[object] = []
    monkeypatch.setattr(_sim, "sweep", lambda *_, **__: ran.append(1))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match="--plot needs the package matplotlib"):
        sweep(trace, "--plot", tmp_path / "x.png")
    assert ran == []
