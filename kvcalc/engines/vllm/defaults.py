"""The cache type that vLLM chooses for sparse attention (DeepSeek-V3.2 and V4, GLM-5), by release and device.

Source, in vLLM 0.33.0: DeepseekV32ForCausalLM and GlmMoeDsaForCausalLM (model_executor/models/config.py),
_canonicalize_sparse_mla_kv_cache_dtype (model_executor/layers/attention/mla_attention.py) and _get_backend_priorities
(platforms/cuda.py). The releases in which a rule begins were found in the wheels of 0.11.2, 0.13, 0.14, 0.16 to 0.20,
0.24, 0.28 and 0.30 to 0.33.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from kvcalc.engines.account import DeviceDefault
from kvcalc.engines.options import SettingsReader
from kvcalc.engines.place import ANYWHERE, Place, is_fp8
from kvcalc.engines.reserve import GIB, NEWEST
from kvcalc.errors import LayoutError
from kvcalc.model.caches import HEADS_CACHES
from kvcalc.model.memo import remembered
from kvcalc.model.spec import ModelSpec, all_caches, has_compressed, has_states, is_sparse, latent_of
from kvcalc.records import NamedTuple
from kvcalc.releases import Release


def default_cache(spec: ModelSpec, place: Place) -> tuple[str, str] | None:
    """The type that `auto` means for this model, and the reason. None if it is the model's own type.

    - DeepSeek-V4: fp8, on every device (_resolve_dsv4_kv_cache_dtype, models/deepseek_v4/attention.py).
    - GLM-5: fp8 on B200 and B300 since 0.32.
    - The only backend for GeForce and RTX PRO Blackwell keeps packed fp8 rows (since 0.28).
    - 0.11.0 used fp8 for DeepSeek-V3.2 on every device (pull request 25988); 0.11.2 no longer does.
    """
    if has_compressed(spec):
        return "fp8", f"vLLM keeps the cache of {spec.name} in fp8"
    if not is_sparse(spec) or spec.model_type in DOTS3:
        return None
    if spec.model_type in ("glm_moe_dsa", *GLM5_NEXT) and place.is_sm100 and place.since(0, 32):
        return "fp8", "vLLM's default for GLM-5 on B200 and B300 is fp8"
    if place.is_sm120 and place.since(0, 28):
        return "fp8", "vLLM's sparse attention on this device needs fp8"
    if place.release is not None and Release.of(0, 11) <= place.release < Release.of(0, 11, 1):
        return "fp8", "vLLM 0.11.0 uses fp8 for sparse attention"
    return None


def has_raw_rows(spec: ModelSpec, place: Place) -> bool:
    """Whether an fp8 row of the latent has no scales.

    On B200 and B300, vLLM prefers FlashInfer for an fp8 cache, which reads raw rows. Packed rows (fp8_ds_mla) belong to
    FlashMLA. Before 0.18, every fp8 cache of sparse attention was packed.
    """
    return place.is_sm100 and place.since(0, 18) and is_sparse(spec)


# The default size of a block, which the kernels of attention decide by model, cache type and device.
# Source: update_block_size_for_backend (platforms/interface.py), _get_backend_priorities (platforms/cuda.py) and
# get_supported_kernel_block_sizes of every kernel (v1/attention/backends), vLLM 0.33.0. The order of the kernels is the
# same since 0.18. Before that, check_and_update_config (platforms/cuda.py of 0.11.2 to 0.16.0) set the size.

# Of most kernels, and of MiniMax-M3's: a block has 128 tokens, like the blocks that the indexer selects
# (MiniMaxM3IndexerCache of models/minimax_m3/common/indexer.py).
BLOCK, M3_BLOCK = 16, 128
# All kernels for DeepSeek-V4 need blocks of a multiple of 256 tokens. Windows and states have smaller blocks.
COMPRESSED_BLOCK = 256
MINIMAX_M3 = ("minimax_m3", "minimax_m3_vl_text")
# Its only kernels read rows of 16 bits (FlashAttnMLASparseBackend, v1/attention/backends/mla/flashattn_mla_sparse.py).
DOTS3 = ("dots3_note_text",)
QWEN4 = ("qwen4_exp_text",)
INKLING = ("inkling_text",)
V41 = ("deepseek_v41_text",)
# The kernel of its indexer reads pages of 32 or 64 keys, each of 16 tokens (Glm5NextIndexerBackend,
# v1/attention/backends/mla/indexer.py).
GLM5_NEXT, _INDEX_PAGE = ("glm5_next_text",), 32

# The indexer of sparse attention reads blocks of 64 tokens on CUDA, and so does FlashMLA. FlashInfer's MLA reads 32 or
# 64, and CUTLASS's 128. On ROCm, both kernels of sparse attention read blocks of any size, so they keep vLLM's default.
# Before vLLM chose blocks by kernel, these kernels took --block-size 1 only (get_attn_backend_cls of platforms/rocm.py
# in 0.14.0; get_supported_kernel_block_sizes of rocm_aiter_mla_sparse.py and indexer.py in 0.19.0 to 0.33.0).
_SPARSE, _FLASHMLA, _FLASHINFER_MLA, _CUTLASS_MLA = 64, 64, 32, 128
_BY_KERNEL, _FLASHINFER_SINCE = (0, 18), (0, 15)
# FlashAttention 4 reads an fp8 cache of heads of 512 elements in blocks of 64 on Hopper (Gemma 4).
_WIDE_HEADS, _WIDE_BLOCK, _WIDE_SINCE = 512, 64, (0, 31)
# Beside states, blocks for FlashInfer and heads of 256 elements were multiples of 32 tokens in 0.12 to 0.17
# (HybridAttentionMambaModelConfig, model_executor/models/config.py).
_FLASHINFER_HEADS, _FLASHINFER_BLOCK, _FLASHINFER_PADS = 256, 32, ((0, 12), (0, 18))


_AMD = ("cdna2", "cdna3", "cdna4")


def check_block(spec: ModelSpec, block_size: int, device_class: str | None) -> None:
    """Raise UsageError (exit 2) for a size of a block that no kernel reads on this device (None: on any device).

    AITER's kernels for latent attention, on AMD's GPUs, read blocks of any size (get_supported_kernel_block_sizes of
    rocm_aiter_mla.py, rocm_aiter_mla_sparse.py and indexer.py).
    """
    takes_any = latent_of(spec) is not None and (device_class is None or device_class in _AMD)
    if block_size % step_of(spec) and not (takes_any and step_of(spec) == BLOCK):
        raise LayoutError(
            f"--block-size {block_size}: vLLM's kernels for {spec.name} need multiples of {step_of(spec)}",
            f"use --block-size {step_of(spec)}",
        )


@remembered
def step_of(spec: ModelSpec) -> int:
    """The smallest block, of which all others are multiples."""
    if spec.model_type in MINIMAX_M3:
        return M3_BLOCK
    if spec.model_type in GLM5_NEXT:
        return _INDEX_PAGE * cast(int, spec.stated["index_kpool"])
    if spec.model_type in V41:
        return _v41_step(ANYWHERE)
    return COMPRESSED_BLOCK if has_compressed(spec) else BLOCK


@remembered
def default_block(spec: ModelSpec, kv_type: object, place: Place) -> int:
    """The tokens of a block if none are given. `kv_type` is the name of the cache's type.

    Without a device, only what the model decides on every device counts.
    """
    if spec.model_type in V41:
        return _v41_step(place)
    if is_sparse(spec):
        if spec.model_type in GLM5_NEXT:
            return step_of(spec)
        on_rocm = BLOCK if place.since(*_BY_KERNEL) else 1
        return on_rocm if place.device_class in _AMD else _SPARSE
    if latent_of(spec) is not None:
        return _latent_block(kv_type, place)
    if has_states(spec) and _pads_for_flashinfer(spec, place):
        return _FLASHINFER_BLOCK
    wide = place.device_class == "hopper" and is_fp8(kv_type) and place.since(*_WIDE_SINCE)
    return _WIDE_BLOCK if wide and _has_heads_of(spec, _WIDE_HEADS) else step_of(spec)


def _v41_step(place: Place) -> int:
    """The tokens of the smallest block, of which all others are multiples (sparse_mla.py of models/deepseek_v41)."""
    return 128 if place.is_sm100 else 64


def _latent_block(kv_type: object, place: Place) -> int:
    """Of MLA in all layers. FlashAttention's kernel for Hopper reads no fp8, and older releases preferred FlashMLA."""
    if place.is_sm100:
        if place.since(*_BY_KERNEL):
            return _FLASHINFER_MLA
        return _FLASHMLA if place.since(*_FLASHINFER_SINCE) else _CUTLASS_MLA
    takes_flashmla = is_fp8(kv_type) or not place.since(*_BY_KERNEL)
    return _FLASHMLA if place.device_class == "hopper" and takes_flashmla else BLOCK


def _pads_for_flashinfer(spec: ModelSpec, place: Place) -> bool:
    since, until = (Release.of(*each) for each in _FLASHINFER_PADS)
    is_old = place.release is not None and since <= place.release < until
    return is_old and place.is_sm100 and _has_heads_of(spec, _FLASHINFER_HEADS)


def _has_heads_of(spec: ModelSpec, elements: int) -> bool:
    return any(isinstance(cache, HEADS_CACHES) and cache.k_head_dim == elements for cache in all_caches(spec))


# The defaults that vLLM chooses by device: tokens in a step, running requests, the prefill kernel and the block.

# The devices on which FlashInfer prefills gated delta nets, if CUDA is 13 or newer and keys have 128 elements, as in
# every Qwen model (_resolve_gdn_prefill_backend, layers/mamba/gdn/qwen_gdn_linear_attn.py, wheels of 0.28 to 0.33): the
# class, and the first release.
_FLASHINFER_DELTA_NETS = {"hopper": Release.of(0), "blackwell": Release.of(0), "blackwell-rtx": Release.of(0, 30)}

# Intel's GPUs. V1 has blocks of 64 tokens there since 0.9.2 (check_and_update_config, platforms/xpu.py), but not with
# MLA from 0.20 to 0.31 (get_preferred_block_size, flash_attn.py; MLA's kernel is Triton's). Models with states differ
# before 0.32 (XPU_BLOCK of engines/vllm).
_XPU, _XPU_BLOCK = ("xe-hpg", "xe2"), "64"
_XPU_BLOCKS_SINCE, _XPU_MLA_UNTIL, _ALL_XPU_BLOCKS_SINCE = Release.of(0, 9, 2), Release.of(0, 20), Release.of(0, 32)


class _Batches(NamedTuple):
    """The tokens in one step and the requests of vLLM's API server, on some `devices`.

    These have at least this memory, and a name that begins with one of `only`, and with none of `but`.
    """

    tokens: int
    requests: int
    memory_bytes: int
    devices: str
    only: tuple[str, ...] = ("",)
    but: tuple[str, ...] = ()

    def are_for(self, device_name: str, memory_bytes: int) -> bool:
        return (
            memory_bytes >= self.memory_bytes
            and device_name.startswith(self.only)
            and not (self.but and device_name.startswith(self.but))
        )


# Since a release, the newest first. Source: get_batch_defaults and _set_default_args, engine/arg_utils.py of 0.8.0 to
# 0.33.0. The first row that is for a device holds. 0.33 names GB10. Before, NVML did not tell its memory, which then
# counted as 0 (get_device_total_memory, platforms/cuda.py).
_LARGEST = _Batches(16384, 1024, 160 * GIB, "160 GiB and more")
# Logs of Ryzen AI Max have the small defaults too.
_SHARED = ("gb10", "ryzen-ai")
_LARGE = _Batches(8192, 1024, 70 * GIB, "70 GiB and more, except A100, GB10 and Ryzen AI", but=("a100", *_SHARED))
_NAMED = _Batches(8192, 1024, 0, "H100 and H200", only=("h100", "h200", "gh200"))
_OTHERS = _Batches(2048, 256, 0, "others")
_BATCHES = {
    Release.of(0, 28): (_LARGEST, _LARGE, _OTHERS),
    Release.of(0, 9): (_LARGE, _OTHERS),
    Release.of(0, 8, 5): (_LARGE._replace(devices="70 GiB and more, except GB10 and Ryzen AI", but=_SHARED), _OTHERS),
    Release.of(0, 8, 4): (_NAMED, _OTHERS),
    Release.of(0, 8): (_NAMED, _OTHERS._replace(requests=1024)),
    Release.of(0): (_OTHERS,),
}


# A step holds a whole video of Gemma 4's larger models, whose tokens attend to each other: 32 frames of 70 tokens and 8
# marks. vLLM raises its default for them since this release, and did not start before (get_mm_max_tokens_per_item,
# model_executor/models/gemma4_mm.py, and _set_default_max_num_seqs_and_batched_tokens_args, engine/arg_utils.py).
_GEMMA4, _GEMMA4_VIDEO, _VIDEOS_SINCE = "gemma4_text", 32 * (70 + 8), Release.of(0, 22)


def _least_tokens(spec: ModelSpec | None, release: Release | None, given: Mapping[str, str]) -> int:
    """The fewest tokens in a step by default, if a model's image or video may not be divided. Else 0."""
    if spec is None or spec.multimodal is None or spec.model_type != _GEMMA4 or "language-model-only" in given:
        return 0
    text = spec.multimodal.get("text_config", spec.multimodal)
    is_whole = isinstance(text, Mapping) and text.get("use_bidirectional_attention") == "vision"
    return _GEMMA4_VIDEO if is_whole and (release or NEWEST) >= _VIDEOS_SINCE else 0


def times_of(given: SettingsReader) -> int:
    """2 for a server that is to have throughput, which has twice the default tokens in a step and requests; or 1."""
    return 2 if given.choice("performance-mode") == "throughput" else 1


def device_settings(
    memory_bytes: int, device_name: str, device_class: str | None, release: Release | None,
    given: Mapping[str, str], spec: ModelSpec | None = None,
) -> dict[str, str]:  # fmt: skip
    """The tokens in one step and the number of requests of the API server, and the prefill kernel of delta nets.

    By default there are no more requests than tokens in a step (_set_default_max_num_seqs_and_batched_tokens_args,
    engine/arg_utils.py).
    """
    row = next(row for row in _batches(release) if row.are_for(device_name, memory_bytes))
    since = _FLASHINFER_DELTA_NETS.get(device_class or "")
    prefill = "flashinfer" if since is not None and (release or NEWEST) >= since else "triton"
    reader = SettingsReader("vllm", given)
    times = times_of(reader)
    tokens = max(row.tokens * times, _least_tokens(spec, release, given))
    requests = min(row.requests * times, reader.count("max-num-batched-tokens", tokens))
    settings = {
        "max-num-batched-tokens": str(tokens), "max-num-seqs": str(requests), "gdn-prefill-backend": prefill
    }  # fmt: skip
    if device_class in _XPU and _has_xpu_blocks(spec, release or NEWEST):
        settings["block-size"] = _XPU_BLOCK
    return settings


def _has_xpu_blocks(spec: ModelSpec | None, release: Release) -> bool:
    if release >= _ALL_XPU_BLOCKS_SINCE:
        return True
    is_latent = spec is not None and latent_of(spec) is not None
    is_plain = spec is None or not has_states(spec)
    return is_plain and release >= _XPU_BLOCKS_SINCE and (not is_latent or release < _XPU_MLA_UNTIL)


def device_defaults(release: Release | None) -> list[DeviceDefault]:
    """Every default of these that does not need a device."""
    tokens = [DeviceDefault("max-num-batched-tokens", str(row.tokens), row.devices) for row in _batches(release)]
    return [
        *tokens,
        DeviceDefault("gdn-prefill-backend", "flashinfer", "Hopper and Blackwell"),
        DeviceDefault("gdn-prefill-backend", "triton", "others"),
    ]


def _batches(release: Release | None) -> tuple[_Batches, ...]:
    return next(rows for since, rows in _BATCHES.items() if (release or NEWEST) >= since)
