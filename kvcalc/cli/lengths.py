"""`--lengths`: the lengths of the sequences of a batch, as a list or from a trace."""

from __future__ import annotations

import re
from itertools import islice

from kvcalc.errors import UsageError

_LIST = re.compile(r"[\d_]+[kKmM]?(,[\d_]+[kKmM]?)*")


def lengths_of(text: str, batch_size: int) -> tuple[int, ...]:
    """The lengths in `text`, such as 1k,8k,32k, or those of the first `batch_size` requests of the trace at that path.

    The length of a request is that of its prompt and its answer. Raises UsageError (exit 2) for anything else.
    """
    from kvcalc.traces import read_trace
    from kvcalc.units import parse_tokens

    if _LIST.fullmatch(listed := text.replace(" ", "")):
        return tuple(parse_tokens(piece, "--lengths") for piece in listed.split(","))
    found = tuple(each.prompt_tokens + each.answer_tokens for each in islice(read_trace(text), batch_size))
    if len(found) < batch_size:
        raise UsageError(f"--batch {batch_size}: {text} has {len(found)} requests", f"at most --batch {len(found)}")
    return found
