"""Ask `kvcalc check` about every command that starts a server in a folder of recipes.

    python benchmarks/check_recipes.py FOLDER [--gpu h200x8]

FOLDER is for example a checkout of vllm-project/recipes. Prints how many commands are answered and how many refused, by
reason. Texts are .md files, and .yaml files with text in them.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from kvcalc.errors import KvcalcError
from kvcalc.planning.check.answer import check
from kvcalc.planning.check.servers import servers_of_script
from kvcalc.throughput.hardware import find_devices

_BLOCK = re.compile(r"^[ \t]*(`{3,})[^\n]*\n(.*?)^[ \t]*\1", re.MULTILINE | re.DOTALL)


def scripts_in(text: str) -> Iterator[str]:
    """The code blocks of a text."""
    for block in _BLOCK.finditer(text):
        yield block[2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gpu", default="h200x8")
    parser.add_argument("--each", action="store_true", help="print every refusal")
    asked = parser.parse_args()
    verdicts, reasons, unknown = Counter[str](), Counter[str](), Counter[str]()
    for path in sorted(asked.folder.rglob("*")):
        if path.suffix not in (".md", ".yaml", ".yml"):
            continue
        for script in scripts_in(path.read_text(errors="replace")):
            try:
                servers = servers_of_script(script)
            except KvcalcError as error:
                verdicts["not read"] += 1
                reasons[error.message[:90]] += 1
                continue
            for server in servers:
                try:
                    found = check(server, find_devices(asked.gpu))
                except KvcalcError as error:
                    verdicts["model not known" if "not known" in error.message else "refused"] += 1
                    reasons[f"{server.reader.engine}: {re.sub(r'[0-9]+', 'N', error.message[:110])}"] += 1
                    if asked.each:
                        print(f"{path}: {error.message}: {' '.join(server.words)[:200]}")
                    continue
                verdicts["starts" if found["starts"] else "does not start"] += 1
                unknown.update(found["command"]["not_counted"])
    total = sum(verdicts.values())
    print(f"{total} commands: {', '.join(f'{number} {verdict}' for verdict, number in verdicts.most_common())}")
    for title, rows in (("refused", reasons), ("not counted", unknown)):
        print(f"\n{title}:")
        for text, number in rows.most_common(60):
            print(f"{number:5d}  {text}")


if __name__ == "__main__":
    main()
