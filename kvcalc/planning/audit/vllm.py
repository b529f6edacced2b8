"""Checks vLLM's numbers: the blocks that fit in the memory for the cache, and the tokens and requests they hold.

Source: kv_cache_utils.py, vLLM 0.33.0 (V1); executor_base.py and worker.py, vLLM 0.8 (V0).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product, zip_longest
from typing import NamedTuple

from kvcalc.errors import ModelError, UsageError
from kvcalc.memory.engines.release import parse_release
from kvcalc.memory.engines.vllm import Vllm
from kvcalc.memory.engines.vllm.layers import layers_of
from kvcalc.memory.engines.vllm.pages import STATE
from kvcalc.memory.engines.vllm.releases import RELEASES, Rules, rules_of
from kvcalc.memory.engines.vllm.settings import XPU_BLOCK
from kvcalc.memory.engines.vllm.states import caches_prefixes, uses_qwen_delta_nets
from kvcalc.memory.kv_cache import most_that_fit
from kvcalc.model.caches import HEADS_CACHES, Cache, FullAttention
from kvcalc.model.spec import ModelSpec, has_compressed, has_states, latent_of, map_caches, windows
from kvcalc.planning.audit.drafting import drafting_models
from kvcalc.planning.audit.figures import (
    EQUAL,
    Figure,
    Printed,
    check_count,
    check_ratio,
    check_size,
    count_equal,
    given,
    parse_printed,
)
from kvcalc.planning.audit.setup import Reading, Setup
from kvcalc.planning.logs import Log, Record

_GIB = 2**30
# Source: --swap-space, vLLM 0.8.
_SWAP_GIB = "4"
_V1_DEFAULT = (0, 8, 0)
_PREFILL_COPIES = (0, 26, 0)
# The API server's values: on H100-class devices, on B200 and B300, and on others (arg_utils.py, vLLM 0.33.0).
_BATCHED_TOKENS = ("8192", "16384", "2048")
# Some MLA kernels set the block size: FlashMLA 64, CUTLASS 128, FlashInfer 32. Others: the default (config/cache.py,
# vLLM 0.33.0).
_LATENT_BLOCKS = ("64", "16", "128", "32")
# Sizes are rounded to two decimals, and 22.50 is printed as 22.5 (see eugr/spark-vllm-docker#396).
_DECIMALS = 2

# Observed for Llama 4 (vllm-project/vllm#16118, #19407). A KV connector also turns the hybrid cache manager off.
_WHOLE = "windowed and chunked layers keep all tokens, as without the hybrid cache manager"

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
_BY_GROUP = Rule(
    lambda pool, blocks, length: blocks // pool.num_groups * pool.block_size,
    "{blocks:,} blocks // {pool.num_groups} x {pool.block_size:,}",
)
_BY_BLOCKS = Rule(lambda pool, blocks, length: blocks * pool.block_size, "{blocks:,} blocks x {pool.block_size}")
_BY_REQUESTS = Rule(
    lambda pool, blocks, length: int(blocks / pool.request_blocks * length),
    "int({blocks:,} blocks / {pool.request_blocks:,g} x {length:,})",
)
_TOKENS = {"group": _BY_GROUP, "blocks": _BY_BLOCKS, "requests": _BY_REQUESTS}


def readings(log: Log, spec: ModelSpec) -> Iterator[Reading]:
    """Every way to read the log that is consistent with its settings, the newest rules first."""
    version = _version(log)
    # If the log does not name the engine's generation: only V0 has a swap space, and V0 was the default before 0.8.
    seems_v0 = bool(log.named("num_cpu_blocks")) or (version is not None and version < _V1_DEFAULT)
    if log.text("generation") == "V0" or (log.text("generation") is None and seems_v0):
        plain = {option: text for fact, option in _STATED_V0.items() if (text := log.text(fact))}
        yield Reading(plain, ("V0's pool",), check_v0)
        return
    _refuse_prefill_ranks(log, version)
    found, drafting = _rules(log, spec), drafting_models(log, spec)
    for rules, (model, drafts) in product(found, drafting):
        plain, choices = _settings(log, spec, rules)
        for chosen in product(*choices):
            settings = {**plain, **{option: text for option, text, _ in chosen if text is not None}}
            taken = (rules.name, *(remark for _, _, remark in chosen), *drafts)
            yield Reading(settings, taken, partial(check_v1, rules), model, rules.release)
    if windows(spec):
        for rules, (model, drafts) in product(found, drafting):
            plain, _ = _settings(log, spec, rules)
            whole, check = map_caches(model, _whole), partial(check_v1, rules)
            yield Reading(plain, (rules.name, _WHOLE, *drafts), check, whole, rules.release)


def _refuse_prefill_ranks(log: Log, version: tuple[int, ...] | None) -> None:
    """Raise UsageError (exit 2) if prefill context parallelism divides the cache, which is not modelled.

    Since 0.26 its ranks hold copies (FullAttentionSpec.max_memory_usage_bytes, v1/kv_cache_interface.py).
    """
    ranks = log.text("prefill_ranks") or "1"
    if ranks != "1" and version is not None and version < _PREFILL_COPIES:
        raise UsageError(f"the log's prefill_context_parallel_size of {ranks[:9]} is not modelled before vLLM 0.26")


def _rules(log: Log, spec: ModelSpec) -> list[Rules]:
    """The rules of the log's release. For a pre-release, also those of the next release. If unknown, all, newest first.

    A release later than the newest known one uses the newest rules. If several rules give the same result for this
    model, only the newest one is kept.
    """
    version, known = _version(log), [rules for rules in RELEASES if rules.since >= _V1_DEFAULT]
    if version is not None:
        place = next((n for n, rules in enumerate(known) if version >= rules.since), len(known) - 1)
        # "0.20.2rc1.dev9" is a pre-release and may already have the rules of the next release.
        between = re.search(r"[a-z]", log.text("version") or "") is not None
        known = known[max(0, place - between) : place + 1]
    mixed, states, packs = bool(windows(spec)), has_states(spec), has_compressed(spec)
    stages = log.text("pipeline_parallel_size") not in (None, "1") or log.text("pp_layer_partition") is not None
    alike: dict[object, Rules] = {}
    for rules in known:
        of_windows = rules._replace(
            since=(0, 0, 0), mla_block=0, hybrid_prefixes=True, state_per_block=(), checkpoints=(),
            packing=rules.packing if packs else "", bills="",
        )  # fmt: skip
        key = (
            rules.tokens,
            mixed and of_windows,
            states and rules[1:],
            packs and rules.packing,
            stages and rules.bills,
        )
        alike.setdefault(key, rules)
    return list(alike.values())


def _whole(cache: Cache) -> Cache:
    """A windowed or chunked cache as a cache that keeps every token."""
    if isinstance(cache, HEADS_CACHES) and cache.window is not None:
        return FullAttention(cache.num_kv_heads, cache.k_head_dim, cache.v_head_dim)
    return cache


# Facts in a log, and the options of kvcalc that they set.
_STATED_V0 = {"block_size": "block-size", "pp_layer_partition": "pp-layer-partition"}
_STATED = {
    **_STATED_V0, "num_speculative_tokens": "num-speculative-tokens",
    "max_num_batched_tokens": "max-num-batched-tokens", "token_ranks": "decode-context-parallel-size",
    "mamba_cache_dtype": "mamba-cache-dtype", "mamba_ssm_cache_dtype": "mamba-ssm-cache-dtype",
    "mamba_cache_mode": "mamba-cache-mode", "no_hybrid_manager": "disable-hybrid-kv-cache-manager",
}  # fmt: skip

# An option, its text (None if it is not given), and the description for the user.
_Choice = tuple[str, "str | None", str]


def _settings(log: Log, spec: ModelSpec, rules: Rules) -> tuple[dict[str, str], list[list[_Choice]]]:
    """The settings in the log, and the choices it leaves open that matter for this model and release."""
    plain = {}
    for fact, option in _STATED.items():
        text = log.text(fact)
        if text is not None and text != "0":
            plain[option] = text
    prompt_ranks = log.text("prefill_ranks") or "1"
    if prompt_ranks != "1" and plain.get("decode-context-parallel-size", "1") != "1":
        # The ranks that divide the cache are then those of all copies. A server that started has no images.
        plain |= {"prefill-context-parallel-size": prompt_ranks, "language-model-only": ""}
    if log.named("attention_block_size"):
        # The log prints the block size after it was raised. The size before that is the default.
        plain.pop("block-size", None)
    if (log.text("platform") or "").casefold() == "xpu" and has_states(spec) and "block-size" not in plain:
        plain["block-size"] = str(XPU_BLOCK)
    choices: list[list[_Choice]] = []
    if "block-size" not in plain and latent_of(spec) is not None:
        choices.append([("block-size", n, f"blocks of {n} tokens") for n in _LATENT_BLOCKS])
    if has_states(spec):
        choices.append(_prefix_caching(log, caches_prefixes(spec, rules)))
        if uses_qwen_delta_nets(spec) and "delta" in rules.checkpoints:
            choices.append([("gdn-prefill-backend", name, f"{name} prefill") for name in ("flashinfer", "triton")])
    if windows(spec):
        if "max-num-batched-tokens" not in plain:
            choices.append([("max-num-batched-tokens", n, f"max_num_batched_tokens {n}") for n in _BATCHED_TOKENS])
        if rules.two_steps:
            choices.append(_switch(log, "async_scheduling", "no-async-scheduling", "async scheduling", given="false"))
    return plain, choices


def _prefix_caching(log: Log, is_default: bool) -> list[_Choice]:
    """Prefix caching as the log states it, or else both, the release's default first."""
    stated = (log.text("enable_prefix_caching") or "").casefold()
    on = ("enable-prefix-caching", "", "prefix caching on")
    off = ("no-enable-prefix-caching", "", "prefix caching off")
    if stated in ("true", "false"):
        return [on if stated == "true" else off]
    return [on, off] if is_default else [off, on]


def _switch(log: Log, fact: str, option: str, words: str, given: str) -> list[_Choice]:
    """The value in the log, or else on (the current default) and then off. The option sets the value `given`."""
    stated = (log.text(fact) or "").casefold()
    values = [stated] if stated in ("true", "false") else ["true", "false"]
    named = {"true": f"{words} on", "false": f"{words} off"}
    return [(option, "" if value == given else None, named[value]) for value in values]


def _version(log: Log) -> tuple[int, ...] | None:
    """The version's first three numbers, or None if the log has no version that can be read."""
    try:
        release = parse_release("vllm", log.text("version") or "").release
    except UsageError:
        return None
    return None if release is None else release.numbers[:3]


def check_v1(rules: Rules, log: Log, setup: Setup) -> list[Figure]:
    """Check V1: one pool of blocks, in which every group holds a request at full length."""
    found = setup.pool()
    plan = _engine(setup).plan(setup.share, setup.dtype)
    block, tokens = plan.block_bytes, setup.context_tokens
    # In a model with states only, one block is as long as a request, as in kvcalc's vLLM rules.
    block_tokens = min(plan.block_sizes, default=tokens) * setup.rules.token_ranks
    pool = Pool(block, block_tokens, len(plan.groups), plan.printed_blocks(tokens))
    words = "the smallest with a page that holds a state"
    figures = [
        check_count(record, "block_size", record.name, found["block_size"], "tokens", words)
        for record in log.named("attention_block_size")
    ]
    for record in log.named("request_bytes"):
        needed, blocks = plan.checked_bytes(tokens), plan.request_blocks(tokens)
        words = f"{blocks:,} blocks of {needed // blocks:,} bytes for {tokens:,} tokens"
        figures.append(check_size(record, "needed", record.name, needed, words, _DECIMALS))
    figures += [_longest(log, setup, record) for record in log.named("max_model_len")]
    return figures + _pool_figures(log, pool, _TOKENS[rules.tokens], setup.context_tokens)


def check_v0(log: Log, setup: Setup) -> list[Figure]:
    """Check V0: attention layers keep all tokens, states are outside the pool, and the swap space has blocks too."""
    engine = _engine(setup)
    chosen, stages = engine.chosen, engine.stages(setup.share.num_layers)
    layers = layers_of(setup.share, setup.dtype, chosen, engine.states, rules_of(None))
    kept = [layer for layer in layers if layer.page.kind != STATE]
    if not kept:
        raise ModelError(f"{setup.spec.name}: vLLM V0 has no cache blocks for this model")
    block_size = chosen.block_size
    # Every stage has blocks of its own layers. The stage with most of them has the fewest blocks.
    row = max(sum(la.page.token_bytes for la in kept if first <= la.number <= last) for first, last in stages)
    block = block_size * row
    swap = log.text("swap_space_gib") or _SWAP_GIB
    words, blocks = f"swap space of {swap} GiB // {block:,} bytes per block", int(float(swap) * _GIB) // block
    figures = [
        check_count(record, "cpu_blocks", record.name, blocks, "blocks", words)
        for record in log.named("num_cpu_blocks")
    ]
    # A scheduler for each stage has its part of the blocks, which limits the tokens of a request.
    pool = Pool(block, block_size, len(stages), setup.context_tokens / block_size)
    rule = _BY_GROUP if len(stages) > 1 else _BY_BLOCKS
    return figures + _pool_figures(log, pool, rule, setup.context_tokens)


def _pool_figures(log: Log, pool: Pool, rule: Rule, length: int) -> list[Figure]:
    """Check the numbers about the pool. The memory is an input. It is printed with two decimals, so a range of block
    counts matches it.

    Each rank has its own memory. A number must match one of the ranks, and numbers printed together must match the same
    number of blocks.
    """
    memories = log.named("available_memory")
    words = f"{_INPUT_MEMORY}; blocks of {pool.block_bytes:,} bytes"
    figures = [given(memory, "memory", memory.name, "bytes", words) for memory in memories]
    ranges = [_fitting(_gib(memory.parts["memory"]), pool) for memory in memories]
    stated = log.named("num_gpu_blocks")
    for record in stated:
        figures.append(_check_blocks(record, int(record.parts["gpu_blocks"]), ranges, memories, pool))
    blocks = [[int(record.parts["gpu_blocks"])] for record in stated] or ranges
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
    return figures


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


def _gib(text: str) -> Printed:
    return parse_printed(text, _DECIMALS)


def _fitting(memory: Printed, pool: Pool) -> list[int]:
    """The numbers of blocks that fit in sizes that round to this one. The number for the printed size is first."""
    says = memory.middle // pool.block_bytes
    span = range(int(memory.low // pool.block_bytes), int(memory.high // pool.block_bytes) + 1)
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


def _longest(log: Log, setup: Setup, record: Record) -> Figure:
    """Check the longest request: it fits in the memory, and one more token does not."""
    memories = [_gib(memory.parts["memory"]) for memory in log.named("available_memory")]
    if not memories:
        return given(record, "longest", record.name, "tokens", "an input: the log has no memory")

    plan = _engine(setup).plan(setup.share, setup.dtype)

    def needed(tokens: int) -> int:
        return plan.checked_bytes(tokens) if tokens else 0

    longest = int(record.parts["longest"])
    explained = any(needed(longest) <= memory.high and needed(longest + 1) > memory.low for memory in memories)
    memory, most = memories[0].middle, setup.context_tokens
    # If a longer request takes no more memory, the engine's search ends at the model's length.
    found = most if needed(most + 1) <= memory else most_that_fit(needed, memory, most + 1)
    found = longest if explained else found
    words = f"the longest request in {memories[0].text}, within rounding"
    return check_count(record, "longest", record.name, found, "tokens", words)


def _engine(setup: Setup) -> Vllm:
    """The engine's rules. Raises ModelError (exit 3) for encoders, which have no pool."""
    if not isinstance(setup.rules, Vllm):
        raise ModelError(f"{setup.spec.name}: vLLM's pool for encoders is not counted")
    return setup.rules
