"""Layers that keep the model's own type beside a quantized cache, and the blocks in which both kinds of layers fit.

Source: Attention (model_executor/layers/attention/attention.py), _align_heterogeneous_kv_block_size
(platforms/interface.py) and TurboQuantConfig.get_boundary_skip_layers (layers/quantization/turboquant/config.py), vLLM
0.33.0. Before 0.25 blocks did not grow.
"""

from __future__ import annotations

from collections.abc import Callable

from kvcalc.engines.place import Place
from kvcalc.engines.rounding import ceil_div
from kvcalc.engines.vllm.cache_dtypes import TURBOQUANT
from kvcalc.engines.vllm.defaults import BLOCK
from kvcalc.engines.vllm.pages import FULL, SLIDING, Page
from kvcalc.engines.vllm.settings import Settings, is_number_of_layers
from kvcalc.engines.vllm.states import keeps_states
from kvcalc.errors import ModelError, UsageError
from kvcalc.memory.dtypes import DTYPES, Dtype
from kvcalc.model.caches import HEADS_CACHES, Cache, FullAttention, RecurrentState, SlidingWindowAttention
from kvcalc.model.spec import ModelSpec, all_caches
from kvcalc.records import NamedTuple

_WINDOWS = "sliding_window"
_ASKED = "--kv-cache-dtype-skip-layers"
_GROWS_SINCE, _HYBRIDS_SINCE, _ASKED_BESIDE_STATES_SINCE = (0, 25), (0, 22), (0, 33)
# TurboQuant skips this many layers at each end of a model without states.
_ENDS = 2


class Skipped(NamedTuple):
    """The layers by number, whether all layers with a window are skipped too, and the type of skipped layers.

    `has_own_kernel` is whether the kernel of quantized layers is another one than that of skipped layers.
    """

    numbers: frozenset[int]
    windows: bool
    dtype: Dtype
    grows: bool
    has_own_kernel: bool

    def has(self, number: int, cache: Cache) -> bool:
        if isinstance(cache, RecurrentState):
            return False
        return number in self.numbers or (self.windows and isinstance(cache, SlidingWindowAttention))

    def pages(
        self, layers: list[tuple[int, Cache, Page]], block_size: int, own_page: Callable[[Cache], Page]
    ) -> list[Page]:
        """The pages of all layers. `own_page` gives the page of a cache in the model's own type.

        A block grows until a page of quantized rows is as large as the smallest page in the model's own type. Windows
        then have as many tokens as fit in such a page. The first layer's kernel says how large a quantized row is. If
        that layer is skipped and only another kernel reads the type, it is a byte for each element.
        """
        pages = [
            own_page(cache)._replace(block_size=page.block_size) if self.has(number, cache) else page
            for number, cache, page in layers
        ]
        whole = [(cache, page) for _, cache, page in layers if page.kind == FULL]
        if not whole:
            return pages
        quantized, page_bytes = whole[0][1].token_bytes, own_page(whole[0][0]).token_bytes
        number, cache, _ = layers[0]
        if self.has_own_kernel and self.has(number, cache):
            quantized = _elements(whole[0][0])
        if not self.grows or quantized == page_bytes:
            return pages
        step = max(BLOCK, block_size)
        block = max(block_size, step * ceil_div(page_bytes * BLOCK, step * quantized))
        shared = block * quantized
        for place, page in enumerate(pages):
            if page.kind == SLIDING:
                fitting = max(BLOCK, shared // page.token_bytes // BLOCK * BLOCK)
                pages[place] = page._replace(block_size=fitting, padded_bytes=shared)
            else:
                pages[place] = page._replace(block_size=block)
        return pages


def skipped_layers(spec: ModelSpec, dtype: Dtype, settings: Settings, place: Place) -> Skipped | None:
    """The layers that the settings or the type leave out. None if there are none.

    Raises UsageError (exit 2) for words that are not layers, and ModelError (exit 3) for models in which the layout is
    not modelled.
    """
    given, packs = settings.kv_cache_dtype_skip_layers, dtype.name in TURBOQUANT
    if given is None and not packs:
        return None
    numbers, words = set(), [] if given is None else given.split(",")
    for word in words:
        if is_number_of_layers(word) and int(word) < spec.num_layers:
            numbers.add(int(word))
        elif word != _WINDOWS:
            last = spec.num_layers - 1
            raise UsageError(f"{_ASKED} {word[:40]!a}: not a layer", f"use numbers from 0 to {last}, or {_WINDOWS}")
    beside_states = keeps_states(spec)
    if beside_states and not place.since(*(_HYBRIDS_SINCE if given is None else _ASKED_BESIDE_STATES_SINCE)):
        raise ModelError(
            f"{spec.name}: {dtype.name if given is None else _ASKED} is not modelled beside recurrent states"
        )
    if beside_states and packs:
        if given is not None:
            raise ModelError(f"{spec.name}: {dtype.name} with {_ASKED} is not modelled beside recurrent states")
        return None
    plain = all(
        isinstance(cache, (FullAttention, SlidingWindowAttention, RecurrentState)) for cache in all_caches(spec)
    )
    if not plain or settings.disable_hybrid_kv_cache_manager:
        raise ModelError(f"{spec.name}: {_ASKED} is not modelled for its layers")
    if packs:
        ends = min(_ENDS, spec.num_layers // 2)
        numbers.update((*range(ends), *range(spec.num_layers - ends, spec.num_layers)))
    own = DTYPES["fp32" if spec.torch_dtype == "fp32" else "bf16"]
    own_kernel = packs or dtype.name.endswith("_per_token_head")
    # Beside states, blocks have grown so that a quantized page holds a state.
    grows = not beside_states and place.since(*_GROWS_SINCE)
    return Skipped(frozenset(numbers), _WINDOWS in words, own, grows, own_kernel)


def _elements(cache: Cache) -> int:
    return cache.num_kv_heads * (cache.k_head_dim + cache.v_head_dim) if isinstance(cache, HEADS_CACHES) else 0
