"""Mutated scripts, manifests and files: each is read or refused in one line, in little time and memory.

`pytest -m fuzz tests/reading --cases 1000000` is a run of 50,000 texts.
"""

from __future__ import annotations

import random
from pathlib import Path
from time import process_time

import pytest

from kvcalc import check
from kvcalc.errors import KvcalcError
from kvcalc.planning.check.servers import servers_in

pytestmark = pytest.mark.fuzz

SHARE, ANSWERED = 20, 25
MOST_SECONDS, MOST_BYTES = 2.0, 256 << 20
TEXTS = Path(__file__).with_name("texts.txt").read_text().split("\n=====\n")
# Words and signs, each up to the next space, and what no line of a list can have.
PIECES = [
    *"""' " ` \\ $ ${ } $( ) (( )) [[ ]] { <<EOF <<< <( && || | ; ;; & > # \ue000 \ue001 \u2013tp \u201c $' $@
    ${A[@]} ${A:=b} ${A%%*} ! * ? ~ - -- = += : , &x *x --- % ^ 999999999999999999999999999999 \U0001f600""".split(),
    *(f"{word} " for word in "if then fi do done esac f(){ eval exec env docker set export unset read let -".split()),
    *(
        "\n",
        "\0",
        "\ud800",
        "\t",
        "\r\n",
        " ",
        "\xa0",
        "case x in ",
        "bash -c ",
        "env -i ",
        "docker run ",
        "---\n",
        "^\n",
    ),
]


def mutated(rng: random.Random) -> str:
    """A text with pieces inserted, removed, repeated, joined or nested."""
    text = rng.choice(TEXTS)
    for _ in range(rng.randint(1, 6)):
        place, action = rng.randrange(len(text) + 1), rng.random()
        end = min(len(text), place + rng.randint(1, 30))
        if action < 0.4:
            text = text[:place] + rng.choice(PIECES) * rng.choice((1, 1, 1, 2, 50)) + text[place:]
        elif action < 0.6:
            text = text[:place] + text[end:]
        elif action < 0.7:
            text = text[:place] + text[place:end] * rng.choice((2, 3, 300)) + text[end:]
        elif action < 0.8:
            other = rng.choice(TEXTS)
            text = text[:place] + other[rng.randrange(len(other)) :]
        elif action < 0.85:
            text = f"bash -c '{text}'" if rng.random() < 0.5 else f"x=$({text})\n{text}"
        elif action < 0.9:
            text = "\n".join(rng.sample(lines := text.split("\n"), len(lines)))
        elif action < 0.95:
            text = (text + "\n") * rng.choice((2, 20))
        else:
            text = text[:place]
    return text[:200_000]


def test_a_mutated_text_is_read_or_refused(pytestconfig: pytest.Config) -> None:
    resource = pytest.importorskip("resource")
    cases, seed = pytestconfig.getoption("--cases") // SHARE, pytestconfig.getoption("--fuzz-seed")
    check("vllm serve Qwen/Qwen3-8B", "h100")  # what is loaded once is not counted
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for case in range(cases):
        rng = random.Random(f"{seed}-{case}")
        text, begin = mutated(rng), process_time()
        try:
            for server in servers_in(text):
                server.read()
            if case % ANSWERED == 0:
                check(text, "h100x2")
        except KvcalcError as error:
            message = error.message
        except Exception as error:
            raise AssertionError(f"case {case} of seed {seed}: {error!r}: {text[:500]!r}") from error
        else:
            message = ""
        assert "\n" not in message.strip(), (case, message)
        assert process_time() - begin < MOST_SECONDS, (case, text[:500])
    # Kibibytes on Linux.
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < MOST_BYTES
