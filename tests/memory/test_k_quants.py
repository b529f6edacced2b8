"""llama.cpp's file types, compared with the sizes of published files."""

from __future__ import annotations

import pytest

import kvcalc
from kvcalc.errors import UsageError
from kvcalc.memory.dtypes import FILE_TYPES, parse_dtype, parse_weight_dtype
from kvcalc.memory.quantization.gguf_types import k_quant_scheme
from kvcalc.memory.weights import quantized_bytes
from kvcalc.model.resolve import load_model
from kvcalc.model.spec import weights_of
from kvcalc.model.tensors import LINEAR
from tests.rows import every_row


def file_bytes(name: str, file_type: str) -> int:
    spec = load_model(name)
    weights = weights_of(spec)
    assert weights is not None
    scheme = k_quant_scheme(file_type, spec)
    return quantized_bytes(weights, parse_dtype("fp32", "x"), scheme)[0]


# Sizes of files on the Hugging Face Hub, in GB with two decimals: TheBloke/Llama-2-7B-GGUF and -70B-GGUF, and
# bartowski's Meta-Llama-3-8B-Instruct-GGUF, Llama-3.2-3B-Instruct-GGUF and Qwen2.5-14B-Instruct-GGUF.
@pytest.mark.parametrize(
    ("name", "file_type", "gigabytes"),
    [
        ("llama-2-7b", "q4_k_m", 4.08), ("llama-2-7b", "q4_k_s", 3.86), ("llama-2-7b", "q5_k_m", 4.78),
        ("llama-2-7b", "q5_k_s", 4.65), ("llama-2-7b", "q6_k", 5.53), ("llama-2-70b", "q4_k_m", 41.42),
        ("llama-3-8b", "q4_k_m", 4.92), ("llama-3-8b", "q4_k_s", 4.69), ("llama-3-8b", "q5_k_m", 5.73),
        ("llama-3-8b", "q6_k", 6.60), ("llama-3.2-3b", "q4_k_m", 2.02), ("qwen2.5-14b", "q4_k_m", 8.99),
    ],
)  # fmt: skip
def test_the_size_is_that_of_published_files(name: str, file_type: str, gigabytes: float) -> None:
    # A file also has a header with the vocabulary, a few megabytes, which is not counted as weights.
    assert file_bytes(name, file_type) / 1e9 == pytest.approx(gigabytes, abs=0.013)


ORDERED = (
    "iq1_s",
    "iq2_xxs",
    "iq2_m",
    "q2_k",
    "q3_k_s",
    "q3_k_m",
    "q3_k_l",
    "q4_k_s",
    "q4_k_m",
    "q5_k_s",
    "q5_k_m",
    "q6_k",
)


def test_more_bits_are_more_bytes() -> None:
    sizes = [file_bytes("llama-3-8b", name) for name in ORDERED]
    assert sizes == sorted(sizes)


def test_weights_may_be_of_a_file_type_and_a_cache_may_not() -> None:
    for text, name in (("Q4_K_M", "q4_k_m"), ("bf16", "bf16")):
        found = parse_weight_dtype(text)
        assert found is not None
        assert found.name == name
    for name in FILE_TYPES:
        with pytest.raises(UsageError):
            parse_dtype(name, "--kv-dtype")


def test_estimate_takes_a_file_type(kvcalc: object) -> None:
    assert callable(kvcalc)
    weights = kvcalc("estimate", "llama-3-8b", "--dtype", "q4_k_m", "--json").json["weights"]
    assert weights["dtype"] == "q4_k_m"
    assert weights["bytes"] == pytest.approx(4.912e9, rel=2e-3)


# The bytes of files on the Hugging Face Hub: bartowski's Meta-Llama-3.1-8B-Instruct-GGUF, Llama-3.2-1B-Instruct-GGUF
# and Phi-3.5-mini-instruct-GGUF, Qwen's Qwen3-4B-GGUF, Qwen3-8B-GGUF, Qwen2.5-7B-Instruct-GGUF and
# Qwen2.5-Coder-32B-Instruct-GGUF, and unsloth's Llama-3.2-3B-Instruct-GGUF and DeepSeek-R1-0528-Qwen3-8B-GGUF. Qwen's
# own files of smaller models have a head of their own, which the models do not have.
FILES = {
    "llama-3.1-8b": {
        "iq2_m": 2_948_285_856, "iq3_m": 3_784_828_320, "iq3_xs": 3_518_752_160, "iq4_nl": 4_677_993_888,
        "iq4_xs": 4_447_667_616, "q2_k": 3_179_136_416, "q3_k_l": 4_321_961_376, "q3_k_m": 4_018_922_912,
        "q3_k_s": 3_664_504_224, "q4_k_m": 4_920_739_232, "q4_k_s": 4_692_673_952, "q5_k_m": 5_732_992_416,
        "q5_k_s": 5_599_298_976, "q6_k": 6_596_011_424, "q8_0": 8_540_775_840,
    },
    "qwen3-4b": {
        "q4_k_m": 2_497_280_256, "q5_0": 2_823_710_976, "q5_k_m": 2_889_513_184, "q6_k": 3_306_260_704, "q8_0":
        4_280_404_704,
    },
    "qwen3-8b": {
        "q4_k_m": 5_027_783_488, "q5_0": 5_720_761_152, "q5_k_m": 5_851_112_224, "q6_k": 6_725_899_040, "q8_0":
        8_709_518_112, "iq4_xs": 4_581_288_448, "q2_k": 3_281_734_144,
    },
    "qwen2.5-7b": {
        "q2_k": 3_015_940_000, "q3_k_m": 3_808_391_072, "q4_0": 4_431_390_848, "q4_k_m": 4_683_073_632, "q5_0":
        5_315_176_576, "q5_k_m": 5_444_831_360, "q6_k": 6_254_198_880, "q8_0": 8_098_525_408,
    },
    "llama-3.2-3b": {
        "iq4_nl": 1_917_190_592, "iq4_xs": 1_829_110_208, "q2_k": 1_363_935_680, "q3_k_m": 1_687_159_232,
        "q3_k_s": 1_542_848_960, "q4_0": 1_921_909_184, "q4_1": 2_093_351_360, "q4_k_m": 2_019_377_600,
        "q4_k_s": 1_928_200_640, "q5_k_m": 2_322_153_920, "q5_k_s": 2_269_512_128, "q6_k": 2_643_853_760,
        "q8_0": 3_421_898_816,
    },
    "phi-3.5-mini": {
        "iq2_m": 1_316_395_296, "iq3_m": 1_855_600_416, "iq3_xs": 1_625_175_840, "iq4_xs": 2_059_853_088,
        "q2_k": 1_416_204_576, "q3_k_l": 2_087_597_856, "q3_k_m": 1_955_477_280, "q3_k_s": 1_681_798_944,
        "q4_0": 2_182_468_896, "q4_k_m": 2_393_232_672, "q4_k_s": 2_188_760_352, "q5_k_m": 2_815_276_320,
        "q5_k_s": 2_641_474_848, "q6_k": 3_135_853_344, "q8_0": 4_061_222_688,
    },
    "llama-3.2-1b": {
        "iq3_m": 657_289_344, "iq4_xs": 743_141_504, "q3_k_l": 732_524_672, "q4_0": 773_025_920, "q4_k_m":
        807_694_464, "q4_k_s": 775_647_360, "q5_k_m": 911_503_488, "q5_k_s": 892_563_584, "q6_k": 1_021_800_576,
        "q8_0": 1_321_083_008,
    },
    "qwen2.5-coder-32b": {
        "q2_k": 12_313_098_432, "q3_k_m": 15_935_047_872, "q4_0": 18_640_230_592, "q4_k_m": 19_851_335_872,
        "q5_0": 22_638_254_272, "q5_k_m": 23_262_156_992, "q6_k": 26_886_154_432, "q8_0": 34_820_884_672,
    },
    # The experts stay in mxfp4. unsloth/gpt-oss-20b-GGUF.
    "gpt-oss-20b": {"q4_k_m": 11_624_759_488, "q8_0": 12_110_000_000},
}  # fmt: skip
# A file begins with the vocabulary and other facts.
HEADER = 8_300_000


# An importance matrix gives the first down-projections of q4_0 five bits. unsloth's iq4_xs is its own mix.
_OTHER_MIXES = {("llama-3.2-3b", "q4_0"), ("phi-3.5-mini", "q4_0"), ("llama-3.2-1b", "q4_0"), ("qwen3-8b", "iq4_xs")}


@every_row("name", [name for name in FILES if name != "gpt-oss-20b"])
def test_what_is_not_counted_is_the_same_header_in_all_files_of_a_model(name: str) -> None:
    """To 2 KB in 35 GB: the header names the types."""
    headers = []
    for file_type, published in FILES[name].items():
        weights = kvcalc.estimate(name, engine="llama.cpp", dtype=file_type)["weights"]
        assert weights is not None
        if (name, file_type) not in _OTHER_MIXES:
            headers.append(published - (weights["bytes"] or 0))
    assert max(headers) - min(headers) < 2048
    assert 0 < min(headers) <= HEADER


@every_row("name, file_type", [(name, kind) for name, kinds in FILES.items() for kind in kinds])
def test_the_bytes_are_those_of_a_published_file_within_one_percent(name: str, file_type: str) -> None:
    weights = kvcalc.estimate(name, engine="llama.cpp", dtype=file_type)["weights"]
    assert weights is not None
    assert weights["bytes"] is not None
    published = FILES[name][file_type]
    nearest = min(max(weights["bytes"], published - HEADER), published)
    assert weights["bytes"] == pytest.approx(nearest, rel=0.01)


def test_rows_that_blocks_of_256_do_not_divide_have_smaller_blocks() -> None:
    # Qwen2.5-0.5B is 896 wide: Q4_K falls back to Q5_0, with 22 bytes for 32 elements.
    found = k_quant_scheme("q4_k_s", load_model("qwen2.5-0.5b")).format_of("model.layers.9.mlp.up_proj", LINEAR)
    assert found is not None
    assert found.bytes_of(4864, 896) == 4864 * 896 // 32 * 22


def test_the_inputs_of_a_delta_net_have_the_type_of_values() -> None:
    # category_is_attn_v (src/llama-quant.cpp) counts attn_qkv, and the layers with it, as attn_v. The published file
    # of ornith-ai/Ornith-1.0-9B, which has the layers of Qwen3.5-9B, has 5,629,108,704 bytes.
    scheme = k_quant_scheme("q4_k_m", load_model("qwen3.5-9b"))
    formats = [scheme.format_of(f"model.layers.{layer}.linear_attn.in_proj_qkv", LINEAR) for layer in (0, 4, 6, 31)]
    names = [each and each.name for each in formats]
    assert names == ["q6_k", "q4_k", "q6_k", "q6_k"]
    gate = scheme.format_of("model.layers.0.linear_attn.in_proj_z", LINEAR)
    assert gate is not None
    assert gate.name == "q4_k"
    found = kvcalc.estimate(load_model("ornith-ai/Ornith-1.0-9B-GGUF:Q4_K_M"), context_tokens=64, engine="llama.cpp")
    assert found["weights"]["bytes"] == pytest.approx(5_629_108_704, rel=0.005)
