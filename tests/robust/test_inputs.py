"""Inputs that ended in an internal error, or took gigabytes: each is answered or refused in one line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvcalc.errors import UsageError
from kvcalc.model.checkpoint import INDEX, MAX_INDEX_BYTES, read_checkpoint
from tests.conftest import PEAK
from tests.documents import audit


@pytest.mark.parametrize("reference", ["~root\0/x", "./a\0", "\ud800", "./\ud800/x", "~\ud800/x", "hf:\ud800/x"])
def test_text_that_cannot_be_a_path(kvcalc: Any, tmp_path: Path, reference: str) -> None:
    questions = tmp_path / "questions.jsonl"
    questions.write_text(json.dumps({"model": reference}) + "\n")
    error = kvcalc("batch", questions).json["error"]
    assert error["exit_code"] in (2, 3), error


@pytest.mark.parametrize("model", ["mamba-2.8b", "gpt2"])
@pytest.mark.parametrize("longest", [1, 1500, 10**30])
def test_an_estimated_length_of_a_model_whose_cache_does_not_grow(model: str, longest: int) -> None:
    import kvcalc

    log = f"Available KV cache memory: 9.00 GiB\nestimated maximum model length is {longest}\n"
    try:
        found = audit(log, model=kvcalc.load_model(model), engine="vllm", context_tokens=1000)
    except kvcalc.KvcalcError:
        return
    (row,) = (row for row in found["figures"] if row["name"] == "max_model_len")
    assert row["computed"] == 1000 if model.startswith("mamba") else row["computed"] is not None


def limited(megabytes: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    """kvcalc with a limit on its address space."""
    resource = pytest.importorskip("resource")

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (megabytes << 20, megabytes << 20))

    return subprocess.run(
        [sys.executable, "-m", "kvcalc", *arguments], preexec_fn=limit, capture_output=True, text=True, check=False
    )


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux holds to the limit")
def test_measure_without_the_memory_for_torch_is_one_line() -> None:
    pytest.importorskip("torch")
    for megabytes in (150, 300, 600):
        done = limited(megabytes, "measure", "gpt2", "--layers", "1", "--context", "8", "--steps", "1")
        assert (done.returncode, done.stdout) == (1, ""), done.stderr
        assert "ulimit -v" in done.stderr
        assert len(done.stderr.splitlines()) == 2


@pytest.mark.parametrize("error", [ImportError("libtorch.so: failed to map"), OSError("cannot"), MemoryError()])
def test_a_torch_that_cannot_be_loaded_is_one_line(
    kvcalc: Any, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    class Broken:
        def find_spec(self, name: str, path: object = None, target: object = None) -> None:
            if name == "kvcalc.measure.runner":
                raise error

    monkeypatch.delitem(sys.modules, "kvcalc.measure.runner", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    if "kvcalc.measure" in sys.modules:
        monkeypatch.delattr(sys.modules["kvcalc.measure"], "runner", raising=False)
    result = kvcalc("measure", "gpt2", "--layers", "1", "--context", "8")
    assert result.status == 1
    assert result.err.startswith("kvcalc: torch cannot be loaded: ")


def test_names_in_a_gguf_file_are_short(kvcalc: Any, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    from tests.model.gguf_writing import write as write_gguf

    path = tmp_path / "model.gguf"
    for pairs, tensors in (({"x" * 1100: 1}, {}), ({"block_count": 1}, {"t" * 1100: ((32,), "F32")})):
        write_gguf(path, "llama", pairs, tensors)
        result = kvcalc("estimate", path)
        assert result.status == 2
        assert "damaged" in result.err


def test_a_header_or_an_index_of_millions_of_values_takes_little_memory(tmp_path: Path) -> None:
    """The values are counted before the JSON is parsed."""
    tensor = b'"%08d":{"dtype":"U8","shape":[1,1],"data_offsets":[0,0]},'
    header = b"{" + b"".join(tensor % number for number in range(250_000))[:-1] + b"}"
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    code = f"""
from kvcalc.errors import UsageError
from kvcalc.model.checkpoint import read_checkpoint
try:
    read_checkpoint({str(tmp_path)!r})
except UsageError as error:
    print(error)
print({PEAK})
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    said, peak = done.stdout.splitlines()
    assert said.endswith("more than 1,500,000 values, the maximum")
    assert int(peak) < 100_000
    with (tmp_path / INDEX).open("wb") as file:
        file.truncate(MAX_INDEX_BYTES + 1)
    with pytest.raises(UsageError, match="at most 67,108,864 are read"):
        read_checkpoint(str(tmp_path))
