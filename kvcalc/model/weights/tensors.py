"""Named weights, and the bricks most families are built from.

Names are those of the published checkpoint's modules, because quantisation configs leave layers out by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

LINEAR, EMBEDDING, LOOKUP, HEAD, NORM, ROUTER, OTHER = (
    "linear",
    "embedding",
    "lookup",
    "head",
    "norm",
    "router",
    "other",
)
"""What a weight is for. Quantisation takes linear layers alone (and a head it names). One token reads one row of an
embedding or of another lookup table, and all of anything else."""


class Weight(NamedTuple):
    """`copies` matrices of `rows` outputs by `columns` inputs, with `bias` more elements each; a vector has one column.

    `read` of the copies are read for one token: the experts it is sent to. A name with `experts.0` stands for all.
    """

    name: str
    rows: int
    columns: int = 1
    role: str = LINEAR
    bias: int = 0
    copies: int = 1
    read: int = 1

    @property
    def parameters(self) -> int:
        return self.copies * (self.rows * self.columns + self.bias)

    @property
    def read_parameters(self) -> int:
        return min(self.read, self.copies) * (self.rows * self.columns + self.bias)


# Plain classes, here and in decoder_layouts: at every start a named tuple would cost a third of a millisecond.
class Block:
    """Weights that each of some layers has; a layer may have many. `prefix` holds a {} for the layer's number."""

    def __init__(self, prefix: str, numbers: Sequence[int], weights: tuple[Weight, ...]) -> None:
        self.prefix = prefix
        self.numbers = numbers
        self.weights = weights


class ModelWeights:
    """All weights of a language model. `tied`: the embedding is the output head too."""

    def __init__(self, embedding: Weight, tied: bool, blocks: tuple[Block, ...]) -> None:
        self.embedding = embedding
        self.tied = tied
        self.blocks = blocks


def linear(name: str, inputs: int, outputs: int, bias: bool = False) -> Weight:
    """A projection from `inputs` to `outputs`."""
    return Weight(name, outputs, inputs, LINEAR, outputs if bias else 0)


def norm(name: str, width: int, bias: bool = False) -> Weight:
    """The scale of a norm over `width` elements, and its shift where it has one."""
    return Weight(name, width, 1, NORM, width if bias else 0)


def other(name: str, elements: int) -> Weight:
    """A vector which is neither a projection nor a norm: sinks, decays, scales."""
    return Weight(name, elements, 1, OTHER)


def router(name: str, width: int, experts: int, bias: bool = False) -> Weight:
    """The matrix that chooses experts. Correction biases which Transformers keeps as buffers are no parameters."""
    return Weight(name, experts, width, ROUTER, experts if bias else 0)


def gated_mlp(prefix: str, width: int, inner: int, bias: bool = False) -> tuple[Weight, ...]:
    """Gate, up and down projections (SwiGLU and its like)."""
    return (
        linear(f"{prefix}.gate_proj", width, inner, bias),
        linear(f"{prefix}.up_proj", width, inner, bias),
        linear(f"{prefix}.down_proj", inner, width, bias),
    )


def plain_mlp(up: str, down: str, width: int, inner: int, bias: bool = False) -> tuple[Weight, ...]:
    """Up and down projections without a gate."""
    return (linear(up, width, inner, bias), linear(down, inner, width, bias))


def experts(matrices: Iterable[Weight], copies: int, read: int) -> tuple[Weight, ...]:
    """One expert's matrices, `copies` times, of which one token reads `read`."""
    return tuple(weight._replace(copies=copies, read=read) for weight in matrices)


def grouped_attention(
    prefix: str,
    width: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    qkv_bias: bool = False,
    output_bias: bool = False,
    v_head_dim: int | None = None,
) -> tuple[Weight, ...]:
    """The four projections of MHA, MQA and GQA."""
    v_dim = v_head_dim or head_dim
    return (
        linear(f"{prefix}.q_proj", width, num_heads * head_dim, qkv_bias),
        linear(f"{prefix}.k_proj", width, num_kv_heads * head_dim, qkv_bias),
        linear(f"{prefix}.v_proj", width, num_kv_heads * v_dim, qkv_bias),
        linear(f"{prefix}.o_proj", num_heads * v_dim, width, output_bias),
    )


def remaining(num_layers: int, layers: Iterable[int]) -> list[int]:
    """The layers which are not among `layers`."""
    among = frozenset(layers)
    return [number for number in range(num_layers) if number not in among]


def unread(block: Block) -> Block:
    """The same weights, none of which a decode step reads: an encoder's."""
    return Block(block.prefix, block.numbers, tuple(weight._replace(read=0) for weight in block.weights))


def around(
    vocab: int,
    width: int,
    tied: bool,
    *outer: Weight,
    embedding: str = "model.embed_tokens",
    head: str = "lm_head",
    head_bias: bool = False,
) -> tuple[Weight, Block]:
    """The embedding, and what stands outside the layers: the head (where it is not the embedding) and `outer`."""
    ends: tuple[Weight, ...] = outer
    if not tied:
        ends = (*outer, Weight(head, vocab, width, HEAD, vocab if head_bias else 0))
    return Weight(embedding, vocab, width, EMBEDDING), Block("", (0,), ends)
