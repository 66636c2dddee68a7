"""What one engine computed, another one loads from a shared tier."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from kvtier.tiers.shared.proof import PROOF_NBYTES, is_proof_of
from tests.demo.model import KV_NBYTES_PER_BLOCK
from tests.demo.runner import EngineProcess, run_engine
from tests.demo.scenario import Scenario, Wave
from tests.integration.harness import Reference, Site
from tests.integration.shared_services import (
    SERVICES,
    Directory,
    cached_tokens,
    reusable_tokens,
    running,
    write_config,
)

PROMPTS = 8
RAM_BLOCKS = 256
DAMAGE_EVERY = 6


def first_wave(reference: Reference) -> Wave:
    return Wave(prompts=reference.conversations[0].prompts[:PROMPTS], max_tokens=4)


def compute_and_kill(scenario: Scenario, site: Site) -> None:
    """Run an engine through ``scenario`` and kill it before it can close."""
    with EngineProcess(scenario, site.directory, "killed") as engine:
        for _ in scenario.waves:
            engine.wait_for("wave")
        engine.kill()


@pytest.mark.parametrize("kind", SERVICES)
def test_an_engine_loads_what_a_killed_engine_computed(
    reference: Reference, site: Site, kind: str
) -> None:
    wave = first_wave(reference)
    with running(kind, site.directory) as service:
        config = write_config(site.directory / "a.yaml", service, ram_blocks=RAM_BLOCKS)
        scenario = Scenario(model=reference.model, config=config, waves=(wave,))
        compute_and_kill(scenario, site)
        report = run_engine(scenario, site.directory, "second")
    reference.assert_equal(report, waves=(wave,))
    assert cached_tokens(report) >= 0.95 * reusable_tokens(wave)
    loaded = report.count("kvtier_hit_tokens", tier=kind)
    distinct = len({prompt.tokens[:160] for prompt in wave.prompts})
    assert loaded >= 160 * distinct, "the rest was in the engine's own prefix cache"


def test_damaged_values_are_computed_and_stored_again(reference: Reference, site: Site) -> None:
    """Values are flipped, truncated and swapped, and replaced by those of other weights."""
    shared = Directory(site.directory / "shared")
    config = write_config(site.directory / "a.yaml", shared, ram_blocks=RAM_BLOCKS)
    wave = first_wave(reference)
    other_weights = wave.model_copy(update={"reset_after_steps": 1, "reweigh": True})
    scenario = Scenario(model=reference.model, config=config, waves=(wave, other_weights))
    compute_and_kill(scenario, site)
    truncated, corrupt = damage(shared.path)
    others = wave.model_copy(update={"prompts": reference.conversations[0].prompts[8:12]})
    waves = (wave, others)
    report = run_engine(scenario.model_copy(update={"waves": waves}), site.directory, "second")
    reference.assert_equal(report, waves=waves)
    assert report.count("kvtier_hit_tokens", tier="shared_dir") > 0
    failed = report.count("kvtier_failed_chunks", tier="shared_dir", cause="corrupt")
    assert 0 < failed <= len(corrupt)
    assert report.count("kvtier_corrupt_chunks", tier="shared_dir") == failed
    assert report.count("kvtier_internal_errors") == 0
    assert all(map(is_whole, truncated))
    assert sum(map(is_whole, corrupt)) == failed


def damage(directory: Path) -> tuple[Sequence[Path], Sequence[Path]]:
    """Damage some values; return the truncated values and those with wrong bytes."""
    by_space: dict[str, list[Path]] = {}
    for path in sorted(directory.rglob("*.kv"), key=lambda path: path.name):
        by_space.setdefault(space_of(path), []).append(path)
    ours, others = sorted(by_space, key=len)
    assert others.startswith(ours), "the epoch of the other weights follows"
    values = by_space[ours]
    spare = iter(by_space[others])
    truncated, corrupt = [], []
    pairs = zip(values[::DAMAGE_EVERY], values[1::DAMAGE_EVERY], strict=False)
    for number, (first, second) in enumerate(pairs):
        match number % 4:
            case 0:
                content = bytearray(first.read_bytes())
                content[len(content) // 3] ^= 1
                first.write_bytes(content)
                corrupt.append(first)
            case 1:
                first.write_bytes(first.read_bytes()[: KV_NBYTES_PER_BLOCK // 2])
                truncated.append(first)
            case 2:
                contents = first.read_bytes(), second.read_bytes()
                second.write_bytes(contents[0])
                first.write_bytes(contents[1])
                corrupt += first, second
            case _:
                first.write_bytes(next(spare).read_bytes())
                corrupt.append(first)
    assert len(truncated) >= 2
    assert len(corrupt) >= 8
    return truncated, corrupt


def space_of(path: Path) -> str:
    """Return the first part of the key of a value."""
    return path.name.partition("_")[0]


def is_whole(path: Path) -> bool:
    """Return whether a value has its proof."""
    content = memoryview(path.read_bytes())
    payload, proof = content[:KV_NBYTES_PER_BLOCK], content[KV_NBYTES_PER_BLOCK:]
    return is_proof_of(proof[:PROOF_NBYTES], path.stem.replace("_", "/"), payload)
