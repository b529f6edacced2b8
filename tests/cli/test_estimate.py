"""`kvcalc estimate` as typed on the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import spawn


def test_the_main_job(kvcalc: Any) -> None:
    result = kvcalc("estimate", "llama-3-70b", "--context", "8192", "--json")
    assert (result.status, result.err) == (0, "")
    assert result.json["kv_cache"]["total_bytes"] == 2_684_354_560


@pytest.mark.parametrize(
    ("options", "tokens"),
    [
        (("--context", "8k"), 8192),
        (("--context", "131_072"), 131072),
        (("-c", "1M"), 2**20),
        (("--max-model-len", "8k"), 8000),
        (("--max-model-len", "8K"), 8192),
        (("--context", "8000", "--max-model-len", "8k"), 8000),
        ((), 4096),
    ],
)
def test_the_resolved_context_is_echoed(kvcalc: Any, options: tuple[str, ...], tokens: int) -> None:
    result = kvcalc("estimate", "deepseek-v3", *options, "--get", "workload.context_tokens")
    assert (result.status, result.out) == (0, f"{tokens}\n")


def test_aliases_as_vllm_spells_them(kvcalc: Any) -> None:
    ours = kvcalc("estimate", "llama-3-8b", "--kv-dtype", "fp8", "--tp", "2", "--json")
    theirs = kvcalc("estimate", "llama-3-8b", "--kv-cache-dtype", "fp8", "--tensor-parallel-size", "2", "--json")
    assert ours.json == theirs.json


def test_a_model_by_flags_is_the_model_by_config(kvcalc: Any, tmp_path: Path) -> None:
    flags = kvcalc(
        "estimate", "--layers", 32, "--heads", 32, "--kv-heads", 8, "--head-dim", 128, "--hidden-size", 4096, "--json"
    )
    path = tmp_path / "x.json"
    config = {
        "model_type": "generic",
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "hidden_size": 4096,
    }
    path.write_text(json.dumps(config))
    file = kvcalc("estimate", path, "--json")
    assert flags.json["kv_cache"] == file.json["kv_cache"]
    assert flags.json["variants"] == file.json["variants"]
    assert flags.json["kv_cache"]["total_bytes"] == 2 * 32 * 8 * 4096 * 128 * 2


def test_without_a_width_parameters_are_unknown_and_bytes_are_not(kvcalc: Any) -> None:
    document = kvcalc("estimate", "--layers", 2, "--heads", 4, "--head-dim", 8, "--json").json
    assert [v["attention_parameters_per_layer"] for v in document["variants"]] == [None] * 4
    assert document["kv_cache"]["total_bytes"] > 0


def test_a_what_if_on_flags(kvcalc: Any) -> None:
    flags = ("--layers", 2, "--heads", 8, "--kv-heads", 8, "--head-dim", 16)
    assert kvcalc("estimate", *flags, "--attention", "mqa", "--get", "model.num_kv_heads").out == "1\n"
    assert kvcalc("estimate", *flags, "--kv-lora-rank", 32, "--get", "status").status == 2


def test_stdin_and_a_pipe(tmp_path: Path) -> None:
    config = {"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64}
    result = spawn("estimate", "-", "--get", "kv_cache.bytes_per_token", stdin=json.dumps(config))
    assert (result.status, result.out) == (0, f"{2 * 2 * 64 * 2}\n")


BAD = [
    (("estimate",), 2, "MODEL is missing"),
    (("estimate", "lama-3-70b"), 3, "llama-3-70b"),
    (("estimate", "llama-7b", "--context", "-5"), 2, "--context -5"),
    (("estimate", "llama-7b", "--context=-5"), 2, "--context -5"),
    (("estimate", "llama-7b", "--context", "0"), 2, "--context 0"),
    (("estimate", "llama-7b", "--context", "8kk"), 2, "--context 8kk"),
    (("estimate", "llama-7b", "--context", "nan"), 2, "--context nan"),
    (("estimate", "llama-7b", "--context", ""), 2, "--context ''"),
    (("estimate", "llama-7b", "--context"), 2, "requires an argument"),
    (("estimate", "llama-7b", "--context", "1k", "--max-model-len", "1k"), 2, "contradict"),
    (("estimate", "llama-7b", "--batch", "0"), 2, "--batch 0"),
    (("estimate", "llama-7b", "--batch", "1.5"), 2, "--batch 1.5"),
    (("estimate", "llama-7b", "--dtype", "fp61"), 2, "not a dtype"),
    (("estimate", "llama-7b", "--kv-dtype", "x"), 2, "--kv-dtype 'x'"),
    (("estimate", "llama-7b", "--tp", "3"), 2, "--tp 3"),
    (("estimate", "llama-7b", "--tp", "0"), 2, "--tp 0"),
    (("estimate", "llama-7b", "--engine", "vlm"), 2, "vllm"),
    (("estimate", "llama-7b", "--engine", "llama.cpp", "--tp", "2"), 2, "tensor parallelism is not supported"),
    (("estimate", "llama-7b", "--cache", "static"), 2, "transformers"),
    (("estimate", "llama-7b", "--kv-memory", "80X"), 2, "--kv-memory 80X"),
    (("estimate", "llama-7b", "--attention", "foo"), 2, "mha, mqa, gqa, mla"),
    (("estimate", "llama-7b", "--kv-heads", "5"), 2, "--kv-heads 5: 5 KV heads do not divide 32 heads"),
    (("estimate", "llama-7b", "--kv-heads", "0"), 2, "--kv-heads 0"),
    (("estimate", "llama-7b", "--attention", "mha", "--kv-heads", "4"), 2, "not 4"),
    (("estimate", "llama-7b", "--attention", "gqa", "--kv-lora-rank", "4"), 2, "belong to mla"),
    (("estimate", "falcon-7b", "--attention", "gqa"), 2, "71 heads"),
    (("estimate", "llama-7b", "--heads", "4"), 2, "--heads describes a model and cannot be combined with MODEL"),
    (("estimate", "--heads", "4"), 2, "needs --layers"),
    (("estimate", "--layers", "1", "--heads", "6", "--hidden-size", "512"), 2, "85.3"),
    (("estimate", "--layers", "1", "--heads", "32", "--kv-heads", "5", "--head-dim", "8"), 2, "does not divide"),
    (("estimate", "--layers", "1000000000", "--heads", "2", "--head-dim", "8"), 2, "at most"),
    (("estimate", "llama-7b", "--format", "xml"), 2, "not a format"),
    (("estimate", "llama-7b", "--json", "--format", "csv"), 2, "contradict"),
    (("estimate", "llama-7b", "--get", "kv_cache.totl"), 2, "kv_cache.totl"),
    (("estimate", "llama-7b", "--bogus"), 2, "--bogus"),
    (("estimate", "llama-7b", "extra"), 2, "extra"),
    (("estimate", "no/such/config.json"), 2, "No such file"),
    (("estimat", "llama-7b"), 2, "did you mean estimate or simulate?"),
    (("--bogus",), 2, "--bogus"),
    (("models", "show", "nope-9b"), 3, "kvcalc models"),
    (("models", "show"), 2, "NAME"),
    (("models", "nope-9b"), 3, "kvcalc models"),
]


@pytest.mark.parametrize(("arguments", "status", "message"), BAD, ids=[" ".join(a) for a, _, _ in BAD])
def test_bad_input_is_one_clear_line_a_hint_and_the_right_status(
    kvcalc: Any, arguments: tuple[str, ...], status: int, message: str
) -> None:
    result = kvcalc(*arguments)
    assert result.status == status
    assert result.out == ""
    lines = result.err.splitlines()
    assert lines[0].startswith("kvcalc: ")
    assert 1 <= len(lines) <= 2
    assert message in result.err
    assert all(line.isprintable() for line in lines)


@pytest.mark.parametrize("tokens", [10**18, 2**63 - 1])
def test_huge_contexts_are_exact(kvcalc: Any, tokens: int) -> None:
    result = kvcalc("estimate", "llama-3-70b", "--context", tokens, "--json")
    assert result.json["kv_cache"]["total_bytes"] == 327_680 * tokens
    assert kvcalc("estimate", "llama-3-70b", "--context", tokens, "--format", "human").status == 0


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--context", 2**63), ("--max-model-len", "9" * 20), ("--kv-memory", "9.3E"), ("--kv-memory", 2**63),
        ("--gpu h100 --input-tokens 8 --output-tokens", 2**63), ("--encoder-tokens", 2**63),
    ],
)  # fmt: skip
def test_counts_beyond_64_bits_are_refused_by_name(kvcalc: Any, option: str, value: object) -> None:
    result = kvcalc("estimate", "llama-3-70b", *option.split(), value)
    assert result.status == 2
    assert result.err.startswith(f"kvcalc: {option.split()[-1]} {value}")
    assert "at most 9,223,372,036,854,775,807" in result.err


@pytest.mark.parametrize("engine", ["logical", "transformers", "vllm", "sglang", "tensorrt-llm", "llama.cpp"])
@pytest.mark.parametrize("stages", [33, 10**6])
def test_more_pipeline_stages_than_layers_are_refused(kvcalc: Any, engine: str, stages: int) -> None:
    result = kvcalc("estimate", "llama-7b", "--pp", stages, "--engine", engine)
    assert (result.status, result.out) == (2, "")
    assert "the model has 32 layers" in result.err


def test_models_lists_every_preset(kvcalc: Any) -> None:
    from tests.conftest import preset_names

    document = kvcalc("models", "--json").json
    assert sorted(row["name"] for row in document["models"]) == preset_names()
    assert kvcalc("models").out.splitlines()[0].startswith("name\tfamily\tattention\t")
    human = kvcalc("models", "--format", "human").out
    assert all(name in human for name in preset_names())


def test_bytes_per_token_of_the_list_are_the_estimates(kvcalc: Any) -> None:
    for row in kvcalc("models", "--json").json["models"]:
        # A window of a few hundred tokens is full if entries are compressed, and empty otherwise.
        context = 1024 if row["name"].startswith("deepseek-v4") else 1
        asked = ("--context", context, "--dtype", "bf16", "--get", "kv_cache.bytes_per_token")
        assert int(kvcalc("estimate", row["name"], *asked).out) == row["bytes_per_token_16_bit"]


def test_models_show_prints_the_facts_and_their_source(kvcalc: Any) -> None:
    document = kvcalc("models", "show", "deepseek-ai/DeepSeek-V3", "--json").json
    assert document["name"] == "deepseek-v3"
    assert document["config"]["kv_lora_rank"] == 512
    human = kvcalc("models", "show", "deepseek-v3", "--format", "human").out
    assert document["source"] in human
    assert "kv_lora_rank" in human


def test_with_a_device_a_model_without_known_weights_is_an_error_beside_its_cache(kvcalc: Any) -> None:
    """Nobody can say whether it fits, and a script must not read that as a yes. The bytes of the cache are kept."""
    why = "the weights of gpt-3 are not known"
    alone = kvcalc("estimate", "gpt-3", "--gpu", "h100x8", "--format", "human")
    assert alone.status == 3
    assert "9,663,676,416" in alone.out
    assert alone.err.count(why) == 1
    assert "--kv-memory SIZE checks the cache alone" in alone.err
    assert kvcalc("estimate", "gpt-3", "--gpu", "h100x8", "--json").json["kv_cache"]["total_bytes"] == 9_663_676_416
    assert kvcalc("estimate", "gpt-3").status == 0
    # A what-if asks for its cache: its weights are never counted.
    assert kvcalc("estimate", "gpt-3", "--gpu", "h100", "--attention", "mla").status == 0
    swept = kvcalc("sweep", "gpt-3", "--gpu", "h100", "--context", "1k,2k", "--format", "tsv")
    assert (swept.status, len(swept.out.splitlines())) == (3, 3)
    compared = kvcalc("compare", "gpt-3", "llama-3-8b", "--gpu", "h100", "--json")
    assert compared.status == 1
    reasons = {row["model"]: (row["reason"], row["exit_code"]) for row in compared.json["models"]}
    assert reasons["llama-3-8b"] == (None, 0)
    assert why in reasons["gpt-3"][0]
    assert reasons["gpt-3"][1] == 3
