"""The requests that a case serves: how many run, what they wait for, and how fast they are."""

from __future__ import annotations

from typing import Any

from kvcalc.notes import Note
from kvcalc.planning.admission import most_at_once, running_requests, step_rules, wanted_requests
from kvcalc.planning.budget import Budget, budget
from kvcalc.planning.case import Case
from kvcalc.question.question import SpeedQuestion
from kvcalc.records import NamedTuple
from kvcalc.throughput.roofline import SpeedModel
from kvcalc.throughput.serving import Serving, serve


class Served(NamedTuple):
    """The load, and the closed form's answer to it. `running` is the mean number of requests that have memory."""

    input_tokens: int
    output_tokens: int
    concurrency: int
    running: float
    serving: Serving


def served(case: Case, model: SpeedModel, notes: list[Note]) -> Served | None:
    """The requests of a case at its load. None if it serves none. Adds notes about what only a simulation follows."""
    question = case.question.speed or SpeedQuestion()
    prompt, answer = question.input_tokens, question.output_tokens
    if prompt is None or answer is None:
        return None
    found_budget = budget(case)
    most = most_at_once(case, found_budget)
    wanted = wanted_requests(case, most)
    running, may_preempt = running_requests(case, wanted)
    concurrency = question.concurrency or int(running)
    running = min(running, concurrency)
    cached = question.prefix_hit_rate * prompt
    waits: dict[str, Any] = {}
    # Imported here because most questions do not need them.
    if running < concurrency and may_preempt:
        from kvcalc.planning.preemption import preemption

        waits = preemption(case, running, concurrency)._asdict()
    elif case.engine_name == "sglang" and case.workload.batch_size < wanted:
        from kvcalc.planning.preemption import sglang_late_steps

        if isinstance(found_budget, Budget):
            waits["late_steps"] = sglang_late_steps(found_budget, prompt, answer, running)
    if case.engine_name == "llama.cpp":
        from kvcalc.planning.prompt_parts import parts_of

        waits["parts"] = parts_of(case, prompt, int(cached))
    found = serve(model, prompt, answer, concurrency, running, cached, step_rules(case, most), **waits)
    if may_preempt:
        text = "not all requests fit at their full length, so some are preempted and computed again"
        notes.append(Note("throughput", "preemptions", f"{text}: kvcalc simulate follows each of them"))
    if case.workload.data_parallel_size > 1:
        text = "a prompt stops all attention replicas, so the speed depends on when requests arrive"
        notes.append(Note("throughput", "lock-step", f"{text}: kvcalc simulate follows each of them"))
    if case.engine_name != "llama.cpp":
        # Its requests wait for steps in their slots. Those of the others do not run before their prompts are computed.
        running = min(running, max(1.0, concurrency - found.queued))
    return Served(prompt, answer, concurrency, running, found)
