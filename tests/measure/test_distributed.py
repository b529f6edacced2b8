"""Two real processes with gloo: predicted bytes, the same output as the whole layer, and the loss of a process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import kvcalc as library
from kvcalc.measure import runner
from kvcalc.measure.devices import distributed, signals
from kvcalc.measure.devices.ranks import Place
from kvcalc.model.variants import side_by_side
from tests.conftest import ROOT, Result
from tests.documents import validate
from tests.measure.processes import Command, free_port, places, wait_for
from tests.measure.quick import FAST

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without torch.distributed")


class Ranks:
    """One command on several ranks, started like with torchrun. Each rank's exit code and streams can be checked."""

    def __init__(self, start: Any, folder: Path, arguments: tuple[object, ...], before: str, size: int) -> None:
        self.processes: list[Command] = [
            start(folder, *arguments, before=f"rank = {rank}\n{before}", environment=place)
            for rank, place in enumerate(places(size))
        ]

    def results(self, timeout: float = 120) -> list[Result]:
        return [process.result(timeout) for process in self.processes]


@pytest.fixture
def ranks(start: Any, tmp_path: Path) -> Any:
    def group(*arguments: object, before: str = "", size: int = 2) -> Ranks:
        return Ranks(start, tmp_path, arguments, before, size)

    return group


def torchrun(*arguments: object, nodes: tuple[object, ...] = ("--standalone", "--nproc-per-node", 2)) -> Any:
    """A torchrun process with `arguments`: a module or script, and its arguments."""
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *map(str, (*nodes, *arguments))],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def test_every_kind_is_sharded_and_rank_0_reports_all_ranks(ranks: Any, tmp_path: Path) -> None:
    record = tmp_path / "record.json"
    result, other = ranks(*FAST, "--attention", "all", "--tp", 2, "--json", "--save", record).results()
    assert (result.status, other) == (0, Result(0, "", "")), result.err
    document = json.loads(result.out)
    validate(document, "measure")
    assert json.loads(record.read_text()) == document
    assert document["workload"]["tensor_parallel_size"] == 2
    spec = library.read_config(
        {"model_type": "generic", "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2,
         "head_dim": 16, "hidden_size": 64}, "generic", "flags"
    )  # fmt: skip
    assert [run["attention"] for run in document["runs"]] == ["mha", "mqa", "gqa", "mla"]
    for run in document["runs"]:
        expected = library.estimate(
            spec, context_tokens=40, dtype="fp32", tensor_parallel_size=2, what_if=library.WhatIf(run["attention"])
        )["kv_cache"]["bytes_per_device"]  # fmt: skip
        assert [rank["rank"] for rank in run["ranks"]] == [0, 1]
        for held in (run, *run["ranks"]):
            assert held["predicted_bytes"] == held["held_bytes"] == held["allocator_bytes"] == expected
        assert run["verified"]["ok"]
        assert run["decode_step_seconds"]["n"] == 4


@pytest.mark.nightly  # kvcalc reads the same variables as on one node
def test_two_nodes_meet_by_torchruns_rendezvous() -> None:
    """Two agents with one process each, as on two machines."""
    place = ("--nnodes", 2, "--nproc-per-node", 1, "--rdzv-backend", "c10d", "--rdzv-endpoint",
             f"127.0.0.1:{free_port()}", "--rdzv-id", "test")  # fmt: skip
    command = ("-m", "tests.measure.quick", "measure", *FAST, "--tp", 2, "--get", "runs.0.ranks")
    nodes = [torchrun(*command, nodes=place) for _ in range(2)]
    try:
        outs = [node.communicate(timeout=240) for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    assert [node.returncode for node in nodes] == [0, 0], outs
    # Only the node with rank 0 prints an answer.
    (answer,) = (out for out, _ in outs if out)
    assert [rank["held_bytes"] for rank in json.loads(answer)] == [10_240, 10_240]


def test_ranks_need_no_numpy(ranks: Any) -> None:
    before = "assert sys.modules['numpy'] is None"
    first, _ = ranks(*FAST, "--tp", 2, "--get", "runs.0.held_bytes", before=before).results()
    assert (first.status, first.out) == (0, "10240\n"), first.err


def test_what_gloo_prints_is_not_the_answer(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """In torch 2.8, gloo prints on stdout that it is connected."""
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda *given, **named: os.write(1, b"[Gloo] Rank 0"))
    print("before")
    distributed._start()
    print("after")
    assert capfd.readouterr() == ("before\nafter\n", "")


def test_one_kv_head_is_on_both_ranks_and_the_heads_are_not(ranks: Any) -> None:
    whole, _ = ranks(*FAST, "--kv-heads", 1, "--tp", 2, "--json").results()
    run = json.loads(whole.out)["runs"][0]
    # With MQA, every rank holds the whole cache: two layers, K and V, 40 tokens of 16 elements in fp32.
    assert [rank["held_bytes"] for rank in run["ranks"]] == [2 * 2 * 40 * 16 * 4] * 2


def test_a_rank_that_is_left_out_of_the_sum_is_found_out(ranks: Any) -> None:
    first, second = ranks(*FAST, "--tp", 2, before="distributed.Group.sum = lambda self, out: out").results()
    assert first.status == 1
    assert "differs from the full pass" in first.err
    assert second.out == ""


def test_a_rank_with_a_row_too_many_is_named(ranks: Any) -> None:
    before = "if rank == 1:\n    held = run.held_bytes\n    run.held_bytes = lambda caches: held(caches) + 64"
    first, _ = ranks(*FAST, "--tp", 2, before=before).results()
    assert first.status == 5
    assert "rank 1: predicted 10,240 bytes, the cache holds 10,304" in first.err


def test_the_slowest_rank_makes_the_steps_time(ranks: Any) -> None:
    before = "if rank == 1:\n    call = run.time_call\n    run.time_call = lambda device, what: call(device, what) + 7"
    first, _ = ranks(*FAST, "--tp", 2, "--get", "runs.0.decode_step_seconds.min", before=before).results()
    assert float(first.out) > 7


def test_an_error_of_all_is_said_once(ranks: Any) -> None:
    first, second = ranks(*FAST, "--steps", 40, "--tp", 2).results()
    assert (first.status, second.status) == (2, 2)
    assert len(first.err.splitlines()) == 1
    assert second.err == ""


def test_a_rank_short_of_memory_stops_all_before_anything_is_allocated(ranks: Any) -> None:
    before = "if rank == 1: runner.free_bytes = lambda device: 1 << 20"
    first, second = ranks(*FAST, "--tp", 2, before=before).results()
    assert (first.status, second.status) == (4, 4)
    assert first.err.startswith("kvcalc: rank 1 of 2: ")
    assert (first.out, second.out, second.err) == ("", "", "")


@pytest.mark.parametrize(
    ("options", "size", "message"),
    [
        (("--tp", 3), 1, "--tp 3 needs 3 processes, but there is 1 process"),
        (("--tp", 4), 2, "--tp 4 needs 4 processes, but there are 2 processes"),
        ((), 2, "2 processes but no --tp"),
    ],
)
def test_another_number_of_processes_is_a_usage_error(ranks: Any, options: Any, size: int, message: str) -> None:
    first, *others = ranks(*FAST, *options, size=size).results()
    assert first.status == 2
    assert message in first.err
    assert len(first.err.splitlines()) == 2
    assert all((other.status, other.out, other.err) == (2, "", "") for other in others)


def test_tp_alone_names_torchrun(kvcalc: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    result = kvcalc("measure", *FAST, "--tp", "2")
    assert result.status == 2
    assert "torchrun --nproc-per-node 2 -m kvcalc measure ... --tp 2" in result.err


def test_heads_that_do_not_divide_are_a_usage_error(ranks: Any) -> None:
    first, *others = ranks(*FAST, "--tp", 3, size=3).results()
    assert (first.status, first.out) == (2, "")
    assert "--tp 3 does not divide the 8 attention heads" in first.err
    assert all((other.status, other.err) == (2, "") for other in others)


def test_of_all_kinds_one_that_cannot_be_split_is_skipped() -> None:
    spec = library.read_config(
        {"model_type": "generic", "num_hidden_layers": 1, "num_attention_heads": 12, "num_key_value_heads": 6,
         "head_dim": 8, "hidden_size": 32}, "x", "x"
    )  # fmt: skip
    skipped: Any = []
    kinds = [(kind, found) for kind, found in side_by_side(spec, library.WhatIf()) if not isinstance(found, str)]
    kept = runner._that_split(kinds, skipped, 4, all_variants=True)
    assert [kind for kind, _ in kept] == ["mha", "mqa", "mla"]
    reason = "--tp 4 is neither a divisor nor a multiple of the 6 KV heads"
    assert skipped == [{"attention": "gqa", "reason": reason}]
    with pytest.raises(library.KvcalcError) as caught:
        runner._that_split(kinds, [], 4, all_variants=False)
    assert caught.value.exit_code == 2


# Rank 1 reports that it is in the middle of its run, and then waits to be ended.
STUCK = """\
def stuck(*args):
    open("ready", "w").close()
    time.sleep(600)
if rank == 1:
    run.choose_backends = stuck
"""


def test_a_killed_rank_ends_the_other_at_once_with_one_line(ranks: Any, tmp_path: Path) -> None:
    group = ranks(*FAST, "--tp", 2, "--json", "--save", "record.json", before=STUCK)
    wait_for(tmp_path / "ready")
    group.processes[1].signal(signal.SIGKILL)
    killed = time.monotonic()
    first, second = group.results(timeout=120)
    assert time.monotonic() - killed < distributed.TIMEOUT_SECONDS / 2
    assert (first.status, second.status) == (1, -signal.SIGKILL)
    line, hint = first.err.splitlines()
    assert line.startswith("kvcalc: rank 0 of 2: lost another rank: ")
    assert "own error message" in hint
    assert first.out == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ready"]


def test_a_rank_that_hangs_is_waited_for_only_so_long(ranks: Any, tmp_path: Path) -> None:
    group = ranks(*FAST, "--tp", 2, "--json", before=f"distributed.TIMEOUT_SECONDS = 5\n{STUCK}")
    wait_for(tmp_path / "ready")
    began = time.monotonic()
    first = group.processes[0].result(timeout=120)
    assert time.monotonic() - began < distributed.TIMEOUT_SECONDS / 2
    assert (first.status, first.out) == (1, "")
    assert first.err.splitlines()[0].startswith("kvcalc: rank 0 of 2: lost another rank: ")
    assert len(first.err.splitlines()) == 2


def test_a_fault_in_one_rank_is_that_ranks_line(ranks: Any) -> None:
    before = """
def full(*args):
    import torch
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has none.")
if rank == 1:
    run.choose_backends = full
"""
    first, second = ranks(*FAST, "--tp", 2, before=before).results()
    assert (first.status, second.status) == (1, 1)
    assert second.err.splitlines()[0] == "kvcalc: rank 1 of 2: out of memory: cannot allocate 2.00 GiB more"
    assert first.err.splitlines()[0].startswith("kvcalc: rank 0 of 2: lost another rank")
    assert {len(result.err.splitlines()) for result in (first, second)} == {2}


def test_sigterm_which_torchrun_sends_is_one_line(ranks: Any, tmp_path: Path) -> None:
    group = ranks(*FAST, "--tp", 2, before=STUCK)
    wait_for(tmp_path / "ready")
    group.processes[1].signal(signal.SIGTERM)
    first, second = group.results(timeout=120)
    assert (first.status, second.status) == (1, 1)
    assert second.err == ("kvcalc: rank 1 of 2: stopped by SIGTERM, which torchrun sends if another rank has ended\n")


@pytest.mark.parametrize(
    ("number", "status", "line"),
    [
        (signal.SIGTERM, 1, "kvcalc: rank 0 of 2: stopped by SIGTERM, which torchrun sends if another rank has ended"),
        (signal.SIGINT, 130, "kvcalc: interrupted"),
    ],
)
def test_a_signal_is_heard_while_another_rank_does_not_answer(
    ranks: Any, tmp_path: Path, number: signal.Signals, status: int, line: str
) -> None:
    """Rank 0 waits inside a collective, where Python's own handlers do not run. Its timeout is several minutes."""
    group = ranks(*FAST, "--tp", 2, "--save", "record.json", before=STUCK)
    wait_for(tmp_path / "ready")
    time.sleep(1)
    group.processes[1].signal(signal.SIGSTOP)
    group.processes[0].signal(number)
    assert group.processes[0].result(timeout=120) == (status, "", f"{line}\n")
    assert not (tmp_path / "record.json").exists()


def test_signals_are_as_before_after_a_block_that_went_well() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    with signals.heard(Place(0, 2, 0, 2)):
        assert signal.getsignal(signal.SIGTERM) is not before[0]
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before
    assert signal.set_wakeup_fd(-1) == -1


def test_ctrl_c_reaches_all_and_is_said_once(ranks: Any, tmp_path: Path) -> None:
    before = STUCK.replace("if rank == 1:", "if True:").replace('"ready"', 'f"ready{rank}"')
    group = ranks(*FAST, "--tp", 2, "--save", "record.json", before=before)
    for rank in (0, 1):
        wait_for(tmp_path / f"ready{rank}")
    for process in group.processes:
        process.signal(signal.SIGINT)
    first, second = group.results(timeout=120)
    assert (first.status, second.status) == (130, 130)
    assert (first.out, first.err, second.out, second.err) == ("", "kvcalc: interrupted\n", "", "")
    assert not (tmp_path / "record.json").exists()


def test_torchrun_ends_with_all_its_ranks_when_one_is_killed(tmp_path: Path) -> None:
    script, record = tmp_path / "rank.py", tmp_path / "record.json"
    script.write_text("""\
import os, runpy
from kvcalc.measure import run
def die(*args): os.kill(os.getpid(), 9)
if os.environ["RANK"] == "1":
    run.choose_backends = die
runpy.run_module("tests.measure.quick", run_name="__main__")
""")
    began = time.monotonic()
    process = torchrun(script, "measure", *FAST, "--tp", 2, "--json", "--save", record)
    out, err = process.communicate(timeout=400)
    assert time.monotonic() - began < distributed.TIMEOUT_SECONDS / 2
    assert (process.returncode, out) == (1, "")
    ours = [line for line in err.splitlines() if line.startswith("kvcalc: ")]
    assert len(ours) == 1, err
    assert ours[0].startswith("kvcalc: rank 0 of 2: ")
    assert [path.name for path in tmp_path.iterdir()] == ["rank.py"]


def test_a_meeting_point_that_is_not_there_is_one_line(start: Any, tmp_path: Path) -> None:
    place = {**places(2)[1], "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    before = "distributed.TIMEOUT_SECONDS = 2"
    found = start(tmp_path, *FAST, "--tp", 2, before=before, environment=place).result()
    assert (found.status, found.out) == (1, "")
    assert "rank 1 of 2: the ranks cannot connect" in found.err
    assert "Traceback" not in found.err


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices")
def test_two_gpus_over_nccl() -> None:
    options = ("llama-3-8b", "--layers", 2, "--context", "2k", "--tp", 2, "--device", "cuda", "--json")
    process = torchrun("-m", "kvcalc", "measure", *options)
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    (run,) = json.loads(out)["runs"]
    spec = library.load_model("llama-3-8b").head(2)
    expected = library.estimate(spec, context_tokens=2048, tensor_parallel_size=2)["kv_cache"]["bytes_per_device"]
    assert [rank["held_bytes"] for rank in run["ranks"]] == [expected] * 2
    assert run["verified"]["ok"]


def test_a_profile_times_all_reduces_between_the_ranks(ranks: Any, tmp_path: Path) -> None:
    """Then rank 0 measures its own device."""
    config = tmp_path / "config.json"
    config.write_text(json.dumps({
        "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "vocab_size": 100,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096, "torch_dtype": "float32",
    }))  # fmt: skip
    path = tmp_path / "profile.json"
    given = (config, "--profile", "--device", "cpu", "--context", "64", "--batch", 1, "--save", path, "--json")
    result, other = ranks(*given).results()
    assert (result.status, other.status, other.out, other.err) == (0, 0, "", ""), result.err
    found = json.loads(path.read_text())
    validate(found, "measure_profile")
    assert [row["bytes"] for row in found["all_reduces"]] == [8192 * 8**step for step in range(5)]
    assert all(row["ranks"] == 2 and row["seconds"] > 0 for row in found["all_reduces"])
    assert [row["context_tokens"] for row in found["points"]] == [64]
    # It goes on with one rank, and keeps the times.
    (alone,) = ranks(*given, size=1).results()
    assert alone.status == 0, alone.err
    assert json.loads(path.read_text())["all_reduces"] == found["all_reduces"]
