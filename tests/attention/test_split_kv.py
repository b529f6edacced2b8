"""kvcalc's Triton kernel without a GPU: interpreted against fp32, and compiled for devices."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import at_night

pytestmark = pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="triton is not installed")

TOLERANCE = {"float16": 1e-3, "bfloat16": 6e-3}

# Query heads, KV heads, and the widths of K and V: MHA, GQA, MQA with more heads than a tile, widths that are not
# powers of 2, and V of another width.
SHAPES = [(4, 4, 64, 64), (8, 2, 128, 128), (12, 2, 80, 80), (71, 1, 64, 64), (6, 2, 24, 40), (4, 2, 192, 128)]
LATENTS = [(16, 1, 576, 512), (40, 1, 40, 32)]
# Architecture and number of processors. On 80, e4m3 is converted from its bits.
HOPPER, AMPERE, ROCM = (90, 132), (80, 108), (0, 120)


Cases = list[dict[str, Any]]


@pytest.fixture(scope="module")
def interpreted() -> Iterator[Callable[[Cases], list[float]]]:
    """`interpreted(cases)`: their results in Triton's interpreter. One process for all tests: it has to load torch."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.attention.interpreted"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip

    def ask(cases: Cases) -> list[float]:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(cases) + "\n")
        process.stdin.flush()
        results: list[float] = json.loads(process.stdout.readline())
        assert len(results) == len(cases)
        return results

    with process:
        yield ask


@pytest.fixture(scope="module")
def check(interpreted: Callable[[Cases], list[float]]) -> Callable[[Cases], None]:
    """`check(cases)`: the results are near to attention in fp32."""

    def assert_near(cases: Cases) -> None:
        wrong = [
            (case, error) for case, error in zip(cases, interpreted(cases)) if not error <= TOLERANCE[case["dtype"]]
        ]
        assert not wrong

    return assert_near


@pytest.mark.parametrize("layout", ["dense", "paged", "growing"])
def test_interpreted_as_in_fp32(check: Any, layout: str) -> None:
    dtypes = ["float16", "bfloat16"] * 3
    kept = {"tokens": 70, "layout": layout, "device": HOPPER}
    shapes = SHAPES[::2] if layout == "growing" else SHAPES  # it differs from a dense cache in its strides alone
    check([{"heads": heads, "dtype": dtype, **kept} for heads, dtype in zip(shapes, dtypes)])


@pytest.mark.parametrize("layout", ["dense", "paged"])
@pytest.mark.parametrize("stored", ["int8", "float8_e4m3fn"])
def test_interpreted_in_8_bits(check: Any, layout: str, stored: str) -> None:
    """Rows and queries may be large or small: 8-bit numbers and scales are multiplied in fp16."""
    kept = {"layout": layout, "stored": stored, "tokens": 70}
    sizes = [("bfloat16", 1e-4, HOPPER), ("bfloat16", 1e3, AMPERE), ("float16", 1.0, HOPPER), ("float16", 1.0, AMPERE)]
    shapes = [(8, 2, 128, 128), (6, 2, 24, 40), (12, 2, 80, 80), (4, 2, 64, 64)]
    check([{"heads": h, "dtype": d, "size": size, "device": on, **kept} for h, (d, size, on) in zip(shapes, sizes)])


@pytest.mark.parametrize("layout", ["dense", "paged"])
def test_interpreted_in_8_bits_with_scales_of_heads_or_tensors(check: Any, interpreted: Any, layout: str) -> None:
    kept = {"heads": (8, 2, 64, 40), "dtype": "bfloat16", "layout": layout, "tokens": 70, "device": HOPPER}
    latent = {**kept, "heads": LATENTS[1], "latent": True, "scaling": "tensor"}
    check([
        {**kept, "stored": "int8", "scaling": "head"}, {**kept, "stored": "float8_e4m3fn", "scaling": "head"},
        {**kept, "stored": "int8", "scaling": "tensor", "lengths": [3, 70], "device": AMPERE},
        {**latent, "stored": "float8_e4m3fn"},
    ])  # fmt: skip
    steps = {"dtype": "bfloat16", "layout": layout, "block_size": 4, "tokens": 20, "stored": "int8"}
    cases = [
        {**steps, "rope_dim": 16, "scaling": "head"},
        {**steps, "rope_dim": 16, "latent": True, "scaling": "tensor"},
    ]
    assert interpreted(cases) == [1.0] * len(cases)


@pytest.mark.parametrize("layout", ["dense", "paged"])
def test_an_interpreted_latent_is_keys_and_its_front_values(check: Any, layout: str) -> None:
    kept = {"layout": layout, "latent": True, "device": HOPPER, "block_size": 64}
    dtypes = [("bfloat16", None), ("float16", "int8"), ("bfloat16", "float8_e4m3fn")]
    check([{"heads": h, "tokens": 67, "dtype": d, "stored": s, **kept} for h in LATENTS for d, s in dtypes])


def test_interpreted_lengths_and_windows(check: Any) -> None:
    """One token, a tile and one more or less, more parts than are merged at a time, and rings that have turned."""
    kept = {"heads": (4, 2, 32, 32), "dtype": "float16", "device": HOPPER}
    lengths = [{"tokens": n, "layout": "dense", **kept} for n in (1, 63, 64, 65, 700)]
    lengths.append(
        {**kept, "heads": (2, 1, 32, 32), "tokens": 1300, "layout": "dense", "stored": "int8", "device": ROCM}
    )
    check([*lengths, *({"tokens": 90, "window": 37, "layout": layout, **kept} for layout in ("dense", "paged"))])


@pytest.mark.parametrize("layout", ["dense", "paged"])
def test_interpreted_sequences_of_different_lengths(check: Any, interpreted: Any, layout: str) -> None:
    """Sequences of one token, of many parts and in between, windows that have turned for some of them, and a step."""
    lengths = [1, 700, 65, 64, 300]
    kept = {"lengths": lengths, "dtype": "float16", "layout": layout}
    grouped = {**kept, "heads": (4, 2, 32, 32)}
    latent = {**kept, "heads": LATENTS[1], "latent": True}
    check([
        {**grouped, "device": HOPPER}, {**grouped, "device": AMPERE, "stored": "int8"},
        {**grouped, "device": HOPPER, "window": 100}, {**latent, "device": HOPPER},
        {**latent, "device": AMPERE, "stored": "float8_e4m3fn"}, {**grouped, "device": ROCM, "lengths": [33, 33]},
    ])  # fmt: skip
    steps = {"dtype": "bfloat16", "layout": layout, "block_size": 4, "lengths": [9, 20, 14], "rope_dim": 16}
    cases = [steps, {**steps, "stored": "int8", "window": 6}, {**steps, "latent": True}]
    assert interpreted(cases) == [1.0] * len(cases)


def test_nan_in_the_cache_is_not_hidden(interpreted: Any) -> None:
    nan = {"heads": (4, 2, 32, 32), "tokens": 30, "layout": "dense", "dtype": "float16", "size": float("inf")}
    errors = interpreted([{**nan, "stored": stored, "device": AMPERE} for stored in (None, "int8", "float8_e4m3fn")])
    assert all(error != error for error in errors)


@pytest.mark.parametrize("layout", ["dense", "paged"])
def test_the_interpreted_step_gives_the_bits_of_the_operations(interpreted: Any, layout: str) -> None:
    """Rotations of a part, of all, or of none of a head, windows, and every type of cache."""
    kinds = [("float16", None), ("bfloat16", "int8"), ("bfloat16", "float8_e4m3fn"), ("bfloat16", None)]
    latent = {"rope_dim": 16, "latent": True}
    shapes = [(None, {"rope_dim": 16}), (5, {"rope_dim": 24}), (None, {"rope_dim": 0}), (5, latent)]
    kept = {"layout": layout, "block_size": 4, "tokens": 20}
    cases = [
        {"dtype": dtype, "stored": stored, "window": window, **kept, **shape}
        for first, (dtype, stored) in enumerate(kinds)
        for second, (window, shape) in enumerate(shapes)
        if (first + second) % 2 == (layout == "paged")  # each type with each shape once, and with each layout
    ]
    assert interpreted(cases) == [1.0] * len(cases)


def test_a_kernel_that_does_not_run_here_is_replaced_by_the_operations() -> None:
    """Triton has no driver for a CPU. The same holds for a GPU without a C compiler, which Triton needs."""
    from kvcalc.attention import step

    assert step._kernel(torch.device("cpu")) is None


@pytest.mark.parametrize(
    ("blocks", "tiles", "at_once", "expected"),
    [(8, 128, 264, 32), (32, 128, 264, 8), (128, 128, 264, 2), (512, 128, 264, 1), (8, 5, 264, 5), (2, 128, 132, 64),
     (8, 66, 264, 33)],
)  # fmt: skip
def test_the_number_of_parts(blocks: int, tiles: int, at_once: int, expected: int) -> None:
    from kvcalc.attention.backends import split_kv

    assert split_kv.parts(blocks, tiles, at_once) == expected


def test_the_parts_of_different_lengths_fill_the_device() -> None:
    """They are shared as evenly as one sequence's, and a short sequence is not cut into many."""
    from kvcalc.attention.backends import split_kv

    for tiles in ((16, 128, 512), (1, 1, 1, 2000), (64,) * 40, tuple(range(1, 200))):
        counts = split_kv.ragged_parts(8, tiles, 264)
        largest = max(-(-each // count) for each, count in zip(tiles, counts))
        assert all(1 <= count <= each for each, count in zip(tiles, counts))
        # Places that take the largest part last, after an even share of all tiles.
        assert largest <= max(2, sum(tiles) * 8 / 264)
        assert 8 * sum(counts) >= 0.95 * 264 or counts == tiles


# The architecture and the processors of an A100, an H100 PCIe, an H200, and a B200.
DEVICES = [(80, 108), (90, 114), (90, 132), (100, 148)]
# Query heads for each KV head, KV heads, elements of a row, and whether it is MLA: 8B, 70B, 7B, MQA and DeepSeek.
LAYERS = [(4, 8, 256, False), (8, 8, 256, False), (1, 32, 256, False), (71, 1, 128, False), (128, 1, 576, True)]


@pytest.mark.parametrize(("architecture", "processors"), DEVICES)
@pytest.mark.parametrize("batch", [1, 3, 16])
@pytest.mark.parametrize(("each", "kv_heads", "row_width", "is_latent"), LAYERS)
def test_every_processor_has_work(
    architecture: int, processors: int, batch: int, each: int, kv_heads: int, row_width: int, is_latent: bool
) -> None:
    """From 4k tokens on, 95 % of the places for thread blocks have tiles, and no part is empty.

    If there are fewer tiles than places, each tile is a part. Then 95 % of the processors have work, but for an MQA
    model on a B200.
    """
    from kvcalc.attention.backends import split_kv

    sizes = split_kv.tile(architecture, each, row_width, is_latent, False, False)
    blocks, at_once = batch * kv_heads * -(-each // sizes.heads), processors * sizes.per_processor
    for tokens in (*range(4096, 12_000, 531), 16_384, 32_768, 100_000):
        tiles = -(-tokens // sizes.tokens)
        splits = split_kv.parts(blocks, tiles, at_once)
        shares = [(split + 1) * tiles // splits - split * tiles // splits for split in range(splits)]
        assert sum(shares) == tiles
        assert min(shares) >= 1
        rounds = -(-blocks * splits // at_once)
        assert blocks * splits >= 0.95 * rounds * at_once or splits == tiles, tokens
        assert blocks * splits >= 0.95 * processors or (each, processors, tiles) == (71, 148, 64)
        # The largest part takes at most one tile more than the mean.
        assert max(shares) * splits < tiles + splits


TARGETS = {"sm80": 80, "sm90": 90, "sm100": 100, "gfx942": 0, "sm89": 89, "sm120": 120, "gfx950": 0}
# KiB of shared memory that a thread block may use.
SHARED = {"sm80": 163, "sm90": 227, "sm100": 227, "gfx942": 64, "sm89": 99, "sm120": 99, "gfx950": 160}
COMPILED = {
    "gqa": (8, 128, 128, False), "mha": (1, 128, 128, False), "mqa": (71, 64, 64, False), "wide": (2, 256, 256, False),
    "uneven": (16, 192, 128, False), "mla": (128, 576, 512, True),
}  # fmt: skip
# Shape, type of the cache, and tokens of a page.
CASES = [
    ("gqa", "bf16", 0),
    ("gqa", "bf16", 16),
    ("gqa", "int8", 0),
    ("gqa", "fp8", 64),
    ("mla", "bf16", 0),
    ("mla", "fp8", 64),
]
# The cases that a target has during the day: each type of cache, MLA and pages. The others have the same tiles.
AT_DAY = {"sm80": (1, 2, 5), "sm100": (1, 2, 5), "gfx942": (0, 3, 5), "sm89": (3, 4), "sm120": (3, 4), "gfx950": (3, 4)}


def compiled(
    target: str, shape: str, stored: str, page: int, ragged: int = 0, is_fixed: bool = False
) -> tuple[Any, str]:
    """The kernel as `split_kv.decode` would call it, compiled for `target`, and what the compiler printed."""
    from triton.compiler import ASTSource

    from kvcalc.attention.backends import split_kv

    each, k_width, v_width, is_latent = COMPILED[shape]
    architecture = TARGETS[target]
    is_scaled = stored != "bf16"
    pointer = {"bf16": "*bf16", "int8": "*i8", "fp8": "*fp8e4nv" if architecture >= 89 else "*u8"}[stored]
    row_width = k_width if is_latent else k_width + v_width
    tile = split_kv.tile(architecture, each, row_width, is_latent, bool(page), is_scaled)
    constants = {
        **split_kv.widths(each, k_width, v_width, is_latent), "PAGE": page, "IS_SCALED": is_scaled,
        "IS_FIXED": is_fixed, "RAGGED": ragged,
        "HEADS": tile.heads, "TOKENS": tile.tokens,
    }  # fmt: skip
    pointers = {"query": "*bf16", "key": pointer, "value": pointer, "table": "*i32", "batch": "*i32", "scale": "fp32"}
    pointers |= dict.fromkeys(("key_scale", "value_scale", "log_sum"), "*fp32") | {"part": "*bf16"}
    names = split_kv.attend.arg_names
    signature = {name: pointers.get(name, "constexpr" if name in constants else "i32") for name in names}
    # As Triton finds out at a call: torch's memory, and the strides of whole rows, are multiples of 16.
    unknown = ("scale", "tokens", "tiles", "table_b", "ks_b", "ks_g", "ks_s", "vs_b", "vs_g", "vs_s", *constants)
    aligned = {(at,): [["tt.divisibility", 16]] for at, name in enumerate(names) if name not in unknown}
    source = ASTSource(split_kv.attend, signature, constants, aligned)
    return compile_for(target, source, num_warps=tile.warps, num_stages=tile.stages)


def compile_for(target: str, source: Any, **options: Any) -> tuple[Any, str]:
    """The kernel, and what ptxas says of it."""
    import triton

    with pytest.MonkeyPatch.context() as patch, redirect_stdout(io.StringIO()) as printed:
        patch.setenv("TRITON_DUMP_PTXAS_LOG", "1")
        kernel = triton.compile(source, target=gpu(target), options=options)
    return kernel, printed.getvalue()


def gpu(target: str) -> Any:
    from triton.backends.compiler import GPUTarget

    architecture = TARGETS[target]
    return GPUTarget("cuda", architecture, 32) if architecture else GPUTarget("hip", target, 64)


def spilled_bytes(kernel: Any, said: str) -> int:
    """Bytes of registers that ptxas says it keeps in memory, or the number of registers that LLVM does for ROCm."""
    if "ptx" not in kernel.asm:
        counts = re.findall(r"\.[vs]gpr_spill_count: +(\d+)", kernel.asm["amdgcn"])
        assert len(counts) == 2
        return sum(map(int, counts))
    ((stores, loads),) = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", said)
    return int(stores) + int(loads)


@pytest.mark.parametrize(
    ("target", "shape", "stored", "page"),
    [
        (target, *case) if place in AT_DAY.get(target, range(6)) else at_night(target, *case)
        for target in TARGETS
        for place, case in enumerate(CASES)
    ],
)
def test_it_compiles_without_spills_and_fits_shared_memory(
    target: str, shape: str, stored: str, page: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel, said = compiled(target, shape, stored, page)
    assert kernel.metadata.shared <= SHARED[target] << 10
    # Stores and loads of the tile that is faster on an H200 although it spills. The others have none.
    most_spilled = 640 if (target, shape, stored) == ("sm90", "mla", "fp8") else 0
    assert spilled_bytes(kernel, said) <= most_spilled


@pytest.mark.parametrize(("target", "shape", "page"), [("sm90", "gqa", 0), ("gfx942", "mla", 16), ("sm100", "gqa", 16)])
def test_different_lengths_spill_nothing(
    target: str, shape: str, page: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel, said = compiled(target, shape, "bf16", page, ragged=5)
    assert kernel.metadata.shared <= SHARED[target] << 10
    assert spilled_bytes(kernel, said) == 0


@pytest.mark.parametrize(
    ("target", "shape", "stored"),
    [
        (target, *case) if (target, *case) in (("sm80", "gqa", "fp8"), ("sm100", "mla", "int8")) else
        at_night(target, *case)
        for target in TARGETS for case in (("gqa", "fp8"), ("mla", "int8"))
    ],
)  # fmt: skip
def test_scales_of_heads_or_tensors_spill_nothing(
    target: str, shape: str, stored: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel, said = compiled(target, shape, stored, 0, is_fixed=True)
    assert kernel.metadata.shared <= SHARED[target] << 10
    # That tile is faster on an H200 although it spills.
    assert spilled_bytes(kernel, said) <= (640 if (target, shape) == ("sm90", "mla") else 0)


@pytest.mark.parametrize("stored", ["int8", "fp8"])
def test_a_scale_for_each_tensor_is_loaded_once_and_costs_no_instructions_in_the_loop(
    stored: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    found = {}
    for is_fixed in (False, True):
        kernel, said = compiled("sm90", "gqa", stored, 0, is_fixed=is_fixed)
        assert spilled_bytes(kernel, said) == 0
        found[is_fixed] = loop_of(kernel.asm["ptx"])
    by_row, fixed = (
        {name: sum(f"{name}." in line or f"{name};" in line for line in found[is_fixed])
         for name in ("cp.async.commit_group", "ex2")}
        for is_fixed in (False, True)
    )  # fmt: skip
    # Only K and V are loaded, and there is one exponential for each score, not two.
    assert (by_row["cp.async.commit_group"], fixed["cp.async.commit_group"]) == (4, 2)
    assert fixed["ex2"] < 0.6 * by_row["ex2"]
    assert len(found[True]) < 0.85 * len(found[False])


def loop_of(ptx: str) -> list[str]:
    """The instructions of the longest loop: between a label and a jump back to it."""
    lines = [line.strip() for line in ptx.splitlines()]
    labels = {found[1]: at for at, line in enumerate(lines) if (found := re.match(r"(\$\w+):", line))}
    loops = []
    for at, line in enumerate(lines):
        jump = re.search(r"bra(?:\.uni)?\s+(\$\w+);", line)
        if jump and labels.get(jump[1], at) < at:
            loops.append(lines[labels[jump[1]] : at])
    body = max(loops, key=len)
    return [line for line in body if line.endswith(";") and not line.startswith(("//", "."))]


@pytest.mark.parametrize("target", ["sm90", "gfx942", at_night("sm80"), at_night("sm100")])
def test_the_small_kernels_compile(target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Merging parts, and the step before attention with an int8 cache in pages."""
    from triton.compiler import ASTSource

    from kvcalc.attention import fused_step
    from kvcalc.attention.backends import split_kv

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    floats = dict.fromkeys(("log_sum", "key_scales", "value_scales"), "*fp32")
    pointers = floats | dict.fromkeys(("query", "part", "out", "key", "front", "value", "cos", "sin"), "*bf16")
    pointers |= {"keys": "*i8", "values": "*i8"}
    pointers |= dict.fromkeys(("table", "batch", "starts", "behind", "capacities"), "*i32")
    widths = {"HEADS": 64, "GROUPS": 8, "HALF": 64, "Q": 128, "K": 128, "FRONT": 0, "V": 128, "WIDTH": 128}
    most_parts = split_kv.merged_at_once(1000, TARGETS[target])
    for kernel, constants in (
        (split_kv.merge, {"V_WIDTH": 128, "ELEMENTS": 128, "PARTS": most_parts, "EACH": 0}),
        (split_kv.merge, {"V_WIDTH": 128, "ELEMENTS": 128, "PARTS": most_parts, "EACH": 64}),
        (fused_step.step, {**widths, "PAGE": 16, "MOST": 127, "IS_FIXED": True, "RAGGED": True}),
        (
            fused_step.step,
            {
                **widths,
                "FRONT": 512,
                "K": 64,
                "WIDTH": 1024,
                "PAGE": 0,
                "MOST": 127,
                "IS_FIXED": False,
                "RAGGED": False,
            },
        ),
    ):
        names = kernel.arg_names
        signature = {name: pointers.get(name, "constexpr" if name in constants else "i32") for name in names}
        assert spilled_bytes(*compile_for(target, ASTSource(kernel, signature, constants))) == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("layout", ["dense", "paged"])
@pytest.mark.parametrize("stored", [None, torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("shape", [*SHAPES, *LATENTS], ids=str)
@pytest.mark.parametrize("tokens", [1, 65, 5000])
def test_on_a_gpu_as_in_fp32(layout: str, stored: torch.dtype | None, shape: tuple[int, ...], tokens: int) -> None:
    check_on_a_gpu("triton", layout, stored, shape, tokens)


def check_on_a_gpu(backend: str, layout: str, stored: torch.dtype | None, shape: tuple[int, ...], tokens: int) -> None:
    from kvcalc.attention.backends import BACKENDS
    from kvcalc.attention.cache import PagedCache, TokenCache
    from kvcalc.attention.core import eager_attention

    heads, kv_heads, k_width, v_width = shape
    is_latent, gpu = v_width < k_width and kv_heads == 1, torch.device("cuda", 0)
    shapes = ((1, k_width),) if is_latent else ((kv_heads, k_width), (kv_heads, v_width))
    made = (2, shapes, tokens, None, torch.bfloat16, gpu, stored)
    cache = PagedCache(*made, block_size=64, seed=3) if layout == "paged" else TokenCache(*made)
    torch.manual_seed(0)
    cache.append(tuple(torch.randn(2, h, tokens, w, dtype=torch.bfloat16, device=gpu) for h, w in shapes))
    query = torch.randn(2, heads, 1, k_width, dtype=torch.bfloat16, device=gpu)
    out = BACKENDS[backend].decode(query, cache, 0.1, v_width if is_latent else None)
    cache.dtype = torch.float32
    rows = cache.views()
    key, value = (rows[0], rows[0][..., :v_width]) if is_latent else rows
    expected = eager_attention(query.float(), key.float(), value.float(), scale=0.1)
    assert float((out.float() - expected).norm() / expected.norm()) < TOLERANCE["bfloat16"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_gpu_a_step_is_fused() -> None:
    from kvcalc.attention import step

    assert step._kernel(torch.device("cuda", 0)) is not None
