"""Which keys of a config a model is read from, for `--explain`."""

from __future__ import annotations

# A list of one value per layer, or another long value, is cut.
_LONGEST = 40


class Facts:
    """The keys that are looked up while a model is read, with their values, and those that its class has a default for.

    A key of an object in the config is `text_config.head_dim`.
    """

    def __init__(self) -> None:
        self.values: dict[str, object] = {}
        self.defaults: set[str] = set()

    def shown(self) -> list[tuple[str, str, bool]]:
        """Each key with its value as text, and whether the value is a default."""
        texts = ((key, str(value)) for key, value in self.values.items() if value not in (None, [], {}))
        return [
            (key, text if len(text) <= _LONGEST else f"{text[:_LONGEST]}...", key.rpartition(".")[2] in self.defaults)
            for key, text in texts
        ]
