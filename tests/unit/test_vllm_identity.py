"""What tells one model from another under the same name."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvtier.config import KvtierConfig, parse_config
from kvtier.errors import ConfigError
from kvtier.memory import RegionGeometry
from kvtier.vllm.engine import EngineFacts
from kvtier.vllm.identity import declared_identity, fingerprint
from kvtier.vllm.refusals import warn_of_restarts
from tests.unit.warned import warnings_in

GEOMETRY = RegionGeometry(slots=4, slot_nbytes=4096, block_nbytes=4096, ranks=1)
LARGE = b" " * (1 << 20)


RAM = "tiers: [{kind: ram, capacity: 16KiB}]\n"


@pytest.fixture
def config() -> KvtierConfig:
    return parse_config(RAM, source="f")


def namespace(model: Path, config: KvtierConfig, *, group_ids: tuple[int, ...] = (0,)) -> str:
    engine = EngineFacts(
        engine_id="engine",
        extra_config={},
        records_events=False,
        model_name=str(model),
        kv_dtype="float32",
        kv_layout="LBHNC",
        canonical_layout=False,
        groups=((16, ("layer.0",)),),
        group_ids=group_ids,
        counting_group=group_ids[0],
        tokens_per_hash=16,
        blocks_per_chunk=1,
        worker_kv_bytes_per_block=4096,
        rank=0,
        world_size=1,
        tp_size=1,
        pp_size=1,
        pcp_size=1,
        dcp_size=1,
        data_parallel_rank=None,
    )
    return fingerprint(engine, config, GEOMETRY).namespace()


def put(path: Path, content: bytes, *, date_s: int = 0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    os.utime(path, (date_s, date_s))


def warned_of(
    caplog: pytest.LogCaptureFixture,
    *,
    keeps: bool = True,
    identity: str = "{}",
    algorithm: str = "sha256",
    model: object = "org/model",
    revision: str | None = "5b0e4e8",
) -> list[str]:
    """Return the warnings at the start of an engine, with a store or in memory only."""
    nvme = "- {kind: nvme, capacity: 1GiB, path: /kv}\n" if keeps else ""
    ram = "tiers:\n- {kind: ram, capacity: 1MiB}\n"
    config = parse_config(f"{ram}{nvme}identity: {identity}\n", source="a.yaml")
    vllm = SimpleNamespace(
        cache_config=SimpleNamespace(prefix_caching_hash_algo=algorithm),
        model_config=SimpleNamespace(model=str(model), revision=revision),
    )
    warn_of_restarts(vllm, config)
    return warnings_in(caplog)


@pytest.mark.parametrize(
    ("algorithm", "warned"),
    [("sha256", False), ("sha256_cbor", False), ("xxhash", True), ("xxhash_cbor", True)],
)
@pytest.mark.parametrize("keeps", [True, False], ids=["with a store", "in memory only"])
def test_hashes_that_may_collide_are_warned_of_where_a_store_keeps_them(
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    algorithm: str,
    warned: bool,
    keeps: bool,
) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    found = warned_of(caplog, keeps=keeps, algorithm=algorithm)
    assert len(found) == (warned and keeps)
    assert all(f"--prefix-caching-hash-algo {algorithm} is not" in text for text in found)
    assert all(text.endswith("use sha256 or sha256_cbor") for text in found)


def test_hashes_that_change_with_each_start_are_warned_of(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    _, found = warned_of(caplog, algorithm="xxhash")
    assert "nothing stored is found after a restart: set PYTHONHASHSEED" in found


class ResolvedRevision(str):
    """What vLLM makes of a revision that was not given: its branch, now at a commit."""

    __slots__ = ()
    initial = None
    resolved = "607a30d783dfa663caf39e06633721c8d4cfcd7e"


@pytest.mark.parametrize("revision", [None, ResolvedRevision("main")])
def test_a_hubs_model_without_a_revision_is_warned_of_where_a_store_keeps_its_chunks(
    caplog: pytest.LogCaptureFixture, revision: str | None
) -> None:
    assert not warned_of(caplog, revision=revision, keeps=False)
    (found,) = warned_of(caplog, revision=revision)
    assert "org/model has no revision" in found
    assert found.endswith("--revision COMMIT, or set identity.model_revision")


def test_a_model_that_is_pinned_named_or_local_is_not_warned_of(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    assert not warned_of(caplog)
    assert not warned_of(caplog, revision=None, identity="{model_revision: 5b0e4e8}")
    assert not warned_of(caplog, revision=None, identity="{name: ours}")
    assert not warned_of(caplog, revision=None, model=tmp_path)


def test_groups_that_have_other_numbers_in_keys_are_others(
    config: KvtierConfig, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    names = {namespace(model, config, group_ids=ids) for ids in ((0,), (1,), (2,))}
    assert len(names) == 3


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("config.json", b"{}", b"[]"),
        ("params.json", b"{}", b"[]"),
        ("hf_quant_config.json", b"{}", b"[]"),
        ("tokenizer.json", LARGE, LARGE[1:] + b"x"),
        ("model.safetensors", b"1", b"22"),
        ("consolidated.00.pth", b"1", b"22"),
        ("parts/model.safetensors", b"1", b"22"),
    ],
)
def test_a_file_that_changes_a_local_model_makes_it_another_one(
    config: KvtierConfig, tmp_path: Path, name: str, before: bytes, after: bytes
) -> None:
    model = tmp_path / "model"
    put(model / name, before)
    first = namespace(model, config)
    assert namespace(model, config) == first
    put(model / name, after)
    assert namespace(model, config) != first
    put(model / name, before)
    assert namespace(model, config) == first


def test_a_model_that_is_one_file_is_known_by_its_size_and_date(
    config: KvtierConfig, tmp_path: Path
) -> None:
    model = tmp_path / "model.gguf"
    names = []
    for content, date_s in [(b"1", 0), (b"22", 0), (b"22", 1), (b"1", 0)]:
        put(model, content, date_s=date_s)
        names.append(namespace(model, config))
    assert len(set(names)) == 3
    assert names[0] == names[-1]


@pytest.mark.parametrize("name", ["model.safetensors", "parts/pytorch_model.bin", "model.gguf"])
@pytest.mark.parametrize("at", [0, 8 << 20, -1], ids=["head", "middle", "tail"])
def test_weights_of_the_same_size_and_date_are_distinguished(
    config: KvtierConfig, tmp_path: Path, name: str, at: int
) -> None:
    content = bytearray(16 << 20)
    model = tmp_path / "model"
    put(model / name, bytes(content))
    first = namespace(model, config)
    content[at] = 1
    put(model / name, bytes(content))
    assert namespace(model, config) != first


@pytest.mark.parametrize("files", [1, 16, 200])
def test_a_tuned_part_of_each_layer_is_noticed_in_weights_too_large_to_read(
    config: KvtierConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: int
) -> None:
    """A sixteenth, wherever it lies in the layers."""
    layer_nbytes, parts = 128 << 20, 16
    model = tmp_path / "model"
    for number in range(files):
        path = model / f"{number}.safetensors"
        put(path, b"")
        os.truncate(path, 4 << 30)  # takes no room
    names = []
    for tuned in range(parts):

        def pread(_: int, __: int, start: int, tuned: int = tuned) -> bytes:
            return b"%d" % (start % layer_nbytes * parts // layer_nbytes == tuned)

        monkeypatch.setattr(os, "pread", pread)
        names.append(namespace(model, config))
    assert len(set(names)) == parts


def test_few_blocks_are_read_of_weights_however_large(
    config: KvtierConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    pread = os.pread

    def counted(descriptor: int, nbytes: int, start: int) -> bytes:
        read.append(nbytes)
        return pread(descriptor, nbytes, start)

    monkeypatch.setattr(os, "pread", counted)
    for files in (1, 16, 200):
        model = tmp_path / str(files)
        for number in range(files):
            path = model / f"{number}.safetensors"
            put(path, b"")
            os.truncate(path, 4 << 30)
        read.clear()
        first = namespace(model, config)
        assert sum(read) <= max(256, 3 * files) * (64 << 10)
        assert namespace(model, config) == first


def test_weights_that_cannot_be_read_are_known_by_size_and_date(
    config: KvtierConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "model"
    put(model / "original" / "consolidated.00.pth", b"1")
    readable = namespace(model, config)

    def refuse(*_: object) -> int:
        raise PermissionError(13, "refused")

    monkeypatch.setattr("kvtier.vllm.identity.os.open", refuse)
    first = namespace(model, config)
    assert first == namespace(model, config) != readable
    put(model / "original" / "consolidated.00.pth", b"1", date_s=1)
    assert namespace(model, config) != first


def snapshot(cache: Path, content: bytes, *, sha256: str = "0a" * 32, date_s: int = 0) -> Path:
    """Return a model in a Hugging Face cache."""
    put(cache / "blobs" / sha256, content, date_s=date_s)
    link = cache / "snapshots" / "5b0e4e8" / "model.safetensors"
    link.parent.mkdir(parents=True, exist_ok=True)
    link.unlink(missing_ok=True)
    link.symlink_to(f"../../blobs/{sha256}")
    return link.parent


def test_a_copy_of_a_hugging_face_cache_keeps_the_identity_whatever_its_dates(
    config: KvtierConfig, tmp_path: Path
) -> None:
    first = snapshot(tmp_path / "one", LARGE, date_s=1)
    copied = snapshot(tmp_path / "two", LARGE, date_s=2)
    assert namespace(first, config) == namespace(copied, config)


def test_weights_in_a_hugging_face_cache_are_known_by_their_sha256_and_samples(
    config: KvtierConfig, tmp_path: Path
) -> None:
    """Two files may differ between all samples, and a tool may write into a blob."""
    first = snapshot(tmp_path / "one", LARGE)
    other = snapshot(tmp_path / "two", LARGE, sha256="0b" * 32)
    written_to = snapshot(tmp_path / "three", LARGE[1:] + b"x")
    assert len({namespace(model, config) for model in (first, other, written_to)}) == 3


@pytest.mark.parametrize("sha256", ["0a" * 20, "model.bin"])
def test_the_date_counts_of_blobs_that_have_another_name(
    config: KvtierConfig, tmp_path: Path, sha256: str
) -> None:
    first = snapshot(tmp_path / "one", LARGE, sha256=sha256, date_s=1)
    touched = snapshot(tmp_path / "two", LARGE, sha256=sha256, date_s=2)
    assert namespace(first, config) != namespace(touched, config)


def test_settings_that_were_only_touched_and_what_is_no_part_of_the_model_do_not_count(
    config: KvtierConfig, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    put(model / "config.json", b"{}")
    first = namespace(model, config)
    put(model / "config.json", b"{}", date_s=1)
    put(model / "README.md", b"new")
    put(model / "logs" / "run.json", b"new")
    (model / "cache.bin").mkdir()
    assert namespace(model, config) == first


@pytest.mark.parametrize(
    "name", ["model/weights.safetensors", "model/parts/w.bin", "model.gguf"]
)
def test_a_local_model_is_the_same_however_and_wherever_it_is_spelled(
    config: KvtierConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    places = [tmp_path / "warm", tmp_path / "served"]
    for place in places:
        put(place / name, b"weights")
    model = name.partition("/")[0]
    renamed = places[1] / f"renamed{Path(model).suffix}"
    renamed.symlink_to(places[1] / model)
    monkeypatch.chdir(places[0])
    spellings = [Path(model), places[0] / model, places[1] / model, renamed]
    assert len({namespace(each, config) for each in spellings}) == 1


def test_without_weights_only_the_place_tells_one_local_model_from_another(
    config: KvtierConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place in ("a", "b"):
        put(tmp_path / place / "config.json", b"{}")
        put(tmp_path / place / "model.tensors", place.encode())
    monkeypatch.chdir(tmp_path)
    assert namespace(Path("a"), config) == namespace(tmp_path / "a", config)
    assert namespace(tmp_path / "a", config) != namespace(tmp_path / "b", config)


def test_a_name_in_the_file_stands_for_what_the_engine_was_given(tmp_path: Path) -> None:
    named = parse_config(f"{RAM}identity: {{name: ours}}\n", source="f")
    assert namespace(Path("org/model"), named) == namespace(Path("mirror/model"), named)
    put(tmp_path / "model" / "config.json", b"{}")
    assert namespace(tmp_path / "model", named) != namespace(Path("org/model"), named), (
        "content"
    )


@pytest.mark.parametrize("letters", [300, 5000])
def test_a_model_whose_name_is_too_long_is_refused(config: KvtierConfig, letters: int) -> None:
    problem = "model a+: File name too long; run this as the user that runs the engine"
    with pytest.raises(ConfigError, match=problem):
        declared_identity(config, "a" * letters)


def test_a_model_that_may_not_be_looked_at_is_refused(
    config: KvtierConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "is_file", refuse)
    problem = f"model {tmp_path}: Permission denied; run this as the user"
    with pytest.raises(ConfigError, match=problem):
        declared_identity(config, str(tmp_path))


def test_weights_that_vanish_while_they_are_listed_are_named(
    config: KvtierConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = tmp_path / "model.safetensors"
    weights.touch()
    is_file = Path.is_file

    def vanish(path: Path) -> bool:
        found = is_file(path)
        weights.unlink(missing_ok=True)
        return found

    monkeypatch.setattr(Path, "is_file", lambda path: path == weights and vanish(path))
    with pytest.raises(ConfigError, match=f"model {weights}: No such file or directory; run"):
        declared_identity(config, str(tmp_path))


def test_a_hubs_name_is_no_file(config: KvtierConfig, tmp_path: Path) -> None:
    assert namespace(tmp_path / "a", config) != namespace(tmp_path / "b", config)
