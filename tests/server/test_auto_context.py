"""`--context auto`: the longest context that fits, as llama-server (--fit) and vLLM choose it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import kvcalc
from kvcalc.errors import UsageError
from kvcalc.throughput.hardware import find_devices
from tests.documents import estimate, fit, texts

MIB, GIB = 2**20, 2**30


def auto(model: str = "llama-3.1-8b", gpu: str = "rtx-4090", engine: str = "llama.cpp", **more: Any) -> dict[str, Any]:
    settings = more.pop("settings", {})
    return estimate(
        kvcalc.load_model(model), devices=find_devices(gpu), engine=engine, fits_context=True, engine_settings=settings,
        **more,
    )  # fmt: skip


def at(context: int, model: str = "llama-3.1-8b", gpu: str = "rtx-4090", **more: Any) -> dict[str, Any]:
    settings, engine = more.pop("settings", {}), more.pop("engine", "llama.cpp")
    return estimate(
        kvcalc.load_model(model), devices=find_devices(gpu), engine=engine, context_tokens=context,
        engine_settings=settings, **more,
    )  # fmt: skip


@pytest.mark.parametrize("settings", [{}, {"fit-target": "4096"}, {"parallel": "2"}, {"flash-attn": "off"}])
def test_llama_server_leaves_its_margin_free_and_no_more(settings: dict[str, str]) -> None:
    tokens = auto(settings=settings)["workload"]["context_tokens"]
    margin = int(settings.get("fit-target", "1024")) * MIB
    assert tokens % 256 == 0
    assert at(tokens, settings=settings)["fit"]["free_bytes"] >= margin
    assert at(tokens + 256, settings=settings)["fit"]["free_bytes"] < margin


def test_the_answer_is_that_of_the_context_with_a_note() -> None:
    found = auto()
    tokens = found["workload"]["context_tokens"]
    assert {**found, "warnings": []} == {**at(tokens), "warnings": []}
    assert f"the context is {tokens:,} tokens: the longest context that fits and leaves 1.00 GiB" in texts(found)[0]
    document = fit(kvcalc.load_model("llama-3.1-8b"), find_devices("rtx-4090"), engine="llama.cpp", fits_context=True)
    assert document["workload"]["context_tokens"] == tokens


def test_no_longer_than_the_model() -> None:
    found = auto(gpu="h100")
    assert found["workload"]["context_tokens"] == 131_072
    assert "the model's maximum fits" in texts(found)[0]
    # Four slots share the model's length. With --parallel, each has its own.
    assert auto(gpu="h100", batch_size=4)["workload"]["context_tokens"] == 131_072 // 4
    assert auto(gpu="h200", batch_size=2, settings={"parallel": "2"})["workload"]["context_tokens"] == 131_072


def test_the_shortest_context_is_kept_if_the_model_does_not_fit() -> None:
    found = auto(gpu="rtx-3060")
    assert (found["workload"]["context_tokens"], found["fit"]["fits"]) == (4096, False)
    assert any("-ngl auto also moves layers" in text for text in texts(found))
    moved = auto(gpu="rtx-3060", settings={"n-gpu-layers": "auto", "fit-ctx": "8192"})
    assert (moved["workload"]["context_tokens"], moved["fit"]["fits"]) == (8192, True)
    assert any("the context is 8,192 tokens" in text for text in texts(moved))
    assert moved["fit"]["host"]["host_layers"] > 0


def test_every_device_keeps_the_margin() -> None:
    settings = {"tensor-split": "3,1"}
    tokens = auto(gpu="rtx-3090x2", settings=settings)["workload"]["context_tokens"]
    here, longer = (
        at(context, gpu="rtx-3090x2", settings=settings)["fit"]["devices"] for context in (tokens, tokens + 256)
    )
    assert min(row["free_bytes"] for row in here) >= GIB > min(row["free_bytes"] for row in longer)


def test_vllm_chooses_the_longest_length_of_one_request() -> None:
    found = auto(engine="vllm", batch_size=3)
    tokens = found["workload"]["context_tokens"]
    one = at(tokens, engine="vllm")
    assert one["fit"]["fits"]
    assert one["fit"]["max_context_tokens"] == tokens
    assert not at(tokens + 16, engine="vllm")["fit"]["fits"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("--engine", "llama.cpp"), "needs a device"),
        (("--engine", "sglang", "--gpu", "h100"), "sglang does not choose a context"),
        (("--gpu", "h100", "--engine", "logical"), "logical does not choose a context"),
        (("--engine", "vllm@0.12", "--gpu", "h100"), "vllm before 0.14"),
        (("--engine", "llama.cpp@b6097", "--gpu", "h100"), "llama.cpp before December 2025"),
        (("--engine", "llama.cpp", "--before-pull", "16736", "--gpu", "h100"), "llama.cpp before December 2025"),
        (("--engine", "vllm,llama.cpp", "--gpu", "h100"), "ask for one engine"),
        (("--engine", "vllm", "--gpu", "h100", "--input-tokens", "1k", "--output-tokens", "1k"), "remove --context"),
    ],
)
def test_where_nothing_chooses_a_context_auto_is_refused(kvcalc: Any, given: tuple[str, ...], message: str) -> None:
    found = kvcalc("estimate", "llama-3.1-8b", "-c", "auto", *given)
    assert (found.status, message in found.err) == (2, True), found.err


def test_the_first_release_of_llama_cpp_that_chooses_a_context(kvcalc: Any) -> None:
    asked = ("estimate", "llama-3.1-8b", "-c", "auto", "--gpu", "rtx-4090", "--engine")
    assert [kvcalc(*asked, f"llama.cpp@b{build}").status for build in (7079, 7080)] == [2, 0]


def test_vllms_spellings(kvcalc: Any) -> None:
    words = ("estimate", "llama-3.1-8b", "--gpu", "rtx-4090", "--engine", "vllm", "--get", "workload.context_tokens")
    found = {kvcalc(*words, *more).out for more in (("-c", "auto"), ("--max-model-len", "auto"),
                                                    ("--max-model-len", "-1"))}  # fmt: skip
    assert len(found) == 1
    both = kvcalc(*words, "-c", "auto", "--max-model-len", "8k")
    assert (both.status, "contradict" in both.err) == (2, True)
    assert kvcalc(*words, "-c", "-1").status == 2


def test_batch_asks_each_line_anew(kvcalc: Any, tmp_path: Path) -> None:
    path = tmp_path / "questions.jsonl"
    asked = {"model": "llama-3.1-8b", "gpu": "rtx-4090", "engine": "llama.cpp", "context": "auto"}
    lines = [{**asked}, {**asked, "batch": 2}, {**asked}, {**asked, "context": 8192}, {**asked, "engine": "sglang"}]
    path.write_text("\n".join(map(json.dumps, lines)))
    found = [json.loads(line) for line in kvcalc("batch", path).out.splitlines()]
    contexts = [one["workload"]["context_tokens"] for one in found[:4]]
    assert contexts[0] == contexts[2] > contexts[1] > contexts[3] == 8192
    assert found[4]["error"]["exit_code"] == 2


def test_python_refuses_as_well() -> None:
    with pytest.raises(UsageError, match="needs a device"):
        estimate(kvcalc.load_model("llama-3.1-8b"), engine="llama.cpp", fits_context=True)


def test_the_note_does_not_say_that_the_host_has_room() -> None:
    settings = {"n-gpu-layers": "16", "host-memory": "10GiB"}
    found = kvcalc.fit(
        "llama-3.1-8b", kvcalc.find_devices("rtx-4090"), engine="llama.cpp", engine_settings=settings, fits_context=True
    )
    assert not found["fit"]["fits"]
    (text,) = [note["text"] for note in found["warnings"] if note["code"] == "auto-context"]
    assert text == "the context is 131,072 tokens: the model's maximum fits on the device"
