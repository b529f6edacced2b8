"""Run a prompt through the layers, in chunks, and time it: a short one apart, or the whole one into the caches.

Neither bytes nor times of a decode step depend on the numbers in a cache, so by default the caches are filled with
random rows (`kvcalc.measure.layers.fill`), and prefill is timed on its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kvcalc.attention.latent import HeadProduct
from kvcalc.measure.devices.faults import check_finite
from kvcalc.measure.devices.timing import time_call
from kvcalc.measure.layers.build import Layer
from kvcalc.measure.layers.fill import fill_caches
from kvcalc.measure.layers.parts import Part
from kvcalc.measure.layers.stack import Report, Request, Stack, cache_of
from kvcalc.measure.sizes.budget import chunk_tokens, prompt_of
from kvcalc.model.mixers.attention import AttentionShape
from kvcalc.model.spec import ModelSpec

if TYPE_CHECKING:
    import kvcalc.documents as documents

KINDS = ("sample", "full")

# The tokens on which projections are tried in fp32: enough that widening the weights is the smaller part.
_TRIED_TOKENS = 256


def prefill(stack: Stack, spec: ModelSpec, request: Request, progress: Report) -> documents.RunPrefill:
    """Fill the caches with all tokens except those of the timed steps, and time a prefill.

    `sample`: the caches get random rows. One prompt of one sequence, which is as long as the context or
    MOST_PROMPT_TOKENS, is timed with caches of its own. `full`: the whole prompt runs, for every sequence.

    Returns the `prefill` part of a run, without its share of the matmul roof: tokens per second, and the FLOP of the
    work. Projections take 2 FLOP per weight and token. Attention takes 2 x (k + v widths) for every head and every pair
    of a token and a token it attends to. The FLOP of a recurrence are not counted.
    """
    prompt = prompt_of(request)
    tokens, chunk = prompt.context_tokens, min(chunk_tokens(spec, request), prompt.context_tokens)
    # The prompt takes the first random numbers, so that rows of the cache are not those of a query, whose stream begins
    # with the same seed.
    torch.manual_seed(request.seed)
    states = partial(_random_states, spec.attention.hidden_size or 0, prompt)
    with fast_projections(stack.layers, states(min(chunk, _TRIED_TOKENS))):
        run = _run_apart if request.prefill == "sample" else _run_into_caches
        seconds = run(stack, states, prompt, chunk, progress)
    if request.prefill == "sample":
        fill_caches(stack, request, progress)
    hidden, flop = spec.attention.hidden_size or 0, 0
    for part in stack.parts:
        flop += 2 * part.used_parameters(hidden) * tokens
        if isinstance(part.shape, AttentionShape):
            flop += 2 * part.shape.num_heads * (part.shape.qk_head_dim + part.shape.v_head_dim) * _pairs(tokens, part)
    return {
        "kind": cast(Any, request.prefill),
        "batch_size": prompt.batch_size,
        "tokens": tokens,
        "chunk_tokens": chunk,
        "seconds": seconds,
        "tokens_per_second": prompt.batch_size * tokens / seconds,
        "flop": prompt.batch_size * flop,
        "flop_per_second": prompt.batch_size * flop / seconds,
    }


def _random_states(hidden_size: int, prompt: Request, tokens: int) -> Tensor:
    """Random hidden states of `tokens` tokens of each sequence."""
    shape = (prompt.batch_size, tokens, hidden_size)
    return torch.empty(shape, dtype=prompt.torch_dtype, device=prompt.device).normal_()


def _run_into_caches(
    stack: Stack, states: Callable[[int], Tensor], prompt: Request, chunk: int, progress: Report
) -> float:
    """Run the prompt into the stack's own caches. Returns the seconds of the layers."""
    seconds, tokens = 0.0, prompt.context_tokens
    for done in range(0, tokens, chunk):
        progress("prefill", done, tokens)
        x = states(min(chunk, tokens - done))
        seconds += time_call(prompt.device, partial(stack.run, x))
    progress("prefill", tokens, tokens)
    return seconds


def _run_apart(stack: Stack, states: Callable[[int], Tensor], prompt: Request, chunk: int, progress: Report) -> float:
    """Run the prompt layer by layer, so that only one layer has a cache for it. Returns the seconds of the layers."""
    seconds, tokens = 0.0, prompt.context_tokens
    pieces = [states(min(chunk, tokens - done)) for done in range(0, tokens, chunk)]
    for number, (part, layer) in enumerate(zip(stack.parts, stack.layers)):
        progress("prefill", number, len(stack.layers))
        if prompt.device.type == "cuda" and not number:
            # Libraries initialise on their first call.
            _run_layer(layer, [piece.clone() for piece in pieces], cache_of(part, layer, prompt))
        seconds += time_call(prompt.device, partial(_run_layer, layer, pieces, cache_of(part, layer, prompt)))
    check_finite(pieces[-1], "prefill")
    progress("prefill", len(stack.layers), len(stack.layers))
    return seconds


def _run_layer(layer: Layer, pieces: list[Tensor], cache: Any) -> None:
    """Replace each piece of the prompt by the sum of itself and the layer's output."""
    for number, x in enumerate(pieces):
        pieces[number] = x + layer(x, cache)


def _pairs(tokens: int, part: Part) -> int:
    """The number of pairs (token, token it attends to) in a prompt."""
    if part.is_cross:
        return tokens * (getattr(part.cache, "encoder_tokens", None) or 0)
    seen = min(tokens, part.window or tokens)
    return seen * (seen + 1) // 2 + (tokens - seen) * seen


@contextmanager
def fast_projections(layers: Sequence[Layer], sample: Tensor) -> Iterator[None]:
    """Run projections in fp32 inside the block if that is faster on `sample`.

    CPUs that emulate 16-bit matrix products are 2 to 6 times slower with them. Weights, results and caches keep their
    dtype.
    """
    modules = [module for layer in layers for module in layer.modules()]
    forwards: dict[nn.Module, Callable[..., Tensor]] = {}
    if sample.device.type == "cpu" and sample.dtype != torch.float32:
        linears = [module for module in modules if isinstance(module, nn.Linear)]
        first = max((m for m in linears if m.in_features == sample.shape[-1]), key=lambda m: m.out_features)
        calls = partial(first, sample), partial(_widened, first, sample)
        native, widened = (min(time_call(sample.device, call) for _ in range(2)) for call in calls)
        if widened < native:
            forwards = {linear: partial(_widened, linear) for linear in linears}
            forwards |= {module: _widened_product for module in modules if isinstance(module, HeadProduct)}
    for module, forward in forwards.items():
        module.forward = forward
    try:
        yield
    finally:
        for module in forwards:
            del module.forward


def _widened(linear: nn.Linear, x: Tensor) -> Tensor:
    bias = None if linear.bias is None else linear.bias.float()
    return F.linear(x.float(), linear.weight.float(), bias).to(x.dtype)


def _widened_product(x: Tensor, weight: Tensor) -> Tensor:
    return (x.float() @ weight.float()).to(x.dtype)
