"""`kvcalc prefix` against a cache that is simulated block by block, and against the speed model."""

from __future__ import annotations

import io
import json
import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import kvcalc as api
from kvcalc.errors import KvcalcError, UsageError
from kvcalc.planning.prefix import KNEE_SHARE, Sizes, prefix_curve
from kvcalc.planning.prefix.cost import PrefillTime, Prices, parse_memory_price, prefill_time
from kvcalc.question.question import Question
from kvcalc.server.case import make_case
from kvcalc.server.speed import Speed, speed_of
from kvcalc.throughput.hardware import Devices, find_devices
from tests.test_schema import check
from tests.traces.test_reuse import LruCache, Prompt, best_hits, tree_of_prompts

BLOCK = 512
H100 = find_devices("h100")


def write_trace(path: Path, prompts: list[Prompt], seconds: float = 1.0, short: int = 0) -> Path:
    """A trace in Mooncake's format. The last block of each prompt lacks `short` tokens."""
    rows = [
        {"timestamp": round(1000 * seconds * place), "input_length": tokens - short, "output_length": 10,
         "hash_ids": list(blocks)}
        for place, (blocks, tokens) in enumerate(prompts)
    ]  # fmt: skip
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def prompts() -> list[Prompt]:
    return tree_of_prompts(5, 400, BLOCK, popular=0.7, longest=6)


@pytest.fixture
def trace(tmp_path: Path, prompts: list[Prompt]) -> str:
    return str(write_trace(tmp_path / "trace.jsonl", prompts, short=100))


@pytest.mark.parametrize(("engine", "step"), [("vllm", 16), ("sglang", 1), ("tensorrt-llm", 32), ("logical", 1)])
def test_the_hits_are_those_of_a_simulated_cache_of_these_bytes(
    trace: str, prompts: list[Prompt], engine: str, step: int
) -> None:
    gib = 1024**3
    sizes = [1 * gib, 5 * gib, 20 * gib, 60 * gib]
    found = api.prefix_curve(trace, "llama-3.1-8b", engine=engine, cache_memory_bytes=sizes)
    check(dict(found), "prefix")
    # 32 layers, 8 heads of 128 for K and for V, 2 bytes.
    block_bytes = BLOCK * 32 * 8 * 128 * 2 * 2
    for asked, row in zip(sizes, found["curve"]):
        assert row["cache_blocks"] == asked // block_bytes
        assert row["cache_bytes"] == row["cache_bytes_per_device"] == row["cache_blocks"] * block_bytes
        cache = LruCache(row["cache_blocks"], BLOCK)
        for blocks, tokens in prompts:
            cache.serve(blocks, (tokens - 100 - 1) // step * step)
        assert row["hit_rate"] == cache.hit_tokens / sum(tokens - 100 for _, tokens in prompts)


def test_the_saved_prefill_is_the_difference_of_the_prefills_with_and_without_the_hits(
    trace: str, prompts: list[Prompt]
) -> None:
    devices = find_devices("h100x2")
    found = api.prefix_curve(trace, "llama-3.1-8b", engine="vllm", devices=devices, cache_tokens=[100 * BLOCK])
    case = make_case(Question(api.load_model("llama-3.1-8b"), engine="vllm", devices=devices))
    speed = speed_of(case, [])
    assert isinstance(speed, Speed)
    cache, saved, total = LruCache(100, BLOCK), 0.0, 0.0
    for blocks, tokens in prompts:
        before = cache.hit_tokens
        cache.serve(blocks, (tokens - 101) // 16 * 16)
        hits = cache.hit_tokens - before
        alone = speed.model.prefill_work(tokens - 100).seconds
        saved += alone - speed.model.prefill_work(tokens - 100, hits).seconds
        total += alone
    (row,) = found["curve"]
    assert found["prefill"] is not None
    assert row["saved_prefill_seconds"] == pytest.approx(saved, rel=1e-6)
    assert found["prefill"]["seconds"] == pytest.approx(total, rel=1e-6)
    assert row["saved_prefill_share"] == pytest.approx(saved / total, rel=1e-6)
    assert row["saved_gpu_seconds"] == pytest.approx(2 * saved, rel=1e-6)
    assert row["saved_ttft_seconds"] == pytest.approx(saved / len(prompts), rel=1e-6)


def test_the_prefill_of_windows_is_fitted_with_a_stated_error(trace: str) -> None:
    found = api.prefix_curve(trace, "gemma-3-27b", engine="vllm", devices=H100)
    assert found["prefill"] is not None
    assert 0 < found["prefill"]["worst_error"] < 0.1
    assert "uneven-blocks" in {warning["code"] for warning in found["warnings"]}
    plain = api.prefix_curve(trace, "llama-3.1-8b", engine="vllm", devices=H100)
    assert not {"uneven-blocks", "does-not-fit"} & {warning["code"] for warning in plain["warnings"]}


def test_windows_are_spread_over_the_blocks_of_a_prompt_of_mean_length(tmp_path: Path) -> None:
    """Gemma 3 27B has 10 layers with full attention, and vLLM pads the 52 with a window of 1,024 tokens to 60."""
    prompts: list[Prompt] = [((0, 1), 2 * BLOCK), ((2, 3, 4, 5, 6, 7), 6 * BLOCK)]
    found = api.prefix_curve(str(write_trace(tmp_path / "trace.jsonl", prompts)), "gemma-3-27b", engine="vllm")
    assert found["engine"] is not None
    # 16 heads of 128 for K and for V, 2 bytes. The mean prompt has 2,048 tokens in 4 blocks.
    assert found["engine"]["bytes_per_trace_block"] == (10 * 2048 + 60 * 1024) * 16 * 128 * 2 * 2 // 4


@pytest.mark.parametrize(("blocks", "is_uneven"), [(1, False), (2, True), (3, True)])
def test_states_are_spread_over_a_prompt_unless_it_has_one_block(tmp_path: Path, blocks: int, is_uneven: bool) -> None:
    prompts: list[Prompt] = [(tuple(range(blocks)), blocks * BLOCK)]
    found = api.prefix_curve(str(write_trace(tmp_path / "trace.jsonl", prompts)), "falcon-h1-7b", engine="logical")
    assert ("uneven-blocks" in {warning["code"] for warning in found["warnings"]}) is is_uneven


@pytest.mark.parametrize(("smallest", "is_said"), [(2, False), (1, True)])
def test_a_cache_that_is_smaller_than_a_prompt_is_remarked(tmp_path: Path, smallest: int, is_said: bool) -> None:
    path = str(write_trace(tmp_path / "trace.jsonl", [((0, 1), 2 * BLOCK), ((2,), BLOCK)]))
    found = api.prefix_curve(path, cache_tokens=[8 * BLOCK, smallest * BLOCK])
    assert ("below-largest-request" in {warning["code"] for warning in found["warnings"]}) is is_said


def test_what_is_said_of_the_model_is_among_the_warnings(trace: str) -> None:
    said = list(api.load_model("a.x-3.1").remarks)
    assert said
    found = api.prefix_curve(trace, "a.x-3.1", engine="vllm")
    assert said == [warning["text"] for warning in found["warnings"] if warning["code"] == "remark"]


def test_without_a_known_speed_the_hits_are_counted_all_the_same(trace: str, monkeypatch: pytest.MonkeyPatch) -> None:
    known = api.prefix_curve(trace, "llama-3.1-8b", engine="vllm", devices=H100)
    monkeypatch.setattr("kvcalc.server.speed.speed_of", lambda *_: "the reason")
    found = api.prefix_curve(trace, "llama-3.1-8b", engine="vllm", devices=H100)
    assert (found["prefill"], found["unlimited"]["saved_prefill_seconds"]) == (None, None)
    assert ("throughput", "the reason") in {(warning["part"], warning["text"]) for warning in found["warnings"]}
    assert found["unlimited"]["hit_rate"] == known["unlimited"]["hit_rate"]


def test_each_device_loads_its_part_from_the_cpu_and_one_drive_loads_all(trace: str, prompts: list[Prompt]) -> None:
    tiers = {"cpu": 12 * 1024**3, "disk": 40 * 1024**3}
    found = api.prefix_curve(
        trace, "llama-3.1-8b", engine="vllm", devices=find_devices("h100x2"), tensor_parallel_size=2,
        offload_bytes=tiers, kv_memory_bytes=4 * 1024**3,
    )  # fmt: skip
    assert found["trace"]["answer_tokens"] == 10 * len(prompts)
    for tier, parts in zip(found["tiers"][1:], (2, 1)):
        moved = tier["hit_rate"] * found["trace"]["prompt_tokens"] * 32 * 8 * 128 * 2 * 2 / parts
        assert tier["bandwidth_bytes_per_second"]
        assert tier["load_seconds"] == pytest.approx(moved / tier["bandwidth_bytes_per_second"])
        assert moved > 0


@pytest.mark.parametrize("longest", [300, 5000, 100_000])
@pytest.mark.parametrize("model", ["llama-3.1-8b", "gemma-3-27b"])
def test_the_stated_error_of_the_fit_is_the_largest(model: str, longest: int) -> None:
    speed = speed_of(make_case(Question(api.load_model(model), engine="vllm", devices=H100)), [])
    assert isinstance(speed, Speed)
    fitted = prefill_time(speed.model, longest)
    ends = [abs(fitted.seconds(n, n * n) / speed.model.prefill_work(n).seconds - 1) for n in (256, longest)]
    assert max(ends) <= fitted.worst_error * (1 + 1e-9) + 1e-12
    assert (fitted.worst_error < 1e-9) == (model == "llama-3.1-8b" or longest == 300)


@pytest.mark.parametrize(("longest", "shortest", "number"), [(5000, 256, 12), (256, 256, 1), (100, 100, 1)])
def test_the_fit_is_of_twelve_lengths_in_even_steps(longest: int, shortest: int, number: int) -> None:
    asked: list[int] = []

    def work(tokens: int) -> Any:
        asked.append(tokens)
        return SimpleNamespace(seconds=3e-5 * tokens + 2e-9 * tokens**2)

    model: Any = SimpleNamespace(prefill_work=work)
    fitted = prefill_time(model, longest)
    assert (len(asked), min(asked), max(asked)) == (number, shortest, longest)
    assert max(after / before for before, after in pairwise(asked)) < 1.35 if number > 1 else True
    assert fitted.seconds(longest, longest**2) == pytest.approx(work(longest).seconds)
    assert number == 1 or (fitted.per_token, fitted.per_square) == pytest.approx((3e-5, 2e-9))


def test_the_sizes_double_from_the_largest_prompt_to_all_blocks(trace: str) -> None:
    for found in (api.prefix_curve(trace), api.prefix_curve(trace, "llama-3.1-8b", engine="vllm")):
        unit = 1 if found["engine"] is None else found["engine"]["bytes_per_trace_block"]
        power, expected = 1, list[int]()
        while not expected or expected[-1] < found["trace"]["distinct_blocks"]:
            if power >= found["trace"]["largest_request_blocks"] * unit:
                expected.append(power // unit)
            power *= 2
        assert [row["cache_blocks"] for row in found["curve"]] == expected


def test_the_curve_begins_with_the_largest_prompt_and_ends_with_all_blocks(tmp_path: Path) -> None:
    """Both may be powers of two themselves: 4 prompts of 2 blocks, none of them shared."""
    path = write_trace(tmp_path / "trace.jsonl", [((2 * number, 2 * number + 1), 2 * BLOCK) for number in range(4)])
    assert [row["cache_blocks"] for row in api.prefix_curve(str(path))["curve"]] == [2, 4, 8]


@pytest.mark.parametrize(
    ("model", "asked", "size"),
    [
        ("llama-3.3-70b", {}, 0),  # 70 billion parameters of two bytes leave less than nothing of 80 GB
        ("llama-3.1-8b", {"kv_memory_bytes": 0}, 0),
        ("llama-3.1-8b", {"kv_memory_bytes": 1}, 1),
    ],
)
def test_a_device_without_memory_for_the_cache_has_a_tier_of_nothing(
    trace: str, model: str, asked: dict[str, int], size: int
) -> None:
    found = api.prefix_curve(trace, model, engine="vllm", devices=H100, **asked)  # type: ignore[arg-type]
    (row,) = found["tiers"]
    assert (row["memory_bytes"], row["cache_blocks"], row["hit_rate"]) == (size, 0, 0.0)
    codes = {warning["code"] for warning in found["warnings"]}
    assert ("does-not-fit" in codes) is (size == 0)
    # Nothing is loaded to the device's own memory.
    assert (row["bandwidth_bytes_per_second"], "tier-bandwidth" in codes) == (None, False)


def test_a_fit_that_is_off_by_more_than_two_percent_is_worth_a_remark(
    trace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for error, is_said in ((0.019, False), (0.021, True)):
        monkeypatch.setattr("kvcalc.planning.prefix.prefill_time", lambda *_, e=error: PrefillTime(1e-5, 0.0, e))
        found = api.prefix_curve(trace, "llama-3.1-8b", engine="vllm", devices=H100)
        assert ("fitted-prefill" in {warning["code"] for warning in found["warnings"]}) == is_said


def test_the_knee_is_the_smallest_cache_with_nine_tenths_of_the_hits(trace: str) -> None:
    found = api.prefix_curve(trace)
    knee, most = found["knee"], found["unlimited"]["hit_rate"]
    assert knee["hit_rate"] >= KNEE_SHARE * most
    below = api.prefix_curve(trace, cache_tokens=[knee["cache_tokens"] - BLOCK])
    assert below["curve"][0]["hit_rate"] < KNEE_SHARE * most


@pytest.mark.parametrize(("engine", "copies"), [("vllm", True), ("tensorrt-llm", False)])
def test_a_tier_finds_what_a_cache_of_both_sizes_finds(
    trace: str, prompts: list[Prompt], engine: str, copies: bool
) -> None:
    gib = 1024**3
    asked: dict[str, Any] = {"engine": engine, "devices": H100, "kv_memory_bytes": 4 * gib}
    tiers = {"cpu": 12 * gib, "disk": 40 * gib}
    found = api.prefix_curve(trace, "llama-3.1-8b", offload_bytes=tiers, **asked)
    reach = [4 * gib, 12 * gib, 40 * gib] if copies else [4 * gib, 16 * gib, 56 * gib]
    plain = api.prefix_curve(trace, "llama-3.1-8b", cache_memory_bytes=reach, **asked)
    rates = [row["hit_rate"] for row in plain["curve"]]
    seconds = [row["saved_prefill_seconds"] or 0.0 for row in plain["curve"]]
    assert [tier["name"] for tier in found["tiers"]] == ["device", "cpu", "disk"]
    assert [tier["hit_rate"] for tier in found["tiers"]] == pytest.approx(_steps(rates))
    assert [tier["prefill_seconds"] for tier in found["tiers"]] == pytest.approx(_steps(seconds))
    total = found["trace"]["prompt_tokens"]
    for tier in found["tiers"][1:]:
        moved = tier["hit_rate"] * total * 32 * 8 * 128 * 2 * 2
        assert tier["bandwidth_bytes_per_second"] is not None
        assert tier["load_seconds"] == pytest.approx(moved / tier["bandwidth_bytes_per_second"])
    check(dict(found), "prefix")


def _steps(values: list[float]) -> list[float]:
    return [after - before for before, after in zip([0.0, *values], values)]


def test_a_latent_is_on_every_device_and_once_in_a_tier(trace: str) -> None:
    found = api.prefix_curve(trace, "deepseek-v3", engine="vllm", tensor_parallel_size=8)
    engine = found["engine"]
    assert engine is not None
    one = BLOCK * 61 * (512 + 64) * 2
    assert engine["bytes_per_trace_block_per_device"] == one
    # vLLM rounds a block of 16 tokens up to pages of 4,096 bytes.
    assert engine["offloaded_bytes_per_trace_block"] == BLOCK // 16 * 275 * 4096 > one
    assert engine["bytes_per_trace_block"] == 8 * one


@pytest.mark.parametrize("devices", [H100, find_devices("h100x2")])
def test_prices_are_for_the_time_of_the_trace_and_the_bytes_of_all_devices(trace: str, devices: Devices) -> None:
    found = api.prefix_curve(
        trace, "llama-3.1-8b", engine="vllm", devices=devices, price_per_hour=2.5,
        memory_prices_per_gib_hour={"cpu": 0.004, "disk": 0.0002}, cache_memory_bytes=[8 * 1024**3],
        tensor_parallel_size=devices.num_devices,
    )  # fmt: skip
    (row,) = found["curve"]
    hours, saved = 399 / 3600, row["saved_gpu_seconds"]
    assert saved
    assert row["cpu_cost_per_gpu_second"] == pytest.approx(8 * 0.004 * hours / saved)
    assert row["disk_cost_per_gpu_second"] == pytest.approx(8 * 0.0002 * hours / saved)
    share = 8 * 1024**3 / H100.gpu.memory_bytes
    assert row["device_cost_per_gpu_second"] == pytest.approx(share * 2.5 * hours / saved)


def test_the_time_of_a_trace_begins_with_its_first_request(tmp_path: Path, prompts: list[Prompt]) -> None:
    asked: dict[str, Any] = {"devices": H100, "price_per_hour": 2.5, "cache_tokens": [100 * BLOCK]}
    early, late = tmp_path / "early.jsonl", tmp_path / "late.jsonl"
    rows = [json.loads(line) for line in write_trace(early, prompts).read_text().splitlines()]
    late.write_text("".join(json.dumps({**row, "timestamp": row["timestamp"] + 10**7}) + "\n" for row in rows))
    found = [api.prefix_curve(str(path), "llama-3.1-8b", **asked)["curve"] for path in (early, late)]
    assert found[0] == found[1]


def test_a_trace_on_standard_input_is_read_once(trace: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(Path(trace).read_bytes())))
    assert api.prefix_curve("-")["curve"] == api.prefix_curve(trace)["curve"]


def test_without_a_device_only_the_tiers_have_a_row(trace: str) -> None:
    found = api.prefix_curve(trace, "llama-3.1-8b", engine="vllm", offload_bytes={"cpu": 12 * 1024**3})
    assert [tier["name"] for tier in found["tiers"]] == ["cpu"]


def test_rows_that_contradict_others_are_skipped_and_named(tmp_path: Path) -> None:
    prompts: list[Prompt] = [((1, 2), 1024), ((9, 2), 1024), ((1, 2, 3), 1536)]
    found = api.prefix_curve(str(write_trace(tmp_path / "trace.jsonl", prompts)))
    assert (found["trace"]["num_requests"], found["trace"]["num_bad_rows"]) == (2, 1)
    assert str(found["trace"]["first_bad_row"]).startswith("line 2: the hash_ids contradict earlier rows")
    assert found["unlimited"]["hit_rate"] == 1024 / (1024 + 1536)


def test_a_trace_of_token_ids_has_the_blocks_of_the_engine(tmp_path: Path) -> None:
    ids = list(range(100, 200))
    rows = [{"prompt_token_ids": ids}, {"prompt_token_ids": [*ids[:50], 7, 8]}]
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for engine, hits in (("vllm", 48), ("tensorrt-llm", 32), ("sglang", 50)):
        found = api.prefix_curve(str(path), "llama-3.1-8b", engine=engine, devices=H100, price_per_hour=2.5)
        assert found["unlimited"]["hit_rate"] == hits / 152
        # Without times, there is no cost.
        assert found["unlimited"]["device_cost_per_gpu_second"] is None
        assert found["trace"]["duration_seconds"] is None
        check(dict(found), "prefix")
    # Without an engine, the blocks are vLLM's.
    assert api.prefix_curve(str(path))["trace"]["block_tokens"] == 16


def test_after_a_warm_up_rates_and_times_are_those_of_the_other_requests(tmp_path: Path, prompts: list[Prompt]) -> None:
    path = str(write_trace(tmp_path / "trace.jsonl", prompts))
    found = api.prefix_curve(
        path,
        "llama-3.1-8b",
        engine="logical",
        devices=H100,
        after=0.25,
        cache_tokens=[50 * BLOCK],
        optimal=True,
        price_per_hour=2.5,
    )
    assert (found["trace"]["num_requests"], found["trace"]["warm_up_requests"]) == (400, 100)
    assert found["trace"]["duration_seconds"] == 399
    cache = LruCache(50, BLOCK)
    for number, (blocks, tokens) in enumerate(prompts):
        if number == 100:
            cache.hit_tokens = 0
        cache.serve(blocks, tokens - 1)
    (row,) = found["curve"]
    # From the first request that is counted to the last one, 299 s.
    assert row["saved_gpu_seconds"]
    assert row["cache_bytes"]
    cost = row["cache_bytes"] / H100.gpu.memory_bytes * 2.5 * 299 / 3600
    assert row["device_cost_per_gpu_second"] == pytest.approx(cost / row["saved_gpu_seconds"])
    counted = sum(tokens for _, tokens in prompts[100:])
    assert row["hit_rate"] == cache.hit_tokens / counted
    assert row["optimal_hit_rate"] == best_hits(prompts, 50, BLOCK, 100) / counted > row["hit_rate"]
    assert found["prefill"] is not None
    assert found["prefill"]["mean_seconds"] == pytest.approx(found["prefill"]["seconds"] / 300)
    check(dict(found), "prefix")
    assert api.prefix_curve(path)["curve"][0]["optimal_hit_rate"] is None


def test_a_warm_up_is_a_share_of_a_file(kvcalc: Any, tmp_path: Path, prompts: list[Prompt]) -> None:
    path = str(write_trace(tmp_path / "trace.jsonl", prompts))
    asked = ("prefix", path, "--after", "25%", "--optimal")
    assert kvcalc(*asked, "--get", "trace.warm_up_requests").out == "100\n"
    assert "the first 100 to warm up" in kvcalc(*asked, "--format", "human").out
    assert "best possible" in kvcalc(*asked, "--format", "human").out
    assert kvcalc("prefix", path, "--after", "100%").status == 2
    failed = kvcalc("prefix", "-", "--after", "25%")
    assert (failed.status, "use a file" in failed.err) == (2, True)


def test_many_blocks_are_sampled_and_the_answer_says_so(tmp_path: Path) -> None:
    prompts = tree_of_prompts(2, 4_000, BLOCK, longest=10)
    path = str(write_trace(tmp_path / "trace.jsonl", prompts))
    exact, found = (api.prefix_curve(path, "llama-3.1-8b", most_blocks=most) for most in (10**6, 4_000))
    told: list[int] = []
    prefix_curve(
        path, None, sizes=Sizes(), offload=(), bandwidths=None, prices=Prices(), format=None, block_tokens=None,
        most_blocks=10**6, after=0.0, optimal=False, report=told.append,
    )  # fmt: skip
    assert told == [2000, 4000]
    assert exact["trace"]["sampling_rate"] == 1
    assert found["trace"]["sampling_rate"] < 1
    assert "sampled" in {warning["code"] for warning in found["warnings"]}
    truths = {row["cache_blocks"]: row["hit_rate"] for row in exact["curve"]}
    for row in found["curve"]:
        truth = truths.get(row["cache_blocks"])
        assert row["hit_rate_low"] <= row["hit_rate"] <= row["hit_rate_high"]
        assert truth is None or row["hit_rate_low"] <= truth <= row["hit_rate_high"]
    check(dict(found), "prefix")


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"engine": "llama.cpp"}, "keeps prompts as a whole"),
        ({"engine": "transformers"}, "has no prefix cache"),
        ({"engine": "vllm", "data_parallel_size": 2, "devices": find_devices("h100x2")}, "--dp"),
        ({"engine": "vllm", "engine_settings": {"block-size": 48}}, "are not whole blocks of the engine"),
        ({"engine": "vllm", "offload_bytes": {"tape": 1}}, "'tape': not a tier"),
        ({"engine": "vllm", "cache_tokens": range(1, 2000)}, "more than 1,000 sizes"),
    ],
)
def test_what_cannot_be_answered_is_refused(trace: str, asked: dict[str, Any], message: str) -> None:
    with pytest.raises(KvcalcError) as refused:
        api.prefix_curve(trace, "llama-3.1-8b", **asked)
    assert message in refused.value.message


def test_a_trace_without_blocks_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("arrival,prompt,answer\n0,1,1\n")
    with pytest.raises(UsageError, match="a trace in the format csv does not name shared blocks"):
        api.prefix_curve(str(path))


def test_the_price_of_memory() -> None:
    assert parse_memory_price("cpu=0.003") == ("cpu", 0.003)
    assert parse_memory_price(" CPU =999999999") == ("cpu", 999_999_999)
    assert parse_memory_price("h100=2") is None
    for text in ("cpu=x", "disk=-1", "cpu=nan", "cpu=1e9"):
        with pytest.raises(UsageError, match="not a price"):
            parse_memory_price(text)


def test_a_device_whose_free_memory_is_not_known_has_no_row(trace: str) -> None:
    """The weights of a generic model are not known. Its cache is, so the curve is the same."""
    generic = api.read_config(
        {"model_type": "generic", "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8}, "mine", "test"
    )
    sizes = [2**20, 2**22]
    known = api.prefix_curve(trace, generic, cache_memory_bytes=sizes)
    tiers = {"cpu": 2**24}
    found = api.prefix_curve(
        trace, generic, engine="logical", cache_memory_bytes=sizes, devices=H100, offload_bytes=tiers
    )
    (note,) = [warning for warning in found["warnings"] if warning["part"] == "fit"]
    assert (note["code"], note["text"].startswith("the weights of mine")) == ("unknown", True)
    assert [row["name"] for row in found["tiers"] or ()] == ["cpu"]
    assert [row["hit_rate"] for row in found["curve"]] == [row["hit_rate"] for row in known["curve"]]


def test_the_line_through_the_prefills_has_the_least_relative_errors() -> None:
    """A long window bends the line. At the least sum of squares, neither of its numbers has a slope."""
    speed = speed_of(make_case(Question(api.load_model("mistral-7b-v0.1"), engine="vllm", devices=H100)), [])
    assert isinstance(speed, Speed)
    line = prefill_time(speed.model, 30_000)
    lengths = [round(256 * (30_000 / 256) ** (step / 11)) for step in range(12)]
    times = [speed.model.prefill_work(length).seconds for length in lengths]

    errors = [(line.per_token + line.per_square * n) * n / time - 1 for n, time in zip(lengths, times)]
    assert line.worst_error == pytest.approx(max(map(abs, errors)))
    assert max(map(abs, errors)) > 0.01
    for power in (1, 2):
        slopes = [error * n**power / time for error, n, time in zip(errors, lengths, times)]
        assert abs(sum(slopes)) < 1e-9 * sum(map(abs, slopes))
