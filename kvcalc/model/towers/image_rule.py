"""What the rule of a family's images is made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from kvcalc.model.reader import ConfigReader
from kvcalc.model.towers.blocks import integer


class ImageRule(NamedTuple):
    """`tokens(width, height)` is the tokens of an image in pixels. `most` is that of the largest image, and each token
    takes `patches_per_token` patches of the vision tower. `width` and `elements` are the tower's width and the values
    that a patch needs in the widest module of a layer. vLLM tries videos of up to `most_frames` times as many tokens.
    """

    tokens: Callable[[int, int], int]
    most: int
    patches_per_token: int
    width: int
    elements: int
    most_frames: int = 1

    def most_at(self, context_tokens: int) -> int:
        """The tokens of the largest image or video that is no longer than the context, and at least one image."""
        return self.most * max(1, min(self.most_frames, context_tokens // max(self.most, 1)))


Make = Callable[[ConfigReader, ConfigReader], ImageRule]


def tower_size(vision: ConfigReader, matrices: int = 2, width: int = 1152, inner: int = 4304) -> tuple[int, int]:
    """The tower's width, and the values of a patch in its widest module: in and out of the MLP."""
    size = integer(vision, width, "embed_dim", "hidden_size", "vt_hidden_size")
    middle = integer(vision, inner, "intermediate_size", "vt_intermediate_size")
    return size, matrices * middle
