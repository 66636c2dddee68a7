"""Which vLLM kvtier takes, told from modules of these tests' own making."""

from __future__ import annotations

import abc
import ast
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvtier.errors import UnsupportedError
from kvtier.vllm import compat
from kvtier.vllm.compat import require_supported_vllm
from tests.unit.vllm_modules import BASE, DOORS, VERSIONS, Job, imported_names, vllm_with


def base_without(*names: str) -> SimpleNamespace:
    return SimpleNamespace(
        **{name: object for name in imported_names()[BASE] if name not in names}
    )


class Asked(abc.ABC):
    """What a vLLM asks of a worker."""

    @abc.abstractmethod
    def submit(self, job_id: int, spec: object) -> bool: ...


class Worker(Asked):
    """What kvtier does."""

    def submit(self, job_id: int, spec: object, expedited: bool = False) -> bool:
        return True


def test_what_is_checked_is_what_is_imported() -> None:
    with pytest.raises(UnsupportedError) as caught:
        require_supported_vllm(load=vllm_with(**dict.fromkeys(imported_names())))
    for module in imported_names():
        assert f"has no usable {module}" in str(caught.value)
    for module, names in imported_names().items():
        for name in names:
            rest = SimpleNamespace(**dict.fromkeys(names - {name}, object))
            with pytest.raises(UnsupportedError, match=rf"has no {name} in {module}"):
                require_supported_vllm(load=vllm_with(**{module: rest}))


def test_what_the_connector_imports_beside_is_named_when_it_is_missing() -> None:
    wanted = {module: set(names) for module, names in compat.CONNECTOR_NAMES.items()}
    assert imported_names(DOORS / "connector_contract.py") == wanted
    (module,) = (name for name, names in wanted.items() if "TransferJob" in names)
    found = {name: SimpleNamespace(**dict.fromkeys(wanted[name], object)) for name in wanted}
    del found[module].TransferJob
    refused = compat.refusal(
        ImportError("cannot import name"), compat.CONNECTOR_NAMES, load=found.__getitem__
    )
    assert str(refused) == f"this vLLM has no TransferJob in {module}: {VERSIONS}"


@pytest.mark.parametrize("source", sorted(DOORS.glob("*.py")), ids=lambda path: path.name)
def test_no_module_but_a_contract_imports_vllm_when_it_is_imported(source: Path) -> None:
    tree = ast.parse(source.read_text())
    imported: list[str | None] = []
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            imported.append(node.module)
        elif isinstance(node, ast.Import):
            imported += [alias.name for alias in node.names]
    assert not [name for name in imported if name and name.split(".")[0] == "vllm"]


def test_a_complete_vllm_and_a_worker_that_does_all_it_asks_are_taken() -> None:
    require_supported_vllm(Worker, load=vllm_with())


def test_a_missing_name_is_named_with_the_versions_that_work() -> None:
    load = vllm_with(**{BASE: base_without("LookupResult", "OffloadingWorker")})
    with pytest.raises(UnsupportedError) as caught:
        require_supported_vllm(load=load)
    assert str(caught.value) == (
        f"this vLLM has no LookupResult, OffloadingWorker in {BASE}: {VERSIONS}"
    )


def test_an_import_that_failed_is_explained_by_what_is_missing() -> None:
    error = ImportError("cannot import name 'LookupResult'")
    load = vllm_with(**{BASE: base_without("LookupResult")})
    assert str(compat.refusal(error, load=load)) == (
        f"this vLLM has no LookupResult in {BASE}: {VERSIONS}"
    )


def test_an_import_that_failed_for_no_reason_of_ours_says_which() -> None:
    error = ImportError("libtorch.so: undefined symbol")
    refusal = compat.refusal(error, load=vllm_with())
    assert "libtorch.so: undefined symbol" in str(refusal)


def test_state_that_kvtier_reads_is_looked_for_at_the_start() -> None:
    compat.require_members(Job, "req_id", "spec")
    compat.require_members(SimpleNamespace(manager=None), "manager")


def test_state_that_is_not_there_is_named() -> None:
    with pytest.raises(
        UnsupportedError, match=r"Job has no dst_spec, worker: .*0\.25 to 0\.33"
    ):
        compat.require_members(Job, "req_id", "dst_spec", "worker")
    with pytest.raises(UnsupportedError, match="SimpleNamespace has no manager"):
        compat.require_members(SimpleNamespace(), "manager")


def test_an_abstract_method_kvtier_does_not_have_is_refused() -> None:
    class Newer(Asked):
        @abc.abstractmethod
        def cancel(self, job_id: int) -> None: ...

    class Ours(Newer):
        def submit(self, job_id: int, spec: object) -> bool:
            return True

    with pytest.raises(UnsupportedError, match=r"asks Ours for cancel, which .*0\.25 to 0\.33"):
        require_supported_vllm(Ours, load=vllm_with())


def another(parameters: str) -> type[Asked]:
    """Return a worker of kvtier's under a vLLM whose ``submit`` takes ``parameters``."""
    names: dict[str, Any] = {}
    exec(f"def submit({parameters}): ...", names)
    asked = type("Other", (), {"submit": names["submit"]})
    return type("Ours", (asked,), {"submit": Worker.submit})


@pytest.mark.parametrize(
    "parameters",
    [
        "self, job_id, spec, urgency",
        "self, job_id, spec, expedited=False, urgency=0",
        "self, job_id",
        "self, spec, job_id",
        "self, job_id, destination",
        "self, job_id, spec=None",
        "self, job_id, spec, *, urgency=0",
    ],
)
def test_a_call_that_kvtiers_method_does_not_take_is_refused(parameters: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        require_supported_vllm(another(parameters), load=vllm_with())
    assert str(caught.value) == (
        f"this vLLM calls Ours.submit({parameters}), and kvtier's takes "
        f"(self, job_id, spec, expedited=False): {VERSIONS}"
    )


@pytest.mark.parametrize(
    "parameters", ["self, job_id, spec", "self, job_id, spec, expedited=False"]
)
def test_a_load_is_taken_with_and_without_its_urgency(parameters: str) -> None:
    require_supported_vllm(another(parameters), load=vllm_with())


def test_what_a_newer_vllm_offers_with_a_default_of_its_own_is_taken() -> None:
    class Newer(Asked):
        @property
        def lock(self) -> object:
            return object()

        def on_reset_flushed(self) -> None: ...

        def config_info(self) -> list[dict[str, str]]:
            return [{}]

    class Ours(Newer):
        def submit(self, job_id: int, spec: object) -> bool:
            return True

    require_supported_vllm(Ours, load=vllm_with())
