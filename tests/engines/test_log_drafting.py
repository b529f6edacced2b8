"""`kvcalc audit` with drafted tokens and context parallelism, and logs of which no number can be checked.

The figures are from public threads, or computed by hand where a comment says so.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import kvcalc
from kvcalc.errors import ModelError, UsageError
from tests.engines.models import gated_delta, latent, plain
from tests.planning.test_audit import run

LLAMA = plain(32, 32, 8, 128, vocab_size=128_256, hidden_size=4096)

EAGLE_LOG = """\
INFO [core.py:58] Initializing a V1 LLM engine (v0.9.1) with config: model='x', speculative_config={method}, \
dtype=torch.bfloat16, max_seq_len=131072, tensor_parallel_size=1, kv_cache_dtype=auto
Available KV cache memory: 51.63 GiB
GPU KV cache size: {tokens} tokens
Maximum concurrency for 131,072 tokens per request: {ratio}x
"""


def verdicts(result: Any) -> dict[str, str]:
    return {row["name"]: row["verdict"] for row in result.json["figures"]}


@pytest.mark.parametrize(
    ("method", "tokens", "ratio", "rule"),
    [
        # vLLM 0.9.1, Llama-3.1-8B with an EAGLE head on an H100: 33 layers, 135,168 bytes per token.
        ("SpeculativeConfig(method='eagle', model='h', num_spec_tokens=4)", "410,128", "3.13", "EAGLE head"),
        ('{"method": "eagle3", "num_speculative_tokens": 4}', "410,128", "3.13", "EAGLE head"),
        # By hand: 51.63 GiB hold 26,434 blocks of 32 layers, 2,097,152 bytes each. n-grams take none.
        ("SpeculativeConfig(method='ngram', model=None, num_spec_tokens=4)", "422,944", "3.23", "no layers"),
        # Without a method, the numbers decide.
        ("SpeculativeConfig(num_spec_tokens=4)", "410,128", "3.13", "EAGLE head"),
        ("SpeculativeConfig(num_spec_tokens=4)", "422,944", "3.23", "no layers"),
    ],
)
def test_what_drafts_is_counted(kvcalc: Any, tmp_path: Path, method: str, tokens: str, ratio: str, rule: str) -> None:
    log = EAGLE_LOG.format(method=method, tokens=tokens, ratio=ratio)
    result = run(kvcalc, tmp_path, LLAMA, log, "--json")
    assert result.status == 0, result.err
    assert verdicts(result) == {"available_memory": "input", "kv_cache_tokens": "equal", "max_concurrency": "equal"}
    assert any(rule in text for text in result.json["engine"]["rules"])


def test_ranks_that_divide_the_tokens(kvcalc: Any, tmp_path: Path) -> None:
    # By hand: 61 latents of 576 elements in bf16 take 70,272 bytes per token, so 8 GiB hold 7,639 blocks of 16 tokens
    # on each of 8 ranks: 977,792 tokens.
    log = """
    Initializing a V1 LLM engine (v0.33.0) with config: max_seq_len=32768, tensor_parallel_size=8,
    decode_context_parallel_size=8, dtype=torch.bfloat16
    Available KV cache memory: 8.00 GiB
    GPU KV cache size: 977,792 tokens, Maximum concurrency for 32,768 tokens per request: 29.84x
    """
    config = latent(61, num_attention_heads=128)
    result = run(kvcalc, tmp_path, config, log, "--json")
    assert result.status == 0, result.err
    assert verdicts(result)["kv_cache_tokens"] == "equal"
    assert result.json["engine"]["settings"]["decode-context-parallel-size"] == "8"
    # The same numbers without the ranks are an eighth.
    alone = run(kvcalc, tmp_path, config, log.replace("decode_context_parallel_size=8", ""), "--json")
    assert alone.status == 5


SGLANG_STATES = """\
sglang 0.5.23
server_args=ServerArgs(model_path='x', tp_size=1, {drafts})
Mamba Cache is allocated. max_mamba_cache_size: 64, conv_state size: 0.09GB, ssm_state size: 3.81GB \
intermediate_ssm_state_cache size: {ssm}GB intermediate_conv_window_cache size: {conv}GB
KV Cache is allocated. dtype: torch.bfloat16, #tokens: 200000, K size: 1.91 GB, V size: 1.91 GB
KV Cache is allocated. dtype: torch.bfloat16, #tokens: 200000, K size: 3.39 GB, V size: 3.39 GB
"""


def test_sglang_keeps_a_state_for_every_drafted_token(kvcalc: Any, tmp_path: Path) -> None:
    # By hand: 30 states of 32 x 128 x 128 elements in fp32 are 62,914,560 bytes, so 65 slots take 3.81 GiB, and 60.94
    # GiB for 16 tokens. Their inputs are 8,192 columns of 16 bits: 3 per layer, and 16 + 2 while 16 tokens are checked.
    # 10 layers x 2 heads x 256 elements: 10,240 bytes of K per token, with one more page.
    drafts = "speculative_algorithm='EAGLE', speculative_num_draft_tokens=16"
    log = SGLANG_STATES.format(drafts=drafts, ssm="60.94", conv="0.54")
    result = run(kvcalc, tmp_path, gated_delta(), log, "--json")
    assert result.status == 0, result.err
    figures = {(row["line"], row["name"]): row["verdict"] for row in result.json["figures"]}
    assert figures == {
        (3, "max_mamba_cache_size"): "input", (3, "conv_state_bytes"): "equal", (3, "ssm_state_bytes"): "equal",
        (3, "intermediate_ssm_bytes"): "equal", (3, "intermediate_conv_bytes"): "equal",
        (4, "tokens"): "input", (4, "k_bytes"): "equal", (4, "v_bytes"): "equal",
        # The pool of the draft model, which the log does not describe.
        (5, "k_bytes"): "input", (5, "v_bytes"): "input",
    }  # fmt: skip
    wrong = run(kvcalc, tmp_path, gated_delta(), log.replace("60.94", "48.75"), "--json")
    assert wrong.status == 5
    # Without the number of drafted tokens, their states are an input.
    unsaid = run(kvcalc, tmp_path, gated_delta(), SGLANG_STATES.format(drafts="", ssm="48.75", conv="9.99"), "--json")
    assert unsaid.status == 0
    assert verdicts(unsaid)["intermediate_ssm_bytes"] == "input"
    # Neither do sizes that round to nothing say it.
    nothing = run(kvcalc, tmp_path, gated_delta(), SGLANG_STATES.format(drafts="", ssm="0.00", conv="0.00"), "--json")
    assert nothing.status == 0
    assert verdicts(nothing)["intermediate_ssm_bytes"] == verdicts(nothing)["intermediate_conv_bytes"] == "input"


def test_both_pools_of_a_model_with_windows(kvcalc: Any, tmp_path: Path) -> None:
    # By hand: 2 layers keep all of 100,000 tokens and 2 keep 80,000, of 2 x 2 x 64 elements in bf16 = 512 bytes, each
    # with a page of one: (100,001 + 80,001) x 2 x 512 = 184,322,048 bytes.
    kinds = ["sliding_attention", "full_attention"] * 2
    config = plain(4, 4, 2, 64, model_type="gpt_oss", sliding_window=128, layer_types=kinds, num_local_experts=4)
    log = "sglang 0.5.23\nSWAKVPool mem usage: 0.17 GB, swa size: 80000, full size: 100000\n"
    result = run(kvcalc, tmp_path, config, log, "--json")
    assert result.status == 0, result.err
    assert result.json["figures"][0]["computed"] == 184_322_048
    # Without the numbers of tokens nothing is checked.
    short = run(kvcalc, tmp_path, config, "sglang 0.5.23\nSWAKVPool mem usage: 0.17 GB\n", "--json")
    assert (short.status, short.json["figures"][0]["verdict"]) == (5, "input")


def test_an_audit_that_checks_nothing_fails_and_names_the_line(kvcalc: Any, tmp_path: Path) -> None:
    log = "sglang 0.9.0\nKV Cache is allocated: tokens=295950, 4.52 GB\nmax_total_num_tokens=295950\n"
    result = run(kvcalc, tmp_path, LLAMA, log, "--json")
    assert result.status == 5
    assert result.json["unread"] == [{"line": 2, "text": "KV Cache is allocated: tokens=295950, 4.52 GB"}]
    assert "line 2 was not understood: KV Cache is allocated: tokens=295950" in result.err
    assert "no number about the cache was checked" in result.err
    # A line that is read is not named, and a control character does not reach the terminal.
    read = log.replace("KV Cache is allocated: ", "KV Cache \x1b[31mis allocated: ")
    assert "\x1b" not in run(kvcalc, tmp_path, LLAMA, read, "--json").err
    right = (
        "sglang 0.5.23\nKV Cache is allocated. dtype: torch.bfloat16, #tokens: 1000, K size: 0.06 GB, V size: 0.06 GB\n"
    )
    found = run(kvcalc, tmp_path, LLAMA, right, "--json")
    assert (found.status, found.json["unread"]) == (0, [])


def test_v0_names_its_blocks_after_cuda(kvcalc: Any, tmp_path: Path) -> None:
    # vLLM 0.7, Qwen2.5-1.5B on a T4: 2.36 GiB and a swap space of 4 GiB, in blocks of 28 layers x 2 x 2 heads x 128
    # elements x 16 tokens in fp16 (458,752 bytes).
    log = """
    Initializing a V0 LLM engine (v0.7.3) with config: dtype=torch.float16, max_seq_len=32768
    the memory reserved for KV Cache is 2.36GiB
    # CUDA blocks: 5519, # CPU blocks: 9362
    Maximum concurrency for 32768 tokens per request: 2.69x
    """
    result = run(kvcalc, tmp_path, plain(28, 12, 2, 128, torch_dtype="float16"), log, "--json")
    assert result.status == 0, result.err
    assert {row["name"]: row["computed"] for row in result.json["figures"] if row["verdict"] == "equal"} == {
        "num_gpu_blocks": 5519, "num_cpu_blocks": 9362, "max_concurrency": pytest.approx(2.69, abs=0.005),
    }  # fmt: skip


def test_llama_cpp_keeps_a_state_for_every_drafted_token(kvcalc: Any, tmp_path: Path) -> None:
    # Qwen3.8-27B with MTP: 448.88 MiB for 1 + 2 states of 149.62 MiB: 48 layers of 48 x 128 x 128 and 3 x 10,240
    # elements in fp32.
    config = gated_delta(num_hidden_layers=64, num_attention_heads=24, num_key_value_heads=4, linear_num_value_heads=48)
    log = """
    llama_memory_recurrent: size =  448.88 MiB (     1 cells,  64 layers,  1 seqs  2 rs_seq), R (f32):   16.88 MiB, \
S (f32):  432.00 MiB
    """
    result = run(kvcalc, tmp_path, config, log, "--json", "--engine", "llama.cpp")
    assert result.status == 0, result.err
    assert verdicts(result)["state_bytes"] == "equal"


def test_an_estimate_keeps_them_too(kvcalc: Any) -> None:
    # The same 448.88 MiB, which llama.cpp printed for Qwen3.8-27B with one slot; Qwen3.5-27B has the same states.
    default = ("estimate", "qwen3.5-27b", "--context", "8k", "--engine", "llama.cpp", "--json")
    asked = (*default, "--parallel", "1")
    found = kvcalc(*asked, "--speculative", "mtp:2")
    assert round(found.json["kv_cache"]["fixed_bytes_per_sequence"] / 2**20, 2) == 448.88
    lines = {line["name"]: line["bytes"] for line in found.json["engine"]["pool_lines"]}
    assert sum(lines.values()) == found.json["kv_cache"]["bytes_per_device"]
    alone = kvcalc(*asked).json["kv_cache"]["fixed_bytes_per_sequence"]
    assert lines["states for prefixes and drafts"] == 2 * alone
    # Every slot has them, and a contradiction is refused.
    slots = kvcalc(*default, "--speculative", "mtp:2").json["kv_cache"]
    assert slots["fixed_bytes_per_sequence"] == 4 * found.json["kv_cache"]["fixed_bytes_per_sequence"]
    assert kvcalc(*asked, "--speculative", "mtp:2", "--draft-max", "3").status == 2


def test_prefill_context_parallelism_is_not_ignored() -> None:
    """0.24 divided the cache over these ranks too. Since 0.26 they hold copies, and the figures do not change."""
    lines = "max_model_len=8192, prefill_context_parallel_size=2\nGPU KV cache size: 81,920 tokens\n"
    text = "vLLM API server version {}\n" + lines + "Maximum concurrency for 8,192 tokens per request: 10.00x\n"
    assert kvcalc.audit(text.format("0.26.0"), model="llama-3.1-8b")["equal"] == 1
    with pytest.raises(UsageError, match=r"prefill_context_parallel_size of 2 is not modelled before vLLM 0\.26"):
        kvcalc.audit(text.format("0.24.0"), model="llama-3.1-8b")


def test_the_copies_that_divide_a_prompt_may_divide_the_cache() -> None:
    """vLLM 0.33.0's own plan: DeepSeek-V3.2 in fp8, tp 8, pcp 2, dcp 16: 13,961 blocks and 14,296,064 tokens."""
    log = (
        "vLLM API server version 0.33.0\n"
        "tensor_parallel_size=8, prefill_context_parallel_size=2, decode_context_parallel_size={}, kv_cache_dtype=fp8, "
        "max_seq_len=32768\nGPU KV cache size: 14,296,064 tokens\n# GPU blocks: 13961\n"
        "Maximum concurrency for 32,768 tokens per request: 436.28x\n"
    )
    found = kvcalc.audit(log.format(16), model="deepseek-v3.2")
    assert (found["equal"], found["unexplained"]) == (2, 0)
    with pytest.raises(UsageError, match="must be 2 or 16"):
        kvcalc.audit(log.format(4), model="deepseek-v3.2")
    # 0.28 divided the cache of dense MLA too, and the newest release does not.
    dense = "vLLM API server version {}\ntensor_parallel_size=2, prefill_context_parallel_size=2, max_model_len=8192, "
    dense += "decode_context_parallel_size=4\nGPU KV cache size: 2,444,736 tokens\n"
    dense += "Maximum concurrency for 8,192 tokens per request: 298.43x\n"
    assert kvcalc.audit(dense.format("0.28.0"), model="deepseek-v3")["unexplained"] == 0
    with pytest.raises(ModelError, match="for sparse MLA only"):
        kvcalc.audit(dense.format("0.33.0"), model="deepseek-v3")
