"""The speed of whole copies of a model behind one server: `--dp` with a model without experts.

The copies exchange nothing, so each is as fast as it is alone with its part of the requests.
"""

from __future__ import annotations

from typing import Any

from kvcalc.planning.cases.case import Case

_OF_ALL = ("tokens_per_second", "tokens_per_second_low", "tokens_per_second_high", "requests_per_second")


def one_copy(case: Case) -> Case:
    """The case of the busiest copy: its devices and its part of the requests."""
    workload, asked, copies = case.workload, case.question, case.workload.data_parallel_size
    speed = asked.speed
    if speed is not None and speed.concurrency is not None:
        speed = speed._replace(concurrency=-(-speed.concurrency // copies))
    batch = workload.attention_batch(workload.batch_size)
    devices = case.devices._replace(num_devices=case.devices.num_devices // copies)
    return case._replace(
        question=asked._replace(data_parallel_size=1, devices=devices, speed=speed),
        workload=workload._replace(data_parallel_size=1, batch_size=batch),
    )


def of_all_copies(case: Case, found: dict[str, Any]) -> dict[str, Any]:
    """The `throughput` part of a document: times of the busiest copy, and tokens per second of all copies.

    `found` is that of `one_copy`.
    """
    workload, asked, copies = case.workload, case.question.speed, case.workload.data_parallel_size
    share: float = workload.batch_size / workload.attention_batch(workload.batch_size)
    found["decode_tokens_per_second"] *= share
    serving = found["serving"]
    if serving is not None and asked is not None:
        share = copies if asked.concurrency is None else asked.concurrency / serving["concurrency"]
        concurrency = asked.concurrency or copies * serving["concurrency"]
        running = min(concurrency, copies * serving["running_requests"])
        serving.update({name: share * serving[name] for name in _OF_ALL if serving[name] is not None})
        serving.update(concurrency=concurrency, running_requests=running)
        serving["tokens_per_second_per_device"] *= share / copies
    energy = found["energy"]
    if energy is not None:
        # The ends of the range are None if it is not known.
        found["energy"] = {name: size and size * copies / share for name, size in energy.items()}
        found["energy"]["watts"] = energy["watts"] * copies
    return found
