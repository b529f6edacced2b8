"""Layers that keep the model's own type beside a quantized cache, and the blocks in which both kinds of layers fit.

Source: Attention (model_executor/layers/attention/attention.py), _align_heterogeneous_kv_block_size
(platforms/interface.py) and TurboQuantConfig.get_boundary_skip_layers (layers/quantization/turboquant/config.py), vLLM
0.33.0. Before 0.25 blocks did not grow.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from kvcalc.errors import ModelError, UsageError
from kvcalc.memory.dtypes import DTYPES, Dtype
from kvcalc.memory.engines.place import Place
from kvcalc.memory.engines.rounding import ceil_div
from kvcalc.memory.engines.vllm.cache_dtypes import TURBOQUANT
from kvcalc.memory.engines.vllm.pages import FULL, SLIDING, Page
from kvcalc.memory.engines.vllm.settings import BLOCK, Settings, is_number_of_layers
from kvcalc.model.caches import Cache, FullAttention, SlidingWindowAttention
from kvcalc.model.spec import ModelSpec, all_caches, has_states

_WINDOWS = "sliding_window"
_ASKED = "--kv-cache-dtype-skip-layers"
_GROWS_SINCE, _HYBRIDS_SINCE = (0, 25), (0, 22)
# TurboQuant skips this many layers at each end of a model without states.
_ENDS = 2


class Skipped(NamedTuple):
    """The layers by number, whether all layers with a window are skipped too, and the type of skipped layers."""

    numbers: frozenset[int]
    windows: bool
    dtype: Dtype
    grows: bool

    def has(self, number: int, cache: Cache) -> bool:
        return number in self.numbers or (self.windows and isinstance(cache, SlidingWindowAttention))

    def pages(
        self, layers: list[tuple[int, Cache, Page]], block_size: int, own_page: Callable[[Cache], Page]
    ) -> list[Page]:
        """The pages of all layers. `own_page` gives the page of a cache in the model's own type.

        A block grows until a page of quantized rows is as large as the smallest page in the model's own type. Windows
        then have as many tokens as fit in such a page.
        """
        found = [own_page(cache) if self.has(number, cache) else page for number, cache, page in layers]
        sizes = [(page.token_bytes, own_page(cache).token_bytes) for _, cache, page in layers if page.kind == FULL]
        quantized, own = sizes[0] if sizes else (1, 1)
        if not self.grows or quantized == own:
            return found
        step = max(BLOCK, block_size)
        block = max(block_size, step * ceil_div(own * BLOCK, step * quantized))
        shared = block * quantized
        for place, page in enumerate(found):
            if page.kind == SLIDING:
                fitting = max(BLOCK, shared // page.token_bytes // BLOCK * BLOCK)
                page = page._replace(block_size=fitting)
                found[place] = page._replace(padded_bytes=shared if page.own_bytes != shared else 0)
            else:
                found[place] = page._replace(block_size=block)
        return found


def skipped_layers(spec: ModelSpec, dtype: Dtype, settings: Settings, place: Place) -> Skipped | None:
    """The layers that the settings or the type leave out. None if there are none.

    Raises UsageError (exit 2) for words that are no layers, and ModelError (exit 3) for models in which the layout is
    not modelled.
    """
    asked, packs = settings.kv_cache_dtype_skip_layers, dtype.name in TURBOQUANT
    if asked is None and not packs:
        return None
    numbers, words = set(), [] if asked is None else asked.split(",")
    for word in words:
        if is_number_of_layers(word) and int(word) < spec.num_layers:
            numbers.add(int(word))
        elif word != _WINDOWS:
            last = spec.num_layers - 1
            raise UsageError(f"{_ASKED} {word[:40]!a}: not a layer", f"use numbers from 0 to {last}, or {_WINDOWS}")
    if has_states(spec):
        if asked is not None or not place.since(*_HYBRIDS_SINCE):
            raise ModelError(
                f"{spec.name}: {dtype.name if asked is None else _ASKED} is not modelled beside recurrent states"
            )
        return None
    shapes = all_caches(spec)
    plain = all(isinstance(cache, (FullAttention, SlidingWindowAttention)) for cache in shapes)
    if not plain or settings.disable_hybrid_kv_cache_manager:
        raise ModelError(f"{spec.name}: {_ASKED} is not modelled for its layers")
    if packs:
        ends = min(_ENDS, spec.num_layers // 2)
        numbers.update((*range(ends), *range(spec.num_layers - ends, spec.num_layers)))
    own = DTYPES["fp32" if spec.torch_dtype == "float32" else "bf16"]
    return Skipped(frozenset(numbers), _WINDOWS in words, own, place.since(*_GROWS_SINCE))
