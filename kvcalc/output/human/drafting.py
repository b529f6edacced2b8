"""Human output of drafted tokens: what a step costs with them, and when they pay."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.text import Text

from kvcalc.output.human.console import count, plain_table, size
from kvcalc.output.human.speed import duration, number


def print_drafting(document: dict[str, Any], console: Console) -> None:
    """Print the `speculative` part of a document. The document must have one."""
    drafting = document["speculative"]
    by = drafting["method"] + (f" ({drafting['draft_model']})" if drafting["draft_model"] else "")
    accepted = f", acceptance length {drafting['acceptance_length']:g}" if drafting["acceptance_length"] else ""
    drafted = f"{count(drafting['num_draft_tokens'])} drafted per step"
    console.print(Text.assemble(("speculative decoding", "bold"), f"  {by}, {drafted}{accepted}"))
    table = plain_table("", ">", "")
    if drafting["speedup"] is not None:
        step = document["throughput"]["decode_step_seconds"]
        for label, seconds in (("checking", drafting["verify_seconds"]), ("drafting", drafting["draft_seconds"])):
            if seconds:
                table.add_row(f"  {label}", duration(seconds), f"{seconds / step:.0%} of the step")
        plain = duration(drafting["seconds_without_drafting"])
        each = duration(step / drafting["acceptance_length"])
        table.add_row("  per output token", each, f"{plain} without drafting: {number(drafting['speedup'])}x")
        batch = drafting["break_even_batch"]
        table.add_row("  stops paying at", "no batch" if batch is None else f"batch {count(batch)}", "")
    if drafting["weights_bytes"]:
        table.add_row("  weights", size(drafting["weights_bytes"]), "per device")
    if drafting["cache_bytes"]:
        table.add_row("  KV cache", size(drafting["cache_bytes"]), "per device")
    console.print(table)
    console.print()
