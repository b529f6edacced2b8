"""The command line, a batch line, a sweep, a comparison and Python give the same figures for the same question."""

from __future__ import annotations

import json
from functools import cache
from random import Random
from typing import Any

import pytest

from kvcalc.cli.batch import Questions
from kvcalc.cli.json_lines import Line
from kvcalc.errors import KvcalcError
from kvcalc.model.drafting import Speculation
from kvcalc.model.resolve import load_model
from kvcalc.planning.figures import FIGURES
from kvcalc.throughput.hardware import Devices, find_gpu
from tests.conftest import Result, preset_names
from tests.documents import estimate

ENGINES = ("logical", "transformers", "vllm", "vllm@0.11", "sglang", "tensorrt-llm", "llama.cpp")
GPUS = ("h100", "h200", "l40s", "a100", "mi300x", "rtx-4090", "b200")
SETTINGS: dict[str, dict[str, Any]] = {
    "vllm": {"block-size": "32", "max-num-batched-tokens": "4096", "enable-prefix-caching": True},
    "sglang": {"page-size": "64", "context-length": "32768", "swa-full-tokens-ratio": "0.5"},
    "tensorrt-llm": {"tokens-per-block": "64"},
    "llama.cpp": {"cache-type-k": "q8_0", "kv-unified": True, "parallel": "4"},
    "transformers": {"cache": "static"},
}
# One random question for so many cases of the other fuzz tests: it takes five answers.
CASES_PER_QUESTION = 10


def random_question(random: Random) -> dict[str, Any]:
    """The options of a random question: name to text, or to True for a flag."""
    asked: dict[str, Any] = {
        "engine": random.choice(ENGINES), "context": str(random.choice((1, 17, 1000, 4096, 8192, 32768, 100_000))),
        "batch": str(random.choice((1, 2, 7, 64))), "tp": str(random.choice((1, 1, 2, 4, 8))),
        "pp": str(random.choice((1, 1, 1, 2, 3))), "kv-dtype": random.choice(("auto", "auto", "bf16", "fp8", "q8_0")),
    }  # fmt: skip
    if random.random() < 0.4:
        asked["dtype"] = random.choice(("bf16", "fp16", "fp8", "int4", "q4_k_m"))
    if random.random() < 0.1:
        asked["encoder-tokens"] = "500"
    where = random.random()
    if where < 0.6:
        asked["gpu"] = random.choice(GPUS)
        if random.random() < 0.1:
            asked["ep"] = asked["tp"]
        if random.random() < 0.1:
            asked["prefix-hit-rate"] = "0.3"
    elif where < 0.8:
        asked["kv-memory"] = "40GiB"
    if random.random() < 0.1:
        asked["speculative"] = random.choice(("mtp:2", "ngram:4", "draft:3"))
        asked["acceptance-length"] = "1.9"
        if asked["speculative"] == "draft:3":
            asked["draft-model"] = "llama-3.2-1b"
    own = SETTINGS.get(asked["engine"].partition("@")[0], {})
    if own and random.random() < 0.4:
        name = random.choice(sorted(own))
        asked[name] = own[name]
    return asked


def words(asked: dict[str, Any]) -> list[str]:
    return [word for name, text in asked.items() for word in ((f"--{name}",) if text is True else (f"--{name}", text))]


def ask_python(model: str, asked: dict[str, Any]) -> dict[str, Any]:
    from kvcalc.planning.layout import SpeedQuestion

    names = {"context": "context_tokens", "batch": "batch_size", "tp": "tensor_parallel_size",
             "pp": "pipeline_parallel_size", "encoder-tokens": "encoder_tokens"}  # fmt: skip
    given: dict[str, Any] = {names[name]: int(text) for name, text in asked.items() if name in names}
    given |= {name.replace("-", "_"): asked[name] for name in ("engine", "kv-dtype", "dtype") if name in asked}
    if "gpu" in asked:
        given["devices"] = Devices(find_gpu(asked["gpu"]), int(asked["tp"]) * int(asked["pp"]))
    if "kv-memory" in asked:
        given["kv_memory_bytes"] = 40 * 2**30
    if "ep" in asked or "prefix-hit-rate" in asked:
        hits = float(asked.get("prefix-hit-rate", 0))
        given["speed"] = SpeedQuestion(int(asked.get("ep", 1)), prefix_hit_rate=hits)
    if "speculative" in asked:
        method, _, number = asked["speculative"].partition(":")
        small = load_model(asked["draft-model"]) if "draft-model" in asked else None
        given["speculative"] = Speculation(method, int(number), float(asked["acceptance-length"]), small)
    settings = {name: text for own in SETTINGS.values() for name, text in asked.items() if name in own}
    return estimate(model, **given, engine_settings=settings)


def figures_of(document: dict[str, Any]) -> dict[str, Any]:
    """The figures of an estimate that every path must print."""
    fit, speed = document["fit"] or {}, document["throughput"] or {}
    return {
        **{name: document["kv_cache"][name] for name in FIGURES},
        **{name: fit.get(name) for name in ("fits", "free_bytes")},
        **{name: speed.get(name) for name in ("decode_step_seconds", "prefill_seconds")},
    }


def refusal_of(result: Result) -> tuple[int, str]:
    return result.status, result.err.partition("\n")[0].removeprefix("kvcalc: ")


def swept_point(result: Result) -> tuple[dict[str, Any] | None, str | None]:
    """The last point of a sweep, or the reason why it has no figures."""
    if result.status:
        return None, refusal_of(result)[1]
    point = result.json["points"][-1]
    return (None, point["reason"]) if point["reason"] else (point, None)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read each model and build each command only once, not once per question."""
    from kvcalc.cli.app import LazyGroup
    from kvcalc.model import resolve
    from kvcalc.planning import compare

    load = cache(resolve.load_model)
    monkeypatch.setattr(resolve, "load_model", load)
    monkeypatch.setattr(compare, "load_model", load)
    build, built = LazyGroup.get_command, dict[str, Any]()

    def get_command(group: Any, ctx: Any, name: str) -> Any:
        if name not in built:
            built[name] = build(group, ctx, name)
        return built[name]

    monkeypatch.setattr(LazyGroup, "get_command", get_command)


@pytest.mark.fuzz
@pytest.mark.usefixtures("quick")
def test_every_path_gives_the_same_figures_or_the_same_refusal(kvcalc: Any, pytestconfig: pytest.Config) -> None:
    number_asked = max(1, pytestconfig.getoption("--cases") // CASES_PER_QUESTION)
    random, questions, names = Random(20261105 + pytestconfig.getoption("--fuzz-seed")), Questions(), preset_names()
    answered = 0
    for number in range(number_asked):
        model, asked = random.choice(names), random_question(random)
        batch = questions.answer(Line(number, json.dumps({"model": model, **asked}).encode()))
        estimate = kvcalc("estimate", model, *words(asked), "--json")
        compared = kvcalc("compare", model, *words(asked), "--json")
        # The question is the last point of a grid: its figures must not depend on the points before it.
        grid = {**asked, "context": f"1,{asked['context']}", "batch": f"1,{asked['batch']}"}
        point, reason = swept_point(kvcalc("sweep", model, *words(grid), "--format", "json"))
        if "error" in batch:
            refused = batch["error"]["exit_code"], batch["error"]["message"]
            assert refusal_of(estimate) == refusal_of(compared) == refused, (model, asked)
            # If two things are wrong, the shortest context may be refused for the other one.
            assert reason == refused[1] or (reason and "context-length" in asked), (model, asked)
            with pytest.raises(KvcalcError) as caught:
                ask_python(model, asked)
            assert (caught.value.exit_code, caught.value.message) == refused, (model, asked)
            continue
        answered += 1
        assert estimate.json == batch == ask_python(model, asked), (model, asked)
        wanted = figures_of(batch)
        assert point is not None, (model, asked, reason)
        assert {name: point[name] for name in wanted} == wanted, (model, asked)
        (row,) = compared.json["models"]
        assert {name: row[name] for name in wanted} == wanted, (model, asked)
    assert answered > number_asked / 4
