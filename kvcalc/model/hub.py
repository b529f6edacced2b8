"""`hf:org/name` and `hf:org/name@revision`: the config.json of a model on the Hugging Face Hub.

This is the only module that uses the network, through the optional extra `hub`. If the local cache has the revision,
that copy is used. Otherwise config.json alone is downloaded into the cache. Code that a config names (auto_map) is
never run. HF_HOME, HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE work as in huggingface_hub.
"""

from __future__ import annotations

import os
import re
from typing import Any

from kvcalc.atomic_file import replace
from kvcalc.errors import KvcalcError, ModelError, RunError, UsageError
from kvcalc.records import NamedTuple

SECONDS = 10.0
"""The time limit for all attempts together."""

_FILE = "config.json"
_PIECE_BYTES = 65_536
_ID_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.")
_LONGEST_ID = 96
_OPEN_IT = "set HF_TOKEN to a token with access, and accept the model's terms on the Hub if it has any"
_BY_PATH = "or download its config.json another way and give its path"


class HubConfig(NamedTuple):
    """A model's config.json in the local cache: its path, the model's id, and `hf:ID@COMMIT`."""

    path: str
    name: str
    source: str


def fetch_config(reference: str, most_bytes: int) -> HubConfig:
    """The config.json that `hf:org/name@revision` names, from the cache or downloaded into it.

    Raises UsageError (exit 2) for a malformed id; ModelError (exit 3) if the model, the revision or config.json does
    not exist, or the file has more than `most_bytes`; RunError (exit 1) if the extra is missing, the user has no access
    to the model, the machine is offline or the Hub does not answer in time.
    """
    repo_id, revision = parse_reference(reference)
    _check_endpoint(os.environ.get("HF_ENDPOINT") or "")
    try:
        import huggingface_hub
        from huggingface_hub import try_to_load_from_cache  # it is imported lazily, and reads the variables
    except ImportError:
        raise RunError(f"{reference}: huggingface_hub is not installed", "pip install 'kvcalc[hub]'") from None
    except Exception as error:
        raise RunError(f"huggingface_hub cannot be loaded: {_shown(error)}", "check the variables HF_*") from None
    hub: Any = huggingface_hub  # it imports its modules lazily, which type checkers cannot see
    path = try_to_load_from_cache(repo_id, _FILE, revision=revision)
    if not isinstance(path, str):
        if hub.constants.HF_HUB_OFFLINE:
            raise RunError(f"{reference}: not in the local cache, and HF_HUB_OFFLINE is set", f"unset it, {_BY_PATH}")
        path = _within(SECONDS, reference, lambda: _download(hub, reference, repo_id, revision, most_bytes))
    # .../snapshots/COMMIT/config.json
    return HubConfig(path, repo_id, f"hf:{repo_id}@{os.path.basename(os.path.dirname(path))}")


def parse_reference(reference: str) -> tuple[str, str]:
    """(id, revision) of `hf:org/name@revision`. The default revision is main. UsageError (exit 2) if malformed."""
    repo_id, at, revision = reference.removeprefix("hf:").partition("@")
    parts = repo_id.split("/")
    well_formed = len(parts) <= 2 and len(repo_id) <= _LONGEST_ID and "--" not in repo_id and ".." not in repo_id
    for part in parts:
        well_formed = well_formed and bool(part) and set(part) <= _ID_CHARACTERS and part.strip("-.") == part
    if not well_formed:
        raise UsageError(f"{reference!r}: not a model's id", "for example: hf:Qwen/Qwen3-8B or hf:org/name@main")
    steps = revision.split("/")
    if at and not all(step and set(step) <= _ID_CHARACTERS and not step.startswith((".", "-")) for step in steps):
        raise UsageError(f"{reference!r}: not a revision after @", "give a branch, tag or commit: hf:org/name@main")
    return repo_id, revision or "main"


def _download(hub: Any, reference: str, repo_id: str, revision: str, most_bytes: int) -> str:
    """Check the size, then download. Progress bars, log lines and telemetry are turned off."""
    hub.constants.HF_HUB_DISABLE_TELEMETRY = True
    hub.utils.disable_progress_bars()
    hub.logging.set_verbosity_error()
    try:
        url = hub.hf_hub_url(repo_id, _FILE, revision=revision)
        token = hub.get_token()
        metadata = hub.get_hf_file_metadata(url, timeout=SECONDS, token=token)
        # The commit becomes the name of a folder, and huggingface_hub would make the ETag the name of a file.
        if not (metadata.commit_hash and _is_hash(metadata.commit_hash) and _is_hash(metadata.etag or "0")):
            raise RunError(f"{reference}: the server at HF_ENDPOINT is not a Hugging Face Hub", "check HF_ENDPOINT")
        if metadata.size is not None and metadata.size > most_bytes:
            raise ModelError(f"{reference}: its {_FILE} has {metadata.size:,} bytes; at most {most_bytes:,} are read")
        data = _read(hub, reference, url, token, most_bytes)
        return _store(hub.constants.HF_HUB_CACHE, repo_id, revision, metadata.commit_hash, data)
    except KvcalcError:
        raise
    except Exception as error:
        raise _refusal(error, reference) from None


def _read(hub: Any, reference: str, url: str, token: str | None, most_bytes: int) -> bytes:
    """The body at `url`, whose size is limited while it is read: the server may have stated another one."""
    headers = {**hub.utils.build_hf_headers(token=token), "Accept-Encoding": "identity"}
    data = b""
    with hub.utils.get_session().stream(
        "GET", url, headers=headers, follow_redirects=True, timeout=SECONDS
    ) as response:
        hub.utils.hf_raise_for_status(response)
        for piece in response.iter_bytes(_PIECE_BYTES):
            data += piece
            if len(data) > most_bytes:
                raise ModelError(f"{reference}: its {_FILE} has more than {most_bytes:,} bytes, the maximum")
    return data


def _store(cache: str, repo_id: str, revision: str, commit: str, data: bytes) -> str:
    """Write the file into huggingface_hub's cache, in the layout for systems without links, and return its path.

    Files are replaced atomically. huggingface_hub itself is not used, because it trusts the server's headers with the
    names of files, and writes what the server sends without a limit.
    """
    folder = os.path.join(cache, f"models--{repo_id.replace('/', '--')}")
    path = os.path.join(folder, "snapshots", commit, _FILE)
    _replace(path, data)
    if revision != commit:
        _replace(os.path.join(folder, "refs", *revision.split("/")), commit.encode())
    return path


def _replace(path: str, data: bytes) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    replace(path, data)


def _is_hash(text: str) -> bool:
    return re.fullmatch("[0-9a-f]{1,128}", text) is not None


def _check_endpoint(url: str) -> None:
    """Raise UsageError (exit 2) if HF_ENDPOINT is set to something that is not a URL. It may have a password."""
    from urllib.parse import urlsplit

    try:
        parts = urlsplit(url)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        is_url = False
    if url and not (is_url and url.isprintable() and " " not in url):
        raise UsageError("HF_ENDPOINT is not a URL", "for example HF_ENDPOINT=https://huggingface.co, or unset it")


def _shown(error: Exception) -> str:
    """The error's text in one short line, without addresses: they may contain a password or a signature."""
    text = re.sub(r"\S*://\S*", "(address)", " ".join(str(error).split()))
    return text[:200] or type(error).__name__


def _refusal(error: Exception, reference: str) -> KvcalcError:
    """The error of huggingface_hub in one line.

    It has one class for private and missing models. The HTTP status tells them apart if the Hub does.
    """
    kind = type(error).__name__
    status = getattr(getattr(error, "response", None), "status_code", None)
    if kind == "GatedRepoError":
        return RunError(f"{reference}: access is gated", _OPEN_IT)
    if kind == "RevisionNotFoundError":
        return ModelError(f"{reference}: no such revision", "check the branch, tag or commit after @")
    if kind in ("EntryNotFoundError", "RemoteEntryNotFoundError"):
        return ModelError(
            f"{reference}: the repository has no {_FILE}",
            "if it has GGUF files only, download one and give its path",
        )
    if status in (401, 403):
        return RunError(f"{reference}: not found, or you have no access (status {status})", _OPEN_IT)
    if status == 404:
        return ModelError(f"{reference}: no such model on the Hub", "check the id, ORG/NAME")
    if status is not None:
        return RunError(f"{reference}: the Hub answered with status {status}", "try again later")
    if "Timeout" in kind:
        return _too_late(reference)
    return RunError(f"{reference}: download failed: {_shown(error)}", f"check the network, {_BY_PATH}")


def _too_late(reference: str) -> RunError:
    return RunError(f"{reference}: the Hub did not answer within {SECONDS:.0f} seconds", f"try again, {_BY_PATH}")


def _within(seconds: float, reference: str, work: Any) -> str:
    """The result of `work`, or RunError after `seconds`.

    `work` runs in a thread, because a socket's timeout covers only a single read, and name resolution has no timeout. A
    thread that is still running ends with the process.
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
