"""Kernels are checked at the shape, length and dtype at which they are timed, and none of them ends the run."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from kvcalc.attention.backends import BACKENDS, Backend
from kvcalc.attention.backends.base import Cache
from kvcalc.attention.cache import GrowingCache, PagedCache, TokenCache
from kvcalc.attention.core import eager_attention
from kvcalc.attention.grouped import GroupedAttention
from kvcalc.attention.latent import MultiHeadLatentAttention
from kvcalc.measure import reference
from kvcalc.measure.choose import SlowBackends
from tests.measure.quick import SMALL

CPU = torch.device("cpu")
LONG = (*SMALL, "--context", "2048", "--steps", "4", "--device", "cpu", "--json")

Step = Callable[[Tensor, Tensor, Tensor, Any], Tensor]


class Faulty(Backend):
    """A kernel that is always the fastest to be tried, because its name is asked for."""

    name = "faulty"
    cache: weakref.ref[Any]

    def __init__(self, step: Step) -> None:
        self._step = step

    def decode(self, query: Tensor, cache: Cache, scale: float | None = None, v_width: int | None = None) -> Tensor:
        self.cache = weakref.ref(cache)
        key, *rest = cache.views()
        return self._step(query, key, rest[0] if rest else key[..., :v_width], scale)


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> Callable[[Step], None]:
    """`faulty(step)` adds a backend of that name."""
    return lambda step: monkeypatch.setitem(BACKENDS, "faulty", Faulty(step))


def row_of(found: Any, name: str = "faulty") -> dict[str, Any]:
    row: dict[str, Any] = next(row for row in found["backends"] if row["name"] == name)
    return row


READS = {
    "the first 256 tokens": lambda tokens: tokens[:, :, :256],
    "all but the last token": lambda tokens: tokens[:, :, :-1],
    "all but the first token": lambda tokens: tokens[:, :, 1:],
    "one block of 64 twice": lambda tokens: torch.cat((tokens[:, :, :-64], tokens[:, :, -128:-64]), dim=2),
}


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["gqa", "mla"])
@pytest.mark.parametrize("what", READS)
def test_a_kernel_that_reads_other_tokens_is_refused(
    kvcalc: Any, faulty: Any, what: str, kind: str, dtype: str
) -> None:
    def step(query: Tensor, key: Tensor, value: Tensor, scale: Any) -> Tensor:
        if key.shape[2] < 1024:  # right wherever the cache is short
            return eager_attention(query, key, value, scale=scale)
        return eager_attention(query, READS[what](key), READS[what](value), scale=scale)

    faulty(step)
    (found,) = kvcalc("measure", *LONG, "--attention", kind, "--dtype", dtype).json["runs"]
    row = row_of(found)
    assert row["seconds"] is None
    assert "differs from fp32 by" in row["reason"]
    assert found["backend"] != "faulty"


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("more", [(), ("--kv-dtype", "int8"), ("--block-size", "16"), ("--attention", "mla")], ids=str)
def test_a_kernel_that_is_right_is_within_the_tolerance(kvcalc: Any, dtype: str, more: tuple[str, ...]) -> None:
    (found,) = kvcalc("measure", *LONG, "--dtype", dtype, *more).json["runs"]
    for row in found["backends"]:
        assert (row["relative_error"] is None) is (row["seconds"] is None), row


def test_a_kernel_for_16_bits_alone_does_not_end_the_run(kvcalc: Any, faulty: Any) -> None:
    """kvcalc's kernels for GPUs refuse fp32. The self-check of the modules does not need them."""

    def step(query: Tensor, key: Tensor, value: Tensor, scale: Any) -> Tensor:
        if query.dtype not in (torch.float16, torch.bfloat16):
            raise RuntimeError("needs a 16-bit dtype")
        return eager_attention(query, key, value, scale=scale)

    faulty(step)
    result = kvcalc("measure", *LONG, "--dtype", "bf16", "--backend", "faulty")
    assert result.status == 0, result.err
    (found,) = result.json["runs"]
    assert found["backend"] == "faulty"
    assert found["verified"]["ok"]


@pytest.mark.parametrize(
    "error",
    [
        AssertionError(), torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), KeyError("sm_100"),
        NotImplementedError("not for this device"), RuntimeError("no kernel image is available"), MemoryError(),
    ],
    ids=lambda error: type(error).__name__,
)  # fmt: skip
def test_whatever_a_kernel_raises_is_its_reason(kvcalc: Any, faulty: Any, error: Exception) -> None:
    """And its error, which torch's compiler may keep, does not hold what the kernel made, nor the cache."""
    held: list[weakref.ref[Tensor]] = []

    def step(query: Tensor, key: Tensor, value: Tensor, scale: Any) -> Tensor:
        scores = query @ key[:, :1].transpose(-1, -2)
        held.append(weakref.ref(scores))
        raise error

    faulty(step)
    result = kvcalc("measure", *LONG, "--dtype", "fp32")
    assert result.status == 0, result.err
    assert row_of(result.json["runs"][0])["reason"] == (str(error) or type(error).__name__)
    gc.collect()
    assert [reference() for reference in (*held, cast(Faulty, BACKENDS["faulty"]).cache)] == [None, None]
    refused = kvcalc("measure", *LONG, "--dtype", "fp32", "--backend", "faulty")
    assert (refused.status, refused.out) == (1, "")
    assert "--backend faulty cannot run here" in refused.err


def test_a_kind_that_the_asked_backend_cannot_run_is_skipped(kvcalc: Any, faulty: Any) -> None:
    """The kinds before it are not lost."""

    def step(query: Tensor, key: Tensor, value: Tensor, scale: Any) -> Tensor:
        if key.shape[-1] != value.shape[-1]:
            raise RuntimeError("no latents")
        return eager_attention(query, key, value, scale=scale)

    faulty(step)
    asked = ("measure", *LONG, "--dtype", "fp32", "--backend", "faulty")
    found = kvcalc(*asked, "--attention", "all").json
    assert [run["attention"] for run in found["runs"]] == ["mha", "mqa", "gqa"]
    assert found["skipped"] == [{"attention": "mla", "reason": "--backend faulty cannot run here: no latents"}]
    assert kvcalc(*asked, "--attention", "mla").status == 1


def test_nan_is_not_right(kvcalc: Any, faulty: Any) -> None:
    faulty(lambda query, key, value, scale: eager_attention(query, key, value, scale=scale) * float("nan"))
    row = row_of(kvcalc("measure", *LONG, "--dtype", "fp32").json["runs"][0])
    assert row["reason"] == "differs from fp32 by nan of the output"
    assert row["relative_error"] is None


@pytest.mark.parametrize("kind", [TokenCache, GrowingCache, PagedCache])
@pytest.mark.parametrize("stored", [None, torch.int8])
@pytest.mark.parametrize("form", ["grouped", "latent", "expanded"])
def test_the_reference_is_attention_over_all_rows(
    monkeypatch: pytest.MonkeyPatch, kind: type[TokenCache], stored: torch.dtype | None, form: str
) -> None:
    """In parts of a few tokens, which do not divide the length."""
    monkeypatch.setattr(reference, "CHUNK_BYTES", 1 << 13)
    torch.manual_seed(0)
    layer: Any = GroupedAttention(32, 8, 2, 16)
    if form != "grouped":
        layer = MultiHeadLatentAttention(32, 8, 24, 12, 8, 10)
        layer.expands = form == "expanded"
    given: Any = (2, layer.cache_shapes(), 101, None, torch.float32, CPU, stored)
    cache = PagedCache(*given, block_size=16) if kind is PagedCache else kind(*given)
    with torch.inference_mode():
        cache.append(tuple(torch.randn(2, heads, 101, width) for heads, width in layer.cache_shapes()))
        query = torch.randn(layer.core_query_shape(2))
        for asked in (query, reference.aimed_query(layer, query, cache)):
            layer.core = Backend()
            expected = layer.attend(asked, cache)
            torch.testing.assert_close(reference.attend_in_fp32(layer, asked, cache), expected)


def test_each_head_aims_at_a_token_of_its_own() -> None:
    layer = GroupedAttention(32, 8, 2, 96)
    cache = TokenCache(1, layer.cache_shapes(), 1000, None, torch.float32, CPU)
    torch.manual_seed(0)
    cache.append(tuple(torch.randn(1, heads, 1000, width) for heads, width in layer.cache_shapes()))
    query = reference.aimed_query(layer, torch.randn(1, 8, 1, 96), cache)
    scores = query.view(1, 2, 4, 96) @ cache.views()[0].transpose(-1, -2) * 96**-0.5
    weights = scores.softmax(-1).view(8, 1000)
    assert weights.argmax(-1).tolist() == [0, 143, 285, 428, 571, 714, 856, 999]
    assert bool((weights.amax(-1) > 0.3).all())


def test_a_kernel_that_does_not_work_here_is_a_warning(kvcalc: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it, plain PyTorch's share of the roof would look like the machine's."""
    monkeypatch.setitem(BACKENDS, "native", type(BACKENDS["native"])())
    monkeypatch.setenv("CC", "no-such-compiler")
    found = json.loads(kvcalc("measure", *LONG).out)
    (note,) = (note for note in found["warnings"] if note["code"] == "kernel")
    assert "the native kernel was not used" in note["text"]
    assert "CC is no-such-compiler" in note["text"]
    # Nothing is said if it was not asked for.
    without = json.loads(kvcalc("measure", *LONG, "--backend", "grouped-matmul").out)
    assert not [note for note in without["warnings"] if note["code"] == "kernel"]


def test_only_a_backend_that_compiles_each_context_and_is_much_slower_is_left_out_at_others() -> None:
    def row(name: str, seconds: float | None) -> dict[str, Any]:
        return {"name": name, "seconds": seconds}

    for seconds, is_left_out in ((1.4, False), (1.6, True), (None, False)):
        slow = SlowBackends()
        slow.learn("a case", [row("native", 1.0), row("flex", seconds), row("grouped-sdpa", 9.0)])
        reason = slow.why_not("a case", BACKENDS["flex"])
        assert (reason is not None) == is_left_out
        assert reason is None or "took 1.6 times" in reason
        # Others compile once, and another case may be faster.
        assert slow.why_not("a case", BACKENDS["grouped-sdpa"]) is None
        assert slow.why_not("another case", BACKENDS["flex"]) is None
