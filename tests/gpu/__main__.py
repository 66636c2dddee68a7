"""The command: ``python -m tests.gpu [--only NAMES] [--out DIR] [--seconds N] ...``.

One run on a machine with a GPU gives correctness and a table of figures within ten minutes. It
needs nothing beside a CUDA stack with torch, and the wheels that ``.ci/gpu_wheels`` fetched.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from tests.gpu.bench import Device
from tests.gpu.runner import ROOT, Run, Stage, stopped_by_signals
from tests.gpu.stages import STAGES
from tests.gpu.wheels import unpack_missing

WHEELS: Final = ROOT / ".gpu-wheels"
_INTERRUPTED: Final = 130
_PROBE: Final = """
import ctypes
cuda, count = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
for error in (cuda.cuInit(0), cuda.cuDeviceGetCount(ctypes.byref(count))):
    if error: raise SystemExit(f"the driver answers with error {error}")
if not count.value: raise SystemExit("the driver has none")
"""


def main() -> int:
    """Run the command and return its exit status."""
    options = _parse()
    if options.list:
        for stage in STAGES:
            _say(f"{stage.name:14} {stage.seconds:4.0f} s  {stage.about}")
        return 0
    absence = "" if options.rehearse else _why_no_device()
    device: Device | None = "cuda"
    variables: dict[str, str] = {}
    if options.rehearse:
        device, variables = "cpu", {"OMP_NUM_THREADS": "1"}
        _say("a rehearsal on the CPU: its figures mean nothing")
    elif absence:
        device = None
        _say(f"no CUDA device ({absence}): only stages that do without one run")
    with stopped_by_signals(), _environment(variables) as environment:
        run = Run(
            options.out,
            device=device,
            environment=environment,
            seconds=options.seconds,
            command=shlex.join(["python", "-m", "tests.gpu", *sys.argv[1:]]),
            say=_say,
        )
        try:
            run.run(_chosen(options.only))
        except KeyboardInterrupt:
            _say(run.report())
            return _INTERRUPTED
        _say(run.report())
        return 1 if run.failed else 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=__doc__)
    parser.add_argument("--list", action="store_true", help="list the stages and stop")
    parser.add_argument("--only", default="", metavar="NAMES", help="stages, by commas")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path(os.environ.get("OUT") or "gpu-report"),  # noqa: TID251 - not kvtier's
        help="directory of the rows, the log and the report (default: $OUT or ./gpu-report)",
    )
    parser.add_argument(
        "--seconds", type=float, default=540.0, help="time for all stages (default: 540)"
    )
    parser.add_argument(
        "--rehearse",
        action="store_true",
        help="run all stages on the CPU with small sizes, to test the stages",
    )
    options = parser.parse_args()
    unknown = set(filter(None, options.only.split(","))) - {stage.name for stage in STAGES}
    if unknown:
        parser.error(f"no stage {', '.join(sorted(unknown))}; see --list")
    return options


def _chosen(names: str) -> Sequence[Stage]:
    wanted = set(filter(None, names.split(",")))
    return [stage for stage in STAGES if not wanted or stage.name in wanted]


def _why_no_device() -> str:
    """Return why there is no CUDA device; empty if there is one.

    Another process asks: a driver that hangs must not stop this one.
    """
    try:
        probe = subprocess.run(
            [sys.executable, "-c", _PROBE],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "the driver does not answer"
    return probe.stderr.strip().splitlines()[-1] if probe.returncode else ""


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[Mapping[str, str]]:
    """Yield the environment of the stages, in which missing packages can be imported."""
    ours = dict(os.environ)  # noqa: TID251 - handed on
    with tempfile.TemporaryDirectory(prefix="kvtier-gpu-") as scratch:
        site, temporary = Path(scratch) / "site", Path(scratch) / "tmp"
        temporary.mkdir()
        unpacked = unpack_missing(WHEELS, site)
        if unpacked:
            _say(f"unpacked from {WHEELS.name}: {', '.join(unpacked)}")
        paths = [str(ROOT), *([str(site)] if unpacked else []), ours.get("PYTHONPATH", "")]
        yield ours | {
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "PYTHONUNBUFFERED": "1",
            "TMPDIR": str(temporary),  # what a killed stage leaves there is removed
            **variables,
        }


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
