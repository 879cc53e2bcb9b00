"""What the catalog raises."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class CatalogError(ValueError):
    """A device, model or workload that the catalog cannot give: what, where, and the cure."""


def unknown(kind: str, name: str, ids: Iterable[str]) -> CatalogError:
    """The error for an id that is not there, with the nearest one that is."""
    ids = sorted(ids)
    wanted = name.rsplit("/", 1)[-1].lower().replace("_", "-")
    near = get_close_matches(wanted, ids, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return CatalogError(f"unknown {kind} {name!r}: {hint}The catalog has {', '.join(ids)}")
