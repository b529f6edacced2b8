"""Random options of `kvcalc measure`, on a simulated GPU and on this CPU: every run ends with an answer or a reason.

`pytest tests/measure/test_option_matrix.py --cases 100000 --fuzz-seed 7` runs 200 other sets of options on each. With
another torch: a virtual environment with that release first in its path.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvcalc.attention import ragged, rope
from kvcalc.attention.backends import BACKENDS
from tests.documents import validate
from tests.measure.test_simulated_cuda import renewed
from tests.simulated_cuda import simulated_cuda

pytestmark = pytest.mark.fuzz

# One set of options for each device in so many cases of all fuzz tests.
_CASES_EACH = 500
_SHAPE = {"heads": "8", "kv-heads": "2", "head-dim": "64", "hidden-size": "64"}
_LATENT = {"attention": "mla", "kv-lora-rank": "512", "qk-rope-head-dim": "64"}
MODELS: list[dict[str, str]] = [
    _SHAPE, _SHAPE, {**_SHAPE, "kv-heads": "8"}, {**_SHAPE, "head-dim": "96"}, {**_SHAPE, **_LATENT},
    {**_SHAPE, **_LATENT}, {**_SHAPE, "attention": "mla"}, {**_SHAPE, "attention": "all"}, {"model": "t5-small"},
    {"model": "falcon-h1-tiny-90m"}, {"model": "smollm2-135m"}, {"model": "mamba-130m"},
]  # fmt: skip
# Options with their values, and the share of the sets that have each.
OPTIONS: dict[str, tuple[float, list[str]]] = {
    "batch": (0.4, ["2", "3"]),
    "dtype": (0.9, ["bf16", "bf16", "fp16", "fp32"]),
    "kv-dtype": (0.4, ["fp8", "fp8", "int8", "auto"]),
    "cache-scales": (0.3, ["row", "head", "tensor"]),
    "cache": (0.15, ["preallocated", "grow", "none"]),
    "block-size": (0.4, ["1", "16", "64", "100", "256"]),
    "mla": (0.1, ["absorbed", "expanded"]),
    "backend": (0.4, [*BACKENDS]),
    "without-backend": (0.1, ["native", "flex,triton", "grouped-sdpa"]),
    "lengths": (0.15, ["200,40,90", "64,64", "129,3"]),
    "sweep": (0.08, ["context=64:130", "batch=1:2", "context=33,batch=1..4"]),
    "until-full": (0.06, ["context", "batch"]),
    "memory": (0.04, ["24MiB", "1GiB"]),
    "sliding-window": (0.15, ["1", "50", "64", "500"]),
    "prefill": (0.2, ["full", "sample"]),
    "seed": (0.1, ["1", "12345"]),
    "trace": (0.03, ["trace.json"]),
    "save": (0.05, ["record.json"]),
}


def random_options(rng: random.Random) -> list[str]:
    """The words of a command line after `measure`."""
    chosen = dict(rng.choice(MODELS))
    words = [chosen.pop("model")] if "model" in chosen else []
    chosen |= {"layers": rng.choice(["1", "2", "2", "3"]), "steps": rng.choice(["1", "2", "3"])}
    chosen |= {name: rng.choice(values) for name, (share, values) in OPTIONS.items() if rng.random() < share}
    if "until-full" in chosen:  # otherwise it fills this machine
        chosen["memory"] = rng.choice(["4MiB", "24MiB", "64MiB"])
    if "lengths" not in chosen:
        chosen["context"] = rng.choice(["4", "40", "64", "129", "200", "256"])
    return [*words, *(word for name, value in chosen.items() for word in (f"--{name}", value))]


@contextlib.contextmanager
def on_a_gpu() -> Iterator[None]:
    """A simulated device, and backends that have not run."""
    with pytest.MonkeyPatch.context() as patch:
        rope._LAST.clear()
        ragged.on_device.cache_clear()
        for name in BACKENDS:
            patch.setitem(BACKENDS, name, renewed(name))
        with simulated_cuda():
            yield
    rope._LAST.clear()
    ragged.on_device.cache_clear()


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_every_set_of_options_ends_with_an_answer_or_a_reason(
    kvcalc: Any, pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, device: str
) -> None:
    monkeypatch.chdir(tmp_path)
    first, cases = pytestconfig.getoption("--fuzz-seed"), pytestconfig.getoption("--cases")
    on: Callable[[], Any] = on_a_gpu if device == "cuda" else contextlib.nullcontext
    answered, number_of_sets = 0, max(1, cases // _CASES_EACH)
    for number in range(number_of_sets):
        words = random_options(random.Random(f"{first} {number}"))
        with on():
            found = kvcalc("measure", *words, "--device", device, "--json")
        asked = f"kvcalc measure {' '.join(words)} --device {device}\n{found.err}"
        assert found.status in (0, 1, 2, 3, 4), asked
        assert "internal error" not in found.err, asked
        if found.status == 0:
            answered += 1
            document = found.json
            validate(document, "measure")
            assert all(run["predicted_bytes"] == run["held_bytes"] for run in document["runs"]), asked
        else:
            assert found.out == "", asked
            assert found.err.splitlines()[-1].startswith(("kvcalc: ", "  ")), asked
    assert number_of_sets < 10 or answered > number_of_sets // 4
