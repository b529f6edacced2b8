"""The command line, a batch line, a sweep, a comparison and Python give the same figures for the same question."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from random import Random
from typing import Any, NamedTuple, cast

import pytest

import kvcalc as api
from kvcalc.cli.batch import Questions
from kvcalc.errors import KvcalcError, UsageError
from kvcalc.json_lines import Line
from kvcalc.model.presets import shipped_presets
from kvcalc.model.resolve import load_model
from kvcalc.planning.answers.figures import FIGURES
from tests.conftest import Result, spawn
from tests.relations.drawing import answers, ask, command_line, declared, draw

# One random question for so many cases of the other fuzz tests: it takes five answers.
CASES_PER_QUESTION = 50
# Of these questions, one in so many is also asked on the command line in this process, and as a process of its own.
QUESTIONS_PER_COMMAND, QUESTIONS_PER_PROCESS = 20, 200
# Keys of a config that say what each layer is. Shuffled, they describe a model that no preset has.
PATTERNS = ("layer_types", "hybrid_layer_pattern", "compress_ratios", "layers_block_type", "cross_attention_layers")


def draw_single(random: Random) -> tuple[str, dict[str, Any]]:
    """A model, and options that estimate, compare and sweep have, for one engine, device and kind of attention."""
    while True:
        model, options = draw(random, "compare")
        if not any("," in options.get(name, "") for name in ("engine", "gpu")):
            if options.get("n-gpu-layers") == "auto":  # sweep refuses it: its points would have different numbers
                options["n-gpu-layers"] = "10"
            return model, {"context": "4096", "batch": "1", **options}


def words_of(options: Mapping[str, Any]) -> list[str]:
    """Options as words of a command line."""
    found: list[str] = answers("generator").words_of(options)
    return found


def as_json(document: dict[str, Any]) -> Any:
    """The document as JSON gives it back."""
    return json.loads(json.dumps(document))


def figures_of(document: dict[str, Any]) -> dict[str, Any]:
    """The figures of an estimate that every path must print."""
    fit, speed = document["fit"] or {}, document["throughput"] or {}
    return {
        **{name: document["kv_cache"][name] for name in FIGURES},
        **{name: fit.get(name) for name in ("fits", "free_bytes")},
        **{name: speed.get(name) for name in ("decode_step_seconds", "prefill_seconds")},
    }


def refusal_of(result: Result) -> tuple[int, str]:
    return result.status, result.err.partition("\n")[0].removeprefix("kvcalc: ")


def swept_point(result: Result) -> tuple[dict[str, Any] | None, str | None]:
    """The last point of a sweep, or the reason why it has no figures."""
    if result.status and not result.out:
        return None, refusal_of(result)[1]
    point = result.json["points"][-1]
    return (None, point["reason"]) if point["reason"] else (point, None)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read each model and build each command only once, not once per question."""
    from kvcalc.cli.app import LazyGroup
    from kvcalc.model import resolve
    from kvcalc.planning.answers import compare

    assert callable(api.load_model)  # the public name is made on first use, here from the module as it is
    load = cache(resolve.load_model)
    monkeypatch.setattr(resolve, "load_model", load)
    monkeypatch.setattr(compare, "load_model", load)
    build, built = LazyGroup.get_command, dict[str, Any]()

    def get_command(group: Any, ctx: Any, name: str) -> Any:
        if name not in built:
            built[name] = build(group, ctx, name)
        return built[name]

    monkeypatch.setattr(LazyGroup, "get_command", get_command)


@pytest.mark.fuzz
@pytest.mark.usefixtures("quick")
def test_every_path_gives_the_same_figures_or_the_same_refusal(kvcalc: Any, pytestconfig: pytest.Config) -> None:
    number_asked = max(1, pytestconfig.getoption("--cases") // CASES_PER_QUESTION)
    random, questions = Random(20261105 + pytestconfig.getoption("--fuzz-seed")), Questions()
    answered, failed = 0, []
    for number in range(number_asked):
        model, asked = draw_single(random)
        batch: Any = questions.answer(Line(number, json.dumps({"model": model, **asked}).encode()))
        answered += "error" not in batch
        try:
            check_paths(kvcalc, model, asked, batch)
        except AssertionError as error:
            failed.append(f"{command_line('estimate', model, asked)}\n    {str(error)[:500]}")
    assert not failed, f"{len(failed)} of {number_asked}:\n" + "\n".join(failed[:8])
    assert answered > number_asked / 4


def check_paths(kvcalc: Any, model: str, asked: dict[str, Any], batch: dict[str, Any]) -> None:
    """Ask on the other paths what was asked in a batch. AssertionError if an answer or a refusal differs."""
    assert "error" not in batch or "internal error" not in batch["error"]["message"], batch["error"]["message"]
    estimate = kvcalc("estimate", model, *words_of(asked), "--json")
    compared = kvcalc("compare", model, *words_of(asked), "--json")
    # The question is the last point of a grid: its figures must not depend on the points before it.
    shortest = 1 if "prefix-tokens" not in asked and "turns" not in asked else int(asked["context"]) - 1
    grid = {**asked, "context": f"{shortest},{asked['context']}", "batch": f"1,{asked['batch']}"}
    point, reason = swept_point(kvcalc("sweep", model, *words_of(grid), "--format", "json"))
    if "error" in batch:
        refused = batch["error"]["exit_code"], batch["error"]["message"]
        assert refusal_of(estimate) == refusal_of(compared) == refused
        # If two things are wrong, the shortest context may be refused for the other one.
        assert reason == refused[1] or (reason and "context-length" in asked)
        with pytest.raises(KvcalcError) as caught:
            ask("estimate", model, asked)
        assert (caught.value.exit_code, caught.value.message) == refused
        return
    assert estimate.json == batch == as_json(ask("estimate", model, asked))
    wanted = figures_of(batch)
    assert point is not None, reason
    assert {name: point[name] for name in wanted} == wanted
    (row,) = compared.json["models"]
    assert {name: row[name] for name in wanted} == wanted


# Fields that make another question of a model, of which a case that is kept must know.
OTHERS = ({"kv_memory": "3GiB"}, {"batch": 3}, {"kv_dtype": "fp8"})


class Family(NamedTuple):
    """Questions about one model of which each differs from the first in one field, as lines of a batch."""

    model: str
    lines: list[dict[str, Any]]


def families(random: Random, number: int, folder: Path) -> list[Family]:
    """Families with so many questions in all, about presets and about models with a pattern of layers of their own."""
    generator, changed = answers("generator"), changed_configs(folder)
    found: list[Family] = []
    while sum(len(family.lines) for family in found) < number:
        command = random.choices(("estimate", "plan", "simulate"), (18, 1, 1))[0]
        model, options = draw(random, command)
        if "trace" in options:  # batch reads no traces
            continue
        first: dict[str, Any] = {"model": model, **({} if command == "estimate" else {"command": command})}
        first |= {name.replace("-", "_"): generator.as_number(value) for name, value in options.items()}
        lines = [first] + [generator.changed(random, declared(), first) for _ in range(random.randint(1, 3))]
        if random.random() < 0.1:
            model = random.choice(changed)
            engine = random.choice(("transformers", "vllm", "logical"))
            first = {"model": model, "engine": engine, "context": random.choice((4096, 20000))}
            lines = [first, *({**first, **more} for more in OTHERS)]
        found.append(Family(model, lines))
    return found


# LLaVA as its first release wrote it, which Transformers reads as another model.
FLAT = {
    "model_type": "llava", "hidden_size": 5120, "intermediate_size": 13824, "num_attention_heads": 40,
    "num_hidden_layers": 40, "num_key_value_heads": 40, "vocab_size": 32000, "mm_hidden_size": 1024,
}  # fmt: skip


def changed_configs(folder: Path) -> list[str]:
    """Folders with configs: those of presets with the patterns of their layers shuffled, and a flat LLaVA's."""
    configs: dict[str, dict[str, Any]] = {"flat": FLAT}
    for preset in shipped_presets():
        config = json.loads(json.dumps(preset.config))
        for part in (config, config.get("text_config", {})):
            for key in PATTERNS:
                if isinstance(part.get(key), list):
                    Random(preset.name).shuffle(part[key])
                    configs[preset.name] = config
    for name, config in configs.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
    return [str(folder / name) for name in configs]


def batch_answers(lines: list[dict[str, Any]], order: list[int]) -> dict[int, Any]:
    """The answers of one batch to lines in this order, by the number of the line."""
    questions, found = Questions(), dict[int, Any]()
    for number in order:
        document: Any = questions.answer(Line(1, json.dumps(lines[number]).encode()))
        if "error" in document:
            found[number] = document["error"]["exit_code"], document["error"]["message"]
        else:
            found[number] = json.dumps(document)
    return found


def python_answers(lines: list[dict[str, Any]], order: list[int]) -> dict[int, Any]:
    """The answers of Python, in which the questions about a model share what `load_model` returned."""
    load, found = cache(load_model), dict[int, Any]()
    for number in order:
        try:
            fields = dict(lines[number])
            command, model = fields.pop("command", "estimate"), load(fields.pop("model"))
            found[number] = json.dumps(ask(command, model, options_of(fields)))
        except KvcalcError as error:
            found[number] = error.exit_code, error.message
        except answers("python_calls").NoCallError:
            continue
        except Exception as error:
            found[number] = 1, f"internal error: {type(error).__name__}: {error}"
    return found


def options_of(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a line as options of a command line."""
    return {name.replace("_", "-"): value if value is True else str(value) for name, value in fields.items()}


@pytest.mark.settled
@pytest.mark.fuzz
@pytest.mark.usefixtures("quick")
def test_no_answer_depends_on_the_questions_before_it(kvcalc: Any, pytestconfig: pytest.Config, tmp_path: Path) -> None:
    """Batch and Python in two orders, and a part on the command line: the documents are equal to the byte.

    `-m fuzz --cases 250000` asks 5,000 questions, 250 of them on the command line in this process and 25 as processes.
    """
    number = max(1, pytestconfig.getoption("--cases") // CASES_PER_QUESTION)
    random = Random(20261123 + pytestconfig.getoption("--fuzz-seed"))
    lines = [line for family in families(random, number, tmp_path) for line in family.lines]
    order = list(range(len(lines)))
    first, python = batch_answers(lines, order), python_answers(lines, order)
    # In the second order a question follows others of its family or of other families, at random.
    random.shuffle(order)
    again, python_again = batch_answers(lines, order), python_answers(lines, order)
    commands = set(random.sample(order, -(-len(lines) // QUESTIONS_PER_COMMAND)))
    processes = set(random.sample(order, -(-len(lines) // QUESTIONS_PER_PROCESS)))
    failed = []
    for position, line in enumerate(lines):
        found = {"batch": first[position], "batch in another order": again[position]}
        if position in python and can_be_python(line, first[position]):
            found |= {"Python": python[position], "Python in another order": python_again[position]}
        if position in commands:
            found["command line"] = printed(kvcalc(*command_of(line)))
        if position in processes:
            found["process"] = printed(spawn(*command_of(line)))
        others = [name for name, answer in found.items() if across_paths(answer) != across_paths(first[position])]
        others += ["batch in another order"] * (again[position] != first[position])
        others += ["Python in another order"] * (python_again.get(position) != python.get(position))
        if "internal error" in str(first[position]):
            failed.append(f"{json.dumps(line)}: {first[position]}")
        elif others:
            failed.append(f"{json.dumps(line)}: {first_difference(found['batch'], found[others[0]])} in {set(others)}")
    assert not failed, f"{len(failed)} of {len(lines)}:\n" + "\n".join(failed[:8])
    assert sum(isinstance(answer, str) for answer in first.values()) > len(lines) / 2


def across_paths(answer: Any) -> Any:
    """The part of an answer that all paths share.

    That is everything but the words of a usage error: they name options, fields or arguments, and if several are
    missing the first one that the path looks for.
    """
    return answer[0] if isinstance(answer, tuple) and answer[0] == UsageError.exit_code else answer


def can_be_python(line: Mapping[str, Any], answer: Any) -> bool:
    """Whether Python has the same question. It takes one engine and prices by the full names of devices.

    The fields of a batch are those of a command, and some of them are arguments of other functions only.
    """
    return "," not in line.get("engine", "") and "price" not in line and "unknown field" not in str(answer[1])


def command_of(line: Mapping[str, Any]) -> list[str]:
    """The words of the command line that asks what a line of a batch asks."""
    others = {name: value for name, value in line.items() if name not in ("model", "command")}
    return [str(line.get("command", "estimate")), str(line["model"]), *words_of(options_of(others)), "--json"]


def printed(result: Result) -> Any:
    """What a command line printed, as the answers of a batch are compared: of a refusal, the error."""
    return json.dumps(result.json) if result.out and result.status != 2 else refusal_of(result)


def first_difference(one: Any, other: Any) -> str:
    """Where two answers differ."""
    if isinstance(one, str) and isinstance(other, str):
        found = list(answers("recording").differences(json.loads(one), json.loads(other)))
        return f"{found[0]} and {len(found) - 1} more" if found else "only the order of the keys"
    return f"{str(one)[:200]} and {str(other)[:200]}"


def test_a_step_that_divides_no_prompt_has_room_for_the_context_in_any_order(kvcalc: Any) -> None:
    """The step, and with it what is reserved, follows the context: the question before does not matter."""
    asked: Any = {"devices": api.find_devices("h100"), "engine_settings": {"no-enable-chunked-prefill": True}}
    steps: dict[int, int] = {}
    for context in (9000, 100_000, 9000, 20_000):
        document: Any = api.estimate("qwen3-8b", engine="vllm", context_tokens=context, **asked)
        settings = document["engine"]
        steps.setdefault(context, settings["max_num_batched_tokens"])
        assert settings["max_num_batched_tokens"] == steps[context] == max(context, 8192)
    lines = [
        {"model": "qwen3-8b", "engine": "vllm", "gpu": "h100", "no_enable_chunked_prefill": True, "context": context}
        for context in (100_000, 9000)
    ]
    questions = Questions()
    long, short = (cast(Any, questions.answer(Line(n, json.dumps(line).encode()))) for n, line in enumerate(lines))
    assert long["engine"]["max_num_batched_tokens"] == 100_000
    assert short["engine"]["max_num_batched_tokens"] == 9000
    words = ("sweep", "qwen3-8b", "--engine", "vllm", "--gpu", "h100", "--no-enable-chunked-prefill", "--json")
    assert kvcalc(*words, "--context", "9k").status == 0
    several = kvcalc(*words, "--context", "9k,100k").json["points"]
    alone = [kvcalc(*words, "--context", context).json["points"][0] for context in ("9k", "100k")]
    assert several == alone


def test_an_encoder_takes_a_backend_of_attention_too(kvcalc: Any) -> None:
    words = ("estimate", "multilingual-e5-small", "--engine", "vllm", "--gpu", "h100", "--attention-backend")
    assert kvcalc(*words, "FLASH_ATTN").status == 0
    refused = kvcalc(*words, "1")
    assert (refused.status, "not a name" in refused.err) == (2, True)
