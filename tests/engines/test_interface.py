"""The bytes that engines hold if kvcalc models them, and errors if it does not."""

from __future__ import annotations

from operator import itemgetter

import pytest

import kvcalc
from kvcalc.engines import ENGINES, engine_class, load_engine
from kvcalc.errors import ModelError, UsageError
from kvcalc.memory.dtypes import DTYPES
from kvcalc.model.caches import CompressedAttention
from kvcalc.model.spec import all_caches, distinct_caches, windows
from tests.conftest import PLAIN_PRESETS
from tests.documents import estimate
from tests.engines.models import ask, gated_delta, gpt_oss, latent, lines, plain, sparse, total
from tests.engines.shapes import minimax_m3, t5
from tests.engines.test_vllm_states import QWEN4

# Decoder presets without a window. For these, Transformers holds exactly what the formula stores.
SPECS = {name: kvcalc.load_model(name) for name in PLAIN_PRESETS}
PLAIN = [name for name, spec in SPECS.items() if not spec.is_encoder and not windows(spec)]

CONFIGS = [plain(), latent(), sparse(), gated_delta(), gpt_oss()]
FALCON_40B = {
    "model_type": "falcon", "num_hidden_layers": 60, "num_attention_heads": 128, "num_kv_heads": 8, "hidden_size": 8192,
    "new_decoder_architecture": True,
}  # fmt: skip


def held(spec: kvcalc.ModelSpec, tokens: int, **settings: str) -> int:
    answer = estimate(spec, context_tokens=tokens, dtype="bf16", engine="transformers", engine_settings=settings)
    return int(answer["kv_cache"]["total_bytes"])


@pytest.mark.parametrize("tokens", [1, 17, 4094, 4095, 4096, 4097, 100_000])
def test_transformers_keeps_one_token_less_than_the_window(tokens: int) -> None:
    spec = kvcalc.load_model("mistral-7b-v0.1")
    assert held(spec, tokens) == 32 * 2 * 8 * 128 * 2 * min(tokens, 4095)
    assert held(spec, tokens, cache="static") == 32 * 2 * 8 * 128 * 2 * min(tokens, 4096)


def test_without_windows_the_storage_is_what_the_cache_holds() -> None:
    for config, encoder_tokens in ((plain(), None), (sparse(), None), (gated_delta(), None), (t5(), 70)):
        found = ask(config, "transformers", 100, 3, encoder_tokens=encoder_tokens)
        assert found["engine"]["storage_bytes"] == found["kv_cache"]["total_bytes"]


@pytest.mark.parametrize("batch", [1, 3])
def test_a_static_indexer_has_a_counter_for_the_whole_batch(batch: int) -> None:
    """MiniMaxM3VLSparseStaticCacheLayer: 3 of 4 layers have an indexer of 128, beside K and V of 4 heads of 128."""
    config = {**minimax_m3(4, 1), "model_type": "minimax_m3_vl_text"}
    rows = batch * 100 * (4 * 2 * 4 * 128 + 3 * 128) * 2
    assert total(config, "transformers", 100, batch) == rows
    assert total(config, "transformers", 100, batch, settings={"cache": "static"}) == rows + 3 * 8


def test_transformers_slope_ends_with_the_window() -> None:
    spec = kvcalc.load_model("mistral-7b-v0.1")
    full = estimate(spec, context_tokens=4095, engine="transformers")["kv_cache"]
    assert (full["bytes_per_token"], full["fixed_bytes_per_sequence"]) == (0, held(spec, 4095))
    assert full["stored_bytes"] == full["total_bytes"] == held(spec, 4095)


@pytest.mark.parametrize("name", PLAIN)
def test_transformers_holds_the_formulas_bytes_of_other_presets(name: str) -> None:
    spec = kvcalc.load_model(name)
    assert held(spec, 1025) == estimate(spec, context_tokens=1025, dtype="bf16")["kv_cache"]["stored_bytes"]


def test_transformers_repeats_falcons_heads_in_the_new_architecture_alone() -> None:
    spec = kvcalc.read_config(FALCON_40B, "falcon-40b", "test")
    assert held(spec, 1025) == 2_015_232_000
    assert estimate(spec, context_tokens=1025, dtype="bf16")["kv_cache"]["total_bytes"] == 2_015_232_000 // 16


def test_a_soft_prompt_is_cached_before_the_text() -> None:
    """CPM-Ant has 32 tokens of it by default (prompt_length of configuration_cpmant.py)."""
    config = {
        "model_type": "cpmant", "num_hidden_layers": 2, "num_attention_heads": 8, "hidden_size": 512, "dim_head": 64,
    }  # fmt: skip
    for more, tokens in (({}, 132), ({"prompt_length": 20}, 120)):
        spec = kvcalc.read_config({**config, **more}, "test", "test")
        assert held(spec, 100) == 2 * 2 * 8 * 64 * 2 * tokens


def test_the_window_layers_of_deepseek_v4_keep_and_read_their_rows_twice() -> None:
    """A tensor of 512 elements is both K and V, and the layers without compression keep it as both."""
    rules, bf16 = load_engine("transformers", kvcalc.load_model("deepseek-v4-flash")), DTYPES["bf16"]
    rates = set()
    for cache in all_caches(rules.spec):
        assert isinstance(cache, CompressedAttention)
        copies = 1 if cache.compress_rate else 2
        assert rules.entry_sizes(cache, bf16)[0] == copies * 512 * 2
        if copies == 2:
            assert rules.cache_bytes(cache, 1000, bf16) == 127 * 2 * 512 * 2
        rates.add(cache.compress_rate)
    assert rates == {0, 4, 128}


def test_the_indexers_of_qwen4_exp_keep_three_positions_of_a_token_once_for_all_layers() -> None:
    """Positions of 64 bits (Qwen4ExpTextModel), beside the caches of all layers."""
    rules, bf16 = load_engine("transformers", kvcalc.read_config(QWEN4, "test", "test")), DTYPES["bf16"]
    layers = sum(number * rules.cache_bytes(cache, 1000, bf16) for cache, number in distinct_caches(rules.spec))
    assert rules.held_bytes(rules.spec, bf16, 1000, 2) == 2 * (layers + 1000 * 3 * 8)


@pytest.mark.parametrize(
    ("model_type", "more"),
    [
        ("unlimited_ocr_text", {"num_key_value_heads": 8, "head_dim": 64, "sliding_window": 128}),
        ("cpmant", {"dim_head": 64}),
    ],
)
def test_types_whose_static_cache_is_not_modelled(model_type: str, more: dict[str, object]) -> None:
    config = {
        "model_type": model_type, "num_hidden_layers": 2, "num_attention_heads": 8, "hidden_size": 512,
        "torch_dtype": "bfloat16", **more,
    }  # fmt: skip
    spec = kvcalc.read_config(config, "test", "test")
    assert held(spec, 100) > 0
    with pytest.raises(ModelError, match=f"static cache of {model_type} is not modelled"):
        held(spec, 100, cache="static")


def test_a_window_of_one_is_refused_for_transformers() -> None:
    config = {
        "model_type": "mistral",
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "hidden_size": 8,
        "sliding_window": 1,
    }
    with pytest.raises(ModelError, match="window of 1"):
        held(kvcalc.read_config(config, "test", "test"), 5)


@pytest.mark.parametrize("config", CONFIGS, ids=itemgetter("model_type"))
@pytest.mark.parametrize("name", ENGINES)
def test_the_layers_add_up_to_the_whole(name: str, config: dict[str, object]) -> None:
    """Except in pools that all kinds of layers share, as TensorRT-LLM's for windows and states."""
    has_pools = name == "tensorrt-llm" and config["model_type"] == "qwen3_5_moe_text"
    cache = ask(config, f"{name}@1.3.0rc24" if has_pools else name, 100)["kv_cache"]
    layers = sum((one["last"] - one["first"] + 1) * one["bytes_per_layer"] for one in cache["layers"])
    assert (layers == cache["total_bytes"]) is not has_pools


@pytest.mark.parametrize("config", CONFIGS, ids=itemgetter("model_type"))
@pytest.mark.parametrize("name", ENGINES)
def test_a_step_reads_every_cache_of_every_layer(name: str, config: dict[str, object]) -> None:
    rules = load_engine(name, kvcalc.read_config(config, "test", "test"))
    read = sum(entries.num_layers for entries in rules.entries(rules.spec, DTYPES["bf16"]))
    assert read == sum(number for _, number in distinct_caches(rules.spec))


def test_an_unknown_engine_offers_the_near_ones() -> None:
    with pytest.raises(UsageError) as caught:
        load_engine("vlm", kvcalc.load_model("llama-7b"))
    assert "vllm" in (caught.value.hint or "")


def test_a_setting_belongs_to_its_engine() -> None:
    with pytest.raises(UsageError, match="logical has no such setting"):
        load_engine("logical", kvcalc.load_model("llama-7b"), {"cache": "static"})
    with pytest.raises(UsageError, match="not a kind of cache"):
        load_engine("transformers", kvcalc.load_model("llama-7b"), {"cache": "quantized"})


def test_a_bert_that_decodes_is_kept() -> None:
    config = {
        "model_type": "bert",
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "hidden_size": 8,
        "is_decoder": True,
    }
    assert held(kvcalc.read_config(config, "test", "test"), 5) == 2 * 5 * 8 * 2


def test_a_prefill_stays_alive_behind_its_windows() -> None:
    spec = kvcalc.load_model("gemma-3-27b")
    answer = estimate(spec, context_tokens=8192, dtype="bf16", engine="transformers", batch_size=3)
    # All 62 layers (16 heads of 128) keep 8,192 tokens allocated until the next token. Then 52 of them keep 1,023.
    row = 2 * 16 * 128 * 2
    assert answer["engine"]["storage_bytes"] == 3 * 62 * 8192 * row
    assert answer["kv_cache"]["total_bytes"] == 3 * (10 * 8192 + 52 * 1023) * row
    static = estimate(spec, context_tokens=8192, engine="transformers", engine_settings={"cache": "static"})
    assert static["engine"]["storage_bytes"] == static["kv_cache"]["total_bytes"]
    v4 = estimate(kvcalc.load_model("deepseek-v4-flash"), context_tokens=8192, engine="transformers")
    assert v4["engine"]["storage_bytes"] is None


@pytest.mark.parametrize("name", ["llama-3.1-8b", "llama-3.1-70b", "mixtral-8x7b"])
def test_smaller_types_come_best_first_with_the_least_bits_of_a_weight(name: str) -> None:
    """No checkpoint of the type is smaller, so a model that these bits do not let fit need not be asked about."""
    spec = SPECS.get(name) or kvcalc.load_model(name)
    for engine in ENGINES:
        sizes = []
        for dtype, least in engine_class(engine).smaller_types:
            weights = estimate(spec, engine=engine, dtype=dtype)["weights"]
            bits = 8 * weights["bytes"] / weights["parameters"]
            assert least <= bits < least + 2, (engine, dtype)
            sizes.append(bits)
        assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize("name", ["bert-base", "bge-m3"])
def test_only_engines_with_a_pool_for_encoders_say_that_they_may_reserve_one(name: str) -> None:
    """SGLang and older builds of llama.cpp did (sgl-project/sglang#7590, ggml-org/llama.cpp#12836)."""
    said = {}
    for engine in ENGINES:
        try:
            warnings = estimate(kvcalc.load_model(name), engine=engine)["warnings"]
        except ModelError:
            continue
        said[engine] = any("may reserve a pool for encoders" in one["text"] for one in warnings)
    assert {engine for engine, says in said.items() if says} == {"sglang", "llama.cpp"}
    assert {"vllm", "transformers"} <= set(said)


# A layout has a line of its own; those of windows, states and latents are only for models that have them.
_ONLY_WITH = {"window": [gpt_oss()], "state": [gated_delta()], "latent": [latent(), sparse()]}


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: str(config["model_type"]))
@pytest.mark.parametrize("engine", ENGINES)
def test_lines_name_only_what_a_model_has(engine: str, config: dict[str, object]) -> None:
    names = set[str]()
    for dtype in ("auto", "fp8", "q8_0"):
        try:
            found = ask(config, engine, 2048, kv_dtype=dtype)["engine"]
        except (ModelError, UsageError):
            continue
        names |= {line["name"] for part in ("pool_lines", "request_lines") for line in found.get(part) or ()}
    has_window_pool = {"tokens required by the window pool's ratio"}
    for word, configs in _ONLY_WITH.items():
        if config not in configs:
            assert not [name for name in names - has_window_pool if word in name], word


def test_rows_with_scales_are_a_different_layout_and_not_windows() -> None:
    """DeepSeek-V3.2 in fp8: 656 bytes a token instead of 576, and index keys of 132 instead of 128."""
    found = lines(sparse(), "sglang", 1024, kv_dtype="fp8")
    assert found["different layout or dtype"] == 3 * 1024 * (656 - 576 + 132 - 128)
    assert set(found) == {"stored", "different layout or dtype", "dummy page"}


@pytest.mark.parametrize(
    ("engine", "model", "option", "block", "dtype"),
    [
        ("vllm", "llama-3.1-8b", "num-gpu-blocks-override", 1, "bf16"),
        ("vllm", "gpt-oss-20b", "num-gpu-blocks-override", 1, "bf16"),
        ("sglang", "llama-3.1-8b", "max-total-tokens", 1, "bf16"),
        ("sglang", "gpt-oss-20b", "max-total-tokens", 1, "bf16"),
        ("sglang", "deepseek-v4-flash", "max-total-tokens", 256, "fp8"),
        ("tensorrt-llm", "llama-3.1-8b", "max-tokens", 32, "bf16"),
    ],
)
def test_an_option_that_limits_the_pool_names_the_bytes_that_hold_as_much(
    engine: str, model: str, option: str, block: int, dtype: str
) -> None:
    spec = kvcalc.load_model(model)

    def pool_in(memory: int, number: int | None) -> int:
        settings = {} if number is None else {option: str(number)}
        pool = load_engine(engine, spec, settings).blocks(spec, DTYPES[dtype], 1000, 1, memory).pool
        assert pool is not None
        assert pool.num_gpu_blocks is not None
        return pool.num_gpu_blocks

    limits = [
        load_engine(engine, spec, {option: str(number)}).pool_limit(spec, DTYPES[dtype]) for number in (900, 70_000)
    ]
    for number, limit in zip((900, 70_000), limits):
        assert limit is not None
        assert limit.option == option
        # SGLang's bytes include a page that holds no request.
        held = pool_in(limit.bytes, None) - number // block
        assert 0 <= held <= (engine == "sglang")
        assert pool_in(limit.bytes, number) == number // block
        assert pool_in(limit.bytes * 99 // 100, None) < number // block
    assert load_engine(engine, spec).pool_limit(spec, DTYPES[dtype]) is None
