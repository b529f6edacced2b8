"""The shipped records are readable, complete and anonymous, and the manual's table is made from them."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests import samples
from tests.conftest import ROOT

RECORDS = sorted((ROOT / "benchmarks" / "results").glob("*_*_*"))


@pytest.fixture(scope="module")
def records() -> ModuleType:
    return samples.records()


def test_there_are_records() -> None:
    assert RECORDS


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.name)
def test_a_record_is_sound_and_named_by_device_and_day(path: Path, records: ModuleType) -> None:
    from kvcalc.measure.compare import compare
    from kvcalc.measure.record import load

    record = load(str(path))
    case = path.stem.rsplit("_", 1)[1]
    assert path.name == records.name_of(record, case)
    gpu_cases = {f"{model}-{kv_dtype}" for model in records.GPU_LAYERS for kv_dtype in records.GPU_KV_DTYPES}
    assert case in {*records.CASES, *gpu_cases}
    for run in record["runs"]:
        assert run["predicted_bytes"] == run["held_bytes"] > 0
        assert run["verified"]["ok"]
    # The record can be compared, and nothing is missing.
    assert compare(record, record)["left_out"] == []
    assert not re.search(r"/home/|/root/|/tmp/|/work/|localhost|@", path.read_text())


def test_the_manuals_table_is_made_from_the_records(records: ModuleType) -> None:
    before, _, rest = (ROOT / "docs" / "measure.md").read_text().partition(records.BEGIN)
    assert before
    shown, found, _ = rest.partition(records.END)
    assert found
    assert shown.strip() == records.table()
    assert shown.count("\n| ") == sum(len(json.loads(path.read_text())["runs"]) for path in RECORDS) + 2 * shown.count(
        "| model |"
    )


def test_the_table_is_put_between_the_marks(records: ModuleType, tmp_path: Path) -> None:
    file = tmp_path / "page.md"
    file.write_text(f"before\n{records.BEGIN}\nold\n{records.END}\nafter\n")
    records.write(file)
    assert file.read_text() == f"before\n{records.BEGIN}\n\n{records.table()}\n\n{records.END}\nafter\n"
    file.write_text("no marks")
    with pytest.raises(SystemExit, match="are missing"):
        records.write(file)


def test_taking_names_the_file_by_what_the_record_says(
    records: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = ["--context", "64", "--batch", "1", "--steps", "2", "--layers", "1", "--dtype", "fp32"]
    monkeypatch.setattr(records, "RESULTS", tmp_path)
    monkeypatch.setattr(records, "COMMAND", (sys.executable, "-m", "tests.measure.quick"))
    monkeypatch.setitem(records.CASES, "tiny", ("gpt2",))
    records.take(["tiny"], "cpu", short)
    (path,) = tmp_path.iterdir()
    record: dict[str, Any] = json.loads(path.read_text())
    assert path.name == records.name_of(record, "tiny")
    assert "| gpt2 | MHA | 1 | 64 | 1 | fp32 | 393,216 |" in records.table()
