"""SGLang: a pool of rows for all tokens, a pool for windows, a pool for states, and a request table.

Source: memory_pool.py, pool_configurator.py and kv_cache_configurator.py, SGLang 0.5.23.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from fractions import Fraction
from typing import Any, NamedTuple

from kvcalc.errors import UsageError
from kvcalc.memory.dtypes import Dtype
from kvcalc.memory.engines import BatchLine, BlockPool, Engine, Line, Resolved, lines_of
from kvcalc.memory.engines.options import Given
from kvcalc.memory.engines.place import ANYWHERE, RAW_FP8, Place, is_fp8
from kvcalc.memory.engines.rounding import ceil_div, round_up
from kvcalc.memory.engines.sglang.defaults import default_cache, has_raw_rows
from kvcalc.memory.engines.sglang.layers import FULL, STATE, WINDOW, encoder_tokens, layers_of
from kvcalc.memory.engines.sglang.models import MINIMAX_M3, VERSION, WITH_ENCODER, check_model, is_sparse
from kvcalc.memory.kv_cache import Growth, growth_of, stored_cache_bytes
from kvcalc.memory.sharding import longer_last, whole_of
from kvcalc.model.caches import Cache
from kvcalc.model.memo import remembered
from kvcalc.model.spec import ModelSpec, has_states
from kvcalc.notes import Note
from kvcalc.units import parse_tokens

# DeepSeek sparse attention only supports pages of 64 tokens (DSATokenToKVPool). MiniMax-M3 has pages of 128 tokens by
# default on Hopper and Blackwell (arg_groups/model_overrides/minimax_m3.py).
_SPARSE_PAGE = 64
_M3_PAGE = 128

# Extra tokens per row of the request table (get_req_to_token_extra_context_len). The table's entries are int32.
_EXTRA_TOKENS = 4
_INDEX_BYTES = 4


class Settings(NamedTuple):
    """If `max_running_requests` is None, SGLang derives it from the memory, and the request table is not counted.

    `max_mamba_cache_size` is the number of states. If it is None, there is one state per sequence.
    """

    page_size: int
    swa_full_tokens_ratio: float
    max_running_requests: int | None
    context_length: int | None
    max_mamba_cache_size: int | None


def _parse_settings(settings: Mapping[str, str], default_page_size: int) -> Settings:
    """Parse and check the given options. Raises UsageError (exit 2)."""
    given = Given("sglang", settings)
    context = parse_tokens(settings["context-length"], "--context-length") if "context-length" in settings else None
    return Settings(
        given.count("page-size", default_page_size),
        given.share("swa-full-tokens-ratio"),
        given.optional_count("max-running-requests"),
        context,
        given.optional_count("max-mamba-cache-size"),
    )


class Sglang(Engine):
    """Counts pools that are just large enough for a batch at full context.

    Raises ModelError (exit 3) for models whose pools are not modelled, and UsageError (exit 2) for options and dtypes
    that SGLang does not support.
    """

    name = "sglang"
    # A request starts if its prompt fits beside a share of the answers still to come (new_token_ratio, which falls to
    # 10 %). If that was too little, requests are retracted (PrefillAdder, srt/managers/schedule_policy.py). Requests
    # with ignore_eos reserve more.
    reserves_full_length = False
    running_option = "max-running-requests"
    version = VERSION
    # FusedMoE asserts that the ranks divide the experts (layers/moe/fused_moe_triton/layer.py). Without
    # --moe-dense-tp-size and --enable-dp-lm-head, MLPs and the head are split over --tp-size, which counts all ranks.
    has_attention_replicas = True
    splits_uneven_experts = False
    spreads_mlps = True
    limits_all_replicas = True  # each replica runs max_running_requests // dp_size (ModelRunner)

    def __init__(self, spec: ModelSpec, settings: Mapping[str, str], stages: int, release: str | None) -> None:
        super().__init__(spec, settings, stages, release)
        page = _SPARSE_PAGE if is_sparse(spec) else _M3_PAGE if spec.model_type in MINIMAX_M3 else 1
        self.chosen = _parse_settings(settings, page)
        self.page = self.chosen.page_size
        # The ratio of the window pool's tokens to the full pool's tokens, exactly as given.
        self.ratio = Fraction(str(self.chosen.swa_full_tokens_ratio))
        self.settings = self.chosen._asdict()
        if is_sparse(spec) and self.page != _SPARSE_PAGE:
            raise UsageError(f"--page-size {self.page}: sparse attention needs pages of {_SPARSE_PAGE} tokens")
        check_model(spec)
        if spec.model_type in WITH_ENCODER and self.chosen.max_running_requests is not None:
            raise UsageError("--max-running-requests: the request table of a model with an encoder is not modelled")
        # The encoder's tokens come before the decoder's, in rows of the same pool (prepare_encoder_info_extend).
        self.encoder = encoder_tokens(spec)
        self.notes = _notes(spec, self.chosen)

    @staticmethod
    def cut(num_layers: int, stages: int) -> list[int]:
        """Remaining layers go to the last ranks, one each (get_pp_indices, srt/distributed/utils.py)."""
        return longer_last(num_layers, stages)

    @staticmethod
    def kv_dtype(
        spec: ModelSpec, asked: str, settings: Mapping[str, str], dtype: str | None, place: Place = ANYWHERE
    ) -> Resolved:
        """`auto` depends on the device for sparse attention, and on the checkpoint for other models.

        See `defaults` for the rules and their sources.
        """
        name, reason = default_cache(spec, dtype, place) if asked.casefold() == "auto" else (asked, None)
        return (RAW_FP8 if is_fp8(name) and has_raw_rows(spec, place) else name), reason

    def cache_bytes(self, cache: Cache, tokens: int, dtype: Dtype) -> int:
        full, window = self._pool_tokens(self.spec, dtype, tokens, 1)
        layer = next(
            layer for layer in layers_of(self.spec, dtype) if (type(layer.cache), layer.cache) == (type(cache), cache)
        )
        rows = (self.chosen.max_mamba_cache_size or 1) + 1
        if layer.pool != STATE:
            rows = self.page + (full if layer.pool == FULL else window)
        return rows * layer.bytes

    def held_bytes(self, share: ModelSpec, dtype: Dtype, tokens: int, batch: int) -> int:
        pools, page = _pools(share, dtype), self.page
        full, window = self._pool_tokens(share, dtype, tokens, batch)
        slots = max(self.chosen.max_mamba_cache_size or 0, batch) + 1
        rows = (full + page) * pools.full + (window + page) * pools.window + slots * pools.state
        return rows + self._table_bytes(tokens)

    def batch_line(self, share: ModelSpec, dtype: Dtype, tokens: int) -> BatchLine | None:
        pools = _pools(share, dtype)
        has_window_pool = _pools(whole_of(share), dtype).widest_window
        if self.bounds or has_window_pool or self.chosen.max_mamba_cache_size is not None:
            return None
        each = round_up(tokens + self.encoder, self.page) * pools.full + pools.state
        return BatchLine(self.page * pools.full + pools.state + self._table_bytes(tokens), each)

    def growth_tokens(self, share: ModelSpec, dtype: Dtype) -> int:
        return self.page * self.ratio.denominator

    def block_tokens(self, share: ModelSpec, dtype: Dtype) -> int:
        return self.page

    def growth(self, spec: ModelSpec, dtype: Dtype, tokens: int) -> Growth:
        pools = _pools(spec, dtype)
        if not self._is_even(pools):
            return super().growth(spec, dtype, tokens)
        here, period = self.held_bytes(spec, dtype, tokens, 1), self.growth_tokens(spec, dtype)
        return growth_of(here, here + period * pools.full, tokens, period)

    def longest_context(self, share: ModelSpec, dtype: Dtype, batch: int, memory: int) -> int | None:
        pools, page = _pools(share, dtype), self.page
        if self.bounds or not pools.full or not self._is_even(pools):
            return super().longest_context(share, dtype, batch, memory)
        fixed = self.held_bytes(share, dtype, 1, batch) - batch * round_up(1 + self.encoder, page) * pools.full
        return max((memory - fixed) // (batch * page * pools.full) * page - self.encoder, 0)

    def _is_even(self, pools: Pools) -> bool:
        """Whether every further page takes the same bytes: there is no window pool, and no table of requests."""
        return not pools.widest_window and self.chosen.max_running_requests is None

    def check_context(self, tokens: int) -> None:
        length = self.chosen.context_length
        if length is not None and length < tokens:
            raise UsageError(f"--context-length {length} is shorter than the context of {tokens} tokens")

    def blocks(self, share: ModelSpec, dtype: Dtype, tokens: int, batch: int, memory: int | None) -> dict[str, Any]:
        self.check_context(tokens)
        page, pools = self.page, _pools(share, dtype)
        found = BlockPool(page, page * pools.full, self.held_bytes(share, dtype, tokens, 1))
        if memory is not None:
            has_full = bool(_pools(whole_of(share), dtype).full)
            capacity = _profiled_tokens(pools, self.chosen, memory, has_full)
            if capacity is not None:
                concurrency = capacity / round_up(tokens + self.encoder, page)
                found = BlockPool(*found[:3], capacity // page, capacity, concurrency)
        full, window = self._pool_tokens(share, dtype, tokens, batch)
        return {**found._asdict(), "max_total_num_tokens": full, "swa_max_total_num_tokens": window or None}

    def pool(self, share: ModelSpec, dtype: Dtype, tokens: int, batch: int) -> list[Line]:
        pools, page, every = _pools(share, dtype), self.page, tokens + self.encoder
        full, window = self._pool_tokens(share, dtype, tokens, batch)
        paged = batch * round_up(every, page)
        slots = max(self.chosen.max_mamba_cache_size or 0, batch)
        sizes: defaultdict[str, int] = defaultdict(int)
        for layer in layers_of(share, dtype):
            row = layer.num_layers * layer.bytes
            stored = batch * layer.num_layers * stored_cache_bytes(layer.cache, tokens, dtype) if layer.stores else 0
            sizes["stored"] += stored
            if layer.pool == STATE:
                sizes["different layout or dtype"] += batch * row - stored
                sizes["states beyond the batch"] += (slots - batch) * row
            elif layer.pool == WINDOW:
                beside = "window pool beyond the windows" if layer.stores else "unused rows"
                sizes[beside] += window * row - stored
            else:
                beside = "windows kept whole" if layer.cache.window is not None else "different layout or dtype"
                if self.encoder or not layer.stores or layer.cache.kind == "cross_attention":
                    beside = "unused rows"
                sizes[beside] += batch * every * row - stored
                sizes["pages rounded up"] += (paged - batch * every) * row
                sizes["tokens required by the window pool's ratio"] += (full - paged) * row
        sizes["dummy page"] = page * (pools.full + pools.window)
        sizes["dummy state"] = pools.state
        sizes["request table"] = self._table_bytes(tokens)
        return lines_of(sizes)

    def _pool_tokens(self, share: ModelSpec, dtype: Dtype, tokens: int, batch: int) -> tuple[int, int]:
        """The number of tokens in the full pool and in the window pool.

        The full pool has whole pages for every sequence, and the window pool has a share of that. The numbers are the
        same on every pipeline stage, regardless of its layers.

        The window pool must hold every sequence's window, and SGLang only starts if it holds more than one window and
        one page (validate_swa_pool_size). If the share is too small, both pools are larger. A model with windows in all
        layers has only the window pool, and the ratio does not apply.
        """
        pools, page, tokens = _pools(whole_of(share), dtype), self.page, tokens + self.encoder
        full = batch * round_up(tokens, page)
        span = pools.widest_window
        if not span:
            return full, 0
        least = max(round_up(span + page + 1, page), batch * round_up(min(tokens, span), page))
        if not pools.full:
            return 0, max(full, least)
        full = max(full, round_up(ceil_div(least * self.ratio.denominator, self.ratio.numerator), page))
        while self._window_tokens(full) < least:
            # SGLang computes the share in floating point, which can be just below a whole number.
            full += page
        return full, self._window_tokens(full)

    def _window_tokens(self, full_tokens: int) -> int:
        return int(full_tokens * self.chosen.swa_full_tokens_ratio) // self.page * self.page

    def _table_bytes(self, tokens: int) -> int:
        """Bytes of req_to_token: one row for each request that may run, and one spare row (ReqToTokenPool).

        0 if SGLang derives the number of requests from the memory.
        """
        requests = self.chosen.max_running_requests
        if requests is None:
            return 0
        longest = self.chosen.context_length or max(self.spec.max_position_embeddings or 0, tokens)
        return (requests + 1) * (longest + _EXTRA_TOKENS) * _INDEX_BYTES


class Pools(NamedTuple):
    """The bytes of one token in all layers of each pool, the bytes of one state in all layers, and the widest window.

    The bytes are 0 for a pool that the model does not have.
    """

    full: int
    window: int
    state: int
    widest_window: int


@remembered
def _pools(share: ModelSpec, dtype: Dtype) -> Pools:
    sizes, layers = dict.fromkeys((FULL, WINDOW, STATE), 0), layers_of(share, dtype)
    for layer in layers:
        sizes[layer.pool] += layer.num_layers * layer.bytes
    widest = max((layer.cache.window or 0 for layer in layers if layer.pool == WINDOW), default=0)
    return Pools(sizes[FULL], sizes[WINDOW], sizes[STATE], widest)


def _profiled_tokens(pools: Pools, settings: Settings, memory_bytes: int, has_full: bool) -> int | None:
    """max_total_num_tokens for the memory left for the pools: whole pages, without the dummy page.

    The states and one dummy state are subtracted first (_handle_max_mamba_cache). Returns None if SGLang derives the
    number of states from the memory, or if a pipeline stage has only states. `has_full` is whether the model has a pool
    for all tokens.
    """
    if pools.state and settings.max_mamba_cache_size is None:
        return None
    memory_bytes = max(0, memory_bytes - pools.state * ((settings.max_mamba_cache_size or 0) + 1))
    share: float = settings.swa_full_tokens_ratio if has_full else 1
    cell = pools.full + share * pools.window if pools.window else pools.full
    return int(memory_bytes // cell) // settings.page_size * settings.page_size if cell else None


def _notes(spec: ModelSpec, settings: Settings) -> tuple[Note, ...]:
    """Notes about SGLang's defaults that are not counted here."""
    notes = []
    if settings.max_running_requests is None:
        text = "the request table depends on the memory and is not counted; set --max-running-requests to count it"
        notes.append(Note("engine", "request-table", text))
    if has_states(spec) and not settings.max_mamba_cache_size:
        text = "counting one state per sequence; SGLang's radix cache keeps 3 or more (set --max-mamba-cache-size)"
        notes.append(Note("engine", "more-states", text))
    return tuple(notes)
