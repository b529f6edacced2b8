"""Plans for users who think, and for sessions whose context grows."""

from __future__ import annotations

from typing import Any

import pytest

import kvcalc
from kvcalc.errors import UsageError
from kvcalc.planning.plan.targets import Targets, check_arrivals
from kvcalc.question.request_lengths import one_length
from kvcalc.question.sessions import Sessions

MODEL = "llama-3.1-8b"
ASK: dict[str, Any] = {"input_tokens": 1000, "output_tokens": 200, "engine": "vllm"}
SESSIONS = "turns:4,growth:1500,think:10s"


def best_of(**more: Any) -> Any:
    best = kvcalc.plan(MODEL, ["h100"], **{**ASK, **more})["best"]
    assert best is not None
    return best


def time_of(document: Any, metric: str) -> float:
    return next(float(row["mean_seconds"]) for row in document["times"] if row["metric"] == metric)


def test_users_send_what_littles_law_says() -> None:
    best = best_of(users=300, think_seconds=10.0, max_tpot_seconds=0.03)
    stay = best["ttft_seconds"] + 199 * best["tpot_seconds"]
    assert best["requests_per_second"] == pytest.approx(300 / (10 + stay), rel=0.02)
    alike = best_of(requests_per_second=best["requests_per_second"], max_tpot_seconds=0.03)
    assert best["num_devices"] == alike["num_devices"]
    assert 0 < best["utilization"] < 1


def test_users_who_hardly_think_are_clients() -> None:
    clients, users = (
        best_of(max_tpot_seconds=0.02, **load) for load in ({"concurrency": 64}, {"users": 64, "think_seconds": 0.01})
    )
    assert users["num_devices"] == clients["num_devices"]
    assert users["tpot_seconds"] == pytest.approx(clients["tpot_seconds"], rel=0.03)


@pytest.mark.long
@pytest.mark.parametrize("limit", [{"max_tpot_seconds": 0.03}, {}])
def test_more_users_need_more_devices_and_users_who_think_longer_fewer(limit: dict[str, float]) -> None:
    devices = [best_of(users=users, think_seconds=20.0, **limit)["num_devices"] for users in (100, 1000, 4000)]
    assert devices == sorted(devices)
    assert devices[0] < devices[2]
    assert best_of(users=4000, think_seconds=80.0, **limit)["num_devices"] < devices[2]


@pytest.mark.settled
@pytest.mark.long
def test_a_plan_for_sessions_is_what_their_simulation_needs() -> None:
    best = best_of(users=150, sessions=SESSIONS, max_tpot_seconds=0.03, confidence=50, router="prefix-aware")
    simulated = [
        kvcalc.simulate(
            MODEL, f"h100x{replicas * best['tensor_parallel_size']}",
            prompt_tokens=1000, answer_tokens=200, users=150, sessions=SESSIONS, router="prefix-aware", engine="vllm",
            tensor_parallel_size=best["tensor_parallel_size"], replicas=replicas,
        )
        for replicas in (best["replicas"], best["replicas"] - 1) if replicas
    ]  # fmt: skip
    assert best["tpot_seconds"] == pytest.approx(time_of(simulated[0], "tpot"), rel=0.05)
    assert time_of(simulated[0], "tpot") < 1.03 * 0.03
    assert all(time_of(fewer, "tpot") > 0.97 * 0.03 for fewer in simulated[1:])


@pytest.mark.long
def test_a_random_router_loses_the_turns_of_sessions() -> None:
    asked: dict[str, Any] = {"users": 1500, "sessions": SESSIONS, "max_tpot_seconds": 0.02}
    together, spread = (
        kvcalc.plan(MODEL, ["h100"], router=router, **ASK, **asked) for router in ("prefix-aware", "random")
    )
    assert together["best"] is not None
    assert spread["best"] is not None
    assert (together["best"]["num_devices"] or 0) < (spread["best"]["num_devices"] or 0)
    notes = [[note["text"] for note in found["warnings"] if note["code"] == "spread"] for found in (together, spread)]
    assert notes[0] == []
    assert "--router prefix-aware" in notes[1][0]


def test_the_lengths_of_sessions_are_those_of_all_turns() -> None:
    found = kvcalc.plan(MODEL, ["h100"], users=10, sessions=SESSIONS, **ASK)
    targets, lengths = found["targets"], found["lengths"]
    assert (targets["users"], targets["think_seconds"]) == (10, 10.0)
    assert (targets["session_turns"], targets["session_growth_tokens"]) == (4, 1500)
    # Turns of 1,000, 2,500, 4,000 and 5,500 tokens.
    assert lengths["input_tokens"] == 3250
    assert lengths["longest_tokens"] == one_length(1000, 200).longest_tokens + 4500
    # 5,500 of 13,000 tokens are new.
    assert Sessions(4, 1500).repeated_share(3250) == pytest.approx(1 - 5500 / 13000)
    too_long = kvcalc.plan("llama-3-8b", ["h100"], users=10, sessions="turns:9,growth:1000,think:1s", **ASK)
    assert "requests of 9,200 tokens exceed the limit" in str(too_long["plans"][0]["reason"])


def test_separate_pools_serve_users() -> None:
    asked = {**ASK, "disaggregate": True, "transfer": "infiniband-400g"}
    found = kvcalc.plan("llama-3-70b", ["h100"], users=300, think_seconds=20.0, max_tpot_seconds=0.04, **asked)
    row = found["plans"][1]
    assert row["fits"]
    stay = (row["ttft_seconds"] or 0.0) + 199 * (row["tpot_seconds"] or 0.0)
    assert row["requests_per_second"] == pytest.approx(300 / (20 + stay), rel=0.03)


@pytest.mark.parametrize(
    ("load", "said"),
    [
        ({"users": 5}, "--users needs the time between messages"),
        ({"users": 5, "think_time": 1.0, "concurrency": 5}, "--concurrency and --users cannot be combined"),
        ({"users": 5, "think_time": 1.0, "requests_per_second": 5.0}, "cannot be combined"),
        ({"users": 5, "think_time": 1.0, "sessions": Sessions(2, 5, 1.0)}, "cannot be combined"),
        ({}, "is missing"), ({"users": 5, "sessions": Sessions(2, 5, 1.0)}, None), ({"concurrency": 5}, None),
    ],
)  # fmt: skip
def test_a_plan_has_one_load(load: dict[str, Any], said: str | None) -> None:
    targets = Targets(load.pop("concurrency", None), load.pop("requests_per_second", None), **load)
    if said is None:
        check_arrivals(targets)
        return
    with pytest.raises(UsageError, match=said):
        check_arrivals(targets)


@pytest.mark.settled
def test_the_headline_says_the_rate_of_users(kvcalc: Any) -> None:
    words = ("plan", MODEL, "--gpu", "h100", "--engine", "vllm", "--input-tokens", "1k", "--output-tokens", "200")
    shown = kvcalc(*words, "--users", "100", "--think-time", "30s", "--format", "human")
    assert "100 users, 30 s between messages = 3." in " ".join(shown.out.split())
    assert "requests per second and " in " ".join(shown.out.split())
    more = kvcalc(*words, "--users", "100", "--think-time", "30s", "--headroom", "50%", "--format", "human")
    assert "100 users and 50% more, 30 s between messages = 4." in " ".join(more.out.split())
    running = int(" ".join(more.out.split()).partition(" in flight")[0].rpartition(" ")[2])
    assert 5 <= running <= 12
    sessions = kvcalc(*words, "--users", "100", "--sessions", SESSIONS, "--format", "human")
    text = " ".join(sessions.out.split())
    assert "sessions of 4 turns that grow by 1,500 tokens each, 100 users, 10 s between messages" in text
    twice = kvcalc(*words, "--users", "9", "--sessions", SESSIONS, "--prefix-hit-rate", "0.5")
    assert twice.status == 2


def test_pools_that_are_too_slow_for_one_request_are_shown(kvcalc: Any) -> None:
    words = "plan llama-3-70b --gpu h100 --engine vllm --input-tokens 6k --output-tokens 100 --concurrency 4"
    more = "--max-ttft 150ms@p99 --disaggregate --transfer-bandwidth ethernet-100g --format human"
    shown = kvcalc(*words.split(), *more.split())
    assert "one by one" in shown.out
    assert "internal error" not in shown.err


@pytest.mark.parametrize("kind", ["vllm", "compose", "k8s"])
def test_a_plan_for_users_is_emitted(kvcalc: Any, kind: str) -> None:
    words = f"plan {MODEL} --gpu h100 --engine vllm --input-tokens 1k --output-tokens 200 --users 100 --think-time 30s"
    emitted = kvcalc(*words.split(), "--emit", kind)
    assert emitted.status == 0
    if kind != "vllm":
        assert "Planned for requests of 100 users, 30 s between messages, of 1,024 + 200 tokens" in emitted.out


def test_the_report_of_a_plan_for_users_has_their_number(kvcalc: Any, tmp_path: Any) -> None:
    report = tmp_path / "plan.html"
    words = f"plan {MODEL} --gpu h100 --engine vllm --input-tokens 1k --output-tokens 200 --users 100 --think-time 30s"
    assert kvcalc(*words.split(), "--report", report).status == 0
    page = report.read_text(encoding="utf-8")
    assert "serve 100 users" in page
    assert "100 users, 30 s between messages" in page
