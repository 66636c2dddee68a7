"""The page on request control has the fields there are, and its requests are read."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from kvtier.connector import hints
from kvtier.connector.hints import NO_HINTS, HintReader, TierNature
from tests.docs.pages import DOCS, blocks_of

PAGE = DOCS / "reference/request-control.md"
NATURES = [TierNature("ram", "CPU", "LOCAL"), TierNature("nvme", "STORAGE", "LOCAL")]


def test_every_field_has_a_row_and_every_row_a_field() -> None:
    above = PAGE.read_text().partition("## What they do")[0]
    rows = re.findall(r"^\| `(\w+)` \|", above, re.MULTILINE)
    assert rows == list(hints._HintFields.model_fields)


def test_every_field_is_explained_below() -> None:
    below = PAGE.read_text().partition("## What they do")[2]
    for field in hints._HintFields.model_fields:
        assert f"**`{field}`**" in below, field


def test_the_bounds_on_the_page_are_those_of_the_fields() -> None:
    text = PAGE.read_text()
    properties = hints._HintFields.model_json_schema()["properties"]
    (retain_s, _) = properties["retain_s"]["anyOf"]
    assert f"seconds, at most {retain_s['maximum']:.0f}" in text
    assert f"text, at most {properties['session']['maxLength']} characters" in text


def requests() -> list[dict[str, Any]]:
    texts = [re.findall(r"-d '(.*)'", block.text, re.DOTALL) for block in blocks_of(PAGE)]
    return [json.loads(text) for found in texts for text in found]


@pytest.mark.parametrize("request_body", requests(), ids=lambda body: str(len(str(body))))
def test_the_requests_on_the_page_are_read_without_a_warning(
    request_body: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    assert HintReader(NATURES).read(request_body["kv_transfer_params"]) != NO_HINTS
    assert not caplog.records


def test_there_are_requests_on_the_page() -> None:
    assert len(requests()) == 2
