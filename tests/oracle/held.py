"""The bytes in Transformers' cache after one prefill of a small model, per layer: elements times size.

This runs on the meta device, or on the CPU if a model's code reads values. These models are tiny.
"""

from __future__ import annotations

import copy
import inspect
from contextlib import suppress
from importlib import import_module
from typing import Any


def held_by_layer(model_type: str, config: dict[str, Any], tokens: int, *, static: bool = False) -> list[int]:
    """Bytes of the cache's tensors in every layer, in bf16, after `tokens` tokens. A static cache has this length."""
    try:
        return _prefill("meta", model_type, config, tokens, static)
    except (NotImplementedError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "meta" not in str(error).lower():
            raise
        return _prefill("cpu", model_type, config, tokens, static)


def _prefill(device: str, model_type: str, config: dict[str, Any], tokens: int, static: bool) -> list[int]:
    import torch
    from transformers import AutoConfig, DynamicCache, StaticCache

    built = AutoConfig.for_model(model_type, **copy.deepcopy(config))
    built._attn_implementation = "eager"
    with torch.device(device):
        model = _build(built, torch.bfloat16).eval()
        cache: Any = (
            StaticCache(config=model.config, max_cache_len=tokens) if static else DynamicCache(config=model.config)
        )
        with torch.no_grad():
            model(input_ids=torch.zeros(1, tokens, dtype=torch.long), past_key_values=cache, use_cache=True)
    return [tensor_bytes(layer) for layer in cache.layers]


def _build(config: Any, dtype: Any) -> Any:
    """The model that generates text for a config. Language models inside a wrapper have no automatic class."""
    from transformers import AutoModel, AutoModelForCausalLM

    for automatic in (AutoModelForCausalLM, AutoModel):
        # The mapping may name a class that the release does not export.
        with suppress(ValueError):
            if type(config) in automatic._model_mapping:
                return automatic.from_config(config, dtype=dtype)
    module = import_module(type(config).__module__.replace("configuration_", "modeling_"))
    classes: list[tuple[str, Any]] = inspect.getmembers(module, inspect.isclass)
    for name, model in classes:
        reads = getattr(model, "config_class", None)
        if reads is type(config) and name.endswith(("TextModel", "LanguageModel", "ForCausalLM")):
            return model._from_config(config, dtype=dtype)
    for name, model in classes:
        if name.endswith(("TextModel", "LanguageModel")):
            return model._from_config(config, dtype=dtype)
    raise LookupError(f"no model of {type(config).__name__}")


def tensor_bytes(layer: Any) -> int:
    import torch

    # Private tensors and single numbers, which count tokens, are not part of the cache.
    kept = [value for name, value in vars(layer).items() if not name.startswith("_")]
    tensors = [t for value in kept for t in (value.values() if isinstance(value, dict) else [value])]
    return sum(t.numel() * t.element_size() for t in tensors if isinstance(t, torch.Tensor) and t.dim())
