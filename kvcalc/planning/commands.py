"""The command that starts an engine with a layout: to paste, or to read the flags from.

Option names: vllm/engine/arg_utils.py of vLLM 0.33.0 and sglang/srt/arg_groups/fields of SGLang 0.5.23; a test holds
them against the whole lists.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import NamedTuple

from kvcalc.memory.engines.options import OPTIONS
from kvcalc.model.spec import ModelSpec

# vLLM takes the number of draft tokens inside --speculative-config, beside the draft's name.
_NOT_FLAGS = ("num-speculative-tokens",)
# kvcalc's name of a 16-bit type -> the engines'.
_HALF = {"bf16": "bfloat16", "fp16": "float16"}
# Of the weights, asked for over the config's own: what the engines make of a 16-bit checkpoint while loading it.
# Other types need a checkpoint that is in them.
_LOADED_AS = {"fp8": "fp8"}


class Layout(NamedTuple):
    """What a replica is started with: `max_running` requests at once, none longer than `context_tokens`."""

    tensor_parallel_size: int
    pipeline_parallel_size: int
    context_tokens: int
    max_running: int
    dtype: str | None
    kv_dtype: str
    settings: Mapping[str, str]


def checkpoint_of(spec: ModelSpec) -> str:
    """What an engine would load: the folder the config.json lies in, or the model's name on the Hugging Face Hub."""
    if spec.checkpoint is not None:
        return spec.checkpoint
    parts = spec.source.removeprefix("hf:").removeprefix("https://huggingface.co/").split("/")
    if spec.source.startswith(("https://huggingface.co/", "hf:")) and len(parts) >= 2:
        return "/".join(parts[:2]).partition("@")[0]
    return spec.name


def vllm_command(spec: ModelSpec, layout: Layout) -> str:
    """`vllm serve ...` for one replica."""
    sizes = ("--tensor-parallel-size", "--pipeline-parallel-size", "--max-model-len", "--max-num-seqs")
    flags = _flags("vllm", layout, sizes, {"fp8": "fp8"})
    return shlex.join(["vllm", "serve", checkpoint_of(spec), *flags])


def sglang_command(spec: ModelSpec, layout: Layout) -> str:
    """`python -m sglang.launch_server ...` for one replica."""
    sizes = ("--tp-size", "--pp-size", "--context-length", "--max-running-requests")
    flags = _flags("sglang", layout, sizes, {"fp8": "fp8_e4m3"})
    return shlex.join(["python", "-m", "sglang.launch_server", "--model-path", checkpoint_of(spec), *flags])


def _flags(engine: str, layout: Layout, sizes: tuple[str, ...], cache_names: Mapping[str, str]) -> list[str]:
    """The options of a layout. `sizes` are the engine's names for its first four fields; one stage needs no option."""
    given = [(name, str(size)) for name, size in zip(sizes, layout) if name != sizes[1] or size != 1]
    flags = [word for pair in given for word in pair] + _types(layout, cache_names)
    return flags + _settings(engine, layout, flags)


def _settings(engine: str, layout: Layout, flags: list[str]) -> list[str]:
    """The engine's own options that were given, but those that the layout has set."""
    found = []
    for option in OPTIONS[engine]:
        name = f"--{option.name}"
        if option.name in layout.settings and name not in flags and option.name not in _NOT_FLAGS:
            found += [name] if option.metavar is None else [name, layout.settings[option.name]]
    return found


def _types(layout: Layout, cache_names: Mapping[str, str]) -> list[str]:
    """The flags for what the weights and the cache are asked to be stored in; none for what is the engine's default."""
    flags = []
    if layout.dtype in _HALF:
        flags += ["--dtype", _HALF[layout.dtype]]
    elif layout.dtype in _LOADED_AS:
        flags += ["--quantization", _LOADED_AS[layout.dtype]]
    if layout.kv_dtype in cache_names:
        flags += ["--kv-cache-dtype", cache_names[layout.kv_dtype]]
    return flags
