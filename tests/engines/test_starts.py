"""What engines refuse to start, and that published servers that ran are not refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest

import kvcalc
from kvcalc.engines.attention_backends import Backend, refusals
from kvcalc.engines.starts import Rules, Start, backend_block
from kvcalc.engines.starts import check as check_start
from kvcalc.errors import DoesNotFitError, KvcalcError, LayoutError, UsageError
from kvcalc.memory.dtypes import DTYPES
from kvcalc.model.layout import Layout
from kvcalc.planning.check.answer import check
from kvcalc.planning.check.servers import choose_server
from kvcalc.question.question import SpeedQuestion
from kvcalc.throughput.hardware import find_gpu

_REFUSALS = (DoesNotFitError, LayoutError)


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
    with pytest.raises(_REFUSALS, match="does not start") as error:
        start(model, gpu, engine, ep)
    assert text in error.value.message
    assert error.value.exit_code == 4


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
    with pytest.raises(_REFUSALS, match="does not start: --attention-backend") as error:
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
    with pytest.raises(_REFUSALS) as error:
        start("Qwen/Qwen3-30B-A3B-FP8", "h100x8", "sglang")
    assert error.value.hint == "use --tp 2 or --ep 8"
    assert start("Qwen/Qwen3-30B-A3B-FP8", "h100x2", "sglang")["fit"]["fits"]
    assert start("Qwen/Qwen3-30B-A3B-FP8", "h100x8", "sglang", 8)["fit"]["fits"]


def test_bf16_is_refused_where_it_is_asked_for() -> None:
    devices = kvcalc.find_devices("t4")
    with pytest.raises(
        (DoesNotFitError, LayoutError), match=r"--dtype bf16 needs a compute capability of 8\.0, and t4 has 7\.5"
    ):
        kvcalc.fit("llama-3.2-1b", devices, engine="vllm", dtype="bf16")
    assert kvcalc.fit("llama-3.2-1b", devices, engine="vllm", dtype="fp16")["fit"]["fits"]


def test_an_fp8_cache_needs_kernels_for_it() -> None:
    """1CatAI/1Cat-vLLM#27: fp8e4nv is not supported on a V100."""
    devices = kvcalc.find_devices("v100-32gb")
    with pytest.raises(_REFUSALS, match=r"a cache in fp8 needs a compute capability of 8\.0"):
        kvcalc.fit("llama-3.2-1b", devices, engine="vllm", dtype="fp16", kv_dtype="fp8")
    assert kvcalc.fit("llama-3.2-1b", devices, engine="vllm", dtype="fp16")["fit"]["fits"]


def test_mla_needs_kernels_for_an_fp8_cache() -> None:
    """vllm-project/vllm#32732, #35577: Triton's, the only ones for SM 12.0, have none before 0.18. #47060: Ampere."""
    asked: Any = {"kv_dtype": "fp8", "context_tokens": 4096}
    for gpu, engine in (("rtx-pro-6000", "vllm@0.14.0"), ("l40s", "vllm@0.17.1"), ("a100-80gb", "vllm")):
        with pytest.raises(
            (DoesNotFitError, LayoutError), match="MLA has kernels for a cache in fp8 for compute capability"
        ):
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
    with pytest.raises(_REFUSALS, match="not start") as error:
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
    with pytest.raises(_REFUSALS, match="has no pipeline stages"):
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


def start_of(
    model: str, gpu: str | None = "h100", tp: int = 1, dtype: str | None = None, kv_dtype: str = "bf16", **sizes: Any
) -> Start:
    layout, device = Layout(tp, **sizes), None if gpu is None else find_gpu(gpu)
    return Start(kvcalc.load_model(model), DTYPES[kv_dtype], layout, frozenset(), dtype, device)


def refused(begun: Start, rules: Rules, backend: str | None = None) -> tuple[str | None, str | None]:
    """Why an engine with these rules does not start, and its hint; nothing if it does."""
    try:
        check_start(begun, rules, "an engine", backend)
    except LayoutError as error:
        return error.message.removeprefix("an engine does not start: "), error.hint
    return None, None


Asked = Callable[[], Start]
FP8, LLAMA = "Qwen/Qwen3-8B-FP8", "llama-3.1-8b"


def asked(model: str, gpu: str | None = "h100", **options: Any) -> Asked:
    """The server of `start_of`, made when the test runs."""
    return partial(start_of, model, gpu, **options)


@pytest.mark.parametrize(
    ("begun", "rules", "reason"),
    [
        # A capability is enough if it is the least one.
        (asked(LLAMA, "t4"), Rules(capabilities={"": 75}), None),
        (asked(LLAMA, "t4"), Rules(capabilities={"": 76}), "it needs a compute capability of 7.6, and t4"),
        (asked(LLAMA, None), Rules(capabilities={"": 999}), None),
        (asked(LLAMA, "mi300x"), Rules(capabilities={"": 999}), None),
        # The method of the checkpoint, with its type or without; or the type that is asked for.
        (asked(FP8, "a100-80gb"), Rules(capabilities={"fp8": 80}), None),
        (asked(FP8, "a100-80gb"), Rules(capabilities={"fp8": 89}), "need a compute capability of 8.9, and"),
        (asked(FP8, "a100-80gb"), Rules(capabilities={"fp8 fp8": 89}), "weights in fp8 need"),
        (asked(FP8, "a100-80gb"), Rules(capabilities={"awq": 89}), None),
        (asked(LLAMA, "a100-80gb", dtype="fp8"), Rules(capabilities={"fp8": 89}), "weights in fp8 need"),
        (asked(FP8, "a100-80gb", dtype="bf16"), Rules(capabilities={"fp8": 89}), None),
        (asked(LLAMA, "t4", dtype="bf16"), Rules(bf16=80), "--dtype bf16 needs a compute capability of 8.0"),
        (asked(LLAMA, "t4", dtype="fp16"), Rules(bf16=80), None),
        (asked(LLAMA, "a100-80gb", dtype="bf16"), Rules(bf16=80), None),
        (asked(LLAMA, "t4", kv_dtype="fp8"), Rules(fp8_cache=80), "a cache in fp8 needs"),
        (asked(LLAMA, "t4"), Rules(fp8_cache=80), None),
        (asked(LLAMA, "t4", kv_dtype="fp8"), Rules(fp8_cache=75), None),
        # Kernels for latents: those that read all rows in fp8, and sparse ones.
        (asked("deepseek-v3", kv_dtype="fp8"), Rules(latent_fp8=[89, 100]), "for compute capability 8.9, 10.0, and"),
        (asked("deepseek-v3", kv_dtype="fp8"), Rules(latent_fp8=[90]), None),
        (asked("deepseek-v3", kv_dtype="fp8"), Rules(), None), (asked("deepseek-v3"), Rules(latent_fp8=[89]), None),
        (asked("deepseek-v3.2", kv_dtype="fp8"), Rules(latent_fp8=[89]), None),
        (asked(LLAMA, kv_dtype="fp8"), Rules(latent_fp8=[89]), None),
        (asked("deepseek-v3.2"), Rules(sparse_latent=[8, 10]), "for compute capability 8.x, 10.x, and"),
        (asked("deepseek-v3.2"), Rules(sparse_latent=[9]), None),
        (asked("deepseek-v3"), Rules(sparse_latent=[8]), None),
        # Layouts.
        (asked(LLAMA, pipeline_parallel_size=2), Rules(no_stages={"llama": True}), "--pp 2: its llama has no"),
        (asked(LLAMA, pipeline_parallel_size=2), Rules(no_stages={"llama": False, "gpt2": True}), None),
        (asked(LLAMA), Rules(no_stages={"llama": True}), None),
        (asked("qwen3-8b", expert_parallel_size=2), Rules(needs_experts=True), "--ep 2: qwen3-8b has no experts"),
        (asked("qwen3-8b", expert_parallel_size=2), Rules(), None),
        (asked("qwen3-8b"), Rules(needs_experts=True), None),
        (asked("qwen3-30b-a3b", expert_parallel_size=2), Rules(needs_experts=True), None),
    ],
)  # fmt: skip
def test_each_check_of_a_device_and_a_layout(begun: Asked, rules: Rules, reason: str | None) -> None:
    found, _ = refused(begun(), rules)
    assert found is None if reason is None else reason in str(found)


EXPERTS = "Qwen/Qwen3-30B-A3B-FP8"  # experts of 768, six blocks of 128


@pytest.mark.parametrize(
    ("begun", "rules", "reason"),
    [
        # On 64 ranks, each has 64 of the 4,096 outputs of q_proj and inputs of o_proj, and 192 of the MLP's 12,288.
        (asked(FP8, tp=64), Rules(), "64 of the 4,096 outputs of self_attn.q_proj"),
        (asked(FP8, tp=64), Rules(joined=False), "64 of the 4,096 inputs of self_attn.o_proj"),
        (asked(FP8, tp=64), Rules(inputs=False, joined=False), None),
        (asked(FP8, tp=64), Rules(outputs=False, experts=False), "outputs of self_attn.q_proj"),
        (asked(FP8, tp=64), Rules(unchecked={"qwen3": ["q_proj", "o_proj"]}), "192 of the 12,288 outputs of mlp.gate"),
        (asked(FP8, tp=64), Rules(unchecked={"llama": ["q_proj"]}), "outputs of self_attn.q_proj"),
        (asked(FP8, tp=64), Rules(padded={"qwen3": ["q_proj"]}), "inputs of self_attn.o_proj"),
        (asked(FP8, "mi300x", tp=64), Rules(padded={"qwen3": ["q_proj"]}), "outputs of self_attn.q_proj"),
        # 32 ranks have whole blocks, and eight of them share a KV head. Other weights have no blocks.
        (asked(FP8, tp=32), Rules(), None), (asked(FP8, tp=64, dtype="bf16"), Rules(), None),
        (asked("qwen3-8b", tp=64), Rules(), None),
        # Blocks of experts may be refined to the largest size that divides both.
        (asked(EXPERTS, tp=4), Rules(), "192 of the 768 outputs of mlp.experts"),
        (asked(EXPERTS, tp=4), Rules(experts=False), None), (asked(EXPERTS, tp=4), Rules(least_block=64), None),
        (asked(EXPERTS, tp=4), Rules(least_block=65), "192 of the 768"),
        (asked(EXPERTS, tp=4, expert_parallel_size=4), Rules(), None),
        (asked(EXPERTS, tp=4, expert_parallel_size=2), Rules(), None),
        (asked(EXPERTS, tp=2, data_parallel_size=2), Rules(), "192 of the 768"),
    ],
)  # fmt: skip
def test_each_device_has_whole_blocks_of_fp8(begun: Asked, rules: Rules, reason: str | None) -> None:
    found, _ = refused(begun(), rules)
    assert found is None if reason is None else reason in str(found)


SMALL = {
    "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 1024, "num_attention_heads": 8, "vocab_size": 1024,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "tp", "reason"),
    [
        ({**SMALL, "intermediate_size": 256}, 4, "64 of the 256 outputs of mlp.gate"),
        ({**SMALL, "intermediate_size": 256}, 2, None),
        # Checkpoints keep a matrix in 16 bits if it has one block of rows or no whole blocks.
        ({**SMALL, "intermediate_size": 128}, 2, None),
        ({**SMALL, "intermediate_size": 320}, 2, None),
    ],
)  # fmt: skip
def test_only_matrices_of_several_whole_blocks_have_scales(
    config: dict[str, object], tp: int, reason: str | None
) -> None:
    spec = kvcalc.read_config(config, "small", "")
    begun = Start(spec, DTYPES["bf16"], Layout(tp), frozenset(), None, find_gpu("h100"))
    found, _ = refused(begun, Rules(inputs=False))
    assert found is None if reason is None else reason in str(found)


@pytest.mark.parametrize(
    ("intermediate", "reason"),
    [(512, None), (384, "192 of the 384 inputs of mlp.down_proj, which are no whole groups")],
)
def test_each_device_has_whole_groups_of_the_inputs_that_are_divided(intermediate: int, reason: str | None) -> None:
    """The 384 inputs of q_proj are three groups of 128, and each of two devices has all of them."""
    config: dict[str, object] = {
        **SMALL, "hidden_size": 384, "num_attention_heads": 4, "head_dim": 128, "intermediate_size": intermediate,
        "quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128},
    }  # fmt: skip
    spec = kvcalc.read_config(config, "small", "")
    begun = Start(spec, DTYPES["bf16"], Layout(2), frozenset(), None, find_gpu("h100"))
    found, _ = refused(begun, Rules(groups=["awq"]))
    assert found is None if reason is None else reason in str(found)
    assert refused(begun, Rules(groups=["gptq"])) == (None, None)


def test_a_hint_is_the_largest_smaller_size_that_starts() -> None:
    assert refused(start_of(FP8, tp=64), Rules())[1] == "use --tp 32"
    assert refused(start_of(EXPERTS, tp=4), Rules())[1] == "use --tp 2 or --ep 4"
    assert refused(start_of(EXPERTS, tp=2, data_parallel_size=2), Rules())[1] == "use --tp 1 or --ep 4"
    assert refused(start_of(LLAMA, "t4", dtype="bf16"), Rules(bf16=80))[1] == "--dtype fp16"


@pytest.mark.parametrize(
    ("model", "gpu", "kv_dtype", "facts", "reasons"),
    [
        (LLAMA, "h100", "fp8", {}, []), (LLAMA, "h100", "bf16", {"latent": False}, []),
        (LLAMA, "h100", "bf16", {"latent": True, "devices": []}, ["is not for keys and values"]),
        ("deepseek-v3", "h100", "bf16", {"latent": False}, ["is not for MLA"]),
        ("deepseek-v3", "h100", "bf16", {"latent": True}, []),
        ("deepseek-v3", "h100", "bf16", {"latent": True, "sparse": True}, ["is for sparse latent attention"]),
        ("deepseek-v3.2", "h100", "bf16", {"latent": True}, ["is not for sparse latent attention"]),
        ("deepseek-v3.2", "h100", "bf16", {"latent": True, "sparse": True}, []),
        ("deepseek-v3.2", "h100", "bf16", {}, []),
        # Devices. If none is known, only an empty list rules it out.
        (LLAMA, "h100", "bf16", {"devices": [80]}, ["has no kernels for h100-sxm"]),
        (LLAMA, "h100", "bf16", {"devices": [80, 90]}, []), (LLAMA, None, "bf16", {"devices": [80]}, []),
        (LLAMA, None, "bf16", {"devices": []}, ["has no kernels for"]),
        (LLAMA, "h100", "bf16", {"devices": [80], "latent_devices": [90]}, ["has no kernels"]),
        ("deepseek-v3", "h100", "bf16", {"devices": [80], "latent_devices": [90]}, []),
        ("deepseek-v3", "h100", "bf16", {"devices": [80]}, ["has no kernels"]),
        # A cache in fp8, sinks and heads.
        (LLAMA, "h100", "fp8", {"fp8": [80]}, ["does not read a cache in fp8"]),
        (LLAMA, "h100", "fp8", {"fp8": [90]}, []), (LLAMA, "h100", "bf16", {"fp8": []}, []),
        ("gpt-oss-20b", "h100", "bf16", {"sinks": [100]}, ["has no attention sinks here, which gpt-oss-20b has"]),
        ("gpt-oss-20b", "h100", "bf16", {"sinks": [90]}, []), (LLAMA, "h100", "bf16", {"sinks": []}, []),
        ("gpt-oss-20b", "h100", "bf16", {"heads": [128, 256]}, ["has no heads of 64"]),
        ("gemma-4-31b", "h100", "bf16", {"heads": [64]}, ["has no heads of 256"]),
        (LLAMA, "h100", "bf16", {"heads": [64, 128]}, []),
        ("gpt-oss-20b", "h100", "fp8", {"devices": [80], "fp8": [], "sinks": [], "heads": [1]},
         ["has no kernels", "a cache in fp8", "no attention sinks", "no heads of 64"]),
        # Caches with kernels of their own, and models without attention, are not judged.
        ("deepseek-v4-flash", "h100", "fp8", {"devices": []}, []),
        ("mamba-2.8b", "h100", "bf16", {"devices": []}, []),
        ("qwen3.6-27b", "h100", "bf16", {"devices": []}, ["has no kernels"]),
    ],
)  # fmt: skip
def test_what_a_backend_is_for(
    model: str, gpu: str | None, kv_dtype: str, facts: dict[str, Any], reasons: list[str]
) -> None:
    device = None if gpu is None else find_gpu(gpu)
    found = [text for text, _ in refusals(kvcalc.load_model(model), device, kv_dtype, "X", Backend(**facts))]
    assert len(found) == len(reasons)
    assert all(text.startswith("--attention-backend X ") and reason in text for text, reason in zip(found, reasons))


def test_the_backend_that_is_named_is_judged_in_any_case() -> None:
    rules = Rules(backends={"FLASHMLA": {"latent": True}})
    for name in ("FLASHMLA", "flashmla"):
        reason, _ = refused(start_of(LLAMA), rules, name)
        assert reason == "--attention-backend FLASHMLA is not for keys and values"
    assert refused(start_of(LLAMA), rules, "OTHER") == refused(start_of(LLAMA), rules) == (None, None)
    assert refused(start_of(LLAMA, "mi300x"), rules, "FLASHMLA") == (None, None)
    assert backend_block("vllm", None, "cutlass_mla") == 128
    assert backend_block("vllm", None, "FLASH_ATTN") is backend_block("vllm", None, "OTHER") is None


@pytest.mark.parametrize("engine", ["vllm", "sglang", "tensorrt-llm"])
def test_devices_whose_rules_are_others_are_refused_by_name(engine: str) -> None:
    # vLLM for TPUs keeps all tokens in every layer and counts the memory of all chips (tpu-inference 0.32.0).
    with pytest.raises(UsageError, match="on Google's devices is not modelled") as refused_start:
        start("llama-3.1-8b", "tpu-v5ex4", engine)
    assert refused_start.value.hint == "use --engine logical"
    assert start("llama-3.1-8b", "tpu-v5ex4", "logical")["fit"]["fits"]
    assert start("llama-3.1-8b", "gaudi3", "vllm")["fit"]["fits"]
