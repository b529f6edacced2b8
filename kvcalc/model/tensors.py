"""Named weights, and the functions from which most families build theirs.

Names are those of the modules in the published checkpoint, because quantization configs exclude layers by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvcalc.records import NamedTuple

LINEAR, EMBEDDING, LOOKUP, HEAD, NORM, ROUTER, OTHER = "linear embedding lookup head norm router other".split()
"""The role of a weight. Quantization applies only to linear layers (and to the head if it names the head). A token
reads one row of an embedding or of another lookup table, and all of every other weight."""

BY_RANK, WHOLE = "rank", "whole"
"""How tensor parallelism splits a weight: over the ranks, or not at all (every rank holds the whole weight)."""


class Weight(NamedTuple):
    """`copies` matrices of `rows` outputs by `columns` inputs, each with `bias` further elements.

    A vector has one column. One token reads `read` of the copies: the experts it is routed to. A name with `experts.0`
    stands for all experts. `split` is BY_RANK or WHOLE. If rows are split by rank, `kv_rows` of them produce K and V of
    `kv_heads` heads; these rows are replicated if there are more ranks than heads (QKVParallelLinear, vLLM 0.33.0).
    """

    name: str
    rows: int
    columns: int = 1
    role: str = LINEAR
    bias: int = 0
    copies: int = 1
    read: int = 1
    split: str = BY_RANK
    kv_heads: int = 0
    kv_rows: int = 0

    @property
    def parameters(self) -> int:
        return self.copies * (self.rows * self.columns + self.bias)

    @property
    def read_parameters(self) -> int:
        return min(self.read, self.copies) * (self.rows * self.columns + self.bias)

    def on_rank(self, ranks: int) -> Weight:
        """Return the part on the rank that holds most, with `ranks` tensor-parallel ranks.

        Matrices are split by rows, which takes as many bytes as a split by columns. Every rank holds biases whole, as
        it does for row-parallel layers. Source: the parallel layers of vLLM 0.33.0 (model_executor/layers/linear.py).
        """
        if ranks == 1 or self.split == WHOLE:
            return self
        rows = -(-(self.rows - self.kv_rows) // ranks)
        if self.kv_rows:
            rows += -(-self.kv_rows // min(ranks, self.kv_heads))
        return self._replace(rows=rows, kv_heads=0, kv_rows=0)


# These are plain classes because a named tuple would add a third of a millisecond to every start.
class Block:
    """The weights of each of the layers in `numbers`. A layer may have several blocks.

    `prefix` contains {} for the layer's number.
    """

    def __init__(self, prefix: str, numbers: Sequence[int], weights: tuple[Weight, ...]) -> None:
        self.prefix = prefix
        self.numbers = numbers
        self.weights = weights

    @property
    def in_layers(self) -> bool:
        """Whether it is a part of layers, not of what is around them."""
        return "{" in self.prefix

    def __eq__(self, other: object) -> bool:
        """Compare `numbers` by value, because it may be a list or a range."""
        if not isinstance(other, Block):
            return NotImplemented
        return (self.prefix, [*self.numbers], self.weights) == (other.prefix, [*other.numbers], other.weights)

    __hash__ = None  # type: ignore[assignment]  # never a key


class Around(NamedTuple):
    """The weights outside the layers.

    These are the embedding and `blocks`: the head, the last norm, position tables, an encoder. `tied`: the embedding is
    also the output head. `prefix` contains {} for a layer's number.
    """

    embedding: Weight
    tied: bool
    blocks: tuple[Block, ...]
    prefix: str


class ModelWeights:
    """All weights of a language model. `tied`: the embedding is also the output head."""

    def __init__(self, embedding: Weight, tied: bool, blocks: tuple[Block, ...]) -> None:
        self.embedding = embedding
        self.tied = tied
        self.blocks = blocks


def weights(*parts: Weight | tuple[Weight, ...]) -> tuple[Weight, ...]:
    """All weights of several parts, each of which is one weight or has several."""
    return tuple(weight for part in parts for weight in ((part,) if isinstance(part, Weight) else part))


def linear(name: str, inputs: int, outputs: int, bias: bool = False) -> Weight:
    """A projection from `inputs` to `outputs`."""
    return Weight(name, outputs, inputs, LINEAR, outputs if bias else 0)


def replicated(name: str, inputs: int, outputs: int, bias: bool = False) -> Weight:
    """A projection that every rank holds whole, because it has no heads to split: MLA's down-projections, indexers."""
    return linear(name, inputs, outputs, bias)._replace(split=WHOLE)


def norm(name: str, width: int, bias: bool = False) -> Weight:
    """The scale of a norm over `width` elements, and its shift if `bias` is set."""
    return Weight(name, width, 1, NORM, width if bias else 0, split=WHOLE)


def other(name: str, rows: int, columns: int = 1, bias: int = 0) -> Weight:
    """A weight that is neither a projection nor a norm: sinks, decays, scales, small matrices kept in 16 or 32 bits."""
    return Weight(name, rows, columns, OTHER, bias, split=WHOLE)


def lookup(name: str, rows: int, width: int) -> Weight:
    """A table, other than the embedding, from which a token reads one row: positions, per-layer inputs."""
    return Weight(name, rows, width, LOOKUP, split=WHOLE)


def router(name: str, width: int, experts: int, bias: bool = False) -> Weight:
    """The matrix that chooses experts.

    Correction biases are not counted: Transformers keeps them as buffers, not as parameters.
    """
    return Weight(name, experts, width, ROUTER, experts if bias else 0, split=WHOLE)


def gated_mlp(prefix: str, width: int, inner: int, bias: bool = False) -> tuple[Weight, ...]:
    """Gate, up and down projections (SwiGLU and similar)."""
    return (
        linear(f"{prefix}.gate_proj", width, inner, bias),
        linear(f"{prefix}.up_proj", width, inner, bias),
        linear(f"{prefix}.down_proj", inner, width, bias),
    )


def plain_mlp(up: str, down: str, width: int, inner: int, bias: bool = False) -> tuple[Weight, ...]:
    """Up and down projections without a gate."""
    return (linear(up, width, inner, bias), linear(down, inner, width, bias))


def experts(matrices: Iterable[Weight], copies: int, read: int) -> tuple[Weight, ...]:
    """The matrices of `copies` experts, given those of one. A token reads `read` of the experts."""
    return tuple(weight._replace(copies=copies, read=read) for weight in matrices)


def unread(block: Block) -> Block:
    """The same weights, marked as not read by a decode step (an encoder)."""
    return Block(block.prefix, block.numbers, tuple(weight._replace(read=0) for weight in block.weights))


def around(
    vocab: int,
    width: int,
    tied: bool,
    *outer: Weight,
    embedding: str = "model.embed_tokens",
    head: str = "lm_head",
    head_bias: bool = False,
    prefix: str = "model.layers.{}.",
    blocks: tuple[Block, ...] = (),
    outputs: int | None = None,
) -> Around:
    """The weights outside the layers: the embedding, the head (unless `tied`), `outer`, and further `blocks`.

    The head has `outputs` rows, by default as many as the embedding.
    """
    rows = outputs or vocab
    ends = outer if tied else (*outer, Weight(head, rows, width, HEAD, rows if head_bias else 0))
    return Around(Weight(embedding, vocab, width, EMBEDDING), tied, (*blocks, Block("", (0,), ends)), prefix)
