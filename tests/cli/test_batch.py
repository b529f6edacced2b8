"""`kvcalc batch` answers like estimate, a bad line does not affect the others, and memory use is constant."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcalc.cli.batch import Models, Questions, parameters_of
from kvcalc.cli.batch import batch as answer_file
from kvcalc.cli.json_lines import MAX_LINE_BYTES
from kvcalc.cli.question import MODEL_FLAGS
from kvcalc.json_lines import Line, read_lines
from kvcalc.model.variants import WhatIf
from tests.conftest import PEAK, ROOT, spawn

GOOD = b'{"model": "llama-3-8b", "context": 8192}'


def answers(lines: bytes | str | list[dict[str, Any]], **options: Any) -> tuple[int, list[Any], str]:
    """The exit code, the answers and stderr."""
    if isinstance(lines, list):
        lines = "".join(json.dumps(line) + "\n" for line in lines)
    result = spawn("batch", stdin=lines, **options)
    return result.status, [json.loads(line) for line in result.out.splitlines()], result.err


def error_of(line: bytes | dict[str, Any]) -> dict[str, Any]:
    data = line if isinstance(line, bytes) else json.dumps(line).encode()
    document: Any = Questions().answer(Line(1, data))
    assert list(document) == ["error"], document
    error: dict[str, Any] = document["error"]
    assert list(error) == ["message", "hint", "exit_code", "line"]
    return error


@pytest.mark.settled
def test_a_line_is_answered_as_estimate_answers(kvcalc: Any) -> None:
    questions: list[tuple[dict[str, Any], tuple[str, ...]]] = [
        ({"model": "llama-3-70b", "context": 8192, "tp": 8}, ("llama-3-70b", "--context", "8192", "--tp", "8")),
        ({"model": "deepseek-v3", "context": "32k", "kv-dtype": "fp8"},
         ("deepseek-v3", "--context", "32k", "--kv-dtype", "fp8")),
        ({"model": "llama-7b", "attention": "gqa", "kv_heads": 4},
         ("llama-7b", "--attention", "gqa", "--kv-heads", "4")),
        ({"model": "llama-7b"}, ("llama-7b",)),
        ({"layers": 4, "heads": 8, "kv_heads": 2, "head_dim": 64},
         ("--layers", "4", "--heads", "8", "--kv-heads", "2", "--head-dim", "64")),
        ({"model": "gpt-oss-120b", "engine": "vllm", "kv_memory": "40GiB", "enable_prefix_caching": True,
          "dtype": None}, ("gpt-oss-120b", "--engine", "vllm", "--kv-memory", "40GiB", "--enable-prefix-caching")),
        ({"model": "qwen3-next-80b-a3b", "tensor_parallel_size": 2, "max-model-len": "8k"},
         ("qwen3-next-80b-a3b", "--tp", "2", "--max-model-len", "8k")),
        ({"model": "llama-3-8b", "engine": "tensorrt-llm", "kv_memory": 80000000000, "free_gpu_memory_fraction": 0.5},
         ("llama-3-8b", "--engine", "tensorrt-llm", "--kv-memory", "80G", "--free-gpu-memory-fraction", "0.5")),
        ({"model": "llama-3-70b", "context": 8192, "gpu": "h100", "tp": 8},
         ("llama-3-70b", "--context", "8192", "--gpu", "h100", "--tp", "8")),
        ({"model": "qwen3-32b", "gpu": "h200", "engine": "vllm", "dtype": "fp8", "input_tokens": 2048,
          "output_tokens": 500, "concurrency": 32, "pp": 2, "num_gpus": 4},
         ("qwen3-32b", "--gpu", "h200", "--engine", "vllm", "--dtype", "fp8", "--input-tokens", "2048",
          "--output-tokens", "500", "--concurrency", "32", "--pp", "2", "--num-gpus", "4")),
        ({"model": "gpt-oss-120b", "gpu": "h100x8", "engine": "sglang", "ep": 8, "batch": 16},
         ("gpt-oss-120b", "--gpu", "h100x8", "--engine", "sglang", "--ep", "8", "--batch", "16")),
        ({"model": "llama-3-8b", "engine": "all"}, ("llama-3-8b", "--engine", "all")),
    ]  # fmt: skip
    status, found, err = answers([question for question, _ in questions])
    assert (status, err) == (0, "")
    for answer, (_, arguments) in zip(found, questions):
        assert answer == kvcalc("estimate", *arguments, "--json").json


@pytest.mark.parametrize(
    ("fields", "path", "value"),
    [
        ({"kv_memory": 80}, "fit.kv_cache_memory_bytes", 80),
        ({"kv_memory": 0}, "fit.kv_cache_memory_bytes", 0),
        ({"kv_memory": 8e10}, "fit.kv_cache_memory_bytes", 80_000_000_000),
        ({"kv_memory": 1e18}, "fit.kv_cache_memory_bytes", 10**18),
        ({"kv_memory": "80B"}, "fit.kv_cache_memory_bytes", 80),
        ({"gpu_memory": 1_000_000, "gpu-bandwidth": 3350, "flops": 989}, "hardware.memory_bytes", 1_000_000),
        ({"gpu": "h100", "gpu-bandwidth": 3350}, "hardware.bandwidth_bytes_per_second", 3350),
        ({"gpu": "h100", "flops": 989}, "hardware.flops_per_second.bf16", 989),
        ({"gpu": "h100", "flops": 9.89e14, "batch": 1.0}, "hardware.flops_per_second.bf16", 989 * 10**12),
    ],
)
def test_numbers_are_in_base_units_whatever_their_size(fields: dict[str, Any], path: str, value: int) -> None:
    found: Any = Questions().answer(Line(1, json.dumps({"model": "gpt2", **fields}).encode()))
    for key in path.split("."):
        assert key in found, found
        found = found[key]
    assert found == value


def test_the_keys_stand_in_the_documents_order(kvcalc: Any) -> None:
    out = spawn("batch", stdin=GOOD + b"\n").out
    assert out == json.dumps(json.loads(out), separators=(",", ":")) + "\n"
    assert list(json.loads(out)) == list(kvcalc("estimate", "llama-3-8b", "--json").json)


def test_an_estimate_counts_as_a_benchmark_does_if_it_is_asked_to() -> None:
    load = b'{"model": "llama-3-8b", "gpu": "h100", "input_tokens": 1000, "output_tokens": 100, "concurrency": 4%s}\n'
    lines = load % b"" + load % b', "benchmark": true' + load % b', "benchmark": false'
    plain, counted, same = map(json.loads, spawn("batch", stdin=lines).out.splitlines())
    assert same == plain
    assert counted["throughput"]["serving"]["ttft_seconds"] > plain["throughput"]["serving"]["ttft_seconds"] > 0
    assert [one["throughput"]["serving"]["is_benchmark"] for one in (plain, counted)] == [False, True]


def test_several_processes_give_the_answers_of_one() -> None:
    load = '{"model": "llama-3-8b", "gpu": "h100", "input_tokens": %d, "output_tokens": 10, "concurrency": 2}\n'
    lines = "".join(load % tokens for tokens in range(100, 140)).encode() + b"{}\n"
    one, two = (spawn("batch", "--jobs", jobs, stdin=lines) for jobs in ("1", "2"))
    assert one.out == two.out
    assert one.out.count("\n") == 41
    assert (one.status, one.err) == (two.status, two.err)


def test_a_line_without_a_context_is_no_line_with_the_context_of_another() -> None:
    """A line is answered from an earlier one that differs in its counts alone."""
    line = b'{"model": "qwen3:32b", "gpu": "rtx-4090"%s}\n'
    lines = line % b"" + line % b', "context": 8192' + line % b""
    first, second, third = map(json.loads, spawn("batch", stdin=lines).out.splitlines())
    assert first == third
    assert [one["workload"]["context_tokens"] for one in (first, second)] == [16640, 8192]


def test_one_value_of_each_answer() -> None:
    lines = GOOD + b'\n{"model": "nope"}\n{"model": "llama-7b", "context": 1}\n'
    result = spawn("batch", "--get", "kv_cache.total_bytes", stdin=lines)
    assert result.status == 1
    assert result.out == "1073741824\nnull\n524288\n"
    assert "line 2: model 'nope' is not known" in result.err
    assert spawn("batch", "--get", "kv_cache.layers.5.kind", stdin=GOOD).out == "null\n"
    assert spawn("batch", "--get", "kv_cache.bytes", stdin=GOOD).status == 2


def test_a_bad_line_stops_nothing_and_the_order_stays() -> None:
    lines = b"\n".join(
        [GOOD, b"{", b"", b'{"model": "nope"}', b"  \r", b'{"model": "gpt2"}', b"\xff\xfe", b'{"model": "llama-7b"}\r']
    )
    status, found, err = answers(lines)
    assert status == 1
    names = [a["model"]["name"] if "model" in a else a["error"]["line"] for a in found]
    assert names == ["llama-3-8b", 2, 4, "gpt2", 7, "llama-7b"]
    assert err == f"kvcalc: 3 lines with an error; the first is line 2: {found[1]['error']['message']}\n"


@pytest.mark.parametrize(
    ("line", "word", "status"),
    [
        (b"[]", "not a JSON object", 2), (b"7", "not a JSON object", 2), (b'"llama-3-8b"', "not a JSON object", 2),
        (b'{"model": "gpt2"} x', "not JSON", 2), (b'{"model": gpt2}', "not JSON", 2), (b"\x00", "not JSON", 2),
        (b'{"model": "gpt2", "context": NaN}', "NaN", 2), (b'{"model": "gpt2", "batch": -Infinity}', "Infinity", 2),
        (b'{"model": "gpt2", "tp": 1, "tp": 1}', "twice", 2), (b"\xc3", "UTF-8", 2),
        (b'{"model": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested", 2),
        (b'{"model": ' + b'{"a":' * 100_000, "nested", 2),
        (b'{"model": "gpt2", "context": ' + b"9" * 10_000 + b"}", "digits", 2),
        (b'{"model": "gpt2", "context": ' + b"9" * 100 + b"}", "not a token count", 2),
        (b'{"model": "' + b"x" * 100_000 + b'"}', "model 'xxx", 3),
        (b"{}", "MODEL is missing", 2), (b'{"model": null}', "MODEL is missing", 2), (b'{"model": "-"}', "stdin", 2),
        (b'{"model": ["gpt2"]}', "string or a number", 2), (b'{"model": "gpt2", "tp": true}', "string or a number", 2),
        (b'{"model": "gpt2", "kv_memory": "80"}', "--kv-memory 80: a size needs a unit", 2),
        (b'{"model": "gpt2", "kv_memory": 80.5}', "not a whole number of bytes", 2),
        (b'{"model": "gpt2", "kv_memory": 1e999}', "not a size", 2),
        (b'{"model": "gpt2", "gpu": "h100", "bandwidth": "3350"}', "a bandwidth needs a unit", 2),
        (b'{"model": "gpt2", "kv_unified": "yes"}', "true or false", 2),
        (b'{"model": "gpt2", "batch": 0}', "at least 1", 2),
        (b'{"model": "gpt2", "batch": 1.5}', "whole number", 2), (b'{"model": "gpt2", "batch": -1}', "whole number", 2),
        (b'{"model": "gpt2", "tp": 5}', "--tp 5", 2), (b'{"model": "gpt2", "kv_dtype": "fp7"}', "fp7", 2),
        (b'{"model": "gpt2", "kv_dtype": ""}', "not a dtype", 2), (b'{"model": "gpt2", "engine": "vlm"}', "vlm", 2),
        (b'{"model": "nope"}', "nope", 3), (b'{"model": "/nowhere/config.json"}', "nowhere", 2),
        (b'{"model": "/dev/zero"}', "not a regular file", 2), (b'{"model": "a\\u0000b"}', "", 3),
        (b'{"model": "gpt2", "layers": 3}', "--layers", 2), (b'{"layers": 3}', "--heads", 2),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_bad_lines(line: bytes, word: str, status: int) -> None:
    error = error_of(line)
    assert word in error["message"]
    assert error["exit_code"] == status
    assert len(error["message"]) < 1100


def test_an_unknown_field_is_named_with_the_nearest() -> None:
    assert "kv_dtype" in error_of({"model": "gpt2", "kv_dtpye": "fp8"})["hint"]
    assert "context" in error_of({"model": "gpt2", "Context": 4096})["hint"]
    assert "same field" in error_of({"model": "gpt2", "tp": 2, "tensor-parallel-size": 2})["message"]
    for output in ("json", "format", "get", "no_color", "help", "check", "strict"):
        assert "unknown field" in error_of({"model": "gpt2", output: True})["message"]


def test_every_option_of_estimate_is_a_field_under_every_long_name() -> None:
    import typer

    from kvcalc.cli.estimate import app

    fields, _ = parameters_of(app)
    for parameter in typer.main.get_command(app).params:
        if parameter.name in ("format", "json", "get", "no_color", "check", "strict", "report"):
            assert parameter.name not in fields
            continue
        assert parameter.name in fields
        for option in parameter.opts:
            assert not option.startswith("--") or option[2:].replace("-", "_") in fields


def test_a_bug_is_the_lines_own(monkeypatch: pytest.MonkeyPatch) -> None:
    questions = Questions()
    monkeypatch.setattr(questions, "_document", lambda *a: 1 / 0)
    answer: Any = questions.answer(Line(3, GOOD))
    error = answer["error"]
    assert error["message"].startswith("internal error: ZeroDivisionError")
    assert (error["exit_code"], error["line"]) == (1, 3)


def test_a_path_is_relative_to_the_working_folder_and_read_once(tmp_path: Path) -> None:
    config = {"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64}
    (tmp_path / "my").mkdir()
    (tmp_path / "my" / "config.json").write_text(json.dumps(config))
    status, found, _ = answers([{"model": "my/config.json"}, {"model": "./my"}, {"model": "my"}], cwd=tmp_path)
    assert status == 0
    assert {a["model"]["name"] for a in found} == {"my"}
    models = Models()
    path = str(tmp_path / "my")
    first = models.model_of(path, _nothing(), {})[0]
    (tmp_path / "my" / "config.json").unlink()
    assert models.model_of(path, _nothing(), {})[0] is first


def _nothing() -> Any:
    from kvcalc.model.variants import WhatIf

    return WhatIf()


def test_models_kept_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    import kvcalc.cli.batch as module

    monkeypatch.setattr(module, "_MOST_MODELS", 5)
    models = Models()
    for layers in range(1, 100):
        flags = {
            "num_hidden_layers": str(layers),
            "num_attention_heads": "2",
            "head_dim": "4",
            "hidden_size": None,
            "sliding_window": None,
        }
        assert models.model_of(None, _nothing(), flags)[0].num_layers == layers
        assert len(models._found) <= 5


def test_speeds_kept_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvcalc.server import speed

    monkeypatch.setattr(speed, "_MOST_SPEEDS", 8)
    device = {"gpu_bandwidth": 3_350_000_000_000, "flops": 989_000_000_000_000}
    questions, seen = Questions(), set()
    for gib in range(80, 110):
        line = {"model": "llama-3-8b", "gpu_memory": gib << 30, **device}
        document: Any = questions.answer(Line(1, json.dumps(line).encode()))
        seen.add(document["throughput"]["decode_step_seconds"])
    assert len(seen) == 1
    spec = questions.models.model_of("llama-3-8b", WhatIf(), dict.fromkeys(MODEL_FLAGS))[0]
    assert 0 < len(speed._speeds_of(spec, spec)) <= 8


def test_a_file_a_pipe_and_what_is_neither(tmp_path: Path) -> None:
    path = tmp_path / "questions.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + GOOD)
    assert json.loads(spawn("batch", path).out)["model"]["name"] == "llama-3-8b"
    assert spawn("batch", stdin="").out == ""
    assert spawn("batch", stdin="\n\n").status == 0
    for wrong in (tmp_path, tmp_path / "nothing"):
        result = spawn("batch", wrong)
        assert result.status == 2
        assert result.err.startswith(f"kvcalc: {wrong}: ")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_a_full_disk_is_a_failure_and_no_missing_file(tmp_path: Path) -> None:
    path = tmp_path / "questions.jsonl"
    path.write_bytes(GOOD)
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "kvcalc", "batch", path], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert (done.returncode, done.stderr) == (1, "kvcalc: cannot write: No space left on device\n")


def test_a_closed_pipe_is_no_error() -> None:
    command = f"yes '{GOOD.decode()}' | {sys.executable} -m kvcalc batch | head -2 | wc -l"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=300)
    assert (done.stdout.strip(), done.stderr) == ("2", "")


def test_whoever_writes_a_line_and_waits_is_answered() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "kvcalc", "batch"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT
    )
    assert process.stdin is not None
    assert process.stdout is not None
    for _ in range(3):
        process.stdin.write(GOOD + b"\n")
        process.stdin.flush()
        assert json.loads(process.stdout.readline())["model"]["name"] == "llama-3-8b"
    process.stdin.close()
    assert process.wait(timeout=300) == 0
    process.stdout.close()


def test_an_answer_is_written_before_the_next_question_is_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, out, seen = tmp_path / "questions.jsonl", tmp_path / "answers.jsonl", []
    path.write_bytes((GOOD + b"\n") * 3)
    answer = Questions.answer

    def looking(self: Questions, line: Any) -> Any:
        seen.append(out.read_text().count("\n"))
        return answer(self, line)

    monkeypatch.setattr(Questions, "answer", looking)
    with out.open("w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        answer_file(str(path), None)
    assert seen == [0, 1, 2]
    assert out.read_text().count("\n") == 3


def dribbled(data: bytes, sizes: list[int]) -> Iterator[bytes]:
    """The data in pieces of the given sizes."""
    while data:
        size = sizes.pop() if sizes else len(data)
        yield data[:size]
        data = data[size:]


@given(st.lists(st.sampled_from([b"", b"a", b"bc\r", b"  ", b"x" * 50, b"y" * 21])), st.lists(st.integers(1, 30)))
def test_lines_are_the_same_however_they_arrive(lines: list[bytes], sizes: list[int]) -> None:
    found = list(read_lines(dribbled(b"\n".join(lines), sizes), 20))
    wanted = [Line(n, None if len(data) > 20 else data) for n, data in enumerate(lines, 1) if data.strip()]
    assert found == wanted


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_line_without_an_end_is_refused_in_bounded_memory() -> None:
    script = (
        f"import sys; from kvcalc.cli.app import run; status = run(['batch'])\nprint(status, {PEAK}, file=sys.stderr)"
    )
    line = b'{"model": "' + b"x" * (200 * MAX_LINE_BYTES) + b'"}\n' + GOOD
    done = subprocess.run([sys.executable, "-c", script], input=line, capture_output=True, timeout=300)
    found = [json.loads(answer) for answer in done.stdout.splitlines()]
    assert "1,048,576" in found[0]["error"]["message"]
    assert found[1]["model"]["name"] == "llama-3-8b"
    status, kilobytes = map(int, done.stderr.splitlines()[-1].split())
    assert status == 1
    assert kilobytes < 60 * 1024


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_is_flat_whatever_the_lines_ask() -> None:
    script = (
        "import io, sys, json; from kvcalc.cli.app import run\n"
        "def peak(count, seed):\n"
        "    lines = io.StringIO()\n"
        "    for i in range(count):\n"
        "        q = {'layers': i % 700 + 1, 'heads': 8, 'head_dim': 64, 'context': seed + i}\n"
        "        names = ['llama-3-8b', 't5-small', 'gemma-3-4b', f'no-{i % 9}']\n"
        "        q = q if i % 3 else {'model': names[i % 4], 'context': i % 900 + 1}\n"
        "        lines.write(json.dumps(q) + '\\n')\n"
        "    sys.stdin = io.TextIOWrapper(io.BytesIO(lines.getvalue().encode()))\n"
        "    run(['batch'])\n"
        f"    return {PEAK}\n"
        "print(peak(2000, 1), peak(3000, 100_000), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", script], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    small, large = map(int, done.stderr.splitlines()[-1].split())
    assert large - small < 4 * 1024, "a few MiB for the larger input itself, and no more"


def test_it_does_not_slow_down_on_what_it_cannot_find() -> None:
    models = Models()
    started = time.process_time()
    for _ in range(2000):
        with pytest.raises(Exception, match="not known"):
            models.model_of("llama-3-8c", _nothing(), {})
    assert time.process_time() - started < 20  # searching all presets once takes 0.1 s
