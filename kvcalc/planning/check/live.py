"""What a running server measures, beside the prediction for its command (`kvcalc check --live`).

The engine's `live.yaml` has the names of its metrics without their `prefix`. `metrics` maps a row to the names to try,
in order: `a`, `a / b` for a ratio of counters (the mean of a histogram), or `a{label}` for a number in a label. The
series of different replicas differ in the label `rank`, and those that differ only in `copies` count the same thing.
`settings` are options whose value the server shows, and `option` is the one that a server needs to show its metrics.
Without `metrics`, an engine is recognised, and not compared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import isfinite
from typing import TYPE_CHECKING, Any, cast

from kvcalc.engines import engine_class
from kvcalc.engines.declarations import ENGINES, has_table, table
from kvcalc.errors import UsageError
from kvcalc.reading.metrics import Sample, read_metrics, samples_in, shown_source
from kvcalc.records import NamedTuple

if TYPE_CHECKING:
    import kvcalc.documents as documents

# How the ranks of a server make one value: all their requests, the share or the size of one of them, or a number that
# every rank shows for all. The parts of a ratio are sums.
_OVER_RANKS: dict[str, Callable[[Sequence[float]], float]] = {
    "running_requests": sum, "waiting_requests": sum, "finished_requests": sum, "preemptions": sum,
    "cache_usage": lambda values: sum(values) / len(values), "cache_tokens": min, "cache_blocks": max,
}  # fmt: skip
# Of several series of a gauge in one rank, the largest counts: a queue has one for all requests, and one for each
# priority. Those of a counter add up.
_GAUGES = ("running_requests", "waiting_requests", "cache_usage", "cache_tokens", "cache_blocks")
# Servers that are not among the engines, by the first letters of their metrics.
_OTHERS = {
    "tgi_": "Text Generation Inference", "nv_inference_": "Triton", "lmdeploy:": "LMDeploy", "ray_": "Ray",
}  # fmt: skip
_MODEL = "model_name"
_TIMES = ("ttft_mean_seconds", "tpot_mean_seconds")
# A difference up to this share is not worth a remark, and with this share of the requests that fit, a server is full.
_ALIKE, _FULL = 0.05, 0.9

Times = dict[str, tuple[float, float]]
"""A predicted time, and the upper end of its range, by the name of its row."""


class Prediction(NamedTuple):
    """A predicted value with the ends of its range, None if they are not known."""

    value: float | None = None
    low: float | None = None
    high: float | None = None

    def difference(self, value: float) -> str:
        """The difference of a measured value from it. Empty if it is small, and no range says more."""
        if not self.value:
            return ""
        share = value / self.value - 1
        if self.low is None or self.high is None:
            return f"{share:+.0%}" if abs(share) > _ALIKE else ""
        place = "above" if value > self.high else "below" if value < self.low else "within"
        return f"{share:+.{0 if abs(share) >= 0.1 else 1}%}, {place} the range"


class Metrics(NamedTuple):
    """The samples of one engine, by their names without its prefix.

    `source` is the file or the address, without credentials, and `model` the name under which the model is served.
    """

    engine: str
    source: str
    samples: Mapping[str, Sequence[Sample]]
    model: str | None = None

    @property
    def ranks(self) -> int:
        """The replicas behind the server, each with its own cache."""
        label = self.declared["rank"]
        return max(1, len({sample.labels.get(label) for sample in self._all() if label in sample.labels}))

    @property
    def declared(self) -> Mapping[str, Any]:
        """The engine's `live.yaml`."""
        return table(self.engine, "live")

    def value(self, row: str) -> float | None:
        """The server's value for a row, None if it does not show it."""
        for text in self.declared["metrics"].get(row, ()):
            name, _, below = text.partition(" / ")
            if below:
                total, count = self._sum(name), self._sum(below)
                # A counter with labels appears with its first event.
                if count:
                    return (total or 0.0) / count
            elif (values := self._of_ranks(row, name)) is not None:
                return _OVER_RANKS[row](values)
        return None

    def label(self, text: str) -> str | None:
        """The text of `a{label}`, or of the value of `a`."""
        name, _, label = text.rstrip("}").partition("{")
        samples = self.samples.get(name, ())
        texts = (sample.labels.get(label) if label else f"{sample.value:g}" for sample in samples)
        return next((text for text in texts if text not in (None, "None")), None)

    def _all(self) -> Iterator[Sample]:
        return (sample for samples in self.samples.values() for sample in samples)

    def _sum(self, name: str) -> float | None:
        values = self._of_ranks("", name)
        return None if values is None else sum(values)

    def _of_ranks(self, row: str, text: str) -> list[float] | None:
        """The value of each rank."""
        name, _, label = text.rstrip("}").partition("{")
        values: dict[str, dict[Any, float]] = {}
        is_gauge, copies = row in _GAUGES, {self.declared["rank"], *self.declared["copies"]}
        for sample in self.samples.get(name, ()):
            value = _number(sample.labels.get(label)) if label else sample.value
            if value is None:
                continue
            rank = sample.labels.get(self.declared["rank"], "")
            others = () if is_gauge else tuple(sorted(pair for pair in sample.labels.items() if pair[0] not in copies))
            series = values.setdefault(rank, {})
            series[others] = max(value, series.get(others, value))
        return [sum(series.values()) for series in values.values()] or None


def _number(text: str | None) -> float | None:
    """The number in a label, None for None and another text."""
    try:
        value = float(text or "")
    except ValueError:
        return None
    return value if isfinite(value) else None


def read_live(engine: str, source: str) -> Metrics:
    """The metrics in a file, or of the server at an address.

    Raises UsageError (exit 2) if they are not those of one server of `engine`, and RunError (exit 1) if there is no
    answer.
    """
    check_engine(engine)
    return metrics_of(engine, read_metrics(source, hint_of(engine)), shown_source(source))


def metrics_of(engine: str, text: str, source: str) -> Metrics:
    """The metrics in a text. UsageError (exit 2) if they are not those of one server of `engine`."""
    prefixes = {name: table(name, "live")["prefix"] for name in ENGINES if has_table(name, "live")}
    titles = {prefix: engine_class(name).title for name, prefix in prefixes.items()} | _OTHERS
    prefix, title = prefixes[engine], engine_class(engine).title
    counts, models, by_name = Counter[str](), dict[str, None](), dict[str, list[Sample]]()
    for sample in samples_in(text):
        if sample.name.startswith(prefix):
            by_name.setdefault(sample.name.removeprefix(prefix), []).append(sample)
            models |= dict.fromkeys(filter(None, [sample.labels.get(_MODEL)]))
        counts.update(start for start in titles if sample.name.startswith(start))
    if not counts:
        raise UsageError(f"{source}: no metrics of {title}", hint_of(engine))
    if not by_name:
        told = f"{source}: the metrics of {titles[counts.most_common(1)[0][0]]}, and the command is that of {title}"
        raise UsageError(told, hint_of(engine))
    if len(models) > 1:
        shown = ", ".join(f"{name[:40]!a}" for name in [*models][:3])
        raise UsageError(f"{source}: the metrics of {len(models)} models: {shown}", "ask one server for its metrics")
    return Metrics(engine, source, by_name, next(iter(models), None))


def hint_of(engine: str) -> str:
    """Where the metrics of an engine are."""
    title, declared = engine_class(engine).title, table(engine, "live")
    needs = f", and it needs {declared['option']}" if "option" in declared else ""
    return f"{title} shows them at /metrics, with names that begin with {declared['prefix']}{needs}"


def check_engine(engine: str) -> None:
    """Raise UsageError (exit 2) if the metrics of an engine are not compared."""
    compared = [name for name in ENGINES if has_table(name, "live") and "metrics" in table(name, "live")]
    if engine not in compared:
        titles = " and ".join(engine_class(name).title for name in compared)
        told = f"--live: the metrics of {engine_class(engine).title} are not compared"
        raise UsageError(told, f"those of {titles} are")


def compare(
    document: documents.Check, metrics: Metrics, prefix_hit_rate: float | None, times: Times | str
) -> documents.Live:
    """The `live` part of a document.

    `prefix_hit_rate` is the one in the prediction, and `times` are predicted for the rate of requests, or why there are
    none. Raises UsageError (exit 2) if the server shows none of the rows.
    """
    untimed, times = (times, Times()) if isinstance(times, str) else ("", times)
    values = {name: value for name in metrics.declared["metrics"] if (value := metrics.value(name)) is not None}
    if "cache_tokens" in values:  # the blocks say the same
        values.pop("cache_blocks", None)
    if not values:
        raise UsageError(f"{metrics.source}: none of the metrics that are compared", "is it a newer release?")
    predicted = _predicted(document, metrics, values, prefix_hit_rate, times)
    rows: list[documents.LiveRow] = []
    for name, value in values.items():
        prediction = predicted.get(name, Prediction())
        remark = untimed if name in _TIMES and untimed else _remark(name, values, prediction, predicted)
        rows.append({
            "name": cast(Any, name), "server": value, "predicted": prediction.value, "low": prediction.low,
            "high": prediction.high, "remark": remark,
        })  # fmt: skip
    return {
        "source": metrics.source, "engine": metrics.engine, "model": metrics.model, "ranks": metrics.ranks,
        "rows": rows, "differs": list(_differences(document, metrics)),
    }  # fmt: skip


def _predicted(
    document: documents.Check, metrics: Metrics, values: Mapping[str, float], prefix_hit_rate: float | None,
    times: Times,
) -> dict[str, Prediction]:  # fmt: skip
    """The predictions by the names of their rows. A row without one is only shown."""
    engine: Any = document["engine"]
    fit, requests, copies = document["fit"], document["requests"], document["command"]["copies"]
    # Behind an outer load balancer, every rank is a server of its own, with a page of its own.
    shown = copies * min(1.0, metrics.ranks / (engine["data_parallel_size"] * copies))
    predicted = {name: Prediction(value, value * value / high, high) for name, (value, high) in times.items()}
    tokens, blocks = engine.get("kv_cache_tokens"), engine.get("num_gpu_blocks")
    for name, size in (("cache_tokens", tokens), ("cache_blocks", blocks and blocks * metrics.ranks)):
        if size:
            predicted[name] = _with_range(size, fit)
    running = fit["max_batch_size"] if requests is None else requests["max_requests"]
    if running is not None:
        predicted["running_requests"] = Prediction(running * shown)
    if requests is not None:
        predicted["input_tokens"] = Prediction(requests["input_tokens"])
        predicted["output_tokens"] = Prediction(requests["output_tokens"])
        predicted["prefix_hit_rate"] = Prediction(prefix_hit_rate or 0.0)
        if requests["memory_requests"] and "running_requests" in values:
            share = values["running_requests"] / (requests["memory_requests"] * shown)
            predicted["cache_usage"] = Prediction(min(1.0, share))
    return predicted


def _with_range(size: float, fit: documents.Fit) -> Prediction:
    """A size of the cache, which grows with the memory for it."""
    memory, low, high = fit["kv_cache_memory_bytes"], fit["free_low_bytes"], fit["free_high_bytes"]
    if low is None or high is None or memory <= 0:
        return Prediction(size)
    return Prediction(size, *(max(0.0, size * (1 + (end - fit["free_bytes"]) / memory)) for end in (low, high)))


def _remark(
    name: str, values: Mapping[str, float], prediction: Prediction, predicted: Mapping[str, Prediction]
) -> str:  # fmt: skip
    """How a value compares, or what it means. Empty if it needs no word."""
    value, running, has_lengths = values[name], values.get("running_requests", 0.0), "input_tokens" in predicted
    if name == "preemptions" and value:
        finished = values.get("finished_requests")
        return "the cache was full" + (f": {value / finished:.2g} per request" if finished else "")
    fitting = predicted.get("running_requests", Prediction()).value
    if name == "waiting_requests" and value and fitting is not None and has_lengths:
        return "the server is full" if running >= _FULL * fitting else "fewer run than fit"
    if prediction.value is None:
        return ""
    if name == "running_requests":
        return "fit at once" if has_lengths else "of the longest context fit at once"
    if name == "cache_usage":
        longer = value > prediction.value + _ALIKE
        return "requests are longer than given" if longer else "at most, with the given lengths"
    if name == "prefix_hit_rate":
        return f"assumed; --prefix-hit-rate {value:.0%}" if abs(value - prediction.value) > _ALIKE else "assumed"
    return prediction.difference(value)


def _differences(document: documents.Check, metrics: Metrics) -> Iterator[str]:
    """The options whose value the server shows, and which have another in the command."""
    engine: Any = document["engine"]
    for option, text in metrics.declared.get("settings", {}).items():
        shown, checked = metrics.label(text), engine.get(option)
        if shown is not None and checked is not None and not _is_same(shown, checked):
            yield f"--{option.replace('_', '-')} is {shown[:40]} there, and {checked} in the command"


def _is_same(shown: str, checked: Any) -> bool:
    if isinstance(checked, bool):
        return shown.casefold() in (("true", "1") if checked else ("false", "0"))
    return shown == str(checked) or _number(shown) == checked
