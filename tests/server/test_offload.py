"""Parts of a model in host memory: `-ngl`, `--n-cpu-moe`, `--no-kv-offload` of llama.cpp."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import kvcalc
from kvcalc.engines.llama_cpp.placement import parse_placement
from kvcalc.engines.placement import Placement
from kvcalc.errors import KvcalcError, ModelError, UsageError
from kvcalc.question.question import Question
from kvcalc.server.case import make_case
from kvcalc.server.speed import speed_of
from kvcalc.throughput.hardware import Devices, find_devices, find_gpu, own_gpu
from tests.documents import estimate, fit, texts

GIB = 2**30

# Llama-3.1-8B in 16 bits: q and o of 4096 x 4096, k and v of 1024 x 4096, three matrices of 14336 x 4096, two norms.
LAYER = 2 * (2 * 4096**2 + 2 * 1024 * 4096 + 3 * 14336 * 4096 + 2 * 4096)
TABLE = 2 * 128_256 * 4096
NORM = 2 * 4096
# K and V of 8 heads of 128 in fp16, for 8,192 tokens.
LAYER_CACHE = 8192 * 2 * 8 * 128 * 2


def ask(model: str, gpu: str = "rtx-3090", context: int = 8192, batch: int = 1, **more: Any) -> dict[str, Any]:
    settings = more.pop("settings", {})
    return estimate(
        kvcalc.load_model(model), devices=find_devices(gpu), engine="llama.cpp", context_tokens=context,
        batch_size=batch, engine_settings=settings, **more,
    )  # fmt: skip


def placed(model: str = "llama-3.1-8b", gpu: str = "rtx-3090", **settings: str) -> dict[str, Any]:
    return ask(model, gpu, settings={name.replace("_", "-"): text for name, text in settings.items()})


# Bytes


def test_the_last_layers_and_the_output_are_on_the_device() -> None:
    found = placed(n_gpu_layers="20")
    part = found["fit"]
    # 20 are the output and the last 19 layers. The input embedding is always in host memory.
    assert part["weights_bytes"] == 19 * LAYER + TABLE + NORM
    assert part["host"]["weights_bytes"] == 13 * LAYER + TABLE
    assert part["weights_bytes"] + part["host"]["weights_bytes"] == found["weights"]["bytes"]
    assert part["kv_cache_bytes"] == found["kv_cache"]["bytes_per_device"] == 19 * LAYER_CACHE
    assert part["host"]["kv_cache_bytes"] == 13 * LAYER_CACHE
    assert found["kv_cache"]["total_bytes"] == 32 * LAYER_CACHE
    assert part["host"]["host_layers"] == 13
    assert part["host"]["host_bytes"] == part["host"]["weights_bytes"] + part["host"]["kv_cache_bytes"]
    assert sum(line["bytes"] for line in part["lines"]) == part["device_bytes"]


@pytest.mark.parametrize(
    ("number", "device", "layers"),
    [("0", 0, 32), ("1", TABLE + NORM, 32), ("2", LAYER + TABLE + NORM, 31), ("33", 32 * LAYER + TABLE + NORM, 0),
     ("99", 32 * LAYER + TABLE + NORM, 0), ("all", 32 * LAYER + TABLE + NORM, 0)],
)  # fmt: skip
def test_the_output_counts_as_a_layer(number: str, device: int, layers: int) -> None:
    part = placed(n_gpu_layers=number, gpu="h100")["fit"]
    assert (part["weights_bytes"], part["host"]["host_layers"]) == (device, layers)


def test_a_tied_embedding_is_in_both_memories() -> None:
    found = placed("llama-3.2-1b", n_gpu_layers="all")
    table = 2 * 128_256 * 2048
    assert found["fit"]["weights_bytes"] == found["weights"]["bytes"]
    assert found["fit"]["host"]["weights_bytes"] == table
    # Without the output on the device, there is no copy.
    alone = placed("llama-3.2-1b", n_gpu_layers="0")["fit"]
    assert (alone["weights_bytes"], alone["host"]["weights_bytes"]) == (0, found["weights"]["bytes"])


def test_only_routed_experts_move() -> None:
    found, moved = placed("gpt-oss-120b", n_gpu_layers="all"), placed("gpt-oss-120b", n_cpu_moe="10")
    # 128 experts with two matrices of 5760 and 2880 rows in MXFP4 (17 bytes per 32) and biases in fp32.
    layer = 128 * ((5760 + 2880) * 2880 // 32 * 17 + 4 * (5760 + 2880))
    assert found["fit"]["weights_bytes"] - moved["fit"]["weights_bytes"] == 10 * layer
    assert moved["fit"]["host"]["weights_bytes"] - found["fit"]["host"]["weights_bytes"] == 10 * layer
    assert moved["fit"]["kv_cache_bytes"] == found["fit"]["kv_cache_bytes"]
    assert placed("gpt-oss-120b", cpu_moe="")["fit"] == placed("gpt-oss-120b", n_cpu_moe="36")["fit"]


def test_shared_experts_and_dense_layers_stay() -> None:
    """DeepSeek-V2-Lite has a dense first layer and shared experts."""
    none, one, two = (placed("deepseek-v2-lite", n_cpu_moe=number)["fit"] for number in ("0", "1", "2"))
    assert none["weights_bytes"] == one["weights_bytes"]
    # 64 experts of three matrices of 1408 x 2048.
    assert one["weights_bytes"] - two["weights_bytes"] == 64 * 3 * 1408 * 2048 * 2


def test_the_whole_cache_in_host_memory() -> None:
    part = placed(no_kv_offload="")["fit"]
    assert (part["kv_cache_bytes"], part["host"]["kv_cache_bytes"]) == (0, 32 * LAYER_CACHE)
    assert part["weights_bytes"] == 32 * LAYER + TABLE + NORM


@pytest.mark.parametrize(
    "model", ["gemma-3-12b", "qwen3.5-35b-a3b", "deepseek-v2-lite", "gpt-oss-20b", "jamba-v0.1", "gemma-3n-e4b"]
)
@pytest.mark.parametrize("number", ["0", "1", "7", "20", "all"])
def test_nothing_is_lost(model: str, number: str) -> None:
    """The device's part and the host's part are the whole model, but for the copy of a tied embedding."""
    found = placed(model, n_gpu_layers=number)
    part, whole = found["fit"], estimate(kvcalc.load_model(model), engine="llama.cpp", context_tokens=8192)
    assert part["kv_cache_bytes"] + part["host"]["kv_cache_bytes"] == whole["kv_cache"]["total_bytes"]
    copy = part["weights_bytes"] + part["host"]["weights_bytes"] - found["weights"]["bytes"]
    tied = kvcalc.load_model(model).around
    assert tied is not None
    assert (copy > 0) == (tied.tied and number != "0")


def test_without_these_options_nothing_changes() -> None:
    found = ask("llama-3.1-8b")
    assert found["fit"]["host"] is None
    assert found["throughput"]["host"] is None


# The input embedding without these options


def test_the_input_embedding_is_not_on_the_device() -> None:
    found = ask("llama-3.1-8b")
    assert found["fit"]["weights_bytes"] == 32 * LAYER + TABLE + NORM == found["weights"]["bytes"] - TABLE
    assert found["fit"]["weights_bytes"] == placed(n_gpu_layers="all")["fit"]["weights_bytes"]
    tied = ask("llama-3.2-1b")
    assert tied["fit"]["weights_bytes"] == tied["weights"]["bytes"]
    # The table of Gemma 3n's inputs to every layer is also looked up: 262,144 rows of 35 x 256.
    nano = ask("gemma-3n-e4b")
    assert nano["weights"]["bytes"] - nano["fit"]["weights_bytes"] == 2 * 262_144 * 35 * 256
    for engine in ("vllm", "logical"):
        other = estimate(kvcalc.load_model("llama-3.1-8b"), devices=find_devices("rtx-3090"), engine=engine)
        tables = sum(line["bytes"] for line in other["fit"]["lines"] if line["name"] == "rotary tables")
        assert other["fit"]["weights_bytes"] == other["weights"]["bytes"] + tables


@pytest.mark.parametrize("gpu", ["m2-ultra", "gb10", "ryzen-ai-max-395"])
def test_a_device_that_shares_the_hosts_memory_holds_it(gpu: str) -> None:
    found = ask("llama-3.1-8b", gpu)
    assert found["fit"]["weights_bytes"] == found["weights"]["bytes"]


def test_of_several_devices_none_has_the_input_embedding() -> None:
    two = ask("llama-3.1-8b", "rtx-3090x2", pipeline_parallel_size=2)
    # llama.cpp counts the output as a layer: the first device has 17 layers, the second 15 and the output.
    assert two["fit"]["weights_bytes"] == 15 * LAYER + TABLE + NORM
    tied = ask("llama-3.2-1b", "rtx-3090x2", pipeline_parallel_size=2)
    layer = 2 * (2 * 2048**2 + 2 * 512 * 2048 + 3 * 8192 * 2048 + 2 * 2048)
    assert tied["fit"]["weights_bytes"] == 7 * layer + 2 * 128_256 * 2048 + 2 * 2048


# GGUF files


def test_a_file_is_divided_by_its_tensors(tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="the extra `gguf`")
    from tests.model.gguf_writing import base, config_of, write

    pairs = {**base(config_of("qwen3-30b-a3b")), "block_count": 3, "expert_count": 8, "expert_used_count": 2}
    pairs |= {"attention.key_length": 128, "attention.value_length": 128}
    tensors: dict[str, tuple[tuple[int, ...], str]] = {
        "token_embd.weight": ((2048, 100), "Q4_K"), "output.weight": ((2048, 100), "Q6_K"),
        "output_norm.weight": ((2048,), "F32"),
    }  # fmt: skip
    for layer in range(3):
        tensors[f"blk.{layer}.attn_q.weight"] = ((2048, 4096), "Q4_K")
        tensors[f"blk.{layer}.ffn_up_exps.weight"] = ((2048, 512, 8), "Q4_K")
    path = str(write(tmp_path / "x.gguf", "qwen3moe", pairs, tensors))
    q4 = 144 / 256
    other, routed, table = int(2048 * 4096 * q4), int(2048 * 512 * 8 * q4), int(2048 * 100 * q4)
    output = 2048 * 100 // 256 * 210 + 4 * 2048
    for settings, device in (
        ({"n-gpu-layers": "2"}, other + routed + output),
        ({"n-cpu-moe": "2"}, 3 * other + routed + output),
        ({"n-gpu-layers": "0"}, 0),
    ):
        found = ask(path, settings=settings)
        assert found["fit"]["weights_bytes"] == device
        assert found["fit"]["host"]["weights_bytes"] == 3 * (other + routed) + output + table - device
        assert found["weights"]["bytes"] == 3 * (other + routed) + output + table
    assert ask(path)["fit"]["weights_bytes"] == 3 * (other + routed) + output


# What fits


def test_auto_is_the_most_layers_that_fit() -> None:
    found = placed(gpu="rtx-3060", n_gpu_layers="auto")
    number = found["fit"]["host"]["n_gpu_layers"]
    assert 1 < number < 33
    assert found["fit"]["fits"]
    assert placed(gpu="rtx-3060", n_gpu_layers=str(number)) == found
    assert not placed(gpu="rtx-3060", n_gpu_layers=str(number + 1))["fit"]["fits"]
    assert placed(gpu="h100", n_gpu_layers="auto")["fit"]["host"]["n_gpu_layers"] == 33


def test_auto_leaves_room_for_the_batch() -> None:
    def layers(batch: int) -> int:
        return int(
            ask("llama-3.1-8b", "rtx-3060", batch=batch, settings={"n-gpu-layers": "auto"})["fit"]["host"][
                "n_gpu_layers"
            ]
        )

    assert layers(8) < layers(1)


def test_fit_names_what_to_keep_in_host_memory() -> None:
    def fits(model: str, **settings: str) -> bool:
        return bool(placed(model, **settings)["fit"]["fits"])

    answer: Any = fit(
        kvcalc.load_model("gpt-oss-120b"), find_devices("rtx-3090"), engine="llama.cpp", context_tokens=8192
    )
    layers, experts = (answer["offload"][key]["value"] for key in ("n_gpu_layers", "n_cpu_moe"))
    assert fits("gpt-oss-120b", n_gpu_layers=str(layers))
    assert not fits("gpt-oss-120b", n_gpu_layers=str(layers + 1))
    assert fits("gpt-oss-120b", n_cpu_moe=str(experts))
    assert not fits("gpt-oss-120b", n_cpu_moe=str(experts - 1))
    host = placed("gpt-oss-120b", n_cpu_moe=str(experts))["fit"]["host"]
    assert answer["offload"]["n_cpu_moe"]["host_bytes"] == host["host_bytes"]


def test_fit_suggests_nothing_where_it_fits_or_for_other_engines() -> None:
    small: Any = fit(kvcalc.load_model("llama-3.2-1b"), find_devices("rtx-3090"), engine="llama.cpp")
    other: Any = fit(kvcalc.load_model("llama-3.1-70b"), find_devices("rtx-3090"), engine="vllm")
    dense: Any = fit(kvcalc.load_model("llama-3.1-70b"), find_devices("rtx-3090"), engine="llama.cpp")
    assert small["offload"] is None
    assert other["offload"] is None
    assert dense["offload"]["n_cpu_moe"] is None
    # Neither fits into a host with 1 GiB, and the layers of several devices stay there.
    host: Any = fit(
        kvcalc.load_model("gpt-oss-120b"), find_devices("rtx-3090"), engine="llama.cpp",
        engine_settings={"host-memory": "1GiB"},
    )  # fmt: skip
    two: Any = fit(kvcalc.load_model("gpt-oss-120b"), find_devices("rtx-3090x2"), engine="llama.cpp")
    assert (host["fit"]["fits"], two["fit"]["fits"]) == (False, False)
    assert (host["offload"], two["offload"]) == (None, None)


def test_the_host_must_have_room() -> None:
    needed = placed(n_gpu_layers="20")["fit"]["host"]["host_bytes"]
    enough = placed(n_gpu_layers="20", host_memory=str(needed))
    short = placed(n_gpu_layers="20", host_memory=str(needed - 1))
    assert (enough["fit"]["fits"], enough["fit"]["host"]["host_free_bytes"]) == (True, 0)
    assert (short["fit"]["fits"], short["fit"]["verdict"]) == (False, "does_not_fit")
    assert any("the host needs" in text for text in texts(short))


def test_where_the_host_is_judged_the_prompts_that_it_keeps_are_named() -> None:
    def says(**settings: str) -> bool:
        found = kvcalc.fit(
            "qwen3-32b", kvcalc.find_devices("rtx-3090"), engine="llama.cpp", dtype="q4_k_m", context_tokens=4096,
            engine_settings={"n-gpu-layers": "20", **settings},
        )  # fmt: skip
        return any(note["code"] == "cache-ram" for note in found["warnings"])

    assert says(**{"host-memory": "64GiB"})
    assert not says()
    assert not says(**{"host-memory": "64GiB", "before-pull": "16812"})


def test_the_host_sets_limits_too() -> None:
    needed = placed(n_gpu_layers="20")["fit"]["host"]["host_bytes"]
    limits = placed(n_gpu_layers="20", host_memory=str(needed + 13 * LAYER_CACHE))["fit"]
    assert limits["max_context_tokens"] == 2 * 8192
    assert limits["max_batch_size"] == 2
    # With the whole cache there, only the host sets a limit.
    whole = placed(no_kv_offload="", host_memory=str(TABLE + 3 * 32 * LAYER_CACHE))["fit"]
    assert (whole["max_context_tokens"], whole["max_batch_size"]) == (3 * 8192, 3)
    unknown = placed(no_kv_offload="")
    # No memory sets a limit, but a context of llama.cpp has at most 256 sequences.
    assert unknown["fit"]["max_batch_size"] == 256
    assert any("--host-memory" in text for text in texts(unknown))


def test_a_sweep_checks_the_host(kvcalc: Any) -> None:
    options = ("--gpu", "rtx-3090", "--engine", "llama.cpp", "-ngl", "20", "--host-memory", "7GiB", "--batch", "1,4")
    points = kvcalc("sweep", "llama-3.1-8b", "--context", "8k", *options, "--json").json["points"]
    assert [point["fits"] for point in points] == [True, False]


# Refusals


def test_a_sweep_needs_one_number_of_layers(kvcalc: Any) -> None:
    found = kvcalc("sweep", "llama-3.1-8b", "--gpu", "rtx-3090", "--engine", "llama.cpp", "-ngl", "auto")
    assert (found.status, "-ngl 20" in found.err) == (2, True)


def test_auto_leaves_the_memory_that_is_given_to_the_cache() -> None:
    found = placed(gpu="rtx-3060", n_gpu_layers="auto")["fit"]["host"]["n_gpu_layers"]
    settings = {"n-gpu-layers": "auto"}
    fewer = ask("llama-3.1-8b", "rtx-3060", settings=settings, kv_memory_bytes=6 * GIB)["fit"]
    assert fewer["host"]["n_gpu_layers"] < found
    assert fewer["fits"]


@pytest.mark.parametrize(
    ("settings", "says"),
    [({"n-gpu-layers": "-1"}, "auto or all"), ({"n-gpu-layers": "many"}, "auto or all"), ({"n-cpu-moe": "x"}, "whole"),
     ({"n-cpu-moe": "3", "cpu-moe": ""}, "use one"), ({"n-gpu-layers": "3", "host-memory": "x"}, "--host-memory")],
)  # fmt: skip
def test_what_is_refused(settings: dict[str, str], says: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_placement(settings)
    assert says in f"{caught.value.message} {caught.value.hint}"


def test_other_engines_and_layouts_refuse(kvcalc: Any) -> None:
    other = kvcalc("estimate", "llama-3.1-8b", "--gpu", "h100", "--engine", "vllm", "-ngl", "20")
    assert (other.status, "belongs to llama.cpp" in other.err) == (2, True)
    without = kvcalc("estimate", "llama-3.1-8b", "--engine", "llama.cpp", "-ngl", "20")
    assert (without.status, "--gpu" in without.err) == (2, True)
    stages = kvcalc(
        "estimate", "llama-3.1-8b", "--gpu", "rtx-3090x2", "--pp", "2", "--engine", "llama.cpp", "-ngl", "20"
    )
    assert (stages.status, "--split-mode none" in stages.err) == (2, True)


@pytest.mark.parametrize("model", ["t5-base", "bge-m3"])
def test_encoders_are_refused(model: str) -> None:
    with pytest.raises(KvcalcError) as caught:
        placed(model, n_gpu_layers="3")
    assert caught.value.exit_code == ModelError.exit_code


def test_short_names_are_those_of_llama_cpp(kvcalc: Any) -> None:
    base = ("estimate", "gpt-oss-20b", "--gpu", "rtx-3060", "--engine", "llama.cpp")
    for short, long in (("-ngl 9", "--n-gpu-layers 9"), ("-ngl 9", "--gpu-layers 9"), ("-ncmoe 9", "--n-cpu-moe 9"),
                        ("-cmoe", "--cpu-moe"), ("-nkvo", "--no-kv-offload")):  # fmt: skip
        assert kvcalc(*base, *short.split(), "--json").json == kvcalc(*base, *long.split(), "--json").json


def test_batch_takes_them(kvcalc: Any, tmp_path: Path) -> None:
    path = tmp_path / "questions.jsonl"
    path.write_text(
        '{"model": "gpt-oss-20b", "gpu": "rtx-3060", "engine": "llama.cpp", "n_cpu_moe": 9, "host_memory": "32GiB"}\n'
        '{"model": "gpt-oss-20b", "gpu": "rtx-3060", "engine": "llama.cpp", "n_gpu_layers": 9, '
        '"host_bandwidth": 80000000000}\n'
    )
    first, second = [json.loads(line) for line in kvcalc("batch", path).out.splitlines()]
    assert first["fit"]["host"]["n_cpu_moe"] == 9
    assert second["throughput"]["host"]["bandwidth_bytes_per_second"] == 80_000_000_000


# Time


def speed(model: str = "llama-3.1-8b", gpu: str = "h100", **settings: str) -> dict[str, Any]:
    found: dict[str, Any] = placed(model, gpu, **settings)["throughput"]
    return found


def test_more_layers_on_the_device_are_faster() -> None:
    steps = [speed(n_gpu_layers=str(number)) for number in (0, 1, 8, 16, 33)]
    seconds = [step["decode_step_seconds"] for step in steps]
    assert seconds == sorted(seconds, reverse=True)
    prefills = [step["prefill_seconds"] for step in steps]
    assert prefills == sorted(prefills, reverse=True)
    for step in steps:
        assert sum(step["parts"].values()) == pytest.approx(step["decode_step_seconds"])
        assert step["roofline_decode_step_seconds"] <= step["low_seconds"] < step["decode_step_seconds"]


def test_with_everything_on_the_device_the_speed_is_the_plain_one() -> None:
    assert speed(n_gpu_layers="all") == ask("llama-3.1-8b", "h100")["throughput"]
    assert speed("gpt-oss-120b", n_cpu_moe="0") == ask("gpt-oss-120b", "h100")["throughput"]


def test_the_hosts_part_is_read_at_its_bandwidth() -> None:
    slow = speed(n_gpu_layers="0", host_bandwidth="50GB/s")
    fast = speed(n_gpu_layers="0", host_bandwidth="100GB/s")
    assert slow["host"]["decode_seconds"] == pytest.approx(2 * fast["host"]["decode_seconds"], rel=0.01)
    # All layers, the head and the cache are read once.
    read = 32 * LAYER + TABLE + NORM + 32 * LAYER_CACHE
    assert fast["host"]["decode_seconds"] > read / 100e9
    assert fast["roofline_decode_step_seconds"] == pytest.approx(read / 100e9, rel=1e-3)


@pytest.mark.parametrize(
    ("model", "settings", "switches"),
    [
        # To the device's layers, if there are any, whose output is the last: it stays there.
        ("llama-3.1-8b", {"n-gpu-layers": "0"}, 0), ("llama-3.1-8b", {"n-gpu-layers": "1"}, 1),
        ("llama-3.1-8b", {"n-gpu-layers": "16"}, 1),
        # To the host and back for every group of experts, and every attention, of the device's layers.
        ("mixtral-8x7b", {"n-cpu-moe": "3"}, 1 + 3 * 2),
        ("mixtral-8x7b", {"n-cpu-moe": "32", "n-gpu-layers": "11"}, 1 + 10 * 2),
        ("llama-3.1-8b", {"no-kv-offload": True}, 1 + 32 * 2),
        ("mixtral-8x7b", {"n-cpu-moe": "3", "no-kv-offload": True}, 1 + 3 * 2 + 32 * 2),
    ],
)  # fmt: skip
def test_a_step_changes_between_the_host_and_the_device(model: str, settings: dict[str, Any], switches: int) -> None:
    case = make_case(
        Question(
            kvcalc.load_model(model), devices=find_devices("h200"), engine="llama.cpp", context_tokens=4096,
            engine_settings=settings,
        )
    )  # fmt: skip
    speed = speed_of(case, [])
    assert not isinstance(speed, str)
    assert speed.model.host is not None
    assert speed.model.host.switches == switches


def test_of_the_experts_only_those_in_use_are_read() -> None:
    all_ = speed("gpt-oss-120b", n_cpu_moe="36", host_bandwidth="100GB/s")
    layer = 4 * ((5760 + 2880) * 2880 // 32 * 17 + 4 * (5760 + 2880))
    assert all_["host"]["decode_seconds"] > 36 * layer / 100e9
    assert all_["host"]["decode_seconds"] < 3 * 36 * layer / 100e9
    assert all_["decode_step_seconds"] > ask("gpt-oss-120b", "h100")["throughput"]["decode_step_seconds"]


def test_a_prompt_copies_the_hosts_weights_once_per_micro_batch() -> None:
    small, large = (speed("gpt-oss-120b", n_cpu_moe="36", ubatch_size=size) for size in ("512", "2048"))
    assert small["host"]["prefill_copied_bytes"] == pytest.approx(4 * large["host"]["prefill_copied_bytes"], rel=0.01)
    assert small["prefill_seconds"] > large["prefill_seconds"]
    # 16 micro-batches, each of which uses every expert. The embedding (q8_0) stays in host memory.
    table = 201_088 * 2880 // 32 * 34
    host = placed("gpt-oss-120b", "h100", n_cpu_moe="36")["fit"]["host"]["weights_bytes"] - table
    assert small["host"]["prefill_copied_bytes"] == pytest.approx(16 * host, rel=1e-3)


def test_a_short_prompt_copies_nothing() -> None:
    found = ask("llama-3.1-8b", "h100", context=16, settings={"n-gpu-layers": "10"})["throughput"]
    assert found["host"]["prefill_copied_bytes"] == 0


def test_a_short_prompt_reads_the_hosts_weights_only_once() -> None:
    """The device does not read the layers that the host computes: reading them would take it 15 s."""
    slow = own_gpu(find_gpu("rtx-3090"), 24 * GIB, 10**9, 71 * 10**12)
    found = estimate(
        kvcalc.load_model("llama-3.1-8b"), devices=Devices(slow, 1), engine="llama.cpp", context_tokens=16,
        engine_settings={"n-gpu-layers": "0"},
    )  # fmt: skip
    assert found["throughput"]["prefill_seconds"] < 1


def test_a_large_batch_multiplies_on_the_device() -> None:
    small, large = (
        ask("llama-3.1-8b", "h100", context=128, batch=batch, settings={"n-gpu-layers": "10"}) for batch in (31, 32)
    )
    moved = [found["throughput"]["parts"]["communication_seconds"] for found in (small, large)]
    # 23 layers over PCIe 5.0 x16.
    assert moved[1] == pytest.approx(23 * LAYER / 64e9, rel=0.01)
    assert moved[0] < moved[1] / 100


def test_the_range_is_wider_and_the_note_names_the_bandwidth() -> None:
    found = placed(gpu="rtx-3090", n_gpu_layers="20")
    said = "\n".join(texts(found))
    assert "part in host memory" in said
    assert "--host-bandwidth" in said
    assert found["throughput"]["energy"] is None
    given = placed(gpu="rtx-3090", n_gpu_layers="20", host_bandwidth="80GB/s")
    assert "--host-bandwidth" not in "\n".join(texts(given))


def test_plan_takes_them(kvcalc: Any) -> None:
    load = ("--input-tokens", "1k", "--output-tokens", "200", "--concurrency", "1")
    found = kvcalc(
        "plan", "gpt-oss-120b", *load, "--gpu", "rtx-3090x1", "--engine", "llama.cpp", "--n-cpu-moe", "28", "--json"
    )
    row = found.json["best"]
    assert (row["fits"], row["watts"]) == (True, None)


def test_a_placement_knows_its_first_layer() -> None:
    assert [Placement(number).first_on_device(4) for number in (0, 1, 5, 9, None)] == [5, 4, 0, 0, 0]
