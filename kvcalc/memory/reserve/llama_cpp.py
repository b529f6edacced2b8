"""llama.cpp: a compute buffer for one micro-batch, and nothing kept back.

The buffer is the logits of a micro-batch beside its embeddings, in fp32: with 512 tokens 258.50 MiB for Llama 3 8B
(128,256 + 4,096 wide) and 70.50 MiB for Llama 2 7B (32,000 + 4,096), as its logs print ("compute buffer size").
Without flash attention the scores of all heads stand there too (llama-graph.cpp, build_attn_mha).
"""

from __future__ import annotations

from kvcalc.memory.reserve import ACTIVATION, MIB, RESERVE, Held, Question, Reserve, step_activations
from kvcalc.units import parse_count

_UBATCH = 512
_FP32 = 4
# The CUDA context with cuBLAS workspaces: 0.3 to 0.5 GiB by nvidia-smi beside the buffers a log prints.
_CONTEXT_BYTES = 400 * MIB


def reserve(question: Question) -> Reserve:
    """Scores follow the context where flash attention is off."""
    given, width = question.settings, question.width
    tokens = parse_count(given["ubatch-size"], "--ubatch-size") if "ubatch-size" in given else _UBATCH
    buffer = tokens * (width.vocab_size + width.hidden_size) * _FP32
    has_scores = given.get("flash-attn") == "off"
    if has_scores:
        scores = tokens * question.context_tokens * question.num_heads * _FP32
        buffer = max(buffer, scores + step_activations(width, tokens, _FP32))
    return Reserve(
        (
            Held(ACTIVATION, f"compute buffer of {tokens:,} tokens", buffer),
            Held(RESERVE, "CUDA context", _CONTEXT_BYTES),
        ),
        {},
        varies=has_scores,
    )
