"""What SGLang keeps free beside weights and cache."""

from __future__ import annotations

from kvcalc.engines.options import SettingsReader
from kvcalc.engines.reserve import ACTIVATION, MIB, RESERVE, Held, Reserve, ReserveInputs
from kvcalc.engines.sglang.share import AITER_TOKENS, LEAST_VISION_FACTOR, share_of

# The driver's context before the weights are loaded, and NCCL with the custom all-reduce, which needs fast links.
# benchmarks/fit/reserve.py compares them with the logs in benchmarks/fit/sglang_memory.tsv. On devices that share their
# memory with the host, SGLang counts what is available there.
_CONTEXT_MIB, _SHARED_CONTEXT_MIB, _NCCL_MIB = 640, 10240, 1152
# The 80 % range of these parts together, as multiples of the estimate, computed as for vLLM.
_LOW, _HIGH = 0.52, 2.04
# Memory for the embeddings of images, which are allocated after the pool (SGLANG_VLM_CACHE_SIZE_MB, srt/environ.py).
_EMBEDDINGS_MIB = 100


def reserve(question: ReserveInputs) -> Reserve:
    """The pool takes all free memory except a share of the device, which is for activations and graphs.

    Source: _profile_available_bytes (srt/mem_cache/kv_cache_configurator.py), SGLang 0.5.23: the pool is free memory
    now - free memory before loading x (1 - mem_fraction_static) - the embeddings of images. By default, the pool is not
    sized after the graphs (SGLANG_ENABLE_POST_CAPTURE_KV_SIZING). The CUDA context is the one before loading.
    """
    share = share_of(question, SettingsReader("sglang", question.settings))
    context = _SHARED_CONTEXT_MIB if question.shares_memory else _CONTEXT_MIB
    driver = question.driver(context, _NCCL_MIB if question.has_fast_links else 0)
    free = question.memory_bytes - sum(part.bytes for part in driver)
    kept = [Held(ACTIVATION, f"activations and graphs (1 - {share:g})", free - int(free * share))]
    if question.multimodal is not None:
        kept.append(Held(RESERVE, "embeddings of images", _EMBEDDINGS_MIB * MIB))
    held = [*(part.within(_LOW, _HIGH) for part in driver), *(part.exact() for part in kept)]
    if question.has_unknown_tower:
        less = 0 if "mem-fraction-static" in question.settings else int(free * share * (1 - LEAST_VISION_FACTOR))
        held.append(Held(RESERVE, "share and embeddings of images", 0, 0, less + _EMBEDDINGS_MIB * MIB))
    # AITER's part begins beyond a context (`share`).
    varies = question.is_amd and question.keeps_tokens
    return Reserve(held, {"mem_fraction_static": share}, varies=varies, same_until=AITER_TOKENS if varies else 0)
