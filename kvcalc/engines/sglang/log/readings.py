"""Checks SGLang's numbers: the bytes of its pools. The tokens in a pool depend on the memory, so they are an input.

Source: memory_pool.py, SGLang 0.5.23. Before pull request 11309 its log did not include the indexer's keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from functools import partial
from itertools import product

from kvcalc.engines.log import Reading, Setup, best_stage
from kvcalc.engines.log_lines import Figure, Log, Record, count_equal, parse_printed
from kvcalc.engines.sglang.deepseek_v4 import DEFAULT_RATIO, RULES, Rules, bytes_per_token, rings_of
from kvcalc.engines.sglang.layers import FULL, WINDOW, Layer, layers_of
from kvcalc.engines.sglang.pools import slot_of
from kvcalc.memory.kv_cache import stored_cache_bytes
from kvcalc.model.caches import HEADS_CACHES, IndexerKeys
from kvcalc.model.spec import ModelSpec, has_states, is_sparse
from kvcalc.records import NamedTuple

# Tried if the log has no page size, and no type of the states.
_PAGES = ("64", "128", "32", "16", "256")
_STATE_DTYPES = ("bfloat16", "float16")
# The default type of the cache depends on the device for sparse attention, and so do the rows of an fp8 cache
# (sglang/defaults.py).
_SPARSE = ((None, None), ("fp8", None), (None, "blackwell"))

_INPUT = "an input: as many as fit in the memory"
_OF_DRAFTS = "an input: the pool of the draft model, which the log does not describe"
_DRAFTED = (("drafted_ssm", "intermediate_ssm_bytes"), ("drafted_conv", "intermediate_conv_bytes"))
_SIZES = (("k", "k_bytes"), ("v", "v_bytes"), ("kv", "kv_bytes"))


class Row(NamedTuple):
    """The bytes of one token's K and V in all layers of a pool. MLA has one row for both, counted as K."""

    k: int
    v: int


def readings(log: Log, spec: ModelSpec) -> Iterator[Reading]:
    """The settings in the log, and the usual values of those that it does not have, the defaults first.

    If the model has an indexer, also readings without the indexer's keys.
    """
    if spec.model_type == "deepseek_v4":
        for rules, words in _RULES.items():
            yield Reading({}, (words,), partial(best_stage, partial(_check, rules)))
        return
    ratio, sparse = log.text("swa_full_tokens_ratio"), is_sparse(spec)
    settings = {} if ratio is None else {"swa-full-tokens-ratio": ratio}
    for keys, (kv_dtype, device), state_dtype, page in product(
        (True, False) if sparse else (True,), _SPARSE if sparse else _SPARSE[:1],
        _state_dtypes(log, spec), [None] if sparse else _pages(log),
    ):  # fmt: skip
        stored = None if state_dtype is None else spec._replace(state_dtype=state_dtype)
        taken = [] if keys else ["the indexer's keys are not included, as before pull request 11309"]
        if kv_dtype is not None:
            taken.append(f"a cache in {kv_dtype}, the default on another device")
        if device is not None:
            taken.append("the cache of B200 and B300")
        if state_dtype is not None:
            taken.append(f"states in {state_dtype}")
        if page is not None and log.text("page_size") is None:
            taken.append(f"pages of {page} tokens")
        given_settings = settings if page is None else {**settings, "page-size": page}
        checked = partial(best_stage, partial(check, not keys))
        yield Reading(given_settings, tuple(taken), checked, stored, kv_dtype=kv_dtype, device_class=device)


def _pages(log: Log) -> list[str | None]:
    """The page size in the log, or else the default and the usual sizes of which the printed tokens are whole pages."""
    stated, pools = log.text("page_size"), log.named("pool")
    if stated is not None or not pools:
        return [stated]
    tokens = [int(record.parts["tokens"]) for record in pools if "tokens" in record.parts]
    return [None, *(page for page in _PAGES if not any(number % int(page) for number in tokens))]


def _state_dtypes(log: Log, spec: ModelSpec) -> list[str | None]:
    """The type of the states in the log (--mamba-ssm-dtype), or else the config's and then the 16-bit types."""
    stated = log.text("state_dtype")
    if stated is not None or not (has_states(spec) and log.named("states")):
        return [stated]
    return [None, *_STATE_DTYPES]


def check(without_indexer: bool, log: Log, setup: Setup) -> list[Figure]:
    """Check the lines of pools, states and tokens."""
    layers = layers_of(setup.share, setup.dtype)
    if without_indexer:
        layers = [layer for layer in layers if not isinstance(layer.cache, IndexerKeys)]
    figures: list[Figure] = []
    totals = log.named("max_total_num_tokens")
    pools = log.named("pool")
    explained: set[str | None] = set()
    for record in pools:
        of_pool = _check_pool(record, totals, layers, setup)
        if not count_equal(of_pool) and record.parts.get("tokens") in explained:
            # The pool of the draft model comes after the model's own, and has as many tokens.
            of_pool = [
                record.as_input(part, name, "bytes", _OF_DRAFTS) for part, name in _SIZES if part in record.parts
            ]
        elif count_equal(of_pool):
            explained.add(record.parts.get("tokens"))
        figures += of_pool
    tokens = {record.parts["tokens"] for record in pools if "tokens" in record.parts}
    for record in totals:
        if tokens:
            total = int(record.parts["total"])
            nearest = min(map(int, tokens), key=lambda n: abs(n - total))
            figures.append(record.check_count("total", record.name, nearest, "tokens", "the pool's tokens"))
        else:
            figures.append(record.as_input("total", record.name, "tokens", _INPUT))
    for record in log.named("both_pools"):
        figures += _check_both_pools(record, log, layers, setup)
    for record in log.named("states"):
        figures += _check_states(record, log, layers)
    return figures


def _check_pool(record: Record, totals: list[Record], layers: list[Layer], setup: Setup) -> list[Figure]:
    """Check a pool's line against the pool of all tokens and the pool of windows (if any); the best match counts."""
    stated = record.parts.get("tokens") or next((total.parts["total"] for total in totals), None)
    if stated is None:
        return []
    page = setup.pool().block_size
    tries = []
    for pool in (FULL, WINDOW):
        rows = [_row(layer, setup) for layer in layers if layer.pool == pool]
        if rows:
            k, v = sum(row.k for row in rows), sum(row.v for row in rows)
            sizes = {part: (name, size) for (part, name), size in zip(_SIZES, (k, v, k + v))}
            whose = " in the sliding-window layers" if pool == WINDOW else ""
            words = f"({int(stated):,} tokens + a page of {page}) x {{}}{whose}"
            tries.append(record.check_sizes(sizes, int(stated) + page, words))
    if not tries:
        # A pipeline stage with states only has no such pool.
        return []
    best = max(tries, key=count_equal)
    if "tokens" in record.parts:
        return [record.as_input("tokens", "tokens", "tokens", _INPUT), *best]
    return best


def _row(layer: Layer, setup: Setup) -> Row:
    if not isinstance(layer.cache, HEADS_CACHES):
        return Row(layer.num_layers * layer.bytes, 0)
    k = stored_cache_bytes(layer.cache._replace(v_head_dim=0), 1, setup.dtype)
    return Row(layer.num_layers * k, layer.num_layers * (layer.bytes - k))


def _check_both_pools(record: Record, log: Log, layers: list[Layer], setup: Setup) -> list[Figure]:
    """Check the bytes of the pools of all tokens and of windows together (SWAKVPool, mem_cache/swa_memory_pool.py)."""
    tokens, page = _tokens_of_both(record, log, setup), setup.pool().block_size
    if tokens is None:
        return [record.as_input("both", "both_pools_bytes", "bytes", "an input: the log has no numbers of tokens")]
    total, words = 0, []
    for pool in (FULL, WINDOW):
        rows = tokens[pool] + page
        size = sum(layer.num_layers * layer.bytes for layer in layers if layer.pool == pool)
        total += rows * size
        words.append(f"{rows:,} x {size:,} bytes")
    return [record.check_size("both", "both_pools_bytes", total, " + ".join(words))]


def _tokens_of_both(record: Record, log: Log, setup: Setup) -> dict[str, int] | None:
    """The tokens of both pools: from the line itself, from the pools' own lines, or from max_total_num_tokens."""
    if "full" in record.parts:
        return {pool: int(record.parts[pool]) for pool in (FULL, WINDOW)}
    stated = sorted({int(pool.parts["tokens"]) for pool in log.named("pool") if "tokens" in pool.parts})
    if len(stated) == 2:
        return {WINDOW: stated[0], FULL: stated[1]}
    totals, page = log.named("max_total_num_tokens"), setup.pool().block_size
    if not totals:
        return None
    full = int(totals[0].parts["total"])
    ratio = Fraction(log.text("swa_full_tokens_ratio") or "0.8")
    return {FULL: full, WINDOW: int(full * ratio) // page * page}


def _check_states(record: Record, log: Log, layers: list[Layer]) -> list[Figure]:
    """Check the states: one for each slot and one extra. The convolution's inputs are in bf16.

    While drafted tokens are checked, each request that may run has a state for every one of them, and the inputs of all
    of them in one window or in one each (`kvcalc.engines.sglang.pools`). If the log says neither how many
    requests run nor how many tokens are checked, the states are read for both numbers, and the inputs are checked.
    """
    slots = int(record.parts["slots"]) + 1
    slot = slot_of(layers, 1, True)
    sizes = {"conv": ("conv_state_bytes", slot.inputs), "ssm": ("ssm_state_bytes", slot.states)}
    figures = [record.as_input("slots", "max_mamba_cache_size", "states", _INPUT)]
    figures += record.check_sizes(sizes, slots, f"({slots - 1:,} + 1 states) x {{}}")
    if "drafted_ssm" not in record.parts:
        return figures
    running = log.text("running_requests") or log.text("max_running_requests")
    requests = slots if running is None else min(slots, int(running) + 1)
    stated, printed = log.text("draft_tokens"), parse_printed(record.parts["drafted_ssm"])
    drafted = int(stated) if stated else printed.middle / (requests * slot.states) if slot.states else 0
    if round(drafted) < 1 or (stated is None and not printed.holds(round(drafted) * requests * slot.states)):
        rule = "an input: the log does not say how many tokens are drafted"
        return figures + [record.as_input(part, name, "bytes", rule) for part, name in _DRAFTED if part in record.parts]
    tokens = round(drafted)
    words = f"({requests - 1:,} + 1 requests) x {{}} for {tokens} checked tokens"
    tries = []
    for separate in (False, True):
        sizes = {part: (name, size) for (part, name), size in zip(_DRAFTED, slot_of(layers, tokens, separate))}
        tries.append(record.check_sizes(sizes, requests, words))
    closest = max(tries, key=count_equal)
    if stated is None:
        rule = f"an input: the states of {tokens} checked tokens"
        closest[0] = record.as_input("drafted_ssm", "intermediate_ssm_bytes", "bytes", rule)
    return figures + closest


# Checks SGLang's numbers for DeepSeek-V4: the bytes of a token, and the sizes of its pools.
# Source: DSV4PoolConfigurator, model_executor/pool_configurator.py, SGLang 0.5.12 to 0.5.23. The newest rules first.
_RULES = {
    Rules(256, True, True, False): "windows for the requests that may run",
    Rules(256, True, False, False): "windows for a share of the tokens",
    Rules(256, False, False, False): "windows for a share of the tokens, and pages without padding",
    RULES[0, 5, 15]: "windows for a share of the tokens, pages without padding, and states for 128 tokens",
    RULES[0,]: "windows for a share of the tokens, pages without padding, and all states for 128 tokens",
}


def _check(rules: Rules, log: Log, setup: Setup) -> list[Figure]:
    ratio = 0.0 if rules.for_requests else float(log.text("swa_full_tokens_ratio") or DEFAULT_RATIO)
    drafts = log.text("draft_tokens") is not None or log.text("drafts") is not None
    rings, figures = rings_of(drafts), []
    for record in log.named("v4_memory"):
        computed = bytes_per_token(setup.share, ratio, rings, rules)
        if drafts:
            # Room for one layer of the draft model.
            computed *= (setup.share.num_layers + 1) / setup.share.num_layers
        words = f"entries of a token, and {ratio:g} of its windows and states"
        figure = record.check_ratio("bytes", "bytes_per_full_token", computed, words)
        figures.append(figure._replace(printed=record.parts["bytes"], unit="bytes"))
    for record in log.named("v4_pools"):
        full, windows = int(record.parts["full"]), int(record.parts["windows"])
        figures.append(record.as_input("full", "full", "tokens", _INPUT))
        if ratio:
            page = 128 if windows % 256 else 256
            words = f"{ratio:g} of {full:,} tokens, in whole pages of {page}"
            figures.append(record.check_count("windows", "swa", int(full * ratio) // page * page, "tokens", words))
        else:
            figures.append(
                record.as_input("windows", "swa", "tokens", "an input: depends on the requests that may run")
            )
        for part, rate in (("c4", 4), ("c128", 128)):
            words = f"{full:,} tokens / {rate}"
            figures.append(record.check_count(part, part, full // rate, "slots", words))
        words = f"{windows:,} tokens / {rules.page} x {rings[0]}"
        figures.append(record.check_count("states", "c4_state", windows // rules.page * rings[0], "slots", words))
        if rules.heavy_per_page and "heavy" in record.parts:
            words, heavy = f"{windows:,} tokens / {rules.page} x {rings[1]}", windows // rules.page * rings[1]
            figures.append(record.check_count("heavy", "c128_state", heavy, "slots", words))
    for record in log.named("max_total_num_tokens"):
        figures.append(record.as_input("total", record.name, "tokens", _INPUT))
    return figures
