"""Finds the model of a log: the dimensions that the engine prints, or a preset with the name in the log.

A path in a log is never opened.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from kvcalc.engines import log_reader
from kvcalc.engines.log_lines import Log
from kvcalc.errors import ModelError
from kvcalc.model.presets import all_presets
from kvcalc.model.resolve import find_published, spec_of
from kvcalc.model.spec import ModelSpec

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
    spec = log_reader(log.engine).model(log, asked or "model")
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


def _plain(name: str) -> str:
    """The last part of a path or repository name, in lower case, with - for spaces and underscores.

    ModelScope's folders have ___ for a dot.
    """
    last = re.split(r"[/\\\\]", name.rstrip("/\\"))[-1].replace("___", ".")
    return last.casefold().replace(" ", "-").replace("_", "-")
