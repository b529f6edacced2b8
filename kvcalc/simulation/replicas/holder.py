"""The memory of a replica: which units of the pool its running requests hold."""

from __future__ import annotations

from heapq import heappop, heappush

from kvcalc.simulation.loads.requests import Request
from kvcalc.simulation.replicas.pool import BlockPool, PoolError
from kvcalc.simulation.replicas.prefix_cache import PrefixCache
from kvcalc.simulation.replicas.rules import Rules
from kvcalc.simulation.replicas.server import Server


class Holder(Server):
    """The running requests in the order in which they started, and what they hold of the pool."""

    # Whether requests find the blocks of a prompt as soon as the step that computes them is scheduled.
    names_early = True

    def __init__(self, rules: Rules, pool: BlockPool, prefixes: PrefixCache | None) -> None:
        self.rules, self.schedule, self.pool, self.prefixes = rules, rules.schedule, pool, prefixes
        self._shared_units = 0 if prefixes is None else prefixes.units  # the units of a block that requests share
        self.running: dict[Request, None] = {}
        self._shrinking: list[Request] = []  # they decode, but still hold blocks that only their prompts needed
        self._sending: dict[Request, None] = {}  # they have ended, but hold their blocks until their cache is sent
        self._sent: list[tuple[float, int, Request]] = []  # when that is, as far as it is known

    def check(self) -> None:
        if self.pool.capacity is None:
            return
        held = sum([self._held(request) for request in (*self.running, *self._sending)])
        held += self.prefixes.pinned_units if self.prefixes is not None else 0
        if held != self.pool.used:
            raise PoolError(f"requests hold {held} blocks, but {self.pool.used} are taken")

    def _held(self, request: Request) -> int:
        if request.finish_step < 0 or self.schedule.reserves_answer:
            return request.held
        return request.extra + self._own_units(request, request.key + self.pool.steps + self.rules.lookahead_tokens)

    def _own_units(self, request: Request, tokens: int) -> int:
        """The units of `tokens` tokens of a request, without the blocks that it shares."""
        return self.pool.units(tokens) - request.shared * self._shared_units

    def _prompt_units(self, request: Request, tokens: int) -> int:
        """The same while its prompt is computed."""
        return self.pool.prompt_units(tokens) - request.shared * self._shared_units

    def _found_in_use(self, request: Request, promised: int) -> int:
        """Look up what a waiting request finds in the prefix cache. Returns the units of it that others use.

        `promised` units are taken in this step besides those in use.
        """
        if self.prefixes is None or not (request.names or request.kept):
            return 0  # it finds the tokens with which it came
        return self.prefixes.look_up(request, promised)

    def _hold(self, request: Request, tokens: int) -> None:
        """A running request takes the units for `tokens` tokens, and if it then decodes, for what it may draft."""
        units = self._prompt_units(request, tokens + (self.rules.lookahead_tokens if tokens >= request.target else 0))
        self.pool.take(units - request.held)
        request.held = units
        if self.names_early:
            self._name_blocks(request, tokens)

    def _name_blocks(self, request: Request, tokens: int) -> None:
        """Other requests find the whole blocks of the first `tokens` tokens from now on."""
        if self.prefixes is not None and request.names:
            self.prefixes.add(request, min(tokens, request.prompt_tokens))

    def _shrink(self, request: Request) -> None:
        """A request begins to decode. It gives back what only its prompt needed, or holds it for one more step."""
        extra = request.held - self._own_units(request, request.computed + self.rules.lookahead_tokens)
        if self.schedule.overlaps:
            request.extra = extra
            self._shrinking.append(request)
        else:
            self.pool.give(extra)

    def _release(self, request: Request, named_tokens: int | None = None) -> None:
        """A request runs no longer, and gives its units back.

        The cache keeps whole blocks of its first `named_tokens` tokens, or of all that are computed if None.
        """
        del self.running[request]
        self._give_back(request, named_tokens)

    def _leave(self, request: Request) -> None:
        """A request has ended, and the scheduler knows it. If its cache is sent, it holds its units until then."""
        if self.rules.sends:
            del self.running[request]
            self._sending[request] = None
        else:
            self._release(request)

    def has(self, request: Request) -> bool:
        """Whether a request holds blocks here."""
        return request in self.running or request in self._sending

    def sent(self, request: Request, end: float) -> None:
        heappush(self._sent, (end, request.number, request))

    def free_sent(self, until: float) -> None:
        while self._sent and self._sent[0][0] <= until:
            request = heappop(self._sent)[2]
            del self._sending[request]
            self._give_back(request)

    def next_sent(self) -> float | None:
        return self._sent[0][0] if self._sent else None

    def _give_back(self, request: Request, named_tokens: int | None = None) -> None:
        if self.prefixes is not None:
            tokens = request.computed if named_tokens is None else named_tokens
            if request.session is not None:
                self.prefixes.add(request, tokens)  # the next turn repeats the answer too
            self.prefixes.release(request, tokens)
        self.pool.give(request.held)
        request.held = request.computed = request.key = 0  # what has ended keeps no large numbers
