"""vLLM: one pool of blocks, and what a request at full length may hold of it at most.

Source: core/kv_cache_planning.py and core/kv_cache_utils.py, vLLM 0.33.0; older releases in releases.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import lcm
from typing import Any, NamedTuple

from kvcalc.errors import ModelError, UsageError
from kvcalc.memory.dtypes import Dtype
from kvcalc.memory.engines import Engine, Line
from kvcalc.memory.engines.checkpoint import quantized_cache
from kvcalc.memory.engines.vllm.account import Plan, account
from kvcalc.memory.engines.vllm.cache_dtypes import check_dtype, own_dtype
from kvcalc.memory.engines.vllm.drafts import with_draft_layers
from kvcalc.memory.engines.vllm.groups import block_bytes, blocks_of_kinds, group, kinds_of_groups, request_blocks
from kvcalc.memory.engines.vllm.layers import M3_BLOCK, MINIMAX_M3, layers_of
from kvcalc.memory.engines.vllm.pages import STATE, Demand, Page
from kvcalc.memory.engines.vllm.releases import Rules, is_newest, rules_of
from kvcalc.memory.engines.vllm.settings import Settings, parse_settings
from kvcalc.memory.sharding import bounds_of, longer_before_last
from kvcalc.model.caches import Cache, RecurrentState
from kvcalc.model.memo import remembered
from kvcalc.model.spec import ModelSpec, all_caches
from kvcalc.notes import Note

VERSION = "0.33.0"


class _Counted(NamedTuple):
    """A share of a model, its plan, bytes of a block on the stage where it is largest and on all stages together, and
    the kinds of its groups."""

    share: ModelSpec
    plan: Plan
    block_bytes: int
    stages_block_bytes: int
    kinds: list[tuple[tuple[Page, ...], int]]


def kv_dtype(
    spec: ModelSpec, asked: str, given: Mapping[str, str], dtype: str | None
) -> tuple[str | Dtype, str | None]:
    """`auto` follows a checkpoint quantized by modelopt (resolve_kv_cache_dtype_string, utils/torch_utils.py), and one
    whose quantization has a kv_cache_scheme, to fp8 (layers/attention/attention.py)."""
    if asked.casefold() != "auto":
        return own_dtype(asked), None
    found = quantized_cache(spec.quantization, ("modelopt", "compressed-tensors"))
    return (found[0], f"the checkpoint's {found[1]} is {found[0]}") if found else (asked, None)


def engine(spec: ModelSpec, given: Mapping[str, str], release: str | None = None, stages: int = 1) -> Engine:
    """The accounting of vLLM as of a release, of the newest where None, under its own options. Layers are grouped over
    the whole model, and each of the pipeline `stages` holds its part of every group.

    A sequence takes what vLLM reserves for its admission: whole blocks of every group, windows with the tokens in
    flight. Raises ModelError (exit 3) for models whose layout in vLLM is not modelled, UsageError (exit 2) for options
    and dtypes it does not take.
    """
    settings, rules = parse_settings(given)._replace(pipeline_parallel_size=stages), rules_of(release)
    if not rules.two_steps:
        settings = settings._replace(async_scheduling=False)
    in_flight = settings.max_in_flight_tokens if rules.two_steps else settings.max_num_batched_tokens
    _refuse(spec)
    if spec.model_type in MINIMAX_M3:
        if "block-size" not in given:
            settings = settings._replace(block_size=M3_BLOCK)
        elif settings.block_size % M3_BLOCK:
            raise UsageError(f"--block-size {settings.block_size}: MiniMax-M3's kernels take multiples of {M3_BLOCK}")
    newest = is_newest(release)
    # By identity: a bisection asks for one share many times. The share is kept, so that its identity stays its own.
    plans: dict[tuple[int, str], _Counted] = {}

    def counted(share: ModelSpec, dtype: Dtype) -> _Counted:
        key = (id(share), dtype.name)
        found = plans.get(key)
        if found is None:
            plan = _plan(share, dtype, settings, rules, newest)
            all_stages = sum(map(block_bytes, plan.stages))
            found = plans[key] = _Counted(share, plan, plan.block_bytes, all_stages, kinds_of_groups(plan.groups))
        return found

    def plan_of(share: ModelSpec, dtype: Dtype) -> Plan:
        return counted(share, dtype).plan

    batched, states = settings.max_num_batched_tokens, settings.state_blocks

    def demand(tokens: int) -> Demand:
        # The encoder's output is taken to be as long as a batch may be (SchedulerConfig.max_num_encoder_input_tokens).
        return Demand(tokens, in_flight, batched, states)

    def sequence_bytes(share: ModelSpec, dtype: Dtype, tokens: int) -> int:
        found = counted(share, dtype)
        return blocks_of_kinds(found.kinds, demand(tokens)) * found.block_bytes

    def stages_bytes(share: ModelSpec, dtype: Dtype, tokens: int, batch: int) -> int:
        # Every stage takes as many blocks; each is as large as the stage's largest group.
        found = counted(share, dtype)
        return batch * blocks_of_kinds(found.kinds, demand(tokens)) * found.stages_block_bytes

    def cache_bytes(cache: Cache, tokens: int, dtype: Dtype) -> int:
        pages = {(type(layer.cache), layer.cache): layer.page for layer in plan_of(spec, dtype).layers}
        page = pages.get((type(cache), cache))
        return page.blocks(demand(tokens)) * page.bytes if page else 0

    def blocks(share: ModelSpec, dtype: Dtype, tokens: int, batch: int, memory_bytes: int | None) -> dict[str, Any]:
        plan, asked = plan_of(share, dtype), demand(tokens)
        needed = request_blocks(plan.groups, asked)
        sizes = _block_sizes(plan)
        found: dict[str, Any] = {
            "block_size": max(sizes, default=tokens),
            "bytes_per_block": plan.block_bytes,
            "request_bytes": needed * plan.block_bytes,
            "num_gpu_blocks": None,
            "kv_cache_tokens": None,
            "max_concurrency": None,
        }
        if memory_bytes is not None:
            fitting = memory_bytes // plan.block_bytes
            concurrency = fitting / needed
            # As vLLM prints it: a quotient in floating point, then cut.
            printed = int(concurrency * tokens)
            if rules.tokens != "requests":
                printed = fitting // len(plan.groups) * min(sizes, default=tokens)
            if rules.tokens == "blocks":
                concurrency = printed / tokens
            found.update(num_gpu_blocks=fitting, kv_cache_tokens=printed, max_concurrency=concurrency)
        return found

    def growth_tokens(share: ModelSpec, dtype: Dtype) -> int:
        return lcm(*_block_sizes(plan_of(share, dtype)))

    def lines(share: ModelSpec, dtype: Dtype, tokens: int) -> list[Line]:
        return account(plan_of(share, dtype), dtype, demand(tokens))

    return Engine(
        "vllm", release or VERSION, cache_bytes, {"rules": rules.name, **settings._asdict()}, _notes(spec, settings),
        sequence_bytes, blocks, growth_tokens, lines, stages_bytes=stages_bytes,
    )  # fmt: skip


@remembered
def _block_sizes(plan: Plan) -> set[int]:
    """Tokens of a block, of every layer that keeps tokens."""
    return {page.block_size for part in plan.groups for _, page in part.layers if page.kind != STATE}


def _refuse(spec: ModelSpec) -> None:
    """Models vLLM reads in a way that is not modelled."""
    if spec.model_type == "llava":
        raise ModelError(f"{spec.name}: vLLM has no class that reads LLaVA's flat config", "its -hf form has one")
    if spec.model_type in ("mimo_v2_flash", "rwkv", "rwkv6", "recurrent_gemma", "deepseek_v4"):
        raise ModelError(f"{spec.name}: vLLM's layout of {spec.model_type} is not modelled")
    if spec.model_type == "falcon" and spec.attention.num_kv_heads > 1:
        raise ModelError(f"{spec.name}: vLLM's layout of Falcon's new architecture is not modelled")


def _notes(spec: ModelSpec, settings: Settings) -> tuple[Note, ...]:
    """What vLLM does by default and this count does not."""
    has_state = any(isinstance(cache, RecurrentState) for cache in all_caches(spec))
    if has_state and spec.attention.num_heads and not settings.enable_prefix_caching:
        text = "vLLM caches prefixes by default and then keeps one state more: --enable-prefix-caching counts it"
        return (Note("engine", "one-more-state", text),)
    return ()


def _plan(share: ModelSpec, dtype: Dtype, settings: Settings, rules: Rules, newest: bool) -> Plan:
    check_dtype(dtype, newest)
    if settings.num_speculative_tokens:
        share = with_draft_layers(share)
    layers = layers_of(share, dtype, settings, rules)
    if not layers:
        raise ModelError(f"{share.name}: vLLM keeps no cache for it")
    groups = group([layer.page for layer in layers], rules)
    if groups is None:
        raise ModelError(f"{share.name}: {rules.name} cannot make pages of one size of this model's layers")
    split = []
    for first, last in bounds_of(longer_before_last(share.num_layers, settings.pipeline_parallel_size)):
        places = {place for place, layer in enumerate(layers) if first <= layer.number <= last}
        split.append([part.only(places) for part in groups])
    return Plan(layers, groups, split)
