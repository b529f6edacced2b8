"""Checks the numbers about vLLM's pool: its memory, blocks, tokens and the requests of full length that it holds.

Source: kv_cache_utils.py, vLLM 0.33.0.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import zip_longest

from kvcalc.engines.vllm import Vllm
from kvcalc.errors import ModelError
from kvcalc.memory.kv_cache import most_that_fit
from kvcalc.planning.audit.figures import (
    EQUAL,
    UNEXPLAINED,
    Figure,
    Printed,
    check_count,
    check_ratio,
    count_equal,
    given,
    parse_printed,
)
from kvcalc.planning.audit.setup import Setup
from kvcalc.planning.logs import Log, Record
from kvcalc.records import NamedTuple

# Sizes are rounded to two decimals, and 22.50 is printed as 22.5 (see eugr/spark-vllm-docker#396).
DECIMALS = 2

_INPUT_MEMORY = "an input: the memory left"


class Pool(NamedTuple):
    """One device's pool: bytes and tokens per block, groups that share it, and blocks of a full-length request.

    With decode context parallelism, the tokens of a block are those on all ranks that divide them.
    """

    block_bytes: int
    block_size: int
    num_groups: int
    request_blocks: float


class Rule(NamedTuple):
    """A function from pool, blocks and length to tokens, and the format of its description."""

    tokens: Callable[[Pool, int, int], int]
    words: str


# The rule for each value of `Rules.tokens`. Releases that count by blocks have one group only.
BY_GROUP = Rule(
    lambda pool, blocks, length: blocks // pool.num_groups * pool.block_size,
    "{blocks:,} blocks // {pool.num_groups} x {pool.block_size:,}",
)
BY_BLOCKS = Rule(lambda pool, blocks, length: blocks * pool.block_size, "{blocks:,} blocks x {pool.block_size}")
_BY_REQUESTS = Rule(
    lambda pool, blocks, length: int(blocks / pool.request_blocks * length),
    "int({blocks:,} blocks / {pool.request_blocks:,g} x {length:,})",
)
TOKENS = {"group": BY_GROUP, "blocks": BY_BLOCKS, "requests": _BY_REQUESTS}


def pool_figures(log: Log, pool: Pool, rule: Rule, setup: Setup) -> list[Figure]:
    """Check the numbers about the pool. The memory is an input. It is printed with two decimals, so a range of block
    counts matches it.

    Each rank has its own memory. A number must match one of the ranks, and numbers printed together must match the same
    number of blocks.
    """
    memories, length = log.named("available_memory"), setup.context_tokens
    words = f"{_INPUT_MEMORY}; blocks of {pool.block_bytes:,} bytes"
    figures = [given(memory, "memory", memory.name, "bytes", words) for memory in memories]
    ranges = [_fitting(printed_gib(memory.parts["memory"]), pool) for memory in memories]
    stated, chosen = log.named("num_gpu_blocks"), log.text("blocks_override")
    for record in log.named("num_gpu_blocks", "fitting_blocks"):
        number = record.parts["gpu_blocks"]
        if number == chosen:
            figures.append(given(record, "gpu_blocks", record.name, "blocks", "an input: --num-gpu-blocks-override"))
        else:
            figures.append(_check_blocks(record, int(number), ranges, memories, pool))
    blocks = [[int(record.parts["gpu_blocks"])] for record in stated] or ranges
    if chosen is not None:
        blocks = [[int(chosen)]]
    for tokens, concurrency in zip_longest(log.named("kv_cache_tokens"), log.named("max_concurrency")):
        known = blocks
        if not blocks and tokens:
            known = [_solve(int(tokens.parts["tokens"].replace(",", "")), pool, rule, length)]
        made = [_pair(tokens, concurrency, n, pool, rule, length) for span in known for n in span]
        if not made:
            # Tokens in the log would have determined the blocks, so the log has only a concurrency.
            words = "an input: the log has no memory and no blocks"
            figures.append(given(concurrency, "concurrency", concurrency.name, "x", words))
            continue
        best = max(made, key=count_equal)
        if not blocks and tokens and best[0].verdict == EQUAL:
            solved = f"{best[0].rule}; an input: the log has no memory"
            best[0] = given(tokens, "tokens", tokens.name, "tokens", solved)
        figures += best
    return [_of_the_least(figure, setup.ranks) for figure in figures] if memories else figures


def _of_the_least(figure: Figure, ranks: int) -> Figure:
    """Name the reason of a number that is too small if other ranks may have had less memory."""
    if ranks == 1 or figure.verdict != UNEXPLAINED or (figure.difference or 0) >= 0:
        return figure
    words = f"the rank with the least memory counts, and the log may lack the line of some of the {ranks} ranks"
    return figure._replace(rule=f"{figure.rule}; {words}")


def _pair(
    tokens: Record | None, concurrency: Record | None, blocks: int, pool: Pool, rule: Rule, length: int
) -> list[Figure]:
    """Check the printed tokens and concurrency, if present, against one number of blocks."""
    figures = []
    if tokens is not None:
        counted = rule.tokens(pool, blocks, length)
        text = rule.words.format(pool=pool, blocks=blocks, length=length)
        figures.append(check_count(tokens, "tokens", tokens.name, counted, "tokens", text))
    if concurrency is not None:
        text = f"{blocks:,} blocks / {pool.request_blocks:,g} per request"
        ratio = blocks / pool.request_blocks
        figures.append(check_ratio(concurrency, "concurrency", concurrency.name, ratio, text))
    return figures


def printed_gib(text: str) -> Printed:
    """A size as vLLM rounds it. A number without a unit is in GiB."""
    return parse_printed(text if text.endswith("B") else f"{text} GiB", DECIMALS)


def _fitting(memory: Printed, pool: Pool) -> list[int]:
    """The numbers of blocks that fit in sizes that round to this one. The number for the printed size is first.

    If less than nothing is left, there are no blocks.
    """
    says = memory.middle // pool.block_bytes
    span = range(max(0, int(memory.low // pool.block_bytes)), max(0, int(memory.high // pool.block_bytes)) + 1)
    return sorted(span, key=lambda blocks: abs(blocks - says))


def _solve(tokens: int, pool: Pool, rule: Rule, length: int) -> list[int]:
    """The numbers of blocks that give exactly these tokens. If there are none, the next number that gives more."""

    def tokens_of(blocks: int) -> int:
        return rule.tokens(pool, blocks, length)

    def most_below(limit: int) -> int:
        too_many = 1
        while tokens_of(too_many) <= limit:
            too_many *= 2
        return most_that_fit(tokens_of, limit, too_many)

    first = most_below(tokens - 1) + 1
    return list(range(first, max(most_below(tokens), first) + 1))


def _check_blocks(record: Record, blocks: int, ranges: list[list[int]], memories: list[Record], pool: Pool) -> Figure:
    """Check the number of blocks against the printed memory. It is an input if the log has no memory."""
    if not ranges:
        return given(record, "gpu_blocks", record.name, "blocks", "an input: the log has no memory")
    words, computed = f"as many of {pool.block_bytes:,} bytes as fit, within rounding", blocks
    if not any(blocks in span for span in ranges):
        words, computed = f"{memories[0].parts['memory']} // {pool.block_bytes:,} bytes per block", ranges[0][0]
    return check_count(record, "gpu_blocks", record.name, computed, "blocks", words)


def engine_of(setup: Setup) -> Vllm:
    """The engine's rules. Raises ModelError (exit 3) for encoders, which have no pool."""
    if not isinstance(setup.rules, Vllm):
        raise ModelError(f"{setup.spec.name}: vLLM's pool for encoders is not counted")
    return setup.rules
