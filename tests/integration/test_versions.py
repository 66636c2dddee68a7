"""Which vLLM kvtier takes, by what it has and not by its version."""

from __future__ import annotations

import abc
import importlib
from types import SimpleNamespace

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1 import base

from kvtier.errors import UnsupportedError
from kvtier.vllm import KVTierConnector
from kvtier.vllm.versions import hit_sources, require_supported_vllm, supported


def test_the_installed_vllm_is_supported() -> None:
    require_supported_vllm(KVTierConnector)
    assert None not in hit_sources()


def test_a_missing_name_is_named_with_the_versions_that_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(base, "KVConnectorTransferResults")
    with pytest.raises(UnsupportedError) as caught:
        require_supported_vllm(KVTierConnector)
    assert str(caught.value) == (
        f"this vLLM has no KVConnectorTransferResults in {base.__name__}: {supported()}"
    )


def test_an_abstract_method_that_kvtier_does_not_have_is_refused() -> None:
    class Newer(abc.ABC):
        @abc.abstractmethod
        def cancel(self) -> None: ...

        bind_kv_cache_manager = None

    with pytest.raises(UnsupportedError, match="asks connectors for cancel: kvtier works with"):
        require_supported_vllm(Newer)


def test_a_vllm_that_shows_no_block_tables_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="has no bind_kv_cache_manager"):
        require_supported_vllm(SimpleNamespace)


def test_sources_of_hits_are_not_reported_to_a_vllm_without_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing(name: str) -> object:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    assert hit_sources() == (None, None)
