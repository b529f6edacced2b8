"""Traces are read as they are published. Bad rows are named, and do not spoil the others."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from collections.abc import Iterator
from itertools import repeat
from pathlib import Path

import pytest

from kvcalc.errors import UsageError
from kvcalc.traces import Trace, TraceRequest, read_trace

FILES = Path(__file__).parent / "files"
PLAIN = "arrival_seconds,prompt_tokens,answer_tokens\n"
MOONCAKE = {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}


def of_text(text: str | bytes, format: str | None = None, block_tokens: int | None = None) -> Trace:
    return Trace([text.encode() if isinstance(text, str) else text], "trace", format, block_tokens)


def of_chunks(chunks: Iterator[bytes]) -> Trace:
    return Trace(chunks, "trace", None, None)


@pytest.mark.parametrize(
    ("file", "format", "rows"),
    [
        ("plain.csv", "csv", [(0.0, 512, 128), (0.25, 2048, 300), (1.5, 64, 16)]),
        ("azure-2023.csv", "azure", [(0.0, 4100, 12), (1.2500001, 310, 44), (2.5, 75, 6)]),
        ("azure-2024.csv", "azure", [(0.0, 2162, 5), (0.5, 2399, 6), (2.0, 76, 15)]),
        ("burstgpt.csv", "burstgpt", [(0.0, 470, 20), (40.0, 1000, 0), (113.0, 417, 276)]),
        ("burstgpt-sessions.csv", "burstgpt", [(0.0, 906, 446), (51.0, 36, 29)]),
        ("mooncake.jsonl", "mooncake", [(0.0, 1300, 500), (0.0, 1024, 1), (3.052, 2000, 60)]),
        ("qwen.jsonl", "qwen", [(0.0, 40, 13), (1.5, 64, 7)]),
        ("token-ids.jsonl", "token-ids", [(0.0, 9, 4), (0.5, 8, 4), (2.0, 8, 4)]),
    ],
)
def test_each_format_is_recognised_by_its_content(
    file: str, format: str, rows: list[tuple[float, int, int]], tmp_path: Path
) -> None:
    copy = tmp_path / "trace.txt"
    copy.write_bytes((FILES / file).read_bytes())
    trace = read_trace(str(copy))
    assert [request[:3] for request in trace] == rows
    assert (trace.format, trace.num_requests, trace.num_bad_rows) == (format, len(rows), 0)
    windows = b"\xef\xbb\xbf" + copy.read_bytes().replace(b"\n", b"\r\n")
    assert [request[:3] for request in of_text(windows)] == rows


def test_blocks_of_hashes_have_the_size_of_their_format() -> None:
    mooncake = list(read_trace(str(FILES / "mooncake.jsonl")))
    assert mooncake[2] == TraceRequest(3.052, 2000, 60, (0, 1, 2, 4), 512, 3)
    assert [request.block_tokens for request in read_trace(str(FILES / "qwen.jsonl"))] == [16, 16]
    (smaller,) = of_text(json.dumps({**MOONCAKE, "hash_ids": list(range(5))}), block_tokens=128)
    assert smaller.block_tokens == 128


def test_token_ids_become_hashes_of_full_blocks_and_all_tokens_before() -> None:
    requests = read_trace(str(FILES / "token-ids.jsonl"), block_tokens=4)
    first, second, third = (request.block_hashes or () for request in requests)
    assert [len(first), len(second), len(third)] == [2, 2, 2]
    assert first[0] == second[0]
    assert first[1] != second[1]
    # The third prompt's second block has the same tokens as the first prompt's, after other tokens.
    assert not {*first} & {*third}
    assert all(request.block_hashes is None for request in read_trace(str(FILES / "token-ids.jsonl")))


def test_columns_have_many_names_and_any_order() -> None:
    rows = list(of_text("output_tokens;id;Input Tokens;timestamp_ms\n7;a;100;2500\n8;b;50;4000\n"))
    assert [row[:3] for row in rows] == [(0.0, 100, 7), (1.5, 50, 8)]
    assert [row[:3] for row in of_text('prompt,answer,time,note\n9,8,2024-01-31T00:00:00Z,"a, b"\n')] == [(0.0, 9, 8)]


@pytest.mark.parametrize(
    ("row", "what"),
    [
        ("1,abc,1", "prompt_tokens is 'abc', not a whole number"),
        ("1,1.5,1", "prompt_tokens is '1.5', not a whole number"),
        ("1,0,1", "prompt_tokens is 0; it must be from 1"),
        ("1,-4,1", "prompt_tokens is '-4', not a whole number"),
        ("1,4,9999999999", "answer_tokens is 9999999999; it must be from 0 to 1,000,000,000"),
        ("1,4,٣", "answer_tokens is '\\u0663', not a whole number"),
        ("nan,4,1", "arrival_seconds is 'nan', not a time"),
        ("inf,4,1", "arrival_seconds is 'inf', not a time"),
        ("-1,4,1", "arrival_seconds is '-1', not a time"),
        ("1e99,4,1", "it must be from 0 to"),
        ("2024-02-31 00:00:00,4,1", "not a date and time"),
        ("1,4", "2 values, but the header has 3 columns"),
        ("1,4,1,9", "4 values, but the header has 3 columns"),
        ("1,4\x00,1", "prompt_tokens is '4\\x00', not a whole number"),
        ("1,\x1b[31m4,1", "prompt_tokens is '\\x1b[31m4', not a whole number"),
        ('1,"4,1', "2 values, but the header has 3 columns"),
        ("1," + "9" * 100_000 + ",1", "longer than 65,536 characters"),
        ("0.5,4,1", "arrives 0.5 s before line 2; sort the rows by time"),
    ],
)
def test_a_bad_row_of_csv_is_named_and_skipped(row: str, what: str) -> None:
    trace = of_text(PLAIN + f"1,2,2\n{row}\n1,3,3\n")
    assert [request.prompt_tokens for request in trace] == [2, 3]
    assert trace.num_bad_rows == 1
    assert trace.first_bad_row is not None
    assert trace.first_bad_row.startswith("line 3: ")
    assert what in trace.first_bad_row
    assert len(trace.first_bad_row) < 200
    assert trace.first_bad_row.isprintable()


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"timestamp": -1}, "timestamp is -1; it must be from 0 to"),
        ({"timestamp": True}, "timestamp is True, not a time"),
        ({"timestamp": None}, "timestamp is None, not a time"),
        ({"timestamp": [1]}, "timestamp is list, not a time"),
        ({"input_length": 600.5}, "input_length is 600.5, not a whole number"),
        ({"input_length": "x" * 10_000}, "input_length is 'xxx"),
        (
            {"input_length": 1100, "hash_ids": [0]},
            "1 hash_ids for input_length 1,100; blocks of 512 tokens need 2",
        ),
        ({"hash_ids": [0, 1, 2]}, "3 hash_ids for input_length 600; blocks of 512 tokens need 1 or 2"),
        ({"hash_ids": [0, 0]}, "the same hash_id twice"),
        ({"hash_ids": [0, -1]}, "hash_ids is not a list of whole numbers from 0 to"),
        ({"hash_ids": [0, 2**64]}, "hash_ids is not a list of whole numbers from 0 to"),
        ({"hash_ids": [0, True]}, "hash_ids is not a list of whole numbers from 0 to"),
        ({"hash_ids": [0, 1.0]}, "hash_ids is not a list of whole numbers from 0 to"),
        ({"hash_ids": {"a": 1}}, "hash_ids is not a list of whole numbers from 0 to"),
    ],
)
def test_a_bad_row_of_json_is_named_and_skipped(changes: dict[str, object], what: str) -> None:
    good = json.dumps(MOONCAKE)
    trace = of_text(f"{good}\n{json.dumps({**MOONCAKE, **changes})}\n{good}\n")
    assert [request.line for request in trace] == [1, 3]
    assert trace.first_bad_row is not None
    assert trace.first_bad_row.startswith("line 2: ")
    assert what in trace.first_bad_row
    assert len(trace.first_bad_row) < 200


@pytest.mark.parametrize(
    "line",
    [
        b"{", b"[]", b"1", b'{"timestamp": NaN}', b'{"timestamp": Infinity}', b"\xff\xfe", b"[" * 100_000,
        b'{"a":' * 5_000 + b"1" + b"}" * 5_000, b'{"timestamp": ' + b"9" * 10_000 + b"}", b"\0" * 1000,
        b'{"a": [' + b"[]," * 20_000 + b"[]]}", b"x" * (9 * 1024 * 1024), b'{"hash_ids": [1]}',
    ],
    ids=range(13),
)  # fmt: skip
def test_a_hostile_line_is_a_bad_row_among_good_ones(line: bytes) -> None:
    good = json.dumps(MOONCAKE).encode()
    trace = of_text(b"\n".join((good, line, good)))
    assert [request.line for request in trace] == [1, 3]
    assert trace.num_bad_rows == 1
    with pytest.raises(UsageError) as refused:
        list(of_text(line))
    assert "\n" not in refused.value.message
    assert len(refused.value.message) < 300


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "trace: empty"),
        ("\n \n", "trace: empty"),
        (PLAIN, "trace: no request in it"),
        (PLAIN + "a,b,c\n", "no row can be read (1 row); line 2: arrival_seconds is 'a'"),
        ("1,2,3\n", "line 1: not the start of a trace in a format that kvcalc knows"),
        ('{"prompt": "hi"}\n', "line 1: not the start of a trace in a format that kvcalc knows"),
    ],
)
def test_what_is_no_trace_is_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError, match="trace: ") as refused:
        list(of_text(text))
    assert message in refused.value.message
    assert refused.value.exit_code == 2


def test_a_format_can_be_demanded() -> None:
    with pytest.raises(UsageError, match="not the start of a trace in the format azure"):
        list(of_text(json.dumps(MOONCAKE), format="azure"))
    broken = of_text("{broken\n" + json.dumps(MOONCAKE), format="mooncake")
    assert [request.line for request in broken] == [2]
    with pytest.raises(UsageError, match="--trace-format 'azur': unknown"):
        read_trace("x", "azur")


def test_rows_without_times_have_an_order_only() -> None:
    rows = ['{"token_ids": [1, 2]}', '{"token_ids": [1], "timestamp": 5}', '{"token_ids": []}', '{"token_ids": [3]}']
    trace = of_text("\n".join(rows))
    assert [request.line for request in trace] == [1, 4]
    assert not trace.has_arrivals
    assert trace.first_bad_row == "line 2: has a time; earlier rows do not"


def test_a_file_that_cannot_be_read_is_refused_in_one_line(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing.csv"):
        with pytest.raises(UsageError):
            list(read_trace(str(path)))


def test_a_row_may_arrive_in_pieces() -> None:
    data = (FILES / "mooncake.jsonl").read_bytes().rstrip(b"\n")
    whole = list(of_text(data))
    for size in (1, 7, 100):
        pieces = (data[at : at + size] for at in range(0, len(data), size))
        assert list(of_chunks(pieces)) == whole


def test_a_trace_of_any_length_takes_little_memory() -> None:
    def chunks() -> Iterator[bytes]:
        yield PLAIN.encode()
        yield from repeat(b"1,2,3\n" * 10_000, 5)
        yield from repeat(b"x" * 1_000_000, 50)  # one line of 50 MB
        yield b"\n1,2,3\n"

    tracemalloc.start()
    try:
        trace = of_chunks(chunks())
        count = sum(1 for _ in trace)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert count == 50_001
    assert trace.first_bad_row == "line 50002: longer than 8,388,608 bytes"
    assert peak < 5_000_000


def test_a_compressed_trace_is_read_whatever_its_name(tmp_path: Path) -> None:
    plain = (FILES / "mooncake.jsonl").read_bytes()
    asked = [list(read_trace(str(FILES / "mooncake.jsonl")))]
    half = plain.index(b"\n") + 1
    members = gzip.compress(plain[:half]) + gzip.compress(plain[half:])
    for name, data in (("trace.jsonl.gz", gzip.compress(plain)), ("trace", members)):
        (tmp_path / name).write_bytes(data)
        asked.append(list(read_trace(str(tmp_path / name))))
    assert asked[0] == asked[1] == asked[2]
    csv = gzip.compress((PLAIN + "0,10,5\n").encode())
    (tmp_path / "plain.csv.gz").write_bytes(csv)
    assert len(list(read_trace(str(tmp_path / "plain.csv.gz")))) == 1
    for damaged in (csv[:-9], csv[:12] + b"\xff" * 20):
        (tmp_path / "damaged.gz").write_bytes(damaged)
        with pytest.raises(UsageError, match=r"gzip file"):
            list(read_trace(str(tmp_path / "damaged.gz")))


def test_a_small_compressed_trace_cannot_take_much_memory(tmp_path: Path) -> None:
    path = tmp_path / "bomb.gz"
    path.write_bytes(gzip.compress(bytes(1 << 26)))
    tracemalloc.start()
    with pytest.raises(UsageError):
        list(read_trace(str(path)))
    assert tracemalloc.get_traced_memory()[1] < 1 << 25
    tracemalloc.stop()
