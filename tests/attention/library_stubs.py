"""Modules in place of flash_attn, flash_attn_interface (FlashAttention-3), flashinfer and flash_mla, which need a GPU.

They attend with torch.

They check their arguments as the libraries' sources do, and copy to the host where these do, so they also refuse what
the libraries refuse on a simulated device. Sources: flash-attention 2 of August 2026
(csrc/flash_attn/flash_api.cpp, mha_fwd_kvcache), FlashAttention-3 of August 2026 (hopper/flash_attn_interface.py and
flash_api.cpp, mha_fwd), flashinfer 0.6.18 and 0.7.2.post1 (decode.py, mla/_core.py, attention/scheduler.cuh)
and FlashMLA of April 2026 (flash_mla_interface.py, csrc/api/dense_decode.h).
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from kvcalc.attention.cache import as_bytes

HALF = (torch.float16, torch.bfloat16)
# The thread blocks that run at once on an H100 or H200: FlashInfer asks CUDA, and its tensor core kernels assume two
# for each multiprocessor.
SMS = 132
BLOCKS_AT_ONCE = 2 * SMS


def check(ok: bool, message: str) -> None:
    """As TORCH_CHECK."""
    if not ok:
        raise RuntimeError(message)


def on_one_device(*tensors: Tensor) -> None:
    check(len({str(tensor.device) for tensor in tensors}) == 1, "tensors are on different devices")


def attend(query: Tensor, key: Tensor, value: Tensor, lengths: Tensor, scale: float | None) -> Tensor:
    """`query` (B, 1, H, d) over the first `lengths` (B,) rows of `key` and `value` (B, s, G, d).

    The lengths are never read on the host.
    """
    batch, _, heads, width = query.shape
    groups = key.shape[2]
    rows = query.float().view(batch, groups, heads // groups, width)
    scores = torch.einsum("bgrd,bsgd->bgrs", rows, key.float()) * (width**-0.5 if scale is None else scale)
    hidden = torch.arange(key.shape[1], device=key.device)[None] >= lengths[:, None]
    weights = scores.masked_fill(hidden[:, None, None], float("-inf")).softmax(-1)
    # Rows that are not written yet must not matter, whatever they hold.
    kept = value.float().masked_fill(hidden[:, :, None, None], 0.0)
    out = torch.einsum("bgrs,bsge->bgre", weights, kept)
    return out.reshape(batch, 1, heads, value.shape[-1]).to(query.dtype)


def flash_attn() -> ModuleType:
    """FlashAttention-2. `module.calls` has the shape of every call's K."""

    def flash_attn_with_kvcache(
        q: Tensor, k_cache: Tensor, v_cache: Tensor, k: None = None, v: None = None, rotary_cos: None = None,
        rotary_sin: None = None, cache_seqlens: Tensor | int | None = None, cache_batch_idx: None = None,
        cache_leftpad: None = None, block_table: Tensor | None = None, softmax_scale: float | None = None,
        causal: bool = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
        rotary_interleaved: bool = True, alibi_slopes: None = None, num_splits: int = 0,
        return_softmax_lse: bool = False,
    ) -> Tensor:  # fmt: skip
        assert k_cache.stride(-1) == 1, "k_cache must have contiguous last dimension"
        assert v_cache.stride(-1) == 1, "v_cache must have contiguous last dimension"
        assert {k, v, rotary_cos, rotary_sin, cache_batch_idx, cache_leftpad, alibi_slopes} == {None}
        check(q.dtype in HALF, "FlashAttention only support fp16 and bf16 data type")
        check(k_cache.dtype == q.dtype, "query and key must have the same dtype")
        check(v_cache.dtype == q.dtype, "query and value must have the same dtype")
        batch, _, heads, width = q.shape
        check(width <= 256, "FlashAttention forward only supports head dimension at most 256")
        check(width % 8 == 0, "K and V would be copied, to pad the heads to a multiple of 8")
        check(k_cache.shape == v_cache.shape and k_cache.shape[-1] == width, "K and V must have the query's width")
        check(heads % k_cache.shape[2] == 0, "Number of heads in key/value must divide number of heads in query")
        if isinstance(cache_seqlens, int):
            cache_seqlens = torch.full((batch,), cache_seqlens, dtype=torch.int32, device=k_cache.device)
        tensors = [q, k_cache, v_cache]
        if cache_seqlens is not None:
            check(cache_seqlens.dtype == torch.int32, "seqlens_k must have dtype int32")
            check(cache_seqlens.shape == (batch,) and cache_seqlens.is_contiguous(), "seqlens_k must be (batch,)")
            tensors.append(cache_seqlens)
        key, value = k_cache, v_cache
        if block_table is not None:
            check(block_table.dtype == torch.int32, "block_table must have dtype torch.int32")
            check(block_table.stride(-1) == 1, "block_table must have contiguous last dimension")
            check(k_cache.shape[1] % 256 == 0, "Paged KV cache block size must be divisible by 256")
            check(block_table.shape[0] == batch, "block_table must have shape (batch_size, max_num_blocks_per_seq)")
            tensors.append(block_table)
            if cache_seqlens is not None:
                # Since July 2026 (#2711), to check the table. This waits for the device.
                most = int(cache_seqlens.max().item())
                check(most <= block_table.shape[1] * k_cache.shape[1], "max(seqlens_k) exceeds the block_table")
            key, value = (pool[block_table.long()].flatten(1, 2) for pool in (k_cache, v_cache))
        else:
            check(k_cache.shape[0] == batch, "kcache must have shape (batch_size, seqlen_k, num_heads_k, head_size)")
        on_one_device(*tensors)
        module.calls.append(tuple(k_cache.shape))
        if cache_seqlens is None:
            cache_seqlens = torch.full((batch,), key.shape[1], dtype=torch.int32, device=key.device)
        return attend(q, key, value, cache_seqlens, softmax_scale)

    def flash_attn_varlen_func(
        q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
        max_seqlen_k: int, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
        window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: None = None,
        deterministic: bool = False, return_attn_probs: bool = False, block_table: None = None,
    ) -> Tensor:  # fmt: skip
        check(q.dtype in HALF and k.dtype == v.dtype == q.dtype, "query and key must have the same dtype")
        check(cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32, "cu_seqlens must have dtype int32")
        batch = len(cu_seqlens_q) - 1
        check(cu_seqlens_k.shape == (batch + 1,), "cu_seqlens_k must be (batch + 1,)")
        check(q.stride(-1) == k.stride(-1) == v.stride(-1) == 1, "must have contiguous last dimension")
        check(q.shape[0] == batch and max_seqlen_q == 1, "one query for each sequence")
        check(k.dim() == v.dim() == 3 and q.shape[1] % k.shape[1] == 0, "K must be (tokens, heads, width)")
        on_one_device(q, k, v, cu_seqlens_q, cu_seqlens_k)
        module.calls.append(tuple(k.shape))
        # The rows of each sequence, and those behind them, which do not count.
        at = (cu_seqlens_k[:-1, None] + torch.arange(max_seqlen_k, device=k.device)).clamp(max=len(k) - 1).long()
        return attend(q[:, None], k[at], v[at], cu_seqlens_k.diff(), softmax_scale)[:, 0]

    module: Any = ModuleType("flash_attn")
    module.flash_attn_with_kvcache, module.calls = flash_attn_with_kvcache, []
    module.flash_attn_varlen_func = flash_attn_varlen_func
    return module  # type: ignore[no-any-return]


@dataclass
class Plan:
    """What a call of `plan` decided: pages of every sequence, tokens of a page, thread blocks of a call of `run`."""

    page_size: int
    pages: list[int]
    blocks: int
    use_tensor_cores: bool


def blocks_of(pages: list[int], page_size: int, kv_heads: int) -> int:
    """Thread blocks of FlashInfer's batch decode, by its rule: a sequence is split at pages, never inside one.

    The chunk is the smallest number of pages (128 tokens or more) with which all chunks run at once.
    """
    low, high = max(128 // page_size, 1), max(pages)
    while low < high:
        middle = (low + high) // 2
        if sum(-(-each // middle) for each in pages) > BLOCKS_AT_ONCE // kv_heads:
            low = middle + 1
        else:
            high = middle
    return sum(-(-max(each, 1) // low) for each in pages) * kv_heads


def table_of(starts: Tensor, indices: Tensor) -> Tensor:
    """The pages of every sequence as a row of a table. Those of a shorter one are followed by its last page."""
    counts = starts.diff().tolist()
    rows = [indices[first : first + count] for first, count in zip(starts.tolist(), counts)]
    return torch.stack([torch.cat((row, row[-1:].expand(max(counts) - len(row)))) for row in rows])


def flashinfer() -> ModuleType:
    """FlashInfer's wrappers for GQA and MLA. `module.plans` has every `Plan`, `module.runs` the number of runs."""

    class BatchDecodeWithPagedKVCacheWrapper:
        def __init__(
            self, float_workspace_buffer: Tensor, kv_layout: str = "NHD", use_cuda_graph: bool = False,
            use_tensor_cores: bool = False, paged_kv_indptr_buffer: Tensor | None = None,
            paged_kv_indices_buffer: Tensor | None = None, paged_kv_last_page_len_buffer: Tensor | None = None,
            backend: str = "auto", jit_args: None = None,
        ) -> None:  # fmt: skip
            check(float_workspace_buffer.data_ptr() % 16 == 0, "float_workspace_buffer must be 16-byte aligned")
            if kv_layout not in ("NHD", "HND"):
                raise KeyError(f"Invalid kv_layout {kv_layout}")
            self.layout, self.use_tensor_cores = kv_layout, use_tensor_cores
            self.device = float_workspace_buffer.device
            self.planned: dict[str, Any] = {}

        def plan(
            self, indptr: Tensor, indices: Tensor, last_page_len: Tensor, num_qo_heads: int, num_kv_heads: int,
            head_dim: int, page_size: int, *, pos_encoding_mode: str = "NONE", window_left: int = -1,
            logits_soft_cap: float | None = None, q_data_type: torch.dtype = torch.float16,
            kv_data_type: torch.dtype | None = None, o_data_type: torch.dtype | None = None,
            sm_scale: float | None = None, non_blocking: bool = True,
        ) -> None:  # fmt: skip
            # The plan is made on the host.
            starts, last = indptr.to("cpu"), last_page_len.to("cpu")
            indices = indices.to(self.device)
            check({indptr.dtype, indices.dtype, last_page_len.dtype} == {torch.int32}, "indptr must be int32")
            kept = (*HALF, torch.float8_e4m3fn)
            check(q_data_type in HALF and (kv_data_type or q_data_type) in kept, f"Unsupported dtype {q_data_type}")
            check(head_dim in (64, 128, 256), f"Unsupported head_dim: {head_dim}")
            check(num_qo_heads % num_kv_heads == 0, "num_qo_heads must be a multiple of num_kv_heads")
            group = num_qo_heads // num_kv_heads
            check(self.use_tensor_cores or group in (1, 2, 3, 4, 6, 8), f"Unsupported group_size: {group}")
            check(bool((last >= 1).all() and (last <= page_size).all()), "last_page_len must be from 1 to page_size")
            pages = (starts[1:] - starts[:-1]).tolist()
            check(len(indices) == int(starts[-1]), "indices must have indptr[-1] entries")
            lengths = [(count - 1) * page_size + int(end) for count, end in zip(pages, last)]
            self.planned = {
                "dtypes": (q_data_type, kv_data_type or q_data_type), "heads": (num_qo_heads, num_kv_heads, head_dim),
                "page_size": page_size, "scale": sm_scale, "table": table_of(starts, indices),
                "lengths": torch.tensor(lengths, dtype=torch.int32).to(self.device),
            }  # fmt: skip
            blocks = blocks_of(pages, page_size, num_kv_heads)
            module.plans.append(Plan(page_size, pages, blocks, self.use_tensor_cores))

        def run(
            self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], *, q_scale: float | None = None,
            k_scale: float | None = None, v_scale: float | None = None,
        ) -> Tensor:  # fmt: skip
            key, value = paged_kv_cache
            plan = self.planned
            if (q.dtype, key.dtype) != plan["dtypes"]:
                raise ValueError(f"The dtype of q {q.dtype} does not match the q_data_type specified in plan function.")
            check(key.stride() == value.stride(), "K/V strides differ")
            check(key.stride(-1) == q.stride(-1) == 1, "the last dimension must be contiguous")
            pools = (pool.transpose(1, 2) if self.layout == "HND" else pool for pool in paged_kv_cache)
            keys, values = pools
            check((q.shape[1], *keys.shape[2:]) == plan["heads"], "the heads are not those of the plan")
            check(keys.shape[1] == plan["page_size"], "the page size is not the plan's")
            on_one_device(q, key, value, plan["table"])
            module.runs += 1
            keys, values = (
                (as_bytes(pool)[plan["table"].long()].view(pool.dtype).flatten(1, 2).float() * (scale or 1.0)).to(
                    q.dtype
                )
                for pool, scale in ((keys, k_scale), (values, v_scale))
            )
            return attend(q[:, None], keys, values, plan["lengths"], plan["scale"])[:, 0]

    class BatchMLAPagedAttentionWrapper:
        def __init__(
            self, float_workspace_buffer: Tensor, use_cuda_graph: bool = False, qo_indptr: Tensor | None = None,
            kv_indptr: Tensor | None = None, kv_indices: Tensor | None = None, kv_len_arr: Tensor | None = None,
            backend: str = "auto",
        ) -> None:  # fmt: skip
            self.device, self.planned = float_workspace_buffer.device, dict[str, Any]()

        def plan(
            self, qo_indptr: Tensor, kv_indptr: Tensor, kv_indices: Tensor, kv_len_arr: Tensor, num_heads: int,
            head_dim_ckv: int, head_dim_kpe: int, page_size: int, causal: bool, sm_scale: float,
            q_data_type: torch.dtype, kv_data_type: torch.dtype, use_profiler: bool = False,
        ) -> None:  # fmt: skip
            kept = (*HALF, torch.float8_e4m3fn)
            check(q_data_type in HALF and kv_data_type in kept, f"MLA kv_data_type {kv_data_type} is not supported.")
            check(kv_data_type in HALF or q_data_type == torch.bfloat16, "FP8 kv_data_type for MLA needs bfloat16")
            check((head_dim_ckv, head_dim_kpe) == (512, 64), "the kernels are built for 512 + 64")
            queries, starts, lengths = qo_indptr.to("cpu"), kv_indptr.to("cpu"), kv_len_arr.to("cpu")
            indices = kv_indices.to(self.device)
            dtypes = {tensor.dtype for tensor in (qo_indptr, kv_indptr, indices, kv_len_arr)}
            check(dtypes == {torch.int32}, "kv_indices must be int32")
            pages = (starts[1:] - starts[:-1]).tolist()
            check(queries.tolist() == [*range(len(pages) + 1)], "one query for each sequence")
            check(pages == [-(-length // page_size) for length in lengths.tolist()], "kv_indptr is not kv_len_arr's")
            self.planned = {
                "dtypes": (q_data_type, q_data_type, kv_data_type, kv_data_type), "scale": sm_scale,
                "page_size": page_size, "table": table_of(starts, indices),
                "lengths": lengths.to(self.device), "heads": num_heads,
            }  # fmt: skip
            # It deals pieces of all sequences to all multiprocessors, whatever their pages are.
            module.plans.append(Plan(page_size, pages, SMS, True))

        def run(
            self, q_nope: Tensor, q_pe: Tensor, ckv_cache: Tensor, kpe_cache: Tensor, out: None = None,
            lse: None = None, return_lse: bool = False, profiler_buffer: None = None, kv_len: None = None,
            page_table: None = None, return_lse_base_on_e: bool = False, o_scale: None = None, *,
            ckv_scale: float | None = None, ckv_scale_arr: None = None, kpe_scale: float | None = None,
        ) -> Tensor:  # fmt: skip
            plan, tensors = self.planned, (q_nope, q_pe, ckv_cache, kpe_cache)
            if tuple(tensor.dtype for tensor in tensors) != plan["dtypes"]:
                raise ValueError(f"q_nope.dtype={q_nope.dtype} does not match the planned q_data_type")
            check(tuple(t.shape[-1] for t in tensors) == (512, 64, 512, 64), "the widths are not those of the plan")
            check(all(tensor.stride(-1) == 1 for tensor in tensors), "the last dimension must be contiguous")
            check(q_nope.shape[1] == plan["heads"], "the heads are not those of the plan")
            check(ckv_cache.dim() == 3 and ckv_cache.shape[1] == plan["page_size"], "the page size is not the plan's")
            on_one_device(*tensors, plan["table"])
            module.runs += 1
            is_fp8 = ckv_cache.dtype == torch.float8_e4m3fn
            check((ckv_scale is None) != is_fp8 != (kpe_scale is None), "FP8 needs ckv_scale and kpe_scale")
            content, rope = (
                (as_bytes(pool)[plan["table"].long()].view(pool.dtype).flatten(1, 2)[:, :, None].float() * (scale or 1))
                for pool, scale in ((ckv_cache, ckv_scale), (kpe_cache, kpe_scale))
            )
            query, key = torch.cat((q_nope, q_pe), dim=-1)[:, None], torch.cat((content, rope), dim=-1)
            return attend(query, key, content, plan["lengths"], plan["scale"])[:, 0]

    module: Any = ModuleType("flashinfer")
    module.plans, module.runs = [], 0
    module.BatchDecodeWithPagedKVCacheWrapper = BatchDecodeWithPagedKVCacheWrapper
    module.mla = ModuleType("flashinfer.mla")
    module.mla.BatchMLAPagedAttentionWrapper = BatchMLAPagedAttentionWrapper
    return module  # type: ignore[no-any-return]


@dataclass
class SchedulerMetadata:
    """FlashMLASchedMeta: empty at first, filled by the first call, and valid for its shapes and lengths alone."""

    made_for: tuple[Any, ...] = ()
    lengths: list[Tensor] = field(default_factory=list)


def flash_mla(capability: tuple[int, int] = (9, 0)) -> ModuleType:
    """FlashMLA on a device of `capability`. `module.made` has the `SchedulerMetadata`, `module.calls` K's shapes."""

    def get_mla_metadata(*args: object, **kwargs: object) -> tuple[SchedulerMetadata, None]:
        module.made.append(SchedulerMetadata())
        return module.made[-1], None

    def flash_mla_with_kvcache(
        q: Tensor, k_cache: Tensor, block_table: Tensor, cache_seqlens: Tensor, head_dim_v: int,
        tile_scheduler_metadata: SchedulerMetadata, num_splits: None = None, softmax_scale: float | None = None,
        causal: bool = False, is_fp8_kvcache: bool = False, indices: None = None,
    ) -> tuple[Tensor, None]:  # fmt: skip
        meta = tile_scheduler_metadata
        assert isinstance(meta, SchedulerMetadata), "tile_scheduler_metadata must be of type FlashMLASchedMeta"
        assert num_splits is None, "num_splits must be None"
        made_for = (q.shape, *k_cache.shape[1:3], causal, is_fp8_kvcache)
        if not meta.made_for:
            meta.made_for, meta.lengths = made_for, [cache_seqlens.clone()]
        assert meta.made_for == made_for, "Your input arguments are inconsistent with sched_meta."
        check(capability == (9, 0), "Dense decode MLA is only supported on SM90a architecture")
        check(q.dtype in HALF and not is_fp8_kvcache and indices is None, "query must be fp16 or bf16")
        check(k_cache.dtype == q.dtype, "query and key must have the same dtype")
        check(cache_seqlens.dtype == torch.int32, "seqlens_k must have dtype int32")
        check(block_table.dtype == torch.int32, "block_table must have dtype torch.int32")
        check(q.stride(-1) == k_cache.stride(-1) == block_table.stride(-1) == 1, "must have contiguous last dimension")
        check(q.shape[-1] in (576, 512), "Only head_size_k == 576 or 512 is supported")
        check(head_dim_v == 512, "Only head_size_v == 512 is supported")
        check(k_cache.shape[1] == 64, "Currently page_block_size must be 64")
        check(q.shape[2] % k_cache.shape[2] == 0, "Number of heads in key/value must divide number of heads in query")
        on_one_device(q, k_cache, block_table, cache_seqlens)
        module.calls.append((tuple(k_cache.shape), k_cache.data_ptr()))
        # The pieces of work are the metadata's, so lengths that grew since then are not read.
        key = k_cache[block_table.long()].flatten(1, 2)
        return attend(q, key, key[..., :head_dim_v], meta.lengths[0], softmax_scale), None

    module: Any = ModuleType("flash_mla")
    module.get_mla_metadata, module.flash_mla_with_kvcache = get_mla_metadata, flash_mla_with_kvcache
    module.made, module.calls = [], []
    return module  # type: ignore[no-any-return]


def flash_attn_3(capability: tuple[int, int] = (9, 0)) -> ModuleType:
    """FlashAttention-3 on a device of `capability`. `module.calls` has the shape and the strides of every call's K."""

    def flash_attn_with_kvcache(
        q: Tensor, k_cache: Tensor, v_cache: Tensor, k: None = None, v: None = None, qv: Tensor | None = None,
        rotary_cos: None = None, rotary_sin: None = None, cache_seqlens: int | Tensor | None = None,
        cache_batch_idx: None = None, cache_leftpad: None = None, page_table: Tensor | None = None,
        cu_seqlens_q: None = None, cu_seqlens_k_new: None = None, max_seqlen_q: int | None = None,
        rotary_seqlens: None = None, q_descale: Tensor | None = None, k_descale: Tensor | None = None,
        v_descale: Tensor | None = None, softmax_scale: float | None = None, causal: bool = False,
        window_size: tuple[int, int] = (-1, -1), attention_chunk: int = 0, softcap: float = 0.0,
        rotary_interleaved: bool = True, scheduler_metadata: None = None, num_splits: int = 0,
        pack_gqa: bool | None = None, sm_margin: int = 0, return_softmax_lse: bool = False,
    ) -> Tensor:  # fmt: skip
        assert k_cache.stride(-1) == 1, "k_cache must have contiguous last dimension"
        assert v_cache.stride(-1) == 1, "v_cache must have contiguous last dimension"
        width, v_width = q.shape[-1], v_cache.shape[-1]
        if softmax_scale is None:
            softmax_scale = (width + (qv.shape[-1] if qv is not None else 0)) ** (-0.5)
        assert isinstance(cache_seqlens, Tensor)
        check(capability[0] == 9, "only Hopper is simulated")
        is_fp8 = q.dtype == torch.float8_e4m3fn
        check(q.dtype in HALF or is_fp8, "FlashAttention only supports fp16, bf16, and fp8_e4m3 data type")
        check(k_cache.dtype == q.dtype, "query and key must have the same dtype")
        check(v_cache.dtype == q.dtype, "query and value must have the same dtype")
        check(q.stride(-1) == 1, "Input tensor must have contiguous last dimension")
        batch, queries, heads, _ = q.shape
        kv_heads, tensors = k_cache.shape[-2], [q, k_cache, v_cache, cache_seqlens]
        check(width <= 256, "FlashAttention forward only supports head dimension at most 256")
        check(heads % kv_heads == 0, "Number of heads in key/value must divide number of heads in query")
        if v_width != width:
            check(
                (128 < width <= 192 and 96 < v_width <= 128) or (width <= 64 and v_width <= 512),
                "If V headdim is different from Q/K dim, we only support Q/K headdim in (128, 192] and V headdim in "
                "(96, 128], or (Q/K <= 64 and V <= 512).",
            )
            check(v_width <= 256 or not is_fp8, "HeaddimV > 256 requires fp16 and bf16 data type")
        check((k_cache.shape[-1], queries) == (width, 1), "the shape of K is not that of q")
        check(k_cache.shape[:-1] == v_cache.shape[:-1], "the shape of V is not that of K")
        check(cache_seqlens.dtype == torch.int32, "seqused_k must have dtype int32")
        check(cache_seqlens.shape == (batch,) and cache_seqlens.is_contiguous(), "seqused_k must be (batch,)")
        alignment = 16 if is_fp8 else 8
        check(width % alignment == v_width % alignment == 0, f"head_size should be a multiple of {alignment}")
        if qv is not None:
            check(width <= 64, "q_v is only supported for head_size <= 64")
            check(v_width >= 256, "q_v is only supported for hdim_v >= 256.")
            check(qv.dtype in HALF and qv.dtype == q.dtype, "q_v must have the same dtype as query")
            check(qv.stride(-1) == 1, "q_v tensor must have contiguous last dimension")
            check(qv.shape == (batch, queries, heads, v_width), "q_v must be (batch, queries, heads, v_width)")
            tensors.append(qv)
        if page_table is not None:
            check(page_table.dtype == torch.int32, "page_table must have dtype torch.int32")
            check(page_table.stride(-1) == 1, "page_table must have contiguous last dimension")
            check(page_table.shape[0] == batch, "batch_size must be equal to batch_size_k")
            tensors.append(page_table)
        else:
            check(k_cache.shape[0] == batch, "batch_size must be equal to batch_size_k")
        scales = [scale for scale in (q_descale, k_descale, v_descale) if scale is not None]
        check(all(scale.shape == (batch, kv_heads) for scale in scales), "descale must be (batch, KV heads)")
        check(all(scale.dtype == torch.float32 for scale in scales), "descale must be float32")
        on_one_device(*tensors, *scales)
        module.calls.append((tuple(k_cache.shape), k_cache.stride()))
        key, value = k_cache, v_cache
        if page_table is not None:
            key, value = (as_bytes(t)[page_table.long()].view(t.dtype).flatten(1, 2) for t in (key, value))
        key, value, query = key.float(), value.float(), q.float()
        if is_fp8 and len(scales) == 3:
            query = (query.unflatten(2, (kv_heads, -1)) * scales[0][:, None, :, None, None]).flatten(2, 3)
            key, value = key * scales[1][:, None, :, None], value * scales[2][:, None, :, None]
        if qv is not None:
            query, key = torch.cat((query, qv.float()), dim=-1), torch.cat((key, value), dim=-1)
        out = attend(query, key, value, cache_seqlens, softmax_scale)
        return out.to(torch.bfloat16 if is_fp8 else q.dtype)

    module: Any = ModuleType("flash_attn_interface")
    module.flash_attn_with_kvcache, module.calls = flash_attn_with_kvcache, []
    return module  # type: ignore[no-any-return]


STUBS = {
    "flash_attn": flash_attn, "flashinfer": flashinfer, "flash_mla": flash_mla, "flash_attn_interface": flash_attn_3,
}  # fmt: skip


def install(monkeypatch: Any, *names: str) -> list[Any]:
    """Put stubs of the libraries `names` (all, if none is given) where `import` finds them. Returns the modules."""
    modules: list[Any] = [STUBS[name]() for name in names or STUBS]
    for module in modules:
        monkeypatch.setitem(sys.modules, module.__name__, module)
        if module.__name__ == "flashinfer":
            monkeypatch.setitem(sys.modules, "flashinfer.mla", module.mla)
    return modules
