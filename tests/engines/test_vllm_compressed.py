"""DeepSeek-V4 and MiMo-V2-Flash under vLLM: pages of several sizes in one block, windows with heads of their own."""

from __future__ import annotations

from math import lcm
from typing import Any

import pytest

import kvcalc
from kvcalc.engines.place import ANYWHERE
from kvcalc.engines.vllm.cache_dtypes import own_dtype
from kvcalc.engines.vllm.deepseek_v41 import v41_pages
from kvcalc.engines.vllm.layers import compressed_pages
from kvcalc.engines.vllm.pages import Page
from kvcalc.errors import KvcalcError, ModelError
from kvcalc.memory.dtypes import DTYPES
from kvcalc.model.caches import CompressedAttention
from kvcalc.model.spec import all_caches
from tests.documents import estimate
from tests.engines.test_vllm_states import GIB, start

V4 = "deepseek-v4-flash"

# Model, tokens in one step, tokens, drafts; bytes per block, bytes of a request, blocks, tokens and concurrency in 40
# GiB: vLLM 0.33.0's own planner (get_kv_cache_groups with the layout BLHNC), two steps in flight.
PLANNED = [
    (V4, 8192, 8_192, 1_002_240, 3_371_535_360, 42_853, 104_355, 12.7387),
    (V4, 8192, 131_072, 1_002_240, 7_210_114_560, 42_853, 780_765, 5.9568),
    (V4, 8192, 1_048_576, 1_002_240, 10_802_142_720, 42_853, 4_169_106, 3.976),
    (V4, 1024, 1_048_576, 1_002_240, 4_965_096_960, 42_853, 9_070_372, 8.6502),
    ("deepseek-v4-pro", 8192, 8_192, 1_435_968, 4_830_596_352, 29_909, 72_834, 8.8909),
    ("deepseek-v4-pro", 8192, 131_072, 1_435_968, 10_330_353_792, 29_909, 544_930, 4.1575),
    ("deepseek-v4-pro", 1024, 1_048_576, 1_435_968, 7_113_785_472, 29_909, 6_330_613, 6.0373),
]


@pytest.mark.parametrize(
    ("model", "step", "tokens", "block", "request_bytes", "blocks", "printed", "concurrency"), PLANNED
)
def test_deepseek_v4(
    model: str, step: int, tokens: int, block: int, request_bytes: int, blocks: int, printed: int, concurrency: float
) -> None:
    for ranks in (1, 8):
        found = start(
            model, tokens, settings={"max_num_batched_tokens": str(step)}, kv_memory_bytes=40 * GIB,
            tensor_parallel_size=ranks,
        )  # fmt: skip
        assert (found["block_size"], found["bytes_per_block"], found["request_bytes"]) == (256, block, request_bytes)
        assert (found["num_gpu_blocks"], found["kv_cache_tokens"]) == (blocks, printed)
        assert round(found["max_concurrency"], 4) == concurrency


@pytest.mark.parametrize(
    ("release", "block", "request_bytes", "blocks", "printed", "concurrency"),
    [
        # get_kv_cache_groups and get_max_concurrency_for_kv_cache_config of the release's core/kv_cache_utils.py, for
        # 131,072 tokens and 8,192 in a step. Two steps are in flight since 0.26.
        ("@0.20.0", 1_051_776, 3_866 * 1_051_776, 40_835, 32_668, 11.7308),
        ("@0.22", 1_051_776, 3_866 * 1_051_776, 40_835, 1_537_582, 11.7308),
        ("@0.24", 1_039_680, 3_866 * 1_039_680, 41_310, 1_555_468, 11.8673),
        ("@0.26", 1_039_680, 7_194 * 1_039_680, 41_310, 842_212, 6.4256),
        ("@0.28", 1_002_240, 7_194 * 1_002_240, 42_853, 780_765, 5.9568),
    ],
)
def test_deepseek_v4_in_older_releases(
    release: str, block: int, request_bytes: int, blocks: int, printed: int, concurrency: float
) -> None:
    found = start(V4, 131_072, release, kv_memory_bytes=40 * GIB)
    assert (found["bytes_per_block"], found["request_bytes"]) == (block, request_bytes)
    assert (found["num_gpu_blocks"], found["kv_cache_tokens"]) == (blocks, printed)
    assert round(found["max_concurrency"], 4) == concurrency


def test_stages_of_deepseek_v4() -> None:
    # The planner's two workers have blocks of 478,080 and 524,160 bytes; the second has the fewest blocks, 81,940.
    found = estimate(
        kvcalc.load_model(V4), engine="vllm", context_tokens=131_072, pipeline_parallel_size=2,
        kv_memory_bytes=40 * GIB,
    )  # fmt: skip
    assert (found["engine"]["bytes_per_block"], found["engine"]["num_gpu_blocks"]) == (524_160, 81_940)
    assert found["kv_cache"]["devices_total_bytes"] == 5_030_357_760 + 5_515_211_520


def test_deepseek_v4_drafts_with_a_window() -> None:
    # compress_ratios has a 0 for the layer of multi-token prediction: 44 windows still make two groups of 22.
    drafting = start(V4, 131_072, settings={"num_speculative_tokens": "1"})
    assert drafting["request_bytes"] == start(V4, 131_072)["request_bytes"]


def test_a_log_of_deepseek_v4() -> None:
    """Lines of vllm-project/vllm#44376: 0.22.0 on two GH200, started by `LLM`, whose steps have 16,384 tokens."""
    log = (
        "vLLM API server version 0.22.0\n"
        "model='deepseek-ai/DeepSeek-V4-Flash', tensor_parallel_size=2, kv_cache_dtype=fp8, block_size=256\n"
        "ValueError: To serve at least one request with the model's max seq len (30000), (6.66 GiB KV cache is needed, "
        "which is larger than the available KV cache memory (5.44 GiB). Based on the available memory, the estimated "
        "maximum model length is 13528.\n"
    )
    found = kvcalc.audit(log)
    assert (found["equal"], found["unexplained"]) == (2, 0)
    assert found["engine"]["settings"]["max-num-batched-tokens"] == "16384"


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"kv_dtype": "bf16"}, "vLLM keeps the cache of deepseek-v4-flash in fp8"),
        ({"settings": {"block_size": "64"}}, "need multiples of 256"),
        ({"release": "@0.18"}, "vLLM 0.18 has no class for deepseek_v4"),
        ({"tensor_parallel_size": 8, "settings": {"decode_context_parallel_size": "2"}}, "sliding windows"),
    ],
)
def test_what_vllm_refuses_for_deepseek_v4(asked: dict[str, Any], words: str) -> None:
    with pytest.raises(KvcalcError, match=words):
        start(V4, 8192, **asked)


MIMO = [
    (1, "bf16", 8_192, 32, 737_280, 2_079_866_880, 169_165), (1, "fp8", 131_072, 32, 368_640, 3_413_975_040, 1_648_951),
    (2, "bf16", 131_072, 32, 368_640, 3_413_975_040, 1_648_951), (4, "fp8", 8_192, 32, 92_160, 259_983_360, 1_353_329),
    (8, "bf16", 131_072, 16, 92_160, 1_230_981_120, 4_573_173), (8, "fp8", 8_192, 16, 46_080, 141_788_160, 2_481_473),
]  # fmt: skip


@pytest.mark.parametrize(("ranks", "dtype", "tokens", "block_size", "block", "request_bytes", "printed"), MIMO)
def test_mimo_v2(
    ranks: int, dtype: str, tokens: int, block_size: int, block: int, request_bytes: int, printed: int
) -> None:
    """vLLM 0.33.0's own planner: K and V have widths of their own, and windows twice as many heads."""
    found = start(
        "mimo-v2-flash", tokens, tensor_parallel_size=ranks, kv_dtype=dtype, kv_memory_bytes=40 * GIB
    )  # fmt: skip
    assert (found["block_size"], found["bytes_per_block"]) == (block_size, block)
    assert (found["request_bytes"], found["kv_cache_tokens"]) == (request_bytes, printed)


def test_the_window_of_mimo_v2_has_128_tokens() -> None:
    # The planner for 17 tokens in flight: 127 + 17 tokens are 9 blocks. Attention itself reads 128 earlier tokens.
    one_step = {"max_num_batched_tokens": "17", "no_async_scheduling": ""}
    found = start("mimo-v2-flash", 131_072, tensor_parallel_size=8, settings=one_step)
    assert found["request_bytes"] == 759_582_720
    with pytest.raises(KvcalcError, match=r"before 0\.14 is not modelled"):
        start("mimo-v2-flash", 8192, "@0.13")


@pytest.mark.parametrize("release", ["0.14", "0.16", "0.19.1"])
def test_mimo_v2_stored_v_as_wide_as_k_before_0_20(release: str) -> None:
    # Nine full layers of 4 heads and 39 windows of 8 heads, with 192 elements for K and as many for V. Blocks of 32
    # tokens in full layers are as large as blocks of 16 tokens in windows.
    page, config = 16 * 8 * (192 + 192) * 2, {"max_num_batched_tokens": "17", "no_async_scheduling": ""}
    found = start("mimo-v2-flash", 131_072, f"@{release}", settings=config)
    layers, rest = divmod(found["bytes_per_block"], page)
    assert not rest
    # 127 + 17 tokens are 9 blocks, and vLLM keeps one more for each window.
    blocks = -(-9 // layers) * 131_072 // 32 + -(-39 // layers) * 10
    assert found["request_bytes"] == blocks * found["bytes_per_block"]


@pytest.mark.parametrize(
    ("asked", "hint"),
    [({"settings": {"block_size": "64"}}, "use --block-size 256"), ({"release": "@0.18"}, "vLLM 0.20.0 has one")],
)
def test_refusals_say_what_to_type(asked: dict[str, Any], hint: str) -> None:
    with pytest.raises(KvcalcError) as refused:
        start(V4, 8192, **asked)
    assert refused.value.hint == hint


@pytest.mark.parametrize(
    ("tokens", "settings", "request_bytes"),
    [
        (8192, {}, (128 + 2 * 129) * 2_367_488),
        (131_072, {}, (2048 + 2 * 265) * 2_367_488),
        # One group of all layers: 46 x 64 x 2,176 + 13 x 64 x 132 bytes, in whole rows of 2,176.
        (8192, {"disable_hybrid_kv_cache_manager": ""}, 128 * 2995 * 2176),
    ],
)
def test_dots3_note(tokens: int, settings: dict[str, str], request_bytes: int) -> None:
    """vLLM 0.33.0's own planner (get_kv_cache_groups with the layout BLHNC) for the specs of models/dots3_note.

    All 46 layers have rows of 1,024 + 64 elements in 16 bits, 2,176 bytes, also those that store a latent of 512. 13 of
    them have index keys too, of 132 bytes. With 64 tokens in a block, the 33 layers with a window are two groups of 17
    and 16: 17 x 64 x 2,176 = 2,367,488 bytes, more than the 13 x 64 x (2,176 + 132) of the others. At most 16,384
    tokens are in flight beside a window of 512.
    """
    settings = {"max_num_batched_tokens": "8192", **settings}
    found = start("dots3-note", tokens, settings=settings)
    assert (found["block_size"], found["request_bytes"]) == (64, request_bytes)


def test_dots3_note_drafts_with_a_window() -> None:
    """Without mtp_layer_types (SpeculativeConfig, vLLM 0.33.0): the 34 layers with a window are two groups of 17."""
    spec = kvcalc.load_model("dots3-note")._replace(num_draft_layers=1)
    asked: dict[str, Any] = {"context_tokens": 8192, "dtype": "bf16", "kv_memory_bytes": 40 * GIB}
    settings = {"max-num-batched-tokens": "8192", "num-speculative-tokens": "3"}
    found = estimate(spec, engine="vllm", engine_settings=settings, **asked)["engine"]
    assert found["request_bytes"] == (128 + 2 * 129) * 17 * 64 * 2176
    assert found["num_gpu_blocks"] == 40 * GIB // (17 * 64 * 2176)


def test_what_vllm_refuses_for_dots3_note() -> None:
    for release, asked in (("", {"kv_dtype": "fp8"}), ("@0.28", {})):
        with pytest.raises(KvcalcError, match=r"in 16 bits|before 0\.29"):
            start("dots3-note", 8192, release, **asked)


@pytest.mark.parametrize(
    ("device", "tokens", "block_size", "block", "request_bytes"),
    [
        ("h200x8", 8192, 64, 116_928, 225_437_184),
        ("h200x8", 131_072, 64, 116_928, 662_747_904),
        ("b200x8", 8192, 128, 136_224, 183_902_400),
        ("b200x8", 131_072, 128, 136_224, 491_768_640),
    ],
)
def test_deepseek_v41(device: str, tokens: int, block_size: int, block: int, request_bytes: int) -> None:
    """vLLM 0.33.0's own planner (get_kv_cache_groups with the layout BLHNC) for the specs of models/deepseek_v41.

    On Hopper a row of a window has 584 bytes, on B200 528 and an entry 288. Four layers keep entries and index keys of
    132 bytes; three of these have a ring of 8 rows of 1,024 numbers in fp32.
    """
    found = estimate(
        kvcalc.load_model("deepseek-v4.1-flash"), engine="vllm", context_tokens=tokens, tensor_parallel_size=8,
        devices=kvcalc.find_devices(device), engine_settings={"max-num-batched-tokens": "8192"},
    )["engine"]  # fmt: skip
    assert (found["block_size"], found["bytes_per_block"], found["request_bytes"]) == (block_size, block, request_bytes)


def test_what_is_refused_for_deepseek_v41() -> None:
    for device, asked, match in (
        ("rtx-5090x8", {}, "this device"), ("mi355xx8", {}, "this device"), ("h200x8", {"kv_dtype": "bf16"}, "in fp8"),
        ("b200x8", {"kv_dtype": "fp8_ds_mla"}, "on B200"), ("h200x8", {"engine": "vllm@0.32"}, r"before 0\.33"),
    ):  # fmt: skip
        full: dict[str, Any] = {"engine": "vllm", "tensor_parallel_size": 8, **asked}
        with pytest.raises(KvcalcError, match=match):
            estimate(
                kvcalc.load_model("deepseek-v4.1-flash"),
                context_tokens=8192,
                devices=kvcalc.find_devices(device),
                **full,
            )


def test_only_the_source_layers_of_deepseek_v41_keep_entries() -> None:
    """Three layers with an entry per two tokens and one with an entry per token, each of 512 and a key of 128 numbers.

    The 20 layers after layer 20 read its entries, and five of them score its keys.
    """
    spec = kvcalc.load_model("deepseek-v4.1-flash")
    kept = {n: c for group in spec.layers for c in group.caches for n in range(group.first, group.last + 1)}
    sources = {number: cache for number, cache in kept.items() if isinstance(cache, CompressedAttention) and cache[2]}
    assert {number: (cache.compress_rate, cache.readers, cache.scorers) for number, cache in sources.items()} == {
        2: (2, 6, 1), 8: (2, 6, 1), 14: (2, 6, 1), 20: (1, 20, 5),
    }  # fmt: skip
    found = estimate(spec, context_tokens=8192)["kv_cache"]
    entries = (3 * 4096 + 8192) * (512 + 128) * 2
    assert found["stored_bytes"] == 40 * 128 * 512 * 2 + entries
    # An open entry of one token: its key and its gate.
    assert estimate(spec, context_tokens=8193)["kv_cache"]["stored_bytes"] == found["stored_bytes"] + 640 * 2 + 3 * 2048
    reads = 40 * 128 * 512 + (18 + 20) * 512 * 512 + (3 * 4096 + 5 * 8192) * 128
    assert found["decode_read_bytes"] == 2 * reads


@pytest.mark.parametrize(
    ("tokens", "ranks", "block", "request_bytes"),
    [(8192, 1, 1_441_792, 21_792_686_080), (131_072, 4, 360_448, 12_244_058_112)],
)
def test_inkling(tokens: int, ranks: int, block: int, request_bytes: int) -> None:
    """vLLM 0.33.0's own planner for the specs of models/inkling.

    The inputs of a layer's convolutions are a window of four tokens. Eleven layers keep all tokens, so there are
    groups of eleven: one and five of attention, and as many of convolutions.
    """
    found = start("inkling", tokens, settings={"max_num_batched_tokens": "8192"}, tensor_parallel_size=ranks)
    assert (found["block_size"], found["bytes_per_block"], found["request_bytes"]) == (32, block, request_bytes)


def test_what_vllm_refuses_for_inkling() -> None:
    for release, ranks, match in (("", 16, "KV heads"), ("@0.32", 1, r"before 0\.33")):
        with pytest.raises(KvcalcError, match=match):
            start("inkling", 8192, release, tensor_parallel_size=ranks)


def test_the_states_of_compressors_have_a_line_of_their_own() -> None:
    """They are in fp32 and take the same blocks as windows, whatever the type of the cache. GPT-OSS has none."""
    name = "full compressor states in fp32"
    for model, has_states in ((V4, True), ("gpt-oss-20b", False)):
        found = estimate(kvcalc.load_model(model), engine="vllm", context_tokens=8192)["engine"]
        sizes = {line["name"]: line["bytes"] for line in found["request_lines"]}
        assert (sizes.get(name, 0) > 0) is has_states


@pytest.mark.parametrize(
    ("dtype", "pages"),
    [
        # Rows of 584 bytes, in pages of a multiple of 576: a window of 128 tokens in blocks of 32, an entry and an
        # index key of 132 bytes for two tokens, and a ring of keys and gates of 512 numbers in fp32.
        ("fp8", {"window": (32, 19_008), "compressed": (64, 19_008), "index keys": (64, 4_608),
                 "buffers": (8, 32_768)}),
        # On B200 528 and 288 bytes, in multiples of 512. A block is a multiple of a window's and of an entry's row.
        ("nvfp4_ds_mla", {"window": (32, 16_896), "compressed": (64, 9_216), "index keys": (64, 4_608),
                          "buffers": (8, 32_768)}),
    ],
)  # fmt: skip
def test_the_pages_of_a_source_layer_of_deepseek_v41(dtype: str, pages: dict[str, tuple[int, int]]) -> None:
    """models/deepseek_v41/attention.py and v1/attention/backends/mla/sparse_swa.py, vLLM 0.33.0."""
    found = v41(2, dtype)
    assert {part: (page.block_size, page.bytes) for part, page in found.items()} == pages
    assert found["window"].stride == (0 if dtype == "fp8" else lcm(528, 288))
    assert {part: page.rate for part, page in found.items()} == {
        "window": 1, "compressed": 2, "index keys": 2, "buffers": 1
    }  # fmt: skip
    # An entry for each token needs no ring, and layers without entries have a window alone.
    assert list(v41(1, dtype)) == ["window", "compressed", "index keys"]
    assert list(v41(0, dtype)) == ["window"]


def v41(rate: int, dtype: str = "fp8", drafted: int = 0, **changes: Any) -> dict[str, Page]:
    spec = kvcalc.load_model("deepseek-v4.1-flash")
    cache = next(one for one in all_caches(spec) if isinstance(one, CompressedAttention) and one.compress_rate == rate)
    spec = spec._replace(attention=spec.attention._replace(**changes))
    asked = own_dtype(dtype)
    return dict(v41_pages(spec, cache, DTYPES[asked] if isinstance(asked, str) else asked, 64, drafted, ANYWHERE))


@pytest.mark.parametrize(("drafted", "ring"), [(0, 8), (3, 8), (6, 8), (7, 16), (14, 16), (15, 32)])
def test_the_ring_of_deepseek_v41_has_room_for_drafts(drafted: int, ring: int) -> None:
    """A power of two above the drafted tokens and one more, and at least 8 (compressor.py of models/deepseek_v41)."""
    assert v41(2, drafted=drafted)["buffers"].block_size == ring


def test_kernels_of_deepseek_v41_that_were_not_read() -> None:
    """Mega attention, for nvfp4, needs 8 heads. All need rotary keys of 64."""
    assert v41(2, "nvfp4_ds_mla", num_heads=8)
    assert v41(2, "fp8", num_heads=4)
    for dtype, changes, words in (
        ("nvfp4_ds_mla", {"num_heads": 7}, "less than 8 heads"), ("fp8", {"rope_dim": 32}, "qk_rope_head_dim 64"),
    ):  # fmt: skip
        with pytest.raises(ModelError, match=words):
            v41(2, dtype, **changes)


@pytest.mark.parametrize(
    ("rate", "pages"),
    [
        (0, {"window": (64, 128, 37_440)}),
        # One entry for 128 tokens, and the keys and gates of these in fp32: 2 x 512 x 4 bytes.
        (128, {"window": (64, 128, 37_440), "compressed": (256, 0, 1_728), "buffers": (8, 128, 32_832)}),
        # Entries of 4 tokens overlap, so twice the state is kept; and index keys of 128 have states of their own.
        (4, {"window": (64, 128, 37_440), "compressed": (256, 0, 37_440), "index keys": (256, 0, 8_640),
             "buffers": (4, 8, 32_832), "": (4, 8, 8_640)}),
    ],
)  # fmt: skip
def test_the_pages_of_each_kind_of_layer_of_deepseek_v4(rate: int, pages: dict[str, tuple[int, int, int]]) -> None:
    """CompressorStateCache (models/deepseek_v4/compressor.py). All pages are multiples of 576 bytes."""
    spec = kvcalc.load_model(V4)
    cache = next(one for one in all_caches(spec) if isinstance(one, CompressedAttention) and one.compress_rate == rate)
    found = dict(compressed_pages(spec, cache, DTYPES["fp8"], 256))
    assert {part: (page.block_size, page.span, page.bytes) for part, page in found.items()} == pages
    wrong = spec._replace(attention=spec.attention._replace(rope_dim=32))
    for other, odd in ((wrong, cache), (spec, cache._replace(compress_rate=8)), (spec, cache._replace(head_dim=256))):
        with pytest.raises(ModelError, match="rates of 4 or 128"):
            compressed_pages(other, odd, DTYPES["fp8"], 256)
