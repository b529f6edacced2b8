"""Damaged configs of language models and of towers give an answer or a clean error, and never a crash.

The keys are those that occur in kvcalc's own readers, so that a case changes what is read. `pytest -m fuzz --cases
1000000 --fuzz-seed 7` is a long run with other inputs; a failure prints its config.
"""

from __future__ import annotations

import ast
import copy
import re
from functools import cache
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pytest

import kvcalc
from kvcalc.errors import KvcalcError
from kvcalc.model.presets import all_presets
from kvcalc.model.reader import TOWER_KEYS
from kvcalc.model.towers import towers_of
from kvcalc.model.towers.images import image_tokens
from kvcalc.model.towers.rules import spelled_out
from kvcalc.model.type_tables import FAMILIES, REMOTE_FAMILIES, row_of, rows_of
from kvcalc.model.wrappers import WRAPPERS
from tests.conftest import ROOT
from tests.model.test_hybrid_families import DELTA, MLA, NEMOTRON, SMALL
from tests.model.test_state_families import GQA, JAMBA, KDA, T5_BASE, V4_FLASH, WHISPER

pytestmark = pytest.mark.fuzz

MODEL = ROOT / "kvcalc" / "model"
CONFIGS: list[dict[str, Any]] = [
    {"model_type": "gemma3_text", **SMALL, "sliding_window": 5},
    {"model_type": "gemma4_text", **SMALL, "sliding_window": 5, "num_kv_shared_layers": 0},
    {"model_type": "qwen2", **SMALL, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2},
    {"model_type": "llama4_text", **SMALL, "attention_chunk_size": 5},
    {"model_type": "glm_moe_dsa", **SMALL, **MLA, "index_topk_pattern": "FSFFSS"},
    {"model_type": "minicpm3", **SMALL, **MLA},
    {"model_type": "qwen3_next", **SMALL, **DELTA, "full_attention_interval": 4},
    {"model_type": "gpt_neo", **SMALL, "num_layers": 6, "num_heads": 4, "attention_types": [[["global", "local"], 3]]},
    {"model_type": "mpt", "n_layers": 6, "n_heads": 4, "d_model": 32, "attn_config": {"kv_n_heads": 4}},
    {"model_type": "dbrx", "n_layers": 6, "n_heads": 4, "d_model": 32, "attn_config": {"kv_n_heads": 2}},
    {"model_type": "deci", **SMALL, "num_key_value_heads_per_layer": [2] * 6},
    {"model_type": "nemotron-nas", **SMALL, "block_configs": [{"attention": {"n_heads_in_group": 2}}] * 6},
    {
        "model_type": "openelm",
        "num_transformer_layers": 2,
        "head_dim": 8,
        "model_dim": 32,
        "num_query_heads": [4, 4],
        "num_kv_heads": [2, 2],
    },
    {"model_type": "chatglm", **SMALL, "num_layers": 6, "head_dim": None, "num_key_value_heads": None},
    {"model_type": "smollm3", **SMALL, "use_sliding_window": True, "sliding_window": 5},
    {"model_type": "cohere2_moe", **SMALL, "sliding_window": 5, "first_k_dense_replace": 2},
    {"model_type": "step3p5", **SMALL, "sliding_window": 5, "attention_other_setting": {"num_attention_groups": 2}},
    {"model_type": "nemotron_h", **SMALL, **NEMOTRON, "hybrid_override_pattern": "M-*EM*"},
    {"model_type": "jamba", **JAMBA},
    {"model_type": "deepseek_v4", **V4_FLASH},
    {"model_type": "whisper", **WHISPER},
    {"model_type": "t5", **T5_BASE},
    {"model_type": "kimi_linear", **KDA, "layer_types": ["linear_attention", "full_attention"] * 2},
    {"model_type": "minimax_m3", **GQA, "sparse_attention_config": {"sparse_attention_freq": [0, 1, 1, 1, 1, 1]}},
    {"model_type": "zamba2", **GQA, "layers_block_type": ["mamba", "hybrid"] * 3, "n_mamba_heads": 4},
    {"model_type": "lfm2", **GQA, "full_attn_idxs": [1, 4]},
    {"model_type": "mamba", "hidden_size": 32, "num_hidden_layers": 2},
    {"model_type": "recurrent_gemma", **GQA},
    {"model_type": "mllama_text_model", **GQA},
    *(
        {"model_type": outer, "text_config": {**SMALL, **MLA, **DELTA}}
        for outer, wrapper in WRAPPERS.items()
        if wrapper.keys == ("text_config",)
    ),
]
ODD: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 3, 7, 14, 10**9, 2**63, 10**30, 0.5, -0.5, 1e308, float("inf"), float("nan"), "",
    "a", "auto", "full", "2/3", "\0", [], [1], [None], [2, 2], [2, [2]], [[], 0], [""], [-1], [0, 0], [1, 2, 3],
    [[336, 336]], [[1, 2, 3]], [float("nan")], [10**30] * 2, [[[1]]], [[]], ["full_attention"] * 6,
    ["sliding_attention"] * 6, [0, 1] * 3, [4, 128] * 3, {}, {"a": 1},
)  # fmt: skip


def words(path: Path) -> set[str]:
    """The strings in a module that may be keys of a config."""
    strings = (node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant))
    return {text for text in strings if isinstance(text, str) and text.isidentifier()}


presets, types = cache(all_presets), cache(lambda: sorted({*FAMILIES, *REMOTE_FAMILIES}))


def is_clean(error: KvcalcError) -> bool:
    """Whether a refusal is one line, with the exit code of a wrong value or of a model that is not understood."""
    return error.exit_code in (2, 3) and bool(error.message) and "\n" not in error.message


@cache
def keys_of_families() -> list[str]:
    modules = [*(MODEL / "families").glob("*.py"), MODEL / "reader.py", MODEL / "experts.py", MODEL / "hf_config.py"]
    return sorted({key for path in modules for key in words(path)} | {key for config in CONFIGS for key in config})


@cache
def keys_of_towers(rule: str) -> list[str]:
    """The keys that a rule of towers reads: the strings of its module, or the words of its row."""
    module, dot, _ = rule.partition(".")
    names = ("blocks", "bodies", "image_rule", "__init__", *([module] if dot else []))
    own = set() if dot else {*re.findall(r"[a-z]\w+", str(row_of("tower_weights", rule)))}
    return sorted(own | {key for name in names for key in words(MODEL / "towers" / f"{name}.py")})


def odd(random: Random, keys: list[str], depth: int = 0) -> Any:
    """A value that a key should not have, or may have."""
    kind = random.random()
    if kind < 0.1 and depth < 2:
        return {random.choice(keys): odd(random, keys, depth + 1) for _ in range(random.randint(0, 4))}
    if kind < 0.2:
        return [odd(random, keys, 2) for _ in range(random.randint(0, 6))]
    if kind < 0.35:
        return random.randint(-2, 2000)
    return random.choice(keys) if kind < 0.4 else copy.deepcopy(random.choice(ODD))


def some(random: Random, keys: list[str], most: int) -> dict[str, Any]:
    """A mapping of up to `most` odd values."""
    return {random.choice(keys): odd(random, keys) for _ in range(random.randint(0, most))}


def damaged(random: Random) -> dict[str, Any]:
    """A config with up to four keys dropped, changed or added, also in a mapping within it."""
    kind = random.random()
    if kind < 0.6:
        config = copy.deepcopy(random.choice(CONFIGS))
    elif kind < 0.8:
        config = copy.deepcopy(dict(random.choice(presets()).config))
    else:
        config = {"model_type": random.choice(types()), **SMALL}
    inner = [value for value in config.values() if isinstance(value, dict)]
    target = random.choice(inner) if inner and random.random() < 0.5 else config
    own = [key for key in target if key != "model_type"]
    for _ in range(random.randint(1, 4)):
        key = random.choice(own) if own and random.random() < 0.6 else random.choice(keys_of_families())
        if random.random() < 0.2:
            target.pop(key, None)
        else:
            target[key] = odd(random, keys_of_families())
    return config


def test_an_answer_or_a_clean_refusal(pytestconfig: pytest.Config) -> None:
    random = Random(pytestconfig.getoption("--fuzz-seed"))
    for number in range(pytestconfig.getoption("--cases") // 2):
        config = damaged(random)
        try:
            model = kvcalc.read_config(config, "config", "test")
            if number % 4 == 0:
                tokens, engine = random.choice([1, 100, 10**6]), random.choice(["logical", "transformers"])
                held = kvcalc.estimate(model, context_tokens=tokens, engine=engine)["kv_cache"]["total_bytes"]
                assert held >= 0
        except Exception as error:
            if not (isinstance(error, KvcalcError) and is_clean(error)):
                raise AssertionError(f"{error!r} of {config}") from error


class Described(NamedTuple):
    """A type of a tower, or of a model with one, and its rule."""

    table: str
    key: str
    rule: str
    model_type: str


@cache
def described() -> list[Described]:
    return [
        Described(table, key, rule, model_type)
        for table in ("vision", "audio", "images")
        for key, rows in rows_of("towers")[table].items()
        for rule, types, _ in spelled_out(rows)
        for model_type in types
    ]


def test_towers_and_images_are_counted_or_refused_with_the_reason(pytestconfig: pytest.Config) -> None:
    random = Random(pytestconfig.getoption("--fuzz-seed"))
    text = kvcalc.read_config({"model_type": "generic", **SMALL}, "test", "test")
    for _ in range(pytestconfig.getoption("--cases")):
        one = random.choice(described())
        keys = keys_of_towers(one.rule)
        tower, outer = some(random, keys, 6), some(random, keys, 5)
        (tower if one.key == "by_tower" else outer)["model_type"] = one.model_type
        outer.setdefault("model_type", "x")
        if random.random() < 0.3:
            outer["preprocessor_config"] = some(random, keys, 5)
        outer[random.choice(TOWER_KEYS["audio" if one.table == "audio" else "vision"])] = tower
        model = text._replace(multimodal=outer)
        size = random.randint(1, 4000), random.randint(1, 4000), random.randint(1, 4)
        try:
            assert all(found.reason or (found.parameters or 0) >= 0 for found in towers_of(model))
            assert image_tokens(model, *size) >= 0
        except Exception as error:
            if not (isinstance(error, KvcalcError) and is_clean(error)):
                raise AssertionError(f"{error!r} of {outer}") from error
