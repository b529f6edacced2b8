"""A second collection of lines that engines printed, compared with their audit.

`KVCALC_MORE_ENGINE_LOGS` is its path: JSON lines with `id`, `engine` and `lines`. The lines begin after the start, so
`STARTS` has the model and the settings of each start, as the row names them. The test is skipped without a collection.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import kvcalc
from tests.documents import audit

COLLECTION = os.environ.get("KVCALC_MORE_ENGINE_LOGS")
ENGINES = {"vLLM": "vllm", "SGLang": "sglang", "TensorRT-LLM": "tensorrt-llm", "llama.cpp": "llama.cpp"}


class Start(NamedTuple):
    """The model, the release if its rules differ from the newest, the printed settings, and the type of the cache."""

    model: str
    release: str | None = None
    settings: str = ""
    kv_dtype: str | None = None


_GLM = Start("glm-5", "0.20.0", "tensor_parallel_size=8, max_seq_len=202752, kv_cache_dtype=bfloat16")
STARTS = {
    "n001": Start(
        "qwen3.5-122b-a10b", "0.19.0",
        "max_seq_len=262144, kv_cache_dtype=fp8, speculative_config=SpeculativeConfig(method='mtp', num_spec_tokens=1)",
    ),
    "n004": Start(
        "qwen3.6-27b", "0.23.1",
        "max_seq_len=262144, kv_cache_dtype=fp8, max_num_batched_tokens=65536, enable_prefix_caching=True, "
        "speculative_config=SpeculativeConfig(method='mtp', num_spec_tokens=2)",
    ),
    "n005": _GLM,
    "n007": _GLM,
    "n008": Start(
        "llama-3.1-8b", "0.9.1",
        "max_seq_len=131072, speculative_config=SpeculativeConfig(method='eagle', model='x', num_spec_tokens=3)",
    ),
    # The bytes of these two show an fp8 cache, which the rows do not name.
    "n012": Start(
        "glm-5.1", None, "tensor_parallel_size=16, decode_context_parallel_size=8, max_seq_len=202752", "fp8"
    ),
    "n013": Start(
        "glm-5.1", None,
        "tensor_parallel_size=4, decode_context_parallel_size=4, max_seq_len=202752, "
        "speculative_config=SpeculativeConfig(method='mtp', num_spec_tokens=1)", "fp8",
    ),
    "n020": Start("kimi-k3", None, "tensor_parallel_size=8, decode_context_parallel_size=8, max_seq_len=1048576"),
    "n024": Start("qwen3.6-27b", "0.24.0", "max_seq_len=32768, enable_prefix_caching=True"),
    "n031": Start("qwen3-vl-2b", None, "max_seq_len=262144"),
    "n035": Start("qwen2.5-1.5b", "0.7.0", "max_seq_len=32768"),
    "n037": Start("qwen3-8b", "0.8.5", "tensor_parallel_size=4, max_seq_len=65536"),
    "n039": Start("llama-3.1-8b", "0.5.4", "max_seq_len=131072"),
    "n041": Start("minimax-m2.5", None, "tensor_parallel_size=4, max_seq_len=131072"),
    "n043": Start("qwen3.6-27b", None, "kv_cache_dtype=fp8_e4m3"),
    "n044": Start("nemotron-3-nano-30b-a3b", None, "tp_size=4"),
    "n049": Start("gemma-4-26b-a4b", None, "kv_cache_dtype=fp8_e4m3"),
    "n050": Start("glm-4.7-flash", None, "tp_size=2, page_size=128"),
    "n052": Start("qwen3.6-27b"),
    "n053": Start("qwen3.6-27b"),
    "n062": Start("qwen3.5-35b-a3b"),
    "n063": Start("qwen3.6-27b"),
    "n066": Start("tinyllama-1.1b"),
    "n068": Start("llama-3.1-8b"),
}  # fmt: skip

# Figures that are not reproduced, with the reason.
KNOWN = {"n024": "kernels of Intel's GPUs (XPU), whose blocks have 64 tokens, are not modelled"}


def log_of(row: dict[str, Any], start: Start) -> str:
    """The row's lines after the line in which the engine names its settings."""
    if row["engine"] == "vLLM":
        generation = "V0" if (start.release or "").startswith(("0.5", "0.6", "0.7")) else "V1"
        release = "" if start.release is None else f" (v{start.release})"
        head = [f"Initializing a {generation} LLM engine{release} with config: {start.settings}"]
    else:
        head = [f"server_args=ServerArgs({start.settings})"] if row["engine"] == "SGLang" else []
    return "\n".join([*head, *row["lines"]])


@pytest.mark.skipif(COLLECTION is None, reason="KVCALC_MORE_ENGINE_LOGS names no collection of logs")
def test_what_engines_printed_follows_from_the_model() -> None:
    assert COLLECTION is not None
    rows = {row["id"]: row for row in map(json.loads, Path(COLLECTION).read_text().splitlines())}
    equal, unexplained = 0, dict[str, list[str]]()
    for name, start in STARTS.items():
        spec, engine = kvcalc.load_model(start.model), ENGINES[rows[name]["engine"]]
        document = audit(log_of(rows[name], start), name, model=spec, engine=engine, kv_dtype=start.kv_dtype)
        wrong = [one for one in document["figures"] if one["verdict"] == "unexplained"]
        equal += document["equal"]
        if wrong:
            unexplained[name] = [f"{one['name']} {one['printed']} computed {one['computed']}" for one in wrong]
    print(f"{equal} figures are equal; unexplained: {json.dumps(unexplained)}")
    assert set(unexplained) == set(KNOWN), unexplained
    assert equal >= 45
