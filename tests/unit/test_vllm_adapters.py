"""Which adapters are told apart, and of which nothing may outlive the engine."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvtier.keys import group_of, make_key, strip_adapter
from kvtier.vllm import adapters
from kvtier.vllm.adapters import AdapterContent, AdapterContents

LATER_NS = 1 << 62
"""An engine that starts then finds only files that are older."""


def write(directory: Path, weights: bytes = b"weights", config: bytes = b"{}") -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "adapter_model.safetensors").write_bytes(weights)
    (directory / "adapter_config.json").write_bytes(config)
    return directory


def asked(path: object, number: int = 1, **more: Any) -> SimpleNamespace:
    return SimpleNamespace(lora_name="a", lora_path=str(path), lora_int_id=number, **more)


def engine(started_ns: int = LATER_NS, **settings: Any) -> AdapterContents:
    return AdapterContents(SimpleNamespace(**settings), started_ns=started_ns)


def outlives(path: Path, started_ns: int = LATER_NS) -> bool:
    """Return whether two engines come to one digest."""
    digests = {engine(started_ns).of(asked(path)).digest for _ in range(2)}
    return len(digests) == 1


@pytest.mark.parametrize("hash_nbytes", [16, 32])
def test_a_key_keeps_both_ends_and_its_group_and_comes_out_as_it_went_in(
    hash_nbytes: int,
) -> None:
    key = make_key(bytes(range(hash_nbytes)), 3)
    content = AdapterContent(b"\xff" * adapters.DIGEST_NBYTES, bool)
    own = content.key(key)
    assert own[:8] == key[:8]
    assert own[-8:] == key[-8:]
    assert group_of(own) == 3
    assert strip_adapter(own) == key
    assert strip_adapter(key) == key


def test_an_adapter_is_known_by_its_content_in_every_engine(tmp_path: Path) -> None:
    first, copied = write(tmp_path / "one"), write(tmp_path / "two")
    assert outlives(first)
    known = engine().of(asked(first))
    assert engine().of(asked(copied, number=7)).digest == known.digest
    assert known.is_current()


@pytest.mark.parametrize("change", [{"weights": b"weightz"}, {"config": b'{"r": 8}'}])
def test_another_content_at_the_same_path_has_another_digest(
    change: Mapping[str, bytes], tmp_path: Path
) -> None:
    before = engine().of(asked(write(tmp_path / "a")))
    after = engine().of(asked(write(tmp_path / "a", **change)))
    assert before.digest != after.digest


def test_how_an_adapter_is_applied_is_part_of_what_it_is(tmp_path: Path) -> None:
    path = write(tmp_path / "a")
    some = {
        engine().of(asked(path)).digest,
        engine(lora_dtype="float16").of(asked(path)).digest,
        engine(target_modules=["q_proj"]).of(asked(path)).digest,
        engine().of(asked(path, is_3d_lora_weight=True)).digest,
    }
    assert len(some) == 4
    two_orders = (["q_proj", "k_proj"], ["k_proj", "q_proj"])
    same = {engine(target_modules=names).of(asked(path)).digest for names in two_orders}
    assert len(same) == 1


def test_what_vllm_does_not_read_is_not_looked_at(tmp_path: Path) -> None:
    path = write(tmp_path / "a")
    contents = engine()
    before = contents.of(asked(path))
    (path / "optimizer.pt").write_bytes(b"state")
    assert before.is_current()
    assert contents.of(asked(path)).digest == before.digest


def test_an_adapter_that_changes_under_the_engine_is_believed_no_more(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path / "a")
    contents = engine()
    before = contents.of(asked(path))
    write(path, b"others!")
    assert not before.is_current()
    assert "its files changed" not in caplog.text
    after = contents.of(asked(path))
    assert "LoRA adapter a: its files changed" in caplog.text
    assert after.is_current()
    assert contents.of(asked(path)).digest == after.digest
    assert after.digest not in {before.digest, engine().of(asked(path)).digest}
    # Nor when it is what it was: vLLM's own prefix cache has KV of both.
    write(path)
    assert contents.of(asked(path)).digest not in {before.digest, after.digest}
    assert outlives(path)


def test_what_may_have_been_loaded_anew_is_told_apart_only_where_nothing_else_does(
    tmp_path: Path,
) -> None:
    path = write(tmp_path / "a")
    ways = [asked(path), asked(path, number=2), asked(path, load_inplace=True)]
    contents = engine()
    assert len({contents.of(way).digest for way in ways}) == 1
    write(path, b"others!")
    assert len({contents.of(way).digest for way in ways}) == 3


def test_of_adapters_that_share_a_number_nothing_more_outlives_the_engine(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM applies the one that it has loaded under that number to requests for the other."""
    paths = [write(tmp_path / name, name.encode()) for name in ("one", "two", "three")]
    believed = [engine().of(asked(path)).digest for path in paths]
    contents = engine()
    assert contents.of(asked(paths[0])).digest == believed[0]
    assert contents.of(asked(paths[2], number=3)).digest == believed[2]
    assert not caplog.text
    after = [contents.of(asked(path)).digest for path in (paths[1], paths[0])]
    assert "another adapter has the same lora_int_id" in caplog.text
    assert len({*after, *believed}) == 5
    assert contents.of(asked(paths[0], number=4)).digest not in believed
    assert contents.of(asked(paths[2], number=3)).digest == believed[2]


def test_of_an_adapter_newer_than_the_engine_nothing_outlives_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path / "a")
    changed_ns = (path / "adapter_model.safetensors").stat().st_ctime_ns
    os.utime(path / "adapter_model.safetensors", (0, 0))  # as a copy that keeps dates
    assert not outlives(path, started_ns=changed_ns)
    assert "newer than the engine" in caplog.text
    contents = engine(changed_ns)
    assert contents.of(asked(path)).digest == contents.of(asked(path)).digest


def test_of_an_adapter_that_cannot_be_read_nothing_outlives_the_engine(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    name: Any = "organisation/adapter"
    assert not outlives(name)
    assert not outlives(tmp_path)
    contents = engine()
    caplog.clear()
    first = contents.of(asked(name))
    assert contents.of(asked(name)).digest == first.digest
    assert contents.of(asked(tmp_path)).digest != first.digest
    assert first.is_current()
    assert caplog.text.count("cannot be read") == 1


def test_a_request_of_an_unknown_kind_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    contents = engine()
    strange = SimpleNamespace()
    assert contents.of(strange).digest != contents.of(strange).digest
    assert "will not outlive" in caplog.text


@pytest.mark.parametrize("at", [0, 4095])
def test_of_large_files_samples_and_the_date_are_enough(
    at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapters, "_WHOLE_NBYTES", 1000)
    monkeypatch.setattr(adapters, "_SAMPLE_NBYTES", 10)
    monkeypatch.setattr(adapters, "_SAMPLES", 8)

    def digest_of(weights: bytes, date_s: int) -> bytes:
        path = write(tmp_path / "a", weights)
        os.utime(path / "adapter_model.safetensors", (date_s, date_s))
        return engine().of(asked(path)).digest

    zeros, changed = bytes(4096), bytearray(4096)
    changed[at] = 1
    assert digest_of(zeros, 5) == digest_of(zeros, 5)
    assert digest_of(zeros, 5) != digest_of(bytes(changed), 5)
    assert digest_of(zeros, 5) != digest_of(zeros, 6)
