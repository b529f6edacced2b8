"""One device's share of a model: the layers of its pipeline stage, its shard of the weights, and the width of its
widest layer, which determines a step's activations."""

from __future__ import annotations

from collections.abc import Iterable

from kvcalc.model.layout import Layout
from kvcalc.model.memo import remembered
from kvcalc.model.spec import ModelSpec
from kvcalc.model.tensors import LOOKUP, NORM, OTHER, ROUTER, Block, ModelWeights, Weight
from kvcalc.records import NamedTuple

# Weights that do not affect the size of activations: norms, routers, vectors, and lookup tables except the embedding.
_BESIDE = (NORM, ROUTER, OTHER, LOOKUP)

Bounds = tuple[tuple[int, int], ...]
"""The first and last layer of every pipeline stage."""


def longer_before_last(num_layers: int, stages: int) -> list[int]:
    """Layers per stage: the remaining layers go to the stages before the last one, one layer each.

    vLLM cuts a model like this. It is also the default for engines without their own rule.
    Source: get_pp_indices, distributed/utils.py, vLLM 0.33.0.
    """
    sizes = [num_layers // stages] * stages
    for place in range(2, num_layers % stages + 2):
        sizes[-place] += 1
    return sizes


def longer_first(num_layers: int, stages: int) -> list[int]:
    """Layers per stage: the remaining layers go to the first stages, one layer each."""
    size, rest = divmod(num_layers, stages)
    return [size + 1] * rest + [size] * (stages - rest)


def longer_last(num_layers: int, stages: int) -> list[int]:
    """Layers per stage: the remaining layers go to the last stages, one layer each."""
    return longer_first(num_layers, stages)[::-1]


def bounds_of(sizes: Iterable[int]) -> Bounds:
    """The bounds of stages with these numbers of layers. In an empty stage the last layer is before the first."""
    bounds, first = [], 0
    for size in sizes:
        bounds.append((first, first + size - 1))
        first += size
    return tuple(bounds)


def whole_of(share: ModelSpec) -> ModelSpec:
    """The share that a pipeline stage was cut from, or `share` itself if it is not a stage."""
    return share.whole or share


@remembered
def stages_of(share: ModelSpec, bounds: Bounds) -> list[ModelSpec]:
    """`share` cut into pipeline stages. Layers keep their numbers."""
    stages = []
    for first, last in bounds:
        kept = (
            group._replace(first=max(group.first, first), last=min(group.last, last))
            for group in share.layers
            if group.first <= last and group.last >= first
        )
        stages.append(share._replace(layers=tuple(kept), whole=share))
    return stages


class Width(NamedTuple):
    """The sizes that determine a step's activations.

    `module_elements` is the number of elements one token takes in the widest module of a layer: the module's inputs
    and its intermediate values together. `streams` is the number of residuals of the hidden size (hyper-connections).
    """

    module_elements: int
    hidden_size: int
    vocab_size: int
    num_layers: int
    has_experts: bool
    streams: int = 1


def shard(weights: ModelWeights, layout: Layout, spread_names: frozenset[str] = frozenset()) -> ModelWeights:
    """The weights on the rank of a stage that holds most. Every weight defines how it is split.

    With several copies of the attention, routed experts are distributed over the layout's groups of ranks, and each
    expert is split over the ranks of its group. The weights named in `spread_names` are split over the ranks of all
    copies. The rest is in every copy.
    """
    ranks, groups = layout.ranks, layout.expert_parallel_size
    if ranks == 1:
        return weights

    def on_rank(weight: Weight) -> Weight:
        if weight.copies > 1 and layout.attention_copies > 1:
            return weight.on_rank(ranks // groups)._replace(copies=-(-weight.copies // groups))
        return weight.on_rank(ranks if weight.name in spread_names else layout.tensor_parallel_size)

    blocks = [Block(block.prefix, block.numbers, tuple(map(on_rank, block.weights))) for block in weights.blocks]
    return ModelWeights(on_rank(weights.embedding), weights.tied, tuple(blocks))


def stage_weights(weights: ModelWeights, bounds: Bounds) -> list[ModelWeights]:
    """The weights of every pipeline stage.

    The first stage has the embedding, and the last stage has everything after the layers. A tied embedding is on both.
    Layers of an encoder that is deeper than the decoder, which the stages divide, are on the last.
    """
    stages = []
    for place, (first, last) in enumerate(bounds):
        is_last = place == len(bounds) - 1
        blocks = []
        for block in weights.blocks:
            if block.in_layers:
                numbers = [number for number in block.numbers if first <= number and (is_last or number <= last)]
                if numbers:
                    blocks.append(Block(block.prefix, numbers, block.weights))
            elif is_last:
                blocks.append(block)
        holds_table = place == 0 or (is_last and weights.tied)
        embedding = weights.embedding if holds_table else weights.embedding._replace(rows=0)
        stages.append(ModelWeights(embedding, weights.tied, tuple(blocks)))
    return stages


def width_of(weights: ModelWeights, size: int) -> Width:
    """The widths of the whole `weights` on one of `size` ranks.

    Modules are split. The hidden size and the vocabulary are not, because the values between modules and the logits
    are gathered. Experts hold one row of the hidden size for each expert a token is sent to (fused_moe.py, vLLM
    0.33.0).
    """
    hidden = weights.embedding.columns
    widest, layers, has_experts, streams = 0, 0, False, 1
    for block in weights.blocks:
        if not block.in_layers:
            continue
        layers = max(layers, max(block.numbers, default=-1) + 1)
        modules: dict[str, list[int]] = {}
        for weight in block.weights:
            if weight.name.endswith("_hc.fn"):
                streams = weight.columns // hidden
            if weight.role in _BESIDE or weight.read == 0:
                continue
            has_experts = has_experts or weight.copies > 1
            times, given = (weight.read, weight.read * hidden) if weight.copies > 1 else (1, 0)
            # The rows that enter (gate and up, or q, k and v, all at once), the intermediate values, and the output.
            module = modules.setdefault(weight.name.rpartition(".")[0], [0, 0, given])
            if weight.columns == hidden:
                module[0] += times * weight.rows
            else:
                module[1] = max(module[1], times * weight.columns)
        for entering, middle, given_out in modules.values():
            widest = max(widest, max(-(-entering // size), given_out) + -(-middle // size))
    return Width(widest, hidden, weights.embedding.rows, layers, has_experts, streams)
