"""The `fit` part of a document: what a device holds, line by line, and whether the question fits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from kvcalc.engines.reserve import ACTIVATION, RESERVE, Held
from kvcalc.notes import Note
from kvcalc.server.budget import WEIGHTS, Budget, free_range, weights_line
from kvcalc.server.capacity import (
    NO_LIMIT,
    capacity,
    context_notes,
    least,
    max_running_requests,
    too_many_to_start,
)
from kvcalc.units import format_size

if TYPE_CHECKING:
    import kvcalc.documents as documents
    from kvcalc.server.host import Host

KV_CACHE = "kv_cache"


# Less of the cache is not worth a remark.
_LEAST_SHARE = 20


def _doubts(room: Budget, fit: documents.Fit) -> list[Note]:
    """Notes about weights that may be larger than counted, and about memory that only a first start counts."""
    notes = []
    more, free = room.weights.most_more_bytes, fit["free_bytes"]
    if fit["fits"] and free is not None and more > free:
        text = (
            f"attention and shared experts may stay in 16 bits and take up to {format_size(more)} more per device, but "
        )
        text += f"{format_size(free, capacity=True)} is free; --weights-memory SIZE takes what a server printed"
        notes.append(Note("fit", "modules-not-counted", text))
    first = room.reserve.first_start_bytes
    if first * _LEAST_SHARE > room.pool_bytes > 0:
        text = f"a first start, which compiles, keeps {format_size(first)} from the cache; "
        text += f"--kv-cache-memory-bytes {room.pool_bytes + first} gives it back"
        notes.append(Note("fit", "first-start", text))
    graphs = room.reserve.graph_bytes
    if graphs * _LEAST_SHARE > room.pool_bytes > 0:
        text = f"an estimate of the CUDA graphs keeps {format_size(graphs)} from the cache; "
        text += "VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=0 (--graph-estimate 0) gives it back"
        notes.append(Note("fit", "graph-estimate", text))
    return notes


def describe_fit(room: Budget, notes: list[Note]) -> documents.Fit:
    """The `fit` part of a document, for one device. Its parts add up to `device_bytes`."""
    device_bytes = room.case.devices.gpu.memory_bytes
    limits: list[Note] = []
    of_devices = (room.longest_context(), room.running_limit()) if room.devices else None
    fit = capacity(room.case, room.pool_bytes, limits, room.pool_shrinkage, of_devices)
    fit["devices"] = [_describe_device(*device) for device in enumerate(room.devices)] or None
    if room.host is not None:
        tokens = room.case.workload.context_tokens
        longest = least(fit["memory_context_tokens"], room.host.longest_context())
        fit["max_context_tokens"] = least(longest, room.case.spec.max_position_embeddings)
        fit["memory_context_tokens"] = longest
        largest = room.host.largest_batch(tokens)
        fit["max_batch_size"] = least(fit["max_batch_size"], largest)
        fit["memory_batch_size"] = least(fit["memory_batch_size"], largest)
        limits = context_notes(longest)
    notes += limits
    held = room.reserve.held
    left = device_bytes - (room.weights.bytes or 0) - room.reserve.held_bytes()
    unused = left - room.pool_bytes
    drafts, others = room.weights.draft_bytes, room.weights.others
    lines = [weights_line(room)]
    lines += [Held(WEIGHTS, "draft weights", drafts)] if drafts else []
    lines += [Held(WEIGHTS, name, size) for name, size in others]
    lines += [Held(KV_CACHE, "KV cache", fit["kv_cache_bytes"])]
    lines += [part for part in held if part.kind == ACTIVATION]
    lines += [part for part in held if part.kind == RESERVE]
    if unused:
        lines.append(Held(RESERVE, f"not used for the cache (1 - {room.reserve.share:g} of the free memory)", unused))
    lines.append(Held("free", "free", fit["free_bytes"]))
    fit.update({
        "device_bytes": device_bytes,
        "weights_bytes": room.weights.bytes,
        "weights_replicated_bytes": room.weights.replicated_bytes,
        "activation_bytes": sum(part.bytes for part in held if part.kind == ACTIVATION),
        "reserve_bytes": sum(part.bytes for part in held if part.kind == RESERVE) + unused,
        "kv_cache_memory_bytes": room.pool_bytes,
        "lines": [_describe_line(line) for line in lines],
    })  # fmt: skip
    if room.towers is not None:
        notes += room.towers.notes
    notes += _doubts(room, fit)
    _add_range(room, fit, notes)
    too_many = too_many_to_start(room.case, room.pool_bytes)
    if fit["fits"] and too_many is not None:
        notes.append(Note("fit", "start-limit", too_many.refusal(room.case.engine.title)))
    if not fit["fits"]:
        notes.append(Note("fit", "does-not-fit", _verdict(room, fit)))
    if room.host is not None:
        _add_host(room.host, fit, notes)
    return fit


def _describe_device(number: int, device: Budget) -> documents.DeviceShare:
    """A row of `fit.devices`. A device without layers may have the output."""
    layers = device.case.share.layers
    return {
        "device": number,
        "first_layer": min((group.first for group in layers), default=None),
        "last_layer": max((group.last for group in layers), default=None),
        "weights_bytes": device.weights.bytes or 0,
        "kv_cache_bytes": device.cache_bytes(),
        "free_bytes": device.free_bytes(),
        "fits": device.free_bytes() >= 0,
    }


def _add_range(room: Budget, fit: documents.Fit, notes: list[Note]) -> None:
    """Add the 80 % range of the free memory to `fit`, and the verdict `tight` if the range goes below 0."""
    low, high = free_range(room, fit["free_bytes"])
    if low is None:
        return
    fit["free_low_bytes"], fit["free_high_bytes"] = low, high
    fit["sure_context_tokens"] = least(room.longest_context(fit["free_bytes"] - low), fit["max_context_tokens"])
    if not fit["fits"] and high is not None and high >= 0 and weights_line(room).low is not None:
        text = f"it may fit: the estimated parts may take up to {format_size(high - fit['free_bytes'])} less"
        notes.append(Note("fit", "may-fit", text))
    if not fit["fits"] or low >= 0:
        return
    more = fit["free_bytes"] - low
    if room.case.question.serves_requests:
        # With less memory, more requests wait. The fit is tight only if not even one request is sure to run.
        workload, allocation = room.case.workload, room.case.allocation
        of_one = allocation.batch_bytes(room.case.share, workload.kv_dtype, workload.context_tokens, 1)
        if room.pool_bytes - more >= of_one:
            return
    fit["verdict"] = "tight"
    text = f"tight: the estimated parts may take up to {format_size(more)} more, and "
    text += f"{format_size(fit['free_bytes'], capacity=True)} is free; --strict exits with code 4"
    notes.append(Note("fit", "tight", text))


def _add_host(host: Host, fit: documents.Fit, notes: list[Note]) -> None:
    """Add the part of the model in host memory to `fit`, and notes if it does not fit or is not checked."""
    fit["host"] = described = host.describe()
    shortage = host.shortage()
    if shortage is not None:
        fit.update({"fits": False, "verdict": "does_not_fit"})
        notes.append(Note("fit", "does-not-fit-host", shortage))
    if described["kv_cache_bytes"] and host.placement.host_memory_bytes is None:
        notes[:] = [note for note in notes if note.code != NO_LIMIT]
        text = "a part of the cache is in host memory, which is not checked: --host-memory SIZE checks it"
        notes.append(Note("fit", "host-not-checked", text))


def _describe_line(line: Held) -> documents.Held:
    """A line of `fit.lines`. Cache and weights without a range are exact. The other parts are estimates."""
    kind, name, size, low, high = line
    is_estimated = kind not in (WEIGHTS, KV_CACHE) or low is not None
    return {
        "kind": cast(Any, kind), "name": name, "bytes": size, "estimated": is_estimated, "low_bytes": low,
        "high_bytes": high,
    }  # fmt: skip


def _verdict(room: Budget, fit: documents.Fit) -> str:
    """Why the model does not fit, and the longest context that does. vLLM's start-up check reports the same."""
    if room.pool_bytes <= 0:
        kept = format_size(room.reserve.held_bytes())
        return (
            "no memory is left for the cache: "
            f"the weights take {format_size(room.weights.bytes or 0)} of the device's "
            f"{format_size(room.case.devices.gpu.memory_bytes, capacity=True)}, and {kept} is reserved"
        )
    case, workload = room.case, room.case.workload
    too_many = too_many_to_start(case, room.pool_bytes)
    if too_many is not None and not too_many.is_default:
        return too_many.refusal(case.engine.title)
    tokens = f"{workload.context_tokens:,} tokens"
    most = max_running_requests(case, room.pool_bytes, workload.context_tokens)
    if fit["free_bytes"] >= 0 and most is not None and most < workload.batch_size:
        requests = "request" if workload.batch_size == 1 else "requests"
        option = case.engine.running_option
        raises = f" (--{option} sets it)" if option and most == max_running_requests(case, None) else ""
        return (
            f"{workload.batch_size:,} {requests} of {tokens}: {case.engine.name} runs at most {most:,} at once{raises}"
        )
    of_one = case.needed_bytes(workload.context_tokens, 1)
    memory = format_size(room.pool_bytes, capacity=True)
    if of_one > room.pool_bytes:
        longest = fit["memory_context_tokens"] if workload.attention_batch == 1 else None
        option, needed = case.engine.context_option, f"{format_size(of_one)} of cache per device"
        tried = f"; the longest context that fits is {longest:,}" if longest else ""
        tried += f": {option} {longest}" if longest and option else ""
        stops = "" if case.engine.starts_short else f"{case.engine.title} does not start: "
        return f"{stops}one request of {tokens} needs {needed}, but only {memory} is available{tried}"
    replicas = workload.layout.data_parallel_size
    divided = f" over {replicas} DP ranks" if replicas > 1 else ""
    together = case.needed_bytes(workload.context_tokens, workload.attention_batch)
    return (
        f"{workload.batch_size:,} requests of {tokens}{divided} need {format_size(together)} of cache per "
        f"device, but only {memory} is available; the largest batch that fits is {fit['max_batch_size']:,}"
    )
