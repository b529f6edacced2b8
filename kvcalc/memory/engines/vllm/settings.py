"""vLLM's own options, as it spells them, and its defaults."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from kvcalc.errors import UsageError
from kvcalc.units import parse_count

# Of the API server on H100 and H200; 16,384 on B200 and B300, 2,048 elsewhere (arg_utils.py, vLLM 0.33.0).
_DEFAULT_BATCHED_TOKENS = 8192


class Settings(NamedTuple):
    """`max_num_batched_tokens` is one step's. With async scheduling two steps are in flight, with pipeline stages as
    many as there are stages (max_concurrent_batches, config/vllm.py); their number is the workload's."""

    block_size: int = 16
    max_num_batched_tokens: int = _DEFAULT_BATCHED_TOKENS
    async_scheduling: bool = True
    enable_prefix_caching: bool = False
    num_speculative_tokens: int = 0
    pipeline_parallel_size: int = 1

    @property
    def max_in_flight_tokens(self) -> int:
        stages = self.pipeline_parallel_size
        steps = stages if stages > 1 else 2 if self.async_scheduling else 1
        return steps * self.max_num_batched_tokens

    @property
    def state_blocks(self) -> int:
        """States a request keeps: its own, one more at a block's end with prefix caching, one a speculative token."""
        return (2 if self.enable_prefix_caching else 1) + self.num_speculative_tokens


def parse_settings(given: Mapping[str, str]) -> Settings:
    """The options given, each checked.

    Raises UsageError (exit 2) for a number out of range or a block no kernel takes.
    """
    plain = Settings()

    def number(option: str, default: int) -> int:
        return parse_count(given[option], f"--{option}") if option in given else default

    settings = Settings(
        number("block-size", plain.block_size),
        number("max-num-batched-tokens", plain.max_num_batched_tokens),
        "no-async-scheduling" not in given,
        "enable-prefix-caching" in given,
        number("num-speculative-tokens", plain.num_speculative_tokens),
    )
    if settings.block_size % 16:
        raise UsageError(f"--block-size {settings.block_size}: vLLM's kernels take multiples of 16")
    return settings
