"""Everything that kvcalc can learn about one GPU, in at most nine minutes.

    python benchmarks/gpu.py [--device cuda] [--out benchmarks/results]

Three stages, each in processes of their own with a time limit:

1. `benchmarks/gpu_look.py`: versions, clocks, roofs, and torch's attention kernels.
2. `pytest -m gpu`: the tests that need a GPU, in several processes. Those of tests/gpu then run again, alone, because
   they print times. Their kernels are compiled by then.
3. `kvcalc measure --profile`, for as long as there is time. If all bytes and self-checks are right, the profile is
   saved in OUT.

A stage that fails, hangs or runs out of time says so, and the next one starts. The page OUT/gpu.md has everything that
was printed. It is written again after every step, so that it is complete up to any end.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.records import ROOT, name_of

# The folders with tests that need a GPU, and how many processes run them: one compiles while another one runs.
TESTS = (("tests/attention,tests/measure,tests/gpu", min(12, os.cpu_count() or 1)), ("tests/gpu", 0))

_LOOK_SECONDS, _TEST_SECONDS, _LEAST_SECONDS = 90, 150, 30
# What remains for the profile's own end.
_SPARE_SECONDS = 15


class Ended(NamedTuple):
    """How a process ended: its exit code (None if it was stopped), what it printed, and its seconds."""

    status: int | None
    out: str
    err: str
    seconds: float

    @property
    def reason(self) -> str:
        """Why it failed, in one line. Empty if it did not."""
        if self.status is None:
            return f"stopped after {self.seconds:.0f} s"
        lines = [line for line in self.err.splitlines() if line.startswith("kvcalc: ")] or self.err.splitlines()
        return f"exit code {self.status}: {lines[0] if lines else 'no message'}" if self.status else ""


class Page:
    """What was printed."""

    def __init__(self, path: Path) -> None:
        self.path, self.lines = path, list[str]()

    def say(self, line: str) -> None:
        """Print `line`, and write the page again."""
        print(line, flush=True)
        self.lines.append(line)
        self.path.write_text("\n".join(["```text", *self.lines, "```"]) + "\n")


class Clock:
    """The time that is left."""

    def __init__(self, seconds: float) -> None:
        self.end = time.monotonic() + seconds

    def left(self, most: float = float("inf")) -> float:
        return min(most, self.end - time.monotonic())


def run(command: list[str], seconds: float) -> Ended:
    """Run `command` from the root of the checkout, and stop it and its children after `seconds`."""
    began = time.monotonic()
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace", cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}, start_new_session=True,
    )  # fmt: skip
    try:
        out, err = process.communicate(timeout=seconds)
        status: int | None = process.returncode
    except (subprocess.TimeoutExpired, KeyboardInterrupt) as error:
        status = None
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        out = err = ""
        # A process that waits for a lost GPU may not end at all.
        with suppress(subprocess.TimeoutExpired):
            out, err = process.communicate(timeout=5)
        if isinstance(error, KeyboardInterrupt):
            raise
    return Ended(status, out, err, time.monotonic() - began)


def look(python: list[str], device: str, scale: int, page: Page, clock: Clock) -> None:
    """The first stage."""
    found = run([*python, "benchmarks.gpu_look", "--device", device, "--scale", str(scale)], clock.left(_LOOK_SECONDS))
    for line in found.out.splitlines():
        page.say(line)
    page.say(f"look: FAILED: {found.reason}" if found.reason else f"look: {found.seconds:.0f} s")


def test(python: list[str], paths: list[str], workers: int, page: Page, clock: Clock) -> None:
    """The second stage, for the tests in `paths`. Without a GPU, all of them are skipped."""
    command = [*python, "pytest", "-m", "gpu", f"-n{workers}", "-v", "--tb=line", "-p", "no:cacheprovider"]
    # A plugin of benchmarks warns if there are several workers, and a warning is an error.
    command += ["-p", "no:randomly", "-p", "no:benchmark"]
    found = run([*command, *paths], clock.left(_TEST_SECONDS))
    counts: Counter[str] = Counter()
    for name, outcome in outcomes(found.out):
        counts[outcome.lower()] += 1
        if outcome in ("FAILED", "ERROR"):
            page.say(f"{outcome} {name}")
    for line in found.out.splitlines():
        _, said, rest = line.partition("gpu: ")
        # With --tb=line, the reason of a failure is "path:line: error".
        if said or re.match(r"\S+:\d+: ", line):
            page.say(said + rest or line)
    # pytest ends with 5 if it collects no test.
    ended = found.reason if found.status is None or not counts else f"{found.seconds:.0f} s"
    what = ", ".join(f"{n} {what}" for what, n in sorted(counts.items())) or "none ran"
    page.say(f"pytest -m gpu {' '.join(paths)}: {what}; {ended}")


def outcomes(out: str) -> Iterator[tuple[str, str]]:
    """The name and the outcome of every test that ended, from the output of `pytest -v`, which may be cut off.

    With several workers, a line is "[gw1] [ 10%] PASSED name", else "name PASSED [ 10%]".
    """
    name = ""
    for line in out.splitlines():
        if line.startswith("=") and "test session starts" not in line:
            return
        worker = re.match(r"\[gw\d+\] \[ *\d+%\] (PASSED|FAILED|SKIPPED|ERROR) (.*\S)", line)
        if worker:
            yield worker[2], worker[1]
            continue
        test = re.match(r"tests/\S+::.*?(?= PASSED| FAILED| SKIPPED| ERROR|gpu: |$)", line)
        name = test[0].strip() if test else name
        outcome = re.search(r"(?:^| )(PASSED|FAILED|SKIPPED|ERROR)\b", line)
        if outcome:
            yield name, outcome[1]


def profile(python: list[str], options: list[str], page: Page, clock: Clock) -> bool:
    """The third stage. Returns whether there is a profile without an error."""
    seconds = clock.left()
    if seconds < _LEAST_SECONDS:
        page.say("profile: not run, no time is left")
        return False
    new = page.path.with_name(".profile.new")
    new.unlink(missing_ok=True)
    minutes = f"{(seconds - _SPARE_SECONDS) / 60:.2f}"
    command = [*python, "kvcalc", "measure", "--profile", "--minutes", minutes, "--save", str(new), *options]
    found = run(command, seconds)
    for line in found.out.splitlines():
        page.say(line)
    # It is written after each point, so a run that was stopped has left the points before it.
    document = load(new)
    if document is None:
        page.say(f"profile: FAILED: {found.reason or 'no document'}")
        return False
    wrong = [run for record in document["records"] for run in record["runs"] if is_wrong(run)]
    if wrong:
        page.say(f"profile: WRONG: {len(wrong)} runs have other bytes than predicted, or a wrong self-check")
        new.unlink()
        return False
    name = name_of(document, "profile")
    new.replace(page.path.with_name(name))
    ended = f"FAILED: {found.reason}; the points that ended" if found.reason else f"{found.seconds:.0f} s"
    page.say(f"profile: {ended}: {len(document['points'])} points in {name}")
    return not found.reason


def is_wrong(run: dict[str, Any]) -> bool:
    return bool(run["held_bytes"] != run["predicted_bytes"] or not run["verified"]["ok"])


def load(path: Path) -> dict[str, Any] | None:
    """The document in `path`. None if there is none."""
    with suppress(ValueError, OSError):
        found = json.loads(path.read_text())
        if isinstance(found, dict) and "points" in found:
            return found
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--seconds", type=float, default=520, help="for everything; the default leaves some to end")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--tests", help="paths for pytest, in one process; default: all that need a GPU")
    parser.add_argument("--scale", type=int, help="divides the sizes of the first stage; default: 1, on a CPU 32")
    parser.add_argument("--under", metavar="MODULE", help="run every process under MODULE, as tests.simulated_cuda")
    parser.add_argument("options", nargs="*", help="further arguments of kvcalc measure --profile, after --")
    given = parser.parse_args()
    python = [sys.executable, "-m", *([given.under] if given.under else [])]
    given.out.mkdir(parents=True, exist_ok=True)
    page, clock = Page(given.out.resolve() / "gpu.md"), Clock(given.seconds)
    look(python, given.device, given.scale or {"cuda": 1, "cpu": 32}[given.device], page, clock)
    for paths, workers in [(given.tests, 0)] if given.tests else TESTS:
        test(python, paths.split(","), workers, page, clock)
    sys.exit(not profile(python, [*given.options, "--device", given.device], page, clock))


if __name__ == "__main__":
    main()
