"""What the catalog raises."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from difflib import get_close_matches


class CatalogError(ValueError):
    """A device, model or workload that the catalog cannot give: what, where, and the cure."""


def unknown(kind: str, name: str, ids: Iterable[str], meant: Sequence[str] = ()) -> CatalogError:
    """The error for an id that is not there, with those that are *meant*, else the nearest that are."""
    ids = sorted(ids)
    wanted = name.rsplit("/", 1)[-1].lower().replace("_", "-")
    numbered = [id for id in ids if _shares_a_number(wanted, id)]
    near = get_close_matches(wanted, numbered, n=1, cutoff=0.75) or numbered
    near = list(meant) or near or get_close_matches(wanted, ids, n=1, cutoff=0.5)
    hint = f"did you mean {' or '.join(map(repr, near[:3]))}? " if near else ""
    return CatalogError(f"unknown {kind} {name!r}: {hint}The catalog has {', '.join(ids)}")


def _shares_a_number(wanted: str, id: str) -> bool:
    """Whether a word of *wanted* that has a digit is a word of *id*, or all of it: ``h100`` of ``h100-80gb``."""
    words = [word for word in re.split("[^a-z0-9.]+", wanted) if re.search(r"\d", word)]
    return any(word in (*id.split("-"), id.replace("-", "")) for word in words)
