"""What would each engine hold? One model and one workload, every engine side by side."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvcalc.errors import ModelError, UsageError
from kvcalc.memory.engines import ENGINES, settings_of
from kvcalc.model.spec import ModelSpec
from kvcalc.planning.estimate import estimate
from kvcalc.schema import SCHEMA_VERSION

# What each row takes of its engine's own estimate: the part of the document, and the keys.
_FROM_ENGINE = ("version", "kv_dtype_reason", "block_size", "num_gpu_blocks", "kv_cache_tokens", "max_concurrency")
_FROM_CACHE = (
    "dtype", "total_bytes", "bytes_per_sequence", "bytes_per_token", "fixed_bytes_per_sequence", "bytes_per_device",
    "devices_total_bytes",
)  # fmt: skip


def compare_engines(
    model: ModelSpec, *, kv_dtype: str = "auto", engine_settings: Mapping[str, str] | None = None, **workload: Any
) -> dict[str, Any]:
    """The document of `estimate --engine all`: plain data, exact integers, one row an engine.

    Every engine takes those of the settings it has; one that refuses the model or the workload stands with the reason.
    The rest is `estimate`'s. Raises what `estimate` raises of the formula itself.
    """
    plain = estimate(model, kv_dtype=kv_dtype, **{**workload, "kv_memory_bytes": None})
    return {
        "schema_version": SCHEMA_VERSION,
        "model": plain["model"],
        "workload": plain["workload"],
        "tensor_parallel_size": plain["engine"]["tensor_parallel_size"],
        "pipeline_parallel_size": plain["engine"]["pipeline_parallel_size"],
        "stored_bytes": plain["kv_cache"]["stored_bytes"],
        "engines": [_row(name, model, kv_dtype, engine_settings or {}, workload) for name in ENGINES],
        "warnings": plain["warnings"],
    }


def _row(
    name: str, model: ModelSpec, kv_dtype: str, settings: Mapping[str, str], workload: Mapping[str, Any]
) -> dict[str, Any]:
    row: dict[str, Any] = {"name": name, **dict.fromkeys((*_FROM_ENGINE, *_FROM_CACHE)), "fits": None, "reason": None}
    try:
        answer = estimate(
            model, kv_dtype=kv_dtype, engine=name, engine_settings=settings_of(name, settings), **workload
        )
    except (ModelError, UsageError) as error:
        return {**row, "reason": error.message}
    row.update({key: answer["engine"].get(key) for key in _FROM_ENGINE})
    row.update({key: answer["kv_cache"][key] for key in _FROM_CACHE})
    return {**row, "fits": answer["fit"]["fits"] if answer["fit"] else None}
