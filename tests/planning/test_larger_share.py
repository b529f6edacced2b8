"""A model that fits only with a larger share of the memory than the engine's default."""

from __future__ import annotations

from typing import Any

import pytest

import kvcalc
from kvcalc.question.question import SpeedQuestion
from tests.documents import texts


def ask(engine: str = "sglang", gpu: str = "b200", **asked: Any) -> dict[str, Any]:
    speed = SpeedQuestion(input_tokens=8192, output_tokens=1024, concurrency=4)
    given: dict[str, Any] = {"devices": kvcalc.find_devices(gpu), "tensor_parallel_size": 4, "speed": speed, **asked}
    return dict(kvcalc.estimate(kvcalc.load_model("deepseek-r1"), engine=engine, dtype="fp8", **given))


def test_an_answer_that_does_not_fit_has_no_times_of_a_start_with_another_share() -> None:
    # InferenceX serves it with --mem-fraction-static 0.95. SGLang's default share leaves nothing for the cache.
    found = ask()
    assert not found["fit"]["fits"]
    assert found["throughput"] is None
    assert any("with --mem-fraction-static 0.95, there is memory for" in text for text in texts(found))
    given = ask(engine_settings={"mem-fraction-static": "0.95"})
    assert given["fit"]["fits"]
    assert given["throughput"] is not None


def test_the_screen_of_an_answer_that_does_not_fit_has_no_times(kvcalc: Any) -> None:
    load = ("--input-tokens", "16000", "--output-tokens", "20", "--concurrency", "300")
    shown = kvcalc("estimate", "mimo-7b", "--engine", "sglang", "--gpu", "l4", *load)
    assert "sglang 0.5.23 starts; a request has room for 2,133 of 16,020 tokens" in shown.out
    assert not any(word in shown.out for word in ("time to first token", "decode step", "energy"))
    assert "with --mem-fraction-static 0.95, there is memory for 2 requests of this length" in shown.err


def test_a_share_that_was_given_is_kept() -> None:
    found = ask(engine_settings={"mem-fraction-static": "0.85"})
    assert found["throughput"] is None
    assert not any("there is memory for" in text for text in texts(found))


@pytest.mark.parametrize("engine", ["sglang", "vllm", "tensorrt-llm"])
def test_a_model_that_no_share_fits_has_no_speed(engine: str) -> None:
    found = ask(engine, "h100")
    assert not found["fit"]["fits"]
    assert found["throughput"] is None


def test_the_verdict_of_fit_stays_and_names_the_flag(kvcalc: Any) -> None:
    load = ("--input-tokens", "8k", "--output-tokens", "1k", "--concurrency", "4")
    asked = ("deepseek-r1", "--gpu", "b200x4", "--engine", "sglang", "--dtype", "fp8", *load)
    found = kvcalc("fit", *asked, "--json")
    assert found.status == 4
    assert any("with --mem-fraction-static 0.95" in text for text in texts(found.json))
    assert kvcalc("fit", *asked, "--mem-fraction-static", "0.95").status == 0


def test_a_step_of_a_batch_that_does_not_fit_has_no_speed() -> None:
    assert ask(speed=None, context_tokens=9216)["throughput"] is None
