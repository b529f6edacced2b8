"""The requests of a plan, simulated: how `kvcalc plan` judges a percentile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from typing import Any, NamedTuple

from kvcalc.errors import UsageError
from kvcalc.planning.judge import Pools, Simulated
from kvcalc.planning.lengths import Lengths as PlannedLengths
from kvcalc.planning.question import Question
from kvcalc.planning.targets import Targets
from kvcalc.simulation.load import Load
from kvcalc.simulation.requests import Lengths, lengths_of
from kvcalc.simulation.simulate import simulate


class PlannedLoad(NamedTuple):
    """Requests that arrive at random at the rate of a plan, or in a closed loop.

    `pairs` are the prompt and answer tokens of the requests in a file, from which requests are drawn; without them, all
    requests have the mean `lengths`.
    """

    lengths: PlannedLengths
    pairs: Sequence[tuple[int, int]] | None = None
    burstiness: float = 1.0
    seed: int = 0
    num_requests: int | None = None

    def run(
        self, question: Question, targets: Targets, replicas: int | None, num_requests: int, step_factor: float
    ) -> Simulated:
        """See `planning.judge.Simulates`."""
        _check(question)
        load = self._load(targets, num_requests, is_alone=replicas is None)
        asked = question._asdict()
        model = asked.pop("model")
        return _simulated(simulate(model, load, replicas=replicas or 1, step_factor=step_factor, **asked))

    def run_pools(self, pools: Pools, targets: Targets, num_requests: int, step_factor: float) -> Simulated:
        """See `planning.judge.Simulates`."""
        from kvcalc.simulation.pools import Prefills, simulate_pools

        load = self._load(targets, num_requests, is_alone=pools.numbers is None)
        prefills, decodes = pools.numbers or (1, 1)
        other, asked = pools.prefill, pools.decode._asdict()
        model = asked.pop("model")
        found = simulate_pools(
            model, load, Prefills.like(other, prefills, pools.transfer), replicas=decodes, step_factor=step_factor,
            **asked,
        )  # fmt: skip
        return _simulated(found)

    def _load(self, targets: Targets, num_requests: int, *, is_alone: bool) -> Load:
        prompt, answer = self._distributions()
        load = Load(prompt, answer, num_requests=num_requests, seed=self.seed)
        if is_alone:
            # Requests with the same lengths take the same time if each is alone.
            return load._replace(concurrency=1, num_requests=1 if self.pairs is None else num_requests)
        if targets.concurrency is not None:
            return load._replace(concurrency=targets.concurrency, burstiness=self.burstiness)
        return load._replace(requests_per_second=targets.requests_per_second, burstiness=self.burstiness)

    def _distributions(self) -> tuple[Lengths | None, Lengths | None]:
        if self.pairs is None:
            lengths = self.lengths
            return lengths_of(lengths.input_tokens, "input_tokens"), lengths_of(lengths.output_tokens, "output_tokens")
        return _drawn_together(self.pairs, self.lengths)


def _simulated(found: Mapping[str, Any]) -> Simulated:
    times = {
        row["metric"]: {key.removesuffix("_seconds"): value for key, value in row.items() if key != "metric"}
        for row in found["times"]
    }
    engine, counts = found["engine"], found["load"]
    return Simulated(times, counts["requests"], counts["refused_requests"], engine["max_running_requests"])


def _drawn_together(pairs: Sequence[tuple[int, int]], lengths: PlannedLengths) -> tuple[Lengths, Lengths]:
    """The prompts and the answers of `pairs`. A load draws a prompt and then its answer."""
    answer = 0

    def draw_prompt(random: Random) -> int:
        nonlocal answer
        prompt, answer = random.choice(pairs)
        return prompt

    name = lengths.file or ""
    return (
        Lengths(name, lengths.input_tokens, None, draw_prompt),
        Lengths(name, lengths.output_tokens, None, lambda _: answer),
    )


def _check(question: Question) -> None:
    """Raise UsageError (exit 2) if the question has parts that the simulation ignores."""
    if question.reuse is not None:
        raise UsageError("--prefix-tokens: is not simulated", "--prefix-hit-rate is")
