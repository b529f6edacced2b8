"""The server on the screen: the first line, which says whether it starts, one user's speed, and its command."""

from __future__ import annotations

from typing import Any

from kvcalc.output.human.console import Console
from kvcalc.output.human.figures import UNKNOWN_RANGE, count, duration, rate, requests_per_second
from kvcalc.output.human.tables import Text
from kvcalc.units import format_size
from kvcalc.writing.shell import join, split

_VERDICTS = {
    "fits": ("fits", "bold green"), "tight": ("fits, but is tight", "bold yellow"),
    "does_not_fit": ("does not fit", "bold red"),
}  # fmt: skip


def headline(document: Any, within: str = "") -> Text:
    """The first line of an answer about a server: whether it starts, and what works if it does not start as typed.

    With a load, the line has the rate that the server sustains `within` its targets. Formulas and libraries do not
    start, so their line says whether the workload fits.
    """
    fit, server = document["fit"], document["server"]
    size = format_size(max(fit["kv_cache_memory_bytes"], 0), capacity=True)
    # An engine keeps none for an encoder.
    memory = f"{size} per device for the KV cache" if fit["kv_cache_bytes"] else f"{size} per device free, no KV cache"
    if server is None:
        return Text.assemble(_VERDICTS[fit["verdict"]], f": {memory}")
    name, changes = f"{short_name(document['engine'])} ", _changes(server)
    if server["starts"] is None:
        also = f"; starts with {changes}" if changes else ""
        return Text.assemble(name, ("may not start", "bold yellow"), f": {server['reason']}{also}")
    if not server["starts"]:
        if not changes:
            return Text.assemble(name, ("does not start", "bold red"), f": {server['reason']}")
        verdict = ("does not start as typed", "bold red")
        return Text.assemble(name, verdict, f" ({server['reason']}); starts with {changes}")
    rest = _load(document, within) or [f": {memory}" if fit["fits"] else f"; {_room(document)}"]
    return Text.assemble(name, ("starts", "bold green"), *rest)


def short_name(engine: Any) -> str:
    """The engine's name and release. A release with words is that of another package, which the rules are from."""
    version = engine["version"] or ""
    return engine["name"] if " " in version else f"{engine['name']} {version}".strip()


def _room(document: Any) -> str:
    """What a server that starts has room for, if not for the workload."""
    workload, fit = document["workload"], document["fit"]
    tokens, batch = count(workload["context_tokens"]), workload["batch_size"]
    if batch > 1:
        return f"{count(fit['max_batch_size'])} of {count(batch)} requests of {tokens} tokens fit at once"
    return f"a request has room for {count(fit['max_context_tokens'])} of {tokens} tokens"


def _load(document: Any, within: str) -> list[Any] | None:
    """The end of the first line for a server under a load. None without one."""
    requests, capacity = document.get("requests"), document.get("capacity")
    if requests is not None and requests["refused"]:
        lengths = f"{count(requests['input_tokens'])} + {count(requests['output_tokens'])} tokens"
        return [", and ", ("refuses", "bold red"), f" requests of {lengths}: {requests['refused']}"]
    if capacity is None:
        return None
    within = f" within {within}" if within else ""
    if not capacity["requests_per_second"]:
        return [", and ", ("sustains no rate", "bold red"), f"{within}: {capacity['limited_by']}"]
    return [", and sustains ", (requests_per_second(capacity["requests_per_second"]), "bold"), within]


def _changes(server: Any) -> str:
    return " or ".join(f"{change['option']} {change['value']}" for change in server["try"])


def print_server(document: Any, console: Console, *, with_command: bool = True) -> None:
    """Print one user's speed, and the command that starts the server, with the first change if it needs one."""
    server = document["server"]
    if server is None:
        return
    speed = server["one_user"]
    if speed is not None:
        low, high = speed["tpot_low_seconds"], speed["tpot_high_seconds"]
        ranged = f"{rate(1 / high)} to {rate(1 / low)}" if low and high else UNKNOWN_RANGE
        text = f"  {rate(speed['tokens_per_second'])} tokens/s ({ranged}) at {count(speed['context_tokens'])} tokens; "
        text += f"prompt {duration(speed['prefill_seconds'])}"
        console.print(Text.assemble(("one user", "bold"), text))
    if with_command and server["command"] is not None:
        first, *more = folded(_with_change(server), console.width - 10)
        console.print(Text.assemble(("start", "bold"), "     ", first), soft_wrap=True)
        for line in more:
            console.print(f"          {line}", soft_wrap=True)


def _with_change(server: Any) -> str:
    """The command, with the first change that makes it start."""
    command, first = str(server["command"]), next(iter(server["try"]), None)
    if first is None:
        return command
    words = split(command)
    if first["option"] in words:
        words[words.index(first["option"]) + 1] = first["value"]
    else:
        words += [first["option"], first["value"]]
    return join(words)


def folded(command: str, width: int) -> list[str]:
    """A command in lines of at most `width`, unless a word is longer. An option and its value stay on one line."""
    words = [join([word]) for word in split(command)]
    groups: list[str] = []
    for word in words:
        if groups and not word.startswith("--") and groups[-1].startswith("--") and " " not in groups[-1]:
            groups[-1] += f" {word}"
        else:
            groups.append(word)
    lines = [groups[0]]
    for group in groups[1:]:
        if len(lines[-1]) + len(group) + 3 > width:
            lines[-1] += " \\"
            lines.append(f"  {group}")
        else:
            lines[-1] += f" {group}"
    return lines
