"""What a kernel benchmark measures and leaves behind: cases, their work, their times, and the file of them.

::

    op             sizes                                             bytes that must be read    FLOPs
    copy           bytes                                             bytes, and written         -
    matmul         tokens, out_features, in_features                 the matrix                 2 a weight and token
    layer          tokens, hidden_size, intermediate_size, heads     its four matrices          the same
    prefill        batch, new_tokens, context_tokens, heads          K and V                    4 a pair and head_dim
    decode         batch, context_tokens, heads                      K and V                    the same
    paged_decode   and block_size                                    K and V                    the same
    step           those, num_layers, hidden_size,                   all matrices, K and V      of all
                   intermediate_size, vocab_size
    all_reduce     ranks, bytes                                      sent by a rank of a ring   -

``all_reduce_in_graph`` is the same, captured and replayed. ``heads`` are num_heads, num_kv_heads, head_dim;
context_tokens of decode count the new one. A layer is all of a decoder layer but its attention; a step is a whole
decoder's, in which each sequence gets a token.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from hbmtwin.kernels.attention.interface import Backend
from hbmtwin.kernels.checked_json import MAX_FILE_BYTES, JsonRefused, JsonTable, parse_json, short
from hbmtwin.kernels.profile import CONFIDENCE, MAX_BYTES

Op = Literal[
    "copy", "matmul", "layer", "prefill", "decode", "paged_decode", "step", "all_reduce", "all_reduce_in_graph"
]
COLLECTIVES: tuple[Op, ...] = ("all_reduce", "all_reduce_in_graph")
"""Of several ranks: :mod:`hbmtwin.validation.bench.collectives` times them."""
OPS: tuple[Op, ...] = get_args(Op)
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
FORMAT = 1
MAX_SIZE = 1 << 40
MAX_CASE_BYTES = 16 << 30
MAX_POINTS = 100_000

_HEAD = ("backend", "kernels", "device", "dtype", "torch", "clock")
MEMORY_FIGURES = ("context_bytes", "workspace_bytes", "graph_step_bytes", "communicator_bytes")
"""What is measured of a device's memory: see :mod:`hbmtwin.validation.bench.memory`."""
MAX_HOW = 400
_HEADS = ("num_heads", "num_kv_heads", "head_dim")
SIZES: Mapping[Op, tuple[str, ...]] = {
    "copy": ("bytes",),
    "matmul": ("tokens", "out_features", "in_features"),
    "layer": ("tokens", "hidden_size", "intermediate_size", *_HEADS),
    "prefill": ("batch", "new_tokens", "context_tokens", *_HEADS),
    "decode": ("batch", "context_tokens", *_HEADS),
    "paged_decode": ("batch", "context_tokens", *_HEADS, "block_size"),
    "step": (
        *("batch", "context_tokens", *_HEADS, "block_size"),
        *("num_layers", "hidden_size", "intermediate_size", "vocab_size"),
    ),
    "all_reduce": ("ranks", "bytes"),
    "all_reduce_in_graph": ("ranks", "bytes"),
}
MAY_BE_0 = ("context_tokens",)
"""Of a prefill."""
LEAST: Mapping[str, int] = {"bytes": max(DTYPE_BYTES.values()), "ranks": 2}
"""Where it is not 1: an element is copied at least."""
MAX_RANKS = 64


class BenchError(ValueError):
    """A grid or a benchmark's file that cannot be used: the file, the key, and the cure."""


class Case(NamedTuple):
    """One kernel at one size. Made by :func:`case`, which checks."""

    op: Op
    sizes: tuple[int, ...]
    """In the order of :data:`SIZES`."""

    def named(self) -> dict[str, int]:
        """Its sizes by name."""
        return dict(zip(SIZES[self.op], self.sizes, strict=True))

    def shape(self) -> tuple[int, ...]:
        """What it has in common with cases that differ in lengths and batch only."""
        return tuple(size for name, size in self.named().items() if name not in VARIES)

    def __str__(self) -> str:
        return f"{self.op} " + " ".join(f"{name}={size}" for name, size in self.named().items())


VARIES = ("bytes", "tokens", "batch", "new_tokens", "context_tokens")


class Work(NamedTuple):
    """What a case cannot do without."""

    read_bytes: int
    flops: int


class Point(NamedTuple):
    """What was measured of a case: quartiles of its times."""

    case: Case
    median_ns: float
    p25_ns: float
    p75_ns: float
    runs: int


class MemoryFigure(NamedTuple):
    """Bytes that a device takes besides tensors."""

    name: str
    """One of :data:`MEMORY_FIGURES`."""
    bytes: int | None
    """None: not measured."""
    how: str
    """It was measured, or why not."""
    confidence: str
    """``H``, ``M`` or ``L``; empty where there is none."""


@dataclass(frozen=True, kw_only=True)
class Bench:
    """A benchmark's points, and where they come from."""

    backend: str
    kernels: str
    device: str
    """What the machine calls it."""
    dtype: str
    threads: int
    """Of a CPU; 0: not said."""
    torch: str
    clock: str
    """What times were taken by: ``events``, ``wall``, ``thread``."""
    points: tuple[Point, ...]
    memory: tuple[MemoryFigure, ...] = ()
    """Empty: nothing was said of it, as in files of before."""

    @property
    def dtype_bytes(self) -> int:
        """Of an element."""
        return DTYPE_BYTES[self.dtype]

    def work(self, point: Point) -> Work:
        """Of that point's case."""
        return work_of(point.case, self.dtype_bytes)

    def to_dict(self) -> dict[str, Any]:
        """As JSON values: what :func:`read_bench` reads."""
        return {
            "format": FORMAT,
            **{name: getattr(self, name) for name in _HEAD},
            "threads": self.threads,
            **({"memory": [figure._asdict() for figure in self.memory]} if self.memory else {}),
            "points": [
                {"op": p.case.op, **p.case.named(), **{k: v for k, v in p._asdict().items() if k != "case"}}
                for p in self.points
            ],
        }

    def to_json(self) -> str:
        """The text of its file, a point a line."""
        tree = self.to_dict()
        points = ",\n  ".join(json.dumps(point) for point in tree.pop("points"))
        head = json.dumps(tree, ensure_ascii=False)[1:-1]
        return f'{{{head},\n "points": [\n  {points}\n ]}}\n'


def case(op: str, sizes: Mapping[str, int], where: str = "case") -> Case:
    """The case of that op. Raise BenchError for a size that is missing, unknown or out of range."""
    if op not in OPS:
        raise BenchError(f"{where}: op {short(op)} is none of {', '.join(OPS)}")
    wanted = SIZES[op]
    if wrong := [name for name in (*wanted, *sizes) if (name in wanted) != (name in sizes)]:
        raise BenchError(f"{where}: {op} has the sizes {', '.join(wanted)}; missing or unknown: {short(wrong[0])}")
    made = Case(op, tuple(sizes[name] for name in wanted))
    for name, size in made.named().items():
        least = 0 if op == "prefill" and name in MAY_BE_0 else LEAST.get(name, 1)
        if not least <= size <= MAX_SIZE:
            raise BenchError(f"{where}: {name} is a whole number from {least}, not {short(size)}")
    heads = made.named()
    if heads.get("ranks", 0) > MAX_RANKS:
        raise BenchError(f"{where}: ranks is at most {MAX_RANKS}, not {short(heads['ranks'])}")
    if op in ("layer", "step") and heads["head_dim"] % 2:
        raise BenchError(
            f"{where}: head_dim {heads['head_dim']} is odd, and rotary embedding turns pairs; take an even one"
        )
    if "num_heads" in heads and heads["num_heads"] % heads["num_kv_heads"]:
        raise BenchError(f"{where}: {heads['num_kv_heads']} KV heads do not divide {heads['num_heads']} heads")
    if (size := work_of(made, 4).read_bytes) > MAX_CASE_BYTES:
        raise BenchError(
            f"{where}: {size / 2**30:.1f} GiB to read, more than {MAX_CASE_BYTES >> 30}; take smaller sizes"
        )
    return made


def work_of(c: Case, dtype_bytes: int) -> Work:
    """Bytes that it must read, each once, and FLOPs that it must do; what is masked causally is not among them."""
    n = c.named()
    if c.op == "copy":
        return Work(n["bytes"], 0)
    if c.op in COLLECTIVES:
        return Work(2 * (n["ranks"] - 1) * n["bytes"] // n["ranks"], 0)
    if c.op == "matmul":
        weights = n["out_features"] * n["in_features"]
        return Work(weights * dtype_bytes, 2 * weights * n["tokens"])
    if c.op == "layer":
        weights = layer_weights(n)
        return Work(weights * dtype_bytes, 2 * weights * n["tokens"])
    kv_token_bytes = 2 * n["num_kv_heads"] * n["head_dim"] * dtype_bytes
    pair_flops = 4 * n["num_heads"] * n["head_dim"]
    if c.op == "prefill":
        new, context = n["new_tokens"], n["context_tokens"]
        pairs = new * context + new * (new + 1) // 2
        return Work(n["batch"] * (new + context) * kv_token_bytes, n["batch"] * pairs * pair_flops)
    tokens = n["batch"] * n["context_tokens"]
    if c.op == "step":
        weights = n["num_layers"] * layer_weights(n) + n["vocab_size"] * n["hidden_size"]
        layers = n["num_layers"]
        return Work(
            weights * dtype_bytes + layers * tokens * kv_token_bytes,
            2 * weights * n["batch"] + layers * tokens * pair_flops,
        )
    return Work(tokens * kv_token_bytes, tokens * pair_flops)


def layer_weights(n: Mapping[str, int]) -> int:
    """Elements of a layer's matrices: queries, keys and values; output; gate and up; down."""
    queries, kv = n["num_heads"] * n["head_dim"], n["num_kv_heads"] * n["head_dim"]
    return n["hidden_size"] * (2 * queries + 2 * kv + 3 * n["intermediate_size"])


def read_bench(path: Path) -> Bench:
    """The benchmark of a file. Raise BenchError for whatever is not one, OSError."""
    with path.open("rb") as file:
        data = file.read(MAX_FILE_BYTES + 1)
    try:
        return _bench_of(JsonTable(parse_json(data)))
    except (ValueError, OverflowError) as error:
        raise BenchError(f"{path}: {error}; `hbmtwin bench kernels --out` writes such files") from None


def _bench_of(root: JsonTable) -> Bench:
    if (version := root.take("format", int)) != FORMAT:
        raise JsonRefused(f"format: {version} is not {FORMAT}, the only one there is")
    texts = {key: root.take(key, str) for key in _HEAD}
    if texts["dtype"] not in DTYPE_BYTES:
        raise JsonRefused(f"dtype: {short(texts['dtype'])} is none of {', '.join(DTYPE_BYTES)}")
    if texts["backend"] not in (backends := get_args(Backend)):
        raise JsonRefused(f"backend: {short(texts['backend'])} is none of {', '.join(backends)}")
    if (threads := root.take("threads", int)) < 0:
        raise JsonRefused(f"threads: {threads} is below 0, which says that their number is not known")
    points = root.take("points", list)
    memory = root.take("memory", list, default=[])
    root.end()
    if not 1 <= len(points) <= MAX_POINTS:
        raise JsonRefused(f"points: 1 to {MAX_POINTS:,} are wanted, not {len(points)}")
    return Bench(
        **texts,
        threads=threads,
        points=tuple(_point(JsonTable(p, f"points.{i}.")) for i, p in enumerate(points)),
        memory=_memory(memory),
    )


def _memory(entries: list[Any]) -> tuple[MemoryFigure, ...]:
    found: dict[str, MemoryFigure] = {}
    for i, entry in enumerate(entries[: len(MEMORY_FIGURES) + 1]):
        table = JsonTable(entry, f"memory.{i}.")
        name, how, confidence = (table.take(key, str) for key in ("name", "how", "confidence"))
        size = table.take("bytes", int, type(None))
        table.end()
        if name not in MEMORY_FIGURES or name in found:
            raise JsonRefused(f"memory.{i}.name: {short(name)} is told twice, or none of {', '.join(MEMORY_FIGURES)}")
        if size is not None and not 0 <= size <= MAX_BYTES:
            raise JsonRefused(f"memory.{i}.bytes: {short(size)} is no number of bytes of a device")
        if confidence not in (("",) if size is None else CONFIDENCE):
            raise JsonRefused(f"memory.{i}.confidence: {short(confidence)}; H, M or L, and empty without bytes")
        if not how.isprintable() or len(how) > MAX_HOW:
            raise JsonRefused(f"memory.{i}.how: at most {MAX_HOW} printable characters are wanted")
        found[name] = MemoryFigure(name, size, how, confidence)
    return tuple(found.values())


def _point(table: JsonTable) -> Point:
    where = table.path.rstrip(".")
    median, low, high = (table.take(name, int, float) for name in ("median_ns", "p25_ns", "p75_ns"))
    runs = table.take("runs", int)
    if not (0 < low <= median <= high <= 1e15 and 1 <= runs <= 10**9):
        raise JsonRefused(
            f"{where}: 0 < p25_ns <= median_ns <= p75_ns does not hold, or runs {short(runs)} makes no sense"
        )
    op = table.take("op", str)
    return Point(case(op, {name: table.take(name, int) for name in table.names()}, where), median, low, high, runs)


def held_out(points: Sequence[Point], folds: int, fold: int) -> tuple[list[Point], list[Point]]:
    """Points to fit and points to hold back in that fold: cases by turns in the order of ops and sizes, so that each
    fold has small and large ones of every op, and what was measured of one case is on one side."""
    cases = sorted({p.case for p in points}, key=lambda c: (OPS.index(c.op), c.sizes))
    turn = {c: i % folds for i, c in enumerate(cases)}
    ordered = sorted(points, key=lambda p: (OPS.index(p.case.op), p.case.sizes))
    return [p for p in ordered if turn[p.case] != fold], [p for p in ordered if turn[p.case] == fold]
