"""Read a config mapping, which uses the keys of the published config.json, into a ModelSpec.

Presets, config.json files and flags all take this path. The model_type selects the family's reader. An unknown type is
an error, and so is an unknown key of a known type if its name suggests that it changes the cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvcalc.errors import ModelError, nearest
from kvcalc.model.reader import TOWER_KEYS, ConfigReader
from kvcalc.model.spec import ModelSpec, cache_runs, has_cross_attention
from kvcalc.model.tensors import HEAD, Block, Weight, other
from kvcalc.model.type_tables import (
    COMMON_KEYS,
    FAMILIES,
    REFUSED,
    REMOTE_FAMILIES,
    ignored_by_transformers,
    keys_of,
    module_of,
    reader_of,
)

TOWERS = frozenset(("thinker_config", *TOWER_KEYS["vision"], *TOWER_KEYS["audio"]))
"""The keys that describe towers. Omni models have the configs of their towers inside thinker_config."""

# Their code has the dimensions of the vision tower.
_WITH_HIDDEN_TOWERS = ("molmo",)

# Parts of key names under which published configs state facts about the cache. If a family's reader does not know such
# a key and its value is not null, false or empty, the key may change the bytes, so kvcalc reports an error rather than
# a wrong figure. These are plain substrings because a regular expression would be compiled at every start.
_CACHE_LIKE = (
    "window lora_rank head_dim num_kv num_key_v kv_head kv_shared shared_kv kv_share kv_channel layer_types "
    "attention_types attention_layers attention_chunk attn_layer index_ sparse compress multi_query _conv_ "
    "conv_ ssm state_size mamba linear_ block_configs cross_attention hybrid use_cla use_mla per_layer_config "
    "local_attention global_attn"
).split()


# Engines that read a config through Transformers' class (AutoConfig) ignore what it ignores: keys beside text_config
# that belong into it, and Gemma 4's sliding_window_pattern. They read MiMo's layers themselves.
_READING_CONFIGS = "config"


def read_config(config: Mapping[str, object], name: str, source: str, *, strict: bool = False) -> ModelSpec:
    """Return the ModelSpec for a config mapping. `name` and `source` say where the mapping came from.

    `strict` refuses every key that the family does not know, even one that cannot change the cache: in a preset, a
    misspelled key is a lost fact. Raises ModelError (exit 3) for an unknown model_type, a missing fact, or an unknown
    key that may change the cache.
    """
    spec = _read_any(config, name, source, strict)
    if "architectures" in config:
        spec = with_class(spec, config)
    has_towers = not TOWERS.isdisjoint(config) or config.get("model_type") in _WITH_HIDDEN_TOWERS
    return spec._replace(multimodal=config, has_unknown_tower=False) if has_towers else spec


def _read_any(config: Mapping[str, object], name: str, source: str, strict: bool) -> ModelSpec:
    """The model of a config of any type: a language model's, or that of a wrapper around one."""
    outer = ConfigReader(config, name, source).text("model_type")
    module = _family_of(outer)
    if outer in FAMILIES or (module is not None and not is_remote(outer)):
        return _read(config, outer, str(module), name, source, strict)
    # Only a few models need this module. Importing it here keeps start-up fast for all others.
    from kvcalc.model.wrappers import REMOTE_WRAPPERS, WITHOUT_TOWERS, WRAPPERS, language_model, without_flat_keys

    whole = without_flat_keys(config, outer) if module is None or outer == "llava" else None
    config, model_type = language_model(config, outer, name, reads_outer=module is not None)
    module = _family_of(model_type)
    if module is None:
        if outer in REFUSED:
            raise ModelError(f"{name}: model_type {outer}: {REFUSED[outer]}")
        known = (*known_types(), *WRAPPERS)
        hint = nearest(model_type, known) or (
            f"{len(known)} types are known; for a plain decoder, set model_type to generic"
        )
        raise ModelError(f"{name}: model_type {model_type!r} is not known", hint)
    spec = _read(config, model_type, module, name, source, strict)
    # The encoder of an encoder-decoder is counted with its language model.
    is_around = outer in WRAPPERS and outer not in WITHOUT_TOWERS and not has_cross_attention(spec)
    spec = spec._replace(has_unknown_tower=is_around)
    if whole is not None:
        spec = with_transformers_reading(spec, read_config(whole, name, source))
        spec = spec._replace(with_its_classes=(*spec.with_its_classes, _READING_CONFIGS))
        if spec.as_transformers is None:
            return spec
        # What reads such a config decides which model it is, so nothing can confirm the weights.
        reason = f"the weights of a flat {outer} config are not counted: Transformers builds another model from it, "
        reason += "which --engine transformers counts"
        return spec._replace(around=None, weights_reason=reason)
    return spec._replace(in_transformers=False) if is_remote(model_type) or outer in REMOTE_WRAPPERS else spec


def known_types() -> list[str]:
    """Return every supported model_type, without wrappers."""
    from kvcalc.model.families.decoder_table import model_types

    return [*FAMILIES, *REMOTE_FAMILIES, *model_types()]


def is_remote(model_type: str) -> bool:
    """Return whether models of this type are published with their own code."""
    if model_type in FAMILIES or model_type in REMOTE_FAMILIES:
        return model_type in REMOTE_FAMILIES
    from kvcalc.model.families.decoder_table import model_types, row

    return model_type in model_types() and bool(row(model_type).get("is_remote"))


def _family_of(model_type: str) -> str | None:
    module = FAMILIES.get(model_type) or REMOTE_FAMILIES.get(model_type)
    if module is None:
        from kvcalc.model.families.decoder_table import model_types

        module = "decoder" if model_type in model_types() else None
    return module


def _read(
    config: Mapping[str, object], model_type: str, family: str, name: str, source: str, strict: bool
) -> ModelSpec:
    module, read = module_of(family), reader_of(family)
    keys = module.known_keys(model_type) if hasattr(module, "known_keys") else keys_of(family)
    _refuse_unknown_keys(config, keys | COMMON_KEYS, name, model_type, strict)
    spec: ModelSpec = read(ConfigReader(config, name, source), model_type)
    ignored = ignored_by_transformers(family)
    if not config.keys().isdisjoint(ignored):
        seen = {key: value for key, value in config.items() if key not in ignored}
        spec = with_transformers_reading(spec, read(ConfigReader(seen, name, source), model_type))
        if family == "gemma4":
            spec = spec._replace(with_its_classes=(*spec.with_its_classes, _READING_CONFIGS))
    return spec


def with_transformers_reading(spec: ModelSpec, other: ModelSpec) -> ModelSpec:
    """Return `spec` with the model that Transformers' class makes of the same config, if its caches differ."""
    if [*map(repr, cache_runs(spec))] == [*map(repr, cache_runs(other))]:
        return spec
    remark = "Transformers' class does not read all keys of this config; this is the model that it builds"
    return spec._replace(as_transformers=other._replace(remarks=(*other.remarks, remark)))


def _refuse_unknown_keys(
    config: Mapping[str, object], known: frozenset[str], name: str, model_type: str, strict: bool
) -> None:
    for key, value in config.items():
        if key in known:
            continue
        if strict:
            raise ModelError(f"{name}: {key!r} is not a key of model_type {model_type}", nearest(key, known))
        if value not in (None, False, "", [], {}) and any(part in key for part in _CACHE_LIKE):
            hint = "remove the key if you are sure that it does not change the cache"
            raise ModelError(
                f"{name}: {key!r} may change the cache, and kvcalc does not know it for {model_type}", hint
            )


# What the name of a checkpoint's class says: the head that it has instead of the language model's output matrix.
#
# Source: GenericForSequenceClassification, GenericForTokenClassification and GenericForQuestionAnswering
# (modeling_layers.py) of Transformers 5.23.0, and qwen2_rm.py, internlm2.py and adapters.py of vLLM 0.33.0, whose
# pooling models have no output matrix either.

# The name of a language model's class may end in Model, as that of its body does.
_LANGUAGE_MODELS = ("LMHeadModel", "ChatModel", "ChatGLMModel")
_LABELS = 2  # PreTrainedConfig.num_labels of Transformers


def with_class(spec: ModelSpec, config: Mapping[str, object]) -> ModelSpec:
    """`spec` as the class that `architectures` of its published config names first.

    A class whose name has Bidirectional reads later tokens too (LlamaBidirectionalModel,
    VoyageQwen3BidirectionalEmbedModel: model_executor/models/config.py, vLLM 0.33.0).
    """
    stated = config.get("architectures")
    name = stated[0] if isinstance(stated, Sequence) and stated else None
    if not isinstance(name, str):
        return spec
    if "Bidirectional" in name:
        spec = spec._replace(is_bidirectional=True)
    is_body = config.get("model_type") == spec.model_type and name.endswith(("Model", "EmbedModel"))
    head = _head(name, is_body, _labels(config), spec.attention.hidden_size or 0)
    if head is None or spec.around is None or spec.is_encoder or has_cross_attention(spec):
        return spec
    blocks = [
        Block(block.prefix, block.numbers, tuple(weight for weight in block.weights if weight.role != HEAD))
        for block in spec.around.blocks
    ]
    # llama.cpp takes the embedding as the output matrix if a file has none.
    around = spec.around._replace(tied=not head, blocks=(*blocks, Block("", (0,), head)))
    return spec._replace(around=around)


def _head(name: str, is_body: bool, labels: int, width: int) -> tuple[Weight, ...] | None:
    """The weights of the class's head; empty if it has none, and None if it has the language model's."""
    if name.endswith("ForSequenceClassification"):
        return (other("score", labels, width),)
    if name.endswith("ForTokenClassification"):
        return (other("score", labels, width, bias=labels),)
    if name.endswith("ForQuestionAnswering"):
        return (other("qa_outputs", 2, width, bias=2),)
    if name in ("Qwen2ForRewardModel", "Qwen2ForProcessRewardModel"):
        rows = 1 if name == "Qwen2ForRewardModel" else 2
        return (other("score.0", width, width, bias=width), other("score.2", rows, width, bias=rows))
    if name == "InternLM2ForRewardModel":
        return (other("v_head", 1, width),)
    return () if is_body and not name.endswith((*_LANGUAGE_MODELS, "RewardModel")) else None


def _labels(config: Mapping[str, object]) -> int:
    """The number of labels. `id2label` has the name of each, also if `num_labels` says something else."""
    stated, names = config.get("num_labels"), config.get("id2label")
    if isinstance(names, Mapping):
        return len(names)
    return stated if isinstance(stated, int) and stated > 0 else _LABELS
