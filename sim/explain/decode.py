"""The bytes of a pasted text as characters: limited in size, whatever their encoding, and told what was lost.

::

    begins with a byte order mark     UTF-16 (PowerShell's ``>``), UTF-32, or UTF-8 with one
    every second byte is NUL          UTF-16 without a mark
    valid UTF-8                       UTF-8
    valid GB 18030 and not UTF-8      a Chinese Windows
    else                              UTF-8, each undecodable byte replaced and counted
    more than the limit               its first and its last half: a server says at the start what it has, and at the
                                      end why it died
    runs of NULs                      gone: a log that was truncated while it was written begins with them
    mostly control characters         not a text: nothing of it is read
"""

from __future__ import annotations

import codecs
import re
from typing import IO, NamedTuple

from hbmtwin.sim.phrases import Count, Phrase, Said, Size

LIMIT_BYTES = 8 << 20
PASSED_BYTES = 1 << 30
"""What is read of an endless stream before its last half is taken for the end."""

CUT = Phrase(
    "the text is longer than {limit}: its first and its last {half} were read, and {lines} lines between them were not",
    "文本超过 {limit}：只读取了开头和结尾各 {half}，中间 {lines} 行未读取",
)
REPLACED = Phrase(
    "{count} bytes or characters are no text and were passed over", "有 {count} 个字节或字符无法解码，已跳过"
)
BINARY = Phrase("this is no text but binary data: nothing of it was read", "这不是文本，而是二进制数据，未读取任何内容")

_MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
    (codecs.BOM_UTF8, "utf-8"),
)
_PADDING = re.compile(rb"\0{64,}")
_CONTROLS = dict.fromkeys(
    (*range(9), 11, *range(14, 27), *range(28, 32), *range(127, 160), *range(0x202A, 0x202F), *range(0x2066, 0x206A))
)
"""Deleted from a text, and so never printed; tab, line feed, form feed, carriage return and escape stay."""


class Decoded(NamedTuple):
    """A text, or its two ends."""

    text: str
    tail: str = ""
    """The last part of a text that was cut; empty when it was not."""
    tail_line: int = 1
    """Number of the line with which the tail begins."""
    notes: tuple[Said, ...] = ()
    binary: bool = False


def read_limited(stream: IO[bytes]) -> Decoded:
    """Read *stream* to its end, or its two ends where it is longer than the limit. O(bytes), memory O(limit)."""
    half = LIMIT_BYTES // 2
    head = _read(stream, LIMIT_BYTES)
    if len(head) == LIMIT_BYTES and head.strip(b"\0") and decode(head).binary:
        return decode(head)  # /dev/urandom has no end, and a core dump none that says anything
    rest = bytearray(head[half:])
    newlines = passed = 0
    while passed < PASSED_BYTES and (piece := stream.read(1 << 20)):
        rest += piece
        passed += len(piece)
        gone = len(rest) - half
        newlines += rest.count(b"\n", 0, gone)
        del rest[:gone]
    return decode(head) if not passed else _ends(bytes(head[:half]), bytes(rest), newlines)


def _read(stream: IO[bytes], size: int) -> bytes:
    """Up to *size* bytes; a pipe gives them in pieces."""
    pieces, wanted = [], size
    while wanted and (piece := stream.read(wanted)):
        pieces.append(piece)
        wanted -= len(piece)
    return b"".join(pieces)


def decode(data: bytes | str) -> Decoded:
    """*data* as text. O(bytes)."""
    if isinstance(data, str):
        data = data.encode("utf-8", "surrogatepass")
    if len(data) > LIMIT_BYTES:
        half = LIMIT_BYTES // 2
        return _ends(data[:half], data[-half:], data.count(b"\n", half, len(data) - half))
    kept = _PADDING.sub(b"", data)
    text, lost = _text(kept, _encoding(kept))
    if _is_binary(text, lost) or (data and not kept):
        return Decoded("", notes=(Said.of(BINARY),), binary=True)
    notes = (Said.of(REPLACED, count=Count(lost)),) if lost else ()
    return Decoded(text, notes=notes)


def _ends(head: bytes, tail: bytes, lines_between: int) -> Decoded:
    """The two ends of a longer text, each cut at a line."""
    head, tail = _PADDING.sub(b"", head), _PADDING.sub(b"", tail)
    if not head and not tail:
        return Decoded("", notes=(Said.of(BINARY),), binary=True)
    encoding = _encoding(head)
    wide = {"utf-16-le": 2, "utf-16-be": 2, "utf-32-le": 4, "utf-32-be": 4}.get(encoding, 1)
    text, lost = _text(head[: len(head) // wide * wide], encoding)
    end, more_lost = _text(tail[len(tail) % wide :], encoding)
    if _is_binary(text, lost) or _is_binary(end, more_lost):
        return Decoded("", notes=(Said.of(BINARY),), binary=True)
    begun, _, end = end.partition("\n") if "\n" in end else ("", "", end)
    skipped = lines_between + bool(begun)
    notes = [Said.of(CUT, limit=Size(LIMIT_BYTES), half=Size(LIMIT_BYTES // 2), lines=Count(skipped))]
    if lost + more_lost:
        notes.append(Said.of(REPLACED, count=Count(lost + more_lost)))
    return Decoded(text, end, text.count("\n") + skipped + 1, tuple(notes))


def _encoding(data: bytes) -> str:
    for mark, encoding in _MARKS:
        if data.startswith(mark):
            return encoding
    start = data[:4096]
    if len(start) >= 16 and start[1::2].count(0) > len(start) * 2 // 5:
        return "utf-16-le"
    if len(start) >= 16 and start[::2].count(0) > len(start) * 2 // 5:
        return "utf-16-be"
    if _decodes(data, "utf-8"):
        return "utf-8"
    return "gb18030" if _decodes(data, "gb18030") else "utf-8"


def _decodes(data: bytes, encoding: str) -> bool:
    """Whether *data* is valid, but for a character that its end may cut."""
    try:
        codecs.getincrementaldecoder(encoding)().decode(data)
    except UnicodeDecodeError:
        return False
    return True


def _text(data: bytes, encoding: str) -> tuple[str, int]:
    """The characters of *data* without a mark and control characters, and how many bytes were none."""
    raw = data.decode(encoding, "replace")
    text = raw.removeprefix("\ufeff").replace("\ufffd", "").translate(_CONTROLS)
    return text, len(raw) - len(text) - raw.startswith("\ufeff")


def _is_binary(text: str, lost: int) -> bool:
    return lost > 16 and lost * 8 > len(text)
