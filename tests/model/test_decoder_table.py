"""A mistake in a row of the table of decoders is found when kvcalc is built."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvcalc.model.families.decoder import _OWN_KEYS
from kvcalc.model.families.decoder_check import check_rows
from kvcalc.model.families.decoder_table import Decoder, model_types, row, rows
from tests.conftest import ROOT


def test_the_rows_have_the_form_that_the_build_checks() -> None:
    assert len(rows()) > 150
    check_rows(rows())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("kv_head", 8), ("windw", 8), ("experts_", {}), ("kv_heads", "8"), ("kv_heads", True), ("tied", "yes"),
        ("mlp", "gatd"), ("qk_norm", "heads"), ("slides", "all_layer"), ("slides", {"full_evry": 4}),
        ("slides", {"full_every": [4], "full_first_of": 2}), ("slides", {"full_first_of": [4, 5]}),
        ("experts", {"numbr": "num_experts"}), ("experts", "num_experts"), ("norms", "input_layernorm"),
        ("keys", [1]), ("tables", [["wpe", "n_positions", 1024, 0]]), ("mlp_names", ["up"]), ("refused", {"key": 1}),
        ("builds", {"hidden_size": "4096"}), ("defaults", []), ("like", "_lama"), ("like", ["llama", "acorn"]),
        ("vocab_size", "32k"), ("qkv_bias", 1), ("gguf", [1]),
    ],
    ids=str,
)  # fmt: skip
def test_a_mistake_in_a_row_stops_the_build(field: str, value: object) -> None:
    """`kv_head` for `kv_heads` gave four times the bytes."""
    with pytest.raises(ValueError, match=rf"^acorn\b.*\b{field}\b|^acorn is like"):
        check_rows({**rows(), "acorn": {"vocab_size": 32000, field: value}})


def test_a_row_may_only_be_like_a_row_above_it() -> None:
    with pytest.raises(ValueError, match="acorn is like oak, which is not above it"):
        check_rows({"acorn": {"like": "oak"}, "oak": {}})


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


@pytest.mark.parametrize("model_type", model_types())
def test_keys_that_a_family_knows_are_among_those_that_are_read(model_type: str) -> None:
    assert {*Decoder(row(model_type)).own_keys} <= _OWN_KEYS


MODEL = ROOT / "kvcalc" / "model"


def defaults_in(tree: ast.AST) -> Iterator[ast.Constant]:
    """The keys of the tables of defaults: `_DEFAULTS = {...}`, and `defaults={...}`."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            is_table = isinstance(target, ast.Name) and ("DEFAULTS" in target.id or target.id in ("_QWEN", "_T5S"))
        else:
            is_table = isinstance(node, ast.keyword) and node.arg == "defaults"
        value = getattr(node, "value", None)
        if is_table and isinstance(value, ast.Dict):
            for inner in ast.walk(value):
                if isinstance(inner, ast.Dict):
                    for key, default in zip(inner.keys, inner.values):
                        if isinstance(key, ast.Constant) and not isinstance(default, ast.Dict):
                            yield key


def test_every_default_is_that_of_a_key_that_a_reader_names() -> None:
    defaults = {key for own in rows().values() for key in own.get("defaults", {})}
    named = {word for own in rows().values() for word in re.findall(r"\w+", repr({**own, "defaults": ()}))}
    for path in MODEL.rglob("*.py"):
        tree = ast.parse(path.read_text())
        keys = [*defaults_in(tree)]
        defaults.update(str(key.value) for key in keys)
        own = {id(key) for key in keys}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in own:
                named.update(re.findall(r"\w+", node.value))
    assert len(defaults) > 100
    assert defaults <= named
