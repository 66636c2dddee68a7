"""The result type of the checks: a finding, with its severity and a remedy."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

__all__ = ["Finding", "Status"]


class Status(StrEnum):
    """Severity of a finding, mildest first."""

    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    PROBLEM = "problem"

    @property
    def severity(self) -> int:
        """Return a number that grows from OK to PROBLEM."""
        return list(Status).index(self)


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check.

    Attributes:
        check: Name of the check, such as ``nvme: free space``.
        status: OK, NOTE (good to know), WARNING (works, but not as intended) or PROBLEM (kvtier
            cannot start or serves no chunk).
        reason: The observed fact.
        remedy: What to do; empty if no action is needed.
        key: The configuration key of the finding; empty if there is none.
        place: Location of ``key`` in the file, as ``file:line: key = value``.
    """

    check: str
    status: Status
    reason: str
    remedy: str = ""
    key: str = ""
    place: str = ""

    def __post_init__(self) -> None:
        if self.status.severity >= Status.WARNING.severity and not self.remedy:
            raise ValueError(f"{self.check}: a {self.status} needs a remedy")

    def line(self) -> str:
        """Return the finding as one line: location, reason and remedy."""
        text = f"{self.place}: {self.reason}" if self.place else self.reason
        return f"{text}; {self.remedy}" if self.remedy else text
