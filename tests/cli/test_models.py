"""`kvcalc models` with a part of a name, a size or a device: which models are listed, and what their rows say."""

from __future__ import annotations

from typing import Any

import pytest

from kvcalc.engines import engine_class
from tests.documents import validate

ON_A_CARD = ("models", "--gpu", "rtx-4090", "--engine", "llama.cpp", "--context", "16k")


def names(document: dict[str, Any]) -> list[str]:
    return [row["name"] for row in document["models"]]


def test_a_part_of_names_lists_the_models_that_have_it(kvcalc: Any) -> None:
    document = kvcalc("models", "qwen3.5", "--json").json
    validate(document, "models")
    assert {"qwen3.5-0.8b", "qwen3.5-397b-a17b"} <= set(names(document))
    assert all("qwen3.5" in name for name in names(document))
    # Also with an option before it, and with the family of none of them.
    assert names(kvcalc("models", "--family", "Qwen", "QWEN3.5", "--json").json) == names(document)
    refused = kvcalc("models", "qwen3.5", "--family", "Gemma")
    assert (refused.status, "no model name contains 'qwen3.5'" in refused.err) == (2, True)


def test_the_name_of_one_model_shows_it(kvcalc: Any) -> None:
    """A model whose name is a part of others, and a name that only a rule knows."""
    assert kvcalc("models", "gemma-2b", "--json").json["config"]["model_type"] == "gemma"
    assert kvcalc("models", "qwen3:14b", "--get", "config.num_hidden_layers").out == "40\n"
    unknown = kvcalc("models", "no-such-model")
    assert (unknown.status, "model 'no-such-model' is not known" in unknown.err) == (3, True)


def test_models_with_small_weights(kvcalc: Any) -> None:
    rows = kvcalc("models", "--max-weights", "1GiB", "--json").json["models"]
    assert {"t5-small", "gemma-3-270m"} <= {row["name"] for row in rows}
    assert all(row["weights_bytes"] <= 1 << 30 for row in rows)


def test_models_that_fit_a_device(kvcalc: Any) -> None:
    document = kvcalc(*ON_A_CARD, "llama", "--json").json
    validate(document, "models_fit")
    sizes = [row["parameters"] for row in document["models"]]
    assert sizes == sorted(sizes, reverse=True)
    rows = {row["name"]: row for row in document["models"]}
    assert rows["llama-3.1-8b"]["dtype"] == "bf16"
    assert "llama-3.1-70b" not in rows
    # Each row is the answer of kvcalc estimate with that type, and the next better type does not fit.
    found = rows["codellama-34b"]
    asked = ("--gpu", "rtx-4090", "--engine", "llama.cpp", "--context", "16k", "--dtype")
    answer = kvcalc("estimate", "codellama-34b", *asked, found["dtype"], "--json").json
    assert answer["fit"]["free_bytes"] == found["free_bytes"]
    assert found["max_context_tokens"] == 16384  # the model takes no more; there is memory for more
    assert answer["throughput"]["decode_tokens_per_second"] == found["decode_tokens_per_second"]
    ladder = [name for name, _ in engine_class("llama.cpp").smaller_types]
    better = ladder[ladder.index(found["dtype"]) - 1]
    assert not kvcalc("estimate", "codellama-34b", *asked, better, "--json").json["fit"]["fits"]


def test_the_list_is_short_and_says_what_it_leaves_out(kvcalc: Any) -> None:
    result = kvcalc(*ON_A_CARD, "--most", "2", "--json")
    assert len(result.json["models"]) == 2
    assert result.json["left_out"] > 100
    assert {"not-asked"} <= {warning["code"] for warning in result.json["warnings"]} <= {"not-asked", "refused"}
    human = kvcalc(*ON_A_CARD, "--most", "2", "--format", "human").out
    assert human.startswith("1 x rtx-4090, llama.cpp")
    assert "smaller models may fit too: --most N lists more" in human


def test_a_type_that_is_asked_for_is_the_only_one(kvcalc: Any) -> None:
    rows = kvcalc("models", "qwen3-", "--gpu", "h100", "--engine", "vllm", "--dtype", "fp8", "--json").json["models"]
    assert {row["dtype"] for row in rows} == {"fp8"}
    limited = kvcalc(*ON_A_CARD, "qwen3-", "--max-weights", "5GiB", "--json").json["models"]
    assert {"qwen3-8b"} <= {row["name"] for row in limited}
    assert all(row["weights_bytes"] <= 5 << 30 for row in limited)


def test_nothing_fits_a_small_device(kvcalc: Any) -> None:
    described = ("--gpu-memory", "1MiB", "--gpu-bandwidth", "1GB/s", "--flops", "1T")
    document = kvcalc("models", "llama-3", *described, "--json").json
    validate(document, "models_fit")
    assert (document["models"], document["hardware"], document["engine"]) == ([], None, None)
    assert kvcalc("models", "llama-3", *described, "--format", "human").out == "no model fits\n"


@pytest.mark.parametrize("option", [("--engine", "vllm"), ("--context", "8k"), ("--batch", "2"), ("--most", "3")])
def test_options_of_a_device_need_one(kvcalc: Any, option: tuple[str, str]) -> None:
    result = kvcalc("models", *option)
    assert (result.status, f"{option[0]} needs a device" in result.err) == (2, True)
