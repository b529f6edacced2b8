"""The parameters of presets compared with the number that their publishers give.

A wrong size, number of layers or of experts changes the number by more than 1%.
"""

from __future__ import annotations

import re

import pytest

from kvcalc.memory.weights import count_parameters
from kvcalc.model.presets import find_preset, shipped_presets
from kvcalc.model.resolve import load_model, spec_of
from kvcalc.model.spec import weights_of
from kvcalc.model.towers import towers_of
from tests.rows import every_row

# In billions, without towers.
PUBLISHED = {
    "codegemma-7b": 8.54, "codellama-13b": 13.02, "codellama-70b": 68.98, "codellama-7b": 6.74,
    "command-a": 111.06, "command-r-plus": 103.8, "command-r7b": 8.03, "ernie-4.5-0.3b": 0.361,
    "ernie-4.5-21b-a3b": 21.83, "falcon-180b": 179.5, "falcon3-1b": 1.67, "falcon3-3b": 3.23, "falcon3-7b": 7.46,
    "glm-4-9b": 9.4, "glm-4-9b-0414": 9.4, "glm-4.1v-9b": 9.4, "glm-4.6v-flash": 9.4, "gpt-j-6b": 6.05,
    "gpt-neox-20b": 20.55, "gpt2-large": 0.774, "gpt2-medium": 0.355, "gpt2-xl": 1.558, "internvl3-8b": 7.61,
    "internvl3.5-8b": 8.19, "kimi-vl-a3b": 15.96, "llama-13b": 13.02, "llama-30b": 32.53, "llama-65b": 65.29,
    "llava-v1.6-mistral-7b": 7.24, "mathstral-7b": 7.25, "mimo-v2.5-pro": 1020, "minicpm-v-4.5": 8.19,
    "ministral-3-8b": 8.49, "mistral-7b-v0.2": 7.24, "mistral-large-2": 122.6, "moonlight-16b-a3b": 15.96,
    "nemotron-3-nano-4b": 3.97, "nemotron-nano-12b-v2": 12.31, "nemotron-nano-9b-v2": 8.89, "olmo-2-13b": 13.7,
    "olmo-2-7b": 7.3, "opt-1.3b": 1.316, "opt-125m": 0.125, "opt-13b": 12.85, "opt-2.7b": 2.65, "opt-30b": 29.97,
    "opt-66b": 65.7, "paddleocr-vl": 0.361, "phi-3-vision-128k": 3.82, "pixtral-large": 122.6, "pythia-1.4b": 1.41,
    "pythia-12b": 11.85, "pythia-160m": 0.1623, "pythia-1b": 1.01, "pythia-2.8b": 2.775, "pythia-410m": 0.405,
    "pythia-6.9b": 6.86, "pythia-70m": 0.0704, "qwen1.5-moe-a2.7b": 14.32, "qwen2.5-coder-0.5b": 0.494,
    "qwen2.5-coder-1.5b": 1.54, "qwen2.5-coder-14b": 14.77, "qwen2.5-coder-32b": 32.76, "qwen2.5-coder-3b": 3.09,
    "qwen2.5-coder-7b": 7.62, "qwen2.5-math-1.5b": 1.54, "qwen2.5-math-72b": 72.7, "qwen2.5-math-7b": 7.62,
    "qwen3-asr-1.7b": 1.72, "qwen3-omni-30b-a3b": 30.5, "qwen3.5-2b": 1.88, "qwen3.5-9b": 8.95, "qwq-32b": 32.76,
    "salamandra-7b": 7.77, "smollm2-1.7b": 1.71, "smollm2-135m": 0.1345, "solar-open-100b": 102.65,
    "voxtral-mini-3b": 4.01, "voxtral-small-24b": 23.57, "afm-4.5b": 4.62, "apertus-70b": 70.6, "codestral-22b": 22.25,
    "command-r-08-2024": 32.3, "dbrx": 131.6, "deepseek-coder-33b": 33.3, "dots.llm1": 142.8, "exaone-4.0-32b": 32.0,
    "falcon-h1-7b": 7.59, "glm-4-32b-0414": 32.57, "granite-3.3-8b": 8.17, "granite-4.0-h-tiny": 6.94,
    "hunyuan-7b": 7.5, "internlm3-8b": 8.8, "lfm2-2.6b": 2.57, "lfm2.5-1.2b": 1.17, "ling-1t": 1000,
    "ling-flash-2.0": 103, "ling-mini-2.0": 16.26, "minicpm5-1b": 1.0806, "mistral-large-3": 673,
    "mistral-small-3.1-24b": 23.57, "nemotron-mini-4b": 4.19, "olmoe-1b-7b": 6.92, "qwen2-57b-a14b": 57.41,
    "qwen-1.8b": 1.84, "qwen-14b": 14.17, "qwen-72b": 72.29, "qwen1.5-110b": 111.2, "qwen1.5-32b": 32.5,
    "deepseek-llm-7b": 6.91, "deepseek-llm-67b": 67.4, "ernie-4.5-300b-a47b": 300, "bloom-3b": 3.0, "bloom-560m": 0.559,
    "bloom-1b7": 1.72, "open-llama-3b": 3.43, "cwm": 32.6, "olmo-7b": 6.89, "salamandra-2b": 2.25,
    "stablelm-2-1.6b": 1.64, "stable-code-3b": 2.8, "santacoder": 1.12, "llama-160m": 0.162,
    "trinity-large": 398, "trinity-mini": 26.1, "trinity-nano": 6.1, "hy3": 295, "mellum2-12b-a2.5b": 12.15,
    "mistral-small-4-119b": 119, "gemma-4-12b": 11.9, "jais-2-8b": 8.09, "iquest-coder-v1-40b": 39.8,
    "baichuan-7b": 7.0, "baichuan2-13b": 13.9, "baichuan2-7b": 7.51, "chatglm3-6b": 6.24, "deepseek-moe-16b": 16.38,
    "exaone-3.5-2.4b": 2.41, "exaone-3.5-32b": 32.0, "exaone-3.5-7.8b": 7.82, "hunyuan-a13b": 80.4,
    "hyperclovax-seed-think-14b": 14.75, "internlm-7b": 7.32, "internlm2-20b": 19.86, "internlm2-7b": 7.74,
    "kimi-k3": 2780, "laguna-s-2.1": 118, "ling-3.0-flash": 124, "ling-2.6-flash": 104.2, "alia-40b": 40.434,
    "eurollm-22b": 22.64, "lfm2.5-230m": 0.23, "falcon-h1-1.5b": 1.555, "ling-lite": 16.8, "minicpm-2b": 2.72,
    "minicpm4-8b": 8.19, "nemotron-super-49b": 49.87, "nemotron-ultra-253b": 253.4, "orion-14b": 14.5,
    "step-3.5-flash": 196, "a.x-k1": 519, "xverse-7b": 7.3, "ernie-4.5-vl-28b-a3b": 28.6,
    "seed-oss-36b": 36.15, "solar-10.7b": 10.73, "starcoder": 15.5, "yi-1.5-9b": 8.83, "yi-34b": 34.39,
    "falcon-rw-1b": 1.311, "gemma-2-2b": 2.614, "gemma-2b": 2.506, "gemma-7b": 8.538, "granite-3.1-1b-a400m": 1.335,
    "granite-3.3-2b": 2.534, "granite-3b-code": 3.483, "granite-4.0-1b": 1.632, "granite-4.0-h-1b": 1.462,
    "internlm2.5-7b": 7.738, "llama-3.1-minitron-4b-depth": 4.54, "llama-3.1-minitron-4b-width": 4.513,
    "llama-3.1-nemotron-nano-4b": 4.513, "llama-3.2-1b": 1.236, "minicpm4-0.5b": 0.4339, "nemotron-h-4b": 4.489,
    "olmo-1b": 1.177, "olmo-2-1b": 1.485, "opencoder-1.5b": 1.906, "qwen-7b": 7.721, "qwen1.5-7b": 7.721,
    "stablelm-alpha-3b": 3.6385, "flan-t5-small": 0.07696, "flan-t5-base": 0.2476, "flan-t5-large": 0.7832,
    "flan-t5-xl": 2.85, "flan-t5-xxl": 11.135, "mt5-small": 0.3002, "mt5-base": 0.5824, "mt5-large": 1.2296,
    "mt5-xl": 3.7426, "mt5-xxl": 12.921, "byt5-small": 0.2996, "byt5-base": 0.5817, "ul2": 19.5,
    "stablelm-alpha-7b": 7.869, "starcoderbase-1b": 1.137, "laguna-m.1": 225.8, "command-a-plus": 218.25,
    "north-mini-code-1.0": 30.5,
}  # fmt: skip


@every_row("name", PUBLISHED)
def test_a_preset_has_the_published_number_of_parameters(name: str) -> None:
    preset = find_preset(name)
    assert preset is not None
    weights = weights_of(spec_of(preset))
    assert weights is not None
    assert count_parameters(weights).total == pytest.approx(PUBLISHED[name] * 1e9, rel=0.01)


# With the towers: the parameters in the published files (safetensors metadata of the Hub, as in llmfit
# 1.1.17). What no engine loads is taken off: a second copy of a tied embedding, a pooling head, packed positions, the
# adapters of Phi-4 (rank 256 and 320 on all 45,056 rows and columns of a layer), layers for multi-token prediction.
WITH_TOWERS = {
    "apriel-1.5-15b": 14_863_859_712, "aya-vision-8b": 8_631_842_032, "command-a-vision": 111_867_525_360,
    "deepseek-ocr": 3_336_106_240, "deepseek-ocr-2": 3_389_119_360, "deepseek-vl-1.3b": 1_975_235_584,
    "deepseek-vl-7b": 7_343_990_017, "deepseek-vl2-tiny": 3_370_501_440,
    "deepseek-vl2-small": 16_148_349_504, "devstral-small-2-24b": 24_011_361_840,
    "diffusiongemma-26b-a4b": 25_823_778_864, "dots.ocr": 3_039_179_264, "ernie-4.5-vl-28b-a3b": 29_399_294_336,
    "ernie-4.5-vl-424b-a47b": 423_526_285_184, "gemma-3-12b": 12_187_325_040, "gemma-3-27b": 27_432_406_640,
    "gemma-3-4b": 4_300_079_472, "gemma-3n-e2b": 5_439_438_272, "gemma-3n-e4b": 7_849_978_192, "gemma-4-e2b":
    5_123_178_051, "glm-4.1v-9b": 10_292_777_472, "glm-4.5v": 107_710_933_120, "glm-4.6v-flash": 10_292_777_472,
    "got-ocr2": 560_528_640, "granite-docling-258m": 257_517_120, "granite-vision-3.3-2b": 2_975_396_928,
    "idefics2-8b": 8_402_768_112, "idefics3-8b": 8_462_086_384, "intern-s1": 240_709_856_128, "intern-s1-mini":
    8_538_804_224, "internvl2-1b": 938_158_976, "internvl2-26b": 25_514_186_112, "internvl2-2b": 2_205_754_368,
    "internvl2-4b": 4_146_855_936, "internvl2-8b": 8_075_365_376, "internvl2.5-1b": 938_193_024, "internvl2.5-38b":
    38_388_164_992, "internvl2.5-4b": 3_712_637_952, "internvl2.5-78b": 78_408_318_336, "internvl3-14b":
    15_117_256_704, "internvl3-1b": 938_193_024, "internvl3-2b": 2_088_957_440, "internvl3-8b": 7_944_373_760,
    "internvl3-9b": 9_138_793_472, "internvl3.5-14b": 15_119_523_840, "internvl3.5-1b": 1_060_897_792,
    "internvl3.5-241b-a28b": 240_699_370_368, "internvl3.5-2b": 2_348_347_392, "internvl3.5-30b-a3b": 30_848_730_112,
    "internvl3.5-38b": 38_390_405_504, "internvl3.5-4b": 4_732_489_216, "internvl3.5-8b": 8_528_318_464, "kimi-k2.5":
    1_026_879_376_368, "kimi-k3": 2_779_931_837_184, "kimi-vl-a3b": 16_407_657_776, "lfm2-vl-1.6b": 1_584_804_000,
    "lfm2-vl-3b": 2_998_975_216, "lfm2-vl-450m": 450_822_656, "lfm2.5-vl-1.6b": 1_596_625_904,
    "llama-3.1-nemotron-nano-vl-8b": 8_721_768_454, "llama-3.2-11b-vision": 10_670_220_835, "llama-3.2-90b-vision":
    88_593_355_323, "llama-4-maverick": 401_583_781_376, "llama-4-scout": 108_641_793_536, "llama3-llava-next-8b":
    8_355_276_800, "llava-1.5-13b": 13_351_494_656, "llava-1.5-7b": 7_063_427_072, "llava-onevision-1.5-4b":
    4_741_610_528, "llava-onevision-1.5-8b": 8_527_214_624, "llava-onevision-qwen2-0.5b": 893_675_552,
    "llava-onevision-qwen2-72b": 73_181_570_592, "llava-onevision-qwen2-7b": 8_030_807_584, "llava-v1.6-34b":
    34_752_083_968, "llava-v1.6-mistral-7b": 7_566_747_648, "llava-v1.6-vicuna-13b": 13_351_499_776,
    "llava-v1.6-vicuna-7b": 7_063_431_168, "mimo-vl-7b": 8_306_217_216, "minicpm-llama3-v-2.5": 8_537_092_336,
    "minicpm-v-2.6": 8_099_175_152, "minicpm-v-4": 4_059_533_040, "minicpm-v-4.5": 8_695_895_280, "minimax-m3":
    427_040_140_160, "mistral-medium-3.5-128b": 127_704_210_176, "mistral-small-3.1-24b": 24_011_361_280,
    "mistral-small-4-119b": 119_401_317_952, "molmo-72b": 73_308_285_952, "molmo-7b-d": 8_021_025_280, "molmo2-4b":
    4_850_869_200, "molmo2-8b": 8_661_703_120, "muse-glimmer-30b": 29_776_626_688, "nvlm-d-72b": 79_379_593_344,
    "ovis2-8b": 8_935_282_678, "ovis2.5-2b": 2_570_429_672, "ovis2.5-9b": 9_174_807_784, "paligemma-3b":
    2_923_466_480, "paligemma2-3b": 3_032_242_416, "phi-3-vision-128k": 4_146_621_440, "qwen2-vl-2b": 2_208_985_600,
    "qwen2-vl-72b": 73_405_560_320, "qwen2-vl-7b": 8_291_375_616, "qwen2.5-vl-32b": 33_452_718_336, "qwen2.5-vl-3b":
    3_754_622_976, "qwen2.5-vl-72b": 73_410_777_344, "qwen2.5-vl-7b": 8_292_166_656, "qwen3-vl-235b-a22b":
    235_670_022_896, "qwen3-vl-2b": 2_127_532_032, "qwen3-vl-30b-a3b": 31_070_754_032, "qwen3-vl-32b": 33_357_390_064,
    "qwen3-vl-4b": 4_437_815_808, "qwen3-vl-8b": 8_767_123_696, "smolvlm-2.2b": 2_246_272_880, "smolvlm-256m":
    256_484_928, "smolvlm-500m": 507_482_304, "smolvlm2-2.2b": 2_246_784_880, "smolvlm2-256m-video": 256_484_928,
    "smolvlm2-500m-video": 507_482_304, "step3-vl-10b": 10_171_750_144, "unlimited-ocr": 3_336_106_240,
    "LiquidAI/LFM2.5-VL-450M": 448_718_848, "AIDC-AI/Ovis1.6-Llama3.2-3B": 4_144_399_926 - 15_238_352,
    "MiniMaxAI/MiniMax-VL-01": 456_437_219_328, "nvidia/NVIDIA-Nemotron-Nano-12B-v2-VL-BF16": 13_181_860_358,
    "qwen-audio": 8_396_222_464,
    "granite-4.2-3b": 3_659_737_600, "ibm-granite/granite-4.2-8b": 8_791_592_960,
    "ibm-granite/granite-4.2-30b": 29_276_770_304, "granite-4.1-8b": 8_791_592_960, "minicpm5-2b": 2_516_756_480,
    "ibm-granite/granite-4.1-8b-base": 8_380_551_168, "datalab-to/surya-ocr-2": 686_154_304 - 20_452_864,
    "TinyLlama/TinyLlama-1.1B-Chat-v0.4": 1_100_060_672,
    "hunyuan-ocr": 1_119_925_744 - 120_818 * 1024, "ovis2-1b": 1_267_417_974 - 151_936 * 896, "ovis2-4b":
    4_616_106_486 - 151_936 * 2048, "paddleocr-vl": 958_588_736 - 103_424 * 1024 - 15_238_352 - 37_748_736,
    "phi-4-multimodal": 5_574_460_384 - 32 * 576 * 45_056, "qwen3.5-0.8b": 852_985_920, "qwen3.5-2b": 2_213_241_664,
    "qwen3.5-4b": 4_539_265_536, "qwen3.5-27b": 27_356_728_560, "gemma-4-31b": 31_273_088_876,
}  # fmt: skip


@every_row("name", WITH_TOWERS)
def test_a_model_has_the_parameters_of_its_published_files(name: str) -> None:
    spec = load_model(name)
    weights, towers = weights_of(spec), towers_of(spec)
    assert weights is not None
    assert all(tower.parameters for tower in towers)
    counted = count_parameters(weights).total + sum(tower.parameters or 0 for tower in towers)
    assert counted == pytest.approx(WITH_TOWERS[name], rel=0.005)


# Names that round the size by more than a tenth, and whose publishers give no exact number.
ROUNDED = {
    "granite-speech-3.3-2b",  # Granite of 2.53 B
    "janus-1.3b",  # DeepSeek-LLM of 1.3 B has 1.65 B with its embeddings
    "kimi-audio-7b", "qwen2-audio-7b",  # 7.6 B with more words; without the tower for 7 B
    "minicpm-1b",  # 1.2 B without embeddings
    "ministral-3-3b",  # 3.4 B and a tower of 0.4 B
    "ovis2-2b",  # 1.5 B and a tower of 0.7 B
    "persimmon-8b",  # 9.3 B, as its card says
    "qwen2.5-omni-3b",  # 3.4 B and towers
}  # fmt: skip

_SIZE = re.compile(r"(?<![a-z0-9.])(\d+(?:\.\d+)?)(b|m)(?![a-z0-9])")


def test_a_preset_has_about_the_number_of_parameters_in_its_name() -> None:
    """With its towers or without them."""
    off = set()
    for preset in shipped_presets():
        sizes = [float(number) * {"b": 1e9, "m": 1e6}[unit] for number, unit in _SIZE.findall(preset.name)]
        spec = spec_of(preset)
        weights = weights_of(spec)
        if not sizes or weights is None:
            continue
        total = count_parameters(weights).total
        whole = total + sum(tower.parameters or 0 for tower in towers_of(spec))
        if min(abs(total / max(sizes) - 1), abs(whole / max(sizes) - 1)) > 0.1:
            off.add(preset.name)
    assert off - {*PUBLISHED, *WITH_TOWERS} == ROUNDED
