"""The pictures and the page of ``kvtier sim sweep``."""

from __future__ import annotations

import csv
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvtier.cli import _sim
from kvtier.errors import ConfigError
from kvtier.sim import report
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
        report.write_plot([], tmp_path / "x.png")


def test_without_matplotlib_no_cell_of_a_sweep_with_a_picture_is_run(
    trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[object] = []
    monkeypatch.setattr(_sim, "sweep", lambda *_, **__: ran.append(1))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match="--plot needs the package matplotlib"):
        sweep(trace, "--plot", tmp_path / "x.png")
    assert ran == []


def test_the_page_needs_nothing_else_and_cannot_be_broken_out_of(
    trace: Path, tmp_path: Path
) -> None:
    page = tmp_path / "page.html"
    hostile = tmp_path / "<script>x<-script>.jsonl"
    shutil.copy(trace, hostile)
    sweep(hostile, "--html", page)
    text = page.read_text()
    assert "http://" not in text.replace("http://www.w3.org/2000/svg", "")
    assert "https://" not in text
    assert text.count("<script>") == 1


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="no chromium: apt-get install chromium"
)


def look_at(page: Path) -> str:
    """Return the page as a browser shows it, once its scripts are done."""
    assert CHROMIUM is not None
    flags = ("--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=5000")
    profile = f"--user-data-dir={page.parent}/profile"
    return subprocess.run(
        [CHROMIUM, *flags, profile, "--dump-dom", page.as_uri()],
        capture_output=True,
        text=True,
        check=True,
        timeout=50,
    ).stdout


@needs_chromium
def test_a_browser_draws_every_curve(trace: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    sweep(trace, "--html", page)
    shown = look_at(page)
    for policy in ("lru", "arc"):
        assert f'data-policy="{policy}"' in shown
    assert shown.count('class="curve"') == 2
    assert shown.count('stroke-dasharray="none"') == 2
    assert ">5 %</text>" in shown.partition('class="size"')[2]
    assert shown.count("<circle") == 4
    assert shown.count("<button") == 2
    assert "NaN" not in shown.split("<script>")[0]
    with trace.with_suffix(".csv").open() as file:
        first = next(csv.DictReader(file))
    assert f"{float(first['prefix_hit_ratio']) * 100:.2f} %" in shown.split("<table")[1]


@needs_chromium
def test_the_page_reacts_to_its_reader(trace: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    sweep(trace, "--html", page)
    reader = """<script>
        $("legend").querySelector("button").click();
        $("figure").value = "block_hit_ratio";
        $("scale").value = "linear";
        $("scale").dispatchEvent(new Event("change"));
        $("plot").querySelectorAll("circle")[3].dispatchEvent(new MouseEvent("mousemove"));
    </script>"""
    page.write_text(page.read_text() + reader)
    shown = look_at(page)
    assert 'data-policy="lru" class="off' in shown
    assert shown.count('aria-pressed="false">') == 1
    with trace.with_suffix(".csv").open() as file:
        rows = list(csv.DictReader(file))
    assert f"{float(rows[0]['block_hit_ratio']) * 100:.2f} %" in shown.split("<table")[1]
    assert f"arc at {rows[3]['capacity']}" in shown
