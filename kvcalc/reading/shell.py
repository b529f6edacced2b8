"""Run a script as bash would, without starting anything: the programs that it would start are the result.

Where a condition comes from outside of the text, every arm of the branch is a way of its own (`Way`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import TYPE_CHECKING

from kvcalc.errors import UsageError
from kvcalc.reading.arithmetic import Unknown, holds, integer
from kvcalc.reading.calls import FAILS, OPEN, RUNS, SUCCEEDS, Calls
from kvcalc.reading.command import UNKNOWN, Budget, Command, Way, ways_through
from kvcalc.reading.pasted import as_shell, without_apostrophes
from kvcalc.reading.state import State
from kvcalc.reading.syntax import named, parse
from kvcalc.reading.words import children_of, lost_words, text_of

if TYPE_CHECKING:
    from tree_sitter import Node

_MOST_TURNS = 1000
_OUTPUT, _ADDS = (">", ">>", "&>", "&>>", ">|"), (">>", "&>>")
_CLAUSES = ("elif_clause", "else_clause")


class Shell(Calls):
    """The statements of a script."""

    def run_text(self, text: str) -> int:
        """Run the statements of a text. UsageError (exit 2) if the command of a wanted program is no shell."""
        script = parse(text, self.way.budget)
        for line in script.skipped:
            words = line.split()
            if self.way.budget.find(words) is not None:
                error = UsageError(f"{line!a}: an unclosed quote, or no command of a shell", "quote its words again")
                if any(word.startswith("-") for word in words):
                    raise error
                self.way.budget.broken = error
        return self.run(script.root)

    def output_of(self, node: Node) -> str | None:
        """What the commands in a substitution print, in a shell of their own."""
        return self.captured(lambda: self._in_subshell(node.named_children))

    def run(self, node: Node) -> int:
        """Run a statement, and give its status."""
        self.way.enter()
        try:
            statement = getattr(self, f"_at_{node.type}", None)
            status = statement(node) if statement is not None else self._all(named(node))
        finally:
            self.way.depth -= 1
        return int(status)

    def _all(self, nodes: Iterable[Node]) -> int:
        status = SUCCEEDS
        for node in nodes:
            if self.state.stop:
                break
            status = self.run(node)
        return status

    def _in_subshell(self, nodes: Iterable[Node]) -> int:
        outer, self.state = self.state, self.state.copy()
        status = self._all(node for node in nodes if node.type != "comment")
        outer.after_subshell(self.state)
        self.state = outer
        return status

    def _at_subshell(self, node: Node) -> int:
        return self._in_subshell(node.named_children)

    def _at_comment(self, _: Node) -> int:
        return SUCCEEDS

    def _at_list(self, node: Node) -> int:
        parts: list[tuple[str, Node]] = []
        while node.type == "list" and len(node.children) == 3:
            parts.append((text_of(node.children[1]), node.children[2]))
            node = node.children[0]
        number = len(self.state.commands)
        status = self.run(node)
        for operator, right in reversed(parts):
            status = self._after(operator, status, right, has_started=len(self.state.commands) > number)
        return status

    def _after(self, operator: str, status: int, right: Node, *, has_started: bool) -> int:
        """The command behind && or ||. A program is taken to run, and one that was started not to fail."""
        if self.state.stop or (operator == "||" and has_started):
            return status
        if operator == "&&" and status in (SUCCEEDS, RUNS):
            return self.run(right)
        if status == (SUCCEEDS if operator == "||" else FAILS):
            return status
        if operator == "||" and status == FAILS:
            return self.run(right)
        return self._fork([lambda: self.run(right), lambda: status])

    def _fork(self, arms: Sequence[Callable[[], int]]) -> int:
        """Run one of the arms: the first, unless what follows depends on it."""
        before, printed = self.state, self.output
        ends = list[tuple[State, list[str | None] | None, int]]()
        for arm in arms:
            self.state, self.output = before.copy(), None if printed is None else []
            status = arm()
            if not any(self.state.same(state) and self.output == output for state, output, _ in ends):
                ends.append((self.state, self.output, status))
        self.state, output, status = ends[self.way.choose(len(ends)) if len(ends) > 1 else 0]
        self.output = None if printed is None else [*printed, *(output or ())]
        return status

    def _at_if_statement(self, node: Node) -> int:
        clauses = [node, *children_of(node, *_CLAUSES)]

        def run_from(place: int) -> int:
            for clause in clauses[place:]:
                place += 1
                parts = [part for part in clause.children if part.type not in _CLAUSES]
                then = next((number for number, part in enumerate(parts) if part.type == "then"), 0)
                body = [part for part in parts[then + 1 :] if part.is_named]
                if clause.type == "else_clause":
                    return self._all(body)
                status = self._all(part for part in parts[1:then] if part.is_named)
                if status == SUCCEEDS:
                    return self._all(body)
                if status != FAILS:
                    return self._fork([partial(self._all, body), partial(run_from, place)])
            return SUCCEEDS

        return run_from(0)

    def _at_case_statement(self, node: Node) -> int:
        value, items = self.text(node.child_by_field_name("value")), list(children_of(node, "case_item"))
        arms, is_open = list[Callable[[], int]](), UNKNOWN in value
        for item in items:
            patterns = item.children_by_field_name("value")
            body = [child for child in named(item) if child not in patterns]
            arms.append(lambda body=body: self._all(body))  # type: ignore[misc]
            texts = [self.text(pattern) for pattern in patterns]
            if not is_open and any(fnmatchcase(value, text) for text in texts):
                return arms[-1]()
            if "*" in texts:
                break
        else:
            arms.append(lambda: SUCCEEDS)
        return self._fork(arms) if is_open else SUCCEEDS

    def _at_for_statement(self, node: Node) -> int:
        name = text_of(node.child_by_field_name("variable") or node)
        nodes, body = node.children_by_field_name("value"), node.child_by_field_name("body")
        words = self.words(nodes) if nodes else self.state.positional
        if node.children[0].type == "select" or words is None or any(UNKNOWN in word for word in words):
            self.state.forget(name)
            words = None
        for word in [None] if words is None else words:
            if word is not None:
                self.state.assign(name, word)
            if body is None or self._turn(body):
                break
        return SUCCEEDS

    def _turn(self, body: Node) -> bool:
        """Run the body of a loop. Whether the loop ends."""
        self.run(body)
        stop = self.state.stop
        if stop in ("break", "continue"):
            self.state.stop = ""
        return stop not in ("", "continue")

    def _at_c_style_for_statement(self, node: Node) -> int:
        self._forget_assigned(node)
        body = node.child_by_field_name("body")
        if body is not None:
            self._turn(body)
        return SUCCEEDS

    def _at_while_statement(self, node: Node) -> int:
        conditions, body = node.children_by_field_name("condition"), node.child_by_field_name("body")
        wanted = FAILS if node.children[0].type == "until" else SUCCEEDS
        is_endless = text_of(conditions[0]) in ("true", ":", "false", "1") if conditions else True
        for _ in range(_MOST_TURNS):
            status = self._all(part for part in conditions if part.is_named)
            if body is None or status == SUCCEEDS + FAILS - wanted:
                break
            if status != wanted:  # it is not known how often
                self._fork([lambda: int(self._turn(body)), lambda: SUCCEEDS])
                break
            if self._turn(body) or is_endless:
                break
        return SUCCEEDS

    def _at_function_definition(self, node: Node) -> int:
        name, body = node.child_by_field_name("name"), node.child_by_field_name("body")
        if name is not None and body is not None:
            self.state.functions[text_of(name)] = body
        return SUCCEEDS

    def _at_compound_statement(self, node: Node) -> int:
        if node.children[0].type != "((":
            return self._all(named(node))
        try:
            return int(integer(self, next(named(node), None)) != 0)
        except Unknown:
            self._forget_assigned(node)
            return OPEN

    def _forget_assigned(self, node: Node) -> None:
        for child in named(node):
            if child.type in ("binary_expression", "postfix_expression", "unary_expression", "variable_assignment"):
                self.state.forget(text_of(child.named_children[0]))

    def _at_negated_command(self, node: Node) -> int:
        status = self._all(named(node))
        return {FAILS: SUCCEEDS, SUCCEEDS: FAILS}.get(status, OPEN)

    def _at_test_command(self, node: Node) -> int:
        try:
            return int(holds(self, node))
        except Unknown:
            return OPEN

    def _at_pipeline(self, node: Node) -> int:
        status, before = SUCCEEDS, self.stdin
        stages = list(named(node))
        for place, stage in enumerate(stages):
            if place == len(stages) - 1:
                status = self._in_subshell([stage])
            else:
                self.stdin = self.captured(lambda stage=stage: self._in_subshell([stage]))  # type: ignore[misc]
        self.stdin = before
        return status

    def _at_redirected_statement(self, node: Node) -> int:
        body = node.child_by_field_name("body")
        lost = list(lost_words(node))
        return self._redirected(
            node.children_by_field_name("redirect"), lambda more: SUCCEEDS if body is None else
            self._at_command(body, [*lost, *more]) if body.type == "command" else self.run(body)
        )  # fmt: skip

    def _redirected(self, redirects: Sequence[Node], action: Callable[[Sequence[str]], int]) -> int:
        """Run an action with other input and output. What follows a here-document on its line runs after it."""
        before, path, adds = self.stdin, "", False
        after: list[tuple[str, Node]] = []
        more: list[str] = []
        pipes: list[Node] = []
        for redirect in (
            *redirects,
            *(part for outer in redirects for part in outer.children_by_field_name("redirect")),
        ):
            target, kind = redirect.child_by_field_name("destination"), redirect.type
            if kind == "herestring_redirect":
                self.stdin = self.text(redirect.named_children[-1]) + "\n"
            elif kind == "heredoc_redirect":
                self.stdin = self._here_document(redirect)
                more += self.words(redirect.children_by_field_name("argument"))
                operator, right = redirect.child_by_field_name("operator"), redirect.child_by_field_name("right")
                after += [(text_of(operator), right)] if operator is not None and right is not None else []
                pipes += [child for pipe in children_of(redirect, "pipeline") for child in named(pipe)]
            elif target is not None:
                signs = [text_of(child) for child in redirect.children if not child.is_named]
                stream = next((text_of(child) for child in children_of(redirect, "file_descriptor")), "1")
                if "<" in signs:
                    self.stdin = self.state.files.get(self.text(target))
                elif stream == "1" and signs and signs[0] in _OUTPUT:
                    path, adds = self.text(target), signs[0] in _ADDS
        number, status = len(self.state.commands), SUCCEEDS

        def act() -> None:
            nonlocal status
            status = action(more)

        if path or pipes:
            text = self.captured(act)
            if path:
                self.write(path, text, adds)
            self.stdin = text
            status = self._all(pipes) if pipes else status
        else:
            act()
        self.stdin = before
        for sign, command in after:
            status = self._after(sign, status, command, has_started=len(self.state.commands) > number)
        return status

    def _here_document(self, redirect: Node) -> str:
        start = next((text_of(child) for child in children_of(redirect, "heredoc_start")), "")
        body = next(children_of(redirect, "heredoc_body"), None)
        text = "" if body is None else text_of(body) if set(start) & set("'\"\\") else self.document(body)
        if redirect.children[0].type == "<<-":
            text = "\n".join(line.lstrip("\t") for line in text.split("\n"))
        return text

    def _at_command(self, node: Node, more: Sequence[str] = ()) -> int:
        redirects = list(children_of(node, "herestring_redirect", "file_redirect"))
        if redirects:
            return self._redirected(redirects, lambda _: self._simple(node, more))
        return self._simple(node, more)

    def _simple(self, node: Node, more: Sequence[str]) -> int:
        names = list(children_of(node, "command_name"))
        words = [*self.words([*names, *node.children_by_field_name("argument")]), *lost_words(node), *more]
        assignments = list(children_of(node, "variable_assignment"))
        if not words:
            return self._all(assignments)
        assigned: dict[str, str] = {}
        for assignment in assignments:
            name, value = assignment.child_by_field_name("name"), assignment.child_by_field_name("value")
            assigned[text_of(name or assignment)] = self.text(value)
        return self.call(words, assigned)

    def _at_variable_assignments(self, node: Node) -> int:
        return self._all(named(node))

    def _at_variable_assignment(self, node: Node, is_exported: bool = False) -> int:
        target, state = node.child_by_field_name("name"), self.state
        value = self.value(node.child_by_field_name("value"))
        name = text_of(target or node)
        if target is not None and target.type == "subscript":
            name, index = (text_of(child) for child in target.named_children[:2])
            words = state.variables.get(name)
            rest = list(words) if isinstance(words, list) else []
            if index.isdecimal() and int(index[:6]) <= len(rest) and isinstance(value, str):
                rest[int(index) : int(index) + 1] = [value]
                state.assign(name, rest)
            else:
                state.forget(name)
            return SUCCEEDS
        if any(child.type == "+=" for child in node.children):
            try:
                before = state.value(name)
            except KeyError:
                # The environment has no arrays.
                before = [] if isinstance(value, list) else f"{UNKNOWN}${name}"
            if isinstance(value, list) or isinstance(before, list):
                parts = ([part] if isinstance(part, str) else part or [] for part in (before, value))
                value = [word for part in parts for word in part]
            else:
                value = (before or "") + value
                self.way.budget.spend(len(value))
        state.assign(name, value, is_exported)
        return SUCCEEDS

    def _at_declaration_command(self, node: Node) -> int:
        words = [child for child in named(node) if child.type not in ("variable_assignment", "variable_name")]
        texts = self.words(words)
        is_exported = node.children[0].type == "export" or any(text.startswith("-") and "x" in text for text in texts)
        names = [text_of(child).partition("=")[0] for child in named(node)]
        if self.state.local is not None and node.children[0].type in ("local", "declare", "typeset"):
            hidden = {name: self.state.variables.get(name) for name in names if name not in self.state.local}
            self.state.local |= hidden
        for child in children_of(node, "variable_assignment"):
            self._at_variable_assignment(child, is_exported)
        for text in texts:
            name, equals, value = text.partition("=")
            if equals and name.isidentifier():
                self.state.assign(name, value, is_exported)
        if node.children[0].type == "readonly":
            self.state.read_only.update(names)
        if is_exported:
            self.state.exported.update(text_of(child) for child in children_of(node, "variable_name"))
        return SUCCEEDS

    def _at_unset_command(self, node: Node) -> int:
        for name in self.words(named(node)):
            self.state.assign(name, None)
            self.state.exported.discard(name)
        return SUCCEEDS


def run_script(text: str, budget: Budget) -> list[list[Command]]:
    """The wanted commands that a pasted script starts, on every way through its branches.

    Raises UsageError (exit 2) for a text that is no script, or beyond the limits of `Budget`.
    """
    script = as_shell(text)

    def run(way: Way) -> list[Command]:
        shell = Shell(State({}, {}, {}), way, Command([], {}, {}))
        shell.run_text(script)
        return shell.state.commands

    ways = ways_through(run, budget)
    if not any(ways) and (plain := without_apostrophes(script)) != script:
        script = plain
        ways = ways_through(run, budget)
    return ways


def run_command(command: Command, budget: Budget) -> list[list[Command]]:
    """The wanted commands behind a command, which may be a shell with a script of its own."""

    def run(way: Way) -> list[Command]:
        shell = Shell(State({}, command.files, command.packages), way, command)
        if command.words:
            shell.start(command)
        return shell.state.commands

    return ways_through(run, budget)
