"""Plans with separate instances for every kind of traffic, checked by simulations of their own."""

from __future__ import annotations

import json
import re
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import pytest

import kvcalc
from kvcalc.model.drafting import Speculation
from kvcalc.question.question import CacheReuse, ImagesAsked, SpeedQuestion
from tests.conftest import at_night
from tests.planning.traces import write_bursts
from tests.test_schema import check

LINK = "infiniband-400g"
MODEL = "llama-3.1-8b"
ROLES = ("prefill", "decode")


@pytest.fixture(scope="module")
def bursts(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Eight quiet seconds, then eight busy ones: 5 and 40 requests per second."""
    return write_bursts(tmp_path_factory.mktemp("traces") / "bursts.csv", seconds=16, each=8, rates=(5, 40))


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> str:
    """100 requests per second, whose prompts have three quarters of their blocks in common."""
    path = tmp_path_factory.mktemp("traces") / "shared.jsonl"
    with path.open("w") as stream:
        for number in range(400):
            names = [*range(6), 10 * number + 10, 10 * number + 11]
            row = {"timestamp": 10 * number, "input_length": 4096, "output_length": 80, "hash_ids": names}
            stream.write(json.dumps(row) + "\n")
    return str(path)


def split_row(document: Any, *, is_mixed: bool = False) -> Any:
    (row,) = [row for row in document["plans"] if row["disaggregated"] and ("+" in row["gpu"]) == is_mixed]
    return row


def meets(row: Any, numbers: tuple[int, int], limits: Any, **asked: Any) -> bool:
    """Whether so many instances of a row's layouts meet the limits with all seeds: `ttft p99` to seconds."""
    return max(_shares(row, numbers, limits, **asked)) <= 1


def surely_meets(row: Any, numbers: tuple[int, int], limits: Any, **asked: Any) -> bool:
    """Whether the mean over seeds and two standard deviations meet the limits."""
    shares = _shares(row, numbers, limits, **asked)
    return mean(shares) + (2 * stdev(shares) if len(shares) > 1 else 0) <= 1


def _shares(row: Any, numbers: tuple[int, int], limits: Any, **asked: Any) -> list[float]:
    seeds = [{}] if "trace" in asked else [{"seed": seed} for seed in range(4)]
    return [_share(row, numbers, limits, **asked, **seed) for seed in seeds]


def _share(row: Any, numbers: tuple[int, int], limits: Any, **asked: Any) -> float:
    pools = row["disaggregated"]
    prefill, decode = (pools[role] for role in ROLES)
    speed = asked.pop("speed", SpeedQuestion())
    found: Any = kvcalc.simulate(
        asked.pop("model", MODEL), decode["gpu"], replicas=numbers[1], prefill_replicas=numbers[0],
        tensor_parallel_size=decode["tensor_parallel_size"], data_parallel_size=decode["data_parallel_size"],
        transfer=LINK, prefill_gpu=prefill["gpu"], prefill_tensor_parallel_size=prefill["tensor_parallel_size"],
        prefill_data_parallel_size=prefill["data_parallel_size"],
        prefill_expert_parallel_size=prefill["expert_parallel_size"], **asked,
        speed=speed._replace(expert_parallel_size=decode["expert_parallel_size"]),
    )  # fmt: skip
    times = {one["metric"]: one for one in found["times"]}
    shares: list[float] = [
        times[metric][f"{statistic}_seconds"] / limit
        for name, limit in limits.items() for metric, statistic in [name.split()]
    ]  # fmt: skip
    return max(shares)


def check_smallest(row: Any, limits: Any, rate: float | None, **asked: Any) -> list[str]:
    """The chosen pools meet the limits, and one instance fewer does not. Returns the pools that were made smaller.

    The short form says of pools that cannot serve the rate of requests at random that they need not be simulated.
    """
    pools = row["disaggregated"]
    numbers = tuple(pools[role]["instances"] for role in ROLES)
    assert meets(row, numbers, limits, **asked)
    tried = []
    for place, role in enumerate(ROLES):
        fewer = tuple(number - (place == other) for other, number in enumerate(numbers))
        capacity = pools[role]["max_requests_per_second"] * fewer[place] / numbers[place]
        if fewer[place] and (rate is None or capacity > rate):
            assert not surely_meets(row, fewer, limits, **asked), (role, numbers)
            tried.append(role)
    return tried


def planned(limits: Any, model: str = MODEL, gpus: tuple[str, ...] = ("h100",), **asked: Any) -> Any:
    of: dict[str, Any] = {"confidence": 50}
    for name, seconds in limits.items():
        metric, statistic = name.split()
        of[f"max_{metric}_seconds"] = seconds
        of[f"{metric}_percentile"] = None if statistic == "mean" else int(statistic[1:])
    document: Any = kvcalc.plan(model, gpus, disaggregate=True, transfer=LINK, **of, **asked)
    check(document, "plan")
    return document


@pytest.mark.long
@pytest.mark.parametrize(
    ("engine", "limits", "scale"),
    [("vllm", {"ttft p99": 0.5, "tpot p90": 0.011}, 2.0), ("sglang", {"ttft mean": 0.2}, 3.0),
     at_night("vllm", {"e2e p95": 2.5}, 3.0)],
)  # fmt: skip
def test_a_trace_is_served_by_no_more_pools_than_it_needs(bursts: str, engine: str, limits: Any, scale: float) -> None:
    asked: dict[str, Any] = {"engine": engine, "trace": bursts, "scale_rate": scale}
    document = planned(limits, **asked)
    row = split_row(document)
    assert check_smallest(row, limits, None, **asked)
    assert row["simulated_requests"] == document["trace"]["requests"]
    shown = [one for one in document["finalists"] if one["disaggregated"]]
    assert {one["passes"] for one in shown} == {True, False}
    assert {one["seed"] for one in shown} == {None}


@pytest.mark.long
def test_prefixes_that_a_trace_names_save_prefill_instances(shared: str) -> None:
    limits = {"ttft p99": 0.4}
    row = split_row(planned(limits, trace=shared))
    assert check_smallest(row, limits, None, trace=shared)
    # What the instances serve at most counts no prefixes: these are too few by that.
    prefill = row["disaggregated"]["prefill"]
    assert prefill["max_requests_per_second"] < row["requests_per_second"] < 100
    assert prefill["utilization"] == 1.0
    alone: Any = kvcalc.plan(
        MODEL, ["h100"], input_tokens=4096, output_tokens=80, requests_per_second=100.0, disaggregate=True,
        transfer=LINK, max_ttft_seconds=0.4, ttft_percentile=99, confidence=50, requests=400,
    )  # fmt: skip
    needed = split_row(alone)["disaggregated"]["prefill"]
    assert prefill["num_devices"] < needed["num_devices"]
    # They are enough even if the devices are too few for the short form.
    few = planned(limits, max_devices=row["num_devices"], trace=shared)
    assert split_row(few)["num_devices"] == row["num_devices"]


def test_without_limits_pools_are_those_of_the_busiest_minute_and_tokens_cost_the_mean_rate(bursts: str) -> None:
    document = planned({}, trace=bursts, prices={"h100-sxm": 2.0})
    row, trace = split_row(document), document["trace"]
    assert 0.8 * trace["requests_per_second"] < row["requests_per_second"] <= trace["peak_requests_per_second"]
    tokens_per_hour = trace["requests_per_second"] * document["lengths"]["output_tokens"] * 3600
    assert row["cost_per_million_output_tokens"] == pytest.approx(row["cost_per_hour"] / tokens_per_hour * 1e6)


def test_a_note_says_that_no_prefixes_of_a_trace_are_found(shared: str) -> None:
    document = planned({"ttft p99": 2.0}, model="gemma-3-4b", trace=shared, requests=50)
    texts = [warning["text"] for warning in document["warnings"] if warning["code"] == "not-shared"]
    assert len(texts) == len(set(texts)) == 1


PREFIX: dict[str, Any] = {"reuse": CacheReuse(1024)}
DRAFTS: dict[str, Any] = {"speculative": Speculation("mtp", 1, 1.8)}
HALF: dict[str, Any] = {"prefix_hit_rate": 0.5}
TIMES = {"ttft p99": 0.3, "tpot p90": 0.012}


@pytest.mark.settled
@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "engine", "rate", "limits", "more"),
    [
        (MODEL, "vllm", 60.0, TIMES, PREFIX),
        (MODEL, "sglang", 62.0, TIMES, PREFIX),
        (MODEL, "tensorrt-llm", 75.0, {"ttft p90": 0.3, "tpot p90": 0.009}, PREFIX),
        (MODEL, "vllm", 60.0, TIMES, HALF),
        at_night("deepseek-v3", "vllm", 8.0, {"tpot p90": 0.02}, DRAFTS),
        ("deepseek-v3", "sglang", 14.0, {"ttft p90": 0.4, "tpot p90": 0.018}, DRAFTS),
        at_night("deepseek-v3", "vllm", 12.0, {"ttft p90": 1.0, "tpot p90": 0.02}, {**DRAFTS, **PREFIX}),
        ("qwen2.5-vl-7b", "vllm", 60.0, TIMES, {"images": ImagesAsked(1, 800, 600)}),
    ],
    ids=["prefix-vllm", "prefix-sglang", "prefix-trtllm", "hits", "mtp-vllm", "mtp-sglang", "mtp-prefix", "images"],
)
def test_a_plan_is_what_a_simulation_of_its_own_needs(
    model: str, engine: str, rate: float, limits: Any, more: dict[str, Any]
) -> None:
    gpu, requests = ("h200", 100) if model == "deepseek-v3" else ("h100", 200)
    asked: dict[str, Any] = {"engine": engine, "requests_per_second": rate, "requests": requests}
    row = split_row(planned(limits, model, (gpu,), input_tokens=2048, output_tokens=300, **asked, **more))
    there = {"speed": SpeedQuestion(prefix_hit_rate=0.5)} if more is HALF else more
    assert check_smallest(row, limits, rate, model=model, prompt_tokens=2048, answer_tokens=300, **asked, **there)


def of_means(model: str = MODEL, gpu: str = "h100", **asked: Any) -> Any:
    """The row for 8 requests per second, without limits."""
    load: dict[str, Any] = {
        "input_tokens": 4096, "output_tokens": 300, "requests_per_second": 8.0, "confidence": 50
    }  # fmt: skip
    document: Any = kvcalc.plan(model, [gpu], disaggregate=True, transfer=LINK, max_devices=64, **load, **asked)
    check(document, "plan")
    return split_row(document)


@pytest.mark.parametrize("engine", ["vllm", "sglang", "tensorrt-llm"])
def test_a_prefix_shortens_the_prefill_and_the_whole_prompt_is_sent(engine: str) -> None:
    plain, half, hits = (of_means(engine=engine, **more) for more in ({}, {"reuse": CacheReuse(2048)}, HALF))
    parts = [row["disaggregated"]["ttft_parts"]["prefill_seconds"] for row in (plain, half, hits)]
    assert parts[1] == pytest.approx(parts[2], rel=0.2)
    assert max(parts[1:]) < 0.7 * parts[0]
    assert half["disaggregated"]["transfer"] == plain["disaggregated"]["transfer"]
    held = [row["disaggregated"]["prefill"]["max_requests_held"] for row in (plain, half, hits)]
    # A common prefix is in the cache of a prefill instance once. A decode instance keeps every request whole.
    assert held[1] > 1.8 * held[0] == 1.8 * held[2]
    whole = [row["disaggregated"]["decode"]["max_requests_held"] for row in (plain, half, hits)]
    assert len(set(whole)) == 1


@pytest.mark.parametrize("engine", ["vllm", "sglang", "tensorrt-llm"])
def test_drafts_are_in_both_pools_and_a_step_gives_several_tokens(engine: str) -> None:
    plain, drafted = (of_means("deepseek-v3", "h200", engine=engine, **more) for more in ({}, DRAFTS))
    assert drafted["tpot_seconds"] < 0.8 * plain["tpot_seconds"]
    # The latent is on all tensor-parallel ranks.
    sizes = [
        row["disaggregated"]["transfer"]["request_bytes"] // row["disaggregated"]["decode"]["tensor_parallel_size"]
        for row in (plain, drafted)
    ]
    assert sizes[1] * 61 == sizes[0] * 62
    pools = drafted["disaggregated"]
    for role in ROLES:
        assert pools[role]["max_requests_held"] < plain["disaggregated"][role]["max_requests_held"]
        words = pools["commands"][role]
        assert "mtp" in words.casefold() or "--speculative-algorithm EAGLE" in words
    # A request waits for whole steps, each of which gives 1.8 tokens.
    steps = [row["disaggregated"]["ttft_parts"]["first_step_seconds"] / row["tpot_seconds"] for row in (plain, drafted)]
    assert steps[1] == pytest.approx(1.8 * steps[0], rel=0.15)


def test_the_embeddings_of_images_take_memory_of_both_pools() -> None:
    plain, shown = (of_means("qwen2.5-vl-7b", images=images) for images in (None, ImagesAsked(2, 1000, 1000)))
    assert shown["disaggregated"]["transfer"] == plain["disaggregated"]["transfer"]
    for role in ROLES:
        assert shown["disaggregated"][role]["free_bytes"] <= plain["disaggregated"][role]["free_bytes"]


def test_what_is_not_known_of_an_engine_is_refused_in_its_row() -> None:
    document: Any = kvcalc.plan(
        "deepseek-v3", ["h200"], engine="tensorrt-llm@1.3.0rc28", input_tokens=4096, output_tokens=300,
        requests_per_second=4.0, disaggregate=True, transfer=LINK, **DRAFTS, **PREFIX,
    )  # fmt: skip
    reasons = [row["reason"] for row in document["plans"] if row["reason"]]
    assert reasons == ["--transfer-bandwidth: what tensorrt-llm moves of drafts is not modelled"]


def test_the_command_line_and_batch_ask_the_same(kvcalc: Any, tmp_path: Path) -> None:
    asked = {
        "input_tokens": 2048, "output_tokens": 200, "requests_per_second": 20, "gpu": "h100", "prefix_tokens": 512,
        "disaggregate": True, "transfer_bandwidth": LINK, "max_ttft": "400ms@p90", "requests": 100,
        "speculative": "ngram:2", "acceptance_length": 1.5,
    }  # fmt: skip
    words = [
        word for name, value in asked.items() for word in (f"--{name.replace('_', '-')}", value) if word is not True
    ]
    found = kvcalc("plan", MODEL, *words, "--json").json
    assert split_row(found)["simulated_ttft_seconds"] <= 0.4
    file = tmp_path / "questions.jsonl"
    file.write_text(json.dumps({"command": "plan", "model": MODEL, **asked}) + "\n")
    assert json.loads(kvcalc("batch", file).out) == found


@pytest.mark.long
def test_the_screen_shows_pools_for_a_trace(kvcalc: Any, bursts: str) -> None:
    words = ("plan", MODEL, "--gpu", "h100,h200", "--max-ttft", "500ms", "--trace", bursts, "--simulate", "2",
             "--scale-rate", "3", "--disaggregate", "--transfer-bandwidth", LINK, "--format", "human")  # fmt: skip
    out = kvcalc(*words).out
    assert re.search(r"\d\d\.\d requests per second, vllm", out)
    assert re.search(r" P \+ tp \d D", out)
    assert "h100-sxm + h200-sxm" in out


PRICES = {"h100-sxm": 2.0, "h200-sxm": 3.5}


def cost_of(row: Any) -> float:
    pools = row["disaggregated"]
    return sum(PRICES[pools[role]["gpu"]] * int(pools[role]["num_devices"]) for role in ROLES)


@pytest.mark.long
@pytest.mark.parametrize(("confidence", "requests"), [at_night(50, 300), (80, 150)])
def test_pools_on_two_kinds_of_device_are_judged_by_percentiles(confidence: int, requests: int) -> None:
    limits = {"ttft p90": 0.6, "tpot p90": 0.02}
    asked: dict[str, Any] = {"requests_per_second": 10.0, "requests": requests}
    document: Any = kvcalc.plan(
        "qwen3-32b", ["h100", "h200"], disaggregate=True, transfer=LINK, prices=PRICES, input_tokens=4096,
        output_tokens=300, confidence=confidence, max_ttft_seconds=0.6, ttft_percentile=90, max_tpot_seconds=0.02,
        tpot_percentile=90, **asked,
    )  # fmt: skip
    check(document, "plan")
    row = split_row(document, is_mixed=True)
    pools = row["disaggregated"]
    assert row["cost_per_hour"] == pytest.approx(cost_of(row))
    assert (row["simulated_ttft_seconds"], row["simulated_requests"]) <= (0.6, requests)
    shown = [one for one in document["finalists"] if "+" in one["gpu"]]
    assert {one["passes"] for one in shown} == {True, False}
    (own,) = [
        one for one in shown
        if one["passes"] and one["cost_per_hour"] == row["cost_per_hour"] and one["num_devices"] == row["num_devices"]
        and all(one["disaggregated"][role][key] == pools[role][key] for role in ROLES
                for key in ("gpu", "instances", "tensor_parallel_size"))
    ]  # fmt: skip
    assert own["ttft_p90_seconds"] == row["simulated_ttft_seconds"]
    assert min(one["cost_per_hour"] for one in shown if one["passes"]) == row["cost_per_hour"]
    there = {**asked, "model": "qwen3-32b", "prompt_tokens": 4096, "answer_tokens": 300}
    factors = {"step_factor": own["step_factor"]}
    limits["ttft p90"] /= own["ttft_factor"]
    assert check_smallest(row, limits, 10.0, **there, **factors)


def test_the_power_of_two_kinds_is_that_of_each() -> None:
    document: Any = kvcalc.plan(
        MODEL, ["a100-pcie", "l40s"], disaggregate=True, transfer=LINK, input_tokens=2048, output_tokens=200,
        requests_per_second=4.0,
    )  # fmt: skip
    row = split_row(document, is_mixed=True)
    pools = row["disaggregated"]
    most = sum(
        pools[role]["num_devices"] * (kvcalc.find_devices(pools[role]["gpu"]).gpu.tdp_watts or 0) for role in ROLES
    )
    alone = [one for one in document["plans"] if one["disaggregated"] and one is not row]
    assert 0 < row["watts"] < most
    assert len({one["watts"] for one in alone}) == 2
