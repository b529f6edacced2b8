"""Human output of the speed: a decode step with its parts and its range, a prefill, serving, and drafted tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvcalc.output.human.console import Console
from kvcalc.output.human.figures import UNKNOWN_RANGE, byte_rate, count, duration, percent, rate, size
from kvcalc.output.human.tables import Text, plain_table

if TYPE_CHECKING:
    import kvcalc.documents as documents


def print_speed(speed: documents.Throughput, workload: documents.Workload, console: Console) -> None:
    """Print the `throughput` part of a document."""
    step, tokens = speed["decode_step_seconds"], speed["decode_tokens_per_second"]
    spread = _range(speed["low_seconds"], speed["high_seconds"])
    bound = f" ({spread}), bound by {name_of_part(speed['bound_by'])}"
    console.print(Text.assemble(("decode step", "bold"), "  ", (duration(step), "bold"), bound))
    table = plain_table("", ">", ">")
    parts: Any = speed["parts"]
    for key, seconds in parts.items():
        if seconds:
            table.add_row(f"  {name_of_part(key.removesuffix('_seconds'))}", duration(seconds), f"{seconds / step:.0%}")
    table.add_row("  ideal roofline", duration(speed["roofline_decode_step_seconds"]), "", style="dim")
    console.print(table)
    each = batch = ""
    if workload["batch_size"] > 1:
        each = f", {rate(speed['tokens_per_second_per_sequence'])} per sequence"
        batch = f"{count(workload['batch_size'])} x "
    prefill = f"prefill of {batch}{count(workload['context_tokens'])} tokens {duration(speed['prefill_seconds'])}"
    console.print(f"{rate(tokens)} tokens/s{each}; {prefill}")
    if speed["host"] is not None:
        _host(speed["host"], step, console)
    if speed["serving"] is not None:
        _serving(speed["serving"], console)
    if "kv_transfer" in speed:
        _transfer(speed["kv_transfer"], console)
    if speed["energy"] is not None:
        _energy(speed["energy"], console)
    if speed["calibration"] is not None:
        from kvcalc.output.human.calibration import print_calibration

        console.print()
        print_calibration(speed["calibration"], console)
    console.print()


def print_drafting(drafting: documents.Speculative, speed: documents.Throughput | None, console: Console) -> None:
    """Print the `speculative` part of a document. `speed` is its throughput if it is known."""
    by = drafting["method"] + (f" ({drafting['draft_model']})" if drafting["draft_model"] else "")
    accepted = f", acceptance length {drafting['acceptance_length']:g}" if drafting["acceptance_length"] else ""
    drafted = f"{count(drafting['num_draft_tokens'])} drafted per step"
    console.print(Text.assemble(("speculative decoding", "bold"), f"  {by}, {drafted}{accepted}"))
    table = plain_table("", ">", "")
    if drafting["speedup"] is not None and speed is not None:
        step = speed["decode_step_seconds"]
        for label, seconds in (("checking", drafting["verify_seconds"]), ("drafting", drafting["draft_seconds"])):
            if seconds:
                table.add_row(f"  {label}", duration(seconds), f"{seconds / step:.0%} of the step")
        plain = duration(drafting["seconds_without_drafting"] or 0.0)
        each = duration(step / (drafting["acceptance_length"] or 1.0))
        table.add_row("  per output token", each, f"{plain} without drafting: {rate(drafting['speedup'])}x")
        batch = drafting["break_even_batch"]
        pays = "drafting pays at any batch" if batch is None else "drafting pays below it"
        table.add_row("  break-even batch", "none" if batch is None else count(batch), pays)
    if drafting["weights_bytes"]:
        table.add_row("  weights", size(drafting["weights_bytes"]), "per device")
    if drafting["cache_bytes"]:
        table.add_row("  KV cache", size(drafting["cache_bytes"]), "per device")
    console.print(table)
    console.print()


def _host(host: documents.HostSpeed, step: float, console: Console) -> None:
    rate = f"{host['bandwidth_bytes_per_second'] / 1e9:g} GB/s"
    line = f"{duration(host['decode_seconds'])} of the step ({host['decode_seconds'] / step:.0%}), memory of {rate}"
    console.print(Text.assemble(("host", "bold"), f"  {line}"))


def _transfer(transfer: documents.KvTransfer, console: Console) -> None:
    rate = byte_rate(transfer["bandwidth_bytes_per_second"])
    link = f"{transfer['link']}, {rate}" if transfer["link"] else rate
    line = f"{duration(transfer['seconds'])} for {size(transfer['bytes_per_device'])} per device ({link})"
    if transfer["share_of_ttft"] is not None:
        line += f", {percent(transfer['share_of_ttft'])} of the time to the first token"
    console.print(Text.assemble(("KV transfer", "bold"), f"  {line}"))


def _energy(energy: documents.Energy, console: Console) -> None:
    spread = _range(energy["low_joules_per_token"], energy["high_joules_per_token"], rate)
    line = f"{rate(energy['joules_per_token'])} J per output token ({spread}), "
    line += f"{rate(energy['kwh_per_million_tokens'])} kWh per million, {rate(energy['watts'])} W"
    console.print(Text.assemble(("energy", "bold"), f"  {line}"))


def _range(low: float | None, high: float | None, text: Callable[[float], str] | None = None) -> str:
    text = text or duration
    return UNKNOWN_RANGE if low is None or high is None else f"{text(low)} to {text(high)}"


def _serving(serving: documents.Serving, console: Console) -> None:
    console.print()
    requests = f"{count(serving['concurrency'])} requests of {count(serving['input_tokens'])} + "
    requests += f"{count(serving['output_tokens'])} tokens"
    texts = serving["input_lengths"], serving["output_lengths"]
    if all(each.isdigit() for each in texts):
        requests += ", varying by a third"
    elif not all(each.startswith("fixed:") for each in texts):
        requests += f", {' + '.join(texts)}"
    requests += ", from the first request on" if serving["is_benchmark"] else ""
    console.print(Text.assemble(("serving", "bold"), f"  {requests}"))
    table = plain_table("", ">", "")
    spread = _range(serving["tpot_low_seconds"], serving["tpot_high_seconds"])
    table.add_row("  time per output token", duration(serving["tpot_seconds"]), spread)
    spread = _range(serving["ttft_low_seconds"], serving["ttft_high_seconds"])
    table.add_row("  time to first token", duration(serving["ttft_seconds"]), spread)
    each = _range(serving["tokens_per_second_low"], serving["tokens_per_second_high"], rate)
    if serving["tokens_per_second_per_device"] != serving["tokens_per_second"]:
        each += f"; {rate(serving['tokens_per_second_per_device'])} per device"
    table.add_row("  output tokens/s", rate(serving["tokens_per_second"]), each)
    console.print(table)


def name_of_part(part: str) -> str:
    """The name of a part of a step: that of its key without the unit, in words."""
    return "KV cache" if part == "kv" else part
