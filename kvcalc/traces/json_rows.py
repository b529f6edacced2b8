"""Traces as JSON lines: with the hashes of the prompts' blocks, or with the prompts' token ids.

- Mooncake (kvcache-ai/Mooncake, FAST25-release/traces): timestamp in milliseconds, input_length, output_length,
  hash_ids of blocks of 512 tokens. The last block may be partial.
- Qwen-Bailian (alibaba-edu/qwen-bailian-usagetraces-anon, README.md): the same names, but timestamp in seconds, blocks
  of 16 tokens, and chat_id.
- Token ids: prompt_token_ids or token_ids; optional are arrival_seconds, or timestamp in milliseconds, and
  output_length. kvcalc hashes the prompt's full blocks, each together with all tokens before it, as the engines do.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable
from hashlib import blake2b
from typing import Any

from kvcalc.json_lines import parse_object, refuse_constant
from kvcalc.traces.request import BadRowError, Row, nanoseconds, tokens

MOONCAKE_BLOCK_TOKENS, QWEN_BLOCK_TOKENS = 512, 16

Fields = dict[str, Any]
"""The fields of a line as the file has them."""

# A line with more lists and objects is none of these formats, and would take much memory.
_MOST_BRACKETS = 10_000
_MOST_ID = 2**64 - 1
_TOKEN_IDS = ("prompt_token_ids", "token_ids")
_ANSWER = ("output_length", "answer_tokens", "output_tokens")


def format_of(fields: Fields) -> str | None:
    """The name of the format of a row with these fields, or None if it is not known."""
    if any(name in fields for name in _TOKEN_IDS):
        return "token-ids"
    if "hash_ids" not in fields or "input_length" not in fields:
        return None
    return "qwen" if "chat_id" in fields else "mooncake"


def parse(line: str) -> Fields:
    """The JSON object on a line. Raises BadLineError if it is not one."""
    if line.count("[") + line.count("{") > _MOST_BRACKETS:
        raise BadRowError(f"more than {_MOST_BRACKETS:,} lists and objects")
    return parse_object(line, _DECODER)


def row_reader(name: str, block_tokens: int | None) -> Callable[[str], Row]:
    """A function from a line to its row in the format `name`. It raises BadRowError.

    `block_tokens` replaces the block size of a format with hashes. A format with token ids needs it to have hashes.
    """
    if name == "token-ids":
        return lambda line: _from_token_ids(parse(line), block_tokens)
    block = block_tokens or (QWEN_BLOCK_TOKENS if name == "qwen" else MOONCAKE_BLOCK_TOKENS)
    per_second = 1 if name == "qwen" else 1000
    return lambda line: _from_hashes(parse(line), block, per_second)


def _from_hashes(fields: Fields, block_tokens: int, per_second: int) -> Row:
    when = nanoseconds(_field(fields, "timestamp"), "timestamp", per_second)
    prompt = tokens(_field(fields, "input_length"), "input_length", 1)
    answer = tokens(fields.get("output_length", 0), "output_length", 0)
    hashes = tuple(_integers(_field(fields, "hash_ids"), "hash_ids"))
    full = prompt // block_tokens
    if not full <= len(hashes) <= -(-prompt // block_tokens):
        needed = f"{full:,}" if prompt % block_tokens == 0 else f"{full:,} or {full + 1:,}"
        words = f"{len(hashes):,} hash_ids for input_length {prompt:,}"
        raise BadRowError(f"{words}; blocks of {block_tokens:,} tokens need {needed}")
    if len(set(hashes)) != len(hashes):
        raise BadRowError("a prompt has the same hash_id twice; an id stands for a block and all blocks before it")
    return Row(when, prompt, answer, hashes, block_tokens)


def _from_token_ids(fields: Fields, block_tokens: int | None) -> Row:
    name = next((name for name in _TOKEN_IDS if name in fields), _TOKEN_IDS[0])
    ids = _integers(_field(fields, name), name)
    if not ids:
        raise BadRowError(f"{name} is empty")
    when = None
    if "arrival_seconds" in fields:
        when = nanoseconds(fields["arrival_seconds"], "arrival_seconds")
    elif "timestamp" in fields:
        when = nanoseconds(fields["timestamp"], "timestamp", 1000)
    stated = next((name for name in _ANSWER if name in fields), None)
    answer = 0 if stated is None else tokens(fields[stated], stated, 0)
    if block_tokens is None:
        return Row(when, len(ids), answer)
    return Row(when, len(ids), answer, _chain(ids, block_tokens), block_tokens)


def _chain(ids: array[int], block_tokens: int) -> tuple[int, ...]:
    """The hash of every full block: of its tokens, and of the hash of the block before it."""
    data, size, before, names = ids.tobytes(), ids.itemsize * block_tokens, b"", []
    for start in range(0, len(data) - size + 1, size):
        before = blake2b(data[start : start + size], digest_size=8, salt=before).digest()
        names.append(int.from_bytes(before, "little"))
    return tuple(names)


def _integers(value: object, name: str) -> array[int]:
    try:
        if isinstance(value, list) and set(map(type, value)) <= {int}:  # array would take a bool for a number
            return array("Q", value)
    except OverflowError:
        pass
    raise BadRowError(f"{name} is not a list of whole numbers from 0 to {_MOST_ID}")


def _field(fields: Fields, name: str) -> object:
    if name not in fields:
        raise BadRowError(f"{name} is missing")
    return fields[name]


# `json.loads` with an option makes a new decoder for every line.
_DECODER = json.JSONDecoder(parse_constant=refuse_constant)
