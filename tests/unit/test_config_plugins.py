"""Tier kinds and eviction policies that other packages install."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from kvtier.config import parse_config, schema
from kvtier.errors import ConfigError

MODULE = """
    from kvtier.config import TierConfig


    class TapeOptions(TierConfig):
        reels: int = 1


    class Tape:
        Options = TapeOptions


    class Wrong:
        Options = dict
"""
ENTRY_POINTS = """
    [kvtier.tiers]
    tape = kvtier_tape:Tape
    wrong = kvtier_tape:Wrong
    broken = kvtier_tape_that_is_gone:Tape

    [kvtier.eviction]
    coin = kvtier_tape:Tape
"""


@pytest.fixture
def tape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install a package that provides the tier kind ``tape``."""
    (tmp_path / "kvtier_tape.py").write_text(textwrap.dedent(MODULE))
    metadata = tmp_path / "kvtier_tape-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: kvtier-tape\nVersion: 1.0\n"
    )
    (metadata / "entry_points.txt").write_text(textwrap.dedent(ENTRY_POINTS))
    monkeypatch.syspath_prepend(tmp_path)


def two_tiers(kind: str, *options: str) -> str:
    lines = [f"  - kind: {kind}", *(f"    {option}" for option in ("capacity: 2GiB", *options))]
    return "\n".join(["tiers:", "  - {kind: ram, capacity: 1GiB}", *lines, ""])


@pytest.mark.usefixtures("tape")
def test_an_installed_kind_brings_its_own_options() -> None:
    config = parse_config(two_tiers("tape", "reels: 3", "eviction: coin"), source="a.yaml")
    assert config.tiers[1].model_dump()["reels"] == 3
    assert (config.tiers[1].name, config.tiers[1].eviction) == ("tape", "coin")


@pytest.mark.usefixtures("tape")
def test_the_options_of_an_installed_kind_are_checked_like_our_own() -> None:
    with pytest.raises(ConfigError, match=r"a\.yaml:5: tiers\[1\]\.reel = 3: .*mean reels\?"):
        parse_config(two_tiers("tape", "reel: 3"), source="a.yaml")


@pytest.mark.usefixtures("tape")
def test_an_unknown_kind_lists_what_is_installed() -> None:
    with pytest.raises(
        ConfigError, match=r"nvme, object, ram, shared_dir, tape, .*did you mean tape\?"
    ):
        parse_config(two_tiers("taep"), source="a.yaml")


@pytest.mark.usefixtures("tape")
def test_a_kind_whose_package_is_broken_says_so() -> None:
    with pytest.raises(
        ConfigError,
        match=r"^a\.yaml:3: tiers\[1\]\.kind = broken: .*does not load.*repair or remove",
    ):
        parse_config(two_tiers("broken"), source="a.yaml")
    with pytest.raises(ConfigError, match=r"derive it from kvtier\.config\.TierConfig"):
        parse_config(two_tiers("wrong"), source="a.yaml")


def test_the_schema_knows_the_units_and_writes_defaults_as_a_file_does() -> None:
    transfer = schema()["$defs"]["TransferConfig"]["properties"]
    assert transfer["piece"]["default"] == "8MiB"
    assert transfer["load_timeout"]["default"] == "10s"
    assert transfer["piece"]["type"] == "string"


def test_the_schema_has_one_alternative_for_each_kind() -> None:
    document = schema()
    alternatives = document["properties"]["tiers"]["items"]["oneOf"]
    assert {"$ref": "#/$defs/tier-ram"} in alternatives
    assert document["$defs"]["tier-nvme"]["required"] == ["kind", "capacity", "path"]
    assert document["$defs"]["tier-nvme"]["properties"]["kind"]["const"] == "nvme"
    assert document["properties"]["tiers"]["minItems"] == 1


@pytest.mark.usefixtures("tape")
def test_the_schema_of_a_broken_installation_is_an_error() -> None:
    with pytest.raises(ConfigError, match="does not load"):
        schema()
