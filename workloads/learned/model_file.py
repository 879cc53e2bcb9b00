"""A learned model as a TOML file: written so that people can read it, read so that a slip in it is told with its place.

::

    hbmtwin_traffic_model = 1
    source = "azure2023_conv.csv.gz"
    span_s = 3501.721937
    window_s = 300

    [[clients]]
    id = 0
    minute_cv = 0.1072
    windows = [            # start_s, request_rate, family and shape of the gaps
        [0, 4.81666667, "weibull", 0.842606],
        ...
    ]

    [[clients.lengths]]
    start_s = 0
    prompt_tokens = {probabilities = [0, 0.001, ...], tokens = [7, 11, ...]}
    output_tokens = [{probabilities = [...], tokens = [...]}]

    [clients.sharing]      # only where prompts share something
    block_size = 512
    ...

The records and what their figures mean are :mod:`hbmtwin.workloads.learned.model`'s.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

from hbmtwin.workloads.formats.lines import text_lines
from hbmtwin.workloads.formats.whole_file import text_file
from hbmtwin.workloads.learned.measured import Measured
from hbmtwin.workloads.learned.model import FAMILIES, Client, Family, LengthWindow, Sharing, TrafficModel, Window
from hbmtwin.workloads.learned.toml_node import Node
from hbmtwin.workloads.records import WorkloadError

FORMAT_KEY: Final = "hbmtwin_traffic_model"
VERSION: Final = 1
_WIDTH = 116
_LONGEST_LINE_BYTES = 2**24


def read_model(path: str | Path) -> TrafficModel:
    """The model in a file. Raise WorkloadError, with the key's path in the file and the cure, on anything wrong."""
    path = Path(path)
    text = "".join(text_lines(path, longest_bytes=_LONGEST_LINE_BYTES))
    try:
        tree = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # no TOML, or a number that is longer than Python reads
        raise WorkloadError(f"{path}: this is no TOML ({error}); is it a model of hbmtwin workload learn?") from None
    root = Node(str(path), "", tree)
    if FORMAT_KEY not in tree:
        raise root.error(
            f"no key {FORMAT_KEY!r}", "a model begins with it; make one with: hbmtwin workload learn TRACE"
        )
    if (version := root.whole(FORMAT_KEY)) != VERSION:
        raise root.error(f"{FORMAT_KEY} is {version}", f"this hbmtwin reads version {VERSION}; learn the model anew")
    root.only(FORMAT_KEY, "source", "span_s", "window_s", "notes", "clients", "pooled")
    with root.naming():
        return TrafficModel(
            source=root.text("source", ""),
            span_s=root.number("span_s"),
            window_s=root.number("window_s"),
            clients=tuple(_client(node) for node in root.nodes("clients")),
            pooled=_lengths(root.node("pooled")) if "pooled" in tree else None,
            notes=tuple(root.texts("notes")) if "notes" in tree else (),
        )


def write_model(model: TrafficModel, path: Path) -> None:
    """Write a model, as gzip if the name ends in ``.gz``; the same one makes the same bytes. Raise OSError."""
    with text_file(path) as out:
        out.writelines(f"{line}\n" for line in model_lines(model))


def model_lines(model: TrafficModel) -> Iterator[str]:
    """The lines of a model's file."""
    yield f"{FORMAT_KEY} = {VERSION}"
    yield f"source = {_text(model.source)}"
    yield f"span_s = {_number(model.span_s)}"
    yield f"window_s = {_number(model.window_s)}"
    if model.notes:
        yield f"notes = [{', '.join(_text(note) for note in model.notes)}]"
    if model.pooled is not None:
        yield ""
        yield "[pooled]  # lengths of the clients that have none of their own"
        yield from _length_lines(model.pooled)
    for client in model.clients:
        yield ""
        yield "[[clients]]"
        yield f"id = {client.id}"
        if client.minute_cv:
            yield f"minute_cv = {_number(client.minute_cv)}"
        yield "windows = [  # start_s, request_rate, family and shape of the gaps"
        yield from _wrapped(
            f'[{_number(start)}, {_number(rate)}, "{family}", {_number(shape)}]'
            for start, rate, family, shape in client.windows
        )
        yield "]"
        for lengths in client.lengths:
            yield ""
            yield "[[clients.lengths]]"
            yield from _length_lines(lengths)
        if client.sharing is not None:
            yield ""
            yield "[clients.sharing]"
            yield from _sharing_lines(client.sharing)


def _length_lines(lengths: LengthWindow) -> Iterator[str]:
    yield f"start_s = {_number(lengths.start_s)}"
    yield f"prompt_tokens = {_table(lengths.prompt_tokens)}"
    if lengths.prompt_below:
        yield f"prompt_below = {_list(lengths.prompt_below)}"
    yield "output_tokens = ["
    for table in lengths.output_tokens:
        yield f"  {_table(table)},"
    yield "]"


def _sharing_lines(sharing: Sharing) -> Iterator[str]:
    yield f"block_size = {sharing.block_size}"
    yield f"system_prompt_tokens = {sharing.system_prompt_tokens}"
    if sharing.prompt_below:
        yield f"prompt_below = {_list(sharing.prompt_below)}"
    yield f"follow_share = {_list(sharing.follow_share)}"
    yield "shared_part = ["
    for parts in sharing.shared_part:
        yield f"  {_list(parts)},"
    yield "]"
    yield f"follow_after_s = {_list(sharing.follow_after_s)}"


def _table(table: Measured) -> str:
    return f"{{probabilities = {_list(table.probabilities)}, tokens = {_list(table.tokens)}}}"


def _list(values: Sequence[float]) -> str:
    return f"[{', '.join(_number(value) for value in values)}]"


def _number(value: float) -> str:
    """A whole number without a point, else the shortest text that reads as the same number."""
    return str(int(value)) if value == int(value) else repr(float(value))


def _text(value: str) -> str:
    escaped = value.replace("\\", "\\\\").replace('"', '\\"').encode(errors="replace").decode()
    return '"' + "".join(f"\\u{ord(c):04x}" if c < " " or c == "\x7f" else c for c in escaped) + '"'


def _wrapped(items: Iterable[str]) -> Iterator[str]:
    line = ""
    for item in items:
        if line and len(line) + len(item) + 4 > _WIDTH:
            yield line
            line = ""
        line += f"{' ' if line else '  '}{item},"
    if line:
        yield line


def _client(node: Node) -> Client:
    node.only("id", "minute_cv", "windows", "lengths", "sharing")
    with node.naming():
        return Client(
            id=node.whole("id"),
            windows=tuple(_window(row) for row in node.rows("windows", 4)),
            lengths=tuple(_lengths(part) for part in node.nodes("lengths")) if "lengths" in node else (),
            minute_cv=node.number("minute_cv", 0.0),
            sharing=_sharing(node.node("sharing")) if "sharing" in node else None,
        )


def _window(row: Node) -> Window:
    family = row.text(2)
    if family not in FAMILIES:
        raise row.error(f"the family is {family!r}", "a window is [start_s, request_rate, 'gamma' or 'weibull', shape]")
    known: Family = "gamma" if family == "gamma" else "weibull"
    return Window(row.number(0), row.number(1), known, row.number(3))


def _lengths(node: Node) -> LengthWindow:
    node.only("start_s", "prompt_tokens", "prompt_below", "output_tokens")
    with node.naming():
        return LengthWindow(
            start_s=node.number("start_s", 0.0),
            prompt_tokens=_measured(node.node("prompt_tokens")),
            output_tokens=tuple(_measured(part) for part in node.nodes("output_tokens")),
            prompt_below=node.wholes("prompt_below") if "prompt_below" in node else (),
        )


def _measured(node: Node) -> Measured:
    node.only("probabilities", "tokens")
    with node.naming():
        return Measured(node.numbers("probabilities"), node.wholes("tokens"))


def _sharing(node: Node) -> Sharing:
    node.only("block_size", "system_prompt_tokens", "prompt_below", "follow_share", "shared_part", "follow_after_s")
    with node.naming():
        return Sharing(
            block_size=node.whole("block_size"),
            system_prompt_tokens=node.whole("system_prompt_tokens"),
            follow_share=node.numbers("follow_share"),
            shared_part=tuple(row.all_numbers() for row in node.rows("shared_part", None)),
            follow_after_s=node.numbers("follow_after_s"),
            prompt_below=node.wholes("prompt_below") if "prompt_below" in node else (),
        )
