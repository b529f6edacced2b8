"""What to change in the command of a server: the limit that binds, each option alone, and the best of them together.

Every change is made in the words of the command, which `check` then reads and judges, so a gain is the difference of
two of its answers. The engine's `advice.yaml` has the `changes` that are tried: an `option` with its `values` (true
sets a flag, null leaves the option out), options that are set `with` it, or `layouts`: the option that takes the
devices which this one gives up. `{fitting}` stands for the requests that fit, `{context}` for the tokens of the longest
one, and `{devices}` for the devices of the server. `risk` says what the change may cost.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvcalc.engines import engine_class
from kvcalc.engines.arguments import FLAGS, LISTS
from kvcalc.engines.declarations import has_table, table
from kvcalc.errors import UsageError
from kvcalc.planning.check.answer import runs
from kvcalc.planning.check.servers import Server
from kvcalc.records import NamedTuple
from kvcalc.writing.shell import join

if TYPE_CHECKING:
    import kvcalc.documents as documents

Options = Mapping[str, str | bool | None]
"""The engine's options without dashes -> their values. True sets a flag, and None leaves the option out."""

Judge = Callable[[Sequence[Server], float], "list[documents.Check | None]"]
"""The answers of `check` for several servers, in order. None for a server that the engine refuses.

One that does not sustain the given requests per second has no `capacity`.
"""

# A smaller gain is within the precision of a rate, or not worth a change.
_LEAST_GAIN = 0.03
# The most options that change together.
_MOST_CHANGES = 4
# A context is rounded up to a multiple of this, and a number of requests down.
_TOKENS, _REQUESTS = 256, 8


class Change(NamedTuple):
    """A change of one or more options of a command, and its risk."""

    options: Options
    risk: str

    @property
    def text(self) -> str:
        """The options as they are typed: `--max-num-seqs 64`, or `without --enforce-eager`."""
        left_out = " ".join(f"--{name}" for name, value in self.options.items() if value is None)
        typed = " ".join(_typed(self.options))
        return typed or f"without {left_out}"


def advise(server: Server, base: documents.Check, judge: Judge) -> documents.Advice:
    """The `advice` part for a server and its answer `base`, which has a load.

    Raises UsageError (exit 2) if no changes are declared for the engine.
    """
    engine = server.reader.engine
    if not has_table(engine, "advice"):
        raise UsageError(f"--advise: no changes are known for {engine_class(engine).title}", "leave it out")
    changes = list(_changes(server, base))
    alone = rows = _judged(server, changes, base, judge)
    best, words, chosen = base, server.words, list[Change]()
    while len(chosen) < _MOST_CHANGES and any(_gain(answer, best) for _, answer in rows):
        change, best = max(rows, key=lambda row: _rate(row[1]))
        words = changed(server, words, change.options)
        chosen.append(change)
        changes = [other for other in changes if not other.options.keys() & change.options.keys()]
        rows = _judged(server._replace(words=words), changes, best, judge)
    improved: documents.ImprovedServer | None = None
    if chosen:
        improved = {
            "command": join([*server.reader.programs[0], *words]),
            "changes": [change.text for change in chosen],
            "risks": [change.risk for change in chosen],
            "gain": _gain(best, base),
            "capacity": best["capacity"],
            "free_bytes": best["fit"]["free_bytes"],
        }
    return {
        "binds": _binds(base),
        "changes": [_describe(change, answer, base) for change, answer in alone],
        "improved": improved,
    }


def _changes(server: Server, base: documents.Check) -> Iterator[Change]:
    """The declared changes, with the numbers of this server in place of their names."""
    requests, engine = base["requests"], base["engine"]
    fitting = max(((requests and requests["memory_requests"]) or 0) // _REQUESTS * _REQUESTS, 1)
    needed = (
        base["fit"]["max_context_tokens"] or 1
        if requests is None
        else requests["input_tokens"] + requests["output_tokens"]
    )
    context = -(-needed // _TOKENS) * _TOKENS
    devices = engine["tensor_parallel_size"] * engine["data_parallel_size"] * engine["pipeline_parallel_size"]
    numbers = {"fitting": fitting, "context": context, "devices": devices}
    for row in table(server.reader.engine, "advice")["changes"]:
        if "layouts" in row:
            for size in range(1, devices + 1):
                if devices % size == 0:
                    layout = {row["option"]: str(size), row["layouts"]: str(devices // size)}
                    yield Change({**layout, **dict.fromkeys(row.get("drops", ()))}, row["risk"])
            continue
        for value in row["values"]:
            filled = value.format(**numbers) if isinstance(value, str) else value
            yield Change({row["option"]: filled, **row.get("with", {})}, row["risk"])


def _judged(
    server: Server, changes: Sequence[Change], base: documents.Check, judge: Judge
) -> list[tuple[Change, documents.Check]]:
    """The changes that alter the command, and that the engine accepts, with their answers."""
    seen, tried = [server.words], list[tuple[Change, Server]]()
    for change in changes:
        words = changed(server, server.words, change.options)
        if words not in seen:
            seen.append(words)
            tried.append((change, server._replace(words=words)))
    answers = judge([altered for _, altered in tried], max(_rate(base), 0.0) * (1 + _LEAST_GAIN))
    return [(change, answer) for (change, _), answer in zip(tried, answers, strict=True) if answer is not None]


def changed(server: Server, words: Sequence[str], options: Options) -> list[str]:
    """The words with these options changed: their other occurrences go, and new ones stand at the end."""
    arguments = server.reader.arguments
    read = arguments.read(words, arguments.place(server.reader.engine))
    gone = {
        given.word: given.argument for given in read if given.argument is not None and given.argument.name in options
    }
    rest, kept = deque(words), list[str]()
    while rest:
        word = rest.popleft()
        argument = gone.get(word) or gone.get(word.partition("=")[0])
        if argument is None:
            kept.append(word)
        elif argument.kind not in FLAGS and "=" not in word and rest:
            rest.popleft()
            while argument.kind in LISTS and rest and not rest[0].startswith("-"):
                rest.popleft()
    return [*kept, *_typed(options)]


def _typed(options: Options) -> list[str]:
    typed = list[str]()
    for name, value in options.items():
        typed += [] if value is None else [f"--{name}"] if value is True else [f"--{name}", str(value)]
    return typed


def _rate(answer: documents.Check) -> float:
    """The requests per second that a server sustains. Below 0 if it does not start or serves no such requests."""
    refuses = answer["requests"] is not None and answer["requests"]["refused"]
    if not runs(answer) or refuses:
        return -1.0
    return 0.0 if answer["capacity"] is None else answer["capacity"]["requests_per_second"]


def _gain(answer: documents.Check, base: documents.Check) -> float:
    """The share by which a server sustains more requests. 0 if that is not worth a change.

    1 if it starts, or sustains any, where `base` does not.
    """
    before, after = _rate(base), _rate(answer)
    if after <= max(before, 0.0):
        return float(after > before) if before < 0 else 0.0
    gain = after / before - 1 if before > 0 else 1.0
    return gain if gain >= _LEAST_GAIN else 0.0


def _describe(change: Change, answer: documents.Check, base: documents.Check) -> documents.AdvisedChange:
    return {
        "change": change.text,
        "starts": runs(answer),
        "capacity": answer["capacity"],
        "gain": _gain(answer, base),
        "free_bytes": answer["fit"]["free_bytes"],
        "max_requests": None if answer["requests"] is None else answer["requests"]["max_requests"],
        "risk": change.risk,
    }


def _binds(base: documents.Check) -> str:
    """The limit that keeps a server from more requests per second, in words."""
    requests, capacity = base["requests"], base["capacity"]
    if not runs(base) or requests is None:
        return base["reason"] or "it does not start"
    if requests["refused"] or capacity is None:
        return requests["refused"] or "its speed is not known"
    option = engine_class(base["command"]["engine"]).running_option
    running: Any = base["engine"].get((option or "").replace("-", "_"))
    most, fitting = capacity["max_running_requests"], requests["memory_requests"]
    told = "any number" if fitting is None else f"{fitting:,}"
    if running is not None and most >= running and (fitting is None or fitting > running):
        return f"--{option} {running} binds: {running} of {told} requests that fit"
    if fitting is not None and most >= fitting:
        return f"the memory binds: {told} requests of this length fit"
    return f"the speed binds: at most {most} of {told} requests that fit run at once"
