"""Read families whose layers are of a few kinds, by their rows in presets/types/layers.yaml, which says what a row has.

A row's formulas may name the functions of `layer_functions`, `layer_orders` and `family_functions`, the names of its
`where`, and keys of the config, which must then be integers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from importlib import import_module
from types import FunctionType, ModuleType
from typing import Any, TypeVar

from kvcalc.model.experts import sparse_layers, with_defaults
from kvcalc.model.families import family_functions, layer_functions, layer_orders
from kvcalc.model.families.common import NORMS, decoder_body
from kvcalc.model.families.layer_functions import FUNCTIONS
from kvcalc.model.families.layer_row import Row
from kvcalc.model.reader import Body, ConfigReader
from kvcalc.model.spec import ModelSpec
from kvcalc.model.tensors import Weight
from kvcalc.model.type_tables import defaults_of, row_of

Made = TypeVar("Made")

FIELDS = (
    "like functions instead as layers nested assume refuse only check where shape kinds each order then positions spec "
    "body"
).split()
"""What a row may have."""
FORMULAS = (
    "assume instead check where shape kinds each order then spec blocks dense sparse of_kind hidden_size more outer "
    "rows sparse_layers"
).split()
"""The parts with formulas, of a row or of its body."""
BODY = (
    "assume blocks check dense each embedding experts has_head head hidden_size last more norm_bias norms of_kind only "
    "outer prefix rows sparse sparse_layers tied uncounted"
).split()
"""What its body may have."""


def taking_rows(*modules: ModuleType) -> dict[str, Callable[..., Any]]:
    """The public functions of modules of this folder that also take the row: formulas may call them."""
    functions = [(module.__name__, name, one) for module in modules for name, one in vars(module).items()]
    return {
        name: one for module, name, one in functions
        if isinstance(one, FunctionType) and one.__module__ == module and one.__code__.co_varnames[:1] == ("row",)
    }  # fmt: skip


CALLED = taking_rows(layer_functions, layer_orders, family_functions)
"""The functions that the formulas of all rows may call, and that also take the row."""


def called_by(facts: Mapping[str, Any]) -> Mapping[str, Callable[..., Any]]:
    """These functions, and those of the module that a row names."""
    functions = facts.get("functions")
    return {**CALLED, **taking_rows(import_module(f"kvcalc.model.families.{functions}"))} if functions else CALLED


def read(config: ConfigReader, model_type: str) -> ModelSpec:
    """Read a config of a type that has a row. Layers of the same kind have the same mixers."""
    facts = row_of("layers", model_type)
    called = called_by(facts)
    for other, condition in facts.get("instead", {}).items():
        if Row(facts, config, FUNCTIONS, called).value(condition):
            return read(config, other)
    stated = {}
    for key, names in facts.get("nested", {}).items():
        stated.update((config.nested(key) if key else config).shares(names))
    config = with_defaults(config, {**defaults_of(model_type), **stated})
    first = Row(facts, config, FUNCTIONS, called)
    config = config.with_defaults({key: first.value(formula) for key, formula in facts.get("assume", {}).items()})
    row = Row(facts, config, FUNCTIONS, called)
    row["model_type"] = model_type
    _check(row, facts, "refuse")
    order, body = _order(row), facts.get("body")
    spec = config.model(
        facts.get("as", model_type), _by_layer(row, facts, order, row["mixers_of"]),
        None if body is None else partial(_body, row, body, order),
        attention=row["shape"], positions=tuple(facts.get("positions", ["max_position_embeddings"])),
    )  # fmt: skip
    return spec._replace(**{field: row.value(formula) for field, formula in facts.get("spec", {}).items()})


def _check(row: Row, facts: Mapping[str, Any], refused: str) -> None:
    """Refuse what a row or its body does not support."""
    for key, why in facts.get(refused, {}).items():
        if why is not None:
            row.reader.refuse(key, why)
    for path, values in facts.get("only", {}).items():
        of, _, key = path.rpartition(".")
        row.inside(of).refuse_other(key, *values)
    row.all_of(facts.get("check", []))


def _order(row: Row) -> list[str]:
    """The kind of every layer."""
    stated = row.facts.get("order")
    if stated is None:
        row["order"] = [*row.facts["kinds"]] * row["num_layers"]
    else:
        row["order"] = next(order for order in map(row.value, stated) if order is not None)
    order: list[str] = row.value(row.facts.get("then", "order"))
    row["order"] = order
    return order


def _by_layer(row: Row, part: Mapping[str, Any], kinds: list[str], made_of: Callable[[str], Made]) -> list[Made]:
    """What is made of the kind of every layer. Layers of one kind, with the same values in `each`, have the same."""
    each = {name: row.value(formula) for name, formula in part.get("each", {}).items()}
    made: dict[tuple[Any, ...], Made] = {}
    for key in (keys := [*zip(kinds, *each.values())]):
        if key not in made:
            row.update(zip(each, key[1:]))
            made[key] = made_of(key[0])
    return [made[key] for key in keys]


def _body(row: Row, stated: Mapping[str, Any], order: list[str]) -> Body:
    """The weights outside the mixers."""
    _check(row, stated, "uncounted")
    config = row.reader.with_defaults({key: row.value(formula) for key, formula in stated.get("assume", {}).items()})
    has_head = stated.get("has_head", True)
    if isinstance(stated.get("tied"), str) or not has_head:
        config = config.with_values({"tie_word_embeddings": not has_head or row.value(stated["tied"])})
    row = Row(row.facts, config, FUNCTIONS, row.called)
    passed = {name: stated[name] for name in ("last", "embedding", "head", "prefix", "norm_bias") if name in stated}
    body = decoder_body(
        config, _mlps(row, stated, order), *row.weights(stated.get("outer", [])),
        hidden_size=row.value(stated.get("hidden_size", "hidden_size")), norms=stated.get("norms", NORMS),
        tied=stated.get("tied") is True, blocks=tuple(row.all_of(stated.get("blocks", []))), **passed,
    )  # fmt: skip
    norms, around = (*body.norms, *row.weights(stated.get("more", []))), body.around
    if around is not None:
        rows = row.value(stated.get("rows", around.embedding.rows))
        around = around._replace(embedding=around.embedding._replace(rows=rows), tied=around.tied and has_head)
    return Body(around, body.mlps, norms)


def _mlps(row: Row, stated: Mapping[str, Any], order: list[str]) -> list[tuple[Weight, ...]]:
    """The MLP or the experts of every layer."""
    if "of_kind" in stated:
        kinds, formulas = order, stated["of_kind"]
    else:
        number: int = row["num_layers"]
        sparse: Collection[int] = ()
        if "sparse_layers" in stated:
            sparse = row.value(stated["sparse_layers"])
        elif row.rule is not None:
            sparse = sparse_layers(row.reader, row.rule, number)
        among = frozenset(sparse)
        kinds = ["sparse" if layer in among else "dense" for layer in range(number)]
        formulas = {
            "dense": ["gated_mlp('mlp', hidden_size, intermediate_size)"], "sparse": ["experts()"], **stated
        }  # fmt: skip
    return _by_layer(row, stated, kinds, lambda kind: row.weights(formulas.get(kind, [])))
