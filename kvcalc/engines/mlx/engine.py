"""MLX on Apple silicon (mlx-lm): arrays that grow by 256 tokens, rotating windows, and recurrent states.

Source: mlx_lm/models/cache.py and mlx_lm/generate.py at commit d78bf58e217c (mlx-lm 0.32.0). The cache's file is
the same in 0.32.2, and so are the steps of a prompt.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvcalc.engines.account import Line, lines_of
from kvcalc.engines.engine import Engine, Resolved
from kvcalc.engines.mlx.models import (
    check_model,
    kept,
    makes_own_cache,
    rotates,
    weight_dtype,
    why_not_quantized,
)
from kvcalc.engines.options import SettingsReader
from kvcalc.engines.place import ANYWHERE, Place
from kvcalc.engines.rounding import round_up
from kvcalc.errors import LayoutError, ModelError, UsageError
from kvcalc.memory.dtypes import MLX_BITS, MLX_GROUPS, MLX_TYPES, Dtype, bytes_of, mlx_name
from kvcalc.memory.kv_cache import state_bytes, stored_cache_bytes
from kvcalc.model.caches import HEADS_CACHES, Cache, ChunkedAttention, LatentAttention, RecurrentState, reading_at_most
from kvcalc.model.spec import ModelSpec, all_caches, distinct_caches, map_caches
from kvcalc.notes import Note
from kvcalc.releases import parse_release

# KVCache.step: an array grows by this many tokens.
_STEP = 256

_FLOATS = ("bf16", "fp16", "fp32", "auto")


class Mlx(Engine):
    """Counts the arrays after the last token. K and V have the type of the activations, or --kv-bits bits.

    - An array grows by 256 tokens (KVCache). Prompts are processed in multiples of 256, so it always has a multiple of
      256 tokens.
    - A window has at most its own number of tokens (RotatingKVCache). One that is not full yet has the tokens of the
      prompt but its last, and grows by 256 with the next one; the context is counted as the prompt. While a prompt is
      processed, it is longer by a step.
    - A chunked layer keeps its chunk and grows by 256 tokens beyond it (ChunkedKVCache).
    - MLA, states and windows of older releases: see `models.py`.
    - The sequences of a batch are padded to the longest one (BatchKVCache). All have the same length here.

    Raises ModelError (exit 3) for models whose cache is not modelled, and UsageError (exit 2) for options that mlx-lm
    does not support.
    """

    name = "mlx"
    weight_dtype = staticmethod(weight_dtype)

    def __init__(self, spec: ModelSpec, settings: Mapping[str, str], stages: int, release: str | None) -> None:
        super().__init__(spec, settings, stages, release)
        if stages > 1:
            raise LayoutError(f"--pp {stages}: several devices are not modelled for mlx", "remove --pp")
        given = SettingsReader("mlx", settings)
        self.release = parse_release("mlx", release).release if release else None
        self.max_kv_size = given.optional_count("max-kv-size")
        self.settings = {"max_kv_size": self.max_kv_size, "kv_bits": None, "kv_group_size": None}
        check_model(spec, self.release)
        notes = []
        if "kv-bits" in settings:
            used = _quantized(settings)
            self._check_quantized(used)
            self.settings.update(kv_bits=used.bits, kv_group_size=used.block_elements)
            text = "mlx-lm quantizes the cache of one sequence; mlx_lm.server and batches keep 16 bits"
            notes.append(Note("engine", "one-sequence", text))
            text = "mlx_lm.generate keeps 16 bits for the first 5,000 tokens; --quantized-kv-start 0 changes that"
            notes.append(Note("engine", "quantized-later", text))
        elif "kv-group-size" in settings:
            _group(settings)
            notes.append(Note("engine", "kv-group-size", "--kv-group-size has no effect without --kv-bits"))
        if self.max_kv_size is not None and makes_own_cache(spec):
            text = f"mlx-lm ignores --max-kv-size for {spec.model_type}, whose class makes its own cache"
            notes.append(Note("engine", "max-kv-size", text))
        slides = any(cache.window is not None and not isinstance(cache, ChunkedAttention) for cache in all_caches(spec))
        if slides and not rotates(spec):
            text = f"mlx-lm keeps all tokens in the windowed layers of {spec.model_type}"
            notes.append(Note("engine", "whole-windows", text))
        self.notes = tuple(notes)

    @staticmethod
    def kv_dtype(
        spec: ModelSpec, dtype_name: str, settings: Mapping[str, str], dtype: str | None, place: Place = ANYWHERE
    ) -> Resolved:
        """The type of the activations, or the type that --kv-bits and --kv-group-size name."""
        folded = dtype_name.casefold()
        if "kv-bits" in settings:
            if folded != "auto":
                raise UsageError(f"--kv-dtype {dtype_name}: --kv-bits sets the type of the cache", "remove one of them")
            return _quantized(settings), "--kv-bits"
        if folded not in _FLOATS:
            hint = "--kv-bits 8 or --kv-bits 4 quantizes the cache; bf16, fp16 and fp32 are types of --kv-dtype"
            raise UsageError(f"--kv-dtype {dtype_name}: not a cache dtype of mlx", hint)
        return dtype_name, None

    def cache_bytes(self, cache: Cache, tokens: int, dtype: Dtype) -> int:
        held = kept(self.spec, cache, self.release)
        (size,) = self.entry_sizes(cache, dtype)
        return size if isinstance(held, RecurrentState) else self._rows(held, tokens) * size

    def entry_sizes(self, cache: Cache, dtype: Dtype) -> tuple[int, ...]:
        held = kept(self.spec, cache, self.release)
        if isinstance(held, RecurrentState):
            return (state_bytes(held, held.conv_kernel - 1, dtype),)
        return (bytes_of(sum(held.token_rows()), dtype),)

    def attended(self, share: ModelSpec) -> ModelSpec:
        """A step reads at most the tokens that --max-kv-size keeps."""
        most = self.max_kv_size
        if most is None or makes_own_cache(self.spec):
            return share
        return map_caches(share, lambda cache: reading_at_most(cache, most))

    def growth_tokens(self, share: ModelSpec, dtype: Dtype) -> int:
        return _STEP

    def lines(self, share: ModelSpec, dtype: Dtype, tokens: int) -> list[Line]:
        sizes = dict.fromkeys(
            ("stored", "windows kept whole", "K and V beyond the latent", "cells rounded up",
             "different layout or dtype"), 0,
        )  # fmt: skip
        for cache, num_layers in distinct_caches(share):
            held = kept(self.spec, cache, self.release)
            stored, total = (
                num_layers * size
                for size in (stored_cache_bytes(cache, tokens, dtype), self.cache_bytes(cache, tokens, dtype))
            )
            needed = num_layers * stored_cache_bytes(held, tokens, dtype)
            sizes["stored"] += stored
            if isinstance(cache, RecurrentState) or total < needed:
                sizes["different layout or dtype"] += total - stored
                continue
            beyond = "K and V beyond the latent" if isinstance(cache, LatentAttention) else "windows kept whole"
            sizes[beyond] += needed - stored
            sizes["cells rounded up"] += total - needed
        return lines_of(sizes)

    def _rows(self, held: Cache, tokens: int) -> int:
        """The tokens in the array of a cache."""
        rows = round_up(tokens, _STEP)
        if isinstance(held, ChunkedAttention):
            return min(rows, held.chunk + _STEP)
        limit = held.window
        if self.max_kv_size is not None and not makes_own_cache(self.spec):
            limit = self.max_kv_size
        return rows if limit is None else min(tokens - 1 + _STEP, limit)

    def _check_quantized(self, dtype: Dtype) -> None:
        """Raise ModelError or UsageError for a cache that mlx-lm cannot quantize."""
        why = why_not_quantized(self.spec, self.release)
        if why is None and self.max_kv_size is not None and not makes_own_cache(self.spec):
            raise UsageError("--kv-bits: mlx-lm does not quantize a rotating cache", "remove --max-kv-size")
        if why is not None:
            raise ModelError(f"{self.spec.name}: mlx-lm does not quantize a cache with {why}", "remove --kv-bits")
        group = dtype.block_elements
        for cache in all_caches(self.spec):
            if not isinstance(cache, HEADS_CACHES):
                continue
            for width in (cache.k_head_dim, cache.v_head_dim):
                if width % group:
                    hint = f"try --kv-group-size {next((g for g in (64, 32) if width % g == 0), 32)}"
                    raise UsageError(f"--kv-bits: groups of {group} do not divide a head of {width}", hint)


def _quantized(settings: Mapping[str, str]) -> Dtype:
    """The type of a quantized cache: packed elements, and a scale and a bias of 16 bits for each group."""
    bits = SettingsReader("mlx", settings).count("kv-bits")
    if bits not in MLX_BITS:
        raise UsageError(f"--kv-bits {bits}: not a number of bits of MLX", f"one of {_listed(MLX_BITS)}")
    return MLX_TYPES[mlx_name(bits, _group(settings))]


def _group(settings: Mapping[str, str]) -> int:
    group = SettingsReader("mlx", settings).count("kv-group-size")
    if group not in MLX_GROUPS:
        raise UsageError(f"--kv-group-size {group}: not a group size of MLX", f"one of {_listed(MLX_GROUPS)}")
    return group


def _listed(numbers: tuple[int, ...]) -> str:
    return ", ".join(map(str, numbers))
