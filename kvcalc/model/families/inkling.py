"""The weights of Inkling outside its mixers."""

from __future__ import annotations

from kvcalc.model.experts import Experts, choose, listed_sparse_layers, moe
from kvcalc.model.families.common import decoder_body
from kvcalc.model.reader import Body, ConfigReader
from kvcalc.model.tensors import gated_mlp, norm, other


def body(config: ConfigReader, num_layers: int) -> Body:
    """The router also scores the shared experts.

    In checkpoints with dense_intermediate_size, intermediate_size is the width of an expert. Source: InklingTextConfig,
    InklingMoE and InklingForCausalLM, Transformers 5.23.0.
    """
    width = config.integer("hidden_size")
    wide = config.optional_integer("dense_intermediate_size")
    inner = config.integer("intermediate_size" if wide else "moe_intermediate_size")
    shared = config.integer("n_shared_experts", least=0)
    sized = config.with_values({"moe_intermediate_size": inner, "n_shared_experts": shared})
    rule = Experts("n_routed_experts", shared=True)
    sparse = (*moe(sized, rule, width), other("mlp.gate.of_shared_experts", shared, width), other("mlp.gate.scale", 1))
    first = config.optional_integer("dense_mlp_idx", least=0) or 0
    layers = listed_sparse_layers(config, num_layers, range(min(first, num_layers), num_layers))
    dense = (*gated_mlp("mlp", width, wide or config.integer("intermediate_size")), other("mlp.scale", 1))
    return decoder_body(config, choose(num_layers, layers, sparse, dense), norm("model.embed_norm", width))
