"""Devices: every file is valid, found by all its names but not by parts of them, and custom devices are as given."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from kvcalc.errors import GpuError, UsageError
from kvcalc.throughput import hardware
from kvcalc.throughput.hardware import (
    all_gpus,
    find_devices,
    find_gpu,
    fold,
    gpus_folder,
    load_gpu,
    own_gpu,
)
from tests.rows import every_row

GOOD = """\
name: tiny
vendor: NVIDIA
aliases: ["7"]
source: a datasheet
date: 2024-01-31
device_class: hopper
memory: 79.10GiB
memory_type: HBM3
bandwidth_gb_per_second: 3350
dense_tflops:
  bf16: 989.4
"""


@pytest.mark.parametrize(
    "name",
    (
        "rx-7900-xtx rx-7900-xt rtx-3060 rtx-3080 rtx-3080-ti rtx-3090 rtx-4060-ti rtx-4070 rtx-4070-super rtx-4070-ti "
        "rtx-4070-ti-super rtx-4080 rtx-4080-super rtx-4090 rtx-5060-ti rtx-5070 rtx-5070-ti rtx-5080 rtx-5090 p40 "
        "v100 t4 a10g l20 h20 h800 gb300 mi350x m5 m5-pro m5-max dgx-spark "
        "rtx-pro-4000 rtx-pro-4500 rtx-pro-5000 rtx-pro-5000-72gb rtx-a5000 rtx-4090-48gb rtx-3070 mi50 mi50-32gb "
        "mi100 p100 w7900 b60 b70 jetson-agx-orin jetson-agx-orin-32gb jetson-thor a800"
    ).split(),
)
def test_a_card_that_people_run_models_on_has_a_speed(name: str) -> None:
    gpu = find_gpu(name)
    assert gpu.memory_bytes >= 8 << 30
    assert gpu.bandwidth_bytes_per_second
    assert gpu.flops_per_second


def test_cards_of_8_gb_are_there() -> None:
    for name in ("rtx-4060", "rtx-4060-ti-8gb"):
        assert find_gpu(name).memory_bytes == 8188 << 20
    assert find_gpu("rtx-4060-ti").memory_bytes == 16 << 30


def test_compute_of_the_rtx_pro_cards_is_what_is_published() -> None:
    # fp32, in TFLOPS: huggingface.js (packages/tasks/src/hardware-nvidia.ts), and a 32th of the 5000's AI TOPS.
    for name, tflops in {"rtx-pro-4000": 36.8, "rtx-pro-4500": 50.5, "rtx-pro-5000": 64.5}.items():
        assert find_gpu(name).flops_per_second["fp32"] == pytest.approx(tflops * 1e12)
        assert find_gpu(name).flops_per_second["bf16"] == pytest.approx(4 * tflops * 1e12, rel=2e-3)


def test_no_published_table_has_the_int8_of_jetson_thor() -> None:
    assert "int8" not in find_gpu("jetson-thor").flops_per_second


def test_an_unknown_device_can_be_described() -> None:
    with pytest.raises(GpuError) as refused:
        find_gpu("rtx-508")
    assert "--gpu-memory 80GB --gpu-bandwidth 3.35TB/s --flops 989T" in (refused.value.hint or "")


def test_the_devices_people_name_are_there() -> None:
    assert len(all_gpus()) >= 30
    for name, real in {
        "a100": "a100-sxm-80gb", "h100": "h100-sxm", "h200": "h200-sxm", "b200": "b200-sxm", "b300": "b300-sxm",
        "gb200": "gb200", "gb300": "gb300", "l40s": "l40s", "mi300x": "mi300x", "H100_SXM": "h100-sxm",
        "NVIDIA H100 80GB HBM3": "h100-sxm", "NVIDIA A100-SXM4-80GB": "a100-sxm-80gb", "RTX 4090": "rtx-4090",
        "NVIDIA GeForce RTX 4090": "rtx-4090", "4090": "rtx-4090", "Tesla V100-SXM2-32GB": "v100-sxm-32gb",
        "AMD Instinct MI300X": "mi300x", "Apple M2 Ultra": "m2-ultra", "dgx-spark": "gb10", "tpu v5e": "tpu-v5e",
    }.items():  # fmt: skip
        assert find_gpu(name).name == real


def test_no_name_or_alias_stands_twice_and_files_are_called_like_their_device() -> None:
    names: dict[str, str] = {}
    for gpu in all_gpus():
        assert (Path(gpus_folder()) / f"{gpu.name}.yaml").is_file()
        for name in (gpu.name, *gpu.aliases):
            assert fold(name) not in names, f"{name}: {gpu.name} and {names.get(fold(name))}"
            names[fold(name)] = gpu.name
            assert find_gpu(name) == gpu


@every_row("name", [gpu.name for gpu in all_gpus()])
def test_each_device_is_plausible_and_states_its_source(name: str) -> None:
    found = find_gpu(name)
    assert found.source
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", found.date or "")
    assert 2 * 2**30 <= found.memory_bytes <= 512 * 2**30
    assert 50e9 <= found.bandwidth_bytes_per_second <= 10e12
    flops = found.flops_per_second
    assert "bf16" in flops or "fp16" in flops
    # Dense figures: a narrower type is about twice as fast, and fp4 up to four times (RTX 5090).
    half = flops.get("bf16", flops.get("fp16", 0))
    assert half <= 2.6e15
    assert flops.get("fp8", half) <= 2.05 * half
    assert flops.get("fp4", 0) <= 4.1 * flops.get("fp8", half)
    if found.interconnect:
        assert 100e9 <= found.interconnect.bytes_per_second <= 1e12
        assert found.interconnect.devices >= 2


@pytest.mark.parametrize("name", ["h10", "h1000", "rtx-a40", "a4", "", "sxm", "nvidia", "x8", "h100x0x", "hopper"])
def test_parts_of_names_are_no_names(name: str) -> None:
    with pytest.raises(GpuError) as caught:
        find_devices(name)
    assert caught.value.exit_code == 3
    assert caught.value.hint


def test_an_unknown_device_is_answered_with_the_nearest() -> None:
    with pytest.raises(GpuError, match="'h100-sxn' is not known") as caught:
        find_gpu("h100-sxn")
    assert "h100-sxm" in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("text", "device", "number"),
    [
        ("h100:8", "h100-sxm", 8), ("8xh100", "h100-sxm", 8), ("h100x8", "h100-sxm", 8), ("rtx-4090:2", "rtx-4090", 2),
        ("p5.48xlarge", "h100-sxm", 8), ("p4d.24xlarge", "a100-sxm-40gb", 8), ("g5.xlarge", "a10g", 1),
        ("g6.xlarge", "l4", 1), ("g6e.12xlarge", "l40s", 4), ("a3-highgpu-8g", "h100-sxm", 8),
        ("a2-highgpu-1g", "a100-sxm-40gb", 1), ("g2-standard-4", "l4", 1), ("Standard_ND96isr_H100_v5", "h100-sxm", 8),
        ("NC24ads_A100_v4", "a100-pcie-80gb", 1), ("standard_nc24ads_a100_v4", "a100-pcie-80gb", 1),
        ("p5.48xlarge:2", "h100-sxm", 16),
    ],
)  # fmt: skip
def test_a_number_and_a_machine_of_a_cloud_are_devices(text: str, device: str, number: int) -> None:
    gpu, num_devices = find_devices(text)
    assert (gpu.name, num_devices) == (device, number)


@pytest.mark.parametrize("text", ["p5.49xlarge", "h100:", ":8", "h100:x", "g2-standard-5", "24", "24G", "0GB", "24GBx"])
def test_what_is_no_machine_and_no_size_is_refused(text: str) -> None:
    with pytest.raises((GpuError, UsageError)):
        find_devices(text)


@pytest.mark.parametrize(
    ("text", "memory", "number"), [("24GB", 24 * 10**9, 1), ("24 GiB", 24 << 30, 1), ("2x80GB", 80 * 10**9, 2)]
)
def test_a_size_is_a_device_of_which_only_the_memory_is_known(text: str, memory: int, number: int) -> None:
    gpu, num_devices = find_devices(text)
    assert (gpu.name, gpu.memory_bytes, num_devices) == ("custom", memory, number)
    assert not gpu.flops_per_second
    assert not gpu.bandwidth_bytes_per_second


def test_h100_as_published() -> None:
    gpu = find_gpu("h100")
    assert gpu.bandwidth_bytes_per_second == 3_350_000_000_000
    assert gpu.flops_per_second["bf16"] == 989_400_000_000_000
    assert gpu.interconnect == ("NVLink 4", 450_000_000_000, 8, False)
    assert gpu.memory_bytes == 80_999 * 2**20


def test_several_devices() -> None:
    assert find_devices("h100") == (find_gpu("h100-sxm"), 1)
    for text in ("h100x8", "H100X8", "8xh100"):
        assert find_devices(text) == (find_gpu("h100-sxm"), 8)
    assert find_devices("mi300x") == (find_gpu("mi300x"), 1)
    assert find_devices("mi300xx4").num_devices == 4
    with pytest.raises(UsageError):
        find_devices("h100x0")


def test_a_device_of_ones_own() -> None:
    own = own_gpu(None, 80 * 10**9, 2 * 10**12, None)
    assert (own.memory_bytes, own.bandwidth_bytes_per_second, own.flops_per_second) == (80 * 10**9, 2 * 10**12, {})
    with pytest.raises(UsageError):
        own_gpu(None, None, 2 * 10**12, None)
    base = find_gpu("h100")
    assert own_gpu(base, None, None, None) == base
    faster = own_gpu(base, None, None, 2 * 989_400_000_000_000)
    assert faster.flops_per_second["fp8"] == 2 * base.flops_per_second["fp8"]
    assert faster.memory_bytes == base.memory_bytes
    assert "options" in faster.source


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("vendor: NVIDIA\n", ""),
        ("memory: 79.10GiB", "memory: lots"),
        ("memory: 79.10GiB", "memory: 79"),
        ("bf16: 989.4", "bf17: 989.4"),
        ("bf16: 989.4", "bf16: fast"),
        ("bandwidth_gb_per_second: 3350", "bandwidth_gb_per_second: -1"),
        ("memory_type: HBM3", "memory_type: HBM3\nlinks: 3"),
        ("memory_type: HBM3", "memory_type: HBM3\ninline_ecc: 1"),
        ('aliases: ["7"]', "aliases: [7]"),
        ("dense_tflops:\n  bf16: 989.4\n", "dense_tflops: 3\n"),
        ("dense_tflops:", "interconnect: NVLink\ndense_tflops:"),
    ],
)
def test_a_spoilt_file_is_refused(tmp_path: Path, line: str, wrong: str) -> None:
    assert line in GOOD
    path = tmp_path / "tiny.yaml"
    path.write_text(GOOD)
    assert load_gpu(str(path)).aliases == ("7",)
    path.write_text(GOOD.replace(line, wrong))
    with pytest.raises(GpuError):
        load_gpu(str(path))


def test_data_centre_cards_with_gddr_read_slower_because_of_their_ecc() -> None:
    found = {gpu.name for gpu in all_gpus() if gpu.inline_ecc}
    assert found == {"a10", "a10g", "a40", "l20", "l4", "l40", "l40s", "t4"}
    for gpu in all_gpus():
        assert gpu.read_bytes_per_second * (1.17 if gpu.inline_ecc else 1) == pytest.approx(
            gpu.bandwidth_bytes_per_second
        )
        # It takes a sixteenth of the memory.
        gib = gpu.memory_bytes / 2**30
        assert not gpu.inline_ecc or gib < 15 / 16 * (-(-gib // 8) * 8)


def test_compiled_copies_say_what_the_files_say() -> None:
    compiled = Path(gpus_folder()).with_name("compiled") / "gpus"
    if not compiled.is_dir():
        pytest.skip("kvcalc runs from a checkout that was never installed")
    for copy in compiled.glob("[a-z]*.json"):
        text = (Path(gpus_folder()) / f"{copy.stem}.yaml").read_text(encoding="utf-8")
        assert json.loads(copy.read_text())["text"] == text


@pytest.mark.parametrize("listed", ['{"l4": ["h100"]}', "[]", '{"l4": 3}', "{", '{"nothing-such": ["h100"]}', "{}"])
def test_a_list_of_aliases_that_is_old_or_damaged_misleads_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listed: str
) -> None:
    folder = tmp_path / "gpus"
    folder.mkdir()
    for name in ("h100-sxm", "l4"):
        (folder / f"{name}.yaml").write_text((Path(gpus_folder()) / f"{name}.yaml").read_text())
    (tmp_path / "compiled" / "gpus").mkdir(parents=True)
    (tmp_path / "compiled" / "gpus" / "_aliases.json").write_text(listed)
    monkeypatch.setattr(hardware, "gpus_folder", lambda: str(folder))
    hardware._look_up.cache_clear()
    try:
        assert find_gpu("h100").name == "h100-sxm"
        with pytest.raises(GpuError):
            find_gpu("h200")
    finally:
        hardware._look_up.cache_clear()
