"""The context that a server derives from the scaling of its model's rotation."""

from __future__ import annotations

from typing import Any

import pytest

from kvcalc import check
from kvcalc.engines import context_limits
from kvcalc.model.resolve import load_model
from kvcalc.model.spec import ModelSpec, with_config

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
HF = '--hf-overrides \'{"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}'


def scaled(rotation: dict[str, Any], positions: int = 4096, **others: Any) -> ModelSpec:
    return with_config(
        load_model("Qwen/Qwen3-8B"), {"rope_scaling": rotation, "max_position_embeddings": positions, **others}
    )


@pytest.mark.parametrize(
    ("name", "tokens"),
    [
        ("deepseek-ai/deepseek-coder-1.3b-instruct", 65536),
        ("OpenGVLab/InternVL3-14B-hf", 65536),
        ("lmsys/vicuna-13b-v1.5-16k", 16384),
        ("internlm/internlm3-8b-instruct", 196608),
        ("google/gemma-3-27b-it", 131072),
        ("meta-llama/Llama-3.1-8B-Instruct", 131072),
    ],
)
def test_a_factor_of_linear_or_dynamic_scaling_lengthens_the_context(name: str, tokens: int) -> None:
    spec = load_model(name)
    for engine in ("vllm", "vllm@0.11", "sglang", "tensorrt-llm"):
        assert context_limits(engine, spec) == (tokens, tokens)
    assert context_limits("llama.cpp", spec)[0] == spec.max_position_embeddings  # its files keep the factor apart


@pytest.mark.parametrize("kind", ["yarn", "llama3", "longrope", "su", "deepseek_yarn"])
def test_other_kinds_of_scaling_are_in_the_positions_already(kind: str) -> None:
    spec = scaled({"rope_type": kind, "factor": 4.0})
    assert (spec.longest_context, context_limits("vllm", spec)) == (4096, (4096, 4096))


def test_the_rules_of_single_engines_and_releases() -> None:
    yarn = scaled(YARN, 40960)
    assert context_limits("vllm@0.29", yarn) == (131072, 131072)  # vllm-project/vllm#56446
    assert context_limits("vllm@0.30", yarn) == context_limits("sglang", yarn) == (40960, 40960)
    dynamic = scaled({"type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 4096})
    assert (context_limits("vllm", dynamic)[1], context_limits("sglang", dynamic)[1]) == (8192, 4096)
    phi = load_model("microsoft/Phi-4-mini-instruct")
    assert context_limits("vllm", phi) == (4096, 131072)  # vllm-project/vllm#27431
    assert context_limits("vllm@0.10", phi) == context_limits("sglang", phi) == (131072, 131072)
    nested = {"full_attention": {"rope_type": "linear", "factor": 8.0}, "sliding_attention": {"rope_type": "default"}}
    assert scaled(nested).longest_context == 32768
    assert scaled({"rope_type": "linear", "factor": None}).longest_context == 4096


@pytest.mark.parametrize(
    ("command", "tokens"),
    [
        ("vllm serve deepseek-ai/deepseek-coder-1.3b-instruct", 65536),
        ("python -m sglang.launch_server --model-path deepseek-ai/deepseek-coder-1.3b-instruct", 65536),
        ("vllm serve deepseek-ai/deepseek-coder-1.3b-instruct --max-model-len 65536", 65536),
        (f"vllm serve Qwen/Qwen3-8B --max-model-len 131072 {HF}, \"max_position_embeddings\": 131072}}'", 131072),
        (
            "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1 python -m sglang.launch_server --model Qwen/Qwen3-8B "
            f"--json-model-override-args {HF.partition(' ')[2]}}}' --context-length 131072",
            131072,
        ),
    ],
)  # fmt: skip
def test_a_server_starts_with_the_context_that_it_derives(command: str, tokens: int) -> None:
    found = check(command, "h200")
    assert (found["starts"], found["workload"]["context_tokens"]) == (True, tokens)
    assert not found["command"]["not_counted"]
    beyond = any(note["part"] == "workload" for note in found["warnings"])
    assert beyond is ("ALLOW_OVERWRITE" in command)


def test_yarns_factor_alone_lifts_no_limit_since_vllm_0_30() -> None:
    command = f"vllm serve Qwen/Qwen3-8B --max-model-len 131072 {HF}}}'"
    assert check(command.replace("vllm serve", "docker run vllm/vllm-openai:v0.29.0 --model"), "h200")["starts"]
    found = check(command, "h200")
    assert not found["starts"]
    assert "40,960" in str(found["reason"])


def test_the_rotary_tables_have_the_rows_of_the_longer_context() -> None:
    found = check("vllm serve deepseek-ai/deepseek-coder-1.3b-instruct", "h200")
    (tables,) = (line["bytes"] for line in found["fit"]["lines"] or () if line["name"] == "rotary tables")
    assert tables == 65536 * 128 * 2
