"""The best row of a plan and what it gives up, and the layouts between which a user can choose.

Each of these is cheaper, or faster for one user, than every other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import exp, hypot, inf, log
from typing import TYPE_CHECKING, Any, cast

from kvcalc.engines import SERVERS, command_key, start_command
from kvcalc.engines.command import LISTENING, REPLICA, host_of
from kvcalc.errors import KvcalcError
from kvcalc.notes import Note
from kvcalc.planning.answers.estimate import answer
from kvcalc.planning.plan.replicas import shapes_of
from kvcalc.planning.plan.traffic import MOST_RUNNING, Platform, Traffic, probe, seconds_text, serving_question
from kvcalc.question.question import Question
from kvcalc.records import NamedTuple
from kvcalc.throughput.speed import WIDEST_RANGE
from kvcalc.writing import shell

if TYPE_CHECKING:
    from typing import Literal

    import kvcalc.documents as documents

    Ranking = Literal["cost_per_hour", "cost_per_million_output_tokens", "num_devices"]
    Time = Literal["ttft_seconds", "tpot_seconds"]


def front(traffic: Traffic, kinds: Sequence[Platform]) -> list[documents.ParetoPoint]:
    """The Pareto front over kinds of device, layouts and running requests, the fastest for one user first.

    A point is one replica with a power of two of running requests that fits and meets the targets. It is compared by
    the tokens per second of one user, and by the cost of a million output tokens if every kind has a price, else by the
    tokens per second of one device.
    """
    priced = all(kind.price is not None for kind in kinds)
    points = [point for kind in kinds for point in _points(traffic, kind)]
    # The short form chooses the points, which are printed with the times of their estimates.
    return [point.document for point in _best([point.estimated() for point in _best(points, priced)], priced)]


class _Point(NamedTuple):
    """A point, and the question about its replica on devices of a `kind`."""

    document: documents.ParetoPoint
    question: Question
    kind: Platform

    def estimated(self) -> _Point:
        """The point with the times of the estimate."""
        speed = self.question.speed_asked._replace(short_form=False)
        throughput = answer(self.question._replace(speed=speed)).document["throughput"]
        serving = throughput and throughput["serving"]
        if not serving:
            return self
        figures = _figures(serving, self.kind, self.document["num_devices"])
        return self._replace(document=cast("documents.ParetoPoint", {**self.document, **figures}))


def _best(points: list[_Point], priced: bool) -> list[_Point]:
    """The points than which no other is both faster for one user and less of a burden, the fastest first."""
    best: list[_Point] = []
    for point in sorted(
        points,
        key=lambda point: (-point.document["tokens_per_second_per_user"], _burden(point.document, priced)),
    ):
        if not best or _burden(point.document, priced) < _burden(best[-1].document, priced):
            best.append(point)
    return best


def _burden(point: documents.ParetoPoint, priced: bool) -> float:
    """What a user pays for a token: money, or devices."""
    return cast(Any, point)["cost_per_million_output_tokens"] if priced else -point["tokens_per_second_per_device"]


def _points(traffic: Traffic, kind: Platform) -> Iterator[_Point]:
    for shape in shapes_of(traffic, kind):
        running = 1
        while running <= MOST_RUNNING:
            try:
                replica = probe(traffic, kind, shape, running, is_brief=True)
            except KvcalcError:
                break
            # More requests are neither smaller nor faster.
            if replica.trouble is not None:
                break
            document: Any = {
                "gpu": kind.gpu.name,
                "engine": kind.engine,
                **shape.describe_all(),
                "num_devices": shape.num_devices,
                "requests_per_replica": running,
                **_figures(replica.serving, kind, shape.num_devices),
            }
            yield _Point(document, serving_question(traffic, kind, shape, running), kind)
            running *= 2


def _figures(serving: documents.Serving, kind: Platform, num_devices: int) -> dict[str, float | None]:
    """The times, the rates and the cost of one replica."""
    each = serving["tokens_per_second"] / num_devices
    return {
        "ttft_seconds": serving["ttft_seconds"],
        "tpot_seconds": serving["tpot_seconds"],
        "tokens_per_second_per_user": 1 / serving["tpot_seconds"],
        "tokens_per_second_per_device": each,
        "cost_per_million_output_tokens": None if kind.price is None else kind.price / (each * 3600 / 1e6),
    }


# The times that a cheaper row may give up, by name.
_TIMES: dict[str, Time] = {"TTFT": "ttft_seconds", "TPOT": "tpot_seconds"}
# A time that is longer by less than this factor is not named.
_LONGER = 1.5


def ranked_by(rows: Sequence[documents.PlanRow], has_targets: bool) -> Ranking:
    """What the best row has least of.

    Costs are compared if they are known for all rows that fit: per hour, because each of them meets the targets, or per
    token if there are none, because a slow device is cheap per hour. Else it is the number of devices.
    """
    if any(row["cost_per_hour"] is None for row in rows if row["fits"]):
        return "num_devices"
    return "cost_per_hour" if has_targets else "cost_per_million_output_tokens"


def best_of(rows: Sequence[documents.PlanRow], key: Ranking) -> documents.PlanRow | None:
    """The row that fits and has least of `key`. Of equal ones, it is the fastest per device. None if no row fits."""
    fitting: Iterator[Any] = (row for row in rows if row["fits"])
    return min(fitting, key=lambda row: (row[key], -row["tokens_per_second_per_device"]), default=None)


def commands(
    rows: Sequence[documents.PlanRow], best: documents.PlanRow | None, key: Ranking, router: str | None
) -> list[documents.PlanCommand]:
    """The command of each engine's best row that fits, that of the `best` row first, and of the `router` simulated.

    Engines without a server have none, and separate instances have their own (`disaggregated`).
    """
    printed: list[documents.PlanCommand] = []
    for name in dict.fromkeys(row["engine"] for row in [best, *rows] if row is not None):
        rows_of_engine = (
            [best] if best is not None and best["engine"] == name else [row for row in rows if row["engine"] == name]
        )
        row = best_of(rows_of_engine, key)
        has_server = name.partition("@")[0] in SERVERS
        command = None if row is None or not has_server else cast(Any, row)[command_key(name)]
        if row is not None and command is not None:
            replicas, start = row["replicas"] or 1, start_command(name)
            hosts = [host_of(REPLICA, number) for number in range(replicas)]
            routes = start.router_words(router, hosts) if router is not None and replicas > 1 else None
            first, *others = start.node_words(shell.split(command))
            first += LISTENING if routes else ()
            row_printed: documents.PlanCommand = {
                "engine": name, "gpu": row["gpu"], "replicas": replicas, "command": shell.join(first),
                "nodes": [shell.join(words) for words in (first, *others)] if others else None,
                "router": None if routes is None else shell.join(routes),
            }  # fmt: skip
            printed.append(row_printed)
    return printed


def close_price(rows: Sequence[documents.PlanRow], best: documents.PlanRow | None, key: Ranking) -> Note | None:
    """A note if the price decides between two kinds of device by less than is known of the ratio of their speeds."""
    others: list[Any] = [row for row in rows if row["fits"] and best is not None and row["gpu"] != best["gpu"]]
    if best is None or key == "num_devices" or not others:
        return None
    known: Any = best
    second = min(others, key=lambda row: row[key])
    lows = [(row["tokens_per_second_low"] or 0.0) / row["tokens_per_second"] for row in (known, second)]
    factor = exp(hypot(*map(log, lows))) if all(lows) else inf
    ratio = second[key] / (known[key] or inf)
    if not 0 < ratio < factor:
        return None
    text = f"{second['gpu']} costs {ratio - 1:.0%} more than {known['gpu']}, and the ratio of their speeds is known"
    return Note("plans", "close-price", f"{text} {f'to {factor - 1:.0%}' if factor < WIDEST_RANGE else 'less closely'}")


def given_up(rows: Sequence[documents.PlanRow], best: documents.PlanRow | None, key: Ranking) -> str | None:
    """What a row that is ranked by its cost per token gives up: the fastest other row, and what it costs.

    None if no other row is much faster, if rows are ranked by something else, or if nobody waits for a token, as in a
    job with a deadline.
    """
    if best is None or key != "cost_per_million_output_tokens" or best["ttft_seconds"] is None:
        return None
    known: Any = best  # a row that fits has its times and its cost
    faster: list[tuple[float, Any, str]] = [
        (time / known[name], row, f"{title} {seconds_text(time)} instead of {seconds_text(known[name])}")
        for row in rows
        for title, name in _TIMES.items()
        if row["fits"] and (time := row[name] or inf) * _LONGER < known[name]
    ]
    if not faster:
        return None
    _, row, times = min(faster, key=lambda one: one[0])
    where = row["gpu"] if row["engine"] == best["engine"] else f"{row['gpu']} with {row['engine']}"
    return f"{where}: {times}, for {row[key] / known[key]:.2g} times the cost per token"
