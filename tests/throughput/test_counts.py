"""The bytes a step reads and the operations it computes, compared with independent arithmetic."""

from __future__ import annotations

import pytest

from kvcalc.memory.dtypes import parse_dtype
from kvcalc.memory.kv_cache import decode_read_bytes, on_device
from kvcalc.memory.weights import count_parameters
from kvcalc.model.resolve import load_model
from kvcalc.model.spec import has_cross_attention, weights_of
from kvcalc.server.weights import stored_weights
from kvcalc.throughput.counts import Experts, Matrices, bytes_of, count
from tests.rows import every_row
from tests.throughput.conftest import MakeCounts, formula_reads, stored

BF16 = parse_dtype("bf16", "--dtype")
MODELS = ("llama-3-8b", "llama-2-7b", "gemma-3-27b", "gpt-oss-120b", "deepseek-v3", "mixtral-8x7b", "llama-3.2-1b",
          "qwen3-235b-a22b", "qwen3-next-80b-a3b", "deepseek-v3.2", "llama-4-scout")  # fmt: skip


def test_one_token_touches_the_experts_it_is_sent_to_and_very_many_touch_all() -> None:
    experts = Experts(128, 8, (Matrices("bf16", 1, 1),))
    assert experts.touched(1) == pytest.approx(8)
    assert experts.touched(2) == pytest.approx(8 + 8 * (1 - 8 / 128))
    assert experts.touched(1e4) == pytest.approx(128)
    assert Experts(8, 8, ()).touched(3) == 8


def test_an_expert_moves_what_its_products_read_and_write(counts_of: MakeCounts) -> None:
    # Mixtral: 32 layers; gate and up read 4,096 and write 14,336 each, down the other way round.
    (one,), (two,) = counts_of("mixtral-8x7b").experts, counts_of("mixtral-8x7b", tensor_parallel_size=2).experts
    assert one.moved == 32 * 3 * (4096 + 14_336)
    assert two.moved == 32 * 3 * (4096 + 14_336 / 2)
    # Each device has the hidden states of all tokens, whole experts or not. DP ranks send a token only to its experts.
    (whole,) = counts_of("mixtral-8x7b", tensor_parallel_size=2, expert_parallel_size=2).experts
    assert whole.moved == two.moved
    (sent,) = counts_of("mixtral-8x7b", data_parallel_size=2, expert_parallel_size=2).experts
    assert sent.moved == one.moved / 2


def test_tensor_parallel_ranks_divide_what_attention_and_mlp_move_inside(counts_of: MakeCounts) -> None:
    # Llama 3 8B: 32 layers; queries, keys and values of 4,096 + 2 x 1,024, the output's input, and three of 14,336.
    one, two = counts_of("llama-3-8b"), counts_of("llama-3-8b", tensor_parallel_size=2)
    assert one.moved == 32 * (4096 + 2 * 1024 + 4096 + 3 * 14_336)
    assert two.moved == one.moved / 2


@pytest.mark.parametrize("name", MODELS)
def test_a_lone_token_reads_every_parameter_it_uses_and_the_embedding_only_where_it_is_the_head(
    counts_of: MakeCounts, name: str
) -> None:
    counts = counts_of(name)
    weights = stored(name).weights
    parameters = count_parameters(weights)
    read: float = bytes_of(counts.dense) + bytes_of(counts.head)
    read += sum(row.touched(1) * bytes_of(row.matrices) for row in counts.experts)
    assert read == pytest.approx(2 * parameters.active_per_token, rel=1e-9)
    if not counts.experts:
        apart = 0 if weights.tied else parameters.input_embedding
        lookups = parameters.total - parameters.active_per_token - apart
        assert read == 2 * (parameters.total - apart - lookups)


def test_a_dense_model_reads_all_but_its_input_embedding(counts_of: MakeCounts) -> None:
    counts = counts_of("llama-2-7b")
    # 6,738,415,616 parameters, of which 32,000 x 4,096 are the input embedding (the published checkpoint).
    assert bytes_of(counts.dense) + bytes_of(counts.head) == 2 * (6_738_415_616 - 32_000 * 4096)


@every_row("name", MODELS)
@every_row("tokens", [1, 500, 9000])
@every_row("size", [1, 4])
def test_the_cache_is_read_as_the_memory_model_says(counts_of: MakeCounts, name: str, tokens: int, size: int) -> None:
    spec = on_device(load_model(name), size)
    counts = counts_of(name, tensor_parallel_size=size)
    assert counts.kv_read_bytes(tokens) == decode_read_bytes(spec, BF16, tokens)


def test_a_causal_prompt_attends_to_half_its_square_and_a_window_bounds_it(counts_of: MakeCounts) -> None:
    llama = counts_of("llama-3-8b")
    # 2 operations for each of 32 heads x (128 + 128) elements and each pair of tokens, in 32 layers.
    pair = 2 * 32 * 256 * 32
    assert llama.prefill_attention_flops(1000) == pair * 1000 * 1001 / 2
    mistral = counts_of("mistral-7b-v0.1")
    window = 4096
    assert mistral.prefill_attention_flops(window) == pair * window * (window + 1) / 2
    more = mistral.prefill_attention_flops(3 * window) - mistral.prefill_attention_flops(2 * window)
    assert more == pytest.approx(pair * window * window)


def test_latent_attention_multiplies_by_the_latent_in_decode_and_by_the_heads_in_prefill(
    counts_of: MakeCounts,
) -> None:
    counts = counts_of("deepseek-v3")
    assert counts.attention_flops(1) == 61 * 2 * 128 * (512 + 64 + 512)
    assert counts.prefill_attention_flops(1) == 61 * 2 * 128 * (192 + 128)


def test_down_projections_of_a_latent_are_whole_on_every_rank(counts_of: MakeCounts) -> None:
    one, eight = (bytes_of(counts_of("deepseek-v3", tensor_parallel_size=size).dense) for size in (1, 8))
    latent = 61 * 7168 * (1536 + 576)
    norms = 61 * (2 * 7168 + 1536 + 512) + 7168
    routers = 58 * 7168 * 256
    whole = 2 * (latent + norms + routers)
    assert eight == whole + (one - whole) // 8


def test_k_and_v_are_split_no_finer_than_by_heads(counts_of: MakeCounts) -> None:
    # Llama-3-8B has 8 KV heads. With 16 ranks, each head is on two ranks.
    one, sixteen = (bytes_of(counts_of("llama-3-8b", tensor_parallel_size=size).dense) for size in (1, 16))
    norms, keys_and_values = 2 * (64 * 4096 + 4096), 2 * 32 * 2 * 1024 * 4096
    assert sixteen == norms + keys_and_values // 8 + (one - norms - keys_and_values) // 16


def test_quantised_weights_are_fewer_bytes_and_as_many_operations(counts_of: MakeCounts) -> None:
    plain, quantised = counts_of("llama-3-8b"), counts_of("llama-3-8b", dtype="fp8")
    norms = 2 * (64 * 4096 + 4096)
    [whole] = plain.dense
    eight = next(row for row in quantised.dense if row.kind == "fp8")
    assert (bytes_of(quantised.dense) - norms) * 2 == whole.bytes - norms
    assert quantised.head == plain.head
    assert eight.elements == whole.elements == 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)


def test_matrices_are_summed_by_the_type_whose_kernels_read_them(counts_of: MakeCounts) -> None:
    # gpt-oss keeps attention in 16 bits and experts in mxfp4.
    spec = load_model("gpt-oss-20b")
    held = stored_weights(spec, spec, None, BF16)
    assert not isinstance(held, str)
    counts = count(spec, held.weights, held.base, formula_reads(spec, BF16), linear=held.linear, scheme=held.scheme)
    assert {row.kind for row in counts.dense} == {"bf16"}
    [experts] = counts.experts
    assert {row.kind: row.bytes > 0 for row in experts.matrices} == {"mxfp4": True}


def test_every_preset_whose_weights_are_counted_has_counts(counts_of: MakeCounts) -> None:
    from tests.conftest import preset_names

    counted = 0
    for name in preset_names():
        spec = load_model(name)
        if weights_of(spec) is None or has_cross_attention(spec):
            continue
        counts = counts_of(name)
        assert sum(row.elements for row in counts.dense) > 0, name
        assert counts.launches >= 3 * counts.num_layers, name
        counted += 1
    assert counted > 100
