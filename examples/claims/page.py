"""docs/claims.md, whole, from what the experiments found: head, table, and a paragraph for whatever needs more words.

What the page says of a claim stands beside its experiment, figures and all, so that none is typed in; only HEAD is
written here.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path

from claim import CLAIMS, Found, order

HEAD = """\
# What was claimed, and what the simulator finds

The project grew out of three engineering write-ups, here A, B and C, on KV memory with FlashAttention on Ascend NPUs.
What they state is run here, and a claim that is wrong is called wrong. Each is a scenario file, whose first lines say
what was claimed and what to look at, and a few lines of Python that find the number:

```console
python examples/claims                           # all of them, in about a minute on two cores
python examples/claims C5 C6                     # some of them
python examples/claims --json                    # or --markdown, the table below
python examples/claims --write docs/claims.md    # this page
hbmtwin run examples/claims/c5.toml
```

Memory is exact for the given order of events; every time is the cost model's, *default, uncalibrated* ([what the
numbers mean](metrics.md)). Where a claim names its settings they are used; where not, the scenario's head says what was
chosen. The last figures of C11 are counted in recorded traces that are not part of the repository; without them the
program says so. All of this page but these lines is printed by the program from its runs, and a test holds it to that;
`python examples/claims/pictures.py DIR` draws the pictures.
"""
COLUMNS = ("claim", "claimed", "simulated", "verdict", "why")
WIDTH = 120


def row(id: str, found: Found) -> tuple[str, ...]:
    """The cells of a claim, under COLUMNS."""
    return id, CLAIMS[id].claimed, found.simulated, found.verdict, found.why


def table(found: Mapping[str, Found]) -> Iterator[str]:
    """The lines of the table."""
    for cells in (COLUMNS, ("---",) * len(COLUMNS), *(row(id, f) for id, f in found.items())):
        yield f"| {' | '.join(cells)} |"


def paragraph(id: str, found: Found) -> str:
    """What is told of a claim, and its picture."""
    words = f"**{id}: {found.verdict}.** {found.told}"
    told = textwrap.fill(words, WIDTH, break_long_words=False, break_on_hyphens=False)
    picture = CLAIMS[id].picture
    return told if picture is None else f"{told}\n\n![{picture}](claim-{id.lower()}.png)"


def page(found: Mapping[str, Found]) -> str:
    """The whole of it, of all claims."""
    found = {id: found[id] for id in sorted(found, key=order)}
    told = {id: f for id, f in found.items() if f.told}
    holding = (paragraph(id, f) for id, f in told.items() if f.verdict == "holds")
    others = (paragraph(id, f) for id, f in told.items() if f.verdict != "holds")
    lines = "\n".join(table(found))
    blocks = (HEAD.rstrip(), lines, "## In pictures", *holding, "## Those that do not simply hold", *others)
    return "\n\n".join(blocks) + "\n"


def write(path: Path, text: str) -> None:
    """Put *text* where the page lies, at once."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
