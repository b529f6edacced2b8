"""TensorRT-LLM: nine tenths of what is free once the model is loaded and a step has run.

Source: KvCacheCreator (tensorrt_llm/_torch/pyexecutor/_util.py) and KvCacheConfig.free_gpu_memory_fraction, 0.9
(llmapi/llm_args.py), at commit 001541bad83b. A step has max_num_tokens tokens, 8,192 unless set.
"""

from __future__ import annotations

from kvcalc.memory.reserve import ACTIVATION, MIB, RESERVE, Held, Question, Reserve, fraction, step_activations

_MAX_NUM_TOKENS = 8192
_FRACTION = 0.9
# The context, cuBLAS and the sampler's buffers; NCCL's and the all-reduce workspaces where there are several ranks. The
# engine measures them; these are what it leaves of an idle H100.
_CONTEXT_BYTES = 1024 * MIB
_NCCL_BYTES = 1024 * MIB


def reserve(question: Question) -> Reserve:
    """The rest of the free memory, a tenth, is its line in `fit`."""
    held = [
        Held(ACTIVATION, f"activations of {_MAX_NUM_TOKENS:,} tokens",
             step_activations(question.width, _MAX_NUM_TOKENS)),
        Held(RESERVE, "CUDA context", _CONTEXT_BYTES),
    ]  # fmt: skip
    if question.ranks > 1:
        held.append(Held(RESERVE, "NCCL buffers", _NCCL_BYTES))
    share = fraction(question, "free-gpu-memory-fraction", _FRACTION)
    return Reserve(tuple(held), {}, share=share)
