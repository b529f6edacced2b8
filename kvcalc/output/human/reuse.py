"""Human output of a cache that is used again: shared prefixes, sessions, and tiers of memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcalc.output.human.console import Console
from kvcalc.output.human.figures import byte_rate, count, duration, percent, size
from kvcalc.output.human.tables import Text, plain_table

if TYPE_CHECKING:
    import kvcalc.documents as documents

# With more turns, only the first ones and the last one are shown.
_MOST_ROWS = 6


def print_reuse(reuse: documents.Reuse, fit: documents.Fit | None, console: Console) -> None:
    """Print the `reuse` part of a document. `fit` is its part if there is one."""
    if reuse["prefix"] is not None:
        _prefix(reuse["prefix"], fit, console)
    if reuse["sessions"] is not None:
        _sessions(reuse["sessions"], console)
    if reuse["tiers"] is not None:
        _tiers(reuse["tiers"], console)


def _prefix(prefix: documents.ReusePrefix, fit: documents.Fit | None, console: Console) -> None:
    console.print(Text.assemble(("shared prefix", "bold"), f"  {count(prefix['prefix_tokens'])} tokens"))
    table = plain_table("", ">", "")
    step = prefix["block_tokens"]
    blocks = f"in steps of {count(step)} tokens" if step > 1 else ""
    table.add_row("  found in every prompt", f"{count(prefix['found_tokens'])} tokens", blocks)
    table.add_row("  kept once", f"{count(prefix['shared_tokens'])} tokens", "")
    table.add_row("  saved for the batch", size(prefix["saved_bytes"]), "per device")
    table.add_row("  one more request", size(prefix["next_request_bytes"]), "per device")
    if prefix["more_requests"] is not None:
        alone = f"{count(prefix['max_batch_size_alone'])} without the prefix"
        table.add_row("  largest batch", count(None if fit is None else fit["max_batch_size"]), alone)
    console.print(table)
    console.print()


def _sessions(sessions: documents.ReuseSessions, console: Console) -> None:
    console.print(Text.assemble(("sessions", "bold"), f"  of {count(sessions['turns'])} turns"))
    table = plain_table("turn", ">prompt", ">reused", ">computed", ">kept after it")
    rows = sessions["rows"]
    shown = rows if len(rows) <= _MOST_ROWS else [*rows[: _MOST_ROWS - 1], rows[-1]]
    for row in shown:
        if row is rows[-1] and len(shown) < len(rows):
            table.add_row("...", "", "", "", "")
        tokens = map(count, (row["prompt_tokens"], row["reused_tokens"], row["computed_tokens"]))
        table.add_row(count(row["turn"]), *tokens, size(row["idle_bytes"]))
    console.print(table)
    text = f"{percent(sessions['reuse_rate'])} of all prompt tokens are reused"
    last, alone = sessions["prefill_seconds"], sessions["prefill_seconds_alone"]
    if last is not None and alone is not None:
        text += f"; last prefill {duration(last)} instead of {duration(alone)}"
    console.print(text)
    if sessions["kept_sessions"] is not None:
        line = f"the cache keeps {count(sessions['kept_sessions'])} idle sessions of {count(sessions['idle_tokens'])} "
        line += f"tokens, {count(sessions['kept_sessions_beside_batch'])} while the batch runs"
        console.print(line)
    console.print()


def _tiers(tiers: documents.ReuseTiers, console: Console) -> None:
    unit, tokens = count(tiers["unit_tokens"]), count(tiers["session_tokens"])
    beside = f" in addition to the prefix of {size(tiers['prefix_bytes'])}" if tiers["prefix_bytes"] else ""
    units = f"in units of {unit} token" + ("s" if tiers["unit_tokens"] > 1 else "")
    line = f"{tokens} tokens take {size(tiers['session_bytes'])}{beside}, {units}"
    console.print(Text.assemble(("offload", "bold"), f"  {line}"))
    table = plain_table("", ">size", ">sessions", ">tokens", ">rate", ">load", ">pays from")
    for row in tiers["rows"]:
        seconds, rate, least = row["load_seconds"], row["bandwidth_bytes_per_second"], row["break_even_tokens"]
        known = seconds is not None and tiers["prefill_seconds"] is not None
        pays = "-" if not known else "never" if least is None else f"{count(least)} tokens"
        if least == tiers["unit_tokens"]:
            pays = "always"
        cells = [size(row["memory_bytes"]), count(row["sessions"]), count(row["tokens"])]
        load = "-" if seconds is None else duration(seconds)
        table.add_row(row["name"], *cells, "-" if rate is None else byte_rate(rate), load, pays)
    console.print(table)
    if tiers["prefill_seconds"] is not None:
        console.print(f"computing {tokens} tokens again takes {duration(tiers['prefill_seconds'])}")
    console.print()
