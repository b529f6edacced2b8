"""A question about one model with every default resolved.

The command line, each line of `kvcalc batch` and the Python API create a `Question`. `make_case` checks it and resolves
its defaults (`server.resolve`). All answers are computed from the resulting `Case`.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from typing import TYPE_CHECKING

from kvcalc.engines import engine_class
from kvcalc.engines.allocation import Allocation
from kvcalc.engines.engine import Engine
from kvcalc.memory.kv_cache import on_device
from kvcalc.memory.sharding import Bounds, stages_of
from kvcalc.memory.workload import BEYOND_MODEL, Workload, bind_workload, resolve_context
from kvcalc.model.layout import Layout
from kvcalc.model.memo import keep, remembered
from kvcalc.model.spec import ModelSpec, has_cross_attention, largest_at
from kvcalc.notes import Note
from kvcalc.question.question import Question
from kvcalc.records import NamedTuple
from kvcalc.server.resolve import (
    allocation_of,
    checked,
    laid_out,
    notes_of,
    resolve_types,
    settings_of,
    with_engine,
    with_hits,
)

if TYPE_CHECKING:
    import kvcalc.documents as documents
    from kvcalc.engines.prefixes import Prefixes
    from kvcalc.memory.reads import Reads
    from kvcalc.question.question import SpeedQuestion
    from kvcalc.throughput.hardware import Devices


# The most cases that are remembered for one model.
_MOST_CASES = 256


class Case(NamedTuple):
    """A question that has been checked and resolved.

    `spec` is the model with the what-if applied, bound to the workload. `cached` has all layers with a cache: those of
    `spec`, and those that draft tokens. `share` is one tensor-parallel rank's share of `cached`. `settings` are the
    engine's settings, including the defaults that depend on the device. `device_defaults` are those that a device would
    change, None if there is a device or no engine. `device` is the number of the device whose layers `share` has if
    every device has its own, else None.
    """

    question: Question
    spec: ModelSpec
    cached: ModelSpec
    share: ModelSpec
    workload: Workload
    allocation: Allocation
    settings: Mapping[str, str]
    kv_dtype_reason: str | None
    notes: tuple[Note, ...]
    device_defaults: list[documents.DeviceDefault] | None = None
    device: int | None = None

    @property
    def layout(self) -> Layout:
        """How one replica is split over devices."""
        return self.workload.layout

    @property
    def model(self) -> ModelSpec:
        """The model without the what-if."""
        return self.question.model

    @property
    def engine(self) -> Engine:
        return self.allocation.engine

    @property
    def engine_class(self) -> type[Engine]:
        """The class with the engine's facts, which hold for encoders too, although no cache of theirs is counted."""
        return engine_class(self.question.engine)

    @property
    def engine_name(self) -> str:
        """The engine's name, without a release."""
        return self.question.engine.partition("@")[0]

    @property
    def devices(self) -> Devices:
        """The devices the model runs on. ValueError if the case has none, so check `question.devices` first."""
        if self.question.devices is None:
            raise ValueError("this case has no devices")
        return self.question.devices

    @property
    def stages(self) -> Bounds:
        """The layers of each pipeline stage."""
        engine = self.engine
        return engine.bounds or engine.stage_bounds(self.spec.num_layers, self.layout.pipeline_parallel_size)

    @property
    def encoder_follows_context(self) -> bool:
        """Whether the encoder's input is assumed to be as long as the context. The engine decides how much it keeps."""
        tokens = self.question.encoder_tokens
        return tokens is None and self.model.encoder_tokens is None and has_cross_attention(self.model)

    def at(self, context_tokens: int, batch_size: int) -> Case:
        """The same case with another context and batch. The notes of the original case are kept."""
        question = self.question
        if self.encoder_follows_context or context_decides(question):
            # make_case accepts only the requests' own context, and this may be another one: check without the requests.
            alike = question._replace(context_tokens=context_tokens, batch_size=batch_size, speed=None)
            return make_case(alike)._replace(question=alike._replace(speed=question.speed))
        self.engine.check_context(context_tokens)
        return self._replace(workload=self.workload._replace(context_tokens=context_tokens, batch_size=batch_size))

    def of_length(self, context_tokens: int) -> Case:
        """The same case, whose encoder follows the context, with another context. No limit of the engine is checked.

        For the search for the longest context.
        """
        workload = self.workload._replace(context_tokens=context_tokens, encoder_tokens=context_tokens)
        spec = bind_workload(self.spec, workload)
        cached, allocation = allocation_of(self.question, spec, workload, self.settings)
        share = on_device(cached, workload.layout.tensor_parallel_size)
        longer = self._replace(spec=spec, cached=cached, share=share, allocation=allocation, workload=workload)
        if self.device is None:
            return longer
        return longer.of_devices()[self.device]

    def of_devices(self) -> list[Case]:
        """The case for each device: its layers, which are not divided any more. For devices with their own layers."""
        engine = copy(self.engine)
        engine.bounds = ()
        stages, allocation = stages_of(self.share, self.engine.bounds), self.allocation.of(engine)
        return [self._replace(share=stage, allocation=allocation, device=number) for number, stage in enumerate(stages)]

    def reads(self, first: int, num_layers: int) -> Reads:
        """What a decode step reads on one tensor-parallel rank of the cache of these layers.

        The layers that draft tokens come after the model's.
        """
        share = on_device(self.cached, self.layout.tensor_parallel_size)
        (part,) = stages_of(share, ((first, first + num_layers - 1),))
        return self.allocation.reads(part, self.workload.kv_dtype)

    def cache_bytes(self, tokens: int, sequences: int) -> int:
        """The bytes that `sequences` sequences of `tokens` tokens take on a device, whatever the case's own context.

        The sequences are those of one DP rank. The encoder's input follows the context if nothing else is
        asked for.
        """
        case = self.of_length(tokens) if self.encoder_follows_context else self
        return case.allocation.batch_bytes(case.share, case.workload.kv_dtype, tokens, sequences)

    def prefixes(self) -> Prefixes:
        """The engine's prefix cache on a device of the largest pipeline stage. Raises what `Engine.prefixes` raises."""
        workload = self.workload
        dtype, batch = workload.kv_dtype, workload.attention_batch
        stage = self.allocation.largest_stage(self.share, dtype, workload.context_tokens, batch)
        return self.allocation.prefixes(stage, dtype)

    def needed_bytes(self, tokens: int, sequences: int) -> int:
        """The most bytes that the sequences take on a device until they have `tokens` tokens.

        If the engine requires more before it starts, that amount counts.
        """
        is_other = tokens != self.workload.context_tokens and self.encoder_follows_context
        case = self.of_length(tokens) if is_other else self
        allocation, share, dtype = case.allocation, case.share, case.workload.kv_dtype
        held = [allocation.batch_bytes(share, dtype, length, sequences) for length in largest_at(share, tokens)]
        return max(allocation.start_bytes(share, dtype, tokens), *held)


def make_case(question: Question) -> Case:
    """The case of a question.

    Raises UsageError (exit 2) if a value is out of range or contradicts another one, and ModelError (exit 3) if the
    engine is not known to support the model.
    """
    complete = checked(question)
    if complete.devices is not None or complete.engine_settings:
        from kvcalc.server.layout import completed

        complete = completed(complete)
    if not is_reusable(complete):
        return _resolve(complete)
    given, devices, speed = complete.engine_settings or {}, complete.devices, complete.speed
    key = (
        complete.dtype, complete.kv_dtype, complete.engine, complete.layout, complete.encoder_tokens, complete.what_if,
        *given.items(), *map(type, given.values()), devices and (id(devices.gpu), devices.num_devices),
        speed and speed.prefix_hit_rate,
    )  # fmt: skip
    known = _cases_of(complete.model)
    case = known.get(key)
    if case is not None:
        return _with_load(case, complete)
    # A case holds its device, so that its id() is not reused.
    return keep(known, key, _resolve(complete), _MOST_CASES)


def is_reusable(question: Question) -> bool:
    """Whether the case of the same question with other counts differs in its workload only (`case_like`)."""
    plain = question.speculative is None and question.reuse is None and question.images is None
    plain = plain and not question.fits_context
    return plain and not has_cross_attention(question.model) and not context_decides(question)


def context_decides(question: Question) -> bool:
    """Whether defaults of the engine depend on the context, such as a step that divides no prompt."""
    return bool(engine_class(with_engine(question).engine).context_defaults(question.engine_settings or {}, {}, 1))


def case_like(case: Case, context_tokens: int | None, batch_size: int, speed: SpeedQuestion | None) -> Case:
    """The case of the same question with other counts, each at least 1. The question of `case` must be reusable.

    `speed` may differ from the speed question of `case` in its lengths and its concurrency, and in nothing else. Raises
    what `make_case` raises.
    """
    question = case.question._replace(
        context_tokens=context_tokens, batch_size=batch_size, speed=speed, fits_context=False
    )
    if question.devices is not None:
        from kvcalc.server.layout import with_requests

        question = with_requests(question)
    return _with_load(case, question)


@remembered
def _cases_of(model: ModelSpec) -> dict[tuple[object, ...], Case]:
    """The cases made so far for this model, by everything that is not the context, the batch or the requests."""
    return {}


def _with_load(case: Case, question: Question) -> Case:
    """`case` with the context, the batch and the requests of another question that is otherwise the same."""
    spec, workload = case.spec, case.workload
    tokens, beyond = resolve_context(spec, question.context_tokens)
    case.engine.check_context(tokens)
    if question.devices is not None:
        from kvcalc.server.layout import check_speed

        check_speed(question.speed, workload.layout)
    notes, notes_of_load = case.notes, workload.notes
    if beyond is not None or any(note.code == BEYOND_MODEL for note in notes_of_load):
        # The workload's notes follow the remarks, and this one is the first of them.
        others, remarks = [note for note in notes if note.code != BEYOND_MODEL], len(spec.remarks)
        added = () if beyond is None else (beyond,)
        notes = (*others[:remarks], *added, *others[remarks:])
        notes_of_load = (*added, *(note for note in notes_of_load if note.code != BEYOND_MODEL))
    resolved = case.question
    return case._replace(
        # `_resolve` replaces the model and the type of the weights by those that the engine reads.
        question=question._replace(model=resolved.model, dtype=resolved.dtype),
        workload=workload._replace(context_tokens=tokens, batch_size=question.batch_size, notes=notes_of_load),
        notes=notes,
    )


def _resolve(question: Question) -> Case:
    """The case of a question whose values are checked and complete."""
    found = resolve_types(question)
    question, spec = found.asked, found.spec
    settings = settings_of(found)
    cached, allocation = allocation_of(question, spec, found.workload, settings)
    engine = allocation.engine
    workload = laid_out(question, spec, engine, found.workload)
    share = on_device(cached, workload.layout.tensor_parallel_size)
    question, hits = with_hits(question, spec, allocation, share, workload)
    notes = notes_of(found, engine, workload, settings, hits)
    case = Case(question, spec, cached, share, workload, allocation, settings, found.reason, notes)
    if question.devices is not None or engine.is_formula:
        return case
    from kvcalc.server.device_defaults import describe_device_defaults

    given = question.engine_settings or {}
    types = (question.kv_dtype, workload.kv_dtype.name, question.dtype)
    return case._replace(device_defaults=describe_device_defaults(spec, question.engine, given, engine.settings, types))
