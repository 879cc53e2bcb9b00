"""ServeGen's files as a model: clients with fitted arrivals by window and measured lengths by six hours.

::

    our line format, one JSON line a client          upstream, two files a client in a folder
    {"client": 0,                                    chunk-0-trace.csv (no header):
     "windows": [[0, 0.39, 0.91, "Gamma", 1.2, 2.1]]     start_s,rate,cv,family,shape,scale
     "dataset": {"0":                                chunk-0-dataset.json:
       {"input_tokens": [[4, 9], [0.5, 0.5]], ...}}}     {"0": {"input_tokens": "{4: 0.5, 9: 0.5}", ...}}

Of a window count rate, family and shape: gaps are stretched to fill it, so that their scale says nothing. A window with
requests but no family has too few to fit, and is Poisson's. Of the fields are read ``input_tokens`` (``text_tokens``
where there is none) and ``output_tokens``. Source: github.com/alibaba/ServeGen (Xiang et al., 2025; Apache-2.0); the
line format is our own, smaller one of the same data.
"""

from __future__ import annotations

import ast
import csv
import json
import math
import re
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Final, NamedTuple

from hbmtwin.workloads.formats.lines import text_lines
from hbmtwin.workloads.learned.measured import measured
from hbmtwin.workloads.learned.model import Client, Family, LengthWindow, TrafficModel, Window
from hbmtwin.workloads.lengths import MAX_TOKENS
from hbmtwin.workloads.records import WorkloadError

LONGEST_LINE_BYTES: Final = 2**28
_DEFAULT_WINDOW_S = 600.0
_FAMILIES: Mapping[str, Family] = {"gamma": "gamma", "weibull": "weibull"}
_NO_FAMILY = ("", "none", "nan", "null")
_TRACE = re.compile(r"chunk-(\d+)-trace\.csv")
_INPUTS = ("input_tokens", "text_tokens")

Weights = dict[int, float]


class _Record(NamedTuple):
    """One client, as it is written: where, and what."""

    where: str
    client: object
    windows: object
    dataset: object


class _Lengths(NamedTuple):
    start_s: float
    inputs: Weights
    outputs: Weights


class _Client(NamedTuple):
    id: int
    starts_s: tuple[float, ...]
    """Of all windows, those without requests too."""
    windows: tuple[Window, ...]
    lengths: tuple[_Lengths, ...]
    fields: frozenset[str]
    """What else the data set tells."""


def is_servegen(path: Path) -> bool:
    """Whether this is a folder of upstream's files, or begins with a line of our format."""
    if path.is_dir():
        return any(_TRACE.fullmatch(entry.name) for entry in path.iterdir())
    try:
        for line in text_lines(path, longest_bytes=LONGEST_LINE_BYTES):
            return line.lstrip().startswith("{") and '"windows"' in line and '"dataset"' in line
    except WorkloadError:
        return False
    return False


def read_servegen(path: str | Path) -> TrafficModel:
    """The model in ServeGen's files; clients without lengths draw from the mix of the others, weighted by requests.

    O(file). Raise WorkloadError, with the place in the file, on what is not of the format.
    """
    path = Path(path)
    clients = [_client(record) for record in (_folder(path) if path.is_dir() else _lines(path))]
    if not clients:
        raise WorkloadError(f"{path}: no client in it; it needs a JSON line, or a chunk-0-trace.csv, for each client")
    window_s = min((b - a for c in clients for a, b in pairwise(c.starts_s)), default=_DEFAULT_WINDOW_S)
    last_s = max((start for c in clients for start in c.starts_s), default=0.0)
    notes = []
    without = [client.id for client in clients if client.windows and not client.lengths]
    if without:
        names = ", ".join(map(str, without))
        notes.append(f"no lengths of their own have clients {names}: theirs are the mix of the others', by requests")
    left_out = sorted({field for client in clients for field in client.fields})
    if left_out:
        notes.append(f"not in the model: {', '.join(left_out)}")
    try:
        return TrafficModel(
            source=path.name,
            span_s=last_s + window_s,
            window_s=window_s,
            clients=tuple(Client(c.id, c.windows, tuple(_window_of(item) for item in c.lengths)) for c in clients),
            pooled=_pooled(clients) if without else None,
            notes=tuple(notes),
        )
    except WorkloadError as error:
        raise WorkloadError(f"{path}: {error}") from None


def _pooled(clients: list[_Client]) -> LengthWindow:
    """The mix of all lengths, each table counted as often as its client sends requests while it holds."""
    inputs: Weights = {}
    outputs: Weights = {}
    for client in clients:
        for i, lengths in enumerate(client.lengths):
            end_s = client.lengths[i + 1].start_s if i + 1 < len(client.lengths) else math.inf
            begin_s = lengths.start_s if i else 0.0
            rate = sum(w.request_rate for w in client.windows if begin_s <= w.start_s < end_s)
            for mix, table in ((inputs, lengths.inputs), (outputs, lengths.outputs)):
                total = sum(table.values())
                for tokens, weight in table.items():
                    mix[tokens] = mix.get(tokens, 0.0) + rate * weight / total
    if not inputs:
        raise WorkloadError("no client has lengths; one data set at least must not be empty")
    return _window_of(_Lengths(0.0, inputs, outputs))


def _window_of(lengths: _Lengths) -> LengthWindow:
    inputs, outputs = (measured(table.keys(), table.values()) for table in (lengths.inputs, lengths.outputs))
    return LengthWindow(lengths.start_s, inputs, (outputs,))


def _lines(path: Path) -> Iterator[_Record]:
    for number, line in enumerate(text_lines(path, longest_bytes=LONGEST_LINE_BYTES), 1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        tree = _json(line, where)
        if not isinstance(tree, dict) or not {"client", "windows", "dataset"} <= tree.keys():
            raise WorkloadError(f"{where}: no object with client, windows and dataset; write one for each client")
        yield _Record(where, tree["client"], tree["windows"], tree["dataset"])


def _folder(path: Path) -> Iterator[_Record]:
    found = ((_TRACE.fullmatch(entry.name), entry) for entry in path.iterdir())
    for number, trace in sorted((int(match[1]), entry) for match, entry in found if match):
        with trace.open(encoding="utf-8", newline="") as lines:
            try:
                rows = [[_value(field) for field in row] for row in csv.reader(lines) if row]
            except (csv.Error, UnicodeDecodeError) as error:
                raise WorkloadError(f"{trace}: this is no CSV ({error}); fetch it again") from None
        data = path / f"chunk-{number}-dataset.json"
        dataset: object = {}
        if data.exists():
            try:
                dataset = _json(data.read_text(encoding="utf-8"), str(data))
            except UnicodeDecodeError:
                raise WorkloadError(f"{data}: this is not UTF-8 text; fetch it again") from None
        yield _Record(str(trace), number, rows, dataset)


def _json(text: str, where: str) -> object:
    try:
        tree: object = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise WorkloadError(f"{where}: this is no JSON ({error}); fetch the file again") from None
    return tree


def _value(field: str) -> object:
    """A CSV field: a number where it is one."""
    try:
        return float(field)
    except ValueError:
        return field.strip()


def _client(record: _Record) -> _Client:
    where = record.where
    if type(record.client) is not int or record.client < 0:
        raise WorkloadError(f"{where}: client is {str(record.client)[:40]!r}; it must be a whole number from 0")
    if not isinstance(record.windows, list):
        raise WorkloadError(f"{where}: windows is {str(record.windows)[:40]!r}; it must be a list of windows")
    starts: list[float] = []
    windows: list[Window] = []
    for i, row in enumerate(record.windows):
        window = _window(row, f"{where}: windows[{i}]")
        if starts and window.start_s <= starts[-1]:
            raise WorkloadError(f"{where}: windows[{i}] starts at {window.start_s:g} s; windows must be in order")
        starts.append(window.start_s)
        if window.request_rate > 0:
            windows.append(window)
    lengths, fields = _dataset(record.dataset, where)
    return _Client(record.client, tuple(starts), tuple(windows), lengths, fields)


def _window(row: object, where: str) -> Window:
    cure = "it must be start_s, rate, cv, family, shape, scale"
    if not isinstance(row, list) or len(row) != 6:
        raise WorkloadError(f"{where} is {str(row)[:60]}; {cure}")
    start, rate, _, family, shape, _ = row
    for name, value in (("start_s", start), ("rate", rate)):
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1e9:
            raise WorkloadError(f"{where}: {name} is {str(value)[:40]!r}; it must be a number from 0 to 1e9")
    text = "" if family is None else str(family).lower()
    if not rate or text in _NO_FAMILY:
        return Window(float(start), float(rate), "gamma", 1.0)
    if text not in _FAMILIES:
        raise WorkloadError(f"{where}: the family is {str(family)[:40]!r}; it must be Gamma, Weibull or empty")
    if isinstance(shape, bool) or not isinstance(shape, int | float) or not 0 < shape <= 1e6:
        raise WorkloadError(f"{where}: the shape is {str(shape)[:40]!r}; it must be a number above 0 and up to 1e6")
    return Window(float(start), float(rate), _FAMILIES[text], float(shape))


def _dataset(dataset: object, where: str) -> tuple[tuple[_Lengths, ...], frozenset[str]]:
    if not isinstance(dataset, dict):
        raise WorkloadError(f"{where}: dataset is {str(dataset)[:40]!r}; it must be an object of start_s: fields")
    found: list[_Lengths] = []
    others: set[str] = set()
    for start, fields in dataset.items():
        place = f"{where}: dataset[{start!r}]"
        start_s = _value(str(start))
        if not isinstance(start_s, float) or not 0 <= start_s <= 1e9:
            raise WorkloadError(f"{place}: this is no time; it must be a number of seconds")
        if not fields:  # a client that was silent then
            continue
        if not isinstance(fields, dict):
            raise WorkloadError(f"{place} is {str(fields)[:40]!r}; it must be an object of field: lengths")
        name = next((name for name in _INPUTS if name in fields), None)
        if name is None or "output_tokens" not in fields:
            raise WorkloadError(f"{place}: needs {' or '.join(_INPUTS)}, and output_tokens; has {', '.join(fields)}")
        inputs, outputs = (_weights(fields[key], f"{place}.{key}") for key in (name, "output_tokens"))
        others |= set(fields) - {name, "output_tokens"}
        if inputs and outputs:
            found.append(_Lengths(start_s, inputs, outputs))
    return tuple(sorted(found, key=lambda lengths: lengths.start_s)), frozenset(others)


def _weights(table: object, where: str) -> Weights:
    """Lengths with their probabilities: two lists, or a text with a Python dict in it. Lengths below 1 count as 1."""
    if isinstance(table, str):
        try:
            table = ast.literal_eval(table)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            raise WorkloadError(
                f"{where}: this is no Python dict of value: probability; fetch the file again"
            ) from None
    if isinstance(table, list) and len(table) == 2 and all(isinstance(part, list) for part in table):
        pairs = list(zip(*table, strict=False))
    elif isinstance(table, dict):
        pairs = list(table.items())
    else:
        raise WorkloadError(f"{where} is {str(table)[:40]!r}; it must be [[values], [probabilities]] or a dict")
    weights: Weights = {}
    for tokens, weight in pairs:
        for value, most in ((tokens, MAX_TOKENS), (weight, 1e15)):
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most:
                raise WorkloadError(f"{where}: {str(value)[:40]!r} among the lengths; it must be a number from 0")
        if weight:
            key = max(1, round(tokens))
            weights[key] = weights.get(key, 0.0) + weight
    return weights
