"""One engine, cache type, device and tensor-parallel size of a sweep: how its points are computed, or why not.

The formula's bytes are straight pieces (`kvcalc.memory.curves`), so that a point costs a few products; an engine's are
its own functions. Speed is arithmetic over a SpeedModel made once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from kvcalc.errors import KvcalcError
from kvcalc.memory.curves import Curve, read_curve, stored_curve
from kvcalc.memory.dtypes import Dtype
from kvcalc.memory.engines import Engine, load_engine, resolve_kv_dtype, stage_bounds
from kvcalc.memory.kv_cache import on_device
from kvcalc.memory.workload import Workload, bind_workload, resolve_workload
from kvcalc.model.spec import ModelSpec, has_cross_attention
from kvcalc.planning.estimate import ENCODER_WARNING, check_devices
from kvcalc.planning.figures import FIGURES, cache_figures

if TYPE_CHECKING:
    from kvcalc.throughput.hardware import Gpu

NUMBERS = ("context_tokens", "batch_size", *FIGURES)
SPEED = ("decode_step_seconds", "decode_tokens_per_second", "prefill_seconds")
CHECKED = (*NUMBERS, "fits", "free_bytes", *SPEED, "reason")
COLUMNS = ("engine", "kv_dtype", "gpu", "tensor_parallel_size", *CHECKED)
_NO_FIGURES = (None,) * len(FIGURES)
_NO_SPEED = (None,) * len(SPEED)
_DEVICE = NUMBERS.index("bytes_per_device")

Row = tuple[Any, ...]


class Combination(NamedTuple):
    """How the points of one combination are computed.

    `bound` gives the model, workload and engine at a context; `curves` the bytes stored in all, on one device, and
    read, where they are straight; `memory` what a device has for the cache at a context and batch, and `speed` the
    columns of `SPEED` there, None where they are not asked. `refusal`: why there is none of this.
    """

    engine: str
    kv_dtype: str
    gpu: str | None
    tensor_parallel_size: int
    bound: Callable[[int], tuple[ModelSpec, Workload, Engine]] | None = None
    curves: tuple[Curve, Curve, Curve] | None = None
    memory: Callable[[int, int], int] | None = None
    speed: Callable[[int, int], Row] | None = None
    refusal: KvcalcError | None = None

    @property
    def alike(self) -> dict[str, Any]:
        """The columns all its rows have in common; the others are null until a row has them."""
        reason = None if self.refusal is None else self.refusal.message
        own = {"engine": self.engine, "kv_dtype": self.kv_dtype, "gpu": self.gpu}
        return {**dict.fromkeys(COLUMNS), **own, "tensor_parallel_size": self.tensor_parallel_size, "reason": reason}

    def rows(self, contexts: Iterable[int], batches: Iterable[int]) -> tuple[tuple[str, ...], Iterator[Row], bool]:
        """The names of the columns that differ, the rows' values of them, and whether all are whole numbers."""
        if self.refusal is not None:
            return NUMBERS, ((c, b, *_NO_FIGURES) for c in contexts for b in batches), False
        if self.curves is None:
            return CHECKED, self._checked(self._counted_rows(contexts, batches)), False
        rows = self._straight_rows(contexts, batches, *self.curves)
        if self.memory is None and self.speed is None:
            return NUMBERS, rows, True
        return CHECKED, self._checked(rows), False

    def _straight_rows(
        self, contexts: Iterable[int], batches: Iterable[int], stored: Curve, device: Curve, read: Curve
    ) -> Iterator[Row]:
        """The rows of the formula: what it stores is what is held."""
        devices = self.tensor_parallel_size
        for tokens in contexts:
            slope, fixed = stored.growth_at(tokens)
            held, share, reads = fixed + slope * tokens, device.bytes_at(tokens), read.bytes_at(tokens)
            for batch in batches:
                whole, local = batch * held, batch * share
                yield tokens, batch, whole, whole, held, slope, fixed, local, devices * local, batch * reads

    def _counted_rows(self, contexts: Iterable[int], batches: Iterable[int]) -> Iterator[Row]:
        """The rows by the engine's own functions; the reason at the end where it refuses a point."""
        for tokens in contexts:
            for batch in batches:
                try:
                    yield tokens, batch, *self._figures(tokens, batch)
                except KvcalcError as error:
                    yield tokens, batch, *_NO_FIGURES, error.message

    def _figures(self, tokens: int, batch: int) -> tuple[int, ...]:
        if self.bound is None:
            raise ValueError("a refused combination has no figures")
        spec, workload, rules = self.bound(tokens)
        return cache_figures(spec, workload._replace(batch_size=batch), rules)

    def _checked(self, rows: Iterator[Row]) -> Iterator[Row]:
        """`rows` with whether they fit the memory, what they leave of it, their speed, and no reason where there is
        none."""
        for row in rows:
            if len(row) > len(NUMBERS):
                yield *row[:-1], None, None, *_NO_SPEED, row[-1]
                continue
            tokens, batch = row[:2]
            speed = _NO_SPEED if self.speed is None else self.speed(tokens, batch)
            if self.memory is None:
                yield *row, None, None, *speed, None
            else:
                free = self.memory(tokens, batch) - row[_DEVICE]
                yield *row, free >= 0, free, *speed, None

    def device_bytes(self, tokens: int, batch: int) -> int | None:
        """What the batch's cache takes on one device; None where it is refused."""
        if self.curves is not None:
            return batch * self.curves[1].bytes_at(tokens)
        try:
            return None if self.refusal else self._figures(tokens, batch)[FIGURES.index("bytes_per_device")]
        except KvcalcError:
            return None


class Grid(NamedTuple):
    """What is asked of every combination alike. `shortest` is the shortest context, beside the largest batch."""

    model: ModelSpec
    spec: ModelSpec
    shortest: int
    largest_batch: int
    dtype: str | None
    encoder_tokens: int | None
    kv_memory_bytes: int | None


def combine(grid: Grid, engine: str, kv_dtype: str, gpu: Gpu | None, size: int, warnings: list[str]) -> Combination:
    """How the points of one combination are computed; its refusal in it, and what must be said in `warnings`."""
    name = None if gpu is None else gpu.name
    try:
        return _combine(grid, engine, kv_dtype, gpu, size, warnings)
    except KvcalcError as error:
        parts = [engine, kv_dtype, name, f"tp {size}"]
        warnings.append(f"{', '.join(part for part in parts if part)}: {error.message}")
        return Combination(engine, kv_dtype, name, size, refusal=error)


def _combine(grid: Grid, engine: str, asked: str, gpu: Gpu | None, size: int, warnings: list[str]) -> Combination:
    spec, encoder_tokens = grid.spec, grid.encoder_tokens
    settings: Mapping[str, str] = {}
    if gpu is not None:
        from kvcalc.planning.budget import with_device
        from kvcalc.throughput.hardware import Devices

        settings = with_device(engine, {}, Devices(gpu, size))
    resolved, _ = resolve_kv_dtype(engine, spec, asked, settings, grid.dtype)

    def workload_at(tokens: int) -> Workload:
        return resolve_workload(spec, tokens, 1, grid.dtype, resolved, size, encoder_tokens)

    # The encoder may follow the context; nothing else of a workload that an engine is made for does.
    first = workload_at(grid.shortest)
    held = bind_workload(spec, first)
    rules = load_engine(engine, held, settings)
    check_devices(rules, engine, size)
    moves = has_cross_attention(spec) and encoder_tokens is None and spec.encoder_tokens is None

    def bound(tokens: int) -> tuple[ModelSpec, Workload, Engine]:
        if not moves:
            return held, first._replace(context_tokens=tokens), rules
        workload = workload_at(tokens)
        own = bind_workload(spec, workload)
        return own, workload, load_engine(engine, own, settings)

    # What refuses the shortest context refuses every one.
    cache_figures(held, first, rules)
    found = Combination(
        rules.name, first.kv_dtype.name, None if gpu is None else gpu.name, size, bound,
        _curves(held, on_device(held, size), first.kv_dtype) if rules.name == "logical" and not moves else None,
    )  # fmt: skip
    warnings += rules.warnings
    if spec.is_encoder and rules.name == "logical":
        warnings.append(ENCODER_WARNING.format(name=spec.name))
    if moves:
        warnings.append("the encoder's input is taken to be as long as each context; --encoder-tokens")
    warnings += [w for w in first.warnings if not w.startswith(("context ", "the encoder's input"))]
    memory = grid.kv_memory_bytes
    if memory is not None:
        return found._replace(memory=lambda tokens, batch: memory)
    if gpu is None:
        return found
    return found._replace(
        memory=_memory_of(grid, held, first, engine, settings, gpu, warnings),
        speed=_speed_of(grid, held, first, engine, gpu, warnings),
    )


def _memory_of(
    grid: Grid,
    spec: ModelSpec,
    workload: Workload,
    engine: str,
    settings: Mapping[str, str],
    gpu: Gpu,
    warnings: list[str],
) -> Callable[[int, int], int] | None:
    """What a device has for the cache, at a context and a batch; None, with a warning, where that is not known."""
    from kvcalc.planning.budget import budget
    from kvcalc.planning.weights import device_weights

    ranks, whole = workload.tensor_parallel_size, stage_bounds(engine, spec.num_layers, 1)
    weights = device_weights(grid.model, spec, grid.dtype, workload.model_dtype, ranks, whole)
    found = budget(spec, workload, engine, settings, gpu, weights)
    if found is None:
        warnings.append(f"fit: the weights of {spec.name} are not known: {weights.reason}")
        return None
    pool = found.pool_bytes
    if not found.reserve.varies:
        return lambda tokens, batch: pool

    def at(tokens: int, batch: int) -> int:
        there = budget(spec, workload, engine, settings, gpu, weights, tokens, batch)
        return pool if there is None else there.pool_bytes

    return at


def _speed_of(
    grid: Grid, spec: ModelSpec, workload: Workload, engine: str, gpu: Gpu, warnings: list[str]
) -> Callable[[int, int], Row] | None:
    """The columns of `SPEED` at a context and a batch; None, with a warning, where they are not known."""
    from kvcalc.planning.throughput import speed_of
    from kvcalc.throughput.counts import Layout
    from kvcalc.throughput.speed import outside

    layout = Layout(workload.tensor_parallel_size, 1, 1)
    found = speed_of(grid.model, spec, workload, gpu, engine, dtype=grid.dtype, layout=layout)
    if isinstance(found, str):
        warnings.append(f"throughput: {found}")
        return None
    model = found.model
    unfitted = outside(model, found.regime, found.weight_dtype, grid.largest_batch)
    if unfitted:
        warnings.append(f"throughput: not fitted for {', '.join(unfitted)}")

    def at(tokens: int, batch: int) -> Row:
        seconds = model.decode(batch, tokens).seconds
        return seconds, batch / seconds, model.prefill(tokens, batch).seconds

    return at


def _curves(spec: ModelSpec, share: ModelSpec, dtype: Dtype) -> tuple[Curve, Curve, Curve] | None:
    """Stored in all and on one device, and read; None where one of them is not straight."""
    stored, device, read = stored_curve(spec, dtype), stored_curve(share, dtype), read_curve(spec, dtype)
    return None if stored is None or device is None or read is None else (stored, device, read)
