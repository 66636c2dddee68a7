"""What a check says."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

__all__ = ["Finding", "Verdict"]


class Verdict(StrEnum):
    """How bad a finding is, from good to bad."""

    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    PROBLEM = "problem"

    @property
    def severity(self) -> int:
        """A number that grows from OK to PROBLEM."""
        return list(Verdict).index(self)


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the doctor's report.

    Attributes:
        check: What was looked at, such as ``nvme: free space``.
        verdict: OK, NOTE (good to know), WARNING (works, but not as meant) or PROBLEM (kvtier
            cannot start or cannot be trusted).
        found: What is there.
        remedy: What to do; empty where nothing needs doing.
        key: Key of the configuration that the finding is about; empty if it is about none.
    """

    check: str
    verdict: Verdict
    found: str
    remedy: str = ""
    key: str = ""

    def __post_init__(self) -> None:
        if self.verdict.severity >= Verdict.WARNING.severity and not self.remedy:
            raise ValueError(f"{self.check}: a {self.verdict} needs a remedy")
