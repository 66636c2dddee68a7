"""The metrics page names what kvtier reports.

The tables of ``kvtier/vllm/metrics.py`` are read from its source: importing it takes vLLM.
"""

from __future__ import annotations

import ast
import re

from tests.docs.pages import DOCS, ROOT

PAGE = (DOCS / "reference/metrics.md").read_text()
SOURCE = ast.parse((ROOT / "kvtier/vllm/metrics.py").read_text())


def constants() -> dict[str, object]:
    """Return the module's constants of plain values."""
    found: dict[str, object] = {}
    for node in SOURCE.body:
        target = node.targets[0] if isinstance(node, ast.Assign) else None
        target = node.target if isinstance(node, ast.AnnAssign) else target
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(target, ast.Name):
            found[target.id] = ast.literal_eval(node.value) if node.value else None
    return found


def declared() -> dict[str, set[str]]:
    """Return the labels of each metric, by its name in Prometheus."""
    plain = constants()
    prefix = plain["_PREFIX"]
    metrics: dict[str, set[str]] = {
        f"{plain['_FAILED']}_total": {"tier", "cause"},
        f"{plain['_SHADOW_RATIO']}": {"tier", "policy"},
        f"{plain['_REUSE_GAP']}": {"tier"},
    }
    for table, labels, suffix in (
        ("_COUNTERS", {"tier"}, "_total"),
        ("_GAUGES", {"tier"}, ""),
        ("_ENGINE_GAUGES", set(), ""),
        ("_ENGINE_COUNTERS", set(), "_total"),
        ("_SHADOW_COUNTERS", {"tier", "policy"}, "_total"),
    ):
        names = plain[table]
        assert isinstance(names, dict)
        metrics |= {f"{prefix}{name}{suffix}": labels for name in names}
    return metrics


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


def test_other_pages_and_alerts_name_only_metrics_there_are() -> None:
    known = {*declared(), *(name.removesuffix("_total") for name in declared())}
    for page in DOCS.rglob("*.md"):
        named = set(re.findall(r"\bkvtier_[a-z_]+\b", page.read_text())) - {"kvtier_config"}
        assert named <= known, page
