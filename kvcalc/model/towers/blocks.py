"""The layers that towers are made of, as counts of parameters."""

from __future__ import annotations

from kvcalc.model.reader import ConfigReader

Counted = tuple[int, int]
"""Parameters that tensor parallelism splits, and parameters that every rank holds."""


def added(*parts: Counted) -> Counted:
    """The sum of several parts."""
    return sum(split for split, _ in parts), sum(whole for _, whole in parts)


def layers(
    number: int, width: int, inner: int, *, matrices: int = 2, biases: int = 0, norms: int = 0, heads: int = 0,
    kv: int = 0,
) -> Counted:  # fmt: skip
    """`number` layers of attention and an MLP of `matrices` matrices (3 with a gate).

    `heads` and `kv` are the widths of the queries and of the keys, `width` if 0. `biases` and `norms` are the elements
    of one layer; every rank holds them, which is exact for the norms and close for the few biases.
    """
    attention = 2 * width * (heads or width) + 2 * width * (kv or heads or width)
    return number * (attention + matrices * width * inner), number * (biases + norms)


def projection(inputs: int, outputs: int, bias: bool = True) -> int:
    """A linear layer outside the tower's layers."""
    return inputs * outputs + (outputs if bias else 0)


def integer(config: ConfigReader, default: int, *keys: str) -> int:
    """The integer under one of `keys`, or the default of the tower's configuration class."""
    found = config.optional_integer(*keys, least=0)
    return default if found is None else found


def side(config: ConfigReader, key: str, default: int) -> int:
    """The first of two equal sides, which some configs write as a list."""
    value = config.config.get(key)
    if isinstance(value, list):
        return config.integers(key, least=1, most=10**6)[0]
    return integer(config, default, key)


def patches(config: ConfigReader, image: int, patch: int) -> tuple[int, int]:
    """The number of patches of the tower's own image size, and the side of a patch. The arguments are defaults."""
    size = side(config, "patch_size", patch)
    return (side(config, "image_size", image) // size) ** 2, size
