"""Divides a device's memory among the weights, the KV cache, the activations and the engine's reserve."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcalc.engines import reserve_of
from kvcalc.engines.options import has_adapters
from kvcalc.engines.reserve import RESERVE, Held, Reserve, ReserveInputs
from kvcalc.errors import LayoutError
from kvcalc.model.caches import IndexerKeys, RecurrentState
from kvcalc.model.memo import keep, remembered, remembered_of_two
from kvcalc.model.spec import ModelSpec, all_caches, has_states
from kvcalc.records import NamedTuple
from kvcalc.releases import release_of
from kvcalc.server.capacity import PoolShrinkage, largest_batch, least, longest_context
from kvcalc.server.case import Case
from kvcalc.server.device_weights import DeviceWeights, device_weights, file_excess, row_sizes, stage_sizes
from kvcalc.server.dp_attention import spread_names
from kvcalc.units import format_size

if TYPE_CHECKING:
    from kvcalc.server.host import Host
    from kvcalc.server.weights import LoadedTowers

WEIGHTS = "weights"
# The most budgets that are remembered for one model. Each device with figures of its own has another one.
_MOST_BUDGETS = 256


class Budget(NamedTuple):
    """The memory a device has for the cache of a case.

    `pool_bytes` is the memory for the cache. It is negative if the weights and the reserve are larger than the device.
    `offered_bytes` is the memory from which the engine computes its pool. If TensorRT-LLM's fraction was given, the
    engine applies it to `offered_bytes` itself. `host` is the part of the model in host memory, if there is one. If the
    devices have different layers, this is the budget of the one with the least free memory, and `devices` has all.
    `towers` are the vision and audio towers, or None for a model of text alone. `unused_bytes` are left over because
    the engine's own options limit the cache.
    """

    case: Case
    weights: DeviceWeights
    reserve: Reserve
    pool_bytes: int
    offered_bytes: int
    host: Host | None = None
    devices: tuple[Budget, ...] = ()
    towers: LoadedTowers | None = None
    unused_bytes: int = 0

    def cache_bytes(self) -> int:
        """The bytes of the cache of the case's own workload."""
        workload = self.case.workload
        return self.case.cache_bytes(workload.context_tokens, workload.batch_size)

    def free_bytes(self) -> int:
        """The free memory beside that cache. It may be negative."""
        return self.pool_bytes - self.cache_bytes()

    def pool_at(self, tokens: int, sequences: int) -> int:
        """The memory for the cache at another context and batch. Some engines reserve more for longer prompts."""
        if not self.reserve.varies:
            return self.pool_bytes
        room = _limited(_divide(self.case, self.weights, tokens, sequences, self.towers))
        return room.pool_bytes

    def running_limit(self, tokens: int | None = None) -> int | None:
        """The most sequences of `tokens` tokens that fit in a replica. None if memory sets no limit.

        The default is the case's context length.
        """
        tokens = self.case.workload.context_tokens if tokens is None else tokens
        if self.devices:
            return least(*(device.running_limit(tokens) for device in self.devices))
        most = largest_batch(self.case, self.pool_bytes, tokens, self.pool_shrinkage)
        return most if self.host is None else least(most, self.host.largest_batch(tokens))

    def longest_context(self, margin_bytes: int = 0) -> int | None:
        """The longest context of the case's batch that leaves `margin_bytes` free on every device.

        None if memory sets no limit. The host's memory does not count.
        """
        if self.devices:
            return least(*(device.longest_context(margin_bytes) for device in self.devices))
        return longest_context(self.case, self.pool_bytes - margin_bytes, self.pool_shrinkage)

    @property
    def pool_shrinkage(self) -> PoolShrinkage | None:
        """How many bytes the pool shrinks at another context or batch. None if its size does not change."""
        if not self.reserve.varies or self._is_full_before_it_varies():
            return None
        return lambda tokens, sequences: self.pool_bytes - self.pool_at(tokens, sequences)

    def _is_full_before_it_varies(self) -> bool:
        """Whether no cache that fits is so large that the reserve grows, neither by its context nor by its batch."""
        workload, most = self.case.workload, self.reserve.same_until
        tokens, batch = workload.context_tokens, workload.attention_batch
        if tokens * batch > most:
            return False
        allocation, share, dtype = self.case.allocation, self.case.share, workload.kv_dtype
        return all(
            allocation.batch_bytes(share, dtype, *size) > self.pool_bytes
            for size in ((most // batch, batch), (tokens, most // tokens))
        )


def budget(case: Case) -> Budget | str:
    """The memory a device has for the cache, or the reason if it is not known."""
    if _has_own_layers(case):
        return _budget(case)
    room = _unlimited(case)
    return room if isinstance(room, str) else _limited(room)


def _unlimited(case: Case) -> Budget | str:
    """The budget before `_limited`, which depends on the type of the cache.

    Remembered per layout, unless it depends on the context, the batch, the host's memory or drafted tokens.
    """
    question, workload = case.question, case.workload
    if case.engine.placement is not None or question.speculative is not None:
        return _budget(case)
    # The engine already belongs to one release, number of stages and set of settings.
    key = (
        id(case.engine), id(case.devices.gpu), question.dtype, question.kv_memory_bytes, question.weights_bytes,
        workload.model_dtype, workload.layout,
    )  # fmt: skip
    known = _budgets_of(case.model, case.spec)
    room = known.get(key)
    if room is not None and _is_same(room.reserve, case):
        return Budget(case, *room[1:])
    computed = _budget(case)
    if isinstance(computed, Budget) and _is_same(computed.reserve, case):
        keep(
            known, key, computed, _MOST_BUDGETS
        )  # it holds the engine and the device, so that their id() is not reused
    return computed


def _is_same(reserve: Reserve, case: Case) -> bool:
    """Whether the reserve is that of this layout at every context and batch up to those of the case."""
    return not reserve.varies or case.workload.context_tokens * case.workload.batch_size <= reserve.same_until


@remembered_of_two
def _budgets_of(model: ModelSpec, spec: ModelSpec) -> dict[tuple[object, ...], Budget]:
    """The budgets computed so far for this model."""
    return {}


def _budget(case: Case) -> Budget | str:
    """The budget before `_limited`, or that of devices with layers of their own."""
    spec, workload = case.spec, case.workload
    layout = workload.layout
    tables = case.engine_class.keeps_tables_on_host and not _shares_memory(case)
    names = spread_names(spec, case.engine, layout)
    own_layers = _has_own_layers(case)
    stages = () if own_layers else case.stages
    weights = device_weights(case.model, spec, case.question.dtype, workload.model_dtype, layout, stages, names, tables)
    stated = case.question.weights_bytes
    if stated is not None and weights.width is not None:
        weights, towers = DeviceWeights(stated, 0, weights.width, None), _towers(case)
        known = towers and towers._replace(most_unknown_bytes=0)
        divided = _placed(case)
        host = None if isinstance(divided, str) else divided[1]
        return _divide(case, weights, workload.context_tokens, workload.batch_size, known)._replace(host=host)
    if weights.bytes is None or weights.width is None:
        return f"the weights of {spec.name} are not known: {weights.reason}"
    if own_layers:
        return _budget_of_devices(case, weights, tables)
    placed = _placed(case)
    if isinstance(placed, str):
        return placed
    on_device, host = placed
    if on_device is not None:
        weights = weights._replace(bytes=on_device)
    speculation = case.question.speculative
    if speculation is not None:
        from kvcalc.server.drafting.drafter import draft_weights

        drafts = draft_weights(case)
        if isinstance(drafts, str):
            return drafts
        weights = weights._replace(bytes=(weights.bytes or 0) + drafts, draft_bytes=drafts)
        lines = case.engine.draft_tables(speculation.method, speculation.draft_model, layout.tensor_parallel_size)
        weights = with_others(weights, lines)
    towers = _towers(case)
    if towers is not None:
        weights = with_others(without_file_towers(case, weights), towers.lines)
    if has_adapters(case.settings):
        from kvcalc.server.device_weights import adapter_buffers

        weights = with_others(weights, adapter_buffers(case))
    if case.spec.quantization is not None:
        padding = case.engine_class.weight_padding(
            case.spec, case.devices.gpu, case.question.dtype, layout, case.stages,
            release_of(case.question.engine),
        )  # fmt: skip
        weights = with_others(weights, padding)
    weights = with_others(weights, case.engine_class.loaded_tables(case.spec))
    return _divide(case, weights, workload.context_tokens, workload.batch_size, towers)._replace(host=host)


def _placed(case: Case) -> tuple[int | None, Host | None] | str:
    """The bytes of the weights on the device and the host's share, or the reason if they are not known.

    Both are None if the engine places all on the device.
    """
    placement = case.engine.placement
    if placement is None:
        return None, None
    from kvcalc.server.host import Host, divide_bytes

    divided = divide_bytes(case, placement)
    return divided if isinstance(divided, str) else (divided.device, Host(case, placement, divided.host))


def _towers(case: Case) -> LoadedTowers | None:
    """The towers on a device, or None for a model of text alone."""
    if not case.model.has_towers:
        return None
    from kvcalc.server.weights import loaded_towers

    return loaded_towers(case)


def with_others(weights: DeviceWeights, lines: tuple[tuple[str, int], ...]) -> DeviceWeights:
    """The weights with further lines, such as towers."""
    added = sum(size for _, size in lines)
    return weights._replace(bytes=(weights.bytes or 0) + added, others=(*weights.others, *lines))


def without_file_towers(case: Case, weights: DeviceWeights) -> DeviceWeights:
    """The weights without the towers that the files in the model's folder hold, if their size shows that they do."""
    excess, size = file_excess(case.model, case.spec, case.question.dtype, case.workload.model_dtype)
    if not excess:
        return weights
    from kvcalc.model.towers import tower_parameters

    towers = 2 * tower_parameters(case.model)
    # Files may have a projector or norms in another type, so a little less is enough.
    if excess * 10 < towers * 9:
        return weights
    return weights._replace(bytes=(weights.bytes or 0) * (size - min(towers, excess)) // size)


def _has_own_layers(case: Case) -> bool:
    """Whether every device has layers of its own, with a budget of their own."""
    return bool(case.engine.bounds) and case.engine_class.has_device_budgets


def _budget_of_devices(case: Case, weights: DeviceWeights, tables: bool) -> Budget | str:
    """The budgets of devices with layers of their own. `weights` are those of all layers together."""
    question, workload = case.question, case.workload
    rows = case.engine.divide_rows(case.spec, case.devices.gpu, workload.layout.pipeline_parallel_size)
    if isinstance(rows, str):
        return rows
    of, bounds = (case.model, case.spec, question.dtype, workload.model_dtype), case.engine.bounds
    sizes = stage_sizes(*of, bounds, tables) if rows is None else row_sizes(*of, rows, len(bounds), tables)
    if isinstance(sizes, str):
        return sizes

    tokens, sequences = workload.context_tokens, workload.batch_size
    devices = tuple(
        _limited(_divide(device, weights._replace(bytes=size), tokens, sequences))
        for device, size in zip(case.of_devices(), sizes)
    )
    return min(devices, key=Budget.free_bytes)._replace(devices=devices)


def _shares_memory(case: Case) -> bool:
    """Whether the device has the host's memory, as devices with LPDDR memory do."""
    return (case.devices.gpu.memory_type or "").startswith("LPDDR")


def _divide(
    case: Case, weights: DeviceWeights, tokens: int, sequences: int, towers: LoadedTowers | None = None
) -> Budget:  # fmt: skip
    """The budget at a context and a batch, before `_limited`. The weights must be known."""
    spec, workload, settings, gpu = case.spec, case.workload, case.settings, case.devices.gpu
    if weights.bytes is None or weights.width is None:
        raise ValueError("a budget needs the bytes of the weights")
    given = case.question.kv_memory_bytes
    if given is not None:
        left = gpu.memory_bytes - weights.bytes
        if given > left:
            left_size = format_size(max(left, 0), capacity=True)
            raise LayoutError(f"--kv-memory {format_size(given)}: only {left_size} is left after the weights")
        reserve = Reserve([Held(RESERVE, "not used for the cache (--kv-memory)", left - given)], {})
        return Budget(case, weights, with_unknown(reserve, weights, towers), given, given, towers=towers)
    question = ReserveInputs(
        memory_bytes=gpu.memory_bytes,
        width=weights.width,
        # Whole copies exchange nothing, so each is like a server of its own.
        layout=workload.layout.one_copy,
        context_tokens=tokens,
        batch_size=workload.layout.attention_batch(sequences),
        settings=settings,
        num_heads=spec.attention.num_heads,
        is_latent=spec.attention.is_latent,
        release=release_of(case.question.engine),
        is_apple=gpu.vendor == "Apple",
        is_amd=gpu.vendor == "AMD",
        device_class=gpu.device_class,
        model_type=spec.model_type,
        has_states=has_states(spec),
        spec=spec,
        has_fast_links=gpu.interconnect is not None,
        images=None if towers is None else towers.images,
        has_unknown_tower=towers is not None and towers.most_unknown_bytes > 0,
        has_sparse_latent=_has_sparse_latent(spec),
        shares_memory=_shares_memory(case),
        multimodal=case.model.multimodal,
        keeps_tokens=_keeps_tokens(spec),
        drafts_by=case.question.speculative and case.question.speculative.method,
    )
    reserve = with_unknown(reserve_of(case.engine, question), weights, towers)
    left = gpu.memory_bytes - weights.bytes - reserve.held_bytes()
    pool = int(left * reserve.share) if left > 0 else left
    offered = left if "free-gpu-memory-fraction" in settings else pool
    return Budget(case, weights, reserve, pool, offered, towers=towers)


def with_unknown(reserve: Reserve, weights: DeviceWeights, towers: LoadedTowers | None) -> Reserve:
    """The reserve with lines for weights of unknown size: no bytes are counted, and they may take some."""
    most = {
        "tower of unknown size": towers.most_unknown_bytes if towers is not None else 0,
        "modules that may stay in 16 bits": weights.most_more_bytes,
    }
    lines = [Held(RESERVE, name, 0, 0, size) for name, size in most.items() if size]
    return reserve._replace(held=[*reserve.held, *lines]) if lines else reserve


def weights_line(room: Budget) -> Held:
    """The model's own weights on the device. They have a range if a file's publisher chooses its tensors' types."""
    others = room.weights.draft_bytes + sum(size for _, size in room.weights.others)
    line = Held(WEIGHTS, "weights", (room.weights.bytes or 0) - others)
    file = room.case.spec.named_file
    if file is None or file.size_range is None:
        return line
    factor, low, high = file.size_range
    return line.within(low / factor, high / factor)


def _limited(room: Budget) -> Budget:
    """The budget with no more memory for the cache than the engine's own options allow."""
    case = room.case
    share = case.allocation.largest_stage(case.share, case.workload.kv_dtype, case.workload.context_tokens, 1)
    limit = case.engine.pool_limit(share, case.workload.kv_dtype)
    if limit is None or room.pool_bytes <= 0:
        return room
    if limit.bytes > room.pool_bytes:
        if not limit.is_exact:
            return room
        needed, left_size = format_size(limit.bytes), format_size(room.pool_bytes, capacity=True)
        raise LayoutError(f"--{limit.option}: its cache takes {needed}, and {left_size} is left for it", "give fewer")
    unused = room.pool_bytes - limit.bytes
    held = [*room.reserve.held, Held(RESERVE, f"not used for the cache (--{limit.option})", unused)]
    return room._replace(pool_bytes=limit.bytes, reserve=room.reserve._replace(held=held), unused_bytes=unused)


@remembered
def _has_sparse_latent(spec: ModelSpec) -> bool:
    """Whether the model has MLA whose keys an indexer chooses."""
    return spec.attention.is_latent and any(isinstance(cache, IndexerKeys) for cache in all_caches(spec))


@remembered
def _keeps_tokens(spec: ModelSpec) -> bool:
    """Whether the model has a cache of tokens. Encoders and models with states alone have none."""
    return not spec.is_encoder and any(not isinstance(cache, RecurrentState) for cache in all_caches(spec))


def free_range(room: Budget, free_bytes: int) -> tuple[int | None, int | None]:
    """The low and high end of the 80 % range of the free memory. None if no part has a range."""
    more = less = 0
    for part in (weights_line(room), *room.reserve.held):
        if part.low is not None and part.high is not None:
            more, less = more + part.high - part.bytes, less + part.bytes - part.low
    if room.unused_bytes:
        # What is left over grows and shrinks first.
        more, less = max(0, more - room.unused_bytes), 0
    return (free_bytes - more, free_bytes + less) if more or less else (None, None)
