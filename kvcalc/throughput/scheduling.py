"""How long requests wait for the steps of an engine, in a steady load.

A step has room for `step_tokens` tokens. Most engines compute prompts in the steps of the decoding requests, in the
room that these leave; SGLang computes them in steps of their own, while the others stand still. A request arrives while
a step runs, and the next one has its prompt. If steps are scheduled while the one before them runs, it is the one after
the next.

If prompts are computed in the steps of decoding requests, a step computes the prompts that arrived during an earlier
step. If requests arrive at random, more arrive during a longer step S, so an average request finds

    r = E[S^2] / 2 E[S]     seconds of the step that runs, and as many before it arrived
    2 r x rate              others that arrived in the same step, whose prompts are computed with its own

Clients send their next request a fixed time after their answer, and as many answers end with a long step as with a
short one (`step_waits`). If more prompts arrive than a step has room for, they queue. If a step has room for less than
one, the queue is that of a server with constant times (M/D/1) and the load u = rate x (the full steps that a prompt
takes up). Fewer requests arrive during a full step than during as many seconds of others, by the factor c:

    queue = c u^2 / (2 (1 - u))

If it has room for K prompts, u is the part of this room that is used on average, and the queue about that of K such
servers (Sakasegawa 1977, halved as for one): u^sqrt(2 (K + 1)) / (2 (1 - u)).

With prompts in steps of their own, no answer ends while prompts are computed. Only those that ended shortly before
bring new requests then (`batches`). A step has room for most of these groups, and a request waits for half of the g
others that it has no room for: queue = u g / 2.

With N clients, a request finds the queue of the N - 1 others (Schweitzer 1979), and the rate is the one at which
N = rate x (the time of a request without the queue + its wait in that queue).
"""

from __future__ import annotations

from collections.abc import Callable
from math import exp, expm1, floor, sqrt

from kvcalc.records import NamedTuple

STEP_TOKENS = 8192
"""The tokens of one step by default in vLLM 0.33 and SGLang 0.5.23 on large devices, and in TensorRT-LLM 1.3."""

# The load of steps with room for several prompts is found by Newton's method.
_NEWTON, _SETTLED, _FULL = 6, 1e-3, 1 - 1e-6
# The rounds in which the steps of requests at random are found.
_ROUNDS = 4
# The load below which nothing queues.
_NEGLIGIBLE = 0.05
# A load is below 1: in a closed loop, no more requests arrive than are computed.
_MOST_LOAD = 0.95


class StepRules(NamedTuple):
    """How an engine's scheduler puts prompts into steps.

    `mixes` is whether prompts are computed in the steps of decoding requests, `divides` whether they are divided over
    steps, and `overlaps` whether a step is scheduled while the one before it runs. No other prompt joins a step with
    `enough_tokens` of prompts (0: any number). The scheduler looks for new requests after `every` decode steps.
    `in_turn` is whether DP ranks get requests in turn, and not the one with the least to do. `reads_beside` is whether
    the host reads requests while the prompts of others are computed.
    """

    step_tokens: int = STEP_TOKENS
    mixes: bool = True
    divides: bool = True
    overlaps: bool = False
    enough_tokens: int = 0
    every: int = 1
    in_turn: bool = False
    reads_beside: bool = False

    def prompts_of_step(self, tokens: float, decoding: float) -> float:
        """The prompts of `tokens` tokens that a step has room for, besides those of `decoding` requests."""
        room = max(1.0, self.step_tokens - decoding) if self.mixes else self.step_tokens
        if self.enough_tokens:
            # The last prompt that joins may be longer than what is left.
            room = min(room, self.enough_tokens + tokens / 2)
        return room / tokens if self.divides else float(max(1, int(room / tokens)))


class Waits(NamedTuple):
    """What a request waits for. `first`, `each`, `work` and `step` are seconds.

    - first: from its arrival until its prompt is computed, in the steps that also compute others'.
    - each: of the full steps that its prompt takes up.
    - most: the prompts that a full step has room for.
    - burst: `each`, if every DP rank has full steps, as when all clients start.
    - mates: the mean number of others in a request's group for which its step has no room, if no answer ends with it.
    - shares: the share, 0 to 1, of steps with several prompts in which they do not wait for each other. Then, a step
      takes `step` seconds without prompts, and each prompt adds `work`.
    - coming: the requests that arrive during a full step, relative to those that would if they came at random.
    - random: `first`, if requests arrive at random.
    """

    first: float
    each: float
    most: float
    burst: float
    mates: float = 0.0
    shares: float = 0.0
    work: float = 0.0
    step: float = 0.0
    coming: float = 1.0
    random: float = 0.0

    def queue(self, rate: float) -> tuple[float, float]:
        """The requests that wait because no step had room for them if `rate` others arrive, and its slope."""
        alone = slope = 0.0
        if self.shares < 1:
            load = min(rate * self.each, _FULL)
            left = 1 - load
            alone = load * (self.coming * load / left + self.mates) / 2
            slope = self.each * (self.coming * load * (2 - load) / (left * left) + self.mates) / 2
            if not self.shares:
                return alone, slope
        rest = 1 - min(rate * self.work, _FULL)
        each, power = self.step / (self.most * rest), sqrt(2 * (self.most + 1))
        load = min(rate * each, _FULL)
        if load < _NEGLIGIBLE and not alone:
            return 0.0, 0.0
        left = 1 - load
        shared = load**power / (2 * left)
        shared_slope = each / rest * (power / load + 1 / left) * shared
        rest = 1 - self.shares
        return rest * alone + self.shares * shared, rest * slope + self.shares * shared_slope

    def rate(self, clients: float, seconds: float, guess: float = 0.0) -> tuple[float, float]:
        """Requests per second of `clients` in a closed loop, and those in the queue.

        A client needs `seconds` without the queue. `guess` is a rate that is about right, or 0.
        """
        if clients <= 1:
            return clients / seconds, 0.0
        others, most = (clients - 1) / clients, 1 / self.each
        if not self.shares:
            # With u = others x rate x each, N = rate x seconds + queue / others is a quadratic equation.
            work, rest = seconds * most + self.mates / 2, clients - 1.0
            half = work + rest
            load = 2 * rest / (half + sqrt(half * half + 2 * (self.coming - 2 * work) * rest))
            rate = load * most / others
            return rate, max(0.0, clients - rate * seconds)
        rate = min(clients / seconds, most)
        if rate * self.each < _NEGLIGIBLE:
            return rate, 0.0
        if guess:
            rate = min(rate, guess)
        for _ in range(_NEWTON):
            queue, slope = self.queue(others * rate)
            over = rate * seconds + queue / others - clients
            if abs(over) <= _SETTLED * clients:
                break
            rate = min(max(rate - over / (seconds + slope), 0.5 * rate), most)
        return rate, max(0.0, clients - rate * seconds)


class Steps(NamedTuple):
    """The steps of decoding requests without prompts of one's own DP rank, but with those of other ranks.

    `seconds` is the mean, and `left` what is left on average of the step that runs when a request arrives.
    """

    seconds: float
    left: float


class StepWaits(NamedTuple):
    """The seconds until the next step begins, and the prompts of others that come during the same step."""

    left: float
    mates: float


def mixed_waits(
    rules: StepRules, steps: Steps, mean_step: float, work: float, full: float, rate: float, most: float,
    closed: StepWaits, stops: int | None = None, burst: float | None = None,
) -> Waits:  # fmt: skip
    """The waits if prompts are computed in the steps of decoding requests.

    A step takes `mean_step` seconds on average, and has room for `most` prompts. A prompt adds `work` seconds if it is
    alone in its step, and `full` if the step is full. `rate` is that of the others in the same DP rank, and `closed` is
    what clients in a closed loop meet. In slots, a prompt takes `stops` more steps than its length needs. `burst` is
    that of `Waits`, without other ranks `each`.
    """
    step, left = steps
    share = min(rate * work, _MOST_LOAD)
    # The number of prompts in a step is that of the arrivals in another: its variance is that of a branching process.
    elapsed = mean_step / 2 + work * share / (2 * (1 - share * share)) + left - step / 2
    together = elapsed * (1 + 2 * share) + rules.overlaps * mean_step
    # Prompts that fill steps alone are computed one after the other, and the queue has all of what others take.
    alone = left + rules.overlaps * step
    shares = min(1.0, max(0.0, most - 1))
    # A prompt of mean length begins and ends within a step.
    number = max(1.0, 1 / most + 0.5) if rules.divides else 1.0
    computed = work + step * number + (stops or 0) * mean_step
    random = shares * together + (1 - shares) * alone + computed
    each = step / most + full
    met = (shares * work + (1 - shares) * each / 2) * closed.mates
    first = closed.left + rules.overlaps * mean_step + met + computed
    # Without the others of the same step, which `met` has. Prompts in slots share the steps, and do not take turns.
    coming = min(1.0, step / (each * most)) * max(0.0, 1 - min(1.0, most) * max(0.0, 1 - rate * mean_step / most))
    if stops is not None:
        coming *= 2
    return Waits(first, each, most, each if burst is None else burst, 0.0, shares, full, step, coming, random)


def steps_within(seconds: float, step: float) -> float:
    """The steps without prompts that end within some seconds after another has ended.

    They differ little, so a step that takes a little longer than `seconds` never ends in time, and one that takes a
    little less always does. The differences of several steps add up.
    """
    ended = seconds / (1.04 * step)
    nearest = max(1.0, floor(ended + 0.5))
    return nearest - 1 + min(1.0, max(0.0, 8 / min(nearest, 8) * (ended - nearest) + 0.5))


def step_waits(step: float, mean_step: float, rate: float, lag: float, overlaps: bool) -> StepWaits:
    """What the prompt of a client in a closed loop meets, whose last answer ended with a step `lag` seconds before.

    The number of answers that end with a step does not depend on how long it takes. Without prompts, it takes `step`
    seconds, and on average `mean_step`. A renewal process: the steps without prompts that end within the lag pass, and
    a step with prompts is taken to be longer than it.
    """
    coming = rate * mean_step
    none = exp(-coming)
    ended = steps_within(lag, step)
    quiet = 1 - none**ended
    passed = none * quiet / (1 - none) if none < 1 else ended
    left = max(mean_step * (1 + passed) - lag, mean_step / 2 * min(1.0, ended))
    # The requests of a long step are computed in the step after the next, and come back during the one after that. A
    # step between them is over before any comes, so long and short steps take turns.
    turns = min(1.0, coming / 2) * min(1.0, ended) if overlaps else 0.0
    return StepWaits(left + turns * step / 2, coming * (1 + max(2 * none * quiet, turns)))


class Batches(NamedTuple):
    """The steps that compute prompts alone: the prompts in one, and its seconds, on average.

    `mates` are the others in a request's group for which its step has no room. `first` are the seconds from a client's
    last answer to its next first token.
    """

    prompts: float
    seconds: float
    mates: float
    first: float


def batches(
    seconds_of: Callable[[float], float], step: float, ending: float, lag: float, overlaps: bool, most: float
) -> Batches:
    """The prompts that are computed together if steps with prompts and others take turns, in a closed loop.

    `seconds_of` gives the seconds of a step by its number of prompts, up to the `most` that it has room for. `step` are
    the seconds of a decode step, with which `ending` answers end on average, at random. Their clients come back `lag`
    seconds later, and no answer ends while prompts are computed. After decode steps without requests, these are
    computed in steps one after the other, as far as there are any:

    - those whose answers ended with the same step. They come during a later step, and are computed in the one after it
      or, if steps overlap, in the second one after it.
    - if steps overlap: those whose answers ended one step later.
    - those whose answers ended within `lag` before the first of these steps. They come while it runs, if it is long.
    - if steps overlap and none ended one step later, there was a decode step instead: those whose answers ended with
      it, and so on.

    If a step with prompts is shorter than `lag`, some of them come later, and do not meet it.
    """

    def together(prompts: float) -> float:
        """The seconds of the steps of a group."""
        steps = max(1.0, prompts / most)
        return steps * seconds_of(prompts / steps)

    some, passed = -expm1(-ending), 1 + steps_within(lag, step)
    each = ending / some if ending else 1.0
    of_some = together(each)
    locked = min(1.0, of_some / lag) if lag else 1.0
    late = ending * passed * locked
    is_late = -expm1(-late)
    all_late = late / is_late if late else 1.0
    # How often there is a group, its prompts, the others that one of them meets, and what it waits for before its step.
    groups = [(1.0, each, ending, step * (passed + overlaps))]
    before = step * (passed - 1) / 2 + of_some
    if overlaps:
        before += some * of_some + (1 - some) * step
        groups += [(some, each, ending, step * passed + of_some)]
        groups += [(is_late * some, each, ending, together(all_late) + step)]
    groups += [(is_late, all_late, late, before)]
    prompts = sum(chance * number for chance, number, _, _ in groups)
    steps = sum(chance * max(1.0, number / most) for chance, number, _, _ in groups)
    seconds = sum(chance * together(number) for chance, number, _, _ in groups)
    decoding = prompts / ending if ending else 1.0
    cycle = seconds + decoding * step
    first = mates = 0.0
    for chance, number, others, waits in groups:
        first += chance * number / prompts * (waits + seconds_of(min(1 + others, most)))
        mates += chance * number / prompts * max(0.0, 1 + others - most)
    mean = cycle / (steps + decoding)
    left = (seconds * seconds / steps + decoding * step * step) / (2 * cycle)
    free = lag + left + overlaps * mean + seconds_of(min(1 + ending, most))
    return Batches(prompts / steps, seconds / steps, mates, locked * first + (1 - locked) * free)


def separate_waits(
    found: Batches, step: float, work: float, alone: float, full: float, most: float, rules: StepRules, rate: float,
    lag: float,
) -> Waits:  # fmt: skip
    """The waits if prompts are computed in steps of their own, as in `batches`.

    A prompt adds `work` seconds to such a step, takes `alone` without others, and `full` in full steps. At random,
    `rate` others come per second.
    """
    share, seconds, load = 0.5, alone, min(rate * work, _MOST_LOAD)
    for _ in range(_ROUNDS):
        mean = (1 - share) * step + share * seconds
        prompts = max(1.0, rate * mean / share)
        seconds = alone + (min(most, prompts) - 1) * work
        share = -(1 - share) * expm1(-rate * step) - share * expm1(-rate * seconds)
    # The number of prompts in a step is that of the arrivals in another: its variance is that of a branching process.
    square = seconds * seconds + work * work * prompts / (1 - load * load)
    left = ((1 - share) * step * step + share * square) / (2 * mean)
    random = left + rules.overlaps * mean + alone + min(2 * left * rate, most) * work
    first = max(alone, found.first - lag)
    return Waits(first, full, most, full, found.mates, coming=0.0, random=random)
