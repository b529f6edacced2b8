"""Compare the cache of one model and one workload in every engine."""

from __future__ import annotations

from typing import Any

from kvcalc.engines import RELEASE, engine_class
from kvcalc.engines.options import check_settings, settings_of
from kvcalc.errors import ModelError, UsageError
from kvcalc.planning.answers.axis import parse_engines
from kvcalc.planning.answers.estimate import answer
from kvcalc.question.question import Question
from kvcalc.schema import SCHEMA_VERSION

# The keys that each row takes from its engine's estimate: from `engine` and from `kv_cache`.
_FROM_ENGINE = ("version", "kv_dtype_reason", "block_size", "num_gpu_blocks", "kv_cache_tokens", "max_concurrency")
_FROM_CACHE = (
    "dtype", "total_bytes", "bytes_per_sequence", "bytes_per_token", "fixed_bytes_per_sequence", "bytes_per_device",
    "devices_total_bytes",
)  # fmt: skip


def compare_engines(question: Question) -> dict[str, Any]:
    """The document of `estimate --engine all`, or of several engines: plain data, exact integers, one row per engine.

    The question's engine is `all` or a comma-separated list. Each engine takes the settings it knows, and at least one
    engine must know each setting. If an engine refuses the model or the workload, its row has the reason. Raises
    UsageError (exit 2) for an unknown engine, and the errors of `make_case` for the formula itself.
    """
    if question.fits_context:
        raise UsageError("--context auto: several engines choose different contexts", "ask for one engine")
    engines = parse_engines([name.strip() for name in question.engine.split(",")])
    for name in engines:
        engine_class(name)
    settings = question.engine_settings or {}
    check_settings(engines, settings, has_device=question.devices is not None)
    rows, notes = [], []
    for name in engines:
        row, about = _row(name, question._replace(engine=name, engine_settings=settings_of(name, settings)))
        rows.append(row)
        notes += about
    plain = answer(question._replace(engine="logical", engine_settings=None, kv_memory_bytes=None)).document
    return {
        "schema_version": SCHEMA_VERSION,
        "model": plain["model"],
        "workload": plain["workload"],
        "tensor_parallel_size": plain["engine"]["tensor_parallel_size"],
        "pipeline_parallel_size": plain["engine"]["pipeline_parallel_size"],
        "data_parallel_size": plain["engine"]["data_parallel_size"],
        "stored_bytes": plain["kv_cache"]["stored_bytes"],
        "engines": rows,
        "warnings": [*plain["warnings"], *notes],
    }


def _row(name: str, question: Question) -> tuple[dict[str, Any], list[dict[str, str]]]:
    """The row of one engine, and the warnings about its release. The row cannot show which release's rules count."""
    row: dict[str, Any] = {"model": question.model.name, "engine": name, **dict.fromkeys((*_FROM_ENGINE, *_FROM_CACHE))}
    row.update(fits=None, reason=None)
    try:
        found = answer(question).document
    except (ModelError, UsageError) as error:
        return {**row, "reason": error.message}, []
    row.update({key: found["engine"].get(key) for key in _FROM_ENGINE})
    row.update({key: found["kv_cache"][key] for key in _FROM_CACHE})
    row["fits"] = found["fit"]["fits"] if found["fit"] else None
    return row, [warning for warning in found["warnings"] if warning["code"] == RELEASE]
