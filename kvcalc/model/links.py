"""The name of a model in the address of its page, or of one of its files, on the Hub, ModelScope or ollama.com."""

from __future__ import annotations

import os

_HOSTS = ("huggingface.co/", "hf.co/", "hf-mirror.com/", "modelscope.cn/", "modelscope.ai/", "ollama.com/")
_PAGE = (
    r"(?:models/|library/)?(?P<name>[\w.-]+(?:/[\w.-]+)?)(?::(?P<tag>[\w.-]+))?"
    r"(?:/(?:tree|blob|resolve|raw|file/view)/(?P<revision>[^/?#]+)(?:/(?P<file>[^?#]*))?|/[a-z]+)?/?(?:[?#].*)?"
)


def linked_name(text: str) -> str:
    """The name that load_model takes: ORG/NAME, with the type of the file if it is a GGUF file, or ollama's NAME:TAG.

    Any other text is returned as it is: a path that exists, and the page of a revision, whose config may be another.
    """
    page = text.removeprefix("https://").removeprefix("http://").removeprefix("www.")
    host = next((each for each in _HOSTS if page.startswith(each)), None)
    if host is None or os.path.exists(text):
        return text
    import re

    parts = re.fullmatch(_PAGE, page.removeprefix(host))
    if parts is None or parts["revision"] not in (None, "main", "master"):
        return text
    tag = parts["tag"]
    if (parts["file"] or "").endswith(".gguf"):
        from kvcalc.model.derived import file_type

        tag = file_type(parts["file"])
        if tag is None:
            return text
    return parts["name"] if tag in (None, "latest") else f"{parts['name']}:{tag}"
