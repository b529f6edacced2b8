"""The page of every layer: the cache spec in vLLM that corresponds to each cache in kvcalc.

Source: attention.py, mla_attention.py, deepseek_v2.py (the indexer) and mamba_utils.py under vllm/model_executor, and
_align_hybrid_block_size of platforms/interface.py, vLLM 0.33.0.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import lcm
from typing import cast

from kvcalc.engines.place import ANYWHERE, RAW_FP8, Place
from kvcalc.engines.rounding import ceil_div, round_up
from kvcalc.engines.vllm.cache_dtypes import heads_bytes, latent_bytes
from kvcalc.engines.vllm.deepseek_v41 import v41_pages
from kvcalc.engines.vllm.defaults import BLOCK, COMPRESSED_BLOCK, DOTS3, GLM5_NEXT, INKLING, MINIMAX_M3, QWEN4, V41
from kvcalc.engines.vllm.groups import BUCKETS
from kvcalc.engines.vllm.pages import CHUNKED, CROSS, FULL, MLA, RING, SLIDING, STATE, Page
from kvcalc.engines.vllm.releases import Rules
from kvcalc.engines.vllm.settings import Settings
from kvcalc.engines.vllm.skipped import skipped_layers
from kvcalc.engines.vllm.states import ALL, States
from kvcalc.errors import LayoutError, ModelError, UsageError
from kvcalc.memory.dtypes import DTYPES, Dtype, bytes_of
from kvcalc.memory.reads import Entries
from kvcalc.model.caches import (
    HEADS_CACHES,
    READ_PARTS,
    Cache,
    CompressedAttention,
    CrossAttention,
    IndexerKeys,
    LatentAttention,
    RecurrentState,
)
from kvcalc.model.layers import LayerGroup
from kvcalc.model.spec import ModelSpec, all_caches
from kvcalc.records import NamedTuple

# Families whose state is in fp32 by default, and families whose config may set the state's dtype. In other families the
# state has the model's dtype (mamba_ssm_cache_dtype `auto`; models/config.py, and kda_state_dtype of mamba_utils.py).
_FP32_STATES = ("alice_ai", "nemotron_h", "kimi_linear", "bailing_hybrid", *GLM5_NEXT)
_STATED_STATES = ("nemotron_h", "qwen3_5_text", "qwen3_5_moe_text", *QWEN4)
# Their layers do not read --mamba-ssm-cache-dtype (get_state_dtype of BailingMoeV3KimiDeltaAttention and
# KimiGatedDeltaNetAttention). Of kimi_linear, those of Kimi K3 do, on NVIDIA's devices since the release below
# (KimiK3DeltaAttention). Since then blocks are counted with it for Kimi Linear too (get_mamba_state_dtype_from_config
# of models/kimi_k3, 0.26.0 to 0.33.0).
_OWN_STATES, _KIMI, _KIMI_READS_SINCE = ("alice_ai", "bailing_hybrid"), "kimi_linear", (0, 30)
_STATE_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}

# vLLM's window has one token less than the model's (sliding_window_size; MiMoV2Attention, models/mimo_v2.py). Before
# 0.20, V is padded to the width of K (models/mimo_v2_flash.py of 0.14.1, 0.16.0 and 0.19.1; 0.12.0 does not have it).
_MIMO, _MIMO_SINCE, _MIMO_UNPADDED = ("mimo_v2", "mimo_v2_flash"), (0, 14, 0), (0, 20, 0)

# The first release whose layout of Qwen4-Exp, GLM-5-Next and Inkling was read.
_QWEN4_SINCE = (0, 33, 0)

_PAGES = {
    "full_attention": FULL, "sliding_window_attention": SLIDING, "chunked_attention": CHUNKED, "cross_attention": CROSS,
}  # fmt: skip


class Layer(NamedTuple):
    """A page of one cache of one layer. `part` is the part of the cache that the page stores, if it has several."""

    number: int
    cache: Cache
    page: Page
    part: str | None = None


def layers_of(
    spec: ModelSpec, dtype: Dtype, settings: Settings, states: States, rules: Rules, place: Place = ANYWHERE
) -> list[Layer]:
    """Every cache of every layer, with its page. `spec` is one device's share, bound to a workload.

    If a model has both states and attention, attention's block grows until its page can hold a state, and states are
    padded to that page. `states` is how they are kept. `rules` decides which layers keep only a window. Raises
    ModelError (exit 3) for caches whose layout in vLLM is not modelled.
    """
    sparse = any(isinstance(cache, IndexerKeys) for group in spec.layers for cache in group.caches)
    if spec.model_type in MINIMAX_M3 and dtype.name not in ("fp16", "bf16", "fp8", "nvfp4"):
        raise UsageError(f"--kv-dtype {dtype.name}: not supported for MiniMax-M3", "one of bf16, fp8, nvfp4")
    if spec.model_type in DOTS3 and dtype.name not in ("fp16", "bf16"):
        raise UsageError(
            f"--kv-dtype {dtype.name}: vLLM keeps the cache of {spec.name} in 16 bits", "one of bf16, fp16"
        )
    if spec.model_type in DOTS3 and rules.packing != BUCKETS:
        raise ModelError(f"{spec.name}: vLLM before 0.29 does not run {spec.model_type}", "use --engine vllm")
    if spec.model_type in GLM5_NEXT and dtype.name not in ("fp16", "bf16", RAW_FP8.name):
        text = f"--kv-dtype {dtype.name}: vLLM's rows for {spec.name} on this device are not known"
        raise UsageError(text, "use bf16; or fp8 on B200 and B300")
    if spec.model_type in (*QWEN4, *GLM5_NEXT, *INKLING) and rules.since < _QWEN4_SINCE:
        raise ModelError(f"{spec.name}: vLLM's layout of {spec.model_type} before 0.33 is not modelled")
    if spec.model_type in _MIMO and rules.since < _MIMO_SINCE:
        raise ModelError(f"{spec.name}: vLLM's layout of {spec.model_type} before 0.14 is not modelled")
    layers, counted = [], 0
    whole = _kept_whole(spec, rules, settings)
    for group in spec.layers:
        pages: list[tuple[Cache, Page, str | None]] = []
        for cache in group.caches:
            if isinstance(cache, RecurrentState) and spec.model_type in INKLING:
                pages.append((cache, _inkling_page(spec, group, cache), None))
            elif isinstance(cache, RecurrentState):
                if not rules.states:
                    raise ModelError(f"{spec.name}: recurrent states are only modelled for vLLM 0.11 and later")
                # The convolution's inputs have one more column per speculative token.
                columns = cache.conv_kernel - 1 + settings.num_speculative_tokens
                size = _state_bytes(spec, cache, settings, columns, place)
                counted = max(counted, _state_bytes(spec, cache, settings, columns, place, is_counted=True))
                # States that every rank holds whole are not in a group with others (MambaSpec.tp_replicated).
                is_whole = cache.group_channels > 0 and not cache.state_elements
                pages.append((cache, Page(STATE, 0, 0, state_bytes=size, is_replicated=is_whole), None))
            elif isinstance(cache, CompressedAttention):
                parts = (
                    v41_pages(spec, cache, dtype, settings.block_size, settings.num_speculative_tokens, place)
                    if spec.model_type in V41
                    else compressed_pages(spec, cache, dtype, settings.block_size)
                )
                pages += [(cache, page, part) for part, page in parts]
            elif isinstance(cache, IndexerKeys) and spec.model_type in QWEN4:
                pages += [(cache, *page) for page in _qwen4_pages(spec, cache, settings)]
            elif isinstance(cache, IndexerKeys) and spec.model_type in GLM5_NEXT:
                pages += [(cache, *page) for page in _glm5_pages(spec, cache, settings)]
            elif not (isinstance(cache, CrossAttention) and not cache.encoder_tokens):
                page = _token_page(spec, _stored(spec, cache, rules), dtype, settings.block_size, sparse, whole, place)
                pages.append((cache, page, None))
        layers += [Layer(number, *page) for number in range(group.first, group.last + 1) for page in pages]
    layers = _beside_states(layers, settings, counted, rules.mla_block, states)
    skipped = skipped_layers(spec, dtype, settings, place)
    if skipped is not None:

        def own_page(cache: Cache) -> Page:
            return _token_page(spec, cache, skipped.dtype, settings.block_size, sparse, whole, place)

        pages_of_all = skipped.pages([layer[:3] for layer in layers], settings.block_size, own_page)
        layers = [layer._replace(page=page) for layer, page in zip(layers, pages_of_all)]
    return layers


def entries_of(spec: ModelSpec, layers: list[Layer], settings: Settings, place: Place) -> list[Entries]:
    """What a step reads of these layers: the rows of their pages, and one state without inputs for drafted tokens."""
    counts: dict[tuple[type[Cache], Cache, tuple[int, ...]], int] = {}
    parts: dict[tuple[int, Cache], dict[str | None, int]] = {}
    for number, cache, page, part in layers:
        if isinstance(cache, CompressedAttention):
            parts.setdefault((number, cache), {})[part] = page.token_bytes
            continue
        if page.kind == RING:
            continue
        size = page.token_bytes // page.rate
        if isinstance(cache, RecurrentState):
            size = _state_bytes(spec, cache, settings, cache.conv_kernel - 1, place)
        counts[type(cache), cache, (size,)] = counts.get((type(cache), cache, (size,)), 0) + 1
    for (_, cache), of_part in parts.items():
        sizes = tuple(of_part.get(part, 0) for part in READ_PARTS)
        counts[type(cache), cache, sizes] = counts.get((type(cache), cache, sizes), 0) + 1
    return [Entries(cache, count, sizes) for (_, cache, sizes), count in counts.items()]


def with_draft_layers(share: ModelSpec) -> ModelSpec:
    """`share` with the multi-token prediction layers (MTP) that speculative decoding adds to the model.

    Raises UsageError (exit 2) if the config names no such layers.
    """
    if share.num_draft_layers is None:
        raise UsageError(
            f"--num-speculative-tokens: {share.name} has no multi-token prediction (MTP) layers",
            "estimate a separate draft model on its own",
        )
    from kvcalc.model.drafting import mtp_like

    first = share.num_layers
    kept = mtp_like(share).caches
    return share._replace(layers=(*share.layers, LayerGroup(first, first + share.num_draft_layers - 1, kept)))


def _kept_whole(spec: ModelSpec, rules: Rules, settings: Settings) -> tuple[str, ...]:
    """The kinds of windowed caches for which this release keeps all tokens.

    Without the hybrid manager, these are all of them if other layers keep all tokens (unify_hybrid_kv_cache_specs,
    core/kv_cache_planning.py, vLLM 0.33.0). Raises ModelError (exit 3) for models that need the manager.
    """
    window = "sliding_window_attention"
    if settings.disable_hybrid_kv_cache_manager:
        kinds = {cache.kind for cache in all_caches(spec)}
        if len(kinds) > 1 and kinds & {"recurrent_state", "cross_attention", "compressed_attention"}:
            raise ModelError(f"{spec.name}: --disable-hybrid-kv-cache-manager is not supported for its kinds of layers")
        if kinds & {"full_attention", "latent_attention"}:
            return (window, "chunked_attention", "latent_attention")
    alone = {cache.kind for cache in all_caches(spec)} == {window}
    windows = rules.windows == "always" or (rules.windows == "alone" and alone)
    kept = () if windows else (window,)
    return kept if rules.chunks else (*kept, "chunked_attention")


def _state_bytes(
    spec: ModelSpec, cache: RecurrentState, settings: Settings, columns: int, place: Place, *, is_counted: bool = False
) -> int:
    """Bytes of the state and of `columns` columns of the convolution's inputs. `is_counted`: as a block counts them.

    The inputs have the type of --mamba-cache-dtype, by default the model's, and so does the state if neither
    --mamba-ssm-cache-dtype nor the model's family decides otherwise (MambaStateDtypeCalculator,
    layers/mamba/mamba_utils.py, vLLM 0.33.0).
    """
    conv, kind = _STATE_DTYPES.get(settings.mamba_cache_dtype, cache.conv_dtype or "bf16"), spec.model_type
    stated = _STATE_DTYPES.get(settings.mamba_ssm_cache_dtype)
    if kind in _OWN_STATES or (kind == _KIMI and not place.since(*_KIMI_READS_SINCE)):
        stated = None
    if stated == "fp16" and kind in (_KIMI, *GLM5_NEXT):
        raise UsageError("--mamba-ssm-cache-dtype float16: not supported for KDA", "one of float32, bfloat16")
    if kind == _KIMI and not is_counted and not _has_full_rank_gate(spec):
        stated = None
    state = DTYPES[conv]
    if cache.state_dtype == "fp32":
        state = DTYPES[stated] if stated else _state_dtype(spec, state)
    return bytes_of(cache.conv_channels * columns, DTYPES[conv]) + bytes_of(cache.state_elements, state)


def _has_full_rank_gate(spec: ModelSpec) -> bool:
    """Whether the delta attention is Kimi K3's, and not Kimi Linear's."""
    stated = spec.stated.get("linear_attn_config")
    return isinstance(stated, Mapping) and bool(stated.get("use_full_rank_gate"))


def _stored(spec: ModelSpec, cache: Cache, rules: Rules) -> Cache:
    """The cache as the release stores it."""
    if isinstance(cache, HEADS_CACHES) and spec.model_type in _MIMO and rules.since < _MIMO_UNPADDED:
        return cache._replace(v_head_dim=cache.k_head_dim)
    return cache


def _token_page(
    spec: ModelSpec, cache: Cache, dtype: Dtype, block_size: int, sparse: bool, whole: tuple[str, ...], place: Place
) -> Page:
    if isinstance(cache, HEADS_CACHES):
        kind = FULL if cache.kind in whole else _PAGES[cache.kind]
        span = cache.window or 0 if kind in (SLIDING, CHUNKED) else 0
        if span and spec.model_type in _MIMO:
            span -= 1
        width = (cache.num_kv_heads, cache.k_head_dim, cache.v_head_dim)
        return Page(kind, block_size, heads_bytes(cache, dtype, place), span, width)
    if isinstance(cache, LatentAttention) and spec.model_type in DOTS3:
        return _dots3_page(spec, cache, dtype, block_size, whole)
    if isinstance(cache, LatentAttention) and cache.window is None:
        row = cache.kv_lora_rank + cache.qk_rope_head_dim
        size = latent_bytes(cache, dtype, sparse)
        # Sparse kernels read a packed cache in whole rows, or fp8 in pages of 32 rows (align_blocks_to_rows).
        stride = size * (32 if dtype == RAW_FP8 else 1) if spec.model_type in GLM5_NEXT else 0
        return Page(MLA, block_size, size, width=(row,), stride=stride)
    if isinstance(cache, IndexerKeys):
        if spec.model_type in MINIMAX_M3:
            # Always in bf16 (MiniMaxM3IndexerCache, indexer_kv_dtype `auto`).
            token_bytes = bytes_of(cache.head_dim, DTYPES["bf16"])
        else:
            # Always in fp8, with an fp32 scale per 128 elements (DeepseekV32IndexerCache).
            token_bytes = cache.head_dim + ceil_div(cache.head_dim, 128) * 4
        return Page(MLA, block_size, token_bytes, width=(0, cache.head_dim))
    raise ModelError(f"{spec.name}: vLLM's layout of {cache.kind.replace('_', ' ')} is not modelled")


def _qwen4_pages(spec: ModelSpec, cache: IndexerKeys, settings: Settings) -> list[tuple[Page, str | None]]:
    """The index keys of Qwen4-Exp, in 16 bits: one for each group of tokens, and a ring for those of the open group.

    The ring has room for drafted tokens too, in whole groups. Its page becomes as large as a block, so the positions
    that it may keep beside the keys take nothing.

    Source: QSAKeyStateCache and QSACompressedKeyCache, models/qwen4_exp/common/qsa_cache.py, vLLM 0.33.0.
    """
    rate = cast(int, spec.stated["indexer_compress_ratio"])
    key = bytes_of(cache.head_dim, DTYPES["bf16"])
    return [
        (Page(MLA, settings.block_size, key, width=(0, cache.head_dim), rate=rate), None),
        (Page(RING, round_up(rate + settings.num_speculative_tokens, rate), key), RING),
    ]


def _inkling_page(spec: ModelSpec, group: LayerGroup, cache: RecurrentState) -> Page:
    """The inputs of a layer's four convolutions, in 16 bits: a window of as many tokens as the kernel is wide.

    A KV head has its keys, its values, and its share of the outputs of attention and of the MLP, padded to a power of
    two. Raises UsageError (exit 2) if a device has less than one KV head.

    Source: InklingConvState, models/inkling/nvidia/sconv_swa_attn.py, vLLM 0.33.0.
    """
    (attention,) = (kept for kept in group.caches if isinstance(kept, HEADS_CACHES))
    heads, width = attention.num_kv_heads, spec.attention.hidden_size or 0
    # The width of the model is divided by the KV heads of all devices, of which this one has `heads` if none is copied.
    outputs = cache.conv_channels - 2 * heads * attention.k_head_dim
    if outputs <= 0 or (2 * width * heads) % outputs:
        raise UsageError(
            f"{spec.name}: vLLM divides its KV heads among devices and does not copy them", "use a lower --tp"
        )
    padded = 1 << (cache.conv_channels // heads - 1).bit_length()
    token_bytes = bytes_of(heads * padded, DTYPES["bf16"])
    return Page(SLIDING, cache.conv_kernel, token_bytes, cache.conv_kernel, (heads, padded))


def _glm5_pages(spec: ModelSpec, cache: IndexerKeys, settings: Settings) -> list[tuple[Page, str | None]]:
    """The index keys of GLM-5-Next: one in fp8 for each pool of tokens, and a ring for the tokens of the open pool.

    The ring has the key and the gate of a token in 16 bits, and room for drafted tokens: a power of two of pools.

    Source: Glm5NextIndexerCache and Glm5NextTailCache, models/glm5next/common/attention.py, vLLM 0.33.0.
    """
    rate, width = cast(int, spec.stated["index_kpool"]), (cache.head_dim - 1) // 2
    pools = ceil_div(rate + settings.num_speculative_tokens, rate)
    ring = rate * (1 << (pools - 1).bit_length())
    return [
        (Page(MLA, settings.block_size, width + ceil_div(width, 128) * 4, width=(0, width), rate=rate), None),
        (Page(RING, ring, 2 * bytes_of(width, DTYPES["bf16"])), RING),
    ]


def _dots3_page(spec: ModelSpec, cache: LatentAttention, dtype: Dtype, block_size: int, whole: tuple[str, ...]) -> Page:
    """The latents of Dots3-Note. Layers without a window have rows as wide as those of layers with one.

    Source: Dots3NotePaddedMLAAttention and Dots3NoteSlidingAttention, models/dots3_note/nvidia/model.py, vLLM 0.33.0.
    """
    latents = [each for each in all_caches(spec) if isinstance(each, LatentAttention)]
    row = max(latent_bytes(each, dtype, sparse=False) for each in latents)
    kind = SLIDING if cache.window is not None and cache.kind not in whole else MLA
    latent, width = latent_bytes(cache, dtype, sparse=False), (cache.kv_lora_rank + cache.qk_rope_head_dim,)
    return Page(kind, block_size, latent, cache.window or 0, width, padded_bytes=block_size * row, stride=row)


def _state_dtype(spec: ModelSpec, model_dtype: Dtype) -> Dtype:
    if spec.model_type in _STATED_STATES and spec.state_dtype in _STATE_DTYPES:
        return DTYPES[_STATE_DTYPES[spec.state_dtype]]
    return DTYPES["fp32"] if spec.model_type in _FP32_STATES else model_dtype


def _beside_states(
    layers: list[Layer], settings: Settings, counted: int, mla_block: int, states: States
) -> list[Layer]:
    """`layers`, with attention's block large enough for a state of `counted` bytes if there are both.

    LayoutError (exit 2) if a state takes more than that, and than the block.
    """
    block_size = settings.block_size
    sizes = [layer.page.state_bytes for layer in layers if layer.page.kind == STATE]
    tokens = [layer.page for layer in layers if layer.page.kind not in (STATE, RING) and layer.page.rate == 1]
    if not sizes or not tokens:
        return layers
    # MLA in a model with states needs larger blocks than other kernels (`Rules.mla_block`).
    align = max(BLOCK, block_size)
    if any(page.kind == MLA for page in tokens):
        align = max(align, mla_block)
    align = lcm(align, states.alignment)
    token_bytes = max(page.token_bytes for page in tokens)
    block = max(block_size, align * ceil_div(counted, align * token_bytes))
    if block * token_bytes < max(sizes):
        text = (
            f"--mamba-ssm-cache-dtype {settings.mamba_ssm_cache_dtype}: vLLM does not start, for it keeps these states"
        )
        raise LayoutError(f"{text} in float32, and makes blocks too small for them", "use float32, or leave it out")
    for place, layer in enumerate(layers):
        page = layer.page
        if page.kind == RING:
            continue
        if page.kind == STATE:
            page = page._replace(padded_bytes=block * token_bytes, block_size=block if states.mode == ALL else 0)
        else:
            page = page._replace(block_size=block)
        layers[place] = layer._replace(page=page)
    return layers


# DeepSeek-V4's layers in vLLM: a window, compressed entries, index keys, and the states of the compressors.
# Source: DeepseekV4Attention, DeepseekV4IndexerCache (models/deepseek_v4/attention.py), CompressorStateCache
# (models/deepseek_v4/compressor.py) and DeepseekV4SWACache (v1/attention/backends/mla/sparse_swa.py), vLLM 0.33.0. The
# pages are the same since 0.20.

_WINDOW_BLOCK = 64
_STATE_BLOCKS: Mapping[int, int] = {4: 4, 128: 8}

# fp8_ds_mla: 448 of 512 elements in fp8, the 64 rotary ones in 16 bits, and 8 bytes of scales. FlashMLA needs pages of
# a multiple of 576 bytes.
_HEAD_DIM, _ROPE_DIM, _ROW_BYTES, _ALIGNMENT = 512, 64, 584, 576


def compressed_pages(
    spec: ModelSpec, cache: CompressedAttention, dtype: Dtype, block_size: int
) -> list[tuple[str, Page]]:
    """The pages of one layer, each with the part of the cache that it stores (`CompressedAttention.stored_parts`).

    A compressor keeps keys and gates in fp32 for the tokens of one entry, or of two if entries overlap. The buffers of
    the two compressors are one part of the cache, which counts for the first of their pages.

    Raises UsageError (exit 2) for types that the kernels do not read, and ModelError (exit 3) for other dimensions.
    """
    if dtype.name not in ("fp8", "fp8_ds_mla"):
        raise UsageError(f"--kv-dtype {dtype.name}: vLLM keeps the cache of {spec.name} in fp8", "use --kv-dtype fp8")
    if block_size % COMPRESSED_BLOCK:
        raise UsageError(
            f"--block-size {block_size}: vLLM's kernels for {spec.name} need multiples of {COMPRESSED_BLOCK}",
            f"use --block-size {COMPRESSED_BLOCK}",
        )
    rate = cache.compress_rate
    if cache.head_dim != _HEAD_DIM or spec.attention.rope_dim != _ROPE_DIM or rate not in (0, *_STATE_BLOCKS):
        raise ModelError(f"{spec.name}: vLLM's kernels need head_dim 512, qk_rope_head_dim 64 and rates of 4 or 128")
    pages = [("window", Page(SLIDING, _WINDOW_BLOCK, _ROW_BYTES, cache.window).aligned(_ALIGNMENT))]
    if not rate:
        return pages
    runs = 2 if cache.index_head_dim else 1
    pages.append(("compressed", Page(MLA, block_size, _ROW_BYTES, rate=rate).aligned(_ALIGNMENT)))
    widths = [("buffers", cache.head_dim)]
    if cache.index_head_dim:
        # In fp8, with an fp32 scale per 128 elements.
        key_bytes = cache.index_head_dim + ceil_div(cache.index_head_dim, 128) * 4
        pages.append(("index keys", Page(MLA, block_size, key_bytes, rate=rate).aligned(_ALIGNMENT)))
        widths.append(("", cache.index_head_dim))
    for part, width in widths:
        state_bytes = 2 * runs * width * 4
        pages.append((part, Page(SLIDING, _STATE_BLOCKS[rate], state_bytes, runs * rate).aligned(_ALIGNMENT)))
    return pages
