"""Plausible values of options, so that most questions are answered and not refused."""

from __future__ import annotations

import re
from random import Random

from benchmarks.answers.declared import Option

RELEASES = {
    "vllm": ("0.11", "0.19", "0.28"),
    "sglang": ("0.5.3", "0.5.9", "0.5.15"),
    "tensorrt-llm": ("1.0", "1.2"),
}
"""Some older releases of each engine."""

WITH_MTP = (
    "deepseek-v3", "deepseek-r1", "deepseek-v3.2", "glm-4.5-air", "glm-4.7-flash", "glm-5", "qwen3-next-80b-a3b",
    "qwen3.5-35b-a3b", "qwen3.6-27b", "mimo-7b", "mimo-v2-flash", "deepseek-v4-flash", "nemotron-3-super-120b-a12b",
)  # fmt: skip
DRAFT_MODELS = {
    "llama-3.1": "llama-3.2-1b", "llama-3.3": "llama-3.2-1b", "llama-3-": "llama-3.2-1b", "qwen3-": "qwen3-0.6b",
    "qwen2.5": "qwen2.5-0.5b", "gemma-3-": "gemma-3-1b", "mistral": "llama-3.2-1b",
}  # fmt: skip
"""The beginning of a model's name -> a small model that drafts for it."""

MOST_ASKED = (
    "llama-3.1-8b", "llama-3.1-70b", "llama-3-8b", "qwen3-8b", "qwen3-32b", "qwen3-30b-a3b", "gpt-oss-20b",
    "gpt-oss-120b", "gemma-3-27b", "gemma-3-4b", "deepseek-v3", "deepseek-v2-lite", "qwen3-next-80b-a3b",
    "mistral-7b-v0.1", "mixtral-8x7b", "qwen3.5-35b-a3b", "glm-4.5-air", "falcon-h1-tiny-90m",
    "nemotron-3-nano-30b-a3b", "mimo-7b", "mimo-v2-flash", "llama-4-scout", "qwen2.5-vl-7b", "qwen3-vl-8b",
    "granite-4.0-h-small", "kimi-linear-48b",
)  # fmt: skip
"""Models of all kinds that engines can run, on which half of the questions are asked."""

SELDOM_RUN = (
    "bart", "bert", "bge", "t5", "whisper", "palm", "gpt-3", "opt", "zamba", "mamba", "recurrentgemma", "jamba",
    "minicpm3", "bloom", "deepseek-v4", "kimi-k3", "lfm2",
)  # fmt: skip
"""Beginnings of the names of models that most engines refuse, and that are seldom asked of them."""

NEEDS_DEVICE = frozenset(
    "gpu-memory-utilization max-num-seqs enforce-eager language-model-only max-loras max-lora-rank mem-fraction-static "
    "max-loras-per-batch fit-target fit-ctx n-gpu-layers n-cpu-moe cpu-moe no-kv-offload host-memory host-bandwidth "
    "prefill-step-size".split()
)
IN_HOST_MEMORY = frozenset("n-gpu-layers n-cpu-moe cpu-moe no-kv-offload host-memory host-bandwidth".split())
FOR_PROMPTS = ("prefill-context-parallel-size", "attn-cp-size")
"""The engines' own options that divide a device's memory, that place parts of a model, and that need an MLA model."""

WITH_VISION = ("qwen2.5-vl-7b", "qwen3-vl-8b", "gemma-3-27b", "gemma-3-4b", "llava-1.5-7b", "qwen2-vl-7b")

_SIZES = {
    "deepseek-v": 671, "deepseek-r1": 671, "deepseek-v2-lite": 16, "deepseek-v2": 236, "kimi-k": 1000, "glm-4.5": 355,
    "glm-4.5-air": 106, "glm-4.7": 30, "glm-5": 744, "llama-4-scout": 109, "llama-4-maverick": 400, "gpt-3": 175,
    "minimax": 230, "mimo-v2": 309, "jamba": 52, "command-r": 35, "mixtral-8x7b": 47, "mixtral-8x22b": 141,
    "granite-4.0-h-small": 32, "mistral-nemo": 12, "phi-3.5-moe": 42, "phi-3-medium": 14, "phi-4": 15,
    "deepseek-v4-flash": 284,
}  # fmt: skip
"""The beginning of a name -> billions of parameters, for names that do not say so."""

CHOICES: dict[str, tuple[str, ...]] = {
    "block-size": ("16", "32", "64", "128"),
    "max-num-batched-tokens": ("2048", "4096", "16384"),
    "decode-context-parallel-size": ("1", "2"),
    "prefill-context-parallel-size": ("1", "2"),
    "mamba-block-size": ("256", "512"),
    "kv-cache-dtype-skip-layers": ("0", "0,1,2", "sliding_window"),
    "num-speculative-tokens": ("1", "3"),
    "gpu-memory-utilization": ("0.8", "0.9", "0.95"),
    "max-num-seqs": ("8", "64", "256"),
    "max-loras": ("1", "4"),
    "max-loras-per-batch": ("1", "8"),
    "max-lora-rank": ("8", "16", "64"),
    "page-size": ("1", "16", "64"),
    "swa-full-tokens-ratio": ("0.2", "0.5", "1.0"),
    "max-running-requests": ("16", "64", "256"),
    "context-length": ("16384", "32768"),
    "max-mamba-cache-size": ("64", "400"),
    "mamba-full-memory-ratio": ("0.5", "0.9", "2"),
    "speculative-num-draft-tokens": ("2", "4"),
    "speculative-eagle-topk": ("1", "4"),
    "chunked-prefill-size": ("2048", "4096", "8192"),
    "attn-cp-size": ("1", "2"),
    "mem-fraction-static": ("0.8", "0.88"),
    "tokens-per-block": ("32", "64", "128"),
    "max-tokens": ("20000", "200000"),
    "free-gpu-memory-fraction": ("0.8", "0.9"),
    "max-attention-window": ("4096", "128,32768"),
    "max-batch-size": ("16", "64", "256"),
    "avg-seq-len": ("1024", "4096"),
    "cache-type-k": ("f16", "q8_0", "q4_0"),
    "cache-type-v": ("f16", "q8_0"),
    "parallel": ("1", "4", "16"),
    "ubatch-size": ("256", "512", "1024"),
    "draft-max": ("4", "16"),
    "before-pull": ("24216", "19067", "16736", "13194"),
    "fit-target": ("512", "2048"),
    "fit-ctx": ("2048", "8192"),
    "n-gpu-layers": ("auto", "all", "10", "24"),
    "n-cpu-moe": ("4", "20"),
    "host-memory": ("64GiB", "256GiB"),
    "host-bandwidth": ("80GB/s", "300GB/s"),
    "kv-bits": ("4", "8"),
    "kv-group-size": ("32", "64", "128"),
    "max-kv-size": ("2048", "8192"),
    "prefill-step-size": ("512", "2048"),
}
"""Values of the engines' own options."""

# Values of options that CHOICES does not have, by metavar.
_BY_METAVAR = {
    "N": ("1", "2", "8", "64", "1024"), "F": ("0.5", "0.9"), "R": ("0.5", "1"), "N,N": ("1,1", "3,1"),
    "SIZE": ("16GiB",), "RATE": ("50GB/s",), "TYPE": ("bf16", "q8_0"), "MIB": ("1024",), "W,W": ("4096",),
}  # fmt: skip


def value_of(random: Random, option: Option) -> str | bool:
    """A value of an engine's option; True for a flag. An option that is not known here gets one by its metavar."""
    if option.metavar is None:
        return True
    if option.name in CHOICES:
        return random.choice(CHOICES[option.name])
    if "|" in option.metavar:
        return random.choice([word for word in option.metavar.split("|") if word != "N"])
    return random.choice(_BY_METAVAR.get(option.metavar, ("1",)))


def billions_of(model: str) -> float:
    """The parameters of a model by its name, roughly."""
    known = max((name for name in _SIZES if model.startswith(name)), key=len, default=None)
    if known is not None:
        return _SIZES[known]
    sizes = [float(size) for size in re.findall(r"(?:^|-)e?(\d+(?:\.\d+)?)b(?=-|$)", model)]
    return max(sizes, default=1.0)


def bytes_of(text: str) -> int:
    """The bytes of a size such as 40GiB, or the bytes per second of a rate such as 50GB/s."""
    match = re.fullmatch(r"([\d.]+)([kMGT])(i?)B(?:/s)?", text)
    if match is None:
        return int(text)
    base = 1024 if match[3] else 1000
    return int(float(match[1]) * base ** (" kMGT".index(match[2])))


def seconds_of(text: str) -> float:
    """The seconds of a time such as 30ms or 2s."""
    return float(text.removesuffix("ms")) / 1000 if text.endswith("ms") else float(text.removesuffix("s"))
