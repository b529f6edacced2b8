"""Hostile names through every emitter, parsed back to exactly what is meant.

Whatever a folder is called, what is printed differs from that for a folder with a plain name in the name alone.
`pytest -m fuzz --names 10000 --fuzz-seed 7 tests/writing` is a long run with other names.
"""

from __future__ import annotations

import copy
import csv
import io
import json
import os
import re
import shlex
import struct
from contextlib import redirect_stdout
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvcalc.cli.report import repeated
from kvcalc.engines import command_key
from kvcalc.errors import UsageError
from kvcalc.output.human.console import Console
from kvcalc.output.human.plan import render
from kvcalc.output.report import make_report
from kvcalc.output.rows import tabulate
from kvcalc.planning.manifests import COMMANDS, emit
from kvcalc.writing.shell import join, split
from kvcalc.writing.terminal import one_line, printable, printable_document
from tests.writing.hostile import hostile_names
from tests.writing.reading import in_container, interpolated, mapped, run_in_bash

pytestmark = pytest.mark.fuzz

CONFIG = {
    "model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64, "vocab_size": 1000,
    "intermediate_size": 64,
}  # fmt: skip
LOAD = ("--gpu", "h100", "--input-tokens", "100", "--output-tokens", "50")
SPLIT = ("--requests-per-second", "4", "--disaggregate", "--transfer-bandwidth", "50GB/s")
# The options of a plan, and the commands that it can print.
PLANS = {
    ("--engine", "vllm", "--concurrency", "4"): ("vllm",),
    ("--engine", "sglang", "--concurrency", "4"): ("sglang",),
    ("--engine", "llama.cpp", "--concurrency", "4"): ("llama-server",),
    ("--engine", "tensorrt-llm", "--concurrency", "4", "--kv-dtype", "fp8"): ("trtllm",),
    ("--engine", "vllm", *SPLIT): ("vllm",),
    ("--engine", "sglang", *SPLIT): ("sglang",),
    ("--engine", "tensorrt-llm", *SPLIT): ("trtllm",),
}
IMAGE = "some/image:1"
FILES = ("k8s", "compose")
# A name that is an object's name as it is, and no part of any other text.
NAME = "quercus-robur"
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
# A DNS label (RFC 1035), and the length that Kubernetes can extend for the pods of a StatefulSet.
LABEL = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")
LONGEST = {"StatefulSet": 52, "Deployment": 63, "Service": 63}


@pytest.fixture
def plans(kvcalc: Any, tmp_path: Path) -> list[tuple[dict[str, Any], tuple[str, ...]]]:
    """Plans of a folder with a plain name, and the commands that each can print."""
    folder = tmp_path / "plain"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    # A file without tensors: kvcalc counts the config's weights, and the folder is what a server loads.
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}")
    found = list[tuple[dict[str, Any], tuple[str, ...]]]()
    for options, kinds in PLANS.items():
        result = kvcalc("plan", folder, *LOAD, *options, "--json")
        assert result.status == 0, result.err
        plan = result.json
        if "--disaggregate" in options:
            plan["best"] = next(row for row in plan["plans"] if row.get("disaggregated"))
        found.append((plan, kinds))
    return found


def named(plan: dict[str, Any], name: str, path: str) -> dict[str, Any]:
    """The plan as it is for a model with this name, in the folder at `path`."""

    def command(text: str) -> str:
        return join(path if word == plan["checkpoint"] else word for word in split(text))

    found = copy.deepcopy(plan)
    found["model"]["name"], found["checkpoint"] = name, path
    for row in (*found["plans"], found["best"]):
        row["model"] = name
        row.update({engine: command(row[engine]) for engine in map(command_key, COMMANDS.values()) if row[engine]})
        if row["llama_cpp"]:  # it loads a file, for which the plan has a placeholder
            row["llama_cpp"] = join(["llama-server", "--model", path])
        if row.get("disaggregated"):
            commands = row["disaggregated"]["commands"]
            commands.update({role: command(text) for role, text in commands.items()})
    for one in found["commands"]:
        one["command"] = found["best"][command_key(one["engine"])]
    return found


def replaced(value: Any, old: str, new: str) -> Any:
    return mapped(value, lambda text: new if text == old else text)


def read_script(text: str) -> Any:
    """The words of a script, any other text as it is."""
    return shlex.split(text) if text.startswith(("printf ", "pip ")) else text


def manifest_of(plan: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    """The documents of a manifest as the containers see them."""
    found = yaml.load_all(emit(plan, kind, IMAGE), LOADER)
    seen = [in_container(one) if kind == "k8s" else mapped(one, interpolated) for one in found]
    return [mapped(document, read_script) for document in seen]


@cache
def plain_manifest(plan: str, kind: str) -> str:
    """The manifest of a plan for a model whose name is NAME, as JSON."""
    document = json.loads(plan)
    return json.dumps(manifest_of(named(document, NAME, document["checkpoint"]), kind))


def check_manifests(plan: dict[str, Any], name: str, path: str) -> None:
    other, plain = named(plan, name, path), plan["checkpoint"]
    if any("\ud800" <= character <= "\udfff" for character in path):
        for kind in FILES:
            with pytest.raises(UsageError, match="not UTF-8"):
                emit(other, kind, IMAGE)
        return
    found = manifest_of(other, "k8s")
    for document in found:
        label = document["metadata"]["name"]
        assert LABEL.fullmatch(label), label
        assert len(label) <= LONGEST[document["kind"]], label
    # The name of all objects, without the roles of pools.
    label = re.sub(r"-(prefill|decode|router)$", "", found[0]["metadata"]["name"])
    k8s, compose = (json.loads(plain_manifest(json.dumps(plan), kind).replace(NAME, label)) for kind in FILES)
    expected = replaced(k8s, plain, "/checkpoint" if ":" in path else path)
    for document in expected:
        for volume in document["spec"].get("template", {"spec": {}})["spec"].get("volumes", ()):
            if "hostPath" in volume:
                volume["hostPath"]["path"] = path
    assert found == expected
    assert manifest_of(other, "compose") == replaced(compose, plain, path)


class Page(HTMLParser):
    """The tags of a page with their attributes, and its text.

    A span without attributes keeps the word of a command on one line, and a name may have any number of words.
    """

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[object, ...]] = []
        self.opened: list[tuple[object, ...]] = []
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.opened.append((tag, *attrs))
        self.tags += [] if self.opened[-1] == ("span",) else [self.opened[-1]]

    def handle_endtag(self, tag: str) -> None:
        # Tags that are never closed (meta, br) stand between.
        while self.opened and self.opened[-1][0] != tag:
            self.opened.pop()
        self.tags += [] if self.opened and self.opened.pop() == ("span",) else [(tag,)]

    def handle_comment(self, data: str) -> None:
        raise AssertionError(data)

    handle_pi = unknown_decl = handle_comment

    def handle_data(self, data: str) -> None:
        self.text += data


def check_report(plan: dict[str, Any], name: str, path: str) -> None:
    page = Page(make_report(named(plan, name, path), "plan", repeated("plan", [path])))
    assert page.tags == plain_tags(json.dumps(plan))
    assert printable(name) in page.text
    assert join([path]) in page.text


@cache
def plain_tags(plan: str) -> list[tuple[object, ...]]:
    return Page(make_report(json.loads(plan), "plan", "kvcalc plan plain")).tags


def check_tables(plan: dict[str, Any], name: str, path: str) -> None:
    document = named(plan, name, path)
    head, cells = csv.reader(io.StringIO(tabulate(document, "csv"), newline=""))
    assert len(head) == len(cells)
    row = dict(zip(head, cells))
    assert row["model"] in (printable(name), f"'{printable(name)}")
    assert not row["model"].strip().startswith(("=", "+", "-", "@"))
    assert row["vllm"] == document["best"]["vllm"]
    table = tabulate(document, "tsv").split("\n")
    assert [line.count("\t") for line in table] == [len(head) - 1, len(head) - 1, 0]
    assert table[1].split("\t")[0] == one_line(name)


def check_screen(plan: dict[str, Any], name: str, path: str) -> None:
    """As many lines as with a plain name, of text that a terminal does not obey."""
    texts = []
    for document in (named(plan, name, path), plan):
        with redirect_stdout(io.StringIO()) as out:
            render(printable_document(document), Console(10**5))
        texts.append(re.sub(r" \\\n +", " ", out.getvalue()))
    assert all(line.isprintable() for line in texts[0].split("\n"))
    assert texts[0].count("\n") == texts[1].count("\n")


def check_errors(kvcalc: Any, path: str) -> None:
    for words in (("estimate", path), ("plan", "gpt2", "--emit", path), ("estimate", "gpt2", "--gpu", path)):
        result = kvcalc(*words)
        assert result.status in (2, 3), result
        assert result.err.count("\n") <= 2
        assert all(line.isprintable() for line in result.err.split("\n")), result.err


def commands_in(plan: dict[str, Any], kind: str) -> list[str]:
    """The commands that are printed, one a line."""
    text = emit(plan, kind).removesuffix("\n").split("\n")
    assert all(line.isprintable() for line in text), text
    return [line for line in text if not line.startswith("# ")]


def test_names_are_only_names(
    kvcalc: Any, plans: list[tuple[dict[str, Any], tuple[str, ...]]], pytestconfig: pytest.Config, tmp_path: Path
) -> None:
    commands: list[str] = []
    expected: list[list[str]] = []
    plain = [[run_in_bash(commands_in(named(plan, "plain", plan["checkpoint"]), kind), tmp_path) for kind in kinds]
             for plan, kinds in plans]  # fmt: skip
    names = hostile_names(pytestconfig.getoption("--names"), pytestconfig.getoption("--fuzz-seed"))
    # Manifests are slow, so a short run takes the plans in turn.
    is_long = len(names) >= 1000
    for place, name in enumerate(names):
        path = os.path.join(tmp_path, "hostile", name)
        os.makedirs(path)
        try:
            for turn, ((plan, kinds), meant) in enumerate(zip(plans, plain)):
                if is_long or turn == place % len(plans):
                    check_manifests(plan, name, path)
                for kind, records in zip(kinds, meant):
                    commands += commands_in(named(plan, name, path), kind)
                    expected += replaced(records, plan["checkpoint"], path)
            check_report(plans[0][0], name, path)
            check_tables(plans[0][0], name, path)
            if place % 10 == 0:
                check_screen(plans[0][0], name, path)
                check_errors(kvcalc, path)
        except AssertionError as error:
            pytest.fail(f"{name!r}: {error}")
        os.rmdir(path)
    assert run_in_bash(commands, tmp_path) == expected
