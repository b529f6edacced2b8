"""The figures of a cache, shared by the estimate and the columns of a sweep, and their formulas.

A formula has symbols and numbers, so that a user can check it by hand.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcalc.memory.curves import SizedCache, sized_caches, stored_sequence_bytes
from kvcalc.memory.dtypes import Dtype
from kvcalc.model.caches import HEADS_CACHES, CompressedAttention, HeadsCache, RecurrentState
from kvcalc.model.spec import ModelSpec
from kvcalc.records import NamedTuple
from kvcalc.server.case import Case

if TYPE_CHECKING:
    import kvcalc.documents as documents


class CacheFigures(NamedTuple):
    """The bytes of a case: the keys of `kv_cache` in the JSON document."""

    stored_bytes: int
    total_bytes: int
    bytes_per_sequence: int
    bytes_per_token: int
    fixed_bytes_per_sequence: int
    bytes_per_device: int
    devices_total_bytes: int
    decode_read_bytes: int


FIGURES = CacheFigures._fields


def cache_figures(case: Case) -> CacheFigures:
    """The bytes of a case."""
    spec, workload, allocation, device = case.cached, case.workload, case.allocation, case.share
    tokens, batch, dtype = workload.context_tokens, workload.batch_size, workload.kv_dtype
    layout, growth = case.layout, allocation.growth(spec, dtype, tokens)
    batches = layout.attention_batches(batch).items()
    return CacheFigures(
        batch * stored_sequence_bytes(spec, dtype, tokens),
        sum([replicas * allocation.replica_bytes(spec, dtype, tokens, each) for each, replicas in batches]),
        growth.bytes_at(tokens),
        growth.bytes_per_token,
        growth.fixed_bytes,
        allocation.batch_bytes(device, dtype, tokens, workload.attention_batch),
        layout.tensor_parallel_size
        * layout.prompt_ranks
        * sum([replicas * allocation.all_stages_bytes(device, dtype, tokens, each) for each, replicas in batches]),
        batch * allocation.reads(spec, dtype).bytes_at(tokens),
    )


def describe_formulas(spec: ModelSpec, tokens: int, batch_size: int, dtype: Dtype) -> list[documents.Formula]:
    """One formula for each kind of cache, for all its layers together.

    Each is `{"kind", "window", "num_layers", "symbols", "numbers", "bytes"}`. `bytes` is the product of the numbers:
    the bytes these layers store for the whole batch.
    """
    return [_formula(sized, tokens, batch_size, dtype) for sized in sized_caches(spec, dtype)]


def _formula(sized: SizedCache, tokens: int, batch_size: int, dtype: Dtype) -> documents.Formula:
    cache, num_layers, stored = sized.cache, sized.num_layers, sized.stored_bytes(tokens, dtype)
    terms = [("layers", f"{num_layers:,}"), ("batch", f"{batch_size:,}")]
    if isinstance(cache, RecurrentState):
        terms.append(("bytes per state", f"{stored:,}"))
    elif isinstance(cache, CompressedAttention):
        parts = [(name, value) for name, value in cache.stored_parts(tokens) if value]
        terms.append(("(" + " + ".join(n for n, _ in parts) + ")", "(" + " + ".join(f"{v:,}" for _, v in parts) + ")"))
        terms.append(("bytes", _bytes_of_element(dtype)))
    elif dtype.v is not None and isinstance(cache, HEADS_CACHES):
        terms += _factors_of_two_types(cache, tokens, dtype, dtype.v)
    else:
        for name, value in cache.stored_factors(tokens):
            if name == "K and V":
                # The 2 for K and V comes first, as the documentation writes it.
                terms.insert(0, ("2", f"{value:,}"))
            else:
                terms.append((name, f"{value:,}"))
        terms.append(("bytes", _bytes_of_element(dtype)))
    return {
        "kind": cache.kind,
        "window": cache.window,
        "num_layers": num_layers,
        "symbols": " x ".join([name for name, _ in terms]),
        "numbers": " x ".join([value for _, value in terms]),
        "bytes": num_layers * batch_size * stored,
    }


def _factors_of_two_types(cache: HeadsCache, tokens: int, k: Dtype, v: Dtype) -> list[tuple[str, str]]:
    """The factors if K and V have different dtypes: heads and tokens, then each width with its own bytes."""
    heads_and_tokens = cache._replace(k_head_dim=1, v_head_dim=0).stored_factors(tokens)[:2]
    k_bytes, v_bytes = _bytes_of_element(k), _bytes_of_element(v)
    width = (
        "(k_head_dim x K's bytes + v_head_dim x V's bytes)",
        f"({cache.k_head_dim} x {k_bytes} + {cache.v_head_dim} x {v_bytes})",
    )
    return [*((name, f"{value:,}") for name, value in heads_and_tokens), width]


def _bytes_of_element(dtype: Dtype) -> str:
    """The bytes per element as text. A block format is written as block bytes / block elements."""
    return f"{dtype.block_bytes}/{dtype.block_elements}" if dtype.block_elements > 1 else f"{dtype.block_bytes}"
