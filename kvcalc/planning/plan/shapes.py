"""The layouts that a plan tries: how one replica of the model may be split over devices of one kind.

By default a plan tries tensor parallelism within a box, then as far as the fast link reaches, then pipeline stages. For
a model with experts, it tries DP ranks and both ways to divide the experts as far as the fast link reaches. With all
layouts, it tries every combination of tensor parallelism, pipeline stages, DP ranks, expert parallelism, and vLLM's
decode context parallelism. An engine without tensor parallelism has pipeline stages alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from kvcalc.engines import engine_class
from kvcalc.model.spec import windows
from kvcalc.question.question import Question, SpeedQuestion
from kvcalc.records import NamedTuple
from kvcalc.server.dp_attention import most_experts
from kvcalc.throughput.hardware import Gpu, joined_devices

if TYPE_CHECKING:
    import kvcalc.documents as documents

# Tensor parallelism stays within the devices joined by a fast link. Pipeline stages are used only if these are too few.
_TENSOR_SIZES, _WIDE_SIZES, _STAGES = (1, 2, 4, 8), (16, 32, 64), (2, 4, 8)
# The most devices of one replica.
_MOST_DEVICES = 64
CONTEXT_PARALLEL = "decode-context-parallel-size"


class Shape(NamedTuple):
    """How one replica is split.

    Each of `dp_ranks` is split over `tensor` x `stages` devices. `experts` is the number of devices that each
    hold whole experts, None for the default. `token_ranks` of the tensor-parallel ranks divide the tokens of the
    cache, and `prompt_ranks` copies of the attention divide a prompt.
    """

    tensor: int
    stages: int
    dp_ranks: int = 1
    experts: int | None = None
    token_ranks: int = 1
    prompt_ranks: int = 1

    @property
    def devices(self) -> int:
        """The devices of one replica."""
        return self.tensor * self.stages * self.dp_ranks * self.prompt_ranks

    @property
    def is_plain(self) -> bool:
        """Whether it has tensor parallelism and pipeline stages alone."""
        return self.dp_ranks == self.token_ranks == 1 and self.experts is None

    def of(self, question: Question) -> Question:
        """The question with the parts of the shape that are not its tensor-parallel size and its stages."""
        settings = question.engine_settings
        if self.token_ranks > 1:
            settings = {**(settings or {}), CONTEXT_PARALLEL: str(self.token_ranks)}
        speed = question.speed
        if self.experts is not None:
            speed = (speed or SpeedQuestion())._replace(expert_parallel_size=self.experts)
        replicas = self.dp_ranks
        return question._replace(data_parallel_size=replicas, engine_settings=settings, speed=speed)

    def describe(self, expert_parallel_size: int) -> documents.LayoutSizes:
        """The keys of a row that say how a replica is split. The number of experts' devices may be a default."""
        return {
            "tensor_parallel_size": self.tensor,
            "pipeline_parallel_size": self.stages,
            "data_parallel_size": self.dp_ranks,
            "expert_parallel_size": expert_parallel_size,
            "decode_context_parallel_size": self.token_ranks,
        }

    def __str__(self) -> str:
        parts = [f"dp {self.dp_ranks}"] if self.dp_ranks > 1 else []
        parts += [f"tp {self.tensor}", *([f"pp {self.stages}"] if self.stages > 1 else [])]
        parts += [] if self.experts is None else [f"ep {self.experts}"]
        parts += [f"dcp {self.token_ranks}"] if self.token_ranks > 1 else []
        return " x ".join(parts)


def usual_shapes(gpu: Gpu, dp_ranks: int) -> Iterator[list[Shape]]:
    """The shapes of the default search. A list is tried only if no shape of earlier lists serves."""
    joined = joined_devices(gpu)
    within = [size for size in _TENSOR_SIZES if size <= joined]
    yield [Shape(size, 1, dp_ranks) for size in within]
    yield [Shape(size, 1, dp_ranks) for size in _WIDE_SIZES if size <= joined]
    yield [Shape(within[-1], stages, dp_ranks) for stages in _STAGES]


def stage_shapes(gpu: Gpu, engine: str) -> list[Shape]:
    """The shapes of an engine without tensor parallelism: its layers on any number of devices of one machine."""
    most = gpu.machine_devices if engine_class(engine).splits_layers else 1
    return [Shape(1, stages) for stages in range(1, most + 1)]


def expert_shapes(gpu: Gpu, question: Question, engine: str) -> Iterator[list[Shape]]:
    """The shapes of the default search for a model with experts, in lists like those of `usual_shapes`."""
    joined = joined_devices(gpu)
    found = all_shapes(gpu, question, engine)
    yield [one for one in found if one.stages == one.token_ranks == 1 and one.devices <= joined]
    yield from list(usual_shapes(gpu, 1))[1:]


def all_shapes(gpu: Gpu, question: Question, engine: str) -> list[Shape]:
    """Every shape whose parts are powers of two, the smallest first.

    Tensor parallelism is within the fast link. Only models with experts have DP ranks, of which a number that
    was asked for (more than 1) is the only one; their experts are split like other weights, or distributed whole. The
    tokens of the cache are divided only among ranks that would hold the same KV heads.
    """
    joined, experts = joined_devices(gpu), most_experts(question.model)
    asked = question.data_parallel_size
    replicas = [asked] if asked > 1 else _powers(_MOST_DEVICES) if experts else [1]
    found = [
        Shape(tensor, stages, dp, ep, dcp)
        for tensor in _powers(min(joined, _MOST_DEVICES))
        for stages in (1, *_STAGES)
        for dp in replicas
        if tensor * stages * dp <= max(_MOST_DEVICES, asked)
        for ep in _expert_sizes(tensor, dp, experts)
        for dcp in _token_ranks(question, engine, gpu, tensor)
    ]
    return sorted(found, key=lambda shape: shape.devices)


def _expert_sizes(tensor: int, dp_ranks: int, experts: int) -> list[int | None]:
    """The default, and the other way: experts are whole with DP ranks, and else split."""
    if dp_ranks > 1:
        return [None, 1]
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
