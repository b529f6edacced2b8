"""TensorRT-LLM's KVCacheManagerV2 for models with windows: each kind of layer keeps blocks of its own.

Gemma 4, whose heads differ between layers, always has this manager (_non_hybrid_kv_cache_manager_cls,
_torch/pyexecutor/_util.py). GPT-OSS and Gemma 3 have it by default, and since 1.3.0rc28 with the windows of their
layers (_derive_layer_type_attention_windows; NVIDIA/TensorRT-LLM#16942, #17396 and #18767). Before, all their layers
kept all tokens. `tensorrt_llm_pools` has the rules of the pools. Source: kv_cache_manager_v2.py
(_torch/pyexecutor/kv_cache) and _util.py at commit 000439672005.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from kvcalc.engines.account import BlockPool, Line, PoolFigures, RunningPool, lines_of
from kvcalc.engines.engine import Engine, not_established
from kvcalc.engines.rounding import ceil_div
from kvcalc.engines.tensorrt_llm.engine import TensorrtLlm, cache_buffers, quota_of, row_bytes
from kvcalc.engines.tensorrt_llm.pools import (
    RESUMES_BELOW,
    Division,
    Group,
    Layout,
    Sequences,
    WindowLayers,
    check_average,
    least_slots,
    most_blocks,
    pooled,
)
from kvcalc.errors import LayoutError
from kvcalc.memory.dtypes import Dtype
from kvcalc.memory.kv_cache import Growth, growth_at_slope, stored_cache_bytes
from kvcalc.model.caches import SELF_ATTENTION_CACHES, Cache, reading_at_most
from kvcalc.model.layers import LayerGroup
from kvcalc.model.spec import ModelSpec, all_caches, windows
from kvcalc.notes import Note
from kvcalc.records import NamedTuple
from kvcalc.releases import Release

if TYPE_CHECKING:
    from kvcalc.engines.prefixes import Prefixes

_WINDOWS_SINCE = Release.of(1, 3)._replace(phase=-1, of_phase=28)
_ALWAYS = ("gemma4_text",)
_OTHERWISE = Sequences(2049, 2048)  # what StorageManager assumes without a typical batch


class _Layers(NamedTuple):
    """Layers of a share that follow each other. `is_read` is False for caches that no layer reads."""

    num_layers: int
    cache: Cache
    window: int | None
    is_read: bool


class LayerGroups(TensorrtLlm):
    """Counts slots of layers with the same window, in pools that share the memory in a fixed proportion."""

    version = "commit 000439672005"
    has_pools = True

    def __init__(self, spec: ModelSpec, settings: Mapping[str, str], stages: int, release: str | None) -> None:
        super().__init__(spec, settings, stages, release)
        self._found: dict[tuple[int, int, int], tuple[ModelSpec, Dtype, Layout]] = {}
        self._widths = sorted(set(self.chosen.max_attention_window or windows(spec)))
        text = "TensorRT-LLM divides the memory among its pools as requests of 2,048 tokens need it; --avg-seq-len N"
        self.notes = (Note("engine", "pool-proportion", f"{text} sets another length"),)
        if self.chosen.avg_seq_len is not None:
            self.notes = ()

    @classmethod
    def at(cls, model_type: str, release: Release | None) -> type[Engine]:
        """The rules of a release: before 1.3.0rc28, only Gemma 4 has these."""
        return cls if model_type in _ALWAYS or release is None or release >= _WINDOWS_SINCE else TensorrtLlm

    def check_model(self) -> None:
        spec = self.spec
        for cache in all_caches(spec):
            if not isinstance(cache, SELF_ATTENTION_CACHES):
                raise not_established(spec, "TensorRT-LLM", cache.kind)
        if self.bounds and spec.model_type in _ALWAYS:
            raise LayoutError(
                f"{spec.name}: TensorRT-LLM does not run Gemma 4 with --pp", "use --tp (Gemma4ForCausalLM)"
            )

    def cache_bytes(self, cache: Cache, tokens: int, dtype: Dtype) -> int:
        return most_blocks(self._window(cache, 0, tokens), tokens, self.block) * self.block * row_bytes(cache, dtype)

    def attended(self, share: ModelSpec) -> ModelSpec:
        """A layer reads at most the tokens that --max-attention-window keeps."""
        pattern = self.chosen.max_attention_window
        if pattern is None:
            return share
        groups = []
        for group in share.layers:
            for number in range(group.first, group.last + 1):
                kept = tuple(reading_at_most(cache, pattern[number % len(pattern)]) for cache in group.caches)
                groups.append(group._replace(first=number, last=number, caches=kept))
        return share._replace(layers=tuple(groups))

    def held_bytes(self, share: ModelSpec, dtype: Dtype, tokens: int, batch: int) -> int:
        layout = self.layout(share, dtype, tokens)
        return layout.division.smallest(self._slots(layout, tokens, batch))

    def prefixes(self, share: ModelSpec, dtype: Dtype, whole: bool = False) -> Prefixes:
        from kvcalc.engines.tensorrt_llm.reuse import GroupPrefixes

        return GroupPrefixes(partial(self.layout, share, dtype), self.block)

    def growth(self, spec: ModelSpec, dtype: Dtype, tokens: int) -> Growth:
        """The slope is that of the rows of layers without a shorter window. All else is fixed bytes."""
        layout = self.layout(spec, dtype, tokens)
        slope = sum(sum(kind.token_bytes) for kind in layout.kinds if kind.window is None)
        return growth_at_slope(slope, self.held_bytes(spec, dtype, tokens, 1), tokens)

    def check_context(self, tokens: int) -> None:
        check_average(self.chosen.avg_seq_len, tokens)

    def blocks(self, share: ModelSpec, dtype: Dtype, tokens: int, batch: int, memory: int | None) -> PoolFigures:
        layout = self.layout(share, dtype, tokens)
        division, slots = self._divided(layout, memory)
        pools = [
            {
                "window": None if None in group.windows else max(filter(None, group.windows)),
                "num_layers": sum(kind.num_layers for kind in layout.kinds if kind.window in group.windows),
                "bytes_per_block": size,
                "num_gpu_blocks": None if slots is None else slots[place],
            }
            for place, (group, size) in enumerate(zip(division.groups, division.sizes))
        ]
        pool = BlockPool(self.block, sum(division.sizes), self.held_bytes(share, dtype, tokens, 1))
        if slots is not None:
            whole = [count for count, group in zip(slots, division.groups) if None in group.windows] or slots
            concurrency = self._concurrency(division, slots, tokens)
            pool = BlockPool(*pool[:3], min(whole), min(whole) * self.block, concurrency)
        return PoolFigures(pool, {"window_pools": pools})

    def _divided(self, layout: Layout, memory: int | None) -> tuple[Division, list[int] | None]:
        """How the memory is divided, and the slots of each group. None if the memory is not known."""
        most = self.chosen.max_tokens
        quota = quota_of(self.chosen, memory, None if most is None else self._quota_of_tokens(layout, most))
        return layout.division, None if quota is None else layout.division.slots(quota)

    def running_pool(self, share: ModelSpec, dtype: Dtype, longest_tokens: int, batch: int, memory: int) -> RunningPool:
        """The slots of all pools as those of one.

        A request starts if every pool has room for it, and the pools do not borrow from each other. The capacity is the
        number of slots of the largest pool, and a request takes the same share of it as of the pool that it fills most.
        """
        check_average(self.chosen.avg_seq_len, longest_tokens)
        division, slots = self._divided(self.layout(share, dtype, longest_tokens), memory)
        if slots is None:
            raise ValueError("internal: slots need a memory")
        free = [max(1, count - self._beyond(group, longest_tokens)) for count, group in zip(slots, division.groups)]
        most, block = max(free), self.block

        def taken(number: int) -> int:
            held = [sum(most_blocks(w, number * block, block) for w in group.windows) for group in division.groups]
            return max(ceil_div(blocks * most, count) for blocks, count in zip(held, free))

        return RunningPool(most, block, [taken(number) for number in range(ceil_div(longest_tokens, block) + 3)])

    def _concurrency(self, division: Division, slots: list[int], tokens: int) -> float:
        """The requests that the fullest pool holds. The prompts take the slots beyond their windows in turn."""
        return min(
            max(0, count - self._beyond(group, tokens))
            / sum(most_blocks(window, tokens, self.block) for window in group.windows)
            for count, group in zip(slots, division.groups)
        )

    def lines(self, share: ModelSpec, dtype: Dtype, tokens: int) -> list[Line]:
        return self.pool(share, dtype, tokens, 1)

    def pool(self, share: ModelSpec, dtype: Dtype, tokens: int, batch: int) -> list[Line]:
        layout, sizes = self.layout(share, dtype, tokens), dict.fromkeys(("stored", "different layout or dtype"), 0)
        beside = dict.fromkeys(("blocks rounded up", "caches that no layer reads"), 0)
        for layers in self._layers(share, tokens):
            row, window = layers.num_layers * row_bytes(layers.cache, dtype), layers.window
            held = batch * most_blocks(window, tokens, self.block) * self.block * row
            if not layers.is_read:
                beside["caches that no layer reads"] += held
                continue
            kept = tokens if window is None else min(tokens, window)
            stored = batch * layers.num_layers * stored_cache_bytes(layers.cache, tokens, dtype)
            sizes["stored"] += stored
            sizes["different layout or dtype"] += batch * kept * row - stored
            beside["blocks rounded up"] += held - batch * kept * row
        blocks = sum(n * size for n, size in zip(self._slots(layout, tokens, batch), layout.division.sizes))
        beyond = blocks - sum(sizes.values()) - sum(beside.values())
        figures = {**sizes, **beside, "in-flight tokens beyond the window": beyond}
        rest = self.held_bytes(share, dtype, tokens, batch) - sum(figures.values())
        is_one = len(layout.division.groups) == 1
        return lines_of({**figures, "memory pages rounded up" if is_one else "pools in a fixed proportion": rest})

    def _slots(self, layout: Layout, tokens: int, batch: int) -> list[int]:
        """The slots of each group that a batch takes."""
        return [
            sum(batch * most_blocks(window, tokens, self.block) for window in group.windows)
            + self._beyond(group, tokens)
            for group in layout.division.groups
        ]

    def _beyond(self, group: Group, tokens: int) -> int:
        """The slots that a prompt takes until its step ends and its window has left them.

        A prompt that finds no free slots waits for the next step. So a batch runs if there is room for one of its
        prompts at a time, although several may share a step.
        """
        blocks = ceil_div(tokens, self.block)
        return sum(blocks - most_blocks(window, tokens, self.block) for window in group.windows)

    def _quota_of_tokens(self, layout: Layout, tokens: int) -> int:
        """The bytes for `tokens` tokens (_get_quota_from_max_tokens, kv_cache_manager_v2.py)."""
        running, total = self.chosen.max_batch_size or self._default_running, 0
        for kind in layout.kinds:
            if kind.window is None:
                held = tokens
            else:
                held = running * ceil_div(kind.window, self.block) * self.block + min(tokens, self.chosen.step_tokens)
            total += held * sum(kind.token_bytes)
        return ceil_div(total * 100, RESUMES_BELOW)

    def layout(self, share: ModelSpec, dtype: Dtype, tokens: int) -> Layout:
        """The pools if `tokens` is the longest request (max_seq_len). A window that is no shorter limits nothing."""
        # An average length is limited by the longest request, and so is its part in the proportion.
        place = bisect_left(self._widths, tokens) if self.chosen.avg_seq_len is None else -tokens
        key = id(share), id(dtype), place
        known = self._found.get(key)
        if known is None:
            # Keep the share and the dtype too, so that their id() is not reused.
            known = self._found[key] = share, dtype, self._lay_out(share, dtype, tokens)
        return known[2]

    def _lay_out(self, share: ModelSpec, dtype: Dtype, tokens: int) -> Layout:
        by_window: dict[int | None, list[tuple[int, Sequence[int]]]] = {}
        for layers in self._layers(share, tokens):
            buffers = layers.num_layers, cache_buffers(layers.cache, dtype)
            by_window.setdefault(layers.window, []).append(buffers)
        kinds = tuple(
            WindowLayers(window, sum(count for count, _ in of_window), pooled(of_window))
            for window, of_window in by_window.items()
        )
        groups: dict[tuple[int, ...], list[int | None]] = {}
        for kind in kinds:
            groups.setdefault(tuple(self.block * size for size in kind.token_bytes), []).append(kind.window)
        made = [Group(slot, tuple(of)) for slot, of in groups.items()]
        return Layout(kinds, self._division(made, tokens))

    def _division(self, groups: list[Group], tokens: int) -> Division:
        average = self.chosen.avg_seq_len
        if average is None:
            return Division(groups, self.block, (_OTHERWISE,))
        running = self.chosen.max_batch_size or self._default_running
        average = min(average, tokens)
        step, others = Sequences(self.chosen.step_tokens), running - 1
        typical = (step, Sequences(average, average - 1, others))
        batches = ((Sequences(tokens, tokens - 1), Sequences(1, number=others)), (step,))
        return Division(groups, self.block, typical, least_slots(groups, self.block, batches))

    def _layers(self, share: ModelSpec, tokens: int) -> list[_Layers]:
        """The layers of a share, in order.

        A layer that reads an earlier layer's cache also has its own, which nothing reads: the manager has as many
        layers as the model (_create_kv_cache_manager, _util.py).
        """
        by_window = {_window_of(group): cache for group in share.layers for cache in group.caches}
        rows = []
        for group in share.layers:
            cache = group.caches[0] if group.caches else by_window[_window_of(group)]
            runs = [(group.first, group.num_layers)]
            if self.chosen.max_attention_window is not None:
                runs = [(number, 1) for number in range(group.first, group.last + 1)]
            rows += [
                _Layers(count, cache, self._window(cache, first, tokens), bool(group.caches)) for first, count in runs
            ]
        return rows

    def _window(self, cache: Cache, number: int, tokens: int) -> int | None:
        """The window of layer `number`: --max-attention-window if it is given, or the model's own."""
        pattern = self.chosen.max_attention_window
        window = cache.window if pattern is None else pattern[number % len(pattern)]
        return None if window is None or window >= tokens else window


def _window_of(group: LayerGroup) -> int | None:
    return group.layer.attention[0].window
