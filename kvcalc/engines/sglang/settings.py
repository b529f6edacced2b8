"""SGLang's own options, parsed."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf

from kvcalc.engines.account import DeviceDefault
from kvcalc.engines.command import DECODE
from kvcalc.engines.options import SettingsReader
from kvcalc.engines.reserve import GIB, NEWEST
from kvcalc.errors import LayoutError, ModelError, UsageError
from kvcalc.model.layout import Layout
from kvcalc.model.spec import ModelSpec
from kvcalc.records import NamedTuple
from kvcalc.releases import Release
from kvcalc.units import Number, parse_tokens

BOTH = "null"  # the --disaggregation-mode of an ordinary server, which computes prompts and answers
# The most running requests with which a decode instance has room for others that it receives.
_WITH_EXTRA_SLOTS = 32
# A default of --max-running-requests is set after the extra slots are, which are then 0.
NO_EXTRA_SLOTS: Mapping[str, str] = {"disaggregation-decode-extra-slots": Number(0)}


class Settings(NamedTuple):
    """If `max_running_requests` is None, SGLang derives it from the memory, and the request table is not counted.

    `max_mamba_cache_size` is the number of states. If it is None, there are as many as the sequences need.
    `chunked_prefill_size` is the number of tokens in a prefill step, None if it is not known.
    `speculative_num_draft_tokens` is the number of tokens that a step checks, None if it drafts none, and
    `speculative_eagle_topk` the branches of a tree of drafts. `swa_prefix_tails` are the prefixes for which DeepSeek-V4
    keeps windows. `disable_radix_cache` is also true for a decode instance, unless it is to have a prefix cache.
    """

    page_size: int
    swa_full_tokens_ratio: float
    max_running_requests: int | None
    context_length: int | None
    max_mamba_cache_size: int | None
    mamba_full_memory_ratio: float
    mamba_radix_cache_strategy: str
    swa_prefix_tails: int | None
    disaggregation_mode: str
    disaggregation_decode_extra_slots: int | None
    disaggregation_decode_enable_radix_cache: bool
    disable_radix_cache: bool
    speculative_num_draft_tokens: int | None
    speculative_eagle_topk: int
    chunked_prefill_size: int | None
    attn_cp_size: int
    max_prefill_tokens: int
    max_total_tokens: int | None
    schedule_conservativeness: float
    enable_mixed_chunk: bool
    disable_overlap_schedule: bool
    scheduler_recv_interval: int

    @property
    def extra_slots(self) -> int:
        """The requests that a decode instance receives beside those that run.

        Source: handle_pd_disaggregation (arg_groups/pd_disaggregation_hook.py), SGLang 0.5.23. The numbers are the same
        since 0.4.7 (model_executor/model_runner.py).
        """
        given, running = self.disaggregation_decode_extra_slots, self.max_running_requests
        if self.disaggregation_mode != DECODE:
            return 0
        if given is not None:
            return given
        return 2 * running if running is not None and running <= _WITH_EXTRA_SLOTS else 0


def parse_settings(settings: Mapping[str, str], default_page_size: int) -> Settings:
    """Parse and check the given options. Raises UsageError (exit 2)."""
    given = SettingsReader("sglang", settings)
    context = parse_tokens(settings["context-length"], "--context-length") if "context-length" in settings else None
    is_off = "disable-radix-cache" in settings
    if given.choice("disaggregation-mode") == DECODE:
        is_off = "disaggregation-decode-enable-radix-cache" not in settings
    return given.fill(
        Settings, page_size=given.count("page-size", default_page_size), context_length=context,
        disable_radix_cache=is_off, swa_prefix_tails=given.optional_count("swa-prefix-tails", 0),
        disaggregation_decode_extra_slots=given.optional_count("disaggregation-decode-extra-slots", 0),
        swa_full_tokens_ratio=given.share("swa-full-tokens-ratio"),
        mamba_full_memory_ratio=given.ratio("mamba-full-memory-ratio"),
        mamba_radix_cache_strategy=given.choice("mamba-radix-cache-strategy", "a strategy"),
        schedule_conservativeness=given.ratio("schedule-conservativeness"),
    )  # fmt: skip


# The defaults that SGLang chooses by the memory of a device: the tokens in a prefill step, and the graphs.


class _Steps(NamedTuple):
    """Of devices with less memory than `below_gib`: tokens in a prefill step, and the largest decode graphs.

    There is one size for fewer than four ranks, and one for four or more.
    """

    below_gib: float
    tokens: int
    few: int
    many: int


# Since a release, the newest first. Source: handle_gpu_memory_settings and, in older releases, __post_init__ of
# ServerArgs (srt/server_args.py), 0.4.0 to 0.5.23. Before 0.5.3, the sizes of graphs have no part in the default share.
_SMALLEST, _LARGEST = _Steps(20, 2048, 8, 8), _Steps(inf, 16384, 512, 512)
_LARGE = (_Steps(60, 4096, 32, 160), _Steps(160, 8192, 256, 512), _LARGEST)
_BY_MEMORY = {
    Release.of(0, 5, 20): (_SMALLEST, _Steps(35, 4096, 48, 160), *_LARGE),
    Release.of(0, 5, 5): (_SMALLEST, _Steps(35, 2048, 24, 80), *_LARGE),
    Release.of(0, 5, 3): (_SMALLEST, _Steps(35, 2048, 16, 80), *_LARGE),
    Release.of(0, 4, 8): (_Steps(35, 2048, 8, 80), _Steps(160, 8192, 160, 160), _LARGEST),
    Release.of(0): (_Steps(25_000 / 1024, 2048, 8, 80), _Steps(inf, 8192, 160, 160)),
}


def device_settings(
    memory_bytes: int, device_name: str, device_class: str | None, release: Release | None,
    given: Mapping[str, str], spec: ModelSpec | None = None,
) -> dict[str, str]:  # fmt: skip
    """The default number of tokens in a prefill step."""
    return {"chunked-prefill-size": str(steps_by_memory(memory_bytes, release)[0])}


def device_defaults(release: Release | None) -> list[DeviceDefault]:
    """Every default number of tokens in a prefill step."""
    rows = _steps(release)
    sizes = {str(row.tokens): f"less than {row.below_gib:.0f} GiB" for row in rows[:-1]}
    sizes[str(rows[-1].tokens)] = f"{rows[-2].below_gib:.0f} GiB and more"
    return [DeviceDefault("chunked-prefill-size", size, said) for size, said in sizes.items()]


def steps_by_memory(memory_bytes: int, release: Release | None) -> tuple[int, int, int]:
    """The tokens in a prefill step, and the largest batch in a graph with few devices and with four or more."""
    row = next(row for row in _steps(release) if memory_bytes < row.below_gib * GIB)
    return row.tokens, row.few, row.many


def _steps(release: Release | None) -> tuple[_Steps, ...]:
    return next(rows for since, rows in _BY_MEMORY.items() if (release or NEWEST) >= since)


# SGLang's prefill context parallelism: copies of the attention that divide the tokens of a prompt.
# --tp-size counts the devices of all copies (derive_attn_tp_size, srt/runtime_context.py). Each copy gathers the rows
# of the whole prompt, and decodes all requests. Source: handle_context_parallelism (arg_groups/parallel_hook.py),
# _deepseek_family_overrides (arg_groups/model_overrides/deepseek_v2.py) and srt/layers/cp, SGLang 0.5.23.

OPTION = "attn-cp-size"
# The only way to divide a prompt that each kind of attention has (get_supported_attention_backend). DeepSeek-V3.2
# refuses zigzag, and GLM-5 keeps a copy of every MLP with it.
_SPARSE = ("deepseek_v32", "glm_moe_dsa")
_LATENT = ("deepseek_v3", "kimi_k2")
_HEADS = ("qwen3_moe",)
_MOST_SPARSE = 8  # "Cross-machine CP has precision issues"


def strategy_of(spec: ModelSpec) -> str:
    """SGLang's --cp-strategy for a model."""
    return "interleave" if spec.model_type in _SPARSE else "zigzag"


def keeps_mlps(spec: ModelSpec) -> bool:
    """Whether every device has whole MLPs and shared experts: moe_dense_tp_size 1 and DeepEP, for MLA."""
    return spec.model_type in _LATENT


def check_copies(spec: ModelSpec, copies: int, settings: Mapping[str, str], stages: int) -> None:
    """Raise ModelError (exit 3) or UsageError (exit 2) for what is not known with `copies` of the attention."""
    if spec.model_type == "nemotron_h":
        raise ModelError(f"{spec.name}: SGLang does not run Nemotron-H with --{OPTION}")
    if spec.model_type not in (*_SPARSE, *_LATENT, *_HEADS):
        known = "DeepSeek-V3 and V3.2, Kimi-K2, GLM-5 and Qwen3-MoE"
        raise ModelError(f"{spec.name}: SGLang's --{OPTION} is modelled only for {known}")
    if stages > 1:
        raise UsageError(f"--{OPTION} {copies}: not modelled with pipeline stages", "leave out --pp")
    if "speculative-num-draft-tokens" in settings:
        raise UsageError(f"--{OPTION} {copies}: not modelled with drafted tokens", f"leave out --{OPTION}")


def check_devices(spec: ModelSpec, layout: Layout) -> None:
    """Raise LayoutError (exit 2) if a copy that divides prompts cannot be split over its devices."""
    copies, size = layout.prompt_ranks, layout.tensor_parallel_size
    if spec.model_type in _LATENT and size > 1:
        raise LayoutError(
            f"--{OPTION} {copies} --tp {size}: SGLang then keeps MLA without an indexer whole on every device",
            f"use --{OPTION} {copies * size} --tp 1",
        )
    if spec.model_type in _SPARSE and copies * size > _MOST_SPARSE:
        raise LayoutError(
            f"--{OPTION} {copies} --tp {size}: SGLang divides prompts of sparse attention on {_MOST_SPARSE} devices at "
            "most",
            f"use fewer devices, or leave out --{OPTION}",
        )
