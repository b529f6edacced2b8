"""The `weights` part of a document: the parameters, how they are stored, their bytes, and the towers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from kvcalc.memory.dtypes import DTYPES, FILE_TYPES, GGUF_TYPES, MLX_TYPES, Dtype, gguf_type, parse_weight_dtype
from kvcalc.memory.weights import WeightBytes, count_parameters, plain_bytes, quantized_bytes
from kvcalc.model.drafting import draft_layers_of_file
from kvcalc.model.memo import remembered, remembered_of_two
from kvcalc.model.spec import ModelSpec, weights_of
from kvcalc.model.tensors import ModelWeights
from kvcalc.notes import Note
from kvcalc.records import NamedTuple
from kvcalc.server.case import Case
from kvcalc.units import format_parameters, format_size

if TYPE_CHECKING:
    import kvcalc.documents as documents
    from kvcalc.memory.quantization.formats import Format
    from kvcalc.memory.quantization.schemes import Scheme
    from kvcalc.model.checkpoint import StoredWeights as FoundFiles
    from kvcalc.model.towers.image_rule import ImageRule
    from kvcalc.throughput.speed import StoredWeights


UNKNOWN_BYTES = ", so the bytes of the weights are not known"
"""What a note about an unknown type says besides the type."""

# The share of a GGUF file's parameters that kvcalc need not explain: biases and norms for which there is no key. The
# error of a step's time is no larger.
_UNEXPLAINED = 0.01


def stored_weights(model: ModelSpec, spec: ModelSpec, dtype: str | None, model_dtype: Dtype) -> StoredWeights | str:
    """A model's weights and how they are stored, as in `describe_weights`; or the reason if that is not known."""
    from kvcalc.throughput.speed import StoredWeights

    weights, reason = known_weights(model, spec)
    if weights is None:
        return reason or "the weights are not known"
    if spec.gguf is not None and dtype is None:
        held, counted = spec.gguf.weights, count_parameters(weights)
        if held is None:
            return "the GGUF file has no tensors, or some of its shards are missing"
        sizes = {
            "parameters": (held.parameters, counted.total),
            "parameters active per token": (held.active_parameters_per_token, counted.active_per_token),
        }
        for what, (stored, expected) in sizes.items():
            if abs(stored - expected) > _UNEXPLAINED * expected:
                return (
                    f"the GGUF file has {format_parameters(stored)} {what}, but its metadata give "
                    f"{format_parameters(expected)}: kvcalc does not know what a step reads"
                )
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
    weights: ModelWeights | None, spec: ModelSpec, scheme: Dtype | None, model_dtype: Dtype, notes: list[Note]
) -> tuple[str | None, WeightBytes | None]:
    """The name of the dtype or scheme the weights are stored in, and their bytes."""
    storage = _storage(spec, scheme, model_dtype, notes)
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
            # Transformers 5 has experts in one parameter, which is not a linear layer; older checkpoints quantize them.
            raise UnknownSchemeError("quant_method bitsandbytes of a model with experts")
        scheme = read_scheme(spec.quantization, model_dtype.block_bytes)
        return with_expert_dtype(scheme, spec.quantization.get("moe_quant_algo") or spec.expert_dtype)
    except UnknownSchemeError as error:
        text = f"{error} is not modelled{UNKNOWN_BYTES}; --dtype overrides it"
        notes.append(Note("weights", "type-not-modelled", text))
        return None


# The least share of the counted bytes that believable files have. The count is exact, but some checkpoints leave out
# parts that are made while loading: tied embeddings that the config does not call tied, or positions.
_LEAST_PERCENT = 97
# A smaller excess is not worth a remark: buffers such as rotary frequencies, or the scales of an fp8 cache.
_EXCESS_PER_MILLE = 5


def describe_weights(
    model: ModelSpec, spec: ModelSpec, dtype: str | None, model_dtype: Dtype, notes: list[Note]
) -> documents.Weights:
    """The `weights` part of a document. `model` is the model itself, `spec` is the same model with the what-if.

    `dtype` is the requested one. It overrides the config's quantisation and the files in the model's folder.
    `model_dtype` is the dtype the model computes in. Figures that are not known are null. Then `reason`, or a note
    appended to `notes`, says why.
    """
    weights, remarks = language_model_weights(model, spec, dtype, model_dtype)
    notes += remarks
    return {**weights, "towers": described_towers(model) if model.has_towers and model.gguf is None else []}


@remembered_of_two
def language_model_weights(
    model: ModelSpec, spec: ModelSpec, dtype: str | None, model_dtype: Dtype
) -> tuple[documents.Weights, list[Note]]:
    """`describe_weights` without the towers, and its notes. Both are remembered, so callers must not change them."""
    notes: list[Note] = []
    if spec.gguf is not None:
        return _describe_file(model, spec, dtype, notes), notes
    weights, reason = known_weights(model, spec)
    if reason is not None and spec.attention != model.attention:
        notes.append(Note("weights", "other-attention", reason))
    scheme = parse_weight_dtype(dtype)
    remarks: list[Note] = []
    name, size = bytes_of(weights, spec, scheme, model_dtype, remarks)
    counted = None if weights is None else count_parameters(weights)
    total, active = (None, None) if size is None else size
    if total is not None and active is not None:
        total += file_draft_bytes(spec, scheme, model_dtype)
        total, active = (round(each * size_factor(spec)) for each in (total, active))
    source = None if total is None else "config"
    if scheme is None and spec.attention == model.attention and spec.checkpoint is not None:
        stored = files_of(model)
        if stored is not None:
            held, said = believed_bytes(stored, total, _tower_bytes(model))
            notes += said
            if held is not None:
                # The size is known, so it does not matter if the config's quantization is not supported.
                total, source, remarks = held, "safetensors", []
                active = None if active is None else min(active, held)
    if scheme is None and spec.attention == model.attention and model.published_bytes is not None:
        from kvcalc.model.towers import tower_parameters

        towers = _ELEMENT_BYTES * tower_parameters(model) if model.has_towers else 0
        total, source, remarks = model.published_bytes - towers, "published", []
        active = None if active is None else min(active, total)
    notes += remarks
    parameters = (None,) * 3 if counted is None else (counted.total, counted.active_per_token, counted.input_embedding)
    return _document(parameters, (total, active), name, source, reason), notes


def file_draft_bytes(spec: ModelSpec, scheme: Dtype | None, model_dtype: Dtype) -> int:
    """The bytes of the MTP layers in the GGUF file that the model's name stands for.

    No device holds them by default.
    """
    held = draft_layers_of_file(spec)
    size = None if held is None else bytes_of(held, spec, scheme, model_dtype, [])[1]
    return 0 if size is None else size[0]


def size_factor(spec: ModelSpec) -> float:
    """The size of a file whose publisher chooses the types of its tensors, as a multiple of its plain type's."""
    file = spec.named_file
    return 1.0 if file is None or file.size_range is None else file.size_range[0]


@remembered
def files_of(model: ModelSpec) -> FoundFiles | None:
    """The checkpoint in the model's folder, or None if there is none."""
    if model.checkpoint is None:
        return None
    from kvcalc.model.checkpoint import read_checkpoint

    return read_checkpoint(model.checkpoint, model.num_layers if model.num_draft_layers else None)


def _tower_bytes(model: ModelSpec) -> int | None:
    """The bytes of the model's towers in 16 bits. None if the files may hold them in fewer, or a rule is not known."""
    if not model.has_towers:
        return 0
    sizes = [tower["bytes"] for tower in described_towers(model)]
    if model.quantization or not all(isinstance(size, int) for size in sizes):
        return None
    return sum(size for size in sizes if isinstance(size, int))


def _describe_file(model: ModelSpec, spec: ModelSpec, dtype: str | None, notes: list[Note]) -> documents.Weights:
    """The weights of a GGUF file from its header, or their size in another dtype of 16 or 32 bits."""
    held = spec.gguf.weights if spec.gguf else None
    reason = None
    if spec.attention != model.attention:
        held, reason = None, f"the weights of {model.name} are not counted with this attention"
        notes.append(Note("weights", "other-attention", reason))
    elif held is None:
        reason = "the file has no tensors, or some of its shards are missing"
    scheme = parse_weight_dtype(dtype)
    name: str | None = None if held is None else held.dtype
    total, active = (None, None) if held is None else (held.bytes, held.active_bytes_per_token)
    source = None if held is None else "gguf"
    if scheme is not None:
        name, total, active, source = scheme.name, None, None, None
        if held is not None and scheme.is_float:
            total = held.parameters * scheme.block_bytes
            active = held.active_parameters_per_token * scheme.block_bytes
            source = "gguf"
        elif held is not None:
            text = f"--dtype {scheme.name} is not modelled for a GGUF file{UNKNOWN_BYTES}"
            notes.append(Note("weights", "type-not-modelled", text))
    parameters = (None,) * 3 if held is None else (
        held.parameters, held.active_parameters_per_token, held.input_embedding_parameters
    )  # fmt: skip
    return _document(parameters, (total, active), name, source, reason)


# Parts of the names of modules that quantized releases often leave in 16 bits.
_OFTEN_IN_16_BITS = ("attn", "attention", "shared_expert")


def most_in_16_bits(spec: ModelSpec, part: ModelWeights, model_dtype: Dtype, size: int) -> int:
    """How much larger than `size` bytes a part of a quantized release is whose attention and shared experts stay in 16
    bits. 0 if its scheme is not modelled."""
    storage = _storage(spec, None, model_dtype, [])
    if storage is None or storage.scheme is None:
        return 0
    form = storage.scheme.format_of

    def format_of(name: str, role: str) -> Format | None:
        return None if any(module in name for module in _OFTEN_IN_16_BITS) else form(name, role)

    return max(quantized_bytes(part, model_dtype, storage.scheme._replace(format_of=format_of))[0] - size, 0)


def _document(
    parameters: tuple[int | None, ...], sizes: tuple[int | None, int | None], dtype: str | None, source: str | None,
    reason: str | None,
) -> documents.Weights:  # fmt: skip
    """The `weights` part of a document, without the towers.

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
        "bytes_source": cast(Any, source),
        "reason": reason,
        "towers": [],
    }


def believed_bytes(stored: FoundFiles, counted: int | None, towers: int | None) -> tuple[int | None, list[Note]]:
    """The bytes of the files if they are complete and plausible, else None; and notes that name the files.

    `counted` and `towers` are the sizes of the language model and of its towers according to the config, or None if
    they are not known. Files are not believed if their tensors outside towers are below 97 % of `counted`, or if they
    have tensors of towers, but below 97 % of `towers`: without any, they are a checkpoint of the language model alone.
    More is believed: weights in another type. Layers for multi-token prediction do not count, as in a config: only
    drafting loads them.
    """
    notes = [Note("weights", "adapter", remark) for remark in stored.adapters]
    size = None if stored.bytes is None else stored.bytes - stored.draft_bytes
    if size is None:
        if stored.trouble is not None:
            notes.append(_not_believed(f"{stored.name}: incomplete: {stored.trouble}", counted))
        return None, notes
    if counted is None:
        return size, notes
    text_bytes = size - stored.tower_bytes
    for num_bytes, described, of_what in (
        (text_bytes, counted, ""),
        (stored.tower_bytes, towers if towers and stored.tower_bytes else 0, " for its towers"),
    ):
        if num_bytes * 100 < described * _LEAST_PERCENT:
            text = (
                f"{stored.name}: has {format_size(num_bytes)} of the {format_size(described)} that the config describes"
            )
            notes.append(_not_believed(text + of_what, counted))
            return None, notes
    more = size - counted
    if more * 1000 > counted * _EXCESS_PER_MILLE:
        text = f"{stored.name}: has {format_size(more)} more than the language model of the config, for example a "
        text += "vision tower, or weights of another type"
        notes.append(Note("weights", "larger-files", text))
    return size, notes


def _not_believed(text: str, counted: int | None) -> Note:
    instead = "the size is not known" if counted is None else "the size is computed from the config"
    return Note("weights", "incomplete-files", f"{text}; {instead}")


_ELEMENT_BYTES = 2
TOWER_NOT_COUNTED = "tower-not-counted"


class LoadedTowers(NamedTuple):
    """The towers on a device: a name and bytes for each, notes about those that are not counted, and what the vision
    tower needs in a step. `most_unknown_bytes` are the most that a tower takes whose size is not known."""

    lines: tuple[tuple[str, int], ...] = ()
    notes: tuple[Note, ...] = ()
    images: ImageRule | None = None
    most_unknown_bytes: int = 0

    @property
    def bytes(self) -> int:
        """The bytes of all lines."""
        return sum(size for _, size in self.lines)


def loaded_towers(case: Case) -> LoadedTowers:
    """The towers that the case's engine loads. Quantized checkpoints leave them in 16 bits."""
    model = case.model
    if not model.has_towers or model.gguf is not None or not case.engine_class.loads_towers:
        return LoadedTowers()
    if "language-model-only" in case.settings:
        return LoadedTowers()
    from kvcalc.model.towers import most_parameters, towers_of  # models of text alone need neither
    from kvcalc.model.towers.images import image_rule

    lines, notes = [], []
    for tower in towers_of(model):
        if tower.parameters is None:
            notes.append(Note("fit", TOWER_NOT_COUNTED, f"the {tower.name} is not counted: {tower.reason}"))
        else:
            lines.append((tower.name, tower.on_rank(case.layout.tensor_parallel_size) * _ELEMENT_BYTES))
    images = None if model.multimodal is None else image_rule(model)
    described, _ = language_model_weights(model, case.spec, case.question.dtype, case.workload.model_dtype)
    if not notes or described["bytes_source"] == "safetensors":  # the files in the model's folder hold the tower
        return LoadedTowers(tuple(lines), tuple(notes), images)
    most = _ELEMENT_BYTES * most_parameters(described["parameters"])
    more = f"; it may take up to {format_size(most)} per device and memory for images"
    notes = [note._replace(text=f"{note.text}{more}") for note in notes]
    return LoadedTowers(tuple(lines), tuple(notes), images, most)


@remembered
def described_towers(model: ModelSpec) -> list[documents.Tower]:
    """The `towers` part of the weights in a document."""
    from kvcalc.model.towers import towers_of

    return [
        {
            "name": tower.name,
            "type": tower.kind,
            "parameters": tower.parameters,
            "bytes": None if tower.parameters is None else tower.parameters * _ELEMENT_BYTES,
            "reason": tower.reason,
        }
        for tower in towers_of(model)
    ]
