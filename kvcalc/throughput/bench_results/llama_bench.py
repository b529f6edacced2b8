"""Results of llama-bench (`-o json` or `-o jsonl`): one object per test, without a server.

Source: ggml-org/llama.cpp, tools/llama-bench/README.md at 08d0baa.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from kvcalc.memory.dtypes import DTYPES, FILE_TYPES
from kvcalc.model.layout import LayoutAsked
from kvcalc.throughput.bench_results.point import Point, measured, number, text, whole

_SHARD = re.compile(r"-\d{5}-of-\d{5}$")
_BITS = re.compile(r" - [\d.]+ bpw$")
_SIZES = {" - small": "_s", " - medium": "_m", " - large": "_l"}
_SPELLINGS = {"f16": "fp16", "f32": "fp32"}


def is_llama_bench(row: Mapping[str, Any]) -> bool:
    """Whether an object is a test of llama-bench."""
    return all(key in row for key in ("model_filename", "n_prompt", "n_gen", "avg_ns"))


def read_llama_bench(row: Mapping[str, Any], run: int) -> Point:
    """One test: a prompt of `n_prompt` tokens (pp), or the mean step of `n_gen` tokens (tg) after `n_depth`."""
    prompt, answer, depth = (whole(row, key) or 0 for key in ("n_prompt", "n_gen", "n_depth"))
    devices = [name.strip() for name in (text(row, "gpu_info") or "").split(",") if name.strip()]
    splits_layers = text(row, "split_mode") == "layer" and len(devices) > 1
    nanoseconds = number(row, "avg_ns")
    layers, dtype = row.get("n_gpu_layers"), _dtype(row)
    times = (
        measured("decode", None if nanoseconds is None else nanoseconds / answer, None, 1e-9)
        if answer
        else measured("prefill", nanoseconds, None, 1e-9)
    )
    return Point(
        "llama-bench", run, "llama.cpp", _release(row), _models(row),
        gpu=devices[0] if len(set(devices)) == 1 else None,
        num_devices=len(devices) if splits_layers else None,
        dtype=dtype,
        unknown_dtype=None if dtype else text(row, "model_type") or "not named",
        settings={
            f"cache-type-{part}": name.casefold() for part in "kv" if (name := text(row, f"type_{part}")) is not None
        },
        layout=LayoutAsked(pipeline_parallel_size=len(devices) if splits_layers else None),
        layers_on_device=layers if isinstance(layers, int) and not isinstance(layers, bool) and layers >= 0 else None,
        input_tokens=depth if answer else prompt,
        output_tokens=answer,
        concurrency=1,
        times=times,
        refusal=_refusal(row, prompt, answer, depth, devices, bool(times)),
    )  # fmt: skip


def _refusal(
    row: Mapping[str, Any], prompt: int, answer: int, depth: int, devices: list[str], has_time: bool
) -> str | None:
    if prompt and answer:
        return "it times a prompt and an answer together (-pg); run -p and -n instead"
    if not prompt and not answer:
        return "it has neither a prompt nor an answer"
    if prompt and depth:
        return "it times a prompt after cached tokens (-d), and kvcalc predicts a prefill with nothing cached"
    if not has_time:
        return "it has no avg_ns"
    if row.get("no_kv_offload") in (True, 1):
        return "the cache was in the host's memory (-nkvo)"
    if whole(row, "n_cpu_moe"):
        return "experts were computed on the CPU (-ncmoe)"
    if len(devices) > 1 and text(row, "split_mode") in ("row", "tensor"):
        return "it splits the tensors over several devices, and kvcalc predicts llama.cpp with whole layers"
    return None


def _release(row: Mapping[str, Any]) -> str | None:
    """The build: `build_number` is 0 if llama.cpp was built outside its repository."""
    build = whole(row, "build_number")
    return None if build is None else f"b{build}"


def _models(row: Mapping[str, Any]) -> tuple[str, ...]:
    """The file's name without folder, shard and type: `Qwen2.5-7B-Instruct-Q4_K_M.gguf` is Qwen2.5-7B-Instruct."""
    path = text(row, "model_filename") or ""
    stem = _SHARD.sub("", re.split(r"[/\\]", path)[-1].removesuffix(".gguf"))
    folded = stem.casefold()
    for known in sorted((*DTYPES, *FILE_TYPES, *_SPELLINGS, "mxfp4"), key=len, reverse=True):
        if folded.endswith((f"-{known}", f".{known}", f"_{known}")):
            return (stem[: -len(known) - 1], stem)
    return (stem,) if stem else ()


def _dtype(row: Mapping[str, Any]) -> str | None:
    """kvcalc's name of the weights' type, which ends the description: `qwen2 7B Q4_K - Medium` is q4_k_m."""
    words = _BITS.sub("", (text(row, "model_type") or "").casefold().removesuffix(" moe"))
    for size, suffix in _SIZES.items():
        if words.endswith(size):
            words = words.removesuffix(size) + suffix
    last = words.rpartition(" ")[2]
    name = _SPELLINGS.get(last, last)
    return name if name in DTYPES or name in FILE_TYPES else None
