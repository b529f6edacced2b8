"""Percentiles of a plan: layouts that hold the requests are simulated, and the smallest that meets its targets wins.

The closed form says which layouts hold the requests, and in which order to try them. Requests one after the other are
simulated first: if these are too slow, no number of replicas helps. More replicas are not slower, so doubled steps and
bisection find the fewest. A layout that can only lose to the best so far is simulated once, on as many devices.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvcalc.errors import UsageError
from kvcalc.planning.judge import Finalist, Judge
from kvcalc.planning.replicas import Option, find_options, more_devices, smallest, why_not, with_replicas
from kvcalc.planning.shapes import Shape
from kvcalc.planning.targets import Targets
from kvcalc.planning.traffic import Kind, Traffic, Trouble

# The layouts of one kind of device that are simulated: at least as many as the default search tries at once.
DEFAULT_FINALISTS = 8


def find_simulated(traffic: Traffic, judge: Judge, most: int = DEFAULT_FINALISTS) -> Option | Trouble:
    """The layout with the fewest devices that meets all targets in the simulation, or why the last one does not.

    At most `most` layouts are simulated. Of two with as many devices, the one further below its targets wins.
    """
    trouble: Trouble | None = None
    for options, reason in _candidates(traffic, judge.kind, most):
        trouble = reason or trouble
        refusal: UsageError | None = None
        met: list[Finalist] = []
        missed: list[Finalist] = []
        larger: list[Shape] = []
        for option in options[:most]:
            best = min(met, key=_devices_then_worst, default=None)
            try:
                found = _smallest_found(judge, option, best)
            except UsageError as error:  # a layout that is not simulated, such as attention replicas
                refusal = error
                continue
            if found is None:
                larger.append(option.shape)
            else:
                (met if found.missed is None else missed).append(found)
        if met:
            best, *others = sorted(met, key=_devices_then_worst)
            why = _why_next(judge.kind, best, others, missed, larger)
            return best.option._replace(next_layout=why or (None if trouble is None else trouble.reason))
        if missed:
            trouble = Trouble(f"{missed[-1]}: {missed[-1].missed}")
        elif refusal is not None:
            raise refusal
    return trouble or Trouble("the model cannot be split over these devices")


def simulate_best(traffic: Traffic, judge: Judge, most: int) -> Option | Trouble:
    """The layout of the closed form. It and the next ones, `most` in all, are simulated, which does not change it."""
    trouble: Trouble | None = None
    for found in find_options(traffic, judge.kind, max(most, 2)):
        trouble = found.trouble
        if found.options:
            first, *_ = [judge.at(option, option.replicas) for option in found.options[:most]]
            return first.option._replace(next_layout=why_not(judge.kind, *found))
    return trouble or Trouble("the model cannot be split over these devices")


def _candidates(traffic: Traffic, kind: Kind, most: int) -> Iterator[tuple[list[Option], Trouble | None]]:
    """The layouts to simulate, in the order of what the closed form says about their means, and why others are not.

    All layouts that hold the requests are candidates: a simulated percentile may be below the mean of the closed form.
    Only of all layouts together, which are hundreds, those are left out whose mean misses a target.
    """
    if traffic.all_layouts:
        for found in find_options(traffic, kind, most):
            if found.options:
                yield found.options, found.trouble
                return
    free = traffic._replace(targets=traffic.targets.without_limits())
    for found in find_options(free, kind, most):
        options = [_first_guess(traffic, free, kind, option) for option in found.options]
        options.sort(key=lambda one: (one.num_devices, -one.tokens_per_second))
        yield options, found.trouble


def _first_guess(traffic: Traffic, free: Traffic, kind: Kind, option: Option) -> Option:
    """The number of replicas to simulate first: that of the closed form, or as many as there can be if it has none."""
    shape = option.shape
    guess = smallest(traffic.of(shape), kind, shape)
    if isinstance(guess, Option):
        return guess
    most = _most_replicas(traffic.targets, shape, kind.max_devices)
    return option._replace(replicas=most, probe=with_replicas(free, kind, shape, most))


def _smallest_found(judge: Judge, option: Option, best: Finalist | None) -> Finalist | None:
    """The layout with the fewest replicas that meet the targets, or one that does not.

    With a `best` so far it has no more devices than that, and None is a layout of which one replica has more.
    """
    most = _most_replicas(judge.targets, option.shape, judge.kind.max_devices if best is None else best.num_devices)
    if not most:
        return None
    # With a best layout, one simulation usually decides. Without, doubling would go on to the last device.
    first = judge.at(option, None if best is None else most)
    return first if first.missed is not None else judge.fewest(option, most)


def _most_replicas(targets: Targets, shape: Shape, num_devices: int) -> int:
    """The most replicas on so many devices. In a closed loop, every replica has a client."""
    most = num_devices // shape.devices
    return most if targets.concurrency is None else min(most, targets.concurrency)


def _devices_then_worst(one: Finalist) -> tuple[int, float]:
    return one.num_devices, one.worst


def _why_next(
    kind: Kind, best: Finalist, others: list[Finalist], missed: list[Finalist], larger: list[Shape]
) -> str | None:
    """Why the next layout lost: one that meets the targets, else one that does not, else one that was not simulated."""
    if others:
        second = others[0]
        if second.num_devices > best.num_devices:
            return f"{second}: {more_devices(kind, second.num_devices)}"
        shares = f"{second.worst:.0%}", f"{best.worst:.0%}"
        if shares[0] == shares[1]:
            return f"{second}: as many devices, and as close to its targets"
        return f"{second}: as many devices, but {shares[0]} of a target instead of {shares[1]}"
    if missed:
        second = min(missed, key=_devices_then_worst)
        return f"{second}: {second.missed}"
    return f"{larger[0]}: {more_devices(kind, larger[0].devices)}" if larger else None
