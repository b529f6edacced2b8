"""DP attention (`--dp`): DP ranks are groups of devices that each hold their own requests and share the experts.

Each of the `data_parallel_size` DP ranks is a group of `tensor_parallel_size` devices with all attention weights and
the cache of its own requests. The routed experts are split over the devices of all DP ranks. It is one server and one
replica of the model. Whole copies of the model are called replicas; DP ranks of a model without experts are such copies
behind one server.
Source: docs/serving/data_parallel_deployment.md and expert_parallel_deployment.md of vLLM.
"""

from __future__ import annotations

from kvcalc.engines import engines_that
from kvcalc.engines.engine import Engine
from kvcalc.errors import LayoutError, ModelError
from kvcalc.model.layout import Layout
from kvcalc.model.memo import remembered
from kvcalc.model.spec import ModelSpec, blocks_of, weights_of
from kvcalc.model.tensors import HEAD


def with_dp_ranks(model: ModelSpec, layout: Layout, experts: int | None, engine: Engine) -> Layout:
    """The layout with its experts in `experts` groups of devices, for several copies of the attention.

    By default each device of a stage is a group. Copies that divide a prompt divide the experts too. DP ranks of a
    model without experts are whole copies of it. LayoutError (exit 2) if the engine or the model cannot be split this
    way, and ModelError (exit 3) if it is not known whether the model has experts.
    """
    replicas, size, ranks = layout.data_parallel_size, layout.tensor_parallel_size, layout.ranks
    if replicas > 1 and not engine.has_dp_ranks:
        raise LayoutError(
            f"--dp {replicas}: {engine.name} has no DP ranks",
            f"--engine {', '.join(engines_that(lambda other: other.has_dp_ranks))}",
        )
    if size > 1 and not engine.splits_dp_ranks:
        raise LayoutError(
            f"--dp {replicas} --tp {size}: every device is a DP rank in {engine.name}",
            f"use --dp {ranks}, or leave out --dp",
        )
    if weights_of(model) is None:
        raise ModelError(f"{model.name}: its experts are not known, so they cannot be split: {model.weights_reason}")
    most = most_experts(model)
    if not most:
        if experts is not None:
            raise LayoutError(f"--ep {experts}: {model.name} has no experts", "leave it out")
        if engine.splits_dp_ranks:
            return layout._replace(divides_experts=False)
        # Whether its MLPs are split or copied differs between its models and releases (GatedMLP, modules/gated_mlp.py).
        raise LayoutError(
            f"--dp {replicas}: {model.name} has no experts to split, and DP ranks of such models are not "
            f"modelled for {engine.name}",
            f"remove --dp: with --tp 1 --num-gpus {replicas} the devices form {replicas} replicas",
        )
    layout = layout.with_experts(experts)
    groups = layout.expert_parallel_size
    if groups > most or (most % groups and not engine.splits_uneven_experts):
        given = f"--dp {replicas}" if layout.prompt_ranks == 1 else f"{ranks} devices"
        given = given if experts is None else f"--ep {groups}"
        even = "" if groups > most else f" evenly, as {engine.name} requires"
        fitting = [str(n) for n in range(1, min(ranks, most) + 1) if ranks % n == 0 and most % n == 0]
        raise LayoutError(
            f"{given}: the {most} experts of a layer cannot be divided among {groups} devices{even}",
            f"use --ep {' or '.join(fitting[-2:])}",
        )
    return layout


def spread_names(spec: ModelSpec, engine: Engine, layout: Layout) -> frozenset[str]:
    """The names of the weights, besides the experts, that the devices of all copies of the attention split."""
    if layout.attention_copies == 1 or not (engine.spreads_mlps or engine.spreads_head) or not most_experts(spec):
        return frozenset()
    names = _mlp_and_head(spec, engine.spreads_mlps)
    # Only with DP ranks, the embedding is in each (get_embedding_tp_kwargs, SGLang 0.5.23).
    return names if layout.data_parallel_size > 1 or not names else names | _embedding(spec)


@remembered
def most_experts(spec: ModelSpec) -> int:
    """The experts of a layer; of the layer with the most if they differ. 0 if the model has none."""
    return max((w.copies for block in blocks_of(spec) for w in block.weights if w.copies > 1), default=0)


@remembered
def _embedding(spec: ModelSpec) -> frozenset[str]:
    weights = weights_of(spec)
    return frozenset() if weights is None else frozenset([weights.embedding.name])


@remembered
def _mlp_and_head(spec: ModelSpec, with_mlp: bool) -> frozenset[str]:
    """The names of the weights of the output head, and of MLPs without experts, that ranks split."""
    head = (weight.name for block in blocks_of(spec) for weight in block.weights if weight.role == HEAD)
    mlp = (weight for group in spec.layers if with_mlp for weight in group.layer.mlp)
    return frozenset([*head, *(w.name for w in mlp if w.copies == 1 and w.on_rank(2) != w)])
