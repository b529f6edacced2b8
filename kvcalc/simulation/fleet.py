"""The servers that serve a load, and for how long: until all requests have ended, or until their times are known."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from math import inf

from kvcalc.notes import Note
from kvcalc.simulation.loads.load import Load
from kvcalc.simulation.loads.requests import Request
from kvcalc.simulation.loads.supply import Supply
from kvcalc.simulation.replicas.replica import Replica
from kvcalc.simulation.results import Outcome, keeps_up
from kvcalc.simulation.settled import window_of

Progress = Callable[[int, int], None]
"""Called with the number of requests that have ended, and how many are to end."""

# A run that is brief says so if its times are known to less than so many times what is wanted.
_BRIEFLY = 2.5
# A run that is too short goes on by at least this share, and at most to this multiple.
_LEAST, _TIMES = 1.25, 3.0


class Fleet(ABC):
    """The servers."""

    @property
    @abstractmethod
    def ranks(self) -> Sequence[Replica]:
        """The DP ranks of the servers that decode."""

    @abstractmethod
    def run(self, number: int | None, progress: Progress | None = None) -> None:
        """Run until `number` requests have ended, or all of them if None. A run may go on."""

    @property
    @abstractmethod
    def ended(self) -> Sequence[Request]:
        """The requests that have ended, in the order of time."""


def run_load(fleet: Fleet, load: Load, supply: Supply, notes: list[Note], progress: Progress | None = None) -> Outcome:
    """What happens to the requests of a load, and notes about it. Raises what `Supply.check` raises."""
    supply.check()
    if supply.number is not None:
        fleet.run(None, progress)
        notes += supply.notes()
        return _counted(fleet.ended, load, fleet, supply)
    number, most = load.first_number, load.most_number
    while True:
        fleet.run(number, progress)
        requests = fleet.ended
        lengths = None if supply.cut or supply.refused else load.mean_lengths
        window = window_of(requests, load.settling, lengths)
        if window.widest <= 1 or number >= most or (load.clients is None and not keeps_up(requests)):
            break
        number = min(most, int(number * min(_TIMES, max(_LEAST, window.widest**2))))
    if number >= most and window.widest > (_BRIEFLY if load.is_brief else 1):
        exact = "" if window.widest == inf else f" to {2 * window.widest:.0f} % of their means"
        text = f"times are not known better than{exact}" if exact else "times are not known"
        text = f"{text} after {number:,} requests: kvcalc simulate --requests {2 * number} follows more"
        notes.append(Note("load", "unsettled", text))
    notes += supply.notes()
    return Outcome(
        requests, window.first, len(requests), fleet.ranks, is_steady=True, refused=supply.refused, lengths=lengths
    )


def _counted(requests: Sequence[Request], load: Load, fleet: Fleet, supply: Supply) -> Outcome:
    """What counts of all requests of a load that ends."""
    first, last = 0, len(requests)
    # Clients have no more requests to send when the last of these have ended.
    is_steady = not load.counts_all and 2 * (load.clients or 0) <= last
    if is_steady:
        last -= load.clients or 0
        first = window_of(requests[:last], load.settling).first
    return Outcome(requests, first, last, fleet.ranks, is_steady=is_steady, refused=supply.refused)
