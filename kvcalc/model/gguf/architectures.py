"""The architectures of GGUF files, with the model_type of each and the facts that its metadata leave out.

Source: load_arch_hparams in src/models and the tables in src/llama-arch.cpp of llama.cpp, in the version that
llama-cpp-python 0.3.36 ships.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from kvcalc.model.families.decoder_table import architectures
from kvcalc.model.formulas import value_of
from kvcalc.model.gguf import layers
from kvcalc.model.gguf.keys import Facts
from kvcalc.model.gguf.layers import Config
from kvcalc.model.type_tables import made, row_of, rows_of

Build = Callable[[Facts, Config], Config]

# Architectures that have only the common metadata: plain decoders, named in the rows of the table, and encoders.
PLAIN: dict[str, str] = {
    **architectures(),
    "bert": "bert", "jina-bert-v2": "bert", "jina-bert-v3": "xlm-roberta", "nomic-bert": "nomic_bert",
    "nomic-bert-moe": "nomic_bert",
}  # fmt: skip

ENCODERS = ("bert", "jina-bert-v2", "jina-bert-v3", "nomic-bert", "nomic-bert-moe")

# Types whose readers compute the width of a head and have no key for it.
DERIVED_HEADS = ("dbrx", "falcon", "gpt2", "gpt_bigcode", "jais", "mpt", "qwen")
# Types in which every query head has its own K and V. There is no key for this.
OWN_HEADS = ("bert", "gpt2", "nomic_bert", "xlm-roberta")


def falcon(facts: Facts, config: Config) -> Config:
    """Falcon's keys for heads that share K and V."""
    heads = config.pop("num_key_value_heads")
    grouped = heads not in (1, config["num_attention_heads"])
    return {**config, "new_decoder_architecture": grouped, "num_kv_heads": heads, "multi_query": heads == 1}


def windowed(
    facts: Facts, config: Config, *, step: int | None, full_first: bool = False, window: int | None = None,
    optional: bool = False,
) -> Config:  # fmt: skip
    """Windows in all layers except one in every `step`.

    `window` is the default size if the file may leave it out. `optional`: without a size, the model has no windows.
    """
    size = facts.optional("attention.sliding_window")
    if size is None and not optional:
        size = window or facts.integer("attention.sliding_window")
    flags = layers.sliding(facts, step, full_first=full_first) if size else [False] * facts.num_layers
    return {**config, "sliding_window": size or 0, "layer_types": layers.layer_kinds(flags)}


def olmo2(facts: Facts, config: Config) -> Config:
    """With a window the file is OLMo 3, which is OLMo 2 with windows."""
    if facts.optional("attention.sliding_window"):
        return {**windowed(facts, config, step=4), "model_type": "olmo3"}
    return config


def exaone4(facts: Facts, config: Config) -> Config:
    """In llama.cpp, only the 64-layer model (32B) has windows: 4,096 tokens if the file does not state the size."""
    if facts.num_layers == 64:
        return windowed(facts, config, step=4, window=4096)
    if facts.optional("attention.sliding_window"):
        raise facts.error("exaone4.attention.sliding_window: supported only for the 64-layer model")
    return {**config, "sliding_window": 0, "layer_types": ["full_attention"] * facts.num_layers}


# Architectures whose builders read the number of KV heads of each layer.
BY_LAYER = (
    "deci gemma4 granitehybrid jamba kimi-k3 kimi-linear lfm2 lfm2moe mamba mamba2 mimo2 nemotron_h nemotron_h_moe "
    "openelm rwkv6 step35"
).split()


def builder_of(arch: str) -> tuple[str, Build | None]:
    """The model_type of an architecture, and the function that adds to the common facts, if there is one."""
    row = row_of("architectures", arch)
    if not row:
        return PLAIN[arch], None
    build: Build | None = made("gguf", row["build"], row.get("with")) if "build" in row else None
    return row["type"], partial(_with_keys, build, row) if "keys" in row else build


def _with_keys(build: Build | None, row: Mapping[str, Any], facts: Facts, config: Config) -> Config:
    """The facts with the `keys` of a row, whose formulas may name the facts and call `functions_of` them."""
    config = config if build is None else build(facts, config)
    kept = config if "only" not in row else {key: config[key] for key in row["only"].split()}
    names = {**functions_of(facts), **config}
    for formula in row.get("check", ()):
        value_of(formula, names)
    return {**kept, **_values(row["keys"], names)}


def functions_of(facts: Facts) -> dict[str, Any]:
    """What formulas may call, and the number of layers."""
    heads = partial(facts.by_layer, "attention.head_count_kv")

    def leading(dense: object, rest: object) -> list[object]:
        number = facts.optional("leading_dense_block_count", most=facts.num_layers) or 0
        return [dense] * number + [rest] * (facts.num_layers - number)

    def equal(one: object, other: object, text: str) -> None:
        if one != other:
            raise facts.error(text)

    return {
        "integer": facts.integer, "by_layer": facts.by_layer, "same_in_all": facts.same_in_all,
        "num_layers": facts.num_layers, "num_blocks": facts.num_blocks,
        "optional": lambda key, default=None: facts.optional(key) or default, "equal": equal,
        "flag": lambda key: facts.boolean(key, default=False),
        "otherwise": lambda key, value: facts.optional(key, least=1) or value,
        "listed": lambda key: listed if isinstance(listed := facts.get(key), list) else [],
        "in_all": lambda kind: [kind] * facts.num_layers,
        "leading": leading, "kv_heads": lambda: layers.attending(facts)[0],
        "kinds": lambda attends, other: [attends if number else other for number in heads()],
        "states": partial(layers.layer_types_of_states, facts), "ssm": partial(layers.state_size, facts),
        "windows": partial(layers.windows, facts), "count_of": partial(layers.count_of, facts),
    }  # fmt: skip


def _values(formulas: Mapping[str, Any], names: Mapping[str, Any]) -> Config:
    return {
        key: _values(formula, names) if isinstance(formula, dict) else value_of(formula, names)
        for key, formula in formulas.items()
    }


def known_architectures() -> dict[str, str]:
    """Return every supported architecture with the model_type it is read as."""
    return {**PLAIN, **{arch: row["type"] for arch, row in rows_of("architectures").items()}}
