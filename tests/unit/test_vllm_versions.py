"""Which vLLM kvtier accepts, by modules of plain values; the same of a vLLM is elsewhere."""

from __future__ import annotations

import abc
import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kvtier.errors import UnsupportedError
from kvtier.vllm import plugin, versions
from kvtier.vllm.versions import hit_sources, require_supported_vllm, supported

ROOT = Path(__file__).parents[2]
BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"
FREE_OF_VLLM = {"__init__", "identity", "model_geometry", "opening", "versions"}


class Connector:
    """A connector of a vLLM that shows its block tables."""

    bind_kv_cache_manager = None


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return the modules of a vLLM that has all that kvtier needs, by name."""
    found: dict[str, Any] = {}
    for name, needed in versions._NEEDED.items():
        found[name] = ModuleType(name)
        vars(found[name]).update(dict.fromkeys(needed))
        monkeypatch.setitem(sys.modules, name, found[name])
    return found


def test_a_vllm_with_everything_is_supported(modules: dict[str, Any]) -> None:
    require_supported_vllm(Connector)


def test_a_missing_name_is_named_with_its_module(modules: dict[str, Any]) -> None:
    del modules[BASE].KVConnectorTransferResults
    with pytest.raises(UnsupportedError) as caught:
        require_supported_vllm(Connector)
    assert str(caught.value) == (
        f"this vLLM has no KVConnectorTransferResults in {BASE}: {supported()}"
    )


def test_all_that_is_missing_is_named_at_once(
    modules: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Newer(abc.ABC):
        @abc.abstractmethod
        def cancel(self) -> None: ...

    monkeypatch.setitem(sys.modules, BASE, None)
    with pytest.raises(UnsupportedError) as caught:
        require_supported_vllm(Newer)
    first, *others = str(caught.value).removesuffix(f": {supported()}").split("; it ")
    assert first.startswith(f"this vLLM has no usable {BASE} (")
    assert others == ["asks connectors for cancel", "has no bind_kv_cache_manager"]


def test_sources_of_hits_are_unknown_to_an_older_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "vllm.v1.metrics.cache_hit_source"
    monkeypatch.setitem(sys.modules, name, None)
    assert hit_sources() == (None, None)
    sources: Any = SimpleNamespace(CacheHitSource=SimpleNamespace(HOST="host", DISK="disk"))
    monkeypatch.setitem(sys.modules, name, sources)
    assert hit_sources() == ("host", "disk")


def test_the_connector_is_registered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    known: dict[str, tuple[str, str]] = {}

    class Factory:
        @staticmethod
        def register_connector(name: str, module: str, connector: str) -> None:
            if name in known:
                raise ValueError(name)
            known[name] = module, connector

    factory: Any = SimpleNamespace(KVConnectorFactory=Factory)
    name = "vllm.distributed.kv_transfer.kv_connector.factory"
    monkeypatch.setitem(sys.modules, name, factory)
    plugin.register()
    plugin.register()
    assert known == {"KVTierConnector": ("kvtier.vllm", "KVTierConnector")}


def test_every_file_that_reads_vllm_has_a_row_in_the_table_of_changes() -> None:
    files = {path.stem for path in (ROOT / "kvtier/vllm").glob("*.py")}
    rows = re.findall(r"^.+  ``(\w+)\.py``$", versions.__doc__ or "", re.MULTILINE)
    assert sorted(rows) == sorted(files - FREE_OF_VLLM)


@pytest.mark.parametrize(
    ("entry_point", "file", "problem"),
    [
        ("KVTierConnector", "connector", f"no KVConnectorTransferResults in {BASE}"),
        ("KVTierOffloadingSpec", "spec", "no usable vllm.config .*get_current_vllm_config"),
    ],
)
def test_an_entry_point_refuses_a_vllm_without_a_name_that_it_imports(
    modules: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    entry_point: str,
    file: str,
    problem: str,
) -> None:
    for parent in ("vllm.config", *parents_of(BASE)):
        monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
    if file == "connector":
        del modules[BASE].KVConnectorTransferResults
    monkeypatch.delitem(sys.modules, f"kvtier.vllm.{file}", raising=False)
    package = importlib.import_module("kvtier.vllm")
    with pytest.raises(UnsupportedError, match=f"this vLLM has {problem}.*: {supported()}"):
        getattr(package, entry_point)


def parents_of(module: str) -> Iterator[str]:
    names = module.split(".")
    return (".".join(names[:end]) for end in range(1, len(names)))


def test_names_of_the_package_are_loaded_when_they_are_used() -> None:
    package = importlib.import_module("kvtier.vllm")
    with pytest.raises(AttributeError, match="has no attribute 'Other'"):
        _ = package.Other
