"""How much of a device's memory an engine needs for things other than weights and cache.

Each engine's module lists these parts, in bytes: the activations of the largest step, graphs, the driver's context, and
memory the engine does not use. Each constant names its source. Weights and cache are exact counts, but these parts are
estimates: contexts and graphs differ by driver, kernel and release.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module

from kvcalc.engines.reserve import RESERVE, Held, Question, Reserve

# Engine name -> (module in this package, function).
_RESERVES = {
    "logical": ("plain_reserve", "logical"),
    "transformers": ("plain_reserve", "transformers"),
    "vllm": ("vllm.reserve", "vllm"),
    "sglang": ("sglang.reserve", "sglang"),
    "tensorrt-llm": ("tensorrt_llm.reserve", "tensorrt_llm"),
    "llama.cpp": ("llama_cpp.reserve", "llama_cpp"),
    "mlx": ("mlx.reserve", "mlx"),
}


@cache
def _rule(engine: str) -> Callable[[Question], Reserve]:
    module, name = _RESERVES[engine]
    found: Callable[[Question], Reserve] = getattr(import_module(f"kvcalc.engines.{module}"), name)
    return found


def reserve_of(engine: str, question: Question) -> Reserve:
    """The memory that `engine` does not give to the cache. Raises UsageError (exit 2) for a setting out of range."""
    found = _rule(engine)(question)
    if question.is_apple:
        # Metal's recommendedMaxWorkingSetSize is about three quarters of the machine's memory.
        found.held.append(Held(RESERVE, "reserved by macOS (25 %)", question.memory_bytes // 4))
    return found
