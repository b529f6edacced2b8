"""The check of the tables in presets/types and kvcalc/engines, when kvcalc is built and in its tests."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from importlib import import_module
from importlib.util import find_spec
from inspect import signature
from typing import Any

from kvcalc.model.experts import Experts
from kvcalc.model.families.decoder_table import Decoder
from kvcalc.model.families.layer_functions import FUNCTIONS
from kvcalc.model.families.layered import CALLED
from kvcalc.model.families.window_patterns import pattern_of
from kvcalc.model.formulas import names_in
from kvcalc.model.presets import shipped_table
from kvcalc.model.type_tables import COMMON_KEYS, FAMILIES, REMOTE_FAMILIES, joined, keys_of, made, module_of, rows_of

# Keys with defaults that no preset may have: those of ZAYA and Qwen4, which have none.
_IN_NO_PRESET = {"cca_time0", "cca_time1", "hc_count", "ngram_size"}
# What `kvcalc.model.gguf.config.shared` may give.
_COMMON_FACTS = (
    "head_dim hidden_size max_position_embeddings model_type num_attention_heads num_hidden_layers "
    "num_key_value_heads rope_theta torch_dtype v_head_dim"
).split()
_RELEASE = {"name", "names", "preset", "sizes", "aside", "changes", "quantized", "is_alias", "tower"}


def check_table(name: str, rows: Mapping[str, Any]) -> None:
    """Raise ValueError for a row of presets/types/NAME.yaml that its reader does not understand."""
    checks = {
        "architectures": _check_architectures, "decoders": check_decoders, "defaults": _check_defaults,
        "drafters": _check_drafters, "engine_releases": _check_engine_releases, "families": _check_families,
        "instances": _check_instances, "layers": _check_layers,
        "names": _check_names, "ollama": _check_ollama, "releases": _check_releases,
        "towers": _check_towers, "tower_weights": _check_tower_weights, "unread": _check_unread,
        "wrappers": _check_wrappers,
    }  # fmt: skip
    if name not in checks:
        raise ValueError(f"{name} is no table: they are {', '.join(checks)}")
    checks[name](rows)


def _check_drafters(rows: Mapping[str, Any]) -> None:
    from kvcalc.model.hf_config import read_config

    for name, row in rows.items():
        _check_fields(f"{name}", row, ("names", "source", "config"))
        read_config(row["config"], name, row["source"])


def check_question(rows: Mapping[str, Any]) -> None:
    """Raise ValueError, TypeError or KeyError for a mistake in kvcalc/question/fields.yaml."""
    from kvcalc.question.fields import declared

    fields = declared(rows)
    for field in fields.values():
        _check_fields(f"what {field.name} needs or excludes", f"{field.needs} {field.excludes}".split(), fields)


def check_engines() -> None:
    """Raise ValueError, TypeError or KeyError for a mistake in a declaration or another table of an engine."""
    from kvcalc.engines.declarations import ENGINES, LOGS, has_table, table
    from kvcalc.engines.log_lines import lines_of
    from kvcalc.engines.reading import readers
    from kvcalc.engines.starts import rules_of
    from kvcalc.model.hf_config import known_types
    from kvcalc.question.fields import FIELDS

    if not ENGINES:
        raise ValueError("kvcalc/engines has no engine.yaml")
    types = {*known_types()}
    for engine in ENGINES:
        if has_table(engine, "models"):
            for names in table(engine, "models").values():
                _check_types(engine, names if isinstance(names, str) else " ".join(names), types)
        if has_table(engine, "starts"):
            rules_of(engine, None)
        if has_table(engine, "releases"):
            import_module(f"kvcalc.engines.{ENGINES[engine][0]}.releases")
    for reader in readers():
        _check_fields(f"the commands of {reader.engine}", reader.fields.values(), FIELDS)
    for engine in LOGS:
        lines = lines_of(engine)
        for pattern in (*lines.facts, *lines.records):
            groups = re.compile(pattern.expression).groupindex
            if not groups or (pattern in lines.facts and [*groups] != ["value"]):
                raise ValueError(f"{engine}: {pattern.name} has no part, or other parts than value")


def _check_fields(row: str, own: Collection[str], known: Collection[str]) -> None:
    for field in own:
        if field not in known:
            raise ValueError(f"{row} has no {field}: its fields are {', '.join(sorted(known))}")


def _check_likes(rows: Mapping[str, Any]) -> None:
    before: set[str] = set()
    for name, own in rows.items():
        for other in own.get("like", "").split():
            if other not in before:
                raise ValueError(f"{name} is like {other}, which is not above it")
        before.add(name)


def _check_families(rows: Mapping[str, Any]) -> None:
    from kvcalc.model.hf_config import known_types

    _check_types("_stated", " ".join(rows["_stated"]), {*known_types()})
    for module, own in rows.items():
        if module in ("_refused", "_stated"):
            continue
        _check_fields(
            module, own, {"keys"} if module == "_common" else {"module", "ignored", "keys", "types", "remote"}
        )
        if not all(isinstance(names, str) for names in own.values()):
            raise ValueError(f"{module}: keys, types and remote are names with spaces between them")
        if module != "_common" and not {"types", "remote"} & own.keys():
            raise ValueError(f"{module} has no types")
        if find_spec(f"kvcalc.model.families.{own.get('module', 'layered')}") is None:
            raise ValueError(f"kvcalc/model/families has no {own['module']}.py")
    types = [name for own in rows.values() for key in ("types", "remote") for name in own.get(key, "").split()]
    for name in types:
        if types.count(name) > 1:
            raise ValueError(f"{name} is in two families")


def _check_defaults(rows: Mapping[str, Any]) -> None:
    _check_likes(rows)
    for name, own in rows.items():
        module = FAMILIES.get(name) or REMOTE_FAMILIES.get(name)
        if module is None and not name.startswith("_"):
            raise ValueError(f"{name} is a type of no family")
        modules = FAMILIES.values() if module is None else (module,)
        _check_fields(name, own, COMMON_KEYS.union(*map(keys_of, modules), _IN_NO_PRESET, {"like"}))


def _check_layers(rows: Mapping[str, Any]) -> None:
    from kvcalc.model.families.layered import BODY, FIELDS, FORMULAS, called_by

    _check_likes(rows)
    for name, own in rows.items():
        row = joined(rows, name)
        _check_fields(name, own, FIELDS)
        body = row.get("body") or {}
        _check_fields(f"the body of {name}", body, BODY)
        Experts(**(body.get("experts") or {}))
        family = FAMILIES.get(name) or REMOTE_FAMILIES.get(name)
        if family is None and not name.startswith("_"):
            raise ValueError(f"{name} is a type of no family")
        if "kinds" not in row and not name.startswith("_"):
            raise ValueError(f"{name} has no kinds")
        stated = [part[field] for part in (row, body) for field in FORMULAS if field in part]
        if find_spec(f"kvcalc.model.families.{row.get('functions', 'layered')}") is None:
            raise ValueError(f"kvcalc/model/families has no {row['functions']}.py")
        named = {*row.get("where", ()), *row.get("each", ()), *body.get("each", ())}
        known = {*called_by(row), *FUNCTIONS, *named, "num_layers", "order", "shape"}
        found = set[str]().union(*map(names_in, stated))
        unknown = set[str]() if family is None else found - known - keys_of(family) - COMMON_KEYS - _IN_NO_PRESET
        if unknown:
            raise ValueError(f"a formula of {name} names {unknown.pop()}, which is no function and no key of {family}")
    for name, family in {**FAMILIES, **REMOTE_FAMILIES}.items():
        if module_of(family).__name__.endswith(".layered") and name not in rows:
            raise ValueError(f"layers.yaml has no row {name}, a type of {family}")


def _check_wrappers(rows: Mapping[str, Any]) -> None:
    from kvcalc.model.hf_config import known_types

    types = known_types()
    _check_fields("wrappers", rows, {"library", "remote", "sizes"})
    for outer, own in {**rows["library"], **rows["remote"]}.items():
        row = own if isinstance(own, dict) else {"inner": own}
        _check_fields(outer, row, {"inner", "keys", "forced"})
        if row.get("inner", types[0]) not in types:
            raise ValueError(f"{outer}: {row['inner']} is not known")
    for name, sizes in rows["sizes"].items():
        if name not in types or [*map(type, sizes)] != [int] * 3:
            raise ValueError(f"{name} must be a known type, and have three sizes")


def _check_engine_releases(rows: Mapping[str, Any]) -> None:
    for engine, own in rows.items():
        _check_fields(engine, own, {"spelled", "counts_builds", "example", "stable", "released"})
        re.compile(own["spelled"])
        for row in own["released"].split(", ") if "released" in own else ():
            if not re.fullmatch(r"20\d\d-[01]\d-[0-3]\d \S+", row):
                raise ValueError(f"{engine}: {row} is not a day and a release")


def _check_instances(rows: Mapping[str, Any]) -> None:
    from kvcalc.throughput.hardware import find_devices

    names = [name for row in rows.values() for name in row.split()]
    for devices in rows:
        find_devices(devices)
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{name} is there twice")


def _check_unread(rows: Mapping[str, Any]) -> None:
    from kvcalc.model.hf_config import known_types

    for engine, names in rows.items():
        _check_types(f"unread in {engine}", names, {*known_types()})


def _check_types(whose: str, names: str, known: Collection[str]) -> None:
    own = names.split()
    for name in own:
        if name not in known or own.count(name) > 1:
            raise ValueError(f"{whose}: {name} is not known, or there twice")


def _check_releases(rows: Mapping[str, Any]) -> None:
    from kvcalc.model.wrappers import WRAPPERS

    for name, own in rows["recipes"].items():
        _check_fields(name, own, {"stored", "config", "changes", "dtype", "like"})
    _check_likes(rows["recipes"])
    recipes = {"", *rows["recipes"]}
    for own in (*rows["first_hand"], *rows["second_hand"]):
        name = own.get("name") or own["names"]
        _check_fields(name, own, _RELEASE)
        _check_fields(name, own.get("quantized", {}).values(), recipes)
        tower = own.get("tower", "unknown")
        _check_fields(name, [tower["model_type"] if isinstance(tower, dict) else tower], {"none", "unknown", *WRAPPERS})
        if not isinstance(own.get("sizes", ""), str):
            raise ValueError(f"{name}: sizes must be text")


def _check_names(rows: Mapping[str, Any]) -> None:
    from kvcalc.model.published import RECIPES

    own, mlx = rows["own_suffixes"], {**rows["mlx_copies"]["anybodys"], **rows["mlx_copies"]["suffixes"]}
    for table in (rows["suffixes"], mlx, *own.values()):
        _check_fields("a suffix", [recipe for recipe in table.values() if recipe and table is not mlx], RECIPES)
        for place, suffix in enumerate(table):
            if any(suffix.endswith(earlier) for earlier in list(table)[:place]):
                raise ValueError(f"{suffix} must stand before its own end")
    if any(name != name.casefold() for name in (*own, *rows["suffixes"], *mlx, *rows["renamed"])):
        raise ValueError("names of organisations and suffixes are in lower case")


def _check_ollama(rows: Mapping[str, Any]) -> None:
    types = shipped_table("names")["gguf"]["types"].split()
    for model, row in rows.items():
        _check_fields(model, row, {"latest", "type", "tags"})
        if row["latest"] not in row["tags"]:
            raise ValueError(f"{model}: its latest is no tag")
        stated = row.get("type", {})
        _check_fields(model, stated.values() if isinstance(stated, dict) else [stated], types)


def _check_towers(tables: Mapping[str, Any]) -> None:
    from kvcalc.model.towers.rules import spelled_out

    _check_fields("towers", tables, {"vision", "audio", "images", "repositories"})
    for name in ("vision", "audio", "images"):
        _check_fields(name, tables[name], {"by_model", "by_tower", "else_by_model"})
        for rows in tables[name].values():
            for rule, types, arguments in spelled_out(rows):
                if "." in rule or name == "images":
                    _check_made("towers", rule, ", ".join(types), arguments, 2 if name == "images" else 3)
                else:
                    _check_fields("tower_weights", [rule], rows_of("tower_weights"))


def _check_tower_weights(rows: Mapping[str, Any]) -> None:
    """Count every tower with its defaults, so that each formula is computed once."""
    from kvcalc.model.reader import ConfigReader
    from kvcalc.model.towers.weights import PARTS, count

    _check_likes(rows)
    for name, own in rows.items():
        _check_fields(name, own, PARTS)
        row = joined(rows, name)
        needed = {key: 64 for key, default in row.get("model", {}).items() if default is None}
        try:
            split, whole = count(row, ConfigReader({}, name, ""), 64, ConfigReader(needed, name, ""))
        except (KeyError, SyntaxError, TypeError, ValueError) as error:
            raise ValueError(f"{name}: {error!r}") from None
        if type(split + whole) is not int:
            raise ValueError(f"{name}: not a whole number of parameters")


def _check_architectures(rows: Mapping[str, Any]) -> None:
    from kvcalc.model.gguf.architectures import functions_of
    from kvcalc.model.gguf.keys import Facts
    from kvcalc.model.hf_config import known_types

    types = known_types()
    _check_likes(rows)
    for name, own in rows.items():
        _check_fields(name, own, {"like", "type", "build", "with", "check", "keys", "only"})
        if own.get("type") not in types:
            raise ValueError(f"{name}: {own.get('type')} is not known")
        if "build" in own:
            _check_made("gguf", own["build"], name, own.get("with"), 2)
        known = {*functions_of(Facts({f"{name}.block_count": 1}, name, name)), *_COMMON_FACTS}
        _check_fields(
            name, {*names_in(own.get("keys", {})), *names_in(own.get("check", [])), *own.get("only", "").split()}, known
        )


def _check_made(folder: str, function: str, whose: str, arguments: Mapping[str, Any] | None, taken: int) -> None:
    """ValueError if the function does not take these arguments after `taken` others."""
    try:
        signature(made(folder, function, arguments)).bind(*range(taken))
    except (AttributeError, ImportError, TypeError, ValueError) as error:
        raise ValueError(f"{function} of {whose}: {error}") from None


def _is_list(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _is_mapping(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(key, str) for key in value)


def _is_table(value: object) -> bool:
    match value:
        case [str(), [*keys], int(), int()]:
            return _is_list(keys)
    return False


def _is_whole(value: object) -> bool:
    return value is None or (isinstance(value, int) and not isinstance(value, bool))


def _is_made_by(make: Callable[[Any], object]) -> Callable[[object], bool]:
    def is_made(value: object) -> bool:
        try:
            make(value)
        except (AttributeError, KeyError, TypeError, ValueError):
            return False
        return True

    return is_made


_MADE: dict[str, Callable[[object], bool]] = {
    "mlp": lambda value: value in ("gated", "fused", "plain", "xielu"),
    "qk_norm": lambda value: value in ("", "head", "head_bias", "width"),
    "slides": _is_made_by(pattern_of),
    "experts": _is_made_by(lambda value: Experts(**value)),
    "tables": lambda value: isinstance(value, list) and all(map(_is_table, value)),
    "mlp_names": lambda value: _is_list(value) and len(value) == 2,  # type: ignore[arg-type]  # a list by then
}
_OF_TYPE: dict[str, Callable[[object], bool]] = {
    "str": lambda value: isinstance(value, str),
    "bool": lambda value: isinstance(value, bool),
    "bool | str": lambda value: isinstance(value, (bool, str)),
    "int | None": _is_whole,
    "tuple[str, ...]": _is_list,
    "frozenset[str] | None": _is_list,
    "Mapping[str, str]": lambda value: _is_mapping(value) and all(isinstance(item, str) for item in value.values()),  # type: ignore[attr-defined]
    "Mapping[str, int]": lambda value: _is_mapping(value) and all(map(_is_whole, value.values())),  # type: ignore[attr-defined]
    "Mapping[str, object]": _is_mapping,
    "Mapping[str, Any]": _is_mapping,
}
_CHECKS: dict[str, Callable[[object], bool]] = {
    **{name: _MADE.get(name) or _OF_TYPE[kind] for name, kind in Decoder.__annotations__.items()},
    "bias": _OF_TYPE["bool | str"],
    **dict.fromkeys(("kv_heads", "head_dim", "window", "intermediate_size"), lambda value: type(value) is int),
    **dict.fromkeys(("like", "gguf"), lambda value: isinstance(value, str) or _is_list(value)),
}


def check_decoders(rows: Mapping[str, Any]) -> None:
    """Raise ValueError for a row with an unknown field, a value of another type, or a row that comes after it."""
    before: set[str] = set()
    known = {*CALLED, *FUNCTIONS, *COMMON_KEYS, *_CHECKS, "multi_query_group_num"}
    for name, own in rows.items():
        if not _is_mapping(own):
            raise ValueError(f"{name} is not a mapping")
        for field, value in own.items():
            if field not in _CHECKS:
                raise ValueError(f"{name} has no {field}: its fields are {', '.join(sorted(_CHECKS))}")
            if not _CHECKS[field](value):
                raise ValueError(f"{name}: {field} cannot be {value!r}")
        _check_fields(f"{name}: computed", own.get("computed", {}), _CHECKS)
        _check_fields(f"{name}: computed: a formula", names_in(own.get("computed", {})), known)
        like = own.get("like", [])
        for other in [like] if isinstance(like, str) else like:
            if other not in before:
                raise ValueError(f"{name} is like {other}, which is not above it")
        before.add(name)
