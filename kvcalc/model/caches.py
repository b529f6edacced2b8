"""The kinds of cache a layer can hold, with the dimensions and the number of elements of each kind.

A cache describes one layer and one sequence. `stored_factors` names the numbers whose product is the number of stored
elements, so the formula in the human output always matches the integer in the JSON output.

The classes are NamedTuples, not dataclasses, because creating a frozen dataclass takes about seven times as long at
start-up. NamedTuples of different kinds compare equal if their numbers are equal, so compare the types too if the kinds
may differ.
"""

from __future__ import annotations

from math import prod
from typing import Union

from kvcalc.records import NamedTuple

Factor = tuple[str, int]
"""A named number in a formula, for example ("KV heads", 8)."""


def _heads_factors(tokens: Factor, num_kv_heads: int, k_head_dim: int, v_head_dim: int) -> tuple[Factor, ...]:
    """K and V of every head: 2 x heads x tokens x head_dim, or heads x tokens x (k + v) if K and V differ in width."""
    heads = ("KV heads", num_kv_heads)
    if k_head_dim == v_head_dim:
        return (("K and V", 2), heads, tokens, ("head_dim", k_head_dim))
    return (heads, tokens, ("(k_head_dim + v_head_dim)", k_head_dim + v_head_dim))


class FullAttention(NamedTuple):
    """K and V of every past token. MHA, GQA and MQA differ only in `num_kv_heads`.

    `most_read_tokens` is the largest number of tokens a step reads if an indexer picks them (MiniMax-M3). None means
    that a step reads all tokens.
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
        """Elements of each row that one token adds: K, then V. The block of a block-scaled dtype must divide each."""
        return (self.num_kv_heads * self.k_head_dim, self.num_kv_heads * self.v_head_dim)


class SlidingWindowAttention(NamedTuple):
    """K and V of the last `window` tokens, including the current one (Mistral-7B v0.1, section 2)."""

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


class ChunkedAttention(NamedTuple):
    """K and V of the current chunk of `chunk` tokens. Earlier chunks are never read again (Llama 4)."""

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


class IndexerKeys(NamedTuple):
    """One key per token, in addition to the layer's other cache. Sparse attention uses it to pick the tokens it reads.

    All heads share the key, so every device holds it (DeepSeek-V3.2, section 2.1: the lightning indexer).
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


class LatentAttention(NamedTuple):
    """MLA: one latent and one rotary key per token, for K and V and for all heads (DeepSeek-V2, section 2.1).

    `window` is None in every published model. A what-if variant of a sliding-window model keeps the model's window.
    `most_read_tokens` is the largest number of tokens a step reads if an indexer picks them (DeepSeek-V3.2). None means
    that a step reads all tokens.
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


class CompressedAttention(NamedTuple):
    """DeepSeek-V4: the last `window` tokens, and one compressed entry per `compress_rate` tokens of the whole context.

    Each token and each entry is one vector of `head_dim` that serves as both K and V and is shared by all heads. A
    compressor buffers the key and the gate of the tokens that do not fill an entry yet.
    If `index_head_dim` is set (compressed sparse attention), entries overlap: keys and gates are twice as wide, and
    half of the last full run is kept too. An indexer then keeps its own entries and buffers at its own width, and a
    step reads `index_topk` entries. Otherwise a step reads all entries. If `compress_rate` is 0, there is only the
    window.
    In DeepSeek-V4.1, `index_from_entries` is set: entries do not overlap, and index keys are made from them. The
    entries of one layer are read by `readers` layers, and its index keys by the indexers of `scorers` layers.
    Source: DeepseekV4CSACache and DeepseekV4HCACache, Transformers 5.23.0, and models/deepseek_v41, vLLM 0.33.0.
    """

    window: int
    head_dim: int
    compress_rate: int = 0
    index_head_dim: int = 0
    index_topk: int = 0
    index_from_entries: bool = False
    readers: int = 1
    scorers: int = 1

    @property
    def kind(self) -> str:
        return "compressed_attention" if self.compress_rate else "sliding_window_attention"

    def stored_parts(self, tokens: int) -> tuple[Factor, ...]:
        """Elements of one sequence in one layer, by purpose. Their sum is the number of stored elements."""
        kept = ("window", min(tokens, self.window) * self.head_dim)
        if not self.compress_rate:
            return (kept,)
        entries, waiting = divmod(tokens, self.compress_rate)
        parts: tuple[Factor, ...] = (kept, ("compressed", entries * self.head_dim))
        width = self.head_dim
        if self.index_head_dim:
            parts = (*parts, ("index keys", entries * self.index_head_dim))
        if self.index_head_dim and not self.index_from_entries:
            width += self.index_head_dim
            overlap = self.compress_rate if entries else 0
            return (*parts, ("buffers", 2 * width * (2 * waiting + overlap)))
        return (*parts, ("buffers", 2 * width * waiting))

    def read_entries(self, tokens: int) -> tuple[int, ...]:
        """The entries that one step reads in each of `READ_PARTS`.

        Buffers are read once per `compress_rate` steps and are not counted.
        """
        entries = tokens // self.compress_rate if self.compress_rate else 0
        if not self.index_head_dim:
            return (min(tokens, self.window), entries, 0)
        return (min(tokens, self.window), min(entries, self.index_topk) * self.readers, entries * self.scorers)

    def token_rows(self) -> tuple[int, ...]:
        return (self.head_dim, self.index_head_dim) if self.index_head_dim else (self.head_dim,)


class CrossAttention(NamedTuple):
    """K and V of the encoder's output, computed once and read at every step (T5, Whisper).

    `encoder_tokens` is None until a workload gives the length of that output.
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


class RecurrentState(NamedTuple):
    """A state of constant size instead of a cache: Mamba, gated delta nets and similar recurrences.

    A causal convolution over `conv_channels` channels needs its last `conv_kernel` - 1 inputs. The recurrence keeps
    `state_elements` elements, or 0 if the layer is only a convolution (LFM2). Dtypes are kvcalc's names; None means the
    model's own dtype, whatever the dtype of the cache.

    The state is divided among devices by `num_heads`, or by channels if there are no heads. `group_channels` of the
    convolution's channels belong to `num_groups` groups, which heads share as they share KV heads: groups are divided
    among the devices, and replicated if there are more devices than groups (Mamba-2; MambaStateShapeCalculator, vLLM
    0.33.0).
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
        """Return the share of one device. Channels, heads and groups are divided; check `splits_evenly` first."""
        shared = self.group_channels // self.num_groups * max(1, self.num_groups // tensor_parallel_size)
        return self._replace(
            conv_channels=(self.conv_channels - self.group_channels) // tensor_parallel_size + shared,
            state_elements=self.state_elements // tensor_parallel_size,
            num_groups=max(1, self.num_groups // tensor_parallel_size),
            group_channels=shared,
        )

    def splits_evenly(self, tensor_parallel_size: int) -> bool:
        """Return whether all of `tensor_parallel_size` devices hold equal shares."""
        groups_fit = self.num_groups % tensor_parallel_size == 0 or tensor_parallel_size % self.num_groups == 0
        if self.num_heads is not None:
            return self.num_heads % tensor_parallel_size == 0 and (groups_fit or not self.group_channels)
        return self.conv_channels % tensor_parallel_size == 0 and self.state_elements % tensor_parallel_size == 0


HeadsCache = Union[FullAttention, SlidingWindowAttention, ChunkedAttention, CrossAttention]
"""The kinds of cache that keep K and V per KV head."""

SELF_ATTENTION_CACHES = (FullAttention, SlidingWindowAttention, ChunkedAttention)
HEADS_CACHES = (*SELF_ATTENTION_CACHES, CrossAttention)

TokenCache = Union[HeadsCache, LatentAttention, IndexerKeys, CompressedAttention]
"""The kinds of cache that keep rows per token, in the cache's dtype."""

Cache = Union[TokenCache, RecurrentState]


def stored_elements(cache: TokenCache, tokens: int) -> int:
    """Return the elements that attention must keep for one sequence of `tokens` tokens in one layer."""
    if isinstance(cache, CompressedAttention):
        return sum(value for _, value in cache.stored_parts(tokens))
    return prod(value for _, value in cache.stored_factors(tokens))


def share_of_device(cache: Cache, tensor_parallel_size: int) -> Cache:
    """Return the share of one of `tensor_parallel_size` devices.

    KV heads are divided among the devices. If there are more devices than heads, the heads are replicated. All heads
    share a latent, an indexer's keys and compressed entries, so every device holds them.
    """
    if isinstance(cache, RecurrentState):
        return cache.on_device(tensor_parallel_size)
    if isinstance(cache, HEADS_CACHES):
        return cache._replace(num_kv_heads=max(1, cache.num_kv_heads // tensor_parallel_size))
    return cache


READ_PARTS = ("window", "compressed", "index keys")
"""The parts of compressed attention that a step reads. Every other cache has one part."""


def most_read(cache: Cache) -> int | None:
    """The most tokens of a cache that one step reads, or None if it reads all of them."""
    caps = (cache.window, getattr(cache, "most_read_tokens", None))
    return min((cap for cap in caps if cap is not None), default=None)


def read_entries(cache: Cache, tokens: int) -> tuple[int, ...]:
    """Return the entries of each part of a cache that one decode step reads. `tokens` includes the new token.

    An entry is what one token adds: a row of K and one of V, or MLA's latent, which is read once for both. A state is
    one entry. A step reads all entries that attention stores: a window completely. If an indexer picks the tokens, it
    reads at most as many as the indexer picks.
    """
    if isinstance(cache, CompressedAttention):
        return cache.read_entries(tokens)
    if isinstance(cache, RecurrentState):
        return (1,)
    if isinstance(cache, CrossAttention):
        if cache.encoder_tokens is None:
            raise ValueError("the encoder's length is not known before bind_workload")
        return (cache.encoder_tokens,)
    most = most_read(cache)
    return (tokens if most is None else min(tokens, most),)


def reading_at_most(cache: Cache, tokens: int) -> Cache:
    """The cache if a step reads its last `tokens` tokens at most. Other kinds than those below are returned as is."""
    if isinstance(cache, SlidingWindowAttention):
        return cache._replace(window=min(cache.window, tokens))
    if isinstance(cache, (FullAttention, LatentAttention)):
        return cache._replace(most_read_tokens=min(tokens, most_read(cache) or tokens))
    return cache
