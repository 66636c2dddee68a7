"""Loggers whose lines appear in the engine's log, with kvtier's name.

vLLM configures one logger. Loggers outside it have no level and no time in its log, or do not
appear. Its lines show the name of the file without the package.
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
    """Make the line begin with ``[kvtier/transfer/engine.py:248]``; idempotent."""
    path = Path(record.pathname)
    below = path.relative_to(_PACKAGE) if path.is_relative_to(_PACKAGE) else path.name
    record.filename = f"kvtier/{below}"
    return True
