"""A reserve: its parts, the facts that it depends on, and the memory that the cache does not get."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from typing import TYPE_CHECKING

from kvcalc.memory.sharding import Width
from kvcalc.model.layout import Layout
from kvcalc.records import NamedTuple
from kvcalc.releases import Release

if TYPE_CHECKING:
    from kvcalc.model.spec import ModelSpec
    from kvcalc.model.towers.image_rule import ImageRule

GIB = 2**30
MIB = 2**20
# Newer than every release.
NEWEST = Release.of(999)

ACTIVATION, RESERVE = "activation", "reserve"
CONTEXT = "CUDA context"


class Held(NamedTuple):
    """A part of a device's memory: its kind (ACTIVATION or RESERVE), its name, and its size in bytes.

    `low` and `high` are the ends of the 80 % range of an estimate, or None if the range is not known.
    """

    kind: str
    name: str
    bytes: int
    low: int | None = None
    high: int | None = None

    def within(self, low: float, high: float) -> Held:
        """The part with a range of `low` to `high` times its bytes."""
        return self._replace(low=int(self.bytes * low), high=ceil(self.bytes * high))

    def exact(self) -> Held:
        """The part as one that the engine's settings determine: both ends of the range are its bytes."""
        return self._replace(low=self.bytes, high=self.bytes)


class ReserveInputs(NamedTuple):
    """A device's memory, the workload on it, and the engine's own settings (option name to text).

    `layout` is one replica's, or one whole copy's. `is_latent` is true for an MLA model, `is_apple` if macOS manages
    the memory, and `is_amd` if the device is AMD's. `release` is the engine's release, or None for the newest.
    `batch_size` is that of one DP rank. `has_fast_links` is whether the devices are joined by more than PCIe.
    `images` is set if the engine loads a vision tower, `has_unknown_tower` if it may load one that nothing describes,
    and `has_sparse_latent` for MLA with an indexer.
    `shares_memory` is whether the host uses the device's memory. `multimodal` is the published config of a model with
    vision or audio towers, and `keeps_tokens` is false for one without a cache of tokens. `drafts_by` is the method of
    speculative decoding, and `device_class` the device's generation. `has_states` is whether layers keep recurrent
    states. `spec` is the model, for the shapes of its attention.
    """

    memory_bytes: int
    width: Width
    layout: Layout
    context_tokens: int
    batch_size: int
    settings: Mapping[str, str]
    num_heads: int = 0
    is_latent: bool = False
    release: Release | None = None
    is_apple: bool = False
    has_fast_links: bool = True
    images: ImageRule | None = None
    has_sparse_latent: bool = False
    shares_memory: bool = False
    multimodal: Mapping[str, object] | None = None
    keeps_tokens: bool = True
    drafts_by: str | None = None
    is_amd: bool = False
    device_class: str | None = None
    model_type: str = ""
    has_states: bool = False
    has_unknown_tower: bool = False
    spec: ModelSpec | None = None

    def driver(self, context_mib: int, nccl_mib: int = 0) -> list[Held]:
        """The memory outside the engine: the driver's context, and NCCL's buffers if there are several ranks."""
        held = [Held(RESERVE, CONTEXT, context_mib * MIB)]
        needs_nccl = nccl_mib and self.layout.num_devices > 1
        return [*held, Held(RESERVE, "NCCL buffers", nccl_mib * MIB)] if needs_nccl else held

    def step_activations(self, tokens: int) -> int:
        """Peak bytes of activations of 16 bits in one step of `tokens` tokens.

        At the peak, a step holds the residual, the normed input, and the widest module's inputs and intermediate
        values. Layers run one after another and reuse the memory. With DP ranks, every rank also gathers the
        tokens of the other replicas before its experts (vLLM's default backend, allgather_reducescatter).
        """
        gathered = (self.layout.data_parallel_size - 1) * self.width.hidden_size
        return tokens * (2 * self.width.hidden_size + self.width.module_elements + gathered) * 2


class Reserve(NamedTuple):
    """The memory that is not available to the cache, and the settings that determine it.

    `share` is the cache's fraction of the memory left after weights and `held` (TensorRT-LLM's fraction of free
    memory). `varies` is whether `held` grows with the context or the batch, and `same_until` the tokens of all
    sequences together up to which it does not. `first_start_bytes` of `held` are those of a first start alone, which
    compiles, and `graph_bytes` those that an estimate of CUDA graphs keeps from the cache.
    """

    held: list[Held]
    settings: dict[str, object]
    share: float = 1.0
    varies: bool = False
    same_until: int = 0
    first_start_bytes: int = 0
    graph_bytes: int = 0

    def held_bytes(self) -> int:
        """The bytes of all parts."""
        return sum([part.bytes for part in self.held])
