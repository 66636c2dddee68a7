"""The result of an examination: a list of findings."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvtier.doctor.rates import MeasuredRates

__all__ = ["Examination", "Finding", "Status"]


class Status(StrEnum):
    """How bad a finding is, from good to bad."""

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
            cannot start, or serves nothing).
        reason: What was found.
        remedy: What to do; empty if there is nothing to do.
        key: Key of the configuration that the finding is about; empty if there is none.
        place: ``file:line: key = value`` of ``key``.
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
        """Return the finding as one line: place, reason and remedy."""
        text = f"{self.place}: {self.reason}" if self.place else self.reason
        return f"{text}; {self.remedy}" if self.remedy else text


@dataclass(slots=True)
class Examination:
    """All findings and the measured rates.

    Attributes:
        findings: In reading order.
        rates: Measured rates by the name of the tier; empty if nothing was measured.
    """

    findings: list[Finding] = field(default_factory=list)
    rates: dict[str, MeasuredRates] = field(default_factory=dict)

    @property
    def status(self) -> Status:
        """Return the worst status of all findings."""
        statuses = (finding.status for finding in self.findings)
        return max(statuses, key=lambda status: status.severity, default=Status.OK)

    def lines(self, status: Status) -> list[str]:
        """Return the findings with ``status``, one line each."""
        return [finding.line() for finding in self.findings if finding.status is status]

    def as_dict(self) -> dict[str, Any]:
        """Return the examination as plain values."""
        return {
            "status": self.status.value,
            "findings": [asdict(finding) for finding in self.findings],
            "measured": {name: asdict(rates) for name, rates in self.rates.items()},
        }
