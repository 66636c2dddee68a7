"""Check an environment with kvtier and no extras: its size, and commands that start there.

Usage: PYTHON .ci/check_install.py MOST_MB, with the Python of that environment.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import time
from pathlib import Path

TOOLS = ("pip", "setuptools")


def main() -> None:
    """Print the figures; exit with 1 if one is over its limit."""
    most_nbytes = float(sys.argv[1]) * 1e6
    packages = Path(sysconfig.get_path("purelib"))
    files = [path for path in packages.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    nbytes = sum(
        path.stat().st_size
        for path in files
        if not path.relative_to(packages).parts[0].startswith(TOOLS)
    )
    print(f"{nbytes / 1e6:.1f} MB of files, at most {most_nbytes / 1e6:.0f}")  # noqa: T201
    kvtier = str(Path(sys.executable).with_name("kvtier"))
    failed = nbytes > most_nbytes
    for command in (["--help"], ["check", "configs/demo.yaml"], ["plan", "--help"]):
        began_s = time.monotonic()
        done = subprocess.run([kvtier, *command], capture_output=True, text=True, check=False)
        seconds = time.monotonic() - began_s
        print(f"kvtier {' '.join(command)}: {done.returncode} in {seconds:.2f} s")  # noqa: T201
        failed |= bool(done.stderr) or done.returncode not in {0, 1}
    sys.exit(failed)


if __name__ == "__main__":
    main()
