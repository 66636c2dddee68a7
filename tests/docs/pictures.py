"""``python -m tests.docs.pictures DIR``: draw the pictures of commands in docs/pictures again.

Each is what a command prints on a terminal. ``kvtier doctor`` measures the disk of ``DIR``, so
its figures are those of the machine that draws.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.text import Text

from tests.docs.pages import DOCS

COLUMNS: Final = 104
PICTURES: Final = DOCS / "pictures"
CONFIG: Final = """tiers:
  - {kind: ram, capacity: 1GiB}
  - {kind: nvme, path: store, capacity: 4GiB}
engine: {blocks_per_chunk: 4}
"""
GENERATE: Final = "trace generate agents --sessions 200 --per-s 0.1 --seed 1 -o agents.jsonl"
COMMANDS: Final = {
    "doctor": "doctor kvtier.yaml",
    "sweep": "sim sweep agents.jsonl --policies lru,s3-fifo,lhd --capacities 1%,5%,10% "
    "--csv curves.csv",
}


def printed(arguments: Sequence[str], directory: Path) -> str:
    """Return what kvtier prints on a terminal, with its colours."""
    environment = {**os.environ, "FORCE_COLOR": "1", "COLUMNS": str(COLUMNS)}  # noqa: TID251
    done = subprocess.run(
        [sys.executable, "-m", "kvtier", *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=directory,
        env=environment,
    )
    assert done.returncode in {0, 1}, done.stderr
    return done.stdout


def draw(command: str, text: str, file: Path) -> None:
    """Draw ``command`` and what it printed."""
    with Path(os.devnull).open("w") as nowhere:
        console = Console(record=True, width=COLUMNS, file=nowhere, force_terminal=True)
        console.print(f"$ kvtier {command}", style="bold", highlight=False, soft_wrap=True)
        console.print(Text.from_ansi(text), soft_wrap=True)
    console.save_svg(str(file), title="kvtier")


def main() -> None:
    """Draw every picture."""
    with tempfile.TemporaryDirectory(dir=sys.argv[1]) as name:
        directory = Path(name)
        text = CONFIG.replace("path: store", f"path: {directory}/store")
        (directory / "kvtier.yaml").write_text(text)
        printed(GENERATE.split(), directory)
        for picture, command in COMMANDS.items():
            shown = printed(command.split(), directory).replace(f"{directory}/", "/mnt/nvme/")
            draw(command, shown, PICTURES / f"{picture}.svg")


if __name__ == "__main__":
    main()
