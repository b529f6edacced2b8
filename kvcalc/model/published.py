"""The published names of other releases of a preset's model, and how each quantized release stores its weights.

They are in presets/types/releases.yaml. A name is listed only if its publisher says that the release has the preset's
layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product

from kvcalc.model.presets import published_aliases, shipped_table
from kvcalc.model.spec import NamedFile
from kvcalc.records import NamedTuple
from kvcalc.units import parse_size


class Recipe(NamedTuple):
    """How the weights of a quantized release are stored.

    `stored` describes it in words. `config` is the release's quantization_config. If the published list has one module
    name per layer, `config` has only the endings of these names. `changes` are the other config keys that differ.
    `dtype` is the same as a type of --dtype, for files of llama.cpp and MLX; None if `config` says how they are stored.
    """

    stored: str
    config: Mapping[str, object]
    changes: Mapping[str, object] = {}
    dtype: str | None = None


class Release(NamedTuple):
    """A published name, in its publisher's spelling, and its preset.

    `aside` is a part of the name that the preset's name does not have and that does not affect the config. `changes`
    are the config keys in which the release differs from the preset. `suffix` is the part of the name for `recipe`.
    `tower`: what it has in place of the preset's vision and audio towers: the config around the preset's language
    model, "unknown" if a tower's size is not known, or "none".
    The name may follow from a listed one by a rule (`kvcalc.model.derived`). `is_variant`: it is then another variant,
    whose context was not compared. `is_copy`: it is then a copy, whose own config was not read. `original` is the
    release for which a repository of another owner is taken, if only their names are alike. `has_mtp`: it is the model
    only if the model's config has layers for multi-token prediction. `file` is set if the name stands for a GGUF file,
    and `model` is then the release that is in the file.
    """

    name: str
    preset: str
    aside: str | None
    changes: Mapping[str, object]
    suffix: str | None = None
    recipe: Recipe | None = None
    is_variant: bool = False
    is_copy: bool = False
    tower: object = None
    original: str | None = None
    has_mtp: bool = False
    file: NamedFile | None = None
    model: str | None = None


def _recipes() -> dict[str, Recipe]:
    recipes: dict[str, Recipe] = {}
    for name, row in _TABLE["recipes"].items():
        base = recipes[row["like"]] if "like" in row else Recipe(row["stored"], {}, dtype=row.get("dtype"))
        stored, changes = row.get("stored", base.stored), {**base.changes, **row.get("changes", {})}
        recipes[name] = Recipe(stored, {**base.config, **row.get("config", {})}, changes, base.dtype)
    return recipes


_TABLE = shipped_table("releases")
_RECIPES = _recipes()

RECIPES: Mapping[str, Recipe] = _RECIPES

PUBLISHED_BYTES: Mapping[str, int] = {
    name.casefold(): parse_size(row["size"], name) for name, row in _TABLE["sizes"].items()
}
"""The size of a release's weights that its publisher or a server's log states, by its name in lower case."""

REPACKAGED_TYPES = frozenset(_TABLE["repackaged_types"].split())
"""Dense decoders, in which every linear layer except the output head is quantized."""

QUANTIZED_AS: Mapping[str, str | None] = _TABLE["quantized_as"]
"""Usual suffixes of quantized releases, a longer one before its own end -> the closest --dtype. Used only in hints."""


def releases() -> Iterator[Release]:
    """Every name from the original publishers that is not a preset's alias."""
    return _spelled_out("first_hand")


def published_as(last: str) -> Release | None:
    """The release whose name without its organisation is `last`, in lower case: a listed one, or a preset's alias."""
    for release in releases():
        if release.name.partition("/")[2].casefold() == last:
            return release
    for alias in published_aliases().get(last, ()):
        return Release(alias.name, alias.preset, None, {})
    return None


def repackaged() -> Iterator[Release]:
    """Every name from other publishers that is listed individually."""
    return (release for release in _spelled_out("second_hand") if release.recipe is not None)


def _spelled_out(rows: str) -> Iterator[Release]:
    for row in _TABLE[rows]:
        own, aside, tower = row.get("changes", {}), row.get("aside"), row.get("tower")
        named = row["names"].split() if "names" in row else [row["name"]]
        for size, pattern in product(row.get("sizes", "").split() or [""], named):
            name, preset = pattern.format(size), row["preset"].format(size.casefold())
            if not row.get("is_alias"):
                yield Release(name, preset, aside, own, tower=tower)
            for suffix, chosen in row.get("quantized", {}).items():
                recipe = _RECIPES[chosen]
                changes = {**own, **recipe.changes}
                yield Release(name + suffix, preset, aside, changes, suffix.lstrip("-"), recipe, tower=tower)
