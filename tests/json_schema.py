"""Write kvcalc/schema.json, the JSON Schema, from the declarations in kvcalc/documents.

    python -m tests.json_schema --write

The declarations are read and not imported: the text below a field is its meaning.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Iterator
from itertools import repeat
from typing import Any

from tests.conftest import ROOT

FOLDER = ROOT / "kvcalc" / "documents"
TARGET = ROOT / "kvcalc" / "schema.json"

HEAD = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "title": "kvcalc documents",
    "description": "$defs holds one schema per command. Sizes are in bytes, lengths in tokens, times in seconds; "
    "the keys name the unit.",
}
_SCALARS = {"str": "string", "int": "integer", "float": "number", "bool": "boolean", "None": "null"}
Node = dict[str, Any]


class Declarations:
    """The classes and aliases of the declarations by their names, in the order of their files."""

    def __init__(self) -> None:
        self.classes: dict[str, ast.ClassDef] = {}
        self.aliases: dict[str, tuple[ast.expr, str]] = {}
        self.limits: dict[str, tuple[str, Node]] = {}
        self.shared: set[str] = set()
        for file in ("fields", "estimates", "loads", "measurements", "lists", "parts"):
            body = ast.parse((FOLDER / f"{file}.py").read_text()).body
            for node, after in zip(body, [*body[1:], None]):
                if isinstance(node, ast.ClassDef):
                    self.classes[node.name] = node
                    self.shared |= {node.name} if file == "fields" else set()
                elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                    self.limits[node.targets[0].id] = _limited(node.value)
                elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                    assert isinstance(node.value, ast.Constant)
                    alias = ast.parse(str(node.value.value), mode="eval").body
                    self.aliases[node.target.id] = alias, _text(after)

    def schema(self) -> Node:
        """The JSON Schema."""
        found: dict[str, Node] = {}
        inside = {name for name in self.classes for other in self.classes if _is_inside(name, other, self.classes)}
        named = " ".join(ast.unparse(node) for one in self.classes.values() for node in one.body)
        # What classes inherit is no object of its own, unless a key names it or it is a document.
        bases = {_name(base) for one in self.classes.values() for base in one.bases} & self.classes.keys()
        bases = {one for one in bases if not re.search(rf"\b{one}\b", named)}
        bases -= {one for one in bases if (ast.get_docstring(self.classes[one]) or "").startswith("kvcalc")}
        for name, declared in self.classes.items():
            if name not in inside and name not in self.shared | bases:
                found[_snake(name)] = self.object(declared)
        for name, (alias, meaning) in self.aliases.items():
            found[_snake(name)] = {"description": meaning, **self.type_of(alias, name)}
        return {**HEAD, "$defs": found}

    def object(self, declared: ast.ClassDef) -> Node:
        """The schema of a class."""
        found: Node = {"type": "object"}
        meaning = ast.get_docstring(declared)
        if meaning:
            found["description"] = " ".join(meaning.split())
        properties: dict[str, Node] = {}
        required = []
        for owner, node, after in self.body(declared):
            if not isinstance(node, ast.AnnAssign):
                continue
            assert isinstance(node.target, ast.Name)
            key, kind = node.target.id.rstrip("_"), node.annotation  # a key may be a word of Python's, such as `try`
            if isinstance(kind, ast.Subscript) and _name(kind.value) == "NotRequired":
                kind = kind.slice
            else:
                required.append(key)
            properties[key] = {**self.type_of(kind, owner + _camel(key))}
            # The meaning of an object that may be null is that of its key.
            meanings = [option.pop("description", "") for option in properties[key].get("anyOf", ())]
            if _text(after) or any(meanings):
                properties[key]["description"] = _text(after) or "".join(meanings)
        if "Document" in map(_name, declared.bases):
            properties = {"schema_version": properties.pop("schema_version"), **properties}
            required.insert(0, required.pop(required.index("schema_version")))
        is_open = [_name(base) for base in declared.bases] == ["Open"]
        return {**found, "properties": properties, "required": required, "additionalProperties": is_open}

    def body(self, declared: ast.ClassDef) -> Iterator[tuple[str, ast.stmt, ast.stmt | None]]:
        """The statements of a class, each with the class and the next one, and then those of the class it inherits."""
        yield from zip(repeat(declared.name), declared.body, [*declared.body[1:], None])
        for base in declared.bases:
            if _name(base) in self.classes:
                yield from self.body(self.classes[_name(base)])

    def type_of(self, kind: ast.expr, inside: str) -> Node:
        """The schema of a type. An object of the class `inside` is described in place."""
        name = _name(kind)
        if name in self.limits:
            base, limits = self.limits[name]
            return {"type": _SCALARS[base], **limits}
        if name in self.classes:
            return self.object(self.classes[name]) if name == inside else {"$ref": f"#/$defs/{_snake(name)}"}
        if name == "Any":
            return {}
        if name:
            return {"type": _SCALARS[name]}
        if isinstance(kind, ast.BinOp):
            return {"anyOf": [self.type_of(option, inside) for option in _options(kind)]}
        assert isinstance(kind, ast.Subscript), ast.dump(kind)
        outer = _name(kind.value)
        if outer == "Literal":
            values = ast.literal_eval(kind.slice)
            if not isinstance(values, tuple):
                return {"const": values} if isinstance(values, int) else {"enum": [values]}
            return {"enum": list(values)}
        if outer == "list":
            items = self.type_of(kind.slice, f"{inside}Item")
            return {"type": "array", **({"items": items} if items else {})}
        assert isinstance(kind.slice, ast.Tuple)
        first, second = kind.slice.elts
        if outer == "dict":
            values = self.type_of(second, f"{inside}Value")
            return {"type": "object", **({"additionalProperties": values} if values else {})}
        assert outer == "Annotated"
        return {**self.type_of(first, inside), **ast.literal_eval(second)}


def _limited(value: ast.expr) -> tuple[str, Node]:
    assert isinstance(value, ast.Subscript)
    assert isinstance(value.slice, ast.Tuple)
    base, limits = value.slice.elts
    return _name(base), ast.literal_eval(limits)


def _is_inside(name: str, other: str, classes: dict[str, ast.ClassDef]) -> bool:
    """Whether a class is named after another one and one of its keys."""
    return name != other and any(
        isinstance(node, ast.AnnAssign)
        and isinstance(node.target, ast.Name)
        and name in (other + _camel(node.target.id), f"{other}{_camel(node.target.id)}Item")
        and re.search(rf"\b{name}\b", ast.unparse(node.annotation))
        for node in classes[other].body
    )


def _options(kind: ast.expr) -> list[ast.expr]:
    if isinstance(kind, ast.BinOp):
        return [*_options(kind.left), *_options(kind.right)]
    return [kind]


def _name(node: ast.expr) -> str:
    if isinstance(node, ast.Constant) and node.value is None:
        return "None"
    return node.id if isinstance(node, ast.Name) else ""


def _text(node: ast.stmt | None) -> str:
    """The text of a statement that is only a string."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return " ".join(str(node.value.value).split())
    return ""


def _camel(name: str) -> str:
    return "".join(part.capitalize() for part in name.split("_"))


def _snake(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


def generate() -> str:
    """The text of kvcalc/schema.json."""
    return _written(Declarations().schema(), 0) + "\n"


def _written(value: Any, depth: int) -> str:
    """A value as JSON, on one line if it is short."""
    line = json.dumps(value, ensure_ascii=False)
    if len(line) + depth <= 120 or not isinstance(value, (dict, list)):
        return line
    if isinstance(value, list):
        items = [_written(item, depth + 1) for item in value]
    else:
        items = [f"{json.dumps(key)}: {_written(item, depth + 1)}" for key, item in value.items()]
    first, last = "{}" if isinstance(value, dict) else "[]"
    inner = f",\n{' ' * (depth + 1)}".join(items)
    return f"{first}\n{' ' * (depth + 1)}{inner}\n{' ' * depth}{last}"


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        raise SystemExit(__doc__)
    TARGET.write_text(generate())
