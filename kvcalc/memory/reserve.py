"""What an engine leaves of a device's memory for the cache.

Each function below names, for one engine, everything that is neither weights nor cache, in bytes: the activations of
its largest step, its graphs, the driver's context, and what it leaves alone. Each constant stands with its source. They
are estimates where the weights and the cache are counts: a context and a graph differ by driver, kernel and release.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from typing import NamedTuple

from kvcalc.memory.engines.options import Given
from kvcalc.memory.sharding import Width

GIB = 2**30
MIB = 2**20

ACTIVATION, RESERVE = "activation", "reserve"


class Held(NamedTuple):
    """A part of a device's memory: what for, under what name, how much."""

    kind: str
    name: str
    bytes: int


class Question(NamedTuple):
    """A device's memory, what runs on it, and the engine's own settings (option name to text).

    `ranks`: tensor-parallel ranks times pipeline stages. `is_latent`: it is an MLA model. `is_apple`: its memory is
    managed by macOS. `release`: the engine's, None for the newest.
    """

    memory_bytes: int
    width: Width
    ranks: int
    context_tokens: int
    batch_size: int
    settings: Mapping[str, str]
    num_heads: int = 0
    is_latent: bool = False
    release: tuple[int, ...] | None = None
    is_apple: bool = False

    def driver(self, context_mib: int, nccl_mib: int = 0) -> list[Held]:
        """What is not the engine's own: the driver's context, and NCCL's buffers where there are several ranks."""
        held = [Held(RESERVE, "CUDA context", context_mib * MIB)]
        return [*held, Held(RESERVE, "NCCL buffers", nccl_mib * MIB)] if nccl_mib and self.ranks > 1 else held

    def step_activations(self, tokens: int, element_bytes: int = 2) -> int:
        """What one step of `tokens` tokens holds at its peak: the residual and the normed input, and the widest
        module's inputs and middle, which stand at once; layers follow one another and reuse the memory."""
        return tokens * (2 * self.width.hidden_size + self.width.module_elements) * element_bytes


class Reserve(NamedTuple):
    """What is kept from the cache, the part of the rest the cache may have, and the settings that said so.

    `share`: of what is left after `held`, the cache's part (TensorRT-LLM's fraction of free memory). `varies`: whether
    `held` grows with the context or the batch.
    """

    held: list[Held]
    settings: dict[str, object]
    share: float = 1.0
    varies: bool = False

    def held_bytes(self) -> int:
        """All of it."""
        return sum(part.bytes for part in self.held)


def reserve_of(engine: str, question: Question) -> Reserve:
    """What `engine` keeps from the cache on such a device. UsageError (exit 2) for a setting out of range."""
    found = _RESERVES[engine](question)
    if question.is_apple:
        # Metal's recommendedMaxWorkingSetSize is about three quarters of the machine's memory.
        found.held.append(Held(RESERVE, "kept by macOS (a quarter)", question.memory_bytes // 4))
    return found


def release_of(engine: str) -> tuple[int, ...] | None:
    """The release in `vllm@0.11`, as numbers; None for the newest."""
    text = engine.partition("@")[2].removeprefix("v")
    parts = text.split(".") if text else []
    return tuple(map(int, parts)) if parts and all(part.isdecimal() for part in parts) else None


def _logical(question: Question) -> Reserve:
    """No engine: a tenth of the device is kept back for whatever runs the model, whatever the model. vLLM's long-time
    default left as much alone (gpu_memory_utilization 0.9 until 0.20)."""
    return Reserve([Held(RESERVE, "kept back (10 %)", question.memory_bytes // 10)], {})


def _transformers(question: Question) -> Reserve:
    """`generate` prefills all sequences at once and asks for the last token's logits alone (logits_to_keep = 1), which
    it then holds in fp32 too. Nothing is kept back but a CUDA context with cuBLAS and PyTorch's own rounding of blocks:
    0.4 to 0.6 GiB on A100 and H100."""
    batch = question.batch_size
    layers = question.step_activations(batch * question.context_tokens)
    logits = batch * question.width.vocab_size * (2 + 4)
    held = [Held(ACTIVATION, "activations of the prefill", layers + logits), *question.driver(512)]
    return Reserve(held, {}, varies=True)


def _llama_cpp(question: Question) -> Reserve:
    """A compute buffer for one micro-batch, and nothing kept back.

    The buffer is the logits of a micro-batch beside its embeddings, in fp32: with 512 tokens 258.50 MiB for Llama 3 8B
    (128,256 + 4,096 wide) and 70.50 MiB for Llama 2 7B (32,000 + 4,096), as its logs print ("compute buffer size").
    Without flash attention the scores of all heads stand there too (llama-graph.cpp, build_attn_mha), and follow the
    context. The CUDA context with cuBLAS workspaces: 0.3 to 0.5 GiB by nvidia-smi beside the buffers a log prints.
    """
    given, width, fp32 = Given("llama.cpp", question.settings), question.width, 4
    tokens = given.count("ubatch-size")
    buffer = tokens * (width.vocab_size + width.hidden_size) * fp32
    has_scores = given.settings.get("flash-attn") == "off"
    if has_scores:
        scores = tokens * question.context_tokens * question.num_heads * fp32
        buffer = max(buffer, scores + question.step_activations(tokens, fp32))
    held = [Held(ACTIVATION, f"compute buffer of {tokens:,} tokens", buffer), *question.driver(400)]
    return Reserve(held, {}, varies=has_scores)


def _tensorrt_llm(question: Question) -> Reserve:
    """Nine tenths of what is free once the model is loaded and a step has run; the rest is its line in `fit`.

    Source: KvCacheCreator (tensorrt_llm/_torch/pyexecutor/_util.py) and KvCacheConfig.free_gpu_memory_fraction, 0.9
    (llmapi/llm_args.py), at commit 001541bad83b. A step has max_num_tokens tokens, 8,192 unless set. The context,
    cuBLAS and the sampler's buffers, and NCCL's with the all-reduce workspaces: the engine measures them; these are
    what it leaves of an idle H100.
    """
    tokens = 8192
    activations = Held(ACTIVATION, f"activations of {tokens:,} tokens", question.step_activations(tokens))
    share = Given("tensorrt-llm", question.settings).share("free-gpu-memory-fraction", 0.9)
    return Reserve([activations, *question.driver(1024, 1024)], {}, share=share)


# SGLang's defaults by the device's memory in GiB: tokens of a prefill step, and the largest decode graph with fewer
# than four ranks and with more.
_SGLANG_BY_MEMORY = ((20, 2048, 8, 8), (35, 4096, 48, 160), (60, 4096, 32, 160), (160, 8192, 256, 512))
_SGLANG_LARGEST = (16384, 512, 512)
# What prefill graphs of an MLA model are taken to hold (reserve_for_graph_mb); of others 8 MiB a size.
_SGLANG_MLA_GRAPHS_MIB = 1536


def _sglang(question: Question) -> Reserve:
    """The pool takes what is free, but for a share of the device kept for activations and graphs.

    Source: handle_gpu_memory_settings (srt/arg_groups/memory_hook.py) for the default share, _profile_available_bytes
    (srt/mem_cache/kv_cache_configurator.py) for the pool, SGLang 0.5.23: free now - free before loading x (1 -
    mem_fraction_static). Sizing the pool after the graphs (SGLANG_ENABLE_POST_CAPTURE_KV_SIZING) is off unless asked
    for. The context is the one before loading.
    """
    share = Given("sglang", question.settings).share("mem-fraction-static", _sglang_default_share(question))
    held = question.driver(512, 1024)
    free = question.memory_bytes - sum(part.bytes for part in held)
    held.append(Held(ACTIVATION, f"activations and graphs (1 - {share:g})", free - int(free * share)))
    return Reserve(held, {"mem_fraction_static": share})


def _sglang_default_share(question: Question) -> float:
    """(memory - reserved) / memory in MiB, to three places. The largest graph of a prefill is of its step's tokens."""
    memory_mib = question.memory_bytes / MIB
    tokens, few, many = next(
        (row[1:] for row in _SGLANG_BY_MEMORY if question.memory_bytes < row[0] * GIB), _SGLANG_LARGEST
    )
    reserved = 512 + 1.5 * tokens + question.ranks / 8 * 1024 + 2 * (few if question.ranks < 4 else many)
    reserved += _SGLANG_MLA_GRAPHS_MIB if question.is_latent else 8 * _sglang_prefill_graphs(tokens)
    if memory_mib > 60 * 1024:
        reserved = max(reserved, 10 * 1024)
    # Never nothing at all on a device smaller than what is reserved.
    return max(round((memory_mib - reserved) / memory_mib, 3), 0.001)


def _sglang_prefill_graphs(tokens: int) -> int:
    """How many sizes of a prefill are captured (generate_prefill_cuda_graph_batch_sizes)."""
    steps = ((4, 33, 4), (48, 257, 16), (288, 513, 32), (576, 1025, 64), (1280, 4097, 256), (4608, tokens + 1, 512))
    return sum(size <= tokens for first, end, step in steps for size in range(first, end, step))


# Bytes a logit takes while vLLM's dummy step samples: the copies in 16 and 32 bits, sorted ones before 0.21.
_VLLM_LOGIT_BYTES = {(0, 21): 10, (0, 9): 14, (0, 0): 39}
# Graphs, a layer: 0.23 GiB over Llama-3.1-8B's 32 layers as of 2026, 0.7 to 0.8 before; many times that with experts.
_VLLM_GRAPH_BYTES, _VLLM_EXPERTS_GRAPH_BYTES = 12 * MIB, 40 * MIB
_VLLM_NEWEST = (999,)
# Default since when graphs are estimated too, and the share that came with it (config/cache.py; "default since v0.21.0"
# says the log).
_VLLM_GRAPHS_SINCE = (0, 21)


def device_settings(
    engine: str, memory_bytes: int, device_name: str, release: tuple[int, ...] | None
) -> dict[str, str]:
    """Settings whose defaults `engine` takes from the device, for those not given: vLLM's tokens of one step and its
    requests, the API server's by device (get_batch_defaults, engine/arg_utils.py)."""
    if engine != "vllm":
        return {}
    tokens, requests, release = 2048, 256, release or _VLLM_NEWEST
    if memory_bytes >= 160 * GIB and release >= (0, 9):
        tokens, requests = 16384, 1024
    elif memory_bytes >= 70 * GIB and not device_name.startswith(("a100", "gb10")) and release >= (0, 8):
        tokens, requests = 8192, 1024
    return {"max-num-batched-tokens": str(tokens), "max-num-seqs": str(requests)}


def _vllm(question: Question) -> Reserve:
    """A share of the device, less what a profiling run finds: what is left alone, the peak of a step, the context,
    NCCL, the graphs.

    Source: request_memory (v1/worker/utils.py) and determine_available_memory (v1/worker/gpu_worker.py), vLLM 0.33.0:
    ceil(total x gpu_memory_utilization) - weights - what is not torch's - peak of a dummy step - the graphs' estimate.
    The dummy step has max_num_batched_tokens tokens and samples for max_num_seqs of them (_dummy_sampler_run).

    The constants were read off what vLLM printed, not fitted to a model: V0 (opt-125m: 0.49 GiB of activations at
    vocabulary 50,272; Llama-3.1-8B: 1.19 GiB at 128,256; Qwen3-8B: 1.45 at 151,936; all for 256 requests: 38 to 41
    bytes a logit), 0.10 (Llama-3.2-1B, 256 requests: 0.45 GiB) and October 2026 (Llama-3.1-8B on an H100, 1,024
    requests: 15.26 GiB used after loading 15.0, 1.44 GiB at the peak, 0.23 GiB of it graphs).
    """
    given, width = Given("vllm", question.settings), question.width
    release = question.release or _VLLM_NEWEST
    newest, is_eager = release >= _VLLM_GRAPHS_SINCE, "enforce-eager" in given.settings
    utilization = given.share("gpu-memory-utilization", 0.92 if newest else 0.9)
    tokens = given.count("max-num-batched-tokens")
    requests = min(given.count("max-num-seqs"), tokens)
    logit_bytes = next(size for since, size in _VLLM_LOGIT_BYTES.items() if release >= since)
    peak = max(question.step_activations(tokens), requests * width.vocab_size * logit_bytes)
    left = question.memory_bytes - ceil(question.memory_bytes * utilization)
    held = [
        Held(RESERVE, f"left alone (1 - {utilization:g})", left),
        Held(ACTIVATION, f"activations of {tokens:,} tokens", peak),
        *question.driver(256, 704),
    ]
    if newest and not is_eager:
        a_layer = _VLLM_EXPERTS_GRAPH_BYTES if width.has_experts else _VLLM_GRAPH_BYTES
        held.append(Held(RESERVE, "CUDA graphs", width.num_layers * a_layer))
    return Reserve(held, {"gpu_memory_utilization": utilization, "max_num_seqs": requests, "enforce_eager": is_eager})


_RESERVES = {
    "logical": _logical, "transformers": _transformers, "vllm": _vllm, "sglang": _sglang,
    "tensorrt-llm": _tensorrt_llm, "llama.cpp": _llama_cpp,
}  # fmt: skip
