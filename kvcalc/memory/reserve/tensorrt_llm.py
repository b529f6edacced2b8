"""What TensorRT-LLM needs beside weights and cache."""

from __future__ import annotations

from kvcalc.memory.engines.options import Given
from kvcalc.memory.reserve.parts import ACTIVATION, Held, Question, Reserve


def tensorrt_llm(question: Question) -> Reserve:
    """The cache gets 90% of the memory that is free after the model is loaded and a step has run.

    The other 10% is a line of its own in `fit`. Source: KvCacheCreator (tensorrt_llm/_torch/pyexecutor/_util.py) and
    KvCacheConfig.free_gpu_memory_fraction, 0.9 (llmapi/llm_args.py), at commit 001541bad83b. A step has
    max_num_tokens tokens, 8,192 by default. The engine measures the rest at run time: the context with cuBLAS and the
    sampler's buffers, and NCCL with the all-reduce workspaces. The values here are those on an idle H100.
    """
    tokens = 8192
    activations = Held(ACTIVATION, f"activations of {tokens:,} tokens", question.step_activations(tokens))
    share = Given("tensorrt-llm", question.settings).share("free-gpu-memory-fraction", 0.9)
    return Reserve([activations, *question.driver(1024, 1024)], {}, share=share)
