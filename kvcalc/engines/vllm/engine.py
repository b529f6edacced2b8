"""vLLM: one pool of blocks, and the most blocks that a request at full length may hold.

Source: core/kv_cache_planning.py and core/kv_cache_utils.py, vLLM 0.33.0. The rules of older releases are in
releases.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import gcd
from typing import TYPE_CHECKING, Any, cast

from kvcalc.engines.account import BatchLine, BlockPool, Line, PoolFigures, PoolLimit, RunningPool, block_table
from kvcalc.engines.checkpoint import published_cache, quantized_cache
from kvcalc.engines.declarations import types_of, unread_types
from kvcalc.engines.engine import Engine, Resolved
from kvcalc.engines.place import ANYWHERE, RAW_FP8, Place, is_fp8
from kvcalc.engines.vllm.account import Plan, account
from kvcalc.engines.vllm.cache_dtypes import check_dtype, own_dtype
from kvcalc.engines.vllm.deepseek_v41 import check_v41_device, v41_rows
from kvcalc.engines.vllm.defaults import (
    QWEN4,
    V41,
    check_block,
    default_block,
    default_cache,
    device_defaults,
    device_settings,
    has_raw_rows,
    step_of,
)
from kvcalc.engines.vllm.groups import group
from kvcalc.engines.vllm.layers import Layer, entries_of, layers_of, with_draft_layers
from kvcalc.engines.vllm.releases import RELEASES, Rules, is_known, rules_of
from kvcalc.engines.vllm.settings import (
    DEFAULT_BATCHED_TOKENS,
    FULL_GRAPHS,
    STEP,
    Settings,
    check_partition,
    check_prompt_ranks,
    check_token_ranks,
    parse_settings,
)
from kvcalc.engines.vllm.states import ALIGN, ALL, States, can_cache_prefixes, keeps_states
from kvcalc.errors import LayoutError, ModelError, UsageError
from kvcalc.memory.dtypes import Dtype
from kvcalc.memory.kv_cache import Growth, growth, growth_of, longest_context
from kvcalc.memory.reads import Entries
from kvcalc.memory.sharding import Bounds, bounds_of, whole_of
from kvcalc.model.caches import Cache, FullAttention, LatentAttention, RecurrentState
from kvcalc.model.layout import Layout
from kvcalc.model.memo import remembered, remembered_of_two
from kvcalc.model.spec import ORIGINAL, ModelSpec, period, rotation_type
from kvcalc.notes import Note
from kvcalc.releases import Release, RequestedRelease, parse_release

if TYPE_CHECKING:
    from kvcalc.engines.prefixes import Prefixes
    from kvcalc.engines.starts import Start

_AUTO_CONTEXT_SINCE = Release.of(0, 14)
_SHORT_LONGROPE, _YARN_ONCE = Release.of(0, 11, 1), Release.of(0, 30)
# Before this release, vLLM captured fewer graphs if there were fewer blocks (config/compilation.py, 0.19.0 and 0.20.0).
_BLOCKS_FOR_GRAPHS = (0, 20)
# The first release in which a step holds a block whose state is kept, and the first in which it need not.
_STEPS_OF_BLOCKS = ((0, 17), (0, 27))


class Vllm(Engine):
    """Counts the blocks of vLLM in a given release (None: the newest), with vLLM's own options.

    Layers are grouped over the whole model, and each of the pipeline `stages` holds its part of every group. A sequence
    takes what vLLM reserves to admit it: whole blocks of every group, and windows plus in-flight tokens. Raises
    ModelError (exit 3) for models whose layout in vLLM is not modelled, and UsageError (exit 2) for options and dtypes
    that vLLM does not support.
    """

    name = "vllm"
    device_settings, device_defaults = staticmethod(device_settings), staticmethod(device_defaults)
    unread = unread_types("vllm")

    @staticmethod
    def context_limits(spec: ModelSpec, release: Release | None) -> tuple[int | None, int | None]:
        """vLLM's default for LongRoPE is the original length, which the config has beside the rotation.

        Before 0.30, YaRN's factor counted from the original length. Source: _get_and_verify_max_len (config/model.py)
        in 0.28.0 to 0.33.0; vllm-project/vllm#27431 (0.11.1) and vllm-project/vllm#56446.
        """
        longest = spec.longest_context
        for rotation in spec.rotations:
            kind, factor = rotation_type(rotation), rotation.get("factor")
            original = rotation.get(ORIGINAL, spec.max_position_embeddings)
            if kind == "yarn" and release and release < _YARN_ONCE and isinstance(original, int):
                longest = int(original * factor) if isinstance(factor, (int, float)) else longest
        original = spec.stated.get(ORIGINAL)
        is_long = any(rotation_type(rotation) in ("longrope", "su") for rotation in spec.rotations)
        if is_long and isinstance(original, int) and not (release and release < _SHORT_LONGROPE):
            return original, longest
        return longest, longest

    def __init__(self, spec: ModelSpec, settings: Mapping[str, str], stages: int, release: str | None) -> None:
        super().__init__(spec, settings, 1, release)
        self.rules = rules_of(release)
        self.place = Place(None if release is None else parse_release("vllm", release).release)
        chosen, self.states = parse_settings(settings, spec, self.rules, self.place, stages)
        check_partition(chosen.pp_layer_partition, spec.num_layers, stages)
        shown = {name: value for name, value in chosen._asdict().items() if name != "overlaps_stages"}
        if not chosen.enable_prefix_caching:
            self.prefixes_off = (
                "leave --no-enable-prefix-caching out" if "no-enable-prefix-caching" in settings
                else "use --enable-prefix-caching" if can_cache_prefixes(spec, self.rules)
                else "vLLM 0.15 and later cache them"
            )  # fmt: skip
        self.chosen, self.settings = chosen, {"rules": self.rules.name, **shown}
        has_full_graphs = "enforce-eager" not in settings and chosen.cudagraph_mode in FULL_GRAPHS
        self._graphs_need_blocks = has_full_graphs and keeps_states(spec) and self.place.since(*_BLOCKS_FOR_GRAPHS)
        self.notes = (
            *_model_notes(spec),
            *_notes(spec, chosen, self.states, "enable-prefix-caching" in settings),
            *_stage_notes(self.rules, stages),
        )  # fmt: skip
        # vLLM assumes an encoder output as long as a batch can be (SchedulerConfig.max_num_encoder_input_tokens).
        batched = chosen.max_num_batched_tokens
        in_flight = chosen.max_in_flight_tokens if self.rules.two_steps else batched
        self.token_ranks = chosen.decode_context_parallel_size
        self.divides_decode = chosen.decode_context_parallel_size == 1  # else pcp_shard_decode_requests
        if self.prompt_ranks > 1:
            check_prompt_ranks(spec, settings, chosen, self.place)
        self.of_any_length = (in_flight, batched, self.states.kept, self.token_ranks)

    @classmethod
    def eager_launches(cls, settings: Mapping[str, str]) -> float | None:
        """--enforce-eager also turns compilation off. Without that, only the graphs are off (CUDAGraphMode.NONE)."""
        if "enforce-eager" in settings:
            return cls.eager_launch_seconds
        return 0.0 if settings.get("cudagraph-mode") == "none" else None

    @classmethod
    def context_defaults(cls, given: Mapping[str, str], defaults: Mapping[str, str], tokens: int) -> dict[str, str]:
        """Without chunked prefill, a step has room for the context (EngineArgs, engine/arg_utils.py)."""
        if "no-enable-chunked-prefill" not in given or STEP in given:
            return {}
        return {STEP: str(max(tokens, int(defaults.get(STEP, DEFAULT_BATCHED_TOKENS))))}

    @classmethod
    def with_default_block(
        cls, spec: ModelSpec, kv_dtype: str, settings: Mapping[str, str], place: Place
    ) -> Mapping[str, str]:
        if not keeps_states(spec):
            settings = super().with_default_block(spec, kv_dtype, settings, place)
        if "block-size" in settings:
            return settings
        block = default_block(spec, kv_dtype, place)
        is_known = block == step_of(spec) == default_block(spec, None, ANYWHERE)
        return settings if is_known else {**settings, "block-size": str(block)}

    @classmethod
    def default_block(cls, spec: ModelSpec, kv_dtype: str, place: Place) -> int | None:
        """Beside states, blocks are as large as a state needs."""
        return None if keeps_states(spec) else default_block(spec, kv_dtype, place)

    @classmethod
    def known_releases(cls) -> list[str]:
        return [rules.release for rules in RELEASES if rules.since > (0, 0, 0)]

    @classmethod
    def divides_tokens(cls, spec: ModelSpec, vendor: str | None) -> bool:
        """The attention backend must have the log-sum-exp of a decode step.

        FlashAttention, FlashInfer and the backends for latents have it; on AMD's devices only the latter
        (check_attention_cp_compatibility, v1/worker/cp_utils.py in 0.33.0).
        """
        return vendor == "NVIDIA" or (vendor == "AMD" and spec.attention.is_latent)

    @classmethod
    def check_auto_context(cls, settings: Mapping[str, Any], release: Release | None) -> None:
        """--max-model-len auto is in 0.14.0, and not in 0.12.0: the longest context that fits one request.

        Source: _auto_fit_max_model_len, v1/core/kv_cache_planning.py, vLLM 0.33.0.
        """
        if release is not None and release < _AUTO_CONTEXT_SINCE:
            raise UsageError("--context auto: vllm before 0.14 does not choose a context", "give --context N")

    @classmethod
    def kept(cls, spec: ModelSpec) -> ModelSpec:
        if spec.is_bidirectional and spec.model_type in types_of("vllm", "both_ways"):
            if keeps_states(spec):
                raise ModelError(f"{spec.name}: states beside attention with is_causal: false are not modelled")
            return spec._replace(is_encoder=True)
        if spec.model_type in QWEN4:
            return _with_replicated_inputs(spec)
        return _expanded(spec) if spec.model_type == "minicpm3" and spec.attention.is_latent else spec

    @classmethod
    def loaded_tables(cls, spec: ModelSpec) -> tuple[tuple[str, int], ...]:
        from kvcalc.engines.vllm.loading import rotary_tables

        return rotary_tables(spec)

    @staticmethod
    def kv_dtype(
        spec: ModelSpec, dtype_name: str, settings: Mapping[str, str], dtype: str | None, place: Place = ANYWHERE
    ) -> Resolved:
        """`auto` follows the checkpoint, else the default for the model and the device (`defaults.default_cache`).

        The checkpoint decides if it was quantized by modelopt (resolve_kv_cache_dtype_string, utils/torch_utils.py,
        since 0.14), or has a kv_cache_scheme, which gives fp8 (layers/attention/attention.py).
        """
        chosen, reason = _resolve(spec, dtype_name, dtype, place)
        if spec.model_type in V41:
            return own_dtype(v41_rows(spec, chosen if isinstance(chosen, str) else chosen.name, place)), reason
        return (RAW_FP8 if is_fp8(chosen) and has_raw_rows(spec, place) else chosen), reason

    def check_ranks(self, spec: ModelSpec, layout: Layout) -> None:
        check_token_ranks(spec, layout, self.place)

    def check_start(self, start: Start) -> None:
        if start.gpu is not None:
            check_block(self.spec, self.chosen.block_size, start.gpu.device_class)
            check_v41_device(self.spec, start.gpu.device_class)
        super().check_start(start)

    def rules_used(self, requested: RequestedRelease) -> str | None:
        """The rules of a date, and those of a release that vLLM's history does not place."""
        if requested.is_date:
            return self.rules.name
        return None if requested.is_placed and is_known(requested) else super().rules_used(requested)

    def cache_bytes(self, cache: Cache, tokens: int, dtype: Dtype) -> int:
        plan = self.plan(self.spec, dtype, is_divided=False)
        return sum(page.blocks(plan.demand(tokens)) * page.bytes for page in plan.pages.get((type(cache), cache), ()))

    def held_bytes(self, share: ModelSpec, dtype: Dtype, tokens: int, batch: int) -> int:
        plan = self.plan(share, dtype)
        return batch * plan.request_blocks(tokens) * plan.block_bytes

    def entries(self, share: ModelSpec, dtype: Dtype) -> list[Entries]:
        whole = whole_of(share)
        _, layers = _layers_of(self, whole, dtype)
        numbers = {number for group in share.layers for number in range(group.first, group.last + 1)}
        return entries_of(whole, [layer for layer in layers if layer.number in numbers], self.chosen, self.place)

    def stage_bounds(self, num_layers: int, stages: int) -> Bounds:
        sizes = self.chosen.pp_layer_partition
        return bounds_of(map(int, sizes.split(","))) if sizes else super().stage_bounds(num_layers, stages)

    def stages(self, num_layers: int) -> Bounds:
        """The first and last layer of each of the pipeline stages that the engine was made for."""
        return self.stage_bounds(num_layers, self.chosen.pipeline_parallel_size)

    def start_bytes(self, share: ModelSpec, dtype: Dtype, tokens: int) -> int:
        plan = self.plan(share, dtype)
        return plan.checked_bytes(tokens) if plan.checked_block_bytes > plan.block_bytes else 0

    def start_limit(self, share: ModelSpec, dtype: Dtype, memory: int) -> int | None:
        """With states, graphs of whole decode steps need a block for every request (vLLM 0.20 to 0.33).

        Source: resolve_cudagraph_mode_and_sizes, config/compilation.py.
        """
        if not self._graphs_need_blocks:
            return None
        return max(memory, 0) // self.plan(share, dtype).block_bytes

    def max_running_requests(
        self, share: ModelSpec, dtype: Dtype, memory: int | None, tokens: int = 1, shared_tokens: int = 0
    ) -> int | None:
        most = super().max_running_requests(share, dtype, memory, tokens, shared_tokens)
        limit = None if memory is None else self.start_limit(share, dtype, memory)
        return most if limit is None or most is None else min(most, limit)

    def longest_context(self, share: ModelSpec, dtype: Dtype, batch: int, memory: int) -> int | None:
        plan = self.plan(share, dtype)
        block_bytes = max(batch * plan.block_bytes, plan.checked_block_bytes)
        if plan.even_blocks and len(plan.block_sizes) == 1:
            return max(memory, 0) // (plan.even_blocks * block_bytes) * plan.common_block_tokens
        return longest_context(
            lambda tokens: plan.request_blocks(tokens) * block_bytes, memory, period(share), plan.common_block_tokens
        )

    def batch_line(self, share: ModelSpec, dtype: Dtype, tokens: int) -> BatchLine:
        plan = self.plan(share, dtype)
        return BatchLine(0, plan.request_blocks(tokens) * plan.block_bytes, self.start_bytes(share, dtype, tokens))

    def all_stages_bytes(self, share: ModelSpec, dtype: Dtype, tokens: int, batch: int) -> int:
        # Every stage takes the same number of blocks. On each stage a block is as large as the largest group there.
        plan = self.plan(share, dtype)
        return batch * plan.request_blocks(tokens) * plan.stages_block_bytes

    def replica_bytes(self, spec: ModelSpec, dtype: Dtype, tokens: int, batch: int = 1) -> int:
        plan = self.plan(spec, dtype, is_divided=False)
        return batch * plan.request_blocks(tokens) * plan.stages_block_bytes

    def growth(self, spec: ModelSpec, dtype: Dtype, tokens: int) -> Growth:
        plan = self.plan(spec, dtype, is_divided=False)
        if plan.even_blocks is not None:
            here = plan.request_blocks(tokens) * plan.stages_block_bytes
            return growth_of(here, here + plan.even_blocks * plan.stages_block_bytes, tokens, plan.common_block_tokens)
        return growth(lambda t: plan.request_blocks(t) * plan.stages_block_bytes, tokens, plan.common_block_tokens)

    def growth_tokens(self, share: ModelSpec, dtype: Dtype) -> int:
        return self.plan(share, dtype).common_block_tokens

    def block_tokens(self, share: ModelSpec, dtype: Dtype) -> int:
        plan = self.plan(share, dtype)
        return gcd(*plan.block_sizes) * self.token_ranks or plan.common_block_tokens

    def blocks(self, share: ModelSpec, dtype: Dtype, tokens: int, batch: int, memory: int | None) -> PoolFigures:
        plan = self.plan(share, dtype)
        needed, sizes = plan.request_blocks(tokens), plan.block_sizes
        pool = BlockPool(max(sizes, default=tokens), plan.block_bytes, needed * plan.block_bytes)
        if memory is not None:
            fitting = self._num_blocks(plan, memory)
            concurrency = fitting / plan.printed_blocks(tokens)
            # vLLM prints a floating-point quotient, truncated to an integer.
            printed = int(concurrency * tokens)
            if self.rules.tokens != "requests":
                printed = fitting // len(plan.groups) * min(sizes, default=tokens) * self.token_ranks
            if self.rules.tokens == "blocks":
                concurrency = printed / tokens
            pool = BlockPool(*pool[:3], fitting, printed, concurrency)
        return PoolFigures(pool)

    def check_context(self, tokens: int) -> None:
        """Without chunked prefill, a step must have room for the longest request (verify_max_model_len)."""
        chosen = self.chosen
        if not chosen.enable_chunked_prefill and chosen.max_num_batched_tokens < tokens:
            raise LayoutError(
                f"--no-enable-chunked-prefill: {chosen.max_num_batched_tokens:,} tokens in a step are fewer than the "
                f"{tokens:,} of the context",
                f"--max-num-batched-tokens {tokens}",
            )

    def pool_limit(self, share: ModelSpec, dtype: Dtype) -> PoolLimit | None:
        number = self.chosen.num_gpu_blocks_override
        if number is None:
            return None
        return PoolLimit("num-gpu-blocks-override", number * self.plan(share, dtype).block_bytes, is_exact=True)

    def _num_blocks(self, plan: Plan, memory: int) -> int:
        """The blocks in the pool (may_override_num_blocks, v1/core/kv_cache_planning.py)."""
        return self.chosen.num_gpu_blocks_override or memory // plan.block_bytes

    def most_running(
        self, share: ModelSpec, dtype: Dtype, memory: int, prompt_tokens: int, tokens: int, shared_tokens: int = 0
    ) -> int | None:
        plan, in_flight = self.plan(share, dtype), self.chosen.steps_in_flight - 1
        if not plan.gives_back:
            return None
        from kvcalc.engines.vllm.reuse import VllmPrefixes

        beyond = plan.running_blocks(prompt_tokens, None) - plan.running_blocks(prompt_tokens, in_flight)
        # One block is never given to a request (null_block, v1/core/block_pool.py).
        left = self._num_blocks(plan, memory) - 1 - beyond
        held = VllmPrefixes(plan, plan.block_bytes).running_blocks(shared_tokens, tokens, in_flight)
        return max((left - held.shared) // held.own, 0)

    def lookahead_tokens(self, num_tokens: int, *, is_longest: bool, by_ngrams: bool) -> int:
        """At most up to max_model_len (allocate_slots, v1/core/kv_cache_manager.py)."""
        return 0 if is_longest else num_tokens

    def running_pool(self, share: ModelSpec, dtype: Dtype, longest_tokens: int, batch: int, memory: int) -> RunningPool:
        plan, size = self.plan(share, dtype), self.block_tokens(share, dtype)
        # One block is never given to a request (null_block, v1/core/block_pool.py).
        capacity = self._num_blocks(plan, memory) - 1

        def table_of(numbers: int, in_flight: int | None) -> list[int]:
            return block_table(lambda tokens: plan.running_blocks(tokens, in_flight), size, numbers, capacity)

        prompts = table_of(-(-longest_tokens // size) + 2, None)
        table = table_of(len(prompts) - 1, self.chosen.steps_in_flight - 1)
        if table == prompts:
            even = range(0, len(table) * table[1], table[1])
            return RunningPool(capacity, size, even if table == list(even) else table)
        return RunningPool(capacity, size, table, prompts)

    def lines(self, share: ModelSpec, dtype: Dtype, tokens: int) -> list[Line]:
        return account(self.plan(share, dtype), tokens)

    def prefixes(self, share: ModelSpec, dtype: Dtype, whole: bool = False) -> Prefixes:
        from kvcalc.engines.prefixes import refuse_encoder_decoder
        from kvcalc.engines.vllm.reuse import VllmPrefixes

        refuse_encoder_decoder(share, "vLLM")
        plan = self.plan(share, dtype, is_divided=not whole)
        return VllmPrefixes(plan, plan.stages_block_bytes if whole else plan.block_bytes)

    def plan(self, share: ModelSpec, dtype: Dtype, *, is_divided: bool = True) -> Plan:
        """The plan of a share. `is_divided` is whether ranks divide the tokens among them, if they are to do that."""
        return _plan_of(self, share, dtype, is_divided)

    def check_aligned(self, layers: list[Layer]) -> None:
        """Raise LayoutError (exit 2) if a step is smaller than a block whose state is kept (0.17 to 0.26).

        Source: validate_block_size, config/vllm.py.
        """
        since, until = _STEPS_OF_BLOCKS
        if self.states.mode != ALIGN or not self.place.since(*since) or self.place.since(*until):
            return
        block = max(layer.page.block_size for layer in layers)
        if block > self.chosen.max_num_batched_tokens:
            text = f"vLLM does not start with prefix caching if a step is smaller than a block of {block:,} tokens"
            option = f"--max-num-batched-tokens {self.chosen.max_num_batched_tokens}"
            raise LayoutError(f"{option}: {text}", f"--max-num-batched-tokens {block}, or no --enable-prefix-caching")


@remembered_of_two
def _plan_of(engine: Vllm, share: ModelSpec, dtype: Dtype, is_divided: bool) -> Plan:
    share, layers = _layers_of(engine, share, dtype)
    if not layers:
        raise ModelError(f"{share.name}: vLLM keeps no cache for it")
    engine.check_aligned(layers)
    groups = group([layer.page for layer in layers], engine.rules)
    if groups is None:
        raise ModelError(f"{share.name}: {engine.rules.name} cannot give this model's layers pages of one size")
    stages = []
    for first, last in engine.stages(share.num_layers):
        places = {place for place, layer in enumerate(layers) if first <= layer.number <= last}
        stages.append([part.only(places) for part in groups])
    of_any_length = engine.of_any_length if is_divided else (*engine.of_any_length[:-1], 1)
    return Plan(layers, groups, stages, of_any_length, dtype, engine.rules)


@remembered_of_two
def _layers_of(engine: Vllm, share: ModelSpec, dtype: Dtype) -> tuple[ModelSpec, list[Layer]]:
    """The share with the layers that draft tokens for it, and its layers."""
    check_dtype(dtype, engine.place)
    # With --speculative the share has its drafting layers already.
    if engine.chosen.num_speculative_tokens and share.first_draft_layer is None:
        share = with_draft_layers(share)
    return share, layers_of(share, dtype, engine.chosen, engine.states, engine.rules, engine.place)


# LLaVA's flat configs name classes (LlavaLlamaForCausalLM) that vLLM does not have (model_executor/models/registry.py).
_FLAT_LLAVA = ("llava", "llava_llama", "llava_mistral", "llava_qwen")


def _model_notes(spec: ModelSpec) -> tuple[Note, ...]:
    """A checkpoint that vLLM does not load as it is: the figures are those of its converted version."""
    if spec.model_type not in _FLAT_LLAVA:
        return ()
    text = "vLLM does not load this checkpoint; the figures are those of its converted version (-hf)"
    return (Note("engine", "converted-checkpoint", text),)


def _notes(spec: ModelSpec, chosen: Settings, states: States, is_asked: bool) -> tuple[Note, ...]:
    """The default that a user may not expect: prefix caching takes more states than a request needs."""
    if is_asked or not chosen.enable_prefix_caching or not keeps_states(spec):
        return ()
    kept = "a state for every block" if states.mode == ALL else f"{states.kept} states per request"
    text = f"vLLM caches prefixes by default, with {kept}; --no-enable-prefix-caching takes fewer"
    return (Note("engine", "prefix-caching", text),)


def _stage_notes(rules: Rules, stages: int) -> tuple[Note, ...]:
    """What a release asks of a pipeline stage before it starts, if that is more than a request takes there."""
    if stages == 1 or rules.bills == "stage":
        return ()
    needed = {"all layers": "a request in all layers", "stages": f"{stages} requests of full length"}[rules.bills]
    return (Note("engine", "stage-memory", f"this release starts only if every stage has memory for {needed}"),)


def _resolve(spec: ModelSpec, dtype_name: str, dtype: str | None, place: Place) -> Resolved:
    """The cache's type and the reason, before the layout is known."""
    if dtype_name.casefold() != "auto":
        return own_dtype(dtype_name), None
    follows_modelopt = place.since(0, 14)
    makers = ("modelopt", "compressed-tensors") if follows_modelopt else ("compressed-tensors",)
    checkpoint = quantized_cache(spec.quantization, makers)
    if checkpoint:
        return checkpoint[0], f"the checkpoint's {checkpoint[1]} is {checkpoint[0]}"
    published = published_cache(spec, dtype) if follows_modelopt else None
    return published or default_cache(spec, place) or (dtype_name, None)


@remembered
def _expanded(spec: ModelSpec) -> ModelSpec:
    """The model with K and V of every head instead of the latent. V is padded to the length of K.

    Source: MiniCPM3Attention, model_executor/models/minicpm3.py of vLLM 0.33.0.
    """
    shape = spec.attention
    heads = FullAttention(shape.num_heads, shape.qk_head_dim, shape.qk_head_dim)
    layers = (
        group._replace(caches=tuple(heads if isinstance(cache, LatentAttention) else cache for cache in group.caches))
        for group in spec.layers
    )
    return spec._replace(layers=tuple(layers))


@remembered
def _with_replicated_inputs(spec: ModelSpec) -> ModelSpec:
    """The model with the inputs of its convolutions over n-grams whole on every rank. The last tokens are elsewhere.

    Source: Qwen4ExpPLELayer, models/qwen4_exp/nvidia/ple_layer.py of vLLM 0.33.0.
    """
    channels = cast(int, spec.stated["hc_count"]) * (spec.attention.hidden_size or 0)

    def kept(caches: tuple[Cache, ...]) -> tuple[Cache, ...]:
        replicated: list[Cache] = []
        for cache in caches:
            if not isinstance(cache, RecurrentState) or cache.conv_channels:
                replicated.append(cache)
            elif cache.state_dtype is None:
                columns = cache.state_elements // channels
                replicated.append(RecurrentState(channels, columns + 1, 0, state_dtype=None, group_channels=channels))
        return tuple(replicated)

    return spec._replace(layers=tuple(group._replace(caches=kept(group.caches)) for group in spec.layers))
