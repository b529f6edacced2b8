"""Layers for further tokens (MTP), which speculative decoding runs beside the model's own and which keep a cache."""

from __future__ import annotations

from kvcalc.errors import UsageError
from kvcalc.model.caches import RecurrentState
from kvcalc.model.spec import LayerGroup, ModelSpec

# Where configs count their layers for further tokens.
_KEYS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")


def with_draft_layers(share: ModelSpec) -> ModelSpec:
    """`share` with as many layers more as the config names, each like the last that attends and keeps the most.

    Source: DeepSeekMTP, GlmMoeDsaMTP and Qwen3_5MTP of vLLM 0.33.0: one decoder layer of the model's own kind, with an
    indexer where the family has one. Raises UsageError (exit 2) where the config names none.
    """
    stated = next((share.config[key] for key in _KEYS if share.config.get(key)), None)
    if not isinstance(stated, int):
        raise UsageError(
            f"--num-speculative-tokens: {share.name} names no layers for further tokens",
            "a draft model of its own is another model: estimate it beside",
        )
    attending = [group for group in share.layers if any(not isinstance(c, RecurrentState) for c in group.caches)]
    kept = max(attending, key=lambda group: (len(group.caches), group.last)).caches
    first = share.num_layers
    return share._replace(layers=(*share.layers, LayerGroup(first, first + stated - 1, kept)))
