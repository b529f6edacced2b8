"""Presets: every file is right by its own schema, found by every name, and each way to spoil one is refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvcalc.errors import KvcalcError, ModelError, UsageError
from kvcalc.memory.dtypes import DTYPES
from kvcalc.memory.kv_cache import stored_bytes
from kvcalc.model.caches import CrossAttention
from kvcalc.model.presets import find_preset, load_preset, presets_folder, shipped_presets
from kvcalc.model.resolve import load_model
from kvcalc.model.spec import ModelSpec
from tests.conftest import preset_names
from tests.documents import estimate
from tests.rows import every_row

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
    presets = shipped_presets()
    assert len(presets) >= 60
    names = [name.casefold() for p in presets for name in (p.name, *p.aliases)]
    assert len(set(names)) == len(names)
    for preset in presets:
        assert Path(preset.path).stem == preset.name == preset.name.casefold()


@every_row("name", preset_names())
def test_each_preset_states_its_source_and_is_understood(name: str) -> None:
    preset = load_preset(str(Path(presets_folder()) / f"{name}.yaml"), is_users=False)
    assert preset.family
    assert re.match(r"https://(huggingface\.co|arxiv\.org)/", preset.source)
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", preset.date)
    spec = load_model(name)
    assert spec.name == name
    assert spec.source == preset.source


# What one token adds to an empty cache at 16 bit, by hand: the dimensions are the publishers', the sums are in the
# comments (2 for K and V, x layers x KV heads x head_dim x 2 bytes; a latent is kept once).
BYTES_PER_TOKEN = {
    "llama-2-7b": 524_288,  # 2 x 32 x 32 x 128 x 2
    "llama-2-13b": 819_200,  # 2 x 40 x 40 x 128 x 2
    "llama-3.1-8b": 131_072,  # 2 x 32 x 8 x 128 x 2
    "llama-3.1-405b": 516_096,  # 2 x 126 x 8 x 128 x 2
    "llama-3.2-1b": 32_768,  # 2 x 16 x 8 x 64 x 2
    "llama-3.2-3b": 114_688,  # 2 x 28 x 8 x 128 x 2
    "llama-4-scout": 196_608,  # 2 x 48 x 8 x 128 x 2
    "mistral-small-3.1-24b": 163_840,  # 2 x 40 x 8 x 128 x 2
    "codestral-22b": 229_376,  # 2 x 56 x 8 x 128 x 2
    "glm-4-32b-0414": 62_464,  # 2 x 61 x 2 x 128 x 2
    "ling-1t": 327_680,  # 2 x 80 x 8 x 128 x 2
    "dbrx": 163_840,  # 2 x 40 x 8 x 128 x 2
    "mistral-large-3": 70_272,  # 61 x (512 + 64) x 2
    "qwen3.8-2.4t-a95b": 94_208,  # 23 of 92 layers: 2 x 23 x 4 x 256 x 2
    "llava-1.5-7b": 524_288,  # 2 x 32 x 32 x 128 x 2
    "qwen2.5-7b": 57_344,  # 2 x 28 x 4 x 128 x 2
    "qwen2.5-72b": 327_680,  # 2 x 80 x 8 x 128 x 2
    "qwen3-8b": 147_456,  # 2 x 36 x 8 x 128 x 2
    "qwen3-32b": 262_144,  # 2 x 64 x 8 x 128 x 2
    "qwen3-30b-a3b": 98_304,  # 2 x 48 x 4 x 128 x 2
    "qwen3-235b-a22b": 192_512,  # 2 x 94 x 4 x 128 x 2
    "qwen3-next-80b-a3b": 24_576,  # 12 of 48 layers keep K and V: 2 x 12 x 2 x 256 x 2
    "qwen3.5-27b": 65_536,  # 16 of 64 layers: 2 x 16 x 4 x 256 x 2
    "mixtral-8x22b": 229_376,  # 2 x 56 x 8 x 128 x 2
    "mistral-nemo": 163_840,  # 2 x 40 x 8 x 128 x 2
    "gemma-2-9b": 344_064,  # 2 x 42 x 8 x 256 x 2
    "gemma-2-27b": 376_832,  # 2 x 46 x 16 x 128 x 2
    "gemma-3-1b": 26_624,  # 2 x 26 x 1 x 256 x 2
    "gemma-4-31b": 901_120,  # 10 layers of 4 heads of 512: 81,920; 50 of 16 heads of 256: 819,200
    "gemma-4-e2b": 18_432,  # 15 layers keep: 3 of one head of 512: 6,144; 12 of one head of 256: 12,288
    "deepseek-v2-lite": 31_104,  # 27 x (512 + 64) x 2
    "deepseek-r1": 70_272,  # 61 x (512 + 64) x 2
    "deepseek-v3.2": 85_888,  # 61 x (512 + 64 + 128 of the indexer) x 2
    "kimi-k2": 70_272,  # 61 x (512 + 64) x 2
    "glm-5": 109_824,  # 78 x (512 + 64 + 128) x 2
    "glm-5.2": 95_232,  # 78 x (512 + 64) x 2 = 89,856; 21 indexers: 21 x 128 x 2 = 5,376
    "minicpm3-4b": 35_712,  # 62 x (256 + 32) x 2
    "minimax-m2.5": 253_952,  # 2 x 62 x 8 x 128 x 2
    "gpt-oss-20b": 49_152,  # 2 x 24 x 8 x 64 x 2
    "phi-3.5-mini": 393_216,  # 2 x 32 x 32 x 96 x 2
    "phi-4-mini": 131_072,  # 2 x 32 x 8 x 128 x 2
    "command-r": 1_310_720,  # 2 x 40 x 64 x 128 x 2
    "olmo-3-32b": 262_144,  # 2 x 64 x 8 x 128 x 2
    "mimo-v2-flash": 222_720,  # 9 layers of 4 heads of 192 + 128: 23,040; 39 of 8 such heads: 199,680
    "nemotron-3-nano-30b-a3b": 6_144,  # 6 of 52 layers: 2 x 6 x 2 x 128 x 2
    "nemotron-h-56b": 40_960,  # 10 of 118 layers: 2 x 10 x 8 x 128 x 2
    "falcon-40b": 122_880,  # 2 x 60 x 8 x 64 x 2
    "starcoder2-7b": 65_536,  # 2 x 32 x 4 x 128 x 2
    "stablelm-3b-4e1t": 327_680,  # 2 x 32 x 32 x 80 x 2
    "smollm2-360m": 40_960,  # 2 x 32 x 5 x 64 x 2
    "phi-4": 204_800,  # 2 x 40 x 10 x 128 x 2
    "glm-4.5": 376_832,  # 2 x 92 x 8 x 128 x 2
    "glm-4.7-flash": 54_144,  # 47 x (512 + 64) x 2
    "gemma-3n-e4b": 40_960,  # 20 of 35 layers keep: 2 x 20 x 2 x 256 x 2
    "kimi-k3": 27_648,  # 24 of 93 layers are MLA: 24 x (512 + 64) x 2
    "minimax-m3": 137_472,  # 2 x 60 x 4 x 128 x 2 = 122,880; 57 indexers: 57 x 128 x 2 = 14,592
    "jamba-v0.1": 16_384,  # 4 of 32 layers: 2 x 4 x 8 x 128 x 2
    "llama-3.2-11b-vision": 131_072,  # 32 of 40 layers see text: 2 x 32 x 8 x 128 x 2
    "bloom-176b": 4_014_080,  # 2 x 70 x 112 x 128 x 2
}


def _without_cross_attention(spec: ModelSpec) -> ModelSpec:
    """Layers that attend to an encoder's output keep nothing of the text."""
    kept = (tuple(c for c in group.caches if not isinstance(c, CrossAttention)) for group in spec.layers)
    return spec._replace(layers=tuple(group._replace(caches=caches) for group, caches in zip(spec.layers, kept)))


@every_row("name", BYTES_PER_TOKEN)
def test_what_one_token_adds_by_hand(name: str) -> None:
    spec, bf16 = _without_cross_attention(load_model(name)), DTYPES["bf16"]
    # Past the first token: recurrent states are there from the start.
    assert stored_bytes(spec, bf16, 2) - stored_bytes(spec, bf16, 1) == BYTES_PER_TOKEN[name]


# As the models' cards and checkpoints count them: a figure that none of kvcalc's own comes from.
PARAMETERS = {
    "bloom-176b": 176_247_271_424,
    "gemma-2-9b": 9_241_705_984,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.3-70b": 70_553_706_496,
    "mistral-7b-v0.1": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "phi-2": 2_779_683_840,
    "phi-4": 14_659_507_200,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-8b": 8_190_735_360,
    "t5-small": 60_506_624,
    "whisper-large-v3": 1_543_490_560,
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_presets_facts_make_the_published_number_of_parameters(name: str) -> None:
    assert estimate(load_model(name), context_tokens=1)["weights"]["parameters"] == PARAMETERS[name]


# The class defaults of GLM-OCR and Phi-4-multimodal are of other sizes than the published models.
HEADS = {
    "glm-ocr": (16, 8, 128, 65_536),
    "minicpm-v-4": (32, 2, 128, 32_768),
    "phi-4-multimodal": (24, 8, 128, 131_072),
    "phi-mini-moe": (32, 8, 128, 131_072),
}


@pytest.mark.parametrize("name", HEADS)
def test_a_preset_has_the_published_heads(name: str) -> None:
    answer = estimate(load_model(name), context_tokens=1)
    facts = [answer["model"][key] for key in ("num_attention_heads", "num_kv_heads", "head_dim")]
    assert (*facts, answer["kv_cache"]["total_bytes"]) == HEADS[name]


# The sizes are those of the class in Transformers or generally known ones.
_FROM_MEMORY = re.compile(r"generally known|not read; (the (class )?defaults|class defaults)|sizes are the class")


def test_an_answer_says_if_no_published_file_with_the_sizes_was_read() -> None:
    """The sources of such presets say so too, and a user's own file may."""
    unconfirmed = {preset.name for preset in shipped_presets() if preset.unconfirmed}
    sources = {preset.name: " ".join(preset.source.split()) for preset in shipped_presets()}
    assert unconfirmed >= {name for name, source in sources.items() if _FROM_MEMORY.search(source)}
    assert not [p.name for p in shipped_presets() if p.unconfirmed and "read" not in p.source]
    for name in ("mamba-790m", "llama-3-8b"):
        remarks = [
            text for text in load_model(name).remarks if "to be sure, give hf:state-spaces/mamba-790m-hf" in text
        ]
        assert bool(remarks) is (name in unconfirmed), name


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
    "a family that is no text": (GOOD + "family: 3\n", ModelError, "family must be text"),
    "a name that is an alias too": (spoil("org/Tiny", "TINY"), ModelError, "appears twice among"),
    "a date with a time": (spoil("2024-01-31", "2024-01-31 10:00:00"), ModelError, "date must be a date"),
    "a misspelt key": (spoil("source:", "sauce:"), ModelError, "unknown key 'sauce'"),
    "a misspelt fact": (spoil("num_hidden_layers", "num_hiden_layers"), ModelError, "num_hiden_layers"),
    "an unknown fact": (GOOD + "  flavour: 3\n", ModelError, "flavour"),
    "a duplicate key": (GOOD + "name: other\n", ModelError, "'name' appears twice"),
    "a duplicate fact": (GOOD + "  hidden_size: 65\n", ModelError, "'hidden_size' appears twice"),
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
