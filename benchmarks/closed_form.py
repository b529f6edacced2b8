"""Compare the closed form of `kvcalc estimate` with `kvcalc simulate`, in closed loops of many kinds.

    python benchmarks/closed_form.py [--spread S] [--every N] [--random N] [--seed S] [--detail]

The loads are those of a grid, or with `--random N`, N loads drawn at random, which no rule was made for. Lengths vary
by S around their means (0.3: 0.7 to 1.3 times). Every cell is the median of simulated / closed form, and the share of
loads that differ by more than 10 %: the mean TTFT of 15 requests per client, of a steady load, the mean TPOT and the
requests per second. A cache is full if some requests wait for memory. `--detail` prints every load.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Sequence
from random import Random
from typing import Any, NamedTuple

import kvcalc
from kvcalc.errors import KvcalcError

ENGINES = ("vllm", "sglang", "tensorrt-llm", "llama.cpp")
MODELS = (
    ("llama-3.1-8b", "h100", 1), ("llama-3.3-70b", "h100x4", 4), ("qwen3-30b-a3b", "h100", 1),
    ("deepseek-v3", "h200x8", 8), ("gemma-3-27b", "h100", 1), ("qwen3-8b", "l40s", 1),
)  # fmt: skip
LENGTHS = ((1000, 1000), (1000, 100), (8000, 500), (200, 2000), (4000, 1000))
CLIENTS = (1, 8, 32, 64, 128, 256, 512)
# llama.cpp divides its cache among its slots, so it is asked for as many slots as clients.
_MOST_SLOTS = 64
# A cache of which more is used at some time is full, if requests wait.
_FULL = 0.95


# Of random loads: more models, the shortest and the longest prompts and answers, and the most clients.
_MORE_MODELS = (
    ("mixtral-8x7b", "h200", 1), ("qwen3-32b", "h100x2", 2), ("llama-3.1-8b", "a100-80gb", 1),
    ("gpt-oss-120b", "h100", 1), ("deepseek-v3", "h200x8", 1), ("qwen3-30b-a3b", "h100x4", 2),
)  # fmt: skip
_PROMPTS, _ANSWERS, _MOST_CLIENTS = (100, 16_000), (50, 3000), 512


class Load(NamedTuple):
    """One closed loop."""

    engine: str
    model: str
    gpu: str
    tensor_parallel_size: int
    prompt: int
    answer: int
    clients: int

    @property
    def asked(self) -> dict[str, Any]:
        """The options of both commands. Devices that --tp does not need hold DP ranks."""
        slots = {"engine_settings": {"parallel": str(max(4, self.clients))}} if self.engine == "llama.cpp" else {}
        size = self.tensor_parallel_size
        ranks = kvcalc.find_devices(self.gpu).num_devices // size
        split = {"data_parallel_size": ranks} if ranks > 1 else {}
        return {"engine": self.engine, "tensor_parallel_size": size, **split, **slots}


class Compared(NamedTuple):
    """Simulated / closed form."""

    load: Load
    is_full: bool
    ttft: float
    steady_ttft: float
    tpot: float
    rate: float


def loads() -> Iterator[Load]:
    """All loads."""
    for engine in ENGINES:
        for model, gpu, size in MODELS:
            for prompt, answer in LENGTHS:
                for clients in CLIENTS:
                    if engine != "llama.cpp" or (size == 1 and clients <= _MOST_SLOTS):
                        yield Load(engine, model, gpu, size, prompt, answer, clients)


def random_loads(number: int, seed: int) -> Iterator[Load]:
    """Loads with lengths and clients of all sizes alike."""
    draw = Random(seed)

    def between(low: int, high: int) -> int:
        return round(low * (high / low) ** draw.random())

    for _ in range(number):
        engine = draw.choice(ENGINES)
        has_slots = engine == "llama.cpp"
        model = draw.choice([one for one in (*MODELS, *_MORE_MODELS) if "x" not in one[1] or not has_slots])
        clients = between(1, _MOST_SLOTS if has_slots else _MOST_CLIENTS)
        yield Load(engine, *model, between(*_PROMPTS), between(*_ANSWERS), clients)


def compare(load: Load, spread: float) -> Compared | None:
    """One load. None if kvcalc does not answer it."""

    def about(tokens: int) -> str:
        return f"uniform:{int((1 - spread) * tokens)}..{int((1 + spread) * tokens)}"

    speed = kvcalc.SpeedQuestion(input_tokens=load.prompt, output_tokens=load.answer, concurrency=load.clients)
    try:
        devices = kvcalc.find_devices(load.gpu)
        throughput = kvcalc.estimate(load.model, devices=devices, speed=speed, **load.asked)["throughput"]
        found = kvcalc.simulate(
            load.model, load.gpu, prompt_tokens=about(load.prompt), answer_tokens=about(load.answer),
            concurrency=load.clients, benchmark=True, **load.asked,
        )  # fmt: skip
    except KvcalcError:
        return None
    closed = None if throughput is None else throughput["serving"]
    times, results = {row["metric"]: row["mean_seconds"] for row in found["times"]}, found["results"]
    ttft, tpot, steady = times["ttft"], times["tpot"], results["steady_ttft_seconds"]
    if closed is None or ttft is None or tpot is None or steady is None:
        return None
    blocks, used = found["engine"]["blocks"], results["most_used_blocks"]
    waits = blocks is not None and used is not None and used > _FULL * blocks
    waits = waits and closed["running_requests"] < closed["concurrency"]
    return Compared(
        load,
        waits or results["preemptions"] > 0,
        ttft / closed["ttft_seconds"],
        steady / closed["steady_ttft_seconds"],
        tpot / closed["tpot_seconds"],
        results["requests_per_second"] / closed["requests_per_second"],
    )


def line(name: str, found: Sequence[Compared]) -> str:
    """The medians, and the shares beyond 10 %."""
    cells = [f"{name:30s} {len(found):4d}"]
    for metric in Compared._fields[2:]:
        ratios = [getattr(one, metric) for one in found]
        cells.append(f"{statistics.median(ratios):6.2f} {sum(abs(r - 1) > 0.1 for r in ratios) / len(ratios):4.0%}")
    return "  ".join(cells)


def main() -> None:
    """Print one line per engine, with room in the cache and without."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spread", type=float, default=0.3)
    parser.add_argument("--every", type=int, default=1, help="take every Nth load")
    parser.add_argument("--random", type=int, default=0, metavar="N", help="draw N random loads instead of the grid")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--detail", action="store_true", help="print every load too")
    options = parser.parse_args()
    chosen = list(random_loads(options.random, options.seed) if options.random else loads())[:: options.every]
    found = [one for load in chosen if (one := compare(load, options.spread)) is not None]
    if options.detail:
        for one in found:
            print(line(" ".join(map(str, one.load[:2] + one.load[4:])) + (" full" if one.is_full else ""), [one]))
    print("median ratio and share beyond 10 %: TTFT, steady TTFT, TPOT, requests/s")
    for engine in ENGINES:
        for is_full in (False, True):
            own = [one for one in found if one.load.engine == engine and one.is_full == is_full]
            if own:
                print(line(f"{engine}, {'full' if is_full else 'room'}", own))


if __name__ == "__main__":
    main()
