"""A trace of the generator's, and tiers to run it on."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.sim_cli.commands import kvtier


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "chat.jsonl"
    kvtier("trace", "generate", "chat", "-o", path, "--sessions", 80, "--seed", 7)
    return path


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "tiers.yaml"
    path.write_text(
        "tiers:\n"
        "  - {kind: ram, capacity: 64MiB}\n"
        "  - {kind: nvme, path: /nowhere/at/all, capacity: 256MiB}\n"
    )
    return path
