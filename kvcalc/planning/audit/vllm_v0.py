"""Checks the numbers of vLLM V0: its blocks, and those of its swap space.

Source: executor_base.py and worker.py, vLLM 0.8.
"""

from __future__ import annotations

from kvcalc.engines.rounding import ceil_div
from kvcalc.engines.vllm.layers import layers_of
from kvcalc.engines.vllm.pages import STATE
from kvcalc.engines.vllm.releases import rules_of
from kvcalc.errors import ModelError
from kvcalc.planning.audit.figures import Figure, check_count, given
from kvcalc.planning.audit.setup import Setup
from kvcalc.planning.audit.vllm_pool import BY_BLOCKS, BY_GROUP, Pool, engine_of, pool_figures
from kvcalc.planning.logs import Log, Record

_GIB = 2**30
# Source: --swap-space, vLLM 0.8.
_SWAP_GIB = "4"


def check_v0(log: Log, setup: Setup) -> list[Figure]:
    """Check V0: attention layers keep all tokens, states are outside the pool, and the swap space has blocks too."""
    engine = engine_of(setup)
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
    pool = Pool(block, block_size, len(stages), setup.context_tokens / block_size)
    rule = BY_GROUP if len(stages) > 1 else BY_BLOCKS
    return figures + pool_figures(log, pool, rule, setup)


def _check_swap(record: Record, stated: str | None, block: int) -> Figure:
    """Check the blocks of the swap space. Another whole number of GiB is an input if the log does not have its size."""
    printed, swap = int(record.parts["cpu_blocks"]), stated or _SWAP_GIB
    blocks = int(float(swap) * _GIB) // block
    other = ceil_div(printed * block, _GIB)
    if stated is None and printed != blocks and other * _GIB // block == printed:
        words = f"an input: blocks of {block:,} bytes in a swap space of {other} GiB"
        return given(record, "cpu_blocks", record.name, "blocks", words)
    words = f"swap space of {swap} GiB // {block:,} bytes per block"
    return check_count(record, "cpu_blocks", record.name, blocks, "blocks", words)
