"""vLLM's own options and their defaults, with vLLM's names."""

from __future__ import annotations

from collections.abc import Mapping

from kvcalc.engines.options import Given
from kvcalc.engines.place import ANYWHERE, Place
from kvcalc.engines.vllm.blocks import default_block, step_of
from kvcalc.engines.vllm.flags import check_flags
from kvcalc.engines.vllm.releases import Rules
from kvcalc.engines.vllm.states import FLASHINFER, States, caches_prefixes, states_of, uses_qwen_delta_nets
from kvcalc.errors import LayoutError, UsageError
from kvcalc.memory.sharding import longer_before_last
from kvcalc.model.spec import ModelSpec
from kvcalc.records import NamedTuple

# The API server's default on H100 and H200. It is 16,384 on B200 and B300, and 2,048 on other devices (arg_utils.py,
# vLLM 0.33.0).
_DEFAULT_BATCHED_TOKENS = 8192

# On Intel's GPUs, blocks are multiples of 64 tokens: beside gated delta nets since 0.20 (update_block_size_for_backend,
# platforms/xpu.py), and for every model since 0.32 (get_supported_kernel_block_sizes, flash_attn.py).
XPU_BLOCK = 64

# The values of --max-lora-rank. 1 is not in 0.11.0.
_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


class Settings(NamedTuple):
    """`max_num_batched_tokens` is the number of tokens in one step.

    One step per pipeline stage is in flight. With async scheduling it is one more (max_concurrent_batches,
    config/vllm.py), if `overlaps_stages` or there is one stage. The number of stages comes from the workload.
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
    pp_layer_partition: str | None = None
    disable_hybrid_kv_cache_manager: bool = False
    mamba_cache_dtype: str = "auto"
    mamba_ssm_cache_dtype: str = "auto"
    kv_cache_dtype_skip_layers: str | None = None
    pipeline_parallel_size: int = 1
    prefill_context_parallel_size: int = 1
    overlaps_stages: bool = True

    @property
    def steps_in_flight(self) -> int:
        """The steps that are scheduled and not yet finished."""
        stages = self.pipeline_parallel_size
        return stages + (self.async_scheduling and (stages == 1 or self.overlaps_stages))

    @property
    def max_in_flight_tokens(self) -> int:
        return self.steps_in_flight * self.max_num_batched_tokens


def parse_settings(
    settings: Mapping[str, str], spec: ModelSpec, rules: Rules, place: Place = ANYWHERE
) -> tuple[Settings, States]:
    """Parse and check the given options for a model, with the defaults of a release. Returns also the states it keeps.

    Raises UsageError (exit 2) for a number out of range, a block size that no kernel supports, options that contradict
    each other, or flags and choices that the release does not have.
    """
    given = Given("vllm", settings)
    check_flags(settings, place)
    step, drafted = step_of(spec), given.count("num-speculative-tokens", 0)
    block_size = given.count("block-size", default_block(spec, None, place))
    if block_size % step:
        raise UsageError(
            f"--block-size {block_size}: vLLM's kernels for {spec.name} need multiples of {step}",
            f"use --block-size {step}",
        )
    if "enable-prefix-caching" in settings and "no-enable-prefix-caching" in settings:
        raise UsageError("--enable-prefix-caching and --no-enable-prefix-caching contradict each other")
    caching = "enable-prefix-caching" in settings or (
        "no-enable-prefix-caching" not in settings and caches_prefixes(spec, rules)
    )
    kernel = given.choice("gdn-prefill-backend") if "gdn-prefill-backend" in settings else FLASHINFER
    prefill = kernel if uses_qwen_delta_nets(spec) else None
    mode = given.choice("mamba-cache-mode") if "mamba-cache-mode" in settings else None
    block_of_state = given.optional_count("mamba-block-size")
    if block_of_state is not None and not caching:
        raise UsageError("--mamba-block-size needs prefix caching", "use --enable-prefix-caching")
    states = states_of(spec, rules, caching, prefill, drafted, mode, block_of_state, place)
    found = Settings(
        block_size,
        given.count("max-num-batched-tokens", _DEFAULT_BATCHED_TOKENS),
        rules.two_steps and "no-async-scheduling" not in settings,
        caching,
        drafted,
        given.count("decode-context-parallel-size", 1),
        states.mode,
        prefill,
        settings.get("pp-layer-partition"),
        "disable-hybrid-kv-cache-manager" in settings,
        _state_dtype(given, "mamba-cache-dtype", place),
        _state_dtype(given, "mamba-ssm-cache-dtype", place),
        settings.get("kv-cache-dtype-skip-layers"),
        prefill_context_parallel_size=given.count("prefill-context-parallel-size", 1),
        overlaps_stages=rules.overlaps_stages,
    )
    check_requests(given, found.max_num_batched_tokens)
    return found, states


def check_requests(given: Given, batched_tokens: int) -> None:
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


def _state_dtype(given: Given, name: str, place: Place) -> str:
    """The type of states. 0.13 added float16 and 0.22 bfloat16 (MambaDType, config/cache.py)."""
    found = given.choice(name)
    since = {"float16": (0, 13), "bfloat16": (0, 22)}.get(found)
    if since is not None and not place.since(*since):
        raise UsageError(f"--{name} {found}: this release of vLLM does not have it", f"vLLM {since[0]}.{since[1]} does")
    return found


def is_number_of_layers(word: str) -> bool:
    """Whether a word is a whole number. No model has a million layers, and int() refuses thousands of digits."""
    return word.isascii() and word.isdigit() and len(word) < 7


def check_partition(partition: str | None, num_layers: int, stages: int) -> None:
    """Raise UsageError (exit 2) if `partition`, such as 16,32, does not divide the layers among the stages.

    Source: get_pp_indices, distributed/utils.py, vLLM 0.33.0.
    """
    if partition is None:
        return
    asked = f"--pp-layer-partition {partition[:40]}"
    sizes = partition.split(",")
    if not all(is_number_of_layers(size) and 0 < int(size) <= num_layers for size in sizes):
        raise UsageError(f"{asked}: not numbers of the model's {num_layers} layers", "for example 16,32")
    if len(sizes) != stages:
        raise LayoutError(f"{asked} has {len(sizes)} stages, but --pp is {stages}", f"use --pp {len(sizes)}")
    if sum(map(int, sizes)) != num_layers:
        example = ",".join(map(str, longer_before_last(num_layers, stages)))
        raise LayoutError(
            f"{asked} has {sum(map(int, sizes))} layers, but the model has {num_layers}", f"for example {example}"
        )
