"""Every backend compared with attention in fp32: dense, paged (shuffled blocks), growing and 8-bit caches, and MLA."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvcalc.attention.backends import BACKENDS, Case, native
from kvcalc.attention.cache import GrowingCache, PagedCache, TokenCache
from kvcalc.attention.core import eager_attention
from tests.rows import every_row

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
HERE = ("grouped-sdpa", "grouped-matmul", "native", "repeat-kv")
TOLERANCE = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}

# Heads, KV heads, key and value widths: MHA, GQA of several sizes, MQA, and widths that do not fill whole registers.
SHAPES = [(6, 6, 16, 16), (8, 2, 32, 32), (8, 1, 64, 64), (28, 4, 128, 128), (6, 2, 40, 24), (5, 1, 72, 80)]


@pytest.fixture(autouse=True)
def can_run(request: pytest.FixtureRequest) -> None:
    """The native kernel needs a C compiler."""
    name = request.node.callspec.params.get("name") if hasattr(request.node, "callspec") else None
    if name == "native":
        reason = BACKENDS["native"].why_not(Case(CPU, torch.float32, 1, 1, 16, 16))
        if reason:
            pytest.skip(reason)


def make(
    layout: str, shapes: tuple[tuple[int, int], ...], tokens: int, window: int | None, dtype: torch.dtype,
    stored: torch.dtype | None, block_size: int = 16,
) -> TokenCache:  # fmt: skip
    if layout == "paged":
        return PagedCache(2, shapes, tokens, window, dtype, CPU, stored, block_size=block_size, seed=3)
    kind = GrowingCache if layout == "growing" else TokenCache
    return kind(2, shapes, tokens, window, dtype, CPU, stored)


def fill(cache: TokenCache, shapes: tuple[tuple[int, int], ...], tokens: int) -> tuple[torch.Tensor, ...]:
    """Append rows of different magnitudes to the cache. Returns the original rows in fp32."""
    torch.manual_seed(0)
    rows = tuple(torch.randn(2, heads, tokens, width).to(cache.dtype) for heads, width in shapes)
    for a, b in ((0, tokens // 2), (tokens // 2, tokens - 1), (tokens - 1, tokens)):
        cache.append(tuple(row[:, :, a:b] for row in rows))
    return tuple(row[:, :, -cache.held :].float() for row in rows)


def reference(query: torch.Tensor, rows: tuple[torch.Tensor, ...], v_width: int | None, scale: float | None) -> Any:
    key, value = rows if v_width is None else (rows[0], rows[0][..., :v_width])
    return eager_attention(query.float(), key, value, scale=scale)


@pytest.mark.parametrize("name", HERE)
@every_row("shape", SHAPES)
@every_row("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("layout", ["dense", "paged", "growing"])
@every_row("tokens", [1, 33, 600])
def test_as_in_fp32(name: str, shape: tuple[int, ...], dtype: torch.dtype, layout: str, tokens: int) -> None:
    heads, kv_heads, k_width, v_width = shape
    shapes = ((kv_heads, k_width), (kv_heads, v_width))
    cache = make(layout, shapes, tokens, None, dtype, None)
    rows = fill(cache, shapes, tokens) if tokens > 2 else append_one(cache, shapes)
    query = torch.randn(2, heads, 1, k_width).to(dtype)
    out = BACKENDS[name].decode(query, cache)
    assert out.dtype == dtype
    torch.testing.assert_close(out.float(), reference(query, rows, None, None), atol=TOLERANCE[dtype], rtol=1e-2)


def append_one(cache: TokenCache, shapes: tuple[tuple[int, int], ...]) -> tuple[torch.Tensor, ...]:
    rows = tuple(torch.randn(2, heads, 1, width).to(cache.dtype) for heads, width in shapes)
    cache.append(rows)
    return tuple(row.float() for row in rows)


@pytest.mark.parametrize("name", HERE)
@pytest.mark.parametrize("layout", ["dense", "paged", "growing"])
@pytest.mark.parametrize("window", [7, 32, 50])
def test_a_window_that_has_turned(name: str, layout: str, window: int) -> None:
    shapes = ((2, 32), (2, 32))
    cache = make(layout, shapes, 90, window, torch.float32, None)
    rows = fill(cache, shapes, 90)
    query = torch.randn(2, 8, 1, 32)
    torch.testing.assert_close(
        BACKENDS[name].decode(query, cache), reference(query, rows, None, None), atol=2e-5, rtol=1e-4
    )


@pytest.mark.parametrize("name", HERE)
@pytest.mark.parametrize("layout", ["dense", "paged"])
@pytest.mark.parametrize("stored", [None, torch.int8, torch.float8_e4m3fn], ids=str)
def test_the_latent_is_one_stream_and_its_front_the_values(name: str, layout: str, stored: torch.dtype | None) -> None:
    shapes = ((1, 576),)
    cache = make(layout, shapes, 70, None, torch.float32, stored, block_size=64)
    fill(cache, shapes, 70)
    rows = tuple(view.float() for view in cache.views())
    query = torch.randn(2, 16, 1, 576)
    out = BACKENDS[name].decode(query, cache, scale=0.05, v_width=512)
    assert out.shape == (2, 16, 1, 512)
    torch.testing.assert_close(out, reference(query, rows, 512, 0.05), atol=5e-5, rtol=1e-3)


@pytest.mark.parametrize("name", HERE)
@pytest.mark.parametrize("layout", ["dense", "paged", "growing"])
@pytest.mark.parametrize("stored", [torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("block_size", [16, 32])
def test_eight_bits_are_read_as_the_cache_gives_them_back(
    name: str, layout: str, stored: torch.dtype, block_size: int
) -> None:
    shapes = ((2, 64), (2, 64))
    cache = make(layout, shapes, 300, None, torch.float32, stored, block_size)
    fill(cache, shapes, 300)
    assert cache.tensors[0].dtype == stored
    rows = tuple(view.float() for view in cache.views())
    query = torch.randn(2, 8, 1, 64)
    torch.testing.assert_close(
        BACKENDS[name].decode(query, cache), reference(query, rows, None, None), atol=3e-5, rtol=1e-3
    )


@pytest.mark.parametrize("name", HERE)
@pytest.mark.parametrize("layout", ["dense", "paged"])
@pytest.mark.parametrize("scaling", ["head", "tensor"])
@every_row("stored", [torch.int8, torch.float8_e4m3fn])
def test_a_scale_of_a_head_or_a_tensor_is_read_as_the_cache_gives_rows_back(
    name: str, layout: str, scaling: str, stored: torch.dtype
) -> None:
    for shapes, v_width, scales in ((((2, 64), (2, 64)), None, 4), (((1, 96),), 64, 1)):
        kept = (2, shapes, 300, 50, torch.float32, CPU, stored, scaling)
        cache = PagedCache(*kept, block_size=32) if layout == "paged" else TokenCache(*kept)
        rows = fill(cache, shapes, 300)
        count = {"head": scales, "tensor": len(shapes)}[scaling]
        assert sum(scale.untyped_storage().nbytes() for scale in cache.scales) == 4 * count
        views = tuple(view.float() for view in cache.in_order())
        for view, row in zip(views, rows):
            # The numbers are up to 5, and the scales map up to 12.
            assert float((view - row).abs().max()) <= (12 / 254 if stored == torch.int8 else 5 / 16)
        query = torch.randn(2, 8, 1, shapes[0][1])
        out = BACKENDS[name].decode(query, cache, 0.1, v_width)
        torch.testing.assert_close(out, reference(query, views, v_width, 0.1), atol=3e-5, rtol=1e-3)


@pytest.mark.parametrize(("stored", "bound"), [(torch.int8, 1 / 254), (torch.float8_e4m3fn, 1 / 16)], ids=str)
def test_what_quantizing_loses_is_bounded_by_the_largest_element_of_the_row(stored: torch.dtype, bound: float) -> None:
    """int8 rounds to 1/127 of the largest element, so the error is at most half of that. e4m3 has 3 mantissa bits."""
    cache = TokenCache(2, ((2, 64), (2, 64)), 40, None, torch.float32, CPU, stored)
    torch.manual_seed(1)
    rows = tuple(torch.randn(2, 2, 40, 64) * torch.logspace(-3, 3, 40)[:, None] for _ in range(2))
    cache.append(rows)
    for kept, row in zip(cache.views(), rows):
        most = row.abs().amax(dim=-1, keepdim=True)
        assert float(((kept - row).abs() / most).max()) <= bound * 1.001
        assert float(((kept - row).abs() / most).max()) > bound / 20


def test_rows_of_zeros_stay_zeros() -> None:
    for stored in (torch.int8, torch.float8_e4m3fn):
        cache = TokenCache(1, ((1, 16), (1, 16)), 4, None, torch.bfloat16, CPU, stored)
        cache.append((torch.zeros(1, 1, 4, 16), torch.zeros(1, 1, 4, 16)))
        assert torch.equal(cache.views()[0], torch.zeros(1, 1, 4, 16, dtype=torch.bfloat16))


@pytest.mark.parametrize("name", ["native"])
def test_many_parts_merge_to_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """For any split of a sequence over threads, and any position of the largest score."""
    monkeypatch.setattr(native, "_TOKENS_PER_PART", 32)
    cache = TokenCache(2, ((1, 32), (1, 32)), 500, None, torch.float32, CPU)
    rows = fill(cache, ((1, 32), (1, 32)), 500)
    query = torch.randn(2, 4, 1, 32) * 20
    torch.testing.assert_close(
        BACKENDS[name].decode(query, cache), reference(query, rows, None, None), atol=2e-5, rtol=1e-4
    )


@pytest.mark.parametrize("name", ["native"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("side", [0, 1], ids=["key", "value"])
@pytest.mark.parametrize("token", [50, 96])
def test_nan_in_the_cache_is_not_hidden(
    name: str, dtype: torch.dtype, side: int, token: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sequence is split into parts, and token 96 is the only token in the last part."""
    monkeypatch.setattr(native, "_TOKENS_PER_PART", 32)
    cache = TokenCache(1, ((1, 32), (1, 32)), 97, None, dtype, CPU)
    cache.append((torch.randn(1, 1, 97, 32, dtype=dtype), torch.randn(1, 1, 97, 32, dtype=dtype)))
    cache.tensors[side][0, 0, token, 3] = float("nan")
    for heads in (2, 64):
        assert bool(BACKENDS[name].decode(torch.randn(1, heads, 1, 32, dtype=dtype), cache).isnan().any())


@pytest.mark.parametrize("name", ["native"])
@pytest.mark.parametrize("tokens", [1, 32])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int8, torch.float8_e4m3fn], ids=str)
def test_every_bit_pattern_is_read_as_torch_reads_it(name: str, dtype: torch.dtype, tokens: int) -> None:
    """Zero keys give all tokens equal weights. If all other values are zero, the output is the first value's share.

    A single token is converted through a tile in fp32. A whole tile of 32 is converted directly.
    """
    if dtype.itemsize == 1:
        patterns = torch.arange(256).to(torch.uint8).view(dtype)
    else:
        patterns = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(dtype)
    value = torch.zeros(1, 1, tokens, patterns.numel(), dtype=dtype)
    value[0, 0, 0] = patterns
    out = BACKENDS[name](torch.zeros(1, 1, 1, 16), torch.zeros(1, 1, tokens, 16, dtype=dtype), value)
    torch.testing.assert_close(out[0, 0, 0], patterns.float() / tokens, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", ["native"])
def test_a_type_the_native_kernel_does_not_know_is_refused(name: str) -> None:
    case = Case(CPU, torch.float32, 8, 2, 64, 64)
    assert (
        BACKENDS[name].why_not(case._replace(stored_dtype=torch.float8_e5m2)) == "does not support float8_e5m2 caches"
    )
    assert BACKENDS[name].why_not(case._replace(dtype=torch.float64)) == "does not support float64 caches"


@pytest.mark.parametrize(
    ("capability", "hip", "runs"),
    [
        ((9, 0), None, True),
        ((10, 0), None, False),
        ((8, 0), None, False),
        ((9, 4), "7.0", False),
        ((9, 0), "7.0", False),
    ],
)
def test_gluon_only_runs_on_hopper(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], hip: str | None, runs: bool
) -> None:
    """An MI300X reports the capability 9.4."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    expected = None if runs else "needs a Hopper GPU (compute capability 9.0)"
    monkeypatch.setattr(BACKENDS["gluon"], "load", lambda: None)  # with or without Triton
    assert BACKENDS["gluon"].why_not(LATENT) == expected


HALF = Case(CUDA, torch.bfloat16, 8, 2, 128, 128)
LATENT = Case(CUDA, torch.bfloat16, 128, 1, 576, 512, is_latent=True)


@pytest.mark.parametrize(
    ("backend", "case", "reason"),
    [
        ("grouped-sdpa", HALF, "sdpa-flash"),
        ("sdpa-flash", HALF._replace(device=CPU), "only runs on CUDA"),
        ("sdpa-flash", HALF._replace(dtype=torch.float32), "16-bit dtype, not float32"),
        ("sdpa-flash", LATENT, "same width for K and V"),
        ("sdpa-flash", HALF._replace(k_width=100), "multiples of 8"),
        ("sdpa-cudnn", HALF._replace(dtype=torch.float32), "16-bit dtype, not float32"),
        ("sdpa-cudnn", LATENT, "at most 256, not 576"),
        ("sdpa-efficient", HALF._replace(dtype=torch.float32, k_width=6), "multiples of 4"),
        ("triton", HALF._replace(device=CPU), "only runs on CUDA"),
        ("triton", HALF._replace(dtype=torch.float32), "16-bit dtype, not float32"),
        ("triton", HALF._replace(stored_dtype=torch.float8_e5m2), "not support float8_e5m2 caches"),
        ("gluon", HALF, "only runs MLA"),
        ("gluon", LATENT._replace(k_width=288, v_width=256), "512 \\+ 64"),
        ("flex", LATENT, "part of the latent"),
        ("flex", HALF._replace(k_width=80), "powers of two"),
        ("flex", HALF._replace(layout="paged"), "dense cache"),
        ("native", HALF, "only runs on CPUs"),
    ],
)  # fmt: skip
def test_what_a_backend_cannot_run_it_says(backend: str, case: Case, reason: str) -> None:
    import re

    found = BACKENDS[backend].why_not(case)
    assert found is not None
    assert re.search(reason, found)


def test_triton_that_is_not_there_or_does_not_load(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delitem(sys.modules, "kvcalc.attention.backends.split_kv", raising=False)
    monkeypatch.setitem(sys.modules, "triton", None)
    assert BACKENDS["triton"].why_not(HALF) == "triton is not installed"
    monkeypatch.delitem(sys.modules, "triton")
    tmp_path.joinpath("triton.py").write_text("raise OSError('undefined symbol: at_tensor')")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert BACKENDS["triton"].why_not(HALF) == "triton does not load: undefined symbol: at_tensor"


def test_a_baseline_is_never_tried_unasked() -> None:
    case = Case(CPU, torch.float32, 8, 2, 64, 64)
    assert [name for name, b in BACKENDS.items() if b.why_not(case) is None and b.why_not_unasked(case)] == [
        "flex", "repeat-kv"
    ]  # fmt: skip


@pytest.mark.skipif(sys.platform != "linux", reason="compiles with the system's C++ compiler")
def test_flex_hides_what_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check the arguments of flex_attention without compiling: the full capacity, and a score that masks the rest."""
    kernel = type(BACKENDS["flex"])()

    def plain(query: Any, key: Any, value: Any, score_mod: Any, scale: Any, enable_gqa: bool) -> Any:
        assert key.shape[2] == 20
        assert enable_gqa
        hidden = torch.stack([score_mod(torch.zeros(()), 0, 0, 0, torch.tensor(n)) for n in range(20)]).isinf()
        return eager_attention(query, key, value, mask=hidden[None, None, None], scale=scale)

    kernel._compiled = plain  # type: ignore[attr-defined]
    cache = make("dense", ((2, 32), (2, 32)), 20, None, torch.float32, None)
    cache.append((torch.randn(2, 2, 13, 32), torch.randn(2, 2, 13, 32)))
    query = torch.randn(2, 8, 1, 32)
    torch.testing.assert_close(kernel.decode(query, cache), reference(query, cache.views(), None, None))


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="torch.compile may not support it yet")
def test_flex_refuses_what_torch_does_not_compile_on_a_gpu() -> None:
    """Before torch tries, because that takes ten seconds and prints 200 lines."""
    rows = torch.empty(1, device="meta").expand(2, 8, 2**20, 128).to("meta")
    query = SimpleNamespace(device=CUDA)
    with pytest.raises(RuntimeError, match="more than 2,147,483,647 elements"):
        BACKENDS["flex"].decode(query, SimpleNamespace(tensors=(rows, rows)))  # type: ignore[arg-type]


def test_flex_compiles_for_every_capacity_and_never_runs_unfused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unfused flex_attention warns, which is an error here. Without a compiler of kernels, torch compiles quickly."""
    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **options: compile_(function, backend="eager", **options))
    kernel = type(BACKENDS["flex"])()
    for capacity in range(20, 31):
        cache = make("dense", ((2, 32), (2, 32)), capacity, None, torch.float32, None)
        cache.append((torch.randn(2, 2, 13, 32), torch.randn(2, 2, 13, 32)))
        query = torch.randn(2, 8, 1, 32)
        torch.testing.assert_close(kernel.decode(query, cache), reference(query, cache.views(), None, None))
    # monkeypatch would delete the value when it restores it: torch's configs are no plain modules.
    settings: Any = torch._dynamo.config
    with settings.patch(disable=True), pytest.raises(RuntimeError, match="TORCH_COMPILE_DISABLE"):
        type(BACKENDS["flex"])().decode(query, cache)


def test_every_name_is_its_own() -> None:
    assert [*BACKENDS] == [b.name for b in BACKENDS.values()]
    assert SimpleNamespace(**{n.replace("-", "_"): 1 for n in BACKENDS}).repeat_kv == 1
