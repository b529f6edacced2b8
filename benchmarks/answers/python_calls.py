"""The call of the Python API that asks the same question as a command line."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.answers.declared import Declared
from benchmarks.answers.values import bytes_of, seconds_of

# Option -> argument and how its text becomes a value.
_PLAIN: dict[str, tuple[str, Any]] = {
    "context": ("context_tokens", int), "batch": ("batch_size", int), "dtype": ("dtype", str),
    "kv-dtype": ("kv_dtype", str), "engine": ("engine", str), "tp": ("tensor_parallel_size", int),
    "pp": ("pipeline_parallel_size", int), "dp": ("data_parallel_size", int), "encoder-tokens": ("encoder_tokens", int),
    "kv-memory": ("kv_memory_bytes", bytes_of), "replicas": ("replicas", int), "requests": ("requests", int),
    "seed": ("seed", int), "burstiness": ("burstiness", float), "requests-per-second": ("requests_per_second", float),
    "step-factor": ("step_factor", float), "trace": ("trace", str), "scale-rate": ("scale_rate", float),
    "prefill-replicas": ("prefill_replicas", int), "prefill-tp": ("prefill_tensor_parallel_size", int),
    "prefill-gpu": ("prefill_gpu", str), "simulate": ("simulate", int), "confidence": ("confidence", int),
    "pareto": ("with_front", bool), "all-layouts": ("all_layouts", bool), "strict": ("strict", bool),
    "disaggregate": ("disaggregate", bool),
}  # fmt: skip
_Fields = Mapping[str, tuple[str, Callable[[str], Any]]]
_SPEED: _Fields = {
    "ep": ("expert_parallel_size", int), "input-tokens": ("input_tokens", int), "output-tokens": ("output_tokens", int),
    "concurrency": ("concurrency", int), "prefix-hit-rate": ("prefix_hit_rate", lambda text: _share(text)),
}  # fmt: skip
_WHAT_IF: _Fields = {
    "attention": ("attention", str),
    "kv-heads": ("num_kv_heads", int),
}
# Options that choose the exit code alone, by command.
_NO_ARGUMENTS = {"fit": ("strict",)}
WITHOUT_ARGUMENT = frozenset({"gpu-bandwidth"})
"""Options that the functions of the API do not have. A question with one of them is not asked in Python."""


class NoCallError(Exception):
    """The API cannot ask this question: one of its options has no argument, or needs another option."""


def python_call(command: str, models: Sequence[str], options: Mapping[str, Any], declared: Declared) -> dict[str, Any]:
    """The function, its models and its other arguments. A {"call": ...} is built when the question is asked.

    Raises NoCallError for an option without an argument.
    """
    given = dict(options)
    for name in _NO_ARGUMENTS.get(command, ()):
        given.pop(name, None)
    own = {option.name for engine in declared.engines.values() for option in engine}
    arguments: dict[str, Any] = {}
    settings = {name: given.pop(name) for name in [*given] if name in own}
    if settings:
        arguments["engine_settings"] = settings
    positional: list[Any] = list(models)
    if command == "compare":
        positional = [list(models)]
    if command in ("estimate", "fit"):
        _take_devices(given, arguments)
        if command == "fit":
            positional.append(arguments.pop("devices", None))
    elif command == "compare":
        if "gpu" in given:
            arguments["devices"] = [_devices(name) for name in given.pop("gpu").split(",")]
        if "attention" in given:
            arguments["attentions"] = given.pop("attention").split(",")
        if "," in given.get("engine", ""):
            arguments["engines"] = given.pop("engine").split(",")
    elif command == "sweep":
        _take_grid(given, arguments)
    elif command == "plan":
        positional.append(given.pop("gpu").split(","))
        _take_plan(given, arguments)
    elif command == "simulate":
        positional.append(_devices(given.pop("gpu")))
        for name, argument in (("input-tokens", "prompt_tokens"), ("output-tokens", "answer_tokens")):
            if name in given:
                text = given.pop(name)
                arguments[argument] = int(text) if text.isdecimal() else text
        if "concurrency" in given:
            arguments["concurrency"] = int(given.pop("concurrency"))
        _take_times(given, arguments)
    elif command == "prefix":
        _take_devices(given, arguments)
        _take_prefix(given, arguments)
    if command in ("plan", "simulate") and "transfer-bandwidth" in given:
        arguments["transfer"] = _rate(given.pop("transfer-bandwidth"))
    _take_types(given, arguments)
    for name, value in given.items():
        if name not in _PLAIN:
            raise NoCallError(f"{command} --{name} has no argument here")
        argument, parse = _PLAIN[name]
        arguments[argument] = parse(value)
    function = {"prefix": "prefix_curve"}.get(command, command)
    return {"function": function, "models": positional, "arguments": arguments}


def _take_devices(given: dict[str, Any], arguments: dict[str, Any]) -> None:
    if "gpu" in given:
        arguments["devices"] = _devices(given.pop("gpu"))


def _take_grid(given: dict[str, Any], arguments: dict[str, Any]) -> None:
    arguments["contexts"] = _counts(given.pop("context"))
    arguments["batches"] = _counts(given.pop("batch", "1"))
    if "kv-dtype" in given:
        arguments["kv_dtypes"] = given.pop("kv-dtype").split(",")
    if "engine" in given:
        arguments["engines"] = given.pop("engine").split(",")
    if "tp" in given:
        arguments["tensor_parallel_sizes"] = _counts(given.pop("tp"))
    if "gpu" in given:
        arguments["gpus"] = given.pop("gpu").split(",")


def _take_plan(given: dict[str, Any], arguments: dict[str, Any]) -> None:
    for name in ("input-tokens", "output-tokens", "concurrency"):
        if name in given:
            arguments[name.replace("-", "_")] = int(given.pop(name))
    if "prefix-hit-rate" in given:
        arguments["prefix_hit_rate"] = _share(given.pop("prefix-hit-rate"))
    if "price" in given:
        prices = dict(part.split("=") for part in given.pop("price").split(","))
        arguments["prices"] = {name: float(price) for name, price in prices.items()}
    if "," in given.get("engine", ""):
        arguments["engines"] = given.pop("engine").split(",")
    _take_times(given, arguments)


def _take_times(given: dict[str, Any], arguments: dict[str, Any]) -> None:
    for name in ("max-ttft", "max-tpot"):
        if name in given:
            text, _, percentile = given.pop(name).partition("@p")
            arguments[f"{name.replace('-', '_')}_seconds"] = seconds_of(text)
            if percentile:
                arguments[f"{name.removeprefix('max-')}_percentile"] = int(percentile)


def _take_prefix(given: dict[str, Any], arguments: dict[str, Any]) -> None:
    for name, argument in (("cache-memory", "cache_memory_bytes"), ("cache-tokens", "cache_tokens")):
        if name in given:
            arguments[argument] = _sizes(given.pop(name))
    if "offload" in given:
        arguments["offload_bytes"] = dict(_tiers(given.pop("offload")))
    if "price" in given:
        device, memory = given.pop("price").split(",")
        arguments["price_per_hour"] = float(device.partition("=")[2])
        arguments["memory_prices_per_gib_hour"] = {"cpu": float(memory.partition("=")[2])}


def _take_types(given: dict[str, Any], arguments: dict[str, Any]) -> None:
    """The arguments that are types of their own."""
    for argument, call, names in (("speed", "SpeedQuestion", _SPEED), ("what_if", "WhatIf", _WHAT_IF)):
        found = {field: parse(given.pop(name)) for name, (field, parse) in names.items() if name in given}
        if found:
            arguments[argument] = {"call": call, "with": found}
    if given.get("context") == "auto":
        del given["context"]
        arguments["fits_context"] = True
    reuse: dict[str, Any] = {}
    if "prefix-tokens" in given:
        reuse["prefix_tokens"] = int(given.pop("prefix-tokens"))
    if "turns" in given:
        reuse["turns"] = int(given.pop("turns"))
    for name, field in (("offload", "offload"), ("offload-bandwidth", "bandwidths")):
        if name in given:
            reuse[field] = _tiers(given.pop(name))
    if "transfer-bandwidth" in given:
        reuse["transfer"] = _rate(given.pop("transfer-bandwidth"))
    if reuse:
        arguments["reuse"] = {"call": "CacheReuse", "with": reuse}
    if ("images" in given) != ("image-size" in given):
        raise NoCallError("--images and --image-size need each other")
    if "images" in given:
        width, height = given.pop("image-size").split("x")
        arguments["images"] = {"call": "ImagesAsked", "on": [int(given.pop("images")), int(width), int(height)]}
    if "speculative" in given:
        if "acceptance-length" not in given:
            raise NoCallError("--speculative needs --acceptance-length here")
        method, _, number = given.pop("speculative").partition(":")
        drafted: dict[str, Any] = {"acceptance_length": float(given.pop("acceptance-length"))}
        if "draft-model" in given:
            drafted["draft_model"] = {"call": "load_model", "on": [given.pop("draft-model")]}
        arguments["speculative"] = {"call": "Speculation", "on": [method, int(number)], "with": drafted}


def _devices(name: str) -> dict[str, Any]:
    return {"call": "find_devices", "on": [name]}


def _share(text: str) -> float:
    return float(text.removesuffix("%")) / 100 if text.endswith("%") else float(text)


def _rate(text: str) -> int | str:
    return bytes_of(text) if text.endswith("B/s") else text


def _tiers(text: str) -> list[list[Any]]:
    return [[tier, bytes_of(size)] for tier, _, size in (part.partition("=") for part in text.split(","))]


def _count(text: str) -> int:
    return int(text.removesuffix("k")) * 1024 if text.endswith("k") else int(text)


def _counts(text: str) -> list[int]:
    """The values of a range: 1k..8k doubles, and commas separate values."""
    found = []
    for part in text.split(","):
        low, dots, high = part.partition("..")
        value, last = _count(low), _count(high) if dots else _count(low)
        while value <= last:
            found.append(value)
            value *= 2
    return found


def _sizes(text: str) -> list[int]:
    if text[-1] != "B":
        return _counts(text)
    low, dots, high = text.partition("..")
    value, last = bytes_of(low), bytes_of(high if dots else low)
    found = []
    while value <= last:
        found.append(value)
        value *= 2
    return found
