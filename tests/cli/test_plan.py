"""`kvcalc plan` as typed: the rows, the flags to paste, the exit codes, and bad options."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import spawn

ASK = ("plan", "llama-3.1-8b", "--input-tokens", "2k", "--output-tokens", "500")


def test_one_row_a_device_in_every_format(kvcalc: Any) -> None:
    options = ("--concurrency", "64", "--gpu", "h100", "--gpu", "l40s")
    document = kvcalc(*ASK, *options, "--json").json
    assert [row["gpu"] for row in document["plans"]] == ["h100-sxm", "l40s"]
    lines = kvcalc(*ASK, *options, "--format", "tsv").out.splitlines()
    assert [line.split("\t")[:2] for line in lines] == [
        ["model", "gpu"], ["llama-3.1-8b", "h100-sxm"], ["llama-3.1-8b", "l40s"],
    ]  # fmt: skip
    assert kvcalc(*ASK, *options, "--get", "plans.0.num_devices").out == f"{document['plans'][0]['num_devices']}\n"


def test_the_commands_a_person_sees_are_the_documents(kvcalc: Any) -> None:
    options = ("--concurrency", "64", "--gpu", "h100")
    row = kvcalc(*ASK, *options, "--json").json["plans"][0]
    out = kvcalc(*ASK, *options, "--format", "human").out
    shown = " ".join(out.replace("\\\n", " ").split())
    assert row["vllm"] in shown
    assert "sglang" not in shown
    assert max(map(len, out.splitlines())) <= 80


def test_devices_come_from_the_prices_where_none_is_named(kvcalc: Any) -> None:
    document = kvcalc(*ASK, "--concurrency", "8", "--price", "h100=2", "--price", "l4=0.5", "--json").json
    assert [row["gpu"] for row in document["plans"]] == ["h100-sxm", "l4"]
    assert len(kvcalc(*ASK, "--concurrency", "8", "--json").json["plans"]) == 6


def test_lists_are_separated_by_commas_or_repeated(kvcalc: Any) -> None:
    options = ("--concurrency", "8", "--price", "h100=2", "--price", "l4=0.5", "--json")
    repeated = kvcalc(*ASK, *options, "--gpu", "h100", "--gpu", "l4", "--engine", "vllm", "--engine", "sglang").json
    commas = kvcalc(*ASK, "--concurrency", "8", "--price", "h100=2,l4=0.5", "--json", "--gpu", "h100,l4",
                    "--engine", "vllm,sglang").json  # fmt: skip
    assert commas == repeated
    assert [(row["gpu"], row["engine"]) for row in commas["plans"]] == [
        (gpu, engine) for gpu in ("h100-sxm", "l4") for engine in ("vllm", "sglang")
    ]
    assert commas["best"] in commas["plans"]


def test_a_number_limits_the_devices_of_its_kind(kvcalc: Any) -> None:
    words = ("plan", "llama-3-70b", *ASK[2:], "--concurrency", "200", "--json")
    rows = kvcalc(*words, "--gpu", "h100x1,h100x4,h100x8").json["plans"]
    assert [row["fits"] for row in rows] == [False, False, True] or [row["fits"] for row in rows] == [False, True, True]
    assert all(row["num_devices"] <= most for row, most in zip(rows, (1, 4, 8)) if row["fits"])


def test_a_config_from_stdin_or_a_file_has_a_placeholder(tmp_path: Path) -> None:
    config = (
        '{"model_type": "llama", "num_hidden_layers": 4, "num_attention_heads": 8, "hidden_size": 512,'
        '"vocab_size": 99, "intermediate_size": 1024, "max_position_embeddings": 8192, "torch_dtype": "bfloat16"}'
    )
    (tmp_path / "config.json").write_text(config)
    for model in ("-", tmp_path, tmp_path / "config.json"):
        result = spawn("plan", model, *ASK[2:], "--concurrency", "2", "--gpu", "l4", "--format", "human", stdin=config)
        assert result.status == 0, result.err
        assert "vllm serve '<your checkpoint>' " in result.out
        assert result.err.count("the commands name no checkpoint") == 1


def test_the_range_and_where_it_is_judged_are_on_the_screen(kvcalc: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    words = (*ASK, "--concurrency", "8", "--max-tpot", "50ms", "--max-ttft", "2s", "--format", "human")
    for columns in ("80", "120"):
        monkeypatch.setenv("COLUMNS", columns)
        for more in ((), ("--price", "h100=2.5"), ("--engine", "vllm,sglang", "--gpu", "h100,a100,mi300x")):
            out = kvcalc(*words, *more).out
            assert "TTFT <= 2 s and TPOT <= 50 ms, judged at 65% confidence" in " ".join(out.split())
            assert "80% range" in out.partition("\n\n")[2].splitlines()[0]
            assert max(map(len, out.splitlines())) <= int(columns)
    assert "judged at 50% confidence, the estimate\n" in kvcalc(*words, "--confidence", "50").out
    percentile = (*words[:-4], "--max-ttft", "2s@p90", "--requests", "100", "--confidence", "65")
    assert "simulated with steps judged at 65% confidence\n" in kvcalc(*percentile, "--format", "human").out


def test_what_fits_nowhere_is_said_once(kvcalc: Any) -> None:
    result = kvcalc("plan", "gpt2", *ASK[2:], "--concurrency", "4", "--format", "human")
    assert result.status == 4
    assert (result.out + result.err).count("exceed the limit") == 1
    allowed = kvcalc("plan", "gpt2", *ASK[2:], "--concurrency", "4", "--allow-beyond-limit")
    assert allowed.status == 0
    assert allowed.err.count("exceed the limit") == 1


def test_a_file_of_lengths(kvcalc: Any, tmp_path: Path) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text("prompt,answer\n1000,100\n3000,300\n")
    document = kvcalc("plan", "llama-3.1-8b", "--lengths", path, "--concurrency", "8", "--gpu", "l40s", "--json").json
    assert document["lengths"] == {
        "input_tokens": 2000, "output_tokens": 200, "longest_tokens": 3300, "held_tokens": 2750, "num_requests": 2,
        "file": str(path),
    }  # fmt: skip
    human = kvcalc(
        "plan", "llama-3.1-8b", "--lengths", path, "--concurrency", "8", "--gpu", "l40s", "--format", "human"
    )
    assert "means of 2" in human.out


def test_status_4_with_the_document_and_what_is_missing(kvcalc: Any) -> None:
    result = kvcalc("plan", "llama-3-70b", *ASK[2:], "--concurrency", "8", "--gpu", "t4", "--max-gpus", "4", "--json")
    assert result.status == 4
    assert json.loads(result.out)["best"] is None
    assert "does not fit" in result.err
    assert len(result.err.splitlines()) <= 2


@pytest.mark.parametrize(
    ("arguments", "status", "word"),
    [
        (("plan", "llama-3.1-8b", "--concurrency", "8"), 2, "--input-tokens"), (ASK, 2, "--concurrency"),
        ((*ASK[:4], "--concurrency", "8"), 2, "--output-tokens"), (("plan",), 2, "MODEL"),
        ((*ASK, "--concurrency", "8", "--requests-per-second", "3"), 2, "cannot be combined"),
        ((*ASK, "--concurrency", "0"), 2, "--concurrency"), ((*ASK, "--requests-per-second", "0"), 2, "above 0"),
        ((*ASK, "--requests-per-second", "x"), 2, "--requests-per-second"),
        ((*ASK, "--concurrency", "8", "--max-ttft", "0"), 2, "--max-ttft"),
        ((*ASK, "--concurrency", "8", "--max-tpot", "3d"), 2, "30ms"),
        ((*ASK, "--concurrency", "8", "--gpu", "h101"), 3, "h10"),
        ((*ASK, "--concurrency", "8", "--gpu", "h100,h101"), 3, "h10"),
        ((*ASK, "--concurrency", "8", "--gpu", "h100,"), 2, "--gpu"),
        ((*ASK, "--concurrency", "8", "--confidence", "99"), 2, "--confidence 50"),
        ((*ASK, "--concurrency", "8", "--confidence", "x"), 2, "80"),
        (("plan", "gpt2", *ASK[2:], "--concurrency", "4"), 4, "1,024"),
        ((*ASK, "--concurrency", "8", "--price", "h100"), 2, "h100=2.5"),
        ((*ASK, "--concurrency", "8", "--lengths", "x.csv"), 2, "cannot be combined"),
        (("plan", "llama-3.1-8b", "--lengths", "/nowhere.csv", "--concurrency", "8"), 2, "nowhere"),
        ((*ASK, "--concurrency", "8", "--engine", "vlm"), 2, "vllm"),
        (("plan", "nope", *ASK[2:], "--concurrency", "8"), 3, "nope"),
        ((*ASK, "--concurrency", "8", "--get", "plan.0"), 2, "plans"),
        ((*ASK, "--concurrency", "8", "--dtype", "fp7"), 2, "fp7"),
    ],
)  # fmt: skip
def test_bad_options(kvcalc: Any, arguments: tuple[str, ...], status: int, word: str) -> None:
    result = kvcalc(*arguments)
    assert result.status == status
    assert word in result.err
    assert len(result.err.splitlines()) <= 2
    # A plan in which nothing fits is also a document. Other refusals print no document.
    assert (result.out == "") is (status != 4)
