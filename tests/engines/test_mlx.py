"""mlx-lm's caches, counted by hand from mlx_lm/models/cache.py, and what it does not support."""

from __future__ import annotations

from typing import Any

import pytest

import kvcalc
from kvcalc.engines.mlx.models import weight_dtype
from kvcalc.errors import KvcalcError, LayoutError, ModelError, UsageError
from tests.documents import estimate, texts
from tests.engines.models import ask, gated_delta, gpt_oss, latent, lines, plain, sparse, total

# `plain`: 2 layers, 2 KV heads of 64. One token takes 2 layers x 2 x 2 x 64 elements of 2 bytes.
TOKEN = 2 * 2 * 2 * 64 * 2


@pytest.mark.parametrize(("tokens", "rows"), [(1, 256), (256, 256), (257, 512), (2049, 2304), (4096, 4096)])
def test_arrays_grow_by_256_tokens(tokens: int, rows: int) -> None:
    assert total(plain(), "mlx", tokens) == rows * TOKEN
    assert total(plain(), "mlx", tokens, 3) == 3 * rows * TOKEN


@pytest.mark.parametrize(("bits", "group", "bytes_per_element"), [
    (8, 64, 8.5 / 8), (4, 64, 4.5 / 8), (4, 32, 5 / 8), (6, 64, 6.5 / 8), (3, 32, 4 / 8), (2, 64, 2.5 / 8),
])  # fmt: skip
def test_a_quantized_cache_has_a_scale_and_a_bias_per_group(bits: int, group: int, bytes_per_element: float) -> None:
    settings = {"kv-bits": bits, "kv-group-size": group}
    found = ask(plain(), "mlx", 8192, settings=settings)
    assert found["kv_cache"]["total_bytes"] == 8192 * TOKEN / 2 * bytes_per_element
    assert (found["engine"]["kv_bits"], found["engine"]["kv_group_size"]) == (bits, group)
    assert found["engine"]["kv_dtype_reason"] == "--kv-bits"
    assert any("mlx_lm.server" in text for text in texts(found))


@pytest.mark.parametrize(("tokens", "rows"), [(100, 128), (128, 128), (129, 128), (5000, 128)])
def test_a_window_keeps_at_most_its_own_tokens(tokens: int, rows: int) -> None:
    # Every other layer of gpt-oss has a window of 128. A layer has 8 KV heads of 64.
    row = 2 * 8 * 64 * 2
    full = -(-tokens // 256) * 256
    assert total(gpt_oss(24), "mlx", tokens) == 12 * row * (full + rows)


def rows_of_rotating_cache(tokens: int, window: int, step: int = 2048) -> int:
    """The rows of a RotatingKVCache after a prompt: its steps are joined, and the last token is written in place."""
    rows = 0
    for first in range(0, tokens - 1, step):
        part = min(step, tokens - 1 - first)
        rows = part + min(rows, window - 1) if part > 1 or not rows else min(rows, window)
    if rows < window and rows == tokens - 1:
        rows += min(256, window - rows)
    return min(rows, window)


@pytest.mark.parametrize("tokens", [1, 100, 256, 300, 769, 770, 1000, 1024, 3000, 5000])
def test_a_window_that_is_not_full_has_the_prompt_and_256_tokens(tokens: int) -> None:
    row = 2 * 8 * 64 * 2
    full = -(-tokens // 256) * 256
    kept = rows_of_rotating_cache(tokens, 1024)
    assert total({**gpt_oss(24), "sliding_window": 1024}, "mlx", tokens) == 12 * row * (full + kept)


def test_windows_of_other_types_are_kept_whole() -> None:
    config = plain(model_type="mistral", sliding_window=512)
    found = ask(config, "mlx", 2048)
    assert found["kv_cache"]["total_bytes"] == 2048 * TOKEN
    assert found["kv_cache"]["stored_bytes"] == 512 * TOKEN
    assert any("keeps all tokens in the windowed layers of mistral" in text for text in texts(found))


@pytest.mark.parametrize(("engine", "elements"), [
    ("mlx", 512 + 64), ("mlx@0.30.6", 512 + 64), ("mlx@0.30.5", 16 * (192 + 128)), ("mlx@0.28", 16 * (192 + 128)),
])  # fmt: skip
def test_the_latent_is_cached_since_0_30_6(engine: str, elements: int) -> None:
    assert total(latent(), engine, 1024) == 3 * 1024 * elements * 2


# The caches of MLA in the classes of mlx_lm/models at the tags v0.30.4 to v0.30.7: which classes cached the latent.
CACHES_THE_LATENT = {
    "0.30.4": "", "0.30.5": "glm4_moe_lite", "0.30.6": "glm4_moe_lite deepseek_v3 kimi_k2 deepseek_v32 glm_moe_dsa",
    "0.30.7": "glm4_moe_lite deepseek_v3 kimi_k2 deepseek_v32 glm_moe_dsa longcat_flash",
}  # fmt: skip


@pytest.mark.parametrize("release", CACHES_THE_LATENT)
def test_each_class_caches_the_latent_since_its_own_release(release: str) -> None:
    for name in ("deepseek-v3", "kimi-k2", "deepseek-v3.2", "glm-5", "glm-4.7-flash", "longcat-flash"):
        spec = kvcalc.load_model(name)
        found, now = (estimate(spec, engine=engine)["kv_cache"]["total_bytes"] for engine in (f"mlx@{release}", "mlx"))
        if spec.model_type in CACHES_THE_LATENT[release].split():
            assert found == now, name
        else:
            # K and V of every head instead of one latent for all.
            assert found > 10 * now, name


def test_deepseek_v2_keeps_every_head_and_its_older_releases_too() -> None:
    for engine in ("mlx", "mlx@0.28"):
        assert total(latent(model_type="deepseek_v2"), engine, 1024) == 3 * 1024 * 16 * (192 + 128) * 2


def test_only_models_with_windows_whose_class_has_no_rotating_cache_keep_them_whole() -> None:
    said = "keeps all tokens in the windowed layers"
    for config, keeps in (
        (plain(), False), (gpt_oss(24), False), (plain(model_type="mistral", sliding_window=512), True),
    ):  # fmt: skip
        assert any(said in text for text in texts(ask(config, "mlx", 1024))) is keeps, config["model_type"]


def test_an_indexer_has_a_cache_of_its_own() -> None:
    assert total(sparse(), "mlx", 1024) == 3 * 1024 * (512 + 64 + 128) * 2


@pytest.mark.parametrize(("engine", "state_bytes"), [("mlx", 4), ("mlx@0.31.2", 4), ("mlx@0.31.1", 2)])
def test_the_state_of_a_delta_net_is_fp32_since_0_31_2(engine: str, state_bytes: int) -> None:
    # 30 states of 32 x 128 x 128, and 3 inputs of (16 + 16 + 32) x 128 channels in bf16. 10 layers with attention.
    states = 30 * (32 * 128 * 128 * state_bytes + 3 * 64 * 128 * 2)
    assert total(gated_delta(), engine, 1024) == states + 10 * 1024 * 2 * 2 * 256 * 2


def test_the_states_of_other_models_are_known_since_the_same_release() -> None:
    spec = kvcalc.load_model("falcon-h1-7b")
    assert estimate(spec, engine="mlx@0.31.2")["kv_cache"] == estimate(spec, engine="mlx")["kv_cache"]
    with pytest.raises(ModelError, match=r"the state of falcon_h1 before mlx-lm 0\.31\.2"):
        estimate(spec, engine="mlx@0.31.1")


def test_a_chunk_grows_by_256_tokens_beyond_itself() -> None:
    spec = kvcalc.load_model("llama-4-scout")
    layer = 2 * 8 * 128 * 2
    found = estimate(spec, context_tokens=16384, engine="mlx")
    # Every fourth of 48 layers has full attention; the others have chunks of 8,192.
    assert found["kv_cache"]["total_bytes"] == layer * (12 * 16384 + 36 * (8192 + 256))


def test_a_group_size_alone_changes_nothing() -> None:
    found = ask(plain(), "mlx", 4096, settings={"kv-group-size": 32})
    assert found["kv_cache"]["total_bytes"] == 4096 * TOKEN
    assert any("no effect without --kv-bits" in text for text in texts(found))


def test_max_kv_size_rotates_models_whose_class_makes_no_cache() -> None:
    settings = {"max-kv-size": 1024}
    rotating = ask(plain(model_type="qwen2"), "mlx", 4096, settings=settings)
    assert rotating["kv_cache"]["total_bytes"] == 1024 * TOKEN
    assert not any("max-kv-size" in text for text in texts(rotating))
    found = ask(plain(), "mlx", 4096, settings=settings)
    assert found["kv_cache"]["total_bytes"] == 4096 * TOKEN
    assert any("ignores --max-kv-size for llama" in text for text in texts(found))


@pytest.mark.parametrize("config", [plain(), gpt_oss(), latent(), latent(model_type="deepseek_v2"), gated_delta()])
@pytest.mark.parametrize("tokens", [1, 255, 300, 5000])
def test_the_lines_of_a_request_add_up(config: dict[str, object], tokens: int) -> None:
    found = ask(config, "mlx", tokens)
    assert sum(line["bytes"] for line in found["engine"]["request_lines"]) == found["kv_cache"]["bytes_per_sequence"]


@pytest.mark.parametrize(("config", "engine", "settings", "less"), [
    (plain(model_type="qwen2"), "mlx", {"max-kv-size": 1024}, 3072 * TOKEN),
    # One of two layers has a window of 3,000 tokens, and both keep 1,024.
    (plain(model_type="qwen2", use_sliding_window=True, sliding_window=3000, max_window_layers=1), "mlx",
     {"max-kv-size": 1024}, (3072 + 1976) * TOKEN // 2),
    # A state of fp32 in the config, which older releases keep in two bytes.
    (gated_delta(), "mlx@0.31.1", {}, 30 * 32 * 128 * 128 * 2),
])  # fmt: skip
def test_what_is_kept_short_stands_on_a_line_of_its_own(
    config: dict[str, object], engine: str, settings: dict[str, str], less: int
) -> None:
    found = lines(config, engine, 4096, settings=settings)
    assert {name: size for name, size in found.items() if name != "stored"} == {"different layout or dtype": -less}


def test_what_is_kept_beyond_the_formula_is_named() -> None:
    windowed = lines(plain(model_type="mistral", sliding_window=512), "mlx", 2047)
    assert windowed == {"stored": 512 * TOKEN, "windows kept whole": 1535 * TOKEN, "cells rounded up": TOKEN}
    rank, heads = 3 * (512 + 64) * 2, 3 * 16 * (192 + 128) * 2
    assert lines(latent(), "mlx@0.28", 1000) == {
        "stored": 1000 * rank, "K and V beyond the latent": 1000 * (heads - rank), "cells rounded up": 24 * heads,
    }  # fmt: skip


@pytest.mark.parametrize(("name", "num_bytes"), [("auto", 2), ("bf16", 2), ("FP16", 2), ("fp32", 4)])
def test_a_cache_has_the_floats_of_mlx(name: str, num_bytes: int) -> None:
    assert total(plain(), "mlx", 256, kv_dtype=name) == 256 * TOKEN // 2 * num_bytes


@pytest.mark.parametrize(
    ("asked", "error", "message", "hint"),
    [
        ({"tensor_parallel_size": 2}, LayoutError, "tensor parallelism is not supported for mlx", "--tp 1"),
        ({"pipeline_parallel_size": 2}, LayoutError, "several devices are not modelled", "remove --pp"),
        ({"kv_dtype": "q8_0"}, UsageError, "--kv-dtype q8_0: not a cache dtype of mlx", "--kv-bits 8"),
        ({"kv_dtype": "bf16", "engine_settings": {"kv-bits": 8}}, UsageError, "--kv-bits sets the type", "remove one"),
        ({"engine_settings": {"kv-bits": 7}}, UsageError, "--kv-bits 7", "2, 3, 4, 5, 6, 8"),
        ({"engine_settings": {"kv-bits": 8, "kv-group-size": 16}}, UsageError, "--kv-group-size 16", "32, 64, 128"),
        ({"engine_settings": {"kv-bits": 8, "kv-group-size": 128}}, UsageError, "do not divide a head of 64", "64"),
        ({"dtype": "fp8"}, UsageError, "MLX has no fp8 weights", "mlx-8bit"),
    ],
)  # fmt: skip
def test_what_mlx_does_not_support_is_refused_by_name(
    asked: dict[str, Any], error: type[KvcalcError], message: str, hint: str
) -> None:
    with pytest.raises(error) as raised:
        estimate(kvcalc.read_config(plain(), "test", "test"), context_tokens=1024, engine="mlx", **asked)
    assert message in raised.value.message
    assert hint in (raised.value.hint or "")


@pytest.mark.parametrize(("config", "why"), [(gpt_oss(), "windows"), (latent(), "a latent"), (sparse(), "a latent")])
def test_a_cache_that_mlx_does_not_quantize_is_refused(config: dict[str, object], why: str) -> None:
    for more in ({}, {"max-kv-size": 512}):
        with pytest.raises(ModelError, match=f"does not quantize a cache with {why}"):
            ask(config, "mlx", 1024, settings={"kv-bits": 8, **more})


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("mamba-codestral-7b", "a state only"),
        ("llama-4-scout", "chunks"),
        ("deepseek-v2-lite", None),
        # Attention and a state in each layer, or in a layer of their own (CacheList and make_cache in the classes).
        ("falcon-h1-7b", "several caches in a layer"),
        ("lfm2-1.2b", None),
        ("nemotron-3-nano", None),
    ],
)
def test_what_a_cache_lacks_to_be_quantized_is_named(name: str, why: str | None) -> None:
    spec, settings = kvcalc.load_model(name), {"kv-bits": 8}
    if why is None:
        assert estimate(spec, context_tokens=1024, engine="mlx", engine_settings=settings)["engine"]["kv_bits"] == 8
        return
    with pytest.raises(ModelError, match=f"does not quantize a cache with {why}"):
        estimate(spec, context_tokens=1024, engine="mlx", engine_settings=settings)


def test_states_stay_as_they_are_beside_a_quantized_cache() -> None:
    # The caches of 10 layers take 8.5 bits instead of 16, those of the others are states.
    less = 10 * 1024 * 2 * 2 * 256 * (16 - 8.5) / 8
    whole, quantized = (total(gated_delta(), "mlx", 1024, settings=given) for given in ({}, {"kv-bits": 8}))
    assert whole - quantized == less


def test_a_rotating_cache_is_not_quantized() -> None:
    with pytest.raises(UsageError, match="rotating"):
        ask(plain(model_type="qwen2"), "mlx", 1024, settings={"kv-bits": 8, "max-kv-size": 512})
    # The class of llama ignores --max-kv-size, so its cache does not rotate.
    found = total(plain(), "mlx", 1024, settings={"kv-bits": 8, "max-kv-size": 512})
    assert found == total(plain(), "mlx", 1024, settings={"kv-bits": 8})


@pytest.mark.parametrize("name", ["falcon-7b", "bart-large", "mamba-2.8b"])
def test_a_type_that_mlx_does_not_run_is_refused(name: str) -> None:
    with pytest.raises(ModelError, match="mlx"):
        estimate(kvcalc.load_model(name), context_tokens=1024, engine="mlx")


@pytest.mark.parametrize(
    ("asked", "dtype"),
    [("q4_0", "mlx-4bit"), ("Q5_K_M", "mlx-5bit"), ("q6_k", "mlx-6bit"), ("q8_0", "mlx-8bit"), ("mxfp4", "mlx-mxfp4")],
)
def test_other_engines_types_are_counted_as_the_mlx_type_with_as_many_bits(asked: str, dtype: str) -> None:
    spec = kvcalc.load_model("llama-3.1-8b")
    found = estimate(spec, engine="mlx", dtype=asked)
    assert found["weights"] == estimate(spec, engine="mlx", dtype=dtype)["weights"]
    assert f"the weights are counted as {dtype}" in " ".join(texts(found))


def test_an_fp8_checkpoint_is_counted_as_mlx_loads_it() -> None:
    found = estimate(kvcalc.load_model("deepseek-v3"), engine="mlx")
    assert found["weights"]["dtype"] == "bf16"
    assert "MLX has no fp8" in " ".join(texts(found))


@pytest.mark.parametrize(
    ("quantization", "stated", "dtype"),
    [
        ("fp8", "float16", "fp16"), ("fp8", "bfloat16", "bf16"), ("fp8", None, "bf16"), ("mxfp4", "bfloat16", None),
        (None, "float16", None),
    ],
)  # fmt: skip
def test_fp8_weights_become_those_of_the_models_type(
    quantization: str | None, stated: str | None, dtype: str | None
) -> None:
    """MLX keeps weights in its own types and in MXFP4 as they are (load_model, mlx_lm/utils.py)."""
    config = plain(torch_dtype=stated)
    if quantization is not None:
        config["quantization_config"] = {"quant_method": quantization}
    found, note = weight_dtype(kvcalc.read_config(config, "test", "test"), None)
    assert (found, note is None) == (dtype, dtype is None)


def test_a_mac_gives_mlx_three_quarters_of_its_memory() -> None:
    devices = kvcalc.find_devices("m3-ultra")
    spec = kvcalc.load_model("llama-3.1-8b")
    found = estimate(spec, context_tokens=8192, engine="mlx", devices=devices, dtype="mlx-4bit")
    lines = {line["name"]: line["bytes"] for line in found["fit"]["lines"]}
    assert lines["reserved by macOS (25 %)"] == 128 * 2**30
    # A step of 2,048 tokens of 2 bytes: twice the hidden size, and the gate and up projections and their inputs.
    assert 0 < lines["activations of 2,048 tokens"] < 2**30
    assert found["throughput"]["decode_step_seconds"] > found["throughput"]["roofline_decode_step_seconds"]


def test_mla_on_a_mac_holds_the_scores_of_a_prompts_step() -> None:
    devices, spec = kvcalc.find_devices("m3-ultra"), kvcalc.load_model("deepseek-v3")

    def activations(tokens: int, **settings: int) -> int:
        asked = {name.replace("_", "-"): size for name, size in settings.items()}
        found = estimate(
            spec, context_tokens=tokens, engine="mlx", devices=devices, dtype="mlx-4bit", engine_settings=asked
        )
        size: int = found["fit"]["activation_bytes"]
        return size

    copied = 8192 * 576 * 2  # the latent of a layer
    assert activations(16384) - activations(8192) == 2048 * 8192 * 128 * 2 + copied
    constant = 11 * 40 * 2**20 + 2 * copied
    assert (activations(16384, prefill_step_size=512) - constant) * 4 == activations(16384) - constant


def step_lines(model: str, tokens: int, release: str = "", **options: str) -> dict[str, int]:
    spec, devices = kvcalc.load_model(model), kvcalc.find_devices("m5-max")
    found = estimate(
        spec, context_tokens=tokens, engine=f"mlx{release}", devices=devices, dtype="mlx-4bit",
        engine_settings={name.replace("_", "-"): text for name, text in options.items()},
    )  # fmt: skip
    return {line["name"]: line["bytes"] for line in found["fit"]["lines"] if line["kind"] == "activation"}


@pytest.mark.parametrize(
    ("model", "of_pair"),
    [
        ("qwen3-4b", None),  # width 128
        ("smollm2-1.7b", None),  # 64
        ("phi-3-mini-128k", 32 * 2 + 1),  # 96
        ("qwen3.6-27b", 24 * 2 + 1),  # 256
        ("mimo-v2-flash", 64 * 2 + 1),  # keys of 192 and values of 128
    ],
)
def test_attention_without_a_fused_kernel_holds_the_scores_of_a_step(model: str, of_pair: int | None) -> None:
    # use_fallback in mlx/backend/metal/scaled_dot_product_attention.cpp, MLX 0.32.1.
    scores = step_lines(model, 16384).get("scores of attention")
    assert scores == (None if of_pair is None else 2048 * 16384 * of_pair)
    if of_pair:
        assert step_lines(model, 16384, prefill_step_size="512")["scores of attention"] * 4 == scores


def test_windowed_layers_hold_scores_of_their_window_and_a_step() -> None:
    gemma = step_lines("gemma-2-2b", 65536)  # all of 256, and every second layer attends to everything
    assert gemma["scores of attention"] == 2048 * 65536 * (8 * 2 + 1)


def test_a_peak_of_mlx_lm_is_as_measured() -> None:
    # ml-explore/mlx-lm#1781: a prompt of 128K and 4-bit weights, by the tokens of a step.
    spec, devices = kvcalc.load_model("mlx-community/Qwen3.8-27B-4bit"), kvcalc.find_devices("m5-max")
    for step, peak in (("2048", 39.78e9), ("1024", 32.26e9), ("512", 28.54e9), ("256", 26.52e9)):
        fit = estimate(
            spec, context_tokens=131072, engine="mlx", devices=devices, engine_settings={"prefill-step-size": step}
        )["fit"]
        assert fit["weights_bytes"] + fit["kv_cache_bytes"] + fit["activation_bytes"] == pytest.approx(peak, rel=0.05)


def test_the_arrays_of_pending_command_buffers_are_bounded_by_their_operations() -> None:
    name = "arrays of 11 command buffers"
    assert step_lines("qwen3-4b", 16384)[name] == 11 * 40 * 2**20
    assert step_lines("qwen3-4b", 64)[name] == 11 * 40 * 64 * 2560 * 2


def test_older_releases_keep_all_inputs_of_a_delta_nets_convolution() -> None:
    name = "inputs of convolutions"
    assert step_lines("qwen3.5-4b", 16384, "@0.31.1")[name] == 2048 * 24 * 8192 * 2
    assert name not in step_lines("qwen3.5-4b", 16384, "@0.31.2")
    assert name not in step_lines("qwen3-4b", 16384, "@0.31.1")


def test_other_devices_are_refused(kvcalc: Any) -> None:
    failed = kvcalc("fit", "llama-3.1-8b", "--engine", "mlx", "--gpu", "h100")
    assert failed.status == 2
    assert "only Apple's devices are modelled" in failed.err
    assert "--gpu m3-ultra" in failed.err
