"""The stages of the command, in their order."""

from __future__ import annotations

from tests.gpu.runner import Stage

__all__ = ["STAGES"]

STAGES = (
    Stage("facts", 60, "the machine, its driver and its packages", needs_gpu=False),
    Stage("correctness", 110, "the tests of tests/gpu", decides=True),
    Stage("ceilings", 80, "large copies, by kind of host memory; page-locking"),
    Stage("copies", 150, "copies by fragment size, direction and method; both directions"),
    Stage("slowdown", 60, "compute loops beside stores at full rate"),
    Stage("device_engine", 60, "the engine's thread per job, and jobs from end to end"),
    Stage("file_reads", 50, "reads from a file into GPU memory"),
    Stage("sanitizer", 60, "a small correctness test under compute-sanitizer", decides=True),
)
"""Stages that find little to do leave their time to those behind them."""
