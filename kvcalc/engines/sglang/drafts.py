"""The states that SGLang keeps while drafted tokens are checked, besides those of the cache.

A slot of a running request has a state for every token that a step checks, so that a rejected token can be undone, and
the convolution's inputs of all of them. There is one slot for each request that may run, and a spare one.
Source: MambaPool (mem_cache/memory_pool.py: intermediate_ssm_state_cache, intermediate_conv_window_cache) and
_build_hybrid_req_pool (mem_cache/kv_cache_configurator.py: mamba_spec_state_size), SGLang 0.5.23.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvcalc.engines.sglang.layers import STATE, Layer, layers_of
from kvcalc.memory.dtypes import DTYPES, Dtype, bytes_of
from kvcalc.memory.sharding import whole_of
from kvcalc.model.caches import RecurrentState
from kvcalc.model.memo import remembered
from kvcalc.model.spec import ModelSpec
from kvcalc.records import NamedTuple

# KDA keeps the inputs of every token apart (KimiLinearStateShape.disable_conv_window_dedup, configs/mamba_utils.py).
_SEPARATE_INPUTS = ("kimi_linear",)


class DraftSlot(NamedTuple):
    """The bytes of one slot in all layers: the states, and the convolutions' inputs."""

    states: int
    inputs: int


NO_SLOT = DraftSlot(0, 0)


@remembered
def draft_slot(share: ModelSpec, dtype: Dtype, checked_tokens: int | None, branches: int) -> DraftSlot:
    """The slot of a request whose step checks `checked_tokens` tokens, in trees of `branches` branches (1: a chain)."""
    if checked_tokens is None:
        return NO_SLOT
    separate = branches > 1 or whole_of(share).model_type in _SEPARATE_INPUTS
    return slot_of(layers_of(share, dtype), checked_tokens, separate)


def slot_of(layers: Iterable[Layer], checked_tokens: int, separate: bool) -> DraftSlot:
    """The slot in all `layers` with states. `separate`: the inputs of every token are kept apart."""
    slots = [_layer_slot(layer, checked_tokens, separate) for layer in layers if layer.pool == STATE]
    return DraftSlot(sum(slot.states for slot in slots), sum(slot.inputs for slot in slots))


def _layer_slot(layer: Layer, checked_tokens: int, separate: bool) -> DraftSlot:
    """The slot in all layers with this state.

    The inputs of successive tokens overlap and are kept once: a window of `conv_kernel` - 1 inputs moves by one input
    per token. Trees keep a window for each token.
    """
    state = layer.cache
    if not isinstance(state, RecurrentState):
        raise TypeError(f"{state.kind} is not a state")
    width = state.conv_kernel - 1
    column = layer.num_layers * bytes_of(state.conv_channels, DTYPES["bf16"])
    columns = checked_tokens * width if separate else checked_tokens + width - 1
    return DraftSlot(
        checked_tokens * (layer.num_layers * layer.bytes - width * column), columns * column if width else 0
    )
