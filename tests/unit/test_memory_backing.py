"""The file behind the RAM tier, in huge pages and in small ones."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.errors import CapacityError
from kvtier.memory import HostRegion, RegionGeometry
from kvtier.memory import backing as module
from kvtier.memory.backing import create_memory
from kvtier.os.limits import huge_page_pool
from kvtier.os.memory import open_anonymous

HUGE = 2 << 20


@pytest.fixture
def created() -> Iterator[list[int]]:
    descriptors: list[int] = []
    yield descriptors
    for descriptor in descriptors:
        os.close(descriptor)


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A kernel whose figures a test writes; huge pages themselves are only pretended."""
    meminfo = tmp_path / "meminfo"
    monkeypatch.setattr(module, "_PROC", tmp_path)
    monkeypatch.setattr("kvtier.os.memory._HUGETLB", 0)
    return meminfo


def say(meminfo: Path, *, free: int, promised: int = 0, page_kib: int = 2048) -> None:
    meminfo.write_text(
        f"MemAvailable:   1000000 kB\nHugePages_Free:   {free}\nHugePages_Rsvd:   {promised}\n"
        f"Hugepagesize:    {page_kib} kB\n",
        encoding="ascii",
    )


def test_huge_pages_are_used_if_there_are_enough_for_the_whole_tier(
    pool: Path, created: list[int]
) -> None:
    say(pool, free=4, promised=1)
    created.append(create_memory("test", 2 * HUGE + 1, "require"))
    assert os.fstat(created[-1]).st_size == 3 * HUGE


@pytest.mark.parametrize(
    ("free", "promised", "page_kib"), [(2, 0, 2048), (3, 1, 2048), (9, 0, 0)]
)
def test_without_enough_of_them_the_tier_has_small_pages_or_refuses(
    pool: Path, created: list[int], free: int, promised: int, page_kib: int
) -> None:
    say(pool, free=free, promised=promised, page_kib=page_kib)
    created.append(create_memory("test", 2 * HUGE + 4096, "auto"))
    assert os.fstat(created[-1]).st_size == 2 * HUGE + 4096
    with pytest.raises(
        CapacityError, match=r"vm.nr_hugepages=N.*tiers\[0\].huge_pages to auto"
    ):
        create_memory("test", 2 * HUGE + 4096, "require")


def test_huge_pages_can_be_turned_off(pool: Path, created: list[int]) -> None:
    say(pool, free=9)
    created.append(create_memory("test", 4096, "off"))
    assert os.fstat(created[-1]).st_size == 4096


@pytest.fixture(params=[True, False], ids=["with memfd_create", "without"])
def python(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Python that was compiled with a recent C library, and one that was not."""
    if not request.param:
        monkeypatch.delattr(os, "memfd_create")


@pytest.mark.usefixtures("python")
def test_a_memory_file_has_its_name_and_is_inherited_by_no_child(created: list[int]) -> None:
    created.append(open_anonymous("kvtier-test"))
    shown = Path(f"/proc/self/fd/{created[-1]}").readlink()
    assert str(shown) == "/memfd:kvtier-test (deleted)"
    assert not os.get_inheritable(created[-1])


@pytest.mark.usefixtures("python")
def test_a_memory_file_that_the_kernel_refuses_is_an_error() -> None:
    with pytest.raises(OSError, match="Invalid argument"):
        open_anonymous("x" * 4096)


def test_a_tier_gets_small_pages_if_another_process_took_the_huge_ones(
    pool: Path, created: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    say(pool, free=9)
    allocate = os.posix_fallocate

    def refuse_huge(descriptor: int, offset: int, length: int) -> None:
        if length == HUGE:
            raise OSError(12, "Cannot allocate memory")
        allocate(descriptor, offset, length)

    monkeypatch.setattr(os, "posix_fallocate", refuse_huge)
    created.append(create_memory("test", 4096, "auto"))
    assert os.fstat(created[-1]).st_size == 4096


def test_a_region_in_real_huge_pages_is_a_region(request: pytest.FixtureRequest) -> None:
    geometry = RegionGeometry(slots=3, slot_nbytes=1 << 20, block_nbytes=1 << 20, ranks=1)
    if not huge_page_pool(module._PROC).holds(geometry.nbytes):
        pytest.skip("no huge pages are reserved here: sysctl vm.nr_hugepages")
    name = f"test-{os.getpid()}-{request.node.name}"
    region = HostRegion.create(name, geometry, attachers=1, timeout_s=10, huge_pages="require")
    attached = HostRegion.attach(name, geometry, timeout_s=10)
    region.slot(2)[:] = bytes(range(256)) * 4096
    assert bytes(attached.slot(2)) == bytes(range(256)) * 4096
    assert len(attached.payload) == 3 << 20
    # As a tier's own process maps it.
    with mmap.mmap(region.shared.descriptor, 0) as whole:
        assert len(whole) % HUGE == 0
        assert whole[2 << 20 : (2 << 20) + 4] == bytes(range(4))
    attached.close()
    region.close()
