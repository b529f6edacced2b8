"""Divides a device's memory among the weights, the KV cache, the activations and the engine's reserve."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from kvcalc.errors import UsageError
from kvcalc.memory.engines.release import release_of
from kvcalc.memory.reserve import ACTIVATION, RESERVE, Held, Question, Reserve, reserve_of
from kvcalc.notes import Note
from kvcalc.planning.capacity import PoolShrinkage, capacity, largest_batch
from kvcalc.planning.case import Case
from kvcalc.planning.gpus import describe_gpu
from kvcalc.planning.layout import count_replicas
from kvcalc.planning.weights import DeviceWeights, device_weights
from kvcalc.units import format_size

WEIGHTS, KV_CACHE = "weights", "kv_cache"


class Budget(NamedTuple):
    """The memory a device has for the cache of a case.

    `pool_bytes` is the memory for the cache. It is negative if the weights and the reserve are larger than the device.
    `offered_bytes` is the memory from which the engine computes its pool. If TensorRT-LLM's fraction was given, the
    engine applies it to `offered_bytes` itself.
    """

    case: Case
    weights: DeviceWeights
    reserve: Reserve
    pool_bytes: int
    offered_bytes: int

    def pool_at(self, tokens: int, sequences: int) -> int:
        """The memory for the cache at another context and batch. Some engines reserve more for longer prompts."""
        if not self.reserve.varies:
            return self.pool_bytes
        return _divide(self.case, self.weights, tokens, sequences).pool_bytes

    def running_limit(self, tokens: int | None = None) -> int | None:
        """The most sequences of `tokens` tokens that fit in a replica. None if memory sets no limit.

        The default is the case's context length.
        """
        tokens = self.case.workload.context_tokens if tokens is None else tokens
        return largest_batch(self.case, self.pool_bytes, tokens, self.pool_shrinkage)

    @property
    def pool_shrinkage(self) -> PoolShrinkage | None:
        """How many bytes the pool shrinks at another context or batch. None if its size does not change."""
        if not self.reserve.varies:
            return None
        return lambda tokens, sequences: self.pool_bytes - self.pool_at(tokens, sequences)


def budget(case: Case) -> Budget | str:
    """The memory a device has for the cache, or the reason if it is not known."""
    spec, workload = case.spec, case.workload
    ranks = workload.tensor_parallel_size
    weights = device_weights(case.model, spec, case.question.dtype, workload.model_dtype, ranks, case.stages)
    if weights.bytes is None or weights.width is None:
        return f"the weights of {spec.name} are not known: {weights.reason}"
    return _divide(case, weights, workload.context_tokens, workload.batch_size)


def _divide(case: Case, weights: DeviceWeights, tokens: int, sequences: int) -> Budget:
    """The budget at a context and a batch. The weights must be known."""
    spec, workload, settings, gpu = case.spec, case.workload, case.settings, case.devices.gpu
    if weights.bytes is None or weights.width is None:
        raise ValueError("a budget needs the bytes of the weights")
    given = case.question.kv_memory_bytes
    if given is not None:
        left = gpu.memory_bytes - weights.bytes
        if given > left:
            there = format_size(max(left, 0), capacity=True)
            raise UsageError(f"--kv-memory {format_size(given)}: only {there} is left after the weights")
        return Budget(
            case,
            weights,
            Reserve([Held(RESERVE, "not used for the cache (--kv-memory)", left - given)], {}),
            given,
            given,
        )
    question = Question(
        memory_bytes=gpu.memory_bytes,
        width=weights.width,
        ranks=workload.tensor_parallel_size * workload.pipeline_parallel_size,
        context_tokens=tokens,
        batch_size=sequences,
        settings=settings,
        num_heads=spec.attention.num_heads,
        is_latent=spec.attention.is_latent,
        release=release_of(case.question.engine),
        is_apple=gpu.vendor == "Apple",
    )
    reserve = reserve_of(case.engine_name, question)
    left = gpu.memory_bytes - weights.bytes - reserve.held_bytes()
    pool = int(left * reserve.share) if left > 0 else left
    offered = left if "free-gpu-memory-fraction" in settings else pool
    return Budget(case, weights, reserve, pool, offered)


def describe_hardware(case: Case) -> dict[str, Any]:
    """The `hardware` part of a document: the figures of one device, and the number of devices."""
    gpu, number = case.devices
    return describe_gpu(gpu, {"num_devices": number, "replicas": count_replicas(number, case.workload)})


def describe_fit(found: Budget, notes: list[Note]) -> dict[str, Any]:
    """The `fit` part of a document, for one device. Its parts add up to `device_bytes`."""
    device_bytes = found.case.devices.gpu.memory_bytes
    fit = capacity(found.case, found.pool_bytes, notes, found.pool_shrinkage)
    held = found.reserve.held
    left = device_bytes - (found.weights.bytes or 0) - found.reserve.held_bytes()
    unused = left - found.pool_bytes
    lines = [Held(WEIGHTS, "weights", found.weights.bytes or 0), Held(KV_CACHE, "KV cache", fit["kv_cache_bytes"])]
    lines += [part for part in held if part.kind == ACTIVATION]
    lines += [part for part in held if part.kind == RESERVE]
    if unused:
        lines.append(Held(RESERVE, f"not used for the cache (1 - {found.reserve.share:g} of the free memory)", unused))
    lines.append(Held("free", "free", fit["free_bytes"]))
    fit.update(
        device_bytes=device_bytes,
        weights_bytes=found.weights.bytes,
        weights_replicated_bytes=found.weights.replicated_bytes,
        activation_bytes=sum(part.bytes for part in held if part.kind == ACTIVATION),
        reserve_bytes=sum(part.bytes for part in held if part.kind == RESERVE) + unused,
        kv_cache_memory_bytes=found.pool_bytes,
        lines=[_describe_line(line) for line in lines],
    )
    if not fit["fits"]:
        notes.append(Note("fit", "does-not-fit", _verdict(found, fit)))
    return fit


def _describe_line(line: Held) -> dict[str, Any]:
    """A line of `fit.lines`. Weights and cache are exact. The other parts are estimates and have no range yet."""
    return {**line._asdict(), "estimated": line.kind not in (WEIGHTS, KV_CACHE), "low_bytes": None, "high_bytes": None}


def _verdict(found: Budget, fit: Mapping[str, Any]) -> str:
    """Why the model does not fit, and the longest context that does. vLLM's start-up check reports the same."""
    if found.pool_bytes <= 0:
        kept = format_size(found.reserve.held_bytes())
        return (
            "no memory is left for the cache: "
            f"the weights take {format_size(found.weights.bytes or 0)} of the device's "
            f"{format_size(found.case.devices.gpu.memory_bytes, capacity=True)}, and {kept} is reserved"
        )
    case, workload = found.case, found.case.workload
    one = case.rules.batch_bytes(case.share, workload.kv_dtype, workload.context_tokens, 1)
    there = format_size(found.pool_bytes, capacity=True)
    tokens = f"{workload.context_tokens:,} tokens"
    if one > found.pool_bytes:
        longest = fit["max_context_tokens"] if workload.batch_size == 1 else None
        estimated = f"; the longest context that fits is {longest:,}" if longest else ""
        needed = f"{format_size(one)} of cache per device"
        return f"one request of {tokens} needs {needed}, but only {there} is available{estimated}"
    return (
        f"{workload.batch_size:,} requests of {tokens} need {format_size(fit['kv_cache_bytes'])} of cache per device, "
        f"but only {there} is available; the largest batch that fits is {fit['max_batch_size']:,}"
    )
