"""The dashboard and the alerts ask for what kvtier exports, and say what to do about it."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tests.docs.pages import ROOT, prose_of
from tests.docs.test_links import anchors
from tests.unit.test_connector_metrics import Published, Source, engine, tier

DASHBOARD = json.loads((ROOT / "configs/grafana/kvtier.json").read_text())
(GROUP,) = yaml.safe_load((ROOT / "configs/prometheus/kvtier.rules.yaml").read_text())["groups"]
ALERTS = GROUP["rules"]
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
VARIABLES = {each["name"]: each for each in DASHBOARD["templating"]["list"]}

METRIC = re.compile(r"\b(?:kvtier_|vllm:)\w+")
MATCHERS = re.compile(r"\{([^}]*)\}")
LABELS = re.compile(r"\b(?:by|without|on|ignoring|group_left|group_right) \(([^)]*)\)")
COLUMNS = 24

TARGET = {"job", "instance"}
"""Labels that Prometheus itself puts on what it scrapes."""
VLLM = {
    "vllm:prefix_cache_hits_total": {"model_name", "engine"},
    "vllm:prompt_tokens_total": {"model_name", "engine"},
}
"""The counters of vLLM's that kvtier's are compared with, and the labels it puts on all."""


@pytest.fixture(scope="module")
def exported() -> dict[str, set[str]]:
    """Return the labels of all that an engine's ``/metrics`` has, by the name on the wire."""
    found = {name: {*has, *TARGET} for name, has in VLLM.items()}
    for name, values in published().series():
        found.setdefault(name, set(TARGET)).update(label for label, _ in values)
    return found


def published() -> Published:
    """Return the metrics of an engine with two tiers, after an observation of each kind."""
    two_tiers = engine(tier("ram"), tier("nvme"))
    source = Source(now=two_tiers, gaps=[[1.0], [1.0]], waits=[1.0])
    source.transfers.record("ram", "nvme", nbytes=1, seconds=1.0)
    labels = dict.fromkeys(sorted(set().union(*VLLM.values())), "any")
    return Published(source, labels)


def expressions() -> dict[str, str]:
    """Return every expression, by where it is."""
    asked = {
        f"{panel['title']} {target['refId']}": target["expr"]
        for panel in PANELS
        for target in panel["targets"]
    }
    return asked | {alert["alert"]: alert["expr"] for alert in ALERTS}


def listed(labels: str) -> set[str]:
    return {label.strip() for label in labels.split(",")} - {""}


def selected(expression: str) -> Iterator[tuple[str, set[str]]]:
    """Yield each metric that is selected, and the labels that are compared."""
    for name in METRIC.finditer(expression):
        braces = MATCHERS.match(expression, name.end())
        pairs = re.findall(r'(\w+)(?:=|!=|=~|!~)"[^"]*"', braces[1] if braces else "")
        yield name[0], set(pairs)


@pytest.mark.parametrize("where", expressions())
def test_every_expression_asks_for_metrics_and_labels_that_are_exported(
    where: str, exported: dict[str, set[str]]
) -> None:
    expression = expressions()[where]
    names = METRIC.findall(expression)
    assert names
    for name, compared in selected(expression):
        assert name in exported
        assert compared <= exported[name], name
    grouped = set().union(*map(listed, LABELS.findall(expression)))
    assert grouped <= set().union(*(exported[name] for name in names))


def test_every_bound_of_a_bucket_is_one_that_is_exported() -> None:
    bounds = {(name, dict(labels).get("le")) for name, labels in published().series()}
    asked = [
        (name, bound)
        for expression in expressions().values()
        for name, bound in re.findall(r'(\w+_bucket)\{[^}]*\ble="([^"]*)"', expression)
    ]
    assert asked
    assert set(asked) <= bounds


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_a_legend_names_labels_that_are_left(
    panel: dict[str, Any], exported: dict[str, set[str]]
) -> None:
    for target in panel["targets"]:
        # Every expression ends in sums or maxima: only what they are taken by is left.
        left = set().union(*map(listed, LABELS.findall(target["expr"])))
        assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= left


def test_the_page_says_which_metrics_each_panel_shows() -> None:
    page = (ROOT / "docs/reference/metrics.md").read_text()
    (table,) = re.findall(r"^\| panel \| metrics \|\n.*\n((?:\|.*\n)+)", page, re.MULTILINE)
    shown = {}
    for panel in PANELS:
        asked = METRIC.findall(" ".join(target["expr"] for target in panel["targets"]))
        names = [re.sub("(?<=_seconds)_(bucket|count)$", "", name) for name in asked]
        shown[panel["title"]] = [f"`{name}`" for name in dict.fromkeys(names)]
    rows = (line.strip("| ").split(" | ") for line in table.splitlines())
    assert {title: names.split(", ") for title, names in rows} == shown


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_every_panel_has_a_unit_and_says_what_it_shows(panel: dict[str, Any]) -> None:
    assert panel["fieldConfig"]["defaults"]["unit"]
    assert len(panel["description"]) > len(panel["title"])
    assert panel["targets"]
    assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])


def test_every_panel_can_be_narrowed_and_asks_the_chosen_prometheus() -> None:
    ours = set(VARIABLES) - {"datasource"}
    for panel in PANELS:
        for target in panel["targets"]:
            assert panel["datasource"] == target["datasource"]
            assert target["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
            for _, compared in selected(target["expr"]):
                assert ours <= compared, target["expr"]
            for name in ours:
                assert f'{name}=~"${name}"' in target["expr"]


def test_every_variable_is_a_label_and_all_also_means_those_without_it(
    exported: dict[str, set[str]],
) -> None:
    asked = {name: each for name, each in VARIABLES.items() if name != "datasource"}
    assert VARIABLES["datasource"]["query"] == "prometheus"
    for name, variable in asked.items():
        query = variable["query"]["query"]
        found = re.fullmatch(r"label_values\((\w+)(?:\{.*\})?, (\w+)\)", query)
        assert found is not None
        assert found[2] == name
        assert name in exported[found[1]]
        assert variable["allValue"] == ".*", "a job of another kind has no model_name"


def test_panels_have_numbers_of_their_own_and_do_not_overlap() -> None:
    numbers = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(numbers) == len(set(numbers))
    titles = [panel["title"] for panel in DASHBOARD["panels"]]
    assert len(titles) == len(set(titles))
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= COLUMNS
        cells = set(
            itertools.product(
                range(at["x"], at["x"] + at["w"]), range(at["y"], at["y"] + at["h"])
            )
        )
        assert cells.isdisjoint(taken), panel["title"]
        taken |= cells


def test_panels_named_in_a_description_are_there() -> None:
    titles = {panel["title"] for panel in PANELS}
    headings = {name.replace("-", " ") for name in anchors(ROOT / "docs/howto/operate.md")}
    for panel in PANELS:
        for named in re.findall(r"'([A-Z][^']*)'", panel["description"]):
            assert named in titles or named.lower() in headings, named


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert["alert"])
def test_every_alert_names_its_remedy_and_a_heading_of_the_manual(
    alert: dict[str, Any], exported: dict[str, set[str]]
) -> None:
    assert alert["labels"]["severity"] in {"warning", "critical"}
    notes = alert["annotations"]
    assert notes.keys() == {"summary", "description", "manual"}
    page, _, anchor = notes["manual"].partition("#")
    assert anchor in anchors(ROOT / page)
    (series, *_) = METRIC.findall(alert["expr"])
    shown = re.findall(r"\$labels\.(\w+)", notes["summary"] + notes["description"])
    assert "instance" in shown
    assert set(shown) <= exported[series]


def test_the_manual_names_both_files() -> None:
    page = prose_of(ROOT / "docs/howto/operate.md")
    for file in ("configs/grafana/kvtier.json", "configs/prometheus/kvtier.rules.yaml"):
        assert f"`{file}`" in page
        assert (ROOT / file).exists()
