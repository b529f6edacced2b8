"""SGLang: a pool of rows for all tokens, a pool for windows, a pool for states, and a request table.

Source: memory_pool.py, pool_configurator.py and kv_cache_configurator.py, SGLang 0.5.23.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING

from kvcalc.engines.account import (
    BatchLine,
    BlockPool,
    Line,
    PoolFigures,
    PoolLimit,
    RunningPool,
    lines_of,
)
from kvcalc.engines.command import DECODE
from kvcalc.engines.declarations import types_of
from kvcalc.engines.engine import Engine, Resolved, part_of
from kvcalc.engines.options import SettingsReader
from kvcalc.engines.place import ANYWHERE, RAW_FP8, Place, is_fp8
from kvcalc.engines.rounding import ceil_div, round_up
from kvcalc.engines.sglang.defaults import default_cache, has_raw_rows
from kvcalc.engines.sglang.layers import FULL, STATE, WINDOW, encoder_tokens, layers_of
from kvcalc.engines.sglang.models import MINIMAX_M3, check_model
from kvcalc.engines.sglang.pools import (
    DraftSlot,
    Pools,
    draft_slot,
    most_requests,
    pools_of,
    profiled_tokens,
    set_requests,
    window_slots,
)
from kvcalc.engines.sglang.settings import (
    BOTH,
    NO_EXTRA_SLOTS,
    Settings,
    check_copies,
    check_devices,
    device_defaults,
    device_settings,
    keeps_mlps,
    parse_settings,
    strategy_of,
)
from kvcalc.engines.sglang.states import (
    DRAFTING_REQUESTS,
    checked_tokens,
    least_states,
    memory_after_states,
    num_states,
    states_of_request,
)
from kvcalc.errors import LayoutError, UsageError
from kvcalc.memory.dtypes import Dtype
from kvcalc.memory.kv_cache import Growth, growth_of, stored_cache_bytes
from kvcalc.memory.reads import Entries
from kvcalc.memory.sharding import longer_last, stages_of, whole_of
from kvcalc.model.caches import Cache
from kvcalc.model.drafting import EAGLE, EAGLE1, MTP
from kvcalc.model.layout import Layout
from kvcalc.model.spec import ORIGINAL, ModelSpec, has_states, is_sparse, weights_of
from kvcalc.notes import Note
from kvcalc.releases import Release, parse_release
from kvcalc.units import Number

if TYPE_CHECKING:
    from kvcalc.engines.prefixes import Prefixes
    from kvcalc.engines.starts import Start

# DeepSeek sparse attention only supports pages of 64 tokens (DSATokenToKVPool). MiniMax-M3 has pages of 128 tokens by
# default on Hopper and Blackwell (arg_groups/model_overrides/minimax_m3.py).
_SPARSE_PAGE = 64
_M3_PAGE = 128

# Settings that count for all DP ranks together.
_OF_ALL_REPLICAS = ("max-running-requests", "max-mamba-cache-size", "chunked-prefill-size")

# Since this release, a pool of windows may have room for the requests that may run.
_FOR_REQUESTS = (0, 5, 14)

# Extra tokens per row of the request table (get_req_to_token_extra_context_len). The table's entries are int32.
_EXTRA_TOKENS = 4
_INDEX_BYTES = 4
# The fewest tokens that are allocated per step for drafts in trees: one for each branch of a tree of n-grams
# (speculative_ngram_max_bfs_breadth).
_LEAST_IN_TREES = 10


class Sglang(Engine):
    """Counts pools that are just large enough for a batch at full context.

    Raises ModelError (exit 3) for models whose pools are not modelled, and UsageError (exit 2) for options and dtypes
    that SGLang does not support.
    """

    name = "sglang"
    device_settings, device_defaults = staticmethod(device_settings), staticmethod(device_defaults)

    def __init__(self, spec: ModelSpec, settings: Mapping[str, str], stages: int, release: str | None) -> None:
        super().__init__(spec, settings, stages, release)
        self.chosen = self.parse(settings)
        self.page = self.chosen.page_size
        # The ratio of the window pool's tokens to the full pool's tokens, exactly as given.
        self.ratio = Fraction(str(self.chosen.swa_full_tokens_ratio))
        self.settings = self.chosen._asdict()
        if is_sparse(spec) and self.page != _SPARSE_PAGE:
            raise UsageError(f"--page-size {self.page}: sparse attention needs pages of {_SPARSE_PAGE} tokens")
        self.check_model()
        if self.prompt_ranks > 1:
            check_copies(spec, self.prompt_ranks, settings, stages)
            self.spreads_mlps = not keeps_mlps(spec)
        if spec.model_type in types_of(self.name, "with_encoder") and self.chosen.max_running_requests is not None:
            raise UsageError("--max-running-requests: the request table of a model with an encoder is not modelled")
        self.place = Place(None if release is None else parse_release(self.name, release).release)
        self.states_each = states_of_request(spec, self.chosen, self.place)
        # The encoder's tokens come before the decoder's, in rows of the same pool (prepare_encoder_info_extend).
        self.encoder = encoder_tokens(spec)
        # ChunkCache (mem_cache/chunk_cache.py) then stands in the tree's place, and it matches no prefix.
        if self.chosen.disable_radix_cache:
            self.prefixes_off = "leave --disable-radix-cache out"
        self.notes = _notes(spec, self.chosen)

    @classmethod
    def role_in(cls, settings: Mapping[str, str]) -> str | None:
        """--disaggregation-mode."""
        mode = SettingsReader("sglang", settings).choice("disaggregation-mode", "a mode")
        return None if mode == BOTH else mode

    @classmethod
    def replica_settings(cls, settings: Mapping[str, str], replicas: int) -> Mapping[str, str]:
        """Requests, states and the tokens of a prefill step are divided among the DP ranks.

        Source: resolve_max_num_reqs and _handle_max_mamba_cache (mem_cache/kv_cache_configurator.py), and
        arg_groups/parallel_hook.py for --chunked-prefill-size.
        """
        if cls.prompt_ranks_in(settings) > 1:
            raise UsageError("--attn-cp-size: not modelled with DP ranks", "leave out --dp")
        shared = cls.default_settings(settings)
        given = SettingsReader("sglang", shared)
        counts = {name: given.optional_count(name) for name in _OF_ALL_REPLICAS}
        if "speculative-num-draft-tokens" in shared and counts["max-running-requests"] is None:
            counts["max-running-requests"], shared = DRAFTING_REQUESTS, {**NO_EXTRA_SLOTS, **shared}
        return {**shared, **{name: Number(max(1, n // replicas)) for name, n in counts.items() if n is not None}}

    @classmethod
    def default_settings(cls, settings: Mapping[str, str]) -> Mapping[str, str]:
        """The settings with SGLang's defaults for this model, if there are any that count."""
        return settings

    def parse(self, settings: Mapping[str, str]) -> Settings:
        """The given options, with the defaults for this model. Raises UsageError (exit 2)."""
        page = _SPARSE_PAGE if is_sparse(self.spec) else _M3_PAGE if self.spec.model_type in MINIMAX_M3 else 1
        return parse_settings(self.default_settings(settings), page)

    def check_model(self) -> None:
        """Raise ModelError (exit 3) if the pools of the model are not modelled."""
        check_model(self.spec)

    def check_start(self, start: Start) -> None:
        """A step of a prompt is whole pages, on each DP rank (validation_hook.py; server_args.py since 0.5.1).

        A decode instance has no such steps, and separate instances no lazy states (arg_groups/mamba_hook.py).
        """
        super().check_start(start)
        chosen, page, step = self.chosen, self.chosen.page_size, self.chosen.chunked_prefill_size
        if self.role and chosen.mamba_radix_cache_strategy == "extra_buffer_lazy":  # validate_mamba_extra_buffer
            raise LayoutError(
                f"SGLang does not start a {self.role} instance with extra_buffer_lazy",
                "--mamba-radix-cache-strategy extra_buffer",
            )
        if step is not None and step % page and self.role != DECODE:
            text = (
                f"SGLang does not start with a step of {step:,} tokens of a prompt, which is no whole pages of {page}"
            )
            whole = max(step // page, 1) * page * start.layout.data_parallel_size
            raise LayoutError(text, f"--chunked-prefill-size {whole}")

    def check_ranks(self, spec: ModelSpec, layout: Layout) -> None:
        if layout.prompt_ranks > 1:
            check_devices(spec, layout)

    @staticmethod
    def cut(num_layers: int, stages: int) -> list[int]:
        """Remaining layers go to the last ranks, one each (get_pp_indices, srt/distributed/utils.py)."""
        return longer_last(num_layers, stages)

    @staticmethod
    def context_limits(spec: ModelSpec, release: Release | None) -> tuple[int | None, int | None]:
        """With its original length in the config, a rotation's factor does not count (get_context_length)."""
        is_original = any(ORIGINAL in rotation for rotation in spec.rotations)
        longest = spec.max_position_embeddings if is_original else spec.longest_context
        return longest, longest

    @classmethod
    def prompt_division(cls, spec: ModelSpec, settings: Mapping[str, str]) -> str | None:
        """--cp-strategy."""
        return strategy_of(spec) if cls.prompt_ranks_in(settings) > 1 else None

    @staticmethod
    def kv_dtype(
        spec: ModelSpec, dtype_name: str, settings: Mapping[str, str], dtype: str | None, place: Place = ANYWHERE
    ) -> Resolved:
        """`auto` depends on the device for sparse attention, and on the checkpoint for other models.

        See `defaults` for the rules and their sources.
        """
        name, reason = default_cache(spec, dtype, place) if dtype_name.casefold() == "auto" else (dtype_name, None)
        return (RAW_FP8 if is_fp8(name) and has_raw_rows(spec, place) else name), reason

    def draft_tables(self, method: str, head: ModelSpec | None, ranks: int) -> tuple[tuple[str, int], ...]:
        """The drafter's own embedding and output head, which are freed only after the pool has its size.

        Before 0.5.14, the pool had its size before the drafter was loaded. An EAGLE-3 head keeps its own output head,
        unless its config has no vocabulary for it. Source: init_memory_pools (managers/scheduler.py) and init_lm_head
        (eagle_worker_v2.py), SGLang 0.5.14 to 0.5.23; sgl-project/sglang#36452.
        """
        weights = weights_of(self.spec)
        if method not in (MTP, EAGLE, EAGLE1) or weights is None or not self.place.since(0, 5, 14):
            return ()
        keeps_head = weights.tied or (method == EAGLE and (head is None or "draft_vocab_size" in head.stated))
        size = weights.embedding.parameters * 2 // ranks
        return (("the drafter's tables, freed after the start", size if keeps_head else 2 * size),)

    def cache_bytes(self, cache: Cache, tokens: int, dtype: Dtype) -> int:
        full, window = self._pool_tokens(pools_of(self.spec, dtype), tokens, 1)
        layer = next(
            layer for layer in layers_of(self.spec, dtype) if (type(layer.cache), layer.cache) == (type(cache), cache)
        )
        rows = self._num_states(1) + 1
        if layer.pool != STATE:
            rows = self.page + (full if layer.pool == FULL else window)
        return rows * layer.bytes

    def entries(self, share: ModelSpec, dtype: Dtype) -> list[Entries]:
        layers = layers_of(share, dtype)
        return [Entries(layer.cache, layer.num_layers, (layer.bytes,)) for layer in layers if layer.stores]

    def held_bytes(self, share: ModelSpec, dtype: Dtype, tokens: int, batch: int) -> int:
        return self.rows_bytes(share, dtype, tokens, batch, *self._pool_tokens(pools_of(share, dtype), tokens, batch))

    def rows_bytes(self, share: ModelSpec, dtype: Dtype, tokens: int, batch: int, full: int, window: int) -> int:
        """The bytes of pools with these numbers of tokens, of the states, and of the request table."""
        pools, page = pools_of(share, dtype), self.page
        rows = (full + page) * pools.full + (window + page) * pools.window + (self._num_states(batch) + 1) * pools.state
        return rows + self.table_bytes(tokens) + self._draft_bytes(share, dtype, batch)

    def batch_line(self, share: ModelSpec, dtype: Dtype, tokens: int) -> BatchLine | None:
        pools, chosen = pools_of(share, dtype), self.chosen
        if self.bounds or pools.widest_window or chosen.max_mamba_cache_size is not None:
            return None
        spare, drafts = self._draft_bytes(share, dtype, 0), self._draft_bytes(share, dtype, 1)
        is_limited = chosen.max_running_requests is not None or chosen.extra_slots
        if is_limited and (drafts or (pools.state and self.role)):
            return None
        each = round_up(tokens + self.encoder, self.page) * pools.full + self.states_each * pools.state + drafts - spare
        return BatchLine(self.page * pools.full + pools.state + self.table_bytes(tokens) + spare, each)

    def prefixes(self, share: ModelSpec, dtype: Dtype, whole: bool = False) -> Prefixes:
        prefixes: Prefixes = part_of(self.name, "reuse").SglangPrefixes(self, share, dtype)
        return prefixes

    def growth_tokens(self, share: ModelSpec, dtype: Dtype) -> int:
        return self.page * self.ratio.denominator

    def block_tokens(self, share: ModelSpec, dtype: Dtype) -> int:
        return self.page

    def growth(self, spec: ModelSpec, dtype: Dtype, tokens: int) -> Growth:
        pools = pools_of(spec, dtype)
        if not self._is_even(pools):
            return super().growth(spec, dtype, tokens)
        here, period = self.held_bytes(spec, dtype, tokens, 1), self.growth_tokens(spec, dtype)
        return growth_of(here, here + period * pools.full, tokens, period)

    def longest_context(self, share: ModelSpec, dtype: Dtype, batch: int, memory: int) -> int | None:
        pools, page = pools_of(share, dtype), self.page
        if self.bounds or not pools.full or not self._is_even(pools):
            return super().longest_context(share, dtype, batch, memory)
        fixed = self.held_bytes(share, dtype, 1, batch) - batch * round_up(1 + self.encoder, page) * pools.full
        return max((memory - fixed) // (batch * page * pools.full) * page - self.encoder, 0)

    def _is_even(self, pools: Pools) -> bool:
        """Whether every further page takes the same bytes: there is no window pool, and no table of requests."""
        return not pools.widest_window and self.chosen.max_running_requests is None

    @classmethod
    def needed_context(cls, prompt_tokens: int, answer_tokens: int) -> int:
        """A prompt leaves more than six tokens of the context free, and a prompt and its answer two.

        Source: get_worker_info (managers/tp_worker.py), validate_input_length (managers/utils.py) and
        init_req_max_new_tokens (managers/scheduler.py) of SGLang 0.5.23.
        """
        return prompt_tokens + max(7, answer_tokens + 2)

    def check_context(self, tokens: int) -> None:
        length = self.chosen.context_length
        if length is not None and length < tokens:
            raise UsageError(f"--context-length {length} is shorter than the context of {tokens} tokens")

    def blocks(self, share: ModelSpec, dtype: Dtype, tokens: int, batch: int, memory: int | None) -> PoolFigures:
        page, pools = self.page, pools_of(share, dtype)
        pool = BlockPool(page, page * pools.full, self.held_bytes(share, dtype, tokens, 1))
        if memory is not None:
            capacity = self._profiled_tokens(share, dtype, memory)
            if capacity is not None:
                pool = BlockPool(*pool[:3], capacity // page, capacity, capacity / self._paged(tokens))
        full, window = self._pool_tokens(pools, tokens, batch)
        return PoolFigures(pool, {"max_total_num_tokens": full, "swa_max_total_num_tokens": window or None})

    def pool_limit(self, share: ModelSpec, dtype: Dtype) -> PoolLimit | None:
        # States take what they take, and `_profiled_tokens` limits the requests.
        pools, most = pools_of(share, dtype), self.chosen.max_total_tokens
        if most is None or pools.state:
            return None
        tokens, windows = most // self.page * self.page, self._request_windows(pools)
        window = self._window_tokens(tokens) if pools.has_full else tokens
        if windows is not None:
            window = min(windows, most)
        size = self.rows_bytes(
            share, dtype, 1, 1, tokens if pools.has_full else 0, window if pools.widest_window else 0
        )
        return PoolLimit("max-total-tokens", size)

    def lookahead_tokens(self, num_tokens: int, *, is_longest: bool, by_ngrams: bool) -> int:
        """Room for two steps, each with the drafted tokens and the one before them, which is already counted once.

        N-grams are drafted in trees (get_alloc_reserve_per_decode, mem_cache/allocation_sizing.py).
        """
        return 2 * max(num_tokens + 1, _LEAST_IN_TREES if by_ngrams else 0) - 1

    def running_pool(self, share: ModelSpec, dtype: Dtype, longest_tokens: int, batch: int, memory: int) -> RunningPool:
        """The table counts tokens, in whole pages."""
        size = self.block_tokens(share, dtype)
        pool = self.blocks(share, dtype, longest_tokens, batch, memory).pool
        capacity = None if pool is None else pool.kv_cache_tokens
        return RunningPool(capacity, size, range(0, (-(-longest_tokens // size) + 3) * size, size))

    def max_running_requests(
        self, share: ModelSpec, dtype: Dtype, memory: int | None, tokens: int = 1, shared_tokens: int = 0
    ) -> int | None:
        """The most requests for which there are states, and for whose tokens the states leave room.

        Without states, the bytes of a request say how many have room.
        """
        most = self._most_running(share, dtype, memory)
        if memory is None or not self._largest_states(share, dtype):
            return most
        capacity = self._profiled_tokens(share, dtype, memory)
        if capacity is None:
            return most
        return min(most, max(0, capacity - shared_tokens) // (self._paged(tokens) - shared_tokens))

    def _most_running(self, share: ModelSpec, dtype: Dtype, memory: int | None) -> int:
        """max_running_requests of a server, whatever the requests' lengths (resolve_max_num_reqs)."""
        capacity = None if memory is None else self._profiled_tokens(share, dtype, memory)
        most = most_requests(self.chosen, capacity, self.chosen.context_length or self.spec.max_position_embeddings)
        state = self._largest_states(share, dtype)
        states = num_states(memory, state, self.chosen, self.states_each, self.place) if state else None
        return most if states is None else min(most, states // self.states_each)

    def _profiled_tokens(self, share: ModelSpec, dtype: Dtype, memory: int) -> int | None:
        """max_total_num_tokens if every device has `memory` bytes for its pools: the least of any pipeline stage.

        Every stage subtracts as many states as the stage with the most of them (_handle_max_mamba_cache).
        """
        state = self._largest_states(share, dtype)
        left = memory_after_states(memory, state, self.chosen, self.states_each, self.place)
        of_stages = [
            profiled_tokens(pools, self.chosen, left, self._request_windows(pools))
            for pools in [pools_of(stage, dtype) for stage in self._stages(share)]
        ]
        return min((tokens for tokens in of_stages if tokens is not None), default=self._tokens_without_rows())

    def _tokens_without_rows(self) -> int | None:
        """The tokens of a model without attention: one request of full length (_zero_kv_max_tokens)."""
        tokens = self.chosen.max_total_tokens or self.chosen.context_length or self.spec.max_position_embeddings
        return None if tokens is None else tokens // self.page * self.page

    def _stages(self, share: ModelSpec) -> Sequence[ModelSpec]:
        return stages_of(whole_of(share), self.bounds) if self.bounds else (share,)

    def _largest_states(self, share: ModelSpec, dtype: Dtype) -> int:
        """The bytes of a state in the pipeline stage with the most of them."""
        return max(pools_of(stage, dtype).state for stage in self._stages(share))

    def _paged(self, tokens: int) -> int:
        """The tokens that a request of `tokens` tokens takes in the pool."""
        return round_up(tokens + self.encoder, self.page)

    def pool(self, share: ModelSpec, dtype: Dtype, tokens: int, batch: int) -> list[Line]:
        pools, page, every = pools_of(share, dtype), self.page, tokens + self.encoder
        full, window = self._pool_tokens(pools, tokens, batch)
        paged = batch * round_up(every, page)
        slots = self._num_states(batch)
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
        sizes["request table"] = self.table_bytes(tokens)
        slot, requests = self._draft_slot(share, dtype), self._draft_requests(batch)
        sizes["states for checking drafts"] = requests * slot.states
        sizes["convolution inputs for checking drafts"] = requests * slot.inputs
        return lines_of(sizes)

    def _draft_slot(self, share: ModelSpec, dtype: Dtype) -> DraftSlot:
        chosen = self.chosen
        return draft_slot(share, dtype, checked_tokens(chosen, self.place), chosen.speculative_eagle_topk)

    def _draft_requests(self, batch: int) -> int:
        """The slots of running and of received requests, and the spare one. No more run than there are states."""
        most, states = self.chosen.max_running_requests or 0, self.chosen.max_mamba_cache_size
        running = max(batch, most if states is None else min(most, states // self.states_each))
        return running + self.chosen.extra_slots + 1

    def _draft_bytes(self, share: ModelSpec, dtype: Dtype, batch: int) -> int:
        if checked_tokens(self.chosen, self.place) is None:
            return 0
        return self._draft_requests(batch) * sum(self._draft_slot(share, dtype))

    def _num_states(self, batch: int) -> int:
        return least_states(self.chosen, batch, self.states_each, self.place)

    def _pool_tokens(self, pools: Pools, tokens: int, batch: int) -> tuple[int, int]:
        """The number of tokens in the full pool and in the window pool.

        The full pool has whole pages for every sequence, and the window pool has a share of that. The numbers are the
        same on every pipeline stage, regardless of its layers.

        The window pool must hold every sequence's window, and SGLang only starts if it holds more than one window and
        one page (validate_swa_pool_size). If the share is too small, both pools are larger. A model with windows in all
        layers has only the window pool, and the ratio does not apply. Nor does it if the pool is sized for requests.
        """
        page, tokens = self.page, tokens + self.encoder
        windows = round_up(min(tokens, pools.widest_window), page)
        return self.sized_pools(pools, batch * round_up(tokens, page), batch * windows)

    def sized_pools(self, pools: Pools, full: int, least: int) -> tuple[int, int]:
        """The tokens of both pools if they must hold at least `full` tokens and `least` tokens of windows."""
        page = self.page
        if not pools.widest_window:
            return full, 0
        least = max(round_up(self._span(pools) + page + 1, page), least)
        if not pools.has_full:
            return 0, max(full, least)
        windows = self._request_windows(pools)
        if windows is not None:
            return full, max(least, min(windows, self.chosen.max_total_tokens or windows))
        full = max(full, round_up(ceil_div(least * self.ratio.denominator, self.ratio.numerator), page))
        while self._window_tokens(full) < least:
            # SGLang computes the share in floating point, which can be just below a whole number.
            full += page
        return full, self._window_tokens(full)

    def _request_windows(self, pools: Pools) -> int | None:
        """The tokens of the window pool if it has room for the requests that may run, and not a share of all tokens.

        So it is if there is no radix cache and the requests are known (SWAChunkCapPoolConfigurator of SGLang 0.5.14 to
        0.5.21, SWARequestCapPoolConfigurator since then). The full pool then takes the rest of the memory.
        """
        requests, has_both = set_requests(self.chosen), pools.widest_window and pools.has_full
        if requests is None or not (has_both and self.chosen.disable_radix_cache and self.place.since(*_FOR_REQUESTS)):
            return None
        return round_up(window_slots(self.chosen, self._span(pools), requests), self.page)

    def _span(self, pools: Pools) -> int:
        """SGLang's sliding_window_size. For some types it has only the tokens before the newest one."""
        return pools.widest_window - (self.spec.model_type in types_of(self.name, "windows_before"))

    def _window_tokens(self, full_tokens: int) -> int:
        return int(full_tokens * self.chosen.swa_full_tokens_ratio) // self.page * self.page

    def table_bytes(self, tokens: int) -> int:
        """Bytes of req_to_token: one row for each request that may run or be received, and one spare row.

        0 if SGLang derives the number of requests from the memory. Source: ReqToTokenPool (mem_cache/memory_pool.py)
        and DecodeReqToTokenPool (disaggregation/decode.py).
        """
        requests = self.chosen.max_running_requests
        if requests is None:
            return 0
        longest = self.chosen.context_length or max(self.spec.max_position_embeddings or 0, tokens)
        return (requests + self.chosen.extra_slots + 1) * (longest + self._extra_tokens()) * _INDEX_BYTES

    def _extra_tokens(self) -> int:
        """The room for tokens beyond the longest request: for drafts, and with pages for those of two steps."""
        checked, page = self.chosen.speculative_num_draft_tokens, self.page
        if checked is None:
            return _EXTRA_TOKENS
        of_two_steps = 2 * checked + page - 1 if page > 1 else 0
        return max(_EXTRA_TOKENS + checked, of_two_steps)


def _notes(spec: ModelSpec, settings: Settings) -> tuple[Note, ...]:
    """Notes about SGLang's defaults that are not counted here."""
    notes = []
    if settings.max_running_requests is None:
        text = "the request table depends on the memory and is not counted; set --max-running-requests to count it"
        notes.append(Note("engine", "request-table", text))
    decodes = settings.disaggregation_mode == DECODE
    knows_states = settings.max_mamba_cache_size or (decodes and settings.max_running_requests)
    if has_states(spec) and not knows_states:
        text = "SGLang gives the states a share of the memory; only those that the batch needs are counted"
        notes.append(Note("engine", "more-states", f"{text} (set --max-mamba-cache-size)"))
    return tuple(notes)
