"""`measure --tp` on simulated GPUs: a device for each rank, and graphs with the sums over ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from kvcalc.errors import UsageError
from kvcalc.measure.devices.device import resolve_device
from kvcalc.measure.devices.distributed import device_of
from kvcalc.measure.devices.ranks import Place
from tests.conftest import Result
from tests.measure.processes import places
from tests.measure.quick import SMALL
from tests.simulated_cuda import simulated_cuda

RUN = (*SMALL, "--context", "60", "--steps", "3", "--dtype", "bf16", "--device", "cuda", "--tp", 2, "--json")

# Enters a simulation for the rest of the process, and writes the kernels of every captured graph to a file.
SIMULATED = """\
import json, sys
from tests.simulated_cuda import simulated_cuda
from tests.simulated_cuda.graphs import Graph
sys.simulation = simulated_cuda(**{options})
machine = sys.simulation.__enter__()
end = torch.distributed.destroy_process_group
def destroy(group=None):
    json.dump([capture._asdict() for capture in machine.captures], open(f"captures{{rank}}.json", "w"))
    end(group)
torch.distributed.destroy_process_group = destroy
"""


@pytest.fixture
def ranks(start: Any, tmp_path: Path) -> Any:
    """`ranks(*arguments, options=..., before=...)`: the results of two ranks. `options(rank)` describe its Machine."""

    def call(*arguments: object, options: Any = lambda rank: {"device_count": 2}, before: str = "") -> list[Result]:
        processes = [
            start(
                tmp_path, *RUN, *arguments, environment=place,
                before=f"import torch\nrank = {rank}\n" + SIMULATED.format(options=options(rank)) + before,
            ) for rank, place in enumerate(places(2))
        ]  # fmt: skip
        return [process.result() for process in processes]

    return call


def sums_in_graphs(folder: Path, rank: int) -> list[int]:
    """The number of sums over ranks in every captured graph. No capture may have failed."""
    captures = json.loads((folder / f"captures{rank}.json").read_text())
    assert {capture["failure"] for capture in captures} <= {None}
    return [capture["kernels"].count("c10d::allreduce_") for capture in captures]


def test_steps_are_graphs_with_the_sums(ranks: Any, tmp_path: Path) -> None:
    first, second = ranks("--attention", "all")
    assert (first.status, second.status) == (0, 0), first.err + second.err
    for run in json.loads(first.out)["runs"]:
        assert run["decode_step_seconds"]["method"] == "CUDA graph"
        assert run["attention_core_seconds"]["method"] == "CUDA graph"
        assert [rank["device"] for rank in run["ranks"]] == ["cuda:0", "cuda:1"]
        assert all(rank["held_bytes"] == rank["predicted_bytes"] for rank in run["ranks"])
        assert run["verified"]["ok"]
    # A step has a sum for each of its two layers, and nothing else has one.
    for rank in (0, 1):
        assert [count for count in sums_in_graphs(tmp_path, rank) if count] == [2] * 4


def test_a_scheduler_shows_each_rank_its_own_device(ranks: Any) -> None:
    """As with SLURM's --gpus-per-task=1: every process sees one device, as cuda:0."""
    first, second = ranks(options=lambda rank: {"first_device": rank})
    assert (first.status, second.status) == (0, 0), first.err + second.err
    (run,) = json.loads(first.out)["runs"]
    assert [rank["device"] for rank in run["ranks"]] == ["cuda:0", "cuda:0"]


@pytest.mark.parametrize(("count", "options"), [(1, ()), (2, ("--device", "cuda:1"))])
def test_two_ranks_on_one_device_are_refused(ranks: Any, count: int, options: tuple[str, ...]) -> None:
    first, second = ranks(*options, options=lambda rank: {"device_count": count})
    assert (first.status, second.status) == (2, 2)
    message, hint = first.err.splitlines()
    assert message == "kvcalc: rank 0 of 2: ranks 0 and 1 have the same CUDA device"
    assert f"--nproc-per-node {count}" in hint
    assert (first.out, second.out, second.err) == ("", "", "")


def test_without_nccl_no_graph_has_a_sum(ranks: Any, tmp_path: Path) -> None:
    first, second = ranks(options=lambda rank: {"device_count": 2, "has_nccl": False})
    assert (first.status, second.status) == (0, 0), first.err + second.err
    assert json.loads(first.out)["runs"][0]["decode_step_seconds"]["method"] == "CUDA events"
    assert not any(sums_in_graphs(tmp_path, 0))


def test_if_one_rank_cannot_capture_no_rank_replays(ranks: Any) -> None:
    before = """
def refuse(*given, **named):
    raise RuntimeError("no graphs here")
if rank == 1:
    Graph.capture_begin = refuse
"""
    first, second = ranks(before=before)
    assert (first.status, second.status) == (0, 0), first.err + second.err
    assert json.loads(first.out)["runs"][0]["decode_step_seconds"]["method"] == "CUDA events"


def test_a_device_has_a_number() -> None:
    with simulated_cuda(device_count=2):
        assert resolve_device("cuda") == torch.device("cuda")
        assert device_of(resolve_device("cuda:1"), Place()) == torch.device("cuda", 1)
        assert torch.cuda.current_device() == 1
        for rank in (0, 1):
            assert device_of(torch.device("cuda"), Place(rank, 2, rank, 2)) == torch.device("cuda", rank)
        with pytest.raises(UsageError, match="4 processes on this machine, but 2 CUDA devices"):
            device_of(torch.device("cuda"), Place(3, 4, 3, 4))
        with pytest.raises(UsageError, match="cuda:2: not available") as caught:
            resolve_device("cuda:2")
        assert caught.value.hint == "available: cuda:0, cuda:1"
    for name in ("cuda:", "cuda:x", "cpu:0", "cuda:-1"):
        with pytest.raises(UsageError, match="not a device"):
            resolve_device(name)


def test_a_numbered_device_is_the_one_that_runs(kvcalc: Any) -> None:
    with simulated_cuda(device_count=2) as machine:
        result = kvcalc("measure", *RUN[: RUN.index("--tp")], "--device", "cuda:1", "--json")
        assert result.status == 0, result.err
        assert machine.devices[0].peak == 0
        assert machine.devices[1].peak > result.json["runs"][0]["held_bytes"]
