"""Compute one model over a grid of contexts, batches, cache types, devices and engines.

Rows are computed one by one and not kept, so memory does not grow with the grid.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, cast

from kvcalc.engines import engine_class, resolve_kv_dtype
from kvcalc.engines.default_engine import engine_on
from kvcalc.engines.options import AUTO_ENGINE, check_settings, settings_of
from kvcalc.errors import UsageError
from kvcalc.memory.dtypes import parse_dtype
from kvcalc.memory.workload import BEYOND_MODEL, resolve_workload
from kvcalc.model.describe import describe_model
from kvcalc.model.spec import ModelSpec
from kvcalc.model.variants import apply
from kvcalc.notes import Note
from kvcalc.planning.answers.axis import Axis
from kvcalc.planning.answers.combination import COLUMNS, Combination, Row, combine
from kvcalc.planning.answers.grouped_notes import RowNote, group_notes
from kvcalc.planning.answers.served_context import common_context
from kvcalc.question.question import Question, setting_texts
from kvcalc.records import NamedTuple
from kvcalc.schema import SCHEMA_VERSION
from kvcalc.server.case import context_decides

if TYPE_CHECKING:
    import kvcalc.documents as documents
    from kvcalc.throughput.hardware import Devices, Gpu

# An axis with fewer batches than this is expanded to a list, because it is read once per context.
_FEW = 1000
_MOST_CAPACITIES = 8


class Block(NamedTuple):
    """Rows of a sweep that have the same values in the columns of `alike`. `varying` names the columns of `rows`.

    `numbers` is true if all values in `rows` are whole numbers.
    """

    alike: dict[str, Any]
    varying: tuple[str, ...]
    rows: Iterator[Row]
    numbers: bool


class Sweep(NamedTuple):
    """A grid: what all points have in common, and the points, which are computed block by block as they are read."""

    model: ModelSpec
    kv_memory_bytes: int | None
    contexts: Axis
    batches: Axis
    combinations: tuple[Combination, ...]
    notes: tuple[Note, ...]

    @property
    def num_points(self) -> int:
        """The number of points, refused ones included."""
        return len(self.combinations) * len(self.contexts) * len(self.batches)

    def head(self) -> dict[str, Any]:
        """The part of the document before the points."""
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

    def points(self) -> Iterator[documents.SweepPoint]:
        """The points, each with the keys of `COLUMNS`."""
        for block in self.blocks():
            for row in block.rows:
                point = {**block.alike, **dict(zip(block.varying, row))}
                yield cast("documents.SweepPoint", {name: point[name] for name in COLUMNS})

    def chart(self, *, most_contexts: int, most_lines: int) -> documents.Chart:
        """Memory over context for a plot: the bytes of the cache on one device, and the memory available for it.

        There is a line for each combination and batch, up to `most_lines`, labelled by what differs between them. There
        is a capacity for each device.
        """
        contexts = self.contexts.sample(most_contexts)
        # The cache does not depend on the device.
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

    def _capacities(self, tokens: int) -> list[documents.ChartCapacity]:
        """The cache memory of a device: each size once, labelled by what differs between the combinations."""
        capacities: dict[int, dict[str, None]] = {}
        for combination in self.combinations:
            memory = 0 if combination.memory is None else combination.memory(tokens, 1)
            if memory > 0:
                label = " ".join(_differing(combination, self.combinations))
                capacities.setdefault(memory, {})[label] = None
        return [
            {"label": ", ".join(labels), "bytes": memory}
            for memory, labels in list(capacities.items())[:_MOST_CAPACITIES]
        ]

    def _label(self, combination: Combination, batch: int, every: Sequence[Combination]) -> str:
        words = _differing(combination, every, of=3)
        if len(self.batches) > 1:
            words.append(f"batch {batch:,}")
        return " ".join(words) or self.model.name


def _words(combination: Combination) -> tuple[str, ...]:
    """The words that identify a combination. The last one is the device, which does not change the cache."""
    row = combination.alike
    return row["engine"], row["kv_dtype"], f"tp {row['tensor_parallel_size']}", row["gpu"] or ""


def _note_words(combination: Combination) -> tuple[str, ...]:
    """The same words, in the order in which a note should use them to name combinations."""
    engine, kv_dtype, size, gpu = _words(combination)
    return size, engine, gpu, kv_dtype


def _differing(combination: Combination, every: Sequence[Combination], of: int = 4) -> list[str]:
    """The first `of` words of a combination, without those that are the same in all combinations."""
    columns = zip(*(_words(other)[:of] for other in every))
    return [word for word, column in zip(_words(combination), columns) if word and len(set(column)) > 1]


def _check_kv_dtype(kv_dtype: str, engines: Sequence[str], spec: ModelSpec, dtype: str | None) -> None:
    """UsageError (exit 2) for a type that neither kvcalc nor any of the engines supports."""
    try:
        parse_dtype(kv_dtype, "--kv-dtype")
        return
    except UsageError as error:
        unknown = error
    for engine in engines:
        try:
            resolved, _ = resolve_kv_dtype(engine, spec, kv_dtype, dtype=dtype)
            if isinstance(resolved, str):
                parse_dtype(resolved, "--kv-dtype")
            return
        except UsageError as error:
            unknown = error
    raise unknown


def sweep(
    question: Question,
    *,
    contexts: Axis | None = None,
    batches: Axis,
    kv_dtypes: Sequence[str] = ("auto",),
    gpus: Sequence[Gpu | Devices] = (),
    tensor_parallel_sizes: Axis | None = None,
    engines: Sequence[str] = (AUTO_ENGINE,),
) -> Sweep:
    """The grid of every engine, cache type, device, tensor-parallel size, context and batch.

    `gpus` are kinds of device; a layout takes as many devices of a kind as it needs. On `Devices` with a number above
    1, the model is split over all of them unless `tensor_parallel_sizes` is given. All points share the other fields of
    the question: `speed` applies to every device. Its settings may be those of several engines. Each engine takes its
    own, and each option must belong to at least one of the engines.

    A combination that is refused keeps its rows, with the reason instead of figures. If all combinations are refused,
    the first refusal is raised: UsageError (exit 2) or ModelError (exit 3). An unknown engine or cache type is a
    UsageError.
    """
    spec, settings = apply(question.model, question.what_if), setting_texts(question.engine_settings or {})
    platforms = _platforms(engines, gpus, spec, question.dtype)
    for engine in platforms:
        engine_class(engine)
    check_settings(platforms, settings, has_device=bool(gpus))
    if settings.get("n-gpu-layers") == "auto":
        raise UsageError(
            "-ngl auto: every point of a sweep would have a different number of layers", "for example -ngl 20"
        )
    if question.speed is not None and not gpus:
        raise UsageError(
            "serving options, --prefix-hit-rate, --ep and --calibrate need a device", "for example --gpu h100"
        )
    for kv_dtype in kv_dtypes:
        if kv_dtype != "auto":
            _check_kv_dtype(kv_dtype, list(platforms), spec, question.dtype)
    questions = [
        layout
        for engine, kinds in platforms.items() for kv_dtype in kv_dtypes
        for layout in _layouts(
            kinds, tensor_parallel_sizes,
            question._replace(engine=engine, engine_settings=settings_of(engine, settings), kv_dtype=kv_dtype),
        )
    ]  # fmt: skip
    if contexts is None:
        tokens = resolve_workload(spec).context_tokens
        contexts = Axis([(common_context(questions, tokens) if gpus else tokens,)])
    notes: list[Note] = []
    limit = spec.max_position_embeddings
    if limit is not None and contexts.largest > limit:
        text = f"contexts up to {contexts.largest:,} exceed the model's max_position_embeddings of {limit:,}"
        notes.append(Note("workload", BEYOND_MODEL, text))
    found: list[tuple[Combination, list[Note]]] = []
    for layout in questions:
        own_notes: list[Note] = []
        varies = contexts.smallest != contexts.largest and context_decides(layout)
        shortest = layout._replace(context_tokens=contexts.smallest)
        found.append((combine(shortest, batches.largest, own_notes, varies_by_context=varies), own_notes))
    combinations = [combination for combination, _ in found]
    refusals = [c.refusal for c in combinations if c.refusal is not None]
    if len(refusals) == len(combinations):
        raise refusals[0]
    notes = [*(Note("model", "remark", text) for text in spec.remarks), *notes]
    about_rows = [
        RowNote(_note_words(combination), note, devices and devices.gpu)
        for combination, own_notes in found
        for devices in (combination.question.devices,)
        for note in own_notes
    ]
    refused = [
        RowNote(_note_words(c), Note("points", "refused", c.refusal.message))
        for c in combinations
        if c.refusal is not None
    ]
    notes += group_notes(about_rows, [_note_words(c) for c in combinations if c.refusal is None])
    notes += group_notes(refused, list(map(_note_words, combinations)))
    return Sweep(spec, question.kv_memory_bytes, contexts, batches, tuple(combinations), tuple(dict.fromkeys(notes)))


def _platforms(
    engines: Sequence[str], gpus: Sequence[Gpu | Devices], spec: ModelSpec, dtype: str | None
) -> dict[str, list[Gpu | Devices]]:
    """The engines by name, each with the kinds of device on which it runs (`engine_on`)."""
    platforms: dict[str, list[Gpu | Devices]] = {}
    for engine in engines:
        for kind in gpus:
            platforms.setdefault(engine_on(engine, spec, kind, dtype), []).append(kind)
        if not gpus:
            platforms[engine_on(engine, spec, None, dtype)] = []
    return platforms


def _layouts(gpus: Sequence[Gpu | Devices], sizes: Axis | None, question: Question) -> Iterator[Question]:
    """The question with every device and every tensor-parallel size.

    UsageError (exit 2) if stages do not divide the devices.
    """
    for gpu in gpus or (None,):
        for size in sizes or (None,):
            if gpu is None:
                yield question._replace(tensor_parallel_size=size or 1)
                continue
            from kvcalc.server.layout import lay_out, split_layers
            from kvcalc.throughput.hardware import Devices

            devices = gpu if isinstance(gpu, Devices) else Devices(gpu, 1)
            yield lay_out(split_layers(question._replace(devices=devices, tensor_parallel_size=size)))
