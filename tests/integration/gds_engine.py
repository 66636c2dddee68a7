"""The engine program with a twin of kvikio's reads: ``python -m tests.integration.gds_engine``.

Without a GPU there is nothing for kvikio to read into. The twin reads into memory of the
process; all else is as with kvikio.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from kvtier.memory import copiers
from kvtier.memory.direct_files import DirectFiles, PosixFiles
from tests.demo import engine

if TYPE_CHECKING:
    import torch


def open_twin(device: torch.device) -> DirectFiles:
    assert device.type == "cpu"
    return PosixFiles()


if __name__ == "__main__":
    setattr(copiers, "open_direct_files", open_twin)  # noqa: B010 - it is imported there
    engine.main(sys.argv[1:])
