"""How the weights of a model are stored, and the bytes of any part of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from kvcalc.memory.dtypes import DTYPES, FILE_TYPES, GGUF_TYPES, MLX_TYPES, Dtype, gguf_type, parse_weight_dtype
from kvcalc.memory.weights import WeightBytes, count_parameters, plain_bytes, quantized_bytes
from kvcalc.model.spec import ModelSpec, weights_of
from kvcalc.model.tensors import ModelWeights
from kvcalc.notes import Note
from kvcalc.records import NamedTuple

if TYPE_CHECKING:
    from kvcalc.memory.quantization.schemes import Scheme
    from kvcalc.throughput.speed import StoredWeights


def stored_weights(model: ModelSpec, spec: ModelSpec, dtype: str | None, model_dtype: Dtype) -> StoredWeights | str:
    """A model's weights and how they are stored, as in `describe_weights`; or the reason if that is not known."""
    from kvcalc.throughput.speed import StoredWeights

    weights, reason = known_weights(model, spec)
    if weights is None:
        return reason or "the weights are not known"
    if spec.gguf is not None and dtype is None:
        held = spec.gguf.weights
        if held is None or held.parameters != count_parameters(weights).total:
            return "the weights a step reads are not known for this GGUF file"
        dtype = gguf_type(held.dtype) or held.dtype
        if dtype.casefold() not in {**DTYPES, **FILE_TYPES, **GGUF_TYPES}:
            return f"the speed of weights of type {dtype} is not known"
    notes: list[Note] = []
    storage = _storage(spec, parse_weight_dtype(dtype), model_dtype, notes)
    if storage is None:
        return notes[0].text
    return StoredWeights(weights, model_dtype, storage.linear, storage.scheme, storage.name)


class Storage(NamedTuple):
    """How weights are stored: with a scheme, or with a dtype of the linear layers that is not the model's own."""

    name: str
    scheme: Scheme | None
    linear: Dtype | None


def known_weights(model: ModelSpec, spec: ModelSpec) -> tuple[ModelWeights | None, str | None]:
    """The weights, or None and the reason. With a what-if they are known only if it just changes the KV heads."""
    if spec.attention != model.attention and (model.attention.is_latent or spec.attention.is_latent):
        return None, f"the weights of {model.name} are not counted with this attention"
    return weights_of(spec), spec.weights_reason


def bytes_of(
    weights: ModelWeights | None, spec: ModelSpec, asked: Dtype | None, model_dtype: Dtype, notes: list[Note]
) -> tuple[str | None, WeightBytes | None]:
    """The name of the dtype or scheme the weights are stored in, and their bytes."""
    storage = _storage(spec, asked, model_dtype, notes)
    if storage is None or weights is None:
        return storage and storage.name, None
    if storage.scheme is not None:
        return storage.name, quantized_bytes(weights, model_dtype, storage.scheme)
    return storage.name, plain_bytes(weights, model_dtype, storage.linear)


def _storage(spec: ModelSpec, asked: Dtype | None, model_dtype: Dtype, notes: list[Note]) -> Storage | None:
    """How the weights are stored. None, with a note, if that is not modelled."""
    if (asked is None and spec.quantization) or (
        asked is not None and (asked.name in FILE_TYPES or asked.name in GGUF_TYPES or asked.name in MLX_TYPES)
    ):
        scheme = _scheme(spec, asked, model_dtype, notes)
        return None if scheme is None else Storage(scheme.name, scheme, None)
    linear = asked if asked is not None and not asked.is_float else None
    return Storage((linear or model_dtype).name, None, linear)


def _scheme(spec: ModelSpec, asked: Dtype | None, model_dtype: Dtype, notes: list[Note]) -> Scheme | None:
    """The scheme of the requested file type or of the config. None, with a note, if that is not modelled."""
    if asked is not None and asked.name in MLX_TYPES:
        from kvcalc.memory.quantization.mlx import mlx_scheme

        return mlx_scheme(asked.name, spec.model_type, model_dtype.block_bytes)
    if asked is not None and asked.name in GGUF_TYPES:
        from kvcalc.memory.quantization.gguf_types import file_type_scheme

        return file_type_scheme(asked.name, spec)
    if asked is not None:
        from kvcalc.memory.quantization.gguf_types import k_quant_scheme

        return k_quant_scheme(asked.name, spec)
    from kvcalc.memory.quantization.gguf_types import count_experts
    from kvcalc.memory.quantization.schemes import UnknownSchemeError, is_mlx, read_scheme, with_expert_dtype

    try:
        if not isinstance(spec.quantization, Mapping):
            raise UnknownSchemeError("a quantization_config that is not an object")
        if is_mlx(spec.quantization):
            from kvcalc.memory.quantization.mlx import read_mlx

            return read_mlx(spec.quantization, spec.model_type, model_dtype.block_bytes)
        if spec.quantization.get("quant_method") == "bitsandbytes" and count_experts(spec):
            # Transformers 5 has experts in one parameter, which is no linear layer; older checkpoints quantize them.
            raise UnknownSchemeError("quant_method bitsandbytes of a model with experts")
        return with_expert_dtype(read_scheme(spec.quantization, model_dtype.block_bytes), spec.expert_dtype)
    except UnknownSchemeError as error:
        text = f"{error} is not modelled, so the bytes of the weights are not known; --dtype overrides it"
        notes.append(Note("weights", "type-not-modelled", text))
        return None
