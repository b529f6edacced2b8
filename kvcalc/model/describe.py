"""A ModelSpec as plain data for the documents."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from kvcalc.model.caches import RecurrentState
from kvcalc.model.memo import remembered
from kvcalc.model.spec import ModelSpec, all_caches, latent_of, windows

if TYPE_CHECKING:
    import kvcalc.documents as documents


def describe_model(spec: ModelSpec) -> documents.Model:
    """Return the `model` part of a document. It describes the model after any what-if change."""
    return _describe(spec).copy()


@remembered
def _describe(spec: ModelSpec) -> documents.Model:
    shape, latent, spans = spec.attention, latent_of(spec), windows(spec)
    return {
        "name": spec.name,
        "source": spec.source,
        "model_type": spec.model_type,
        "attention": cast(Any, _kind(spec)),
        "is_encoder": spec.is_encoder,
        "num_layers": spec.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_kv_heads": None if shape.is_latent else shape.num_kv_heads,
        "head_dim": shape.qk_head_dim,
        "v_head_dim": shape.v_head_dim,
        "hidden_size": shape.hidden_size,
        "kv_lora_rank": latent.kv_lora_rank if latent else None,
        "qk_rope_head_dim": latent.qk_rope_head_dim if latent else None,
        "sliding_window": spans[0] if spans else None,
        "max_position_embeddings": spec.max_position_embeddings,
    }


def _kind(spec: ModelSpec) -> str:
    """Return mha, mqa, gqa or mla; hybrid if only some caches are recurrent states; none if all caches are."""
    states = [isinstance(cache, RecurrentState) for cache in all_caches(spec)]
    if not any(states):
        return spec.attention.kind
    return "none" if all(states) else "hybrid"
