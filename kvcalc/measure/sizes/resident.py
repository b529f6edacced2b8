"""The peak memory of a process that measures on a CPU.

A run first reads a large buffer to measure the bandwidth. Then it holds its weights and caches until it ends. One phase
follows another beside them: the prefill of the largest layer, the rows that fill the caches, and the comparison of
kernels with the buffer that flushes the last-level cache.
"""

from __future__ import annotations

import psutil

from kvcalc.attention.recurrent import StateShape
from kvcalc.measure.devices.device import last_level_cache_bytes
from kvcalc.measure.devices.timing import FLUSHED_TIMES
from kvcalc.measure.layers.fill import CHUNK_BYTES as FILL_BYTES
from kvcalc.measure.layers.parts import Part, parts_of
from kvcalc.measure.layers.stack import Request
from kvcalc.measure.reference import CHUNK_BYTES as REFERENCE_BYTES
from kvcalc.model.caches import CrossAttention
from kvcalc.model.mixers.attention import AttentionShape
from kvcalc.model.spec import ModelSpec
from kvcalc.records import NamedTuple

# What torch loads and keeps on its first use, beyond its import: kernels, threads' stacks and the profiler's module.
_FIRST_USE_BYTES = 40 << 20

# glibc gives freed blocks of this size back at once, and keeps smaller ones, where no larger block fits, until it is
# asked for them. Source: DEFAULT_MMAP_THRESHOLD_MAX in glibc's malloc/malloc.c.
_MAPPED_BYTES = 32 << 20
# It keeps up to twice as much free memory at the end of its heap (M_TRIM_THRESHOLD, mallopt(3)). How much differs from
# run to run, so the mean is counted.
_KEPT_BYTES = _MAPPED_BYTES


class Prompt(NamedTuple):
    """The prompt that is prefilled: tokens of each sequence in all and in one chunk, and sequences."""

    tokens: int
    chunk_tokens: int
    batch_size: int


def process_bytes() -> int:
    """The memory that this process takes now, with Python and torch."""
    return int(psutil.Process().memory_info().rss)


def workspace_bytes(spec: ModelSpec, request: Request, prompt: Prompt, copies: int) -> int:
    """Bytes beyond weights and caches: the most of any phase. `copies` is the most that a step copies of its cache."""
    hidden, width = spec.attention.hidden_size or 0, request.dtype.block_bytes
    pieces = prompt.batch_size * prompt.tokens * hidden * width
    prefill = max(_prefill_bytes(part, hidden, width, prompt) for part in parts_of(spec))
    if request.storage.kind == "none":
        return _FIRST_USE_BYTES + 2 * pieces + prefill
    layer = (
        max(_layer_cache_bytes(part, width, prompt) for part in parts_of(spec)) if request.prefill == "sample" else 0
    )
    known = request.effort.cache_bytes
    flush = FLUSHED_TIMES["cpu"] * (last_level_cache_bytes(request.device) if known is None else known)
    fill = min(FILL_BYTES, max(_drawn_bytes(part, request) for part in parts_of(spec)))
    # The reference of the kernels reads rows in fp32.
    compare = min(REFERENCE_BYTES, max(_drawn_bytes(part, request) for part in parts_of(spec))) if width < 4 else 0
    # Projections in fp32 free blocks of many sizes, which the heap keeps for a while.
    kept = min(_KEPT_BYTES, prefill) if width < 4 else 0
    return _FIRST_USE_BYTES + max(pieces + layer + prefill + kept, fill, flush + max(compare, copies))


def _layer_cache_bytes(part: Part, width: int, prompt: Prompt) -> int:
    """The prompt's own cache of one layer."""
    rows = min(prompt.tokens, part.window or prompt.tokens) * sum(part.cache.token_rows())
    return prompt.batch_size * rows * width


def _drawn_bytes(part: Part, request: Request) -> int:
    """The rows of one layer's cache in fp32 (twice their size in 16 bits)."""
    if isinstance(part.shape, StateShape) or isinstance(part.cache, CrossAttention):
        return 0
    tokens = min(request.context_tokens, part.window or request.context_tokens)
    return 4 * request.batch_size * tokens * sum(part.cache.token_rows())


def _prefill_bytes(part: Part, hidden: int, width: int, prompt: Prompt) -> int:
    """The temporaries of one chunk of the prompt in one layer: the largest of its steps."""
    tokens = prompt.batch_size * prompt.chunk_tokens

    def project(inputs: int, outputs: int) -> int:
        """A projection: its output, and if it runs in fp32, its input, weights and output in fp32."""
        return max(tokens * outputs * width, 4 * (tokens * (inputs + outputs) + inputs * outputs) if width < 4 else 0)

    if isinstance(part.shape, StateShape):
        return _recurrence_bytes(part.shape, hidden, width, prompt, project(hidden, sum(part.shape.in_widths)))
    shape = part.shape
    heads, k_width, v_width = shape.num_heads, shape.qk_head_dim, shape.v_head_dim
    query, out = tokens * heads * k_width * width, tokens * heads * v_width * width
    output = 2 * out + project(heads * v_width, hidden)
    every = tokens * heads * (k_width + v_width) * width
    if shape.is_latent:
        # K and V are rebuilt for all tokens so far, and V is padded to the width of K.
        seen = prompt.batch_size * prompt.tokens * heads
        rebuilt, padded = seen * (k_width + v_width) * width, seen * k_width * width
        positions = tokens * heads * shape.qk_rope_head_dim * width
        attend = query + max(padded + query, seen * v_width * 4)
        held = query + positions + rebuilt + max(attend, output)
        return max(held, project(shape.q_lora_rank or hidden, heads * k_width))
    kept = tokens * shape.num_kv_heads * (k_width + v_width) * width
    attend = every + out if heads != shape.num_kv_heads else out
    steps = attend + output if query < _MAPPED_BYTES else max(attend, output)
    return max(project(hidden, heads * k_width), query + kept + steps) + _mask_bytes(shape, width, prompt)


def _mask_bytes(shape: AttentionShape, width: int, prompt: Prompt) -> int:
    """The mask of the last chunk, repeated for the query heads of a group, and the form that the kernel reads."""
    if prompt.tokens <= prompt.chunk_tokens:
        return 0
    group = shape.num_heads // max(1, shape.num_kv_heads)
    return group * prompt.chunk_tokens * prompt.tokens * (2 + width)


def _recurrence_bytes(shape: StateShape, hidden: int, width: int, prompt: Prompt, projected: int) -> int:
    """The temporaries of a recurrence over one chunk: the convolution's windows, then fp32 rows of every head."""
    tokens = prompt.batch_size * prompt.chunk_tokens
    mixed = tokens * sum(shape.in_widths) * width
    windows = tokens * shape.channels * (1 + shape.kernel) * width
    if shape.kind not in ("linear", "delta"):
        return max(projected, mixed + windows + tokens * shape.channels * 8)
    # Query and key repeated for every head, values, updates and outputs; and matrices over all pairs of tokens.
    rows = 4 * tokens * shape.heads * (4 * shape.k_width + 4 * shape.v_width)
    pairs = 4 * prompt.batch_size * shape.heads * prompt.chunk_tokens**2 * 4
    # The heap keeps freed blocks that are not mapped. torch asks for aligned blocks, which do not fit where a block of
    # their size was. So the rows that the delta rule has freed, and the inputs of the convolution, count too. With
    # M_MMAP_THRESHOLD at 1 MiB they do not, and the peak of qwen3-next is 100 MiB lower.
    if shape.kind == "delta" and 4 * tokens * shape.heads * max(shape.k_width, shape.v_width) < _MAPPED_BYTES:
        rows += rows + 2 * tokens * shape.channels * width
    return max(projected, mixed + max(windows, rows + pairs))
