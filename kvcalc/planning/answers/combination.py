"""One combination of a sweep (engine, cache type, device, tensor-parallel size): how its points are computed.

The formula's bytes are piecewise linear (`kvcalc.memory.curves`), so a point takes only a few multiplications. An
engine's bytes come from its own functions. Speed is computed from a SpeedModel that is built once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import Any

from kvcalc.errors import KvcalcError, SettingError
from kvcalc.memory.curves import Curve, stored_curve
from kvcalc.memory.workload import BEYOND_MODEL, ENCODER_AS_CONTEXT
from kvcalc.model.spec import period
from kvcalc.notes import Note
from kvcalc.planning.answers.figures import FIGURES, cache_figures
from kvcalc.question.question import Question
from kvcalc.records import NamedTuple
from kvcalc.server.capacity import max_running_requests, starts
from kvcalc.server.case import Case, make_case

NUMBERS = ("context_tokens", "batch_size", *FIGURES)
SPEED = (
    "decode_step_seconds", "decode_step_low_seconds", "decode_step_high_seconds", "decode_tokens_per_second",
    "prefill_seconds",
)  # fmt: skip
CHECKED = (*NUMBERS, "fits", "free_bytes", *SPEED, "reason")
COLUMNS = (
    "model", "engine", "kv_dtype", "gpu", "num_devices", "tensor_parallel_size", "data_parallel_size", *CHECKED,
)  # fmt: skip
_NO_FIGURES = (None,) * len(FIGURES)
_NO_SPEED = (None,) * len(SPEED)
_DEVICE = NUMBERS.index("bytes_per_device")

Row = tuple[Any, ...]


class Combination(NamedTuple):
    """How the points of one combination are computed.

    `question` is about the shortest context, and names the engine and the type of the cache. `case` has the shortest
    context and one sequence. `curves` are the bytes stored in total, stored on one device, and read, if they are
    piecewise linear. `memory` gives the cache memory of a device at a context and batch, and `speed` gives the columns
    of `SPEED`; both are None if not asked for. `also_fits` says whether the part of the model in host memory fits
    there, or whether the engine starts. It is None if neither is a question. `refusal` says why the combination has no
    figures. `at_context` is the combination at another context, if that decides defaults.
    """

    question: Question
    case: Case | None = None
    curves: tuple[Curve, Curve, Curve] | None = None
    memory: Callable[[int, int], int] | None = None
    speed: Callable[[int, int], Row] | None = None
    also_fits: Callable[[int, int], bool] | None = None
    refusal: KvcalcError | None = None
    at_context: Callable[[int], Combination] | None = None

    @property
    def alike(self) -> dict[str, Any]:
        """The columns that all rows have in common. The other columns are null until a row sets them."""
        question, devices, layout = self.question, self.question.devices, self.question.layout.sizes
        gpu, number = (None, None) if devices is None else (devices.gpu.name, devices.num_devices)
        sizes = layout.tensor_parallel_size, layout.data_parallel_size
        values = (question.model.name, question.engine, question.kv_dtype, gpu, number, *sizes)
        reason = None if self.refusal is None else self.refusal.message
        return {**dict.fromkeys(COLUMNS), **dict(zip(COLUMNS, values)), "reason": reason}

    def rows(self, contexts: Iterable[int], batches: Iterable[int]) -> tuple[tuple[str, ...], Iterator[Row], bool]:
        """The names of the columns that vary, their values row by row, and whether all values are whole numbers."""
        if (at := self.at_context) is not None:
            return CHECKED, (row for tokens in contexts for row in at(tokens)._own_rows(tokens, batches)), False
        if self.refusal is not None:
            return NUMBERS, ((c, b, *_NO_FIGURES) for c in contexts for b in batches), False
        if self.curves is None:
            return CHECKED, self._checked(self._counted_rows(contexts, batches)), False
        rows = self._straight_rows(contexts, batches, *self.curves)
        if self.memory is None and self.speed is None:
            return NUMBERS, rows, True
        return CHECKED, self._checked(rows), False

    def _own_rows(self, tokens: int, batches: Iterable[int]) -> Iterator[Row]:
        """The rows of the one context of this combination, all with the same columns."""
        if self.refusal is None:
            return self._checked(self._counted_rows((tokens,), batches))
        return ((tokens, b, *_NO_FIGURES, None, None, *_NO_SPEED, self.refusal.message) for b in batches)

    def _straight_rows(
        self, contexts: Iterable[int], batches: Iterable[int], stored: Curve, device: Curve, read: Curve
    ) -> Iterator[Row]:
        """The rows of the formula, for which the held bytes equal the stored bytes."""
        layout = self.question.layout.sizes
        for tokens in contexts:
            slope, fixed = stored.growth_at(tokens)
            held, share, reads = fixed + slope * tokens, device.bytes_at(tokens), read.bytes_at(tokens)
            for batch in batches:
                whole, local = batch * held, layout.attention_batch(batch) * share
                total = layout.tensor_parallel_size * batch * share
                yield tokens, batch, whole, whole, held, slope, fixed, local, total, batch * reads

    def _counted_rows(self, contexts: Iterable[int], batches: Iterable[int]) -> Iterator[Row]:
        """The rows computed by the engine's own functions, with the reason as the last value if it refuses a point."""
        for tokens in contexts:
            for batch in batches:
                try:
                    yield tokens, batch, *self._figures(tokens, batch)
                except KvcalcError as error:
                    yield tokens, batch, *_NO_FIGURES, error.message

    def _figures(self, tokens: int, batch: int) -> tuple[int, ...]:
        if self.case is None:
            raise ValueError("a refused combination has no figures")
        return cache_figures(self.case.at(tokens, batch))

    def _checked(self, rows: Iterator[Row]) -> Iterator[Row]:
        """`rows`, each with whether it fits the memory, the free bytes, its speed, and the reason if it is refused.

        A batch that does not fit does not run, so it has no speed.
        """
        for row in rows:
            if len(row) > len(NUMBERS):
                yield *row[:-1], None, None, *_NO_SPEED, row[-1]
                continue
            tokens, batch = row[:2]
            fits = free = None
            if self.memory is not None:
                free = self.memory(tokens, batch) - row[_DEVICE]
                fits = free >= 0 and (self.also_fits is None or self.also_fits(tokens, batch))
            speed = _NO_SPEED if self.speed is None or fits is False else self.speed(tokens, batch)
            yield *row, fits, free, *speed, None

    def device_bytes(self, tokens: int, batch: int) -> int | None:
        """The bytes of the batch's cache on one device; None if the point is refused."""
        if self.at_context is not None:
            return self.at_context(tokens).device_bytes(tokens, batch)
        if self.curves is not None:
            return self.question.layout.sizes.attention_batch(batch) * self.curves[1].bytes_at(tokens)
        try:
            return None if self.refusal else self._figures(tokens, batch)[FIGURES.index("bytes_per_device")]
        except KvcalcError:
            return None


def combine(
    question: Question, largest_batch: int, notes: list[Note], *, varies_by_context: bool = False
) -> Combination:
    """How the points of one combination are computed, or its refusal. Remarks for the user are appended to `notes`.

    `question` has the shortest context and one sequence. With `varies_by_context`, defaults of the engine depend on the
    context, so each one has a combination of its own.
    """
    try:
        combination = _combine(question, largest_batch, notes)
    except SettingError:
        raise
    except KvcalcError as error:
        combination = Combination(question, refusal=error)
    if not varies_by_context:
        return combination

    @lru_cache(maxsize=1)
    def at(tokens: int) -> Combination:
        return combine(question._replace(context_tokens=tokens), largest_batch, [])

    return combination._replace(at_context=at)


def _combine(question: Question, largest_batch: int, notes: list[Note]) -> Combination:
    case = make_case(question)
    # An engine that refuses the shortest context refuses every context.
    cache_figures(case)
    named = question._replace(engine=case.question.engine, kv_dtype=case.workload.kv_dtype.name)
    combination = Combination(named, case, _curves(case))
    notes += [note for note in case.notes if note.code not in (BEYOND_MODEL, ENCODER_AS_CONTEXT)]
    if case.encoder_follows_context:
        text = "the encoder's input is assumed to be as long as each context; --encoder-tokens sets its length"
        notes.append(Note("workload", ENCODER_AS_CONTEXT, text))
    memory = question.kv_memory_bytes
    if question.devices is None:
        return combination if memory is None else _with_memory(combination, case, lambda tokens, batch: memory)
    from kvcalc.server.budget import budget

    divided = budget(case)
    if isinstance(divided, str):
        notes.append(Note("fit", "unknown", divided))
        return combination
    memory_at: Callable[[int, int], int] = divided.pool_at
    if divided.devices:

        def memory_at(tokens: int, batch: int) -> int:
            """The memory in which the largest cache of a device fits if all of them fit."""
            margins = (each.pool_at(tokens, batch) - each.case.cache_bytes(tokens, batch) for each in divided.devices)
            return case.cache_bytes(tokens, batch) + min(margins)

    host_fits = None if divided.host is None else divided.host.fits
    return _with_memory(combination, case, memory_at, host_fits)._replace(speed=_speed_of(case, largest_batch, notes))


def _with_memory(
    combination: Combination, case: Case, memory: Callable[[int, int], int],
    also_fits: Callable[[int, int], bool] | None = None,
) -> Combination:  # fmt: skip
    """The combination with this memory. At every point, an engine needs what it asks for before it starts, and runs at
    most as many requests as its own limits allow."""
    share, dtype = case.share, case.workload.kv_dtype
    checks = [] if also_fits is None else [also_fits]
    if case.allocation.start_bytes(share, dtype, case.workload.context_tokens) or period(case.spec) > 1:
        at = case.layout.attention_batch
        checks.append(lambda tokens, batch: case.needed_bytes(tokens, at(batch)) <= memory(tokens, batch))
    if case.allocation.start_limit(share, dtype, 0) is not None:
        checks.append(lambda tokens, batch: starts(case, memory(tokens, batch)))
    if case.allocation.max_running_requests(share, dtype, None) is not None:
        checks.append(lambda tokens, batch: batch <= (max_running_requests(case, memory(tokens, batch), tokens) or 0))
    return combination._replace(
        memory=memory, also_fits=(lambda *point: all(check(*point) for check in checks)) if checks else None
    )


def _speed_of(case: Case, largest_batch: int, notes: list[Note]) -> Callable[[int, int], Row] | None:
    """The columns of `SPEED` at a context and a batch; None, with a note, if they are not known."""
    from kvcalc.planning.answers.throughput import gaps_of
    from kvcalc.server.speed import speed_of
    from kvcalc.throughput.constants import batch_region
    from kvcalc.throughput.speed import gap_note, known_range, range_factors

    speed = speed_of(case, notes)
    if isinstance(speed, str):
        notes.append(Note("throughput", "unknown", speed))
        return None
    first, regime = speed.model, speed.regime
    if gaps := gaps_of(case, speed, largest_batch):
        notes.append(gap_note(gaps))
    # Of the fitted quantities, only the batch differs between points.
    factors: dict[tuple[str, bool], tuple[float, float]] = {}
    question = case.question
    hit_rate = 0.0 if question.speed is None else question.speed.prefix_hit_rate

    def range_at(batch: int) -> tuple[float, float]:
        key = batch_region(batch), batch > regime.largest_batch
        if key not in factors:
            gaps = gaps_of(case, speed, batch)
            factors[key] = range_factors(first, regime.ranges, speed.weight_dtype, batch, gaps)
        return factors[key]

    def at(tokens: int, batch: int) -> Row:
        speed_here = speed_of(case.at(tokens, batch), []) if case.encoder_follows_context else speed
        model = first if isinstance(speed_here, str) else speed_here.model
        step = model.decode(batch, tokens).seconds
        low, high = range_at(batch)
        if speed.calibration is not None:
            low, high = speed.calibration.range("decode", step, lambda m: m.decode(batch, tokens).seconds, low, high)
        shortest = max(model.roofline(batch, tokens), step * low)
        rate = batch * model.tokens_per_step / step
        cached = hit_rate * tokens
        if question.reuse is not None:
            from kvcalc.server.reuse import cached_tokens

            cached = cached_tokens(
                question.reuse, hit_rate, tokens, case.allocation, case.share, case.workload.kv_dtype
            )
        return step, *known_range(shortest, step * high), rate, model.prefill(tokens, batch, cached).seconds

    return at


def _curves(case: Case) -> tuple[Curve, Curve, Curve] | None:
    """The bytes stored in total, stored on one device, and read.

    None if one of them is not piecewise linear, or if the engine holds more than it stores.
    """
    if (
        case.question.reuse is not None
        or not case.engine.is_formula
        or case.layout.pipeline_parallel_size > 1
        or case.encoder_follows_context
    ):
        return None
    spec, share, dtype = case.cached, case.share, case.workload.kv_dtype
    stored, device, read = (
        stored_curve(spec, dtype),
        stored_curve(share, dtype),
        case.allocation.reads(spec, dtype).curve,
    )
    return None if stored is None or device is None or read is None else (stored, device, read)
