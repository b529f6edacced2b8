"""The requests of a simulation."""

from __future__ import annotations

from collections.abc import Iterator
from sys import maxsize


class Request:
    """One request, and what happened to it.

    `cached_tokens` of its tokens are found in the prefix cache; when it first runs, these are `found_tokens`. `names`
    are those of the whole blocks of its prompt, of which it shares the first `shared`. `given_tokens` are found without
    a look at the blocks, if all named ones are found. `held` are the units of its own, `extra` those of its prompt that
    it does not need to decode, and `kept` is the number under which the cache keeps those that it gave back. `computed`
    is the number of tokens
    whose cache exists, and `target` the number that a prefill computes: the prompt and, after a preemption, the answer
    so far. While it decodes, it holds the cache of `key` + steps tokens, where steps counts the decode steps of the
    replica. Times are those of the engine, in seconds from the start; None until they happen. The client gets every
    token `lag` seconds later.

    The `arrival` of one that a client sends after an answer is the time that the client thinks, until it is sent.
    `session` are the requests that follow in the same session, or None. A request that `is_turn` of a session has one
    name, that of the session, of which it can find `findable_tokens`.
    """

    __slots__ = (
        "answer_tokens", "arrival", "cached_tokens", "computed", "extra", "findable_tokens", "finish", "finish_step",
        "first_token", "found_tokens", "given_tokens", "held", "is_turn", "kept", "key", "lag", "last_token", "names",
        "number", "outputs", "preemptions", "prompt_tokens", "session", "shared", "started", "target",
    )  # fmt: skip

    def __init__(
        self, number: int, arrival: float, prompt_tokens: int, answer_tokens: int, cached_tokens: int = 0,
        names: tuple[int, ...] = (),
    ) -> None:  # fmt: skip
        self.number, self.arrival, self.lag = number, arrival, 0.0
        self.prompt_tokens, self.answer_tokens, self.cached_tokens = prompt_tokens, answer_tokens, cached_tokens
        self.given_tokens = cached_tokens
        self.names, self.shared, self.kept, self.found_tokens = names, 0, 0, 0
        self.target, self.computed, self.outputs, self.held = prompt_tokens, 0, 0, 0
        self.extra = 0
        self.key, self.finish_step, self.preemptions = 0, -1, 0
        self.session: Iterator[Request] | None = None
        self.is_turn, self.findable_tokens = False, maxsize
        self.started: float | None = None
        self.first_token: float | None = None
        self.last_token: float | None = None
        self.finish: float | None = None

    def cut_prompt(self, tokens: int) -> None:
        """Cut the prompt to `tokens` tokens before the request is sent."""
        self.prompt_tokens = self.target = tokens
        self.cached_tokens = self.given_tokens = min(self.cached_tokens, tokens - 1)

    @property
    def total_tokens(self) -> int:
        """The prompt and the whole answer."""
        return self.prompt_tokens + self.answer_tokens

    def following(self, others: Iterator[Request] | None) -> Request | None:
        """What its client sends next: the next request of its session, or of `others`. None if there is none."""
        later = self.session or others
        return None if later is None else next(later, None)
