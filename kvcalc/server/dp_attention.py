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
from kvcalc.memory.sharding import NOT_SPREAD, Spread
from kvcalc.memory.workload import Workload
from kvcalc.model.memo import remembered
from kvcalc.model.spec import ModelSpec, weights_of
from kvcalc.model.tensors import HEAD

WHOLE_COPIES = "whole-copies"
"""The code of the note that the DP ranks are whole copies of the model."""


def with_dp_ranks(
    model: ModelSpec, replicas: int, expert_parallel_size: int | None, engine: Engine, workload: Workload
) -> Workload:
    """The workload with `replicas` DP ranks, and the experts in `expert_parallel_size` groups of devices.

    By default each device of a stage is a group. Copies that divide a prompt (`Workload.prompt_ranks`) divide the
    experts too. DP ranks of a model without experts are whole copies of it. LayoutError (exit 2) if the
    engine or the model cannot be split this way, and ModelError (exit 3) if it is not known whether the model has
    experts.
    """
    if replicas > 1 and not engine.has_dp_ranks:
        raise LayoutError(
            f"--dp {replicas}: {engine.name} has no DP ranks",
            f"--engine {', '.join(engines_that(lambda other: other.has_dp_ranks))}",
        )
    size, workload = workload.tensor_parallel_size, workload._replace(data_parallel_size=replicas)
    ranks = workload.attention_copies * size
    if size > 1 and not engine.splits_dp_ranks:
        raise LayoutError(
            f"--dp {replicas} --tp {size}: every device is a DP rank in {engine.name}",
            f"use --dp {ranks}, or leave out --dp",
        )
    if weights_of(model) is None:
        raise ModelError(f"{model.name}: its experts are not known, so they cannot be split: {model.weights_reason}")
    most = most_experts(model)
    if not most:
        if expert_parallel_size is not None:
            raise LayoutError(f"--ep {expert_parallel_size}: {model.name} has no experts", "leave it out")
        if engine.splits_dp_ranks:
            return workload
        # Whether its MLPs are split or copied differs between its models and releases (GatedMLP, modules/gated_mlp.py).
        raise LayoutError(
            f"--dp {replicas}: {model.name} has no experts to split, and DP ranks of such models are not "
            f"modelled for {engine.name}",
            f"remove --dp: with --tp 1 --num-gpus {replicas} the devices form {replicas} replicas",
        )
    groups = expert_parallel_size or ranks
    if groups > most or (most % groups and not engine.splits_uneven_experts):
        given = f"--dp {replicas}" if workload.prompt_ranks == 1 else f"{ranks} devices"
        given = given if expert_parallel_size is None else f"--ep {groups}"
        even = "" if groups > most else f" evenly, as {engine.name} requires"
        fitting = [str(n) for n in range(1, min(ranks, most) + 1) if ranks % n == 0 and most % n == 0]
        raise LayoutError(
            f"{given}: the {most} experts of a layer cannot be divided among {groups} devices{even}",
            f"use --ep {' or '.join(fitting[-2:])}",
        )
    return workload._replace(expert_parallel_size=groups)


def whole_copies(model: ModelSpec, workload: Workload) -> bool:
    """Whether the DP ranks are whole copies of the model, because it has no experts to divide.

    vLLM runs each as an engine of its own (run_engine_core: "Non-MoE DP ranks are completely independent",
    v1/engine/core.py, 0.33.0). So does SGLang, behind a router (--dp-size without --enable-dp-attention).
    """
    return workload.data_parallel_size > 1 and not most_experts(model)


def spread_of(spec: ModelSpec, engine: Engine, workload: Workload) -> Spread:
    """How the weights are split among the DP ranks."""
    if workload.attention_copies == 1:
        return NOT_SPREAD
    names: frozenset[str] = frozenset()
    if engine.spreads_mlps or engine.spreads_head:
        names = _mlp_and_head(spec, engine.spreads_mlps) if most_experts(spec) else names
    if names and workload.data_parallel_size == 1:
        # Only with DP ranks, the embedding is in each (get_embedding_tp_kwargs, SGLang 0.5.23).
        names |= _embedding(spec)
    return Spread(workload.attention_copies, workload.expert_parallel_size, names)


@remembered
def most_experts(spec: ModelSpec) -> int:
    """The experts of a layer; of the layer with the most if they differ. 0 if the model has none."""
    weights = weights_of(spec)
    blocks = () if weights is None else weights.blocks
    return max((w.copies for block in blocks for w in block.weights if w.copies > 1), default=0)


@remembered
def _embedding(spec: ModelSpec) -> frozenset[str]:
    weights = weights_of(spec)
    return frozenset() if weights is None else frozenset([weights.embedding.name])


@remembered
def _mlp_and_head(spec: ModelSpec, with_mlp: bool) -> frozenset[str]:
    """The names of the weights of the output head, and of MLPs without experts, that ranks split."""
    weights = weights_of(spec)
    blocks = () if weights is None else weights.blocks
    head = (weight.name for block in blocks for weight in block.weights if weight.role == HEAD)
    mlp = (weight for group in spec.layers if with_mlp for weight in group.layer.mlp)
    return frozenset([*head, *(w.name for w in mlp if w.copies == 1 and w.on_rank(2) != w)])
