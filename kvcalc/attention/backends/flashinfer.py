"""FlashInfer's batch decode over pages, for GQA and for MLA.

Sources: https://docs.flashinfer.ai/api/decode.html, BatchDecodeWithPagedKVCacheWrapper, and
https://docs.flashinfer.ai/api/mla.html, BatchMLAPagedAttentionWrapper; read again in the wheel of 0.7.2.post1.
"""

from __future__ import annotations

from importlib import import_module
from itertools import accumulate
from math import gcd
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from kvcalc.attention.backends.base import LATENT_WIDTHS, Cache, Case, why_not_latent
from kvcalc.attention.backends.libraries import Kept, Library, why_not_hopper
from kvcalc.records import NamedTuple


class Pages(NamedTuple):
    """The tensors of a cache as pools of pages of `size` tokens.

    Without a `table` of the pages' numbers, page p of sequence b is number `firsts[b]` + p. `layout` is FlashInfer's
    name for the order of the dimensions of a pool.
    """

    pools: tuple[Tensor, ...]
    layout: str
    size: int
    table: Tensor | None
    firsts: tuple[int, ...] = ()


class Planned:
    """A wrapper, and the lengths that it has a plan for. A plan is made on the host and holds for all layers."""

    def __init__(self, wrapper: Any) -> None:
        self.wrapper, self.lengths = wrapper, ()


class FlashInfer(Library):
    """FlashInfer's wrappers. A dense cache is read as pages too, because a sequence is only split between pages."""

    name, module, distribution = "flashinfer", "flashinfer", "flashinfer-python"
    takes_lengths = True
    workspace_bytes = 128 << 20
    head_widths = (64, 128, 256)
    # The largest page of a dense cache. Small pages are split more evenly.
    page_tokens = 16

    def __init__(self) -> None:
        self._kept = Kept()
        # Hashes of the orders of blocks. Layers with the same order share a plan.
        self._orders = WeakIdKeyDictionary()

    def why_not_cache(self, case: Case) -> str | None:
        if case.stored_dtype != torch.float8_e4m3fn or case.scaling != "tensor":
            return super().why_not_cache(case)
        if case.is_latent and case.dtype != torch.bfloat16:
            return "reads a latent in fp8 for queries in bfloat16 only"
        return why_not_hopper(case.device) if case.is_latent else None

    def why_not_shape(self, case: Case) -> str | None:
        if case.is_latent:
            return why_not_latent(case)
        if case.k_width != case.v_width:
            return "its batch decode needs the same width for K and V"
        if case.k_width not in self.head_widths:
            return f"needs heads of {', '.join(map(str, self.head_widths))}, not {case.k_width}"
        return None

    def decode(self, query: Tensor, cache: Cache, scale: float | None = None, v_width: int | None = None) -> Tensor:
        pages = pages_of(cache, self.page_tokens)
        run = self._run_grouped if v_width is None else self._run_latent
        return run(query, pages, cache.lengths, scale, self._order(cache.table), cache.tensor_scales)[:, :, None]

    def _run_grouped(
        self, query: Tensor, pages: Pages, lengths: tuple[int, ...], scale: float | None, order: int,
        scales: tuple[float, ...],
    ) -> Tensor:  # fmt: skip
        _, heads, _, width = query.shape
        kv_heads = pages.pools[0].shape[1 if pages.layout == "HND" else 2]

        def make() -> Planned:
            # Its documentation recommends tensor cores for large groups. The other kernels only take groups of some
            # sizes, among which are 1, 2 and 3.
            wrapper = self.load().BatchDecodeWithPagedKVCacheWrapper
            workspace = self._workspace(query.device)
            return Planned(wrapper(workspace, pages.layout, use_tensor_cores=heads // kv_heads >= 4))

        kept = pages.pools[0].dtype
        key = (query.device, query.shape, query.dtype, kept, kv_heads, *pages[1:3], pages.firsts, scale, order)
        planned = self._kept(key, make)
        if _needs_plan(planned, query, lengths):
            starts, indices, last = _page_lists(pages, lengths)
            planned.wrapper.plan(
                starts, indices, last, heads, kv_heads, width, pages.size, pos_encoding_mode="NONE",
                q_data_type=query.dtype, kv_data_type=kept, sm_scale=scale,
            )  # fmt: skip
            planned.lengths = lengths
        k_scale, v_scale = scales or (None, None)
        out: Tensor = planned.wrapper.run(query[:, :, 0], pages.pools, k_scale=k_scale, v_scale=v_scale)
        return out

    def _run_latent(
        self, query: Tensor, pages: Pages, lengths: tuple[int, ...], scale: float | None, order: int,
        scales: tuple[float, ...],
    ) -> Tensor:  # fmt: skip
        batch, heads, _, width = query.shape
        rank = LATENT_WIDTHS[1]
        latent = pages.pools[0].flatten(1, 2)

        def make() -> Planned:
            wrapper = import_module(f"{self.module}.mla").BatchMLAPagedAttentionWrapper
            return Planned(wrapper(self._workspace(query.device)))

        key = (query.device, query.shape, query.dtype, latent.dtype, pages.size, pages.firsts, scale, order, "MLA")
        planned = self._kept(key, make)
        if _needs_plan(planned, query, lengths):
            starts, indices, _ = _page_lists(pages, lengths)
            queries = torch.arange(batch + 1, dtype=torch.int32)
            planned.wrapper.plan(
                queries, starts, indices, torch.tensor(lengths, dtype=torch.int32), heads, rank, width - rank,
                pages.size, False, width**-0.5 if scale is None else scale, query.dtype, latent.dtype,
            )  # fmt: skip
            planned.lengths = lengths
        content, rope = query[:, :, 0, :rank], query[:, :, 0, rank:]
        # A row has one scale, in both parts.
        given = {"ckv_scale": scales[0], "kpe_scale": scales[0]} if scales else {}
        out: Tensor = planned.wrapper.run(content, rope, latent[..., :rank], latent[..., rank:], **given)
        return out

    def _workspace(self, device: torch.device) -> Tensor:
        """The buffer for parts of the output, which all wrappers share, because they run one after another."""
        size = self.workspace_bytes
        made: Tensor = self._kept(("workspace", device), lambda: torch.zeros(size, dtype=torch.uint8, device=device))
        return made

    def _order(self, table: Tensor | None) -> int:
        if table is None:
            return 0
        if table not in self._orders:
            self._orders[table] = hash(tuple(table.flatten().tolist()))
        return int(self._orders[table])


def pages_of(cache: Cache, most_tokens: int) -> Pages:
    """The pages of `cache`, without a copy. Pages of a dense cache are the largest that divide its capacity.

    A page of several heads is not contiguous in a dense cache (B, G, s, width): page p of sequence b begins in the
    first head at row b * G * s + p * size, and each head is s rows further. Pools of such pages overlap. Sequences of
    different lengths follow each other in rows (G, width), so their pages are those of a server.
    """
    if cache.table is not None:
        return Pages(cache.tensors, "NHD", cache.tensors[0].shape[1], cache.table)
    size = gcd(most_tokens, *cache.starts)
    if cache.is_ragged:
        pools = tuple(tensor.view(-1, size, *tensor.shape[1:]) for tensor in cache.tensors)
        return Pages(pools, "NHD", size, None, tuple(row // size for row in cache.starts[:-1]))
    batch, heads, capacity, _ = cache.tensors[0].shape
    each = capacity // size
    pools = tuple(
        tensor.as_strided(
            (((batch - 1) * heads + 1) * each, heads, size, tensor.shape[-1]),
            (size * tensor.stride(2), tensor.stride(1), tensor.stride(2), 1),
        )
        for tensor in cache.tensors
    )
    return Pages(pools, "HND", size, None, tuple(range(0, batch * heads * each, heads * each)))


def _needs_plan(planned: Planned, query: Tensor, lengths: tuple[int, ...]) -> bool:
    if planned.lengths == lengths:
        return False
    if query.is_cuda and torch.cuda.is_current_stream_capturing():
        # Raised before the copy to the host, which would leave the capture, and torch's allocator, in a broken state.
        raise RuntimeError("FlashInfer makes its plan on the host, which a CUDA graph cannot contain")
    return True


def _page_lists(pages: Pages, lengths: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Where the pages of every sequence begin in the list of pages, the list, and the tokens in every last page."""
    counts = [-(-tokens // pages.size) for tokens in lengths]
    starts = torch.tensor((0, *accumulate(counts)), dtype=torch.int32)
    last = torch.tensor([n - (count - 1) * pages.size for n, count in zip(lengths, counts)], dtype=torch.int32)
    if pages.table is not None:
        return starts, torch.cat([row[:count] for row, count in zip(pages.table, counts)]), last
    numbers = (torch.arange(first, first + count, dtype=torch.int32) for first, count in zip(pages.firsts, counts))
    return starts, torch.cat([*numbers]), last
