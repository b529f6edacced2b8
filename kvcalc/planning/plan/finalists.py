"""Layouts that hold the requests are simulated, and the smallest one that meets its targets wins.

The short form says which layouts hold the requests, and in which order to try them. Requests one after the other are
simulated first: if these are too slow, no number of replicas or instances helps. More replicas are not slower, so
doubled steps and bisection find the fewest. A layout that can only lose to the best so far is simulated once, on as
many devices. With two pools, instances are added to the one that brings the times closer to their targets,
and taken away again as long as all targets are met.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import cast

from kvcalc.errors import UsageError
from kvcalc.planning.plan.binding import too_slow_alone
from kvcalc.planning.plan.disaggregated.platforms import PoolPlatforms
from kvcalc.planning.plan.disaggregated.search import Instances, find_splits
from kvcalc.planning.plan.disaggregated.split import TwoPools
from kvcalc.planning.plan.judge import Finalist, Judge, L, Layout
from kvcalc.planning.plan.replicas import (
    WORTH_IT,
    OnePool,
    as_many_devices,
    devices_then_speed,
    find_layouts,
    smallest,
)
from kvcalc.planning.plan.traffic import Platform, Traffic, Trouble
from kvcalc.search import smallest_where

# The layouts of one kind of device that are simulated: at least as many as the default search tries at once.
DEFAULT_FINALISTS = 8
_RANK = attrgetter("rank")
# More devices help if the time that is furthest beyond its target becomes shorter than this share of it.
_HELPS = 0.95


def find_simulated(
    judge: Judge, candidates: Iterable[tuple[Sequence[L], Trouble | None]],
    smallest_of: Callable[[Judge, L, Finalist | None], Finalist | None],
    larger_of: Callable[[Judge, Finalist], Finalist | None],
) -> L | Trouble:  # fmt: skip
    """The layout that counts the least and meets all targets in the simulation, or why the closest one does not.

    `candidates` are lists of layouts, each with the reason why others are not in it. A list is tried only if no layout
    of earlier lists meets the targets. `smallest_of` finds the smallest numbers of a layout that meet them, or some
    that do not. With a best layout so far they count no more than that, and None is a layout that is larger. If two
    layouts count the same, the one further below its targets wins. The winner must meet the targets in more runs
    (`Judge.confirm`); if it does not, `larger_of` it are the next larger numbers, None if there are none. Raises
    UsageError (exit 2) if none can be simulated.
    """
    trouble: Trouble | None = None
    too_slow: Trouble | None = None
    for layouts, reason in candidates:
        trouble = reason or trouble
        refusal: UsageError | None = None
        met: list[Finalist] = []
        missed: list[Finalist] = []
        limited: list[Finalist] = []  # missed with as many devices as the best layout then had
        larger: list[L] = []
        left = list(layouts)
        while left:
            for layout in left:
                best = min(met, key=_RANK, default=None)
                try:
                    tried = smallest_of(judge, layout, best)
                except UsageError as error:  # a layout that is not simulated, such as DP ranks
                    refusal = error
                    continue
                if tried is None:
                    larger.append(layout)
                else:
                    (met if tried.missed is None else missed).append(tried)
                    if tried.missed is not None and best is not None and not tried.is_alone:
                        limited.append(tried)
            left = []
            while met and (first := min(met, key=_RANK)) is not (confirmed := judge.confirm(first)):
                met.remove(first)
                if confirmed.missed is None:
                    met.append(confirmed)
                    continue
                more = larger_of(judge, confirmed)
                # The numbers that met the targets were lucky, so the next ones may miss them as well.
                most = min((other.layout.weight for other in met), default=2 * first.layout.weight)
                while more is not None and more.missed is not None and more.layout.weight < most:
                    more = larger_of(judge, more)
                if more is None or more.missed is not None:
                    missed.append(confirmed)
                else:
                    met.append(more)
                # The layouts that were larger than this one may be smaller than the next one. Those that missed with as
                # many devices may need fewer than it.
                left = larger + [finalist.layout for finalist in limited]
                missed = [finalist for finalist in missed if finalist not in limited]
                larger, limited = [], []
                if left:
                    break
        if met:
            best, *others = sorted(met, key=_RANK)
            why = _why_next(best, others, missed, larger)
            won: L = best.layout._replace(next_layout=why or (None if trouble is None else trouble.reason))
            return won
        if missed:
            closest = min(reversed(missed), key=lambda finalist: finalist.judged.worst)
            hint = "--confidence 50 uses the point estimate" if closest.nearly else None
            too_slow = Trouble(f"{closest}: {closest.missed}", hint)
        elif refusal is not None:
            raise refusal
    return too_slow or trouble or Trouble("the model cannot be split over these devices")


def find_replicas(traffic: Traffic, kind: Platform, judge: Judge, num_simulated: int | None) -> OnePool | Trouble:
    """The fewest replicas whose simulation meets the targets. At most `num_simulated` layouts are simulated."""
    traffic = traffic._replace(most_busy=traffic.targets.most_busy)
    most = num_simulated or DEFAULT_FINALISTS
    winner = find_simulated(judge, _candidates(traffic, kind, most), _fewest_replicas, _one_more)
    if isinstance(winner, Trouble) and traffic.targets.limits and not judge.describe():
        # No layout was simulated, because all need too many devices. With more, they may still be too slow.
        return too_slow_alone(traffic, kind) or winner
    return winner


def _candidates(traffic: Traffic, kind: Platform, most: int) -> Iterator[tuple[list[OnePool], Trouble | None]]:
    """The layouts to simulate, in the order of what the short form says about their means, and why others are not.

    All layouts that hold the requests are candidates: a simulated percentile may be below the mean of the short form.
    Only of layouts with DP ranks and of all layouts together, which are many, those are left out whose mean misses a
    target.
    """
    if traffic.has_many_layouts(kind.engine):
        for listed in find_layouts(traffic, kind, most):
            if listed.layouts:
                yield listed.layouts[:most], listed.trouble
                return
    for listed in find_layouts(traffic.without_limits(), kind, most):
        layouts = [_first_guess(traffic, layout) for layout in listed.layouts]
        layouts.sort(key=devices_then_speed)
        yield layouts[:most], listed.trouble


def _first_guess(traffic: Traffic, layout: OnePool) -> OnePool:
    """The number of replicas to simulate first: that of the short form, or without limits if it has none."""
    guess = smallest(traffic, layout.kind, layout.shape)
    return guess if isinstance(guess, OnePool) else layout


def _fewest_replicas(judge: Judge, layout: OnePool, best: Finalist | None) -> Finalist | None:
    """The layout with the fewest replicas that meet the targets, or one that does not.

    With a `best` so far it has no more devices than that, and None is a layout of which one replica has more.
    """
    most = layout.most_replicas(layout.kind.max_devices if best is None else best.layout.num_devices)
    # A run in which fewer keep up may be too short for a queue that grows slowly. A trace ends.
    least = 1 if judge.simulation.trace and judge.targets.limits else layout.least_replicas
    if not most or (best is not None and most < least):
        return None

    def at(replicas: int) -> Finalist:
        return cast(Finalist, judge.at(layout, (replicas,)))  # one pool has no endless queue

    def misses(replicas: int) -> bool:
        return replicas < min(least, most) or at(replicas).missed is not None

    # With a best layout, one simulation usually decides. Without, doubling would go on to the last device.
    first = judge.alone(layout) if best is None else at(most)
    if first.missed is not None:
        return first
    high, low, step = min(layout.replicas, most), 0, 1
    half: Finalist | None = None
    while misses(high):
        if high == most:
            return at(high)
        if high >= least and (half is None or high >= 2 * half.layout.replicas):
            whole = at(high)
            # Behind a router that spreads what a cache would find, no number of replicas may help.
            if half is not None and not half.judged.is_stuck and whole.judged.worst > _HELPS * half.judged.worst:
                return whole
            half = whole
        low, high, step = high, min(high + step, most), 2 * step
    step = 1
    while not low and high > 1:
        fewer = max(high - step, 1)
        low, high, step = (fewer, high, step) if misses(fewer) else (0, fewer, 2 * step)
    return at(smallest_where(lambda replicas: not misses(replicas), low + 1, high))


def _one_more(judge: Judge, finalist: Finalist) -> Finalist | None:
    """The layout with one more replica. None if there are too few devices."""
    layout: OnePool = finalist.layout
    more = layout.replicas + 1
    return judge.at(layout, (more,)) if more <= layout.most_replicas(layout.kind.max_devices) else None


def _why_next(best: Finalist, others: list[Finalist], missed: list[Finalist], larger: Sequence[Layout]) -> str | None:
    """Why the next layout lost: one that meets the targets, else one that does not, else one that was not simulated."""
    if others:
        second = others[0]
        if not best.judged.worst:
            speeds = (finalist.judged.simulated.tokens_per_second for finalist in (second, best))
            return f"{second}: {second.layout.why_more(best.layout) or as_many_devices(*speeds)}"
        shares = second.judged.worst, best.judged.worst
        used = f"less headroom ({shares[0]:.0%} of the limit, not {shares[1]:.0%})"
        less = f"same number of devices, {'same headroom' if shares[0] < WORTH_IT * shares[1] else used}"
        return f"{second}: {second.layout.why_more(best.layout) or less}"
    if missed:
        # Pairs of layouts are in the order in which the short form prefers them.
        second = min(missed, key=_RANK) if isinstance(best.layout, OnePool) else missed[0]
        return f"{second}: {second.missed}"
    if not larger:
        return None
    second_layout = larger[0]
    if isinstance(second_layout, OnePool):
        second_layout = second_layout._replace(replicas=second_layout.least_replicas)
    return f"{second_layout}: {why}" if (why := second_layout.why_more(best.layout)) else None


# The pairs of layouts of one row that are simulated. The short form knows their order well.
DEFAULT_PAIRS = 6


def find_pools(
    known: Instances, joined: Sequence[PoolPlatforms], judge: Judge, num_simulated: int | None
) -> TwoPools | Trouble:
    """The smallest pools whose simulation meets the targets. At most `num_simulated` pairs of layouts are simulated.

    Raises what `find_splits` raises, and UsageError (exit 2) if no pair can be simulated.
    """
    is_trace = judge.simulation.trace is not None
    pairs = find_splits(known, joined, judge.targets, num_simulated or DEFAULT_PAIRS, is_trace=is_trace)
    candidates = ([], pairs) if isinstance(pairs, Trouble) else (pairs, None)
    return find_simulated(judge, [candidates], _fewest_instances, _more_instances)


def _fewest_instances(judge: Judge, guess: TwoPools, best: Finalist | None) -> Finalist | None:
    """The fewest instances of two layouts that meet the targets, or some that do not.

    With a `best` so far they count no more than that. None if the first guess does.
    """
    most = None if best is None else best.layout.weight
    if not guess.allows(guess.numbers, most):
        return None
    # All requests of a trace alone take as long to simulate as together, and usually need not be.
    finalist = None if judge.simulation.trace is None else judge.at(guess, guess.numbers)
    if finalist is None or finalist.missed is not None:
        alone = judge.alone(guess)
        if alone.missed is not None:
            return alone
        finalist = judge.at(guess, guess.numbers) or alone
    while finalist.missed is not None or finalist.is_alone:
        more = _larger(judge, guess, finalist, most)
        if more is None:
            return finalist
        finalist = more
    for role in (0, 1):
        finalist = _with_fewer(judge, guess, finalist, role)
    return finalist


def _larger(judge: Judge, guess: TwoPools, finalist: Finalist, most: float | None) -> Finalist | None:
    """Pools with a quarter more instances of one kind: prefill instances for TTFT, if they help. None if none helps.

    If pools do not keep up, it is the kind that the short form calls busier.
    """
    prefills, decodes = finalist.layout.numbers
    more, others = (prefills + max(1, prefills // 4), decodes), (prefills, decodes + max(1, decodes // 4))
    best: Finalist | None = None
    decodes_first = finalist.judged.worst_metric == "tpot"
    if finalist.judged.is_stuck:
        of_prefills, of_decodes = guess.pair.capacities(prefills, decodes)
        decodes_first = of_decodes < of_prefills
    helped = _HELPS * finalist.judged.worst
    for numbers in (others, more) if decodes_first else (more, others):
        larger = judge.at(guess, numbers) if guess.allows(numbers, most) else None
        if larger is None:
            continue
        if larger.missed is None:
            # The other kind may do with less.
            if best is None or best.missed is not None or larger.layout.weight < best.layout.weight:
                best, most = larger, larger.layout.weight
        elif best is None or (best.missed is not None and larger.judged.worst < helped <= best.judged.worst):
            best = larger
    return best


def _more_instances(judge: Judge, finalist: Finalist) -> Finalist | None:
    """Pools with more instances of one kind. If they meet the targets, the other kind may need fewer."""
    more = _larger(judge, finalist.layout, finalist, None)
    if more is None or more.missed is not None:
        return more
    same = int(more.layout.numbers[1] == finalist.layout.numbers[1])
    return _with_fewer(judge, finalist.layout, more, same)


def _with_fewer(judge: Judge, guess: TwoPools, finalist: Finalist, role: int) -> Finalist:
    """The fewest instances in one pool that still meet all targets. More are not slower."""
    step = max(1, finalist.layout.numbers[role] // 4)
    while step:
        numbers = [*finalist.layout.numbers]
        numbers[role] -= step
        fewer = judge.at(guess, tuple(numbers)) if numbers[role] > 0 else None
        if fewer is not None and fewer.missed is None:
            finalist = fewer
        else:
            step //= 2
    return finalist
