"""Checks llama.cpp's numbers: the cells of a context, the layers with a cache, and the bytes of K, V and states.

Source: llama-kv-cache.cpp, llama-kv-cache-iswa.cpp and llama-memory-recurrent.cpp in llama-cpp-python 0.3.36. Older
builds are described by the pull requests they do not have.
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from itertools import product

from kvcalc.engines.llama_cpp.architectures import Layers, layers_of
from kvcalc.engines.llama_cpp.log.caches import (
    Part,
    check_buffers,
    count_states,
    created_part,
    drafting_parts,
    dtype_of,
    parts_of,
    state_bytes,
)
from kvcalc.engines.llama_cpp.settings import AUTO_SLOTS, LATENT, NO_V, PADDING, WINDOWS, parse_settings
from kvcalc.engines.log import Reading, Setup
from kvcalc.engines.log_lines import EQUAL, UNEXPLAINED, Figure, Log, Record, count_equal, parse_printed
from kvcalc.memory.dtypes import parse_dtype
from kvcalc.model.caches import RecurrentState
from kvcalc.model.spec import GgufFacts, ModelSpec, latent_of, windows

_PULLS = (None, NO_V, PADDING, WINDOWS, LATENT)
_STEPS = ("2048", "1024", "256", "128", "64")
# The builds whose server may have chosen its slots, which share one stream: those since November 2025.
_CHOOSE_SLOTS = (None, NO_V)
# Its layers without attention also have caches, of 0 bytes (n_head_kv 0, models/deci.cpp).
_LAYERS_WITHOUT = "nemotron-nas"

_NO_CONTEXT = "an input: the log has no --ctx-size"
_OWN_RULES = "an input: Ollama sizes windows and states by its own rules"


def readings(log: Log, spec: ModelSpec) -> Iterator[Reading]:
    """Readings for the current build and then for older builds, with both values of each setting not in the log.

    Without the size of a step, windows are read with the default and then with other usual sizes. A file of MLA may
    also have K and V of every head.
    """
    yield from _readings(log, spec, None, _PULLS)
    if windows(spec) and log.text("ubatch_size") is None:
        for ubatch in _STEPS:
            for reading in _readings(log, spec, ubatch, (None,)):
                yield reading._replace(taken=(*reading.taken, f"--ubatch-size {ubatch}"))
    if latent_of(spec) is not None:
        expanded = spec._replace(gguf=(spec.gguf or GgufFacts(None))._replace(expands_latent=True))
        for reading in _readings(log, expanded, None, (None,)):
            yield reading._replace(taken=(*reading.taken, "a file with K and V of every head"), spec=expanded)


def _readings(log: Log, spec: ModelSpec, step: str | None, pulls: tuple[int | None, ...]) -> Iterator[Reading]:
    plain = {}
    lines = log.named("cache")
    slots = log.text("parallel") or _slots_of(log)
    stated = [] if slots is None or slots == "0" else [slots]
    ubatch = step or log.text("ubatch_size")
    if ubatch is not None:
        plain["ubatch-size"] = ubatch
    streams = next((line.parts["streams"] for line in lines if "streams" in line.parts), None)
    unified = log.flag("kv_unified")
    if unified is None and streams is not None:
        unified = streams == "1"
    flash = {"true": "on", "false": "off", "1": "on", "0": "off"}.get(log.text("flash_attn") or "")
    whole = [True] if log.text("swa_full") else [False, True]
    for pull, number, is_unified, kept_whole, attention in product(
        pulls, stated or ["1", str(AUTO_SLOTS)], [unified] if unified is not None else [False, True], whole,
        [flash] if flash else ["auto", "off"],
    ):  # fmt: skip
        chosen = not stated and number != "1"
        if chosen and not (is_unified and pull in _CHOOSE_SLOTS):
            continue
        settings = {**plain, "parallel": number}
        taken = [f"{number} slots, which llama-server starts by default"] if chosen else []
        if pull is not None:
            settings["before-pull"] = str(pull)
            taken.append(f"a build before pull request {pull}")
        if is_unified:
            settings["kv-unified"] = ""
        if unified is None and not chosen and int(number) > 1:
            taken.append("one stream for all slots" if is_unified else "one stream per slot")
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
        dtype = dtype_of(record, setup)
        made = [*parts_of(log, record, layers, setup, dtype), *drafting_parts(log, record, setup, dtype)]
        figures += max((_check_part(record, part, log, setup) for part in made), key=count_equal, default=[])
    for record in log.named("creating"):
        figures += _check_created(log, record, layers, setup)
    for record in log.named("states"):
        figures += _check_states(log, record, layers, setup)
    return figures + check_buffers(log, layers, setup) + _check_ollama(log, layers, setup)


def _check_created(log: Log, record: Record, layers: Layers, setup: Setup) -> list[Figure]:
    """The cells of a cache as it is announced."""
    name = created_part(record)
    if log.text("context_tokens") is None and name != "window":
        return [record.as_input("cells", "cells", "cells", "an input: the log has no n_ctx")]
    parts = [part for part in parts_of(log, record, layers, setup, setup.dtype) if part.name == name]
    return [
        record.check_count("cells", "cells", part.cells, "cells", f"{name}: cells per stream") for part in parts[:1]
    ]


def _check_part(record: Record, part: Part, log: Log, setup: Setup) -> list[Figure]:
    cells = part.cells * part.streams
    figures = []
    if "cells" in record.parts:
        if log.text("context_tokens") is None and part.name != "window":
            figures.append(record.as_input("cells", "cells", "cells", "an input: the log has no n_ctx"))
        else:
            words = f"{part.name}: cells per stream"
            figures.append(record.check_count("cells", "cells", part.cells, "cells", words))
        if setup.spec.model_type == _LAYERS_WITHOUT:
            total, words = setup.spec.num_layers, "all layers, including those without attention"
        else:
            total, words = part.layers, "layers with a cache"
        figures.append(record.check_count("layers", "layers", total, "layers", words))
    sizes = {"size": ("cache_bytes", part.k + part.v), "k": ("k_bytes", part.k), "v": ("v_bytes", part.v)}
    return figures + record.check_sizes(sizes, cells, f"{cells:,} cells x {{}}")


def _slots_of(log: Log) -> str | None:
    """The number of slots in a line about a cache or about states."""
    printed = [line.parts.get("seqs") or line.parts.get("slots") for line in log.named("cache", "states")]
    return next(filter(None, printed), None)


def _check_states(log: Log, record: Record, layers: Layers, setup: Setup) -> list[Figure]:
    """States in fp32 for every slot, and one for each drafted token (rs_seq).

    The line prints all the model's layers, including those without a state. A line without rs_seq has a whole number of
    states.
    """
    slots, sizes = parse_settings(setup.settings).slots(1), state_bytes(layers)
    kept = 1 + int(record.parts["drafted"]) if "drafted" in record.parts else count_states(record, slots * sum(sizes))
    r, s, p = (kept * size for size in sizes)
    words = f"{slots} slots x {{}}" + (f" in {kept} states, {kept - 1} of them for drafted tokens" if kept > 1 else "")
    figures = []
    if "slots" in record.parts:
        is_stated = log.text("parallel") is not None or any("seqs" in line.parts for line in log.named("cache"))
        if is_stated:
            rule = "sequences that can run at once"
            figures.append(record.check_count("slots", "slots", slots, "slots", rule))
        else:
            figures.append(record.as_input("slots", "slots", "slots", "an input: the log has no n_seq_max"))
    if "layers" in record.parts:
        total, words = setup.spec.num_layers, "all layers of the model"
        if int(record.parts["layers"]) > total:
            total, words = total + (setup.spec.num_draft_layers or 0), "all layers of the file, with those of MTP"
        figures.append(record.check_count("layers", "layers", total, "layers", words))
    parts = {"size": ("state_bytes", r + s + p), "r": ("r_bytes", r), "s": ("s_bytes", s), "p": ("p_bytes", p)}
    return figures + record.check_sizes(parts, slots, words)


def _check_ollama(log: Log, layers: Layers, setup: Setup) -> list[Figure]:
    """Check Ollama's own lines: its scheduler's estimate, and since 2025 the sum of the last buffers of all devices.

    Both are the cells of the runner (--ctx-size, KvSize) for all slots, in the type of --kv-cache-type, with one
    decimal (GraphSize in fs/ggml/ggml.go, and ml/device.go, of ollama/ollama).
    """
    totals, buffers = log.named("ollama_total"), log.named("ollama_buffer")
    if not totals and not buffers:
        return []
    if layers.window is not None or any(isinstance(layer.cache, RecurrentState) for layer in layers.caches):
        return [record.as_input("size", "cache_bytes", "bytes", _OWN_RULES) for record in (*totals, *buffers)]
    if log.text("context_tokens") is None:
        return [record.as_input("size", "cache_bytes", "bytes", _NO_CONTEXT) for record in (*totals, *buffers)]
    stated = log.text("ollama_kv_type")
    dtype = setup.dtype if stated is None else parse_dtype(stated, "the log's cache type")
    parts = parts_of(log, (totals or buffers)[0], layers, setup, dtype)
    cells, size = parts[0].cells * parts[0].streams, sum(part.k + part.v for part in parts)
    words = f"{cells:,} cells x {size:,} bytes"
    figures = [record.check_size("size", "cache_bytes", cells * size, words) for record in totals]
    return figures + ([_check_sum(buffers, cells * size, words)] if buffers else [])


def _check_sum(buffers: list[Record], computed: int, words: str) -> Figure:
    """Check the sum of the devices' buffers. A device that is printed again has been filled anew."""
    last = {record.parts["device"]: record for record in buffers}
    printed = [parse_printed(record.parts["size"]) for record in last.values()]
    low, high = (Fraction(sum(bounds)) for bounds in zip(*((size.low, size.high) for size in printed)))
    equal = low <= computed <= high
    return Figure(
        min(record.line for record in last.values()), "cache_bytes", " + ".join(size.text for size in printed), "bytes",
        computed, None if equal else round((low + high) / 2) - computed, EQUAL if equal else UNEXPLAINED, words,
    )  # fmt: skip
