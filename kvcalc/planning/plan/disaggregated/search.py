"""The smallest pair of pools that serves the traffic, on one kind of device or on two.

The layouts of prefill and of decode instances are judged separately, each once: their memory and their times. The
numbers of a pair of them are plain arithmetic (`rates`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from math import inf

from kvcalc.errors import KvcalcError, LayoutError
from kvcalc.model.layout import Layout
from kvcalc.planning.plan.disaggregated.instances import Instance, decode_instance, prefill_instance, transfer_bytes
from kvcalc.planning.plan.disaggregated.platforms import Link, PoolPlatforms, cache_of
from kvcalc.planning.plan.disaggregated.rates import Load, Pair, Times
from kvcalc.planning.plan.disaggregated.split import TwoPools, judged_load, load_of, times_between
from kvcalc.planning.plan.replicas import shapes_of
from kvcalc.planning.plan.targets import Targets
from kvcalc.planning.plan.traffic import Platform, Traffic, Trouble, seconds_text


class Instances:
    """The instances of a plan that can run. Those of each kind of device and engine are computed once."""

    def __init__(self, traffic: Traffic) -> None:
        self.traffic = traffic
        self._found: dict[tuple[object, ...], tuple[list[Instance], Trouble | None]] = {}

    def prefills(self, kind: Platform) -> tuple[list[Instance], Trouble | None]:
        """The prefill instances of all layouts that can run, and why the largest of the others cannot."""
        return self._of(self.traffic, kind, prefill_instance, None)

    def decodes(self, kind: Platform, targets: Targets | None = None) -> tuple[list[Instance], Trouble | None]:
        """The decode instances, like `prefills`, within other targets than those of the traffic if there are any."""
        targets = targets or self.traffic.targets
        return self._of(self.traffic._replace(targets=targets), kind, decode_instance, targets.max_tpot_seconds)

    def _of(
        self, traffic: Traffic, kind: Platform, make: Callable[[Traffic, Platform, Layout], Instance | Trouble],
        longest: float | None,
    ) -> tuple[list[Instance], Trouble | None]:  # fmt: skip
        key = kind.gpu.name, kind.engine, kind.max_devices, make, longest
        if key not in self._found:
            self._found[key] = _instances(traffic, kind, make)
        return self._found[key]


def find_splits(
    known: Instances, joined: Sequence[PoolPlatforms], targets: Targets, keep: int = 2
) -> list[TwoPools] | Trouble:  # fmt: skip
    """The best `keep` pairs of layouts with their smallest pools, the best first, or why there are none.

    The load and the limits are those of `targets`. `joined` are the kinds of device to try. What counts is what
    `PoolPlatforms.weights` say: the cost or the number of devices. Raises what makes the instances impossible if both
    pools are on one kind of device.
    """
    if known.traffic.refusal is not None:
        return known.traffic.refusal
    found: list[TwoPools] = []
    for kinds in joined:
        for bound, prefill, decode in candidates_of(known, kinds, targets):
            worst = found[-1].weight if len(found) >= keep else inf
            if bound > worst * (1 + 1e-9):
                break
            pair, moved = pair_of(prefill, decode, kinds.link)
            load = load_of(targets, pair)
            judged = judged_load(load, prefill, decode)
            match = pair.fewest(judged, find_judge(targets, prefill, decode), kinds.most)
            if match is not None:
                match = match._replace(times=pair.times(match.prefills, match.decodes, load) or match.times)
                found.append(TwoPools(prefill, decode, kinds, moved, match))
                found.sort(key=_rank)
                del found[keep:]
    return found or _why_none(known, joined, targets)


def candidates_of(known: Instances, kinds: PoolPlatforms, targets: Targets) -> list[tuple[float, Instance, Instance]]:
    """All pairs of instances whose caches are alike, with a lower bound of their cost, the lowest bound first."""
    try:
        prefills = known.prefills(kinds.prefill)[0]
        decodes = known.decodes(kinds.decode, targets)[0] if prefills else []
    except KvcalcError:
        if kinds.is_mixed:  # the rows of each kind say why
            return []
        raise
    rate, clients = targets.requests_per_second, None if targets.think_seconds else targets.clients
    of_prefill, of_decode = list[tuple[float, Instance]](), list[tuple[float, Instance]]()
    for prefill in prefills:
        needed = 1.0 if rate is None else max(1.0, rate * prefill.rates.interval(0.0))
        of_prefill.append((kinds.weights[0] * prefill.shape.num_devices * needed, prefill))
    for decode in decodes:
        largest = decode.rates.largest(0.0)
        if largest:
            needed = (clients or 0) / largest if rate is None else rate / decode.rates.rate(largest)
            of_decode.append((kinds.weights[1] * decode.shape.num_devices * max(1.0, needed), decode))
    return sorted(
        (
            (bound + other, prefill, decode)
            for (bound, prefill), (other, decode) in product(of_prefill, of_decode)
            if not kinds.is_mixed or cache_of(prefill.case) == cache_of(decode.case)
        ),
        key=lambda row: row[0],
    )


def pair_of(prefill: Instance, decode: Instance, link: Link) -> tuple[Pair, int]:
    """The times of two instances, and the bytes that the busiest device sends or receives for a request."""
    moved = transfer_bytes(prefill.sent, decode.sent)
    return Pair(prefill.rates, decode.rates, moved / link.bytes_per_second), moved


def _instances(
    traffic: Traffic, kind: Platform, make: Callable[[Traffic, Platform, Layout], Instance | Trouble]
) -> tuple[list[Instance], Trouble | None]:
    """The instances of all layouts that can run, and why the largest of the others cannot."""
    found, trouble, refused = [], None, None
    for shape in shapes_of(traffic, kind):
        try:
            one = make(traffic, kind, shape)
        except LayoutError as error:
            refused = refused or Trouble(error.message, error.hint)
            continue
        except KvcalcError:
            # DP ranks that nobody asked for.
            if shape.data_parallel_size > traffic.question.data_parallel_size:
                continue
            raise
        if isinstance(one, Trouble):
            trouble = one
        else:
            found.append(one)
    return found, trouble or (None if found else refused)


def _named(role: str, trouble: Trouble | None) -> Trouble:
    if trouble is None:
        return Trouble(f"the model cannot be split over these devices for {role} instances")
    return trouble._replace(reason=f"{role} instance: {trouble.reason}")


def find_judge(targets: Targets, prefill: Instance, decode: Instance) -> Callable[[Times], bool]:
    """Whether the judged TTFT and the judged time of a whole request meet their targets."""
    first, whole = targets.max_ttft_seconds, targets.max_e2e_seconds

    def meets(times: Times) -> bool:
        ttft = times_between("ttft", prefill, decode, times)[2]
        if first is not None and ttft > first:
            return False
        if whole is None:
            return True
        tpot = times_between("tpot", prefill, decode, times)[2]
        return bool(ttft + (decode.rates.output_tokens - 1) * tpot <= whole)

    return (lambda _: True) if first is None and whole is None else meets


def _rank(split: TwoPools) -> tuple[float, float, float]:
    speed = split.tokens_per_second
    # On two kinds of device, rates that differ by less than a token per second count as equal.
    return split.weight, -round(speed) if split.kinds.is_mixed else -speed, split.match.times.ttft_seconds


def _why_none(known: Instances, joined: Sequence[PoolPlatforms], targets: Targets) -> Trouble:
    """Why no pair serves the load: its time to first token even for one request, or the number of devices."""
    if not joined or joined[0].is_mixed:
        return Trouble("no two pools on different kinds of device serve this load")
    (kinds,) = joined
    prefills, trouble = known.prefills(kinds.prefill)
    if not prefills:
        return _named("prefill", trouble)
    decodes, trouble = known.decodes(kinds.decode, targets)
    if not decodes:
        return _named("decode", trouble)
    longest, link, most = targets.max_ttft_seconds, kinds.link, kinds.most[2]
    if longest is not None:
        alone = [
            (pair_of(prefill, decode, link)[0].times(1, 1, Load(concurrency=1)), prefill, decode)
            for prefill, decode in product(prefills, decodes)
        ]
        fastest = [
            times_between("ttft", prefill, decode, times)[2] for times, prefill, decode in alone if times is not None
        ]
        if fastest and min(fastest) > longest:
            found = seconds_text(min(fastest))
            return Trouble(f"TTFT of one request is up to {found}, and the limit is {seconds_text(longest)}")
    if most < kinds.prefill.max_devices:
        return Trouble(
            f"two pools need more than the {most:,} devices that {link.name} connects",
            "--transfer-bandwidth infiniband-400g, or another network",
        )
    return Trouble(f"two pools need more than {most:,} devices", f"--max-gpus {2 * most}")
