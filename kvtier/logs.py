"""kvtier's loggers, whose lines an engine's log shows as kvtier's.

vLLM configures one logger, and what is not below it has neither a level nor a time in its log,
or is not shown at all. Its lines name the file that they come from and not the package.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Final

__all__ = ["ENGINE", "get_logger"]

ENGINE: Final = "vllm"
"""The logger that the engine configures."""


def get_logger(module: str) -> logging.Logger:
    """Return the logger of a module of kvtier's.

    Args:
        module: The module's ``__name__``.
    """
    logger = logging.getLogger(f"{ENGINE}.{module}")
    logger.addFilter(_name_kvtier)
    return logger


def _name_kvtier(record: logging.LogRecord) -> bool:
    """Let a line begin with ``[kvtier/storage.py:248]``; the record may have passed before."""
    record.filename = f"kvtier/{Path(record.pathname).name}"
    return True
