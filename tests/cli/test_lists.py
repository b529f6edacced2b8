"""Options that take a list: separated by commas, repeated, or both."""

from __future__ import annotations

from typing import Any

import pytest
import typer

from kvcalc.cli import options as o
from kvcalc.cli.batch import Questions
from kvcalc.errors import UsageError
from kvcalc.json_lines import Line
from tests.documents import validate


def parse(*arguments: str, default: str | None = None) -> object:
    """The value that a command with one list option reads from a command line."""
    app, found = typer.Typer(), []

    @app.command(cls=o.taking(o.value("--gpu", "NAMES", "Devices.", default, several=True)))
    def command(ctx: typer.Context) -> None:
        found.append(ctx.params["gpu"])

    typer.main.get_command(app).main(list(arguments), standalone_mode=False)
    return found[0]


def test_commas_and_repetition_give_the_same_text() -> None:
    assert parse("--gpu", "h100,h200,l4") == "h100,h200,l4"
    assert parse("--gpu", "h100", "--gpu=h200", "--gpu", "l4") == "h100,h200,l4"
    assert parse("--gpu", "h100,h200", "--gpu", "l4") == "h100,h200,l4"
    assert parse("--gpu", "h100") == "h100"
    assert parse() is None
    assert parse(default="a,b") == "a,b"
    assert parse("--gpu", "h100", default="a,b") == "h100"


def test_names_are_split_wherever_the_list_comes_from() -> None:
    assert o.names_of("H100, h200,l4", "--gpu") == ["H100", "h200", "l4"]
    assert o.names_of(("h100,h200", "l4"), "--gpu") == ["h100", "h200", "l4"]
    assert o.names_of(None, "--gpu") == o.names_of((), "--gpu") == []


@pytest.mark.parametrize("text", ["", ",", "h100,", "h100,,h200", " "])
def test_an_empty_name_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"--gpu .*: an empty name in the list"):
        o.names_of(text, "--gpu")


def test_an_estimate_takes_several_engines(kvcalc: Any) -> None:
    every = {
        row["engine"]: row for row in kvcalc("estimate", "llama-3-8b", "--engine", "all", "--json").json["engines"]
    }
    for words in (("--engine", "vllm,sglang"), ("--engine", "vllm", "--engine", "SGLang")):
        rows = kvcalc("estimate", "llama-3-8b", *words, "--json").json["engines"]
        assert rows == [every["vllm"], every["sglang"]]
    rows = kvcalc("estimate", "llama-3-8b", "--engine", "vllm@0.8.5,vllm", "--json").json["engines"]
    assert [row["engine"] for row in rows] == ["vllm@0.8.5", "vllm"]
    one = kvcalc("estimate", "llama-3-8b", "--engine", "vllm", "--json").json
    assert one["engine"]["name"] == "vllm"


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (("estimate", "--engine", "vllm,slang"), 2, "did you mean sglang"),
        (("estimate", "--engine", "vllm,sglang", "--gpu", "h100", "--check"), 2, "--check --engine vllm"),
        (("estimate", "--engine", "vllm,sglang", "--ubatch-size", "8"), 2, "belongs to llama.cpp"),
        (("estimate", "--gpu", "h100,h200"), 2, "kvcalc compare MODEL --gpu h100,h200"),
        (("estimate", "--gpu", "h100", "--gpu", "h200"), 2, "kvcalc compare MODEL --gpu h100,h200"),
        (("fit", "--gpu", "h100", "--gpu", "h200"), 2, "kvcalc compare MODEL --gpu h100,h200"),
        (
            ("fit", "--gpu", "h100", "--engine", "vllm,sglang"),
            2,
            "kvcalc compare llama-3-8b --gpu h100 --engine vllm,sglang",
        ),
        (("fit", "--gpu", "h100", "--engine", "all"), 2, "kvcalc compare llama-3-8b"),
    ],
)
def test_a_list_is_refused_where_one_is_asked_for(kvcalc: Any, words: tuple[str, ...], status: int, said: str) -> None:
    result = kvcalc(words[0], "llama-3-8b", *words[1:])
    assert (result.status, result.out) == (status, "")
    assert said in result.err


LISTS = {
    "--gpu": ("h100", "l40s"),
    "--engine": ("vllm", "sglang"),
    "--attention": ("mha", "mqa"),
    "--kv-dtype": ("bf16", "fp8"),
    "--price": ("h100=2.5", "l40s=1"),
}


@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("compare", "--gpu --engine --attention"),
        ("sweep", "--gpu --engine --kv-dtype"),
        ("plan", "--gpu --engine --price"),
    ],
)
def test_commas_and_repetition_ask_the_same(kvcalc: Any, command: str, options: str) -> None:
    load = ("--input-tokens", "1k", "--output-tokens", "100", "--concurrency", "4") if command == "plan" else ()
    for option in options.split():
        commas, repeated = (
            (option, ",".join(LISTS[option])),
            [word for name in LISTS[option] for word in (option, name)],
        )
        found = [kvcalc(command, "llama-3-8b", *load, *words, "--format", "json") for words in (commas, repeated)]
        assert found[0] == found[1]
        assert found[0].status == 0


def test_the_document_of_several_engines_has_their_releases_and_its_schema(kvcalc: Any) -> None:
    document = kvcalc("estimate", "llama-3-8b", "--engine", "vllm@0.8.5,sglang", "--json").json
    validate(document, "engines")
    line = Line(1, b'{"model": "llama-3-8b", "engine": "vllm@0.8.5,sglang"}')
    assert Questions().answer(line) == document
