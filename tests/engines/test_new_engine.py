"""An engine is one folder: nothing else in kvcalc has to know it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import kvcalc
import kvcalc.engines
from kvcalc.engines import ENGINES, declarations
from kvcalc.engines.declarations import OPTIONS, declare
from kvcalc.errors import UsageError

DECLARED = """\
name: oak
class: Oak
place: 8
options:
  oak-page: {metavar: N, most: sequences, help: tokens per page, default: '16'}
"""
CODE = '''"""Oak, an engine with pages."""

from kvcalc.engines.engine import Engine, SettingsReader
from kvcalc.engines.reserve import Reserve
from kvcalc.memory.curves import stored_cache_bytes


class Oak(Engine):
    """Counts whole pages."""

    name, title, version = "oak", "Oak", "1.0"

    def __init__(self, spec, settings, stages, release):
        super().__init__(spec, settings, stages, release)
        self.page = SettingsReader(self.name, settings).count("oak-page")

    def cache_bytes(self, cache, tokens, dtype):
        return stored_cache_bytes(cache, -(-tokens // self.page) * self.page, dtype)

    def growth_tokens(self, share, dtype):
        return self.page

    def reserve(self, question):
        return Reserve([], {})
'''


@pytest.fixture
def oak(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """The folder of an engine, declared as those of the package are."""
    folder = tmp_path / "oak"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "engine.py").write_text(CODE)
    monkeypatch.setattr(kvcalc.engines, "__path__", [*kvcalc.engines.__path__, str(tmp_path)])
    for table in (ENGINES, OPTIONS):
        monkeypatch.setitem(table, "oak", ())  # so that it is removed again
    declare("oak", yaml.safe_load(DECLARED))
    yield
    for name in ("kvcalc.engines.oak", "kvcalc.engines.oak.engine"):
        sys.modules.pop(name, None)


@pytest.mark.usefixtures("oak")
def test_an_engine_is_one_folder() -> None:
    spec = kvcalc.load_model("llama-7b")
    token = 2 * 32 * 32 * 128 * 2
    asked: dict[str, Any] = {"context_tokens": 100, "engine": "oak"}
    assert kvcalc.estimate(spec, **asked)["kv_cache"]["total_bytes"] == 112 * token
    larger = kvcalc.estimate(spec, **asked, engine_settings={"oak-page": "64"})
    assert larger["kv_cache"]["total_bytes"] == 128 * token
    (point,) = kvcalc.sweep(spec, contexts=[100], engines=["oak"])["points"]
    assert point["total_bytes"] == 112 * token
    found = kvcalc.estimate(spec, devices=kvcalc.find_devices("h100"), **asked)
    assert found["fit"] is not None
    assert (found["fit"]["kv_cache_bytes"], found["fit"]["fits"]) == (112 * token, True)
    # Nobody has measured it.
    assert found["throughput"] is None
    assert any("the speed of oak is not known" in note["text"] for note in found["warnings"])


@pytest.mark.usefixtures("oak")
def test_it_takes_the_options_that_it_declares() -> None:
    spec = kvcalc.load_model("llama-7b")
    with pytest.raises(UsageError, match="--block-size: oak has no such setting"):
        kvcalc.estimate(spec, engine="oak", engine_settings={"block-size": "32"})
    with pytest.raises(UsageError, match="--oak-page: vllm has no such setting") as caught:
        kvcalc.estimate(spec, engine="vllm", engine_settings={"oak-page": "32"})
    assert caught.value.hint == "--oak-page belongs to oak"
    for value, said in (("0", "at least 1"), (str(2**31), "at most 2,147,483,647")):
        with pytest.raises(UsageError, match=f"--oak-page {value}: must be {said}"):
            kvcalc.estimate(spec, engine="oak", engine_settings={"oak-page": value})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("option", {}), ("clas", "Oak"), ("options", {"oak-page": {"metvar": "N", "help": "tokens"}}),
        ("options", {"oak-page": {"metavar": "N", "help": "tokens", "most": "pages"}}),
    ],
)  # fmt: skip
def test_a_mistake_in_a_declaration_is_refused(key: str, value: object) -> None:
    """`presets/compile.py` reads every declaration with this code, so that a typo fails the build."""
    before = dict(declarations.ENGINES)
    with pytest.raises((TypeError, ValueError), match=r"has no|unexpected keyword"):
        declare("oak", {"name": "oak", "class": "Oak", "place": 8, key: value})
    assert before == declarations.ENGINES


@pytest.mark.usefixtures("oak")
def test_an_unknown_engine_is_still_refused() -> None:
    with pytest.raises(UsageError, match="oal"):
        kvcalc.estimate(kvcalc.load_model("llama-7b"), engine="oal")
