"""Checks SGLang's numbers: the bytes of its pools. The tokens in a pool depend on the memory, so they are an input.

Source: memory_pool.py, SGLang 0.5.23. Before pull request 11309 its log did not include the indexer's keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

from kvcalc.memory.dtypes import DTYPES, bytes_of
from kvcalc.memory.engines.sglang.layers import FULL, STATE, WINDOW, Layer, is_sparse, layers_of
from kvcalc.memory.kv_cache import stored_cache_bytes
from kvcalc.model.caches import HEADS_CACHES, IndexerKeys, RecurrentState
from kvcalc.model.spec import ModelSpec
from kvcalc.planning.audit.figures import Figure, check_count, check_size, check_sizes, count_equal, given
from kvcalc.planning.audit.setup import Reading, Setup
from kvcalc.planning.logs import Log, Record

_INPUT = "an input: as many as fit in the memory"
_OF_DRAFTS = "an input: the pool of the draft model, which the log does not describe"
_SIZES = (("k", "k_bytes"), ("v", "v_bytes"), ("kv", "kv_bytes"))


class Row(NamedTuple):
    """The bytes of one token's K and V in all layers of a pool. MLA has one row for both, counted as K."""

    k: int
    v: int


def readings(log: Log, spec: ModelSpec) -> Iterator[Reading]:
    """The settings in the log. If the model has an indexer, also a reading without the indexer's keys."""
    settings = {}
    for fact in ("page_size", "swa_full_tokens_ratio"):
        text = log.text(fact)
        if text is not None and not (fact == "page_size" and is_sparse(spec)):
            settings[fact.replace("_", "-")] = text
    yield Reading(settings, (), partial(check, False))
    if is_sparse(spec):
        taken = ("the indexer's keys are not included, as before pull request 11309",)
        yield Reading(settings, taken, partial(check, True))


def check(without_indexer: bool, log: Log, setup: Setup) -> list[Figure]:
    """Check the lines of pools, states and tokens."""
    layers = layers_of(setup.share, setup.dtype)
    if without_indexer:
        layers = [layer for layer in layers if not isinstance(layer.cache, IndexerKeys)]
    figures: list[Figure] = []
    totals = log.named("max_total_num_tokens")
    pools = log.named("pool")
    drafts = log.text("drafts") is not None or any("drafted_ssm" in record.parts for record in log.named("states"))
    for record in pools:
        found = _check_pool(record, totals, layers, setup)
        if drafts and figures and not count_equal(found):
            # The pool of the draft model comes after the model's own.
            found = [given(record, part, name, "bytes", _OF_DRAFTS) for part, name in _SIZES if part in record.parts]
        figures += found
    tokens = {record.parts["tokens"] for record in pools if "tokens" in record.parts}
    for record in totals:
        if tokens:
            total = int(record.parts["total"])
            nearest = min(map(int, tokens), key=lambda n: abs(n - total))
            figures.append(check_count(record, "total", record.name, nearest, "tokens", "the pool's tokens"))
        else:
            figures.append(given(record, "total", record.name, "tokens", _INPUT))
    for record in log.named("both_pools"):
        figures += _check_both_pools(record, layers, setup)
    for record in log.named("states"):
        figures += _check_states(record, layers, log.text("draft_tokens"))
    return figures


def _check_pool(record: Record, totals: list[Record], layers: list[Layer], setup: Setup) -> list[Figure]:
    """Check a pool's line against the pool of all tokens and the pool of windows (if any); the best match counts."""
    stated = record.parts.get("tokens") or next((total.parts["total"] for total in totals), None)
    if stated is None:
        return []
    page = setup.pool()["block_size"]
    tries = []
    for pool in (FULL, WINDOW):
        rows = [_row(layer, setup) for layer in layers if layer.pool == pool]
        if rows:
            k, v = sum(row.k for row in rows), sum(row.v for row in rows)
            sizes = {part: (name, size) for (part, name), size in zip(_SIZES, (k, v, k + v))}
            whose = " in the sliding-window layers" if pool == WINDOW else ""
            words = f"({int(stated):,} tokens + a page of {page}) x {{}}{whose}"
            tries.append(check_sizes(record, sizes, int(stated) + page, words))
    best = max(tries, key=count_equal)
    if "tokens" in record.parts:
        return [given(record, "tokens", "tokens", "tokens", _INPUT), *best]
    return best


def _row(layer: Layer, setup: Setup) -> Row:
    if not isinstance(layer.cache, HEADS_CACHES):
        return Row(layer.num_layers * layer.bytes, 0)
    k = stored_cache_bytes(layer.cache._replace(v_head_dim=0), 1, setup.dtype)
    return Row(layer.num_layers * k, layer.num_layers * (layer.bytes - k))


def _check_both_pools(record: Record, layers: list[Layer], setup: Setup) -> list[Figure]:
    """Check the bytes of the pools of all tokens and of windows together (SWAKVPool, mem_cache/swa_memory_pool.py)."""
    if "full" not in record.parts:
        return [given(record, "both", "both_pools_bytes", "bytes", "an input: the line has no numbers of tokens")]
    page, total, words = setup.pool()["block_size"], 0, []
    for pool in (FULL, WINDOW):
        rows = int(record.parts[pool]) + page
        size = sum(layer.num_layers * layer.bytes for layer in layers if layer.pool == pool)
        total += rows * size
        words.append(f"{rows:,} x {size:,} bytes")
    return [check_size(record, "both", "both_pools_bytes", total, " + ".join(words))]


def _check_states(record: Record, layers: list[Layer], draft_tokens: str | None) -> list[Figure]:
    """Check the states: one for each slot and one extra. The convolution's inputs are in bf16.

    While drafted tokens are checked, each slot also has a state for every one of them, and the inputs of all of them in
    one window (MambaPool, mem_cache/memory_pool.py, SGLang 0.5.23).
    """
    slots = int(record.parts["slots"]) + 1
    drafted = None if draft_tokens is None else int(draft_tokens)
    conv = window = total = 0
    for layer in layers:
        if layer.pool == STATE and isinstance(layer.cache, RecurrentState):
            state = layer.cache
            column = layer.num_layers * bytes_of(state.conv_channels, DTYPES["bf16"])
            conv += column * (state.conv_kernel - 1)
            window += column * ((drafted or 0) + state.conv_kernel - 2)
            total += layer.num_layers * layer.bytes

    sizes = {"conv": ("conv_state_bytes", conv), "ssm": ("ssm_state_bytes", total - conv)}
    figures = [given(record, "slots", "max_mamba_cache_size", "states", _INPUT)]
    figures += check_sizes(record, sizes, slots, f"({slots - 1:,} + 1 states) x {{}}")
    names = {"drafted_ssm": "intermediate_ssm_bytes", "drafted_conv": "intermediate_conv_bytes"}
    if drafted is None:
        rule, printed = "an input: the log does not say how many tokens are drafted", names.keys() & record.parts
        return figures + [given(record, part, names[part], "bytes", rule) for part in sorted(printed)]
    sizes = {part: (names[part], size) for part, size in zip(names, (drafted * (total - conv), window))}
    words = f"({slots - 1:,} + 1 slots) x {{}} for {drafted} drafted tokens"
    return figures + check_sizes(record, sizes, slots, words)
