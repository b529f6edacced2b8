"""Everything that kvcalc can learn about one GPU, in at most nine minutes.

    python benchmarks/gpu.py [--device cuda] [--out benchmarks/results]

Three stages, each in processes of their own with a time limit:

1. `benchmarks/gpu_look.py`: versions, clocks, roofs, and torch's attention kernels.
2. `pytest -m gpu`: the tests that need a GPU.
3. `kvcalc measure` for each model below, with a 16-bit and an 8-bit cache, over batches and contexts. Every backend
   that can run is timed. If the bytes and the self-check are right, the record is saved in OUT.

A stage that fails, hangs or runs out of time says so, and the next one starts. The page OUT/gpu.md has everything that
was printed, and one table of all runs. It is written again after every step, so that it is complete up to any end.
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

sys.path.insert(0, str(Path(__file__).resolve().parent))

from records import GPU_KV_DTYPES, GPU_LAYERS, ROOT, name_of

# What a CPU can run in the same time.
CONTEXTS, BATCHES = {"cuda": "8k:32k", "cpu": "512:1k"}, {"cuda": "1:16", "cpu": "1:2"}
# The folders with tests that need a GPU.
TESTS = "tests/gpu,tests/measure,tests/attention"

_LOOK_SECONDS, _TEST_SECONDS, _FIRST_SECONDS, _LEAST_SECONDS = 90, 150, 60, 10

HEAD = ("model", "KV", "tokens", "batch", "step p50", "core p50", "KV read", "of roof", "backend", "others")


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
    """What was printed, and the rows of the table."""

    def __init__(self, path: Path) -> None:
        self.path, self.lines, self.rows = path, list[str](), list[tuple[str, ...]]()

    def say(self, line: str) -> None:
        """Print `line`, and write the page again."""
        print(line, flush=True)
        self.lines.append(line)
        self.path.write_text("\n".join(["```text", *self.lines, "```", "", *self.table()]) + "\n")

    def table(self) -> Iterator[str]:
        for row in (HEAD, ("---", "---", *["---:"] * 6, "---", "---"), *self.rows):
            yield f"| {' | '.join(row)} |"


class Clock:
    """The time that is left."""

    def __init__(self, seconds: float) -> None:
        self.end = time.monotonic() + seconds

    def left(self, most: float = float("inf")) -> float:
        return min(most, self.end - time.monotonic())


def run(command: list[str], seconds: float) -> Ended:
    """Run `command` from the root of the checkout, and stop it and its children after `seconds`."""
    began = time.monotonic()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace", cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}, start_new_session=True,
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


def test(python: list[str], paths: list[str], page: Page, clock: Clock) -> None:
    """The second stage. Without a GPU, all of these tests are skipped."""
    command = [*python, "pytest", "-m", "gpu", "-n0", "-v", "--tb=line", "-p", "no:cacheprovider", "-p", "no:randomly"]
    found = run([*command, *paths], clock.left(_TEST_SECONDS))
    counts: Counter[str] = Counter()
    for name, outcome in outcomes(found.out):
        counts[outcome.lower()] += 1
        if outcome in ("FAILED", "ERROR"):
            page.say(f"{outcome} {name}")
    for line in found.out.splitlines():
        _, said, rest = line.partition("gpu: ")
        if said:
            page.say(said + rest)
    # pytest ends with 5 if it collects no test.
    ended = found.reason if found.status is None or not counts else f"{found.seconds:.0f} s"
    page.say(f"pytest -m gpu: {', '.join(f'{n} {what}' for what, n in sorted(counts.items())) or 'none ran'}; {ended}")


def outcomes(out: str) -> Iterator[tuple[str, str]]:
    """The name and the outcome of every test that ended, from the output of `pytest -v`, which may be cut off."""
    name = ""
    for line in out.splitlines():
        if line.startswith("=") and "test session starts" not in line:
            return
        test = re.match(r"tests/\S+::.*?(?= PASSED| FAILED| SKIPPED| ERROR|gpu: |$)", line)
        name = test[0].strip() if test else name
        outcome = re.search(r"(?:^| )(PASSED|FAILED|SKIPPED|ERROR)\b", line)
        if outcome:
            yield name, outcome[1]


def measure(
    python: list[str], device: str, models: list[str], kv_dtypes: list[str], sweep: str, steps: int, page: Page,
    clock: Clock,
) -> int:  # fmt: skip
    """The third stage. Returns the number of cases without a record."""
    cases = [(model, kv_dtype) for model in models for kv_dtype in kv_dtypes]
    without = 0
    for number, (model, kv_dtype) in enumerate(cases):
        case = f"{model}-{kv_dtype}"
        # A case may take three times its share of the time that is left: the first ones compile kernels.
        seconds = max(_FIRST_SECONDS, 3 * clock.left() / (len(cases) - number))
        if clock.left() < _LEAST_SECONDS:
            page.say(f"{case}: not run, no time is left")
            without += 1
            continue
        new = page.path.with_name(f".{case}.new")
        kept = ["--dtype", "bf16"] if kv_dtype == "bf16" else ["--dtype", "bf16", "--kv-dtype", kv_dtype]
        command = [*python, "kvcalc", "measure", model, "--layers", str(GPU_LAYERS.get(model, 2)), "--device", device]
        command += [*kept, "--sweep", sweep, "--steps", str(steps), "--json", "--save", str(new)]
        found = run(command, clock.left(seconds))
        # A sweep that was stopped has saved the runs that ended.
        part = new.with_name(f"{new.name}.part")
        record = load(new, found.out) or load(part, "")
        for row in record["runs"] if record else ():
            page.rows.append(row_of(model, kv_dtype, row))
        for skipped in record["skipped"] if record else ():
            page.say(f"{case}: skipped: {skipped['reason']}")
        if found.reason or record is None or not new.exists():
            without += 1
            page.say(f"{case}: FAILED: {found.reason or 'no record'}{kept_of(part, record, page, case)}")
            new.unlink(missing_ok=True)
            part.unlink(missing_ok=True)
            continue
        name = name_of(record, case)
        new.replace(page.path.with_name(name))
        page.say(f"{case}: {len(record['runs'])} runs in {found.seconds:.0f} s: {name}")
    return without


def kept_of(part: Path, record: dict[str, Any] | None, page: Page, case: str) -> str:
    """Keep the runs of a stopped sweep as a record, if all of them are right. Returns what to say about them."""
    if not part.exists() or record is None or any(is_wrong(run) for run in record["runs"]):
        return ""
    name = name_of(record, case)
    part.replace(page.path.with_name(name))
    return f"; the runs that ended: {name}"


def is_wrong(run: dict[str, Any]) -> bool:
    return bool(run["held_bytes"] != run["predicted_bytes"] or not run["verified"]["ok"])


def load(path: Path, printed: str) -> dict[str, Any] | None:
    """The saved record, else the printed one, which may have wrong bytes. None if there is none."""
    for text in (path.read_text() if path.exists() else "", printed):
        with suppress(ValueError):
            found = json.loads(text)
            if isinstance(found, dict) and "runs" in found:
                return found
    return None


def row_of(model: str, kv_dtype: str, run: dict[str, Any]) -> tuple[str, ...]:
    """A row of the table."""
    core, roof = run["attention_core_seconds"], run["binding_roof"]["attention_core"]
    wrong = " WRONG" if is_wrong(run) else ""
    others = {}
    for row in run["backends"]:
        if not row["is_chosen"] and row["seconds"] is not None:
            others[row["name"]] = f"{row['name']} {microseconds(row['seconds'])}"
    return (
        f"{model} ({run['num_layers']} layers){wrong}",
        kv_dtype,
        f"{run['context_tokens']:,}",
        str(run["batch_size"]),
        microseconds(run["decode_step_seconds"]["p50"]),
        microseconds(core["p50"]) if core else "",
        f"{run['kv_read_bytes_per_second'] / 1e9:,.0f} GB/s" if core else "",
        f"{roof['fraction']:.0%} ({roof['roof']})" if roof else "",
        run["backend"],
        ", ".join(others.values()),
    )


def microseconds(seconds: float) -> str:
    return f"{seconds * 1e6:,.1f} us"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--seconds", type=float, default=520, help="for everything; the default leaves some to end")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--tests", default=TESTS, help="paths for pytest")
    parser.add_argument("--models", default=",".join(GPU_LAYERS))
    parser.add_argument("--kv-dtypes", default=",".join(GPU_KV_DTYPES))
    parser.add_argument("--contexts", help="default: 8k:32k, on a CPU 512:1k")
    parser.add_argument("--batches", help="default: 1:16, on a CPU 1:2")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--scale", type=int, help="divides the sizes of the first stage; default: 1, on a CPU 32")
    parser.add_argument("--under", metavar="MODULE", help="run every process under MODULE, as tests.simulated_cuda")
    given = parser.parse_args()
    python = [sys.executable, "-m", *([given.under] if given.under else [])]
    given.out.mkdir(parents=True, exist_ok=True)
    page, clock = Page(given.out.resolve() / "gpu.md"), Clock(given.seconds)
    sweep = f"context={given.contexts or CONTEXTS[given.device]},batch={given.batches or BATCHES[given.device]}"
    look(python, given.device, given.scale or {"cuda": 1, "cpu": 32}[given.device], page, clock)
    test(python, given.tests.split(","), page, clock)
    models, kv_dtypes = given.models.split(","), given.kv_dtypes.split(",")
    without = measure(python, given.device, models, kv_dtypes, sweep, given.steps, page, clock)
    print("\n".join(page.table()))
    page.say(f"{without} of {len(models) * len(kv_dtypes)} cases have no record" if without else "all cases are done")
    sys.exit(bool(without))


if __name__ == "__main__":
    main()
