"""The digests of adapters, and the adapters whose chunks must not outlive the engine."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvtier.keys import group_of, make_key, strip_adapter
from kvtier.vllm import adapters
from kvtier.vllm.adapters import AdapterContent, AdapterContents

LATER_NS = 1 << 62
"""An engine that starts then finds only files that are older."""

MakeEngine = Callable[..., AdapterContents]


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeEngine]:
    """Make the adapters of an engine; its deadlines do not fail on a busy machine."""
    monkeypatch.setattr(adapters, "_READ_TIMEOUT_S", 60.0)
    monkeypatch.setattr(adapters, "_CHECK_TIMEOUT_S", 60.0)
    engines: list[AdapterContents] = []

    def make(started_ns: int = LATER_NS, **settings: Any) -> AdapterContents:
        engines.append(AdapterContents(SimpleNamespace(**settings), started_ns=started_ns))
        return engines[-1]

    yield make
    for each in engines:
        each.close()


def write(directory: Path, weights: bytes = b"weights", config: bytes = b"{}") -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "adapter_model.safetensors").write_bytes(weights)
    (directory / "adapter_config.json").write_bytes(config)
    return directory


def asked(path: object, number: int = 1, **more: Any) -> SimpleNamespace:
    return SimpleNamespace(lora_name="a", lora_path=str(path), lora_int_id=number, **more)


def outlives(engine: MakeEngine, path: Path, started_ns: int = LATER_NS) -> bool:
    """Return whether two engines come to one digest."""
    digests = {engine(started_ns).content_of(asked(path)).digest for _ in range(2)}
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


def test_an_adapter_is_known_by_its_content_in_every_engine(
    engine: MakeEngine, tmp_path: Path
) -> None:
    first, copied = write(tmp_path / "one"), write(tmp_path / "two")
    assert outlives(engine, first)
    known = engine().content_of(asked(first))
    assert engine().content_of(asked(copied, number=7)).digest == known.digest
    assert known.is_current()


@pytest.mark.parametrize("change", [{"weights": b"weightz"}, {"config": b'{"r": 8}'}])
def test_another_content_at_the_same_path_has_another_digest(
    engine: MakeEngine, change: Mapping[str, bytes], tmp_path: Path
) -> None:
    before = engine().content_of(asked(write(tmp_path / "a")))
    after = engine().content_of(asked(write(tmp_path / "a", **change)))
    assert before.digest != after.digest


def test_how_an_adapter_is_applied_is_part_of_what_it_is(
    engine: MakeEngine, tmp_path: Path
) -> None:
    path = write(tmp_path / "a")
    some = {
        engine().content_of(asked(path)).digest,
        engine(lora_dtype="float16").content_of(asked(path)).digest,
        engine(target_modules=["q_proj"]).content_of(asked(path)).digest,
        engine().content_of(asked(path, is_3d_lora_weight=True)).digest,
    }
    assert len(some) == 4
    two_orders = (["q_proj", "k_proj"], ["k_proj", "q_proj"])
    same = {engine(target_modules=names).content_of(asked(path)).digest for names in two_orders}
    assert len(same) == 1


def test_files_that_vllm_does_not_read_are_ignored(engine: MakeEngine, tmp_path: Path) -> None:
    path = write(tmp_path / "a")
    contents = engine()
    before = contents.content_of(asked(path))
    (path / "optimizer.pt").write_bytes(b"state")
    assert before.is_current()
    assert contents.content_of(asked(path)).digest == before.digest


def test_an_adapter_that_changes_during_the_run_is_not_trusted(
    engine: MakeEngine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path / "a")
    contents = engine()
    before = contents.content_of(asked(path))
    write(path, b"others!")
    contents.begin_step()
    assert not before.is_current()
    assert "its files changed" not in caplog.text
    after = contents.content_of(asked(path))
    assert "LoRA adapter a: its files changed" in caplog.text
    assert after.is_current()
    assert contents.content_of(asked(path)).digest == after.digest
    assert after.digest not in {before.digest, engine().content_of(asked(path)).digest}
    # Nor when it is what it was: vLLM's own prefix cache has KV of both.
    write(path)
    assert contents.content_of(asked(path)).digest not in {before.digest, after.digest}
    assert outlives(engine, path)


def test_after_a_change_each_way_to_load_an_adapter_has_its_own_digest(
    engine: MakeEngine, tmp_path: Path
) -> None:
    path = write(tmp_path / "a")
    ways = [asked(path), asked(path, number=2), asked(path, load_inplace=True)]
    contents = engine()
    assert len({contents.content_of(way).digest for way in ways}) == 1
    write(path, b"others!")
    assert len({contents.content_of(way).digest for way in ways}) == 3


def test_chunks_of_adapters_that_share_a_number_do_not_outlive_the_engine(
    engine: MakeEngine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM applies the one that it has loaded under that number to requests for the other."""
    paths = [write(tmp_path / name, name.encode()) for name in ("one", "two", "three")]
    trusted = [engine().content_of(asked(path)).digest for path in paths]
    contents = engine()
    assert contents.content_of(asked(paths[0])).digest == trusted[0]
    assert contents.content_of(asked(paths[2], number=3)).digest == trusted[2]
    assert not caplog.text
    after = [contents.content_of(asked(path)).digest for path in (paths[1], paths[0])]
    assert "another adapter has the same lora_int_id" in caplog.text
    assert len({*after, *trusted}) == 5
    assert contents.content_of(asked(paths[0], number=4)).digest not in trusted
    assert contents.content_of(asked(paths[2], number=3)).digest == trusted[2]


def test_chunks_of_an_adapter_newer_than_the_engine_do_not_outlive_it(
    engine: MakeEngine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path / "a")
    changed_ns = (path / "adapter_model.safetensors").stat().st_ctime_ns
    os.utime(path / "adapter_model.safetensors", (0, 0))  # as a copy that keeps dates
    assert not outlives(engine, path, started_ns=changed_ns)
    assert "newer than the engine" in caplog.text
    contents = engine(changed_ns)
    assert contents.content_of(asked(path)).digest == contents.content_of(asked(path)).digest


def test_chunks_of_an_unreadable_adapter_do_not_outlive_the_engine(
    engine: MakeEngine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    name: Any = "organisation/adapter"
    assert not outlives(engine, name)
    assert not outlives(engine, tmp_path)
    contents = engine()
    caplog.clear()
    first = contents.content_of(asked(name))
    assert contents.content_of(asked(name)).digest == first.digest
    assert contents.content_of(asked(tmp_path)).digest != first.digest
    assert first.is_current()
    assert caplog.text.count("cannot be read") == 1


def test_a_request_of_an_unknown_kind_is_no_error(
    engine: MakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    contents = engine()
    strange = SimpleNamespace()
    content = contents.content_of(strange)
    assert content.digest != contents.content_of(strange).digest
    assert not content.is_current()
    assert caplog.text.count("neither load nor store") == 1


def test_an_unexpected_error_is_logged_once(
    engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    error = ZeroDivisionError("a bug")

    def fail(_: object) -> Any:
        raise error

    monkeypatch.setattr(os, "scandir", fail)
    contents = engine()
    assert len({contents.content_of(asked("adapter")).digest for _ in range(3)}) == 3
    assert caplog.text.count("ZeroDivisionError: a bug") == 1
    contents.content_of(SimpleNamespace())
    assert "AttributeError" in caplog.text
    assert error.__traceback__ is None, "frames of requests are kept"


@pytest.mark.parametrize("at", [0, 4095])
def test_of_large_files_samples_and_the_date_are_enough(
    engine: MakeEngine, at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapters, "_WHOLE_NBYTES", 1000)
    monkeypatch.setattr(adapters, "_SAMPLE_NBYTES", 10)
    monkeypatch.setattr(adapters, "_SAMPLES", 8)

    def digest_of(weights: bytes, date_s: int) -> bytes:
        path = write(tmp_path / "a", weights)
        os.utime(path / "adapter_model.safetensors", (date_s, date_s))
        return engine().content_of(asked(path)).digest

    zeros, changed = bytes(4096), bytearray(4096)
    changed[at] = 1
    assert digest_of(zeros, 5) == digest_of(zeros, 5)
    assert digest_of(zeros, 5) != digest_of(bytes(changed), 5)
    assert digest_of(zeros, 5) != digest_of(zeros, 6)


class StallingServer:
    """Directories on a file server that answers, or stalls until it answers again."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.answers = threading.Event()
        self.answers.set()
        self.asked = 0
        self._monkeypatch = monkeypatch
        self._scandir = os.scandir
        monkeypatch.setattr(os, "scandir", self._answer)

    def _answer(self, directory: Path) -> Any:
        self.asked += 1
        self.answers.wait()
        return self._scandir(directory)

    def stall(self) -> None:
        """Stall, and let the engine's deadlines pass at once."""
        self.answers.clear()
        self._monkeypatch.setattr(adapters, "_READ_TIMEOUT_S", 0.0)
        self._monkeypatch.setattr(adapters, "_CHECK_TIMEOUT_S", 0.0)

    def recover(self) -> None:
        """Answer what was asked before and whatever is asked from now on."""
        self._monkeypatch.setattr(adapters, "_READ_TIMEOUT_S", 60.0)
        self._monkeypatch.setattr(adapters, "_CHECK_TIMEOUT_S", 60.0)
        self.answers.set()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[StallingServer]:
    server = StallingServer(monkeypatch)
    yield server
    server.answers.set()


def after_the_late_call(contents: AdapterContents, path: Path, **more: Any) -> AdapterContent:
    """Return the content of the first request after the late call has ended."""
    content = contents.content_of(asked(path, **more))
    while contents.content_of(asked(path, **more)).digest != content.digest:
        content = contents.content_of(asked(path, **more))
    return content


def test_a_request_whose_files_are_not_read_in_time_neither_loads_nor_stores(
    engine: MakeEngine, server: StallingServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path / "a")
    known, contents = engine().content_of(asked(path)), engine()
    server.stall()
    late = [contents.content_of(asked(path)) for _ in range(3)]
    assert len({known.digest, *(each.digest for each in late)}) == 4
    assert caplog.text.count("does not answer in time") == 1
    server.recover()
    assert after_the_late_call(contents, path).digest == known.digest
    assert not any(each.is_current() for each in late)


def test_a_store_while_the_file_server_stalls_is_refused_and_later_ones_are_not(
    engine: MakeEngine, server: StallingServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path / "a")
    contents = engine()
    known = contents.content_of(asked(path))
    server.stall()
    assert not known.is_current()
    assert not known.is_current()
    assert contents.content_of(asked(path)).digest != known.digest
    assert caplog.text.count("LoRA adapter a: its file system does not answer in time") == 1
    server.recover()
    assert after_the_late_call(contents, path).digest == known.digest
    contents.begin_step()
    assert known.is_current()


def test_the_stores_of_a_step_look_at_the_files_of_an_adapter_once(
    engine: MakeEngine, server: StallingServer, tmp_path: Path
) -> None:
    one, two = write(tmp_path / "one"), write(tmp_path / "two")
    contents = engine()
    known = [
        contents.content_of(asked(one)),
        contents.content_of(asked(one)),
        contents.content_of(asked(two, 2)),
    ]
    before = server.asked
    for looks in (2, 4):
        contents.begin_step()
        for content in known * 10:
            assert content.is_current()
        assert server.asked == before + looks


def test_files_that_change_while_the_server_stalls_are_not_trusted(
    engine: MakeEngine, server: StallingServer, tmp_path: Path
) -> None:
    path = write(tmp_path / "a")
    contents = engine()
    known = contents.content_of(asked(path))
    server.stall()
    contents.content_of(asked(path))
    write(path, b"others!")
    other = engine().content_of(asked(path))
    server.recover()
    after = after_the_late_call(contents, path)
    assert after.digest not in {
        known.digest,
        other.digest,
        engine().content_of(asked(path)).digest,
    }


def test_a_number_of_a_late_adapter_is_shared_as_of_any_other(
    engine: MakeEngine, server: StallingServer, tmp_path: Path
) -> None:
    """vLLM has loaded it, although kvtier does not know its content yet."""
    paths = [write(tmp_path / name, name.encode()) for name in ("one", "two")]
    trusted = [engine().content_of(asked(path)).digest for path in paths]
    contents = engine()
    server.stall()
    for path in paths:
        contents.content_of(asked(path))
    server.recover()
    for path in paths:
        assert after_the_late_call(contents, path).digest not in trusted


def test_closing_does_not_wait_for_a_server_that_stalls(
    engine: MakeEngine, server: StallingServer, tmp_path: Path
) -> None:
    contents = engine()
    server.stall()
    contents.content_of(asked(tmp_path))
    contents.close()
    assert not server.answers.is_set()
