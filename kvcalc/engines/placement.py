"""Which parts of a model are in host memory, and how this divides its weights.

The rules are llama.cpp's (`kvcalc.engines.llama_cpp.placement`), the only engine that places parts there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from kvcalc.model.memo import remembered
from kvcalc.model.spec import FileBytes, ModelSpec, blocks_of, weights_of
from kvcalc.model.tensors import EMBEDDING, LOOKUP, Block, ModelWeights, Weight
from kvcalc.records import NamedTuple

# The theoretical rate of two channels of DDR5-5600: 2 x 8 bytes x 5600 MT/s. Intel states it as the maximum memory
# bandwidth of the Core i9-13900K and i9-14900K.
DEFAULT_HOST_BANDWIDTH = 89_600_000_000


class PlacementOptions(NamedTuple):
    """The options for the layers on the device, for the layers whose experts are in host memory, and for all experts.

    The value `auto` of the first one means as many layers as fit.
    """

    layers: str
    experts: str
    all_experts: str

    def is_auto(self, settings: Mapping[str, str]) -> bool:
        return settings.get(self.layers) == "auto"


class Placement(NamedTuple):
    """Where the parts of a model are.

    `gpu_layers` is the number given to -ngl: the output and the last layers. None is all of them. `expert_layers` is
    the number of leading layers whose experts are in host memory; None is every layer. `kv_offload` is whether the
    cache of a layer on the device is on the device too. `host_memory_bytes` is None if it is not given, and then there
    is no limit. `host_bandwidth` is in bytes per second; None is the default.
    """

    gpu_layers: int | None = None
    expert_layers: int | None = 0
    kv_offload: bool = True
    host_memory_bytes: int | None = None
    host_bandwidth: int | None = None

    def first_on_device(self, num_layers: int) -> int:
        """The number of the first layer on the device: `num_layers` if there is none, and one more if the output is in
        host memory too."""
        return 0 if self.gpu_layers is None else max(num_layers + 1 - self.gpu_layers, 0)

    def is_on_device(self, num_layers: int) -> bool:
        """Whether nothing but the input embedding is in host memory."""
        return not self.first_on_device(num_layers) and self.expert_layers == 0 and self.kv_offload

    def has_output_on_device(self) -> bool:
        return self.gpu_layers != 0

    def keeps_experts(self, layer: int) -> bool:
        """Whether the experts of this layer stay in host memory even if the layer is on the device."""
        return self.expert_layers is None or layer < self.expert_layers


class Divided(NamedTuple):
    """Something on the device, and the rest in host memory."""

    device: int
    host: int


def count_placed_layers(spec: ModelSpec) -> int:
    """The layers that -ngl counts. A GGUF file may have more than the model: those for multi-token prediction."""
    weights = None if spec.gguf is None else spec.gguf.weights
    return spec.num_layers if weights is None or weights.parts is None else len(weights.parts.layers)


def divide_weights(weights: ModelWeights, num_layers: int, placement: Placement) -> tuple[ModelWeights, ModelWeights]:
    """The weights on the device, and those in host memory.

    The input embedding is in host memory. A tied one is also on the device if the output is there, so it counts twice.
    """
    first, has_output = placement.first_on_device(num_layers), placement.has_output_on_device()
    device: list[Block] = []
    host: list[Block] = []
    for block in weights.blocks:
        if not block.in_layers:
            _add(device if has_output else host, block, block.numbers, [w for w in block.weights if not _is_table(w)])
            _add(host, block, block.numbers, [w for w in block.weights if _is_table(w)])
            continue
        on_host = [number for number in block.numbers if number < first]
        kept = [number for number in block.numbers if number >= first and placement.keeps_experts(number)]
        whole = [number for number in block.numbers if number >= first and not placement.keeps_experts(number)]
        _add(host, block, on_host, block.weights)
        _add(host, block, kept, [weight for weight in block.weights if _is_routed(weight)])
        _add(device, block, kept, [weight for weight in block.weights if not _is_routed(weight)])
        _add(device, block, whole, block.weights)
    none = weights.embedding._replace(rows=0)
    has_copy = weights.tied and has_output
    return (
        ModelWeights(weights.embedding if has_copy else none, has_copy, tuple(device)),
        ModelWeights(weights.embedding, weights.tied and not has_output, tuple(host)),
    )


def without_tables(weights: ModelWeights, has_output: bool) -> ModelWeights:
    """The weights on the device if all layers are there. Only with the output, a tied embedding has a copy there."""
    part = ModelWeights(weights.embedding, weights.tied and has_output, weights.blocks)
    return divide_weights(part, 0, Placement())[0]


def divide_file(parts: FileBytes, placement: Placement) -> Divided:
    """The bytes of a GGUF file on the device and in host memory. Layers for multi-token prediction count as layers."""
    first, device = placement.first_on_device(len(parts.layers)), 0
    for number, (other, routed) in enumerate(parts.layers):
        if number >= first:
            device += other + (0 if placement.keeps_experts(number) else routed)
    host = sum(map(sum, parts.layers)) - device + parts.input
    if placement.has_output_on_device():
        return Divided(device + parts.output + parts.tied_head, host)
    return Divided(device, host + parts.output)


@remembered
def divide_model(spec: ModelSpec, placement: Placement) -> tuple[ModelWeights, ModelWeights] | None:
    """`divide_weights` for the weights of a model, or None if they are not counted."""
    weights = weights_of(spec)
    return None if weights is None else divide_weights(weights, count_placed_layers(spec), placement)


@remembered
def expert_layers(spec: ModelSpec) -> frozenset[int]:
    """The numbers of the layers with routed experts."""
    return frozenset(
        number for block in blocks_of(spec) if any(map(_is_routed, block.weights)) for number in block.numbers
    )


def _add(blocks: list[Block], block: Block, numbers: Sequence[int], weights: Iterable[Weight]) -> None:
    kept = tuple(weights)
    if numbers and kept:
        blocks.append(Block(block.prefix, numbers, kept))


def _is_routed(weight: Weight) -> bool:
    return weight.copies > 1


def _is_table(weight: Weight) -> bool:
    return weight.role in (EMBEDDING, LOOKUP)
