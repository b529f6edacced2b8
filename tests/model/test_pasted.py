"""Names people paste: each is the preset its publisher's naming makes certain, or it is refused with what to type."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import kvcalc
from kvcalc.errors import KvcalcError, ModelError
from kvcalc.model.hf_config import TOWERS
from kvcalc.model.links import linked_name
from kvcalc.model.pasted import find_pasted, nearest_names
from kvcalc.model.presets import find_preset, shipped_presets, shipped_table
from kvcalc.model.published import RECIPES, releases, repackaged
from kvcalc.model.resolve import load_model
from kvcalc.model.towers import towers_of
from kvcalc.model.wrappers import around
from tests.rows import every_row

# What was pasted -> the preset, what the weights are stored in, and max_position_embeddings. The last two are the
# published config.json's.
TAKEN = {
    "meta-llama/Llama-3.1-70B-Instruct": ("llama-3.1-70b", "bf16", 131_072),
    "meta-llama/Llama-3.3-70B-Instruct": ("llama-3.3-70b", "bf16", 131_072),
    "meta-llama/Meta-Llama-3-8B-Instruct": ("llama-3-8b", "bf16", 8_192),
    "meta-llama/Meta-Llama-3-70B-Instruct": ("llama-3-70b", "bf16", 8_192),
    "meta-llama/Meta-Llama-3.1-405B-Instruct": ("llama-3.1-405b", "bf16", 131_072),
    "META-LLAMA/meta-llama-3-8b-instruct": ("llama-3-8b", "bf16", 8_192),
    "meta-llama/Llama-2-70b-chat-hf": ("llama-2-70b", "fp16", 4_096),
    "meta-llama/Llama-3.2-3B-Instruct": ("llama-3.2-3b", "bf16", 131_072),
    "llama-3.1-70b-instruct": ("llama-3.1-70b", "bf16", 131_072),
    "Llama-3.3-70B-Instruct": ("llama-3.3-70b", "bf16", 131_072),
    "meta-llama-3-8b-instruct": ("llama-3-8b", "bf16", 8_192),
    "llama-2-7b-chat-hf": ("llama-2-7b", "fp16", 4_096),
    "codellama/CodeLlama-34b-Instruct-hf": ("codellama-34b", "bf16", 16_384),
    "mistralai/Mistral-7B-Instruct-v0.1": ("mistral-7b-v0.1", "bf16", 32_768),
    "mistralai/Mistral-7B-Instruct-v0.3": ("mistral-7b-v0.3", "bf16", 32_768),
    "mistral-7b-instruct-v0.3": ("mistral-7b-v0.3", "bf16", 32_768),
    "mistralai/Mixtral-8x7B-Instruct-v0.1": ("mixtral-8x7b", "bf16", 32_768),
    "mistralai/Mixtral-8x22B-Instruct-v0.1": ("mixtral-8x22b", "bf16", 65_536),
    "mistralai/Mistral-Nemo-Instruct-2407": ("mistral-nemo", "bf16", 131_072),
    "Qwen/Qwen2-7B-Instruct-AWQ": ("qwen2-7b", "int4", 32_768),
    "Qwen/Qwen2-72B-Instruct-GPTQ-Int8": ("qwen2-72b", "int8", 32_768),
    "Qwen/Qwen2.5-0.5B-Instruct-GPTQ-Int4": ("qwen2.5-0.5b", "int4", 32_768),
    "Qwen/Qwen2.5-7B-Instruct": ("qwen2.5-7b", "bf16", 32_768),
    "Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4": ("qwen2.5-7b", "int4", 32_768),
    "Qwen/Qwen2.5-14B-Instruct-GPTQ-Int8": ("qwen2.5-14b", "int8", 32_768),
    "Qwen/Qwen2.5-32B-Instruct-AWQ": ("qwen2.5-32b", "int4", 32_768),
    "Qwen/Qwen2.5-72B-Instruct": ("qwen2.5-72b", "bf16", 32_768),
    "Qwen/Qwen2.5-72B-Instruct-AWQ": ("qwen2.5-72b", "int4", 32_768),
    "qwen2.5-72b-instruct-awq": ("qwen2.5-72b", "int4", 32_768),
    "Qwen/Qwen3-30B-A3B-Base": ("qwen3-30b-a3b", "bf16", 32_768),
    "Qwen/Qwen3-0.6B-FP8": ("qwen3-0.6b", "fp8", 40_960),
    "Qwen/Qwen3-8B-AWQ": ("qwen3-8b", "int4", 40_960),
    "Qwen/Qwen3-8B-FP8": ("qwen3-8b", "fp8", 40_960),
    "Qwen/Qwen3-32B-FP8": ("qwen3-32b", "fp8", 40_960),
    "qwen3-32b-fp8": ("qwen3-32b", "fp8", 40_960),
    "QWEN/QWEN3-32B-fp8": ("qwen3-32b", "fp8", 40_960),
    "Qwen/Qwen3-30B-A3B-FP8": ("qwen3-30b-a3b", "fp8", 40_960),
    "Qwen/Qwen3-235B-A22B-FP8": ("qwen3-235b-a22b", "fp8", 40_960),
    "Qwen/Qwen3-235B-A22B-Instruct-2507": ("qwen3-235b-a22b", "bf16", 262_144),
    "Qwen/Qwen3-235B-A22B-Thinking-2507-FP8": ("qwen3-235b-a22b", "fp8", 262_144),
    "Qwen/Qwen3-30B-A3B-Instruct-2507": ("qwen3-30b-a3b-2507", "bf16", 262_144),
    "Qwen/Qwen3-30B-A3B-Thinking-2507": ("qwen3-30b-a3b-2507", "bf16", 262_144),
    "Qwen/Qwen3-30B-A3B-Instruct-2507-FP8": ("qwen3-30b-a3b-2507", "fp8", 262_144),
    "Qwen/Qwen3-4B-Thinking-2507-FP8": ("qwen3-4b-2507", "fp8", 262_144),
    "Qwen/Qwen3-Coder-480B-A35B-Instruct-FP8": ("qwen3-coder-480b-a35b", "fp8", 262_144),
    "google/gemma-3-27b-it": ("gemma-3-27b", "bf16", 131_072),
    "gemma-3-27b-it": ("gemma-3-27b", "bf16", 131_072),
    "google/gemma-2-9b-it": ("gemma-2-9b", "bf16", 8_192),
    "google/gemma-7b-it": ("gemma-7b", "bf16", 8_192),
    # An ollama tag with words of the model's own name, a publisher's name that copies leave out, an edited copy in a
    # type of its own, and copies of a model whose original is quantized.
    "codestral:22b-v0.1-q4_0": ("codestral-22b", "q4_0", 32_768),
    "tinyllama:1.1b-chat-v1-q4_0": ("tinyllama-1.1b", "q4_0", 2_048),
    "RedHatAI/Nemotron-Nano-9B-v2-FP8-dynamic": ("nemotron-nano-9b-v2", "fp8", 131_072),
    "huihui-ai/Huihui-gpt-oss-20b-BF16-abliterated": ("gpt-oss-20b", "bf16", 131_072),
    "mlx-community/Kimi-K2-Thinking-4bit": ("kimi-k2", "mlx-4bit", 262_144),
    "deepseek-ai/DeepSeek-V3-0324": ("deepseek-v3", "fp8", 163_840),
    "deepseek-v3-0324": ("deepseek-v3", "fp8", 163_840),
    "deepseek-ai/DeepSeek-R1-0528": ("deepseek-r1", "fp8", 163_840),
    "deepseek-ai/DeepSeek-V2-Chat": ("deepseek-v2", "bf16", 163_840),
    "deepseek-ai/DeepSeek-V3.2-Exp": ("deepseek-v3.2", "fp8", 163_840),
    "openai/gpt-oss-120b": ("gpt-oss-120b", "mxfp4", 131_072),
    "moonshotai/Kimi-K2-Instruct": ("kimi-k2", "fp8", 131_072),
    "moonshotai/Kimi-K2-Instruct-0905": ("kimi-k2", "fp8", 262_144),
    "moonshotai/Kimi-K2-Thinking": ("kimi-k2", "int4", 262_144),
    "zai-org/GLM-5-FP8": ("glm-5", "fp8", 202_752),
    "microsoft/Phi-3-mini-128k-instruct": ("phi-3-mini-128k", "bf16", 131_072),
    "microsoft/Phi-3-mini-4k-instruct": ("phi-3-mini-4k", "bf16", 4_096),
    "phi-3-mini-4k-instruct": ("phi-3-mini-4k", "bf16", 4_096),
    "microsoft/Phi-4-mini-reasoning": ("phi-4-mini", "bf16", 131_072),
    "microsoft/Phi-4-reasoning": ("phi-4", "bf16", 32_768),
    "tiiuae/falcon-7b-instruct": ("falcon-7b", "bf16", 2_048),
    "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16": ("nemotron-3-super-120b-a12b", "bf16", 262_144),
    "nvidia/Llama-3.1-70B-Instruct-FP8": ("llama-3.1-70b", "fp8", 131_072),
    "nvidia/Qwen3-32B-NVFP4": ("qwen3-32b", "nvfp4", 40_960),
    "nvidia/Qwen3-235B-A22B-NVFP4": ("qwen3-235b-a22b", "nvfp4", 40_960),
    "RedHatAI/Meta-Llama-3.1-70B-Instruct-FP8-dynamic": ("llama-3.1-70b", "fp8", 131_072),
    "RedHatAI/Llama-3.3-70B-Instruct-FP8-dynamic": ("llama-3.3-70b", "fp8", 131_072),
    "RedHatAI/Qwen2.5-7B-Instruct-FP8-dynamic": ("qwen2.5-7b", "fp8", 32_768),
    "RedHatAI/Mistral-7B-Instruct-v0.3-FP8-dynamic": ("mistral-7b-v0.3", "fp8", 32_768),
    "neuralmagic/Meta-Llama-3.1-8B-Instruct-FP8-dynamic": ("llama-3.1-8b", "fp8", 131_072),
    "TheBloke/Mixtral-8x7B-Instruct-v0.1-AWQ": ("mixtral-8x7b", "int4", 32_768),
    "unsloth/Llama-3.3-70B-Instruct": ("llama-3.3-70b", "bf16", 131_072),
    "unsloth/Meta-Llama-3.1-8B-Instruct-bnb-4bit": ("llama-3.1-8b", "int4", 131_072),
    # Distillations and other fine-tunes have the layers of their base, not of their teacher.
    "deepseek-ai/DeepSeek-R1-Distill-Llama-70B": ("llama-3.3-70b", "bf16", 131_072),
    "DeepSeek-R1-Distill-Llama-70B": ("llama-3.3-70b", "bf16", 131_072),
    "deepseek-r1-distill-qwen-7b": ("qwen2.5-math-7b", "bf16", 131_072),
    "unsloth/DeepSeek-R1-Distill-Llama-8B-bnb-4bit": ("llama-3.1-8b", "int4", 131_072),
    "deepseek-r1-0528-qwen3-8b": ("qwen3-8b", "bf16", 131_072),
    "nvidia/Llama-3.1-Nemotron-70B-Instruct-HF": ("llama-3.1-70b", "bf16", 131_072),
    "NousResearch/Hermes-3-Llama-3.1-8B": ("llama-3.1-8b", "bf16", 131_072),
    "HuggingFaceH4/zephyr-7b-beta": ("mistral-7b-v0.1", "bf16", 32_768),
    "deepseek-ai/DeepSeek-V3.1": ("deepseek-v3", "fp8", 163_840),
    "deepseek-ai/DeepSeek-V2.5": ("deepseek-v2", "bf16", 163_840),
    "zai-org/GLM-4.6": ("glm-4.5", "bf16", 202_752),
    "Qwen/Qwen2.5-7B-Instruct-1M": ("qwen2.5-7b", "bf16", 1_010_000),
    "Qwen/Qwen3-8B-Base": ("qwen3-8b", "bf16", 32_768),
    # The preset's name after its publisher's, as hosts of models write it.
    "nvidia/nemotron-3-super-120b-a12b": ("nemotron-3-super-120b-a12b", "bf16", 262_144),
    # Contexts that differ from the instruct release's, and one that was shortened after its release.
    "Qwen/Qwen2-57B-A14B": ("qwen2-57b-a14b", "bf16", 131_072),
    "Qwen/QwQ-32B-AWQ": ("qwq-32b", "int4", 40_960),
    # Another variant of the same organisation.
    "google/gemma-1.1-7b-it": ("gemma-7b", "bf16", 8_192),
    "Qwen/Qwen3-Next-80B-A3B-Thinking": ("qwen3-next-80b-a3b", "bf16", 262_144),
    # Converted copies, with the suffix of their type.
    "nvidia/Llama-3.3-70B-Instruct-FP8": ("llama-3.3-70b", "fp8", 131_072),
    "nvidia/DeepSeek-V3.1-NVFP4": ("deepseek-v3", "nvfp4", 163_840),
    "zai-org/GLM-4.5-Air-FP8": ("glm-4.5-air", "fp8", 131_072),
    "Qwen/Qwen3-Next-80B-A3B-Instruct-FP8": ("qwen3-next-80b-a3b", "fp8", 262_144),
    "Qwen/Qwen3-30B-A3B-GPTQ-Int4": ("qwen3-30b-a3b", "int4", 40_960),
    "RedHatAI/Mixtral-8x7B-Instruct-v0.1-FP8-dynamic": ("mixtral-8x7b", "fp8", 32_768),
    "RedHatAI/gemma-3-27b-it-FP8-dynamic": ("gemma-3-27b", "fp8", 131_072),
    "RedHatAI/Llama-3.3-70B-Instruct-quantized.w4a16": ("llama-3.3-70b", "int4", 131_072),
    "RedHatAI/Qwen3-32B-NVFP4": ("qwen3-32b", "nvfp4", 40_960),
    "RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w8a8": ("llama-3.1-8b", "int8", 131_072),
    "hugging-quants/Meta-Llama-3.1-70B-Instruct-AWQ-INT4": ("llama-3.1-70b", "int4", 131_072),
    "unsloth/Qwen3-32B-unsloth-bnb-4bit": ("qwen3-32b", None, 40_960),
    "TheBloke/Llama-2-70B-Chat-GPTQ": ("llama-2-70b", "int4", 4_096),
    "mlx-community/Qwen3-8B-4bit": ("qwen3-8b", "mlx-4bit", 40_960),
    "mlx-community/Qwen3-30B-A3B-4bit-DWQ": ("qwen3-30b-a3b", "mlx-4bit", 40_960),
    "lmstudio-community/Qwen3-8B-MLX-8bit": ("qwen3-8b", "mlx-8bit", 40_960),
    "mlx-community/DeepSeek-R1-bf16": ("deepseek-r1", "bf16", 163_840),
    # Repositories of GGUF files. Without a type they mean Q4_K_M, as with llama.cpp's -hf.
    "unsloth/Qwen3-32B-GGUF": ("qwen3-32b", "q4_k_m", 40_960),
    "unsloth/Qwen3-32B-GGUF:Q8_0": ("qwen3-32b", "q8_0", 40_960),
    "unsloth/Qwen3-32B-GGUF:BF16": ("qwen3-32b", "bf16", 40_960),
    "unsloth/Qwen3-32B-GGUF:UD-Q4_K_XL": ("qwen3-32b", "q4_k_m", 40_960),
    "bartowski/Qwen_Qwen3-32B-GGUF:Q6_K": ("qwen3-32b", "q6_k", 40_960),
    "TheBloke/Llama-2-7B-Chat-GGUF": ("llama-2-7b", "q4_k_m", 4_096),
    "google/gemma-3-27b-it-qat-q4_0-gguf": ("gemma-3-27b", "q4_0", 131_072),
    "ggml-org/gpt-oss-20b-GGUF": ("gpt-oss-20b", "mxfp4", 131_072),
    # Files of other types keep the experts in mxfp4.
    "unsloth/gpt-oss-20b-GGUF:Q4_K_M": ("gpt-oss-20b", "q4_k_m", 131_072),
    # An old name of an organisation.
    "THUDM/GLM-4.5-Air": ("glm-4.5-air", "bf16", 131_072),
    "CohereForAI/c4ai-command-a-03-2025": ("command-a", "bf16", 131_072),
    # Whole models with their MTP layers, which are no drafts.
    "unsloth/Qwen3.6-27B-MTP": ("qwen3.6-27b", "bf16", 262_144),
    "Qwen3.5-27B-MTP": ("qwen3.5-27b", "bf16", 262_144),
    "Qwen3.5-4B-MTP-Heretic.i1-Q4_K_S": ("qwen3.5-4b", "q4_k_s", 262_144),
    # Bare names: a variant of a preset, a name that ollama writes with a colon, and files of llama.cpp.
    "llama-3-70b-instruct": ("llama-3-70b", "bf16", 8_192),
    "mistral-7b": ("mistral-7b-v0.3", "bf16", 32_768),
    "mistral-7b-instruct": ("mistral-7b-v0.3", "bf16", 32_768),
    "Qwen3-32B-Q4_K_M": ("qwen3-32b", "q4_k_m", 40_960),
    "Qwen3-32B-GGUF": ("qwen3-32b", "q4_k_m", 40_960),
    "Qwen3-32B-GGUF:Q8_0": ("qwen3-32b", "q8_0", 40_960),
    "Qwen3-32B-UD-Q4_K_XL": ("qwen3-32b", "q4_k_m", 40_960),
    "mistral-7b-instruct-v0.2.Q4_K_M": ("mistral-7b-v0.2", "q4_k_m", 32_768),
    "Llama-3.3-70B-Instruct-Q4_K_M": ("llama-3.3-70b", "q4_k_m", 131_072),
    "mradermacher/Qwen3-8B-i1-GGUF:i1-Q4_K_M": ("qwen3-8b", "q4_k_m", 40_960),
    "x/Qwen3-32B:Q4_K_M": ("qwen3-32b", "q4_k_m", 40_960),
    # ModelScope's names of organisations, and any owner with the whole name of a published model.
    "LLM-Research/Meta-Llama-3.1-8B-Instruct": ("llama-3.1-8b", "bf16", 131_072),
    "AI-ModelScope/Mistral-7B-Instruct-v0.2": ("mistral-7b-v0.2", "bf16", 32_768),
    "01ai/Yi-1.5-9B-Chat": ("yi-1.5-9b", "bf16", 4_096),
    "someone/gemma-2-9b-it": ("gemma-2-9b", "bf16", 8_192),
    # Fine-tunes whose makers name the base, and a release with the architecture of an earlier one.
    "deepreinforce-ai/Ornith-1.0-35B": ("qwen3.5-35b-a3b", "bf16", 262_144),
    "ornith-ai/Ornith-1.0-9B-GGUF:Q8_0": ("qwen3.5-9b", "q8_0", 262_144),
    "datalab-to/chandra-ocr-2": ("qwen3.5-4b", "bf16", 262_144),
    "ibm-granite/granite-4.1-3b": ("granite-4.0-micro", "bf16", 131_072),
    "EleutherAI/pythia-14m": ("pythia-14m", "fp16", 512),
    # Weights that were edited in place, whoever did it.
    "someone/Qwen3-32B-abliterated": ("qwen3-32b", "bf16", 40_960),
    "someone/Qwen3-32B-Claude-4.6-Opus-Reasoning-Distilled-GGUF": ("qwen3-32b", "q4_k_m", 40_960),
    "someone/Qwen3-32B-Uncensored-Heretic-AWQ": ("qwen3-32b", "int4", 40_960),
    # Copies whose type names no type of the cache, whoever publishes them, and files with MTP layers.
    "someone/Qwen3-32B-GPTQ-Int4": ("qwen3-32b", "int4", 40_960),
    "someone/Qwen3-32B-GGUF-Q6_K": ("qwen3-32b", "q6_k", 40_960),
    "unsloth/Qwen3-32B-MTP-GGUF:Q8_0": ("qwen3-32b", "q8_0", 40_960),
    "mlabonne/gemma-3-27b-it-abliterated": ("gemma-3-27b", "bf16", 131_072),
    "mradermacher/Qwen3-32B-abliterated-v2-GGUF:Q8_0": ("qwen3-32b", "q8_0", 40_960),
    "huihui-ai/Huihui-Qwen3-32B-abliterated": ("qwen3-32b", "bf16", 40_960),
    # As ollama and llama.cpp fetch a repository.
    "hf.co/unsloth/Qwen3-32B-GGUF:Q8_0": ("qwen3-32b", "q8_0", 40_960),
    "Qwen/Qwen3-32B-MLX-4bit": ("qwen3-32b", "mlx-4bit", 40_960),
    "unsloth/llama-3-8b-Instruct-bnb-4bit": ("llama-3-8b", "int4", 8_192),
    "cpatonn/Qwen3-32B-AWQ-8bit": ("qwen3-32b", None, 40_960),
    "baidu/ERNIE-4.5-300B-A47B-PT": ("ernie-4.5-300b-a47b", "bf16", 131_072),
    "deepseek-ai/deepseek-math-7b-instruct": ("deepseek-llm-7b", "bf16", 4_096),
    "stabilityai/StableBeluga2": ("llama-2-70b", "fp16", 4_096),
    # ollama's names: the smaller tags of deepseek-r1 are Qwen and Llama models.
    "gemma3:27b": ("gemma-3-27b", "q4_k_m", 131_072),
    "gemma3": ("gemma-3-4b", "q4_k_m", 131_072),
    "gemma3:27b-it-qat": ("gemma-3-27b", "q4_0", 131_072),
    "qwen3:30b-a3b": ("qwen3-30b-a3b", "q4_k_m", 40_960),
    "deepseek-r1:70b": ("llama-3.3-70b", "q4_k_m", 131_072),
    "deepseek-r1:671b": ("deepseek-r1", "q4_k_m", 163_840),
    "llama3.1:8b-instruct-q8_0": ("llama-3.1-8b", "q8_0", 131_072),
    "LLAMA3.1:8B-instruct-FP16": ("llama-3.1-8b", "fp16", 131_072),
    "llama2:13b": ("llama-2-13b", "q4_0", 4_096),
    "gpt-oss:20b": ("gpt-oss-20b", "mxfp4", 131_072),
}  # fmt: skip

# What was pasted, and is not certain -> presets the error must not offer.
REFUSED = {
    # Other versions and sizes: other windows, lengths, vocabularies, layers.
    "mistral-7b-instruct-v0.4": (),
    "mistralai/Mistral-Small-Instruct-2501": (),
    "deepseek-ai/DeepSeek-V3.5": ("deepseek-v3",),
    "zai-org/GLM-4.8": ("glm-4.5",),
    "google/gemma-1.2-7b-it": (),
    "Qwen/Qwen3-8B-Foo": (),
    "someone/DeepSeek-R1-Distill-Phi-9B": ("deepseek-r1",),
    # Quantized in a way that differs from its name's rule.
    "meta-llama/Llama-3.1-405B-Instruct-FP8": (),
    "meta-llama/Llama-4-Maverick-17B-128E-Instruct-FP8": (),
    "kimi-k2.5:cloud": (),
    "RedHatAI/Llama-3.3-70B-Instruct-speculator.eagle3": (),
    "codestral:22b-v0.2-q4_0": (),
    "nvidia/gpt-oss-120b-Eagle3": (),
    # A bare name with a suffix that its publisher does not use: others do, each in its own way.
    "llama-3.1-70b-instruct-fp8": (),
    "llama-3.1-70b-awq": (),
    # Organisations that do not convert models, and other organisations' variants.
    "unsloth/Qwen3-32B-Foo-GGUF": (),
    "unsloth/Qwen3-32B-GGUF:Q4_Z": (),
    "unsloth/Qwen3-32B-FP8:Q8_0": (),
    "mlx-community/Qwen3-8B-7bit": (),
    "bartowski/Foo_Qwen3-32B-GGUF": (),
    "someone/DeepSeek-R1-Distill": ("deepseek-r1",),
    "someone/Qwen3-32B-Ridge-GGUF": ("if it has the layers of qwen3-32b, type that name",),
    "someone/Qwen3-32B-Ridge-MTP-GGUF": ("qwen3-32b",),
    "abliterated": (),
    "someone/Foo-8B-abliterated": (),
    # ollama's names.
    "gemma3:28b": (),
    "gemma3:27b-q9_0": (),
    "gemma3:27b-cloud": (),
    "gemma9:27b": (),
    "qwen3:8b:q8_0": (),
    # Parts of names, and names around names.
    "meta-llama/Llama-3.1-70B-Instruct-extra": (),
    "Qwen/Qwen3-32B-FP8/": (),
    "a/Qwen/Qwen3-32B-FP8": (),
    "Qwen3-32B-FP8-FP8": (),
    "Qwen/Qwen3-32B-FP8-FP8": (),
    "-fp8": (),
    "/": (),
    ":": (),
    "": (),
}


# Names whose layers are those of a preset. The type of their cache was not read, and how their weights are stored only
# by the kind of the copy -> the preset.
UNREAD = {
    "nvidia/NVIDIA-Nemotron-Nano-9B-v2-NVFP4": "nemotron-nano-9b-v2",
    "nvidia/NVIDIA-Nemotron-Nano-9B-v2-FP8": "nemotron-nano-9b-v2",
    "nvidia/NVIDIA-Nemotron-Nano-12B-v2-VL-FP8": "nemotron-nano-12b-v2",
    "nvidia/NVIDIA-Nemotron-3-Nano-4B-FP8": "nemotron-3-nano-4b",
    "arcee-ai/Trinity-Mini-FP8": "trinity-mini",
    "stepfun-ai/Step-3.5-Flash-INT4": "step-3.5-flash",
    "IntervitensInc/DeepSeek-V3.1-Terminus-Channel-int8": "deepseek-v3",
    "google/gemma-4-E4B-it-qat-mobile-ct": "gemma-4-e4b",
    "someone/Qwen3-32B-NVFP4": "qwen3-32b",
    "Qwen/Qwen3-32B-NVFP4": "qwen3-32b",
    "someone/Qwen3.6-27B-NVFP4-MTP": "qwen3.6-27b",
    "someone/Llama-3.1-8B-Instruct-FP8": "llama-3.1-8b",
    "someone/Qwen3-32B-quantized.w8a8": "qwen3-32b",
    "someone/Qwen3-32B-abliterated-FP8": "qwen3-32b",
    "my-Qwen/Qwen3-32B-FP8": "qwen3-32b",
}  # fmt: skip


@pytest.mark.parametrize("name", UNREAD)
def test_a_copy_whose_config_was_not_read_has_the_layers_and_no_types(name: str) -> None:
    preset = UNREAD[name]
    assert answer(name)["kv_cache"]["total_bytes"] == answer(preset)["kv_cache"]["total_bytes"]
    release = find_pasted(name)
    if release is not None and release.config["quantization_config"] is RECIPES["unread"].config:
        assert answer(name)["weights"]["bytes"] is None
    else:
        assert answer(name)["weights"]["bytes"] > 0
    with pytest.raises(KvcalcError, match="whether this release asks for an fp8 cache was not found") as refused:
        answer(name, engine="vllm")
    assert refused.value.hint == "set --kv-dtype"
    same = {"engine": "vllm", "kv_dtype": "fp8", "dtype": "fp8"}
    assert answer(name, **same)["kv_cache"] == answer(preset, **same)["kv_cache"]


def test_a_folder_of_models_is_no_publisher_of_an_unread_copy(kvcalc: Any) -> None:
    path = "/models/Qwen3.8-27B-NVFP4"
    found = kvcalc("check", "vllm", "serve", path, "--max-model-len", "8192", "--gpu", "h100", "--json")
    assert found.json["fit"]["weights_bytes"]


NAMES_OF_ONE_MODEL = (
    "Qwen3-32B", "Qwen3-32B-Q4_K_M", "unsloth/Qwen3-32B-GGUF", "unsloth/Qwen3-32B", "someone/Qwen3-32B", "qwen3:32b",
    "hf.co/unsloth/Qwen3-32B-GGUF:Q4_K_M", "someone/Qwen3-32B-AWQ", "llama-3-70b-instruct", "mistral-7b",
    "LLM-Research/Meta-Llama-3.1-8B-Instruct", "AI-ModelScope/Mistral-7B-Instruct-v0.2",
)  # fmt: skip


@pytest.mark.parametrize("name", NAMES_OF_ONE_MODEL)
def test_every_command_takes_the_same_names(kvcalc: Any, name: str) -> None:
    gpu, load = ("--gpu", "h100x2"), ("--input-tokens", "100", "--output-tokens", "50", "--requests-per-second", "1")
    answers = [
        kvcalc("estimate", name, "--json"),
        kvcalc("fit", name, *gpu, "--engine", "vllm", "--kv-dtype", "bf16", "--json"),
        kvcalc("plan", name, *gpu, *load, "--engine", "vllm", "--kv-dtype", "bf16", "--json"),
        kvcalc(
            "check", *gpu, "--json", "vllm", "serve", name, "--tensor-parallel-size", "2", "--max-model-len", "4096"
        ),
    ]
    assert [one.status for one in answers] == [0, 0, 0, 0], [one.err for one in answers]
    names = {one.json["model"]["name"] if "model" in one.json else one.json["models"][0]["name"] for one in answers}
    assert names == {load_model(name).name}


def answer(name: str, **asked: Any) -> Any:
    return kvcalc.estimate(load_model(name), context_tokens=1024, **asked)


@every_row("name", TAKEN)
def test_a_certain_name_is_its_preset(name: str) -> None:
    preset, dtype, length = TAKEN[name]
    spec, base = load_model(name), load_model(preset)
    found = answer(name)
    assert (found["weights"]["dtype"], found["model"]["max_position_embeddings"]) == (dtype, length)
    assert found["kv_cache"]["total_bytes"] == answer(preset)["kv_cache"]["total_bytes"]
    # A server is started with the name on the Hub, not with ollama's.
    name = linked_name(name)
    own = name.casefold()
    assert spec.reference.casefold().endswith(own) or (
        "/" not in name and ("/" in spec.reference or spec.name == preset)
    )
    assert spec.num_layers == base.num_layers
    if spec.name != preset:
        texts = [note["text"] for note in found["warnings"] if note["part"] == "model"]
        assert any(text.startswith(f"{name} is taken as") and f"preset {preset}" in text for text in texts)


@pytest.mark.long
@pytest.mark.parametrize("name", REFUSED)
def test_an_uncertain_name_is_refused_with_what_to_type(name: str) -> None:
    with pytest.raises(kvcalc.KvcalcError) as caught:
        load_model(name)
    hint = caught.value.hint or ""
    if name.endswith("/"):
        assert caught.value.exit_code == 2  # a path
        return
    assert type(caught.value) is ModelError
    if "-gguf" in name.casefold():
        assert "path of a .gguf file" in hint
        return
    assert "pip install 'kvcalc[hub]'" in hint
    if name.count("/") == 1 and ":" not in name:
        assert f"hf:{name} " in hint
    words = hint.replace("?", " ").replace(".  ", " ").casefold().split()
    own = name.casefold()
    for other in REFUSED[name]:
        preset = find_preset(other)
        assert preset is not None
        offered = {other, *(alias.casefold() for alias in preset.aliases)} & {word.rstrip(".,;") for word in words}
        assert not offered - {own}


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("kimi-k2.5:cloud", "ollama runs a cloud tag on its own servers."),
        ("gpt-oss:120b-cloud", "ollama runs a cloud tag on its own servers."),
        ("RedHatAI/Llama-3.3-70B-Instruct-speculator.eagle3", "give it as --draft-model."),
        ("nvidia/gpt-oss-120b-Eagle3", "give it as --draft-model."),
        ("codestral:22b-v0.2-q4_0", "ollama's codestral has the tags 22b"),
    ],
)
def test_what_is_no_model_of_its_own_is_refused_with_the_reason(name: str, reason: str) -> None:
    with pytest.raises(ModelError) as caught:
        load_model(name)
    assert reason in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("address", "name"),
    [
        ("https://huggingface.co/Qwen/Qwen3-8B", "Qwen/Qwen3-8B"),
        ("https://huggingface.co/Qwen/Qwen3-8B/", "Qwen/Qwen3-8B"),
        ("https://huggingface.co/Qwen/Qwen3-8B/blob/main/config.json", "Qwen/Qwen3-8B"),
        ("https://huggingface.co/Qwen/Qwen3-8B/resolve/main/config.json?download=true", "Qwen/Qwen3-8B"),
        ("https://huggingface.co/Qwen/Qwen3-8B/tree/main", "Qwen/Qwen3-8B"),
        ("hf.co/Qwen/Qwen3-8B", "Qwen/Qwen3-8B"),
        ("hf.co/someone/Qwen3-32B-GGUF:latest", "someone/Qwen3-32B-GGUF"),
        ("https://hf.co/x/Qwen3-8B-GGUF/blob/main/Qwen3-8B-Q5_K_M.gguf", "x/Qwen3-8B-GGUF:Q5_K_M"),
        ("https://www.modelscope.cn/models/deepseek-ai/DeepSeek-V3/summary", "deepseek-ai/DeepSeek-V3"),
        ("modelscope.cn/models/LLM-Research/Meta-Llama-3-8B", "LLM-Research/Meta-Llama-3-8B"),
        ("https://ollama.com/library/qwen3:8b", "qwen3:8b"),
    ],
)
def test_the_address_of_a_page_is_the_model_on_it(address: str, name: str) -> None:
    assert linked_name(address) == name
    assert load_model(address) == load_model(name)


@pytest.mark.parametrize(
    "address",
    [
        "https://huggingface.co/Qwen/Qwen3-32B/tree/refs%2Fpr%2F7",
        "https://huggingface.co/TheBloke/Llama-2-7B-Chat-GPTQ/tree/gptq-8bit-128g-actorder_True",
        "https://huggingface.co/x/Qwen3-8B-GGUF/blob/main/model.gguf",
        "https://example.org/Qwen/Qwen3-8B",
    ],
)
def test_the_page_of_a_revision_is_refused_with_what_to_type(address: str) -> None:
    with pytest.raises(KvcalcError) as caught:
        load_model(address)
    assert linked_name(address) == address
    if not address.endswith(".gguf"):
        assert "hf:ORG/NAME@REVISION" in (caught.value.hint or "")


def test_a_file_that_has_an_address_for_its_path_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "hf.co" / "Qwen" / "Qwen3-8B"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(
        '{"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64}'
    )
    monkeypatch.chdir(tmp_path)
    assert load_model("hf.co/Qwen/Qwen3-8B").num_layers == 2


@pytest.mark.parametrize("name", ["meta-llama/Llama-3.1-8B-MTP", "Llama-3.1-8B-Instruct-MTP"])
def test_mtp_after_a_model_without_such_layers_is_a_draft(name: str) -> None:
    with pytest.raises(ModelError, match="is not known") as caught:
        load_model(name)
    assert "give it as --draft-model" in (caught.value.hint or "")


def test_a_quantized_copy_with_its_mtp_layer_is_no_drafter() -> None:
    with pytest.raises(ModelError) as refused:
        load_model("AEON-7/Qwen3.6-27B-AEON-Ultimate-Uncensored-Multimodal-NVFP4-MTP")
    assert "drafts tokens" not in (refused.value.hint or "")


def test_a_mirror_is_said_to_be_taken_for_the_published_model() -> None:
    (remark,) = load_model("someone/Qwen3-8B").remarks
    assert remark == "someone/Qwen3-8B is taken as Qwen/Qwen3-8B, preset qwen3-8b"


def test_a_users_preset_has_files_of_llama_cpp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shipped = find_preset("llama-3.1-8b")
    assert shipped is not None
    _, source, text = Path(shipped.path).read_text().partition("source:")
    (tmp_path / "mine.yaml").write_text(f"name: mine\n{source}{text}")
    monkeypatch.setenv("KVCALC_PRESETS", str(tmp_path))
    spec = load_model("mine-Q8_0")
    assert (spec.name, spec.named_dtype, spec.num_layers) == ("mine", "gguf:q8_0", 32)


@pytest.mark.parametrize(("name", "tags"), [("gemma3:28b", "1b, 4b, 12b, 27b"), ("qwq:7b", "32b")])
def test_a_tag_that_ollama_does_not_have_is_refused_with_those_it_has(name: str, tags: str) -> None:
    with pytest.raises(ModelError) as caught:
        load_model(name)
    assert tags in (caught.value.hint or "")


def test_every_tag_of_ollama_is_a_model() -> None:
    refused = []
    for model, row in shipped_table("ollama").items():
        for tag in row["tags"]:
            try:
                load_model(f"{model}:{tag}")
            except ModelError:
                refused.append(f"{model}:{tag}")
    assert refused == []


def test_a_name_means_the_type_that_dtype_means() -> None:
    for name, preset, dtype in (
        ("unsloth/Qwen3-32B-GGUF", "qwen3-32b", "q4_k_m"),
        ("llama3.1:8b-instruct-q6_K", "llama-3.1-8b", "q6_k"),
        ("mlx-community/Qwen3-8B-4bit", "qwen3-8b", "mlx-4bit"),
    ):
        for engine in ("vllm", "llama.cpp") if dtype.startswith("q") else ("vllm", "mlx"):
            named, typed = answer(name, engine=engine), answer(preset, engine=engine, dtype=dtype)
            assert (named["weights"], named["kv_cache"]) == (typed["weights"], typed["kv_cache"])


def test_a_file_type_that_is_not_modelled_has_a_cache_but_no_weights() -> None:
    named = answer("bartowski/Qwen3-32B-GGUF:Q2_K_L", engine="llama.cpp")
    assert named["kv_cache"] == answer("qwen3-32b", engine="llama.cpp")["kv_cache"]
    assert named["weights"]["bytes"] is None
    assert any("q2_k_l' is not modelled" in note["text"] for note in named["warnings"])


def test_what_was_assumed_of_a_converted_copy_is_said() -> None:
    (text,) = load_model("QuantTrio/Qwen3-30B-A3B-AWQ").remarks
    assert text.endswith("which modules stay in 16 bits was not read from its config")
    assert not load_model("casperhansen/qwen3-32b-awq").remarks[0].endswith("its config")


# As the full published config.json of each repository gives them, every name of modules_to_not_convert included.
WEIGHTS = {
    "Qwen/Qwen3-32B-FP8": 34_326_243_328,
    "Qwen/Qwen3-30B-A3B-FP8": 31_174_545_408,
    "Qwen/Qwen3-235B-A22B-FP8": 236_445_455_360,
    "nvidia/Qwen3-235B-A22B-NVFP4": 134_101_651_392,
    "nvidia/Llama-3.1-70B-Instruct-FP8": 72_656_376_192,
    "zai-org/GLM-5-FP8": 746_129_978_112,
    "zai-org/GLM-5.2-FP8": 745_584_430_656,
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_a_quantized_release_weighs_what_its_own_config_says(name: str) -> None:
    assert answer(name)["weights"]["bytes"] == WEIGHTS[name]


def test_inklings_quantized_release_keeps_the_experts_of_one_layer_in_16_bits() -> None:
    # The published tensors of both releases have the same drafting layers and towers.
    less = answer("thinkingmachines/Inkling")["weights"]["bytes"]
    less -= answer("thinkingmachines/Inkling-NVFP4")["weights"]["bytes"]
    assert less == pytest.approx(1_904_604_285_204 - 591_854_374_368, rel=1e-6)


def test_glm_5_3_flash_is_published_in_fp8() -> None:
    # 314,396,639,232 elements of its tensors are in fp8, each block of 128 x 128 with an fp32 scale. Of them, the
    # drafting layer has 288 experts and a shared one, and latent attention but for kv_b_proj.
    drafting = 289 * 3 * 4096 * 2048 + 4096 * (1536 + 512 + 64 * 256) + 1536 * 64 * 256
    quantized = 314_396_639_232 - drafting
    bf16, fp8 = answer("zai-org/GLM-5.3-Flash-BF16"), answer("zai-org/GLM-5.3-Flash")
    assert bf16["weights"]["bytes"] - fp8["weights"]["bytes"] == quantized - quantized // 128**2 * 4
    assert answer("unsloth/GLM-5.3-Flash-FP8")["weights"] == fp8["weights"]


def test_mistrals_releases_of_2512_to_2603_are_published_in_fp8_but_for_base_and_reasoning() -> None:
    for name in ("Ministral-3-14B-Instruct-2512", "Ministral-3-3B-Instruct-2512", "Mistral-Small-4-119B-2603"):
        assert answer(f"mistralai/{name}")["weights"]["dtype"] == "fp8", name
    for name in ("Ministral-3-8B-Instruct-2512-BF16", "Ministral-3-8B-Reasoning-2512", "Ministral-3-14B-Base-2512"):
        assert answer(f"mistralai/{name}")["weights"]["dtype"] == "bf16", name


def test_the_padded_mlp_of_qwens_72b_int4_release_is_counted() -> None:
    padded, plain = answer("Qwen/Qwen2.5-72B-Instruct-AWQ"), answer("Qwen/Qwen2.5-72B-Instruct")
    # 80 layers of three matrices of 8192 x (29696 - 29568)
    added = padded["weights"]["parameters"] - plain["weights"]["parameters"]
    assert added == 80 * 3 * 8192 * 128


def test_what_differs_from_the_preset_is_the_releases_own() -> None:
    assert load_model("mistralai/Mistral-7B-Instruct-v0.1").layers == load_model("mistral-7b-v0.1").layers
    assert load_model("mistralai/Mistral-7B-Instruct-v0.3").layers == load_model("mistral-7b-v0.3").layers
    base, tuned = answer("mixtral-8x22b"), answer("mistralai/Mixtral-8x22B-Instruct-v0.1")
    # Two tables of 768 more tokens.
    assert tuned["weights"]["parameters"] - base["weights"]["parameters"] == 2 * 768 * 6144


def test_an_explicit_dtype_goes_before_the_one_in_the_name() -> None:
    for dtype in ("bf16", "int4", "q4_k_m"):
        named, base = answer("Qwen/Qwen3-32B-FP8", dtype=dtype), answer("qwen3-32b", dtype=dtype)
        assert named["weights"] == base["weights"]


def test_a_note_says_what_every_part_of_the_name_means() -> None:
    assert load_model("Qwen/Qwen2.5-72B-Instruct-AWQ").remarks == (
        "Qwen/Qwen2.5-72B-Instruct-AWQ is taken as the preset qwen2.5-72b; 'Instruct' is left aside; its "
        "max_position_embeddings is 32,768, torch_dtype is float16, intermediate_size is 29,696; 'AWQ' means int4 "
        "weights in groups of 128 (--dtype overrides this)",
    )
    assert load_model("qwen3-32b-fp8").remarks == (
        "qwen3-32b-fp8 is taken as Qwen/Qwen3-32B-FP8, preset qwen3-32b; 'FP8' means fp8 weights with a scale per "
        "block of 128 x 128 (--dtype overrides this)",
    )
    assert load_model("meta-llama/Llama-3.1-70B-Instruct").remarks == ()
    assert load_model("llama-3.1-70b").remarks == ()


def test_engines_do_not_take_the_type_of_the_cache_from_quarks_configs() -> None:
    """resolve_kv_cache_dtype_string of vLLM 0.33.0 and kv_cache_dtype.py of SGLang 0.5.23 read none of its keys."""
    for engine in ("vllm", "sglang"):
        assert answer("amd/Llama-3.3-70B-Instruct-FP8-KV", engine=engine)["kv_cache"]["dtype"] == "bf16"


def test_vllm_takes_the_cache_type_that_nvidias_checkpoint_asks_for() -> None:
    named = answer("nvidia/Llama-3.1-70B-Instruct-FP8", engine="vllm")
    assert named["kv_cache"]["dtype"] == "fp8"
    assert answer("RedHatAI/Llama-3.3-70B-Instruct-FP8-dynamic", engine="vllm")["kv_cache"]["dtype"] == "bf16"


def test_ollamas_word_for_no_tag_is_no_tag() -> None:
    assert load_model("hf.co/someone/Qwen3-32B-GGUF:latest").reference == "someone/Qwen3-32B-GGUF"


@pytest.mark.parametrize("name", ["google/gemma-2-9b", "allenai/OLMo-2-1124-7B", "HuggingFaceTB/SmolLM-1.7B"])
def test_base_models_published_in_fp32(name: str) -> None:
    """Their instruct releases, and the presets, are in 16 bits. vLLM computes both in 16 bits."""
    assert (answer(name)["weights"]["dtype"], answer(name, engine="vllm")["weights"]["dtype"]) == ("fp32", "bf16")
    assert answer(name.partition("/")[2] + "-Instruct" * name.startswith("allenai"))["weights"]["dtype"] == "bf16"


def test_no_listed_name_is_a_presets_and_none_stands_twice() -> None:
    listed = [release.name.casefold() for release in (*releases(), *repackaged())]
    assert len(set(listed)) == len(listed)
    preset_of = {release.name.partition("/")[2].casefold(): release.preset for release in releases()}
    bare = [release.name.partition("/")[2].casefold() for release in releases()]
    assert len(set(bare)) == len(bare)
    known = {name.casefold() for preset in shipped_presets() for name in (preset.name, *preset.aliases)}
    assert not known & {*listed}
    # Without its organisation, such a name means the preset.
    assert all(preset_of[name] == name for name in known & {*bare})
    tails = [alias.partition("/")[2].casefold() for p in shipped_presets() for alias in p.aliases if "/" in alias]
    assert not set(tails) & set(bare)


@pytest.mark.long
def test_every_listed_name_is_understood_and_changes_only_what_is_stated() -> None:
    answered: set[tuple[str, str, str]] = set()
    for release in (*releases(), *repackaged()):
        found = find_pasted(release.name)
        assert found is not None, release.name
        assert (found.preset.name, found.reference) == (release.preset, release.name)
        is_converted = release.recipe is not None and release.recipe.dtype is None
        stated = {**release.changes, **({"quantization_config": 0} if is_converted else {})}
        base = {k: v for k, v in found.preset.config.items() if release.tower is None or k not in TOWERS}
        config = found.config
        if isinstance(release.tower, dict):
            quantization = {k: v for k, v in found.config.items() if k == "quantization_config"}
            assert found.config == {**around({**base, **release.changes}, release.tower), **quantization}, release.name
            config = {**base, **release.changes, **quantization}
        assert {k for k, v in config.items() if base.get(k) != v} == set(stated), release.name
        stored = (release.preset, str(release.changes), str(release.recipe))
        if stored not in answered:  # fine-tunes of one base have the same answer
            answered.add(stored)
            weights, base = answer(release.name)["weights"], answer(release.preset)["weights"]
            is_read = release.recipe is not RECIPES["unread"]
            assert bool(weights["bytes"]) is is_read or not base["parameters"], release.name
        # A change beside the config of the language model would be lost.
        context = release.changes.get("max_position_embeddings")
        assert context in (None, load_model(release.name).max_position_embeddings), release.name
        # What is left aside, and what the suffix means, are in the name.
        for part in (release.aside, release.suffix):
            assert part is None or part in release.name


# The context and the KV heads of names whose own configs differ from those of the presets that they are taken for.
OWN_FACTS = {
    "zai-org/glm-4-9b": (8192, 2),
    "zai-org/GLM-Z1-Rumination-32B-0414": (131072, 8),
    "nvidia/Nemotron-H-8B-Reasoning-128K": (131072, 8),
    "nvidia/Nemotron-H-8B-Base-8K": (8192, 8),
    "Qwen/Qwen1.5-MoE-A2.7B-Chat": (32768, 16),
    "nvidia/NVIDIA-Nemotron-3.5-Lightning-30B-A3B-BF16": (262144, 2),
    "nvidia/NVIDIA-Nemotron-3.5-Lightning-30B-A3B-NVFP4": (1048576, 2),
    "inclusionAI/Ling-1T": (32768, 8),
    "inclusionAI/Ring-1T": (65536, 8),
    "internlm/Intern-S1": (65536, 4),
    "mistralai/Mistral-Large-3-675B-Instruct-2512": (294912, 128),
    "LiquidAI/LFM2.5-8B-A1B": (128000, 8),
    "stepfun-ai/Step3-VL-10B": (65536, 8),
    "allenai/Molmo2-8B": (36864, 8),
    "lmms-lab/LLaVA-OneVision-1.5-4B-Instruct": (262144, 8),
    "hugging-quants/Meta-Llama-3.1-405B-Instruct-AWQ-INT4": (131072, 16),
    "meta-llama/Llama-3.1-405B-Instruct": (131072, 8),
    "casperhansen/mistral-nemo-instruct-2407-awq": (1024000, 8),
    "anthracite-org/magnum-v4-12b": (1024000, 8),
    "mistralai/Mistral-Nemo-Instruct-2407": (131072, 8),
    "deepseek-ai/deepseek-vl2-tiny": (4096, 10),
}


def test_a_name_has_the_facts_of_its_own_config() -> None:
    read = {name: load_model(name) for name in OWN_FACTS}
    facts = {name: (spec.max_position_embeddings, spec.attention.num_kv_heads) for name, spec in read.items()}
    assert facts == OWN_FACTS


def test_a_release_may_have_a_tower_that_its_preset_does_not_have() -> None:
    """So may its quantized copies, and the language model stays the preset's."""
    for name in ("LiquidAI/LFM2.5-VL-450M", "mlx-community/LFM2.5-VL-450M-8bit"):
        spec = load_model(name)
        assert [tower.parameters for tower in towers_of(spec)] == [94_234_880], name
        assert spec.layers == load_model("lfm2.5-350m").layers, name


def test_a_release_may_not_have_the_tower_of_its_preset() -> None:
    """A fine-tune of the language model alone, and a model with another tower around it."""
    assert towers_of(load_model("qwen3.5-9b"))
    assert not towers_of(load_model("kai-os/Carnice-9b"))
    assert [tower.parameters for tower in towers_of(load_model("mispeech/midashenglm-7b"))] == [None]
    assert [tower.parameters for tower in towers_of(load_model("openbmb/MiniCPM-V-4.6"))] == [548_266_416]


def test_a_remark_names_a_nested_config_and_does_not_print_it() -> None:
    assert "audio_config is its own" in " ".join(load_model("openbmb/MiniCPM-o-2_6").remarks)


def test_a_users_own_preset_is_not_taken_for_a_release_it_was_never_compared_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped = find_preset("qwen3-32b")
    assert shipped is not None
    (tmp_path / "qwen3-32b.yaml").write_text(Path(shipped.path).read_text())
    monkeypatch.setenv("KVCALC_PRESETS", str(tmp_path))
    assert load_model("Qwen/Qwen3-32B").name == "qwen3-32b"
    with pytest.raises(ModelError):
        load_model("Qwen/Qwen3-32B-FP8")


def test_a_folder_of_the_pasted_name_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "qwen3-32b-fp8"
    folder.mkdir()
    (folder / "config.json").write_text(
        '{"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64}'
    )
    monkeypatch.chdir(tmp_path)
    assert load_model("qwen3-32b-fp8").num_layers == 2


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("phi3", {"phi-3-medium-4k", "phi-3-mini-4k", "phi-3-mini-128k"}),
        ("Phi 3", {"phi-3-medium-4k", "phi-3-mini-4k", "phi-3-mini-128k"}),
        ("llama_3_70b", {"llama-3-70b"}),
        ("llama3.1:70b", {"llama-3.1-70b"}),
        ("lama-3-70b", {"llama-3-70b"}),
        ("mistral-7b", {"mistral-7b-v0.1", "mistral-7b-v0.3"}),
        ("qwen3-33b", {"qwen3-32b"}),
        ("Qwen/Qwen3-33B", set()),
        ("zzzz", set()),
        ("", set()),
        ("???", set()),
        ("x" * 1000, set()),
    ],
)
def test_near_names_ignore_punctuation_and_keep_versions_apart(typed: str, offered: set[str]) -> None:
    found = nearest_names(typed)
    assert set(found) >= offered
    assert bool(found) == bool(offered)
    assert len(found) <= 3
    presets = [find_preset(name) for name in found]
    assert len({preset.name for preset in presets if preset}) == len(found)


def test_a_copy_that_may_ask_for_an_fp8_cache_is_answered_with_a_type_of_the_cache() -> None:
    with pytest.raises(KvcalcError, match="whether this release asks for an fp8 cache was not found"):
        kvcalc.estimate("tencent/Hy3-FP8", engine="vllm")
    for kv_dtype, elements in (("fp8", 1), ("bf16", 2)):
        document = kvcalc.estimate("tencent/Hy3-FP8", engine="vllm", kv_dtype=kv_dtype)
        assert (
            document["kv_cache"]["bytes_per_token"]
            == elements * kvcalc.estimate("hy3")["kv_cache"]["bytes_per_token"] // 2
        )


def test_copies_of_poolside_ask_for_an_fp8_cache() -> None:
    for suffix in ("FP8", "NVFP4", "INT4"):
        assert kvcalc.estimate(f"poolside/Laguna-XS.2-{suffix}", engine="vllm")["kv_cache"]["dtype"] == "fp8"
    assert kvcalc.estimate("nvidia/DeepSeek-R1-NVFP4", engine="vllm")["kv_cache"]["dtype"] == "bf16"
