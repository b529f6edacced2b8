"""What llama.cpp needs beside weights and cache."""

from __future__ import annotations

from kvcalc.memory.engines.options import Given
from kvcalc.memory.reserve.parts import ACTIVATION, Held, Question, Reserve


def llama_cpp(question: Question) -> Reserve:
    """A compute buffer for one micro-batch. llama.cpp keeps no other reserve.

    The buffer holds the logits and the embeddings of a micro-batch in fp32. With 512 tokens, llama.cpp's logs print
    ("compute buffer size") 258.50 MiB for Llama 3 8B (128,256 + 4,096 wide) and 70.50 MiB for Llama 2 7B (32,000 +
    4,096). Without flash attention, the buffer also holds the scores of all heads, which grow with the context
    (llama-graph.cpp, build_attn_mha). The CUDA context with cuBLAS workspaces takes 0.3 to 0.5 GiB according to
    nvidia-smi, in addition to the buffers in the log.
    """
    given, width, fp32 = Given("llama.cpp", question.settings), question.width, 4
    tokens = given.count("ubatch-size")
    buffer = tokens * (width.vocab_size + width.hidden_size) * fp32
    has_scores = given.settings.get("flash-attn") == "off"
    if has_scores:
        scores = tokens * question.context_tokens * question.num_heads * fp32
        buffer = max(buffer, scores + question.step_activations(tokens, fp32))
    held = [Held(ACTIVATION, f"compute buffer of {tokens:,} tokens", buffer), *question.driver(400)]
    return Reserve(held, {}, varies=has_scores)
