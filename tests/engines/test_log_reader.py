"""An engine's module `log` and its lines in log.yaml are all that an audit needs of it."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest
import yaml

import kvcalc
from kvcalc.engines import ENGINES
from kvcalc.engines.declarations import table
from kvcalc.engines.log import LogReader, Reading, Setup
from kvcalc.engines.log_lines import Figure, Log, lines_of
from kvcalc.engines.logical.engine import Logical
from kvcalc.errors import UsageError
from kvcalc.planning.audit import audit
from presets.check import check_engines
from tests.test_borders import loaded_by, run

LOG = "acorn 1.2 --tp 2 --cache-type small\ncache of 64 tokens: 4.0 MiB\nlost cache of 3 tokens\n"


LINES = r"""
parts: {whole: '\d+'}
facts:
  tensor_parallel_size: [{option: --tp}]
  kv_dtype: [{option: --cache-type}]
records:
  cache: [{text: cache of, pattern: ['^cache of (?P<tokens>{{whole}}) tokens: ', '(?P<size>[\d.]+ MiB)']}]
pool_words: [cache of]
types: {small: fp8}
"""


class AcornLog(LogReader):
    def readings(self, log: Log, spec: kvcalc.ModelSpec) -> Iterator[Reading]:
        yield Reading({}, ("acorns",), self.check)

    @staticmethod
    def check(log: Log, setup: Setup) -> list[Figure]:
        (record,) = log.named("cache")
        size = setup.engine.held_bytes(setup.share, setup.dtype, int(record.parts["tokens"]), 1)
        return [record.check_size("size", "cache_bytes", size, "the formulas' bytes")]


@pytest.fixture
def _acorn(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that nothing else in kvcalc names."""
    room, module = ModuleType("kvcalc.engines.acorn.engine"), ModuleType("kvcalc.engines.acorn.log")
    room.Acorn, module.LOG = type("Acorn", (Logical,), {"name": "acorn", "title": "Acorn"}), AcornLog()  # type: ignore[attr-defined]
    for one in (ModuleType("kvcalc.engines.acorn"), room, module):
        monkeypatch.setitem(sys.modules, one.__name__, one)
    monkeypatch.setitem(ENGINES, "acorn", ("acorn", "Acorn"))
    monkeypatch.setattr("kvcalc.planning.logs.LOGS", ("vllm", "acorn"))
    monkeypatch.setattr(
        "kvcalc.engines.log_lines.table",
        lambda engine, name: yaml.safe_load(LINES) if engine == "acorn" else table(engine, name),
    )


@pytest.mark.usefixtures("_acorn")
def test_an_engine_is_audited_by_its_own_reader() -> None:
    # 32 layers x 16 of 32 heads x (128 + 128) elements of one byte: 131,072 bytes for a token, 8 MiB for 64.
    document = audit(LOG.replace("4.0", "8.0"), "log", model=kvcalc.load_model("llama-7b"))
    assert (document["engine"]["name"], document["engine"]["rules"]) == ("acorn", ["acorns"])
    assert (document["workload"]["tensor_parallel_size"], document["workload"]["kv_dtype"]) == (2, "fp8")
    assert [figure["computed"] for figure in document["figures"]] == [8 * 2**20]
    assert (document["equal"], document["explanation"]) == (1, None)
    assert [line["text"] for line in document["unread"]] == ["lost cache of 3 tokens"]


@pytest.mark.usefixtures("_acorn")
def test_a_size_that_a_setting_explains_is_named() -> None:
    document = audit(LOG, "log", model=kvcalc.load_model("llama-7b"))
    assert (document["unexplained"], document["explanation"]) == (1, "all numbers are equal with --tp 4")


def test_a_mistake_in_the_lines_of_a_log_stops_the_build(monkeypatch: pytest.MonkeyPatch) -> None:
    """`presets/compile.py` checks them with this code."""

    def lines(text: str) -> None:
        monkeypatch.setattr("kvcalc.engines.log_lines.table", lambda engine, name: yaml.safe_load(text))
        lines_of.cache_clear()
        check_engines()

    try:
        lines(LINES)
        for wrong in (LINES.replace("{{whole}}", "{{wole}}"), LINES.replace("pattern:", "patern:"), LINES + "fact: 1",
                      LINES.replace("?P<size>", "?:").replace("?P<tokens>", "?:"), LINES.replace("[{option: --tp}]",
                      "[{text: tp, pattern: '(?P<val>x)'}]"), LINES.replace("MiB)", "MiB")):  # fmt: skip
            with pytest.raises((KeyError, TypeError, ValueError, re.error)):
                lines(wrong)
    finally:
        lines_of.cache_clear()


def test_only_an_audit_loads_what_reads_logs() -> None:
    def readers(*arguments: str) -> set[str]:
        return {name for name in loaded_by(run(*arguments)) if ".log" in name and name.startswith("kvcalc.engines.")}

    assert not readers("estimate", "llama-3-70b", "--engine", "vllm", "--json")
    vllm = readers("audit", "tests/logs/vllm.log", "--engine", "vllm", "--json")
    assert {name.split(".")[2] for name in vllm} == {"log", "log_lines", "vllm"}


def test_a_log_of_tpus_is_not_judged_by_the_rules_of_gpus() -> None:
    log = "Initializing a V1 LLM engine: device_config=tpu, max_seq_len=1024\nGPU KV cache size: 512 tokens\n"
    with pytest.raises(UsageError, match="TPUs"):
        audit(log, "log", model=kvcalc.load_model("llama-3.1-8b"))
