"""TensorRT-LLM's own options, parsed."""

from __future__ import annotations

from collections.abc import Mapping

from kvcalc.engines.options import SettingsReader
from kvcalc.errors import LayoutError
from kvcalc.records import NamedTuple
from kvcalc.units import parse_tokens

STEP_TOKENS = 8192
"""max_num_tokens: the tokens of a step by default."""


class Settings(NamedTuple):
    """`max_tokens` and `free_gpu_memory_fraction` are None if they are not given.

    `max_attention_window` has the windows of the layers in turn, repeated over the layers. None means one pool.
    `max_batch_size` is the number of requests that may run, for which a hybrid has states. `avg_seq_len` is the length
    of the requests for which KVCacheManagerV2 divides the memory. `max_num_tokens` is the number of tokens in one step,
    None if it is not given. The last three are the keys of `attention_dp_config`.
    """

    tokens_per_block: int
    max_tokens: int | None
    free_gpu_memory_fraction: float | None
    max_attention_window: list[int] | None
    max_batch_size: int | None
    avg_seq_len: int | None
    max_num_tokens: int | None
    enable_chunked_prefill: bool
    disable_overlap_scheduler: bool
    enable_balance: bool
    timeout_iters: int
    batching_wait_iters: int

    @property
    def step_tokens(self) -> int:
        return STEP_TOKENS if self.max_num_tokens is None else self.max_num_tokens


def parse_settings(settings: Mapping[str, str]) -> Settings:
    """Parse and check the given options. Raises UsageError (exit 2)."""
    given, fraction = SettingsReader("tensorrt-llm", settings), None
    windows, average = settings.get("max-attention-window"), settings.get("avg-seq-len")
    if "free-gpu-memory-fraction" in settings:
        fraction = given.share("free-gpu-memory-fraction", below_one=True)
    block = given.count("tokens-per-block")
    if block & (block - 1):  # docs/source/legacy/advanced/kv-cache-reuse.md
        text = "TensorRT-LLM does not start, it must be a power of 2"
        raise LayoutError(f"--tokens-per-block {block}: {text}", f"use {1 << (block.bit_length() - 1)}")
    pattern = (
        None if windows is None else [parse_tokens(window, "--max-attention-window") for window in windows.split(",")]
    )
    return given.fill(
        Settings, tokens_per_block=block, free_gpu_memory_fraction=fraction, max_attention_window=pattern,
        avg_seq_len=None if average is None else parse_tokens(average, "--avg-seq-len"),
        max_num_tokens=given.optional_count("max-num-tokens"),
        batching_wait_iters=given.count("batching-wait-iters", least=0),
    )  # fmt: skip
