"""The simulation, which advances many steps at once, agrees with a scheduler that runs one step at a time."""

from __future__ import annotations

from itertools import pairwise

import pytest

from kvcalc.simulation.replicas.timeline import TokenGaps
from tests.simulation.cases import make_case

CASES, PARTS = 1000, 20


@pytest.mark.parametrize("part", range(PARTS))
def test_many_steps_at_once_give_what_single_steps_give(part: int) -> None:
    for seed in range(part * CASES // PARTS, (part + 1) * CASES // PARTS):
        case = make_case(seed)
        case.replica.run()
        case.run_reference()
        for request, job in zip(case.requests, case.jobs):
            found = request.arrival, request.started, request.first_token, request.finish, request.preemptions
            expected = job.arrival, job.started, job.first_token, job.finish, job.preemptions
            assert found == expected, f"case {seed}, request {request.number}"
        assert case.replica.pool.used == 0
        assert case.replica.gaps.tokens == sum(len(job.tokens_at) - 1 for job in case.jobs), f"case {seed}"
        gaps = TokenGaps()
        for job in case.jobs:
            for before, after in pairwise(job.tokens_at):
                gaps.add(after - before, 1)
        for share in (0.1, 0.5, 0.9, 1.0) if gaps.tokens else ():
            assert case.replica.gaps.percentile(share) == pytest.approx(gaps.percentile(share), rel=0.021)
            assert (case.replica.gaps.percentile(share) or 0) <= case.replica.gaps.longest
        assert case.replica.gaps.longest == pytest.approx(gaps.longest, rel=1e-6)
        if case.server.capacity is not None:
            assert case.replica.pool.most_used == case.server.most_used <= case.server.capacity


def test_the_cases_include_preemptions_chunks_and_full_pools() -> None:
    preempted = chunked = full = found = 0
    for seed in range(300):
        case = make_case(seed)
        case.replica.run()
        preempted += any(request.preemptions for request in case.requests)
        chunked += any(request.prompt_tokens > case.server.rules.step_tokens for request in case.requests)
        found += case.server.keeps_blocks and any(request.cached_tokens for request in case.requests)
        pool = case.replica.pool
        full += pool.capacity is not None and pool.most_used > 0.9 * pool.capacity
    assert preempted > 10
    assert found > 1
    assert min(chunked, full) > 50
