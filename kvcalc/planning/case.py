"""A question about one model, first as it was asked and then with every default resolved.

The command line, each line of `kvcalc batch` and the Python API create a `Question`. `make_case` checks the question
and resolves its defaults. All answers are computed from the resulting `Case`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from kvcalc.errors import LayoutError, UsageError
from kvcalc.memory.engines import (
    Engine,
    check_engine,
    load_engine,
    replica_settings,
    resolve_kv_dtype,
    resolve_weight_dtype,
)
from kvcalc.memory.engines.options import check_settings
from kvcalc.memory.kv_cache import on_device
from kvcalc.memory.sharding import Bounds
from kvcalc.memory.workload import BEYOND_MODEL, Workload, bind_workload, resolve_context, resolve_workload
from kvcalc.model.memo import remembered
from kvcalc.model.spec import ModelSpec, has_cross_attention
from kvcalc.model.variants import WhatIf, apply
from kvcalc.notes import Note
from kvcalc.units import Number, check_count

if TYPE_CHECKING:
    from kvcalc.model.drafting import Speculation
    from kvcalc.planning.images import ImagesAsked
    from kvcalc.planning.layout import SpeedQuestion
    from kvcalc.planning.reuse import CacheReuse
    from kvcalc.throughput.hardware import Devices


# The most cases that are remembered for one model.
_MOST_CASES = 256


class Question(NamedTuple):
    """A question before its defaults are resolved. None and `auto` mean the default.

    `kv_memory_bytes` is the memory for the cache on one device. With `devices` it replaces the memory that the engine's
    reserve would leave. The model runs on `devices`; without a `tensor_parallel_size` it is split over all of them.
    `speed` has the options for throughput. If it includes the lengths of requests, the context is the prompt and the
    answer of one request, and `batch_size` follows from the requests. `engine_settings` maps the engine's own options
    to their text; a flag may be True or False. `what_if` replaces the model's attention. `speculative` says how tokens
    are drafted, or is None if they are not. `data_parallel_size` is the number of attention replicas. With
    `fits_context` the context is the longest one that fits, as the engine chooses it (`planning.auto_context`). `reuse`
    says how a cache is used again, and `images` are those in every request, whose tokens are a part of the context.
    """

    model: ModelSpec
    context_tokens: int | None = None
    batch_size: int = 1
    dtype: str | None = None
    kv_dtype: str = "auto"
    engine: str = "logical"
    engine_settings: Mapping[str, Any] | None = None
    tensor_parallel_size: int | None = None
    pipeline_parallel_size: int = 1
    encoder_tokens: int | None = None
    kv_memory_bytes: int | None = None
    devices: Devices | None = None
    speed: SpeedQuestion | None = None
    what_if: WhatIf = WhatIf()
    speculative: Speculation | None = None
    data_parallel_size: int = 1
    fits_context: bool = False
    reuse: CacheReuse | None = None
    images: ImagesAsked | None = None

    @property
    def serves_requests(self) -> bool:
        return self.speed is not None and self.speed.request_tokens is not None


class Case(NamedTuple):
    """A question that has been checked and resolved.

    `spec` is the model with the what-if applied, bound to the workload. `cached` has all layers with a cache: those of
    `spec`, and those that draft tokens. `share` is one tensor-parallel rank's share of `cached`. `settings` are the
    engine's settings, including the defaults that depend on the device. `device_defaults` are those that a device would
    change, None if there is a device or no engine.
    """

    question: Question
    spec: ModelSpec
    cached: ModelSpec
    share: ModelSpec
    workload: Workload
    rules: Engine
    settings: Mapping[str, str]
    kv_dtype_reason: str | None
    notes: tuple[Note, ...]
    device_defaults: list[dict[str, Any]] | None = None

    @property
    def model(self) -> ModelSpec:
        """The model without the what-if."""
        return self.question.model

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
        rules = self.rules
        return rules.bounds or rules.stage_bounds(self.spec.num_layers, self.workload.pipeline_parallel_size)

    @property
    def encoder_follows_context(self) -> bool:
        """Whether the encoder's input is assumed to be as long as the context. The engine decides how much it keeps."""
        asked = self.question.encoder_tokens
        return asked is None and self.model.encoder_tokens is None and has_cross_attention(self.model)

    def at(self, context_tokens: int, batch_size: int) -> Case:
        """The same case with another context and batch. The notes of the original case are kept."""
        asked = self.question
        if self.encoder_follows_context:
            # make_case accepts only the requests' own context, and this may be another one: check without the requests.
            there = asked._replace(context_tokens=context_tokens, batch_size=batch_size, speed=None)
            return make_case(there)._replace(question=there._replace(speed=asked.speed))
        self.rules.check_context(context_tokens)
        return self._replace(workload=self.workload._replace(context_tokens=context_tokens, batch_size=batch_size))

    def of_length(self, context_tokens: int) -> Case:
        """The same case, whose encoder follows the context, with another context. No limit of the engine is checked.

        For the search for the longest context.
        """
        workload = self.workload._replace(context_tokens=context_tokens, encoder_tokens=context_tokens)
        spec = bind_workload(self.spec, workload)
        cached, rules = _engine_of(self.question, spec, workload, self.settings)
        share = on_device(cached, workload.tensor_parallel_size)
        return self._replace(spec=spec, cached=cached, share=share, rules=rules, workload=workload)


def make_case(question: Question) -> Case:
    """The case of a question.

    Raises UsageError (exit 2) if a value is out of range or contradicts another one, and ModelError (exit 3) if the
    engine is not known to support the model.
    """
    asked = _completed(_checked(question))
    if not is_reusable(asked):
        return _resolve(asked)
    given, devices, speed = asked.engine_settings or {}, asked.devices, asked.speed
    key = (
        asked.dtype, asked.kv_dtype, asked.engine, asked.tensor_parallel_size, asked.pipeline_parallel_size,
        asked.data_parallel_size, asked.encoder_tokens, asked.what_if, *given.items(), *map(type, given.values()),
        devices and (id(devices.gpu), devices.num_devices),
        speed and (speed.expert_parallel_size, speed.prefix_hit_rate),
    )  # fmt: skip
    known = _cases_of(asked.model)
    found = known.get(key)
    if found is not None:
        return _with_load(found, asked)
    found = _resolve(asked)
    if len(known) >= _MOST_CASES:
        known.clear()
    known[key] = found  # it holds the device, so that its id() is not reused
    return found


def is_reusable(question: Question) -> bool:
    """Whether the case of the same question with other counts differs in its workload only (`case_like`)."""
    plain = question.speculative is None and question.reuse is None and question.images is None
    return plain and not has_cross_attention(question.model)


def case_like(case: Case, context_tokens: int | None, batch_size: int, speed: SpeedQuestion | None) -> Case:
    """The case of the same question with other counts, each at least 1. The question of `case` must be reusable.

    `speed` may differ from the speed question of `case` in its lengths and its concurrency, and in nothing else. Raises
    what `make_case` raises.
    """
    asked = case.question._replace(context_tokens=context_tokens, batch_size=batch_size, speed=speed)
    return _with_load(case, _with_requests(asked))


@remembered
def _cases_of(model: ModelSpec) -> dict[tuple[object, ...], Case]:
    """The cases made so far for this model, by everything that is not the context, the batch or the requests."""
    return {}


def _with_load(case: Case, asked: Question) -> Case:
    """`case` with the context, the batch and the requests of another question that is otherwise the same."""
    spec, workload = case.spec, case.workload
    tokens, beyond = resolve_context(spec, asked.context_tokens)
    case.rules.check_context(tokens)
    if asked.devices is not None:
        from kvcalc.planning.layout import check_speed

        check_speed(asked.speed, workload)
    notes, own = case.notes, workload.notes
    if beyond is not None or any(note.code == BEYOND_MODEL for note in own):
        # The workload's notes follow the remarks, and this one is the first of them.
        others, remarks = [note for note in notes if note.code != BEYOND_MODEL], len(spec.remarks)
        added = () if beyond is None else (beyond,)
        notes = (*others[:remarks], *added, *others[remarks:])
        own = (*added, *(note for note in own if note.code != BEYOND_MODEL))
    dtype = case.question.dtype
    return case._replace(
        question=asked if asked.dtype == dtype else asked._replace(dtype=dtype),
        workload=workload._replace(context_tokens=tokens, batch_size=asked.batch_size, notes=own),
        notes=notes,
    )


def _resolve(asked: Question) -> Case:
    """The case of a question whose values are checked and complete."""
    size = asked.tensor_parallel_size or 1
    if asked.model.as_transformers is not None and asked.engine.partition("@")[0] in asked.model.with_its_classes:
        asked = asked._replace(model=asked.model.as_transformers)
    spec = apply(asked.model, asked.what_if)
    settings, devices = asked.engine_settings or {}, asked.devices
    check_engine(asked.engine)
    weight_dtype, weight_note = resolve_weight_dtype(asked.engine, spec, asked.dtype)
    asked = asked._replace(dtype=weight_dtype)
    if devices is not None:
        from kvcalc.planning.layout import with_device

        settings = with_device(asked.engine, settings, devices)
    elif asked.speed is not None:
        raise UsageError(
            "serving options, --prefix-hit-rate, --ep and --calibrate need a device", "for example --gpu h100"
        )
    device_class = None if devices is None else devices.gpu.device_class
    resolved, reason = resolve_kv_dtype(asked.engine, spec, asked.kv_dtype, settings, asked.dtype, device_class)
    workload = resolve_workload(
        spec, asked.context_tokens, asked.batch_size, asked.dtype, resolved, size,
        asked.encoder_tokens, asked.pipeline_parallel_size,
    )  # fmt: skip
    spec = bind_workload(spec, workload)
    if asked.reuse is not None:
        from kvcalc.planning.reuse import check_reuse

        check_reuse(asked.reuse, devices is not None, asked.speculative is not None)
    if asked.speculative is not None:
        from kvcalc.planning import drafting

        drafting.check_speculation(asked.speculative, devices is not None)
        drafting.check_engine_drafts(asked.speculative, asked.engine, spec)
        settings = drafting.engine_settings(asked.speculative, asked.engine, settings)
    if asked.images is not None:
        from kvcalc.planning.images import check_images

        check_images(asked.model, asked.images, workload.context_tokens)
    check_settings([asked.engine], settings, has_device=devices is not None)
    cached, rules = _engine_of(asked, spec, workload, settings)
    if workload.tensor_parallel_size > 1 and not rules.splits_heads:
        raise LayoutError(
            f"--tp {workload.tensor_parallel_size}: tensor parallelism is not supported for {asked.engine}",
            f"use --pp {workload.tensor_parallel_size} to split the layers" if rules.splits_layers else "use --tp 1",
        )
    rules.check_ranks(spec, workload.tensor_parallel_size)
    experts = None if asked.speed is None else asked.speed.expert_parallel_size
    if asked.data_parallel_size > 1:
        from kvcalc.planning.attention_replicas import with_attention_replicas

        workload = with_attention_replicas(asked.model, asked.data_parallel_size, experts, rules, workload)
    elif experts is not None:
        workload = workload._replace(expert_parallel_size=experts)
    rules.check_context(workload.context_tokens)
    if devices is not None:
        from kvcalc.planning.layout import check_speed, count_replicas

        check_speed(asked.speed, workload)
        count_replicas(devices.num_devices, workload)
    notes = [*(Note("model", "remark", text) for text in spec.remarks), *workload.notes, *rules.notes]
    notes += [weight_note] if weight_note else []
    share = on_device(cached, workload.tensor_parallel_size)
    if asked.reuse is not None:
        from kvcalc.planning.layout import SpeedQuestion
        from kvcalc.planning.reuse import resolve

        rate, found = resolve(asked.reuse, asked.speed or SpeedQuestion(), rules, share, workload)
        if devices is not None:
            asked = asked._replace(speed=(asked.speed or SpeedQuestion())._replace(prefix_hit_rate=rate))
        notes += found
    elif asked.speed is not None and asked.speed.prefix_hit_rate:
        from kvcalc.planning.prefix_hits import prefix_hit_notes

        notes += prefix_hit_notes(asked.speed.prefix_hit_rate, rules.name, spec)
    if asked.speculative is not None:
        notes += drafting.notes_of(asked.speculative, rules.name, spec, settings)
    if spec.is_encoder and rules.name == "logical":
        text = "these bytes follow from the formula, but they last for one forward pass only and engines keep none"
        notes.append(Note("kv_cache", "encoder", f"{spec.name} is an encoder: {text}"))
    case = Case(asked, spec, cached, share, workload, rules, settings, reason, tuple(notes))
    if devices is not None or rules.name == "logical":
        return case
    from kvcalc.planning.device_defaults import describe_device_defaults

    given = asked.engine_settings or {}
    types = (asked.kv_dtype, workload.kv_dtype.name, asked.dtype)
    return case._replace(device_defaults=describe_device_defaults(spec, asked.engine, given, rules.settings, types))


def _checked(question: Question) -> Question:
    """The question with names in lower case.

    UsageError (exit 2) for a value of the wrong type, which can only come from the Python API.
    """
    check_count(question.batch_size, "batch_size")
    check_count(question.pipeline_parallel_size, "pipeline_parallel_size")
    check_count(question.data_parallel_size, "data_parallel_size")
    if question.tensor_parallel_size is not None:
        check_count(question.tensor_parallel_size, "tensor_parallel_size")
    if question.context_tokens is not None:
        check_count(question.context_tokens, "context_tokens")
    if question.encoder_tokens is not None:
        check_count(question.encoder_tokens, "encoder_tokens")
    if question.kv_memory_bytes is not None:
        check_count(question.kv_memory_bytes, "kv_memory_bytes", least=0)
    if question.speed is not None:
        for name in ("expert_parallel_size", "input_tokens", "output_tokens", "concurrency"):
            count = getattr(question.speed, name)
            if count is not None:
                check_count(count, name)
    for name in ("dtype", "kv_dtype", "engine"):
        value = getattr(question, name)
        if not isinstance(value, str) and not (name == "dtype" and value is None):
            raise UsageError(f"{name} {value!r}: must be a string")
    if question.devices is not None:
        from kvcalc.throughput.hardware import Devices

        if not isinstance(question.devices, Devices):
            raise UsageError(f"devices {question.devices!r}: must be Devices", 'use kvcalc.find_devices("h100x8")')
        check_count(question.devices.num_devices, "num_devices")
    if not isinstance(question.model, ModelSpec):
        raise UsageError(f"model {question.model!r}: must be a ModelSpec", "use kvcalc.load_model(NAME)")
    given = question.engine_settings or {}
    if question.fits_context:
        from kvcalc.planning.auto_context_check import check_auto_context

        has_device, serves = question.devices is not None, question.serves_requests
        check_auto_context(question.engine.casefold(), given, has_device, serves)
    settings = {
        name: Number(value) if isinstance(value, (int, float, Number)) and value is not True else str(value).casefold()
        for name, value in given.items()
        if value is not None and value is not False
    }
    return question._replace(engine=question.engine.casefold(), engine_settings=settings)


def _completed(question: Question) -> Question:
    """The question with the values that follow from the devices and the requests: the split and the context.

    Raises what `_with_requests` raises.
    """
    if question.engine.startswith("llama.cpp") and (
        question.engine_settings or (question.devices is not None and question.devices.num_devices > 1)
    ):
        question = _split(question)
    if question.devices is None:
        return question
    from kvcalc.planning.layout import lay_out

    size = question.tensor_parallel_size
    devices, size = lay_out(question.devices, size, question.pipeline_parallel_size, question.data_parallel_size)
    return _with_requests(question._replace(devices=devices, tensor_parallel_size=size))


def _split(question: Question) -> Question:
    """The question with the devices among which llama.cpp divides the layers."""
    from kvcalc.planning.split_layout import split_layers

    devices, size, stages = split_layers(
        question.engine_settings or {}, question.devices, question.tensor_parallel_size,
        question.pipeline_parallel_size, question.data_parallel_size,
    )  # fmt: skip
    return question._replace(devices=devices, tensor_parallel_size=size, pipeline_parallel_size=stages)


def _with_requests(question: Question) -> Question:
    """The question with the length of the requests as its context, if it has devices and serves requests.

    UsageError (exit 2) if the context or the batch contradicts the requests.
    """
    if question.devices is None or question.speed is None:
        return question
    request_tokens = question.speed.request_tokens
    if request_tokens is None:
        return question
    if question.batch_size != 1:
        hint = f"use --concurrency {question.batch_size} for the number of requests"
        raise UsageError(
            f"--batch {question.batch_size}: with requests to serve, the batch is the number that run at once", hint
        )
    if question.context_tokens not in (None, request_tokens):
        asked = f"--context {question.context_tokens}"
        raise UsageError(f"{asked}: a request's prompt and answer have {request_tokens} tokens", "remove --context")
    return question._replace(context_tokens=request_tokens)


def _engine_of(
    asked: Question, spec: ModelSpec, workload: Workload, settings: Mapping[str, str]
) -> tuple[ModelSpec, Engine]:
    """All layers with a cache, those that draft tokens included, and the engine that counts them."""
    stages = workload.pipeline_parallel_size
    if asked.data_parallel_size > 1:
        settings = replica_settings(asked.engine, spec.model_type, settings, asked.data_parallel_size)
    given = sorted(settings.items())
    if asked.reuse is not None:
        from kvcalc.planning.reuse import with_prefix

        return spec, with_prefix(_rules_of(spec, asked.engine, stages, *given), asked.reuse)
    if asked.speculative is None:
        return spec, _rules_of(spec, asked.engine, stages, *given)
    from kvcalc.planning import drafting

    cached = drafting.with_layers(asked.speculative, spec, workload)
    drafter = drafting.drafter_of(asked.speculative, spec, workload)
    own = [(name, text) for name, text in given if name not in drafting.OF_THE_MODEL_ALONE]

    def load(model: ModelSpec) -> Engine:
        return _rules_of(model, asked.engine, 1, *(given if model is spec or model is cached else own))

    rules = drafting.rules_of(asked.engine, drafter, spec, cached, load)
    return cached, drafting.with_slots(asked.speculative, rules, asked.serves_requests)


@remembered
def _rules_of(spec: ModelSpec, engine: str, stages: int, *settings: tuple[str, str]) -> Engine:
    return load_engine(engine, spec, dict(settings), stages)
