"""The requests of a load as a server takes them: cut at its context, and without those that it refuses."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kvcalc.errors import DoesNotFitError, UsageError
from kvcalc.notes import Note
from kvcalc.simulation.loads.load import Requests
from kvcalc.simulation.loads.requests import Request

# If so many requests are refused before one is taken, all are.
_ALL_REFUSED = 1000

Name = Callable[[Request], None]
"""Gives the blocks of a request their names, or says what it finds of its prompt."""


class Supply(Iterator[Request]):
    """The requests that a server takes, one after the other, and how many it has `cut` or refused.

    An answer ends at `most_tokens` tokens of the request, as a server's does (`finish_reason: length`). A prompt that
    leaves no room for an answer is refused, and so is a request that `fits` says never runs. Where kvcalc lets lengths
    vary around a mean that has room, such a prompt is cut to leave room for its answer. `name` is called with each
    request that is taken.
    """

    def __init__(
        self, requests: Requests, most_tokens: int, fits: Callable[[Request], bool], name: Name | None = None
    ) -> None:
        self.number, self._requests, self._most, self._fits = requests.number, requests.requests, most_tokens, fits
        self.name = name
        self._cuts_prompts = requests.varies_around is not None and requests.varies_around <= most_tokens
        self.taken: list[Request] = []
        self.cut = self.too_long = self.too_large = 0
        self.longest_tokens, self._shortest = 0, 2**62

    def __next__(self) -> Request:
        """The next request, without those of sessions that follow others. StopIteration if there are no more."""
        return self._next_of(self._requests)

    @property
    def sent(self) -> int:
        """The requests that were sent: taken, and refused."""
        return len(self.taken) + self.refused

    @property
    def refused(self) -> int:
        """The requests that can never run."""
        return self.too_long + self.too_large

    def _next_of(self, requests: Iterator[Request]) -> Request:
        while self.number is None or self.sent < self.number:
            request = next(requests)
            if not self._takes(request):
                if not self.taken and self.refused >= _ALL_REFUSED:
                    break
                continue
            if self.name is not None:
                self.name(request)
            if request.session is not None:
                request.session = _Session(self, request.session)
            self.taken.append(request)
            return request
        raise StopIteration

    def _takes(self, request: Request) -> bool:
        self.longest_tokens = max(self.longest_tokens, request.total_tokens)
        self._shortest = min(self._shortest, request.prompt_tokens + 1)
        is_cut = request.total_tokens > self._most
        if request.prompt_tokens >= self._most:
            if not self._cuts_prompts:
                self.too_long += 1
                return False
            request.cut_prompt(max(1, self._most - request.answer_tokens))
        if is_cut:
            request.answer_tokens = self._most - request.prompt_tokens
        if not self._fits(request):
            self.too_large += 1
            return False
        self.cut += is_cut
        return True

    def check(self) -> None:
        """Raise UsageError (exit 2) if all requests were longer than the context, DoesNotFitError (4) if none fits."""
        if self.taken:
            return
        if not self.too_large:
            raise UsageError(
                f"no request is as short as the context of {self._most:,} tokens: the shortest has {self._shortest:,}",
                f"--context {self.longest_tokens} takes all of them",
            )
        text = f"no request fits: the longest has {self.longest_tokens:,} tokens"
        raise DoesNotFitError(text, "kvcalc fit says how long a request may be")

    def notes(self) -> Iterator[Note]:
        """Notes about the requests that were cut or refused."""
        for number, what in (
            (self.cut, f"end at the context of {self._most:,} tokens (finish_reason: length)"),
            (self.too_long, f"refused: longer than the context of {self._most:,} tokens"),
            (self.too_large, "refused: too long for the cache"),
        ):
            if number:
                text = f"{number:,} of {self.sent:,} requests {what}; the longest has {self.longest_tokens:,} tokens"
                yield Note("load", "refused" if what.startswith("refused") else "cut", text)


class _Session(Iterator[Request]):
    """The requests that a client sends after the first one of a session."""

    def __init__(self, supply: Supply, requests: Iterator[Request]) -> None:
        self._supply, self._requests = supply, requests

    def __next__(self) -> Request:
        request = self._supply._next_of(self._requests)
        request.session = self
        return request
