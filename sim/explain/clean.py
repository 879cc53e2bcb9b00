"""Lines without what terminals, loggers, containers and workers put around and in front of them.

::

    as pasted                                                                   text                        rank
    ESC[36m(Worker_TP0 pid=7)ESC[0m INFO 11-30 05:12:33 [gpu_worker.py:298] A   A                           TP0
    2026-11-30T05:12:33.1Z stderr F [rank3]: A                                  A                           rank 3
    [2026-11-30 05:12:33 DP0 TP1] A                                             A                           DP0 TP1
    vllm-1  | A                                                                 A
    Loading:  40% ... CR Loading: 100% ...                                      both, with the same number
    <span class="x">A</span>&nbsp;B &lt; C                                      A B < C
    {"log": "A\\n", "stream": "stderr"}                                          A
    a line that begins with none of them                                        as it is                    of the
                                                                                                            line before

Of a line that is a record of its own the rank is what it names itself; one without any such beginning is the rest of
a message that was broken. Every pattern is bounded, and is tried at the start of a line a few times at most:
O(characters).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from hbmtwin.sim.explain.decode import Decoded
from hbmtwin.sim.explain.findings import Line

_ESCAPES = re.compile(
    r"(?:\x1b|#033|\\x1b|\\u001b|\\033|\^\[)\[[0-9;?]{0,20}[A-Za-z]|\x1b\][^\x07\x1b\n]{0,200}(?:\x07|\x1b\\)|"
    r"\[(?:\d{1,2};)?\d{0,2}m|\x1b[()#][0-9A-Za-z]|\x1b"
)
"""Colours and the like; also as syslog writes them, and with their first character lost on the way."""

_AS_ASCII = str.maketrans(
    {
        **dict(zip("：，；（）＝％／", ":,;()=%/", strict=True)),
        **dict.fromkeys("\u00a0\u2007\u202f\u3000", " "),
        **dict.fromkeys("\u200b\u200c\u200d\u2060\ufeff", ""),
    }
)
"""What input methods and web pages make of ASCII."""

_PAGE = re.compile(r"</(?:span|code|pre|div|td|p)>|<br ?/?>")
"""What only a page that was saved or copied with its tags has; a traceback has ``<module>``."""
_TAG = re.compile(
    r"</?(?:span|code|pre|div|td|tr|th|table|tbody|thead|p|br|b|i|em|strong|a|font|ul|ol|li|h[1-6]|html|body)"
    r"(?:\s[^<>]{0,2000})?/?>"
)
_ENTITIES = {"&lt;": "<", "&gt;": ">", "&amp;": "&", "&quot;": '"', "&#39;": "'", "&#x27;": "'", "&nbsp;": " "}
_ENTITY = re.compile("|".join(_ENTITIES))

_LEVEL = r"(?:INFO|WARNING|WARN|ERROR|DEBUG|CRITICAL|FATAL)"
_CLOCK = r"\d{2}:\d{2}:\d{2}(?:[.,]\d{1,9})?"
_PARALLEL = r"[DTPEACM]{1,4}P\d{1,4}"

_FRONT = re.compile(
    "|".join(
        (
            r"\(([A-Za-z][\w.]{0,60})(?: (?:rank=)?(\w{1,12}))? pid=(\d{1,10})(?:, ip=[\d.:a-f]{2,40})?\)\s?",
            rf"\[(?:\d{{4}}-\d{{2}}-\d{{2}} {_CLOCK} )?({_PARALLEL}(?: {_PARALLEL}){{0,4}})\]\s?",
            r"\[(?:rank|default)(\d{1,5})\]:\s?",
            rf"{_LEVEL}\s{{1,5}}\d{{2}}-\d{{2}} {_CLOCK}\s{{1,3}}\[?[\w./<>-]{{1,100}}:\d{{1,6}}\]\s?",
            rf"\[?\d{{4}}[-/]\d{{2}}[-/]\d{{2}}[T ,-]{_CLOCK}(?:Z|[+-]\d{{2}}:?\d{{2}})?\]?[ \t]{{0,4}}(?:[|:-] )?"
            r"(?:std(?:out|err) [FP] )?",
            rf"\[\d{{2}}/\d{{2}}/\d{{4}}-{_CLOCK}\]\s?",
            r"\[(?:TensorRT-LLM|TRT-LLM)[^\]\n]{0,30}\]\s?(?:\[batchmgr\]\s?)?(?:\[RANK (\d{1,5})\]\s?)?"
            r"(?:\[[A-Z]{1,8}\]\s?)?(?:\[batchmgr\]\s?)?(?:\[RANK (\d{1,5})\]\s?)?",
            rf"[A-Z][a-z]{{2}} [ \d]\d {_CLOCK} [\w.-]{{1,64}} [\w./@:-]{{1,64}}(?:\[\d{{1,10}}\])?: ",
            r"\[pod/[\w./-]{1,120}\] ",
            r"[a-z][\w.-]{0,63} {1,30}\| ",
            rf"\[\d{{1,20}}\] (?:\[\d{{1,20}}\] )?\[[a-z]{{2,12}}\] \[{_LEVEL}\] \[[\w.-]{{1,60}}\] : ",
            rf"(?:[\w.]{{1,80}} - )?{_LEVEL} - (?:[\w.]{{1,80}} - )?",
            rf"{_LEVEL}:(?:[\w.]{{1,80}}:)?\s{{0,8}}",
            rf"[IWEF]\d{{4}} {_CLOCK}\s{{1,8}}\d{{1,10}} [\w.]{{1,60}}:\d{{1,6}}\] ",
            r"(?:vLLM )?(?:STDOUT|STDERR|stdout|stderr): ",
            r"\[Stage-\d{1,4}\] ",
            r"> ",
        )
    )
)
_MOST_FRONTS = 8
_CRUMB = 8
"""Characters below which a line has no beginning of its own, and is joined to others such: a column that was pasted
must not cost more than a page."""
_EXPERTS = re.compile(r"_EP\d{1,4}$")
_WORKER = re.compile(r"[A-Za-z]{0,20}Worker_((?:[A-Z]{1,4}P\d{1,4}_?){1,6})$")


def clean(decoded: Decoded) -> list[Line]:
    """The lines of a text that are not empty. O(characters)."""
    lines = list(_lines(decoded.text, 1))
    if decoded.tail:
        lines += _lines(decoded.tail, decoded.tail_line)
    return lines


def _lines(text: str, first: int) -> Iterator[Line]:
    if not text.isascii():
        text = text.translate(_AS_ASCII)
    text = _ESCAPES.sub("", text)
    if _PAGE.search(text):
        text = _TAG.sub(lambda found: "\n" * found[0].count("\n"), text)  # lines keep their numbers
    if "&" in text:
        text = _ENTITY.sub(lambda found: _ENTITIES[found[0]], text)
    if "\n" not in text:
        text = text.replace("\r", "\n")
    rank = ""
    crumbs: list[str] = []
    crumbs_begin = first
    for number, row in enumerate(text.split("\n"), first):
        for piece in row.split("\r") if "\r" in row else (row,):
            piece = piece.strip()
            if len(piece) < _CRUMB:
                if piece:
                    crumbs_begin = crumbs_begin if crumbs else number
                    crumbs.append(piece)
                continue
            if crumbs:
                yield Line(crumbs_begin, " ".join(crumbs), rank)
                crumbs = []
            if piece[0] == "{" and piece[-1] == "}":
                piece = _message(piece)
            piece, named = _without_front(piece)
            if named is not None:
                rank = named
            if piece:
                yield Line(number, piece, rank)
    if crumbs:
        yield Line(crumbs_begin, " ".join(crumbs), rank)


def _message(piece: str) -> str:
    """What a line of JSON logs, or the line itself where it is none."""
    try:
        record = json.loads(piece)
    except (ValueError, RecursionError):
        return piece
    message = next((record[key] for key in ("log", "message", "msg") if isinstance(record.get(key), str)), piece)
    return " ".join(message.split("\n")).strip()


def _without_front(piece: str) -> tuple[str, str | None]:
    """The message of a line, and the rank that its beginnings name; None for one that has none of them."""
    at, rank = 0, None
    for _ in range(_MOST_FRONTS):
        found = _FRONT.match(piece, at)
        if found is None:
            break
        rank = _rank(found) or rank or ""
        at = found.end()
    return piece[at:].lstrip() if at else piece, rank


def _rank(found: re.Match[str]) -> str:
    """The worker that a beginning names, in the log's words."""
    name, which, pid, parallel, rank, first, second = found.groups()
    if name is not None:
        if worker := _WORKER.match(name):
            return _EXPERTS.sub("", worker[1].rstrip("_"))
        if which is not None:
            return f"rank {which}" if which.isdigit() else str(which)
        return f"{name} {pid}" if "Worker" in name else name
    if parallel is not None:
        return str(parallel)
    number = rank or first or second
    return f"rank {number}" if number is not None else ""
