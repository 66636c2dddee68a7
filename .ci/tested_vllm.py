"""Prints the release of vLLM that the tests use."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
sys.stdout.write(project["tool"]["kvtier"]["vllm"]["tests"])
