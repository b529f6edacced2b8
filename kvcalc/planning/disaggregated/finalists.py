"""Percentiles of a plan with separate instances: pairs of layouts are simulated, and the smallest pools win.

The closed form says which pairs to try, and with how many instances to begin. Requests one after the other are
simulated first: if these are too slow, no number of instances helps. Then instances are added to the pool that brings
the times closer to their targets, and taken away again as long as all targets are met.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvcalc.errors import UsageError
from kvcalc.planning.disaggregated.instances import Instance
from kvcalc.planning.disaggregated.judge import SplitFinalist, SplitJudge
from kvcalc.planning.disaggregated.kinds import PoolKinds
from kvcalc.planning.disaggregated.search import Split, find_split, find_splits
from kvcalc.planning.shapes import Shape
from kvcalc.planning.traffic import Trouble

# The pairs of layouts of one row that are simulated. The closed form knows their order well.
DEFAULT_PAIRS = 4

# Instances help if the time that is furthest beyond its target becomes shorter than this share of it.
_HELPS = 0.95
# How often the rate of a trace is halved to find pools of the closed form, which counts no shared prefixes.
_HALVINGS = 6


def find_simulated_split(judge: SplitJudge, joined: Sequence[PoolKinds], most: int | None) -> Split | Trouble:
    """The pools that `find_split` finds, judged by simulations if these decide.

    At most `most` pairs of layouts are simulated. Raises what `find_split` raises, and UsageError (exit 2) if no pair
    can be simulated.
    """
    if judge.decides:
        return _smallest_of(judge, _guesses(judge, joined, most or DEFAULT_PAIRS))
    found = find_split(judge.known, joined)
    if isinstance(found, Split):
        judge.at(found, found.match.prefills, found.match.decodes)
    return found


def _smallest_of(judge: SplitJudge, guesses: list[Split] | Trouble) -> Split | Trouble:
    """The pools that count the least, of the layouts of all guesses, and why the second choice lost."""
    if isinstance(guesses, Trouble):
        return guesses
    met: list[SplitFinalist] = []
    missed: list[SplitFinalist] = []
    refusal: UsageError | None = None
    for guess in guesses:
        best = min(met, key=_rank, default=None)
        try:
            one = _smallest(judge, guess, best)
        except UsageError as error:  # a layout that is not simulated
            refusal = error
            continue
        if one is not None:
            (met if one.missed is None else missed).append(one)
    if not met:
        if missed:
            return Trouble(f"{missed[-1]}: {missed[-1].missed}")
        raise refusal or UsageError("the model cannot be split over these devices")
    best, *others = sorted(met, key=_rank)
    return best.split._replace(next_layout=_why_next(best, [*others, *missed]))


def _guesses(judge: SplitJudge, joined: Sequence[PoolKinds], keep: int) -> list[Split] | Trouble:
    """The pairs to simulate. Where to begin is what the closed form says about means, or without limits if it has none.

    A simulated percentile may be below the mean of the closed form, so the layouts themselves have no limit. If there
    are too few devices for the busiest minute of a trace, a lower rate says where to begin.
    """
    known, free = judge.known, judge.targets.without_limits()
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


def _smallest(judge: SplitJudge, guess: Split, best: SplitFinalist | None) -> SplitFinalist | None:
    """The fewest instances of two layouts that meet the targets, or some that do not.

    With a `best` so far they count no more than that. None if the first guess does.
    """

    def allows(numbers: tuple[int, int]) -> bool:
        devices = guess.devices_of(*numbers)
        return guess.kinds.allow(devices) and (best is None or guess.kinds.weigh(devices) <= best.split.weight)

    numbers = guess.match.prefills, guess.match.decodes
    if not allows(numbers):
        return None
    # All requests of a trace alone take as long to simulate as together, and usually need not be.
    found = None if judge.simulation.trace is None else judge.at(guess, *numbers)
    if found is None or found.missed is not None:
        alone = judge.alone(guess)
        if alone.missed is not None:
            return alone
        found = judge.at(guess, *numbers) or alone
    while found.missed is not None or found.is_alone:
        more = _larger(judge, found, allows)
        if more is None:
            return found
        found = more
    for role in (0, 1):
        found = _with_fewer(judge, found, role)
    return found


def _larger(judge: SplitJudge, found: SplitFinalist, allows: Callable[[tuple[int, int]], bool]) -> SplitFinalist | None:
    """Pools with a quarter more instances of one kind: prefill instances for TTFT, if they help. None if none helps."""
    match = found.split.match
    more = (match.prefills + max(1, match.prefills // 4), match.decodes)
    others = (match.prefills, match.decodes + max(1, match.decodes // 4))
    best: SplitFinalist | None = None
    for numbers in (others, more) if found.judged.worst_metric == "tpot" else (more, others):
        one = judge.at(found.split, *numbers) if allows(numbers) else None
        if one is None:
            continue
        if one.missed is None or one.judged.worst < _HELPS * found.judged.worst:
            return one
        best = best or one
    return best


def _with_fewer(judge: SplitJudge, found: SplitFinalist, role: int) -> SplitFinalist:
    """The fewest instances in one pool that still meet all targets. More are not slower."""
    numbers = [found.split.match.prefills, found.split.match.decodes]
    step = max(1, numbers[role] // 4)
    while step:
        numbers = [found.split.match.prefills, found.split.match.decodes]
        numbers[role] -= step
        fewer = judge.at(found.split, *numbers) if numbers[role] > 0 else None
        if fewer is not None and fewer.missed is None:
            found = fewer
        else:
            step //= 2
    return found


def _why_next(best: SplitFinalist, others: list[SplitFinalist]) -> str | None:
    """Why the next pair of layouts lost."""
    if not others:
        return None
    second = others[0]
    why = second.missed or second.split.why_more(best.split)
    if why is not None:
        return f"{second}: {why}"
    shares = f"{second.judged.worst:.0%}", f"{best.judged.worst:.0%}"
    if shares[0] == shares[1]:
        return f"{second}: as many devices, and as close to its targets"
    return f"{second}: as many devices, but {shares[0]} of a target instead of {shares[1]}"


def _rank(one: SplitFinalist) -> tuple[float, float]:
    return one.rank
