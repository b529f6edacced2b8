"""How do the bytes change? One model over a grid of contexts, batches, cache types, devices and engines.

The rows are computed as they are asked for and never held: memory does not grow with the grid.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from kvcalc.errors import UsageError
from kvcalc.memory.dtypes import parse_dtype
from kvcalc.memory.engines import check_engine, resolve_kv_dtype
from kvcalc.memory.workload import resolve_workload
from kvcalc.model.describe import describe_model
from kvcalc.model.spec import ModelSpec
from kvcalc.model.variants import WhatIf, apply
from kvcalc.planning.axis import Axis
from kvcalc.planning.combination import COLUMNS, Combination, Grid, Row, combine
from kvcalc.schema import SCHEMA_VERSION

if TYPE_CHECKING:
    from kvcalc.throughput.hardware import Gpu

# So many batches are spelt out, to be gone through again and again.
_FEW = 1000
_MOST_CAPACITIES = 4


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
    kv_memory_bytes: int | None
    contexts: Axis
    batches: Axis
    combinations: tuple[Combination, ...]
    warnings: list[str]

    @property
    def num_points(self) -> int:
        """Refused ones too."""
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
        batches: Iterable[int] = list(self.batches) if len(self.batches) < _FEW else self.batches
        for combination in self.combinations:
            yield Block(combination.alike, *combination.rows(self.contexts, batches))

    def points(self) -> Iterator[dict[str, Any]]:
        """The points, each under the names of `COLUMNS`."""
        for block in self.blocks():
            for row in block.rows:
                point = {**block.alike, **dict(zip(block.varying, row))}
                yield {name: point[name] for name in COLUMNS}

    def chart(self, *, most_contexts: int, most_lines: int) -> dict[str, Any]:
        """Memory over context, to be drawn: the bytes of a device's cache, a line for each combination and batch, the
        first ones, named by what differs between them; and the memory there is for it, by device."""
        contexts = self.contexts.sample(most_contexts)
        # The cache is the same whatever it lies on.
        alike = list({_words(c)[:3]: c for c in reversed(self.combinations)}.values())[::-1]
        pairs = ((combination, batch) for combination in alike for batch in self.batches)
        return {
            "title": self.model.name,
            "contexts": contexts,
            "lines": [
                {"label": self._label(c, batch, alike), "bytes": [c.device_bytes(tokens, batch) for tokens in contexts]}
                for c, batch in islice(pairs, most_lines)
            ],
            "capacities": self._capacities(contexts[0]),
            "omitted": max(0, len(alike) * len(self.batches) - most_lines),
        }

    def _capacities(self, tokens: int) -> list[dict[str, Any]]:
        """What a device has for the cache, once for each size, named by what differs."""
        found: dict[int, str] = {}
        for combination in self.combinations:
            memory = 0 if combination.memory is None else combination.memory(tokens, 1)
            if memory > 0:
                found.setdefault(memory, " ".join(_differing(combination, self.combinations)))
        return [{"label": label, "bytes": memory} for memory, label in list(found.items())[:_MOST_CAPACITIES]]

    def _label(self, combination: Combination, batch: int, every: Sequence[Combination]) -> str:
        words = _differing(combination, every)[:3]
        if len(self.batches) > 1:
            words.append(f"batch {batch:,}")
        return " ".join(words) or self.model.name


def _words(combination: Combination) -> tuple[str, ...]:
    size = f"tp {combination.tensor_parallel_size}"
    return combination.engine, combination.kv_dtype, size, combination.gpu or ""


def _differing(combination: Combination, every: Sequence[Combination]) -> list[str]:
    columns = zip(*map(_words, every))
    return [word for word, column in zip(_words(combination), columns) if len(set(column)) > 1]


def _check_kv_dtype(asked: str, engines: Sequence[str], spec: ModelSpec, dtype: str | None) -> None:
    """UsageError (exit 2) for a type that neither kvcalc nor any of the engines has a name for."""
    try:
        parse_dtype(asked, "--kv-dtype")
        return
    except UsageError as error:
        unknown = error
    for engine in engines:
        try:
            resolved, _ = resolve_kv_dtype(engine, spec, asked, dtype=dtype)
            if isinstance(resolved, str):
                parse_dtype(resolved, "--kv-dtype")
            return
        except UsageError as error:
            unknown = error
    raise unknown


def sweep(
    model: ModelSpec,
    *,
    contexts: Axis | None = None,
    batches: Axis,
    kv_dtypes: Sequence[str] = ("auto",),
    gpus: Sequence[Gpu] = (),
    tensor_parallel_sizes: Axis,
    engines: Sequence[str] = ("logical",),
    dtype: str | None = None,
    encoder_tokens: int | None = None,
    kv_memory_bytes: int | None = None,
    what_if: WhatIf = WhatIf(),
) -> Sweep:
    """The grid of every engine, cache type, device, tensor-parallel size, context and batch.

    A combination that is refused keeps its rows, without figures and with the reason. Where all are refused the first
    refusal is raised: UsageError (exit 2) or ModelError (exit 3). So is an engine or a cache type nobody knows.
    """
    spec = apply(model, what_if)
    for engine in engines:
        check_engine(engine)
    for kv_dtype in kv_dtypes:
        if kv_dtype != "auto":
            _check_kv_dtype(kv_dtype, engines, spec, dtype)
    if gpus and kv_memory_bytes is not None:
        raise UsageError("--kv-memory and a device: each says what there is for the cache", "give one of them")
    if contexts is None:
        contexts = Axis([(resolve_workload(spec).context_tokens,)])
    warnings = list(spec.remarks)
    if spec.max_position_embeddings is not None and contexts.largest > spec.max_position_embeddings:
        warnings.append(
            f"contexts up to {contexts.largest:,} are beyond the model's max_position_embeddings of "
            f"{spec.max_position_embeddings:,}"
        )
    grid = Grid(model, spec, contexts.smallest, batches.largest, dtype, encoder_tokens, kv_memory_bytes)
    combinations = tuple(
        combine(grid, engine, kv_dtype, gpu, size, warnings)
        for engine in engines
        for kv_dtype in kv_dtypes
        for gpu in gpus or (None,)
        for size in tensor_parallel_sizes
    )
    refusals = [c.refusal for c in combinations if c.refusal is not None]
    if len(refusals) == len(combinations):
        raise refusals[0]
    return Sweep(spec, kv_memory_bytes, contexts, batches, combinations, list(dict.fromkeys(warnings)))
