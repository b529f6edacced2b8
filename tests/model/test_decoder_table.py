"""A mistake in a row of the table of decoders is found when kvcalc is built."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvcalc.model.families.decoder import _OWN_KEYS
from kvcalc.model.families.decoder_table import Decoder, model_types, row, rows
from kvcalc.model.presets import shipped_table
from kvcalc.model.type_tables import STATED
from presets.check import check_decoders, check_table
from tests.conftest import ROOT
from tests.rows import every_row


def test_the_rows_have_the_form_that_the_build_checks() -> None:
    assert len(rows()) > 150
    check_decoders(rows())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("kv_head", 8), ("windw", 8), ("experts_", {}), ("kv_heads", "8"), ("kv_heads", True), ("tied", "yes"),
        ("mlp", "gatd"), ("qk_norm", "heads"), ("slides", "all_layer"), ("slides", {"full_evry": 4}),
        ("slides", {"full_every": [4], "full_first_of": 2}), ("slides", {"full_first_of": [4, 5]}),
        ("experts", {"numbr": "num_experts"}), ("experts", "num_experts"), ("norms", "input_layernorm"),
        ("keys", [1]), ("tables", [["wpe", "n_positions", 1024, 0]]), ("mlp_names", ["up"]), ("refused", {"key": 1}),
        ("builds", {"hidden_size": "4096"}), ("defaults", []), ("like", "_lama"), ("like", ["llama", "acorn"]),
        ("vocab_size", "32k"), ("qkv_bias", 1), ("gguf", [1]), ("computed", {"rotary": 1}),
        ("computed", {"rotry": "not flag('alibi')"}), ("computed", {"rotary": "not flg('alibi')"}),
    ],
    ids=str,
)  # fmt: skip
def test_a_mistake_in_a_row_stops_the_build(field: str, value: object) -> None:
    """`kv_head` for `kv_heads` gave four times the bytes."""
    with pytest.raises(ValueError, match=rf"^acorn\b.*\b{field}\b|^acorn is like"):
        check_decoders({**rows(), "acorn": {"vocab_size": 32000, field: value}})


@pytest.mark.parametrize(
    ("table", "row", "named"),
    [
        ("families", {"acorn": {"keys": "head_dim"}}, "acorn"),
        ("families", {"bert": {"key": "head_dim"}}, "key"),
        ("families", {"bert": {"keys": ["head_dim"]}}, "bert"),
        ("families", {"bert": {"types": "mamba"}}, "mamba"),
        ("defaults", {"acorn": {"head_dim": 128}}, "acorn"),
        ("defaults", {"mamba": {"state_siz": 16}}, "state_siz"),
        ("defaults", {"mamba": {"like": "oak"}}, "oak"),
        ("families", {"acorn": {"module": "oak", "types": "acorn"}}, "oak"),
        ("layers", {"acorn": {}}, "acorn"),
        ("layers", {"led": {"layer": ["num_layers"]}}, "layer"),
        ("families", {"_stated": {"acorn": "num_layers"}}, "acorn"),
        ("layers", {"led": {"positions": []}}, "led has no kinds"),
        ("layers", {"led": {"functions": "acorns", "kinds": {"every": "attention()"}}}, "acorns.py"),
        ("layers", {"led": {"kinds": {"every": "attention()"}, "body": {"dense": ["other('a', acorns)"]}}}, "acorns"),
        ("architectures", {"acorn": {"type": "llama", "keys": {}, "check": ["equals(1, 1, 'x')"]}}, "equals"),
        ("layers", {"led": {"kinds": {"every": "attention(window=window_siz)"}}}, "window_siz"),
        ("layers", {"led": {"kinds": {"every": "attention()"}, "body": {"norm": []}}}, "norm"),
        ("wrappers", {"remote": {"acorn": "lama"}}, "lama"),
        ("wrappers", {"remote": {"acorn": {"key": ["text"]}}}, "key"),
        ("wrappers", {"sizes": {"llama": [4096, 32]}}, "llama"),
        ("wrappers", {"size": {}}, "size"),
        ("releases", {"recipes": {"acorn": {"store": "int4"}}}, "store"),
        ("releases", {"second_hand": [{"name": "a/b", "preset": "b", "alias": True}]}, "alias"),
        ("releases", {"second_hand": [{"name": "a/b", "preset": "b", "quantized": {"-x": "int5"}}]}, "int5"),
        ("releases", {"second_hand": [{"name": "a/b", "preset": "b", "sizes": 7}]}, "sizes"),
        ("names", {"own_suffixes": {"acorn": {"-x": "int5"}}}, "int5"),
        ("names", {"suffixes": {"-4bit": "awq", "-awq-4bit": "awq"}}, "-awq-4bit"),
        ("names", {"suffixes": {"-AWQ": "awq"}}, "lower case"),
        ("ollama", {"acorn": {"latest": "7b", "tags": {"8b": "acorn/Acorn-8B"}}}, "acorn"),
        ("ollama", {"acorn": {"latest": "7b", "type": "q9_0", "tags": {"7b": "acorn/Acorn-7B"}}}, "q9_0"),
        ("towers", {"tower": {}}, "tower"),
        ("towers", {"audio": {"model": {}}}, "model"),
        ("towers", {"audio": {"by_model": {"audio.acorn": "acorn"}}}, "audio.acorn"),
        ("towers", {"audio": {"by_model": {"acorns.acorn": "acorn"}}}, "acorns.acorn"),
        ("towers", {"images": {"by_model": {"views.ovis": [{"types": "ovis", "least": 9}]}}}, "views.ovis"),
        ("towers", {"audio": {"by_model": {"acorn": "acorn"}}}, "acorn"),
        ("tower_weights", {"acorn": {"whole": "text", "towers": {}}}, "towers"),
        ("tower_weights", {"acorn": {"tower": {"hidden_size": 8}, "whole": "hidden_sizes * text"}}, "hidden_sizes"),
        ("tower_weights", {"acorn": {"whole": "text / 2"}}, "not a whole number"),
        ("tower_weights", {"acorn": {"whole": "text or 2"}}, "text or 2"),
        ("tower_weights", {"acorn": {"whole": "linear(text)"}}, "linear|projection"),
        ("tower_weights", {"acorn": {"like": "oak", "whole": "text"}}, "oak"),
        ("architectures", {"acorn": {"type": "acorn", "build": "layers.jamba"}}, "acorn"),
        ("architectures", {"acorn": {"type": "llama", "build": "layers.oak"}}, "layers.oak"),
        ("architectures", {"acorn": {"type": "llama", "made": "layers.jamba"}}, "made"),
        ("architectures", {"acorn": {"type": "llama", "keys": {"head_dim": "integers('x')"}}}, "integers"),
        ("architectures", {"acorn": {"type": "llama", "keys": {}, "only": "width"}}, "width"),
        ("acorns", {}, "acorns"),
    ],
    ids=str,
)
def test_a_mistake_in_another_table_stops_the_build(table: str, row: Any, named: str) -> None:
    rows = shipped_table(table) if table != "acorns" else {}
    check_table(table, rows) if rows else None
    # The last three tables have sections of rows.
    sections = table in ("wrappers", "releases", "towers")
    changed = {key: {**rows.get(key, {}), **own} if sections and isinstance(own, dict) else own
               for key, own in row.items()}  # fmt: skip
    with pytest.raises(ValueError, match=named):
        check_table(table, {**rows, **changed})


def test_a_row_may_only_be_like_a_row_above_it() -> None:
    with pytest.raises(ValueError, match="acorn is like oak, which is not above it"):
        check_decoders({"acorn": {"like": "oak"}, "oak": {}})


@pytest.mark.long
def test_the_build_checks_the_rows(tmp_path: Path) -> None:
    """The build of a checkout with a mistake in the table fails, and names it."""
    shutil.copytree(ROOT / "presets", tmp_path / "presets")
    shutil.copytree(ROOT / "kvcalc", tmp_path / "kvcalc", ignore=shutil.ignore_patterns("__pycache__"))
    with (tmp_path / "presets" / "types" / "decoders.yaml").open("a") as table:
        table.write("acorn: {kv_head: 8}\n")
    code = "import pathlib, compile; compile.compile_presets(pathlib.Path())"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path / "presets", env={"PYTHONPATH": str(tmp_path / "presets")},
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 1
    assert "ValueError: acorn has no kv_head: its fields are" in done.stderr


def test_a_row_has_the_facts_of_the_rows_that_it_is_like() -> None:
    phi4 = row("phi4")
    assert (phi4["mlp"], phi4["attention_names"], phi4["is_remote"]) == ("fused", {"fused": "qkv_proj"}, True)
    assert phi4["defaults"] == {"vocab_size": 200064, "intermediate_size": 8192}
    # The facts of the last row that it is like count, and its own count most.
    ctrl = row("ctrl")
    assert (ctrl["layers"], ctrl["qkv_bias"], ctrl["output_bias"]) == (("n_layer", "num_hidden_layers"), False, True)
    assert "gguf" not in row("qwen2_vl_text")


@every_row("model_type", model_types())
def test_keys_that_a_family_knows_are_among_those_that_are_read(model_type: str) -> None:
    assert {*Decoder(row(model_type)).own_keys} <= _OWN_KEYS


MODEL = ROOT / "kvcalc" / "model"


def test_every_default_is_that_of_a_key_that_a_reader_names() -> None:
    """Those of a row of decoders are `defaults`."""
    tables = (*rows().values(), *shipped_table("layers").values())
    defaults = {key for own in tables for key in own.get("defaults", {})}
    defaults.update(key for own in shipped_table("defaults").values() for key in own)
    named = {word for own in tables for word in re.findall(r"\w+", repr({**own, "defaults": ()}))}
    named.update(key for keys in STATED.values() for key in keys.split())
    for path in MODEL.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                named.update(re.findall(r"\w+", node.value))
    assert len(defaults) > 100
    assert defaults <= named
