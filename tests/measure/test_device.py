"""Free memory, container limits, and the allocator's figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kvcalc.measure import bandwidth
from kvcalc.measure.devices import device as devices
from kvcalc.measure.devices.timing import Effort, summarize

CPU = torch.device("cpu")


def test_the_profiler_counts_what_was_allocated_to_the_byte() -> None:
    made, grown = devices.allocated_by(CPU, lambda: [torch.zeros(1000, dtype=torch.float16), torch.zeros(3)])
    assert len(made) == 2
    assert grown == 2000 + 12


def test_free_memory_is_a_positive_number_within_the_machines() -> None:
    described = devices.describe_device(CPU)
    assert 0 < described["free_bytes"] <= described["memory_bytes"]
    assert described["threads"] == torch.get_num_threads()
    assert described["name"]


def test_an_address_space_limit_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    import resource

    unlimited = devices.free_bytes(CPU)
    used = devices.psutil.Process().memory_info().vms
    monkeypatch.setattr(resource, "getrlimit", lambda which: (used + 50_000_000, used + 50_000_000))
    assert devices.free_bytes(CPU) <= 50_000_000 + 10_000_000 < unlimited
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1, 1))
    assert devices.free_bytes(CPU) == 0


def group(folder: Path, limit: str, used: int, inactive: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 1\ninactive_file {inactive}\n")


def with_groups(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    real = open

    def opened(path: object, *args: object, **options: object) -> object:
        if path == "/proc/self/cgroup":
            import io

            return io.StringIO(text)
        return real(path, *args, **options)  # type: ignore[call-overload]

    monkeypatch.setattr("builtins.open", opened)


def test_the_tightest_limit_of_the_control_groups_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_groups(monkeypatch, "0::/pod/container\n")
    group(tmp_path / "pod" / "container", "max", 5)
    group(tmp_path / "pod", "1000", 700, inactive=50)
    assert devices._cgroup_free(str(tmp_path)) == 1000 - 700 + 50
    group(tmp_path / "pod" / "container", "400", 300)
    assert devices._cgroup_free(str(tmp_path)) == 100


def test_version_1_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_groups(monkeypatch, "12:cpu,cpuacct:/x\n4:memory:/docker/abc\n")
    folder = tmp_path / "memory" / "docker" / "abc"
    folder.mkdir(parents=True)
    (folder / "memory.limit_in_bytes").write_text("900\n")
    (folder / "memory.usage_in_bytes").write_text("100\n")
    (folder / "memory.stat").write_text("inactive_file 10\n")
    assert devices._cgroup_free(str(tmp_path)) == 810


@pytest.mark.parametrize("text", ["", "0::/\n", "0::/gone\n"])
def test_no_limit_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    with_groups(monkeypatch, text)
    assert devices._cgroup_free(str(tmp_path)) is None


def test_roofs_are_as_large_as_the_device_needs_or_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bandwidth, "free_bytes", lambda device: 300 << 20)
    roof = bandwidth.read_roof(CPU, torch.bfloat16, Effort())
    assert roof["buffer_bytes"] == 75 << 20
    # The fastest of the two: CPUs without products in bf16 (no AVX512_BF16) are faster in fp32.
    assert roof["matmul_dtype"] in ("bfloat16", "float32")
    assert roof["read_bytes_per_second"] > 1e8
    assert roof["matmul_flop_per_second"] > 1e8
    assert bandwidth.read_roof(CPU, torch.float32, Effort(1 << 22, 64))["buffer_bytes"] == 1 << 22


def test_a_roof_only_rises() -> None:
    small = Effort(1 << 22, 64)
    roof = bandwidth.read_roof(CPU, torch.float32, small)
    slow: Any = {**roof, "read_bytes_per_second": 1.0}
    fast: Any = {**roof, "read_bytes_per_second": 1e18, "matmul_flop_per_second": 1e18}
    for given in (slow, fast):
        bandwidth.read_again(given, CPU, torch.float32, small)
    assert slow["read_bytes_per_second"] > 1e6
    assert slow["matmul_flop_per_second"] >= roof["matmul_flop_per_second"]
    assert (fast["read_bytes_per_second"], fast["matmul_flop_per_second"]) == (1e18, 1e18)


def test_percentiles_are_times_that_were_taken() -> None:
    assert summarize([3.0, 1.0, 2.0]) == {"p50": 2.0, "p90": 3.0, "min": 1.0, "n": 3, "spread": 1.0}
    assert summarize([5.0]) == {"p50": 5.0, "p90": 5.0, "min": 5.0, "n": 1, "spread": 0.0}
    assert summarize([float(n) for n in range(1, 101)])["p90"] == 90.0
    assert summarize([2.0, 1.0])["p50"] == 1.0
