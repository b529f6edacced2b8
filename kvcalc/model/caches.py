"""The kinds of cache a layer can hold: for each its geometry and how many elements it keeps.

A cache answers for one layer and one sequence. `stored_factors` names the numbers whose product is the count, so
that the formula a person reads and the integer a script reads cannot differ.

These are NamedTuples, not dataclasses: creating a frozen dataclass costs about seven times as much at start-up.
NamedTuples of different kinds compare equal when their numbers do: compare types too where kinds may differ.
"""

from __future__ import annotations

from math import prod
from typing import NamedTuple, Union

Factor = tuple[str, int]
"""A named number in a formula, as ("KV heads", 8)."""


def _heads_factors(tokens: Factor, num_kv_heads: int, k_head_dim: int, v_head_dim: int) -> tuple[Factor, ...]:
    """K and V of every head: 2 x heads x tokens x head_dim, or the sum of both widths where they differ."""
    heads = ("KV heads", num_kv_heads)
    if k_head_dim == v_head_dim:
        return (("K and V", 2), heads, tokens, ("head_dim", k_head_dim))
    return (heads, tokens, ("(k_head_dim + v_head_dim)", k_head_dim + v_head_dim))


class FullAttention(NamedTuple):
    """K and V of every past token. MHA, GQA and MQA differ in `num_kv_heads` alone.

    `most_read_tokens`: a step reads at most so many, picked by an indexer (MiniMax-M3); None where it reads all.
    """

    num_kv_heads: int
    k_head_dim: int
    v_head_dim: int
    most_read_tokens: int | None = None

    @property
    def kind(self) -> str:
        return "full_attention"

    @property
    def window(self) -> int | None:
        return None

    def stored_factors(self, tokens: int) -> tuple[Factor, ...]:
        return _heads_factors(("tokens", tokens), self.num_kv_heads, self.k_head_dim, self.v_head_dim)

    def token_rows(self) -> tuple[int, ...]:
        """Elements of the rows one token adds: K's, then V's. A block-scaled dtype must divide each."""
        return (self.num_kv_heads * self.k_head_dim, self.num_kv_heads * self.v_head_dim)

    def on_device(self, tensor_parallel_size: int) -> FullAttention:
        """The share of one of `tensor_parallel_size` devices: heads are divided, and replicated beyond their number."""
        return self._replace(num_kv_heads=max(1, self.num_kv_heads // tensor_parallel_size))


class SlidingWindowAttention(NamedTuple):
    """K and V of the last `window` tokens, the current one included (Mistral-7B v0.1, section 2)."""

    window: int
    num_kv_heads: int
    k_head_dim: int
    v_head_dim: int

    @property
    def kind(self) -> str:
        return "sliding_window_attention"

    def stored_factors(self, tokens: int) -> tuple[Factor, ...]:
        kept = ("min(tokens, window)", min(tokens, self.window))
        return _heads_factors(kept, self.num_kv_heads, self.k_head_dim, self.v_head_dim)

    def token_rows(self) -> tuple[int, ...]:
        return (self.num_kv_heads * self.k_head_dim, self.num_kv_heads * self.v_head_dim)

    def on_device(self, tensor_parallel_size: int) -> SlidingWindowAttention:
        return self._replace(num_kv_heads=max(1, self.num_kv_heads // tensor_parallel_size))


class ChunkedAttention(NamedTuple):
    """K and V of the current chunk of `chunk` tokens; earlier chunks are never seen again (Llama 4)."""

    chunk: int
    num_kv_heads: int
    k_head_dim: int
    v_head_dim: int

    @property
    def kind(self) -> str:
        return "chunked_attention"

    @property
    def window(self) -> int | None:
        return self.chunk

    def stored_factors(self, tokens: int) -> tuple[Factor, ...]:
        kept = ("min(tokens, chunk)", min(tokens, self.chunk))
        return _heads_factors(kept, self.num_kv_heads, self.k_head_dim, self.v_head_dim)

    def token_rows(self) -> tuple[int, ...]:
        return (self.num_kv_heads * self.k_head_dim, self.num_kv_heads * self.v_head_dim)

    def on_device(self, tensor_parallel_size: int) -> ChunkedAttention:
        return self._replace(num_kv_heads=max(1, self.num_kv_heads // tensor_parallel_size))


class IndexerKeys(NamedTuple):
    """One key a token by which sparse attention picks the tokens it reads, beside the layer's other cache.

    Shared by all heads, so every device holds it (DeepSeek-V3.2, section 2.1: the lightning indexer).
    """

    head_dim: int

    @property
    def kind(self) -> str:
        return "indexer_keys"

    @property
    def window(self) -> int | None:
        return None

    def stored_factors(self, tokens: int) -> tuple[Factor, ...]:
        return (("tokens", tokens), ("index_head_dim", self.head_dim))

    def token_rows(self) -> tuple[int, ...]:
        return (self.head_dim,)

    def on_device(self, tensor_parallel_size: int) -> IndexerKeys:
        return self


class LatentAttention(NamedTuple):
    """MLA: one latent and one rotary key a token, shared by all heads, K and V together (DeepSeek-V2, section 2.1).

    `window` is None in every published model; a what-if of a sliding-window model keeps its window.
    `most_read_tokens`: a step reads at most so many, picked by an indexer (DeepSeek-V3.2); None where it reads all.
    """

    kv_lora_rank: int
    qk_rope_head_dim: int
    window: int | None = None
    most_read_tokens: int | None = None

    @property
    def kind(self) -> str:
        return "latent_attention"

    def stored_factors(self, tokens: int) -> tuple[Factor, ...]:
        kept = ("tokens", tokens) if self.window is None else ("min(tokens, window)", min(tokens, self.window))
        return (kept, ("(kv_lora_rank + qk_rope_head_dim)", self.kv_lora_rank + self.qk_rope_head_dim))

    def token_rows(self) -> tuple[int, ...]:
        return (self.kv_lora_rank + self.qk_rope_head_dim,)

    def on_device(self, tensor_parallel_size: int) -> LatentAttention:
        """Every device needs the whole latent: its up-projections are sharded by head, the latent has no heads."""
        return self


class CompressedAttention(NamedTuple):
    """DeepSeek-V4: the last `window` tokens whole, and one entry for every `compress_rate` tokens before and in them.

    Every token and every entry is one vector of `head_dim`, K and V in one, shared by all heads. A compressor keeps
    the key and the gate of tokens that do not fill an entry yet. With `index_head_dim` (compressed sparse attention)
    entries overlap, so keys and gates are twice as wide and half of the last full run is kept, and an indexer keeps
    the same of its own, at its own width; a step then reads `index_topk` entries, else all. A `compress_rate` of 0
    leaves the window alone. Source: DeepseekV4CSACache and DeepseekV4HCACache, Transformers 5.23.0.
    """

    window: int
    head_dim: int
    compress_rate: int = 0
    index_head_dim: int = 0
    index_topk: int = 0

    @property
    def kind(self) -> str:
        return "compressed_attention" if self.compress_rate else "sliding_window_attention"

    def stored_parts(self, tokens: int) -> tuple[Factor, ...]:
        """Elements of one sequence in one layer, by what they are; their sum is what is stored."""
        kept = ("window", min(tokens, self.window) * self.head_dim)
        if not self.compress_rate:
            return (kept,)
        entries, waiting = divmod(tokens, self.compress_rate)
        parts: tuple[Factor, ...] = (kept, ("compressed", entries * self.head_dim))
        width = self.head_dim
        if self.index_head_dim:
            parts = (*parts, ("index keys", entries * self.index_head_dim))
            width += self.index_head_dim
            overlap = self.compress_rate if entries else 0
            return (*parts, ("buffers", 2 * width * (2 * waiting + overlap)))
        return (*parts, ("buffers", 2 * width * waiting))

    def read_parts(self, tokens: int) -> tuple[Factor, ...]:
        """Elements one step reads. The buffers are read once in `compress_rate` steps and not counted."""
        entries = tokens // self.compress_rate if self.compress_rate else 0
        chosen = min(entries, self.index_topk) if self.index_head_dim else entries
        return (
            ("window", min(tokens, self.window) * self.head_dim),
            ("compressed", chosen * self.head_dim),
            ("index keys", entries * self.index_head_dim),
        )

    def token_rows(self) -> tuple[int, ...]:
        return (self.head_dim, self.index_head_dim) if self.index_head_dim else (self.head_dim,)

    def on_device(self, tensor_parallel_size: int) -> CompressedAttention:
        """Shared by all heads: every device holds it."""
        return self


class CrossAttention(NamedTuple):
    """K and V of the encoder's output, computed once and read at every step (T5, Whisper).

    `encoder_tokens` is None until a workload says how many there are.
    """

    num_kv_heads: int
    k_head_dim: int
    v_head_dim: int
    encoder_tokens: int | None = None

    @property
    def kind(self) -> str:
        return "cross_attention"

    @property
    def window(self) -> int | None:
        return None

    def stored_factors(self, tokens: int) -> tuple[Factor, ...]:
        if self.encoder_tokens is None:
            raise ValueError("the encoder's length is not known before bind_workload")
        kept = ("encoder tokens", self.encoder_tokens)
        return _heads_factors(kept, self.num_kv_heads, self.k_head_dim, self.v_head_dim)

    def token_rows(self) -> tuple[int, ...]:
        return (self.num_kv_heads * self.k_head_dim, self.num_kv_heads * self.v_head_dim)

    def on_device(self, tensor_parallel_size: int) -> CrossAttention:
        return self._replace(num_kv_heads=max(1, self.num_kv_heads // tensor_parallel_size))


class RecurrentState(NamedTuple):
    """A state of constant size in place of a cache: Mamba, gated delta nets and their kin.

    A causal convolution over `conv_channels` channels needs its last `conv_kernel` - 1 inputs; the recurrence keeps
    `state_elements`, none where a layer is a convolution alone (LFM2). Dtypes are kvcalc's names; None is the model's
    own, whatever the cache's.

    Devices divide the state by `num_heads`, by channels where there are no heads. `group_channels` of the convolution's
    channels belong to `num_groups` groups heads share, as KV heads are shared: groups are divided, and replicated
    beyond their number (Mamba-2; MambaStateShapeCalculator, vLLM 0.33.0).
    """

    conv_channels: int
    conv_kernel: int
    state_elements: int
    conv_dtype: str | None = None
    state_dtype: str | None = "fp32"
    num_heads: int | None = None
    num_groups: int = 1
    group_channels: int = 0

    @property
    def kind(self) -> str:
        return "recurrent_state"

    @property
    def window(self) -> int | None:
        return None

    def token_rows(self) -> tuple[int, ...]:
        return ()

    def on_device(self, tensor_parallel_size: int) -> RecurrentState:
        """The share of one device: channels, heads and groups are divided, as `splits_evenly` must have allowed."""
        shared = self.group_channels // self.num_groups * max(1, self.num_groups // tensor_parallel_size)
        return self._replace(
            conv_channels=(self.conv_channels - self.group_channels) // tensor_parallel_size + shared,
            state_elements=self.state_elements // tensor_parallel_size,
            num_groups=max(1, self.num_groups // tensor_parallel_size),
            group_channels=shared,
        )

    def splits_evenly(self, tensor_parallel_size: int) -> bool:
        """Whether every one of so many devices holds as much."""
        groups_fit = self.num_groups % tensor_parallel_size == 0 or tensor_parallel_size % self.num_groups == 0
        if self.num_heads is not None:
            return self.num_heads % tensor_parallel_size == 0 and (groups_fit or not self.group_channels)
        return self.conv_channels % tensor_parallel_size == 0 and self.state_elements % tensor_parallel_size == 0


HeadsCache = Union[FullAttention, SlidingWindowAttention, ChunkedAttention, CrossAttention]
"""The kinds that keep K and V per KV head."""

HEADS_CACHES = (FullAttention, SlidingWindowAttention, ChunkedAttention, CrossAttention)

TokenCache = Union[HeadsCache, LatentAttention, IndexerKeys, CompressedAttention]
"""The kinds that keep rows of tokens, in the cache's dtype."""

Cache = Union[TokenCache, RecurrentState]


def stored_elements(cache: TokenCache, tokens: int) -> int:
    """Elements attention must keep for one sequence of `tokens` tokens in one layer."""
    if isinstance(cache, CompressedAttention):
        return sum(value for _, value in cache.stored_parts(tokens))
    return prod(value for _, value in cache.stored_factors(tokens))


def read_elements(cache: TokenCache, tokens: int) -> int:
    """Elements one decode step reads when `tokens` tokens, the new one included, are cached.

    All that is stored (a window is read whole, MLA's latent once for K and V together), but where an indexer picks
    the tokens: then at most as many as it picks.
    """
    if isinstance(cache, CompressedAttention):
        return sum(value for _, value in cache.read_parts(tokens))
    if isinstance(cache, (FullAttention, LatentAttention)) and cache.most_read_tokens is not None:
        tokens = min(tokens, cache.most_read_tokens)
    return stored_elements(cache, tokens)
