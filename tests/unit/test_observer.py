"""What the recording and the shadow policies see of requests."""

from __future__ import annotations

from dataclasses import dataclass

from kvtier.connector.observer import Observer
from kvtier.keys import ChunkKey
from kvtier.policies.shadow import ShadowTier
from tests.support.workbench import prefix


@dataclass
class Request:
    req_id: str
    kv_transfer_params: None = None


def test_requests_are_made_of_the_whole_chunks_of_the_counting_group() -> None:
    ends: dict[ChunkKey, int] = {key: 16 * at for at, key in enumerate(prefix(5), start=1)}
    ends |= {key: 32 * at for at, key in enumerate(prefix(2, group=3), start=1)}
    ends[prefix(3, group=3)[2]] = 80  # cut short
    observer = Observer(
        None,
        [("ram", ShadowTier(8, ["lru"]))],
        positions=lambda context: ends,
        chunk_tokens=32,
        counting_group=3,
    )
    for name in ("a", "b"):
        observer.arrived(Request(name), 0.0)
        observer.started([name], 0.0)
        observer.started([name], 1.0)  # anew, after a preemption
    (figures,) = observer.figures()
    assert (figures.asked_chunks, figures.hit_chunks) == (4, 2)
