"""A device's memory divided among weights, cache, activations and what an engine keeps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from kvcalc.errors import UsageError
from kvcalc.memory import kv_cache
from kvcalc.memory.engines import Engine, check_engine
from kvcalc.memory.reserve import (
    ACTIVATION,
    RESERVE,
    Held,
    Question,
    Reserve,
    device_settings,
    release_of,
    reserve_of,
)
from kvcalc.memory.workload import Workload
from kvcalc.model.spec import ModelSpec
from kvcalc.planning.capacity import Beside, capacity, largest_batch
from kvcalc.planning.weights import DeviceWeights
from kvcalc.throughput.hardware import Devices, Gpu
from kvcalc.units import format_size


class Budget(NamedTuple):
    """What a device has for the cache at this workload.

    `pool_bytes` is the cache's, below zero where the weights and the reserve are larger than the device.
    `offered_bytes` is what the engine's own account of its pool starts from: TensorRT-LLM takes its fraction itself
    where it was given.
    """

    weights: DeviceWeights
    reserve: Reserve
    pool_bytes: int
    offered_bytes: int
    memory_bytes: int


def with_device(engine: str, settings: Mapping[str, str], devices: Devices) -> dict[str, str]:
    """The engine's settings, those whose defaults it takes from the device filled in."""
    check_engine(engine)
    gpu = devices.gpu
    name = engine.partition("@")[0]
    return {
        **device_settings(name, gpu.memory_bytes, gpu.device_class, gpu.name, release_of(engine)),
        **settings,
    }


def budget(
    spec: ModelSpec,
    workload: Workload,
    engine: str,
    settings: Mapping[str, str],
    gpu: Gpu,
    weights: DeviceWeights,
    tokens: int | None = None,
    sequences: int | None = None,
) -> Budget | None:
    """The memory `gpu` has for the cache under `engine`, None where the weights are not known.

    `tokens` and `sequences` replace the workload's: some engines hold more for a longer prompt.
    """
    if weights.bytes is None or weights.width is None:
        return None
    question = Question(
        memory_bytes=gpu.memory_bytes,
        weights_bytes=weights.bytes,
        width=weights.width,
        ranks=workload.tensor_parallel_size * workload.pipeline_parallel_size,
        context_tokens=tokens or workload.context_tokens,
        batch_size=sequences or workload.batch_size,
        settings=settings,
        num_heads=spec.attention.num_heads,
        is_latent=spec.attention.is_latent,
        release=release_of(engine),
        device_class=gpu.device_class,
        device_name=gpu.name,
        is_apple=gpu.vendor == "Apple",
    )
    reserve = reserve_of(engine.partition("@")[0], question)
    left = gpu.memory_bytes - weights.bytes - reserve.held_bytes()
    pool = int(left * reserve.share) if left > 0 else left
    offered = left if "free-gpu-memory-fraction" in settings else pool
    return Budget(weights, reserve, pool, offered, gpu.memory_bytes)


def lay_out(devices: Devices | None, tensor_parallel_size: int | None, stages: int) -> tuple[Devices | None, int]:
    """The devices, and the tensor-parallel size where it is not given: all devices of a stage; and where there is one
    device alone, as many as the layout takes. UsageError (exit 2) where stages do not divide the devices."""
    if devices is None:
        return None, tensor_parallel_size or 1
    if tensor_parallel_size is None:
        if devices.num_devices == 1:
            return devices._replace(num_devices=stages), 1
        size, rest = divmod(devices.num_devices, stages)
        if rest:
            raise UsageError(f"--pipeline-parallel-size {stages} does not divide {devices.num_devices} devices")
        return devices, size
    if devices.num_devices == 1:
        return devices._replace(num_devices=tensor_parallel_size * stages), tensor_parallel_size
    return devices, tensor_parallel_size


def check_count(devices: Devices, workload: Workload) -> int:
    """How many replicas of the model the devices hold; UsageError (exit 2) where they do not make whole ones."""
    size, stages = workload.tensor_parallel_size, workload.pipeline_parallel_size
    needed = size * stages
    replicas, rest = divmod(devices.num_devices, needed)
    if rest or not replicas:
        asked = f"--tp {size}" + (f" --pp {stages}" if stages > 1 else "")
        raise UsageError(
            f"{devices.num_devices} device{'s' if devices.num_devices > 1 else ''} and {asked}: "
            f"{needed} are needed for one replica",
            f"--num-gpus {needed}, or another --tp",
        )
    return replicas


def describe_hardware(devices: Devices, replicas: int) -> dict[str, Any]:
    """The `hardware` part of a document: one device's figures, and how many there are."""
    gpu = devices.gpu
    link = gpu.interconnect
    return {
        "name": gpu.name,
        "vendor": gpu.vendor,
        "device_class": gpu.device_class,
        "num_devices": devices.num_devices,
        "replicas": replicas,
        "memory_bytes": gpu.memory_bytes,
        "memory_type": gpu.memory_type,
        "bandwidth_bytes_per_second": gpu.bandwidth_bytes_per_second or None,
        "flops_per_second": dict(gpu.flops_per_second),
        "interconnect": None if link is None else link._asdict(),
        "pcie_bytes_per_second": gpu.pcie_bytes_per_second,
        "tdp_watts": gpu.tdp_watts,
        "source": gpu.source,
        "date": gpu.date,
        "note": gpu.note,
    }


def describe_fit(
    spec: ModelSpec,
    workload: Workload,
    rules: Engine,
    engine: str,
    settings: Mapping[str, str],
    gpu: Gpu,
    found: Budget,
    warnings: list[str],
) -> dict[str, Any]:
    """The `fit` part of a document on one of the devices, its parts adding up to `device_bytes`."""
    beside = _beside(spec, workload, engine, settings, gpu, found)
    fit = capacity(spec, workload, rules, found.pool_bytes, warnings, beside)
    if found.pool_bytes < 0:
        fit["max_context_tokens"], fit["max_batch_size"] = 0, 0
    held = found.reserve.held
    left = found.memory_bytes - (found.weights.bytes or 0) - found.reserve.held_bytes()
    unused = left - found.pool_bytes
    lines = [Held("weights", "weights", found.weights.bytes or 0), Held("kv_cache", "KV cache", fit["kv_cache_bytes"])]
    lines += [part for part in held if part.kind == ACTIVATION]
    lines += [part for part in held if part.kind == RESERVE]
    if unused:
        lines.append(Held(RESERVE, f"not the cache's (1 - {found.reserve.share:g} of what is free)", unused))
    lines.append(Held("free", "free", fit["free_bytes"]))
    fit.update(
        device_bytes=found.memory_bytes,
        weights_bytes=found.weights.bytes,
        weights_replicated_bytes=found.weights.replicated_bytes,
        activation_bytes=sum(part.bytes for part in held if part.kind == ACTIVATION),
        reserve_bytes=sum(part.bytes for part in held if part.kind == RESERVE) + unused,
        kv_cache_memory_bytes=found.pool_bytes,
        lines=[line._asdict() for line in lines],
    )
    if not fit["fits"]:
        warnings.append(_verdict(rules, spec, workload, found, fit))
    return fit


def running_limit(
    spec: ModelSpec,
    workload: Workload,
    rules: Engine,
    engine: str,
    settings: Mapping[str, str],
    gpu: Gpu,
    found: Budget,
    tokens: int,
) -> int | None:
    """The most requests of `tokens` tokens a replica holds at once; None where memory sets no limit."""
    if found.pool_bytes < 0:
        return 0
    beside = _beside(spec, workload, engine, settings, gpu, found)
    return largest_batch(spec, workload, rules, found.pool_bytes, tokens, beside)


def _beside(
    spec: ModelSpec, workload: Workload, engine: str, settings: Mapping[str, str], gpu: Gpu, found: Budget
) -> Beside | None:
    """By how much the pool shrinks at another context or batch; None where it does not."""
    if not found.reserve.varies:
        return None

    def more(tokens: int, sequences: int) -> int:
        there = budget(spec, workload, engine, settings, gpu, found.weights, tokens, sequences)
        return 0 if there is None else found.pool_bytes - there.pool_bytes

    return more


def _verdict(rules: Engine, spec: ModelSpec, workload: Workload, found: Budget, fit: Mapping[str, Any]) -> str:
    """Why it does not fit, and the longest context that would: what vLLM's own start-up check says, in our words."""
    if found.pool_bytes <= 0:
        kept = format_size(found.reserve.held_bytes())
        return (
            f"no memory is left for the cache: the weights take {format_size(found.weights.bytes or 0)} of a device's "
            f"{format_size(found.memory_bytes, capacity=True)}, and {kept} are kept for other things"
        )
    device = kv_cache.on_device(spec, workload.tensor_parallel_size)
    one = rules.batch_bytes(device, workload.kv_dtype, workload.context_tokens, 1)
    there = format_size(found.pool_bytes, capacity=True)
    tokens = f"{workload.context_tokens:,} tokens"
    if one > found.pool_bytes:
        longest = fit["max_context_tokens"] if workload.batch_size == 1 else None
        estimated = f"; the longest context that fits is {longest:,}" if longest else ""
        return (
            f"one request of {tokens} needs {format_size(one)} of cache on a device, and {there} are there{estimated}"
        )
    return (
        f"{workload.batch_size:,} requests of {tokens} need {format_size(fit['kv_cache_bytes'])} of cache on a device, "
        f"and {there} are there: {fit['max_batch_size']:,} fit"
    )
