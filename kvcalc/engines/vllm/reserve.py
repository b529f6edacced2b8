"""What vLLM keeps free, and what its profiling run finds, beside weights and cache."""

from __future__ import annotations

from math import ceil

from kvcalc.engines.options import SettingsReader
from kvcalc.engines.place import CAPABILITIES, Place
from kvcalc.engines.reserve import ACTIVATION, CONTEXT, MIB, NEWEST, RESERVE, Held, Reserve, ReserveInputs
from kvcalc.model.mixers.recurrent import Recurrence
from kvcalc.releases import Release

# Constants of vLLM's start. benchmarks/fit/reserve.py compares them with the logs in benchmarks/fit/vllm_memory.tsv.
#
# Bytes per logit while the dummy step samples. 39 with PyTorch's sort; since 0.17, Triton's kernel selects instead of
# sorting: 14 (19 families on an H100, 0.19).
_LOGIT_BYTES = {Release.of(0, 17): 14, Release.of(0): 39}
# FlashInfer keeps the model's logits, a copy in fp32 and the probabilities (flashinfer_sample). From 0.8 to 0.11.0, V1
# takes it wherever it is installed, as in the official images; `pip install vllm` does not install it. From 0.11.1 to
# 0.20, it samples only with VLLM_USE_FLASHINFER_SAMPLER=1. Since 0.21, it samples by default (envs.py and
# v1/sample/ops/topk_topp_sampler.py of 0.8.5 to 0.33.0). CUDA's compute capability must be at least 7.5.
_FLASHINFER_BYTES = 2 + 4 + 4
_IF_INSTALLED, _FLASHINFER_DEFAULT = Release.of(0, 8), Release.of(0, 21)
# Until then, the low end is FlashInfer's: nobody knows whether it is installed, and a log of 0.13 on GB10 has no room
# for a sort.
_SURELY = Release.of(0, 17)
_LEAST_CAPABILITY = 75
# With drafts, a rejection sampler then runs on twice as many logits. 24 bytes per logit at its peak: those of 16 bits
# twice, the bonus tokens' in fp32, and the drafts' in fp32, their copy, their probabilities and random numbers
# (_dummy_sampler_run, v1/worker/gpu_model_runner.py; v1/sample/rejection_sampler.py, 0.28.0).
_DRAFT_LOGIT_BYTES = 10
# The second model runner: all models since 0.29, and dense ones without states since 0.25 (use_v2_model_runner of
# config/vllm.py, all wheels of 0.22 to 0.33). It samples from the logits and a copy in fp32, and sorts nothing. For
# every request it counts each token of the vocabulary in 32 bits, and marks those of the prompt in 1
# (sample/penalties.py). Its dummy step checks no drafts, and takes no images before 0.27. It estimates graphs since
# 0.29.
_SECOND_RUNNER, _DENSE_SECOND_RUNNER = Release.of(0, 29), Release.of(0, 25)
_SECOND_LOGIT_BYTES = 2 + 4
_COUNT_BITS, _SECOND_TOWERS = 33, Release.of(0, 27)
# Tokens in a chunk of a gated delta net (FLA_CHUNK_SIZE, 0.33.0).
_CHUNK = 64
# The driver's context. On devices that share their memory with the host, vLLM also counts what its host processes
# take: 0.1 to 7.9 GiB in nine logs of GB10. So the low end is that of other devices.
# AMD's device with shared memory has 0.56 GiB.
_CONTEXT_MIB, _SHARED_CONTEXT_MIB, _AMD_SHARED_MIB = 256, 4096, 576
# Rows of the hidden size per token at the peak of a layer, and those that stay while the step samples.
_ROWS, _ROWS_WHILE_SAMPLING = 4, 3
# Rows for every residual stream of hyper-connections, with the layer's modules: 0.58 to 0.65 MiB a token of
# DeepSeek-V4-Flash on GB10, RTX 3090 (TP 4) and GH200 (TP 2), so TP divides nothing. The fused kernels of Blackwell
# take 0.38 MiB (B300).
_STREAM_ROWS, _FUSED_STREAM_ROWS = 19, 12
# While torch.compile compiles ahead of time, it holds a second copy of the input embedding, which the profiling run
# counts (vLLM issue 54122; in logs of 0.26 and 0.28 the peak is that copy). A start that finds the compiled code in
# its cache does without. A model with known towers embeds its tokens outside the compiled code. The high end has a
# further copy, which some starts since 0.18 keep (RTX 5090: 1.42 GiB more for Qwen3-32B-AWQ at a first start).
_COPIES, _COMPILES_AHEAD = Release.of(0, 18), Release.of(0, 26)
# Graph bytes per layer for all 51 sizes up to 512 tokens. Llama-3.1-8B's 32 layers take 0.23 GiB.
_GRAPH_BYTES, _EXPERTS_GRAPH_BYTES, _GRAPH_SIZES = 12 * MIB, 20 * MIB, 51
# Models with recurrent states: what the kernels of the first graphs keep, and less for every other one (0.52 to
# 1.21 GiB in five logs of Qwen3.5, 3.6 and 3.8 with 5 to 51 sizes).
_STATES_FIRST_GRAPH, _STATES_GRAPH_BYTES = 410 * MIB, 5 * MIB
# Since this release, the first graph's step has --max-num-batched-tokens, and what Triton's kernels of a delta net take
# then counts as a graph (vLLM issue 50780; 0.89 GiB with 8,192 tokens for Qwen3.8-27B), if it is more.
_TRANSIENT_SINCE = Release.of(0, 26)
# NCCL and all-reduce buffers. With fast links, 0.17 and later prepare more kinds of all-reduce (2.07 to 2.21 GiB with
# the context on an H100, 0.19).
_NCCL_MIB, _FAST_NCCL_MIB, _SECOND_ALL_REDUCE = 704, 1843, Release.of(0, 17)
# The 80 % range of all estimated parts together, as multiples of the estimate, and at its low end of that without a
# sort. It comes from the logs that set no constant, checked without the logs of the same family.
_LOW, _HIGH = 0.74, 1.37
# Since this release, vLLM also estimates the graphs by default and has a new default share (config/cache.py and envs.py
# of 0.19.0 and 0.20.0; the log says "default since v0.21.0").
_GRAPHS_SINCE = Release.of(0, 20)
# Before 0.13, Qwen3-VL's video counts 12.5 tokens for each of the 12,288 of its longest edge (get_max_video_tokens,
# model_executor/models/qwen3_vl.py, 0.11.0), and the cache of embeddings is filled up to that budget.
# What the images in a step take at most beside the language model, for each of its tokens: 4.8 GiB for 16,384 tokens of
# Gemma 3 4B, the largest of the 90 presets whose towers are known. An image of Qwen2-VL has as many.
_LARGEST_IMAGE_BYTES, _LONG_IMAGE = 315_000, 16_384
_LONG_VIDEOS, _LONG_VIDEO_TOKENS = (Release.of(0, 11), Release.of(0, 13)), 153_600


def reserve(question: ReserveInputs) -> Reserve:
    """vLLM takes a share of the device and subtracts what a profiling run finds.

    The parts are the unused share, the peak of a step, the CUDA context, NCCL and the graphs. Source: request_memory
    (v1/worker/utils.py) and determine_available_memory (v1/worker/gpu_worker.py), vLLM 0.33.0:
    ceil(total x gpu_memory_utilization) - weights - non-torch memory - peak of a dummy step - estimate of the graphs.
    The dummy step has max_num_batched_tokens tokens and samples for max_num_seqs of them (_dummy_sampler_run).

    A vision tower is profiled first, with a batch of the largest images, and its output stays during the dummy step
    (profile_run, v1/worker/gpu_model_runner.py). Workspaces of experts stay while the step samples
    (v1/worker/workspace.py). Only the last pipeline stage samples, but the stage with the least memory sets the pool.
    """
    given, width = SettingsReader("vllm", question.settings), question.width
    release = question.release or NEWEST
    newest, is_eager = release >= _GRAPHS_SINCE, "enforce-eager" in given.settings
    utilization = given.share("gpu-memory-utilization", 0.92 if newest else 0.9)
    tokens = given.count("max-num-batched-tokens")
    requests = min(given.count("max-num-seqs"), tokens)
    left = question.memory_bytes - ceil(question.memory_bytes * utilization)
    nccl = _nccl_mib(question.has_fast_links, release)
    is_second = _is_second_runner(question, release)
    if (is_second and release < _SECOND_TOWERS) or "skip-mm-profiling" in given.settings:
        question = question._replace(images=None)
    context_mib = _CONTEXT_MIB
    if question.shares_memory:
        context_mib = _AMD_SHARED_MIB if question.is_amd else _SHARED_CONTEXT_MIB
    logit_bytes = _logit_bytes(given, release, is_second, question)
    peak, low_peak = (_peak(question, tokens, requests, size) for size in logit_bytes)
    copied = 0
    embeds_inside = question.multimodal is None or "language-model-only" in given.settings
    if not is_eager and release >= _COPIES and embeds_inside:
        copied = -(-width.vocab_size // question.layout.tensor_parallel_size) * width.hidden_size * 2
    first_start = 0
    if release >= _COMPILES_AHEAD:
        first_start = max(copied - peak, 0)
        peak += first_start
    estimated = [
        Held(ACTIVATION, f"activations of {tokens:,} tokens", peak),
        *question.driver(context_mib, nccl),
    ]
    if is_second:
        counts = requests * width.vocab_size * _COUNT_BITS // 8
        estimated.append(Held(RESERVE, "counts of tokens by request", counts))
    if question.images is not None:
        # The embeddings of images, in the type of the model (v1/core/encoder_cache_manager.py).
        cached = max(tokens, question.images.most_at(question.context_tokens))
        if question.images.rows > 1 and _LONG_VIDEOS[0] <= release < _LONG_VIDEOS[1]:
            cached = max(cached, _LONG_VIDEO_TOKENS)
        size = cached * question.images.rows * question.width.hidden_size * 2
        estimated.insert(1, Held(ACTIVATION, f"encoder cache of {cached:,} tokens", size))
    more: list[Held] = []
    if question.has_unknown_tower:
        more = [Held(ACTIVATION, "images and audio in a step", 0, 0, max(tokens, _LONG_IMAGE) * _LARGEST_IMAGE_BYTES)]
    if question.has_sparse_latent:
        size = _sparse_workspace(question.context_tokens, release)
        estimated.append(Held(ACTIVATION, "sparse attention workspace", size))
    estimates_graphs = given.optional_choice("graph-estimate") or ("1" if newest else "0")
    graphs = 0
    if estimates_graphs == "1" and not is_eager and (not is_second or release >= _SECOND_RUNNER):
        a_layer = _EXPERTS_GRAPH_BYTES if width.has_experts else _GRAPH_BYTES
        mode = given.choice("performance-mode")
        place = Place(question.release, question.device_class)
        sizes = _graph_sizes(requests, tokens, 1 + given.count("num-speculative-tokens", 0), mode, place)
        first = 0
        if question.has_states:
            first, a_layer = _STATES_FIRST_GRAPH, _STATES_GRAPH_BYTES
            if release >= _TRANSIENT_SINCE:
                _, kernels = _delta_net_elements(question)
                first = max(first, tokens * 2 * (kernels // question.layout.tensor_parallel_size))
        graphs = first + width.num_layers * a_layer * sizes // _GRAPH_SIZES
        estimated.append(Held(RESERVE, "CUDA graphs", graphs))
    unused = Held(RESERVE, f"unused share (1 - {utilization:g})", left).exact()
    held = [unused, *(part.within(_LOW, _HIGH) for part in estimated), *more]
    held[1] = held[1]._replace(low=int(low_peak * _LOW), high=(held[1].high or 0) + copied)
    if question.shares_memory:
        held = [part._replace(low=_CONTEXT_MIB * MIB) if part.name == CONTEXT else part for part in held]
    settings: dict[str, object] = {
        "gpu_memory_utilization": utilization,
        "max_num_seqs": requests,
        "enforce_eager": is_eager,
    }
    has_videos = question.images is not None and question.images.most_frames > 1
    varies = question.has_sparse_latent or has_videos
    return Reserve(held, settings, varies=varies, first_start_bytes=first_start, graph_bytes=graphs)


def _nccl_mib(has_fast_links: bool, release: Release) -> int:
    """NCCL's buffers and those of vLLM's own all-reduce. Devices on PCIe alone have few of them before 0.17."""
    if release >= _SECOND_ALL_REDUCE:
        return _FAST_NCCL_MIB if has_fast_links else _NCCL_MIB
    return _NCCL_MIB if has_fast_links else 0


def _sparse_workspace(context_tokens: int, release: Release) -> int:
    """Latents of 576 elements that a sparse prefill gathers: 5 times the longest context, or twice if it is long.

    Source: sparse_mla_prefill_workspace_factor, config/attention.py; before 0.33 the factor is always 5.
    """
    factor = 5 if context_tokens <= 256 * 1024 or release < Release.of(0, 33) else 2
    return factor * context_tokens * 576 * 2


def _is_second_runner(question: ReserveInputs, release: Release) -> bool:
    if release >= _SECOND_RUNNER:
        return True
    return release >= _DENSE_SECOND_RUNNER and not (question.width.has_experts or question.has_states)


def _logit_bytes(given: SettingsReader, release: Release, is_second: bool, question: ReserveInputs) -> tuple[int, int]:
    """The bytes per logit, and those at the low end of the range."""
    sampler = given.optional_choice("flashinfer-sampler")
    if is_second:
        return _SECOND_LOGIT_BYTES, _SECOND_LOGIT_BYTES
    sort = next(size for since, size in _LOGIT_BYTES.items() if release >= since)
    likely, low = sort, sort
    if release >= _IF_INSTALLED and CAPABILITIES.get(question.device_class or "", 0) >= _LEAST_CAPABILITY:
        if sampler == "1" or (sampler is None and release >= _FLASHINFER_DEFAULT):
            likely = _FLASHINFER_BYTES
        low = _FLASHINFER_BYTES if sampler is None and release < _SURELY else likely
    checked = _DRAFT_LOGIT_BYTES if question.drafts_by else 0
    return likely + checked, low + checked


def _peak(question: ReserveInputs, tokens: int, requests: int, logit_bytes: int) -> int:
    """The peak of the dummy step: that of a layer, of sampling or of the vision tower."""
    width, element = question.width, 2
    row = width.hidden_size * element
    gathered = (question.layout.data_parallel_size - 1) * row
    module = tokens * width.module_elements * element
    layer = tokens * (_ROWS * row + gathered) + module
    if width.streams > 1:
        rows = _FUSED_STREAM_ROWS if Place(question.release, question.device_class).is_sm100 else _STREAM_ROWS
        layer = tokens * (rows * width.streams * row + gathered)
    delta_net = -(-sum(_delta_net_elements(question)) // question.layout.tensor_parallel_size)
    layer = max(layer, tokens * (2 * row + delta_net * element))
    sampling = requests * width.vocab_size * logit_bytes + tokens * _ROWS_WHILE_SAMPLING * row
    sampling += module if width.has_experts else 0
    if question.images is None:
        return max(layer, sampling)
    images = question.images
    batch = max(tokens, images.most_at(question.context_tokens))
    inner = -(-images.elements // question.layout.tensor_parallel_size)
    tower = batch * images.patches_per_token * (_ROWS * images.width + inner) * element
    return max(layer, sampling, tower)


def _delta_net_elements(question: ReserveInputs) -> tuple[int, int]:
    """The elements that a token takes while a gated delta net prefills: around Triton's kernels, and in them.

    Around them are the projections and their contiguous copy, the output of the convolution and its queries, keys and
    values, and the output of the net. In them are the inverse of a chunk's matrix, its states, w, u, the new values and
    the output. Both are 0 for a model without delta nets. Source: qwen_gdn_linear_attn.py (layers/mamba/gdn) and
    chunk_gated_delta_rule_fwd (third_party/flash_linear_attention/ops/chunk.py), 0.33.0.
    """
    groups = question.spec.layers if question.spec is not None else ()
    around = kernels = 0
    for mixer in (mixer for group in groups for mixer in group.layer.mixers):
        if isinstance(mixer, Recurrence) and mixer.kind == "delta":
            values, state = mixer.heads * mixer.v_width, mixer.k_width * mixer.v_width
            around = max(around, 4 * mixer.state.conv_channels + 3 * values)
            if question.settings.get("gdn-prefill-backend") != "flashinfer":
                kernels = max(kernels, mixer.heads * (_CHUNK + mixer.k_width + state // _CHUNK) + 3 * values)
    return around, kernels


def _graph_sizes(requests: int, tokens: int, query: int, mode: str, place: Place) -> int:
    """The number of captured sizes: 1, 2, 4, multiples of 8 below 256, then of 16, up to twice the decoded tokens.

    A request decodes `query` tokens in a step. Source: VllmConfig._set_cudagraph_sizes (config/vllm.py) of 0.20.0,
    0.20.1, 0.28.0, 0.29.0 and 0.33.0.
    """
    limit = 1024 if place.is_sm100 and place.since(0, 28) else 512
    most = min(2 * requests * query, limit, tokens)
    single = range(1, min(most, 32) + 1) if mode == "interactivity" else (1, 2, 4)
    strides = (*range(8, 256, 8), *range(256, limit + 1, 16))
    sizes = {size for size in (*single, *strides) if size <= most}
    if tokens <= most and place.since(0, 20, 1):
        sizes.add(tokens)
    if place.since(0, 29):
        full = {size for size in (1, 2, 4, *strides) if size <= min(requests, limit)} | {min(requests, limit)}
        sizes |= {number * query for number in full if number * query <= most}
    return len(sizes)
