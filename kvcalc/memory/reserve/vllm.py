"""vLLM: a share of the device, less what a profiling run finds.

Source: request_memory (v1/worker/utils.py) and determine_available_memory (v1/worker/gpu_worker.py), vLLM 0.33.0:
ceil(total x gpu_memory_utilization) - weights - what is not torch's - peak of a dummy step - the graphs' estimate. The
dummy step has max_num_batched_tokens tokens and samples for max_num_seqs of them (_dummy_sampler_run).

The constants below were read off what vLLM printed, not fitted to a model: V0 (opt-125m: 0.49 GiB of activations at
vocabulary 50,272; Llama-3.1-8B: 1.19 GiB at 128,256; Qwen3-8B: 1.45 at 151,936; all for 256 requests: 38 to 41 bytes a
logit), 0.10 (Llama-3.2-1B, 256 requests: 0.45 GiB) and October 2026 (Llama-3.1-8B on an H100, 1,024 requests: 15.26 GiB
used after loading 15.0, 1.44 GiB at the peak, 0.23 GiB of it graphs).
"""

from __future__ import annotations

from math import ceil

from kvcalc.memory.reserve import (
    ACTIVATION,
    GIB,
    MIB,
    RESERVE,
    Held,
    Question,
    Reserve,
    fraction,
    step_activations,
)
from kvcalc.units import parse_count

# Bytes a logit takes while the dummy step samples: the copies in 16 and 32 bits, sorted ones before 0.21.
_LOGIT_BYTES = {(0, 21): 10, (0, 9): 14, (0, 0): 39}
# What is not torch's: the context, and NCCL's buffers where there are several ranks.
_CONTEXT_BYTES = 256 * MIB
_NCCL_BYTES = 704 * MIB
# Graphs, a layer: 0.23 GiB over Llama-3.1-8B's 32 layers as of 2026, 0.7 to 0.8 before; many times that with experts.
_GRAPH_BYTES, _EXPERTS_GRAPH_BYTES = 12 * MIB, 40 * MIB
_NEWEST = (999,)
# Default since when graphs are estimated too, and the share that came with it (config/cache.py; "default since v0.21.0"
# says the log).
_GRAPHS_SINCE = (0, 21)


def device_settings(
    memory_bytes: int, device_class: str | None, device_name: str, release: tuple[int, ...] | None
) -> dict[str, str]:
    """Tokens of one step and requests, the API server's by device (get_batch_defaults, engine/arg_utils.py)."""
    tokens, requests = 2048, 256
    if memory_bytes >= 160 * GIB and (release or _NEWEST) >= (0, 9):
        tokens, requests = 16384, 1024
    elif memory_bytes >= 70 * GIB and not device_name.startswith(("a100", "gb10")) and (release or _NEWEST) >= (0, 8):
        tokens, requests = 8192, 1024
    return {"max-num-batched-tokens": str(tokens), "max-num-seqs": str(requests)}


def reserve(question: Question) -> Reserve:
    """Five lines: what is left alone, the peak of a step, the context, NCCL, the graphs."""
    given, release, width = question.settings, question.release or _NEWEST, question.width
    newest = release >= _GRAPHS_SINCE
    utilization = fraction(question, "gpu-memory-utilization", 0.92 if newest else 0.9)
    tokens = parse_count(given["max-num-batched-tokens"], "--max-num-batched-tokens")
    requests = min(parse_count(given["max-num-seqs"], "--max-num-seqs"), tokens)
    logit_bytes = next(size for since, size in _LOGIT_BYTES.items() if release >= since)
    peak = max(step_activations(width, tokens), requests * width.vocab_size * logit_bytes)
    requested = ceil(question.memory_bytes * utilization)
    left = question.memory_bytes - requested
    held = [
        Held(RESERVE, f"left alone (1 - {utilization:g})", left),
        Held(ACTIVATION, f"activations of {tokens:,} tokens", peak),
        Held(RESERVE, "CUDA context", _CONTEXT_BYTES),
    ]
    if question.ranks > 1:
        held.append(Held(RESERVE, "NCCL buffers", _NCCL_BYTES))
    if newest and "enforce-eager" not in given:
        a_layer = _EXPERTS_GRAPH_BYTES if width.has_experts else _GRAPH_BYTES
        held.append(Held(RESERVE, "CUDA graphs", width.num_layers * a_layer))
    settings: dict[str, object] = {
        "gpu_memory_utilization": utilization,
        "max_num_seqs": requests,
        "enforce_eager": "enforce-eager" in given,
    }
    return Reserve(tuple(held), settings)
