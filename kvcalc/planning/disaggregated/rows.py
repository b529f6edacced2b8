"""The rows of a plan with prefill and decode on separate instances, beside those with both on the same ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from kvcalc.errors import KvcalcError, UsageError
from kvcalc.memory.engines import RELEASE
from kvcalc.notes import Note
from kvcalc.planning.attention_replicas import most_experts
from kvcalc.planning.checkpoint import Checkpoint
from kvcalc.planning.commands import Layout
from kvcalc.planning.disaggregated.commands import Pools, commands_of
from kvcalc.planning.disaggregated.engines import RULES, rules_of
from kvcalc.planning.disaggregated.instances import Instance, buffer_tokens
from kvcalc.planning.disaggregated.search import Instances, Split, find_split
from kvcalc.planning.estimate import Answer
from kvcalc.planning.grouped_notes import RowNote, group_notes
from kvcalc.planning.question import Question
from kvcalc.planning.targets import Targets
from kvcalc.planning.traffic import Kind, Traffic, Trouble, describe_cost, seconds_text
from kvcalc.planning.transfer import check_link

# An instance runs at most so many prompts at once, however many fit.
_MOST_PROMPTS = 256
# Names of the two kinds of row, in sentences.
_AGGREGATED, _SPLIT = "aggregated", "disaggregated"


class SplitRows(NamedTuple):
    """All rows of a plan, those for the same device and engine side by side, and the notes of the added ones."""

    rows: list[dict[str, Any]]
    notes: list[Note]


def check_disaggregated(
    question: Question, engines: Sequence[str], is_asked: bool, transfer: int | str | None
) -> None:  # fmt: skip
    """Raise UsageError (exit 2) for a question whose requests cannot be split between instances, or without a link."""
    if not is_asked:
        raise UsageError("--transfer-bandwidth needs --disaggregate", "leave it out, or add --disaggregate")
    if transfer is None:
        hint = "--transfer-bandwidth infiniband-400g, nvlink, or a rate such as 50GB/s"
        raise UsageError("--disaggregate needs the link between the instances", hint)
    if isinstance(transfer, str):
        check_link(transfer)
    for engine in engines:
        rules_of(engine)
    for value, option in (
        (question.speculative, "--speculative"), (question.reuse, "--prefix-tokens"), (question.images, "--images"),
    ):  # fmt: skip
        if value is not None:
            raise UsageError(f"--disaggregate cannot be combined with {option}", "leave one of them out")
    if question.data_parallel_size > 1 and not most_experts(question.model):
        raise UsageError("--dp: copies of a model without experts are instances of their own", "leave --dp out")


def with_splits(
    traffic: Traffic, kinds: Sequence[Kind], rows: Sequence[dict[str, Any]], checkpoint: Checkpoint,
    transfer: int | str, instances: Instances,
) -> SplitRows:  # fmt: skip
    """The rows of a plan and, for each, one with separate instances: the better one first, and why the other lost."""
    found = [_find(traffic, kind, transfer, instances) for kind in kinds]
    all_rows, about_rows = [], []
    for kind, row, one in zip(kinds, rows, found):
        split, notes = describe_split(traffic, kind, row, one, checkpoint)
        row = {**row, "disaggregated": None, "next_mode": None}
        all_rows += _in_order(row, split, traffic.targets)
        about_rows += [RowNote((kind.engine, kind.gpu.name), note, kind.gpu) for note in notes]
    return SplitRows(all_rows, group_notes(about_rows, [(kind.engine, kind.gpu.name) for kind in kinds]))


def _find(
    traffic: Traffic, kind: Kind, transfer: int | str, instances: Instances
) -> Split | Trouble | KvcalcError:  # fmt: skip
    try:
        return find_split(traffic, kind, transfer, instances)
    except KvcalcError as error:
        return error


def _in_order(row: dict[str, Any], split: dict[str, Any], targets: Targets) -> list[dict[str, Any]]:
    """The better row first. Its `next_mode` says why the other one lost.

    With as many devices, it is the one with more tokens per second, or with a shorter TPOT if both serve a given rate.
    """
    is_rate = targets.requests_per_second is not None

    def rank(one: tuple[dict[str, Any], str]) -> tuple[bool, int, float]:
        found = one[0]["tpot_seconds"] if is_rate else one[0]["tokens_per_second"]
        return not one[0]["fits"], one[0]["num_devices"] or 0, (found or 0.0) * (1 if is_rate else -1)

    (first, _), (second, name) = sorted(((row, _AGGREGATED), (split, _SPLIT)), key=rank)
    if first["fits"]:
        first["next_mode"] = f"{name}: {_why_lost(first, second, is_rate)}"
    return [first, second]


def _why_lost(first: Mapping[str, Any], second: Mapping[str, Any], is_rate: bool) -> str:
    if not second["fits"]:
        return str(second["reason"])
    if second["num_devices"] > first["num_devices"]:
        return f"{second['num_devices']:,} devices instead of {first['num_devices']:,}"
    if is_rate:
        slower, faster = (seconds_text(row["tpot_seconds"]) for row in (second, first))
        return f"as many devices, but TPOT is {slower} instead of {faster}"
    slower, faster = (f"{row['tokens_per_second']:,.0f}" for row in (second, first))
    return f"as many devices, but {slower} tokens per second instead of {faster}"


def describe_split(
    traffic: Traffic, kind: Kind, beside: Mapping[str, Any], found: Split | Trouble | KvcalcError,
    checkpoint: Checkpoint,
) -> tuple[dict[str, Any], list[Note]]:  # fmt: skip
    """The row of two pools, and its notes. `beside` has the keys of a row, and its model, device and engine."""
    row: dict[str, Any] = dict.fromkeys((*beside, "disaggregated", "next_mode"))
    row.update({name: beside[name] for name in ("model", "gpu", "engine")}, price_per_hour=kind.price)
    if not isinstance(found, Split):
        trouble = Trouble(found.message, found.hint) if isinstance(found, KvcalcError) else found
        return {**row, "fits": False, "verdict": "does_not_fit", **trouble._asdict()}, []
    times, rates = found.match.times, found.decode.rates
    held = max(1, rates.held(times.decoding, times.transfer_seconds))
    prompts = _prompts_held(found)
    answers = found.prefill.answer(prompts), found.decode.answer(held)
    pools = _describe_pools(found, answers, (prompts, held))
    tokens_per_second = found.tokens_per_second
    ttft, tpot = found.ttft_range(), found.tpot_range()
    is_tight = any(one.free_bytes(answer)[1] < 0 for one, answer in zip((found.prefill, found.decode), answers))
    row.update(
        fits=True,
        verdict="tight" if is_tight else "fits",
        next_layout=found.next_layout,
        num_devices=found.num_devices,
        kv_dtype=answers[1].document["kv_cache"]["dtype"],
        weights_dtype=answers[1].document["weights"]["dtype"],
        free_bytes=min(pool["free_bytes"] for pool in pools.values()),
        ttft_seconds=times.ttft_seconds, ttft_low_seconds=ttft[0], ttft_high_seconds=ttft[1],
        tpot_seconds=times.tpot_seconds, tpot_low_seconds=tpot[0], tpot_high_seconds=tpot[1],
        tokens_per_second=tokens_per_second,
        tokens_per_second_low=tokens_per_second * times.tpot_seconds / tpot[1],
        tokens_per_second_high=tokens_per_second * times.tpot_seconds / tpot[0],
        requests_per_second=times.requests_per_second,
        tokens_per_second_per_device=tokens_per_second / found.num_devices,
        disaggregated={
            **pools,
            "transfer": _describe_transfer(traffic, found),
            "ttft_parts": {
                "host_seconds": times.host_seconds, "queue_seconds": times.queue_seconds,
                "prefill_seconds": times.prefill_seconds, "transfer_seconds": times.transfer_seconds,
                "first_step_seconds": times.first_step_seconds,
            },
            "commands": commands_of(kind.engine, _pools_of(traffic, found, checkpoint)),
        },
    )  # fmt: skip
    row.update(describe_cost(kind, traffic.lengths, found.num_devices, tokens_per_second))
    return row, _notes(kind, answers)


def _prompts_held(found: Split) -> int:
    """The prompts in the cache of a prefill instance: those of a step, and those being sent."""
    times = found.match.times
    sent = times.requests_per_second / found.match.prefills * times.transfer_seconds
    held = times.prompts + -int(-sent // 1)
    return held if found.prefill.slots is None else min(held, found.prefill.slots)


def _describe_pools(found: Split, answers: tuple[Answer, Answer], held: tuple[int, int]) -> dict[str, dict[str, Any]]:
    match, times = found.match, found.match.times
    rate, transfer = times.requests_per_second, times.transfer_seconds
    answered = found.decode.rates.rate(found.decode.rates.largest(transfer))
    capacities = (
        match.prefills / found.prefill.rates.interval(transfer),
        match.decodes * (min(answered, 1 / transfer) if transfer else answered),
    )
    rows = zip(
        ("prefill", "decode"), (found.prefill, found.decode), (match.prefills, match.decodes), answers, held, capacities
    )
    return {
        role: {
            "gpu": one.case.devices.gpu.name,
            "instances": number,
            "tensor_parallel_size": one.shape.tensor,
            "pipeline_parallel_size": one.shape.stages,
            "data_parallel_size": one.shape.attention_replicas,
            "expert_parallel_size": one.case.workload.expert_parallel_size,
            "num_devices": number * one.shape.devices,
            "requests_per_instance": times.prompts if role == "prefill" else times.decoding,
            "requests_held": in_cache,
            "max_requests_held": one.slots,
            "max_requests_per_second": capacity,
            "utilization": min(1.0, rate / capacity),
            "transfer_buffer_bytes": one.buffer_bytes,
            "free_bytes": one.free_bytes(answer)[0],
        }
        for role, one, number, answer, in_cache, capacity in rows
    }


def _describe_transfer(traffic: Traffic, found: Split) -> dict[str, Any]:
    return {
        "link": found.link.name,
        "bandwidth_bytes_per_second": found.link.bytes_per_second,
        "prompt_tokens": traffic.lengths.input_tokens,
        "bytes_per_device": found.transfer_bytes,
        "request_bytes": found.decode.sent.total_bytes,
        "seconds": found.match.times.transfer_seconds,
    }


def _pools_of(traffic: Traffic, found: Split, checkpoint: Checkpoint) -> Pools:
    times = found.match.times
    running = found.decode.rates.largest(times.transfer_seconds)
    return Pools(
        checkpoint,
        _layout(traffic, found.prefill, min(found.prefill.slots or _MOST_PROMPTS, _MOST_PROMPTS)),
        _layout(traffic, found.decode, running),
        found.match.prefills, found.match.decodes, buffer_tokens(traffic, found.prefill.case),
    )  # fmt: skip


def _layout(traffic: Traffic, one: Instance, running: int) -> Layout:
    workload = one.case.workload
    return Layout(
        one.shape.tensor, one.shape.stages, traffic.lengths.longest_tokens, running,
        workload.kv_dtype.name, one.case.question.engine_settings or {}, traffic.limit is not None, None,
        one.shape.attention_replicas, workload.expert_parallel_size, engine=one.case.question.engine,
    )  # fmt: skip


def _notes(kind: Kind, answers: tuple[Answer, Answer]) -> list[Note]:
    notes = [
        note
        for answer in answers
        for note in answer.notes
        if note.part in ("throughput", "calibration") or note.code == RELEASE
    ]
    uncounted = RULES[kind.engine.partition("@")[0]].uncounted
    unmeasured = "disaggregated: no measurement of separate prefill and decode instances is in the fit"
    return [
        *notes,
        Note("plans", "disaggregated-not-fitted", unmeasured),
        Note("plans", "disaggregated-not-counted", f"disaggregated: not counted: {uncounted}"),
    ]
