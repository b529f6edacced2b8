"""Prompts that wait until every DP rank has one (`Schedule.balance`).

DP ranks wait for the slowest of them in each step, so a prompt on one rank costs all ranks its time. TensorRT-LLM can
hold prompts back until all ranks compute some in the same step (_balance_adp_requests, _torch/pyexecutor/
py_executor.py, 1.2). The chunks of a divided prompt are not held back here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from kvcalc.engines.scheduler import Balance
from kvcalc.simulation.replicas.replica import Plan, Replica


class Balancer:
    """Says before each step whether prompts wait, and counts the steps for which they do."""

    _waited = 0  # steps since prompts were computed or could have been
    _gathered = 0  # steps for which prompts of all ranks have waited for more of them
    _all_decode = _all_have_prompts = False  # before the steps that run now

    def __init__(self, balance: Balance, ranks: Sequence[Replica]) -> None:
        self._balance, self._ranks = balance, ranks

    def held_steps(self) -> int:
        """For how many steps prompts wait if nothing changes. 0 if they may be computed now."""
        self._all_decode = all(rank.decoding for rank in self._ranks)
        self._all_have_prompts = all(rank.waiting and rank.decoding < rank.rules.max_running for rank in self._ranks)
        if not self._all_decode:
            return 0
        if self._all_have_prompts:
            return self._balance.gathering_steps - self._gathered
        return self._balance.most_steps - 1 - self._waited

    def ran(self, steps: int) -> None:
        """Count steps that ran after `held_steps`."""
        if self._all_decode and not self._all_have_prompts:
            self._waited = (self._waited + steps) % self._balance.most_steps
            return
        self._waited = 0
        if self._all_decode:
            self._gathered = (self._gathered + steps) % (self._balance.gathering_steps + 1)


def plan_without_prompts(rank: Replica) -> Plan:
    """What the next step of a rank does if the prompts that wait go on waiting."""
    waiting, rank.waiting = rank.waiting, deque()
    plan = rank.next_plan()
    rank.waiting = waiting
    return plan
