"""Text files line by line, plain or gzip by their first bytes, with errors that name file and line.

Nothing is held but one line, so a file may be larger than memory.
"""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Generator
from pathlib import Path

from hbmtwin.workloads.records import WorkloadError
from hbmtwin.workloads.suggest import did_you_mean

_LONGEST_LINE = 2**20
_GZIP = b"\x1f\x8b"
_GZIP_BITS = 31
"""To :mod:`zlib`: the largest window, in gzip's wrapping."""
_PIECE_BYTES = 2**16
_OTHERS = {
    b"PK\x03\x04": "a zip archive; unpack it first",
    b"\xfd7zXZ\x00": "xz compressed; unpack it first (xz -d), or recompress it as gzip",
    b"\x28\xb5\x2f\xfd": "zstd compressed; unpack it first (zstd -d), or recompress it as gzip",
    b"BZh": "bzip2 compressed; unpack it first (bzip2 -d), or recompress it as gzip",
    b"PAR1": "a Parquet file; write it as CSV first",
}


def is_parquet(path: Path) -> bool:
    """Whether a file says that it is Parquet, in its first bytes; False where it cannot be read, which shows later."""
    try:
        with path.open("rb") as raw:
            return raw.read(4) == b"PAR1"
    except OSError:
        return False


def bad_line(path: Path, line: int, what: str, cure: str) -> WorkloadError:
    """The error for one line of a file, counted from 1."""
    return WorkloadError(f"{path}:{line}: {what}; {cure}")


def text_lines(path: Path, *, longest_bytes: int = _LONGEST_LINE) -> Generator[str, None, None]:
    """The lines of a UTF-8 file, ends included, a byte order mark left out.

    Raise WorkloadError when the file is missing or unreadable, compressed in another way, truncated, not UTF-8, or
    has a line as long as *longest_bytes*. The file is open until the generator ends or is closed.
    """
    line = 0
    try:
        with path.open("rb") as raw:
            start = raw.peek(8)
            for magic, what in _OTHERS.items():
                if start.startswith(magic):
                    raise WorkloadError(f"{path}: this is {what}")
            packed = start.startswith(_GZIP)
            with io.BufferedReader(gzip.GzipFile(fileobj=raw)) if packed else raw as stream:
                while data := stream.readline(longest_bytes):
                    line += 1
                    if len(data) == longest_bytes and line == 1 and data.lstrip()[:1] == b"[":
                        raise bad_line(path, line, "this is a JSON array", "write one object a line")
                    if len(data) == longest_bytes:
                        what = f"the line is over {longest_bytes >> 20} MiB long"
                        raise bad_line(path, line, what, "is this a text file?")
                    yield data.decode("utf-8-sig" if line == 1 else "utf-8")
    except UnicodeDecodeError:
        raise bad_line(path, line, "this is not UTF-8 text", "save the file as UTF-8") from None
    except EOFError:
        raise bad_line(path, line + 1, "the gzip file ends early", "fetch or write it again") from None
    except (gzip.BadGzipFile, zlib.error) as error:
        what = f"the gzip file is damaged ({error})"
        raise bad_line(path, _line_of_damage(path), what, "fetch or write it again") from None
    except FileNotFoundError:
        siblings = sorted(p.name for p in path.parent.iterdir()) if path.parent.is_dir() else []
        hint = did_you_mean(path.name, siblings) if siblings else "check the path"
        raise WorkloadError(f"{path}: no such file; {hint}") from None
    except OSError as error:
        raise WorkloadError(f"{path}: cannot be read ({error.strerror}); check the path and its permissions") from None


def _line_of_damage(path: Path) -> int:
    """The line at which a damaged gzip file stops. O(file).

    :mod:`gzip` drops what it unpacked in the same read, which of a small file is all of it. Here what cannot be
    unpacked is halved, down to the byte that cannot.
    """
    line, unpacker = 1, zlib.decompressobj(_GZIP_BITS)
    with path.open("rb") as raw:
        while data := raw.read(_PIECE_BYTES):
            pieces = [data]
            while pieces:
                piece, before = pieces.pop(), unpacker.copy()
                try:
                    line += unpacker.decompress(piece).count(b"\n")
                except zlib.error:
                    if len(piece) == 1:
                        return line
                    unpacker, middle = before, len(piece) // 2
                    pieces += piece[middle:], piece[:middle]
                    continue
                if unpacker.eof:  # another member may follow
                    rest, unpacker = unpacker.unused_data, zlib.decompressobj(_GZIP_BITS)
                    pieces += [rest] if rest else []
    return line
