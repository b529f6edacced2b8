"""Compare the short form of a load with its simulation, in closed loops of many kinds.

    python benchmarks/score/short_form.py [--every N] [--random N] [--seed S] [--detail]

The loads are those of a grid, or with `--random N`, N loads drawn at random. Every cell is the median of short form /
simulation, and the mean of how far they are apart: the time to first token, the time per output token and the requests
per second. A cache is full if fewer requests run than there are clients. `--detail` prints every load.
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
    """Short form / simulation."""

    load: Load
    is_full: bool
    ttft: float
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
        return round(low * float(high / low) ** draw.random())

    for _ in range(number):
        engine = draw.choice(ENGINES)
        has_slots = engine == "llama.cpp"
        model = draw.choice([one for one in (*MODELS, *_MORE_MODELS) if "x" not in one[1] or not has_slots])
        clients = between(1, _MOST_SLOTS if has_slots else _MOST_CLIENTS)
        yield Load(engine, *model, between(*_PROMPTS), between(*_ANSWERS), clients)


def compare(load: Load) -> Compared | None:
    """One load. None if kvcalc does not answer it."""
    speed = kvcalc.SpeedQuestion(input_tokens=load.prompt, output_tokens=load.answer, concurrency=load.clients)
    try:
        devices = kvcalc.find_devices(load.gpu)
        simulated, short = (
            kvcalc.estimate(load.model, devices=devices, speed=asked, **load.asked)["throughput"]
            for asked in (speed, speed._replace(short_form=True))
        )
    except KvcalcError:
        return None
    if simulated is None or short is None or simulated["serving"] is None or short["serving"] is None:
        return None
    one, other = short["serving"], simulated["serving"]
    return Compared(
        load,
        one["running_requests"] < load.clients,
        one["ttft_seconds"] / other["ttft_seconds"],
        one["tpot_seconds"] / other["tpot_seconds"],
        one["requests_per_second"] / other["requests_per_second"],
    )


def line(name: str, compared: Sequence[Compared]) -> str:
    """The medians, and the mean distances from 1."""
    cells = [f"{name:30s} {len(compared):4d}"]
    for metric in Compared._fields[2:]:
        ratios = [getattr(each, metric) for each in compared]
        cells.append(f"{statistics.median(ratios):6.2f} {statistics.mean(abs(r - 1) for r in ratios):6.1%}")
    return "  ".join(cells)


def main() -> None:
    """Print one line per engine, with room in the cache and without."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", type=int, default=1, help="take every Nth load")
    parser.add_argument("--random", type=int, default=0, metavar="N", help="draw N random loads instead of the grid")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--detail", action="store_true", help="print every load too")
    options = parser.parse_args()
    chosen = list(random_loads(options.random, options.seed) if options.random else loads())[:: options.every]
    found = [each for load in chosen if (each := compare(load)) is not None]
    if options.detail:
        for each in found:
            print(line(" ".join(map(str, each.load[:2] + each.load[4:])) + (" full" if each.is_full else ""), [each]))
    print("median ratio and mean distance: TTFT, TPOT, requests/s")
    for engine in ENGINES:
        for is_full in (False, True):
            own = [each for each in found if each.load.engine == engine and each.is_full == is_full]
            if own:
                print(line(f"{engine}, {'full' if is_full else 'room'}", own))


if __name__ == "__main__":
    main()
