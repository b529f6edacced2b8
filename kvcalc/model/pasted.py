"""Pasted names that are not a preset's name or alias: find the preset if it is certain, or say what to type instead.

A name is certain if it is the published name of a release of the preset's model (`published`), with or without the
organisation, or follows from one by a rule (`derived`). Names are compared as a whole; there is no search for parts of
a name.
"""

from __future__ import annotations

from kvcalc.errors import ModelError, UsageError
from kvcalc.model import presets
from kvcalc.model.derived import derive, names_size, why_not
from kvcalc.model.hf_config import TOWERS
from kvcalc.model.published import (
    PUBLISHED_BYTES,
    QUANTIZED_AS,
    REPACKAGED_TYPES,
    Release,
    published_as,
    releases,
    repackaged,
)
from kvcalc.model.spec import NamedFile
from kvcalc.records import NamedTuple


class Pasted(NamedTuple):
    """What a pasted name means.

    `reference` is the name on the Hub. `name` is the model's name in answers: the preset's name if the release is one
    of its aliases, else the name on the Hub. A GGUF file has the name of its model. `config` is the preset's config
    with the release's changes. `remark` says which preset it is and what every other part of the name means. `dtype` is
    the type of the weights, as in --dtype, if the name says it and `config` does not. `has_mtp` and `file` are those of
    the release, and `has_unknown_tower` as in a preset. `published_bytes` and `has_unread_recipe` are as in a model.
    """

    reference: str
    name: str
    preset: presets.Preset
    config: dict[str, object]
    remark: str
    dtype: str | None
    has_mtp: bool
    has_unknown_tower: bool
    published_bytes: int | None
    has_unread_recipe: bool
    file: NamedFile | None


def find_pasted(name: str, *, any_owner: bool = False) -> Pasted | None:
    """The meaning of `name` if it is certain, else None. `name` must not be a preset's name or alias.

    With `any_owner`, a repository of an unknown owner is taken for the published one that is called the same.
    """
    release = _release(name, any_owner)
    if release is None:
        return None
    preset = presets.find_preset(release.preset)
    if preset is None or (preset.is_users and release.name != preset.name):
        # The release was compared with the shipped preset, not with the user's.
        return None
    config = {**preset.config, **release.changes}
    if release.tower is not None:
        config = {key: value for key, value in config.items() if key not in TOWERS}
    if isinstance(release.tower, dict):
        from kvcalc.model.wrappers import around

        config = around(config, release.tower)
    dtype = None
    if release.recipe is not None:
        dtype = release.recipe.dtype
        if dtype is None:
            config["quantization_config"] = release.recipe.config
    # A GGUF file holds the model that it is made from, in another type.
    model_name = release.model or release.name
    is_own = model_name in (preset.name, *preset.aliases) and (release.recipe is None or release.model is not None)
    size = PUBLISHED_BYTES.get(release.name.casefold())
    is_unread = size is None and _is_unread(release, preset)
    remark = _remark(name, release, preset, is_unread)
    has_unknown_tower = preset.has_unknown_tower if release.tower is None else release.tower == "unknown"
    return Pasted(
        release.name, preset.name if is_own else model_name, preset, config, remark, dtype, release.has_mtp,
        has_unknown_tower, size, is_unread, release.file,
    )  # fmt: skip


def _is_unread(release: Release, preset: presets.Preset) -> bool:
    """Whether the release may leave modules in 16 bits that its recipe does not name."""
    is_copy = release.is_copy and release.recipe is not None and release.recipe.dtype is None
    return is_copy and preset.config["model_type"] not in REPACKAGED_TYPES


def unknown_model(name: str) -> ModelError:
    """The error for an unknown model. Its hint has the nearest presets, and how to read the model's own config."""
    if "://" in name:
        hint = "for a model on the Hub, type only its id, ORG/NAME; for one of its revisions, hf:ORG/NAME@REVISION"
        return ModelError(f"model {name!r} is not known", hint)
    hint = f"{_what_it_is_like(name)} {_from_the_hub(name)}"
    unread = presets.list_presets().problems
    if unread:
        hint += f"; not read: {', '.join(problem.path for problem in unread)} (kvcalc models check FILE)"
    return ModelError(f"model {name!r} is not known", hint)


def _release(name: str, any_owner: bool) -> Release | None:
    wanted = name.casefold()
    if "/" not in name:
        return published_as(wanted) or derive(name)
    for release in (*releases(), *repackaged()):
        if release.name.casefold() == wanted:
            return release
    return derive(name, any_owner=any_owner)


def _remark(name: str, release: Release, preset: presets.Preset, is_unread: bool) -> str:
    original = release.original or ("" if "/" in name or release.name == release.preset else release.name)
    said = [f"{name} is taken as {original + ', ' if original else 'the '}preset {release.preset}"]
    if release.has_mtp:
        said.append(f"--speculative mtp counts its {release.aside} layer")
    elif release.aside is not None:
        said.append(f"{release.aside!r} is left aside")
        if release.is_variant:
            said.append("its context may be another")
    if release.changes:
        said.append("its " + ", ".join(f"{key} is {_shown(value)}" for key, value in release.changes.items()))
    if release.file is not None and release.file.expands_latent:
        said.append("its file is taken as made before April 2025, so llama.cpp keeps K and V of every head")
    if release.recipe is not None:
        said.append(f"{release.suffix!r} means {release.recipe.stored} (--dtype overrides this)")
        if is_unread:
            said.append("which modules stay in 16 bits was not read from its config")
    return "; ".join(said)


def _shown(value: object) -> str:
    if isinstance(value, dict):
        return "its own"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _what_it_is_like(name: str) -> str:
    """Why the name is refused, the base model of a quantized release, or the nearest names."""
    reason = why_not(name)
    if reason is not None:
        return reason
    last = name.rpartition("/")[2].casefold()
    plain, dtype = _without_quantization(last)
    original = _begins_with(plain.partition(":")[0])
    if original is not None:
        return f"if it has the layers of {original}, type that name."
    if "distill" in plain:
        return "a distillation does not have its teacher's layers."
    if dtype is not None:
        base = presets.find_preset(plain)
        release = None if base is not None else published_as(plain)
        preset = base.name if base is not None else release and release.preset
        if preset is not None:
            return f"for the base model with {dtype} weights, type: {preset} --dtype {dtype}."
    near = nearest_names(name)
    return (
        f"did you mean {' or '.join(near)}?"
        if near
        else "list the presets: kvcalc models, or give the path of a config.json."
    )


def _begins_with(last: str) -> str | None:
    """The longest known name that names a size and with which `last` goes on, after a hyphen."""
    words = last.split("-")[:_MOST_WORDS]
    for count in range(len(words) - 1, 0, -1):
        begin = "-".join(words[:count])
        if names_size(begin):
            known = presets.find_preset(begin) or published_as(begin)
            if known is not None:
                return known.name
    return None


def _without_quantization(last: str) -> tuple[str, str | None]:
    """A name without its quantization suffix, and the closest --dtype."""
    for suffix, dtype in QUANTIZED_AS.items():
        if last.endswith(suffix):
            return last.removesuffix(suffix), dtype
    return last, None


def _from_the_hub(name: str) -> str:
    from kvcalc.model.hub import parse_reference

    if name.casefold().partition(":")[0].endswith("-gguf"):
        return "For one of its files, give the path of a .gguf file"
    try:
        known = "/" in name and bool(parse_reference(f"hf:{name}"))
    except UsageError:
        known = False
    read = f"To read its config.json from the Hub: hf:{name}" if known else "For any model on the Hub: hf:ORG/NAME"
    return f"{read} (needs: pip install 'kvcalc[hub]')"


_SHOWN = 3
_MOST_WORDS = 12
# Comparing long names or very many names is slow.
_LONGEST = 200
_MOST_NAMES = 2000


def nearest_names(name: str) -> list[str]:
    """The names of at most three presets that are similar to `name`, closest first. Case and punctuation are ignored.

    A preset whose name lacks one of the numbers in `name` is another version or size. Such presets are suggested only
    if there are no others and `name` has no organisation, because then a number may be mistyped.
    """
    from difflib import get_close_matches
    from itertools import islice

    wanted = _squeezed(name)
    if len(name) > _LONGEST or not wanted:
        return []
    names_of = ((n, preset.name) for preset in presets.all_presets() for n in (preset.name, *preset.aliases))
    known = {n: preset for n, preset in islice(names_of, _MOST_NAMES) if len(n) <= _LONGEST}
    same = {n: preset for n, preset in known.items() if _numbers(name) <= _numbers(n)}
    starts = [n for n in sorted(same, key=len) if "/" not in n and _squeezed(n).startswith(wanted)]
    if starts:
        return _of_different_presets(starts, known)
    for names in (same, {} if "/" in name else known):
        # Names that differ only in punctuation count as one. A preset's own name comes before its aliases.
        by_squeezed = {_squeezed(n): n for n in reversed(names)}
        close = get_close_matches(wanted, by_squeezed, n=2 * _SHOWN, cutoff=0.6)
        if close:
            return _of_different_presets([by_squeezed[squeezed] for squeezed in close], known)
    return []


def _of_different_presets(names: list[str], known: dict[str, str]) -> list[str]:
    """One name for each preset, its own name if it is in `names`. At most three."""
    first: dict[str, str] = {}
    for name in names:
        first.setdefault(known[name], known[name] if known[name] in names else name)
    return list(first.values())[:_SHOWN]


def _squeezed(name: str) -> str:
    return "".join(character for character in name.casefold() if character.isalnum())


def _numbers(name: str) -> set[str]:
    """The numbers in a name: its version and sizes, such as `3.1` and `70`."""
    import re

    return set(re.findall(r"\d+(?:\.\d+)?", name))
