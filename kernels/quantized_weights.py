"""Bytes of a layer's tensors under a quantisation: the packed matrix, its scales, and what else stands beside it.

::

    a matrix of rows x columns        bits / 8 an element
    weight_scale                      one a matrix, a row, a group of columns in a row, or a block of both
    zero_points                       bits / 8, as many as scales (AWQ)
    channels                          what each row has besides, and each column (vllm-ascend's W8A8)

What a checkpoint leaves in 16 bit it says by names; the matrices that vLLM fuses are left so when all their parts are.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import combinations

from hbmtwin.kernels.layer_shapes import Weight
from hbmtwin.kernels.records import Quantization

FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "w13": ("0.gate_proj", "0.up_proj"),
    "w2": ("0.down_proj",),
}
"""The tensors of checkpoints that are one in vLLM; experts stand for the first of them."""


def tensor_bytes(w: Weight, width: int, q: Quantization | None, layer: int = 0) -> Iterator[tuple[str, int]]:
    """Yield ``(name, bytes)`` of *w* and of what its quantisation adds; *width*: bytes of the model's dtype.

    O(1), but for the names that a quantisation leaves out, which are looked up.
    """
    if q is None or not w.linear or is_unquantized(w.name, q, layer):
        yield w.name, w.elements * (w.element_bytes or width)
        return
    yield w.name, -(-w.rows * w.columns * q.weight_bits // 8) * w.copies
    scales = _scales(w, q)
    yield f"{w.name}.weight_scale", scales * q.scale_bytes * w.copies
    if q.zero_points:
        yield f"{w.name}.zero_points", -(-scales * q.weight_bits // 8) * w.copies
    expert = w.name.startswith("mlp.experts.")
    if besides := w.rows * q.output_channel_bytes + (0 if expert else w.columns * q.input_channel_bytes):
        yield f"{w.name}.channels", besides * w.copies


def _scales(w: Weight, q: Quantization) -> int:
    """Scales of one matrix."""
    if q.block is not None:
        return -(-w.rows // q.block[0]) * -(-w.columns // q.block[1])
    if q.group_size < 0:
        return 1
    return w.rows * (-(-w.columns // q.group_size) if q.group_size else 1)


def is_unquantized(name: str, q: Quantization, layer: int) -> bool:
    """Whether the matrix *name* of that layer keeps the model's dtype, by what the checkpoint says."""
    if not q.unquantized:
        return False
    exact, patterns = _sorted_out(q.unquantized)
    head, _, last = f"layers.{layer}.{name}".rpartition(".")
    return all(_named(f"{head}.{part}", exact, patterns) for part in FUSED.get(last, (last,)))


def _named(name: str, exact: frozenset[str], patterns: tuple[tuple[str, ...], ...]) -> bool:
    parts = name.split(".")
    runs = combinations(range(len(parts) + 1), 2)
    if exact and any(".".join(parts[start:end]) in exact for start, end in runs):
        return True
    return any(_matches(name, pieces) for pieces in patterns)


def _matches(name: str, pieces: tuple[str, ...]) -> bool:
    """Whether *name*, from a dot or its beginning to its end, is *pieces* with any text between them."""
    padded, place = f".{name}.", 0
    for piece in pieces:
        place = padded.find(piece, place)
        if place < 0:
            return False
        place += len(piece)
    return True


@lru_cache(maxsize=64)
def _sorted_out(unquantized: tuple[str, ...]) -> tuple[frozenset[str], tuple[tuple[str, ...], ...]]:
    """Names without a star, and the pieces between the stars of the others, ends bound to whole parts of a name."""
    exact = frozenset(name for name in unquantized if "*" not in name)
    patterns = tuple(
        tuple(piece for piece in f".{name}.".split("*") if piece not in (".", ""))
        for name in unquantized
        if "*" in name
    )
    return exact, patterns
