"""Files that appear whole or not at all, the same bytes for the same text."""

from __future__ import annotations

import gzip
import io
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, TextIO, cast


@contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """Give a name beside *path* to write to; it takes the place of *path* when all went well. Raise OSError,
    which names *path* and not the other."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        yield partial
        partial.replace(path)
    except OSError as error:
        if error.filename not in (None, str(partial), bytes(partial)):
            raise  # a file that is read meanwhile
        reason = os.strerror(error.errno) if error.errno else error  # Arrow has a text of its own
        raise OSError(f"{path}: cannot be written ({reason}); check the folder and its permissions") from error
    finally:
        with suppress(OSError):  # it may not have come to be, as below a file that is no folder
            partial.unlink()


@contextmanager
def text_file(path: Path) -> Iterator[TextIO]:
    """A UTF-8 text file to write, as gzip (with no time in it) if the name ends in ``.gz``. Raise OSError."""
    with replaced(path) as partial, partial.open("wb") as raw:
        packed = gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=0) if path.suffix == ".gz" else raw
        with io.TextIOWrapper(cast(BinaryIO, packed), encoding="utf-8", newline="\n") as out:
            yield out
