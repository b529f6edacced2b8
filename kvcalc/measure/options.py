"""The options of the cache and the kernel: which there are, and which go together."""

from __future__ import annotations

import torch

from kvcalc.errors import UsageError
from kvcalc.measure.choose import check_name
from kvcalc.measure.storage import KINDS, MLA_FORMS, QUANTIZED, Storage
from kvcalc.memory.dtypes import parse_dtype
from kvcalc.model.caches import LatentAttention, RecurrentState
from kvcalc.model.spec import ModelSpec, all_caches


def parse_storage(
    kv_dtype: str | None, cache: str, block_size: int | None, mla: str, backend: str, device: torch.device
) -> Storage:
    """The options of the cache, or a UsageError (exit 2) for those that do not go together."""
    check_name(backend)
    for option, value, allowed in (("--cache", cache, KINDS), ("--mla", mla, MLA_FORMS)):
        if value not in allowed:
            raise UsageError(f"{option} {value[:40]!a}: one of {', '.join(allowed)}")
    kept = None if kv_dtype is None or kv_dtype == "auto" else parse_dtype(kv_dtype, "--kv-dtype").name
    if kept is not None and kept not in QUANTIZED:
        raise UsageError(
            f"--kv-dtype {kv_dtype}: measure keeps a cache in {' or '.join(QUANTIZED)}, or in what it computes in",
            "auto, and --dtype for the latter",
        )
    if cache == "none" and (kept or block_size or mla == "expanded" or backend != "auto"):
        raise UsageError("--cache none keeps nothing: no --kv-dtype, --block-size, --mla or --backend goes with it")
    if cache == "grow" and block_size:
        raise UsageError("--cache grow concatenates: no --block-size goes with it")
    if kept == "fp8" and device.type == "mps":
        raise UsageError("--kv-dtype fp8: Apple's GPU has none", "--kv-dtype int8")
    return Storage(cache, block_size, kept, mla, backend)


def check_goes_with(storage: Storage, specs: list[ModelSpec]) -> None:
    """Raise UsageError (exit 2) where no model of `specs` has what `storage` asks for, or one has what it cannot do."""
    if storage.mla == "expanded" and not any(
        isinstance(c, LatentAttention) for spec in specs for c in all_caches(spec)
    ):
        raise UsageError("--mla expanded: no attention to be run has a latent", "--attention mla")
    if storage.kind == "none" and any(
        isinstance(cache, RecurrentState) or cache.kind == "cross_attention"
        for spec in specs
        for cache in all_caches(spec)
    ):
        raise UsageError("--cache none: a recurrent state or an encoder's K and V are not computed again each step")
