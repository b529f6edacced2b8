"""vLLM started without flags: the states that prefix caching keeps, and decode context parallelism."""

from __future__ import annotations

import re
from typing import Any

import pytest

import kvcalc
from kvcalc.engines import load_engine
from kvcalc.engines.vllm.engine import Vllm
from kvcalc.engines.vllm.states import States, _chunk
from kvcalc.errors import KvcalcError, ModelError
from kvcalc.memory.dtypes import DTYPES
from tests.documents import estimate, texts
from tests.engines.models import ask, plain

GIB = 1 << 30


def start(model: str, tokens: int, release: str = "", gpu: str | None = None, **asked: Any) -> dict[str, Any]:
    """The `engine` part of an estimate."""
    options = {name.replace("_", "-"): text for name, text in asked.pop("settings", {}).items()}
    devices = None if gpu is None else kvcalc.find_devices(gpu)
    found = estimate(
        kvcalc.load_model(model), engine=f"vllm{release}", context_tokens=tokens, dtype="bf16", devices=devices,
        engine_settings=options, **asked,
    )  # fmt: skip
    engine = found["engine"]
    assert sum(line["bytes"] for line in engine["request_lines"]) == engine["request_bytes"]
    return dict(engine)


# Block size, blocks, tokens and concurrency in 40 GiB for 32,768 tokens on an H100: vLLM 0.33.0's own planner with the
# defaults of its API server (prefix caching, FlashInfer's prefill for gated delta nets).
PLANNED = [
    ("nemotron-3-nano-30b-a3b", 1, "bf16", 2096, 3_335, 3_902_902, 119.1071),
    ("nemotron-3-nano-30b-a3b", 8, "fp8", 1056, 26_479, 19_719_633, 601.7955),
    ("nemotron-3-super-120b-a12b", 1, "bf16", 4160, 1_260, 1_795_116, 54.7826),
    ("nemotron-3-super-120b-a12b", 8, "fp8", 2080, 10_082, 10_656_999, 325.2258),
    ("qwen3.6-27b", 1, "bf16", 832, 787, 526_294, 16.0612),
    ("qwen3.6-27b", 1, "fp8", 1600, 819, 894_566, 27.3),
    ("qwen3.6-27b", 8, "bf16", 448, 5_851, 2_309_946, 70.494),
    ("qwen3.6-35b-a3b", 1, "fp8", 2112, 1_985, 2_601_779, 79.4),
    ("qwen3-next-80b-a3b", 1, "bf16", 576, 3_034, 1_506_335, 45.9697),
    ("qwen3-next-80b-a3b", 8, "fp8", 320, 21_845, 6_391_222, 195.0446),
]


@pytest.mark.parametrize(("model", "tp", "dtype", "block", "blocks", "tokens", "concurrency"), PLANNED)
def test_a_start_without_flags(
    model: str, tp: int, dtype: str, block: int, blocks: int, tokens: int, concurrency: float
) -> None:
    found = start(model, 32_768, tensor_parallel_size=tp, kv_dtype=dtype, kv_memory_bytes=40 * GIB)
    assert (found["block_size"], found["num_gpu_blocks"], found["kv_cache_tokens"]) == (block, blocks, tokens)
    assert round(found["max_concurrency"], 4) == concurrency
    assert (found["enable_prefix_caching"], found["mamba_cache_mode"]) == (True, "align")


def test_a_device_decides_the_prefill_of_delta_nets() -> None:
    for gpu, prefill, block in (("h100x2", "flashinfer", 832), ("b200", "flashinfer", 832), ("a100x2", "triton", 784)):
        found = start("qwen3.6-27b", 32_768, gpu=gpu, tensor_parallel_size=1)
        assert (found["gdn_prefill_backend"], found["block_size"]) == (prefill, block), gpu
    asked = start("qwen3.6-27b", 32_768, settings={"gdn_prefill_backend": "triton"})
    assert asked["block_size"] == 784
    # Other models have no such kernel.
    assert start("nemotron-3-nano-30b-a3b", 8192, gpu="h100")["gdn_prefill_backend"] is None
    assert start("llama-3-8b", 8192, gpu="h100")["gdn_prefill_backend"] is None


@pytest.mark.parametrize(
    ("model", "release", "states"),
    [
        # 2 for prefixes, and one more that is written in the middle of a prefill: Mamba-2 since 0.32, Qwen since 0.33.
        ("nemotron-3-nano-30b-a3b", "", States("align", 3)), ("qwen3.6-27b", "", States("align", 3, 64)),
        ("nemotron-3-nano-30b-a3b", "@0.32", States("align", 3)), ("qwen3.6-27b", "@0.32", States("align", 2)),
        ("jamba-v0.1", "", States("align", 2)), ("qwen3.6-27b", "@0.28", States("align", 2)),
        # Prefix caching of hybrids was off by default before 0.28.
        ("qwen3.6-27b", "@0.27", States("none", 1)), ("mamba-2.8b", "", States("none", 1)),
    ],
)  # fmt: skip
def test_the_states_of_a_release(model: str, release: str, states: States) -> None:
    check_states(model, release, {}, states)


@pytest.mark.parametrize(
    ("model", "release", "states"),
    [
        # Mamba kept a state for every block before 0.28.
        ("nemotron-3-nano-30b-a3b", "@0.27", States("all", 0, 128)), ("jamba-v0.1", "@0.26", States("all", 0, 2048)),
        ("qwen3.6-27b", "@0.26", States("align", 2)), ("qwen3.6-27b", "@0.25", States("align", 2)),
    ],
)  # fmt: skip
def test_the_states_of_a_release_with_prefix_caching(model: str, release: str, states: States) -> None:
    check_states(model, release, {"enable-prefix-caching": ""}, states)


def check_states(model: str, release: str, asked: dict[str, str], states: States) -> None:
    """The states of a request, and two more with two draft tokens."""
    for drafted in (0, 2):
        drafts = {"num-speculative-tokens": str(drafted)} if drafted else {}
        engine = load_engine(f"vllm{release}", kvcalc.load_model(model), {**asked, **drafts})
        assert isinstance(engine, Vllm)
        assert engine.states == states._replace(kept=states.kept + drafted)


def test_drafts_kept_the_newest_states_in_0_20_and_0_21() -> None:
    for release, expected in (("0.19", "all"), ("0.20", "align"), ("0.21", "align"), ("0.22", "all")):
        asked = {"enable-prefix-caching": "", "num-speculative-tokens": "2"}
        engine = load_engine(f"vllm@{release}", kvcalc.load_model("jamba-v0.1"), asked)
        assert isinstance(engine, Vllm)
        assert engine.states.mode == expected, release


def test_a_state_for_every_block_needs_attention() -> None:
    asked = {"enable-prefix-caching": ""}
    with pytest.raises(KvcalcError, match="without attention"):
        load_engine("vllm@0.27", kvcalc.load_model("mamba-2.8b"), asked)
    newer = load_engine("vllm@0.28", kvcalc.load_model("mamba-2.8b"), asked)
    assert isinstance(newer, Vllm)
    assert newer.states == States("align", 2)


def test_before_0_28_mamba_keeps_a_state_for_every_block() -> None:
    # A state of Jamba: 8,192 x 3 inputs and 8,192 x 16 elements of 16 bits, 311,296 bytes. A token of attention takes
    # 4,096 bytes, so 76 tokens are as large as a state, and blocks are multiples of 2,048 tokens. 4 of 32 layers have
    # attention, so there are 7 groups of states.
    asked = {"enable_prefix_caching": True}
    found = start("jamba-v0.1", 4096, "@0.27", settings=asked)
    assert (found["mamba_cache_mode"], found["block_size"]) == ("all", 2048)
    assert found["request_bytes"] == (2 + 7 * 2) * found["bytes_per_block"]
    longer = start("jamba-v0.1", 8192, "@0.27", settings=asked)
    assert longer["request_bytes"] == 2 * found["request_bytes"]
    # 0.28 keeps two states, in blocks of 80 tokens.
    newer = start("jamba-v0.1", 4096, "@0.28")
    assert (newer["mamba_cache_mode"], newer["block_size"]) == ("align", 80)
    assert newer["request_bytes"] == (-(-4096 // 80) + 7 * 2) * newer["bytes_per_block"]


def test_the_default_is_named_with_the_flag_that_turns_it_off() -> None:
    found = estimate(kvcalc.load_model("jamba-v0.1"), context_tokens=4096, dtype="bf16", engine="vllm")
    assert any("--no-enable-prefix-caching" in text for text in texts(found))
    off = estimate(
        kvcalc.load_model("jamba-v0.1"), context_tokens=4096, dtype="bf16", engine="vllm",
        engine_settings={"no-enable-prefix-caching": True},
    )  # fmt: skip
    assert not any("prefix" in text for text in texts(off))
    # 28 Mamba layers in groups of 4, like attention's group: seven groups, with one more block each.
    more = found["engine"]["request_bytes"] - off["engine"]["request_bytes"]
    assert more == 7 * found["engine"]["bytes_per_block"]
    # No states, no remark; and models that keep nothing but states cache no prefixes.
    assert not any("prefix" in text for text in texts(estimate(kvcalc.load_model("llama-3-8b"), engine="vllm")))
    # Neither do encoder-decoders (vllm/config/scheduler.py).
    for model, caches in (("mamba-2.8b", False), ("whisper-large-v3", False), ("llama-3-8b", True)):
        assert estimate(kvcalc.load_model(model), engine="vllm")["engine"]["enable_prefix_caching"] is caches
    with pytest.raises(KvcalcError, match="contradict"):
        start("jamba-v0.1", 4096, settings={"no_enable_prefix_caching": "", "enable_prefix_caching": ""})


def test_ranks_that_divide_the_tokens() -> None:
    # vLLM 0.33.0's planner: DeepSeek-V3 on tp 8, dcp 8, 40 GiB, 32,768 tokens: 38,199 blocks, 4,889,472 tokens.
    asked: dict[str, Any] = {"tensor_parallel_size": 8, "kv_dtype": "bf16", "kv_memory_bytes": 40 * GIB}
    ranks = {"decode_context_parallel_size": "8"}
    found = start("deepseek-v3", 32_768, settings=ranks, **asked)
    assert (found["block_size"], found["num_gpu_blocks"], found["kv_cache_tokens"]) == (16, 38_199, 4_889_472)
    assert round(found["max_concurrency"], 4) == 149.2148
    # One token more begins a block on every rank. Before 0.21 the printed tokens were blocks x 16 x 8 too.
    assert start("deepseek-v3", 32_769, settings=ranks, **asked)["request_bytes"] == 257 * found["bytes_per_block"]
    assert start("deepseek-v3", 32_768, "@0.18", settings=ranks, **asked)["kv_cache_tokens"] == 4_889_472


def test_the_cache_of_a_replica_is_the_same_however_its_tokens_are_divided() -> None:
    def cache(**settings: str) -> dict[str, Any]:
        options = {name.replace("_", "-"): text for name, text in settings.items()}
        model = kvcalc.load_model("deepseek-v3")
        found = estimate(
            model, engine="vllm", context_tokens=32_768, tensor_parallel_size=8, engine_settings=options
        )  # fmt: skip
        return dict(found["kv_cache"])

    plain_cache, divided = cache(), cache(decode_context_parallel_size="4")
    assert divided["total_bytes"] == plain_cache["total_bytes"]
    assert divided["bytes_per_token"] == plain_cache["bytes_per_token"]
    assert 4 * divided["bytes_per_device"] == plain_cache["bytes_per_device"]


@pytest.mark.parametrize(
    ("config", "tp", "ranks", "words"),
    [
        (plain(4, 32, 8, 128), 8, 2, "8 KV heads on --tp 8 allow 1"),
        (plain(4, 32, 8, 128), 16, 3, "does not divide --tp 16"),
        (plain(4, 24, 2, 128), 24, 8, "does not divide the 12 query heads"),
        (plain(4, 32, 2, 128, model_type="mistral", sliding_window=512), 8, 2, "sliding windows"),
    ],
)
def test_numbers_of_ranks_that_vllm_refuses(config: dict[str, object], tp: int, ranks: int, words: str) -> None:
    settings = {"decode-context-parallel-size": str(ranks)}
    with pytest.raises(KvcalcError, match=words):
        ask(config, "vllm", 4096, tensor_parallel_size=tp, settings=settings)


def test_ranks_read_their_share_of_the_tokens() -> None:
    def step(ranks: int) -> dict[str, Any]:
        found = estimate(
            kvcalc.load_model("deepseek-v3"), engine="vllm", context_tokens=131_072, batch_size=4,
            devices=kvcalc.find_devices("h200x8"), engine_settings={"decode-context-parallel-size": str(ranks)},
        )  # fmt: skip
        assert ("decode context parallelism" in " ".join(texts(found))) is (ranks > 1)
        return dict(found["throughput"]["parts"])

    alone, divided = step(1), step(8)
    assert divided["kv_seconds"] < alone["kv_seconds"] / 4
    assert divided["weights_seconds"] == alone["weights_seconds"]
    assert divided["communication_seconds"] > alone["communication_seconds"]


@pytest.mark.parametrize(
    ("model_type", "key", "default"), [("falcon_h1", "mamba_chunk_size", 256), ("mamba2", "chunk_size", 256)]
)
def test_the_chunk_that_a_config_states(model_type: str, key: str, default: int) -> None:
    """Source: get_mamba_chunk_size, vllm/config/model.py of 0.26.0."""
    own: dict[str, object] = {"num_hidden_layers": 2, "hidden_size": 32, "state_size": 8, "num_heads": 4}
    own["head_dim"] = 16
    if model_type == "falcon_h1":
        own = {**plain(), "mamba_d_ssm": 24, "mamba_n_heads": 4, "mamba_d_head": 6, "mamba_d_state": 8}
    for stated in (None, 512):
        chunk = {} if stated is None else {key: stated}
        spec = kvcalc.read_config({**own, **chunk, "model_type": model_type}, "test", "test")
        assert _chunk(spec, {"linear"}) == (stated or default)


def test_ling_3_keeps_its_states_in_32_bits_whatever_is_asked_for() -> None:
    """BailingMoeV3's linear attention, vLLM 0.33.0: --mamba-ssm-cache-dtype is not read.

    A block of latents, of 576 elements in 16 bits, is as large as a state: 32 heads of 128 x 128, and three columns of
    the three convolutions. 1,884.4 tokens, in whole kernel blocks of 64.
    """
    state = 32 * 128 * 128 * 4 + 3 * (3 * 32 * 128) * 2
    asked: list[dict[str, Any]] = [{}, {"mamba-ssm-cache-dtype": "bfloat16"}, {"mamba-ssm-cache-dtype": "float32"}]
    answers = [estimate("ling-3.0-flash", engine="vllm", engine_settings=settings) for settings in asked]
    assert {answer["engine"]["block_size"] for answer in answers} == {-(-state // (576 * 2) // 64) * 64} == {1920}
    assert len({answer["kv_cache"]["total_bytes"] for answer in answers}) == 1


@pytest.mark.parametrize(
    ("release", "model", "asked", "bits"),
    [
        ("0.29", "kimi-linear-48b", "bfloat16", 32), ("0.29", "kimi-linear-48b", "float16", 32),
        ("0.33", "kimi-linear-48b", "float32", 32), ("0.29", "kimi-k3", "bfloat16", 32),
        ("0.30", "kimi-k3", "bfloat16", 16), ("0.33", "kimi-k3", "bfloat16", 16),
    ],
)  # fmt: skip
def test_which_kimis_read_the_type_of_their_states(release: str, model: str, asked: str, bits: int) -> None:
    """get_state_dtype of KimiGatedDeltaNetAttention and KimiK3DeltaAttention, vLLM 0.26.0 to 0.33.0.

    A block of latents, of 576 elements in 16 bits, is as large as a state: heads of 128 x 128, and three columns of the
    three convolutions; in whole kernel blocks of 128.
    """
    heads = 96 if model == "kimi-k3" else 32
    state = heads * 128 * 128 * bits // 8 + 3 * (3 * heads * 128) * 2
    found = estimate(model, engine=f"vllm@{release}", engine_settings={"mamba-ssm-cache-dtype": asked})
    assert found["engine"]["block_size"] == -(-state // (576 * 2) // 128) * 128


def test_a_page_that_is_too_small_for_kimi_linears_states() -> None:
    """Its class counts a block with the type that is asked for, and its layers keep fp32: MambaSpec.page_size_bytes.

    Source: get_mamba_state_dtype_from_config of models/kimi_k3/nvidia/model.py, vLLM 0.30.0 to 0.33.0.
    """
    asked = {"mamba-ssm-cache-dtype": "bfloat16"}
    with pytest.raises(KvcalcError, match=r"does not start.*float32"):
        estimate("kimi-linear-48b", engine="vllm", engine_settings=asked)
    large = {"block-size": "2048"}
    held = [estimate("kimi-linear-48b", engine="vllm", engine_settings={**large, **own}) for own in ({}, asked)]
    assert held[0]["kv_cache"]["total_bytes"] == held[1]["kv_cache"]["total_bytes"]
    assert held[1]["engine"]["block_size"] == 2048


@pytest.mark.parametrize(("tp", "blocks"), [(1, 2818), (2, 5637), (8, 22550)])
def test_minicpm3_keeps_k_and_v_of_every_head(tp: int, blocks: int) -> None:
    """minicpm3.py of vLLM 0.33.0: 40 heads of 96, with V padded, which ranks divide.

    vLLM's planner gives 2,818 blocks of 15,237,120 bytes on one rank.
    """
    asked = estimate(
        "minicpm3-4b", engine="vllm", context_tokens=8192, tensor_parallel_size=tp, kv_memory_bytes=40 << 30
    )
    assert asked["engine"]["num_gpu_blocks"] == blocks == (40 << 30) * tp // (62 * 2 * 40 * 96 * 2 * 16)
    assert asked["kv_cache"]["bytes_per_token"] == 15_237_120 // 16


def test_minimax_m1_scales_its_residuals_which_keeps_nothing() -> None:
    """minimax_text_01.py of vLLM 0.22.1, with the keys of MiniMax-M1's published config.

    A state has 64 heads of 128 x 128 in 16 bits, 2 MiB, as much as 512 tokens of K and V, which makes the block. The
    70 layers with states are seven groups of ten, beside the ten with attention: 16 + 7 blocks for 8,192 tokens.
    """
    config = plain(
        80, 64, 8, 128, model_type="minimax_m1", attn_type_list=([0] * 7 + [1]) * 10,
        layernorm_linear_attention_alpha=3.5565588200778455, layernorm_linear_attention_beta=1.0,
        layernorm_full_attention_alpha=3.5565588200778455, layernorm_full_attention_beta=1.0,
    )  # fmt: skip
    found = ask(config, "vllm@0.22.1", 8192)
    assert found["engine"]["block_size"] == 64 * 128 * 128 * 2 // (2 * 8 * 128 * 2) == 512
    assert found["kv_cache"]["total_bytes"] == (8192 // 512 + 7) * 10 * 2**21 == 482_344_960


QWEN4: dict[str, object] = {
    **plain(48, 16, 2, 256, model_type="qwen4_exp_text"), "hidden_size": 2048, "linear_num_key_heads": 16,
    "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4, "indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 128,
    "indexer_budget": 2048, "indexer_compress_ratio": 4, "ple_layer_ids": [2], "hc_count": 4,
    "ple_conv_kernel_size": 4, "ngram_size": 3, "mamba_ssm_dtype": "float32", "mtp_num_hidden_layers": 1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [11, 11, 10]},
}  # fmt: skip


@pytest.mark.parametrize(
    ("tokens", "tp", "settings", "block", "block_bytes", "blocks"),
    [
        # 12 layers of K and V of 1,024 elements, and a key of 128 for 4 tokens, in 16 bits: 12 x 1,088 x (2,048 + 64).
        # 8 blocks of tokens, 4 groups of states (36 delta nets by 12, and the n-grams) with 3 each, and a ring.
        (8192, 1, {}, 1088, 27_574_272, 8 + 4 * 3 + 1),
        # A delta net's state is half as large, the inputs of the n-grams are whole. 3 more states for drafts, and one
        # more layer with attention.
        (131_072, 2, {"num-speculative-tokens": "3"}, 1088, 13 * 1088 * (1024 + 64), 121 + 4 * 6 + 1),
    ],
)
def test_qwen4_exp(tokens: int, tp: int, settings: dict[str, str], block: int, block_bytes: int, blocks: int) -> None:
    """vLLM 0.33.0's own planner (get_kv_cache_groups with the layout BLNHC) for the specs of models/qwen4_exp.

    A delta net keeps 32 x 128 x 128 elements in 32 bits and 3 x 8,192 in 16: 2,146,304 bytes, as much as 1,048 tokens
    of K and V of 2 heads, in whole pieces of 64 tokens: 1,088.
    """
    found = ask(QWEN4, "vllm", tokens, settings=settings, tensor_parallel_size=tp)["engine"]
    assert (found["block_size"], found["bytes_per_block"]) == (block, block_bytes)
    assert found["request_bytes"] == blocks * block_bytes


def test_the_inputs_of_the_n_grams_are_whole_on_every_rank() -> None:
    """Qwen4ExpPLELayer: 27 inputs of 4 x 2,048 elements in 16 bits, and one more for every drafted token.

    On 8 ranks they are larger than a rank's part of the other states, and a token has K and V of one head.
    """
    for drafted, block in ((0, 448), (5, 512)):
        settings = {"num-speculative-tokens": str(drafted)} if drafted else {}
        found = ask({**QWEN4, "ngram_size": 9}, "vllm", 8192, settings=settings, tensor_parallel_size=8)
        assert found["engine"]["block_size"] == -(-(27 + drafted) * 4 * 2048 * 2 // (64 * 1024)) * 64 == block


@pytest.mark.parametrize(("mode", "kept"), [("align", "2 states per request"), ("all", "a state for every block")])
def test_a_note_says_what_prefix_caching_keeps(mode: str, kept: str) -> None:
    found: Any = kvcalc.estimate("jamba-v0.1", engine="vllm@0.31", engine_settings={"mamba-cache-mode": mode})
    (text,) = [note["text"] for note in found["warnings"] if note["code"] == "prefix-caching"]
    assert f"with {kept};" in text


@pytest.mark.parametrize("drafted", ["0", "3"])
def test_a_step_reads_one_state_and_each_row_once(drafted: str) -> None:
    """Qwen4-Exp: 36 delta nets, and 12 layers with K and V of 2 heads of 256 and an index key of 128 for 4 tokens.

    A step reads no ring, whose keys the index keys are made of, and of a state no columns for drafted tokens.
    """
    spec = kvcalc.read_config(QWEN4, "qwen4", "test")
    engine = load_engine("vllm", spec, {"num-speculative-tokens": drafted} if drafted != "0" else {})
    read = {
        (type(one.cache).__name__, one.sizes): one.num_layers for one in engine.entries(engine.spec, DTYPES["bf16"])
    }
    state = 32 * 128 * 128 * 4 + 3 * 8192 * 2
    assert read[("RecurrentState", (state,))] == 36
    assert {key: layers for key, layers in read.items() if key[0] != "RecurrentState"} == {
        ("FullAttention", (2 * 2 * 256 * 2,)): 12, ("IndexerKeys", (128 * 2 // 4,)): 12,
    }  # fmt: skip


def test_a_step_reads_the_parts_of_compressed_layers() -> None:
    """DeepSeek-V4-Flash: rows of a window, entries of the same size, and index keys of 132 bytes in every other layer.

    The first two layers have a window alone.
    """
    engine = load_engine("vllm", kvcalc.load_model("deepseek-v4-flash"), {})
    read = [(one.num_layers, one.sizes) for one in engine.entries(engine.spec, DTYPES["fp8"])]
    assert read == [(2, (584, 0, 0)), (21, (584, 584, 132)), (20, (584, 584, 0))]


def test_qwen4_exp_before_0_33() -> None:
    with pytest.raises(KvcalcError, match=r"before 0\.33 is not modelled"):
        ask(QWEN4, "vllm@0.32", 8192)
    with pytest.raises(KvcalcError, match="mamba_ssm_dtype"):
        kvcalc.read_config({**QWEN4, "mamba_ssm_dtype": "bfloat16"}, "x", "x")


GLM_5_3 = [
    # 4 states of 34 layers by 11, with 3 each, one ring, and 2 or 31 blocks of tokens.
    (8192, 1, {}, None, 4352, 50_600_960, 2 + 12 + 1),
    (131_072, 1, {}, None, 4352, 50_600_960, 31 + 12 + 1),
    # One more layer with attention drafts, and a request has 3 more states.
    (131_072, 2, {"num-speculative-tokens": "3"}, None, 2304, 29_223_936, 57 + 18 + 1),
    # In fp8 on B200, in pages of 32 rows.
    (8192, 1, {}, "b200", 8576, 51_429_376, 1 + 12 + 1),
]


@pytest.mark.parametrize(("tokens", "tp", "settings", "gpu", "block", "block_bytes", "blocks"), GLM_5_3)
def test_glm_5_3_flash(
    tokens: int, tp: int, settings: dict[str, str], gpu: str | None, block: int, block_bytes: int, blocks: int
) -> None:
    """vLLM 0.33.0's own planner (get_kv_cache_groups with the layout BLHNC) for the specs of models/glm5next.

    A state has 64 heads of 128 x 128 in 32 bits, and three columns of 3 x 8,192 channels in 16: 4,341,760 bytes, as
    much as 4,240 rows of 512 elements in 16 bits, in whole pages of 32 index keys of 4 tokens: 4,352. The eleven layers
    with attention have an index key of 132 bytes for 4 tokens too: 11 x (4,352 x 1,024 + 1,088 x 132) in whole rows.
    """
    devices = None if gpu is None else kvcalc.find_devices(gpu)
    found = estimate(
        kvcalc.load_model("glm-5.3-flash"), engine="vllm", context_tokens=tokens, tensor_parallel_size=tp,
        devices=devices, engine_settings=settings,
    )["engine"]  # fmt: skip
    assert (found["block_size"], found["bytes_per_block"]) == (block, block_bytes)
    assert found["request_bytes"] == blocks * block_bytes


@pytest.mark.parametrize(
    ("release", "asked", "words"),
    [
        ("", {"kv_dtype": "fp8"}, "rows for glm-5.3-flash on this device are not known"),
        ("@0.32", {}, "before 0.33 is not modelled"),
        ("", {"settings": {"mamba_ssm_cache_dtype": "float16"}}, "float16: not supported for KDA"),
        ("", {"settings": {"block_size": "64"}}, "multiples of 128"),
    ],
)
def test_what_is_refused_for_glm_5_3_flash(release: str, asked: dict[str, Any], words: str) -> None:
    with pytest.raises(KvcalcError, match=re.escape(words)):
        start("glm-5.3-flash", 8192, release, **asked)


def test_states_alone_need_no_hybrid_manager() -> None:
    """A model with other layers beside its states needs it (unify_hybrid_kv_cache_specs)."""
    off = {"disable-hybrid-kv-cache-manager": True}
    for model in ("mamba2-780m", "falcon-mamba-7b"):
        found = kvcalc.estimate(model, engine="vllm", engine_settings=off)
        assert found["kv_cache"] == kvcalc.estimate(model, engine="vllm")["kv_cache"]
    with pytest.raises(ModelError, match="is not supported for its kinds of layers"):
        kvcalc.estimate("qwen3-next-80b-a3b", engine="vllm", engine_settings=off)
