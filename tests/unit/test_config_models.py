"""Configurations built in Python."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from kvtier.config import (
    KvtierConfig,
    NvmeTierConfig,
    Origin,
    PlacementConfig,
    RamTierConfig,
    TransferConfig,
    parse_config,
)
from kvtier.errors import ConfigError

RAM = RamTierConfig(capacity_bytes=1 << 30)


def nvme(**options: object) -> NvmeTierConfig:
    return NvmeTierConfig.model_validate(
        {"path": Path("/kv"), "capacity_bytes": 1 << 31, **options}
    )


def test_python_names_carry_the_unit_and_take_plain_numbers() -> None:
    config = KvtierConfig(
        tiers=(RamTierConfig(kind="ram", capacity_bytes=1 << 30), nvme()),
        placement=PlacementConfig(pin_budget=0.25),
        transfer=TransferConfig(load_timeout_s=2.5),
    )
    assert config.tiers[0].capacity_bytes == 1 << 30
    assert config.placement.pin_budget == 0.25
    assert config.transfer.load_timeout_s == 2.5


@pytest.mark.parametrize("way", ["link", "link/../disk", "disk/"])
def test_two_tiers_in_one_directory_are_refused_whatever_it_is_called(
    tmp_path: Path, way: str
) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to("disk")
    first, second = tmp_path / "disk" / "kv", Path(f"{tmp_path}/{way}/kv")
    with pytest.raises(ValidationError, match="another tier has the same path"):
        KvtierConfig(tiers=(RAM, nvme(path=first), nvme(path=second, name="b")))


def test_a_tier_is_called_by_its_kind_unless_it_has_a_name() -> None:
    assert [RAM.name, nvme().name, nvme(name="slow").name] == ["ram", "nvme", "slow"]


def test_a_model_cannot_be_changed() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        RAM.capacity_bytes = 1


@pytest.mark.parametrize("capacity_bytes", [0, -1, True, 1.5, 1 << 63])
def test_a_capacity_is_a_positive_number_of_bytes(capacity_bytes: object) -> None:
    with pytest.raises(ValidationError):
        RamTierConfig.model_validate({"capacity_bytes": capacity_bytes})


@pytest.mark.parametrize("share", [-0.1, 1.1, True, float("nan")])
def test_a_share_lies_between_nothing_and_everything(share: object) -> None:
    with pytest.raises(ValidationError):
        PlacementConfig.model_validate({"pin_budget": share})


@pytest.mark.parametrize("timeout_s", [0, -1.0, float("inf"), float("nan"), False])
def test_a_timeout_is_positive_and_ends(timeout_s: object) -> None:
    with pytest.raises(ValidationError):
        TransferConfig.model_validate({"load_timeout_s": timeout_s})


def test_a_tier_class_refuses_another_kind() -> None:
    with pytest.raises(ValidationError, match="kind"):
        RamTierConfig(kind="nvme", capacity_bytes=1)


def test_a_tier_must_be_an_object_because_its_class_is_its_kind() -> None:
    with pytest.raises(ValidationError, match="instance of TierConfig"):
        KvtierConfig.model_validate({"tiers": [{"kind": "ram", "capacity_bytes": 1}]})


def test_cross_checks_hold_for_configurations_built_in_python() -> None:
    with pytest.raises(ValidationError, match="the first tier is not ram"):
        KvtierConfig(tiers=(nvme(),))
    with pytest.raises(ValidationError, match="has the same name"):
        KvtierConfig(tiers=(RAM, nvme(), nvme(path=Path("/other"))))


def test_configurations_of_different_files_can_be_equal() -> None:
    text = "tiers:\n  - {kind: ram, capacity: 1GiB}\n"
    assert parse_config(text, source="a.yaml") == KvtierConfig(tiers=(RAM,))
    assert parse_config(text, source="a.yaml") == parse_config("\n" + text, source="b.yaml")
    assert hash(parse_config(text, source="a.yaml")) == hash(KvtierConfig(tiers=(RAM,)))


def test_a_copy_has_the_same_origin() -> None:
    config = parse_config("tiers:\n  - {kind: ram, capacity: 1GiB}\n", source="a.yaml")
    assert config.model_copy().origin.source == "a.yaml"
    assert config.model_copy().origin.line_of("tiers[0].capacity") == 2


def test_a_long_value_is_cut_in_messages() -> None:
    origin = Origin("a.yaml", {"key": 1}, {"key": "x" * 1000})
    assert len(origin.format_problem("key", "too long", "shorten it")) < 120


# -- GDS reads ---------------------------------------------------------------------------------


def config(*tiers: NvmeTierConfig, **transfer: object) -> KvtierConfig:
    return KvtierConfig(tiers=(RAM, *tiers), transfer=TransferConfig.model_validate(transfer))


def test_gds_reads_are_off_unless_a_tier_asks_for_them() -> None:
    assert (config(nvme()).gds, config(nvme()).gds_tier) == ("off", None)
    slow = nvme(path=Path("/slow"), name="slow", gds="auto")
    assert (config(nvme(), slow).gds, config(nvme(), slow).gds_tier) == ("auto", "slow")


def test_staged_loads_have_no_gds_reads_and_cannot_require_them() -> None:
    staged = config(nvme(gds="auto"), load_path="staged")
    assert (staged.gds, staged.gds_tier) == ("off", None)
    with pytest.raises(ValidationError, match=r"tiers\[1\]\.gds: load_path: staged loads"):
        config(nvme(gds="require"), load_path="staged")


def test_two_tiers_with_gds_reads_are_refused() -> None:
    with pytest.raises(ValidationError, match=r"tiers\[2\]\.gds: another tier has it"):
        config(nvme(gds="auto"), nvme(path=Path("/b"), name="b", gds="require"))


@pytest.mark.parametrize(
    ("gds", "installed", "problem"),
    [
        ("auto", [], "kvikio is not installed, so chunks go through RAM"),
        ("auto", ["kvikio-cu13"], None),
        ("require", ["kvikio-cu13"], None),
        ("off", [], None),
    ],
)
def test_a_missing_kvikio_is_remarked_on(
    monkeypatch: pytest.MonkeyPatch, gds: str, installed: list[str], problem: str | None
) -> None:
    monkeypatch.setattr("kvtier.config._tiers.installed_kvikio", lambda: installed)
    found = [(each.key, each.problem) for each in nvme(gds=gds).remarks()]
    assert found == ([] if problem is None else [("gds", problem)])


@pytest.mark.parametrize(
    ("gds", "installed", "problem"),
    [
        ("require", [], "gds: kvikio is not installed, so the engine will not start; pip"),
        ("auto", ["kvikio-cu12", "kvikio-cu13"], "gds: kvikio-cu12 and kvikio-cu13 are"),
    ],
)
def test_packages_with_which_no_engine_starts_are_a_problem(
    monkeypatch: pytest.MonkeyPatch, gds: str, installed: list[str], problem: str
) -> None:
    monkeypatch.setattr("kvtier.config._tiers.installed_kvikio", lambda: installed)
    with pytest.raises(ConfigError, match=problem):
        list(nvme(gds=gds).remarks())
