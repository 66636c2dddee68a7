"""The models of shared tiers: tiers whose chunks many engines store and load."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, Final, Literal

from pydantic import Field, ValidationInfo, field_validator
from typing_extensions import override

from kvtier.config._fields import RANK_PLACEHOLDER, Duration, FilePath, Label, Size, refusal
from kvtier.config._tiers import LocalDirectory, TierConfig

__all__ = [
    "MooncakeTierConfig",
    "ObjectTierConfig",
    "SharedDirTierConfig",
    "SharedTierConfig",
]

_ADDRESS: Final = r"^\[?[\w.:-]+\]?:\d{1,5}$"
_SCHEMES: Final = ("s3", "gs", "az", "file")


class SharedTierConfig(TierConfig):
    """A tier that many engines share. The ``Options`` of custom shared tiers derive from it."""

    is_shared: ClassVar[bool] = True

    capacity_bytes: Size = Field(
        default=1 << 40,
        validation_alias="capacity",
        serialization_alias="capacity",
        json_schema_extra={"examples": ["10TiB"]},
    )
    """Expected capacity of the service in bytes, for reports and simulations. The service
    evicts by rules of its own."""
    eviction: str = "lru"
    """Policy that chooses which of the `known_chunks` this engine forgets first."""
    known_chunks: int = Field(default=1 << 17, ge=1, le=1 << 24)
    """Number of the tier's chunks that this engine remembers. Each takes about 250 bytes."""
    lookup_timeout_s: Duration = Field(
        default=0.05, validation_alias="lookup_timeout", serialization_alias="lookup_timeout"
    )
    """Longest time that a request waits for the tier to look up the request's chunks."""
    keep_after_reset: bool = False
    """Whether the engine still shares chunks after a cache reset. Leave this off if weights are
    updated while the engine runs."""
    own_process: bool = True
    """Read, write and compute checksums in a separate process, to keep the engine fast."""

    @override
    def has_own_process(self) -> bool:
        return self.own_process


class MooncakeTierConfig(SharedTierConfig):
    """A Mooncake Store: the pooled memory of many machines, managed by a master."""

    kind: str = Field(default="mooncake", pattern="^mooncake$")
    """A Mooncake Store."""
    master: Label = Field(pattern=_ADDRESS)
    """Address of the master, such as `10.0.0.1:50051`."""
    metadata: Label = "P2PHANDSHAKE"
    """Address of the metadata server, or `P2PHANDSHAKE` for none."""
    host: Label | None = None
    """Name or address by which other clients reach this machine; detected if not given."""
    protocol: Literal["tcp", "rdma"] = "tcp"
    """Transport between clients."""
    devices: Label = ""
    """RDMA devices, separated by commas."""
    segment_bytes: Size | None = Field(
        default=None, validation_alias="segment", serialization_alias="segment"
    )
    """Amount of this machine's memory that the engine adds to the pool; by default none."""
    replicas: int = Field(default=1, ge=1, le=16)
    """Number of copies of each chunk in the pool."""
    request_timeout_s: Duration = Field(
        default=2.0, validation_alias="request_timeout", serialization_alias="request_timeout"
    )
    """Longest wait for the master's answer, and for each 64 KiB of a transfer."""


class ObjectTierConfig(SharedTierConfig):
    """A bucket of an object store, with one object for each chunk."""

    kind: str = Field(default="object", pattern="^object$")
    """An object store."""
    url: Label
    """`s3://bucket/prefix`, `gs://bucket/prefix`, `az://container/prefix`, or `file:///path`.
    Credentials come from the environment, as for the provider's own tools."""
    settings: Mapping[Label, Label] = Field(default_factory=dict)
    """Settings of the store's client, such as `endpoint` or `region`."""
    lookup_timeout_s: Duration = Field(
        default=0.5, validation_alias="lookup_timeout", serialization_alias="lookup_timeout"
    )
    """Longest time that a request waits for the tier to look up the request's chunks. A lookup
    takes a few round trips to the service."""
    connections: int = Field(default=32, ge=1, le=1024)
    """Largest number of reads in flight. The same limit holds for writes, and for questions."""
    request_timeout_s: Duration = Field(
        default=10.0, validation_alias="request_timeout", serialization_alias="request_timeout"
    )
    """Longest time of a request, with retries. An attempt takes at most 3/4 of this time."""

    @field_validator("url")
    @classmethod
    def _url_has_a_scheme(cls, url: str) -> str:
        scheme, colon, rest = url.partition("://")
        if not colon or scheme not in _SCHEMES or not rest.strip("/"):
            raise refusal("not the URL of a bucket", "write one such as s3://bucket/prefix")
        if re.search(r"[{}]", url):
            raise refusal("braces in a URL", "all engines share one prefix: leave them out")
        return url

    @field_validator("settings")
    @classmethod
    def _directory_has_no_settings(
        cls, settings: Mapping[str, str], info: ValidationInfo
    ) -> Mapping[str, str]:
        if settings and str(info.data.get("url", "")).startswith("file:"):
            raise refusal("settings for a URL file://, which has none", "leave them out")
        return settings


class SharedDirTierConfig(SharedTierConfig):
    """A directory with one file for each chunk, shared by engines on one or more machines."""

    kind: str = Field(default="shared_dir", pattern="^shared_dir$")
    """A directory that many engines share."""
    capacity_bytes: Size = Field(
        validation_alias="capacity",
        serialization_alias="capacity",
        json_schema_extra={"examples": ["10TiB"]},
    )
    """Largest total size of the files that all engines together keep in the directory."""
    lookup_timeout_s: Duration = Field(
        default=0.2, validation_alias="lookup_timeout", serialization_alias="lookup_timeout"
    )
    """Longest time that a request waits for the tier to look up the request's chunks."""
    path: FilePath
    """Absolute path of the directory. kvtier creates the directory if the parent exists."""
    direct_io: Literal["auto", "require", "off"] = "auto"
    """Bypass the page cache: `auto` (if possible), `require` (else an error), `off`."""

    @field_validator("path")
    @classmethod
    def _path_is_the_same_for_all_ranks(cls, path: Path) -> Path:
        if RANK_PLACEHOLDER in str(path):
            problem = f"{RANK_PLACEHOLDER} in the path of a shared tier"
            raise refusal(problem, "all engines share one directory: leave it out")
        return path

    @override
    def local_directory(self) -> LocalDirectory | None:
        return None  # other engines use it too: its room and its holders are not ours
