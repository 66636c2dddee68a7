"""Archives in an object store, here one in memory."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from kvtier.archive.objects import Bucket
from tests.unit.cache_shell import Shell, flat
from tests.unit.stores import KEYS, SLOTS, Store

URL = "s3://bucket/warm"


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A store in memory, which every URL leads to."""
    obstore_store = pytest.importorskip("obstore.store")
    memory = obstore_store.MemoryStore()
    monkeypatch.setattr("kvtier.archive.objects.open_bucket", lambda url: Bucket(memory, url))
    return memory


@pytest.mark.parametrize("form", [[], ["--zstd"]])
def test_a_cache_goes_to_a_bucket_and_back(
    shell: Shell, store: Store, other: Store, bucket: Any, form: list[str]
) -> None:
    assert shell("export", store.filled().root, URL, *form).code == 0
    assert shell("verify", URL).code == 0
    ran = shell("import", URL, other.root)
    assert (ran.code, ran.err) == (0, "")
    assert other.start() == KEYS[:SLOTS]


def test_a_second_export_to_a_bucket_adds_nothing(
    shell: Shell, store: Store, bucket: Any
) -> None:
    shell("export", store.filled().root, URL)
    names = {each["path"] for some in bucket.list() for each in some}
    found = shell.json("export", store.root, URL)
    assert (found["chunks"], found["present"]) == (0, SLOTS)
    assert {each["path"] for some in bucket.list() for each in some} == names


def test_a_damaged_object_is_named(shell: Shell, store: Store, bucket: Any) -> None:
    shell("export", store.filled().root, URL)
    (name,) = (
        each["path"] for some in bucket.list() for each in some if "kvtier" in each["path"]
    )
    data = bytes(bucket.get(name).bytes())
    bucket.put(name, data[:-1])
    ran = shell("verify", URL)
    assert ran.code == 1
    assert f"damaged: {name}: record 15 at byte " in flat(ran.out)


def test_a_bucket_that_cannot_be_reached_is_named(
    shell: Shell, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("obstore")
    for name in ("AWS_ENDPOINT", "AWS_ENDPOINT_URL"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "id")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setattr("kvtier.archive.objects._RETRY", {"max_retries": 0})
    ran = shell("export", store.filled().root, URL)
    assert (ran.code, ran.out) == (2, "")
    assert "s3://bucket/warm: " in ran.err
    assert "check its name, the credentials in the environment and the network" in flat(ran.err)


def test_without_obstore_the_extra_is_named(
    shell: Shell, store: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    monkeypatch.setitem(sys.modules, "obstore.exceptions", None)
    ran = shell("export", store.filled().root, URL)
    remedy = "install it with: pip install 'kvtier[objects]'"
    assert flat(ran.err) == f"error: {URL} needs the package obstore; {remedy}"
    assert list(tmp_path.iterdir()) == [store.root]


def test_without_zstandard_the_extra_is_named(
    shell: Shell, store: Store, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    ran = shell("export", store.filled().root, out, "--zstd")
    remedy = "install it with: pip install 'kvtier[zstd]'"
    assert flat(ran.err) == f"error: zstd needs the package zstandard; {remedy}"
    assert not out.exists()
