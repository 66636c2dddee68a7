"""Loggers that write to the engine's log under kvtier's name.

vLLM configures only the logger ``vllm``. Lines of other loggers lack level and time in vLLM's
log, or do not appear. vLLM prints file names without their package, so a filter adds it.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Final

__all__ = ["ENGINE", "get_logger"]

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
    """Add the package to the file name, as in ``[kvtier/storage.py:248]``; idempotent."""
    record.filename = f"kvtier/{Path(record.pathname).name}"
    return True
