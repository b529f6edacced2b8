"""Named weights, and the bricks most families are built from.

Names are those of the published checkpoint's modules, because quantisation configs leave layers out by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

LINEAR, EMBEDDING, LOOKUP, HEAD, NORM, ROUTER, OTHER = "linear embedding lookup head norm router other".split()
"""What a weight is for. Quantisation takes linear layers alone (and a head it names). One token reads one row of an
embedding or of another lookup table, and all of anything else."""

BY_RANK, WHOLE = "rank", "whole"
"""How tensor parallelism splits a weight: over the ranks, or not at all (every rank holds all of it)."""


class Weight(NamedTuple):
    """`copies` matrices of `rows` outputs by `columns` inputs, with `bias` more elements each; a vector has one column.

    `read` of the copies are read for one token: the experts it is sent to. A name with `experts.0` stands for all.
    `split`: BY_RANK or WHOLE. Of rows split by rank, `kv_rows` make K and V of `kv_heads` heads, which are replicated
    where there are more ranks than heads (QKVParallelLinear, vLLM 0.33.0).
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
        """The part the largest of `ranks` tensor-parallel ranks holds.

        Matrices are split by rows, which is as many bytes as by columns; biases are held whole, as the row-parallel
        ones are. Source: the parallel layers of vLLM 0.33.0 (model_executor/layers/linear.py).
        """
        if ranks == 1 or self.split == WHOLE:
            return self
        rows = -(-(self.rows - self.kv_rows) // ranks)
        if self.kv_rows:
            rows += -(-self.kv_rows // min(ranks, self.kv_heads))
        return self._replace(rows=rows, kv_heads=0, kv_rows=0)


# Plain classes: at every start a named tuple would cost a third of a millisecond.
class Block:
    """Weights that each of some layers has; a layer may have many. `prefix` holds a {} for the layer's number."""

    def __init__(self, prefix: str, numbers: Sequence[int], weights: tuple[Weight, ...]) -> None:
        self.prefix = prefix
        self.numbers = numbers
        self.weights = weights

    def __eq__(self, other: object) -> bool:
        """Equal layers' numbers may be a list or a range."""
        if not isinstance(other, Block):
            return NotImplemented
        return (self.prefix, [*self.numbers], self.weights) == (other.prefix, [*other.numbers], other.weights)

    __hash__ = None  # type: ignore[assignment]  # never a key


class Around(NamedTuple):
    """The weights that stand around the layers: the embedding (`tied`: the output head too), and `blocks`, the head,
    the last norm, tables of positions, an encoder. `prefix` holds a {} for a layer's number."""

    embedding: Weight
    tied: bool
    blocks: tuple[Block, ...]
    prefix: str


class ModelWeights:
    """All weights of a language model. `tied`: the embedding is the output head too."""

    def __init__(self, embedding: Weight, tied: bool, blocks: tuple[Block, ...]) -> None:
        self.embedding = embedding
        self.tied = tied
        self.blocks = blocks


def linear(name: str, inputs: int, outputs: int, bias: bool = False) -> Weight:
    """A projection from `inputs` to `outputs`."""
    return Weight(name, outputs, inputs, LINEAR, outputs if bias else 0)


def replicated(name: str, inputs: int, outputs: int, bias: bool = False) -> Weight:
    """A projection every rank holds whole, because it has no heads to split: MLA's down-projections, indexers."""
    return linear(name, inputs, outputs, bias)._replace(split=WHOLE)


def norm(name: str, width: int, bias: bool = False) -> Weight:
    """The scale of a norm over `width` elements, and its shift where it has one."""
    return Weight(name, width, 1, NORM, width if bias else 0, split=WHOLE)


def other(name: str, rows: int, columns: int = 1, bias: int = 0) -> Weight:
    """What is neither a projection nor a norm: sinks, decays, scales, small matrices kept in 16 or 32 bits."""
    return Weight(name, rows, columns, OTHER, bias, split=WHOLE)


def lookup(name: str, rows: int, width: int) -> Weight:
    """A table of which a token reads one row, beside the embedding: positions, per-layer inputs."""
    return Weight(name, rows, width, LOOKUP, split=WHOLE)


def router(name: str, width: int, experts: int, bias: bool = False) -> Weight:
    """The matrix that chooses experts. Correction biases which Transformers keeps as buffers are no parameters."""
    return Weight(name, experts, width, ROUTER, experts if bias else 0, split=WHOLE)


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
    prefix: str = "model.layers.{}.",
    blocks: tuple[Block, ...] = (),
) -> Around:
    """The embedding, and what else stands outside the layers: the head (where it is not the embedding), `outer`, and
    further `blocks`."""
    ends: tuple[Weight, ...] = outer
    if not tied:
        ends = (*outer, Weight(head, vocab, width, HEAD, vocab if head_bias else 0))
    return Around(Weight(embedding, vocab, width, EMBEDDING), tied, (*blocks, Block("", (0,), ends)), prefix)
