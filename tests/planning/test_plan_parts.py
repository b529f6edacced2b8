"""What a plan compares and prints, on rows and numbers made up for the purpose."""

from __future__ import annotations

from inspect import signature
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvcalc
from kvcalc.engines import command_key
from kvcalc.errors import DoesNotFitError, LayoutError, UsageError
from kvcalc.model.layout import Layout, LayoutAsked
from kvcalc.model.resolve import load_model
from kvcalc.planning.plan import finalists, pareto
from kvcalc.planning.plan import replicas as one_pool
from kvcalc.planning.plan.document import parse_price, plan, refuse_empty
from kvcalc.planning.plan.finalists import _why_next, find_simulated
from kvcalc.planning.plan.judge import STATISTICS, Finalist, Judged
from kvcalc.planning.plan.replicas import Found, OnePool, devices_then_speed
from kvcalc.planning.plan.targets import METRICS, Limit, Simulated, Targets, check_percentiles, limits_in
from kvcalc.planning.plan.traffic import (
    Platform,
    Probe,
    Refused,
    Traffic,
    Trouble,
    _why_not,
    describe_cost,
    replica_of,
    too_slow,
)
from kvcalc.question.question import Question, SpeedQuestion
from kvcalc.question.request_lengths import Lengths, drawn_lengths, one_length
from kvcalc.throughput.hardware import find_gpu
from tests.conftest import loaded

Range = tuple[float | None, float | None]
Range3 = tuple[float, float | None, float | None]


def test_a_larger_load_has_whole_clients_and_the_same_limits() -> None:
    targets = Targets(10, None, 1.0, None, 3.0, 99, None, 90)
    assert targets.larger(0.25) == targets._replace(concurrency=13)
    assert targets.larger(0.0) == targets
    assert Targets(None, 8.0).larger(0.5).requests_per_second == 12.0
    assert targets.without_limits() == Targets(10, None)
    assert targets.limits == [Limit("ttft", 1.0, 99), Limit("e2e", 3.0, 90)]
    assert [limit.statistic for limit in (*targets.limits, Limit("tpot", 1.0, None))] == ["p99", "p90", "mean"]
    assert (targets.highest_percentile, Targets(1, None, 1.0).highest_percentile) == (99, None)
    assert targets.describe(65)["confidence"] == 65


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("1s", (1.0, None)), ("500ms", (0.5, None)), ("2s@p99", (2.0, 99)),
        ("2s@99", (2.0, 99)), ("2s@ P50 ", (2.0, 50)), ("2s @p95", (2.0, 95)),
        ("1s@p75", None), ("1s@", None), ("1s@p", None), ("@p99", None), ("p99", None),
    ],
)  # fmt: skip
def test_a_target_is_a_time_and_perhaps_a_percentile(
    text: str, target: tuple[float, int | None] | None
) -> None:  # fmt: skip
    given = {"max_ttft": text, "max_tpot": None, "max_e2e": None}
    if target is not None:
        assert limits_in(given) == {"max_ttft_seconds": target[0], "ttft_percentile": target[1]}
        return
    with pytest.raises(UsageError, match="--max-ttft"):
        limits_in(given)


@pytest.mark.parametrize("metric", ["ttft", "tpot", "e2e"])
def test_a_percentile_is_one_that_is_counted_and_has_a_limit(metric: str) -> None:
    of: dict[str, Any] = {f"max_{metric}_seconds": 1.0}
    name = f"{metric}_percentile"
    for percentile in (None, 50, 90, 95, 99):
        check_percentiles(Targets(1, None, **{**of, name: percentile}))
    with pytest.raises(UsageError, match="must be one of 50, 90, 95, 99"):
        check_percentiles(Targets(1, None, **{**of, name: 98}))
    alone: dict[str, Any] = {name: 99}
    with pytest.raises(UsageError, match=f"{metric}_percentile needs max_{metric}_seconds"):
        check_percentiles(Targets(1, None, **alone))


def row(cost: float | None = 1.0, **more: Any) -> Any:
    return {
        "fits": True, "gpu": "a", "engine": "vllm", "cost_per_hour": cost, "cost_per_million_output_tokens": cost,
        "num_devices": 1, "tokens_per_second_per_device": 1.0, "ttft_seconds": 1.0, "tpot_seconds": 0.1, **more,
    }  # fmt: skip


def test_rows_are_ranked_by_cost_if_all_that_fit_have_one() -> None:
    for rows, with_targets, without in (
        ([row(), row()], "cost_per_hour", "cost_per_million_output_tokens"),
        ([row(), row(None)], "num_devices", "num_devices"),
        ([row(), row(None, fits=False)], "cost_per_hour", "cost_per_million_output_tokens"),
    ):
        assert (pareto.ranked_by(rows, True), pareto.ranked_by(rows, False)) == (with_targets, without)


def test_the_best_row_fits_costs_least_and_of_equal_ones_is_the_fastest() -> None:
    rows = [row(2.0), row(1.0, gpu="b"), row(1.0, gpu="c", tokens_per_second_per_device=2.0), row(0.5, fits=False)]
    best = pareto.best_of(rows, "cost_per_hour")
    assert best is rows[2]
    assert pareto.best_of(rows[3:], "cost_per_hour") is pareto.best_of([], "num_devices") is None
    assert pareto.best_of([row(num_devices=2), one := row(9.0)], "num_devices") is one


@pytest.mark.parametrize(
    ("others", "said"),
    [
        ([row(3.0, gpu="b", ttft_seconds=0.5)], "b: TTFT 500 ms instead of 1 s, for 3 times the cost per token"),
        ([row(3.0, gpu="b", ttft_seconds=2 / 3)], None),  # not much faster
        ([row(3.0, gpu="b", ttft_seconds=0.66)], "b: TTFT 660 ms instead of 1 s, for 3 times the cost per token"),
        ([row(3.0, gpu="b", ttft_seconds=0.5, fits=False)], None),
        ([row(3.0, gpu="b", ttft_seconds=None)], None),
        # The largest gain of all times and rows is named.
        ([row(3.0, gpu="b", ttft_seconds=0.5), row(4.0, gpu="c", tpot_seconds=0.04)],
         "c: TPOT 40 ms instead of 100 ms, for 4 times the cost per token"),
        ([row(1.5, gpu="b", engine="sglang", tpot_seconds=0.02)],
         "b with sglang: TPOT 20 ms instead of 100 ms, for 1.5 times the cost per token"),
        ([], None),
    ],
)  # fmt: skip
def test_what_the_cheapest_row_gives_up(others: list[Any], said: str | None) -> None:
    best = row()
    assert pareto.given_up([best, *others], best, "cost_per_million_output_tokens") == said
    assert pareto.given_up([best, *others], best, "cost_per_hour") is None
    assert pareto.given_up(others, None, "cost_per_million_output_tokens") is None


@pytest.mark.parametrize(
    ("cost", "low", "said"),
    [
        (1.15, 80.0, "b costs 15% more than a, and the ratio of their speeds is known to 37%"),
        (1.38, 80.0, None),  # the ratio of two speeds that are each known to 1.25 is known to 1.25 ** sqrt(2)
        (1.4, None, "b costs 40% more than a, and the ratio of their speeds is known less closely"),
    ],
)
def test_a_price_that_decides_by_less_than_the_range_of_the_speeds_is_named(
    cost: float, low: float | None, said: str | None
) -> None:
    best = row(tokens_per_second=100.0, tokens_per_second_low=100 / 1.25)
    other = row(cost, gpu="b", tokens_per_second=100.0, tokens_per_second_low=low)
    (first, second) = (pareto.close_price([best, other], best, key) for key in ("cost_per_hour", "num_devices"))
    assert (first and first.text, second) == (said, None)
    same_device: Any = {**other, "gpu": "a"}
    assert pareto.close_price([best, same_device], best, "cost_per_hour") is None
    assert pareto.close_price([other], None, "cost_per_hour") is None


@pytest.mark.parametrize(("engine", "command"), [("vllm", "vllm serve x"), ("sglang", "python -m x --model-path x")])
def test_replicas_behind_a_router_listen_for_other_machines(engine: str, command: str) -> None:
    for replicas, router, is_routed in (
        (1, "round-robin", False), (2, None, False), (2, "round-robin", True), (2, "least-requests", False),
    ):  # fmt: skip
        own: dict[str, Any] = {"engine": engine, "replicas": replicas, command_key(engine): command}
        one = row(**own)
        (found,) = pareto.commands([one], one, "cost_per_hour", router)
        assert found["command"] == command + " --host 0.0.0.0 --port 8000" * is_routed
        assert (found["router"] is not None) is is_routed
        if found["router"] is not None:
            assert "http://replica-0:8000 http://replica-1:8000 --host" in found["router"]


def test_each_engine_has_the_command_of_its_own_best_row() -> None:
    def one(cost: float, engine: str, command: str | None = None, **more: Any) -> Any:
        return row(cost, replicas=1, engine=engine, **{command_key(engine): command}, **more)

    rows = [
        one(3.0, "vllm", "vllm serve x -tp 2"), one(2.0, "vllm", "vllm serve x"), one(1.0, "vllm", "no", fits=False),
        one(4.0, "sglang", "sglang serve x"), one(5.0, "logical"), one(6.0, "tensorrt-llm"),
    ]  # fmt: skip
    for best, engines in ((rows[1], ["vllm", "sglang"]), (rows[3], ["sglang", "vllm"]), (None, ["vllm", "sglang"])):
        found = pareto.commands(rows, best, "cost_per_hour", None)
        assert [one["engine"] for one in found] == engines
        assert {one["engine"]: one["command"] for one in found} == {"vllm": "vllm serve x", "sglang": "sglang serve x"}
    # The best row may be one of several of its engine, and is not compared again.
    assert pareto.commands(rows, rows[0], "cost_per_hour", None)[0]["command"] == "vllm serve x -tp 2"


class Shown(SimpleNamespace):
    """A point whose times are those of its estimate."""

    def estimated(self) -> Shown:
        return self


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9), st.booleans()), max_size=14), st.booleans())
def test_the_front_has_what_nothing_else_beats_in_both_ways(points: list[tuple[int, int, bool]], priced: bool) -> None:
    """Tokens per second of a user, and what a token costs: money if every kind has a price, else devices."""
    made = [
        [
            {
                "tokens_per_second_per_user": float(fast), "tokens_per_second_per_device": 1.0 / cost,
                "cost_per_million_output_tokens": float(cost) if has_price else None,
            }
            for fast, cost, of_first in points if of_first is first
        ]
        for first, has_price in ((True, True), (False, priced))
    ]  # fmt: skip
    kinds: Any = [SimpleNamespace(price=1.0, number=0), SimpleNamespace(price=1.0 if priced else None, number=1)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pareto, "_points", lambda _, kind: (Shown(document=one) for one in made[kind.number]))
        found = pareto.front(None, kinds)  # type: ignore[arg-type]
    pairs = {(fast, cost) for fast, cost, _ in points}
    best = {
        one for one in pairs if not any(other[0] >= one[0] and other[1] <= one[1] for other in pairs - {one})
    }  # fmt: skip
    assert [
        (point["tokens_per_second_per_user"], round(1 / point["tokens_per_second_per_device"])) for point in found
    ] == sorted(best, reverse=True)


@pytest.mark.parametrize(
    ("shape", "devices", "text", "is_plain"),
    [
        (Layout(1, 1), 1, "tp 1", True), (Layout(8, 2), 16, "tp 8 x pp 2", True),
        # A number of groups of experts is named if it is not the default.
        (Layout(4, 1, 2, 8), 8, "dp 2 x tp 4", False), (Layout(4, 1, 2), 8, "dp 2 x tp 4 x ep 1", False),
        (Layout(4, 1, 2, divides_experts=False), 8, "dp 2 x tp 4", False),
        (Layout(2, 2, 4, 4), 16, "dp 4 x tp 2 x pp 2 x ep 4", False),
        (Layout(8, 1, 1, 8), 8, "tp 8 x ep 8", False), (Layout(8, 1, token_ranks=2), 8, "tp 8 x dcp 2", False),
        (Layout(2, 3, 5, 70, prompt_ranks=7), 210, "dp 5 x tp 2 x pp 3", False),
    ],
)  # fmt: skip
def test_a_shape_multiplies_its_parts_and_names_those_above_one(
    shape: Layout, devices: int, text: str, is_plain: bool
) -> None:
    assert (shape.num_devices, str(shape), shape.is_plain) == (devices, text, is_plain)
    keys = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "expert_parallel_size")
    assert shape.describe_all() == dict(zip((*keys, "decode_context_parallel_size"), shape))
    assert shape.describe() == dict(zip(keys, shape))


def test_a_shape_asks_for_the_ranks_and_experts_that_it_has() -> None:
    """Two ranks that divide the tokens are an option of the server, one is none, and other options stay."""
    question = Question(load_model("llama-3.1-8b"), engine="vllm", engine_settings={"block-size": "32"})
    traffic = Traffic(question, one_length(10, 20), Targets(1, None), False)
    kind = Platform(find_gpu("h100"), 8, "vllm")
    plain = replica_of(traffic, kind, Layout(4))
    assert (plain.engine_settings, plain.layout) == ({"block-size": "32"}, LayoutAsked(4, 1, 1))
    divided = replica_of(traffic, kind, Layout(4, 1, 2, 4, 2))
    assert divided.engine_settings == {"block-size": "32", "decode-context-parallel-size": "2"}
    assert (divided.data_parallel_size, divided.speed) == (2, SpeedQuestion(expert_parallel_size=4))
    # The default is not asked for, and what else is asked of the speed stays.
    asked = question._replace(speed=SpeedQuestion(None, 10, 20, 3))
    assert asked.with_layout(Layout(4, 1, 2, 8).asked).speed == asked.speed
    assert asked.with_layout(Layout(2, 1, 1, 2).asked).speed == SpeedQuestion(2, 10, 20, 3)


def serving(ttft: Range3, tpot: Range3) -> Any:
    return {
        "ttft_seconds": ttft[0], "ttft_low_seconds": ttft[1], "ttft_high_seconds": ttft[2],
        "tpot_seconds": tpot[0], "tpot_low_seconds": tpot[1], "tpot_high_seconds": tpot[2],
        "ttft_judged_seconds": ttft[2] or ttft[0], "tpot_judged_seconds": tpot[2] or tpot[0],
    }  # fmt: skip


LENGTHS = Lengths(100, 11, 150, 150, 150, 160, 111)


@pytest.mark.parametrize(
    ("limits", "said", "hint"),
    [
        ({"max_ttft_seconds": 1.5}, None, None),
        ({"max_ttft_seconds": 1.4}, "TTFT of one request is 1 s, up to 1.5 s, and the limit is 1.4 s", True),
        ({"max_ttft_seconds": 1.0}, "TTFT of one request is 1 s, up to 1.5 s, and the limit is 1 s", True),
        ({"max_ttft_seconds": 0.9}, "TTFT of one request is 1 s, up to 1.5 s, and the limit is 900 ms", False),
        # The range of TPOT is wide, and judged all the same.
        ({"max_tpot_seconds": 0.3}, None, None),
        ({"max_tpot_seconds": 0.1}, "TPOT of one request is 100 ms, up to 300 ms, and the limit is 100 ms", True),
        # The first token, and ten more.
        ({"max_e2e_seconds": 4.5}, None, None),
        ({"max_e2e_seconds": 2.0}, "E2E of one request is 2 s, up to 4.5 s, and the limit is 2 s", True),
        ({"max_e2e_seconds": 1.9}, "E2E of one request is 2 s, up to 4.5 s, and the limit is 1.9 s", False),
        ({"max_ttft_seconds": 2.0, "max_tpot_seconds": 0.01},
         "TPOT of one request is 100 ms, up to 300 ms, and the limit is 10 ms", False),
    ],
)  # fmt: skip
def test_the_first_limit_that_is_missed_says_by_what(limits: dict[str, Any], said: str | None, hint: bool) -> None:
    found = too_slow(Targets(1, None, **limits), LENGTHS, serving((1.0, 0.8, 1.5), (0.1, 0.05, 0.3)))
    assert (found and found.reason) == said
    if found is not None:
        assert found.hint == ("--confidence 50 uses the point estimate" if hint else None)


def test_a_limit_of_a_percentile_is_compared_with_the_mean() -> None:
    one = serving((1.0, None, None), (0.1, None, None))
    assert too_slow(Targets(1, None, 1.0, ttft_percentile=99), LENGTHS, one) is None
    assert too_slow(Targets(1, None, 0.99, ttft_percentile=99), LENGTHS, one) is not None


@pytest.mark.parametrize(
    ("engine", "limit", "context"),
    [
        ("sglang", None, 2202), ("sglang", 4096, 2202), ("sglang", 2201, 2201), ("sglang", 2200, 2200),
        ("sglang", 1000, 2200),  # requests beyond the limit, which were asked for
        ("vllm", None, 2200), ("vllm", 2200, 2200), ("vllm", 1000, 2200),
    ],
)  # fmt: skip
def test_a_server_has_the_context_that_its_engine_needs_up_to_the_limit_of_the_model(
    engine: str, limit: int | None, context: int
) -> None:
    """SGLang keeps two tokens free beyond a prompt and its answer (`needed_context`)."""
    question = Question(loaded("llama-3.1-8b")._replace(max_position_embeddings=limit))
    traffic = Traffic(question, drawn_lengths("fixed:2000", "fixed:200")[0], Targets(1, None), False)
    assert traffic.context_for(engine) == context
    assert traffic.limit == (1000 if limit == 1000 else None)
    assert (traffic.refusal is None) is (limit != 1000)
    assert traffic._replace(allow_beyond_limit=True).refusal is None


def _answer(served: Any, **fit: Any) -> Any:
    document = {"throughput": {"serving": served, "energy": None}, "engine": {"expert_parallel_size": 1}}
    return SimpleNamespace(document=document, fit=fit)


def test_a_replica_that_serves_nothing_has_no_times() -> None:
    known = _answer(serving((2.0, None, None), (0.1, None, None)))
    known.document["throughput"]["energy"] = {"watts": 700.0}
    assert Probe(1, None, known, None).energy == {"watts": 700.0}  # type: ignore[arg-type]
    found = Probe(1, None, _answer(None), None)  # type: ignore[arg-type]
    unknown: Any = SimpleNamespace(document={"throughput": None})
    for one in (found, found._replace(speed=None), found._replace(speed=unknown)):
        assert one.energy is None
        with pytest.raises(ValueError, match="serve"):
            one.serving  # noqa: B018


@pytest.mark.parametrize(
    ("running", "fits", "clients", "most"),
    [(4, 10, None, 10), (4, 10, 6, 6), (4, 10, 3, 4), (4, 10, 20, 10), (4, None, None, 4), (4, 2, 8, 4)],
)
def test_a_server_may_run_what_fits_and_no_more_than_there_are_clients(
    running: int, fits: int | None, clients: int | None, most: int
) -> None:
    probe = Probe(running, _answer(None, max_batch_size=fits, free_low_bytes=None), None, None)
    assert probe.most_running(clients) == most


@pytest.mark.parametrize(("free", "is_tight"), [(None, False), (0, False), (1, False), (-1, True)])
def test_a_fit_is_tight_if_the_estimated_parts_may_leave_too_little(free: int | None, is_tight: bool) -> None:
    assert Probe(1, _answer(None, free_low_bytes=free), None, None).is_tight is is_tight


def test_costs_are_those_of_the_tokens_that_are_paid_for() -> None:
    # 11 of 111 tokens are output, and 1,000 a second are 3.6 million an hour.
    found = describe_cost(7.2, LENGTHS, 1000.0, None)
    assert found == {
        "cost_per_hour": 7.2, "cost_per_million_output_tokens": pytest.approx(2.0),
        "cost_per_million_tokens": pytest.approx(2.0 * 11 / 111),
    }  # fmt: skip
    assert describe_cost(None, LENGTHS, 1000.0, None) == {}
    trace: Any = {"requests_per_second": 10.0}  # the mean rate, not the busiest part's
    assert describe_cost(3.96, LENGTHS, 1000.0, trace)["cost_per_million_output_tokens"] == pytest.approx(10.0)


def layout(replicas: int = 2, shape: Layout = Layout(4, 1), speed: float = 100.0, **more: Any) -> OnePool:
    targets = Targets(more.pop("clients", None), 8.0)
    traffic: Any = SimpleNamespace(targets=targets, spare_replicas=more.pop("spare", 0), lengths=LENGTHS)
    kind: Any = SimpleNamespace(price=more.pop("price", None), gpu=SimpleNamespace(name="a"), engine="vllm")
    served = {**serving((1.0, 0.5, 1.5), (0.1, 0.05, 0.2)), "tokens_per_second": speed}
    return OnePool(traffic, kind, shape, replicas, Probe(3, None, _answer(served), None), **more)  # type: ignore[arg-type]


def test_the_devices_of_a_layout_are_those_of_all_replicas_and_spare_ones() -> None:
    assert (layout().num_devices, layout(spare=3).num_devices) == (8, 20)
    assert (layout().cost_per_hour, layout(spare=3, price=2.5).cost_per_hour) == (None, 50.0)
    simulation: Any = SimpleNamespace(router="random", trace=None, num_requests=None)
    assert layout().in_flight(simulation, Targets(None, 8.0)) == 6
    assert layout(8).in_flight(simulation, Targets(None, 8.0)) == 3  # one of eight is simulated
    assert (layout().tokens_per_second, layout().weight) == (200.0, 8)
    assert (str(layout()), str(layout(1)), layout().numbers, layout().key) == ("2 x tp 4", "tp 4", (2,), Layout(4, 1))
    assert [one[2] for one in layout().factors(Targets(None, 8.0)).values()] == [1.5, 2.0]
    assert [layout().most_replicas(number) for number in (3, 4, 11, 12)] == [0, 1, 2, 3]
    assert [layout(spare=1).most_replicas(number) for number in (4, 7, 8, 40)] == [0, 0, 1, 9]
    assert [layout(clients=5).most_replicas(number) for number in (8, 20, 40)] == [2, 5, 5]
    assert layout().at((2,)) == layout().at((2,), is_trace=True) == layout()
    # Clients overload no replica: they wait.
    clients: Any = SimpleNamespace(targets=Targets(9, None, 1.0), spare_replicas=0)
    of_clients = layout(5)._replace(traffic=clients)
    assert (of_clients.utilization, of_clients.least_replicas) == (None, 1)


def test_layouts_have_few_devices_first_and_of_as_many_the_fastest() -> None:
    small, slow, fast = layout(1), layout(2, speed=90.0), layout(2, speed=100.0)
    assert sorted((fast, slow, small), key=devices_then_speed) == [small, fast, slow]
    # Experts in another way must be faster by more than 2 %.
    for speed, wins in ((101.9, False), (102.1, True)):
        other = layout(2, Layout(4, 1, 1, 4), speed)
        assert (devices_then_speed(other) < devices_then_speed(fast)) is wins
    assert (fast.why_more(slow), fast.why_more(small)) == (None, "8 devices instead of 4")


def finalist(one: Any, worst: float, missed: str | None = None) -> Any:
    judged = SimpleNamespace(missed=missed, worst=worst, simulated=SimpleNamespace(tokens_per_second=1.0))
    return Finalist(one, judged, is_alone=False)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("others", "missed", "larger", "said"),
    [
        ([finalist(layout(3), 0.2)], [finalist(layout(1), 2.0, "late")], [], "3 x tp 4: 12 devices instead of 8"),
        ([finalist(layout(4, Layout(2, 1)), 0.8)], [], [],
         "4 x tp 2: same number of devices, less headroom (80% of the limit, not 50%)"),
        ([finalist(layout(4, Layout(2, 1)), 0.504)], [], [], "4 x tp 2: same number of devices, same headroom"),
        # Of layouts that miss a target, the one with the fewest devices, and then the closest to its target.
        ([], [finalist(layout(5), 1.1, "late"), finalist(layout(1), 1.3, "later"), finalist(layout(1), 1.2, "late")],
         [layout(9)], "tp 4: late"),
        # A layout that was not simulated, with the fewest replicas that the short form calls enough.
        ([], [], [layout(9, price=2.5), layout(3)], "7 x tp 4: 28 devices instead of 8, 70.00 per hour"),
        ([], [], [layout(9)], "7 x tp 4: 28 devices instead of 8"),
        ([], [], [SimpleNamespace(why_more=lambda _: None)], None),  # pools that do not need more
        ([], [], [], None),
    ],
)  # fmt: skip
def test_why_the_next_layout_lost_to_the_one_that_won(
    monkeypatch: pytest.MonkeyPatch, others: list[Any], missed: list[Any], larger: list[Any], said: str | None
) -> None:
    monkeypatch.setattr(OnePool, "least_replicas", 7)
    assert _why_next(finalist(layout(), 0.5), others, missed, larger) == said


def test_of_pairs_that_miss_a_target_the_one_is_named_that_the_short_form_prefers() -> None:
    """One of replicas is not compared with pools, whose order is not that of their devices."""
    best, first, second = (SimpleNamespace(weight=weight, __str__=str) for weight in (4, 9, 5))
    missed = [finalist(first, 1.3, "late"), finalist(second, 1.1, "later")]
    found = _why_next(finalist(best, 0.5), [], missed, [])
    assert found is not None
    assert found.endswith(": late")


@pytest.mark.parametrize(
    ("worst", "trouble", "said"),
    [
        ((0.5, 0.5), Trouble("another is too slow"), "3 x tp 4: 12 devices instead of 8"),
        ((0.5,), Trouble("another is too slow"), "another is too slow"),
        ((0.5,), None, None),
    ],
)
def test_the_winner_of_the_simulations_names_the_next_layout(
    worst: tuple[float, ...], trouble: Trouble | None, said: str | None
) -> None:
    layouts = [layout(2 + number) for number in range(len(worst))]
    judge: Any = SimpleNamespace(confirm=lambda one: one)
    found = find_simulated(judge, [(layouts, trouble)], lambda _, one, best: finalist(one, 0.5), lambda *_: None)
    assert isinstance(found, OnePool)
    assert (found.replicas, found.next_layout) == (2, said)


@pytest.mark.parametrize(("text", "price"), [
    ("h100=2.5", 2.5), ("H100=0", 0.0), ("h100=999999999", 999_999_999.0), ("h100=1e9", None), ("h100=-1", None),
    ("h100", None), ("h100=", None), ("h100=nan", None), ("h100=a", None),
])  # fmt: skip
def test_a_price_is_a_number_below_a_thousand_million(text: str, price: float | None) -> None:
    if price is not None:
        assert parse_price(text) == ("h100-sxm", price)
        return
    with pytest.raises(UsageError, match="not a price"):
        parse_price(text)


def test_an_empty_plan_says_why_for_the_first_device_and_how_many_more_there_are() -> None:
    def refused(*rows: tuple[str, str]) -> str:
        plans = [{"gpu": gpu, "reason": reason, "hint": "try"} for gpu, reason in rows]
        with pytest.raises(DoesNotFitError) as raised:
            refuse_empty({"best": None, "plans": plans})  # type: ignore[typeddict-item]
        assert raised.value.hint == "try"
        return raised.value.message

    assert refused(("a", "x")) == refused(("a", "x"), ("b", "x")) == "no layout serves this load: x"
    assert refused(("a", "x"), ("b", "y"), ("c", "x")) == (
        "no layout serves this load: a: x; 2 more without a layout"
    )  # fmt: skip
    refuse_empty({"best": {}, "plans": []})  # type: ignore[typeddict-item]


@pytest.mark.parametrize(
    ("running", "free", "said"),
    [
        (1, -(3 << 30), "a request of 500 tokens does not fit: 3.00 GiB more is needed per device"),
        (1, 5, "vllm does not run a request of 500 tokens at once in this memory"),
        (1200, 0, "vllm does not run 1,200 requests of 500 tokens at once in this memory"),
    ],
)
def test_why_requests_do_not_run_together(running: int, free: int, said: str) -> None:
    fit: Any = {"free_bytes": free}
    assert _why_not(Platform(find_gpu("h100"), 8, "vllm"), running, 500, fit) == said


REFUSED, OTHER, SLOW, SLOWER = Refused("first"), Refused("second"), Trouble("slow"), Trouble("slower")


@pytest.mark.parametrize(
    ("answers", "trouble"),
    [
        ([REFUSED, OTHER], REFUSED), ([REFUSED, SLOW, OTHER], SLOW), ([SLOW, SLOWER, REFUSED], SLOWER),
        ([SLOW, None], SLOW), ([REFUSED, layout(1)], None), ([layout(1), REFUSED], None),
        ([layout(1), SLOW], SLOW), ([None], None),
    ],
)  # fmt: skip
def test_a_layout_that_the_engine_refuses_is_the_reason_only_if_no_other_layout_has_one(
    monkeypatch: pytest.MonkeyPatch, answers: list[Any], trouble: Trouble | None
) -> None:
    """Of several that serve too little, the largest is the reason, and of several refusals the first."""
    left = iter(answers)
    monkeypatch.setattr(one_pool, "smallest", lambda *_: next(left))
    traffic: Any = SimpleNamespace(has_many_layouts=lambda _: False)
    found = one_pool._layouts(traffic, layout().kind, [Layout(2**n, 1) for n in range(len(answers))], 2)
    assert found.trouble == trouble
    assert found.layouts == [one for one in answers if isinstance(one, OnePool)]


@pytest.mark.parametrize(("has_many", "limits"), [(True, [None, None, 8, 4]), (False, [None] * 5)])
def test_of_many_layouts_only_those_are_searched_that_may_be_among_the_best(
    monkeypatch: pytest.MonkeyPatch, has_many: bool, limits: list[int | None]
) -> None:
    """Two are kept. The fifth shape alone has more devices than the second best layout."""
    asked: list[int | None] = []
    answers = iter([layout(2), layout(1, Layout(2, 1)), layout(1), None, None])

    def smallest(*given: Any) -> Any:
        asked.append(given[3])
        return next(answers)

    monkeypatch.setattr(one_pool, "smallest", smallest)
    traffic: Any = SimpleNamespace(has_many_layouts=lambda _: has_many)
    shapes = [Layout(1, 1), Layout(2, 1), Layout(4, 1), Layout(4, 1, 1, 4), Layout(8, 1)]
    found = one_pool._layouts(traffic, layout().kind, shapes, 2)
    assert asked == limits
    assert [one.num_devices for one in found.layouts] == [2, 4, 8]


def test_a_plan_in_python_has_the_defaults_of_the_plan_that_it_asks() -> None:
    defaults, own = (
        {name: one.default for name, one in signature(of).parameters.items()} for of in (kvcalc.plan, plan)
    )
    shared = {"max_devices", "allow_beyond_limit", "with_front", "strict", "disaggregate", "all_layouts", "headroom"}
    assert shared <= defaults.keys() & own.keys()
    assert {name: own[name] for name in shared} == {name: defaults[name] for name in shared}
    assert own["spare_replicas"] == defaults["spare_replicas"]


LARGE, SMALL, OTHER_SHAPE = (layout(1, Layout(size, 1)) for size in (8, 2, 4))


@pytest.mark.parametrize(
    ("has_many", "most", "lists"),
    [
        # All layouts that hold the requests, those with few devices first, whether or not their means meet the targets.
        (False, 8, [([SMALL, LARGE], "slow"), ([OTHER_SHAPE], "slower")]),
        (False, 1, [([SMALL], "slow"), ([OTHER_SHAPE], "slower")]),
        # Of many layouts, those of the first list that meet the targets, in the order of the short form.
        (True, 8, [([LARGE, SMALL], "slow")]),
        (True, 1, [([LARGE], "slow")]),
    ],
)
def test_the_layouts_that_are_simulated_are_those_that_hold_the_requests(
    monkeypatch: pytest.MonkeyPatch, has_many: bool, most: int, lists: list[Any]
) -> None:
    kind: Any = SimpleNamespace(engine="vllm", max_devices=6)
    first, small, other = (one._replace(kind=kind) for one in (LARGE, SMALL._replace(replicas=3), OTHER_SHAPE))
    found = [Found([first, small], Trouble("slow")), Found([other], Trouble("slower"))]

    def find_layouts(traffic: Any, *_: Any) -> Any:
        assert traffic == ("the traffic" if has_many else "without limits")
        return iter([Found([], None), *found] if has_many else found)

    class Asked(SimpleNamespace):
        def __eq__(self, other: object) -> bool:
            return other == "the traffic"

    # The short form has an answer within the limits for all layouts but one, which then has as many as there can be.
    guesses: Any = {one.shape: one._replace(next_layout="a guess") for one in (first, other)}
    guesses[small.shape] = Trouble("too slow for the limits")
    traffic: Any = Asked(has_many_layouts=lambda _: has_many, without_limits=lambda: "without limits")
    monkeypatch.setattr(finalists, "find_layouts", find_layouts)
    monkeypatch.setattr(finalists, "smallest", lambda asked, _, shape: guesses[shape])
    simulated = list(finalists._candidates(traffic, kind, most))
    assert [([one.shape for one in layouts], trouble and trouble.reason) for layouts, trouble in simulated] == [
        ([one.shape for one in layouts], said) for layouts, said in lists
    ]
    assert {one.next_layout for layouts, _ in simulated for one in layouts} <= {None, "a guess"}


@pytest.mark.parametrize(
    ("number", "most", "limit", "busy"), [(None, 8, 1.0, 1.0), (3, 3, 1.0, 1.0), (None, 8, None, 0.9)]
)
def test_a_limit_on_the_wait_is_judged_however_busy_the_short_form_calls_the_replicas(
    monkeypatch: pytest.MonkeyPatch, number: int | None, most: int, limit: float | None, busy: float
) -> None:
    monkeypatch.setattr(finalists, "_candidates", lambda traffic, kind, most: (traffic.most_busy, kind, most))
    monkeypatch.setattr(finalists, "find_simulated", lambda judge, candidates, *_: candidates)
    traffic = Traffic(None, LENGTHS, Targets(1, None, limit), False)  # type: ignore[arg-type]
    found: Any = finalists.find_replicas(traffic, "a kind", None, number)  # type: ignore[arg-type]
    assert found == (busy, "a kind", most)


@pytest.mark.parametrize(
    ("rate", "wanted", "slow_from", "needs_more"),
    [
        # A request stays 1 s and half a second more for each that runs: at 1.9 a second 3, 5, 7 and 9 must run.
        (1.9, 8, 99, True),  # but no more than 8 can
        (1.9, 99, 7, True),  # but 7 miss a target
        (1.9, 99, 9, True),
        (1.9, 99, 99, False),  # after four rounds nobody knows
        (1.0, 1, 99, True),
        (1.0, 2, 3, False),  # two run, which answer one a second
        (0.6, 1, 2, False),
    ],
)
def test_more_replicas_are_needed_if_as_many_requests_as_must_run_together_do_not(
    rate: float, wanted: int, slow_from: int, needs_more: bool
) -> None:
    def at(running: int) -> Any:
        seconds = 1 + running / 2
        trouble = Trouble("slow") if running >= slow_from else None
        return SimpleNamespace(serving={"requests_per_second": running / seconds}, trouble=trouble)

    one: Any = object.__new__(one_pool.Replica)
    one.clients, one.rate, one.wanted, one.at, one._think = None, 3 * rate, wanted, at, 0.0
    assert one.needs_more(at(1), 3) is needs_more
    for clients, is_slow in ((3 * slow_from - 2, True), (3 * slow_from - 3, False)):
        one.clients = clients
        assert one.needs_more(at(1), 3) is is_slow


@pytest.mark.parametrize(
    ("ranks", "trouble", "is_refused"), [(2, None, True), (2, Trouble("too slow"), False), (1, None, False)]
)
def test_dp_ranks_are_refused_only_if_nothing_else_is_the_reason(
    monkeypatch: pytest.MonkeyPatch, ranks: int, trouble: Trouble | None, is_refused: bool
) -> None:
    def refuse(*_: Any) -> None:
        raise LayoutError("this model has no DP ranks")

    monkeypatch.setattr(one_pool, "_lists_of_shapes", lambda *_: iter([[Layout(1, 1, ranks)], []]))
    monkeypatch.setattr(one_pool, "_layouts", lambda _, __, shapes, ___: Found([], trouble if shapes else None))
    monkeypatch.setattr(one_pool, "probe", refuse)
    question = Question(load_model("llama-3.1-8b"), data_parallel_size=ranks)
    traffic: Any = SimpleNamespace(refusal=None, question=question)
    found = one_pool.find_layouts(traffic, Platform(find_gpu("h100"), 8, "vllm"))
    if is_refused:
        with pytest.raises(LayoutError, match="no DP ranks"):
            list(found)
    else:
        # A reason stays one while later lists have none.
        assert [one.trouble for one in found] == [trouble, trouble]


@pytest.mark.parametrize(
    ("model", "asked", "all_layouts", "divides", "many"),
    [
        ("llama-3.1-8b", {}, False, False, False), ("llama-3.1-8b", {}, True, False, True),
        ("qwen3-30b-a3b", {}, False, True, True), ("qwen3-30b-a3b", {"data_parallel_size": 2}, False, False, False),
        ("qwen3-30b-a3b", {"data_parallel_size": 2}, True, False, True),
    ],
)  # fmt: skip
def test_a_model_with_experts_has_many_layouts_unless_dp_ranks_were_asked_for(
    model: str, asked: dict[str, Any], all_layouts: bool, divides: bool, many: bool
) -> None:
    traffic = Traffic(Question(load_model(model), **asked), LENGTHS, Targets(1, None), False, all_layouts=all_layouts)
    assert (traffic.divides_experts("vllm"), traffic.has_many_layouts("vllm")) == (divides, many)


def test_a_simulation_is_judged_as_it_is_if_nothing_makes_it_slower() -> None:
    times: Any = {metric: dict.fromkeys(STATISTICS, 0.5) for metric in METRICS}
    judged = Judged(Simulated(times, 10, 0, 7))
    row = judged.describe()
    assert (row["step_factor"], row["ttft_factor"], row["ttft_p99_seconds"]) == (1.0, 1.0, 0.5)
