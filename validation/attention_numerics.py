"""Attention kernels held to the float64 reference, on whatever device they run.

::

    Case: method, shape, lengths, window --AttentionBatches--> tensors --> kernels ---.
                                                                 '------> reference --+--> Difference, tolerance

The cases are few and legal for the ops of every device (head_dim 128, blocks of 128 tokens, 16-bit dtypes); what a
device's ops do not take all the same is told as refused, with their reason. Drawn shapes are the tests' matter.

Tolerances are for keys and values of the normal distribution, so values to 4 or so. Flash keeps scores in float32 and
rounds at the end; standard rounds scores and probabilities to q's dtype as well. They are about twice the largest
difference seen on a CPU: float32 1.1e-6, float16 1.5e-3 and 2.5e-3, bfloat16 9.7e-3 and 2.4e-2.

On a machine with a device: ``python -P -m hbmtwin.validation.attention_numerics cuda``, or ``npu``, or ``cpu``. Exit
code 0: all is rounding; 1: no such device here; 3: something differs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

from hbmtwin.kernels.attention.backends import BACKENDS, KINDS, BackendUnavailable, kernels_for
from hbmtwin.kernels.attention.checked import Checked
from hbmtwin.kernels.attention.interface import AttentionKernels, AttentionShape
from hbmtwin.kernels.attention.reference import ReferenceKernels
from hbmtwin.kernels.attention.validator import KernelArgumentError

TOLERANCE: Final = {
    "flash": {"float32": 4e-6, "float16": 2.5e-3, "bfloat16": 2e-2},
    "standard": {"float32": 4e-6, "float16": 5e-3, "bfloat16": 4e-2},
}
"""Largest difference from the reference that is rounding, by kind of kernels and dtype of q."""
INT8_FACTOR: Final = 1.5
"""INT8 keys and values are rounded to q's dtype once they are multiplied with their scales; plain ones are not."""

_HEADS = {"MHA": (2, 2), "GQA 8 to 1": (16, 2)}
_Q_LENS, _LENS = (1, 9, 1, 40), (1, 9, 129, 270)
_WINDOW, _BLOCK_SIZE, _GARBAGE = 100, 128, 50.0


class Difference(NamedTuple):
    """What came of one case."""

    method: str
    case: str
    """Heads, window, kind of scales."""
    dtype: str
    largest: float
    """Largest absolute difference from the reference; infinite where something is not a number."""
    tolerance: float
    refused: str = ""
    """Why the device's ops do not take it, by our own rules; else empty."""
    failed: str = ""
    """What torch said where the call came to nothing, its first line; else empty."""

    @property
    def right(self) -> bool:
        """Whether it is rounding, or was refused by name."""
        return bool(self.refused) or (not self.failed and self.largest <= self.tolerance)


def differences(kernels: AttentionKernels, dtypes: Sequence[str] = ("float16", "bfloat16")) -> Iterator[Difference]:
    """Every case on *kernels*, in the order of *dtypes*. A second or two on a CPU, most of it the reference's."""
    batches = AttentionBatches()
    for dtype in dtypes:
        for heads, (num_heads, num_kv_heads) in _HEADS.items():
            shape = AttentionShape(num_heads, num_kv_heads, 128, 128, dtype)
            for window in (0, _WINDOW):
                for method, kind, batch in _cases(batches, shape, window):
                    case = ", ".join(filter(None, (heads, f"window {window}" if window else "", kind)))
                    outcome = Difference(method, case, dtype, float("inf"), tolerance_of(kernels, batch))
                    try:
                        yield outcome._replace(largest=largest_difference(Checked(kernels), method, batch))
                    except (KernelArgumentError, BackendUnavailable) as reason:
                        yield outcome._replace(refused=str(reason))
                    except RuntimeError as error:
                        yield outcome._replace(failed=f"FAILED: {str(error).partition(chr(10))[0]}")


def largest_difference(kernels: AttentionKernels, method: str, batch: dict[str, Any]) -> float:
    """Largest absolute difference of *kernels* from the reference, on *batch* of the CPU moved to their device."""
    want = _answer(ReferenceKernels(), method, batch)
    got = _answer(kernels, method, batch)
    if got.shape != want.shape:
        raise AssertionError(f"{method} gave {tuple(got.shape)}, not {tuple(want.shape)}")
    if method != "write_kv" and got.dtype != batch["q"].dtype:
        raise AssertionError(f"{method} gave {got.dtype}, not {batch['q'].dtype}")
    return float((got.cpu().double() - want).abs().max().nan_to_num(float("inf")))


def _answer(kernels: AttentionKernels, method: str, batch: dict[str, Any]) -> Any:
    """What *method* gives, or of ``write_kv`` the caches that it leaves, flat; *batch* stays as it is."""
    mine = {
        name: value.to(kernels.device, copy=True) if hasattr(value, "to") else value for name, value in batch.items()
    }
    given = getattr(kernels, method)(**mine)
    if method != "write_kv":
        return given
    import torch

    return torch.cat([mine["k_cache"].flatten(), mine["v_cache"].flatten()])


def tolerance_of(kernels: AttentionKernels, batch: dict[str, Any]) -> float:
    """The tolerance for these kernels and the dtype of *batch*; of a write there is none."""
    if "q" not in batch:
        return 0.0
    kind = "standard" if kernels.name.endswith("standard") else "flash"
    tolerance = TOLERANCE[kind][str(batch["q"].dtype).removeprefix("torch.")]
    return tolerance * INT8_FACTOR if batch.get("k_scale") is not None else tolerance


def _cases(batches: AttentionBatches, shape: AttentionShape, window: int) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Method, kind of scales, batch."""
    yield "prefill", "", batches.packed(shape, _Q_LENS, _LENS, window)
    yield "decode", "", batches.padded(shape, _LENS, window, garbage=_GARBAGE)
    yield "paged_prefill", "", batches.paged(shape, _LENS, _BLOCK_SIZE, _Q_LENS, window, garbage=_GARBAGE)
    if not window:
        yield "write_kv", "", batches.written(shape, sum(_Q_LENS), _BLOCK_SIZE)
    paged = batches.paged(shape, _LENS, _BLOCK_SIZE, window=window, garbage=_GARBAGE)
    yield "paged_decode", "", paged
    yield "paged_decode", "INT8, scale per token", batches.int8(paged, per_head=False)
    yield "paged_decode", "INT8, scale per token and head", batches.int8(paged, per_head=True)


def main(arguments: Sequence[str]) -> int:
    """Print every case of a backend's kernels, flash and standard; give the exit code."""
    named = [backend for backend in BACKENDS if [backend] == list(arguments)]
    if not named:
        print(f"attention_numerics: give one of {', '.join(BACKENDS)}", file=sys.stderr)
        return 2
    wrong = 0
    for kind in KINDS:
        try:
            kernels = kernels_for(named[0], kind)
        except BackendUnavailable as missing:
            print(missing, file=sys.stderr)
            return 1
        found = list(differences(kernels))
        for one in found:
            measured = f"{one.largest:.1e} of {one.tolerance:.1e}{'' if one.right else ': DIFFERS'}"
            said = one.refused or one.failed or measured
            print(f"{kernels.name:<13} {one.dtype:<8} {one.method:<13} {one.case:<58} {said}")
        refused = sum(1 for one in found if one.refused)
        wrong += sum(1 for one in found if not one.right)
        print(f"{kernels.name}: {len(found)} cases, {refused} refused by name\n")
    print(f"{wrong} cases differ from float64 attention by more than rounding")
    return 3 if wrong else 0


class AttentionBatches:
    """Arguments of each method of attention kernels by name, on the CPU: normal draws of a shape, lengths and a seed.

    What no kernel may read (padding, free blocks, the rest of a last block) is *garbage*, NaN unless said otherwise.
    """

    def __init__(self) -> None:
        import torch

        self.torch: Any = torch

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

    def written(self, shape: AttentionShape, tokens: int, block_size: int, seed: int = 0) -> dict[str, Any]:
        """Of ``write_kv``: slots in no order, of four blocks more than the tokens need."""
        draw, num_blocks = self._draw(shape, seed), -(-tokens // block_size) + 4
        kinds = (shape.head_dim, shape.v_head_dim)
        k, v = (draw(tokens, shape.num_kv_heads, width) for width in kinds)
        k_cache, v_cache = (draw(num_blocks, block_size, shape.num_kv_heads, width) for width in kinds)
        order = self.torch.randperm(num_blocks * block_size, generator=self.torch.Generator().manual_seed(seed))
        slots = order[:tokens].to(self.torch.int32)
        return {"k": k, "v": v, "k_cache": k_cache, "v_cache": v_cache, "slots": slots}

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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
