"""Mutation testing: change one thing at a time in a file and list the changes that its tests do not notice.

    python -m tests.mutants                                        all files of TESTS
    python -m tests.mutants kvcalc/engines/vllm                    the files of a folder, without other names of TESTS
    python -m tests.mutants kvcalc/simulation --sample 60 --seed 3    60 of their mutants, drawn at random
    python -m tests.mutants FILE --tests tests/test_x.py           another file, with the tests that should notice

A mutant is compiled in memory in a forked process, so the checkout is not changed and a run may be interrupted. Only
tests that call the code in their own process can notice it.
"""

from __future__ import annotations

import argparse
import ast
import os
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.machinery import SourceFileLoader
from pathlib import Path
from random import Random
from types import CodeType
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent


def _tests(folder: str, *names: str) -> tuple[str, ...]:
    return tuple(f"tests/{folder}/test_{name}.py" for name in names)


def _recorded(kind: str, engine: str = "*") -> tuple[str, ...]:
    """The tests of an engine's recorded figures, or those of all engines."""
    test = "tests/recorded/test_recorded.py::test_the_figures_are_those_that_were_recorded"
    files = sorted((ROOT / "tests" / "recorded" / kind).glob(f"{engine}.jsonl"))
    return tuple(f"{test}[{kind}-{file.stem}]" for file in files)


def _engine(name: str, *own: str) -> tuple[str, ...]:
    """The tests of an engine: its own tests, those of all engines, and its recorded figures."""
    of_all = (
        "allocation",
        "commands",
        "commands_read",
        "interface",
        "schedules",
        "reserve",
        "release",
        "pool_bytes",
        "kv_dtype",
        "prefixes",
        "start_up_logs",
        "starts",
    )
    planned = (
        "larger_share auto_context allocations device_defaults start_limit prompt_ranks sglang_prompt_ranks "
        "prefix_hits drafted_reuse dp_attention engines"
    ).split()
    slow = (*_recorded("loads", name), *_tests("cli", "check"), *_tests("planning", "check_plans"))
    return (*_tests("engines", *own, *of_all), *_recorded("memory", name), *_tests("planning", *planned), *slow)


_LOGS = _tests("engines", "stated_facts", "logs", "log_pools", "log_reader", "log_drafting", "log_settings") + _tests(
    "planning", "log_lines", "audit"
)
_LOADS = _recorded("loads")
_CHECKS = (
    *_tests("planning", "check_rules", "start_limit", "machines"),
    *_tests("engines", "starts"),
    *_tests("cli", "check"),
    *_tests("planning", "check_plans"),
)
_REUSE = (
    *_tests("planning", "cache_tiers", "reused_sessions", "drafted_reuse", "prefix_hits"),
    *_tests("cli", "reuse"),
    *_tests("planning", "prefix"),
    *_LOADS,
)
_SIMULATED = (
    *_tests("simulation", "load_curve", "pace", "reports", "cold", "conservation", "engine_schedules"),
    *_tests("simulation", "distinct_prompts", "prefix_cache", "common_prefix"),
    *_tests("cli", "simulate"),
    *_tests("planning", "start_limit"),
    *_tests("simulation", "coupled", "lock_step", "reference"),
    *_LOADS,
    *_tests("simulation", "pools", "routed"),
)
_SPLIT = (
    *_tests("planning", "disaggregated_limits", "pool_platforms", "disaggregated_matching", "disaggregated_rules"),
    *_tests("planning", "disaggregated_mixed", "split_finalists", "disaggregated"),
    *_recorded("pools"),
    *_tests("planning", "split_traffic"),
)
_PLANS = (
    *_tests("planning", "plan_parts", "refused_plans", "fewest_finalists", "running_requests"),
    *_LOADS,
    *_tests("planning", "pareto", "plan"),
    *_tests("cli", "plan"),
    *_tests("planning", "tight", "confirm", "shapes", "finalists", "plan_trace"),
)

# The tests of a file's rules, or of those of all files in a folder, fastest first, because a mutant's run ends at the
# first failure. A file has the tests of the longest name that it begins with.
TESTS = {
    "kvcalc/throughput/costs.py": _tests("throughput", "steps", "roofline", "expert_parallel"),
    "kvcalc/throughput/roofline.py": _tests("throughput", "steps", "roofline", "expert_parallel"),
    "kvcalc/memory/sharding.py": _tests("memory", "shares"),
    "kvcalc/planning/device/budget.py": _tests("planning", "budget"),
    "kvcalc/engines": _engine(
        "*", "new_engine", "options_are_read", "mlx", "llama_cpp", "vllm", "vllm_stages", "sglang", "tensorrt_llm",
    ) + _tests("planning", "checkpoint", "padded_experts", "split", "offload", "check_rules", "machines",
                "manifests"),
    "kvcalc/engines/llama_cpp": _engine("llama.cpp", "llama_cpp", "llama_cpp_types") + _tests(
        "planning", "split", "offload"
    ),
    "kvcalc/engines/llama_cpp/log": _tests(
        "engines", "llama_cpp_log_written", "llama_cpp_log", "llama_cpp_log_passes"
    ) + _LOGS,
    "kvcalc/engines/log.py": _LOGS,
    "kvcalc/engines/log_lines.py": _LOGS,
    "kvcalc/engines/mlx": _engine("mlx", "mlx"),
    "kvcalc/engines/sglang": _engine(
        "sglang", "sglang", "sglang_shortcuts", "sglang_types", "sglang_drafts", "sglang_deepseek_v4", "sglang_states"
    ) + _tests("planning", "sglang_layouts"),
    "kvcalc/engines/sglang/log": _LOGS,
    "kvcalc/engines/tensorrt_llm": _engine(
        "tensorrt-llm", "tensorrt_llm", "tensorrt_llm_pools", "tensorrt_llm_groups", "tensorrt_llm_hybrid",
    ),
    "kvcalc/engines/tensorrt_llm/log.py": _LOGS,
    "kvcalc/engines/transformers": (
        *_tests("engines", "interface"),
        *_recorded("memory", "transformers"),
        *_tests("model", "type_bytes", "state_families", "hybrid_families", "composed", "wrappers", "named_families"),
        *_tests("planning", "budget", "drafting", "prefix_hits", "fit"),
        *_tests("engines", "kv_dtype", "reserve", "prefixes", "release"),
    ),
    "kvcalc/engines/vllm": _engine(
        "vllm", "vllm", "vllm_pages", "vllm_stages", "vllm_dtypes", "vllm_flags", "vllm_states", "vllm_compressed",
        "vllm_releases", "vllm_planner", "vllm_release_defaults",
    ) + _tests("planning", "padded_experts"),
    "kvcalc/engines/vllm/log": (*_tests("engines", "vllm_stages", "vllm_compressed"), *_LOGS),
    "kvcalc/planning/check": _CHECKS,
    "kvcalc/planning/plan": _PLANS + _SPLIT,
    "kvcalc/planning/plan/disaggregated": _SPLIT,
    "kvcalc/planning/prefix": _tests("planning", "prefix") + _tests("cli", "prefix"),
    "kvcalc/planning/reuse": _REUSE,
    "kvcalc/simulation": _SIMULATED,
    "kvcalc/simulation/planned.py": _tests("planning", "plan_trace") + _SIMULATED,
}  # fmt: skip

_BINARY: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult, ast.Pow: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
}  # fmt: skip
_COMPARE: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
_NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}


_TESTS_AT_ONCE = 6
# The tests of a room take minutes on a busy machine.
_LONGEST_SECONDS = 1800


class Mutant(NamedTuple):
    """One change: its place in a file, the way to the node that it replaces, and what stands there before and after."""

    file: str
    line: int
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
    line = 0
    for path, node in _places(ast.parse((ROOT / file).read_text())):
        line = getattr(node, "lineno", line)
        for change in changes(node):
            ast.fix_missing_locations(ast.copy_location(change, node))
            found.append(Mutant(file, line, path, node, change))
    return found


def files_of(name: str) -> list[str]:
    """The file of this name, or the files of the folder, without those that have a longer name in TESTS."""
    path = ROOT / name
    files = [str(file.relative_to(ROOT)) for file in sorted(path.rglob("*.py"))] if path.is_dir() else [name]
    return [file for file in files if len(_name_of(file)) <= len(name)]


def tests_of(file: str) -> tuple[str, ...]:
    """The tests that should notice the mutants of a file."""
    return TESTS.get(_name_of(file), ())


def _name_of(file: str) -> str:
    return max((name for name in TESTS if file == name or file.startswith(f"{name}/")), key=len, default="")


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
    options = ["-o", "addopts=", "-x", "-q", "--assert=plain", *plugins.split()]
    # A failure of the first few files saves collecting the others.
    parts = (tests[first : first + _TESTS_AT_ONCE] for first in range(0, len(tests), _TESTS_AT_ONCE))
    return next((status for part in parts if (status := int(pytest.main([*options, *part])))), 0)


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


def survivors_of(name: str, found: list[Mutant], tests: dict[str, tuple[str, ...]], processes: int) -> float:
    """Print the mutants that their files' tests do not notice, and return their share in percent."""
    start = time.monotonic()
    limits: dict[tuple[str, ...], float] = {}
    for file in {mutant.file: None for mutant in found}:
        if tests[file] not in limits:
            began = time.monotonic()
            if not survives(ROOT / file, None, tests[file], _LONGEST_SECONDS):
                sys.exit(f"{file}: without a mutant, its tests fail or take {_LONGEST_SECONDS} seconds")
            limits[tests[file]] = 20 + 5 * (time.monotonic() - began)

    def lives(mutant: Mutant) -> bool:
        its_tests = tests[mutant.file]
        return survives(ROOT / mutant.file, mutant.tree(), its_tests, limits[its_tests])

    alive = 0
    with ThreadPoolExecutor(processes) as pool:
        for mutant, is_alive in zip(found, pool.map(lives, found)):
            alive += is_alive
            if is_alive:
                print(mutant, flush=True)
    share = 100 * alive / len(found)
    print(f"{name}: {alive} of {len(found)} survive, {share:.1f} %, {time.monotonic() - start:.0f} s", flush=True)
    return share


def main() -> int:
    """The exit code: 1 if more than `--most` percent of the mutants of a file or folder survive."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(TESTS), metavar="FILE", help="files or folders")
    parser.add_argument("--tests", nargs="+", help="tests to run, instead of the ones this script names")
    parser.add_argument("--sample", type=int, help="so many mutants of each name, drawn at random")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
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
    os.environ["HYPOTHESIS_STORAGE_DIRECTORY"] = os.path.join(ROOT, ".pytest_cache", "mutants")
    shares = []
    for name in options.names:
        files = files_of(name)
        tests = {file: tuple(options.tests or tests_of(file)) for file in files}
        if nameless := [file for file in files if not tests[file]]:
            parser.error(f"{nameless[0]}: name the tests that should notice, with --tests")
        found = [mutant for file in files for mutant in mutants(file)]
        if options.sample is not None:
            found = Random(options.seed).sample(found, min(options.sample, len(found)))
        if found:
            shares.append(survivors_of(name, found, tests, options.processes))
    return int(max(shares, default=0.0) > options.most)


if __name__ == "__main__":
    sys.exit(main())
