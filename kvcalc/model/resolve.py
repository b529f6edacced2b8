"""MODEL, as a person types it, becomes a ModelSpec: a preset's name, a path, or `-` for a config on stdin."""

from __future__ import annotations

import os

from kvcalc.errors import ModelError, UsageError
from kvcalc.model import presets
from kvcalc.model.files import read_stdin, read_text
from kvcalc.model.hf_config import read_config
from kvcalc.model.spec import ModelSpec

MAX_CONFIG_BYTES = 16 * 1024 * 1024


def load_model(reference: str) -> ModelSpec:
    """The model `reference` names.

    A preset's name or alias wins; `./NAME` always means a path. A path is a config.json, a folder holding one, or a
    preset file (.yaml). Raises UsageError (exit 2) for a file that is missing, unreadable or no JSON object, and
    ModelError (exit 3) for an unknown name or a config that is not understood.
    """
    if reference == "-":
        return read_config(_json_object(read_stdin(MAX_CONFIG_BYTES), "stdin"), "stdin", "stdin")
    if reference.startswith("hf:"):
        raise ModelError(f"{reference}: kvcalc does not fetch models", "download its config.json and give the path")
    if not _is_path(reference):
        preset = presets.find_preset(reference)
        if preset is not None:
            return spec_of(preset)
        if not os.path.exists(reference):
            raise presets.unknown_preset(reference)
    return _load_path(reference)


def spec_of(preset: presets.Preset) -> ModelSpec:
    """The ModelSpec of a preset; ModelError where its config is not understood."""
    return read_config(preset.config, preset.name, preset.source, strict=True)


def _is_path(reference: str) -> bool:
    looks = reference.startswith((".", "~", os.sep)) or reference.endswith((".json", ".yaml", ".yml", os.sep))
    # `meta-llama/Meta-Llama-3-70B` has a separator and is an alias; it is a path only where something lies there.
    return looks or (os.sep in reference and os.path.exists(reference))


def _load_path(path: str) -> ModelSpec:
    path = os.path.expanduser(path)
    if os.path.isdir(path):
        path = os.path.join(path, "config.json")
        if not os.path.isfile(path):
            raise UsageError(f"{path}: no such file", "give the path of a config.json, or of a folder that holds one")
    if path.endswith((".yaml", ".yml")):
        return spec_of(presets.load_preset(path))
    spec = read_config(_json_object(read_text(path, MAX_CONFIG_BYTES), path), _name_of(path), path)
    folder, file = os.path.split(path)
    return spec._replace(checkpoint=folder or os.curdir) if file == "config.json" else spec


def _name_of(path: str) -> str:
    """A config.json is called by its folder, any other file by its own name."""
    folder, file = os.path.split(os.path.abspath(path))
    return os.path.basename(folder) or file if file == "config.json" else os.path.splitext(file)[0]


def _json_object(text: str, name: str) -> dict[str, object]:
    import json

    try:
        # Infinity and NaN, which are no JSON, stand in published configs (time_step_limit): the reader refuses them
        # where they matter.
        data = json.loads(text)
    except RecursionError:
        raise UsageError(f"{name}: nested too deeply") from None
    except ValueError as error:
        raise UsageError(f"{name}: not JSON: {error}") from None
    if not isinstance(data, dict):
        raise UsageError(f"{name}: not a JSON object")
    return data
