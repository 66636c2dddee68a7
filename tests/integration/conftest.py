"""Engines start slowly, so every test replays prompts of one reference run."""

from __future__ import annotations

import functools
import gc
import importlib
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.demo import runner
from tests.integration.harness import Reference, Site, run_reference
from tests.integration.preloaded import Program


def pytest_collectstart() -> None:
    """Import vLLM before the tests, and not in xdist's controller, which collects none."""
    import_vllm()


@functools.cache
def import_vllm() -> None:
    """Import vLLM without the warnings of what it imports, which would be failures."""
    gc.disable()  # a quarter of the time
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module("kvtier.vllm.spec")
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def _engines_start_with_vllm_imported() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "start", Program)
        yield


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return run_reference(tmp_path_factory.mktemp("reference"))


@pytest.fixture
def site(tmp_path: Path, reference: Reference) -> Site:
    return Site(tmp_path, reference)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.integration)
            item.add_marker(pytest.mark.timeout(900))
