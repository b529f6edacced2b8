"""What TensorRT-LLM needs beside weights and cache."""

from __future__ import annotations

from kvcalc.engines.options import SettingsReader
from kvcalc.engines.reserve import ACTIVATION, Held, Reserve, ReserveInputs
from kvcalc.engines.tensorrt_llm.settings import STEP_TOKENS

# The 80 % range of these parts together, as multiples of the estimate. benchmarks/fit/reserve.py computes it from the
# logs in benchmarks/fit/tensorrt_llm_memory.tsv, which are all of GB200.
_LOW, _HIGH = 0.94, 2.12


def reserve(question: ReserveInputs) -> Reserve:
    """The cache gets 90% of the memory that is free after the model is loaded and a step has run.

    The other 10% is a line of its own in `fit`. Source: KvCacheCreator (tensorrt_llm/_torch/pyexecutor/_util.py) and
    KvCacheConfig.free_gpu_memory_fraction, 0.9 (llmapi/llm_args.py), at commit 001541bad83b. A step has
    max_num_tokens tokens, 8,192 by default. The engine measures the rest at run time: the context with cuBLAS and the
    sampler's buffers, and NCCL with the all-reduce workspaces and CUDA graphs. The values follow from the logs in
    benchmarks/fit/tensorrt_llm_memory.tsv that are marked `used`.
    """
    given = SettingsReader("tensorrt-llm", question.settings)
    tokens = given.count("max-num-tokens", STEP_TOKENS)
    activations = question.step_activations(tokens)
    held = [Held(ACTIVATION, f"activations of {tokens:,} tokens", activations), *question.driver(1024, 3840)]
    share = given.share("free-gpu-memory-fraction", 0.9)
    return Reserve([part.within(_LOW, _HIGH) for part in held], {}, share=share)
