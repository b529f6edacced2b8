"""Turn the text of the options into a model, a workload, devices and an engine's settings.

`given` maps the names of a command's parameters to their text, None or a flag. A command need not have all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Optional, TypeVar

from kvcalc.cli.drafting import hit_rate_of, speculation_of
from kvcalc.cli.reuse import reuse_of
from kvcalc.engines.options import option_names
from kvcalc.errors import UsageError
from kvcalc.model.spec import ModelSpec
from kvcalc.model.variants import WhatIf
from kvcalc.units import Number, parse_bandwidth, parse_count, parse_flops, parse_size, parse_tokens, parse_vllm_tokens

if TYPE_CHECKING:
    from kvcalc.output.sink import Output
    from kvcalc.planning.calibration import Calibration
    from kvcalc.planning.devices import Devices, Figures
    from kvcalc.planning.images import ImagesAsked
    from kvcalc.planning.layout import SpeedQuestion

_Parsed = TypeVar("_Parsed")
_Given = Mapping[str, Any]

ModelOf = Callable[[Optional[str], WhatIf, dict[str, Optional[str]], bool], tuple[ModelSpec, WhatIf]]
"""A function that finds the model, such as `load_model_of`."""

# The options that describe a model without a config, and the config keys they set.
_MODEL_FLAGS = {
    "--layers": "num_hidden_layers",
    "--heads": "num_attention_heads",
    "--head-dim": "head_dim",
    "--hidden-size": "hidden_size",
    "--sliding-window": "sliding_window",
}


def parsed(given: _Given, option: str, parse: Callable[[str, str], _Parsed]) -> _Parsed | None:
    """The value of an option such as `--batch`, or None if it was not given."""
    text = given.get(_parameter(option))
    return None if text is None else parse(text, option)


@cache
def _parameter(option: str) -> str:
    return option.removeprefix("--").replace("-", "_")


def output_of(given: _Given, kind: str | None = None, formats: tuple[str, ...] | None = None) -> Output:
    """How to print the answer. With `kind`, a --get path that its document cannot have is refused immediately."""
    from kvcalc.output.sink import FORMATS, choose

    found = choose(given["format"], given["json"], given["get"], given["no_color"], formats or FORMATS)
    if kind is not None:
        found.check_path(kind)
    return found


def context_of(given: _Given) -> int | None:
    """The value of --context, or of --max-model-len as vLLM reads it. UsageError if both are given and differ."""
    asked = parsed(given, "--context", parse_tokens)
    vllm = parsed(given, "--max-model-len", parse_vllm_tokens)
    if vllm is None:
        return asked
    if asked not in (None, vllm):
        raise UsageError(f"--context {asked} and --max-model-len {vllm} contradict each other")
    return vllm


def _asks_auto_context(given: _Given) -> bool:
    """Whether the engine is to choose the context: --context auto, or vLLM's --max-model-len auto or -1."""
    context, vllm = given.get("context"), given.get("max_model_len")
    if not isinstance(context or vllm, str):
        return False  # a number of a batch line, or neither
    found = [text for text in (context, vllm) if text is not None]
    auto = [str(text).casefold() in ("auto", "-1") for text in found]
    if any(auto) and not all(auto):
        raise UsageError(f"--context {context} and --max-model-len {vllm} contradict each other")
    return all(auto) and not (context is not None and context.strip() == "-1")


def what_if_of(given: _Given) -> WhatIf:
    """The what-if that the options describe."""
    attention = given.get("attention")
    return WhatIf(
        None if attention is None else attention.casefold(),
        parsed(given, "--kv-heads", parse_count),
        parsed(given, "--kv-lora-rank", parse_count),
        parsed(given, "--qk-rope-head-dim", parse_count),
    )


def settings_of(given: _Given) -> dict[str, str]:
    """The engine's own options that were given: name to text."""
    return {
        name: text if isinstance(text, Number) else str(text).casefold()
        for name, parameter in _engine_parameters()
        if (text := given.get(parameter)) is not None and text is not False
    }


@cache
def _engine_parameters() -> tuple[tuple[str, str], ...]:
    return tuple((name, _parameter(name)) for name in option_names())


def question_of(given: _Given, model_of: ModelOf | None = None) -> tuple[ModelSpec, dict[str, Any]]:
    """The model, and the other fields of the `Question` by name."""
    find, assume = model_of or load_model_of, given.get("assume_full_attention", False)
    spec, what_if = find(given["model"], what_if_of(given), flags_of(given), assume)
    return spec, {**workload_of(given, lambda name: find(name, WhatIf(), {}, False)[0]), "what_if": what_if}


def workload_of(given: _Given, load: Callable[[str], ModelSpec] | None = None) -> dict[str, Any]:
    """The fields of the `Question` other than the model and the what-if. `load` reads the draft model."""
    fits_context = _asks_auto_context(given)
    return {
        "context_tokens": None if fits_context else context_of(given),
        "fits_context": fits_context,
        "batch_size": parse_count(given["batch"], "--batch"),
        "dtype": given["dtype"],
        "kv_dtype": given["kv_dtype"],
        "engine": given["engine"].casefold(),
        "engine_settings": settings_of(given),
        "encoder_tokens": parsed(given, "--encoder-tokens", parse_tokens),
        "tensor_parallel_size": parsed(given, "--tp", parse_count),
        "pipeline_parallel_size": stages_of(given),
        "data_parallel_size": attention_replicas_of(given),
        "kv_memory_bytes": parsed(given, "--kv-memory", parse_size),
        "devices": devices_of(given),
        "speed": speed_of(given),
        "speculative": speculation_of(given, load or _load_by_name),
        "reuse": reuse_of(given),
        **({} if (images := images_of(given)) is None else {"images": images}),
    }


def flags_of(given: _Given, options: Iterable[str] = _MODEL_FLAGS) -> dict[str, str | None]:
    """The options that describe a model without a config, as text."""
    return {option: given.get(_parameter(option)) for option in options}


def load_model_of(
    reference: str | None, what_if: WhatIf, flags: dict[str, str | None], assume_full_attention: bool = False
) -> tuple[ModelSpec, WhatIf]:
    """The model by name or path, or from flags alone, and the remaining what-if.

    `flags` maps option to text. The flags are read like a config.json with model_type `generic`. In that case,
    --kv-heads is the model's own number of KV heads, not a what-if. UsageError (exit 2) if a model and flags are both
    given.
    """
    from kvcalc.model.resolve import load_model

    given = [option for option, text in flags.items() if text is not None]
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


def _load_by_name(reference: str) -> ModelSpec:
    return load_model_of(reference, WhatIf(), {})[0]


def _generic(flags: dict[str, str | None], num_kv_heads: int | None) -> ModelSpec:
    from kvcalc.errors import ModelError
    from kvcalc.model.hf_config import read_config

    config: dict[str, object] = {_MODEL_FLAGS[o]: parse_count(text, o) for o, text in flags.items() if text is not None}
    for option in ("--layers", "--heads"):
        if _MODEL_FLAGS[option] not in config:
            raise UsageError(
                f"a model described by flags needs {option}",
                "for example: --layers 32 --heads 32 --kv-heads 8 --head-dim 128",
            )
    if num_kv_heads is not None:
        config["num_key_value_heads"] = num_kv_heads
    try:
        return read_config({"model_type": "generic", **config}, "generic", "flags")
    except ModelError as error:
        # The wrong value was given as an option, so this is a usage error.
        raise UsageError(error.message.removeprefix("generic: "), error.hint) from None


def speed_of(given: _Given) -> SpeedQuestion | None:
    """The options for throughput, or None if none of them is given."""
    names = ("ep", "input_tokens", "output_tokens", "concurrency", "calibrate", "prefix_hit_rate")
    if all(given.get(name) is None for name in names):
        return None
    from kvcalc.planning.layout import SpeedQuestion

    return SpeedQuestion(
        parsed(given, "--ep", parse_count),
        parsed(given, "--input-tokens", parse_tokens),
        parsed(given, "--output-tokens", parse_tokens),
        parsed(given, "--concurrency", parse_count),
        prefix_hit_rate=hit_rate_of(given),
        calibration=calibration_of(given),
    )


def images_of(given: _Given) -> ImagesAsked | None:
    """The images in every request, or None."""
    if given.get("images") is None and given.get("image_size") is None:
        return None
    from kvcalc.planning.images import parse_images

    return parse_images(parsed(given, "--images", parse_count), given.get("image_size"))


def calibration_of(given: _Given) -> Calibration | None:
    """What the files of --calibrate say, or None.

    UsageError (exit 2) if a file is not understood, or if it does not name the device or the engine and several are
    asked for.
    """
    paths = given.get("calibrate")
    if paths is None:
        return None
    from kvcalc.planning.calibration import read_calibration

    found = read_calibration((paths,) if isinstance(paths, str) else paths)
    for option, name in (("--gpu", "device"), ("--engine", "engine")):
        text = given.get(option.removeprefix("--")) or ""
        unnamed = found.first_without(name)
        if unnamed is not None and ("," in text or text.casefold() == "all"):
            raise UsageError(
                f"--calibrate {unnamed} does not name the {name}, and {option} names several",
                f"ask for the {name} that was measured alone",
            )
    return found


def devices_of(given: _Given) -> Devices | None:
    """The devices that the options name or describe, or None.

    Raises GpuError (exit 3) for an unknown name, UsageError (exit 2) for options that contradict each other, and
    RunError (exit 1) for `local` if there is no device.
    """
    if given["gpu"] is None and given["gpu_memory"] is None:
        for option in ("--num-gpus", "--gpu-bandwidth", "--flops"):
            if given[_parameter(option)] is not None:
                raise UsageError(
                    f"{option} needs a device", "name one with --gpu h100, or describe one with --gpu-memory 80GB"
                )
        return None
    from kvcalc.planning.devices import choose_devices

    if given["gpu"] is not None and "," in given["gpu"]:
        raise UsageError(
            f"--gpu {given['gpu'][:60]}: only one kind of device is supported here",
            f"to compare several, use kvcalc compare MODEL --gpu {given['gpu'][:60]}",
        )
    number = parsed(given, "--num-gpus", parse_count)
    return choose_devices(given["gpu"], number, _figures_of(given), _local_devices)


def stages_of(given: _Given) -> int:
    """The number of pipeline stages."""
    return parsed(given, "--pp", parse_count) or 1


def attention_replicas_of(given: _Given) -> int:
    """The number of attention replicas."""
    return parsed(given, "--dp", parse_count) or 1


def kinds_of(names: Sequence[str], given: _Given) -> list[Devices]:
    """The devices with these names and the numbers in them, or the device described by its figures."""
    figures = _figures_of(given)
    if not names and figures == (None, None, None):
        return []
    from kvcalc.planning.devices import choose_kinds

    return choose_kinds(names, figures, _local_devices)


def _figures_of(given: _Given) -> Figures:
    return (
        parsed(given, "--gpu-memory", parse_size),
        parsed(given, "--gpu-bandwidth", parse_bandwidth),
        parsed(given, "--flops", parse_flops),
    )


def _local_devices() -> Devices:
    from kvcalc.measure.local import local_devices

    return local_devices()
