"""How much of a device's memory an engine needs for things other than weights and cache.

Each function below lists these parts for one engine, in bytes: the activations of the largest step, graphs, the
driver's context, and memory the engine does not use. Each constant names its source. Weights and cache are exact
counts, but these parts are estimates: contexts and graphs differ by driver, kernel and release.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from typing import TYPE_CHECKING, NamedTuple

from kvcalc.errors import UsageError
from kvcalc.memory.engines.options import Given
from kvcalc.memory.engines.release import Release
from kvcalc.memory.sharding import Width

if TYPE_CHECKING:
    from kvcalc.model.towers.images import ImageRule

GIB = 2**30
MIB = 2**20

ACTIVATION, RESERVE = "activation", "reserve"


class Held(NamedTuple):
    """A part of a device's memory: its kind (ACTIVATION or RESERVE), its name, and its size in bytes.

    `low` and `high` are the ends of the 80 % range of an estimate, or None if the range is not known.
    """

    kind: str
    name: str
    bytes: int
    low: int | None = None
    high: int | None = None


class Question(NamedTuple):
    """A device's memory, the workload on it, and the engine's own settings (option name to text).

    `ranks` is the number of devices of one replica. `is_latent` is true for an MLA model, and `is_apple` if macOS
    manages the memory. `release` is the engine's release, or None for the newest. `batch_size` is that of one of the
    `attention_replicas`. `has_fast_links` is whether the devices are joined by more than PCIe. `images` is set if the
    engine loads a vision tower, and `has_sparse_latent` for MLA with an indexer.
    `shares_memory` is whether the host uses the device's memory.
    """

    memory_bytes: int
    width: Width
    ranks: int
    context_tokens: int
    batch_size: int
    settings: Mapping[str, str]
    num_heads: int = 0
    is_latent: bool = False
    release: Release | None = None
    is_apple: bool = False
    attention_replicas: int = 1
    has_fast_links: bool = True
    images: ImageRule | None = None
    has_sparse_latent: bool = False
    shares_memory: bool = False
    tensor_parallel_size: int = 1

    def driver(self, context_mib: int, nccl_mib: int = 0) -> list[Held]:
        """The memory outside the engine: the driver's context, and NCCL's buffers if there are several ranks."""
        held = [Held(RESERVE, "CUDA context", context_mib * MIB)]
        return [*held, Held(RESERVE, "NCCL buffers", nccl_mib * MIB)] if nccl_mib and self.ranks > 1 else held

    def step_activations(self, tokens: int, element_bytes: int = 2) -> int:
        """Peak bytes of activations in one step of `tokens` tokens.

        At the peak, a step holds the residual, the normed input, and the widest module's inputs and intermediate
        values. Layers run one after another and reuse the memory. With attention replicas, every rank also gathers the
        tokens of the other replicas before its experts (vLLM's default backend, allgather_reducescatter).
        """
        gathered = (self.attention_replicas - 1) * self.width.hidden_size
        return tokens * (2 * self.width.hidden_size + self.width.module_elements + gathered) * element_bytes


class Reserve(NamedTuple):
    """The memory that is not available to the cache, and the settings that determine it.

    `share` is the cache's fraction of the memory left after weights and `held` (TensorRT-LLM's fraction of free
    memory). `varies` is whether `held` grows with the context or the batch.
    """

    held: list[Held]
    settings: dict[str, object]
    share: float = 1.0
    varies: bool = False

    def held_bytes(self) -> int:
        """The bytes of all parts."""
        return sum(part.bytes for part in self.held)


def reserve_of(engine: str, question: Question) -> Reserve:
    """The memory that `engine` does not give to the cache. Raises UsageError (exit 2) for a setting out of range."""
    found = _RESERVES[engine](question)
    if question.is_apple:
        # Metal's recommendedMaxWorkingSetSize is about three quarters of the machine's memory.
        found.held.append(Held(RESERVE, "reserved by macOS (25 %)", question.memory_bytes // 4))
    return found


def _logical(question: Question) -> Reserve:
    """No engine: reserve 10% of the device for the software that runs the model, regardless of the model.

    vLLM left the same share unused by default until 0.20 (gpu_memory_utilization 0.9).
    """
    return Reserve([Held(RESERVE, "reserved (10 %)", question.memory_bytes // 10)], {})


def _transformers(question: Question) -> Reserve:
    """`generate` prefills all sequences at once.

    It computes only the last token's logits (logits_to_keep = 1), and also holds them in fp32. The only reserve is a
    CUDA context with cuBLAS and PyTorch's rounding of blocks: 0.4 to 0.6 GiB on A100 and H100.
    """
    batch = question.batch_size
    layers = question.step_activations(batch * question.context_tokens)
    logits = batch * question.width.vocab_size * (2 + 4)
    held = [Held(ACTIVATION, "prefill activations", layers + logits), *question.driver(512)]
    return Reserve(held, {}, varies=True)


def _llama_cpp(question: Question) -> Reserve:
    """A compute buffer for one micro-batch. llama.cpp keeps no other reserve.

    The buffer holds the logits and the embeddings of a micro-batch in fp32. With 512 tokens, llama.cpp's logs print
    ("compute buffer size") 258.50 MiB for Llama 3 8B (128,256 + 4,096 wide) and 70.50 MiB for Llama 2 7B (32,000 +
    4,096). Without flash attention, the buffer also holds the scores of all heads, which grow with the context
    (llama-graph.cpp, build_attn_mha). The CUDA context with cuBLAS workspaces takes 0.3 to 0.5 GiB according to
    nvidia-smi, in addition to the buffers in the log.
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
    """The cache gets 90% of the memory that is free after the model is loaded and a step has run.

    The other 10% is a line of its own in `fit`. Source: KvCacheCreator (tensorrt_llm/_torch/pyexecutor/_util.py) and
    KvCacheConfig.free_gpu_memory_fraction, 0.9 (llmapi/llm_args.py), at commit 001541bad83b. A step has
    max_num_tokens tokens, 8,192 by default. The engine measures the rest at run time: the context with cuBLAS and the
    sampler's buffers, and NCCL with the all-reduce workspaces. The values here are those on an idle H100.
    """
    tokens = 8192
    activations = Held(ACTIVATION, f"activations of {tokens:,} tokens", question.step_activations(tokens))
    share = Given("tensorrt-llm", question.settings).share("free-gpu-memory-fraction", 0.9)
    return Reserve([activations, *question.driver(1024, 1024)], {}, share=share)


def _mlx(question: Question) -> Reserve:
    """The activations of one step of a prompt. The share that macOS reserves is added for every engine.

    MLX wires memory up to Metal's recommendedMaxWorkingSetSize (wired_limit, mlx_lm/generate.py) and reuses freed
    buffers within it (MetalAllocator, mlx/backend/metal/allocator.cpp). A prompt is processed in steps of
    --prefill-step-size tokens. A step of MLA computes the scores of all heads as one array of 16 bits (pe_scores of
    models/deepseek_v3.py), which grows with the context; other classes use fused attention. Logits are computed for
    the last token only.
    """
    if not question.is_apple:
        raise UsageError("--engine mlx: only Apple's devices are modelled", "for example --gpu m3-ultra")
    step = min(Given("mlx", question.settings).count("prefill-step-size"), question.context_tokens)
    size = question.batch_size * question.step_activations(step)
    if question.is_latent:
        size += question.batch_size * step * question.context_tokens * question.num_heads * 2
    return Reserve([Held(ACTIVATION, f"activations of {step:,} tokens", size)], {}, varies=True)


# SGLang's defaults, in rows of (device memory below this many GiB, tokens in a prefill step, largest decode graph with
# fewer than four ranks, largest decode graph with four or more).
_SGLANG_BY_MEMORY = ((20, 2048, 8, 8), (35, 4096, 48, 160), (60, 4096, 32, 160), (160, 8192, 256, 512))
_SGLANG_LARGEST = (16384, 512, 512)
# The memory SGLang reserves for the prefill graphs of an MLA model (reserve_for_graph_mb). Other models: 8 MiB per
# captured size.
_SGLANG_MLA_GRAPHS_MIB = 1536


def _sglang(question: Question) -> Reserve:
    """The pool takes all free memory except a share of the device, which is for activations and graphs.

    Source, in SGLang 0.5.23: handle_gpu_memory_settings (srt/arg_groups/memory_hook.py) for the default share, and
    _profile_available_bytes (srt/mem_cache/kv_cache_configurator.py) for the pool, which is free memory now - free
    memory before loading x (1 - mem_fraction_static). By default, the pool is not sized after the graphs
    (SGLANG_ENABLE_POST_CAPTURE_KV_SIZING). The CUDA context is the one before loading.
    """
    share = Given("sglang", question.settings).share("mem-fraction-static", _sglang_default_share(question))
    held = question.driver(512, 1024)
    free = question.memory_bytes - sum(part.bytes for part in held)
    held.append(Held(ACTIVATION, f"activations and graphs (1 - {share:g})", free - int(free * share)))
    return Reserve(held, {"mem_fraction_static": share})


def _sglang_default_share(question: Question) -> float:
    """(memory - reserved) / memory in MiB, rounded to three places.

    The largest prefill graph has as many tokens as a prefill step.
    """
    memory_mib = question.memory_bytes / MIB
    tokens, few, many = _sglang_row(question.memory_bytes)
    reserved = 512 + 1.5 * tokens + question.ranks / 8 * 1024 + 2 * (few if question.ranks < 4 else many)
    reserved += _SGLANG_MLA_GRAPHS_MIB if question.is_latent else 8 * _sglang_prefill_graphs(tokens)
    if question.attention_replicas > 1:
        # More padding, and more again for large graphs (reserve_for_graph_mb).
        graph = few if question.ranks < 4 else many
        reserved += graph * question.attention_replicas * (4.5 if graph > 300 else 3)
    if memory_mib > 60 * 1024:
        reserved = max(reserved, 10 * 1024)
    # Above 0 even on a device smaller than the reserve.
    return max(round((memory_mib - reserved) / memory_mib, 3), 0.001)


def _sglang_row(memory_bytes: int) -> tuple[int, ...]:
    """The tokens in a prefill step, and the largest batch in a graph with few devices and with four or more."""
    return next((row[1:] for row in _SGLANG_BY_MEMORY if memory_bytes < row[0] * GIB), _SGLANG_LARGEST)


def sglang_prefill_tokens(memory_bytes: int) -> int:
    """The tokens in a prefill step of SGLang on a device (chunked_prefill_size)."""
    return _sglang_row(memory_bytes)[0]


def _sglang_prefill_graphs(tokens: int) -> int:
    """The number of prefill sizes captured as graphs (generate_prefill_cuda_graph_batch_sizes)."""
    steps = ((4, 33, 4), (48, 257, 16), (288, 513, 32), (576, 1025, 64), (1280, 4097, 256), (4608, tokens + 1, 512))
    return sum(size <= tokens for first, end, step in steps for size in range(first, end, step))


# Constants of vLLM's start. benchmarks/fit_reserve.py compares them with the logs in benchmarks/vllm_memory.tsv.
#
# Bytes per logit while the dummy step samples. 39 with PyTorch's sort, which V0 and V1 before 0.17 use without
# FlashInfer; 14 since 0.17 (19 families on an H100, 0.19); 10 with the second model runner, which 0.33 prefers.
_VLLM_LOGIT_BYTES = {Release.of(0, 33): 10, Release.of(0, 17): 14, Release.of(0): 39}
# The driver's context. On devices that share their memory with the host, vLLM also counts what its host processes
# take: 0.1 to 5.7 GiB in six logs of GB10.
_VLLM_CONTEXT_MIB, _VLLM_SHARED_CONTEXT_MIB = 256, 4096
# Rows of the hidden size per token at the peak of a layer, and those that stay while the step samples.
_VLLM_ROWS, _VLLM_ROWS_WHILE_SAMPLING = 4, 3
# Graph bytes per layer for all 51 sizes up to 512 tokens. Llama-3.1-8B's 32 layers take 0.23 GiB.
_VLLM_GRAPH_BYTES, _VLLM_EXPERTS_GRAPH_BYTES, _VLLM_GRAPH_SIZES = 12 * MIB, 20 * MIB, 51
# NCCL and all-reduce buffers. With fast links, 0.17 and later prepare more kinds of all-reduce (2.07 to 2.21 GiB with
# the context on an H100, 0.19).
_VLLM_NCCL_MIB, _VLLM_FAST_NCCL_MIB, _VLLM_SECOND_ALL_REDUCE = 704, 1843, Release.of(0, 17)
# The 80 % range of all estimated parts together, as multiples of the estimate. It comes from the logs that set no
# constant, checked without the logs of the same release and family.
_VLLM_LOW, _VLLM_HIGH = 0.4, 1.63
_VLLM_NEWEST = Release.of(999)
# Since this release, vLLM also estimates the graphs by default and has a new default share (config/cache.py; the log
# says "default since v0.21.0").
_VLLM_GRAPHS_SINCE = Release.of(0, 21)


# The devices on which FlashInfer prefills gated delta nets, if CUDA is 13 or newer and keys have 128 elements, as in
# every Qwen model (_resolve_gdn_prefill_backend, layers/mamba/gdn/qwen_gdn_linear_attn.py, vLLM 0.33.0).
_FLASHINFER_DELTA_NETS = ("hopper", "blackwell", "blackwell-rtx")


class _Batches(NamedTuple):
    """The tokens in one step and the requests of vLLM's API server, on the `devices` with at least this memory."""

    tokens: int
    requests: int
    memory_bytes: int
    since: Release
    devices: str


# The largest devices first (get_batch_defaults, engine/arg_utils.py). The middle row is not for these devices.
_VLLM_BATCHES = (
    _Batches(16384, 1024, 160 * GIB, Release.of(0, 9), "160 GiB and more"),
    _Batches(8192, 1024, 70 * GIB, Release.of(0, 8), "70 GiB and more, except A100 and GB10"),
    _Batches(2048, 256, 0, Release.of(0), "others"),
)
_SMALL_BATCHES = ("a100", "gb10")


class DeviceDefault(NamedTuple):
    """The default of an engine's option on some devices."""

    option: str
    value: str
    devices: str


def device_settings(
    engine: str, memory_bytes: int, device_name: str, device_class: str | None, release: Release | None
) -> dict[str, str]:
    """Default settings that `engine` chooses by device.

    These are the tokens in one step and the number of requests of vLLM's API server, the prefill kernel of gated delta
    nets, and the tokens in a prefill step of SGLang.
    """
    if engine == "sglang":
        return {"chunked-prefill-size": str(_sglang_row(memory_bytes)[0])}
    if engine != "vllm":
        return {}
    rows = [row for row in _vllm_batches(release) if memory_bytes >= row.memory_bytes]
    row = rows[-1] if device_name.startswith(_SMALL_BATCHES) else rows[0]
    prefill = "flashinfer" if device_class in _FLASHINFER_DELTA_NETS else "triton"
    return {
        "max-num-batched-tokens": str(row.tokens), "max-num-seqs": str(row.requests), "gdn-prefill-backend": prefill
    }  # fmt: skip


def device_defaults(engine: str, release: Release | None) -> list[DeviceDefault]:
    """Every default that `device_settings` may give for an option that does not need a device."""
    if engine == "sglang":
        sizes = {row[1]: f"less than {row[0]} GiB" for row in _SGLANG_BY_MEMORY}
        largest = {_SGLANG_LARGEST[0]: f"{_SGLANG_BY_MEMORY[-1][0]} GiB and more"}
        return [DeviceDefault("chunked-prefill-size", str(size), said) for size, said in {**sizes, **largest}.items()]
    if engine != "vllm":
        return []
    tokens = [DeviceDefault("max-num-batched-tokens", str(row.tokens), row.devices) for row in _vllm_batches(release)]
    return [
        *tokens,
        DeviceDefault("gdn-prefill-backend", "flashinfer", "Hopper and Blackwell"),
        DeviceDefault("gdn-prefill-backend", "triton", "others"),
    ]


def _vllm_batches(release: Release | None) -> list[_Batches]:
    return [row for row in _VLLM_BATCHES if (release or _VLLM_NEWEST) >= row.since]


def _vllm(question: Question) -> Reserve:
    """vLLM takes a share of the device and subtracts what a profiling run finds.

    The parts are the unused share, the peak of a step, the CUDA context, NCCL and the graphs. Source: request_memory
    (v1/worker/utils.py) and determine_available_memory (v1/worker/gpu_worker.py), vLLM 0.33.0:
    ceil(total x gpu_memory_utilization) - weights - non-torch memory - peak of a dummy step - estimate of the graphs.
    The dummy step has max_num_batched_tokens tokens and samples for max_num_seqs of them (_dummy_sampler_run).

    A vision tower is profiled first, with a batch of the largest images, and its output stays during the dummy step
    (profile_run, v1/worker/gpu_model_runner.py). Workspaces of experts stay while the step samples
    (v1/worker/workspace.py). Only the last pipeline stage samples, but the stage with the least memory sets the pool.
    """
    given, width = Given("vllm", question.settings), question.width
    release = question.release or _VLLM_NEWEST
    newest, is_eager = release >= _VLLM_GRAPHS_SINCE, "enforce-eager" in given.settings
    utilization = given.share("gpu-memory-utilization", 0.92 if newest else 0.9)
    tokens = given.count("max-num-batched-tokens")
    requests = min(given.count("max-num-seqs"), tokens)
    left = question.memory_bytes - ceil(question.memory_bytes * utilization)
    nccl = _vllm_nccl_mib(question.has_fast_links, release)
    estimated = [
        Held(ACTIVATION, f"activations of {tokens:,} tokens", _vllm_peak(question, tokens, requests, release)),
        *question.driver(_VLLM_SHARED_CONTEXT_MIB if question.shares_memory else _VLLM_CONTEXT_MIB, nccl),
    ]
    if question.images is not None:
        # The embeddings of images, in the type of the model (v1/core/encoder_cache_manager.py).
        cached = max(tokens, question.images.most_at(question.context_tokens))
        estimated.insert(
            1, Held(ACTIVATION, f"encoder cache of {cached:,} tokens", cached * question.width.hidden_size * 2)
        )
    if question.has_sparse_latent:
        size = _vllm_sparse_workspace(question.context_tokens, release)
        estimated.append(Held(ACTIVATION, "sparse attention workspace", size))
    if newest and not is_eager:
        a_layer = _VLLM_EXPERTS_GRAPH_BYTES if width.has_experts else _VLLM_GRAPH_BYTES
        sizes = _vllm_graph_sizes(requests)
        estimated.append(Held(RESERVE, "CUDA graphs", width.num_layers * a_layer * sizes // _VLLM_GRAPH_SIZES))
    estimated = [
        part._replace(low=int(part.bytes * _VLLM_LOW), high=ceil(part.bytes * _VLLM_HIGH)) for part in estimated
    ]
    held = [Held(RESERVE, f"unused share (1 - {utilization:g})", left, left, left), *estimated]
    settings: dict[str, object] = {
        "gpu_memory_utilization": utilization,
        "max_num_seqs": requests,
        "enforce_eager": is_eager,
    }
    has_videos = question.images is not None and question.images.most_frames > 1
    return Reserve(held, settings, varies=question.has_sparse_latent or has_videos)


def _vllm_nccl_mib(has_fast_links: bool, release: Release) -> int:
    """NCCL's buffers and those of vLLM's own all-reduce. Devices on PCIe alone have few of them before 0.17."""
    if release >= _VLLM_SECOND_ALL_REDUCE:
        return _VLLM_FAST_NCCL_MIB if has_fast_links else _VLLM_NCCL_MIB
    return _VLLM_NCCL_MIB if has_fast_links else 0


def _vllm_sparse_workspace(context_tokens: int, release: Release) -> int:
    """Latents of 576 elements that a sparse prefill gathers: 5 times the longest context, or twice if it is long.

    Source: sparse_mla_prefill_workspace_factor, config/attention.py; before 0.33 the factor is always 5.
    """
    factor = 5 if context_tokens <= 256 * 1024 or release < Release.of(0, 33) else 2
    return factor * context_tokens * 576 * 2


def _vllm_peak(question: Question, tokens: int, requests: int, release: Release) -> int:
    """The peak of the dummy step: that of a layer, of sampling or of the vision tower."""
    width, element = question.width, 2
    row = width.hidden_size * element
    gathered = (question.attention_replicas - 1) * row
    module = tokens * width.module_elements * element
    layer = tokens * (_VLLM_ROWS * row + gathered) + module
    logit_bytes = next(size for since, size in _VLLM_LOGIT_BYTES.items() if release >= since)
    sampling = requests * width.vocab_size * logit_bytes + tokens * _VLLM_ROWS_WHILE_SAMPLING * row
    sampling += module if width.has_experts else 0
    if question.images is None:
        return max(layer, sampling)
    images = question.images
    batch = max(tokens, images.most_at(question.context_tokens))
    inner = -(-images.elements // question.tensor_parallel_size)
    tower = batch * images.patches_per_token * (_VLLM_ROWS * images.width + inner) * element
    return max(layer, sampling, tower)


def _vllm_graph_sizes(requests: int) -> int:
    """The number of captured sizes: 1, 2, 4, multiples of 8 below 256, then of 16, up to twice the requests or 512.

    Source: VllmConfig._set_cudagraph_sizes, config/vllm.py.
    """
    most = min(2 * requests, 512)
    return sum(size <= most for size in (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)))


_RESERVES = {
    "logical": _logical, "transformers": _transformers, "vllm": _vllm, "sglang": _sglang,
    "tensorrt-llm": _tensorrt_llm, "llama.cpp": _llama_cpp, "mlx": _mlx,
}  # fmt: skip
