"""Triton kernels are compiled in a child process first, whose end is a reason and not the end of the run."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

from triton.backends.compiler import GPUTarget
from triton.compiler import CompilationError
from triton.runtime import driver

from kvcalc.attention import launch, step
from kvcalc.attention.backends import split_kv
from kvcalc.attention.cache import TokenCache
from tests.measure.options import last_given
from tests.measure.quick import SMALL, quicken
from tests.simulated_cuda import simulated_cuda

# What the compiler of the child does, by the ELEMENTS of `merge`, in Triton's place.
HOOKS = {
    128: ("raise RuntimeError('PassManager::run failed\\nmore')", "PassManager::run failed"),
    64: ("time.sleep(600)", "the compiler was killed, after 0.5 seconds or for its memory"),
    32: ("os._exit(3)", "the compiler ended with exit code 3"),
    16: ("os.abort()", "the compiler ended with signal 6"),
}
NO_CORE_FILE = "import json, os, resource, time; resource.setrlimit(resource.RLIMIT_CORE, (0, 0))"
# A child that ends at its first kernel, before it loads torch.
ABORTS = f"""{NO_CORE_FILE}
print("ready", flush=True)
input()
os.abort()
"""


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Triton believes that there is an H100. Every test has a cache of its own."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.setattr(driver, "_active", launch._Target("cuda", 90, 32))
    monkeypatch.setattr(launch, "_found", {})
    kernel = step._kernel
    kernel.cache_clear()
    yield
    kernel.cache_clear()
    launch._compiler.close()


@pytest.fixture
def child(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """`child("os.abort()")`: the lines that the child runs before anything else."""

    def call(lines: str) -> None:
        (tmp_path / "sitecustomize.py").write_text(lines)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    return call


def merge(splits: int = 4, elements: int = 128) -> None:
    part, out = (torch.empty(64, dtype=torch.bfloat16) for _ in range(2))
    constants = {"V_WIDTH": 128, "ELEMENTS": elements, "PARTS": 16, "EACH": 0}
    launch._check(split_kv.merge, (part, torch.empty(64), part, out, splits), constants)


def files(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if path.is_file()}


def test_the_child_leaves_the_kernel_where_this_process_finds_it(tmp_path: Path) -> None:
    merge()
    found = files(tmp_path / "triton")
    assert {"merge.cubin"} <= {path.name for path in found}
    # The process itself, which would compile for the same device.
    part, out = (torch.empty(64, dtype=torch.bfloat16) for _ in range(2))
    assert driver.active.get_current_target() == GPUTarget("cuda", 90, 32)
    split_kv.merge.warmup(part, torch.empty(64), part, out, 4, V_WIDTH=128, ELEMENTS=128, PARTS=16, EACH=0, grid=(1,))
    assert files(tmp_path / "triton") == found


def test_the_end_of_the_child_is_a_reason(child: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    hooks = "".join(f"    if ELEMENTS == {elements}: {hook}\n" for elements, (hook, _) in HOOKS.items())
    child(f"{NO_CORE_FILE}\nimport triton.runtime.jit as jit\ndef warmup(*_, ELEMENTS, **__):\n{hooks}"
          "jit.JITFunction.warmup = warmup\n")  # fmt: skip
    started, real = [0], launch._started

    def counted() -> Any:
        started[0] += 1
        return real()

    monkeypatch.setattr(launch, "_started", counted)
    found = []
    for elements in HOOKS:
        monkeypatch.setattr(launch, "COMPILE_SECONDS", 0.5 if elements == 64 else 120)
        for _ in range(3):
            with pytest.raises(launch.CompilerError) as raised:
                merge(elements=elements)
            found.append((str(raised.value), *started))
    # An error leaves the child as it is. After its end, another kernel gets a new child.
    children = {128: 1, 64: 1, 32: 2, 16: 3}
    assert found == [(reason, children[elements]) for elements, (_, reason) in HOOKS.items() for _ in range(3)]


def test_the_reason_is_the_compilers_own_message() -> None:
    """Triton's message begins with the place in the source, and has the cause in an error of its own."""
    error = CompilationError("f(x)", None, None)
    error.__cause__ = CompilationError("x = y", None, "Cannot bitcast data-type of size 32\nmore")
    assert launch._reason(error) == "Cannot bitcast data-type of size 32"


def test_lengths_and_strides_of_one_sort_are_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(launch._compiler, "ask", asked.append)
    for splits in (2, 3, 5, 33):
        merge(splits)
    assert len(asked) == 1


def test_without_a_child_the_process_compiles_itself(child: Any) -> None:
    """A child that ends before it comes to the compiler says nothing about it."""
    child("import os\nos._exit(1)\n")
    merge()


@pytest.mark.parametrize("kind", ["gqa", "mla"])
def test_an_abort_of_the_compiler_does_not_end_the_run(
    kvcalc: Any, child: Any, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    quicken(monkeypatch)
    child(ABORTS)
    asked = [*last_given((*SMALL, "--attention", kind, "--context", "64", "--steps", "2", "--device", "cuda"))]
    asked += ["--dtype", "bf16", "--json"]
    with simulated_cuda():
        result = kvcalc("measure", *asked)
        assert result.status == 0, result.err
        (row,) = json.loads(result.out)["runs"]
        rows = {each["name"]: each for each in row["backends"]}
        assert rows["triton"]["reason"] == "the compiler ended with signal 6"
        assert not rows["triton"]["is_chosen"]
        refused = kvcalc("measure", *asked, "--backend", "triton")
    assert refused.status == 1
    assert "--backend triton cannot run here: the compiler ended with signal 6" in refused.err


def test_a_step_that_does_not_compile_for_a_shape_is_the_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise launch.CompilerError("the compiler ended with signal 6")

    kernel = SimpleNamespace(can_store=lambda _: True, rotate_and_append=refuse, CompilerError=launch.CompilerError)
    monkeypatch.setattr(step, "_kernel", lambda device: kernel)
    with simulated_cuda():
        cuda = torch.device("cuda", 0)
        cache = TokenCache(1, ((2, 16), (2, 16)), 8, None, torch.bfloat16, cuda)
        query, key = (torch.ones(1, heads, 1, 16, dtype=torch.bfloat16, device=cuda) for heads in (4, 2))
        assert step.rotate_and_append(None, query, key, cache, value=key) is query
        assert cache.length == 1
