"""Transformers: the prompt in one pass, and nothing kept back but the driver's context."""

from __future__ import annotations

from kvcalc.memory.reserve import ACTIVATION, MIB, RESERVE, Held, Question, Reserve, step_activations

# A CUDA context with cuBLAS and PyTorch's own rounding of blocks: 0.4 to 0.6 GiB on A100 and H100.
_CONTEXT_BYTES = 512 * MIB


def reserve(question: Question) -> Reserve:
    """`generate` prefills all sequences at once and asks for the last token's logits alone (logits_to_keep = 1), which
    it then holds in fp32 too."""
    width, batch = question.width, question.batch_size
    layers = step_activations(width, batch * question.context_tokens)
    logits = batch * width.vocab_size * (2 + 4)
    return Reserve(
        (
            Held(ACTIVATION, "activations of the prefill", layers + logits),
            Held(RESERVE, "CUDA context", _CONTEXT_BYTES),
        ),
        {},
        varies=True,
    )
