"""The reference page says what the models say."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from kvtier.config import parse_config, schema

PAGE = (Path(__file__).parents[2] / "docs/reference/configuration.md").read_text()
DEFINITIONS = schema()["$defs"]
KINDS = {kind: DEFINITIONS[f"tier-{kind}"]["properties"] for kind in ("ram", "nvme")}
COMMON = {key: KINDS["ram"][key] for key in KINDS["ram"] if key in KINDS["nvme"]}
SECTIONS = {
    "### Every tier": COMMON,
    **{
        f"### kind: {kind}": {key: keys[key] for key in keys if key not in COMMON}
        for kind, keys in KINDS.items()
    },
    **{
        f"## {name}": DEFINITIONS[f"{name.capitalize()}Config"]["properties"]
        for name in ("placement", "transfer", "trace", "engine", "identity")
    },
}


def table_below(heading: str) -> dict[str, str]:
    """Return the default of each key in the first table below ``heading``."""
    section = PAGE.split(f"\n{heading}\n", 1)[1].split("\n#", 1)[0]
    rows = re.findall(r"^\| `(\w+)` \|[^|]*\| ([^|]*) \|", section, re.MULTILINE)
    return {key: default.strip("`") for key, default in rows}


def as_written(properties: dict[str, Any]) -> dict[str, str]:
    """Return the default of each key, as a file would spell it."""
    spelled = {True: "true", False: "false", None: "null"}
    written = {}
    for key, field in properties.items():
        default = field.get("default", "the kind" if key == "name" else "required")
        word = isinstance(default, bool) or default is None
        written[key] = spelled[default] if word else str(default)
    return written


@pytest.mark.parametrize("heading", SECTIONS)
def test_every_key_is_described_with_its_default(heading: str) -> None:
    assert table_below(heading) == as_written(SECTIONS[heading])


def test_the_example_on_the_page_loads() -> None:
    (example,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    assert [tier.name for tier in parse_config(example, source="page").tiers] == ["ram", "nvme"]
