"""Only the writers build text of a shell, YAML, HTML or a table around a value."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.conftest import ROOT

PACKAGE = ROOT / "kvcalc"
WRITERS = PACKAGE / "writing"
# What quotes or writes in these languages, and the modules besides the writers that read with it.
LIBRARIES = {
    "shlex": {"attention/backends/compiled.py", "reading/manifests.py", "reading/service_files.py"}, "html": set(),
    "csv": {"traces/csv_rows.py"}, "yaml": {"model/yaml_mapping.py", "reading/documents.py"}, "xml": set(),
}  # fmt: skip
# Marks of these languages, at the places where text around a value has them.
MARKS = re.compile(
    r"""
    </?[a-z!?] | ["'/]> | &\w+; | &\#          # tags and entities
    | ^["'`] | ["'`]$ | \$\{?$ | \$\(          # quotes and variables
    | (^|\s)(>>?|<|\|\|?|&&)(\s|$)            # operators of a shell
    | (^|\s)--?[a-z][\w-]*[ =]$              # an option and its value
    | (^|\n)\s*\#                            # comments
    | \n | ^---                              # lines, which may begin something else
    """,
    re.VERBOSE,
)


def values_in(node: ast.expr) -> list[ast.expr]:
    """The parts of an expression that composes text, or nothing."""
    if isinstance(node, ast.JoinedStr):
        return node.values
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Mod)):
        return [part for side in (node.left, node.right) for part in (values_in(side) or [side])]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("format", "join"):
        return [node.func.value, *node.args, *(keyword.value for keyword in node.keywords)]
    return []


def composed(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and literal text of every composition of text with marks around a value. Errors and notes are prose."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "").endswith(("Error", "Trouble", "Note")):
            continue
        if isinstance(node, ast.expr):
            parts = values_in(node)
            literals = [part.value for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, str)]
            if len(literals) < len(parts) and any(map(MARKS.search, literals)):
                yield node.lineno, "...".join(literals)
                continue
        yield from composed(node)


def uses_writers(tree: ast.AST) -> bool:
    """Whether a module uses the writers of a language that a program reads."""
    languages = ("shell", "manifest", "html")
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("kvcalc.writing"):
            names = {alias.name for alias in node.names} | {(node.module or "").rpartition(".")[2]}
            if names & set(languages):
                return True
    return False


@cache
def sources() -> dict[Path, ast.Module]:
    """All modules but the writers."""
    return {path: ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py")) if WRITERS not in path.parents}


@cache
def emitters() -> list[Path]:
    """A module that passes parts to a writer's user, such as the texts of a report, is an emitter too."""
    return [
        path for path, tree in sources().items()
        if uses_writers(tree) or path.is_relative_to(PACKAGE / "output" / "report")
        or path.is_relative_to(PACKAGE / "planning" / "manifests")
        or (path.name == "command.py" and "engines" in path.parts)
    ]  # fmt: skip


def test_an_emitter_writes_no_text_of_a_language() -> None:
    found = {str(path.relative_to(PACKAGE)): [*composed(sources()[path])] for path in emitters()}
    assert {path: lines for path, lines in found.items() if lines} == {}


def test_every_emitter_is_known() -> None:
    names = {str(path.relative_to(PACKAGE)) for path in emitters()}
    assert names >= {
        "engines/command.py", "engines/vllm/command.py", "engines/sglang/command.py", "engines/tensorrt_llm/command.py",
        "engines/llama_cpp/command.py", "planning/manifests/compose.py", "planning/manifests/kubernetes.py",
        "planning/manifests/pools.py", "planning/manifests/server.py", "planning/plan/disaggregated/rows.py",
        "planning/plan/document.py", "output/report/page.py",
        "output/report/charts.py", "output/human/server.py", "output/plot.py", "cli/report.py", "cli/completion.py",
    }  # fmt: skip


def test_only_writers_quote() -> None:
    for path, tree in sources().items():
        where = path.relative_to(PACKAGE).as_posix()
        for node in ast.walk(tree):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            modules += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for module in modules:
                readers = LIBRARIES.get(module.partition(".")[0])
                assert readers is None or where in readers, f"{where} imports {module}"
            assert not (isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("Markup", "Template")), where
            # A dollar sign is doubled in manifests alone.
            assert not (isinstance(node, ast.Constant) and node.value in ("$$", "$$(")), where


OLD = {
    "a comment of a manifest": 'head = "".join(f"# {line}\\n" for line in comments)',
    "a comment of a script": 'lines.append(f"# {role}: {hosts}{on}")',
    "a mount": 'volume = f"{folder}:{folder}:ro" + " --mount "',
    "a file first": 'text = f"echo {quoted} > {file} && {command}"',
    "an option at the end": 'text = f"{command} --kv-transfer-config {quoted}"',
    "a command first": 'command = f"pip install {name} && exec {command}"',
    "an element": "text = f'<rect class=\"{kind}\">'",
    "by addition": 'text = "<p>" + name + "</p>"',
    "by a percent sign": 'text = "<p>%s</p>" % name',
    "by format": 'text = "<p>{}</p>".format(name)',
    "a document": 'text = "---\\n" + name',
    "between names": 'text = " && ".join(commands)',
}


@pytest.mark.parametrize("code", OLD.values(), ids=OLD)
def test_what_was_written_by_hand_before_is_found(code: str) -> None:
    assert [*composed(ast.parse(code))]


def test_prose_and_errors_are_no_language() -> None:
    code = 'text = f"{name} with {engine} on {used}, made by kvcalc plan"\nraise UsageError(f"--emit {kind}: <{name}>")'
    assert not [*composed(ast.parse(code))]
