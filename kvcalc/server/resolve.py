"""The steps that turn a checked question into a case: types and settings, the engine, the layout, and the notes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from kvcalc.engines import engine_class, load_engine, resolve_kv_dtype
from kvcalc.engines.allocation import PLAIN, Allocation, Drafts, Requests
from kvcalc.engines.engine import Engine
from kvcalc.engines.options import AUTO_ENGINE, check_settings
from kvcalc.engines.place import Place
from kvcalc.errors import LayoutError, ModelError, UsageError
from kvcalc.memory.dtypes import FILE_TYPES, GGUF_TYPES, Dtype, gguf_type, parse_weight_dtype
from kvcalc.memory.workload import Workload, bind_workload, resolve_workload
from kvcalc.model.memo import remembered
from kvcalc.model.spec import ModelSpec, all_caches
from kvcalc.model.variants import apply
from kvcalc.notes import Note
from kvcalc.question.question import Question, setting_texts
from kvcalc.records import NamedTuple
from kvcalc.releases import release_of

if TYPE_CHECKING:
    from kvcalc.throughput.hardware import Devices


def with_engine(question: Question) -> Question:
    """The question with the name of its engine in lower case, or with the one that people start on its devices."""
    engine = question.engine.casefold()
    if engine == AUTO_ENGINE:
        from kvcalc.engines.default_engine import engine_on

        engine = engine_on(engine, question.model, question.devices, question.dtype)
    return question if engine == question.engine else question._replace(engine=engine)


def checked(question: Question) -> Question:
    """The question with an engine and with settings as text.

    UsageError (exit 2) if the engine cannot choose the context.
    """
    question = with_engine(question)
    given, engine = question.engine_settings or {}, question.engine
    if question.fits_context:
        engine_class(engine).check_auto_context(given, release_of(engine))
        if question.devices is None:
            hint = "for example --gpu rtx-4090; or give --context N"
            raise UsageError("--context auto needs a device, whose memory decides", hint)
        if question.serves_requests:
            text = "--context auto: with requests to serve, the context is that of a request"
            raise UsageError(text, "remove --context")
    return question._replace(engine_settings=setting_texts(given))


class Types(NamedTuple):
    """A question whose types are resolved.

    `asked` has the type of the weights and the model as the engine reads it. `spec` is that model with the what-if
    applied, bound to `workload`. `settings` include the engine's defaults on the device. `reason` is why the cache has
    its type.
    """

    asked: Question
    spec: ModelSpec
    workload: Workload
    settings: Mapping[str, str]
    reason: str | None
    weight_note: Note | None


def resolve_types(question: Question) -> Types:
    """The types of the weights and the cache, and the workload.

    Raises UsageError (exit 2) if an option needs a device, and what the engine raises for a type.
    """
    in_transformers, engine = question.model.as_transformers, engine_class(question.engine)
    if in_transformers is not None and engine.classes_of_transformers in question.model.with_its_classes:
        question = question._replace(model=in_transformers)
    question = _with_named_dtype(question)
    spec, narrowed = computed(engine, engine.kept(apply(question.model, question.what_if)), question.dtype)
    settings, devices = question.engine_settings or {}, question.devices
    weight_dtype, weight_note = engine.weight_dtype(spec, question.dtype)
    question = question._replace(dtype=weight_dtype)
    if devices is not None:
        settings = with_device(question.engine, settings, devices, spec)
    elif question.speed is not None:
        raise UsageError(
            "serving options, --prefix-hit-rate, --ep and --calibrate need a device", "for example --gpu h100"
        )
    if question.context_tokens is not None:
        settings = {
            **settings,
            **engine.context_defaults(question.engine_settings or {}, settings, question.context_tokens),
        }
    device_class = None if devices is None else devices.gpu.device_class
    kv_dtype, reason = resolve_kv_dtype(
        question.engine, spec, question.kv_dtype, settings, question.dtype, device_class
    )
    if devices is not None:
        kv_type = kv_dtype.name if isinstance(kv_dtype, Dtype) else kv_dtype
        place = Place(release_of(question.engine), device_class)
        settings = engine.with_default_block(spec, kv_type, settings, place)
    workload = resolve_workload(
        spec, question.context_tokens, question.batch_size, question.dtype, kv_dtype, question.layout.sizes,
        question.encoder_tokens,
    )  # fmt: skip
    return Types(question, bind_workload(spec, workload), workload, settings, reason, weight_note or narrowed)


def computed(engine: type[Engine], spec: ModelSpec, dtype: str | None) -> tuple[ModelSpec, Note | None]:
    """The model in the type in which the engine computes it, and a note if that is not the config's."""
    scheme = parse_weight_dtype(dtype)
    if spec.torch_dtype != "fp32" or engine.fp32_as == "fp32" or (scheme is not None and scheme.is_float):
        return spec, None
    text = f"the config says fp32; {engine.title} computes in {engine.fp32_as} (--dtype fp32 keeps fp32)"
    return spec._replace(torch_dtype=engine.fp32_as), Note("model", "narrowed", text)


def _with_named_dtype(question: Question) -> Question:
    """The question with the type of the weights that the model's name says, unless it has its own.

    The bytes of some of llama.cpp's file types are not known. Their model has a quantization that is not modelled.
    """
    named, file = question.model.named_dtype, question.model.named_file
    if named is None:
        return question
    plain = named.removeprefix("gguf:")
    dtype = plain if plain == named else gguf_type(plain) or plain
    if question.dtype is not None:
        if file is None or file.size_range is None or question.dtype == dtype:
            return question
        return question._replace(model=question.model._replace(named_file=file._replace(size_range=None)))
    if plain == named or dtype in FILE_TYPES or dtype in GGUF_TYPES:
        return question._replace(dtype=dtype)
    return question._replace(model=question.model._replace(quantization={"quant_method": f"gguf {plain}"}))


def with_device(
    engine: str, settings: Mapping[str, str], devices: Devices, spec: ModelSpec | None = None
) -> dict[str, str]:
    """The engine's settings, including the defaults that depend on the device, and on the model if one is given."""
    gpu = devices.gpu
    place = gpu.memory_bytes, gpu.name, gpu.device_class, release_of(engine)
    return {**engine_class(engine).device_settings(*place, settings, spec), **settings}


def settings_of(types: Types) -> Mapping[str, str]:
    """The engine's settings, with those that drafting adds.

    Raises UsageError (exit 2) if the options of reuse, drafts, images or the engine do not suit the question, and
    ModelError (exit 3) if they do not suit the model.
    """
    question, settings, has_device = types.asked, types.settings, types.asked.devices is not None
    if question.reuse is not None:
        from kvcalc.server.reuse import check_reuse

        check_reuse(question.reuse, has_device)
    if question.speculative is not None:
        from kvcalc.server import drafting

        drafting.check_speculation(question.speculative, has_device)
        reuse = engine_class(question.engine).reuse()
        reuse.check_drafts(question.speculative, types.spec, settings)
        settings = reuse.draft_settings(question.speculative, settings)
    if question.images is not None:
        from kvcalc.server.images import check_images

        check_images(question.model, question.images, types.workload.context_tokens)
    check_settings([question.engine], settings, has_device=has_device)
    return settings


def allocation_of(
    question: Question, spec: ModelSpec, workload: Workload, settings: Mapping[str, str]
) -> tuple[ModelSpec, Allocation]:
    """All layers with a cache, those that draft tokens included, and what the engine allocates for them."""
    stages = workload.layout.pipeline_parallel_size
    if not all_caches(spec):
        text = f"{spec.name}: it drafts tokens for another model, and only reads that model's cache"
        raise ModelError(text, "give it with --speculative draft:4 --draft-model, and estimate the other model")
    if question.data_parallel_size > 1:
        from kvcalc.server.dp_attention import most_experts

        # Whole copies of a model without experts each have the settings as they are given.
        if most_experts(spec):
            replicated = engine_class(question.engine, spec.model_type)
            settings = replicated.replica_settings(settings, question.data_parallel_size)
    given = sorted(settings.items())
    if question.speculative is None:
        cached, requests = spec, PLAIN
        engine = _engine_of(spec, question.engine, stages, *given)
    else:
        from kvcalc.server import drafting

        cached = drafting.with_layers(question.speculative, spec, workload)
        drafter, drafts = drafting.drafter_of(question.speculative, spec, workload), None
        own_pool = drafting.has_own_pool(question.engine, drafter)
        engine = _engine_of(spec if own_pool else cached, question.engine, 1, *given)
        if drafter is not None and own_pool:
            others = [(name, text) for name, text in given if name not in drafting.OF_THE_MODEL_ALONE]
            drafts = Drafts(_engine_of(drafter.spec, question.engine, 1, *others), drafter.spec)
        slots, matching = drafting.slots_of(question.speculative, engine, question.serves_requests), None
        if question.reuse is not None:
            matching = drafting.matching_of(question.speculative, question.engine, spec, question.reuse)
        requests = Requests(0, slots, matching, drafts)
    if question.reuse is not None and not engine.copies_prefixes:
        requests = requests._replace(prefix_tokens=question.reuse.prefix_tokens)
    return cached, Allocation(engine, requests)


@remembered
def _engine_of(spec: ModelSpec, engine: str, stages: int, *settings: tuple[str, str]) -> Engine:
    return load_engine(engine, spec, dict(settings), stages)


def laid_out(question: Question, spec: ModelSpec, engine: Engine, workload: Workload) -> Workload:
    """The workload with the DP ranks and the expert-parallel ranks.

    Raises UsageError (exit 2) if the engine, the context or the number of devices does not allow the layout, and
    ModelError (exit 3) if the model does not.
    """
    layout = workload.layout._replace(
        token_ranks=engine.token_ranks, prompt_ranks=engine.prompt_ranks, divides_decode=engine.divides_decode
    )
    ranks = layout.tensor_parallel_size
    if ranks > 1 and not engine.splits_heads:
        raise LayoutError(
            f"--tp {ranks}: tensor parallelism is not supported for {question.engine}",
            f"use --pp {ranks} to split the layers" if engine.splits_layers else "use --tp 1",
        )
    engine.check_ranks(spec, layout)
    if layout.attention_copies > 1:
        from kvcalc.server.dp_attention import with_dp_ranks

        layout = with_dp_ranks(question.model, layout, question.layout.expert_parallel_size, engine)
    else:
        layout = layout.with_experts(question.layout.expert_parallel_size)
    engine.check_context(workload.context_tokens)
    if question.devices is not None or (layout.num_devices > 1 and spec.quantization):
        from kvcalc.engines.starts import Start
        from kvcalc.server.dp_attention import spread_names

        gpu = None if question.devices is None else question.devices.gpu
        names = spread_names(spec, engine, layout)
        engine.check_start(Start(spec, workload.kv_dtype, layout, names, question.dtype, gpu))
    if question.devices is not None:
        from kvcalc.server.layout import check_speed, count_replicas

        check_speed(question.speed, layout)
        count_replicas(question.devices.num_devices, layout)
    return workload._replace(layout=layout)


def with_hits(
    question: Question, spec: ModelSpec, allocation: Allocation, share: ModelSpec, workload: Workload
) -> tuple[Question, list[Note]]:
    """The question with the hit rate that follows from the reuse of its cache, and the notes about hits.

    `share` is one tensor-parallel rank's share of the layers with a cache.
    """
    if question.reuse is not None:
        from kvcalc.server.reuse import resolve

        speed = question.speed_asked
        rate, notes = resolve(question.reuse, speed, allocation, share, workload)
        if question.devices is not None:
            question = question._replace(speed=speed._replace(prefix_hit_rate=rate))
        return question, notes
    if question.speed is not None and question.speed.prefix_hit_rate:
        from kvcalc.server.reuse import prefix_hit_notes

        return question, prefix_hit_notes(question.speed.prefix_hit_rate, allocation.engine, spec)
    return question, []


def notes_of(
    types: Types, engine: Engine, workload: Workload, settings: Mapping[str, str], hits: list[Note]
) -> tuple[Note, ...]:  # fmt: skip
    """All notes of a case, in their order. `hits` are those about the prefix cache."""
    spec, drafts = types.spec, types.asked.speculative
    notes = [*(Note("model", "remark", text) for text in spec.remarks), *workload.notes, *engine.notes]
    notes += [types.weight_note] if types.weight_note else []
    if workload.layout.has_whole_copies:
        text = f"{spec.name} has no experts to divide: every DP rank is a whole copy of the model"
        notes.append(Note("workload", "whole-copies", text))
    notes += hits
    if drafts is not None:
        from kvcalc.server import drafting

        notes += drafting.notes_of(drafts, engine.name, spec, settings)
    if spec.is_encoder and engine.is_formula:
        text = "these bytes follow from the formula, but they last for one forward pass only and engines keep none"
        notes.append(Note("kv_cache", "encoder", f"{spec.name} is an encoder: {text}"))
    elif spec.is_encoder:
        text = f"its tokens attend to all others in one forward pass, and {engine.title} keeps no K and V"
        notes.append(Note("kv_cache", "encoder", f"{spec.name}: {text}"))
    return tuple(notes)
