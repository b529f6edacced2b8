"""The pieces of a run: the request, and the model's parts with their modules, caches and inputs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor

from kvcalc.attention.cache import TokenCache
from kvcalc.attention.latent import MultiHeadLatentAttention
from kvcalc.attention.recurrent import RecurrentMixer, StateCache, StateShape
from kvcalc.measure.devices.device import ALLOCATION_UNIT, allocated_by, storage_bytes
from kvcalc.measure.devices.distributed import ALONE, Group
from kvcalc.measure.devices.timing import Effort
from kvcalc.measure.layers.build import (
    TORCH_DTYPES,
    AttentionLayer,
    Layer,
    LayerCache,
    build_part,
    fill,
    make_cache,
    materialize,
    random_block,
)
from kvcalc.measure.layers.parts import Part, parts_of
from kvcalc.measure.layers.storage import Storage
from kvcalc.memory.dtypes import Dtype
from kvcalc.model.caches import CrossAttention, RecurrentState
from kvcalc.model.spec import ModelSpec
from kvcalc.records import NamedTuple

Report = Callable[[str, int, int], None]
"""Called with (name of the phase, parts done, total). See `kvcalc.measure.progress`."""


class Request(NamedTuple):
    """What to run: final context length, batch, timed steps, element type, device, seed, ranks and cache.

    `prefill` is one of `kvcalc.measure.prefill.KINDS`. If the sequences have different lengths, `lengths` has them, and
    `context_tokens` is the longest one.
    """

    context_tokens: int
    batch_size: int
    steps: int
    dtype: Dtype
    device: torch.device
    seed: int
    group: Group = ALONE
    storage: Storage = Storage()
    trace: str | None = None
    prefill: str = "sample"
    effort: Effort = Effort()
    lengths: tuple[int, ...] = ()

    @property
    def loads(self) -> list[tuple[int, int]]:
        """Every length of sequences, with their number."""
        return [*Counter(self.lengths).items()] if self.lengths else [(self.context_tokens, self.batch_size)]

    @property
    def total_tokens(self) -> int:
        """The tokens of all sequences."""
        return sum(tokens * number for tokens, number in self.loads)

    @property
    def torch_dtype(self) -> torch.dtype:
        return TORCH_DTYPES[self.dtype.name]


class Stack(NamedTuple):
    """The parts of a model with their modules, and their caches once these exist."""

    parts: list[Part]
    layers: list[Layer]
    caches: list[LayerCache]

    def attention(self) -> list[tuple[AttentionLayer, TokenCache]]:
        """The attention layers with their caches."""
        return [
            (layer, cache)
            for layer, cache in zip(self.layers, self.caches)
            if not isinstance(layer, RecurrentMixer) and isinstance(cache, TokenCache)
        ]

    def run(self, x: Tensor) -> Tensor:
        """One pass through the layers with residual connections. The caches grow by the tokens of `x`."""
        for layer, cache in zip(self.layers, self.caches):
            x = x + layer(x, cache)
        return x

    def clear(self) -> None:
        """Release the modules and their caches."""
        self.layers.clear()
        self.caches.clear()


def build(spec: ModelSpec, request: Request, report: Report) -> Stack:
    """Build the modules with weights on the device, without caches."""
    block = random_block(request.seed, request.device)
    parts, layers = parts_of(spec), []
    for number, part in enumerate(parts):
        report("weights", number, len(parts))
        made = build_part(part, spec.attention.hidden_size or 0, request.torch_dtype, torch.device("meta"))
        layer = materialize(made, request.device, block)
        if not isinstance(layer, RecurrentMixer):
            request.group.sum_outputs(layer)
            if isinstance(layer, MultiHeadLatentAttention):
                layer.expands = request.storage.mla == "expanded"
        layers.append(layer)
    return Stack(parts, layers, [])


def make_caches(stack: Stack, request: Request) -> tuple[int, int | None]:
    """Create the caches in `stack.caches`.

    Returns the number of bytes by which the device's allocator grew, and by which it should have grown: the bytes of
    all their tensors, block tables included, each rounded as the allocator does. None if its rounding is not known.
    """
    pairs = zip(stack.parts, stack.layers)
    made, allocator_bytes = allocated_by(request.device, lambda: [cache_of(*pair, request) for pair in pairs])
    stack.caches.extend(made)
    unit = ALLOCATION_UNIT.get(request.device.type)
    holders = [holder for cache in made for holder in (cache, *(cache.each() if isinstance(cache, TokenCache) else ()))]
    return allocator_bytes, None if unit is None else sum(-(-size // unit) * unit for size in storage_bytes(holders))


def cache_of(part: Part, layer: Layer, request: Request) -> LayerCache:
    """The cache of a part. An encoder's K and V exist from the start, with random values.

    An encoder's K and V and states are never paged or quantized.
    """
    dtype, device, batch_size = request.torch_dtype, request.device, request.batch_size
    if isinstance(part.cache, RecurrentState) and isinstance(part.shape, StateShape):
        named = (part.cache.conv_dtype, part.cache.state_dtype)
        conv, state = (TORCH_DTYPES[name] if name else dtype for name in named)
        return StateCache(batch_size, part.shape, conv, state, device)
    if isinstance(layer, RecurrentMixer):
        raise TypeError("a recurrent module without a state")
    if isinstance(part.cache, CrossAttention):
        tokens = part.cache.encoder_tokens or 0
        cache = TokenCache(batch_size, layer.cache_shapes(), tokens, None, dtype, device)
        for tensor in cache.tensors:
            fill(tensor, random_block(request.seed, device))
        cache.length = tokens
        return cache
    lengths = request.lengths or (request.context_tokens,) * batch_size
    return make_cache(layer, lengths, dtype, device, request.storage, request.seed)


def inputs(spec: ModelSpec, request: Request) -> Callable[[int], Tensor]:
    """A function that returns random hidden states (batch, n, hidden_size). The same seed gives the same states."""
    generator = torch.Generator().manual_seed(request.seed)
    width = spec.attention.hidden_size or 0

    def make(tokens: int) -> Tensor:
        states = torch.randn(request.batch_size, tokens, width, generator=generator)
        return states.to(request.device, request.torch_dtype)

    return make


def random_query(layer: AttentionLayer, request: Request) -> Tensor:
    """A random query for one token of each sequence, in the shape that `attend` takes."""
    generator = torch.Generator().manual_seed(request.seed)
    shape = layer.core_query_shape(request.batch_size)
    return torch.randn(shape, generator=generator).to(request.device, request.torch_dtype)
