"""Small random cases for the simulation and its reference, with step times that floats add exactly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from random import Random
from typing import NamedTuple

from kvcalc import load_model
from kvcalc.engines import load_engine
from kvcalc.engines.scheduler import Schedule
from kvcalc.simulation.loads.arrivals import Arrivals
from kvcalc.simulation.loads.requests import Request
from kvcalc.simulation.replicas.mixed import MixedReplica, SlotsReplica
from kvcalc.simulation.replicas.pool import BlockPool
from kvcalc.simulation.replicas.prefill_first import PrefillFirstReplica
from kvcalc.simulation.replicas.prefix_cache import PrefixCache
from kvcalc.simulation.replicas.replica import Replica
from kvcalc.simulation.replicas.rules import Rules
from kvcalc.simulation.replicas.times import Chunk, Line
from tests.simulation.reference import Job, Server, one_by_one, serve


def schedule_of(engine: str) -> Schedule:
    """An engine's own schedule of a model without windows or states."""
    found = load_engine(engine, load_model("llama-3-8b")).schedule()
    assert found is not None
    return found


SCHEDULES = {name: schedule_of(name) for name in ("vllm", "sglang", "tensorrt-llm")} | {
    "slots": schedule_of("llama.cpp")
}


class PieceTimes:
    """Straight pieces of the mean context, each steeper or flatter than the one before, with exact binary fractions."""

    def __init__(self, draw: Random) -> None:
        self.base = draw.randrange(1, 64) / 64
        self.per_request = draw.randrange(8) / 256
        self.slopes = [draw.randrange(4) / 4096 for _ in range(3)]
        self.ends = [draw.randrange(2, 20), draw.randrange(20, 60), 2**40]
        self.per_token = draw.randrange(1, 8) / 512
        self.alone = draw.randrange(64) / 64

    def line(self, batch: int, context: int) -> Line:
        slope, end = next((s, e) for s, e in zip(self.slopes, self.ends) if context <= e * batch)
        return Line(self.base + self.per_request * batch, slope, end * batch)

    def prompts(self, chunks: Sequence[Chunk], batch: int) -> float:
        work = sum((end - start) * self.per_token + (end * end - start * start) / 65536 for start, end in chunks)
        return work if batch else work + self.alone

    def step(self, parts: list[tuple[list[int], list[tuple[int, int]]]]) -> float:
        """One step, as the reference asks for it."""
        ((contexts, chunks),) = parts
        found = self.prompts(chunks, len(contexts)) if chunks else 0.0
        if contexts:
            line = self.line(len(contexts), sum(contexts))
            found += line.base + line.slope * sum(contexts)
        return found


class Case(NamedTuple):
    """A case, once for the simulation and once for the reference."""

    replica: Replica
    requests: list[Request]
    server: Server
    jobs: list[Job]
    run_reference: Callable[[], None]


def table_of(draw: Random, page: int, longest: int, kind: str) -> tuple[Sequence[int], str]:
    """Blocks by the number of blocks of tokens: even, with a window that stops growing, or of groups that differ.

    A group has a block for three blocks of tokens, and another one, which half of the cases have, for each.
    """
    numbers = -(-longest // page) + 3
    if kind == "tokens":
        return range(0, (numbers + 1) * page, page), kind
    shape = draw.choice(["even", "even", "window", "groups"])
    if shape == "even":
        each = draw.randrange(1, 4)
        return range(0, (numbers + 1) * each, each), shape
    if shape == "window":
        most = draw.randrange(2, 6)
        return [0, *(n + 2 * min(n, most) + 1 for n in range(1, numbers + 1))], shape
    return [0, *(numbers % 2 * n + -(-n // 3) for n in range(1, numbers + 1))], shape


def make_case(seed: int) -> Case:
    """A case of one of the schedulers."""
    draw = Random(seed)
    engine = draw.choice(["vllm", "sglang", "tensorrt-llm", "slots"])
    times = PieceTimes(draw)
    longest_prompt, longest_answer = draw.choice([(20, 12), (60, 30), (8, 80), (90, 3)])
    number = draw.randrange(1, 25)
    lengths = [(draw.randrange(1, longest_prompt + 1), draw.randrange(1, longest_answer + 1)) for _ in range(number)]
    drafts, drafted = Random(-seed - 1), Fraction(1)  # so that the other draws are those without drafts
    num_drafts = drafts.choice([0, 0, 1, 3])
    if num_drafts:
        drafted = 1 + Fraction(drafts.randrange(num_drafts * 8 + 1), 8)
    longest = longest_prompt + longest_answer + 2 * num_drafts
    page = draw.choice([1, 2, 4, 16]) if engine != "sglang" else draw.choice([1, 1, 4])
    max_running = draw.randrange(1, 9)
    table, _ = table_of(draw, page, longest, "tokens" if engine == "sglang" else "blocks")
    least = table[-(-longest // page)] + (page + 1 if engine == "sglang" else 0)
    capacity: int | None = least + draw.randrange(1 + draw.choice([1, 4]) * least // 2)
    if engine == "slots" or (engine != "sglang" and draw.random() < 0.1):
        capacity = None
    step_tokens = draw.randrange(max_running, max_running + 40) + max_running * num_drafts
    if engine == "sglang":
        step_tokens = draw.randrange(page, 60)
    schedule = SCHEDULES[engine]._replace(overlaps=draw.random() < 0.5 and engine != "slots")
    if engine == "slots":
        schedule = schedule._replace(step_tokens=step_tokens, part_ends=drafts.choice([(), (12, 4)]))
    options = Random(seed + 10**6)
    if engine == "sglang" and schedule.new_tokens is not None:
        first = options.choice([0.7, 0.7, 0.3, 1.0])
        schedule = schedule._replace(
            mixes=options.random() < 0.4, enough_tokens=options.choice([None, None, options.randrange(1, 40)]),
            new_tokens=schedule.new_tokens._replace(first=first, least=first * 0.14, steps=options.choice([600, 8])),
        )  # fmt: skip
    schedule = schedule._replace(receives_every=options.choice([1, 1, 2, 7]))
    rules = Rules(
        schedule, step_tokens, max_running, tokens_per_step=drafted, checked_tokens=1 + num_drafts,
        lookahead_tokens=num_drafts,
    )  # fmt: skip
    concurrency = draw.randrange(1, 12) if draw.random() < 0.4 else None
    rate = draw.choice([0.05, 0.5, 5])
    now, arrivals = 0.0, []
    for _ in lengths:
        now += 0.0 if draw.random() < 0.2 else round(draw.expovariate(rate) * 1024) / 1024
        arrivals.append(0.0 if concurrency else now)
    hits = draw.random() < 0.3
    cached = [draw.randrange(prompt) if hits else 0 for prompt, _ in lengths]
    requests = [Request(n, at, *pair, kept) for n, (at, pair, kept) in enumerate(zip(arrivals, lengths, cached))]
    jobs = [Job(at, *pair, kept, n) for n, (at, pair, kept) in enumerate(zip(arrivals, lengths, cached))]
    # In layers with windows, vLLM holds more blocks while it computes a prompt.
    more = drafts.choice([0, 0, 0, 2]) if engine == "vllm" and capacity is not None and not hits else 0
    prompt_table = [units + min(more * number, 7) for number, units in enumerate(table)] if more else None
    if prompt_table is not None and capacity is not None:
        capacity += 7
    pool = BlockPool(capacity, page, table, prompt_table) if capacity is not None else BlockPool(None)
    kinds: dict[str, type[Replica]] = {"sglang": PrefillFirstReplica, "slots": SlotsReplica}
    kind = kinds.get(engine, MixedReplica)
    # A preempted request of vLLM finds its own blocks again, if no tokens are said to be found anyway.
    keeps = engine == "vllm" and capacity is not None and table == range(len(table)) and not hits and not more
    prefixes = PrefixCache(pool, page, 1, finds_own=True) if keeps else None
    replica = kind(rules, times, pool, Arrivals(requests, concurrency), prefixes)

    def units(tokens: int) -> int:
        return 0 if capacity is None else table[-(-tokens // page)]

    def prompt_units(tokens: int) -> int:
        return 0 if prompt_table is None else prompt_table[-(-tokens // page)]

    server = Server(rules, capacity, page, units, engine, keeps, prompt_units if more else None)
    return Case(replica, requests, server, jobs, lambda: serve([server], jobs, concurrency, times.step, one_by_one))
