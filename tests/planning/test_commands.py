"""Every flag of a command kvcalc prints is one the engine has."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

import kvcalc
from kvcalc.planning.commands import Layout, checkpoint_of, sglang_command, vllm_command
from tests.conftest import ROOT

OPTIONS = ROOT / "tests" / "engine_options"

LAYOUTS = [
    Layout(tp, pp, 8192, 64, dtype, kv_dtype, settings)
    for tp, pp in ((1, 1), (8, 2))
    for dtype in (None, "bf16", "fp16", "fp8", "int4")
    for kv_dtype in ("bf16", "fp8")
    for settings in (
        {},
        {"gpu-memory-utilization": "0.85", "mem-fraction-static": "0.8", "max-num-batched-tokens": "4096"},
        {"enable-prefix-caching": "true", "block-size": "32", "page-size": "64"},
    )
]


def options_of(file: str) -> set[str]:
    lines = (OPTIONS / file).read_text().splitlines()
    assert lines[0].startswith("# ")
    return set(lines[1:])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_flag_is_the_engines(layout: Layout) -> None:
    model = kvcalc.load_model("llama-3-70b")
    for command, file in (
        (vllm_command(model, layout), "vllm-0.33.0.txt"), (sglang_command(model, layout), "sglang-0.5.23.txt"),
    ):  # fmt: skip
        flags = {word for word in shlex.split(command) if word.startswith("--")}
        assert flags
        assert flags <= options_of(file), flags - options_of(file)


def test_the_lists_are_whole_and_hold_no_nonsense() -> None:
    for file, some in (("vllm-0.33.0.txt", "--max-model-len"), ("sglang-0.5.23.txt", "--context-length")):
        options = options_of(file)
        assert some in options
        assert len(options) > 200
        assert "--no-such-option" not in options


def test_the_figures_are_plain_integers_and_the_types_are_said_where_asked() -> None:
    model = kvcalc.load_model("llama-3-70b")
    layout = Layout(8, 2, 131_072, 64, "fp8", "fp8", {"gpu-memory-utilization": "0.85"})
    assert vllm_command(model, layout) == (
        "vllm serve meta-llama/Meta-Llama-3-70B --tensor-parallel-size 8 --pipeline-parallel-size 2 "
        "--max-model-len 131072 --max-num-seqs 64 --quantization fp8 --kv-cache-dtype fp8 --gpu-memory-utilization 0.85"
    )
    assert sglang_command(model, layout) == (
        "python -m sglang.launch_server --model-path meta-llama/Meta-Llama-3-70B --tp-size 8 --pp-size 2 "
        "--context-length 131072 --max-running-requests 64 --quantization fp8 --kv-cache-dtype fp8_e4m3"
    )


def test_what_is_loaded_is_the_folder_or_the_name_on_the_hub(tmp_path: Path) -> None:
    (tmp_path / "my model").mkdir()
    config = tmp_path / "my model" / "config.json"
    config.write_text(
        '{"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64, "vocab_size": 8}'
    )
    spec = kvcalc.load_model(str(config))
    assert checkpoint_of(spec) == str(tmp_path / "my model")
    assert f"serve '{tmp_path}/my model'" in vllm_command(spec, LAYOUTS[0])
    assert checkpoint_of(spec._replace(checkpoint=None, source="hf:Qwen/Qwen3-8B@main")) == "Qwen/Qwen3-8B"
    assert checkpoint_of(kvcalc.load_model("gpt-3")) == "gpt-3"
