"""Layers for further tokens (MTP), which speculative decoding runs beside the model's own and which keep a cache."""

from __future__ import annotations

from kvcalc.errors import UsageError
from kvcalc.model.caches import RecurrentState
from kvcalc.model.layers import LayerGroup
from kvcalc.model.spec import ModelSpec


def with_draft_layers(share: ModelSpec) -> ModelSpec:
    """`share` with as many layers more as the config names, each like the last that attends and keeps the most.

    Source: DeepSeekMTP, GlmMoeDsaMTP and Qwen3_5MTP of vLLM 0.33.0: one decoder layer of the model's own kind, with an
    indexer where the family has one. Raises UsageError (exit 2) where the config names none.
    """
    if share.num_draft_layers is None:
        raise UsageError(
            f"--num-speculative-tokens: {share.name} names no layers for further tokens",
            "a draft model of its own is another model: estimate it beside",
        )
    attending = [group for group in share.layers if any(not isinstance(c, RecurrentState) for c in group.caches)]
    kept = max(attending, key=lambda group: (len(group.caches), group.last)).caches
    first = share.num_layers
    return share._replace(layers=(*share.layers, LayerGroup(first, first + share.num_draft_layers - 1, kept)))
