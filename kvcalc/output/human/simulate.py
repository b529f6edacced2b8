"""Human output of `kvcalc simulate`: the rates, a table of times, and the replicas over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvcalc.output.human.console import Console
from kvcalc.output.human.figures import (
    OVERLOADED,
    count,
    duration,
    duration_or_overloaded,
    name_engine,
    rate,
    requests_per_second,
    sessions_text,
    users_text,
)
from kvcalc.output.human.fit import describe_devices
from kvcalc.output.human.tables import Text, plain_table

if TYPE_CHECKING:
    import kvcalc.documents as documents

NAMES = {
    "ttft": "TTFT", "tpot": "TPOT", "itl": "between tokens", "e2e": "whole request", "queue": "in the queue"
}  # fmt: skip
# These times include that in the queue.
_GROWING = ("ttft", "e2e", "queue")
_HEIGHT, _GUTTER = 4, 11
_SHOWN = ("mean_seconds", "p50_seconds", "p90_seconds", "p99_seconds", "max_seconds")


def render(document: documents.Simulate, console: Console) -> None:
    """Print the simulation."""
    engine, hardware, results = document["engine"], document["hardware"], document["results"]
    console.print(Text.assemble((document["model"]["name"], "bold"), f" on {describe_devices(hardware, engine)}"))
    drafts = f", {engine['tokens_per_step']:g} tokens per step" if engine["tokens_per_step"] > 1 else ""
    console.print(f"{name_engine(engine)}{drafts}, {describe_load(document)}")
    if document["load"]["router"] != "round-robin" and hardware["replicas"] > 1:
        console.print(f"{document['load']['router']} router")
    console.print()
    console.print(
        Text.assemble(
            (f"{rate(results['requests_per_second'])} requests/s", "bold"),
            f", {rate(results['tokens_per_second'])} tokens/s over {duration(results['duration_seconds'])}",
        )
    )
    if results["good_requests"] is not None:
        share = results["good_requests"] / results["counted_requests"]
        good = rate(results["goodput_requests_per_second"])
        console.print(f"{share:.1%} of the requests meet {describe_limits(document['limits'])}: {good} requests/s")
    console.print()
    table = plain_table("", *(f">{name.removesuffix('_seconds')}" for name in _SHOWN), optional=("max", "p90"))
    for row in shown_times(document):
        table.add_row(NAMES[row["metric"]], *(duration_or_overloaded(row[name]) for name in _SHOWN))
    console.print(table)
    console.print()
    for line in describe_state(document):
        console.print(line)
    if "prefill" in document:
        console.print(_prefill(document["prefill"]))
    _timeline(document, console)


def shown_times(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows of times. Those that grow with the queue are OVERLOADED if it has no end."""
    rows = [dict(row) for row in document["times"]]
    for row in rows:
        if not document["results"]["keeps_up"] and row["metric"] in _GROWING:
            row.update(dict.fromkeys(_SHOWN, OVERLOADED))
    return rows


def describe_load(document: Mapping[str, Any]) -> str:
    """The load as text. The rate of users, and how many of their requests are in flight, are those of the results."""
    load = document["load"]
    if load["arrivals"] == "trace":
        how = f"trace {load['trace']}" + (
            f" at {load['scale_rate']:g} times its rate" if load["scale_rate"] != 1 else ""
        )
    elif load["arrivals"] == "users":
        how = users_text(load["users"], load["think_seconds"], document["results"]["requests_per_second"])
    elif load["arrivals"] == "closed_loop":
        how = "1 client" if load["concurrency"] == 1 else f"{count(load['concurrency'])} clients"
    else:
        how = requests_per_second(load["requests_per_second"])
        how += "" if load["arrivals"] == "poisson" else f" with burstiness {load['burstiness']:g}"
    lengths = lengths_text(load)
    requests = "1 request" if load["requests"] == 1 else f"{count(load['requests'])} requests"
    again = load["distinct_prompts"]
    if again is not None and again < load["requests"]:
        requests += " of 1 prompt" if again == 1 else f" of {count(again)} prompts in turn"
    start = " on a server that has just started" if load["is_cold"] else ""
    kind = ", as a benchmark" if load["is_benchmark"] else ""
    return f"{requests}, {how}, {lengths}{start}{kind}"


def lengths_text(load: Mapping[str, Any]) -> str:
    """The mean lengths of a simulated load, and how they vary."""
    texts = load["prompt_tokens"], load["answer_tokens"]
    text = f"{load['mean_prompt_tokens']:,.0f} tokens in, {load['mean_answer_tokens']:,.0f} out"
    if None not in texts and all(each.isdigit() for each in texts):
        text = f"{int(texts[0]):,} tokens in, {int(texts[1]):,} out, varying by a third"
    turns, growth = load["session_turns"], load["session_growth_tokens"]
    return text if turns is None else f"{text}, {sessions_text(turns, growth)}"


def _prefill(prefill: documents.SimulatePrefill) -> str:
    """The prefill instances, and the stages of a request there."""
    parts = [
        f"queue {duration(prefill['mean_queue_seconds'])}", f"prefill {duration(prefill['mean_prefill_seconds'])}",
        f"transfer {duration(prefill['mean_transfer_seconds'])}",
    ]  # fmt: skip
    each = f"{count(prefill['replicas'])} x tp {prefill['tensor_parallel_size']}"
    return f"prefill instances: {each}, busy {prefill['busy_share']:.0%} of the time; means: {', '.join(parts)}"


def describe_limits(limits: Mapping[str, Any]) -> str:
    """The limits of a good request as text."""
    parts = [
        f"{name} <= {duration(limits[key])}"
        for name, key in (("TTFT", "max_ttft_seconds"), ("TPOT", "max_tpot_seconds")) if limits[key] is not None
    ]  # fmt: skip
    return " and ".join(parts)


def describe_state(document: Mapping[str, Any]) -> list[str]:
    """How many requests run and wait, how full the cache becomes, and how many requests are preempted."""
    engine, results = document["engine"], document["results"]
    running, waiting = rate(results["mean_running_requests"]), rate(results["mean_waiting_requests"])
    lines = [] if results["keeps_up"] else ["overloaded: the queue grows without bound, and TTFT with it"]
    lines += [
        f"on average {running} requests run and {waiting} wait; steps run {results['busy_share']:.0%} of the time"
    ]
    if engine["blocks"] is not None:
        used = results["most_used_blocks"] / engine["blocks"]
        name = "tokens" if engine["scheduler"] == "prefill first" else "blocks"
        # The chart shows the sum over the replicas.
        whose = " of a replica" if document["hardware"]["replicas"] > 1 else ""
        lines.append(f"at most {used:.0%} of {count(engine['blocks'])} {name}{whose} are used")
    if results["counted_requests"] < results["requests"]:
        first = count(results["requests"] - results["counted_requests"])
        lines.append(f"times leave out the warm-up, the first {first} requests (--benchmark counts them)")
    if results["preemptions"]:
        lines.append(
            f"{count(results['preempted_requests'])} requests are preempted, {count(results['preemptions'])} times"
        )
    return lines


def _timeline(document: documents.Simulate, console: Console) -> None:
    """Small charts of the queue, the running requests and the used blocks."""
    rows: list[Any] = [*document["timeline"]]
    charts = [("waiting", "waiting_requests"), ("running", "running_requests"), ("blocks used", "used_blocks")]
    for title, key in charts:
        values = [row[key] for row in rows]
        if None in values or not any(values):
            continue
        console.print()
        for line in draw_columns(title, values, duration(rows[-1]["seconds"]), console.width - _GUTTER - 2):
            console.print(line, soft_wrap=True)


def draw_columns(title: str, values: Sequence[int], end: str, width: int) -> list[str]:
    """The lines of a chart of `values` in plain characters, at least one of them above 0: a column of marks each.

    If there are more than `width`, each column shows the largest of several. `end` labels the end of the horizontal
    axis.
    """
    most, each = max(values), -(-len(values) // max(width, 1))
    values = [max(values[place : place + each]) for place in range(0, len(values), each)]
    lines = [f"{'':>{_GUTTER}}  {title}"]
    for height in range(_HEIGHT, 0, -1):
        # A value above 0 has a mark in the lowest row.
        marks = "".join("#" if value * _HEIGHT > (height - 1) * most else " " for value in values)
        label = f"{most:,}" if height == _HEIGHT else ""
        lines.append(f"{label:>{_GUTTER}} |{marks.rstrip()}")
    lines.append(f"{'0':>{_GUTTER}} +{'-' * len(values)}")
    lines.append(f"{'':>{_GUTTER}}  0{end:>{len(values) - 1}}")
    return lines
