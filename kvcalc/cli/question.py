"""Turn the text of the options into a question, whose fields `kvcalc.question.fields` declares.

`given` maps the names of a command's parameters to their text, None or a flag. A command need not have all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Optional, TypeVar

from kvcalc.errors import UsageError
from kvcalc.question.fields import FIELDS
from kvcalc.units import Number, parse_count, parse_network, parse_size

if TYPE_CHECKING:
    from kvcalc.model.drafting import Speculation
    from kvcalc.model.spec import ModelSpec
    from kvcalc.model.variants import WhatIf
    from kvcalc.output.sink import Output
    from kvcalc.planning.calibration import Calibration
    from kvcalc.question.question import CacheReuse, ImagesAsked, Question, SpeedQuestion
    from kvcalc.server.layout import Devices, Figures

_Parsed = TypeVar("_Parsed")
_Given = Mapping[str, Any]

ModelOf = Callable[[Optional[str], "WhatIf", dict[str, Optional[str]], bool], "tuple[ModelSpec, WhatIf]"]
"""A function that finds the model, such as `load_model_of`."""

# The config keys of a model without a config, whose options set them.
MODEL_FLAGS = ("num_hidden_layers", "num_attention_heads", "head_dim", "hidden_size", "sliding_window")
_DRAFTS = "METHOD:N, for example --speculative mtp:3 --acceptance-length 2.4"


def parsed(given: _Given, option: str, parse: Callable[[str, str], _Parsed]) -> _Parsed | None:
    """The value of an option such as `--steps` that is no field, or None if it was not given."""
    text = given.get(_parameter(option))
    return None if text is None else parse(text, option)


@cache
def _parameter(option: str) -> str:
    return option.removeprefix("--").replace("-", "_")


def value_of(given: _Given, name: str) -> Any:
    """The value of a field from the text of its option, or None if it is not given, or if no text is such a value."""
    field = FIELDS[name]
    text, parse = given.get(field.parameter), field.type.parse
    return None if text is None or parse is None else parse(text, field.long)


def values_of(record: type[Any], given: _Given) -> dict[str, Any]:
    """The values of a record's fields that are given and have an option of their own."""
    values = {field: value_of(given, field) for field in record._fields if field in FIELDS}
    return {field: value for field, value in values.items() if value is not None}


def output_of(
    given: _Given, kind: str | None = None, formats: tuple[str, ...] | None = None, *, is_list: bool = False
) -> Output:
    """How to print the answer. With `kind`, a --get path that its document cannot have is refused immediately.

    A list (`is_list`) is a table of tab-separated values if stdout is not a terminal.
    """
    from kvcalc.output.sink import FORMATS, choose

    output = choose(
        given["format"], given["json"], given["get"], given["no_color"], formats or FORMATS, is_list=is_list
    )
    if kind is not None:
        output.check_path(kind)
    return output


def context_of(given: _Given) -> int | None:
    """The value of --context, or of --max-model-len as vLLM reads it. UsageError if both are given and differ."""
    tokens: int | None = value_of(given, "context_tokens")
    vllm: int | None = value_of(given, "max_model_len")
    if vllm is None:
        return tokens
    if tokens not in (None, vllm):
        raise UsageError(f"--context {tokens} and --max-model-len {vllm} contradict each other")
    return vllm


def _asks_auto_context(given: _Given) -> bool:
    """Whether the engine is to choose the context: --context auto, or vLLM's --max-model-len auto or -1."""
    context, vllm = given.get("context"), given.get("max_model_len")
    if not isinstance(context or vllm, str):
        return False  # a number of a batch line, or neither
    texts = [text for text in (context, vllm) if text is not None]
    auto = [str(text).casefold() in ("auto", "-1") for text in texts]
    if any(auto) and not all(auto):
        raise UsageError(f"--context {context} and --max-model-len {vllm} contradict each other")
    return all(auto) and not (context is not None and context.strip() == "-1")


def what_if_of(given: _Given) -> WhatIf:
    """The what-if that the options describe."""
    from kvcalc.model.variants import WhatIf

    return WhatIf(**values_of(WhatIf, given))


def settings_of(given: _Given) -> dict[str, str]:
    """The engine's own options that were given: name to text."""
    return {
        name: text if isinstance(text, Number) else str(text).casefold()
        for name, parameter in _engine_parameters()
        if (text := given.get(parameter)) is not None and text is not False
    }


@cache
def _engine_parameters() -> tuple[tuple[str, str], ...]:
    from kvcalc.engines.options import option_names

    return tuple((name, _parameter(name)) for name in option_names())


def question_of(given: _Given, model_of: ModelOf | None = None, own: str = "") -> Question:
    """The question that the options ask.

    `own` names the options that mean something else in the command, and are no part of the question.
    """
    from kvcalc.model.variants import WhatIf
    from kvcalc.question.question import Question

    find, left = model_of or load_model_of, {**given, **dict.fromkeys(own.replace("-", "_").split())}
    assume = given.get("assume_full_attention", False)
    spec, what_if = find(given["model"], what_if_of(left), flags_of(left), assume)
    fits_context = _asks_auto_context(left)
    context_tokens, speed = None if fits_context else context_of(left), _speed_of(left, given)
    return Question(**{
        **values_of(Question, {**left, "context": None}),
        "model": spec,
        "context_tokens": context_tokens,
        "engine_settings": settings_of(given),
        "devices": devices_of(left),
        "speed": speed,
        "what_if": what_if,
        "speculative": _speculation_of(left, lambda name: find(name, WhatIf(), {}, False)[0]),
        "fits_context": fits_context,
        "reuse": _reuse_of(left),
        "images": _images_of(left),
    })  # fmt: skip


def flags_of(given: _Given, keys: Iterable[str] = MODEL_FLAGS) -> dict[str, str | None]:
    """The options that describe a model without a config, as text, by the key of a config that they set."""
    return {key: given.get(FIELDS[key].parameter) for key in keys}


def load_model_of(
    reference: str | None, what_if: WhatIf, flags: dict[str, str | None], assume_full_attention: bool = False
) -> tuple[ModelSpec, WhatIf]:
    """The model by name or path, or from flags alone, and the remaining what-if.

    `flags` maps keys of a config to text. They are read like a config.json with model_type `generic`. In that case,
    --kv-heads is the model's own number of KV heads, not a what-if. UsageError (exit 2) if a model and flags are both
    given.
    """
    from kvcalc.model.resolve import load_model

    given = [FIELDS[key].long for key, text in flags.items() if text is not None]
    if reference is not None:
        if given:
            raise UsageError(f"{given[0]} describes a model and cannot be combined with MODEL {reference!r}")
        return load_model(reference, assume_full_attention=assume_full_attention), what_if
    if not given:
        raise UsageError(
            "MODEL is missing",
            "name a preset (kvcalc models), or describe a model: --layers 32 --heads 32 --head-dim 128",
        )
    return _generic(flags, what_if.num_kv_heads), what_if._replace(num_kv_heads=None)


def _generic(flags: dict[str, str | None], num_kv_heads: int | None) -> ModelSpec:
    from kvcalc.errors import ModelError
    from kvcalc.model.hf_config import read_config

    config: dict[str, object] = {
        key: parse_count(text, FIELDS[key].long) for key, text in flags.items() if text is not None
    }
    for key in MODEL_FLAGS[:2]:
        if key not in config:
            raise UsageError(
                f"a model described by options needs {FIELDS[key].long}",
                "for example: --layers 32 --heads 32 --kv-heads 8 --head-dim 128",
            )
    if num_kv_heads is not None:
        config["num_key_value_heads"] = num_kv_heads
    try:
        return read_config({"model_type": "generic", **config}, "generic", "flags")
    except ModelError as error:
        # The wrong value was given as an option, so this is a usage error.
        raise UsageError(error.message.removeprefix("generic: "), error.hint) from None


def _speed_of(left: _Given, given: _Given) -> SpeedQuestion | None:
    """The options for throughput, or None if none of them is given."""
    from kvcalc.question.question import SpeedQuestion

    values, calibration = values_of(SpeedQuestion, left), calibration_of(given)
    if calibration is not None:
        values["calibration"] = calibration
    if "confidence" in values and not any(given.get(name) for name in ("input_tokens", "lengths", "trace")):
        raise UsageError("--confidence needs --input-tokens and --output-tokens", "it is about the times of requests")
    if given.get("benchmark"):
        values["benchmark"] = True
    return SpeedQuestion(**values) if values else None


def _images_of(given: _Given) -> ImagesAsked | None:
    """The images in every request, or None."""
    count, size = value_of(given, "number"), given.get("image_size")
    if count is None and size is None:
        return None
    if count is None or size is None:
        missing = "--images" if count is None else "--image-size"
        raise UsageError(f"{missing} is missing", "--images 2 --image-size 1920x1080")
    from kvcalc.question.question import ImagesAsked

    return ImagesAsked(count, *value_of(given, "pixels"))


def _speculation_of(given: _Given, load: Callable[[str], ModelSpec]) -> Speculation | None:
    """How tokens are drafted, or None if they are not. `load` reads the draft model.

    Raises UsageError (exit 2) for an unreadable value, or for an option that has no effect without --speculative.
    """
    text = given.get("speculative")
    if text is None:
        _check_needs(given, "acceptance_length", "draft_model")
        return None
    from kvcalc.model.drafting import SAME_METHODS, Speculation
    from kvcalc.model.resolve import find_drafter
    from kvcalc.server.drafting import check_speculation

    method, colon, number = text.strip().casefold().partition(":")
    if not colon:
        raise UsageError(f"--speculative {text[:40]}: the number of drafted tokens is missing", _DRAFTS)
    method = SAME_METHODS.get(method, method)
    tokens, model = 0 if number == "0" else parse_count(number, "--speculative"), given.get("draft_model")
    speculation = Speculation(method[:40], tokens, value_of(given, "acceptance_length"))
    if model is None:
        check_speculation(speculation, has_device=False)
        return speculation
    return speculation._replace(draft_model=find_drafter(model) or load(model))


def _reuse_of(given: _Given) -> CacheReuse | None:
    """How the cache is used again, or None if no option asks for it. Raises UsageError (exit 2)."""
    from kvcalc.question.question import CacheReuse

    tiers = {"offload": tier_sizes_of(given), "bandwidths": tier_rates_of(given)}
    reuse = CacheReuse(**{**values_of(CacheReuse, given), **tiers})
    return None if reuse == CacheReuse() else reuse


def _check_needs(given: _Given, *names: str) -> None:
    """UsageError (exit 2) if one of the fields is given without the one that it needs."""
    for field in map(FIELDS.__getitem__, names):
        text, needed = given.get(field.parameter), FIELDS[field.needs]
        if text is not None and given.get(needed.parameter) is None:
            hint = _DRAFTS if needed.name == "speculative" else "--offload cpu=200GiB"
            raise UsageError(f"{field.long} {text}: needs {needed.long}", hint)


def tier_sizes_of(given: _Given) -> tuple[tuple[str, int], ...]:
    """The bytes of each tier in --offload."""
    return _pairs(given, "offload", parse_size, "cpu=200GiB,disk=2TiB")


def tier_rates_of(given: _Given) -> tuple[tuple[str, int], ...]:
    """The bytes per second of each tier in --offload-bandwidth. UsageError (exit 2) without --offload."""
    _check_needs(given, "bandwidths")
    return _pairs(given, "offload_bandwidth", parse_network, "cpu=50GB/s,disk=6GB/s")


def _pairs(given: _Given, name: str, parse: Callable[[str, str], int], example: str) -> tuple[tuple[str, int], ...]:
    """The amount of each tier in `cpu=200GiB,disk=2TiB`, in this order."""
    text, option = given.get(name), "--" + name.replace("_", "-")
    if text is None:
        return ()
    pairs = []
    for part in text.split(","):
        tier, equals, amount = part.partition("=")
        if not equals:
            raise UsageError(f"{option} {text[:40]!a}: not a list of tiers", f"for example {option} {example}")
        pairs.append((tier.strip().casefold(), parse(amount.strip(), option)))
    if len({tier for tier, _ in pairs}) < len(pairs):
        raise UsageError(f"{option} {text[:40]}: a tier is given twice", f"for example {option} {example}")
    return tuple(pairs)


def calibration_of(given: _Given) -> Calibration | None:
    """What the files of --calibrate say, or None.

    UsageError (exit 2) if a file is not understood, or if it does not name the device or the engine and several are
    asked for.
    """
    paths = given.get("calibrate")
    if paths is None:
        return None
    from kvcalc.planning.calibration import read_calibration

    calibration = read_calibration((paths,) if isinstance(paths, str) else paths)
    for option, name in (("--gpu", "device"), ("--engine", "engine")):
        text = given.get(option.removeprefix("--")) or ""
        unnamed = calibration.first_without(name)
        if unnamed is not None and ("," in text or text.casefold() == "all"):
            raise UsageError(
                f"--calibrate {unnamed} does not name the {name}, and {option} names several",
                f"ask for the {name} that was measured alone",
            )
    return calibration


def devices_of(given: _Given) -> Devices | None:
    """The devices that the options name or describe, or None.

    Raises GpuError (exit 3) for an unknown name, UsageError (exit 2) for options that contradict each other, and
    RunError (exit 1) for `local` if there is no device.
    """
    if given.get("gpu") is None and given.get("gpu_memory") is None:
        for option in ("--num-gpus", "--gpu-bandwidth", "--flops", "--network", "--link", "--power-limit"):
            if given.get(_parameter(option)) is not None:
                raise UsageError(
                    f"{option} needs a device", "name one with --gpu h100, or describe one with --gpu-memory 80GB"
                )
        return None
    from kvcalc.server.layout import choose_devices

    if given["gpu"] is not None and "," in given["gpu"]:
        raise UsageError(
            f"--gpu {given['gpu'][:60]}: only one kind of device is supported here",
            f"to compare several, use kvcalc compare MODEL --gpu {given['gpu'][:60]}",
        )
    return choose_devices(given["gpu"], value_of(given, "num_devices"), _figures_of(given), _local_devices)


def kinds_of(names: Sequence[str], given: _Given) -> list[Devices]:
    """The devices with these names and the numbers in them, or the device described by its figures."""
    figures = _figures_of(given)
    if not names and not any(figures):
        return []
    from kvcalc.server.layout import choose_kinds

    return choose_kinds(names, figures, _local_devices)


def _figures_of(given: _Given) -> Figures:
    return (
        value_of(given, "memory_bytes"), value_of(given, "memory_bytes_per_second"), value_of(given, "flops"),
        value_of(given, "network"), value_of(given, "pcie"), value_of(given, "power_limit"),
    )  # fmt: skip


def _local_devices() -> Devices:
    from kvcalc.measure.devices.local import local_devices

    return local_devices()
