"""A mistake in a row of the table of decoders is found when the table is read."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvcalc.model.families import decoder_table
from kvcalc.model.families.decoder import _OWN_KEYS
from kvcalc.model.families.decoder_table import DECODERS, Decoder, renamed, row
from tests.conftest import ROOT


@pytest.mark.parametrize("write", [row, renamed])
@pytest.mark.parametrize("typo", ["kv_head", "windw", "qkvbias", "layer", "experts_"])
def test_a_field_that_no_decoder_has_is_refused(write: Any, typo: str) -> None:
    with pytest.raises(TypeError, match=f"has no {typo}$"):
        write(**{typo: 8})
    with pytest.raises(TypeError, match=f"has no {typo}$"):
        write({typo: 8}, kv_heads=8)


def test_a_typo_in_any_row_of_the_table_stops_its_import(monkeypatch: pytest.MonkeyPatch) -> None:
    source = Path(str(decoder_table.__file__)).read_text()
    words = [word for word in Decoder.__annotations__ if f" {word}=" in source]
    assert len(words) > 30
    for word in words:
        changed = re.sub(rf"(?<=row\()(.*?) {word}=", rf"\1 {word}x=", source, count=1, flags=re.DOTALL)
        if changed != source:
            with pytest.raises(TypeError, match=rf"{word}x"):
                exec(compile(changed, "decoder_table", "exec", dont_inherit=True), {"__name__": decoder_table.__name__})


@pytest.mark.parametrize("model_type", DECODERS)
def test_words_with_a_meaning_are_among_those_that_are_read(model_type: str) -> None:
    facts = Decoder(DECODERS[model_type])
    assert facts.mlp in ("gated", "fused", "plain", "xielu")
    assert facts.qk_norm in ("", "head", "head_bias", "width")
    assert {*facts.own_keys} <= _OWN_KEYS


MODEL = ROOT / "kvcalc" / "model"


def defaults_in(tree: ast.AST) -> Iterator[ast.Constant]:
    """The keys of the tables of defaults: `_DEFAULTS = {...}`, and `defaults={...}` in a row."""
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
    defaults: set[str] = set()
    named: set[str] = set()
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
