"""A grid of settings: axes as words on a command line, and every combination of their values.

::

    kv_cache.preset=paged,doubling        workload.users=10:200:10
                    |                                    |
    Axis("kv_cache.preset", ("paged", "doubling"))   Axis("workload.users", ("10", "20", ... "200"))
                    +----------- combinations -----------+
    {preset: paged, users: 10}, {preset: paged, users: 20}, ... {preset: doubling, users: 200}

A value is text as ``--set`` takes it. ``start:stop:step`` counts in decimals, so that 0.1:0.5:0.1 is 0.1, 0.2, 0.3, 0.4
and 0.5; the stop is a value where a step hits it. All three may carry one and the same unit: ``32GiB:64GiB:8GiB``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from decimal import Decimal
from itertools import product
from math import prod
from typing import NamedTuple

from hbmtwin.sim.scenario import Scenario, ScenarioError, known_keys
from hbmtwin.sim.variants import split_at_commas

RANGE = re.compile(r"([^:\"'\[{(]*):([^:]*):([^:]*)")
NUMBER = re.compile(r"([+-]?\d+(?:\.\d+)?)\s*([A-Za-z]*)")
FORM = "write key=a,b,c or key=start:stop:step, e.g. kv_cache.preset=paged,doubling or workload.users=10:200:10"
MOST_VALUES = 10_000
"""Of one range: beyond it lies a slip of the step."""


class Axis(NamedTuple):
    """A key and the values that it takes, as ``--set`` would take them."""

    key: str
    values: tuple[str, ...]


class Grid(NamedTuple):
    """The axes, the outermost first."""

    axes: tuple[Axis, ...]

    def __len__(self) -> int:
        """How many combinations there are."""
        return prod(len(axis.values) for axis in self.axes)

    def combinations(self) -> Iterator[dict[str, str]]:
        """Each combination as keys and values, the last axis fastest."""
        for values in product(*(axis.values for axis in self.axes)):
            yield dict(zip((axis.key for axis in self.axes), values, strict=True))


def parse_grid(words: Iterable[str], overrides: Sequence[str] = ()) -> Grid:
    """The grid of several words. Raise ScenarioError for one that is none, and for a key that is given twice.

    *overrides* are those of ``--set``, which may not name a key of the grid.
    """
    axes: dict[str, Axis] = {}
    for word in words:
        axis = parse_axis(word)
        if axis.key in axes:
            raise ScenarioError(f"--grid {axis.key}: is given twice; write all its values in one word, {axis.key}=a,b")
        axes[axis.key] = axis
    for text in overrides:
        if (key := text.partition("=")[0].strip()) in axes:
            raise ScenarioError(f"--set {key}: --grid varies it; leave it out of one of the two")
    return Grid(tuple(axes.values()))


def parse_axis(word: str) -> Axis:
    """One axis. Raise ScenarioError."""
    key, equals, text = word.partition("=")
    key = key.strip()
    if not equals or not key or not text.strip():
        raise ScenarioError(f"--grid {word}: {FORM}")
    if key == "seed":
        raise ScenarioError(f"--grid {word}: seeds are not an axis; use --seeds N, and --seed for the first")
    if key not in known_keys():
        Scenario.of({key: 0})  # raises, with the nearest key
        raise ScenarioError(f"--grid {key}: is no key of a scenario")
    values: dict[str, None] = {}
    for part in _parts(word, text):
        values |= dict.fromkeys(_values(word, part))
    return Axis(key, tuple(values))


def _parts(word: str, text: str) -> list[str]:
    """The values between commas. Raise ScenarioError for an empty one, and for what is never closed."""
    parts, missing = split_at_commas(text)
    if missing:
        raise ScenarioError(f"--grid {word}: a {missing[-1]} is missing")
    if not all(part.strip() for part in parts):
        raise ScenarioError(f"--grid {word}: a value is missing beside a comma")
    return [part.strip() for part in parts]


def _values(word: str, part: str) -> Iterator[str]:
    """The values of a part: those of a range, or itself."""
    found = RANGE.fullmatch(part)
    if found is None:
        yield part
        return
    numbers = [NUMBER.fullmatch(text.strip()) for text in found.groups()]
    if None in numbers and not any(numbers):
        yield part  # a name with two colons
        return
    if None in numbers or len({number[2] for number in numbers if number}) > 1:
        raise ScenarioError(
            f"--grid {word}: {part} is no range; write start:stop:step as three numbers with one unit, e.g. 10:200:10 "
            "or 32GiB:64GiB:8GiB"
        )
    start, stop, step = (Decimal(number[1]) for number in numbers if number)
    unit = numbers[0][2] if numbers[0] else ""
    if step <= 0 or stop < start:
        raise ScenarioError(f"--grid {word}: {part} has no values; the step must be above 0, and stop at least start")
    count = int((stop - start) / step) + 1
    if count > MOST_VALUES:
        raise ScenarioError(f"--grid {word}: {part} has {count:,} values; at most {MOST_VALUES:,}: take a larger step")
    for i in range(count):
        value = format(start + i * step, "f")
        yield (value.rstrip("0").rstrip(".") if "." in value else value) + unit
