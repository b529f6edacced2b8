"""The speed of whole copies of a model behind one server: `--dp` with a model without experts.

The copies exchange nothing, so each is as fast as it is alone with its part of the requests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from kvcalc.server.case import Case

if TYPE_CHECKING:
    import kvcalc.documents as documents


def one_copy(case: Case) -> Case:
    """The case of the busiest copy: its devices and its part of the requests."""
    workload, asked, copies = case.workload, case.question, case.layout.data_parallel_size
    speed = asked.speed
    if speed is not None and speed.concurrency is not None:
        speed = speed._replace(concurrency=-(-speed.concurrency // copies))
    devices = case.devices._replace(num_devices=case.devices.num_devices // copies)
    return case._replace(
        question=asked._replace(data_parallel_size=1, devices=devices, speed=speed),
        workload=workload._replace(layout=case.layout.one_copy, batch_size=workload.attention_batch),
    )


def of_all_copies(case: Case, found: documents.Throughput) -> documents.Throughput:
    """The `throughput` part of a document: times of the busiest copy, and tokens per second of all copies.

    `found` is that of `one_copy`.
    """
    workload, asked, copies = case.workload, case.question.speed, case.layout.data_parallel_size
    share: float = workload.batch_size / workload.attention_batch
    found["decode_tokens_per_second"] *= share
    serving = found["serving"]
    if serving is not None and asked is not None:
        share = copies if asked.concurrency is None else asked.concurrency / serving["concurrency"]
        concurrency = asked.concurrency or copies * serving["concurrency"]
        running = min(concurrency, copies * serving["running_requests"])
        low, high = serving["tokens_per_second_low"], serving["tokens_per_second_high"]
        serving.update({
            "concurrency": concurrency,
            "running_requests": running,
            "tokens_per_second": share * serving["tokens_per_second"],
            "tokens_per_second_low": None if low is None else share * low,
            "tokens_per_second_high": None if high is None else share * high,
            "requests_per_second": share * serving["requests_per_second"],
        })  # fmt: skip
        serving["tokens_per_second_per_device"] *= share / copies
    energy = found["energy"]
    if energy is not None:
        # The ends of the range are None if it is not known.
        each = {name: size and float(cast(float, size)) * copies / share for name, size in energy.items()}
        found["energy"] = cast("documents.Energy", {**each, "watts": energy["watts"] * copies})
    return found
