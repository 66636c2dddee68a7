"""The policies and the tier of the page for extenders keep their contracts."""

from __future__ import annotations

import ast
import importlib
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fakeredis import TcpFakeServer

import kvtier.testing.file_tier
from kvtier.config import parse_config
from kvtier.policies import ChunkCopy, CopyState, PolicyContext, Promotion
from kvtier.sim.cache import simulate_cache
from kvtier.sim.traces import generate
from kvtier.testing.admission_contract import AdmissionContract
from kvtier.testing.eviction_contract import EvictionContract
from kvtier.testing.placement_contract import PlacementContract
from kvtier.testing.shared_tier_contract import SharedTierContract
from kvtier.testing.tier_contract import StorageTierContract
from tests.docs.pages import DOCS, blocks_of, run_page

PAGE = DOCS / "howto/extend.md"
NAMES: dict[str, Any] = run_page(PAGE)
CONTRACTS: dict[str, type] = {
    "SecondChance": EvictionContract,
    "HeadsFirst": PlacementContract,
    "ThirdTime": AdmissionContract,
}
POLICY_TESTS = [
    (policy, name)
    for policy, contract in CONTRACTS.items()
    for name in dir(contract)
    if name.startswith("test_")
]
MODULES: dict[str, set[str]] = {
    row[1]: set(re.findall(r"`(\w+)`", row[2]))
    for row in re.finditer(
        r"^\| `(kvtier[\w.]*)` \| (`.*`) \|$", PAGE.read_text(), re.MULTILINE
    )
}
TestShelfTierOnThePage: type[StorageTierContract] = NAMES["TestShelfTier"]
RedisTests: type[SharedTierContract] = NAMES["TestRedisTier"]


@pytest.fixture(scope="module")
def redis_port() -> Iterator[int]:
    """The port of a Redis server in a thread."""
    server = TcpFakeServer(("127.0.0.1", 0))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server.server_address[1]
    server.shutdown()
    server.server_close()
    thread.join()


class TestRedisTierOnThePage(RedisTests):  # type: ignore[valid-type, misc]
    @pytest.fixture(autouse=True)
    def port(self, redis_port: int) -> None:
        self._port = redis_port

    def section(self, directory: Path) -> str:
        return f"url: redis://127.0.0.1:{self._port}"


def test_the_shared_tier_on_the_page_has_sixty_lines() -> None:
    (text,) = (block.text for block in blocks_of(PAGE) if "class RedisTier(" in block.text)
    assert len([line for line in text.splitlines() if line.strip()]) <= 60


def imports_of(code: str) -> Iterator[tuple[str, str]]:
    """Yield module and name of each import from kvtier in ``code``."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("kvtier"):
            yield from ((node.module or "", alias.name) for alias in node.names)


@pytest.mark.parametrize("module", MODULES)
def test_a_name_in_the_table_can_be_imported(module: str) -> None:
    assert sorted(MODULES[module] - set(importlib.import_module(module).__all__)) == []


def test_the_table_has_what_the_page_and_the_example_tier_import() -> None:
    codes = [
        block.text
        for block in blocks_of(PAGE)
        if block.language == "python" and not block.remark
    ]
    codes.append(Path(kvtier.testing.file_tier.__file__).read_text())
    used = {pair for code in codes for pair in imports_of(code)}
    assert ("kvtier.tiers", "check_batch") in used
    assert sorted(pair for pair in used if pair[1] not in MODULES.get(pair[0], ())) == []


@pytest.mark.parametrize(("policy", "name"), POLICY_TESTS)
def test_the_policies_on_the_page_keep_their_contracts(policy: str, name: str) -> None:
    test: Callable[[], None] = getattr(NAMES[f"Test{policy}"](), name)
    test()


@pytest.mark.parametrize("policy", CONTRACTS)
def test_the_policies_on_the_page_have_twenty_lines(policy: str) -> None:
    (text,) = (block.text for block in blocks_of(PAGE) if f"class {policy}(" in block.text)
    assert len([line for line in text.splitlines() if line.strip()]) <= 20


def test_the_placement_on_the_page_writes_heads_first_and_the_rest_if_it_was_used() -> None:
    placement, ctx = NAMES["HeadsFirst"](3), PolicyContext()
    head, tail = (ChunkCopy(b"key", 0, None, depth) for depth in (63, 64))
    assert [*placement.place(head, ctx)] == [1, 2]
    assert [*placement.place(tail, ctx)] == []
    assert placement.demote(tail, 0, ctx) is None
    assert placement.promote(head, 1, ctx) is Promotion.COPY
    tail.hits = 1
    assert [placement.demote(tail, source, ctx) for source in range(3)] == [1, 2, None]
    assert placement.promote(tail, 1, ctx) is Promotion.MOVE


def test_the_admission_on_the_page_lets_a_chunk_in_the_third_time() -> None:
    admission, ctx = NAMES["ThirdTime"](2), PolicyContext()
    copy = ChunkCopy(b"key", 0)
    assert [admission.admits(copy, 1, ctx) for _ in range(4)] == [False, False, True, False]
    assert not admission.admits(copy, 2, ctx), "another tier"


@pytest.mark.parametrize("key", ["policy: HeadsFirst", "admit: ThirdTime"])
def test_the_page_s_policies_work_in_a_file_and_in_the_simulator(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "\n".join(
        block.text
        for block in blocks_of(PAGE)
        if block.language == "python"
        and not block.remark
        and "kvtier.testing" not in block.text
    )
    (tmp_path / "kvtier_page.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    lines = ["tiers:", "- {kind: ram, capacity: 256KiB}"]
    lines += ["- {kind: nvme, path: /nowhere, capacity: 8MiB}", "placement:"]
    trace = generate("chat", sessions=6, per_s=0.1, chunk_tokens=64, seed=1)
    written = []
    for line in ("policy: tiered", key.replace(": ", ": kvtier_page:")):
        config = parse_config("\n".join([*lines, f"  {line}"]), source="a.yaml")
        simulated = simulate_cache(trace, config, chunk_bytes=4096)
        written.append(simulated.tiers[1].chunks_written)
    assert 0 < written[1] < written[0]


def test_the_policy_on_the_page_spares_what_was_used() -> None:
    policy, ctx = NAMES["SecondChance"](3), PolicyContext()
    copies = [ChunkCopy(bytes([number]) * 8, number) for number in range(3)]
    for copy in copies:
        copy.state = CopyState.RESIDENT
    policy.on_insert_many(copies, ctx)
    policy.on_hit(copies[0], ctx)
    picked = [policy.pick(lambda copy: True, ctx) for _ in range(4)]
    assert picked == [copies[1], copies[2], copies[0], None]
