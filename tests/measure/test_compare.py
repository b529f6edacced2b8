"""The ratios of figures that mean the same in two records, and the reason for every figure that is left out."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvcalc.measure.compare import compare
from tests.conftest import ROOT
from tests.documents import texts, validate


@pytest.fixture
def pair(taken: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    return copy.deepcopy(taken), copy.deepcopy(taken)


def ratios(document: dict[str, Any], kind: str | None) -> dict[str, Any]:
    return {row["figure"]: row["ratio"] for row in document["figures"] if row["attention"] == kind}


def check(document: dict[str, Any]) -> None:
    validate(document, "measure_compare")


def test_a_record_and_itself_have_ratio_one_in_every_figure(pair: Any) -> None:
    document = compare(*pair)
    check(document)
    # The CPU clock may be too coarse for such a small step and report 0.
    assert {row["ratio"] for row in document["figures"] if row["a"]} == {1.0}
    assert (document["differences"], document["left_out"], texts(document)) == ([], [], [])
    assert {row["attention"] for row in document["figures"]} == {None, "mha", "mqa", "gqa", "mla"}
    assert {"decode_step_seconds.p50", "held_bytes", "fraction_of_roof.step"} <= set(ratios(document, "gqa"))
    # Counts, errors and tolerances are not figures.
    assert not any(name.endswith((".n", "error", "tolerance", "layers")) for name in ratios(document, "gqa"))


def test_ratios_are_b_over_a(pair: Any) -> None:
    a, b = pair
    b["runs"][2]["decode_step_seconds"]["p50"] = 3 * a["runs"][2]["decode_step_seconds"]["p50"]
    b["roof"]["read_bytes_per_second"] = a["roof"]["read_bytes_per_second"] / 4
    document = compare(a, b)
    assert ratios(document, "gqa")["decode_step_seconds.p50"] == pytest.approx(3)
    assert ratios(document, None) == {
        "roof.read_bytes_per_second": pytest.approx(0.25),
        "roof.matmul_flop_per_second": 1,
    }


def test_another_device_leaves_times_comparable_and_is_named(pair: Any) -> None:
    a, b = pair
    b["device"]["name"], b["environment"]["libraries"]["torch"] = "NVIDIA H200", "2.14.0"
    b["environment"]["taken_at"], b["device"]["free_bytes"] = "2030-01-01T00:00:00Z", 1
    b["runs"][1]["backend"] = "another"
    document = compare(a, b)
    check(document)
    assert [row["path"] for row in document["differences"]] == [
        "runs.mqa.backend", "device.name", "environment.libraries.torch"
    ]  # fmt: skip
    assert document["differences"][1]["b"] == "NVIDIA H200"
    assert "decode_step_seconds.p50" in ratios(document, "mqa")


@pytest.mark.parametrize(
    ("part", "key", "value"),
    [
        ("model", "num_attention_heads", 16),
        ("model", "hidden_size", 128),
        ("workload", "context_tokens", 80),
        ("workload", "batch_size", 2),
        ("workload", "dtype", "bf16"),
        ("workload", "tensor_parallel_size", 2),
        ("workload", "a_key_of_a_later_version", "on"),
    ],
)
def test_of_different_work_only_rates_are_compared(pair: Any, part: str, key: str, value: object) -> None:
    a, b = pair
    b[part][key] = value
    document = compare(a, b)
    check(document)
    found = set(ratios(document, "mha"))
    assert {"kv_read_bytes_per_second", "fraction_of_roof.attention_core", "fraction_of_roof.step"} <= found
    assert all(
        name.split(".")[-1].endswith(("bytes_per_second", "flop_per_second")) or name.startswith("fraction_of_")
        for name in found
    )
    assert "tokens_per_second" in ratios(compare(a, a), "mha")
    assert document["differences"][0]["path"] == f"{part}.{key}"
    assert {"attention": "mha", "reason": "times and bytes are from different work"} in document["left_out"]


def test_fewer_layers_are_different_work_and_a_name_or_a_seed_is_not(pair: Any) -> None:
    a, b = pair
    b["model"]["name"], b["workload"]["seed"], b["workload"]["steps"] = "another", 5, 8
    assert "held_bytes" in ratios(compare(a, b), "mha")
    b["runs"][0]["num_layers"] = 1
    document = compare(a, b)
    assert "held_bytes" not in ratios(document, "mha")
    assert "held_bytes" in ratios(document, "gqa")
    assert {"path": "runs.mha.num_layers", "a": 2, "b": 1} in document["differences"]


def test_what_failed_its_check_and_what_only_one_has_is_left_out_with_the_reason(pair: Any) -> None:
    a, b = pair
    a["runs"][0]["verified"]["ok"] = False
    b["runs"][1]["held_bytes"] += 1
    del b["runs"][3]
    a["runs"].remove(a["runs"][2])
    b["runs"].append({**b["runs"][0], "attention": "other"})
    a["runs"].append({**a["runs"][1], "attention": "other"})
    document = compare(a, b, ("a.json", "b.json"))
    assert document["left_out"] == [
        {"attention": "mha", "reason": "in a.json the self-check failed"},
        {"attention": "mqa", "reason": "in b.json the held bytes differ from the predicted bytes"},
        {"attention": "mla", "reason": "not in b.json"},
        {"attention": "gqa", "reason": "not in a.json"},
    ]
    assert {row["attention"] for row in document["figures"]} == {None, "other"}


def test_nothing_in_common_is_a_usage_error(kvcalc: Any, pair: Any, tmp_path: Path) -> None:
    a, b = pair
    a["runs"], b["runs"] = a["runs"][:1], b["runs"][1:2]
    for name, document in (("a.json", a), ("b.json", b)):
        (tmp_path / name).write_text(json.dumps(document))
    result = kvcalc("measure", "--compare", tmp_path / "a.json", tmp_path / "b.json")
    assert (result.status, result.out) == (2, "")
    assert "have no figure in common" in result.err
    assert "mha: not in " in result.err


def test_what_is_no_number_in_a_strange_record_is_no_figure(pair: Any) -> None:
    a, b = pair
    a["runs"][0]["decode_step_seconds"] = None
    b["runs"][0]["kv_read_bytes_per_second"] = "fast"
    a["runs"][0]["fraction_of_roof"]["step"] = True
    a["runs"][0]["attention_core_seconds"]["p50"] = 0
    a["runs"][0]["verified"]["extra_seconds"] = [1]
    del a["environment"]
    document = compare(a, b)
    check(document)
    found = ratios(document, "mha")
    assert not {"decode_step_seconds.p50", "kv_read_bytes_per_second", "fraction_of_roof.step"} & set(found)
    assert found["attention_core_seconds.p50"] is None
    assert texts(document) == ["A has no environment: driver and versions are unknown"]


def test_every_format(kvcalc: Any, pair: Any, tmp_path: Path) -> None:
    a, b = pair
    b["device"]["name"] = "another"
    b["runs"][0]["num_layers"] = 1
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    for path, document in zip(paths, pair):
        path.write_text(json.dumps(document))
    command = ("measure", "--compare", *paths)
    assert kvcalc(*command, "--json").json == compare(a, b, (str(paths[0]), str(paths[1])))
    rows = kvcalc(*command, "--format", "tsv").out.splitlines()
    assert rows[0].split("\t") == ["attention", "figure", "a", "b", "ratio"]
    assert len(rows) == 1 + len(compare(a, b)["figures"])
    human = kvcalc(*command, "--format", "human").out
    assert "device.name" in human
    assert "B/A" in human
    assert "MHA left out: times and bytes are from different work" in human
    assert kvcalc(*command, "--get", "figures.0.ratio").out == "1.0\n"
    assert kvcalc(*command, "--get", "runs.0").status == 2


@pytest.mark.parametrize(
    ("options", "named"),
    [(("gpt2",), "MODEL"), (("--save", "x"), "--save"), (("--context", "64"), "--context"), (("--tp", "1"), "--tp")],
)
def test_what_only_a_run_has_is_refused_beside_it(kvcalc: Any, options: tuple[str, ...], named: str) -> None:
    result = kvcalc("measure", *options, "--compare", "a.json", "b.json")
    assert (result.status, result.out) == (2, "")
    assert f"remove {named}" in result.err


def test_a_missing_record_is_named(kvcalc: Any, tmp_path: Path) -> None:
    result = kvcalc("measure", "--compare", tmp_path / "none.json", tmp_path / "none.json")
    assert result.status == 2
    assert result.err.startswith(f"kvcalc: {tmp_path}/none.json: No such file")


def test_records_are_compared_without_torch(pair: Any, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(pair[0]))
    code = (
        "import sys; sys.modules['torch'] = sys.modules['psutil'] = None\n"
        "from kvcalc.cli.app import run; sys.exit(run(['measure', '--compare', 'a.json', 'a.json', '--json']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path,
                          env={"PYTHONPATH": str(ROOT)})  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["figures"]
