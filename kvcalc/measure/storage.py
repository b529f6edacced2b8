"""How a run keeps its cache: preallocated, in blocks, grown, in 8 bits, or not at all; and what goes together."""

from __future__ import annotations

from typing import NamedTuple

import torch

from kvcalc.attention.backends import BACKENDS
from kvcalc.errors import UsageError
from kvcalc.memory.dtypes import DTYPES, Dtype, parse_dtype
from kvcalc.model.caches import CrossAttention, LatentAttention, RecurrentState
from kvcalc.model.spec import ModelSpec, all_caches

KINDS = ("preallocated", "grow", "none")
MLA_FORMS = ("absorbed", "expanded")
QUANTIZED = ("fp8", "int8")


class Storage(NamedTuple):
    """`kind` of KINDS; `block_size` tokens where it is paged; `kv_dtype` of QUANTIZED, or None: the model's own."""

    kind: str = "preallocated"
    block_size: int | None = None
    kv_dtype: str | None = None
    mla: str = "absorbed"
    backend: str = "auto"

    @property
    def is_plain(self) -> bool:
        return self.kind == "preallocated" and self.block_size is None and self.kv_dtype is None

    def dtype(self, dtype: Dtype) -> Dtype:
        """What the rows are kept in, where the model computes in `dtype`."""
        return DTYPES[self.kv_dtype] if self.kv_dtype else dtype


def parse_storage(
    kv_dtype: str | None, cache: str, block_size: int | None, mla: str, backend: str, device: torch.device
) -> Storage:
    """The options of the cache, or a UsageError (exit 2) for those that do not go together."""
    if backend != "auto" and backend not in BACKENDS:
        raise UsageError(f"--backend {backend[:40]!a}: not a backend", f"auto or one of {', '.join(BACKENDS)}")
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
    caches = [cache for spec in specs for cache in all_caches(spec)]
    if storage.mla == "expanded" and not any(isinstance(cache, LatentAttention) for cache in caches):
        raise UsageError("--mla expanded: no attention to be run has a latent", "--attention mla")
    if storage.kind == "none" and any(isinstance(cache, (CrossAttention, RecurrentState)) for cache in caches):
        raise UsageError("--cache none: a recurrent state or an encoder's K and V are not computed again each step")
