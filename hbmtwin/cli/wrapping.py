"""Lines of a width on a terminal, where Chinese characters take two columns and may be parted anywhere.

::

    words of letters and digits     whole, parted at spaces
    Chinese characters              parted between any two, but no line begins with a comma or a closing bracket
"""

from __future__ import annotations

import re

from rich.cells import cell_len

_PIECES = re.compile(r"\s+|[^\s⺀-￯]+|[⺀-￯]")
_NEVER_FIRST = frozenset("，。；：、）」』？！”’》")
_NEVER_LAST = frozenset("（「『“‘《")


def wrap(text: str, width: int) -> list[str]:
    """*text* in lines of at most *width* columns; a word that is longer has a line of its own. O(length)."""
    lines: list[str] = []
    line = ""
    for piece in _unbroken(text):
        if line and cell_len(line + piece.rstrip()) > width:
            lines.append(line.rstrip())
            line = piece.lstrip()
        else:
            line += piece
    return [*lines, line.rstrip()] if line or not lines else lines


def _unbroken(text: str) -> list[str]:
    """Pieces between which a line may end; spaces belong to the piece before them."""
    pieces: list[str] = []
    for piece in _PIECES.findall(text):
        if pieces and (piece.isspace() or piece in _NEVER_FIRST or pieces[-1][-1] in _NEVER_LAST):
            pieces[-1] += piece
        else:
            pieces.append(piece)
    return pieces
