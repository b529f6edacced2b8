"""Percentiles of a plan with separate instances: which pairs of layouts are simulated, and with how many instances.

The closed form says which pairs to try, and with how many instances to begin. Requests one after the other are
simulated first: if these are too slow, no number of instances helps. Then instances are added to the pool that brings
the times closer to their targets, and taken away again as long as all targets are met.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvcalc.planning.plan.disaggregated.instances import Instance
from kvcalc.planning.plan.disaggregated.kinds import PoolKinds
from kvcalc.planning.plan.disaggregated.search import Instances, find_split, find_splits
from kvcalc.planning.plan.disaggregated.split import Split
from kvcalc.planning.plan.finalists import find_simulated
from kvcalc.planning.plan.judge import Finalist, Judge
from kvcalc.planning.plan.shapes import Shape
from kvcalc.planning.plan.traffic import Trouble

# The pairs of layouts of one row that are simulated. The closed form knows their order well.
DEFAULT_PAIRS = 4

# Instances help if the time that is furthest beyond its target becomes shorter than this share of it.
_HELPS = 0.95
# How often the rate of a trace is halved to find pools of the closed form, which counts no shared prefixes.
_HALVINGS = 6


def find_pools(known: Instances, joined: Sequence[PoolKinds], judge: Judge, most: int | None) -> Split | Trouble:
    """The pools that `find_split` finds, judged by simulations if these decide.

    At most `most` pairs of layouts are simulated. Raises what `find_split` raises, and UsageError (exit 2) if no pair
    can be simulated.
    """
    if judge.decides:
        guesses = _guesses(known, joined, judge, most or DEFAULT_PAIRS)
        candidates = ([], guesses) if isinstance(guesses, Trouble) else (guesses, None)
        return find_simulated(judge, [candidates], _fewest_instances, _more_instances)
    found = find_split(known, joined)
    if isinstance(found, Split):
        judge.at(found, found.numbers)
    return found


def _guesses(known: Instances, joined: Sequence[PoolKinds], judge: Judge, keep: int) -> list[Split] | Trouble:
    """The pairs to simulate. Where to begin is what the closed form says about means, or without limits if it has none.

    A simulated percentile may be below the mean of the closed form, so the layouts themselves have no limit. If there
    are too few devices for the busiest minute of a trace, a lower rate says where to begin.
    """
    free = judge.targets.without_limits()
    found = find_splits(known, joined, judge.targets, keep)
    if isinstance(found, Trouble):
        found = find_splits(known, joined, free, keep)
    rate, halvings = free.requests_per_second, 0
    while isinstance(found, Trouble) and judge.simulation.trace is not None and rate and halvings < _HALVINGS:
        rate, halvings = rate / 2, halvings + 1
        found = find_splits(known, joined, free._replace(requests_per_second=rate), keep)
    if isinstance(found, Trouble):
        return found
    return [
        split._replace(
            prefill=_of_shape(known.prefills(split.kinds.prefill)[0], split.prefill.shape),
            decode=_of_shape(known.decodes(split.kinds.decode, free)[0], split.decode.shape),
        )
        for split in found
    ]


def _of_shape(instances: Sequence[Instance], shape: Shape) -> Instance:
    return next(one for one in instances if one.shape == shape)


def _fewest_instances(judge: Judge, guess: Split, best: Finalist | None) -> Finalist | None:
    """The fewest instances of two layouts that meet the targets, or some that do not.

    With a `best` so far they count no more than that. None if the first guess does.
    """
    most = None if best is None else best.layout.weight
    if not guess.allows(guess.numbers, most):
        return None
    # All requests of a trace alone take as long to simulate as together, and usually need not be.
    found = None if judge.simulation.trace is None else judge.at(guess, guess.numbers)
    if found is None or found.missed is not None:
        alone = judge.alone(guess)
        if alone.missed is not None:
            return alone
        found = judge.at(guess, guess.numbers) or alone
    while found.missed is not None or found.is_alone:
        more = _larger(judge, guess, found, most)
        if more is None:
            return found
        found = more
    for role in (0, 1):
        found = _with_fewer(judge, guess, found, role)
    return found


def _larger(judge: Judge, guess: Split, found: Finalist, most: float | None) -> Finalist | None:
    """Pools with a quarter more instances of one kind: prefill instances for TTFT, if they help. None if none helps."""
    prefills, decodes = found.layout.numbers
    more, others = (prefills + max(1, prefills // 4), decodes), (prefills, decodes + max(1, decodes // 4))
    best: Finalist | None = None
    for numbers in (others, more) if found.judged.worst_metric == "tpot" else (more, others):
        one = judge.at(guess, numbers) if guess.allows(numbers, most) else None
        if one is None:
            continue
        if one.missed is None or one.judged.worst < _HELPS * found.judged.worst:
            return one
        best = best or one
    return best


def _more_instances(judge: Judge, found: Finalist) -> Finalist | None:
    return _larger(judge, found.layout, found, None)


def _with_fewer(judge: Judge, guess: Split, found: Finalist, role: int) -> Finalist:
    """The fewest instances in one pool that still meet all targets. More are not slower."""
    step = max(1, found.layout.numbers[role] // 4)
    while step:
        numbers = [*found.layout.numbers]
        numbers[role] -= step
        fewer = judge.at(guess, tuple(numbers)) if numbers[role] > 0 else None
        if fewer is not None and fewer.missed is None:
            found = fewer
        else:
            step //= 2
    return found
