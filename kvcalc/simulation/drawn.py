"""The load of an estimate whose lengths have a distribution: it is simulated, as `kvcalc simulate --concurrency` does.

The closed form (`kvcalc.throughput.serving`) is for lengths that vary by about a third. Requests of equal lengths that
start together also end together, and then wait for each other again; a few very long ones hold a cache for long. Both
follow from the engine's schedule, so each request is followed instead.
"""

from __future__ import annotations

from kvcalc.errors import KvcalcError
from kvcalc.notes import Note
from kvcalc.planning.serving.admission import accept_prompts
from kvcalc.planning.serving.served import Served
from kvcalc.question.fields import IN_TURN
from kvcalc.question.lengths import lengths_of
from kvcalc.server.case import Case
from kvcalc.simulation.loads.arrivals import Arrivals
from kvcalc.simulation.loads.load import Load, requests_of
from kvcalc.simulation.loads.requests import Request
from kvcalc.simulation.replicas.replica import Replica
from kvcalc.simulation.replicas.server import Server
from kvcalc.simulation.replicas.times import ModelTimes
from kvcalc.simulation.results import Limits, describe_results, mean_ttft, tpot_of
from kvcalc.simulation.routed import serve
from kvcalc.simulation.scheduler import scheduler_of
from kvcalc.simulation.simulate import check_fitting, longest_of
from kvcalc.throughput.roofline import SpeedModel
from kvcalc.throughput.serving import Serving


def serve_drawn(case: Case, model: SpeedModel, notes: list[Note]) -> Served | None:
    """The load of a case at its load, simulated. None, with a note, if it cannot be simulated."""
    try:
        return _served(case, model, notes)
    except KvcalcError as error:
        notes.append(Note("throughput", "not-simulated", f"the times of these requests are not known: {error.message}"))
        return None


def _served(case: Case, model: SpeedModel, notes: list[Note]) -> Served:
    asked = case.question.speed_asked
    prompt, answer = (lengths_of(tokens, "tokens") for tokens in (asked.input_tokens, asked.output_tokens))
    clients, hits = asked.concurrency or max(1, case.workload.batch_size), asked.prefix_hit_rate
    load = Load(prompt, answer, concurrency=clients, is_benchmark=True)
    ranks, requests = _simulated(case, model, load, hits, notes)
    results = describe_results(requests, ranks, Limits(), load)
    tpots = [time for request in requests if (time := tpot_of(request)) is not None]
    tpot = sum(tpots) / len(tpots) if tpots else 0.0
    rate, steady = results["requests_per_second"], results["steady_ttft_seconds"]
    ttft = mean_ttft(requests)
    tokens = results["tokens_per_second"]
    # As many requests a second at random. Clients come in groups, and these do not.
    random = _simulated(case, model, Load(prompt, answer, requests_per_second=rate), hits, [])[1]
    decoding = max(1.0, tokens * tpot)
    context = asked.prompt_tokens or 0
    step = model.decode(decoding, context + (asked.answer_tokens or 0) / 2).seconds / model.tokens_per_step
    found = Serving(
        tpot or step, ttft, steady or ttft, mean_ttft(random), tokens, rate,
        max(0.0, 1 - step / tpot) if tpot else 0.0, decoding,
    )  # fmt: skip
    running = max(1.0, results["mean_running_requests"])
    lengths = (prompt and prompt.text, answer and answer.text)
    return Served(asked.prompt_tokens or 0, asked.answer_tokens or 0, clients, running, found, lengths)


def _simulated(
    case: Case, model: SpeedModel, load: Load, hit_rate: float, notes: list[Note]
) -> tuple[list[Replica], list[Request]]:
    """The DP ranks of one replica, and the requests that it served."""
    requests = requests_of(load, hit_rate, notes).requests
    longest = longest_of(requests)
    scheduler = scheduler_of(case, model, longest)
    fitting = [request for request in requests if scheduler.fits(request)]
    check_fitting(requests, fitting, case.question._replace(context_tokens=None), notes)
    accept_prompts(case, max(request.prompt_tokens for request in fitting), notes)
    times = ModelTimes(model)

    def make(arrivals: Arrivals) -> Server:
        server = scheduler.server(times, arrivals)
        server.first_seconds = scheduler.first_wait(load, model, fitting, 1)
        server.keep_sums()
        return server

    (server,) = serve(fitting, 1, make, IN_TURN, concurrency=load.concurrency)
    return [*server.ranks], fitting
