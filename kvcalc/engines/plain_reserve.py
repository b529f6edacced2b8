"""The memory kept free without an engine, and what `generate` of Transformers needs beside weights and cache."""

from __future__ import annotations

from kvcalc.engines.reserve import ACTIVATION, RESERVE, Held, Question, Reserve


def logical(question: Question) -> Reserve:
    """No engine: reserve 10% of the device for the software that runs the model, regardless of the model.

    vLLM left the same share unused by default until 0.20 (gpu_memory_utilization 0.9).
    """
    return Reserve([Held(RESERVE, "reserved (10 %)", question.memory_bytes // 10)], {})


def transformers(question: Question) -> Reserve:
    """`generate` prefills all sequences at once.

    It computes only the last token's logits (logits_to_keep = 1), and also holds them in fp32. The only reserve is a
    CUDA context with cuBLAS and PyTorch's rounding of blocks: 0.4 to 0.6 GiB on A100 and H100.
    """
    batch = question.batch_size
    layers = question.step_activations(batch * question.context_tokens)
    logits = batch * question.width.vocab_size * (2 + 4)
    held = [Held(ACTIVATION, "prefill activations", layers + logits), *question.driver(512)]
    return Reserve(held, {}, varies=True)
