"""Mutated configs, files, logs and command lines: each is answered or refused in one line.

The seeds are fixed. `pytest -m fuzz --cases 1000000 --fuzz-seed 7` is a long run with other inputs; a failure names the
seed of its case.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import kvcalc as api
from kvcalc.errors import KvcalcError
from kvcalc.model.checkpoint import INDEX, read_checkpoint
from kvcalc.model.presets import shipped_presets
from tests.conftest import ROOT
from tests.documents import validate
from tests.model.test_checkpoint import index, write

pytestmark = pytest.mark.fuzz

ENGINES = ("logical", "transformers", "vllm", "sglang", "tensorrt-llm", "llama.cpp", "mlx")
ODD: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 3, 7, 10**9, 2**63, 10**30, 0.5, -0.0, 1e308, float("inf"), float("nan"), "", "a",
    "none", "float16", "\0", "\ud800", "\x1b[31m", "../x", [], [1], [None], ["full_attention"] * 3, {}, {"a": 1},
    [[[[1]]]], {"type": "linear", "factor": 2.0},
)  # fmt: skip
# The share of the cases that each kind gets, in per cent. tests/model/test_fuzz.py has many more configs.
SHARES = {"config": 10, "gguf": 20, "safetensors": 15, "index": 12, "log": 5, "options": 5, "trace": 5}


@cache
def configs() -> list[dict[str, Any]]:
    return [dict(preset.config) for preset in shipped_presets()]


def mutated_mapping(config: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """A copy with keys removed, added, renamed or given odd values, also in nested mappings."""
    found = copy.deepcopy(config)
    for _ in range(rng.randint(1, 4)):
        target = found
        nested = [value for value in target.values() if isinstance(value, dict)]
        while nested and rng.random() < 0.5:
            target = rng.choice(nested)
            nested = [value for value in target.values() if isinstance(value, dict)]
        other = rng.choice(configs())
        keys = [*target] or [*other]
        key, action = rng.choice(keys), rng.random()
        if action < 0.2:
            target.pop(key, None)
        elif action < 0.6:
            target[key] = copy.deepcopy(rng.choice(ODD))
        elif action < 0.8:
            name = rng.choice([*other])
            target[name] = copy.deepcopy(other[name])
        elif type(target.get(key)) is int:
            target[key] += rng.choice((-1, 1, 100, -(10**6)))
        else:
            target[rng.choice([*other])] = copy.deepcopy(rng.choice(ODD))
    return found


def mutated_bytes(data: bytes, rng: random.Random) -> bytes:
    """A copy with bytes changed, removed, repeated or inserted, or cut off."""
    found = bytearray(data)
    for _ in range(rng.randint(1, 5)):
        if not found:
            break
        at, action = rng.randrange(len(found)), rng.random()
        if action < 0.5:
            found[at] = rng.choice((0, 1, 9, 34, 44, 48, 57, 91, 123, 127, 128, 255, rng.randrange(256)))
        elif action < 0.65:
            del found[at : at + rng.randint(1, 20)]
        elif action < 0.8:
            found[at:at] = found[at : at + rng.randint(1, 50)]
        elif action < 0.95:
            found[at : at + 8] = rng.choice((0, 1, 2**31, 2**32, 2**63, 2**64 - 1)).to_bytes(8, "little")
        else:
            del found[at:]
    return bytes(found)


def fuzz_config(rng: random.Random, folder: Path, run: Any) -> None:
    path = folder / "config.json"
    text = json.dumps(mutated_mapping(rng.choice(configs()), rng))
    if rng.random() < 0.1:
        path.write_bytes(mutated_bytes(text.encode(), rng))
    else:
        path.write_text(text)
    spec = api.load_model(str(path), assume_full_attention=rng.random() < 0.1)
    asked: dict[str, Any] = {
        "context_tokens": rng.choice((1, 100, 4096, 10**6, 2**63 - 1)),
        "batch_size": rng.choice((1, 3, 10**9)),
    }
    document: Any = api.estimate(spec, engine=rng.choice(ENGINES), **asked)
    cache = document["kv_cache"]
    assert min(cache["total_bytes"], cache["bytes_per_token"], cache["fixed_bytes_per_sequence"]) >= 0
    if rng.random() < 0.2:
        validate(document, "estimate")


@cache
def gguf_file(folder: Path) -> bytes:
    pytest.importorskip("gguf")
    from tests.model.gguf_writing import write as write_gguf

    pairs = {
        "block_count": 2, "context_length": 4096, "embedding_length": 64, "feed_forward_length": 96,
        "attention.head_count": 4, "attention.head_count_kv": 2, "vocab_size": 128,
    }  # fmt: skip
    tensors = {"token_embd.weight": ((64, 128), "F16"), "blk.0.attn_q.weight": ((64, 64), "Q8_0")}
    return write_gguf(folder / "whole.gguf", "llama", pairs, tensors).read_bytes()


def fuzz_gguf(rng: random.Random, folder: Path, run: Any) -> None:
    path = folder / "model.gguf"
    path.write_bytes(mutated_bytes(gguf_file(folder), rng))
    api.estimate(api.load_model(str(path)), engine="llama.cpp")


def fuzz_safetensors(rng: random.Random, folder: Path, run: Any) -> None:
    path = folder / rng.choice(("model.safetensors", "model-00001-of-00002.safetensors", "adapter_model.safetensors"))
    write(path, 10, 20, 5)
    path.write_bytes(mutated_bytes(path.read_bytes(), rng))
    try:
        read_checkpoint(str(folder))
    finally:
        path.unlink()


def fuzz_index(rng: random.Random, folder: Path, run: Any) -> None:
    for name in ("model-1.safetensors", "model-2.safetensors"):
        if not (folder / name).exists():
            write(folder / name, 10, 20)
    index(folder, ["model-1.safetensors", "model-2.safetensors"], total=rng.choice((60, 59, 1, 10**30, -1, "60", 6e1)))
    path = folder / INDEX
    if rng.random() < 0.5:
        path.write_bytes(mutated_bytes(path.read_bytes(), rng))
    else:
        path.write_text(json.dumps(mutated_mapping(json.loads(path.read_text()), rng)))
    try:
        read_checkpoint(str(folder))
    finally:
        path.unlink()


@cache
def logs() -> list[bytes]:
    from tests.planning.test_audit import LLAMA_CPP, SGLANG, TENSORRT_LLM, VLLM

    return [case.log.encode() for case in (*VLLM, *SGLANG, *TENSORRT_LLM, *LLAMA_CPP)]


def fuzz_log(rng: random.Random, folder: Path, run: Any) -> None:
    data = mutated_bytes(rng.choice(logs()), rng)
    size = rng.choice((1, 10, 1000, 10**6))
    model = None if rng.random() < 0.3 else rng.choice(("llama-3-8b", "gpt2", "mamba-2.8b", "gemma-3-27b", "bert-base"))
    pieces = [data[at : at + size] for at in range(0, len(data), size)]
    document: Any = api.audit(pieces, model=model, context_tokens=rng.choice((None, None, 1, 8192)))
    validate(document, "audit")


def fuzz_trace(rng: random.Random, folder: Path, run: Any) -> None:
    path = folder / "trace"
    path.write_bytes(mutated_bytes(rng.choice(traces()), rng))
    document: Any = api.prefix_curve(
        str(path), rng.choice((None, "gpt2", "gemma-3-27b")), trace_block_tokens=rng.choice((None, None, 16, 512)),
        trace_format=rng.choice((None, None, "mooncake", "token-ids")),
    )  # fmt: skip
    validate(document, "prefix")


@cache
def traces() -> list[bytes]:
    return [path.read_bytes() for path in sorted((ROOT / "tests/traces/files").iterdir())]


COMMANDS = (
    "estimate", "fit", "compare", "sweep", "plan", "prefix", "models", "gpus", "score", "audit", "batch", "completion",
)  # fmt: skip
WORDS = (
    "llama-3-8b", "gpt2", "nope", "--gpu", "h100", "h100x2", "t4", "--context", "8k", "1..4k", "0", "-1", "1e9", "--tp",
    "2", "3", "--pp", "--batch", "1M", "--engine", "vllm", "sglang@0.4", "logical", "--json", "--format", "csv",
    "human", "--get", "kv_cache.total_bytes", "a..b", "--kv-dtype", "fp8", "auto", "--dtype", "int4", "--kv-memory",
    "80GiB",
    "80", "--input-tokens", "1k", "--output-tokens", "100", "--concurrency", "8", "--speculative", "mtp:2", "ngram:3",
    "--acceptance-length", "2", "--", "", "\0", "=", "--block-size", "16", "99999999999999999999", "--attention", "mla",
    "gqa", "--kv-heads", "--help", "-h", "show", "check", "bash", "--layers", "--heads", "--dp", "--price", "h100=2",
    "\ud800", "\x1b[2J", "/dev/null", "/nonexistent", "--max-model-len", "4096", "--swa-full-tokens-ratio", "0.5",
)  # fmt: skip


def fuzz_options(rng: random.Random, folder: Path, run: Any) -> None:
    words = [rng.choice(COMMANDS), *(rng.choice(WORDS) for _ in range(rng.randint(0, 8)))]
    result = run(*words)
    assert result.status in (0, 1, 2, 3, 4, 5), words
    assert "internal error" not in result.err, (words, result.err)
    assert "Traceback" not in result.err, words
    if result.status in (2, 3):
        assert len(result.err.splitlines()) <= 3, (words, result.err)


KINDS: dict[str, Callable[[random.Random, Path, Any], None]] = {
    "config": fuzz_config, "gguf": fuzz_gguf, "safetensors": fuzz_safetensors, "index": fuzz_index, "log": fuzz_log,
    "options": fuzz_options, "trace": fuzz_trace,
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_or_a_refusal_in_one_line(
    kind: str, pytestconfig: pytest.Config, tmp_path: Path, kvcalc: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", None)
    monkeypatch.chdir(tmp_path)
    first, cases = pytestconfig.getoption("--fuzz-seed"), pytestconfig.getoption("--cases")
    answered = refused = 0
    for number in range(max(cases * SHARES[kind] // 100, 1)):
        seed = f"{kind}-{first}-{number}"
        try:
            KINDS[kind](random.Random(seed), tmp_path, kvcalc)
            answered += 1
        except KvcalcError as error:
            refused += 1
            trouble = error.exit_code not in (1, 2, 3, 4, 5) or not error.message or "\n" in error.message
            if trouble:
                pytest.fail(f"{seed}: {error.exit_code} {error.message!r}")
        except Exception as error:
            pytest.fail(f"{seed}: {type(error).__name__}: {error}")
    if cases >= 500:
        assert answered, "every mutation is refused: nothing is tested"
        assert refused or kind == "options", "no mutation is refused: nothing is tested"
