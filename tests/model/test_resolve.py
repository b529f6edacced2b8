"""MODEL as a person types it: names, paths, folders, stdin, and every way a file can be bad."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvcalc.errors import ModelError, UsageError
from kvcalc.model.hub import HubConfig
from kvcalc.model.resolve import MAX_CONFIG_BYTES, load_model
from tests.documents import estimate

CONFIG = {"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "Tiny-1B" / "config.json"
    path.parent.mkdir()
    path.write_text(json.dumps(CONFIG))
    return path


def test_a_path_and_its_folder_are_the_same_model_named_by_the_folder(config: Path) -> None:
    by_path, by_folder = load_model(str(config)), load_model(str(config.parent))
    assert by_path == by_folder._replace(reference=str(config))
    assert by_path.name == "Tiny-1B"
    assert by_path.source == str(config)


@pytest.mark.parametrize(
    ("typed", "reference"),
    [
        ("llama-3.1-70b", "llama-3.1-70b"),
        ("llama3.1-70b", "llama3.1-70b"),
        ("meta-llama/Llama-3.1-70B-Instruct", "meta-llama/Llama-3.1-70B-Instruct"),
        ("META-LLAMA/llama-3.1-70b-instruct", "meta-llama/Llama-3.1-70B-Instruct"),
        ("llama-3.1-70b-instruct", "meta-llama/Llama-3.1-70B-Instruct"),
        ("qwen3-32b-fp8", "Qwen/Qwen3-32B-FP8"),
    ],
)
def test_what_was_typed_stays_known_and_an_id_has_its_publishers_spelling(typed: str, reference: str) -> None:
    assert load_model(typed).reference == reference


def test_the_reference_of_a_path_is_the_path(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_model(str(config)).reference == str(config)
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(config.read_bytes())))
    assert load_model("-").reference == "-"


def test_the_reference_of_a_model_on_the_hub_is_its_id(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = HubConfig(str(config), "org/Name", "hf:org/Name@abc")
    monkeypatch.setattr("kvcalc.model.hub.fetch_config", lambda reference, most_bytes: found)
    spec = load_model("hf:org/Name@v2")
    assert (spec.reference, spec.name, spec.source) == ("org/Name", "org/Name", "hf:org/Name@abc")


def test_another_file_is_named_by_itself(config: Path) -> None:
    other = config.rename(config.parent / "mine.json")
    assert load_model(str(other)).name == "mine"


def test_stdin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(json.dumps(CONFIG).encode())))
    assert load_model("-").num_layers == 2


def test_a_preset_wins_over_a_folder_of_its_name_and_a_dot_means_the_path(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config.parent.rename(config.parent.parent / "gpt2")
    monkeypatch.chdir(config.parent.parent)
    assert load_model("gpt2").model_type == "gpt2"
    assert load_model("gpt2").remarks == ("gpt2 is read as the preset; for the path with that name, use ./gpt2",)
    assert load_model("./gpt2").model_type == "llama"
    assert load_model("./gpt2").remarks == ()


def test_a_path_wins_over_an_alias_with_an_organisation_and_says_so(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (config.parent.parent / "openai-community").mkdir()
    config.parent.rename(config.parent.parent / "openai-community" / "gpt2")
    monkeypatch.chdir(config.parent.parent)
    found = load_model("openai-community/gpt2")
    assert (found.model_type, found.reference) == ("llama", "openai-community/gpt2")
    assert found.remarks == ("openai-community/gpt2 is read as a path; for the preset with that name, use gpt2",)
    assert load_model("./openai-community/gpt2").remarks == ()
    assert load_model("openai-community/gpt2/config.json").remarks == ()


def test_a_byte_order_mark_is_no_text(config: Path) -> None:
    config.write_bytes(b"\xef\xbb\xbf" + config.read_bytes())
    assert load_model(str(config)).num_layers == 2


def test_infinity_in_published_configs_passes_where_it_says_nothing(config: Path) -> None:
    config.write_text(json.dumps({**CONFIG, "time_step_limit": [0.0, float("inf")]}))
    assert load_model(str(config)).num_layers == 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not JSON"), (b"{", "not JSON"), (b"[1]", "not a JSON object"), (b"3", "not a JSON object"),
        (b"null", "not a JSON object"), (b"\x80\x81\xff\xfe", "not UTF-8"), (b"[" * 100_000, "nested"),
        (b'{"a": ' * 100_000, "nested"), (b"9" * 10_000, "not JSON"),
    ],
)  # fmt: skip
def test_what_is_no_json_object_is_a_usage_error(config: Path, content: bytes, message: str) -> None:
    config.write_bytes(content)
    with pytest.raises(UsageError) as caught:
        load_model(str(config))
    assert message in caught.value.message
    assert "\n" not in caught.value.message


def test_a_file_that_is_too_large_is_not_read(config: Path) -> None:
    with config.open("wb") as file:
        file.truncate(100_000_000)
    with pytest.raises(UsageError, match="100,000,000 bytes"):
        load_model(str(config))


def test_stdin_that_is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(b" " * (MAX_CONFIG_BYTES + 10))))
    with pytest.raises(UsageError, match="more than"):
        load_model("-")


def test_what_is_no_regular_file(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo.json"
    os.mkfifo(fifo)
    for path in (fifo, Path("/dev/zero")):
        with pytest.raises(UsageError, match="not a regular file"):
            load_model(str(path))


def test_what_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "loop.json").symlink_to(tmp_path / "loop.json")
    for path in (tmp_path / "no.json", tmp_path / "loop.json", tmp_path, "a\0b.json"):
        with pytest.raises(UsageError):
            load_model(str(path))


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_an_unreadable_file(config: Path) -> None:
    config.chmod(0)
    with pytest.raises(UsageError, match="Permission denied"):
        load_model(str(config))


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("lama-3-70b", "llama-3-70b"),
        ("mistral-7b-v", "mistral-7b-v0.1"),
        ("zzzz", "kvcalc models"),
        ("org/Zzzz", "kvcalc models"),
    ],
)
def test_an_unknown_name_offers_the_near_ones(name: str, hint: str) -> None:
    with pytest.raises(ModelError) as caught:
        load_model(name)
    assert hint in (caught.value.hint or "")


def test_what_a_quantizer_wrote_beside_the_config_counts(tmp_path: Path) -> None:
    config = {
        "model_type": "llama", "num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 128,
        "intermediate_size": 256, "vocab_size": 16, "torch_dtype": "bfloat16",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    quantization = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": quantization}))
    weights = estimate(load_model(str(tmp_path)))["weights"]
    # Seven matrices of a layer in fp8, each with a scale of its weights and one of its inputs in fp32; else bf16.
    linear = 4 * 128 * 128 + 3 * 128 * 256
    assert (weights["dtype"], weights["bytes"]) == ("fp8", linear + 7 * 8 + 2 * (2 * 16 * 128 + 3 * 128))
    (tmp_path / "hf_quant_config.json").write_text("{}")
    with pytest.raises(ModelError, match="quantization is missing"):
        load_model(str(tmp_path))


def test_the_attention_of_llama_4_stays_in_16_bits_in_red_hats_fp8() -> None:
    """ignore in its quantization_config: all self_attn, routers, the vision tower and the head."""
    found = estimate(load_model("RedHatAI/Llama-4-Scout-17B-16E-Instruct-FP8-dynamic"))
    assert found["weights"] is not None
    assert found["weights"]["bytes"] == 112_898_254_848
    # Its 3.0 billion parameters of attention take twice as much as in fp8.
    whole = estimate(load_model("llama-4-scout"), dtype="fp8")["weights"]
    assert whole is not None
    more = 112_898_254_848 - (whole["bytes"] or 0)
    assert more == pytest.approx(48 * 5120 * 128 * (40 + 40 + 8 + 8), rel=0.02)
    assert not [note for note in found["warnings"] if "was not read" in note["text"]]


@pytest.mark.parametrize(
    ("name", "bits"),
    [
        ("mistralai/Mistral-Large-3-675B-Instruct-2512", 8),
        ("mistralai/Mistral-Large-3-675B-Instruct-2512-BF16", 16),
        ("mistralai/Mistral-Medium-3.5-128B", 8),
    ],
)
def test_mistrals_releases_have_their_own_type_of_weights(name: str, bits: int) -> None:
    """They are published in fp8 (vllm-project/recipes). The embedding and the head stay in 16 bits."""
    weights = estimate(load_model(name))["weights"]
    assert weights is not None
    assert weights["bytes"] is not None
    assert round(8 * weights["bytes"] / weights["parameters"]) == bits
