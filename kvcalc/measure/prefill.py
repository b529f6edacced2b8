"""Fill the caches with the prompt, in chunks, and quickly: prefill is not what is timed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kvcalc.attention.cache import TokenCache
from kvcalc.attention.latent import HeadProduct
from kvcalc.measure.build import AttentionLayer
from kvcalc.measure.timing import time_call

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how many tokens or steps are done, and of how many."""


def prefill(
    layers: list[AttentionLayer], caches: list[TokenCache], hidden_states: Callable[[int], Tensor], tokens: int,
    chunk: int, progress: Progress,
) -> None:  # fmt: skip
    """Run `tokens` prompt tokens, at least one, through the layers, `chunk` at a time.

    `hidden_states(n)` makes the inputs of n tokens.
    """
    with fast_projections(layers, hidden_states(chunk)):
        for done in range(0, tokens, chunk):
            progress("prefill", done, tokens)
            run_layers(layers, caches, hidden_states(min(chunk, tokens - done)))
    progress("prefill", tokens, tokens)


def run_layers(layers: list[AttentionLayer], caches: list[TokenCache], x: Tensor) -> Tensor:
    """One pass through the attention layers with their residual connections; the caches grow by the tokens of `x`."""
    for layer, cache in zip(layers, caches):
        x = x + layer(x, cache)
    return x


@contextmanager
def fast_projections(layers: list[AttentionLayer], sample: Tensor) -> Iterator[None]:
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
