"""``kvtier trace``: names and keys that scripts depend on."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvtier.config import parse_config
from tests.unit.sim_cli.commands import kvtier, refusal, sweep


def test_a_bad_trace_ends_the_command_with_2_and_its_line(tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"timestamp": 0, "input_length": 5, "hash_ids": [1]}\n{"timest')
    command = [sys.executable, "-m", "kvtier", "trace", "info", str(bad)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 2
    assert ran.stderr.startswith(f"error: {bad}:2: not JSON")
    assert ran.stdout == ""


def test_a_trace_is_not_converted_into_itself(trace: Path) -> None:
    before = trace.read_bytes()
    text = refusal("trace", "convert", trace, "-o", trace, "--to", "keys")
    assert text == f"--output {trace}: is the trace itself; name another file"
    assert trace.read_bytes() == before


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


def test_control_characters_of_a_name_are_escaped_wherever_it_is_shown(
    trace: Path, tmp_path: Path
) -> None:
    odd = trace.rename(tmp_path / "a\x1b[2Jb\nc.jsonl")
    copy = tmp_path / "copy\x1b[2J"
    tier = ("--policy", "lru", "--capacity", "10%")
    sizes = ("--ram", "64MiB", "--nvme", "1GiB", "--chunk-bytes", "1MiB")
    recommended = kvtier("sim", "recommend", odd, *sizes)
    for text in (
        kvtier("trace", "info", odd),
        kvtier("sim", "run", odd, *tier),
        sweep(odd),
        recommended,
    ):
        assert r"a\x1b[2Jb\nc" in text
        assert "\x1b" not in text
    parse_config(recommended, source="recommended")
    converted = kvtier("trace", "convert", odd, "-o", copy)
    assert converted.startswith(f"{tmp_path}/copy\\x1b[2J: ")
    assert "\x1b" not in converted
    for arguments in (("info", copy / "no"), ("convert", odd, "-o", copy / "no")):
        assert r"copy\x1b[2J/no" in refusal("trace", *arguments)


def test_wrong_names_are_refused_with_the_right_ones(trace: Path, tmp_path: Path) -> None:
    text = refusal("trace", "generate", "games", "-o", tmp_path / "x")
    assert "chat, agents, shared" in text
    assert "--to csv" in refusal("trace", "convert", trace, "-o", tmp_path / "x", "--to", "csv")
    nowhere = tmp_path / "no/such/x"
    assert "cannot be written" in refusal("trace", "convert", trace, "-o", nowhere)
    too_long = tmp_path / ("x" * 300)
    problem = "cannot be written: File name too long"
    assert problem in refusal("trace", "generate", "chat", "-o", too_long)
