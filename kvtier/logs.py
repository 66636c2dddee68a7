"""Loggers that write to the engine's log under kvtier's name.

vLLM configures only the logger ``vllm``. Lines of other loggers appear in vLLM's log without
level and time, or not at all. So kvtier logs to children of the logger ``vllm``. vLLM prints
only the name of a source file, so a filter adds the path.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Final

__all__ = ["ENGINE", "get_logger"]

_PACKAGE: Final = Path(__file__).parent

ENGINE: Final = "vllm"
"""The logger that the engine configures."""


def get_logger(module: str) -> logging.Logger:
    """Return the logger of a module of kvtier.

    Args:
        module: The module's ``__name__``.
    """
    logger = logging.getLogger(f"{ENGINE}.{module}")
    logger.addFilter(_name_kvtier)
    return logger


def _name_kvtier(record: logging.LogRecord) -> bool:
    """Show the file's path in the log line, such as ``[kvtier/transfer/engine.py:248]``."""
    path = Path(record.pathname)
    below = path.relative_to(_PACKAGE) if path.is_relative_to(_PACKAGE) else path.name
    record.filename = f"kvtier/{below}"
    return True
