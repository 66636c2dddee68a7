"""The metrics page names what kvtier reports, in vLLM and out of it."""

from __future__ import annotations

import re

from kvtier.connector.metrics import METRICS, Kind
from tests.docs.pages import DOCS

PAGE = (DOCS / "reference/metrics.md").read_text()
CONFIGURATION = {"kvtier_config"}


def declared() -> dict[str, set[str]]:
    """Return the labels of each metric, by its name in Prometheus."""
    return {
        name + "_total" * (metric.kind is Kind.COUNTER): set(metric.labels)
        for name, metric in METRICS.items()
    }


def described() -> dict[str, set[str]]:
    """Return the labels of each metric, as the page's tables have them."""
    rows = re.findall(r"^\| `(kvtier_\w+)` \| ([^|]*) \|", PAGE, re.MULTILINE)
    assert len(rows) == len(dict(rows)), "a metric is described twice"
    return {name: set(re.findall(r"`(\w+)`", labels)) for name, labels in rows}


def test_every_metric_is_described_with_its_labels() -> None:
    assert described() == declared()


def test_every_row_says_what_to_do() -> None:
    rows = [line for line in PAGE.split("\n") if line.startswith("| `kvtier_")]
    assert rows
    for row in rows:
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        assert len(cells) == 5, row
        assert all(cells), row


def test_every_cause_of_a_failure_is_named() -> None:
    (row,) = re.findall(r"^\| `kvtier_failed_chunks_total` .*$", PAGE, re.MULTILINE)
    assert {"read", "write", "load", "corrupt", "expired", "refused"} <= set(
        re.findall(r"`(\w+)`", row)
    )


def test_other_pages_and_alerts_name_only_metrics_there_are() -> None:
    known = {*declared(), *(name.removesuffix("_total") for name in declared())}
    for name, metric in METRICS.items():
        if metric.kind is Kind.HISTOGRAM:
            known |= {f"{name}_bucket", f"{name}_sum", f"{name}_count"}
    for page in DOCS.rglob("*.md"):
        named = set(re.findall(r"\bkvtier_[a-z_]+\b", page.read_text())) - CONFIGURATION
        assert named <= known, (page, named - known)
