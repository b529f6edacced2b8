"""The contract: every field of the JSON documents, declared once with its type, its unit and its meaning.

For type checkers: `answer: kvcalc.documents.Estimate`. `python -m tests.json_schema --write` makes schema.json from
these declarations. No command imports them.

A class is an object, and the text below a field is its meaning. A unit is the end of a key: `_bytes`, `_tokens`,
`_seconds`. A class that is named after another one and its key is described in place: `AuditLog` for `log` in `Audit`,
and `AuditUnreadItem` for each of `unread`. The fields that a class inherits come after its own, but
`schema_version` is first.
"""

from kvcalc.documents.estimates import *  # noqa: F403
from kvcalc.documents.fields import *  # noqa: F403
from kvcalc.documents.lists import *  # noqa: F403
from kvcalc.documents.loads import *  # noqa: F403
from kvcalc.documents.measurements import *  # noqa: F403
from kvcalc.documents.parts import *  # noqa: F403
