"""No part of a run is above its roof, or a remark names the cause.

The devices are simulated. Their clocks follow from bytes and operations alone, at rates that are known, so that no time
of this machine counts: a part above its roof is work that was counted and not done, or a roof that was not measured
at the part's conditions.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch._dynamo  # flex loads it. Its first import must not run on a simulated device, half of it would stay.
from torch.utils._python_dispatch import TorchDispatchMode

from kvcalc.measure import bandwidth, runner
from kvcalc.measure.devices.timing import Effort, Timings
from kvcalc.measure.figures import above_roof
from kvcalc.model.mixers.attention import AttentionShape
from kvcalc.model.spec import ModelSpec, map_attention
from tests.conftest import at_night, loaded
from tests.measure.quick import narrow
from tests.simulated_cuda import Machine, simulated_cuda
from tests.simulated_cuda.tensors import flop_of, leaves_of

# All kinds of attention, cross-attention with K and V of an encoder or an image, windows and recurrences.
MODELS = (
    "llama-7b llama-3-70b palm-540b deepseek-v3 t5-small whisper-large-v3 bart-large llama-3.2-11b-vision gemma-3-4b "
    "gpt-oss-120b qwen3-next-80b-a3b falcon-h1-tiny-90m"
).split()
# Of these: MLA, cross-attention, an image without tokens, GQA, windows and recurrences.
ASKED = [4, 3, 6, 7, 1, 8, 10]
EFFORT = Effort(read_bytes=1 << 22, matrix_width=64, cache_bytes=1 << 16, settle_seconds=0.0)
# Tokens of a prompt that is limited by multiplying.
PROMPT = 150


class Known(Machine):
    """A device that reads and multiplies at constant rates, and launches in no time."""

    kernel_seconds = launch_seconds = 1e-9
    bytes_per_second = 1e10
    flop_per_second = 4e10

    def multiply_seconds(self, flop: int, dtype: torch.dtype) -> float:
        return flop / (self.flop_per_second / dtype.itemsize)


class Starting(Known):
    """A kernel takes a while to reach the rate, so that small products have a lower one."""

    def multiply_seconds(self, flop: int, dtype: torch.dtype) -> float:
        return super().multiply_seconds(flop + 1_000_000, dtype)


class Slowed(Known):
    """Slow until it has launched `slow_launches` kernels, for example by other programs."""

    slow_launches = 60

    def launch(self, name: str, tensors: list[torch.Tensor], flop: int = 0) -> float:
        self.bytes_per_second = 1e10 if self.launches.total() > self.slow_launches else 2e9
        return super().launch(name, tensors, flop)


class SlowAtRoofs(Known):
    """Slow in the reductions and in the products that measure roofs, which are not those of a model."""

    def launch(self, name: str, tensors: list[torch.Tensor], flop: int = 0) -> float:
        self.bytes_per_second = 2e9 if name in ("sum", "mv") else 1e10
        self.flop_per_second = 1e10 if name == "mm" and tensors[0].shape == tensors[1].shape else 4e10
        return super().launch(name, tensors, flop)


class Caching(Known):
    """Reads tensors that fit in its cache ten times as fast."""

    l2_bytes = 1 << 21
    flop_per_second = 1e13

    def launch(self, name: str, tensors: list[torch.Tensor], flop: int = 0) -> float:
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        self.bytes_per_second = 1e11 if size <= self.l2_bytes else 1e10
        return super().launch(name, tensors, flop)


def small(spec: ModelSpec) -> ModelSpec:
    """Without large projections, and with few heads that share a latent."""
    spec = narrow(spec)
    if not spec.attention.is_latent:
        return spec

    def fewer(shape: AttentionShape) -> AttentionShape:
        return shape._replace(num_heads=8, num_kv_heads=8)

    spec = map_attention(spec, lambda attention: attention._replace(shape=fewer(attention.shape)))
    return spec._replace(attention=fewer(spec.attention))


def random_run(seed: int, kinds: tuple[str, ...]) -> tuple[ModelSpec, dict[str, Any]]:
    """A small model and options of `measure`."""
    rng = random.Random(seed)
    spec = small(loaded(MODELS[seed % len(MODELS)]))
    mla = ["absorbed", "expanded"] if spec.attention.is_latent else ["absorbed"]
    asked: dict[str, Any] = {
        "context_tokens": rng.choice([40, 130, 300]), "batch_size": rng.choice([1, 1, 3]), "steps": 2,
        "num_layers": min(4, spec.num_layers), "dtype": rng.choice(["fp32", "fp16", "bf16"]),
        "prefill": rng.choice(["sample", "full"]), "mla": rng.choice(mla),
        "block_size": rng.choice([None, None, 16]), "kv_dtype": rng.choice([None, None, *kinds]),
    }  # fmt: skip
    return spec, asked


def on(machine: Machine, spec: ModelSpec, **asked: Any) -> Any:
    with simulated_cuda(machine):
        return runner.measure(spec, device="cuda", effort=EFFORT, **asked)


def remarks(document: Any) -> list[str]:
    return [warning["text"] for warning in document["warnings"] if " roof: " in warning["text"]]


def fastest(document: Any) -> float:
    """The largest share of a roof."""
    return max(share for run in document["runs"] for _, _, share in above_roof(run, 0.0))


@pytest.mark.parametrize("seed", [*ASKED, *map(at_night, range(len(MODELS), 10 * len(MODELS)))])
def test_what_is_counted_is_done(seed: int) -> None:
    """At constant rates, no part is above its roof, whatever its types, shapes and layout."""
    spec, asked = random_run(seed, ("fp8", "int8"))
    document = on(Known(), spec, **asked)
    assert fastest(document) <= 1 + 1e-6, asked
    assert remarks(document) == []


def test_a_part_that_only_multiplies_or_reads_is_at_its_roof() -> None:
    """So a count that is too small is found too."""
    reading = on(Known(), narrow(loaded("llama-7b")), num_layers=2, context_tokens=300, steps=2, dtype="bf16")
    assert reading["runs"][0]["fraction_of_roof"]["attention_core"] > 0.97
    many = on(Known(), narrow(loaded("palm-540b")), num_layers=2, context_tokens=300, steps=2, dtype="bf16")
    assert many["runs"][0]["fraction_of_matmul_roof"]["attention_core"] > 0.97
    prompt = on(Known(), loaded("t5-small"), num_layers=4, context_tokens=300, steps=2, dtype="bf16")
    assert prompt["runs"][0]["fraction_of_matmul_roof"]["prefill"] > 0.9


def test_a_prompt_with_larger_products_than_the_roofs(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = loaded("t5-small")
    asked = {"num_layers": 4, "context_tokens": PROMPT, "steps": 2, "dtype": "bf16"}
    with monkeypatch.context() as patch:
        patch.setattr(runner, "multiply_again", lambda *given: None)
        (remark,) = remarks(on(Starting(), spec, **asked))
    assert "prefill ran at " in remark
    found = on(Starting(), spec, **asked)
    assert 0.8 < found["runs"][0]["fraction_of_matmul_roof"]["prefill"] <= 1
    assert remarks(found) == []


def test_a_gpu_that_was_slow_at_first_is_read_again() -> None:
    found = on(Slowed(), narrow(loaded("llama-7b")), num_layers=2, context_tokens=300, steps=2, dtype="bf16")
    assert found["roof"]["read_bytes_per_second"] == pytest.approx(1e10, rel=0.01)
    assert fastest(found) <= 1 + 1e-6


def test_the_remark_names_the_cause() -> None:
    asked: dict[str, Any] = {"context_tokens": 300, "steps": 2, "dtype": "bf16"}
    remark = remarks(on(Caching(), narrow(loaded("llama-3-70b")), num_layers=1, **asked))[0]
    assert "fit in the last-level cache of 2,097,152 bytes" in remark
    assert "attention core ran at " in remark
    assert "% of the read roof: the 1,228,800 bytes that it reads fit" in remark
    remark = remarks(on(SlowAtRoofs(), narrow(loaded("llama-7b")), num_layers=2, **asked))[0]
    assert remark.endswith("% of the read roof: the device was slower while the roof was measured")


class Counted(TorchDispatchMode):
    """A CPU whose clock is that of the bytes and operations of torch's operators."""

    def __init__(self, flop_per_second: dict[torch.dtype, float]) -> None:
        super().__init__()
        self.now, self.flop_per_second = 0.0, flop_per_second

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = func._schema.name.partition("::")[2]
        if name == "scaled_dot_product_attention":
            given = dict(zip(("query", "key", "value", "attn_mask", "dropout_p", "is_causal"), args))
            named = {"attn_mask": None, "is_causal": False, **given, **kwargs}
            flop = flop_of("sdpa cpu", args[:3], named, out)
        else:
            flop = flop_of(name, args, kwargs, out)
        made = [t for t in leaves_of(out) if isinstance(t, torch.Tensor)]
        read = [t for t in leaves_of((args, kwargs)) if isinstance(t, torch.Tensor)]
        known = {t.untyped_storage().data_ptr() for t in read}
        if func._schema.is_mutable or any(t.untyped_storage().data_ptr() not in known for t in made):
            seconds = sum(t.numel() * t.element_size() for t in (*read, *made)) / 1e10
            self.now += max(seconds, flop / self.flop_per_second[read[0].dtype] if flop else 0.0)
        return out


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch, flop_per_second: dict[torch.dtype, float]) -> Iterator[None]:
    mode = Counted(flop_per_second)
    with monkeypatch.context() as patch, mode:
        patch.setattr(time, "perf_counter", lambda: mode.now)
        yield


RATES = {
    "fp16 is emulated": {torch.float32: 4e10, torch.float16: 1e10, torch.bfloat16: 4e10},
    "tiles of bf16": {torch.float32: 1e10, torch.float16: 2.5e10, torch.bfloat16: 1.6e11},
}


@pytest.mark.parametrize("rates", RATES)
@pytest.mark.parametrize("seed", [*ASKED[:2], *map(at_night, range(len(MODELS), 6 * len(MODELS)))])
def test_what_is_counted_is_done_on_a_cpu(monkeypatch: pytest.MonkeyPatch, seed: int, rates: str) -> None:
    """Types with different rates: a prompt may run in another one than its weights have."""
    spec, asked = random_run(seed, ("fp8", "int8"))
    with counted(monkeypatch, RATES[rates]):
        document = runner.measure(spec, device="cpu", effort=EFFORT, without_backends=("native",), **asked)
    assert fastest(document) <= 1 + 1e-6, asked
    assert remarks(document) == []


def test_emulated_products_are_tried_on_small_matrices_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU without fp16 products, one of width 2,048 takes half a minute."""
    tried: list[tuple[torch.dtype, int]] = []

    def time_calls(device: torch.device, call: Any, *given: Any, **options: Any) -> Timings:
        # A product, or a reduction of the read roof.
        x = call.args[0] if hasattr(call, "args") else None
        if x is None:
            return Timings([1e-3], None, "wall clock")
        tried.append((x.dtype, len(x)))
        return Timings([2.0 * len(x) ** 3 / rates[x.dtype]], None, "wall clock")

    monkeypatch.setattr(bandwidth, "time_calls", time_calls)
    for rates in RATES.values():
        tried.clear()
        roof = bandwidth.read_roof(torch.device("cpu"), torch.float16, Effort(read_bytes=1 << 20))
        fastest = max(torch.float32, torch.float16, key=rates.__getitem__)
        assert roof["matmul_flop_per_second"] == pytest.approx(rates[fastest])
        assert roof["matmul_dtype"] == str(fastest).removeprefix("torch.")
        slowest = min(torch.float32, torch.float16, key=rates.__getitem__)
        assert [width for used, width in tried if used == slowest] == [1024]
        assert [width for used, width in tried if used != slowest] == [1024, 2048]
