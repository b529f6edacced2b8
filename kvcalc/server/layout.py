"""The layout of replicas on devices, the context of a server and the options for throughput, checked first.

Devices are chosen by name, by number or by their figures.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvcalc.engines import context_limits, engine_class
from kvcalc.engines.declarations import OPTIONS
from kvcalc.errors import LayoutError, UsageError
from kvcalc.model.layout import Layout
from kvcalc.model.spec import weights_of
from kvcalc.model.variants import WhatIf
from kvcalc.question.question import Question, SpeedQuestion
from kvcalc.releases import release_of
from kvcalc.throughput.hardware import LOCAL, Devices, Gpu, find_devices, find_gpu, node_devices, own_gpu
from kvcalc.throughput.speed import check_layout
from kvcalc.units import parse_tokens


def check_speed(question: SpeedQuestion | None, layout: Layout) -> None:
    """Raise UsageError (exit 2) if one of the two request lengths is missing or --ep does not fit the ranks."""
    question = question or SpeedQuestion()
    given, taken = question.input_tokens, question.output_tokens
    if given is None and taken is None:
        if question.concurrency is not None:
            raise UsageError("--concurrency needs --input-tokens and --output-tokens", "use --batch for one step")
    elif given is None or taken is None:
        missing = "--input-tokens" if given is None else "--output-tokens"
        raise UsageError(f"serving needs {missing} too", "for example --input-tokens 2k --output-tokens 500")
    check_layout(layout)


def sizes_of(question: Question) -> Layout:
    """The sizes that a question names, those in its engine's settings too; else one."""
    prompt_ranks = engine_class(question.engine).prompt_ranks_in(question.engine_settings or {})
    return question.layout.sizes._replace(prompt_ranks=prompt_ranks)


def lay_out(question: Question) -> Question:
    """The question with its devices and its tensor-parallel size, as its engine splits a model over devices.

    Without a size, the model is split over all devices of a stage, and each copy of the attention over its part of
    them. If no number of devices was given (1), the result has as many as the layout needs. UsageError (exit 2) if the
    number of stages or of copies does not divide the number of devices.
    """
    devices, stages, layout = question.devices, question.pipeline_parallel_size, sizes_of(question)
    if devices is None or (devices.num_devices != 1 and question.tensor_parallel_size is not None):
        return question
    if devices.num_devices == 1:
        needed = devices._replace(num_devices=layout.num_devices)
        return question._replace(devices=needed, tensor_parallel_size=layout.tensor_parallel_size)
    of_stage, rest = divmod(devices.num_devices, stages)
    if rest:
        raise UsageError(f"--pipeline-parallel-size {stages} does not divide {devices.num_devices} devices")
    copies = layout.attention_copies
    size, rest = divmod(of_stage, copies)
    if rest or not size:
        sizes = {"--dp": layout.data_parallel_size, "prefill context parallelism": layout.prompt_ranks}
        given = " x ".join(f"{name} {number}" for name, number in sizes.items() if number > 1)
        raise UsageError(
            f"{given} does not divide {of_stage} devices",
            f"use --num-gpus {copies * stages}, or a number that divides {of_stage}",
        )
    return question._replace(tensor_parallel_size=size)


def count_replicas(num_devices: int, layout: Layout) -> int:
    """The number of replicas on the devices. LayoutError (exit 2) if the devices do not make up whole replicas."""
    replicas, rest = divmod(num_devices, layout.num_devices)
    if rest or not replicas:
        other = (
            "another --tp" if layout.data_parallel_size == 1 else "leave out --tp, which is the devices of one DP rank"
        )
        raise LayoutError(needed_devices(num_devices, layout), f"use --num-gpus {layout.num_devices}, or {other}")
    return replicas


def needed_devices(num_devices: int, layout: Layout) -> str:
    """Why `num_devices` do not make up replicas of this layout."""
    stages, dp_ranks, prompt_ranks = layout.pipeline_parallel_size, layout.data_parallel_size, layout.prompt_ranks
    sizes = f"--tp {layout.tensor_parallel_size}" + (f" --pp {stages}" if stages > 1 else "")
    sizes += f" --dp {dp_ranks}" if dp_ranks > 1 else ""
    sizes += f" and prefill context parallelism {prompt_ranks}" if prompt_ranks > 1 else ""
    devices = f"{num_devices} device{'s' if num_devices > 1 else ''}"
    return f"{devices} with {sizes}: one replica needs {layout.num_devices}"


def over_machines(question: Question, devices: Devices) -> tuple[int | None, int]:
    """The tensor-parallel size and the stages for devices that no fast link joins. None and 1 if a link joins them.

    Tensor parallelism stays within a machine, and every machine is a stage, as vLLM and SGLang advise: the ranks of a
    stage add up their results twice in every layer. If the model or the engine cannot be cut so, the size is None.
    """
    engine, model = engine_class(question.engine), question.model
    joined = node_devices(devices.gpu)
    machines, rest = divmod(devices.num_devices, joined)
    has_experts = question.speed is not None and question.speed.expert_parallel_size is not None
    if joined == 1 or machines < 2 or rest or has_experts or not (engine.splits_heads and engine.splits_layers):
        return None, 1
    if machines > model.num_layers or model.attention.num_heads % joined:
        return None, 1
    return joined, machines


def completed(question: Question) -> Question:
    """The question with the values that follow from the devices and the requests: the split and the context.

    Raises what `with_requests` raises.
    """
    question = split_layers(question)
    if question.devices is None:
        return question
    if question.tensor_parallel_size is None and sizes_of(question).num_devices == 1:
        size, stages = over_machines(question, question.devices)
        question = question._replace(tensor_parallel_size=size, pipeline_parallel_size=stages)
    return with_requests(lay_out(question))


def split_layers(question: Question) -> Question:
    """The question with the devices and the sizes that its engine's settings decide (`Engine.split_layers`)."""
    engine, settings = engine_class(question.engine), question.engine_settings or {}
    devices, layout = engine.split_layers(settings, question.devices, question.layout)
    return question.with_layout(layout)._replace(devices=devices)


def with_requests(question: Question) -> Question:
    """The question with its context, if it has devices: the length of the requests to serve, or the server's own.

    UsageError (exit 2) if the context or the batch contradicts the requests.
    """
    if question.devices is None:
        return question
    if question.speed is None:
        return with_context(question)
    request_tokens = question.speed.request_tokens
    if request_tokens is None:
        return with_context(question)
    if question.batch_size != 1:
        hint = f"use --concurrency {question.batch_size} for the number of requests"
        raise UsageError(
            f"--batch {question.batch_size}: with requests to serve, the batch is the number that run at once", hint
        )
    if question.context_tokens not in (None, request_tokens):
        context = f"--context {question.context_tokens}"
        raise UsageError(f"{context}: a request's prompt and answer have {request_tokens} tokens", "remove --context")
    return question._replace(context_tokens=request_tokens)


def as_started(question: Question, context_tokens: int) -> Question:
    """The question about a server that is started with this context, if its engine counts by an option for it."""
    option, settings = _counted_option(question), question.engine_settings or {}
    if not option or option in settings or context_limits(question.engine, question.model)[0] == context_tokens:
        return question
    return question._replace(engine_settings={**settings, option: str(context_tokens)})


def server_context(question: Question, context_tokens: int) -> int:
    """The context of the server that is started for the requests of a question, which have `context_tokens` tokens.

    Without requests, it is `context_tokens`.
    """
    speed = question.speed
    if speed is None or speed.longest_tokens is None:
        return context_tokens
    return context_for(question, speed.longest_prompt or 1, speed.longest_tokens, context_tokens)


def context_for(question: Question, prompt_tokens: int, longest_tokens: int, least_tokens: int = 1) -> int:
    """The context of a server for requests of up to `longest_tokens` tokens, with prompts of up to `prompt_tokens`.

    The engine may keep some of it free beside them. It is at most the context that its settings give, or else the
    longest that the server takes, but at least `least_tokens`.
    """
    option, prompt = _counted_option(question), min(prompt_tokens, longest_tokens - 1)
    needed = engine_class(question.engine).needed_context(prompt, longest_tokens - prompt)
    given, (_, limit) = (question.engine_settings or {}).get(option), context_limits(question.engine, question.model)
    if given is not None:
        limit = parse_tokens(given, option)
    return needed if limit is None else max(least_tokens, min(needed, limit))


def _counted_option(question: Question) -> str:
    """The engine's option for the context if kvcalc has it as a setting of the engine, else nothing."""
    option = (engine_class(question.engine).context_option or "").removeprefix("--")
    known = OPTIONS[question.engine.partition("@")[0]]
    return option if any(each.name == option for each in known) else ""


def with_context(question: Question) -> Question:
    """The question with the context that its server has, if nothing says one and the engine has a server.

    That is the one of its settings, else the model's own length, or the longest context that fits if the engine chooses
    it so.
    """
    engine = engine_class(question.engine)
    if question.context_tokens is not None or question.fits_context or not engine.has_server:
        return question
    given = (question.engine_settings or {}).get(_counted_option(question))
    if given is not None:
        return question._replace(context_tokens=parse_tokens(given, engine.context_option or ""))
    default, _ = context_limits(question.engine, question.model)
    if default is None:
        return question
    # Without the bytes of the weights it is not known what fits.
    is_known = question.what_if == WhatIf() and weights_of(question.model) is not None
    if engine.chooses_context and not is_known:
        return question
    if not engine.chooses_context:
        return question._replace(context_tokens=default)
    try:
        engine.check_auto_context(question.engine_settings or {}, release_of(question.engine))
    except UsageError:  # an older build, whose default is that of `resolve_context`
        return question
    return question._replace(fits_context=True)


__all__ = ["Devices", "Gpu", "choose_devices", "choose_kinds", "find_gpu"]


Figures = tuple["int | None", "int | None", "int | None", "int | None", "int | None", "int | None"]
"""A device's memory in bytes, its bandwidth in bytes per second, its bf16 operations per second, and the bytes per
second of its network port and of PCIe, and the watts of its power limit."""


def choose_devices(
    name: str | None, num_devices: int | None, figures: Figures, local: Callable[[], Devices]
) -> Devices:
    """The devices with this name (`h100x8`), or devices described by their memory. `figures` override the preset's.

    For the name `local`, the function `local` detects the devices of this machine. `num_devices` of the result is 1 if
    no number is given. Raises GpuError (exit 3) for an unknown name, UsageError (exit 2) for contradicting arguments,
    and the errors of `local`.
    """
    number, named = 1, None
    if name is not None and name.casefold() == LOCAL:
        named = local().gpu
    elif name is not None:
        named, number = find_devices(name)
        if num_devices is not None and number not in (1, num_devices):
            raise UsageError(f"--gpu {name} and --num-gpus {num_devices} contradict each other")
    return Devices(own_gpu(named, *figures), num_devices or number)


def choose_kinds(names: Sequence[str], figures: Figures, local: Callable[[], Devices]) -> list[Devices]:
    """The devices with these names, each once. Their number is the one in the name, or 1. The figures describe one.

    Raises the errors of `choose_devices`, and UsageError (exit 2) for figures with several names.
    """
    if len(names) > 1 and figures[:3] != (None, None, None):
        raise UsageError("--gpu-memory, --gpu-bandwidth and --flops describe one device, but --gpu names several")
    kinds: dict[tuple[str, int, int], Devices] = {}
    for name in names or (None,):
        devices = choose_devices(name, None, figures, local)
        kinds[devices.gpu.name, devices.gpu.memory_bytes, devices.num_devices] = devices
    return list(kinds.values())
