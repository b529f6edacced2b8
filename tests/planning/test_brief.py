"""The short answers of a search decide as the whole ones do."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

import kvcalc
from kvcalc.errors import KvcalcError
from kvcalc.model.layout import Layout
from kvcalc.planning.answers.estimate import answer_case
from kvcalc.planning.plan import traffic as traffic_module
from kvcalc.planning.plan.shapes import all_shapes, stage_shapes
from kvcalc.planning.plan.targets import Targets
from kvcalc.planning.plan.traffic import Platform, Probe, Traffic, probe
from kvcalc.question.question import CacheReuse, Question
from kvcalc.question.request_lengths import lengths_of_pairs, one_length
from kvcalc.server.case import make_case
from kvcalc.throughput.hardware import find_devices, find_gpu
from tests.conftest import ROOT

DECIDES = ("free_bytes", "free_low_bytes")


def found(traffic: Traffic, kind: Platform, shape: Any, running: int, is_brief: bool) -> Any:
    try:
        one = probe(traffic, kind, shape, running, is_brief)
    except KvcalcError as error:
        return str(error)
    serving = one.serving if one.trouble is None or one.speed is not None else None
    fit: Any = one.memory.fit
    figures = [fit[name] for name in DECIDES]
    return one.running, one.trouble, one.is_tight, figures, serving, isinstance(one, Probe)


@pytest.mark.parametrize("engine", ["vllm", "sglang", "tensorrt-llm", "llama.cpp"])
@pytest.mark.parametrize("name", ["llama-3.1-8b", "gpt-oss-120b", "deepseek-v3", "qwen3-next-80b-a3b"])
def test_a_brief_probe_is_the_whole_one(name: str, engine: str) -> None:
    draw, model = Random(name + engine), kvcalc.load_model(name)
    fits = set()
    for _ in range(12):
        gpu = find_gpu(draw.choice(("h100", "b200", "mi300x", "l40s")))
        pairs = [(draw.randint(100, 9000), draw.randint(10, 2000)) for _ in range(draw.choice((1, 5)))]
        reuse = draw.choice((None, None, CacheReuse(prefix_tokens=64)))
        targets = Targets(None, 5.0, None, draw.choice((None, 0.03)))
        question = Question(model, reuse=reuse)
        traffic = Traffic(question, lengths_of_pairs(pairs, "x"), targets, True, draw.random() < 0.3, True)
        kind = Platform(gpu, 64, engine)
        every = all_shapes if engine != "llama.cpp" else lambda gpu, _, engine: stage_shapes(gpu, engine)
        shape, running = draw.choice(every(gpu, question, engine)), draw.choice((1, 3, 40, 700, 5000))
        whole = found(traffic, kind, shape, running, False)
        assert found(traffic, kind, shape, running, True) == whole, (shape, running)
        fits.add(isinstance(whole, tuple) and whole[1] is None)
    assert True in fits or name != "llama-3.1-8b"


def test_a_calibration_narrows_the_ranges_of_a_brief_probe_too() -> None:
    """The benchmark is of this model on a device like this, so the upper ends that a plan judges are others."""
    log = str(ROOT / "tests" / "logs" / "vllm-bench.json")
    speed = kvcalc.SpeedQuestion(calibration=kvcalc.read_calibration([log]))
    traffic = Traffic(Question(kvcalc.load_model("llama-3.1-8b")), one_length(1000, 200), Targets(16, None), False)
    calibrated = traffic._replace(question=traffic.question._replace(speed=speed))
    asked = Platform(find_gpu("h100"), 8, "vllm"), Layout(1, 1), 16
    plain, whole, brief = (
        found(one, *asked, is_brief) for one, is_brief in ((traffic, False), (calibrated, False), (calibrated, True))
    )
    assert plain != whole == brief


def briefly(question: Question, requests: int = 4, tokens: int = 3200) -> tuple[Any, Any]:
    """The brief answer and the whole one, of a Llama on an H100."""
    speed = kvcalc.SpeedQuestion(None, tokens - 200, 200, requests)
    case = make_case(question._replace(engine="vllm", devices=find_devices("h100"), speed=speed)).at(tokens, requests)
    return traffic_module.brief_answer(case, True), answer_case(case)


LLAMA = Question(kvcalc.load_model("llama-3.1-8b"))


def test_a_search_of_plain_layouts_needs_no_whole_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    def whole(case: Any) -> Any:
        raise AssertionError("a whole answer")

    monkeypatch.setattr(traffic_module, "answer_case", whole)
    traffic = Traffic(LLAMA, one_length(1000, 200), Targets(16, None), False)
    for running, fits in ((1, True), (16, True), (10_000, False)):
        one = probe(traffic, Platform(find_gpu("h100"), 8, "vllm"), Layout(1, 1), running, is_brief=True)
        assert (one.trouble is None) is fits


def test_requests_that_fill_the_cache_to_the_last_byte_are_served() -> None:
    """By hand: 4 sequences of 3,200 tokens in 32 layers of 8 KV heads, keys and values in 128 numbers of 2 bytes."""
    held = 4 * 3200 * 32 * 8 * 2 * 128 * 2
    for memory, free in ((held, 0), (held + 2**21, 2**21)):
        brief, whole = briefly(LLAMA._replace(kv_memory_bytes=memory))
        assert brief.fit["free_bytes"] == whole.fit["free_bytes"] == free
        assert brief.document["throughput"]["serving"] == whole.document["throughput"]["serving"] is not None


@pytest.mark.parametrize("memory", ["64GiB", "2GiB"])
def test_a_part_in_host_memory_must_fit_there(memory: str) -> None:
    settings = {"n-gpu-layers": "20", "host-memory": memory}
    speed = kvcalc.SpeedQuestion(None, 3000, 200, 4)
    question = LLAMA._replace(engine="llama.cpp", engine_settings=settings, devices=find_devices("h100"), speed=speed)
    case = make_case(question).at(3200, 4)
    brief, whole = traffic_module.brief_answer(case, True), answer_case(case)
    assert brief is not None
    assert brief.fit["fits"] is whole.fit["fits"] is (memory == "64GiB")
    assert [brief.fit[name] for name in DECIDES] == [whole.fit[name] for name in DECIDES]  # type: ignore[literal-required]


@pytest.mark.parametrize("what", ["unknown memory", "copies", "unknown speed"])
def test_only_the_whole_answer_knows_what_few_layouts_have(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert briefly(LLAMA)[0] is not None
    question = LLAMA
    if what == "unknown memory":
        monkeypatch.setattr(traffic_module, "budget", lambda _: "the weights are not known")
    elif what == "unknown speed":
        monkeypatch.setattr(traffic_module, "speed_of", lambda *_: "the bandwidth is not known")
    else:
        question = LLAMA._replace(data_parallel_size=2)
    speed = kvcalc.SpeedQuestion(None, 3000, 200, 4)
    devices = find_devices("h100x2" if what == "copies" else "h100")
    case = make_case(question._replace(engine="vllm", devices=devices, speed=speed)).at(3200, 4)
    assert traffic_module.brief_answer(case, True) is None
