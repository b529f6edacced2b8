"""Rules of separate instances: what each device holds, sends, draws and costs, whatever is planned."""

from __future__ import annotations

from itertools import product
from math import inf
from types import SimpleNamespace
from typing import Any

import pytest

import kvcalc
from kvcalc.engines import disaggregation_of
from kvcalc.errors import LayoutError, ModelError, UsageError
from kvcalc.model.layout import Layout
from kvcalc.planning.plan.disaggregated import search
from kvcalc.planning.plan.disaggregated.instances import HANDOVER_SECONDS, decode_instance, prefill_instance, sent_of
from kvcalc.planning.plan.disaggregated.platforms import PoolPlatforms, check_joined, join_caches, same_kind
from kvcalc.planning.plan.disaggregated.rates import Load, Times
from kvcalc.planning.plan.disaggregated.search import Instances, find_judge, pair_of
from kvcalc.planning.plan.disaggregated.split import TwoPools, describe_energy, judged_load, times_between
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
        sent = sent_of(make_case(asked), 4096)
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
    # Each prefill instance is busy for the time of its prompts.
    busy = rate / prefills * row["disaggregated"]["ttft_parts"]["prefill_seconds"]
    assert prefill["instances"] == prefills
    of_prompts = mean_watts(H100, prefill["num_devices"], 1.0, busy)
    assert of_prompts is not None
    assert row["watts"] == pytest.approx(of_prompts + of_steps, rel=0.06)
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


def test_a_limit_on_the_whole_request_counts_without_one_on_its_first_token() -> None:
    traffic, kind = traffic_of("llama-3.1-8b"), Platform(H100, 1, "vllm")
    (prefill,), (decode,) = (
        found[0] for found in (Instances(traffic).prefills(kind), Instances(traffic).decodes(kind))
    )
    times = pair_of(prefill, decode, same_kind(kind, LINK).link)[0].times(1, 1, Load(0.1))
    assert times is not None
    first, each = (times_between(metric, prefill, decode, times) for metric in ("ttft", "tpot"))
    assert each[0] < times.tpot_seconds < each[2] < each[1]
    whole = first[2] + 399 * each[2]
    for limit, is_met in ((whole * 1.001, True), (whole * 0.999, False)):
        targets = Targets(None, 0.1, None, None, max_e2e_seconds=limit)
        assert find_judge(targets, prefill, decode)(times) is is_met


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


def test_the_transfer_has_no_range_and_the_other_parts_have_that_of_their_instance() -> None:
    times = Times(
        1.0, decoding=7.0, prompts=3, utilization=0.5, host_seconds=0.25, queue_seconds=0.5, prefill_seconds=1.0,
        transfer_seconds=0.125, first_step_seconds=0.0625, tpot_seconds=0.01,
    )  # fmt: skip
    prefill: Any = SimpleNamespace(ttft_factors=lambda prompts: {3: (0.5, 2.0, 1.5)}[prompts])
    decode: Any = SimpleNamespace(step_factors=lambda decoding: {7.0: (0.25, 8.0, 4.0)}[decoding])
    ends = (1.75 * 0.5 + 0.125 + 0.0625 * 0.25, 1.75 * 2 + 0.125 + 0.0625 * 8, 1.75 * 1.5 + 0.125 + 0.0625 * 4)
    assert times_between("ttft", prefill, decode, times) == ends
    assert times_between("tpot", prefill, decode, times) == (0.0025, 0.08, 0.04)


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
    known, kind = Instances(traffic_of("llama-3.1-8b")), Platform(H100, 1, "vllm")
    (usual,), _ = known.decodes(kind)
    (shorter,), _ = known.decodes(kind, Targets(None, 3.0, 4.0, 0.012))
    assert 0 < shorter.rates.most < usual.rates.most
    most = shorter.rates.most
    assert shorter.rates.tpot(most) * shorter.step_factors(most)[2] <= 0.012


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
        kind = Platform(H100._replace(tdp_watts=tdp), 4, "vllm")
        found = split_of(traffic, kind)
        assert bool(describe_energy(found, traffic.lengths)) == (tdp is not None)


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


def test_instances_that_are_too_few_for_a_trace_have_the_figures_of_what_they_can_serve() -> None:
    found = split_of(traffic_of("llama-3.1-8b"), Platform(H100, 4, "vllm"))
    most = min(found.pair.capacities(1, 1))
    for rate, is_trace, served in ((0.5, False, 0.5), (2.0, False, None), (0.5, True, 0.5), (2.0, True, 0.9)):
        other = found.at((1, 1), Targets(None, rate * most, None, None), is_trace=is_trace)
        assert (other and other.match.times.requests_per_second) == (served and pytest.approx(served * most))
        assert other is None or other.num_devices == sum(found.devices_of((1, 1)))


@pytest.mark.parametrize("load", [{"requests_per_second": 40.0}, {"concurrency": 160}])
def test_no_pools_cost_less_than_the_bound_of_their_layouts(
    load: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    targets = Targets(load.get("concurrency"), load.get("requests_per_second"), 4.0, 0.03)
    known = Instances(traffic_of("llama-3.1-8b")._replace(targets=targets))
    one, other = Platform(H100, 64, "vllm", price=2.0), Platform(H200, 64, "vllm", price=3.0)
    for kinds in (
        same_kind(one, LINK), PoolPlatforms(one, other, same_kind(one, LINK).link, (2.0, 3.0), (64, 64, 128)),
    ):  # fmt: skip
        rows = search.candidates_of(known, kinds, targets)
        bounds = [bound for bound, _, _ in rows]
        assert bounds == sorted(bounds)
        assert min(bounds) > sum(kinds.weights), "more than two devices"
        weights = []
        for bound, prefill, decode in rows:
            pair, moved = pair_of(prefill, decode, kinds.link)
            judge = find_judge(targets, prefill, decode)
            match = pair.fewest(judged_load(Load(**load), prefill, decode), judge, kinds.most)
            weights.append(inf if match is None else TwoPools(prefill, decode, kinds, moved, match).weight)
            assert bound <= weights[-1] * (1 + 1e-9)
        for keep in (1, 2):
            tried: list[Any] = []

            def counted(*asked: Any, tried: list[Any] = tried) -> Any:
                tried.append(asked)
                return pair_of(*asked)

            monkeypatch.setattr(search, "pair_of", counted)
            best = search.find_splits(known, [kinds], targets, keep)
            assert isinstance(best, list)
            assert [one.weight for one in best] == sorted(weights)[:keep]
            # The bounds grow, so the search ends at the first one above what is found already.
            ends = [bound > sorted([*weights[:number], inf, inf])[keep - 1] for number, bound in enumerate(bounds)]
            assert len(tried) == [*ends, True].index(True) < len(rows)


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
