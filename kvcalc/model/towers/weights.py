"""The parameters of a tower by its row in presets/types/tower_weights.yaml, which says what a row has."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from kvcalc.model.formulas import value_of
from kvcalc.model.reader import ConfigReader
from kvcalc.model.towers.blocks import Counted, added, integer, layers, num_layers, patches, projection, side
from kvcalc.model.towers.bodies import (
    body,
    body_width,
    clip,
    merger,
    patches_3d,
    q_former,
    siglip,
    timm,
    vit_layers,
    whisper,
)  # fmt: skip

PARTS = frozenset(("like", "tower", "model", "nested", "assume", "force", "where", "layers", "split", "whole"))
"""What a row may have."""

# The keys that are numbers of layers, which are limited.
_LAYERS = (
    "conf_num_hidden_layers depth encoder_layers num_blocks num_global_layers num_hidden_layers num_layers "
    "num_timestamp_prediction_layers resampler_depth"
).split()
_FUNCTIONS: Mapping[str, Any] = {
    "int": int, "max": max, "min": min, "linear": projection, "layers": layers, "vit": vit_layers,
    "log2": lambda number: number.bit_length() - 1,
}  # fmt: skip


def count(row: Mapping[str, Any], tower: ConfigReader, text: int, outer: ConfigReader) -> Counted:
    """The parameters of the tower `tower` in the model `outer`, whose language model has the width `text`."""
    tower = tower.with_defaults(row.get("assume", {})).with_values(row.get("force", {}))
    names: dict[str, Any] = {**_FUNCTIONS, **_functions_of(tower, outer), "text": text}
    sources = [(tower, row.get("tower", {})), (outer, row.get("model", {}))]
    sources += [(outer.nested(key), keys) for key, keys in row.get("nested", {}).items()]
    for config, keys in sources:
        for key, default in keys.items():
            spelled, _, stated = key.rpartition("=")
            names[spelled or stated.partition("|")[0].rstrip("[]#")] = _read(config, stated, default, names)
    for spelled, formula in row.get("where", {}).items():
        names[spelled] = value_of(formula, names)
    split = row.get("layers", [])
    parts = [value_of(formula, names) for formula in (split if isinstance(split, list) else [split])]
    return added(*parts, (value_of(row.get("split", 0), names), value_of(row["whole"], names)))


def _functions_of(tower: ConfigReader, outer: ConfigReader) -> dict[str, Any]:
    """The functions that read the tower's own config, or an object of the model's."""
    readers = (siglip, clip, body, body_width, patches_3d, merger, whisper, timm)
    return {
        "says": lambda key, word: tower.word(key) == word,
        "model_says": lambda key, word: outer.word(key) == word,
        "q_former": lambda key, *sizes: q_former(outer.nested(key), *sizes),
        "patches": lambda image, patch: patches(tower, image, patch)[0],
        **{reader.__name__: partial(reader, tower) for reader in readers},
    }


def _read(config: ConfigReader, key: str, default: Any, names: Mapping[str, Any]) -> Any:
    """The value under a key, or its default, which says what the value may be."""
    keys = key.split("|")
    if isinstance(default, str):
        default = value_of(default, names)
    if key.endswith("[]"):
        return side(config, key[:-2], default)
    if key.endswith("#"):
        return config.number_of(key[:-1], default)
    if default is None:
        return config.integer(*keys)
    if isinstance(default, bool):
        return config.boolean(key, default)
    if isinstance(default, float):
        return config.number(key, default)
    if isinstance(default, list):
        return config.pair(key, (default[0], default[1]))
    return (num_layers if keys[0] in _LAYERS else integer)(config, default, *keys)
