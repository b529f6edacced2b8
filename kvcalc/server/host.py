"""The part of a case in host memory (`kvcalc.engines.placement`): its bytes, the limits that it sets, and its speed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcalc.engines.placement import (
    DEFAULT_HOST_BANDWIDTH,
    Divided,
    Placement,
    count_placed_layers,
    divide_file,
    divide_model,
    expert_layers,
)
from kvcalc.memory import kv_cache
from kvcalc.model.spec import ModelSpec, period
from kvcalc.records import NamedTuple
from kvcalc.server.case import Case
from kvcalc.server.device_weights import part_bytes
from kvcalc.units import format_size

if TYPE_CHECKING:
    import kvcalc.documents as documents
    from kvcalc.throughput.roofline import SpeedModel
    from kvcalc.throughput.speed import StoredWeights


class Host(NamedTuple):
    """The host's share of a case: its weights in bytes, and the cache of the layers there."""

    case: Case
    placement: Placement
    weights_bytes: int

    def kv_bytes(self, tokens: int, sequences: int) -> int:
        """The bytes of the cache in host memory."""
        return self.case.allocation.host_bytes(self.case.share, self.case.workload.kv_dtype, tokens, sequences)

    def free_bytes(self) -> int | None:
        """The free host memory. It may be negative. None if the memory is not known."""
        memory, workload = self.placement.host_memory_bytes, self.case.workload
        if memory is None:
            return None
        return memory - self.weights_bytes - self.kv_bytes(workload.context_tokens, workload.batch_size)

    def fits(self, tokens: int, sequences: int) -> bool:
        """Whether the host's part fits at this context and batch."""
        room = self._room()
        return room is None or self.kv_bytes(tokens, sequences) <= room

    def longest_context(self) -> int | None:
        """The longest context that fits in host memory. None if the host sets no limit."""
        room, batch = self._room(), self.case.workload.batch_size
        if room is None:
            return None
        return kv_cache.longest_context(lambda tokens: self.kv_bytes(tokens, batch), room, period(self.case.spec))

    def largest_batch(self, tokens: int) -> int | None:
        """The most sequences of `tokens` tokens that fit in host memory. None if the host sets no limit."""
        room = self._room()
        if room is None or (room >= 0 and not self.kv_bytes(tokens, 1)):
            return None
        too_many = 1
        while self.kv_bytes(tokens, too_many) <= room:
            too_many *= 2
        return kv_cache.most_that_fit(lambda sequences: self.kv_bytes(tokens, sequences), room, too_many)

    def _room(self) -> int | None:
        memory = self.placement.host_memory_bytes
        return None if memory is None else memory - self.weights_bytes

    def describe(self) -> documents.HostShare:
        """The `host` part of `fit`."""
        workload, spec, placement = self.case.workload, self.case.spec, self.placement
        total = count_placed_layers(spec)
        kv_bytes = self.kv_bytes(workload.context_tokens, workload.batch_size)
        layers = min(placement.first_on_device(total), total)
        most = max(expert_layers(spec), default=-1) + 1
        return {
            "n_gpu_layers": total + 1 if placement.gpu_layers is None else min(placement.gpu_layers, total + 1),
            "host_layers": layers,
            "n_cpu_moe": most if placement.expert_layers is None else min(placement.expert_layers, most),
            "kv_offload": placement.kv_offload,
            "weights_bytes": self.weights_bytes,
            "kv_cache_bytes": kv_bytes,
            "host_bytes": self.weights_bytes + kv_bytes,
            "memory_bytes": placement.host_memory_bytes,
            "host_free_bytes": self.free_bytes(),
        }

    def shortage(self) -> str | None:
        """Why the host's part does not fit, or None."""
        free, memory = self.free_bytes(), self.placement.host_memory_bytes
        if free is None or memory is None or free >= 0:
            return None
        memory_size, needed = format_size(memory, capacity=True), format_size(memory - free)
        return f"the host needs {needed} for its part of the model, but has only {memory_size}"


def divide_bytes(case: Case, placement: Placement) -> Divided | str:
    """The bytes of the weights on the device and in host memory, or the reason if they are not known."""
    model, spec, dtype = case.model, case.spec, case.question.dtype
    if spec.gguf is not None and dtype is None:
        parts = spec.gguf.weights.parts if spec.gguf.weights is not None else None
        if parts is None or spec.attention != model.attention:
            return "the file does not say which weights belong to which layer"
        return divide_file(parts, placement)
    if spec.gguf is not None:
        return "with --dtype, the weights of a GGUF file cannot be divided between the device and the host"
    divided = divide_model(spec, placement)
    sizes = None if divided is None else part_bytes(model, spec, dtype, case.workload.model_dtype, divided)
    return "the bytes of the weights are not known" if sizes is None else Divided(*sizes)


def hosted(case: Case, placement: Placement, stored: StoredWeights, whole: SpeedModel) -> SpeedModel:
    """The speed of a model with a part in host memory. `whole` is its speed if all of it is on the device."""
    from kvcalc.throughput.counts import HostPart, count
    from kvcalc.throughput.host import HostedModel

    spec, kv_dtype = case.spec, case.workload.kv_dtype
    engine = case.engine
    divided = divide_model(spec, placement)
    if divided is None:
        raise ValueError("the speed of a placed model needs its weights")
    host_cache, device_cache = engine.divide_cache(spec)
    on_device, on_host = divided
    how = (whole.layout, stored.linear, stored.scheme)
    device = count(device_cache, on_device, stored.base, engine.reads(device_cache, kv_dtype), *how)
    host = count(host_cache, on_host, stored.base, engine.reads(host_cache, kv_dtype), *how)
    total = count_placed_layers(spec)
    if not placement.first_on_device(total) and not host.experts and placement.kv_offload:
        return whole  # the host only looks up the input embedding
    first = min(placement.first_on_device(total), spec.num_layers)
    device = device._replace(num_layers=spec.num_layers - first)
    part = HostPart(
        host,
        _count_switches(spec, placement, first),
        float(placement.host_bandwidth or DEFAULT_HOST_BANDWIDTH),
        placement.host_bandwidth is None,
        engine.micro_batch_tokens,
    )
    return HostedModel(whole, device, part)


def _count_switches(spec: ModelSpec, placement: Placement, first: int) -> int:
    """The changes between the host and the device in one step: before the device's layers and after them, and around
    every group of experts, or every attention, that is in host memory although its layer is not."""
    switches = 1 if first <= spec.num_layers and placement.has_output_on_device() else 0
    experts = expert_layers(spec)
    for number in range(first, spec.num_layers):
        switches += 2 * (number in experts and placement.keeps_experts(number))
        switches += 0 if placement.kv_offload else 2
    return switches
