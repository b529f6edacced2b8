"""A config mapping, under the published config.json's own key names, becomes a ModelSpec.

One way in for presets, config.json files and flags alike. The model_type picks the family's reader; an unknown type is
refused, and so is an unknown key of a known type whose name says that it changes the cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module

from kvcalc.errors import ModelError, nearest
from kvcalc.model.reader import ConfigReader
from kvcalc.model.spec import ModelSpec

# model_type -> module in kvcalc.model.families. Modules are imported when asked for: start-up pays for one.
FAMILIES: dict[str, str] = {
    "bert": "bert",
    "deepseek_v2": "deepseek",
    "deepseek_v3": "deepseek",
    "falcon": "falcon",
    "generic": "decoder",
    "gpt2": "gpt2",
    "llama": "decoder",
    "mistral": "decoder",
}

# Keys which say nothing of the cache, whatever the family. Of others, a preset holds only those in the family's KEYS.
COMMON_KEYS = frozenset(
    (
        "model_type torch_dtype dtype quantization_config vocab_size intermediate_size hidden_act "
        "tie_word_embeddings max_position_embeddings"
    ).split()
)

# Names under which published configs have put facts about the cache. A key like these which the family's reader does
# not know, with a value that is not null, false or empty, may change the bytes: better no answer than a wrong one.
# Plain substrings: a regular expression would be compiled at every start.
_CACHE_LIKE = (
    "window lora_rank head_dim num_kv num_key_v kv_head kv_shared shared_kv kv_share kv_channel layer_types "
    "attention_types attention_layers attention_chunk attn_layer index_ sparse compress multi_query _conv_ "
    "conv_ ssm state_size mamba linear_ block_configs cross_attention hybrid"
).split()


def read_config(config: Mapping[str, object], name: str, source: str, *, strict: bool = False) -> ModelSpec:
    """The ModelSpec of a config mapping. `name` and `source` say where it came from.

    `strict` refuses every key the family does not know, cache or not: presets hold facts, so a misspelt key is a lost
    one. Raises ModelError (exit 3) for an unknown model_type, a missing fact, or a key which may change the cache.
    """
    reader = ConfigReader(config, name, source)
    model_type = reader.text("model_type")
    if model_type not in FAMILIES:
        hint = nearest(model_type, FAMILIES) or f"known types: {', '.join(sorted(FAMILIES))}"
        raise ModelError(f"{name}: model_type {model_type!r} is not known", hint)
    family = import_module(f"kvcalc.model.families.{FAMILIES[model_type]}")
    _refuse_unknown_keys(config, family.KEYS | COMMON_KEYS, name, model_type, strict)
    spec: ModelSpec = family.read(reader, model_type)
    return spec


def _refuse_unknown_keys(
    config: Mapping[str, object], known: frozenset[str], name: str, model_type: str, strict: bool
) -> None:
    for key, value in config.items():
        if key in known:
            continue
        if strict:
            raise ModelError(f"{name}: {key!r} is not a key of model_type {model_type}", nearest(key, known))
        if value not in (None, False, "", [], {}) and any(part in key for part in _CACHE_LIKE):
            hint = "kvcalc refuses rather than guess; remove the key if it is known to change nothing"
            raise ModelError(f"{name}: {key!r} may change the cache and {model_type}'s reader does not know it", hint)
