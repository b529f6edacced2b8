"""Completion: the candidates for every kind of word, and the scripts as run by bash, zsh and fish."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvcalc.cli.app import COMMANDS
from kvcalc.cli.completion import script_of
from kvcalc.engines.declarations import OPTIONS
from tests.conftest import ROOT, preset_names


@pytest.fixture
def candidates(kvcalc: Any) -> Any:
    """The candidates for the last word, without descriptions and directives."""

    def call(*words: str) -> list[str]:
        result = kvcalc("completion", "words", "--", *words)
        assert (result.status, result.err) == (0, "")
        return [line.partition("\t")[0] for line in result.out.splitlines() if not line.startswith(":")]

    return call


def test_commands_and_their_options(candidates: Any) -> None:
    assert candidates("") == list(COMMANDS)
    assert candidates("es") == ["estimate"]
    assert candidates("--v") == ["--version"]
    assert candidates("estimate", "--kv-d") == ["--kv-dtype"]
    assert "--kv-dtype" not in candidates("estimate", "--kv-dtype", "fp8", "--k")
    assert candidates("estimate", "--gpu", "h100", "--gpu-m") == ["--gpu-memory"]
    assert candidates("nonsense", "") == candidates("") * 0


@pytest.mark.parametrize("command", ["estimate", "fit", "plan", "compare", "sweep", "measure"])
def test_models_by_name_and_by_repository(candidates: Any, command: str) -> None:
    assert candidates(command, "") == preset_names()
    assert "llama-3-70b" in candidates(command, "LLAMA-3-")
    assert "meta-llama/Meta-Llama-3-70B" in candidates(command, "meta-llama/")
    assert all(name.casefold().startswith("qwen/") for name in candidates(command, "Qwen/"))


def test_every_model_and_device_that_completes_is_known(candidates: Any) -> None:
    from kvcalc.model.presets import all_presets

    names = {name for preset in all_presets() for name in (preset.name, *preset.aliases)}
    completed = {name for letter in "abcdefghijklmnopqrstuvwxyz0123456789" for name in candidates("estimate", letter)}
    assert completed == names


def test_several_models_and_one_are_told_apart(candidates: Any) -> None:
    assert "gpt2" in candidates("compare", "llama-7b", "gp")
    assert candidates("estimate", "llama-7b", "gp") == []
    assert "--context" in candidates("estimate", "llama-7b", "")


def test_devices_and_their_number(candidates: Any) -> None:
    assert {"h100-sxm", "h100"} <= set(candidates("estimate", "x", "--gpu", "h10"))
    assert candidates("estimate", "x", "--gpu", "h100x") == ["h100x2", "h100x4", "h100x8", "h100x16"]
    assert candidates("estimate", "x", "--gpu", "nothingx") == []
    assert candidates("estimate", "x", "--gpu", "loc") == ["local"]
    assert candidates("fit", "x", "--gpu=mi350x-") == ["--gpu=mi350x-288gb"]
    assert "h100," not in candidates("sweep", "x", "--gpu", "h100,l4")
    assert "h100,l40s" in candidates("sweep", "x", "--gpu", "h100,l4")
    assert "h100-sxm=" in candidates("plan", "x", "--price", "h1")
    assert candidates("gpus", "mi350x-") == ["mi350x-288gb"]


def test_engines_their_releases_and_their_options(candidates: Any) -> None:
    assert candidates("estimate", "x", "--engine", "") == [*OPTIONS, "all"]
    assert candidates("plan", "x", "--engine", "sg") == ["sglang"]
    assert "vllm@0.11" in candidates("estimate", "x", "--engine", "vllm@")
    assert {"sglang@0.5.9"} <= set(candidates("estimate", "x", "--engine", "sglang@0.5."))
    assert "llama.cpp@b6097" in candidates("fit", "x", "--engine", "llama.cpp@b")
    assert candidates("estimate", "x", "--engine", "logical@") == []
    assert candidates("sweep", "x", "--engine", "vllm,sg") == ["vllm,sglang"]
    assert candidates("estimate", "x", "--page") == []
    assert candidates("estimate", "x", "--engine", "sglang", "--page") == ["--page-size"]
    assert candidates("estimate", "x", "--engine=sglang@0.5", "--page") == ["--page-size"]


def test_types_choices_and_paths(candidates: Any) -> None:
    assert "nvfp4" in candidates("estimate", "x", "--dtype", "")
    assert "auto" in candidates("estimate", "x", "--kv-dtype", "")
    assert candidates("estimate", "x", "--attention", "mq") == ["mqa"]
    assert candidates("sweep", "x", "--format", "js") == ["jsonl", "json"]
    assert candidates("estimate", "x", "--get", "kv_cache.total") == ["kv_cache.total_bytes"]
    assert candidates("fit", "x", "--get", "fit.free_b") == ["fit.free_bytes"]
    assert candidates("measure", "x", "--get", "runs.0.held") == ["runs.0.held_bytes"]
    assert "engines.0.total_bytes" in candidates("estimate", "x", "--engine", "all", "--get", "engines.")
    assert candidates("models", "--family", "dee") == ["DeepSeek"]
    assert candidates("completion", "z") == ["zsh"]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_completes_paths_of_its_document(candidates: Any, kvcalc: Any, command: str) -> None:
    if "--get" in kvcalc(command, "--help").out:
        assert "schema_version" in candidates(command, "--get", "schema")


def test_a_model_or_device_of_a_group_is_completed(candidates: Any) -> None:
    assert candidates("models", "")[:3] == ["find", "show", "check"]
    assert candidates("models", "llama-3-7") == candidates("models", "show", "llama-3-7") == ["llama-3-70b"]
    assert candidates("models", "llama-3-70b", "--get", "conf") == ["config"]


@pytest.mark.parametrize(
    "words",
    [("audit", ""), ("batch", ""), ("models", "check", ""), ("estimate", "./"), ("plan", "x", "--lengths", ""),
     ("measure", "--compare", "a.json", ""), ("score", ""), ("score", "a.json", "")],
)  # fmt: skip
def test_files_are_left_to_the_shell(kvcalc: Any, words: tuple[str, ...]) -> None:
    assert ":files" in kvcalc("completion", "words", "--", *words).out.splitlines()


def test_your_own_presets_complete_and_a_broken_folder_says_nothing(
    candidates: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "acorn-7b.yaml").write_text("name: acorn-7b\naliases:\n  - acorn/Acorn-7B\n  - 'oak'\nsource: here\n")
    monkeypatch.setenv("KVCALC_PRESETS", str(tmp_path))
    assert candidates("estimate", "aco") == ["acorn-7b", "acorn/Acorn-7B"]
    assert candidates("estimate", "oa") == ["oak"]
    monkeypatch.setenv("KVCALC_PRESETS", str(tmp_path / "missing"))
    assert candidates("estimate", "aco") == []


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ((), "kvcalc completion bash"),
        (("zh",), "did you mean zsh?"),
        (("cmd",), "bash, zsh or fish"),
        (("bash", "x"), ""),
    ],
)
def test_a_shell_that_is_not_known(kvcalc: Any, words: tuple[str, ...], hint: str) -> None:
    result = kvcalc("completion", *words)
    assert (result.status, result.out) == (2, "")
    assert hint in result.err


def test_completing_loads_nothing_heavy() -> None:
    code = (
        "import sys; from kvcalc.cli.app import run\nheavy = ('rich', 'yaml', 'torch', 'kvcalc.throughput')\n"
        "run(['completion', 'words', '--', *sys.argv[1:]])\n"
        "print([name for name in heavy if name in sys.modules], file=sys.stderr)"
    )
    for words in (["estimate", "ll"], ["estimate", "x", "--gpu", "h"], ["estimate", "x", "--get", "k"], [""]):
        done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=True)
        assert done.stderr == "[]\n"


@pytest.fixture
def shell_path(tmp_path: Path) -> str:
    """A PATH whose `kvcalc` is that of this checkout."""
    program = tmp_path / "bin" / "kvcalc"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nPYTHONPATH="{ROOT}" exec "{sys.executable}" -m kvcalc "$@"\n')
    program.chmod(0o755)
    return f"{program.parent}{os.pathsep}{os.environ['PATH']}"


def run_shell(shell: str, code: str, path: str, folder: Path, *arguments: str) -> list[str]:
    found = shutil.which(shell)
    if found is None:
        pytest.skip(f"{shell} is not installed")
    flags = {"bash": ["--norc"], "zsh": ["-f"], "fish": ["--no-config"]}[shell]
    script = folder / f"completion.{shell}"
    script.write_text(script_of(shell))
    done = subprocess.run(
        [found, *flags, "-c", code, *([] if shell == "fish" else [shell]), str(script), *arguments],
        capture_output=True, text=True, check=False, cwd=folder, env={**os.environ, "PATH": path, "HOME": str(folder)},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


# The typed text -> the candidates that the shell gets.
TYPED = {
    "kvcalc est": ["estimate"],
    "kvcalc estimate llama-3-7": ["llama-3-70b"],
    "kvcalc estimate x --kv-dty": ["--kv-dtype"],
    "kvcalc estimate x --gpu h100x": ["h100x2", "h100x4", "h100x8", "h100x16"],
    "kvcalc sweep x --engine vllm,sg": ["vllm,sglang"],
    "kvcalc estimate x --engine vllm@0.11": ["vllm@0.11"],
    "kvcalc estimate x --get kv_cache.total": ["kv_cache.total_bytes"],
    "kvcalc estimate x --gpu=mi350x-": ["--gpu=mi350x-288gb"],
    "kvcalc batch ques": ["questions.jsonl"],
}


@pytest.mark.parametrize("typed", TYPED)
def test_bash(typed: str, shell_path: str, tmp_path: Path) -> None:
    (tmp_path / "questions.jsonl").touch()
    code = (
        'COMP_WORDBREAKS=$\' \\t\\n"\\\'@><=;|&(:\'; source "$1"; COMP_LINE="$2"; COMP_POINT=${#COMP_LINE}; _kvcalc; '
        'printf "%s\\n" "${COMPREPLY[@]}"'
    )
    expected = [re.sub(r".*(?=@)|.*=", "", name) for name in TYPED[typed]]
    assert run_shell("bash", code, shell_path, tmp_path, typed) == expected


BASH = ["bash", "--rcfile", "rc", "-i"]


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
@pytest.mark.parametrize("typed", TYPED)
def test_bash_at_a_terminal(typed: str, shell_path: str, tmp_path: Path) -> None:
    """The result in the line editor: `echo`, typed in front of the line, prints the completed line."""
    import pty

    (tmp_path / "questions.jsonl").touch()
    (tmp_path / "rc").write_text(f"PS1=; bind 'set bell-style none'\n{script_of('bash')}")
    environment = {**os.environ, "PATH": shell_path, "HOME": str(tmp_path), "TERM": "dumb"}
    outer, inner = pty.openpty()
    shell = subprocess.Popen(
        BASH,
        stdin=inner,
        stdout=subprocess.PIPE,
        stderr=inner,
        cwd=tmp_path,
        env=environment,
    )
    try:
        os.write(outer, f"{typed}\t\x01echo \rexit\r".encode())
        out = shell.communicate(timeout=300)[0].decode()
    finally:
        shell.kill()
        os.close(inner)
        os.close(outer)
    completed = TYPED[typed][0] if len(TYPED[typed]) == 1 else "h100x"
    assert out.rstrip() == f"{typed.rpartition(' ')[0]} {completed}"


def test_bash_completes_the_word_before_the_cursor(shell_path: str, tmp_path: Path) -> None:
    code = 'source "$1"; COMP_LINE="$2"; COMP_POINT=$3; _kvcalc; printf "%s\\n" "${COMPREPLY[@]}"'
    assert run_shell("bash", code, shell_path, tmp_path, "kvcalc es x --json", "9") == ["estimate"]
    every = run_shell("bash", code, shell_path, tmp_path, "kvcalc ", "7")
    assert every == list(COMMANDS)


@pytest.mark.parametrize("typed", TYPED)
def test_zsh(typed: str, shell_path: str, tmp_path: Path) -> None:
    """zsh's completion functions exist only in its line editor. They are replaced by functions that print their
    arguments."""
    (tmp_path / "questions.jsonl").touch()
    code = (
        "compdef() { :; }; _files() { local name; for name in ${PREFIX}*(N); do print -r -- $name; done }; "
        "_describe() { print -rl -- ${(P)3}; }; "
        'source "$1"; words=(${(z)2}); CURRENT=$#words; PREFIX=$words[-1]; _kvcalc || exit 0'
    )
    found = run_shell("zsh", code, shell_path, tmp_path, typed)
    assert [re.split(r"(?<!\\):", line)[0].replace("\\:", ":") for line in found] == TYPED[typed]


@pytest.mark.parametrize("typed", TYPED)
def test_fish(typed: str, shell_path: str, tmp_path: Path) -> None:
    (tmp_path / "questions.jsonl").touch()
    found = run_shell("fish", "source $argv[1]; complete -C $argv[2]", shell_path, tmp_path, typed)
    assert sorted(line.partition("\t")[0] for line in found) == sorted(TYPED[typed])
