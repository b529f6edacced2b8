"""Checks llama.cpp's numbers: the cells of a context, the layers with a cache, and the bytes of K, V and states.

Source: llama-kv-cache.cpp, llama-kv-cache-iswa.cpp and llama-memory-recurrent.cpp in llama-cpp-python 0.3.36. Older
builds are described by the pull requests they do not have.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

from kvcalc.memory.dtypes import DTYPES, Dtype, bytes_of, pair, parse_dtype
from kvcalc.memory.engines.llama_cpp.account import cells_for
from kvcalc.memory.engines.llama_cpp.architectures import Layer, Layers, layers_of
from kvcalc.memory.engines.llama_cpp.settings import AUTO_SLOTS, LATENT, NO_V, PADDING, WINDOWS, parse_settings
from kvcalc.model.caches import Cache, RecurrentState
from kvcalc.model.spec import ModelSpec
from kvcalc.planning.audit.figures import (
    Figure,
    check_count,
    check_size,
    check_sizes,
    count_equal,
    given,
    parse_printed,
)
from kvcalc.planning.audit.setup import Reading, Setup
from kvcalc.planning.logs import Log, Record

_PULLS = (None, NO_V, PADDING, WINDOWS, LATENT)
# The builds whose server may have chosen its slots, which share one stream: those since November 2025.
_CHOOSE_SLOTS = (None, NO_V)
# Its layers without attention also have caches, of 0 bytes (n_head_kv 0, models/deci.cpp).
_LAYERS_WITHOUT = "nemotron-nas"


class Part(NamedTuple):
    """One cache of a context: its cells, streams and layers, and the bytes of one cell's K and V in all these layers.

    `cells` are the cells of one stream, as the log line prints them.
    """

    name: str
    cells: int
    streams: int
    layers: int
    k: int
    v: int


def readings(log: Log, spec: ModelSpec) -> Iterator[Reading]:
    """Readings for the current build and then for older builds, with both values of each setting not in the log."""
    plain = {}
    lines = log.named("cache")
    slots = log.text("parallel") or next((line.parts["seqs"] for line in lines if "seqs" in line.parts), None)
    stated = [] if slots is None or slots == "0" else [slots]
    ubatch = log.text("ubatch_size")
    if ubatch is not None:
        plain["ubatch-size"] = ubatch
    streams = next((line.parts["streams"] for line in lines if "streams" in line.parts), None)
    unified = {"true": True, "false": False}.get(log.text("kv_unified") or "")
    if unified is None and streams is not None:
        unified = streams == "1"
    flash = {"true": "on", "false": "off", "1": "on", "0": "off"}.get(log.text("flash_attn") or "")
    whole = [True] if log.text("swa_full") else [False, True]
    for pull, number, one, kept_whole, attention in product(
        _PULLS, stated or ["1", str(AUTO_SLOTS)], [unified] if unified is not None else [False, True], whole,
        [flash] if flash else ["auto", "off"],
    ):  # fmt: skip
        chosen = not stated and number != "1"
        if chosen and not (one and pull in _CHOOSE_SLOTS):
            continue
        settings = {**plain, "parallel": number}
        taken = [f"{number} slots, which llama-server starts by default"] if chosen else []
        if pull is not None:
            settings["before-pull"] = str(pull)
            taken.append(f"a build before pull request {pull}")
        if one:
            settings["kv-unified"] = ""
        if unified is None and not chosen and int(number) > 1:
            taken.append("one stream for all slots" if one else "one stream per slot")
        if kept_whole:
            settings["swa-full"] = ""
            taken.append("sliding-window layers keep the whole context")
        if attention != "auto":
            settings["flash-attn"] = attention
            if not flash:
                taken.append("without flash attention")
        if spec.is_encoder:
            # Before mid-2025 encoders kept K and V of all tokens, as decoders do (ggml-org/llama.cpp#12817, #12836).
            taken.append("a build that keeps a cache for encoders")
            yield Reading(settings, tuple(taken), check, spec._replace(model_type="generic", is_encoder=False))
        else:
            yield Reading(settings, tuple(taken), check)


def check(log: Log, setup: Setup) -> list[Figure]:
    """Compare the line of each cache with the cache it matches best, and the line of the states."""
    settings = parse_settings(setup.settings)
    layers = layers_of(setup.share, settings)
    figures: list[Figure] = []
    for record in log.named("cache", "self"):
        dtype = _dtype_of(record, setup)
        made = _parts(log, record, layers, setup, dtype)
        figures += max((_check_part(record, part, log, setup) for part in made), key=count_equal, default=[])
    for record in log.named("buffer"):
        figures += _check_buffer(log, record, layers, setup)
    for record in log.named("states"):
        figures += _check_states(record, layers, setup)
    return figures


def _dtype_of(record: Record, setup: Setup) -> Dtype:
    """The types of K and V that the line names, or else the requested ones."""
    if "c_type" in record.parts:
        # ik_llama.cpp prints the type of the latent this way.
        return parse_dtype(record.parts["c_type"], "the log's cache type")
    if "k_type" not in record.parts:
        return setup.dtype
    k, v = (parse_dtype(record.parts[part], "the log's cache type") for part in ("k_type", "v_type"))
    return pair(k, v)


def _parts(log: Log, record: Record, layers: Layers, setup: Setup, dtype: Dtype) -> list[Part]:
    """The caches of the context: for all tokens, for windows, for an indexer's keys, or states if there is no other.

    If n_ctx is not in the log, the context is taken from the cells in the line.
    """
    settings = parse_settings(setup.settings)
    context = setup.context_tokens
    if log.text("context_tokens") is None and "cells" in record.parts:
        context = int(record.parts["cells"]) * (1 if settings.has_one_stream(1) else settings.slots(1))
    slots = settings.slots(1)
    cells = cells_for(settings, context if settings.has_one_stream(1) else -(-context // slots), 1, layers.window)
    if all(isinstance(layer.cache, RecurrentState) for layer in layers.caches):
        r, s = _state_bytes(layers)
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


def _kind(cache: Cache, layers: Layers) -> str:
    if cache.kind == "indexer_keys":
        return "indexer"
    return "window" if layers.is_windowed(cache) else "full"


def _row(layer: Layer, layers: Layers, dtype: Dtype, transposes_v: bool) -> tuple[int, int]:
    """Bytes of one cell's K and V in these layers. A transposed V is padded to the width of the widest layer."""
    k, *rest = layer.kept.token_rows()
    v = layers.widest_v if transposes_v and layer.has_heads else sum(rest)
    return layer.num_layers * bytes_of(k, dtype), layer.num_layers * bytes_of(v, dtype.v or dtype)


def _state_bytes(layers: Layers) -> tuple[int, int]:
    """Bytes of one slot's convolution inputs and states in all layers, in fp32."""
    r = s = 0
    for layer in layers.caches:
        if isinstance(layer.cache, RecurrentState):
            r += layer.num_layers * bytes_of(layer.cache.conv_channels * (layer.cache.conv_kernel - 1), DTYPES["fp32"])
            s += layer.num_layers * bytes_of(layer.cache.state_elements, DTYPES["fp32"])
    return r, s


def _check_part(record: Record, part: Part, log: Log, setup: Setup) -> list[Figure]:
    cells = part.cells * part.streams
    figures = []
    if "cells" in record.parts:
        if log.text("context_tokens") is None and part.name != "window":
            figures.append(given(record, "cells", "cells", "cells", "an input: the log has no n_ctx"))
        else:
            words = f"{part.name}: cells per stream"
            figures.append(check_count(record, "cells", "cells", part.cells, "cells", words))
        if setup.spec.model_type == _LAYERS_WITHOUT:
            total, words = setup.spec.num_layers, "all layers, including those without attention"
        else:
            total, words = part.layers, "layers with a cache"
        figures.append(check_count(record, "layers", "layers", total, "layers", words))
    sizes = {"size": ("cache_bytes", part.k + part.v), "k": ("k_bytes", part.k), "v": ("v_bytes", part.v)}
    return figures + check_sizes(record, sizes, cells, f"{cells:,} cells x {{}}")


def _check_buffer(log: Log, record: Record, layers: Layers, setup: Setup) -> list[Figure]:
    """One device's share of a cache: a number of whole layers.

    A context with several caches has one buffer per cache on each device. The lines do not say which is which, so they
    are not checked.
    """
    parts = _parts(log, record, layers, setup, setup.dtype)
    if len({part.name for part in parts}) != 1 or log.named("cache", "self"):
        return []
    part = parts[0]
    per_layer = part.cells * part.streams * (part.k + part.v) // part.layers
    held = min(part.layers, max(1, round(parse_printed(record.parts["size"]).middle / per_layer)))
    words = f"{held} of {part.layers} layers x {per_layer:,} bytes on {record.parts['device']}"
    return [check_size(record, "size", "buffer_bytes", held * per_layer, words)]


def _check_states(record: Record, layers: Layers, setup: Setup) -> list[Figure]:
    """States in fp32 for every slot, and one for each drafted token (rs_seq).

    The line prints all the model's layers, including those without a state.
    """
    slots, kept = parse_settings(setup.settings).slots(1), 1 + int(record.parts.get("drafted", "0"))
    r, s = (kept * size for size in _state_bytes(layers))
    sizes = {"size": ("state_bytes", r + s), "r": ("r_bytes", r), "s": ("s_bytes", s)}
    return [
        check_count(record, "slots", "slots", slots, "slots", "sequences that can run at once"),
        check_count(record, "layers", "layers", setup.spec.num_layers, "layers", "all layers of the model"),
        *check_sizes(record, sizes, slots, f"{slots} slots x {{}}"),
    ]
