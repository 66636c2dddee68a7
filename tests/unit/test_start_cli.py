"""``check``, ``doctor`` and ``vllm-args`` beside a store that an engine left or has open."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvtier.config import NvmeTierConfig, load_config
from kvtier.os.iopool import IoPool
from kvtier.testing.tier_harness import make_keys, make_sources
from kvtier.tiers.base import TierContext
from kvtier.tiers.slab import SlabTier
from kvtier.types import LayoutFingerprint, Purpose
from kvtier.vllm.identity import declared_identity
from tests.unit.shell import Shell

SLOT = 4096
COMMANDS = [("check",), ("vllm-args",), ("doctor", "--seconds", "0.1")]


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    monkeypatch.setenv("COLUMNS", "1000")
    monkeypatch.setenv("NO_COLOR", "1")
    return Shell(monkeypatch, capsys)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    model = tmp_path / "model"
    model.mkdir()
    (model / "model.safetensors").write_bytes(b"weights")
    return model


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "kvtier.yaml"
    file.write_text(
        "tiers:\n"
        "  - {kind: ram, capacity: 16KiB}\n"
        f"  - {{kind: nvme, path: '{tmp_path}/store', capacity: 32KiB}}\n"
    )
    return file


Start = Callable[[str], SlabTier]


@pytest.fixture
def start(file: Path, pool: IoPool) -> Iterator[Start]:
    """Open the store as an engine with a model does."""
    opened: list[SlabTier] = []

    def start(model: str) -> SlabTier:
        config = load_config(file)
        fields = {**declared_identity(config, model), "kv_layout": "LBHNC"}
        options = config.tiers[1]
        assert isinstance(options, NvmeTierConfig)
        context = TierContext(SLOT, LayoutFingerprint(fields, model), pool)
        opened.append(SlabTier.open(options, context))
        return opened[-1]

    yield start
    for tier in opened:
        stop(tier)


def stop(tier: SlabTier) -> None:
    asyncio.run(tier.aclose())


def warm(start: Start, model: str) -> None:
    tier = start(model)
    keys = make_keys(range(8))
    asyncio.run(tier.write(keys, range(8), make_sources(keys, SLOT), purpose=Purpose.STORE))
    stop(tier)


def test_a_cache_warmed_with_a_relative_path_is_served_with_an_absolute_one(
    shell: Shell, start: Start, file: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(model.parent)
    warm(start, "model")
    assert shell("check", file, "--model", model).code == 0
    assert len(list(start(str(model)).recovered())) == 8


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_fails_where_the_start_would_refuse_another_models_recent_cache(
    shell: Shell, start: Start, file: Path, model: Path, command: tuple[str, ...]
) -> None:
    warm(start, str(model))
    (model / "model.safetensors").write_bytes(b"other weights")
    ran = shell(*command, file, "--model", model)
    assert ran.code == (2 if command[0] == "vllm-args" else 1)
    output = ran.err + ran.out
    assert f"the cache of model {model} in " in output
    assert "model_files is '" in output
    assert "set on_mismatch: remove" in output


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_says_what_the_start_would_remove(
    shell: Shell, start: Start, file: Path, command: tuple[str, ...]
) -> None:
    warm(start, "org/old")
    file.write_text(file.read_text().replace("32KiB", "32KiB, on_mismatch: remove"))
    ran = shell(*command, file, "--model", "org/new")
    assert ran.code == 0
    output = ran.err + ran.out
    assert "removing the cache of model org/old in " in output
    assert "model is 'org/old' there and 'org/new' here" in output


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_names_the_pid_of_the_engine_that_has_the_cache_open(
    shell: Shell, start: Start, file: Path, command: tuple[str, ...]
) -> None:
    start("org/model")
    ran = shell(*command, file)
    assert ran.code == (2 if command[0] == "vllm-args" else 1)
    output = ran.err + ran.out
    assert f"is in use by pid {os.getpid()} on host " in output
    assert "if this is not model org/model, add --model" in output
    assert shell(*command, file, "--model", "org/other").code == 0


def test_a_file_whose_identity_changed_is_refused_without_knowing_the_model(
    shell: Shell, start: Start, file: Path
) -> None:
    warm(start, "org/model")
    file.write_text(f"{file.read_text()}engine: {{blocks_per_chunk: 4}}\n")
    ran = shell("check", file)
    assert (ran.code, ran.err) == (1, "")
    assert "(blocks_per_chunk is 1 there and 4 here)" in ran.out


def test_a_program_gets_what_another_model_would_cost(
    shell: Shell, start: Start, file: Path
) -> None:
    warm(start, "org/model")
    findings = json.loads(shell("check", file, "--json").out)["findings"]
    (note,) = (each for each in findings if each["check"] == "nvme: cache")
    assert note["status"] == "note"
    assert "the cache of model org/model" in note["reason"]
    ran = shell("vllm-args", file)
    assert ran.err.startswith(f"note: {note['place']}: ")
    assert note["reason"].partition(", used ")[0] in ran.err
    assert ran.out.startswith("--kv-transfer-config ")
