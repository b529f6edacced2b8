"""The layers that towers are made of, as counts of parameters."""

from __future__ import annotations

from kvcalc.model.reader import MAX_INTEGER, MAX_LAYERS, ConfigReader

_MOST_PIXELS = 10**6

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


def integer(config: ConfigReader, default: int, *keys: str, most: int = MAX_INTEGER) -> int:
    """The size under one of `keys`, or the default of the tower's configuration class. It is zero only by default."""
    return number_of(config, default, *keys, least=min(1, default), most=most)


def number_of(config: ConfigReader, default: int, *keys: str, least: int = 0, most: int = MAX_INTEGER) -> int:
    """The number under one of `keys`, or the default of the tower's configuration class. It may be zero."""
    number = config.optional_integer(*keys, least=least, most=most)
    return default if number is None else number


def num_layers(config: ConfigReader, default: int, *keys: str) -> int:
    """The number of layers under one of `keys`, or the default of the tower's configuration class."""
    return number_of(config, default, *keys, most=MAX_LAYERS)


def side(config: ConfigReader, key: str, default: int) -> int:
    """The first of two equal sides in pixels, which some configs write as a list."""
    return (config.integer_or_list(key, _MOST_PIXELS) or [default])[0]


def patches_of_side(config: ConfigReader, image: int, patch: int) -> int:
    """The patches along a side of the tower's own image size. The arguments are defaults."""
    patches = side(config, "image_size", image) // side(config, "patch_size", patch)
    if not patches:
        raise config.error("image_size is smaller than patch_size")
    return patches


def patches(config: ConfigReader, image: int, patch: int) -> tuple[int, int]:
    """The number of patches of the tower's own image size, and the side of a patch. The arguments are defaults."""
    return patches_of_side(config, image, patch) ** 2, side(config, "patch_size", patch)
