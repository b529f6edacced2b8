"""vLLM's own flags for its cache: the hybrid manager, recurrent states, and layers that keep the model's type.

Figures are of vLLM 0.33.0's own functions (get_kv_cache_groups, _align_heterogeneous_kv_block_size, TurboQuantConfig,
and the backends' customize_spec), for 131,072 tokens and two steps of 8,192 in flight, in 40 GiB.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import kvcalc
from kvcalc.engines import load_engine
from kvcalc.engines.place import Place
from kvcalc.engines.vllm.layers import _glm5_pages
from kvcalc.engines.vllm.settings import check_partition, check_token_ranks, is_number_of_layers
from kvcalc.errors import KvcalcError, LayoutError
from kvcalc.model.caches import IndexerKeys
from kvcalc.model.layout import Layout
from kvcalc.model.presets import find_preset
from kvcalc.releases import release_of
from tests.documents import estimate
from tests.engines.test_vllm_states import GIB, start

TOKENS = 131_072

PLANNED = [
    # Two layers at both ends keep bf16. The kernel of the first one counts a byte per element of the others, so a block
    # of 32 tokens is as large as 16 tokens in bf16.
    ("llama-3.1-8b", 1, "turboquant_k8v4", None, 32, 1_929_216, 7_902_068_736, 22_262),
    ("llama-3.1-8b", 8, "turboquant_4bit_nc", None, 32, 185_600, 760_217_600, 231_409),
    ("llama-3.1-8b", 1, "turboquant_k3v4_nc", None, 32, 1_370_112, 5_611_978_752, 31_347),
    ("llama-3.1-8b", 8, "turboquant_3bit_nc", None, 32, 156_928, 642_777_088, 273_690),
    ("llama-3.1-8b", 1, "fp8", "0,31", 32, 2_228_224, 9_126_805_504, 19_275),
    ("llama-3.1-8b", 1, "nvfp4", "0,31", 64, 2_736_128, 5_603_590_144, 15_697),
    ("gpt-oss-20b", 1, "fp8", "sliding_window", 32, 393_216, 2_016_804_864, 109_226),
    ("gpt-oss-20b", 1, "nvfp4", "sliding_window", 64, 442_368, 1_362_935_808, 97_090),
    # One layer of its kind makes groups of one layer.
    ("gpt-oss-20b", 1, "nvfp4", "0", 64, 36_864, 1_049_075_712, 1_165_084),
    ("gpt-oss-20b", 1, "nvfp4", None, 16, 110_592, 1_020_211_200, 388_361),
]


@pytest.mark.parametrize(("model", "tp", "dtype", "skips", "block_size", "block", "request_bytes", "blocks"), PLANNED)
def test_layers_in_the_models_own_type(
    model: str, tp: int, dtype: str, skips: str | None, block_size: int, block: int, request_bytes: int, blocks: int
) -> None:
    settings = {} if skips is None else {"kv_cache_dtype_skip_layers": skips}
    found = start(
        model, TOKENS, tensor_parallel_size=tp, kv_dtype=dtype, kv_memory_bytes=40 * GIB, settings=settings
    )  # fmt: skip
    assert (found["block_size"], found["bytes_per_block"]) == (block_size, block)
    assert (found["request_bytes"], found["num_gpu_blocks"]) == (request_bytes, blocks)


def test_without_the_hybrid_manager_windows_keep_all_tokens() -> None:
    flag = {"disable_hybrid_kv_cache_manager": ""}
    found = start("gpt-oss-20b", TOKENS, settings=flag)
    assert (found["bytes_per_block"], found["request_bytes"]) == (786_432, 6_442_450_944)
    assert found["disable_hybrid_kv_cache_manager"]
    wide = start("mimo-v2-flash", TOKENS, tensor_parallel_size=4, settings=flag)
    assert (wide["bytes_per_block"], wide["request_bytes"]) == (890_880, 7_298_088_960)
    # If all layers have the window, they keep it.
    assert start("mistral-7b-v0.1", TOKENS, settings=flag) | {"disable_hybrid_kv_cache_manager": False} == start(
        "mistral-7b-v0.1", TOKENS
    )
    assert (
        start("deepseek-v3.2", TOKENS, settings=flag)["request_bytes"]
        == start("deepseek-v3.2", TOKENS)["request_bytes"]
    )
    for model in ("qwen3.6-27b", "deepseek-v4-flash"):
        with pytest.raises(KvcalcError, match="not supported for its kinds of layers"):
            start(model, TOKENS, settings=flag)


def test_the_types_of_states() -> None:
    # A state of Qwen3-Next: 8,192 x 3 inputs and 32 heads of 128 x 128; in bf16 by default.
    inputs, elements = 8192 * 3, 32 * 128 * 128

    def page(settings: dict[str, str]) -> int:
        found = start("qwen3-next-80b-a3b", 8192, settings={"no_enable_prefix_caching": "", **settings})
        # The attention page that holds a state: blocks of 16 tokens of 1,024 bytes each (2 heads of 256, K and V).
        return int(found["block_size"]) * 2048

    def rounded(size: int) -> int:
        return -(-size // (16 * 2048)) * 16 * 2048

    assert page({}) == rounded(2 * (inputs + elements))
    assert page({"mamba_ssm_cache_dtype": "float32"}) == rounded(2 * inputs + 4 * elements)
    assert page({"mamba_cache_dtype": "float32"}) == rounded(4 * (inputs + elements))
    both = {"mamba_cache_dtype": "float32", "mamba_ssm_cache_dtype": "bfloat16"}
    assert page(both) == rounded(4 * inputs + 2 * elements)
    with pytest.raises(KvcalcError, match="not supported for KDA"):
        start("kimi-linear-48b", 8192, settings={"mamba_ssm_cache_dtype": "float16"})


def test_a_config_of_nemotron_3_names_the_type_of_its_states() -> None:
    """A page holds a state of 96 heads x 80 x 128 and 3 columns of 9,728 inputs: blocks of 16 tokens of 4,096 bytes."""
    preset = find_preset("nemotron-3-nano-4b")
    assert preset is not None
    config = preset.config
    sizes = {}
    for named in ("float32", "float16", "bfloat16"):
        model = kvcalc.read_config({**config, "mamba_ssm_cache_dtype": named}, "nano", "test")
        sizes[named] = estimate(model, context_tokens=8192, engine="vllm@0.20")["engine"]["block_size"]
    state, inputs = 96 * 80 * 128, 3 * (96 * 80 + 2 * 8 * 128) * 2
    assert sizes["float32"] == -(-(4 * state + inputs) // 4096 // 16) * 16
    assert sizes["float16"] == sizes["bfloat16"] == -(-(2 * state + inputs) // 4096 // 16) * 16
    with pytest.raises(KvcalcError, match="float8"):
        kvcalc.read_config({**config, "mamba_ssm_cache_dtype": "float8"}, "nano", "test")


def test_a_state_for_every_block_on_request() -> None:
    nano = "nemotron-3-nano-30b-a3b"
    chosen = start(nano, 32_768, "@0.28", settings={"mamba_cache_mode": "all"})
    assert chosen["mamba_cache_mode"] == "all"
    older = start(nano, 32_768, "@0.27", settings={"enable_prefix_caching": True})
    assert chosen["block_size"] == older["block_size"] != start(nano, 32_768, "@0.28")["block_size"]
    # Before 0.28 it was the default; align asks for the newest states only.
    asked = {"enable_prefix_caching": True, "mamba_cache_mode": "align"}
    assert start(nano, 32_768, "@0.27", settings=asked)["mamba_cache_mode"] == "align"
    # Delta nets keep no state for every block.
    assert start("qwen3.6-27b", 32_768, "@0.28", settings={"mamba_cache_mode": "all"})["mamba_cache_mode"] == "align"
    # A state for every 4,096 tokens, which holds in blocks of a multiple of them.
    fewer = start(nano, 32_768, "@0.27", settings={"enable_prefix_caching": True, "mamba_block_size": "4096"})
    assert fewer["block_size"] == 4096


def test_blocks_beside_states_are_multiples_of_the_size_asked_for() -> None:
    # 784 tokens hold a state of Qwen3.6-27B; with FlashInfer's prefill blocks are multiples of 64.
    for size, block in (("16", 832), ("128", 896), ("256", 1024), ("1024", 1024)):
        assert start("qwen3.6-27b", 32_768, settings={"block_size": size})["block_size"] == block


@pytest.mark.parametrize(
    ("model", "release", "settings", "words"),
    [
        ("llama-3.1-8b", "@0.18", {"kv_cache_dtype_skip_layers": "0"}, "--kv-cache-dtype-skip-layers: this release"),
        ("qwen3-next-80b-a3b", "@0.14", {"mamba_cache_mode": "align"}, "--mamba-cache-mode: this release"),
        ("qwen3-next-80b-a3b", "@0.12", {"mamba_cache_dtype": "float16"}, "--mamba-cache-dtype float16: this release"),
        ("qwen3-next-80b-a3b", "@0.21", {"mamba_ssm_cache_dtype": "bfloat16"}, "bfloat16: this release"),
        ("gpt-oss-20b", "@0.9.0", {"disable_hybrid_kv_cache_manager": ""}, "it is in vLLM 0.9.1 and later"),
        ("nemotron-3-nano-30b-a3b", "@0.32", {"mamba_cache_mode": "all"}, "0.32 and later do not have it"),
        ("jamba-v0.1", "", {"mamba_block_size": "64", "no_enable_prefix_caching": ""}, "needs prefix caching"),
        ("llama-3.1-8b", "", {"kv_cache_dtype_skip_layers": "32"}, "use numbers from 0 to 31"),
        ("jamba-v0.1", "@0.32", {"kv_cache_dtype_skip_layers": "4"}, "not modelled beside recurrent states"),
        ("deepseek-v3", "", {"kv_cache_dtype_skip_layers": "4"}, "not modelled for its layers"),
        (
            "gpt-oss-20b",
            "",
            {"kv_cache_dtype_skip_layers": "4", "disable_hybrid_kv_cache_manager": ""},
            "not modelled for its layers",
        ),
    ],
)
def test_flags_that_a_release_or_a_model_does_not_have(
    model: str, release: str, settings: dict[str, str], words: str
) -> None:
    with pytest.raises(KvcalcError) as caught:
        start(model, 8192, release, settings=settings)
    assert words in f"{caught.value} {caught.value.hint}"


def test_turboquant_beside_states_skips_no_layer() -> None:
    asked: dict[str, Any] = {"kv_dtype": "turboquant_4bit_nc", "settings": {"gdn_prefill_backend": "triton"}}
    # 4 heads of 256: 128 + 2 bytes of a key, 128 + 4 of a value.
    found = start("qwen3.6-27b", 32_768, **asked)
    assert found["bytes_per_block"] == 16 * found["block_size"] * 4 * (130 + 132)
    with pytest.raises(KvcalcError, match="not modelled beside recurrent states"):
        start("qwen3.6-27b", 32_768, "@0.21", **asked)


@pytest.mark.parametrize(
    ("word", "is_number"), [("0", True), ("61", True), ("999999", True), ("1000000", False), ("", False), ("-1", False),
                            ("\u00b2", False), ("\u0663", False), ("sliding_window", False)]
)  # fmt: skip
def test_layers_are_numbered_in_plain_digits(word: str, is_number: bool) -> None:
    assert is_number_of_layers(word) is is_number


@pytest.mark.parametrize(
    ("rate", "drafts", "ring"), [(4, 0, 4), (4, 1, 8), (4, 4, 8), (4, 5, 16), (4, 12, 16), (4, 13, 32), (2, 3, 8)]
)
def test_the_ring_of_open_pools_is_a_power_of_two_of_pools(rate: int, drafts: int, ring: int) -> None:
    """The tokens of the open pool, and those that are drafted beside them (Glm5NextTailCache)."""
    spec: Any = SimpleNamespace(stated={"index_kpool": rate})
    settings: Any = SimpleNamespace(num_speculative_tokens=drafts, block_size=64)
    pages = _glm5_pages(spec, IndexerKeys(257), settings)
    assert [(page.block_size, page.token_bytes) for page, _ in pages] == [(64, 132), (ring, 2 * 128 * 2)]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        # As many requests as tokens in a step start.
        ({"max-num-seqs": "2048", "max-num-batched-tokens": "2048"}, None),
        ({"max-num-seqs": "2049", "max-num-batched-tokens": "2048"}, "fewer tokens in a step than requests: 2,048"),
        # MaxLoRARanks (config/lora.py).
        *(({"max-lora-rank": str(rank)}, None) for rank in (1, 8, 16, 32, 64, 128, 256, 320, 512)),
        ({"max-lora-rank": "2"}, "use 8"), ({"max-lora-rank": "257"}, "use 320"), ({"max-lora-rank": "513"}, "use 512"),
    ],
)  # fmt: skip
def test_numbers_of_requests_and_ranks_with_which_vllm_starts(settings: dict[str, str], words: str | None) -> None:
    if words is None:
        load_engine("vllm", kvcalc.load_model("llama-3.1-8b"), settings)
        return
    with pytest.raises(LayoutError) as refused:
        load_engine("vllm", kvcalc.load_model("llama-3.1-8b"), settings)
    assert words in f"{refused.value} {refused.value.hint}"


@pytest.mark.parametrize(
    ("option", "type_name", "first", "before"),
    [
        (option, type_name, first, before)
        for option in ("mamba-cache-dtype", "mamba-ssm-cache-dtype")
        for type_name, first, before in (("float16", "0.13.0", "0.12.0"), ("bfloat16", "0.22.0", "0.21.0"))
    ],
)
def test_the_first_release_with_a_type_of_states(option: str, type_name: str, first: str, before: str) -> None:
    """MambaDType (config/cache.py)."""
    spec = kvcalc.load_model("nemotron-3-nano-30b-a3b")
    load_engine(f"vllm@{first}", spec, {option: type_name})
    with pytest.raises(KvcalcError, match=f"--{option} {type_name}: this release of vLLM does not have it"):
        load_engine(f"vllm@{before}", spec, {option: type_name})


@pytest.mark.parametrize(
    ("partition", "stages", "starts"),
    [
        (None, 2, True), ("16,16", 2, True), ("1,31", 2, True), ("32", 1, True), ("32,1", 2, False), ("0,32", 2, False),
        ("33,-1", 2, False), ("16,16", 1, False), ("16,15", 2, False), ("16,x", 2, False), ("", 1, False),
    ],
)  # fmt: skip
def test_the_layers_of_stages_are_the_models(partition: str | None, stages: int, starts: bool) -> None:
    """get_pp_indices (distributed/utils.py)."""
    if starts:
        check_partition(partition, 32, stages)
        return
    with pytest.raises(KvcalcError, match="--pp-layer-partition"):
        check_partition(partition, 32, stages)


@pytest.mark.parametrize(
    ("model", "tp", "ranks", "copies", "release", "words"),
    [
        # 8 KV heads and 4 query heads for each: 2 ranks have the same KV heads on 16 devices, and 4 on 32.
        ("llama-3.1-8b", 8, 1, 1, None, None), ("llama-3.1-8b", 16, 2, 1, None, None),
        ("llama-3.1-8b", 32, 4, 1, None, None), ("llama-3.1-8b", 8, 2, 1, None, "allow 1"),
        ("llama-3.1-8b", 16, 4, 1, None, "use --tp 32"), ("llama-3.1-8b", 12, 8, 1, None, "does not divide --tp 12"),
        ("llama-3.1-8b", 64, 8, 1, None, "does not divide the 4 query heads"),
        # Latents are on every rank. Windows are refused.
        ("deepseek-v3", 8, 8, 1, None, None), ("deepseek-v3", 8, 3, 1, None, "does not divide --tp 8"),
        ("gpt-oss-20b", 16, 2, 1, None, "sliding windows"),
        # With copies that divide a prompt: they, or all ranks of all; since 0.30 for sparse latents only.
        ("deepseek-v3.2", 8, 2, 2, None, None), ("deepseek-v3.2", 8, 16, 2, None, None),
        ("deepseek-v3.2", 8, 8, 2, None, "it must be 2 or 16"), ("deepseek-v3.2", 1, 3, 2, None, "it must be 2,"),
        ("deepseek-v3", 8, 2, 2, "0.29", None), ("deepseek-v3", 8, 2, 2, "0.30", "for sparse MLA only"),
    ],
)  # fmt: skip
def test_which_ranks_divide_the_tokens_of_the_cache(
    model: str, tp: int, ranks: int, copies: int, release: str | None, words: str | None
) -> None:
    """ParallelConfig (config/parallel.py), verify_with_parallel_config (config/model.py), vLLM 0.33.0."""
    place = Place(None if release is None else release_of(f"vllm@{release}"))
    layout = Layout(tp, token_ranks=ranks, prompt_ranks=copies)
    if words is None:
        check_token_ranks(kvcalc.load_model(model), layout, place)
        return
    with pytest.raises(KvcalcError) as refused:
        check_token_ranks(kvcalc.load_model(model), layout, place)
    assert words in f"{refused.value}, {refused.value.hint}"


@pytest.mark.parametrize(
    ("model", "release", "stages", "settings", "words"),
    [
        ("deepseek-v3", "", 1, {}, None), ("deepseek-v3", "@0.26.0", 1, {}, None),
        ("deepseek-v3", "@0.25", 1, {}, "0.26 and later"), ("deepseek-v3", "@0.32.0", 2, {}, None),
        ("deepseek-v3", "@0.31", 2, {}, "only without pipeline stages"),
        ("deepseek-v3.2", "", 1, {}, None), ("deepseek-v3", "", 1, {"max-loras": "1"}, "LoRA"),
        ("deepseek-v3", "", 1, {"max-lora-rank": "8"}, "LoRA"), ("llama-3.1-8b", "", 1, {}, "MLA in all layers"),
        ("kimi-linear-48b", "", 1, {}, "MLA in all layers"), ("kimi-k2.5", "", 1, {}, "use --language-model-only"),
        ("kimi-k2.5", "", 1, {"language-model-only": ""}, None),
    ],
)  # fmt: skip
def test_which_prompts_copies_can_divide(
    model: str, release: str, stages: int, settings: dict[str, str], words: str | None
) -> None:
    """PCPManager.validate_config (v1/worker/gpu/pcp_manager.py) and check_attention_cp_compatibility, vLLM 0.33.0."""
    given, spec = {"prefill-context-parallel-size": "2", **settings}, kvcalc.load_model(model)
    if words is None:
        load_engine(f"vllm{release}", spec, given, stages)
        return
    with pytest.raises(KvcalcError) as refused:
        load_engine(f"vllm{release}", spec, given, stages)
    assert words in f"{refused.value} {refused.value.hint}"
