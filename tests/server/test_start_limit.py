"""vLLM does not start a model with recurrent states if it may run more requests than the cache has blocks.

Its CUDA graphs of whole steps need a block for each (resolve_cudagraph_mode_and_sizes, config/compilation.py, vLLM 0.20
to 0.33; vllm-project/vllm#49064).
"""

from __future__ import annotations

from typing import Any, cast

import pytest

import kvcalc
from kvcalc.engines import start_command
from kvcalc.errors import DoesNotFitError
from kvcalc.planning.check.answer import check, runs
from kvcalc.planning.check.servers import servers_in
from kvcalc.planning.manifests import emit
from kvcalc.throughput.hardware import find_devices
from tests.documents import estimate, texts

MODEL = "Qwen/Qwen3.6-27B-FP8"


def answer(device: str, engine: str = "vllm", **options: Any) -> dict[str, Any]:
    asked = {"context_tokens": 131_072, "devices": find_devices(device), "engine": engine, **options}
    return dict(estimate(kvcalc.load_model(asked.pop("model", MODEL)), **asked))


def started(device: str, **settings: str | bool) -> dict[str, Any]:
    return dict(answer(device, engine_settings={"gpu-memory-utilization": "0.9", **settings})["fit"])


def test_the_blocks_are_those_of_a_log() -> None:
    # vLLM 0.26.0 on an L40S with 0.9 of the memory: 8.82 GiB, "exceeds available Mamba cache blocks (184)".
    found = answer("l40s", "vllm@0.26.0", engine_settings={"gpu-memory-utilization": "0.9"})
    assert found["fit"]["start_limit"] == pytest.approx(184, abs=4)
    # Without settings for the requests, the memory decides, and a warning says what to change.
    assert found["fit"]["fits"]
    limit = found["fit"]["start_limit"]
    assert [text for text in texts(found) if f"there are {limit}: use --max-num-seqs {limit}" in text]


@pytest.mark.parametrize(
    ("settings", "fits"),
    [
        ({"max-num-seqs": "256"}, False), ({"max-num-seqs": "150"}, True),
        ({"max-num-seqs": "256", "enforce-eager": True}, True),
        ({"max-num-seqs": "256", "cudagraph-mode": "piecewise"}, True),
        ({"max-num-seqs": "256", "cudagraph-mode": "full_decode_only"}, False),
    ],
)  # fmt: skip
def test_a_limit_that_was_asked_for_decides(settings: dict[str, str | bool], fits: bool) -> None:
    found = started("l40s", **settings)
    assert found["fits"] == fits
    assert bool(found["max_context_tokens"]) == bool(found["max_batch_size"]) == fits


def test_the_largest_limit_starts_and_one_more_does_not() -> None:
    # A larger limit reserves more memory, so the blocks are asked for anew.
    limit = next(n for n in range(210, 0, -1) if started("l40s", **{"max-num-seqs": str(n)})["fits"])
    assert started("l40s", **{"max-num-seqs": str(limit)})["start_limit"] >= limit
    assert started("l40s", **{"max-num-seqs": str(limit + 1)})["start_limit"] < limit + 1


def test_other_models_releases_and_engines_have_no_such_limit() -> None:
    assert answer("l40s", "vllm@0.19.1")["fit"]["start_limit"] is None
    assert answer("l40s", "sglang")["fit"]["start_limit"] is None
    assert answer("l40s", model="llama-3.1-8b")["fit"]["start_limit"] is None
    assert answer("l40s", engine_settings={"enforce-eager": True})["fit"]["start_limit"] is None


def checked(command: str, device: str = "l40s") -> kvcalc.documents.Check:
    return check(servers_in(f"vllm serve {MODEL} --max-model-len 131072 {command}")[0], find_devices(device))


def test_a_command_counts_its_default() -> None:
    found = checked("--gpu-memory-utilization 0.9")
    limit = found["fit"]["start_limit"]
    assert not found["starts"]
    assert "--max-num-seqs 256" in str(found["reason"])
    server: Any = found["server"]
    assert server["try"] == [{"option": "--max-num-seqs", "value": str(limit)}]
    for changed in (f"--max-num-seqs {limit}", "--enforce-eager", "-cc.cudagraph_mode=PIECEWISE"):
        assert runs(checked(f"--gpu-memory-utilization 0.9 {changed}")), changed
    config = """--compilation-config '{"cudagraph_mode": "PIECEWISE", "cudagraph_capture_sizes": [1, 2]}'"""
    assert checked(f"--gpu-memory-utilization 0.9 {config}")["command"]["not_counted"] == [
        "compilation-config cudagraph_capture_sizes (CUDA graphs and compilation)"
    ]
    assert runs(checked(f"--gpu-memory-utilization 0.9 {config}"))


def test_without_memory_the_limit_is_not_the_reason() -> None:
    found = checked("--dtype bfloat16", "rtx-4090")
    assert found["fit"]["start_limit"] == 0
    assert "memory" in str(found["reason"])


def test_a_release_is_said_beside_the_command(kvcalc: Any) -> None:
    words = ("check", "vllm", "serve", MODEL, "--max-model-len", "32768", "--gpu", "h100", "--json")
    assert kvcalc(*words).json["engine"]["version"] == "0.33.0"
    older = kvcalc(*words, "--release", "0.19")
    assert (older.status, older.json["engine"]["version"]) == (0, "0.19")
    assert kvcalc(*words, "--release", "0.20").status == 4
    assert "vllm@never: not a release" in kvcalc(*words, "--release", "never").err


@pytest.mark.parametrize("engine", ["vllm", "sglang", "tensorrt-llm"])
@pytest.mark.parametrize("load", [{"concurrency": 4}, {"concurrency": 400}, {"requests_per_second": 2.0}], ids=str)
def test_a_plan_prints_a_limit_with_which_its_server_starts(engine: str, load: dict[str, Any]) -> None:
    """TensorRT-LLM keeps a state for each of --max_batch_size requests."""
    found = kvcalc.plan(MODEL, ["h100"], input_tokens=500, output_tokens=200, engine=engine, **load)
    row = cast(Any, found["plans"][0])
    server = servers_in(emit(found, start_command(engine).program))[0]
    answer = check(server, find_devices(f"h100x{row['num_devices'] // row['replicas']}"))
    assert answer["starts"], server.words
    assert answer["fit"]["fits"], server.words


def test_a_simulation_has_states_for_the_requests_that_fit() -> None:
    load: dict[str, Any] = {"prompt_tokens": 1500, "answer_tokens": 120, "requests_per_second": 0.5, "requests": 20}
    found = kvcalc.simulate("qwen3.6-27b", "a100-80gb", **load, engine="tensorrt-llm")
    most = found["engine"]["max_running_requests"]
    same = kvcalc.simulate(
        "qwen3.6-27b", "a100-80gb", **load, engine="tensorrt-llm", engine_settings={"max-batch-size": str(most)}
    )
    assert same["results"] == found["results"]
    with pytest.raises(DoesNotFitError):
        kvcalc.simulate(
            "qwen3.6-27b", "a100-80gb", **load, engine="tensorrt-llm", engine_settings={"max-batch-size": "2048"}
        )


def test_a_mode_of_graphs_is_printed_as_vllm_takes_it() -> None:
    settings = {"cudagraph-mode": "piecewise"}
    found = kvcalc.plan(
        MODEL, ["l40s"], input_tokens=500, output_tokens=200, concurrency=4, engine_settings=settings
    )  # fmt: skip
    text = emit(found, "vllm")
    assert """--compilation-config '{"cudagraph_mode": "PIECEWISE"}'""" in text
    assert servers_in(text)[0].read().settings["cudagraph-mode"] == "piecewise"


def test_a_simulation_runs_no_more_requests_than_it_starts_with() -> None:
    load: dict[str, Any] = {"prompt_tokens": 200, "answer_tokens": 20, "requests_per_second": 5.0, "requests": 50}
    with pytest.raises(DoesNotFitError, match="does not start with --max-num-seqs 400"):
        kvcalc.simulate(MODEL, "l40s", **load, engine="vllm", engine_settings={"max-num-seqs": "400"})
    found = kvcalc.simulate(MODEL, "l40s", **load, engine="vllm")
    assert found["engine"]["max_running_requests"] < 256
    assert [text for text in texts(found) if "does not start with --max-num-seqs 256, the default" in text]
