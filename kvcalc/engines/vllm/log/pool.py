"""Checks the numbers about vLLM's pool: its memory, blocks, tokens and the requests of full length that it holds.

Source: kv_cache_utils.py, vLLM 0.33.0. V0: executor_base.py and worker.py, vLLM 0.8.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import zip_longest

from kvcalc.engines.log import Setup
from kvcalc.engines.log_lines import EQUAL, Figure, Log, Printed, Record, count_equal, parse_printed
from kvcalc.engines.rounding import ceil_div
from kvcalc.engines.vllm.engine import Vllm
from kvcalc.engines.vllm.layers import layers_of
from kvcalc.engines.vllm.pages import STATE
from kvcalc.engines.vllm.releases import Rules, rules_of
from kvcalc.errors import ModelError
from kvcalc.memory.kv_cache import most_that_fit
from kvcalc.records import NamedTuple

# Sizes are rounded to two decimals, and 22.50 is printed as 22.5 (see eugr/spark-vllm-docker#396).
_DECIMALS = 2

_GIB = 2**30
# Source: --swap-space, vLLM 0.8.
_SWAP_GIB = "4"

_INPUT_MEMORY = "an input: the memory left"


class _Pool(NamedTuple):
    """One device's pool: bytes and tokens per block, groups that share it, and blocks of a full-length request.

    With decode context parallelism, the tokens of a block are those on all ranks that divide them.
    """

    block_bytes: int
    block_size: int
    num_groups: int
    request_blocks: float


class _Rule(NamedTuple):
    """A function from pool, blocks and length to tokens, and the format of its description."""

    tokens: Callable[[_Pool, int, int], int]
    words: str


# The rule for each value of `Rules.tokens`. Releases that count by blocks have one group only.
_BY_GROUP = _Rule(
    lambda pool, blocks, length: blocks // pool.num_groups * pool.block_size,
    "{blocks:,} blocks // {pool.num_groups} x {pool.block_size:,}",
)
_BY_BLOCKS = _Rule(lambda pool, blocks, length: blocks * pool.block_size, "{blocks:,} blocks x {pool.block_size}")
_BY_REQUESTS = _Rule(
    lambda pool, blocks, length: int(blocks / pool.request_blocks * length),
    "int({blocks:,} blocks / {pool.request_blocks:,g} x {length:,})",
)
_TOKENS = {"group": _BY_GROUP, "blocks": _BY_BLOCKS, "requests": _BY_REQUESTS}


def check_v1(rules: Rules, log: Log, setup: Setup) -> list[Figure]:
    """Check V1: one pool of blocks, in which every group holds a request at full length."""
    found = setup.pool()
    plan = _engine_of(setup).plan(setup.share, setup.dtype)
    block, tokens = plan.block_bytes, setup.context_tokens
    # In a model with states only, one block is as long as a request, as in kvcalc's vLLM rules.
    block_tokens = min(plan.block_sizes, default=tokens) * setup.engine.token_ranks
    pool = _Pool(block, block_tokens, len(plan.groups), plan.printed_blocks(tokens))
    words = "the smallest with a page that holds a state"
    figures = [
        record.check_count("block_size", record.name, found.block_size, "tokens", words)
        for record in log.named("attention_block_size")
    ]
    for record in log.named("request_bytes"):
        needed, blocks = plan.checked_bytes(tokens), plan.request_blocks(tokens)
        words = f"{blocks:,} blocks of {needed // blocks:,} bytes for {tokens:,} tokens"
        figures.append(record.check_size("needed", record.name, needed, words, _DECIMALS))
    figures += [_longest(log, setup, record) for record in log.named("max_model_len")]
    return figures + _pool_figures(log, pool, _TOKENS[rules.tokens], setup)


def _longest(log: Log, setup: Setup, record: Record) -> Figure:
    """Check the longest request: it fits in the memory, and one more token does not."""
    memories = [_printed_gib(memory.parts["memory"]) for memory in log.named("available_memory")]
    if not memories:
        return record.as_input("longest", record.name, "tokens", "an input: the log has no memory")

    plan = _engine_of(setup).plan(setup.share, setup.dtype)

    def needed(tokens: int) -> int:
        return plan.checked_bytes(tokens) if tokens else 0

    longest = int(record.parts["longest"])
    explained = any(needed(longest) <= memory.high and needed(longest + 1) > memory.low for memory in memories)
    memory, most = memories[0].middle, setup.context_tokens
    # If a longer request takes no more memory, the engine's search ends at the model's length.
    fitting = most if needed(most + 1) <= memory else most_that_fit(needed, memory, most + 1)
    fitting = longest if explained else fitting
    words = f"the longest request in {memories[0].text}, within rounding"
    return record.check_count("longest", record.name, fitting, "tokens", words)


def check_v0(log: Log, setup: Setup) -> list[Figure]:
    """Check V0: attention layers keep all tokens, states are outside the pool, and the swap space has blocks too."""
    engine = _engine_of(setup)
    chosen, stages = engine.chosen, engine.stages(setup.share.num_layers)
    layers = layers_of(setup.share, setup.dtype, chosen, engine.states, rules_of(None))
    kept = [layer for layer in layers if layer.page.kind != STATE]
    if not kept:
        raise ModelError(f"{setup.spec.name}: vLLM V0 has no cache blocks for this model")
    block_size = chosen.block_size
    # Every stage has blocks of its own layers. The stage with most of them has the fewest blocks.
    row = max(sum(la.page.token_bytes for la in kept if first <= la.number <= last) for first, last in stages)
    block = block_size * row
    figures = [_check_swap(record, log.text("swap_space_gib"), block) for record in log.named("num_cpu_blocks")]
    # A scheduler for each stage has its part of the blocks, which limits the tokens of a request.
    pool = _Pool(block, block_size, len(stages), setup.context_tokens / block_size)
    rule = _BY_GROUP if len(stages) > 1 else _BY_BLOCKS
    return figures + _pool_figures(log, pool, rule, setup)


def _check_swap(record: Record, stated: str | None, block: int) -> Figure:
    """Check the blocks of the swap space. Another whole number of GiB is an input if the log does not have its size."""
    printed, swap = int(record.parts["cpu_blocks"]), stated or _SWAP_GIB
    blocks = int(float(swap) * _GIB) // block
    other = ceil_div(printed * block, _GIB)
    if stated is None and printed != blocks and other * _GIB // block == printed:
        words = f"an input: blocks of {block:,} bytes in a swap space of {other} GiB"
        return record.as_input("cpu_blocks", record.name, "blocks", words)
    words = f"swap space of {swap} GiB // {block:,} bytes per block"
    return record.check_count("cpu_blocks", record.name, blocks, "blocks", words)


def _pool_figures(log: Log, pool: _Pool, rule: _Rule, setup: Setup) -> list[Figure]:
    """Check the numbers about the pool. The memory is an input. It is printed with two decimals, so a range of block
    counts matches it.

    Each rank has its own memory. A number must match one of the ranks, and numbers printed together must match the same
    number of blocks.
    """
    memories, length = log.named("available_memory"), setup.context_tokens
    words = f"{_INPUT_MEMORY}; blocks of {pool.block_bytes:,} bytes"
    figures = [memory.as_input("memory", memory.name, "bytes", words) for memory in memories]
    ranges = [_fitting(_printed_gib(memory.parts["memory"]), pool) for memory in memories]
    stated, chosen = log.named("num_gpu_blocks"), log.text("blocks_override")
    for record in log.named("num_gpu_blocks", "fitting_blocks"):
        number = record.parts["gpu_blocks"]
        if number == chosen:
            figures.append(record.as_input("gpu_blocks", record.name, "blocks", "an input: --num-gpu-blocks-override"))
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
            figures.append(concurrency.as_input("concurrency", concurrency.name, "x", words))
            continue
        best = max(made, key=count_equal)
        if not blocks and best[0].verdict == EQUAL:
            solved = f"{best[0].rule}; an input: the log has no memory"
            best[0] = tokens.as_input("tokens", tokens.name, "tokens", solved)
        figures += best
    return [_of_the_least(figure, setup.ranks) for figure in figures] if memories else figures


def _of_the_least(figure: Figure, ranks: int) -> Figure:
    """Name the reason of a number that is too small if other ranks may have had less memory."""
    if ranks == 1 or (figure.difference or 0) >= 0:
        return figure
    words = f"the rank with the least memory counts, and the log may lack the line of some of the {ranks} ranks"
    return figure._replace(rule=f"{figure.rule}; {words}")


def _pair(
    tokens: Record | None, concurrency: Record | None, blocks: int, pool: _Pool, rule: _Rule, length: int
) -> list[Figure]:
    """Check the printed tokens and concurrency, if present, against one number of blocks."""
    figures = []
    if tokens is not None:
        counted = rule.tokens(pool, blocks, length)
        text = rule.words.format(pool=pool, blocks=blocks, length=length)
        figures.append(tokens.check_count("tokens", tokens.name, counted, "tokens", text))
    if concurrency is not None:
        text = f"{blocks:,} blocks / {pool.request_blocks:,g} per request"
        ratio = blocks / pool.request_blocks
        figures.append(concurrency.check_ratio("concurrency", concurrency.name, ratio, text))
    return figures


def _printed_gib(text: str) -> Printed:
    """A size as vLLM rounds it. A number without a unit is in GiB."""
    return parse_printed(text if text[-1].isalpha() else f"{text} GiB", _DECIMALS)


def _fitting(memory: Printed, pool: _Pool) -> list[int]:
    """The numbers of blocks that fit in sizes that round to this one. The number for the printed size is first.

    If less than nothing is left, there are no blocks.
    """
    says = memory.middle // pool.block_bytes
    span = range(max(0, int(memory.low // pool.block_bytes)), max(0, int(memory.high // pool.block_bytes)) + 1)
    return sorted(span, key=lambda blocks: abs(blocks - says))


def _solve(tokens: int, pool: _Pool, rule: _Rule, length: int) -> list[int]:
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


def _check_blocks(record: Record, blocks: int, ranges: list[list[int]], memories: list[Record], pool: _Pool) -> Figure:
    """Check the number of blocks against the printed memory. It is an input if the log has no memory."""
    if not ranges:
        return record.as_input("gpu_blocks", record.name, "blocks", "an input: the log has no memory")
    words, computed = f"as many of {pool.block_bytes:,} bytes as fit, within rounding", blocks
    if not any(blocks in span for span in ranges):
        words, computed = f"{memories[0].parts['memory']} // {pool.block_bytes:,} bytes per block", ranges[0][0]
    return record.check_count("gpu_blocks", record.name, computed, "blocks", words)


def _engine_of(setup: Setup) -> Vllm:
    """The engine's rules. Raises ModelError (exit 3) for encoders, which have no pool."""
    if not isinstance(setup.engine, Vllm):
        raise ModelError(f"{setup.spec.name}: vLLM's pool for encoders is not counted")
    return setup.engine
