from __future__ import annotations

from collections.abc import Sequence

from kvcalc.simulation.loads.load import Requests
from kvcalc.simulation.loads.requests import Request
from kvcalc.simulation.loads.supply import Supply

_MANY = 2**40


def supply_of(requests: Sequence[Request]) -> Supply:
    """These requests, of which none is too long."""
    return Supply(Requests(iter(requests), _MANY, _MANY, 1, len(requests)), _MANY, lambda request: True)
