"""The ways to read a log of vLLM: its settings, and the usual values of those that it does not have."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from itertools import product

from kvcalc.engines.checkpoint import is_from_a_name
from kvcalc.engines.log import Reading
from kvcalc.engines.log_lines import Log
from kvcalc.engines.vllm.log.pool import check_v0, check_v1
from kvcalc.engines.vllm.releases import RELEASES, Rules
from kvcalc.engines.vllm.settings import XPU_BLOCK
from kvcalc.engines.vllm.states import caches_prefixes, keeps_states, uses_qwen_delta_nets
from kvcalc.errors import UsageError
from kvcalc.model.caches import HEADS_CACHES, Cache, FullAttention
from kvcalc.model.drafting import DFLASH, EAGLE, Drafter, drafter_of, with_drafter
from kvcalc.model.layers import LayerGroup
from kvcalc.model.spec import ModelSpec, has_compressed, is_sparse, latent_of, map_caches, windows
from kvcalc.releases import parse_release

_V1_DEFAULT = (0, 8, 0)
_PREFILL_COPIES = (0, 26, 0)
# The API server's values: on H100-class devices, on B200 and B300, and on others (arg_utils.py, vLLM 0.33.0).
_BATCHED_TOKENS = ("8192", "16384", "2048")
# Some MLA kernels set the block size: FlashMLA 64, CUTLASS 128, FlashInfer 32. Others: the default (config/cache.py,
# vLLM 0.33.0).
_LATENT_BLOCKS = ("64", "16", "128", "32")
# On B200 and B300 an fp8 cache of sparse attention has other rows, and is the default of some models.
_DEVICES = (None, "blackwell")
# Tried if the log has no type of the cache, and the release's type is only known from its name.
_TYPES = (None, "bf16", "fp8")
# The default of Ascend's plugin since March 2025, in V0 and V1 (vllm_ascend/platform.py), and of V1 on CPUs
# (platforms/cpu.py, vLLM 0.20). Before: vLLM's own.
_LONG_BLOCKS, _WITH_LONG_BLOCKS = ("128", "16"), ("npu", "cpu")
# Observed for Llama 4 (vllm-project/vllm#16118, #19407). A KV connector also turns the hybrid cache manager off.
_WHOLE = "windowed and chunked layers keep all tokens, as without the hybrid cache manager"
# Methods that draft without layers of their own (SpeculativeConfig, config/speculative.py, vLLM 0.33.0).
_WITHOUT_LAYERS = ("ngram", "ngram_gpu", "suffix")

_NO_LAYERS = "drafting takes no layers"
_LIKE_THE_LAST = "one drafting layer like the model's last, as an EAGLE head has"
# Layers of published DFlash heads, which attend to all tokens: Qwen3-8B's, Laguna-S-2.1's, Qwen3.6-35B-A3B's.
_DFLASH_LAYERS = (5, 6, 8)
_LIKE_DFLASH = "{} drafting layers with KV heads like the model's, as a DFlash head has"


def readings(log: Log, spec: ModelSpec) -> Iterator[Reading]:
    """Every way to read the log that is consistent with its settings, the newest rules first."""
    version = _version(log)
    if _platform(log) == "tpu":
        # All layers keep all tokens, heads are padded, and the memory is that of all chips (tpu-inference 0.32.0).
        raise UsageError("vLLM's cache on TPUs is not modelled")
    # If the log does not name the engine's generation: only V0 has a swap space, and V0 was the default before 0.8.
    seems_v0 = bool(log.named("num_cpu_blocks")) or (version is not None and version < _V1_DEFAULT)
    if log.text("generation") == "V0" or (log.text("generation") is None and seems_v0):
        plain = {option: text for fact, option in _STATED_V0.items() if (text := log.text(fact))}
        sizes = _LONG_BLOCKS if _platform(log) in _WITH_LONG_BLOCKS and "block-size" not in plain else (None,)
        for size in sizes:
            settings = plain if size is None else {**plain, "block-size": size}
            yield Reading(settings, ("V0's pool",), check_v0)
        return
    _refuse_prefill_ranks(log, version)
    spec = spec._replace(state_dtype=log.text("state_dtype") or spec.state_dtype)
    possible_rules, drafting = _rules(log, spec), _drafting_models(log, spec)
    devices = _DEVICES if is_sparse(spec) else _DEVICES[:1]
    types = _TYPES if is_from_a_name(spec) and log.text("kv_dtype") is None else _TYPES[:1]
    for kv_dtype, device, rules, (model, drafts) in product(types, devices, possible_rules, drafting):
        plain, choices = _settings(log, spec, rules)
        for chosen in product(*choices):
            settings = {**plain, **{option: text for option, text, _ in chosen if text is not None}}
            of_device = () if device is None else ("the cache of B200 and B300",)
            of_type = () if kv_dtype is None else (f"a cache in {kv_dtype}: the release's config was not read",)
            taken = (rules.name, *(remark for _, _, remark in chosen), *drafts, *of_device, *of_type)
            check = partial(check_v1, rules)
            yield Reading(settings, taken, check, model, rules.release, kv_dtype, device)
    if windows(spec):
        for rules, (model, drafts) in product(possible_rules, drafting):
            plain, _ = _settings(log, spec, rules)
            whole, check = map_caches(model, _whole), partial(check_v1, rules)
            yield Reading(plain, (rules.name, _WHOLE, *drafts), check, whole, rules.release)


def _refuse_prefill_ranks(log: Log, version: tuple[int, ...] | None) -> None:
    """Raise UsageError (exit 2) if prefill context parallelism divides the cache, which is not modelled.

    Since 0.26 its ranks hold copies (FullAttentionSpec.max_memory_usage_bytes, v1/kv_cache_interface.py).
    """
    ranks = log.text("prefill_ranks") or "1"
    if ranks != "1" and version is not None and version < _PREFILL_COPIES:
        raise UsageError(f"the log's prefill_context_parallel_size of {ranks[:9]} is not modelled before vLLM 0.26")


def _rules(log: Log, spec: ModelSpec) -> list[Rules]:
    """The rules of the log's release. For a pre-release, also those of the next release. If unknown, all, newest first.

    A release later than the newest known one uses the newest rules. If several rules give the same result for this
    model, only the newest one is kept.
    """
    version, known = _version(log), [rules for rules in RELEASES if rules.since >= _V1_DEFAULT]
    if version is not None:
        place = next((n for n, rules in enumerate(known) if version >= rules.since), len(known) - 1)
        # "0.20.2rc1.dev9" is a pre-release and may already have the rules of the next release.
        between = re.search(r"[a-z]", log.text("version") or "") is not None
        known = known[max(0, place - between) : place + 1]
    mixed, states, packs = bool(windows(spec)), keeps_states(spec), has_compressed(spec)
    stages = log.text("pipeline_parallel_size") not in (None, "1") or log.text("pp_layer_partition") is not None
    alike: dict[object, Rules] = {}
    for rules in known:
        of_windows = rules._replace(
            since=(0, 0, 0), mla_block=0, hybrid_prefixes=True, state_per_block=(), checkpoints=(),
            packing=rules.packing if packs else "", bills="",
        )  # fmt: skip
        key = (
            rules.tokens,
            mixed and of_windows,
            states and rules[1:],
            packs and rules.packing,
            stages and rules.bills,
        )
        alike.setdefault(key, rules)
    return list(alike.values())


def _whole(cache: Cache) -> Cache:
    """A windowed or chunked cache as a cache that keeps every token."""
    if isinstance(cache, HEADS_CACHES) and cache.window is not None:
        return FullAttention(cache.num_kv_heads, cache.k_head_dim, cache.v_head_dim)
    return cache


# Facts in a log, and the options of kvcalc that they set.
_STATED_V0 = {"block_size": "block-size", "pp_layer_partition": "pp-layer-partition"}
_STATED = {
    **_STATED_V0, "num_speculative_tokens": "num-speculative-tokens",
    "max_num_batched_tokens": "max-num-batched-tokens", "token_ranks": "decode-context-parallel-size",
    "mamba_cache_dtype": "mamba-cache-dtype", "mamba_ssm_cache_dtype": "mamba-ssm-cache-dtype",
    "mamba_cache_mode": "mamba-cache-mode", "no_hybrid_manager": "disable-hybrid-kv-cache-manager",
}  # fmt: skip

# An option, its text (None if it is not set), and the description for the user.
_Choice = tuple[str, "str | None", str]
_PREFIX_CACHING: tuple[_Choice, _Choice] = (
    ("enable-prefix-caching", "", "prefix caching on"), ("no-enable-prefix-caching", "", "prefix caching off"),
)  # fmt: skip
_ASYNC_SCHEDULING: tuple[_Choice, _Choice] = (
    ("no-async-scheduling", None, "async scheduling on"), ("no-async-scheduling", "", "async scheduling off"),
)  # fmt: skip


def _settings(log: Log, spec: ModelSpec, rules: Rules) -> tuple[dict[str, str], list[list[_Choice]]]:
    """The settings in the log, and the choices it leaves open that matter for this model and release."""
    plain = {}
    for fact, option in _STATED.items():
        text = log.text(fact)
        if text is not None and text != "0":
            plain[option] = text
    prompt_ranks = log.text("prefill_ranks") or "1"
    if prompt_ranks != "1" and plain.get("decode-context-parallel-size", "1") != "1":
        # The ranks that divide the cache are then those of all copies. A server that started has no images.
        plain |= {"prefill-context-parallel-size": prompt_ranks, "language-model-only": ""}
    if log.named("attention_block_size"):
        # The log prints the block size after it was raised. The size before that is the default.
        plain.pop("block-size", None)
    if _platform(log) == "xpu" and (keeps_states(spec) or latent_of(spec) is None):
        plain.setdefault("block-size", str(XPU_BLOCK))
    choices: list[list[_Choice]] = []
    sizes: tuple[str, ...] = _LATENT_BLOCKS if latent_of(spec) is not None else ()
    if _platform(log) in _WITH_LONG_BLOCKS:
        sizes = _LONG_BLOCKS
    if "block-size" not in plain and sizes:
        choices.append([("block-size", n, f"blocks of {n} tokens") for n in sizes])
    if keeps_states(spec):
        choices.append(_switch(log, "enable_prefix_caching", *_PREFIX_CACHING, caches_prefixes(spec, rules, {})))
        if uses_qwen_delta_nets(spec) and "delta" in rules.checkpoints:
            choices.append([("gdn-prefill-backend", name, f"{name} prefill") for name in ("flashinfer", "triton")])
    if windows(spec):
        if "max-num-batched-tokens" not in plain:
            choices.append([("max-num-batched-tokens", n, f"max_num_batched_tokens {n}") for n in _BATCHED_TOKENS])
        if rules.two_steps:
            choices.append(_switch(log, "async_scheduling", *_ASYNC_SCHEDULING))
    return plain, choices


def _platform(log: Log) -> str:
    """The kind of device in the log, such as cuda, xpu or npu. Empty if it is not there."""
    return (log.text("platform") or "").casefold()


def _switch(log: Log, fact: str, on: _Choice, off: _Choice, is_default: bool = True) -> list[_Choice]:
    """A setting as the log states it, or else both values, the release's default first."""
    stated = log.flag(fact)
    if stated is not None:
        return [on if stated else off]
    return [on, off] if is_default else [off, on]


def _version(log: Log) -> tuple[int, ...] | None:
    """The version's first three numbers, or None if the log has no version that can be read."""
    try:
        release = parse_release("vllm", log.text("version") or "").release
    except UsageError:
        return None
    return None if release is None else release.numbers[:3]


def _drafting_models(log: Log, spec: ModelSpec) -> list[tuple[ModelSpec, tuple[str, ...]]]:
    """The model with what drafts tokens, in the order to try, each with a remark.

    The model itself if nothing is drafted, or if its own MTP layers draft, which vLLM's rules add.
    """
    drafted, method = log.text("num_speculative_tokens"), (log.text("speculative_method") or "").casefold()
    if drafted in (None, "0") or (spec.num_draft_layers and (not method or "mtp" in method)):
        return [(spec, ())]
    none = (with_drafter(spec, None), (_NO_LAYERS,))
    if method in _WITHOUT_LAYERS:
        return [none]
    full = [cache for group in spec.layers for cache in group.caches if isinstance(cache, FullAttention)]
    if method == DFLASH and full:
        heads = ((n, Drafter(spec, (LayerGroup(0, n - 1, (full[0],)),), None, None)) for n in _DFLASH_LAYERS)
        return [*((with_drafter(spec, head), (_LIKE_DFLASH.format(n),)) for n, head in heads), none]
    try:
        head = (with_drafter(spec, drafter_of(spec, None, EAGLE)), (_LIKE_THE_LAST,))
    except UsageError:
        # The log does not have the config of the head, and the model's config does not tell.
        return [none]
    return [head] if method.startswith("eagle") else [head, none]
