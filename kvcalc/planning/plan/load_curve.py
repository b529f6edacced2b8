"""Times over the load: what a report draws for a plan, a server or a simulation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvcalc.model.spec import ModelSpec
from kvcalc.planning.check.asked import asked_by
from kvcalc.planning.check.servers import Server
from kvcalc.planning.plan.planned import PlannedLoad, simulated_of
from kvcalc.planning.plan.targets import Simulated, Targets
from kvcalc.question.question import Question, SpeedQuestion
from kvcalc.throughput.hardware import Devices

if TYPE_CHECKING:
    import kvcalc.documents as documents

Row = Mapping[str, Any]
"""A point: `load`, and for `ttft` and `tpot` the `mean` and the `p99` in seconds. They are None if the server is
overloaded: its queue grows without bound, so the times depend on how long one looks."""

# The loads of a curve, as shares of the one that was asked for, and the requests of each simulation. Open loads grow
# until the server is overloaded. The clients of a closed loop wait for it, so their curve has no such end.
_OPEN = (0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 4.0)
_CLOSED = (0.2, 0.4, 0.6, 0.8, 1.0, 1.2, 1.5)
_REQUESTS = 1000


def curve_of_server(load: PlannedLoad, question: Question, targets: Targets, replicas: int) -> list[Row]:
    """The times of replicas of a server over the rate of requests, or over the clients of a closed loop.

    `question` has the devices of one replica, and `targets` have the load that was asked for.
    """
    load = load._replace(recording=None, num_requests=None)
    if question.devices is not None:
        devices = question.devices
        question = question._replace(devices=devices._replace(num_devices=devices.num_devices * replicas))

    def run(share: float) -> tuple[float, Simulated]:
        if targets.clients is not None:
            part = targets.of_share(max(share, replicas / targets.clients))
            return part.clients or 1, load.run(question, part, replicas, _REQUESTS, 1.0)
        rate = share * (targets.requests_per_second or 1.0)
        return rate, load.run(question, targets._replace(requests_per_second=rate), replicas, _REQUESTS, 1.0)

    return _curve(run, _OPEN if targets.clients is None else _CLOSED)


def curve_of_simulation(ask: Callable[[float], documents.Simulate], *, is_open: bool) -> list[Row]:
    """The times of a simulation over its load. `ask` answers for a share of the load that was asked for."""

    def run(share: float) -> tuple[float, Simulated]:
        answer = ask(share)
        load = answer["load"]
        rate = load["concurrency"] or load["requests_per_second"] or answer["results"]["requests_per_second"]
        return rate, simulated_of(answer, is_open=is_open)

    return _curve(run, _OPEN if is_open else _CLOSED)


def _curve(run: Callable[[float], tuple[float, Simulated]], shares: Sequence[float]) -> list[Row]:
    rows: list[Row] = []
    for share in shares:
        load, simulated = run(share)
        if rows and load <= rows[-1]["load"]:
            continue
        keeps_up = simulated.backlog_seconds is None
        rows.append({
            "load": load,
            **{
                f"{metric}_{statistic}_seconds": simulated.times[metric][statistic] if keeps_up else None
                for metric in ("ttft", "tpot") for statistic in ("mean", "p99")
            },
        })  # fmt: skip
        if not keeps_up:
            break
    return rows


def question_of_command(
    server: Server, devices: Devices, model: ModelSpec | None, speed: SpeedQuestion | None,
    acceptance_length: float | None,
) -> Question:  # fmt: skip
    """The question about the command of a server. `model` replaces the one that the command names."""
    question, _ = asked_by(server.read(), server.reader, devices, speed, acceptance_length, server.num_devices)
    served = question.speed_asked._replace(input_tokens=None, output_tokens=None, concurrency=None)
    if model is not None:
        question = question._replace(model=model)
    return question._replace(speed=served)
