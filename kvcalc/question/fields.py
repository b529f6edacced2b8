"""The fields of a question, and the other values that the commands and the Python functions take, each declared once.

A command makes its options from them (`kvcalc.cli.options`), `kvcalc batch` its keys from the options, and a Python
function the checks of its arguments (`kvcalc.api.arguments`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

from kvcalc.errors import UsageError, nearest
from kvcalc.units import (
    check_count,
    check_text,
    parse_bandwidth,
    parse_count,
    parse_flops,
    parse_rate,
    parse_seconds,
    parse_size,
    parse_tokens,
    parse_vllm_tokens,
    shown,
)

Check = Callable[[object, str], None]
"""Raises UsageError (exit 2) for a value from Python that belongs to the field of this name."""
Parse = Callable[[str, str], Any]
"""The value in the text of the option of this name. Raises UsageError (exit 2)."""

# The command line reads no number with more digits.
_MOST = 1e64


class ValueType:
    """What a value is: the check of one from Python, and the value in an option's text, unless the text needs more."""

    # A start makes these two classes. A named tuple takes ten times as long.
    __slots__ = ("check", "parse")

    def __init__(self, check: Check, parse: Parse | None = None) -> None:
        self.check, self.parse = check, parse


def _as_typed(text: str, option: str) -> str:
    return text


def _number_in(text: str, option: str, example: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    # The comparison is false for nan.
    if not abs(value) < 1e9:
        raise UsageError(f"{option} {text[:40]!a}: not a number", f"for example {option} {example}")
    return value


ROUTERS = ("round-robin", "random", "least-loaded", "prefix-aware")
"""Which replica gets a request (`simulation.routed`)."""


def _check_router(value: object, name: str) -> None:
    if not isinstance(value, str) or value not in ROUTERS:
        hint = (nearest(value, ROUTERS) if isinstance(value, str) else None) or f"one of {', '.join(ROUTERS)}"
        raise UsageError(f"{name} {shown(value)}: not a router", hint)


def _parse_router(text: str, option: str) -> str:
    _check_router(text.casefold(), option)
    return text.casefold()


def _parse_share(text: str, option: str) -> float:
    """A share as `0.3` or `30%`."""
    share = _number_in(text.removesuffix("%"), option, "0.3 or 30%") / (100 if text.endswith("%") else 1)
    if not 0 <= share < 1:
        raise UsageError(f"{option} {text}: must be at least 0 and below 1", f"for example {option} 0.3")
    return share


def _parse_pixels(text: str, option: str) -> tuple[int, int]:
    """The width and the height in `1920x1080`."""
    width, _, height = text.casefold().partition("x")
    if not width.isdecimal() or not height.isdecimal() or not 0 < int(width) < 10**5 or not 0 < int(height) < 10**5:
        raise UsageError(f"{option} {text[:40]!a}: must be WIDTHxHEIGHT in pixels", "for example 1920x1080")
    return int(width), int(height)


def _parse_link(text: str, option: str) -> int | str:
    """Bytes per second, or the name of a link, which begins with a letter."""
    return text.strip() if text.strip()[:1].isalpha() else parse_bandwidth(text, option)


def _number(least: float, most: float, what: str, *, or_least: bool = True) -> Check:
    """A check of a number from `least`, or above it, to below `most`."""

    def check(value: object, name: str) -> None:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not least <= value < most or (value == least and not or_least):  # type: ignore[operator]
            raise UsageError(f"{name} {shown(value)}: must be {what}")

    return check


def _check_flag(value: object, name: str) -> None:
    if not isinstance(value, bool):
        raise UsageError(f"{name} {shown(value)}: must be True or False")


def _check_count_or_text(value: object, name: str) -> None:
    if not isinstance(value, str):
        check_count(value, name)


def _check_list(check: Check) -> Check:
    """A check of a list and of each of its items."""

    def check_list(value: object, name: str) -> None:
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise UsageError(f"{name} {shown(value)}: must be a list", f"for example {name}=[{shown(value)}]")
        for item in value:
            check(item, name)

    return check_list


def _check_mapping(check: Check) -> Check:
    """A check of a mapping from names to values, each of which is checked."""

    def check_mapping(value: object, name: str) -> None:
        if not isinstance(value, Mapping):
            raise UsageError(f"{name} {shown(value)}: must be a mapping")
        for key, item in value.items():
            check_text(key, f"a key of {name}")
            check(item, f"{name}[{shown(key)}]")

    return check_mapping


def _check_pairs(value: object, name: str) -> None:
    """A check of the tiers of a CacheReuse. Their names and amounts are checked with the rest of it."""
    rows = value if isinstance(value, (tuple, list)) else (None,)
    if not all(isinstance(row, (tuple, list)) and len(row) == 2 and isinstance(row[0], str) for row in rows):
        raise UsageError(f"{name} {shown(value)}: must be pairs", f'for example {name}=(("cpu", 200 * 2**30),)')


def _check_record(module: str, kind_name: str) -> Check:
    """A check of a record and of its fields."""

    def check_record(value: object, name: str) -> None:
        kind = getattr(import_module(f"kvcalc.{module}"), kind_name)
        if not isinstance(value, kind):
            raise UsageError(f"{name} {shown(value)}: must be a kvcalc.{kind_name}", f"{name}=kvcalc.{kind_name}(...)")
        for field, item in value._asdict().items():
            if item is not None or kind._field_defaults.get(field, ...) is not None:
                FIELDS[field].type.check(item, field)

    return check_record


def _check_setting(value: object, name: str) -> None:
    is_number = isinstance(value, (int, float)) and abs(value) < _MOST
    if value is not None and not is_number and not isinstance(value, str):
        raise UsageError(f"{name} {shown(value)}: must be a string, a number, True or False")


def _check_model(value: object, name: str) -> None:
    from kvcalc.model.spec import ModelSpec

    if not isinstance(value, ModelSpec):
        raise UsageError(f"{name} {shown(value)}: must be a ModelSpec", "use kvcalc.load_model(NAME)")


def check_devices(value: object, name: str = "devices") -> None:
    """Raise UsageError (exit 2) if `value`, from a Python program, is not a number of devices."""
    from kvcalc.throughput.hardware import Devices

    if not isinstance(value, Devices):
        raise UsageError(f"{name} {shown(value)}: must be Devices", 'use kvcalc.find_devices("h100x8")')
    check_count(value.num_devices, "num_devices")


def _check_gpu(value: object, name: str) -> None:
    from kvcalc.throughput.hardware import Devices, Gpu

    if not isinstance(value, (str, Gpu, Devices)):
        raise UsageError(f"{name} {shown(value)}: must be names of devices", 'for example gpus=["h100", "l40s"]')
    if isinstance(value, Devices):
        check_devices(value, name)


def _check_calibration(value: object, name: str) -> None:
    if not callable(getattr(value, "apply", None)):
        raise UsageError(f"{name} {shown(value)}: must be what kvcalc.read_calibration returns")


def _count(least: int = 1, *, at_least: int | None = None) -> ValueType:
    """A whole number from `least`; on the command line from `at_least`."""
    return ValueType(
        lambda value, name: check_count(value, name, least),
        lambda text, option: parse_count(text, option, least if at_least is None else at_least),
    )


_COUNT = _count()
_TOKENS, _VLLM_TOKENS = ValueType(_COUNT.check, parse_tokens), ValueType(_COUNT.check, parse_vllm_tokens)
_PREFIX_TOKENS = ValueType(
    _count(0).check, lambda text, option: 0 if text.strip() == "0" else parse_tokens(text, option)
)  # fmt: skip
_BYTES, _BYTES_PER_SECOND = ValueType(_count(0).check, parse_size), ValueType(_COUNT.check, parse_bandwidth)
_FLOPS = ValueType(_COUNT.check, parse_flops)
_LINK, _LENGTHS = ValueType(_check_count_or_text, _parse_link), ValueType(_check_count_or_text)
_POSITIVE = _number(0, _MOST, "a number above 0", or_least=False)
_NUMBER, _SECONDS = ValueType(_POSITIVE, parse_rate), ValueType(_POSITIVE, parse_seconds)
_LENGTH = ValueType(_POSITIVE, lambda text, option: _number_in(text, option, "2.4"))
_SHARE = ValueType(_number(0, 1, "a number of at least 0 and below 1"), _parse_share)
_PRICE = _number(0, 1e9, "a price, a number of at least 0")
_PIXELS = ValueType(_COUNT.check, _parse_pixels)
_TEXT = ValueType(check_text, _as_typed)
_WORD = ValueType(check_text, lambda text, option: text.casefold())
_STRIPPED = ValueType(check_text, lambda text, option: text.strip().casefold())
_FLAG, _ROUTER = ValueType(_check_flag), ValueType(_check_router, _parse_router)
_TEXTS, _COUNTS = ValueType(_check_list(check_text)), ValueType(_check_list(_COUNT.check))
_BYTES_OF, _PRICES = ValueType(_check_mapping(_COUNT.check)), ValueType(_check_mapping(_PRICE))
_PAIRS = ValueType(_check_pairs)


class Field:
    """A value that commands and functions take.

    `name` is that of the Python argument or of the record's field, with its unit; `option` has the names of the option.
    `long` is the first of them, which messages name, and `parameter` its key in a batch line: a word without dashes
    before the names, else made from `long`. A value with one of the
    two may lack the other. The first sentence of `help` is the help of -h. A list is separated by commas or given by
    repetition; one that is REPEATED, by repetition alone. Python refuses a field without the one that it `needs`, and
    beside those that it `excludes`.
    """

    __slots__ = (
        "default", "excludes", "help", "long", "metavar", "name", "needs", "option", "panel", "parameter", "several",
        "type",
    )  # fmt: skip

    def __init__(
        self, name: str, type: ValueType, option: str = "", metavar: str = "", help: str = "",
        default: str | None = None, panel: str | None = None, several: bool | str = False, needs: str = "",
        excludes: str = "",
    ) -> None:  # fmt: skip
        self.name, self.type, self.option, self.metavar, self.help = name, type, option, metavar, help
        self.default, self.panel, self.several, self.needs, self.excludes = default, panel, several, needs, excludes
        self.long = next((word for word in option.split() if word.startswith("--")), "")
        self.parameter = option.partition(" ")[0].removeprefix("--").replace("-", "_")


# Headings in the help.
_DEVICE, _SPEED, _LOAD, _OUTPUT, _REUSE = "Device", "Speed", "Server load", "Output", "Cache reuse"
_DRAFTING, _BY_FLAGS = "Speculative decoding", "A model without a config"
REPEATED = "repeated"
"""Of an option whose values are paths, which may contain commas."""

_FIELDS = (
    Field("context_tokens", _TOKENS, "--context -c", "N",
          "Tokens per sequence: 8192, 8k, 1M (k is 1024). Default: 4096, or the model's maximum if that is less. auto "
          "is the longest that fits, as llama-server and vLLM choose it; it needs --gpu."),
    Field("max_model_len", _VLLM_TOKENS, "--max-model-len", "N",
          "The same as --context, read as vLLM reads it: k is 1000, K is 1024."),
    Field("batch_size", _COUNT, "--batch -b", "B", "Number of sequences.", "1"),
    Field("dtype", _TEXT, "--dtype", "TYPE",
          "Type of the weights: bf16, fp16, fp8, int4, nvfp4 and others. Default: the config's type."),
    Field("kv_dtype", _TEXT, "--kv-dtype --kv-cache-dtype", "TYPE",
          "Type of the cache: bf16, fp8, q8_0 and others. auto is the type of the weights if it has 16 or 32 bits, "
          "else the config's.", "auto"),
    Field("engine", _WORD, "--engine", "NAME[@RELEASE],...", "", "logical", None, True),
    Field("engine_settings", ValueType(_check_mapping(_check_setting))),
    Field("encoder_tokens", _TOKENS, "--encoder-tokens", "N",
          "Tokens of the encoder's output (T5, BART) or of an image (Llama 3.2 Vision). Default: the model's own "
          "number, else --context."),
    Field("tensor_parallel_size", _COUNT, "--tp --tensor-parallel-size", "T",
          "Number of devices that split the heads. Default: --num-gpus divided by --pp and --dp, else 1."),
    Field("pipeline_parallel_size", _COUNT, "--pp --pipeline-parallel-size", "P",
          "Number of pipeline stages. Default: 1."),
    Field("data_parallel_size", _COUNT, "--dp --data-parallel-size", "D",
          "Number of DP ranks, which divide the requests among them and share the experts. Default: 1. Each "
          "is split over --tp devices."),
    Field("kv_memory_bytes", _BYTES, "--kv-memory", "SIZE",
          "Cache memory per device: 80G, 80GiB. Prints the longest context and the largest batch that fit. With --gpu "
          "it replaces the computed memory."),
    Field("model", ValueType(lambda value, name: None if isinstance(value, str) else _check_model(value, name))),
    # Devices.
    Field("devices", ValueType(check_devices), "--gpu", "NAME[xN]",
          "Device, with an optional count: h100, h100x8, rtx-4090. kvcalc gpus lists the names; local is the device in "
          "this machine.", None, _DEVICE, True),
    Field("num_devices", _COUNT, "--num-gpus", "N",
          "Number of devices. Default: the number in --gpu, else --tp times --pp times --dp.", None, _DEVICE),
    Field("memory_bytes", _BYTES, "--gpu-memory", "SIZE",
          "Memory of one device: 80G, 80GiB. Describes a device of your own, or replaces the figure of --gpu.",
          None, _DEVICE),
    Field("memory_bytes_per_second", _BYTES_PER_SECOND, "--gpu-bandwidth --bandwidth", "RATE",
          "Memory bandwidth of one device: 3.35TB/s.", None, _DEVICE),
    Field("flops", _FLOPS, "--flops", "RATE", "Dense bf16 operations per second of one device: 989T.", None, _DEVICE),
    Field("gpus", ValueType(_check_list(_check_gpu))),
    # SpeedQuestion.
    Field("speed", ValueType(_check_record("question.question", "SpeedQuestion"))),
    Field("expert_parallel_size", _COUNT, "--ep --expert-parallel-size", "E",
          "Number of devices that each hold whole experts. Default: --dp times --tp if --dp is given, else 1, which "
          "splits every expert over --tp.", None, _SPEED),
    Field("calibration", ValueType(_check_calibration), "--calibrate", "FILE",
          "Your own measurements, from which the speed's constants are corrected: results of a benchmark (those that "
          "kvcalc score reads), records of kvcalc measure --json on this device, or a folder of them. Several as "
          "a.json,b.json, or repeated.", None, _SPEED, REPEATED),
    Field("input_tokens", _TOKENS, "--input-tokens --prompt-tokens", "N",
          "Tokens per prompt. The context is --input-tokens plus --output-tokens.", None, _LOAD),
    Field("output_tokens", _TOKENS, "--output-tokens --answer-tokens", "N", "Tokens per answer.", None, _LOAD),
    Field("concurrency", _COUNT, "--concurrency", "N",
          "Concurrent requests. Default: as many as fit. Requests that do not fit wait.", None, _LOAD),
    Field("prefix_hit_rate", _SHARE, "--prefix-hit-rate", "R",
          "Share of the prompt's tokens that are found in the prefix cache: 0.3 or 30%. They take no prefill, but as "
          "much memory as before.", None, _LOAD),
    # ImagesAsked.
    Field("images", ValueType(_check_record("question.question", "ImagesAsked"))),
    Field("number", _COUNT, "--images", "N",
          "Images in every request, with --image-size. Their tokens are a part of the context.", None, _LOAD),
    Field("pixels", _PIXELS, "--image-size", "WxH", "Size of an image in pixels: 1920x1080.", None, _LOAD),
    # Speculation.
    Field("speculative", ValueType(_check_record("model.drafting", "Speculation")), "--speculative", "METHOD:N",
          "Draft N tokens per step with mtp, eagle (EAGLE-3), eagle1 (EAGLE-1 and 2), dflash, draft or ngram: mtp:3. "
          "mtp uses the model's own layers, draft a --draft-model.", None, _DRAFTING),
    Field("acceptance_length", _LENGTH, "--acceptance-length", "L",
          "Mean number of tokens that a step gives, from 1 to N + 1: 2.4. Engines print it. The speed needs it.",
          None, _DRAFTING, needs="speculative"),
    Field("draft_model", ValueType(_check_model), "--draft-model", "MODEL",
          "Model that drafts, or the config of an EAGLE or DFlash head: a name or a path, as for MODEL.",
          None, _DRAFTING, needs="speculative"),
    # CacheReuse.
    Field("reuse", ValueType(_check_record("question.question", "CacheReuse"))),
    Field("prefix_tokens", _PREFIX_TOKENS, "--prefix-tokens", "N",
          "Tokens at the start of every prompt that are the same, such as a system prompt. The engine keeps them once.",
          None, _REUSE),
    Field("turns", _count(2), "--turns", "K",
          "Turns of a session. The lengths are those of the last turn, whose prompt holds the whole session.",
          None, _REUSE),
    Field("offload", _PAIRS, "--offload", "TIER=SIZE,...",
          "Memory that keeps what the device's cache drops, of one replica: cpu=200GiB,disk=2TiB. The tiers are cpu, "
          "disk and remote.", None, _REUSE),
    Field("bandwidths", _PAIRS, "--offload-bandwidth", "TIER=RATE,...",
          "Rate of each tier: cpu=50GB/s,disk=6GB/s. Default: the device's PCIe link for cpu, one NVMe drive for disk. "
          "cpu is per device, the others are shared.", None, _REUSE, needs="offload"),
    Field("backend", _STRIPPED, "--offload-backend --kv-offloading-backend", "NAME",
          "What keeps the tiers: native (the engine itself, the default) or lmcache, in chunks of 256 tokens.",
          None, _REUSE, needs="offload"),
    Field("transfer", _LINK, "--transfer-bandwidth", "RATE|LINK",
          "Rate of one device's link between a prefill and a decode instance: 50GB/s, nvlink, pcie, infiniband-400g, "
          "ethernet-100g.", None, _REUSE, needs="prefill_replicas"),
    # WhatIf, and a plain decoder without a config.
    Field("what_if", ValueType(_check_record("model.variants", "WhatIf"))),
    Field("attention", _WORD, "--attention", "KIND", "Compute the cache as if the model had mha, mqa, gqa or mla."),
    Field("num_kv_heads", _COUNT, "--kv-heads", "G",
          "Number of KV heads, for --attention or for a model described by options."),
    Field("kv_lora_rank", _COUNT, "--kv-lora-rank", "R", "Width of MLA's latent, for --attention mla."),
    Field("qk_rope_head_dim", _COUNT, "--qk-rope-head-dim", "D", "Width of MLA's rotary key, for --attention mla."),
    Field("num_hidden_layers", _COUNT, "--layers", "L", "Number of layers.", None, _BY_FLAGS),
    Field("num_attention_heads", _COUNT, "--heads", "H", "Number of attention heads.", None, _BY_FLAGS),
    Field("head_dim", _COUNT, "--head-dim", "D", "Width of a head.", None, _BY_FLAGS),
    Field("hidden_size", _COUNT, "--hidden-size", "D", "Width of the model.", None, _BY_FLAGS),
    Field("sliding_window", _COUNT, "--sliding-window", "W", "Window of every layer, in tokens.", None, _BY_FLAGS),
    Field("report", _TEXT, "--report", "FILE",
          "Also write the answer as an HTML page, which needs no network and no other file: FILE.html.", None, _OUTPUT),
    # Lists of which one is a field of a question.
    Field("attentions", ValueType(_check_list(lambda value, name: None if value is None else check_text(value, name)))),
    Field("contexts", _COUNTS, excludes="context_tokens"),
    Field("batches", _COUNTS, excludes="batch_size"),
    Field("kv_dtypes", _TEXTS, excludes="kv_dtype"),
    Field("tensor_parallel_sizes", _COUNTS, excludes="tensor_parallel_size"),
    # Requests that arrive, and the limits of their times. Each command says in its own words what they are for.
    Field("trace", _TEXT, "--trace", "FILE", excludes="input_tokens output_tokens prompt_tokens answer_tokens seed"),
    Field("trace_format", _TEXT, "--trace-format", "NAME",
          "Format of --trace. Default: recognised by its first line.", needs="trace"),
    Field("scale_rate", _NUMBER, "--scale-rate", "F",
          "Divide the times between the arrivals of --trace by F.", "1", needs="trace"),
    Field("requests_per_second", _NUMBER, "--requests-per-second", "R"),
    Field("burstiness", _NUMBER, "--burstiness", "B", "", "1", needs="requests_per_second"),
    Field("prompt_tokens", _LENGTHS, "prompt_tokens --input-tokens --prompt-tokens", "LENGTH"),
    Field("answer_tokens", _LENGTHS, "answer_tokens --output-tokens --answer-tokens", "LENGTH"),
    Field("requests", _COUNT, "--requests", "N"),
    Field("distinct_prompts", _COUNT, "--distinct-prompts", "N", excludes="trace prefix_tokens prefix_hit_rate"),
    Field("router", _ROUTER, "--router", "|".join(ROUTERS), "", "round-robin"),
    Field("seed", _count(0), "--seed", "N", "", "0"),
    Field("max_ttft_seconds", _SECONDS, "--max-ttft", "TIME"),
    Field("max_tpot_seconds", _SECONDS, "--max-tpot", "TIME"),
    Field("max_e2e_seconds", _SECONDS, "--max-e2e", "TIME"),
    # plan.
    Field("confidence", _COUNT, "--confidence", "P", "", "80"),
    Field("prices", _PRICES, "--price", "LIST", "", None, _DEVICE, True),
    Field("max_devices", _COUNT, "--max-gpus", "N", "", "1024"),
    Field("simulate", _COUNT, "--simulate", "N"),
    Field("headroom", _SHARE, "--headroom", "R", "", "0"),
    Field("spare_replicas", _count(0), "--spare-replicas", "N", "", "0"),
    # simulate.
    Field("replicas", _COUNT, "--replicas", "N"),
    Field("prefill_replicas", _COUNT, "--prefill-replicas", "N", needs="transfer"),
    Field("prefill_tensor_parallel_size", _COUNT, "--prefill-tp", "N", needs="prefill_replicas"),
    Field("prefill_data_parallel_size", _COUNT, "--prefill-dp", "N", needs="prefill_replicas"),
    Field("prefill_expert_parallel_size", _COUNT, "--prefill-ep", "N", needs="prefill_replicas"),
    Field("prefill_gpu", _TEXT, "--prefill-gpu", "NAME", needs="prefill_replicas"),
    Field("step_factor", _NUMBER, "--step-factor", "F", "", "1"),
    # prefix.
    Field("cache_memory_bytes", _COUNTS, "--cache-memory", "RANGE", several=True, excludes="cache_tokens"),
    Field("cache_tokens", _COUNTS, "--cache-tokens", "RANGE", several=True),
    Field("offload_bytes_per_second", _BYTES_OF, needs="offload_bytes"),
    Field("price_per_hour", ValueType(_PRICE), needs="devices"),
    Field("memory_prices_per_gib_hour", _PRICES, needs="devices"),
    Field("trace_block_tokens", _COUNT, "--trace-block-tokens", "N"),
    Field("most_blocks", _count(at_least=1000), "--most-blocks", "N", "", "1000000"),
    Field("after", _SHARE, "--after", "SHARE"),
    # Arguments of Python's other functions.
    Field("results", ValueType(_check_mapping(check_text))),
    Field("config", ValueType(_check_mapping(lambda value, name: None))),
)  # fmt: skip

# Values that have no option, by what they are.
_WITHOUT_OPTION = (
    (_FLAG, "fits_context assume_full_attention cold strict optimal"),
    (_FLAG, "allow_beyond_limit all_layouts with_front disaggregate"),
    (_COUNT, "width height ttft_percentile tpot_percentile e2e_percentile"),
    (_TEXT, "method text command service name source family reference"),
    (_count(0), "num_tokens"),
    (_TEXTS, "models engines paths"),
    (_BYTES_OF, "offload_bytes"),
)  # fmt: skip

FIELDS = {field.name: field for field in _FIELDS}
"""The fields by name."""
FIELDS.update((name, Field(name, kind)) for kind, names in _WITHOUT_OPTION for name in names.split())
OPTIONS = {field.parameter: field for field in _FIELDS if field.option}
"""The fields that are options, by the name of the option's parameter."""
