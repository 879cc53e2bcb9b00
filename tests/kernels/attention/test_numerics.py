"""Every kernel against the float64 reference, within the tolerance of its dtype (conftest): heads, lengths, blocks,
windows, INT8 KV."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hbmtwin.kernels.attention.backends import kernels_for
from hbmtwin.kernels.attention.checked import Checked
from hbmtwin.kernels.attention.interface import AttentionKernels, AttentionShape
from hbmtwin.kernels.attention.reference import ReferenceKernels

Differs = Callable[[AttentionKernels, str, dict[str, Any]], float]

HEADS = {
    "MHA": (4, 4),
    "4 to 1": (8, 2),
    "7 to 1, one KV head": (7, 1),
    "7 to 1": (14, 2),
    "8 to 1": (16, 2),
    "64 to 8": (64, 8),
}
DTYPES = ("float32", "float16", "bfloat16")


@pytest.fixture(params=HEADS.values(), ids=HEADS)
def heads(request: pytest.FixtureRequest) -> tuple[int, int]:
    return request.param


@pytest.fixture(params=DTYPES)
def shape(request: pytest.FixtureRequest, heads: tuple[int, int]) -> AttentionShape:
    width = 16 if heads[0] == 64 else 32
    return AttentionShape(*heads, width, width, request.param)


@pytest.mark.parametrize("window", [0, 7])
def test_every_ratio_and_dtype(
    kernels: AttentionKernels, shape: AttentionShape, window: int, batches: Any, differs: Differs
) -> None:
    """New sequences, chunks of sequences and single tokens in one batch; lengths on both sides of a block's end."""
    q_lens, lens = [1, 9, 20, 1, 3], [1, 9, 37, 33, 16]
    assert differs(kernels, "prefill", batches.packed(shape, q_lens, lens, window)) <= 1
    assert differs(kernels, "decode", batches.padded(shape, lens, window)) <= 1
    assert differs(kernels, "paged_prefill", batches.paged(shape, lens, 16, q_lens, window)) <= 1
    assert differs(kernels, "paged_decode", batches.paged(shape, lens, 16, window=window)) <= 1


@pytest.mark.parametrize("block_size", [16, 32, 128])
@pytest.mark.parametrize("window", [0, 1, 33])
def test_blocks_of_every_size(
    kernels: AttentionKernels, block_size: int, window: int, batches: Any, differs: Differs
) -> None:
    shape = AttentionShape(8, 2, 64, 64, "bfloat16")
    lens = [block_size - 1, block_size, block_size + 1, 2 * block_size, 1, 1, 3 * block_size + 5]
    q_lens = [1, block_size, 2, 5, 1, 1, block_size + 9]
    assert differs(kernels, "paged_decode", batches.paged(shape, lens, block_size, window=window)) <= 1
    assert differs(kernels, "paged_prefill", batches.paged(shape, lens, block_size, q_lens, window)) <= 1


@pytest.mark.parametrize("per_head", [False, True], ids=["per token", "per token and head"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [0, 20])
def test_int8_kv(
    kernels: AttentionKernels, dtype: str, per_head: bool, window: int, batches: Any, differs: Differs
) -> None:
    shape = AttentionShape(8, 2, 64, 32, dtype)
    plain = batches.paged(shape, [40, 1, 16, 17, 70], 16, window=window)
    quantised = batches.int8(plain, per_head=per_head)
    assert differs(kernels, "paged_decode", quantised) <= 1
    lost = kernels.paged_decode(**quantised).double() - ReferenceKernels().paged_decode(**plain)
    assert 1e-4 < lost.abs().max() < 6e-2  # a step is 1/127 of a token's largest value, 3 or 4


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [0, 100, 600])
def test_long_sequences(kernels: AttentionKernels, dtype: str, window: int, batches: Any, differs: Differs) -> None:
    """More queries than one piece of a mask, and more keys than a block of the flash kernel (512)."""
    shape = AttentionShape(2, 1, 64, 64, dtype)
    assert differs(kernels, "prefill", batches.packed(shape, [1100, 530], [1100, 1300], window)) <= 1
    assert differs(kernels, "decode", batches.padded(shape, [1300, 4], window)) <= 1


@pytest.mark.parametrize(("head_dim", "v_head_dim"), [(192, 128), (32, 64), (40, 40)])
def test_v_is_narrower_or_wider_than_k(
    kernels: AttentionKernels, head_dim: int, v_head_dim: int, batches: Any, differs: Differs
) -> None:
    """192 and 128 are MLA's when its latents are expanded."""
    shape = AttentionShape(4, 2, head_dim, v_head_dim, "bfloat16")
    for window in (0, 5):
        assert differs(kernels, "prefill", batches.packed(shape, [6, 9], [6, 30], window)) <= 1
        assert differs(kernels, "paged_decode", batches.paged(shape, [20, 40], 16, window=window)) <= 1


@pytest.mark.parametrize("dtype", [*DTYPES, "int8"])
@pytest.mark.parametrize("slot_dtype", ["int32", "int64"])
def test_writes_go_where_the_reference_writes(
    kernels: AttentionKernels, dtype: str, slot_dtype: str, torch: Any
) -> None:
    generator = torch.Generator().manual_seed(5)

    def draw(*size: int) -> Any:
        return (torch.randn(*size, generator=generator) * 30).to(getattr(torch, dtype))

    k, v, k_cache, v_cache = draw(9, 2, 8), draw(9, 2, 4), draw(4, 16, 2, 8), draw(4, 16, 2, 4)
    slots = torch.randperm(64, generator=generator)[:9].to(getattr(torch, slot_dtype))
    wanted = k_cache.clone(), v_cache.clone()
    ReferenceKernels().write_kv(k, v, *wanted, slots=slots)
    assert not wanted[0].equal(k_cache)
    kernels.write_kv(k, v, k_cache, v_cache, slots=slots)
    assert k_cache.equal(wanted[0])
    assert v_cache.equal(wanted[1])


def test_what_is_written_is_read(kernels: AttentionKernels, batches: Any, torch: Any) -> None:
    """Tokens written one step after the other into empty caches give what packed attention gives."""
    packed = batches.packed(AttentionShape(4, 2, 32, 32, "float32"), [50], [50])
    k_cache, v_cache = torch.full((5, 16, 2, 32), float("nan")), torch.full((5, 16, 2, 32), float("nan"))
    table = torch.tensor([[3, 0, 4, 1]], dtype=torch.int32)
    slot_of = [int(table[0, i // 16]) * 16 + i % 16 for i in range(50)]
    out = []
    for start, stop in ((0, 20), (20, 48), (48, 49), (49, 50)):
        new = slice(start, stop)
        slots = torch.tensor(slot_of[new])
        kernels.write_kv(packed["k"][new], packed["v"][new], k_cache, v_cache, slots=slots)
        read = {"block_table": table, "context_lens": [stop], "scale": packed["scale"]}
        q = packed["q"][new]
        if stop - start > 1:
            out.append(kernels.paged_prefill(q, k_cache, v_cache, q_lens=[stop - start], **read))
        else:
            out.append(kernels.paged_decode(q, k_cache, v_cache, **read))
    torch.testing.assert_close(torch.cat(out), kernels.prefill(**packed), atol=4e-6, rtol=0)


_LENS = st.lists(st.tuples(st.integers(1, 40), st.integers(0, 60)), min_size=1, max_size=5)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    num_kv_heads=st.integers(1, 3),
    group=st.integers(1, 9),
    widths=st.tuples(st.integers(1, 10), st.integers(1, 10)),
    dtype=st.sampled_from(DTYPES),
    lens=_LENS,
    block_size=st.sampled_from([16, 32, 128]),
    window=st.one_of(st.just(0), st.integers(1, 110)),
    quantised=st.sampled_from([None, False, True]),
    seed=st.integers(0, 99),
)
def test_drawn_shapes(
    kernels: AttentionKernels,
    batches: Any,
    differs: Differs,
    num_kv_heads: int,
    group: int,
    widths: tuple[int, int],
    dtype: str,
    lens: list[tuple[int, int]],
    block_size: int,
    window: int,
    quantised: bool | None,
    seed: int,
) -> None:
    """All that is legal, which the validator is asked too: it refuses nothing of it."""
    shape = AttentionShape(num_kv_heads * group, num_kv_heads, 8 * widths[0], 8 * widths[1], dtype)
    q_lens, kv_lens = [new for new, _ in lens], [new + old for new, old in lens]
    checked = Checked(kernels)
    assert differs(checked, "prefill", batches.packed(shape, q_lens, kv_lens, window, seed)) <= 1
    assert differs(checked, "decode", batches.padded(shape, kv_lens, window, seed)) <= 1
    assert differs(checked, "paged_prefill", batches.paged(shape, kv_lens, block_size, q_lens, window, seed)) <= 1
    paged = batches.paged(shape, kv_lens, block_size, window=window, seed=seed)
    paged = paged if quantised is None else batches.int8(paged, per_head=quantised)
    assert differs(checked, "paged_decode", paged) <= 1


def test_kernels_are_named_after_backend_and_kind(torch: Any) -> None:
    assert [kernels_for("cpu").name, kernels_for("cpu", "standard").name] == ["cpu-flash", "cpu-standard"]
