"""The number of requests served at once follows from the engine's own cache layout."""

from __future__ import annotations

import pytest

import kvcalc
from kvcalc.engines import ENGINES
from kvcalc.errors import ModelError, UsageError
from kvcalc.question.question import SpeedQuestion
from kvcalc.throughput.hardware import find_devices
from tests.conftest import asked_presets, loaded, one_of_each_type
from tests.documents import estimate, texts


@pytest.mark.long
@pytest.mark.parametrize(
    ("engine", "gpu"),
    [*((engine, gpu) for engine in ENGINES if engine != "mlx" for gpu in ("l4", "b200")), ("mlx", "m4-max")],
)
def test_no_more_run_than_fit(engine: str, gpu: str, pytestconfig: pytest.Config) -> None:
    question, served = SpeedQuestion(input_tokens="fixed:3000", output_tokens="fixed:1096"), 0
    # A preset has each device with every other engine, or with every fourth if another one is of its type. The
    # device on which thousands of requests run has a third of them.
    each_type, place = {*one_of_each_type()}, [*ENGINES].index(engine) + (gpu == "l4")
    for number, name in enumerate(asked_presets(pytestconfig)):
        each = (2 if name in each_type else 4) * (3 if gpu == "b200" else 1)
        if gpu != "m4-max" and (number + place) % each:
            continue
        try:
            answer = estimate(
                loaded(name), context_tokens=4096, engine=engine, devices=find_devices(gpu), speed=question
            )
        except (ModelError, UsageError):
            continue
        if answer["fit"] is None:
            assert answer["throughput"] is None, name
            continue
        most, throughput = answer["fit"]["max_batch_size"], answer["throughput"]
        if throughput is None:
            continue
        assert most != 0, name  # what does not fit does not run
        running = throughput["serving"]["running_requests"]
        fitting = answer["workload"]["batch_size"]
        assert throughput["serving"]["concurrency"] >= fitting >= 1, name
        # Those that start together end together, and then come in one by one.
        assert running >= 0.5 * fitting, name
        assert answer["fit"]["fits"], name
        # Memory does not limit a model without a cache, but the engine still runs a limited number of sequences.
        assert most is None or fitting <= most, name
        if engine not in ("vllm", "sglang"):  # which start requests before there is room for their whole answers
            assert running <= fitting, name
        served += 1
    assert served > 20


def test_running_requests_are_the_engines_own_count() -> None:
    # TensorRT-LLM keeps all tokens of a windowed layer, so 2 requests of 65k tokens fit. By the formula it is 17.
    answer = estimate(
        kvcalc.load_model("gemma-3-27b"),
        context_tokens=66_560,
        engine="tensorrt-llm",
        tensor_parallel_size=2,
        devices=find_devices("h100x2"),
        speed=SpeedQuestion(input_tokens=65_536, output_tokens=1024),
    )
    fitting = answer["fit"]["max_batch_size"]
    assert fitting - 1 <= answer["throughput"]["serving"]["running_requests"] <= fitting < 10


def test_what_else_grows_with_the_batch_is_counted() -> None:
    # Transformers prefills all sequences at once, so its activations grow with the batch.
    answer = estimate(
        kvcalc.load_model("llama-3-8b"),
        engine="transformers",
        devices=find_devices("h100"),
        speed=SpeedQuestion(input_tokens=2000, output_tokens=48),
    )
    fitting = answer["fit"]["max_batch_size"]
    assert 0.9 * fitting <= answer["throughput"]["serving"]["running_requests"] <= fitting


def test_fewer_requests_than_fit_all_run() -> None:
    answer = estimate(
        kvcalc.load_model("llama-3-8b"),
        engine="vllm",
        devices=find_devices("h100"),
        speed=SpeedQuestion(input_tokens=1000, output_tokens=100, concurrency=8),
    )
    serving = answer["throughput"]["serving"]
    assert (serving["concurrency"], serving["running_requests"]) == (8, 8)


def test_without_the_weights_nothing_is_said_of_speed() -> None:
    spec = kvcalc.read_config(
        {"model_type": "generic", "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64}, "own", "test"
    )
    answer = estimate(spec, devices=find_devices("h100"))
    assert answer["throughput"] is None
    assert any(said.startswith("fit: the weights of own are not known") for said in texts(answer))
