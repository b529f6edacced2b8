"""Mutation testing: change one thing at a time in a file and list the changes that its tests do not notice.

    python -m tests.mutants                                        all parts of PARTS
    python -m tests.mutants kvcalc/engines/vllm                    the files of a folder, without other names of PARTS
    python -m tests.mutants kvcalc/simulation --sample 60 --seed 3    60 of their mutants, drawn at random
    python -m tests.mutants FILE --tests tests/test_x.py           with these tests, and not those that run the line

The first run takes a quarter of an hour longer: it runs all tests and notes in .pytest_cache which lines each runs.
Later runs do so for changed tests only, until a file of the package changes. A mutant is then tried with the tests that
run its line. It is compiled in memory in a forked process, so the checkout is not changed and a run may be interrupted.
Only tests that call the code in their own process can notice it.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from importlib.machinery import SourceFileLoader
from itertools import accumulate, pairwise
from pathlib import Path
from random import Random
from types import CodeType
from typing import Any, NamedTuple

import coverage

ROOT = Path(__file__).resolve().parent.parent


# The parts of the package whose mutants are counted apart. Each file belongs to the longest name that it begins with.
# `attention` and `measure` are none: their tests run torch's modules in processes of their own. `documents` are types.
PARTS = (
    "kvcalc/api",
    "kvcalc/cli",
    "kvcalc/engines",
    "kvcalc/engines/llama_cpp",
    "kvcalc/engines/mlx",
    "kvcalc/engines/sglang",
    "kvcalc/engines/tensorrt_llm",
    "kvcalc/engines/transformers",
    "kvcalc/engines/vllm",
    "kvcalc/memory",
    "kvcalc/memory/sharding.py",
    "kvcalc/model",
    "kvcalc/output",
    "kvcalc/planning",
    "kvcalc/planning/check",
    "kvcalc/planning/plan",
    "kvcalc/planning/plan/disaggregated",
    "kvcalc/planning/prefix",
    "kvcalc/question",
    "kvcalc/reading",
    "kvcalc/server",
    "kvcalc/server/reuse",
    "kvcalc/simulation",
    "kvcalc/throughput",
    "kvcalc/throughput/costs.py",
    "kvcalc/throughput/roofline.py",
    "kvcalc/traces",
    "kvcalc/writing",
)
# Tests of these folders start processes, need a GPU, or run torch's modules.
_NOT_RUN = {"attention", "benchmarks", "gpu", "measure", "oracle", "robust", "screens", "simulated_cuda"}
_COVERED = ROOT / ".pytest_cache" / "mutants"

_BINARY: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult, ast.Pow: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
}  # fmt: skip
_COMPARE: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
_NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}


# A mutant that most tests run is tried with tests of so many seconds, noted with coverage: those of its own room first,
# and the recorded figures, which take a minute and notice most.
_MOST_SECONDS, _MOST_SECONDS_OF_OTHERS = 600.0, 60.0
# A failure of the first few tests saves collecting the others, which are run file by file, for their fixtures.
_FIRST_TESTS = (8, 32)


class Mutant(NamedTuple):
    """One change: its place in a file, the way to the node that it replaces, and what stands there before and after.

    `last` is the last line of its statement, and `runs` whether that is in a function, and not run on import.
    """

    file: str
    line: int
    last: int
    runs: bool
    path: tuple[tuple[str, int | None], ...]
    before: ast.AST
    after: ast.AST

    def __str__(self) -> str:
        before, after = (ast.unparse(part).split("\n")[0] for part in (self.before, self.after))
        return f"{self.file}:{self.line}: {before}  ->  {after}"

    def tree(self) -> ast.Module:
        """The whole changed file."""
        changed = ast.parse((ROOT / self.file).read_text())
        holder: Any = changed
        for name, place in self.path[:-1]:
            holder = getattr(holder, name) if place is None else getattr(holder, name)[place]
        name, place = self.path[-1]
        if place is None:
            setattr(holder, name, self.after)
        else:
            getattr(holder, name)[place] = self.after
        return ast.fix_missing_locations(changed)


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


def mutants(file: str) -> list[Mutant]:
    """Every mutant of a file."""
    found = []
    tree = ast.parse((ROOT / file).read_text())
    inside = {id(part) for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) for part in _run_by(node)}
    first, last = 0, 0
    for path, node in _places(tree):
        if isinstance(node, (ast.stmt, ast.expr)):
            end = node.test if isinstance(node, ast.If) else node
            first, last = node.lineno, end.end_lineno or node.lineno
        for change in changes(node):
            ast.fix_missing_locations(ast.copy_location(change, node))
            found.append(Mutant(file, first, last, id(node) in inside, path, node, change))
    return found


def _run_by(function: ast.FunctionDef) -> Iterator[ast.AST]:
    for statement in function.body:
        yield from ast.walk(statement)


def files_of(name: str) -> list[str]:
    """The file of this name, or the files of the folder, without those that have a longer name in PARTS."""
    path = ROOT / name
    files = [str(file.relative_to(ROOT)) for file in sorted(path.rglob("*.py"))] if path.is_dir() else [name]
    longer = [part for part in PARTS if len(part) > len(name)]
    return [file for file in files if not any(file == part or file.startswith(f"{part}/") for part in longer)]


def _forked(work: Callable[[], int], seconds: float) -> int | None:
    """The exit code of `work` in a process of its own, or None if it does not end in so many seconds."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            nowhere = os.open(os.devnull, os.O_RDWR)
            for stream in (0, 1, 2):
                os.dup2(nowhere, stream)
            status = work()
        finally:
            os._exit(status)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def _pytest(tests: list[str], *options: str, plugins: tuple[object, ...] = ()) -> int:
    import pytest

    # Plugins are loaded by name, because searching for them takes longer than most tests. The project's pytest settings
    # are not used.
    named = "-p pytest_timeout -p _hypothesis_pytestplugin -p no:cacheprovider --hypothesis-seed=0"
    return int(pytest.main(["-o", "addopts=", "-q", "--assert=plain", *named.split(), *options, *tests], [*plugins]))


class _Noted:
    """A pytest plugin: each test's lines go to a context of its name, and its seconds are noted if it passes."""

    def __init__(self, measured: coverage.Coverage) -> None:
        self.measured, self.seconds = measured, dict[str, float]()

    def pytest_runtest_setup(self, item: Any) -> None:
        # A test may trace for itself, and leaves no tracer.
        if sys.gettrace() is None:
            self.measured.stop()
            self.measured.start()
        self.measured.switch_context(item.nodeid)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" and report.passed:
            self.seconds[report.nodeid] = report.duration


def _measured(name: str) -> coverage.Coverage:
    measured = coverage.Coverage(data_file=str(_COVERED / name), source=[str(ROOT / "kvcalc")], config_file=False)
    measured.set_option("run:relative_files", True)
    return measured


def _note(file: str) -> None:
    """Run a file's tests, and note their lines in the folder _COVERED."""

    def work() -> int:
        measured = _measured(f"{file.replace('/', '.')}.lines")
        noted = _Noted(measured)
        measured.start()
        status = _pytest([file], plugins=(noted,))
        measured.stop()
        measured.save()
        (_COVERED / f"{file.replace('/', '.')}.json").write_text(json.dumps(noted.seconds))
        return status

    if _forked(work, 1800) not in (0, 5):
        print(f"{file}: not all tests pass without a mutant", flush=True)


def _hash(files: list[Path]) -> str:
    return hashlib.sha256(b"".join(file.read_bytes() for file in sorted(files))).hexdigest()


def _note_all(processes: int, keep: bool) -> None:
    """Run the tests that changed since they were last run, or all if the package did, and note their lines.

    With `keep`, a changed package does not count.
    """
    state = _COVERED / "state.json"
    before = json.loads(state.read_text()) if state.exists() else {}
    now = {"package": _hash([*(ROOT / "kvcalc").rglob("*.py"), *(ROOT / "kvcalc").rglob("*.yaml")])}
    if now["package"] != before.get("package") and not keep:
        shutil.rmtree(_COVERED, ignore_errors=True)
        before = {}
    _COVERED.mkdir(parents=True, exist_ok=True)
    for file in sorted((ROOT / "tests").rglob("test_*.py")):
        name = str(file.relative_to(ROOT))
        if name.split("/")[1] not in _NOT_RUN:
            now[name] = _hash([file])
    for name in before.keys() - now.keys():
        for old in _COVERED.glob(f"{name.replace('/', '.')}.*"):
            old.unlink()
    changed = [name for name in now if name != "package" and now[name] != before.get(name)]
    with ThreadPoolExecutor(processes) as pool:
        for done, _ in enumerate(pool.map(_note, changed)):
            if done % 50 == 0:
                print(f"{done} of {len(changed)} files of tests are run", file=sys.stderr, flush=True)
    state.write_text(json.dumps(now))


@lru_cache(None)
def _seconds() -> dict[str, float]:
    """The seconds of each test that passes."""
    files = (file for file in _COVERED.glob("*.json") if file.name != "state.json")
    return {test: seconds for file in files for test, seconds in json.loads(file.read_text()).items()}


@lru_cache(None)
def _tests_by_line(file: str) -> dict[int, set[str]]:
    """The tests that run each line of a file."""
    found: dict[int, set[str]] = {}
    for part in _COVERED.glob("*.lines"):
        data = coverage.CoverageData(str(part))
        data.read()
        for line, tests in data.contexts_by_lineno(file).items():
            found.setdefault(line, set()).update(test for test in tests if test in _seconds())
    return found


def tests_of(mutant: Mutant) -> list[str]:
    """The tests that run the lines of a mutant, then the others of their files, which may share what these computed.

    Of what is run on import, the tests that run any function of the file.
    """
    by_line = _tests_by_line(mutant.file)
    lines = range(mutant.line, mutant.last + 1) if mutant.runs else by_line
    run = {test for line in lines for test in by_line.get(line, ())}
    files = {test.partition("::")[0] for test in run}
    room = f"tests/{mutant.file.split('/')[1]}/"
    others = {test for test in _seconds() if test.partition("::")[0] in files} - run
    found: list[str] = []
    for tests, left in ((run, _MOST_SECONDS), (others, _MOST_SECONDS_OF_OTHERS)):
        for test in sorted(tests, key=lambda test: (not test.startswith(room), _seconds()[test], test)):
            if (left := left - _seconds()[test]) > 0:
                found.append(test)
    return found


def _run_tests(mutant: Mutant | None, tests: list[str]) -> int:
    """Run pytest in this forked process with the mutant's file replaced, and return its exit code."""
    if mutant is not None:
        path = str(ROOT / mutant.file)
        code = compile(mutant.tree(), path, "exec", dont_inherit=True)
        own = SourceFileLoader.get_code

        def get_code(loader: SourceFileLoader, fullname: str) -> CodeType | None:
            return code if loader.path == path else own(loader, fullname)

        SourceFileLoader.get_code = get_code  # type: ignore[method-assign, assignment]
    ends = sorted({0, *accumulate(_FIRST_TESTS), len(tests)})
    for first, last in pairwise(end for end in ends if end <= len(tests)):
        part = tests[first:last]
        if last > sum(_FIRST_TESTS):
            files = list(dict.fromkeys(test.partition("::")[0] for test in part))
            part.sort(key=lambda test: files.index(test.partition("::")[0]))
        # A mutant may never end. A test that takes ten times as long as noted has failed.
        longest = max(_seconds().get(test, 60.0) for test in part)
        status = _pytest(part, "-x", f"--timeout={30 + 10 * longest:.0f}")
        if status == 4:  # a test that had another name when it was noted: all tests of these files
            status = _pytest(sorted({test.partition("::")[0] for test in part}), "-x")
        if status:
            return status
    return 0


def survives(mutant: Mutant, tests: list[str]) -> bool:
    """Whether all tests pass. A mutant that does not end counts as noticed."""
    seconds = 60 + 10 * sum(_seconds().get(test, _MOST_SECONDS) for test in tests)
    status = _forked(lambda: _run_tests(mutant, tests), seconds)
    if status in (0, 1, None):
        return status == 0
    # Not a failure but an error: of the mutant, if the tests run without it.
    return _forked(lambda: _run_tests(None, tests), seconds) != 0


def survivors_of(name: str, found: list[Mutant], named: list[str] | None, processes: int) -> float:
    """Print the mutants that no test notices, and return their share in percent."""
    start = time.monotonic()
    tests = [named or tests_of(mutant) for mutant in found]
    alive = 0
    with ThreadPoolExecutor(processes) as pool:
        for mutant, its_tests, is_alive in zip(found, tests, pool.map(survives, found, tests)):
            alive += is_alive
            if is_alive:
                print(f"{mutant}    ({len(its_tests)} tests)", flush=True)
    share = 100 * alive / len(found)
    print(f"{name}: {alive} of {len(found)} survive, {share:.1f} %, {time.monotonic() - start:.0f} s", flush=True)
    return share


def main() -> int:
    """The exit code: 1 if more than `--most` percent of the mutants of a file or folder survive."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=PARTS, metavar="FILE", help="files or folders")
    parser.add_argument("--tests", nargs="+", help="tests to run, instead of those that run the line")
    parser.add_argument("--sample", type=int, help="so many mutants of each name, drawn at random")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--keep", action="store_true", help="the noted lines, which hold for files that did not change")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--most", type=float, default=8.0, help="survivors allowed in each file or folder, in per cent")
    options = parser.parse_args()
    os.chdir(ROOT)
    # Import once, for every fork, the modules that all tests need and no mutant changes.
    needed = ("_hypothesis_pytestplugin", "hypothesis", "jsonschema_rs", "pytest", "pytest_timeout", "rich", "typer")
    for name in (*needed, "yaml"):
        __import__(name)
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["HYPOTHESIS_STORAGE_DIRECTORY"] = str(ROOT / ".pytest_cache" / "hypothesis")
    if not options.tests:
        _note_all(options.processes, options.keep)
    shares = []
    for name in options.names:
        found = [mutant for file in files_of(name) for mutant in mutants(file)]
        if options.sample is not None:
            found = Random(options.seed).sample(found, min(options.sample, len(found)))
        if found:
            shares.append(survivors_of(name, found, options.tests, options.processes))
    return int(max(shares, default=0.0) > options.most)


if __name__ == "__main__":
    sys.exit(main())
