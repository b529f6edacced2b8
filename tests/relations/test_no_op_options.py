"""An option that changes nothing changes no answer: bytes are equal, and the throughput is within 2 %.

Questions are random, about every engine. `pytest -m fuzz --cases 100000 --fuzz-seed 7` is a long run.

An engine's own rule may make such an option count after all. Each such rule is declared here with its reason, and only
for the questions to which it applies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from random import Random
from typing import Any, NamedTuple

import pytest

from kvcalc.errors import KvcalcError
from tests.relations.drawing import answers, ask, asked, command_line, declared, draw, text_of

pytestmark = pytest.mark.fuzz

Options = dict[str, Any]

ESTIMATED = ("vllm", "sglang", "tensorrt-llm", "llama.cpp", "mlx", "transformers", "logical")
SIMULATED = ("vllm", "sglang", "tensorrt-llm", "llama.cpp")
COMMANDS = [("estimate", engine) for engine in ESTIMATED]
COMMANDS += [(command, engine) for command in ("simulate", "plan") for engine in SIMULATED]
# One random question of each engine for so many cases of the other fuzz tests. Simulations and plans take longer.
CASES_PER_QUESTION = {"estimate": 333, "simulate": 2000, "plan": 2500}
TOLERANCE = 0.02
# Options that say what is used again or drafted. The relations add their own.
DRAFTS = ("speculative", "acceptance-length", "draft-model", "speculative-eagle-topk", "speculative-num-draft-tokens",
          "num-speculative-tokens", "draft-max")  # fmt: skip
REUSE = ("prefix-tokens", "prefix-hit-rate", "turns", "offload", "offload-bandwidth")


class Asked(NamedTuple):
    """A question, and its answer."""

    command: str
    model: str
    options: Options
    document: dict[str, Any]

    @property
    def engine(self) -> str:
        """The engine's name."""
        return str(self.options.get("engine", "vllm"))


def questions(command: str, engine: str, config: pytest.Config) -> tuple[Asked, ...]:
    """Random questions about an engine that are answered, without drafts and reuse."""
    cases, seed = config.getoption("--cases"), config.getoption("--fuzz-seed")
    return drawn(command, engine, max(2, cases // CASES_PER_QUESTION[command]), seed)


@cache
def drawn(command: str, engine: str, number: int, seed: int) -> tuple[Asked, ...]:
    """So many questions. Half of those about a load have more requests than fit."""
    random, found = Random(f"{command} {engine} {seed}"), list[Asked]()
    while len(found) < number:
        model, options = draw(random, command, engine)
        options = {name: value for name, value in options.items() if name not in (*DRAFTS, *REUSE)}
        if command == "plan" and "concurrency" in options:  # plans for more clients are simulated for seconds
            options["concurrency"] = str(min(6, int(options["concurrency"])))
        document = asked(command, model, options)
        if document is not None and len(found) % 2 and "input-tokens" in options and command == "estimate":
            options = {**options, **pressed(random, document)}
            document = asked(command, model, options)
        if document is not None:
            found.append(Asked(command, model, options, document))
    return tuple(found)


def pressed(random: Random, document: Mapping[str, Any]) -> Options:
    """A load of which only some requests fit: engines' rules for admission and preemption count there."""
    fit, cache = document["fit"], document["kv_cache"]
    if fit is None or fit["kv_cache_bytes"] is None:
        return {}
    memory = random.randint(2, 40) * cache["bytes_per_device"] // document["workload"]["batch_size"]
    room = fit["kv_cache_bytes"] + fit["free_bytes"]
    return {"concurrency": "300", "kv-memory": str(max(1, min(memory, room)))}


def bytes_of(document: Mapping[str, Any]) -> dict[str, Any]:
    """The figures that must be equal: the bytes of the cache, and what fits."""
    if "results" in document:
        engine, results = document["engine"], document["results"]
        return {name: engine[name] for name in ("blocks", "block_tokens")} | {"requests": results["requests"]}
    if "plans" in document:
        sizes = (
            "tensor_parallel_size",
            "pipeline_parallel_size",
            "data_parallel_size",
            "num_devices",
            "max_batch_size",
        )
        rows = document["plans"]
        return {f"{row['gpu']} {name}": row[name] for row in rows for name in (*sizes, "fits", "free_bytes", "reason")}
    cache, fit = document["kv_cache"], document["fit"] or {}
    names = ("total_bytes", "bytes_per_token", "fixed_bytes_per_sequence", "bytes_per_device")
    limits = ("kv_cache_bytes", "free_bytes", "max_batch_size", "max_context_tokens", "verdict")
    return {name: cache[name] for name in names} | {name: fit.get(name) for name in limits}


def of_rows(plan: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    """Figures of all rows of a plan."""
    return {f"plans.{number}.{name}": row[name] for number, row in enumerate(plan["plans"]) for name in names}


def speeds_of(document: Mapping[str, Any]) -> dict[str, Any]:
    """The figures that must be within the tolerance."""
    if "results" in document:
        results = document["results"]
        times = {row["metric"]: row["mean_seconds"] for row in document["times"]}
        return {"tokens_per_second": results["tokens_per_second"], **{name: times[name] for name in ("tpot", "e2e")}}
    if "plans" in document:
        return of_rows(document, ("tokens_per_second", "tpot_seconds", "ttft_seconds"))
    speed = document["throughput"] or {}
    served = speed.get("serving") or {}
    names = ("tokens_per_second", "running_requests", "tpot_seconds", "ttft_seconds")
    steps = ("decode_step_seconds", "prefill_seconds")
    return {name: served.get(name) for name in names} | {name: speed.get(name) for name in steps}


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """The figures that an option changed."""
    found = []
    was, now = bytes_of(before), bytes_of(after)
    found += [f"{name} {was[name]} -> {now[name]}" for name in was if was[name] != now[name]]
    was, now = speeds_of(before), speeds_of(after)
    return found + [f"{name} {was[name]} -> {now[name]}" for name in was if not is_close(was[name], now[name])]


def is_close(one: float | None, other: float | None) -> bool:
    """Whether two figures are equal within the tolerance, or neither is known."""
    if one is None or other is None:
        return one is other
    return abs(one - other) <= TOLERANCE * max(abs(one), abs(other)) + 1e-9


class Failures:
    """The questions for which a relation does not hold."""

    def __init__(self) -> None:
        self.tried, self._failed = 0, list[str]()

    def check(self, question: Asked, more: Options, found: Callable[[dict[str, Any]], list[str]]) -> None:
        """Ask the question with more options, and keep what `found` says about the answer. A refusal is no answer."""
        options = {**question.options, **more}
        try:
            document = ask(question.command, question.model, options)
        except KvcalcError:
            return
        if any(note["code"] == "not-simulated" for note in document.get("warnings", ())):
            return  # the server refuses these requests
        self.tried += 1
        differences = found(document)
        if differences:
            line = command_line(question.command, question.model, options)
            self._failed.append(f"{line}\n    without {' '.join(more)}: {'; '.join(differences)}")

    def report(self) -> None:
        """Fail with the first of them."""
        assert not self._failed, f"{len(self._failed)} of {self.tried}:\n" + "\n".join(self._failed[:8])


def unchanged(question: Asked) -> Callable[[dict[str, Any]], list[str]]:
    """The figures of another answer that differ from those of the question."""
    return lambda found: changes(question.document, found)


def same_text(question: Asked) -> Callable[[dict[str, Any]], list[str]]:
    """Whether another answer is another document."""
    return lambda found: [] if text_of(found) == text_of(question.document) else ["another document"]


@pytest.mark.parametrize(("command", "engine"), COMMANDS)
def test_a_second_identical_question_has_the_same_answer(
    command: str, engine: str, pytestconfig: pytest.Config
) -> None:
    failures = Failures()
    for question in questions(command, engine, pytestconfig):
        failures.check(question, {}, same_text(question))
    assert failures.tried
    failures.report()


@pytest.mark.parametrize(("command", "engine"), COMMANDS)
def test_a_hit_rate_of_0_changes_nothing(command: str, engine: str, pytestconfig: pytest.Config) -> None:
    failures = Failures()
    for question in questions(command, engine, pytestconfig):
        failures.check(question, {"prefix-hit-rate": "0"}, unchanged(question))
    assert failures.tried
    failures.report()


@pytest.mark.parametrize(("command", "engine"), COMMANDS)
def test_the_layout_in_use_given_explicitly_changes_nothing(
    command: str, engine: str, pytestconfig: pytest.Config
) -> None:
    if command == "plan":
        pytest.skip("chooses the layout")
    failures = Failures()
    for question in questions(command, engine, pytestconfig):
        used = question.document["engine"]
        layout = {"dp": "1", "tp": str(used["tensor_parallel_size"]), "pp": str(used["pipeline_parallel_size"])}
        more = {name: value for name, value in layout.items() if name not in question.options}
        if used["data_parallel_size"] == 1:
            failures.check(question, more, unchanged(question))
        if command == "simulate" and question.document["hardware"]["replicas"] == 1:
            failures.check(question, {"replicas": "1"}, unchanged(question))
    assert failures.tried
    failures.report()


def block_of(question: Asked) -> int | None:
    """The tokens of a block, if the engine keeps blocks. A plan does not say; blocks of 16 tokens are the smallest."""
    if question.command == "plan":
        return int(question.options.get("page-size", 16))
    engine = question.document["engine"]
    return engine.get("block_tokens") or next(
        (engine[name] for name in ("block_size", "page_size", "tokens_per_block") if engine.get(name)), None
    )


@pytest.mark.parametrize(("command", "engine"), COMMANDS)
def test_a_prefix_shorter_than_a_block_changes_nothing(command: str, engine: str, pytestconfig: pytest.Config) -> None:
    """SGLang's pages have one token by default, so a part of its questions get longer ones."""
    if engine in ("llama.cpp", "mlx", "transformers", "logical"):
        pytest.skip("keeps no blocks")
    failures, random = Failures(), Random(engine)
    for question in questions(command, engine, pytestconfig):
        asked_with = question
        if engine == "sglang" and "page-size" not in question.options:
            options = {**question.options, "page-size": "64"}
            document = asked(command, question.model, options)
            if document is None:
                continue
            asked_with = question._replace(options=options, document=document)
        block = block_of(asked_with)
        if block is not None and block > 1:
            tokens = random.randrange(1, block)
            failures.check(asked_with, {"prefix-tokens": str(tokens)}, unchanged(asked_with))
    assert failures.tried
    failures.report()


# Rules of an engine by which the declared default, given explicitly, is another question.
GIVEN_COUNTS: dict[tuple[str, str], str] = {
    ("vllm", "max-loras"): "a model with either option for LoRA adapters has buffers for them",
    ("vllm", "max-lora-rank"): "the same",
    ("sglang", "max-loras-per-batch"): "the same",
    ("sglang", "max-lora-rank"): "the same",
    ("llama.cpp", "fit-ctx"): "only for --context auto",
    ("llama.cpp", "fit-target"): "only for --context auto",
    ("llama.cpp", "cache-type-k"): "replaces --kv-dtype for K",
    ("llama.cpp", "cache-type-v"): "replaces --kv-dtype for V",
}


@pytest.mark.parametrize("engine", ESTIMATED)
def test_the_default_of_an_engines_option_given_explicitly_changes_nothing(
    engine: str, pytestconfig: pytest.Config
) -> None:
    options = [option for option in declared().engines[engine] if (engine, option.name) not in GIVEN_COUNTS]
    defaults = {option.name: option.default for option in options if option.default is not None}
    if not defaults:
        pytest.skip("no option with a plain default")
    failures = Failures()
    for question in questions("estimate", engine, pytestconfig):
        for name, value in defaults.items():
            if name in question.options or has_another_rule(name, question):
                continue
            if not has_own_default(engine, name, value, question):
                failures.check(question, {name: value}, unchanged(question))
    assert failures.tried
    failures.report()


def has_own_default(engine: str, name: str, value: str, question: Asked) -> bool:
    """Whether the engine's default for this model, device or layout is not the one that the help names.

    vLLM enlarges a block so that blocks of layers with other sizes, or states, fill pages of the same size; SGLang and
    TensorRT-LLM choose some values by model, device and type. The document says which value is used.
    """
    used = question.document["engine"].get(name.replace("-", "_"))
    return used is not None and str(used) != value


def has_another_rule(name: str, question: Asked) -> bool:
    """SGLang sizes DeepSeek V4's pool of windows by the requests that run, unless the ratio is given.

    Source: deepseek_v4 of the pool configurator (`memory/engines/sglang/deepseek_v4.py`).
    """
    return name == "swa-full-tokens-ratio" and question.model.startswith("deepseek-v4")


# What a question means besides its own tokens if N tokens are drafted per step.
SLOTS: dict[str, tuple[int, str]] = {
    "vllm": (1, "allocate_slots of v1/core/kv_cache_manager.py: num_lookahead_tokens, up to max_model_len"),
    "sglang": (19, "get_alloc_reserve_per_decode: two steps of speculative_ngram_max_bfs_breadth = 10 tokens"),
    "tensorrt-llm": (2, "py_executor_creator.py: drafted tokens of a step and of the one that is prepared"),
    "llama.cpp": (0, "drafts fewer tokens at the end of a request"),
    "logical": (0, "counts a request's tokens alone"),
}
# SGLang runs at most 48 requests with drafts if the option says nothing else (server_args.py).
LIMITS = {"sglang": {"max-running-requests": "48"}}


def plain(question: Asked, slots: int = 0) -> dict[str, Any] | None:
    """The load without drafts whose requests are longer by `slots` tokens, and with the engine's limit for drafts.

    Prompts are longer, because a request holds its slots from its start, as it holds its prompt.
    """
    length = int(question.options["input-tokens"]) + slots
    limits = LIMITS.get(question.engine, {})
    document = asked(question.command, question.model, {**limits, **question.options, "input-tokens": str(length)})
    served = document and (document["throughput"] or {}).get("serving")
    return served and dict(served)


def is_placed(question: Asked) -> bool:
    """Whether parts of the model are in host memory.

    From 32 tokens on, the device computes a step for them too (GGML_OP_OFFLOAD_MIN_BATCH of llama.cpp), so a step of 16
    requests that checks drafts may take less time than one without.
    """
    return bool(answers("values").IN_HOST_MEMORY & {*question.options})


@pytest.mark.parametrize("engine", [*SLOTS])
def test_drafts_that_are_never_accepted_and_cost_nothing_leave_as_many_requests_running(
    engine: str, pytestconfig: pytest.Config
) -> None:
    """n-grams have no weights and no cache. One drafted token, of which none is accepted, only takes its slots.

    So as many requests run as without drafts if each is longer by the slots. The speed of a step is not compared: a
    step checks two tokens of each request, which is more work for more than a few requests. So it also has room for
    fewer prompts, and one more request may wait for a step.
    """
    failures = Failures()
    for question in questions("estimate", engine, pytestconfig):
        served = (question.document["throughput"] or {}).get("serving")
        if not served or keeps_states(question):
            continue
        slots, _ = SLOTS[engine]
        longer = plain(question, slots)
        if longer is None:
            continue
        least = min(served["running_requests"], longer["running_requests"])

        def found(document: dict[str, Any], least: int = least) -> list[str]:
            running = document["throughput"]["serving"]["running_requests"]
            enough = running >= least * (1 - TOLERANCE) - 2
            return [] if enough else [f"running_requests {least} -> {running}"]

        failures.check(question, {"speculative": "ngram:1", "acceptance-length": "1"}, found)
    assert failures.tried
    failures.report()


def keeps_states(question: Asked) -> bool:
    """Whether the model has recurrent states, of which engines keep one more for every drafted token."""
    cache_lines = question.document["kv_cache"]["layers"]
    return any("recurrent" in row["kind"] for row in cache_lines)


@pytest.mark.parametrize("engine", [*SLOTS])
def test_a_load_loses_no_more_to_drafts_than_a_step_does(engine: str, pytestconfig: pytest.Config) -> None:
    """A step that checks drafts takes longer. The document says by how much; it is asked at the mean length here."""
    failures = Failures()
    drafts = {"speculative": "ngram:1", "acceptance-length": "1"}
    for question in questions("estimate", engine, pytestconfig):
        served = (question.document["throughput"] or {}).get("serving")
        if not served or keeps_states(question) or is_placed(question):
            continue
        before, longer = plain(question), plain(question, SLOTS[engine][0])
        if before is None or longer is None:
            continue
        step = asked("estimate", question.model, {**mean_step(question, before["running_requests"]), **drafts})
        if step is None or step["speculative"]["speedup"] is None:
            continue
        rate = min(before["tokens_per_second"], longer["tokens_per_second"])
        least = rate * min(1.0, step["speculative"]["speedup"]) * (1 - TOLERANCE)

        def found(document: dict[str, Any], before: dict[str, Any] = before, least: float = least) -> list[str]:
            after = document["throughput"]["serving"]
            names = ("tokens_per_second", "running_requests")
            lost = [f"{name} {before[name]} -> {after[name]}" for name in names]
            return [] if after["tokens_per_second"] >= least else [*lost, f"a step alone leaves {least}"]

        failures.check(question, drafts, found)
    assert failures.tried
    failures.report()


def mean_step(question: Asked, running: int) -> Options:
    """A decode step of so many requests, each at the middle of its answer."""
    load = ("input-tokens", "output-tokens", "concurrency", "kv-memory")
    options = {name: value for name, value in question.options.items() if name not in load}
    tokens = int(question.options["input-tokens"]) + int(question.options["output-tokens"]) // 2
    return {**options, "context": str(tokens), "batch": str(running)}
