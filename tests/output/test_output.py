"""The four output formats and bare values all come from the same document."""

from __future__ import annotations

import csv
import io
import json
import re
from typing import Any

import pytest

from kvcalc.errors import UsageError
from kvcalc.output.human.estimate import ratio
from kvcalc.output.paths import check_against_schema, look_up, scalars
from kvcalc.output.rows import tabulate
from kvcalc.output.sink import choose
from kvcalc.schema import load_schema
from kvcalc.writing.cells import bare
from tests.conftest import PLAIN_PRESETS
from tests.documents import estimate

DOCUMENT = {"a": {"b": [{"c": 1}, {"c": None}], "s": "text", "t": True, "f": 0.5}, "empty": [], "line": "x\ty\nz"}


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("a.b.0.c", "1"),
        ("a.b.1.c", "null"),
        ("a.s", "text"),
        ("a.t", "true"),
        ("a.f", "0.5"),
        ("a.b.0", '{"c":1}'),
        ("a.b", '[{"c":1},{"c":null}]'),
        ("empty", "[]"),
        (".a.s", "text"),
        ("a.b[0].c", "1"),
        (".a.b[1].c", "null"),
        (".a.b[-2].c", "1"),
        ("a.b[-1]", '{"c":null}'),
    ],
)
def test_a_path_gives_one_bare_value(path: str, expected: str) -> None:
    assert bare(look_up(DOCUMENT, path)) == expected


@pytest.mark.parametrize(
    "path",
    ["", "b", "a.b.2", "a.b.-1", "a.b.x", "a.s.x", "a..s", "a.b.0.c.d", "a.b.\u0660", "..", "..a", "a.b[2]", "a.b[-3]",
     "a.b[x]", "a.b[0", "a.b[]", "a.b[0]c", "a.b[\u0660]", "a[0]", "a.s[0]", "[0]", "a.b[" + "9" * 5000 + "]"],
)  # fmt: skip
def test_an_unknown_path_is_a_usage_error_that_says_what_is_there(path: str) -> None:
    with pytest.raises(UsageError) as caught:
        look_up(DOCUMENT, path)
    assert caught.value.hint


def test_a_dot_is_the_whole_document() -> None:
    assert look_up(DOCUMENT, ".") is DOCUMENT
    assert look_up([{"c": 1}], ".[0].c") == look_up([{"c": 1}], "[0].c") == 1


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("total_bytes", "did you mean kv_cache.total_bytes?"),
        ("kv_cache.total_byte", "did you mean kv_cache.total_bytes?"),
        ("kv_cach.total_bytes", "did you mean kv_cache.total_bytes?"),
        ("cache.total_bytes", "did you mean kv_cache.total_bytes?"),
        ("total_byts", "did you mean kv_cache.total_bytes?"),
        ("layers[0].kind", "did you mean kv_cache.layers.0.kind?"),
        ("kv_cache.layers[0].kin", "did you mean kv_cache.layers.0.kind?"),
        ("free_bytes", "did you mean fit.free_bytes?"),
        ("fit.free_bytes", "fit is null"),
        ("kv_cache.layers[7].kind", "kv_cache.layers is a list of 1: 0 to 0"),
    ],
)
def test_a_wrong_path_is_answered_with_the_whole_right_one(kvcalc: Any, path: str, hint: str) -> None:
    result = kvcalc("estimate", "llama-3-8b", "--get", path)
    assert (result.status, result.out) == (2, "")
    assert result.err.splitlines() == [f"kvcalc: --get {path}: no such path", f"  {hint}"]


@pytest.mark.parametrize(
    ("path", "hint"),
    [("held_bytes", "runs.0.held_bytes"), ("runs.3.held", "runs.3.held_bytes"),
     ("run.0.held_bytes", "runs.0.held_bytes"), ("decode_step_seconds.p50", "runs.0.decode_step_seconds.p50")],
)  # fmt: skip
def test_a_long_run_is_not_started_for_a_wrong_path(path: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        check_against_schema(load_schema(), "measure", path)
    assert f"did you mean {hint}" in str(caught.value.hint)


@pytest.mark.parametrize(
    "path", ["engine.block_size", "kv_cache.layers[-1].kind", ".workload", "fit.lines[0].bytes", "."]
)
def test_paths_an_answer_may_have_are_not_refused(path: str) -> None:
    check_against_schema(load_schema(), "estimate", path)


def test_suggestions_of_fit_are_of_its_document() -> None:
    check_against_schema(load_schema(), "fit", "fit.free_bytes")
    with pytest.raises(UsageError) as caught:
        check_against_schema(load_schema(), "fit", "free_bytes")
    assert caught.value.hint == "did you mean fit.free_bytes?"


def test_every_scalar_has_a_path_that_finds_it() -> None:
    found = dict(scalars(DOCUMENT))
    assert found == {"a.b.0.c": 1, "a.b.1.c": None, "a.s": "text", "a.t": True, "a.f": 0.5, "line": "x\ty\nz"}
    assert all(look_up(DOCUMENT, path) == value for path, value in found.items())


def test_tsv_keeps_one_row_a_line_and_csv_keeps_the_text() -> None:
    assert "line\tx y z\n" in tabulate(DOCUMENT, "tsv")
    rows = list(csv.reader(io.StringIO(tabulate(DOCUMENT, "csv"))))
    assert rows[0] == ["path", "value"]
    assert ["line", "x\ty\nz"] in rows


def test_a_list_of_models_is_a_table() -> None:
    text = tabulate({"models": [{"name": "a", "n": 1}, {"name": "b", "n": None}]}, "tsv")
    assert text == "name\tn\na\t1\nb\tnull\n"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ((None, False, None), "human"),
        ((None, True, None), "json"),
        (("json", True, None), "json"),
        (("csv", False, None), "csv"),
        (("human", False, None), "human"),
    ],
)
def test_the_format_chosen_off_a_terminal(
    options: tuple[Any, ...], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    format, json, get = options
    assert choose(format, json, get, no_color=False).format == expected
    of_a_list = "tsv" if (format, expected) == (None, "human") else expected
    assert choose(format, json, get, no_color=False, is_list=True).format == of_a_list


@pytest.mark.parametrize(
    "options",
    [("csv", True, None), ("xml", False, None), ("JSON ", False, None), (None, True, "a"), ("tsv", False, "a")],
)
def test_contradicting_or_unknown_formats(options: tuple[Any, ...]) -> None:
    format, json, get = options
    with pytest.raises(UsageError):
        choose(format, json, get, no_color=False)


def test_all_formats_carry_the_same_figures(kvcalc: Any) -> None:
    command = ("estimate", "deepseek-v3", "--context", "8k", "--kv-memory", "80G")
    document = kvcalc(*command, "--json").json
    tsv = dict(line.split("\t") for line in kvcalc(*command, "--format", "tsv").out.splitlines()[1:])
    rows = dict(list(csv.reader(io.StringIO(kvcalc(*command, "--format", "csv").out)))[1:])
    assert tsv == {path: bare(value) for path, value in scalars(document)}
    # A null is an empty cell in csv.
    assert rows == {path: "" if value is None else bare(value) for path, value in scalars(document)}
    assert "" in rows.values()
    human = kvcalc(*command, "--format", "human").out
    for figure in ("total_bytes", "bytes_per_token"):
        assert f"{document['kv_cache'][figure]:,}" in human
    assert f"{document['fit']['max_context_tokens']:,} tokens" in human


def test_human_output_off_a_terminal_has_no_escapes_and_fits_80_columns(
    kvcalc: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for name in PLAIN_PRESETS:
        for options in ((), ("--context", "1M", "--batch", "64", "--kv-memory", "80GiB"), ("--attention", "mla")):
            out = kvcalc("estimate", name, *options, "--format", "human").out
            assert "\x1b" not in out
            # Tables are not wrapped: each variant has its own line.
            for kind in ("MHA", "MQA", "GQA", "MLA"):
                assert sum(line.startswith((f"{kind} ", f"{kind}*")) for line in out.splitlines()) == 1


def test_warnings_stand_in_the_document_or_on_stderr_once(kvcalc: Any) -> None:
    command = ("estimate", "bert-base", "--dtype", "fp16")
    for options in (("--json",), ("--format", "tsv")):
        result = kvcalc(*command, *options)
        assert "encoder" in result.out
        assert result.err == ""
    result = kvcalc(*command, "--format", "human")
    assert "encoder" not in result.out
    assert result.err.count("encoder") == 1
    assert kvcalc(*command, "--get", "kv_cache.total_bytes").err == ""


@pytest.mark.parametrize(
    ("share", "text"),
    [(1.0, "1"), (0.125, "1/8"), (1 / 71, "1/71"), (0.0703125, "7.0%"), (0.5, "1/2"), (2.0, "200.0%"), (None, "-")],
)
def test_shares_of_mha(share: float | None, text: str) -> None:
    assert ratio(share) == text


@pytest.mark.parametrize(
    "path",
    [
        "runs.0.held_bytes",
        "runs",
        "runs.3.decode_step_seconds.p50",
        "device.threads",
        "schema_version",
        "runs.0.fraction_of_roof",
    ],
)
def test_paths_a_measurement_will_have(path: str) -> None:
    check_against_schema(load_schema(), "measure", path)


@pytest.mark.parametrize("path", ["runs.x", "runs.0.held", "bogus", "device.threads.n", "runs.0.held_bytes.0", ""])
def test_paths_no_measurement_will_have(path: str) -> None:
    with pytest.raises(UsageError):
        check_against_schema(load_schema(), "measure", path)


def test_json_is_one_document_without_infinities(kvcalc: Any) -> None:
    def refuse(value: str) -> None:
        raise AssertionError(value)

    out = kvcalc("estimate", "gpt2", "--context", 10**18, "--json").out
    assert json.loads(out, parse_constant=refuse)["workload"]["context_tokens"] == 10**18


def test_layers_of_different_kinds_each_get_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    import kvcalc
    from kvcalc.model.caches import FullAttention, SlidingWindowAttention
    from kvcalc.model.layers import LayerGroup
    from kvcalc.output.human import render

    groups = (
        LayerGroup(0, 4, (SlidingWindowAttention(512, 8, 64, 64),)),
        LayerGroup(5, 5, (FullAttention(8, 64, 64),)),
    )
    spec = kvcalc.load_model("llama-3-8b")._replace(layers=groups)
    render(estimate(spec, context_tokens=1000), "estimate", color=False)
    out = capsys.readouterr().out
    assert "5 layers  sliding window attention, window 512" in out
    assert "  = 2 x 5 x 1 x 8 x 512 x 64 x 2\n" in out
    assert "1 layers  full attention" in out
    assert "  = 2 x 1 x 1 x 8 x 1,000 x 64 x 2\n" in out
    assert f"  = {5 * 512 * 2 * 8 * 64 * 2:,} bytes stored" in out
    assert f"  = {1000 * 2 * 8 * 64 * 2:,} bytes stored" in out
    assert re.search(rf"fixed +{5 * 512 * 2 * 8 * 64 * 2 / 2**20:.2f} MiB", out)


def test_a_model_without_attention_reads_as_one(kvcalc: Any) -> None:
    shown = kvcalc("estimate", "mamba-2.8b", "--dtype", "bf16", "--format", "human").out
    assert shown.splitlines()[0] == "mamba-2.8b  no attention, 64 layers of 2,560"
    assert "no variants: the model has no attention" in shown
    assert "KV heads" not in shown


def test_one_reason_for_several_what_ifs_stands_once(kvcalc: Any) -> None:
    shown = " ".join(kvcalc("estimate", "deepseek-v4-flash", "--format", "human").out.split())
    assert "MHA, GQA, MLA: variants of a model with compressed attention are not defined" in shown


def test_an_engines_lines_and_pool_are_shown(kvcalc: Any) -> None:
    options = ("--context", "4097", "--kv-memory", "40GiB", "--format", "human")
    shown = kvcalc("estimate", "llama-3-8b", "--engine", "vllm", *options).out
    # 32 layers, 8 heads of 128, K and V in bf16: 131,072 bytes per token. 15 tokens are missing to a full block.
    assert "blocks rounded up" in shown
    assert f"{15 * 131_072:,}" in shown
    assert "20,480 blocks of 16" in shown
    shown = kvcalc("estimate", "llama-3-8b", "--engine", "llama.cpp", *options).out
    assert "f16 is llama.cpp's default" in shown
    assert f"{255 * 131_072:,}" in shown


def test_warnings_do_not_repeat_what_the_screen_shows(kvcalc: Any) -> None:
    question = ("fit", "llama-3-70b", "--gpu", "h100", "--context", "8k")
    assert kvcalc(*question, "--format", "human").err == ""
    assert "no memory is left" in kvcalc(*question, "--format", "tsv").out
