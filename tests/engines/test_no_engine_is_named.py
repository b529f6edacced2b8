"""No code outside `kvcalc/engines` branches on which engine it has: it asks `Engine` for a fact or a method.

The test reads the syntax of every file. It finds the name of an engine, however it is spelled, where a value is
compared with it or looked up by it, a check for an engine's class, and an import from an engine's own module.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from importlib import import_module

import pytest

from kvcalc.engines import ENGINES, engine_class
from kvcalc.engines.engine import Engine, imported
from tests.conftest import ROOT

PACKAGE = ROOT / "kvcalc"

# Files that name engines in words for people, or as documents, other programs and publishers spell them.
IN_WORDS = {
    "throughput/bench_results/serving_clients.py": "the names of backends in the results of benchmarks",
    "output/human/compare.py": "the heading names an engine, and not the formula",
    "output/human/estimate.py": "the heading names an engine, and not the formula",
}

ROOMS = {module.partition(".")[0] for module, _ in ENGINES.values()}
FOLDERS = tuple(f"kvcalc.engines.{room}" for room in ROOMS)
# Methods that look a name up in what they are called on, or compare the two.
LOOKUPS = {"get", "pop", "setdefault", "index", "count"}
PREFIXES = {"startswith", "endswith", "removeprefix", "removesuffix", "partition", "find", "match", "fullmatch"}


def folded(name: str) -> str:
    return re.sub(r"[-_. ]", "", name.partition("@")[0]).casefold()


def classes() -> set[str]:
    """The names of all engines' classes."""
    for name in ENGINES:
        for own in engine_class(name).by_type.values():
            imported(*own)
    for path in (PACKAGE / "engines").rglob("*.py"):
        import_module(".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"))
    found, left = set[str](), Engine.__subclasses__()
    while left:
        one = left.pop()
        found.add(one.__name__)
        left += one.__subclasses__()
    return found - {"NoCache"}


CLASSES = classes()
NAMES = {folded(name) for key, own in ENGINES.items() for name in (*own, engine_class(key).title)}
NAMES |= set(map(folded, ENGINES))


def is_name(node: ast.AST | None) -> bool:
    """Whether a value is a name. One that ends with a sign is the beginning of something else, such as a type."""
    text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
    return text[-1:].isalnum() and folded(text) in NAMES


def has_name(node: ast.AST | None) -> bool:
    """Whether a value is the name of an engine, or has one among its parts."""
    if isinstance(node, (ast.Tuple, ast.List, ast.Set)):
        return any(map(is_name, node.elts))
    return is_name(node)


def is_beginning(node: ast.AST, of: ast.AST) -> bool:
    """Whether a text is the beginning of an engine's name, and something called an engine is compared with it."""
    text = folded(str(node.value)) if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
    return "engine" in ast.unparse(of) and bool(text) and any(name.startswith(text) for name in NAMES)


def allowed(tree: ast.AST) -> set[int]:
    """Parts that are no branches: the defaults of arguments and fields, and types."""
    parts: list[ast.AST | None] = []
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.Lambda)):
            parts += [*node.args.defaults, *node.args.kw_defaults]
        elif isinstance(node, ast.ClassDef):
            parts += [one for one in node.body if isinstance(one, ast.AnnAssign)]
        elif isinstance(node, ast.Subscript) and ast.unparse(node.value) == "Literal":
            parts.append(node)
    return {id(part) for whole in parts if whole is not None for part in ast.walk(whole)}


def branches(source: str) -> Iterator[int]:
    """The lines on which an engine decides what happens."""
    tree = ast.parse(source)
    skipped = allowed(tree)
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if is_branch(node):
            yield getattr(node, "lineno", 0)


def is_branch(node: ast.AST) -> bool:
    match node:
        case ast.Compare(left, _, others):
            return any(map(has_name, (left, *others))) or any(is_beginning(left, other) for other in others)
        case ast.Dict(keys, _):
            return any(map(is_name, keys))
        case ast.Tuple(elts) | ast.List(elts) | ast.Set(elts):
            return any(map(is_name, elts))
        case ast.Subscript(_, index):
            return has_name(index)
        case ast.Assign(_, value) | ast.AnnAssign(_, _, value) | ast.NamedExpr(_, value):
            return is_name(value)
        case ast.MatchValue(value):
            return is_name(value)
        case ast.Call(ast.Attribute(of, method), arguments) if method in LOOKUPS | PREFIXES:
            return any(map(has_name, arguments)) or (
                method in PREFIXES and any(is_beginning(one, of) for one in arguments)
            )
        case ast.Call(ast.Name("isinstance" | "issubclass"), [_, kinds]):
            return any(getattr(one, "id", getattr(one, "attr", "")) in CLASSES for one in ast.walk(kinds))
        case ast.Call(_, arguments):
            return any(isinstance(one, ast.Constant) and str(one.value).startswith(FOLDERS) for one in arguments)
        case ast.Import(names):
            return any(one.name.startswith(FOLDERS) for one in names)
        case ast.ImportFrom(module, names):
            found = [str(module), *(f"{module}.{one.name}" for one in names)]
            return any(re.match(rf"kvcalc\.engines\.({'|'.join(ROOMS)})(\.|$)", one) for one in found)
    return False


FILES = {
    path.relative_to(PACKAGE).as_posix(): path
    for path in sorted(PACKAGE.rglob("*.py"))
    if path.relative_to(PACKAGE).parts[0] != "engines"
}


@pytest.mark.long
def test_no_file_outside_the_engines_branches_on_an_engine() -> None:
    for name in (name for name in FILES if name not in IN_WORDS):
        source = FILES[name].read_text()
        lines = source.splitlines()
        assert [f"{name}:{line}: {lines[line - 1].strip()}" for line in branches(source)] == []


@pytest.mark.parametrize("name", IN_WORDS)
def test_the_list_has_no_file_that_could_leave_it(name: str) -> None:
    assert any(branches(FILES[name].read_text()))


def test_few_files_name_engines_in_words() -> None:
    assert len(IN_WORDS) <= 8


@pytest.mark.parametrize(
    "source",
    [
        'if case.engine_name == "llama.cpp": pass',
        'name = "x" if engine.partition("@")[0] != "vllm" else "y"',
        'if question.engine.startswith("llama.cpp"): pass',
        'if question.engine.startswith("llama"): pass',
        'if "llama" in case.engine_name: pass',
        'if case.engine_name not in ("llama.cpp", "vllm"): pass',
        '_LARGEST = {"sglang": ("mem-fraction-static", "0.95")}',
        '_WITH_TIERS = ("vllm", "sglang")',
        '_COUNTS_BUILDS = {"llama.cpp"}',
        '_SPLIT = "TensorRT-LLM"\nif title == _SPLIT: pass',
        "overlaps = found.get('tensorrt-llm', False)",
        'rules = RULES["mlx-lm"]',
        'if release < parse_release("sglang", "0.5.9") and engine in ["vllm@0.11"]: pass',
        'match engine:\n    case "vllm":\n        pass',
        "if isinstance(setup.rules, Vllm): pass",
        "if isinstance(case.engine, (sglang.DeepseekV4, Other)): pass",
        'if type(engine).__name__ == "LlamaCpp": pass',
        "from kvcalc.engines.vllm.defaults import default_block",
        "def later() -> None:\n    from kvcalc.engines.llama_cpp.placement import count_devices",
        "from kvcalc.engines import sglang",
        "import kvcalc.engines.mlx",
        'rules = import_module("kvcalc.engines.tensorrt_llm.pools")',
    ],
)
def test_branches_are_found(source: str) -> None:
    assert any(branches(source))


@pytest.mark.parametrize(
    "source",
    [
        'def plan(engine: str = "vllm", engines: Sequence[str] = ("logical",)) -> None: "For vllm and sglang."',
        'class Question(NamedTuple):\n    engine: str = "logical"',
        'raise UsageError("not modelled", "use --engine vllm, sglang or tensorrt-llm")',
        'name: Literal["vllm", "sglang"] | None',
        "if case.engine_class.has_device_budgets: pass",
        'if spec.model_type in ("llama", "mistral"): pass',
        "from kvcalc.engines.engine import Engine\nfrom kvcalc.engines import engine_class, load_engine",
        'answer(question._replace(engine="logical"))',
    ],
)
def test_what_is_no_branch_is_allowed(source: str) -> None:
    assert not any(branches(source))
