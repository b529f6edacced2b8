"""The prompts of a load: their cost, the delay that they cause for decoding requests, and their wait for steps."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from math import ceil, expm1

from kvcalc.throughput.expert_parallel import busiest_share, ranks_with_prompts
from kvcalc.throughput.roofline import Part, SpeedModel
from kvcalc.throughput.scheduling import (
    Batches,
    StepRules,
    Steps,
    Waits,
    batches,
    mixed_waits,
    separate_waits,
    step_waits,
)  # fmt: skip


class Prompts:
    """Equal prompts. The arguments are those of `kvcalc.throughput.serving.serve`.

    `missed` is the number of prompt tokens that are not cached, and `lone` the time of all the steps of a prompt if
    nothing else runs. `alone` is the time of a step with the whole prompt and nothing else, and `launching` how much
    longer the host takes to launch it.
    """

    def __init__(
        self, model: SpeedModel, input_tokens: int, cached_tokens: float, rules: StepRules,
        parts: Sequence[tuple[int, int]] = (),
    ) -> None:  # fmt: skip
        self._model, self._input, self._cached = model, input_tokens, cached_tokens
        self._rules, self._parts, self._replicas = rules, parts, model.layout.attention_copies
        self.missed = input_tokens - cached_tokens
        # In slots, the parts of a prompt besides those that the room in a step makes.
        self._stops = len(parts) - ceil(self.missed / rules.step_tokens) if parts else None
        self.alone = self.lone = model.prefill(input_tokens, 1, cached_tokens).seconds
        if len(parts) > 1:
            self.lone = sum(model.alone([Part(*part)]).seconds for part in parts)
        elif rules.divides and self.missed > rules.step_tokens:
            self.lone = self._divided()
        self.launching = model.launch_wait(self.alone)
        # With prompts in steps of their own, decoding requests take no room in a step.
        self._full = self._most(0.0)
        self._known = {1: self.alone}
        # The time that a prompt adds to a prompt step that has other prompts.
        self._work = 0.0 if rules.mixes else model.prefill_work(input_tokens, cached_tokens).seconds
        self._batches = Batches(1.0, self.alone, 0.0, self.alone)

    @cached_property
    def hidden(self) -> float:
        """The seconds in which the host can read a request that comes with others, while their prompts are computed.

        They are those that each prompt takes if all DP ranks have full steps, so the longer of reading and computing
        counts. For SGLang's servers, the median error of p99 is 31 % with it and 42 % with the sum of both. For vLLM's
        and TensorRT-LLM's, the loss of the fit is smaller with the sum: 0 seconds.
        """
        if not self._rules.reads_beside:
            return 0.0
        if self._replicas > 1:
            return self._model.alone([self._of_all(self._full)]).seconds / self._full
        return self._of_full_step

    @cached_property
    def _of_full_step(self) -> float:
        """The seconds that each prompt takes of full steps of their own."""
        return self._together(max(self._full, 1.0)) / max(self._full, 1.0)

    def _divided(self) -> float:
        """The seconds of all steps of a prompt that needs several.

        Full steps differ only in the tokens that they attend to, so their mean is that of the first and the last.
        """
        model, size, rest = self._model, self._rules.step_tokens, self.missed % self._rules.step_tokens
        share, end = model.share_of_prompts(1), self._input - rest
        whole = [Part(self._cached, self._cached + size, share), Part(end - size, end, share)]
        seconds = sum(model.alone([part]).seconds for part in whole) / 2 * (self.missed // size)
        return seconds + (model.alone([Part(end, self._input, share)]).seconds if rest else 0.0)

    @property
    def together(self) -> float:
        """The prompts that a step of their own computes on average, as `stop` found it."""
        return self._batches.prompts

    def stop(
        self, step: float, mean_step: float, per_second: float, ending: float, decoding: float, lag: float
    ) -> float:  # fmt: skip
        """The seconds that a prompt stops the requests that decode, whose steps take `step` seconds without it.

        `decoding` requests decode, `per_second` prompts are computed, and `ending` answers end with a step. Their
        clients come back `lag` seconds later.
        """
        if self._rules.mixes or self._replicas > 1:
            arriving = per_second * mean_step
            stop = self.beside(self.prompts_of_step(arriving, decoding), decoding, arriving)
            return stop if self._rules.mixes else self._stop_of_ranks(stop, step, arriving, decoding)
        # As if all steps until the scheduler looks for requests were one.
        every, most, overlaps = self._rules.every, max(1.0, self._full), self._rules.overlaps
        self._batches = found = batches(self._together, every * step, every * ending, lag, overlaps, most)
        return found.seconds / found.prompts

    def _stop_of_ranks(self, added: float, step: float, arriving: float, decoding: float) -> float:
        """The seconds that a prompt stops a request on average if DP ranks compute prompts in steps of their own.

        `added` are those that it adds to steps of all ranks. But its own rank does not decode in these steps, so they
        are shorter by its part of the decode step, and its requests lose the whole steps.
        """
        parts = max(1.0, 1 / self._full + 0.5)
        steps = parts / some_of(arriving / min(1.0, self._full))
        # The prompts of one rank in a step stop its requests once.
        reached = ranks_with_prompts(arriving, self._replicas, self._rules.in_turn)
        of_rank = min(arriving / reached, max(1.0, self._full))
        lost = step * parts / (self._replicas * of_rank)
        return max(0.0, added - steps * (step - self._without(decoding))) + lost

    def _without(self, decoding: float) -> float:
        """The seconds of a step of a DP rank that does not decode, while the others do."""
        return self._model.decode(decoding, 1.0, busiest=1.0).seconds

    def prompts_of_step(self, arriving: float, decoding: float) -> float:
        """The prompts in a step that has some, if `arriving` of them come during a step on average, at random."""
        some = some_of(arriving)
        return min(some, self._most(decoding))

    def beside(self, prompts: float, decoding: float, arriving: float = 0.0) -> float:
        """The seconds that each of `prompts` prompts adds to a step that computes them and `decoding` requests.

        `arriving` prompts come during a step on average, or only these if it is 0.
        """
        if len(self._parts) > 1:
            # Each part is computed in a step of its own, perhaps with a part of another prompt.
            number = some_of(arriving * len(self._parts)) if arriving else max(1.0, prompts)
            parts = [self._model.beside([Part(*part, 1.0, number)], decoding).seconds for part in self._parts]
            return sum(parts) / number
        part = Part(self._cached, self._input, 1.0, prompts)
        if self._replicas > 1 and arriving:
            # A prompt that is longer than a step has tokens for is computed in several parts.
            coming = arriving / min(1.0, self._full)
            # A rank computes only one part of longer prompts in a step, and the others later.
            in_turn = self._rules.in_turn or self._full < 1
            share = busiest_share(coming, self._replicas, in_turn)
            part = self._of_ranks(prompts, share, some_of(coming))
        return self._model.beside([part], decoding).seconds / prompts

    def _of_ranks(self, prompts: float, share: float, ranks: float) -> Part:
        """The part for `prompts` prompts, of which the busiest of `ranks` DP ranks computes `share`.

        If each computes a part, the latest one attends to most tokens: with n parts, it is n / (n + 1) through its
        prompt on average.
        """
        if self._full >= 1:
            return Part(self._cached, self._input, share, prompts)
        tokens, ranks = self._full * self.missed, min(ranks, float(self._replicas))
        start = self._cached + (self.missed - tokens) * ranks / (ranks + 1)
        return Part(start, start + tokens, share, prompts / self._full)

    def waits(self, step: float, mean_step: float, decoding: float, rate: float, lag: float) -> Waits:
        """How long a prompt waits for steps if `rate` others are computed per second, by all DP ranks.

        A client's next prompt comes `lag` seconds after its last answer.
        """
        found = self._waits_of_steps(step, mean_step, decoding, rate, lag)
        # A request waits until the scheduler looks for requests, and not only for the step that runs.
        unseen = (self._rules.every - 1) * step / 2
        return found._replace(first=found.first + unseen, random=found.random + unseen)

    def _waits_of_steps(self, step: float, mean_step: float, decoding: float, rate: float, lag: float) -> Waits:
        rules = self._rules
        if self._replicas > 1:
            return self._waits_of_rank(step, mean_step, decoding, rate, lag)
        if rules.mixes:
            most = self._most(decoding)
            own = self.beside(min(1.0, most), decoding)
            full = own if most <= 1 else self.beside(most, decoding)
            closed = step_waits(step, mean_step, rate, lag, rules.overlaps)
            alone = Steps(step, step / 2)
            return mixed_waits(rules, alone, mean_step, own, full, rate, most, closed, self._stops)
        found = self._batches
        if rules.every > 1:
            # The scheduler does not look for requests at the step after that with which an answer ended.
            own = self._together(min(found.prompts, max(1.0, self._full)))
            found = found._replace(first=lag + step / 2 + rules.overlaps * step + own)
        return separate_waits(
            found, step, self._work, self._together(1.0), self._of_full_step, self._full, rules, rate, lag
        )

    def _waits_of_rank(self, step: float, mean_step: float, decoding: float, rate: float, lag: float) -> Waits:
        """The waits in a DP rank, for its own steps, which are as long as those of the rank with most work.

        Other ranks decode while a rank computes prompts without its decoding requests, so these steps are mixed too.
        """
        ranks, most, busiest = self._replicas, self._most(decoding), None
        without = step
        if not self._rules.mixes:
            busiest, without = 1.0, self._without(decoding)
        # The prompts of other ranks that come during a step, and those of which a step computes a part.
        arriving = rate * (ranks - 1) / ranks * mean_step
        part = min(1.0, most)
        others = min(arriving / part, ranks - 1.0)
        coming = self.prompts_of_step(arriving, decoding)
        added = arriving * self.beside(coming, decoding, arriving) if arriving else 0.0
        seconds = step + added
        # A step has prompts or not, so an arriving request finds a longer one than the mean.
        some = -expm1(-arriving / part)
        variance = (1 - some) * added * added / some if some else 0.0
        steps = Steps(seconds, seconds / 2 + variance / (2 * seconds))

        def own(prompts: float) -> float:
            """The time that each of `prompts` own prompts adds to a step that computes others' prompts anyway."""
            together = prompts + others * part
            work = self._of_ranks(together, prompts / together, 1 + others)
            return max(0.0, without + self._model.beside([work], decoding, busiest=busiest).seconds - seconds) / prompts

        burst = self._model.beside([self._of_all(most)], decoding).seconds
        closed = step_waits(step, mean_step, rate, lag, self._rules.overlaps)
        closed = closed._replace(mates=closed.mates / ranks)
        return mixed_waits(
            self._rules, steps, mean_step, own(part), own(most), rate / ranks, most, closed, self._stops,
            (step + burst) / most,
        )  # fmt: skip

    def _of_all(self, prompts: float) -> Part:
        """`prompts` prompts in each DP rank, as when all clients start."""
        return Part(self._cached, self._input, 1 / self._replicas, prompts * self._replicas)

    def steps(self, decoding: float) -> float:
        """The steps that a prompt takes if nothing else is computed."""
        return max(1.0, 1 / self._most(decoding))

    def _most(self, decoding: float) -> float:
        """The prompts that a step of a DP rank has room for."""
        return self._rules.prompts_of_step(self.missed, decoding / self._replicas)

    def _together(self, prompts: float) -> float:
        """The seconds of a step that computes only prompts, or of all the steps of a prompt that needs several."""
        if self._full < 1:
            # Every step launches its kernels and reads the weights again.
            return self.alone + (1 / self._full - 0.5) * (self.alone - self._work)
        low = int(prompts)
        if low == prompts:
            return self._step(low)
        return self._step(low) + (prompts - low) * (self._step(low + 1) - self._step(low))

    def _step(self, prompts: int) -> float:
        found = self._known.get(prompts)
        if found is None:
            found = self._known[prompts] = self._model.prefill(self._input, prompts, self._cached).seconds
        return found


def some_of(mean: float) -> float:
    """The mean of a number with a Poisson distribution of this mean, if it is not 0."""
    return mean / -expm1(-mean) if mean > 0 else 1.0
