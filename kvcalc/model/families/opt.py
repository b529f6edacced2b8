"""OPT: a decoder with biases. Its embedding may be narrower than the model, with a projection on each side."""

from __future__ import annotations

from kvcalc.model.families.decoder import read_row
from kvcalc.model.families.decoder_table import row
from kvcalc.model.reader import ConfigReader
from kvcalc.model.spec import ModelSpec
from kvcalc.model.tensors import linear

KEYS = frozenset("num_key_value_heads head_dim".split())

_OPT = row(
    keys=KEYS, grouped=False, derives_head_dim=True, rotary=False, bias="enable_bias", mlp="plain",
    mlp_bias="enable_bias", mlp_names=("fc1", "fc2"), norm_bias=True, inner=("ffn_dim",), tied=True,
    attention_names={"output": "out_proj"}, prefix="model.decoder.layers.{}.", embedding="model.decoder.embed_tokens",
    norms=("self_attn_layer_norm", "final_layer_norm"), final_norms=("model.decoder.final_layer_norm",),
    # The table has two rows more than the context, the offset for padding.
    tables=(("model.decoder.embed_positions", ("max_position_embeddings",), 2048, 2),),
    vocab_size=50272, defaults={"ffn_dim": 3072, "enable_bias": True},
)  # fmt: skip


def read(config: ConfigReader, model_type: str) -> ModelSpec:
    """Source: OPTConfig and OPTDecoder, Transformers 5.23.0."""
    facts = _OPT
    if not config.boolean("layer_norm_elementwise_affine", default=True):
        facts = row(_OPT, norms=(), final_norms=())
    if not config.boolean("do_layer_norm_before", default=True) or config.boolean(
        "_remove_final_layer_norm", default=False
    ):
        facts = row(facts, final_norms=())
    spec = read_row(config, model_type, facts)
    width, narrow = spec.attention.hidden_size, config.optional_integer("word_embed_proj_dim")
    if spec.around is None or narrow in (None, width) or narrow is None or width is None:
        return spec
    around = spec.around
    ends = around.blocks[-1]
    ends.weights += (
        linear("model.decoder.project_in", narrow, width), linear("model.decoder.project_out", width, narrow)
    )  # fmt: skip
    ends.weights = tuple(w._replace(columns=narrow) if w.role == "head" else w for w in ends.weights)
    return spec._replace(around=around._replace(embedding=around.embedding._replace(columns=narrow)))
