"""Context parallelism in vLLM.

Decode: the ranks that would hold the same KV heads divide the tokens of the cache among them instead. Prefill: copies
of the attention divide the tokens of a prompt. Each copy gathers the latents of the whole prompt, so it holds the cache
of all requests, and the copies do not add to the ranks that divide the cache (ParallelConfig and
pcp_shard_decode_requests, config/parallel.py, vLLM 0.33.0).
"""

from __future__ import annotations

from collections.abc import Mapping

from kvcalc.engines.place import ANYWHERE, Place
from kvcalc.engines.vllm.settings import Settings
from kvcalc.errors import LayoutError, ModelError, UsageError
from kvcalc.model.caches import IndexerKeys, LatentAttention
from kvcalc.model.spec import ModelSpec, all_caches, windows

# The first release that does not divide the cache of dense MLA among these ranks (pcp_manager.py of 0.28.0
# and 0.30.0, v1/worker/gpu).
_SPARSE_ALONE = (0, 30)


def check_token_ranks(
    spec: ModelSpec, tensor_parallel_size: int, token_ranks: int, prompt_ranks: int = 1, place: Place = ANYWHERE
) -> None:
    """Check that `token_ranks` of the tensor-parallel ranks can divide the tokens of the cache.

    With `prompt_ranks` copies that divide a prompt, they are these copies, or all ranks of all copies.

    Raises LayoutError (exit 2) if the numbers do not divide, and ModelError (exit 3) for windows, whose layers vLLM
    refuses to divide. Source: ParallelConfig (config/parallel.py), verify_with_parallel_config (config/model.py) and
    SlidingWindowSpec (v1/kv_cache_interface.py), vLLM 0.33.0.
    """
    if token_ranks == 1:
        return
    asked = f"--decode-context-parallel-size {token_ranks}"
    if prompt_ranks > 1:
        _check_both(spec, asked, token_ranks, (prompt_ranks, tensor_parallel_size * prompt_ranks), place)
        return
    if tensor_parallel_size % token_ranks:
        raise LayoutError(f"{asked} does not divide --tp {tensor_parallel_size}", "its ranks are those of --tp")
    if windows(spec):
        raise ModelError(f"{spec.name}: vLLM does not support {asked} with sliding windows")
    shape = spec.attention
    if shape.is_latent or not shape.num_kv_heads:
        return
    most = tensor_parallel_size // shape.num_kv_heads
    if token_ranks > most:
        hint = f"use --tp {token_ranks * shape.num_kv_heads}, or a smaller --decode-context-parallel-size"
        raise LayoutError(f"{asked}: {shape.num_kv_heads} KV heads on --tp {tensor_parallel_size} allow {most}", hint)
    if shape.num_heads // shape.num_kv_heads % token_ranks:
        raise LayoutError(
            f"{asked} does not divide the {shape.num_heads // shape.num_kv_heads} query heads per KV head",
            "use a number that divides them",
        )


def _check_both(spec: ModelSpec, asked: str, token_ranks: int, allowed: tuple[int, ...], place: Place) -> None:
    """The same with prefill context parallelism: since 0.30 vLLM divides the cache of sparse MLA only (PCPManager)."""
    if token_ranks not in allowed:
        known = " or ".join(map(str, dict.fromkeys(allowed)))
        raise LayoutError(f"{asked}: with --prefill-context-parallel-size it must be {known}", "or leave it out")
    if place.since(*_SPARSE_ALONE) and not any(isinstance(cache, IndexerKeys) for cache in all_caches(spec)):
        raise ModelError(f"{spec.name}: vLLM supports {asked} with --prefill-context-parallel-size for sparse MLA only")


def check_prompt_ranks(spec: ModelSpec, settings: Mapping[str, str], chosen: Settings, place: Place) -> None:
    """Check that vLLM can divide the tokens of a prompt of this model (prefill context parallelism).

    Raises UsageError (exit 2) for an older release or an adapter, and ModelError (exit 3) for other models than those
    with MLA in all layers, and for images. Before 0.26 no attention kernel has it, and before 0.32 it does not have
    pipeline stages. Source: PCPManager.validate_config (v1/worker/gpu/pcp_manager.py) and
    check_attention_cp_compatibility (v1/worker/cp_utils.py), vLLM 0.33.0.
    """
    asked = f"--prefill-context-parallel-size {chosen.prefill_context_parallel_size}"
    if not place.since(0, 26):
        raise UsageError(f"{asked}: no attention kernel of this release has it", "it runs in vLLM 0.26 and later")
    if chosen.pipeline_parallel_size > 1 and not place.since(0, 32):
        raise UsageError(f"{asked}: this release has it without pipeline stages only", "vLLM 0.32 has it with --pp")
    if any(name in settings for name in ("max-loras", "max-lora-rank")):
        raise UsageError(f"{asked}: vLLM does not support it with LoRA adapters", "leave out --max-lora-rank")
    caches = all_caches(spec)
    if not caches or not all(isinstance(cache, (LatentAttention, IndexerKeys)) for cache in caches):
        raise ModelError(f"{spec.name}: {asked} is only for models with MLA in all layers, in vLLM")
    if spec.multimodal is not None and "language-model-only" not in settings:
        raise ModelError(f"{spec.name}: vLLM does not support {asked} with images", "use --language-model-only")
