"""--gpu and related options, `fit` and `gpus`, as typed on the command line, and their exit codes."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from kvcalc.throughput.hardware import all_gpus
from tests.conftest import spawn


def test_a_device_by_name_and_number(kvcalc: Any) -> None:
    for options in (("--gpu", "h100x4"), ("--gpu", "4xh100"), ("--gpu", "h100", "--num-gpus", "4"),
                    ("--gpu", "H100", "--tp", "4")):  # fmt: skip
        answer = kvcalc("estimate", "llama-3-70b", *options, "--json").json
        assert answer["hardware"]["name"] == "h100-sxm"
        assert answer["hardware"]["num_devices"] == 4
        assert answer["engine"]["tensor_parallel_size"] == 4
        assert answer["fit"]["fits"] is True


def test_tp_and_pp_within_a_number_of_devices(kvcalc: Any) -> None:
    options = ("--gpu", "h100x8", "--engine", "vllm", "--pp", "2")
    assert kvcalc("estimate", "llama-3-70b", *options, "--get", "engine.tensor_parallel_size").out == "4\n"
    assert kvcalc("estimate", "llama-3-70b", *options, "--tp", "2", "--get", "hardware.replicas").out == "2\n"


def test_a_device_of_ones_own(kvcalc: Any) -> None:
    options = ("--gpu-memory", "80GiB", "--gpu-bandwidth", "3.35TB/s", "--flops", "989T")
    hardware = kvcalc("fit", "llama-3-8b", *options, "--json").json["hardware"]
    assert hardware["memory_bytes"] == 80 * 2**30
    assert hardware["bandwidth_bytes_per_second"] == 3_350_000_000_000
    assert hardware["flops_per_second"] == {"bf16": 989 * 10**12, "fp16": 989 * 10**12}
    over = kvcalc("fit", "llama-3-8b", "--gpu", "m2-ultra", "--gpu-memory", "64GiB", "--json").json["hardware"]
    assert (over["name"], over["memory_bytes"]) == ("m2-ultra", 64 * 2**30)
    assert over["bandwidth_bytes_per_second"] == 800 * 10**9


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (("fit", "llama-3-8b"), 2, "--gpu h100x8"),
        (("fit", "llama-3-8b", "--gpu", "h101"), 3, "h100"),
        (("fit", "llama-3-70b", "--gpu", "h100"), 4, ""),
        (("fit", "llama-3-8b", "--gpu", "h100", "--engine", "all"), 2, "one engine"),
        (("fit", "llama-3-8b", "--gpu", "h100x3"), 2, "--tp 3 does not divide"),
        (("fit", "llama-3-8b", "--gpu", "h100x4", "--num-gpus", "8"), 2, "contradict"),
        (
            ("fit", "llama-3-8b", "--gpu", "h100", "--tp", "4", "--engine", "llama.cpp"),
            2,
            "tensor parallelism is not supported",
        ),
        (("fit", "llama-3-8b", "--gpu", "h100x4", "--engine", "llama.cpp"), 0, ""),
        (("fit", "llama-3-8b", "--gpu", "h100", "--engine", "vllm", "--gpu-memory-utilization", "2"), 2, "at most 1"),
        (("fit", "llama-3-8b", "--gpu", "h100", "--gpu-memory", "much"), 2, "not a size"),
        (("fit", "llama-3-8b", "--gpu", "h100", "--bandwidth", "fast"), 2, "3.35TB/s"),
        (("fit", "llama-3-8b", "--gpu", "h100", "--flops", "x"), 2, "989T"),
        (("fit", "nothing-such", "--gpu", "h100"), 3, "not known"),
        (("gpus", "show", "h101"), 3, "h100"),
        (("gpus", "nope"), 3, ""),
        (("estimate", "llama-3-8b", "--num-gpus", "2"), 2, "--num-gpus needs a device"),
        (("estimate", "llama-3-8b", "--check"), 2, "--gpu h100"),
        (("estimate", "llama-3-8b", "--engine", "all", "--check", "--gpu", "h100"), 2, "one engine"),
        (("estimate", "llama-3-70b", "--gpu", "h100", "--check"), 4, ""),
        (("estimate", "llama-3-70b", "--gpu", "h100"), 0, ""),
        (("estimate", "llama-3-8b", "--kv-memory", "1MiB", "--check"), 4, ""),
        (("estimate", "llama-3-8b", "--kv-memory", "1GiB", "--check"), 0, ""),
        (("estimate", "llama-3-8b", "--kv-memory", "1GiB", "--gpu", "h100"), 0, ""),
        (("estimate", "llama-3-8b", "--engine", "vllm", "--max-num-seqs", "4"), 2, "--gpu h100"),
        (("estimate", "--layers", "2", "--heads", "4", "--head-dim", "8", "--gpu", "h100", "--check", "--json"), 3,
         "not known"),
    ],
)  # fmt: skip
def test_statuses(kvcalc: Any, arguments: tuple[str, ...], status: int, said: str) -> None:
    result = kvcalc(*arguments)
    assert result.status == status, result.err
    assert said in result.err
    assert len(result.err.splitlines()) <= 3


def test_a_document_is_printed_even_where_it_does_not_fit(kvcalc: Any) -> None:
    result = kvcalc("fit", "llama-3-70b", "--gpu", "h100", "--json")
    assert result.status == 4
    assert result.json["smallest"]["num_devices"] == 2
    human = kvcalc("fit", "llama-3-70b", "--gpu", "h100", "--format", "human")
    assert human.status == 4
    assert human.out.startswith("vllm 0.33.0 does not start as typed (")
    assert "it fits on 2 of these devices: --tp 2" in human.out


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("llama-3-70b --gpu h100 --engine vllm", ["it fits on 2 of these devices: --tp 2"]),
        # An engine that splits only layers, and keeps some in host memory.
        (
            "llama-3-70b --gpu rtx-4090 --context 8k --engine llama.cpp --dtype q4_k_m",
            ["it fits on 2 of these devices: --pp 2", "it fits with -ngl "],
        ),
        ("llama-3.1-8b --gpu h100 --engine vllm", []),
    ],
)
def test_an_estimate_says_how_it_would_fit(kvcalc: Any, asked: str, said: list[str]) -> None:
    shown = kvcalc("estimate", *asked.split(), "--format", "human")
    assert shown.status == 0
    lines = [line for line in shown.out.splitlines() if line.startswith("it fits ")]
    assert len(lines) == len(said)
    for line, start in zip(lines, said):
        assert line.startswith(start)
    alone = kvcalc("fit", *asked.split(), "--format", "human").out.splitlines()
    assert lines == [line for line in alone if line.startswith("it fits ")]


def test_engines_side_by_side_on_a_device(kvcalc: Any) -> None:
    rows = kvcalc("estimate", "llama-3.1-8b", "--gpu", "h100", "--engine", "all", "--json").json["engines"]
    assert {row["engine"]: row["fits"] for row in rows}["vllm"] is True
    assert next(row for row in rows if row["engine"] == "vllm")["kv_cache_tokens"] > 400_000


def test_the_list_in_every_format(kvcalc: Any) -> None:
    names = [row["name"] for row in kvcalc("gpus", "--json").json["gpus"]]
    assert sorted(names) == [gpu.name for gpu in all_gpus()]
    lines = kvcalc("gpus", "--format", "tsv").out.splitlines()
    assert len(lines) == len(names) + 1
    assert lines[0].startswith("name\tvendor\t")
    human = kvcalc("gpus", "--format", "human").out
    assert all(name in human for name in names)
    assert max(map(len, human.splitlines())) <= 80


def test_one_device(kvcalc: Any) -> None:
    shown = kvcalc("gpus", "show", "h100", "--format", "human").out
    assert "NVIDIA H100 Tensor Core GPU datasheet" in shown
    assert "989.4" in shown
    assert kvcalc("gpus", "show", "mi300x", "--get", "interconnect.devices").out == "8\n"


def test_local_without_a_device_is_one_line() -> None:
    result = spawn("fit", "llama-3-8b", "--gpu", "local", env={"CUDA_VISIBLE_DEVICES": ""})
    if sys.platform == "darwin":
        pytest.skip("every Mac has one")
    assert result.status == 1
    assert "this machine has no accelerator" in result.err
    assert "Traceback" not in result.err


def test_the_bar_fits_eighty_columns_and_needs_no_colour() -> None:
    for options in (("llama-3-70b", "--gpu", "h100x4"), ("llama-3-70b", "--gpu", "t4", "--engine", "vllm")):
        result = spawn("fit", *options, "--format", "human", env={"COLUMNS": "80", "TERM": "dumb"})
        assert "\x1b" not in result.out
        assert max(map(len, result.out.splitlines())) <= 80
