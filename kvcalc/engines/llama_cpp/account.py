"""The number of cells in a context, and the named parts of its bytes. Cells are in one stream per slot, or one for all.

Source: llama_context::llama_context, llama-context.cpp, and llama_kv_cache_iswa, llama-kv-cache-iswa.cpp.
"""

from __future__ import annotations

from collections import defaultdict

from kvcalc.engines.account import Line, lines_of
from kvcalc.engines.llama_cpp.architectures import Layers
from kvcalc.engines.llama_cpp.settings import Settings
from kvcalc.engines.rounding import round_up
from kvcalc.errors import UsageError
from kvcalc.memory.dtypes import DTYPES, Dtype, bytes_of
from kvcalc.memory.kv_cache import entry_sizes, stored_cache_bytes
from kvcalc.model.caches import HEADS_CACHES, Cache, IndexerKeys, RecurrentState
from kvcalc.records import NamedTuple


class Cells(NamedTuple):
    """`batch` sequences of `tokens` tokens in `slots` slots, stored in `streams` streams of `cells` cells each.

    `window_cells` is the number of cells per stream in layers that keep a window. `batch_window_cells` of them would be
    there with one slot per sequence.
    """

    tokens: int
    batch: int
    slots: int
    streams: int
    cells: int
    window_cells: int
    batch_window_cells: int

    @property
    def n_ctx(self) -> int:
        return self.cells * self.streams


def cells_for(settings: Settings, tokens: int, batch: int, window: int | None, *, shares_cells: bool = True) -> Cells:
    """The cells of a context that fits `batch` sequences of `tokens` tokens.

    `shares_cells` is whether the slots of a unified context share its cells. A window's cells in one stream are those
    of every slot's window and of one step.
    """
    slots = settings.slots(batch)
    unified = settings.has_one_stream(batch)
    streams = 1 if unified else slots
    shared = unified and shares_cells
    cells = round_up(tokens * batch if shared else tokens, settings.padding)
    if window is None or settings.swa_full:
        return Cells(tokens, batch, slots, streams, cells, cells, cells)
    kept = (
        round_up(min(cells, window * (number if shared else 1) + settings.ubatch_size), settings.padding)
        for number in (slots, batch)
    )
    return Cells(tokens, batch, slots, streams, cells, *kept)


def account(layers: Layers, cells: Cells, dtype: Dtype, settings: Settings) -> list[Line]:
    """Lines that add up to the bytes of the context.

    Every cell has a row of K and a row of V. Every slot has a state in fp32, regardless of the state's own type, and
    one more for each drafted token.
    """
    sizes: defaultdict[str, int] = defaultdict(int)
    for layer in layers.not_kept:
        held = layer.num_layers * cells.batch * stored_cache_bytes(layer.cache, cells.tokens, dtype)
        sizes["stored"] += held
        is_state = isinstance(layer.cache, RecurrentState)
        sizes["token numbers, with the cells" if is_state else "encoder K and V, recomputed"] -= held
    for layer in layers.caches:
        cache, kept, count = layer
        held = cells.batch * stored_cache_bytes(cache, cells.tokens, dtype)
        sizes["stored"] += count * held
        if isinstance(cache, RecurrentState):
            state = _state_bytes(cache)
            sizes["states in fp32"] += count * (cells.batch * state - held)
            sizes["slots beyond the batch"] += count * (cells.slots - cells.batch) * state
            sizes["states for prefixes and drafts"] += count * cells.slots * settings.draft_max * state
            continue
        row = _row_bytes(kept, dtype)
        windowed = layers.is_windowed(cache)
        stream = row * (cells.window_cells if windowed else cells.cells)
        # The other streams belong to slots without a sequence of the batch.
        used = min(cells.streams, cells.batch)
        sizes["slots beyond the batch"] += count * (cells.streams - used) * stream
        if windowed:
            row_bytes = row * cells.batch_window_cells
            sizes["slots beyond the batch"] += count * used * (stream - row_bytes)
            sizes["window cells beyond the window"] += count * (used * row_bytes - held)
        else:
            beside = "K and V beyond the latent"
            if isinstance(cache, IndexerKeys):
                beside = "pooled keys of the indexer" if isinstance(kept, IndexerKeys) else "V of the indexer"
            needed = cells.batch * cells.tokens * row
            sizes[beside if cache.window is None else "windows kept whole"] += count * (needed - held)
            sizes["cells rounded up"] += count * (used * stream - needed)
        if settings.transposes_v and layer.has_heads:
            spare = bytes_of(layers.widest_v - layer.v_row, dtype.v or dtype)
            padded = count * cells.streams * stream // row * spare
            sizes["V padded to the widest layer's"] += padded
    return lines_of(sizes)


def read_row(layer: Layers, dtype: Dtype) -> tuple[int, ...]:
    """The bytes of one entry that a step reads in a single layer (`Layers.only`).

    The V of an indexer is never written, and so not read. K and V of an encoder's output that are not kept are computed
    at every step, and read there.
    """
    for cache, kept, _ in layer.caches:
        if isinstance(cache, RecurrentState):
            return (_state_bytes(cache),)
        return entry_sizes(cache, dtype) if isinstance(cache, IndexerKeys) else (_row_bytes(kept, dtype),)
    return entry_sizes(layer.not_kept[0].cache, dtype)


def _state_bytes(cache: RecurrentState) -> int:
    """Bytes of the convolution's inputs before the current one, and of the state (n_embd_r and n_embd_s)."""
    elements = cache.conv_channels * (cache.conv_kernel - 1) + cache.state_elements
    return bytes_of(elements, DTYPES["fp32"])


def _row_bytes(cache: Cache, dtype: Dtype) -> int:
    """The bytes of one cell: a row of K and a row of V. MLA and indexers have no V. Blocks must divide a head."""
    rows = cache.token_rows()
    types = (dtype, dtype.v or dtype)
    if isinstance(cache, HEADS_CACHES):
        for width, used, name in zip((cache.k_head_dim, cache.v_head_dim), types, "kv"):
            if width % used.block_elements:
                raise UsageError(
                    f"--cache-type-{name} {used.name}: blocks of {used.block_elements} do not divide a head of {width}"
                )
    return sum(bytes_of(row, used) for row, used in zip(rows, types))
