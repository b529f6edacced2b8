"""A plan is the smallest layout that works: it fits and meets the targets, and with one device less it does not."""

from __future__ import annotations

from math import ceil
from types import SimpleNamespace
from typing import Any, cast

import pytest

import kvcalc
from kvcalc.errors import DoesNotFitError, GpuError, ModelError, UsageError
from kvcalc.planning.plan.document import ROW, Targets, _full_notes, parse_price, plan, refuse_empty
from kvcalc.planning.plan.replicas import as_many_devices
from kvcalc.planning.plan.traffic import Platform, _why_not, seconds_text
from kvcalc.question.question import Question, SpeedQuestion
from kvcalc.question.request_lengths import Lengths, one_length
from kvcalc.throughput.hardware import Devices, Gpu, find_devices, find_gpu
from tests.conftest import loaded
from tests.documents import estimate, texts


def ask(
    name: str, gpus: tuple[str, ...] = ("h100",), lengths: Lengths | None = None, *, max_devices: int = 1024,
    prices: dict[str, float] | None = None, engines: tuple[str, ...] = ("vllm",), beyond: bool = False,
    dtype: str | None = None, headroom: float = 0.0, spare_replicas: int = 0, **targets: Any,
) -> Any:  # fmt: skip
    speed = SpeedQuestion(confidence=targets.pop("confidence", 80))
    wanted = Targets(targets.pop("concurrency", None), targets.pop("rate", None), **targets)
    return plan(
        Question(loaded(name), dtype=dtype, speed=speed), [find_gpu(gpu) for gpu in gpus],
        lengths or one_length(2048, 500), wanted, prices=prices, max_devices=max_devices, engines=engines,
        allow_beyond_limit=beyond, headroom=headroom, spare_replicas=spare_replicas,
    )  # fmt: skip


def holds(name: str, gpu: str, tp: int, running: int, lengths: Lengths) -> bool:
    answer = estimate(
        loaded(name), context_tokens=lengths.held_tokens, batch_size=running, engine="vllm",
        tensor_parallel_size=tp, devices=Devices(find_gpu(gpu), tp),
    )  # fmt: skip
    return bool(answer["fit"]["free_bytes"] >= 0)


def replica(
    name: str, gpu: str, tp: int, running: int, lengths: Lengths, engine: str = "vllm", *, simulated: bool = False
) -> dict[str, Any]:
    """The estimate, or that of the short form, whose document has times that are printed nowhere."""
    answer: Any = kvcalc.estimate(
        loaded(name), engine=engine,
        tensor_parallel_size=tp, devices=Devices(find_gpu(gpu), tp),
        speed=SpeedQuestion(1, lengths.input_tokens, lengths.output_tokens, running, short_form=not simulated),
    )  # fmt: skip
    return cast("dict[str, Any]", answer)


@pytest.mark.settled
def test_llama_3_70b_for_64_users_at_8k_takes_eight_h100() -> None:
    lengths = one_length(7168, 1024)
    (row,) = ask("llama-3-70b", lengths=lengths, concurrency=64)["plans"]
    assert row["num_devices"] == 8
    # By hand: 141 GB of weights and 64 x 8,192 tokens x 327,680 bytes = 172 GB do not fit in 4 x 80 GB.
    assert not holds("llama-3-70b", "h100", 4, 64, lengths)
    assert row["replicas"] * row["requests_per_replica"] >= 64
    layout = row["tensor_parallel_size"], row["requests_per_replica"]
    answer = replica("llama-3-70b", "h100", *layout, lengths, simulated=True)
    assert answer["fit"]["fits"]
    assert answer["fit"]["free_bytes"] == row["free_bytes"]
    assert answer["throughput"]["serving"]["tpot_seconds"] == pytest.approx(row["tpot_seconds"])
    assert answer["throughput"]["serving"]["ttft_seconds"] == pytest.approx(row["ttft_seconds"])


@pytest.mark.settled
@pytest.mark.long
@pytest.mark.parametrize(("tpot", "ttft"), [(None, None), (0.03, None), (0.02, 0.5)])
@pytest.mark.parametrize("name", ["llama-3.1-8b", "qwen3-32b", "gpt-oss-120b"])
def test_no_smaller_layout_of_one_tensor_size_serves(name: str, tpot: float | None, ttft: float | None) -> None:
    lengths, users = one_length(4096, 500), 100
    found = ask(name, ("h100",), lengths, concurrency=users, max_tpot_seconds=tpot, max_ttft_seconds=ttft)
    (row,) = found["plans"]
    assert row["fits"]
    for metric, limit in (("tpot", tpot), ("ttft", ttft)):
        assert limit is None or row[f"{metric}_judged_seconds"] <= limit
    for tp in (1, 2, 4, 8):
        for replicas in range(1, (row["num_devices"] - 1) // tp + 1):
            answer = replica(name, "h100", tp, -(-users // replicas), lengths, simulated=True)
            if not holds(name, "h100", tp, -(-users // replicas), lengths):
                continue
            serving = answer["throughput"]["serving"]
            # A router at random sends some replicas more clients than others.
            quick = (tpot is None or serving["tpot_high_seconds"] <= 0.95 * tpot) and (
                ttft is None or serving["ttft_high_seconds"] <= 0.95 * ttft
            )
            assert not quick, (tp, replicas, row)


@pytest.mark.parametrize(("rate", "tpot"), [(0.01, 0.05), (3.0, 0.05), (57.5, 0.05), (57.5, 0.012)])
def test_a_rate_is_reached_with_the_fewest_in_flight(rate: float, tpot: float) -> None:
    lengths = one_length(2048, 500)
    (row,) = ask("llama-3.1-8b", rate=rate, max_tpot_seconds=tpot)["plans"]
    assert row["requests_per_second"] == pytest.approx(rate)
    assert row["tpot_high_seconds"] <= tpot
    if row["requests_per_replica"] > 1:
        one_less = replica(
            "llama-3.1-8b", "h100", row["tensor_parallel_size"], row["requests_per_replica"] - 1, lengths
        )
        assert row["replicas"] * one_less["throughput"]["serving"]["requests_per_second"] < rate


@pytest.mark.parametrize("spare", [0, 2])
def test_the_rates_and_the_power_are_those_of_all_replicas_that_the_load_needs(spare: int) -> None:
    (row,) = ask("llama-3.1-8b", rate=60.0, spare_replicas=spare)["plans"]
    answer = replica("llama-3.1-8b", "h100", row["tensor_parallel_size"], row["requests_per_replica"],
                     one_length(2048, 500))  # fmt: skip
    busy = row["replicas"] - spare
    assert busy > 2
    serving, energy = answer["throughput"]["serving"], answer["throughput"]["energy"]
    assert (row["requests_per_second"], row["tokens_per_second"]) == pytest.approx((60, 60 * 500))
    for name in ("tokens_per_second_low", "tokens_per_second_high"):
        assert row[name] / row["tokens_per_second"] == pytest.approx(serving[name] / serving["tokens_per_second"]), name
    assert row["watts"] == pytest.approx(busy * energy["watts"])
    assert row["kwh_per_million_output_tokens"] == pytest.approx(row["watts"] / row["tokens_per_second"] / 3.6)
    assert row["num_devices"] == row["replicas"] * row["tensor_parallel_size"]
    assert row["tokens_per_second_per_device"] == pytest.approx(row["tokens_per_second"] / row["num_devices"])


def test_only_rows_that_are_nearly_full_say_so() -> None:
    kinds = [Platform(find_gpu(gpu), 8, "vllm") for gpu in ("h100", "h200", "l40s")]
    rows: Any = [{"utilization": 0.9}, {"utilization": 0.91}, {"utilization": None}]
    (note,) = _full_notes(kinds, rows)
    assert "h200" in note.text
    assert "h100" not in note.text
    assert "l40s" not in note.text
    assert _full_notes(kinds[:1], rows[:1]) == _full_notes(kinds[2:], rows[2:]) == []


def test_a_file_of_unlike_requests_keeps_room_for_the_longest() -> None:
    even = one_length(2000, 200)
    long = even._replace(longest_tokens=100_000, reached_tokens=100_000)
    (row,) = ask("llama-3.1-8b", ("l40s",), long, concurrency=4)["plans"]
    assert row["fits"]
    assert "--max-model-len 100000" in row["vllm"]
    longer = even._replace(longest_tokens=5_000_000, reached_tokens=5_000_000)
    (refused,) = ask("qwen2.5-7b", ("l40s",), longer, concurrency=4, max_devices=2, beyond=True)["plans"]
    assert "longest" in refused["reason"]


def test_costs() -> None:
    found = ask("llama-3.1-8b", ("h100", "l40s"), prices={"h100-sxm": 2.5, "l40s": 1.0}, concurrency=64)
    for row in found["plans"]:
        assert row["cost_per_hour"] == row["price_per_hour"] * row["num_devices"]
        per_hour = row["tokens_per_second"] * 3600
        assert row["cost_per_million_output_tokens"] == pytest.approx(row["cost_per_hour"] / per_hour * 1e6)
        assert row["cost_per_million_tokens"] == pytest.approx(row["cost_per_million_output_tokens"] * 500 / 2548)
    assert found["ranked_by"] == "cost_per_million_output_tokens"
    assert found["best"] == min(found["plans"], key=lambda row: row["cost_per_million_output_tokens"])


def test_with_targets_the_cheapest_per_hour_is_the_best_and_without_the_cheapest_per_token() -> None:
    """A small device is cheap per hour, and may make a user wait for half a minute at a high price per token."""
    asked: dict[str, Any] = {"prices": {"h200-sxm": 3.5, "l40s": 0.9}, "lengths": one_length(2048, 500)}
    free = ask("llama-3.1-8b", ("l40s", "h200"), concurrency=200, **asked)
    slow, fast = free["plans"]
    assert slow["cost_per_hour"] < fast["cost_per_hour"]
    assert free["best"] == fast
    assert free["gives_up"] is None
    limited = ask("llama-3.1-8b", ("l40s", "h200"), concurrency=200, max_tpot_seconds=5.0, **asked)
    assert (limited["ranked_by"], limited["best"]) == ("cost_per_hour", limited["plans"][0])
    cheap = ask("llama-3.1-8b", ("l40s", "h200"), concurrency=200, **{**asked, "prices": {"h200-sxm": 90, "l40s": 0.9}})
    assert cheap["best"]["gpu"] == "l40s"
    assert cheap["gives_up"].startswith("h200-sxm: TTFT ")
    assert cheap["gives_up"].endswith("times the cost per token")


def test_prices_of_devices_that_are_not_in_the_plan_are_ignored() -> None:
    (row,) = ask("llama-3.1-8b", ("l40s",), prices={"h100-sxm": 2.5, "l40s": 1.0}, concurrency=4)["plans"]
    assert row["cost_per_hour"] == row["num_devices"]


def test_without_all_prices_the_best_has_the_fewest_devices() -> None:
    found = ask("llama-3-70b", ("l40s", "h100"), prices={"l40s": 0.01}, concurrency=1)
    assert found["best"] == min(found["plans"], key=lambda row: row["num_devices"])
    assert found["best"]["gpu"] == "h100-sxm"


def test_every_row_has_every_key_in_order() -> None:
    for row in ask("llama-3.1-405b", ("t4", "b200"), concurrency=4)["plans"]:
        assert tuple(row) == ROW


def test_stages_only_where_tensors_are_not_enough() -> None:
    (row,) = ask("llama-3.1-405b", ("h100",), concurrency=8)["plans"]
    assert (row["tensor_parallel_size"], row["pipeline_parallel_size"]) == (8, 2)
    assert "--pipeline-parallel-size 2" in row["vllm"]


def test_a_link_that_joins_more_is_used_first() -> None:
    (row,) = ask("llama-3.1-405b", ("gb200",), concurrency=512, lengths=one_length(100_000, 1000))["plans"]
    assert row["pipeline_parallel_size"] == 1


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"max_tpot_seconds": 1e-6}, "TPOT"), ({"max_ttft_seconds": 1e-6}, "TTFT"),
        ({"max_devices": 1}, "does not fit"),
        ({"max_devices": 4, "concurrency": 5000}, "the limit is 4"),
    ],
)  # fmt: skip
def test_where_nothing_serves_it_says_what_is_missing(options: dict[str, Any], word: str) -> None:
    found = ask("llama-3-70b", ("h100", "l40s"), **{"concurrency": 8, **options})
    assert found["best"] is None
    assert all(not row["fits"] for row in found["plans"])
    assert word in found["plans"][0]["reason"]
    with pytest.raises(DoesNotFitError, match="1 more without a layout") as refused:
        refuse_empty(found)
    assert refused.value.exit_code == 4
    refuse_empty(ask("gpt2", concurrency=1, lengths=one_length(10, 10)))


def test_what_cannot_be_planned_is_refused() -> None:
    with pytest.raises(ModelError, match=r"for h100-sxm: bert-base is an encoder and does not decode$"):
        ask("bert-base", concurrency=1, engines=("logical",), lengths=one_length(10, 10))
    with pytest.raises(ModelError, match="layout"):
        ask("recurrentgemma-2b", concurrency=1)


def test_requests_that_do_not_run_say_whether_memory_is_the_reason() -> None:
    kind: Any = SimpleNamespace(engine="vllm")
    short, enough = cast(Any, {"free_bytes": -(2**30)}), cast(Any, {"free_bytes": 0})
    assert _why_not(kind, 3, 100, short) == "a request of 100 tokens does not fit: 1.00 GiB more is needed per device"
    assert _why_not(kind, 3, 100, enough) == "vllm does not run 3 requests of 100 tokens at once in this memory"
    assert _why_not(kind, 1, 100, enough) == "vllm does not run a request of 100 tokens at once in this memory"


def test_an_engine_without_a_router_is_said_only_of_several_replicas() -> None:
    load: dict[str, Any] = {"input_tokens": 500, "output_tokens": 50, "requests": 100}
    for rate, is_one in ((2.0, True), (200.0, False)):
        found = kvcalc.plan(
            "llama-3.1-8b", ["h100"], engine="llama.cpp", requests_per_second=rate, max_ttft_seconds=2.0,
            ttft_percentile=90, confidence=50, **load,
        )  # fmt: skip
        assert found["best"] is not None
        assert (found["best"]["replicas"] == 1) is is_one
        assert any(one["code"] == "router" for one in found["warnings"]) is not is_one


@pytest.mark.parametrize(
    ("engine", "key", "several"),
    [("vllm", "vllm", "--nnodes 2"), ("sglang", "sglang", "--nnodes 2"),
     ("tensorrt-llm", "tensorrt_llm", "mpirun -n 16"), ("llama.cpp", "llama_cpp", None)],
)  # fmt: skip
def test_only_a_replica_on_several_machines_has_a_command_for_them(engine: str, key: str, several: str | None) -> None:
    (small,) = ask("llama-3.1-8b", concurrency=4, engines=(engine,))["plans"]
    assert "nnodes" not in small[key]
    assert "mpirun" not in small[key]
    if several is not None:
        (large,) = ask("llama-3.1-405b", concurrency=4, engines=(engine,))["plans"]
        assert large["num_devices"] == 16
        assert several in large[key]


def test_prices() -> None:
    assert parse_price("h100=2.5") == ("h100-sxm", 2.5)
    assert parse_price("l40s=0") == ("l40s", 0.0)
    for wrong in ("h100", "h100=", "h100=-1", "h100=nan", "h100=inf", "=3", "h100=2,5"):
        with pytest.raises((UsageError, GpuError)):
            parse_price(wrong)


def test_requests_beyond_the_models_limit_fit_nowhere_unless_allowed() -> None:
    lengths = one_length(2048, 500)
    found = ask("gpt2", ("h100", "l40s"), lengths, concurrency=4)
    assert found["best"] is None
    assert [row["fits"] for row in found["plans"]] == [False, False]
    with pytest.raises(DoesNotFitError, match="2,548 tokens exceed the limit of gpt2, 1,024 tokens") as refused:
        refuse_empty(found)
    assert "--allow-beyond-limit" in (refused.value.hint or "")
    assert "h100" not in refused.value.message
    allowed = ask("gpt2", ("h100",), lengths, concurrency=4, beyond=True)
    assert allowed["best"]["fits"]
    assert any("limit" in text for text in texts(allowed))
    assert allowed["best"]["vllm"].startswith("VLLM_ALLOW_LONG_MAX_MODEL_LEN=1 vllm serve ")
    for beyond in (False, True):
        exact = ask("gpt2", ("h100",), one_length(1000, 24), concurrency=4, beyond=beyond)
        assert exact["best"]["fits"]
        assert not any("limit" in text for text in texts(exact))


def test_a_target_is_judged_at_the_upper_end_of_the_range() -> None:
    lengths = one_length(2048, 500)
    (row,) = ask("llama-3-70b", lengths=lengths, concurrency=64, max_tpot_seconds=0.028)["plans"]
    (point,) = ask("llama-3-70b", lengths=lengths, concurrency=64, max_tpot_seconds=0.028, confidence=50)["plans"]
    assert row["tpot_low_seconds"] < row["tpot_seconds"] < row["tpot_high_seconds"] <= 0.028
    assert point["tpot_seconds"] <= 0.028 < point["tpot_high_seconds"]
    assert point["num_devices"] < row["num_devices"]


def test_a_target_that_the_range_alone_misses_names_the_confidence_that_meets_it() -> None:
    lengths = one_length(2048, 500)
    times = replica("llama-3-70b", "h100", 8, 1, lengths)["throughput"]["serving"]
    between = (times["tpot_seconds"] + times["tpot_high_seconds"]) / 2
    (row,) = ask("llama-3-70b", ("h100",), lengths, concurrency=1, max_tpot_seconds=between, max_devices=8)["plans"]
    assert not row["fits"]
    assert "of requests alone is" in row["reason"]
    assert "--confidence 50" in row["hint"]
    (never,) = ask("llama-3-70b", ("h100",), lengths, concurrency=1, max_tpot_seconds=1e-6, max_devices=8)["plans"]
    assert never["hint"] is None


@pytest.mark.settled
def test_the_time_to_first_token_is_judged_at_the_upper_end_of_its_range_too() -> None:
    lengths = one_length(2048, 500)
    (free,) = ask("llama-3.1-8b", lengths=lengths, concurrency=1)["plans"]
    assert free["ttft_low_seconds"] < free["ttft_seconds"] < free["ttft_high_seconds"]
    for end, devices in (("ttft_high_seconds", 1), ("ttft_seconds", 2)):
        (row,) = ask("llama-3.1-8b", lengths=lengths, concurrency=1, max_ttft_seconds=1.0001 * free[end])["plans"]
        assert not row["fits"] or row["num_devices"] >= devices
        assert row["fits"] or end == "ttft_seconds"
    (point,) = ask(
        "llama-3.1-8b", lengths=lengths, concurrency=1, max_ttft_seconds=1.02 * free["ttft_seconds"], confidence=50
    )["plans"]  # fmt: skip
    assert point["num_devices"] == free["num_devices"]


def test_several_engines_have_a_row_each_and_their_own_settings() -> None:
    found = plan(
        Question(kvcalc.load_model("llama-3.1-8b"), engine_settings={"block-size": "32", "page-size": "64"}),
        [find_gpu("h100"), find_gpu("l40s")], one_length(2048, 500), Targets(8, None), engines=("vllm", "sglang"),
    )  # fmt: skip
    rows = [(row["model"], row["gpu"], row["engine"]) for row in found["plans"]]
    assert rows == [("llama-3.1-8b", gpu, engine) for gpu in ("h100-sxm", "l40s") for engine in ("vllm", "sglang")]
    assert found["engines"] == ["vllm", "sglang"]
    alone = ask("llama-3.1-8b", ("l40s",), concurrency=8, engines=("sglang",))["plans"][0]
    assert found["plans"][3]["tpot_seconds"] == pytest.approx(alone["tpot_seconds"], rel=1e-6)


def test_an_engine_that_refuses_the_model_has_a_row_with_the_reason() -> None:
    found = ask("bart-large", ("h200",), one_length(500, 100), concurrency=1, engines=("sglang", "logical"))
    sglang, logical = found["plans"]
    assert not sglang["fits"]
    assert "SGLang's layout of bart is not modelled" in sglang["reason"]
    assert logical["fits"]
    with pytest.raises(UsageError, match="vlm"):
        ask("gpt2", concurrency=1, lengths=one_length(10, 10), engines=("vllm", "vlm"))


def test_a_number_of_devices_is_the_most_of_their_kind() -> None:
    lengths, question = one_length(2048, 500), Question(kvcalc.load_model("llama-3-70b"))
    gpus: list[Gpu | Devices] = [*(Devices(find_gpu("h100"), most) for most in (1, 4)), find_gpu("h100")]
    found: Any = plan(question, gpus, lengths, Targets(200, None, max_tpot_seconds=0.05))["plans"]
    assert [row["fits"] for row in found] == [False, False, True]
    assert "the limit is 4" in found[1]["reason"]
    assert found[1]["hint"].startswith("--gpu h100-sxmx")
    many: Any
    (many,) = plan(question, gpus[2:], lengths, Targets(5000, None), max_devices=4)["plans"]
    assert many["hint"].startswith("--max-gpus ")


@pytest.mark.parametrize("asked", ["int4", "nvfp4"])
def test_the_commands_name_what_was_asked_for(asked: str) -> None:
    typed = "meta-llama/Llama-3.1-70B-Instruct"
    (row,) = ask(typed, concurrency=8)["plans"]
    assert row["vllm"].startswith(f"vllm serve {typed} ")
    assert row["sglang"] is None
    (other,) = ask(typed, concurrency=8, engines=("sglang",))["plans"]
    assert f"--model-path {typed} " in other["sglang"]
    found = ask(typed, concurrency=8, dtype=asked)
    assert f"vllm serve '<your {asked} checkpoint>' " in found["plans"][0]["vllm"]
    assert sum(f"--dtype {asked}" in text and typed in text for text in texts(found)) == 1


def test_one_remark_about_several_devices_is_one_line_that_names_them() -> None:
    found = ask("llama-3.1-8b", ("l40s", "a100", "h100", "mi300x", "l4"), concurrency=8)
    checked, unmeasured = texts(found)
    for name in ("l40s", "a100-sxm-80gb", "l4"):
        assert name in checked
    assert "h100" not in checked
    assert unmeasured.endswith("no measurement of devices like mi300x (cdna3): times may be half or twice the estimate")


def test_the_preset_taken_for_a_pasted_name_is_said() -> None:
    found = ask("Qwen/Qwen3-32B-FP8", ("h100",), concurrency=4)
    assert any("is taken as the preset qwen3-32b" in said["text"] for said in found["warnings"])


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0.0423, "42.3 ms"), (0.9996, "1 s"), (116.4, "116 s"), (999.6, "1,000 s"), (2491.0, "2,491 s")],
)
def test_times_in_messages_have_no_exponents(seconds: float, shown: str) -> None:
    assert seconds_text(seconds) == shown


def test_headroom_and_spare_replicas_add_devices_and_the_layout_says_how_busy_it_is() -> None:
    load: dict[str, Any] = {"lengths": one_length(2048, 250), "max_tpot_seconds": 0.06}
    asked: dict[str, Any] = {"prices": {"h100-sxm": 2.0}, **load}
    (plain,) = ask("llama-3.1-8b", ("h100",), rate=30.0, **asked)["plans"]
    found = ask("llama-3.1-8b", ("h100",), rate=30.0, headroom=0.5, spare_replicas=2, **asked)
    (row,) = found["plans"]
    (larger,) = ask("llama-3.1-8b", ("h100",), rate=45.0, **asked)["plans"]
    assert found["targets"]["requests_per_second"] == 30.0
    assert row["replicas"] == larger["replicas"] + 2 == row["num_devices"]
    assert (row["ttft_seconds"], row["utilization"]) == (larger["ttft_seconds"], larger["utilization"])
    assert 0 < plain["utilization"] < 1
    # Spare replicas and headroom are paid for by the tokens of the load.
    paid = row["tokens_per_second"] / 1.5 * 3600
    assert row["cost_per_million_output_tokens"] == pytest.approx(2.0 * row["num_devices"] / paid * 1e6)
    (refused,) = ask("llama-3.1-8b", ("h100",), rate=30.0, spare_replicas=2, max_devices=3, **load)["plans"]
    assert "need" in refused["reason"]


def test_means_keep_no_layout_busier_than_nine_tenths() -> None:
    lengths = one_length(2048, 250)
    (one,) = ask("llama-3.1-8b", ("h100",), lengths, rate=4.0)["plans"]
    rate = 4.0 / one["utilization"]
    for confidence, most in ((50, 0.9), (80, 0.9 * one["tpot_seconds"] / one["tpot_judged_seconds"])):
        for share in (0.5, 0.89, 0.97, 1.79, 1.85, 5.0):
            (row,) = ask("llama-3.1-8b", ("h100",), lengths, rate=share * rate, confidence=confidence)["plans"]
            assert row["utilization"] <= most + 0.02
            # A layout of one device keeps no less: its replicas would be as many devices.
            assert row["num_devices"] <= ceil(share / (most - 0.02))
    # With a limit on the time in the queue, they may be busier.
    found: Any = kvcalc.plan(
        "llama-3.1-8b", ["h100"], input_tokens=2048, output_tokens=250, requests_per_second=0.95 * rate, requests=200,
        max_ttft_seconds=20.0, ttft_percentile=50, max_devices=1, confidence=50,
    )  # fmt: skip
    assert found["best"]["utilization"] == pytest.approx(0.95)
    assert "nearly-full" in {warning["code"] for warning in found["warnings"]}


def test_what_a_trace_and_separate_instances_do_not_take(kvcalc: Any) -> None:
    words = ("plan", "llama-3.1-8b", "--input-tokens", "2k", "--output-tokens", "250", "--gpu", "h100")
    split = ("--requests-per-second", "2", "--disaggregate", "--transfer-bandwidth", "nvlink", "--spare-replicas", "1")
    result = kvcalc(*words, *split)
    assert result.status == 2
    assert "--spare-replicas: separate instances have none" in result.err


def test_several_types_of_weights_are_a_row_each(kvcalc: Any) -> None:
    words = ("plan", "llama-3.3-70b", "--gpu", "h200", "--input-tokens", "2k", "--output-tokens", "500",
             "--requests-per-second", "8", "--max-tpot", "40ms")  # fmt: skip
    both = kvcalc(*words, "--dtype", "bf16,fp8", "--json").json
    each = [kvcalc(*words, "--dtype", dtype, "--json").json["plans"][0] for dtype in ("bf16", "fp8")]
    assert both["plans"] == each
    assert both["best"] == min(each, key=lambda row: row["num_devices"])
    assert each[0]["num_devices"] > each[1]["num_devices"]
    assert both["checkpoint"] == "<your fp8 checkpoint>"
    screen = kvcalc(*words, "--dtype", "bf16,fp8", "--format", "human").out
    assert "weights" in screen.splitlines()[3]
    assert "h200-sxm with fp8, not" in screen
    for option in (("--pareto",), ("--disaggregate", "--transfer-bandwidth", "nvlink")):
        refused = kvcalc(*words, "--dtype", "bf16,fp8", *option)
        assert (refused.status, f"{option[0]}: plans for one type of weights at a time" in refused.err) == (2, True)


def test_the_printed_limit_of_clients_lets_a_replica_run_more_than_the_mean() -> None:
    """A router at random sends some replicas more clients than others, and there is memory for them."""
    load: dict[str, Any] = {"input_tokens": 500, "output_tokens": 250, "concurrency": 200, "max_tpot_seconds": 0.04}
    best: Any = kvcalc.plan("llama-3.1-8b", ["l40s"], **load)["best"]
    assert best["replicas"] > 1
    limit = int(best["vllm"].split("--max-num-seqs ")[1].split()[0])
    assert best["requests_per_replica"] < limit == min(200, best["max_batch_size"])


@pytest.mark.parametrize(
    ("other", "words"),
    [(183.2, "as fast"), (181.3, "as fast"), (178.0, "as fast"), (177.0, "177 tokens per second, not 181")],
)
def test_a_layout_that_lost_with_as_many_devices_says_why(other: float, words: str) -> None:
    """Another way to split the experts must be faster by more than 2 %."""
    assert as_many_devices(other, 181.1) == f"same number of devices, {words}"


@pytest.mark.parametrize(
    ("model", "dtype", "gpu", "devices"),
    [("llama-3.3-70b", "q4_k_m", "rtx-4090", 2), ("qwen3-235b-a22b", "q4_k_m", "rtx-3090", 7),
     ("llama-3.1-8b", "q4_k_m", "rtx-4090", 1), ("qwen3.5-397b-a17b", None, "mi300x", 5)],
)  # fmt: skip
def test_llama_cpp_divides_the_layers_over_as_many_devices_as_it_needs(
    model: str, dtype: str | None, gpu: str, devices: int
) -> None:
    """It has no tensor parallelism, and its stages are any number of devices of a machine."""
    lengths = {"input_tokens": "fixed:4000", "output_tokens": "fixed:128"}
    asked: Any = {**lengths, "concurrency": 4, "engine": "llama.cpp", "dtype": dtype}
    best = kvcalc.plan(model, [gpu], **asked)["best"]
    assert best is not None
    assert (best["tensor_parallel_size"], best["pipeline_parallel_size"], best["num_devices"]) == (1, devices, devices)
    for number in {1, devices - 1} - {0, devices}:
        fits: Any = kvcalc.fit(
            model,
            devices=find_devices(f"{gpu}x{number}"),
            engine="llama.cpp",
            dtype=dtype,
            context_tokens=4128,
            batch_size=4,
        )
        assert not fits["fit"]["fits"]


@pytest.mark.parametrize(
    ("engine", "option"),
    [("vllm", "num-speculative-tokens"), ("sglang", "speculative-num-draft-tokens"), ("llama.cpp", "draft-max")],
)
def test_draft_tokens_without_a_method_are_refused(engine: str, option: str) -> None:
    """No server drafts tokens with this option alone."""
    asked: Any = {"input_tokens": 500, "output_tokens": 100, "concurrency": 4, "engine_settings": {option: "3"}}
    with pytest.raises(UsageError, match=f"--{option}: a server drafts no tokens without a method"):
        kvcalc.plan("llama-3.1-8b", ["h100"], engine=engine, **asked)


def test_an_engine_that_divides_no_model_says_that_it_does_not_fit() -> None:
    """One Mac is a machine of one device, and MLX does not divide a model here."""
    asked: Any = {"input_tokens": 4000, "output_tokens": 128, "concurrency": 1}
    for engine in ("mlx", "llama.cpp"):
        (row,) = kvcalc.plan("llama-3.3-70b", ["m3-max"], engine=engine, **asked)["plans"]
        assert not row["fits"]
        assert "does not fit" in str(row["reason"])


@pytest.mark.long
def test_several_processes_plan_the_same(kvcalc: Any) -> None:
    words = "plan llama-3.1-8b --gpu h100,l40s,a100 --engine vllm,sglang --input-tokens 1k --output-tokens 100".split()
    one, two = (
        kvcalc(*words, "--concurrency", "40", "--max-tpot", "30ms", "--jobs", jobs, "--json") for jobs in ("1", "2")
    )
    assert two.json == one.json
    refused = [
        kvcalc(*words[:2], "--gpu", "h100,l40s", *words[4:], "--concurrency", "4", "--dp", "64", "--jobs", jobs).err
        for jobs in ("1", "2")
    ]
    assert refused[0] == refused[1]
    assert kvcalc(*words, "--concurrency", "4", "--jobs", "0").status == 2


def test_a_price_may_name_a_device_in_any_way() -> None:
    rows = [ask("llama-3.1-8b", ("b200",), concurrency=8, prices={name: 2.0})["plans"] for name in ("b200", "B200-SXM")]
    assert [row["price_per_hour"] for (row,) in rows] == [2.0, 2.0]
    with pytest.raises(kvcalc.KvcalcError, match="b20000"):
        ask("llama-3.1-8b", ("b200",), concurrency=8, prices={"b20000": 2.0})
