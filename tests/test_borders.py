"""Which modules may import which, and which modules a command may load at start."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from kvcalc.model.presets import presets_folder
from tests.conftest import ROOT

PACKAGE = ROOT / "kvcalc"
SOURCES = sorted(PACKAGE.rglob("*.py"))

# Folder -> the folders it may import, in addition to itself and the shared modules.
FOLDERS = {
    "documents": set(),
    "model": set(),
    "memory": {"model"},
    "throughput": {"memory", "model"},
    "engines": {"writing", "throughput", "memory", "model"},
    "traces": {"model"},
    "question": {"throughput", "traces", "model"},
    "reading": {"writing", "model"},
    "server": {"question", "engines", "throughput", "memory", "model"},
    "planning": {
        "writing",
        "reading",
        "simulation",
        "server",
        "question",
        "engines",
        "traces",
        "throughput",
        "memory",
        "model",
    },
    "simulation": {"server", "question", "engines", "traces", "throughput", "memory", "model"},
    "attention": set(),
    "measure": {"attention", "throughput", "memory", "model"},
    "output": {"writing"},
    "writing": set(),
    "cli": {
        "writing",
        "output",
        "simulation",
        "planning",
        "server",
        "question",
        "measure",
        "engines",
        "traces",
        "memory",
        "model",
    },
    "api": {
        "documents",
        "simulation",
        "planning",
        "server",
        "question",
        "engines",
        "throughput",
        "traces",
        "memory",
        "model",
    },
}
SHARED = {
    "atomic_file", "errors", "json_lines", "limits", "notes", "parallel", "records", "releases", "schema", "search",
    "units",
}  # fmt: skip
# Their types are for type checkers, in every folder.
SHARED |= {"documents"}

# Third-party module -> where it may be imported.
THIRD_PARTY = {
    "torch": ("attention/", "measure/"),
    # Only on a GPU: `kvcalc.attention.step` and the backend import these modules if they can.
    "triton": (
        "attention/backends/split_kv.py",
        "attention/backends/latent_hopper.py",
        "attention/fused_step.py",
    ),
    "psutil": ("measure/",),
    "pynvml": ("measure/",),
    "typer": ("cli/",),
    "rich": ("cli/", "output/"),
    "huggingface_hub": ("model/hub.py",),
    "matplotlib": ("output/plot.py",),
    "gguf": ("model/gguf/file.py",),
    "yaml": ("model/yaml_mapping.py", "reading/documents.py", "writing/manifest.py"),
    "orjson": ("output/json_line.py",),
    "re2": ("memory/quantization/names.py",),
    "tree_sitter": ("reading/",),
    "tree_sitter_bash": ("reading/syntax.py",),
    # Imported only for type checkers, which include it.
    "typing_extensions": ("documents/",),
}


@cache
def imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            found.add(node.module or "")
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


def folder_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def test_arrows_run_one_way() -> None:
    for path in SOURCES:
        folder = folder_of(path)
        if folder not in FOLDERS:
            continue
        for name in imports(path):
            parts = name.split(".")
            if parts[0] == "kvcalc" and len(parts) > 1 and parts[1] != "__version__":
                assert parts[1] in {folder, *FOLDERS[folder], *SHARED}, f"{path} imports {name}"


def test_documents_are_imported_for_type_checkers_alone() -> None:
    for path in SOURCES:
        if folder_of(path) == "documents":
            continue
        tree = ast.parse(path.read_text())
        tree.body = [
            node for node in tree.body if not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node))
        ]
        for node in ast.walk(tree):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not any(name.startswith("kvcalc.documents") for name in names), f"{path}:{ast.unparse(node)}"


def test_third_parties_stay_in_their_rooms() -> None:
    for path in SOURCES:
        where = path.relative_to(PACKAGE).as_posix()
        for name in imports(path):
            package = name.split(".")[0]
            if package in THIRD_PARTY:
                assert where.startswith(THIRD_PARTY[package]), f"{where} imports {name}"
            else:
                assert package in sys.stdlib_module_names | {"kvcalc"}, f"{where} imports {name}"


def test_every_room_is_known() -> None:
    folders = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
    assert folders <= set(FOLDERS)


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(source) for source in SOURCES}


@cache
def in_circles() -> set[str]:
    """Modules in import cycles or between them. Imports in functions and for type checking count too."""
    modules = {name_of(path): imports(path) for path in SOURCES}
    left = {name: (found & modules.keys()) - {name} for name, found in modules.items()}
    while True:
        used = set().union(*left.values()) if left else set()
        ends = [name for name, needed in left.items() if not needed & left.keys() or name not in used]
        if not ends:
            return set(left)
        for name in ends:
            del left[name]


@pytest.mark.parametrize("folder", sorted({folder_of(path) for path in SOURCES}))
def test_no_module_imports_in_a_circle(folder: str) -> None:
    assert not {name for name in in_circles() if name.split(".")[1:2] == [folder]}


def private_names(path: Path) -> Iterator[str]:
    """Private names that a module uses from another one, as `from x import _y` or `x._y`."""
    tree, modules = ast.parse(path.read_text()), MODULES
    known: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("kvcalc"):
            for alias in node.names:
                if alias.name.startswith("_") and not alias.name.startswith("__"):
                    yield f"{node.module}.{alias.name}"
                if f"{node.module}.{alias.name}" in modules:
                    known.add(alias.asname or alias.name)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in known:
            name = f"{node.value.id}.{node.attr}"
            if "._" in name and ".__" not in name:
                yield name


def test_no_module_uses_another_ones_private_names() -> None:
    for path in SOURCES:
        assert not [*private_names(path)], path


def loaded_by(code: str) -> set[str]:
    """The top-level modules a fresh interpreter has loaded after `code`."""
    script = (
        f"import sys, io\nreal, sys.stdout = sys.stdout, io.StringIO()\n{code}\nprint(' '.join(sys.modules), file=real)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT)
    return set(done.stdout.split())


def run(*arguments: str) -> str:
    return f"from kvcalc.cli.app import run\nassert run({list(arguments)!r}) == 0"


HEAVY = {"gguf", "huggingface_hub", "torch", "matplotlib", "numpy", "psutil", "pydantic", "tree_sitter"}


def test_importing_kvcalc_loads_nothing_heavy() -> None:
    loaded = loaded_by("import kvcalc\nkvcalc.__version__")
    assert not loaded & (HEAVY | {"rich", "typer", "yaml"})
    assert "kvcalc.planning.answers.estimate" not in loaded


def test_the_api_loads_no_command_line() -> None:
    loaded = loaded_by("import kvcalc\nkvcalc.estimate(kvcalc.load_model('llama-7b'))")
    assert not loaded & (HEAVY | {"rich", "typer"})


def test_json_loads_no_rich_no_torch_and_no_other_command() -> None:
    loaded = loaded_by(run("estimate", "llama-3-70b", "--json"))
    assert not loaded & (HEAVY | {"rich", "dataclasses", "importlib.metadata", "importlib.resources"})
    assert "kvcalc.cli.measure" not in loaded
    assert "kvcalc.output.human" not in loaded
    # In a build, the compiled preset is read instead of its YAML. Only one family's reader is loaded.
    assert ("yaml" in loaded) is not Path(presets_folder()).with_name("compiled").is_dir()
    assert {m for m in loaded if m.startswith("kvcalc.model.families.")} <= {
        "kvcalc.model.families.decoder",
        "kvcalc.model.families.decoder_table",
        "kvcalc.model.families.window_patterns",
    }


def test_help_loads_no_model_and_no_engine() -> None:
    for arguments in (("--help",), ("estimate", "--help"), ("plan", "-h")):
        loaded = loaded_by(run(*arguments))
        assert not loaded & (HEAVY | {"rich", "kvcalc.model.spec", "kvcalc.engines.engine", "kvcalc.question.question"})
        # The list of commands needs none of their options.
        assert ("kvcalc.engines.declarations" in loaded) is (len(arguments) > 1)


def test_a_plan_loads_one_engine_and_the_commands_of_the_others() -> None:
    loaded = loaded_by(run("plan", "llama-3-8b", "--gpu", "h100", "--input-tokens", "1k", "--output-tokens", "100",
                           "--concurrency", "8", "--json"))  # fmt: skip
    engines = {name for name in loaded if name.startswith("kvcalc.engines.") and name.endswith(".engine")}
    assert engines == {"kvcalc.engines.engine", "kvcalc.engines.vllm.engine"}
    assert "kvcalc.traces" not in loaded


def test_a_script_is_parsed_and_words_are_not() -> None:
    words = ["vllm", "serve", "Qwen/Qwen3-8B"]
    for command, is_parsed in ((words, False), ([" ".join(words)], True)):
        loaded = loaded_by(run("check", *command, "--gpu", "h100", "--json"))
        assert ("tree_sitter_bash" in loaded) is ("tree_sitter" in loaded) is is_parsed


def test_a_device_loads_nothing_heavy_either() -> None:
    loaded = loaded_by(run("estimate", "llama-3-70b", "--gpu", "h100x4", "--engine", "vllm", "--json"))
    assert not loaded & (HEAVY | {"rich", "dataclasses", "importlib.metadata", "importlib.resources"})
    assert not {name for name in loaded if name.startswith(("kvcalc.measure", "kvcalc.output.human"))}
    assert ("yaml" in loaded) is not Path(presets_folder()).with_name("compiled").is_dir()


def test_yaml_is_loaded_only_where_nothing_is_compiled(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text('{"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64}')
    for arguments in (
        ("estimate", str(config), "--json"),
        ("estimate", "--layers", "1", "--heads", "2", "--head-dim", "8"),
    ):
        # In a build, the compiled table of decoders is read instead of its YAML.
        is_built = Path(presets_folder()).with_name("compiled").is_dir()
        assert ("yaml" in loaded_by(run(*arguments))) is not is_built


def test_human_output_off_a_terminal_loads_neither_rich_nor_torch() -> None:
    loaded = loaded_by(run("estimate", "llama-3-70b", "--format", "human"))
    # The lines of --explain are read for --explain alone.
    assert not loaded & {*HEAVY, "rich", "kvcalc.output.human.explained"}


def test_one_preset_is_one_file(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvcalc.model import presets
    from kvcalc.model.files import read_text

    read: list[str] = []

    def read_and_count(path: str, most: int) -> str:
        read.append(path)
        return read_text(path, most)

    monkeypatch.setattr(presets, "read_text", read_and_count)
    presets.find_preset("llama-3-70b")
    assert len(read) == 1
