"""`kvcalc sweep` for people and scripts: the same rows in every format, streams, plots, and bad ranges."""

from __future__ import annotations

import csv
import io
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvcalc.engines import ENGINES
from tests.conftest import PEAK, spawn
from tests.documents import texts

GRID = ("sweep", "gpt-oss-120b", "--context", "1k..8k", "--batch", "1,8", "--tp", "1,3", "--kv-memory", "1GiB")


def test_every_format_has_the_same_rows(kvcalc: Any) -> None:
    document = kvcalc(*GRID, "--json").json
    points = document["points"]
    assert len(points) == document["num_points"] == 16
    lines = kvcalc(*GRID, "--format", "jsonl").out.splitlines()
    assert [json.loads(line) for line in lines] == points
    texts = [{k: v if isinstance(v, str) else json.dumps(v) for k, v in point.items()} for point in points]
    # In csv, a reason that begins with an option (--tp 3 ...) is marked as text.
    cells = [{name: f"'{text}" if text.startswith("--tp") else text for name, text in row.items()} for row in texts]
    for point, row in zip(points, cells):
        row.update({name: "" for name, value in point.items() if value is None})
    assert list(csv.DictReader(io.StringIO(kvcalc(*GRID, "--format", "csv").out))) == cells
    tsv = [line.split("\t") for line in kvcalc(*GRID).out.splitlines()]
    assert [dict(zip(tsv[0], row)) for row in tsv[1:]] == texts
    assert kvcalc(*GRID, "--get", "points.3.total_bytes").out == f"{points[3]['total_bytes']}\n"


def test_text_that_breaks_rows_is_quoted(capsys: pytest.CaptureFixture[str]) -> None:
    from kvcalc.output.rows import write_rows

    block = ({"name": 'a,"b"\n100%', "last": None}, ("n", "x"), [(1, 0.5), (2, "p\tq,r")], False)
    write_rows(("name", "n", "x", "last"), [block], "csv")
    rows = list(csv.reader(io.StringIO(capsys.readouterr().out)))
    assert rows[1:] == [['a,"b"\n100%', "1", "0.5", ""], ['a,"b"\n100%', "2", "p\tq,r", ""]]
    write_rows(("name", "n", "x", "last"), [({**block[0]}, ("n", "x"), [(1, 0.5), (2, "p\tq,r")], False)], "tsv")
    assert [len(line.split("\t")) for line in capsys.readouterr().out.splitlines()] == [4, 4, 4]


def test_warnings_go_to_stderr_and_into_the_document(kvcalc: Any) -> None:
    assert "tp 3" in kvcalc(*GRID).err
    result = kvcalc(*GRID, "--json")
    assert result.err == ""
    assert any("tp 3" in warning for warning in texts(result.json))


def test_a_closed_pipe_is_no_error() -> None:
    command = f"{sys.executable} -m kvcalc sweep llama-3-8b --context 1..1000000000000:1 --format csv | head -3"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, timeout=300)
    assert (done.returncode, len(done.stdout.splitlines())) == (0, 3)
    assert "Traceback" not in done.stderr
    assert "cannot write" not in done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("format", ["csv", "json", "human"])
def test_memory_does_not_grow_with_the_grid(format: str) -> None:
    script = (
        "import sys; from kvcalc.cli.app import run\n"
        "def peak(points):\n"
        f"    assert run(['sweep', 'llama-3.1-8b', '--context', f'1..{{points}}:1', '--format', '{format}']) == 0\n"
        f"    return {PEAK}\n"
        # The first points fill what is kept in memory (it is bounded); after that nothing may grow.
        "print(peak(30_000), peak(160_000), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", script], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    small, large = map(int, done.stderr.splitlines()[-1].split())
    assert large - small < 1024, "one MiB more for 130,000 more points"


def test_the_human_table_is_cut_and_says_so(kvcalc: Any) -> None:
    out = kvcalc("sweep", "llama-3.1-8b", "--context", "1..1000:1", "--format", "human").out
    assert "960 more rows" in out
    assert max(map(len, out.splitlines())) <= 80


def test_the_chart_shows_where_memory_ends(kvcalc: Any) -> None:
    out = kvcalc("sweep", "llama-3.1-8b", "--context", "1k..128k", "--kv-memory", "4GiB", "--format", "human").out
    rows = [line for line in out.splitlines() if " |" in line]
    capacity = next(i for i, row in enumerate(rows) if "-----" in row)
    above = sum(row.count("a") for row in rows[:capacity])
    below = sum(row.count("a") for row in rows[capacity:])
    # At 128 KiB per token, 32k tokens fill 4 GiB exactly, so two of the eight contexts exceed it.
    assert (above, below) == (2, 6)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--context", "8k..1k"), "--context"), (("--batch", "1..x"), "--batch"), (("--tp", "0..8"), "--tp"),
        (("--kv-dtype", "bf16,fp7"), "fp8"), (("--engine", "vlm"), "vllm"), (("--plot", "x.gif"), ".svg"),
        (("--plot", "/nowhere/x.svg"), "/nowhere"), (("--format", "xml"), "jsonl"), (("--get", "point"), "points"),
        (("--get", "points.0.fits", "--context", "1..1000000:1"), "100,000"), (("--kv-memory", "lots"), "--kv-memory"),
    ],
)  # fmt: skip
def test_bad_options_are_one_line_and_status_2(kvcalc: Any, arguments: tuple[str, ...], words: str) -> None:
    result = kvcalc("sweep", "llama-3-8b", *arguments)
    assert result.status == 2
    assert words in result.err
    assert result.out == ""


@pytest.mark.parametrize("name", ["memory.svg", "memory.png", "memory.pdf"])
def test_a_plot_is_a_picture_and_the_same_each_time(kvcalc: Any, tmp_path: Path, name: str) -> None:
    if not name.endswith("svg"):
        pytest.importorskip("matplotlib")
    pictures = []
    for run in ("a", "b"):
        path = tmp_path / run / name
        path.parent.mkdir()
        assert kvcalc(*GRID, "--plot", path).status == 0
        pictures.append(path.read_bytes())
    assert pictures[0] == pictures[1]
    if name.endswith("svg"):
        text = pictures[0].decode()
        assert "batch 8" in text
        assert "context, tokens" in text
        # A file has no variables, because few programs but browsers know them.
        assert "var(" not in text
    else:
        assert pictures[0].startswith(b"\x89PNG" if name.endswith("png") else b"%PDF")


def test_a_plot_and_a_report_draw_the_same_chart(kvcalc: Any, tmp_path: Path) -> None:
    words = ("sweep", "llama-3.1-8b", "--context", "1k..32k", "--batch", "1,8", "--gpu", "h100,l40s")
    plot, report = tmp_path / "memory.svg", tmp_path / "memory.html"
    assert kvcalc(*words, "--plot", plot, "--report", report).status == 0
    (drawn,) = re.findall(r'<svg viewBox="0 0 720.*?</svg>', report.read_text(), re.DOTALL)
    assert drawn in plot.read_text()


def test_one_context_is_no_line_to_plot(kvcalc: Any, tmp_path: Path) -> None:
    result = kvcalc("sweep", "gpt2", "--context", "1k", "--plot", tmp_path / "x.svg")
    assert (result.status, result.out) == (2, "")
    assert "needs two contexts" in result.err


def test_without_matplotlib_the_extra_is_named_before_the_run(
    monkeypatch: pytest.MonkeyPatch, kvcalc: Any, tmp_path: Path
) -> None:
    import importlib.util

    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "matplotlib" else real(name, *a))
    result = kvcalc(*GRID, "--plot", tmp_path / "x.png")
    assert result.status == 1
    assert "kvcalc[plot]" in result.err
    assert result.out == ""
    assert kvcalc(*GRID, "--plot", tmp_path / "x.svg").status == 0


def test_off_a_terminal_it_is_tsv() -> None:
    assert spawn("sweep", "gpt2", "--context", "1k").out.startswith("model\tengine\tkv_dtype\t")


def test_lists_are_separated_by_commas_or_repeated(kvcalc: Any) -> None:
    base = ("sweep", "llama-3.1-8b", "--format", "json")
    commas = kvcalc(*base, "--gpu", "h100,l40s", "--engine", "vllm,sglang", "--context", "4k,8k", "--batch", "1,2")
    repeated = kvcalc(
        *base, "--gpu", "h100", "--gpu", "l40s", "--engine", "vllm", "--engine", "sglang", "--context", "4k",
        "--context", "8k", "--batch", "1", "--batch", "2",
    )  # fmt: skip
    assert commas.json == repeated.json
    assert commas.json["num_points"] == 16
    every = kvcalc(*base, "--engine", "all").json["points"]
    assert [point["engine"] for point in every] == list(ENGINES)


def test_devices_with_a_number_are_swept(kvcalc: Any) -> None:
    points = kvcalc("sweep", "llama-3-70b", "--gpu", "h100x4,h200x2", "--format", "json").json["points"]
    assert [(p["gpu"], p["num_devices"], p["tensor_parallel_size"]) for p in points] == [
        ("h100-sxm", 4, 4), ("h200-sxm", 2, 2),
    ]  # fmt: skip
    answer = kvcalc("estimate", "llama-3-70b", "--gpu", "h100x4", "--json").json
    assert points[0]["free_bytes"] == answer["fit"]["free_bytes"]
    for name, status in (("h101", 3), ("h100,", 2)):
        assert kvcalc("sweep", "llama-3-70b", "--gpu", name).status == status


def test_a_plot_tells_the_memories_of_devices_apart(kvcalc: Any, tmp_path: Path) -> None:
    path = tmp_path / "memory.svg"
    options = ("--context", "1k..128k", "--gpu", "h100,l40s,l4", "--plot", str(path))
    assert kvcalc("sweep", "llama-3.1-8b", *options).status == 0
    text = path.read_text()
    for name in ("h100-sxm", "l40s", "l4"):
        assert f"per device for the cache: {name}<" in text
    assert len(set(re.findall(r'class="line s6" stroke-dasharray="([0-9 ]+)"', text))) == 3


@pytest.mark.parametrize("columns", ["80", "120"])
def test_the_screen_fits_the_terminal(kvcalc: Any, monkeypatch: pytest.MonkeyPatch, columns: str) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    words = ("--context", "1k..128k", "--gpu", "h100x2,l40s", "--batch", "1,8", "--engine", "vllm,sglang")
    for options in (words, (*words, "--tp", "1,2")):
        out = kvcalc("sweep", "llama-3.1-8b", *options, "--format", "human").out
        assert max(map(len, out.splitlines())) <= int(columns)
