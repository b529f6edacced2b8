"""The prompts of a load: what they cost, how they stop the requests that decode, and how long they wait for steps."""

from __future__ import annotations

from collections.abc import Sequence

from kvcalc.throughput.expert_parallel import busiest_share
from kvcalc.throughput.roofline import SpeedModel
from kvcalc.throughput.scheduling import Batches, StepRules, Waits, batches, mixed_waits, separate_waits


class Prompts:
    """Equal prompts. The arguments are those of `kvcalc.throughput.serving.serve`.

    `missed` is the number of prompt tokens that are not cached. `work` is how many seconds a prompt adds to a step that
    runs anyway, `alone` is the time of a step with this prompt only, and `lone` that of all the steps of its parts.
    """

    def __init__(
        self, model: SpeedModel, input_tokens: int, cached_tokens: float, rules: StepRules | None,
        parts: Sequence[tuple[int, int]] = (),
    ) -> None:  # fmt: skip
        self._model, self._input, self._cached = model, input_tokens, cached_tokens
        self._rules, self._parts, self._replicas = rules, len(parts), model.layout.data_parallel_size
        self.missed = input_tokens - cached_tokens
        self.work = model.prefill_work(input_tokens, cached_tokens).seconds
        self.alone = self.lone = model.prefill(input_tokens, 1, cached_tokens).seconds
        if len(parts) > 1:
            self.lone = sum(model.prefill_chunks([part]).seconds for part in parts)
        self._of_one = self.work
        if self._replicas > 1:
            self._of_one = model.prefill_work(input_tokens, cached_tokens, 1.0).seconds
        # With prompts in steps of their own, a step has room for as many, whoever decodes.
        self._full = self._most(0.0)
        self._known = {1: self.alone}
        self._batches = Batches(1.0, self.alone, 0.0, 0.0)

    @property
    def together(self) -> float:
        """The prompts that a step of their own computes in the mean, as `stop` found it."""
        return self._batches.prompts

    def stop(self, step: float, per_second: float, ending: float) -> float:
        """The seconds that a prompt stops the requests that decode, whose steps take `step` seconds without it.

        `per_second` prompts are computed, and `ending` answers end with a step.
        """
        if self._replicas > 1:
            # A prompt that is longer than a step has tokens for is computed in several parts.
            steps = 1 / min(1.0, self._full)
            share = busiest_share(steps * per_second, step, self._of_one / steps, self._replicas)
            return self._model.prefill_work(self._input, self._cached, share).seconds
        if self._rules is None or self._rules.mixes:
            return self.work
        found = batches(self._together, step, self.work, per_second, ending, self._full, self._batches)
        self._batches = found
        return found.seconds / found.prompts

    def waits(self, step: float, mean_step: float, decoding: float, rate: float) -> Waits:
        """How long a prompt waits for steps if `rate` others are computed per second, by all attention replicas."""
        rules, rate = self._rules or StepRules(), rate / self._replicas
        if rules.mixes:
            # The constants were fitted to prompts that are computed alone.
            own = self._of_one + self.alone - self.work
            return mixed_waits(rules, step, mean_step, self._of_one, own, rate, self._most(decoding), self._parts)
        full = max(self._full, 1.0)
        each = self._together(full) / full
        return separate_waits(
            self._batches, step, self._of_one, self._together(1.0), each, self._full, rules.overlaps
        )  # fmt: skip

    def _most(self, decoding: float) -> float:
        """The prompts that a step of an attention replica has room for."""
        return (self._rules or StepRules()).prompts_of_step(self.missed, decoding / self._replicas)

    def _together(self, prompts: float) -> float:
        """The seconds of a step that computes only prompts, or of all the steps of a prompt that needs several."""
        if self._replicas > 1:
            return self.alone + (prompts - 1) * self.work
        if self._full < 1:
            # Every step launches its kernels and reads the weights again.
            return self.alone + (1 / self._full - 0.5) * (self.alone - self.work)
        low = int(prompts)
        if low == prompts:
            return self._step(low)
        return self._step(low) + (prompts - low) * (self._step(low + 1) - self._step(low))

    def _step(self, prompts: int) -> float:
        found = self._known.get(prompts)
        if found is None:
            found = self._known[prompts] = self._model.prefill(self._input, prompts, self._cached).seconds
        return found
