"""The formula behind one row of cache, in words and in numbers, for a person to check by hand."""

from __future__ import annotations

from kvcalc.memory.dtypes import Dtype
from kvcalc.memory.kv_cache import CacheRow


def formula(row: CacheRow, tokens: int, batch_size: int, dtype: Dtype) -> dict[str, str]:
    """`{"symbols", "numbers"}` of what the row's layers store for the whole batch.

    The numbers multiply to the stored bytes of these layers; a block format's bytes stand as bytes/elements.
    """
    per_element = str(dtype.block_bytes) if dtype.block_elements == 1 else f"{dtype.block_bytes}/{dtype.block_elements}"
    factors = [(name, f"{value:,}") for name, value in row.cache.stored_factors(tokens)]
    if factors[0][0] == "K and V":
        factors[0] = ("2", "2")
    terms = [("layers", f"{row.num_layers:,}"), ("batch", f"{batch_size:,}"), *factors, ("bytes", per_element)]
    # The 2 of K and V stands first, as the documents write it.
    terms.sort(key=lambda term: term[0] != "2")
    return {"symbols": " x ".join(name for name, _ in terms), "numbers": " x ".join(value for _, value in terms)}
