"""Users who think, sessions whose context grows, and requests that end at the context of their server."""

from __future__ import annotations

from math import factorial
from random import Random
from typing import Any

import pytest

import kvcalc
from kvcalc.engines.scheduler import Schedule
from kvcalc.errors import UsageError
from kvcalc.question.sessions import Sessions, parse_sessions
from kvcalc.simulation.loads.arrivals import Arrivals
from kvcalc.simulation.loads.requests import Request
from kvcalc.simulation.replicas.mixed import MixedReplica
from kvcalc.simulation.replicas.pool import BlockPool
from kvcalc.simulation.replicas.rules import Rules
from kvcalc.simulation.replicas.times import Line

pytestmark = pytest.mark.settled

MODEL, DEVICE = "llama-3.1-8b", "h100"
STEP = 0.001


class EqualSteps:
    """A step takes as long with any batch, so that each place of a batch is a server of its own."""

    def line(self, batch: int, context: int) -> Line:
        return Line(STEP, 0.0, 2**62)

    def prompts(self, chunks: Any, batch: int) -> float:
        return 0.0 if batch else STEP


def served(users: int, servers: int, think: float, number: int, seed: int = 1) -> list[Request]:
    """Requests with exponential service of one second on average, by users who think for `think` seconds."""
    draw = Random(seed)

    def requests() -> Any:
        for place in range(number):
            request = Request(place, draw.expovariate(1 / think), 1, 1 + round(draw.expovariate(1.0) / STEP))
            yield request

    arrivals = Arrivals(requests(), users)
    rules = Rules(Schedule("test", reserves_answer=True), 2**40, servers)
    MixedReplica(rules, EqualSteps(), BlockPool(None), arrivals).run()
    return arrivals.ended


@pytest.mark.parametrize(("users", "servers", "think"), [(4, 1, 3.0), (12, 3, 2.0), (30, 4, 9.0)])
def test_users_who_think_are_those_of_m_m_c_n(users: int, servers: int, think: float) -> None:
    """Of N users, k are served or wait with a probability that is known (Kleinrock, "Queueing Systems", 3.8)."""
    number = 20_000
    weights = [
        factorial(users) / factorial(users - k) / think**k
        / (factorial(k) if k <= servers else factorial(servers) * servers ** (k - servers))
        for k in range(users + 1)
    ]  # fmt: skip
    busy = sum(weight * min(k, servers) for k, weight in enumerate(weights)) / sum(weights)
    ended = served(users, servers, think, number)[1000:]
    seconds = (ended[-1].finish or 0.0) - (ended[0].finish or 0.0)
    assert len(ended) / seconds == pytest.approx(busy, rel=0.03)
    # Little's law: the users who do not think are those whose request is there.
    stay = sum((request.finish or 0.0) - request.arrival for request in ended) / len(ended)
    assert users == pytest.approx(busy * (stay + think), rel=0.03)


def test_the_rate_of_users_follows_from_what_they_wait_for() -> None:
    found = kvcalc.simulate(MODEL, DEVICE, prompt_tokens=1000, answer_tokens=100, users=200, think_seconds=20.0)
    whole = next(row["mean_seconds"] or 0.0 for row in found["times"] if row["metric"] == "e2e")
    assert found["results"]["requests_per_second"] == pytest.approx(200 / (20 + whole), rel=0.01)
    assert (found["load"]["arrivals"], found["load"]["users"], found["load"]["think_seconds"]) == ("users", 200, 20.0)
    # Users come one by one, so that nothing waits as the clients of a benchmark do.
    burst = kvcalc.simulate(
        MODEL, DEVICE, prompt_tokens=1000, answer_tokens=100, concurrency=200, benchmark=True, requests=400
    )
    assert found["times"][0]["mean_seconds"] < 0.2 * burst["times"][0]["mean_seconds"]  # type: ignore[operator]


SESSIONS: dict[str, Any] = {
    "prompt_tokens": "fixed:2000", "answer_tokens": "fixed:100", "concurrency": 8,
    "sessions": "turns:5,growth:600,think:2s",
}  # fmt: skip


def test_a_turn_finds_the_session_so_far() -> None:
    found = kvcalc.simulate(MODEL, DEVICE, requests=400, **SESSIONS)
    load, results = found["load"], found["results"]
    assert (load["session_turns"], load["session_growth_tokens"], load["think_seconds"]) == (5, 600, 2.0)
    # Turns of 2,000, 2,600, ... 4,400 tokens: about 3,200 on average.
    assert load["mean_prompt_tokens"] == pytest.approx(3200, rel=0.05)
    # The last four of five turns find the turn before and its answer, but for a part of a block.
    expected = sum(2000 + 600 * turn + 100 for turn in range(4)) / 5 * 400
    assert results["cached_tokens"] == pytest.approx(expected, rel=0.06)
    alone = kvcalc.simulate(
        MODEL, DEVICE, requests=400, engine_settings={"no-enable-prefix-caching": True}, engine="vllm", **SESSIONS
    )
    assert alone["results"]["cached_tokens"] == 0
    assert "not-shared" in {note["code"] for note in alone["warnings"]}
    assert alone["times"][0]["mean_seconds"] > 1.5 * found["times"][0]["mean_seconds"]  # type: ignore[operator]


def test_a_small_cache_forgets_sessions() -> None:
    roomy, small = (
        kvcalc.simulate(MODEL, DEVICE, requests=400, kv_memory_bytes=gib << 30, **{**SESSIONS, "concurrency": 24})
        for gib in (40, 6)
    )
    assert small["results"]["cached_tokens"] < 0.9 * roomy["results"]["cached_tokens"]


def test_sessions_at_a_rate_count_turns() -> None:
    found = kvcalc.simulate(MODEL, DEVICE, requests=3000, requests_per_second=4.0, **{**SESSIONS, "concurrency": None})
    assert found["results"]["requests"] == 3000
    assert found["results"]["requests_per_second"] == pytest.approx(4.0, rel=0.1)


@pytest.mark.parametrize("text", ["turns:8", "turns:8,growth:100,wait:2s", "8", "turns:x,growth:1", "turns:0,growth:5"])
def test_other_sessions_are_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_sessions(text, "--sessions")


def test_sessions_are_read() -> None:
    assert parse_sessions("turns:8,growth:1k,think:500ms", "--sessions") == Sessions(8, 1024, 0.5)


def test_users_without_a_time_to_think_are_refused(kvcalc: Any) -> None:
    lengths = "simulate llama-3.1-8b --gpu h100 --input-tokens 100 --output-tokens 10".split()
    found = kvcalc(*lengths, "--users", 5)
    assert (found.status, "--think-time 30s" in found.err) == (2, True)
    twice = kvcalc(*lengths, "--users", 5, "--think-time", "1s", "--sessions", "turns:2,growth:50,think:1s")
    assert (twice.status, "use one" in twice.err) == (2, True)


@pytest.mark.parametrize(
    "load",
    [
        {"requests_per_second": 5.0}, {"requests_per_second": 5.0, "replicas": 2}, {"concurrency": 5}, {"requests": 3},
        {"concurrency": 5, "replicas": 2, "router": "least-loaded"},
        {"concurrency": 5, "prefill_replicas": 1, "transfer": "nvlink"},
    ],
    ids=str,
)  # fmt: skip
def test_a_load_of_which_no_request_fits_ends(load: dict[str, Any]) -> None:
    """A load without an end, too: it crashed, or was drawn from forever."""
    ways: dict[str, Any] = {"requests_per_second": 5.0} if "requests" in load else {}
    with pytest.raises(UsageError, match="no request is as short as the context of 131,072 tokens"):
        kvcalc.simulate(MODEL, DEVICE, prompt_tokens="fixed:200000", answer_tokens="fixed:5", **ways, **load)


def test_a_request_ends_at_the_context_of_its_server() -> None:
    """As in the engines (finish_reason: length). A prompt that leaves no room for an answer is refused."""
    asked: dict[str, Any] = {"requests_per_second": 2.0, "requests": 60, "context_tokens": 1000}
    cut = kvcalc.simulate(MODEL, DEVICE, prompt_tokens="fixed:900", answer_tokens="fixed:300", **asked)
    assert cut["load"]["mean_answer_tokens"] == 100
    (note,) = [note["text"] for note in cut["warnings"] if note["code"] == "cut"]
    assert note.startswith("60 of 60 requests end at the context of 1,000 tokens (finish_reason: length)")
    mixed = kvcalc.simulate(MODEL, DEVICE, prompt_tokens="uniform:500..1500", answer_tokens="fixed:50", **asked)
    assert 0 < mixed["load"]["refused_requests"] < 60 == mixed["load"]["requests"]
    with pytest.raises(UsageError, match="no request is as short"):
        kvcalc.simulate(MODEL, DEVICE, prompt_tokens="fixed:1000", answer_tokens="fixed:50", **asked)
    # By default, the server takes what its model takes.
    long = kvcalc.simulate(
        "llama-3-8b", DEVICE, prompt_tokens="fixed:8000", answer_tokens="fixed:500", concurrency=2, requests=10
    )
    assert long["load"]["mean_answer_tokens"] == 192


def test_the_first_line_says_what_the_users_make(kvcalc: Any) -> None:
    words = ("simulate", MODEL, "--gpu", DEVICE, "--input-tokens", 1000, "--output-tokens", 100)
    found = kvcalc(*words, "--users", 100, "--think-time", "20s", "--json").json
    rate = found["results"]["requests_per_second"]
    # Little's law: the others think.
    in_flight = round(100 - 20 * rate)
    assert in_flight == pytest.approx(rate * found["times"][3]["mean_seconds"], abs=1)
    screen = kvcalc(*words, "--users", 100, "--think-time", "20s", "--format", "human").out.replace("\n", " ")
    assert f"100 users, 20 s between messages = {rate:.3g} requests per second and {in_flight} in flight" in screen


@pytest.mark.parametrize(
    ("beside", "option"), [({"prefix_hit_rate": 0.5}, "--prefix-hit-rate"), ({"prefix_tokens": 64}, "--prefix-tokens")]
)
def test_sessions_say_what_is_found_again(kvcalc: Any, beside: dict[str, float], option: str) -> None:
    """The sessions or the other one was ignored."""
    (value,) = beside.values()
    words = "--gpu h100 --engine vllm --input-tokens 100 --output-tokens 10 --users 9".split()
    for command in ("simulate", "plan"):
        refused = kvcalc(command, MODEL, *words, "--sessions", "turns:2,growth:5,think:1s", option, value)
        assert refused.status == 2
        assert f"{option}: --sessions say what is found again" in refused.err
