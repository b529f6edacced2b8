"""The `weights` part of a document: the parameters and their bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from kvcalc.memory.dtypes import DTYPES, FILE_TYPES, GGUF_TYPES, MLX_TYPES, Dtype, gguf_type, parse_weight_dtype
from kvcalc.memory.sharding import NOT_SPREAD, Bounds, Spread, Width, shard, stage_weights, width_of
from kvcalc.memory.weights import WeightBytes, count_parameters, plain_bytes, quantized_bytes
from kvcalc.model.memo import remembered, remembered_of_two
from kvcalc.model.spec import ModelSpec, weights_of
from kvcalc.model.tensors import ModelWeights
from kvcalc.notes import Note

if TYPE_CHECKING:
    from kvcalc.memory.quantization.schemes import Scheme
    from kvcalc.model.checkpoint import StoredWeights as FoundFiles
    from kvcalc.throughput.speed import StoredWeights


def describe_weights(
    model: ModelSpec, spec: ModelSpec, dtype: str | None, model_dtype: Dtype, notes: list[Note]
) -> dict[str, Any]:
    """The `weights` part of a document. `model` is the model itself, `spec` is the same model with the what-if.

    `dtype` is the requested one. It overrides the config's quantisation and the files in the model's folder.
    `model_dtype` is the dtype the model computes in. Figures that are not known are null. Then `reason`, or a note
    appended to `notes`, says why.
    """
    found, remarks = _described(model, spec, dtype, model_dtype)
    notes += remarks
    towers: list[dict[str, Any]] = []
    if model.multimodal is not None and model.gguf is None:
        from kvcalc.planning.towers import described_towers

        towers = described_towers(model)
    return {**found, "towers": towers}


@remembered_of_two
def _described(
    model: ModelSpec, spec: ModelSpec, dtype: str | None, model_dtype: Dtype
) -> tuple[dict[str, Any], list[Note]]:
    notes: list[Note] = []
    if spec.gguf is not None:
        return _describe_file(model, spec, dtype, notes), notes
    weights, reason = _known_weights(model, spec)
    if reason is not None and spec.attention != model.attention:
        notes.append(Note("weights", "other-attention", reason))
    asked = parse_weight_dtype(dtype)
    remarks: list[Note] = []
    name, size = _bytes_of(weights, spec, asked, model_dtype, remarks)
    counted = None if weights is None else count_parameters(weights)
    total, active = (None, None) if size is None else size
    source = None if total is None else "config"
    if asked is None and spec.attention == model.attention and spec.checkpoint is not None:
        stored = files_of(model)
        if stored is not None:
            from kvcalc.planning.stored_files import believed_bytes

            held, said = believed_bytes(stored, total, _tower_bytes(model))
            notes += said
            if held is not None:
                # The size is known, so it does not matter if the config's quantization is not supported.
                total, source, remarks = held, "safetensors", []
                active = None if active is None else min(active, held)
    notes += remarks
    parameters = (None,) * 3 if counted is None else (counted.total, counted.active_per_token, counted.input_embedding)
    return _document(parameters, (total, active), name, source, reason), notes


@remembered
def files_of(model: ModelSpec) -> FoundFiles | None:
    """The checkpoint in the model's folder, or None if there is none."""
    if model.checkpoint is None:
        return None
    from kvcalc.model.checkpoint import read_checkpoint

    return read_checkpoint(model.checkpoint, model.num_layers if model.num_draft_layers else None)


def _tower_bytes(model: ModelSpec) -> int | None:
    """The bytes of the model's towers in 16 bits. None if the files may hold them in fewer, or a rule is not known."""
    if model.multimodal is None:
        return 0
    from kvcalc.planning.towers import described_towers

    sizes = [tower["bytes"] for tower in described_towers(model)]
    if model.quantization or not all(isinstance(size, int) for size in sizes):
        return None
    return sum(size for size in sizes if isinstance(size, int))


class DeviceWeights(NamedTuple):
    """The weights on the device that holds the most: their bytes, the bytes every rank holds, and their widths.

    If the bytes are not known, `bytes` is None and `reason` says why. `draft_bytes` of them are weights that only draft
    tokens, and `others` are towers and adapters: a name and the bytes of each.
    """

    bytes: int | None
    replicated_bytes: int
    width: Width | None
    reason: str | None
    draft_bytes: int = 0
    others: tuple[tuple[str, int], ...] = ()


def file_excess(
    model: ModelSpec, spec: ModelSpec, dtype: str | None, model_dtype: Dtype
) -> tuple[int, int]:  # fmt: skip
    """The bytes of the files in the model's folder beyond the language model, and all their bytes. 0 without files."""
    described, _ = _described(model, spec, dtype, model_dtype)
    weights, _ = _known_weights(model, spec)
    if described["bytes_source"] != "safetensors" or weights is None:
        return 0, 0
    _, size = _bytes_of(weights, spec, None, model_dtype, [])
    return (0, 0) if size is None else (max(described["bytes"] - size[0], 0), described["bytes"])


@remembered_of_two
def device_weights(
    model: ModelSpec, spec: ModelSpec, dtype: str | None, model_dtype: Dtype, ranks: int, stages: Bounds,
    spread: Spread = NOT_SPREAD, tables_on_host: bool = False,
) -> DeviceWeights:  # fmt: skip
    """The weights of one of `ranks` tensor-parallel ranks, in the pipeline stage with the largest weights.

    `stages` has the layers of each stage (`Engine.stage_bounds`), and `spread` says what attention replicas divide
    among them. `model`, `spec` and `dtype` are as in `describe_weights`. Bytes read from files are split in the same
    proportion as the counted bytes. `tables_on_host` is whether the input embedding is in host memory, as in llama.cpp
    (`kvcalc.memory.placement`).
    """
    described, _ = _described(model, spec, dtype, model_dtype)
    if spec.gguf is not None:
        if spread.data_parallel_size > 1:
            return DeviceWeights(None, 0, None, "a GGUF file is not split among attention replicas")
        return _file_on_device(spec, described, ranks, len(stages), tables_on_host)
    weights, reason = _known_weights(model, spec)
    if weights is None or described["bytes"] is None:
        asked = reason or "the dtype of the weights is not modelled; --dtype overrides it"
        return DeviceWeights(None, 0, None, asked)
    asked_dtype = parse_weight_dtype(dtype)

    def size_of(part: ModelWeights) -> int:
        _, size = _bytes_of(part, spec, asked_dtype, model_dtype, [])
        return 0 if size is None else size[0]

    parts = [weights]
    if len(stages) > 1:
        parts = stage_weights(weights, stages)
    if tables_on_host:
        from kvcalc.memory.placement import without_tables

        parts = [without_tables(part, number == len(parts)) for number, part in enumerate(parts, 1)]
    sizes = [(size_of(shard(part, ranks, spread)), size_of(part), part) for part in parts]
    share, whole, part = max(sizes, key=lambda row: row[:2])
    # The bytes that all ranks hold: what is left of a share beyond its part of the weights that are split.
    number, even = (ranks, NOT_SPREAD) if ranks > 1 else (spread.data_parallel_size, spread)
    held = share if even == spread else size_of(shard(part, ranks))
    counted = size_of(weights)
    if described["bytes"] != counted and counted:
        share, whole, held = (-(-size * described["bytes"] // counted) for size in (share, whole, held))
    replicated = -(-(held * number - whole) // (number - 1)) if number > 1 else 0
    return DeviceWeights(share, max(replicated, 0), width_of(weights, ranks), None)


def stage_sizes(
    model: ModelSpec, spec: ModelSpec, dtype: str | None, model_dtype: Dtype, stages: Bounds, tables_on_host: bool
) -> list[int] | str:
    """The bytes of the weights in every pipeline stage, or the reason if they are not known.

    The arguments are as in `device_weights`. A GGUF file is divided by its tensors.
    """
    last = len(stages) - 1
    if spec.gguf is not None:
        held = spec.gguf.weights.parts if spec.gguf.weights is not None and dtype is None else None
        if held is None:
            return "the file does not say which weights belong to which layer"
        sizes = [sum(map(sum, held.layers[first : end + 1])) for first, end in stages]
        sizes[last] += held.output + held.tied_head
        sizes[0] += 0 if tables_on_host else held.input - (held.tied_head if last == 0 else 0)
        return sizes
    weights, reason = _known_weights(model, spec)
    if weights is None:
        return reason or "the weights are not known"
    parts = stage_weights(weights, stages)
    if tables_on_host:
        from kvcalc.memory.placement import without_tables

        parts = [without_tables(part, number == last) for number, part in enumerate(parts)]
    return part_bytes(model, spec, dtype, model_dtype, parts) or "the bytes of the weights are not known"


def part_bytes(
    model: ModelSpec, spec: ModelSpec, dtype: str | None, model_dtype: Dtype, parts: Sequence[ModelWeights]
) -> list[int] | None:
    """The bytes of parts of the weights, or None if they are not known.

    The arguments are as in `describe_weights`. Bytes read from files are divided in the same proportion as the counted
    bytes. The input embedding of a part has the type that it has in the whole model.
    """
    described, _ = _described(model, spec, dtype, model_dtype)
    weights, _ = _known_weights(model, spec)
    if weights is None or described["bytes"] is None:
        return None
    asked = parse_weight_dtype(dtype)

    def size_of(part: ModelWeights) -> int:
        _, size = _bytes_of(part, spec, asked, model_dtype, [])
        return 0 if size is None else size[0]

    whole, table = size_of(weights), size_of(ModelWeights(weights.embedding, weights.tied, ()))
    none = weights.embedding._replace(rows=0)
    sizes = [
        size_of(ModelWeights(none, part.tied, part.blocks)) + (table if part.embedding.rows else 0) for part in parts
    ]
    return [-(-size * described["bytes"] // whole) for size in sizes] if described["bytes"] != whole else sizes


def _describe_file(model: ModelSpec, spec: ModelSpec, dtype: str | None, notes: list[Note]) -> dict[str, Any]:
    """The weights of a GGUF file from its header, or their size in another dtype of 16 or 32 bits."""
    held = spec.gguf.weights if spec.gguf else None
    reason = None
    if spec.attention != model.attention:
        held, reason = None, f"the weights of {model.name} are not counted with this attention"
        notes.append(Note("weights", "other-attention", reason))
    elif held is None:
        reason = "the file has no tensors, or some of its shards are missing"
    asked = parse_weight_dtype(dtype)
    name: str | None = None if held is None else held.dtype
    total, active = (None, None) if held is None else (held.bytes, held.active_bytes_per_token)
    source = None if held is None else "gguf"
    if asked is not None:
        name, total, active, source = asked.name, None, None, None
        if held is not None and asked.is_float:
            total = held.parameters * asked.block_bytes
            active = held.active_parameters_per_token * asked.block_bytes
            source = "gguf"
        elif held is not None:
            text = f"--dtype {asked.name} is not modelled for a GGUF file, so the bytes of the weights are not known"
            notes.append(Note("weights", "type-not-modelled", text))
    parameters = (None,) * 3 if held is None else (
        held.parameters, held.active_parameters_per_token, held.input_embedding_parameters
    )  # fmt: skip
    return _document(parameters, (total, active), name, source, reason)


def _document(
    parameters: tuple[int | None, ...], sizes: tuple[int | None, int | None], dtype: str | None, source: str | None,
    reason: str | None,
) -> dict[str, Any]:  # fmt: skip
    """The `weights` part of a document.

    `parameters` are the total, those active per token and those of the input embedding. `sizes` are the total bytes and
    the bytes active per token. `source` says where the bytes are from, `reason` why figures are missing.
    """
    total, active, embedding = parameters
    return {
        "parameters": total,
        "active_parameters_per_token": active,
        "input_embedding_parameters": embedding,
        "bytes": sizes[0],
        "active_bytes_per_token": sizes[1],
        "dtype": dtype,
        "bytes_source": source,
        "reason": reason,
    }


def _file_on_device(
    spec: ModelSpec, described: Mapping[str, Any], ranks: int, stages: int, tables_on_host: bool
) -> DeviceWeights:
    """One device's share of a GGUF file's weights. The header has bytes and parameters, but not every width.

    Each matrix of a layer has the model's width as one dimension. So a layer's parameters divided by that width are an
    upper bound for the width of its widest module.
    """
    hidden, size = spec.attention.hidden_size, described["bytes"]
    if size is None or not hidden:
        return DeviceWeights(None, 0, None, described["reason"] or "the file's header does not have them")
    if stages > 1:
        return DeviceWeights(None, 0, None, "a GGUF file is not split into pipeline stages")
    table, active = described["input_embedding_parameters"], described["active_parameters_per_token"]
    layers = max(active - table, 0) // spec.num_layers
    has_experts = active + table < described["parameters"]
    width = Width(-(-layers // (hidden * ranks)), hidden, table // hidden, spec.num_layers, has_experts)
    held = spec.gguf.weights if spec.gguf else None
    if tables_on_host and held is not None and held.parts is not None and size == held.bytes:
        size -= held.parts.input - held.parts.tied_head
    return DeviceWeights(-(-size // ranks), 0, width, None)


def _known_weights(model: ModelSpec, spec: ModelSpec) -> tuple[ModelWeights | None, str | None]:
    """The weights, or None and the reason. With a what-if they are known only if it just changes the KV heads."""
    if spec.attention != model.attention and (model.attention.is_latent or spec.attention.is_latent):
        return None, f"the weights of {model.name} are not counted with this attention"
    return weights_of(spec), spec.weights_reason


def _bytes_of(
    weights: ModelWeights | None, spec: ModelSpec, asked: Dtype | None, model_dtype: Dtype, notes: list[Note]
) -> tuple[str | None, WeightBytes | None]:
    """The name of the dtype or scheme the weights are stored in, and their bytes."""
    storage = _storage(spec, asked, model_dtype, notes)
    if storage is None or weights is None:
        return storage and storage.name, None
    if storage.scheme is not None:
        return storage.name, quantized_bytes(weights, model_dtype, storage.scheme)
    return storage.name, plain_bytes(weights, model_dtype, storage.linear)


def stored_weights(model: ModelSpec, spec: ModelSpec, dtype: str | None, model_dtype: Dtype) -> StoredWeights | str:
    """A model's weights and how they are stored, as in `describe_weights`; or the reason if that is not known."""
    from kvcalc.throughput.speed import StoredWeights

    weights, reason = _known_weights(model, spec)
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
        from kvcalc.memory.quantization.k_quants import k_quant_scheme

        return k_quant_scheme(asked.name, spec.num_layers)
    from kvcalc.memory.quantization.schemes import UnknownSchemeError, is_mlx, read_scheme, with_expert_dtype

    try:
        if not isinstance(spec.quantization, Mapping):
            raise UnknownSchemeError("a quantization_config that is not an object")
        if is_mlx(spec.quantization):
            from kvcalc.memory.quantization.mlx import read_mlx

            return read_mlx(spec.quantization, spec.model_type, model_dtype.block_bytes)
        return with_expert_dtype(read_scheme(spec.quantization, model_dtype.block_bytes), spec.expert_dtype)
    except UnknownSchemeError as error:
        text = f"{error} is not modelled, so the bytes of the weights are not known; --dtype overrides it"
        notes.append(Note("weights", "type-not-modelled", text))
        return None
