"""A stage's process: ``python -m tests.gpu.child MODULE`` calls the module's ``run``."""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import sys
from collections.abc import Callable
from pathlib import Path

from tests.gpu.bench import SKIPPED, Bench, SkippedStageError

__all__ = ["main"]


def main() -> int:
    """Run one stage."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.child")
    parser.add_argument("module")
    parser.add_argument("--name", required=True)
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--device", choices=("cuda", "cpu"), required=True)
    options = parser.parse_args()
    faulthandler.enable()
    # The log then shows where a stage hangs that is about to be killed.
    faulthandler.dump_traceback_later(max(options.seconds - 1.0, options.seconds / 2))
    bench = Bench(options.name, options.rows, options.device, options.seconds)
    try:
        run: Callable[[Bench], None] = importlib.import_module(options.module).run
        run(bench)
    except SkippedStageError as reason:
        bench.fact("skipped", reason)
        return SKIPPED
    return 1 if bench.failed else 0


if __name__ == "__main__":
    sys.exit(main())
