"""The searches for the fewest simulated replicas and instances, with a judge whose answers are known."""

from __future__ import annotations

from types import SimpleNamespace as Fake
from typing import Any

import pytest

import kvcalc
from kvcalc.planning.plan.finalists import _fewest_instances, _fewest_replicas, find_simulated
from kvcalc.planning.plan.replicas import OnePool


class KnownJudge:
    """Layouts meet the targets with at least `needed` replicas, or instances of each pool, and with a quick request."""

    def __init__(self, needed: tuple[int, ...], *, alone_misses: bool = False, has_trace: bool = False) -> None:
        self.needed, self.alone_misses, self.simulated = needed, alone_misses, list[tuple[int, ...]]()
        self.simulation = Fake(trace="a trace" if has_trace else None)

    def alone(self, guess: Any) -> Any:
        judged = Fake(worst=9.0, worst_metric="ttft")
        missed = "too slow" if self.alone_misses else None
        return Fake(missed=missed, is_alone=True, layout=Fake(numbers=guess.numbers), judged=judged)

    def at(self, guess: Any, numbers: tuple[int, ...]) -> Any:
        self.simulated.append(numbers)
        assert min(numbers) > 0
        shares = [needs / has for needs, has in zip(self.needed, numbers)]
        judged = Fake(worst=max(shares), worst_metric=("ttft", "tpot")[shares.index(max(shares))])
        missed = "late" if max(shares) > 1 else None
        return Fake(missed=missed, is_alone=False, layout=Fake(numbers=numbers), judged=judged)


def option(
    guess: int, *, devices: int = 2, max_devices: int = 64, clients: int | None = None, least: int = 1
) -> Any:  # fmt: skip
    found = Fake(
        kind=Fake(max_devices=max_devices), shape=Fake(devices=devices), replicas=guess, numbers=(guess,),
        traffic=Fake(targets=Fake(concurrency=clients), spare_replicas=0), least_replicas=least,
    )  # fmt: skip
    found.most_replicas = lambda number: OnePool.most_replicas(found, number)  # type: ignore[arg-type]
    return found


@pytest.mark.parametrize("guess", [1, 2, 7, 20, 32, 50])
@pytest.mark.parametrize("needed", [1, 2, 6, 7, 8, 19, 31, 32])
def test_the_fewest_replicas_that_meet_the_targets_are_found(guess: int, needed: int) -> None:
    judge: Any = KnownJudge((needed,))
    found: Any = _fewest_replicas(judge, option(guess), None)
    assert (found.layout.numbers, found.missed) == ((needed,), None)
    assert max(judge.simulated)[0] <= 32  # on 64 devices


@pytest.mark.parametrize(
    ("guess", "needed", "simulated"),
    [(20, 20, [20, 19]), (20, 19, [20, 19, 17, 18]), (20, 17, [20, 19, 17, 13, 15, 16]), (20, 22, [20, 21, 23, 22])],
)
def test_few_numbers_of_replicas_are_simulated_beside_a_good_guess(
    guess: int, needed: int, simulated: list[int]
) -> None:
    judge: Any = KnownJudge((needed,))
    _fewest_replicas(judge, option(guess), None)
    assert list(dict.fromkeys(number for (number,) in judge.simulated)) == simulated


def test_where_no_number_of_replicas_is_enough_the_most_are_the_answer() -> None:
    judge: Any = KnownJudge((33,))
    found: Any = _fewest_replicas(judge, option(4), None)
    assert (found.layout.numbers, found.missed) == ((32,), "late")
    # In a closed loop, every replica has a client.
    found = _fewest_replicas(judge, option(4, clients=5), None)
    assert found.layout.numbers == (5,)


def test_a_request_that_is_too_slow_alone_is_not_helped_by_replicas() -> None:
    judge: Any = KnownJudge((2,), alone_misses=True)
    found: Any = _fewest_replicas(judge, option(4), None)
    assert (found.missed, judge.simulated) == ("too slow", [])


def test_no_layout_is_taken_that_the_closed_form_calls_overloaded() -> None:
    """A run in which it keeps up may be too short for a queue that grows slowly. A trace ends."""
    judge: Any = KnownJudge((3,))
    found: Any = _fewest_replicas(judge, option(4, least=5), None)
    assert (found.layout.numbers, found.missed) == ((5,), None)
    assert _fewest_replicas(judge, option(4, least=5), Fake(layout=Fake(num_devices=8))) is None  # type: ignore[arg-type]
    found = _fewest_replicas(KnownJudge((3,), has_trace=True), option(4, least=5), None)  # type: ignore[arg-type]
    assert found.layout.numbers == (3,)


@pytest.mark.parametrize(("most_devices", "answer"), [(1, None), (8, (4, "late")), (12, (5, None)), (64, (5, None))])
def test_no_more_devices_are_tried_than_the_best_layout_has(
    most_devices: int, answer: tuple[int, str | None] | None
) -> None:
    best: Any = Fake(layout=Fake(num_devices=most_devices))
    judge: Any = KnownJudge((5,))
    found: Any = _fewest_replicas(judge, option(3), best)
    assert (None if found is None else (found.layout.numbers[0], found.missed)) == answer
    assert all(2 * replicas <= most_devices for (replicas,) in judge.simulated)


def split(numbers: tuple[int, int], limit: int = 60) -> Any:
    def allows(wanted: tuple[int, int], most: float | None) -> bool:
        return sum(wanted) <= limit and (most is None or sum(wanted) <= most)

    return Fake(numbers=numbers, allows=allows)


@pytest.mark.parametrize("has_trace", [False, True])
@pytest.mark.parametrize("guess", [(1, 1), (3, 9), (20, 5), (16, 16)])
@pytest.mark.parametrize("needed", [(1, 1), (2, 7), (9, 3), (16, 12), (20, 16)])
def test_the_fewest_instances_of_both_pools_are_found(
    guess: tuple[int, int], needed: tuple[int, int], has_trace: bool
) -> None:
    judge: Any = KnownJudge(needed, has_trace=has_trace)
    found: Any = _fewest_instances(judge, split(guess), None)
    assert (found.layout.numbers, found.missed) == (needed, None)


def test_instances_are_not_beyond_the_limits_or_the_best_layout() -> None:
    judge: Any = KnownJudge((10, 10))
    best: Any = Fake(layout=Fake(weight=15))
    assert _fewest_instances(judge, split((8, 8)), best) is None
    assert judge.simulated == []
    found: Any = _fewest_instances(judge, split((4, 4)), best)
    assert found.missed == "late"
    assert max(map(sum, judge.simulated)) <= 15
    found = _fewest_instances(judge, split((4, 4), limit=20), None)
    assert (found.layout.numbers, found.missed) == ((10, 10), None)


def test_instances_do_not_help_a_request_that_is_too_slow_alone() -> None:
    judge: Any = KnownJudge((2, 2), alone_misses=True)
    found: Any = _fewest_instances(judge, split((3, 3)), None)
    assert (found.missed, judge.simulated) == ("too slow", [])


class Confirming:
    """A judge that confirms no winner with fewer devices than `least`."""

    def __init__(self, least: int) -> None:
        self.least = least

    def confirm(self, found: Any) -> Any:
        return found if found.layout.num_devices >= self.least else finalist(found.layout, "unlucky")


def finalist(layout: Any, missed: str | None) -> Any:
    return Fake(missed=missed, layout=layout, rank=(layout.num_devices, 0.5), judged=Fake(worst=0.5))


class Sized(Fake):
    """A layout of `sizes`, the numbers of devices that it can have."""

    num_devices: int
    sizes: list[int]

    def _replace(self, **changes: Any) -> Sized:
        return Sized(**{**vars(self), **changes})

    def why_more(self, other: Any) -> str:
        return f"{self.num_devices} devices instead of {other.num_devices}"

    def at(self, least: int) -> Sized | None:
        size = next((size for size in self.sizes if size >= least), None)
        return None if size is None else self._replace(num_devices=size)


@pytest.mark.parametrize(("least", "devices"), [(8, 8), (9, 12), (13, 16), (17, 18), (25, None)])
def test_a_layout_that_was_too_large_is_tried_if_the_winner_is_not_confirmed(least: int, devices: int | None) -> None:
    """8 devices, and the next larger number is 16. Others have 12 and 18."""

    def smallest_of(judge: Any, layout: Any, best: Any) -> Any:
        found = layout.at(0)
        return None if best is not None and found.num_devices > best.layout.num_devices else finalist(found, None)

    def larger_of(judge: Any, found: Any) -> Any:
        larger = found.layout.at(found.layout.num_devices + 1)
        return None if larger is None else finalist(larger, None)

    layouts = [Sized(num_devices=0, sizes=sizes) for sizes in ([8, 16], [18, 24], [12, 24])]
    judge: Any = Confirming(least)
    found: Any = find_simulated(judge, [(layouts, None)], smallest_of, larger_of)
    if devices is None:
        assert found.reason.endswith("unlucky")
    else:
        assert found.num_devices == devices


def test_the_finalists_are_the_last_that_misses_and_the_first_that_meets() -> None:
    """Of the replicas of a layout that were simulated, the table has the two next to the limit."""
    document = kvcalc.plan(
        "llama-3.1-8b", ["h100"], input_tokens=1024, output_tokens=100, requests_per_second=150.0, requests=400,
        ttft_percentile=99, max_ttft_seconds=0.2,
    )  # fmt: skip
    rows: Any = document["finalists"]
    alone = [row for row in rows if row["tensor_parallel_size"] == 1]
    missed, met = sorted(alone, key=lambda row: row["passes"])
    assert not missed["passes"]
    assert met["passes"]
    assert met["replicas"] - missed["replicas"] == 1
