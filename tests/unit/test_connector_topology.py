"""Which heads each rank keeps, and how the ranks of two engines of one model relate."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvtier.connector.topology import BlockLayout, EngineShape, KVTopology

from kvtier.errors import UnsupportedError
from kvtier.memory.slot_layout import STRIPES, RankShare, shard_of, share_pages
from tests.unit.kv_pages import Model


def topology(
    ranks: int,
    rank: int = 0,
    *,
    heads: int = 8,
    other: EngineShape | None = None,
    is_mla: bool = False,
    layout: BlockLayout = BlockLayout.HND,
) -> KVTopology:
    engines = {"here": EngineShape(ranks, 16, layout)}
    if other is not None:
        engines["there"] = other
    return KVTopology("here", rank, heads, is_mla, engines)


def test_heads_are_split_evenly_over_the_ranks() -> None:
    assert [list(topology(4).heads("here", rank)) for rank in range(4)] == [
        [0, 1],
        [2, 3],
        [4, 5],
        [6, 7],
    ]
    assert not topology(4).is_replicated("here")


def test_more_ranks_than_heads_keep_each_head_several_times() -> None:
    view = topology(4, heads=2)
    assert [list(view.heads("here", rank)) for rank in range(4)] == [[0], [0], [1], [1]]
    assert view.is_replicated("here")
    assert view.alike("here") == 2


def test_latent_attention_is_kept_whole_by_every_rank() -> None:
    view = topology(4, heads=1, is_mla=True)
    assert [list(view.heads("here", rank)) for rank in range(4)] == [[0]] * 4
    assert view.alike("here") == 4
    assert topology(4, 3, heads=1, is_mla=True).share() == RankShare(tuple(range(8)), 4, 3)
    three = topology(3, 1, heads=1, is_mla=True)
    assert three.share() == RankShare(tuple(range(8)), 3, 1)


@pytest.mark.parametrize(("heads", "ranks"), [(2, 1), (2, 2), (8, 4), (8, 8), (2, 4), (1, 8)])
def test_a_share_is_what_the_engines_own_description_of_its_pages_gives(
    heads: int, ranks: int
) -> None:
    model = Model(heads=heads)
    for rank in range(ranks):
        expected = share_pages([model.mapping(rank, ranks)])
        assert topology(ranks, rank, heads=heads).share() == expected


def test_ranks_that_do_not_split_the_heads_into_eighths_have_no_share() -> None:
    assert topology(3, 1, heads=6).shard() == shard_of(1)
    with pytest.raises(UnsupportedError, match=r"6 KV heads over 3 ranks.*1, 2, 4 or 8 ranks"):
        topology(3, 1, heads=6).share()
    with pytest.raises(UnsupportedError, match="not in whole 8ths"):
        topology(16, 1, heads=16).share()


def test_tokens_outermost_have_a_share_only_where_one_rank_has_all_heads() -> None:
    assert topology(1, layout=BlockLayout.NHD).share().stripes == tuple(range(STRIPES))
    with pytest.raises(UnsupportedError, match=r"\(NHD\).*use the layout HND"):
        topology(2, layout=BlockLayout.NHD).share()


@pytest.mark.parametrize(
    ("here", "there", "ratio"), [(4, 2, 2), (2, 2, 1), (2, 8, -4), (1, 8, -8)]
)
def test_the_ratio_of_ranks_says_who_reads_from_whom(here: int, there: int, ratio: int) -> None:
    assert topology(here, other=EngineShape(there, 16)).rank_ratio("there") == ratio


def test_a_rank_reads_from_those_that_keep_its_heads() -> None:
    four = EngineShape(4, 16)
    assert topology(8, 5, other=four).source_ranks("there") == (2,)
    assert topology(2, 1, other=four).source_ranks("there") == (2, 3)
    assert topology(8, 5, other=four).heads_from("there", 2) == (range(1, 2), range(1))
    assert topology(2, 1, other=four).heads_from("there", 3) == (range(2), range(2, 4))
    assert topology(2, 0, other=four).heads_from("there", 3) == (range(0), range(6, 6))


def test_readers_are_spread_over_ranks_that_keep_the_same() -> None:
    eight = EngineShape(8, 16)
    sources = [topology(2, rank, heads=2, other=eight).source_ranks("there") for rank in (0, 1)]
    assert sources == [(0,), (5,)]
    latent = [
        topology(4, rank, heads=1, is_mla=True, other=EngineShape(2, 16)).source_ranks("there")
        for rank in range(4)
    ]
    assert latent == [(0,), (1,), (0,), (1,)]


def test_ranks_whose_numbers_do_not_divide_may_keep_whole_ranks_heads_all_the_same() -> None:
    latent = [
        topology(2, rank, heads=1, is_mla=True, other=EngineShape(3, 16)).source_ranks("there")
        for rank in range(2)
    ]
    assert latent == [(0,), (1,)]
    shared = [
        topology(4, rank, heads=2, other=EngineShape(6, 16)).source_ranks("there")
        for rank in range(4)
    ]
    assert shared == [(0,), (1,), (5,), (3,)]


@pytest.mark.parametrize(("there", "ratio"), [(16, 1), (8, 2), (64, -4)])
def test_the_ratio_of_blocks_says_how_many_make_one(there: int, ratio: int) -> None:
    assert topology(1, other=EngineShape(1, there)).block_ratio("there") == ratio


def test_another_order_of_dimensions_needs_a_permutation() -> None:
    same, other = EngineShape(1, 16), EngineShape(1, 16, BlockLayout.NHD)
    assert not topology(1, other=same).needs_permutation("there")
    assert topology(1, other=other).needs_permutation("there")


def test_what_cannot_work_is_refused_with_the_numbers() -> None:
    with pytest.raises(UnsupportedError, match=r"ranks 0 to 1, not 2"):
        topology(2, 2)
    with pytest.raises(UnsupportedError, match="3 ranks and the model 8 KV heads"):
        topology(3)
    with pytest.raises(UnsupportedError, match="engine there has 5 ranks and the model 8"):
        topology(2, other=EngineShape(5, 16))
    with pytest.raises(UnsupportedError, match="engine elsewhere is not known; known: here"):
        topology(2).heads("elsewhere", 0)
    for rank in (-1, 4):
        with pytest.raises(UnsupportedError, match=rf"there has ranks 0 to 3, not {rank}"):
            topology(2, other=EngineShape(4, 16)).heads("there", rank)
    three = topology(2, heads=6, other=EngineShape(3, 16))
    with pytest.raises(UnsupportedError, match="has 2 ranks and engine there 3: neither"):
        three.rank_ratio("there")
    with pytest.raises(UnsupportedError, match="in 2 parts and engine there in 3: neither"):
        three.source_ranks("there")
    with pytest.raises(UnsupportedError, match="blocks of 16 tokens and engine there of 24"):
        topology(1, other=EngineShape(1, 24)).block_ratio("there")
    with pytest.raises(UnsupportedError, match="block_tokens is 0, not a positive"):
        EngineShape(1, 0)
    with pytest.raises(UnsupportedError, match="0 KV heads"):
        topology(1, heads=0)


powers = st.sampled_from([1, 2, 4, 8])


@given(heads=powers, here=powers, there=powers, is_mla=st.booleans())
def test_every_head_a_rank_keeps_comes_from_exactly_one_rank(
    heads: int, here: int, there: int, is_mla: bool
) -> None:
    for rank in range(here):
        view = topology(here, rank, heads=heads, is_mla=is_mla, other=EngineShape(there, 16))
        got = [
            head
            for source in view.source_ranks("there")
            for head in view.heads_from("there", source)[1]
        ]
        assert sorted(got) == list(range(len(view.heads("here", rank))))
        for source in view.source_ranks("there"):
            theirs, mine = view.heads_from("there", source)
            assert [view.heads("there", source)[i] for i in theirs] == [
                view.heads("here", rank)[i] for i in mine
            ]


@given(heads=powers, ranks=powers)
def test_the_shares_of_all_ranks_cover_a_slot_once_for_each_block(
    heads: int, ranks: int
) -> None:
    shares = [topology(ranks, rank, heads=heads).share() for rank in range(ranks)]
    for block in range(8):
        written = [
            stripe
            for share in shares
            if block % share.writers == share.writer
            for stripe in share.stripes
        ]
        assert sorted(written) == list(range(STRIPES))
