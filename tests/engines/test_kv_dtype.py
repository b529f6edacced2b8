"""How each engine resolves `auto` from the checkpoint."""

from __future__ import annotations

import pytest

import kvcalc
from tests.documents import estimate
from tests.engines.models import ask, plain, sparse

SCHEME = {"num_bits": 8, "type": "float", "dynamic": False}
MODELOPT = {"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"}


@pytest.mark.parametrize(
    ("quantization", "key"),
    [
        (MODELOPT, "kv_cache_quant_algo"),
        ({"quant_method": "modelopt", "quantization": {"kv_cache_quant_algo": "FP8"}}, "kv_cache_quant_algo"),
        ({"quant_method": "modelopt_fp4", "kv_cache_scheme": SCHEME}, "kv_cache_scheme"),
    ],
)
@pytest.mark.parametrize("engine", ["vllm", "sglang", "tensorrt-llm"])
def test_modelopts_fp8_cache_is_followed(engine: str, quantization: dict[str, object], key: str) -> None:
    answer = ask(plain(quantization_config=quantization), engine, 64)
    assert answer["kv_cache"]["dtype"] == "fp8"
    assert answer["engine"]["kv_dtype_reason"] == f"the checkpoint's quantization_config.{key} is fp8"


@pytest.mark.parametrize("engine", ["logical", "transformers"])
def test_others_do_not_follow_it(engine: str) -> None:
    answer = ask(plain(quantization_config=MODELOPT), engine, 64)
    assert (answer["kv_cache"]["dtype"], answer["engine"]["kv_dtype_reason"]) == ("bf16", None)


@pytest.mark.parametrize(
    "quantization",
    [
        {"quant_method": "modelopt"}, {"quant_method": "awq", "kv_cache_quant_algo": "FP8"}, None,
        {"quant_method": "modelopt", "kv_cache_quant_algo": "INT8"},
        {"quant_method": "modelopt", "kv_cache_scheme": {**SCHEME, "dynamic": True}},
    ],
)  # fmt: skip
def test_a_checkpoint_that_asks_for_nothing_known_changes_nothing(quantization: dict[str, object] | None) -> None:
    assert ask(plain(quantization_config=quantization), "vllm", 64)["kv_cache"]["dtype"] == "bf16"


def test_what_is_asked_for_wins() -> None:
    answer = ask(plain(quantization_config=MODELOPT), "vllm", 64, kv_dtype="bf16")
    assert (answer["kv_cache"]["dtype"], answer["engine"]["kv_dtype_reason"]) == ("bf16", None)


NVFP4 = "NVIDIA's nvfp4 checkpoints name an fp8 cache"


def cache_of(
    config: dict[str, object], engine: str, gpu: str | None = None, dtype: str | None = None
) -> tuple[str, str | None]:
    """The cache's type and the reason, on a device if one is named. The weights are never read."""
    devices = None if gpu is None else kvcalc.find_devices(gpu)
    answer = ask({**config, "vocab_size": 1000, "intermediate_size": 1024}, engine, 64, devices=devices, dtype=dtype)
    return answer["kv_cache"]["dtype"], answer["engine"]["kv_dtype_reason"]


@pytest.mark.parametrize(
    ("engine", "expected"),
    [
        ("vllm", ("fp8", NVFP4)), ("vllm@0.14", ("fp8", NVFP4)), ("vllm@0.13", ("bf16", None)),
        ("sglang", ("fp8", NVFP4)), ("sglang@0.5.9", ("fp8", NVFP4)), ("sglang@0.5.2", ("bf16", None)),
        ("transformers", ("bf16", None)), ("llama.cpp", ("fp16", "f16 is llama.cpp's default for every model")),
    ],
)  # fmt: skip
def test_weights_in_nvfp4_mean_an_fp8_cache(engine: str, expected: tuple[str, str | None]) -> None:
    assert cache_of(plain(), engine, dtype="nvfp4") == expected


def test_weights_in_fp8_do_not_because_most_fp8_checkpoints_name_no_cache() -> None:
    assert cache_of(plain(), "vllm", dtype="fp8") == ("bf16", None)


def test_the_config_decides_if_it_is_of_an_nvfp4_checkpoint() -> None:
    config = plain(quantization_config={"quant_method": "modelopt", "quant_algo": "NVFP4"})
    assert cache_of(config, "vllm", dtype="nvfp4") == ("bf16", None)


@pytest.mark.parametrize("name", ["qwen3.6-35b-a3b", "minimax-m3"])
def test_nvfp4_checkpoints_without_a_cache_type(name: str) -> None:
    answer = estimate(kvcalc.load_model(name), context_tokens=64, dtype="nvfp4", engine="vllm")
    assert answer["kv_cache"]["dtype"] == "bf16"


@pytest.mark.parametrize(("engine", "dtype"), [("vllm@0.13", "bf16"), ("vllm@0.14", "fp8"), ("sglang@0.5.2", "bf16")])
def test_older_releases_did_not_read_modelopts_cache_type(engine: str, dtype: str) -> None:
    assert cache_of(plain(quantization_config=MODELOPT), engine)[0] == dtype


@pytest.mark.parametrize(
    ("engine", "scheme", "dtype"),
    [
        ("sglang", {"strategy": "tensor", "symmetric": True}, "fp8"), ("sglang@0.5.18", {"strategy": "tensor"}, "bf16"),
        ("sglang", {"strategy": "attn_head"}, "bf16"), ("vllm@0.9", {"strategy": "tensor"}, "fp8"),
    ],
)  # fmt: skip
def test_compressed_tensors_cache_type(engine: str, scheme: dict[str, object], dtype: str) -> None:
    quantization = {"quant_method": "compressed-tensors", "kv_cache_scheme": {**SCHEME, **scheme}}
    assert cache_of(plain(quantization_config=quantization), engine)[0] == dtype


@pytest.mark.parametrize(
    ("engine", "gpu", "dtype"),
    [
        ("sglang", "b200", "fp8_e4m3"), ("sglang", "b300", "fp8_e4m3"), ("sglang@0.5.9", "b200", "fp8"),
        ("sglang", "h200", "bf16"), ("sglang", "mi355x", "bf16"), ("sglang", "rtx-pro-6000", "fp8_e4m3"),
        ("sglang", None, "bf16"), ("vllm", "h200", "bf16"), ("vllm", "b200", "bf16"), ("vllm", "rtx-pro-6000", "fp8"),
        ("vllm@0.11.0", "h200", "fp8"), ("vllm@0.11", "h200", "bf16"),
    ],
)  # fmt: skip
def test_sparse_attentions_default_depends_on_the_device(engine: str, gpu: str | None, dtype: str) -> None:
    assert cache_of(sparse(), engine, gpu)[0] == dtype


@pytest.mark.parametrize(
    ("engine", "gpu", "dtype"),
    [
        ("vllm", "b200", "fp8_e4m3"), ("vllm@0.31", "b200", "bf16"), ("vllm", "h200", "bf16"),
        ("sglang", "rtx-pro-6000", "fp8"),
    ],
)  # fmt: skip
def test_glm_5s_default_depends_on_the_device(engine: str, gpu: str, dtype: str) -> None:
    assert cache_of({**sparse(), "model_type": "glm_moe_dsa"}, engine, gpu)[0] == dtype


def test_sglangs_default_for_sparse_attention_ignores_the_checkpoint() -> None:
    config = {**sparse(), "quantization_config": MODELOPT}
    reason = "SGLang's default for sparse attention on this device is bf16"
    assert cache_of(config, "sglang", "h200") == ("bf16", reason)
    assert cache_of(config, "sglang") == ("fp8", "the checkpoint's quantization_config.kv_cache_quant_algo is fp8")


@pytest.mark.parametrize(
    ("engine", "gpu", "asked", "row_bytes"),
    [
        ("vllm", "b200", "fp8", 576), ("vllm", "b200", "fp8_e4m3", 576), ("vllm@0.17", "b200", "fp8", 656),
        ("vllm", "h200", "fp8", 656), ("vllm", "b200", "fp8_ds_mla", 656), ("sglang", "b200", "fp8", 576),
        ("sglang@0.5.9", "b200", "fp8", 656), ("sglang", "h200", "fp8_e4m3", 656),
    ],
)  # fmt: skip
def test_a_row_of_sparse_attention_in_fp8_has_scales_unless_the_device_is_blackwell(
    engine: str, gpu: str, asked: str, row_bytes: int
) -> None:
    config = {**sparse(), "vocab_size": 1000, "intermediate_size": 1024}
    answer = ask(config, engine, 64, devices=kvcalc.find_devices(gpu), kv_dtype=asked)
    assert answer["kv_cache"]["bytes_per_token"] == 3 * (row_bytes + 132)


@pytest.mark.parametrize(
    ("engine", "dtype", "expected"),
    [
        ("vllm", None, "bf16"), ("sglang", None, "fp16"), ("transformers", None, "fp32"), ("vllm", "fp32", "fp32"),
        ("vllm", "fp8", "bf16"),
    ],
)  # fmt: skip
def test_vllm_and_sglang_compute_a_model_published_in_fp32_in_16_bits(
    engine: str, dtype: str | None, expected: str
) -> None:
    answer = ask(
        {**plain(torch_dtype="float32"), "vocab_size": 1000, "intermediate_size": 1024}, engine, 64, dtype=dtype
    )
    assert answer["kv_cache"]["dtype"] == expected
    assert answer["weights"]["dtype"] == (dtype or expected)
    assert any(note["code"] == "narrowed" for note in answer["warnings"]) == (expected != "fp32")
