"""OPT: a decoder with biases. Its embedding may be narrower than the model, with a projection on each side."""

from __future__ import annotations

from kvcalc.model.families.decoder import read_row
from kvcalc.model.families.decoder_table import row
from kvcalc.model.reader import ConfigReader
from kvcalc.model.spec import ModelSpec
from kvcalc.model.tensors import linear


def read(config: ConfigReader, model_type: str) -> ModelSpec:
    """Source: OPTConfig and OPTDecoder, Transformers 5.23.0."""
    facts = row("_opt")
    if not config.boolean("layer_norm_elementwise_affine", default=True):
        facts = {**facts, "norms": (), "final_norms": ()}
    if not config.boolean("do_layer_norm_before", default=True) or config.boolean(
        "_remove_final_layer_norm", default=False
    ):
        facts = {**facts, "final_norms": ()}
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
