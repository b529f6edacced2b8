"""vLLM's older releases: the figures they printed, and the differences from the newest release."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import kvcalc
from kvcalc.engines.vllm.engine import Vllm
from kvcalc.engines.vllm.log.readings import _rules
from kvcalc.engines.vllm.releases import RELEASES, rules_of
from kvcalc.errors import ModelError, UsageError
from kvcalc.throughput.hardware import find_devices
from tests.documents import estimate
from tests.engines.models import ask, latent, plain
from tests.rows import every_row

GIB = 1 << 30


def of_release(release: str, model: str, tokens: int, memory: int | None = None, tp: int = 1) -> dict[str, Any]:
    answer = estimate(
        kvcalc.load_model(model),
        context_tokens=tokens,
        dtype="bf16",
        engine=f"vllm@{release}",
        kv_memory_bytes=memory,
        tensor_parallel_size=tp,
    )
    return dict(answer["engine"])


def test_tokens_printed_are_a_groups_before_0_20_1() -> None:
    # vllm-project/vllm#40691, 0.19.0: Qwen3.5-27B prints 290,864 tokens, 33.04x of 32,768: 1,487 blocks of 784 tokens.
    block = of_release("0.19.0", "qwen3.5-27b", 32_768)["bytes_per_block"]
    found = of_release("0.19.0", "qwen3.5-27b", 32_768, 1487 * block)
    assert (found["block_size"], found["kv_cache_tokens"], round(found["max_concurrency"], 2)) == (784, 290_864, 33.04)
    # The newest release prints the concurrency times the length: 33.04 times 32,768.
    assert of_release("0.20.1", "qwen3.5-27b", 32_768, 1487 * block)["kv_cache_tokens"] == 1487 * 32_768 // 45
    # alvarobartt/hf-mem#61: gemma-4-31B, 24.54 GiB: 26,800 tokens, a sixth of 10,051 blocks of 16.
    assert of_release("0.20.0", "gemma-4-31b", 8192, int(24.54 * GIB))["kv_cache_tokens"] == 26_800


# Kimi-Linear-48B-A3B: 7 of 27 layers have MLA, and the others keep a state of 32 heads of 128 x 128.
KIMI_LINEAR = latent(
    27,
    "kimi_linear",
    num_key_value_heads=32,
    linear_attn_config={
        "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
        "kda_layers": [n for n in range(1, 27) if n % 4],
        "head_dim": 128,
        "num_heads": 32,
        "short_conv_kernel_size": 4,
    },
)


def test_kimi_linears_block_was_a_multiple_of_64() -> None:
    # vllm-project/vllm#28228: 2.30 GiB on each of two devices: 75,840 tokens, 2.48x of 120,000. That is 318 blocks,
    # which fit into 2.293 GiB. 2.2999 GiB would fit one more.
    memory = int(2.296 * GIB)
    found = ask(KIMI_LINEAR, "vllm@0.11", 120_000, tensor_parallel_size=2, kv_memory_bytes=memory)["engine"]
    assert (found["block_size"], found["kv_cache_tokens"], round(found["max_concurrency"], 2)) == (960, 75_840, 2.48)
    newest = ask(KIMI_LINEAR, "vllm", 120_000, tensor_parallel_size=2)["engine"]
    assert newest["block_size"] == 1024


@pytest.mark.parametrize(
    ("release", "gpu", "block"),
    [("0.33", "mi300x", 16), ("0.19", "mi355x", 16), ("0.14", "mi300x", 1), ("0.33", "h200", 64)],
)
def test_sparse_attention_on_rocm_keeps_the_default_block(release: str, gpu: str, block: int) -> None:
    """get_supported_kernel_block_sizes of rocm_aiter_mla_sparse.py and indexer.py: any size on ROCm, 64 on CUDA."""
    answer = estimate(
        kvcalc.load_model("deepseek-v3.2"), context_tokens=32_768, engine=f"vllm@{release}",
        devices=find_devices(f"{gpu}x8"), tensor_parallel_size=8,
    )  # fmt: skip
    assert answer["engine"]["block_size"] == block


def test_chunks_were_kept_whole_before_0_10() -> None:
    # vllm-project/vllm#19407: Llama 4 Scout at 10,485,760 tokens on 8 devices needs 240 GiB each.
    assert of_release("0.9.1", "llama-4-scout", 10_485_760, tp=8)["request_bytes"] == 240 * GIB
    # 36 of 48 layers are chunked, so only 12 layers keep all tokens in newer releases.
    assert of_release("0.10", "llama-4-scout", 10_485_760, tp=8)["request_bytes"] < 62 * GIB


def windowed(layers: int, every_layer: bool) -> dict[str, object]:
    kinds = ["sliding_attention", "sliding_attention" if every_layer else "full_attention"] * (layers // 2)
    return plain(layers, model_type="gpt_oss", sliding_window=128, layer_types=kinds)


def reserved(config: dict[str, object], release: str) -> int:
    settings = {"max-num-batched-tokens": "1024"}
    return int(ask(config, f"vllm@{release}", 65_536, settings=settings)["engine"]["request_bytes"])


def test_windows_came_in_two_steps() -> None:
    token = 2 * 2 * 64 * 2
    whole = 4 * 65_536 * token
    some, every = windowed(4, every_layer=False), windowed(4, every_layer=True)
    assert reserved(some, "0.7") == reserved(every, "0.7") == whole
    assert reserved(some, "0.8") == reserved(some, "0.9.0") == whole
    # 127 + 1,024 tokens take 72 blocks of 16, plus one.
    assert reserved(every, "0.8") == 4 * 73 * 16 * token
    # Two layers with the window, two without: two groups of two layers.
    assert reserved(some, "0.9") == 2 * (4096 + 73) * 16 * token
    # With a second step in flight, 127 + 2,048 tokens take 136 blocks, plus one.
    assert reserved(some, "0.25") == reserved(some, "0.9")
    assert reserved(some, "0.26") == 2 * (4096 + 137) * 16 * token


def test_pages_of_several_sizes_are_refused_before_0_12() -> None:
    with pytest.raises(ModelError, match=r"vLLM 0\.11 and later cannot give this model's layers pages of one size"):
        of_release("0.11", "gemma-4-31b", 8192)
    assert of_release("0.12", "gemma-4-31b", 8192)["block_size"] == 32
    with pytest.raises(ModelError, match=r"states are only modelled for vLLM 0\.11 and later"):
        of_release("0.10", "qwen3-next-80b-a3b", 8192)


@every_row("tokens", [1, 8192, 131_072])
@every_row("release", ["0.6", "0.8.5", "0.9.0", "0.9.2", "0.11", "0.17", "0.20", "0.25", "0.33"])
@every_row("config", [plain(32, 32, 8, 128), latent(27)])
def test_models_of_one_kind_of_layer_are_alike_in_every_release(
    config: dict[str, object], release: str, tokens: int
) -> None:
    memory = 10 * GIB
    old = ask(config, f"vllm@{release}", tokens, kv_memory_bytes=memory)["engine"]
    new = ask(config, "vllm", tokens, kv_memory_bytes=memory)["engine"]
    assert (old["request_bytes"], old["num_gpu_blocks"]) == (new["request_bytes"], new["num_gpu_blocks"])
    assert old["version"] == release
    assert old["rules"] == rules_of(release).name


def test_a_release_without_its_patch_is_its_last() -> None:
    assert rules_of("0.9") == rules_of("0.9.2") != rules_of("0.9.0")
    assert rules_of(None) == rules_of("0.33.0") == rules_of("v0.34")
    assert (rules_of("0.12").name, rules_of("0.9.1").name) == ("vLLM 0.12 and later", "vLLM 0.9.1 and later")
    assert rules_of("0.6.3").name == "vLLM before 0.8"


_MAMBA = ("linear", "selective")


@pytest.mark.parametrize(
    ("fact", "values"),
    [
        ("windows", {"0.7.3": "never", "0.8.0": "alone", "0.9.0": "alone", "0.9.1": "always", "0.33.0": "always"}),
        ("chunks", {"0.9.2": False, "0.10.0": True}),
        ("states", {"0.10.2": False, "0.11.0": True}),
        ("unifies", {"0.11.2": False, "0.12.0": True}),
        ("padding_ratio", {"0.11.2": 0, "0.12.0": 1.25, "0.17.1": 1.25, "0.18.0": 1.5, "0.33.0": 1.5}),
        ("pads", {"0.24.0": False, "0.25.0": True}),
        ("mla_block", {"0.26.0": 64, "0.27.0": 128}),
        ("two_steps", {"0.25.1": False, "0.26.0": True}),
        ("overlaps_stages", {"0.28.0": False, "0.29.0": True}),
        ("tokens", {"0.9.0": "blocks", "0.9.1": "group", "0.20.0": "group", "0.20.1": "requests"}),
        ("bills", {"0.7.3": "stages", "0.8.0": "stage", "0.13.0": "stage", "0.14.0": "all layers",
                   "0.16.0": "all layers", "0.17.0": "stage"}),
        ("packing", {"0.19.0": "", "0.20.0": "tuples", "0.22.0": "tuples", "0.23.0": "slots", "0.26.0": "slots",
                     "0.27.0": "overlaid", "0.28.0": "overlaid", "0.29.0": "buckets"}),
        ("hybrid_prefixes", {"0.27.0": False, "0.28.0": True}),
        ("state_per_block", {"0.11.2": (), "0.12.0": _MAMBA, "0.27.0": _MAMBA, "0.28.0": ()}),
        ("has_mode_align", {"0.14.1": False, "0.15.0": True}),
        ("drafts_align", {"0.19.0": False, "0.20.0": True, "0.21.0": True, "0.22.0": False}),
        ("has_mode_all", {"0.31.0": True, "0.32.0": False}),
        ("checkpoints", {"0.31.0": (), "0.32.0": ("linear",), "0.33.0": ("linear", "delta")}),
    ],
)  # fmt: skip
def test_the_releases_in_which_a_rule_changed(fact: str, values: dict[str, object]) -> None:
    """Read in the wheels of these releases (kv_cache_utils.py, kv_cache_interface.py, models/config.py)."""
    assert {release: getattr(rules_of(release), fact) for release in values} == values


def test_the_releases_whose_rules_are_known_begin_with_v1() -> None:
    known = Vllm.known_releases()
    assert (known[0], known[-1]) == ("0.33", "0.8")
    assert [rules_of(release).release for release in known] == known
    # "0.20" alone means 0.20.2, whose rules began with 0.20.1.
    assert "0.20.0" in known
    assert rules_of("0.20") == rules_of("0.20.1") != rules_of("0.20.0")


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ("vllm@", "the release is missing"),
        ("vllm@0", "not a release"),
        ("vllm@newest", "not a release"),
        ("vllm@0.9.x", "not a release"),
        ("sglang@x", "not a release"),
        ("logical@1", "has no releases"),
        ("vlm@0.9", "not an engine"),
    ],
)
def test_what_is_no_release_is_refused(engine: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        ask(plain(), engine, 8)


def test_a_release_newer_than_read_counts_by_the_newest_rules_and_says_so() -> None:
    assert rules_of("0.99") == rules_of(None)
    found = ask(plain(), "vllm@0.99", 8)
    text = "vllm@0.99 counts by the rules read from 0.33.0"
    assert found["warnings"] == [{"part": "engine", "code": "release", "text": text}]
    assert ask(plain(), "vllm@0.33.1", 8)["warnings"] == []


def test_a_date_has_the_rules_of_the_last_release_before_it() -> None:
    assert rules_of("2025-12-02") == rules_of("0.11.0") != rules_of("2025-12-03") == rules_of("0.12.0")
    assert rules_of("2020-01-01") == rules_of("0.1")
    found = ask(plain(), "vllm@2025-12-02", 8)
    assert found["engine"]["version"] == "2025-12-02"
    assert [one["text"] for one in found["warnings"]] == [
        "vllm@2025-12-02 counts by the rules read from vLLM 0.11 and later"
    ]


def test_a_pre_release_has_the_rules_of_the_release_before_it() -> None:
    assert rules_of("0.12.0rc1") == rules_of("0.11.2") != rules_of("0.12.0")
    assert rules_of("0.12.0.post1") == rules_of("0.12.0")
    assert rules_of("0.20.2rc1.dev9+g123") == rules_of("0.20.1")
    assert rules_of("nightly") == rules_of("latest") == rules_of("5b8c30d62b75") == rules_of(None)


def test_a_log_without_a_release_is_compared_with_all_rules_that_differ_for_its_model() -> None:
    """Windows differ in more releases than plain layers, and states in all. No rules of V0 count pages."""

    def compared(model: str, version: str | None = None) -> list[tuple[int, ...]]:
        log: Any = SimpleNamespace(text=lambda name: version if name == "version" else None)
        return [rules.since for rules in _rules(log, kvcalc.load_model(model))]

    newest = RELEASES[0].since
    plain, windowed, states = map(compared, ("llama-3.1-8b", "gemma-3-27b", "qwen3-next-80b-a3b"))
    assert {newest, (0, 8, 0)} < set(plain) < set(windowed) < set(states)
    assert states == [rules.since for rules in RELEASES if rules.since >= (0, 8, 0)]
    for version, found in (
        ("0.8.0", [(0, 8, 0)]), ("0.9.1", [(0, 9, 1)]), ("0.9.2", [(0, 9, 1)]), ("999.0", [newest]),
        ("0.20.2rc1.dev9", [(0, 22, 0), (0, 20, 1)]),  # it may have the rules of the next release
    ):  # fmt: skip
        assert compared("gemma-3-27b", version) == found
