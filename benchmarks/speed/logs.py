"""Measure the CPU time per GiB and the peak memory of `kvcalc audit` for logs of several kinds.

    python benchmarks/speed/logs.py [--mib N] [--repeat N] [--kind KIND ...] [--before CHECKOUT]

Each log is vLLM's start-up log from tests/logs, and then lines of one kind, made with a fixed seed. The goal is 20
seconds of CPU and 100 MiB for 1 GiB. Figures are medians. The time of the start-up log alone is subtracted, so that
small logs give the same seconds per GiB. `--before` also measures another checkout, in turns with this one.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.speed.processes import ROOT, run
from kvcalc.engines import LOGS
from kvcalc.planning.logs import markers

GOAL_SECONDS, GOAL_MIB = 20, 100
START = (ROOT / "tests/logs/vllm.log").read_bytes()
_PIECE = 4 << 20
_LETTERS = b"abcdefghijklmnopqrstuvwxyz    "
_BASE64 = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/-_"


def random_lines(draw: random.Random, size: int, length: int, letters: bytes) -> bytes:
    """About `size` bytes in random lines of `length` bytes."""
    table = bytes(letters[byte % len(letters)] for byte in range(256))
    data = bytearray(draw.randbytes(size // length * length).translate(table))
    data[length - 1 :: length] = b"\n" * (len(data) // length)
    return bytes(data)


def _vllm(draw: random.Random) -> bytes:
    words = "[loggers.py:116] Engine 000: Avg prompt throughput: {:.1f} tokens/s, Running: {} reqs, Waiting: {} reqs"
    return b"".join(
        f"INFO 06-15 12:{n // 60 % 60:02}:{n % 60:02} {words}\n".format(draw.random() * 999, n % 64, n % 7).encode()
        + f'INFO:     127.0.0.1:{n % 60000} - "POST /v1/completions HTTP/1.1" 200 OK\n'.encode()
        for n in range(_PIECE // 190)
    )


def _emoji(draw: random.Random) -> bytes:
    return "".join("".join(draw.choices("😀🚀🔥✨🧠💡", k=20)) + "\n" for _ in range(_PIECE // 81)).encode()


def _json(draw: random.Random) -> bytes:
    names = ("prompt_tokens", "max_tokens", "cached_tokens", "role", "content", "finish_reason", "created", "object")
    return "".join(
        json.dumps({name: draw.getrandbits(40) for name in names}) + "\n" for _ in range(_PIECE // 230)
    ).encode()


def _markers(draw: random.Random) -> bytes:
    """Every line has one of the markers, which come in turn."""
    found = [marker.encode() for marker in markers([*LOGS])]
    end = random_lines(draw, 40, 40, _LETTERS)
    return b"".join(found[n % len(found)] + b" ! " + end for n in range(_PIECE // 60))


KINDS: dict[str, Callable[[random.Random], bytes]] = {
    "vllm": _vllm,
    "utf-16": _vllm,
    "5 bytes": lambda draw: random_lines(draw, _PIECE, 5, _LETTERS),
    "60 letters": lambda draw: random_lines(draw, _PIECE, 60, _LETTERS),
    "base64": lambda draw: random_lines(draw, _PIECE, 60, _BASE64),
    "any bytes": lambda draw: random_lines(draw, _PIECE, 60, bytes(range(14, 256))),
    "one line": lambda draw: random_lines(draw, _PIECE, 60, _LETTERS).replace(b"\n", b" "),
    "empty": lambda draw: b"\n" * _PIECE,
    "dashes": lambda draw: (b"-" * 79 + b"\n") * (_PIECE // 80),
    "emoji": _emoji,
    "json": _json,
    "markers": _markers,
    "start-ups": lambda draw: START * (_PIECE // len(START)),
    "near markers": lambda draw: b"prefix_cache_len max-model kv-cach num_tokens batch_siz _par\n" * (_PIECE // 61),
}


def pieces(kind: str, size: int) -> Iterator[bytes]:
    """A log of about `size` bytes."""
    draw, written, more = random.Random(1), 0, START
    while written < size:
        data = more.decode(errors="replace").encode("utf-16-le") if kind == "utf-16" else more
        yield data
        written += len(data)
        more = KINDS[kind](draw)


def main() -> None:
    """Measure each kind, and print one line per kind and checkout."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=1024, help="size of a log (default 1024)")
    parser.add_argument("--repeat", type=int, default=3, help="runs of each kind (default 3)")
    parser.add_argument("--kind", action="append", choices=KINDS, help="only this kind")
    parser.add_argument("--before", type=Path, help="another checkout of kvcalc")
    given = parser.parse_args()
    roots = [ROOT, *filter(None, [given.before])]
    command = [sys.executable, "-m", "kvcalc", "audit"]
    small = [run([*command, str(ROOT / "tests/logs/vllm.log")], root=root)[0] for root in roots]
    for kind in given.kind or KINDS:
        with tempfile.NamedTemporaryFile(suffix=".log") as file:
            for piece in pieces(kind, given.mib << 20):
                file.write(piece)
            file.flush()
            gib = file.tell() / 2**30
            runs = [[run([*command, file.name], root=root) for root in roots] for _ in range(given.repeat)]
        for root, start_up, found in zip(roots, small, zip(*runs)):
            seconds, mib = (statistics.median(values) for values in zip(*found))
            figures = f"{(seconds - start_up) / gib:6.1f} s/GiB (goal {GOAL_SECONDS}) {mib:5.0f} MiB (goal {GOAL_MIB})"
            print(f"{kind:14} {figures}  {root.name}", flush=True)


if __name__ == "__main__":
    main()
