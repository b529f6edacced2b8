"""Models with a vision or audio tower that nothing describes: it is not counted, and every answer says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import kvcalc
from kvcalc.errors import ModelError
from kvcalc.memory.weights import count_parameters
from kvcalc.model.hf_config import read_config
from kvcalc.model.presets import load_preset, shipped_presets
from kvcalc.model.resolve import load_model, spec_of
from kvcalc.model.spec import weights_of
from kvcalc.model.towers import most_parameters, towers_of
from kvcalc.planning.check.servers import choose_server
from kvcalc.question.question import ImagesAsked
from kvcalc.server.weights import TOWER_NOT_COUNTED
from kvcalc.throughput.hardware import find_devices

MODEL, COMMAND = "keye-vl-8b", "vllm serve Kwai-Keye/Keye-VL-8B-Preview --max-model-len 32768"
LIMIT_NONE = '--limit-mm-per-prompt \'{"image": 0, "video": 0}\''


def warned(document: Any) -> bool:
    return TOWER_NOT_COUNTED in [note["code"] for note in document["warnings"]]


def answers(model: str) -> dict[str, Any]:
    """Every answer that counts memory on a device."""
    one = find_devices("l40s")
    load: Any = {"input_tokens": 1000, "output_tokens": 100}
    return {
        "estimate": kvcalc.estimate(load_model(model), devices=one, engine="vllm"),
        "fit": kvcalc.fit(model, devices=one, engine="vllm"),
        "check": kvcalc.check(COMMAND.replace("Kwai-Keye/Keye-VL-8B-Preview", model), one),
        "compare": kvcalc.compare([model], devices=one, engine="vllm"),
        "plan": kvcalc.plan(model, ["l40s"], engine="vllm", requests_per_second=1.0, **load),
        "simulate": kvcalc.simulate(
            model, one, engine="vllm", prompt_tokens=1000, answer_tokens=100, requests_per_second=1.0, requests=20
        ),
    }


def test_every_answer_about_a_device_warns() -> None:
    found, of_text = answers(MODEL), answers("llama-3.1-8b")
    assert [name for name in found if not warned(found[name])] == []
    assert [name for name in of_text if warned(of_text[name])] == []


@pytest.mark.parametrize(("engine", "gpu"), [("vllm", "l20"), ("sglang", "l20"), ("tensorrt-llm", "l40s")])
def test_the_range_has_room_for_the_tower(engine: str, gpu: str) -> None:
    """It may take more memory, and never less: the other end of the range is as without it."""
    spec, one = load_model(MODEL), find_devices(gpu)
    with_tower: Any = kvcalc.estimate(spec, devices=one, engine=engine)["fit"]
    without: Any = kvcalc.estimate(spec._replace(has_unknown_tower=False), devices=one, engine=engine)["fit"]
    assert with_tower["free_bytes"] == without["free_bytes"]
    high = with_tower["free_high_bytes"], without["free_high_bytes"] or without["free_bytes"]
    assert high[0] == high[1]
    weights = weights_of(spec)
    assert weights is not None
    most = 2 * most_parameters(count_parameters(weights).total)
    assert with_tower["free_low_bytes"] <= (without["free_low_bytes"] or without["free_bytes"]) - most
    line = next(line for line in with_tower["lines"] if line["name"] == "tower of unknown size")
    assert (line["bytes"], line["high_bytes"], line["estimated"]) == (0, most, True)


def test_the_loaded_weights_are_those_of_the_language_model_and_the_tower() -> None:
    """vLLM loads 8.61 GiB of Qwen3.5-4B, of which the language model is 7.96 GiB with its tables."""
    fit: Any = kvcalc.check("vllm serve Qwen/Qwen3.5-4B --max-model-len 32768", find_devices("l20"))["fit"]
    assert fit["weights_bytes"] == pytest.approx(8.61 * 2**30, rel=0.01)


def test_a_margin_within_the_range_is_tight() -> None:
    one = find_devices("rtx-4090")
    found: Any = kvcalc.fit(MODEL, devices=one, engine="vllm", context_tokens=4096)["fit"]
    assert (found["fits"], found["verdict"]) == (True, "tight")
    settings = {"language-model-only": ""}
    text: Any = kvcalc.fit(MODEL, devices=one, engine="vllm", engine_settings=settings, context_tokens=4096)["fit"]
    assert text["verdict"] == "fits"
    load: Any = {"input_tokens": 1000, "output_tokens": 100, "concurrency": 8}
    planned: Any = kvcalc.plan(MODEL, ["rtx-4090"], engine="vllm", max_devices=1, **load)
    assert planned["best"]["verdict"] == "tight"
    (strict,) = kvcalc.plan(MODEL, ["rtx-4090"], engine="vllm", max_devices=1, strict=True, **load)["plans"]
    assert not strict["fits"]


@pytest.mark.parametrize(
    ("command", "is_warned"),
    [
        (COMMAND, True), (f"{COMMAND} --language-model-only", False), (f"{COMMAND} {LIMIT_NONE}", False),
        (f"{COMMAND} --limit-mm-per-prompt.image 0 --limit-mm-per-prompt.video 0", False),
        (f"{COMMAND} --limit-mm-per-prompt.image 2", True),
        ("llama-server -m keye-vl-8b", False),  # the tower is in a file of its own
    ],
)  # fmt: skip
def test_a_server_of_text_alone_needs_no_tower(command: str, is_warned: bool) -> None:
    found: Any = kvcalc.check(command, find_devices("l20"))
    assert warned(found) == is_warned
    assert any(line["name"] == "tower of unknown size" for line in found["fit"]["lines"]) == is_warned


def test_zero_limits_are_read_as_text_alone() -> None:
    assert choose_server(f"{COMMAND} {LIMIT_NONE}", None).read().settings["language-model-only"] == ""
    other = choose_server(f"{COMMAND} --limit-mm-per-prompt.image 2", None).read()
    assert "language-model-only" not in other.settings
    assert other.unknown == ["--limit-mm-per-prompt"]


def test_every_preset_of_a_model_with_a_tower_says_so() -> None:
    """Its config describes the tower, or the preset has `tower: unknown`. No note says it instead."""
    told = ("only the language model", "vision tower has no cache", "tower was not found")
    for preset in shipped_presets():
        assert not any(text in (preset.note or "").casefold() for text in told if spec_of(preset).multimodal is None)
    unknown = [preset for preset in shipped_presets() if preset.has_unknown_tower]
    assert len(unknown) == 18
    assert all(spec_of(preset).has_unknown_tower for preset in unknown)


@pytest.mark.parametrize(
    ("name", "has_tower"),
    [
        ("stepfun-ai/Step-3.7-Flash", True), ("stepfun-ai/Step-3.5-Flash", False), ("Qwen/Qwen3.5-4B-FP8", True),
        ("unsloth/Qwen3.5-4B", True), ("AIDC-AI/Ovis2-16B", True), ("Qwen/Qwen2.5-14B-Instruct", False),
        ("nvidia/NVIDIA-Nemotron-Nano-12B-v2-VL-BF16", True), ("nvidia/NVIDIA-Nemotron-Nano-12B-v2", False),
        ("SkunkworksAI/BakLLaVA-1", True), ("numind/NuExtract", False), ("Qwen/Qwen3-ASR-0.6B", True),
    ],
)  # fmt: skip
def test_a_name_of_a_model_with_a_tower_never_looks_like_a_language_model(name: str, has_tower: bool) -> None:
    assert load_model(name).has_towers == has_tower


def test_a_config_around_a_language_model_without_its_tower_has_one_of_unknown_size() -> None:
    inner = load_preset(str(Path(kvcalc.__file__).parent.parent / "presets/models/keye-vl-8b.yaml")).config
    around: dict[str, object] = {"model_type": "qwen3_5", "text_config": inner}
    assert read_config(around, "a", "b").has_unknown_tower
    described = {**around, "vision_config": {"depth": 24, "hidden_size": 1024}}
    assert not read_config(described, "a", "b").has_unknown_tower
    assert not read_config(inner, "a", "b").has_towers
    # An encoder-decoder's encoder is counted with it, and some models read patches of images without a tower.
    assert not load_model("adept/fuyu-8b").has_towers


def test_the_bound_holds_for_every_known_tower() -> None:
    for preset in shipped_presets():
        spec = spec_of(preset)
        sizes = [tower.parameters for tower in towers_of(spec)]
        weights = weights_of(spec)
        if not sizes or None in sizes or weights is None:
            continue
        assert sum(size or 0 for size in sizes) <= most_parameters(count_parameters(weights).total), preset.name


def test_a_preset_says_only_that_its_tower_is_unknown(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    text = "name: a\nsource: b\ndate: 2026-01-01\ntower: {}\nconfig: {{model_type: llama}}\n"
    path.write_text(text.format("unknown"))
    assert load_preset(str(path)).has_unknown_tower
    path.write_text(text.format("small"))
    with pytest.raises(ModelError, match="tower must be unknown"):
        load_preset(str(path))


def test_images_of_a_tower_that_is_not_known_are_refused() -> None:
    with pytest.raises(ModelError, match="the vision tower is not known"):
        kvcalc.estimate(load_model(MODEL), images=ImagesAsked(1, 1024, 1024))
