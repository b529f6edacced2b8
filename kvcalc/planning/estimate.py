"""How big is the cache? One model, one workload, one engine; and the same model as MHA, MQA, GQA and MLA."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from kvcalc.errors import KvcalcError, UsageError
from kvcalc.memory import kv_cache
from kvcalc.memory.curves import stored_sequence_bytes
from kvcalc.memory.engines import SETTINGS_OF_A_DEVICE, Engine, load_engine, resolve_kv_dtype, stage_bounds
from kvcalc.memory.workload import Workload, bind_workload, resolve_workload
from kvcalc.model.describe import describe_model
from kvcalc.model.memo import remembered
from kvcalc.model.spec import ModelSpec
from kvcalc.model.variants import WhatIf, apply, layer_parameters, side_by_side
from kvcalc.planning.capacity import capacity
from kvcalc.planning.figures import FIGURES, cache_figures
from kvcalc.planning.formula import formulas
from kvcalc.planning.weights import describe_weights
from kvcalc.schema import SCHEMA_VERSION

if TYPE_CHECKING:
    from kvcalc.planning.budget import Budget
    from kvcalc.planning.throughput import SpeedQuestion
    from kvcalc.throughput.hardware import Devices

ENCODER_WARNING = (
    "{name} is an encoder: these are the formula's bytes; nothing of them outlives a forward pass and engines keep 0"
)


def estimate(
    model: ModelSpec,
    *,
    context_tokens: int | None = None,
    batch_size: int = 1,
    dtype: str | None = None,
    kv_dtype: str = "auto",
    engine: str = "logical",
    engine_settings: Mapping[str, str] | None = None,
    tensor_parallel_size: int = 1,
    pipeline_parallel_size: int = 1,
    encoder_tokens: int | None = None,
    kv_memory_bytes: int | None = None,
    devices: Devices | None = None,
    speed: SpeedQuestion | None = None,
    what_if: WhatIf = WhatIf(),
) -> dict[str, Any]:
    """The estimate document: plain data, exact integers, bytes and tokens (the keys name the unit).

    `kv_memory_bytes` is the memory there is for the cache on one device; with it `fit` says what it holds.
    `devices` are what the model is to run on: then `fit` says what the engine has for the cache there, and what for.
    With them `throughput` says how fast, and `speed` what else is asked of that (planning.throughput.SpeedQuestion).
    `what_if` replaces the model's attention. Raises UsageError, ModelError (see `KvcalcError.exit_code`).
    """
    spec = apply(model, what_if)
    engine_settings = engine_settings or {}
    if devices is not None:
        from kvcalc.planning.budget import with_device

        engine_settings = with_device(engine, engine_settings, devices)
    elif alone := next((option for option in SETTINGS_OF_A_DEVICE if option in engine_settings), None):
        raise UsageError(f"--{alone} divides a device's memory, and none is named", "name one: --gpu h100")
    elif speed is not None:
        raise UsageError("serving, --ep and --calibrate are of a device, and none is named", "name one: --gpu h100")
    resolved, reason = resolve_kv_dtype(engine, spec, kv_dtype, engine_settings, dtype)
    workload = resolve_workload(
        spec, context_tokens, batch_size, dtype, resolved, tensor_parallel_size, encoder_tokens, pipeline_parallel_size
    )
    spec = bind_workload(spec, workload)
    rules = _rules_of(spec, engine, pipeline_parallel_size, *sorted(engine_settings.items()))
    check_devices(rules, engine, tensor_parallel_size)
    warnings = [*spec.remarks, *workload.warnings, *rules.warnings]
    if spec.is_encoder and rules.name == "logical":
        warnings.append(ENCODER_WARNING.format(name=spec.name))
    weights = describe_weights(model, spec, dtype, workload.model_dtype, warnings)
    fit = hardware = throughput = None
    division: dict[str, object] = {}
    if kv_memory_bytes is not None:
        if devices is not None:
            raise UsageError("--kv-memory and a device: each says what there is for the cache", "give one of them")
        fit = capacity(spec, workload, rules, kv_memory_bytes, warnings)
    if devices is not None:
        from kvcalc.planning.budget import check_count, describe_fit, describe_hardware, running_limit
        from kvcalc.planning.throughput import SpeedQuestion, estimate_throughput, is_served, layout_of

        question, gpu = speed or SpeedQuestion(), devices.gpu
        is_served(question)
        layout = layout_of(workload, question)
        hardware = describe_hardware(devices, check_count(devices, workload))
        found = _budget(model, spec, workload, dtype, engine, engine_settings, devices)
        if isinstance(found, str):
            warnings += [f"fit: {found}", f"throughput: {found}"]
        else:
            fit = describe_fit(spec, workload, rules, engine, engine_settings, gpu, found, warnings)
            division, kv_memory_bytes = found.reserve.settings, max(found.offered_bytes, 0)
            limit = partial(running_limit, spec, workload, rules, engine, engine_settings, gpu, found)
            throughput = estimate_throughput(
                model, spec, workload, gpu, engine, layout, dtype, question, limit, warnings
            )
    return {
        "schema_version": SCHEMA_VERSION,
        "model": describe_model(spec),
        "workload": {
            "context_tokens": workload.context_tokens,
            "batch_size": workload.batch_size,
            "encoder_tokens": workload.encoder_tokens,
        },
        "engine": {
            "name": rules.name,
            "version": rules.version,
            "tensor_parallel_size": workload.tensor_parallel_size,
            "pipeline_parallel_size": workload.pipeline_parallel_size,
            "kv_dtype_reason": reason,
            **rules.settings,
            **division,
            **_describe_blocks(spec, workload, rules, kv_memory_bytes),
        },
        "kv_cache": _describe_cache(spec, workload, rules),
        "variants": _describe_variants(model, what_if, workload, rules),
        "weights": weights,
        "hardware": hardware,
        "fit": fit,
        "throughput": throughput,
        "warnings": warnings,
    }


def _budget(
    model: ModelSpec,
    spec: ModelSpec,
    workload: Workload,
    dtype: str | None,
    engine: str,
    settings: Mapping[str, str],
    devices: Devices,
) -> Budget | str:
    """The memory one of the devices has for the cache, or why that is not known."""
    from kvcalc.planning.budget import budget
    from kvcalc.planning.weights import device_weights

    stages = stage_bounds(engine, spec.num_layers, workload.pipeline_parallel_size)
    weights = device_weights(model, spec, dtype, workload.model_dtype, workload.tensor_parallel_size, stages)
    found = budget(spec, workload, engine, settings, devices.gpu, weights)
    return found or f"the weights of {spec.name} are not known: {weights.reason}"


def check_devices(rules: Engine, engine: str, tensor_parallel_size: int) -> None:
    """Refuse to split heads over devices where that is not counted for an engine."""
    if tensor_parallel_size > 1 and not rules.splits_heads:
        raise UsageError(
            f"--tp {tensor_parallel_size}: heads split over devices are not counted for {engine}",
            f"--pp {tensor_parallel_size} splits the layers",
        )


@remembered
def _rules_of(spec: ModelSpec, engine: str, stages: int, *settings: tuple[str, str]) -> Engine:
    return load_engine(engine, spec, dict(settings), stages)


def _describe_cache(spec: ModelSpec, workload: Workload, rules: Engine) -> dict[str, Any]:
    tokens, batch, dtype = workload.context_tokens, workload.batch_size, workload.kv_dtype
    rows = kv_cache.cache_rows(spec, dtype, tokens, rules.cache_bytes)
    return {
        "dtype": dtype.name,
        **dict(zip(FIGURES, cache_figures(spec, workload, rules))),
        "formulas": formulas(rows, tokens, batch, dtype),
        "layers": [
            {
                "first": row.first,
                "last": row.last,
                "kind": row.cache.kind,
                "window": row.cache.window,
                "bytes_per_layer": row.bytes_per_layer,
            }
            for row in rows
        ],
    }


def _describe_blocks(spec: ModelSpec, workload: Workload, rules: Engine, memory: int | None) -> dict[str, Any]:
    """What an engine says of its pool, on one device, and where the bytes go; nothing for those that have none."""
    device = kv_cache.on_device(spec, workload.tensor_parallel_size)
    dtype, tokens, batch = workload.kv_dtype, workload.context_tokens, workload.batch_size
    found: dict[str, Any] = dict(rules.blocks(device, dtype, tokens, batch, memory)) if rules.blocks else {}
    if rules.lines is not None:
        found["request_lines"] = [line._asdict() for line in rules.lines(device, dtype, tokens)]
    if rules.pool is not None:
        found["pool_lines"] = [line._asdict() for line in rules.pool(device, dtype, tokens, batch)]
    return found


def _describe_variants(model: ModelSpec, what_if: WhatIf, workload: Workload, rules: Engine) -> list[dict[str, Any]]:
    """The four kinds of attention side by side; what the what-if asks for stands in its own kind's row."""
    model = bind_workload(model, workload)
    changed = side_by_side(model, what_if)
    mha_bytes = _mha_bytes(dict(changed)["mha"], workload)
    return [_describe_variant(kind, new, model, mha_bytes, workload, rules) for kind, new in changed]


def _mha_bytes(mha: ModelSpec | str, workload: Workload) -> int:
    """What the others are held against; 0 where the model cannot be MHA in this dtype."""
    try:
        return 0 if isinstance(mha, str) else _variant_bytes(mha, workload)
    except KvcalcError:
        return 0


def _variant_bytes(spec: ModelSpec, workload: Workload) -> int:
    return stored_sequence_bytes(spec, workload.kv_dtype, workload.context_tokens)


def _describe_variant(
    kind: str, spec: ModelSpec | str, model: ModelSpec, mha_bytes: int, workload: Workload, rules: Engine
) -> dict[str, Any]:
    row: dict[str, Any] = {
        "attention": kind,
        "own": False,
        "num_kv_heads": None,
        "kv_lora_rank": None,
        "qk_rope_head_dim": None,
        "bytes_per_token": None,
        "total_bytes": None,
        "ratio_to_mha": None,
        "attention_parameters_per_layer": None,
        "reason": None,
    }
    if isinstance(spec, str):
        return {**row, "reason": spec}
    shape, dtype, tokens = spec.attention, workload.kv_dtype, workload.context_tokens

    try:
        growth = rules.growth(spec, dtype, tokens)
        held = rules.replica_bytes(spec, dtype, tokens, workload.batch_size)
    except KvcalcError as error:
        # What the model might be may not fit a dtype or an engine: no reason to refuse what it is.
        return {**row, "reason": error.message}
    return {
        **row,
        "own": kind == model.attention.kind and spec.layers == model.layers,
        "num_kv_heads": None if shape.is_latent else shape.num_kv_heads,
        "kv_lora_rank": shape.kv_lora_rank or None,
        "qk_rope_head_dim": shape.qk_rope_head_dim or None,
        "bytes_per_token": growth.bytes_per_token,
        "total_bytes": held,
        "ratio_to_mha": _variant_bytes(spec, workload) / mha_bytes if mha_bytes else None,
        "attention_parameters_per_layer": layer_parameters(spec),
    }
