"""The lines of `kvcalc estimate --explain`: where each figure comes from, with its numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvcalc.output.human.console import Console
from kvcalc.output.human.figures import count, duration, percent, size
from kvcalc.output.human.sources import print_reserve, print_sources
from kvcalc.units import format_parameters


def print_explained(document: Mapping[str, Any], console: Console) -> None:
    """Print the formulas of the cache and the weights, what is exact and estimated, and the evidence of the speed."""
    cache, weights = document["kv_cache"], document["weights"]
    print_sources(document["sources"], document["engine"], console)
    console.print()
    for row in cache["formulas"]:
        console.print(f"  cache of {count(row['num_layers'])} layers = {row['symbols']}")
        console.print(f"    = {row['numbers']} = {count(row['bytes'])} bytes, exact")
    if cache["total_bytes"] != cache["stored_bytes"]:
        more = cache["total_bytes"] - cache["stored_bytes"]
        console.print(f"  {document['engine']['name']} allocates {size(cache['total_bytes'])}: {size(abs(more))} "
                      f"{'more' if more > 0 else 'less'} than is stored, exact")  # fmt: skip
    if weights["bytes"] is not None and weights["parameters"]:
        bits = f"{8 * weights['bytes'] / weights['parameters']:.2f} bits each with scales"
        parameters = format_parameters(weights["parameters"])
        console.print(f"  weights = {parameters} parameters, {bits} = {count(weights['bytes'])} bytes, exact")
    if document["fit"] is not None and document["fit"]["lines"]:
        print_reserve(document, console)
    if document["throughput"] is not None:
        _speed(document, console)
    console.print()


def _speed(document: Mapping[str, Any], console: Console) -> None:
    speed, found = document["throughput"], document["throughput"]["evidence"]
    console.print()
    parts = [
        f"{name.removesuffix('_seconds').replace('kv', 'cache')} {duration(seconds)}"
        for name, seconds in speed["parts"].items() if seconds
    ]  # fmt: skip
    console.print(f"  step = {' + '.join(parts)} = {duration(speed['decode_step_seconds'])}, estimated")
    reads = size(document["kv_cache"]["decode_read_bytes"])
    console.print(f"    it reads {reads} of cache; at full bandwidth {duration(speed['roofline_decode_step_seconds'])}")
    serving = speed["serving"]
    if serving is not None:
        tokens = f"{count(serving['running_requests'])} running requests / TPOT {duration(serving['tpot_seconds'])}"
        console.print(
            f"  serving = {tokens}, with the prompts of the others = {serving['tokens_per_second']:,.0f} tokens/s"
        )
    console.print(f"  fitted to {count(found['measured_times'])} measured times:")
    for source in found["sources"]:
        console.print(f"    {source}")
    if found["median_error"] is not None:
        error = f"median error {percent(found['median_error'])}, mean {percent(found['mean_error'])}"
        console.print(f"  {error}, {percent(found['within_a_quarter'])} within 25 %, with the model's family left out")
    where = found["region"] or "all devices and types"
    ends = f"{found['low_factor']:.2f} to {found['high_factor']:.2f}"
    console.print(f"  range: measured / predicted was {ends} in 8 of 10 ({where})")
    if found["outside"]:
        console.print(f"  no measurement covers {', '.join(found['outside'])}")
