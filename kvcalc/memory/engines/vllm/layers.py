"""The page of every layer: which of vLLM's cache specs each of kvcalc's caches is.

Source: attention.py, mla_attention.py, deepseek_v2.py (the indexer) and mamba_utils.py under vllm/model_executor, and
_align_hybrid_block_size of platforms/interface.py, vLLM 0.33.0.
"""

from __future__ import annotations

from typing import NamedTuple

from kvcalc.errors import ModelError, UsageError
from kvcalc.memory.dtypes import DTYPES, Dtype, bytes_of
from kvcalc.memory.engines.rounding import ceil_div
from kvcalc.memory.engines.vllm.cache_dtypes import heads_bytes, latent_bytes
from kvcalc.memory.engines.vllm.pages import CHUNKED, CROSS, FULL, MLA, SLIDING, STATE, Page
from kvcalc.memory.engines.vllm.releases import Rules
from kvcalc.memory.engines.vllm.settings import Settings
from kvcalc.model.caches import (
    HEADS_CACHES,
    Cache,
    CompressedAttention,
    CrossAttention,
    IndexerKeys,
    LatentAttention,
    RecurrentState,
)
from kvcalc.model.layers import LayerGroup
from kvcalc.model.spec import ModelSpec, all_caches

# Kernels take blocks of 16 tokens and multiples; with MLA beside states, of more (`Rules.mla_block`).
_KERNEL_BLOCK = 16

# An index key is in bf16 whatever the cache's dtype, and a block 128 tokens: one of the blocks its indexer picks
# (MiniMaxM3IndexerCache of models/minimax_m3/common/indexer.py; indexer_kv_dtype `auto`).
MINIMAX_M3 = ("minimax_m3", "minimax_m3_vl_text")
M3_BLOCK = 128

# Families whose state is in fp32 unless the config says otherwise, and those whose config may say so; elsewhere a state
# has the model's dtype (mamba_ssm_cache_dtype `auto`; models/config.py, and kda_state_dtype of mamba_utils.py).
_FP32_STATES = ("nemotron_h", "kimi_linear")
_STATED_STATES = ("nemotron_h", "qwen3_5_text", "qwen3_5_moe_text")
_STATE_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}

_PAGES = {
    "full_attention": FULL, "sliding_window_attention": SLIDING, "chunked_attention": CHUNKED, "cross_attention": CROSS,
}  # fmt: skip


class Layer(NamedTuple):
    """One cache of one layer and its page."""

    number: int
    cache: Cache
    page: Page


def layers_of(spec: ModelSpec, dtype: Dtype, settings: Settings, rules: Rules) -> list[Layer]:
    """Every cache of every layer with its page, `spec` being one device's share, bound to a workload.

    Where states stand beside attention, attention's block grows until its page holds a state, and states are padded to
    that page. `rules` says which layers keep a window alone. Raises ModelError (exit 3) for caches whose layout in vLLM
    is not modelled.
    """
    sparse = any(isinstance(cache, IndexerKeys) for group in spec.layers for cache in group.caches)
    if spec.model_type in MINIMAX_M3 and dtype.name not in ("fp16", "bf16", "fp8", "nvfp4"):
        raise UsageError(f"--kv-dtype {dtype.name}: MiniMax-M3's attention takes none", "one of bf16, fp8, nvfp4")
    layers = []
    whole = _kept_whole(spec, rules)
    for group in spec.layers:
        pages: list[tuple[Cache, Page]] = []
        for cache in group.caches:
            if isinstance(cache, RecurrentState):
                if not rules.states:
                    raise ModelError(f"{spec.name}: states are counted for vLLM 0.11 and later")
                size = _state_bytes(spec, cache, settings.num_speculative_tokens)
                pages.append((cache, Page(STATE, 0, 0, state_bytes=size)))
            elif not (isinstance(cache, CrossAttention) and not cache.encoder_tokens):
                pages.append((cache, _token_page(spec, cache, dtype, settings.block_size, sparse, whole)))
        layers += [Layer(number, *page) for number in range(group.first, group.last + 1) for page in pages]
    return _beside_states(layers, settings.block_size, rules.mla_block)


def with_draft_layers(share: ModelSpec) -> ModelSpec:
    """`share` with the layers for further tokens (MTP), which speculative decoding runs beside the model's own: as many
    as the config names, each with a cache like that of the last layer that attends and keeps the most.

    Source: DeepSeekMTP, GlmMoeDsaMTP and Qwen3_5MTP of vLLM 0.33.0: one decoder layer of the model's own kind, with an
    indexer where the family has one. Raises UsageError (exit 2) where the config names none.
    """
    if share.num_draft_layers is None:
        raise UsageError(
            f"--num-speculative-tokens: {share.name} names no layers for further tokens",
            "a draft model of its own is another model: estimate it beside",
        )
    attending = [group for group in share.layers if any(not isinstance(c, RecurrentState) for c in group.caches)]
    kept = max(attending, key=lambda group: (len(group.caches), group.last)).caches
    first = share.num_layers
    return share._replace(layers=(*share.layers, LayerGroup(first, first + share.num_draft_layers - 1, kept)))


def _kept_whole(spec: ModelSpec, rules: Rules) -> tuple[str, ...]:
    """Kinds of caches that this release keeps for every token."""
    window = "sliding_window_attention"
    alone = {cache.kind for cache in all_caches(spec)} == {window}
    windows = rules.windows == "always" or (rules.windows == "alone" and alone)
    found = () if windows else (window,)
    return found if rules.chunks else (*found, "chunked_attention")


def _state_bytes(spec: ModelSpec, cache: RecurrentState, speculative_tokens: int) -> int:
    """The convolution's inputs, one more for each speculative token, in the model's dtype; and the state."""
    model_dtype = DTYPES[cache.conv_dtype or "bf16"]
    columns = cache.conv_kernel - 1 + speculative_tokens
    state = _state_dtype(spec, model_dtype) if cache.state_dtype == "fp32" else model_dtype
    return bytes_of(cache.conv_channels * columns, model_dtype) + bytes_of(cache.state_elements, state)


def _token_page(
    spec: ModelSpec, cache: Cache, dtype: Dtype, block_size: int, sparse: bool, whole: tuple[str, ...]
) -> Page:
    if isinstance(cache, HEADS_CACHES):
        kind = FULL if cache.kind in whole else _PAGES[cache.kind]
        span = cache.window or 0 if kind in (SLIDING, CHUNKED) else 0
        width = (cache.num_kv_heads, cache.k_head_dim, cache.v_head_dim)
        return Page(kind, block_size, heads_bytes(cache, dtype), span, width)
    if isinstance(cache, LatentAttention) and cache.window is None:
        row = cache.kv_lora_rank + cache.qk_rope_head_dim
        return Page(MLA, block_size, latent_bytes(cache, dtype, sparse), width=(row,))
    if isinstance(cache, IndexerKeys):
        if spec.model_type in MINIMAX_M3:
            token_bytes = bytes_of(cache.head_dim, DTYPES["bf16"])
        else:
            # In fp8 whatever the cache's dtype, with a scale in fp32 for each 128 (DeepseekV32IndexerCache).
            token_bytes = cache.head_dim + ceil_div(cache.head_dim, 128) * 4
        return Page(MLA, block_size, token_bytes, width=(0, cache.head_dim))
    name = "compressed attention" if isinstance(cache, CompressedAttention) else cache.kind.replace("_", " ")
    raise ModelError(f"{spec.name}: vLLM's layout of {name} is not modelled")


def _state_dtype(spec: ModelSpec, model_dtype: Dtype) -> Dtype:
    if spec.model_type in _STATED_STATES and spec.state_dtype in _STATE_DTYPES:
        return DTYPES[_STATE_DTYPES[spec.state_dtype]]
    return DTYPES["fp32"] if spec.model_type in _FP32_STATES else model_dtype


def _beside_states(layers: list[Layer], block_size: int, mla_block: int) -> list[Layer]:
    """`layers` with attention's block large enough for a state, where there are both."""
    states = [layer.page.state_bytes for layer in layers if layer.page.kind == STATE]
    tokens = [layer.page for layer in layers if layer.page.kind != STATE]
    if not states or not tokens:
        return layers
    align = max(_KERNEL_BLOCK, block_size)
    if any(page.kind == MLA for page in tokens):
        align = max(align, mla_block)
    token_bytes = max(page.token_bytes for page in tokens)
    block = max(block_size, align * ceil_div(max(states), align * token_bytes))
    for place, (number, cache, page) in enumerate(layers):
        is_state = page.kind == STATE
        page = page._replace(padded_bytes=block * token_bytes) if is_state else page._replace(block_size=block)
        layers[place] = Layer(number, cache, page)
    return layers
