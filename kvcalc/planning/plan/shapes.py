"""The layouts that a plan tries: how one replica of the model may be split over devices of one kind.

By default a plan tries tensor parallelism within a box, then as far as the fast link reaches, then pipeline stages. For
a model with experts, it tries DP ranks and both ways to divide the experts as far as the fast link reaches. With all
layouts, it tries every combination of tensor parallelism, pipeline stages, DP ranks, expert parallelism, and vLLM's
decode context parallelism. An engine without tensor parallelism has pipeline stages alone.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvcalc.engines import engine_class
from kvcalc.model.layout import Layout
from kvcalc.model.spec import windows
from kvcalc.question.question import Question
from kvcalc.server.dp_attention import most_experts
from kvcalc.server.layout import sizes_of
from kvcalc.throughput.hardware import Gpu, joined_devices

# Tensor parallelism stays within the devices joined by a fast link. Pipeline stages are used only if these are too few.
_TENSOR_SIZES, _WIDE_SIZES, _STAGES = (1, 2, 4, 8), (16, 32, 64), (2, 4, 8)
# The most devices of one replica.
_MOST_DEVICES = 64
CONTEXT_PARALLEL = "decode-context-parallel-size"


def copies_asked(question: Question, engine: str) -> Layout:
    """The copies of the attention that somebody asks for, which all shapes have."""
    layout = sizes_of(question._replace(engine=engine))
    return layout._replace(divides_experts=bool(most_experts(question.model)))


def usual_shapes(gpu: Gpu, question: Question, engine: str) -> Iterator[list[Layout]]:
    """The shapes of the default search. A list is tried only if no shape of earlier lists serves."""
    joined, copies = joined_devices(gpu), copies_asked(question, engine)
    within = [size for size in _TENSOR_SIZES if size <= joined]
    yield [_shape(copies, size) for size in within]
    yield [_shape(copies, size) for size in _WIDE_SIZES if size <= joined]
    yield [_shape(copies, within[-1], stages) for stages in _STAGES]


def stage_shapes(gpu: Gpu, engine: str) -> list[Layout]:
    """The shapes of an engine without tensor parallelism: its layers on any number of devices of one machine."""
    most = gpu.machine_devices if engine_class(engine).splits_layers else 1
    return [Layout(1, stages) for stages in range(1, most + 1)]


def expert_shapes(gpu: Gpu, question: Question, engine: str) -> Iterator[list[Layout]]:
    """The shapes of the default search for a model with experts, in lists like those of `usual_shapes`."""
    joined, shapes = joined_devices(gpu), all_shapes(gpu, question, engine)
    yield [
        shape
        for shape in shapes
        if shape.pipeline_parallel_size == shape.token_ranks == 1 and shape.num_devices <= joined
    ]
    yield from list(usual_shapes(gpu, question, engine))[1:]


def all_shapes(gpu: Gpu, question: Question, engine: str) -> list[Layout]:
    """Every shape whose parts are powers of two, the smallest first.

    Tensor parallelism is within the fast link. Only models with experts have DP ranks, of which a number that
    was asked for (more than 1) is the only one; their experts are split like other weights, or distributed whole. The
    tokens of the cache are divided only among ranks that would hold the same KV heads.
    """
    joined, experts, copies = joined_devices(gpu), most_experts(question.model), copies_asked(question, engine)
    dp_ranks = copies.data_parallel_size
    shapes = [
        _shape(copies._replace(data_parallel_size=dp, token_ranks=token_ranks), tensor, stages, groups)
        for tensor in _powers(min(joined, _MOST_DEVICES))
        for stages in (1, *_STAGES)
        for dp in ([dp_ranks] if dp_ranks > 1 else _powers(_MOST_DEVICES) if experts else [1])
        if tensor * stages * dp <= max(_MOST_DEVICES, dp_ranks)
        for groups in _expert_sizes(tensor, dp, experts)
        for token_ranks in _token_ranks(question, engine, gpu, tensor)
    ]
    return sorted(shapes, key=lambda shape: shape.num_devices)


def _shape(copies: Layout, tensor: int, stages: int = 1, experts: int | None = None) -> Layout:
    return copies._replace(tensor_parallel_size=tensor, pipeline_parallel_size=stages).with_experts(experts)


def _expert_sizes(tensor: int, dp_ranks: int, experts: int) -> list[int | None]:
    """The default, and the other way: experts are whole with DP ranks, and else split."""
    if dp_ranks > 1:
        return [None, 1] if experts else [None]
    return [None, tensor] if 1 < tensor <= experts else [None]


def _token_ranks(question: Question, engine: str, gpu: Gpu, tensor: int) -> list[int]:
    """The numbers of ranks that may divide the tokens: only ranks that would hold the same KV heads."""
    if CONTEXT_PARALLEL in (question.engine_settings or {}):
        return [1]
    shape = question.model.attention
    heads = 1 if shape.is_latent else shape.num_kv_heads or 0
    helps = 0 < heads < tensor and not windows(question.model)
    runs = helps and engine_class(engine).divides_tokens(question.model, gpu.vendor)
    return _powers(tensor // heads) if runs else [1]


def _powers(most: int) -> list[int]:
    return [2**power for power in range(max(most, 1).bit_length())]
