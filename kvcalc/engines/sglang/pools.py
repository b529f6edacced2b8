"""The bytes of SGLang's pools on one device: rows of all tokens, rows of windows, and states."""

from __future__ import annotations

from kvcalc.engines.sglang.layers import FULL, STATE, WINDOW, layers_of
from kvcalc.memory.dtypes import Dtype
from kvcalc.model.memo import remembered
from kvcalc.model.spec import ModelSpec
from kvcalc.records import NamedTuple


class Pools(NamedTuple):
    """The bytes of one token in all layers of each pool, and the bytes of one state in all layers.

    The bytes are 0 for a pool that the share does not have. The widest window of a window pool, and whether there is a
    pool for all tokens, are those of the whole model: they set the pools' tokens, which every pipeline stage has.
    """

    full: int
    window: int
    state: int
    widest_window: int
    has_full: bool


@remembered
def pools_of(share: ModelSpec, dtype: Dtype) -> Pools:
    """The pools of a share. Raises what `layers_of` raises."""
    sizes, layers = dict.fromkeys((FULL, WINDOW, STATE), 0), layers_of(share, dtype)
    for layer in layers:
        sizes[layer.pool] += layer.num_layers * layer.bytes
    if share.whole is not None:
        return Pools(sizes[FULL], sizes[WINDOW], sizes[STATE], *pools_of(share.whole, dtype)[3:])
    widest = max((layer.cache.window or 0 for layer in layers if layer.pool == WINDOW), default=0)
    return Pools(sizes[FULL], sizes[WINDOW], sizes[STATE], widest, bool(sizes[FULL]))
