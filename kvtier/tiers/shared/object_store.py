"""A shared tier in an object store: S3, Google Cloud Storage, Azure, or a directory.

Each object has one value. Objects are read and written whole, many at the same time. A
lifecycle rule or a time to live of the bucket removes old objects; kvtier deletes no object.

**Writes.** A conditional request (If-None-Match) stores an object only if there is none. So no
question precedes it, which would take as long as a small write. A service that does not have
conditional requests is asked before each write. In a directory, the condition needs hard links.

**Time.** Each request ends within ``request_timeout``: an attempt may take 3/4 of that time,
and errors are retried in the first 1/5. After a failed request, a batch starts no further
request. So a batch ends about one timeout after the service stops answering.

**Copies.** obstore sends payload and proof from the caller's buffers. It reads a response into
its own memory, because it cannot fill a caller's buffer. So each chunk that is read is copied
once.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Sequence
from copy import copy
from datetime import timedelta
from typing import TYPE_CHECKING, ClassVar, Final, Literal, Self, TypeVar

from typing_extensions import override

from kvtier.config import ObjectTierConfig, SharedTierConfig
from kvtier.errors import ClosedError, ConfigError, TierUnavailableError
from kvtier.logs import get_logger
from kvtier.os.iopool import UncancellableFuture, wait_uncancelled
from kvtier.os.object_stores import explain, open_store
from kvtier.printable import printable
from kvtier.tiers.shared.base import SharedContext, SharedTier, Value
from kvtier.tiers.shared.gallop import find_leading
from kvtier.tiers.shared.proof import PROOF_NBYTES
from kvtier.types import Outcome

if TYPE_CHECKING:
    from obstore.store import ObjectStore

__all__ = ["ObjectTier"]

logger = get_logger(__name__)

T = TypeVar("T")

_PROBE_S: Final = 4.0
"""Longest wait for the service when the tier opens."""
_PROBE: Final = "kvtier-access-check"
"""Prefix for the request that checks access; no object has this prefix."""
_NO_CREDENTIALS: Final = re.compile(r"/latest/api/token|/computeMetadata/|/metadata/identity/")
"""Paths of cloud metadata services. A client without configured credentials requests
credentials there."""
_CREDENTIALS: Final = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
    "az": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
}
"""Environment variables with the credentials, by scheme of the bucket's URL."""
_DENIED: Final = re.compile(r"status code: 40[13]|Permission denied")
_REFUSED: Final = re.compile(r"status code: 4(?!08|29)\d\d|configured region")
_NO_CONDITIONS: Final = re.compile(
    r"status code: 501|NotImplemented|not (yet )?implemented"
    r"|Unable to rename file: .*\(os error (1|31|95)\)"
)
"""Errors of services without conditional writes (If-None-Match), and of file systems without
hard links: EPERM, EMLINK, EOPNOTSUPP and, by its text, ENOSYS."""
_NO_ROOM: Final = re.compile(r"QuotaExceeded|status code: 507|No space left|Disk quota")


class ObjectTier(SharedTier):
    """Keeps values as objects under one prefix of a bucket.

    ``store`` is obstore's client of the bucket, limited to the prefix.
    """

    Options: ClassVar[type[SharedTierConfig]] = ObjectTierConfig

    def __init__(
        self, options: ObjectTierConfig, context: SharedContext, store: ObjectStore
    ) -> None:
        self._name = options.name
        self._store = store
        self._value_nbytes = context.payload_nbytes + PROOF_NBYTES
        self._is_nbytes_known = context.is_nbytes_known
        self._connections = options.connections
        # Each kind of request has connections of its own: a question that a request waits for
        # is not delayed by megabytes, nor a load by stores.
        self._questions = asyncio.Semaphore(options.connections)
        self._gets = asyncio.Semaphore(options.connections)
        self._puts = asyncio.Semaphore(options.connections)
        self.asks_before_adding = False
        self._closed = False

    @classmethod
    @override
    def open(cls, options: SharedTierConfig, context: SharedContext) -> Self:
        """Return a client of the bucket; see :meth:`SharedTier.open`.

        Raises:
            ConfigError: The package obstore is missing, a setting is wrong, the bucket does not
                exist, or the service refuses the credentials.
        """
        assert isinstance(options, ObjectTierConfig)
        _check_access(options, _open(options, min(options.request_timeout_s, _PROBE_S)))
        return cls(options, context, _open(options, options.request_timeout_s))

    @override
    async def contains(self, keys: Sequence[str]) -> Sequence[bool]:
        self._require_open()
        return await self._ask(keys)

    @override
    async def contains_leading(self, keys: Sequence[str]) -> Sequence[bool]:
        self._require_open()
        return await find_leading(keys, self._ask)

    @override
    async def get(self, keys: Sequence[str], into: Sequence[Value]) -> Sequence[Outcome]:
        self._require_open()
        return await self._move(
            len(keys), self._gets, lambda number: self._get(keys[number], into[number])
        )

    @override
    async def add(self, keys: Sequence[str], values: Sequence[Value]) -> Sequence[Outcome]:
        self._require_open()
        return await self._move(
            len(keys), self._puts, lambda number: self._add(keys[number], values[number])
        )

    @override
    async def put(self, keys: Sequence[str], values: Sequence[Value]) -> Sequence[Outcome]:
        self._require_open()
        return await self._move(
            len(keys), self._puts, lambda number: self._put(keys[number], values[number])
        )

    @override
    async def aclose(self) -> None:
        self._closed = True

    async def _has(self, key: str) -> bool:
        """Return whether the object exists and has the expected size, if that is known."""
        import obstore  # noqa: PLC0415 - an optional extra

        try:
            found = await _whole(obstore.head_async(self._store, key))
        except FileNotFoundError:
            return False
        return not self._is_nbytes_known or found["size"] == self._value_nbytes

    async def _get(self, key: str, into: Value) -> Outcome:
        import obstore  # noqa: PLC0415 - an optional extra

        try:
            found = await _whole(obstore.get_async(self._store, key))
            if found.meta["size"] != self._value_nbytes:
                return Outcome.MISSING
            value = memoryview(await _whole(found.buffer_async())).cast("B")
        except FileNotFoundError:
            return Outcome.MISSING
        if value.nbytes != self._value_nbytes:
            return Outcome.FAILED
        into.payload[:] = value[: into.payload.nbytes]
        into.proof[:] = value[into.payload.nbytes :]
        return Outcome.DONE

    async def _add(self, key: str, value: Value) -> Outcome:
        """Store an object unless there is one of the right size."""
        from obstore.exceptions import AlreadyExistsError  # noqa: PLC0415 - an optional extra

        if self.asks_before_adding:
            return await self._put(key, value)
        try:
            return await self._put(key, value, mode="create")
        except AlreadyExistsError:
            if await self._has(key):
                return Outcome.DONE
        except _errors() as error:
            if not _NO_CONDITIONS.search(str(error)):
                raise
            logger.info("tier %s: no conditional writes: kvtier asks before each", self._name)
            self.asks_before_adding = True
        return await self._put(key, value)

    async def _put(
        self, key: str, value: Value, *, mode: Literal["create", "overwrite"] = "overwrite"
    ) -> Outcome:
        import obstore  # noqa: PLC0415 - an optional extra

        try:
            await _whole(
                obstore.put_async(self._store, key, value, mode=mode, use_multipart=False)
            )
        except _errors() as error:
            if _NO_ROOM.search(str(error)):
                return Outcome.REFUSED
            raise
        return Outcome.DONE

    async def _move(
        self,
        count: int,
        turns: asyncio.Semaphore,
        request: Callable[[int], Awaitable[Outcome]],
    ) -> list[Outcome]:
        """Send ``count`` requests; return their outcomes, FAILED for requests not sent."""
        outcomes = [Outcome.FAILED] * count
        error = await _in_parallel(outcomes, request, turns, at_once=self._connections)
        if error is not None and set(outcomes) == {Outcome.FAILED}:
            raise self._unavailable(error)
        return outcomes

    async def _ask(self, keys: Sequence[str]) -> list[bool]:
        """Return for each key whether its object exists and has the right size."""
        answers = [False] * len(keys)
        error = await _in_parallel(
            answers, lambda at: self._has(keys[at]), self._questions, at_once=self._connections
        )
        if error is not None:
            raise self._unavailable(error)
        return answers

    def _unavailable(self, error: Exception) -> TierUnavailableError:
        unavailable = TierUnavailableError(self._name, explain(error))
        unavailable.__cause__ = error
        return unavailable

    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError(f"tier {self._name} is closed")


async def _in_parallel(
    results: list[T],
    request: Callable[[int], Awaitable[T]],
    turns: asyncio.Semaphore,
    *,
    at_once: int,
) -> Exception | None:
    """Send requests and write their results to ``results``; send no more after an error.

    The first error is returned; None if all requests succeeded.

    Cancellation:
        Deferred until the started requests have ended.
    """
    errors: list[Exception] = []
    numbers = iter(range(len(results)))

    async def work() -> None:
        for number in numbers:
            async with turns:
                if errors:
                    return
                try:
                    results[number] = await request(number)
                except _errors() as error:
                    errors.append(error)

    async with asyncio.TaskGroup() as group:
        for _ in range(min(len(results), at_once)):
            group.create_task(work())
    return errors[0] if errors else None


async def _whole(answer: Awaitable[T]) -> T:
    """Wait until obstore's request has ended, and return its result.

    Until then, the request uses the caller's buffers.

    Raises:
        Exception: A copy of obstore's error. obstore may keep its own error longer, with a
            traceback that would keep the caller's buffers.

    Cancellation:
        Deferred until the request has ended.
    """
    future = asyncio.ensure_future(answer)
    whole = UncancellableFuture[None](loop=future.get_loop())

    def end(ended: asyncio.Future[T]) -> None:
        if not ended.cancelled():
            ended.exception()  # retrieved, so asyncio does not report it as lost
        whole.set_result(None)

    future.add_done_callback(end)
    await wait_uncancelled(whole)
    error = future.exception()
    if error is not None:
        raise copy(error)
    return future.result()


def _errors() -> tuple[type[Exception], ...]:
    """Return the types of errors that obstore raises."""
    from obstore.exceptions import BaseError  # noqa: PLC0415 - an optional extra

    return (BaseError, OSError, ValueError)


def _open(options: ObjectTierConfig, timeout_s: float) -> ObjectStore:
    """Return a client whose requests end within ``timeout_s``. Sends no request."""
    settings = dict(options.settings)
    if options.url.startswith("s3:") and not any(
        key.lower().endswith("unsigned_payload") for key in settings
    ):
        settings["unsigned_payload"] = (
            "true"  # the proof detects damage, with a third of the CPU time
        )
    try:
        return open_store(
            options.url,
            client={
                "timeout": timedelta(seconds=timeout_s * 0.75),
                "connect_timeout": timedelta(seconds=timeout_s * 0.5),
                "allow_http": True,  # only an endpoint that the user names is without TLS
            },
            retry={
                "retry_timeout": timedelta(seconds=timeout_s * 0.2),
                "backoff": {
                    "init_backoff": timedelta(seconds=timeout_s * 0.01),
                    "max_backoff": timedelta(seconds=timeout_s * 0.05),
                },
            },
            settings=settings,
        )
    except ConfigError as error:
        raise ConfigError(f"tier {options.name}: {error}") from error


def _check_access(options: ObjectTierConfig, store: ObjectStore) -> None:
    """Send one request; warn if no answer comes, and raise a ConfigError if it is refused."""
    import obstore  # noqa: PLC0415 - an optional extra

    try:
        next(iter(obstore.list(store, prefix=_PROBE, chunk_size=1)), None)
    except _errors() as error:
        problem = f"tier {options.name}: url {printable(options.url)}"
        if remedy := _remedy(error, options.url):
            raise ConfigError(f"{problem}: {explain(error)}; {remedy}") from error
        logger.warning("%s does not answer now: %s", problem, explain(error))


def _remedy(error: Exception, url: str) -> str:
    """Return a remedy if the service refused a request, else an empty text."""
    text = str(error)
    if _NO_CREDENTIALS.search(text):
        example = _CREDENTIALS[url.partition(":")[0]]
        return f"give the engine credentials in its environment, such as {example}"
    if isinstance(error, FileNotFoundError) or "status code: 404" in text:
        return "create the bucket, or correct the URL"
    if _DENIED.search(text):
        return "give the engine credentials that may list, read and write there"
    if _REFUSED.search(text):
        return "check the URL, the tier's settings and the credentials in the environment"
    return ""
