"""The timer, its graphs and the roofs: what is flushed, covered, warmed up and given back."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvcalc.measure import bandwidth, run
from kvcalc.measure.devices import device as devices
from kvcalc.measure.devices import graphs, timing
from kvcalc.measure.devices.timing import Effort, Timings
from kvcalc.measure.layers.stack import Request, Stack
from kvcalc.memory.dtypes import DTYPES

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def test_a_launch_is_covered_and_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device waits until the host has queued the call, so that nothing lies between the start event and it."""
    order: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            self.number = len(order)

        def record(self) -> None:
            order.append("event")

        def synchronize(self) -> None: ...

        def elapsed_time(self, end: object) -> float:
            return 3.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: order.append(f"sleep {cycles > 0}"))
    monkeypatch.setattr(timing, "synchronize", lambda device: order.append("wait"))
    taken = timing.time_calls(
        CUDA, graphs.Replay(lambda: order.append("call"), "CUDA graph"), 2, lambda: order.append("flush"),
        effort=Effort(settle_seconds=0.0),
    )  # fmt: skip
    assert order[-10:] == ["flush", "sleep True", "event", "call", "event"] * 2
    assert taken == Timings([0.003, 0.003], None, "CUDA graph")


def test_clocks_settle_before_anything_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, calls = [0.0], [0]

    def call() -> None:
        clock[0] += 0.002
        calls[0] += 1

    monkeypatch.setattr(timing, "synchronize", lambda device: None)
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: clock[0], monotonic=lambda: clock[0]))
    # A device that counts 1e9 cycles a second.
    monkeypatch.setattr(timing, "_between_events", lambda call, cycles: timing._TRIED_CYCLES / 1e9)
    cycles = timing._settle(CUDA, call, Effort(), timing.ALONE)
    assert calls[0] * 0.002 >= 0.1
    assert cycles == pytest.approx(2 * 0.002 * 1e9)


@pytest.mark.parametrize(
    ("properties", "mib"),
    [
        ({"L2_cache_size": 60 << 20}, 60),
        ({"L2_cache_size": 4 << 20, "gcnArchName": "gfx942:sramecc+:xnack-"}, 256),
        ({"L2_cache_size": 6 << 20, "gcnArchName": "gfx1100"}, 96),
        ({"L2_cache_size": 8 << 20, "gcnArchName": "gfx90a:sramecc+:xnack-"}, 8),
    ],
)
def test_what_is_flushed_is_the_cache_of_the_architecture(
    monkeypatch: pytest.MonkeyPatch, properties: dict[str, Any], mib: int
) -> None:
    """torch reports 4 MiB of L2 on an MI300X, which has 256 MiB of Infinity Cache behind it."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(**properties))
    assert devices.last_level_cache_bytes(CUDA) == mib << 20


def test_a_virtual_machine_does_not_have_the_processors_whole_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices.psutil, "cpu_count", lambda: 2)
    assert devices.last_level_cache_bytes(CPU) <= 64 << 20


@pytest.mark.parametrize(("device", "seconds"), [("cpu", 0.5), ("meta", 2.0)])
def test_matrices_are_random(monkeypatch: pytest.MonkeyPatch, device: str, seconds: float) -> None:
    """A GPU multiplies constants faster than random numbers, and lowers its clock, so its median counts.

    A CPU's threads wait for other programs, so its fastest product counts: a prompt may find it idle.
    """
    seen: list[torch.Tensor] = []

    def timed(device: torch.device, call: Any, count: int, **options: Any) -> Timings:
        seen.extend(call.args)
        return Timings([9.0, 1.0, 2.0, 2.0, 0.5], None, "wall clock")

    monkeypatch.setattr(bandwidth, "time_calls", timed)
    rate, _ = bandwidth._matmul_rate(torch.device(device), torch.float32, Effort(matrix_width=64), 0.1)
    assert rate == 2 * 64**3 / seconds
    assert len(seen) == 2
    for matrix in seen if device == "cpu" else ():
        assert matrix.unique().numel() > 4000
        assert matrix.min() < 0 < matrix.max()


def test_a_roof_is_warmed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    taken = timing.time_calls(CPU, lambda: calls.append(1), 4)
    assert len(calls) == len(taken.seconds) + 3 == 7
    real = timing.time_call
    monkeypatch.setattr(timing, "time_call", lambda device, call: real(device, call) + 1)
    calls.clear()
    assert len(timing.time_calls(CPU, lambda: calls.append(1), 4, most_seconds=2.5).seconds) == 3
    assert len(calls) == 1 + 3


def test_the_roofs_buffer_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the allocator keeps gigabytes, and every run looks fragmented."""
    buffers: list[weakref.ref[torch.Tensor]] = []
    released: list[bool] = []
    fill = bandwidth.fill

    def note(buffer: torch.Tensor, *given: Any) -> None:
        buffers.append(weakref.ref(buffer))
        fill(buffer, *given)

    def release(device: torch.device) -> None:
        gc.collect()
        released.append(all(buffer() is None for buffer in buffers))

    monkeypatch.setattr(bandwidth, "fill", note)
    monkeypatch.setattr(bandwidth, "release", release)
    bandwidth.read_roof(CPU, torch.float32, Effort(1 << 20, 16))
    assert buffers
    assert released[-1:] == [True]


def test_the_traced_step_is_the_timed_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA, that is the replay of the graph, and not the same work launched again."""
    replay = graphs.Replay(lambda: None, "CUDA graph")
    timed: list[object] = []

    def time_calls(device: torch.device, call: object, *given: Any, **options: Any) -> Timings:
        timed.append(call)
        return Timings([1.0], None, "CUDA graph")

    monkeypatch.setattr(run, "prepare", lambda device, call, *given: replay)
    monkeypatch.setattr(run, "time_calls", time_calls)
    request = Request(8, 1, 2, DTYPES["fp32"], CUDA, 0)
    empty = Stack([], [], [])
    _, _, step = run.time_decode(empty, lambda n: torch.zeros(1, n, 4), request, lambda: None, lambda *given: None)
    assert timed == [replay]
    assert step is replay


@pytest.mark.parametrize("name", ["gpt2", "deepseek-v3"])
def test_the_allocators_rounding_is_part_of_what_is_expected(
    kvcalc: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """CUDA rounds each tensor up to 512 bytes, which fp8 rows, their scales and block tables do not fill."""
    from kvcalc.measure.layers import stack

    options = ("--layers", "1", "--context", "21", "--steps", "2", "--device", "cpu", "--hidden-size", "64",
               "--heads", "4", "--kv-heads", "2", "--head-dim", "8", "--kv-dtype", "fp8",
               "--block-size", "4", "--json")  # fmt: skip
    attention = ("--attention", "mla") if name == "deepseek-v3" else ()
    (found,) = kvcalc("measure", *options, *attention).json["runs"]
    assert found["allocator_bytes"] == found["expected_allocator_bytes"] > found["held_bytes"]
    monkeypatch.setattr(stack, "ALLOCATION_UNIT", {"cpu": 512})
    result = kvcalc("measure", *options, *attention)
    (rounded,) = result.json["runs"]
    assert rounded["expected_allocator_bytes"] % 512 == 0
    assert rounded["expected_allocator_bytes"] > found["expected_allocator_bytes"]
    assert any("the allocator reports" in warning["text"] for warning in result.json["warnings"])


def test_a_roof_that_rises_after_a_run_counts_for_every_run(kvcalc: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU that other programs slowed while its roof was measured."""
    from kvcalc.measure import runner

    def rises(roof: dict[str, Any], *ignored: object) -> None:
        roof["read_bytes_per_second"] *= 10

    monkeypatch.setattr(runner, "read_again", rises)
    options = ("--layers", "1", "--steps", "3", "--device", "cpu", "--hidden-size", "64", "--heads",
               "16", "--head-dim", "16", "--sweep", "context=64:128")  # fmt: skip
    document = kvcalc("measure", *options, "--json").json
    assert len(document["runs"]) == 2
    for row in document["runs"]:
        share = row["kv_read_bytes_per_second"] / document["roof"]["read_bytes_per_second"]
        assert row["fraction_of_roof"]["attention_core"] == pytest.approx(share)


def test_the_roof_that_binds_is_named(kvcalc: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many query heads on one KV stream are limited by arithmetic, and read as a bad kernel if only reading counts."""
    from kvcalc.measure import runner

    options = ("--layers", "1", "--context", "64", "--steps", "3", "--device", "cpu", "--hidden-size", "64", "--heads",
               "16", "--head-dim", "16", "--attention", "mqa", "--dtype", "fp32")  # fmt: skip
    roof = {"buffer_bytes": 1, "matmul_dtype": "float32"}
    for reads, multiplies, name in ((1e15, 1e12, "matmul"), (1e12, 1e15, "read")):
        given = {**roof, "read_bytes_per_second": reads, "matmul_flop_per_second": multiplies}
        monkeypatch.setattr(runner, "read_roof", lambda *ignored, given=given: given)
        monkeypatch.setattr(runner, "read_again", lambda *ignored: None)
        (found,) = kvcalc("measure", *options, "--json").json["runs"]
        seconds = found["attention_core_seconds"]["p50"]
        best = 64 * 2 * 16 * 4 / reads if name == "read" else 64 * 16 * 4 * 16 / multiplies
        assert found["binding_roof"]["attention_core"] == {"roof": name, "fraction": pytest.approx(best / seconds)}
        shares = {"read": found["fraction_of_roof"], "matmul": found["fraction_of_matmul_roof"]}
        for part in ("attention_core", "step"):
            binding = found["binding_roof"][part]
            assert binding["fraction"] == shares[binding["roof"]][part] == max(share[part] for share in shares.values())
        shown = kvcalc("measure", *options, "--format", "human").out
        assert f"% {name}" in shown


def test_a_record_names_clock_power_cache_and_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvcalc.measure.devices import environment

    asked: list[list[str]] = []

    def smi(command: list[str], **options: Any) -> Any:
        asked.append(command)
        return SimpleNamespace(stdout="1980, 3201, 412.53, [N/A]\n")

    monkeypatch.setattr(environment.subprocess, "run", smi)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="12ab", L2_cache_size=5)
    )
    assert environment._clocks_and_power(CUDA) == {
        "sm_clock_mhz": 1980, "memory_clock_mhz": 3201, "power_watts": 412.53, "power_limit_watts": None,
    }  # fmt: skip
    assert "--id=GPU-12ab" in asked[0]
    monkeypatch.setattr(environment.subprocess, "run", lambda *given, **options: 1 / 0)
    described = environment.describe_environment(CPU)
    assert {described[key] for key in ("sm_clock_mhz", "power_watts", "cudnn_version")} == {None}
    assert described["hip_version"] == torch.version.hip


def test_the_expected_time_is_corrected_by_what_was_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvcalc.measure import progress

    clock = [0.0]
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    follow = progress.Progress()
    assert follow.expected_seconds() is None
    clock[0] = 2.0
    follow.plan([progress.PlannedRun("MHA", {"weights": 1.0, "decode": 3.0})] * 2)
    assert follow.expected_seconds() == pytest.approx(2 + 8)
    follow.start(1)
    follow("weights", 1, 2)
    clock[0] = 4.0
    follow("decode", 0, 3)
    # The first of eight parts took two seconds instead of one.
    assert follow.expected_seconds() == pytest.approx(2 + 16)
    follow.start(2)
    clock[0] = 10.0
    assert follow.expected_seconds() == pytest.approx(2 + 16)
    follow("attention core", 3, 3)
    assert follow.expected_seconds() == pytest.approx(10)
    assert follow.elapsed_seconds() == 10


def test_each_run_is_one_line_where_nobody_watches(capsys: pytest.CaptureFixture[str]) -> None:
    from kvcalc.cli.app import run as command
    from tests.measure.quick import FAST

    assert command(["measure", *FAST, "--attention", "all", "--json"]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition("; ")[0] for line in lines] == [
        f"run {number} of 4: {kind}, 40 tokens, batch 1" for number, kind in enumerate(("MHA", "MQA", "GQA", "MLA"), 1)
    ]
    assert all(" of about 0:" in line for line in lines)


def test_the_bar_says_what_is_running(monkeypatch: pytest.MonkeyPatch) -> None:
    import io

    from rich.console import Console

    from kvcalc.cli import progress as shown
    from kvcalc.measure.progress import PlannedRun

    monkeypatch.setattr(
        shown, "Console", lambda stderr: Console(file=io.StringIO(), force_terminal=True, width=100, no_color=True)
    )
    with shown.Bar() as bar:
        bar.plan([PlannedRun("MHA, 40 tokens, batch 1", {"decode": 1.0}), PlannedRun("MQA", {"decode": 1.0})])
        bar.start(1)
        bar("decode", 3, 32)
        bar._bars.refresh()
        text = bar._bars.console.file.getvalue()
    assert "run 1 of 2: MHA, 40 tokens, batch 1: decode 4 of 32" in text
    assert "of about 0:0" in text
