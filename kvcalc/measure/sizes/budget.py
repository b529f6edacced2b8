"""The memory that a run needs, computed before anything is allocated, and the size of its prefill chunks."""

from __future__ import annotations

from kvcalc.attention.backends import BACKENDS, Case
from kvcalc.errors import DoesNotFitError
from kvcalc.measure.layers.build import TORCH_DTYPES
from kvcalc.measure.layers.parts import parts_of
from kvcalc.measure.layers.stack import Request
from kvcalc.measure.sizes.resident import Prompt, process_bytes, workspace_bytes
from kvcalc.memory import kv_cache
from kvcalc.memory.dtypes import Dtype, bytes_of
from kvcalc.memory.kv_cache import longest_context, most_that_fit
from kvcalc.model.caches import HEADS_CACHES, Cache, CrossAttention, RecurrentState
from kvcalc.model.memo import remembered
from kvcalc.model.mixers.attention import AttentionShape
from kvcalc.model.spec import ModelSpec
from kvcalc.records import NamedTuple
from kvcalc.units import format_size

# The temporaries of one prefill step, in bytes, and its most tokens, which is also the length of the timed prompt:
# enough for the best rate of matrix products.
_WORKSPACE_BYTES = {"cpu": 1 << 30, "mps": 1 << 30, "cuda": 4 << 30, "xpu": 4 << 30}
MOST_PROMPT_TOKENS = 2048
# Recurrences compute several tokens at once with a matrix over all pairs of them.
_MOST_RECURRENT_TOKENS = 512

# The share of the free memory that a run may use. The rest is for other processes, which may grow during the run. On a
# CPU, too little free memory means swapping or being killed.
_USABLE_PERCENT = {"cpu": 85, "mps": 85, "cuda": 95, "xpu": 95}

# Additional device memory for kernels' scratch space and the roof's buffer. A CPU's is counted: `resident`.
_OVERHEAD_BYTES = 512 << 20

# A scale is an fp32 number: of a quantized row (one token, one head), or of all rows of a head, or of K or V.
_SCALE_BYTES = 4


class Need(NamedTuple):
    """The bytes a run needs: attention weights, cache and temporaries.

    `torch_bytes` is what the process takes already, with Python and torch. 0 if the run takes the memory of a GPU.
    """

    weights_bytes: int
    kv_cache_bytes: int
    workspace_bytes: int
    torch_bytes: int = 0

    @property
    def further_bytes(self) -> int:
        """What the run takes beyond what the process has already. This must be free."""
        return self.weights_bytes + self.kv_cache_bytes + self.workspace_bytes

    @property
    def total_bytes(self) -> int:
        """The peak memory of the process, or of the device."""
        return self.torch_bytes + self.further_bytes


@remembered
def weights_bytes_of(spec: ModelSpec, dtype: Dtype) -> int:
    """Bytes of the projections in all parts that run, without biases, norms and convolutions."""
    hidden = spec.attention.hidden_size or 0
    return sum(part.parameters(hidden) for part in parts_of(spec)) * dtype.block_bytes


@remembered
def used_weights_bytes(spec: ModelSpec, dtype: Dtype) -> int:
    """Bytes of the projections that a decode step reads, and a prompt is multiplied by."""
    hidden = spec.attention.hidden_size or 0
    return sum(part.used_parameters(hidden) for part in parts_of(spec)) * dtype.block_bytes


def predicted_bytes(spec: ModelSpec, request: Request) -> int:
    """The bytes the caches must hold: the formula, plus rounding to blocks and scales.

    This must not use any tensor, because it is compared with the tensors' bytes.
    """
    if request.storage.kind == "none":
        return 0
    if request.storage.is_plain:
        return sum(kv_cache.stored_bytes(spec, request.dtype, *load) for load in request.loads)
    return _kept_bytes(spec, request, request.storage.block_size or 1)


def read_bytes(spec: ModelSpec, request: Request) -> int:
    """Bytes of cache that one decode step reads: all held rows and their scales, without the unused part of a block."""
    if request.storage.kv_dtype is None:
        return sum(kv_cache.decode_read_bytes(spec, request.dtype, *load) for load in request.loads)
    return _kept_bytes(spec, request, 1)


def _kept_bytes(spec: ModelSpec, request: Request, block_size: int) -> int:
    """Bytes of the rows in blocks of `block_size`. States and an encoder's K and V are never paged or quantized."""
    storage = request.storage

    def count(cache: Cache, tokens: int, dtype: Dtype) -> int:
        if isinstance(cache, (RecurrentState, CrossAttention)):
            return kv_cache.stored_cache_bytes(cache, tokens, dtype)
        rows = -(-min(tokens, cache.window or tokens) // block_size) * block_size
        scales = rows * _scales_of(cache, "row") * _SCALE_BYTES if storage.kv_dtype and storage.scales == "row" else 0
        return bytes_of(rows * sum(cache.token_rows()), storage.dtype(dtype)) + scales

    fixed = 0
    if storage.kv_dtype and storage.scales != "row":
        fixed = sum(g.num_layers * _scales_of(cache, storage.scales) for g in spec.layers for cache in g.caches)
    rows = sum(number * kv_cache.sequence_bytes(spec, request.dtype, n, count) for n, number in request.loads)
    return rows + fixed * _SCALE_BYTES


def _scales_of(cache: Cache, scaling: str) -> int:
    """The scales of a cache, or of one of its rows."""
    if isinstance(cache, (RecurrentState, CrossAttention)):
        return 0
    if not isinstance(cache, HEADS_CACHES):
        return 1
    return 2 if scaling == "tensor" else 2 * cache.num_kv_heads


def need_of(spec: ModelSpec, request: Request) -> Need:
    """The memory that measuring `spec` takes on the request's device."""
    shape = _widest(spec)
    cache = predicted_bytes(spec, request)
    prompt = prompt_of(request)
    tokens = min(chunk_tokens(spec, request), prompt.context_tokens)
    copies = _copies(shape, request, cache // max(1, spec.num_layers))
    if request.device.type == "cpu":
        chunk = request.context_tokens if request.storage.kind == "none" else tokens
        last_chunk = Prompt(max(chunk, prompt.context_tokens), chunk, prompt.batch_size)
        workspace, taken = workspace_bytes(spec, request, last_chunk, copies), process_bytes()
    else:
        workspace, taken = _OVERHEAD_BYTES + tokens * _workspace_per_token(shape, request) + copies, 0
    return Need(weights_bytes_of(spec, request.dtype), cache, workspace, taken)


def _copies(shape: AttentionShape, request: Request, layer_bytes: int) -> int:
    """Bytes of the copies of one layer's cache that exist at the same time.

    Rows are copied when they are gathered from blocks, widened from 8 bits, repeated, rebuilt or concatenated. Without
    a cache, these are K and V of the whole prefix.
    """
    storage, rows = request.storage, request.total_tokens * request.dtype.block_bytes
    every_head = rows * shape.num_heads * (shape.qk_head_dim + shape.v_head_dim)
    if storage.kind == "none":
        # K, V, the queries, and the hidden states of the prefix (input and output).
        return 3 * every_head + 4 * rows * (shape.hidden_size or 0)
    if storage.backend == "repeat-kv" or (shape.is_latent and storage.mla == "expanded"):
        return 2 * every_head
    if storage.is_plain or _reads_stored_rows(shape, request):
        return 0
    # 8-bit rows are widened through fp32.
    return layer_bytes * (2 if storage.kv_dtype is None else 8)


def _reads_stored_rows(shape: AttentionShape, request: Request) -> bool:
    """Whether a kernel that can be used copies no rows. On a GPU, one that has no memory for its copies is left out."""
    storage, device = request.storage, request.device
    if device.type != "cuda" or storage.kind != "preallocated":
        return False
    stored = None if storage.kv_dtype is None else TORCH_DTYPES[storage.kv_dtype]
    widths = shape.qk_head_dim, shape.v_head_dim
    if shape.is_latent:
        widths = shape.kv_lora_rank + shape.qk_rope_head_dim, shape.kv_lora_rank
    layout = "dense" if storage.block_size is None else "paged"
    case = Case(device, request.torch_dtype, 1, 1, *widths, layout, stored, shape.is_latent)
    return any(
        backend.reads_stored_rows and storage.backend in ("auto", name) and name not in storage.without_backends
        and backend.why_not(case) is None
        for name, backend in BACKENDS.items()
    )  # fmt: skip


def _widest(spec: ModelSpec) -> AttentionShape:
    """The model's attention shape, with the most heads and the widest heads of all its layers."""
    shapes = [part.shape for part in parts_of(spec)]
    attention = [shape for shape in shapes if isinstance(shape, AttentionShape)]
    state = max((shape.channels for shape in shapes if not isinstance(shape, AttentionShape)), default=0)
    return spec.attention._replace(
        num_heads=max((s.num_heads for s in attention), default=1),
        qk_head_dim=max((s.qk_head_dim for s in attention), default=state),
        v_head_dim=max((s.v_head_dim for s in attention), default=state),
    )


def prompt_of(request: Request) -> Request:
    """The prompt that is prefilled: all tokens but those of the timed steps, or one short prompt of one sequence."""
    if request.prefill == "full":
        return request._replace(context_tokens=request.context_tokens - request.steps)
    return request._replace(context_tokens=min(MOST_PROMPT_TOKENS, request.context_tokens), batch_size=1, lengths=())


def chunk_tokens(spec: ModelSpec, request: Request) -> int:
    """Prompt tokens of each sequence in one chunk: a power of two, limited by the workspace."""
    has_states = any(isinstance(part.cache, RecurrentState) for part in parts_of(spec))
    most = _WORKSPACE_BYTES[request.device.type] // _workspace_per_token(_widest(spec), request)
    most = max(1, min(most, _MOST_RECURRENT_TOKENS if has_states else MOST_PROMPT_TOKENS))
    return int(1 << (most.bit_length() - 1))


def usable_bytes(free: int, kind: str) -> int:
    """The part of `free` bytes that a run on a device of `kind` may use."""
    return free * _USABLE_PERCENT[kind] // 100


def layers_that_fit(spec: ModelSpec, request: Request, free: int) -> int:
    """How many of the model's first layers can run within `free` bytes: all, fewer, or 0."""
    usable = usable_bytes(free, request.device.type)

    def needed(layers: int) -> int:
        return need_of(spec.head(layers), request).further_bytes

    if needed(spec.num_layers) <= usable:
        return spec.num_layers
    # A model may begin with layers that keep nothing. There is nothing to run in them.
    first = next(n for n in range(1, spec.num_layers + 1) if any(group.caches for group in spec.head(n).layers))
    if needed(first) > usable:
        return 0
    return most_that_fit(lambda n: needed(max(n, first)), usable, spec.num_layers)


def check_fits(spec: ModelSpec, request: Request, free: int) -> None:
    """Raise DoesNotFitError (exit 4) if the run needs more than the usable part of `free` bytes.

    The error gives the needed bytes, and the hint says what would fit.
    """
    kind, need = request.device.type, need_of(spec, request)
    usable = usable_bytes(free, kind)
    if need.further_bytes <= usable:
        return
    longest = longest_context(
        lambda tokens: need_of(spec, request._replace(context_tokens=max(tokens, 1))).further_bytes, usable
    )
    fewer = layers_that_fit(spec, request, free)
    fits = longest and longest > request.steps
    hint = f"the largest context that fits is {longest:,} tokens" if fits else "no context fits"
    if fewer:
        hint += f"; for the requested context, use --layers {fewer}"
    torch, beyond = "", ""
    if need.torch_bytes:
        torch, beyond = f"torch {format_size(need.torch_bytes)}, ", " beyond torch's own"
    raise DoesNotFitError(
        f"{spec.name} as {spec.attention.kind} needs {format_size(need.total_bytes)} ({torch}weights "
        f"{format_size(need.weights_bytes)}, cache {format_size(need.kv_cache_bytes)}, workspace "
        f"{format_size(need.workspace_bytes)}); {format_size(free, capacity=True)} is free{beyond}, and a run may use "
        f"{_USABLE_PERCENT[kind]}% of it",
        hint,
    )


def _workspace_per_token(shape: AttentionShape, request: Request) -> int:
    """Bytes of temporaries per prompt token of each sequence. This is a generous estimate.

    It has the hidden states, queries, keys and values a few times, in the compute dtype and in fp32, and the mask of
    one group's query heads in two forms if there is more than one chunk. Attention is fused: there are no scores.
    """
    prompt = prompt_of(request)
    widths = 2 * (shape.hidden_size or 0) + 3 * shape.num_heads * (shape.qk_head_dim + shape.v_head_dim)
    activations = prompt.batch_size * widths * (request.dtype.block_bytes + 4)
    if prompt.context_tokens <= MOST_PROMPT_TOKENS:
        return activations
    each = shape.num_heads // (1 if shape.is_latent else max(1, shape.num_kv_heads))
    return activations + each * prompt.context_tokens * (1 + request.dtype.block_bytes)
