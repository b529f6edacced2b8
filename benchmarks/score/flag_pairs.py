"""Whether kvcalc knows the effect of one option: public pairs of measurements, and the same pairs simulated.

    python benchmarks/score/flag_pairs.py [ID ...]     # a row per pair, and the share of signs that are right

A pair is a server before and after one option changed, with the requests per second that a client measured. A sign is
right if kvcalc says the same direction, or a change below 1 % where less than 3 % was measured.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from kvcalc.errors import KvcalcError
from kvcalc.planning.answers.simulate import simulate
from kvcalc.planning.check.asked import asked_by
from kvcalc.planning.check.servers import of_release, servers_in
from kvcalc.question.lengths import lengths_of
from kvcalc.question.question import SpeedQuestion
from kvcalc.simulation.loads.load import Load
from kvcalc.throughput.hardware import find_devices
from kvcalc.writing.shell import join

PAIRS = Path(__file__).with_suffix(".jsonl")
_SMALL, _NO_CHANGE = 0.03, 0.01


def read() -> list[dict[str, Any]]:
    """The pairs, each with its source."""
    return [json.loads(line) for line in PAIRS.read_text().splitlines()]


def requests_per_second(pair: dict[str, Any], place: int) -> float:
    """The rate of the simulated server before (0) or after (1) the change. Raises what `check` raises."""
    (server,) = servers_in(join(pair[("before", "after")[place]]))
    server = of_release(server, pair["release"])
    read = server.read()
    question, _ = asked_by(
        read, server.reader, find_devices(pair["gpu"][place]), SpeedQuestion(), None, server.num_devices
    )
    load = pair["load"]
    prompt, answer = (lengths_of(load[name], name) for name in ("input_tokens", "output_tokens"))
    found = simulate(
        question._replace(context_tokens=None, fits_context=False),
        Load(prompt, answer, num_requests=load["requests"], concurrency=load["concurrency"]),
        is_detailed=False,
    )
    return float(found["results"]["requests_per_second"])


def is_right(measured: float, predicted: float) -> bool:
    """Whether two changes, as ratios less 1, have the same sign."""
    return measured * predicted > 0 or (abs(measured) < _SMALL and abs(predicted) < _NO_CHANGE)


def main(ids: list[str]) -> None:
    """Print the rows."""
    right = answered = 0
    pairs = [pair for pair in read() if not ids or pair["id"] in ids]
    for pair in pairs:
        before, after = pair["requests_per_second"]
        measured = after / before - 1
        try:
            rates = [requests_per_second(pair, place) for place in (0, 1)]
        except KvcalcError as error:
            print(f"{pair['id']:<28} {measured:+7.1%}  refused: {error.message[:120]}")
            continue
        predicted = rates[1] / rates[0] - 1
        answered += 1
        right += is_right(measured, predicted)
        told = "right" if is_right(measured, predicted) else "WRONG"
        print(f"{pair['id']:<28} {measured:+7.1%} {predicted:+7.1%}  {told}  {before:g} {rates[0]:.2f} {pair['flag']}")
    print(f"{right} of {answered} signs right, {len(pairs) - answered} refused")


if __name__ == "__main__":
    main(sys.argv[1:])
