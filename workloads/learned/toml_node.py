"""One table or list within a TOML file, which knows its place: what is missing or of the wrong kind is told with it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from hbmtwin.workloads.records import WorkloadError
from hbmtwin.workloads.suggest import did_you_mean

Key = str | int


class Node:
    """*value* stands at *place* (such as ``clients[2].lengths[0]``) of *file*. Each getter raises WorkloadError."""

    def __init__(self, file: str, place: str, value: object) -> None:
        self.file = file
        self.place = place
        self._value = value

    def __contains__(self, key: str) -> bool:
        return isinstance(self._value, Mapping) and key in self._value

    def error(self, what: str, cure: str) -> WorkloadError:
        """What is wrong here, and what to do."""
        return WorkloadError(f"{self.file}: {f'{self.place}: ' if self.place else ''}{what}; {cure}")

    @contextmanager
    def naming(self) -> Iterator[None]:
        """Put file and place before the message of a WorkloadError from inside that has none yet."""
        try:
            yield
        except WorkloadError as error:
            if str(error).startswith(f"{self.file}: "):
                raise
            raise WorkloadError(f"{self.file}: {f'{self.place}: ' if self.place else ''}{error}") from None

    def only(self, *known: str) -> None:
        """Refuse keys that are not among *known*."""
        for key in self._table():
            if key not in known:
                raise self.error(f"unknown key {key!r}", did_you_mean(str(key), known))

    def node(self, key: str) -> Node:
        """The table under *key*."""
        child = self._child(key, self._get(key))
        child._table()
        return child

    def nodes(self, key: str) -> list[Node]:
        """The tables of the list under *key*, one or more."""
        children = [self._child_of(key, i, item) for i, item in enumerate(self._list(key))]
        if not children:
            raise self.error(f"{key} is empty", "give it one or more tables")
        for child in children:
            child._table()
        return children

    def rows(self, key: str, length: int | None) -> list[Node]:
        """The lists of the list under *key*, each of *length* items."""
        children = [self._child_of(key, i, item) for i, item in enumerate(self._list(key))]
        for child in children:
            if not isinstance(child._value, list) or length not in (None, len(child._value)):
                many = "numbers" if length is None else f"{length} items"
                raise child.error(f"this is {str(child._value)[:60]}", f"it must be a list of {many}")
        return children

    def whole(self, key: Key) -> int:
        """The whole number under *key*."""
        value = self._get(key)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._wrong(key, value, "a whole number")
        return value

    def number(self, key: Key, default: float | None = None) -> float:
        """The finite number under *key*."""
        if default is not None and isinstance(key, str) and key not in self:
            return default
        value = self._get(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self._wrong(key, value, "a finite number")
        return float(value)

    def text(self, key: Key, default: str | None = None) -> str:
        """The text under *key*."""
        if default is not None and isinstance(key, str) and key not in self:
            return default
        value = self._get(key)
        if not isinstance(value, str):
            raise self._wrong(key, value, "a text in quotes")
        return value

    def wholes(self, key: str) -> tuple[int, ...]:
        """The whole numbers of the list under *key*."""
        child = self._child(key, self._list(key))
        return tuple(child.whole(i) for i in range(len(self._list(key))))

    def numbers(self, key: str) -> tuple[float, ...]:
        """The finite numbers of the list under *key*."""
        return self._child(key, self._list(key)).all_numbers()

    def texts(self, key: str) -> tuple[str, ...]:
        """The texts of the list under *key*."""
        child = self._child(key, self._list(key))
        return tuple(child.text(i) for i in range(len(self._list(key))))

    def all_numbers(self) -> tuple[float, ...]:
        """The finite numbers of this list."""
        assert isinstance(self._value, list), "rows() and _list() have checked it"
        return tuple(self.number(i) for i in range(len(self._value)))

    def _table(self) -> Mapping[str, object]:
        if not isinstance(self._value, Mapping):
            raise self.error(f"this is {str(self._value)[:60]}", "it must be a table")
        return self._value

    def _list(self, key: str) -> list[object]:
        value = self._get(key)
        if not isinstance(value, list):
            raise self._wrong(key, value, "a list")
        return value

    def _get(self, key: Key) -> object:
        if isinstance(key, int):
            assert isinstance(self._value, list), "rows() and _list() have checked it"
            return self._value[key]
        table = self._table()
        if key not in table:
            raise self.error(f"no key {key!r}", "it is needed")
        return table[key]

    def _wrong(self, key: Key, value: object, kind: str) -> WorkloadError:
        return self._child(key, value).error(f"this is {str(value)[:60]!r}", f"it must be {kind}")

    def _child(self, key: Key, value: object) -> Node:
        part = f"[{key}]" if isinstance(key, int) else f".{key}" if self.place else key
        return Node(self.file, f"{self.place}{part}", value)

    def _child_of(self, key: str, index: int, value: object) -> Node:
        return self._child(key, None)._child(index, value)
