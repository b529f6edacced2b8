"""Summarise the per-kernel latencies that aiconfigurator publishes: fixed times, read overheads, efficiencies.

    python benchmarks/fit/kernels/tables.py FOLDER [--write]

FOLDER is a checkout of github.com/ai-dynamo/aiconfigurator (Apache-2.0). Its kernel tables were measured one kernel at
a time, so they calibrate launches, reads, products and collectives without a serving run. Tables of whole serving runs
are not read. `--write` replaces benchmarks/results/kernel_tables.json; without it, the rows are printed.

For every device and engine, the newest release is summarised, and the oldest is compared with it at the same shapes.
Needs numpy and pyarrow: pip install -e '.[benchmarks]'.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.parquet as parquet

from benchmarks.fit.kernels import comparisons, summaries
from benchmarks.fit.kernels.columns import Device, Table
from benchmarks.fit.kernels.fits import rounded
from kvcalc.throughput.hardware import find_gpu

SOURCE = "https://github.com/ai-dynamo/aiconfigurator"
TARGET = Path(__file__).resolve().parents[2] / "results" / "kernel_tables.json"
DATA = Path("aic-core/src/aiconfigurator_core/systems/data")
# Their name of a device, kvcalc's preset, and the bytes of its L2 cache (NVIDIA's architecture whitepapers: Ampere,
# Hopper, Ada and Blackwell). Bandwidth, peaks and links are those of the presets. GB200 and GB300 are left out: they
# have the dies of the B200 and the B300.
DEVICES = {
    "a100_sxm": ("a100-sxm-80gb", 40e6),
    "h100_sxm": ("h100-sxm", 50e6),
    "h200_sxm": ("h200-sxm", 50e6),
    "b200_sxm": ("b200-sxm", 126e6),
    "b300_sxm": ("b300-sxm", 126e6),
    "l40s": ("l40s", 96e6),
    "rtx_pro_6000_server": ("rtx-pro-6000-server", 128e6),
}
# Of the B300, only dense layers are summarised, and the rarer kernels only of SAMPLES, so that the file stays small.
GEMM_ONLY = ("b300_sxm",)
SAMPLES = ("h200_sxm", "b200_sxm")
# Tables that no text model needs, or that repeat another table.
_SKIPPED = ("context", "encoder", "wideep", "calib")
NOTES = (
    "One kernel is repeated in a CUDA graph. Its fixed time includes the gap between kernels of a graph.",
    "vLLM's fp8_block layers are timed outside graphs: their fixed time is the host's.",
    "The vLLM 0.14 table of decode_mla is timed outside graphs too.",
    "A read_factor of 1 with an overhead below 1 means that the table repeats cached data.",
    "Experts on Hopper with FlashInfer CUTLASS (read_factor above 4) were timed without autotuning.",
    "Collectives on the L40S cross two sockets from four devices on.",
)


class Section(NamedTuple):
    """A section of the JSON: the folder and file of its tables, its summary and columns, and its column of dtypes."""

    name: str
    folder: str
    file: str
    summary: Callable[[Table], list[list[Any]]]
    columns: list[str]
    dtype: str


SECTIONS = (
    Section("gemm", "gemm", "gemm_perf", summaries.gemm, summaries.GEMM, "gemm_dtype"),
    Section(
        "decode_attention",
        "attention",
        "generation_attention_perf",
        summaries.decode_attention,
        summaries.DECODE_ATTENTION,
        "kv_cache_dtype",
    ),
    Section(
        "prefill_attention",
        "attention",
        "context_attention_perf",
        summaries.prefill_attention,
        summaries.PREFILL_ATTENTION,
        "kv_cache_dtype",
    ),
    Section("decode_mla", "mla", "generation_mla_perf", summaries.decode_mla, summaries.DECODE_MLA, "kv_cache_dtype"),
    Section("experts", "moe", "moe_perf", summaries.experts, summaries.EXPERTS, "moe_dtype"),
    Section(
        "collectives", "comm", "custom_allreduce_perf", comparisons.collectives, comparisons.COLLECTIVES, "backend"
    ),
    Section("collectives", "comm", "nccl_perf", comparisons.collectives, comparisons.COLLECTIVES, "op_name"),
)
_SUMMARISED = {section.file for section in SECTIONS}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a checkout of ai-dynamo/aiconfigurator")
    parser.add_argument("--write", action="store_true", help=f"replace {TARGET.name}")
    options = parser.parse_args()
    if not (options.folder / DATA).is_dir():
        print(f"{options.folder}: no folder {DATA}\ntry: git clone {SOURCE}", file=sys.stderr)
        return 2
    document = summarise(options.folder)
    text = as_json(document)
    if options.write:
        TARGET.write_text(text)
        print(f"{TARGET.name}: {len(text):,} bytes")
    else:
        print(text, end="")
    return 0


def summarise(folder: Path) -> dict[str, Any]:
    """The document: its source, commit and licence, and a table per section."""
    return {
        "source": SOURCE,
        "commit": commit_of(folder),
        "licence": "Apache-2.0",
        "date": date.today().isoformat(),
        "written_by": "benchmarks/fit/kernels/tables.py",
        "units": "us: microseconds; overheads, factors, efficiencies and ratios are relative to the preset's figures",
        "notes": NOTES,
        **sections(folder / DATA),
    }


def sections(data: Path) -> dict[str, Any]:
    """Every section: its columns, and its rows by "device engine release"."""
    found: dict[str, dict[str, Any]] = {}
    for section in SECTIONS:
        rows = found.setdefault(section.name, {"columns": section.columns, "rows": []})["rows"]
        for releases in tables(data, section.folder, section.file, () if section.name == "gemm" else GEMM_ONLY):
            rows += section.summary(releases[-1]())
    others = found["other"] = {"columns": comparisons.OTHER, "rows": []}
    for folder, file in sorted({(path.parts[-4], path.stem) for path in data.glob("*/*/*/*/*_perf.parquet")}):
        if file not in _SUMMARISED and not any(word in file for word in _SKIPPED):
            for releases in tables(data, folder, file, [device for device in DEVICES if device not in SAMPLES]):
                others["rows"] += comparisons.other(releases[-1](), file.removesuffix("_perf"))
    ratios = found["releases"] = {"columns": comparisons.RELEASES, "rows": []}
    for section in SECTIONS:
        for releases in tables(data, section.folder, section.file, GEMM_ONLY):
            if len(releases) > 1:
                name = section.file.removesuffix("_perf")
                ratios["rows"] += comparisons.release_ratio(releases[0](), releases[-1](), name, section.dtype)
    return {name: {**part, "rows": by_release(part["rows"])} for name, part in found.items()}


def by_release(rows: list[list[Any]]) -> dict[str, list[list[Any]]]:
    """The rows by their device, engine and release, which are their first three values; three digits per number."""
    grouped: dict[str, list[list[Any]]] = {}
    for device, engine, release, *values in rows:
        grouped.setdefault(f"{device} {engine} {release}", []).append(rounded(values))
    return grouped


def tables(data: Path, group: str, file: str, without: Sequence[str] = ()) -> Iterator[list[Callable[[], Table]]]:
    """For every device and engine, a reader per release that has this table, the oldest release first.

    A release whose table has less than a tenth of the rows of the longest is left out: it completes another release.
    """
    for folder, (preset, l2_bytes) in DEVICES.items():
        for engine in sorted((data / folder / group).glob("*")) if folder not in without else ():
            paths = sorted(engine.glob(f"*/{file}.parquet"), key=lambda path: release_key(path.parent.name))
            counts = [parquet.read_metadata(path).num_rows for path in paths]
            paths = [path for path, count in zip(paths, counts) if count * 10 >= max(counts)]
            if paths:
                device = device_of(preset, l2_bytes)
                yield [_reader(device, engine.name, path) for path in paths]


def _reader(device: Device, engine: str, path: Path) -> Callable[[], Table]:
    def read() -> Table:
        table = parquet.read_table(path)
        columns = {name: table.column(name).to_numpy() for name in table.column_names}
        return Table(device, engine, path.parent.name, columns)

    return read


def device_of(preset: str, l2_bytes: float) -> Device:
    gpu = find_gpu(preset)
    link = gpu.interconnect.bytes_per_second if gpu.interconnect else gpu.pcie_bytes_per_second
    peaks = {name: float(value) for name, value in gpu.flops_per_second.items()}
    return Device(gpu.name, float(gpu.bandwidth_bytes_per_second), peaks, l2_bytes, float(link or 0))


def release_key(release: str) -> tuple[Any, ...]:
    """Sort releases as numbers: 0.5.9 before 0.5.10, 1.3.0rc10 before 1.3.0rc20, 0.5.6 before 0.5.6.post2."""
    return tuple(int(part) for part in re.findall(r"\d+", release))


def commit_of(folder: Path) -> str | None:
    """The commit of the checkout, or None if it is not one."""
    found = subprocess.run(["git", "-C", str(folder), "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return found.stdout.strip() or None


def as_json(document: dict[str, Any]) -> str:
    """JSON with one row of a table per line, so that a change shows as a few lines."""
    parts = []
    for key, value in document.items():
        if isinstance(value, dict) and "rows" in value:
            columns = json.dumps(value["columns"])
            rows = ",\n".join(
                f"{json.dumps(head)}: [\n" + ",\n".join(json.dumps(row, separators=(",", ":")) for row in group) + "]"
                for head, group in value["rows"].items()
            )
            parts.append(f'"{key}": {{"columns": {columns},\n"rows": {{\n{rows}\n}}}}')
        else:
            parts.append(f'"{key}": {json.dumps(value)}')
    return "{\n" + ",\n".join(parts) + "\n}\n"


if __name__ == "__main__":
    sys.exit(main())
