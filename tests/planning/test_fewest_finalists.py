"""The searches for the fewest simulated replicas and instances, with a judge whose answers are known."""

from __future__ import annotations

from types import SimpleNamespace as Fake
from typing import Any

import pytest

import kvcalc
from kvcalc.errors import UsageError
from kvcalc.planning.plan.finalists import (
    _fewest_instances,
    _fewest_replicas,
    _more_instances,
    _one_more,
    find_simulated,
)
from kvcalc.planning.plan.replicas import OnePool
from kvcalc.planning.plan.traffic import Trouble


class KnownJudge:
    """Layouts meet the targets with at least `needed` replicas, or instances of each pool, and with a quick request."""

    def __init__(
        self, needed: tuple[int, ...], *, alone_misses: bool = False, has_trace: bool = False, endless: int = 0
    ) -> None:  # fmt: skip
        self.needed, self.alone_misses, self.simulated = needed, alone_misses, list[tuple[int, ...]]()
        self.endless = endless  # so many instances have an endless queue in the short form
        self.simulation = Fake(trace="a trace" if has_trace else None)
        self.targets = Fake(limits=("a limit",))

    def alone(self, guess: Any) -> Any:
        judged = Fake(worst=9.0, worst_metric="ttft", is_stuck=False)
        missed = "too slow" if self.alone_misses else None
        return Fake(
            missed=missed, is_alone=True, layout=Fake(numbers=guess.numbers, weight=sum(guess.numbers)), judged=judged
        )

    def at(self, guess: Any, numbers: tuple[int, ...]) -> Any:
        assert min(numbers) > 0
        if sum(numbers) <= self.endless:
            return None
        self.simulated.append(numbers)
        shares = [needs / has for needs, has in zip(self.needed, numbers)]
        metric = ("ttft", "tpot")[shares.index(max(shares))]
        judged = Fake(worst=max(shares), worst_metric=metric, is_stuck=False)
        missed = "late" if max(shares) > 1 else None
        layout = Fake(numbers=numbers, weight=sum(numbers), replicas=numbers[0])
        return Fake(missed=missed, is_alone=False, layout=layout, judged=judged)


def option(
    guess: int, *, devices: int = 2, max_devices: int = 64, clients: int | None = None, least: int = 1
) -> Any:  # fmt: skip
    found = Fake(
        kind=Fake(max_devices=max_devices), shape=Fake(num_devices=devices), replicas=guess, numbers=(guess,),
        traffic=Fake(targets=Fake(clients=clients), spare_replicas=0), least_replicas=least,
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


def test_replicas_that_do_not_help_are_not_doubled_until_there_are_no_more_devices() -> None:
    class Spread(KnownJudge):
        """More than four replicas lose what a cache would find."""

        def at(self, guess: Any, numbers: tuple[int, ...]) -> Any:
            found = super().at(guess, numbers)
            found.judged.worst, found.missed = max(found.judged.worst, 3.0), "late"
            return found

    judge: Any = Spread((4,))
    found: Any = _fewest_replicas(judge, option(2, max_devices=2000), None)
    assert found.missed == "late"
    assert max(judge.simulated)[0] <= 32


def test_a_request_that_is_too_slow_alone_is_not_helped_by_replicas() -> None:
    judge: Any = KnownJudge((2,), alone_misses=True)
    found: Any = _fewest_replicas(judge, option(4), None)
    assert (found.missed, judge.simulated) == ("too slow", [])


def test_no_layout_is_taken_that_the_short_form_calls_overloaded() -> None:
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

    return Fake(numbers=numbers, allows=allows, weight=sum(numbers))


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


def test_requests_alone_of_a_trace_are_simulated_only_if_the_first_pools_miss_a_target() -> None:
    for guess, found in (((2, 2), ((2, 2), None)), ((1, 2), ((1, 2), "too slow"))):
        judge: Any = KnownJudge((2, 2), alone_misses=True, has_trace=True)
        one: Any = _fewest_instances(judge, split(guess), None)
        assert (one.layout.numbers, one.missed) == found


def test_pools_with_an_endless_queue_are_made_larger_until_they_serve() -> None:
    judge: Any = KnownJudge((2, 2), endless=6)
    found: Any = _fewest_instances(judge, split((3, 3)), None)
    assert (found.layout.numbers, found.is_alone) == ((4, 3), False)


@pytest.mark.parametrize(
    ("needed", "numbers", "answer"),
    [
        ((3, 3), (2, 9), ((3, 3), None)),  # one prefill instance more, and then the fewest decode instances
        ((3, 3), (9, 2), ((3, 3), None)),
        ((5, 9), (2, 9), ((3, 9), "late")),  # no smaller pools, if the larger ones still miss
    ],
)
def test_a_winner_that_is_not_confirmed_is_larger_in_one_pool_and_smaller_in_the_other(
    needed: tuple[int, int], numbers: tuple[int, int], answer: tuple[tuple[int, int], str | None]
) -> None:
    metric = "ttft" if numbers[0] < needed[0] else "tpot"
    unlucky: Any = Fake(layout=split(numbers), judged=Fake(worst=1.5, worst_metric=metric, is_stuck=False))
    found: Any = _more_instances(KnownJudge(needed), unlucky)  # type: ignore[arg-type]
    assert (found.layout.numbers, found.missed) == answer
    unlucky.layout.allows = lambda *_: False
    assert _more_instances(KnownJudge(needed), unlucky) is None  # type: ignore[arg-type]


def test_a_winner_that_is_not_confirmed_has_one_replica_more_if_there_are_devices() -> None:
    for replicas, more in ((30, (31,)), (31, (32,)), (32, None)):
        found: Any = _one_more(KnownJudge((1,)), Fake(layout=option(replicas)))  # type: ignore[arg-type]
        assert (found and found.layout.numbers) == more


class Confirming:
    """A judge that confirms no winner with fewer devices than `least`."""

    def __init__(self, least: int) -> None:
        self.least = least

    def confirm(self, found: Any) -> Any:
        return found if found.layout.num_devices >= self.least else finalist(found.layout, "unlucky")


def finalist(layout: Any, missed: str | None) -> Any:
    return Tried(
        missed=missed,
        layout=layout,
        rank=(layout.num_devices, 0.5),
        judged=Fake(worst=0.5),
        nearly=False,
        is_alone=False,
    )


class Tried(Fake):
    layout: Any

    def __str__(self) -> str:
        return str(self.layout)


class Sized(Fake):
    """A layout of `sizes`, the numbers of devices that it can have."""

    num_devices: int
    sizes: list[int]

    @property
    def weight(self) -> int:
        return self.num_devices

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


def test_a_layout_that_missed_with_as_many_devices_is_tried_with_more_if_the_winner_is_not_confirmed() -> None:
    """With 4 devices, the first layout is unlucky and needs 8 then. The second one misses with 4, and meets with 6."""

    def smallest_of(judge: Any, layout: Any, best: Any) -> Any:
        most = None if best is None else best.layout.num_devices
        if layout.sizes == [4, 8]:
            return finalist(layout.at(4), None)
        return finalist(layout.at(4), "late") if most == 4 else finalist(layout.at(6), None)

    def larger_of(judge: Any, found: Any) -> Any:
        return finalist(found.layout.at(8), None)

    layouts: Any = [Sized(num_devices=0, sizes=sizes) for sizes in ([4, 8], [4, 6])]
    found: Any = find_simulated(Confirming(6), [(layouts, None)], smallest_of, larger_of)  # type: ignore[arg-type]
    assert found.num_devices == 6


def test_a_layout_whose_next_numbers_miss_too_is_tried_until_others_are_as_small() -> None:
    """With 4 devices, the first layout was lucky; with 5 and 6 it misses. The other one needs `others`."""

    def smallest_of(judge: Any, layout: Any, best: Any) -> Any:
        return finalist(layout.at(4), None)

    def larger_of(judge: Any, found: Any) -> Any:
        larger = found.layout.at(found.layout.num_devices + 1)
        return finalist(larger, "late" if larger.num_devices < 7 else None)

    for others, devices in ((9, 7), (6, 6)):
        layouts: Any = [Sized(num_devices=0, sizes=sizes) for sizes in ([4, 5, 6, 7], [others])]
        found: Any = find_simulated(Confirming(6), [(layouts, None)], smallest_of, larger_of)  # type: ignore[arg-type]
        assert found.num_devices == devices


def test_each_layout_is_compared_with_the_smallest_so_far() -> None:
    compared: list[int | None] = []

    def smallest_of(judge: Any, layout: Any, best: Any) -> Any:
        compared.append(best and best.layout.num_devices)
        return finalist(layout, None)

    layouts: Any = [Sized(num_devices=number, sizes=[]) for number in (12, 8, 10)]
    find_simulated(Confirming(0), [(layouts, None)], smallest_of, lambda *_: None)  # type: ignore[arg-type]
    assert compared == [None, 12, 8]


def test_the_reason_is_that_of_the_last_list_in_which_something_was_tried() -> None:
    """A list may say why nothing is in it, and a layout that was simulated why it lost."""

    def found(*lists: tuple[list[str], str | None], refused: tuple[str, ...] = ()) -> Any:
        def smallest_of(judge: Any, layout: Any, best: Any) -> Any:
            if layout.name in refused:
                raise UsageError(layout.name)
            return finalist(layout, None if layout.name == "meets" else "late")

        candidates: Any = [
            ([Named(name=name, num_devices=1) for name in names], reason and Trouble(reason)) for names, reason in lists
        ]
        return find_simulated(Confirming(0), candidates, smallest_of, lambda *_: None)  # type: ignore[arg-type]

    assert found().reason == "the model cannot be split over these devices"
    assert found(([], "a"), ([], None)).reason == "a"
    assert found(([], "a"), ([], "b")).reason == "b"
    assert found((["x", "y", "z"], "a")).reason == "z: late"
    assert found((["x"], "a"), ([], None)).reason == "x: late"
    assert found((["x"], "a"), (["meets"], None)).name == "meets"
    # What is not simulated does not count beside what is.
    assert found((["x", "y"], None), refused=("y",)).reason == "x: late"
    assert found((["y", "meets"], None), refused=("y",)).name == "meets"
    with pytest.raises(UsageError, match="y"):
        found((["y"], "a"), (["meets"], None), refused=("y",))


class Named(Sized):
    name: str

    def __str__(self) -> str:
        return self.name


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
