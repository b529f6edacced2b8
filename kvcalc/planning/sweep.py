"""How do the bytes change? One model over a grid of contexts, batches, cache types, devices and engines.

The rows are computed as they are asked for and never held: memory does not grow with the grid. The formula's bytes are
straight pieces (`kvcalc.memory.curves`), so that a point costs a few products; an engine's are its own functions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

from kvcalc.errors import KvcalcError
from kvcalc.memory.curves import Curve, read_curve, stored_curve
from kvcalc.memory.dtypes import Dtype, parse_dtype
from kvcalc.memory.engines import Engine, load_engine, resolve_kv_dtype
from kvcalc.memory.kv_cache import on_device
from kvcalc.memory.workload import Workload, bind_workload, resolve_workload
from kvcalc.model.describe import describe_model
from kvcalc.model.spec import ModelSpec, has_cross_attention
from kvcalc.model.variants import WhatIf, apply
from kvcalc.planning.axis import Axis
from kvcalc.planning.estimate import ENCODER_WARNING, check_devices
from kvcalc.planning.figures import FIGURES, cache_figures
from kvcalc.schema import SCHEMA_VERSION

COLUMNS = (
    "engine", "kv_dtype", "tensor_parallel_size", "context_tokens", "batch_size", *FIGURES, "fits", "free_bytes",
    "reason",
)  # fmt: skip
_NUMBERS = ("context_tokens", "batch_size", *FIGURES)
_CHECKED = (*_NUMBERS, "fits", "free_bytes", "reason")
_NO_FIGURES = (None,) * len(FIGURES)

Row = tuple[Any, ...]


class Block(NamedTuple):
    """Rows of a sweep which have the columns of `alike` in common; `varying` names the others, and `rows` has those.

    `numbers`: whatever varies is a whole number.
    """

    alike: dict[str, Any]
    varying: tuple[str, ...]
    rows: Iterator[Row]
    numbers: bool


class Sweep(NamedTuple):
    """A grid: what all its points have in common, and the points, block by block, computed when they are taken."""

    model: ModelSpec
    encoder_tokens: int | None
    kv_memory_bytes: int | None
    contexts: Axis
    batches: Axis
    combinations: tuple[Combination, ...]
    warnings: list[str]

    @property
    def num_points(self) -> int:
        return len(self.combinations) * len(self.contexts) * len(self.batches)

    def head(self) -> dict[str, Any]:
        """What stands in the document before the points."""
        return {
            "schema_version": SCHEMA_VERSION,
            "model": describe_model(self.model),
            "kv_memory_bytes": self.kv_memory_bytes,
            "num_points": self.num_points,
        }

    def blocks(self) -> Iterator[Block]:
        """The points in the order of the columns: the batch changes first, then the context."""
        for combination in self.combinations:
            yield combination.block(self)

    def points(self) -> Iterator[dict[str, Any]]:
        """The points, each under the names of `COLUMNS`."""
        for block in self.blocks():
            for row in block.rows:
                point = {**block.alike, **dict(zip(block.varying, row))}
                yield {name: point[name] for name in COLUMNS}

    def chart(self, *, most_contexts: int, most_lines: int) -> dict[str, Any]:
        """Memory over context, to be drawn: a device's bytes, a line for each combination and batch, the first ones,
        named by what differs between them."""
        contexts = self.contexts.sample(most_contexts)
        pairs = ((combination, batch) for combination in self.combinations for batch in self.batches)
        return {
            "title": self.model.name,
            "contexts": contexts,
            "lines": [
                {"label": self._label(c, batch), "bytes": [c.device_bytes(self, tokens, batch) for tokens in contexts]}
                for c, batch in islice(pairs, most_lines)
            ],
            "capacity_bytes": self.kv_memory_bytes,
            "omitted": max(0, len(self.combinations) * len(self.batches) - most_lines),
        }

    def _label(self, combination: Combination, batch: int) -> str:
        own = (combination.engine, combination.kv_dtype, f"tp {combination.tensor_parallel_size}")
        every = list(zip(*((c.engine, c.kv_dtype, f"tp {c.tensor_parallel_size}") for c in self.combinations)))
        words = [word for word, column in zip(own, every) if len(set(column)) > 1]
        if len(self.batches) > 1:
            words.append(f"batch {batch:,}")
        return " ".join(words) or self.model.name


class Combination(NamedTuple):
    """One engine, cache type and tensor-parallel size: how a point is computed, or why there is none."""

    engine: str
    kv_dtype: str
    tensor_parallel_size: int
    bound: Callable[[int], tuple[ModelSpec, Workload, Engine]] | None
    curves: tuple[Curve, Curve, Curve] | None
    refusal: KvcalcError | None

    def block(self, sweep: Sweep) -> Block:
        alike: dict[str, Any] = dict.fromkeys(COLUMNS)
        alike.update(
            engine=self.engine, kv_dtype=self.kv_dtype, tensor_parallel_size=self.tensor_parallel_size,
            reason=None if self.refusal is None else self.refusal.message,
        )  # fmt: skip
        if self.refusal is not None:
            nothing = ((c, b, *_NO_FIGURES) for c in sweep.contexts for b in sweep.batches)
            return Block(alike, _NUMBERS, nothing, numbers=False)
        if self.curves is not None:
            rows = self._straight_rows(sweep, *self.curves)
            if sweep.kv_memory_bytes is None:
                return Block(alike, _NUMBERS, rows, numbers=True)
            return Block(alike, _CHECKED, self._checked(rows, sweep.kv_memory_bytes), numbers=False)
        return Block(alike, _CHECKED, self._checked(self._counted_rows(sweep), sweep.kv_memory_bytes), numbers=False)

    def _straight_rows(self, sweep: Sweep, stored: Curve, device: Curve, read: Curve) -> Iterator[Row]:
        """The rows of the formula: what it stores is what is held."""
        devices, batches = self.tensor_parallel_size, list(sweep.batches) if len(sweep.batches) < 1000 else None
        for tokens in sweep.contexts:
            slope, fixed = stored.growth_at(tokens)
            held, share, reads = fixed + slope * tokens, device.bytes_at(tokens), read.bytes_at(tokens)
            for batch in batches or sweep.batches:
                whole, local = batch * held, batch * share
                yield tokens, batch, whole, whole, held, slope, fixed, local, devices * local, batch * reads

    def _counted_rows(self, sweep: Sweep) -> Iterator[Row]:
        """The rows by the engine's own functions; the reason at the end where it refuses a point."""
        for tokens in sweep.contexts:
            for batch in sweep.batches:
                try:
                    yield tokens, batch, *self._figures(tokens, batch)
                except KvcalcError as error:
                    yield tokens, batch, *_NO_FIGURES, error.message

    def _figures(self, tokens: int, batch: int) -> tuple[int, ...]:
        if self.bound is None:
            raise ValueError("a refused combination has no figures")
        spec, workload, rules = self.bound(tokens)
        return cache_figures(spec, workload._replace(batch_size=batch), rules)

    def _checked(self, rows: Iterator[Row], memory: int | None) -> Iterator[Row]:
        """`rows` with whether they fit a device's memory, what they leave of it, and no reason where there is none."""
        place = _NUMBERS.index("bytes_per_device")
        for row in rows:
            if len(row) > len(_NUMBERS):
                yield *row[:-1], None, None, row[-1]
            elif memory is None:
                yield *row, None, None, None
            else:
                yield *row, row[place] <= memory, memory - row[place], None

    def device_bytes(self, sweep: Sweep, tokens: int, batch: int) -> int | None:
        """What the batch takes on one device; None where it is refused."""
        if self.curves is not None:
            return batch * self.curves[1].bytes_at(tokens)
        try:
            return None if self.refusal else self._figures(tokens, batch)[FIGURES.index("bytes_per_device")]
        except KvcalcError:
            return None


def sweep(
    model: ModelSpec,
    *,
    contexts: Axis | None = None,
    batches: Axis,
    kv_dtypes: Sequence[str] = ("auto",),
    tensor_parallel_sizes: Axis,
    engines: Sequence[str] = ("logical",),
    dtype: str | None = None,
    encoder_tokens: int | None = None,
    kv_memory_bytes: int | None = None,
    what_if: WhatIf = WhatIf(),
) -> Sweep:
    """The grid of every engine, cache type, tensor-parallel size, context and batch.

    A combination that is refused keeps its rows, without figures and with the reason. Where all are refused the first
    refusal is raised: UsageError (exit 2) or ModelError (exit 3). So is an engine or a cache type nobody knows.
    """
    spec = apply(model, what_if)
    for engine in engines:
        resolve_kv_dtype(engine, spec, "auto")
    for kv_dtype in kv_dtypes:
        if kv_dtype != "auto":
            parse_dtype(kv_dtype, "--kv-dtype")
    if contexts is None:
        contexts = Axis([(resolve_workload(spec).context_tokens,)])
    warnings = list(spec.remarks)
    if spec.max_position_embeddings is not None and contexts.largest > spec.max_position_embeddings:
        warnings.append(
            f"contexts up to {contexts.largest:,} are beyond the model's max_position_embeddings of "
            f"{spec.max_position_embeddings:,}"
        )
    combinations = tuple(
        _combine(spec, contexts, engine, kv_dtype, size, dtype, encoder_tokens, warnings)
        for engine in engines
        for kv_dtype in kv_dtypes
        for size in tensor_parallel_sizes
    )
    refusals = [c.refusal for c in combinations if c.refusal is not None]
    if len(refusals) == len(combinations):
        raise refusals[0]
    return Sweep(spec, encoder_tokens, kv_memory_bytes, contexts, batches, combinations, list(dict.fromkeys(warnings)))


def _combine(
    spec: ModelSpec,
    contexts: Axis,
    engine: str,
    kv_dtype: str,
    size: int,
    dtype: str | None,
    encoder_tokens: int | None,
    warnings: list[str],
) -> Combination:
    try:
        resolved, _ = resolve_kv_dtype(engine, spec, kv_dtype)
        # The encoder may follow the context; nothing else of a workload that an engine is made for does.
        first = resolve_workload(spec, contexts.smallest, 1, dtype, resolved, size, encoder_tokens)
        held = bind_workload(spec, first)
        rules = load_engine(engine, held)
        check_devices(rules, engine, size)
        moves = has_cross_attention(spec) and encoder_tokens is None and spec.encoder_tokens is None

        def bound(tokens: int) -> tuple[ModelSpec, Workload, Engine]:
            if not moves:
                return held, first._replace(context_tokens=tokens), rules
            workload = resolve_workload(spec, tokens, 1, dtype, resolved, size, encoder_tokens)
            own = bind_workload(spec, workload)
            return own, workload, load_engine(engine, own)

        curves = None
        if rules.name == "logical" and not moves:
            curves = _curves(held, on_device(held, size), first.kv_dtype)
        # What refuses the shortest context refuses every one.
        cache_figures(held, first, rules)
    except KvcalcError as error:
        warnings.append(f"{engine}, {kv_dtype}, tp {size}: {error.message}")
        return Combination(engine, kv_dtype, size, None, None, error)
    warnings += rules.warnings
    if spec.is_encoder and rules.name == "logical":
        warnings.append(ENCODER_WARNING.format(name=spec.name))
    if moves:
        warnings.append("the encoder's input is taken to be as long as each context; --encoder-tokens")
    warnings += [w for w in first.warnings if not w.startswith(("context ", "the encoder's input"))]
    return Combination(rules.name, first.kv_dtype.name, size, bound, curves, None)


def _curves(spec: ModelSpec, share: ModelSpec, dtype: Dtype) -> tuple[Curve, Curve, Curve] | None:
    """Stored in all and on one device, and read; None where one of them is not straight."""
    stored, device, read = stored_curve(spec, dtype), stored_curve(share, dtype), read_curve(spec, dtype)
    return None if stored is None or device is None or read is None else (stored, device, read)
