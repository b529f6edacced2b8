"""`kvcalc check --live`: what a running server measures, and the times predicted for its rate of requests."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Optional, Union

from kvcalc.cli.question import devices_of, value_of
from kvcalc.errors import UsageError

if TYPE_CHECKING:
    import kvcalc.documents as documents
    from kvcalc.planning.check.live import Metrics, Times
    from kvcalc.planning.check.servers import Server
    from kvcalc.question.question import SpeedQuestion

_REQUESTS = 1000


def live_metrics(given: Mapping[str, Any], server: "Server") -> "Optional[Metrics]":
    """The metrics that --live names, None without it. They are read before the answer is computed, which takes longer.

    Raises UsageError (exit 2) for a rate that nothing is predicted for.
    """
    source = given["live"]
    if given["requests_per_second"] is not None:
        if source is None:
            hint = "capacity.requests_per_second is the largest rate that the server sustains"
            raise UsageError("--requests-per-second is the rate of the server in --live", hint)
        if given["input_tokens"] is None:
            hint = "--input-tokens 2k --output-tokens 250"
            raise UsageError("--requests-per-second needs the lengths of requests", hint)
    if source is None:
        return None
    from kvcalc.planning.check.live import read_live

    return read_live(server.reader.engine, source)


def live_part(
    given: Mapping[str, Any], server: "Server", document: "documents.Check", metrics: "Metrics", speed: "SpeedQuestion"
) -> "documents.Live":
    """The `live` part of the document."""
    from kvcalc.planning.check.live import compare

    times = _times(given, server, document, speed)
    return compare(document, metrics, value_of(given, "prefix_hit_rate"), times)


def _times(
    given: Mapping[str, Any], server: "Server", document: "documents.Check", speed: "SpeedQuestion"
) -> Union["Times", str]:
    """The mean times at the rate of the server, and the upper ends of their ranges; or why they are not predicted."""
    from kvcalc.planning.plan.load_curve import question_of_command
    from kvcalc.planning.plan.planned import PlannedLoad
    from kvcalc.planning.plan.targets import Targets
    from kvcalc.question.request_lengths import one_length

    lengths = [value_of(given, name) for name in ("input_tokens", "output_tokens")]
    rate, capacity, devices = value_of(given, "requests_per_second"), document["capacity"], devices_of(given)
    if lengths[0] is None or rate is None:
        return f"needs {'' if lengths[0] else 'lengths and '}--requests-per-second"
    if capacity is None or devices is None:
        return "the speed is not known"
    question = question_of_command(server, devices, None, speed, value_of(given, "acceptance_length"))
    targets = Targets(None, rate / document["command"]["copies"])
    load = PlannedLoad(one_length(*lengths), seed=value_of(given, "seed"), router="round-robin")
    estimated, slower = (load.run(question, targets, 1, _REQUESTS, step) for step in (1.0, capacity["step_factor"]))
    if estimated.backlog_seconds is not None:
        return "the server does not keep up with this rate"
    means = {metric: (estimated.times[metric]["mean"], slower.times[metric]["mean"]) for metric in ("ttft", "tpot")}
    factors = {"ttft": capacity["ttft_factor"], "tpot": 1.0}
    return {
        f"{metric}_mean_seconds": (mean, high * factors[metric])
        for metric, (mean, high) in means.items()
        if mean and high
    }
