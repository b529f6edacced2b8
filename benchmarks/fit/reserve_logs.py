"""Public logs of what engines keep beside weights and cache, each with kvcalc's estimate.

`range_of` and `covered` compute the 80 % range of an estimate and check it with logs that it was not computed from.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import kvcalc
from kvcalc.engines import reserve as parts
from kvcalc.engines.llama_cpp.reserve import reserve as llama_cpp
from kvcalc.engines.llama_cpp.settings import LAST_WITH_ALL_LOGITS
from kvcalc.engines.sglang.reserve import reserve as sglang
from kvcalc.engines.tensorrt_llm.settings import STEP_TOKENS
from kvcalc.engines.vllm import reserve as vllm
from kvcalc.memory.sharding import Width
from kvcalc.model.layout import Layout
from kvcalc.question.question import Question
from kvcalc.server.budget import Budget, budget
from kvcalc.server.case import make_case
from kvcalc.throughput.hardware import Devices, find_gpu, own_gpu

GIB = 2**30
FOLDER = Path(__file__).parent
# The ends of the range as shares of the sorted ratios. They are wider than 10 % and 90 %, so that the range covers four
# of five logs that it was not computed from.
_LOW, _HIGH = 0.025, 0.975


class Log(NamedTuple):
    """A log, the GiB that the engine reserved according to it, and kvcalc's estimate of them.

    `floor` is what the low end of the range is a multiple of: the estimate, or a smaller one if the engine may do
    without some of it.
    """

    family: str
    model: str
    device: str
    release: str
    source: str
    memory: float
    actual: float
    estimate: float
    floor: float

    @property
    def ratio(self) -> float:
        return self.actual / self.estimate

    @property
    def is_held_out(self) -> bool:
        """Whether the log set no constant."""
        return not self.source.startswith(("report", "used"))


def read_table(name: str) -> list[dict[str, str]]:
    """The rows of a table in this folder."""
    lines = [line for line in (FOLDER / name).read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    return list(csv.DictReader(lines, delimiter="\t"))


def read_vllm_logs() -> list[Log]:
    """The memory that vLLM requests, less the weights that it loaded and the memory left for the cache."""
    return [_vllm_log(row) for row in read_table("vllm_memory.tsv")]


def read_sglang_logs() -> list[Log]:
    """The memory that is not free before SGLang loads the weights.

    If a log does not print it, it follows from the share: (weights + pool) / share is the memory that was free.
    """
    return [_sglang_log(row) for row in read_table("sglang_memory.tsv")]


def read_llama_cpp_logs() -> list[Log]:
    """The compute buffer and the memory outside llama.cpp's buffers. Logs of the buffer alone set a constant."""
    return [_llama_cpp_log(row) for row in read_table("llama_cpp_memory.tsv")]


def read_tensorrt_llm_logs() -> list[Log]:
    """The peak of a step, less the weights and the cache of that step."""
    return [_tensorrt_llm_log(row) for row in read_table("tensorrt_llm_memory.tsv")]


def _vllm_log(row: dict[str, str]) -> Log:
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
    estimated = [part for part in found.reserve.held if part.low != part.bytes]
    estimate = sum(part.bytes for part in estimated) / GIB
    floor = sum(part.low or 0 for part in estimated) / vllm._LOW / GIB
    return Log(
        row["family"], row["model"], row["device"], row["release"], row["source"], memory, actual, estimate, floor
    )


def _sglang_log(row: dict[str, str]) -> Log:
    gpu, ranks = find_gpu(row["device"]), int(row["tp"])
    memory = gpu.memory_bytes / GIB
    before = row["before"] or (float(row["loaded"]) + float(row["pool"])) / float(row["share"])
    question = parts.ReserveInputs(
        memory_bytes=gpu.memory_bytes, width=Width(0, 0, 0, 0, False), layout=Layout(ranks), context_tokens=1,
        batch_size=1, settings={}, has_fast_links=gpu.interconnect is not None,
        shares_memory=(gpu.memory_type or "").startswith("LPDDR"),
    )  # fmt: skip
    estimate = sum(part.bytes for part in sglang(question).held if part.low != part.bytes) / GIB
    actual = memory - float(before)
    return Log(row["family"], row["model"], row["device"], row["date"], row["source"], memory, actual, *2 * [estimate])


def _tensorrt_llm_log(row: dict[str, str]) -> Log:
    gpu, size, replicas = find_gpu(row["device"]), int(row["tp"]), int(row["dp"])
    found = budget(
        make_case(
            Question(
                kvcalc.load_model(row["model"]),
                context_tokens=1024,
                dtype=row["dtype"] or None,
                engine="tensorrt-llm",
                tensor_parallel_size=size,
                data_parallel_size=replicas,
                devices=Devices(gpu, size * replicas),
            )
        )
    )
    assert isinstance(found, Budget), found
    # The activations grow with the tokens of a step. kvcalc knows no other number than the default.
    step = int(row["tokens"]) / STEP_TOKENS
    estimate = sum(part.bytes * (step if part.kind == parts.ACTIVATION else 1) for part in found.reserve.held) / GIB
    actual = float(row["peak"]) - float(row["cache"]) - float(row["loaded"])
    memory = gpu.memory_bytes / GIB
    return Log(row["family"], row["model"], row["device"], "1.3", row["source"], memory, actual, *2 * [estimate])


def _llama_cpp_log(row: dict[str, str]) -> Log:
    question = parts.ReserveInputs(
        memory_bytes=0, width=Width(int(row["elements"]), int(row["hidden"]), int(row["vocab"]), 0, False),
        layout=Layout(1, int(row["devices"] or 1)), context_tokens=int(row["context"]), batch_size=1,
        settings={"ubatch-size": row["ubatch"], "parallel": row["outputs"] or "1"},
        is_apple=row["device"].startswith("m3"), release=None if row["outputs"] else LAST_WITH_ALL_LOGITS,
    )  # fmt: skip
    held = llama_cpp(question).held[: 2 if row["other"] else 1]
    memory, actual = float(row["memory"] or 80 * 1024) / 1024, (float(row["buffer"]) + float(row["other"] or 0)) / 1024
    estimate = sum(part.bytes for part in held) / GIB
    return Log(row["family"], row["model"], row["device"], row["build"], row["source"], memory, actual, *2 * [estimate])


def range_of(logs: Sequence[Log]) -> tuple[float, float]:
    """The ends of the 80 % range: the low end of the ratios to the floor, the high end of those to the estimate."""
    return _at([log.actual / log.floor for log in logs], _LOW), _at([log.ratio for log in logs], _HIGH)


def _at(ratios: Sequence[float], share: float) -> float:
    """The value at this share of the sorted ratios, by linear interpolation."""
    ordered = sorted(ratios)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def is_within(log: Log, ends: tuple[float, float]) -> bool:
    """Whether the log is within a range."""
    return ends[0] * log.floor <= log.actual <= ends[1] * log.estimate


def covered(logs: Sequence[Log], group: Callable[[Log], object]) -> int:
    """How many logs are within the range that the logs of the other groups give."""
    return sum(is_within(log, range_of([other for other in logs if group(other) != group(log)])) for log in logs)


def release_and_family(log: Log) -> tuple[str, str]:
    """What the logs that may err together have in common."""
    return log.release, log.family
