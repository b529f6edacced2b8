"""vLLM's own options and their defaults, with vLLM's names."""

from __future__ import annotations

from collections.abc import Mapping

from kvcalc.engines.options import SettingsReader, has_adapters
from kvcalc.engines.place import ANYWHERE, Place
from kvcalc.engines.vllm.defaults import check_block, default_block, times_of
from kvcalc.engines.vllm.releases import Rules
from kvcalc.engines.vllm.states import FLASHINFER, States, caches_prefixes, states_of, uses_qwen_delta_nets
from kvcalc.errors import LayoutError, ModelError, UsageError
from kvcalc.memory.sharding import longer_before_last
from kvcalc.model.caches import IndexerKeys, LatentAttention
from kvcalc.model.layout import Layout
from kvcalc.model.spec import ModelSpec, all_caches, windows
from kvcalc.records import NamedTuple

# The API server's default on H100 and H200. It is 16,384 on B200 and B300, and 2,048 on other devices (arg_utils.py,
# vLLM 0.33.0).
STEP, DEFAULT_BATCHED_TOKENS = "max-num-batched-tokens", 8192

# On Intel's GPUs, blocks are multiples of 64 tokens: beside gated delta nets since 0.20 (update_block_size_for_backend,
# platforms/xpu.py), and for every model since 0.32 (get_supported_kernel_block_sizes, flash_attn.py).
XPU_BLOCK = 64

# The values of cudagraph_mode with graphs of whole steps (CUDAGraphMode, config/compilation.py).
FULL_GRAPHS = ("full_and_piecewise", "full_decode_only", "full")

# The values of --max-lora-rank. 1 is not in 0.11.0.
_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


class Settings(NamedTuple):
    """`max_num_batched_tokens` is the number of tokens in one step.

    One step per pipeline stage is in flight. With async scheduling it is one more (max_concurrent_batches,
    config/vllm.py), if `overlaps_stages` or there is one stage. The number of `stages` comes from the workload.
    `gdn_prefill_backend` is None for models without gated delta nets of Qwen's class.
    """

    block_size: int
    max_num_batched_tokens: int
    async_scheduling: bool
    enable_prefix_caching: bool
    num_speculative_tokens: int
    decode_context_parallel_size: int
    mamba_cache_mode: str
    gdn_prefill_backend: str | None
    pp_layer_partition: str | None
    disable_hybrid_kv_cache_manager: bool
    mamba_cache_dtype: str
    mamba_ssm_cache_dtype: str
    kv_cache_dtype_skip_layers: str | None
    pipeline_parallel_size: int
    prefill_context_parallel_size: int
    overlaps_stages: bool
    num_gpu_blocks_override: int | None
    enable_chunked_prefill: bool
    cudagraph_mode: str

    @property
    def steps_in_flight(self) -> int:
        """The steps that are scheduled and not yet finished."""
        stages = self.pipeline_parallel_size
        return stages + (self.async_scheduling and (stages == 1 or self.overlaps_stages))

    @property
    def max_in_flight_tokens(self) -> int:
        return self.steps_in_flight * self.max_num_batched_tokens


def parse_settings(
    settings: Mapping[str, str], spec: ModelSpec, rules: Rules, place: Place = ANYWHERE, stages: int = 1
) -> tuple[Settings, States]:
    """Parse and check the given options for a model, with the defaults of a release. Returns also the states it keeps.

    Raises UsageError (exit 2) for a number out of range, a block size that no kernel supports, options that contradict
    each other, or flags and choices that the release does not have.
    """
    given = SettingsReader("vllm", settings)
    drafted = given.count("num-speculative-tokens", 0)
    block_size = given.count("block-size", default_block(spec, None, place))
    check_block(spec, block_size, None)
    if "enable-prefix-caching" in settings and "no-enable-prefix-caching" in settings:
        raise UsageError("--enable-prefix-caching and --no-enable-prefix-caching contradict each other")
    caching = caches_prefixes(spec, rules, settings)
    kernel = given.choice("gdn-prefill-backend") if "gdn-prefill-backend" in settings else FLASHINFER
    prefill = kernel if uses_qwen_delta_nets(spec) else None
    mode = given.choice("mamba-cache-mode") if "mamba-cache-mode" in settings else None
    block_of_state = given.optional_count("mamba-block-size")
    if block_of_state is not None and not caching:
        raise UsageError("--mamba-block-size needs prefix caching", "use --enable-prefix-caching")
    states = states_of(spec, rules, caching, prefill, drafted, mode, block_of_state, place)
    parsed = given.fill(
        Settings, max_num_batched_tokens=given.count(STEP, DEFAULT_BATCHED_TOKENS * times_of(given)),
        block_size=block_size, enable_prefix_caching=caching,
        async_scheduling=rules.two_steps and "no-async-scheduling" not in settings,
        num_speculative_tokens=drafted, mamba_cache_mode=states.mode, gdn_prefill_backend=prefill,
        mamba_cache_dtype=_state_dtype(given, "mamba-cache-dtype", place),
        mamba_ssm_cache_dtype=_state_dtype(given, "mamba-ssm-cache-dtype", place), pipeline_parallel_size=stages,
        overlaps_stages=rules.overlaps_stages, enable_chunked_prefill="no-enable-chunked-prefill" not in settings,
    )  # fmt: skip
    check_requests(given, parsed.max_num_batched_tokens)
    return parsed, states


def check_requests(given: SettingsReader, batched_tokens: int) -> None:
    """Raise LayoutError (exit 2) for numbers of requests and of LoRA adapters with which vLLM does not start.

    Source: SchedulerConfig.verify_max_model_len (config/scheduler.py) and MaxLoRARanks (config/lora.py), vLLM 0.11.0 to
    0.33.0.
    """
    requests = given.optional_count("max-num-seqs")
    if requests is not None and requests > batched_tokens:
        text = f"vLLM does not start with fewer tokens in a step than requests: {batched_tokens:,}"
        raise LayoutError(f"--max-num-seqs {requests}: {text}", f"--max-num-batched-tokens {requests}")
    rank = given.optional_count("max-lora-rank")
    if rank is not None and rank not in _LORA_RANKS:
        larger = next((known for known in _LORA_RANKS if known > rank), _LORA_RANKS[-1])
        known = ", ".join(map(str, _LORA_RANKS))
        raise LayoutError(f"--max-lora-rank {rank}: vLLM does not start, the ranks are {known}", f"use {larger}")


def _state_dtype(given: SettingsReader, name: str, place: Place) -> str:
    """The type of states. 0.13 added float16 and 0.22 bfloat16 (MambaDType, config/cache.py)."""
    stated = given.choice(name)
    since = {"float16": (0, 13), "bfloat16": (0, 22)}.get(stated)
    if since is not None and not place.since(*since):
        raise UsageError(
            f"--{name} {stated}: this release of vLLM does not have it", f"vLLM {since[0]}.{since[1]} does"
        )
    return stated


def is_number_of_layers(word: str) -> bool:
    """Whether a word is a whole number. No model has a million layers, and int() refuses thousands of digits."""
    return word.isascii() and word.isdigit() and len(word) < 7


def check_partition(partition: str | None, num_layers: int, stages: int) -> None:
    """Raise UsageError (exit 2) if `partition`, such as 16,32, does not divide the layers among the stages.

    Source: get_pp_indices, distributed/utils.py, vLLM 0.33.0.
    """
    if partition is None:
        return
    option = f"--pp-layer-partition {partition[:40]}"
    sizes = partition.split(",")
    if not all(is_number_of_layers(size) and 0 < int(size) <= num_layers for size in sizes):
        raise UsageError(f"{option}: not numbers of the model's {num_layers} layers", "for example 16,32")
    if len(sizes) != stages:
        raise LayoutError(f"{option} has {len(sizes)} stages, but --pp is {stages}", f"use --pp {len(sizes)}")
    if sum(map(int, sizes)) != num_layers:
        example = ",".join(map(str, longer_before_last(num_layers, stages)))
        raise LayoutError(
            f"{option} has {sum(map(int, sizes))} layers, but the model has {num_layers}", f"for example {example}"
        )


# Context parallelism in vLLM.
# Decode: the ranks that would hold the same KV heads divide the tokens of the cache among them instead. Prefill: copies
# of the attention divide the tokens of a prompt. Each copy gathers the latents of the whole prompt, so it holds the
# cache of all requests, and the copies do not add to the ranks that divide the cache (ParallelConfig and
# pcp_shard_decode_requests, config/parallel.py, vLLM 0.33.0).

# The first release that does not divide the cache of dense MLA among these ranks (pcp_manager.py of 0.28.0
# and 0.30.0, v1/worker/gpu).
_SPARSE_ALONE = (0, 30)


def check_token_ranks(spec: ModelSpec, layout: Layout, place: Place = ANYWHERE) -> None:
    """Check that the token ranks of a layout can divide the tokens of the cache.

    With `prompt_ranks` copies that divide a prompt, they are these copies, or all ranks of all copies.

    Raises LayoutError (exit 2) if the numbers do not divide, and ModelError (exit 3) for windows, whose layers vLLM
    refuses to divide. Source: ParallelConfig (config/parallel.py), verify_with_parallel_config (config/model.py) and
    SlidingWindowSpec (v1/kv_cache_interface.py), vLLM 0.33.0.
    """
    size, token_ranks, prompt_ranks = layout.tensor_parallel_size, layout.token_ranks, layout.prompt_ranks
    if token_ranks == 1:
        return
    option = f"--decode-context-parallel-size {token_ranks}"
    if prompt_ranks > 1:
        _check_both(spec, option, token_ranks, (prompt_ranks, size * prompt_ranks), place)
        return
    if size % token_ranks:
        raise LayoutError(f"{option} does not divide --tp {size}", "its ranks are those of --tp")
    if windows(spec):
        raise ModelError(f"{spec.name}: vLLM does not support {option} with sliding windows")
    shape = spec.attention
    if shape.is_latent or not shape.num_kv_heads:
        return
    most = size // shape.num_kv_heads
    if token_ranks > most:
        hint = f"use --tp {token_ranks * shape.num_kv_heads}, or a smaller --decode-context-parallel-size"
        raise LayoutError(f"{option}: {shape.num_kv_heads} KV heads on --tp {size} allow {most}", hint)
    if shape.num_heads // shape.num_kv_heads % token_ranks:
        raise LayoutError(
            f"{option} does not divide the {shape.num_heads // shape.num_kv_heads} query heads per KV head",
            "use a number that divides them",
        )


def _check_both(spec: ModelSpec, option: str, token_ranks: int, allowed: tuple[int, ...], place: Place) -> None:
    """The same with prefill context parallelism: since 0.30 vLLM divides the cache of sparse MLA only (PCPManager)."""
    if token_ranks not in allowed:
        known = " or ".join(map(str, dict.fromkeys(allowed)))
        raise LayoutError(f"{option}: with --prefill-context-parallel-size it must be {known}", "or leave it out")
    if place.since(*_SPARSE_ALONE) and not any(isinstance(cache, IndexerKeys) for cache in all_caches(spec)):
        raise ModelError(
            f"{spec.name}: vLLM supports {option} with --prefill-context-parallel-size for sparse MLA only"
        )


def check_prompt_ranks(spec: ModelSpec, settings: Mapping[str, str], chosen: Settings, place: Place) -> None:
    """Check that vLLM can divide the tokens of a prompt of this model (prefill context parallelism).

    Raises UsageError (exit 2) for an older release or an adapter, and ModelError (exit 3) for other models than those
    with MLA in all layers, and for images. Before 0.26 no attention kernel has it, and before 0.32 it does not have
    pipeline stages. Source: PCPManager.validate_config (v1/worker/gpu/pcp_manager.py) and
    check_attention_cp_compatibility (v1/worker/cp_utils.py), vLLM 0.33.0.
    """
    option = f"--prefill-context-parallel-size {chosen.prefill_context_parallel_size}"
    if not place.since(0, 26):
        raise UsageError(f"{option}: no attention kernel of this release has it", "it runs in vLLM 0.26 and later")
    if chosen.pipeline_parallel_size > 1 and not place.since(0, 32):
        raise UsageError(
            f"{option}: this release supports it only without pipeline stages", "vLLM 0.32 has it with --pp"
        )
    if has_adapters(settings):
        raise UsageError(f"{option}: vLLM does not support it with LoRA adapters", "leave out --max-lora-rank")
    caches = all_caches(spec)
    if not caches or not all(isinstance(cache, (LatentAttention, IndexerKeys)) for cache in caches):
        raise ModelError(f"{spec.name}: {option} is only for models with MLA in all layers, in vLLM")
    if spec.has_towers and "language-model-only" not in settings:
        raise ModelError(f"{spec.name}: vLLM does not support {option} with images", "use --language-model-only")
