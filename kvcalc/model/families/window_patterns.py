"""Which layers of a decoder have a sliding window, for families whose configs need not list it.

A pattern takes the config and the number of layers and says for each layer whether it slides. Read from the
configuration classes of Transformers 5.23.0.
"""

from __future__ import annotations

from collections.abc import Callable

from kvcalc.model.reader import ConfigReader

Pattern = Callable[[ConfigReader, int], list[bool]]


def all_layers(config: ConfigReader, num_layers: int) -> list[bool]:
    """Every layer slides, where the config gives a window."""
    return [True] * num_layers


def no_layers(config: ConfigReader, num_layers: int) -> list[bool]:
    """Layers slide only where the config lists them."""
    return [False] * num_layers


class OneFullIn:
    """One layer in every `step` sees all: the last of them, or the first where `full_first`; one of `keys` may name
    another step."""

    def __init__(self, step: int, keys: tuple[str, ...] = (), full_first: bool = False) -> None:
        self.step, self.keys, self.full_first = step, keys, full_first

    def __call__(self, config: ConfigReader, num_layers: int) -> list[bool]:
        return self.sliding(num_layers, config.optional_integer(*self.keys) if self.keys else None)

    def sliding(self, num_layers: int, step: int | None = None) -> list[bool]:
        """Whether each layer slides, whatever a config says; at another `step` where one is given."""
        step = step or self.step
        return [number % step != (0 if self.full_first else step - 1) for number in range(num_layers)]


def full_every(step: int, *keys: str) -> OneFullIn:
    """The last of every `step` layers sees all; one of `keys` may name another step."""
    return OneFullIn(step, keys)


def full_first_of(step: int) -> OneFullIn:
    """The first of every `step` layers sees all."""
    return OneFullIn(step, full_first=True)


def full_last_of(step: int) -> Pattern:
    """Every `step`-th layer sees all, counted back from the last one."""
    return lambda config, num_layers: [(num_layers - 1 - number) % step != 0 for number in range(num_layers)]


def and_the_last(pattern: Pattern) -> Pattern:
    """As `pattern`, but the last layer sees all."""
    return lambda config, num_layers: [*pattern(config, num_layers)[:-1], False]


def from_max_window_layers(config: ConfigReader, num_layers: int) -> list[bool]:
    """max_window_layers is the first layer with a window, counted from 0."""
    first = config.integer("max_window_layers", least=0)
    return [number >= first for number in range(num_layers)]


def every_other_below_max_window_layers(config: ConfigReader, num_layers: int) -> list[bool]:
    """Even layers below max_window_layers slide. Source: Qwen2MoeConfig."""
    end = config.integer("max_window_layers", least=0)
    return [number % 2 == 0 and number < end for number in range(num_layers)]


def without_rope(config: ConfigReader, num_layers: int) -> list[bool]:
    """With use_sliding_window, layers without rotary positions slide: zeros of no_rope_layers, else every so many.

    Source: SmolLM3Config, whose layer_types need no switch.
    """
    if not config.boolean("use_sliding_window", default=False):
        return [False] * num_layers
    if config.config.get("no_rope_layers") is not None:
        return [not rotary for rotary in config.flags("no_rope_layers", num_layers)]
    interval = config.integer("no_rope_layer_interval")
    return [(number + 1) % interval == 0 for number in range(num_layers)]


def after_dense_layers(config: ConfigReader, num_layers: int) -> list[bool]:
    """The dense layers in front have a step of their own, the others count from there. Source: Cohere2MoeConfig."""
    dense = config.optional_integer("first_k_dense_replace", least=0, most=num_layers) or 0
    front, rest = config.integer("prefix_dense_sliding_window_pattern"), config.integer("sliding_window_pattern")
    return [(n + 1) % front != 0 for n in range(dense)] + [(n + 1) % rest != 0 for n in range(num_layers - dense)]


def flint(config: ConfigReader, num_layers: int) -> list[bool]:
    """Layers 0, 1, 5, 9 and so on see all, and the last one. Source: FlintConfig."""
    return [number > 1 and number % 4 != 1 and number != num_layers - 1 for number in range(num_layers)]
