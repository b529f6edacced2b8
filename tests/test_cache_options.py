"""Memory and speed count the same cache: every option that changes its bytes, under every engine."""

from __future__ import annotations

from typing import Any

import pytest

import kvcalc
from kvcalc.engines import ENGINES, load_engine, resolve_kv_dtype
from kvcalc.engines.declarations import OPTIONS
from kvcalc.engines.llama_cpp.settings import LATENT, NO_V
from kvcalc.engines.options import ADAPTER_OPTIONS
from kvcalc.errors import KvcalcError
from kvcalc.memory.kv_cache import decode_read_bytes
from kvcalc.memory.workload import bind_workload, resolve_workload
from kvcalc.model.caches import CompressedAttention, CrossAttention, RecurrentState
from kvcalc.model.drafting import Speculation
from kvcalc.model.spec import all_caches
from kvcalc.question.question import Question
from kvcalc.server.case import make_case
from kvcalc.server.speed import Speed, speed_of
from kvcalc.throughput.hardware import find_devices
from tests.conftest import loaded, preset_names
from tests.documents import estimate

LLAMA, HYBRID, WINDOWS = "llama-3.1-8b", "qwen3-next-80b-a3b", "gemma-3-27b"
POOLS = f"tensorrt-llm@1.3.0rc28 {WINDOWS}"

Settings = dict[str, str]

# (engine, option) -> how a step reads other bytes: model, settings without the option, and with it.
READ: dict[tuple[str, str], tuple[str, Settings, Settings]] = {
    ("vllm", "kv-cache-dtype-skip-layers"): (LLAMA, {"kv-dtype": "fp8"}, {"kv-cache-dtype-skip-layers": "0,3"}),
    ("vllm", "mamba-cache-dtype"): (HYBRID, {}, {"mamba-cache-dtype": "float32"}),
    ("vllm", "mamba-ssm-cache-dtype"): (HYBRID, {}, {"mamba-ssm-cache-dtype": "float32"}),
    ("tensorrt-llm", "max-attention-window"): (POOLS, {}, {"max-attention-window": "512"}),
    ("llama.cpp", "cache-type-k"): (LLAMA, {}, {"cache-type-k": "q8_0"}),
    ("llama.cpp", "cache-type-v"): (LLAMA, {}, {"cache-type-v": "q4_0"}),
    ("llama.cpp", "before-pull"): ("deepseek-v2-lite", {}, {"before-pull": str(NO_V)}),
    ("mlx", "kv-bits"): (LLAMA, {}, {"kv-bits": "4"}),
    ("mlx", "kv-group-size"): (LLAMA, {"kv-bits": "4"}, {"kv-group-size": "32"}),
    ("mlx", "max-kv-size"): ("qwen3-8b", {}, {"max-kv-size": "4096"}),
}
DECODE = {"disaggregation-mode": "decode", "max-running-requests": "16"}
# (engine, option) -> the same if the bytes are reserved and no step reads them, and what they are.
RESERVED: dict[tuple[str, str], tuple[str, Settings, Settings, str]] = {
    ("vllm", "block-size"): (LLAMA, {}, {"block-size": "256"}, "blocks rounded up"),
    ("vllm", "max-num-batched-tokens"): (WINDOWS, {}, {"max-num-batched-tokens": "4096"}, "tokens beyond the window"),
    ("vllm", "no-async-scheduling"): (WINDOWS, {}, {"no-async-scheduling": ""}, "tokens beyond the window"),
    ("vllm", "disable-hybrid-kv-cache-manager"): (
        WINDOWS, {}, {"disable-hybrid-kv-cache-manager": ""}, "windows kept whole"),
    ("vllm", "no-enable-prefix-caching"): (HYBRID, {}, {"no-enable-prefix-caching": ""}, "states for prefixes"),
    ("vllm", "enable-prefix-caching"): (
        "vllm@0.19.0 " + HYBRID, {}, {"enable-prefix-caching": ""}, "states for prefixes"),
    ("vllm", "gdn-prefill-backend"): (HYBRID, {}, {"gdn-prefill-backend": "triton"}, "states for prefixes"),
    ("vllm", "mamba-cache-mode"): (
        "vllm@0.19.0 nemotron-h-56b", {"enable-prefix-caching": ""}, {"mamba-cache-mode": "align"},
        "states for prefixes"),
    ("vllm", "mamba-block-size"): (
        "vllm@0.19.0 nemotron-h-56b", {"mamba-cache-mode": "all", "enable-prefix-caching": ""},
        {"mamba-block-size": "4096"}, "states for prefixes"),
    ("vllm", "num-speculative-tokens"): (HYBRID, {}, {"num-speculative-tokens": "2"}, "states and layers for drafts"),
    ("sglang", "page-size"): (LLAMA, {}, {"page-size": "64"}, "pages rounded up"),
    ("sglang", "swa-full-tokens-ratio"): ("gpt-oss-20b", {}, {"swa-full-tokens-ratio": "0.5"}, "window pool"),
    ("sglang", "max-running-requests"): (LLAMA, {}, {"max-running-requests": "64"}, "request table"),
    ("sglang", "context-length"): (
        LLAMA, {"max-running-requests": "64"}, {"context-length": "40000"}, "request table"),
    ("sglang", "max-mamba-cache-size"): (HYBRID, {}, {"max-mamba-cache-size": "64"}, "states beyond the batch"),
    ("sglang", "mamba-radix-cache-strategy"): (
        HYBRID, {}, {"mamba-radix-cache-strategy": "no_buffer"}, "states for prefixes"),
    ("sglang", "disable-overlap-schedule"): (HYBRID, {}, {"disable-overlap-schedule": ""}, "states for prefixes"),
    ("sglang", "swa-prefix-tails"): ("deepseek-v4-flash", {}, {"swa-prefix-tails": "0"}, "windows of prefixes"),
    ("sglang", "disaggregation-mode"): (
        HYBRID, {"max-running-requests": "16"}, {"disaggregation-mode": "decode"}, "states beyond the batch"),
    ("sglang", "disaggregation-decode-extra-slots"): (
        HYBRID, DECODE, {"disaggregation-decode-extra-slots": "5"}, "states beyond the batch"),
    ("sglang", "disaggregation-decode-enable-radix-cache"): (
        HYBRID, DECODE, {"disaggregation-decode-enable-radix-cache": ""}, "states for prefixes"),
    ("sglang", "disable-radix-cache"): (HYBRID, {}, {"disable-radix-cache": ""}, "states for prefixes"),
    ("sglang", "speculative-num-draft-tokens"): (
        HYBRID, {}, {"speculative-num-draft-tokens": "4"}, "states for checking drafts"),
    ("sglang", "speculative-eagle-topk"): (
        HYBRID, {"speculative-num-draft-tokens": "4"}, {"speculative-eagle-topk": "4"}, "states for checking drafts"),
    ("sglang", "chunked-prefill-size"): ("deepseek-v4-flash", {}, {"chunked-prefill-size": "2048"}, "pool of windows"),
    ("tensorrt-llm", "tokens-per-block"): (LLAMA, {}, {"tokens-per-block": "128"}, "blocks rounded up"),
    ("tensorrt-llm", "max-batch-size"): (HYBRID, {}, {"max-batch-size": "64"}, "states beyond the batch"),
    ("tensorrt-llm", "avg-seq-len"): (POOLS, {}, {"avg-seq-len": "8k"}, "pools in a fixed proportion"),
    ("llama.cpp", "parallel"): (HYBRID, {}, {"parallel": "16"}, "slots beyond the batch"),
    ("llama.cpp", "kv-unified"): (WINDOWS, {"parallel": "12"}, {"kv-unified": ""}, "cells rounded up"),
    ("llama.cpp", "ubatch-size"): (WINDOWS, {}, {"ubatch-size": "2048"}, "cells beyond the window"),
    ("llama.cpp", "draft-max"): ("qwen3.6-27b", {}, {"draft-max": "2"}, "states for drafts"),
    ("llama.cpp", "swa-full"): (WINDOWS, {}, {"swa-full": ""}, "windows kept whole"),
    ("llama.cpp", "flash-attn"): ("mimo-v2-flash", {}, {"flash-attn": "off"}, "V padded to the widest layer's"),
    ("transformers", "cache"): ("mistral-7b-v0.1", {}, {"cache": "static"}, "the new token's own row of a window"),
}  # fmt: skip
# Options that divide the cache among devices, or put it in host memory: a step reads the same entries in other places.
PLACED = {
    "vllm": ("decode-context-parallel-size", "prefill-context-parallel-size", "pp-layer-partition"),
    "sglang": ("attn-cp-size",),
    "llama.cpp": ("tensor-split", "split-mode", "n-gpu-layers", "n-cpu-moe", "cpu-moe", "no-kv-offload"),
}
# Options that change no bytes of a batch's cache: they limit requests or memory, or describe the host.
NO_BYTES = {
    "vllm": (
        "gpu-memory-utilization", "max-num-seqs", "enforce-eager", "language-model-only", "skip-mm-profiling",
        "flashinfer-sampler", "graph-estimate", "max-loras", "max-lora-rank",
        "num-gpu-blocks-override", "no-enable-chunked-prefill", "cudagraph-mode", "performance-mode",
        "attention-backend",
    ),
    "sglang": (
        "mamba-full-memory-ratio", "mem-fraction-static", "max-loras-per-batch", "max-lora-rank", "max-total-tokens",
        "max-prefill-tokens", "schedule-conservativeness", "enable-mixed-chunk", "scheduler-recv-interval",
        "attention-backend",
    ),
    "tensorrt-llm": (
        "max-tokens", "free-gpu-memory-fraction", "max-num-tokens", "enable-chunked-prefill",
        "disable-overlap-scheduler", "enable-balance", "timeout-iters", "batching-wait-iters",
    ),
    "llama.cpp": ("fit-target", "fit-ctx", "host-memory", "host-bandwidth"),
    "mlx": ("prefill-step-size",),
}  # fmt: skip

# A batch of contexts that no block or page divides.
ASKED: dict[str, Any] = {"context_tokens": 30_001, "batch_size": 12}


def answer(engine: str, model: str, settings: Settings, **asked: Any) -> dict[str, Any]:
    """The document on a device that is large enough for any model, because nothing else has a time of a step."""
    named, _, model = model.rpartition(" ")
    devices = find_devices("m2-ultra" if engine == "mlx" else "h200")
    given = dict(settings)
    kv_dtype = given.pop("kv-dtype", "auto")
    return estimate(
        kvcalc.load_model(model), engine=named or engine, engine_settings=given, kv_dtype=kv_dtype,
        devices=devices._replace(gpu=devices.gpu._replace(memory_bytes=1 << 44)), **{**ASKED, **asked},
    )  # fmt: skip


def test_every_option_of_every_engine_is_in_one_of_these_tables() -> None:
    listed = [*READ, *RESERVED]
    listed += [(engine, name) for table in (PLACED, NO_BYTES) for engine, names in table.items() for name in names]
    declared = [(engine, option.name) for engine, options in OPTIONS.items() for option in options]
    assert not [*set(declared) - set(listed)], "these options are in none of the tables"
    assert sorted(listed) == sorted(declared)


@pytest.mark.parametrize(("engine", "option"), READ)
def test_a_step_reads_what_the_account_stores(engine: str, option: str) -> None:
    model, without, changed = READ[engine, option]
    before, after = (answer(engine, model, settings) for settings in (without, {**without, **changed}))
    held, read = (
        [document["kv_cache"][key] for document in (before, after)] for key in ("total_bytes", "decode_read_bytes")
    )
    seconds = [document["throughput"]["parts"]["kv_seconds"] for document in (before, after)]
    assert held[0] != held[1]
    assert (held[0] < held[1]) == (read[0] < read[1])
    assert read[0] != read[1]
    # A step at this length is bound by reading the cache, so its part has no share of the scores.
    assert seconds[1] / seconds[0] == pytest.approx(read[1] / read[0], rel=1e-12)


@pytest.mark.parametrize(("engine", "option"), RESERVED)
def test_what_is_only_reserved_takes_no_time(engine: str, option: str) -> None:
    model, without, changed, _ = RESERVED[engine, option]
    before, after = (answer(engine, model, settings) for settings in (without, {**without, **changed}))
    assert before["kv_cache"]["total_bytes"] != after["kv_cache"]["total_bytes"]
    assert before["kv_cache"]["decode_read_bytes"] == after["kv_cache"]["decode_read_bytes"]
    for key in ("parts", "decode_step_seconds", "roofline_decode_step_seconds"):
        assert before["throughput"][key] == after["throughput"][key]


@pytest.mark.parametrize(("engine", "names"), NO_BYTES.items(), ids=list(NO_BYTES))
def test_other_options_change_no_bytes(engine: str, names: tuple[str, ...]) -> None:
    values = {
        "gpu-memory-utilization": "0.8", "mem-fraction-static": "0.8", "free-gpu-memory-fraction": "0.8",
        "mamba-full-memory-ratio": "0.5", "max-num-seqs": "64", "max-loras": "2", "max-loras-per-batch": "2",
        "max-lora-rank": "32", "max-tokens": "1000000", "fit-target": "2048", "fit-ctx": "8192",
        "host-memory": "64GiB", "host-bandwidth": "100GB/s", "prefill-step-size": "4096",
        "num-gpu-blocks-override": "200000", "max-total-tokens": "1000000", "max-prefill-tokens": "8192",
        "schedule-conservativeness": "0.5", "scheduler-recv-interval": "10", "max-num-tokens": "4096",
        "cudagraph-mode": "piecewise", "performance-mode": "throughput", "flashinfer-sampler": "0",
        "graph-estimate": "0", "timeout-iters": "20", "batching-wait-iters": "5",
    }  # fmt: skip
    values["attention-backend"] = {"vllm": "TRITON_ATTN", "sglang": "triton"}.get(engine, "")
    more = {"no-enable-chunked-prefill": {"max-num-batched-tokens": "32768"}}
    for name in names:
        plain = answer(engine, LLAMA, more.get(name, {}))
        changed = answer(engine, LLAMA, {name: values.get(name, ""), **more.get(name, {})})
        for key in ("total_bytes", "decode_read_bytes"):
            assert changed["kv_cache"][key] == plain["kv_cache"][key], name
        if name not in ADAPTER_OPTIONS or engine != "vllm":
            assert changed["throughput"]["parts"] == plain["throughput"]["parts"], name


# Engine -> the types of its cache, and a model that has them. A word after the model is a setting.
TYPES: dict[tuple[str, str], tuple[str, ...]] = {
    ("logical", LLAMA): ("fp32", "fp8", "mxfp8", "nvfp4", "q8_0"),
    ("transformers", LLAMA): ("fp32",),
    ("vllm", LLAMA): (
        "fp8", "nvfp4", "int8_per_token_head", "fp8_per_token_head", "int4_per_token_head", "turboquant_k8v4",
        "turboquant_4bit_nc", "turboquant_k3v4_nc", "turboquant_3bit_nc",
    ),
    ("vllm", "deepseek-v3"): ("fp8",),
    ("sglang", LLAMA): ("fp8", "mxfp8", "nvfp4"),
    ("tensorrt-llm", LLAMA): ("fp8", "nvfp4"),
    ("llama.cpp", LLAMA): ("bf16", "fp32", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl"),
    ("mlx", LLAMA): ("fp32",),
}  # fmt: skip


@pytest.mark.parametrize(
    ("engine", "model", "dtype"), [(*key, dtype) for key, dtypes in TYPES.items() for dtype in dtypes]
)
def test_a_model_that_reads_every_token_reads_the_rows_that_it_holds(engine: str, model: str, dtype: str) -> None:
    """At a length that every block divides, and without pools beside the rows, the two are the same integer."""
    found = estimate(
        kvcalc.load_model(model), engine=engine, kv_dtype=dtype, context_tokens=32_768, batch_size=4,
        engine_settings={"parallel": "4"} if engine == "llama.cpp" else {},
    )["kv_cache"]  # fmt: skip
    # SGLang's pool has one row for padding. TurboQuant's blocks of all layers hold as many tokens, so pages are padded.
    if engine == "sglang":
        assert found["decode_read_bytes"] * (4 * 32_768 + 1) == found["total_bytes"] * 4 * 32_768
    elif not dtype.startswith("turboquant"):
        assert found["decode_read_bytes"] == found["total_bytes"]
    assert found["decode_read_bytes"] <= found["total_bytes"]


def test_all_layers_skipped_are_the_models_type_and_none_are_the_caches() -> None:
    every = ",".join(map(str, range(32)))
    own, fp8, skipped = (
        answer("vllm", LLAMA, settings)
        for settings in ({}, {"kv-dtype": "fp8"}, {"kv-dtype": "fp8", "kv-cache-dtype-skip-layers": every})
    )
    half = answer("vllm", LLAMA, {"kv-dtype": "fp8", "kv-cache-dtype-skip-layers": every[: every.index(",16")]})
    for key in ("total_bytes", "bytes_per_device", "decode_read_bytes"):
        assert skipped["kv_cache"][key] == own["kv_cache"][key]
    assert skipped["throughput"] == own["throughput"]
    assert half["kv_cache"]["decode_read_bytes"] * 4 == own["kv_cache"]["decode_read_bytes"] * 3
    assert fp8["kv_cache"]["decode_read_bytes"] * 2 == own["kv_cache"]["decode_read_bytes"]
    # Layers are skipped by number or by kind. A model without windows has none of that kind.
    none = answer("vllm", LLAMA, {"kv-dtype": "fp8", "kv-cache-dtype-skip-layers": "sliding_window"})
    assert none["kv_cache"]["decode_read_bytes"] == fp8["kv_cache"]["decode_read_bytes"]
    assert none["throughput"] == fp8["throughput"]


def test_the_layouts_of_sparse_attention_are_read_with_their_scales() -> None:
    spec = kvcalc.load_model("deepseek-v3.2")
    tokens, chosen = 100_000, 2048

    def read(engine: str, dtype: str) -> int:
        found = estimate(spec, engine=engine, kv_dtype=dtype, context_tokens=tokens)["kv_cache"]
        return int(found["decode_read_bytes"])

    # An index key has 128 elements in fp8 and an fp32 scale. FlashMLA's row has 656 bytes.
    keys = 61 * tokens * 132
    assert read("vllm", "bf16") == read("sglang", "bf16") == 61 * chosen * 576 * 2 + keys
    assert read("vllm", "fp8_ds_mla") == 61 * chosen * 656 + keys
    assert read("vllm", "nvfp4_ds_mla") == 61 * chosen * 352 + keys


def test_states_are_read_in_their_own_types() -> None:
    spec = kvcalc.load_model(HYBRID)
    (state,) = {cache for cache in all_caches(spec) if isinstance(cache, RecurrentState)}
    layers = sum(state in group.caches for group in spec.layers for _ in range(group.num_layers))
    inputs = state.conv_channels * (state.conv_kernel - 1)
    rows = 12 * 2 * 2 * 256 * 2 * 1000

    def read(engine: str, **settings: str) -> int:
        found = estimate(spec, engine=engine, context_tokens=1000, engine_settings=settings)["kv_cache"]
        return int(found["decode_read_bytes"])

    assert read("vllm") == rows + layers * 2 * (inputs + state.state_elements)
    assert read("sglang") == rows + layers * (2 * inputs + 4 * state.state_elements)
    assert read("llama.cpp") == rows + layers * 4 * (inputs + state.state_elements)
    # The inputs kept for drafts are not read.
    assert read("vllm", **{"num-speculative-tokens": "3"}) == read("vllm")


def test_heads_that_an_engine_keeps_for_a_latent_are_read() -> None:
    spec = kvcalc.load_model("deepseek-v3")
    found = [
        estimate(spec, engine="llama.cpp", context_tokens=1024, engine_settings=settings)["kv_cache"]
        for settings in ({"before-pull": str(LATENT)}, {"before-pull": str(NO_V)}, {})
    ]
    rows = (128 * (192 + 128), 576 + 512, 576)
    assert [cache["decode_read_bytes"] for cache in found] == [61 * 1024 * 2 * row for row in rows]


@pytest.mark.parametrize("engine", ENGINES)
def test_no_step_reads_more_than_an_engine_holds(engine: str) -> None:
    compared = 0
    for name in preset_names():
        model = loaded(name)
        try:
            dtype, _ = resolve_kv_dtype(engine, model, "auto")
            workload = resolve_workload(model, 5000, kv_dtype=dtype, encoder_tokens=None)
            spec = bind_workload(model, workload)
            rules = load_engine(engine, spec)
            held = rules.replica_bytes(spec, workload.kv_dtype, 5000)
        except KvcalcError:
            continue
        read = rules.reads(spec, workload.kv_dtype).bytes_at(5000)
        if engine == "transformers":
            # The new token's row completes a window, and is not in the cache before.
            held = rules.replica_bytes(spec, workload.kv_dtype, 5001) if not model.is_encoder else held
            held = max(held, decode_read_bytes(spec, workload.kv_dtype, 5000))
        if engine == "llama.cpp" and any(isinstance(cache, CrossAttention) for cache in all_caches(spec)):
            continue  # K and V of the encoder's output are computed at every step
        if any(isinstance(cache, CompressedAttention) and cache.readers > 1 for cache in all_caches(spec)):
            continue  # several layers read the entries of one
        assert read <= held, name
        compared += 1
    assert compared > 60


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_the_curve_is_the_sum_of_the_entries(engine: str) -> None:
    for name in (LLAMA, HYBRID, WINDOWS, "deepseek-v3.2", "deepseek-v4-flash"):
        model = loaded(name)
        workload = resolve_workload(model, 5000, kv_dtype=resolve_kv_dtype(engine, model, "auto")[0])
        spec = bind_workload(model, workload)
        reads = load_engine(engine, spec).reads(spec, workload.kv_dtype)
        is_compressed = any(isinstance(cache, CompressedAttention) for cache in all_caches(spec))
        assert (reads.curve is None) == is_compressed
        for tokens in (1, 1023, 1024, 1025, 2048, 2049, 100_000):
            assert reads.bytes_at(tokens) == sum(each.bytes_at(tokens) for each in reads.entries)


def test_a_drafter_reads_the_type_of_its_own_layers() -> None:
    """Only the model's layers are skipped, so the drafter's cache stays in fp8, as in the account."""
    every = {"kv-cache-dtype-skip-layers": ",".join(map(str, range(32)))}
    drafts = Speculation("eagle", 2, 2.0)

    def drafted(kv_dtype: str, settings: Settings) -> dict[str, Any]:
        return answer("vllm", LLAMA, {"kv-dtype": kv_dtype, **settings}, speculative=drafts)

    own, fp8, skipped = drafted("auto", {}), drafted("fp8", {}), drafted("fp8", every)
    row = 12 * 30_001 * 2 * 8 * 128
    assert own["kv_cache"]["decode_read_bytes"] == row * 33 * 2
    assert fp8["kv_cache"]["decode_read_bytes"] == row * 33
    assert skipped["kv_cache"]["decode_read_bytes"] == row * (32 * 2 + 1)
    steps = [document["throughput"]["decode_step_seconds"] for document in (fp8, skipped, own)]
    assert steps == sorted(steps)
    assert len(set(steps)) == 3


def test_answers_do_not_depend_on_the_settings_asked_before() -> None:
    spec = kvcalc.load_model(HYBRID)
    devices = find_devices("h200x4")

    def step(settings: Settings) -> float:
        found = estimate(spec, engine="vllm", engine_settings=settings, devices=devices, **ASKED)
        return float(found["throughput"]["decode_step_seconds"])

    wide = {"mamba-ssm-cache-dtype": "float32"}
    first = step({}), step(wide), step({}), step(wide)
    assert first[0] == first[2] < first[1] == first[3]


def test_a_cache_in_host_memory_is_read_there_in_its_own_types() -> None:
    plain, quantized = (
        answer("llama.cpp", LLAMA, {"no-kv-offload": "", **settings})
        for settings in ({}, {"cache-type-k": "q8_0", "cache-type-v": "q8_0"})
    )
    read = [document["kv_cache"]["decode_read_bytes"] for document in (plain, quantized)]
    seconds = [document["throughput"]["parts"]["kv_seconds"] for document in (plain, quantized)]
    assert read[1] * 32 == read[0] // 2 * 34
    assert seconds[1] / seconds[0] == pytest.approx(read[1] / read[0], rel=1e-12)


def test_ranks_that_divide_the_tokens_each_read_their_part() -> None:
    spec, sizes = kvcalc.load_model("deepseek-v3"), {}
    for ranks in (1, 4):
        asked = Question(
            spec, 40_000, engine="vllm", tensor_parallel_size=8, devices=find_devices("h200x8"),
            engine_settings={"decode-context-parallel-size": str(ranks)},
        )  # fmt: skip
        found = speed_of(make_case(asked), [])
        assert isinstance(found, Speed)
        sizes[ranks] = found.model.counts.kv_read_bytes(40_000)
    assert sizes == {1: 61 * 576 * 2 * 40_000, 4: 61 * 576 * 2 * 10_000}


def test_a_sweep_has_the_reads_and_the_step_of_an_estimate() -> None:
    skip = {"kv-cache-dtype-skip-layers": "0,1,2,3"}
    one = answer("vllm", LLAMA, {"kv-dtype": "fp8", **skip})
    rows = kvcalc.sweep(
        kvcalc.load_model(LLAMA), contexts=[30_001], batches=[12], kv_dtypes=["fp8"], engines=["vllm"],
        engine_settings=skip, gpus=["h200"],
    )["points"]  # fmt: skip
    assert rows[0]["decode_read_bytes"] == one["kv_cache"]["decode_read_bytes"]
    assert rows[0]["decode_step_seconds"] == one["throughput"]["decode_step_seconds"]
