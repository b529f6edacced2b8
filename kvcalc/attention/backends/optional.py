"""Whether an optional kernel library is there, without loading it before it is needed."""

from __future__ import annotations

import importlib
from typing import Any


def module(name: str) -> Any:
    """The module called `name`: not typed, since it may not be here."""
    return importlib.import_module(name)


def missing(name: str, distribution: str) -> str | None:
    """Why the module `name` cannot be used: it is not installed, or does not load; None where it can."""
    try:
        module(name)
    except ImportError as error:
        if error.name == name:
            return f"{distribution} is not installed"
        return f"{distribution} does not load: {error}"
    except (OSError, RuntimeError) as error:
        # A library built for another torch or CUDA.
        return f"{distribution} does not load: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
    return None
