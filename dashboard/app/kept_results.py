"""Results on disk by what they depend on, so that nobody waits twice for the same run; bounded, the oldest go first.

::

    ~/.cache/hbmtwin/dashboard/<key>/summary.json ...       one result directory each, as `hbmtwin run --out` writes it

The key is a run's own (scenario, contents of its files, version): a kept result is the one that a run would give.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pandas as pd

from hbmtwin.api import Result, ResultError
from hbmtwin.dashboard.app.cache_place import cache_place

MOST_BYTES = 1 << 30


class KeptResults:
    """A directory of results, of *most_bytes* altogether."""

    def __init__(self, directory: Path | None = None, most_bytes: int = MOST_BYTES) -> None:
        self._directory = directory or cache_place()
        self._most_bytes = most_bytes
        self._directory.mkdir(parents=True, exist_ok=True)

    def path(self, key: str) -> Path:
        """Where the result of that key lies, or is to lie."""
        return self._directory / key

    def get(self, key: str) -> Result | None:
        """The result, used last from now on; None if there is none. One that cannot be read goes. O(its size)."""
        path = self.path(key)
        try:
            result = Result.load(path)
            os.utime(path)
        except (ResultError, OSError):
            shutil.rmtree(path, ignore_errors=True)  # what is run again is to land there
            return None
        return result

    def tables(self, key: str, names: Sequence[str]) -> tuple[pd.DataFrame, ...] | None:
        """Parquet tables that a job left there; None if it did not. Those that cannot be read go."""
        path = self.path(key)
        try:
            found = tuple(pd.read_parquet(path / f"{name}.parquet") for name in names)
            os.utime(path)
        except (OSError, ValueError):
            shutil.rmtree(path, ignore_errors=True)
            return None
        return found

    def named(self, beginnings: tuple[str, ...]) -> list[Path]:
        """Directories whose names begin so, the one that was used last first."""
        found = [path for path in self._oldest_first() if path.name.startswith(beginnings)]
        return found[::-1]

    def make_room(self) -> None:
        """Remove those that were used longest ago until the rest is small enough. O(files)."""
        kept = self._oldest_first()
        sizes = [_size(path) for path in kept]
        excess = sum(sizes) - self._most_bytes
        for path, size in zip(kept[:-1], sizes[:-1], strict=True):  # the last one is what somebody waits for
            if excess <= 0:
                break
            shutil.rmtree(path, ignore_errors=True)
            excess -= size

    def _oldest_first(self) -> list[Path]:
        """What is there; somebody may remove any of it meanwhile, and the directory too."""
        times_ns: dict[Path, int] = {}
        with suppress(OSError):
            for path in self._directory.iterdir():
                with suppress(OSError):
                    times_ns[path] = path.lstat().st_mtime_ns
        return sorted(times_ns, key=times_ns.__getitem__)


def _size(path: Path) -> int:
    size = 0
    with suppress(OSError):
        for file in path.rglob("*"):
            if file.is_file():
                size += file.stat().st_size
    return size
