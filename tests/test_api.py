"""The Python API gives the same answers as the command line, with types."""

from __future__ import annotations

import io
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest

import kvcalc as library
from tests.conftest import ROOT
from tests.json_schema import TARGET, generate

VLLM = str(ROOT / "tests" / "logs" / "vllm-bench.json")


def test_the_public_names_are_shown() -> None:
    assert set(dir(library)) == set(library.__all__)
    shown = io.StringIO()
    with redirect_stdout(shown):
        help(library)
    for name in set(library.__all__) - {"__version__"}:
        assert name in shown.getvalue()
        assert getattr(library, name)


def test_the_package_is_typed() -> None:
    assert (ROOT / "kvcalc" / "py.typed").exists()
    assert TARGET.read_text() == generate(), "python -m tests.json_schema --write"


def test_devices_split_the_model_as_on_the_command_line(kvcalc: Any) -> None:
    shown = kvcalc("estimate", "llama-3-70b", "--gpu", "h100x4", "--json").json
    asked = library.estimate("llama-3-70b", devices=library.find_devices("h100x4"))
    assert asked == shown
    assert asked["engine"]["tensor_parallel_size"] == 4


@pytest.mark.parametrize(
    ("arguments", "ask"),
    [
        (("fit", "llama-3-70b", "--gpu", "h100x4", "--engine", "vllm", "--context", "8192"),
         lambda: library.fit("llama-3-70b", library.find_devices("h100x4"), engine="vllm", context_tokens=8192)),
        (("compare", "llama-3-8b", "gpt2", "--context", "1k"),
         lambda: library.compare(["llama-3-8b", "gpt2"], context_tokens=1024)),
        (("sweep", "llama-3-8b", "--context", "1k,4k", "--batch", "1,8", "--gpu", "h100"),
         lambda: library.sweep("llama-3-8b", contexts=[1024, 4096], batches=[1, 8], gpus=["h100"])),
        (("plan", "llama-3-8b", "--input-tokens", "2000", "--output-tokens", "500", "--concurrency", "8",
          "--gpu", "h100"),
         lambda: library.plan("llama-3-8b", ["h100"], input_tokens=2000, output_tokens=500, concurrency=8)),
        (("score", VLLM, "--gpu", "h100", "--tp", "2"),
         lambda: library.score({VLLM: Path(VLLM).read_text()}, devices=library.find_devices("h100"),
                               tensor_parallel_size=2)),
        (("models",), library.models),
        (("gpus",), library.gpus),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)  # fmt: skip
def test_every_question_is_answered_as_on_the_command_line(kvcalc: Any, arguments: tuple[str, ...], ask: Any) -> None:
    assert ask() == kvcalc(*arguments, "--json").json


def test_a_plan_needs_one_kind_of_load() -> None:
    with pytest.raises(library.KvcalcError, match="--users or --trace is missing"):
        library.plan("llama-3-8b", ["h100"], input_tokens=2000, output_tokens=500)
