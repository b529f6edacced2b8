"""Layers on several devices: llama.cpp's `--tensor-split` and `--split-mode`."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

import kvcalc
from kvcalc.engines.llama_cpp.placement import devices_of_layers, layers_per_device, parse_shares
from kvcalc.engines.llama_cpp.row_split import rows_on_devices, tile_rows
from kvcalc.errors import ModelError, UsageError
from kvcalc.throughput.hardware import find_devices
from tests.documents import estimate, fit

# Llama-3.1-8B in 16 bits: q and o of 4096 x 4096, k and v of 1024 x 4096, three matrices of 14336 x 4096, two norms.
LAYER = 2 * (2 * 4096**2 + 2 * 1024 * 4096 + 3 * 14336 * 4096 + 2 * 4096)
OUTPUT = 2 * 128_256 * 4096 + 2 * 4096
# K and V of 8 heads of 128 in fp16, for 32,768 tokens.
CACHE = 32768 * 2 * 8 * 128 * 2


def split(gpu: str = "rtx-3090x2", model: str = "llama-3.1-8b", context: int = 32768, **more: Any) -> dict[str, Any]:
    names = ("tensor_split", "split_mode", "before_pull")
    settings = {name.replace("_", "-"): more.pop(name) for name in names if name in more}
    return estimate(
        kvcalc.load_model(model), devices=find_devices(gpu), engine="llama.cpp", context_tokens=context,
        engine_settings=settings, **more,
    )  # fmt: skip


# The rule


def test_layers_follow_free_memory_as_a_log_shows() -> None:
    """ggml-org/llama.cpp, b5622: Qwen3-30B-A3B on 9,862 and 31,518 MiB has 384 and 1,152 MiB of cache in 48 layers."""
    assert layers_per_device(48, (9862, 31518)) == [12, 36]


def test_layers_follow_the_shares_as_a_log_shows() -> None:
    """Qwen3.6-27B with its MTP layer and -ts 17,13: 9 and 7 of its 16 attention layers, 29 and 19 of 48 states."""
    first = [number for number, device in enumerate(devices_of_layers(65, (17, 13))[:64]) if device == 0]
    attention = [number for number in first if number % 4 == 3]
    assert (len(attention), len(first) - len(attention)) == (9, 29)


@pytest.mark.parametrize(
    ("shares", "layers"),
    [((1, 1), [17, 15]), ((3, 1), [25, 7]), ((1, 0), [32]), ((0, 1), [0, 32]), ((100, 1), [32]),
     ((1, 2, 1), [9, 16, 7]), ((1, 32), [1, 31])],
)  # fmt: skip
def test_the_output_counts_as_a_layer(shares: tuple[int, ...], layers: list[int]) -> None:
    assert layers_per_device(32, shares) == layers


def test_shares_are_read_as_llama_cpp_reads_them() -> None:
    assert [*parse_shares("3,1")] == [*parse_shares("3/1")] == [Fraction(3), Fraction(1)]
    assert sum(parse_shares("0.6,.4")) == 1
    for text in ("", "3,", "a,b", "-1,2", "nan,1", "1e3,1", "0,0"):
        with pytest.raises(UsageError, match="--tensor-split"):
            parse_shares(text)


# Bytes


def test_each_device_has_its_layers_weights_and_cache() -> None:
    found = split(tensor_split="3,1")
    rows = found["fit"]["devices"]
    assert [(row["first_layer"], row["last_layer"]) for row in rows] == [(0, 24), (25, 31)]
    assert [row["weights_bytes"] for row in rows] == [25 * LAYER, 7 * LAYER + OUTPUT]
    assert [row["kv_cache_bytes"] for row in rows] == [25 * CACHE, 7 * CACHE]
    assert found["kv_cache"]["bytes_per_device"] == 25 * CACHE
    assert found["kv_cache"]["devices_total_bytes"] == found["kv_cache"]["total_bytes"] == 32 * CACHE
    assert sum(line["bytes"] for line in found["engine"]["pool_lines"]) == 25 * CACHE
    assert (found["engine"]["pipeline_parallel_size"], found["engine"]["tensor_split"]) == (2, "3,1")
    # The other figures of `fit` are those of the fuller device.
    part = found["fit"]
    assert (part["weights_bytes"], part["free_bytes"]) == (rows[0]["weights_bytes"], rows[0]["free_bytes"])
    assert sum(line["bytes"] for line in part["lines"]) == part["device_bytes"]


@pytest.mark.parametrize("model", ["gemma-3-12b", "qwen3.6-27b", "deepseek-v2-lite", "gpt-oss-20b", "llama-3.2-1b"])
@pytest.mark.parametrize("shares", ["1,1", "5,1", "1,2,3", "0,1"])
def test_nothing_is_lost(model: str, shares: str) -> None:
    number = shares.count(",") + 1
    found = split(f"h100x{number}", model, 8192, tensor_split=shares)
    rows, one = found["fit"]["devices"], split("h100", model, 8192)
    assert sum(row["kv_cache_bytes"] for row in rows) == found["kv_cache"]["total_bytes"]
    assert found["kv_cache"]["total_bytes"] == one["kv_cache"]["total_bytes"]
    assert sum(row["weights_bytes"] for row in rows) == one["fit"]["weights_bytes"]


def test_a_gguf_file_is_divided_by_its_tensors(tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="the extra `gguf`")
    from tests.model.gguf_writing import write
    from tests.model.test_gguf import SMALL, llama_tensors

    path = str(write(tmp_path / "x.gguf", "llama", SMALL, llama_tensors("Q8_0"), file_type=7))
    one, two = split("h100", path, 1024), split("h100x2", path, 1024, tensor_split="1,1")
    rows = two["fit"]["devices"]
    assert sum(row["weights_bytes"] for row in rows) == one["fit"]["weights_bytes"]
    assert all(row["weights_bytes"] > 0 for row in rows)


# Whether it fits


def test_every_device_must_fit() -> None:
    even, uneven = split(context=131072), split(context=131072, tensor_split="9,1")
    assert even["fit"]["fits"]
    assert [row["fits"] for row in uneven["fit"]["devices"]] == [False, True]
    assert (uneven["fit"]["fits"], uneven["fit"]["verdict"]) == (False, "does_not_fit")
    assert uneven["fit"]["free_bytes"] == min(row["free_bytes"] for row in uneven["fit"]["devices"])


def test_the_limits_are_those_of_all_devices() -> None:
    """A longer context or a larger batch than the limit does not fit on some device, and the limit fits on all."""
    asked: dict[str, Any] = {"tensor_split": "2,1"}
    part = split(**asked)["fit"]
    longest, batch = part["memory_context_tokens"], part["max_batch_size"]
    assert split(context=longest, **asked)["fit"]["fits"]
    assert not split(context=longest + 256, **asked)["fit"]["fits"]
    assert split(batch_size=batch, **asked)["fit"]["fits"]
    assert not split(batch_size=batch + 1, **asked)["fit"]["fits"]


def test_a_split_that_the_weights_do_not_fit() -> None:
    found = fit(
        kvcalc.load_model("llama-3-70b"), find_devices("rtx-3090x2"), engine="llama.cpp", dtype="q4_k_m",
        engine_settings={"tensor-split": "3,1"},
    )["fit"]  # fmt: skip
    assert [row["fits"] for row in found["devices"]] == [False, True]
    assert not found["fits"]


def test_the_fewest_devices_that_fit() -> None:
    model = kvcalc.load_model("llama-3.1-8b")
    found = fit(model, find_devices("rtx-3060"), engine="llama.cpp", context_tokens=32768)
    smallest = found["smallest"]
    assert smallest == {
        "num_devices": 2, "tensor_parallel_size": 1, "pipeline_parallel_size": 2, "data_parallel_size": 1
    }  # fmt: skip
    assert split("rtx-3060x2")["fit"]["fits"]
    assert not split("rtx-3060")["fit"]["fits"]


# What is asked


def test_all_devices_are_used_by_default() -> None:
    assert split()["fit"] == split(pipeline_parallel_size=2)["fit"] == split(tensor_split="1,1")["fit"]
    assert split("rtx-3090")["fit"]["devices"] is None


def test_one_device_can_be_asked_for() -> None:
    alone, one = split(split_mode="none"), split("rtx-3090")
    assert (alone["fit"], alone["hardware"]) == (one["fit"], one["hardware"])
    with pytest.raises(UsageError, match="--pp 2 contradicts --split-mode none"):
        split(pipeline_parallel_size=2, split_mode="none")


# --split-mode row


def by_rows(gpu: str = "rtx-3090x2", model: str = "llama-3.1-8b", **asked: Any) -> dict[str, Any]:
    return split(gpu, model, split_mode="row", before_pull="24216", **asked)


def test_rows_are_a_question_of_older_builds() -> None:
    """Pull request 24216 removed split buffers from the CUDA backend."""
    rows, layers = split(split_mode="row"), split()
    assert rows["kv_cache"] == layers["kv_cache"]
    assert rows["fit"] is None
    with pytest.raises(ModelError, match=r"since pull request 24216.*--before-pull 24216 counts an older build"):
        fit(kvcalc.load_model("llama-3.1-8b"), find_devices("rtx-3090x2"), engine="llama.cpp",
            engine_settings={"split-mode": "row"})  # fmt: skip


def test_matrices_are_divided_by_rows_and_all_else_by_layers() -> None:
    """Llama-3.1-8B: 32 layers of 4096, 1024 and 14336 rows, and a head of 128,256 rows, in bf16, at 3/4."""
    rows, layers = by_rows(tensor_split="3,1")["fit"]["devices"], split(tensor_split="3,1")["fit"]["devices"]
    for name in ("first_layer", "last_layer", "kv_cache_bytes"):
        assert [row[name] for row in rows] == [row[name] for row in layers]
    # The first 75% of the rows, in tiles of 128: 96,192 of the head are 751.5 tiles.
    of_layer = 2 * (3072 * 4096 * 2 + 2 * 768 * 4096 + 2 * 10752 * 4096 + 3072 * 14336)
    head, norms = 2 * 96_128 * 4096, 25 * 2 * 2 * 4096
    assert rows[0]["weights_bytes"] == 32 * of_layer + head + norms
    assert sum(row["weights_bytes"] for row in rows) == sum(row["weights_bytes"] for row in layers)


@pytest.mark.parametrize("model", ["gemma-3-12b", "mixtral-8x7b", "llama-3.2-1b", "qwen2.5-7b"])
@pytest.mark.parametrize("shares", ["1,1", "1,2,3", "0,1"])
def test_no_row_is_lost(model: str, shares: str) -> None:
    number = shares.count(",") + 1
    found, one = by_rows(f"h100x{number}", model, context=8192, tensor_split=shares), split("h100", model, 8192)
    assert sum(row["weights_bytes"] for row in found["fit"]["devices"]) == one["fit"]["weights_bytes"]
    assert sum(line["bytes"] for line in found["fit"]["lines"]) == found["fit"]["device_bytes"]


def test_experts_and_small_matrices_stay_with_their_layer() -> None:
    """Mixtral's router has 8 rows, and its experts are one tensor of three dimensions."""
    rows, layers = by_rows("h100x2", "mixtral-8x7b"), split("h100x2", "mixtral-8x7b")
    first = [part["fit"]["devices"][0]["weights_bytes"] for part in (rows, layers)]
    # Of 32 layers, 17 are on the first device. The head is on the second, and half of its 32,000 rows on the first.
    attention = 2 * (2 * 4096 * 4096 + 2 * 1024 * 4096)
    assert first[0] - first[1] == attention // 2 * 32 - attention * 17 + 2 * 16_000 * 4096


def test_the_speed_of_rows_is_not_modelled() -> None:
    found = by_rows()
    assert found["throughput"] is None
    assert any("--split-mode row" in note["text"] for note in found["warnings"])


def test_rows_are_rounded_to_tiles_with_32_bit_floats() -> None:
    assert rows_on_devices(128_256, (3, 1), 128) == [96_128, 32_128]
    assert rows_on_devices(4096, (1, 1, 1), 128) == [1280, 1408, 1408]
    assert rows_on_devices(8, (1, 1), 128) == [0, 8]
    assert tile_rows("ampere") == tile_rows("rdna3") == 128


def test_rows_of_other_models_are_refused_by_name() -> None:
    for model, text in (("deepseek-v2-lite", "not modelled for MLA"), ("qwen3.6-27b", "recurrent layers")):
        notes = by_rows("h100x2", model)["warnings"]
        assert any(text in note["text"] for note in notes), model


@pytest.mark.parametrize(
    ("given", "message"),
    [({"tensor_split": "1,1", "pipeline_parallel_size": 3}, "--pp 3 contradicts --tensor-split 1,1"),
     ({"split_mode": "tensor"}, "not a mode that is modelled"), ({"tensor_split": "x"}, "must be a list of numbers")],
)  # fmt: skip
def test_contradictions_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        split(**given)


def test_batch_and_the_screen_show_it(kvcalc: Any, tmp_path: Path) -> None:
    path = tmp_path / "questions.jsonl"
    asked = {"model": "llama-3.1-8b", "gpu": "rtx-3090x2", "engine": "llama.cpp", "context": 32768}
    path.write_text("\n".join(json.dumps({**asked, **more}) for more in ({"tensor_split": "3,1"}, {"ts": "3,1"}, {})))
    first, _, last = [json.loads(line) for line in kvcalc("batch", path).out.splitlines()]
    assert first["fit"]["devices"] == split(tensor_split="3,1")["fit"]["devices"]
    assert last["fit"]["devices"] == split()["fit"]["devices"]
    words = ("llama-3.1-8b", "--gpu", "rtx-3090x2", "--engine", "llama.cpp", "-c", "32k", "-ts", "9,1", "-b", "4")
    screen = kvcalc("fit", *words, "--format", "human")
    assert screen.status == 4
    assert "0-29" in screen.out
    assert "llama.cpp (llama-server)" in screen.out
    assert "does not fit" in screen.out


def test_plan_chooses_the_devices_itself(kvcalc: Any) -> None:
    words = ("--input-tokens", "1k", "--output-tokens", "100", "--concurrency", "1", "--engine", "llama.cpp")
    found = kvcalc("plan", "llama-3.1-8b", "--gpu", "rtx-3090", *words, "-ts", "3,1")
    assert (found.status, "plan chooses the number of devices" in found.err) == (2, True)


def test_a_sweep_asks_every_device(kvcalc: Any) -> None:
    words = ("sweep", "llama-3.1-8b", "--gpu", "rtx-3090x2", "--engine", "llama.cpp", "-c", "4k,64k,128k", "-ts", "9,1")
    rows = kvcalc(*words, "--format", "json").json["points"]
    for row in rows:
        there = split(context=row["context_tokens"], tensor_split="9,1")["fit"]
        assert row["fits"] == there["fits"]
    assert {row["fits"] for row in rows} == {True, False}


@pytest.mark.parametrize(("gpu", "shares"), [("rtx-3090x2", "1,1,1"), ("rtx-3090x3", "1,1")])
def test_each_device_needs_a_share(gpu: str, shares: str) -> None:
    with pytest.raises(UsageError, match=rf"--tensor-split {shares} has \d shares, but there are {gpu[-1]} devices"):
        split(gpu, tensor_split=shares)


def test_a_plan_takes_a_split_on_one_device_alone() -> None:
    def planned(sizes: str, *more: str) -> Any:
        return kvcalc.plan(
            "llama-3.1-8b", ["rtx-4090"], input_tokens=500, output_tokens=100, concurrency=2,
            engines=("llama.cpp", *more), engine_settings={"tensor-split": sizes}, dtype="q4_k_m",
        )  # fmt: skip

    assert planned("1")["best"]["num_devices"] == 1
    for more in ((), ("vllm",)):
        with pytest.raises(UsageError, match="--tensor-split 3,1: plan chooses the number of devices"):
            planned("3,1", *more)
