"""JSON that somebody else wrote: objects whose keys are taken one by one, each of the right kind, and none is left.

::

    {"a": 1, "b": {"c": 2.5}}     table.take("a", int) -> 1     table.table("b").take("c", float) -> 2.5
    NaN, a key twice, a key that nobody takes, an object where a number is wanted: refused, with the key's path
"""

from __future__ import annotations

import json
from math import isfinite
from typing import Any

MAX_FILE_BYTES = 1 << 24


class JsonRefused(ValueError):
    """What is wrong, and the path of the key at which."""


class JsonTable:
    """A JSON object. Raise JsonRefused for anything else."""

    def __init__(self, tree: object, path: str = "") -> None:
        self.path = path
        if not isinstance(tree, dict):
            raise JsonRefused(f"{path.rstrip('.') or 'the file'}: an object is wanted, not {short(tree)}")
        self._left = dict(tree)

    def take(self, key: str, *kinds: type, default: Any = ...) -> Any:
        """The value of *key*, of one of these *kinds* (a truth value is no number), or *default* where there is none.

        Raise JsonRefused.
        """
        if key not in self._left:
            if default is ...:
                raise JsonRefused(f"{self.path}{key}: missing")
            return default
        value = self._left.pop(key)
        if not isinstance(value, kinds) or isinstance(value, bool):
            raise JsonRefused(f"{self.path}{short(key)}: {short(value)} is not of the right kind")
        return value

    def table(self, key: str, *, optional: bool = False) -> JsonTable:
        """The object of *key*; *optional*: an empty one where there is none. Raise JsonRefused."""
        return JsonTable(self.take(key, dict, default={} if optional else ...), f"{self.path}{short(key)}.")

    def names(self) -> list[str]:
        """Keys that nobody took yet, in the file's order."""
        return list(self._left)

    def end(self) -> None:
        """Raise JsonRefused for a key that nobody took."""
        if self._left:
            raise JsonRefused(f"{self.path}{short(next(iter(self._left)))}: unknown key")


def parse_json(data: bytes, *, max_bytes: int = MAX_FILE_BYTES) -> Any:
    """The values of a JSON text. Raise JsonRefused for whatever is none, or has a key twice or a NaN."""
    if len(data) > max_bytes:
        raise JsonRefused(f"more than {max_bytes:,} bytes, which no such file has")
    try:
        return json.loads(data.decode("utf-8-sig"), parse_constant=_no_number, object_pairs_hook=_no_key_twice)
    except RecursionError:
        raise JsonRefused("nested too deeply") from None
    except JsonRefused:
        raise
    except ValueError as error:  # also of a number with thousands of digits
        raise JsonRefused(f"not JSON: {error}") from None


def is_number(value: object) -> bool:
    """Whether it is a finite number that a float can hold."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    try:
        return isfinite(value)
    except OverflowError:
        return False


def short(value: object) -> str:
    """A value as an error tells it: in one line, and not all of it."""
    text = value if isinstance(value, str) and value.isidentifier() else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _no_number(text: str) -> float:
    raise JsonRefused(f"{text} is not a number")


def _no_key_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    tree = dict(pairs)
    if len(tree) < len(pairs):
        keys = [key for key, _ in pairs]
        raise JsonRefused(f"{short(next(key for i, key in enumerate(keys) if key in keys[:i]))}: given twice")
    return tree
