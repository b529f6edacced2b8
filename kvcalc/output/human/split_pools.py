"""Human output of prefill and decode on separate instances."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvcalc.output.human.console import Console
from kvcalc.output.human.figures import byte_rate, count, duration, percent, requests_per_second, size, split
from kvcalc.output.human.styled import Text

if TYPE_CHECKING:
    import kvcalc.documents as documents


def pools_text(pools: documents.SplitPools) -> str:
    """Both pools, such as `2 x tp 4 P + tp 8 D`."""
    return f"{_instances(pools['prefill'])} P + {_instances(pools['decode'])} D"


def print_pools(row: Any, console: Console) -> None:
    """Print the parts of the time to the first token, the transfer, and how busy the pools are."""
    pools = row["disaggregated"]
    parts, transfer = pools["ttft_parts"], pools["transfer"]
    text = " + ".join(f"{key.removesuffix('_seconds').replace('_', ' ')} {duration(parts[key])}" for key in parts)
    console.print()
    console.print(Text.assemble(("TTFT", "bold"), f"  {duration(row['ttft_seconds'])} = {text}"))
    link = transfer["link"] or byte_rate(transfer["bandwidth_bytes_per_second"])
    line = f"{size(transfer['bytes_per_device'])} of {size(transfer['request_bytes'])} on the busiest device ({link})"
    console.print(Text.assemble(("KV transfer", "bold"), f"  {line}"))
    for role in ("prefill", "decode"):
        pool = pools[role]
        busy = f"{percent(pool['utilization'])} of {requests_per_second(pool['max_requests_per_second'])}"
        line = f"{_instances(pool)}: {busy}, {count(pool['requests_held'])} requests in each cache"
        console.print(Text.assemble((role, "bold"), f"  {line}"))


def _instances(pool: documents.SplitPool) -> str:
    each = split(pool) or "tp 1"
    return f"{pool['instances']} x {each}" if pool["instances"] > 1 else each
