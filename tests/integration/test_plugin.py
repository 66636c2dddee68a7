"""vLLM knows the connector by name, which it needs below ``MultiConnector``."""

from __future__ import annotations

import importlib
import tomllib
from pathlib import Path

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from kvtier.vllm import KVTierConnector

ROOT = Path(__file__).parents[2]


def test_the_entry_point_makes_the_connector_known_by_name_once_and_again() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (place,) = project["entry-points"]["vllm.general_plugins"].values()
    module, _, name = place.partition(":")
    register = getattr(importlib.import_module(module), name)
    register()
    register()
    found = KVConnectorFactory.get_connector_class_by_name("KVTierConnector")
    assert found is KVTierConnector
