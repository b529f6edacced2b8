"""Human output of `kvcalc check`: whether the server starts, its memory as `kvcalc fit` shows it, and its load."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvcalc.output.human import fit
from kvcalc.output.human.console import Console
from kvcalc.output.human.figures import count, duration, requests_per_second
from kvcalc.output.human.styled import Text

if TYPE_CHECKING:
    import kvcalc.documents as documents


def render(document: documents.Check, console: Console) -> None:
    """Print the check document."""
    command, requests, capacity = document["command"], document["requests"], document["capacity"]
    if command["service"]:
        console.print(Text(command["service"], style="bold"))
    refused = requests and requests["refused"]
    verdict = ("starts", "bold green") if document["starts"] else ("does not start", "bold red")
    console.print(Text.assemble(verdict, "" if document["starts"] else f": {document['reason']}"))
    if requests and refused:
        console.print(Text.assemble(("refuses", "bold red"), f" requests of {_lengths(requests)}: {refused}"))
    if document["changes"]:
        changes = " or ".join(f"{change['option']} {change['value']}" for change in document["changes"])
        console.print(f"it starts with {changes}")
    console.print()
    memory: Any = {**document, "smallest": None, "offload": None}
    fit.render(memory, console)
    if requests and not refused:
        fitting = "any number" if requests["max_requests"] is None else count(requests["max_requests"])
        console.print(f"{fitting} requests of {_lengths(requests)} fit at once")
    if capacity is not None:
        console.print(Text.assemble("sustains ", (requests_per_second(capacity["requests_per_second"]), "bold")))
        for metric, mean, most in (
            ("TTFT", capacity["ttft_mean_seconds"], capacity["ttft_p99_seconds"]),
            ("TPOT", capacity["tpot_mean_seconds"], capacity["tpot_p99_seconds"]),
        ):
            console.print(f"{metric} there: mean {duration(mean)}, p99 {duration(most)}")
        if capacity["limited_by"]:
            console.print(f"beyond that: {capacity['limited_by']}", style="dim")


def _lengths(requests: documents.CheckRequests) -> str:
    return f"{count(requests['input_tokens'])} + {count(requests['output_tokens'])} tokens"
