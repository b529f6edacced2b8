"""Compare the memory that kvcalc reserves for vLLM with the logs in vllm_memory.tsv, and compute its 80 % range.

    python benchmarks/fit_reserve.py            # a row per log, the range, and how many logs it covers
    python benchmarks/fit_reserve.py --markdown # the table of docs/fit.md

The reserve is the memory that vLLM requests, less the weights that it loaded and the memory left for the cache. The
constants in kvcalc/memory/reserve follow from vLLM's source, from the rows of the report and from those marked
`used`; the range comes from the other logs. For each release and family, the range is computed without its logs and
then checked with them.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

import kvcalc
from kvcalc.memory.reserve import vllm
from kvcalc.planning.budget import Budget, budget
from kvcalc.planning.case import make_case
from kvcalc.planning.question import Question
from kvcalc.throughput.hardware import Devices, find_gpu, own_gpu

GIB = 2**30
LOGS = Path(__file__).with_name("vllm_memory.tsv")
# The ends of the range as shares of the sorted ratios. They are wider than 10 % and 90 %, so that the range also covers
# four of five logs that it was not computed from. Above the estimate it is wider still: there a server does not start.
_LOW, _HIGH = 0.05, 0.975


class Log(NamedTuple):
    """A log, the GiB that vLLM reserved according to it, and kvcalc's estimate of them."""

    family: str
    model: str
    device: str
    release: str
    source: str
    memory: float
    actual: float
    estimate: float

    @property
    def ratio(self) -> float:
        return self.actual / self.estimate

    @property
    def is_held_out(self) -> bool:
        """Whether the log set no constant."""
        return not self.source.startswith(("report", "used"))


def read_logs() -> list[Log]:
    """Every log with its estimate."""
    lines = [line for line in LOGS.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    return [_log(row) for row in csv.DictReader(lines, delimiter="\t")]


def _log(row: dict[str, str]) -> Log:
    memory, ranks, stages = float(row["memory"]), int(row["tp"]), int(row["pp"])
    settings = {
        "gpu-memory-utilization": row["utilization"],
        **({"max-num-batched-tokens": row["tokens"]} if row["tokens"] else {}),
        **({"max-num-seqs": row["requests"]} if row["requests"] else {}),
    }
    gpu = own_gpu(find_gpu(row["device"]), int(memory * GIB), None, None)
    found = budget(
        make_case(
            Question(
                kvcalc.load_model(row["model"]),
                context_tokens=int(row["context"]),
                dtype=row["dtype"] or None,
                engine=f"vllm@{row['release']}",
                engine_settings=settings,
                tensor_parallel_size=ranks,
                pipeline_parallel_size=stages,
                devices=Devices(gpu, ranks * stages),
            )
        )
    )
    assert isinstance(found, Budget), found
    loaded = float(row["loaded"]) if row["loaded"] else (found.weights.bytes or 0) / GIB
    actual = memory * float(row["utilization"]) - loaded - float(row["available"])
    estimate = sum(part.bytes for part in found.reserve.held if part.low != part.bytes) / GIB
    return Log(row["family"], row["model"], row["device"], row["release"], row["source"], memory, actual, estimate)


def range_of(ratios: Sequence[float]) -> tuple[float, float]:
    """The ends of the 80 % range of these ratios, by linear interpolation."""
    ordered = sorted(ratios)

    def at(share: float) -> float:
        place = share * (len(ordered) - 1)
        low = int(place)
        high = min(low + 1, len(ordered) - 1)
        return ordered[low] + (place - low) * (ordered[high] - ordered[low])

    return at(_LOW), at(_HIGH)


def covered(logs: Sequence[Log], group: Callable[[Log], object]) -> int:
    """How many logs are within the range that the logs of the other groups give."""
    count = 0
    for log in logs:
        low, high = range_of([other.ratio for other in logs if group(other) != group(log)])
        count += low <= log.ratio <= high
    return count


def release_and_family(log: Log) -> tuple[str, str]:
    """What the logs that may err together have in common."""
    return log.release, log.family


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--markdown", action="store_true")
    asked = parser.parse_args()
    logs = read_logs()
    held_out = [log for log in logs if log.is_held_out]
    if asked.markdown:
        print("| model | vLLM | device | reserved | estimate | error, share of the device |\n|---|---|---|---|---|---|")
    for log in held_out if asked.markdown else logs:
        error = 100 * (log.estimate - log.actual) / log.memory
        fields = [
            log.model,
            log.release,
            log.device,
            f"{log.actual:.2f} GiB",
            f"{log.estimate:.2f} GiB",
            f"{error:+.1f} %",
        ]
        print(
            f"| {' | '.join(fields)} |"
            if asked.markdown
            else "  ".join(f"{field:20}" for field in [*fields, f"{log.ratio:.2f}"])
        )
    if not asked.markdown:
        low, high = range_of([log.ratio for log in held_out])
        print(f"\nrange {low:.2f} to {high:.2f} times the estimate; used {vllm._LOW} to {vllm._HIGH}")
        within = sum(vllm._LOW <= log.ratio <= vllm._HIGH for log in held_out)
        print(f"{len(held_out)} logs that set no constant: {within} within the range used;")
        print(f"{covered(held_out, release_and_family)} within the range of other releases and families;")
        print(f"{covered(held_out, lambda log: log.family)} within the range of the other families")
        errors = [abs(log.estimate - log.actual) / log.memory for log in held_out]
        print(f"error, share of the device: median {100 * median(errors):.1f} %, largest {100 * max(errors):.1f} %")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
