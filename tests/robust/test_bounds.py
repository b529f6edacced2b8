"""Every count has a bound, which is named in the refusal, and no answer at a bound takes long or much memory."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import pytest

from kvcalc.engines.declarations import OPTIONS
from kvcalc.limits import DEVICES, LAYERS, SEQUENCES, TOKENS, WIDTH
from tests.conftest import PEAK, ROOT

_REQUEST = "--input-tokens 8 --output-tokens 8"
_SHAPE = {"--layers": 4, "--heads": 8, "--head-dim": 64, "--hidden-size": 512}


def _questions() -> list[tuple[str, int]]:
    """A command line whose last word is to be a number, and the bound of that number."""
    found: list[tuple[str, int]] = []
    for engine in ("logical", "vllm", "sglang", "tensorrt-llm", "llama.cpp", "mlx", "transformers"):
        for command in ("estimate llama-3-8b", "fit deepseek-v3 --gpu h100x8", "fit gpt-oss-120b --gpu h100x8"):
            words = f"{command} --engine {engine}"
            found += [(f"{words} --{name}", TOKENS) for name in ("context", "max-model-len", "encoder-tokens")]
            found += [(f"{words} --{name}", DEVICES) for name in ("tp", "pp", "dp")]
            found += [(f"{words} --batch", SEQUENCES), (f"{words} --kv-heads", WIDTH)]
        words = f"fit llama-3-8b --gpu h100x8 --engine {engine}"
        found += [(f"{words} {_REQUEST} --concurrency", SEQUENCES)]
        found += [(f"{words} --output-tokens 8 --input-tokens", TOKENS)]
    for command in ("fit", "estimate", "plan --concurrency 4"):
        found.append((f"{command} llama-3-8b --gpu h100 --input-tokens 8 --output-tokens", TOKENS))
    found += [
        ("fit llama-3-8b --gpu h100 --num-gpus", DEVICES),
        (f"plan llama-3-8b --gpu h100 {_REQUEST} --concurrency 4 --max-gpus", DEVICES),
    ]
    found += [(f"plan llama-3-8b --gpu h100 {_REQUEST} --concurrency", SEQUENCES)]
    found += [("fit qwen2.5-vl-7b --gpu h100 --image-size 640x480 --images", SEQUENCES)]
    for name, most in (("layers", LAYERS), *((name, WIDTH) for name in ("heads", "head-dim", "hidden-size"))):
        rest = " ".join(f"{option} {value}" for option, value in _SHAPE.items() if option != f"--{name}")
        found.append((f"estimate {rest} --{name}", most))
    return found


def _engine_options() -> list[tuple[str, int]]:
    """The same for the counts that belong to an engine. Those of tokens have the bound of tokens."""
    tokens = {
        "context-length", "max-tokens", "max-kv-size", "before-pull", "fit-ctx", "avg-seq-len", "max-total-tokens",
        "max-prefill-tokens", "max-num-tokens", "num-gpu-blocks-override", "scheduler-recv-interval",
    }  # fmt: skip
    found = []
    for engine, options in OPTIONS.items():
        gpu = "m3-ultra" if engine == "mlx" else "h100"
        for option in options:
            is_count = option.metavar == "N" or option.name == "max-lora-rank"
            if is_count and option.name != "n-cpu-moe":  # more layers than there are mean all of them
                most = TOKENS if option.name in tokens else SEQUENCES
                most = DEVICES if "parallel-size" in option.name or option.name == "attn-cp-size" else most
                most = WIDTH if option.name in ("kv-bits", "kv-group-size", "max-lora-rank") else most
                found.append((f"fit llama-3-8b --gpu {gpu} --engine {engine} --{option.name}", most))
    return found


ALL = [*_questions(), *_engine_options()]


def test_beyond_its_bound_each_count_is_refused_by_name(kvcalc: Any) -> None:
    for words, most in ALL:
        result = kvcalc(*words.split(), most + 1)
        said = re.sub(r"\s+", " ", result.err)
        assert (result.status, result.out) == (2, ""), (words, said)
        assert said.startswith(f"kvcalc: {words.split()[-1]} {most + 1}"), said
        assert f"at most {most:,}" in said, said


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, and only Linux holds to the limit")
def test_at_its_bound_no_count_takes_long_or_much_memory() -> None:
    """All in one process, which may take a second for each: they take a hundredth of that."""
    code = f"""
import contextlib, io, resource, sys
from kvcalc.cli.app import run
def kilobytes():
    return {PEAK}
resource.setrlimit(resource.RLIMIT_CPU, ({len(ALL)}, {len(ALL)} + 5))
for line in sys.stdin.read().splitlines():
    before = kilobytes()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        status = run(line.split())
    if status not in (0, 2, 3, 4) or kilobytes() - before > 500 << 10:
        print(status, kilobytes() - before, line)
"""
    lines = "\n".join(f"{words} {most}" for words, most in ALL)
    done = subprocess.run([sys.executable, "-c", code], input=lines, capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
