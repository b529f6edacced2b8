"""The speed of a model with drafted tokens (speculative decoding).

Each step drafts N tokens and then checks them: the model computes N + 1 tokens of every sequence at once, and reads its
weights and the cache once. Of these tokens, a sequence keeps L on average, the acceptance length:
    step = the model's step with N + 1 tokens a sequence + N passes of the drafter + host time between them
    time per output token = step / L
"""

from __future__ import annotations

from collections.abc import Sequence

from kvcalc.search import smallest_where
from kvcalc.throughput.counts import Counts
from kvcalc.throughput.roofline import Part, SpeedModel, Step

BETWEEN_SECONDS = 3e-3
"""The host's time in a step with drafts, of an engine that hides it otherwise because it schedules the next step early.

The drafter needs the tokens that were accepted, and the next check needs its drafts. Steps of four InferenceX runs with
MTP under SGLang took 4.5 to 8 ms longer than their passes, and those of EAGLE with Llama-3.1-8B on H100 about 3 to 4 ms
(docs.sglang.io, Speculative Decoding: 373 tokens per second with EAGLE-3, 244 with EAGLE-2, 158 without).
"""
MOST_BATCH = 65_536
"""The largest batch that is tried when the batch at which drafting stops paying is searched."""
# Batches to try are this far apart (as a ratio). Between two of them the first slow batch is found by bisection.
_STRIDE = 1.05


class DraftingModel(SpeedModel):
    """The speed of `target` when `num_tokens` tokens are drafted in each step, of which it accepts some.

    A step gives a sequence `acceptance_length` tokens on average. `drafter` is the part that drafts them, or None if
    drafting takes no time on the device (n-grams). `starts_with_accepted`: the first pass of the drafter computes all
    tokens that the step checked, because it works on hidden states of the model (MTP and EAGLE); a draft model computes
    one token in each pass. `in_one_pass`: the drafter's first pass computes all drafted tokens (DFlash).
    `between_seconds` is the host's time in a step with drafts.
    """

    def __init__(
        self,
        target: SpeedModel,
        drafter: SpeedModel | None,
        num_tokens: int,
        acceptance_length: float,
        starts_with_accepted: bool,
        in_one_pass: bool = False,
        between_seconds: float = 0.0,
    ) -> None:
        # Everything that depends on the device, the layout and the constants is the target's.
        self.__dict__.update(target.__dict__)
        self.target, self.drafter = target, drafter
        self.num_tokens, self.tokens_per_step = num_tokens, acceptance_length
        # Batches at which drafting stops paying, by context. A plan asks for the same context many times.
        self._break_even: dict[float, int | None] = {}
        self._first_tokens = num_tokens + 1 if starts_with_accepted else 1
        self._other_passes = 0 if in_one_pass else num_tokens - 1
        self._between = Step(between_seconds, 0.0, 0.0, 0.0, between_seconds, 0.0)

    def decode(self, batch: float, context_tokens: float, query_tokens: int = 1, busiest: float | None = None) -> Step:
        """One step of `batch` sequences: drafting, and checking the drafted tokens."""
        checked = self.verify(batch, context_tokens, query_tokens, busiest)
        return _sum(checked, self.draft(batch, context_tokens, busiest))

    def verify(self, batch: float, context_tokens: float, query_tokens: int = 1, busiest: float | None = None) -> Step:
        """The target's share of a step: it computes the drafted tokens and one more."""
        return self.target.decode(batch, context_tokens, query_tokens + self.num_tokens, busiest)

    def draft(self, batch: float, context_tokens: float, busiest: float | None = None) -> Step:
        """The drafter's share of a step: one pass per drafted token, or one for all."""
        if self.drafter is None or not self.num_tokens:
            return _NOTHING
        first = _sum(self._between, self.drafter.decode(batch, context_tokens, self._first_tokens, busiest))
        if not self._other_passes:
            return first
        other = self.drafter.decode(batch, context_tokens, 1, busiest)
        return Step(*(seconds + self._other_passes * more for seconds, more in zip(first, other)))

    def roofline(self, batch: float, context_tokens: float, query_tokens: int = 1) -> float:
        """The ideal seconds of the same step: the target's and every pass of the drafter, one after another."""
        ideal = self.target.roofline(batch, context_tokens, query_tokens + self.num_tokens)
        if self.drafter is None or not self.num_tokens:
            return ideal
        ideal += self.drafter.roofline(batch, context_tokens, self._first_tokens)
        return ideal + self._other_passes * self.drafter.roofline(batch, context_tokens)

    def prefill_work(self, tokens: float, cached_tokens: float = 0.0) -> Step:
        """The same for a prompt. The drafter computes the prompt too, because it keeps a cache of its own."""
        work = self.target.prefill_work(tokens, cached_tokens)
        return work if self.drafter is None else _sum(work, self.drafter.prefill_work(tokens, cached_tokens))

    def beside(
        self, parts: Sequence[Part], batch: float, query_tokens: int = 1, busiest: float | None = None
    ) -> Step:  # fmt: skip
        """What prompts add to a step that checks drafted tokens, and to the drafter's first pass."""
        work = self.target.beside(parts, batch, query_tokens + self.num_tokens, busiest)
        if self.drafter is None:
            return work
        return _sum(work, self.drafter.beside(parts, batch, self._first_tokens, busiest))

    def alone(self, parts: Sequence[Part]) -> Step:
        """The time of prompts and nothing else. The drafter computes them after the target."""
        alone = self.target.alone(parts)
        return alone if self.drafter is None else _sum(alone, self.drafter.alone(parts))

    def host_seconds(self, batch: float, context_tokens: float, query_tokens: int = 1) -> float:
        """The target's. The drafter is on the device."""
        return self.target.host_seconds(batch, context_tokens, query_tokens + self.num_tokens)

    def prefill_copied_bytes(self, tokens: float, batch: int) -> float:
        return self.target.prefill_copied_bytes(tokens, batch)

    def speedup(self, batch: float, context_tokens: float) -> float:
        """The time per output token without drafting, divided by the time with it."""
        drafted = self.decode(batch, context_tokens).seconds / self.tokens_per_step
        return self.target.decode(batch, context_tokens).seconds / drafted

    def break_even_batch(self, context_tokens: float) -> int | None:
        """The smallest batch at which drafting no longer shortens the time per output token.

        None if it shortens the time at every batch up to `MOST_BATCH`.
        """
        known = self._break_even.get(context_tokens, 0)
        if known != 0:
            return known
        batch = self._break_even[context_tokens] = self._find_break_even(context_tokens)
        return batch

    def _find_break_even(self, context_tokens: float) -> int | None:
        paying, batch = 0, 1
        while self.speedup(batch, context_tokens) > 1:
            if batch >= MOST_BATCH:
                return None
            paying, batch = batch, min(MOST_BATCH, max(batch + 1, int(batch * _STRIDE)))
        return smallest_where(lambda number: self.speedup(number, context_tokens) <= 1, paying + 1, batch)


def drafter_model(target: SpeedModel, counts: Counts) -> SpeedModel:
    """The speed of a drafter with these counts, on the target's devices.

    Its passes are part of the target's step. So the time that a step and each of its sequences take on the host counts
    only once, with the target. Its kernels, its all-reduces and its attention take as long as those of any model.
    """
    constants = target.constants._replace(step_seconds=0.0, sequence_seconds=0.0, busy_sequence_seconds=0.0)
    return SpeedModel(counts, target.gpu, constants)


_NOTHING = Step(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


def _sum(first: Step, second: Step) -> Step:
    return Step(*(seconds + other for seconds, other in zip(first, second)))
