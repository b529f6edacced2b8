"""`kvcalc plan --trace`: the requests of a trace instead of a rate and lengths."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvcalc.errors import UsageError
from kvcalc.units import parse_count, parse_rate

if TYPE_CHECKING:
    from kvcalc.planning.targets import Targets
    from kvcalc.simulation.planned import PlannedLoad

# Options that say what the trace says, with the values that are no choice.
_SAID = {
    "concurrency": None, "requests_per_second": None, "input_tokens": None, "output_tokens": None, "lengths": None,
    "burstiness": "1", "seed": "0",
}  # fmt: skip


def load_of_trace(given: Mapping[str, Any], targets: Targets) -> tuple[PlannedLoad, Targets]:
    """The requests of --trace, and the targets with its rate. Raises UsageError (exit 2)."""
    from kvcalc.simulation.planned import planned_trace

    for name, default in _SAID.items():
        if given[name] != default:
            raise UsageError(
                f"--trace cannot be combined with --{name.replace('_', '-')}",
                "the trace has the times and the lengths of its requests; --scale-rate changes its rate",
            )
    requests = given["requests"]
    load = planned_trace(
        given["trace"],
        given["trace_format"],
        parse_rate(given["scale_rate"], "--scale-rate"),
        None if requests is None else parse_count(requests, "--requests"),
    )
    return load, load.rated(targets)


def check_no_trace(given: Mapping[str, Any]) -> None:
    """Raise UsageError (exit 2) for an option that needs --trace."""
    for name, default in (("trace_format", None), ("scale_rate", "1")):
        if given[name] != default:
            raise UsageError(f"--{name.replace('_', '-')} needs --trace", "another rate: --requests-per-second")
