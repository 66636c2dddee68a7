"""The layout of a shared directory: its marker and its folders.

::

    DIRECTORY/
        kvtier-shared-dir.json    the marker: the format and the number of folders
        00a7/                     a folder, selected by the hash of a key
            KEY.kv                a value; an underscore replaces each slash of the key
            .4f0c62...tmp         a value that is being written

The marker shows that the directory is mounted. After an unmount, the empty mount point has no
marker. Without this check, kvtier would write chunks to the disk below the mount point, and
every chunk of the shared directory would count as missing.

The number of folders is fixed when the marker is made. Each folder has the same share of the
capacity, so an engine can enforce the capacity folder by folder
(:mod:`kvtier.tiers.shared.dir_room`).
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import stat
from pathlib import Path
from typing import Final, NamedTuple

import xxhash

from kvtier.config import SharedDirTierConfig
from kvtier.errors import ConfigError, TierUnavailableError
from kvtier.logs import get_logger
from kvtier.os.block_io import PAGE_NBYTES, aligned_buffer, opened, write_fully
from kvtier.tiers.shared.dir_io import DirIo

__all__ = ["MARKER", "TEMPORARY", "VALUE", "DirLayout"]

logger = get_logger(__name__)

MARKER: Final = "kvtier-shared-dir.json"
VALUE: Final = ".kv"
"""Ending of the names of values."""
TEMPORARY: Final = ".tmp"
"""Ending of the names of files that are being written."""

_FORMAT: Final = 1
_MOST_FOLDERS: Final = 1 << 16
_VALUES_PER_FOLDER: Final = 256
"""Planned number of values in each full folder of a new directory. With so many values, hashing
fills the folders evenly."""
_LEAST_VALUES: Final = 4
"""Smallest number of values in a full folder; with fewer, evictions would be arbitrary."""
_NO_LINKS: Final = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK})
_NO_DIRECT_IO: Final = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS})
_CONFIGURED_WRONG: Final = frozenset(
    {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG}
)
_OTHERS_WRITE: Final = 0o002


class _Marker(NamedTuple):
    """The marker's content, and the identities of its file and of the directory.

    Attributes:
        file_id: Device number and inode number of the directory.
        version: Device number, inode number and time of modification of the marker.
    """

    file_id: tuple[int, int]
    version: tuple[int, int, int]
    folders: int


class DirLayout:
    """Prepares a shared directory, and returns the paths of its values.

    Only ``prepare`` and ``check`` may block.

    Attributes:
        direct: Whether I/O bypasses the page cache.
    """

    def __init__(self, options: SharedDirTierConfig, value_nbytes: int, io: DirIo) -> None:
        self._options = options
        self._path = options.path
        self._value_nbytes = value_nbytes
        self._io = io
        self._marker: _Marker | None = None
        self.direct = False
        if options.capacity_bytes < value_nbytes:
            raise ConfigError(
                f"tier {options.name}: the capacity is below the {value_nbytes} bytes of one "
                "chunk; raise `capacity`"
            )

    @property
    def is_ready(self) -> bool:
        """Whether the directory has been prepared."""
        return self._marker is not None

    @property
    def folder_nbytes(self) -> int:
        """The capacity of each folder in bytes."""
        return self._options.capacity_bytes // self._folders

    @property
    def _folders(self) -> int:
        assert self._marker is not None
        return self._marker.folders

    def folder_of(self, key: str) -> Path:
        """Return the path of the folder for the value of ``key``."""
        number = xxhash.xxh3_64_intdigest(key.encode()) % self._folders
        return self._path / f"{number:04x}"

    def path_of(self, key: str) -> Path:
        """Return the path of the file for the value of ``key``."""
        return self.folder_of(key) / (key.replace("/", "_") + VALUE)

    def prepare(self) -> None:
        """Create the directory and its marker if missing; later calls do nothing.

        Raises:
            ConfigError: The directory cannot be used; the message says what to do.
            TierUnavailableError: The file system does not work now.
        """
        if self._marker is not None:
            return
        try:
            self._create()
            if not self._io.may_create_in(self._path):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            marker = self._read_marker() or self._make_marker()
            self._check_share(marker)
            self.direct = self._probe_direct_io()
        except OSError as error:
            raise self._refusal(error) from error
        self._marker = marker

    def check(self) -> None:
        """Check that the directory is mounted; read the marker again if it was replaced.

        Raises:
            TierUnavailableError: The file system does not work now, or is not mounted.
        """
        try:
            found = self._read_marker()
            if found is None and self._is_same_directory():
                # Somebody emptied the directory.
                found = self._make_marker()
        except OSError as error:
            raise self._unavailable(error) from error
        if found is None:
            raise self._unavailable("it has no marker: mount the shared file system")
        self._marker = found

    def _create(self) -> None:
        try:
            self._io.make_directory(self._path)
        except FileExistsError:
            mode = self._io.status(self._path).st_mode
            if not stat.S_ISDIR(mode):
                raise NotADirectoryError(errno.ENOTDIR, "it is no directory") from None
            if mode & _OTHERS_WRITE:
                logger.warning(
                    "tier %s: every user of this host can replace chunks in %s, and so decide "
                    "what models answer; run: chmod o-w %s",
                    *(self._options.name, self._path, self._path),
                )

    def _read_marker(self) -> _Marker | None:
        """Return the marker, or None if the directory has none."""
        path = self._path / MARKER
        try:
            status = self._io.status(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        version = (status.st_dev, status.st_ino, status.st_mtime_ns)
        if self._marker is not None and self._marker.version == version:
            return self._marker
        return _Marker(self._file_id(), version, self._parse(self._io.read_bytes(path)))

    def _parse(self, text: bytes) -> int:
        try:
            found = json.loads(text)
            folders = int(found["folders"])
            is_known = found["format"] == _FORMAT and 0 < folders <= _MOST_FOLDERS
        except (ValueError, KeyError, TypeError):
            is_known, folders = False, 0
        if not is_known:
            raise ConfigError(
                f"tier {self._options.name}: {self._path / MARKER} is not of this version of "
                "kvtier; give the tier another `path`"
            )
        return folders

    def _make_marker(self) -> _Marker:
        """Create and return the marker; if another engine creates it first, return that one."""
        folders = 1
        share = self._options.capacity_bytes // (_VALUES_PER_FOLDER * self._value_nbytes)
        while 2 * folders <= min(share, _MOST_FOLDERS):
            folders *= 2
        text = json.dumps({"format": _FORMAT, "folders": folders}).encode()
        temporary = self._path / f".{secrets.token_hex(16)}{TEMPORARY}"
        try:
            with opened(self._io, temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as fd:
                write_fully(self._io, fd, [memoryview(text)], 0)
            self._publish(temporary)
        finally:
            self._io.unlink(temporary)
        marker = self._read_marker()
        if marker is None:
            raise FileNotFoundError(errno.ENOENT, "its marker vanished")
        return marker

    def _publish(self, temporary: Path) -> None:
        """Hard-link ``temporary`` under the marker's name, unless a marker exists.

        Without hard links, rename ``temporary``, which replaces an existing marker.
        """
        try:
            self._io.link(temporary, self._path / MARKER)
        except FileExistsError:
            return
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            self._io.rename(temporary, self._path / MARKER)

    def _check_share(self, marker: _Marker) -> None:
        if marker.folders == 1:
            return
        least_nbytes = marker.folders * _LEAST_VALUES * self._value_nbytes
        if self._options.capacity_bytes < least_nbytes:
            raise ConfigError(
                f"tier {self._options.name}: {self._path} was made for a larger capacity or "
                f"smaller chunks; raise `capacity` to {least_nbytes} bytes, or remove the "
                "directory while no engine uses it"
            )

    def _probe_direct_io(self) -> bool:
        """Return whether O_DIRECT works; raise a ConfigError if the options require it."""
        if self._options.direct_io == "off":
            return False
        try:
            with opened(self._io, self._path / MARKER, os.O_RDONLY | os.O_DIRECT) as fd:
                self._io.preadv(fd, [aligned_buffer(PAGE_NBYTES)], 0)
        except OSError as error:
            if error.errno not in _NO_DIRECT_IO:
                raise
            if self._options.direct_io == "require":
                raise ConfigError(
                    f"tier {self._options.name}: the file system of {self._path} cannot bypass "
                    "the page cache; set `direct_io: auto`"
                ) from error
            return False
        return True

    def _file_id(self) -> tuple[int, int]:
        status = self._io.status(self._path)
        return status.st_dev, status.st_ino

    def _is_same_directory(self) -> bool:
        """Return whether the path still leads to the directory that had the marker."""
        try:
            return self._marker is not None and self._file_id() == self._marker.file_id
        except (FileNotFoundError, NotADirectoryError):
            return False

    def _refusal(self, error: OSError) -> ConfigError | TierUnavailableError:
        name = self._options.name
        if isinstance(error, FileNotFoundError):
            return ConfigError(
                f"tier {name}: {self._path.parent} does not exist; mount the shared file "
                "system, or create the directory"
            )
        if error.errno in _CONFIGURED_WRONG:
            return ConfigError(
                f"tier {name}: {self._path}: {error.strerror}; allow this process's user to "
                "create files there, or give the tier another `path`"
            )
        return self._unavailable(error)

    def _unavailable(self, problem: object) -> TierUnavailableError:
        return TierUnavailableError(self._options.name, f"{self._path}: {problem}")
