"""What kernels of attention an engine refuses for a model, its cache and a device (`backends` in its `starts.yaml`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvcalc.engines.place import CAPABILITIES, is_fp8
from kvcalc.model.caches import SELF_ATTENTION_CACHES, IndexerKeys, LatentAttention, RecurrentState
from kvcalc.model.memo import remembered
from kvcalc.model.spec import ModelSpec, all_caches, weights_of
from kvcalc.records import NamedTuple
from kvcalc.throughput.hardware import Gpu

_HINT = "leave --attention-backend out"


class Backend(NamedTuple):
    """What one backend takes. Numbers of devices are compute capabilities times ten, and an absent fact is any.

    - `latent`: whether it is for latents (MLA), or for keys and values.
    - `sparse`: whether it is for latents with an indexer, which chooses the rows that are read.
    - `devices`: the devices that it has kernels for, and `latent_devices` those for a latent, if they differ.
    - `fp8`: the devices on which it reads a cache in fp8.
    - `sinks`: the devices on which it has attention sinks.
    - `heads`: the head sizes that it supports.
    - `block`: the default number of tokens in a block with this backend.
    """

    latent: bool | None = None
    sparse: bool = False
    devices: Sequence[int] | None = None
    latent_devices: Sequence[int] | None = None
    fp8: Sequence[int] | None = None
    sinks: Sequence[int] | None = None
    heads: Sequence[int] | None = None
    block: int | None = None


def refusals(
    spec: ModelSpec, gpu: Gpu | None, kv_dtype: str, name: str, backend: Backend
) -> Iterator[tuple[str, str | None]]:
    """Each reason why the engine does not start with this backend on an NVIDIA device, and a hint.

    Layouts of caches with kernels of their own (DeepSeek-V4) are not judged.
    """
    kinds, plain, option = _kinds(spec), {*SELF_ATTENTION_CACHES}, f"--attention-backend {name}"
    if not kinds <= {*plain, LatentAttention, IndexerKeys, RecurrentState}:
        return
    is_latent, is_sparse = LatentAttention in kinds, IndexerKeys in kinds
    if not (is_latent or kinds & plain) or (is_sparse and not is_latent):
        return
    has = "MLA" if is_latent else "keys and values"
    if backend.latent is not None and backend.latent is not is_latent:
        yield f"{option} is not for {has}", _HINT
        return
    if is_latent and backend.latent is not None and backend.sparse is not is_sparse:
        yield f"{option} is {'' if backend.sparse else 'not '}for sparse latent attention", _HINT
    capability = None if gpu is None else CAPABILITIES.get(gpu.device_class or "")
    known = (backend.latent_devices if is_latent else None) or backend.devices
    if not _has(known, capability):
        yield f"{option} has no kernels for {'' if gpu is None else gpu.name}", _HINT
    if is_fp8(kv_dtype) and not _has(backend.fp8, capability):
        yield f"{option} does not read a cache in fp8 here", "--kv-dtype bf16"
    if not _has(backend.sinks, capability) and _has_sinks(spec):
        yield f"{option} has no attention sinks here, which {spec.name} has", _HINT
    sizes = [] if backend.heads is None else [size for size in _head_sizes(spec) if size not in backend.heads]
    if sizes:
        yield f"{option} has no heads of {sizes[0]}", _HINT


def _has(known: Sequence[int] | None, capability: int | None) -> bool:
    """Whether a device is one of the known ones. If the device is not known, only an empty list rules it out."""
    return known is None or (bool(known) if capability is None else capability in known)


@remembered
def _kinds(spec: ModelSpec) -> set[type]:
    return set(map(type, all_caches(spec)))


@remembered
def _head_sizes(spec: ModelSpec) -> list[int]:
    return sorted({cache.k_head_dim for cache in all_caches(spec) if isinstance(cache, SELF_ATTENTION_CACHES)})


@remembered
def _has_sinks(spec: ModelSpec) -> bool:
    weights = weights_of(spec)
    return weights is not None and any(
        weight.name.endswith(".sinks") for block in weights.blocks for weight in block.weights
    )
