"""`fit`: the lines add up to the device, the limits are tight, and the estimates are close to what engines print."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest

import kvcalc
from kvcalc.errors import KvcalcError, ModelError, UsageError
from kvcalc.throughput.hardware import Devices, find_devices, find_gpu, own_gpu
from tests.conftest import loaded
from tests.documents import estimate, fit, texts

GIB = 2**30
ENGINES = ("logical", "transformers", "vllm", "sglang", "tensorrt-llm", "llama.cpp")


def ask(name: str, devices: str, **workload: Any) -> dict[str, Any]:
    return estimate(loaded(name), devices=find_devices(devices), **workload)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("name", "device"), [("llama-3-8b", "h100"), ("gemma-3-27b", "a100"), ("gpt-oss-120b", "h100"),
                                              ("llama-3-70b", "h100"), ("llama-2-7b", "m2-ultra")])  # fmt: skip
def test_lines_add_up_to_the_device(name: str, device: str, engine: str) -> None:
    answer = ask(name, device, engine=engine, context_tokens=8192, batch_size=2)
    parts = answer["fit"]
    lines = parts["lines"]
    assert sum(line["bytes"] for line in lines) == parts["device_bytes"] == find_gpu(device).memory_bytes

    def of(kind: str) -> int:
        return sum(line["bytes"] for line in lines if line["kind"] == kind)

    # llama.cpp keeps the input embedding in host memory, if that is not the device's own.
    is_elsewhere = engine == "llama.cpp" and device != "m2-ultra" and name != "gemma-3-27b"
    assert of("weights") == parts["weights_bytes"]
    towers = sum(line["bytes"] for line in lines if "tower" in line["name"])
    padding = sum(line["bytes"] for line in lines if "padding" in line["name"])
    assert bool(padding) == (name == "gpt-oss-120b" and engine == "vllm")
    tables = sum(line["bytes"] for line in lines if line["name"] == "rotary tables")
    assert bool(tables) == (engine == "vllm")
    checkpoint = parts["weights_bytes"] - towers - padding - tables
    assert (checkpoint < answer["weights"]["bytes"]) == is_elsewhere
    assert checkpoint <= answer["weights"]["bytes"]
    assert bool(towers) == (name == "gemma-3-27b" and engine != "llama.cpp")
    assert of("kv_cache") == parts["kv_cache_bytes"] == answer["kv_cache"]["bytes_per_device"]
    assert (of("activation"), of("reserve")) == (parts["activation_bytes"], parts["reserve_bytes"])
    assert of("free") == parts["free_bytes"] == parts["kv_cache_memory_bytes"] - parts["kv_cache_bytes"]
    assert parts["fits"] == (parts["free_bytes"] >= 0)
    assert all(line["bytes"] >= 0 for line in lines if line["kind"] != "free")


@pytest.mark.parametrize("engine", ENGINES)
def test_limits_fit_and_one_more_does_not(engine: str) -> None:
    def fits(context: int, batch: int) -> bool:
        answer = ask("llama-3.1-8b", "l40s", engine=engine, context_tokens=context, batch_size=batch)
        return bool(answer["fit"]["fits"])

    limits = ask("llama-3.1-8b", "l40s", engine=engine, context_tokens=2048, batch_size=2)["fit"]
    context, batch = limits["max_context_tokens"], limits["max_batch_size"]
    assert context > 2048
    assert fits(context, 2)
    assert not fits(context + 1, 2)
    assert fits(2048, batch)
    assert not fits(2048, batch + 1)


def test_vllm_counts_its_blocks_from_the_devices_memory() -> None:
    answer = ask("llama-3.1-8b", "h100", engine="vllm", context_tokens=8192)
    blocks = answer["fit"]["kv_cache_memory_bytes"] // (16 * 131072)
    assert answer["engine"]["num_gpu_blocks"] == blocks
    assert answer["engine"]["kv_cache_tokens"] == blocks * 16
    assert answer["engine"]["gpu_memory_utilization"] == 0.92
    assert answer["engine"]["max_num_batched_tokens"] == 8192


def test_tensorrt_llm_takes_its_fraction_once() -> None:
    plain = ask("llama-3.1-8b", "h100", engine="tensorrt-llm")
    given = ask("llama-3.1-8b", "h100", engine="tensorrt-llm", engine_settings={"free-gpu-memory-fraction": "0.9"})
    assert given["fit"]["kv_cache_memory_bytes"] == plain["fit"]["kv_cache_memory_bytes"]
    assert given["engine"]["num_gpu_blocks"] == plain["engine"]["num_gpu_blocks"]


def test_ranks_share_the_weights_and_what_they_repeat_is_said() -> None:
    four = ask("llama-3-70b", "h100x4", tensor_parallel_size=4, engine="logical")
    parts, whole = four["fit"], four["weights"]["bytes"]
    assert whole <= 4 * parts["weights_bytes"]
    assert 4 * parts["weights_bytes"] - whole == 3 * parts["weights_replicated_bytes"]
    assert four["hardware"]["replicas"] == 1
    assert four["hardware"]["num_devices"] == 4


def test_stages_share_the_weights_too() -> None:
    two = ask("llama-3-70b", "h100x2", engine="vllm", pipeline_parallel_size=2)["fit"]
    whole = ask("llama-3-70b", "h100", engine="vllm")["fit"]["weights_bytes"]
    assert whole / 2 <= two["weights_bytes"] < 0.52 * whole


def test_more_devices_than_one_replica_takes_are_replicas() -> None:
    assert ask("llama-3-8b", "h100x8", tensor_parallel_size=2)["hardware"]["replicas"] == 4
    with pytest.raises(UsageError, match="8 devices with --tp 16"):
        ask("llama-3-70b", "h100x8", tensor_parallel_size=16)
    with pytest.raises(UsageError):
        ask("llama-3-70b", "h100x6", tensor_parallel_size=4)


def test_a_memory_for_the_cache_replaces_the_engines_reserve() -> None:
    # A figure that an engine printed is better than an estimate of its reserve.
    fit = ask("llama-3-8b", "h100", engine="vllm", kv_memory_bytes=50 * GIB)["fit"]
    assert fit["kv_cache_memory_bytes"] == 50 * GIB
    assert sum(line["bytes"] for line in fit["lines"]) == fit["device_bytes"]
    assert [line["name"] for line in fit["lines"] if line["kind"] == "reserve"] == [
        "not used for the cache (--kv-memory)"
    ]
    with pytest.raises(UsageError, match=r"--kv-memory 75.00 GiB: only 64\.\d+ GiB is left after the weights"):
        ask("llama-3-8b", "h100", kv_memory_bytes=75 * GIB, engine="vllm")


def test_weights_that_are_not_known_give_no_fit() -> None:
    spec = kvcalc.read_config({"model_type": "generic", "num_hidden_layers": 2, "num_attention_heads": 4,
                               "hidden_size": 64}, "own", "test")  # fmt: skip
    answer = estimate(spec, devices=find_devices("h100"))
    assert answer["fit"] is None
    assert answer["hardware"]["name"] == "h100-sxm"
    assert any(said.startswith("fit: ") for said in texts(answer))
    with pytest.raises(ModelError) as caught:
        fit(spec, find_devices("h100"))
    assert caught.value.exit_code == 3


def test_what_does_not_fit_is_told_how_many_would() -> None:
    model = kvcalc.load_model("llama-3-70b")
    document = fit(model, find_devices("h100"), context_tokens=8192)
    assert document["fit"]["fits"] is False
    smallest = document["smallest"]
    sizes = {"tensor_parallel_size": 2, "pipeline_parallel_size": 1, "data_parallel_size": 1}
    assert smallest == {"num_devices": 2, **sizes}
    assert fit(model, find_devices("h100x2"), tensor_parallel_size=2, context_tokens=8192)["fit"]["fits"]
    assert fit(model, find_devices("h100x4"), tensor_parallel_size=4)["smallest"] is None
    # 405 billion parameters do not fit on any number of A400s that this model can be split over.
    huge = fit(kvcalc.load_model("llama-3.1-405b"), find_devices("rtx-a400"))
    assert huge["smallest"] is None
    assert huge["fit"]["max_context_tokens"] == huge["fit"]["max_batch_size"] == 0


@pytest.mark.parametrize(
    ("name", "devices", "asked", "said"),
    [
        ("llama-3-70b", "h100", {}, "no memory is left for the cache"),
        ("llama-3.1-8b", "a10g", {"context_tokens": 131072}, "the longest context that fits is"),
        ("llama-3.1-8b", "a10g", {"context_tokens": 8192, "batch_size": 99}, "the largest batch that fits is"),
    ],
)
def test_the_reason_is_said(name: str, devices: str, asked: dict[str, Any], said: str) -> None:
    answer = ask(name, devices, engine="vllm", **asked)
    assert not answer["fit"]["fits"]
    assert any(said in text for text in texts(answer))


def test_the_longest_context_in_the_warning_is_the_fits() -> None:
    answer = ask("llama-3.1-8b", "a10g", engine="vllm", context_tokens=131072)
    assert any(f"{answer['fit']['max_context_tokens']:,}" in text for text in texts(answer))


class Start(NamedTuple):
    """An engine's start-up log: the GiB available for the cache, and the GiB of the device."""

    source: str
    model: str
    device: str
    memory_gib: float
    engine: str
    available_gib: float
    settings: dict[str, str]
    tp: int = 1
    context: int = 8192


# Public logs with the flags they mention. The device's memory is the printed one. Those of vLLM are in
# benchmarks/fit/vllm_memory.tsv.
STARTS = [
    Start("sgl-project/sglang#6753", "llama-3-8b", "h200", 139.72, "sglang", 106.36, {"mem-fraction-static": "0.88"}),
    Start("vllm-project/vllm#21348", "qwen3-235b-a22b", "h100", 79.10, "sglang", 16.46,
          {"mem-fraction-static": "0.93"}, 4),
]  # fmt: skip


def predicted_gib(start: Start) -> float:
    gpu = own_gpu(find_gpu(start.device), int(start.memory_gib * GIB), None, None)
    answer = estimate(
        kvcalc.load_model(start.model), devices=Devices(gpu, start.tp), tensor_parallel_size=start.tp,
        engine=start.engine, engine_settings=start.settings, context_tokens=start.context,
        dtype="fp8" if start.model == "qwen3-235b-a22b" else None,
    )  # fmt: skip
    return float(answer["fit"]["kv_cache_memory_bytes"] / GIB)


@pytest.mark.parametrize("start", STARTS, ids=lambda start: start.source)
def test_near_what_an_engine_printed(start: Start) -> None:
    """Within 3.5 % of the device's memory. The weights are exact, the other parts are estimated."""
    assert abs(predicted_gib(start) - start.available_gib) < 0.035 * start.memory_gib


def test_a_refused_engine_setting() -> None:
    with pytest.raises(KvcalcError, match="mem-fraction-static"):
        ask("llama-3-8b", "h100", engine="vllm", engine_settings={"mem-fraction-static": "0.9"})
    with pytest.raises(UsageError, match="divides a device's memory"):
        estimate(kvcalc.load_model("llama-3-8b"), engine="vllm", engine_settings={"enforce-eager": "true"})


def test_a_gguf_file_is_as_wide_as_its_header_says(tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="the extra `gguf`")
    from tests.model.gguf_writing import write
    from tests.model.test_gguf import SMALL, llama_tensors

    file = write(tmp_path / "x.gguf", "llama", SMALL, llama_tensors("Q8_0"), file_type=7)
    devices = find_devices("rtx-4090")
    answer = estimate(kvcalc.load_model(str(file)), context_tokens=256, engine="llama.cpp", devices=devices)
    # A layer of the file's own width. LLaMA's own MLP would take 512 x 3 x 11,008 x 4 bytes.
    assert 512 * 3 * 256 * 4 < answer["fit"]["activation_bytes"] < 8 * 2**20
    # The input embedding is in host memory: 1,000 rows of 256 in Q8_0.
    assert answer["fit"]["weights_bytes"] == answer["weights"]["bytes"] - 1000 * 256 // 32 * 34
    two = estimate(
        kvcalc.load_model(str(file)), devices=find_devices("rtx-4090x2"), tensor_parallel_size=2, engine="logical"
    )
    assert two["fit"]["weights_bytes"] == -(-answer["weights"]["bytes"] // 2)


@pytest.mark.parametrize("engine", ["logical", "transformers", "vllm", "sglang", "llama.cpp"])
@pytest.mark.parametrize("name", ["bart-large", "t5-small", "whisper-tiny"])
def test_the_longest_context_of_an_encoder_decoder_fits(name: str, engine: str) -> None:
    """Its encoder's input is assumed to be as long as the context, unless the model says otherwise."""
    model = loaded(name)
    for encoder_tokens in (None, 1500):

        def part(tokens: int | None, encoder_tokens: int | None = encoder_tokens) -> dict[str, Any]:
            workload: dict[str, Any] = {"context_tokens": tokens, "encoder_tokens": encoder_tokens, "batch_size": 2}
            found: dict[str, Any] = estimate(model, kv_memory_bytes=20 * GIB, engine=engine, **workload)["fit"]
            return found

        try:
            longest = part(None)["memory_context_tokens"]
        except ModelError:
            continue  # this engine does not run such models, or their layout is not known
        assert part(longest)["fits"]
        assert not part(longest + 1)["fits"]
        assert part(longest)["memory_context_tokens"] == longest


def test_and_so_does_that_on_a_device() -> None:
    for devices, engine in (("h100", "vllm"), ("h100x2", "vllm"), ("h100", "logical")):
        longest = ask("t5-small", devices, engine=engine, batch_size=2)["fit"]["memory_context_tokens"]
        for tokens, fits in ((longest, True), (longest + 1, False)):
            found = ask("t5-small", devices, engine=engine, batch_size=2, context_tokens=tokens)
            assert found["fit"]["fits"] is fits, (devices, engine)
