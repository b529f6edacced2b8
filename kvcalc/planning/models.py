"""The presets as documents: the list, and one of them."""

from __future__ import annotations

from typing import Any

from kvcalc.memory.dtypes import DTYPES, bytes_of
from kvcalc.model.describe import describe_model
from kvcalc.model.presets import Preset, all_presets, find_preset, unknown_preset
from kvcalc.model.resolve import spec_of
from kvcalc.schema import SCHEMA_VERSION


def list_models() -> dict[str, Any]:
    """Every preset with its attention, its layers and the bytes one token adds to an empty 16-bit cache."""
    return {"schema_version": SCHEMA_VERSION, "models": [_row(preset) for preset in all_presets()]}


def show_model(name: str) -> dict[str, Any]:
    """One preset as its file states it; ModelError (exit 3) with the nearest names for an unknown one."""
    preset = find_preset(name)
    if preset is None:
        raise unknown_preset(name)
    return {
        "schema_version": SCHEMA_VERSION,
        "name": preset.name,
        "aliases": list(preset.aliases),
        "source": preset.source,
        "date": preset.date,
        "note": preset.note,
        "config": preset.config,
    }


def _row(preset: Preset) -> dict[str, Any]:
    spec = spec_of(preset)
    model = describe_model(spec)
    elements = sum(sum(cache.token_rows()) * group.num_layers for group in spec.layers for cache in group.caches)
    return {
        "name": preset.name,
        "attention": model["attention"],
        "num_layers": model["num_layers"],
        "num_attention_heads": model["num_attention_heads"],
        "num_kv_heads": model["num_kv_heads"],
        "head_dim": model["head_dim"],
        "sliding_window": model["sliding_window"],
        "max_position_embeddings": model["max_position_embeddings"],
        "bytes_per_token_16_bit": bytes_of(elements, DTYPES["bf16"]),
        "aliases": list(preset.aliases),
        "source": preset.source,
        "date": preset.date,
    }
