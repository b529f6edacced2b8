"""What must hold in every simulation: nothing is lost, no figure contradicts another, and faster memory never slows.

Loads are random. `pytest -m fuzz --cases 1000000 --fuzz-seed 7` is a long run.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from random import Random
from typing import Any

import pytest

import kvcalc
from kvcalc.errors import KvcalcError

pytestmark = pytest.mark.fuzz

MODELS = (
    "llama-3-8b", "qwen3-30b-a3b", "mistral-7b-v0.1", "gpt-oss-120b", "gemma-3-27b", "deepseek-v2", "qwen3-8b",
    "llama-3-70b",
)  # fmt: skip
GPUS = ("h100x2", "h200x4", "a100-80gbx4", "l40sx8", "mi300x", "b200")
ENGINES = ("vllm", "sglang", "tensorrt-llm", "llama.cpp")
CASES_PER_LOAD = 300
TIMES = ("p50_seconds", "p90_seconds", "p95_seconds", "p99_seconds", "max_seconds")


class Load:
    """A random load: lengths that are fixed or not, and clients or arrivals."""

    def __init__(self, random: Random) -> None:
        self.model, self.gpu = random.choice(MODELS), random.choice(GPUS)
        self.prompt, self.answer = random.choice([1, 17, 200, 1500, 6000]), random.choice([1, 2, 30, 200, 700])
        self.varies = random.random() < 0.5 and min(self.prompt, self.answer) > 10
        self.clients = random.choice([1, 3, 16, 100]) if random.random() < 0.5 else None
        self.number = random.choice([1, 7, 40, 150])
        lengths = [f"uniform:{n // 2}..{2 * n}" if self.varies else n for n in (self.prompt, self.answer)]
        self.asked: dict[str, Any] = {
            "engine": random.choice(ENGINES), "prompt_tokens": lengths[0], "answer_tokens": lengths[1],
            "requests": self.number, "seed": random.randrange(99),
        }  # fmt: skip
        if self.clients is not None:
            self.asked["concurrency"] = self.clients
        else:
            self.asked["requests_per_second"] = random.choice([0.3, 3.0, 30.0])
            if random.random() < 0.4:
                self.asked["burstiness"] = random.choice([0.25, 4.0])
        if random.random() < 0.3:
            self.asked["kv_memory_bytes"] = random.choice([1, 2, 4]) << 30

    def simulate(self, bandwidth: int | None = None, **changed: Any) -> dict[str, Any] | None:
        """The document, or None if the load is refused."""
        devices = kvcalc.find_devices(self.gpu)
        if bandwidth is not None:
            devices = devices._replace(gpu=devices.gpu._replace(bandwidth_bytes_per_second=bandwidth))
        try:
            return kvcalc.simulate(self.model, devices, **{"benchmark": True, **self.asked, **changed})  # type: ignore[return-value]
        except KvcalcError:
            return None

    def __str__(self) -> str:
        return f"{self.model} {self.gpu} {self.asked}"


def contradictions(load: Load, found: dict[str, Any]) -> Iterator[str]:
    """What cannot be true of one document."""
    results, asked = found["results"], found["load"]
    times = {row["metric"]: row for row in found["times"]}
    number, seconds = results["requests"], results["duration_seconds"]
    if number + asked["refused_requests"] != load.number:
        yield f"{number} requests and {asked['refused_requests']} refused ones of {load.number}"
    tokens = asked["mean_answer_tokens"]
    if (
        not asked["refused_requests"]
        and abs(results["tokens_per_second"] * seconds - tokens * number) > 1e-6 * tokens * number
    ):
        yield f"{results['tokens_per_second']} tokens per second for {seconds} s, of {number} answers of {tokens}"
    for row in found["times"]:
        values = [row[name] for name in TIMES]
        if None in values:
            continue
        if any(one > other + 1e-12 for one, other in pairwise(values)) or values[0] < 0:
            yield f"percentiles out of order: {row}"
        if not 0 <= row["mean_seconds"] <= row["max_seconds"]:
            yield f"mean {row['mean_seconds']} of {row['metric']}, maximum {row['max_seconds']}"
    for name in ("mean_seconds", "p50_seconds", "max_seconds"):
        if times["e2e"][name] < times["ttft"][name] - 1e-9 or times["ttft"][name] < times["queue"][name] - 1e-9:
            yield f"{name}: {[times[metric][name] for metric in ('e2e', 'ttft', 'queue')]}"
    if results["most_used_blocks"] is not None and results["most_used_blocks"] > found["engine"]["blocks"]:
        yield f"{results['most_used_blocks']} of {found['engine']['blocks']} blocks are used"
    if not 0 <= results["busy_share"] <= 1 + 1e-9:
        yield f"busy_share {results['busy_share']}"
    inside = results["mean_running_requests"] + results["mean_waiting_requests"]
    if load.clients is not None and inside > load.clients + 1e-6:
        yield f"{inside} requests in the system of {load.clients} clients"
    if not results["preemptions"]:
        # Little's law. The host's seconds between a client and the engine are time of a request outside the system.
        outside = times["e2e"]["mean_seconds"] - inside * seconds / number
        most = times["ttft"]["mean_seconds"] - times["queue"]["mean_seconds"]
        if not -1e-6 - 1e-3 * times["e2e"]["mean_seconds"] <= outside <= most + 1e-6:
            yield f"{outside} s of a request are neither in the queue nor running, of {most} without the queue"


def loads(pytestconfig: pytest.Config, name: str) -> list[tuple[Load, dict[str, Any]]]:
    """Random loads that are simulated, and their documents."""
    random, found = Random(f"{name} {pytestconfig.getoption('--fuzz-seed')}"), list[tuple[Load, dict[str, Any]]]()
    while len(found) < max(3, pytestconfig.getoption("--cases") // CASES_PER_LOAD):
        load = Load(random)
        document = load.simulate()
        if document is not None:
            found.append((load, document))
    return found


def test_nothing_is_lost_and_no_figure_contradicts_another(pytestconfig: pytest.Config) -> None:
    wrong = [f"{load}: {text}" for load, found in loads(pytestconfig, "parts") for text in contradictions(load, found)]
    assert not wrong, "\n".join(wrong[:10])


def test_the_same_load_has_the_same_answer_and_slower_steps_take_longer(pytestconfig: pytest.Config) -> None:
    for load, found in loads(pytestconfig, "again"):
        assert load.simulate() == found, load
        slower = load.simulate(step_factor=2.0)
        if slower is not None and load.clients is not None:
            one, other = (each["results"]["duration_seconds"] for each in (found, slower))
            assert other >= one - 1e-9, f"{load}: {one} s, {other} s with steps twice as long"


def test_a_faster_memory_does_not_slow_a_load(pytestconfig: pytest.Config) -> None:
    """Another order of the requests may cost a fraction of a step."""
    for load, _ in loads(pytestconfig, "bandwidth"):
        slow, fast = load.simulate(10**12), load.simulate(2 * 10**12)
        if slow is None or fast is None:
            continue
        one, other = (each["results"]["duration_seconds"] for each in (slow, fast))
        assert other <= one * 1.001, f"{load}: {one} s, {other} s with twice the bandwidth"
        tpots = [next(row["mean_seconds"] for row in each["times"] if row["metric"] == "tpot") for each in (slow, fast)]
        if None not in tpots:
            assert tpots[1] <= tpots[0] * 1.02, f"{load}: TPOT {tpots}"
