"""The functions that the formulas of presets/types/layers.yaml may call to find the kind of every layer.

Each returns the kinds, or None if the config does not say them in this way.
"""

from __future__ import annotations

from kvcalc.model.families.layer_row import Row
from kvcalc.model.reader import MAX_LAYERS


def listed(row: Row, key: str = "layer_types", renamed: str = "", *, ahead: bool = False) -> list[str] | None:
    """The kinds in a list. `renamed`: other names of kinds, each as `name=kind`. Kinds with an underscore have none.

    `ahead`: the list may include the layers for multi-token prediction, which are left out.
    """
    config, number = row.reader, row["num_layers"]
    names = dict(name.split("=") for name in renamed.split())
    own = (kind for kind in row.facts["kinds"] if not kind.startswith("_"))
    more = config.optional_integer("num_nextn_predict_layers", least=0) if ahead else None
    has_more = bool(more) and len(config.items(key)) != number
    kinds = config.strings(key, number + (more or 0) if has_more else number, (*own, *names))
    return None if kinds is None else [names.get(kind, kind) for kind in kinds[:number]]


def flagged(row: Row, key: str, zero: str, one: str) -> list[str] | None:
    """The kinds by a list of zeros and ones."""
    if row.reader.is_any(key, None, []):
        return None
    return [one if flag else zero for flag in row.reader.flags(key, row["num_layers"])]


def numbered(row: Row, key: str, one: str, rest: str, *, beyond: bool = False) -> list[str] | None:
    """The kinds by a list of the layers of one kind. `beyond`: it may name layers that there are not."""
    if not row.reader.has(key):
        return None
    numbers = row.reader.integers(key, most=MAX_LAYERS if beyond else row["num_layers"] - 1)
    return [one if layer in numbers else rest for layer in range(row["num_layers"])]


def one_in(row: Row, step: int, one: str, rest: str, at: int | None = None, first: int = 0) -> list[str]:
    """The last of every `step` layers is of one kind, or the one `at` this place, and so are the `first` layers."""
    place = step - 1 if at is None else at
    return [one if layer < first or layer % step == place else rest for layer in range(row["num_layers"])]


def cycle(row: Row, pattern: str) -> list[str]:
    """The kinds in a pattern that repeats."""
    kinds = pattern.split()
    return [kinds[layer % len(kinds)] for layer in range(row["num_layers"])]


def cycled(row: Row, *keys: str, fits: bool = False) -> list[str] | None:
    """The kinds in the list under the first of the keys, which repeats. `fits`: it has no more kinds than layers."""
    config, known = row.reader, [*row.facts["kinds"]]
    kinds = next((found for key in keys if (found := [*map(str, config.items(key))])), None)
    if kinds is None:
        return None
    if not {*kinds} <= {*known} or (fits and len(kinds) > row["num_layers"]):
        more = ", each layer at most once" if fits else ""
        raise config.error(f"{keys[0]} may contain only {' and '.join(known)}{more}")
    return cycle(row, " ".join(kinds))


def if_set(row: Row, key: str, order: list[str]) -> list[str] | None:
    """An order for configs that set a key."""
    return order if row.reader.is_set(key) else None


def required(row: Row, key: str, why: str = "") -> None:
    """Refuse a config that does not say what its layers are."""
    raise row.reader.error(f"{key} is missing{why}")


def repeated(row: Row, order: list[str], kind: str, passes: int) -> list[str]:
    """All layers run several times, from the second time on as another kind."""
    return order + [kind] * (len(order) * (passes - 1))


def ending(row: Row, order: list[str], kind: str) -> list[str]:
    """The last layer is of this kind."""
    return [*order[:-1], kind]
