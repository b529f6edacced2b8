"""The question that the command of a server asks."""

from __future__ import annotations

from typing import Any

from kvcalc.engines import context_limits, engine_class
from kvcalc.engines.checkpoint import has_unknown_cache
from kvcalc.engines.reading import Read, Reader
from kvcalc.errors import LayoutError, ModelError, UsageError
from kvcalc.model.drafting import WITH_DRAFT_MODEL, Speculation
from kvcalc.model.layout import LayoutAsked
from kvcalc.model.resolve import find_drafter, find_published, load_model
from kvcalc.model.spec import ModelSpec, with_config
from kvcalc.notes import Note
from kvcalc.question.fields import FIELDS
from kvcalc.question.question import Question, SpeedQuestion, setting_texts
from kvcalc.server.dp_attention import most_experts
from kvcalc.server.layout import needed_devices, sizes_of
from kvcalc.server.resolve import with_device
from kvcalc.throughput.hardware import Devices

_FLOATS = ("bf16", "fp16", "fp32")


def asked_by(
    read: Read, reader: Reader, devices: Devices, speed: SpeedQuestion | None = None,
    acceptance_length: float | None = None, num_devices: int | None = None,
) -> tuple[Question, list[Note]]:  # fmt: skip
    """The question about one server, and notes about what is not counted. `speed` has the lengths of requests.

    `num_devices` are those that the command leaves each of its machines, None for all. Raises UsageError (exit 2) for a
    value that cannot be read, ModelError (exit 3) for a model that is not known, and LayoutError (exit 2) for a server
    that needs more devices.
    """
    notes = list(read.notes)
    limits = [limit for limit in (num_devices, read.num_devices) if limit is not None]
    available = _available_devices(read, reader, devices, min(limits, default=None))
    if available is not None:
        devices = devices._replace(num_devices=available)
    spec = with_config(_model(read.model, notes), read.overrides)
    reader.check_model(read, spec)
    if read.converts_to is not None and spec.quantization is None:
        from kvcalc.model.published import RECIPES

        spec = spec._replace(quantization=RECIPES[read.converts_to].config)
    values: dict[str, Any] = {}
    for name, text in read.fields.items():
        if name == "tensor_parallel_size" and text == "all":
            values[name] = devices.num_devices
        elif name == "dtype":
            # A quantized checkpoint's type is that of its unquantized parts.
            if text and not (spec.quantization is not None and text in (*_FLOATS, "fp8")):
                values[name] = text
        elif text.strip():
            values[name] = _parsed(name, text, reader)
    if values.get("data_parallel_size", 1) > 1 and most_experts(spec):
        # Unlike kvcalc, no engine distributes whole experts over its DP ranks without being told.
        values.setdefault("expert_parallel_size", 1)
    fits_context = "max_model_len" in values and values["max_model_len"] is None
    context = values.pop("context_tokens", None) or values.pop("max_model_len", None)
    values.pop("max_model_len", None)
    if context is None and engine_class(read.engine).chooses_context and not read.keeps_context:
        fits_context = True
    default, _ = context_limits(read.engine, spec)
    if context is None and not fits_context and default is not None:
        context = default // read.length_shares
    if reader.words.splits_layers and "tensor_parallel_size" not in values:
        values.setdefault("pipeline_parallel_size", devices.num_devices)
    values.setdefault("tensor_parallel_size", 1)
    layout = LayoutAsked(**{name: values.pop(name) for name in LayoutAsked._fields if name in values})
    if read.unknown:
        notes.append(f"not counted: {', '.join(reader.described(read.unknown))}")
    if read.copies > 1:
        notes.append(f"the command starts {read.copies} copies of the server, of which one is checked")
    settings = dict(read.settings)
    if context is not None:
        # A later question about shorter requests does not change the server.
        defaults = with_device(read.engine, settings, devices, spec)
        settings |= engine_class(read.engine).context_defaults(settings, defaults, context)
    question = Question(
        spec, engine=read.engine, engine_settings=setting_texts(settings), devices=devices,
        context_tokens=None if fits_context else context, fits_context=fits_context,
        speed=None if speed == SpeedQuestion() else speed,
        speculative=_drafting(read, acceptance_length, notes), **values,
    ).with_layout(layout)  # fmt: skip
    if available is not None:
        question = question._replace(devices=_used_devices(question, read, devices))
    return question, [Note("command", "command", text) for text in notes]


def _available_devices(read: Read, reader: Reader, devices: Devices, num_devices: int | None) -> int | None:
    """The devices of all machines of a server. None if nothing says it: a single device stands for its kind."""
    if num_devices == 0:
        text = f"{engine_class(read.engine).title}: its variables leave it no device"
        # llama.cpp then runs on the host, whose memory is not counted.
        raise UsageError(text) if reader.words.splits_layers else LayoutError(text)
    if num_devices is None and devices.num_devices == 1:
        return None
    return (num_devices or devices.num_devices) * read.nodes


def _used_devices(question: Question, read: Read, devices: Devices) -> Devices:
    """The devices of whole replicas; the others are idle. LayoutError (exit 2) if there are too few."""
    layout, available = sizes_of(question), devices.num_devices
    replica = layout.num_devices
    if replica * read.copies > available:
        text = needed_devices(available, layout)
        text += f", and {read.copies} copies need {replica * read.copies}" if read.copies > 1 else ""
        raise LayoutError(text, "leave it more devices, or use a smaller --tp")
    return devices._replace(num_devices=available // replica * replica)


def _model(text: str, notes: list[str]) -> ModelSpec:
    """The model of a command. A path of the server that is not here may end in a published name, which a note says."""
    try:
        return load_model(text)
    except UsageError as error:
        specs = {name: known for name in _names_in(text) if (known := find_published(name)) is not None}
        if specs:
            # Prefer a name whose config was read: a folder such as /models is not a publisher.
            name = min(specs, key=lambda name: has_unknown_cache(specs[name]))
            notes.append(f"{text} is not here, and is taken as {name}")
            return specs[name]
        hint = error.hint or "if it is on the server, write the model's name instead, for example Qwen/Qwen3-8B"
        raise UsageError(error.message, hint) from None


def _names_in(path: str) -> list[str]:
    """The names that a path of a checkpoint may stand for: /models/Qwen/Qwen3-8B, or a folder of the Hub's cache."""
    parts = [part.replace("___", ".") for part in path.split("/") if part]  # as ModelScope writes folders
    cached = next((part for part in parts if part.startswith("models--") and part.count("--") == 2), None)
    if cached is not None:
        return ["/".join(cached.split("--")[1:])]
    return ["/".join(parts[-2:]), *(part for part in parts[-1:] if "-" in part)]


def _parsed(name: str, text: str, reader: Reader) -> Any:
    field = FIELDS[name]
    if name == "max_model_len" and text.casefold() in ("auto", "-1"):
        return None
    if field.type.parse is None:
        return text
    return field.type.parse(text, reader.flag_for(name) if name in reader.fields.values() else name)


def _drafting(read: Read, acceptance_length: float | None, notes: list[str]) -> Speculation | None:
    if read.drafting is None:
        return None
    method, number, checkpoint = read.drafting
    if checkpoint is not None and checkpoint.startswith("<"):
        checkpoint = None  # a placeholder that plan prints
    model: ModelSpec | None = None
    if checkpoint is not None and method in WITH_DRAFT_MODEL:
        try:
            model = find_drafter(checkpoint) or load_model(checkpoint)
        except (ModelError, UsageError):
            notes.append(f"the draft model {checkpoint} is not known, so drafting is not counted")
            return None
    return Speculation(method, number, acceptance_length, model)
