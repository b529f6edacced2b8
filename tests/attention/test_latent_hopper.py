"""MLA's kernel for Hopper, compiled without a GPU, and beside fp32 on one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kvcalc.attention.backends.triton import why_not_hopper
from tests.attention.test_split_kv import check_on_a_gpu, compile_for, spilled_bytes
from tests.conftest import at_night

pytest.importorskip("triton.experimental.gluon", reason="no Triton with Gluon is installed")

# Per thread block.
SHARED_BYTES = 227 << 10


def compiled(stored: str, page: int) -> tuple[Any, str]:
    """The kernel as `latent_hopper.decode` calls it for DeepSeek-V3's 128 heads, and what ptxas says of it."""
    from triton.experimental.gluon._runtime import GluonASTSource

    from kvcalc.attention.backends import latent_hopper

    constants = {
        "EACH": 128, "V": 512, "REST": 64, "PAGE": page, "IS_SCALED": stored != "bf16",
        "HEADS": latent_hopper.HEADS, "TOKENS": latent_hopper.TOKENS,
    }  # fmt: skip
    pointer = {"bf16": "*bf16", "int8": "*i8", "fp8": "*fp8e4nv"}[stored]
    pointers = {"query": "*bf16", "key": pointer, "key_scale": "*fp32", "table": "*i32", "part": "*bf16"}
    pointers |= {"log_sum": "*fp32", "scale": "fp32"}
    names = latent_hopper.attend.arg_names
    signature = {name: pointers.get(name, "constexpr" if name in constants else "i32") for name in names}
    unknown = ("scale", "tokens", "tiles", "table_b", "ks_b", "ks_s", *constants)
    aligned = {(at,): [["tt.divisibility", 16]] for at, name in enumerate(names) if name not in unknown}
    source = GluonASTSource(latent_hopper.attend, signature, constants, aligned)
    return compile_for("sm90", source, num_warps=8)


@pytest.mark.parametrize(
    ("stored", "page"),
    [("bf16", 0), ("int8", 64), ("fp8", 0), at_night("bf16", 64), at_night("int8", 0), at_night("fp8", 64)],
)
def test_it_keeps_the_matrix_units_busy(
    stored: str, page: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No register is spilled, no multiplication waits for the one before, and no half computes the other's scores."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel, said = compiled(stored, page)
    assert kernel.metadata.shared <= SHARED_BYTES
    assert spilled_bytes(kernel, said) == 0
    assert "serialized" not in said
    # 576 elements in steps of 16: scores of 64 heads and half of the 64 tokens. Then half of V's 512.
    assert kernel.asm["ptx"].count("m64n32k16") == 36
    assert kernel.asm["ptx"].count("m64n256k16") == 4


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("layout", ["dense", "paged"])
@pytest.mark.parametrize("stored", [None, torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("heads", [128, 100, 16])
@pytest.mark.parametrize("tokens", [1, 65, 5000])
def test_on_a_gpu_as_in_fp32(layout: str, stored: torch.dtype | None, heads: int, tokens: int) -> None:
    if reason := why_not_hopper(torch.device("cuda", 0)):
        pytest.skip(reason)
    check_on_a_gpu("gluon", layout, stored, (heads, 1, 576, 512), tokens)
