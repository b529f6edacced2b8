"""What the name of a checkpoint's class says: the head that it has instead of the language model's output matrix.

Source: GenericForSequenceClassification, GenericForTokenClassification and GenericForQuestionAnswering
(modeling_layers.py) of Transformers 5.23.0, and qwen2_rm.py, internlm2.py and adapters.py of vLLM 0.33.0, whose pooling
models have no output matrix either.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvcalc.model.spec import ModelSpec, has_cross_attention
from kvcalc.model.tensors import HEAD, Block, Weight, other

# The name of a language model's class may end in Model, as that of its body does.
_LANGUAGE_MODELS = ("LMHeadModel", "ChatModel", "ChatGLMModel")
_LABELS = 2  # PreTrainedConfig.num_labels of Transformers


def with_class(spec: ModelSpec, config: Mapping[str, object]) -> ModelSpec:
    """`spec` as the class that `architectures` of its published config names first.

    A class whose name has Bidirectional reads later tokens too (LlamaBidirectionalModel,
    VoyageQwen3BidirectionalEmbedModel: model_executor/models/config.py, vLLM 0.33.0).
    """
    stated = config.get("architectures")
    name = stated[0] if isinstance(stated, Sequence) and stated else None
    if not isinstance(name, str):
        return spec
    if "Bidirectional" in name:
        spec = spec._replace(is_bidirectional=True)
    is_body = config.get("model_type") == spec.model_type and name.endswith(("Model", "EmbedModel"))
    head = _head(name, is_body, _labels(config), spec.attention.hidden_size or 0)
    if head is None or spec.around is None or spec.is_encoder or has_cross_attention(spec):
        return spec
    blocks = [
        Block(block.prefix, block.numbers, tuple(weight for weight in block.weights if weight.role != HEAD))
        for block in spec.around.blocks
    ]
    # llama.cpp takes the embedding as the output matrix if a file has none.
    around = spec.around._replace(tied=not head, blocks=(*blocks, Block("", (0,), head)))
    return spec._replace(around=around)


def _head(name: str, is_body: bool, labels: int, width: int) -> tuple[Weight, ...] | None:
    """The weights of the class's head; empty if it has none, and None if it has the language model's."""
    if name.endswith("ForSequenceClassification"):
        return (other("score", labels, width),)
    if name.endswith("ForTokenClassification"):
        return (other("score", labels, width, bias=labels),)
    if name.endswith("ForQuestionAnswering"):
        return (other("qa_outputs", 2, width, bias=2),)
    if name in ("Qwen2ForRewardModel", "Qwen2ForProcessRewardModel"):
        rows = 1 if name == "Qwen2ForRewardModel" else 2
        return (other("score.0", width, width, bias=width), other("score.2", rows, width, bias=rows))
    if name == "InternLM2ForRewardModel":
        return (other("v_head", 1, width),)
    return () if is_body and not name.endswith((*_LANGUAGE_MODELS, "RewardModel")) else None


def _labels(config: Mapping[str, object]) -> int:
    """The number of labels. `id2label` has the name of each, also if `num_labels` says something else."""
    stated, names = config.get("num_labels"), config.get("id2label")
    if isinstance(names, Mapping):
        return len(names)
    return stated if isinstance(stated, int) and stated > 0 else _LABELS
