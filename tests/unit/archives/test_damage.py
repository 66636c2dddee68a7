"""Each flipped bit, each truncation and each missing part of an archive is named."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from kvtier.archive import Damage, open_archive, open_location, verify_archive
from kvtier.archive.reading import Archive
from kvtier.errors import ConfigError
from kvtier.keys import short_key
from tests.unit.cache_shell import Shell, flat
from tests.unit.stores import KEYS, SLOT, SLOTS, Store

HEADER = 4096
"""Bytes of the header of the archive's only part."""


@pytest.fixture(params=["none", "zstd"])
def archive(request: pytest.FixtureRequest, shell: Shell, store: Store, out: Path) -> Path:
    form = ["--zstd"] if request.param == "zstd" else []
    assert shell("export", store.filled().root, out, *form).code == 0
    return out


def opened(path: Path) -> Archive:
    return open_archive(open_location(str(path)))


def records_of(path: Path) -> list[tuple[int, int]]:
    """Return the first byte and the bytes of each record of the archive's only part."""
    (header,) = opened(path).headers()
    assert not isinstance(header, Damage)
    return list(zip(header.offsets(), header.sizes(), strict=False))


def change(path: Path, at: int, *, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << bit
    path.write_bytes(data)


def part_of(archive: Path) -> Path:
    (part,) = archive.glob("*.kvtier")
    return part


def test_a_flipped_bit_anywhere_is_named_with_its_record_and_offset(archive: Path) -> None:
    part, records = part_of(archive), records_of(archive)
    draw = random.Random(4)
    places = [0, 9, 13, 17, 30, HEADER - 1, *draw.sample(range(part.stat().st_size), 60)]
    for at in places:
        bit = draw.randrange(8)
        change(part, at, bit=bit)
        damages = verify_archive(opened(archive))
        assert len(damages) == 1, (at, damages)
        (damage,) = damages
        if at < HEADER:
            assert (damage.record, damage.chunks) == (None, SLOTS)
        else:
            assert damage.record is not None
            start, nbytes = records[damage.record]
            assert damage.offset == start <= at < start + nbytes
            assert (damage.chunks, damage.key) == (1, short_key(KEYS[damage.record]))
        change(part, at, bit=bit)
    assert verify_archive(opened(archive)) == []


def test_a_truncation_anywhere_is_named_for_each_record_that_it_hits(archive: Path) -> None:
    part, records = part_of(archive), records_of(archive)
    whole = part.read_bytes()
    cuts = {0, 1, 20, 100, HEADER - 1, HEADER, len(whole) - 1}
    cuts |= {start + nbytes // 2 for start, nbytes in records}
    for cut in sorted(cuts):
        part.write_bytes(whole[:cut])
        damages = verify_archive(opened(archive))
        hit = [at for at, (start, nbytes) in enumerate(records) if start + nbytes > cut]
        if cut < HEADER:
            assert [damage.record for damage in damages] == [None], cut
            assert damages[0].chunks == SLOTS
        else:
            assert [damage.record for damage in damages] == hit, cut
            assert all("the file ends" in damage.problem for damage in damages)
    part.write_bytes(whole + b"\0")
    (damage,) = verify_archive(opened(archive))
    assert "it has 1 bytes behind its end" in damage.problem


def test_a_missing_part_is_named(archive: Path) -> None:
    part = part_of(archive)
    part.unlink()
    assert verify_archive(opened(archive)) == [Damage(part.name, SLOTS, "it is missing")]


def test_a_part_in_the_place_of_another_is_named(archive: Path) -> None:
    part = part_of(archive)
    manifest = (archive / "manifest.json").read_text()
    other = "0" * 16 + ".kvtier"
    part.rename(archive / other)
    assert [damage.problem for damage in verify_archive(opened(archive))] == ["it is missing"]
    assert part.name in manifest


def test_a_flipped_bit_anywhere_in_the_manifest_is_named(archive: Path) -> None:
    manifest = archive / "manifest.json"
    for at in range(manifest.stat().st_size):
        change(manifest, at)
        with pytest.raises(ConfigError, match=r"manifest\.json: it"):
            opened(archive)
        change(manifest, at)
    assert opened(archive).manifest.chunks == SLOTS


@pytest.mark.parametrize("share", [0, 0.5, 0.99])
def test_a_manifest_cut_short_is_named(archive: Path, share: float) -> None:
    manifest = archive / "manifest.json"
    data = manifest.read_bytes()
    manifest.write_bytes(data[: int(share * len(data))])
    with pytest.raises(ConfigError, match=r"manifest\.json: it is not JSON"):
        opened(archive)


def test_an_archive_of_another_version_is_refused(archive: Path) -> None:
    manifest = archive / "manifest.json"
    document: dict[str, Any] = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({**document, "version": 9}))
    with pytest.raises(ConfigError, match="it has version 9, and this kvtier reads 1"):
        opened(archive)


def test_an_import_names_the_damage_and_copies_the_rest(
    shell: Shell, archive: Path, other: Store
) -> None:
    start, _ = records_of(archive)[5]
    change(part_of(archive), start + 9)
    ran = shell("import", archive, other.root)
    assert ran.code == 1
    name = part_of(archive).name
    where = f"record 5 at byte {start:,}, chunk {short_key(KEYS[5])}"
    assert f"damaged: {name}: {where}: " in flat(ran.out)
    assert other.start() == [key for key in KEYS[:SLOTS] if key != KEYS[5]]
    other.stop()
    assert shell("verify", other.root).code == 0
    found = shell.json("verify", archive, code=1)
    assert (found["damaged"], found["damages"][0]["record"]) == (1, 5)


def test_slots_of_an_uncompressed_part_are_whole_pages_in_the_order_of_the_store(
    shell: Shell, store: Store, tmp_path: Path
) -> None:
    shell("export", store.filled().root, tmp_path / "plain")
    assert records_of(tmp_path / "plain") == [(HEADER + at * SLOT, SLOT) for at in range(SLOTS)]
