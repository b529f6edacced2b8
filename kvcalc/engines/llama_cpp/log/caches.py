"""The caches of llama.cpp's context as its log lines have them: cells, layers, and the bytes of one cell.

Source: llama-kv-cache.cpp, llama-kv-cache-iswa.cpp and llama-memory-recurrent.cpp in llama-cpp-python 0.3.36.
"""

from __future__ import annotations

from kvcalc.engines.llama_cpp.account import cells_for
from kvcalc.engines.llama_cpp.architectures import Layer, Layers, layers_of
from kvcalc.engines.llama_cpp.settings import parse_settings
from kvcalc.engines.log import Setup
from kvcalc.engines.log_lines import Log, Record
from kvcalc.errors import UsageError
from kvcalc.memory.dtypes import DTYPES, Dtype, bytes_of, pair, parse_dtype
from kvcalc.model.caches import Cache, RecurrentState
from kvcalc.model.drafting import MTP, drafter_of
from kvcalc.records import NamedTuple

# The words of "creating ... KV cache" for the caches of a context.
_CREATED = {"non-SWA": "full", "SWA": "window", "main": "full", "indexer": "indexer"}


class Part(NamedTuple):
    """One cache of a context: its cells, streams and layers, and the bytes of one cell's K and V in all these layers.

    `cells` are the cells of one stream, as the log line prints them. `is_for_drafts` is whether it is the cache of
    layers that draft tokens.
    """

    name: str
    cells: int
    streams: int
    layers: int
    k: int
    v: int
    is_for_drafts: bool = False


def dtype_of(record: Record, setup: Setup) -> Dtype:
    """The types of K and V that the line names, or else the requested ones."""
    if "c_type" in record.parts:
        # ik_llama.cpp prints the type of the latent this way.
        return parse_dtype(record.parts["c_type"], "the log's cache type")
    if "k_type" not in record.parts:
        return setup.dtype
    k, v = (parse_dtype(record.parts[part], "the log's cache type") for part in ("k_type", "v_type"))
    return pair(k, v)


def parts_of(log: Log, record: Record, layers: Layers, setup: Setup, dtype: Dtype) -> list[Part]:
    """The caches of the context: for all tokens, for windows, for an indexer's keys, or states if there is no other.

    If n_ctx is not in the log, the context is taken from the cells in the line.
    """
    settings = parse_settings(setup.settings)
    context = setup.context_tokens
    slots, has_one_stream = settings.slots(1), settings.has_one_stream(1)
    if log.text("context_tokens") is None:
        whole = next((one for one in log.named("creating") if created_part(one) == "full"), record)
        if "cells" in whole.parts:
            context = int(whole.parts["cells"]) * (1 if has_one_stream else slots)
    cells = cells_for(settings, context if has_one_stream else -(-context // slots), 1, layers.window)
    if all(isinstance(layer.cache, RecurrentState) for layer in layers.caches):
        r, s = state_bytes(layers)
        return [Part("states", slots, 1, sum(layer.num_layers for layer in layers.caches), r, s)]
    kinds: dict[str, list[Layer]] = {}
    for layer in layers.caches:
        if not isinstance(layer.cache, RecurrentState):
            kinds.setdefault(_kind(layer.cache, layers), []).append(layer)
    sizes = {"full": cells.cells, "window": cells.window_cells, "indexer": cells.cells}
    parts = []
    for name, members in kinds.items():
        rows = [_row(layer, layers, dtype, settings.transposes_v) for layer in members]
        count = sum(layer.num_layers for layer in members)
        k, v = sum(k for k, _ in rows), sum(v for _, v in rows)
        parts.append(Part(name, sizes[name], cells.streams, count, k, v))
        if record.name == "self" and name == "full":
            # These builds rounded n_ctx up before printing it, or did not round it at all (before pull request 7257).
            parts.append(Part(name, context, 1, count, k, v))
    return parts


def drafting_parts(log: Log, record: Record, setup: Setup, dtype: Dtype) -> list[Part]:
    """The cache of the model's MTP layers, which have a context of their own if they draft. Empty without such layers.

    Source: common_speculative_init (common/speculative.cpp), and the filters of create_memory (llama-model.cpp).
    """
    if not setup.spec.num_draft_layers:
        return []
    try:
        drafter = drafter_of(setup.spec, None, MTP)
    except UsageError:
        return []
    if drafter is None:
        return []
    layers = layers_of(drafter.spec._replace(layers=drafter.layers), parse_settings(setup.settings))
    parts = parts_of(log, record, layers, setup, dtype)
    return [part._replace(name=f"MTP layers, {part.name}", is_for_drafts=True) for part in parts]


def created_part(record: Record) -> str:
    """The name of the part that a "creating ... KV cache" line announces."""
    return _CREATED[record.parts["kind"]]


def _kind(cache: Cache, layers: Layers) -> str:
    if cache.kind == "indexer_keys":
        return "indexer"
    return "window" if layers.is_windowed(cache) else "full"


def _row(layer: Layer, layers: Layers, dtype: Dtype, transposes_v: bool) -> tuple[int, int]:
    """Bytes of one cell's K and V in these layers. A transposed V is padded to the width of the widest layer."""
    k, *rest = layer.kept.token_rows()
    v = layers.widest_v if transposes_v and layer.has_heads else sum(rest)
    return layer.num_layers * bytes_of(k, dtype), layer.num_layers * bytes_of(v, dtype.v or dtype)


def state_bytes(layers: Layers) -> tuple[int, int]:
    """Bytes of one slot's convolution inputs and states in all layers, in fp32."""
    r = s = 0
    for layer in layers.caches:
        if isinstance(layer.cache, RecurrentState):
            r += layer.num_layers * bytes_of(layer.cache.conv_channels * (layer.cache.conv_kernel - 1), DTYPES["fp32"])
            s += layer.num_layers * bytes_of(layer.cache.state_elements, DTYPES["fp32"])
    return r, s
