"""`kvcalc batch`: answer the questions in a file of JSON lines."""

import os
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, Optional

import typer

from kvcalc.cli import options as o
from kvcalc.cli.alike import Cases, split
from kvcalc.cli.question import load_model_of, question_of
from kvcalc.errors import KvcalcError, RunError, UsageError, nearest
from kvcalc.output.streams import discard_stdout
from kvcalc.question.fields import OPTIONS
from kvcalc.records import NamedTuple
from kvcalc.units import Number, parse_count

if TYPE_CHECKING:
    import kvcalc.documents as documents
    from kvcalc.model.spec import ModelSpec
    from kvcalc.model.variants import WhatIf

app = typer.Typer(add_completion=False, context_settings={"help_option_names": ["-h", "--help"]})

Values = dict[str, Any]
"""The values of the parameters of a command, by name."""

# Options that are not fields, because they set the output or the exit code. --strict of plan chooses layouts.
_NO_FIELDS = ("format", "json", "get", "no_color", "help", "check", "report", "emit", "image", "file")
_OF_THE_EXIT_CODE = "strict"

# The maximum number of models kept between lines, and the maximum number of config values in all of them.
_MOST_MODELS, _MOST_VALUES = 512, 200_000

# Fields that an error names, by command.
_EXAMPLES = {
    "estimate": "model, context, batch, kv_dtype, tp",
    "plan": "model, gpu, concurrency, input_tokens, output_tokens",
    "simulate": "model, gpu, concurrency, prompt_tokens",
    "check": "server, gpu, input_tokens, output_tokens, max_ttft",
}


@app.command(cls=o.taking())
def batch(
    file: Annotated[
        str, typer.Argument(metavar="[FILE]", help="File of JSON lines, one question per line; - for stdin.")
    ] = "-",
    get: Annotated[
        Optional[str],
        typer.Option(
            "--get",
            metavar="PATH",
            help="Print one bare value per answer: kv_cache.total_bytes. An error is null.",
        ),
    ] = None,
    jobs: Annotated[
        str,
        typer.Option("--jobs", metavar="N", help="Processes that answer. Several answer in groups of lines."),
    ] = "1",
) -> None:
    """Answer one question per line: JSON lines in, JSON lines out.

    The answers are in the order of the questions.
    """
    write, number = _writer(get), parse_count(jobs, "--jobs")
    if file != "-":
        try:
            with _opened(file) as stream:
                failed, first = _answer_all(stream, write, number)
        except OSError as error:
            if error.filename is None:
                raise  # an error of stdout, such as a full disk
            raise UsageError(f"{file}: {error.strerror or 'cannot be read'}") from None
    elif sys.stdin is None:
        raise UsageError("stdin: closed", "pipe questions in: kvcalc batch < questions.jsonl")
    else:
        if sys.stdin.isatty():
            print("kvcalc: reading questions from stdin; press Ctrl-D to end", file=sys.stderr)
        failed, first = _answer_all(sys.stdin.buffer, write, number)
    if failed:
        raise RunError(f"{failed:,} line{'s' if failed > 1 else ''} with an error; the first is {first}")


def _opened(path: str) -> BinaryIO:
    from kvcalc.model.files import not_a_path

    try:
        return open(path, "rb")
    except ValueError:
        raise not_a_path(path) from None


def _writer(path: Optional[str]) -> Callable[["documents.Batch"], str]:
    """A function that turns an answer into one line: JSON, or the value at `path`."""
    if path is None:
        from kvcalc.output.json_line import encode

        return encode
    from kvcalc.output.paths import check_against_schema, look_up
    from kvcalc.schema import load_schema
    from kvcalc.writing.cells import bare
    from kvcalc.writing.terminal import one_line

    refusals = []
    for kind in _EXAMPLES:
        try:
            check_against_schema(load_schema(), kind, path)
            break
        except UsageError as error:
            refusals.append(error)
    else:
        raise refusals[0]

    def value(document: Any) -> str:
        if "error" in document:
            print(f"line {document['error']['line']}: {document['error']['message']}", file=sys.stderr)
            return "null"
        try:
            return one_line(bare(look_up(document, path)))
        except UsageError:  # the list in this answer is shorter
            return "null"

    return value


Write = Callable[["documents.Batch"], str]
"""Turns an answer into one line."""


def _answer_all(stream: BinaryIO, write: Write, jobs: int) -> tuple[int, str]:
    """Answer every line of `stream` with `jobs` processes, and write each answer at once.

    Returns the number of lines with an error, and the first error.

    If the reader of stdout has closed it (`| head`), the remaining lines are not read: a stream may be endless.
    """
    from kvcalc.cli.json_lines import lines_of
    from kvcalc.parallel import in_groups

    questions = Questions()
    failed, first = 0, ""

    def answer(line: Any) -> tuple[str, str]:
        document: Any = questions.answer(line)
        error = document.get("error")
        return write(document), "" if error is None else f"line {line.number}: {error['message']}"

    for text, error in in_groups(answer, lines_of(stream), jobs):
        failed += bool(error)
        first = first or error
        try:
            # The next answer may take minutes.
            sys.stdout.write(text + "\n")
            sys.stdout.flush()
        except BrokenPipeError:
            discard_stdout()
            break
    return failed, first


class Questions:
    """Answers questions. Keeps the models it has read, and the names of the fields."""

    def __init__(self) -> None:
        self._of_commands: dict[str, tuple[dict[str, Parameter], Values]] = {}
        self.models = Models()

    def answer(self, line: Any) -> "documents.Batch":
        """The document for one line, or its error. Raises no exception, except with KVCALC_DEBUG=1."""
        from kvcalc.cli.json_lines import parse_line

        try:
            return self._document(parse_line(line))
        except KvcalcError as error:
            return _error(line.number, error.message, error.hint, error.exit_code)
        except Exception as error:
            if os.environ.get("KVCALC_DEBUG") == "1":
                raise
            return _error(line.number, f"internal error: {type(error).__name__}: {error}", "please report it", 1)

    def _document(self, fields: Mapping[str, Any]) -> "documents.Batch":
        """The document that answers a question. A question like an earlier one is not parsed again."""
        if "command" in fields:
            return self._answer_command(fields)
        from kvcalc.cli.estimate import answer
        from kvcalc.planning.answers.document import document_of
        from kvcalc.server.case import make_case

        parts = split(fields)
        case = None if parts is None else self.models.cases.find(parts)
        if case is None:
            question = question_of(self.given("estimate", fields), self.models.model_of)
            if question.asks_several:
                return answer(question)[0]
            case = make_case(question)
            if parts is not None:
                self.models.cases.keep(parts, question, case)
        return document_of(case)

    def _answer_command(self, fields: Mapping[str, Any]) -> "documents.Batch":
        """The answer to a line with a `command` key: estimate, plan, simulate or check."""
        others = {field: value for field, value in fields.items() if field != "command"}
        command = fields["command"]
        if command == "estimate":
            return self._document(others)
        if command == "check":
            return self._check(others)
        if command not in ("plan", "simulate"):
            text = f"command {str(command)[:60]!r}: not a command of batch"
            raise UsageError(text, "estimate, plan, simulate or check")
        given = self.given(command, others)
        if given.get("trace") is not None:
            raise UsageError("trace: batch reads no traces", f"use kvcalc {command} --trace")
        if given["model"] is None:
            raise UsageError("model is missing", 'for example "model": "llama-3.1-8b"')
        document: documents.Batch = import_module(f"kvcalc.cli.{command}").answer(given, self.models.model_of)
        return document

    def _check(self, fields: Mapping[str, Any]) -> "documents.Batch":
        """The answer to a line with a `server`, the command that starts it."""
        from kvcalc.cli import check
        from kvcalc.planning.check.servers import choose_server, of_release

        server = fields.get("server")
        if not isinstance(server, str):
            raise UsageError("server is missing", 'for example "server": "vllm serve Qwen/Qwen3-8B"')
        given = self.given("check", {field: value for field, value in fields.items() if field != "server"})
        return check.answer(given, of_release(choose_server(server, None), given["release"]))

    def given(self, command: str, fields: Mapping[str, Any]) -> Values:
        """The parameters of a command, with the values that the equivalent command line would give."""
        if command not in self._of_commands:
            self._of_commands[command] = parameters_of(import_module(f"kvcalc.cli.{command}").app)
        parameters, defaults = self._of_commands[command]
        given, named = dict(defaults), dict[str, str]()
        for field, value in fields.items():
            parameter = parameters.get(field) or parameters.get(field.replace("-", "_"))
            if parameter is None:
                if field == "trace":
                    hint = "kvcalc prefix and kvcalc simulate --trace answer for one trace"
                    raise UsageError("'trace': batch reads no traces", hint)
                hint = f"the fields are the options of kvcalc {command}: {_EXAMPLES[command]}, ..."
                raise UsageError(f"unknown field {field[:60]!r}", nearest(field.replace("-", "_"), parameters) or hint)
            if parameter.name in named:
                raise UsageError(f"{field!r} and {named[parameter.name]!r} are the same field")
            named[parameter.name] = field
            if value is not None:
                given[parameter.name] = _text_of(field, value, parameter.is_flag)
        if given.get("model") == "-":
            raise UsageError("model '-': stdin is already used for the questions", "give the path of a config.json")
        return given


class Parameter(NamedTuple):
    """An option of `kvcalc estimate`."""

    name: str
    is_flag: bool


def parameters_of(app: typer.Typer) -> tuple[dict[str, Parameter], Values]:
    """The fields by name, and the default of every option.

    A field has every long name of its option, with _ for -, and the name that answers and Python have for it, with its
    unit, such as context_tokens.
    """
    parameters: dict[str, Parameter] = {}
    defaults: Values = {}
    options = typer.main.get_command(app).params
    names = {option.name for option in options}
    for option in options:
        if option.name is None:
            continue
        defaults[option.name] = option.default
        if option.name in _NO_FIELDS or (option.name == _OF_THE_EXIT_CODE and "check" in names):
            continue
        parameter = Parameter(option.name, bool(getattr(option, "is_flag", False)))
        parameters[option.name] = parameter
        for name in option.opts:
            if name.startswith("--"):
                parameters[name[2:].replace("-", "_")] = parameter
        if option.name in OPTIONS:
            parameters.setdefault(OPTIONS[option.name].name, parameter)
    return parameters, defaults


def _text_of(field: str, value: Any, is_flag: bool) -> Any:
    """The value of a field as the option's text, or as a bool for a flag.

    A number is in the base unit (bytes, bytes per second, operations per second), so it is a `Number`.
    """
    if is_flag:
        if isinstance(value, bool):
            return value
        raise UsageError(f"{field[:60]}: must be true or false")
    if isinstance(value, str):
        return value
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        # JSON does not distinguish 8e10 from 80000000000.
        return Number(int(value) if isinstance(value, float) and value.is_integer() else value)
    raise UsageError(f"{field[:60]}: must be a string or a number")


def _error(line: int, message: str, hint: Optional[str], exit_code: int) -> "documents.BatchError":
    from kvcalc.cli.app import LONGEST_HINT, LONGEST_MESSAGE, one_line

    return {
        "error": {
            "message": one_line(message, LONGEST_MESSAGE),
            "hint": None if hint is None else one_line(hint, LONGEST_HINT),
            "exit_code": exit_code,
            "line": line,
        }
    }


class Models:
    """The models read so far, and the errors for names that failed, so that each name is read once.

    The number of models is bounded. When the limit is reached, all of them are dropped, and the `cases` with them.
    """

    def __init__(self) -> None:
        self.cases = Cases()
        self._found: dict[tuple[object, ...], tuple[ModelSpec, WhatIf]] = {}
        self._refused: dict[tuple[object, ...], KvcalcError] = {}
        self._values = 0

    def model_of(
        self, reference: Optional[str], what_if: "WhatIf", flags: dict[str, Optional[str]], assume: bool = False
    ) -> "tuple[ModelSpec, WhatIf]":
        """Like `cli.question.load_model_of`."""
        # A what-if (--kv-heads) is part of the model only if the model is described by options.
        key = (reference, None if reference is not None else what_if, *flags.values(), assume)
        model = self._found.get(key)
        if model is None:
            if key in self._refused:
                raise self._refused[key].with_traceback(None)
            try:
                model = load_model_of(reference, what_if, flags, assume)
            except KvcalcError as error:
                # Searching all presets for similar names takes as long as hundreds of answers.
                if len(self._refused) < _MOST_MODELS and len(reference or "") < 4096:
                    self._refused[key] = error.with_traceback(None)
                raise
            self._keep(key, model)
        spec, left = model
        return spec, left if reference is None else what_if

    def _keep(self, key: tuple[object, ...], model: "tuple[ModelSpec, WhatIf]") -> None:
        self._values += _count_values(model[0].quantization) + len(model[0].layers)
        if len(self._found) >= _MOST_MODELS or self._values > _MOST_VALUES:
            from kvcalc.model.memo import forget

            self._found.clear()
            self.cases.forget()
            self._values = 0
            forget()
        self._found[key] = model


def _count_values(value: object) -> int:
    if isinstance(value, Mapping):
        return 1 + sum(map(_count_values, value.values()))
    return 1 + sum(map(_count_values, value)) if isinstance(value, (list, tuple)) else 1
