"""The pairs of pools that may serve the traffic, on one kind of device or on two, and how large they are at first.

The layouts of prefill and of decode instances are judged separately, each once: their memory and their times. The
numbers of a pair of them are plain arithmetic (`rates`), and a simulation finds the ones that a plan prints
(`planning.plan.finalists`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product

from kvcalc.errors import KvcalcError, LayoutError
from kvcalc.model.layout import Layout
from kvcalc.planning.plan.disaggregated.instances import Instance, decode_instance, prefill_instance, transfer_bytes
from kvcalc.planning.plan.disaggregated.platforms import PoolPlatforms, cache_of
from kvcalc.planning.plan.disaggregated.split import TwoPools
from kvcalc.planning.plan.replicas import shapes_of
from kvcalc.planning.plan.targets import Targets
from kvcalc.planning.plan.traffic import Platform, Traffic, Trouble


class Instances:
    """The instances of a plan that can run. Those of each kind of device and engine are computed once."""

    def __init__(self, traffic: Traffic) -> None:
        self.traffic = traffic
        self._of_kinds: dict[tuple[object, ...], tuple[list[Instance], Trouble | None]] = {}

    def prefills(self, kind: Platform) -> tuple[list[Instance], Trouble | None]:
        """The prefill instances of all layouts that can run, and why the largest of the others cannot."""
        return self._of(kind, prefill_instance)

    def decodes(self, kind: Platform) -> tuple[list[Instance], Trouble | None]:
        """The decode instances, like `prefills`."""
        return self._of(kind, decode_instance)

    def _of(
        self, kind: Platform, make: Callable[[Traffic, Platform, Layout], Instance | Trouble]
    ) -> tuple[list[Instance], Trouble | None]:
        key = kind.gpu.name, kind.engine, kind.max_devices, make
        if key not in self._of_kinds:
            self._of_kinds[key] = _instances(self.traffic, kind, make)
        return self._of_kinds[key]


# How often the pools for the busiest minute of a trace are halved, if there are too few devices for them.
_HALVINGS = 6


def find_splits(
    known: Instances, joined: Sequence[PoolPlatforms], targets: Targets, keep: int = 2, *, is_trace: bool = False
) -> list[TwoPools] | Trouble:
    """The `keep` pairs of layouts to simulate with their first numbers, the best first, or why there are none.

    Those come first in which a request alone meets the limits, then those that count the least: `PoolPlatforms.weights`
    say what counts, the cost or the number of devices. `joined` are the kinds of device to try. Raises what makes the
    instances impossible if both pools are on one kind of device.
    """
    if known.traffic.refusal is not None:
        return known.traffic.refusal
    ranked: list[tuple[bool, float, float, TwoPools]] = []
    slow: list[Trouble] = []
    for kinds in joined:
        for pools in _pairs(known, kinds):
            trouble = pools.too_slow(targets)
            slow += [] if trouble is None else [trouble]
            guess = pools.guessed(targets)
            for _ in range(_HALVINGS if is_trace else 0):
                if guess.allows(guess.numbers, None):
                    break
                prefills, decodes = guess.numbers
                guess = guess._replace(numbers=(max(1, prefills // 2), max(1, decodes // 2)))
            if guess.allows(guess.numbers, None):
                ranked.append((trouble is not None, guess.weight, guess.pair.stay_seconds(1), guess))
    ranked.sort(key=lambda row: row[:3])
    return [pools for *_, pools in ranked[:keep]] or _why_none(known, joined, slow)


def _pairs(known: Instances, kinds: PoolPlatforms) -> Iterator[TwoPools]:
    """All pairs of instances whose caches are alike."""
    try:
        prefills = known.prefills(kinds.prefill)[0]
        decodes = known.decodes(kinds.decode)[0] if prefills else []
    except KvcalcError:
        if kinds.is_mixed:  # the rows of each kind say why
            return
        raise
    for prefill, decode in product(prefills, decodes):
        pools = TwoPools(prefill, decode, kinds, transfer_bytes(prefill.sent, decode.sent))
        is_alike = not kinds.is_mixed or cache_of(prefill.case) == cache_of(decode.case)
        if is_alike and decode.rates.largest(pools.pair.transfer):
            yield pools


def _instances(
    traffic: Traffic, kind: Platform, make: Callable[[Traffic, Platform, Layout], Instance | Trouble]
) -> tuple[list[Instance], Trouble | None]:
    """The instances of all layouts that can run, and why the largest of the others cannot."""
    instances, trouble, refused = [], None, None
    for shape in shapes_of(traffic, kind):
        try:
            instance = make(traffic, kind, shape)
        except LayoutError as error:
            refused = refused or Trouble(error.message, error.hint)
            continue
        except KvcalcError:
            # DP ranks that nobody asked for.
            if shape.data_parallel_size > traffic.question.data_parallel_size:
                continue
            raise
        if isinstance(instance, Trouble):
            trouble = instance
        else:
            instances.append(instance)
    return instances, trouble or (None if instances else refused)


def _named(role: str, trouble: Trouble | None) -> Trouble:
    if trouble is None:
        return Trouble(f"the model cannot be split over these devices for {role} instances")
    return trouble._replace(reason=f"{role} instance: {trouble.reason}")


def _why_none(known: Instances, joined: Sequence[PoolPlatforms], slow: Sequence[Trouble]) -> Trouble:
    """Why no pair serves the load: its memory, the times of one request, or the number of devices."""
    if not joined or joined[0].is_mixed:
        return Trouble("no two pools on different kinds of device serve this load")
    (kinds,) = joined
    prefills, trouble = known.prefills(kinds.prefill)
    if not prefills:
        return _named("prefill", trouble)
    decodes, trouble = known.decodes(kinds.decode)
    if not decodes:
        return _named("decode", trouble)
    if len(slow) == len(prefills) * len(decodes):
        return slow[-1]
    link, most = kinds.link, kinds.most[2]
    if most < kinds.prefill.max_devices:
        return Trouble(
            f"two pools need more than the {most:,} devices that {link.name} connects",
            "--transfer-bandwidth infiniband-400g, or another network",
        )
    return Trouble(f"two pools need more than {most:,} devices", f"--max-gpus {2 * most}")
