"""Presets: every file is right by its own schema, found by every name, and each way to spoil one is refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvcalc.errors import KvcalcError, ModelError, UsageError
from kvcalc.model.presets import all_presets, find_preset, load_preset, preset_names, presets_folder
from kvcalc.model.resolve import load_model

GOOD = """\
name: tiny
aliases: [org/Tiny]
source: https://example.com/config.json
date: 2024-01-31
config:
  model_type: llama
  num_hidden_layers: 2
  num_attention_heads: 4
  hidden_size: 64
"""

DOCUMENTED = {
    "bert-base", "bert-large", "gpt2", "gpt-3", "palm-540b", "falcon-7b", "llama-7b", "llama-2-70b", "llama-3-8b",
    "llama-3-70b", "mistral-7b-v0.1", "mistral-7b-v0.3", "deepseek-v2", "deepseek-v3",
}  # fmt: skip


def write(tmp_path: Path, text: str) -> str:
    path = tmp_path / "tiny.yaml"
    path.write_text(text)
    return str(path)


def test_every_model_the_documents_name_is_there() -> None:
    assert set(preset_names()) >= DOCUMENTED


def test_names_match_files_and_no_name_or_alias_stands_twice() -> None:
    presets = all_presets()
    names = [name.casefold() for p in presets for name in (p.name, *p.aliases)]
    assert len(set(names)) == len(names)
    for preset in presets:
        assert Path(preset.path).stem == preset.name == preset.name.casefold()


@pytest.mark.parametrize("name", preset_names())
def test_each_preset_states_its_source_and_is_understood(name: str) -> None:
    preset = load_preset(str(Path(presets_folder()) / f"{name}.yaml"))
    assert re.match(r"https://(huggingface\.co|arxiv\.org)/", preset.source)
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", preset.date)
    spec = load_model(name)
    assert spec.name == name
    assert spec.source == preset.source


def test_a_preset_is_found_by_name_and_alias_in_any_case() -> None:
    for name in ("llama-3-70b", "LLAMA-3-70B", "meta-llama/Meta-Llama-3-70B", "META-LLAMA/meta-llama-3-70b"):
        found = find_preset(name)
        assert found is not None
        assert found.name == "llama-3-70b"
    # A word of a file that is no alias finds nothing.
    assert find_preset("meta-llama") is None


def test_a_preset_file_is_a_model_too(tmp_path: Path) -> None:
    spec = load_model(write(tmp_path, GOOD))
    assert (spec.name, spec.num_layers) == ("tiny", 2)


def spoil(old: str, new: str) -> str:
    assert old in GOOD
    return GOOD.replace(old, new)


BOMB = "a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]\n"

SPOILT = {
    "a missing key": (spoil("date: 2024-01-31\n", ""), ModelError, "date is missing"),
    "a null key": (spoil("date: 2024-01-31", "date:"), ModelError, "date is missing"),
    "a misspelt key": (spoil("source:", "sauce:"), ModelError, "'sauce' is not a preset's key"),
    "a misspelt fact": (spoil("num_hidden_layers", "num_hiden_layers"), ModelError, "num_hiden_layers"),
    "an unknown fact": (GOOD + "  flavour: 3\n", ModelError, "flavour"),
    "a duplicate key": (GOOD + "name: other\n", ModelError, "'name' stands twice"),
    "a duplicate fact": (GOOD + "  hidden_size: 65\n", ModelError, "'hidden_size' stands twice"),
    "a date that is none": (spoil("2024-01-31", "soon"), ModelError, "date"),
    "a day that is none": (spoil("2024-01-31", "2024-02-31"), UsageError, "not YAML"),
    "a config that is no mapping": (GOOD.split("config:")[0] + "config: 3\n", ModelError, "config must be a mapping"),
    "a list of configs": (GOOD.split("config:")[0] + "config: [1]\n", ModelError, "config must be a mapping"),
    "aliases that are no list": (spoil("[org/Tiny]", "org/Tiny"), ModelError, "aliases must be a list"),
    "an alias that is no text": (spoil("[org/Tiny]", "[3]"), ModelError, "aliases must be text"),
    "a name that is no text": (spoil("name: tiny", "name: 3"), ModelError, "name must be text"),
    "a tag": (spoil("name: tiny", "name: !!python/object/apply:os.system ['true']"), UsageError, "tags"),
    "a plain tag": (spoil("num_hidden_layers: 2", "num_hidden_layers: !!int 2"), UsageError, "tags"),
    "an alias bomb": (GOOD + BOMB, UsageError, "anchors and aliases"),
    "a merge": (GOOD + "x: &x {a: 1}\ny: {<<: *x}\n", UsageError, "anchors and aliases"),
    "flow nesting": (GOOD + "note: " + "[" * 40 + "]" * 40 + "\n", UsageError, "nested"),
    "deep flow nesting": (GOOD + "note: " + "[" * 50_000 + "]" * 50_000 + "\n", UsageError, "nested"),
    "deep block nesting": ("- " * 50_000 + "1\n", UsageError, "nested"),
    "a list": ("- 1\n- 2\n", UsageError, "not a mapping"),
    "nothing": ("", UsageError, "not a mapping"),
    "no YAML": ("name: [unclosed\n", UsageError, "not YAML at line"),
    "a tab": ("name:\n\t- x\n", UsageError, "not YAML at line"),
    "a control character": ("name: \x07\n", UsageError, "not YAML"),
    "two documents": (GOOD + "---\n" + GOOD, UsageError, "not YAML"),
    "too large": (GOOD + "#" * 300_000, UsageError, "bytes"),
}  # fmt: skip


@pytest.mark.parametrize("case", SPOILT)
def test_a_spoilt_preset_is_refused_in_one_line(case: str, tmp_path: Path) -> None:
    text, kind, message = SPOILT[case]
    with pytest.raises(KvcalcError) as caught:
        load_model(write(tmp_path, text))
    assert type(caught.value) is kind
    assert message in caught.value.message
    assert "\n" not in caught.value.message
    assert len(caught.value.message) < 300
