"""The longest context that can be used, and the longest that the memory holds."""

from __future__ import annotations

from typing import Any

import pytest

import kvcalc

LLAMA = "meta-llama/Llama-3.1-8B-Instruct"  # takes 131,072 tokens


@pytest.mark.parametrize(
    ("engine", "settings"),
    [("vllm", {}), ("sglang", {}), ("llama.cpp", {}), ("llama.cpp", {"n-gpu-layers": "16", "host-memory": "200GiB"})],
)
def test_the_usable_context_is_within_the_models_limit(engine: str, settings: dict[str, str]) -> None:
    for tokens in (8192, 200_000):
        fit = kvcalc.fit(
            LLAMA, kvcalc.find_devices("h200"), engine=engine, engine_settings=settings, context_tokens=tokens
        )["fit"]
        assert fit["fits"]
        assert fit["max_context_tokens"] == 131_072
        assert (fit["memory_context_tokens"] or 0) > 200_000


def test_a_smaller_memory_holds_less_than_the_model_takes() -> None:
    fit = kvcalc.fit(LLAMA, kvcalc.find_devices("rtx-4090"), engine="vllm", context_tokens=8192)["fit"]
    assert fit["max_context_tokens"] == fit["memory_context_tokens"]
    assert (fit["max_context_tokens"] or 0) < 131_072


def test_without_a_limit_of_the_memory_the_model_has_one() -> None:
    fit: Any = kvcalc.estimate(kvcalc.load_model("bert-base"), engine="vllm", kv_memory_bytes=10)["fit"]
    assert (fit["max_context_tokens"], fit["memory_context_tokens"]) == (512, None)
    # Nothing says how long a text of this model may be.
    fit = kvcalc.estimate(kvcalc.load_model("mamba-2.8b"), kv_memory_bytes=10**9)["fit"]
    assert (fit["max_context_tokens"], fit["memory_context_tokens"]) == (None, None)


def test_every_command_says_the_usable_context(kvcalc: Any) -> None:
    words = (LLAMA, "--gpu", "h200", "--engine", "vllm", "--context", "8k")
    for command in ("fit", "estimate"):
        assert kvcalc(command, *words, "--get", "fit.max_context_tokens").out == "131072\n"
        shown = kvcalc(command, *words, "--format", "human")
        assert "131,072 tokens" in shown.out
        memory = int(kvcalc(command, *words, "--get", "fit.memory_context_tokens").out)
        assert memory > 131_072
        assert "fits in memory" not in shown.err
    rows = kvcalc("compare", *words, "--json").json["models"]
    assert [row["max_context_tokens"] for row in rows] == [131_072]
    served = kvcalc("check", "vllm", "serve", LLAMA, "--gpu", "h200", "--get", "fit.max_context_tokens")
    assert served.out == "131072\n"
