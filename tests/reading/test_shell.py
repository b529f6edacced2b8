"""What a script starts, as bash would: expansions, branches, functions, shells in shells, other machines."""

from __future__ import annotations

from typing import Any

import pytest

from kvcalc import check
from kvcalc.errors import DoesNotFitError, UsageError
from kvcalc.planning.check.servers import servers_in

SERVE = "vllm serve a/b"


def options(text: str) -> list[str]:
    """The words after the model of the one server in a text."""
    (server,) = servers_in(text)
    return server.words[1:]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        # Arrays and positional parameters.
        (f'A=(-tp 2 # two\n  --x "y z")\nA+=(-q)\n{SERVE} "${{A[@]}}"', ["-tp", "2", "--x", "y z", "-q"]),
        (f'A=(-tp 2)\nA[1]=4\n{SERVE} "${{A[@]}}" ${{#A[@]}} "${{A[0]}}"', ["-tp", "4", "2", "-tp"]),
        (f'set -- -tp 2\n{SERVE} "$@" $#', ["-tp", "2", "2"]),
        (f'set -- a -tp 2\nshift\n{SERVE} "${{@:1}}"', ["-tp", "2"]),
        (f'A=(1 "2 3")\n{SERVE} "${{A[*]}}" "${{A[@]:1}}"', ["1 2 3", "2 3"]),
        ('C=(vllm serve a/b)\nC+=(-tp 2)\n"${C[@]}"', ["-tp", "2"]),
        # Quotes, splitting and escapes.
        (f"A='two words'\n{SERVE} $A \"$A\"", ["two", "words", "two words"]),
        (f"{SERVE} $'a\\x41' a\\ b 'c'\"d\" \"\" \"\\$x\"", ["aA", "a b", "cd", "", "$x"]),
        (f"{SERVE}\\\n -tp 2", ["-tp", "2"]),
        # Expansions.
        (f"A=\n{SERVE} ${{A:-1}} ${{A-2}} ${{B:=3}} $B ${{A:+4}} ${{B:+5}}", ["1", "3", "3", "5"]),
        (f"A=x/y.z\n{SERVE} ${{A##*/}} ${{A%.*}} ${{A/y/q}}", ["y.z", "x/y", "x/q.z"]),
        (f"A=x/y.z\n{SERVE} ${{A^^}} ${{A:2:1}}", ["X/Y.Z", "y"]),
        (f"N=1; M=2\n{SERVE} $((N * (M + 1) - 1)) $((7 / 2))", ["2", "3"]),
        (f"{SERVE} -tp `echo 2` $(printf '%s-' a b) $(seq 1 2)", ["-tp", "2", "a-b-", "1", "2"]),
        (f"declare -i T=2; readonly M=x\n{SERVE} $T $M", ["2", "x"]),
        (f"A=B; B=2\n{SERVE} ${{!A}}", ["2"]),
        # Branches, loops and functions.
        (f"case x in y) T=1;; x|z) T=2;; *) T=3;; esac; {SERVE} $T", ["2"]),
        (f"T=2; if [ $T = 1 ]; then T=4; elif [[ $T -ge 2 && x == x* ]]; then T=8; fi; {SERVE} $T", ["8"]),
        (f"f() {{ local t=${{1:-4}}; {SERVE} $t; }}\nf 2", ["2"]),
        (f"for x in 1 2; do A=\"$A $x\"; [ $x = 1 ] && continue; break; done; set -- x\n{SERVE} $1", ["x"]),
        (f"if command -v x; then echo; fi\n{SERVE} -tp 2", ["-tp", "2"]),
        (f"pgrep vllm || {SERVE} -tp 2", ["-tp", "2"]),
        (f"{SERVE} -tp 2 || {SERVE} -tp 1", ["-tp", "2"]),
        (f"[ $# -ge 1 ] || {{ echo usage; exit 1; }}\n{SERVE} -tp 2", ["-tp", "2"]),
        (f'while [ $# -gt 0 ]; do shift; done\n{SERVE} -tp 2', ["-tp", "2"]),
        (f"t=1\nf() {{ local t=2; }}\nf\n{SERVE} $t", ["1"]),
        (f"readonly t=2; t=3; {SERVE} $t", ["2"]),
        (f'IFS=,; A="-tp,2"; B=(3 4)\n{SERVE} $A "${{B[*]}}"', ["-tp", "2", "3,4"]),
        # A mistake behind the command is no part of it, and one before it neither.
        (f"{SERVE} -tp 2\n' unclosed", ["-tp", "2"]),
        (f"Here's how:\n{SERVE} -tp 2\nIt doesn't start.\n", ["-tp", "2"]),
        # Both arms mean the same server.
        (f"if nvidia-smi; then {SERVE} -tp 2; else {SERVE} -tp 2 --port 3; fi", ["-tp", "2"]),
        # A default of the script, where the user's own environment may have a value.
        (f'if [ -z "$T" ]; then T=2; fi\n{SERVE} -tp $T', ["-tp", "2"]),
        # Shells in shells, files and other machines.
        (f"TP=2 bash -c '{SERVE} -tp $TP'", ["-tp", "2"]),
        (f"eval '{SERVE}' -tp 2", ["-tp", "2"]),
        (f"cat > r.sh <<'E'\n{SERVE} -tp $1\nE\nbash r.sh 2", ["-tp", "2"]),
        (f"bash <<E\n{SERVE} -tp 2\nE", ["-tp", "2"]),
        (f"echo 'T=2' > x.env; . x.env; {SERVE} $T", ["2"]),
        (f"cat <<E > f\n{SERVE} -tp 2\nE\nchmod +x f; ./f", ["-tp", "2"]),
        (f"ssh -p 22 u@h '{SERVE} -tp 2'", ["-tp", "2"]),
        (f"su - x -c '{SERVE} -tp 2'", ["-tp", "2"]),
        (f"tmux new -d -s x '{SERVE} -tp 2'", ["-tp", "2"]),
        ("echo -tp 2 | xargs vllm serve a/b", ["-tp", "2"]),
        # Prompts, quotes of a mail, and two shells of Windows.
        (f"(env) me@host:~/x$ {SERVE} -tp 2", ["-tp", "2"]),
        (f"> {SERVE} \\\n>   -tp 2", ["-tp", "2"]),
        (f"{SERVE} `\n  -tp 2", ["-tp", "2"]),
        (f"$a = @('-tp', '2')\n{SERVE} @a `\n  -q", ["-tp", "2", "-q"]),
        (f"set T=2\n{SERVE} ^\n  -tp %T%", ["-tp", "2"]),
    ],
)  # fmt: skip
def test_words_are_those_that_bash_gives_to_the_program(text: str, words: list[str]) -> None:
    assert options(text) == words


@pytest.mark.parametrize(
    ("text", "environment"),
    [
        (f"A=1\n{SERVE}", {}),
        (f"export A=1\n{SERVE}", {"A": "1"}),
        (f"A=1; export A; B=2 {SERVE}", {"A": "1", "B": "2"}),
        (f"export A=1 B=2; unset A; {SERVE}", {"B": "2"}),
        (f"export A=1 B=2; env -u A C=3 {SERVE}", {"B": "2", "C": "3"}),
        (f"export A=1; env -i B=2 {SERVE}", {"B": "2"}),
        (f"set -a; A=1; set +a; B=2; {SERVE}", {"A": "1"}),
        (f"export A=1; sudo B=2 {SERVE}", {"B": "2"}),
        (f"export A=1; sudo -E {SERVE}", {"A": "1"}),
        (f"declare -x A=1; nohup {SERVE} &", {"A": "1"}),
        (f"(export A=1); {SERVE}", {}),
        (f"A=1 exec {SERVE}", {"A": "1"}),
        (f"f() {{ {SERVE}; }}; A=1 f", {"A": "1"}),
        ("export A=1; docker run -e A -eB=2 --env=C=3 -e D vllm/vllm-openai --model a/b",
         {"A": "1", "B": "2", "C": "3"}),
        ("export A=1; docker run vllm/vllm-openai --model a/b", {}),
        ("$env:A = '1'\n" + SERVE, {"A": "1"}),
        ("@echo off\nset A=1\n" + SERVE, {"A": "1"}),
    ],
)  # fmt: skip
def test_a_program_has_the_exported_variables(text: str, environment: dict[str, str]) -> None:
    (server,) = servers_in(text)
    assert {**server.environment} == environment


@pytest.mark.parametrize(
    ("text", "release"),
    [
        (f"pip install -U 'vllm==0.9.1' && {SERVE}", "0.9.1"),
        (f"uv pip install vllm[audio]==0.9.1\n{SERVE}", "0.9.1"),
        (f"uv run --with vllm==0.9.1 {SERVE}", "0.9.1"),
        ("uvx vllm@0.9.1 serve a/b", "0.9.1"),
        (f"uvx --from vllm==0.9.1 {SERVE}", "0.9.1"),
        (f"pip install vllm==0.9.1; pip install -U vllm; {SERVE}", None),
        (f"pip install 'vllm>=0.9.1'; {SERVE}", None),
        ("pip install sglang[all]==0.5.4\nsglang serve --model-path a/b", "0.5.4"),
        ("docker run vllm/vllm-openai:v0.11.0 --model a/b", "0.11.0"),
        ("docker run localhost:5000/x/vllm-openai:v0.11.0 --model a/b", "0.11.0"),
        # The tag of somebody's own image is theirs.
        (f"docker run acorn/inference:3.1 {SERVE}", None),
        (
            "docker run --entrypoint bash vllm/vllm-openai:v0.11.0 -c 'pip install vllm==0.9.1 && vllm serve a/b'",
            "0.9.1",
        ),
    ],
)
def test_an_image_or_a_package_states_the_release(text: str, release: str | None) -> None:
    (server,) = servers_in(text)
    assert server.release == release


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (f"case $(hostname) in a*) T=2;; *) T=4;; esac; {SERVE} -tp $T", "different servers: -tp 2, or -tp 4"),
        (f"if nvidia-smi; then {SERVE}; else {SERVE} -q; fi", "different servers: a/b, or a/b -q"),
        (f'[ -n "$X" ] && export VLLM_ALLOW_LONG_MAX_MODEL_LEN=1\n{SERVE}', "VLLM_ALLOW_LONG_MAX_MODEL_LEN=1"),
        (f"if x; then\nT=2\n{SERVE} -tp $T", "branch or loop is not complete"),
        ("vllm serve 'a/b -tp 2", "an unclosed quote"),
        ("ollama run qwen3:8b", "ollama run qwen3:8b: the settings of ollama"),
        ("lms load qwen3-8b", "lms load qwen3-8b: the settings of lms"),
    ],
)
def test_a_server_that_is_not_certain_is_refused(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said.replace("(", r"\(")):
        servers_in(text)


@pytest.mark.parametrize("value", ["$T", "${T}", "$(nvidia-smi -L | wc -l)", "$1", "${A[0]}"])
@pytest.mark.parametrize(
    "before", ["", "read T\n", "T=2; bash -c '", "T=$(nproc)\n", "T=2; printf -v T x\n", "T=2; ((T += 1))\n"]
)
def test_a_value_from_outside_is_no_number(value: str, before: str) -> None:
    said = r"whole number|expected one argument|stands for a value that is not here"
    with pytest.raises((UsageError, DoesNotFitError), match=said):
        check(f"{before}vllm serve Qwen/Qwen3-8B -tp {value}" + ("'" if before.endswith("'") else ""), "h100x2")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("vllm serve Qwen/Qwen3-8B \u2013tp 2", "en dash"),
        ("vllm serve \u201cQwen/Qwen3-8B\u201d", "left double quotation mark"),
        ("vllm serve Qwen/Qwen3-8B\u00a0-tp 2", "no-break space"),
        ("vllm serve Qwen/Qwen3-8B -tp 2 \\ \n  --max-model-len 8192", "backslash with a space"),
        ("vllm serve Qwen/Qwen3-8B \\ -tp 2", "backslash with a space"),
        ("docker run vllm/vllm-openai vllm serve Qwen/Qwen3-8B", "gets 'vllm' as an argument"),
        ("docker run vllm/vllm-openai bash -c 'vllm serve Qwen/Qwen3-8B'", "gets 'bash' as an argument"),
    ],
)
def test_a_word_that_the_program_does_not_take_is_a_reason_not_to_start(text: str, said: str) -> None:
    with pytest.raises(DoesNotFitError, match=said) as raised:
        check(text, "h100x2")
    document: Any = raised.value.document
    assert document["starts"] is False


@pytest.mark.parametrize(
    "text",
    [
        "echo vllm serve a/b",
        "which vllm serve",
        "pkill -f vllm serve",
        'alias v="vllm serve a/b"',
        "false && vllm serve a/b",
    ],
)
def test_a_command_that_only_names_a_server_starts_none(text: str) -> None:
    assert servers_in(text) == []
