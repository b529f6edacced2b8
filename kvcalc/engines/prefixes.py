"""What an engine's prefix cache keeps of a context, and what requests with the same first tokens have in common.

`Engine.prefixes` gives the rules of an engine for one device's share of a model.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from kvcalc.engines.rounding import round_up
from kvcalc.errors import ModelError, UsageError
from kvcalc.memory.dtypes import Dtype
from kvcalc.memory.kv_cache import checked_caches, stored_cache_bytes
from kvcalc.model.caches import Cache, CompressedAttention, CrossAttention, RecurrentState
from kvcalc.model.spec import ModelSpec, has_cross_attention, has_states, windows
from kvcalc.records import NamedTuple


class Prefixes(ABC):
    """The prefix cache of an engine on one device.

    Prefixes are found in steps of `block_tokens` tokens. With `shares_memory`, requests that run at once keep the
    tokens that they have in common only once. `unit_bytes` are the bytes that are allocated and moved as a whole.
    """

    block_tokens = 1
    shares_memory = True
    unit_bytes = 1
    confirming_tokens = 0  # kept beyond those that are found, so that they are found

    def found(self, tokens: int) -> int:
        """How many tokens a later request finds, if it has `tokens` tokens in common with an earlier one."""
        return tokens // self.block_tokens * self.block_tokens

    def shared(self, tokens: int) -> int:
        """How many of `tokens` common tokens the requests keep only once."""
        return self.found(tokens) if self.shares_memory else 0

    @abstractmethod
    def batch_bytes(self, shared: int, tokens: int, batch: int) -> int:
        """The bytes of `batch` requests of `tokens` tokens each that keep the first `shared` of them once.

        `shared` is what the method `shared` gives, and less than `tokens`. The result is never more than without it:
        blocks that are kept only so that a later request finds them give way to running requests.
        """

    @abstractmethod
    def kept_bytes(self, tokens: int, after: int = 0) -> int:
        """The bytes that must stay in the cache so that a later request finds `tokens` tokens, as `found` gives it.

        The first `after` of them, as `shared` gives it, are kept for others too and not counted.
        """

    def idle_bytes(self, shared: int, tokens: int, count: int) -> int:
        """The bytes that keep `count` contexts of `tokens` tokens between requests, and their prefix once."""
        return self.kept_bytes(shared) + count * self.kept_bytes(tokens, shared)

    @abstractmethod
    def sent_bytes(self, tokens: int) -> int:
        """The bytes of a prompt of `tokens` tokens that a prefill instance sends to a decode instance."""

    def tier_bytes(self, tokens: int, after: int = 0) -> int:
        """The bytes of another tier of memory that keeps `tokens` tokens of this device, like `kept_bytes`."""
        return self.kept_bytes(tokens, after)

    def loaded_bytes(self, tokens: int) -> int:
        """The bytes that this device loads from another tier for a request that finds `tokens` tokens."""
        return self.kept_bytes(tokens)


class InUse(NamedTuple):
    """What requests with a common prefix take: `shared` once, and `own` for each of them."""

    shared: int
    own: int


def in_use(needed: int, own: int, kept: int) -> InUse:
    """What the requests take that need `needed` units each, of which at most `own` hold tokens after the prefix.

    The prefix cache needs `kept` units of the prefix for a later request. A running request never holds more than
    `needed`, so what it does not need of them beside its own units gives way if the memory is full.
    """
    own = min(needed, own)
    return InUse(min(kept, needed - own), own)


class LogicalPrefixes(Prefixes):
    """The formula: rows of tokens that requests have in common are kept once, and each request has its own states."""

    def __init__(self, share: ModelSpec, dtype: Dtype) -> None:
        if share.is_encoder:
            text = f"{share.name} is an encoder: its tokens attend to all others, so no prefix stays the same"
            raise UsageError(text, "leave --prefix-tokens, --turns and --offload out")
        self._caches, self._dtype = checked_caches(share, dtype), dtype
        for cache, _ in self._caches:
            if isinstance(cache, (CompressedAttention, CrossAttention)):
                what = "cross-attention" if isinstance(cache, CrossAttention) else "compressed attention"
                raise ModelError(f"{share.name}: a shared prefix of {what} is not modelled")

    def batch_bytes(self, shared: int, tokens: int, batch: int) -> int:
        total = 0
        for cache, count in self._caches:
            needed = stored_cache_bytes(cache, tokens, self._dtype)
            if isinstance(cache, RecurrentState) or not shared:
                units = InUse(0, needed)
            else:
                own, kept = (stored_cache_bytes(cache, part, self._dtype) for part in (tokens - shared, shared))
                units = in_use(needed, own, kept)
            total += count * (units.shared + batch * units.own)
        return total

    def kept_bytes(self, tokens: int, after: int = 0) -> int:
        return sum([count * self._kept(cache, tokens, after) for cache, count in self._caches])

    def _kept(self, cache: Cache, tokens: int, after: int) -> int:
        if tokens <= after:
            return 0
        own = 1 if isinstance(cache, RecurrentState) else tokens - after
        return min(stored_cache_bytes(cache, part, self._dtype) for part in (tokens, own))

    def sent_bytes(self, tokens: int) -> int:
        return self.kept_bytes(tokens)


class BlockPrefixes(Prefixes):
    """Blocks of tokens with the rows of all layers, such as those in the radix tree of TensorRT-LLM.

    TensorRT-LLM shares blocks by default (enable_block_reuse). If only a part of a block matches, it may use a
    copy (enable_partial_reuse and copy_on_partial_reuse, llmapi/llm_args.py). That depends on which blocks are in use,
    so only whole blocks are counted.
    """

    def __init__(self, block_tokens: int, token_bytes: int) -> None:
        self.block_tokens, self._token_bytes = block_tokens, token_bytes
        self.unit_bytes = block_tokens * token_bytes

    def batch_bytes(self, shared: int, tokens: int, batch: int) -> int:
        own = round_up(tokens, self.block_tokens) - shared
        return (shared + batch * own) * self._token_bytes

    def kept_bytes(self, tokens: int, after: int = 0) -> int:
        return (tokens - after) * self._token_bytes

    def sent_bytes(self, tokens: int) -> int:
        return round_up(tokens, self.block_tokens) * self._token_bytes


class CopiedPrefixes(LogicalPrefixes):
    """Engines whose requests copy the prefix: it saves prefill, but no memory. `bytes_of` gives those of a request.

    Only for models that keep the rows of all tokens: others go back to an earlier length in ways that depend on the
    requests.
    """

    shares_memory = False

    def __init__(self, engine: str, share: ModelSpec, dtype: Dtype, bytes_of: Callable[[int], int]) -> None:
        if windows(share) or has_states(share):
            raise ModelError(
                f"{share.name}: which prefixes {engine} finds again with windows or states is not modelled",
                "leave out --prefix-tokens, --turns and --offload, or use another engine",
            )
        super().__init__(share, dtype)
        self._engine, self._bytes_of = engine, bytes_of

    def batch_bytes(self, shared: int, tokens: int, batch: int) -> int:
        raise ValueError("the requests share nothing")

    def kept_bytes(self, tokens: int, after: int = 0) -> int:
        return self._bytes_of(tokens) if tokens else 0

    def sent_bytes(self, tokens: int) -> int:
        raise UsageError(
            f"--transfer-bandwidth: {self._engine} has no separate prefill instances", "use vllm or sglang"
        )

    def tier_bytes(self, tokens: int, after: int = 0) -> int:
        return super().kept_bytes(tokens)


def refuse_encoder_decoder(share: ModelSpec, engine: str) -> None:
    """Raise UsageError (exit 2) for models with cross-attention."""
    if has_cross_attention(share):
        hint = "leave --prefix-tokens, --turns, --offload and --transfer-bandwidth out"
        raise UsageError(f"{engine} has no prefix cache for encoder-decoders like {share.name}", hint)


class Matching(NamedTuple):
    """How drafting changes what is found. The last `unmatched_tokens` of the common tokens only confirm a prefix.

    With `drops_block`, the last step that matches is not used, but it must be in the cache to be matched. A decode
    instance computes the last `unsent_tokens` of a prompt itself.
    """

    unmatched_tokens: int = 0
    drops_block: bool = False
    unsent_tokens: int = 0


PLAIN = Matching()
"""The drafts do not change what is found."""


class DraftedPrefixes(Prefixes):
    """The prefix cache of a model, and that of a draft model if it has a pool of its own, for the same tokens.

    Requests have `slots` more tokens each for drafts.
    """

    def __init__(self, caches: Sequence[Prefixes], slots: int, matching: Matching) -> None:
        self._caches, self._slots = caches, slots
        self.block_tokens, self.shares_memory = caches[0].block_tokens, caches[0].shares_memory
        self.unit_bytes = sum(cache.unit_bytes for cache in caches)
        self._beyond = self.confirming_tokens = self.block_tokens if matching.drops_block else 0
        self._unmatched, self._unsent = matching.unmatched_tokens, matching.unsent_tokens

    def found(self, tokens: int) -> int:
        return self._caches[0].found(max(tokens - self._beyond - self._unmatched, 0))

    def batch_bytes(self, shared: int, tokens: int, batch: int) -> int:
        return sum(cache.batch_bytes(shared, tokens + self._slots, batch) for cache in self._caches)

    def kept_bytes(self, tokens: int, after: int = 0) -> int:
        return sum(cache.kept_bytes(tokens + self._beyond, after) for cache in self._caches if tokens > after)

    def idle_bytes(self, shared: int, tokens: int, count: int) -> int:
        kept = tokens + self._beyond if tokens else 0
        return sum(cache.idle_bytes(shared, kept, count) for cache in self._caches)

    def sent_bytes(self, tokens: int) -> int:
        sent = tokens - self._unsent if tokens > self._unsent else tokens
        return sum(cache.sent_bytes(sent) for cache in self._caches)

    def tier_bytes(self, tokens: int, after: int = 0) -> int:
        return sum(cache.tier_bytes(tokens + self._beyond, after) for cache in self._caches if tokens > after)

    def loaded_bytes(self, tokens: int) -> int:
        return sum(cache.loaded_bytes(tokens) for cache in self._caches)
