"""SGLang: pools of token rows, one for all tokens and one for windows, a pool of states and a request table.

Source: memory_pool.py, pool_configurator.py and kv_cache_configurator.py, SGLang 0.5.23.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvcalc.errors import UsageError
from kvcalc.memory.dtypes import Dtype
from kvcalc.memory.engines import Engine, Line
from kvcalc.memory.engines.checkpoint import quantized_cache
from kvcalc.memory.engines.rounding import ceil_div, round_up
from kvcalc.memory.engines.sglang.layers import FULL, STATE, WINDOW, Layer, encoder_tokens, layers_of
from kvcalc.memory.engines.sglang.models import MINIMAX_M3, WITH_ENCODER, check_model, is_sparse
from kvcalc.memory.engines.sglang.settings import VERSION, Settings, parse_settings
from kvcalc.memory.kv_cache import stored_cache_bytes
from kvcalc.memory.sharding import longer_last, whole_of
from kvcalc.model.caches import Cache, RecurrentState
from kvcalc.model.memo import remembered
from kvcalc.model.spec import ModelSpec, all_caches
from kvcalc.notes import Note

# DeepSeek sparse attention takes pages of 64 tokens alone (DSATokenToKVPool); MiniMax-M3 has pages of 128 by default on
# Hopper and Blackwell (arg_groups/model_overrides/minimax_m3.py).
_SPARSE_PAGE = 64
_M3_PAGE = 128

# Tokens of a request's row in the table beside its context (get_req_to_token_extra_context_len), in int32.
_EXTRA_TOKENS = 4
_INDEX_BYTES = 4

# Pipeline stages: if layers remain, the last ranks get one more each (get_pp_indices, srt/distributed/utils.py).
cut = longer_last


def kv_dtype(
    spec: ModelSpec, asked: str, given: Mapping[str, str], dtype: str | None
) -> tuple[str | Dtype, str | None]:
    """`auto` follows a checkpoint quantized by modelopt whose cache is fp8 (configure_kv_cache_dtype)."""
    found = quantized_cache(spec.quantization, ("modelopt",)) if asked.casefold() == "auto" else None
    return ("fp8", f"the checkpoint's {found[1]} is fp8") if found and found[0] == "fp8" else (asked, None)


def engine(spec: ModelSpec, given: Mapping[str, str]) -> Engine:
    """The accounting of pools just large enough for a batch at full context.

    Raises ModelError (exit 3) for models whose pools are not established, UsageError (exit 2) for options and dtypes it
    does not take.
    """
    page = _SPARSE_PAGE if is_sparse(spec) else _M3_PAGE if spec.model_type in MINIMAX_M3 else 1
    settings = parse_settings(given, page)
    if is_sparse(spec) and settings.page_size != _SPARSE_PAGE:
        raise UsageError(f"--page-size {settings.page_size}: sparse attention takes pages of {_SPARSE_PAGE} tokens")
    check_model(spec)
    if spec.model_type in WITH_ENCODER and settings.max_running_requests is not None:
        raise UsageError("--max-running-requests: the request table beside an encoder is not established")
    # The encoder's tokens stand in front of the decoder's, in rows of the same pool (prepare_encoder_info_extend).
    encoder = encoder_tokens(spec)

    def pool_tokens(share: ModelSpec, dtype: Dtype, tokens: int, batch: int) -> tuple[int, int]:
        # Both pools have as many tokens on every pipeline stage, whichever layers it holds.
        return _pool_tokens(layers_of(whole_of(share), dtype), settings, tokens + encoder, batch)

    def pool(share: ModelSpec, dtype: Dtype, tokens: int, batch: int) -> list[Line]:
        table = _table_bytes(spec, settings, tokens)
        made = pool_tokens(share, dtype, tokens, batch)
        return _account(layers_of(share, dtype), settings, dtype, (tokens, encoder), made, batch, table)

    def pool_bytes(share: ModelSpec, dtype: Dtype, tokens: int, batch: int) -> int:
        layers, page = layers_of(share, dtype), settings.page_size
        full, window = pool_tokens(share, dtype, tokens, batch)
        slots = max(settings.max_mamba_cache_size or 0, batch) + 1
        rows = (full + page) * _row(layers, FULL) + (window + page) * _row(layers, WINDOW) + slots * _row(layers, STATE)
        return rows + _table_bytes(spec, settings, tokens)

    def cache_bytes(cache: Cache, tokens: int, dtype: Dtype) -> int:
        full, window = pool_tokens(spec, dtype, tokens, 1)
        layer = next(
            layer for layer in layers_of(spec, dtype) if (type(layer.cache), layer.cache) == (type(cache), cache)
        )
        rows = (settings.max_mamba_cache_size or 1) + 1
        if layer.pool != STATE:
            rows = settings.page_size + (full if layer.pool == FULL else window)
        return rows * layer.bytes

    def check_context(tokens: int) -> None:
        if settings.context_length is not None and settings.context_length < tokens:
            raise UsageError(f"--context-length {settings.context_length}: shorter than the context of {tokens} tokens")

    def blocks(share: ModelSpec, dtype: Dtype, tokens: int, batch: int, memory_bytes: int | None) -> dict[str, Any]:
        check_context(tokens)
        page, layers = settings.page_size, layers_of(share, dtype)
        full, window = pool_tokens(share, dtype, tokens, batch)
        found: dict[str, Any] = {
            "block_size": page,
            "bytes_per_block": page * _row(layers, FULL),
            "request_bytes": sum(line.bytes for line in pool(share, dtype, tokens, 1)),
            "num_gpu_blocks": None,
            "kv_cache_tokens": None,
            "max_concurrency": None,
            "max_total_num_tokens": full,
            "swa_max_total_num_tokens": window or None,
        }
        capacity = None
        if memory_bytes is not None:
            has_full = bool(_row(layers_of(whole_of(share), dtype), FULL))
            capacity = _profiled_tokens(layers, settings, memory_bytes, has_full)
        if capacity is not None:
            found.update(
                num_gpu_blocks=capacity // page,
                kv_cache_tokens=capacity,
                max_concurrency=capacity / round_up(tokens + encoder, page),
            )
        return found

    return Engine(
        "sglang", VERSION, cache_bytes, settings._asdict(), _notes(spec, settings), blocks=blocks, pool=pool,
        pool_bytes=pool_bytes, growth_tokens=lambda share, dtype: settings.page_size * settings.ratio.denominator,
        check_context=check_context,
    )  # fmt: skip


@remembered
def _row(layers: list[Layer], pool: str) -> int:
    """Bytes of one token in all layers of a pool, or of one state."""
    return sum(layer.num_layers * layer.bytes for layer in layers if layer.pool == pool)


def _pool_tokens(layers: list[Layer], settings: Settings, tokens: int, batch: int) -> tuple[int, int]:
    """Tokens of both pools: whole pages for every sequence, and the window pool's share of them.

    The window pool must hold every sequence's window, and SGLang does not start where it holds no more than a window
    and a page (validate_swa_pool_size): where the share is less, both pools are larger. A model of windows alone has
    no other pool, and no share is taken.
    """
    page = settings.page_size
    full = batch * round_up(tokens, page)
    span = _widest_window(layers)
    if not span:
        return full, 0
    least = max(round_up(span + page + 1, page), batch * round_up(min(tokens, span), page))
    if not _row(layers, FULL):
        return 0, max(full, least)
    full = max(full, round_up(ceil_div(least * settings.ratio.denominator, settings.ratio.numerator), page))
    while _window_tokens(full, settings) < least:
        # The share is taken in floating point, which may fall short of a whole number.
        full += page
    return full, _window_tokens(full, settings)


@remembered
def _widest_window(layers: list[Layer]) -> int:
    """The widest window in the windows' pool; 0 where there is no such pool."""
    return max((layer.cache.window or 0 for layer in layers if layer.pool == WINDOW), default=0)


def _window_tokens(full_tokens: int, settings: Settings) -> int:
    return int(full_tokens * settings.swa_full_tokens_ratio) // settings.page_size * settings.page_size


def _account(
    layers: list[Layer], settings: Settings, dtype: Dtype, lengths: tuple[int, int], made: tuple[int, int], batch: int,
    table_bytes: int,
) -> list[Line]:  # fmt: skip
    """Lines which add up to the pools' bytes; those of no bytes are left out. `lengths`: the decoder's tokens, and the
    encoder's in front of them; `made`: the tokens of both pools."""
    tokens, every = lengths[0], sum(lengths)
    full, window = made
    held = [
        batch * layer.num_layers * stored_cache_bytes(layer.cache, tokens, dtype) if layer.stores else 0
        for layer in layers
    ]
    needed = [batch * every * layer.num_layers * layer.bytes if layer.pool != STATE else 0 for layer in layers]
    whole = layout = rounding = larger = share = states = unused = 0
    paged = batch * round_up(every, settings.page_size)
    slots = max(settings.max_mamba_cache_size or 0, batch)
    for layer, stored, all_tokens in zip(layers, held, needed):
        row = layer.num_layers * layer.bytes
        if layer.pool == STATE:
            layout += batch * row - stored
            states += (slots - batch) * row
        elif layer.pool == WINDOW:
            if layer.stores:
                share += window * row - stored
            else:
                unused += window * row
        else:
            rounding += paged * row - all_tokens
            larger += (full - paged) * row
            if every > tokens or not layer.stores or layer.cache.kind == "cross_attention":
                unused += all_tokens - stored
            elif layer.cache.window is None:
                layout += all_tokens - stored
            else:
                whole += all_tokens - stored
    named = {
        "stored": sum(held),
        "windows kept whole": whole,
        "window pool beside the windows": share,
        "another layout or dtype": layout,
        "rows nothing is kept in": unused,
        "pages rounded up": rounding,
        "tokens the window pool's share calls for": larger,
        "dummy page": settings.page_size * (_row(layers, FULL) + _row(layers, WINDOW)),
        "states beside the batch": states,
        "dummy state": _row(layers, STATE),
        "request table": table_bytes,
    }
    return [Line(name, size) for name, size in named.items() if size]


def _table_bytes(spec: ModelSpec, settings: Settings, tokens: int) -> int:
    """req_to_token: a row for every request that may run, and one spare (ReqToTokenPool). 0 where the number of
    requests follows the memory."""
    if settings.max_running_requests is None:
        return 0
    longest = settings.context_length or max(spec.max_position_embeddings or 0, tokens)
    return (settings.max_running_requests + 1) * (longest + _EXTRA_TOKENS) * _INDEX_BYTES


def _profiled_tokens(layers: list[Layer], settings: Settings, memory_bytes: int, has_full: bool) -> int | None:
    """max_total_num_tokens of the memory left for the pools: whole pages, the dummy page not reckoned in.

    States come first, and one dummy state (_handle_max_mamba_cache); None where their number follows the memory too,
    and where a pipeline stage has states alone. `has_full`: whether the model has a pool for all tokens.
    """
    state = _row(layers, STATE)
    if state and settings.max_mamba_cache_size is None:
        return None
    memory_bytes = max(0, memory_bytes - state * ((settings.max_mamba_cache_size or 0) + 1))
    share: float = settings.swa_full_tokens_ratio if has_full else 1
    window = _row(layers, WINDOW)
    cell = _row(layers, FULL) + share * window if window else _row(layers, FULL)
    return int(memory_bytes // cell) // settings.page_size * settings.page_size if cell else None


def _notes(spec: ModelSpec, settings: Settings) -> tuple[Note, ...]:
    """What SGLang does by default and this count does not."""
    notes = []
    if settings.max_running_requests is None:
        text = "the request table follows the memory and is not counted: --max-running-requests counts it"
        notes.append(Note("engine", "request-table", text))
    if any(isinstance(cache, RecurrentState) for cache in all_caches(spec)) and not settings.max_mamba_cache_size:
        text = "one state a sequence; SGLang's radix cache keeps 3 or more: --max-mamba-cache-size counts them"
        notes.append(Note("engine", "more-states", text))
    if is_sparse(spec):
        text = "SGLang's auto is fp8 on Blackwell and bf16 on Hopper for sparse attention: --kv-dtype says which"
        notes.append(Note("engine", "kv-dtype-by-device", text))
    return tuple(notes)
