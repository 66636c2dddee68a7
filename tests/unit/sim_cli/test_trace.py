"""``kvtier trace``: names and keys that scripts depend on."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

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


def test_info_says_what_a_trace_holds(trace: Path) -> None:
    facts = json.loads(kvtier("trace", "info", trace, "--json"))
    assert facts["format"] == "mooncake"
    assert facts["chunk_tokens"] == 512
    assert facts["requests"] > 80
    assert "infinite prefix hit ratio" in kvtier("trace", "info", trace)


def test_generate_makes_the_same_file_again(trace: Path, tmp_path: Path) -> None:
    again = tmp_path / "again.jsonl"
    kvtier("trace", "generate", "chat", "-o", again, "--sessions", 80, "--seed", 7)
    assert again.read_bytes() == trace.read_bytes()


def test_control_characters_of_a_name_are_escaped_wherever_it_is_shown(
    trace: Path, tmp_path: Path
) -> None:
    odd = trace.rename(tmp_path / "a\x1b[2Jb\nc.jsonl")
    copy = tmp_path / "copy\x1b[2J"
    sizes = ("--ram", "64MiB", "--nvme", "1GiB", "--chunk-bytes", "1MiB")
    recommended = kvtier("sim", "recommend", odd, *sizes)
    for text in (
        kvtier("trace", "info", odd),
        sweep(odd),
        recommended,
    ):
        assert r"a\x1b[2Jb\nc" in text
        assert "\x1b" not in text
    parse_config(recommended, source="recommended")
    generated = kvtier("trace", "generate", "chat", "-o", copy, "--sessions", 2)
    assert generated.startswith(f"{tmp_path}/copy\\x1b[2J: ")
    assert "\x1b" not in generated
    for arguments in (("info", copy / "no"), ("generate", "chat", "-o", copy / "no")):
        assert r"copy\x1b[2J/no" in refusal("trace", *arguments)


def test_wrong_names_are_refused_with_the_right_ones(tmp_path: Path) -> None:
    text = refusal("trace", "generate", "games", "-o", tmp_path / "x")
    assert "chat, agents, shared" in text
    nowhere = tmp_path / "no/such/x"
    assert "cannot be written" in refusal("trace", "generate", "chat", "-o", nowhere)
    too_long = tmp_path / ("x" * 300)
    problem = "cannot be written: File name too long"
    assert problem in refusal("trace", "generate", "chat", "-o", too_long)
