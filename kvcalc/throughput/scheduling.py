"""How an engine's scheduler puts prompts into steps."""

from __future__ import annotations

from kvcalc.records import NamedTuple

STEP_TOKENS = 8192
"""The tokens of one step by default in vLLM 0.33 and SGLang 0.5.23 on large devices, and in TensorRT-LLM 1.3."""


class StepRules(NamedTuple):
    """The steps of one engine.

    `mixes` is whether prompts are computed in the steps of decoding requests, `divides` whether they are divided over
    steps, and `overlaps` whether a step is scheduled while the one before it runs. No other prompt joins a step with
    `enough_tokens` of prompts (0: any number). `reads_beside` is whether the host reads requests while the prompts of
    others are computed.
    """

    step_tokens: int = STEP_TOKENS
    mixes: bool = True
    divides: bool = True
    overlaps: bool = False
    enough_tokens: int = 0
    reads_beside: bool = False

    def prompts_of_step(self, tokens: float) -> float:
        """The prompts of `tokens` tokens that a step has room for. Below 1 if it has room for a part of one."""
        room = float(self.step_tokens)
        if self.enough_tokens:
            # The last prompt that joins may be longer than what is left.
            room = min(room, self.enough_tokens + tokens / 2)
        return room / tokens if self.divides else float(max(1, int(room / tokens)))
