"""What mlx-lm needs beside weights and cache."""

from __future__ import annotations

from kvcalc.engines.options import SettingsReader
from kvcalc.engines.reserve import ACTIVATION, Held, Question, Reserve
from kvcalc.errors import UsageError


def reserve(question: Question) -> Reserve:
    """The activations of one step of a prompt. The share that macOS reserves is added for every engine.

    MLX wires memory up to Metal's recommendedMaxWorkingSetSize (wired_limit, mlx_lm/generate.py) and reuses freed
    buffers within it (MetalAllocator, mlx/backend/metal/allocator.cpp). A prompt is processed in steps of
    --prefill-step-size tokens. A step of MLA computes the scores of all heads as one array of 16 bits (pe_scores of
    models/deepseek_v3.py), which grows with the context; other classes use fused attention. Logits are computed for
    the last token only.
    """
    if not question.is_apple:
        raise UsageError("--engine mlx: only Apple's devices are modelled", "for example --gpu m3-ultra")
    step = min(SettingsReader("mlx", question.settings).count("prefill-step-size"), question.context_tokens)
    size = question.batch_size * question.step_activations(step)
    if question.is_latent:
        size += question.batch_size * step * question.context_tokens * question.num_heads * 2
    return Reserve([Held(ACTIVATION, f"activations of {step:,} tokens", size)], {}, varies=True)
