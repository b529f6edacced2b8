"""The facts about the engines' schedulers, and that whoever needs them asks the interface."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import pytest

import kvcalc
from kvcalc import load_model
from kvcalc.engines import disaggregation_of, engines_that, load_engine
from kvcalc.engines.scheduler import Schedule
from kvcalc.errors import LayoutError, UsageError
from kvcalc.throughput.scheduling import StepRules
from tests.conftest import ROOT

SCHEDULED = engines_that(lambda engine: engine.has_scheduler)


def schedule_of(engine: str, settings: Mapping[str, str], model: str = "llama-3-8b", stages: int = 1) -> Schedule:
    found = load_engine(engine, load_model(model), settings, stages).schedule()
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("engine", "settings", "stages", "expected"),
    [
        ("vllm", {}, 1, StepRules(8192, overlaps=True)),
        ("vllm", {"no-async-scheduling": "true"}, 1, StepRules(8192)),
        ("vllm", {"max-num-batched-tokens": "2048"}, 2, StepRules(4096)),
        ("vllm", {"no-enable-chunked-prefill": ""}, 1, StepRules(8192, divides=False, overlaps=True)),
        # 300 running requests have four tokens each in a step.
        ("vllm", {"max-num-batched-tokens": "512"}, 1, StepRules(1200, overlaps=True)),
        (
            "sglang",
            {"chunked-prefill-size": "512"},
            2,
            StepRules(512, mixes=False, overlaps=True, reads_beside=True),
        ),
        ("sglang", {}, 1, StepRules(8192, mixes=False, overlaps=True, reads_beside=True)),
        ("tensorrt-llm", {}, 1, StepRules(10_000 + 1200, divides=False, overlaps=True)),
        ("tensorrt-llm", {}, 2, StepRules(2 * 8192, divides=False)),
        # A number that is given is not raised.
        ("tensorrt-llm", {"max-num-tokens": "2048"}, 1, StepRules(2048, divides=False, overlaps=True)),
        ("tensorrt-llm", {"enable-chunked-prefill": ""}, 1, StepRules(8192, overlaps=True)),
        ("tensorrt-llm", {"disable-overlap-scheduler": ""}, 1, StepRules(10_000 + 1200, divides=False)),
        ("sglang", {"enable-mixed-chunk": ""}, 1, StepRules(8192, overlaps=True, reads_beside=True)),
        ("sglang", {"disable-overlap-schedule": ""}, 1, StepRules(8192, mixes=False, reads_beside=True)),
        (
            "sglang",
            {"scheduler-recv-interval": "30"},
            1,
            StepRules(8192, mixes=False, overlaps=True, reads_beside=True),
        ),
        (
            "sglang",
            {"max-prefill-tokens": "20000"},
            1,
            StepRules(8192, mixes=False, overlaps=True, reads_beside=True),
        ),
        (
            "sglang",
            {"max-prefill-tokens": "4096"},
            1,
            StepRules(8192, mixes=False, overlaps=True, enough_tokens=4096, reads_beside=True),
        ),
        ("llama.cpp", {}, 1, StepRules(2048)),
    ],
)
def test_a_step_has_room_for_all_running_requests(
    engine: str, settings: dict[str, str], stages: int, expected: StepRules
) -> None:
    assert schedule_of(engine, settings, stages=stages).steps(300, 10_000, 4) == expected


def test_a_step_of_slots_has_the_tokens_of_a_batch_and_no_more() -> None:
    assert schedule_of("llama.cpp", {}).steps(3000, 10).step_tokens == 2048
    assert schedule_of("vllm", {"max-num-batched-tokens": "2048"}).steps(3000, 10).step_tokens == 3000


def test_an_engine_reserves_the_answer_or_preempts() -> None:
    facts = {
        engine: (found.reserves_answer, found.finds_preempted, found.merges_prefixes)
        for engine in SCHEDULED
        for found in [schedule_of(engine, {})]
    }
    assert facts == {
        "vllm": (False, True, False), "sglang": (False, False, True), "tensorrt-llm": (True, False, False),
        "llama.cpp": (True, False, False),
    }  # fmt: skip
    assert not schedule_of("vllm", {"no-enable-prefix-caching": "true"}).finds_preempted


def test_sglang_expects_a_part_of_the_answers() -> None:
    """SGLANG_INIT_NEW_TOKEN_RATIO and the others (srt/environ.py, 0.5.23)."""
    found = schedule_of("sglang", {}).new_tokens
    assert found is not None
    assert found._asdict() == {
        "first": 0.7, "least": pytest.approx(0.098), "steps": 600, "most_tokens": 4096, "retract_steps": 20
    }  # fmt: skip


def test_vllm_needs_steps_for_whole_requests_if_it_does_not_divide_prompts() -> None:
    """verify_max_model_len (config/scheduler.py of vLLM 0.33.0)."""
    asked: dict[str, Any] = {"engine": "vllm", "devices": kvcalc.find_devices("h100"), "context_tokens": 10_000}
    whole = {"no-enable-chunked-prefill": True}
    with pytest.raises(LayoutError, match="8,192 tokens in a step are fewer than the 10,000"):
        kvcalc.estimate("llama-3.1-8b", engine_settings={**whole, "max-num-batched-tokens": 8192}, **asked)
    found = kvcalc.estimate("llama-3.1-8b", engine_settings=whole, **asked)
    assert found["fit"] is not None
    assert found["fit"]["fits"]


@pytest.mark.parametrize(("factor", "first"), [("1", 0.7), ("0.5", 0.35), ("3.33", 1.0)])
def test_sglang_multiplies_the_first_part_up_to_1(factor: str, first: float) -> None:
    """NewTokenRatioTracker.from_config (srt/managers/scheduler_components, 0.5.23)."""
    found = schedule_of("sglang", {"schedule-conservativeness": factor}).new_tokens
    assert found is not None
    assert (found.first, found.least) == pytest.approx((first, first * 0.14))


def test_llama_cpp_computes_a_prompt_in_batches_and_saves_windows() -> None:
    def ends(schedule: Schedule, tokens: int, start: int = 0) -> list[int]:
        found = [start]
        while found[-1] < tokens:
            found.append(schedule.end_of_part(found[-1], tokens, schedule.step_tokens))
        return found

    assert ends(schedule_of("llama.cpp", {}), 5000, 100) == [100, 2148, 4196, 5000]
    windows = schedule_of("llama.cpp", {"ubatch-size": "256"}, "gemma-3-4b")
    assert ends(windows, 5000) == [0, 2048, 4096, 4740, 4996, 5000]
    assert ends(windows, 3) == [0, 3]
    assert schedule_of("llama.cpp", {"swa-full": "true"}, "gemma-3-4b").part_ends == ()
    # The others divide prompts by the room in a step only.
    assert schedule_of("vllm", {}).end_of_part(0, 50_000, 20_000) == 20_000


def test_the_schema_and_the_help_name_the_engines_with_a_schedule(kvcalc: Any) -> None:
    schema = json.loads((ROOT / "kvcalc" / "schema.json").read_text())
    names = schema["$defs"]["simulate"]["properties"]["engine"]["properties"]["scheduler"]["enum"]
    assert names == [schedule_of(engine, {}).name for engine in SCHEDULED]
    words = kvcalc("simulate", "--help").out.partition("--engine NAME[@RELEASE]")[2].partition("auto")[0]
    assert re.findall(r"[a-z][\w.-]*\w", words.replace(" or ", " ")) == SCHEDULED


def test_what_separate_instances_need() -> None:
    found = {name: disaggregation_of(f"{name}@2026-01-01") for name in engines_that(lambda one: one.disaggregation())}
    assert {name: (one.staged_prefill, one.staged_decode) for name, one in found.items()} == {
        "vllm": (False, False), "sglang": (True, False), "tensorrt-llm": (True, True)
    }  # fmt: skip
    # SGLang's router asks both instances at once. It reserves num_reserved_decode_tokens. TensorRT-LLM has a buffer to
    # send and one to receive.
    assert [one.host_passes for one in found.values()] == [2, 1, 2]
    assert [one.reserved_tokens for one in found.values()] == [0, 512, 0]
    assert [one.transfer_buffers for one in found.values()] == [0, 0, 2]


def test_an_engine_without_separate_instances_is_told_which_have_them() -> None:
    with pytest.raises(UsageError, match="mlx has no separate prefill and decode instances") as caught:
        disaggregation_of("mlx@0.30")
    assert caught.value.hint == "--engine vllm, sglang, tensorrt-llm"
