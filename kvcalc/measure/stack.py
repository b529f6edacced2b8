"""What a run is made of: the request, and the model's parts with their modules, caches and inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from kvcalc.attention.cache import TokenCache
from kvcalc.attention.latent import MultiHeadLatentAttention
from kvcalc.attention.recurrent import RecurrentMixer
from kvcalc.measure.build import (
    TORCH_DTYPES,
    AttentionLayer,
    Layer,
    LayerCache,
    build_part,
    make_part_cache,
    materialize,
    random_block,
)
from kvcalc.measure.device import allocated_by
from kvcalc.measure.distributed import ALONE, Group
from kvcalc.measure.parts import Part, parts_of
from kvcalc.measure.prefill import Progress
from kvcalc.measure.storage import Storage
from kvcalc.measure.timing import Effort
from kvcalc.memory.dtypes import Dtype
from kvcalc.model.spec import ModelSpec


class Request(NamedTuple):
    """What to run: final context length N, batch, K timed steps, element type, seed, device, ranks, cache."""

    context_tokens: int
    batch_size: int
    steps: int
    dtype: Dtype
    device: torch.device
    seed: int
    group: Group = ALONE
    storage: Storage = Storage()
    profile: str | None = None
    effort: Effort = Effort()

    @property
    def torch_dtype(self) -> torch.dtype:
        return TORCH_DTYPES[self.dtype.name]


class Stack(NamedTuple):
    """The parts of a model with their modules, and their caches once they are made."""

    parts: list[Part]
    layers: list[Layer]
    caches: list[LayerCache]

    def attention(self) -> list[tuple[AttentionLayer, TokenCache]]:
        """The layers of attention with their caches."""
        return [
            (layer, cache)
            for layer, cache in zip(self.layers, self.caches)
            if not isinstance(layer, RecurrentMixer) and isinstance(cache, TokenCache)
        ]

    def clear(self) -> None:
        """Let go of the modules and their caches."""
        self.layers.clear()
        self.caches.clear()


def build(spec: ModelSpec, request: Request, report: Progress) -> Stack:
    """The modules, with weights on the device and no caches yet."""
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


def make_caches(stack: Stack, request: Request) -> int:
    """Fill `stack.caches`; returns by how many bytes the device's allocator grew."""
    tokens = request.context_tokens
    made, allocator_bytes = allocated_by(
        request.device,
        lambda: [
            make_part_cache(
                part, layer, request.batch_size, tokens, request.torch_dtype, request.device, request.storage,
                request.seed,
            )
            for part, layer in zip(stack.parts, stack.layers)
        ],
    )  # fmt: skip
    stack.caches.extend(made)
    return allocator_bytes


def inputs(spec: ModelSpec, request: Request) -> Callable[[int], Tensor]:
    """A source of random hidden states (batch, n, hidden_size), the same for the same seed."""
    generator = torch.Generator().manual_seed(request.seed)
    width = spec.attention.hidden_size or 0

    def make(tokens: int) -> Tensor:
        states = torch.randn(request.batch_size, tokens, width, generator=generator)
        return states.to(request.device, request.torch_dtype)

    return make


def random_query(layer: AttentionLayer, request: Request) -> Tensor:
    """One token's query of each sequence, as `attend` takes it."""
    generator = torch.Generator().manual_seed(request.seed)
    shape = layer.core_query_shape(request.batch_size)
    return torch.randn(shape, generator=generator).to(request.device, request.torch_dtype)
