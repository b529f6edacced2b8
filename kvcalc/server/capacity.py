"""The longest context and the largest batch that fit in a given amount of memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from kvcalc.engines import engine_class
from kvcalc.memory import kv_cache
from kvcalc.model.spec import period
from kvcalc.notes import Note
from kvcalc.records import NamedTuple
from kvcalc.server.case import Case

if TYPE_CHECKING:
    import kvcalc.documents as documents
    from kvcalc.question.question import Question

# The code of the note that memory does not limit the context.
NO_LIMIT = "no-limit"

# A batch that no memory holds, if each sequence takes any at all.
_UNBOUNDED_SEQUENCES = 2**60

PoolShrinkage = Callable[[int, int], int]
"""How many bytes the pool shrinks at a number of tokens and sequences, compared with its size at the workload."""


Limits = tuple[int | None, int | None]
"""The longest context for a batch and the largest batch for a context. None if memory sets no limit."""


def capacity(
    case: Case, kv_memory_bytes: int, notes: list[Note], pool_shrinkage: PoolShrinkage | None = None,
    limits: Limits | None = None,
) -> documents.Fit:  # fmt: skip
    """The `fit` part of a document if each device has `kv_memory_bytes` for the cache.

    `max_context_tokens` is for this batch, `max_batch_size` for this context; what memory alone would hold has keys of
    its own. `limits` are those of the memory, if they are known already.
    """
    workload = case.workload
    share, allocation, batch = case.share, case.allocation, workload.attention_batch
    tokens = workload.context_tokens
    longest, fitting = limits or (
        longest_context(case, kv_memory_bytes, pool_shrinkage),
        fitting_batch(case, kv_memory_bytes, tokens, pool_shrinkage),
    )
    largest = least(fitting, max_running_requests(_of_length(case, tokens), kv_memory_bytes, tokens))
    here = allocation.batch_bytes(share, workload.kv_dtype, tokens, batch)
    fits = holds(case, kv_memory_bytes)
    notes += context_notes(longest)
    return {
        "fits": fits,
        "verdict": "fits" if fits else "does_not_fit",
        "device_bytes": None,
        "weights_bytes": None,
        "weights_replicated_bytes": None,
        "kv_cache_bytes": here,
        "activation_bytes": None,
        "reserve_bytes": None,
        "kv_cache_memory_bytes": kv_memory_bytes,
        "free_bytes": kv_memory_bytes - here,
        "free_low_bytes": None,
        "free_high_bytes": None,
        "max_context_tokens": least(longest, case.spec.max_position_embeddings),
        "memory_context_tokens": longest,
        "sure_context_tokens": None,
        "max_batch_size": largest,
        "memory_batch_size": fitting,
        "start_limit": allocation.start_limit(share, workload.kv_dtype, kv_memory_bytes),
        "lines": None,
        "host": None,
        "devices": None,
    }


def holds(case: Case, kv_memory_bytes: int) -> bool:
    """Whether a device with `kv_memory_bytes` for the cache runs the workload."""
    workload = case.workload
    needed = case.needed_bytes(workload.context_tokens, workload.attention_batch)
    most = max_running_requests(case, kv_memory_bytes, workload.context_tokens)
    runs = most is None or workload.batch_size <= most
    return needed <= kv_memory_bytes and runs and starts(case, kv_memory_bytes)


class TooMany(NamedTuple):
    """A limit of running requests with which an engine does not start: its `option`, and the largest `limit` that does.

    `is_default` says that it was not given, so that it can be lowered.
    """

    option: str
    running: int
    limit: int
    is_default: bool

    @property
    def reason(self) -> str:
        default = ", the default" if self.is_default else ""
        return (
            f"--{self.option} {self.running}{default}: the CUDA graphs need a block of the cache for each of these "
            f"requests, and there are {self.limit:,}"
        )

    def refusal(self, title: str) -> str:
        """The reason in a sentence about the engine `title`, with the limit to use."""
        return f"{title} does not start with {self.reason}: use --{self.option} {self.limit}"


def starts(case: Case, kv_memory_bytes: int) -> bool:
    """Whether the engine starts with the limit of running requests that was asked for. A default can be lowered."""
    problem = too_many_to_start(case, kv_memory_bytes)
    return problem is None or problem.is_default


def too_many_to_start(case: Case, kv_memory_bytes: int) -> TooMany | None:
    """The engine's limit of running requests, given or by default, if it does not start with it."""
    allocation, share, dtype = case.allocation, case.share, case.workload.kv_dtype
    limit, running = allocation.start_limit(share, dtype, kv_memory_bytes), None
    if limit:  # without a block, nothing fits anyway
        running = allocation.max_running_requests(share, dtype, None)
    return too_many(case.question, running, limit)


def too_many(question: Question, running: int | None, limit: int | None) -> TooMany | None:
    """The engine's limit of `running` requests if it is larger than the `limit` with which it starts (None: any)."""
    option = engine_class(question.engine).running_option
    if not option or not limit or running is None or running <= limit:
        return None
    return TooMany(option, running, limit, option not in (question.engine_settings or {}))


def max_running_requests(case: Case, kv_memory_bytes: int | None, tokens: int = 1) -> int | None:
    """The most requests of `tokens` tokens that all DP ranks run at once (`Engine.max_running_requests`).

    This is the engine's own limit; fewer run if their caches take more memory. None if there is none.
    """
    memory = None if kv_memory_bytes is None else max(kv_memory_bytes, 0)
    most = case.allocation.max_running_requests(case.share, case.workload.kv_dtype, memory, tokens)
    return None if most is None else most * case.layout.data_parallel_size


def context_notes(longest: int | None) -> list[Note]:
    """A note if memory sets no limit of the context."""
    if longest is not None:
        return []
    return [Note("fit", NO_LIMIT, "memory does not limit the context: the cache no longer grows with it")]


def usable_context(fit: documents.Fit) -> int | None:
    """The longest context that fits in the whole range of the free memory, or else by the estimate.

    None if memory sets no limit, and neither does the model.
    """
    return fit["sure_context_tokens"] or fit["max_context_tokens"]


def longest_context(case: Case, kv_memory_bytes: int, pool_shrinkage: PoolShrinkage | None = None) -> int | None:
    """The longest context of the case's batch whose cache fits in `kv_memory_bytes`. None if memory sets no limit."""
    spec, workload = case.spec, case.workload
    batch = workload.attention_batch
    if not starts(case, kv_memory_bytes):
        return 0
    needed = _needed(case, pool_shrinkage)
    if pool_shrinkage is None and not case.encoder_follows_context:
        longest = case.allocation.longest_context(case.share, workload.kv_dtype, batch, kv_memory_bytes)
    else:
        longest = kv_cache.longest_context(lambda tokens: needed(tokens, batch), kv_memory_bytes, period(spec))
    return _longest_running(case, kv_memory_bytes, longest)


def _longest_running(case: Case, kv_memory_bytes: int, longest: int | None) -> int | None:
    """The longest context, up to `longest`, with which the engine runs the batch.

    None if there is no limit, as far as the case's own context shows.
    """

    def is_too_long(tokens: int) -> bool:
        most = max_running_requests(case, kv_memory_bytes, tokens)
        return most is not None and most < case.workload.batch_size

    most = case.workload.context_tokens if longest is None else longest
    if most == 0 or not is_too_long(most):
        return longest
    return kv_cache.most_that_fit(lambda tokens: int(is_too_long(tokens)), 0, most)


def largest_batch(
    case: Case, kv_memory_bytes: int, tokens: int, pool_shrinkage: PoolShrinkage | None = None
) -> int | None:
    """The most sequences of `tokens` tokens that the engine runs at once and whose cache fits in `kv_memory_bytes` on
    each device. None if neither sets a limit. Every DP rank runs as many."""
    case = _of_length(case, tokens)
    fitting = fitting_batch(case, kv_memory_bytes, tokens, pool_shrinkage)
    return least(fitting, max_running_requests(case, kv_memory_bytes, tokens))


def fitting_batch(
    case: Case, kv_memory_bytes: int, tokens: int, pool_shrinkage: PoolShrinkage | None = None
) -> int | None:
    """`largest_batch` without the engine's limit of running requests: the most sequences whose cache fits."""
    case = _of_length(case, tokens)
    if not starts(case, kv_memory_bytes):
        return 0
    most = _largest_attention_batch(case, kv_memory_bytes, tokens, pool_shrinkage)
    return None if most is None else most * case.layout.data_parallel_size


def _of_length(case: Case, tokens: int) -> Case:
    is_other = tokens != case.workload.context_tokens and case.encoder_follows_context
    return case.of_length(tokens) if is_other else case


def _largest_attention_batch(
    case: Case, kv_memory_bytes: int, tokens: int, pool_shrinkage: PoolShrinkage | None
) -> int | None:
    if pool_shrinkage is None and period(case.spec) == 1:
        line = case.allocation.batch_line(case.share, case.workload.kv_dtype, tokens)
        if line is not None and line.bytes_of_each:
            if line.start_bytes and line.start_bytes > kv_memory_bytes:
                return 0
            return max((kv_memory_bytes - line.fixed_bytes) // line.bytes_of_each, 0)
    held = _needed(case, pool_shrinkage)
    of_one = held(tokens, 1)
    if of_one > kv_memory_bytes:
        return 0
    if not of_one and pool_shrinkage is None:
        return None
    # The second sequence may take less than the first, which includes the pool's fixed bytes. Avoid dividing by 0.
    another = max(1, held(tokens, 2) - of_one)
    too_many = 2 + (kv_memory_bytes - of_one) // another
    if held(tokens, too_many) > kv_memory_bytes:
        # In most engines every further sequence takes the same number of bytes. Then this estimate is exact.
        if held(tokens, too_many - 1) <= kv_memory_bytes:
            return too_many - 1
    else:
        while held(tokens, too_many) <= kv_memory_bytes:
            too_many *= 2
            if too_many > _UNBOUNDED_SEQUENCES:
                return None
    return kv_cache.most_that_fit(lambda sequences: held(tokens, sequences), kv_memory_bytes, too_many)


def _needed(case: Case, pool_shrinkage: PoolShrinkage | None) -> Callable[[int, int], int]:
    """The memory for the cache that a number of tokens and sequences needs on a device, as a function.

    The sequences are those of one DP rank.
    """
    if pool_shrinkage is None:
        return case.needed_bytes
    replicas = case.layout.data_parallel_size
    return lambda tokens, sequences: case.needed_bytes(tokens, sequences) + pool_shrinkage(tokens, sequences * replicas)


def least(*limits: int | None) -> int | None:
    """The smallest limit. None is no limit."""
    return min((limit for limit in limits if limit is not None), default=None)
