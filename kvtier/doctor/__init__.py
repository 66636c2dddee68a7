"""Checks of a configuration and this machine, with or without measurements of disks.

``kvtier check`` reads the file, the machine and the caches. ``kvtier doctor`` also measures
each disk with a temporary file. Both print the same list of findings.
"""

from __future__ import annotations

from kvtier.doctor._examine import Examination, examine, examine_existing_caches
from kvtier.doctor._findings import Finding, Status

__all__ = ["Examination", "Finding", "Status", "examine", "examine_existing_caches"]
