"""Errors that cross over from the process of a tier, also those of somebody else's tier."""

from __future__ import annotations

import json

import pytest

from kvtier.errors import (
    CacheLockedError,
    ClosedError,
    KvtierError,
    TierError,
    TierUnavailableError,
)
from kvtier.tiers.hosted.frames import Frame, FrameParser, decode_error, encode_error


class LinkDownError(TierUnavailableError):
    """What a plugin may raise."""


class QuotaError(KvtierError):
    """A class of a plugin with the least there can be above it."""


class NamelessError(CacheLockedError):
    """One that has the name of its tier, but none of a holder."""

    def __init__(self) -> None:
        KvtierError.__init__(self, "somebody has it")
        self.tier = "s3"


class BareError(TierError):
    """One that has nothing of what its class should have, but for something of its own."""

    def __init__(self) -> None:
        KvtierError.__init__(self, "no tier")
        self.holder = 7


class LateError(ClosedError):
    """One whose own name is taken."""


LateError.__name__ = "TierError"


@pytest.mark.parametrize("nbytes", [1, 7, 12, 13, 64, 100_000])
def test_frames_arrive_whole_however_their_bytes_are_cut(nbytes: int) -> None:
    sent = [
        Frame({"op": "reset", "call": 1}),
        Frame({"op": "read", "call": 2}, bytes(100)),
        Frame({}, bytes(range(256)) * 9),
        Frame({"op": "touch"}, b"x"),
    ]
    stream = b"".join(frame.encode() for frame in sent)
    parser = FrameParser()
    cuts = [stream[at : at + nbytes] for at in range(0, len(stream), nbytes)]
    assert [frame for cut in cuts for frame in parser.feed(cut)] == sent


@pytest.mark.parametrize(
    ("error", "kind", "attributes"),
    [
        (TierError("s3", "no"), TierError, {"tier": "s3"}),
        (CacheLockedError("s3", "a", "b"), CacheLockedError, {"tier": "s3", "holder": "b"}),
        (LinkDownError("s3", "down"), TierUnavailableError, {"tier": "s3"}),
        (QuotaError("full"), KvtierError, {}),
        (NamelessError(), TierError, {"tier": "s3"}),
        (BareError(), KvtierError, {}),
        (LateError("too late"), ClosedError, {}),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)
def test_an_error_arrives_as_the_nearest_class_of_kvtier_with_its_words(
    error: KvtierError, kind: type[KvtierError], attributes: dict[str, str]
) -> None:
    found = decode_error(json.loads(json.dumps(encode_error(error))))
    assert type(found) is kind
    assert str(found) == str(error)
    assert vars(found) == attributes


def test_a_foreign_error_arrives_as_text() -> None:
    found = decode_error(encode_error(ValueError("seven")))
    assert type(found) is KvtierError
    assert str(found) == "ValueError: seven"
