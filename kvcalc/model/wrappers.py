"""Models that wrap a language model (presets/types/wrappers.yaml): the config of the language model inside theirs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvcalc.errors import ModelError
from kvcalc.model.presets import shipped_table
from kvcalc.records import NamedTuple

# Published flat: the keys of the language model are on the same level as those of the vision tower, and Transformers'
# class reads them there. Configs that mlx-lm converts may be flat for other types, too.
_FLAT = ("dots3_note", "glm5_next", "qwen2_vl", "qwen2_5_vl")

# Keys that an inner config inherits from the outer one if it does not state them.
_INHERITED = ("torch_dtype", "dtype", "quantization_config", "tie_word_embeddings")


# Only the outer config decides whether the embedding is also the head. The inner config may state something else, which
# is ignored, because these language models exist only inside such wrappers. Source: Qwen3VLConfig and
# Qwen3VLMoeConfig, Transformers 5.23.0.
_TIED_OUTSIDE = ("qwen3_vl", "qwen3_vl_moe")


# Types under which language models were published first. Source: Exaone4_5Config, Transformers 5.23.0.
_RENAMED = {"exaone4_5_text": "exaone4"}


class Wrapper(NamedTuple):
    """A model around a language model.

    `inner` is the language model's type if its config does not state one; None means that the config must state it.
    `keys` is the path to the inner config. `forced`: the type is `inner`, whatever the inner config states.
    """

    inner: str | None
    keys: tuple[str, ...] = ("text_config",)
    forced: bool = False


_TABLE = shipped_table("wrappers")


def _wrapper(row: str | dict[str, Any] | None) -> Wrapper:
    if not isinstance(row, dict):
        return Wrapper(row)
    return Wrapper(row.get("inner"), tuple(row.get("keys", ("text_config",))), row.get("forced", False))


REMOTE_WRAPPERS = {outer: _wrapper(row) for outer, row in _TABLE["remote"].items()}
"""Those that are published with their own code."""

WRAPPERS = {**{outer: _wrapper(row) for outer, row in _TABLE["library"].items()}, **REMOTE_WRAPPERS}

WITHOUT_TOWERS = ("fuyu", "gemma4_unified")
"""Those whose language model reads patches of images itself."""

INNER_SIZES = {name: tuple(sizes) for name, sizes in _TABLE["sizes"].items()}
"""The default hidden_size, num_hidden_layers and num_attention_heads of configuration classes."""


def is_flat(config: Mapping[str, object], outer: str) -> bool:
    """Return whether the keys of the language model are on the same level as the wrapper's own."""
    wrapper = WRAPPERS.get(outer)
    return bool(
        wrapper and wrapper.inner and config.get(wrapper.keys[0]) is None and config.get("num_hidden_layers")
    )  # fmt: skip


# The language models of MiniCPM-V and MiniCPM-o by version. Source: _SUPPORT_VERSION of minicpmv.py and of minicpmo.py,
# model_executor/models, vLLM 0.33.0; without a version, get_version_by_config.
_MINICPM = {"2.0": "minicpm", "2.5": "llama", "2.6": "qwen2", "4.0": "llama", "4.5": "qwen3"}


def _minicpm(config: Mapping[str, object], name: str) -> str:
    """The type of the language model in a flat config of MiniCPM-V or MiniCPM-o."""
    oldest = "2.0" if (config.get("hidden_size"), config.get("query_num")) == (2304, 64) else "2.5"
    version = config.get("version", oldest)
    language_model = _MINICPM.get(str(version))
    if language_model is None:
        raise ModelError(f"{name}: version {str(version)[:40]!r} of MiniCPM-V is not known", ", ".join(_MINICPM))
    return language_model


def without_flat_keys(config: Mapping[str, object], outer: str) -> Mapping[str, object] | None:
    """Return the wrapper that Transformers' class makes of a flat config; None if that reads the keys, too.

    Most classes take a missing inner config as the defaults of its class, and ignore the other keys.
    """
    if not is_flat(config, outer) or outer in _FLAT or outer in REMOTE_WRAPPERS:
        return None
    return around({}, {"model_type": outer, **{key: config[key] for key in _INHERITED if key in config}})


def around(inner: Mapping[str, object], outer: Mapping[str, object]) -> dict[str, object]:
    """Return the config of a wrapper: `outer`, with the config of the language model where its type has it."""
    for key in reversed(WRAPPERS[str(outer["model_type"])].keys):
        inner = {key: inner}
    return {**outer, **inner}


def language_model(
    config: Mapping[str, object], outer: str, name: str, *, reads_outer: bool
) -> tuple[Mapping[str, object], str]:
    """Return the config of the language model inside a config of type `outer`, and its type.

    If `outer` is not a wrapper, both are returned unchanged. `reads_outer`: `outer` is also the type of a language
    model, which is published flat. Raises ModelError (exit 3) if the inner config is missing, is not an object, or has
    no type.
    """
    wrapper = WRAPPERS.get(outer)
    if wrapper is None:
        return config, outer
    if config.get(wrapper.keys[0]) is None and reads_outer:
        return config, outer
    if is_flat(config, outer):
        chosen = _minicpm(config, name) if outer in ("minicpmo", "minicpmv") else str(wrapper.inner)
        return {**config, "model_type": chosen}, chosen
    merged = config
    own: Mapping[str, object] = {}
    for key in wrapper.keys:
        inner = merged.get(key)
        if inner is None:
            raise ModelError(f"{name}: {key} is missing: {outer} has its language model there")
        if not isinstance(inner, Mapping):
            raise ModelError(f"{name}: {key} must be an object")
        own = inner
        merged = {**{inherited: merged[inherited] for inherited in _INHERITED if inherited in merged}, **inner}
    stated = merged.get("model_type")
    model_type = wrapper.inner if wrapper.forced or stated in (None, "", outer) else stated
    model_type = _RENAMED.get(str(model_type), model_type)
    if not isinstance(model_type, str):
        raise ModelError(f"{name}: {wrapper.keys[-1]}.model_type is missing or not a string")
    sizes = INNER_SIZES.get(model_type)
    defaults = dict(zip(("hidden_size", "num_hidden_layers", "num_attention_heads"), sizes)) if sizes else {}
    tied: dict[str, object] = {}
    if outer in _TIED_OUTSIDE and own.get("tie_word_embeddings") is not None:
        tied = {"tie_word_embeddings": config.get("tie_word_embeddings", False)}
    return {**defaults, **merged, **tied, "model_type": model_type}, model_type
