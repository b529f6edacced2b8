"""What torch and the driver must do for `kvcalc measure` to be right: graphs, and the allocator's rounding."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kvcalc as library
from kvcalc.measure import run, runner
from kvcalc.measure.devices.device import ALLOCATION_UNIT, allocated_by
from kvcalc.measure.devices.graphs import capture

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    # torch's compiler warns of its own calls, which must not make flex_attention fail.
    pytest.mark.filterwarnings("default"),
]

CUDA = torch.device("cuda")


def test_a_replayed_step_is_an_eager_step(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over all layers of a small model, with the same random numbers."""
    spec = library.read_config(
        {"model_type": "generic", "num_hidden_layers": 3, "num_attention_heads": 16, "num_key_value_heads": 4,
         "head_dim": 64, "hidden_size": 256}, "small", "test"
    )  # fmt: skip
    outputs: list[torch.Tensor] = []
    methods: list[str] = []
    monkeypatch.setattr(run, "check_finite", lambda output, what: outputs.append(output.clone()))
    for is_eager in (False, True):
        if is_eager:
            monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_begin", refuse, raising=False)
        document = runner.measure(spec, context_tokens=tokens, steps=4, device="cuda", dtype="bf16", backend="flex")
        methods.append(document["runs"][0]["decode_step_seconds"]["method"])
    assert methods == ["CUDA graph", "CUDA events"]
    torch.testing.assert_close(outputs[0], outputs[1], rtol=2e-2, atol=2e-2)


def refuse(*_: object, **__: object) -> None:
    raise RuntimeError("no graphs")


@pytest.mark.parametrize("size", [1, 511, 512, 513, 1_000_001, 1 << 20])
def test_small_blocks_are_rounded_to_the_unit(size: int) -> None:
    made, grown = allocated_by(CUDA, lambda: torch.empty(size, dtype=torch.uint8, device=CUDA))
    unit = ALLOCATION_UNIT["cuda"]
    assert grown == -(-size // unit) * unit
    del made


def test_a_call_that_waits_is_found_before_the_capture() -> None:
    """The capture is not tried, because it would fail, which breaks the allocator of some releases of torch."""
    one = torch.ones(1, device=CUDA)
    found = capture(CUDA, lambda: one.item())
    assert found.method == "CUDA events"
    assert found.reason is not None
    torch.cuda.empty_cache()
    assert float(torch.ones(1000, device=CUDA).sum()) == 1000


def test_a_graph_repeats_the_call() -> None:
    x = torch.zeros(1000, device=CUDA)
    found = capture(CUDA, lambda: x.add_(1))
    before = float(x[0])
    for _ in range(5):
        found.call()
    assert float(x[0]) == before + 5


@pytest.mark.parametrize("options", [(), ("--block-size", "256"), ("--kv-dtype", "fp8"), ("--attention", "mla")])
def test_bytes_of_the_allocator_are_explained(kvcalc: Any, tokens: int, options: tuple[str, ...]) -> None:
    model = ("--heads", "8", "--kv-heads", "2", "--head-dim", "64", "--hidden-size", "256", "--layers", "3")
    result = kvcalc(
        "measure", *model, "--context", tokens + 1, "--device", "cuda", "--dtype", "bf16", *options, "--json"
    )
    assert result.status == 0, result.err
    (row,) = result.json["runs"]
    assert row["predicted_bytes"] == row["held_bytes"]
    assert not [warning for warning in result.json["warnings"] if "allocator" in warning["text"]]
