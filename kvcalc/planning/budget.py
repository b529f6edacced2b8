"""Divides a device's memory among the weights, the KV cache, the activations and the engine's reserve."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from kvcalc.errors import UsageError
from kvcalc.memory.engines.release import release_of
from kvcalc.memory.reserve import reserve_of
from kvcalc.memory.reserve.parts import ACTIVATION, RESERVE, Held, Question, Reserve
from kvcalc.model.caches import IndexerKeys, RecurrentState
from kvcalc.model.memo import remembered, remembered_of_two
from kvcalc.model.spec import ModelSpec, all_caches
from kvcalc.model.towers import tower_parameters
from kvcalc.notes import Note
from kvcalc.planning.attention_replicas import spread_of, whole_copies
from kvcalc.planning.capacity import NO_LIMIT, Limits, PoolShrinkage, capacity, context_notes, largest_batch
from kvcalc.planning.case import Case
from kvcalc.planning.gpus import describe_gpu
from kvcalc.planning.layout import count_replicas
from kvcalc.planning.weights import DeviceWeights, device_weights, file_excess, stage_sizes
from kvcalc.units import format_size

if TYPE_CHECKING:
    from kvcalc.planning.host import Host
    from kvcalc.planning.split import Room
    from kvcalc.planning.towers import LoadedTowers

WEIGHTS, KV_CACHE = "weights", "kv_cache"
# The most budgets that are remembered for one model. Each device with figures of its own has another one.
_MOST_BUDGETS = 256


class Budget(NamedTuple):
    """The memory a device has for the cache of a case.

    `pool_bytes` is the memory for the cache. It is negative if the weights and the reserve are larger than the device.
    `offered_bytes` is the memory from which the engine computes its pool. If TensorRT-LLM's fraction was given, the
    engine applies it to `offered_bytes` itself. `host` is the part of the model in host memory, if there is one. If the
    devices have different layers, this is the budget of the one with the least free memory, and `devices` has all.
    `towers` are the vision and audio towers, or None for a model of text alone.
    """

    case: Case
    weights: DeviceWeights
    reserve: Reserve
    pool_bytes: int
    offered_bytes: int
    host: Host | None = None
    devices: tuple[Room, ...] = ()
    towers: LoadedTowers | None = None

    def pool_at(self, tokens: int, sequences: int) -> int:
        """The memory for the cache at another context and batch. Some engines reserve more for longer prompts."""
        if not self.reserve.varies:
            return self.pool_bytes
        return _divide(self.case, self.weights, tokens, sequences, self.towers).pool_bytes

    def running_limit(self, tokens: int | None = None) -> int | None:
        """The most sequences of `tokens` tokens that fit in a replica. None if memory sets no limit.

        The default is the case's context length.
        """
        tokens = self.case.workload.context_tokens if tokens is None else tokens
        if self.devices:
            from kvcalc.planning.split import largest_batch_of

            return largest_batch_of(self.devices, tokens)
        found = largest_batch(self.case, self.pool_bytes, tokens, self.pool_shrinkage)
        return found if self.host is None else _least(found, self.host.largest_batch(tokens))

    @property
    def pool_shrinkage(self) -> PoolShrinkage | None:
        """How many bytes the pool shrinks at another context or batch. None if its size does not change."""
        if not self.reserve.varies or self._is_full_before_it_varies():
            return None
        return lambda tokens, sequences: self.pool_bytes - self.pool_at(tokens, sequences)

    def _is_full_before_it_varies(self) -> bool:
        """Whether no cache that fits is so large that the reserve grows, neither by its context nor by its batch."""
        workload, most = self.case.workload, self.reserve.same_until
        tokens, batch = workload.context_tokens, workload.attention_batch(workload.batch_size)
        if tokens * batch > most:
            return False
        rules, share, dtype = self.case.rules, self.case.share, workload.kv_dtype
        return all(
            rules.batch_bytes(share, dtype, *size) > self.pool_bytes
            for size in ((most // batch, batch), (tokens, most // tokens))
        )


def budget(case: Case) -> Budget | str:
    """The memory a device has for the cache, or the reason if it is not known.

    Remembered per layout, unless it depends on the context, the batch, the host's memory or drafted tokens.
    """
    asked, workload = case.question, case.workload
    if case.rules.placement is not None or asked.speculative is not None or _has_own_layers(case):
        return _budget(case)
    # The engine's rules already belong to one release, number of stages and set of settings.
    key = (
        id(case.rules), id(case.devices.gpu), asked.dtype, asked.kv_memory_bytes, workload.model_dtype,
        workload.tensor_parallel_size, workload.data_parallel_size, workload.expert_parallel_size,
    )  # fmt: skip
    known = _budgets_of(case.model, case.spec)
    found = known.get(key)
    if found is not None and _is_same(found.reserve, case):
        return Budget(case, *found[1:])
    computed = _budget(case)
    if isinstance(computed, Budget) and _is_same(computed.reserve, case):
        if len(known) >= _MOST_BUDGETS:
            known.clear()
        known[key] = computed  # it holds the rules and the device, so that their id() is not reused
    return computed


def _is_same(reserve: Reserve, case: Case) -> bool:
    """Whether the reserve is that of this layout at every context and batch up to those of the case."""
    return not reserve.varies or case.workload.context_tokens * case.workload.batch_size <= reserve.same_until


@remembered_of_two
def _budgets_of(model: ModelSpec, spec: ModelSpec) -> dict[tuple[object, ...], Budget]:
    """The budgets computed so far for this model."""
    return {}


def _budget(case: Case) -> Budget | str:
    spec, workload = case.spec, case.workload
    ranks, tables = workload.tensor_parallel_size, _has_tables_on_host(case)
    spread = spread_of(spec, case.rules, workload)
    own_layers = _has_own_layers(case)
    stages = () if own_layers else case.stages
    weights = device_weights(case.model, spec, case.question.dtype, workload.model_dtype, ranks, stages, spread, tables)
    if weights.bytes is None or weights.width is None:
        return f"the weights of {spec.name} are not known: {weights.reason}"
    if own_layers:
        return _budget_of_devices(case, weights, tables)
    placement, host = case.rules.placement, None
    if placement is not None:
        from kvcalc.planning.host import Host, divide_bytes

        divided = divide_bytes(case, placement)
        if isinstance(divided, str):
            return divided
        weights, host = weights._replace(bytes=divided.device), Host(case, placement, divided.host)
    if case.question.speculative is not None:
        from kvcalc.planning.drafter import draft_weights

        drafts = draft_weights(case)
        if isinstance(drafts, str):
            return drafts
        weights = weights._replace(bytes=(weights.bytes or 0) + drafts, draft_bytes=drafts)
    towers = None
    if case.model.multimodal is not None:
        from kvcalc.planning.towers import loaded_towers

        towers = loaded_towers(case)
        weights = with_others(without_file_towers(case, weights), towers.lines)
    if "max-lora-rank" in case.settings or "max-loras" in case.settings or "max-loras-per-batch" in case.settings:
        from kvcalc.planning.adapters import adapter_buffers

        weights = with_others(weights, adapter_buffers(case))
    if case.spec.quantization is not None:
        from kvcalc.planning.padded_experts import expert_padding, pads_experts

        if pads_experts(case):
            weights = with_others(weights, expert_padding(case))
    return _divide(case, weights, workload.context_tokens, workload.batch_size, towers)._replace(host=host)


def with_others(weights: DeviceWeights, lines: tuple[tuple[str, int], ...]) -> DeviceWeights:
    """The weights with further lines, such as towers."""
    added = sum(size for _, size in lines)
    return weights._replace(bytes=(weights.bytes or 0) + added, others=(*weights.others, *lines))


def without_file_towers(case: Case, weights: DeviceWeights) -> DeviceWeights:
    """The weights without the towers that the files in the model's folder hold, if their size shows that they do."""
    excess, size = file_excess(case.model, case.spec, case.question.dtype, case.workload.model_dtype)
    towers = 2 * tower_parameters(case.model)
    # Files may have a projector or norms in another type, so a little less is enough.
    if not excess or excess * 10 < towers * 9:
        return weights
    return weights._replace(bytes=(weights.bytes or 0) * (size - min(towers, excess)) // size)


def _has_own_layers(case: Case) -> bool:
    """Whether every device has layers of its own, with a budget of their own."""
    return bool(case.rules.bounds) and case.engine_name == "llama.cpp"


def _budget_of_devices(case: Case, weights: DeviceWeights, tables: bool) -> Budget | str:
    """The budgets of devices with layers of their own. `weights` are those of all layers together."""
    from kvcalc.planning.split import Room

    asked, workload = case.question, case.workload
    if case.rules.settings.get("split_mode") == "row":
        from kvcalc.planning.row_sizes import row_sizes

        sizes = row_sizes(case, tables)
    else:
        sizes = stage_sizes(case.model, case.spec, asked.dtype, workload.model_dtype, case.rules.bounds, tables)
    if isinstance(sizes, str):
        return sizes

    tokens, sequences = workload.context_tokens, workload.batch_size
    found = [
        _divide(device, weights._replace(bytes=size), tokens, sequences)
        for device, size in zip(case.of_devices(), sizes)
    ]
    rooms = tuple(
        Room(one.case, size, one.pool_bytes, one.pool_at, one.pool_shrinkage) for one, size in zip(found, sizes)
    )
    fullest = min(range(len(rooms)), key=lambda number: rooms[number].free_bytes())
    return found[fullest]._replace(devices=rooms)


def _has_tables_on_host(case: Case) -> bool:
    """Whether the input embedding takes no memory of the device.

    llama.cpp always keeps it in host memory (dev_input in llama_model_base::load_tensors, src/llama-model.cpp). Devices
    with LPDDR memory share it with the host.
    """
    return case.engine_name == "llama.cpp" and not (case.devices.gpu.memory_type or "").startswith("LPDDR")


def _divide(
    case: Case, weights: DeviceWeights, tokens: int, sequences: int, towers: LoadedTowers | None = None
) -> Budget:  # fmt: skip
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
            towers=towers,
        )
    replicas = workload.data_parallel_size
    # Whole copies exchange nothing, so each is like a server of its own.
    copies = replicas if replicas > 1 and whole_copies(spec, workload) else 1
    question = Question(
        memory_bytes=gpu.memory_bytes,
        width=weights.width,
        ranks=workload.num_devices // copies,
        context_tokens=tokens,
        batch_size=workload.attention_batch(sequences),
        settings=settings,
        num_heads=spec.attention.num_heads,
        is_latent=spec.attention.is_latent,
        release=release_of(case.question.engine),
        is_apple=gpu.vendor == "Apple",
        attention_replicas=replicas // copies,
        has_fast_links=gpu.interconnect is not None,
        images=None if towers is None else towers.images,
        has_sparse_latent=_has_sparse_latent(spec),
        shares_memory=(gpu.memory_type or "").startswith("LPDDR"),
        tensor_parallel_size=workload.tensor_parallel_size,
        multimodal=case.model.multimodal,
        keeps_tokens=_keeps_tokens(spec),
    )
    reserve = reserve_of(case.engine_name, question)
    left = gpu.memory_bytes - weights.bytes - reserve.held_bytes()
    pool = int(left * reserve.share) if left > 0 else left
    offered = left if "free-gpu-memory-fraction" in settings else pool
    return Budget(case, weights, reserve, pool, offered, towers=towers)


@remembered
def _has_sparse_latent(spec: ModelSpec) -> bool:
    """Whether the model has MLA whose keys an indexer chooses."""
    return spec.attention.is_latent and any(isinstance(cache, IndexerKeys) for cache in all_caches(spec))


@remembered
def _keeps_tokens(spec: ModelSpec) -> bool:
    """Whether the model has a cache of tokens. Encoders and models with states alone have none."""
    return not spec.is_encoder and any(not isinstance(cache, RecurrentState) for cache in all_caches(spec))


def describe_hardware(case: Case) -> dict[str, Any]:
    """The `hardware` part of a document: the figures of one device, and the number of devices."""
    gpu, number = case.devices
    return describe_gpu(gpu, {"num_devices": number, "replicas": count_replicas(number, case.workload)})


def describe_fit(found: Budget, notes: list[Note]) -> dict[str, Any]:
    """The `fit` part of a document, for one device. Its parts add up to `device_bytes`."""
    device_bytes = found.case.devices.gpu.memory_bytes
    limits: list[Note] = []
    of_devices = _limits_of_devices(found) if found.devices else None
    fit = capacity(found.case, found.pool_bytes, limits, found.pool_shrinkage, of_devices)
    fit["devices"] = [room.describe(number) for number, room in enumerate(found.devices)] or None
    if found.host is not None:
        tokens = found.case.workload.context_tokens
        fit["max_context_tokens"] = _least(fit["max_context_tokens"], found.host.longest_context())
        fit["max_batch_size"] = _least(fit["max_batch_size"], found.host.largest_batch(tokens))
        limits = context_notes(found.case, fit["max_context_tokens"])
    notes += limits
    held = found.reserve.held
    left = device_bytes - (found.weights.bytes or 0) - found.reserve.held_bytes()
    unused = left - found.pool_bytes
    drafts, others = found.weights.draft_bytes, found.weights.others
    lines = [Held(WEIGHTS, "weights", (found.weights.bytes or 0) - drafts - sum(size for _, size in others))]
    lines += [Held(WEIGHTS, "draft weights", drafts)] if drafts else []
    lines += [Held(WEIGHTS, name, size) for name, size in others]
    lines += [Held(KV_CACHE, "KV cache", fit["kv_cache_bytes"])]
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
    if found.towers is not None:
        notes += found.towers.notes
    _add_range(found, fit, notes)
    if not fit["fits"]:
        notes.append(Note("fit", "does-not-fit", _verdict(found, fit)))
    if found.host is not None:
        _add_host(found.host, fit, notes)
    return fit


def _limits_of_devices(found: Budget) -> Limits:
    """The limits of all devices, each with its own layers."""
    from kvcalc.planning.split import largest_batch_of, longest_context_of

    tokens = found.case.workload.context_tokens
    return longest_context_of(found.devices), largest_batch_of(found.devices, tokens)


def _add_range(found: Budget, fit: dict[str, Any], notes: list[Note]) -> None:
    """Add the 80 % range of the free memory to `fit`, and the verdict `tight` if the range includes a lack of it."""
    low, high = free_range(found, fit["free_bytes"])
    if low is None:
        return
    fit["free_low_bytes"], fit["free_high_bytes"] = low, high
    if not fit["fits"] or low >= 0:
        return
    more = fit["free_bytes"] - low
    if found.case.question.serves_requests:
        # More requests wait if there is less memory. It is tight only if not even one is sure to run.
        workload, rules = found.case.workload, found.case.rules
        one = rules.batch_bytes(found.case.share, workload.kv_dtype, workload.context_tokens, 1)
        if found.pool_bytes - more >= one:
            return
    fit["verdict"] = "tight"
    text = f"tight: the estimated parts may take up to {format_size(more)} more, and "
    text += f"{format_size(fit['free_bytes'], capacity=True)} is free; --strict exits with code 4"
    notes.append(Note("fit", "tight", text))


def free_range(found: Budget, free_bytes: int) -> tuple[int | None, int | None]:
    """The low and high end of the 80 % range of the free memory. None if no part has a range."""
    more = less = 0
    for part in found.reserve.held:
        if part.low is not None and part.high is not None:
            more, less = more + part.high - part.bytes, less + part.bytes - part.low
    return (free_bytes - more, free_bytes + less) if more or less else (None, None)


def _add_host(host: Host, fit: dict[str, Any], notes: list[Note]) -> None:
    """Add the part of the model in host memory to `fit`, and notes if it does not fit or is not checked."""
    fit["host"] = host.describe()
    shortage = host.shortage()
    if shortage is not None:
        fit.update(fits=False, verdict="does_not_fit")
        notes.append(Note("fit", "does-not-fit-host", shortage))
    if fit["host"]["kv_cache_bytes"] and host.placement.host_memory_bytes is None:
        notes[:] = [note for note in notes if note.code != NO_LIMIT]
        text = "a part of the cache is in host memory, which is not checked: --host-memory SIZE checks it"
        notes.append(Note("fit", "host-not-checked", text))


def _least(*limits: int | None) -> int | None:
    """The smallest limit. None is no limit."""
    return min((limit for limit in limits if limit is not None), default=None)


def _describe_line(line: Held) -> dict[str, Any]:
    """A line of `fit.lines`. Weights and cache are exact. The other parts are estimates; some have a range."""
    kind, name, size, low, high = line
    is_estimated = kind not in (WEIGHTS, KV_CACHE)
    return {
        "kind": kind, "name": name, "bytes": size, "estimated": is_estimated, "low_bytes": low, "high_bytes": high
    }  # fmt: skip


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
    sizes = case.share, workload.kv_dtype, workload.context_tokens
    one = max(case.rules.batch_bytes(*sizes, 1), case.rules.start_bytes(*sizes))
    there = format_size(found.pool_bytes, capacity=True)
    tokens = f"{workload.context_tokens:,} tokens"
    if one > found.pool_bytes:
        longest = fit["max_context_tokens"] if workload.attention_batch(workload.batch_size) == 1 else None
        estimated = f"; the longest context that fits is {longest:,}" if longest else ""
        needed = f"{format_size(one)} of cache per device"
        return f"one request of {tokens} needs {needed}, but only {there} is available{estimated}"
    replicas = workload.data_parallel_size
    divided = f" over {replicas} attention replicas" if replicas > 1 else ""
    return (
        f"{workload.batch_size:,} requests of {tokens}{divided} need {format_size(fit['kv_cache_bytes'])} of cache per "
        f"device, but only {there} is available; the largest batch that fits is {fit['max_batch_size']:,}"
    )
