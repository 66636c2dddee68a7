"""The commands where packages of the extras are missing, as after ``pip install kvtier``."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
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
for name in sys.argv[1:]:
    sys.modules[name] = None  # its import raises ModuleNotFoundError
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


def run_without(packages: Sequence[str], commands: list[list[str]]) -> list[Ran]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *packages],
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


def without_extras(config: str, store: Store, files: Path) -> list[list[str]]:
    """Return commands that need no extra, for a full store."""
    return [
        ["example"],
        ["check", config],
        ["doctor", config, "--seconds", "0.1"],
        ["plan", config, "--model", str(files)],
        ["vllm-args", config],
        ["schema"],
        ["cache", "stat", str(store.root)],
        ["cache", "ls", str(store.root)],
        ["cache", "verify", str(store.root)],
        ["cache", "explain", str(store.root), short_key(KEYS[0])],
        ["cache", "evict", str(store.root), short_key(KEYS[0]), "--yes"],
        ["cache", "compact-index", str(store.root)],
        ["cache", "export", str(store.root), f"{files}/archive"],
        ["cache", "merge", f"{files}/archive", f"{files}/merged"],
        ["cache", "import", f"{files}/merged", f"{files}/imported"],
    ]


def without_torch(config: str, store: Store, files: Path) -> list[list[str]]:
    """Return commands that need numpy and no torch."""
    trace, capacities = str(TRACE), ["--policies", "lru", "--capacities", "9"]
    prompts = files / "prompts.jsonl"
    prompts.write_text('{"prompt_token_ids": [1, 2, 3]}\n')
    coverage = ["cache", "coverage", str(store.root), "--prompts", str(prompts)]
    return [
        [*coverage, "--model", "some/model"],
        ["sim", "run", trace, "--config", config, "--chunk-bytes", "1MiB"],
        ["sim", "sweep", trace, *capacities, "--csv", f"{files}/curves"],
        ["sim", "recommend", trace, "--ram", "1GiB", "--nvme", "2GiB"],
        ["trace", "info", trace],
        ["trace", "generate", "chat", "--sessions", "9", "--output", f"{files}/made"],
    ]


def check(commands: list[list[str]], results: Sequence[Ran], missing: str) -> None:
    for command, ran in zip(commands, results, strict=True):
        assert ran.code == 0 or (command[0], ran.code) in {("check", 1), ("doctor", 1)}, (
            command,
            ran,
        )
        assert ran.out, command
        assert missing not in ran.err, (command, ran)


def test_every_command_works_without_what_only_others_need(
    config: str, tmp_path: Path, store: Store
) -> None:
    plain = without_extras(config, store.filled(), tmp_path)
    check(plain, run_without(["numpy", "torch", "zstandard", "obstore"], plain), "numpy")
    simulating = without_torch(config, store, tmp_path)
    check(simulating, run_without(["torch"], simulating), "torch")
    tried = {command[0] for command in (*plain, *simulating)}
    assert tried == {command.name for command in app.registered_commands} - {"replay", "warmup"}


@pytest.mark.parametrize(
    ("command", "package", "extra"),
    [("replay", "torch", "torch"), ("replay", "numpy", "torch"), ("sim", "numpy", "sim")],
)
def test_a_command_without_what_it_needs_names_the_extra_to_install(
    config: str, command: str, package: str, extra: str
) -> None:
    verb = {"replay": ["replay"], "sim": ["sim", "run"]}[command]
    (ran,) = run_without([package], [[*verb, str(TRACE), "--config", config]])
    remedy = f"install it with: pip install 'kvtier[{extra}]'"
    assert ran == Ran(2, "", f"error: kvtier {command} needs the package {package}; {remedy}\n")


def test_a_warm_up_without_vllm_names_the_extra_to_install(config: str, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "hello"}\n')
    command = ["warmup", config, "--model", "m", "--prompts", str(prompts)]
    for missing in ("numpy", "torch"):
        (ran,) = run_without([missing], [command])
        assert (ran.code, ran.out) == (2, "")
        assert "install it with: pip install 'kvtier[vllm]'" in ran.err, missing


def test_a_coverage_without_numpy_names_the_extra_to_install(
    store: Store, tmp_path: Path
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt_token_ids": [1, 2, 3]}\n')
    command = ["cache", "coverage", str(store.root), "--prompts", str(prompts), "--model", "m"]
    (ran,) = run_without(["numpy"], [command])
    remedy = "install it with: pip install 'kvtier[sim]'"
    assert ran == Ran(
        2, "", f"error: kvtier cache coverage needs the package numpy; {remedy}\n"
    )
