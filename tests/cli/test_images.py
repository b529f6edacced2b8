"""`--images` and `--image-size`: the tokens of the images in a request."""

from __future__ import annotations

import json
from typing import Any

import pytest


def test_the_tokens_of_the_images(kvcalc: Any) -> None:
    options = ("--images", "2", "--image-size", "1920x1080", "--context", "8k", "--json")
    images = kvcalc("estimate", "qwen2.5-vl-7b", "--engine", "vllm", *options).json["workload"]["images"]
    # 1,080 is 39 and 1,920 is 69 merged patches of 28 pixels.
    assert (images["count"], images["tokens_per_image"], images["tokens"]) == (2, 39 * 69, 2 * 39 * 69)
    assert (images["encoder_cache_tokens"], images["encoder_cache_bytes"]) == (16384, 16384 * 3584 * 2)
    # Qwen3-VL's embeddings have the output of three more layers of the tower beside the last one's.
    images = kvcalc("estimate", "qwen3-vl-8b", "--engine", "vllm", *options).json["workload"]["images"]
    assert images["encoder_cache_bytes"] == 16384 * 4 * 4096 * 2
    assert kvcalc("estimate", "qwen2.5-vl-7b", *options).json["workload"]["images"]["encoder_cache_tokens"] is None
    assert kvcalc("estimate", "qwen2.5-vl-7b", "--json").json["workload"]["images"] is None


@pytest.mark.parametrize(
    ("model", "options", "status", "said"),
    [
        ("qwen2.5-vl-7b", ("--images", "9", "--image-size", "1920x1080"), 2, "24,219 tokens, and the context is 4,096"),
        ("qwen2.5-vl-7b", ("--images", "1"), 2, "--image-size is missing"),
        ("qwen2.5-vl-7b", ("--image-size", "10x10"), 2, "--images is missing"),
        ("qwen2.5-vl-7b", ("--images", "1", "--image-size", "10"), 2, "must be WIDTHxHEIGHT"),
        ("qwen2.5-vl-7b", ("--images", "0", "--image-size", "10x10"), 2, "--images"),
        ("llama-3.1-8b", ("--images", "1", "--image-size", "10x10"), 3, "takes no images"),
        ("llama-3.2-11b-vision", ("--images", "1", "--image-size", "10x10"), 3, "by cross-attention"),
    ],
)
def test_what_is_refused(kvcalc: Any, model: str, options: tuple[str, ...], status: int, said: str) -> None:
    result = kvcalc("estimate", model, *options)
    assert result.status == status
    assert said in result.err


def test_fit_plan_and_batch_take_them(kvcalc: Any, tmp_path: Any) -> None:
    options = ("--images", "1", "--image-size", "640x480", "--gpu", "h100")
    assert "1 image of 391 tokens" in kvcalc("fit", "qwen2.5-vl-7b", *options, "--format", "human").out
    load = ("--input-tokens", "2k", "--output-tokens", "100", "--concurrency", "1")
    assert kvcalc("plan", "qwen2.5-vl-7b", *options, *load, "--json").json["best"]["fits"]
    assert kvcalc("plan", "llama-3.1-8b", *options, *load).status == 3
    file = tmp_path / "questions.jsonl"
    file.write_text(json.dumps({"model": "gemma-3-27b", "images": 3, "image_size": "640x480"}) + "\n")
    assert json.loads(kvcalc("batch", str(file)).out)["workload"]["images"]["tokens"] == 3 * 256


def test_strict_refuses_a_tight_fit(kvcalc: Any) -> None:
    longest = kvcalc("fit", "llama-3.1-8b", "--gpu", "rtx-4090", "--engine", "vllm", "--get", "fit.max_context_tokens")
    options = ("llama-3.1-8b", "--gpu", "rtx-4090", "--engine", "vllm", "--context", longest.out.strip())
    assert kvcalc("fit", *options, "--get", "fit.verdict").out == "tight\n"
    assert kvcalc("fit", *options).status == 0
    assert kvcalc("fit", *options, "--strict").status == 4
    assert kvcalc("estimate", *options, "--check").status == 0
    assert kvcalc("estimate", *options, "--check", "--strict").status == 4
    assert kvcalc("estimate", *options, "--strict").status == 2


def test_python_takes_them_too() -> None:
    import kvcalc

    images = kvcalc.ImagesAsked(2, 640, 480)
    answer = kvcalc.estimate("gemma-3-27b", context_tokens=4096, images=images)
    assert answer["workload"]["images"] is not None
    assert answer["workload"]["images"]["tokens"] == 512
