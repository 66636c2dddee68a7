"""Explain the errors of a cache to its operator."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from typing import Final

from kvtier.errors import ConfigError
from kvtier.tiers.slab.inspect import StoredNamespace
from kvtier.tiers.slab.schema import (
    IndexDamagedError,
    IndexMissingError,
    IndexVersionError,
    is_full,
)

__all__ = ["explained", "missing_cache"]

_MAKE_ROOM: Final = (
    "make room on that disk, and where SQLite puts temporary files: the directory that "
    "SQLITE_TMPDIR or TMPDIR names, or /var/tmp"
)


@contextlib.contextmanager
def explained(space: StoredNamespace) -> Iterator[None]:
    """Convert errors of a cache into a ConfigError that names the path and a remedy."""
    try:
        yield
    except IndexMissingError as error:
        raise ConfigError(missing_cache(space.index_path)) from error
    except IndexVersionError as error:
        raise ConfigError(
            f"{space.index_path}: {error}; use the kvtier that wrote it, or start an engine "
            "with on_mismatch: remove, which starts with an empty cache"
        ) from error
    except IndexDamagedError as error:
        raise ConfigError(
            f"{space.index_path} cannot be used: {error}; an engine would set it aside and "
            "start with an empty cache"
        ) from error
    except sqlite3.Error as error:
        remedy = _MAKE_ROOM if is_full(error) else "check the disk, and try again"
        raise ConfigError(f"{space.index_path}: {error}; {remedy}") from error
    except FileNotFoundError as error:
        raise ConfigError(missing_cache(error.filename or space.directory)) from error
    except OSError as error:
        raise ConfigError(
            f"{error.filename or space.directory}: {error.strerror}; run this as the user that "
            "runs the engine, and check the disk"
        ) from error


def missing_cache(path: object) -> str:
    """Return the message for a missing file or directory of a cache."""
    return f"{path} is missing; an engine would start with an empty cache"
