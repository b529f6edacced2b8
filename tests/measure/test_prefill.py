"""The caches are filled without running a long prompt, and prefill is timed on a short one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kvcalc as library
from kvcalc.attention.cache import TokenCache
from kvcalc.attention.core import causal_attention, grouped_attention
from kvcalc.attention.grouped import GroupedAttention
from kvcalc.attention.masks import causal_mask
from kvcalc.measure import run, runner
from kvcalc.measure.layers.stack import Request
from kvcalc.measure.sizes import budget
from kvcalc.memory.dtypes import DTYPES
from tests.measure.quick import SMALL, narrow

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
FAST = (*SMALL, "--context", "4k", "--steps", "3", "--device", "cpu", "--dtype", "fp32", "--json")


@pytest.fixture
def tokens_run(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of tokens in every call of a layer of the stack."""
    seen: list[int] = []
    real = GroupedAttention.forward

    def forward(self: GroupedAttention, x: torch.Tensor, *given: Any) -> torch.Tensor:
        # The self-check has a smaller hidden size.
        seen.append(x.shape[0] * x.shape[1])
        return real(self, x, *given)

    monkeypatch.setattr(GroupedAttention, "forward", forward)
    monkeypatch.setattr(runner, "_verified", lambda *given: {"max_abs_error": 0.0, "tolerance": 1e-4, "ok": True})
    return seen


def test_a_long_context_does_not_take_a_long_prompt(kvcalc: Any, tokens_run: list[int]) -> None:
    (found,) = kvcalc("measure", *FAST, "--batch", "2").json["runs"]
    assert found["held_bytes"] == found["predicted_bytes"]
    assert (found["prefill"]["tokens"], found["prefill"]["batch_size"]) == (2048, 1)
    # Two layers run the prompt of one sequence. Everything else is a step of one token of two sequences.
    assert sum(tokens for tokens in tokens_run if tokens > 2) == 2 * 2048
    tokens_run.clear()
    (found,) = kvcalc("measure", *FAST, "--batch", "2", "--prefill", "full").json["runs"]
    assert (found["prefill"]["tokens"], found["prefill"]["batch_size"]) == (4093, 2)
    assert sum(tokens for tokens in tokens_run if tokens > 2) == 2 * 2 * 4093


def test_another_way_to_prefill_is_refused(kvcalc: Any) -> None:
    result = kvcalc("measure", *FAST, "--prefill", "none")
    assert (result.status, result.out) == (2, "")
    assert "--prefill 'none': one of sample, full" in result.err


@pytest.mark.parametrize(
    "what", [(), ("--block-size", "16"), ("--cache", "grow"), ("--sliding-window", "100")], ids=str
)
@pytest.mark.parametrize("kind", ["gqa", "mla"])
def test_every_row_of_a_filled_cache_is_another(
    kvcalc: Any, monkeypatch: pytest.MonkeyPatch, what: tuple[str, ...], kind: str
) -> None:
    rows: list[torch.Tensor] = []
    real = run.choose_backends

    def look(stack: Any, *given: Any) -> Any:
        for cache in stack.caches:
            assert cache.length == 4093
            rows.extend(view[0, 0] for view in cache.views())
        return real(stack, *given)

    monkeypatch.setattr(run, "choose_backends", look)
    assert kvcalc("measure", *FAST, "--attention", kind, *what).status == 0
    assert {row.shape[0] for row in rows} == {100 if "--sliding-window" in what else 4093}
    together = torch.cat([row[:, :16] for row in rows])
    assert len({tuple(row) for row in together.tolist()}) == together.shape[0]


@pytest.mark.parametrize("name", ["falcon-h1-tiny-90m", "mamba-2.8b", "t5-small"])
def test_states_and_an_encoders_keys_are_filled_too(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    seen: list[Any] = []
    real = run.choose_backends

    def look(stack: Any, *given: Any) -> Any:
        seen.extend(stack.caches)
        return real(stack, *given)

    monkeypatch.setattr(run, "choose_backends", look)
    document = runner.measure(narrow(library.load_model(name)), num_layers=2, context_tokens=24, steps=3, device="cpu")
    runner.check_bytes(document)
    assert seen
    for cache in seen:
        assert all(bool(tensor.count_nonzero()) for tensor in cache.tensors if tensor.numel())
    assert any(not isinstance(cache, TokenCache) for cache in seen) or name == "t5-small"


@pytest.mark.parametrize(
    ("name", "context", "batch"), [("llama-3-70b", 131_072, 1), ("llama-3-70b", 32_768, 16), ("deepseek-v3", 8192, 16)]
)
def test_a_gpu_prefills_in_large_chunks(name: str, context: int, batch: int) -> None:
    """Attention is fused, so the scores of all heads over the whole context take no memory."""
    spec = library.load_model(name)
    request = Request(context, batch, 8, DTYPES["bf16"], CUDA, 0)
    assert budget.chunk_tokens(spec, request) == 2048
    assert budget.prompt_of(request).context_tokens == 2048
    full = request._replace(prefill="full")
    assert budget.prompt_of(full).context_tokens == context - 8
    assert budget.chunk_tokens(spec, full) >= 128


def test_values_narrower_than_keys_stay_in_the_fused_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's kernel for CPUs needs both of the same width. The other path writes all scores to memory."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    torch.manual_seed(0)
    query, key, value = torch.randn(1, 4, 33, 24), torch.randn(1, 2, 33, 24), torch.randn(1, 2, 33, 16)
    out = causal_attention(query, key, value)
    assert out.shape == (1, 4, 33, 16)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        torch.testing.assert_close(causal_attention(query, key, value), out)
    with sdpa_kernel(SDPBackend.MATH):
        torch.testing.assert_close(causal_attention(query, key, value), out)
    # A later chunk attends through a mask.
    mask = causal_mask(25, 33)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        later = grouped_attention(query[:, :, 8:], key, value, mask)
    torch.testing.assert_close(later, out[:, :, 8:])


def test_nan_in_the_prompt_is_no_result(kvcalc: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    real = GroupedAttention.forward

    def spoilt(self: GroupedAttention, x: torch.Tensor, *given: Any) -> torch.Tensor:
        return real(self, x, *given) * (float("nan") if x.shape[1] > 1000 else 1.0)

    monkeypatch.setattr(GroupedAttention, "forward", spoilt)
    result = kvcalc("measure", *FAST)
    assert (result.status, result.out) == (1, "")
    assert result.err.startswith("kvcalc: prefill: 131,072 of 131,072 outputs are NaN")
