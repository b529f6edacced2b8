"""How many bytes each engine allocates for a workload. Each engine is one class in a folder of its own.

To add an engine, add a folder with a subclass of `Engine` in its module `engine`, and with its declaration,
`engine.yaml` (`declarations.py`). This module loads neither, for the options alone need no engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from importlib import import_module
from typing import TYPE_CHECKING

from kvcalc.engines.declarations import ENGINES as ENGINES
from kvcalc.engines.declarations import LOGS as LOGS
from kvcalc.engines.declarations import OPTIONS
from kvcalc.engines.declarations import SERVERS as SERVERS
from kvcalc.engines.options import check_settings
from kvcalc.errors import ModelError, UsageError, nearest

if TYPE_CHECKING:
    from kvcalc.engines.command import StartCommand
    from kvcalc.engines.engine import Engine, Resolved
    from kvcalc.engines.log import LogReader
    from kvcalc.engines.reserve import Reserve, ReserveInputs
    from kvcalc.engines.scheduler import Disaggregation
    from kvcalc.model.spec import ModelSpec
    from kvcalc.notes import Note
    from kvcalc.releases import Release, RequestedRelease

# The code of the note that says which release's rules count.
RELEASE = "release"


def load_engine(name: str, spec: ModelSpec, settings: Mapping[str, str] | None = None, stages: int = 1) -> Engine:
    """The engine `name` for `spec`, cut into `stages` pipeline stages, with the engine's own `settings`.

    `settings` maps option names to text. `name` may end in a release: `vllm@0.11`. A note says if the rules of another
    release than that count. For encoder models, every engine except `logical` keeps no cache. Raises UsageError (exit
    2) for an unknown name, something that is not a release, or a setting the engine does not have, and ModelError (exit
    3) for a model whose layout in the engine is not modelled. LayoutError is a release without a class for the model.
    """
    engine, requested = _class_of(name, spec.model_type)
    name, is_named, _ = name.partition("@")
    settings = settings or {}
    check_settings([name], settings, has_device=True)
    notes: tuple[Note, ...] = ()
    if requested is not None and requested.release is not None:
        from kvcalc.engines.classes import class_notes

        _check_since(engine, settings, requested.release)
        notes = class_notes(engine, spec, requested)
    if spec.model_type in engine.unread:
        raise ModelError(f"{spec.name}: {engine.title}'s layout of {spec.model_type} is not modelled")
    if not spec.is_encoder or engine.is_formula:
        loaded = engine(spec, settings, stages, requested.text if requested else None)
        if requested is not None:
            if is_named:
                loaded.notes = (*notes, *loaded.notes, *_release_notes(loaded, requested))
            loaded.version = requested.text
        return loaded
    from kvcalc.engines.engine import NoCache
    from kvcalc.notes import Note

    engine.check_encoder(spec, settings)
    nothing = NoCache(spec, settings, 1, None)
    nothing.of, nothing.name, nothing.title = engine, name, engine.title
    nothing.version = requested.text if requested else engine.version
    if engine.pools_for_encoders:
        text = "may reserve a pool for encoders; its size depends on the memory, not on the request"
        text = f"{engine.pools_for_encoders} {text}"
        nothing.notes = (Note("engine", "encoder-pool", text),)
    return nothing


def resolve_kv_dtype(
    name: str,
    spec: ModelSpec,
    dtype_name: str,
    settings: Mapping[str, str] | None = None,
    dtype: str | None = None,
    device_class: str | None = None,
) -> Resolved:
    """The cache's dtype as engine `name` resolves `dtype_name`, and the reason (`Engine.kv_dtype`).

    `name` may end in a release. `device_class` is the kind of device, None if there is none. Raises UsageError (exit 2)
    for an unknown engine or release.
    """
    from kvcalc.engines.place import Place

    engine, release = _class_of(name)
    place = Place(release.release if release else None, device_class)
    return engine.kv_dtype(spec, dtype_name, settings or {}, dtype, place)


def engine_class(name: str, model_type: str = "") -> type[Engine]:
    """The class of engine `name`, which may end in a release, for a type of model (empty: any).

    Raises UsageError (exit 2), with the nearest names, for an unknown engine.
    """
    return _class_of(name, model_type)[0]


def disaggregation_of(name: str) -> Disaggregation:
    """What separate instances of engine `name` need, which may end in a release (`Engine.disaggregation`).

    Raises UsageError (exit 2) if the engine has no separate prefill and decode instances.
    """
    disaggregation = engine_class(name).disaggregation()
    if disaggregation is None:
        have = engines_that(lambda engine: engine.disaggregation())
        text = f"--disaggregate: {name.partition('@')[0]} has no separate prefill and decode instances"
        raise UsageError(text, f"--engine {', '.join(have)}")
    return disaggregation


def engines_that(have: Callable[[type[Engine]], object]) -> list[str]:
    """The names of the engines of which something is true, for a hint. Imports all engines."""
    return [name for name in ENGINES if have(engine_class(name))]


def reserve_of(engine: Engine, question: ReserveInputs) -> Reserve:
    """The memory that `engine` does not give to the cache. Raises UsageError (exit 2) for a setting out of range."""
    reserve = engine.reserve(question)
    if question.is_apple:
        from kvcalc.engines.reserve import GIB, RESERVE, Held

        # Metal's recommendedMaxWorkingSetSize: two thirds of up to 32 GB (10,922.67 MiB of 16: llama-cpp-python#687;
        # 21,845.34 of 32: ollama#434), three quarters of more (49,152 of 64: llama.cpp#1870; 73,728 of 96: #3213).
        share, percent = (3, 33) if question.memory_bytes <= 32 * GIB else (4, 25)
        held = -(-question.memory_bytes // share)
        reserve.held.append(Held(RESERVE, f"reserved by macOS ({percent} %)", held))
    return reserve


def log_reader(name: str) -> LogReader:
    """What reads the start-up log of engine `name`, which is one of `LOGS`."""
    reader: LogReader = import_module(f"kvcalc.engines.{ENGINES[name][0]}.log").LOG
    return reader


def context_limits(name: str, spec: ModelSpec) -> tuple[int | None, int | None]:
    """The context of a server of engine `name`, which may end in a release, and the longest that it accepts.

    Both are None if the config does not say how many positions the model has.
    """
    engine, release = _class_of(name)
    return engine.context_limits(spec, release.release if release else None)


def start_command(name: str) -> StartCommand:
    """How engine `name` is started, which is one of `SERVERS` and may end in a release."""
    command: StartCommand = import_module(f"kvcalc.engines.{command_key(name)}.command").COMMAND
    return command


def command_key(name: str) -> str:
    """The key of a plan's row for the command of engine `name`, which may end in a release."""
    return ENGINES[name.partition("@")[0]][0]


def _check_since(engine: type[Engine], settings: Mapping[str, str], release: Release) -> None:
    """Raise UsageError (exit 2) for an option that the requested release does not have."""
    for option in OPTIONS[engine.name] if settings else ():
        if option.since and option.name in settings and release < release.of(*map(int, option.since.split("."))):
            text = f"--{option.name}: this release of {engine.title} has no such flag"
            raise UsageError(text, f"it is in {engine.title} {option.since} and later")


def _release_notes(engine: Engine, requested: RequestedRelease) -> list[Note]:
    """A note if `engine` counts by the rules of another release than the one that was asked for."""
    from kvcalc.notes import Note

    rules = None if requested.is_placed and requested.release is None else engine.rules_used(requested)
    if rules is None:
        return []
    text = f"{engine.name}@{requested.text} counts by the rules read from {rules}"
    if not requested.is_placed:
        text += "; the place of this name among the releases is not known"
    return [Note("engine", RELEASE, text + engine.older_rules)]


@lru_cache(maxsize=256)
def _class_of(asked: str, model_type: str = "") -> tuple[type[Engine], RequestedRelease | None]:
    """The engine class for a model type, and the release of `split_engine`."""
    from kvcalc.engines.engine import imported
    from kvcalc.releases import split_engine

    name, _, text = asked.partition("@")
    if name not in ENGINES:
        raise UsageError(f"--engine {name!r}: not an engine", nearest(name, ENGINES) or f"one of {', '.join(ENGINES)}")
    folder, class_name = ENGINES[name]
    engine = imported(f"{folder}.engine", class_name)
    if engine.is_formula and text.strip():
        raise UsageError(f"--engine {name}@{text[:20]}: the formula has no releases", f"write {name}")
    release = split_engine(asked)[1]
    return engine.at(model_type, release.release if release else None), release
