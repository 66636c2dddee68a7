"""The commands where torch is not installed, as after ``pip install kvtier`` without extras."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from kvtier.cli._app import app
from kvtier.keys import short_key
from tests.unit.model_shapes import LLAMA_8B
from tests.unit.stores import KEYS, Store

ROOT = Path(__file__).parents[2]
TRACE = ROOT / "tests/data/small_chat.jsonl"
PROGRAM = """
import contextlib, io, json, sys
sys.modules["torch"] = None  # import torch raises ModuleNotFoundError
from kvtier.cli import main
ran = []
for arguments in json.load(sys.stdin):
    sys.argv, out, err = ["kvtier", *arguments], io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as leaving:
            ran.append((leaving.code, out.getvalue(), err.getvalue()))
json.dump(ran, sys.stdout)
"""


class Ran(NamedTuple):
    code: int
    out: str
    err: str


def run_without_torch(commands: list[list[str]]) -> list[Ran]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input=json.dumps(commands),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=120,
        cwd=ROOT,
    )
    return [Ran(*ran) for ran in json.loads(done.stdout)]


@pytest.fixture
def config(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    file = tmp_path / "kvtier.yaml"
    file.write_text(
        "tiers:\n"
        "  - {kind: ram, capacity: 32MiB}\n"
        f"  - {{kind: nvme, path: {tmp_path}/new, capacity: 64MiB}}\n"
    )
    return str(file)


def test_every_command_but_replay_and_warmup_works_without_torch(
    config: str, tmp_path: Path, store: Store
) -> None:
    store.start()
    store.fill()
    store.stop()
    trace, files, prompts = str(TRACE), tmp_path, str(tmp_path / "prompts.jsonl")
    Path(prompts).write_text('{"prompt_token_ids": [1, 2, 3]}\n')
    commands = [
        ["example"],
        ["check", config],
        ["doctor", config, "--seconds", "0.1"],
        ["plan", config, "--model", str(tmp_path)],
        ["vllm-args", config],
        ["schema"],
        ["cache", "stat", str(store.root)],
        ["cache", "ls", str(store.root)],
        ["cache", "verify", str(store.root)],
        ["cache", "explain", short_key(KEYS[0]), str(store.root)],
        ["cache", "evict", short_key(KEYS[0]), str(store.root), "--yes"],
        ["cache", "compact-index", str(store.root)],
        ["cache", "coverage", str(store.root), "--prompts", prompts, "--model", "some/model"],
        ["sim", "run", trace, "--policy", "hedged-lhd", "--capacity", "10%"],
        ["sim", "run", trace, "--config", config, "--chunk-bytes", "1MiB"],
        [
            "sim",
            "sweep",
            trace,
            "--policies",
            "lru",
            "--capacities",
            "9",
            "--csv",
            f"{files}/c",
        ],
        ["sim", "recommend", trace, "--ram", "1GiB", "--nvme", "2GiB"],
        ["trace", "info", trace],
        ["trace", "convert", trace, "--output", f"{files}/converted"],
        ["trace", "generate", "chat", "--sessions", "9", "--output", f"{files}/made"],
    ]
    for command, ran in zip(commands, run_without_torch(commands), strict=True):
        assert ran.code == 0 or (command[0], ran.code) in {("check", 1), ("doctor", 1)}, (
            command,
            ran,
        )
        assert ran.out, command
        assert "torch" not in ran.err, (command, ran)
    tried = {command[0] for command in commands}
    assert tried == {command.name for command in app.registered_commands} - {"replay", "warmup"}


def test_a_replay_without_torch_names_the_extra_to_install(config: str) -> None:
    (ran,) = run_without_torch([["replay", str(TRACE), "--config", config]])
    remedy = "install it with: pip install 'kvtier[torch]'"
    assert ran == Ran(2, "", f"error: kvtier replay needs the package torch; {remedy}\n")


def test_a_warm_up_without_vllm_names_the_extra_to_install(config: str, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "hello"}\n')
    command = ["warmup", config, "--model", "m", "--prompts", str(prompts)]
    (ran,) = run_without_torch([command])
    remedy = "install it with: pip install 'kvtier[vllm]'"
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith("error: texts and engines need the package ")
    assert remedy in ran.err
