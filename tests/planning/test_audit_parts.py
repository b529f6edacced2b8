"""`kvcalc audit` reads what the parts of a device's memory took, and says where they differ from the prediction.

The lines are single lines of public logs, which each test names, or those of vLLM's releases that print them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import kvcalc
from kvcalc.engines import log_reader
from kvcalc.planning.audit import parts as audit_parts
from kvcalc.planning.logs import read_log
from tests.documents import audit

GIB = 2**30
CONFIG = "Initializing a V1 LLM engine (v0.22.0) with config: model='{}', max_seq_len=8192, {}\n"
POOL = "Available KV cache memory: 11.11 GiB\n"


def parts_of(text: str, **arguments: Any) -> dict[str, Any]:
    return {part["name"]: part for part in audit(text, "log", **arguments)["parts"]}


def test_the_type_of_the_cache_that_vllm_uses() -> None:
    # Notes on Qwen3.8-27B with a context of 896k on GB10.
    log = """\
    Using fp8 data type to store kv cache. It reduces the GPU memory footprint and boosts the performance.
    Setting attention block size to 1568 tokens to ensure that attention page size is >= mamba page size.
    Initial free memory 111.93 GiB, reserved 33.0 GiB memory for KV Cache as specified by kv_cache_memory_bytes config
    GPU KV cache size: 1,073,277 tokens
    Maximum concurrency for 917,504 tokens per request: 1.17x
    """
    found = audit(log, "log", model=kvcalc.load_model("Qwen/Qwen3.8-27B"))
    assert (found["workload"]["kv_dtype"], found["equal"], found["unexplained"]) == ("fp8", 3, 0)


@pytest.mark.parametrize(
    ("release", "tokens", "kv_dtype"),
    [("NVFP4", ("94,135", "1.44", "6.97"), "bf16"), ("INT4", ("950,420", "14.50", "35.2"), "fp8")],
)
def test_the_layers_of_a_dflash_head_are_counted(release: str, tokens: tuple[str, str, str], kv_dtype: str) -> None:
    # Test report of Laguna-S-2.1 on GB10: the head has six layers that attend to all tokens.
    log = f"""\
    Initializing a V1 LLM engine (v0.25.1) with config: model='poolside/Laguna-S-2.1-{release}', \
speculative_config=SpeculativeConfig(method='dflash', model='poolside/Laguna-S-2.1-DFlash-{release}', \
num_spec_tokens=15), dtype=torch.bfloat16, max_seq_len=65536, kv_cache_dtype=auto
    Available KV cache memory: {tokens[2]} GiB
    GPU KV cache size: {tokens[0]} tokens
    Maximum concurrency for 65,536 tokens per request: {tokens[1]}x
    """
    found = audit(log, "log")
    assert (found["equal"], found["unexplained"]) == (2, 0)
    assert found["workload"]["kv_dtype"] == kv_dtype
    assert any(rule.startswith("6 drafting layers") for rule in found["engine"]["rules"])


@pytest.mark.parametrize(
    ("line", "size"),
    [
        ("Current kv cache memory in use is 1.95 GiB.", "1.95 GiB"),  # wtdcode/vllm-backport#34
        ("Current kv cache memory in use is 2093796761 bytes.", "2093796761 bytes"),  # vLLM 0.11
    ],
)
def test_the_memory_of_the_cache_that_is_in_use(line: str, size: str) -> None:
    figures = audit(line, "log", model=kvcalc.load_model("llama-3.1-8b"), engine="vllm")["figures"]
    assert [(row["name"], row["printed"], row["verdict"]) for row in figures] == [("available_memory", size, "input")]


def test_bytes_that_are_printed_exactly_leave_one_number_of_blocks() -> None:
    # By hand: blocks of 16 tokens x 131,072 bytes of Llama-3.1-8B.
    memory = 998 * 16 * 131_072 + 5
    log = f"Current kv cache memory in use is {memory} bytes.\nGPU KV cache size: {{}} tokens\n"
    model = kvcalc.load_model("llama-3.1-8b")
    assert audit(log.format("15,968"), "log", model=model)["equal"] == 1
    assert audit(log.format("15,984"), "log", model=model)["unexplained"] == 1


PRINTED = [
    ("weights", "Model loading took 14.99 GiB memory and 4.171419 seconds", 14.99),
    ("weights", "Model loading took 14.99 GiB and 231.038859 seconds", 14.99),  # the second model runner
    ("weights", "Model loading took 5.34GB", 5.34),
    ("weights", "Actual usage is 14.99 GiB for weight, 1.19 GiB for peak activation", 14.99),  # vLLM 0.11
    ("weights", "model weights take 14.99GiB; non_torch_memory takes 0.09GiB; PyTorch", 14.99),  # V0
    ("non_torch", "model weights take 14.99GiB; non_torch_memory takes 0.09GiB; PyTorch", 0.09),
    ("non_torch", "1.19 GiB for peak activation, 0.06 GiB for non-torch memory, and 0.48 GiB for", 0.06),
    ("activation", "PyTorch activation peak memory takes 1.23GiB; the rest", 1.23),
    ("activation", "GiB for consumed memory (weights + non-torch), 0.6 GiB for peak activation, and", 0.6),
    ("consumed", "Actual usage is 19.47 GiB for consumed memory (weights + non-torch), 0.6 GiB", 19.47),
    ("graphs", "1.04 GiB for peak activation, and 0.1 GiB for CUDAGraph memory. Replace", 0.1),
    ("graphs", "Estimated CUDA graph memory: 0.64 GiB total", 0.64),
    ("checkpoint", "Filesystem type for checkpoints: EXT4. Checkpoint size: 20.42 GiB. Available RAM: 88.2", 20.42),
]


@pytest.mark.parametrize(("name", "line", "gib"), PRINTED)
def test_every_line_about_a_part_is_read(name: str, line: str, gib: float) -> None:
    record, size = audit_parts.largest(read_log(line, "log", "vllm").named(name))
    assert record.name == name
    assert size.middle == pytest.approx(gib * GIB)


@pytest.mark.parametrize(
    "line",
    [
        "Free memory on device (22.93/23.56 GiB) on startup. Desired GPU memory utilization is (0.935, 22.03 GiB).",
        "Free memory on device cuda:0 (22.93/23.56 GiB) on startup. Desired GPU memory utilization is (0.935, 22.",
    ],
)
def test_the_memory_of_the_device_and_the_share_of_it(line: str) -> None:
    log = read_log(line, "log", "vllm")
    assert log.named("device_memory")[0].parts == {"free": "22.93", "total": "23.56"}
    assert log.text("gpu_memory_utilization") == "0.935"
    assert "gpu_memory_utilization" in log_reader("vllm").memory_options


WHOLE = """\
{config}Model loading took {weights} GiB memory and 4.17 seconds
Available KV cache memory: 5.0 GiB
Free memory on device ({free}/23.65 GiB) on startup. Desired GPU memory utilization is (0.9, 21.28 GiB). Actual usage \
is 15.1 GiB for consumed memory (weights + non-torch), {activation} GiB for peak activation, and 0.1 GiB for CUDAGraph \
memory.
"""


def server(**changes: object) -> str:
    config = CONFIG.format("meta-llama/Llama-3.1-8B", "max_num_batched_tokens=2048, max_num_seqs=256")
    return WHOLE.format(**{"config": config, "weights": 14.99, "free": 23.2, "activation": 0.4, **changes})


def test_a_server_as_predicted() -> None:
    parts = parts_of(server())
    assert parts["weights"]["sentence"] == "weights: 14.99 GiB, as predicted"
    assert abs(parts["weights"]["bytes"] - parts["weights"]["predicted_bytes"]) < 0.01 * GIB
    assert parts["activation"]["sentence"] == "peak activation: 0.4 GiB, as predicted"
    assert "in_use" not in parts  # the driver's own


def test_a_server_with_more_of_each_part() -> None:
    parts = parts_of(server(free=20.2, activation=4.4))
    activation = parts["activation"]
    assert activation["bytes"] > activation["high_bytes"] > activation["predicted_bytes"] > activation["low_bytes"]
    assert "GiB more than the" in activation["sentence"]
    assert parts["in_use"]["sentence"].startswith("in use before the start: 3.46 GiB, more than a driver takes")
    eager = parts_of(server().replace("max_num_seqs=256", "max_num_seqs=256, enforce_eager=True"))
    assert (eager["graphs"]["predicted_bytes"], eager["weights"]["predicted_bytes"]) == (
        0,
        parts["weights"]["predicted_bytes"],
    )
    stated = parts_of(server(activation=4.4).replace("max_num_batched_tokens=2048, ", ""))
    assert stated["activation"]["sentence"].endswith("does not say max_num_batched_tokens, and the default is assumed")
    images = "Encoder cache will be initialized with a budget of 16384 tokens, and profiled with 1 image items\n"
    assert parts_of(images + server(activation=4.4))["activation"]["sentence"].endswith(
        "images of 16,384 tokens are profiled in the same step"
    )


@pytest.mark.parametrize(
    ("model", "settings", "lines", "why"),
    [
        # The figures of a copy of Qwen3.6-35B-A3B on an RTX 5090: all of its linear attention is in 16 bits.
        ("someone/Qwen3.6-35B-A3B-INT4", "quantization=compressed-tensors", "Checkpoint size: 23.32 GiB. Available\n"
            "Model loading took 21.88 GiB memory and 29.8 seconds", "layers left in 16 bits: the files have 23.33 GiB"),
        ("poolside/Laguna-S-2.1-INT4", "speculative_config=SpeculativeConfig(method='dflash', "
            "model='poolside/Laguna-S-2.1-DFlash-INT4', num_spec_tokens=15)", "Model loading took 69.34 GiB memory and",
            "those of the drafter poolside/Laguna-S-2.1-DFlash-INT4 are not counted"),
        ("meta-llama/Llama-3.1-8B", "quantization=bitsandbytes", "Model loading took 5.34 GiB memory and",
            "the server's weights are quantized (quantization=bitsandbytes): give that copy with --model"),
        ("Kwai-Keye/Keye-VL-8B-Preview", "dtype=torch.bfloat16", "Model loading took 16.61 GiB memory and 4.1 seconds",
            "the size of the tower is not known"),
    ],
)  # fmt: skip
def test_why_the_weights_differ(model: str, settings: str, lines: str, why: str) -> None:
    found = parts_of(CONFIG.format(model, settings) + lines + "\n" + POOL)
    assert found["weights"]["sentence"].endswith(f" predicted: {why}")
    # Without the size of the device, nothing else is predicted.
    assert list(found) == ["weights"]


def test_a_server_without_memory_for_its_cache() -> None:
    parts = parts_of(server().replace("memory: 5.0 GiB", "memory: -0.12 GiB"))
    assert parts["available_memory"]["bytes"] == pytest.approx(-0.12 * GIB)
    nothing = parts_of(server(free=0).replace("/23.65 GiB", "/0.0 GiB"))
    assert nothing["weights"]["bytes"] == pytest.approx(14.99 * GIB)


def test_a_stage_of_an_unknown_number_is_not_compared() -> None:
    # wtdcode/vllm-backport#34
    log = "(Worker_PP1_TP3 pid=4365) INFO Actual usage is 19.47 GiB for consumed memory (weights + non-torch)\n"
    log += "Free memory on device (22.93/23.56 GiB) on startup.\n"
    parts = parts_of(log, model=kvcalc.load_model("llama-3.1-8b"), tensor_parallel_size=4)
    assert parts["consumed"]["predicted_bytes"] is None
    assert "does not say how many" in parts["consumed"]["sentence"]
    known = parts_of(log + "pipeline_parallel_size=2", model=kvcalc.load_model("llama-3.1-8b"))
    assert known["consumed"]["predicted_bytes"] is not None


def test_the_weights_of_sglang() -> None:
    # SemiAnalysisAI/InferenceX#2128
    line = "Load weight end. quant=fp8, fmt=e4m3, avail mem=12.25 GB, mem usage=125.65 GB."
    parts = parts_of(line, model=kvcalc.load_model("deepseek-ai/DeepSeek-V4-Pro"), tensor_parallel_size=8)
    assert parts["weights"]["bytes"] == pytest.approx(125.65 * GIB)


def test_the_screen_has_a_sentence_for_every_part(kvcalc: Any, tmp_path: Path) -> None:
    path = tmp_path / "vllm.log"
    path.write_text(server(activation=4.4), encoding="utf-8")
    result = kvcalc("audit", str(path))
    assert "weights: 14.99 GiB, as predicted" in result.out
    assert "peak activation: 4.4 GiB, " in result.out
