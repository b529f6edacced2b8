"""The memory that engines do not give to the cache: each line computed by hand, and settings out of range."""

from __future__ import annotations

from math import ceil
from typing import Any

import pytest

from kvcalc.engines import engine_class, load_engine, reserve_of
from kvcalc.engines.reserve import GIB, MIB, ReserveInputs
from kvcalc.engines.sglang.settings import steps_by_memory
from kvcalc.errors import UsageError
from kvcalc.memory.sharding import Width
from kvcalc.model.layout import Layout
from kvcalc.model.resolve import load_model
from kvcalc.model.towers.image_rule import ImageRule
from kvcalc.releases import Release, release_of
from kvcalc.throughput.hardware import find_devices
from tests.documents import estimate

LLAMA = load_model("llama-3-8b")
LLAMA_8B = Width(3 * 14336, 4096, 128256, 32, False)
LLAMA_2_7B = Width(3 * 11008, 4096, 32000, 32, False)
MEMORY = 80 * GIB


def ask(engine: str, width: Width = LLAMA_8B, **changes: Any) -> Any:
    question = ReserveInputs(MEMORY, width, Layout(), 4096, 1, {})
    settings = {
        **engine_class(engine).device_settings(
            changes.get("memory_bytes", MEMORY), "h100-sxm", "hopper", changes.get("release"), {}
        ),
        **changes.pop("settings", {}),
    }
    return reserve_of(load_engine(engine, LLAMA), question._replace(settings=settings, **changes))


def lines(found: Any) -> dict[str, int]:
    return {part.name: part.bytes for part in found.held}


def test_logical_keeps_a_tenth() -> None:
    assert lines(ask("logical")) == {"reserved (10 %)": 8 * GIB}


def test_vllm_of_today() -> None:
    # 1,024 requests sample with 6 bytes per logit, while three rows of 4,096 of 8,192 tokens stay. A step of 8,192
    # tokens has four rows of 4,096 and three of 14,336. An element has 2 bytes. Each request also has 4 bytes and a bit
    # for every token of the vocabulary.
    peak = 1024 * 128256 * 6 + 8192 * 3 * 4096 * 2
    assert peak > 8192 * (4 * 4096 + 3 * 14336) * 2
    # The copy of the embedding while the code is compiled is larger.
    peak = max(peak, 128256 * 4096 * 2)
    assert lines(ask("vllm")) == {
        "unused share (1 - 0.92)": MEMORY - ceil(MEMORY * 0.92),
        "activations of 8,192 tokens": peak,
        "CUDA context": 256 * MIB,
        "counts of tokens by request": 1024 * 128256 * 33 // 8,
        "CUDA graphs": 32 * 12 * MIB,
    }


@pytest.mark.parametrize(
    ("release", "changes", "is_second", "has_graphs"),
    [
        ("0.24.0", {}, False, True),
        ("0.25.0", {}, True, False),
        ("0.28.0", {}, True, False),
        ("0.28.0", {"has_states": True}, False, True),
        ("0.28.0", {"width": LLAMA_8B._replace(has_experts=True)}, False, True),
        ("0.29.0", {"has_states": True}, True, True),
    ],
)
def test_vllms_second_runner_by_release(
    release: str, changes: dict[str, Any], is_second: bool, has_graphs: bool
) -> None:
    """use_v2_model_runner (config/vllm.py), and profile_cudagraph_memory, which returns 0 before 0.29."""
    found = lines(ask("vllm", release=release_of(f"vllm@{release}"), **changes))
    assert ("counts of tokens by request" in found) == is_second
    assert ("CUDA graphs" in found) == has_graphs


def test_vllm_checks_drafts_while_its_first_runner_samples() -> None:
    peaks = {
        (release, method): lines(ask("vllm", release=release_of(f"vllm@{release}"), drafts_by=method))[
            "activations of 8,192 tokens"
        ]
        for release in ("0.20.0", "0.33.0")
        for method in (None, "mtp")
    }
    assert peaks["0.20.0", "mtp"] - peaks["0.20.0", None] == 1024 * 128256 * 10
    # The drafts' logits are at the low end too.
    width = LLAMA_8B._replace(vocab_size=262_144)
    low, drafted = (
        ask("vllm", width, release=Release.of(0, 16), drafts_by=method).held[1].low for method in (None, "mtp")
    )
    assert drafted - low == pytest.approx(0.74 * 1024 * 262_144 * 10)
    assert peaks["0.33.0", "mtp"] == peaks["0.33.0", None]


def test_vllms_second_runner_takes_no_images_before_0_27() -> None:
    images = ImageRule(lambda width, height: 1, 16384, 4, 1280, 3 * 3420, 7)
    for release, has_states, held in (("0.26.0", False, 0), ("0.26.0", True, 1), ("0.27.0", False, 1)):
        found = lines(ask("vllm", release=release_of(f"vllm@{release}"), images=images, has_states=has_states))
        assert sum(name.startswith("encoder cache") for name in found) == held


def test_the_low_end_of_a_shared_context_is_that_of_other_devices() -> None:
    found = next(part for part in ask("vllm", shares_memory=True).held if part.name == "CUDA context")
    assert (found.bytes, found.low) == (4096 * MIB, 256 * MIB)


def test_vllm_where_the_layer_is_the_peak() -> None:
    found = lines(ask("vllm", LLAMA_2_7B))
    assert found["activations of 8,192 tokens"] == 8192 * (4 * 4096 + 3 * 11008) * 2


def test_vllm_before_it_counted_graphs() -> None:
    found = ask("vllm", release=Release.of(0, 8, 1))
    assert lines(found)["unused share (1 - 0.9)"] == MEMORY - ceil(MEMORY * 0.9)
    assert "CUDA graphs" not in lines(found)
    assert lines(found)["activations of 8,192 tokens"] == 1024 * 128256 * 39 + 8192 * 3 * 4096 * 2
    assert found.settings["gpu_memory_utilization"] == 0.9


def test_vllm_settings() -> None:
    found = ask(
        "vllm",
        settings={"gpu-memory-utilization": "0.5", "max-num-seqs": "8", "enforce-eager": "true"},
        layout=Layout(1, 4),
    )
    assert lines(found) == {
        "unused share (1 - 0.5)": MEMORY // 2,
        "activations of 8,192 tokens": 8192 * (4 * 4096 + 3 * 14336) * 2,
        "CUDA context": 256 * MIB,
        "NCCL buffers": 1843 * MIB,
        "counts of tokens by request": 8 * 128256 * 33 // 8,
    }


def test_vllm_has_fewer_buffers_without_fast_links() -> None:
    assert lines(ask("vllm", layout=Layout(1, 2), has_fast_links=False))["NCCL buffers"] == 704 * MIB
    old = Release.of(0, 10)
    assert lines(ask("vllm", layout=Layout(1, 2), release=old))["NCCL buffers"] == 704 * MIB
    assert "NCCL buffers" not in lines(ask("vllm", layout=Layout(1, 2), has_fast_links=False, release=old))


def test_vllm_captures_fewer_graphs_for_fewer_requests() -> None:
    # 16 requests capture 1, 2, 4, 8, 16, 24 and 32.
    found = lines(ask("vllm", settings={"max-num-seqs": "16"}))
    assert found["CUDA graphs"] == 32 * 12 * MIB * 7 // 51


@pytest.mark.parametrize(
    ("release", "sizes", "settings", "device_class"),
    [
        # 8 requests with 6 drafts: 112 tokens (max_cudagraph_capture_size of a log of 0.20.2). With 3 drafts: 64.
        ("0.20.0", 3 + 14, {"max-num-seqs": "8", "num-speculative-tokens": "6"}, None),
        ("0.20.0", 3 + 8, {"max-num-seqs": "8", "num-speculative-tokens": "3"}, None),
        # 0.29 and later also have the tokens of 1, 2, 4 and 8 requests: 7, 14, 28 and 56, of which 56 is there.
        ("0.29.0", 3 + 14 + 3, {"max-num-seqs": "8", "num-speculative-tokens": "6"}, None),
        # 20 requests, which no stride has.
        ("0.28.0", 3 + 5, {"max-num-seqs": "20"}, None),
        ("0.29.0", 3 + 5 + 1, {"max-num-seqs": "20"}, None),
        # A step of 100 tokens is captured since 0.20.1.
        ("0.20.0", 3 + 12, {"max-num-batched-tokens": "100", "max-num-seqs": "64"}, None),
        ("0.20.1", 3 + 12 + 1, {"max-num-batched-tokens": "100", "max-num-seqs": "64"}, None),
        ("0.28.0", 32 + 27 + 17, {"performance-mode": "interactivity"}, None),
        # 10 tokens: every size up to it. Others capture 1, 2, 4 and 8.
        ("0.28.0", 10, {"performance-mode": "interactivity", "max-num-seqs": "5"}, None),
        ("0.28.0", 4, {"max-num-seqs": "5"}, None),
        ("0.27.0", 51, {}, "blackwell"),
        ("0.28.0", 51 + 32, {}, "blackwell"),
    ],
)
def test_vllm_captures_graphs_by_release(
    release: str, sizes: int, settings: dict[str, str], device_class: str | None
) -> None:
    asked: dict[str, Any] = {"release": release_of(f"vllm@{release}"), "device_class": device_class}
    found = lines(ask("vllm", settings=settings, has_states=True, **asked))
    assert found["CUDA graphs"] == 410 * MIB + 32 * 5 * MIB * sizes // 51


def test_vllm_doubles_its_defaults_for_throughput() -> None:
    """performance_mode, engine/arg_utils.py of vLLM 0.17.0 to 0.33.0. What is given stays."""
    found = engine_class("vllm").device_settings(
        80 * GIB, "h100-sxm", "hopper", None, {"performance-mode": "throughput"}
    )
    assert (found["max-num-batched-tokens"], found["max-num-seqs"]) == ("16384", "2048")
    given = {"performance-mode": "throughput", "max-num-batched-tokens": "1024"}
    assert engine_class("vllm").device_settings(80 * GIB, "h100-sxm", "hopper", None, given)["max-num-seqs"] == "1024"


def test_vllm_profiles_the_vision_tower() -> None:
    images = ImageRule(lambda width, height: 1, 16384, 4, 1280, 3 * 3420, 7)
    short = ask("vllm", context_tokens=32768, images=images, settings={"max-num-seqs": "8"})
    assert short.varies
    # 32,768 tokens are a video of twice the tokens of an image.
    assert lines(short)["encoder cache of 32,768 tokens"] == 32768 * 4096 * 2
    assert lines(short)["activations of 8,192 tokens"] == 32768 * 4 * (4 * 1280 + 3 * 3420) * 2
    assert "encoder cache of 114,688 tokens" in lines(ask("vllm", context_tokens=2**20, images=images))


def test_vllm_keeps_the_rows_of_deepstack_and_long_videos_of_old_releases() -> None:
    """qwen3_vl.py of vLLM: torch.cat of the levels (0.11.0 and 0.33.0); videos of 12.5 x 12,288 tokens before 0.13."""
    images = ImageRule(lambda width, height: 1, 16384, 4, 1152, 2 * 4304, rows=4)
    assert lines(ask("vllm", images=images))["encoder cache of 16,384 tokens"] == 16384 * 4 * 4096 * 2
    old = lines(ask("vllm", images=images, release=Release.of(0, 12)))
    assert old["encoder cache of 153,600 tokens"] == 153_600 * 4 * 4096 * 2
    for release in (Release.of(0, 13), Release.of(0, 10)):
        assert "encoder cache of 16,384 tokens" in lines(ask("vllm", images=images, release=release))
    assert "encoder cache of 153,600 tokens" in lines(ask("vllm", images=images, release=Release.of(0, 11)))
    assert "encoder cache of 16,384 tokens" in lines(
        ask("vllm", images=images._replace(rows=1), release=Release.of(0, 12))
    )


def test_vllm_gathers_latents_for_sparse_attention() -> None:
    name = "sparse attention workspace"
    assert lines(ask("vllm", has_sparse_latent=True, context_tokens=8192))[name] == 5 * 8192 * 1152
    assert lines(ask("vllm", has_sparse_latent=True, context_tokens=2**18))[name] == 5 * 2**18 * 1152
    long: dict[str, Any] = {"has_sparse_latent": True, "context_tokens": 2**19}
    assert lines(ask("vllm", **long))[name] == 2 * 2**19 * 1152
    assert lines(ask("vllm", **{**long, "context_tokens": 2**18 + 1}))[name] == 2 * (2**18 + 1) * 1152
    for minor, factor in ((27, 5), (32, 5), (33, 2)):
        assert lines(ask("vllm", **long, release=Release.of(0, minor)))[name] == factor * 2**19 * 1152


def test_estimated_parts_of_vllm_have_a_range() -> None:
    share, *others = ask("vllm", layout=Layout(1, 2)).held
    assert share.low == share.high == share.bytes
    for part in others:
        assert part.low is not None
        assert part.high is not None
        assert part.low < part.bytes < part.high


@pytest.mark.parametrize(
    ("memory", "name", "kind", "tokens", "requests", "prefill"),
    [(24, "rtx-4090", "ada", 2048, 256, "triton"), (80, "a100-sxm-80gb", "ampere", 2048, 256, "triton"),
     (80, "h100-sxm", "hopper", 8192, 1024, "flashinfer"), (119, "gb10", "blackwell-rtx", 2048, 256, "flashinfer"),
     (178, "b200-sxm", "blackwell", 16384, 1024, "flashinfer"), (192, "mi300x", "cdna3", 16384, 1024, "triton")],
)  # fmt: skip
def test_vllm_takes_its_step_and_its_prefill_from_the_device(
    memory: int, name: str, kind: str, tokens: int, requests: int, prefill: str
) -> None:
    found = engine_class("vllm").device_settings(memory * GIB, name, kind, None, {})
    sizes = {"max-num-batched-tokens": str(tokens), "max-num-seqs": str(requests)}
    assert found == {**sizes, "gdn-prefill-backend": prefill}


def test_vllm_has_larger_blocks_on_gpus_of_intel() -> None:
    """platforms/xpu.py of 0.9.1, 0.9.2 and 0.19.1; get_preferred_block_size (flash_attn.py) of 0.20.0 and 0.31.0."""

    def has(release: str, model: str = "llama-3.1-8b") -> bool:
        place = 12 * GIB, "arc-b580", "xe2", release_of(f"vllm@{release}")
        return engine_class("vllm").device_settings(*place, {}, load_model(model)).get("block-size") == "64"

    assert has("0.33")
    assert has("0.31")
    assert has("0.9.2")
    assert not has("0.9.1")
    assert (has("0.19", "deepseek-v2-lite"), has("0.20", "deepseek-v2-lite")) == (True, False)
    assert has("0.32", "qwen3.5-9b")


def test_gemma_4_on_two_arc_pro_b70() -> None:
    """A branch of vLLM of May 2026, with drafts that keep nothing: 10.12 GiB are 2,072 blocks and 169,314 tokens."""
    found = estimate(
        "gemma-4-31b", context_tokens=163_840, engine="vllm@0.21", kv_memory_bytes=int(10.12 * GIB),
        tensor_parallel_size=2, engine_settings={"block-size": "64", "max-num-batched-tokens": "8192"},
    )["engine"]  # fmt: skip
    assert found["kv_cache_tokens"] == 169_314


def test_every_dp_rank_gathers_the_tokens_of_the_others() -> None:
    one = ReserveInputs(MEMORY, LLAMA_8B, Layout(), 4096, 1, {})
    for replicas in (1, 2, 8):
        found = one._replace(layout=Layout(1, 1, replicas)).step_activations(1000)
        assert found - one.step_activations(1000) == 1000 * (replicas - 1) * 4096 * 2


def test_sglang_default_share() -> None:
    # 81,920 MiB: 512 + 1.5 x 8,192 + 1/8 x 1,024 + 2 x 256 + 8 x the number of prefill sizes up to 8,192, which is
    # 8 + 14 + 8 + 8 + 12 + 8 = 58.
    reserved = 512 + 1.5 * 8192 + 128 + 2 * 256 + 8 * 58
    share = round((81920 - reserved) / 81920, 3)
    found = ask("sglang")
    assert found.settings == {"mem_fraction_static": share}
    free = MEMORY - 640 * MIB
    assert lines(found)[f"activations and graphs (1 - {share:g})"] == free - int(free * share)


def test_sglang_default_share_follows_the_step_and_the_requests() -> None:
    # A log of SGLang on an RTX 5090 (32,607 MiB) with decode graphs of up to 32 requests chose 0.778 itself: a step has
    # 4,096 tokens there, and 50 prefill sizes are captured.
    row = {"chunked-prefill-size": "4096", "max-running-requests": "32"}
    assert ask("sglang", settings=row, memory_bytes=32607 * MIB).settings == {"mem_fraction_static": 0.778}
    # A step of 2,048 tokens or fewer counts as 2,048, and has 38 sizes.
    reserved = 512 + 1.5 * 2048 + 128 + 2 * 32 + 8 * 42
    small = ask("sglang", settings={**row, "chunked-prefill-size": "2048"}, memory_bytes=32607 * MIB)
    assert small.settings == {"mem_fraction_static": round((32607 - reserved) / 32607, 3)}


@pytest.mark.parametrize(
    ("vision", "factor"),
    [({"num_hidden_layers": 27, "hidden_size": 1152}, 0.95 * (1 - 0.1 * (27 * 1152**2 / (24 * 1024**2) - 1))),
     ({"depth": 32, "hidden_size": 1280}, 0.95 * (1 - 0.1 * (1280**2 / 1024**2 - 1))),
     ({"num_hidden_layers": 2, "hidden_size": 64}, 0.95 * 1.05), ({"hidden_size": 8192}, 0.95 * 0.8), ({}, 0.95)],
)  # fmt: skip
def test_sglang_keeps_more_free_for_a_vision_tower(vision: dict[str, int], factor: float) -> None:
    text = ask("sglang").settings["mem_fraction_static"]
    found = ask("sglang", multimodal={"vision_config": vision})
    assert found.settings["mem_fraction_static"] == pytest.approx(text * factor, abs=1e-5)
    assert lines(found)["embeddings of images"] == 100 * MIB
    # Audio alone leaves the share as it is.
    assert ask("sglang", multimodal={"audio_config": {}}).settings["mem_fraction_static"] == text


def test_sglang_counts_the_driver_and_the_host_before_it_loads() -> None:
    assert lines(ask("sglang", layout=Layout(1, 4), has_fast_links=False)).keys() & {"NCCL buffers"} == set()
    assert lines(ask("sglang", shares_memory=True))["CUDA context"] == 10 * GIB
    for part in ask("sglang", layout=Layout(1, 2), multimodal={}).held:
        assert part.low is not None
        assert part.high is not None
        is_estimated = part.name in ("CUDA context", "NCCL buffers")
        assert (part.low < part.bytes < part.high) if is_estimated else part.low == part.bytes == part.high


@pytest.mark.parametrize(
    ("release", "sampler", "device_class", "logit", "low"),
    [
        ("0.7.3", None, "hopper", 39, 39),
        ("0.8.5", None, "hopper", 39, 10),
        ("0.11.0", None, "ada", 39, 10),
        ("0.11.0", None, "volta", 39, 39),
        ("0.11.0", None, "cdna3", 39, 39),
        ("0.11.0", "1", "hopper", 10, 10),
        ("0.11.0", "0", "hopper", 39, 39),
        ("0.11.1", None, "hopper", 39, 10),
        ("0.16", "1", "hopper", 10, 10),
        ("0.17", None, "hopper", 14, 14),
        ("0.20", None, "hopper", 14, 14),
        ("0.21", None, "hopper", 10, 10),
        ("0.24", "0", "hopper", 14, 14),
        ("0.24", None, "cdna3", 14, 14),
    ],
)
def test_what_vllm_takes_for_each_logit(
    release: str, sampler: str | None, device_class: str, logit: int, low: int
) -> None:
    """By release, device and VLLM_USE_FLASHINFER_SAMPLER. Before 0.17, the low end is FlashInfer's if nobody says it.

    Three rows of each of 8,192 tokens stay. With 262,144 words, sampling is the peak in any case.
    """
    width = LLAMA_8B._replace(vocab_size=262_144, has_experts=True)
    step = {"max-num-batched-tokens": "8192", "max-num-seqs": "1024"}
    step |= {} if sampler is None else {"flashinfer-sampler": sampler}
    found = ask("vllm", width, release=release_of(f"vllm@{release}"), settings=step, device_class=device_class).held[1]
    rows = 8192 * (3 * 4096 + width.module_elements) * 2
    assert found.bytes == 1024 * 262_144 * logit + rows
    assert found.low == int(0.74 * (1024 * 262_144 * low + rows))


def test_the_parts_of_vllms_peak() -> None:
    """DP ranks gather each other's tokens in a layer. The workspaces of experts stay while the step samples."""
    name = "activations of 8,192 tokens"
    ranks = lines(ask("vllm", LLAMA_2_7B, layout=Layout(1, 1, 4)))[name]
    assert ranks == 8192 * (4 * 4096 + 3 * 4096 + 3 * 11008) * 2
    experts = lines(ask("vllm", LLAMA_8B._replace(has_experts=True)))[name]
    assert experts == 1024 * 128256 * 6 + 8192 * (3 * 4096 + 3 * 14336) * 2
    # Tensor-parallel ranks divide the inner values of the vision tower, and not its rows.
    images = ImageRule(lambda width, height: 1, 16384, 4, 1280, 3 * 3421)
    tower = lines(ask("vllm", images=images, layout=Layout(2), settings={"max-num-seqs": "8"}))[name]
    assert tower == 16384 * 4 * (4 * 1280 + 5132) * 2


def test_vllms_reserve_varies_with_the_context_for_videos_and_sparse_attention() -> None:
    """A video of the context's length is profiled, and a sparse prefill gathers the latents of a whole context."""
    images = ImageRule(lambda width, height: 1, 16384, 4, 1280, 3 * 3420)
    assert not ask("vllm").varies
    assert not ask("vllm", images=images).varies
    assert ask("vllm", images=images._replace(most_frames=2)).varies
    assert ask("vllm", has_sparse_latent=True).varies


def test_vllms_graphs_of_experts_and_its_all_reduce_by_release() -> None:
    experts = lines(ask("vllm", LLAMA_8B._replace(has_experts=True)))
    assert experts["CUDA graphs"] == 32 * 20 * MIB
    buffers = [
        lines(ask("vllm", layout=Layout(1, 2), release=release_of(f"vllm@{name}"))) for name in ("0.16", "0.17", "0.33")
    ]
    assert [found["NCCL buffers"] for found in buffers] == [704 * MIB, 1843 * MIB, 1843 * MIB]


def test_the_range_of_vllms_parts_is_the_one_that_the_manual_states() -> None:
    """docs/guides/fit.md: 0.74 to 1.37, from the logs of benchmarks/fit/vllm_memory.tsv (benchmarks/fit/reserve.py)."""
    eager = ask("vllm", settings={"enforce-eager": "", "max-num-seqs": "8"}, layout=Layout(1, 2)).held[1:]
    for part in (*eager, *ask("vllm", layout=Layout(1, 2)).held[2:]):
        assert (part.low, part.high) == pytest.approx((0.74 * part.bytes, 1.37 * part.bytes)), part.name


# vLLM 0.26 and 0.28 print a peak of 1.04 GiB for Qwen2.5-7B-Instruct-AWQ, whose embedding is 1.02 GiB.
QWEN_7B = Width(3 * 18944, 3584, 152064, 28, False)
EMBEDDING = 152064 * 3584 * 2
SMALL_STEP = {"max-num-batched-tokens": "2048", "max-num-seqs": "256"}


def test_a_first_start_of_vllm_holds_a_copy_of_the_embedding() -> None:
    def activations(**changes: Any) -> Any:
        asked = {"settings": SMALL_STEP, "release": Release.of(0, 28), **changes}
        return ask("vllm", QWEN_7B, **asked).held[1]

    found = activations()
    assert found.bytes == EMBEDDING
    # A start that finds the compiled code has the smaller peak, and some starts keep a further copy.
    step = 2048 * (4 * 3584 + 3 * 18944) * 2
    assert (found.low, found.high) == (int(0.74 * step), ceil(1.37 * EMBEDDING) + EMBEDDING)
    assert activations(layout=Layout(2)).bytes == EMBEDDING // 2
    others: tuple[dict[str, Any], ...] = (
        {"settings": {**SMALL_STEP, "enforce-eager": ""}},
        {"multimodal": {"vision_config": {}}},
        {"release": Release.of(0, 16), "settings": {**SMALL_STEP, "max-num-seqs": "8"}},
    )
    for changes in others:
        other = activations(**changes)
        assert (other.bytes, other.high) == (step, ceil(1.37 * step)), changes
    text = {**SMALL_STEP, "language-model-only": ""}
    assert activations(multimodal={"vision_config": {}}, settings=text).bytes == EMBEDDING
    # Between, only the high end has it.
    older = activations(release=Release.of(0, 20), settings={**SMALL_STEP, "max-num-seqs": "8"})
    assert (older.bytes, older.high) == (step, ceil(1.37 * step) + EMBEDDING)


def test_streams_of_hyper_connections_are_whole_on_every_rank() -> None:
    """DeepSeek-V4-Flash on GB10: 5.30 GiB for 8,224 tokens, 1.39 GiB for 2,048."""
    flash = Width(65536, 4096, 129280, 43, True, streams=4)
    settings = {"max-num-batched-tokens": "8192", "max-num-seqs": "4", "enforce-eager": ""}
    for ranks, device_class, rows in ((1, "ampere", 19), (4, "ampere", 19), (1, "blackwell", 12)):
        found = ask("vllm", flash, settings=settings, layout=Layout(ranks), device_class=device_class)
        assert found.held[1].bytes == 8192 * rows * 4 * 4096 * 2


def test_a_prefill_of_delta_nets_takes_more_than_their_mlps() -> None:
    """219 KB a token of Qwen3.6-27B with Triton's kernels, where its MLP takes 145 KB."""
    spec = load_model("qwen3.6-27b")
    width = Width(3 * 17408, 5120, 248320, 64, False)
    settings = {"max-num-batched-tokens": "65536", "max-num-seqs": "8", "enforce-eager": ""}
    sizes = {
        kernel: ask("vllm", width, settings={**settings, "gdn-prefill-backend": kernel}, spec=spec, has_states=True)
        .held[1].bytes
        for kernel in ("triton", "flashinfer")
    }  # fmt: skip
    # Four rows of 16 x 2 x 128 + 48 x 128 channels and three of 48 x 128 values; for each of 48 heads 64 + 128 elements
    # and a 64th of its state; three more rows of values.
    triton = 4 * 10240 + 3 * 6144 + 48 * (64 + 128 + 256) + 3 * 6144
    assert sizes["triton"] == 65536 * 2 * (2 * 5120 + triton)
    assert sizes["flashinfer"] == 65536 * 2 * (4 * 5120 + 3 * 17408)


def test_rtx_blackwell_prefills_delta_nets_with_triton_before_0_30() -> None:
    for release, kernel in ((Release.of(0, 29), "triton"), (Release.of(0, 30), "flashinfer"), (None, "flashinfer")):
        found = engine_class("vllm").device_settings(32 * GIB, "rtx-5090", "blackwell-rtx", release, {})
        assert found["gdn-prefill-backend"] == kernel


def test_the_first_graphs_of_models_with_states_keep_more() -> None:
    """0.61 GiB for Qwen3.6-27B with five sizes."""
    found = lines(ask("vllm", settings={"max-num-seqs": "8"}, has_states=True, release=Release.of(0, 23)))
    assert found["CUDA graphs"] == 410 * MIB + 32 * 5 * MIB * 5 // 51


def test_the_step_of_the_first_graph_counts_the_kernels_of_delta_nets() -> None:
    """0.89 GiB with 8,192 tokens for Qwen3.8-27B, vLLM 0.27."""
    spec, width = load_model("qwen3.5-27b"), Width(3 * 17408, 5120, 248320, 64, False)
    sizes = {}
    for tokens in (8192, 3072):
        settings = {
            "max-num-batched-tokens": str(tokens), "max-num-seqs": "256", "gdn-prefill-backend": "triton"
        }  # fmt: skip
        found = lines(ask("vllm", width, settings=settings, spec=spec, has_states=True, release=Release.of(0, 27)))
        sizes[tokens] = found["CUDA graphs"]
    assert sizes[8192] / GIB == pytest.approx(0.89, rel=0.05)
    assert sizes[3072] == (410 + 64 * 5) * MIB


def test_devices_of_amd_that_share_memory_have_a_small_context() -> None:
    """51.66 GiB consumed on a Ryzen AI Max, of which 51.1 are weights; its step has 2,048 tokens."""
    assert lines(ask("vllm", shares_memory=True, is_amd=True))["CUDA context"] == 576 * MIB
    found = engine_class("vllm").device_settings(80 * GIB, "ryzen-ai-max-395", None, Release.of(0, 28), {})
    assert (found["max-num-batched-tokens"], found["max-num-seqs"]) == ("2048", "256")


def test_no_memory_is_kept_for_images_that_are_not_profiled() -> None:
    images = ImageRule(lambda width, height: 1, 16384, 4, 1280, 3 * 3420, 7)
    with_images, without = (
        lines(ask("vllm", images=images, settings=settings)) for settings in ({}, {"skip-mm-profiling": ""})
    )
    assert without == lines(ask("vllm"))
    assert sum(with_images.values()) > sum(without.values())


def test_sglang_default_share_of_mla() -> None:
    # The same, but 1,536 MiB for the prefill graphs.
    reserved = 512 + 1.5 * 8192 + 128 + 2 * 256 + 1536
    share = round((81920 - reserved) / 81920, 3)
    assert ask("sglang", is_latent=True).settings == {"mem_fraction_static": share}


def test_sglang_given_a_share() -> None:
    found = lines(ask("sglang", settings={"mem-fraction-static": "0.9"}, layout=Layout(1, 2)))
    free = MEMORY - (640 + 1152) * MIB
    assert found["activations and graphs (1 - 0.9)"] == free - int(free * 0.9)


OLD = Release.of(9357)
BUFFER = "compute buffer of 512 tokens"


def test_llama_cpp_buffers_as_its_logs_print_them() -> None:
    # llama_context: CUDA0 compute buffer size = 258.50 MiB (Llama 3 8B) and 70.50 MiB (Llama 2 7B) for 512 tokens.
    assert lines(ask("llama.cpp", release=OLD))[BUFFER] == int(258.5 * MIB)
    assert lines(ask("llama.cpp", LLAMA_2_7B, context_tokens=512, release=OLD))[BUFFER] == int(70.5 * MIB)


def test_a_server_reserves_the_logits_that_it_reads() -> None:
    # Qwen3.8-27B in Ollama 0.32, August 2026: 378.02 MiB on one MI355X, and 4,744.25 MiB with steps of 2,048 on two.
    # DeepSeek-Coder-V2-Lite in b10600: 76.13 MiB with two slots of 4,096 cells.
    wide = Width(3 * 17408, 5120, 248320, 64, False)
    one = ask("llama.cpp", wide, context_tokens=262144, settings={"parallel": "1"})
    assert lines(one)[BUFFER] / MIB == pytest.approx(378.02, abs=0.05)
    two = ask(
        "llama.cpp", wide, context_tokens=262144, layout=Layout(1, 2), settings={"parallel": "1", "ubatch-size": "2048"}
    )
    assert lines(two)["compute buffer of 2,048 tokens"] / MIB == pytest.approx(4744.25, abs=0.3)
    # A row of logits for every slot and drafted token.
    small = Width(1024, 128, 248320, 4, False)
    for slots, drafted in ((1, 0), (4, 0), (4, 3)):
        settings = {"parallel": str(slots), **({"draft-max": str(drafted)} if drafted else {})}
        found = ask("llama.cpp", small, context_tokens=256, settings=settings)
        assert lines(found)[BUFFER] == max(
            slots * (1 + drafted) * 248320 * 4 + 512 * 128 * 4, 512 * (1024 + 256) * 4 + 512 * 256 * 2
        )


def test_llama_cpp_without_flash_attention_holds_scores_and_the_mask() -> None:
    found = ask("llama.cpp", settings={"flash-attn": "off"}, num_heads=32, context_tokens=65536)
    assert lines(found)[BUFFER] == 512 * (3 * 14336 + 2 * 4096 + 65536 * (32 + 1)) * 4


def test_llama_cpp_holds_a_mask_that_grows_with_the_cells() -> None:
    # With flash attention, 2 bytes per token and cell. Older builds make it in fp32 first, and the logits of all tokens
    # are larger than a layer up to (128,256 + 4,096 - 43,008) x 4 / 6 cells.
    until = (128256 + 4096 - 3 * 14336) * 4 // 6
    short, long = (ask("llama.cpp", context_tokens=tokens, release=OLD) for tokens in (until, 2**19))
    assert short.same_until == long.same_until == until
    assert lines(short)[BUFFER] == int(258.5 * MIB)
    assert lines(long)[BUFFER] == 512 * (3 * 14336 * 4 + 2**19 * 6)
    layer = (3 * 14336 + 2 * 4096) * 4
    new = ask("llama.cpp", context_tokens=2**19)
    assert (lines(new)[BUFFER], new.same_until) == (512 * (layer + 2**19 * 2), 0)
    # Slots that share one stream see the cells of all; several devices prepare four micro-batches.
    assert lines(ask("llama.cpp", context_tokens=2**17, batch_size=4)) == lines(new)
    own = ask("llama.cpp", context_tokens=2**17, batch_size=4, settings={"parallel": "4"})
    assert lines(own)[BUFFER] == 512 * (layer + 2**17 * 2)
    assert lines(ask("llama.cpp", context_tokens=2**17, layout=Layout(1, 2)))[BUFFER] == 512 * (
        layer + 4 * (2**17 * 2 + 4096 * 4)
    )


def test_metal_has_no_context_of_a_driver() -> None:
    assert set(lines(ask("llama.cpp", is_apple=True))) == {"compute buffer of 512 tokens", "reserved by macOS (25 %)"}
    for part in ask("llama.cpp").held:
        assert part.low is not None
        assert part.high is not None
        assert part.low < part.bytes < part.high


def test_tensorrt_llm_shares_what_is_free() -> None:
    assert ask("tensorrt-llm").share == 0.9
    assert ask("tensorrt-llm", settings={"free-gpu-memory-fraction": "0.5"}).share == 0.5


def test_transformers_follows_the_prompt() -> None:
    short, long = ask("transformers"), ask("transformers", context_tokens=8192, batch_size=2)
    assert short.varies
    by_token = (2 * 4096 + 3 * 14336) * 2
    assert lines(long)["prefill activations"] == 2 * 8192 * by_token + 2 * 128256 * 6
    assert lines(short)["prefill activations"] == 4096 * by_token + 128256 * 6


def test_macos_keeps_a_quarter_and_of_small_machines_a_third() -> None:
    # recommendedMaxWorkingSetSize in MiB: ggml-org/llama.cpp#1870 and #3213, ollama/ollama#434, and
    # abetlen/llama-cpp-python#687.
    assert lines(ask("llama.cpp", is_apple=True))["reserved by macOS (25 %)"] == 20 * GIB
    for memory, left in ((64, 49152.0), (96, 73728.0), (32, 21845.34), (16, 10922.67)):
        held = lines(ask("llama.cpp", is_apple=True, memory_bytes=memory * GIB))
        (size,) = (size for name, size in held.items() if name.startswith("reserved by macOS"))
        assert (memory * GIB - size) / MIB == pytest.approx(left, abs=0.01)


@pytest.mark.parametrize("value", ["0", "1.01", "-1", "nan", "inf", "much", ""])
@pytest.mark.parametrize(("engine", "option"), [("vllm", "gpu-memory-utilization"), ("sglang", "mem-fraction-static")])
def test_shares_out_of_range(engine: str, option: str, value: str) -> None:
    with pytest.raises(UsageError, match=option):
        ask(engine, settings={option: value})


@pytest.mark.parametrize(
    ("release", "requests"), [("0.7.3", "256"), ("0.8.0rc1", "256"), ("0.8.0", "1024"), ("2025-03-17", "256")]
)
def test_a_release_has_the_defaults_of_its_time(release: str, requests: str) -> None:
    found = engine_class("vllm").device_settings(80 * GIB, "h100-sxm", "hopper", release_of(f"vllm@{release}"), {})
    assert found["max-num-seqs"] == requests


def test_the_mask_of_llama_cpp_has_the_cells_of_all_slots_that_share_a_stream() -> None:
    """As `settings.Settings.has_one_stream` says, which also counts the cache's cells."""

    def cells(batch: int, build: int | None = None, **settings: str) -> int:
        given = {name.replace("_", "-"): text for name, text in {"flash_attn": "off", **settings}.items()}
        asked = ReserveInputs(
            MEMORY, LLAMA_2_7B, Layout(), 1 << 20, batch, given, num_heads=32,
            release=None if build is None else Release.of(build),
        )  # fmt: skip
        # For every token of a micro-batch, a layer has its values, and the mask and the scores of 32 heads of every
        # cell, in fp32.
        return reserve_of(load_engine("llama.cpp", LLAMA), asked).held[0].bytes // 512 // 4 // 33

    layer = (LLAMA_2_7B.module_elements + 2 * LLAMA_2_7B.hidden_size) // 33
    one, four = (1 << 20) + layer, (1 << 22) + layer
    assert (cells(1), cells(4), cells(5)) == (one, four, one)
    assert (cells(4, parallel="4"), cells(4, parallel="4", kv_unified="")) == (one, four)
    layer = LLAMA_2_7B.module_elements // 33
    one, four = (1 << 20) + layer, (1 << 22) + layer
    # Older builds start one slot, and so as many as the batch, each with a stream.
    assert (cells(4, 6918), cells(4, before_pull="16736")) == (one, one)
    # Before windows came, all slots shared one.
    assert cells(4, parallel="4", before_pull="13194") == four


# handle_gpu_memory_settings, or __post_init__, of ServerArgs (srt/server_args.py), in MiB of a device with 81,920.
@pytest.mark.parametrize(
    ("release", "method", "reserved"),
    [
        ("0.5.2", None, 9.5 * 1024 + 512), ("0.5.2", "mtp", 11.5 * 1024 + 512), ("0.5.2", "ngram", 11.5 * 1024 + 512),
        ("0.5.3", None, 512 + 1.5 * 8192 + 128 + 2 * 256), ("0.5.9", "mtp", 512 + 1.5 * 8192 + 128 + 2 * 256 + 2048),
        ("0.5.9", "draft", 512 + 1.5 * 8192 + 128 + 2 * 256 + 6144),
        ("0.5.9", "ngram", 512 + 1.5 * 8192 + 128 + 2 * 256),
        ("0.5.10", None, 512 + 1.5 * 8192 + 128 + 2 * 256 + 8 * 58),
        ("0.5.10", "mtp", 512 + 1.5 * 8192 + 128 + 2 * 256 + 8 * 58 + 4096),
        ("0.5.13", "eagle", 512 + 1.5 * 8192 + 128 + 2 * 256 + 8 * 58 + 4096),
        ("0.5.14", "eagle", 512 + 1.5 * 8192 + 128 + 2 * 256 + 8 * 58),
    ],
)  # fmt: skip
def test_sglang_default_share_of_a_release(release: str, method: str | None, reserved: float) -> None:
    found = ask("sglang", release=release_of(f"sglang@{release}"), drafts_by=method)
    assert found.settings == {"mem_fraction_static": round((81920 - reserved) / 81920, 3)}


# Before 0.5.3, by the memory of a device in MiB, and half a GiB for each rank (a tenth of one on small devices).
@pytest.mark.parametrize(
    ("mib", "ranks", "gib"),
    [
        (24564, 1, 2.9), (35839, 8, 3.6), (35840, 8, 13.5), (81920, 1, 10), (92159, 8, 13.5), (92160, 8, 16),
        (143771, 1, 12.5), (163839, 8, 16), (163840, 8, 32), (183359, 1, 32),
    ],
)  # fmt: skip
def test_sglang_s_older_default_share_follows_the_memory_and_the_ranks(mib: int, ranks: int, gib: float) -> None:
    for release in ("0.4.7.post1", "0.5.2"):
        for dp_ranks, more in ((1, 0), (2, 4)) if ranks > 1 else ((1, 0),):
            layout = Layout(ranks // dp_ranks, 1, dp_ranks)
            asked: dict[str, Any] = {"memory_bytes": mib * MIB, "layout": layout}
            found = ask("sglang", release=release_of(f"sglang@{release}"), **asked)
            assert found.settings == {"mem_fraction_static": round((mib - (gib + more) * 1024) / mib, 3)}


# The tokens of a prefill step, and the largest graphs on fewer than four devices and on more, from 0 GiB and from each
# border on (handle_gpu_memory_settings and __post_init__ of ServerArgs, srt/server_args.py).
_LARGE = {35: (4096, 32, 160), 60: (8192, 256, 512), 160: (16384, 512, 512)}


@pytest.mark.parametrize(
    ("releases", "steps"),
    [
        (("0.5.20", "0.5.23", None), {0: (2048, 8, 8), 20: (4096, 48, 160), **_LARGE}),
        (("0.5.5", "0.5.19"), {0: (2048, 8, 8), 20: (2048, 24, 80), **_LARGE}),
        (("0.5.3", "0.5.4"), {0: (2048, 8, 8), 20: (2048, 16, 80), **_LARGE}),
        (("0.4.8", "0.5.2"), {0: (2048, 8, 80), 35: (8192, 160, 160), 160: (16384, 512, 512)}),
        (("0.4.0", "0.4.7"), {0: (2048, 8, 80), 25_000 / 1024: (8192, 160, 160)}),
    ],
)
def test_sglang_s_steps_follow_the_memory(
    releases: tuple[str | None, ...], steps: dict[float, tuple[int, int, int]]
) -> None:
    for name in releases:
        release = None if name is None else release_of(f"sglang@{name}")
        before = None
        for gib, expected in steps.items():
            border = round(gib * 1024) * MIB
            assert steps_by_memory(border, release) == expected
            assert before is None or steps_by_memory(border - 1, release) == before
            before = expected
        assert steps_by_memory(1 << 50, release) == before


def test_sglang_default_share_on_a_small_device_of_a_release() -> None:
    # 24,564 MiB: a prefill step has 4,096 tokens since 0.5.20, and the graphs 48 requests (24 and 16 before).
    for release, tokens, graph in (("0.5.19", 2048, 24), ("0.5.20", 4096, 48)):
        sizes = 42 if tokens == 2048 else 50
        reserved = 512 + 1.5 * tokens + 128 + 2 * graph + 8 * sizes
        found = ask("sglang", release=release_of(f"sglang@{release}"), memory_bytes=24564 * MIB)
        assert found.settings == {"mem_fraction_static": round((24564 - reserved) / 24564, 3)}
    # Before 0.5.22, the graphs did not follow the requests.
    row = {"max-running-requests": "8"}
    for release, graph in (("0.5.21", 256), ("0.5.22", 8)):
        reserved = max(10 * 1024, 512 + 1.5 * 8192 + 128 + 2 * graph + 8 * 58)
        found = ask("sglang", release=release_of(f"sglang@{release}"), settings=row)
        assert found.settings == {"mem_fraction_static": round((81920 - reserved) / 81920, 3)}


# Before 0.4.7.post1, a table by the number of devices decided (__post_init__ of ServerArgs, srt/server_args.py).
@pytest.mark.parametrize(
    ("release", "mib", "ranks", "method", "share"),
    [
        ("0.4.0", 81559, 1, None, 0.88), ("0.4.3", 81559, 2, None, 0.87), ("0.4.6", 24564, 4, None, 0.85),
        ("0.4.6.post5", 81559, 8, None, 0.81), ("0.4.7", 81559, 16, None, 0.79), ("0.4.7", 81559, 8, "eagle", 0.7695),
        # Read from the wheels of 0.4.5.post2 to 0.4.6.post2.
        ("0.4.5.post2", 143771, 8, None, 0.81), ("0.4.5.post3", 143771, 8, None, (143771 - 13 * 1024) / 143771),
        ("0.4.6.post1", 143771, 8, None, (143771 - 13 * 1024) / 143771),
        ("0.4.5", 143771, 8, None, 0.81), ("0.4.6", 143771, 8, None, (143771 - 13 * 1024) / 143771),
        ("0.4.6.post2", 97871, 8, None, 0.88), ("0.4.6.post2", 143771, 8, None, (143771 - 18 * 1024) / 143771),
        ("0.4.7", 143771, 8, "eagle", (143771 - 20 * 1024) / 143771), ("0.4.7", 183359, 8, None, 0.79),
        ("0.4.6.post2", 183359, 8, None, (183359 - 18 * 1024) / 183359),
        ("0.4.6.post2", 81_559, 8, "eagle", 0.81),  # drafts take none of it yet
        # Just the size from which the rules for larger devices count, and one MiB more.
        ("0.4.6", 81_920, 8, None, 0.81), ("0.4.6", 81_921, 8, None, (81_921 - 13 * 1024) / 81_921),
        ("0.4.6.post2", 98_304, 16, None, 0.88), ("0.4.6.post2", 98_305, 16, None, (98_305 - 18 * 1024) / 98_305),
        ("0.4.7", 180_000, 8, None, (180_000 - 18 * 1024) / 180_000), ("0.4.7", 180_001, 8, None, 0.79),
        # A very large device keeps no more than 48 GiB of its share for the rest.
        ("0.4.6.post2", 262128, 8, None, 0.88 + 48 * 1024 * 0.12 / 262128),
        ("0.4.7.post1", 81920, 8, None, round((81920 - 13.5 * 1024) / 81920, 3)),
    ],
)  # fmt: skip
def test_sglang_oldest_default_share(release: str, mib: int, ranks: int, method: str | None, share: float) -> None:
    found = ask(
        "sglang",
        release=release_of(f"sglang@{release}"),
        memory_bytes=mib * MIB,
        layout=Layout(ranks),
        drafts_by=method,
    )
    assert found.settings["mem_fraction_static"] == pytest.approx(share, abs=1e-6)


def test_sglang_s_share_of_large_devices_of_nvidia_is_not_that_of_amds() -> None:
    release, memory = release_of("sglang@0.4.7"), 196_592 * MIB
    shares = [
        ask("sglang", release=release, memory_bytes=memory, layout=Layout(1, 8), is_amd=is_amd).settings[
            "mem_fraction_static"
        ]
        for is_amd in (False, True)
    ]
    assert shares == [0.79, round((196_592 - 18 * 1024) / 196_592, 6)]


def test_sglang_had_one_factor_for_all_towers_which_a_given_share_had_too() -> None:
    tower = {"vision_config": {"num_hidden_layers": 27, "hidden_size": 1152}}
    shares = {
        release: ask("sglang", release=release_of(f"sglang@{release}"), multimodal=tower, settings=settings).settings
        for release, settings in (
            ("0.4.4", {}), ("0.4.6", {}), ("0.4.8", {"mem-fraction-static": "0.8"}),
            ("0.4.9", {"mem-fraction-static": "0.8"}),
        )
    }  # fmt: skip
    assert [row["mem_fraction_static"] for row in shares.values()] == [0.836, 0.792, 0.72, 0.8]


def test_sglang_s_separate_instances_have_parts_of_their_own_since_0_5_15() -> None:
    """A decode step checks 24 x 200 tokens of drafts, and prefill instances have no decode graphs."""

    def share(release: str, role: str) -> float:
        given = {"disaggregation-mode": role, "speculative-num-draft-tokens": "200"}
        found = ask("sglang", release=release_of(f"sglang@{release}"), settings=given, memory_bytes=24564 * MIB)
        return float(found.settings["mem_fraction_static"])

    assert share("0.5.14", "decode") > share("0.5.15", "decode") == share("0.5.16", "decode")
    assert share("0.5.14", "prefill") != share("0.5.15", "prefill") == share("0.5.16", "prefill")


def test_sglang_keeps_memory_for_the_embeddings_of_images_beside_a_tower_alone() -> None:
    for multimodal, added in ((None, []), ({"vision_config": {}}, [("embeddings of images", 100 * MIB)])):
        held = ask("sglang", multimodal=multimodal).held
        assert [(part.name, part.bytes) for part in held if "images" in part.name] == added


def test_sglang_s_factor_follows_the_size_of_the_tower_since_0_4_9_post3() -> None:
    """adjust_mem_fraction_for_vlm is in the wheel of 0.4.9.post3, and 0.4.9.post2 multiplies by 0.9."""
    tower = {"vision_config": {"num_hidden_layers": 24, "hidden_size": 1024}}
    for release, factor in (("0.4.9.post2", 0.9), ("0.4.9.post3", 0.95)):
        alone, share = (
            ask("sglang", release=release_of(f"sglang@{release}"), multimodal=more).settings["mem_fraction_static"]
            for more in (None, tower)
        )
        assert share == round(alone * factor, 6)


def test_sglang_takes_a_tower_whose_sizes_are_lists_for_a_usual_one() -> None:
    """Towers with stages of several widths: the factor of a tower with 24 layers of 1,024."""
    usual, staged = (
        ask("sglang", multimodal={"vision_config": {"num_hidden_layers": 24, "hidden_size": width}}).settings
        for width in (1024, [96, 192])
    )
    none = ask("sglang").settings["mem_fraction_static"]
    assert usual == staged == {"mem_fraction_static": round(0.95 * none, 6)}


def test_sglang_leaves_more_free_for_aiter_on_amd() -> None:
    """Qwen3-Reranker-0.6B on an MI355X, 0.5 of the memory, 40,960 tokens: K 60.44 and V 60.44 GB of 287.26 GB, while
    286.05 GB were free: 0.425 of the memory."""

    def share(**changes: Any) -> float:
        settings = {"mem-fraction-static": "0.5", **changes.pop("settings", {})}
        given = {"is_amd": True, "context_tokens": 40_960, "settings": settings, **changes}
        return float(ask("sglang", **given).settings["mem_fraction_static"])

    assert 1 - share() == pytest.approx((286.05 - 120.88) / 287.26, abs=1e-3)
    assert share(context_tokens=8192) == share(is_amd=False) == share(release=release_of("sglang@0.4.6")) == 0.5
    # MLA: with 16 or 128 heads on a device. DeepSeek-V3 has 128, Kimi-K2 64.
    heads = {(128, 8): 0.425, (128, 1): 0.425, (64, 4): 0.425, (64, 8): 0.5, (128, 4): 0.5}
    for (number, ranks), expected in heads.items():
        assert share(is_latent=True, num_heads=number, layout=Layout(ranks)) == expected
    assert share(is_latent=True, num_heads=128, has_sparse_latent=True) == share(model_type="deepseek_v4") == 0.5


def test_a_longer_context_has_aiters_part() -> None:
    def pool(tokens: int, gpu: str = "mi300x") -> int:
        found = estimate(load_model("qwen3-8b"), context_tokens=tokens, engine="sglang", devices=find_devices(gpu))
        return int(found["fit"]["kv_cache_memory_bytes"])

    assert pool(8193) < pool(8192) == pool(1024)
    assert pool(8193, "h200") == pool(8192, "h200")
