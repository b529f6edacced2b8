"""Decode context parallelism: the ranks that would hold the same KV heads divide the tokens among them instead."""

from __future__ import annotations

from kvcalc.errors import LayoutError, ModelError
from kvcalc.model.spec import ModelSpec, windows


def check_token_ranks(spec: ModelSpec, tensor_parallel_size: int, token_ranks: int) -> None:
    """Check that `token_ranks` of the tensor-parallel ranks can divide the tokens of the cache.

    Raises LayoutError (exit 2) if the numbers do not divide, and ModelError (exit 3) for windows, whose layers vLLM
    refuses to divide. Source: ParallelConfig (config/parallel.py), verify_with_parallel_config (config/model.py) and
    SlidingWindowSpec (v1/kv_cache_interface.py), vLLM 0.33.0.
    """
    if token_ranks == 1:
        return
    asked = f"--decode-context-parallel-size {token_ranks}"
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
