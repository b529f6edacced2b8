"""How many requests an engine runs at once in a steady load, by its rule for admitting them, and how many tokens."""

from __future__ import annotations

from kvcalc.engines.options import Given
from kvcalc.model.spec import windows
from kvcalc.planning.budget import Budget, budget
from kvcalc.planning.capacity import max_running_requests
from kvcalc.planning.case import Case
from kvcalc.records import NamedTuple
from kvcalc.throughput.scheduling import STEP_TOKENS, StepRules

# The most requests considered of an engine without a limit.
_UNLIMITED = 4096

# n_batch of llama.cpp (common/common.h).
BATCH_TOKENS = 2048

# Engines that draft tokens for one sequence at a time: Transformers (_assisted_decoding, generation/utils.py), and
# mlx-lm, whose server runs no batches with a draft model (is_batchable, mlx_lm/server.py).
_DRAFT_FOR_ONE = ("transformers", "mlx")


def most_at_once(case: Case, found: Budget | str) -> int:
    """The most requests that the engine's attention replicas run at once, whatever their lengths.

    `found` is the budget of the case, or the reason if it is not known. Of an engine without a limit, no more are
    considered.
    """
    if case.question.speculative is not None and case.engine_name in _DRAFT_FOR_ONE:
        return 1
    limit = max_running_requests(case, None if isinstance(found, str) else found.offered_bytes)
    return _UNLIMITED * case.workload.data_parallel_size if limit is None else limit


def prefill_step_tokens(case: Case) -> int:
    """The most prompt tokens that one attention replica computes in a step of one pipeline stage.

    SGLang divides its number among the attention replicas (arg_groups/parallel_hook.py).
    """
    if case.engine_name == "vllm":
        return Given("vllm", case.settings).count("max-num-batched-tokens", STEP_TOKENS)
    if case.engine_name == "sglang":
        # Imported here because most questions do not need it.
        from kvcalc.engines.sglang.device import steps_by_memory

        tokens = Given("sglang", case.settings).optional_count("chunked-prefill-size")
        tokens = tokens or steps_by_memory(case.devices.gpu.memory_bytes)[0]
        return max(1, tokens // case.workload.data_parallel_size)
    return STEP_TOKENS


def step_rules(case: Case, most: int) -> StepRules | None:
    """How the engine puts prompts into steps. None if its scheduler is not known. `most` is `most_at_once`.

    The rules and their sources are those of the simulated schedulers (kvcalc.simulation): vLLM, TensorRT-LLM and
    llama.cpp compute prompts in the steps of decoding requests. TensorRT-LLM does not divide them.
    """
    overlaps, engine = overlaps_steps(case), case.engine_name
    if overlaps is None:
        return None
    if engine == "llama.cpp":
        return StepRules(BATCH_TOKENS, overlaps=overlaps)
    tokens = prefill_step_tokens(case)
    if engine == "sglang":
        return StepRules(tokens, mixes=False, overlaps=overlaps)
    running = max(1, most // case.workload.data_parallel_size)
    # With pipeline stages, each of them has a step of its own in the time of one step of the model.
    tokens *= case.workload.pipeline_parallel_size
    if engine == "vllm":
        return StepRules(max(tokens, running), overlaps=overlaps)
    # A prompt that is not divided must fit into a step, beside the requests that decode.
    return StepRules(max(tokens, case.workload.context_tokens + running), divides=False, overlaps=overlaps)


def overlaps_steps(case: Case) -> bool | None:
    """Whether the engine schedules a step while the one before it runs. None if its scheduler is not known.

    vLLM: async_scheduling. SGLang: disable_overlap_schedule is off by default. TensorRT-LLM: so is
    disable_overlap_scheduler. With pipeline stages, vLLM and TensorRT-LLM have other steps in flight instead. llama.cpp
    runs one step at a time.
    """
    has_stages = case.workload.pipeline_parallel_size > 1
    if case.engine_name == "vllm":
        return bool(case.engine.settings.get("async_scheduling")) and not has_stages
    return {"sglang": True, "tensorrt-llm": not has_stages, "llama.cpp": False}.get(case.engine_name)


def wanted_requests(case: Case, most: int) -> int:
    """The requests that the engine runs at once if the cache has room: `most_at_once`, or the concurrency if lower."""
    question = case.question.speed
    return most if question is None or question.concurrency is None else min(question.concurrency, most)


class Running(NamedTuple):
    """The mean number of requests that run at once, and whether some are preempted: they start before all fit."""

    requests: float
    may_preempt: bool = False


def running_requests(case: Case, wanted: int) -> Running:
    """The requests that run at once, of `wanted_requests`. The others wait.

    `case` is at its load: its batch is the number of requests that fit at their full length. An engine that reserves
    the full length runs these. The others admit a request as long as its prompt fits, so in a steady load the cache
    is full of requests of all ages. If a request then finds no room, the engine stops another one and computes it again
    later (`kvcalc.planning.preemption`), and SGLang keeps some room free for that. In layers with windows, a request
    may hold less than is reserved for it.
    """
    fitting, question = case.workload.batch_size, case.question.speed
    if question is None or question.input_tokens is None or question.output_tokens is None:
        return Running(fitting)
    prompt, answer = question.input_tokens, question.output_tokens
    if case.engine.reserves_full_length or fitting >= wanted:
        return Running(min(fitting, wanted))
    found = budget(case)
    if not isinstance(found, Budget):
        return Running(fitting, may_preempt=True)
    full = _most_running(found, case.workload.context_tokens)
    may_preempt = full is None or full < wanted
    limit = _mean_running(found, prompt, answer)
    if limit is None:
        return Running(wanted, may_preempt)
    most = max(fitting, min(wanted, limit))
    if case.engine_name != "sglang":
        return Running(most, may_preempt)
    # Imported here because most questions do not need it.
    from kvcalc.planning.preemption import sglang_running

    return Running(min(most, max(fitting, sglang_running(found, prompt, answer))), may_preempt)


def _mean_running(found: Budget, prompt: int, answer: int) -> float | None:
    """The most requests of all ages that run. None if memory sets no limit.

    What a request holds grows with its answer: evenly if all layers keep all tokens, so that its mean is that of half
    an answer. If it fills a window on the way, it is the mean over the answer.
    """
    fills = any(prompt < window < prompt + answer for window in windows(found.case.spec))
    ages = (1 / 8, 3 / 8, 5 / 8, 7 / 8) if fills else (1 / 2,)
    share = 0.0
    for age in ages:
        tokens = prompt + int(answer * age)
        limit = _most_running(found, tokens)
        if limit is None:
            limit = found.running_limit(tokens)
        if limit is None:
            return None
        share += 1 / max(limit, 1)
    return len(ages) / share


def _most_running(found: Budget, tokens: int) -> int | None:
    """The most requests of `tokens` tokens that run. None if they hold what the engine reserves at the start."""
    case, speed = found.case, found.case.question.speed
    if found.devices or speed is None or speed.input_tokens is None:
        return None
    share = case.allocation.largest_stage(case.share, case.workload.kv_dtype, tokens, 1)
    most = case.allocation.most_running(share, case.workload.kv_dtype, found.offered_bytes, speed.input_tokens, tokens)
    return None if most is None else most * case.workload.data_parallel_size
