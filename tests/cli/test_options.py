"""Every engine option, in every command that uses an engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer

from kvcalc.cli.batch import Questions
from kvcalc.engines.declarations import OPTIONS, Option
from kvcalc.engines.options import engines_with, option_names
from kvcalc.engines.vllm.command import VARIABLES
from kvcalc.json_lines import Line
from tests.conftest import ROOT
from tests.rows import every_row

MODEL = "llama-3-8b"
# Its draft layers are counted.
DRAFTING = "deepseek-v3"
# mlx runs on Apple's devices only.
MAC = "m3-ultra"

# The commands that use an engine, each with as few words as possible.
ASKED = {
    "estimate": ("estimate", MODEL, "--gpu", "h100"),
    "fit": ("fit", MODEL, "--gpu", "h100"),
    "compare": ("compare", MODEL, "--gpu", "h100"),
    "sweep": ("sweep", MODEL, "--gpu", "h100"),
    "plan": ("plan", MODEL, "--gpu", "h100", "--input-tokens", "100", "--output-tokens", "10", "--concurrency", "2",
             "--max-gpus", "2"),
}  # fmt: skip
VALUES = {
    "cache": "static", "block-size": "32", "gpu-memory-utilization": "0.9",
    "swa-full-tokens-ratio": "0.5", "mem-fraction-static": "0.8", "free-gpu-memory-fraction": "0.8",
    "max-attention-window": "4k", "max-tokens": "100000", "cache-type-k": "q8_0", "cache-type-v": "f16",
    "flash-attn": "on", "before-pull": "19067", "context-length": "32k", "split-mode": "layer",
    "host-memory": "64GiB", "host-bandwidth": "80GB/s",
    "attention-backend": "flashinfer",
    "kv-bits": "8", "gdn-prefill-backend": "triton", "decode-context-parallel-size": "1",
    "pp-layer-partition": "32", "mamba-cache-mode": "align", "cudagraph-mode": "piecewise",
    "mamba-radix-cache-strategy": "no_buffer", "performance-mode": "throughput", "disaggregation-mode": "null",
    "mamba-cache-dtype": "float32", "mamba-ssm-cache-dtype": "float32", "kv-cache-dtype-skip-layers": "0",
    "prefill-context-parallel-size": "1", "attn-cp-size": "1", "max-num-tokens": "4096",
    "flashinfer-sampler": "1", "graph-estimate": "0",
}  # fmt: skip
DECLARED = [(engine, option) for engine, options in OPTIONS.items() for option in options]


def words_of(option: Option) -> tuple[str, ...]:
    return (f"--{option.name}",) if option.metavar is None else (f"--{option.name}", VALUES.get(option.name, "64"))


def asked_with(command: str, option: Option) -> list[str]:
    model = DRAFTING if option.name == "num-speculative-tokens" else MODEL
    devices = "h200x8" if model == DRAFTING and command != "sweep" and command != "plan" else "h200"
    return [{MODEL: model, "h100": devices}.get(word, word) for word in ASKED[command]]


def parameters_of(command: str) -> dict[str, Any]:
    module = __import__(f"kvcalc.cli.{command}", fromlist=["app"])
    return {name: parameter for parameter in typer.main.get_command(module.app).params for name in parameter.opts}


@pytest.mark.parametrize("command", ASKED)
@every_row("engine, option", DECLARED)
def test_an_option_is_taken_where_its_engine_is_asked_and_refused_elsewhere(
    kvcalc: Any, command: str, engine: str, option: Option
) -> None:
    words = asked_with(command, option)
    if engine == "mlx":
        words = [MAC if word == "h200" else word for word in words]
    taken = kvcalc(*words, "--engine", engine, *words_of(option), "--format", "json")
    if command == "plan" and taken.status == 2:
        # A plan refuses drafts without a method, which its commands would not have.
        assert option.name in {"num-speculative-tokens", "speculative-num-draft-tokens", "draft-max"}
        assert "a server drafts no tokens without a method" in taken.err
    else:
        assert taken.status in (0, 4), taken.err
    other = next(name for name in ("logical", *OPTIONS) if name not in engines_with(option.name))
    refused = kvcalc(*ASKED[command], "--engine", other, *words_of(option))
    assert refused.status == 2
    assert f"--{option.name}: {other} has no such setting" in refused.err
    assert f"--{option.name} belongs to {', '.join(engines_with(option.name))}" in refused.err


@pytest.mark.parametrize("command", ASKED)
def test_every_name_of_an_option_is_the_same_option_in_every_command(command: str) -> None:
    parameters = parameters_of(command)
    for engine, option in DECLARED:
        found = parameters[f"--{option.name}"]
        assert all(parameters[alias] is found for alias in option.aliases)
        assert found.is_flag is (option.metavar is None)
        assert f"{engine}: {option.described}" in found.help


def test_engines_that_share_an_option_agree_on_what_follows_it() -> None:
    for name in option_names():
        shared = [option for _, option in DECLARED if option.name == name]
        assert len({option.metavar is None for option in shared}) == 1, name


def test_batch_takes_every_option_as_a_field() -> None:
    questions = Questions()
    for engine, option in DECLARED:
        for name in (option.name, option.name.replace("-", "_")):
            value = True if option.metavar is None else VALUES.get(option.name, 64)
            model = DRAFTING if option.name == "num-speculative-tokens" else MODEL
            fields = {"model": model, "gpu": MAC if engine == "mlx" else "h100", "engine": engine, name: value}
            answer = questions.answer(Line(1, json.dumps(fields).encode()))
            assert "error" not in answer, answer


@pytest.mark.parametrize(("engine", "file"), [("vllm", "vllm-0.33.0.txt"), ("sglang", "sglang-0.5.23.txt")])
def test_the_names_are_the_engines_own(engine: str, file: str) -> None:
    own = set(Path(ROOT, "tests", "engine_options", file).read_text().splitlines())
    # vLLM's boolean flags have a --no- form. Draft tokens are a key of its --speculative-config, the mode of graphs one
    # of its --compilation-config, and variables have the layers of stages, the sampler and the estimate of graphs.
    known = own | {f"--no-{name.removeprefix('--')}" for name in own}
    known |= {"--num-speculative-tokens", "--cudagraph-mode", *(f"--{name}" for name in VARIABLES)}
    assert {f"--{option.name}" for option in OPTIONS[engine]} <= known


def test_a_sweep_gives_each_engine_its_own(kvcalc: Any) -> None:
    words = ("--context", "100", "--block-size", "64", "--page-size", "128", "--format", "json")
    points = kvcalc("sweep", MODEL, "--engine", "vllm,sglang", *words).json["points"]
    alone = [
        kvcalc("estimate", MODEL, "--context", "100", "--engine", engine, *option, "--json").json["kv_cache"]
        for engine, option in (("vllm", ("--block-size", "64")), ("sglang", ("--page-size", "128")))
    ]
    assert [point["total_bytes"] for point in points] == [answer["total_bytes"] for answer in alone]
    refused = kvcalc("sweep", MODEL, "--engine", "vllm,sglang", "--ubatch-size", "64")
    assert refused.status == 2
    assert "--ubatch-size: vllm, sglang has no such setting" in refused.err


def test_every_engine_at_once_takes_its_own(kvcalc: Any) -> None:
    words = ("--context", "100", "--engine", "all", "--block-size", "64", "--page-size", "128", "--json")
    rows = {row["engine"]: row["block_size"] for row in kvcalc("estimate", MODEL, *words).json["engines"]}
    assert (rows["vllm"], rows["sglang"]) == (64, 128)


@pytest.mark.parametrize("command", ["estimate", "compare", "sweep"])
def test_an_option_that_divides_a_device_needs_one(kvcalc: Any, command: str) -> None:
    refused = kvcalc(command, MODEL, "--engine", "vllm", "--gpu-memory-utilization", "0.8")
    assert refused.status == 2
    assert "needs a device" in refused.err


def test_a_plan_prints_the_settings_it_was_asked_with(kvcalc: Any) -> None:
    words = (*ASKED["plan"], "--max-num-batched-tokens", "4096", "--enforce-eager", "--block-size", "32", "--json")
    command = kvcalc(*words).json["plans"][0]["vllm"]
    assert "--block-size 32 --max-num-batched-tokens 4096 --enforce-eager" in command


def test_a_device_of_ones_own_is_swept_and_planned(kvcalc: Any) -> None:
    own = ("--gpu-memory", "80GB", "--gpu-bandwidth", "3TB/s", "--flops", "900T")
    (point,) = kvcalc("sweep", MODEL, *own, "--format", "json").json["points"]
    assert point["fits"] is True
    assert point["decode_step_seconds"] > 0
    (row,) = kvcalc("plan", MODEL, *own, *ASKED["plan"][4:], "--json").json["plans"]
    assert row["fits"] is True
    several = kvcalc("sweep", MODEL, "--gpu", "h100,l40s", *own)
    assert several.status == 2
    assert "describe one device" in several.err


def test_a_sweep_splits_experts_and_stages_as_an_estimate_does(kvcalc: Any) -> None:
    words = ("qwen3-30b-a3b", "--engine", "vllm", "--tp", "2", "--pp", "2", "--ep", "2", "--gpu", "h100")
    (point,) = kvcalc("sweep", *words, "--format", "json").json["points"]
    answer = kvcalc("estimate", *words, "--json").json
    assert point["bytes_per_device"] == answer["kv_cache"]["bytes_per_device"]
    assert point["free_bytes"] == answer["fit"]["free_bytes"]
    assert point["decode_step_seconds"] == pytest.approx(answer["throughput"]["decode_step_seconds"], rel=1e-12)
    refused = kvcalc("sweep", MODEL, "--ep", "2")
    assert (refused.status, "need a device" in refused.err) == (2, True)


@pytest.mark.parametrize("command", ["estimate", "fit", "compare", "sweep"])
@pytest.mark.parametrize("engine", [name for name in OPTIONS if name != "mlx"])
def test_every_engine_is_cut_into_stages_by_either_name(kvcalc: Any, command: str, engine: str) -> None:
    words = (command, MODEL, "--engine", engine, "--gpu", "h100", "--format", "json")
    found = [kvcalc(*words, name, "2") for name in ("--pp", "--pipeline-parallel-size")]
    assert {result.status for result in found} == {0}, found[0].err
    assert found[0].out == found[1].out
    assert kvcalc(*words).out != found[0].out


@pytest.mark.parametrize(
    "words",
    [
        ("compare", MODEL, "--gpu", "h100"),
        ("sweep", MODEL, "--gpu", "h100"),
        ("plan", MODEL, "--gpu", "h100", "--input-tokens", "100", "--output-tokens", "50", "--concurrency", "4"),
    ],
)
def test_a_typo_in_one_engines_setting_refuses_the_command(kvcalc: Any, words: tuple[str, ...]) -> None:
    for name, text in (("mem-fraction-static", "1,2"), ("page-size", "six")):
        refused = kvcalc(*words, "--engine", "vllm,sglang", f"--{name}", text)
        assert refused.status == 2
        assert refused.err.startswith(f"kvcalc: --{name}")


def test_a_sweep_refuses_an_average_that_an_estimate_refuses(kvcalc: Any) -> None:
    words = ("gemma-3-27b", "--engine", "tensorrt-llm@1.3", "--gpu", "h200", "--context", "1000", "--avg-seq-len")
    for command in ("estimate", "sweep"):
        assert "longer than the context of 1000 tokens" in kvcalc(command, *words, "2000").err
        assert kvcalc(command, *words, "500").status == 0
