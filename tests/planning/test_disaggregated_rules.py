"""Rules of separate instances: what each device holds, sends, draws and costs, whatever is planned."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest

import kvcalc
from kvcalc.engines import disaggregation_of
from kvcalc.errors import LayoutError, ModelError, UsageError
from kvcalc.model.layout import Layout
from kvcalc.planning.plan.disaggregated import search
from kvcalc.planning.plan.disaggregated.instances import (
    HANDOVER_SECONDS,
    Instance,
    decode_instance,
    prefill_instance,
    sender_of,
)
from kvcalc.planning.plan.disaggregated.platforms import PoolPlatforms, check_joined, join_caches, same_kind
from kvcalc.planning.plan.disaggregated.search import Instances
from kvcalc.planning.plan.disaggregated.split import Busy, TwoPools, describe_energy
from kvcalc.planning.plan.targets import Targets
from kvcalc.planning.plan.traffic import Platform, Traffic, Trouble
from kvcalc.question.question import Question, SpeedQuestion
from kvcalc.question.request_lengths import one_length
from kvcalc.server.case import make_case
from kvcalc.throughput.hardware import find_devices, find_gpu
from kvcalc.throughput.power import mean_watts

LINK = "infiniband-400g"
H100, H200 = find_gpu("h100"), find_gpu("h200")


def traffic_of(model: str, **asked: Any) -> Traffic:
    targets = Targets(None, asked.pop("requests_per_second", 3.0), 4.0, 0.03)
    return Traffic(Question(kvcalc.load_model(model)), one_length(4096, 400), targets, False, **asked)


def split_of(traffic: Traffic, kind: Platform) -> TwoPools:
    """The best pair of layouts by the short form."""
    splits = search.find_splits(Instances(traffic), [same_kind(kind, LINK)], traffic.targets)
    assert not isinstance(splits, Trouble)
    return splits[0]


def test_the_cache_of_a_prompt_is_the_same_however_it_is_divided() -> None:
    """Pipeline stages and ranks divide its layers and heads: together they send all of them, the busiest a part."""
    spec, whole = kvcalc.load_model("llama-3.1-8b"), 4096 * 2 * 32 * 8 * 128 * 2
    for engine, ranks, stages in product(("sglang", "tensorrt-llm"), (1, 2), (1, 2, 4)):
        asked = Question(
            spec, engine=engine, tensor_parallel_size=ranks, pipeline_parallel_size=stages, context_tokens=4096
        )
        sent = sender_of(make_case(asked))(4096)
        assert (sent.total_bytes, sent.busiest_bytes) == (whole, whole // (ranks * stages))


@pytest.mark.parametrize("engine", ["vllm", "sglang", "tensorrt-llm"])
def test_transfer_buffers_are_taken_from_the_estimate_and_from_its_low_end(engine: str) -> None:
    (one, *_), _ = Instances(traffic_of("llama-3.1-8b")).prefills(Platform(H100, 2, engine))
    assert (one.buffer_bytes > 0) == (disaggregation_of(engine).transfer_buffers > 0)
    answer = one.answer(1)
    free, low = one.free_bytes(answer)
    assert free == answer.fit["free_bytes"] - one.buffer_bytes
    assert answer.fit["free_low_bytes"] is not None
    assert low == answer.fit["free_low_bytes"] - one.buffer_bytes


def test_devices_of_unknown_architecture_read_no_other_cache() -> None:
    unknown = H100._replace(name="a", device_class=None)
    assert join_caches(H100, H200)
    assert not join_caches(unknown, H200)
    assert not join_caches(unknown, unknown._replace(name="b"))


@pytest.mark.parametrize(("prefill", "decode", "cost"), [(2.0, 3.0, 17.0), (None, 3.0, None), (2.0, None, None)])
def test_pools_have_a_cost_if_both_kinds_have_a_price(
    prefill: float | None, decode: float | None, cost: float | None
) -> None:
    one, other = Platform(H100, 8, "vllm", price=prefill), Platform(H200, 8, "vllm", price=decode)
    kinds = PoolPlatforms(one, other, same_kind(one, LINK).link, (1.0, 1.0), (8, 8, 16))
    assert kinds.cost_per_hour((4, 3)) == cost


@pytest.mark.parametrize("headroom", [0.0, 0.25])
def test_tokens_are_paid_for_that_are_asked_for_and_not_those_of_the_headroom(headroom: float) -> None:
    document: Any = kvcalc.plan(
        "llama-3.1-8b", ["h100"], disaggregate=True, transfer=LINK, input_tokens=200, output_tokens=200,
        requests_per_second=4.0, headroom=headroom, prices={"h100-sxm": 2.0},
    )  # fmt: skip
    (row,) = [row for row in document["plans"] if row["disaggregated"]]
    assert row["tokens_per_second"] == pytest.approx(800.0 * (1 + headroom))
    assert row["cost_per_hour"] == 2.0 * row["num_devices"]
    # 800 tokens per second are 2.88 million an hour, and half of all tokens are output.
    assert row["cost_per_million_output_tokens"] == pytest.approx(row["cost_per_hour"] / 2.88)
    assert row["cost_per_million_tokens"] == pytest.approx(row["cost_per_hour"] / 2.88 / 2)


@pytest.mark.parametrize(("rate", "prefills"), [(100, 1), (300, 2)])
def test_a_decode_pool_draws_what_its_steps_draw_and_a_prefill_pool_what_its_prompts_do(
    rate: int, prefills: int
) -> None:
    """The power of the decode step is that of `estimate` with as many requests; prompts are bound by operations."""
    document: Any = kvcalc.plan(
        "llama-3.1-8b", ["h100"], disaggregate=True, transfer=LINK, input_tokens=200, output_tokens=200,
        requests_per_second=rate,
    )  # fmt: skip
    (row,) = [row for row in document["plans"] if row["disaggregated"]]
    prefill, decode = (row["disaggregated"][role] for role in ("prefill", "decode"))
    answer: Any = kvcalc.estimate(
        "llama-3.1-8b", engine="vllm", devices=find_devices(f"h100x{decode['tensor_parallel_size']}"),
        context_tokens=300, batch_size=round(decode["requests_per_instance"]),
    )  # fmt: skip
    of_steps = decode["instances"] * answer["throughput"]["energy"]["watts"]
    # A prefill instance is busy for the time of its prompts: no longer than each alone, no shorter than in full steps.
    alone = rate / prefills * row["disaggregated"]["ttft_parts"]["prefill_seconds"]
    assert prefill["instances"] == prefills
    least, most = (mean_watts(H100, prefill["num_devices"], 1.0, min(1.0, busy)) or 0.0
                   for busy in (prefill["utilization"], alone))  # fmt: skip
    assert 0.97 * (least + of_steps) <= row["watts"] <= 1.03 * (most + of_steps)
    assert row["free_bytes"] == min(prefill["free_bytes"], decode["free_bytes"])


@pytest.mark.parametrize(
    ("model", "tokens", "engine", "requests"),
    [
        ("llama-3.1-8b", 200, "vllm", 256), ("llama-3-70b", 7168, "vllm", 3),
        # TensorRT-LLM reserves nothing for a request of Llama, so its memory does not depend on the limit. Its transfer
        # buffers hold the longest prompt, 8,192 tokens at the model's limit.
        ("llama-3.1-8b", 200, "tensorrt-llm", 256), ("llama-3-70b", 7168, "tensorrt-llm", 3),
    ],
)  # fmt: skip
def test_a_prefill_server_takes_the_prompts_that_it_holds_and_no_more_than_save_time(
    model: str, tokens: int, engine: str, requests: int
) -> None:
    document: Any = kvcalc.plan(
        model, ["h100"], disaggregate=True, transfer=LINK, input_tokens=tokens, output_tokens=200,
        requests_per_second=3, engine=engine, confidence=80,
    )  # fmt: skip
    (pools,) = [row["disaggregated"] for row in document["plans"] if row["disaggregated"]]
    assert min(pools["prefill"]["max_requests_held"], 256) == requests
    option = {"vllm": "--max-num-seqs", "tensorrt-llm": "--max_batch_size"}[engine]
    assert f"{option} {requests} " in pools["commands"]["prefill"]


def test_a_refusal_of_dp_ranks_that_nobody_asked_for_leaves_the_other_layouts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = prefill_instance

    def refusing(traffic: Traffic, kind: Platform, shape: Layout) -> Any:
        if shape.data_parallel_size in refused:
            raise ModelError("not modelled")
        return made(traffic, kind, shape)

    monkeypatch.setattr(search, "prefill_instance", refusing)
    kind, refused = Platform(find_gpu("h200"), 8, "sglang"), {2, 4, 8}
    found, _ = Instances(traffic_of("deepseek-v3")).prefills(kind)
    assert {one.shape.data_parallel_size for one in found} == {1}
    refused = {1}
    with pytest.raises(ModelError, match="not modelled"):
        Instances(traffic_of("deepseek-v3")).prefills(kind)


def test_each_pool_and_both_together_have_a_limit() -> None:
    one, other = Platform(H100, 8, "vllm"), Platform(H200, 8, "vllm")
    kinds = PoolPlatforms(one, other, same_kind(one, LINK).link, (1.0, 1.0), (6, 4, 8))
    tried = [(6, 2), (4, 4), (7, 1), (3, 5), (5, 4)]
    assert [kinds.allow(devices) for devices in tried] == [True, True, False, False, False]


@pytest.mark.parametrize("metric", ["ttft", "tpot", "e2e"])
def test_a_request_alone_is_too_slow_beyond_its_judged_time(metric: str) -> None:
    """The whole request has a first token and 399 others."""
    pools = split_of(traffic_of("llama-3.1-8b"), Platform(H100, 2, "vllm"))
    first, each = (factors[2] for factors in pools.factors(Targets(1, None)).values())
    ttft, tpot = first * pools.pair.ttft_seconds, each * pools.decode.rates.tpot(1)
    seconds = {"ttft": ttft, "tpot": tpot, "e2e": ttft + 399 * tpot}[metric]
    for limit, is_slow in ((seconds * 1.001, False), (seconds * 0.999, True)):
        limits: dict[str, Any] = {f"max_{metric}_seconds": limit}
        trouble = pools.too_slow(Targets(None, 0.1, **limits))
        assert (trouble is not None) is is_slow
        assert trouble is None or trouble.reason.startswith(f"{metric.upper()} of one request is up to ")


def test_a_first_token_is_the_reason_only_if_one_request_is_too_slow() -> None:
    traffic, kind = traffic_of("llama-3.1-8b", requests_per_second=500.0), Platform(H100, 2, "vllm")
    for limit, said in ((4.0, "two pools need more than 2 devices"), (0.001, "TTFT of one request is up to ")):
        targets = traffic.targets._replace(max_ttft_seconds=limit)
        found = search.find_splits(Instances(traffic), [same_kind(kind, LINK)], targets)
        assert isinstance(found, Trouble)
        assert found.reason.startswith(said)


def test_both_servers_have_the_options_that_were_asked_for() -> None:
    document: Any = kvcalc.plan(
        "llama-3.1-8b", ["h100"], disaggregate=True, transfer=LINK, input_tokens=200, output_tokens=200,
        requests_per_second=3.0, engine_settings={"max-num-batched-tokens": "4096"},
    )  # fmt: skip
    (pools,) = [row["disaggregated"] for row in document["plans"] if row["disaggregated"]]
    assert all("--max-num-batched-tokens 4096" in pools["commands"][role] for role in ("prefill", "decode"))


def test_the_transfer_has_no_range_and_the_rest_has_that_of_its_instance(monkeypatch: pytest.MonkeyPatch) -> None:
    pools = split_of(traffic_of("llama-3.1-8b"), Platform(H100, 2, "vllm"))
    monkeypatch.setattr(Instance, "ttft_factors", lambda _, prompts: {1: (0.5, 2.0, 1.5)}[prompts])
    monkeypatch.setattr(Instance, "step_factors", lambda _, decoding: (0.25, 8.0, 4.0 if decoding == 7 else 5.0))
    sent = pools.transfer_bytes / 50e9
    rest = pools.pair.ttft_seconds - sent
    factors = pools.factors(Targets(7, None))
    assert factors["tpot"] == (0.25, 8.0, 4.0)
    judged = [factor * pools.pair.ttft_seconds for factor in factors["ttft"]]
    assert judged == pytest.approx([sent + rest * factor for factor in (0.5, 2.0, 1.5)])


@pytest.mark.parametrize(
    ("prompt", "hit_rate", "dp_ranks", "batch"),
    [
        (4096, 0.0, 1, 2),
        (4097, 0.0, 1, 1),
        (20_000, 0.0, 1, 1),
        (4096, 0.5, 1, 4),
        (4096, 0.0, 2, 4),
        (10, 0.0, 1, 256),
    ],
)
def test_a_prefill_step_has_the_prompts_of_its_budget(prompt: int, hit_rate: float, dp_ranks: int, batch: int) -> None:
    """What the cache finds takes none of the 8,192 tokens of a step. More than 256 prompts save no time."""
    speed = SpeedQuestion(prefix_hit_rate=hit_rate)
    question = Question(
        kvcalc.load_model("qwen3-30b-a3b"), engine_settings={"max-num-batched-tokens": "8192"}, speed=speed
    )  # fmt: skip
    traffic = Traffic(question, one_length(prompt, 400), Targets(None, 3.0), False)
    found = prefill_instance(traffic, Platform(H200, 8, "vllm"), Layout(2, 1, dp_ranks))
    assert not isinstance(found, Trouble)
    assert found.rates.batch == batch


def test_decode_instances_run_fewer_requests_within_a_shorter_limit() -> None:
    (decode,), _ = Instances(traffic_of("llama-3.1-8b")).decodes(Platform(H100, 1, "vllm"))
    numbers = [decode.most_within(limit) for limit in (None, 0.03, 0.012, 1e-4)]
    assert numbers[0] == decode.rates.most >= numbers[1] > numbers[2] > numbers[3] == 0
    judged = [decode.rates.tpot(number) * decode.step_factors(number)[2] for number in (numbers[2], numbers[2] + 1)]
    assert judged[0] <= 0.012 < judged[1]


def test_a_prefill_instance_holds_its_step_and_what_is_being_sent() -> None:
    """Little's law, at 1 GB/s: a prompt of 7,168 tokens is sent in 2.35 s over the devices of an instance."""
    document: Any = kvcalc.plan(
        "llama-3-70b", ["h100"], disaggregate=True, transfer=10**9, input_tokens=7168, output_tokens=1024,
        requests_per_second=3,
    )  # fmt: skip
    (row,) = [row for row in document["plans"] if row["disaggregated"]]
    pools, prefill = row["disaggregated"], row["disaggregated"]["prefill"]
    sent = 3 / prefill["instances"] * pools["transfer"]["seconds"]
    assert prefill["instances"] > 1
    assert prefill["requests_held"] == prefill["requests_per_instance"] + -int(-sent // 1)


def test_devices_without_a_published_power_have_no_energy() -> None:
    traffic = traffic_of("llama-3.1-8b")
    for tdp in (None, 700):
        pools = split_of(traffic, Platform(H100._replace(tdp_watts=tdp), 4, "vllm"))
        busy = Busy(3.0, 1, 4.0, (1, 4))
        assert bool(describe_energy(pools, busy, traffic.lengths, 1200.0)) == (tdp is not None)


@pytest.mark.parametrize("strict", [False, True])
def test_an_instance_holds_what_fits_and_not_one_request_more(strict: bool) -> None:
    """With `strict`, at the low end of the free memory, after the buffers for the transfer.

    With a higher limit of running requests, the server would not hold as many.
    """
    for engine in ("vllm", "sglang", "tensorrt-llm"):
        known, kind = Instances(traffic_of("llama-3.1-8b", strict=strict)), Platform(H100, 1, engine)
        for (one,), _ in (known.prefills(kind), known.decodes(kind)):
            assert one.slots is not None
            assert (one.each is None) == (engine == "tensorrt-llm")  # which reserves nothing for a request of Llama
            started, limit = one.start.at(one.each), one.each or one.slots
            assert one.answer(one.slots).fit["fits"]
            assert (started.slots, started.fitting) == (min(limit, one.slots), one.slots)
            needed = [started.room.case.needed_bytes(one.held_tokens, one.slots + more) for more in (0, 1)]
            assert needed[0] <= started.pool_bytes < needed[1]
            more = one.start.at(limit + 1)
            assert more.slots is not None
            assert more.slots <= limit
            if one.held_tokens <= one.start.context_tokens:
                assert one.free_bytes(one.answer(one.slots))[strict] == started.pool_bytes - needed[0]


@pytest.mark.parametrize(("engine", "passes"), [("vllm", 2), ("sglang", 1), ("tensorrt-llm", 2)])
def test_a_request_passes_the_server_of_each_instance_that_is_asked(engine: str, passes: int) -> None:
    """SGLang's instances are asked at once, the others one after the other (`Disaggregation.host_passes`)."""
    (one,), _ = Instances(traffic_of("llama-3.1-8b")).decodes(Platform(H100, 1, engine))
    more = one.rates.host_seconds - (passes - 1) * one.speed.model.constants.ttft_seconds
    assert more == pytest.approx(HANDOVER_SECONDS)


def test_requests_alone_are_simulated_on_no_number_of_instances() -> None:
    found = split_of(traffic_of("llama-3.1-8b"), Platform(H100, 4, "vllm"))
    asked: list[Any] = []
    simulation: Any = SimpleNamespace(run_pools=lambda pools, *_: asked.append(pools))
    for is_alone in (False, True):
        found.run(simulation, Targets(None, 3.0, 4.0, 0.03), 100, 1.0, is_alone=is_alone)
    assert [pools.numbers for pools in asked] == [found.numbers, None]


@pytest.mark.parametrize(
    ("load", "limits", "serves"),
    [
        # A share of the slower pool. Without a limit on the wait, no layout is busier than 90 %.
        ({"requests_per_second": 0.89}, {}, True), ({"requests_per_second": 0.91}, {}, False),
        ({"requests_per_second": 0.99}, {"max_ttft_seconds": 9.0}, True),
        ({"requests_per_second": 1.01}, {"max_ttft_seconds": 9.0}, False),
    ],
)  # fmt: skip
def test_numbers_that_do_not_keep_up_are_simulated_for_a_trace_alone(
    load: dict[str, float], limits: dict[str, float], serves: bool
) -> None:
    """A trace counts shared prefixes, which the short form does not."""
    pools = split_of(traffic_of("llama-3.1-8b"), Platform(H100, 4, "vllm"))
    slower = max(pools.prefill.step_factors(1)[2], pools.decode.step_factors(pools.decode.rates.largest(0.0))[2])
    most = min(pools.pair.capacities(1, 1)) / slower
    targets = Targets(None, load["requests_per_second"] * most, **limits)  # type: ignore[arg-type]
    assert (pools.at((1, 1), targets, is_trace=False) is not None) is serves
    assert pools.at((1, 1), targets, is_trace=True) == pools._replace(numbers=(1, 1))


def test_clients_all_run_and_wait_for_prompts_only_within_a_limit() -> None:
    pools = split_of(traffic_of("llama-3.1-8b"), Platform(H100, 8, "vllm"))
    pair = pools.pair
    most = 2 * pair.decode.largest(pair.transfer)
    few = Targets(most, None)
    rate, each = pools._replace(numbers=(1, 2)).rate(few), pair.capacities(1, 1)[0]
    enough = int(rate / each) + 1
    assert enough > 1, "one prefill instance is the bottleneck"
    for numbers, targets, serves in (
        ((1, 2), few, False), ((1, 2), few._replace(max_ttft_seconds=60.0), True), ((enough, 2), few, True),
        ((enough, 1), few, False), ((enough, 2), few._replace(concurrency=most + 1), False),
    ):  # fmt: skip
        assert (pools.at(numbers, targets, is_trace=False) is not None) is serves


@pytest.mark.parametrize(
    "load", [{"requests_per_second": 40.0}, {"concurrency": 160}, {"users": 900, "think_time": 20.0}]
)
def test_the_first_numbers_are_the_fewest_that_keep_up_within_the_limits(load: dict[str, Any]) -> None:
    targets = Targets(load.get("concurrency"), load.get("requests_per_second"), 4.0, 0.03, users=load.get("users"),
                      think_time=load.get("think_time"))  # fmt: skip
    known = Instances(traffic_of("llama-3.1-8b")._replace(targets=targets))
    one, other = Platform(H100, 64, "vllm", price=2.0), Platform(H200, 64, "vllm", price=3.0)
    mixed = PoolPlatforms(one, other, same_kind(one, LINK).link, (2.0, 3.0), (64, 64, 128))
    for kinds in (same_kind(one, LINK), mixed):
        pairs = search.find_splits(known, [kinds], targets, keep=100)
        assert isinstance(pairs, list)
        assert len(pairs) > 8
        for pools in pairs:
            (prefills, decodes), longest = pools.numbers, pools.decode.most_within(0.03)
            assert pools.keeps_up(targets)
            if decodes > 1:
                fewer = pools._replace(numbers=(prefills, decodes - 1))
                assert not fewer.keeps_up(targets) or fewer.decoding(targets) > longest * 0.9
        slow = [pools.too_slow(targets) is not None for pools in pairs]
        weights = [pools.weight for pools in pairs]
        assert list(zip(slow, weights)) == sorted(zip(slow, weights))
        assert search.find_splits(known, [kinds], targets, keep=3) == pairs[:3]


def test_pools_for_a_trace_begin_with_as_many_as_there_are_devices() -> None:
    """It counts shared prefixes, so fewer instances than those of its busiest minute may do."""
    traffic, kind = traffic_of("llama-3.1-8b", requests_per_second=100.0), Platform(H100, 8, "vllm")
    asked: Any = (Instances(traffic), [same_kind(kind, LINK)], traffic.targets)
    assert isinstance(search.find_splits(*asked), Trouble)
    pairs = search.find_splits(*asked, is_trace=True)
    assert isinstance(pairs, list)
    assert all(2 <= pools.num_devices <= 8 for pools in pairs)


@pytest.mark.parametrize(
    ("engine", "prefill", "decode"), [("vllm", False, False), ("sglang", True, False), ("tensorrt-llm", True, True)]
)
def test_instances_have_pipeline_stages_if_the_engine_sends_caches_between_them(
    engine: str, prefill: bool, decode: bool
) -> None:
    for make, is_allowed in ((prefill_instance, prefill), (decode_instance, decode)):
        asked = traffic_of("llama-3.1-8b"), Platform(H100, 2, engine), Layout(1, 2)
        if is_allowed:
            assert not isinstance(make(*asked), Trouble)
        else:
            with pytest.raises(LayoutError, match="no pipeline stages"):
                make(*asked)


def test_instances_on_devices_of_two_architectures_cannot_read_each_others_cache() -> None:
    spec = kvcalc.load_model("llama-3.1-8b")
    a100, h100, h200, fp8 = (
        make_case(Question(spec, engine="vllm", devices=find_devices(gpu), context_tokens=1000, kv_dtype=kv_dtype))
        for gpu, kv_dtype in (("a100", "auto"), ("h100", "auto"), ("h200", "auto"), ("h200", "fp8"))
    )
    check_joined(h100, h200)
    check_joined(a100, a100)
    with pytest.raises(UsageError, match="has a different layout than that of h100"):
        check_joined(a100, h100)
    with pytest.raises(UsageError, match="has another type or other blocks than h200"):
        check_joined(h100, fp8)


def test_what_a_request_lacks_is_named() -> None:
    found = prefill_instance(traffic_of("llama-3-70b"), Platform(H100, 1, "vllm"), Layout(1, 1))
    assert isinstance(found, Trouble)
    assert found.reason.startswith("tp 1: a request of 4,097 tokens does not fit: ")
    assert found.reason.endswith("GiB more is needed per device")
