"""The native kernel: how it is compiled and kept, and its paths for every width of vectors."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from kvcalc.attention.backends import Case, compiled, native
from tests.attention.test_backends import CPU, TOLERANCE, fill, make, reference
from tests.conftest import at_night

NATIVE_CASE = Case(CPU, torch.float32, 8, 2, 64, 64)


@pytest.fixture
def has_compiler() -> None:
    reason = native.Native().why_not(NATIVE_CASE)
    if reason:
        pytest.skip(reason)


def test_without_a_compiler_the_native_kernel_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert native.Native().why_not(NATIVE_CASE) == "no C compiler found (cc, gcc or clang)"
    monkeypatch.setenv("CC", "no-such-compiler")
    assert native.Native().why_not(NATIVE_CASE) == "no C compiler found: CC is no-such-compiler"


def test_a_compiler_that_fails_is_a_reason_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong-cc"
    wrong.write_text("#!/bin/sh\n[ \"$1\" = --version ] && exit 0\necho 'decode.c: error: too old' >&2\nexit 1\n")
    wrong.chmod(0o755)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CC", str(wrong))
    assert "too old" in (native.Native().why_not(NATIVE_CASE) or "")
    assert list((tmp_path / "cache" / "kvcalc").iterdir()) == []


def test_a_home_that_does_not_exist_is_not_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "nobody"))
    with pytest.raises(OSError, match="home folder does not exist"):
        compiled._folder()
    assert not [*tmp_path.iterdir()]


def test_compiled_code_is_not_kept_where_others_write(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / "kvcalc"
    folder.mkdir()
    folder.chmod(0o777)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(OSError, match="other users can write"):
        compiled._folder()


@pytest.mark.usefixtures("has_compiler")
def test_it_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    native.load()
    monkeypatch.setattr(compiled, "_make", lambda *a: pytest.fail("compiled again"))
    native.load()


class Compiler:
    """A compiler that refuses some flags, and compiles an empty file to be fast. `calls` has its arguments."""

    def __init__(self, folder: Path, refused: str, version: str = "one") -> None:
        self.log, script = folder / "calls", folder / "cc"
        (real,) = compiled._command()
        script.write_text(f"""#!/bin/sh
case "$*" in *--version*) echo {version}; exit 0 ;; esac
echo "$@" >> {self.log}
case "$*" in {refused}) echo "error: unrecognized argument" >&2; exit 1 ;; esac
case "$*" in *" -c "*) for out in "$@"; do :; done; exec {real} -fPIC -x c -c /dev/null -o $out ;; esac
exec {real} "$@"
""")
        script.chmod(0o755)

    def calls(self) -> list[str]:
        return self.log.read_text().splitlines()


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    def make(refused: str = "none", version: str = "one") -> Compiler:
        monkeypatch.delenv("CC", raising=False)
        made = Compiler(tmp_path, refused, version)
        monkeypatch.setenv("CC", str(tmp_path / "cc"))
        return made

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return make


@pytest.mark.usefixtures("has_compiler")
@pytest.mark.parametrize(
    ("refused", "attempts", "kept"),
    [
        ("none", 1, {"-march=native", "-mprefer-vector-width=512", "-fopenmp"}),
        ("*-mprefer*", 2, {"-march=native", "-fopenmp"}),
        ("*-fopenmp*-c*", 3, {"-march=native"}),
        ("*-march=native*", 4, {"-fopenmp"}),
        ("*-march=native*|*-fopenmp*-c*", 5, set()),
    ],
)
def test_a_flag_the_compiler_refuses_is_left_out(compiler: Any, refused: str, attempts: int, kept: set[str]) -> None:
    made = compiler(refused)
    compiled.built()
    calls = [call.split() for call in made.calls() if " -c " in call]
    assert len(calls) == attempts
    assert {"-march=native", "-mprefer-vector-width=512", "-fopenmp"} & {*calls[-1]} == kept


def test_without_the_runtime_of_openmp_it_has_one_thread(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """clang is often installed without its runtime, and code that needs it does not load."""
    script, log = tmp_path / "cc", tmp_path / "calls"
    (real,) = compiled._command()
    script.write_text(f"""#!/bin/sh
echo "$@" >> {log}
case "$*" in
    *--version*) exit 0 ;;
    *-shared*-fopenmp*) echo "error: cannot find -lomp" >&2; exit 1 ;;
    *-fopenmp*" -c "*) code="void fork(void); void call(void) {{ kmpc_fork(); }}" ;;
    *" -c "*) code="" ;;
    *) exec {real} "$@" ;;
esac
for out in "$@"; do :; done
echo "$code" | exec {real} -fPIC -w -x c -c - -o $out
""")
    script.chmod(0o755)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CC", str(script))
    compiled.built()
    assert [line.split()[5:-4] for line in log.read_text().splitlines() if " -c " in line] == [
        ["-march=native", "-mprefer-vector-width=512", "-fopenmp"], ["-march=native", "-fopenmp"], ["-march=native"],
    ]  # fmt: skip


@pytest.mark.skipif(os.name != "posix", reason="locks of POSIX systems")
def test_one_process_compiles_and_the_others_wait(compiler: Any, tmp_path: Path) -> None:
    made = compiler()
    slow = tmp_path / "cc"
    slow.write_text(slow.read_text().replace('case "$*" in *" -c "*)', 'case "$*" in *" -c "*) sleep 0.5;'))
    # The module alone, because its package loads torch.
    script = f"import runpy; print(runpy.run_path({compiled.__file__!r})['built']())"
    processes = [subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) for _ in range(3)]
    printed = {process.communicate(timeout=60)[0] for process in processes}
    assert [process.returncode for process in processes] == [0] * 3
    assert len(printed) == 1
    assert len([call for call in made.calls() if " -c " in call]) == 1


@pytest.mark.skipif(os.name != "posix", reason="locks of POSIX systems")
def test_a_process_that_compiles_too_long_does_not_stop_another(
    compiler: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The other one goes on without the kernel, and the next run tries again."""
    compiler()
    monkeypatch.setattr(compiled, "_TIMEOUT_SECONDS", 0.5)
    with (
        compiled._locked(compiled._folder(), 0.0),
        pytest.raises(OSError, match="another process is still compiling"),
    ):
        compiled.built()
    monkeypatch.setattr(compiled, "_TIMEOUT_SECONDS", 60)
    assert compiled.built().exists()


@pytest.mark.skipif(os.name != "posix", reason="limits of POSIX systems")
@pytest.mark.parametrize("said", ["", "gcc: fatal error: CPU time limit exceeded signal terminated program cc1"])
def test_a_compiler_is_limited_by_its_processor_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, said: str
) -> None:
    busy = tmp_path / "cc"
    loop = f"echo '{said}' >&2; exit 1" if said else "while :; do :; done"
    busy.write_text(f'#!/bin/sh\n[ "$1" = --version ] && exit 0\n{loop}\n')
    busy.chmod(0o755)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CC", str(busy))
    monkeypatch.setattr(compiled, "_CPU_SECONDS", 1)
    with pytest.raises(TimeoutError, match="did not finish within 1 seconds of processor time"):
        compiled.built()
    assert [path.name[:5] for path in (tmp_path / "cache" / "kvcalc").iterdir()] == ["hung-"]


@pytest.mark.skipif(os.name != "posix", reason="process groups of POSIX systems")
def test_the_programs_of_a_hung_compiler_are_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A compiler is a program that starts others. One that stays would hold the pipes, and kvcalc would wait for it."""
    slow, number = tmp_path / "cc", tmp_path / "number"
    slow.write_text(f"#!/bin/sh\nsleep 60 &\necho $! > {number}\nwait\n")
    slow.chmod(0o755)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CC", str(slow))
    monkeypatch.setattr(compiled, "_TIMEOUT_SECONDS", 1)
    with pytest.raises(TimeoutError):
        compiled.built()
    # It is gone a moment after the signal, and not only after its minute.
    child, end = int(number.read_text()), time.monotonic() + 20
    while is_running(child) and time.monotonic() < end:
        time.sleep(0.01)
    assert not is_running(child)


def is_running(process: int) -> bool:
    try:
        return psutil.Process(process).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


# The paths of decode.c, by the processor's features and the flags that choose them.
LANES = [("avx512f", "-march=skylake-avx512"), ("avx2", "-march=haswell"), ("sse2", "-march=x86-64")]


@pytest.mark.skipif(platform.machine() != "x86_64", reason="flags of x86-64")
@pytest.mark.usefixtures("has_compiler")
@pytest.mark.parametrize(
    ("compiler_name", "feature", "flag"),
    [*(("gcc", *lane) for lane in LANES), ("clang", *LANES[0]), *(at_night("clang", *lane) for lane in LANES[1:])],
)
def test_every_width_of_vectors(
    compiler_name: str, feature: str, flag: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, request: Any
) -> None:
    """Without optimisation, which takes half of the compiler's time. Other tests have the flags of this processor."""
    named = next((found for end in ("", "-14") if (found := shutil.which(compiler_name + end))), None)
    if named is None or feature not in compiled._processor().split():
        pytest.skip(f"no {compiler_name}, or no {feature}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CC", named)
    monkeypatch.setattr(compiled, "_EXTRA_FLAGS", ((flag,),))
    if not request.config.getoption("--everything"):
        monkeypatch.setattr(compiled, "_FLAGS", ("-O0", *compiled._FLAGS[1:]))
    backend = native.Native()
    assert backend.why_not(NATIVE_CASE) is None
    for dtype, stored in ((torch.float32, None), (torch.float16, None), (torch.bfloat16, None),
                          (torch.float32, torch.int8), (torch.float32, torch.float8_e4m3fn)):  # fmt: skip
        for heads, groups, width, layout in (
            (9, 1, 64, "dense"),
            (28, 4, 128, "paged"),
            (6, 6, 40, "dense"),
            (71, 1, 40, "dense"),
            (70, 2, 96, "paged"),
        ):
            shapes = ((groups, width), (groups, width))
            cache = make(layout, shapes, 77, None, dtype, stored, block_size=32)
            fill(cache, shapes, 77)
            query = torch.randn(2, heads, 1, width, dtype=dtype)
            expected = reference(query, tuple(view.float() for view in cache.views()), None, None)
            torch.testing.assert_close(
                backend.decode(query, cache).float(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype]
            )


@pytest.mark.skipif(platform.machine() != "x86_64" or not shutil.which("gcc"), reason="needs gcc for x86-64")
@pytest.mark.parametrize("flag", ["-march=haswell", at_night("-march=skylake-avx512")])
def test_gcc_keeps_the_vectors_in_registers(flag: str) -> None:
    """Vectors wider than the processor's were kept on the stack: 18,158 moves for 1,334 multiply-adds with AVX2."""
    command = ["gcc", *compiled._FLAGS, "-fopenmp", flag, "-S", "-o", "-", str(compiled.SOURCE)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    multiplied = sum(bool(re.match(r"\s*vfn?m(add|sub)\d+ps", line)) for line in lines)
    moved = sum(bool(re.match(r"\s*vmov.*%[xyz]mm.*", line) and re.search(r"\(%r[sb]p\)", line)) for line in lines)
    assert multiplied > 200
    assert moved < multiplied


@pytest.mark.usefixtures("has_compiler")
def test_what_changes_the_code_makes_another_library(
    compiler: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    source = tmp_path / "decode.c"
    source.write_text(compiled.SOURCE.read_text())
    monkeypatch.setattr(compiled, "SOURCE", source)
    monkeypatch.setattr(compiled, "_make", lambda compiler, made, library: library.write_text(""))
    compiler()
    libraries = {compiled.built()}
    assert libraries == {compiled.built()}
    for change in (
        lambda: source.write_text("int x;"),
        lambda: compiler(version="two"),
        lambda: monkeypatch.setattr(compiled, "_FLAGS", ("-O2",)),
        lambda: monkeypatch.setattr(compiled, "_EXTRA_FLAGS", ((),)),
        lambda: monkeypatch.setattr(platform, "machine", lambda: "another"),
        lambda: monkeypatch.setattr(compiled, "_processor", lambda: "another"),
        lambda: monkeypatch.setenv("CC", f"{tmp_path / 'cc'} -g"),
    ):
        before = len(libraries)
        change()
        libraries.add(compiled.built())
        assert len(libraries) == before + 1


def test_a_compiler_that_hangs_is_started_once_an_hour_until_it_is_another(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A file beside the library remembers it for the next processes. Reasons, which stand in records, name no home."""
    monkeypatch.setenv("HOME", str(tmp_path))
    slow = tmp_path / "cc"
    slow.write_text(f"#!/bin/sh\necho again >> {tmp_path / 'calls'}\nexec sleep 60\n")
    slow.chmod(0o755)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CC", str(slow))
    monkeypatch.setattr(compiled, "_TIMEOUT_SECONDS", 1)

    def reason() -> str:
        return native.Native().why_not(NATIVE_CASE) or ""

    assert reason() == f"{slow} did not finish within 1 seconds"
    for _ in range(2):
        assert reason().startswith(f"{slow} did not finish in an earlier run; remove ~/cache/kvcalc/hung-")
    assert (tmp_path / "calls").read_text() == "again\n"
    (hung,) = (tmp_path / "cache" / "kvcalc").glob("hung-*")
    os.utime(hung, (0, 0))
    assert reason() == f"{slow} did not finish within 1 seconds"
    assert (tmp_path / "calls").read_text() == "again\nagain\n"
    assert reason().startswith(f"{slow} did not finish in an earlier run")
    slow.write_text("#!/bin/sh\necho 'error: mended' >&2\nexit 1\n")
    assert reason() == f"{slow} failed: error: mended"


@pytest.mark.parametrize("damage", ["truncated", "changed", "empty", "no checksum", "odd checksum"])
@pytest.mark.usefixtures("has_compiler")
def test_a_damaged_library_is_compiled_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, damage: str) -> None:
    """Loading a truncated library, as a power cut leaves it, would end the process with SIGBUS."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    made: list[str] = []

    def make(compiler: Any, made_from: Path, library: Path) -> None:
        made.append("once")
        library.write_bytes(b"library" * 1000)

    monkeypatch.setattr(compiled, "_make", make)
    library = compiled.built()
    whole, checksum = library.read_bytes(), Path(f"{library}.sha256")
    assert (compiled.built(), len(made)) == (library, 1)
    if damage == "no checksum":
        checksum.unlink()
    elif damage == "odd checksum":
        checksum.write_bytes(b"\xff\xfe")
    else:
        library.write_bytes({"truncated": whole[:4096], "changed": b"X" + whole[1:], "empty": b""}[damage])
    assert (compiled.built(), len(made)) == (library, 2)
    assert library.read_bytes() == whole
    assert sorted(path.name for path in library.parent.iterdir()) == [library.name, checksum.name]


@pytest.mark.parametrize("value", ['gcc "', "gcc '-O3", "gcc \\"])
def test_a_variable_cc_with_a_broken_quote_is_a_reason(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("CC", value)
    reason = native.Native().why_not(NATIVE_CASE)
    assert (reason or "").startswith("CC is not a command: No ")


@pytest.mark.parametrize("status", [0, 1])
def test_a_compiler_may_print_in_any_encoding(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, status: int) -> None:
    script = tmp_path / "cc"
    script.write_text(f"#!/bin/sh\nprintf '\\377\\376 error: \\344' | tee /dev/stderr\nexit {status}\n")
    script.chmod(0o755)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CC", str(script))
    assert native.Native().why_not(NATIVE_CASE) is not None


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="owners of files")
def test_other_owners_on_the_way_to_the_cache_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    (shared / "mine").mkdir(parents=True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(shared / "mine"))
    assert compiled._folder() == shared / "mine" / "kvcalc"
    shared.chmod(0o777)
    with pytest.raises(OSError, match=f"other users can write to {shared}, so compiled code is not stored"):
        compiled._folder()
    shared.chmod(0o1777)  # like /tmp: others cannot replace what is not theirs
    compiled._folder()
    shared.chmod(0o755)
    (tmp_path / "link").symlink_to(shared / "mine")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "link"))
    compiled._folder()
    if os.getuid() == 0:
        os.chown(shared, 12345, 12345)
        with pytest.raises(OSError, match="other users can write"):
            compiled._folder()
