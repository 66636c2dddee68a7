"""``kvtier sim`` and ``kvtier trace``: names and keys that scripts depend on."""

from __future__ import annotations

import csv
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvtier.cli import _sim
from kvtier.cli._commands import app
from kvtier.config import parse_config
from kvtier.errors import ConfigError, KvtierError
from kvtier.recording import CALLS_MARK
from kvtier.sim import report
from kvtier.sim.sweep import COLUMNS
from tests.unit.sim_traces import TRACES, needs_traces

SINGLE_KEYS = [
    "trace",
    "policy",
    "touch_order",
    "capacity_chunks",
    "refs",
    "hits",
    "block_hit_ratio",
    "prefix_hit_ratio",
    "lead_chunks",
    "stranded_hits",
    "seconds",
    "refs_per_second",
]
TIER_KEYS = {"hits", "hit_ratio", "chunks_written", "chunks_promoted", "evictions"}
LADDER_KEYS = {"tiers", "total_hit_ratio", "writes_per_ref", "promotions_per_ref"}
LEVELS = {"p50", "p90", "p99"}


def kvtier(*arguments: object, width: int = 100) -> str:
    """Run a command that works; return what it prints."""
    runner = CliRunner(env={"COLUMNS": str(width)})
    answer = runner.invoke(app, [str(word) for word in arguments])
    if answer.exception is not None:
        raise answer.exception
    return answer.stdout


def refusal(*arguments: object) -> str:
    """Run a command that is refused; return why."""
    with pytest.raises(KvtierError) as error:
        kvtier(*arguments)
    return str(error.value)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "chat.jsonl"
    kvtier("trace", "generate", "chat", "-o", path, "--sessions", 80, "--seed", 7)
    return path


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "ladder.yaml"
    path.write_text(
        "tiers:\n"
        "  - {kind: ram, capacity: 64MiB}\n"
        "  - {kind: nvme, path: /nowhere/at/all, capacity: 256MiB}\n"
    )
    return path


# -- sim run


def test_one_policy_prints_one_object(trace: Path) -> None:
    arguments = ("sim", "run", trace, "--policy", "lru", "--capacity", "5%", "--json")
    printed: dict[str, Any] = json.loads(kvtier(*arguments))
    assert list(printed) == SINGLE_KEYS
    assert printed["trace"] == "chat"
    assert printed["policy"] == "lru"
    assert printed["touch_order"] == "reverse"
    facts = json.loads(kvtier("trace", "info", trace, "--json"))
    assert printed["refs"] == facts["refs"]
    assert printed["capacity_chunks"] == int(facts["distinct"] * 0.05 + 0.5)
    assert printed["block_hit_ratio"] == printed["hits"] / printed["refs"]
    assert 0 < printed["prefix_hit_ratio"] < facts["infinite_prefix_hit_ratio"]


def test_a_ladder_prints_its_tiers_and_what_requests_wait(trace: Path, config: Path) -> None:
    arguments = ("sim", "run", trace, "--config", config, "--chunk-bytes", "1MiB", "--json")
    printed: dict[str, Any] = json.loads(kvtier(*arguments))
    assert printed.keys() >= LADDER_KEYS
    assert [tier["name"] for tier in printed["tiers"]] == ["ram", "nvme"]
    for tier in printed["tiers"]:
        assert tier.keys() >= TIER_KEYS | {"bytes_written_per_day", "dwpd"}
        assert tier["hit_ratio"] == tier["hits"] / printed["refs"]
    assert printed["ttft_s"].keys() == printed["ttft_no_cache_s"].keys() == LEVELS
    assert printed["tiers"][1]["chunks_written"] > 0
    assert 0 < printed["total_hit_ratio"] < 1


def test_tables_are_for_people(trace: Path, config: Path) -> None:
    assert "prefix hit ratio" in kvtier("sim", "run", trace, "--policy", "arc", "--capacity", 9)
    table = kvtier("sim", "run", trace, "--config", config, "--chunk-bytes", "1MiB")
    assert "time to first token p50" in table
    assert "written per day" in table
    assert "transfer.load_path: direct" in table


def test_no_table_loses_a_column_where_there_is_little_room(trace: Path, config: Path) -> None:
    run = ("sim", "run", trace, "--config", config, "--chunk-bytes", "1MiB")
    table = kvtier(*run, width=80)
    head, ram, nvme, *_ = table.splitlines()
    assert head.split()[:3] == ["tier", "eviction", "chunks"]
    assert [ram.split()[0], nvme.split()[0]] == ["ram", "nvme"]
    assert head.split()[-1] == "DWPD"


def test_the_time_model_can_be_told(trace: Path, config: Path) -> None:
    run = ("sim", "run", trace, "--config", config, "--chunk-bytes", "1MiB", "--json")
    told = ("--prefill-rate", 5000, "--tier-speed", "nvme=1GB/s,1GB/s,5ms")
    model = json.loads(kvtier(*run, *told))["time_model"]
    assert model["prefill_tokens_per_s"] == 5000
    assert model["speeds"]["nvme"] == {
        "read_bytes_per_s": 10**9,
        "write_bytes_per_s": 10**9,
        "latency_s": 0.005,
    }


def test_a_tier_slower_than_computing_is_noted(trace: Path, config: Path) -> None:
    run = ("sim", "run", trace, "--config", config, "--chunk-bytes", "1MiB")
    slow = kvtier(*run, "--prefill-rate", 1_000_000, "--tier-speed", "nvme=1GB/s,1GB/s,1ms")
    assert "note: nvme reads a chunk in 1.05 ms and computing it takes 0.51 ms" in slow
    assert "note: nvme" not in kvtier(*run, "--prefill-rate", 1000)


def test_times_of_an_engine_that_is_asked_for_too_much_are_noted(
    trace: Path, config: Path
) -> None:
    run = ("sim", "run", trace, "--config", config, "--chunk-bytes", "1MiB", "--prefill-rate")
    note = "note: without a cache the engine is asked for "
    assert note in kvtier(*run, 1000)
    assert note not in kvtier(*run, 100_000)
    sizes = ("--ram", "64MiB", "--nvme", "1GiB", "--chunk-bytes", "1MiB", "--prefill-rate")
    remark = "# (in its busiest tenth"
    assert remark in kvtier("sim", "recommend", trace, *sizes, 1000).replace("#   ", "# ")


def test_chunks_of_a_ladder_are_the_trace_s(trace: Path, config: Path) -> None:
    config.write_text(config.read_text() + "engine: {blocks_per_chunk: 4}\n")
    run = ("sim", "run", trace, "--config", config, "--chunk-bytes", "1MiB")
    assert "assumed: chunks of 1.00 MiB (512 tokens, of the trace); " in kvtier(*run)


@needs_traces
@pytest.mark.parametrize(
    ("policy", "order", "capacity", "hits"),
    [
        ("lru", "forward", "5%", 56_382),
        ("lru", "reverse", "9140", 56_447),
        ("fifo", "forward", "10%", 73_806),
    ],
)
def test_hits_on_the_conversation_trace_are_the_references(
    policy: str, order: str, capacity: str, hits: int
) -> None:
    path = TRACES / "mooncake_conversation.jsonl"
    arguments = ("--policy", policy, "--capacity", capacity, "--touch-order", order, "--json")
    assert json.loads(kvtier("sim", "run", path, *arguments))["hits"] == hits


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ((), "name either --policy or --config"),
        (("--policy", "lru", "--config", "x.yaml"), "name either --policy or --config"),
        (("--policy", "lru"), "--capacity is missing"),
        (("--policy", "best", "--capacity", "5%"), "best"),
        (("--policy", "lru", "--capacity", "5 GB/s"), "capacity 5 GB/s"),
        (("--policy", "lru", "--capacity", "5%", "--touch-order", "up"), "--touch-order up"),
        (("--policy", "lru", "--capacity", "5%", "--format", "csv"), "--format csv"),
        (("--policy", "lru", "--capacity", "5%", "--chunk-bytes", "0"), "--chunk-bytes 0"),
    ],
)
def test_a_wrong_option_is_one_clear_line(
    trace: Path, arguments: tuple[str, ...], why: str
) -> None:
    text = refusal("sim", "run", trace, *arguments)
    assert why in text
    assert "\n" not in text


POLICY = ("--policy", "lru", "--capacity", "5%")


@pytest.mark.parametrize(
    ("option", "value", "kind"),
    [
        ("--capacity", "5%", "--config"),
        ("--touch-order", "policy", "--config"),
        ("--prefill-rate", "5000", "--policy"),
        ("--tier-speed", "ram=1GB/s,1GB/s,1ms", "--policy"),
    ],
)
def test_an_option_of_the_other_kind_of_run_is_refused(
    trace: Path, config: Path, option: str, value: str, kind: str
) -> None:
    run = ("--config", config) if kind == "--config" else POLICY
    text = refusal("sim", "run", trace, *run, option, value)
    assert text.startswith(f"{option} does not go with {kind}; leave it out, or ")
    assert "\n" not in text


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--format", "mooncake"),
        ("--chunk-bytes", "1MiB"),
        ("--capacity", "5%"),
        ("--prefill-rate", "5000"),
        ("--tier-speed", "nvme=1GB/s,1GB/s,1ms"),
    ],
)
def test_a_recording_says_all_itself(
    tmp_path: Path, config: Path, option: str, value: str
) -> None:
    calls = tmp_path / "calls-000001.jsonl"
    calls.write_text(f'{{"{CALLS_MARK}": 1}}\n')
    text = refusal("sim", "run", calls, "--config", config, option, value)
    assert text.startswith(f"{option} does not go with a recording of calls; leave it out, or ")


def test_a_speed_of_a_tier_that_is_not_there_is_refused(trace: Path, config: Path) -> None:
    arguments = ("--config", config, "--tier-speed", "remote=1GB/s,1GB/s,5ms")
    assert "--tier-speed remote" in refusal("sim", "run", trace, *arguments)


def test_a_bad_trace_ends_the_command_with_2_and_its_line(tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"timestamp": 0, "input_length": 5, "hash_ids": [1]}\n{"timest')
    command = [sys.executable, "-m", "kvtier.cli", "trace", "info", str(bad)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 2
    assert ran.stderr.startswith(f"error: {bad}:2: not JSON")
    assert ran.stdout == ""


# -- sim sweep


def sweep(trace: Path, *more: object) -> str:
    grid = ("--policies", "lru,arc", "--capacities", "5%,20")
    return kvtier("sim", "sweep", trace, *grid, "--csv", trace.with_suffix(".csv"), *more)


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_sweep_writes_what_single_runs_say_and_how_to_repeat_them(
    trace: Path, jobs: int
) -> None:
    printed = sweep(trace, "--jobs", jobs)
    with trace.with_suffix(".csv").open() as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == COLUMNS
    assert [(row["policy"], row["capacity"]) for row in rows] == [
        ("lru", "5%"),
        ("lru", "20"),
        ("arc", "5%"),
        ("arc", "20"),
    ]
    for row in rows:
        cell = ("--policy", row["policy"], "--capacity", row["capacity"], "--json")
        single = json.loads(kvtier("sim", "run", trace, *cell))
        assert int(row["hits"]) == single["hits"]
        assert float(row["prefix_hit_ratio"]) == single["prefix_hit_ratio"]
        assert row["seed"] == "0"
        assert len(row["trace_sha256"]) == 64
    assert "prefix hit ratio" in printed
    assert printed.endswith(f"\nwrote {trace.with_suffix('.csv')}\n")


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


def test_two_traces_of_one_name_are_two(trace: Path, tmp_path: Path) -> None:
    other = tmp_path / "other" / trace.name
    other.parent.mkdir()
    kvtier("trace", "generate", "chat", "-o", other, "--sessions", 40, "--seed", 8)
    page = tmp_path / "page.html"
    printed = sweep(trace, other, "--html", page, "--plot", tmp_path / "two.svg")
    assert printed.count("chat: prefix hit ratio") == 2
    assert (tmp_path / "two.svg").read_text().count('id="axes_') == 2


def test_without_matplotlib_a_picture_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"pip install 'kvtier\[plots\]'"):
        report.write_plot([], tmp_path / "x.png")


@pytest.mark.parametrize(
    ("option", "file", "why"),
    [
        ("--csv", "no/such/x.csv", "cannot be written: there is no directory"),
        ("--csv", "", "cannot be written: is a directory"),
        ("--html", "no/such/x.html", "cannot be written: there is no directory"),
        ("--plot", "no/such/x.png", "cannot be written: there is no directory"),
        ("--plot", "x.docx", "no such picture format"),
        ("--plot", "x", "no such picture format"),
        ("--plot", "x.gif", "no such picture format; name it .png, .svg or .pdf"),
    ],
)
def test_an_output_that_cannot_be_written_is_refused_before_anything_runs(
    trace: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    option: str,
    file: str,
    why: str,
) -> None:
    ran: list[object] = []
    monkeypatch.setattr(_sim, "sweep", lambda *_, **__: ran.append(1))
    monkeypatch.setattr(_sim, "read", lambda *_: ran.append(0))
    csv_too = () if option == "--csv" else ("--csv", tmp_path / "x.csv")
    grid = ("--policies", "lru", "--capacities", "5%", *csv_too)
    assert why in refusal("sim", "sweep", trace, *grid, option, tmp_path / file)
    assert ran == []
    assert not (tmp_path / "x.csv").exists()


@pytest.mark.parametrize(
    ("files", "why"),
    [
        (("--csv", "chat.jsonl"), "--csv {}/chat.jsonl: is the trace itself; name another"),
        (("--csv", "link"), "--csv {}/link: is the trace itself; name another file"),
        (("--csv", "hard"), "--csv {}/hard: is the trace itself; name another file"),
        (
            ("--csv", "x", "--html", "y/../x"),
            "--html {}/y/../x: is the file of --csv as well; name another file",
        ),
    ],
)
def test_no_output_of_a_sweep_replaces_its_trace_or_another_output(
    trace: Path, tmp_path: Path, files: tuple[str, ...], why: str
) -> None:
    before = trace.read_bytes()
    (tmp_path / "y").mkdir()
    (tmp_path / "link").symlink_to(trace)
    (tmp_path / "hard").hardlink_to(trace)
    named = [name if name.startswith("--") else f"{tmp_path}/{name}" for name in files]
    grid = ("--policies", "lru", "--capacities", "5%")
    assert refusal("sim", "sweep", trace, *grid, *named).startswith(why.format(tmp_path))
    assert trace.read_bytes() == before


def test_a_trace_is_not_converted_into_itself(trace: Path) -> None:
    before = trace.read_bytes()
    text = refusal("trace", "convert", trace, "-o", trace, "--to", "keys")
    assert text == f"--output {trace}: is the trace itself; name another file"
    assert trace.read_bytes() == before


def test_outputs_that_keep_nothing_may_be_one(trace: Path) -> None:
    grid = ("--policies", "lru", "--capacities", "5%")
    kvtier("sim", "sweep", trace, *grid, "--csv", "/dev/null", "--html", "/dev/null")


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


# -- sim recommend


def test_a_recommendation_is_a_file_that_loads_and_says_why(trace: Path) -> None:
    arguments = ("--ram", "64MiB", "--nvme", "1GiB", "--chunk-bytes", "1MiB")
    text = kvtier("sim", "recommend", trace, *arguments)
    config = parse_config(text, source="recommended")
    assert [tier.kind for tier in config.tiers] == ["ram", "nvme"]
    assert [tier.capacity_bytes for tier in config.tiers] == [64 << 20, 1 << 30]
    assert config.engine.blocks_per_chunk == 512 // 16
    assert "# Assumes chunks of 512 tokens: set engine.blocks_per_chunk" in text
    assert text.count("<- chosen") == 1
    assert "stays unless another hits 0.3 points more" in text
    assert "ram that reads 25.00 GB/s and writes 25.00 GB/s." in text
    assert "no cache at all" in text
    assert f"write: {config.placement.write}" in next(
        line for line in text.splitlines() if "<- chosen" in line
    )


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("--ram", "1KiB", "--nvme", "1GiB"), "--ram: holds no chunk"),
        (("--ram", "64", "--nvme", "1GiB"), "--ram 64: 64 has no unit"),
        (
            ("--ram", "1GiB", "--nvme", "9GiB", "--tier-speed", "tape=1GB/s,1GB/s,1s"),
            "--tier-speed tape",
        ),
    ],
)
def test_what_cannot_be_recommended_for_is_refused(
    trace: Path, arguments: tuple[str, ...], why: str
) -> None:
    text = refusal("sim", "recommend", trace, "--chunk-bytes", "1MiB", *arguments)
    assert text.startswith(why)


# -- trace


def test_info_says_what_a_trace_holds(trace: Path) -> None:
    facts = json.loads(kvtier("trace", "info", trace, "--json"))
    assert facts["format"] == "mooncake"
    assert facts["chunk_tokens"] == 512
    assert facts["requests"] > 80
    assert "infinite prefix hit ratio" in kvtier("trace", "info", trace)


@pytest.mark.parametrize("to", ["mooncake", "keys", "oracle"])
def test_convert_keeps_the_references(trace: Path, tmp_path: Path, to: str) -> None:
    copy = tmp_path / "copy"
    assert "references" in kvtier("trace", "convert", trace, "-o", copy, "--to", to)
    before = json.loads(kvtier("trace", "info", trace, "--json"))
    after = json.loads(kvtier("trace", "info", copy, "--json"))
    assert after["format"] == to
    for key in ("refs", "distinct", "infinite_block_hit_ratio"):
        assert after[key] == before[key]


def test_generate_makes_the_same_file_again(trace: Path, tmp_path: Path) -> None:
    again = tmp_path / "again.jsonl"
    kvtier("trace", "generate", "chat", "-o", again, "--sessions", 80, "--seed", 7)
    assert again.read_bytes() == trace.read_bytes()


def test_wrong_names_are_refused_with_the_right_ones(trace: Path, tmp_path: Path) -> None:
    text = refusal("trace", "generate", "games", "-o", tmp_path / "x")
    assert "chat, agents, shared" in text
    assert "--to csv" in refusal("trace", "convert", trace, "-o", tmp_path / "x", "--to", "csv")
    nowhere = tmp_path / "no/such/x"
    assert "cannot be written" in refusal("trace", "convert", trace, "-o", nowhere)
