"""The bytes of a context, each part by its name."""

from __future__ import annotations

from collections import defaultdict

from kvcalc.errors import UsageError
from kvcalc.memory.dtypes import DTYPES, Dtype, bytes_of
from kvcalc.memory.engines import Line, lines_of
from kvcalc.memory.engines.llama_cpp.architectures import Layers
from kvcalc.memory.engines.llama_cpp.cells import Cells
from kvcalc.memory.kv_cache import stored_cache_bytes
from kvcalc.model.caches import HEADS_CACHES, Cache, IndexerKeys, RecurrentState


def account(layers: Layers, cells: Cells, dtype: Dtype, transposes_v: bool) -> list[Line]:
    """Lines which add up to the bytes of the context.

    A row of K and a row of V for every cell; a state in fp32 for every slot, whatever its own type.
    """
    sizes: defaultdict[str, int] = defaultdict(int)
    for layer in layers.not_kept:
        held = layer.num_layers * cells.batch * stored_cache_bytes(layer.cache, cells.tokens, dtype)
        sizes["stored"] += held
        sizes["K and V of the encoder made anew"] -= held
    for layer in layers.caches:
        cache, kept, count = layer
        held = cells.batch * stored_cache_bytes(cache, cells.tokens, dtype)
        sizes["stored"] += count * held
        if isinstance(cache, RecurrentState):
            state = _state_bytes(cache)
            sizes["states in fp32"] += count * (cells.batch * state - held)
            sizes["slots beside the batch"] += count * (cells.slots - cells.batch) * state
            continue
        row = _row_bytes(kept, dtype)
        windowed = layers.is_windowed(cache)
        stream = row * (cells.window_cells if windowed else cells.cells)
        # Streams of slots no sequence of the batch is in.
        used = min(cells.streams, cells.batch)
        sizes["slots beside the batch"] += count * (cells.streams - used) * stream
        if windowed:
            sizes["cells of windows beside the window"] += count * (used * stream - held)
        else:
            beside = "V beside the indexer's keys" if isinstance(cache, IndexerKeys) else "K and V beside the latent"
            needed = cells.batch * cells.tokens * row
            sizes[beside if cache.window is None else "windows kept whole"] += count * (needed - held)
            sizes["cells rounded up"] += count * (used * stream - needed)
        if transposes_v and layer.has_heads:
            spare = bytes_of(layers.widest_v - layer.v_row, dtype.v or dtype)
            padded = count * cells.streams * stream // row * spare
            sizes["V padded to the widest layer's"] += padded
    return lines_of(sizes)


def _state_bytes(cache: RecurrentState) -> int:
    """The inputs of the convolution before the current one, and the state (n_embd_r and n_embd_s)."""
    elements = cache.conv_channels * (cache.conv_kernel - 1) + cache.state_elements
    return bytes_of(elements, DTYPES["fp32"])


def _row_bytes(cache: Cache, dtype: Dtype) -> int:
    """One cell's bytes: K's row and V's; MLA and indexers have no V. Blocks must divide a head."""
    rows = cache.token_rows()
    types = (dtype, dtype.v or dtype)
    if isinstance(cache, HEADS_CACHES):
        for width, used, name in zip((cache.k_head_dim, cache.v_head_dim), types, "kv"):
            if width % used.block_elements:
                raise UsageError(
                    f"--cache-type-{name} {used.name}: blocks of {used.block_elements} do not divide a head of {width}"
                )
    return sum(bytes_of(row, used) for row, used in zip(rows, types))
