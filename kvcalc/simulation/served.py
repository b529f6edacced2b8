"""The load of an estimate, simulated: clients that send the next request after each answer, on one replica."""

from __future__ import annotations

from kvcalc.errors import KvcalcError
from kvcalc.model.memo import keep, remembered
from kvcalc.model.spec import ModelSpec
from kvcalc.notes import Note
from kvcalc.question.lengths import Distribution, lengths_of
from kvcalc.records import NamedTuple
from kvcalc.server.case import Case
from kvcalc.server.layout import server_context
from kvcalc.simulation.loads.load import MEANS, Load, check_load, requests_of
from kvcalc.simulation.play import play
from kvcalc.simulation.results import Limits, Outcome, describe_results, mean_of
from kvcalc.throughput.roofline import SpeedModel

# The most loads that are kept for one model.
_MOST_LOADS = 256


class Served(NamedTuple):
    """The times in seconds and the rates of one replica. `running` requests run on average.

    `prefill_share` is the share of the time per output token that the prompts of others take.
    """

    prompt: Distribution
    answer: Distribution
    clients: int
    running: float
    tpot_seconds: float
    ttft_seconds: float
    tokens_per_second: float
    requests_per_second: float
    prefill_share: float


def serve_load(case: Case, model: SpeedModel, notes: list[Note]) -> Served | None:
    """The load of a case. None, with a note, if it cannot be simulated. None without one if it serves no requests."""
    speed = case.question.speed_asked
    prompt, answer = (lengths_of(tokens, "tokens") for tokens in (speed.input_tokens, speed.output_tokens))
    if prompt is None or answer is None:
        return None
    # Confidence judges times, and changes none of them.
    options = case.question._asdict() | {"model": None, "speed": speed._replace(confidence=0)}
    key = repr((options, case.workload.context_tokens, case.workload.batch_size, model.constants))
    known = _loads_of(case.model)
    if key not in known:
        load_notes: list[Note] = []
        keep(known, key, (case, _served(case, model, prompt, answer, load_notes), load_notes), _MOST_LOADS)
    _, served, load_notes = known[key]
    notes += load_notes
    return served


@remembered
def _loads_of(model: ModelSpec) -> dict[str, tuple[Case, Served | None, list[Note]]]:
    """The loads simulated with this model so far. Each case is kept, so that no address in a key is used again."""
    return {}


def outcome_of(case: Case, model: SpeedModel, load: Load, notes: list[Note]) -> Outcome:
    """What happens to a load on one replica of a case. Raises KvcalcError if it cannot be simulated."""
    check_load(load)
    requests = requests_of(load, case.question.speed_asked.prefix_hit_rate, notes)
    started = case.at(server_context(case.question, case.workload.context_tokens), 1)
    return play(started, model, requests, load, 1, 1.0, notes, assumes=True).outcome


def _served(
    case: Case, model: SpeedModel, prompt: Distribution, answer: Distribution, notes: list[Note]
) -> Served | None:  # fmt: skip
    speed = case.question.speed_asked
    clients = speed.concurrency or max(1, case.workload.batch_size)
    load = Load(prompt, answer, concurrency=clients, is_benchmark=speed.benchmark, settling=MEANS, is_brief=True)
    try:
        outcome = outcome_of(case, model, load, notes)
    except KvcalcError as error:
        notes.append(Note("throughput", "not-simulated", f"the times of these requests are not known: {error.message}"))
        return None
    results = describe_results(outcome, Limits(), load)
    ttft, tpot = (mean_of(metric, outcome) for metric in ("ttft", "tpot"))
    tokens = results["tokens_per_second"]
    decoding = max(1.0, tokens * tpot)
    step = model.decode(decoding, prompt.mean_tokens + answer.mean_tokens / 2).seconds / model.tokens_per_step
    return Served(
        prompt, answer, clients, max(1.0, results["mean_running_requests"]), tpot or step, ttft, tokens,
        results["requests_per_second"], max(0.0, 1 - step / tpot) if tpot else 0.0,
    )  # fmt: skip
