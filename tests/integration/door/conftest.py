"""A configuration in a directory of the test's own, and doors that are closed after it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from kvtier.vllm import KVTierOffloadingSpec
from tests.integration.door.doors import (
    CHUNK_NBYTES,
    LAYERS,
    Door,
    OpenDoor,
    Settings,
    offloading_config,
)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    def write(ram: int = 8, nvme: int = 64, extra: str = "") -> Path:
        path = tmp_path / "kvtier.yaml"
        path.write_text(
            f"tiers:\n- kind: ram\n  capacity: {ram * CHUNK_NBYTES}B\n"
            f"- kind: nvme\n  path: {tmp_path / 'store'}\n"
            f"  capacity: {nvme * CHUNK_NBYTES}B\n{extra}",
            encoding="utf-8",
        )
        return path

    return write


@pytest.fixture
def open_door() -> Iterator[OpenDoor]:
    doors: list[Door] = []

    def open_one(
        path: Path,
        kind: type[KVTierOffloadingSpec] = KVTierOffloadingSpec,
        held: Sequence[str] = ("auto",) * LAYERS,
        run_as: Mapping[str, Any] = MappingProxyType({}),
        lora_config: object = None,
        **changes: Any,
    ) -> Door:
        door = Door(offloading_config(path, **changes), kind, held, run_as, lora_config)
        doors.append(door)
        return door

    yield open_one
    for door in doors:
        door.close()
