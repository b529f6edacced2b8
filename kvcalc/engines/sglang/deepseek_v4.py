"""DeepSeek-V4 in SGLang: a pool of windows, pools of compressed entries and of index keys, and compressor states.

Source: DSV4PoolConfigurator (model_executor/pool_configurator.py) and DeepSeekV4TokenToKVPool
(mem_cache/deepseek_v4_memory_pool.py), SGLang 0.5.23, with its defaults on NVIDIA devices (the `flashmla` backend).
`Rules` has what differs in 0.5.12 to 0.5.20.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvcalc.engines.account import BatchLine, BlockPool, Line, PoolFigures, PoolLimit, lines_of
from kvcalc.engines.engine import Engine, not_established
from kvcalc.engines.rounding import ceil_div, round_up
from kvcalc.engines.sglang.engine import Sglang
from kvcalc.engines.sglang.pools import window_slots
from kvcalc.engines.sglang.settings import NO_EXTRA_SLOTS, Settings, parse_settings
from kvcalc.errors import ModelError, UsageError
from kvcalc.memory.dtypes import Dtype, bytes_of
from kvcalc.memory.sharding import whole_of
from kvcalc.model.caches import Cache, CompressedAttention
from kvcalc.model.memo import remembered
from kvcalc.model.spec import ModelSpec, all_caches, distinct_caches
from kvcalc.records import NamedTuple
from kvcalc.units import Number

_SPARSE, _HEAVY = 4, 128
_PAGE = 256
# A row has 512 elements: 448 are in fp8 with 7 scales and a byte of padding, and the 64 rotary ones have 16 bits. Pages
# are padded to a multiple of 576 bytes (KVLayout.V4, kernels/ops/attention/dsv4/kv_layout.py).
_HEAD_DIM, _ROW, _PADDING = 512, 448 + 2 * 64 + 8, 576
_STATE_BYTES = 4  # compressor states are in fp32 (SGLANG_DSV4_COMPRESS_STATE_DTYPE)
# Defaults: apply_deepseek_v4_defaults (arg_groups/deepseek_v4_hook.py), and handle_gpu_memory_settings for a device of
# 60 to 160 GiB.
_REQUESTS, _CHUNK = 256, 8192
# Prefixes for which windows are kept, for every running request (_resolve_swa_prefix_tails).
_PREFIXES = 4


class Layers(NamedTuple):
    """How many layers keep a window, how many of them also keep entries of 4 or of 128 tokens, and the widths."""

    windows: int
    sparse: int
    heavy: int
    window: int
    index_head_dim: int


class Rules(NamedTuple):
    """How a release sizes the pools.

    `page` is the tokens of a page of windows, which has a ring of compressor states. `padded` is whether tokens are
    counted with padded pages, and a pool has more than one page to spare. `for_requests`: without a given ratio, the
    windows have room for the requests that may run, not for 0.1 of the tokens. `heavy_per_page`: a page of windows also
    has the states of entries of 128 tokens. In later releases every request has them.
    """

    page: int
    padded: bool
    for_requests: bool
    heavy_per_page: bool


# By the release in which they begin, the newest first: the wheels of 0.5.12 to 0.5.23.
RULES = {
    (0, 5, 21): Rules(_PAGE, True, True, False),
    (0, 5, 15): Rules(128, False, False, False),
    (0,): Rules(128, False, False, True),
}
DEFAULT_RATIO = "0.1"  # DSV4_DEFAULT_SWA_FULL_TOKENS_RATIO, and apply_deepseek_v4_defaults before 0.5.21


class Sizes(NamedTuple):
    """The bytes of each pool."""

    windows: int
    entries: int
    states: int


class DeepseekV4(Sglang):
    """Counts pools that are just large enough for a batch at full context, with SGLang's pool of windows.

    The pool of windows does not depend on the context. It has room for the windows of all requests that may run, of
    the prefixes that are kept, and of two prefill chunks; or for a share of the tokens, if `--swa-full-tokens-ratio`
    is given. Raises ModelError (exit 3) for compression rates that SGLang does not support.
    """

    growth = Engine.growth
    longest_context = Engine.longest_context
    entries = Engine.entries

    @classmethod
    def default_settings(cls, settings: Mapping[str, str]) -> Mapping[str, str]:
        slots = {} if "max-running-requests" in settings else NO_EXTRA_SLOTS
        defaults = {"max-running-requests": Number(_REQUESTS), "chunked-prefill-size": Number(_CHUNK)}
        return {**defaults, **slots, **settings}

    def parse(self, settings: Mapping[str, str]) -> Settings:
        self.ratio_is_given = "swa-full-tokens-ratio" in settings
        parsed = parse_settings({"swa-full-tokens-ratio": DEFAULT_RATIO, **self.default_settings(settings)}, _PAGE)
        if parsed.page_size != _PAGE:
            raise UsageError(
                f"--page-size {parsed.page_size}: DeepSeek-V4 needs pages of {_PAGE} tokens", f"use --page-size {_PAGE}"
            )
        return parsed

    @property
    def rules(self) -> Rules:
        return next(rules for since, rules in RULES.items() if self.place.since(*since))

    @property
    def has_ratio(self) -> bool:
        return self.ratio_is_given or not self.rules.for_requests

    def check_model(self) -> None:
        for cache in all_caches(self.spec):
            if not isinstance(cache, CompressedAttention):
                raise not_established(self.spec, "SGLang", cache.kind)
            rate = _SPARSE if cache.index_head_dim else cache.compress_rate and _HEAVY
            if cache.compress_rate != rate or cache.head_dim != _HEAD_DIM or cache.index_head_dim % 128:
                raise ModelError(
                    f"{self.spec.name}: SGLang compresses rows of {_HEAD_DIM} elements by {_SPARSE} with an indexer "
                    f"and by {_HEAVY} without one"
                )

    def cache_bytes(self, cache: Cache, tokens: int, dtype: Dtype) -> int:
        group = next(group for group in self.spec.layers if cache in group.caches)
        single = self.spec._replace(layers=(group._replace(last=group.first, caches=(cache,)),), whole=self.spec)
        return sum(self._sizes(single, tokens, 1))

    def entry_sizes(self, cache: Cache, dtype: Dtype) -> tuple[int, ...]:
        return (_ROW, _ROW, _index_bytes(cache.index_head_dim if isinstance(cache, CompressedAttention) else 0))

    def held_bytes(self, share: ModelSpec, dtype: Dtype, tokens: int, batch: int) -> int:
        _check_dtype(dtype)
        return sum(self._sizes(share, tokens, batch)) + self.table_bytes(tokens)

    def batch_line(self, share: ModelSpec, dtype: Dtype, tokens: int) -> BatchLine | None:
        return None

    def growth_tokens(self, share: ModelSpec, dtype: Dtype) -> int:
        return _PAGE * self.ratio.denominator if self.has_ratio else _PAGE

    def blocks(self, share: ModelSpec, dtype: Dtype, tokens: int, batch: int, memory: int | None) -> PoolFigures:
        full = batch * round_up(tokens, _PAGE)
        each = self._bytes_per_token(share)
        pool = BlockPool(_PAGE, int(_PAGE * each), self.held_bytes(share, dtype, tokens, 1))
        if memory is not None:
            capacity = self._profiled_tokens(share, dtype, memory)
            pool = BlockPool(*pool[:3], capacity // _PAGE, capacity, capacity / round_up(tokens, _PAGE))
        windows = self._window_slots(full, batch)
        return PoolFigures(pool, {"max_total_num_tokens": full, "swa_max_total_num_tokens": windows})

    def _profiled_tokens(self, share: ModelSpec, dtype: Dtype, memory: int) -> int:
        tokens = int(max(0, memory - self._fixed_bytes(share)) / self._bytes_per_token(share))
        return min(tokens, self.chosen.max_total_tokens or tokens) // _PAGE * _PAGE

    def pool_limit(self, share: ModelSpec, dtype: Dtype) -> PoolLimit | None:
        if self.chosen.max_total_tokens is None:
            return None
        tokens = self.chosen.max_total_tokens // _PAGE * _PAGE
        return PoolLimit("max-total-tokens", int(self._fixed_bytes(share) + tokens * self._bytes_per_token(share)))

    def _largest_states(self, share: ModelSpec, dtype: Dtype) -> int:
        return 0

    def pool(self, share: ModelSpec, dtype: Dtype, tokens: int, batch: int) -> list[Line]:
        _check_dtype(dtype)
        sizes, layers = self._sizes(share, tokens, batch), _layers(share)
        stored = {"window": 0, "entries": 0, "buffers": 0}
        for cache, num_layers in distinct_caches(share):
            if isinstance(cache, CompressedAttention):
                for name, elements in cache.stored_parts(tokens):
                    part = name if name in stored else "entries"
                    stored[part] += batch * num_layers * bytes_of(elements, dtype)
        rows = batch * sum(
            [
                layers.sparse * (tokens // _SPARSE) * (_ROW + _index_bytes(layers.index_head_dim)),
                layers.heavy * (tokens // _HEAVY) * _ROW,
            ]
        )
        return lines_of(
            {
                "stored": sum(stored.values()),
                "window pool beyond the windows": sizes.windows - stored["window"],
                "different layout or dtype": rows - stored["entries"],
                "pages rounded up": sizes.entries - rows,
                "full compressor states in fp32": sizes.states - stored["buffers"],
                "request table": self.table_bytes(tokens),
            }
        )

    def _sizes(self, share: ModelSpec, tokens: int, batch: int) -> Sizes:
        """The bytes of the pools. The allocator keeps a page of tokens free in each."""
        layers, full, rules = _layers(share), batch * round_up(tokens, _PAGE), self.rules
        windows = self._window_slots(full, batch)
        entries = (
            layers.sparse * _pages(full // _SPARSE, _PAGE // _SPARSE, rules) * _page_bytes(_PAGE // _SPARSE)
            + layers.heavy * _pages(full // _HEAVY, _PAGE // _HEAVY, rules) * _page_bytes(_PAGE // _HEAVY)
            + layers.sparse * _pages(full // _HEAVY * 32, 64, rules) * 64 * _index_bytes(layers.index_head_dim)
        )
        sparse_ring, rings = self._rings()[0], windows // rules.page
        sparse_rows = round_up(rings * sparse_ring + sparse_ring + 1, _SPARSE)
        states = layers.sparse * sparse_rows * 4 * (_HEAD_DIM + layers.index_head_dim) * _STATE_BYTES
        states += self._heavy_states(layers, rings if rules.heavy_per_page else self._slots(batch))
        return Sizes(layers.windows * _pages(windows, rules.page, rules) * _page_bytes(rules.page), entries, states)

    def _heavy_states(self, layers: Layers, rings: int) -> int:
        """The bytes of the states of entries of 128 tokens, with a ring and a row to spare."""
        ring = self._rings()[1]
        return layers.heavy * round_up(rings * ring + ring + 1, _HEAVY) * 2 * _HEAD_DIM * _STATE_BYTES

    def _requests(self, batch: int) -> int:
        return max(batch, self.chosen.max_running_requests or 0)

    def _slots(self, batch: int) -> int:
        """The slots of running and of received requests, and a spare one (_get_num_req_slots)."""
        return self._requests(batch) + self.chosen.extra_slots + 1

    def _rings(self) -> tuple[int, int]:
        return rings_of(self.chosen.speculative_num_draft_tokens is not None)

    def _window_slots(self, full: int, batch: int) -> int:
        """The tokens in the pool of windows (_resolve_swa_cap_tokens).

        With a ratio, more than one window and one page (validate_swa_pool_size).
        """
        window, requests = _layers(whole_of(self.spec)).window, self._requests(batch)
        if self.has_ratio:
            return max(self._window_tokens(full), round_up(window + _PAGE + 1, _PAGE))
        prefixes = self.chosen.swa_prefix_tails
        if prefixes is None:
            prefixes = 0 if self.chosen.disable_radix_cache else _PREFIXES * requests
        return round_up(window_slots(self.chosen, window, requests) + prefixes * (window + _PAGE), _PAGE)

    def _bytes_per_token(self, share: ModelSpec) -> float:
        ratio = self.chosen.swa_full_tokens_ratio if self.has_ratio else 0.0
        return bytes_per_token(share, ratio, self._rings(), self.rules)

    def _fixed_bytes(self, share: ModelSpec) -> float:
        """The bytes that do not depend on the tokens of the pool, for the requests that may run."""
        fixed = 0 if self.rules.heavy_per_page else self._heavy_states(_layers(share), self._slots(0))
        if self.has_ratio:
            return fixed
        return fixed + self._window_slots(0, 0) * _bytes_per_window_token(share, self._rings(), self.rules)


def rings_of(drafts: bool) -> tuple[int, int]:
    """The rows of a compressor's ring with and without an indexer (get_compress_state_ring_size)."""
    return (16, 256) if drafts else (8, 128)


def _bytes_per_window_token(share: ModelSpec, rings: tuple[int, int], rules: Rules) -> float:
    """bytes_per_swa_token: the windows of all layers, and the compressor states. `rings` are the rows of a page."""
    layers = _layers(share)
    row = _page_bytes(_PAGE) / _PAGE if rules.padded else _ROW
    states = layers.sparse * rings[0] * 4 * (_HEAD_DIM + layers.index_head_dim)
    states += layers.heavy * rings[1] * 2 * _HEAD_DIM if rules.heavy_per_page else 0
    return layers.windows * row + states / rules.page * _STATE_BYTES


def bytes_per_token(share: ModelSpec, ratio: float, rings: tuple[int, int], rules: Rules) -> float:
    """bytes_per_full_token: the entries of a token, and `ratio` of the bytes of a token in the windows' pool."""
    layers = _layers(share)
    sparse, heavy = (_page_bytes(64) / 64, _page_bytes(2) / 2) if rules.padded else (_ROW, _ROW)
    entries = layers.sparse * (sparse + _index_bytes(layers.index_head_dim)) / _SPARSE + layers.heavy * heavy / _HEAVY
    return entries + (ratio * _bytes_per_window_token(share, rings, rules) if ratio else 0)


@remembered
def _layers(share: ModelSpec) -> Layers:
    layers = [(cache, n) for cache, n in distinct_caches(share) if isinstance(cache, CompressedAttention)]
    return Layers(
        sum(n for _, n in layers),
        sum(n for cache, n in layers if cache.index_head_dim),
        sum(n for cache, n in layers if cache.compress_rate and not cache.index_head_dim),
        max((cache.window for cache, _ in layers), default=0),
        max((cache.index_head_dim for cache, _ in layers), default=0),
    )


def _pages(rows: int, page: int, rules: Rules) -> int:
    """The pages of a pool with room for 256 more of its own rows (_num_dsv4_physical_kv_pages), or for a page more."""
    return ceil_div(rows + _PAGE, page) if rules.padded else (rows + page + 1) // page


def _page_bytes(rows: int) -> int:
    return round_up(rows * _ROW, _PADDING)


def _index_bytes(index_head_dim: int) -> int:
    """Bytes of an index key in fp8 with an fp32 scale per 128 elements (get_dsv4_indexer_bytes_per_token)."""
    return index_head_dim + index_head_dim // 128 * 4


def _check_dtype(dtype: Dtype) -> None:
    if dtype.name != "fp8":
        raise UsageError(f"--kv-dtype {dtype.name}: SGLang keeps DeepSeek-V4's cache in fp8", "use --kv-dtype fp8")
