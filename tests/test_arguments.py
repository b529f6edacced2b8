"""Every public Python function uses an argument as the command line does, or refuses it by its name."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

import kvcalc as library
from kvcalc.question.question import Question
from presets.check import check_question
from tests.conftest import ROOT
from tests.rows import every_row

MODEL = "llama-3.1-8b"
LOGS = ROOT / "tests" / "logs"
BENCH, LOG, TRACE = (str(LOGS / name) for name in ("vllm-bench.json", "vllm.log", "mooncake.jsonl"))

Asked = dict[str, Any]
Options = dict[str, str]


class Function(NamedTuple):
    """A public function with the arguments that it needs, and the command with the options that mean the same.

    `own` are options that mean another argument of the function than the field of a question.
    """

    ask: Callable[..., Any]
    asked: Asked
    words: list[str]
    options: Options
    own: frozenset[str] = frozenset()


ON = {"devices": library.find_devices("h100"), "engine": "vllm"}
ON_OPTIONS = {"--gpu": "h100", "--engine": "vllm"}
LOAD = {"--concurrency": "4"}
FUNCTIONS: dict[str, Function] = {
    "estimate": Function(library.estimate, {"model": MODEL, **ON}, ["estimate", MODEL], ON_OPTIONS),
    "fit": Function(library.fit, {"model": MODEL, **ON}, ["fit", MODEL], ON_OPTIONS),
    "compare": Function(
        library.compare, {"models": [MODEL], **ON}, ["compare", MODEL], ON_OPTIONS, frozenset(["--attention"])
    ),
    "sweep": Function(
        library.sweep, {"model": MODEL, "gpus": ["h100"], "engine": "vllm"}, ["sweep", MODEL], ON_OPTIONS,
        frozenset(["--gpu"]),
    ),
    "plan": Function(
        library.plan,
        {"model": MODEL, "gpus": ["h100"], "input_tokens": 1000, "output_tokens": 100, "concurrency": 4},
        ["plan", MODEL],
        {"--gpu": "h100", "--input-tokens": "1000", "--output-tokens": "100", **LOAD},
        frozenset(["--gpu", "--input-tokens", "--prefix-hit-rate", "--transfer-bandwidth"]),
    ),
    "simulate": Function(
        library.simulate,
        {"model": MODEL, "devices": "h100", "prompt_tokens": 1000, "answer_tokens": 100, "concurrency": 4,
         "requests": 20},
        ["simulate", MODEL],
        {"--gpu": "h100", "--prompt-tokens": "1000", "--answer-tokens": "100", **LOAD, "--requests": "20"},
        frozenset(["--input-tokens", "--transfer-bandwidth"]),
    ),
    "prefix_curve": Function(
        library.prefix_curve, {"trace": TRACE, "model": MODEL, **ON, "cache_tokens": [65_536]},
        ["prefix", TRACE, MODEL], {**ON_OPTIONS, "--cache-tokens": "65536"}, frozenset(["--offload"]),
    ),
    "audit": Function(library.audit, {"text": Path(LOG).read_text(), "name": LOG}, ["audit", LOG], {}),
    "score": Function(
        library.score, {"results": {BENCH: Path(BENCH).read_text()}, "devices": ON["devices"]},
        ["score", BENCH], {"--gpu": "h100"}, frozenset(["--ep", "--calibrate", "--prefix-hit-rate"]),
    ),
}  # fmt: skip
# The functions that are asked about no model, with their arguments.
OTHERS: dict[str, Asked] = {
    "check": {"command": f"vllm serve {MODEL}", "devices": "h100"}, "models": {}, "gpus": {},
    "load_model": {"reference": MODEL}, "find_devices": {}, "read_calibration": {},
    "read_config": {"config": {}, "name": "small", "source": "a test"},
}  # fmt: skip

# Every field of a question: a value, and the options that mean the same.
FIELDS: dict[str, tuple[str, object, Options]] = {
    "context_tokens": ("context_tokens", 3000, {"--context": "3000"}),
    "batch_size": ("batch_size", 3, {"--batch": "3"}),
    "dtype": ("dtype", "fp8", {"--dtype": "fp8"}),
    "kv_dtype": ("kv_dtype", "fp8", {"--kv-dtype": "fp8"}),
    "engine": ("engine", "sglang", {"--engine": "sglang"}),
    "engine_settings": ("engine_settings", {"max-num-batched-tokens": 4096}, {"--max-num-batched-tokens": "4096"}),
    "tensor_parallel_size": ("tensor_parallel_size", 2, {"--tp": "2"}),
    "pipeline_parallel_size": ("pipeline_parallel_size", 2, {"--pp": "2"}),
    "encoder_tokens": ("encoder_tokens", 700, {"--encoder-tokens": "700"}),
    "kv_memory_bytes": ("kv_memory_bytes", 10**10, {"--kv-memory": "10GB"}),
    "weights_bytes": ("weights_bytes", 10**10, {"--weights-memory": "10GB"}),
    "devices": ("devices", library.find_devices("h200"), {"--gpu": "h200"}),
    "what_if": ("what_if", library.WhatIf("mqa"), {"--attention": "mqa"}),
    "speculative": (
        "speculative", library.Speculation("ngram", 2, 1.5), {"--speculative": "ngram:2", "--acceptance-length": "1.5"}
    ),
    "data_parallel_size": ("data_parallel_size", 2, {"--dp": "2"}),
    "fits_context": ("fits_context", True, {"--context": "auto"}),
    "images": ("images", library.ImagesAsked(1, 640, 480), {"--images": "1", "--image-size": "640x480"}),
    "speed of experts": ("speed", library.SpeedQuestion(expert_parallel_size=2), {"--ep": "2"}),
    "speed of a load": (
        "speed", library.SpeedQuestion(input_tokens=1000, output_tokens=100, concurrency=3),
        {"--input-tokens": "1000", "--output-tokens": "100", "--concurrency": "3"},
    ),
    "speed with hits": ("speed", library.SpeedQuestion(prefix_hit_rate=0.5), {"--prefix-hit-rate": "0.5"}),
    "speed calibrated": (
        "speed", library.SpeedQuestion(calibration=library.read_calibration([BENCH])), {"--calibrate": BENCH}
    ),
    "reuse of a prefix": ("reuse", library.CacheReuse(prefix_tokens=512), {"--prefix-tokens": "512"}),
    "reuse in turns": ("reuse", library.CacheReuse(turns=3), {"--turns": "3"}),
    "reuse of tiers": ("reuse", library.CacheReuse(offload=(("cpu", 10**11),)), {"--offload": "cpu=100GB"}),
    "reuse after a transfer": ("reuse", library.CacheReuse(transfer="nvlink"), {"--transfer-bandwidth": "nvlink"}),
}  # fmt: skip


@cache
def options_of(command: str) -> frozenset[str]:
    """The options of a command."""
    import typer

    app = import_module(f"kvcalc.cli.{command}").app
    return frozenset(name for one in typer.main.get_command(app).params for name in one.opts)


def test_every_field_of_a_question_and_every_function_is_tried() -> None:
    assert {argument for argument, _, _ in FIELDS.values()} == set(Question._fields) - {"model", "serves"}
    functions = {name for name in library.__all__ if name[0].islower()}
    assert functions == FUNCTIONS.keys() | OTHERS.keys()


@every_row("field", FIELDS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_an_argument_is_used_as_on_the_command_line_or_refused_by_its_name(kvcalc: Any, name: str, field: str) -> None:
    function, (argument, value, options) = FUNCTIONS[name], FIELDS[field]
    is_option = options.keys() <= options_of(function.words[0]) and not options.keys() & function.own
    answer = answer_or_error(function, {argument: value})
    is_refused_here = isinstance(answer, library.KvcalcError) and answer.message.startswith(
        (f"{argument!r}: kvcalc.{name} has no such argument", f"{argument}.")
    )
    shown = None
    if is_option:
        pairs = {**function.options, **options}.items()
        shown = kvcalc(*function.words, *(word for pair in pairs for word in pair), "--json")
    if is_refused_here:
        assert (answer.exit_code, bool(answer.hint)) == (2, True)
        assert shown is None or shown.status, "the command takes this option"
    elif isinstance(answer, library.KvcalcError):
        if shown is None:
            assert next(iter(options)) in answer.message
        else:
            assert (answer.exit_code, f"kvcalc: {answer.message}") == (shown.status, shown.err.splitlines()[0])
    elif shown is None:
        assert answer != answer_or_error(function, {})
    else:
        assert answer == shown.json


def answer_or_error(function: Function, more: Asked) -> Any:
    try:
        return function.ask(**{**function.asked, **more})
    except library.KvcalcError as error:
        return error


@pytest.mark.parametrize(
    ("many", "one", "value", "option"),
    [
        ("contexts", "context_tokens", 3000, "--context"),
        ("batches", "batch_size", 3, "--batch"),
        ("kv_dtypes", "kv_dtype", "fp8", "--kv-dtype"),
        ("engines", "engine", "sglang", "--engine"),
        ("engines", "engine", "all", "--engine"),
        ("tensor_parallel_sizes", "tensor_parallel_size", 2, "--tp"),
    ],
)
def test_one_value_of_a_sweep_is_a_list_of_one(kvcalc: Any, many: str, one: str, value: Any, option: str) -> None:
    sweep: Any = library.sweep
    shown = kvcalc("sweep", MODEL, option, value, "--json").json
    assert sweep(MODEL, **{one: value}) == shown
    assert sweep(MODEL, **{many: [value]}) == shown
    with pytest.raises(library.KvcalcError, match=f"{many} and {one} cannot be combined"):
        sweep(MODEL, **{one: value, many: [value]})


@pytest.mark.parametrize(
    ("name", "more", "said"),
    [
        ("simulate", {"trace_format": "azure"}, "trace_format needs trace"),
        ("simulate", {"scale_rate": 2.0}, "scale_rate needs trace"),
        ("simulate", {"burstiness": 2.0}, "burstiness needs requests_per_second"),
        ("simulate", {"prefill_gpu": "h200"}, "prefill_gpu needs prefill_replicas"),
        ("simulate", {"prefill_expert_parallel_size": 8}, "prefill_expert_parallel_size needs prefill_replicas"),
        ("simulate", {"transfer": "nvlink"}, "transfer needs prefill_replicas"),
        ("simulate", {"prefill_replicas": 2}, "prefill_replicas needs transfer"),
        ("plan", {"trace": TRACE}, "trace and input_tokens cannot be combined"),
        ("plan", {"scale_rate": 2.0}, "scale_rate needs trace"),
        ("plan", {"transfer": "nvlink"}, "--transfer-bandwidth needs --disaggregate"),
        ("plan", {"engine": "sglang", "engines": ["vllm"]}, "engine and engines cannot be combined"),
        ("compare", {"engines": ["sglang"]}, "engine and engines cannot be combined"),
        ("compare", {"engines": []}, "engines: an empty list"),
        ("compare", {"reuse": library.CacheReuse(512, transfer="nvlink")}, "reuse.transfer: kvcalc.compare"),
        ("prefix_curve", {"model": None}, "devices needs model"),
        ("prefix_curve", {"model": None, "devices": None}, "engine needs model"),
        ("prefix_curve", {"devices": None, "price_per_hour": 2.0}, "price_per_hour needs devices"),
        ("prefix_curve", {"cache_memory_bytes": [2**30]}, "cache_memory_bytes and cache_tokens cannot be combined"),
        ("prefix_curve", {"memory_prices_per_gib_hour": {"remote": 1.0}}, "'remote' has no price"),
        ("prefix_curve", {"offload_bytes_per_second": {"cpu": 10**9}}, "offload_bytes_per_second needs offload_bytes"),
        ("fit", {"engine_settings": {"blok-size": 32}}, "--blok-size: vllm has no such setting"),
        ("audit", {"text": ["a line"]}, "text: 'a line' must be bytes"),
    ],
)
def test_an_argument_without_effect_is_refused(name: str, more: Asked, said: str) -> None:
    assert said in str(answer_or_error(FUNCTIONS[name], more))


def arguments_of(name: str) -> tuple[str, ...]:
    code = getattr(library, name).__wrapped__.__code__
    return tuple(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])


# Values that no argument takes.
WRONG: list[object] = [object(), {"x": object()}, [object()], {1}, -1, float("nan"), 10**5000]
EVERY = [(name, one) for name in (*FUNCTIONS, *OTHERS) for one in arguments_of(name)]


@every_row("name, argument", EVERY)
def test_a_value_of_the_wrong_type_is_refused_by_the_name_of_its_argument(name: str, argument: str) -> None:
    asked = FUNCTIONS[name].asked if name in FUNCTIONS else OTHERS[name]
    for value in WRONG:
        if argument == "config" and isinstance(value, dict):
            continue  # a config may have any keys
        with pytest.raises(library.KvcalcError) as caught:
            getattr(library, name)(**{**asked, argument: value})
        said = caught.value.message
        assert argument in said or f"--{argument.replace('_', '-')}" in said
        assert "\n" not in said
        assert len(said) < 300


@pytest.mark.parametrize("name", [*FUNCTIONS, *OTHERS])
def test_a_typo_gives_the_nearest_name(name: str) -> None:
    for argument in arguments_of(name):
        typo = argument[:-1] + 2 * argument[-1]
        with pytest.raises(library.KvcalcError) as caught:
            getattr(library, name)(**{typo: 1})
        assert caught.value.exit_code == 2
        assert caught.value.message == f"{typo!r}: kvcalc.{name} has no such argument"
        assert argument in str(caught.value.hint)


def test_a_mistake_in_the_fields_stops_the_build() -> None:
    """`presets/compile.py` checks `kvcalc/question/fields.yaml`."""
    rows: dict[str, Any] = yaml.safe_load((ROOT / "kvcalc" / "question" / "fields.yaml").read_text(encoding="utf-8"))
    check_question(rows)
    for field, row, error in (
        ("turns", {"type": "cuont"}, KeyError), ("turns", {"type": "count", "hlep": "Turns."}, TypeError),
        ("turns", {"option": "--turns"}, KeyError), ("trace_format", {"type": "text", "needs": "trase"}, ValueError),
        ("contexts", {"type": "counts", "excludes": "context"}, ValueError),
        ("_without_option", {"flog": "a"}, KeyError),
    ):  # fmt: skip
        with pytest.raises(error):
            check_question({**rows, field: row})
