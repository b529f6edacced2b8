"""TensorRT-LLM's numbers: the bytes of a pool of so many tokens, its blocks, and the blocks of the longest sequence.

Source: resource_manager.py and kvCacheManager.cpp of TensorRT-LLM at commit 001541bad83b.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvcalc.memory.engines.rounding import ceil_div, round_up
from kvcalc.model.spec import ModelSpec
from kvcalc.planning.audit.figures import Figure, check_count, check_size, given, parse_printed
from kvcalc.planning.audit.setup import Reading, Setup
from kvcalc.planning.logs import Log

_INPUT = "as many as the memory holds: an input"
# 64 and 128 in older builds and examples, 32 by default now.
_BLOCKS = ("32", "64", "128", "16")


def readings(log: Log, spec: ModelSpec) -> Iterator[Reading]:
    """The block as the log says, else the default and then others engines were built with."""
    stated = log.text("tokens_per_block")
    if stated is not None:
        yield Reading({"tokens-per-block": stated}, (), check)
        return
    for block in _BLOCKS:
        yield Reading({"tokens-per-block": block}, (f"{block} tokens a block",), check)


def check(log: Log, setup: Setup) -> list[Figure]:
    """The pool's bytes for its tokens; blocks, which must hold them; the longest sequence's blocks."""
    found = setup.pool()
    block = found["block_size"]
    token = found["bytes_per_block"] // block
    figures: list[Figure] = []
    counts = log.named("pool", "tokens")
    for record in counts:
        text = record.parts["tokens"]
        figures.append(given(record, "tokens", text, "tokens", _INPUT))
        if "size" in record.parts:
            words = f"{int(text):,} tokens x {token:,} bytes"
            figures.append(
                check_size(record, "pool_bytes", parse_printed(record.parts["size"]), int(text) * token, words)
            )
    for record in log.named("pool_bytes"):
        tokens = round_up(int(counts[0].parts["tokens"]), block) if counts else None
        if tokens is None:
            figures.append(given(record, record.name, record.parts["bytes"], "bytes", "no tokens in the log: an input"))
        else:
            words = f"{tokens:,} tokens in whole blocks x {token:,} bytes"
            figures.append(check_count(record, record.name, record.parts["bytes"], tokens * token, "bytes", words))
    for record in log.named("blocks"):
        text = record.parts["blocks"]
        if not counts:
            figures.append(given(record, "num_blocks", text, "blocks", _INPUT))
            continue
        tokens = int(counts[0].parts["tokens"])
        words = f"{tokens:,} tokens / {block} a block"
        figures.append(check_count(record, "num_blocks", text, ceil_div(tokens, block), "blocks", words))
    for record in log.named("pages"):
        longest = int(log.text("block_window") or setup.context_tokens)
        words = f"{longest:,} tokens / {block} a block"
        figures.append(
            check_count(record, "blocks_per_sequence", record.parts["pages"], ceil_div(longest, block), "blocks", words)
        )
    return figures
