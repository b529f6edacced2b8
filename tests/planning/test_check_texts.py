"""What `kvcalc check` makes of texts that people paste: apostrophes, lists of options, devices, and no end of them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from kvcalc import check
from kvcalc.errors import DoesNotFitError, KvcalcError, UsageError
from kvcalc.planning.check.servers import servers_in
from kvcalc.writing.shell import join, split

LLAMA = "meta-llama/Llama-3.1-8B-Instruct"
SERVE = f"vllm serve {LLAMA}"
IMAGE = "vllm/vllm-openai:v0.33.0"


@pytest.mark.parametrize(
    ("text", "options"),
    [
        (f"# don't forget HF_TOKEN\n{SERVE} -tp 2\n", [["-tp", "2"]]),
        (f"# We don't use 4\n{SERVE} -tp 2\n# it's fine\n{SERVE} -tp 4\n", [["-tp", "2"], ["-tp", "4"]]),
        (f"{SERVE} -tp 2  # don't use 4", [["-tp", "2"]]),
        (f'# a " alone\n{SERVE} -tp 2', [["-tp", "2"]]),
        (f"Here's how I start it:\n```bash\n{SERVE} \\\n  -tp 2\n```\nIt doesn't start.\n", [["-tp", "2"]]),
        (f"# a comment does not continue \\\n{SERVE} -tp 2", [["-tp", "2"]]),
        (f"{SERVE} -tp 2 \\\n  # -tp 4 \\\n", [["-tp", "2"]]),
        (f"bash -c '# first\n{SERVE} -tp 2'", [["-tp", "2"]]),
        (f"{SERVE} --a '#1' --b=#2 --c \"x # y\"", [["--a", "#1", "--b=#2", "--c", "x # y"]]),
        (f"{SERVE} --a '{{\n  \"b\": 1 # c\n}}' -tp 2", [["--a", '{\n  "b": 1 # c\n}', "-tp", "2"]]),
        (f"cat > x <<EOF\nit's\nEOF\n{SERVE} -tp 2", [["-tp", "2"]]),
    ],
)
def test_an_apostrophe_in_a_comment_hides_no_server(text: str, options: list[list[str]]) -> None:
    assert [server.words[1:] for server in servers_in(text)] == options


@pytest.mark.parametrize("word", ["$ARGS", '"${ARGS[@]}"', '"$@"', "$*", "${EXTRA_ARGS}", "$(cat options.txt)"])
def test_a_list_of_options_that_is_not_here_is_refused(word: str) -> None:
    with pytest.raises(UsageError, match="stands for options that are not here"):
        check(f"{SERVE} {word}", "h100")


@pytest.mark.parametrize(
    ("text", "options"),
    [
        (f'ARGS="-tp 2 --enforce-eager"\n{SERVE} $ARGS', ["-tp", "2", "--enforce-eager"]),
        (f"ARGS=\n{SERVE} $ARGS -tp 2", ["-tp", "2"]),
        (f"{SERVE} ${{ARGS:-}} -tp 2", ["-tp", "2"]),
        (f"TP=\n{SERVE} -tp ${{TP:-2}}", ["-tp", "2"]),
        (f"NAME='two words'\n{SERVE} --served-model-name $NAME", ["--served-model-name", "two", "words"]),
        (f"NAME='two words'\n{SERVE} --served-model-name \"$NAME\"", ["--served-model-name", "two words"]),
    ],
)
def test_a_list_of_options_that_the_script_sets_is_read(text: str, options: list[str]) -> None:
    assert [server.words[1:] for server in servers_in(text)] == [options]


def _pod(limits: str, command: str) -> str:
    container = f"{{image: '{IMAGE}', args: [{command}], resources: {limits}}}"
    return f"kind: Pod\nspec: {{containers: [{container}]}}"


@pytest.mark.parametrize(
    ("text", "needed"),
    [
        (f"CUDA_VISIBLE_DEVICES=0 {SERVE} -tp 4", 4),
        (f"export CUDA_VISIBLE_DEVICES=0,1,-1,3\n{SERVE} -tp 4", 4),
        (f"HIP_VISIBLE_DEVICES=0 {SERVE} -pp 2", 2),
        (f"CUDA_VISIBLE_DEVICES=0,1 {SERVE} -dp 4", 4),
        (f"docker run --gpus 1 {IMAGE} --model {LLAMA} -tp 4", 4),
        (f"docker run --gpus all -e CUDA_VISIBLE_DEVICES=0 {IMAGE} --model {LLAMA} -tp 4", 4),
        (f"docker run --gpus '\"device=0\"' {IMAGE} --model {LLAMA} -tp 2", 2),
        (_pod("{limits: {nvidia.com/gpu: 1}}", f"--model, {LLAMA}, -tp, '2'"), 2),
        (f"CUDA_VISIBLE_DEVICES=0,1 python -m sglang.launch_server --model-path {LLAMA} --dp 4", 4),
    ],
)
@pytest.mark.parametrize("gpu", ["h100", "h100x8"])
def test_a_server_does_not_start_on_fewer_devices_than_it_needs(text: str, needed: int, gpu: str) -> None:
    with pytest.raises(DoesNotFitError, match=rf"does not start: .* need.* {needed}\b"):
        check(text, gpu)


def test_devices_that_no_replica_needs_are_idle() -> None:
    for text in (f"CUDA_VISIBLE_DEVICES=0,1,2 {SERVE} -tp 2", f"docker run --gpus 3 {IMAGE} --model {LLAMA} -tp 2"):
        document: Any = check(text, "h100x8")
        assert (document["starts"], document["hardware"]["num_devices"]) == (True, 2)
    # The variables of the host are not the container's, unless docker is told to pass them on.
    for option, number in (("", 8), ("-e CUDA_VISIBLE_DEVICES", 2)):
        document = check(f"CUDA_VISIBLE_DEVICES=0,1 docker run {option} {IMAGE} --model {LLAMA}", "h100x8")
        assert document["hardware"]["num_devices"] == number


@pytest.mark.parametrize("value", ["''", "-1", "none"])
def test_a_server_without_devices_does_not_start(value: str) -> None:
    with pytest.raises(DoesNotFitError, match="leave it no device"):
        check(f"CUDA_VISIBLE_DEVICES={value} {SERVE}", "h100")
    # llama.cpp starts, on the host, of which nothing is known.
    with pytest.raises(UsageError, match="leave it no device"):
        check(f"CUDA_VISIBLE_DEVICES={value} llama-server -hf x/Qwen3-8B-GGUF:Q8_0", "h100")


def _nested_aliases(levels: int) -> str:
    rows = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    rows += [f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 9)}]" for level in range(1, levels)]
    return "\n".join([*rows, f"services: {{v: {{image: '{IMAGE}', command: *a{levels - 1}}}}}"])


def _nested_merges(levels: int) -> str:
    rows = ["a0: &a0 {x: 1}"]
    for level in range(1, levels):
        rows.append(f"a{level}: &a{level} {{<<: [{', '.join([f'*a{level - 1}'] * 9)}], k{level}: 1}}")
    return "\n".join(rows)


@pytest.mark.parametrize(
    "text",
    [
        "A=x\n" + "A=$A$A\n" * 40 + f"{SERVE} $A",
        "A=" + "x" * 60_000 + "\n" + "".join(f"A{number}=$A\n" for number in range(1000)) + SERVE,
        "".join(f"export A{number}=1\nsleep 1\n" for number in range(9000)) + SERVE,
        "ls\n" * 10_001 + SERVE,
        f"ls {'x' * 70_000}\n{SERVE}",
        f"{SERVE} " + "$(echo " * 50 + ")" * 50,
        "ls " * 200_000 + "\n" + SERVE,
        "f() { f; }\nf",
        "".join(f'[ -n "$A{number}" ] && B{number}=1\n' for number in range(9)) + SERVE,
        _nested_aliases(12),
        _nested_merges(12),
        f"a: &a [*a]\nservices: {{v: {{image: '{IMAGE}', command: *a}}}}",
        '{"a":' * 3000,
        "[" * 3000 + "]" * 3000,
        "env -i " * 3000 + SERVE,
        "exec " * 3000 + SERVE,
        'if [ "$B" ]; then N=1; ' + 'elif "$B" ]; then N=1; ' * 3000 + f"fi\n{SERVE}",
        f"A=$(({'1+' * 3000}1))\n{SERVE}",
        f"A={'${A:-' * 3000}{'}' * 3000}\n{SERVE}",
        f"if test {'! ' * 3000}x; then {SERVE}; fi",
        f"{SERVE} " + "${A##*serve " * 40_000,
        f"{SERVE} " + "a | " * 100_000,
        f"{SERVE} " + "a \\\n| " * 50_000,
        f"{SERVE} " + "!$" * 200_000,
        f"{SERVE} " + "== " * 150_000,
        f"{SERVE} " + '$"( & ' * 30_000,
        f"services: {{v: {{image: '{IMAGE}', command: [--model, 0x{'f' * 4000}]}}}}",
    ],
    ids=lambda text: text[:20],
)
@pytest.mark.timeout(20)  # these took minutes, or all memory
def test_texts_without_a_bound_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"at most|too large|nested|more than"):
        servers_in(text)


@pytest.mark.parametrize(
    "text",
    [
        "it's\n" + "x\n" * 9000, "'\n" + "''\n" * 9000, "cat <<EOF\n" * 9000, "ls " * 30_000, "$(" * 9 + ")" * 9,
        "while [ 1 = 1 ]; do ls; done\n", "".join(f"A{number}=1\nls\n" for number in range(3000)),
        "\r\n" * 100 + " " * 50_000 + "x)\n", "ARG x\n" * 100 + "COPY <<E x\n" * 3000,
    ],
    ids=lambda text: text[:20],
)  # fmt: skip
@pytest.mark.timeout(20)
def test_a_long_text_with_unclosed_quotes_ends(text: str) -> None:
    assert servers_in(text + f"\n\"'\n{SERVE}")[0].words == [LLAMA]


def test_a_long_chain_of_conditions_is_no_deep_one() -> None:
    chain = "".join(f"elif [ $A = x{place} ]; then N=1; " for place in range(2000))
    (server,) = servers_in(f"A=y\nif [ $A = x ]; then N=1; {chain}else N=2; fi\n{SERVE} -tp $N")
    assert server.words[-2:] == ["-tp", "2"]


@pytest.mark.parametrize("text", [f"{SERVE} 'a\nb'", f"{SERVE} --kv-cache-dtype 'a\r\n$X'", f"{SERVE} --x '\u2028'"])
def test_an_error_about_words_of_several_lines_is_one_line(text: str) -> None:
    (server,) = servers_in(text)
    with pytest.raises(KvcalcError) as raised:
        server.read()
    assert len(raised.value.message.splitlines()) == len(str(raised.value).splitlines()) == 1


def test_rows_of_a_table_are_no_pipeline() -> None:
    table = "| option | meaning |\n" * 2000
    assert servers_in(f"cat > table.md <<'EOF'\n{table}EOF\n{SERVE} -tp 2")[0].words[-2:] == ["-tp", "2"]


@pytest.mark.parametrize("name", ["0", "00", "9" * 5000])
def test_parameters_that_no_script_has(name: str) -> None:
    assert servers_in(f"set --\nA=${{{name}}}\n{SERVE}")[0].words == [LLAMA]


def test_a_sequence_without_numbers() -> None:
    assert servers_in(f"seq # two\n{SERVE}")[0].words == [LLAMA]


def test_aliases_of_a_manifest_are_read() -> None:
    for levels in (1, 3):
        (server,) = servers_in(f"{_nested_aliases(1)}\nb: &b [c]\nd: [{'*b, ' * 9}]")
        assert server.words == ["x"] * 9, levels


@pytest.mark.parametrize(
    "resources", ["abc", "[a]", "3", "{limits: abc}", "{limits: nvidia.com/gpu}", "{limits: [nvidia.com/gpu]}", "null"]
)
def test_resources_that_are_no_mapping_say_nothing_of_devices(resources: str) -> None:
    (server,) = servers_in(_pod(resources, f"--model, {LLAMA}"))
    assert server.num_devices is None


@pytest.mark.parametrize("value", ["!!bool x", '!!int ""', "!!timestamp x", "!!float x", "2020-99-99", "!foo x"])
def test_values_that_no_reader_of_yaml_takes_are_no_manifest(value: str) -> None:
    assert servers_in(f"services: {{v: {{image: '{IMAGE}', command: --model x/y, x: {value}}}}}") == []


@pytest.mark.parametrize(
    ("quoted", "text"),
    [
        (r"$'\x'", r"\x"), (r"$'\xzz'", r"\xzz"), (r"$'\U'", r"\U"), (r"$'\N{x}'", r"\N{x}"), (r"$'a\'b'", "a'b"),
        (r"$'\xc3\xa9\u'", r"é\u"), ("$'é'", "é"), (r"$'\t\101\e'", "\tA\x1b"), (r"$'a\0b'", "a"),
        (r"$'\xff'", "\udcff"),
    ],
)  # fmt: skip
def test_a_quoted_text_with_escapes_is_read_as_bash_reads_it(quoted: str, text: str) -> None:
    assert servers_in(f"{SERVE} {quoted} y")[0].words == [LLAMA, text, "y"]
    assert split(join([text])) == servers_in(f"{SERVE} {join([text])}")[0].words[1:] == [text]


@pytest.mark.parametrize("option", ["--compilation-config ²", "--compilation-config -²", "--speculative-config ²"])
def test_a_superscript_is_no_number(option: str) -> None:
    with pytest.raises(UsageError, match="not a JSON object"):
        check(f"{SERVE} {option}", "h100")


@pytest.mark.parametrize("deep", ['{"a":' + "[" * 3000 + "]" * 3000 + "}", "[" * 30_000])
def test_deep_json_of_an_option_is_refused(deep: str) -> None:
    (server,) = servers_in(f"{SERVE} --speculative-config '{deep}'")
    with pytest.raises(UsageError, match="not a JSON object"):
        server.read()
    (server,) = servers_in(f"{SERVE} --speculative-config.model '{deep}'")
    assert server.read().drafting is None or isinstance(server.read().drafting, tuple)


def test_a_draft_model_has_a_name() -> None:
    with pytest.raises(UsageError, match="is not a name"):
        check(
            f"""{SERVE} --speculative-config '{{"method": "eagle", "model": {{}}, "num_speculative_tokens": 1}}'""",
            "h100",
        )


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
@pytest.mark.parametrize("command", ["vllm serve llama-3.1-8b --config", "trtllm-serve llama-3.1-8b --config"])
def test_a_pipe_that_nobody_writes_to_is_refused(tmp_path: Path, command: str) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    for special in (path, "/dev/zero"):
        with pytest.raises(UsageError, match="its text does not end"):
            check(f"{command} {special}", "h100")


def test_a_quote_without_an_end_is_one_line_of_a_page() -> None:
    assert [one.words for one in servers_in(f"say 'a\n{SERVE}\n")] == [[LLAMA]]
    with pytest.raises(UsageError, match="unclosed quote"):
        servers_in("vllm serve 'a")
