"""What a call of an op asks for, in words that all its rules share: shapes without torch, one name per argument.

::

    NpuCall.arguments --TensorArg each--> Asked --axes of the layout--> q, k, v: batch, length, heads, dim, tokens
                                            '--every Rule of the op--> first broken one: argument, rule, cure

The names are those of FIA's version 1; ``NAMES`` says how another op calls the same thing. ``length`` of the query is
the longest of the batch, which decides between the two columns of FIA's limits: Q_S = 1 and Q_S > 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

from hbmtwin.kernels.attention.npu_310p import IFA, PFA
from hbmtwin.kernels.attention.npu_fia import FIA_V2, FUSION, IN_V2

NAMES: dict[str, dict[str, str]] = {
    FIA_V2: IN_V2,
    FUSION: {
        "num_heads": "head_num",
        "actual_seq_lengths": "actual_seq_qlen",
        "actual_seq_lengths_kv": "actual_seq_kvlen",
        "pre_tokens": "pre_tockens",
        "next_tokens": "next_tockens",
    },
    PFA: {"scale": "scale_value"},
    IFA: {"scale": "scale_value", "actual_seq_lengths_kv": "actual_seq_lengths", "actual_seq_lengths": ""},
}
BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1, "uint8": 1, "bool": 1, "int32": 4, "int64": 8}
PACKED = ("TND", "NTD")
INT4_IN_INT32 = 8


class TensorArg(NamedTuple):
    """A tensor as far as rules look at it."""

    shape: tuple[int, ...]
    dtype: str
    device: str = "npu"
    """torch's name of its kind; ``cpu`` is the host."""
    contiguous: bool = True
    values: tuple[int, ...] | None = None
    """Flat, where the host knows them."""

    @property
    def elements(self) -> int:
        """How many numbers it has."""
        made = 1
        for axis in self.shape:
            made *= axis
        return made


class Axes(NamedTuple):
    """One of query, key and value, whatever its layout; a paged one has the length that its table can hold."""

    batch: int
    length: int
    heads: int
    dim: int
    tokens: int
    """Of all sequences, in packed layouts."""


class Asked:
    """A call as its rules see it. *arguments* hold tensors of torch or TensorArgs; *known* the values of some."""

    def __init__(
        self,
        op: str,
        arguments: Mapping[str, Any],
        *,
        family: str,
        known: Mapping[str, Sequence[int]] | None = None,
        cann: tuple[int, ...] | None = None,
    ) -> None:
        self.op = op
        self.family = family
        self.cann = cann
        self._names = NAMES.get(op, {})
        values = known or {}
        self.given = {name: _seen(value, values.get(name)) for name, value in arguments.items() if value is not None}

    def name(self, canonical: str) -> str:
        """How this op calls the argument."""
        return self._names.get(canonical, canonical)

    def get(self, canonical: str, default: Any = None) -> Any:
        """The argument, *default* where it is not given."""
        return self.given.get(self.name(canonical), default)

    def t(self, canonical: str) -> TensorArg:
        """A tensor that is given."""
        found = self.given[self.name(canonical)]
        assert isinstance(found, TensorArg), f"{self.op}: {canonical} is no tensor"
        return found

    def has(self, canonical: str) -> bool:
        """Whether the argument is given."""
        return self.name(canonical) in self.given

    @cached_property
    def layout(self) -> str:
        """Of the inputs: what stands before the underscore."""
        return str(self.get("input_layout", "BSH")).partition("_")[0]

    @cached_property
    def packed(self) -> bool:
        """Whether sequences stand one behind the other."""
        return self.layout in PACKED

    @cached_property
    def paged(self) -> bool:
        """Whether K and V are in blocks."""
        return self.has("block_table")

    @cached_property
    def rope(self) -> bool:
        """Whether this is MLA."""
        return self.has("query_rope")

    @cached_property
    def heads(self) -> int:
        """Of the query, as the argument says."""
        return int(self.get("num_heads", 1))

    @cached_property
    def kv_heads(self) -> int:
        """Of K and V, as the argument says; 0 and nothing mean as many as the query's."""
        if self.op == FUSION:
            return self.k.heads
        return int(self.get("num_key_value_heads", 0)) or self.heads

    @cached_property
    def q_lens(self) -> list[int]:
        """Of the packed query, per sequence."""
        return _differences(self.get("actual_seq_lengths", ()))

    @cached_property
    def kv_lens(self) -> list[int]:
        """Per sequence."""
        lens = self.get("actual_seq_lengths_kv", ())
        return _differences(lens) if self.packed and not self.paged else list(lens)

    @cached_property
    def q(self) -> Axes:
        """Of the query."""
        return self._axes(self.t("query"), self.heads, self.q_lens)

    @cached_property
    def k(self) -> Axes:
        """Of the key."""
        return self._keys("key")

    @cached_property
    def v(self) -> Axes:
        """Of the value."""
        return self._keys("value")

    @cached_property
    def nz(self) -> bool:
        """Whether the cache is in the NZ format, (blocks, Nkv, D / 16, block, 16)."""
        return self.paged and len(self.t("key").shape) == 5

    @cached_property
    def cache_block(self) -> int:
        """Tokens of a block, as the cache's shape says."""
        shape = self.t("key").shape
        return shape[{3: 1, 4: 2, 5: 3}[len(shape)]]

    @cached_property
    def columns(self) -> int:
        """Blocks of a sequence that the table can name."""
        return self.t("block_table").shape[1]

    @cached_property
    def blocks_needed(self) -> int:
        """Of all sequences together."""
        return sum(-(-length // self.cache_block) for length in self.kv_lens)

    @cached_property
    def element_bytes(self) -> int:
        """Of the key."""
        return BYTES[self.t("key").dtype]

    def readable(self, canonical: str) -> bool:
        """Whether the tensor has as many dimensions as its layout, or as a cache."""
        rank = len(self.t(canonical).shape)
        if self.paged and canonical != "query":
            return rank in (3, 4, 5)
        return rank == len(self.layout)

    def _keys(self, canonical: str) -> Axes:
        tensor = self.t(canonical)
        kv_heads = int(self.get("num_key_value_heads", 0)) or self.heads
        if not self.paged:
            axes = self._axes(tensor, kv_heads, self.kv_lens)
        else:
            shape = tensor.shape
            dim = shape[2] // kv_heads if len(shape) == 3 else shape[3] if len(shape) == 4 else shape[2] * shape[4]
            heads = kv_heads if len(shape) == 3 else shape[1]
            axes = Axes(self.t("block_table").shape[0], self.columns * self.cache_block, heads, dim, 0)
        return axes._replace(dim=axes.dim * INT4_IN_INT32) if tensor.dtype == "int32" else axes

    def _axes(self, tensor: TensorArg, heads: int, lens: Sequence[int]) -> Axes:
        of = dict(zip(self.layout, tensor.shape, strict=True))
        if "H" in of:
            of |= {"N": heads, "D": of["H"] // heads}
        batch, length = (len(lens), max(lens, default=0)) if self.packed else (of["B"], of["S"])
        return Axes(batch, length, of["N"], of["D"], of.get("T", batch * length))


class Rule(NamedTuple):
    """One limit of an op. Rules are asked in order, and a later one may count on those before it."""

    key: str
    argument: str
    broken: Callable[[Asked], bool]
    text: str
    """What the rule is, with what was asked in its places: ``{a.q.dim}``."""
    cure: str


def host_ints(value: Any) -> bool:
    """Whether that is a list of ints on the host, as lengths must be."""
    return isinstance(value, list | tuple) and all(type(length) is int for length in value)


def rising(lens: Iterable[int]) -> bool:
    """Whether lengths can be cumulative: none below the one before, none below 0."""
    return all(low <= high for low, high in pairwise((0, *lens)))


def _differences(lens: Any) -> list[int]:
    return [high - low for low, high in pairwise((0, *lens))] if host_ints(lens) else []


def _seen(value: Any, known: Sequence[int] | None) -> Any:
    if isinstance(value, TensorArg):
        return value if known is None else value._replace(values=tuple(known))
    if not hasattr(value, "is_contiguous"):
        return value
    return TensorArg(
        tuple(value.shape),
        str(value.dtype).removeprefix("torch."),
        value.device.type,
        value.is_contiguous(),
        None if known is None else tuple(known),
    )
