"""Traces are read, whatever their format, or refused with a line and a remedy."""

from __future__ import annotations

import gzip
import json
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from kvtier.sim.traces import Trace, TraceError, TraceFormat, read_trace, write_trace

MOONCAKE = {"timestamp": 1500, "input_length": 600, "output_length": 9, "hash_ids": [7, 3]}


def line(**changes: Any) -> str:
    return json.dumps({**MOONCAKE, **changes}) + "\n"


def oracle(*records: tuple[int, int, int, int]) -> bytes:
    return b"".join(struct.pack("<IQIq", *record) for record in records)


def damaged(compressor: zstandard.ZstdCompressor) -> bytes:
    """A frame whose checksum is not that of its content."""
    frame = compressor.compress(line().encode())
    return frame[:-1] + bytes([frame[-1] ^ 1])


@pytest.fixture
def saved(tmp_path: Path) -> Callable[[str | bytes], Path]:
    def save(content: str | bytes) -> Path:
        path = tmp_path / "a.trace"
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return save


Save = Callable[[str | bytes], Path]


def chains(trace: Trace) -> list[list[int]]:
    return trace.chains()


def bailian(chat: Any, parent: Any, **more: Any) -> str:
    """A Qwen-Bailian record: chat number ``chat``, which goes on from ``parent``."""
    return line(chat_id=chat, parent_chat_id=parent, **more)


# -- sessions ----------------------------------------------------------------------------------


def test_a_request_belongs_to_the_session_its_record_names(saved: Save) -> None:
    lines = [line(session_id="a"), line(), line(session_id=7), bailian(1, -1, session_id="b")]
    assert read_trace(saved("".join(lines))).sessions == ("a", "", "7", "b")
    assert read_trace(saved(line() + line())).sessions == ()


def test_chats_that_go_on_from_each_other_are_one_session(saved: Save) -> None:
    chats = [(1, -1), (2, 1), (3, -1), (4, 2), (5, 99), (6, 99), (7, 3), (8, None)]
    trace = read_trace(saved("".join(bailian(*chat) for chat in chats)))
    assert trace.format == "bailian"
    assert trace.sessions == ("1", "1", "3", "1", "99", "99", "3", "8")


@pytest.mark.parametrize("key", ["session_id", "chat_id", "parent_chat_id"])
@pytest.mark.parametrize("value", [[1], 1.5, True, {}])
def test_an_invalid_name_is_refused(saved: Save, key: str, value: Any) -> None:
    with pytest.raises(TraceError, match=rf"a.trace:2: {key} = .* is not a name; write a text"):
        read_trace(saved(bailian(1, -1) + line(**{"chat_id": 2, key: value})))


# -- what is read ------------------------------------------------------------------------------


def test_ids_are_numbered_as_they_appear_and_times_count_from_the_first(saved: Save) -> None:
    second = line(timestamp=2500, hash_ids=[3, 9, 7], input_length=0)
    trace = read_trace(saved(line() + second))
    assert trace.format == "mooncake"
    assert chains(trace) == [[0, 1], [1, 2, 0]]
    assert trace.distinct == 3
    assert trace.timestamps_s.tolist() == [0.0, 1.0]
    assert trace.input_tokens.tolist() == [600, 0]
    assert trace.output_tokens.tolist() == [9, 9]
    assert trace.chunk_tokens == 512
    assert trace.duration_s == 1.0


def test_lmbench_has_nanoseconds_as_a_string(saved: Save) -> None:
    trace = read_trace(saved(line(timestamp="1500000000") + line(timestamp="4000000000")))
    assert trace.format == "lmbench"
    assert trace.timestamps_s.tolist() == [0.0, 2.5]


def test_bailian_has_seconds_and_small_blocks(saved: Save) -> None:
    extra = {"chat_id": 5, "parent_chat_id": -1, "type": "text", "turn": 1, "input_length": 30}
    trace = read_trace(saved(line(timestamp=10, **extra) + line(timestamp=12.5, **extra)))
    assert trace.format == "bailian"
    assert trace.timestamps_s.tolist() == [0.0, 2.5]
    assert trace.chunk_tokens == 16


def test_a_record_may_say_how_many_tokens_an_id_stands_for(saved: Save) -> None:
    assert read_trace(saved(line(block_tokens=64) + line(block_tokens=64))).chunk_tokens == 64


def test_ids_may_be_strings_and_a_string_is_no_number(saved: Save) -> None:
    assert chains(read_trace(saved(line(hash_ids=["7", 7, "7"])))) == [[0, 1, 0]]


def test_a_request_shorter_than_a_chunk_refers_to_none(saved: Save) -> None:
    trace = read_trace(saved(line(hash_ids=[]) + line()))
    assert chains(trace) == [[], [0, 1]]
    assert trace.requests == 2


def test_words_that_look_like_keys_are_read_as_keys(saved: Save) -> None:
    words = "17\n7f0a/0\nuser-1_b.x\nschlüssel\n"
    assert read_trace(saved(words)).format == "keys"
    long = "0123456789\n" * 10_000  # more than is looked at: the last line seen is cut off
    assert read_trace(saved(long)).requests == 10_000


def test_blank_lines_and_a_missing_output_length_are_no_problem(saved: Save) -> None:
    record = {key: value for key, value in MOONCAKE.items() if key != "output_length"}
    trace = read_trace(saved("\n" + json.dumps(record) + "\n\n"))
    assert trace.output_tokens.tolist() == [0]


def test_one_key_a_line_is_one_request_each(saved: Save) -> None:
    trace = read_trace(saved("a\nb b\na\n"), format_name="keys")
    assert trace.format == "keys"
    assert chains(trace) == [[0], [1], [0]]
    assert trace.chunk_tokens == 1
    assert trace.input_tokens.tolist() == [1, 1, 1]


def test_oracle_records_are_one_request_each(saved: Save) -> None:
    trace = read_trace(saved(oracle((5, 99, 4096, 2), (5, 7, 1, -1), (8, 99, 4096, -1))))
    assert trace.format == "oracle"
    assert chains(trace) == [[0], [1], [0]]
    assert trace.timestamps_s.tolist() == [0.0, 0.0, 3.0]


@pytest.mark.parametrize(
    "compress", [gzip.compress, zstandard.ZstdCompressor().compress], ids=["gzip", "zstd"]
)
def test_compressed_files_are_looked_through(
    saved: Save, compress: Callable[[bytes], bytes]
) -> None:
    plain = read_trace(saved(line() * 3))
    packed = read_trace(saved(compress((line() * 3).encode())))
    assert chains(packed) == chains(plain)
    assert packed.sha256 != plain.sha256


def test_zstd_files_may_be_several_frames(saved: Save) -> None:
    compress = zstandard.ZstdCompressor().compress
    frames = compress(line().encode()) + compress(line().encode())
    assert read_trace(saved(frames)).requests == 2


def test_the_name_is_the_files_without_its_suffixes(tmp_path: Path) -> None:
    path = tmp_path / "monday.jsonl.gz"
    path.write_bytes(gzip.compress(line().encode()))
    assert read_trace(path).name == "monday"


# -- tokens per id -----------------------------------------------------------------------------


def lengths(
    *shape: tuple[int, int], apart: int = 1000, stamp: Callable[[int], Any] = int, **more: Any
) -> str:
    """Records of so many tokens with so many ids, from the same beginning."""
    return "".join(
        line(input_length=tokens, hash_ids=[*range(ids)], timestamp=stamp(at * apart), **more)
        for at, (tokens, ids) in enumerate(shape)
    )


@pytest.mark.parametrize(
    ("shape", "more", "tokens", "origin"),
    [
        ([(6758, 14), (1025, 3), (512, 1)], {}, 512, "default; the records agree"),
        ([(6758, 14), (1025, 3)], {"chat_id": 1, "parent_chat_id": -1}, 512, "derived"),
        ([(6758, 14), (1025, 3)], {"chat_id": 1}, 512, "default; the records agree"),
        ([(1000, 63), (500, 32), (48, 3), (49, 4)], {}, 16, "derived"),
        ([(1000, 20), (500, 10), (95, 1)], {}, 48, "derived"),  # no id for a partial chunk
        ([(2101, 58), (3650, 106), (377, 21), (254, 9)], {}, 33, "the mean of the records"),
        ([(0, 2)], {}, 512, "default; the records do not say"),
        ([(6758, 14)], {"block_tokens": 500}, 500, "block_tokens of the records"),
    ],
)
def test_tokens_per_id_follow_from_the_records(
    saved: Save, shape: list[tuple[int, int]], more: dict[str, Any], tokens: int, origin: str
) -> None:
    trace = read_trace(saved(lengths(*shape, **more)))
    assert trace.chunk_tokens == tokens
    assert trace.assumed[-1].startswith(f"tokens per id: {tokens} (")
    assert origin in trace.assumed[-1]


@given(
    tokens=st.integers(1, 2000),
    prompts=st.lists(st.integers(1, 60_000), min_size=1, max_size=20),
    partial=st.booleans(),
)
def test_no_number_fits_the_records_better(
    tokens: int,
    prompts: list[int],
    partial: bool,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    # The longest prompt has an id, so that there is one.
    prompts.append(60_000)
    counts = [-(-length // tokens) if partial else length // tokens for length in prompts]
    path = tmp_path_factory.mktemp("lengths") / "x"
    path.write_text(lengths(*zip(prompts, counts, strict=True)))
    found = read_trace(path)
    up = [-(-length // found.chunk_tokens) for length in prompts]
    down = [length // found.chunk_tokens for length in prompts]
    known = [number for number, count in enumerate(counts) if count]
    assert any(all(one[at] == counts[at] for at in known) for one in (up, down))


def test_records_that_contradict_the_tokens_per_id_are_counted(saved: Save) -> None:
    whole = [(512 * ids, ids) for ids in range(1, 20)]
    assert read_trace(saved(lengths(*whole))).warnings == ()
    (warning,) = read_trace(saved(lengths(*whole, (40, 9), (9000, 2)))).warnings
    assert warning.startswith(
        "2 of 21 requests contradict 512 tokens per id, the first with input_length = 40 and "
        "9 hash_ids: "
    )
    (warning,) = read_trace(saved(lengths(*whole, block_tokens=64))).warnings
    assert warning.startswith("19 of 19 requests contradict 64 tokens per id")


def test_tokens_per_id_may_be_given(saved: Save) -> None:
    path = saved(lengths((6758, 14), (1025, 3), block_tokens=512))
    trace = read_trace(path, tokens_per_id=16)
    assert trace.chunk_tokens == 16
    assert trace.assumed == (
        "format: mooncake (detected)",
        "timestamps in milliseconds",
        "tokens per id: 16 (given)",
    )
    assert "contradict 16 tokens per id" in trace.warnings[0]
    keys = read_trace(saved("a\nb\n"), tokens_per_id=16)
    assert keys.input_tokens.tolist() == [16, 16]
    assert keys.chunk_tokens == 16


# -- order -------------------------------------------------------------------------------------


def test_a_trace_that_runs_backward_is_sorted_with_a_warning(saved: Save) -> None:
    first, second, third = (line(timestamp=at, hash_ids=[at]) for at in (1000, 2000, 3000))
    trace = read_trace(saved(third + first + second))
    assert trace.timestamps_s.tolist() == [0.0, 1.0, 2.0]
    assert chains(trace) == chains(read_trace(saved(first + second + third)))
    assert trace.warnings[0].startswith(
        "1 of 3 requests have an earlier timestamp than the line before: all lines were sorted"
    )
    assert not any("sorted" in text for text in read_trace(saved(first + second)).warnings)


def test_sessions_are_found_in_a_trace_that_runs_backward(saved: Save) -> None:
    chats = [bailian(1, -1, timestamp=1), bailian(2, 1, timestamp=2)]
    chats.append(bailian(3, 2, timestamp=3))
    trace = read_trace(saved("".join(reversed(chats))))
    assert trace.sessions == ("1", "1", "1")


# -- what is refused ---------------------------------------------------------------------------


BAD: list[tuple[str | bytes, str, str, str]] = [
    ("", "", "empty", "at least one request"),
    (" \n\n", "", "empty", "at least one request"),
    (line() + line()[:40], ":2", "not JSON", "complete or remove the line"),
    (
        line() + "[1, 2]\n",
        ":2",
        "a JSON list where an object belongs",
        "one request a line",
    ),
    ("[" + line() + "]", ":1", "a JSON list", "no list around them"),
    (line(input_length=-1), ":1", "input_length = -1 is negative", "number of tokens"),
    (line(output_length=-5), ":1", "output_length = -5 is negative", "number of tokens"),
    (line(input_length=6.5), ":1", "6.5 is not a whole number", "number of tokens"),
    (line(input_length=True), ":1", "true is not a whole number", "number of tokens"),
    (line(input_length=1 << 50), ":1", "too large", "number of tokens"),
    (line() + line(hash_ids=7), ":2", "hash_ids = 7 is not a list", "[0, 1]"),
    (line(hash_ids="77"), ":1", 'hash_ids = "77" is not a list', "[0, 1]"),
    (line(hash_ids=[1, 2.0, None]), ":1", "NoneType, float", "whole number or a string"),
    (line(hash_ids=[True]), ":1", "hash_ids holds bool", "whole number or a string"),
    (line(hash_ids=[]), "", "no request refers to any chunk", "hash_ids"),
    (line(timestamp=-1), ":1", "timestamp = -1 is not a time", "0 or more"),
    (line(timestamp=None), ":1", "timestamp = null is not a number", "lmbench"),
    (line() + line(timestamp="5"), ":2", 'timestamp = "5" is not a number', "lmbench"),
    (line(timestamp="5") + line(), ":2", "not a string of digits", "mooncake"),
    (line(timestamp="-5"), ":1", 'timestamp = "-5" is not a string of digits', "nanoseconds"),
    (line() + '{"timestamp": 1}\n', ":2", "hash_ids is missing", "a request looks like"),
    (line(block_tokens=4) + line(), ":2", "block_tokens = none, 4 before", "split"),
    (line() + line(block_tokens=4), ":2", "block_tokens = 4, none before", "split"),
    (line(block_tokens=0), ":1", "block_tokens = 0", "leave it out"),
    (b'{"session_id": "Andr\xe9"}\n', ":1", "not UTF-8 text", "save it as UTF-8"),
    (line().encode() + b'{"session_id": "Andr\xe9"}\n', ":2", "not UTF-8 text", "iconv"),
    (b"a\nschl\xfcssel\n", ":2", "not UTF-8 text", "save it as UTF-8"),
    ("a\n" + "x" * 5000, ":2", "a line of 5,000 characters, too long for a key", "one key"),
    ("x" * 100_000, ":1", "a line of 100,000 characters, too long for a key", "one key"),
    ("tiers:\n", ":1", "not a trace", "--format keys"),
    ("a\n7f/0\nb b\n", ":3", "not a trace", "--format keys"),
    ("a\n\nb\n", ":2", "an empty line between keys", "remove it"),
    (b"\x00\x01\x02" * 9, "", "no multiple of 24", "--format"),
    (oracle((9, 1, 1, 1), (8, 1, 1, 1)), ":2", "time 8 after 9", "sort the records"),
    (b"\x1f\x8b" + b"garbage", "", "damaged gzip data", "again"),
    (gzip.compress(line().encode())[:-9], "", "damaged gzip data", "again"),
    (damaged(zstandard.ZstdCompressor(write_checksum=True)), "", "damaged zstd", "again"),
    (line(timestamp=float("nan")), ":1", "timestamp = NaN is not a time", "0 or more"),
    (line(timestamp=10**400), ":1", "is not a time", "0 or more"),
    ('{"timestamp": ' + "9" * 5000 + "}", ":1", "a number too long", "looks like"),
    ('{"hash_ids": ' + "[" * 100_000 + "}", ":1", "a list too deep", "looks like"),
    (
        zstandard.ZstdCompressor().compress((line() * 99).encode())[:-5],
        "",
        "zstd data ends too early",
        "again",
    ),
]


@pytest.mark.parametrize(
    ("content", "where", "problem", "remedy"),
    BAD,
    ids=[f"{number}: {case[2]}" for number, case in enumerate(BAD)],
)
def test_a_bad_trace_is_refused_with_its_line_and_a_remedy(
    saved: Save, content: str | bytes, where: str, problem: str, remedy: str
) -> None:
    path = saved(content)
    with pytest.raises(TraceError) as refusal:
        read_trace(path)
    text = str(refusal.value)
    assert text.startswith(f"{path}{where}: ")
    assert problem in text
    assert remedy in text.split("; ", 1)[1]
    assert "\n" not in text


@pytest.mark.parametrize(
    ("format_name", "content", "problem"),
    [
        ("mooncake", b"\xff\xfe{}\n", "not UTF-8"),
        ("keys", b"a\n\xff\n", "not UTF-8 text"),
        ("oracle", oracle((1, 2, 3, 4)) + b"123", "3 bytes after 1 records"),
        ("lmbench", line().encode(), "not a string of digits"),
    ],
)
def test_a_format_that_is_named_is_insisted_on(
    saved: Save, format_name: TraceFormat, content: bytes, problem: str
) -> None:
    with pytest.raises(TraceError, match=problem):
        read_trace(saved(content), format_name=format_name)


def test_a_file_that_is_not_there_is_said_to_be(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no such file"):
        read_trace(tmp_path / "none")
    with pytest.raises(TraceError, match="is a directory"):
        read_trace(tmp_path)


def test_without_zstandard_a_zstd_trace_says_what_to_install(
    saved: Save, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = saved(zstandard.ZstdCompressor().compress(line().encode()))
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(TraceError, match=r"pip install 'kvtier\[zstd\]'"):
        read_trace(path)


@given(garbage=st.binary(max_size=200))
def test_garbage_is_read_or_refused_but_never_crashes(
    garbage: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("garbage") / "x"
    path.write_bytes(garbage)
    try:
        trace = read_trace(path)
    except TraceError:
        return
    assert trace.refs == len(trace.ids) == trace.offsets[-1]
    assert trace.distinct == len(set(trace.ids.tolist()))


# -- what is made of it ------------------------------------------------------------------------


def test_next_uses_follow_the_order_of_access(saved: Save) -> None:
    trace = read_trace(saved(line(hash_ids=[1, 2, 3]) + line(hash_ids=[1, 3])))
    never = trace.refs
    assert trace.next_uses().tolist() == [3, never, 4, never, never]
    # Leaf to root the accesses are 3 2 1, then 3 1.
    assert trace.next_uses(backwards=True).tolist() == [3, never, 4, never, never]
    again = read_trace(saved(line(hash_ids=[1, 2]) + line(hash_ids=[1])))
    assert again.next_uses(backwards=True).tolist() == [3, 2, 3]


def test_a_written_trace_reads_back(saved: Save, tmp_path: Path) -> None:
    lines = line(block_tokens=16) + line(block_tokens=16, hash_ids=[3, 8])
    trace = read_trace(saved(lines))
    path = tmp_path / "copy"
    write_trace(trace, path)
    copy = read_trace(path)
    assert copy.format == "mooncake"
    assert chains(copy) == chains(trace)
    assert copy.chunk_tokens == 16
    assert copy.input_tokens.tolist() == trace.input_tokens.tolist()
