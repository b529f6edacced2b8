"""How one replica of a model is split over devices: as it was asked for, and with every default resolved."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcalc.records import NamedTuple

if TYPE_CHECKING:
    import kvcalc.documents as documents


class LayoutAsked(NamedTuple):
    """The sizes that somebody names. None is the default. `Layout` has the same sizes with every default resolved."""

    tensor_parallel_size: int | None = None
    pipeline_parallel_size: int | None = None
    data_parallel_size: int | None = None
    expert_parallel_size: int | None = None

    @property
    def sizes(self) -> Layout:
        """The sizes with one for the first three if nobody names them, and the experts not distributed."""
        return Layout(self.tensor_parallel_size or 1, self.pipeline_parallel_size or 1, self.data_parallel_size or 1)

    def over(self, others: LayoutAsked) -> LayoutAsked:
        """These sizes, and those of `others` where nobody names one."""
        return LayoutAsked(*(other if size is None else size for size, other in zip(self, others)))


class Layout(NamedTuple):
    """How one replica is split over devices.

    The layers are cut into `pipeline_parallel_size` stages. A stage has `data_parallel_size` DP ranks, each of which
    has the attention and the cache of its own requests and is split over `tensor_parallel_size` devices. Whole experts
    are distributed over `expert_parallel_size` groups of the devices of a stage. `token_ranks` of the tensor-parallel
    devices divide the tokens of the cache among them (decode context parallelism). `prompt_ranks` copies of each DP
    rank hold the same requests and divide their prompts (prefill context parallelism), and with `divides_decode` the
    requests of a decode step. `divides_experts` is false if the model has no experts: then the copies of the attention
    are whole copies of the model.
    """

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    expert_parallel_size: int = 1
    token_ranks: int = 1
    prompt_ranks: int = 1
    divides_decode: bool = True
    divides_experts: bool = True

    @property
    def attention_copies(self) -> int:
        """How often the weights of the attention are there."""
        return self.data_parallel_size * self.prompt_ranks

    @property
    def ranks(self) -> int:
        """The devices of one stage."""
        return self.tensor_parallel_size * self.attention_copies

    @property
    def num_devices(self) -> int:
        """The devices of one replica of the model."""
        return self.ranks * self.pipeline_parallel_size

    @property
    def has_whole_copies(self) -> bool:
        """Whether the DP ranks are whole copies of the model, because it has no experts to divide.

        vLLM runs each as an engine of its own (run_engine_core: "Non-MoE DP ranks are completely independent",
        v1/engine/core.py, 0.33.0). So does SGLang, behind a router (--dp-size without --enable-dp-attention).
        """
        return self.data_parallel_size > 1 and not self.divides_experts

    @property
    def one_copy(self) -> Layout:
        """The layout of one of the whole copies, which exchange nothing. The layout itself if it has none."""
        return self._replace(data_parallel_size=1) if self.has_whole_copies else self

    @property
    def default_experts(self) -> int:
        """The groups that hold whole experts if nobody names a number: every device of a stage with several copies."""
        return self.ranks if self.attention_copies > 1 and self.divides_experts else 1

    @property
    def is_plain(self) -> bool:
        """Whether it has tensor parallelism and pipeline stages alone, and copies that divide prompts."""
        return self.data_parallel_size == self.token_ranks == 1 and self.asked.expert_parallel_size is None

    @property
    def asked(self) -> LayoutAsked:
        """The sizes by which it is asked for."""
        experts = None if self.expert_parallel_size == self.default_experts else self.expert_parallel_size
        return LayoutAsked(*self[:3], experts)

    def with_experts(self, groups: int | None) -> Layout:
        """The layout with so many groups that hold whole experts. None is the default."""
        return self._replace(expert_parallel_size=groups or self.default_experts)

    def attention_batch(self, batch_size: int) -> int:
        """The sequences of a batch that the busiest DP rank runs."""
        return -(-batch_size // self.data_parallel_size)

    def attention_batches(self, batch_size: int) -> dict[int, int]:
        """Maps a number of sequences to the number of DP ranks that run this many."""
        each, more = divmod(batch_size, self.data_parallel_size)
        ranks = {each + 1: more, each: self.data_parallel_size - more}
        return {sequences: number for sequences, number in ranks.items() if sequences and number}

    def describe(self) -> documents.LayoutSizes:
        """The keys of a document that say how a replica is split."""
        return {
            "tensor_parallel_size": self.tensor_parallel_size,
            "pipeline_parallel_size": self.pipeline_parallel_size,
            "data_parallel_size": self.data_parallel_size,
            "expert_parallel_size": self.expert_parallel_size,
        }

    def describe_all(self) -> documents.AllLayoutSizes:
        """The same keys, and the ranks that divide the tokens of the cache."""
        return {**self.describe(), "decode_context_parallel_size": self.token_ranks}

    def __str__(self) -> str:
        experts = self.asked.expert_parallel_size
        sizes = {
            "dp": self.data_parallel_size, "tp": self.tensor_parallel_size, "pp": self.pipeline_parallel_size,
            "ep": experts or 0, "dcp": self.token_ranks,
        }  # fmt: skip
        # One device of a stage is named, and so is one group of experts if that is not the default.
        return " x ".join(f"{name} {size}" for name, size in sizes.items() if size > (name not in ("tp", "ep")))
