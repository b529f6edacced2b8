"""Bad input: a wrong MODEL, option or file gives one clear line and exit code 2 or 3."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from kvcalc.cli.app import COMMANDS
from kvcalc.engines.options import engines_with
from kvcalc.model.reader import MAX_LAYERS
from kvcalc.model.resolve import MAX_CONFIG_BYTES, MAX_KEYS, MAX_VALUES
from tests.conftest import ROOT
from tests.rows import every_row

GOOD: dict[str, Any] = {"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64}
WINDOWED = {**GOOD, "model_type": "gemma3_text", "head_dim": 16, "num_key_value_heads": 2, "sliding_window": 4}
LIMIT_MIB = 200

# Run the command line and print the peak memory, in kB, on the last line of stderr. getrusage cannot be used here,
# because its peak includes the memory of the parent process.
SCRIPT = """
import sys
from kvcalc.cli.app import run
status = run(sys.argv[1:])
with open("/proc/self/status") as file:
    print([line.split()[1] for line in file if line.startswith("VmHWM")][0], file=sys.stderr)
sys.exit(status)
"""
pytestmark = pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="peak memory is read from /proc")


def refused(*arguments: object, stdin: Any = subprocess.DEVNULL) -> tuple[int, str]:
    """The exit code and the first line of stderr of `kvcalc estimate`, which must fail with a short error."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, "estimate", *map(str, arguments)],
        stdin=stdin, capture_output=True, timeout=300, check=False,
    )  # fmt: skip
    *lines, peak = done.stderr.decode().splitlines()
    assert done.returncode in (2, 3), lines
    assert done.stdout == b""
    assert 1 <= len(lines) <= 2
    assert lines[0].startswith("kvcalc: ")
    assert all(len(line) < 4100 for line in lines)
    assert int(peak) < LIMIT_MIB * 1024
    return done.returncode, lines[0]


def with_(**changes: object) -> str:
    return json.dumps({**GOOD, **changes})


CONTENTS = {
    "nothing": ("", 2, "not JSON"),
    "cut short": ('{"model_type": "llama", "num_hid', 2, "not JSON"),
    "zero bytes": ("\0" * 1000, 2, "not JSON"),
    "a list": ("[1]", 2, "not a JSON object"),
    "a deep object": ('{"a":' * 100_000, 2, "nested too deeply"),
    "a deep list": ("[" * 2_000_000, 2, "values"),
    "very many values": ('{"x": [' + "[]," * 2_600_000 + "1]}", 2, f"more than {MAX_VALUES:,} values"),
    "very many keys": ("{" + ",".join(f'"{n}":1' for n in range(240_000)) + "}", 2, f"at most {MAX_KEYS:,}"),
    "wide characters": (json.dumps({"x": "\U0001f600" * 1_900_000}, ensure_ascii=False), 3, "model_type is missing"),
    "a key twice": ('{"model_type": "llama", "head_dim": 64, "head_dim": 128}', 2, "'head_dim' appears twice"),
    "a number of 5,000 digits": ('{"x": ' + "9" * 5000 + "}", 2, "thousands of digits"),
    "a number of 4,000 digits": ('{"model_type": "llama", "num_hidden_layers": ' + "9" * 4000 + "}", 3, "40 digits"),
    "a long model_type": (json.dumps({"model_type": "l" * 7_000_000}), 3, "model_type 'lll"),
    "a long key": (with_(**{"num_kv_" + "k" * 7_000_000: 3}), 3, "num_kv_kkk"),
    "a string for a number": (with_(num_hidden_layers="2"), 3, "num_hidden_layers is '2': must be an integer"),
    "a float": (with_(num_hidden_layers=2.5), 3, "num_hidden_layers is 2.5: must be an integer"),
    "infinity": (with_(num_hidden_layers=float("inf")), 3, "num_hidden_layers is inf"),
    "null heads": (with_(num_attention_heads=None), 3, "num_attention_heads is null"),
    "no heads": (with_(num_attention_heads=0), 3, "num_attention_heads is 0: must be at least 1"),
    "negative layers": (with_(num_hidden_layers=-3), 3, "num_hidden_layers is -3: must be at least 1"),
    "a billion layers": (with_(num_hidden_layers=10**9), 3, f"must be at most {MAX_LAYERS:,}"),
    "an absurd width": (with_(head_dim=10**15), 3, "must be at most 1,000,000,000,000"),
    "a list of the wrong length": (json.dumps({**WINDOWED, "layer_types": ["full_attention"]}), 3, "a list of 1"),
    "a list of other things": (json.dumps({**WINDOWED, "layer_types": [1, 2]}), 3, "layer_types contains 1"),
    "a model_type that is a list": (with_(model_type=["llama"]), 3, "model_type is ['llama']: must be a string"),
}  # fmt: skip


@pytest.mark.parametrize("case", CONTENTS)
def test_a_bad_config_is_one_line(case: str, tmp_path: Path) -> None:
    text, status, message = CONTENTS[case]
    path = tmp_path / "bad.json"
    path.write_text(text)
    got, line = refused(path)
    assert got == status
    assert message in line


def test_200_megabytes_are_not_read(tmp_path: Path) -> None:
    path = tmp_path / "big.json"
    with path.open("wb") as file:
        file.truncate(200_000_000)
    assert refused(path) == (
        2, f"kvcalc: {path}: 200,000,000 bytes; at most {MAX_CONFIG_BYTES:,} are read"
    )  # fmt: skip
    with path.open("rb") as file:
        assert refused("-", stdin=file) == (2, f"kvcalc: stdin: more than {MAX_CONFIG_BYTES:,} bytes")


def test_endless_input_ends() -> None:
    with open("/dev/zero", "rb") as zero:
        assert refused("-", stdin=zero)[0] == 2
    assert refused("/dev/zero") == (2, "kvcalc: /dev/zero: not a regular file")


def test_stdin_that_is_closed() -> None:
    done = subprocess.run(
        f"{sys.executable} -m kvcalc estimate - <&-", shell=True, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr.startswith("kvcalc: stdin: closed\n")


@pytest.mark.parametrize("place", ["pipe", "folder/config.json"])
def test_a_fifo_nobody_writes_to(tmp_path: Path, place: str) -> None:
    path = tmp_path / place
    path.parent.mkdir(exist_ok=True)
    os.mkfifo(path)
    asked = path if place == "pipe" else path.parent
    assert refused(asked) == (2, f"kvcalc: {path}: not a regular file")


def test_loops_of_links(tmp_path: Path) -> None:
    one, two, folder = tmp_path / "one", tmp_path / "two", tmp_path / "folder"
    one.symlink_to(two)
    two.symlink_to(one)
    folder.mkdir()
    (folder / "config.json").symlink_to("config.json")
    for path in (one, folder):
        assert "Too many levels of symbolic links" in refused(path)[1]


def test_folders(tmp_path: Path) -> None:
    assert refused(tmp_path) == (2, f"kvcalc: {tmp_path}: no config.json")
    for number in range(7):
        (tmp_path / f"model-{number}.json").write_text(json.dumps(GOOD))
    status, line = refused(tmp_path)
    assert status == 2
    assert line.endswith("no config.json, but " + ", ".join(f"model-{n}.json" for n in range(5)) + " and 2 more")
    (tmp_path / "config.json").mkdir()
    assert refused(tmp_path) == (2, f"kvcalc: {tmp_path / 'config.json'}: is a folder, not a file")


def test_a_folder_with_a_config_and_others_is_its_config(tmp_path: Path, kvcalc: Any) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GOOD))
    (tmp_path / "tokenizer.json").write_text("{")
    assert kvcalc("estimate", tmp_path, "--get", "model.num_layers").out == "2\n"


def test_a_preset_cannot_include_another(tmp_path: Path) -> None:
    path = tmp_path / "self.yaml"
    path.write_text("include: self.yaml\nname: self\n")
    assert refused(path) == (3, f"kvcalc: {path}: unknown key 'include'")
    path.write_text("config: &a {config: *a}\n")
    assert "anchors and aliases" in refused(path)[1]


def test_a_key_that_stands_twice_with_one_value_is_none_the_worse(tmp_path: Path, kvcalc: Any) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(GOOD)[:-1] + ', "hidden_size": 64}')
    assert kvcalc("estimate", path, "--get", "model.hidden_size").out == "64\n"


LOG = """\
INFO Initializing a V1 LLM engine with config: model='meta-llama/Meta-Llama-3-8B'
GPU KV cache size: 12,345 tokens
"""
RESULT = str(ROOT / "tests" / "logs" / "vllm-bench.json")
PLAN = ("plan", "llama-3-8b", "--input-tokens", "100", "--output-tokens", "10", "--concurrency", "2", "--gpu", "h100")
# A question that each command answers; LOG and QUESTIONS are files.
ANSWERED = {
    "estimate": ("estimate", "llama-3-8b"), "fit": ("fit", "llama-3-8b", "--gpu", "h100", "--engine", "sglang"),
    "compare": ("compare", "llama-3-8b"), "sweep": ("sweep", "llama-3-8b"), "plan": PLAN,
    "batch": ("batch", "QUESTIONS"), "audit": ("audit", "LOG"), "models": ("models",), "gpus": ("gpus",),
    "score": ("score", RESULT, "--gpu", "h100"),
    "prefix": ("prefix", str(ROOT / "tests" / "logs" / "mooncake.jsonl"), "llama-3-8b", "--gpu", "h100"),
    "measure": ("measure", "gpt2", "--layers", "1", "--context", "8", "--steps", "1", "--device", "cpu"),
}  # fmt: skip
# Every option refuses these, except the options that name a file to write.
NO_VALUES = ("", "-1", "no/such\x1b[31mthing", "9" * 5000)
TAKES_A_MODEL = ("estimate", "fit", "plan", "compare", "sweep", "measure")
NO_MODELS = ("no-such-model", "", "hf:", "hf:no\x1bslash", "/dev/null", "no/such.json", "\udcff", "x" * 10_000)
WRITES = ("--save", "--trace", "--report")


def bad_options() -> list[tuple[str, str, str, tuple[str, ...]]]:
    """(command, option, engine, values) for every option with a value. The engine is empty if none owns the option.

    The first command with an option gets all of NO_VALUES, and the others, which have the same parser, one of them.
    """
    import typer

    found: list[tuple[str, str, str, tuple[str, ...]]] = []
    times = Counter[str]()
    for command in ANSWERED:
        app = importlib.import_module(f"kvcalc.cli.{command}").app
        for parameter in typer.main.get_command(app).params:
            name = next((name for name in parameter.opts if name.startswith("--")), None)
            if name is None or name in WRITES or getattr(parameter, "is_flag", False) or parameter.nargs != 1:
                continue
            owners = engines_with(name[2:]) if command not in ("measure", "audit") else []
            values = (NO_VALUES[times[name] % len(NO_VALUES)],) if times[name] else NO_VALUES
            times[name] += 1
            found.append((command, name, owners[0] if owners else "", values))
    return found


def in_place(words: tuple[str, ...], folder: Path) -> list[str]:
    """The words, with LOG and QUESTIONS replaced by paths of files that are written to `folder`."""
    (folder / "LOG").write_text(LOG)
    (folder / "QUESTIONS").write_text('{"model": "llama-3-8b"}\n')
    return [str(folder / word) if word in ("LOG", "QUESTIONS") else word for word in words]


def check_refused(result: Any, statuses: tuple[int, ...] = (2, 3)) -> None:
    lines = result.err.splitlines()
    assert result.status in statuses, result
    assert result.out == ""
    assert 1 <= len(lines) <= 2, lines
    assert lines[0].startswith("kvcalc: ")
    assert "internal error" not in lines[0]
    assert all(line.isprintable() and len(line) < 4100 for line in lines), lines


@pytest.mark.parametrize("command", ANSWERED)
def test_the_questions_below_are_answered_without_the_bad_option(
    command: str, tmp_path: Path, kvcalc: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if command == "measure":
        pytest.importorskip("torch")
        from tests.measure.quick import quicken

        quicken(monkeypatch)
    result = kvcalc(*in_place(ANSWERED[command], tmp_path))
    assert result.status in (0, 5), result.err
    assert result.out != ""


@every_row("command, option, engine, values", bad_options())
def test_no_option_takes_nonsense(
    command: str, option: str, engine: str, values: tuple[str, ...], tmp_path: Path, kvcalc: Any
) -> None:
    if (command, option) == ("measure", "--device"):
        pytest.importorskip("torch")
    words = in_place(ANSWERED[command], tmp_path)
    if option in words:
        del words[words.index(option) : words.index(option) + 2]
    for value in values:
        check_refused(kvcalc(*words, *(("--engine", engine) if engine else ()), option, value))


@every_row("words", [
        *((command, "--bogus") for command in COMMANDS),
        *((command, "no-such-thing", "too", "many", "words") for command in COMMANDS if command != "compare"),
        *((command,) for command in ("estimate", "fit", "plan", "compare", "sweep", "audit", "measure")),
        *((command, "llama-3-8b", "--context") for command in ("estimate", "fit", "compare", "sweep", "measure")),
        *((command, name) for command in TAKES_A_MODEL for name in NO_MODELS),
        ("score", "no/such.json"), ("score", "/dev/null"), ("score", ""), ("score", RESULT), ("score",),
        ("score", RESULT, "--gpu", "h100", "--engine", "vllm,sglang"), ("score", "-", "-", "--gpu", "h100"),
        ("audit", "no/such.log"), ("audit", "/dev/null"), ("audit", ""), ("audit", "x" * 10_000),
        ("batch", "no/such.jsonl"), ("batch", "\udcff"), ("batch", "\0"), ("batch", "-", "--get", "nothing"),
        ("models", "show", ""), ("models", "show", "\x1b[31m"), ("gpus", "show", ""), ("gpus", "show", "no-such-gpu"),
        ("gpus", "shw"), ("measure", "--compare", "no/such.json", "/dev/null"), ("measure", "--compare", "one"),
        ("estimate", "llama-3-8b", "--gpu", "h100", "--calibrate", "\0"),
        ("fit", "llama-3-8b"), ("fit", "llama-3-8b", "--gpu", "h100x0"), ("fit", "llama-3-8b", "--gpu", "h100x-1"),
        ("estimate", "llama-3-8b", "--check"), ("estimate", "llama-3-8b", "--engine", "vllm@nope"),
        ("estimate", "llama-3-8b", "--json", "--get", "model"), ("estimate", "llama-3-8b", "--json", "--format", "csv"),
        ("sweep", "llama-3-8b", "--context", "1k..", "--json"), ("sweep", "llama-3-8b", "--context", "8k..1k"),
        ("sweep", "llama-3-8b", "--context", "1..2..3"), ("sweep", "llama-3-8b", "--context", "1..1E:0"),
        ("compare", "llama-3-8b", "--attention", "mha,nope"), (*PLAN, "--price", "h100"), (*PLAN, "--price", "h100=-2"),
        (*PLAN, "--max-gpus", "0"), ("measure", "llama-3-8b", "--sweep", "context=,batch"),
    ])  # fmt: skip
def test_no_command_takes_nonsense(words: tuple[str, ...], kvcalc: Any) -> None:
    check_refused(kvcalc(*words))


def test_a_module_pattern_that_is_not_modelled_is_named(kvcalc: Any, tmp_path: Path) -> None:
    scheme = {"quant_method": "fp8", "modules_to_not_convert": ["(?<=a)b"]}
    sizes = {"intermediate_size": 128, "vocab_size": 256, "torch_dtype": "bfloat16"}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**GOOD, **sizes, "quantization_config": scheme}), encoding="utf-8")
    pattern = "the module pattern '(?<=a)b' in quantization_config is not modelled"
    found = kvcalc("fit", path, "--gpu", "h100-sxm")
    assert (found.status, pattern in found.err.splitlines()[0], "--dtype" in found.err) == (3, True, True)
    found = kvcalc("estimate", path, "--context", "100")
    assert (found.status, pattern in found.err) == (0, True)
    assert kvcalc("fit", path, "--gpu", "h100-sxm", "--dtype", "fp8").status == 0
