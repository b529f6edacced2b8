"""The arithmetic of a step for all rows at once, and the fit itself.

kvcalc's own functions (`costs_of`, `step_parts`, `prompt_parts`, `host_wait`) run on arrays with one element per row,
so that the fit and the answers share one formula.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from kvcalc.throughput.constants import Constants
from kvcalc.throughput.prompts import Prompts
from kvcalc.throughput.roofline import (
    ExpertTimes,
    MatrixTimes,
    SpeedModel,
    Times,
    costs_of,
    prompt_parts,
    step_parts,
    together,
)
from kvcalc.throughput.scheduling import STEP_TOKENS
from kvcalc.throughput.serving import burst_wait, host_wait

if TYPE_CHECKING:
    from fit_parameters import Model
    from throughput_data import Row

Values = NDArray[np.float64]
Ask = Callable[[Mapping[str, Any]], Values]
"""The predicted seconds of every row, for constants that are arrays."""

CLASSES = ("fp32", "bf16", "fp8", "nvfp4", "mxfp4", "int8", "int4")
_NOISE = 0.12
_TTFT_NOISE = 0.2
# The rounds in which the prompts of a step are found, and the highest load of the steps.
_ROUNDS, _MOST_LOAD = 4, 0.95


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
    none = ExpertTimes(1, 0, ())  # no expert is ever touched
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
                _stack([e.matrices for e in row]),
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
    prompt = np.array([row.input_tokens for row in rows], float)
    prompt_scores = np.array(
        [row.model.counts.prefill_attention_flops(row.input_tokens) / _attention(row) for row in rows]
    )
    share = np.array([row.decoding / row.output_tokens if row.output_tokens else 0.0 for row in rows])
    own = np.array([_prompts_of_step(row) for row in rows])
    is_separate = np.array([row.rules is not None and not row.rules.mixes for row in rows])

    def ask(constants: Mapping[str, Any]) -> Values:
        c = _namespace(constants)
        costs = costs_of(times, c)
        pairs, overhead, communication = step_parts(costs, batch, kv, scores, context, batch)
        total = overhead + communication
        for read, multiply in pairs:
            total = total + together(read, multiply, c.roof_power)
        work = sum(prompt_parts(costs, prompt, prompt_scores, prompt)) / times.stages
        # Prompts in steps of their own, with `own` of them in a step.
        multiply, moved, sent = prompt_parts(costs, own * prompt, own * prompt_scores, own * prompt)
        pairs, _, _ = step_parts(costs, own * prompt, 0.0, 0.0, 0.0, own * prompt)
        alone = together(sum(read for read, _ in pairs), multiply, c.roof_power) + costs.launch + costs.latency
        alone = (alone + moved + sent) / own + c.sequence_seconds
        return np.asarray(total + share * np.where(is_separate, alone, work))

    return ask


def _prompts_of_step(row: Row) -> float:
    """How many prompts a step computes if it computes nothing else, with the constants that kvcalc has now."""
    if not row.output_tokens or row.rules is None or row.rules.mixes:
        return 1.0
    prompts = Prompts(row.model, row.input_tokens, 0.0, row.rules)
    step = row.model.decode(row.decoding, row.context_tokens).seconds
    for _ in range(_ROUNDS):
        prompts.stop(step, row.decoding / (row.output_tokens * row.seconds), row.decoding / row.output_tokens)
    return prompts.together


def _attention(row: Row) -> float:
    return row.model.attention_flops


def ttft_seconds_of(rows: Sequence[Row], step: Sequence[Constants]) -> Ask:
    """The time to first token of every row, with the step's constants as they are in `step`."""
    models = [SpeedModel(row.model.counts, row.model.gpu, c) for row, c in zip(rows, step)]
    waits = np.array([_waits(model, row) for model, row in zip(models, rows)])
    one_step, others, known, counted = waits.T
    prompt = np.array([row.input_tokens for row in rows], float)
    alone = np.array([row.concurrency == 1 for row in rows])

    def ask(constants: Mapping[str, Any]) -> Values:
        c = _namespace(constants)
        steps = np.where(alone, np.minimum(c.ttft_steps, counted), counted)
        return np.asarray(host_wait(c, steps, one_step, prompt, others) + known)

    return ask


def _waits(model: SpeedModel, row: Row) -> tuple[float, float, float, float]:
    """The seconds of a step, the other running requests, the waits that are not fitted, and the scheduler's steps.

    They are those of `serve` with the requests that decoded, and came, when the row was measured.
    """
    step = model.decode(row.decoding, row.context_tokens).seconds
    prompts, rules = Prompts(model, row.input_tokens, 0.0, row.rules), row.rules
    if rules is None:
        burst = burst_wait(prompts.work, max(STEP_TOKENS / row.input_tokens, 1.0), row.running)
        return row.seconds, row.running - 1, prompts.lone + burst, 0.0
    if row.concurrency == 1:
        return step, 0.0, prompts.lone, rules.counted_steps
    others = (row.concurrency - 1) / row.concurrency
    rate = row.concurrency / ((row.ttft_seconds or 0.0) + row.output_tokens * row.seconds)
    for _ in range(_ROUNDS):
        stop = prompts.stop(step, rate, others * row.decoding / row.output_tokens)
    mean_step = step + row.decoding * stop / row.output_tokens
    waits = prompts.waits(step, mean_step, row.decoding, others * rate)
    # The measured rate may be above the one that the constants allow. Each attention replica has a queue of its own.
    replicas = model.layout.data_parallel_size
    of_one = min(rate / replicas, _MOST_LOAD / waits.each)
    first = waits.first + waits.queue(others * of_one)[0] / (others * of_one)
    met = others * (row.decoding + of_one * replicas * prompts.alone)
    burst = burst_wait(waits.each, max(waits.most, 1.0), row.running / replicas)
    return step, met, first + burst, rules.counted_steps


def fit(
    model: Model, rows: Sequence[Row], ask: Ask, measured: Values, weights: Values, start: Values | None = None
) -> Values:
    """The most probable parameters: least squares of logarithms with priors, robust to outliers.

    Large residuals count less: the loss of a row is soft L1, 2 (sqrt(1 + r^2) - 1). The priors count as they are.
    """
    arrays = model.arrays_of(rows)
    mean, spread = model.prior
    noise = _TTFT_NOISE if model.is_first_token else _NOISE

    def residuals(theta: Values) -> Values:
        predicted = ask(arrays(theta))
        r = weights * (np.log(predicted) - measured) / noise
        soft = np.sign(r) * np.sqrt(2 * (np.sqrt(1 + r * r) - 1))
        return np.concatenate([soft, (theta - mean) / spread])

    found = least_squares(residuals, mean if start is None else start, x_scale="jac", max_nfev=30, ftol=1e-6)
    return np.asarray(found.x)
