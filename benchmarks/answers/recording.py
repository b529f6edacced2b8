"""Files of questions and their answers: written, read, and compared."""

from __future__ import annotations

import gzip
import json
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import kvcalc
from benchmarks.answers.asking import answer, public_names, workplace
from benchmarks.answers.declared import read_declared
from benchmarks.answers.generator import FILES, questions, screens

# Floats may change in the last digits if a sum is computed in another order.
RELATIVE_TOLERANCE = 1e-9
SHIPPED_FILES = Path(__file__).parent.parent.parent / "tests" / "logs"


def record(target: Path, number: int, seed: int, stored: Path | None = None) -> None:
    """Ask random questions and save them with their answers. With `stored`, ask the questions of that recording.

    The files that questions name are saved too, so a recording can be asked again without this checkout.
    """
    files = {name: (SHIPPED_FILES / name).read_text() for name in FILES} if stored is None else files_of(stored)
    target, stored = target.resolve(), stored and stored.resolve()
    started, shares = time.process_time(), Shares()
    with TemporaryDirectory() as folder, workplace(Path(folder), files):
        asked = draw(number, seed) if stored is None else [row["question"] for row in rows_of(stored)]
        with gzip.open(target, "wt", compresslevel=3, encoding="utf-8") as stream:
            for name, text in files.items():
                stream.write(json.dumps({"file": name, "text": text}) + "\n")
            for question in asked:
                found = answer(question)
                shares.count(question, found)
                stream.write(json.dumps({"question": question, "answer": found}) + "\n")
    print(shares.text)
    print(f"{kvcalc.__file__}: {len(asked):,} questions in {time.process_time() - started:.0f} s of CPU")


def draw(number: int, seed: int) -> list[dict[str, Any]]:
    """Random questions, every help screen and every public name."""
    declared = read_declared()
    return [*questions(declared, number, seed), *screens(declared), *public_names()]


def rows_of(source: Path) -> Iterator[dict[str, Any]]:
    """The questions of a recording with their answers."""
    with gzip.open(source, "rt", encoding="utf-8") as stream:
        yield from (row for row in map(json.loads, stream) if "question" in row)


def files_of(source: Path) -> dict[str, str]:
    """The files that the questions of a recording name."""
    with gzip.open(source, "rt", encoding="utf-8") as stream:
        return {row["file"]: row["text"] for row in map(json.loads, stream) if "file" in row}


class Shares:
    """How many questions of each command and engine were answered, and not refused."""

    def __init__(self) -> None:
        self._found: dict[str, Counter[str]] = {"command": Counter(), "engine": Counter()}
        self._notes: Counter[str] = Counter()

    def count(self, question: Mapping[str, Any], found: Mapping[str, Any]) -> None:
        """Count one question, or every line of a batch."""
        if question["kind"] in ("public", "schema") or {"-h", "--help"} & {*question.get("arguments", ())}:
            return
        lines = found.get("lines")
        answered = [is_answered(found)] if lines is None else ["error" not in line for line in lines]
        for kind, name in zip(self._found, group_of(question)):
            for each in answered:
                self._found[kind][f"{name}: answered" if each else f"{name}: refused"] += 1
        self._notes["internal errors"] += "internal error" in json.dumps(found)
        if question["kind"] == "python" and "document" in found:
            self._notes["Python's document is that of the command line"] += found["is_printed"]
            self._notes["Python's document is another one"] += not found["is_printed"]

    @property
    def text(self) -> str:
        """A line for each command, engine and note."""
        lines = []
        for kind, counts in self._found.items():
            for name in sorted({key.partition(": ")[0] for key in counts}):
                done, refused = counts[f"{name}: answered"], counts[f"{name}: refused"]
                lines.append(f"{kind} {name:22} {done:6,} of {done + refused:6,} answered")
        return "\n".join([*lines, *(f"{count:6,} {note}" for note, count in self._notes.items())])


def is_answered(found: Mapping[str, Any]) -> bool:
    """Whether a command or a call gave an answer. 4 is the answer that something does not fit."""
    return found.get("status") in (0, 4) and "error" not in found


def group_of(question: Mapping[str, Any]) -> tuple[str, str]:
    """The command and the engine of a question, as differences are grouped."""
    if question.get("kind") == "command":
        words = question["arguments"]
        lines = question.get("lines")
        fields = lines[0] if lines else {}
        named = words[words.index("--engine") + 1] if "--engine" in words[:-1] else fields.get("engine", "-")
        return (words[0] if words else "-"), named
    if question.get("kind") == "python":
        return f"python {question['function']}", question["arguments"].get("engine", "-")
    if question.get("kind") == "public":
        return question["module"], "-"
    if question.get("kind") == "schema":
        return "schema", "-"
    return "batch", question.get("engine", "-")  # a line of the fixed questions


def differences(old: Any, new: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """The path in the answer, the old and the new value of everything that differs."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in {**old, **new}:
            if key not in old or key not in new:
                yield f"{path}.{key}", old.get(key, "(absent)"), new.get(key, "(absent)")
            else:
                yield from differences(old[key], new[key], f"{path}.{key}")
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for one, other in zip(old, new):
            yield from differences(one, other, f"{path}[]")
    elif isinstance(old, float) and isinstance(new, float):
        if abs(old - new) > RELATIVE_TOLERANCE * max(abs(old), abs(new)):
            yield path, old, new
    elif isinstance(old, str) and isinstance(new, str) and "\n" in old + new:
        if old != new:
            pairs = zip([*old.splitlines(), "(end)"], [*new.splitlines(), "(end)"])
            yield path, *next(((one, other) for one, other in pairs if one != other), (old[-50:], new[-50:]))
    elif old != new:
        yield path, old, new


def load(source: Path) -> dict[str, list[Any]]:
    """Question as text -> its answers. A question may be asked several times."""
    found: dict[str, list[Any]] = defaultdict(list)
    for row in rows_of(source):
        found[json.dumps(row["question"], sort_keys=True)].append(row["answer"])
    return found


def compare(before: Path, after: Path, examples: int) -> int:
    """Print the differences by command, engine and path. Returns 1 if there is one, else 0."""
    old, new = load(before), load(after)
    found: dict[tuple[str, str, str], list[tuple[str, Any, Any]]] = defaultdict(list)
    changed = set()
    for key, answers in old.items():
        question = json.loads(key)
        if len(new.get(key, ())) != len(answers):
            found[(*group_of(question), "question")].append((key, len(answers), len(new.get(key, ()))))
            changed.add(key)
        for path, one, other in differences(answers, new.get(key, answers)):
            found[(*group_of(question), path.removeprefix("[]").lstrip("."))].append((key, one, other))
            changed.add(key)
    for (command, engine, path), rows in sorted(found.items()):
        print(f"{command:12} {engine:13} {path}: {len({key for key, _, _ in rows}):,} answers")
        for key, one, other in rows[:examples]:
            print(f"    {shown(json.loads(key))}\n        {str(one)[:200]}\n     -> {str(other)[:200]}")
    extra = len(new.keys() - old.keys())
    print(f"{len(changed):,} of {len(old):,} answers differ" + (f"; {extra:,} questions are new" if extra else ""))
    return 1 if changed or extra else 0


def shown(question: Mapping[str, Any]) -> str:
    """A question as it can be asked again."""
    import shlex

    if question.get("kind") != "command":
        return json.dumps(question)
    line = shlex.join(["kvcalc", *question["arguments"]])
    lines: Iterable[Any] = question.get("lines", ())
    return "\n      ".join([line, *map(json.dumps, lines)])
