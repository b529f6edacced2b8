"""`kvcalc models --add`: a published config is kept among the user's presets, under its name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import kvcalc
from kvcalc.errors import KvcalcError, ModelError, RunError, UsageError
from kvcalc.model import hub, kept
from kvcalc.model.hub import HubConfig
from kvcalc.model.resolve import load_model, spec_of
from tests.conftest import spawn

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "hidden_size": 64, "intermediate_size": 128, "vocab_size": 1000, "rms_norm_eps": 1e-05,
    "max_position_embeddings": 4096, "torch_dtype": "bfloat16", "a_key_of_tomorrow": {"one": [1, 2.5, None, "0x1_0"]},
}  # fmt: skip


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for presets that does not exist yet."""
    folder = tmp_path / "presets"
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "nobody"))
    monkeypatch.setenv("KVCALC_PRESETS", str(folder))
    return folder


def published(folder: Path, config: object = CONFIG, name: str = "House-7B") -> Path:
    path = folder / name / "config.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(config))
    return path


def test_a_kept_model_is_the_one_at_the_path(tmp_path: Path, own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = published(tmp_path)
    own.mkdir()
    preset = kept.keep_config(str(path.parent))
    assert (preset.name, preset.path, preset.config) == ("House-7B", str(own / "House-7B.yaml"), CONFIG)
    by_name, by_path = kvcalc.estimate("house-7b"), kvcalc.estimate(str(path))
    assert by_name["kv_cache"] == by_path["kv_cache"]
    assert by_name["weights"] == by_path["weights"]


def test_the_folder_is_made_if_it_is_the_default_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVCALC_PRESETS", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    preset = kept.keep_config(str(published(tmp_path)))
    assert preset.path == str(tmp_path / "config" / "kvcalc" / "presets" / "House-7B.yaml")
    assert load_model("house-7b").num_layers == 2


def test_a_model_of_the_hub_is_known_by_its_id_too(tmp_path: Path, own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own.mkdir()
    path = published(tmp_path)
    found = HubConfig(str(path), "org/House-7B", "hf:org/House-7B@0123")
    monkeypatch.setattr(hub, "fetch_config", lambda reference, most_bytes: found)
    preset = kept.keep_config("hf:org/House-7B")
    assert (preset.name, preset.aliases, preset.source) == ("House-7B", ("org/House-7B",), "hf:org/House-7B@0123")
    assert load_model("org/House-7B").num_layers == 2


@pytest.mark.parametrize(
    ("change", "kind"),
    [({"model_type": "unheard_of"}, ModelError), ({"hidden_size": None}, ModelError), ({"kv_heads": 3}, ModelError)],
)
def test_a_config_that_is_not_understood_is_not_kept(
    tmp_path: Path, own: Path, change: dict[str, object], kind: type[KvcalcError]
) -> None:
    own.mkdir()
    with pytest.raises(kind):
        kept.keep_config(str(published(tmp_path, {**CONFIG, **change})))
    assert not list(own.iterdir())


def test_a_preset_of_the_user_is_not_replaced(tmp_path: Path, own: Path) -> None:
    own.mkdir()
    path = published(tmp_path)
    kept.keep_config(str(path))
    before = (own / "House-7B.yaml").read_text()
    with pytest.raises(UsageError, match="among your presets"):
        kept.keep_config(str(path))
    assert (own / "House-7B.yaml").read_text() == before


def test_a_name_that_no_file_can_have_is_refused(tmp_path: Path, own: Path) -> None:
    own.mkdir()
    with pytest.raises(UsageError, match="cannot be a preset's name"):
        kept.keep_config(str(published(tmp_path, name="my model")))


def test_a_folder_that_cannot_be_written_is_a_run_time_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCALC_PRESETS", str(tmp_path))
    monkeypatch.setattr(kept, "write_file", lambda data, path: (_ for _ in ()).throw(RunError("disk full", None)))
    with pytest.raises(RunError):
        kept.keep_config(str(published(tmp_path / "sub")))


def test_a_misspelt_key_of_a_written_preset_is_still_refused(tmp_path: Path, own: Path) -> None:
    own.mkdir()
    preset = kept.keep_config(str(published(tmp_path)))
    with pytest.raises(ModelError, match="is not a key of model_type llama"):
        spec_of(preset._replace(as_published=False))


def test_the_command_prints_the_preset_and_its_file(tmp_path: Path, own: Path) -> None:
    own.mkdir()
    path = published(tmp_path)
    done = spawn("models", "--add", str(path.parent), "--get", "file")
    assert (done.status, done.out.strip()) == (0, str(own / "House-7B.yaml"))
    assert spawn("models", "llama", "--add", str(path)).status == 2
