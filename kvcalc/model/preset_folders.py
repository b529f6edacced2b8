"""Where presets are: the user's own folders first, then the folder that ships with kvcalc."""

from __future__ import annotations

import os
import sys

from kvcalc.errors import UsageError

VARIABLE = "KVCALC_PRESETS"
_SUFFIX = ".yaml"


def shipped_folder(package: str) -> str:
    """The folder presets/models: inside `package` in a wheel, next to it in a checkout or an editable install."""
    inside = os.path.join(package, "presets", "models")
    return inside if os.path.isdir(inside) else os.path.join(os.path.dirname(package), "presets", "models")


def user_files() -> list[tuple[str, str]]:
    """(name, path) of the user's own preset files, folder by folder, each folder sorted. Reads no file.

    KVCALC_PRESETS names the folders, separated by os.pathsep. The default is kvcalc/presets in the user's config
    folder, if it exists. Raises UsageError (exit 2) if a folder in KVCALC_PRESETS cannot be read.
    """
    named = os.environ.get(VARIABLE)
    if named:
        folders = [os.path.expanduser(folder) for folder in named.split(os.pathsep) if folder]
        entries = [entry for folder in folders for entry in _files(folder, f"{VARIABLE}: ")]
    else:
        folder = _config_folder()
        entries = [] if folder is None or not os.path.isdir(folder) else _files(folder, "")
    return entries


def folder_for_new() -> str | None:
    """The folder for a new preset of the user, which may not exist: the first one that is searched. None if none is."""
    named = [folder for folder in os.environ.get(VARIABLE, "").split(os.pathsep) if folder]
    return os.path.expanduser(named[0]) if named else _config_folder()


def shipped_files(folder: str) -> list[tuple[str, str]]:
    """(name, path) of the files in the shipped `folder`, sorted; none if the folder is missing."""
    return _files(folder, "") if os.path.isdir(folder) else []


def _files(folder: str, prefix: str) -> list[tuple[str, str]]:
    try:
        entries = os.listdir(folder)
    except OSError as error:
        raise UsageError(f"{prefix}{folder}: {error.strerror or 'cannot be read'}", _hint(prefix)) from None
    except ValueError:  # a NUL byte in the path
        raise UsageError(f"{prefix}{folder!r}: not a path") from None
    names = (entry for entry in entries if entry.endswith(_SUFFIX) and not entry.startswith("."))
    return sorted((entry[: -len(_SUFFIX)].casefold(), os.path.join(folder, entry)) for entry in names)


def _hint(prefix: str) -> str | None:
    return f"create the folder, or unset {VARIABLE}" if prefix else None


def _config_folder() -> str | None:
    """kvcalc/presets in XDG_CONFIG_HOME or ~/.config, or in %APPDATA% on Windows; None if there is no such folder.

    macOS follows XDG here, as most command-line tools do.
    """
    base = os.environ.get("APPDATA" if sys.platform == "win32" else "XDG_CONFIG_HOME", "")
    # XDG says to ignore a relative path.
    if not os.path.isabs(base):
        base = os.path.join(os.path.expanduser("~"), ".config")
    return os.path.join(base, "kvcalc", "presets") if os.path.isabs(base) else None
