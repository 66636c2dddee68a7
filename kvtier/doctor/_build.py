"""How kvtier itself was built."""

from __future__ import annotations

from kvtier.doctor._finding import Finding, Verdict

__all__ = ["check_build"]


def check_build(*, compiled: bool) -> Finding:
    """Say whether what decides is compiled."""
    if compiled:
        return Finding("kvtier", Verdict.OK, "compiled")
    return Finding(
        "kvtier",
        Verdict.NOTE,
        "interpreted: its decisions take a scheduler a third more time",
        "install it with HATCH_BUILD_HOOK_ENABLE_MYPYC=1 and a C compiler",
    )
