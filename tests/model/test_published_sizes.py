"""The parameters of presets compared with the number that their publishers give, in billions.

Of multimodal models it is the language model's. A wrong size, number of layers or of experts changes the number by more
than 1%.
"""

from __future__ import annotations

import pytest

from kvcalc.memory.weights import count_parameters
from kvcalc.model.presets import find_preset
from kvcalc.model.resolve import spec_of
from kvcalc.model.spec import weights_of
from tests.rows import every_row

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
}  # fmt: skip


@every_row("name", PUBLISHED)
def test_a_preset_has_the_published_number_of_parameters(name: str) -> None:
    preset = find_preset(name)
    assert preset is not None
    weights = weights_of(spec_of(preset))
    assert weights is not None
    assert count_parameters(weights).total == pytest.approx(PUBLISHED[name] * 1e9, rel=0.01)
