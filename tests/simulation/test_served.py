"""The load of an estimate is answered by the simulation, however it is asked for."""

from __future__ import annotations

import json
from random import Random
from statistics import mean, pstdev
from typing import Any

import pytest

import kvcalc
from kvcalc.errors import UsageError
from kvcalc.model.memo import forget
from kvcalc.question.lengths import parse_distribution
from kvcalc.simulation import served as served_module

MODEL = "llama-3.1-8b"
EQUAL, UNEQUAL = ("fixed:1000", "fixed:200"), ("uniform:100..3000", "lognormal:300,1")
MIXED = {"enable-mixed-chunk": True}


def served(engine: str, lengths: tuple[Any, Any], clients: int | None, settings: Any = None, **more: Any) -> Any:
    asked = kvcalc.SpeedQuestion(input_tokens=lengths[0], output_tokens=lengths[1], concurrency=clients, **more)
    found = kvcalc.estimate(
        MODEL, devices=kvcalc.find_devices("h100"), engine=engine, engine_settings=settings, speed=asked
    )
    assert found["throughput"] is not None
    return found["throughput"]["serving"]


@pytest.mark.parametrize(
    ("engine", "settings"),
    [("vllm", {}), ("sglang", {}), ("sglang", MIXED), ("tensorrt-llm", {}), ("llama.cpp", {"parallel": 24})],
)
@pytest.mark.parametrize("lengths", [EQUAL, UNEQUAL])
def test_an_estimate_is_the_simulation(engine: str, settings: Any, lengths: tuple[str, str]) -> None:
    found = served(engine, lengths, 24, settings, benchmark=True)
    simulated = kvcalc.simulate(
        MODEL, "h100", engine=engine, engine_settings=settings, prompt_tokens=lengths[0], answer_tokens=lengths[1],
        concurrency=24, benchmark=True,
    )  # fmt: skip
    times = {row["metric"]: row["mean_seconds"] for row in simulated["times"]}
    assert found["is_benchmark"]
    assert found["ttft_seconds"] == pytest.approx(times["ttft"], rel=1e-9)
    assert found["tpot_seconds"] == pytest.approx(times["tpot"], rel=1e-9)
    assert found["requests_per_second"] == pytest.approx(simulated["results"]["requests_per_second"], rel=1e-9)
    assert (found["input_lengths"], found["output_lengths"]) == lengths


@pytest.mark.settled
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_without_a_benchmark_it_is_that_of_the_steady_state(engine: str) -> None:
    found = served(engine, (2000, 200), 48)
    long = kvcalc.simulate(MODEL, "h100", engine=engine, prompt_tokens=2000, answer_tokens=200, concurrency=48, seed=9)
    times = {row["metric"]: row["mean_seconds"] for row in long["times"]}
    assert not found["is_benchmark"]
    assert found["ttft_seconds"] == pytest.approx(times["ttft"], rel=0.05)
    assert found["tpot_seconds"] == pytest.approx(times["tpot"], rel=0.03)
    assert served(engine, (2000, 200), 48, benchmark=True)["ttft_seconds"] > 1.3 * found["ttft_seconds"]


def test_equal_loads_are_simulated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their notes are those of each answer, and what changes a time is another load."""
    loads, outcome_of = [], served_module.outcome_of

    def counted(*load: Any) -> Any:
        loads.append(load)
        return outcome_of(*load)

    monkeypatch.setattr(served_module, "outcome_of", counted)
    forget()
    model, devices = kvcalc.load_model(MODEL), kvcalc.find_devices("h100")
    loaded = kvcalc.SpeedQuestion(input_tokens=200_000, output_tokens=200, concurrency=4)

    def ask(**more: Any) -> Any:
        return kvcalc.estimate(model, devices=devices, engine="vllm", speed=loaded._replace(**more))

    first, again, other = ask(), ask(confidence=90), ask(concurrency=3)
    assert len(loads) == 2
    assert first["throughput"]["serving"]["tpot_seconds"] == again["throughput"]["serving"]["tpot_seconds"]
    assert first["throughput"]["serving"]["tpot_seconds"] != other["throughput"]["serving"]["tpot_seconds"]
    assert (
        [note for note in first["warnings"] if note["part"] == "load"]
        == [note for note in again["warnings"] if note["part"] == "load"]
        != []
    )


def test_equal_lengths_move_in_step_and_a_number_is_a_mean() -> None:
    """With SGLang, all requests of equal lengths wait for all prompts again, which those that vary do not."""
    equal, varying = served("sglang", EQUAL, 64), served("sglang", (1000, 200), 64)
    assert (varying["input_lengths"], equal["input_lengths"]) == ("1000", "fixed:1000")
    assert equal["ttft_seconds"] > 2 * varying["ttft_seconds"]


@pytest.mark.parametrize("lengths", [(4000, 100), (500, 500)])
def test_prompts_take_the_share_of_the_time_per_token_that_they_take_of_about_equal_lengths(
    lengths: tuple[int, int],
) -> None:
    """A number is the mean of lengths that vary by about a third."""
    prompt, answer = (f"uniform:{tokens * 7 // 10}..{tokens * 13 // 10}" for tokens in lengths)
    drawn, closed = (served("vllm", asked, 32)["prefill_share"] for asked in ((prompt, answer), lengths))
    assert 0 < drawn < 1
    assert drawn == pytest.approx(closed, abs=0.05)


def test_a_number_beside_a_distribution_is_a_mean_too() -> None:
    found = served("vllm", (1000, "fixed:200"), 8)
    assert (found["input_lengths"], found["output_lengths"]) == ("1000", "fixed:200")
    assert found["longest_tokens"] == 1000 + 1030 + 200


def test_the_context_is_that_of_the_longest_request_and_the_lengths_are_means() -> None:
    asked = kvcalc.SpeedQuestion(input_tokens="uniform:100..3000", output_tokens="fixed:200", concurrency=16)
    found = kvcalc.estimate(MODEL, devices=kvcalc.find_devices("h100"), engine="vllm", speed=asked)
    assert 3000 < found["workload"]["context_tokens"] <= 3200
    assert (found["workload"]["input_tokens"], found["workload"]["output_tokens"]) == (1550, 200)


def test_without_a_number_of_clients_as_many_run_as_fit() -> None:
    found = served("vllm", ("fixed:30000", "fixed:100"), None)
    assert found["concurrency"] == served("vllm", (30_000, 100), None)["concurrency"]


def test_an_engine_whose_scheduler_is_not_known_runs_requests_beside_each_other() -> None:
    asked = kvcalc.SpeedQuestion(input_tokens="fixed:1000", output_tokens="fixed:200", concurrency=4)
    found = kvcalc.estimate(MODEL, devices=kvcalc.find_devices("h100"), engine="transformers", speed=asked)
    assert found["throughput"] is not None
    assert found["throughput"]["serving"] is not None
    assert found["throughput"]["serving"]["running_requests"] == 4


def test_all_ways_of_asking_give_the_same_answer(kvcalc: Any, tmp_path: Any) -> None:
    fields = {"model": MODEL, "gpu": "h100", "engine": "vllm", "concurrency": 8}
    lengths = {"input_tokens": "fixed:1000", "output_tokens": "fixed:200"}
    file = tmp_path / "lines.jsonl"
    file.write_text(json.dumps({**fields, **lengths}) + "\n", encoding="utf-8")
    options = "--gpu h100 --engine vllm --concurrency 8 --input-tokens fixed:1000 --output-tokens fixed:200 --json"
    typed = kvcalc("estimate", MODEL, *options.split())
    assert json.loads(kvcalc("batch", str(file)).out)["throughput"] == json.loads(typed.out)["throughput"]
    screen = kvcalc("estimate", MODEL, *options.split()[:-1]).out
    assert "8 requests of 1,000 + 200 tokens" in " ".join(screen.split())


def test_a_plan_is_made_for_drawn_requests(kvcalc: Any) -> None:
    options = (
        "--gpu h100 --requests-per-second 4 --max-ttft 2s@p90 --input-tokens uniform:500..4000 --output-tokens 200"
    )
    found = kvcalc("plan", MODEL, *options.split(), "--requests", "300", "--json").json
    assert found["lengths"]["num_requests"] == 1000
    assert found["lengths"]["file"] == "uniform:500..4000 + 200"
    assert 3900 < found["lengths"]["longest_tokens"] <= 4000 + 405


@pytest.mark.parametrize("text", ["fixd:10", "fixed:", "uniform:5", "fixed:0", "lognormal:10"])
def test_other_texts_are_refused_everywhere(kvcalc: Any, text: str) -> None:
    found = kvcalc("estimate", MODEL, "--gpu", "h100", "--input-tokens", text, "--output-tokens", "5")
    assert (found.status, found.out) == (2, "")
    with pytest.raises(UsageError):
        served("vllm", (text, 5), 4)


def test_check_takes_a_number(kvcalc: Any) -> None:
    found = kvcalc(
        "check", "vllm", "serve", "meta-llama/Llama-3.1-8B-Instruct", "--gpu", "h100", "--input-tokens", "fixed:10",
        "--output-tokens", "5",
    )  # fmt: skip
    assert found.status == 2
    assert "fixed:10" in found.err


def test_a_fixed_length_is_that_number() -> None:
    found, plain = parse_distribution("fixed:2k", "tokens"), parse_distribution("2048", "tokens")
    assert (found.mean_tokens, found.longest_tokens, found.shortest_tokens) == (2048, 2048, 2048)
    assert (plain.mean_tokens, plain.longest_tokens, plain.shortest_tokens) == (2048, 4157, 1)
    assert (found.text, plain.text) == ("fixed:2k", "2048")


def test_a_number_is_the_mean_of_lengths_that_vary_by_a_third() -> None:
    random, lengths = Random(1), parse_distribution("900", "tokens")
    drawn = [lengths.draw(random) for _ in range(20_000)]
    assert mean(drawn) == pytest.approx(900, rel=0.01)
    assert pstdev(drawn) == pytest.approx(300, rel=0.02)
    assert max(drawn) == lengths.longest_tokens
    # No answer has less than one token, so those of one on average have one.
    assert {parse_distribution("1", "tokens").draw(random) for _ in range(100)} == {1}
