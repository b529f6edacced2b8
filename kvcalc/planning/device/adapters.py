"""The buffers that an engine keeps for LoRA adapters: bytes on a device."""

from __future__ import annotations

from kvcalc.engines.options import SettingsReader
from kvcalc.errors import ModelError
from kvcalc.memory.sharding import stage_weights
from kvcalc.model.spec import weights_of
from kvcalc.model.tensors import LINEAR, WHOLE, ModelWeights, Weight
from kvcalc.planning.cases.case import Case

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
    size, hidden = case.workload.tensor_parallel_size, weights.embedding.columns
    stages = stage_weights(weights, case.stages) if len(case.stages) > 1 else [weights]
    most = max(_elements(part, size, hidden) for part in stages)
    name = f"LoRA buffers of {slots:,} {'adapter' if slots == 1 else 'adapters'}, rank {rank:,}"
    return ((name, slots * rank * most * _ELEMENT_BYTES),)


def _elements(weights: ModelWeights, size: int, hidden: int) -> int:
    """The elements of A and B for one adapter of rank 1, on one rank."""
    return sum(
        len(block.numbers) * sum(w.copies * _sides(w, size, hidden) for w in block.weights if w.role == LINEAR)
        for block in weights.blocks
        if "{" in block.prefix
    )


def _sides(weight: Weight, size: int, hidden: int) -> int:
    """The inputs and the outputs of a layer on one of `size` ranks."""
    if weight.split == WHOLE or size == 1:
        return weight.columns + weight.rows
    if weight.columns == hidden:
        return weight.columns + weight.on_rank(size).rows
    return -(-weight.columns // size) + weight.rows
