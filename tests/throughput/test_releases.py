"""Constants by release: which step of an engine's constants a release uses. The second step here is made up."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

import kvcalc
from kvcalc.throughput import constants
from kvcalc.throughput.constants import load_constants
from kvcalc.throughput.hardware import find_gpu
from kvcalc.throughput.steps import step_of
from tests.documents import estimate

SHIPPED = json.loads((Path(constants.__file__).parent / "constants.json").read_text(encoding="utf-8"))
STEP = {
    "since": "0.14.0",
    "source": "made up",
    "constants": {"sequence_seconds": 5e-6, "weight_overhead": {"fp8": 1.5}},
    "by_device_kind": {"ada": {"kv_overhead": 1.9}},
    "ranges": {"": [0.9, 1.1]},
}
LATER = {"since": "0.19.0", "constants": {"step_seconds": 0.002}}


@pytest.fixture
def vllm_with_steps(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    table = copy.deepcopy(SHIPPED)
    table["engines"]["vllm"].update(since="0.11", steps=[STEP, LATER])
    table["engines"]["vllm"]["ranges"] = {"": [0.8, 1.2]}
    monkeypatch.setattr(constants, "_table", lambda: table)
    engine: dict[str, Any] = table["engines"]["vllm"]
    return engine


@pytest.mark.parametrize("engine", SHIPPED["engines"])
def test_a_step_can_begin_only_where_a_release_has_a_place(engine: str) -> None:
    entry = SHIPPED["engines"][engine]
    for step in entry.get("steps", ()):
        assert step["source"]
        step_of(engine, entry, None)
    with pytest.raises(ValueError, match="not a release that a step can begin with"):
        step_of("vllm", {"since": "nightly"}, None)


@pytest.mark.parametrize(
    ("release", "steps"),
    [
        ("0.11.2", 0), ("0.13.0", 0), ("0.14.0rc2", 0), ("2026-01-01", 0), ("0.14.0", 1), ("0.14", 1), ("0.18.1", 1),
        ("2026-04-01", 1), ("0.19.0", 2), ("0.33.0", 2), ("9.9", 2), ("nightly", 2), ("nightly-5b8c30d", 2), (None, 2),
    ],
)  # fmt: skip
def test_a_release_uses_the_newest_step_not_newer_than_itself(
    vllm_with_steps: dict[str, Any], release: str | None, steps: int
) -> None:
    shipped = SHIPPED["engines"]["vllm"]
    found, regime = load_constants(f"vllm@{release}" if release else "vllm", find_gpu("h100"))
    assert found.sequence_seconds == (5e-6 if steps else shipped["constants"]["sequence_seconds"])
    assert found.step_seconds == (0.002 if steps == 2 else shipped["constants"]["step_seconds"])
    assert found.weight_overhead["bf16"] == shipped["constants"]["weight_overhead"]["bf16"]
    assert found.weight_overhead["fp8"] == (1.5 if steps else shipped["constants"]["weight_overhead"]["fp8"])
    assert regime.ranges == {"": [0.9, 1.1] if steps else [0.8, 1.2]}
    assert regime.older_than is None
    on_ada, _ = load_constants(f"vllm@{release}" if release else "vllm", find_gpu("l40s"))
    assert (on_ada.kv_overhead == 1.9) == (steps > 0)


def test_a_release_older_than_every_step_uses_the_oldest_and_its_range_is_wider(
    vllm_with_steps: dict[str, Any],
) -> None:
    assert load_constants("vllm@0.9", find_gpu("h100"))[0] == load_constants("vllm@0.13", find_gpu("h100"))[0]
    devices = kvcalc.find_devices("b200")
    old, known = (
        estimate(kvcalc.load_model("llama-3-8b"), context_tokens=4096, engine=f"vllm@{release}", devices=devices)
        for release in ("0.9", "0.13")
    )
    [note] = [one["text"] for one in old["warnings"] if one["code"] == "not-fitted"]
    assert "releases before 0.11" in note
    assert not [one for one in known["warnings"] if "releases before" in one["text"]]
    assert old["throughput"]["decode_step_seconds"] == known["throughput"]["decode_step_seconds"]
    assert old["throughput"]["high_seconds"] > known["throughput"]["high_seconds"]


def test_the_speed_of_a_release_is_not_that_of_another(vllm_with_steps: dict[str, Any]) -> None:
    model, devices = kvcalc.load_model("llama-3-8b"), kvcalc.find_devices("b200")
    seconds = [
        estimate(model, context_tokens=4096, batch_size=8, engine=engine, devices=devices)["throughput"][
            "decode_step_seconds"
        ]
        for engine in ("vllm", "vllm@0.14", "vllm@0.13", "vllm")
    ]
    assert seconds[0] == seconds[3]
    assert len(set(seconds)) == 3


@pytest.mark.parametrize("engine", ["vllm@0.19.0", "sglang@0.5.9", "tensorrt-llm@1.1", "llama.cpp@b6097"])
def test_without_steps_a_release_has_the_engines_constants(engine: str) -> None:
    name = engine.partition("@")[0]
    if SHIPPED["engines"][name].get("steps"):
        pytest.skip("this engine has steps")
    for gpu in ("h100", "b200", "l40s"):
        assert load_constants(engine, find_gpu(gpu)) == load_constants(name, find_gpu(gpu))
