"""System calls on a shared directory that fail or hang on request."""

from __future__ import annotations

import os
from pathlib import Path

from kvtier.tiers.shared.dir_io import DirIo, FileEntry
from tests.support.faulty_io import FaultyIo

__all__ = ["FaultyDirIo"]


class FaultyDirIo(FaultyIo, DirIo):
    """Runs every call, except those that a test makes fail; see :class:`FaultyIo`."""

    def status(self, path: Path) -> os.stat_result:
        inherited = super().status
        return self.run("status", lambda: inherited(path))

    def status_of(self, fd: int) -> os.stat_result:
        inherited = super().status_of
        return self.run("status_of", lambda: inherited(fd))

    def touch(self, fd: int) -> None:
        inherited = super().touch
        self.run("touch", lambda: inherited(fd))

    def link(self, source: Path, destination: Path) -> None:
        inherited = super().link
        self.run("link", lambda: inherited(source, destination))

    def list_files(self, folder: Path) -> list[FileEntry]:
        inherited = super().list_files
        return self.run("list_files", lambda: inherited(folder))
