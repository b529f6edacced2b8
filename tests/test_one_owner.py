"""Each figure is computed in one place: memory, speed and what-ifs use the same description of a layer."""

from __future__ import annotations

import pytest
import torch

import kvcalc
from kvcalc.errors import UsageError
from kvcalc.measure.layers.build import build_layer
from kvcalc.memory.dtypes import DTYPES
from kvcalc.memory.sharding import shard
from kvcalc.memory.weights import embedding_bytes, matrices, plain_bytes
from kvcalc.memory.workload import bind_workload, check_tensor_parallel, resolve_workload
from kvcalc.model.layout import Layout
from kvcalc.model.spec import weights_of
from kvcalc.model.tensors import LOOKUP
from kvcalc.model.variants import layer_parameters
from kvcalc.throughput.counts import bytes_of, count
from tests.conftest import loaded, preset_names
from tests.documents import estimate
from tests.rows import every_row
from tests.throughput.conftest import formula_reads

BF16 = DTYPES["bf16"]
RANKS = (1, 2, 8, 16)

LLAMA = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 128,
}  # fmt: skip


def read(model_type: str, **config: object) -> kvcalc.ModelSpec:
    return kvcalc.read_config({"model_type": model_type, **LLAMA, **config}, "test", "test")


@every_row("name", preset_names())
def test_what_a_step_reads_is_what_a_rank_holds(name: str) -> None:
    """If all experts are used, a step reads the whole shard of a rank, except lookup tables and unread weights."""
    model = loaded(name)
    weights = weights_of(model)
    if weights is None:
        pytest.skip(f"not counted: {model.weights_reason}")
    spec = bind_workload(model, resolve_workload(model, encoder_tokens=None))
    for ranks in RANKS:
        try:
            check_tensor_parallel(model, ranks)
        except UsageError:
            continue
        held = shard(weights, Layout(ranks))
        apart = sum(
            layers * weight.copies * size
            for weight, layers, size, _ in matrices(held, BF16)
            if weight.role == LOOKUP or not weight.read
        )
        apart += 0 if weights.tied else embedding_bytes(held, BF16)
        counts = count(spec, weights, BF16, formula_reads(spec, BF16, ranks), Layout(ranks))
        experts = sum(row.experts * bytes_of(row.matrices) for row in counts.experts)
        assert bytes_of(counts.dense) + bytes_of(counts.head) + experts + apart == plain_bytes(held, BF16)[0], ranks


@every_row("name", preset_names())
def test_the_ranks_hold_the_whole_model_and_what_they_share(name: str) -> None:
    weights = weights_of(loaded(name))
    if weights is None:
        pytest.skip("not counted")
    whole = plain_bytes(weights, BF16)[0]
    for ranks in (2, 8):
        assert ranks * plain_bytes(shard(weights, Layout(ranks)), BF16)[0] >= whole
        for block in weights.blocks:
            for weight in block.weights:
                part = weight.on_rank(ranks)
                assert weight.rows <= ranks * part.rows, weight.name
                assert part.rows < weight.rows or weight.split == "whole" or 1 in (weight.rows, weight.kv_heads)


@every_row("name", preset_names())
def test_attention_parameters_are_those_of_the_layers_weights(name: str) -> None:
    spec = loaded(name)
    stated = layer_parameters(spec)
    if stated is None:
        return
    for group in spec.layers:
        for mixer in group.layer.attention:
            if mixer.keeps:
                alone = mixer._replace(indexer=None)
                assert sum(weight.rows * weight.columns for weight in alone.weights if weight.columns > 1) == stated


@every_row("name", preset_names())
def test_measures_modules_have_the_parameters_of_the_layers(name: str) -> None:
    spec = loaded(name)
    mixers = {mixer.shape: mixer for group in spec.layers for mixer in group.layer.attention if mixer.keeps}
    for shape, mixer in mixers.items():
        # If V is K before its norm (Gemma 4), the module still computes a V, and the cache holds both.
        if shape.hidden_size is not None and mixer.names.has_value:
            built = build_layer(shape, None, torch.bfloat16, torch.device("meta"))
            assert sum(p.numel() for p in built.parameters() if p.dim() == 2) == mixer.parameters, shape


def own_row(name: str) -> int:
    rows = estimate(loaded(name))["variants"]
    (found,) = (row["attention_parameters_per_layer"] for row in rows if row["own"])
    return int(found)


def test_the_gate_of_the_output_is_part_of_attention() -> None:
    # Queries and their gate 2 x 24 x 256, keys and values 2 x 4 x 256, output 24 x 256, each times 5,120.
    assert own_row("qwen3.5-27b") == 5120 * 256 * (2 * 24 + 2 * 4 + 24) == 104_857_600
    for name in ("qwen3-next-80b-a3b", "qwen3.5-35b-a3b", "qwen3.5-122b-a10b", "qwen3.5-397b-a17b", "qwen3.6-27b"):
        assert loaded(name).attention.output_gate


def test_a_default_of_the_query_s_rank_is_one_for_attention_and_for_the_weights() -> None:
    mla = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
           "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2}  # fmt: skip
    spec = read("deepseek_v3", **mla)
    assert spec.attention.q_lora_rank == 1536
    rows = {weight.name: weight.rows for weight in spec.layers[0].layer.weights}
    assert rows["self_attn.q_a_proj"] == 1536
    assert read("deepseek_v3", **mla, q_lora_rank=None).attention.q_lora_rank == 0


def test_phi_has_biases_whatever_counts_them() -> None:
    shape = read("phi").attention
    assert (shape.qkv_bias, shape.output_bias) == (True, True)
    assert {weight.bias for weight in read("phi").layers[0].layer.mixers[0].weights} == {64, 32}


def test_a_layer_says_itself_how_many_query_heads_it_has() -> None:
    kinds = ["full_attention", "sliding_attention"]
    spec = read("step3p5", layer_types=kinds, sliding_window=8, num_sliding_attention_heads=8, num_key_value_heads=2,
                head_dim=16)  # fmt: skip
    assert [group.layer.attention[0].shape.num_heads for group in spec.layers] == [4, 8]
    # As MHA, every query head has its own K and V, even in the layers that have more heads.
    changed = estimate(spec, context_tokens=8)["variants"][0]
    assert changed["total_bytes"] == 8 * 2 * 2 * 16 * (4 + 8)
