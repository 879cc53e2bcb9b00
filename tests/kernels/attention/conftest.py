"""Batches of attention, made of a shape, lengths and a seed; and the kernels that are held to the reference.

What no kernel may read (padding, free blocks, the rest of a last block) is NaN, so that whoever reads it shows it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from hbmtwin.kernels.attention.backends import BackendUnavailable, kernels_for, load
from hbmtwin.kernels.attention.cuda import CudaKernels
from hbmtwin.kernels.attention.interface import AttentionKernels, AttentionShape
from hbmtwin.kernels.attention.reference import ReferenceKernels

TOLERANCE = {
    "flash": {"float32": 4e-6, "float16": 2.5e-3, "bfloat16": 2e-2},
    "standard": {"float32": 4e-6, "float16": 5e-3, "bfloat16": 4e-2},
}
"""Largest difference from the reference, for keys and values drawn from the normal distribution (values to 4 or so).
Flash keeps scores in float32 and rounds at the end; standard rounds scores and probabilities to q's dtype as well.
About twice the largest seen: float32 1.1e-6, float16 1.2e-3 and 2.5e-3, bfloat16 9.7e-3 and 1.8e-2."""
INT8_FACTOR = 1.5
"""INT8 keys and values are rounded to q's dtype once they are multiplied with their scales; plain ones are not."""


@pytest.fixture(scope="session")
def torch() -> Any:
    """torch for the CPU on one thread, or a skip that says what to install."""
    try:
        loaded = load("cpu")
    except BackendUnavailable as missing:
        pytest.skip(str(missing))
    loaded.set_num_threads(1)
    return loaded


@pytest.fixture(params=["cpu-flash", "cpu-standard", "cuda-flash"])
def kernels(request: pytest.FixtureRequest, torch: Any) -> AttentionKernels:
    """Each kind; CUDA's with tensors on the CPU: its own branches, the CPU's arithmetic."""
    if request.param == "cuda-flash":
        return CudaKernels("cuda-flash", "cpu")
    return kernels_for("cpu", "standard" if request.param == "cpu-standard" else "flash")


class Batches:
    """Arguments of each method, by name."""

    def __init__(self, torch: Any) -> None:
        self.torch = torch

    def _draw(self, shape: AttentionShape, seed: int) -> Callable[..., Any]:
        generator = self.torch.Generator().manual_seed(seed)
        dtype = getattr(self.torch, shape.dtype)
        return lambda *size: self.torch.randn(*size, generator=generator).to(dtype)

    def packed(
        self, shape: AttentionShape, q_lens: Sequence[int], kv_lens: Sequence[int], window: int = 0, seed: int = 0
    ) -> dict[str, Any]:
        """Of ``prefill``."""
        draw = self._draw(shape, seed)
        return {
            "q": draw(sum(q_lens), shape.num_heads, shape.head_dim),
            "k": draw(sum(kv_lens), shape.num_kv_heads, shape.head_dim),
            "v": draw(sum(kv_lens), shape.num_kv_heads, shape.v_head_dim),
            "q_lens": list(q_lens),
            "kv_lens": list(kv_lens),
            "scale": shape.head_dim**-0.5,
            "window": window,
        }

    def padded(
        self,
        shape: AttentionShape,
        kv_lens: Sequence[int],
        window: int = 0,
        seed: int = 0,
        garbage: float = float("nan"),
    ) -> dict[str, Any]:
        """Of ``decode``, with some padding in the longest row too."""
        draw, rows = self._draw(shape, seed), max(kv_lens) + 3
        k = draw(len(kv_lens), rows, shape.num_kv_heads, shape.head_dim)
        v = draw(len(kv_lens), rows, shape.num_kv_heads, shape.v_head_dim)
        for i, length in enumerate(kv_lens):
            k[i, length:] = v[i, length:] = garbage
        q = draw(len(kv_lens), shape.num_heads, shape.head_dim)
        return {"q": q, "k": k, "v": v, "kv_lens": list(kv_lens), "scale": shape.head_dim**-0.5, "window": window}

    def paged(
        self,
        shape: AttentionShape,
        context_lens: Sequence[int],
        block_size: int,
        q_lens: Sequence[int] | None = None,
        window: int = 0,
        seed: int = 0,
        garbage: float = float("nan"),
    ) -> dict[str, Any]:
        """Of ``paged_prefill``, or without *q_lens* of ``paged_decode``: blocks in no order, two of them free."""
        draw = self._draw(shape, seed)
        columns = [-(-length // block_size) for length in context_lens]
        num_blocks = sum(columns) + 2
        k_cache = draw(num_blocks, block_size, shape.num_kv_heads, shape.head_dim)
        v_cache = draw(num_blocks, block_size, shape.num_kv_heads, shape.v_head_dim)
        order = self.torch.randperm(num_blocks, generator=self.torch.Generator().manual_seed(seed)).tolist()
        table = self.torch.full((len(columns), max(columns) + 1), -1, dtype=self.torch.int32)
        used = self.torch.zeros(num_blocks, block_size, dtype=self.torch.bool)
        for i, (count, length) in enumerate(zip(columns, context_lens, strict=True)):
            blocks, order = order[:count], order[count:]
            table[i, :count] = self.torch.tensor(blocks)
            used[blocks] = (self.torch.arange(count * block_size) < length).view(count, block_size)
        k_cache[~used] = v_cache[~used] = garbage
        q = draw(sum(q_lens) if q_lens else len(context_lens), shape.num_heads, shape.head_dim)
        lens = {"q_lens": list(q_lens)} if q_lens else {}
        return {
            "q": q,
            "k_cache": k_cache,
            "v_cache": v_cache,
            "block_table": table,
            **lens,
            "context_lens": list(context_lens),
            "scale": shape.head_dim**-0.5,
            "window": window,
        }

    def int8(self, paged: dict[str, Any], *, per_head: bool) -> dict[str, Any]:
        """A batch of ``paged_decode`` with its caches quantised; free slots get a scale of NaN."""
        made = dict(paged)
        for cache, scales in (("k_cache", "k_scale"), ("v_cache", "v_scale")):
            values = paged[cache].float()
            largest = values.abs().amax(dim=-1) if per_head else values.abs().amax(dim=(-1, -2))
            scale = largest / 127  # (blocks, block_size[, num_kv_heads])
            steps = values / (scale[..., None] if per_head else scale[..., None, None])
            made[cache] = steps.round().nan_to_num(77.0).to(self.torch.int8)
            made[scales] = scale.transpose(1, 2).contiguous() if per_head else scale
        return made


@pytest.fixture(scope="session")
def batches(torch: Any) -> Batches:
    """What batches are made with."""
    return Batches(torch)


@pytest.fixture(scope="session")
def differs() -> Callable[..., float]:
    """Largest difference from the reference as a multiple of the tolerance: 1 or less is right, NaN is infinite."""

    def measured(kernels: AttentionKernels, method: str, batch: dict[str, Any]) -> float:
        want = getattr(ReferenceKernels(), method)(**batch)
        got = getattr(kernels, method)(**batch)
        assert got.shape == want.shape
        assert got.dtype == batch["q"].dtype
        kind = "standard" if kernels.name.endswith("standard") else "flash"
        tolerance = TOLERANCE[kind][str(got.dtype).removeprefix("torch.")]
        tolerance *= INT8_FACTOR if batch.get("k_scale") is not None else 1
        return float((got.double() - want).abs().max().nan_to_num(float("inf"))) / tolerance

    return measured
