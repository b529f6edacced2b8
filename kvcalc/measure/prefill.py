"""Fill the caches with the prompt, in chunks, and time it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kvcalc.attention.latent import HeadProduct
from kvcalc.measure.build import Layer, LayerCache
from kvcalc.measure.parts import Part
from kvcalc.measure.timing import time_call
from kvcalc.model.mixers.attention import AttentionShape
from kvcalc.model.spec import ModelSpec

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how many tokens or steps are done, and of how many."""


class Filled(NamedTuple):
    """How a prompt was run: tokens of each sequence, chunk size, and seconds of all chunks together."""

    tokens: int
    chunk: int
    seconds: float


def prefill(
    layers: Sequence[Layer], caches: Sequence[LayerCache], hidden_states: Callable[[int], Tensor], tokens: int,
    chunk: int, progress: Progress, device: torch.device,
) -> Filled:  # fmt: skip
    """Run `tokens` prompt tokens, at least one, through the layers, `chunk` at a time.

    `hidden_states(n)` makes the inputs of n tokens; making them is not timed.
    """
    seconds = 0.0
    with fast_projections(layers, hidden_states(chunk)):
        for done in range(0, tokens, chunk):
            progress("prefill", done, tokens)
            x = hidden_states(min(chunk, tokens - done))
            seconds += time_call(device, partial(run_layers, layers, caches, x))
    progress("prefill", tokens, tokens)
    return Filled(tokens, chunk, seconds)


def describe_prefill(parts: Sequence[Part], spec: ModelSpec, batch: int, filled: Filled) -> dict[str, Any]:
    """The `prefill` part of a run, but for its share of the matmul roof: tokens per second, and the FLOP of the work.

    Projections take 2 FLOP a weight and token; attention 2 x (k + v widths) for every head and every pair of a token
    with one it may see. A recurrence's own FLOP are not counted.
    """
    hidden, flop = spec.attention.hidden_size or 0, 0
    for part in parts:
        flop += 2 * part.parameters(hidden) * filled.tokens
        if isinstance(part.shape, AttentionShape):
            pairs = _pairs(filled.tokens, part)
            flop += 2 * part.shape.num_heads * (part.shape.qk_head_dim + part.shape.v_head_dim) * pairs
    return {
        "tokens": filled.tokens,
        "chunk_tokens": filled.chunk,
        "seconds": filled.seconds,
        "tokens_per_second": batch * filled.tokens / filled.seconds,
        "flop": batch * flop,
        "flop_per_second": batch * flop / filled.seconds,
    }


def _pairs(tokens: int, part: Part) -> int:
    """How many (token, token it may see) there are in a prompt."""
    if part.is_cross:
        return tokens * (getattr(part.cache, "encoder_tokens", None) or 0)
    seen = min(tokens, part.window or tokens)
    return seen * (seen + 1) // 2 + (tokens - seen) * seen


def run_layers(layers: Sequence[Layer], caches: Sequence[LayerCache], x: Tensor) -> Tensor:
    """One pass through the attention layers with their residual connections; the caches grow by the tokens of `x`."""
    for layer, cache in zip(layers, caches):
        x = x + layer(x, cache)
    return x


@contextmanager
def fast_projections(layers: Sequence[Layer], sample: Tensor) -> Iterator[None]:
    """Within the block, projections run in fp32 where that is faster on `sample`, as they do on CPUs whose 16-bit
    matrix products are emulated (2 to 6 times slower there). Weights, results and caches keep their dtype."""
    modules = [module for layer in layers for module in layer.modules()]
    linears = [module for module in modules if isinstance(module, nn.Linear)]
    if sample.device.type != "cpu" or sample.dtype == torch.float32:
        yield
        return
    first = max((m for m in linears if m.in_features == sample.shape[-1]), key=lambda m: m.out_features)
    native, widened = (
        [time_call(sample.device, c) for _ in range(2)]
        for c in (partial(first, sample), partial(_widened, first, sample))
    )
    if min(native) <= min(widened):
        yield
        return
    products = [module for module in modules if isinstance(module, HeadProduct)]
    for linear in linears:
        linear.forward = partial(_widened, linear)  # type: ignore[method-assign]
    for product in products:
        product.forward = _widened_product  # type: ignore[method-assign]
    try:
        yield
    finally:
        for module in (*linears, *products):
            del module.forward


def _widened(linear: nn.Linear, x: Tensor) -> Tensor:
    bias = None if linear.bias is None else linear.bias.float()
    return F.linear(x.float(), linear.weight.float(), bias).to(x.dtype)


def _widened_product(x: Tensor, weight: Tensor) -> Tensor:
    return (x.float() @ weight.float()).to(x.dtype)
