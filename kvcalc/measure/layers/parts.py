"""A model's layers as parts that can run: one attention or recurrent module for every cache of a layer."""

from __future__ import annotations

from typing import Union

from kvcalc.attention.recurrent import StateShape
from kvcalc.errors import ModelError
from kvcalc.model.caches import (
    Cache,
    ChunkedAttention,
    CompressedAttention,
    CrossAttention,
    FullAttention,
    LatentAttention,
    RecurrentState,
    SlidingWindowAttention,
)
from kvcalc.model.layers import Mixer
from kvcalc.model.mixers.attention import Attention, AttentionShape
from kvcalc.model.mixers.recurrent import Recurrence
from kvcalc.model.spec import ModelSpec
from kvcalc.records import NamedTuple

_RUN = (FullAttention, SlidingWindowAttention, ChunkedAttention, LatentAttention, CrossAttention, RecurrentState)


class Part(NamedTuple):
    """One cache of one layer (counted from 0), and the shape of the module that writes and reads it."""

    layer: int
    cache: Cache
    shape: Union[AttentionShape, StateShape]

    @property
    def window(self) -> int | None:
        return self.cache.window

    @property
    def is_cross(self) -> bool:
        return isinstance(self.cache, CrossAttention)

    def parameters(self, hidden_size: int) -> int:
        """The number of parameters in the module's projections."""
        if isinstance(self.shape, StateShape):
            return self.shape.parameters(hidden_size)
        return Attention(self.shape).parameters or 0

    def used_parameters(self, hidden_size: int) -> int:
        """Those that a token of a prompt or of a step is multiplied by: not those of an encoder's keys and values."""
        shape, unused = self.shape, 0
        if self.is_cross and isinstance(shape, AttentionShape):
            unused = shape.num_kv_heads * (shape.qk_head_dim + shape.v_head_dim) * hidden_size
        return self.parameters(hidden_size) - unused


def parts_of(spec: ModelSpec) -> list[Part]:
    """The parts of every layer that has a cache, in order, without those that read an encoder's output of 0 tokens.

    Raises ModelError (exit 3) for a layer that no module here can run. The message names it.
    """
    shape = spec.attention
    if shape.hidden_size is None:
        raise ModelError(f"{spec.name}: hidden_size is not known, but the projections need it", "set --hidden-size")
    if shape.rope_dim % 2:
        raise ModelError(f"{spec.name}: rotary positions rotate dimensions in pairs, but {shape.rope_dim} is odd")
    parts = []
    for group in spec.layers:
        owners = [mixer for mixer in group.layer.mixers for _ in mixer.caches]
        shapes = [_shape_of(spec, group.first, cache, mixer) for cache, mixer in zip(group.caches, owners)]
        for layer in range(group.first, group.last + 1):
            parts += [Part(layer, cache, shape) for cache, shape in zip(group.caches, shapes) if not _is_empty(cache)]
    if not parts:
        raise ModelError(f"{spec.name}: no layer has a cache")
    return parts


def remarks_on(spec: ModelSpec) -> list[str]:
    """Warnings about parts of the model that run differently from the real model."""
    caches = [cache for group in spec.layers for cache in group.caches]
    remarks = []
    without = sum(group.num_layers for group in spec.layers if not group.caches)
    if without:
        remarks.append(f"{without} of {spec.num_layers} layers have no cache of their own and do not run")
    empty = sum(group.num_layers for group in spec.layers if any(map(_is_empty, group.caches)))
    if empty:
        text = "layers attend to an image or an encoder without tokens, and do not run"
        remarks.append(f"{empty} of {spec.num_layers} {text}")
    if any(isinstance(cache, ChunkedAttention) for cache in caches):
        remarks.append("layers with chunked attention run as windows of the same size, which have the same bytes")
    if any(isinstance(cache, RecurrentState) for cache in caches):
        text = "recurrent layers run with plain torch operations: the bytes of their states are exact"
        remarks.append(f"{text}, but they are slower than fused kernels")
    names = [mixer.names for group in spec.layers for mixer in group.layer.mixers if isinstance(mixer, Attention)]
    left_out = [("sink in each softmax", any(each.has_sinks for each in names)),
                ("limit on attention scores (softcap)", any(each.caps_scores for each in names))]  # fmt: skip
    remarks += [f"the model's {what} is left out: it changes no bytes" for what, has_it in left_out if has_it]
    return remarks


def _is_empty(cache: Cache) -> bool:
    return isinstance(cache, CrossAttention) and cache.encoder_tokens == 0


def _shape_of(spec: ModelSpec, layer: int, cache: Cache, mixer: Mixer) -> AttentionShape | StateShape:
    """The shape of the module that runs `mixer`. `cache` may be one rank's share."""
    if not isinstance(cache, _RUN):
        what = "compressed attention" if isinstance(cache, CompressedAttention) else cache.kind.replace("_", " ")
        raise ModelError(f"{spec.name}: measure does not support {what}")
    if isinstance(mixer, Recurrence):
        if not mixer.kind:
            raise ModelError(f"{spec.name}: measure does not support the recurrence of {spec.model_type}")
        sizes = (mixer.heads, mixer.key_heads, mixer.k_width, mixer.v_width)
        return StateShape(mixer.kind, mixer.state.conv_channels, mixer.state.conv_kernel, *sizes)
    if not isinstance(mixer, Attention):
        raise ModelError(f"{spec.name}: measure does not support layer {layer}")
    shape = mixer.shape
    if shape.is_latent:
        return shape
    if spec.attention.is_latent:
        raise ModelError(f"{spec.name}: layer {layer} keeps K and V but others use MLA; measure does not support this")
    if shape.num_heads % shape.num_kv_heads:
        raise ModelError(
            f"{spec.name}: the {shape.num_kv_heads} KV heads of layer {layer} do not divide its {shape.num_heads} heads"
        )
    rope = 0 if mixer.is_cross or not shape.rope_dim else min(shape.rope_dim, shape.qk_head_dim)
    return shape._replace(rope_dim=rope - rope % 2)
