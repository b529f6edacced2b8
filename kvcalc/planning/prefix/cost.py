"""What a block of a trace takes in memory, what computing it takes, and what both cost."""

from __future__ import annotations

from collections.abc import Mapping
from math import nan
from typing import TYPE_CHECKING

from kvcalc.engines.prefixes import Prefixes
from kvcalc.engines.reuse import CPU, DISK
from kvcalc.engines.rounding import ceil_div
from kvcalc.errors import LayoutError, UsageError
from kvcalc.notes import Note
from kvcalc.records import NamedTuple
from kvcalc.server.case import Case
from kvcalc.server.reuse import check_caching
from kvcalc.server.reuse.document import store_of

if TYPE_CHECKING:
    from kvcalc.throughput.roofline import SpeedModel

# The names of memory in prices, besides devices.
MEMORY_PRICES = (CPU, DISK)
_GIB = 1024**3
_SECONDS_PER_HOUR = 3600
# The prefill is fitted at this many lengths.
_LENGTHS = 12


class BlockBytes(NamedTuple):
    """The bytes of one block of a trace: on one device, and in a tier of slower memory for all `devices`."""

    per_device: int
    devices: int
    in_tier: int

    @property
    def of_replica(self) -> int:
        return self.per_device * self.devices


def prefixes_of(case: Case) -> Prefixes:
    """The engine's prefix cache on one device. UsageError or ModelError if it is not an LRU cache of blocks."""
    if case.layout.data_parallel_size > 1:
        raise LayoutError("--dp: each DP rank has a prefix cache of its own", "leave it out")
    check_caching(case.engine, "kvcalc prefix")
    prefixes = case.prefixes()
    if not prefixes.shares_memory:
        raise UsageError(
            f"{case.engine.name} keeps prompts as a whole, not in blocks that they share",
            "use vllm, sglang or tensorrt-llm",
        )
    return prefixes


def block_bytes(case: Case, prefixes: Prefixes, block_tokens: int, prompt_tokens: int, notes: list[Note]) -> BlockBytes:
    """The bytes of a block. `prompt_tokens` is the mean length of a prompt.

    Windows and states are kept once for the end of a prompt, not for every block. They are spread over its tokens.
    """
    devices = case.layout.tensor_parallel_size * case.layout.pipeline_parallel_size
    whole = max(block_tokens, prompt_tokens // block_tokens * block_tokens)
    number = whole // block_tokens
    of_one_block = ceil_div(prefixes.kept_bytes(whole), number)
    if any(prefixes.kept_bytes(blocks * block_tokens) != blocks * of_one_block for blocks in (1, number)):
        text = "windows and states are kept once per prompt; their bytes are spread over a prompt of mean length"
        notes.append(Note("curve", "uneven-blocks", text))
    in_tier = case.layout.pipeline_parallel_size * ceil_div(store_of(case).tier_bytes(whole), number)
    return BlockBytes(of_one_block, devices, in_tier)


class PrefillTime(NamedTuple):
    """The seconds that prefills take: `per_token` for each token, and `per_square` times the square of a prompt.

    The seconds are those that a prompt adds to steps that run anyway (`SpeedModel.prefill_work`), on all devices of a
    replica at once.
    """

    per_token: float
    per_square: float
    worst_error: float

    def seconds(self, tokens: float, squares: float) -> float:
        return tokens * self.per_token + squares * self.per_square


def prefill_time(model: SpeedModel, longest: int) -> PrefillTime:
    """The least squares of the relative errors at lengths up to `longest`. Full attention alone is fitted exactly."""
    least = max(1, min(256, longest))
    lengths = sorted({round(least * (longest / least) ** (step / (_LENGTHS - 1))) for step in range(_LENGTHS)})
    times = [model.prefill_work(length).seconds / length for length in lengths]
    # time / length = a + b x length, weighted by 1 / time, so that the errors are relative.
    weights = [1 / time**2 for time in times]
    total = sum(weights)
    mean_length = sum(w * n for w, n in zip(weights, lengths)) / total
    mean_time = sum(w * t for w, t in zip(weights, times)) / total
    spread = sum(w * (n - mean_length) ** 2 for w, n in zip(weights, lengths))
    rise = sum(w * (n - mean_length) * t for w, n, t in zip(weights, lengths, times))
    slope = max(rise / spread, 0.0) if spread else 0.0
    base = mean_time - slope * mean_length
    worst = max(abs((base + slope * n) / t - 1) for n, t in zip(lengths, times))
    return PrefillTime(base, slope, worst)


class Prices(NamedTuple):
    """Prices per hour: of a device, and of a GiB of each tier of memory."""

    device: float | None = None
    memory: Mapping[str, float] = {}

    def of_tier(self, name: str, num_bytes: float, seconds: float) -> float | None:
        """What keeping bytes in a tier for some time costs. None if the price is not known."""
        price = self.memory.get(name)
        return None if price is None else price * num_bytes / _GIB * seconds / _SECONDS_PER_HOUR

    def of_device(self, devices: float, seconds: float) -> float | None:
        """What devices cost for some time."""
        return None if self.device is None else self.device * devices * seconds / _SECONDS_PER_HOUR


def parse_memory_price(text: str) -> tuple[str, float] | None:
    """The tier and its price per GiB and hour in `cpu=0.003`; None if it names no tier. UsageError (exit 2)."""
    name, _, number = text.partition("=")
    if name.strip().casefold() not in MEMORY_PRICES:
        return None
    try:
        price = float(number)
    except ValueError:
        price = nan
    if not 0 <= price < 1e9:
        raise UsageError(f"--price {text[:40]!a}: not a price", "for example --price cpu=0.003, for one GiB per hour")
    return name.strip().casefold(), price
