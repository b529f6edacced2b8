"""A question about one model as it was asked, its checks, and the values that follow from its devices and requests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvcalc.engines import engine_class
from kvcalc.errors import UsageError
from kvcalc.model.spec import ModelSpec
from kvcalc.model.variants import WhatIf
from kvcalc.records import NamedTuple
from kvcalc.releases import release_of
from kvcalc.units import Number, check_count, check_text, shown

if TYPE_CHECKING:
    from kvcalc.model.drafting import Speculation
    from kvcalc.planning.images import ImagesAsked
    from kvcalc.planning.layout import SpeedQuestion
    from kvcalc.planning.reuse import CacheReuse
    from kvcalc.throughput.hardware import Devices


class Question(NamedTuple):
    """A question before its defaults are resolved. None and `auto` mean the default.

    `kv_memory_bytes` is the memory for the cache on one device. With `devices` it replaces the memory that the engine's
    reserve would leave. The model runs on `devices`; without a `tensor_parallel_size` it is split over all of them.
    `speed` has the options for throughput. If it includes the lengths of requests, the context is the prompt and the
    answer of one request, and `batch_size` follows from the requests. `engine_settings` maps the engine's own options
    to their text; a flag may be True or False. `what_if` replaces the model's attention. `speculative` says how tokens
    are drafted, or is None if they are not. `data_parallel_size` is the number of attention replicas. With
    `fits_context` the context is the longest one that fits, as the engine chooses it (`planning.load`). `reuse`
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


# The whole numbers of a question and of its `speed`, the first with the least of each, and the fields that are text.
COUNTS = {
    "batch_size": 1, "pipeline_parallel_size": 1, "data_parallel_size": 1, "tensor_parallel_size": 1,
    "context_tokens": 1, "encoder_tokens": 1, "kv_memory_bytes": 0,
}  # fmt: skip
SPEED_COUNTS = ("expert_parallel_size", "input_tokens", "output_tokens", "concurrency")
TEXTS = ("dtype", "kv_dtype", "engine")


def checked(question: Question) -> Question:
    """The question with names in lower case.

    UsageError (exit 2) for a value of the wrong type, which can only come from the Python API.
    """
    for name, least in COUNTS.items():
        value = getattr(question, name)
        if value is not None or Question._field_defaults[name] is not None:
            check_count(value, name, least)
    if question.speed is not None:
        for name in SPEED_COUNTS:
            count = getattr(question.speed, name)
            if count is not None:
                check_count(count, name)
    for name in TEXTS:
        value = getattr(question, name)
        if value is not None or name != "dtype":
            check_text(value, name)
    if question.devices is not None:
        check_devices(question.devices)
    check_model(question.model, "model")
    given = question.engine_settings or {}
    if question.fits_context:
        _check_auto_context(question, given)
    return question._replace(engine=question.engine.casefold(), engine_settings=setting_texts(given))


def _check_auto_context(question: Question, settings: Mapping[str, Any]) -> None:
    """Raise UsageError (exit 2) if the engine does not choose a context, or has nothing to choose it from."""
    engine = question.engine.casefold()
    engine_class(engine).check_auto_context(settings, release_of(engine))
    if question.devices is None:
        raise UsageError(
            "--context auto needs a device, whose memory decides", "for example --gpu rtx-4090; or give --context N"
        )
    if question.serves_requests:
        raise UsageError("--context auto: with requests to serve, the context is that of a request", "remove --context")


def check_devices(value: object) -> None:
    """Raise UsageError (exit 2) if `value`, from a Python program, is not a number of devices."""
    from kvcalc.throughput.hardware import Devices

    if not isinstance(value, Devices):
        raise UsageError(f"devices {shown(value)}: must be Devices", 'use kvcalc.find_devices("h100x8")')
    check_count(value.num_devices, "num_devices")


def check_model(value: object, name: str) -> None:
    """Raise UsageError (exit 2) if `value`, from a Python program, is not a model."""
    if not isinstance(value, ModelSpec):
        raise UsageError(f"{name} {shown(value)}: must be a ModelSpec", "use kvcalc.load_model(NAME)")


def setting_texts(given: Mapping[str, Any]) -> dict[str, str]:
    """An engine's settings as text, without those that are None or False. A number needs no unit."""
    return {
        name: Number(value) if isinstance(value, (int, float, Number)) and value is not True else str(value).casefold()
        for name, value in given.items()
        if value is not None and value is not False
    }


def completed(question: Question) -> Question:
    """The question with the values that follow from the devices and the requests: the split and the context.

    Raises what `with_requests` raises.
    """
    devices, size, stages = engine_class(question.engine).split_layers(
        question.engine_settings or {}, question.devices, question.tensor_parallel_size,
        question.pipeline_parallel_size, question.data_parallel_size,
    )  # fmt: skip
    question = question._replace(devices=devices, tensor_parallel_size=size, pipeline_parallel_size=stages)
    if question.devices is None:
        return question
    from kvcalc.planning.layout import lay_out, prompt_ranks_of

    copies, replicas = prompt_ranks_of(question.engine_settings), question.data_parallel_size
    devices, size = lay_out(question.devices, size, stages, replicas, copies)
    return with_requests(question._replace(devices=devices, tensor_parallel_size=size))


def with_requests(question: Question) -> Question:
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
