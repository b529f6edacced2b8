"""What an engine's settings change about the launches of a step: no CUDA graphs, and LoRA adapters."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcalc.engines.options import SettingsReader, has_adapters
from kvcalc.model.tensors import LINEAR
from kvcalc.planning.device.device_weights import lora_dims
from kvcalc.throughput.adapters import AdapterKernels, Adapters, adapted_products
from kvcalc.throughput.roofline import SpeedModel

if TYPE_CHECKING:
    from kvcalc.model.tensors import ModelWeights
    from kvcalc.planning.cases.case import Case

_ELEMENT_BYTES = 2


def with_launches(case: Case, weights: ModelWeights, model: SpeedModel) -> SpeedModel:
    """`model` as the case's settings launch its kernels."""
    engine, counts, constants = case.engine_class, model.counts, model.constants
    if engine.adapter_kernels is not None and has_adapters(case.settings):
        counts = counts.with_adapters(_adapters(case, weights, AdapterKernels(*engine.adapter_kernels)))
    if engine.eager_option in case.settings:
        seconds = max(engine.eager_launch_seconds, constants.prompt_launch_seconds)
        constants = constants._replace(decode_launch_seconds=seconds, prompt_launch_seconds=seconds)
    is_same = counts is model.counts and constants is model.constants
    return model if is_same else SpeedModel(counts, model.gpu, constants)


def _adapters(case: Case, weights: ModelWeights, kernels: AdapterKernels) -> Adapters:
    """The adapters on a rank, as wide as the largest rank that the settings allow."""
    given, hidden = SettingsReader(case.engine_name, case.settings), weights.embedding.columns
    size = case.workload.tensor_parallel_size
    bytes_per_element = given.count("max-lora-rank") * _ELEMENT_BYTES
    dense, experts = 0, dict[tuple[int, int], int]()
    for block in weights.blocks:
        if "{" not in block.prefix:
            continue
        for weight in block.weights:
            if weight.role == LINEAR and weight.read:
                held = len(block.numbers) * weight.copies * lora_dims(weight, size, hidden) * bytes_per_element
                if weight.copies == 1:
                    dense += held
                else:
                    key = weight.copies, min(weight.read, weight.copies)
                    experts[key] = experts.get(key, 0) + held
    slots = given.count(str(case.engine_class.lora_option))
    rows = tuple((*key, float(held)) for key, held in experts.items())
    return Adapters(kernels, slots, adapted_products(weights), float(dense), rows)
