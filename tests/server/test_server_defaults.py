"""What a server has if nothing says it: the engine that people start on the device, and that engine's own context."""

from __future__ import annotations

from typing import Any

import pytest

import kvcalc
from kvcalc.errors import DoesNotFitError, LayoutError
from kvcalc.output.human.server import headline
from kvcalc.planning.answers.document import estimate
from kvcalc.planning.answers.fit import fit, has_workload, is_refused
from kvcalc.question.question import Question
from kvcalc.server import fit as fit_part
from kvcalc.throughput.hardware import find_devices
from tests.planning.test_one_server import random_servers


def _question(model: str, gpu: str, **fields: Any) -> Question:
    return Question(kvcalc.load_model(model), devices=find_devices(gpu), **fields)


@pytest.mark.parametrize(
    ("model", "gpu", "engine"),
    [
        ("llama-3.1-8b", "h100", "vllm"),
        ("llama-3.1-8b", "mi300x", "vllm"),
        ("llama-3.1-8b", "arc-pro-b60", "vllm"),
        ("llama-3.1-8b", "p40", "llama.cpp"),  # below compute capability 7.5
        ("llama-3.1-8b", "v100", "llama.cpp"),
        ("llama-3.1-8b", "rx-580", "llama.cpp"),
        ("llama-3.1-8b", "m4-max", "mlx"),
        ("falcon-7b", "m4-max", "llama.cpp"),  # mlx-lm has no such model
        ("qwen3:8b", "h100", "llama.cpp"),  # ollama's name
        ("unsloth/Qwen3-8B-GGUF:Q4_K_M", "h100", "llama.cpp"),
        ("mlx-community/Qwen3-8B-4bit", "m4-max", "mlx"),
        ("qwen3-0.6b", "tpu-v5e", "logical"),
        ("qwen3-0.6b", "gaudi3", "vllm"),  # with its plugin
        ("zaya1-8b", "h100", "logical"),  # vLLM's layout of it is not modelled
    ],
)
def test_the_engine_is_the_one_that_people_start(model: str, gpu: str, engine: str) -> None:
    assert estimate(_question(model, gpu))["engine"]["name"] == engine


def test_a_type_of_llama_cpps_files_is_a_file_for_llama_cpp() -> None:
    assert fit(_question("qwen3-8b", "h100", dtype="q4_k_m"))["engine"]["name"] == "llama.cpp"


def test_without_a_device_there_is_no_server() -> None:
    document = kvcalc.estimate("llama-3.1-8b")
    assert (document["engine"]["name"], document["workload"]["context_tokens"]) == ("logical", 4096)
    assert document["server"] is None


@pytest.mark.parametrize(
    ("model", "gpu", "fields", "tokens"),
    [
        ("llama-3.1-8b", "h100", {}, 131072),
        ("phi-3.5-mini", "h100", {}, 4096),  # LongRoPE's original length
        ("llama-3.1-8b", "h100", {"engine": "sglang"}, 131072),
        ("llama-3.1-8b", "h100", {"engine": "logical"}, 4096),
        ("llama-3.1-8b", "h100", {"engine": "transformers"}, 4096),
        ("qwen3:32b", "rtx-4090", {}, 16640),  # what llama-server's --fit leaves
        ("qwen3:8b", "rtx-4090", {"engine": "llama.cpp@b6000"}, 4096),  # a build without it
    ],
)
def test_the_context_is_that_of_the_engine(model: str, gpu: str, fields: dict[str, Any], tokens: int) -> None:
    assert fit(_question(model, gpu, **fields))["workload"]["context_tokens"] == tokens


def test_what_does_not_start_as_typed_says_what_does() -> None:
    document: Any = fit(_question("llama-3.1-8b", "l4"))
    server = document["server"]
    assert server["starts"] is False
    assert server["reason"].startswith("131,072 tokens need 16.00 GiB per device")
    first = server["try"][0]
    assert first["option"] == "--max-model-len"
    shorter: Any = fit(_question("llama-3.1-8b", "l4", context_tokens=int(first["value"])))
    assert shorter["server"]["starts"] is True
    assert shorter["server"]["one_user"]["tokens_per_second"] > 0


def test_an_encoder_starts_without_a_cache() -> None:
    """0 bytes have a reason, and the memory that is left is not said to be for a cache."""
    document: Any = fit(_question("bert-base", "h100"))
    assert document["fit"]["kv_cache_bytes"] == 0
    assert headline(document).endswith("GiB per device free, no KV cache")
    assert "vLLM keeps no K and V" in str(document["warnings"])
    decoder: Any = fit(_question("qwen3-8b", "h100"))
    assert headline(decoder).endswith("GiB per device for the KV cache")
    assert "keeps no K and V" not in str(decoder["warnings"])


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_context_beyond_the_models_is_refused_as_the_engine_does(engine: str) -> None:
    document: Any = fit(_question("qwen3-8b", "h100", engine=engine, context_tokens=100_000))
    assert document["server"]["starts"] is False
    assert "100,000 tokens are beyond the model's 40,960" in document["server"]["reason"]
    assert document["server"]["try"][0]["value"] == "40960"
    assert is_refused(document, has_workload=True, strict=False)


def test_a_refusal_is_a_document() -> None:
    with pytest.raises(LayoutError) as layout:
        estimate(_question("gpt2", "h100x8"))
    with pytest.raises(DoesNotFitError) as refused:
        fit(_question("qwen3-235b-a22b-fp8", "h100x8", engine="vllm@0.11.0", tensor_parallel_size=8))
    for error in (layout.value, refused.value):
        assert error.document is not None
        assert error.document["starts"] is False
        assert error.document["reason"] == error.message
    document: Any = refused.value.document
    assert [change["option"] for change in document["try"]] == ["--tp", "--ep"]


@pytest.mark.parametrize("seed", range(2))
def test_a_wider_range_never_turns_a_refusal_into_a_start(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    narrow: Any = vars(fit_part)["free_range"]

    def wide(found: Any, free_bytes: int) -> tuple[int, int]:
        low, high = narrow(found, free_bytes)
        return (free_bytes if low is None else low) - 64 * 2**30, (free_bytes if high is None else high) + 64 * 2**30

    verdicts = set()
    for question, document, _ in random_servers(seed + 10, 40):
        with monkeypatch.context() as patch:
            patch.setattr(fit_part, "free_range", wide)
            wider: Any = fit(question)
        before, after = (is_refused(one, has_workload(question), strict=False) for one in (document, wider))
        assert after or not before
        assert wider["server"]["starts"] is not True or document["server"]["starts"] is True
        verdicts.add((document["server"]["starts"], wider["server"]["starts"]))
    assert {(True, None), (False, None)} <= verdicts
