"""What vLLM 0.33.0 itself plans, with its defaults and without, from its own start up to the plan of the cache.

Made on a machine without a GPU, from the wheel with stubs for the compiled modules and a platform that says it is the
device: EngineArgs.create_engine_config made the configs, the model's own class its layers (on the meta device),
get_kv_cache_spec of every layer the specs, update_block_size_for_backend the blocks, and get_kv_cache_configs the plan,
in 40 GiB, for 32,768 tokens and the published config.json. The figures are num_blocks, get_kv_cache_capacity, the bytes
of a block of the largest stage, and _max_memory_usage_bytes_from_groups.
"""

from __future__ import annotations

from typing import Any

import pytest

import kvcalc
from kvcalc.model.drafting import Speculation
from kvcalc.throughput.hardware import Devices, find_gpu
from tests.documents import estimate

_MEMORY = 40 << 30

PLANNED: list[tuple[str, str, dict[str, Any], int, int, int, int]] = [
    ("nemotron-3-nano-30b-a3b", "h100", {}, 3_335, 3_902_902, 12_877_824, 360_579_072),
    (
        "nemotron-3-nano-30b-a3b",
        "h100",
        {"pp": 2, "pp_layer_partition": "20,32"},
        5_002,
        5_853_769,
        8_585_216,
        240_386_048,
    ),
    (
        "nemotron-3-nano-30b-a3b",
        "h100",
        {"kv": "fp8", "kv_cache_dtype_skip_layers": "5,12"},
        5_021,
        3_164_002,
        8_552_448,
        444_727_296,
    ),
    ("nemotron-3-super-120b-a12b", "h100", {"drafts": 3, "tp": 2}, 2_206, 1_902_268, 19_464_192, 739_639_296),
    ("qwen3.5-27b", "a100", {"max_num_batched_tokens": "2048"}, 835, 570_026, 51_380_224, 2_466_250_752),
    ("qwen3.5-27b", "b200", {"max_num_batched_tokens": "16384"}, 787, 526_294, 54_525_952, 2_671_771_648),
    ("qwen3.5-27b", "h100", {"drafts": 3, "tp": 2}, 1_482, 837_278, 28_966_912, 1_680_080_896),
    ("qwen3.5-27b", "h100", {"kv": "fp8", "kv_cache_dtype_skip_layers": "3"}, 6_553, 650_693, 6_553_600, 2_162_688_000),
    ("qwen3.5-27b", "h100", {"kv": "turboquant_k8v4"}, 818, 1_072_168, 52_445_184, 1_311_129_600),
    (
        "qwen3.5-397b-a17b",
        "h100",
        {"tp": 8, "decode_context_parallel_size": "4"},
        4_854,
        6_627_328,
        8_847_360,
        212_336_640,
    ),
    ("kimi-k3", "h100", {}, 269, 587_639, 159_252_480, 2_388_787_200),
    ("kimi-k3", "h100", {"tp": 8, "decode_context_parallel_size": "8"}, 2_022, 4_417_126, 21_233_664, 318_504_960),
    ("kimi-k3", "h100", {"no_enable_prefix_caching": "", "tp": 2}, 527, 1_151_249, 81_395_712, 1_220_935_680),
    ("gpt-oss-20b", "h100", {"pp": 2}, 218_453, 1_992_281, 196_608, 706_412_544),
    ("gpt-oss-120b", "h100", {"context": 131072, "pp": 3}, 218_453, 2_793_742, 196_608, 2_015_035_392),
    (
        "gpt-oss-120b",
        "h100",
        {"context": 131072, "pp": 2, "no_async_scheduling": ""},
        145_635,
        2_069_232,
        294_912,
        2_720_563_200,
    ),
    ("gemma-4-26b-a4b", "h100", {"pp": 2, "pp_layer_partition": "10,20"}, 81_920, 297_303, 524_288, 4_733_796_352),
    ("gemma-4-26b-a4b", "h100", {"tp": 2, "kv": "fp8"}, 65_536, 1_324_789, 655_360, 1_062_338_560),
    ("llama-4-maverick", "h100", {"context": 131072, "tp": 8, "pp": 2}, 873_813, 7_989_147, 49_152, 704_643_072),
    ("deepseek-v4-flash", "h100", {"pp": 2}, 81_940, 264_846, 524_160, 5_313_934_080),
    (
        "deepseek-v3",
        "h100",
        {"kv": "fp8", "tp": 8, "decode_context_parallel_size": "8"},
        19_099,
        9_778_688,
        2_248_704,
        143_917_056,
    ),
    (
        "deepseek-v3",
        "h100",
        {"tp": 8, "decode_context_parallel_size": "2", "drafts": 1},
        37_583,
        1_202_656,
        1_142_784,
        1_170_210_816,
    ),
    ("deepseek-v3", "b200", {"max_num_batched_tokens": "16384"}, 19_099, 611_168, 2_248_704, 2_302_672_896),
    ("deepseek-v3.2", "h100", {}, 8_568, 548_352, 5_012_736, 2_566_520_832),
    (
        "deepseek-v3.2",
        "h100",
        {"kv": "fp8", "tp": 8, "prefill_context_parallel_size": "2", "decode_context_parallel_size": "16"},
        13_961,
        14_296_064,
        3_076_352,
        98_443_264,
    ),
    ("glm-5.2", "b200", {"max_num_batched_tokens": "16384"}, 14_068, 900_352, 3_052_800, 1_563_033_600),
    ("llama-3.1-8b", "h100", {"kv": "turboquant_3bit_nc"}, 34_211, 1_094_752, 1_255_424, 1_285_554_176),
    (
        "qwen3-32b",
        "h100",
        {"kv": "int4_per_token_head", "kv_cache_dtype_skip_layers": "0"},
        18_477,
        591_264,
        2_324_480,
        2_380_267_520,
    ),
]


@pytest.mark.parametrize(
    ("model", "device", "asked", "blocks", "tokens", "block_bytes", "request_bytes"), PLANNED,
    ids=[f"{model} {device} {' '.join(map(str, asked.items()))}" for model, device, asked, *_ in PLANNED],
)  # fmt: skip
def test_vllms_own_plan(
    model: str, device: str, asked: dict[str, Any], blocks: int, tokens: int, block_bytes: int, request_bytes: int
) -> None:
    engine = ask(model, device, **asked)
    assert (engine["num_gpu_blocks"], engine["kv_cache_tokens"]) == (blocks, tokens)
    assert (engine["bytes_per_block"], engine["request_bytes"]) == (block_bytes, request_bytes)
    assert sum(line["bytes"] for line in engine["request_lines"]) == request_bytes


def ask(
    model: str, device: str, context: int = 32_768, tp: int = 1, pp: int = 1, kv: str = "auto", drafts: int = 0,
    release: str = "", **settings: str,
) -> dict[str, Any]:  # fmt: skip
    # The cache's memory is given, so the weights need not fit.
    gpu = find_gpu(device)._replace(memory_bytes=4 << 40)
    copies = int(settings.get("prefill_context_parallel_size", 1))
    named = {"max-num-batched-tokens": "8192", **{name.replace("_", "-"): text for name, text in settings.items()}}
    found = estimate(
        kvcalc.load_model(model), engine=f"vllm{release}", context_tokens=context, tensor_parallel_size=tp,
        pipeline_parallel_size=pp, devices=Devices(gpu, tp * pp * copies), kv_dtype=kv, kv_memory_bytes=_MEMORY,
        engine_settings=named, speculative=Speculation("mtp", drafts, 1.5) if drafts else None,
    )["engine"]  # fmt: skip
    return dict(found)


def test_blocks_of_mla_by_kernel_and_release() -> None:
    """FlashInfer's MLA, FlashMLA and CUTLASS's read blocks of their own (platforms/cuda.py, 0.11.2 to 0.33.0)."""
    sizes = {
        (device, release, kv): ask("deepseek-v3", device, kv=kv, release=release)["block_size"]
        for device, release in (
            ("b200", "@0.14"),
            ("b200", "@0.16"),
            ("h100", "@0.16"),
            ("a100", "@0.16"),
            ("h100", ""),
        )
        for kv in ("bf16", "fp8")
        if (device, kv) != ("a100", "fp8")  # which Triton's kernels do not have there
    }
    assert list(sizes.values()) == [128, 128, 64, 64, 64, 64, 16, 16, 64]
    assert ask("deepseek-v3", "b200", block_size="64")["block_size"] == 64
    assert ask("deepseek-v3.2", "h100", release="@0.12")["block_size"] == 64


def test_older_releases_overlap_no_stages() -> None:
    now, before = (ask("gpt-oss-20b", "h100", pp=2, release=release) for release in ("@0.29", "@0.28"))
    # 12 layers with a window of 128 tokens: 127 tokens and those of three steps, or of two, in blocks of 16 tokens.
    more = -(-(127 + 3 * 8192) // 16) - -(-(127 + 2 * 8192) // 16)
    assert now["request_bytes"] - before["request_bytes"] == more * now["bytes_per_block"]


def test_flashkda_keeps_one_more_state_of_kimi_k3() -> None:
    blocks = [
        ask("kimi-k3", "h100", release=release)["request_bytes"] / ask("kimi-k3", "h100")["bytes_per_block"]
        for release in ("", "@0.29", "@0.28")
    ]
    # Three groups of states.
    assert blocks[0] == blocks[1] == blocks[2] + 3
