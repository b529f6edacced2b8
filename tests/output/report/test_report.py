"""Reports: well-formed, escaped, without scripts or anything from elsewhere, and written like other files."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import shutil
import stat
import subprocess
from html import escape
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from kvcalc.cli.report import repeated
from kvcalc.output.human.figures import duration
from kvcalc.output.report import make_report
from kvcalc.output.report.charts import Axis, Line, bar, lines
from tests.conftest import ROOT

LOGS = ROOT / "tests" / "logs"
QUESTIONS = {
    "estimate": ("estimate", "llama-3-70b", "--gpu", "h100x4", "--engine", "vllm", "--input-tokens", "2k",
                 "--output-tokens", "100", "--concurrency", "4"),
    "engines": ("estimate", "llama-3-70b", "--engine", "vllm,sglang"),
    "does not fit": ("estimate", "llama-3-70b", "--gpu", "l40s"),
    "states": ("estimate", "mamba-2.8b"),
    "plan": ("plan", "llama-3-70b", "--input-tokens", "2k", "--output-tokens", "100", "--concurrency", "4", "--gpu",
             "h100,l40s", "--price", "h100=2.5,l40s=1"),
    "percentiles": ("plan", "llama-3.1-8b", "--input-tokens", "2k", "--output-tokens", "100", "--requests-per-second",
                    "20", "--gpu", "h100", "--max-ttft", "1s@p99", "--requests", "300"),
    "replicas": ("plan", "qwen3-32b", "--input-tokens", "2k", "--output-tokens", "500", "--concurrency", "100",
                 "--max-tpot", "25ms", "--confidence", "50", "--gpu", "h100"),
    "check": ("check", "vllm", "serve", "Qwen/Qwen3-8B", "--max-num-seqs", "4", "--gpu", "l40s", "--input-tokens",
              "2k", "--output-tokens", "100", "--max-ttft", "1s@p99"),
    "sweep": ("sweep", "gemma-3-27b", "--context", "1k..64k", "--batch", "1,8", "--gpu", "h100"),
    "prefix": ("prefix", LOGS / "mooncake.jsonl", "llama-3.1-8b", "--gpu", "h100", "--engine", "vllm", "--offload",
               "cpu=20GiB"),
    "simulate": ("simulate", "llama-3.1-8b", "--gpu", "h100", "--requests-per-second", "20", "--input-tokens",
                 "uniform:500..1500", "--output-tokens", "200", "--requests", "100", "--max-ttft", "100ms"),
}  # fmt: skip
EMPTY = {"meta", "link", "br", "hr", "img", "input"}


class Page(HTMLParser):
    """Collects tags, attributes and text, and checks that every tag is closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.opened: list[str] = []
        self.tags: set[str] = set()
        self.attributes: list[tuple[str, str | None]] = []
        self.texts: list[str] = []
        self.in_code = False
        self.feed(text)
        self.close()
        assert self.opened == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += attrs
        if tag not in EMPTY:
            self.opened.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.opened.pop() == tag
        self.in_code = self.in_code and tag != "code"

    def handle_data(self, data: str) -> None:
        if "code" in self.opened and self.in_code:
            self.texts[-1] += data
        else:
            self.texts.append(data)
        self.in_code = "code" in self.opened


def report_of(kvcalc: Any, tmp_path: Path, *words: object) -> tuple[str, str]:
    path = tmp_path / "report.html"
    result = kvcalc(*words, "--report", path, "--json")
    assert result.status == 0, result.err
    return path.read_text(encoding="utf-8"), result.out


_ANSWERED: dict[str, tuple[str, str]] = {}


def answered(kvcalc: Any, tmp_path: Path, name: str) -> tuple[str, str]:
    """The report and the JSON document of one of `QUESTIONS`, which is asked once."""
    if name not in _ANSWERED:
        _ANSWERED[name] = report_of(kvcalc, tmp_path, *QUESTIONS[name])
    return _ANSWERED[name]


def hash_of(text: str) -> str:
    """The source expression of a style or a script in a content security policy (CSP level 3, hash-source)."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def test_a_browser_may_load_nothing_and_run_nothing(kvcalc: Any, tmp_path: Path) -> None:
    text, _ = answered(kvcalc, tmp_path, "estimate")
    (policy,) = re.findall(r'<meta http-equiv="Content-Security-Policy" content="([^"]*)">', text)
    (style,) = re.findall(r"<style>(.*?)</style>", text, re.DOTALL)
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    none = {"default-src": "'none'", "base-uri": "'none'", "form-action": "'none'"}
    assert rules == {**none, "style-src": f"'{hash_of(style)}'"}
    assert text.index("Content-Security-Policy") < text.index("<style>")


@pytest.mark.parametrize("name", QUESTIONS)
def test_a_report_is_one_page_that_needs_nothing_else(kvcalc: Any, tmp_path: Path, name: str) -> None:
    text, out = answered(kvcalc, tmp_path, name)
    page = Page(text)
    assert not page.tags & {"script", "link", "img", "iframe", "object", "embed", "base", "form"}
    assert not any(attribute.startswith("on") for attribute, _ in page.attributes)
    assert not {"href", "src", "srcset", "action", "style"} & {attribute for attribute, _ in page.attributes}
    assert "@import" not in text
    assert "url(" not in text
    assert not any("//" in (value or "") for _, value in page.attributes)
    assert "<title>" in text
    # The answer is the same as without a report, and the page repeats the question.
    assert out == kvcalc(*QUESTIONS[name], "--json").out
    said = "".join(page.texts)
    assert f"kvcalc {' '.join(map(str, QUESTIONS[name]))}" in said
    assert "--report" not in said


def test_the_drawings_are_well_formed_and_have_names(kvcalc: Any, tmp_path: Path) -> None:
    text, _ = answered(kvcalc, tmp_path, "estimate")
    drawings = [ElementTree.fromstring(found) for found in re.findall(r"<svg.*?</svg>", text, re.DOTALL)]
    labels = [drawing.get("aria-label") for drawing in drawings]
    assert labels == ["Memory of one device", "Parts of a decode step", "TTFT over the load", "TPOT over the load"]
    memory = json.loads(kvcalc(*QUESTIONS["estimate"], "--json").out)["fit"]
    widths = [float(part.get("width", "")) for part in drawings[0].iter("rect")]
    parts = [line["bytes"] for line in memory["lines"] if line["bytes"]]
    assert widths == pytest.approx([720 * part / memory["device_bytes"] for part in parts], abs=0.01)


def test_every_figure_of_a_chart_is_in_a_table(kvcalc: Any, tmp_path: Path) -> None:
    text, out = answered(kvcalc, tmp_path, "prefix")
    cells = {cell.strip() for cell in Page(text).texts}
    for row in json.loads(out)["curve"]:
        assert {f"{row['hit_rate']:.1%}", f"{row['cache_tokens']:,}"} <= cells
    text, out = answered(kvcalc, tmp_path, "sweep")
    cells = {cell.strip() for cell in Page(text).texts}
    assert {f"{point['context_tokens']:,}" for point in json.loads(out)["points"]} <= cells


def test_a_simulation_shows_its_percentiles_and_what_is_drawn_over_time(kvcalc: Any, tmp_path: Path) -> None:
    text, out = answered(kvcalc, tmp_path, "simulate")
    document, cells = json.loads(out), {cell.strip() for cell in Page(text).texts}
    for row in document["timeline"]:
        drawn = (row["waiting_requests"], row["running_requests"], row["used_blocks"])
        assert {f"{value:,}" for value in drawn} <= cells
    for row in document["times"]:
        assert {duration(row[name]) for name in ("mean_seconds", "p50_seconds", "p99_seconds", "max_seconds")} <= cells
    good = document["results"]["good_requests"]
    assert f"{good}.0% of the requests meet TTFT <= 100 ms." in cells
    drawings = [ElementTree.fromstring(found) for found in re.findall(r"<svg.*?</svg>", text, re.DOTALL)]
    charts = [drawing for drawing in drawings if drawing.get("aria-label")]
    assert [chart.get("aria-label") for chart in charts] == [
        "TTFT over the load", "TPOT over the load", "Waiting and running requests over time", "Used blocks over time"
    ]  # fmt: skip
    # Time is never logarithmic, so the rows of the timeline are equally far apart.
    path = next(path for path in charts[2].iter("path") if path.find("title") is not None)
    xs = [float(point.split()[0]) for point in path.get("d", "")[1:].split("L")]
    assert len(xs) == len(document["timeline"])
    assert [b - a for a, b in pairwise(xs)] == pytest.approx([(xs[-1] - xs[0]) / 59] * 59, abs=0.11)


def texts_of(kvcalc: Any, tmp_path: Path, name: str) -> tuple[set[str], dict[str, Any]]:
    text, out = answered(kvcalc, tmp_path, name)
    return {cell.strip() for cell in Page(text).texts}, json.loads(out)


def test_a_plan_has_its_targets_and_what_meets_them(kvcalc: Any, tmp_path: Path) -> None:
    cells, document = texts_of(kvcalc, tmp_path, "percentiles")
    best = document["best"]
    assert any(cell.endswith("serve 20 requests per second and meet TTFT p99 <= 1 s.") for cell in cells)
    assert {"TTFT p99 <= 1 s", duration(best["tpot_seconds"]), document["commands"][0]["command"]} <= cells
    assert {"limit 1 s (p99)", "asked", "TTFT over the load", "Memory of one device"} <= cells
    for row in document["finalists"]:
        missed = row["reason"] if "seeds" in (row["reason"] or "") else "TTFT above 1 s"
        assert row["passes"] or (missed if row["keeps_up"] else "overloaded") in cells


def test_a_plan_of_several_replicas_has_its_curve_and_the_memory_of_its_requests(kvcalc: Any, tmp_path: Path) -> None:
    cells, document = texts_of(kvcalc, tmp_path, "replicas")
    best = document["best"]
    assert (best["replicas"], best["tensor_parallel_size"]) == (2, 4)
    assert {"TPOT over the load", "asked", "Memory of one device"} <= cells
    running = (best["requests_per_replica"], "--context", 2548, "--gpu", "h100x4", "--engine", "vllm")
    held = kvcalc("fit", "qwen3-32b", "--batch", *running, "--get", "fit.kv_cache_bytes").out
    assert f"{int(held):,}" in cells, "the bar has the cache of all requests that run in a replica"
    assert "free memory per device" not in cells, "the bar has that of the printed command"


def test_a_command_breaks_between_its_words_alone(kvcalc: Any, tmp_path: Path) -> None:
    text, _ = report_of(kvcalc, tmp_path, *QUESTIONS["percentiles"])
    assert "<span>--max-model-len</span> 4359" in text
    assert "pre span { display: inline-block;" in text


def test_a_check_has_the_rate_and_the_curve_around_it(kvcalc: Any, tmp_path: Path) -> None:
    cells, document = texts_of(kvcalc, tmp_path, "check")
    found = f"{document['capacity']['requests_per_second']:.3g} requests per second"
    assert {
        f"vllm 0.33.0 starts, and sustains {found} within TTFT p99 <= 1 s.",
        found,
        "limit 1 s (p99)",
        "largest",
    } <= cells
    assert "judged at 65% confidence" in cells
    human = kvcalc(*QUESTIONS["check"], "--format", "human").out
    assert found in human
    assert "judged at 65% confidence" in human


def test_the_sizes_of_a_report_are_those_of_the_screen(kvcalc: Any, tmp_path: Path) -> None:
    cells, _ = texts_of(kvcalc, tmp_path, "estimate")
    human = kvcalc(*QUESTIONS["estimate"], "--format", "human").out
    for pattern in (r"starts: (\S+ GiB) per device", r"free +(\S+ GiB)", r"weights +(\S+ GiB)"):
        size = re.search(pattern, human)
        assert size is not None
        assert any(size[1] in cell for cell in cells), size[1]


def test_an_overloaded_server_is_said_to_be_one(kvcalc: Any, tmp_path: Path) -> None:
    words = ("simulate", "llama-3.1-8b", "--gpu", "l40s", "--requests-per-second", "30", "--input-tokens", "1000",
             "--output-tokens", "200", "--requests", "600")  # fmt: skip
    text, out = report_of(kvcalc, tmp_path, *words)
    assert not json.loads(out)["results"]["keeps_up"]
    assert "Overloaded: requests arrive faster than they are served." in text
    human = kvcalc(*words, "--format", "human").out
    rows = dict(line.split(maxsplit=1) for line in human.splitlines() if " " in line.strip())
    assert rows["TTFT"].split() == rows["whole"].split()[1:] == rows["in"].split()[2:] == ["overloaded"] * 5
    assert "overloaded" not in rows["TPOT"]
    assert 'aria-label="TTFT over the load"' in text, "the curve begins far enough below the load"


def test_many_rows_are_folded_and_the_knee_is_on_its_line(kvcalc: Any, tmp_path: Path) -> None:
    text, _ = answered(kvcalc, tmp_path, "simulate")
    assert text.count("<details>") == 2
    text, out = answered(kvcalc, tmp_path, "prefix")
    drawing = ElementTree.fromstring(re.findall(r'<svg viewBox="0 0 720 320".*?</svg>', text, re.DOTALL)[0])
    paths = list(drawing.iter("path"))
    (mark,) = [found for path in paths if (found := re.fullmatch(r"M([\d.]+) [\d.]+V[\d.]+", path.get("d", "")))]
    (line,) = [path for path in paths if path.find("title") is not None]
    assert float(mark[1]) in [float(point.split()[0]) for point in line.get("d", "")[1:].split("L")]
    assert json.loads(out)["knee"]["cache_bytes"] > 0


def test_ticks_are_round(kvcalc: Any) -> None:
    from kvcalc.output.report.charts import _Scale
    from kvcalc.output.report.parts import round_size

    scale = _Scale(0.0, 93.2 * 2**30, 0.0, 1.0, False)
    assert [round_size(tick) for tick in scale.ticks(5, is_bytes=True)] == [
        "0 B", "20 GiB", "40 GiB", "60 GiB", "80 GiB"
    ]  # fmt: skip
    assert [round_size(tick) for tick in _Scale(2.0**13, 2.0**17, 0.0, 1.0, True).ticks(5)][-1] == "128 KiB"


HOSTILE = "<script>alert(1)</script>\"'&\x1b[31m\u202e$title"


@pytest.mark.parametrize(
    "kind", ["estimate", "engines", "plan", "check", "sweep", "prefix", "simulate", "no such kind"]
)
def test_everything_is_escaped(kvcalc: Any, tmp_path: Path, kind: str) -> None:
    def hostile(value: Any) -> Any:
        if isinstance(value, str):
            return value if value in ("weights", "kv_cache", "activation", "reserve", "free", "fits") else HOSTILE
        if isinstance(value, dict):
            return {key: hostile(item) for key, item in value.items()}
        return [hostile(item) for item in value] if isinstance(value, list) else value

    document = hostile(json.loads(answered(kvcalc, tmp_path, kind if kind in QUESTIONS else "estimate")[1]))
    text = make_report(document, kind, HOSTILE)
    assert Page(text).tags.isdisjoint({"script"})
    assert "&lt;script&gt;" in text
    assert "\x1b" not in text
    assert "\u202e" not in text


def test_a_report_of_a_run(kvcalc: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    from tests.measure.quick import quicken

    quicken(monkeypatch)
    words = ("measure", "gpt2", "--layers", "1", "--context", "64", "--steps", "2", "--device", "cpu")
    text, out = report_of(kvcalc, tmp_path, *words)
    (run,) = json.loads(out)["runs"]
    said = {cell.strip() for cell in Page(text).texts}
    assert {"Held and predicted bytes are equal.", f"{run['held_bytes']:,}"} <= said
    text, out = report_of(kvcalc, tmp_path, *words, "--sweep", "context=16..64")
    assert 'aria-label="Time of a step over the context"' in text


def test_the_command_is_repeated_without_the_report() -> None:
    words = ("a model", "--report", "x.html", "--gpu", "h100", "--report=y.html")
    assert repeated("estimate", words) == "kvcalc estimate 'a model' --gpu h100"


def test_a_report_replaces_a_file_and_keeps_its_mode(kvcalc: Any, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text("before")
    path.chmod(0o640)
    assert kvcalc("estimate", "gpt2", "--report", path).status == 0
    assert path.read_text().startswith("<!DOCTYPE html>")
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert os.listdir(tmp_path) == ["report.html"]


def test_a_path_that_cannot_be_written_is_refused_before_the_answer(kvcalc: Any, tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "no" / "report.html"):
        result = kvcalc("estimate", "gpt2", "--report", path)
        assert (result.status, result.out) == (1, "")
        assert result.err.startswith("kvcalc: cannot save ")
    assert kvcalc("estimate", "gpt2", "--report", "").status == 2


def test_a_question_that_is_refused_leaves_the_file(kvcalc: Any, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text("before")
    assert kvcalc("estimate", "nope", "--report", path).status == 3
    assert path.read_text() == "before"


def test_batch_writes_no_report(kvcalc: Any, tmp_path: Path) -> None:
    questions = tmp_path / "questions.jsonl"
    questions.write_text('{"model": "gpt2", "report": "x.html"}\n')
    assert "unknown field 'report'" in kvcalc("batch", questions).json["error"]["message"]


def test_lines_need_two_points_and_scales_hold_any_numbers() -> None:
    axis = Axis("x", str)
    assert lines("none", axis, axis, [Line("a", [(1, 1)])]) == ""
    for points in ([(0, 0), (1, 0)], [(1, 1e-9), (1e12, 1e15)], [(1, 5), (2, 5)], [(3, 1), (3.1, 2)]):
        drawing = ElementTree.fromstring(lines("some", axis, axis, [Line("a", points)], [("limit", 2.0)]))
        numbers = [
            float(number) for path in drawing.iter("path") for number in re.findall(r"[\d.]+", path.get("d", ""))
        ]
        assert all(0 <= number <= 720 for number in numbers)
    assert ElementTree.fromstring(bar("none", [], 0)) is not None


class Frames(HTMLParser):
    """Collects the attributes of the frames of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[dict[str, str | None]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "iframe":
            self.found.append(dict(attrs))


def test_a_browser_shows_the_pages(kvcalc: Any, tmp_path: Path) -> None:
    """Rendered by Chromium without a network: no errors, and no page is wider than its window."""
    browser = shutil.which("chromium")
    if browser is None:
        pytest.skip("chromium is not installed")
    # Every label of a chart is within it, and no cell with a name or a number is broken.
    probe = (
        "const found = frameElement.dataset; found.shown = document.documentElement.scrollWidth;"
        "found.cut = [...document.querySelectorAll('svg text')].filter(text => {"
        " const box = text.getBBox(), all = text.ownerSVGElement.viewBox.baseVal;"
        " return box.x < 0 || box.x + box.width > all.width || box.y < 0 || box.y + box.height > all.height;"
        "}).length;"
        "found.broken = [...document.querySelectorAll('td:not(.words)')].filter(cell => {"
        " const range = document.createRange(); range.selectNodeContents(cell);"
        " return new Set([...range.getClientRects()].map(box => Math.round(box.bottom / 8))).size > 2;"
        "}).length"
    )
    # A start of the browser takes longer than a page, so all pages are frames of one. A window would be at least 500
    # pixels wide, a frame in it is not.
    frames = []
    for name in ("estimate", "percentiles", "check", "sweep", "prefix", "simulate"):
        text, _ = answered(kvcalc, tmp_path, name)
        assert "Repeat this" in text
        # The policy of the page allows no script, so the probe is added to it.
        allowed = text.replace("default-src 'none'", f"default-src 'none'; script-src '{hash_of(probe)}'")
        probed = escape(allowed.replace("</body>", f"<script>{probe}</script></body>"))
        frames += [
            f'<iframe name="{name}" width="{width}" height="3000" style="border: 0" srcdoc="{probed}"></iframe>'
            for width in (400, 1400)
        ]
    (tmp_path / "probed.html").write_text(f"<!DOCTYPE html><body>{''.join(frames)}</body>", encoding="utf-8")
    options = ("--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--window-size=1400,900")
    done = subprocess.run(
        [browser, *options, f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", f"file://{tmp_path}/probed.html"],
        capture_output=True, text=True, timeout=120, check=False,
        env={**os.environ, "XDG_CONFIG_HOME": str(tmp_path / "config")},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert not (Path(os.environ["XDG_CONFIG_HOME"]) / "chromium").exists(), "the browser wrote into the repository"
    assert "CONSOLE" not in done.stderr, done.stderr
    shown = Frames(done.stdout).found
    assert len(shown) == len(frames)
    for frame in shown:
        kept = {key: frame[f"data-{key}"] for key in ("shown", "cut", "broken")}
        assert int(kept.pop("shown") or 0) <= int(frame["width"] or 0), (frame["name"], frame["width"])
        assert kept == {"cut": "0", "broken": "0"}, (frame["name"], frame["width"])
