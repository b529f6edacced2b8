"""The weights of one device: the share of a rank, of a pipeline stage, or of any part of the model; and the
buffers that an engine keeps for LoRA adapters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvcalc.engines.options import SettingsReader
from kvcalc.errors import ModelError
from kvcalc.memory.dtypes import Dtype, parse_weight_dtype
from kvcalc.memory.sharding import Bounds, Width, shard, stage_weights, width_of
from kvcalc.model.layout import Layout
from kvcalc.model.memo import remembered_of_two
from kvcalc.model.spec import ModelSpec, weights_of
from kvcalc.model.tensors import LINEAR, WHOLE, ModelWeights, Weight
from kvcalc.records import NamedTuple
from kvcalc.server.case import Case
from kvcalc.server.weights import (
    UNKNOWN_BYTES,
    bytes_of,
    file_draft_bytes,
    known_weights,
    language_model_weights,
    most_in_16_bits,
    size_factor,
)

if TYPE_CHECKING:
    from kvcalc.engines.account import DividedRows


class DeviceWeights(NamedTuple):
    """The weights on the device that holds the most: their bytes, the bytes every rank holds, and their widths.

    If the bytes are not known, `bytes` is None and `reason` says why. `draft_bytes` of them are weights that only draft
    tokens, and `others` are towers and adapters: a name and the bytes of each. `most_more_bytes` is how much larger the
    weights may be if a quantized release leaves more modules in 16 bits than its recipe says.
    """

    bytes: int | None
    replicated_bytes: int
    width: Width | None
    reason: str | None
    draft_bytes: int = 0
    others: tuple[tuple[str, int], ...] = ()
    most_more_bytes: int = 0


def file_excess(
    model: ModelSpec, spec: ModelSpec, dtype: str | None, model_dtype: Dtype
) -> tuple[int, int]:  # fmt: skip
    """The bytes of the files in the model's folder beyond the language model, and all their bytes. 0 without files."""
    described, _ = language_model_weights(model, spec, dtype, model_dtype)
    weights, _ = known_weights(model, spec)
    held = described["bytes"]
    if described["bytes_source"] != "safetensors" or weights is None or held is None:
        return 0, 0
    _, size = bytes_of(weights, spec, None, model_dtype, [])
    return (0, 0) if size is None else (max(held - size[0], 0), held)


@remembered_of_two
def device_weights(
    model: ModelSpec, spec: ModelSpec, dtype: str | None, model_dtype: Dtype, layout: Layout, stages: Bounds,
    spread_names: frozenset[str] = frozenset(), tables_on_host: bool = False,
) -> DeviceWeights:  # fmt: skip
    """The weights of the rank that holds most, in the pipeline stage with the largest weights.

    `stages` has the layers of each stage (`Engine.stage_bounds`), and `spread_names` are as in `shard`. `model`, `spec`
    and `dtype` are as in `describe_weights`. Bytes read from files are split in the same proportion as the counted
    bytes. `tables_on_host` is whether the input embedding is in host memory.
    """
    described, notes = language_model_weights(model, spec, dtype, model_dtype)
    ranks, copies = layout.tensor_parallel_size, layout.attention_copies
    if spec.gguf is not None:
        if copies > 1:
            return DeviceWeights(None, 0, None, "a GGUF file is not split among DP ranks")
        return _file_on_device(spec, described, ranks, len(stages), tables_on_host)
    weights, reason = known_weights(model, spec)
    if weights is None or described["bytes"] is None:
        untyped = (note.text.replace(UNKNOWN_BYTES, "") for note in notes if note.code == "type-not-modelled")
        width = None if weights is None else width_of(weights, ranks)
        return DeviceWeights(None, 0, width, reason or next(untyped, "their dtype is not modelled"))
    size_of, parts = _sizer(spec, dtype, model_dtype), _parts(weights, stages, tables_on_host)
    sizes = [(size_of(shard(part, layout, spread_names)), size_of(part), part) for part in parts]
    share, whole, part = max(sizes, key=lambda row: row[:2])
    # The bytes that all ranks hold: what is left of a share beyond its part of the weights that are split.
    number = ranks if ranks > 1 else copies
    held = share if 1 in (ranks, copies) else size_of(shard(part, Layout(ranks)))
    counted, loaded = size_of(weights), described["bytes"] - _unloaded(spec, dtype, model_dtype)
    if loaded != counted and counted:
        share, whole, held = (-(-size * loaded // counted) for size in (share, whole, held))
    replicated = -(-(held * number - whole) // (number - 1)) if number > 1 else 0
    more = 0
    if dtype is None and spec.has_unread_recipe:
        more = most_in_16_bits(spec, shard(part, layout, spread_names), model_dtype, share)
    return DeviceWeights(share, max(replicated, 0), width_of(weights, ranks), None, most_more_bytes=more)


def _unloaded(spec: ModelSpec, dtype: str | None, model_dtype: Dtype) -> int:
    """The bytes of a described file that only its drafts need (`drafter.draft_weights` counts them)."""
    return round(file_draft_bytes(spec, parse_weight_dtype(dtype), model_dtype) * size_factor(spec))


def _sizer(spec: ModelSpec, dtype: str | None, model_dtype: Dtype) -> Callable[[ModelWeights], int]:
    """The bytes of parts of the weights as a function. 0 if they are not known."""
    scheme = parse_weight_dtype(dtype)

    def size_of(part: ModelWeights) -> int:
        _, size = bytes_of(part, spec, scheme, model_dtype, [])
        return 0 if size is None else size[0]

    return size_of


def _parts(weights: ModelWeights, stages: Bounds, tables_on_host: bool) -> list[ModelWeights]:
    """The weights of every pipeline stage."""
    parts = stage_weights(weights, stages) if len(stages) > 1 else [weights]
    if not tables_on_host:
        return parts
    from kvcalc.engines.placement import without_tables

    return [without_tables(part, number == len(parts)) for number, part in enumerate(parts, 1)]


def stage_sizes(
    model: ModelSpec, spec: ModelSpec, dtype: str | None, model_dtype: Dtype, stages: Bounds, tables_on_host: bool
) -> list[int] | str:
    """The bytes of the weights in every pipeline stage, or the reason if they are not known.

    The arguments are as in `device_weights`. A GGUF file is divided by its tensors.
    """
    if spec.gguf is not None:
        held = spec.gguf.weights.parts if spec.gguf.weights is not None and dtype is None else None
        if held is None:
            return "the file does not say which weights belong to which layer"
        sizes = [sum(map(sum, held.layers[first : end + 1])) for first, end in stages]
        sizes[-1] += held.output + held.tied_head
        sizes[0] += 0 if tables_on_host else held.input - (held.tied_head if len(sizes) == 1 else 0)
        return sizes
    weights, reason = known_weights(model, spec)
    if weights is None:
        return reason or "the weights are not known"
    parts = _parts(weights, stages, tables_on_host)
    return part_bytes(model, spec, dtype, model_dtype, parts) or "the bytes of the weights are not known"


def row_sizes(
    model: ModelSpec, spec: ModelSpec, dtype: str | None, model_dtype: Dtype, rows: DividedRows, num_stages: int,
    tables_on_host: bool,
) -> list[int] | str:  # fmt: skip
    """The bytes of the weights on every device that has a layer or the output, or the reason if they are not known.

    The matrices are divided by rows, and the layers among `num_stages` devices. The other arguments are as in
    `device_weights`.
    """
    weights = weights_of(spec)
    if weights is None:
        return "the bytes of the weights are not known"
    # The last one is the whole table, of which the devices have rows if it is also the output head.
    whole = [*rows.parts, ModelWeights(weights.embedding, weights.tied, ())]
    parts = part_bytes(model, spec, dtype, model_dtype, whole)
    if parts is None:
        return "the bytes of the weights are not known"
    *sizes, table = parts
    sizes = [size + table * held // weights.embedding.rows for size, held in zip(sizes, rows.head_rows)]
    if not tables_on_host:
        sizes[0] += table if not weights.tied else 0
    if any(sizes[num_stages:]):
        return "--split-mode row: a device with rows and without layers is not modelled; use more even shares"
    return sizes


def part_bytes(
    model: ModelSpec, spec: ModelSpec, dtype: str | None, model_dtype: Dtype, parts: Sequence[ModelWeights]
) -> list[int] | None:
    """The bytes of parts of the weights, or None if they are not known.

    The arguments are as in `describe_weights`. Bytes read from files are divided in the same proportion as the counted
    bytes. The input embedding of a part has the type that it has in the whole model.
    """
    described, _ = language_model_weights(model, spec, dtype, model_dtype)
    weights, _ = known_weights(model, spec)
    if weights is None or described["bytes"] is None:
        return None
    size_of = _sizer(spec, dtype, model_dtype)
    whole, table = size_of(weights), size_of(ModelWeights(weights.embedding, weights.tied, ()))
    none = weights.embedding._replace(rows=0)
    sizes = [
        size_of(ModelWeights(none, part.tied, part.blocks)) + (table if part.embedding.rows else 0) for part in parts
    ]
    loaded = described["bytes"] - _unloaded(spec, dtype, model_dtype)
    return [-(-size * loaded // whole) for size in sizes] if loaded != whole else sizes


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


_ELEMENT_BYTES = 2


def adapter_buffers(case: Case) -> tuple[tuple[str, int], ...]:
    """The name and the bytes of the buffers, on the pipeline stage that holds most.

    Every linear layer has one A and one B per slot, as wide as the largest rank; experts have one of each per expert.
    A column-parallel layer splits B over the ranks and keeps A whole, a row-parallel layer splits A and keeps B whole.
    Source: BaseLinearLayerWithLoRA.create_lora_weights (lora/layers/base_linear.py) and FusedMoEWithLoRA
    (lora/layers/fused_moe.py), vLLM; LoRAMemoryPool.get_lora_A_shape and get_lora_B_shape (srt/lora/mem_pool.py),
    SGLang. The adapters themselves stay in host memory until a slot takes them. Raises ModelError (exit 3) if the
    model's weights are not counted.
    """
    weights = weights_of(case.spec)
    if weights is None:
        raise ModelError(f"--max-lora-rank: the linear layers of {case.spec.name} are not known")
    given, option = SettingsReader(case.engine_name, case.settings), case.engine_class.lora_option
    if option is None:
        raise ValueError(f"{case.engine_name} has no option for adapters")
    slots, rank = given.count(option), given.count("max-lora-rank")
    size, hidden = case.layout.tensor_parallel_size, weights.embedding.columns
    stages = stage_weights(weights, case.stages) if len(case.stages) > 1 else [weights]
    most = max(_elements(part, size, hidden) for part in stages)
    name = f"LoRA buffers of {slots:,} {'adapter' if slots == 1 else 'adapters'}, rank {rank:,}"
    return ((name, slots * rank * most * _ELEMENT_BYTES),)


def _elements(weights: ModelWeights, size: int, hidden: int) -> int:
    """The elements of A and B for one adapter of rank 1, on one rank."""
    return sum(
        len(block.numbers) * sum(w.copies * lora_dims(w, size, hidden) for w in block.weights if w.role == LINEAR)
        for block in weights.blocks
        if block.in_layers
    )


def lora_dims(weight: Weight, size: int, hidden: int) -> int:
    """The inputs and the outputs of a layer on one of `size` ranks."""
    if weight.split == WHOLE or size == 1:
        return weight.columns + weight.rows
    if weight.columns == hidden:
        return weight.columns + weight.on_rank(size).rows
    return -(-weight.columns // size) + weight.rows
