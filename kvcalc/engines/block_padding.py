"""Padding of MLPs in fp8 that devices divide, so that each has whole blocks of one scale: bytes on a device."""

from __future__ import annotations

from kvcalc.engines.rounding import round_up
from kvcalc.engines.starts import BY_INPUTS, scheme_of
from kvcalc.memory.sharding import Bounds, stage_weights
from kvcalc.model.spec import ModelSpec, weights_of
from kvcalc.model.tensors import LINEAR, ModelWeights


def block_padding(spec: ModelSpec, ends: tuple[str, ...], ranks: int, stages: Bounds) -> tuple[tuple[str, int], ...]:
    """The name and the bytes of the padding, for the matrices with names that end so, on the largest pipeline stage.

    Source: DeepseekV4MLP (models/deepseek_v4/nvidia/model.py), _padded_mlp_size (models/dots3_note/nvidia/model.py) and
    _get_block_fp8_mlp_padded_intermediate_size (model_executor/models/bailing_moe_v3.py), vLLM 0.33.0.
    """
    weights = weights_of(spec)
    if weights is None or not ends or ranks == 1:
        return ()
    parts = stage_weights(weights, stages) if len(stages) > 1 else [weights]
    added = max(_added(spec, part, ends, ranks) for part in parts)
    return (("padding of fp8 blocks", added),) if added else ()


def _added(spec: ModelSpec, weights: ModelWeights, ends: tuple[str, ...], ranks: int) -> int:
    scheme, total = scheme_of(spec), 0
    for block in weights.blocks:
        prefix = block.prefix.format(block.numbers[0] if block.numbers else 0)
        for weight in block.weights:
            form = scheme and scheme.format_of(prefix + weight.name, weight.role)
            if not form or form.block is None or weight.role != LINEAR or weight.copies > 1:
                continue
            if f".{weight.name}".endswith(ends):
                if weight.name.endswith(BY_INPUTS):
                    padded = weight.rows, round_up(-(-weight.columns // ranks), form.block[1])
                else:
                    padded = round_up(-(-weight.rows // ranks), form.block[0]), weight.columns
                part = weight.on_rank(ranks)
                more = form.bytes_of(*padded) - form.bytes_of(part.rows, part.columns)
                total += len(block.numbers) * more
    return total
