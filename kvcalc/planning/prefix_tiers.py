"""What the device's memory and each slower tier find in a trace, and how long loading takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvcalc.engines.reuse import CPU
from kvcalc.notes import Note
from kvcalc.planning.budget import Budget, budget
from kvcalc.planning.case import Case
from kvcalc.planning.prefix_cost import reach_of
from kvcalc.planning.prefix_rows import DEVICE, Setup
from kvcalc.planning.tier_rates import tier_rate
from kvcalc.traces.reuse_counts import Reuse


def describe_tiers(
    setup: Setup, offload: Sequence[tuple[str, int]], bandwidths: Mapping[str, int], notes: list[Note]
) -> list[dict[str, Any]]:
    """A row for the device's memory, if it is known, and for each tier: what is found there and not before it."""
    memory = _device_memory(setup.case, notes)
    block, stack = setup.block, setup.profile.stack
    names = [DEVICE, *(name for name, _ in offload)]
    sizes = [memory or 0, *(size for _, size in offload)]
    per_block = [block.per_device, *(block.in_tier for _ in offload)]
    own = [size // max(each, 1) for size, each in zip(sizes, per_block)]
    reach = reach_of(setup.case, own)
    found = stack.at(reach)
    rows = []
    before = Reuse(0, 0.0, 0.0, 0.0, 0.0)
    for name, size, blocks, reuse in zip(names, sizes, own, found):
        tokens, squares = reuse.hit_tokens - before.hit_tokens, reuse.hit_squares - before.hit_squares
        rate = None if name == DEVICE else tier_rate(name, setup.gpu, bandwidths, notes, "tiers")
        moved = tokens / stack.block_tokens * (block.per_device if name == CPU else block.in_tier)
        row = {
            "name": name,
            "memory_bytes": size,
            "cache_blocks": blocks,
            "hit_rate": tokens / stack.num_tokens,
            "prefill_seconds": None if setup.prefill is None else setup.prefill.seconds(tokens, squares),
            "bandwidth_bytes_per_second": rate,
            "load_seconds": None if rate is None else moved / rate,
        }
        if name != DEVICE or memory is not None:
            rows.append(row)
        before = reuse
    return rows


def _device_memory(case: Case, notes: list[Note]) -> int | None:
    """The memory for the cache on one device, which running requests use too. None if it is not known."""
    if case.question.devices is None:
        return case.question.kv_memory_bytes
    found = budget(case)
    if not isinstance(found, Budget):
        notes.append(Note("fit", "unknown", found))
        return None
    if found.pool_bytes <= 0:
        notes.append(Note("fit", "does-not-fit", f"no memory of {case.devices.gpu.name} is left for the cache"))
    return max(found.pool_bytes, 0)
