"""The object store tier when the service refuses, hangs, dies or has foreign objects."""

from __future__ import annotations

import asyncio
import errno
import mmap
import os
import re
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import obstore
import pytest
from obstore.exceptions import GenericError
from typing_extensions import override

from kvtier.config import ObjectTierConfig, parse_tier
from kvtier.errors import ConfigError, TierUnavailableError
from kvtier.os.iopool import IoPool
from kvtier.testing.shared_tier_harness import SharedTierHarness
from kvtier.testing.tier_harness import Arena
from kvtier.tiers.shared import SharedContext, with_proof_buffers
from kvtier.tiers.shared.object_store import ObjectTier
from kvtier.types import Outcome
from tests.support.s3_server import BUCKET, MotoServer, S3Server

MISSING = Outcome.MISSING
PAYLOAD_NBYTES = 8192
UNREACHABLE = "http://127.0.0.1:9"


def options_of(
    settings: str = "{}", more: str = "", url: str = f"s3://{BUCKET}/x"
) -> ObjectTierConfig:
    text = f"kind: object\nurl: {url}\nsettings: {settings}\n{more}\n"
    return parse_tier(text, ObjectTierConfig, source="a test")


@pytest.fixture
def pool() -> Iterator[IoPool]:
    pool = IoPool(2, name="kvtier-test")
    yield pool
    assert pool.close(timeout_s=10)


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with MotoServer() as server:
        yield server


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena(16 << 20)
    yield arena
    arena.close()


@asynccontextmanager
async def clients(
    options: ObjectTierConfig, pool: IoPool, arena: Arena
) -> AsyncIterator[SharedTierHarness]:
    def open_client(payload_nbytes: int) -> ObjectTier:
        return ObjectTier.open(options, SharedContext(payload_nbytes, pool))

    harness = SharedTierHarness(open_client, pool, arena, payload_nbytes=PAYLOAD_NBYTES)
    await harness.open()
    yield harness
    await harness.aclose()


def open_tier(options: ObjectTierConfig, pool: IoPool) -> ObjectTier:
    return ObjectTier.open(options, SharedContext(PAYLOAD_NBYTES, pool))


@pytest.fixture
def no_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "SESSION_TOKEN", "PROFILE"):
        monkeypatch.delenv(f"AWS_{name}", raising=False)


class Stub:
    """An HTTP server with fixed answers.

    Args:
        listing: Answer to the listing that a tier asks for when it opens.
        others: Answer to all other requests.
        together: Number of other requests that must be in progress before one is answered.

    Attributes:
        at_once: Largest number of other requests in progress.
    """

    def __init__(self, listing: str, others: str = "", *, together: int = 1) -> None:
        self.at_once = 0
        self._listing = listing
        self._others = others
        self._together = together
        self._running = 0
        self._full = asyncio.Event()

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        """Serve; yield the settings of a tier."""
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()
        yield f"{{endpoint: 'http://{host}:{port}', access_key_id: a, secret_access_key: b}}"
        server.close()
        await server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        if size := re.search(r"content-length: (\d+)", head, re.IGNORECASE):
            await reader.readexactly(int(size[1]))
        listing = "list-type=2" in head
        writer.write((self._listing if listing else await self._answer()).encode())
        await writer.drain()
        writer.close()

    async def _answer(self) -> str:
        self._running += 1
        self.at_once = max(self.at_once, self._running)
        if self._running == self._together:
            self._full.set()
        await self._full.wait()
        self._running -= 1
        return self._others


def answer(status: str, body: str = "") -> str:
    size = len(body)
    return f"HTTP/1.1 {status}\r\nConnection: close\r\nContent-Length: {size}\r\n\r\n{body}"


def test_a_missing_bucket_is_named_at_the_start(server: S3Server, pool: IoPool) -> None:
    options = options_of(server.settings, url="s3://another-bucket/x")
    with pytest.raises(ConfigError) as caught:
        open_tier(options, pool)
    assert re.fullmatch(
        r"tier object: url s3://another-bucket/x: .*404.*NoSuchBucket.*; "
        "create the bucket, or correct the URL",
        str(caught.value),
    )


@pytest.mark.parametrize("code", ["AccessDenied", "InvalidAccessKeyId"])
async def test_refused_credentials_are_an_error_at_the_start(pool: IoPool, code: str) -> None:
    body = f'<?xml version="1.0"?>\n<Error><Code>{code}</Code><Message>No.</Message></Error>'
    async with Stub(answer("403 Forbidden", body)).serving() as settings:
        options = options_of(settings)
        with pytest.raises(ConfigError) as caught:
            await pool.run(lambda: open_tier(options, pool), priority=0)
    remedy = "give the engine credentials that may list, read and write there"
    assert str(caught.value).startswith(f"tier object: url s3://{BUCKET}/x: ")
    assert str(caught.value).endswith(f"{code}: No; {remedy}")
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("no_credentials")
def test_missing_credentials_are_an_error_at_the_start(pool: IoPool) -> None:
    options = options_of(f"{{endpoint: '{UNREACHABLE}', metadata_endpoint: '{UNREACHABLE}'}}")
    remedy = "in its environment, such as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY$"
    with pytest.raises(ConfigError, match=f"give the engine credentials {remedy}"):
        open_tier(options, pool)


def test_an_unknown_setting_is_named(pool: IoPool) -> None:
    with pytest.raises(
        ConfigError, match=r"'endpointt' is not valid.*; check the URL, the set"
    ):
        open_tier(options_of("{endpointt: x}"), pool)


def test_a_directory_has_no_settings() -> None:
    with pytest.raises(ConfigError, match=r"settings.*a URL file://, which has none; leave"):
        options_of("{region: x}", url="file:///srv/kv")


def test_without_obstore_the_extra_is_named(
    pool: IoPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    with pytest.raises(ConfigError, match=r"pip install 'kvtier\[objects\]'$"):
        open_tier(options_of(), pool)


async def test_a_tier_opens_although_its_service_does_not_answer(
    pool: IoPool, arena: Arena, caplog: pytest.LogCaptureFixture
) -> None:
    settings = f"{{endpoint: '{UNREACHABLE}', access_key_id: a, secret_access_key: b}}"
    async with clients(options_of(settings, "request_timeout: 1s"), pool, arena) as harness:
        keys = harness.keys(range(3))
        with pytest.raises(TierUnavailableError, match=r"tier object: .*error sending request"):
            await harness.get(keys)
        with pytest.raises(TierUnavailableError):
            await harness.put(keys)
        with pytest.raises(TierUnavailableError):
            await harness.tier.contains(keys)
        with pytest.raises(TierUnavailableError):
            await harness.tier.contains_leading(keys)
    lines = [each.getMessage() for each in caplog.records if "kvtier" in each.name]
    assert len(lines) == 2, "one for each client"
    assert lines[0].startswith(f"tier object: url s3://{BUCKET}/x does not answer now: ")


async def test_calls_end_in_time_while_the_service_hangs(
    server: S3Server, pool: IoPool, arena: Arena
) -> None:
    options = options_of(server.settings, "request_timeout: 2s\nconnections: 2")
    async with clients(options, pool, arena) as harness:
        keys = harness.keys(range(40))
        await harness.put(keys[:3])
        with server.stopped():
            for call in (
                harness.tier.contains,
                harness.tier.contains_leading,
                harness.get,
                harness.put,
            ):
                start_s = time.monotonic()
                with pytest.raises(TierUnavailableError):
                    await call(keys)
                # 20 rounds of two requests would take 30 s.
                assert time.monotonic() - start_s < 10
        assert await harness.get(keys[:3]) == [0, 0, 0]


async def test_a_hanging_service_does_not_delay_opening(server: S3Server, pool: IoPool) -> None:
    options = options_of(server.settings)
    with server.stopped():
        start_s = time.monotonic()
        tier = await pool.run(lambda: open_tier(options, pool), priority=0)
        assert time.monotonic() - start_s < 10
    await tier.aclose()


async def test_a_cancelled_put_waits_for_its_requests(
    server: S3Server, pool: IoPool, arena: Arena
) -> None:
    options = options_of(server.settings, "request_timeout: 2s\nconnections: 2")
    async with clients(options, pool, arena) as harness:
        with server.stopped():
            putting = asyncio.ensure_future(harness.put(harness.keys(range(9))))
            for _ in range(5):
                await asyncio.sleep(0)
            putting.cancel()
            for _ in range(5):
                await asyncio.sleep(0)
            assert not putting.done()
            await asyncio.wait([putting])
        assert putting.cancelled()


async def test_a_service_that_was_killed_is_used_again_when_it_is_back(
    server: S3Server, pool: IoPool, arena: Arena
) -> None:
    options = options_of(server.settings, "request_timeout: 10s")
    async with clients(options, pool, arena) as harness:
        keys = harness.keys(range(3))
        await harness.put(keys)
        server.kill()
        try:
            with pytest.raises(TierUnavailableError):
                await harness.get(keys)
        finally:
            server.start()
        assert await harness.get(keys) == [MISSING] * 3
        await harness.put(keys)
        assert await harness.get(keys) == [0, 0, 0]


async def test_errors_that_obstore_keeps_do_not_keep_the_buffers(
    server: S3Server, pool: IoPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[asyncio.Future[Any]] = []

    def keep(*args: Any) -> Any:
        kept.append(asyncio.ensure_future(get_async(*args)))
        return kept[-1]

    get_async = obstore.get_async
    monkeypatch.setattr(obstore, "get_async", keep)
    tier = await pool.run(lambda: open_tier(options_of(server.settings), pool), priority=0)
    memory = mmap.mmap(-1, PAYLOAD_NBYTES)
    assert await tier.get(["absent"], with_proof_buffers([memoryview(memory)])) == [MISSING]
    assert isinstance(kept[0].exception(), FileNotFoundError)
    memory.close()  # fails while there is a view of it
    await tier.aclose()


@pytest.mark.parametrize("nbytes", [0, 1, PAYLOAD_NBYTES, 1 << 20])
async def test_an_object_of_another_size_is_missing_and_can_be_replaced(
    server: S3Server, pool: IoPool, arena: Arena, nbytes: int
) -> None:
    async with clients(options_of(server.settings), pool, arena) as harness:
        keys = harness.keys(range(3))
        await harness.put(keys)
        await obstore.put_async(server.store("x"), keys[1], bytes(nbytes))
        assert await harness.get(keys) == [0, MISSING, 0]
        assert list(await harness.tier.contains(keys)) == [True, False, True]
        await harness.put(keys[1:2])
        assert await harness.get(keys) == [0, 0, 0]


async def test_an_object_of_another_engine_stays(
    server: S3Server, pool: IoPool, arena: Arena
) -> None:
    async with clients(options_of(server.settings), pool, arena) as harness:
        keys = harness.keys(range(3))
        await harness.put(keys[:1], version=1)
        await obstore.put_async(server.store("x"), keys[1], b"of another size")
        values = harness.values(keys, version=2)
        assert not harness.tier.asks_before_adding
        assert list(await harness.tier.add(keys, values)) == [Outcome.DONE] * 3
        assert await harness.get(keys) == [1, 2, 2]


class WithoutConditions(Stub):
    """An HTTP server that stores all objects, and knows no conditional requests.

    Attributes:
        writes: For each write, whether it had a condition.
    """

    def __init__(self, listing: str) -> None:
        super().__init__(listing)
        self.writes: list[bool] = []

    @override
    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        if size := re.search(r"content-length: (\d+)", head):
            await reader.readexactly(int(size[1]))
        text = self._listing
        if head.startswith("put "):
            has_condition = "if-none-match" in head
            self.writes.append(has_condition)
            text = answer("501 Not Implemented" if has_condition else "200 OK")
            text = text.replace("\r\n", '\r\nETag: "a"\r\n', 1)
        writer.write(text.encode())
        await writer.drain()
        writer.close()


async def test_a_service_without_conditional_requests_is_asked_from_then_on(
    pool: IoPool, arena: Arena
) -> None:
    empty = '<?xml version="1.0"?><ListBucketResult><KeyCount>0</KeyCount></ListBucketResult>'
    service = WithoutConditions(answer("200 OK", empty))
    async with service.serving() as settings:
        options = options_of(settings, "connections: 1\nrequest_timeout: 2s")
        async with clients(options, pool, arena) as harness:
            keys = harness.keys(range(3))
            values = harness.values(keys)
            assert list(await harness.tier.add(keys, values)) == [Outcome.DONE] * 3
            assert harness.tier.asks_before_adding
    assert service.writes[-3:] == [False] * 3
    assert set(service.writes[:-3]) == {True}


@pytest.mark.parametrize(
    "code", [errno.EPERM, errno.EMLINK, errno.ENOSYS, errno.EOPNOTSUPP], ids=errno.errorcode.get
)
async def test_a_directory_without_hard_links_is_asked_from_then_on(
    pool: IoPool, arena: Arena, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    put = obstore.put_async

    async def put_without_links(*args: Any, mode: str, **options: Any) -> object:
        if mode == "create":  # obstore links a temporary file to the object's name
            raise GenericError(
                "Generic LocalFileSystem error: Unable to rename file: "
                f"{os.strerror(code)} (os error {code})\n\nDebug source:\n..."
            )
        return await put(*args, **options)

    monkeypatch.setattr(obstore, "put_async", put_without_links)
    async with clients(options_of(url=f"file://{tmp_path}"), pool, arena) as harness:
        keys = harness.keys(range(3))
        values = harness.values(keys)
        assert list(await harness.tier.add(keys, values)) == [Outcome.DONE] * 3
        assert harness.tier.asks_before_adding
        assert await harness.get(keys) == [0, 0, 0]


@pytest.mark.parametrize("method", ["contains", "get", "put"])
async def test_no_more_requests_than_connections_are_in_flight(
    pool: IoPool, arena: Arena, method: str
) -> None:
    empty = '<?xml version="1.0"?><ListBucketResult><KeyCount>0</KeyCount></ListBucketResult>'
    stub = Stub(answer("200 OK", empty), answer("404 Not Found"), together=3)
    async with stub.serving() as settings:
        options = options_of(settings, "connections: 3\nrequest_timeout: 60s")
        async with clients(options, pool, arena) as harness:
            keys = harness.keys(range(9))
            if method == "contains":
                assert list(await harness.tier.contains(keys)) == [False] * 9
            elif method == "get":
                assert await harness.get(keys) == [MISSING] * 9
            else:
                with pytest.raises(TierUnavailableError):
                    await harness.put(keys)
    assert stub.at_once == 3
