"""A line of kvtier's in the engine's log."""

from __future__ import annotations

import importlib
import logging
import pkgutil
from typing import TYPE_CHECKING

import kvtier
from kvtier.logs import get_logger

if TYPE_CHECKING:
    import pytest

VLLM = "%(levelname)s %(asctime)s [%(filename)s:%(lineno)d] %(message)s"
"""How vLLM writes a line; its ``fileinfo`` is the record's ``filename``."""


def test_a_line_names_kvtier_beside_its_file(caplog: pytest.LogCaptureFixture) -> None:
    caplog.handler.setFormatter(logging.Formatter(VLLM))
    get_logger("kvtier.connector.storage").warning("tier %s", "nvme")
    (record,) = caplog.records
    assert record.name == "vllm.kvtier.connector.storage", "below the logger vLLM configures"
    assert f"[kvtier/test_logs.py:{record.lineno}] tier nvme\n" in caplog.text


def test_every_module_logs_so() -> None:
    modules = [
        importlib.import_module(module.name)
        for package in ("connector", "memory", "recording", "tiers", "transfer")
        for module in pkgutil.walk_packages(
            [f"{kvtier.__path__[0]}/{package}"], f"kvtier.{package}."
        )
        if module.name not in {"kvtier.memory.cuda_kernel", "kvtier.memory.cuda_hash"}  # Triton
    ]
    loggers = [each.logger.name for each in modules if hasattr(each, "logger")]
    assert len(loggers) > 10
    assert all(name.startswith("vllm.kvtier.") for name in loggers)
