"""Where the facts of an answer come from, for `--explain`: config, engine source, data sheet and logs."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import TYPE_CHECKING

from kvcalc.engines.declarations import has_table, table
from kvcalc.model.facts import Facts
from kvcalc.model.presets import find_preset
from kvcalc.model.reader import ConfigReader
from kvcalc.model.resolve import load_model, spec_of
from kvcalc.throughput.hardware import gpus_folder

if TYPE_CHECKING:
    import kvcalc.documents as documents
    from kvcalc.model.spec import ModelSpec
    from kvcalc.question.question import Question


def sources_of(question: Question, document: documents.Estimate | documents.FitDocument) -> documents.Sources:
    """The sources of a document that answers a question."""
    engine, hardware = document["engine"]["name"], document["hardware"]
    has_reserve = document["fit"] is not None and any(line["estimated"] for line in document["fit"]["lines"] or ())
    return {
        "model": _model(question.model, document["model"]["source"]),
        "engine": _engine(engine) if has_table(engine, "sources") else None,
        "device": None if hardware is None else _device(hardware),
        "reserve": _reserve(engine) if has_reserve and has_table(engine, "reserve_logs") else None,
    }


def _model(spec: ModelSpec, source: str) -> documents.SourcesModel:
    """The file of a model, and the keys of its config that were read. A config on stdin cannot be read again."""
    preset = find_preset(spec.reference or spec.name) or find_preset(spec.name)
    facts = Facts()
    if preset is not None:
        facts = facts_of(partial(spec_of, preset))
    elif os.path.exists(spec.reference):
        facts = facts_of(partial(load_model, spec.reference))
    return {
        "file": None if preset is None else preset.path if preset.is_users else _shipped(preset.path, "models"),
        "source": source,
        "date": None if preset is None else preset.date,
        "config": [{"key": key, "value": value, "is_default": default} for key, value, default in facts.shown()],
    }


def facts_of(read: Callable[[], ModelSpec]) -> Facts:
    """What `read` looks up in a config."""
    facts = ConfigReader.facts = Facts()
    try:
        read()
    finally:
        ConfigReader.facts = None
    return facts


def _engine(engine: str) -> documents.SourcesEngine:
    rows = table(engine, "sources")
    return {
        "release": rows["release"], "cache": rows["cache"], "reserve": rows.get("reserve"),
        "defaults": rows.get("defaults"),
    }  # fmt: skip


def _device(hardware: documents.Hardware) -> documents.SourcesDevice:
    path = os.path.join(gpus_folder(), f"{hardware['name']}.yaml")
    file = _shipped(path, "gpus") if os.path.exists(path) else None
    return {"file": file, "source": hardware["source"], "date": hardware["date"]}


def _reserve(engine: str) -> documents.SourcesReserve:
    """The logs behind the estimated parts of a device's memory, and the errors of those that set no constant."""
    rows = table(engine, "reserve_logs")
    errors = [abs(log["error"]) for log in rows["logs"] if not log["sets_constant"]]
    return {
        "low_factor": rows["low_factor"], "high_factor": rows["high_factor"], "num_tested": len(errors),
        "within_range": rows["within_range"], "median_error": median(errors), "largest_error": max(errors),
        "logs": rows["logs"],
    }  # fmt: skip


def _shipped(path: str, kind: str) -> str:
    """The path of a shipped file as the repository has it, wherever it is installed."""
    return f"presets/{kind}/{os.path.basename(path)}"
