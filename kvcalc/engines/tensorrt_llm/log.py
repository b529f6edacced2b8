"""Reads TensorRT-LLM's log, and checks its numbers: the pool's bytes and blocks, and those of the longest sequence.

Source: the executor, resource_manager.py and kvCacheManager.cpp (KVCacheManager::calculateMaxNumBlocks) of TensorRT-LLM
at commit 001541bad83b; lines in public threads.
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from functools import partial
from itertools import product

from kvcalc.engines.log import LogReader, Reading, Setup, best_stage
from kvcalc.engines.log_lines import UNEXPLAINED, Figure, Log, Record, parse_printed
from kvcalc.engines.rounding import ceil_div, round_up
from kvcalc.engines.tensorrt_llm.engine import TensorrtLlm
from kvcalc.engines.tensorrt_llm.hybrid import state_parts
from kvcalc.model.caches import RecurrentState
from kvcalc.model.spec import ModelSpec, distinct_caches
from kvcalc.releases import release_of, stable_of

_INPUT = "an input: as many as fit in the memory"
_AUTO_DEPLOY = "an input: AutoDeploy's manager counts blocks only; its caches are tensors of the graph"
# The share of the free memory for the pool (kDefaultGpuMemFraction).
_FRACTION = "0.9"
# The default is 32. Older builds and examples use 64 and 128.
_BLOCKS = ("32", "64", "128", "16")


def check(from_memory: bool, log: Log, setup: Setup) -> list[Figure]:
    """Check the bytes of the pool's tokens, the blocks they need, and the blocks of the longest sequence."""
    pool = setup.pool()
    block = pool.block_size
    token = pool.bytes_per_block // block
    figures: list[Figure] = []
    counts = log.named("pool", "tokens")
    for record in counts:
        figures.append(record.as_input("tokens", "tokens", "tokens", _INPUT))
        if "size" in record.parts and log.text("fake_cache") is not None:
            figures.append(record.as_input("size", "pool_bytes", "bytes", _AUTO_DEPLOY))
        elif "size" in record.parts:
            tokens = int(record.parts["tokens"])
            words = f"{tokens:,} tokens x {token:,} bytes"
            figures.append(record.check_size("size", "pool_bytes", tokens * token, words))
    figures += _check_available(log, token, block, from_memory)
    # The tokens in the first pool line, or None if the log has no such line.
    held = int(counts[0].parts["tokens"]) if counts else None
    for record in log.named("pool_bytes"):
        if held is None:
            figures.append(record.as_input("bytes", record.name, "bytes", "an input: the log has no tokens"))
        else:
            tokens = round_up(held, block)
            words = f"{tokens:,} tokens in whole blocks x {token:,} bytes"
            figures.append(record.check_count("bytes", record.name, tokens * token, "bytes", words))
    for record in log.named("blocks"):
        if held is None:
            figures.append(record.as_input("blocks", "num_blocks", "blocks", _INPUT))
        else:
            words = f"{held:,} tokens / {block} per block"
            figures.append(record.check_count("blocks", "num_blocks", ceil_div(held, block), "blocks", words))
    for record in log.named("states"):
        figures += _check_states(record, setup)
    longest = int(log.text("block_window") or setup.context_tokens)
    words = f"{longest:,} tokens / {block} per block"
    for record in log.named("pages"):
        blocks = ceil_div(longest, block)
        figures.append(record.check_count("pages", "blocks_per_sequence", blocks, "blocks", words))
    return figures


def _check_states(record: Record, setup: Setup) -> list[Figure]:
    """Check the states of the requests that may run (PythonMambaCacheManager, mamba_cache_manager.py)."""
    slots, conv, ssm = int(record.parts["slots"]), 0, 0
    for cache, num_layers in distinct_caches(setup.share):
        if isinstance(cache, RecurrentState):
            inputs, state = state_parts(setup.spec, cache)
            conv, ssm = conv + num_layers * inputs, ssm + num_layers * state
    sizes = {"conv": ("conv_state_bytes", conv), "ssm": ("ssm_state_bytes", ssm)}
    rule = "an input: the requests that may run"
    figures = [record.as_input("slots", "max_mamba_cache_size", "states", rule)]
    return figures + record.check_sizes(sizes, slots, f"{slots:,} requests x {{}}")


def _check_available(log: Log, token: int, block: int, from_memory: bool) -> list[Figure]:
    """Check the free memory, of which the pool takes a share, against the pool's blocks.

    As many tokens as fit take blocks that are rounded up; newer releases take whole blocks that fit. So the memory is
    known to a block. Memory that does not lead to the blocks is an input, unless `from_memory`.
    """
    fraction, figures = Fraction(log.text("memory_fraction") or _FRACTION), []
    for record in log.named("available"):
        blocks, figure = _num_blocks(log, block), None
        if blocks is not None:
            available = round(block * token / fraction)
            printed = parse_printed(record.parts["available"]).middle
            nearest = min(max(printed, (blocks - 1) * available), (blocks + 1) * available)
            words = f"{blocks:,} blocks of {block} x {token:,} bytes, give or take one, / {float(fraction):g}"
            figure = record.check_size("available", "available_bytes", nearest, words)
        if figure is None or (figure.verdict == UNEXPLAINED and not from_memory):
            figure = record.as_input("available", "available_bytes", "bytes", "an input: the free memory")
        figures.append(figure)
    return figures


def _num_blocks(log: Log, block: int) -> int | None:
    """The blocks of the pool, or None if the log has neither them nor the pool's tokens."""
    for record in log.named("blocks", "pool"):
        return int(record.parts["blocks"]) if "blocks" in record.parts else ceil_div(int(record.parts["tokens"]), block)
    return None


def _releases(log: Log, spec: ModelSpec) -> list[tuple[str, tuple[str, ...]]]:
    """The log's release. Otherwise the newest stable one, then the newest one if it has other rules for the model.

    Each has a remark.
    """
    if log.release is not None:
        return [(log.release, ())]
    stable, newest = stable_of(log.engine), TensorrtLlm.known_releases()[-1]
    if TensorrtLlm.at(spec.model_type, release_of(log.engine)) is TensorrtLlm.at(spec.model_type, None):
        return [(stable, ())]
    return [(stable, (f"the rules of {stable}",)), (newest, (f"the rules of {newest}",))]


class TensorrtLlmLog(LogReader):
    """Reads TensorRT-LLM's log."""

    def readings(self, log: Log, spec: ModelSpec) -> Iterator[Reading]:
        """The block size in the log. Otherwise the default, then the other sizes that engines were built with.

        The free memory must lead to the pool first. If it does not, it is an input, unless the log says the pool's
        share.
        """
        stated = log.text("tokens_per_block")
        blocks = _BLOCKS if stated is None else (stated,)
        # The pool may be smaller than the default share of the free memory, for a reason that is not in the log.
        may_be_smaller = log.text("memory_fraction") is None or log.text("max_tokens") is not None
        froms = (True, False) if log.named("available") and may_be_smaller else (True,)
        for from_memory, block, (release, words) in product(froms, blocks, _releases(log, spec)):
            taken = () if stated is not None else (f"{block} tokens per block",)
            checked = partial(best_stage, partial(check, from_memory))
            yield Reading({"tokens-per-block": block}, (*taken, *words), checked, release=release)

    def tensor_parallel_size(self, log: Log) -> int:
        """1 with attention DP: every rank holds a copy of the attention (Mapping.dp_size, mapping.py)."""
        size = super().tensor_parallel_size(log)
        return 1 if log.flag("enable_attention_dp") else size


LOG = TensorrtLlmLog()
