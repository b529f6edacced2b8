"""How a run stores its cache: preallocated, paged, growing, in 8 bits, or no cache. Also checks the combinations."""

from __future__ import annotations

import torch

from kvcalc.attention.backends import BACKENDS
from kvcalc.errors import UsageError
from kvcalc.memory.dtypes import DTYPES, Dtype, parse_dtype
from kvcalc.model.caches import CrossAttention, LatentAttention, RecurrentState
from kvcalc.model.spec import ModelSpec, all_caches
from kvcalc.records import NamedTuple

KINDS = ("preallocated", "grow", "none")
MLA_FORMS = ("absorbed", "expanded")
QUANTIZED = ("fp8", "int8")
SCALES = ("row", "head", "tensor")


class Storage(NamedTuple):
    """`kind` is one of KINDS. `block_size` is in tokens, or None if the cache is not paged.

    `kv_dtype` is one of QUANTIZED, with `scales` of SCALES, or None for the model's own dtype. The backend `auto`
    leaves out `without_backends`.
    """

    kind: str = "preallocated"
    block_size: int | None = None
    kv_dtype: str | None = None
    mla: str = "absorbed"
    backend: str = "auto"
    without_backends: tuple[str, ...] = ()
    scales: str = "row"

    @property
    def is_plain(self) -> bool:
        return self.kind == "preallocated" and self.block_size is None and self.kv_dtype is None

    def dtype(self, dtype: Dtype) -> Dtype:
        """The dtype of the stored rows if the model computes in `dtype`."""
        return DTYPES[self.kv_dtype] if self.kv_dtype else dtype


def parse_storage(
    kv_dtype: str | None, cache: str, block_size: int | None, mla: str, backend: str,
    without_backends: tuple[str, ...], device: torch.device, scales: str | None = None,
) -> Storage:  # fmt: skip
    """Parse the options of the cache. Raises UsageError (exit 2) for options that cannot be combined."""
    if backend != "auto" and backend not in BACKENDS:
        raise UsageError(f"--backend {backend[:40]!a}: not a backend", f"auto or one of {', '.join(BACKENDS)}")
    for name in without_backends:
        if name not in BACKENDS:
            raise UsageError(f"--without-backend {name[:40]!a}: not a backend", f"one of {', '.join(BACKENDS)}")
    if without_backends and backend != "auto":
        raise UsageError(f"--without-backend needs --backend auto, not {backend}", "remove one of the two options")
    for option, value, allowed in (("--cache", cache, KINDS), ("--mla", mla, MLA_FORMS)):
        if value not in allowed:
            raise UsageError(f"{option} {value[:40]!a}: one of {', '.join(allowed)}")
    kept = None if kv_dtype is None or kv_dtype == "auto" else parse_dtype(kv_dtype, "--kv-dtype").name
    if kept is not None and kept not in QUANTIZED:
        raise UsageError(
            f"--kv-dtype {kv_dtype}: measure supports {' and '.join(QUANTIZED)}, and auto for the compute dtype",
            "use --kv-dtype auto, and --dtype to choose the compute dtype",
        )
    if cache == "none" and (kept or block_size or mla == "expanded" or backend != "auto" or without_backends):
        options = "--kv-dtype, --block-size, --mla expanded, --backend or --without-backend"
        raise UsageError(f"--cache none cannot be combined with {options}")
    if cache == "grow" and block_size:
        raise UsageError("--cache grow cannot be combined with --block-size")
    if scales is not None and scales not in SCALES:
        raise UsageError(f"--cache-scales {scales[:40]!a}: one of {', '.join(SCALES)}")
    if scales is not None and kept is None:
        raise UsageError("--cache-scales needs a cache in 8 bits", "for example --kv-dtype fp8")
    if cache == "grow" and scales not in (None, "row"):
        raise UsageError(f"--cache grow cannot be combined with --cache-scales {scales}")
    if kept == "fp8" and device.type == "mps":
        raise UsageError("--kv-dtype fp8: not supported on Apple's GPU", "use --kv-dtype int8")
    return Storage(cache, block_size, kept, mla, backend, without_backends, scales or "row")


def check_lengths(
    lengths: tuple[int, ...], storage: Storage, context_tokens: int | None, batch_size: int, is_swept: bool,
    until_full: str | None, prefill: str,
) -> None:  # fmt: skip
    """Raise UsageError (exit 2) for options that sequences of these lengths cannot be combined with."""
    if context_tokens is not None or batch_size not in (1, len(lengths)):
        raise UsageError("--lengths says the context and the batch", "remove --context and --batch")
    for option, is_given in (
        ("--sweep", is_swept), ("--until-full", until_full is not None), ("--prefill full", prefill == "full"),
        (f"--cache {storage.kind}", storage.kind != "preallocated"),
    ):  # fmt: skip
        if is_given:
            raise UsageError(f"--lengths cannot be combined with {option}")


def check_goes_with(storage: Storage, specs: list[ModelSpec]) -> None:
    """Raise UsageError (exit 2) if `storage` applies to no model of `specs`, or does not support one of them."""
    caches = [cache for spec in specs for cache in all_caches(spec)]
    if storage.mla == "expanded" and not any(isinstance(cache, LatentAttention) for cache in caches):
        raise UsageError("--mla expanded: no attention in this run uses MLA", "add --attention mla")
    if storage.kind == "none" and any(isinstance(cache, (CrossAttention, RecurrentState)) for cache in caches):
        raise UsageError("--cache none: not supported for models with a recurrent state or cross-attention")
