"""The caches of llama.cpp's context as its log lines have them: cells, layers, and the bytes of one cell.

Source: llama-kv-cache.cpp, llama-kv-cache-iswa.cpp and llama-memory-recurrent.cpp in llama-cpp-python 0.3.36.
"""

from __future__ import annotations

from kvcalc.engines.llama_cpp.account import cells_for
from kvcalc.engines.llama_cpp.architectures import Layer, Layers, layers_of
from kvcalc.engines.llama_cpp.placement import devices_of_layers, parse_shares
from kvcalc.engines.llama_cpp.settings import parse_settings
from kvcalc.engines.log import Setup
from kvcalc.engines.log_lines import Figure, Log, Record, parse_printed
from kvcalc.engines.rounding import round_up
from kvcalc.errors import UsageError
from kvcalc.memory.dtypes import DTYPES, Dtype, bytes_of, pair, parse_dtype
from kvcalc.memory.sharding import stages_of
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
        whole = next((other for other in log.named("creating") if created_part(other) == "full"), record)
        if "cells" in whole.parts:
            context = int(whole.parts["cells"]) * (1 if has_one_stream else slots)
    cells = cells_for(settings, context if has_one_stream else -(-context // slots), 1, layers.window)
    if all(isinstance(layer.cache, RecurrentState) for layer in layers.caches):
        r, s, _ = state_bytes(layers)
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


def state_bytes(layers: Layers) -> tuple[int, int, int]:
    """Bytes of one slot's convolution inputs and states in all layers, in fp32, and of convolutions beside them.

    The last are the inputs of Qwen4-Exp's n-grams (P in the log), which are described as states without a convolution.
    """
    r = s = p = 0
    states = [layer for layer in layers.caches if isinstance(layer.cache, RecurrentState)]
    convolves = any(layer.cache.conv_channels for layer in states if isinstance(layer.cache, RecurrentState))
    for cache, _, count in states:
        if isinstance(cache, RecurrentState):
            r += count * bytes_of(cache.conv_channels * (cache.conv_kernel - 1), DTYPES["fp32"])
            size = count * bytes_of(cache.state_elements, DTYPES["fp32"])
            s, p = (s, p + size) if convolves and not cache.conv_channels else (s + size, p)
    return r, s, p


# Checks what each device holds of llama.cpp's caches: the lines `CUDA0 KV buffer size` and `CUDA0 RS buffer size`.
# A layer's cache is on the device of the layer (`kvcalc.engines.llama_cpp.placement`). If the log says how the layers
# are divided, the bytes of each device follow. Otherwise a buffer must be a number of whole layers.

# Layers that are not on a device of their own.
_HOST = "CPU"
# These backends lengthen the last row of a quantized tensor to a multiple of 512 elements, and place tensors at
# multiples of 128 bytes (MATRIX_ROW_PADDING, ggml_backend_cuda_buffer_type_get_alloc_size). Observed for DeepSeek-R1,
# whose row has 576 elements: 1166.65 MiB for a cache of 1166.62 MiB.
_PADS = ("CUDA", "ROCm", "MUSA", "SYCL", "CANN")
_ROW_ELEMENTS, _ALIGNMENT = 512, 128
# Source: no_alloc in llama_kv_cache (llama-kv-cache.cpp), for --fit and llama-fit-params.
_MEASURED = "an input: the buffers of a model whose memory is only measured have no bytes"


class Buffer(NamedTuple):
    """A buffer's line, and the lines that tell which cache it is for: the one before it, and the sum after it."""

    record: Record
    created: Record | None
    total: Record | None


class Divided(NamedTuple):
    """The first and last layer of each device by name. `is_stated` is whether the log has --tensor-split."""

    bounds: dict[str, tuple[int, int]]
    is_stated: bool


def check_buffers(log: Log, layers: Layers, setup: Setup) -> list[Figure]:
    """Compare every buffer with the layers of its device. Buffers whose cache is not known are not checked."""
    divided = _divided(log, setup)
    figures: list[Figure] = []
    for buffer in _buffers(log):
        line = buffer.total or buffer.record
        parts = parts_of(log, line, layers, setup, dtype_of(line, setup))
        part = _part_of(buffer, [*parts, *drafting_parts(log, line, setup, dtype_of(line, setup))])
        if part is not None and not parse_printed(buffer.record.parts["size"]).middle:
            figures.append(buffer.record.as_input("size", "buffer_bytes", "bytes", _MEASURED))
        elif part is not None:
            figures.append(_check(log, buffer, part, divided, setup))
    for record in log.named("state_buffer"):
        figures += _check_states(log, record, layers, divided, setup)
    return figures


def count_states(record: Record, state: int) -> int:
    """The number of states of `state` bytes in a printed size, at least 1."""
    return max(1, round(parse_printed(record.parts["size"]).middle / state)) if state else 1


def _buffers(log: Log) -> list[Buffer]:
    """The buffers in the order of the log. A cache's buffers are printed before its sum."""
    buffers: list[Buffer] = []
    created: Record | None = None
    first = 0
    for record in log.records:
        if record.name == "creating":
            created = record
        elif record.name == "buffer":
            buffers.append(Buffer(record, created, None))
        elif record.name in ("cache", "self"):
            buffers[first:] = [buffer._replace(total=record) for buffer in buffers[first:]]
            first, created = len(buffers), None
    return buffers


def _part_of(buffer: Buffer, parts: list[Part]) -> Part | None:
    """The cache of a buffer: the one that was announced, or the one with the cells and layers of the sum.

    Of several, it is the one with the bytes of the sum.
    """
    if buffer.total is not None and "layers" in buffer.total.parts:
        said, printed = buffer.total.parts, parse_printed(buffer.total.parts["size"])
        alike = [part for part in parts if (part.cells, part.layers) == (int(said["cells"]), int(said["layers"]))]
        alike.sort(key=lambda part: not printed.holds(part.cells * part.streams * (part.k + part.v)))
        return next(iter(alike), None)
    if buffer.created is not None:
        return next((part for part in parts if part.name == created_part(buffer.created)), None)
    candidates = [part for part in parts if not part.is_for_drafts]
    return candidates[0] if len({part.name for part in candidates}) == 1 else None


def _divided(log: Log, setup: Setup) -> Divided | None:
    """The layers of each device by llama.cpp's rule, or None if the log does not have the devices.

    The layers before those on devices are in host memory. A file with MTP layers has more layers than the model.
    """
    devices = log.named("device")
    offloaded, _, total = (log.text("offloaded") or "").partition("/")
    if not devices or not total:
        return None
    stated = next((record.parts["shares"] for record in log.named("split")), None)
    try:
        shares = parse_shares(stated or ",".join(record.parts["free"] for record in devices))
    except UsageError:
        return None
    placed, num_layers = min(int(offloaded), int(total)), int(total) - 1
    if placed < 1 or len(shares) != len(devices) or num_layers > 2 * setup.spec.num_layers:
        return None
    first = num_layers + 1 - placed
    *of_layers, _ = devices_of_layers(placed - 1, shares)
    bounds = {_HOST: (0, first - 1)}
    for number, record in enumerate(devices):
        held = [first + place for place, device in enumerate(of_layers) if device == number]
        bounds[record.parts["device"]] = (held[0], held[-1]) if held else (0, -1)
    return Divided(bounds, stated is not None)


def _check(log: Log, buffer: Buffer, part: Part, divided: Divided | None, setup: Setup) -> Figure:
    record = buffer.record
    device, cells = record.parts["device"], part.cells * part.streams
    padding = _padding(device, part, cells, dtype_of(buffer.total or record, setup))
    per_layer = cells * (part.k + part.v) // part.layers + padding
    if divided is not None and device in divided.bounds and not part.is_for_drafts:
        first, last = divided.bounds[device]
        held_part = _on_device(log, buffer, part, (first, last), setup)
        number = 0 if held_part is None else held_part.layers
        held = 0 if held_part is None else cells * (held_part.k + held_part.v) + number * padding
        if divided.is_stated or parse_printed(record.parts["size"]).holds(held):
            words = f"{number} of {part.layers} layers x {per_layer:,} bytes: layers {first} to {last} on {device}"
            return record.check_size("size", "buffer_bytes", held, words)
    number = min(part.layers, count_states(record, per_layer))
    words = f"{number} of {part.layers} layers x {per_layer:,} bytes on {device}"
    return record.check_size("size", "buffer_bytes", number * per_layer, words)


def _padding(device: str, part: Part, cells: int, dtype: Dtype) -> int:
    """The bytes by which one layer's K and V are longer on this device."""
    padding = 0
    if device.rstrip("0123456789") in _PADS:
        for row, kind in ((part.k // part.layers, dtype), (part.v // part.layers, dtype.v or dtype)):
            short = -row * kind.block_elements // kind.block_bytes % _ROW_ELEMENTS
            if row and short and not kind.is_float:
                padding += round_up(cells * row + bytes_of(short, kind), _ALIGNMENT) - cells * row
    return padding


def _on_device(log: Log, buffer: Buffer, part: Part, bounds: tuple[int, int], setup: Setup) -> Part | None:
    """The same cache with the layers of one device. None if none of them has it."""
    line = buffer.total or buffer.record
    (stage,) = stages_of(setup.share, (bounds,))
    layers = layers_of(stage, parse_settings(setup.settings))
    on_line = parts_of(log, line, layers, setup, dtype_of(line, setup))
    return next((other for other in on_line if other.name == part.name), None)


def _check_states(log: Log, record: Record, layers: Layers, divided: Divided | None, setup: Setup) -> list[Figure]:
    """The states on a device: those of whole layers, and one more for each drafted token."""
    slots = parse_settings(setup.settings).slots(1)
    total = next((line for line in log.named("states") if line.line > record.line), None)
    number = sum(layer.num_layers for layer in layers.caches if isinstance(layer.cache, RecurrentState))
    if not number or total is None:
        return []
    state = slots * sum(state_bytes(layers)) // number
    kept = 1 + int(total.parts["drafted"]) if "drafted" in total.parts else count_states(total, state * number)
    device = record.parts["device"]
    held = min(number, count_states(record, kept * state))
    words = f"{held} of {number} layers x {kept * state:,} bytes on {device}"
    if divided is not None and device in divided.bounds:
        first, last = divided.bounds[device]
        (stage,) = stages_of(setup.share, (divided.bounds[device],))
        caches = layers_of(stage, parse_settings(setup.settings)).caches
        counted = sum(layer.num_layers for layer in caches if isinstance(layer.cache, RecurrentState))
        if divided.is_stated or parse_printed(record.parts["size"]).holds(counted * kept * state):
            held = counted
            words = f"{held} of {number} layers x {kept * state:,} bytes: layers {first} to {last} on {device}"
    computed = slots * kept * sum(state_bytes(layers)) if held == number else held * kept * state
    return [record.check_size("size", "state_buffer_bytes", computed, words)]
