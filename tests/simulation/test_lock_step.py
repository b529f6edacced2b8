"""DP ranks in lock step agree with schedulers that run one step at a time, and with the speed of a step."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

import kvcalc
from kvcalc.engines.scheduler import Balance
from kvcalc.errors import UsageError
from kvcalc.simulation.loads.arrivals import Arrivals
from kvcalc.simulation.loads.requests import Request
from kvcalc.simulation.replicas.lock_step import LockStep, OfRank
from kvcalc.simulation.replicas.mixed import MixedReplica
from kvcalc.simulation.replicas.pool import BlockPool
from kvcalc.simulation.replicas.prefill_first import PrefillFirstReplica
from kvcalc.simulation.replicas.replica import Replica
from kvcalc.simulation.replicas.routing import FewestTokens, LeastLoaded, RoundRobin, Router
from kvcalc.simulation.replicas.rules import Rules
from kvcalc.simulation.replicas.times import Chunk, Line
from kvcalc.throughput import roofline
from tests.simulation.cases import SCHEDULES, PieceTimes
from tests.simulation.reference import Job, Part, Server, serve

ROUTERS: dict[str, type[Router]] = {"vllm": LeastLoaded, "sglang": RoundRobin, "tensorrt-llm": FewestTokens}


class RankTimes(PieceTimes):
    """Every replica waits for the slowest. A token of the others' chunks takes a quarter of the time of its own."""

    def rank_line(self, batch: int, context: int, total: int) -> Line:
        line = self.line(batch, context)
        return line._replace(base=line.base + total / 1024)

    def rank_prompts(self, own: Sequence[Chunk], tokens: int, batch: int, total: int) -> float:
        others = tokens - sum(end - start for start, end in own)
        return self.prompts(own, total) + others * self.per_token / 4

    def of_parts(self, parts: list[Part]) -> float:
        total, found = sum(len(contexts) for contexts, _ in parts), [0.0]
        tokens = sum(end - start for _, chunks in parts for start, end in chunks)
        for contexts, chunks in parts:
            if not contexts and not chunks:
                continue
            seconds = self.rank_prompts(chunks, tokens, len(contexts), total) if tokens else 0.0
            if total:
                summed = sum(contexts) if contexts else 1
                line = self.rank_line(max(len(contexts), 1), summed, total)
                seconds += line.base + line.slope * summed
            found.append(seconds)
        return max(found)


class Routes:
    """The engines' rules for choosing a replica, request by request."""

    def __init__(self, engine: str) -> None:
        self.engine, self.turn = engine, 0

    def __call__(self, arrived: list[Job], servers: Sequence[Server]) -> None:
        if self.engine == "tensorrt-llm":
            self.fewest_tokens(arrived, servers)
            return
        for job in arrived:
            places = [(self.turn + place) % len(servers) for place in range(len(servers))]
            if self.engine == "vllm":
                places.sort(key=lambda place: self.load(servers[place]))
            servers[places[0]].waiting.append(job)
            self.turn += 1
        arrived.clear()

    @staticmethod
    def load(server: Server) -> float:
        usage = server.used(server.running) / server.capacity if server.capacity else 0.0
        waiting = len(server.waiting)
        return len(server.running) + waiting + 6 * waiting * max(0.0, usage - 0.5)

    @staticmethod
    def fewest_tokens(arrived: list[Job], servers: Sequence[Server]) -> None:
        most = servers[0].rules.max_running
        held = [server.running + server.waiting for server in servers]
        taken = arrived[: sum(max(most - len(jobs), 0) for jobs in held)]
        del arrived[: len(taken)]
        mean = -(-(sum(map(len, held)) + len(taken)) // len(servers))
        limit = min(most, max(mean, *map(len, held)))
        for job in sorted(taken, key=lambda job: -job.prompt):
            open_ones = [place for place in range(len(servers)) if len(held[place]) < limit]
            best = min(open_ones, key=lambda place: (sum(j.prompt for j in held[place]), len(held[place])))
            held[best].append(job)
            servers[best].waiting.append(job)


@pytest.mark.parametrize("part", range(4))
def test_many_steps_at_once_give_what_single_steps_give(part: int) -> None:
    waited = balanced = 0
    for seed in range(part * 60, part * 60 + 60):
        draw = Random(seed)
        engine, number = draw.choice(list(ROUTERS)), draw.randrange(2, 5)
        times, page = RankTimes(draw), draw.choice([1, 4])
        drafts = draw.choice([0, 0, 2])
        lengths = [(draw.randrange(1, 50), draw.randrange(1, 40)) for _ in range(draw.randrange(1, 40))]
        capacity = (92 + 2 * drafts) // page + 4 + draw.randrange(60)
        table: Sequence[int] = range(capacity + 40)
        if engine == "sglang":
            capacity, table = capacity * page, range(0, (capacity + 40) * page, page)
        running = draw.randrange(1, 7)
        rules = Rules(
            SCHEDULES[engine], draw.randrange(8, 60) + running * (1 + drafts) + 50 * (engine == "tensorrt-llm"), running
        )
        options = Random(seed + 10**6)
        rules = rules._replace(
            schedule=rules.schedule._replace(
                overlaps=draw.random() < 0.5, receives_every=options.choice([1, 1, 3]),
                mixes=engine != "sglang" or options.random() < 0.4,
            ),
            tokens_per_step=1 + Fraction(draw.randrange(drafts * 4 + 1), 4),
            checked_tokens=1 + drafts, lookahead_tokens=drafts,
        )  # fmt: skip
        if engine == "tensorrt-llm" and options.random() < 0.6:
            balance = Balance(options.randrange(1, 9), options.randrange(4))
            rules = rules._replace(schedule=rules.schedule._replace(balance=balance))
            balanced += 1
        concurrency = draw.randrange(1, 20) if draw.random() < 0.5 else None
        at = [0.0 if concurrency else place * draw.choice([0.0, 0.25, 0.5]) for place in range(len(lengths))]
        at.sort()
        requests = [Request(n, at[n], *pair) for n, pair in enumerate(lengths)]
        jobs = [Job(at[n], *pair, number=n) for n, pair in enumerate(lengths)]
        arrivals = Arrivals(requests, concurrency)
        kind: type[Replica] = PrefillFirstReplica if engine == "sglang" else MixedReplica
        ranks = [kind(rules, times, BlockPool(capacity, page, table), OfRank(arrivals)) for _ in range(number)]
        LockStep(ROUTERS[engine](ranks), times, arrivals).run()

        def units(tokens: int, page: int = page, table: Sequence[int] = table) -> int:
            return table[-(-tokens // page)]

        servers = [Server(rules, capacity, page, units, engine) for _ in range(number)]
        serve(servers, jobs, concurrency, times.of_parts, Routes(engine))
        for request, job in zip(requests, jobs):
            found = request.started, request.first_token, request.finish, request.preemptions
            assert found == (job.started, job.first_token, job.finish, job.preemptions), f"case {seed}"
            waited += request.started != request.arrival
        for rank, server in zip(ranks, servers):
            assert (rank.pool.used, rank.pool.most_used) == (0, server.most_used)
    assert waited > 100
    assert balanced > 5


def test_a_step_takes_as_long_as_that_of_the_replica_with_most_work() -> None:
    """If all replicas have the same work, it is the step of `estimate`."""
    from kvcalc.question.question import Question
    from kvcalc.server.case import make_case
    from kvcalc.server.speed import Speed, speed_of
    from kvcalc.simulation.replicas.times import ModelTimes

    case = make_case(
        Question(
            kvcalc.load_model("deepseek-v3"), engine="vllm", data_parallel_size=8, devices=kvcalc.find_devices("h200x8")
        )
    )
    speed = speed_of(case, [])
    assert isinstance(speed, Speed)
    times, model = ModelTimes(speed.model), speed.model
    line = times.rank_line(4, 4 * 2048, 32)
    assert line.base + line.slope * 4 * 2048 == pytest.approx(model.decode(32, 2048).seconds)
    assert times.rank_line(8, 8 * 2048, 32).base > line.base
    # Eight prompts, one on each replica, take what they take if they are spread; one alone stops all replicas.
    chunk = (0, 1000)
    spread = model.prefill(1000, 8).seconds
    assert times.rank_prompts([chunk], 8 * 1000, 0, 0) == pytest.approx(spread)
    beside = times.rank_prompts([chunk], 8 * 1000, 4, 32)
    assert beside == pytest.approx(model.beside([roofline.Part(0, 1000, 1 / 8, 8)], 32).seconds)
    # The weights are read anyway, so prompts add less to a step that decodes than they take alone.
    assert beside < spread
    assert beside / 8 < times.rank_prompts([chunk], 1000, 4, 32) < beside


@pytest.mark.parametrize(
    ("used", "capacity", "busier"), [(50, 100, 2), (60, 100, 2), (75, 100, 3), (100, 100, 5), (0, None, 2)]
)
def test_waiting_requests_count_more_if_more_than_half_of_the_cache_is_used(
    used: int, capacity: int | None, busier: int
) -> None:
    """Up to four times: 1 + 6 x (usage - 0.5). One request waits on the second rank, and `busier` run on the first."""
    for running, gets_it in ((busier - 1, 0), (busier, 1)):
        ranks: Any = [
            SimpleNamespace(waiting=[], running=[1] * running, pool=SimpleNamespace(used=0, capacity=100)),
            SimpleNamespace(waiting=[1], running=[], pool=SimpleNamespace(used=used, capacity=capacity)),
        ]
        router = LeastLoaded(ranks)
        router.queue.append(Request(0, 0.0, 10, 1))
        router.route()
        assert [len(rank.waiting) for rank in ranks] == [1 - gets_it, 1 + gets_it]


def test_copies_of_a_model_without_experts_are_replicas() -> None:
    with pytest.raises(UsageError, match="are replicas"):
        kvcalc.simulate(
            "llama-3.1-8b", "h100x2", data_parallel_size=2, concurrency=4, prompt_tokens="fixed:100", answer_tokens=10
        )


def test_prompts_that_wait_for_each_other_let_answers_go_on() -> None:
    """InferenceX's DeepSeek-R1 with 8,192 tokens under TensorRT-LLM's enable_balance: tokens come twice as often."""
    load: dict[str, Any] = {
        "engine": "tensorrt-llm", "dtype": "fp8", "data_parallel_size": 8,
        "concurrency": 64, "prompt_tokens": 8192, "answer_tokens": 256, "requests": 192,
    }  # fmt: skip
    times = []
    for settings in ({}, {"enable-balance": "", "timeout-iters": "60", "batching-wait-iters": "0"}):
        document = kvcalc.simulate("deepseek-r1", "b200x8", engine_settings=settings, **load)
        times.append({row["metric"]: row["mean_seconds"] or 0.0 for row in document["times"]})
    alone, together = times
    assert together["tpot"] < 0.6 * alone["tpot"]
    assert together["ttft"] > 1.5 * alone["ttft"]
