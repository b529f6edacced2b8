"""A user's own presets: found, in the place of shipped ones, and no harm to anything else where they are broken."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from kvcalc.errors import KvcalcError, ModelError, UsageError
from kvcalc.model import presets
from kvcalc.model.files import read_text
from kvcalc.model.presets import find_preset, list_presets
from kvcalc.model.resolve import load_model
from tests.conftest import spawn
from tests.documents import texts

TEXT = """\
name: {name}
aliases: [{aliases}]
source: https://example.com/config.json
date: 2024-01-31
config:
  model_type: llama
  num_hidden_layers: {layers}
  num_attention_heads: 4
  hidden_size: 64
"""


def put(folder: Path, name: str, *aliases: str, layers: int = 2, file: str | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / (file or f"{name}.yaml")
    path.write_text(TEXT.format(name=name, aliases=", ".join(aliases), layers=layers))
    return path


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder which KVCALC_PRESETS names."""
    folder = tmp_path / "own"
    folder.mkdir()
    monkeypatch.setenv("KVCALC_PRESETS", str(folder))
    return folder


def test_one_is_found_by_name_and_alias_in_any_case(own: Path) -> None:
    path = put(own, "house-7b", "org/House-7B")
    for name in ("house-7b", "House-7B", "org/House-7B", "ORG/house-7b"):
        found = find_preset(name)
        assert found is not None
        assert (found.name, found.path, found.is_users, found.family) == ("house-7b", str(path), True, None)


def test_a_file_name_may_have_capitals(own: Path) -> None:
    put(own, "House-7B")
    assert load_model("house-7b").name == "House-7B"


def test_it_takes_the_place_of_a_shipped_one_aliases_included(own: Path, kvcalc: Any) -> None:
    path = put(own, "llama-3-70b", layers=3)
    assert load_model("llama-3-70b").num_layers == 3
    assert load_model("meta-llama/Meta-Llama-3-70B").num_layers == 3
    assert load_model("llama-3-8b").num_layers == 32
    rows = [row for row in kvcalc("models", "--json").json["models"] if row["name"] == "llama-3-70b"]
    assert [(row["file"], row["num_layers"]) for row in rows] == [(str(path), 3)]
    assert kvcalc("models", "show", "llama-3-70b", "--json").json["file"] == str(path)
    assert kvcalc("models", "show", "llama-3-8b", "--json").json["file"] is None
    human = kvcalc("models", "show", "llama-3-70b", "--format", "human").out
    assert f"your own, in {path}" in human.replace("\n", "")
    assert "llama-3-70b *" in kvcalc("models", "--format", "human").out


def test_several_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path / "a", "one")
    put(tmp_path / "b", "two")
    monkeypatch.setenv("KVCALC_PRESETS", os.pathsep.join([str(tmp_path / "a"), "", str(tmp_path / "b")]))
    assert load_model("one").name == "one"
    assert load_model("two").name == "two"


@pytest.mark.parametrize("variable", ["XDG_CONFIG_HOME", "HOME"])
def test_the_config_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    base = tmp_path if variable == "XDG_CONFIG_HOME" else tmp_path / ".config"
    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.setenv(variable, str(tmp_path))
    put(base / "kvcalc" / "presets", "house-7b")
    assert load_model("house-7b").name == "house-7b"
    # The variable names other folders, and then only these.
    other = tmp_path / "other"
    put(other, "two")
    monkeypatch.setenv("KVCALC_PRESETS", str(other))
    assert find_preset("house-7b") is None


def test_a_relative_config_home_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path / "here" / "kvcalc" / "presets", "house-7b")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", "here")
    monkeypatch.setenv("HOME", str(tmp_path / "empty"))
    assert find_preset("house-7b") is None


def test_windows_looks_in_appdata(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvcalc.model import preset_folders

    put(tmp_path / "kvcalc" / "presets", "house-7b")
    monkeypatch.setattr("kvcalc.model.preset_folders.sys.platform", "win32")
    monkeypatch.setenv("APPDATA", str(tmp_path))
    assert [name for name, _ in preset_folders.user_files()] == ["house-7b"]


def test_a_folder_that_is_named_must_be_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for bad, why in ((tmp_path / "no", "No such file"), (put(tmp_path, "x"), "Not a directory")):
        monkeypatch.setenv("KVCALC_PRESETS", str(bad))
        with pytest.raises(UsageError, match=f"KVCALC_PRESETS: .*{why}"):
            load_model("gpt2")
        # A path needs no presets.
        assert load_model(str(put(tmp_path, "tiny"))).name == "tiny"


def test_a_name_costs_one_file_with_presets_of_ones_own_too(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(own, "house-7b")
    (own / "broken.yaml").write_text("name: [")
    read: list[str] = []

    def read_and_count(path: str, most: int) -> str:
        read.append(path)
        return read_text(path, most)

    monkeypatch.setattr(presets, "read_text", read_and_count)
    for name in ("llama-3-70b", "house-7b"):
        read.clear()
        assert find_preset(name) is not None
        assert len(read) == 1


@pytest.mark.long
@pytest.mark.parametrize(
    "text", ["name: [", "", "- 1\n", "name: broken\n", TEXT.format(name="other", aliases="", layers=2)]
)
def test_a_broken_file_harms_no_other_model(own: Path, kvcalc: Any, text: str) -> None:
    put(own, "house-7b", "org/House-7B")
    broken = own / "broken.yaml"
    broken.write_text(text)
    for name in ("house-7b", "org/House-7B", "gpt2", "openai-community/gpt2"):
        assert kvcalc("estimate", name, "--get", "kv_cache.dtype").status == 0
    for format, shown in (("human", "house-7b *"), ("tsv", "house-7b\t")):
        result = kvcalc("models", "--format", format)
        assert result.status == 0
        assert shown in result.out
        assert result.err.startswith("warning: left out: ")
        assert result.err.count("\n") == 1
        assert str(broken) in result.err
    # Asked for by its own name it is an error, and an unknown name's hint says that a file was not read.
    assert kvcalc("estimate", "broken").status in (2, 3)
    assert str(broken) in kvcalc("estimate", "nobody").err


def test_a_config_that_is_not_understood_is_left_out_of_the_list(own: Path, kvcalc: Any) -> None:
    path = put(own, "house-7b", layers=-1)
    document = kvcalc("models", "--json").json
    assert "house-7b" not in [row["name"] for row in document["models"]]
    assert [str(path) in warning and "num_hidden_layers" in warning for warning in texts(document)] == [True]


def test_a_fifo_among_the_files_is_passed_over(own: Path) -> None:
    os.mkfifo(own / "pipe.yaml")
    assert find_preset("openai-community/gpt2") is not None
    assert [Path(problem.path).name for problem in list_presets().problems] == ["pipe.yaml"]


def test_two_files_of_one_name_are_an_error_that_names_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = put(tmp_path / "a", "house"), put(tmp_path / "b", "house")
    monkeypatch.setenv("KVCALC_PRESETS", f"{tmp_path / 'a'}{os.pathsep}{tmp_path / 'b'}")
    with pytest.raises(UsageError) as caught:
        load_model("house")
    assert str(one) in caught.value.message
    assert str(two) in caught.value.message
    assert load_model("gpt2").name == "gpt2"


def test_two_files_with_one_alias_are_an_error_that_names_both(own: Path) -> None:
    one, two = put(own, "house", "org/House"), put(own, "home", "ORG/house")
    with pytest.raises(UsageError) as caught:
        load_model("org/House")
    assert str(one) in caught.value.message
    assert str(two) in caught.value.message
    assert load_model("house").name == "house"
    (problem,) = list_presets().problems
    assert str(one) in problem.error.message
    assert str(two) in problem.error.message


def test_a_name_goes_before_an_alias(own: Path) -> None:
    put(own, "house", "gpt2")
    assert load_model("gpt2").num_layers == 12


def test_no_folder_no_cost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvcalc.model.preset_folders import user_files

    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert user_files() == []


def check(kvcalc: Any, *paths: Path) -> tuple[int, list[dict[str, Any]]]:
    result = kvcalc("models", "check", *paths, "--json")
    assert result.json["exit_code"] == result.status
    return result.status, result.json["files"]


def test_check_says_ok_or_what_is_wrong_a_line_each(tmp_path: Path, kvcalc: Any) -> None:
    good = put(tmp_path, "house", "org/House")
    misspelt = put(tmp_path, "home")
    misspelt.write_text(misspelt.read_text().replace("hidden_size", "hiden_size"))
    result = kvcalc("models", "check", good, misspelt, tmp_path / "no.yaml", "--format", "human")
    assert result.status == 3
    lines = result.out.splitlines()
    assert len(lines) == 3
    assert lines[0] == f"{good}: ok"
    assert lines[1].startswith(f"{misspelt}: ")
    assert "hiden_size" in lines[1]
    assert lines[2] == f"{tmp_path / 'no.yaml'}: No such file or directory"


@pytest.mark.parametrize(
    ("name", "aliases", "file", "status", "error"),
    [
        ("house", (), None, 0, None),
        ("llama-3-70b", ("meta-llama/Meta-Llama-3-70B",), None, 0, None),
        ("house", (), "home.yaml", 3, "the preset's name is 'house', but the file's is 'home'"),
        ("house", ("GPT2",), None, 2, "'gpt2' is also a name of the shipped preset gpt2"),
        ("house", ("openai/GPT-oss-20b",), None, 2, "also a name of the shipped preset gpt-oss-20b"),
        ("gpt2-small", (), None, 2, "'gpt2-small' is also a name of the shipped preset gpt2"),
    ],
)
def test_check_compares_names(
    tmp_path: Path, kvcalc: Any, name: str, aliases: tuple[str, ...], file: str | None, status: int, error: str | None
) -> None:
    got, (row,) = check(kvcalc, put(tmp_path, name, *aliases, file=file))
    assert (got, row["ok"]) == (status, status == 0)
    assert error is None or error in row["error"]


def test_check_finds_clashes_among_the_files(tmp_path: Path, kvcalc: Any) -> None:
    one, two = put(tmp_path, "house", "org/House"), put(tmp_path, "home", "org/house")
    status, rows = check(kvcalc, one, two)
    assert (status, [row["ok"] for row in rows]) == (2, [True, False])
    assert str(one) in rows[1]["error"]


def test_check_without_a_file_is_a_usage_error(kvcalc: Any) -> None:
    assert kvcalc("models", "check").status == 2


def test_the_manuals_own_preset_is_a_good_one(tmp_path: Path, kvcalc: Any) -> None:
    import re

    from tests.conftest import ROOT

    (text,) = re.findall(
        r"```yaml\n(.*?)```", (ROOT / "docs" / "reference" / "models-and-presets.md").read_text(), re.DOTALL
    )
    path = tmp_path / "my-model.yaml"
    path.write_text(text)
    assert check(kvcalc, path)[0] == 0


def test_from_another_process(own: Path) -> None:
    put(own, "house-7b", layers=5)
    result = spawn("estimate", "house-7b", "--context", "1", "--get", "kv_cache.total_bytes")
    # 2 x 5 layers x 4 heads x 16 x 2 bytes.
    assert (result.status, result.out) == (0, "1280\n")


def test_models_of_one_family(kvcalc: Any) -> None:
    rows = kvcalc("models", "--family", "QWEN", "--json").json["models"]
    assert {row["family"] for row in rows} == {"Qwen"}
    names = [row["name"] for row in rows]
    assert names.index("qwen3-8b") < names.index("qwen3-14b") < names.index("qwen3-235b-a22b")
    result = kvcalc("models", "--family", "quen")
    assert result.status == 2
    assert "Qwen" in result.err


def test_the_list_fits_80_columns_and_cuts_nothing(kvcalc: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    out = kvcalc("models", "--format", "human").out
    lines = out.splitlines()
    assert max(map(len, lines)) <= 80
    rows = [line for line in lines if line.startswith(" ")]
    assert len(rows) == len(kvcalc("models", "--json").json["models"])
    headings = {line.strip() for line in lines if not line.startswith(" ")}
    assert {row["family"] for row in kvcalc("models", "--json").json["models"]} <= headings


def test_errors_are_what_they_say(own: Path) -> None:
    (own / "bad.yaml").write_text("name: bad\nsource: x\ndate: 2024-01-01\nconfig: 3\n")
    with pytest.raises(ModelError, match="config must be a mapping") as caught:
        load_model("bad")
    assert isinstance(caught.value, KvcalcError)
    assert str(own / "bad.yaml") in caught.value.message
