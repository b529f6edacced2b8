"""`hf:org/name` and `hf:org/name@revision`: the config.json of a model on the Hugging Face Hub.

The one place that may touch the network, through the optional extra `hub`. The local cache comes first: what lies there
for the revision is used as it is. Else config.json alone is downloaded into that cache. Nothing a config names
(auto_map) is ever run. HF_HOME, HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE mean what they mean to huggingface_hub.
"""

from __future__ import annotations

import os
from typing import Any, NamedTuple

from kvcalc.errors import KvcalcError, ModelError, RunError, UsageError

SECONDS = 10.0
"""How long all attempts together may take."""

_FILE = "config.json"
_ID_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.")
_LONGEST_ID = 96
_OPEN_IT = "set HF_TOKEN to a token that may read it, and accept the model's terms on the Hub where it has some"
_BY_PATH = "or get its config.json another way and give the path"


class HubConfig(NamedTuple):
    """A config.json of the Hub as it lies in the local cache: its path, the model's id, and id@commit."""

    path: str
    name: str
    source: str


def fetch_config(reference: str, most_bytes: int) -> HubConfig:
    """The config.json that `hf:org/name@revision` names, from the cache or downloaded into it.

    Raises UsageError (exit 2) for a malformed id; ModelError (exit 3) for a model, revision or config.json that is not
    there, or a file of more than `most_bytes`; RunError (exit 1) where the extra is missing, the model is not open to
    the user, the machine is offline or the Hub does not answer in time.
    """
    repo_id, revision = parse_reference(reference)
    try:
        import huggingface_hub
    except ImportError:
        raise RunError(f"{reference}: huggingface_hub is not installed", "type: pip install 'kvcalc[hub]'") from None
    hub: Any = huggingface_hub  # its parts are imported as they are named, which type checkers do not see
    path = hub.try_to_load_from_cache(repo_id, _FILE, revision=revision)
    if not isinstance(path, str):
        if hub.constants.HF_HUB_OFFLINE:
            raise RunError(f"{reference}: not in the local cache, and HF_HUB_OFFLINE is set", f"unset it, {_BY_PATH}")
        path = _within(SECONDS, reference, lambda: _download(hub, reference, repo_id, revision, most_bytes))
    # .../snapshots/COMMIT/config.json
    return HubConfig(path, repo_id, f"hf:{repo_id}@{os.path.basename(os.path.dirname(path))}")


def parse_reference(reference: str) -> tuple[str, str]:
    """(id, revision) of `hf:org/name@revision`, main where none is given; UsageError (exit 2) where it is malformed."""
    repo_id, at, revision = reference.removeprefix("hf:").partition("@")
    parts = repo_id.split("/")
    well_formed = len(parts) <= 2 and len(repo_id) <= _LONGEST_ID and "--" not in repo_id and ".." not in repo_id
    for part in parts:
        well_formed = well_formed and bool(part) and set(part) <= _ID_CHARACTERS and part.strip("-.") == part
    if not well_formed:
        raise UsageError(f"{reference!r}: not the id of a model", "for example: hf:Qwen/Qwen3-8B or hf:org/name@main")
    steps = revision.split("/")
    if at and not all(step and set(step) <= _ID_CHARACTERS and not step.startswith((".", "-")) for step in steps):
        raise UsageError(f"{reference!r}: not a revision after @", "a branch, a tag or a commit, as hf:org/name@main")
    return repo_id, revision or "main"


def _download(hub: Any, reference: str, repo_id: str, revision: str, most_bytes: int) -> str:
    """Look at the size, then fetch. Progress bars and log lines are switched off, since stderr is for errors, and so is
    telemetry: one file is asked for."""
    hub.constants.HF_HUB_DISABLE_TELEMETRY = True
    hub.utils.disable_progress_bars()
    hub.logging.set_verbosity_error()
    try:
        url = hub.hf_hub_url(repo_id, _FILE, revision=revision)
        found = hub.get_hf_file_metadata(url, timeout=SECONDS, token=hub.get_token())
        if found.commit_hash is None:
            raise RunError(f"{reference}: what answers at HF_ENDPOINT is no Hub")
        if found.size is not None and found.size > most_bytes:
            raise ModelError(
                f"{reference}: its {_FILE} has {found.size:,} bytes, and none needs more than {most_bytes:,}"
            )
        path: str = hub.hf_hub_download(repo_id, _FILE, revision=revision, etag_timeout=SECONDS)
        return path
    except KvcalcError:
        raise
    except Exception as error:
        raise _refusal(error, reference) from None


def _refusal(error: Exception, reference: str) -> KvcalcError:
    """What huggingface_hub raised, in one line. It has one class for a model that is hidden and one that is not there:
    the status tells them apart, as far as the Hub does."""
    kind = type(error).__name__
    status = getattr(getattr(error, "response", None), "status_code", None)
    if kind == "GatedRepoError":
        return RunError(f"{reference}: gated", _OPEN_IT)
    if kind == "RevisionNotFoundError":
        return ModelError(f"{reference}: there is no such revision")
    if kind in ("EntryNotFoundError", "RemoteEntryNotFoundError"):
        return ModelError(
            f"{reference}: it holds no {_FILE}",
            "models published as GGUF alone have none: get a .gguf file of it and give the path",
        )
    if status in (401, 403):
        return RunError(f"{reference}: not there, or not open to you (status {status})", _OPEN_IT)
    if status == 404:
        return ModelError(f"{reference}: there is no such model on the Hub", "check the id, as org/name")
    if status is not None:
        return RunError(f"{reference}: the Hub answered with status {status}", "try again later")
    if "Timeout" in kind:
        return _too_late(reference)
    text = " ".join(str(error).split())[:200]
    return RunError(f"{reference}: cannot be fetched: {text or kind}", f"check the network, {_BY_PATH}")


def _too_late(reference: str) -> RunError:
    return RunError(f"{reference}: the Hub did not answer within {SECONDS:.0f} seconds", f"try again, {_BY_PATH}")


def _within(seconds: float, reference: str, work: Any) -> str:
    """The result of `work`, or RunError after `seconds`.

    In a thread of its own: the time-outs of a socket bound one read each, and a name server has none. The thread is
    left behind and ends with the process.
    """
    import threading

    done: list[str] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            done.append(work())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if failed:
        raise failed[0]
    if not done:
        raise _too_late(reference)
    return done[0]
