"""The arithmetic of a step for all rows at once.

kvcalc's own functions (`costs_of`, `step_parts`, `prompt_parts`, `host_wait`) run on arrays with one element per row,
so that the fit and the answers share one formula.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.fit.rows import ALL, FIRST, Row
from kvcalc.throughput.constants import Constants
from kvcalc.throughput.costs import (
    NO_PROMPTS,
    ExpertTimes,
    MatrixTimes,
    PromptWork,
    Times,
    costs_of,
    prompt_parts,
    step_parts,
    together,
)
from kvcalc.throughput.roofline import SpeedModel
from kvcalc.throughput.serving import burst_wait, first_host_wait, full_step_seconds, host_wait, requests_per_client

Values = NDArray[np.float64]
Ask = Callable[[Mapping[str, Any]], Values]
"""The predicted seconds of every row, for constants that are arrays."""

CLASSES = ("fp32", "bf16", "fp8", "nvfp4", "mxfp4", "int8", "int4")
# The place of the longest 99 % of a benchmark among its first requests.
_LATE = 0.9


def _stack(rows: Sequence[tuple[MatrixTimes, ...]]) -> tuple[MatrixTimes, ...]:
    """The matrices of all rows, with every class in every row."""
    by_class = [{m.kind: m for m in row} for row in rows]
    return tuple(
        MatrixTimes(
            kind,
            np.array([row[kind].read if kind in row else 0.0 for row in by_class]),
            np.array([row[kind].multiply if kind in row else 0.0 for row in by_class]),
        )
        for kind in CLASSES
    )


def stacked(models: Sequence[SpeedModel]) -> Times:
    """The ideal times of all rows as arrays."""
    times = [model.times for model in models]
    most = max(len(t.experts) for t in times)
    none = ExpertTimes(1, 1, (), 0)  # experts that take no time
    experts = [[(*t.experts, *[none] * most)[i] for t in times] for i in range(most)]
    numbers = {
        name: np.array([getattr(t, name) for t in times], float)
        for name in Times._fields if name not in ("dense", "head", "experts")
    }  # fmt: skip
    return Times(
        dense=_stack([t.dense for t in times]),
        head=_stack([t.head for t in times]),
        experts=tuple(
            ExpertTimes(
                np.array([e.experts for e in row], float), np.array([e.read for e in row], float),
                _stack([e.matrices for e in row]), np.array([e.move for e in row], float),
                np.array([e.groups for e in row], float), np.array([e.largest for e in row], float),
            ) for row in experts
        ),
        **numbers,
    )  # fmt: skip


def _namespace(constants: Mapping[str, Any]) -> Any:
    return SimpleNamespace(**constants)


def seconds_of(rows: Sequence[Row]) -> Ask:
    """TPOT or the decode step of every row, with the number of requests that decoded when it was measured."""
    times = stacked([row.model for row in rows])
    batch = np.maximum(1.0, np.array([row.decoding for row in rows]) / times.stages)
    context = np.array([row.context_tokens for row in rows], float)
    kv = np.array([row.model.counts.kv_read_bytes(row.context_tokens) / row.model.bandwidth for row in rows])
    scores = np.array([row.model.counts.attention_flops(row.context_tokens) / _attention(row) for row in rows])
    prompt = np.array([row.input_tokens - row.cached_tokens for row in rows], float)
    prompt_scores = np.array([_prompt_flops(row) / _attention(row) for row in rows])
    share = np.array([_replaced(row) / row.output_tokens if row.output_tokens else 0.0 for row in rows])
    own = np.array([_prompts_of_step(row) for row in rows])
    is_separate = np.array([not row.rules.mixes and row.model.layout.attention_copies == 1 for row in rows])
    mixed = np.where(is_separate, 0.0, 1.0)
    prompts = PromptWork(own, own * prompt, own * prompt_scores, own * prompt)
    # Each stage computes another part of the prompts at the same time.
    staged = PromptWork(*(one / np.where(is_separate, 1.0, times.stages) for one in prompts))

    def ask(constants: Mapping[str, Any]) -> Values:
        c = _namespace(constants)
        costs = costs_of(times, c)
        pairs, overhead, communication = step_parts(costs, batch, kv, scores, context, batch)
        decode = sum(together(read, multiply, c.roof_power) for read, multiply in pairs)
        # Prompts in the steps of decoding requests, or in steps of their own.
        after, of_scores, of_host, sent = prompt_parts(costs, staged, mixed * batch, mixed * batch)
        added = sum(together(read, multiply, c.roof_power) for read, multiply in after) + of_scores + of_host + sent
        before, _, _, _ = prompt_parts(costs, NO_PROMPTS, batch, batch)
        without = sum(together(read, multiply, c.roof_power) for read, multiply in before)
        added = added - np.where(is_separate, -costs.launch - costs.latency, without)
        return np.asarray(decode + overhead + communication + share * added / own)

    return ask


def _most(row: Row) -> float:
    """How many of a row's prompts fit into one step of all DP ranks."""
    return row.rules.prompts_of_step(row.input_tokens - row.cached_tokens) * row.model.layout.attention_copies


def _prompts_of_step(row: Row) -> float:
    """How many prompts a step that has some computes."""
    if not row.output_tokens:
        return 1.0
    return min(max(1.0, row.decoding * row.model.tokens_per_step / row.output_tokens), _most(row))


def _replaced(row: Row) -> float:
    """The other requests whose prompts are computed while one of the row decodes."""
    return row.decoding * (row.concurrency - 1) / row.concurrency


def _prompt_flops(row: Row) -> float:
    flops = row.model.counts.prefill_attention_flops
    return flops(row.input_tokens) - (flops(row.cached_tokens) if row.cached_tokens else 0)


def _attention(row: Row) -> float:
    return row.model.attention_flops


def ttft_seconds_of(rows: Sequence[Row], step: Sequence[Constants]) -> Ask:
    """The time to first token of every row, with the step's constants as they are in `step`."""
    models = [SpeedModel(row.model.counts, row.model.gpu, c) for row, c in zip(rows, step)]
    each = np.array([_waits(model, row) for model, row in zip(models, rows)]).T
    one_step, with_first, known, first, cold, launches, alone, hidden = each
    prompt = np.array([row.input_tokens for row in rows], float)

    def ask(constants: Mapping[str, Any]) -> Values:
        c = _namespace(constants)
        of_first = first * c.first_seconds + cold * c.cold_seconds
        launching = np.maximum(0.0, c.prompt_launch_seconds * launches - alone)
        host = host_wait(c, one_step, prompt) + first_host_wait(c, prompt, with_first, hidden)
        return np.asarray(host + known + launching + of_first)

    return ask


def _waits(model: SpeedModel, row: Row) -> tuple[float, ...]:
    """What the time to first token of a row is made of, besides constants.

    The seconds of a step, the others that come with a first request, on average over all requests, those that are not
    fitted (the step that runs and its own), the share of first ones, that on a cold server, the kernels of a step, the
    seconds of a step with the prompt alone, and those of the host that pass while other prompts are computed.
    """
    step = model.decode(row.decoding, row.context_tokens).seconds
    ranks, rules = model.layout.attention_copies, row.rules
    alone = model.prefill(row.input_tokens, 1, row.cached_tokens).seconds
    full = full_step_seconds(model, row.input_tokens, row.cached_tokens, rules)
    cold, first = float(row.requests == FIRST), (row.requests == ALL) / requests_per_client(row.concurrency)
    launches, together = float(model.counts.launches), max(0.0, row.running / ranks - 1)
    known = alone + (step / 2 if row.concurrency > 1 else 0.0)
    # In the mean, the first ones wait for half of each other.
    known += (first + 2 * _LATE * cold) * burst_wait(full, max(_most(row) / ranks, 1.0), row.running / ranks)
    return step, (first + cold) * together, known, first, cold, launches, alone, full * rules.reads_beside


def stacked_constants(each: Sequence[Constants]) -> dict[str, Any]:
    """The constants of each row as arrays."""
    return stacked_values([constants._asdict() for constants in each])


def stacked_values(each: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The values of each row, by name, as arrays. A value may be a mapping of values."""
    stacked: dict[str, Any] = {}
    for name in each[0]:
        values = [row[name] for row in each]
        if isinstance(values[0], Mapping):
            stacked[name] = {kind: np.array([value[kind] for value in values]) for kind in values[0]}
        else:
            stacked[name] = np.array(values)
    return stacked
