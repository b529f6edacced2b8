"""Every option that an engine declares changes a figure of some answer, and the lines of the account still add up."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest

import kvcalc
from kvcalc.engines import SERVERS, start_command
from kvcalc.engines.command import Checkpoint, ServerArguments
from kvcalc.engines.declarations import OPTIONS
from kvcalc.engines.options import SettingsReader, option_names
from kvcalc.errors import SettingError
from kvcalc.model.layout import Layout
from kvcalc.writing.shell import join
from tests.conftest import ROOT
from tests.rows import every_row


class Case(NamedTuple):
    """A question in which an option has an effect: its value, and the other arguments."""

    value: object
    model: str = "llama-3.1-8b"
    gpu: str | None = "h100"
    settings: Mapping[str, object] = MappingProxyType({})
    asked: Mapping[str, Any] = MappingProxyType({})


WINDOWS, HYBRID, EXPERTS, LATENT = "gemma-3-27b", "qwen3-next-80b-a3b", "gpt-oss-20b", "deepseek-v3"
FOUR = {"batch_size": 4, "context_tokens": 8000}
LOAD = {"speed": kvcalc.SpeedQuestion(input_tokens=3000, output_tokens=500, concurrency=16)}
# More requests than fit, and prompts that fill most of a step.
FULL = {"speed": kvcalc.SpeedQuestion(input_tokens=3000, output_tokens=3000, concurrency=200)}
LONG = {"speed": kvcalc.SpeedQuestion(input_tokens=5000, output_tokens=500, concurrency=16)}
RANKS = {**LONG, "data_parallel_size": 2}
LARGEST = {"fits_context": True}
FP8 = {"kv_dtype": "fp8"}
SMALL_DECODE = {"disaggregation-mode": "decode", "max-running-requests": 16}
POOLS = {"engine": "tensorrt-llm@1.3.0rc28"}  # the first release with pools for windows

CASES: dict[str, dict[str, Case]] = {
    "logical": {},
    "transformers": {"cache": Case("static", WINDOWS, asked=FOUR)},
    "vllm": {
        "block-size": Case(64, asked=FOUR),
        "max-num-batched-tokens": Case(2048),
        "no-enable-chunked-prefill": Case(True, asked=LONG),
        "num-gpu-blocks-override": Case(500),
        "no-async-scheduling": Case(True, WINDOWS, asked={"context_tokens": 65_536}),
        "enable-prefix-caching": Case(True, "mamba-2.8b", asked=FOUR),
        "no-enable-prefix-caching": Case(True, HYBRID, "h100x8", asked=FOUR),
        "gdn-prefill-backend": Case("triton", HYBRID, "h100x8", asked=FOUR),
        "decode-context-parallel-size": Case(2, HYBRID, "h100x8", asked=FOUR),
        "prefill-context-parallel-size": Case(2, LATENT, "h200x8", asked=FOUR),
        "pp-layer-partition": Case("20,12", gpu="h100x2", asked={**FOUR, "pipeline_parallel_size": 2}),
        "disable-hybrid-kv-cache-manager": Case(True, WINDOWS, asked=FOUR),
        "mamba-cache-mode": Case("all", "jamba-v0.1", "h100x8", asked={**FOUR, "engine": "vllm@0.31"}),
        "mamba-block-size": Case(
            2048, "zamba2-7b", settings={"mamba-cache-mode": "all"}, asked={**FOUR, "engine": "vllm@0.31"}
        ),
        "mamba-cache-dtype": Case("float32", HYBRID, "h100x8", asked=FOUR),
        "mamba-ssm-cache-dtype": Case("float32", HYBRID, "h100x8", asked=FOUR),
        "kv-cache-dtype-skip-layers": Case("0,1", asked={**FOUR, **FP8}),
        "cudagraph-mode": Case("piecewise", HYBRID, "h100x8", asked=FOUR),
        "attention-backend": Case("flashmla", LATENT, "h200x8", asked=FOUR),
        "performance-mode": Case("throughput"),
        "num-speculative-tokens": Case(2, HYBRID, "h100x8", asked=FOUR),
        "gpu-memory-utilization": Case(0.5),
        "max-num-seqs": Case(2, asked=LOAD),
        "enforce-eager": Case(True),
        "language-model-only": Case(True, WINDOWS),
        "skip-mm-profiling": Case(True, WINDOWS),
        "flashinfer-sampler": Case(0, EXPERTS, asked={"engine": "vllm@0.11.0"}),
        "graph-estimate": Case(0),
        "max-loras": Case(2),
        "max-lora-rank": Case(64),
    },
    "sglang": {
        "page-size": Case(64, asked={**FOUR, "context_tokens": 8001}),
        "swa-full-tokens-ratio": Case(0.5, EXPERTS, asked=FOUR),
        "max-running-requests": Case(2, asked=LOAD),
        "context-length": Case("64k", settings={"max-running-requests": 64}),
        "max-mamba-cache-size": Case(64, HYBRID, "h100x8", asked=FOUR),
        "mamba-full-memory-ratio": Case(0.5, HYBRID, "h100x8", asked=FOUR),
        "mamba-radix-cache-strategy": Case("no_buffer", HYBRID, "h100x8", asked=FOUR),
        "swa-prefix-tails": Case(0, "deepseek-v4-flash", "h100x8", asked=FOUR),
        "disaggregation-mode": Case("decode", asked=FOUR),
        "disaggregation-decode-extra-slots": Case(0, settings=SMALL_DECODE, asked=FOUR),
        "disaggregation-decode-enable-radix-cache": Case(True, HYBRID, "h100x8", SMALL_DECODE, FOUR),
        "disable-radix-cache": Case(True, HYBRID, "h100x8", asked=FOUR),
        "speculative-num-draft-tokens": Case(2, HYBRID, "h100x8", asked=FOUR),
        "speculative-eagle-topk": Case(4, HYBRID, "h100x8", {"speculative-num-draft-tokens": 4}, FOUR),
        "chunked-prefill-size": Case(2048),
        "max-prefill-tokens": Case(2000, asked=LOAD),
        "max-total-tokens": Case(50_000),
        "schedule-conservativeness": Case(0.5, asked=FULL),
        "enable-mixed-chunk": Case(True, asked=LOAD),
        "disable-overlap-schedule": Case(True, asked=LOAD),
        "scheduler-recv-interval": Case(10, asked=LOAD),
        "attn-cp-size": Case(2, "deepseek-v3.2", "h200x8", asked=FOUR),
        "attention-backend": Case("trtllm_mha", gpu="b200", asked=FOUR),
        "mem-fraction-static": Case(0.5),
        "max-loras-per-batch": Case(2),
        "max-lora-rank": Case(64),
    },
    "tensorrt-llm": {
        "tokens-per-block": Case(64, asked={**FOUR, "context_tokens": 8001}),
        "max-tokens": Case(50_000),
        "free-gpu-memory-fraction": Case(0.5),
        "max-attention-window": Case("128,32k", EXPERTS, asked={**FOUR, **POOLS}),
        "max-batch-size": Case(2, asked=LOAD),
        "max-num-tokens": Case(2048),
        "enable-chunked-prefill": Case(True, asked=LONG),
        "disable-overlap-scheduler": Case(True, asked=LOAD),
        "enable-balance": Case(True, "qwen3-30b-a3b", "h100x2", asked=RANKS),
        "timeout-iters": Case(5, "qwen3-30b-a3b", "h100x2", {"enable-balance": True}, RANKS),
        "batching-wait-iters": Case(0, "qwen3-30b-a3b", "h100x2", {"enable-balance": True}, RANKS),
        "avg-seq-len": Case(512, WINDOWS, asked={**FOUR, **POOLS}),
    },
    "llama.cpp": {
        "cache-type-k": Case("q8_0"),
        "cache-type-v": Case("q8_0"),
        "parallel": Case(8),
        "kv-unified": Case(True, asked=FOUR),
        "ubatch-size": Case(1024),
        "draft-max": Case(4, "qwen3.5-27b", asked=FOUR),
        "swa-full": Case(True, WINDOWS, asked=FOUR),
        "flash-attn": Case("off"),
        "tensor-split": Case("3,1", gpu="h100x2"),
        "split-mode": Case("none", gpu="h100x2"),
        "before-pull": Case(12801, WINDOWS, asked=FOUR),
        "fit-target": Case(4096, gpu="rtx-4090", asked=LARGEST),
        "fit-ctx": Case(100_000, gpu="rtx-4090", asked=LARGEST),
        "n-gpu-layers": Case(10, gpu="rtx-4090"),
        "n-cpu-moe": Case(4, EXPERTS, "rtx-4090"),
        "cpu-moe": Case(True, EXPERTS, "rtx-4090"),
        "no-kv-offload": Case(True, gpu="rtx-4090"),
        "host-memory": Case("8GiB", gpu="rtx-4090", settings={"n-gpu-layers": 10}),
        "host-bandwidth": Case("200GB/s", gpu="rtx-4090", settings={"n-gpu-layers": 10}),
    },
    "mlx": {
        "kv-bits": Case(4, gpu=None),
        "kv-group-size": Case(32, gpu=None, settings={"kv-bits": 4}),
        "max-kv-size": Case(512, "gpt2", None, asked=FOUR),
        "prefill-step-size": Case(512, gpu="m2-ultra", asked=FOUR),
    },
}  # fmt: skip

# The figures of the document's `engine` part. Its other keys repeat the settings.
FIGURES = ("bytes_per_block", "request_bytes", "num_gpu_blocks", "kv_cache_tokens", "max_concurrency")


def figures_of(engine: str, case: Case, settings: Mapping[str, object]) -> dict[str, Any]:
    """The parts of the estimate that no option is repeated in."""
    devices = None if case.gpu is None else kvcalc.find_devices(case.gpu)
    document: Any = kvcalc.estimate(
        case.model, devices=devices, engine_settings=settings, **{"engine": engine, **case.asked}
    )
    found, held = document["engine"], document["kv_cache"]["bytes_per_device"]
    batch = -(-document["workload"]["batch_size"] // case.asked.get("data_parallel_size", 1))
    for account, number in (("pool_lines", 1), ("request_lines", batch)):
        if account in found:
            assert number * sum(line["bytes"] for line in found[account]) == held, f"{account} do not add up"
            break
    parts = {part: document[part] for part in ("kv_cache", "weights", "fit", "throughput", "workload")}
    return {**parts, "engine": {name: found.get(name) for name in FIGURES}}


def test_every_option_has_a_question() -> None:
    declared = [(engine, option.name) for engine, options in OPTIONS.items() for option in options]
    asked = [(engine, name) for engine, cases in CASES.items() for name in cases]
    assert not [*set(declared) - set(asked)], "CASES has no question for these options"
    assert asked == declared, "CASES has them in another order than engine.yaml"


@every_row("engine, name", [(engine, name) for engine, cases in CASES.items() for name in cases])
def test_an_option_changes_a_figure(engine: str, name: str) -> None:
    case = CASES[engine][name]
    assert {name, *case.settings} <= {option.name for option in OPTIONS[engine]}
    assert figures_of(engine, case, case.settings) != figures_of(engine, case, {**case.settings, name: case.value})


# Options that say what no flag of the engine says: a build or a host, or drafts, which --speculative describes.
NO_FLAGS = {"num-speculative-tokens", "before-pull", "host-memory", "host-bandwidth"}
# Options of drafts are in a command with the method (tests/engines/test_commands.py).
OF_DRAFTS = {"speculative-num-draft-tokens", "speculative-eagle-topk", "draft-max"}
# Options without an effect in the newest release, and those that the engine has under another name.
GONE, RENAMED = {"mamba-cache-mode"}, {
    "draft-max": "spec-draft-n-max", "free-gpu-memory-fraction": "free_gpu_memory",
    "graph-estimate": "estimate_cudagraphs",
}  # fmt: skip


@every_row("engine, name", [(engine, name) for engine in SERVERS for name in CASES[engine]])
def test_an_option_is_in_the_command(engine: str, name: str) -> None:
    value = CASES[engine][name].value
    sizes = {"max-num-seqs": value, "max-running-requests": value, "max-batch-size": value, "parallel": value}
    arguments = ServerArguments(
        Layout(), 8192, int(str(sizes.get(name, 4))), "fp16", {name: "" if value is True else str(value)},
        prompt_division="in-seq-split" if name == "attn-cp-size" else None,
    )  # fmt: skip
    command = join(start_command(engine).words(Checkpoint("a/b"), arguments) or [])
    words = command.replace("_", "-").lower()
    text = str(value).replace("64k", "65536").partition(",")[0]
    is_there = RENAMED.get(name, name).replace("_", "-") in words and (value is True or text in command.lower())
    assert is_there == (name not in NO_FLAGS | GONE | OF_DRAFTS), command


@pytest.mark.parametrize(
    ("text", "otherwise", "hint"),
    [
        ("90", 0.9, "90%"), ("5", 0.9, "5%"), ("100", 0.9, "100%"), ("90", None, "90%"), ("4.9", 0.9, "default is 0.9"),
        ("100.5", 0.9, "default is 0.9"), ("0", 0.9, "default is 0.9"), ("much", 0.9, "default is 0.9"),
        ("2", None, ""),
    ],
)  # fmt: skip
def test_a_share_of_5_to_100_may_be_meant_as_a_percentage(text: str, otherwise: float | None, hint: str) -> None:
    given = SettingsReader("sglang", {"mem-fraction-static": text})
    with pytest.raises(SettingError, match="must be above 0 and at most 1") as caught:
        given.share("mem-fraction-static", otherwise)
    assert hint in (caught.value.hint or "")
    assert bool(caught.value.hint) is bool(hint)


def test_a_share_may_be_one_if_nothing_else_needs_memory() -> None:
    given = SettingsReader("sglang", {"mem-fraction-static": "1"})
    assert given.share("mem-fraction-static") == given.share("mem-fraction-static", 0.5) == 1
    with pytest.raises(SettingError, match="must be above 0 and below 1"):
        given.share("mem-fraction-static", below_one=True)
    # The default of the caller counts, or that of the option.
    other = SettingsReader("sglang", {})
    assert (other.share("mem-fraction-static", 0.5), other.share("swa-full-tokens-ratio")) == (0.5, 0.8)


@pytest.mark.parametrize(("text", "value"), [("0.5", 0.5), ("1e-9", 1e-9), ("999999999", 999999999.0)])
def test_a_ratio_is_above_0_and_below_a_billion(text: str, value: float) -> None:
    name = "schedule-conservativeness"
    assert SettingsReader("sglang", {name: text}).ratio(name) == value
    for wrong in ("0", "-1", "1e9", "nan", "some"):
        with pytest.raises(SettingError, match="above 0 and below 1e9"):
            SettingsReader("sglang", {name: wrong}).ratio(name)


# Methods of `SettingsReader` that read a setting by its name.
READERS = ("count", "optional_count", "choice", "share", "ratio")
SETTINGS = ("settings", "given", "settingsreader", "plain")


def names_read_in(tree: ast.AST) -> Iterator[str]:
    """The names that a module reads: `settings["x"]`, `settings.get("x")`, `"x" in settings`, `given.count("x")`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare) and isinstance(node.ops[0], (ast.In, ast.NotIn)):
            name, of = node.left, node.comparators[0]
        elif isinstance(node, ast.Subscript):
            name, of = node.slice, node.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
            name, of = node.args[0], node.func.value
            if node.func.attr != "get" and node.func.attr not in READERS:
                continue
            if node.func.attr in READERS and isinstance(of, ast.Call):  # SettingsReader("vllm", settings).count("x")
                of = of.func
        else:
            continue
        words = {word.lower() for word in (getattr(of, "id", ""), getattr(of, "attr", "")) if word}
        if words & {*SETTINGS} and isinstance(name, ast.Constant) and isinstance(name.value, str):
            yield name.value


@pytest.mark.parametrize("folder", ["engines", "planning", "server", "simulation", "throughput"])
def test_code_reads_settings_by_names_that_are_declared(folder: str) -> None:
    found = [
        (path.name, name)
        for path in sorted((ROOT / "kvcalc" / folder).rglob("*.py"))
        for name in names_read_in(ast.parse(path.read_text()))
    ]
    wrong = [(file, name) for file, name in found if "-" in name and name not in option_names()]
    assert not wrong
    assert len(found) > {"engines": 80, "planning": 10, "server": 1}.get(folder, -1)


@pytest.mark.parametrize(
    "line",
    ["settings.get('page-siz')", "'page-siz' in settings", "given.count('page-siz', 1)", "case.settings['page-siz']",
     "SettingsReader('sglang', x).share('page-siz', 0.9)"],
)  # fmt: skip
def test_a_misspelled_name_is_found(line: str) -> None:
    assert [*names_read_in(ast.parse(line))] == ["page-siz"]
