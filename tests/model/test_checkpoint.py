"""The bytes of a folder's safetensors files, by their headers; damaged files by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvcalc.errors import UsageError
from kvcalc.model import checkpoint
from kvcalc.model.checkpoint import INDEX, StoredWeights, read_checkpoint


def write(path: Path, *sizes: int, header: Any = None, data: int | None = None) -> None:
    """A file of tensors of these sizes; `header` or the number of data bytes otherwise."""
    ends = [sum(sizes[: n + 1]) for n in range(len(sizes))]
    tensors: Any = {
        f"t{n}": {"dtype": "U8", "shape": [size], "data_offsets": [end - size, end]}
        for n, (size, end) in enumerate(zip(sizes, ends))
    }
    tensors["__metadata__"] = {"format": "pt"}
    text = json.dumps(tensors if header is None else header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        # Sparse: the data is never read.
        file.truncate(8 + len(text) + (sum(sizes) if data is None else data))


def read(folder: Path) -> StoredWeights:
    found = read_checkpoint(str(folder))
    assert found is not None
    return found


def index(folder: Path, shards: list[str], total: Any = None) -> None:
    """An index that names the first tensor of every shard (`t0`, `t1` of a shard that is named twice, ...)."""
    metadata = {} if total is None else {"total_size": total}
    places = {f"t{n}": shard for n, shard in enumerate(shards)}
    (folder / INDEX).write_text(json.dumps({"metadata": metadata, "weight_map": places}))


def test_a_folder_without_weights_has_none(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert read_checkpoint(str(tmp_path)) is None


def test_one_file_or_several(tmp_path: Path) -> None:
    write(tmp_path / "a.safetensors", 10, 20)
    write(tmp_path / "b.safetensors", 5)
    assert read(tmp_path) == StoredWeights(35, "a.safetensors")
    # Beside other forms of the same weights, the one that is loaded.
    write(tmp_path / "consolidated.safetensors", 40)
    assert read(tmp_path).bytes == 40
    for number in (1, 2):
        write(tmp_path / f"model-0000{number}-of-00002.safetensors", 8)
    assert read(tmp_path).bytes == 16
    write(tmp_path / "model.safetensors", 7)
    assert read(tmp_path) == StoredWeights(7, "model.safetensors")


@pytest.mark.parametrize(
    ("names", "trouble"),
    [
        (["model-00001-of-00017"], "1 of 17 files are there"),
        (["model-00001-of-00002", "model-00003-of-00002"], "2 of 2 files are there"),
        (["model-00002-of-00003", "model-00003-of-00003", "model-00001-of-00004"], "2 of 3 files are there"),
        (["model-00001-of-100000"], "1 of 100,000 files are there"),
        (["consolidated-00000-of-00005"], "1 of 5 files are there"),
    ],
)
def test_shards_are_complete_if_all_that_their_names_count_are_there(
    tmp_path: Path, names: list[str], trouble: str
) -> None:
    for name in names:
        write(tmp_path / f"{name}.safetensors", 10)
    assert read(tmp_path) == StoredWeights(None, f"{names[0]}.safetensors", trouble)
    # A complete form of the same weights is what a loader can load.
    write(tmp_path / "consolidated.safetensors", 99)
    assert read(tmp_path) == StoredWeights(99, "consolidated.safetensors")


def test_shards_from_0_are_complete_too(tmp_path: Path) -> None:
    for number in range(3):
        write(tmp_path / f"consolidated-0000{number}-of-00003.safetensors", 10)
    assert read(tmp_path).bytes == 30


def test_a_file_without_tensors_holds_no_weights(tmp_path: Path) -> None:
    write(tmp_path / "model.safetensors")
    assert read(tmp_path) == StoredWeights(None, "model.safetensors", "it has no tensors")


def test_an_adapter_is_not_the_weights(tmp_path: Path) -> None:
    write(tmp_path / "adapter_model.safetensors", 2048)
    remark = "adapter_model.safetensors: an adapter of 2.00 KiB, which is not counted with the model's weights"
    assert read(tmp_path) == StoredWeights(None, "adapter_model.safetensors", None, (remark,))
    write(tmp_path / "model.safetensors", 10**6)
    assert read(tmp_path) == StoredWeights(10**6, "model.safetensors", None, (remark,))


def test_the_shards_an_index_names_and_no_others(tmp_path: Path) -> None:
    write(tmp_path / "model-1.safetensors", 10, 5, 5)
    write(tmp_path / "model-2.safetensors", 10, 10)
    write(tmp_path / "consolidated.safetensors", 30)
    # A published total differs from the files' if it counts tied weights twice.
    index(tmp_path, ["model-1.safetensors", "model-2.safetensors", "model-1.safetensors"], total=999)
    assert read(tmp_path) == StoredWeights(40, INDEX)


def test_a_tensor_that_is_not_where_the_index_says_makes_it_incomplete(tmp_path: Path) -> None:
    write(tmp_path / "model-1.safetensors", 10, 10)
    write(tmp_path / "model-2.safetensors", 20)
    index(tmp_path, ["model-1.safetensors", "model-2.safetensors"], total=40)
    assert read(tmp_path) == StoredWeights(None, INDEX, "tensor 't1' is not in model-2.safetensors")


@pytest.mark.parametrize("total", [None, 1000, 1e3, 1, 1.5, "1000", -5])
def test_an_index_whose_files_are_missing_is_not_believed(tmp_path: Path, total: Any) -> None:
    write(tmp_path / "model-1.safetensors", 10)
    index(tmp_path, ["model-1.safetensors", "model-2.safetensors"], total=total)
    trouble = "model-2.safetensors of 2 files is missing, or not fetched by Git LFS"
    assert read(tmp_path) == StoredWeights(None, INDEX, trouble)
    (tmp_path / "model-1.safetensors").unlink()
    trouble = "model-1.safetensors and 1 more of 2 files are missing, or not fetched by Git LFS"
    assert read(tmp_path) == StoredWeights(None, INDEX, trouble)


def test_a_file_that_git_lfs_has_not_fetched_is_missing(tmp_path: Path) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 4976698672\n"
    (tmp_path / "model.safetensors").write_text(pointer)
    trouble = "model.safetensors is missing, or not fetched by Git LFS"
    assert read(tmp_path) == StoredWeights(None, "model.safetensors", trouble)
    index(tmp_path, ["model.safetensors"], total=4976698000)
    assert read(tmp_path) == StoredWeights(None, INDEX, trouble)


def test_headers_and_indexes_are_limited_in_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "MAX_VALUES", 100)
    monkeypatch.setattr(checkpoint, "MAX_INDEX_VALUES", 100)
    write(tmp_path / "model.safetensors", *[1] * 20)
    with pytest.raises(UsageError, match=r"model\.safetensors: more than 100 values, the maximum"):
        read(tmp_path)
    index(tmp_path, [f"{number}.safetensors" for number in range(100)])
    with pytest.raises(UsageError, match=r"index\.json: more than 100 values, the maximum"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the header's length"),
        (b"\xff" * 8, "the header's length"),
        ((2**62).to_bytes(8, "little") + b"{}", "the header's length"),
        ((2).to_bytes(8, "little") + b"\xff\xff", "not text"),
        ((2).to_bytes(8, "little") + b"{,", "not JSON"),
        ((2).to_bytes(8, "little") + b"[]", "not a JSON object"),
    ],
)
def test_damaged_files(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(UsageError, match=message) as refusal:
        read_checkpoint(str(tmp_path))
    assert "model.safetensors" in refusal.value.message
    assert "\n" not in refusal.value.message


def test_a_file_shorter_than_its_header_says(tmp_path: Path) -> None:
    write(tmp_path / "model.safetensors", 10, 20, data=29)
    with pytest.raises(UsageError, match="describes 30 bytes of tensors, the file holds 29"):
        read_checkpoint(str(tmp_path))


@pytest.mark.parametrize("offsets", [None, [1], [5, 2], ["0", 1], [-1, 3], [0, 2.0]])
def test_offsets_that_are_none(tmp_path: Path, offsets: Any) -> None:
    write(tmp_path / "model.safetensors", header={"t": {"data_offsets": offsets}})
    with pytest.raises(UsageError, match="tensor 't' has no data_offsets"):
        read_checkpoint(str(tmp_path))


@pytest.mark.parametrize(
    "places",
    [
        None, {}, {"w": "../outside.safetensors"}, {"w": 3}, {"w": ""}, {"w": ["model.safetensors"]}, {"w": "a\0b"},
        {"w": "\ud800.safetensors"},
    ],
)  # fmt: skip
def test_an_index_that_leads_nowhere(tmp_path: Path, places: Any) -> None:
    (tmp_path / INDEX).write_text(json.dumps({"metadata": {"total_size": 5}, "weight_map": places}))
    with pytest.raises(UsageError, match="weight_map"):
        read_checkpoint(str(tmp_path))
