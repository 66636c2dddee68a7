"""The memory that all processes of an engine share: made, handed over, and gone with them."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import resource
import signal
import socket
import stat
import struct
import subprocess
import sys
import tempfile
import textwrap
import threading
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from kvtier.errors import CapacityError, UnsupportedError
from kvtier.memory import HostRegion, RegionGeometry, backing, hand_over
from kvtier.memory.hand_over import Listener
from tests.support.threads import join_threads
from tests.unit.mappings import flags_of_mappings
from tests.unit.other_user import OTHER_UID, give_away

SMALL = RegionGeometry(slots=4, slot_nbytes=8192, block_nbytes=8192, ranks=2)


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A short directory for temporary files: an address has no room for ``tmp_path``."""
    assert tmp_path.exists()  # so pytest made its own before
    with tempfile.TemporaryDirectory(prefix="kv") as directory:
        monkeypatch.setattr(tempfile, "tempdir", directory)
        yield Path(directory)


@pytest.fixture(autouse=True)
def sockets(temporary: Path) -> Path:
    """Where regions are served."""
    return temporary / f"kvtier-{os.geteuid()}"


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    return f"test-{os.getpid()}-{request.node.name}"


@pytest.fixture
def region(name: str) -> Iterator[HostRegion]:
    """A region that one more process attaches to."""
    region = HostRegion.create(name, SMALL, attachers=1, timeout_s=10)
    yield region
    region.close()


def test_every_process_sees_the_same_slots_and_control_words(name: str) -> None:
    first = HostRegion.create(name, SMALL, attachers=1, timeout_s=10)
    second = HostRegion.attach(name, SMALL, timeout_s=10)
    first.slot(3)[:5] = b"bytes"
    assert bytes(second.slot(3)[:5]) == b"bytes"
    assert len(second.payload) == 4 * 8192
    first.control.set_generation(1, [2], 7)
    first.control.set_generation(0, [2], 7)
    assert second.control.stored([2, 3], [7, 7]) == [True, False]
    second.close()
    first.close()
    first.close()


@pytest.mark.skipif(
    tuple(map(int, os.uname().release.split(".")[:2])) < (5, 14),
    reason="this kernel maps no pages ahead",
)
def test_pages_mapped_ahead_cost_no_fault_when_they_are_touched(name: str) -> None:
    pages, nbytes = 1024, mmap.PAGESIZE
    geometry = RegionGeometry(pages, nbytes, nbytes, ranks=1)
    region = HostRegion.create(name, geometry, attachers=0, timeout_s=1, huge_pages="off")
    region.map_pages()
    region.map_pages()
    join_threads("kvtier-pages")
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    for number in range(pages):
        region.slot(number)[0] = 1
    assert resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before < pages / 10
    region.close()


def test_a_region_that_is_closed_at_once_is_mapped_no_further(name: str) -> None:
    region = HostRegion.create(name, SMALL, attachers=0, timeout_s=1)
    region.map_pages()
    region.close()
    assert "kvtier-pages" not in {thread.name for thread in threading.enumerate()}


def test_engines_with_names_longer_than_a_socket_takes_have_regions_of_their_own() -> None:
    names = ["e" * 300 + str(number) for number in range(2)]
    regions = [HostRegion.create(name, SMALL, attachers=1, timeout_s=10) for name in names]
    regions[1].slot(0)[:5] = b"bytes"
    attached = HostRegion.attach(names[1], SMALL, timeout_s=10)
    assert bytes(attached.slot(0)[:5]) == b"bytes"
    for region in (attached, *regions):
        region.close()


def test_an_attacher_that_comes_first_waits(name: str) -> None:
    attached: list[HostRegion] = []
    waiter = threading.Thread(
        target=lambda: attached.append(HostRegion.attach(name, SMALL, timeout_s=10))
    )
    waiter.start()
    region = HostRegion.create(name, SMALL, attachers=1, timeout_s=10)
    waiter.join(10)
    assert attached
    attached[0].close()
    region.close()


def test_a_region_that_no_worker_creates_is_an_error_with_a_remedy(name: str) -> None:
    with pytest.raises(CapacityError, match=r"first worker failed to create it"):
        HostRegion.attach(name, SMALL, timeout_s=0.01)


def test_a_second_region_of_one_name_is_refused(name: str, region: HostRegion) -> None:
    with pytest.raises(UnsupportedError, match="its own engine_id"):
        HostRegion.create(name, SMALL, attachers=1, timeout_s=10)


def test_a_process_that_dies_while_attaching_leaves_its_place_to_another(
    name: str, region: HostRegion, sockets: Path
) -> None:
    (path,) = sockets.iterdir()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as dying:
        dying.connect(str(path))
    HostRegion.attach(name, SMALL, timeout_s=10).close()


def test_a_server_that_is_too_busy_to_accept_is_waited_for(name: str) -> None:
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(contextlib.closing(Listener(name)))
        listener.socket.listen(0)
        with contextlib.suppress(BlockingIOError):
            while True:
                waiting = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                stack.enter_context(waiting).setblocking(False)
                waiting.connect(str(listener.path))
        with pytest.raises(CapacityError, match="no host region"):
            HostRegion.attach(name, SMALL, timeout_s=0.01)


def test_the_memory_of_a_server_that_stopped_listening_is_given_back(
    name: str, sockets: Path
) -> None:
    listening = Listener(name)
    listening.close()  # only its path is needed
    memory = backing.create_memory(f"kvtier-{name}", SMALL.nbytes, "off")
    hello = json.dumps(asdict(SMALL)).encode()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(listening.path))
        listener.listen()

        def hand_over_and_go() -> None:
            peer, _ = listener.accept()
            with peer:
                peer.shutdown(socket.SHUT_RD)  # thanks come too late from here on
                socket.send_fds(peer, [hello], [memory])
            listener.close()
            listening.path.unlink()

        server = threading.Thread(target=hand_over_and_go)
        server.start()
        with pytest.raises(CapacityError, match="no host region"):
            HostRegion.attach(name, SMALL, timeout_s=1)
        server.join(10)
    os.close(memory)
    # That no descriptor of it is left is checked after every test.


OTHER_USER_CONNECTS = """
import os, socket, sys
os.setegid(int(sys.argv[2]))
os.seteuid(int(sys.argv[2]))
peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
peer.connect(sys.argv[1])
sys.stdout.write(str(socket.recv_fds(peer, 4096, 1)[:2]))
"""
OTHER_USER_SERVES = """
import os, socket, sys
listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
listener.bind(sys.argv[1])
os.seteuid(int(sys.argv[2]))
listener.listen()
sys.stdout.write("ready\\n")
sys.stdout.flush()
sys.stdin.read()
"""


def as_other_user(script: str, path: Path) -> list[str]:
    if os.geteuid() != 0:
        pytest.skip("only root can run as another user")
    return [sys.executable, "-c", script, str(path), str(OTHER_UID)]


def test_only_the_user_can_enter_the_directory_of_the_sockets(name: str, sockets: Path) -> None:
    sockets.mkdir(mode=0o755)
    sockets.chmod(0o777)
    with contextlib.closing(HostRegion.create(name, SMALL, attachers=1, timeout_s=10)):
        assert stat.S_IMODE(sockets.stat().st_mode) == 0o700
        assert len(list(sockets.iterdir())) == 1
    assert list(sockets.iterdir()) == []
    assert not any("kvtier" in line for line in abstract_names())


def abstract_names() -> list[str]:
    lines = Path("/proc/net/unix").read_text("ascii").splitlines()
    return [line for line in lines if " @" in line]


def test_another_user_gets_nothing_and_blocks_no_rank(
    name: str, region: HostRegion, sockets: Path
) -> None:
    (path,) = sockets.iterdir()
    command = as_other_user(OTHER_USER_CONNECTS, path)
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "PermissionError" in ran.stderr
    for place in (path, sockets, sockets.parent):
        place.chmod(0o777)  # as if the directory had been opened to all
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.stdout == "(b'', [])", ran.stderr
    HostRegion.attach(name, SMALL, timeout_s=10).close()


def test_a_region_that_another_user_serves_is_not_taken(name: str, sockets: Path) -> None:
    listener = Listener(name)
    listener.close()
    command = as_other_user(OTHER_USER_SERVES, listener.path)
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == "ready\n"
        with pytest.raises(UnsupportedError, match="is served by another user"):
            HostRegion.attach(name, SMALL, timeout_s=10)
        server.kill()


def test_a_name_that_another_user_took_is_not_called_another_engine(
    name: str, sockets: Path
) -> None:
    sockets.mkdir()
    give_away(sockets)
    for meet in (create_small, attach_small):
        with pytest.raises(
            UnsupportedError, match=f"{sockets} belongs to user {OTHER_UID}"
        ) as no:
            meet(name)
        assert "another engine" not in str(no.value)
        assert "TMPDIR" in str(no.value)


def test_a_file_in_the_place_of_the_directory_is_named(name: str, sockets: Path) -> None:
    sockets.touch()
    for meet in (create_small, attach_small):
        with pytest.raises(UnsupportedError, match=f"in {sockets}: File exists; remove it"):
            meet(name)


def create_small(name: str) -> HostRegion:
    return HostRegion.create(name, SMALL, attachers=1, timeout_s=10)


def attach_small(name: str) -> HostRegion:
    return HostRegion.attach(name, SMALL, timeout_s=10)


UNMAPPED = """
import tempfile
from kvtier.errors import UnsupportedError
from kvtier.memory import HostRegion, RegionGeometry
shape = RegionGeometry(4, 8192, block_nbytes=8192, ranks=2)
with tempfile.TemporaryDirectory() as tempfile.tempdir:
    for meet in (
        lambda: HostRegion.create("x", shape, attachers=1, timeout_s=1),
        lambda: HostRegion.attach("x", shape, timeout_s=1),
    ):
        try:
            meet()
        except UnsupportedError as error:
            assert "stands for every user" in str(error), error
        else:
            raise AssertionError("every unmapped user could have taken it")
"""


def test_the_number_of_every_unmapped_user_is_refused() -> None:
    command = ["unshare", "--user", sys.executable, "-c", UNMAPPED]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no unshare here")
    if "unshare" in ran.stderr:
        pytest.skip("this machine allows no user namespaces")
    assert ran.returncode == 0, ran.stderr


def test_no_mapping_of_a_region_is_in_a_core_dump(name: str) -> None:
    with contextlib.closing(create_small(name)), contextlib.closing(attach_small(name)):
        flags = flags_of_mappings(os.getpid(), "/memfd:kvtier-test")
        assert len(flags) >= 2
        assert all("dd" in each for each in flags)  # which stands for "do not dump"


@pytest.mark.parametrize("uid", [0, 1000, 2**31, 2**32 - 2])
def test_a_user_may_have_any_number(
    name: str, monkeypatch: pytest.MonkeyPatch, uid: int
) -> None:
    def credentials(_: socket.socket, level: int, option: int, nbytes: int) -> bytes:
        assert (level, option) == (socket.SOL_SOCKET, socket.SO_PEERCRED)
        return struct.pack("=iII", 1, uid, 0)[:nbytes]

    monkeypatch.setattr(os, "geteuid", lambda: uid)
    monkeypatch.setattr(socket.socket, "getsockopt", credentials)
    monkeypatch.setattr(hand_over, "find_foreign_owner", lambda _: "")
    with (
        contextlib.closing(HostRegion.create(name, SMALL, attachers=1, timeout_s=10)) as own,
        contextlib.closing(HostRegion.attach(name, SMALL, timeout_s=10)) as other,
    ):
        own.slot(1)[:4] = b"here"
        assert bytes(other.slot(1)[:4]) == b"here"


def test_processes_with_different_shapes_get_an_error(name: str, region: HostRegion) -> None:
    other = RegionGeometry(slots=5, slot_nbytes=8192, block_nbytes=8192, ranks=2)
    with pytest.raises(UnsupportedError, match="same configuration file"):
        HostRegion.attach(name, other, timeout_s=10)


def test_a_region_larger_than_memory_is_refused_before_anything_is_allocated(name: str) -> None:
    huge = RegionGeometry(1 << 40, 4096, block_nbytes=4096, ranks=1)
    with pytest.raises(CapacityError, match=r"available memory leaves .*tiers\[0\].capacity"):
        HostRegion.create(name, huge, attachers=0, timeout_s=1)
    # The name is free again.
    HostRegion.create(name, SMALL, attachers=0, timeout_s=1).close()


@pytest.mark.parametrize(
    ("line", "group", "limit"),
    [
        ("0::/", "", "memory.max"),
        ("0::/system.slice/vllm.service", "system.slice", "memory.max"),
        ("4:memory:/job/7", "memory/job", "memory.limit_in_bytes"),
    ],
    ids=["a container's", "one around a service's", "one of version 1"],
)
def test_the_control_groups_limit_counts_too(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    line: str,
    group: str,
    limit: str,
) -> None:
    usage = {"memory.max": "memory.current"}.get(limit, "memory.usage_in_bytes")
    files = {
        "proc/meminfo": f"MemAvailable: {1 << 30} kB\n",
        "proc/self/cgroup": f"{line}\n",
        f"sys/fs/cgroup/{group}/{limit}": "5096\n",
        f"sys/fs/cgroup/{group}/{usage}": "1000\n",
    }
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    monkeypatch.setattr(backing, "_PROC", tmp_path / "proc")
    monkeypatch.setattr(backing, "_SYS", tmp_path / "sys")
    with pytest.raises(CapacityError, match=rf"group's {limit} leaves 4KiB"):
        HostRegion.create(name, SMALL, attachers=0, timeout_s=1, huge_pages="off")


def test_memory_that_cannot_be_allocated_is_a_clear_error(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int, offset: int, length: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(CapacityError, match=r"No space left.*lower tiers\[0\].capacity"):
        HostRegion.create(name, SMALL, attachers=0, timeout_s=1, huge_pages="off")


def test_memory_that_cannot_be_mapped_is_given_back(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int, length: int) -> mmap.mmap:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(mmap, "mmap", refuse)
    with pytest.raises(OSError, match="Cannot allocate memory"):
        HostRegion.create(name, SMALL, attachers=0, timeout_s=1, huge_pages="off")
    # That no descriptor of it is left is checked after every test.


CREATE_AND_WAIT = textwrap.dedent(
    """
    import sys
    import tempfile
    from kvtier.memory import HostRegion, RegionGeometry
    tempfile.tempdir = sys.argv[2]
    region = HostRegion.create(
        sys.argv[1],
        RegionGeometry(64, 1 << 20, block_nbytes=1 << 20, ranks=1),
        attachers=5,
        timeout_s=60,
    )
    sys.stdout.write("ready\\n")
    sys.stdout.flush()
    sys.stdin.read()
    """
)


def regions() -> set[str]:
    """Name what is in shared memory, except what tests that run beside this one make."""
    paths = Path("/dev/shm").iterdir()
    return {path.name for path in paths if not path.is_dir() and "sem.mp-" not in path.name}


def test_a_killed_process_leaves_no_memory_and_its_name_can_be_used_again(
    name: str, sockets: Path
) -> None:
    shared_before = regions()
    sockets.mkdir(mode=0o700)
    mine = sockets / "mine"
    mine.touch()
    for _ in range(2):
        child = subprocess.Popen(
            [sys.executable, "-c", CREATE_AND_WAIT, name, str(sockets.parent)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert child.stdout is not None
        assert child.stdin is not None
        assert child.stdout.readline() == "ready\n"
        with pytest.raises(UnsupportedError, match="another engine of this user serves"):
            create_small(name)
        child.send_signal(signal.SIGKILL)
        child.wait(10)
        child.stdout.close()
        child.stdin.close()
        assert regions() == shared_before
    with contextlib.closing(create_small(f"{name}-another")):
        assert len(list(sockets.glob("[!m]*"))) == 1, "the dead one is gone"
    assert mine.exists()
