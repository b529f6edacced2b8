"""What engines refuse to start, and that published servers that ran are not refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

import kvcalc
from kvcalc.errors import KvcalcError, LayoutError
from kvcalc.planning.check.answer import check
from kvcalc.planning.check.servers import choose_server
from kvcalc.question.question import SpeedQuestion


def start(model: str, gpu: str, engine: str, ep: int | None = None, **settings: str) -> Mapping[str, Any]:
    """The fit document. Raises LayoutError if the engine does not start."""
    devices = kvcalc.find_devices(gpu)
    given = {name.replace("_", "-"): text for name, text in settings.items()}
    speed = None if ep is None else SpeedQuestion(expert_parallel_size=ep)
    return kvcalc.fit(
        model, devices, context_tokens=4096, engine=engine, engine_settings=given, speed=speed,
        tensor_parallel_size=devices.num_devices,
    )  # fmt: skip


# Published errors of servers that did not start.
REFUSED = [
    ("Qwen/Qwen3-235B-A22B-FP8", "rtx-5090x8", "vllm@0.8.5", None, "192"),  # vllm-project/vllm#17569
    ("MiniMaxAI/MiniMax-M2.5", "h200x8", "vllm@0.28", None, "192"),  # ROCm/ATOM#1488 says the same of its own checks
    ("deepseek-v4-pro", "h20x16", "vllm@0.23", 16, "192"),  # vllm-project/vllm#45784
    ("Qwen/Qwen2.5-VL-72B-Instruct-AWQ", "a100-80gbx2", "vllm@0.7.2", None, "14,784"),  # vllm-project/vllm#13640
    ("Qwen/Qwen2.5-VL-72B-Instruct-AWQ", "a100-80gbx4", "vllm", None, "7,392"),  # QwenLM/Qwen3-VL#831
    ("Qwen/Qwen2.5-VL-72B-Instruct-AWQ", "a100-80gbx2", "sglang", None, "14,784"),
    ("stepfun-ai/Step-3.5-Flash-FP8", "h200x4", "sglang@0.5.12", 4, "320"),  # sgl-project/sglang#26107
    ("qwen3-8b", "h100x2", "vllm", 2, "qwen3-8b has no experts"),  # _verify_with_expert_parallelism
    ("deepseek-v4-pro", "mi300xx16", "vllm", 16, "192"),  # its class for AMD pads nothing (models/deepseek_v4/amd)
    ("deepseek-r1", "h100x32", "sglang", None, "576"),  # sgl-project/sglang#3345
    # The checks in SGLang 0.5.23 (layers/quantization/fp8.py).
    ("Qwen/Qwen3-235B-A22B-FP8", "h200x8", "sglang", None, "192"),
    ("Qwen/Qwen3-Coder-480B-A35B-Instruct-FP8", "h200x8", "sglang", None, "320"),
    ("MiniMaxAI/MiniMax-M2.5", "h200x8", "sglang", None, "192"),
    ("Qwen/Qwen3-30B-A3B-FP8", "h100x4", "sglang", None, "192"),
    ("Qwen/Qwen3-30B-A3B-FP8", "h100x8", "sglang", None, "96"),
    # get_min_capability of the methods, and the engines' own.
    ("gpt-oss-20b", "t4", "vllm", None, "8.0"),
    ("gpt-oss-20b", "t4", "sglang", None, "8.0"),
    ("llama-3.1-8b", "v100-32gb", "sglang", None, "7.5"),
    ("llama-3.1-8b", "t4", "tensorrt-llm", None, "8.0"),
    ("nvidia/Llama-3.1-8B-Instruct-FP8", "a100-80gb", "sglang", None, "8.9"),
    ("nvidia/Llama-3.1-8B-Instruct-FP8", "a100-80gb", "vllm@0.25", None, "8.9"),
    ("nvidia/Qwen3-8B-NVFP4", "h100", "tensorrt-llm", None, "10.0"),
    ("RedHatAI/Qwen3-32B-quantized.w4a16", "t4x4", "vllm@0.9.1", None, "8.0"),  # vllm-project/vllm#20216
    ("deepseek-v3.2", "a100-80gbx16", "vllm", None, "9.x"),
]


@pytest.mark.parametrize(("model", "gpu", "engine", "ep", "text"), REFUSED)
def test_what_an_engine_refuses_is_refused_with_its_reason(
    model: str, gpu: str, engine: str, ep: int | None, text: str
) -> None:
    with pytest.raises(LayoutError, match="does not start") as error:
        start(model, gpu, engine, ep)
    assert text in error.value.message
    assert error.value.exit_code == 2


# Backends of --attention-backend that a release refuses, with a cache of the type: validate_configuration of vLLM's
# backends, and SGLang's attention_registry.py.
BACKENDS = [
    ("deepseek-r1", "h200x8", "vllm", "CUTLASS_MLA", "auto", "no kernels for h200-sxm"),
    ("deepseek-r1", "b200x8", "vllm", "FLASHMLA", "auto", "no kernels"),
    ("deepseek-r1", "h200x8", "vllm", "FLASHINFER", "auto", "not for MLA"),
    ("deepseek-r1", "h200x8", "vllm", "FLASH_ATTN_MLA", "fp8", "a cache in fp8"),
    ("deepseek-r1", "h200x8", "vllm@0.17", "triton_mla", "fp8", "a cache in fp8"),
    ("deepseek-v3.2", "h200x8", "vllm", "FLASHMLA", "auto", "not for sparse"),
    ("deepseek-r1", "h200x8", "vllm", "FLASHMLA_SPARSE", "auto", "is for sparse"),
    ("llama-3.1-8b", "h100", "vllm", "FLASHMLA", "auto", "not for keys and values"),
    ("llama-3.1-8b", "a100-80gb", "vllm", "FLASH_ATTN", "fp8", "a cache in fp8"),
    ("llama-3.1-8b", "b200", "vllm@0.22", "FLASH_ATTN", "fp8", "a cache in fp8"),
    ("gpt-oss-20b", "a100-80gb", "vllm", "FLASH_ATTN", "auto", "sinks"),
    ("gpt-oss-20b", "h100", "vllm@0.28", "FLASHINFER", "auto", "sinks"),
    ("gpt-oss-20b", "h100", "sglang", "flashinfer", "auto", "sinks"),
    ("gemma-4-31b", "h200", "vllm@0.20", "FLASHINFER", "auto", "no heads of 512"),
    ("deepseek-r1", "a100-80gbx16", "sglang", "fa3", "auto", "no kernels"),
    ("llama-3.1-8b", "b200", "sglang", "fa3", "auto", "no kernels"),
    ("deepseek-r1", "h200x8", "sglang", "trtllm_mla", "auto", "no kernels"),
    ("llama-3.1-8b", "b200", "sglang", "trtllm_mla", "auto", "not for keys and values"),
]


def with_backend(model: str, gpu: str, engine: str, backend: str, kv_dtype: str = "auto") -> Mapping[str, Any]:
    devices = kvcalc.find_devices(gpu)
    return kvcalc.fit(
        model, devices, context_tokens=4096, engine=engine, engine_settings={"attention-backend": backend},
        kv_dtype=kv_dtype, tensor_parallel_size=devices.num_devices, dtype="nvfp4" if "a100" in gpu and "r1" in model
        else None,
    )  # fmt: skip


@pytest.mark.parametrize(("model", "gpu", "engine", "backend", "kv_dtype", "text"), BACKENDS)
def test_a_backend_that_the_release_refuses_is_refused(
    model: str, gpu: str, engine: str, backend: str, kv_dtype: str, text: str
) -> None:
    with pytest.raises(LayoutError, match="does not start: --attention-backend") as error:
        with_backend(model, gpu, engine, backend, kv_dtype)
    assert text in error.value.message


@pytest.mark.parametrize(
    ("model", "gpu", "engine", "backend", "kv_dtype"),
    [
        ("deepseek-r1", "h200x8", "vllm", "FLASHMLA", "auto"),
        ("deepseek-r1", "b200x8", "vllm", "CUTLASS_MLA", "fp8"),
        ("deepseek-r1", "h200x8", "vllm", "triton_mla", "fp8"),
        ("deepseek-v3.2", "h200x8", "vllm", "FLASHMLA_SPARSE", "auto"),
        ("llama-3.1-8b", "b200", "vllm", "FLASH_ATTN", "fp8"),
        ("llama-3.1-8b", "l40s", "vllm", "FLASHINFER", "fp8"),
        ("gpt-oss-20b", "a100-80gb", "vllm", "TRITON_ATTN", "auto"),
        ("gpt-oss-20b", "h100", "vllm", "FLASHINFER", "auto"),
        ("gpt-oss-20b", "h100", "sglang", "fa3", "auto"),
        ("gemma-4-31b", "h200", "vllm", "FLASHINFER", "auto"),
        ("llama-3.1-8b", "mi300x", "vllm", "ROCM_AITER_FA", "auto"),
        ("llama-3.1-8b", "mi300x", "vllm", "FLASH_ATTN", "fp8"),  # AMD's kernels are not judged
        ("llama-3.1-8b", "a100-80gb", "sglang", "fa3", "auto"),
        ("deepseek-v4-flash", "h200x4", "vllm", "FLASHMLA_SPARSE_DSV4", "auto"),
    ],
)
def test_a_backend_that_the_release_has_is_not(model: str, gpu: str, engine: str, backend: str, kv_dtype: str) -> None:
    assert with_backend(model, gpu, engine, backend, kv_dtype)["fit"]


# Servers that ran, and what newer releases let through.
STARTED = [
    ("Qwen/Qwen3-235B-A22B-FP8", "h200x8", "vllm", None),  # blocks of experts are refined
    ("MiniMaxAI/MiniMax-M2.5", "h200x8", "vllm@0.29", None),
    ("deepseek-v4-pro", "h20x16", "vllm@0.24", 16),  # its shared experts are padded (vllm-project/vllm#46001)
    ("inclusionAI/Ling-3.0-flash-fp8", "h200x4", "vllm", 4),  # so are these (Ling-3.0-flash of vllm-project/recipes)
    ("MiniMaxAI/MiniMax-M2.5", "h200x4", "sglang", None),
    ("Qwen/Qwen2-VL-72B-Instruct-AWQ", "a100-80gbx2", "vllm", None),  # its MLP is padded
    ("Qwen/Qwen2.5-72B-Instruct-AWQ", "a100-80gbx8", "vllm", None),
    ("Qwen/Qwen3-30B-A3B-GPTQ-Int4", "h100x8", "vllm", None),  # the groups of experts are divided
    ("Qwen/Qwen3-235B-A22B-FP8", "h200x8", "sglang", 8),  # whole experts
    ("Qwen/Qwen3-30B-A3B-FP8", "h100x2", "sglang", None),
    ("deepseek-r1", "h200x8", "sglang", None),
    ("deepseek-r1", "h100x16", "sglang", None),  # benchmark/deepseek_v3 in sgl-project/sglang
    ("deepseek-v3.2", "h200x8", "vllm", None),
    ("zai-org/GLM-4.6-FP8", "h200x8", "sglang", None),  # has no blocks
    ("XiaomiMiMo/MiMo-V2-Flash", "h200x8", "sglang", None),  # its queries, keys and values are not checked
    ("gpt-oss-20b", "a100-80gb", "vllm", None),
    ("llama-3.1-8b", "t4", "vllm", None),  # computes in fp16
    ("nvidia/Llama-3.1-8B-Instruct-FP8", "a100-80gb", "vllm", None),
]


@pytest.mark.parametrize(("model", "gpu", "engine", "ep"), STARTED)
def test_what_an_engine_starts_is_not_refused(model: str, gpu: str, engine: str, ep: int | None) -> None:
    assert start(model, gpu, engine, ep)["fit"]["device_bytes"] > 0


def test_the_hint_names_layouts_that_start() -> None:
    with pytest.raises(LayoutError) as error:
        start("Qwen/Qwen3-30B-A3B-FP8", "h100x8", "sglang")
    assert error.value.hint == "use --tp 2 or --ep 8"
    assert start("Qwen/Qwen3-30B-A3B-FP8", "h100x2", "sglang")["fit"]["fits"]
    assert start("Qwen/Qwen3-30B-A3B-FP8", "h100x8", "sglang", 8)["fit"]["fits"]


def test_bf16_is_refused_where_it_is_asked_for() -> None:
    devices = kvcalc.find_devices("t4")
    with pytest.raises(LayoutError, match=r"--dtype bf16 needs a compute capability of 8\.0, and t4 has 7\.5"):
        kvcalc.fit("llama-3.2-1b", devices, engine="vllm", dtype="bf16")
    assert kvcalc.fit("llama-3.2-1b", devices, engine="vllm", dtype="fp16")["fit"]["fits"]


def test_an_fp8_cache_needs_kernels_for_it() -> None:
    """1CatAI/1Cat-vLLM#27: fp8e4nv is not supported on a V100."""
    devices = kvcalc.find_devices("v100-32gb")
    with pytest.raises(LayoutError, match=r"a cache in fp8 needs a compute capability of 8\.0"):
        kvcalc.fit("llama-3.2-1b", devices, engine="vllm", dtype="fp16", kv_dtype="fp8")
    assert kvcalc.fit("llama-3.2-1b", devices, engine="vllm", dtype="fp16")["fit"]["fits"]


def test_mla_needs_kernels_for_an_fp8_cache() -> None:
    """vllm-project/vllm#32732, #35577: Triton's, the only ones for SM 12.0, have none before 0.18. #47060: Ampere."""
    asked: Any = {"kv_dtype": "fp8", "context_tokens": 4096}
    for gpu, engine in (("rtx-pro-6000", "vllm@0.14.0"), ("l40s", "vllm@0.17.1"), ("a100-80gb", "vllm")):
        with pytest.raises(LayoutError, match="MLA has kernels for a cache in fp8 for compute capability"):
            kvcalc.fit("deepseek-v2-lite", kvcalc.find_devices(gpu), engine=engine, **asked)
    for gpu, engine in (
        ("rtx-pro-6000", "vllm@0.18.0"),
        ("h100", "vllm@0.14.0"),
        ("l40s", "vllm"),
        ("b200", "vllm@0.12.0"),
    ):
        assert kvcalc.fit("deepseek-v2-lite", kvcalc.find_devices(gpu), engine=engine, **asked)["fit"]["fits"]
    for model in ("llama-3.2-1b", "minicpm3-4b"):
        assert kvcalc.fit(model, kvcalc.find_devices("a100-80gb"), engine="vllm", **asked)["fit"]["fits"]


@pytest.mark.parametrize(
    ("engine", "settings", "hint"),
    [
        ("vllm", {"max_lora_rank": "24"}, "use 32"),
        ("vllm", {"max_num_seqs": "20000"}, "--max-num-batched-tokens 20000"),
        ("tensorrt-llm", {"tokens_per_block": "48"}, "use 32"),
        # AssertionError: chunked_prefill_size must be divisible by page_size (sgl-project/sglang#8935).
        ("sglang", {"chunked_prefill_size": "1000", "page_size": "64"}, "--chunked-prefill-size 960"),
    ],
)
def test_settings_with_which_an_engine_does_not_start(engine: str, settings: dict[str, str], hint: str) -> None:
    with pytest.raises(LayoutError, match="not start") as error:
        start("llama-3.1-8b", "h100", engine, None, **settings)
    assert error.value.hint == hint


@pytest.mark.parametrize(
    ("model", "release", "starts"),
    [
        ("llama-4-maverick", "0.8.3", False),  # vllm-project/vllm#16231
        ("llama-4-maverick", "0.8.5", True),
        ("minimax-m3", "0.24", False),  # vllm-project/vllm#45455
        ("minimax-m3", "0.25", True),
        ("gemma-3n-e4b", "0.33", False),
    ],
)
def test_models_without_pipeline_stages(model: str, release: str, starts: bool) -> None:
    size = 1 if model == "gemma-3n-e4b" else 4
    asked: dict[str, Any] = {"context_tokens": 4096, "tensor_parallel_size": size, "pipeline_parallel_size": 2}
    devices = kvcalc.find_devices(f"b200x{size * 2}")
    if starts:
        assert kvcalc.fit(model, devices, engine=f"vllm@{release}", **asked)["fit"]["device_bytes"]
        return
    with pytest.raises(LayoutError, match="has no pipeline stages"):
        kvcalc.fit(model, devices, engine=f"vllm@{release}", **asked)


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        # verl-project/verl#7624
        ("vllm serve llama-3.2-1b --no-enable-chunked-prefill --max-num-batched-tokens 8192", "fewer than the 131,072"),
        # llm-d/llm-d-inference-sim#76
        ("vllm serve llama-3.2-1b --enable-lora --max-loras 4 --max-cpu-loras 2", "--max-cpu-loras 2"),
        (
            "python -m sglang.launch_server --model-path llama-3.2-1b --tp 2 --dp 4 --enable-dp-attention",
            "multiple of 4",
        ),
    ],
)
def test_commands_that_are_refused(command: str, reason: str) -> None:
    with pytest.raises(KvcalcError, match=reason) as error:
        check(choose_server(command, None), kvcalc.find_devices("h100x4"))
    assert error.value.exit_code == 4
    assert "not start" in error.value.message


def test_a_plan_leaves_out_what_does_not_start() -> None:
    found = kvcalc.plan(
        "Qwen/Qwen3-30B-A3B-FP8", input_tokens=1000, output_tokens=200, gpus=["h100"], engine="sglang",
        requests_per_second=2.0,
    )  # fmt: skip
    assert found["best"] is not None
    assert found["best"]["tensor_parallel_size"] in (1, 2)


def test_a_plan_without_a_layout_says_what_the_engine_refuses() -> None:
    asked: dict[str, Any] = {"input_tokens": 1000, "output_tokens": 100, "requests_per_second": 1.0, "engine": "vllm"}
    found = kvcalc.plan("Qwen/Qwen3-8B-FP8", gpus=["v100-32gb"], **asked)
    assert "weights in fp8 need a compute capability of 7.5" in str(found["plans"][0]["reason"])
    split = kvcalc.plan("Qwen/Qwen3-8B-FP8", gpus=["v100-32gb"], disaggregate=True, transfer="infiniband-400g", **asked)
    assert "weights in fp8 need a compute capability of 7.5" in str(split["plans"][0]["reason"])
    by_block = {**asked, "engine_settings": {"block-size": "24"}}
    found = kvcalc.plan("llama-3.1-8b", gpus=["h100"], **by_block)
    assert found["plans"][0]["hint"] == "use --block-size 16"


@pytest.mark.parametrize(
    "method", ["", ' --speculative-config \'{"method": "ernie_mtp", "num_speculative_tokens": 1}\'']
)
def test_check_says_that_too_few_devices_are_given_with_an_unknown_drafter_too(method: str) -> None:
    command = f"vllm serve baidu/ERNIE-4.5-300B-A47B-PT --tensor-parallel-size 16{method}"
    with pytest.raises(KvcalcError, match="does not start: 8 devices with --tensor-parallel-size 16") as error:
        check(choose_server(command, None), kvcalc.find_devices("h200x8"))
    assert error.value.exit_code == 4


def test_check_counts_a_step_as_large_as_the_context_if_prompts_are_not_divided() -> None:
    command = "vllm serve llama-3.1-8b --no-enable-chunked-prefill --max-model-len"
    for context, step in (("4096", 8192), ("16384", 16384)):
        found: Any = check(choose_server(f"{command} {context}", None), kvcalc.find_devices("h100"))
        assert found["starts"]
        assert found["engine"]["max_num_batched_tokens"] == step


@pytest.mark.parametrize(("engine", "gpu", "step"), [("vllm@0.20", "b200", 8192), ("vllm@0.33", "b200", 16384)])
def test_every_command_counts_a_step_as_large_as_the_context(engine: str, gpu: str, step: int) -> None:
    """The default of the release and the device, or the context if that is more."""
    devices = kvcalc.find_devices(gpu)
    whole = {"no-enable-chunked-prefill": "true"}
    for context in (4096, 65536):
        asked: Any = {"context_tokens": context, "engine": engine, "engine_settings": whole}
        found: Any = kvcalc.fit("llama-3.1-8b", devices, **asked)
        assert found["engine"]["max_num_batched_tokens"] == max(step, context)
    alone: Any = kvcalc.estimate("llama-3.1-8b", context_tokens=65536, engine=engine, engine_settings=whole)
    assert alone["engine"]["max_num_batched_tokens"] == 65536


def test_requests_do_not_change_the_step_of_a_server_that_divides_no_prompt() -> None:
    command = choose_server("vllm serve llama-3.1-8b --no-enable-chunked-prefill --max-model-len 65536", None)
    found: Any = check(command, kvcalc.find_devices("h100"), input_tokens=1000, output_tokens=100)
    divided = choose_server("vllm serve llama-3.1-8b --max-num-batched-tokens 65536 --max-model-len 65536", None)
    same: Any = check(divided, kvcalc.find_devices("h100"), input_tokens=1000, output_tokens=100)
    assert found["requests"] == same["requests"]


@pytest.mark.parametrize(
    ("model", "method", "text"),
    [
        ("Qwen/Qwen3-8B", "awq", "not quantized"),  # get_quant_config, model_loader/weight_utils.py
        ("Qwen/Qwen3-8B", "gptq_marlin", "not quantized"),
        # _verify_quantization, config/model.py
        ("Qwen/Qwen3-8B-AWQ", "fp8", "in awq"),
        ("Qwen/Qwen3-8B-AWQ", "gptq", "in awq"),
        ("RedHatAI/Qwen3-8B-FP8-dynamic", "fp8", "in compressed-tensors"),
        ("Qwen/Qwen3-8B", "fp8", None),
        ("Qwen/Qwen3-8B", "bitsandbytes", None),
        ("Qwen/Qwen3-8B-AWQ", "awq_marlin", None),
        ("Qwen/Qwen3-8B-AWQ", "moe_wna16", None),
        ("Qwen/Qwen3-8B-FP8", "fp8", None),
        ("RedHatAI/Qwen3-8B-FP8-dynamic", "compressed-tensors", None),
        ("nvidia/Qwen3-8B-NVFP4", "modelopt_fp4", None),
    ],
)
def test_a_method_of_quantization_must_be_that_of_the_checkpoint(model: str, method: str, text: str | None) -> None:
    command, devices = choose_server(f"vllm serve {model} --quantization {method}", None), kvcalc.find_devices("b200")
    if text is None:
        assert check(command, devices)["starts"]
        return
    with pytest.raises(KvcalcError, match=f"--quantization {method}: vLLM does not start") as error:
        check(command, devices)
    assert text in error.value.message
    assert error.value.exit_code == 4


def test_tensorrt_llm_lowers_a_context_beyond_its_cache() -> None:
    """KVCacheManager, _torch/pyexecutor/resource_manager.py."""
    command = choose_server("trtllm-serve nvidia/Llama-3.3-70B-Instruct-FP8", None)
    found = check(command, kvcalc.find_devices("h100"))
    assert found["starts"]
    assert not found["fit"]["fits"]
    assert 0 < (found["fit"]["max_context_tokens"] or 0) < 131_072


def test_check_answers_a_block_that_no_kernel_of_the_device_reads() -> None:
    command = choose_server("vllm serve deepseek-v3 --tensor-parallel-size 8 --block-size 1", None)
    assert check(command, kvcalc.find_devices("mi300xx8"))["starts"]
    with pytest.raises(KvcalcError, match="does not start: --block-size 1") as error:
        check(command, kvcalc.find_devices("h200x8"))
    assert error.value.exit_code == 4


def test_check_says_why_a_server_does_not_start() -> None:
    command = "python -m sglang.launch_server --model-path Qwen/Qwen3-235B-A22B-FP8 --tp 8"
    with pytest.raises(KvcalcError, match=r"SGLang 0\.5\.23 does not start") as error:
        check(choose_server(command, None), kvcalc.find_devices("h200x8"))
    assert error.value.exit_code == 4


@pytest.mark.parametrize("engine", ["vllm", "sglang", "tensorrt-llm"])
def test_an_encoder_is_checked_under_the_newest_stable_release(engine: str) -> None:
    versions = {
        kvcalc.estimate(model, engine=engine, devices=kvcalc.find_devices("rtx-5090"))["engine"]["version"]
        for model in ("bge-m3", "qwen3-0.6b")
    }
    assert len(versions) == 1
    assert None not in versions
