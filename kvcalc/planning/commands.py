"""The command that starts an engine with a layout.

Option names: vllm/engine/arg_utils.py in vLLM 0.33.0 and sglang/srt/arg_groups/fields in SGLang 0.5.23. A test compares
them with the engines' complete lists.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import NamedTuple

from kvcalc.memory.engines.options import OPTIONS
from kvcalc.memory.engines.place import RAW_FP8
from kvcalc.planning.checkpoint import Checkpoint

# vLLM takes the number of draft tokens inside --speculative-config, together with the draft model's name.
_NOT_FLAGS = ("num-speculative-tokens",)
# kvcalc's name for a type with 16 or 32 bits -> the engines' name.
_FLOATS = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
# Without these variables the engines refuse a length beyond the model's limit (vllm/envs.py, sglang/srt/environ.py).
_LONGER = {"vllm": "VLLM_ALLOW_LONG_MAX_MODEL_LEN=1", "sglang": "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1"}


class Layout(NamedTuple):
    """How a replica is started: it runs at most `max_running` requests at once, none longer than `context_tokens`.

    `settings` are the engine's own options by name. `beyond_limit` is true if the context exceeds the model's limit.
    """

    tensor_parallel_size: int
    pipeline_parallel_size: int
    context_tokens: int
    max_running: int
    kv_dtype: str
    settings: Mapping[str, str]
    beyond_limit: bool = False


def vllm_command(checkpoint: Checkpoint, layout: Layout) -> str:
    """`vllm serve ...` for one replica."""
    sizes = ("--tensor-parallel-size", "--pipeline-parallel-size", "--max-model-len", "--max-num-seqs")
    flags = _flags("vllm", checkpoint, layout, sizes, {"fp8": "fp8", RAW_FP8.name: "fp8"})
    return shlex.join([*_environment("vllm", layout), "vllm", "serve", checkpoint.name, *flags])


def sglang_command(checkpoint: Checkpoint, layout: Layout) -> str:
    """`python -m sglang.launch_server ...` for one replica."""
    sizes = ("--tp-size", "--pp-size", "--context-length", "--max-running-requests")
    flags = _flags("sglang", checkpoint, layout, sizes, {"fp8": "fp8_e4m3", RAW_FP8.name: "fp8_e4m3"})
    start = [*_environment("sglang", layout), "python", "-m", "sglang.launch_server"]
    return shlex.join([*start, "--model-path", checkpoint.name, *flags])


def _environment(engine: str, layout: Layout) -> list[str]:
    return [_LONGER[engine]] if layout.beyond_limit else []


def _flags(
    engine: str, checkpoint: Checkpoint, layout: Layout, sizes: tuple[str, ...], cache_names: Mapping[str, str]
) -> list[str]:
    """The options for a layout. `sizes` are the engine's option names for its first four fields. One pipeline stage
    needs no option."""
    given = [(name, str(size)) for name, size in zip(sizes, layout) if name != sizes[1] or size != 1]
    flags = [] if checkpoint.revision is None else ["--revision", checkpoint.revision]
    flags += [word for pair in given for word in pair] + _types(checkpoint, layout, cache_names)
    return flags + _settings(engine, layout, flags)


def _settings(engine: str, layout: Layout, flags: list[str]) -> list[str]:
    """The engine's own options that were given, except those that the layout has set."""
    found = []
    for option in OPTIONS[engine]:
        name = f"--{option.name}"
        if option.name in layout.settings and name not in flags and option.name not in _NOT_FLAGS:
            found += [name] if option.metavar is None else [name, layout.settings[option.name]]
    return found


def _types(checkpoint: Checkpoint, layout: Layout, cache_names: Mapping[str, str]) -> list[str]:
    """The flags for the types of the weights and the cache. The engine's defaults need no flags."""
    flags = []
    if checkpoint.dtype is not None:
        flags += ["--dtype", _FLOATS[checkpoint.dtype]]
    if layout.kv_dtype in cache_names:
        flags += ["--kv-cache-dtype", cache_names[layout.kv_dtype]]
    return flags
