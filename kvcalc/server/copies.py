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
    workload, question, copies = case.workload, case.question, case.layout.data_parallel_size
    speed = question.speed
    if speed is not None and speed.concurrency is not None:
        speed = speed._replace(concurrency=-(-speed.concurrency // copies))
    devices = case.devices._replace(num_devices=case.devices.num_devices // copies)
    return case._replace(
        question=question._replace(data_parallel_size=1, devices=devices, speed=speed),
        workload=workload._replace(layout=case.layout.one_copy, batch_size=workload.attention_batch),
    )


def of_all_copies(case: Case, throughput: documents.Throughput) -> documents.Throughput:
    """The `throughput` part of a document: times of the busiest copy, and tokens per second of all copies.

    `throughput` is that of `one_copy`.
    """
    workload, speed, copies = case.workload, case.question.speed, case.layout.data_parallel_size
    share: float = workload.batch_size / workload.attention_batch
    throughput["decode_tokens_per_second"] *= share
    serving = throughput["serving"]
    if serving is not None and speed is not None:
        share = copies if speed.concurrency is None else speed.concurrency / serving["concurrency"]
        concurrency = speed.concurrency or copies * serving["concurrency"]
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
    energy = throughput["energy"]
    if energy is not None:
        # The ends of the range are None if it is not known.
        each = {name: size and float(cast(float, size)) * copies / share for name, size in energy.items()}
        throughput["energy"] = cast("documents.Energy", {**each, "watts": energy["watts"] * copies})
    return throughput
