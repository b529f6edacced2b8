"""Ask the kvcalc on the path: a command line in this process, or a function of the Python API.

Command lines run in this process, because starting a new one takes longer than most answers.
"""

from __future__ import annotations

import gc
import inspect
import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from importlib.resources import files
from io import BytesIO, StringIO, TextIOWrapper
from pathlib import Path
from typing import Any

# Human output has this width; tables and help depend on it.
COLUMNS = 80
# The page that a question with --report writes.
PAGE = "page.html"


@contextmanager
def workplace(folder: Path, texts: Mapping[str, str]) -> Iterator[None]:
    """Work in `folder`, which gets files with these texts, with nothing of the user's own environment.

    Documents name the files that they read, so questions must name them without a folder.
    """
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    before, environment = os.getcwd(), dict(os.environ)
    for name in ("KVCALC_DEBUG", "KVCALC_PRESETS", "NO_COLOR"):
        os.environ.pop(name, None)
    os.environ.update(XDG_CONFIG_HOME=str(folder / "no-presets"), COLUMNS=str(COLUMNS), LINES="50", TERM="dumb")
    thresholds = gc.get_threshold()
    gc.set_threshold(100_000, 50, 50)  # as the command itself sets it
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)
        gc.set_threshold(*thresholds)
        os.environ.clear()
        os.environ.update(environment)


def run(arguments: list[str], stdin: str = "") -> tuple[int, str, str]:
    """The exit code of a command line, and the text of both streams."""
    from kvcalc.cli.app import run as run_command

    out, err = TextIOWrapper(BytesIO(), "utf-8", write_through=True), StringIO()
    streams = sys.stdin, sys.stdout, sys.stderr
    sys.stdin, sys.stdout, sys.stderr = TextIOWrapper(BytesIO(stdin.encode()), "utf-8"), out, err
    try:
        status = run_command(list(arguments))
    finally:
        sys.stdin, sys.stdout, sys.stderr = streams
    out.flush()
    return status, out.buffer.getvalue().decode(), err.getvalue()


def answer(question: Mapping[str, Any]) -> Any:
    """The answer to a question of any kind, as JSON keeps it."""
    return ANSWERS[question["kind"]](question)


def answer_command(question: Mapping[str, Any]) -> dict[str, Any]:
    """Exit code, both streams, and the page of --report. JSON is parsed, so that differences have paths."""
    lines = question.get("lines")
    stdin = "" if lines is None else "".join(json.dumps(line) + "\n" for line in lines)
    status, out, err = run(question["arguments"], stdin)
    found: dict[str, Any] = {"status": status, "stderr": err}
    if lines is not None:
        found["lines"] = [json.loads(line) for line in out.splitlines()]
    elif out.startswith("{"):
        found["document"] = json.loads(out)
    else:
        found["stdout"] = out
    page = Path(PAGE)
    if page.exists():
        found["page"] = page.read_text(encoding="utf-8")
        page.unlink()
    return found


def answer_python(question: Mapping[str, Any]) -> dict[str, Any]:
    """The document or the error of a call, and whether the document is the one that the command line prints."""
    import kvcalc

    try:
        function = getattr(kvcalc, question["function"])
        document = json.loads(json.dumps(function(*built(question["models"]), **built(question["arguments"]))))
    except Exception as error:
        code = getattr(error, "exit_code", None)
        return {"error": type(error).__name__, "message": getattr(error, "message", str(error)), "exit_code": code}
    status, out, _ = run(question["command_line"])
    printed = json.loads(out) if out.startswith("{") else None
    return {"document": document, "is_printed": document == printed, "status": status}


def answer_public(question: Mapping[str, Any]) -> dict[str, Any]:
    """What a name of the public API takes: a function's signature, or the fields and methods of a type."""
    found = getattr(import_module(question["module"]), question["name"])
    described: dict[str, Any] = {}
    if callable(found):
        try:
            described["signature"] = str(inspect.signature(found))
        except ValueError:
            described["signature"] = None
    if isinstance(found, type):
        described["members"] = sorted(name for name in dir(found) if not name.startswith("_"))
        fields = getattr(found, "__annotations__", {})
        described["fields"] = {name: getattr(kind, "__forward_arg__", str(kind)) for name, kind in fields.items()}
    return described


def answer_schema(question: Mapping[str, Any]) -> Any:
    """The JSON Schema of all documents, which is a file of the package."""
    return json.loads((files("kvcalc") / "schema.json").read_text(encoding="utf-8"))


def public_names() -> list[dict[str, Any]]:
    """A question for the schema, every public name of the API and every type of a document."""
    questions: list[dict[str, Any]] = [{"kind": "schema"}]
    for module in ("kvcalc", "kvcalc.documents"):
        loaded = import_module(module)
        names = getattr(loaded, "__all__", None) or [
            name for name, value in vars(loaded).items()
            if isinstance(value, type) and value.__module__ == module
        ]  # fmt: skip
        questions += [{"kind": "public", "module": module, "name": name} for name in sorted(names)]
    return questions


def built(value: Any) -> Any:
    """`value`, with every {"call": name, ...} replaced by what the API's function or type of this name returns."""
    import kvcalc

    if isinstance(value, list):
        return [built(each) for each in value]
    if not isinstance(value, dict):
        return value
    if "call" in value:
        given = value.get("with", {})
        arguments = {name: _tuples(built(each)) for name, each in given.items()}
        return getattr(kvcalc, value["call"])(*built(value.get("on", [])), **arguments)
    return {name: built(each) for name, each in value.items()}


def _tuples(value: Any) -> Any:
    """The API's types hold tuples, which JSON does not have."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


ANSWERS = {"command": answer_command, "python": answer_python, "public": answer_public, "schema": answer_schema}
