"""Opening a tier's slot file in a worker, and what kvikio's reads are made of."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvtier.errors import ConfigError, TierUnavailableError, UnsupportedError
from kvtier.memory.direct_files import DirectRead, PosixFiles, open_slot_file
from kvtier.memory.kvikio_files import KvikioFiles, check_packages, open_direct_files
from kvtier.types import SlotFileId

PAGE = 4096
CONTENT = os.urandom(4 * PAGE)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = tmp_path / "slots.bin"
    made.write_bytes(CONTENT)
    return made


def identity(path: Path) -> SlotFileId:
    status = path.stat()
    return SlotFileId("nvme", str(path), status.st_dev, status.st_ino)


def test_adjacent_and_distant_bytes_are_read_where_they_belong(path: Path) -> None:
    files = PosixFiles()
    memory = files.staging_memory(3 * PAGE)
    assert memory.data_ptr() % PAGE == 0
    file = open_slot_file(files, identity(path))
    reads = [DirectRead(PAGE, memory[: 2 * PAGE]), DirectRead(0, memory[2 * PAGE :])]
    assert file.read(reads) == ["", ""]
    assert memory.numpy().tobytes() == CONTENT[PAGE : 3 * PAGE] + CONTENT[:PAGE]
    file.close()


def test_a_read_past_the_end_fails_alone(path: Path) -> None:
    files = PosixFiles()
    memory = files.staging_memory(3 * PAGE)
    file = open_slot_file(files, identity(path))
    first, second = file.read(
        [DirectRead(3 * PAGE, memory[: 2 * PAGE]), DirectRead(0, memory[2 * PAGE :])]
    )
    assert "ends after 4096 of 8192 bytes" in first
    assert not second
    file.close()


def test_another_file_under_the_same_path_is_refused(path: Path) -> None:
    wanted = identity(path)
    path.rename(path.with_name("aside"))
    path.write_bytes(CONTENT)
    with pytest.raises(TierUnavailableError, match="another file now"):
        open_slot_file(PosixFiles(), wanted)


def test_a_symbolic_link_to_the_file_is_refused(path: Path) -> None:
    link = path.with_name("link")
    link.symlink_to(path)
    with pytest.raises(TierUnavailableError, match="symbolic"):
        open_slot_file(PosixFiles(), identity(path)._replace(path=str(link)))


def test_a_file_that_is_gone_is_an_error_that_names_it(path: Path) -> None:
    wanted = identity(path)
    path.unlink()
    with pytest.raises(TierUnavailableError, match=r"slots\.bin: .*No such file"):
        open_slot_file(PosixFiles(), wanted)


# -- kvikio ------------------------------------------------------------------------------------


class Future:
    """A read of kvikio's."""

    def __init__(self, result: int | Exception) -> None:
        self.result = result
        self.is_awaited = False

    def get(self) -> int:
        self.is_awaited = True
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


class FakeKvikio:
    """The part of kvikio that is used; reads have the results that a test sets."""

    def __init__(self, *results: int | Exception) -> None:
        self.results = list(results)
        self.futures: list[Future] = []
        self.settings: dict[str, Any] = {}
        self.registered: list[int] = []
        self.defaults = SimpleNamespace(set=self.settings.update)
        self.opened: list[tuple[str, str]] = []

    def CuFile(self, path: str, flags: str) -> FakeKvikio:  # noqa: N802 - kvikio's name
        self.opened.append((path, flags))
        return self

    def memory_register(self, memory: torch.Tensor) -> None:
        raise RuntimeError("cuFile is not there")

    def pread(self, into: torch.Tensor, size: int, file_offset: int) -> Future:
        result = self.results.pop(0)
        if isinstance(result, ValueError):
            raise result
        self.futures.append(Future(result))
        return self.futures[-1]

    def close(self) -> None:
        self.opened.clear()


def read(kvikio: FakeKvikio, reads: int) -> list[str]:
    files = KvikioFiles(kvikio, torch.device("cpu"))
    memory = files.staging_memory(reads * PAGE)
    assert memory.data_ptr() % PAGE == 0
    file = files.open("/proc/self/fd/7")
    assert kvikio.opened == [("/proc/self/fd/7", "r")]
    errors = file.read([DirectRead(0, part) for part in memory.view(reads, PAGE)])
    file.close()
    return errors


def test_every_read_that_began_is_awaited_whatever_fails() -> None:
    kvikio = FakeKvikio(PAGE, RuntimeError("cuFile: EIO"), ValueError("odd"), 100)
    assert read(kvikio, 4) == [
        "",
        "cuFile: EIO",
        "odd",
        "the file ends after 100 of 4096 bytes",
    ]
    assert all(future.is_awaited for future in kvikio.futures)
    assert len(kvikio.futures) == 3


def test_reads_go_past_the_page_cache_on_several_threads() -> None:
    kvikio = FakeKvikio(PAGE)
    assert read(kvikio, 1) == [""]
    assert kvikio.settings["auto_direct_io_read"] is True
    assert kvikio.settings["num_threads"] > 1


Install = Callable[..., None]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Let exactly some packages be installed."""

    def install(*names: str) -> None:
        def version(name: str) -> str:
            if name not in names:
                raise metadata.PackageNotFoundError(name)
            return "26.10"

        monkeypatch.setattr(metadata, "version", version)

    return install


def test_kvikio_for_another_cuda_than_torch_is_refused_with_a_remedy(install: Install) -> None:
    install("kvikio-cu12")
    with pytest.raises(ConfigError, match=r"uninstall kvikio-cu12 && .*gds-cu13"):
        check_packages("13")
    install("kvikio-cu12", "kvikio-cu13")
    with pytest.raises(ConfigError, match="uninstall kvikio-cu12"):
        check_packages("13")


def test_kvikio_for_the_same_cuda_is_accepted(install: Install) -> None:
    install("kvikio-cu13")
    check_packages("13")
    install("kvikio-cu12")
    check_packages("12")


def test_missing_kvikio_is_named_with_the_extra_that_brings_it(install: Install) -> None:
    install()
    with pytest.raises(UnsupportedError, match=r"kvikio-cu13 is not .*kvtier\[gds-cu13\]"):
        check_packages("13")


def test_memory_of_a_cpu_has_no_direct_files() -> None:
    with pytest.raises(UnsupportedError, match="on the cpu, and not on a GPU"):
        open_direct_files(torch.device("cpu"))
