"""Every decode kernel that can run on this GPU, at the heads of real models: right, and how near to the read rate."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvcalc.attention.backends import BACKENDS
from kvcalc.attention.cache import PagedCache, TokenCache, held_bytes
from kvcalc.attention.ragged import RaggedCache
from kvcalc.measure.choose import TOLERANCES, case_of
from kvcalc.measure.devices.faults import first_line
from kvcalc.measure.devices.timing import Effort, flusher, summarize, time_calls
from kvcalc.measure.layers.build import AttentionLayer, build_layer
from kvcalc.measure.reference import aimed_query, attend_in_fp32, relative_error
from kvcalc.model.mixers.attention import AttentionShape
from tests.simulated_cuda import is_simulated

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    # torch's compiler warns of its own calls, which must not make flex_attention fail.
    pytest.mark.filterwarnings("default"),
]

# Of llama-3-70b, llama-7b and deepseek-v3.
SHAPES = {
    "GQA": AttentionShape(64, 8, 128, 128, hidden_size=64),
    "MHA": AttentionShape(32, 32, 128, 128, hidden_size=64),
    "MLA": AttentionShape(128, 128, 192, 128, hidden_size=64, kv_lora_rank=512, qk_rope_head_dim=64),
}
CUDA = torch.device("cuda")


def filled(
    layer: AttentionLayer, tokens: int, stored: torch.dtype | None, block_size: int | None, scaling: str, sizes: int
) -> TokenCache:
    """The cache of two sequences of `tokens` tokens, or if `sizes` is 3, of one and of shorter ones."""
    given: Any = (layer.cache_shapes(), None, torch.bfloat16, CUDA, stored, scaling)
    if sizes > 1:
        lengths = (tokens, tokens // 8 * 8, tokens // 16)
        cache: TokenCache = RaggedCache(lengths, *given, block_size=block_size)
    else:
        given = (2, layer.cache_shapes(), tokens, *given[1:])
        cache = TokenCache(*given) if block_size is None else PagedCache(*given, block_size=block_size)
    shapes = [(cache.batch_size, heads, tokens, width) for heads, width in layer.cache_shapes()]
    cache.append(tuple(torch.randn(shape, dtype=torch.bfloat16, device=CUDA) for shape in shapes))
    return cache


FP8 = torch.float8_e4m3fn


@pytest.mark.parametrize(
    ("stored", "block_size", "scaling", "sizes"),
    [
        (None, None, "row", 1), (None, 64, "row", 1), (None, 256, "row", 1), (torch.int8, None, "row", 1),
        (FP8, None, "row", 1), (FP8, 64, "row", 1), (FP8, None, "head", 1), (FP8, 64, "tensor", 1),
        (None, None, "row", 3), (None, 256, "row", 3), (FP8, 64, "tensor", 3),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("kind", SHAPES)
def test_every_kernel_as_in_fp32(
    kind: str, stored: torch.dtype | None, block_size: int | None, scaling: str, sizes: int, tokens: int,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """At a length that is no multiple of a tile. The shares of the read rate are printed, not checked."""
    with torch.inference_mode():
        layer = build_layer(SHAPES[kind], None, torch.bfloat16, CUDA).eval()
        cache = filled(layer, tokens - 3, stored, block_size, scaling, sizes)
        query = torch.randn(layer.core_query_shape(cache.batch_size), dtype=torch.bfloat16, device=CUDA)
        aimed = aimed_query(layer, query, cache)
        expected, case = attend_in_fp32(layer, aimed, cache), case_of(layer, cache, query)
        effort = Effort(settle_seconds=0.0 if is_simulated() else 0.02)
        flush, errors = flusher(CUDA, effort), {}
        for name, backend in BACKENDS.items():
            # Without a GPU, Triton has no driver.
            if backend.why_not(case) is not None or (name in ("triton", "gluon") and is_simulated()):
                continue
            layer.core = backend
            try:
                errors[name] = relative_error(layer.attend(aimed, cache), expected)
                taken = time_calls(CUDA, lambda: layer.attend(query, cache), 5, flush, effort=effort)
            except Exception as error:  # the others are tried too
                errors[name] = float("nan")
                line = f"FAILED: {first_line(error)}"
            else:
                seconds = summarize(taken.seconds)["p50"]
                rate = held_bytes([cache]) / seconds
                line = f"{seconds * 1e6:.1f} us, {rate / 1e9:,.0f} GB/s ({taken.method})"
            with capsys.disabled():
                what = f"{stored or 'bf16'} blocks of {block_size} scale per {scaling} {sizes} lengths"
                print(f"gpu: {kind} {what} {name}: {line}", flush=True)
    wrong = {name: error for name, error in errors.items() if not error <= TOLERANCES[torch.bfloat16]}
    assert errors
    assert not wrong
