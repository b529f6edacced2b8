"""Lines about pools in logs of SGLang and TensorRT-LLM, also in excerpts that leave out the start of a line."""

from __future__ import annotations

from typing import Any

import pytest

import kvcalc
from kvcalc.errors import UsageError
from tests.documents import audit
from tests.engines.models import plain
from tests.engines.test_sglang_drafts import QWEN

GEMMA_4 = {
    "model_type": "gemma4_unified_text", "num_hidden_layers": 48, "num_attention_heads": 16, "num_key_value_heads": 8,
    "head_dim": 256, "num_global_key_value_heads": 1, "global_head_dim": 512, "attention_k_eq_v": True,
    "hidden_size": 3840, "sliding_window": 1024, "num_kv_shared_layers": 0, "torch_dtype": "bfloat16",
    "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 8,
}  # fmt: skip


def figures(log: str, engine: str, model: Any, **asked: Any) -> dict[str, list[tuple[str, Any]]]:
    spec = kvcalc.read_config(model, "model", "") if isinstance(model, dict) else kvcalc.load_model(model)
    found: dict[str, list[tuple[str, Any]]] = {}
    for row in audit(log, "log", model=spec, engine=engine, **asked)["figures"]:
        found.setdefault(row["name"], []).append((row["verdict"], row["computed"]))
    return found


DRAFTED = """\
max_mamba_cache_size: 64, conv_state size: 0.07GB, ssm_state size: 3.05GB intermediate_ssm_state_cache size: 48.75GB \
intermediate_conv_window_cache size: {inputs}GB
KV Cache is allocated. dtype: torch.bfloat16, #tokens: 295950, K size: 4.52 GB, V size: 4.52 GB
KV Cache is allocated. dtype: torch.bfloat16, #tokens: 295950, K size: 3.39 GB, V size: 3.39 GB
"""


def test_the_states_of_drafts_tell_how_many_tokens_are_checked() -> None:
    """A public log of Qwen3.5-9B with a DFlash head. The inputs of 16 tokens in one window follow from the states."""
    found = figures(DRAFTED.format(inputs="0.43"), "sglang", QWEN)
    column = 24 * 8192 * 2
    assert found["ssm_state_bytes"] == [("equal", 65 * 24 * 32 * 128 * 128 * 4)]
    assert found["intermediate_ssm_bytes"] == [("input", None)]
    assert found["intermediate_conv_bytes"] == [("equal", 65 * 18 * column)]
    assert [verdict for verdict, _ in found["k_bytes"]] == ["equal", "input"]
    # In trees, each token keeps its own window of 3 inputs.
    trees = figures(DRAFTED.format(inputs="1.14"), "sglang", QWEN)
    assert trees["intermediate_conv_bytes"] == [("equal", 65 * 16 * 3 * column)]
    wrong = figures(DRAFTED.format(inputs="0.50"), "sglang", QWEN)
    assert wrong["intermediate_conv_bytes"][0][0] == "unexplained"


def test_only_running_requests_have_states_of_drafts() -> None:
    log = DRAFTED.format(inputs="0.06").replace("48.75", "6.75")
    lines = (
        "max_running_requests=8\n",
        # The scheduler's line is about one DP rank.
        "ServerArgs(max_running_requests=32)\n"
        "max_total_num_tokens=295950, chunked_prefill_size=8192, max_running_requests=8, context_len=32768\n",
    )
    for line in lines:
        found = figures(line + log, "sglang", QWEN)
        assert found["intermediate_conv_bytes"] == [("equal", 9 * 18 * 24 * 8192 * 2)]


def test_a_pool_of_fp4_has_scales_and_both_pools_take_the_tokens_of_their_lines() -> None:
    log = """\
KV Cache is allocated. dtype: torch.float4_e2m1fn_x2, #tokens: 612620, K size: 26.29 GB, V size: 26.29 GB
#tokens: 765776, K size: 1.64 GB, V size: 1.64 GB
SWAKVPool mem usage: 55.87 GB
max_total_num_tokens=765776
"""
    found = figures(log, "sglang", GEMMA_4)
    window, full = 40 * 8 * 256 * 9 // 16, 8 * 512 * 9 // 16
    assert found["k_bytes"] == [("equal", 612_621 * window), ("equal", 765_777 * full)]
    assert found["both_pools_bytes"] == [("equal", 2 * (612_621 * window + 765_777 * full))]
    assert found["max_total_num_tokens"] == [("equal", 765_776)]  # those of the pool of all tokens


def test_pools_without_their_tokens_follow_from_the_total() -> None:
    """Lines of releases before the tokens were printed: 37,081 tokens of all layers, and 0.8 of them in windows."""
    log = "K size: 0.71 GB, V size: 0.71 GB\nSWAKVPool mem usage: 3.18 GB\nmax_total_num_tokens=37081\n"
    found = figures(log, "sglang", "gemma-4-26b-a4b", kv_dtype="fp8")
    assert found["both_pools_bytes"][0][0] == "equal"


@pytest.mark.parametrize(
    ("arguments", "heads"),
    [
        ("tp_size=8", 1), ("tp_size=8, dp_size=8, enable_dp_attention=True", 8),
        ("tp_size=8, dp_size=2, enable_dp_attention=True", 2), ("tp_size=8, dp_size=2, enable_dp_attention=False", 1),
        ("tp_size=8, attn_dp_size=4", 4), ("tp_size=8, attn_dp_size=2, attn_cp_size=2", 4),
    ],
)  # fmt: skip
def test_heads_are_divided_among_the_devices_of_a_dp_rank(arguments: str, heads: int) -> None:
    """8 KV heads of 64 in 2 layers. Source: derive_attn_tp_size, srt/runtime_context.py, SGLang 0.5.23."""
    size = 1_000_001 * 2 * heads * 64 * 2
    log = f"ServerArgs({arguments})\nKV Cache is allocated. dtype: torch.bfloat16, #tokens: 1000000, K size: {{0}} GB"
    log = f"{log}, V size: {{0}} GB\n".format(f"{size / 2**30:.2f}")
    assert figures(log, "sglang", plain(2, 8, 8))["k_bytes"] == [("equal", size)]


@pytest.mark.parametrize(("ratio", "size"), [("", "3.18"), ("swa_full_tokens_ratio=0.5\n", "2.12")])
def test_both_pools_follow_from_the_total_and_the_ratio(ratio: str, size: str) -> None:
    log = f"{ratio}SWAKVPool mem usage: {size} GB\nmax_total_num_tokens=37081\n"
    found = figures(log, "sglang", "gemma-4-26b-a4b", kv_dtype="fp8")
    assert found["both_pools_bytes"][0][0] == "equal"


@pytest.mark.parametrize(
    ("lines", "block"),
    [
        ("total: 39.39 GiB, available: 21.89 GiB\nNumber of blocks in KV cache primary pool: 631", 64),
        ("total: 79.10 GiB, available: 35.24 GiB\nNumber of tokens per block: 64.\n"
         "Number of blocks in KV cache primary pool: 1015", 64),
    ],
)  # fmt: skip
def test_the_free_memory_leads_to_the_blocks(lines: str, block: int) -> None:
    """NVIDIA/TensorRT-LLM#2268: 0.9 of 21.89 GiB are 630.4 blocks of 64 tokens of 512 KiB, rounded up."""
    log = f"Memory usage when calculating max tokens in paged kv cache: {lines}\n"
    found = figures(log, "tensorrt-llm", plain(32, 32, 32, 128))
    assert found["available_bytes"][0][0] == "equal"
    assert found["num_blocks"] == [("input", None)]


def test_free_memory_that_does_not_lead_to_the_blocks_is_unexplained_if_the_share_is_known() -> None:
    memory = "Memory usage when calculating max tokens in paged kv cache: total: 39.39 GiB, available: 21.89 GiB\n"
    for share, verdict in (("", "input"), ("free_gpu_memory_fraction=0.9\n", "unexplained")):
        log = f"{memory}{share}tokens_per_block=64\nNumber of blocks in KV cache primary pool: 400\n"
        assert figures(log, "tensorrt-llm", plain(32, 32, 32, 128))["available_bytes"][0][0] == verdict
    half = (
        f"{memory}free_gpu_memory_fraction=0.5\ntokens_per_block=64\nNumber of blocks in KV cache primary pool: 351\n"
    )
    assert figures(half, "tensorrt-llm", plain(32, 32, 32, 128))["available_bytes"][0][0] == "equal"


TOKENS = 1_000_000
SIZE = f"{TOKENS * 36 * 2048 / 2**30:.2f} GiB"  # 36 layers with 8 heads of 64 for K and for V, which keep all tokens
GPT_OSS = f"""
Starting trtllm-serve for model openai/gpt-oss-120b
{{version}}
[TensorRT-LLM][INFO] Max KV cache pages per sequence: 4096 [window size=131072]
[TensorRT-LLM][INFO] [MemUsageChange] Allocated {SIZE} for max tokens in paged KV cache ({TOKENS}).
"""
VERSION = "[TensorRT-LLM] TensorRT-LLM version: {}"


@pytest.mark.parametrize(
    ("version", "engine", "verdict", "rules"),
    [
        ("1.1.0rc3", None, "equal", "1.1.0rc3"),
        ("1.2.1", None, "equal", "1.2.1"),
        (None, None, "equal", "1.2.1"),  # the newest stable release's are tried first
        ("1.3.0rc28", None, "unexplained", "1.3.0rc28"),  # windows have blocks of their own
        ("1.3.0rc28", "tensorrt-llm@1.2", "equal", "1.2"),
        ("1.1.0rc3", "tensorrt-llm@nightly", "unexplained", "nightly"),
    ],
)
def test_a_log_of_tensorrt_llm_counts_by_the_rules_of_its_release(
    version: str | None, engine: str | None, verdict: str, rules: str
) -> None:
    log = GPT_OSS.format(version="" if version is None else VERSION.format(version))
    document = audit(log, "log", engine=engine)
    assert document["model"]["log_name"] == "openai/gpt-oss-120b"
    assert document["engine"]["rules_version"] == rules
    [pool] = [one for one in document["figures"] if one["name"] == "pool_bytes"]
    assert pool["verdict"] == verdict


MODELOPT = {**plain(32, 32, 8, 128), "quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8",
            "kv_cache_quant_algo": "FP8"}}  # fmt: skip


@pytest.mark.parametrize(
    ("log", "engine", "dtype"),
    [
        ("sglang==0.5.2", None, "bf16"),  # before 0.5.3, `auto` does not follow the checkpoint
        ("sglang==0.5.3", None, "fp8"),
        ("sglang==0.5.3", "sglang@0.5.2", "bf16"),
        ("", None, "fp8"),
        ("vLLM API server version 0.13.0", None, "bf16"),  # before 0.14
        ("vLLM API server version 0.14.0", None, "fp8"),
        ("vLLM API server version 0.14.0", "vllm@0.13", "bf16"),
    ],
)
def test_the_default_type_of_the_cache_is_that_of_the_logs_release(log: str, engine: str | None, dtype: str) -> None:
    spec = kvcalc.read_config(MODELOPT, "model", "")
    line = "GPU KV cache size: 100,000 tokens" if "vLLM" in log else "max_total_num_tokens=871371"
    assert audit(f"{log}\n{line}", "log", model=spec, engine=engine)["workload"]["kv_dtype"] == dtype


def test_every_log_takes_its_engines_release(kvcalc: Any) -> None:
    for name, release in (("vllm", "0.23.1"), ("sglang", "0.4.7")):
        asked = ("audit", f"tests/logs/{name}.log", "--model", "llama-3-8b")
        assert kvcalc(*asked, "--engine", f"{name}@{release}", "--get", "engine.version").out.strip() == release
        failed = kvcalc(*asked, "--engine", f"{name}@nope")
        assert (failed.status, "not a release" in failed.err) == (2, True)
        assert kvcalc(*asked, "--engine", f"{name}@").status == 2


def test_an_excerpt_of_tensorrt_llms_pool_line_is_read() -> None:
    found = figures("primary blocks=116617\nAllocated 78.30 GiB (3731744)\n", "tensorrt-llm", "tinyllama-1.1b")
    assert found["pool_bytes"] == [("equal", 3_731_744 * 22_528)]
    with pytest.raises(UsageError, match="no line of tensorrt-llm"):
        figures("Allocated 78.30 GiB\n", "tensorrt-llm", "tinyllama-1.1b")


V4_LOG = """\
[2026-08-10 09:19:13 TP0] DSV4 memory calculation: bytes_per_full_token={each}, available_bytes=1.57 GB, \
c128_state_fixed=0.07 GB, full_token=209280
[2026-08-10 09:19:13 TP0] DSV4 pool sizes: full=209280, swa={windows}, c4=52320, c128=1635, c4_state={states}, \
c128_state={heavy}
"""


@pytest.mark.parametrize(
    ("each", "windows", "states", "heavy"),
    [
        # A public log of DeepSeek-V4-Flash: states for 128 tokens, pages without padding.
        ("7705.45", 20_864, 1304, 0),
        # Before 0.5.15, 0.1 of a row of each of 128 windows of a page, with 2 x 512 elements in fp32 in 20 layers.
        ("15897.45", 20_864, 1304, 20_864),
        # By hand: 21 x (585 + 132) / 4 + 20 x 864 / 128, and with a ratio 0.1 of 43 x 585 and 21 x 8 / 256 x 10,240.
        ("3899.25", 13_312, 416, 0),
        ("7086.75", 20_736, 648, 0),
    ],
)
def test_the_pools_of_deepseek_v4(each: str, windows: int, states: int, heavy: int) -> None:
    log = V4_LOG.format(each=each, windows=windows, states=states, heavy=heavy)
    found = figures(log, "sglang", "deepseek-v4-flash")
    assert found["bytes_per_full_token"][0][0] == "equal"
    assert [found[name][0][0] for name in ("c4", "c128", "c4_state")] == ["equal"] * 3
    assert found["swa"][0][0] == ("input" if windows == 13_312 else "equal")
    # Where requests have the states of 128 tokens, their number is not known here.
    assert found.get("c128_state") == ([("equal", heavy)] if heavy else None)
    # An excerpt that ends before the last pool.
    shorter = figures(log.partition(", c128_state=")[0], "sglang", "deepseek-v4-flash")
    assert (shorter["c4_state"], "c128_state" in shorter) == (found["c4_state"], False)
    wrong = figures(log.replace(each, "7000.00"), "sglang", "deepseek-v4-flash")
    assert wrong["bytes_per_full_token"][0][0] == "unexplained"


@pytest.mark.parametrize("said", ["speculative_algorithm='EAGLE'", "speculative_num_draft_tokens=4"])
def test_drafts_take_longer_rings_and_a_layer_in_the_pools_of_deepseek_v4(said: str) -> None:
    """Rings have 16 entries instead of 8, and the draft model has a layer beside 43 (get_compress_state_ring_size).

    By hand: 21 x (585 + 132) / 4 + 20 x 864 / 128 + 0.1 x (43 x 585 + 21 x 16 / 256 x 10,240), times 44 / 43.
    """
    log = V4_LOG.format(each="7939.19", windows=20_736, states=1296, heavy=0)
    found = figures(f"server_args=ServerArgs({said})\n{log}", "sglang", "deepseek-v4-flash")
    assert (found["bytes_per_full_token"][0][0], found["c4_state"]) == ("equal", [("equal", 1296)])
    assert figures(log, "sglang", "deepseek-v4-flash")["bytes_per_full_token"][0][0] == "unexplained"


def test_the_states_of_a_hybrid_in_tensorrt_llm() -> None:
    """Nemotron-3-Nano: 23 layers of 6,144 channels and 64 heads of 64 x 128 in fp32, for 64 requests."""
    conv, ssm = 64 * 23 * 6144 * 3 * 2, 64 * 23 * 64 * 64 * 128 * 4
    log = f"""\
[TRT-LLM] [I] Mamba Cache is allocated. max_mamba_cache_size: 64, conv_state size: {conv / 2**30:.2f}GB, \
ssm_state size: {ssm / 2**30:.2f}GB
[TensorRT-LLM][INFO] [MemUsageChange] Allocated {96_000 * 6144 / 2**30:.2f} GiB for max tokens in paged KV cache (96000)
"""
    found = figures(log, "tensorrt-llm", "nemotron-3-nano-30b-a3b")
    assert found["conv_state_bytes"] == [("equal", conv)]
    assert found["ssm_state_bytes"] == [("equal", ssm)]
    assert found["pool_bytes"] == [("equal", 96_000 * 6144)]


def test_each_stage_prints_its_own_pool_in_any_order() -> None:
    """One layer of three is on the first of two stages of SGLang: 2,000,001 rows of 2 x 64 elements, K and V."""
    line = "KV Cache is allocated. dtype: torch.bfloat16, #tokens: 2000000, K size: {0} GB, V size: {0} GB\n"
    for sizes, verdicts in (
        (("0.48", "0.95"), ["equal", "equal"]), (("0.95", "0.48"), ["equal", "equal"]),
        (("0.95", "0.96"), ["equal", "unexplained"]), (("0.96", "0.48"), ["unexplained", "equal"]),
    ):  # fmt: skip
        log = "ServerArgs(pp_size=2)\n" + "".join(line.format(size) for size in sizes)
        for name in ("k_bytes", "v_bytes"):
            assert [verdict for verdict, _ in figures(log, "sglang", plain(3))[name]] == verdicts, sizes
