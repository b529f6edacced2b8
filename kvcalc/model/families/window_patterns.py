"""Patterns that say which layers of a decoder have a sliding window, for families whose configs may leave this out.

A pattern takes the config and the number of layers, and returns for each layer whether it has the window. `pattern_of`
finds it by its name in a table. Source: the configuration classes of Transformers 5.23.0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvcalc.model.reader import ConfigReader

Pattern = Callable[[ConfigReader, int], list[bool]]


def all_layers(config: ConfigReader, num_layers: int) -> list[bool]:
    """Every layer has the window, if the config gives one."""
    return [True] * num_layers


def no_layers(config: ConfigReader, num_layers: int) -> list[bool]:
    """Only the layers that the config lists have the window."""
    return [False] * num_layers


def only_listed(config: ConfigReader, num_layers: int) -> list[bool]:
    """Only the layers that the config lists have the window. A window without a list is an error."""
    raise config.error("sliding_window without layer_types: which layers have the window?")


class OneFullIn:
    """One layer in every `step` has no window: the last of them, or the first if `full_first`.

    The config may give another step under one of `keys`, or the letters of one period: L for a window, G for none.
    """

    def __init__(self, step: int, keys: tuple[str, ...] = (), full_first: bool = False) -> None:
        self.step, self.keys, self.full_first = step, keys, full_first

    def __call__(self, config: ConfigReader, num_layers: int) -> list[bool]:
        for key in self.keys:
            letters = config.letters(key, "LG")
            if letters:
                return [letters[number % len(letters)] == "L" for number in range(num_layers)]
        return self.sliding(num_layers, config.optional_integer(*self.keys) if self.keys else None)

    def sliding(self, num_layers: int, step: int | None = None) -> list[bool]:
        """Return for each layer whether it has the window, whatever the config says. `step` replaces the default."""
        step = step or self.step
        return [number % step != (0 if self.full_first else step - 1) for number in range(num_layers)]


def full_every(step: int, *keys: str) -> OneFullIn:
    """The last of every `step` layers has no window. The config may give another step under one of `keys`."""
    return OneFullIn(step, keys)


def full_first_of(step: int) -> OneFullIn:
    """The first of every `step` layers has no window."""
    return OneFullIn(step, full_first=True)


def full_last_of(step: int) -> Pattern:
    """Every `step`-th layer has no window, counted backwards from the last layer, which has none."""
    return lambda config, num_layers: [(num_layers - 1 - number) % step != 0 for number in range(num_layers)]


def and_the_last(pattern: Pattern) -> Pattern:
    """Like `pattern`, but the last layer has no window."""
    return lambda config, num_layers: [*pattern(config, num_layers)[:-1], False]


def from_max_window_layers(config: ConfigReader, num_layers: int) -> list[bool]:
    """max_window_layers is the first layer with a window, counted from 0."""
    first = config.integer("max_window_layers", least=0)
    return [number >= first for number in range(num_layers)]


def every_other_below_max_window_layers(config: ConfigReader, num_layers: int) -> list[bool]:
    """Even layers below max_window_layers have the window. Source: Qwen2MoeConfig."""
    end = config.integer("max_window_layers", least=0)
    return [number % 2 == 0 and number < end for number in range(num_layers)]


def without_rope(config: ConfigReader, num_layers: int) -> list[bool]:
    """With use_sliding_window, layers without rotary positions have the window.

    These are the zeros in no_rope_layers, else every no_rope_layer_interval-th layer. Source: SmolLM3Config, whose
    layer_types apply without use_sliding_window.
    """
    if not config.boolean("use_sliding_window", default=False):
        return [False] * num_layers
    if config.has("no_rope_layers"):
        return [not rotary for rotary in config.flags("no_rope_layers", num_layers)]
    interval = config.integer("no_rope_layer_interval")
    return [(number + 1) % interval == 0 for number in range(num_layers)]


def after_dense_layers(config: ConfigReader, num_layers: int) -> list[bool]:
    """The dense layers at the start have their own step. The other layers count from the end of those.

    Source: Cohere2MoeConfig.
    """
    dense = config.optional_integer("first_k_dense_replace", least=0, most=num_layers) or 0
    front, rest = config.integer("prefix_dense_sliding_window_pattern"), config.integer("sliding_window_pattern")
    return [(n + 1) % front != 0 for n in range(dense)] + [(n + 1) % rest != 0 for n in range(num_layers - dense)]


def flint(config: ConfigReader, num_layers: int) -> list[bool]:
    """Layers 0, 1, 5, 9 and so on, and the last layer, have no window. Source: FlintConfig."""
    return [number > 1 and number % 4 != 1 and number != num_layers - 1 for number in range(num_layers)]


_PATTERNS: dict[str, Pattern] = {
    pattern.__name__: pattern
    for pattern in (
        all_layers, no_layers, only_listed, from_max_window_layers, every_other_below_max_window_layers, without_rope,
        after_dense_layers, flint,
    )
}  # fmt: skip
_WITH_STEPS: dict[str, Callable[..., Pattern]] = {
    pattern.__name__: pattern for pattern in (full_every, full_first_of, full_last_of)
}


def pattern_of(stated: str | Mapping[str, Any]) -> Pattern:
    """The pattern that a table states: its name, or a mapping from its name to its arguments.

    Raises KeyError for another name, and TypeError for other arguments.
    """
    if isinstance(stated, str):
        return _PATTERNS[stated]
    ((name, values),) = stated.items()
    if name == "and_the_last":
        return and_the_last(pattern_of(values))
    is_list = isinstance(values, Sequence) and not isinstance(values, str)
    return _WITH_STEPS[name](*values) if is_list else _WITH_STEPS[name](values)
