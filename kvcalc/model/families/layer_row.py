"""A row of presets/types/layers.yaml while a config is read by it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from kvcalc.model.experts import Experts
from kvcalc.model.formulas import value_of
from kvcalc.model.reader import ConfigReader
from kvcalc.model.tensors import Weight, weights

Functions = Mapping[str, Callable[..., Any]]


class Row(dict[str, Any]):
    """A row and the config that it reads: the values of the names in its formulas, each computed once."""

    def __init__(self, facts: Mapping[str, Any], reader: ConfigReader, plain: Functions, called: Functions) -> None:
        """`called` are functions that also take the row."""
        super().__init__(plain)
        self.facts, self.reader, self.called = facts, reader, called

    def __missing__(self, name: str) -> Any:
        if name in self.facts.get("where", {}):
            self[name] = self.value(self.facts["where"][name])
        elif name in self.called:
            self[name] = partial(self.called[name], self)
        elif name == "num_layers":
            stated = self.facts.get("layers", ["num_hidden_layers"])
            self[name] = self.value(stated) if isinstance(stated, str) else self.reader.num_layers(*stated)
        elif name == "shape":
            self[name] = self.value(self.facts.get("shape", "grouped()"))
        else:
            self[name] = self.reader.integer(name)
        return self[name]

    def inside(self, path: str) -> ConfigReader:
        """The object at a path, such as `attn_config`; empty is the config itself."""
        reader = self.reader
        for key in path.split(".") if path else ():
            reader = reader.nested(key)
        return reader

    def value(self, formula: Any) -> Any:
        """The value of a formula, or a value that is stated as it is."""
        return value_of(formula, self)

    def all_of(self, formulas: str | Iterable[str]) -> list[Any]:
        """The values of several formulas, or of one."""
        return [self.value(formula) for formula in ([formulas] if isinstance(formulas, str) else formulas)]

    def weights(self, formulas: Iterable[Any]) -> tuple[Weight, ...]:
        """The weights that formulas make. An object has those of a model whose config sets its keys."""
        found: list[Any] = []
        for one in formulas:
            if isinstance(one, dict):
                found += (self.weights(own) for key, own in one.items() if self.reader.is_set(key))
            else:
                found.append(self.value(one))
        return weights(*found)

    @property
    def rule(self) -> Experts | None:
        """The rule of the experts, if the body has any."""
        stated = self.facts["body"].get("experts")
        return None if stated is None else Experts(**{**stated, "names": tuple(stated.get("names", Experts().names))})
