"""No engine: a tenth of the device is kept back for whatever runs the model."""

from __future__ import annotations

from kvcalc.memory.reserve import RESERVE, Held, Question, Reserve

# vLLM's long-time default left as much alone (gpu_memory_utilization 0.9 until 0.20).
_PERCENT = 10


def reserve(question: Question) -> Reserve:
    """One line, whatever the model: activations are an engine's."""
    kept = question.memory_bytes * _PERCENT // 100
    return Reserve((Held(RESERVE, f"kept back ({_PERCENT} %)", kept),), {})
