"""Percentiles of a plan with separate instances: pairs of layouts are simulated, and the smallest pools win.

The closed form says which pairs to try, and with how many instances to begin. Requests one after the other are
simulated first: if these are too slow, no number of instances helps. Then instances are added to the pool that brings
the times closer to their targets, and taken away again as long as all targets are met.
"""

from __future__ import annotations

from kvcalc.errors import UsageError
from kvcalc.planning.disaggregated.judge import SplitFinalist, SplitJudge
from kvcalc.planning.disaggregated.search import Split, both_pools, find_split, find_splits, link_of, most_devices
from kvcalc.planning.replicas import more_devices
from kvcalc.planning.traffic import Trouble

# The pairs of layouts of one kind of device that are simulated. The closed form knows their order well.
DEFAULT_PAIRS = 4

# Instances help if the time that is furthest beyond its target becomes shorter than this share of it.
_HELPS = 0.95


def find_simulated_split(judge: SplitJudge, most: int | None) -> Split | Trouble:
    """The pools that `find_split` finds, judged by simulations if a target has a percentile.

    At most `most` pairs of layouts are simulated. Raises what `find_split` raises, and UsageError (exit 2) if no pair
    can be simulated.
    """
    if judge.targets.highest_percentile is None:
        found = find_split(judge.traffic, judge.kind, judge.transfer)
        if isinstance(found, Split):
            judge.at(found, found.match.prefills, found.match.decodes)
        return found
    guesses = _guesses(judge, most or DEFAULT_PAIRS)
    if isinstance(guesses, Trouble):
        return guesses
    met: list[SplitFinalist] = []
    missed: list[SplitFinalist] = []
    refusal: UsageError | None = None
    for guess in guesses:
        best = min(met, key=_devices_then_worst, default=None)
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
    best, *others = sorted(met, key=_devices_then_worst)
    return best.split._replace(next_layout=_why_next(judge, best, [*others, *missed]))


def _guesses(judge: SplitJudge, most: int) -> list[Split] | Trouble:
    """The pairs to simulate. Where to begin is what the closed form says about means, or without limits if it has none.

    A simulated percentile may be below the mean of the closed form, so the layouts themselves have no limit.
    """
    traffic, kind = judge.traffic, judge.kind
    free = traffic._replace(targets=traffic.targets.without_limits())
    found = find_splits(traffic, kind, judge.transfer, most)
    if isinstance(found, Trouble):
        return find_splits(free, kind, judge.transfer, most)
    prefills, decodes = ({one.shape: one for one in pool} for pool in both_pools(free, kind))
    return [
        split._replace(prefill=prefills[split.prefill.shape], decode=decodes[split.decode.shape]) for split in found
    ]


def _smallest(judge: SplitJudge, guess: Split, best: SplitFinalist | None) -> SplitFinalist | None:
    """The fewest instances of two layouts that meet the targets, or some that do not.

    With a `best` so far they have no more devices than that. None if the first guess has.
    """
    most = most_devices(judge.kind, link_of(judge.transfer, judge.kind))
    most = most if best is None else best.split.num_devices
    if guess.num_devices > most:
        return None
    alone = judge.alone(guess)
    if alone.missed is not None:
        return alone
    found = judge.at(guess, guess.match.prefills, guess.match.decodes) or alone
    while found.missed is not None or found.is_alone:
        more = _larger(judge, found, most)
        if more is None:
            return found
        found = more
    for role in (0, 1):
        found = _with_fewer(judge, found, role)
    return found


def _larger(judge: SplitJudge, found: SplitFinalist, most: int) -> SplitFinalist | None:
    """Pools with a quarter more instances of one kind: prefill instances for TTFT, if they help. None if none helps."""
    match = found.split.match
    more = (match.prefills + max(1, match.prefills // 4), match.decodes)
    others = (match.prefills, match.decodes + max(1, match.decodes // 4))
    best: SplitFinalist | None = None
    for numbers in (others, more) if found.judged.worst_metric == "tpot" else (more, others):
        one = judge.at(found.split, *numbers) if found.split.devices_of(*numbers) <= most else None
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
        fewer = judge.at(found.split, *numbers) if numbers[role] else None
        if fewer is not None and fewer.missed is None:
            found = fewer
        else:
            step //= 2
    return found


def _why_next(judge: SplitJudge, best: SplitFinalist, others: list[SplitFinalist]) -> str | None:
    """Why the next pair of layouts lost."""
    if not others:
        return None
    second, devices = others[0], others[0].split.num_devices
    if second.missed is not None:
        return f"{second}: {second.missed}"
    if devices > best.split.num_devices:
        return f"{second}: {more_devices(judge.kind, devices)}"
    shares = f"{second.judged.worst:.0%}", f"{best.judged.worst:.0%}"
    if shares[0] == shares[1]:
        return f"{second}: as many devices, and as close to its targets"
    return f"{second}: as many devices, but {shares[0]} of a target instead of {shares[1]}"


def _devices_then_worst(one: SplitFinalist) -> tuple[int, float]:
    return one.split.num_devices, one.judged.worst
