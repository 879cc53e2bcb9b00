"""Numbers of a ``config.json``, each checked: nothing in the file is trusted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hbmtwin.sim.catalog.errors import CatalogError

MAX_SIZE = 1 << 24
"""No size in a config is near this; a larger one is a mistake."""


def size(
    config: Mapping[str, Any], key: str, where: str, *, default: int | None = None, low: int = 1, limit: int = MAX_SIZE
) -> int:
    """The whole number *key*, *default* where it is missing or null. Raise CatalogError, naming *where* and the key."""
    value = config.get(key)
    if value is None:
        value = default
    if value is None:
        raise CatalogError(f"{where}: {key} is missing")
    if isinstance(value, str) and value.strip().isdecimal():
        raise CatalogError(f"{where}: {key} is the text {value[:40]!r}; write the number without quotes")
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= limit:
        raise CatalogError(f"{where}: {key} must be a whole number from {low} to {limit}, not {str(value)[:40]}")
    return value


def flag(config: Mapping[str, Any], key: str, where: str, *, default: bool = False) -> bool:
    """The same of true or false."""
    value = config.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise CatalogError(f"{where}: {key} must be true or false, not {str(value)[:40]!r}")
    return value
