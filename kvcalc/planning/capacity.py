"""What a given amount of memory holds: the longest context and the largest batch."""

from __future__ import annotations

from typing import Any

from kvcalc.memory import kv_cache
from kvcalc.memory.engines import Engine
from kvcalc.memory.workload import Workload
from kvcalc.model.spec import ModelSpec, period


def capacity(
    spec: ModelSpec, workload: Workload, rules: Engine, kv_memory_bytes: int, warnings: list[str]
) -> dict[str, Any]:
    """The `fit` part of a document for `kv_memory_bytes` of cache on each device.

    `max_context_tokens` is at this batch, `max_batch_size` at this context; null where memory sets no limit, with a
    warning appended. The context is not cut at max_position_embeddings: a warning says where it is beyond.
    """
    device = kv_cache.on_device(spec, workload.tensor_parallel_size)

    def sequence(tokens: int) -> int:
        return kv_cache.sequence_bytes(device, workload.kv_dtype, tokens, rules.cache_bytes)

    batch = workload.batch_size
    one = sequence(workload.context_tokens)
    longest = kv_cache.longest_context(lambda tokens: batch * sequence(tokens), kv_memory_bytes, period(spec))
    if longest is None:
        warnings.append("memory sets no limit to the context: the cache does not grow with it any more")
    elif spec.max_position_embeddings is not None and longest > spec.max_position_embeddings:
        warnings.append(
            f"memory holds {longest:,} tokens of context; the model's own limit is {spec.max_position_embeddings:,}"
        )
    return {
        "fits": batch * one <= kv_memory_bytes,
        "device_bytes": None,
        "weights_bytes": None,
        "kv_cache_bytes": batch * one,
        "activation_bytes": None,
        "reserve_bytes": None,
        "free_bytes": kv_memory_bytes - batch * one,
        "max_context_tokens": longest,
        "max_batch_size": kv_memory_bytes // one if one else None,
    }
