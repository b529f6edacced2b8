"""Names that follow from a published one by a rule: other variants, converted copies, and ollama's tags.

The rules are in presets/types/names.yaml and ollama.yaml. What is left of a name must be a published name as a whole:
`bartowski/Llama-3.3-70B-Instruct-GGUF:Q5_K_M` is known because `Llama-3.3-70B-Instruct` is, and `bartowski/Llama-3.3-x`
is not.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from kvcalc.model import presets
from kvcalc.model.published import RECIPES, Recipe, Release, published_as, releases
from kvcalc.model.spec import NamedFile

_TABLE: Mapping[str, Any] = presets.shipped_table("names")
_ASIDE = frozenset(_TABLE["aside"].split())
_CONVERTERS = frozenset(_TABLE["converters"].casefold().split())
_MIRRORS = frozenset(_TABLE["mirrors"].casefold().split())
_RENAMED: Mapping[str, str] = _TABLE["renamed"]
_TRAINED = frozenset(_TABLE["trained"].split())
_WORD = rf"-(?:{'|'.join((*_TABLE['edited'].split(), *_TABLE['trained'].split()))})(?:-v?\d+(?:\.\d+)?)?"
_EDITED = re.compile(rf"(.+?)((?:{_WORD})+)", re.IGNORECASE)
_SIZE = re.compile(r"(?:.*-)?[ea]?\d+(?:\.\d+)?[bm](?:-.*)?", re.IGNORECASE)
_ANYBODYS = frozenset(_TABLE["anybodys"].split())
_MLX = frozenset(_TABLE["mlx_copies"]["organisations"].casefold().split())
_GGUF_ASIDE = frozenset(_TABLE["gguf"]["aside"].split())
_GGUF_TYPES = frozenset(_TABLE["gguf"]["types"].split())
_FILE_END = re.compile(r"(?:-\d{5}-of-\d{5})?(?:\.gguf)?$", re.IGNORECASE)
_FILE_TYPE = re.compile(rf"[-.](?:i1-)?(?=(?:ud-)?(?:{'|'.join(_GGUF_TYPES)})$)", re.IGNORECASE)
_MTP = re.compile("(.+)-(mtp)", re.IGNORECASE)
_REFUSED = {name.casefold(): reason for name, reason in _TABLE["refused"].items()}
_FLOATS = ("f16", "fp16", "bf16", "f32")


def derive(name: str, *, any_owner: bool = False) -> Release | None:
    """The release that `name` means by a rule, or None. `any_owner`: a repository that is called as a published one."""
    path, _, tag = name.partition(":")
    organisation, slash, last = path.partition("/")
    if not slash:
        return _from_ollama(path.casefold(), tag.casefold()) or _bare(path, tag.casefold())
    if not organisation or not last or "/" in last:
        return None
    if path.casefold() in _REFUSED:
        return None
    parts = last.casefold().split("-")
    if "gguf" in parts[-2:] or _is_file_type(tag.casefold()):  # NAME-GGUF, NAME-GGUF-TYPE, or a file's type after it
        return _from_gguf(name, organisation, last, tag.casefold())
    if tag:
        return None
    for suffix, recipe, copies in _suffixes(organisation.casefold()):
        if last.casefold().endswith(suffix):
            base = _base(organisation, last[: -len(suffix)], is_copy=True, copies=copies)
            if base is not None:
                return _converted(name, base, last[-len(suffix) :].lstrip("-"), recipe)
    drafting = _MTP.fullmatch(last)
    if drafting is not None and drafting[1].casefold().endswith(("fp4", "fp8")):  # a quantized copy with its MTP layer
        whole = derive(f"{organisation}/{drafting[1]}")
        return whole and whole._replace(name=name, aside=drafting[2], has_mtp=True)
    derived = _base(organisation, last, is_copy=organisation.casefold() in _MIRRORS, name=name)
    edited = _edited(last, organisation)
    if derived is None and edited is not None:  # an edited copy in a type of its own
        derived = derive(f"{organisation}/{edited[0]}")
        derived = derived and derived._replace(name=name, aside=edited[1], is_variant=True)
    return derived or _short(name, organisation, last) or (_elsewhere(name, last) if any_owner else None)


def _bare(name: str, tag: str) -> Release | None:
    """A name without an organisation, with a type of llama.cpp if it has one: Qwen3-32B-Q4_K_M, Qwen3-32B-GGUF:Q8_0."""
    if file_type(name) or name.casefold().endswith("-gguf") or _is_file_type(tag):
        return _from_gguf(name, "", name, tag)
    return None if tag else _base_of_bare(name)


def _base_of_bare(last: str) -> Release | None:
    """A preset, or a published release of any organisation, perhaps in another variant: llama-3-70b-instruct.

    A name that ollama writes with a colon is the release that ollama takes: mistral-7b is mistral:7b.
    """
    preset = presets.find_preset(last)
    if preset is not None:
        return Release(preset.name, preset.name, None, {})
    derived = _base("", last, is_copy=True, copies=True)
    stem, _, end = last.rpartition("-")
    if derived is None and end.casefold() in _ASIDE:
        derived = _base_of_bare(stem)
        return derived and derived._replace(aside=derived.aside or end, is_variant=True)
    if derived is None:
        derived = _from_ollama(stem.casefold(), end.casefold())
        return derived and derived._replace(suffix=None, recipe=None, file=None)
    return derived


def _elsewhere(name: str, last: str) -> Release | None:
    """A repository of any owner with the whole name of a published release, as mirrors have it."""
    base = _same(last, None) if published_as(last.casefold()) else None
    return base and base._replace(name=name, original=base.name)


def _short(name: str, organisation: str, last: str) -> Release | None:
    """The organisation's own model by the preset's name, as hosts of models write it: qwen/qwen3-235b-a22b."""
    preset = presets.find_preset(last)
    if preset is None or preset.name != last.casefold():
        return None
    is_own = f"huggingface.co/{organisation}/".casefold() in preset.source.casefold()
    return Release(name, preset.name, None, {}) if is_own else None


def why_not(name: str) -> str | None:
    """What to say of a name to which a rule seems to apply, but does not. None if there is nothing to say."""
    path, _, tag = name.casefold().partition(":")
    row = presets.shipped_table("ollama").get(path)
    if row is not None and not tag.endswith("cloud"):
        return f"ollama's {path} has the tags {', '.join(row['tags'])}, and their variants and types."
    if path in _REFUSED:
        return f"{_REFUSED[path]}."
    for end, reason in _TABLE["no_models"].items():
        if re.fullmatch(end, name.casefold()):
            return f"{reason}."
    return None


def _suffixes(organisation: str) -> Iterator[tuple[str, Recipe, bool]]:
    """The suffixes of converted copies, what they mean, and whether that holds for anybody's copies. The organisation's
    own come first."""
    copies = _TABLE["mlx_copies"]
    for suffix, dtype in {**copies["anybodys"], **(copies["suffixes"] if organisation in _MLX else {})}.items():
        unknown = {"quant_method": f"mlx{suffix}"} if dtype is None else {}
        yield suffix, Recipe(f"{dtype or 'mixed'} weights of MLX", unknown, dtype=dtype), suffix in _ANYBODYS
    for table in (_TABLE["own_suffixes"].get(organisation, {}), _TABLE["suffixes"]):
        for suffix, recipe in table.items():
            yield suffix, RECIPES[recipe], suffix in _ANYBODYS
    for suffix, recipe in _TABLE["unread"].items():
        yield suffix, RECIPES[recipe], True


def names_size(name: str) -> bool:
    """Whether a word of the name is a number of parameters: 8b, 0.6B, E4B, A3B, 270m."""
    return _SIZE.fullmatch(name) is not None


def _edited(last: str, organisation: str) -> tuple[str, str] | None:
    """The original's name and the words after it, if they say that its weights were edited or trained further.

    The publisher's own name may be among these words.
    """
    first, *others = last.split("-")
    words = (word for word in others if word.casefold() != organisation.casefold())
    edited = _EDITED.fullmatch("-".join([first, *words]))
    if edited is None or (not _TRAINED.isdisjoint(edited[2].casefold().split("-")) and not names_size(edited[1])):
        return None
    return edited[1].removeprefix("Huihui-"), edited[2].removeprefix("-")


def _converted(name: str, base: Release, suffix: str, recipe: Recipe) -> Release:
    return base._replace(name=name, suffix=suffix, recipe=recipe, is_copy=True)


def _base(
    organisation: str, last: str, *, is_copy: bool, name: str | None = None, copies: bool = False
) -> Release | None:
    """The release without quantization that is called `last`, perhaps in another variant. None if it is not certain.

    It must be the organisation's own, or with `is_copy` be copied by an organisation that publishes copies, or be
    edited. Some write the publisher before the name (Qwen_Qwen3-8B).
    """
    drafting = _MTP.fullmatch(last)
    if drafting is not None:  # the whole model with its MTP layer, which its config must have
        found = _base(organisation, drafting[1], is_copy=True, name=name, copies=True)
        return found and found._replace(aside=drafting[2], has_mtp=True)
    edited = _edited(last, organisation)
    if edited is not None:
        anybody = copies or name is not None  # without a type of its own
        found = _base(organisation, edited[0], is_copy=True, name=name, copies=anybody)
        _, hyphen, rest = edited[0].partition("-")
        if found is None and hyphen and names_size(rest) and not _TRAINED.isdisjoint(edited[1].casefold().split("-")):
            found = _base(organisation, rest, is_copy=True, name=name, copies=anybody)
        return found if found is None else found._replace(aside=edited[1], is_variant=True)
    copies = copies or (is_copy and organisation.casefold() in (_CONVERTERS | _MIRRORS))
    publisher, underscore, rest = last.partition("_")
    found = _same(last, None if copies else organisation)
    if found is None and copies and underscore:
        found = _same(rest, publisher)
    return found if found is None or name is None else found._replace(name=name)


def _same(last: str, organisation: str | None) -> Release | None:
    """The release called `last`, or the one whose name differs only in what is left aside. None if two models are.

    A model whose original is quantized counts (Kimi-K2-Thinking), a copy in another type does not.
    """
    published = published_as(last.casefold())
    if published is not None and _is_of(published.name, organisation):
        ends = tuple(suffix for suffix, _, _ in _suffixes(published.name.partition("/")[0].casefold()))
        return published if published.recipe is None or not published.name.casefold().endswith(ends) else None
    wanted = _key(last)
    found: dict[str, Release] = {}
    for each in (*_aliases(), *(release for release in releases() if release.recipe is None)):
        # Nvidia's original releases have the type in their names, and some have the publisher, which copies leave out.
        publisher, _, theirs = each.name.partition("/")
        key = _key(theirs.removesuffix("-BF16"))
        is_short = organisation is None and key[0] == publisher.casefold() and key[1:] == wanted
        if _is_of(each.name, organisation) and (key == wanted or is_short):
            found.setdefault(each.preset, each)
    if len(found) != 1:
        return None
    base = next(iter(found.values()))
    aside = " and ".join(sorted(_variants(last) ^ _variants(base.name.partition("/")[2])))
    return base._replace(aside=aside or base.aside, is_variant=bool(aside))


def _aliases() -> Iterator[Release]:
    for aliases in presets.published_aliases().values():
        for alias in aliases:
            yield Release(alias.name, alias.preset, None, {})


def _is_of(name: str, organisation: str | None) -> bool:
    return organisation is None or _today(name.partition("/")[0]) == _today(organisation)


def _today(organisation: str) -> str:
    """The organisation's name now, in lower case."""
    folded = organisation.casefold()
    return _RENAMED.get(folded, folded).casefold()


def _key(last: str) -> tuple[str, ...]:
    return tuple(part for part in last.casefold().split("-") if part not in _ASIDE)


def _variants(last: str) -> set[str]:
    return {part for part in last.split("-") if part.casefold() in _ASIDE}


def _from_gguf(name: str, organisation: str, last: str, tag: str) -> Release | None:
    """A repository of GGUF files, or one of its files, whose type is in the tag or in the name."""
    parts = _FILE_TYPE.sub("-", last).split("-")
    says_mtp = False
    while parts and parts[-1].casefold() in (_GGUF_ASIDE | _GGUF_TYPES):
        part = parts.pop().casefold()
        says_mtp = says_mtp or part == "mtp"
        if part in _GGUF_TYPES:
            tag = tag or part
        elif part == "ud" and tag and tag == tag.removeprefix("ud-"):
            tag = f"ud-{tag}"
    rest = "-".join(parts)
    listed = published_as(rest.casefold())
    base = listed if listed is not None and listed.name.casefold() == f"{organisation}/{rest}".casefold() else None
    if base is None and organisation:
        base = _base(organisation, rest, is_copy=True, copies=True)
    base = base or _base_of_bare(rest)
    if base is None or base.recipe is not None:
        return None
    tag = tag.removeprefix("i1-")
    recipe = _of_type(base, tag.removeprefix("ud-"), tag)
    if recipe is None:
        return None
    # A variant is another model than the release from which it is made.
    model = None if base.is_variant else base.name
    base = base._replace(file=_file_of(base, tag, says_mtp or base.has_mtp), model=model)
    return _converted(name if organisation else base.name, base, tag or "GGUF", recipe)


def _file_of(base: Release, written: str, says_mtp: bool = False) -> NamedFile:
    """What is known of the GGUF files of a release, of the type that is `written` in the name."""
    preset, rules = presets.find_preset(base.preset), _TABLE["gguf"]
    kind = None if preset is None else preset.config["model_type"]
    drafting = rules["with_draft_layers"]
    is_trained = base.is_variant and base.aside is not None and _EDITED.fullmatch(f"x-{base.aside}") is not None
    holds = kind in drafting["types"].split() or base.name in drafting["releases"].split()
    _, *sizes = _dynamic(written) or (None,)
    expands = base.preset in rules["expanded"].split()
    return NamedFile(says_mtp or (holds and not is_trained), expands, tuple(sizes) or None)


def _dynamic(written: str) -> list[Any] | None:
    """The row of a type whose publisher chooses the types of the tensors: UD-Q4_K_XL."""
    listed: list[Any] | None = _TABLE["gguf"]["dynamic"].get(written.removeprefix("ud-"))
    return listed if written.startswith("ud-") else None


def _is_file_type(tag: str) -> bool:
    return tag.removeprefix("i1-").removeprefix("ud-") in _GGUF_TYPES


def file_type(name: str) -> str | None:
    """The type at the end of the name of a GGUF file: Qwen3-32B-UD-Q4_K_XL-00001-of-00003.gguf. None without one."""
    parts = _FILE_TYPE.split(file_stem(name))
    return parts[-1] if len(parts) > 1 else None


def file_stem(path: str) -> str:
    """The name of a GGUF file without its folder, its extension and its number in a set of files."""
    return _FILE_END.sub("", path.rpartition("/")[2])


def _of_type(base: Release, file_type: str, written: str) -> Recipe | None:
    """How files of a type store a model. None if there is no such type."""
    preset = presets.find_preset(base.preset)
    quantization = preset.config.get("quantization_config") if preset is not None else None
    method = quantization.get("quant_method") if isinstance(quantization, Mapping) else None
    file_type = file_type or ("mxfp4" if method == "mxfp4" else _TABLE["gguf"]["default"])
    if file_type not in _GGUF_TYPES:
        return None
    dynamic = _dynamic(written)
    if dynamic is not None:
        plain, _, low, high = dynamic
        stored = (
            f"files of llama.cpp of {low:g} to {high:g} times the size of {plain}: unsloth chooses each tensor's type"
        )
        return Recipe(stored, {}, dtype=f"gguf:{plain}")
    if written.startswith("ud-"):
        return Recipe(f"{written} files of llama.cpp", {"quant_method": f"gguf {written}"})
    file_type = file_type.removesuffix("_moe")
    dtype = file_type if file_type in _FLOATS else f"gguf:{file_type}"
    return Recipe(f"{file_type} files of llama.cpp", {}, dtype=dtype)


def _from_ollama(model: str, tag: str) -> Release | None:
    """ollama's NAME or NAME:TAG. A tag may add a variant, words of the model's name, and a type: `22b-v0.1-q8_0`."""
    table = presets.shipped_table("ollama")
    row = table.get(model)
    if row is None:
        return None
    tag = row["latest"] if tag in ("", "latest") else tag
    size = max(
        (size_tag for size_tag in row["tags"] if tag == size_tag or tag.startswith(f"{size_tag}-")),
        key=len,
        default=None,
    )
    if size is None:
        return None
    rest = [part for part in tag[len(size) :].split("-") if part]
    types = [part for part in rest if part in _GGUF_TYPES]
    words = _GGUF_TYPES | _ASIDE | {*re.split("[-_]", row["tags"][size].casefold().partition("/")[2])}
    if len(types) > 1 or any(part not in words and f"{part}.0" not in words for part in rest):
        return None
    stated = row.get("type")
    default = (stated.get(size) if isinstance(stated, dict) else stated) or _TABLE["gguf"]["default"]
    file_type = types[0] if types else "q4_0" if "qat" in rest else default
    base = _listed(row["tags"][size])
    recipe = None if base is None else _of_type(base, file_type, "")
    return None if base is None or recipe is None else base._replace(suffix=tag, recipe=recipe, file=_file_of(base, ""))


def _listed(name: str) -> Release | None:
    """The release or the preset with a published name, which the tables give as a whole."""
    organisation, _, last = name.partition("/")
    return _same(last, organisation)
