"""Tiers of other people: named by their class, checked and examined as kvtier's own are."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Any

import pytest
from pydantic import Field

from kvtier.config import (
    Duration,
    FilePath,
    Fraction,
    KvtierConfig,
    LocalDirectory,
    RamTierConfig,
    Remark,
    Size,
    TierConfig,
    parse_config,
    parse_tier,
    resolve_rank_paths,
    schema,
)
from kvtier.doctor import Status, examine
from kvtier.errors import ConfigError
from kvtier.os.iopool import IoPool
from kvtier.testing.file_tier import FileTier
from kvtier.testing.tier_harness import Arena
from kvtier.tiers import StorageTier, TierContext, TierExamination, base
from kvtier.tiers.hosted import HostedTier
from kvtier.tiers.registry import open_tier
from kvtier.types import LayoutFingerprint
from tests.support.memory_tier import MemoryTier
from tests.unit.shell import Shell

FILE = "kvtier.testing.file_tier:FileTier"
MEMORY = "tests.support.memory_tier:MemoryTier"
FAULTY = "tests.support.faulty_tier:FaultyTier"
RAM = RamTierConfig(capacity_bytes=1 << 20)
SLOT = 4096


def text_of(kind: str, *keys: str) -> str:
    """Return a file whose second tier is of ``kind``, on line 3, with ``keys`` from line 5."""
    lines = ["tiers:", "- {kind: ram, capacity: 1MiB}", f"- kind: {kind}", "  capacity: 2MiB"]
    return "\n".join([*lines, *(f"  {key}" for key in keys)])


def config_of(kind: str, *keys: str) -> KvtierConfig:
    return parse_config(text_of(kind, *keys), source="a.yaml")


def option_problems(config: KvtierConfig) -> list[str]:
    """Return the examination's problems and warnings about the options of the second tier."""
    return [
        finding.line()
        for finding in examine(config).findings
        if finding.check == f"{config.tiers[1].name}: options"
    ]


async def opened(context: TierContext, kind: str, *keys: str) -> StorageTier:
    """Read, check and open the second tier of a file, as an engine does, on a thread."""

    def run() -> StorageTier:
        config = config_of(kind, *keys)
        assert option_problems(config) == []
        return open_tier(config.tiers[1], context)

    return await context.pool.run(run, priority=0)


@pytest.fixture
def context() -> Iterator[TierContext]:
    pool, arena = IoPool(2, name="kvtier-test"), Arena()
    yield TierContext(SLOT, LayoutFingerprint({}), pool, memory=arena.shared)
    assert pool.close(timeout_s=10)
    arena.close()


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make ``kvtier_own`` a module with tiers that are wrong."""
    code = """
        from kvtier.config import TierConfig
        from tests.support.memory_tier import MemoryTier, MemoryTierConfig
        from kvtier.tiers import StorageTier


        class Options(TierConfig):
            pass


        class Plain:
            Options = Options


        class Unfinished(StorageTier):
            Options = Options


        class Empty:
            pass
    """
    (tmp_path / "kvtier_own.py").write_text(textwrap.dedent(code))
    monkeypatch.syspath_prepend(tmp_path)


class TestByClass:
    async def test_a_file_may_name_the_class_of_a_tier(
        self, tmp_path: Path, context: TierContext
    ) -> None:
        tier = await opened(context, FILE, f"path: {tmp_path / 'store'}")
        assert isinstance(tier, FileTier)
        assert tier.name == "filetier"
        assert tier.capacity_slots == (2 << 20) // SLOT
        await tier.aclose()

    async def test_a_tier_by_class_may_have_a_process_of_its_own(
        self, tmp_path: Path, context: TierContext
    ) -> None:
        paths = {name: tmp_path / name for name in ("path", "plan", "ledger")}
        keys = [f"{name}: {path}" for name, path in paths.items()]
        tier = await opened(context, FAULTY, *keys)
        assert isinstance(tier, HostedTier)
        await tier.aclose()

    @pytest.mark.parametrize(
        ("kind", "problem"),
        [
            (
                "kvtier_gone:Tier",
                "does not load: No module .* put the directory of kvtier_gone",
            ),
            ("kvtier_own:Gone", "does not load: .*; name a class that kvtier_own has"),
            ("kvtier_own:Empty", "has no Options derived from TierConfig; derive it from"),
        ],
    )
    @pytest.mark.usefixtures("module")
    def test_a_class_that_cannot_be_read_is_refused(self, kind: str, problem: str) -> None:
        with pytest.raises(ConfigError, match=rf"^a\.yaml:3: tiers\[1\]\.kind = .*{problem}"):
            config_of(kind)

    @pytest.mark.parametrize(
        ("kind", "problem"),
        [
            ("kvtier_own:Plain", "is no StorageTier; derive it from kvtier.tiers.StorageTier"),
            ("kvtier_own:Unfinished", "Unfinished leaves out aclose, forget, open, read, reco"),
        ],
    )
    @pytest.mark.usefixtures("module")
    def test_a_class_that_cannot_be_opened_fails_the_check(
        self, kind: str, problem: str
    ) -> None:
        (line,) = examine(config_of(kind)).lines(Status.PROBLEM)
        assert line.startswith("a.yaml:3: tiers[1].kind = ")
        assert problem in line

    def test_an_unknown_kind_is_refused_when_it_is_opened(self, context: TierContext) -> None:
        options = TierConfig(kind="tape", capacity_bytes=SLOT)
        with pytest.raises(
            ConfigError,
            match=r"unknown tier kind 'tape'; installed: mooncake, nvme, object, ram",
        ):
            open_tier(options, context)

    def test_the_schema_has_an_alternative_for_classes(self) -> None:
        document = schema()
        assert {"$ref": "#/$defs/tier-class"} in document["properties"]["tiers"]["items"][
            "oneOf"
        ]
        tier = document["$defs"]["tier-class"]
        assert tier["additionalProperties"] is True
        assert ":" in tier["properties"]["kind"]["pattern"]


class Wood(StrEnum):
    OAK = "oak"
    ASH = "ash"


class ShelfConfig(TierConfig):
    """A section with every type that the manual names."""

    kind: str = "shelf"
    plain: Path
    file: FilePath
    wood: Wood = Wood.OAK
    names: tuple[str, ...] = ()
    code: str = Field(default="A", pattern="^[A-Z]$")
    board_bytes: Size = Field(default=1, validation_alias="board")
    fetch_s: Duration = Field(default=1.0, validation_alias="fetch")
    spare: Fraction = 0.0


class TestOptions:
    def test_a_section_takes_paths_enumerations_and_quantities_from_a_file(self) -> None:
        text = """
            {kind: shelf, capacity: 1MiB, plain: b/c, file: /d, wood: ash, names: [x, y],
             board: 2KiB, fetch: 250ms, spare: 10%}
        """
        options = parse_tier(text, ShelfConfig, source="a.yaml")
        assert (options.plain, options.file) == (Path("b/c"), Path("/d"))
        assert (options.wood, options.names) == (Wood.ASH, ("x", "y"))
        assert (options.board_bytes, options.fetch_s, options.spare) == (2048, 0.25, 0.1)

    @pytest.mark.parametrize(
        ("key", "problem"),
        [
            ("plain: 5", "plain = 5: not text; put it in quotes if it is meant as text"),
            ("file: d", "file = d: not an absolute path; write it from the root"),
            ("file: '/{rank}'", "file = /{rank}: a brace outside"),
            ("board: 64", "board = 64: 64 has no unit; write 64GiB"),
            ("code: a", r"code = a: String should match pattern '^[A-Z]$'; see kvtier schema"),
        ],
    )
    def test_a_wrong_value_is_refused_with_its_line(self, key: str, problem: str) -> None:
        name, _, _ = key.partition(":")
        keys = {"plain": "/b", "file": "/d"}
        keys.pop(name, None)
        others = [f"{other}: {value}" for other, value in keys.items()]
        text = "\n".join(["kind: shelf", "capacity: 1MiB", key, *others])
        with pytest.raises(ConfigError) as caught:
            parse_tier(text, ShelfConfig, source="a.yaml")
        assert str(caught.value).startswith(f"a.yaml:3: {problem}")


class TestItsDirectory:
    def test_a_directory_that_cannot_be_made_is_refused(self, tmp_path: Path) -> None:
        missing = tmp_path / "no"
        (line,) = examine(config_of(FILE, f"path: {missing / 'store'}")).lines(Status.PROBLEM)
        assert line.startswith("a.yaml:5: tiers[1].path = ")
        assert line.endswith(
            f": its parent {missing} does not exist; mount the disk or run: mkdir -p {missing}"
        )

    def test_a_disk_without_room_is_refused(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "chunks").write_bytes(bytes(1 << 20))
        monkeypatch.setattr(base, "free_disk_nbytes", lambda _: (1 << 20) - 4096)
        (line,) = examine(config_of(FILE, f"path: {tmp_path}")).lines(Status.PROBLEM)
        assert line.startswith(
            "a.yaml:4: tiers[1].capacity = 2MiB: needs 2.00 MiB; the disk has "
        )

    def test_a_tier_that_knows_its_store_says_what_a_start_would_find(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        found = TierExamination(refusals=[Remark("path", "it is locked", "find the key")])
        monkeypatch.setattr(FileTier, "examine", classmethod(lambda *_: found))
        (problem,) = examine(config_of(FILE, f"path: {tmp_path}")).lines(Status.PROBLEM)
        assert problem.startswith("a.yaml:5: tiers[1].path = ")
        assert problem.endswith(": it is locked; find the key")

    def test_a_tier_derived_from_the_slab_is_examined_as_one(self, tmp_path: Path) -> None:
        (tmp_path / ("0" * 16)).mkdir()
        (tmp_path / ("0" * 16) / "slots.bin").write_bytes(bytes(4096))
        keys = [f"{name}: {tmp_path}" for name in ("path", "plan", "ledger")]
        lines = examine(config_of(FAULTY, *keys)).lines(Status.WARNING)
        assert any("looks like a cache of kvtier's" in line for line in lines)

    def test_a_directory_of_another_tier_is_refused(self, tmp_path: Path) -> None:
        nvme = f"- {{kind: nvme, path: {tmp_path}, capacity: 4MiB}}"
        text = f"{text_of(FILE, f'path: {tmp_path}')}\n{nvme}"
        with pytest.raises(
            ConfigError, match=r"tiers\[2\]\.path = .*another tier has the same"
        ):
            parse_config(text, source="a.yaml")

    def test_ranks_that_would_share_it_are_refused(self, tmp_path: Path) -> None:
        with pytest.raises(
            ConfigError, match=r"^a\.yaml:5: tiers\[1\]\.path = .*rank is an en"
        ):
            resolve_rank_paths(config_of(FILE, f"path: {tmp_path}"), rank=0)

    def test_it_may_have_any_name_and_be_a_plain_path(self) -> None:
        class Options(TierConfig):
            kind: str = "shelf"
            root: Path

            def local_directory(self) -> LocalDirectory:
                return LocalDirectory(self.root, key="root")

        shelf = Options(capacity_bytes=1 << 20, root=Path("here"))
        with pytest.raises(ValueError, match=r"tiers\[1\].root: not an absolute path"):
            KvtierConfig(tiers=(RAM, shelf))

    def test_the_check_shows_it(
        self,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        file = tmp_path / "a.yaml"
        file.write_text(text_of(FILE, f"path: {tmp_path / 'store'}"))
        monkeypatch.setenv("COLUMNS", "400")  # paths of parallel tests are long
        ran = Shell(monkeypatch, capsys)("check", file)
        assert str(tmp_path / "store") in ran.out


class Cautious(TierConfig):
    kind: str = "cautious"
    mood: str = "warns"

    def remarks(self) -> Iterator[Remark]:
        if self.mood == "refuses":
            raise ConfigError("the shelf is locked; find the key")
        if self.mood == "fails":
            raise ZeroDivisionError
        yield Remark("mood", "it warns", "cheer it up")


class TestRemarks:
    def config(self, mood: str) -> KvtierConfig:
        shelf = Cautious(capacity_bytes=2 << 20, mood=mood)
        return KvtierConfig(tiers=(RAM, shelf))

    def test_its_warnings_are_shown(self) -> None:
        assert option_problems(self.config("warns")) == ["tiers[1].mood: it warns; cheer it up"]

    @pytest.mark.parametrize(
        ("mood", "problem"),
        [
            ("refuses", r"^tiers\[1\]: the shelf is locked; find the key$"),
            ("fails", r"^tiers\[1\]: the tier's remarks\(\) failed: ZeroDiv.*; repair the ti"),
        ],
    )
    def test_options_that_the_tier_refuses_are_a_problem(self, mood: str, problem: str) -> None:
        (line,) = option_problems(self.config(mood))
        assert re.search(problem, line)


class TestDoctor:
    def findings(self, config: KvtierConfig) -> dict[str, Any]:
        return {each.check: each for each in examine(config).findings}

    def test_a_disk_is_examined_for_every_kind_of_tier(self, tmp_path: Path) -> None:
        found = self.findings(config_of(FILE, f"path: {tmp_path}"))
        checks = {check for check in found if check.startswith("filetier: ")}
        assert checks >= {
            f"filetier: {of}" for of in ("file system", "directory", "free space")
        }
        assert "filetier: O_DIRECT" not in checks, "the tier does not say whether it uses it"

    def test_a_tier_without_a_directory_is_named(self) -> None:
        finding = self.findings(config_of(MEMORY))["memorytier: medium"]
        assert finding.status is Status.NOTE
        assert finding.reason == (
            f"kind {MEMORY} fills no directory of this machine: not examined"
        )


def test_a_tier_in_memory_needs_no_path(context: TierContext) -> None:
    config = config_of(MEMORY)
    assert option_problems(config) == []
    assert isinstance(open_tier(config.tiers[1], context), MemoryTier)
