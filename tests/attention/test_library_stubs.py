"""The stubs refuse what the libraries refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.attention import library_stubs


def test_flash_attn_refuses_fp32_and_small_pages() -> None:
    call = library_stubs.flash_attn().flash_attn_with_kvcache
    query, cache = torch.randn(1, 1, 8, 64), torch.randn(1, 256, 2, 64)
    with pytest.raises(RuntimeError, match="only support fp16 and bf16"):
        call(query, cache, cache)
    query, cache, table = query.half(), cache.half(), torch.zeros(1, 1, dtype=torch.int32)
    with pytest.raises(RuntimeError, match="divisible by 256"):
        call(query, cache[:, :64], cache[:, :64], block_table=table)
    assert call(query, cache, cache, block_table=table).shape == query.shape


def test_flashinfer_splits_at_pages() -> None:
    """One page is one piece per KV head, so most of the device is idle. With pages of 16, every block has work."""
    assert library_stubs.blocks_of([1], 8192, 8) == 8
    assert library_stubs.blocks_of([512], 16, 8) == 256
    assert library_stubs.blocks_of([8], 16, 8) == 8
    assert library_stubs.blocks_of([512] * 16, 16, 8) == 256


def test_flashinfer_has_kernels_for_some_groups_without_tensor_cores() -> None:
    wrapper = library_stubs.flashinfer().BatchDecodeWithPagedKVCacheWrapper(torch.zeros(64, dtype=torch.uint8))
    starts, pages, last = torch.tensor([0, 1]).int(), torch.tensor([0]).int(), torch.tensor([3]).int()
    wrapper.plan(starts, pages, last, 8, 2, 64, 16, q_data_type=torch.float16)
    with pytest.raises(RuntimeError, match="Unsupported group_size: 7"):
        wrapper.plan(starts, pages, last, 14, 2, 64, 16, q_data_type=torch.float16)
    with pytest.raises(RuntimeError, match="Unsupported dtype"):
        wrapper.plan(starts, pages, last, 8, 2, 64, 16, q_data_type=torch.float32)
    with pytest.raises(RuntimeError, match="last_page_len"):
        wrapper.plan(starts, pages, last * 0, 8, 2, 64, 16, q_data_type=torch.float16)


def test_flash_mla_only_runs_on_hopper_and_keeps_its_first_lengths() -> None:
    latent = torch.randn(2, 64, 1, 576).half()
    query, table = torch.randn(1, 1, 16, 576).half(), torch.tensor([[0, 1]]).int()
    module = library_stubs.flash_mla()
    meta, splits = module.get_mla_metadata()

    blackwell = library_stubs.flash_mla((10, 0))

    def call(library: Any, tokens: int) -> torch.Tensor:
        lengths = torch.tensor([tokens]).int()
        out: torch.Tensor = library.flash_mla_with_kvcache(query, latent, table, lengths, 512, meta, splits)[0]
        return out

    first = call(module, 70)
    assert torch.equal(call(module, 128), first)
    with pytest.raises(RuntimeError, match="SM90a"):
        call(blackwell, 70)
