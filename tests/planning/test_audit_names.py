"""The model of a log is found by the names that people serve: paths, releases and quantized copies."""

from __future__ import annotations

import pytest

from kvcalc.errors import ModelError
from tests.documents import audit

# Qwen2.5-7B-Instruct, vLLM 0.18.0 on a V100.
LOG = """\
Initializing a V1 LLM engine (v0.18.0) with config: model='{name}', dtype=torch.float16, max_seq_len=32768
Available KV cache memory: 13.1 GiB
GPU KV cache size: 245,360 tokens
Maximum concurrency for 32,768 tokens per request: 7.49x
"""


@pytest.mark.parametrize(
    "name",
    [
        "Qwen/Qwen2.5-7B-Instruct",
        "/data/Qwen/Qwen2.5-7B-Instruct",
        r"C:\models\Qwen2___5-7B-Instruct",
        "somebody/Qwen2.5-7B-Instruct-AWQ",
        "unsloth/qwen2.5-7b-instruct-unsloth-bnb-4bit",
        "somebody/Qwen2.5-7B-autoround-W4A16",
        "/models/Qwen2.5-7B-Instruct-UD-Q4_K_XL.gguf",
    ],
)
def test_a_release_or_a_copy_has_the_cache_of_its_model(name: str) -> None:
    document = audit(LOG.format(name=name), "log")
    assert (document["equal"], document["unexplained"]) == (2, 0)
    assert document["model"]["log_name"] == name


@pytest.mark.parametrize("name", ["somebody/Qwen2.5-9B-Instruct-AWQ", "/models", "somebody/Distil-Qwen2.5-7B", "AWQ"])
def test_other_names_are_not_guessed(name: str) -> None:
    with pytest.raises(ModelError, match="names an unknown model"):
        audit(LOG.format(name=name), "log")
