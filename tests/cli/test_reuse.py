"""`--prefix-tokens`, `--turns`, `--offload` and `--transfer-bandwidth` on the command line."""

from __future__ import annotations

import json
from typing import Any

import pytest

import kvcalc as api
from tests.conftest import spawn

MODEL = ("estimate", "llama-3.1-8b", "--engine", "vllm", "--context", "32k", "--batch", "8")
SERVED = (
    "estimate", "llama-3.1-8b", "--gpu", "h100", "--engine", "vllm", "--input-tokens", "30k", "--output-tokens", "500",
)  # fmt: skip
ROW = 2 * 32 * 8 * 128 * 2  # bytes of one token of llama-3.1-8b in bf16


def test_no_option_is_today_s_answer(kvcalc: Any) -> None:
    plain = kvcalc(*MODEL, "--json").json
    assert "reuse" not in plain
    assert kvcalc(*MODEL, "--prefix-tokens", "0", "--json").json == plain


def test_a_prefix_counted_by_hand(kvcalc: Any) -> None:
    document = kvcalc(*MODEL, "--prefix-tokens", "8000", "--kv-memory", "40GiB", "--json").json
    cache, prefix = document["kv_cache"], document["reuse"]["prefix"]
    assert cache["bytes_per_device"] == (8000 + 8 * (32_768 - 8000)) * ROW
    assert prefix == {
        "prefix_tokens": 8000, "block_tokens": 16, "found_tokens": 8000, "shared_tokens": 8000,
        "kept_bytes": 8000 * ROW, "saved_bytes": 7 * 8000 * ROW, "next_request_bytes": (32_768 - 8000) * ROW,
        "max_batch_size_alone": 10, "more_requests": 2,
    }  # fmt: skip
    assert document["fit"]["max_batch_size"] == 12
    assert (8000 + 12 * 24_768) * ROW <= 40 * 2**30 < (8000 + 13 * 24_768) * ROW
    engine = document["engine"]
    assert sum(line["bytes"] for line in engine["request_lines"]) == engine["request_bytes"] == 32_768 * ROW
    assert sum(line["bytes"] for line in engine["pool_lines"]) == cache["bytes_per_device"]


def test_the_batch_on_a_device_fills_the_memory_and_no_more(kvcalc: Any) -> None:
    for engine in ("logical", "vllm", "sglang", "tensorrt-llm"):
        question = ("llama-3.1-8b", "--gpu", "h100", "--engine", engine, "--context", "16k", "--prefix-tokens", "5000")
        fit = kvcalc("fit", *question, "--json").json
        most = fit["fit"]["max_batch_size"]
        assert most > fit["reuse"]["prefix"]["max_batch_size_alone"]
        assert fit["reuse"]["prefix"]["more_requests"] == most - fit["reuse"]["prefix"]["max_batch_size_alone"]
        there = [kvcalc("fit", *question, "--batch", batch, "--json") for batch in (most, most + 1)]
        assert [result.status for result in there] == [0, 4]
        assert there[0].json["fit"]["kv_cache_bytes"] <= fit["fit"]["kv_cache_memory_bytes"]


def test_the_hit_rate_follows_from_the_prefix(kvcalc: Any) -> None:
    prefix = kvcalc(*SERVED, "--prefix-tokens", "15000", "--json").json
    rate = 14_992 / 30_720  # whole blocks of 16 tokens
    assert prefix["workload"]["prefix_hit_rate"] == pytest.approx(rate)
    plain = kvcalc(*SERVED, "--concurrency", "8", "--prefix-hit-rate", str(rate), "--json").json
    same = kvcalc(*SERVED, "--concurrency", "8", "--prefix-tokens", "15000", "--json").json
    for key in ("ttft_seconds", "tpot_seconds", "tokens_per_second"):
        assert same["throughput"]["serving"][key] == pytest.approx(plain["throughput"]["serving"][key])


def test_a_hit_rate_may_not_contradict_the_prefix(kvcalc: Any) -> None:
    result = kvcalc(*SERVED, "--prefix-tokens", "15000", "--prefix-hit-rate", "0.2")
    assert result.status == 2
    assert "contradicts --prefix-tokens" in result.err
    # Requests may find more than what all of them share.
    more = kvcalc(*SERVED, "--prefix-tokens", "15000", "--prefix-hit-rate", "0.9", "--json").json
    assert more["workload"]["prefix_hit_rate"] == 0.9


def test_sessions_counted_by_hand(kvcalc: Any) -> None:
    """Four turns of 2,048 tokens each, after a system prompt of 1,000 tokens, of which 992 are in whole blocks."""
    asked = ("--context", "9192", "--prefix-tokens", "1000", "--turns", "4", "--kv-memory", "10GiB", "--json")
    found = kvcalc("estimate", "llama-3.1-8b", "--engine", "vllm", *asked).json["reuse"]["sessions"]
    ends = [3048, 5096, 7144, 9192]
    reused = [992, 3040, 5088, 7136]
    assert [row["prompt_tokens"] for row in found["rows"]] == ends
    assert [row["end_tokens"] for row in found["rows"]] == ends
    assert [row["reused_tokens"] for row in found["rows"]] == reused
    assert [row["idle_bytes"] for row in found["rows"]] == [(end // 16 * 16 - 992) * ROW for end in ends]
    assert found["idle_session_bytes"] == (7136 - 992) * ROW
    assert found["kept_sessions"] == (10 * 2**30 - 992 * ROW) // ((7136 - 992) * ROW) == 13
    running = 992 + 9200 - 992
    assert found["kept_sessions_beside_batch"] == (10 * 2**30 - running * ROW) // ((7136 - 992) * ROW)
    assert found["reuse_rate"] == pytest.approx(sum(reused) / sum(ends))


def test_a_later_turn_prefills_less(kvcalc: Any) -> None:
    plain, turns = (kvcalc(*SERVED, *more, "--json").json for more in ((), ("--turns", "8")))
    sessions = turns["reuse"]["sessions"]
    assert sessions["prefill_seconds"] < sessions["prefill_seconds_alone"]
    assert turns["throughput"]["serving"]["ttft_seconds"] < plain["throughput"]["serving"]["ttft_seconds"]
    assert turns["workload"]["prefix_hit_rate"] == sessions["reused_tokens"] / 30_720
    assert turns["kv_cache"] == plain["kv_cache"]


def test_tiers_counted_by_hand(kvcalc: Any) -> None:
    asked = ("--offload", "cpu=200GiB,disk=2TiB", "--offload-bandwidth", "disk=5GB/s", "--json")
    document = kvcalc(*MODEL, "--gpu", "h100", *asked).json
    tiers, (cpu, disk) = document["reuse"]["tiers"], document["reuse"]["tiers"]["rows"]
    assert (tiers["unit_tokens"], tiers["unit_bytes"]) == (16, 16 * ROW)
    assert tiers["session_bytes"] == tiers["loaded_bytes_per_device"] == 32_768 * ROW == 4 * 2**30
    assert (cpu["sessions"], cpu["tokens"]) == (50, 200 * 2**30 // ROW)
    assert (disk["sessions"], disk["tokens"]) == (512, 2 * 2**40 // ROW)
    assert cpu["load_seconds"] == pytest.approx(4 * 2**30 / 64e9)
    assert disk["load_seconds"] == pytest.approx(4 * 2**30 / 5e9)
    assert cpu["break_even_tokens"] < disk["break_even_tokens"] < 32_768
    assert disk["load_seconds"] < tiers["prefill_seconds"]


def test_a_tier_keeps_a_common_prefix_once(kvcalc: Any) -> None:
    asked = ("--context", "8192", "--prefix-tokens", "2048", "--offload", "cpu=1GiB,disk=100MiB", "--json")
    tiers = kvcalc("estimate", "llama-3.1-8b", "--engine", "vllm", *asked).json["reuse"]["tiers"]
    cpu, disk = tiers["rows"]
    assert (tiers["prefix_bytes"], tiers["session_bytes"]) == (2048 * ROW, 6144 * ROW)
    assert (cpu["sessions"], cpu["tokens"]) == (1, 8192)  # 1 GiB is 8,192 tokens
    assert (disk["sessions"], disk["tokens"]) == (0, 800)


def test_a_break_even_length_is_where_both_times_meet(kvcalc: Any) -> None:
    def times(context: int) -> tuple[float, float]:
        asked = ("--context", context, "--offload", "disk=2TiB", "--json")
        tiers = kvcalc("estimate", "llama-3.1-8b", "--engine", "vllm", "--gpu", "h100", *asked).json["reuse"]["tiers"]
        return tiers["rows"][0]["load_seconds"], tiers["prefill_seconds"]

    asked = ("--context", "8k", "--offload", "disk=2TiB", "--get", "reuse.tiers.rows.0.break_even_tokens")
    length = int(kvcalc("estimate", "llama-3.1-8b", "--engine", "vllm", "--gpu", "h100", *asked).out)
    load, again = times(length)
    assert load <= again
    load, again = times(length - 16)
    assert load > again


def test_larger_tiers_keep_more(kvcalc: Any) -> None:
    for model, engine in (("llama-3.1-8b", "vllm"), ("gpt-oss-20b", "sglang"), ("qwen3.5-27b", "vllm")):
        before = (0, 0)
        for size in ("10GiB", "11GiB", "20GiB", "1TiB"):
            asked = ("--context", "20k", "--offload", f"cpu={size}", "--json")
            row = kvcalc("estimate", model, "--engine", engine, *asked).json["reuse"]["tiers"]["rows"][0]
            assert (row["sessions"], row["tokens"]) >= before
            assert row["sessions"] * 20_000 * 0.9 < row["tokens"]
            before = row["sessions"], row["tokens"]


def test_latents_are_kept_once_for_all_devices(kvcalc: Any) -> None:
    """deepseek-v3: all eight devices have every row of MLA. TensorRT-LLM's host cache belongs to each device."""
    for engine, copies in (("vllm", 1), ("sglang", 1), ("tensorrt-llm", 8)):
        asked = ("--engine", engine, "--context", "16k", "--tp", "8", "--offload", "cpu=1TiB", "--json")
        tiers = kvcalc("estimate", "deepseek-v3", *asked).json["reuse"]["tiers"]
        one = tiers["loaded_bytes_per_device"]
        assert one == 61 * 576 * 2 * 16_384
        # A chunk of vLLM is rounded up to a page of 4,096 bytes: 1,124,352 to 1,126,400 bytes for 16 tokens.
        assert tiers["session_bytes"] == (1_126_400 * 1024 if engine == "vllm" else copies * one)


def test_heads_are_kept_by_every_device(kvcalc: Any) -> None:
    asked = ("--engine", "vllm", "--context", "16k", "--tp", "4", "--gpu", "h100x4", "--offload", "cpu=1TiB,disk=1TiB")
    tiers = kvcalc("estimate", "llama-3.1-8b", *asked, "--json").json["reuse"]["tiers"]
    cpu, disk = tiers["rows"]
    assert tiers["loaded_bytes_per_device"] * 4 == tiers["session_bytes"] == 16_384 * ROW
    # Every device reads host memory over its own link; the disk is one for all.
    assert cpu["load_seconds"] == pytest.approx(tiers["loaded_bytes_per_device"] / 64e9)
    assert disk["load_seconds"] == pytest.approx(tiers["session_bytes"] / 6.8e9)


def test_a_transfer_counted_by_hand(kvcalc: Any) -> None:
    for link, rate in (("infiniband-400g", 50e9), ("12.5GB/s", 12.5e9), ("nvlink", 450e9), ("pcie", 64e9)):
        sent = kvcalc(*SERVED, "--transfer-bandwidth", link, "--json").json["throughput"]
        assert sent["kv_transfer"]["bytes_per_device"] == 30_720 * ROW
        assert sent["kv_transfer"]["seconds"] == pytest.approx(30_720 * ROW / rate)
        assert sent["kv_transfer"]["link"] == (link if link[0].isalpha() else None)
        share = sent["kv_transfer"]["seconds"] / sent["serving"]["ttft_seconds"]
        assert sent["kv_transfer"]["share_of_ttft"] == pytest.approx(share)


@pytest.mark.parametrize(
    ("more", "status", "said"),
    [
        (("--prefix-tokens", "40k"), 2, "the prompt has 32,768 tokens\n  use at most 32768, or a longer prompt"),
        (("--prefix-tokens", "none"), 2, "--prefix-tokens"),
        (("--turns", "1"), 2, "--turns"),
        (("--turns", "5000"), 2, "at most 1,000"),
        (("--offload", "200GiB"), 2, "cpu=200GiB,disk=2TiB"),
        (("--offload", "gpu=200GiB"), 2, "one of cpu, disk, remote"),
        (("--offload", "cpu=1GiB,cpu=2GiB"), 2, "given twice"),
        (("--offload", "cpu=0"), 2, "--offload"),
        (("--offload", "cpu=1GiB", "--offload-bandwidth", "disk=1GB/s"), 2, "--offload has no such tier"),
        (("--offload-bandwidth", "disk=1GB/s"), 2, "needs --offload"),
        (("--offload", "cpu=1GiB", "--pp", "2"), 2, "without stages"),
        (("--transfer-bandwidth", "50GB/s"), 2, "--gpu h100"),
        (("--transfer-bandwidth", "carrier-pigeon", "--gpu", "h100"), 2, "infiniband-400g"),
        (("--transfer-bandwidth", "nvlink", "--gpu", "rtx-4090"), 2, "rtx-4090"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(kvcalc: Any, more: tuple[str, ...], status: int, said: str) -> None:
    result = kvcalc(*MODEL[:-2], *more)
    assert result.status == status, result.err
    assert said in result.err
    assert "Traceback" not in result.err


@pytest.mark.parametrize(
    ("engine", "more", "said"),
    [
        ("transformers", ("--prefix-tokens", "1k"), "no prefix cache"),
        ("transformers", ("--offload", "cpu=1GiB"), "no prefix cache"),
        ("mlx", ("--offload", "cpu=1GiB"), "no such tier"),
        ("llama.cpp", ("--offload", "disk=1GiB"), "no such tier"),
        ("tensorrt-llm", ("--offload", "remote=1GiB"), "one of cpu, disk"),
        ("vllm", ("--prefix-tokens", "1k", "--no-enable-prefix-caching"), "leave --no-enable-prefix-caching out"),
        ("llama.cpp", ("--transfer-bandwidth", "50GB/s", "--gpu", "h100"), "no separate prefill instances"),
    ],
)  # fmt: skip
def test_what_an_engine_does_not_have_is_refused(kvcalc: Any, engine: str, more: tuple[str, ...], said: str) -> None:
    result = kvcalc("estimate", "llama-3.1-8b", "--engine", engine, *more)
    assert result.status == 2, result.err
    assert said in result.err


def test_a_prefix_shorter_than_a_block_is_not_found(kvcalc: Any) -> None:
    result = kvcalc(
        "estimate", "qwen3.5-27b", "--engine", "vllm", "--context", "16k", "--prefix-tokens", "800", "--json"
    )
    assert result.json["reuse"]["prefix"]["found_tokens"] == 0
    assert "steps of 832 tokens" in str(result.json["warnings"])


def test_slots_of_llama_cpp_copy_the_prefix(kvcalc: Any) -> None:
    asked = ("llama-3.1-8b", "--engine", "llama.cpp", "--context", "16k", "--batch", "4", "--gpu", "h100")
    plain = kvcalc("estimate", *asked, "--json").json
    shared = kvcalc("estimate", *asked, "--prefix-tokens", "8k", "--json").json
    assert shared["kv_cache"] == plain["kv_cache"]
    assert shared["throughput"]["prefill_seconds"] < plain["throughput"]["prefill_seconds"]
    assert "saves prefill, but no memory" in str(shared["warnings"])


def test_comparisons_sweeps_and_plans_take_a_prefix(kvcalc: Any) -> None:
    device = ("--engine", "vllm", "--gpu", "h100", "--json")
    for command, path in (("compare", "models"), ("sweep", "points")):
        asked = (command, "llama-3.1-8b", "--context", "16k", "--batch", "8", *device)
        plain, shared = (kvcalc(*asked, *more).json[path][0] for more in ((), ("--prefix-tokens", "8000")))
        assert shared["bytes_per_device"] == plain["bytes_per_device"] - 7 * 8000 * ROW
        assert shared["prefill_seconds"] < plain["prefill_seconds"]
    load = ("--input-tokens", "12k", "--output-tokens", "500", "--concurrency", "64", *device)
    plain, shared = (
        kvcalc("plan", "llama-3.1-8b", *load, *more).json["plans"][0] for more in ((), ("--prefix-tokens", "8000"))
    )
    rates = [row["tokens_per_second"] / row["num_devices"] for row in (plain, shared)]
    assert shared["num_devices"] < plain["num_devices"]
    assert rates[0] < rates[1]
    assert kvcalc("plan", "llama-3.1-8b", *load, "--prefix-tokens", "8000").json["prefix_tokens"] == 8000


def test_a_sweep_finds_the_prefix_of_every_context(kvcalc: Any) -> None:
    asked = ("--engine", "vllm", "--gpu", "h100", "--prefix-tokens", "4000", "--json")
    for point in kvcalc("sweep", "llama-3.1-8b", "--context", "8k,32k", *asked).json["points"]:
        one = kvcalc("estimate", "llama-3.1-8b", "--context", point["context_tokens"], *asked).json
        assert point["prefill_seconds"] == pytest.approx(one["throughput"]["prefill_seconds"])
        assert point["total_bytes"] == one["kv_cache"]["total_bytes"]


def test_several_engines_side_by_side(kvcalc: Any) -> None:
    asked = ("llama-3.1-8b", "--context", "16k", "--batch", "4", "--prefix-tokens", "8000", "--engine", "all", "--json")
    rows = {row["engine"]: row for row in kvcalc("estimate", *asked).json["engines"]}
    assert rows["vllm"]["total_bytes"] < rows["llama.cpp"]["total_bytes"]
    assert "no prefix cache" in rows["transformers"]["reason"]


@pytest.mark.settled
def test_batch_and_python_give_the_same_answer(kvcalc: Any) -> None:
    asked = (*SERVED, "--prefix-tokens", "1000", "--turns", "3", "--offload", "cpu=64GiB", "--json")
    document = kvcalc(*asked).json
    line = {
        "model": "llama-3.1-8b", "gpu": "h100", "engine": "vllm", "input_tokens": 30_720, "output_tokens": 500,
        "prefix_tokens": 1000, "turns": 3, "offload": "cpu=64GiB",
    }  # fmt: skip
    # Twice: a question that is asked again is not one that a former question answers.
    answers = spawn("batch", stdin=f"{json.dumps(line)}\n{json.dumps({**line, 'prefix_tokens': 0})}\n").out.splitlines()
    assert json.loads(answers[0]) == document
    assert json.loads(answers[1])["reuse"]["prefix"] is None
    found = api.estimate(
        "llama-3.1-8b", devices=api.find_devices("h100"), engine="vllm",
        speed=api.SpeedQuestion(input_tokens=30_720, output_tokens=500),
        reuse=api.CacheReuse(prefix_tokens=1000, turns=3, offload=(("cpu", 64 * 2**30),)),
    )  # fmt: skip
    assert found == document


def test_the_screen_names_what_matters(kvcalc: Any) -> None:
    more = (
        "--prefix-tokens",
        "2000",
        "--turns",
        "8",
        "--offload",
        "cpu=200GiB,remote=2TiB",
        "--transfer-bandwidth",
        "nvlink",
    )
    result = kvcalc(*SERVED, *more, "--format", "human")
    for said in ("shared prefix", "sessions", "pays from", "KV transfer", "idle sessions", "without the prefix"):
        assert said in result.out, said
    assert "the rate of remote is not known" in result.err
