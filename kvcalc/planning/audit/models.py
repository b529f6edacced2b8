"""Which model a log is of: a preset by the name the log gives it, or by the dimensions llama.cpp prints.

A path in a log is never opened.
"""

from __future__ import annotations

from kvcalc.errors import ModelError
from kvcalc.model.hf_config import read_config
from kvcalc.model.presets import all_presets, find_preset
from kvcalc.model.resolve import spec_of
from kvcalc.model.spec import ModelSpec
from kvcalc.planning.logs import Log

# Architectures of llama.cpp of which every layer keeps K and V of every token, all of one width (src/models).
_PLAIN = "llama qwen2 qwen2moe qwen3 qwen3moe command-r stablelm starcoder2 codeshell olmo2".split()

_HINT = "name it: --model PRESET (kvcalc models), or --model PATH of its config.json"


def model_of(log: Log, name: str) -> ModelSpec:
    """The model of the dimensions in the log, where they say all; else the preset the log names, by name or alias, or
    by the last part of either: letter case and blanks aside.

    Raises ModelError (exit 3) where it names none or one kvcalc does not know.
    """
    asked = log.text("model")
    if log.text("arch") in _PLAIN:
        spec = _by_dimensions(log, asked or "model")
        if spec is not None:
            return spec
    if asked is None:
        raise ModelError(f"{name}: the log does not name its model", _HINT)
    found = find_preset(asked)
    if found is not None:
        return spec_of(found)
    wanted = _plain(asked)
    for preset in all_presets():
        if wanted in map(_plain, (preset.name, *preset.aliases)):
            return spec_of(preset)
    raise ModelError(f"{name}: the log's model {asked[:80]!a} is not known", _HINT)


def _by_dimensions(log: Log, name: str) -> ModelSpec | None:
    """A plain decoder of the dimensions llama.cpp read from its file; None where one is missing or tells of more."""
    keys = ("n_layer", "n_head", "n_head_kv", "n_embd", "n_embd_head_k", "n_embd_head_v", "n_swa")
    said = {key: int(text) for key in keys if (text := log.text(key)) is not None}
    if len(said) < len(keys) or said["n_swa"] or said["n_embd_head_k"] != said["n_embd_head_v"]:
        return None
    config: dict[str, object] = {
        "model_type": "generic", "num_hidden_layers": said["n_layer"], "num_attention_heads": said["n_head"],
        "num_key_value_heads": said["n_head_kv"], "hidden_size": said["n_embd"], "head_dim": said["n_embd_head_k"],
        "torch_dtype": "float16",
    }  # fmt: skip
    return read_config(config, name, "the log's dimensions")


def _plain(name: str) -> str:
    """The last part of a path or a repository's name, with - for blanks and underlines."""
    last = name.rstrip("/").rpartition("/")[2]
    return last.casefold().replace(" ", "-").replace("_", "-")
