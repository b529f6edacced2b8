"""Every backend compared with attention in fp32: dense, paged (shuffled blocks), growing and 8-bit caches, and MLA."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from kvcalc.attention.backends import BACKENDS, Case, compiled, native
from kvcalc.attention.cache import GrowingCache, PagedCache, TokenCache
from kvcalc.attention.core import eager_attention

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
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", ["dense", "paged", "growing"])
@pytest.mark.parametrize("tokens", [1, 33, 600])
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
    assert bool(BACKENDS[name].decode(torch.randn(1, 2, 1, 32, dtype=dtype), cache).isnan().any())


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


# Fakes for kernels that need a GPU. They have the documented signatures and use the given layout.


def gathered(pool: torch.Tensor, table: torch.Tensor, length: int) -> torch.Tensor:
    """Gather (pages, tokens, heads, width) into (batch, heads, length, width)."""
    return pool[table.long()].flatten(1, 2)[:, :length].transpose(1, 2)


def fake_flash_attn() -> ModuleType:
    def flash_attn_with_kvcache(
        q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, *, cache_seqlens: torch.Tensor,
        block_table: torch.Tensor | None, softmax_scale: float | None, causal: bool,
    ) -> torch.Tensor:  # fmt: skip
        assert cache_seqlens.dtype == torch.int32
        assert k_cache.stride(-1) == 1
        assert not causal
        length = int(cache_seqlens[0])
        key, value = (
            t[:, :length].transpose(1, 2) if block_table is None else gathered(t, block_table, length)
            for t in (k_cache, v_cache)
        )
        return eager_attention(q.transpose(1, 2), key, value, scale=softmax_scale).transpose(1, 2)

    module = ModuleType("flash_attn")
    module.flash_attn_with_kvcache = flash_attn_with_kvcache  # type: ignore[attr-defined]
    return module


def fake_flashinfer() -> ModuleType:
    class Wrapper:
        def __init__(self, workspace: torch.Tensor, kv_layout: str, use_tensor_cores: bool) -> None:
            assert workspace.dtype == torch.uint8
            self.layout, self.plans = kv_layout, 0

        def plan(
            self, indptr: torch.Tensor, indices: torch.Tensor, last_page_len: torch.Tensor, num_qo_heads: int,
            num_kv_heads: int, head_dim: int, page_size: int, *, pos_encoding_mode: str, q_data_type: torch.dtype,
            kv_data_type: torch.dtype, sm_scale: float | None,
        ) -> None:  # fmt: skip
            assert {t.dtype for t in (indptr, indices, last_page_len)} == {torch.int32}
            assert pos_encoding_mode == "NONE"
            self.plans += 1
            self.table = indices.view(len(last_page_len), -1)
            assert indptr.tolist() == [n * self.table.shape[1] for n in range(len(last_page_len) + 1)]
            self.length = (self.table.shape[1] - 1) * page_size + int(last_page_len[0])
            self.scale = sm_scale

        def run(self, q: torch.Tensor, paged: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
            pools = (t.transpose(1, 2) if self.layout == "HND" else t for t in paged)
            key, value = (gathered(t, self.table, self.length) for t in pools)
            return eager_attention(q[:, :, None], key, value, scale=self.scale)[:, :, 0]

    module = ModuleType("flashinfer")
    module.BatchDecodeWithPagedKVCacheWrapper = Wrapper  # type: ignore[attr-defined]
    return module


def fake_flash_mla() -> ModuleType:
    def get_mla_metadata(cache_seqlens: torch.Tensor, num_heads_per_head_k: int, num_heads_k: int) -> Any:
        assert (num_heads_per_head_k, num_heads_k) == (16, 1)
        return "plan", "splits"

    def flash_mla_with_kvcache(
        q: torch.Tensor, k_cache: torch.Tensor, block_table: torch.Tensor, cache_seqlens: torch.Tensor,
        head_dim_v: int, tile_scheduler_metadata: Any, num_splits: Any, softmax_scale: float | None, causal: bool,
    ) -> Any:  # fmt: skip
        assert k_cache.shape[1:] == (64, 1, 576)
        assert (tile_scheduler_metadata, num_splits, causal) == ("plan", "splits", False)
        key = gathered(k_cache, block_table, int(cache_seqlens[0]))
        out = eager_attention(q.transpose(1, 2), key, key[..., :head_dim_v], scale=softmax_scale)
        return out.transpose(1, 2), None

    module = ModuleType("flash_mla")
    module.get_mla_metadata, module.flash_mla_with_kvcache = get_mla_metadata, flash_mla_with_kvcache  # type: ignore[attr-defined]
    return module


@pytest.mark.parametrize(
    ("backend", "fake", "block_size"), [("flash-attn", fake_flash_attn, 256), ("flashinfer", fake_flashinfer, 16)]
)
@pytest.mark.parametrize("layout", ["dense", "paged"])
def test_gpu_kernels_are_called_as_documented(
    monkeypatch: pytest.MonkeyPatch, backend: str, fake: Any, block_size: int, layout: str
) -> None:
    module = fake()
    monkeypatch.setitem(sys.modules, module.__name__, module)
    shapes = ((2, 64), (2, 64))
    cache = make(layout, shapes, 300, None, torch.float32, None, block_size)
    rows = fill(cache, shapes, 300)
    kernel = type(BACKENDS[backend])()
    for scale in (None, 0.2):
        query = torch.randn(2, 8, 1, 64)
        torch.testing.assert_close(
            kernel.decode(query, cache, scale=scale), reference(query, rows, None, scale), atol=2e-5, rtol=1e-4
        )


def test_flashinfer_plans_again_only_when_something_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", fake_flashinfer())
    cache = make("dense", ((2, 64), (2, 64)), 10, None, torch.float32, None)
    kernel = type(BACKENDS["flashinfer"])()
    for _ in range(4):
        append_one(cache, ((2, 64), (2, 64)))
        for _ in range(3):
            kernel.decode(torch.randn(2, 8, 1, 64), cache)
    assert kernel._wrappers["HND"].plans == 4  # type: ignore[attr-defined]


@pytest.mark.parametrize("layout", ["dense", "paged"])
@pytest.mark.parametrize("tokens", [128, 130])
def test_flashmla_gets_pages_of_64(monkeypatch: pytest.MonkeyPatch, layout: str, tokens: int) -> None:
    monkeypatch.setitem(sys.modules, "flash_mla", fake_flash_mla())
    cache = make(layout, ((1, 576),), tokens, None, torch.float32, None, block_size=64)
    rows = fill(cache, ((1, 576),), tokens)
    query = torch.randn(2, 16, 1, 576)
    out = BACKENDS["flashmla"].decode(query, cache, scale=0.05, v_width=512)
    torch.testing.assert_close(out, reference(query, rows, 512, 0.05), atol=2e-5, rtol=1e-4)


HALF = Case(CUDA, torch.bfloat16, 8, 2, 128, 128)
LATENT = Case(CUDA, torch.bfloat16, 128, 1, 576, 512, is_latent=True)


@pytest.mark.parametrize(
    ("backend", "case", "reason"),
    [
        ("flash-attn", HALF._replace(device=CPU), "only runs on CUDA"),
        ("flash-attn", HALF._replace(dtype=torch.float32), "16-bit dtype, not float32"),
        ("flash-attn", HALF._replace(stored_dtype=torch.int8), "not support int8 caches"),
        ("flash-attn", HALF._replace(layout="growing"), "preallocated"),
        ("flash-attn", HALF._replace(layout="paged", block_size=16), "multiple of 256"),
        ("flash-attn", HALF._replace(v_width=64), "same width"),
        ("flash-attn", HALF._replace(k_width=512, v_width=512), "at most 256"),
        ("flash-attn", LATENT, "same width"),
        ("flashinfer", HALF._replace(k_width=80, v_width=80), "not 80"),
        ("flashmla", HALF, "only runs MLA"),
        ("flashmla", LATENT._replace(k_width=288, v_width=256), "512 \\+ 64"),
        ("flashmla", LATENT._replace(layout="paged", block_size=16), "blocks of 64"),
        ("flex", LATENT, "part of the latent"),
        ("flex", HALF._replace(k_width=80), "powers of two"),
        ("flex", HALF._replace(layout="paged", block_size=16), "dense cache"),
        ("native", HALF, "only runs on CPUs"),
    ],
)  # fmt: skip
def test_what_a_backend_cannot_run_it_says(backend: str, case: Case, reason: str) -> None:
    import re

    found = BACKENDS[backend].why_not(case)
    assert found is not None
    assert re.search(reason, found)


@pytest.mark.parametrize(("backend", "module"), [("flash-attn", "flash_attn"), ("flashinfer", "flashinfer")])
def test_a_library_that_is_not_there_or_does_not_load(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, backend: str, module: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    assert "is not installed" in (BACKENDS[backend].why_not(HALF) or "")
    monkeypatch.delitem(sys.modules, module)
    tmp_path.joinpath(f"{module}.py").write_text("raise OSError('undefined symbol: at_tensor')")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "does not load: undefined symbol" in (BACKENDS[backend].why_not(HALF) or "")


def test_a_baseline_is_never_tried_unasked() -> None:
    case = Case(CPU, torch.float32, 8, 2, 64, 64)
    assert [name for name, b in BACKENDS.items() if b.why_not(case) is None and b.why_not_unasked(case)] == [
        "flex", "repeat-kv"
    ]  # fmt: skip


def test_without_a_compiler_the_native_kernel_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    case = Case(CPU, torch.float32, 8, 2, 64, 64)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert native.Native().why_not(case) == "no C compiler found (cc, gcc or clang)"
    monkeypatch.setenv("CC", "no-such-compiler")
    assert native.Native().why_not(case) == "no C compiler found: CC is no-such-compiler"


def test_a_compiler_that_fails_is_a_reason_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong-cc"
    wrong.write_text("#!/bin/sh\n[ \"$1\" = --version ] && exit 0\necho 'decode.c: error: too old' >&2\nexit 1\n")
    wrong.chmod(0o755)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CC", str(wrong))
    assert "too old" in (native.Native().why_not(Case(CPU, torch.float32, 8, 2, 64, 64)) or "")
    assert list((tmp_path / "cache" / "kvcalc").iterdir()) == []


def test_compiled_code_is_not_kept_where_others_write(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / "kvcalc"
    folder.mkdir()
    folder.chmod(0o777)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(OSError, match="other users can write"):
        compiled._folder()


@pytest.mark.parametrize("name", ["native"])
def test_it_is_compiled_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    native.load()
    monkeypatch.setattr(compiled, "_compile", lambda *a: pytest.fail("compiled again"))
    native.load()


class Compiler:
    """A compiler that refuses some flags, and compiles an empty file to be fast. `calls` has its arguments."""

    def __init__(self, folder: Path, refused: str, version: str = "one") -> None:
        self.log, script = folder / "calls", folder / "cc"
        (real,) = compiled._command()
        script.write_text(f"""#!/bin/sh
case "$*" in *--version*) echo {version}; exit 0 ;; esac
echo "$@" >> {self.log}
case "$*" in {refused}) echo "error: unrecognized argument" >&2; exit 1 ;; esac
case "$*" in *" -c "*) for out in "$@"; do :; done; exec {real} -fPIC -x c -c /dev/null -o $out ;; esac
exec {real} "$@"
""")
        script.chmod(0o755)

    def calls(self) -> list[str]:
        return self.log.read_text().splitlines()


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    def make(refused: str = "none", version: str = "one") -> Compiler:
        monkeypatch.delenv("CC", raising=False)
        made = Compiler(tmp_path, refused, version)
        monkeypatch.setenv("CC", str(tmp_path / "cc"))
        return made

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return make


@pytest.mark.parametrize("name", ["native"])
@pytest.mark.parametrize(
    ("refused", "attempts", "kept"),
    [
        ("none", 1, {"-march=native", "-mprefer-vector-width=512", "-fopenmp"}),
        ("*-mprefer*", 2, {"-march=native", "-fopenmp"}),
        ("*-fopenmp*-c*", 3, {"-march=native"}),
        ("*-march=native*", 4, {"-fopenmp"}),
        ("*-march=native*|*-fopenmp*-c*", 5, set()),
    ],
)
def test_a_flag_the_compiler_refuses_is_left_out(
    name: str, compiler: Any, refused: str, attempts: int, kept: set[str]
) -> None:
    made = compiler(refused)
    compiled.built()
    calls = [call.split() for call in made.calls() if " -c " in call]
    assert len(calls) == attempts
    assert {"-march=native", "-mprefer-vector-width=512", "-fopenmp"} & {*calls[-1]} == kept


@pytest.mark.parametrize("name", ["native"])
def test_what_changes_the_code_makes_another_library(
    name: str, compiler: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    source = tmp_path / "decode.c"
    source.write_text(compiled.SOURCE.read_text())
    monkeypatch.setattr(compiled, "SOURCE", source)
    monkeypatch.setattr(compiled, "_compile", lambda command, made: made.write_text(""))
    monkeypatch.setattr(compiled, "_link", lambda command, made, library: library.write_text(""))
    compiler()
    libraries = {compiled.built()}
    assert libraries == {compiled.built()}
    for change in (
        lambda: source.write_text("int x;"),
        lambda: compiler(version="two"),
        lambda: monkeypatch.setattr(compiled, "_FLAGS", ("-O2",)),
        lambda: monkeypatch.setattr(compiled, "_EXTRA_FLAGS", ((),)),
        lambda: monkeypatch.setattr(platform, "machine", lambda: "another"),
        lambda: monkeypatch.setattr(compiled, "_processor", lambda: "another"),
        lambda: monkeypatch.setenv("CC", f"{tmp_path / 'cc'} -g"),
    ):
        before = len(libraries)
        change()
        libraries.add(compiled.built())
        assert len(libraries) == before + 1


def test_a_compiler_that_hangs_is_started_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    slow = tmp_path / "cc"
    slow.write_text(f"#!/bin/sh\n[ $1 = --version ] && exit 0\necho again >> {tmp_path / 'calls'}\nexec sleep 60\n")
    slow.chmod(0o755)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CC", str(slow))
    monkeypatch.setattr(compiled, "_TIMEOUT_SECONDS", 0.5)
    for _ in range(3):
        reason = native.Native().why_not(Case(CPU, torch.float32, 8, 2, 64, 64))
        assert reason == f"{slow} did not finish within 0.5 seconds"
        assert (tmp_path / "calls").read_text() == "again\n"


@pytest.mark.parametrize("damage", ["truncated", "changed", "empty", "no checksum", "odd checksum"])
@pytest.mark.parametrize("name", ["native"])
def test_a_damaged_library_is_compiled_again(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, damage: str
) -> None:
    """Loading a truncated library, as a power cut leaves it, would end the process with SIGBUS."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    made: list[str] = []

    def link(compiler: Any, made_from: Path, library: Path) -> None:
        made.append("once")
        library.write_bytes(b"library" * 1000)

    monkeypatch.setattr(compiled, "_compile", lambda command, made: made.write_text(""))
    monkeypatch.setattr(compiled, "_link", link)
    library = compiled.built()
    whole, checksum = library.read_bytes(), Path(f"{library}.sha256")
    assert (compiled.built(), len(made)) == (library, 1)
    if damage == "no checksum":
        checksum.unlink()
    elif damage == "odd checksum":
        checksum.write_bytes(b"\xff\xfe")
    else:
        library.write_bytes({"truncated": whole[:4096], "changed": b"X" + whole[1:], "empty": b""}[damage])
    assert (compiled.built(), len(made)) == (library, 2)
    assert library.read_bytes() == whole
    assert sorted(path.name for path in library.parent.iterdir()) == [library.name, checksum.name]


@pytest.mark.parametrize("value", ['gcc "', "gcc '-O3", "gcc \\"])
def test_a_variable_cc_with_a_broken_quote_is_a_reason(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("CC", value)
    reason = native.Native().why_not(Case(CPU, torch.float32, 8, 2, 64, 64))
    assert (reason or "").startswith("CC is not a command: No ")


@pytest.mark.parametrize("status", [0, 1])
def test_a_compiler_may_print_in_any_encoding(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, status: int) -> None:
    script = tmp_path / "cc"
    script.write_text(f"#!/bin/sh\nprintf '\\377\\376 error: \\344' | tee /dev/stderr\nexit {status}\n")
    script.chmod(0o755)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CC", str(script))
    assert native.Native().why_not(Case(CPU, torch.float32, 8, 2, 64, 64)) is not None


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="owners of files")
def test_other_owners_on_the_way_to_the_cache_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    (shared / "mine").mkdir(parents=True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(shared / "mine"))
    assert compiled._folder() == shared / "mine" / "kvcalc"
    shared.chmod(0o777)
    with pytest.raises(OSError, match=f"other users can write to {shared}, so compiled code is not stored"):
        compiled._folder()
    shared.chmod(0o1777)  # like /tmp: others cannot replace what is not theirs
    compiled._folder()
    shared.chmod(0o755)
    (tmp_path / "link").symlink_to(shared / "mine")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "link"))
    compiled._folder()
    if os.getuid() == 0:
        os.chown(shared, 12345, 12345)
        with pytest.raises(OSError, match="other users can write"):
            compiled._folder()


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


def test_every_name_is_its_own() -> None:
    assert [*BACKENDS] == [b.name for b in BACKENDS.values()]
    assert SimpleNamespace(**{n.replace("-", "_"): 1 for n in BACKENDS}).repeat_kv == 1
