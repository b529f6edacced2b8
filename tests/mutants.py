"""Mutation testing: change one thing at a time in a file and list the changes that its tests do not notice.

    python -m tests.mutants                                   all files of TESTS
    python -m tests.mutants kvcalc/throughput/roofline.py     one of them
    python -m tests.mutants FILE --tests tests/test_x.py      another file, with the tests that should notice

A mutant is compiled in memory in a forked process, so the checkout is not changed and a run may be interrupted. Only
tests that call the code in their own process can notice it.
"""

from __future__ import annotations

import argparse
import ast
import copy
import os
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent

# The tests of a file's rules, fastest first, because a mutant's run ends at the first failure.
TESTS = {
    "kvcalc/throughput/roofline.py": ("tests/throughput/test_steps.py",),
    "kvcalc/engines/vllm/pages.py": ("tests/engines/test_vllm_pages.py",),
    "kvcalc/memory/sharding.py": ("tests/memory/test_shares.py",),
    "kvcalc/planning/device/budget.py": ("tests/planning/test_budget.py",),
}

_BINARY: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult, ast.Pow: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
}  # fmt: skip
_COMPARE: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
_NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}


class Mutant(NamedTuple):
    """One change: its place, the code before and after, and the whole changed file."""

    line: int
    before: str
    after: str
    tree: ast.Module


def changes(node: ast.AST) -> Iterator[ast.AST]:
    """The replacements for `node`. Each is an arithmetic or logical mistake, or leaves a part out."""
    if isinstance(node, ast.Constant):
        if isinstance(node.value, bool):
            yield ast.Constant(not node.value)
        elif isinstance(node.value, (int, float)):
            yield ast.Constant(node.value + 1 if isinstance(node.value, int) else 2 * node.value or 1.0)
    elif isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        yield ast.BinOp(node.left, _BINARY[type(node.op)](), node.right)
        if isinstance(node.op, (ast.Add, ast.Sub)):
            yield node.left
            yield node.right
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.Not)):
        yield node.operand
    elif isinstance(node, ast.BoolOp):
        yield ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values)
        for place in range(len(node.values)):
            rest = [value for other, value in enumerate(node.values) if other != place]
            yield rest[0] if len(rest) == 1 else ast.BoolOp(node.op, rest)
    elif isinstance(node, ast.Compare) and len(node.ops) == 1:
        yield ast.Compare(node.left, [_COMPARE[type(node.ops[0])]()], node.comparators)
    elif isinstance(node, ast.IfExp):
        yield node.body
        yield node.orelse
    elif isinstance(node, ast.Name) and node.id in _NAMES and isinstance(node.ctx, ast.Load):
        yield ast.Name(_NAMES[node.id], node.ctx)
    elif isinstance(node, ast.Tuple) and isinstance(node.ctx, ast.Load) and len(node.elts) > 1:
        # Remove one name from a set of names. A row of numbers must keep its length.
        if all(isinstance(item, ast.Constant) and isinstance(item.value, str) for item in node.elts):
            for place in range(len(node.elts)):
                yield ast.Tuple([item for other, item in enumerate(node.elts) if other != place], node.ctx)
    elif isinstance(node, (ast.If, ast.comprehension)):
        yield from _conditions(node)
    elif isinstance(node, ast.AugAssign):
        yield ast.Pass()
        yield ast.Assign([node.target], node.value)


def _conditions(node: ast.If | ast.comprehension) -> Iterator[ast.AST]:
    if isinstance(node, ast.If):
        for value in (True, False):
            yield ast.If(ast.Constant(value), node.body, node.orelse)
    else:
        for place in range(len(node.ifs)):
            ifs = [test for other, test in enumerate(node.ifs) if other != place]
            yield ast.comprehension(node.target, node.iter, ifs, node.is_async)


# Code that is only for readers or for the type checker.
_SKIPPED_FIELDS = {"annotation", "returns", "decorator_list", "type_params"}
_SKIPPED_NODES = (ast.Raise, ast.JoinedStr, ast.Import, ast.ImportFrom)


def _places(node: ast.AST, path: tuple[tuple[str, int | None], ...] = ()) -> Iterator[tuple[Any, ast.AST]]:
    """Every node that may be changed, with the path to it."""
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        return
    yield path, node
    for name, value in ast.iter_fields(node):
        if name in _SKIPPED_FIELDS:
            continue
        for place, child in enumerate(value) if isinstance(value, list) else ((None, value),):
            if isinstance(child, ast.AST) and not isinstance(child, _SKIPPED_NODES):
                yield from _places(child, (*path, (name, place)))


def mutants(source: str) -> list[Mutant]:
    """Every mutant of a file."""
    tree = ast.parse(source)
    found = []
    line = 0
    for path, node in _places(tree):
        line = getattr(node, "lineno", line)
        for change in changes(node):
            ast.fix_missing_locations(ast.copy_location(change, node))
            before, after = (ast.unparse(part).split("\n")[0] for part in (node, change))
            changed: Any = copy.deepcopy(tree)
            holder = changed
            for name, place in path[:-1]:
                holder = getattr(holder, name) if place is None else getattr(holder, name)[place]
            name, place = path[-1]
            if place is None:
                setattr(holder, name, copy.deepcopy(change))
            else:
                getattr(holder, name)[place] = copy.deepcopy(change)
            found.append(Mutant(line, before, after, ast.fix_missing_locations(changed)))
    return found


def _run_tests(path: Path, tree: ast.Module | None, tests: tuple[str, ...]) -> int:
    """Run pytest in this forked process with the file at `path` replaced, and return its exit code."""
    if tree is not None:
        code = compile(tree, str(path), "exec", dont_inherit=True)
        own = SourceFileLoader.get_code

        def get_code(loader: SourceFileLoader, fullname: str) -> CodeType | None:
            return code if loader.path == str(path) else own(loader, fullname)

        SourceFileLoader.get_code = get_code  # type: ignore[method-assign, assignment]
    import pytest

    # Plugins are loaded by name, because searching for them takes longer than most tests. The project's pytest settings
    # are not used.
    plugins = "-p pytest_timeout -p _hypothesis_pytestplugin -p no:cacheprovider --hypothesis-seed=0"
    return int(pytest.main(["-o", "addopts=", "-x", "-q", "--assert=plain", *plugins.split(), *tests]))


def survives(path: Path, tree: ast.Module | None, tests: tuple[str, ...], seconds: float) -> bool:
    """Whether all tests pass. A mutant that does not end counts as noticed."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            nowhere = os.open(os.devnull, os.O_RDWR)
            for stream in (0, 1, 2):
                os.dup2(nowhere, stream)
            status = _run_tests(path, tree, tests)
        finally:
            os._exit(status)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status) == 0
        time.sleep(0.02)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


def survivors_of(file: str, tests: tuple[str, ...], processes: int) -> float:
    """Print the mutants of `file` that its tests do not notice, and return their share in percent."""
    path = ROOT / file
    start = time.monotonic()
    if not survives(path, None, tests, 600):
        sys.exit(f"{file}: its tests fail without a mutant")
    limit = 20 + 5 * (time.monotonic() - start)
    found = mutants(path.read_text())
    with ThreadPoolExecutor(processes) as pool:
        alive = list(pool.map(lambda mutant: survives(path, mutant.tree, tests, limit), found))
    for mutant, lives in zip(found, alive):
        if lives:
            print(f"{file}:{mutant.line}: {mutant.before}  ->  {mutant.after}")
    share = 100 * sum(alive) / len(found)
    seconds = time.monotonic() - start
    print(f"{file}: {sum(alive)} of {len(found)} survive, {share:.1f} %, {seconds:.0f} s", flush=True)
    return share


def main() -> int:
    """The exit code: 1 if more than `--most` percent of a file's mutants survive."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", default=list(TESTS))
    parser.add_argument("--tests", nargs="+", help="tests to run, instead of the ones this script names")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--most", type=float, default=8.0, help="survivors allowed in each file, in per cent")
    options = parser.parse_args()
    os.chdir(ROOT)
    # Import once, for every fork, the modules that all tests need and no mutant changes.
    for name in ("_hypothesis_pytestplugin", "hypothesis", "jsonschema_rs", "pytest_timeout", "rich", "typer", "yaml"):
        __import__(name)
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["HYPOTHESIS_STORAGE_DIRECTORY"] = os.path.join(ROOT, ".pytest_cache", "mutants")
    shares = []
    for file in options.files:
        tests = tuple(options.tests or TESTS.get(file, ()))
        if not tests:
            parser.error(f"{file}: name the tests that should notice, with --tests")
        shares.append(survivors_of(file, tests, options.processes))
    return int(max(shares) > options.most)


if __name__ == "__main__":
    sys.exit(main())
