"""Progress of `kvcalc measure` on stderr: a bar on a terminal, one line for each run elsewhere."""

from __future__ import annotations

import sys
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, ProgressColumn, Task, TextColumn
from rich.progress import Progress as Bars
from rich.text import Text

from kvcalc.measure.progress import PlannedRun, Progress


class Lines(Progress):
    """One line when a run begins."""

    def start(self, number: int) -> None:
        super().start(number)
        print(f"{_run(self)}; {_times(self)}", file=sys.stderr, flush=True)


class Bar(Progress):
    """A bar over all runs, with the present run and phase, the elapsed time and the expected time."""

    def __init__(self) -> None:
        super().__init__()
        columns = (TextColumn("{task.description}", markup=False), BarColumn(bar_width=20), _Times(self))
        self._bars = Bars(*columns, console=Console(stderr=True), transient=True)
        self._task = self._bars.add_task("starting", total=None)

    def __enter__(self) -> Bar:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        self._bars.stop()

    def __call__(self, phase: str, done: int, of: int) -> None:
        super().__call__(phase, done, of)
        parts = f" {min(done + 1, of)} of {of}" if of > 1 else ""
        what = f"{_run(self)}: {phase}{parts}" if self.number else phase
        expected = self.expected_seconds()
        self._bars.update(self._task, description=what, completed=self.elapsed_seconds(), total=expected)


class _Times(ProgressColumn):
    """Elapsed and expected time, as of now."""

    def __init__(self, progress: Progress) -> None:
        super().__init__()
        self._progress = progress

    def render(self, task: Task) -> Text:
        return Text(_times(self._progress))


def _run(progress: Progress) -> str:
    run: PlannedRun = progress.runs[progress.number - 1]
    return f"run {progress.number} of {len(progress.runs)}: {run.title}"


def _times(progress: Progress) -> str:
    """For example `0:07 of about 0:21`."""
    elapsed, expected = progress.elapsed_seconds(), progress.expected_seconds()
    return _clock(elapsed) if expected is None else f"{_clock(elapsed)} of about {_clock(max(elapsed, expected))}"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}"
