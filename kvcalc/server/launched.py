"""What an engine's release and settings change about the launches of a step: kernels for experts, CUDA graphs, LoRA."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcalc.engines.options import SettingsReader, has_adapters
from kvcalc.model.tensors import LINEAR
from kvcalc.releases import release_of
from kvcalc.server.device_weights import lora_dims
from kvcalc.throughput.adapters import AdapterKernels, Adapters, adapted_products
from kvcalc.throughput.roofline import SpeedModel
from kvcalc.throughput.steps import first_release

if TYPE_CHECKING:
    from kvcalc.model.tensors import ModelWeights
    from kvcalc.server.case import Case

_ELEMENT_BYTES = 2


def with_launches(case: Case, weights: ModelWeights, model: SpeedModel) -> SpeedModel:
    """`model` as the case's engine launches its kernels."""
    engine, counts, constants = case.engine_class, model.counts, model.constants
    fused = _fused_launches(case, model)
    if fused:
        counts = counts._replace(launches=counts.launches - fused)
    if engine.adapter_kernels is not None and has_adapters(case.settings):
        counts = counts.with_adapters(_adapters(case, weights, AdapterKernels(*engine.adapter_kernels)))
    eager = engine.eager_launches(case.settings)
    if eager is not None:
        seconds = max(eager, constants.prompt_launch_seconds)
        constants = constants._replace(decode_launch_seconds=seconds, prompt_launch_seconds=seconds)
    is_same = counts is model.counts and constants is model.constants
    return model if is_same else SpeedModel(counts, model.gpu, constants)


def _fused_launches(case: Case, model: SpeedModel) -> int:
    """The small kernels that the engine's kernels for experts save in all layers."""
    release, counts = release_of(case.question.engine), model.counts
    types = {matrices.kind for experts in counts.experts for matrices in experts.matrices}
    saved = 0
    for kind, device_class, since, launches in case.engine_class.fused_experts:
        is_in_use = release is None or release >= first_release(case.engine_name, since)
        if is_in_use and kind in types and device_class == model.gpu.device_class:
            saved += counts.moe_layers * launches
    return saved


def _adapters(case: Case, weights: ModelWeights, kernels: AdapterKernels) -> Adapters:
    """The adapters on a rank, as wide as the largest rank that the settings allow."""
    given, hidden = SettingsReader(case.engine_name, case.settings), weights.embedding.columns
    size = case.layout.tensor_parallel_size
    bytes_per_element = given.count("max-lora-rank") * _ELEMENT_BYTES
    dense, experts = 0, dict[tuple[int, int], int]()
    for block in weights.blocks:
        if not block.in_layers:
            continue
        for weight in block.weights:
            if weight.role == LINEAR and weight.read:
                size_bytes = len(block.numbers) * weight.copies * lora_dims(weight, size, hidden) * bytes_per_element
                if weight.copies == 1:
                    dense += size_bytes
                else:
                    key = weight.copies, min(weight.read, weight.copies)
                    experts[key] = experts.get(key, 0) + size_bytes
    slots = given.count(str(case.engine_class.lora_option))
    rows = tuple((*key, float(total)) for key, total in experts.items())
    return Adapters(kernels, slots, adapted_products(weights), float(dense), rows)
