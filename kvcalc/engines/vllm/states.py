"""The recurrent states that vLLM keeps for a request, with and without prefix caching.

Source, vLLM 0.33.0: is_prefix_caching_supported (config/model.py) for the default, MambaModelConfig
(model_executor/models/config.py) for the mode, MambaSpec.max_memory_usage_bytes (v1/kv_cache_interface.py) for the
number of states, get_kv_cache_spec of mamba_mixer2.py and qwen_gdn_linear_attn.py for the checkpoints, and
_align_hybrid_block_size (platforms/interface.py) for the blocks. `Rules` has the differences in older releases, from
the same files of 0.12 to 0.32.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvcalc.engines.place import ANYWHERE, Place
from kvcalc.engines.vllm.defaults import INKLING
from kvcalc.engines.vllm.releases import Rules
from kvcalc.errors import ModelError, UsageError
from kvcalc.model.mixers.recurrent import Recurrence
from kvcalc.model.spec import ModelSpec, has_cross_attention, has_states
from kvcalc.records import NamedTuple

NONE, ALIGN, ALL = "none", "align", "all"
FLASHINFER = "flashinfer"

# The models whose gated delta nets can prefill with FlashInfer's kernel, which writes a state every 64 tokens
# (QwenGatedDeltaNetAttention, FLASHINFER_GDN_CHECKPOINT_ALIGNMENT).
_QWEN = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "qwen4_exp_text")
_FLASHINFER_TOKENS = 64

# The first release in which FlashKDA, which prefills Kimi K3 and GLM-5-Next on Hopper and Blackwell, writes a state in
# the middle of a prefill (is_flashkda_supported and get_kv_cache_spec, models/kimi_k3/nvidia/kda.py, 0.29.0 to 0.33.0,
# and models/glm5next/common/kda.py). It needs gates with a lower bound, which Kimi Linear does not have, and heads of
# 128.
_FLASHKDA_SINCE, _FLASHKDA_HEAD = (0, 29), 128

# A state is kept for blocks that are a multiple of the chunk of Mamba-2's kernels. The config's default, by model type
# (Transformers 5.23.0); 2,048 for Mamba, which has no chunks (get_mamba_chunk_size, config/model.py, vLLM 0.26.0).
_CHUNKS = {"nemotron_h": 128, "bamba": 256, "falcon_h1": 256, "granitemoehybrid": 256, "zamba2": 256, "mamba2": 256}
_MAMBA_CHUNK = 2048

# The kinds whose models can keep a state for every block (supports_mamba_prefix_caching).
_STATE_PER_BLOCK = ("linear", "selective")


class States(NamedTuple):
    """How states are kept. `kept` is their number for one request, besides those for every block in mode `all`.

    Attention's blocks are multiples of `alignment` tokens.
    """

    mode: str = NONE
    kept: int = 1
    alignment: int = 1


def keeps_states(spec: ModelSpec) -> bool:
    """Whether vLLM keeps recurrent states of the model. The inputs of Inkling's convolutions are pages of a window."""
    return has_states(spec) and spec.model_type not in INKLING


def uses_qwen_delta_nets(spec: ModelSpec) -> bool:
    """Whether the model has gated delta nets of Qwen's class, whose prefill kernel changes what is kept."""
    return spec.model_type in _QWEN and keeps_states(spec)


def caches_prefixes(spec: ModelSpec, rules: Rules, settings: Mapping[str, str]) -> bool:
    """Whether prefix caching is on. By default, it is off with an encoder, and with states but no attention."""
    if "enable-prefix-caching" in settings:
        return can_cache_prefixes(spec, rules)
    if "no-enable-prefix-caching" in settings or has_cross_attention(spec):
        return False
    return not keeps_states(spec) or (rules.hybrid_prefixes and spec.attention.num_heads > 0)


def can_cache_prefixes(spec: ModelSpec, rules: Rules) -> bool:
    """Whether --enable-prefix-caching does anything. Older releases turn it off if they cannot keep the states."""
    kinds = _kinds(spec) if keeps_states(spec) else set()
    return rules.has_mode_align or kinds.issubset(rules.state_per_block)


def states_of(
    spec: ModelSpec, rules: Rules, prefix_caching: bool, prefill: str | None, speculative_tokens: int,
    mode: str | None = None, state_tokens: int | None = None, place: Place = ANYWHERE,
) -> States:  # fmt: skip
    """The states of a request. `prefill` is the kernel for gated delta nets, or None if there are none.

    `mode` and `state_tokens` are --mamba-cache-mode and --mamba-block-size, None if not given. Mode `none` is the
    default, and without prefix caching it is the only one. Raises UsageError (exit 2) for a mode that the release does
    not have, and ModelError (exit 3) for a state per block in a model without attention, whose blocks are not modelled.
    """
    if mode == ALL and not rules.has_mode_all:
        raise UsageError("--mamba-cache-mode all: vLLM 0.32 and later do not have it", "use align")
    if not prefix_caching:
        return States(NONE, 1 + speculative_tokens)
    kinds = _kinds(spec)
    chosen = rules.state_per_block if mode in (None, NONE) else _STATE_PER_BLOCK if mode == ALL else ()
    if mode in (None, NONE) and rules.drafts_align and speculative_tokens:
        chosen = ()
    if kinds and kinds.issubset(chosen):
        if not spec.attention.num_heads:
            raise ModelError(
                f"{spec.name}: prefix caching of models without attention is not modelled for {rules.name}",
                "leave out --enable-prefix-caching",
            )
        return States(ALL, speculative_tokens, state_tokens or _chunk(spec, kinds))
    kept = 2 + speculative_tokens
    if "linear" in kinds & set(rules.checkpoints) or _uses_flashkda(spec, place):
        return States(ALIGN, kept + 1)
    if prefill == FLASHINFER and "delta" in rules.checkpoints:
        return States(ALIGN, kept + 1, _FLASHINFER_TOKENS)
    return States(ALIGN, kept)


def _uses_flashkda(spec: ModelSpec, place: Place) -> bool:
    """Whether FlashKDA prefills the model's delta attention."""
    delta = spec.stated.get("linear_attn_config")
    stated = delta.get("gate_lower_bound") if isinstance(delta, Mapping) else None
    if stated is None and spec.stated.get("linear_lower_bound") is None:
        return False
    heads = {mixer.k_width for group in spec.layers for mixer in group.layer.mixers if isinstance(mixer, Recurrence)}
    return heads == {_FLASHKDA_HEAD} and place.since(*_FLASHKDA_SINCE)


def _kinds(spec: ModelSpec) -> set[str]:
    """The kinds of recurrences in the model's layers."""
    mixers = (mixer for group in spec.layers for mixer in group.layer.mixers)
    return {mixer.kind for mixer in mixers if isinstance(mixer, Recurrence)}


def _chunk(spec: ModelSpec, kinds: set[str]) -> int:
    stated = spec.stated.get("mamba_chunk_size", spec.stated.get("chunk_size"))
    if isinstance(stated, int):
        return stated
    return _CHUNKS.get(spec.model_type, 256) if "linear" in kinds else _MAMBA_CHUNK
