"""vLLM's blocks: compared with vLLM's own planning functions, computed by hand, and cases that are refused."""

from __future__ import annotations

from typing import Any

import pytest

import kvcalc
from kvcalc.engines import load_engine
from kvcalc.engines.engine import Engine
from kvcalc.engines.vllm.groups import group
from kvcalc.engines.vllm.pages import CHUNKED, CROSS, FULL, MLA, SLIDING, STATE, Demand, Page, unify
from kvcalc.errors import ModelError, UsageError
from kvcalc.memory.dtypes import DTYPES
from tests.documents import estimate

GIB = 1 << 30


def pool(
    model: str, tokens: int, memory: int | None = None, tp: int = 1, stages: int = 1, **options: Any
) -> dict[str, Any]:
    own = {name: value for name, value in options.items() if name not in ("kv_dtype", "dtype")}
    answer = estimate(
        kvcalc.load_model(model),
        context_tokens=tokens,
        engine="vllm",
        engine_settings={name.replace("_", "-"): str(value) for name, value in own.items()},
        kv_memory_bytes=memory,
        tensor_parallel_size=tp,
        pipeline_parallel_size=stages,
        kv_dtype=options.get("kv_dtype", "auto"),
        dtype=options.get("dtype", "bf16"),
    )
    engine = answer["engine"]
    assert sum(line["bytes"] for line in engine["request_lines"]) == engine["request_bytes"]
    return dict(engine)


# Bytes of a block, bytes of one request at full length, and blocks and tokens in 40 GiB, as computed by
# get_kv_cache_groups and the planning functions of vLLM 0.33.0, without prefix caching and with one batch of 8,192
# tokens in flight.
PLANNED = [
    ("llama-3.1-8b", 1, 8192, 2_097_152, 1_073_741_824, 20_480, 327_680),
    ("llama-3.1-8b", 8, 131_072, 262_144, 2_147_483_648, 163_840, 2_621_440),
    ("deepseek-v3", 1, 8192, 1_124_352, 575_668_224, 38_199, 611_184),
    ("deepseek-v3", 8, 131_072, 1_124_352, 9_210_691_584, 38_199, 611_184),
    ("deepseek-v3.2", 8, 131_072, 5_012_736, 10_266_083_328, 8_568, 548_352),
    ("gemma-3-27b", 1, 8192, 1_310_720, 4_705_484_800, 32_768, 74_773),
    ("gemma-3-27b", 8, 131_072, 163_840, 1_909_391_360, 262_144, 2_948_321),
    ("gemma-4-26b-a4b", 1, 8192, 655_360, 1_848_770_560, 65_536, 190_312),
    ("gemma-4-26b-a4b", 8, 131_072, 163_840, 1_578_926_080, 262_144, 3_565_397),
    ("gemma-4-e4b", 8, 131_072, 131_072, 1_252_655_104, 327_680, 4_494_053),
    ("gpt-oss-120b", 1, 8192, 589_824, 604_569_600, 72_817, 581_967),
    ("llama-4-scout", 8, 131_072, 98_304, 1_107_296_256, 436_906, 5_083_997),
    ("nemotron-3-nano-30b-a3b", 1, 8192, 12_877_824, 103_022_592, 3_335, 3_415_040),
    ("qwen3-next-80b-a3b", 1, 8192, 13_369_344, 254_017_536, 3_212, 1_384_879),
    ("qwen3-next-80b-a3b", 8, 131_072, 1_769_472, 1_617_297_408, 24_272, 3_480_721),
]


@pytest.mark.parametrize(("model", "tp", "tokens", "block", "request_bytes", "blocks", "held"), PLANNED)
def test_what_vllm_plans(
    model: str, tp: int, tokens: int, block: int, request_bytes: int, blocks: int, held: int
) -> None:
    found = pool(model, tokens, 40 * GIB, tp, no_async_scheduling="true", no_enable_prefix_caching="true")
    assert (found["bytes_per_block"], found["request_bytes"]) == (block, request_bytes)
    assert (found["num_gpu_blocks"], found["kv_cache_tokens"]) == (blocks, held)


def test_a_log_of_states_beside_attention_comes_out_to_the_token() -> None:
    # noonghunna/club-3090#612: Qwen3.6-35B-A3B, fp8, 5.98 GiB: 567,978 tokens, 4.33x. A state is 3 x 8192 x 2 and
    # 32 x 128 x 128 x 4 bytes, 2,146,304. A token of attention takes 1,024 bytes, so a block has 2,096 tokens.
    # It ran on an RTX 3090, where the prefill is Triton's.
    found = pool("qwen3.6-35b-a3b", 131_072, int(5.98 * GIB), kv_dtype="fp8", gdn_prefill_backend="triton")
    assert (found["block_size"], found["num_gpu_blocks"], found["kv_cache_tokens"]) == (2096, 299, 567_978)
    assert round(found["max_concurrency"], 2) == 4.33
    # alvarobartt/hf-mem#61: gemma-4-31B at 24.54 GiB has 10,051 blocks.
    assert pool("gemma-4-31b", 8192, int(24.54 * GIB))["num_gpu_blocks"] == 10_051


def test_drafts_take_a_layer_and_a_state_each_more() -> None:
    # noonghunna/club-3090#295: Qwen3.6-27B, fp8, two devices, three drafted tokens: blocks of 1,600 tokens, 179 blocks
    # per request.
    drafting: dict[str, Any] = {"gdn_prefill_backend": "triton", "num_speculative_tokens": 3}
    found = pool("qwen3.6-27b", 262_144, kv_dtype="fp8", tp=2, **drafting)
    assert (found["block_size"], found["request_bytes"] // found["bytes_per_block"]) == (1600, 179)
    # GLM-5.2 with its MTP layer: 79 latents of 656 bytes and 22 indexers of 132 bytes, 54,728 bytes per token.
    glm = pool("glm-5.2", 8192, kv_dtype="fp8", num_speculative_tokens=1)
    assert glm["bytes_per_block"] == 64 * (79 * 656 + 22 * 132)
    with pytest.raises(UsageError, match=r"has no multi-token prediction \(MTP\) layers"):
        pool("llama-3-8b", 8192, num_speculative_tokens=1)


def test_two_steps_in_flight_unless_told_otherwise() -> None:
    # A window of 1,024: 1,023 + 2 x 2,048 tokens take 320 blocks of 16, plus one. Full attention takes 512 for 8,192.
    held = pool("gemma-3-1b", 8192, max_num_batched_tokens=2048)
    alone = pool("gemma-3-1b", 8192, max_num_batched_tokens=2048, no_async_scheduling="true")
    assert held["request_bytes"] > alone["request_bytes"]
    flight = {line["name"]: line["bytes"] for line in held["request_lines"]}["in-flight tokens beyond the window"]
    # 22 of 26 layers have a window of 512 tokens, plus 511 + 4,096 - 512 tokens of 1,024 bytes.
    assert flight == 22 * (511 + 4096 - 512) * 1024


def test_stages_hold_whole_layers_and_the_largest_counts() -> None:
    one, three = (pool("llama-3-8b", 8192, stages=stages) for stages in (1, 3))
    assert one["bytes_per_block"] == 32 * 65_536
    assert three["bytes_per_block"] == 11 * 65_536
    cache = estimate(
        kvcalc.load_model("llama-3-8b"),
        context_tokens=8192,
        engine="vllm",
        pipeline_parallel_size=3,
    )["kv_cache"]
    assert (cache["bytes_per_device"], cache["total_bytes"]) == (11 * 512 * 65_536, 32 * 512 * 65_536)


def test_pages_become_one_size() -> None:
    small, large = Page(FULL, 16, 10), Page(FULL, 16, 30)
    assert unify([small, large]) == [small._replace(block_size=48), large]
    odd = Page(SLIDING, 16, 7, span=5)
    assert unify([odd, large]) == [odd._replace(padded_bytes=480), large]
    assert unify([Page(MLA, 16, 7), large]) is None
    assert unify([Page(MLA, 16, 10), large]) == [Page(MLA, 48, 10), large]


def test_layers_are_grouped_by_the_rarest_kind() -> None:
    full, window = Page(FULL, 16, 8), Page(SLIDING, 16, 8, span=4)
    grouped = group([*[window] * 10, *[full] * 2])
    assert grouped is not None
    assert [len(part.layers) for part in grouped] == [2, 2, 2, 2, 2, 2]
    # Every fifth window is in the first group.
    assert [place for place, _ in grouped[0].layers] == [0, 5]
    # 13 and 12 layers: with a ratio below 1.5, groups are padded and not split.
    grouped = group([*[full] * 13, *[window] * 12])
    assert grouped is not None
    assert [len(part.layers) for part in grouped] == [13, 12]


def test_what_a_request_may_hold_of_each_kind() -> None:
    demand = Demand(max_model_len=100, max_in_flight_tokens=10, encoder_tokens=33, state_blocks=2)
    pages = {
        Page(FULL, 16, 8): 7,
        Page(SLIDING, 16, 8, span=20): 3,  # 19 + 10 tokens take two blocks, and a window may begin inside a block
        Page(CHUNKED, 16, 8, span=20): 2,
        Page(CROSS, 16, 8): 3,
        Page(STATE, 0, 0, state_bytes=5): 2,
    }
    assert {page: page.blocks(demand) for page in pages} == pages


def test_a_what_if_vllm_cannot_hold_is_null() -> None:
    answer = estimate(kvcalc.load_model("gemma-3-27b"), context_tokens=8192, engine="vllm")
    assert "latent attention" in answer["variants"][3]["reason"]
    assert answer["variants"][2]["own"]


def test_layouts_that_are_not_settled_are_refused() -> None:
    with pytest.raises(ModelError, match="not modelled"):
        pool("recurrentgemma-2b", 4096)


def test_falcons_new_architecture_keeps_its_kv_heads() -> None:
    """FalconAttention, models/falcon.py of 0.33.0: num_kv_heads heads, which Transformers repeats for all 128."""
    answers = [
        estimate(kvcalc.load_model("falcon-40b"), context_tokens=8192, engine="vllm", tensor_parallel_size=size)
        for size in (1, 2, 8, 16)
    ]
    blocks = [answer["engine"]["bytes_per_block"] for answer in answers]
    assert blocks == [16 * 60 * 2 * heads * 64 * 2 for heads in (8, 4, 1, 1)]
    assert blocks[0] == 1_966_080


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"block_size": 24}, "multiples of 16"),
        ({"block_size": 0}, "--block-size"),
        ({"kv_dtype": "q8_0"}, "not a supported cache dtype of vLLM"),
        ({"cache": "static"}, "vllm has no such setting"),
    ],
)
def test_options_vllm_does_not_take(options: dict[str, Any], error: str) -> None:
    with pytest.raises(UsageError, match=error):
        pool("llama-3-8b", 4096, **options)


# GPT-OSS-20B has 12 layers with full attention and 12 with a window of 128 tokens. A step has 256 tokens, and two are
# in flight: a prompt has 127 + 2 x 256 tokens of its window, in 40 blocks and one more, and a request that decodes has
# 127 + 1, in 8 and one more.
OSS_BLOCK, OSS_PROMPT, OSS_DECODE = 16 * 12 * 2 * 8 * 64 * 2, 41, 9


def gpt_oss() -> Engine:
    return load_engine("vllm", kvcalc.load_model("gpt-oss-20b"), {"max-num-batched-tokens": "256"})


@pytest.mark.parametrize(("shared", "once", "own"), [(0, 0, 100 + OSS_DECODE), (1024, 64, 36 + OSS_DECODE)])
def test_as_many_run_as_decode_while_one_computes_its_prompt(shared: int, once: int, own: int) -> None:
    """remove_skipped_blocks (v1/core/single_type_kv_cache_manager.py). One block is the null block of the pool.

    Requests of 1,600 tokens have 100 blocks of full attention, of which a common prefix of 1,024 is 64.
    """
    engine = gpt_oss()
    beside = 1 + once + OSS_PROMPT - OSS_DECODE
    for blocks, running in ((0, 0), (beside + own - 1, 0), (beside + own, 1), (beside + 3 * own - 1, 2)):
        assert engine.most_running(engine.spec, DTYPES["bf16"], blocks * OSS_BLOCK, 1500, 1600, shared) == running


def test_a_short_prompt_has_no_more_than_its_own_blocks() -> None:
    """A prompt of 100 tokens has 7 blocks of each group, no more than when it decodes."""
    engine = gpt_oss()
    for blocks, running in ((109, 0), (1 + 109, 1), (1 + 2 * 109, 2)):
        assert engine.most_running(engine.spec, DTYPES["bf16"], blocks * OSS_BLOCK, 100, 1600) == running


def test_a_simulation_follows_the_blocks_of_a_request_that_grows() -> None:
    engine = gpt_oss()
    pool = engine.running_pool(engine.spec, DTYPES["bf16"], 1600, 4, 500 * OSS_BLOCK)
    assert (pool.capacity, pool.block_tokens) == (499, 16)
    assert pool.prompt_table is not None
    assert list(pool.table[:101]) == [n + min(n, OSS_DECODE) for n in range(101)]
    assert list(pool.prompt_table[:101]) == [n + min(n, OSS_PROMPT) for n in range(101)]
    # Without windows the blocks of a prompt are those of a request that decodes. No more are listed than there are.
    plain_engine = load_engine("vllm", kvcalc.load_model("llama-3.1-8b"), {})
    block = 32 * 65_536
    even = plain_engine.running_pool(plain_engine.spec, DTYPES["bf16"], 1600, 4, 500 * block)
    assert (even.capacity, even.table, even.prompt_table) == (499, range(len(even.table)), None)
    assert len(even.table) > 100
    small = plain_engine.running_pool(plain_engine.spec, DTYPES["bf16"], 1600, 4, 50 * block)
    assert (small.capacity, small.table) == (49, range(51))
    assert plain_engine.most_running(plain_engine.spec, DTYPES["bf16"], 500 * block, 100, 1600) is None


QWEN2 = {
    "model_type": "qwen2", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64,
}  # fmt: skip
"""A small decoder of a type whose class in vLLM reads is_causal."""


def test_no_cache_for_a_decoder_that_reads_later_tokens() -> None:
    """Qwen2DecoderLayer has an EncoderOnlyAttention with is_causal: false (qwen2.py, vLLM 0.33.0)."""
    causal = kvcalc.read_config(QWEN2, "x", "x")
    both_ways = kvcalc.read_config({**QWEN2, "is_causal": False}, "x", "x")
    named = kvcalc.read_config({**QWEN2, "architectures": ["Qwen2BidirectionalModel"]}, "x", "x")
    assert kvcalc.estimate(causal, engine="vllm")["kv_cache"]["total_bytes"] > 0
    document = kvcalc.estimate(both_ways, engine="vllm")
    assert document["kv_cache"]["total_bytes"] == 0
    assert "attend to all others in one forward pass, and vLLM keeps no K and V" in str(document["warnings"])
    assert kvcalc.estimate(named, engine="vllm")["kv_cache"]["total_bytes"] == 0
    # SGLang's class does not read the key, and its pool has rows for every token.
    assert kvcalc.estimate(both_ways, engine="sglang")["kv_cache"]["total_bytes"] > 0


def test_a_class_that_does_not_read_is_causal_keeps_its_cache() -> None:
    """Gpt2's class has no such rule, so the key changes nothing."""
    config = {"model_type": "gpt2", "n_embd": 32, "n_head": 4, "n_layer": 2, "vocab_size": 64, "n_positions": 64}
    models = [kvcalc.read_config(own, "x", "x") for own in (config, {**config, "is_causal": False})]
    causal, other = (kvcalc.estimate(model, engine="vllm", context_tokens=64) for model in models)
    assert causal["kv_cache"]["total_bytes"] == other["kv_cache"]["total_bytes"] > 0


def test_states_beside_attention_in_both_directions_are_not_modelled() -> None:
    model = kvcalc.load_model("qwen3-next-80b-a3b")._replace(is_bidirectional=True)
    with pytest.raises(ModelError, match="is_causal: false"):
        kvcalc.estimate(model, engine="vllm")
