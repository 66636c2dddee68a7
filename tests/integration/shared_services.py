"""Shared tiers for engines of tests, each with its running service."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import ClassVar, Final

import yaml
from typing_extensions import override

from tests.demo.model import BLOCK_TOKENS, KV_NBYTES_PER_BLOCK
from tests.demo.scenario import Report, Wave
from tests.support.mooncake_service import MooncakeService, kill, running_service
from tests.support.s3_server import BUCKET, MotoServer, S3Server

__all__ = [
    "SERVICES",
    "Service",
    "cached_tokens",
    "reusable_tokens",
    "running",
    "write_config",
]


class Service(ABC):
    """A service that keeps the values of a shared tier.

    Attributes:
        kind: The tier's kind, which is also its name.
    """

    kind: ClassVar[str]

    @abstractmethod
    def section(self) -> Mapping[str, object]:
        """Return the tier's keys in the YAML file besides its kind."""

    @abstractmethod
    def kill(self) -> None:
        """Take the service away."""

    @abstractmethod
    def start(self) -> None:
        """Bring the service back after :meth:`kill`, perhaps without its values."""

    @abstractmethod
    def stalled(self) -> AbstractContextManager[None]:
        """Stop the service: it accepts connections and does not answer."""


class Mooncake(Service):
    """A master and a client that lends memory."""

    kind = "mooncake"

    def __init__(self, service: MooncakeService) -> None:
        self._service = service

    @override
    def section(self) -> Mapping[str, object]:
        return {"master": self._service.address}

    @override
    def kill(self) -> None:
        kill(self._service.master)
        kill(self._service.lender)

    @override
    def start(self) -> None:
        self._service.start()

    @override
    @contextmanager
    def stalled(self) -> Iterator[None]:
        with ExitStack() as stack:
            for process in (self._service.master, self._service.lender):
                stack.enter_context(self._service.stalled(process))
            yield


class Objects(Service):
    """An S3 server."""

    kind = "object"

    def __init__(self, server: S3Server) -> None:
        self._server = server

    @override
    def section(self) -> Mapping[str, object]:
        settings = yaml.safe_load(self._server.settings)
        return {"url": f"s3://{BUCKET}/prefix", "settings": settings}

    @override
    def kill(self) -> None:
        self._server.kill()

    @override
    def start(self) -> None:
        self._server.start()

    @override
    def stalled(self) -> AbstractContextManager[None]:
        return self._server.stopped()


class Directory(Service):
    """A directory, which is renamed to take it away."""

    kind = "shared_dir"

    def __init__(self, path: Path) -> None:
        self.path: Final = path

    @override
    def section(self) -> Mapping[str, object]:
        return {"path": str(self.path), "capacity": "1GiB"}

    @override
    def kill(self) -> None:
        self.path.rename(self.path.with_suffix(".away"))

    @override
    def start(self) -> None:
        self.path.with_suffix(".away").rename(self.path)

    @override
    def stalled(self) -> AbstractContextManager[None]:
        raise TypeError("a directory cannot be stopped")


SERVICES: Final = (Mooncake.kind, Objects.kind, Directory.kind)


@contextmanager
def running(kind: str, directory: Path) -> Iterator[Service]:
    """Run the service of a kind of tier; its files are in ``directory``."""
    if kind == Mooncake.kind:
        with running_service(directory) as service:
            yield Mooncake(service)
    elif kind == Objects.kind:
        with MotoServer() as server:
            yield Objects(server)
    else:
        yield Directory(directory / "shared")


def write_config(
    path: Path,
    service: Service,
    *,
    ram_blocks: int,
    tier: Mapping[str, object] | None = None,
    transfer: Mapping[str, object] | None = None,
) -> Path:
    """Write a configuration of RAM and a shared tier.

    Args:
        path: The file.
        service: The shared tier's service.
        ram_blocks: Capacity of RAM in blocks of the tiny model.
        tier: Other keys of the shared tier.
        transfer: Keys of the section ``transfer``.
    """
    ram = {"kind": "ram", "capacity": f"{ram_blocks * KV_NBYTES_PER_BLOCK}B"}
    # Machines of tests may be so slow that the defaults would give up.
    shared = {"kind": service.kind, "lookup_timeout": "10s", **service.section()}
    settings = {
        "tiers": [ram, {**shared, **(tier or {})}],
        # A model this small computes faster than a busy service answers.
        "placement": {"load_if": "always"},
        "transfer": {"load_timeout": "60s", **(transfer or {})},
    }
    path.write_text(yaml.safe_dump(settings, sort_keys=False))
    return path


def reusable_tokens(wave: Wave) -> int:
    """Return the prompt tokens of ``wave`` whose blocks an earlier engine has stored."""
    return sum(
        (len(prompt.tokens) - 1) // BLOCK_TOKENS * BLOCK_TOKENS for prompt in wave.prompts
    )


def cached_tokens(report: Report) -> int:
    """Return the prompt tokens that an engine did not compute."""
    return sum(answer.cached_tokens for answer in report.answers())
