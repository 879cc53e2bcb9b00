"""Whether a result can be put where ``--out`` says: tried before minutes of work, and nothing of the trial stays.

::

    file         its directory is there, and takes a new file       a pipe or a device is only asked
    directory    it, or the directories that lead to it, can be made, and takes a new file
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from hbmtwin.cli.exits import UsageError


def check_file_place(option: str, path: Path) -> None:
    """Raise UsageError where no file can be written."""
    try:
        if path.is_dir():
            raise UsageError(f"{option}: {path} is a directory; name a file")
        if not path.parent.is_dir():
            raise UsageError(f"{option}: there is no directory {path.parent}; make it first")
        if path.exists() and not os.access(path, os.W_OK):
            raise UsageError(f"{option}: {path} is write-protected; name another file")
        if path.is_file() or not path.exists():
            _try_file(path)
    except OSError as error:
        raise UsageError(
            f"{option}: {path} cannot be written: {error.strerror}; name a file in a directory that takes one"
        ) from None


def check_directory_place(option: str, path: Path) -> None:
    """Raise UsageError where no directory can be, or none that files can be written into. O(depth)."""
    made: list[Path] = []
    try:
        if path.exists() and not path.is_dir():
            raise UsageError(f"{option}: {path} is no directory; name another one")
        missing = [place for place in (path, *path.parents) if not place.exists()]
        for place in reversed(missing):
            place.mkdir()
            made.append(place)
        _try_file(path / "trial")
    except OSError as error:
        raise UsageError(
            f"{option}: {path} cannot be written: {error.strerror}; name a directory that you may write into"
        ) from None
    finally:
        for place in reversed(made):
            with suppress(OSError):
                place.rmdir()


def _try_file(path: Path) -> None:
    """As :func:`hbmtwin.cli.output.write_whole` begins. Raise OSError."""
    trial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    with trial.open("xb"):
        pass
    trial.unlink()
