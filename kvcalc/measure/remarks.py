"""What must be said about runs that were taken: which figures are not to be trusted, and why."""

from __future__ import annotations

from typing import Any

from kvcalc.measure.timing import MOST_SPREAD


def remarks_on_runs(runs: list[dict[str, Any]]) -> list[str]:
    """A line for every run whose times are no measure of the device's memory, or spread too wide."""
    found = []
    for run in runs:
        whose = run["attention"]
        if len({(r["context_tokens"], r["batch_size"]) for r in runs}) > 1:
            whose += f" at {run['context_tokens']:,} tokens, batch {run['batch_size']}"
        share = run["fraction_of_roof"]["attention_core"]
        if share is not None and share > 1:
            found.append(
                f"{whose}: its cache of {run['held_bytes']:,} bytes was read faster than memory is: from the "
                "processor's own cache"
            )
        for what, key in (("step", "decode_step_seconds"), ("attention core", "attention_core_seconds")):
            times = run[key]
            if times is not None and times["spread"] > MOST_SPREAD:
                found.append(
                    f"{whose}: the times of its {what} spread by {times['spread']:.0%} of their median and are not to "
                    "be trusted: something else was running"
                )
    return found
