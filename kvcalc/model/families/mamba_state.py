"""The states of Mamba and Mamba-2 mixers, whatever model they stand in."""

from __future__ import annotations

from kvcalc.errors import ModelError
from kvcalc.model.caches import RecurrentState
from kvcalc.model.reader import ConfigReader


def mamba_state(inner: int, state_size: int, conv_kernel: int) -> RecurrentState:
    """Mamba: a convolution over the inner width, and a state of inner x state_size, in fp32.

    Source: Mamba's paper, algorithm 2; MambaMixer and JambaMambaMixer, Transformers 5.23.0.
    """
    return RecurrentState(inner, conv_kernel, inner * state_size)


def mamba2_state(inner: int, heads: int, groups: int, state_size: int, conv_kernel: int) -> RecurrentState:
    """Mamba-2: a convolution over the inner width and both its group matrices, and heads x head_dim x state_size.

    Source: Mamba2Mixer and BambaMixer, Transformers 5.23.0.
    """
    shared = 2 * groups * state_size
    return RecurrentState(
        inner + shared, conv_kernel, inner * state_size, num_heads=heads, num_groups=groups, group_channels=shared
    )


def mamba2_inner(config: ConfigReader, inner: int, heads_key: str, head_dim_key: str) -> int:
    """`inner`, refused where it is not heads x head_dim; a head_dim of "auto" or none is what makes it so."""
    heads = config.integer(heads_key)
    stated = config.config.get(head_dim_key)
    head_dim = inner // heads if stated in (None, "auto") else config.integer(head_dim_key)
    if heads * head_dim != inner:
        raise ModelError(
            f"{config.name}: {heads_key} {heads} x {head_dim_key} {head_dim} is not the inner width {inner}"
        )
    return inner


def expanded(config: ConfigReader, key: str) -> int:
    """The inner width, hidden_size times the factor under `key`, which must come out whole."""
    inner = config.number(key, default=2.0) * config.integer("hidden_size")
    if inner != int(inner):
        raise ModelError(f"{config.name}: {key} x hidden_size is {inner}: must be whole")
    return int(inner)
