"""Finds the model of a log: a preset with the name in the log, or the dimensions that llama.cpp prints.

A path in a log is never opened.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from kvcalc.errors import ModelError
from kvcalc.model.hf_config import read_config
from kvcalc.model.presets import all_presets
from kvcalc.model.resolve import find_published, spec_of
from kvcalc.model.spec import ModelSpec
from kvcalc.planning.logs import Log
from kvcalc.planning.logs.llama_cpp import GGUF_KEYS

# llama.cpp architectures in which every layer keeps K and V of every token, with the same width (src/models).
_PLAIN = "llama qwen2 qwen2moe qwen3 qwen3moe command-r stablelm starcoder2 codeshell olmo2".split()

# What publishers of quantized copies add to a model's name: formats of weights, which do not change the cache's layout.
_WEIGHTS = re.compile(
    r"(?:[-.](?:a?wq|awq-marlin|gptq|auto-?round|int[248]|fp[48]|nvfp4|mxfp4|w\d+a\d+|bf16|fp16|f16|f32|bnb|unsloth|"
    r"\dbit|gguf|mlx|quantized|dynamic|block|compressed-tensors|ud|imat|[if]?q\d(?:-[k01])?(?:-(?:xxs|xs|s|m|l|xl))?))+$"
)
_FILES = (".gguf", ".safetensors")

_HINT = "name it: --model PRESET (kvcalc models), or --model PATH of its config.json"


def model_of(log: Log, name: str) -> ModelSpec:
    """The model from the dimensions in the log if they are complete, else the preset that the log names.

    The name is compared with the names of presets and of their releases, in full or the last part only, ignoring case
    and spaces, and then without the suffixes of quantized copies. Raises ModelError (exit 3) if the log does not name a
    model or kvcalc does not know it.
    """
    asked = log.text("model")
    if (log.text("arch") or log.text("gguf_arch")) in _PLAIN:
        spec = _by_dimensions(log, asked or "model")
        if spec is not None:
            return spec
    if asked is None:
        raise ModelError(f"{name}: the log does not name its model", _HINT)
    wanted = list(_names_of(asked))
    for one in wanted:
        found = find_published(one)
        if found is not None:
            return found
    plain = set(map(_plain, wanted))
    for preset in all_presets():
        if not plain.isdisjoint(map(_plain, (preset.name, *preset.aliases))):
            return spec_of(preset)
    raise ModelError(f"{name}: the log names an unknown model, {asked[:80]!a}", _HINT)


def _names_of(asked: str) -> Iterator[str]:
    """The name as it is, its last part, and that part without the suffixes of quantized copies."""
    yield asked
    last = _plain(asked)
    for file in _FILES:
        last = last.removesuffix(file)
    yield last
    base = _WEIGHTS.sub("", last)
    if base != last:
        yield base


def _by_dimensions(log: Log, name: str) -> ModelSpec | None:
    """A plain decoder with the dimensions llama.cpp printed. None if one is missing or the model is not plain."""
    said = _dimensions(log)
    if said is None or said["n_swa"] or said["n_embd_head_k"] != said["n_embd_head_v"]:
        return None
    config: dict[str, object] = {
        "model_type": "generic", "num_hidden_layers": said["n_layer"], "num_attention_heads": said["n_head"],
        "num_key_value_heads": said["n_head_kv"], "hidden_size": said["n_embd"], "head_dim": said["n_embd_head_k"],
        "torch_dtype": "float16",
    }  # fmt: skip
    return read_config(config, name, "the log's dimensions")


def _dimensions(log: Log) -> dict[str, int] | None:
    """The dimensions in llama.cpp's own lines, or else in the file's keys. None if one is missing."""
    said = {key: int(text) for key in GGUF_KEYS if (text := log.text(key)) is not None}
    if len(said) == len(GGUF_KEYS):
        return said
    said = {key: int(text) for key in GGUF_KEYS if (text := log.text(f"gguf_{key}")) is not None}
    if not {"n_layer", "n_head", "n_embd"} <= said.keys() or not said["n_head"]:
        return None
    # The defaults of keys that a file may leave out (llama_model::load_hparams).
    width = said["n_embd"] // said["n_head"]
    return {"n_head_kv": said["n_head"], "n_embd_head_k": width, "n_embd_head_v": width, "n_swa": 0, **said}


def _plain(name: str) -> str:
    """The last part of a path or repository name, in lower case, with - for spaces and underscores.

    ModelScope's folders have ___ for a dot.
    """
    last = re.split(r"[/\\\\]", name.rstrip("/\\"))[-1].replace("___", ".")
    return last.casefold().replace(" ", "-").replace("_", "-")
