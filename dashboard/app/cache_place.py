"""Where the app keeps its results. Without the simulator's imports, so that the command can look before it starts."""

from __future__ import annotations

import os
from pathlib import Path

NAME = "HBMTWIN_CACHE"
"""Where they lie, if not in the user's cache directory."""


def cache_place() -> Path:
    """The directory; it may not be there yet."""
    if own := os.environ.get(NAME):
        return Path(own)
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "hbmtwin" / "dashboard"
