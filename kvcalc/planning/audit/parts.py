"""Where the memory of a server differs from the prediction, part by part, and why."""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING, Any, cast

from kvcalc.engines import log_reader
from kvcalc.engines.log_lines import Log, Printed, Record, parse_printed
from kvcalc.engines.reserve import ACTIVATION, RESERVE
from kvcalc.errors import KvcalcError, UsageError
from kvcalc.planning.answers.estimate import answer
from kvcalc.server.budget import WEIGHTS
from kvcalc.throughput.hardware import Devices, own_gpu
from kvcalc.units import format_size

if TYPE_CHECKING:
    import kvcalc.documents as documents
    from kvcalc.question.question import Question

_TITLES = {
    "weights": "weights", "consumed": "weights and driver", "non_torch": "driver and communication",
    "activation": "peak activation", "graphs": "CUDA graphs", "in_use": "in use before the start",
    "available_memory": "memory of the cache",
}  # fmt: skip
# If the log does not have the size of the device, only the weights are predicted, for a device that holds any.
_LARGE_DEVICE = 2**40
# A smaller difference of the weights is rounding and alignment.
_SAME_WEIGHTS = 0.01
# A driver and its context take about half of this. The communication of several ranks takes more.
_DRIVER_BYTES = 2**30
# Less than this part of 16 bits: the weights are quantized.
_MOST_QUANTIZED = 0.75


def describe_parts(log: Log, question: Question) -> list[documents.AuditPart]:
    """The measured parts of the memory that the log prints, each with its prediction and a sentence.

    `question` is about the server of the log, without its devices. Of several ranks, the one with the largest part
    counts, as in the prediction.
    """
    printed = {name: largest(log.named(name)) for name in _TITLES if log.named(name)}
    device = next(iter(log.named("device_memory")), None)
    memory = None if device is None else _size(device.parts["total"])
    parts = []
    if device is not None and memory is not None and "free" in device.parts and question.layout.sizes.num_devices == 1:
        in_use = memory.middle - _size(device.parts["free"]).middle
        if in_use > _DRIVER_BYTES:
            size = Printed(format_size(in_use), Fraction(in_use), Fraction(in_use))
            words = "more than a driver takes: another process or a display has it"
            parts.append(_part("in_use", device, size, None, words))
    if not printed.keys() - {"available_memory"}:
        return parts
    try:
        fit = _prediction(log, question, _LARGE_DEVICE if memory is None else memory.middle)
    except KvcalcError as error:
        words = f"not predicted: {error.message}"
        return [*parts, *(_part(name, *measured, None, words) for name, measured in printed.items())]
    for name, (record, size) in printed.items():
        if memory is not None or name == "weights":
            predicted = _predicted(fit, name)
            parts.append(_part(name, record, size, predicted, _why(name, size.middle, predicted, log, question)))
    return parts


def _prediction(log: Log, question: Question, memory_bytes: int) -> documents.Fit:
    if log.text("pipeline_rank") and question.pipeline_parallel_size == 1:
        raise UsageError("the log is of a pipeline stage, and does not say how many there are")
    settings = dict(question.engine_settings or {})
    for name in log_reader(log.engine).memory_options:
        text = (log.text(name) or "false").casefold()
        if text != "false":
            settings[name.replace("_", "-")] = True if text == "true" else text
    devices = Devices(own_gpu(None, memory_bytes, None, None), question.layout.sizes.num_devices)
    return answer(question._replace(devices=devices, engine_settings=settings)).fit


def _predicted(fit: documents.Fit, name: str) -> tuple[int, int, int]:
    """The bytes of a part, and the ends of their range."""
    if name == "available_memory":
        memory, free = fit["kv_cache_memory_bytes"] or 0, fit["free_bytes"]
        low, high = fit["free_low_bytes"], fit["free_high_bytes"]
        return memory, memory + (low or free) - free, memory + (high or free) - free
    estimates = [line for line in fit["lines"] or [] if line["low_bytes"] != line["bytes"]]
    graphs = [line for line in estimates if line["kind"] == RESERVE and "graphs" in line["name"]]
    lines = {
        "weights": [line for line in fit["lines"] or [] if line["kind"] == WEIGHTS],
        "activation": [line for line in estimates if line["kind"] == ACTIVATION],
        "graphs": graphs,
    }
    others = [line for line in estimates if line["kind"] == RESERVE and line["low_bytes"] and line not in graphs]
    lines |= {"non_torch": others, "consumed": lines["weights"] + others}
    return cast(
        tuple[int, int, int],
        tuple(
            sum(line["bytes"] if line[end] is None else line[end] for line in lines[name])
            for end in ("bytes", "low_bytes", "high_bytes")
        ),
    )


def _why(name: str, size: int, predicted: tuple[int, int, int], log: Log, question: Question) -> str:
    """How the part differs from the prediction, and what may explain it."""
    middle, low, high = predicted
    tolerance = _SAME_WEIGHTS * middle if name == "weights" else 0
    if low - tolerance <= size <= high + tolerance:
        return "as predicted"
    more = size > middle
    words = f"{format_size(abs(size - middle))} {'more' if more else 'less'} than the {format_size(middle)} predicted"
    reasons = [text for text in _reasons(name, size, more, middle, log, question) if text]
    return ": ".join([words, *reasons[:1]])


def _reasons(name: str, size: int, more: bool, predicted: int, log: Log, question: Question) -> list[str | None]:
    """What may explain a part that differs, the strongest evidence in the log first."""
    spec, drafter, quantized = question.model, log.text("draft_model"), log.text("quantization")
    if name == "weights":
        files = [_size(record.parts["size"]).middle for record in log.named("checkpoint")]
        has_all_files = files and question.layout.sizes.num_devices == 1
        is_plain = spec.quantization is None and spec.named_dtype is None
        if not more:
            method = f" (quantization={quantized})" if quantized else ""
            is_quantized = is_plain and (quantized or size < _MOST_QUANTIZED * predicted)
            return [
                f"the server's weights are quantized{method}: give that copy with --model" if is_quantized else None,
                "the server may not load the tower" if spec.has_towers else None,
            ]
        return [
            f"those of the drafter {drafter} are not counted" if drafter else None,
            "the size of the tower is not known" if spec.has_unknown_tower else None,
            f"layers left in 16 bits: the files have {format_size(files[0])}"
            if has_all_files and files[0] > predicted and not is_plain else None,
            None if is_plain else "layers left in 16 bits, or weights padded for a kernel",
        ]  # fmt: skip
    if name == "activation":
        images, tokens = log.text("encoder_tokens"), log.text("max_num_batched_tokens")
        return [
            f"images of {int(images):,} tokens are profiled in the same step" if more and images else None,
            "the log does not say max_num_batched_tokens, and the default is assumed" if tokens is None else None,
        ]
    return []


def _part(
    name: str, record: Record, size: Printed, predicted: tuple[int, int, int] | None, words: str
) -> documents.AuditPart:
    middle, low, high = predicted or (None, None, None)
    return {
        "line": record.line, "name": cast(Any, name), "bytes": size.middle, "predicted_bytes": middle,
        "low_bytes": low, "high_bytes": high, "sentence": f"{_TITLES[name]}: {size.text}, {words}",
    }  # fmt: skip


def largest(records: list[Record]) -> tuple[Record, Printed]:
    """The largest of the sizes. The cache has the memory of the rank with the least."""
    sizes = [(record, _size(record.parts.get("size") or record.parts["memory"])) for record in records]
    choose = min if "memory" in records[0].parts else max
    return choose(sizes, key=lambda pair: pair[1].middle)


def _size(text: str) -> Printed:
    return parse_printed(text if text[-1].isalpha() else f"{text} GiB")
