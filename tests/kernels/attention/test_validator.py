"""Every illegal argument is refused by its name, with the cure; what is legal passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hbmtwin.kernels.attention.checked import Checked
from hbmtwin.kernels.attention.cpu import CpuKernels
from hbmtwin.kernels.attention.interface import AttentionShape
from hbmtwin.kernels.attention.validator import KernelArgumentError

Batch = dict[str, Any]
Change = Callable[[Any, Batch], Batch]

CHECKED = Checked(CpuKernels("cpu-flash", "cpu"))
SHAPE = AttentionShape(8, 2, 32, 16, "float16")
Q_LENS, LENS = [3, 20, 1], [3, 33, 16]


@pytest.fixture
def legal(batches: Any, torch: Any) -> dict[str, Batch]:
    """Three sequences; a table of 4 columns over 8 blocks of 16."""
    paged = batches.paged(SHAPE, LENS, 16)
    return {
        "prefill": batches.packed(SHAPE, Q_LENS, LENS),
        "decode": batches.padded(SHAPE, LENS),
        "paged_prefill": batches.paged(SHAPE, LENS, 16, Q_LENS),
        "paged_decode": paged,
        "int8 per token": batches.int8(paged, per_head=False),
        "int8 per head": batches.int8(paged, per_head=True),
        "write_kv": {
            "k": torch.ones(3, 2, 32),
            "v": torch.ones(3, 2, 16),
            "k_cache": torch.zeros(4, 16, 2, 32),
            "v_cache": torch.zeros(4, 16, 2, 16),
            "slots": torch.tensor([0, 63, 17]),
        },
    }


def _call(case: str, batch: Batch) -> Any:
    return getattr(CHECKED, "paged_decode" if case.startswith("int8") else case)(**batch)


def _set(name: str, value: Any) -> Change:
    return lambda torch, batch: {**batch, name: value}


def _of(name: str, change: Callable[[Any], Any]) -> Change:
    return lambda torch, batch: {**batch, name: change(batch[name])}


def _dtype(name: str, dtype: str) -> Change:
    return lambda torch, batch: {**batch, name: batch[name].to(getattr(torch, dtype))}


def _table(*rows: list[int]) -> Change:
    return lambda torch, batch: {**batch, "block_table": torch.tensor(rows, dtype=torch.int32)}


def _slots(*slots: int) -> Change:
    return lambda torch, batch: {**batch, "slots": torch.tensor(slots)}


def _strided(name: str) -> Change:
    return _of(name, lambda tensor: tensor.transpose(0, 1).contiguous().transpose(0, 1))


def _both(*changes: Change) -> Change:
    def change(torch: Any, batch: Batch) -> Batch:
        for one in changes:
            batch = one(torch, batch)
        return batch

    return change


ILLEGAL: list[tuple[str, str, Change, str, str]] = [
    # layouts
    ("prefill", "a list for a tensor", _set("q", [[1.0]]), "q", "is a list; give a torch tensor (tokens, num_heads"),
    (
        "prefill",
        "q padded",
        _of("q", lambda q: q[None]),
        "q",
        "has 4 dimensions (1, 24, 8, 32); give (tokens, num_heads",
    ),
    ("prefill", "k flat", _of("k", lambda k: k.flatten(1)), "k", "has 2 dimensions"),
    ("decode", "k packed", _of("k", lambda k: k[0]), "k", "give (batch, padded tokens, num_kv_heads, head_dim)"),
    (
        "paged_decode",
        "cache flat",
        _of("k_cache", lambda c: c.flatten(2)),
        "k_cache",
        "give (blocks, block_size, num_kv",
    ),
    ("paged_decode", "v cache flat", _of("v_cache", lambda c: c.flatten(2)), "v_cache", "has 3 dimensions"),
    ("prefill", "nothing", _of("q", lambda q: q[:0]), "q", "is empty, (0, 8, 32)"),
    ("write_kv", "k of blocks", _of("k", lambda k: k[None]), "k", "give (tokens, num_kv_heads, head_dim)"),
    # dtypes
    ("prefill", "q of ints", _dtype("q", "int8"), "q", "is int8; give float16 or bfloat16 or float32"),
    ("prefill", "q of float64", _dtype("q", "float64"), "q", "is float64; give float16"),
    ("prefill", "k of another", _dtype("k", "bfloat16"), "k", "is bfloat16; give float16"),
    ("decode", "v of another", _dtype("v", "float32"), "v", "is float32; give float16"),
    ("paged_prefill", "INT8", _both(_dtype("k_cache", "int8"), _dtype("v_cache", "int8")), "k_cache", "give float16"),
    ("paged_decode", "cache of another", _dtype("k_cache", "float32"), "k_cache", "is float32; give float16 or int8"),
    ("paged_decode", "caches of two", _dtype("v_cache", "float32"), "v_cache", "is float32; give float16"),
    ("write_kv", "k of another", _dtype("k", "float16"), "k", "is float16; give float32"),
    ("write_kv", "cache of int32", _dtype("k_cache", "int32"), "k_cache", "is int32; give float16"),
    # device and memory
    ("prefill", "strided q", _strided("q"), "q", "is not contiguous"),
    ("decode", "strided k", _strided("k"), "k", "call .contiguous() before, not in the kernel"),
    ("paged_decode", "strided cache", _strided("v_cache"), "v_cache", "is not contiguous"),
    ("paged_decode", "strided table", _strided("block_table"), "block_table", "is not contiguous"),
    # heads
    (
        "prefill",
        "8 over 3",
        _of("k", lambda k: k.repeat(1, 2, 1)[:, :3].contiguous()),
        "k",
        "has 3 KV heads, which do not",
    ),
    ("prefill", "more KV heads", _of("k", lambda k: k.repeat(1, 8, 1)), "k", "16 KV heads, which do not divide q's 8"),
    ("decode", "narrow k", _of("k", lambda k: k[..., :8].contiguous()), "k", "has head_dim 8, but q has 32"),
    ("prefill", "v of fewer tokens", _of("v", lambda v: v[:-1]), "v", "is (51, 2, 16), but k is (52, 2, 32)"),
    ("decode", "v of fewer heads", _of("v", lambda v: v[:, :, :1].contiguous()), "v", "V of the same tokens and heads"),
    (
        "write_kv",
        "k of other heads",
        _of("k", lambda k: k[:, :1].contiguous()),
        "k",
        "(1, 32); give its cache's, (2, 32)",
    ),
    (
        "write_kv",
        "v of other width",
        _of("v", lambda v: v[..., :8].contiguous()),
        "v",
        "(2, 8); give its cache's, (2, 16)",
    ),
    ("write_kv", "v of fewer tokens", _of("v", lambda v: v[:2]), "v", "has 2 tokens, but k has 3"),
    # lengths
    ("prefill", "numpy", _of("q_lens", np.array), "q_lens", "is a ndarray; give a list of ints"),
    ("prefill", "none", _set("q_lens", []), "q_lens", "is empty"),
    ("prefill", "a float", _set("kv_lens", [3, 33.0, 16]), "kv_lens", "kv_lens[1] is 33.0, a float; give an int"),
    ("prefill", "a bool", _set("q_lens", [3, 20, True]), "q_lens", "q_lens[2] is True, a bool"),
    ("prefill", "zero", _set("q_lens", [0, 23, 1]), "q_lens", "q_lens[0] is 0; a sequence has at least 1 token"),
    ("decode", "negative", _set("kv_lens", [3, -1, 16]), "kv_lens", "kv_lens[1] is -1"),
    ("prefill", "cumulative", _set("q_lens", [3, 23, 24]), "q_lens", "add up to 50, but q has 24 tokens; give plain"),
    ("prefill", "keys are left", _set("kv_lens", [3, 33, 15]), "kv_lens", "add up to 51, but k has 52 tokens"),
    ("prefill", "one too few", _set("kv_lens", [3, 49]), "kv_lens", "has 2 lengths for 3 sequences"),
    ("prefill", "less than new", _set("kv_lens", [2, 34, 16]), "kv_lens", "kv_lens[0] is 2, less than its q_len of 3"),
    ("paged_prefill", "less than new", _set("context_lens", [3, 19, 16]), "context_lens", "[1] is 19, less than"),
    ("paged_prefill", "queries are left", _set("q_lens", [3, 19, 1]), "q_lens", "add up to 23, but q has 24 tokens"),
    ("decode", "more than padded", _set("kv_lens", [3, 37, 16]), "kv_lens", "kv_lens[1] is 37, but k has 36 tokens"),
    ("decode", "a row too many", _set("kv_lens", [3, 33]), "q", "has 3 rows for 2 kv_lens"),
    ("decode", "k a row short", _both(*(_of(n, lambda t: t[:2]) for n in "kv")), "k", "has 2 rows for 3 kv_lens"),
    ("paged_decode", "a token too many", _set("context_lens", [3, 33]), "q", "has 3 tokens for 2 context_lens"),
    # blocks
    ("paged_decode", "table of int64", _dtype("block_table", "int64"), "block_table", "is int64; give int32"),
    ("paged_decode", "table in one row", _of("block_table", lambda t: t[0]), "block_table", "has 1 dimensions (4,)"),
    ("paged_decode", "a row short", _of("block_table", lambda t: t[:2]), "block_table", "has 2 rows for 3 sequences"),
    (
        "paged_decode",
        "columns",
        _table([1, 2], [3, 4], [5, 6]),
        "block_table",
        "context_lens[1] is 33; give at least 3",
    ),
    ("paged_decode", "id past the end", _table([0, 0, 0], [1, 7, 3], [4, 0, 0]), "block_table", "[1, 1] is 7, outside"),
    ("paged_decode", "id below 0", _table([0, 0, 0], [1, 2, -1], [4, 0, 0]), "block_table", "[1, 2] is -1, outside"),
    (
        "paged_prefill",
        "id past the end",
        _table([99, 0, 0], [1, 2, 3], [4, 0, 0]),
        "block_table",
        "[0, 0] is 99, outside",
    ),
    (
        "paged_decode",
        "shared",
        _table([3, 0, 0], [1, 2, 3], [4, 0, 0]),
        "block_table",
        "block 3 holds new tokens of seq",
    ),
    ("paged_prefill", "shared", _table([0, 0, 0], [4, 1, 2], [1, 0, 0]), "block_table", "sequences 1 and 2; give each"),
    (
        "paged_decode",
        "block of 8",
        _both(*(_of(f"{n}_cache", lambda c: c.unflatten(1, (2, 8)).flatten(0, 1)) for n in "kv")),
        "k_cache",
        "has a block_size of 8; give a multiple of 16",
    ),
    ("paged_decode", "caches of two sizes", _of("v_cache", lambda c: c[1:]), "v_cache", "make both of one size"),
    # slots
    ("write_kv", "below 0", _slots(0, -1, 5), "slots", "slots[1] is -1, outside 0..63"),
    ("write_kv", "past the end", _slots(0, 1, 64), "slots", "slots[2] is 64, outside 0..63"),
    ("write_kv", "twice", _slots(7, 1, 7), "slots", "slots[0] and slots[2] are both 7"),
    ("write_kv", "one too few", _slots(7, 1), "slots", "has 2 slots for 3 tokens"),
    ("write_kv", "of floats", _dtype("slots", "float32"), "slots", "is float32; give int32 or int64"),
    ("write_kv", "a list", _set("slots", [1, 2, 3]), "slots", "is a list; give a torch tensor (tokens,)"),
    ("write_kv", "in rows", _of("slots", lambda s: s[None]), "slots", "has 2 dimensions (1, 3); give (tokens,)"),
    # scales
    ("prefill", "NaN", _set("scale", float("nan")), "scale", "is nan; give a finite number above 0"),
    ("decode", "infinite", _set("scale", float("inf")), "scale", "is inf"),
    ("paged_prefill", "zero", _set("scale", 0.0), "scale", "is 0.0; give a finite number above 0"),
    ("paged_decode", "none", _set("scale", None), "scale", "is a NoneType; give a float"),
    ("prefill", "negative window", _set("window", -1), "window", "is -1; give 0 for no window"),
    ("decode", "window of floats", _set("window", 4.0), "window", "is a float; give an int, 0 for none"),
    ("paged_decode", "window none", _set("window", None), "window", "is a NoneType"),
    # INT8
    ("int8 per token", "no k_scale", _set("k_scale", None), "k_scale", "is missing; an INT8 cache"),
    ("int8 per head", "no v_scale", _set("v_scale", None), "v_scale", "is missing"),
    ("int8 per token", "float16", _dtype("k_scale", "float16"), "k_scale", "is float16; give float32"),
    ("int8 per token", "of fewer blocks", _of("v_scale", lambda s: s[1:]), "v_scale", "is (6, 16); for this cache"),
    (
        "int8 per head",
        "transposed",
        _of("k_scale", lambda s: s.transpose(1, 2).contiguous()),
        "k_scale",
        "is (7, 16, 2); for this cache (blocks, num_kv_heads, block_size) is (7, 2, 16)",
    ),
    ("int8 per head", "one number", _of("k_scale", lambda s: s[0, 0, 0]), "k_scale", "has 0 dimensions ()"),
    (
        "int8 per head",
        "of two kinds",
        _of("v_scale", lambda s: s[:, 0].contiguous()),
        "v_scale",
        "is not of k_scale's kind",
    ),
    (
        "paged_decode",
        "scales",
        lambda torch, b: {**b, "k_scale": torch.ones(7, 16)},
        "k_scale",
        "float16; leave it out",
    ),
    ("int8 per token", "k alone", _dtype("v_cache", "float16"), "v_cache", "is float16; give int8"),
]


@pytest.mark.parametrize(
    ("case", "change", "argument", "said"),
    [(case, change, argument, said) for case, _, change, argument, said in ILLEGAL],
    ids=[f"{case}: {argument}, {what}" for case, what, _, argument, _ in ILLEGAL],
)
def test_what_is_illegal_is_refused_by_name(
    case: str, change: Change, argument: str, said: str, legal: dict[str, Batch], torch: Any
) -> None:
    with pytest.raises(KernelArgumentError) as refused:
        _call(case, change(torch, legal[case]))
    assert refused.value.argument == argument
    assert str(refused.value).startswith(f"{argument}: ")
    assert said in str(refused.value)


def test_what_is_legal_passes(legal: dict[str, Batch], torch: Any) -> None:
    for case, batch in legal.items():
        out = _call(case, batch)
        assert out is None if case == "write_kv" else out.shape == (len(batch["q"]), 8, 16)


LEGAL: list[tuple[str, str, Change]] = [
    ("paged_decode", "no id where no block is", _table([0, -1, -1], [1, 2, 3], [4, -1, -1])),
    (
        "paged_decode",
        "a full block is shared, and each has its own for its new token",
        _both(_table([0, -1, -1], [4, 2, 3], [4, 1, -1]), _set("context_lens", [3, 33, 17])),
    ),
    ("paged_decode", "a block read by one, written by the other", _table([0, 0, 0], [4, 2, 3], [4, 0, 0])),
    ("paged_decode", "more columns than needed", _table([0] * 9, [1, 2, 3] + [-1] * 6, [4] + [77] * 8)),
    ("prefill", "lengths in a tuple", _of("kv_lens", tuple)),
    ("prefill", "scale of an int", _set("scale", 1)),
    ("prefill", "a window longer than all", _set("window", 10**6)),
    ("write_kv", "slots of int32", _dtype("slots", "int32")),
    ("write_kv", "out of order, first and last", _slots(63, 0, 16)),
]


@pytest.mark.parametrize(
    ("case", "change"), [(c, change) for c, _, change in LEGAL], ids=[what for _, what, _ in LEGAL]
)
def test_what_is_unusual_but_legal_passes(case: str, change: Change, legal: dict[str, Batch], torch: Any) -> None:
    batch = change(torch, legal[case])
    for name in ("k_cache", "v_cache"):
        if name in batch and case != "write_kv":
            batch[name] = batch[name].nan_to_num(0.0)
    _call(case, batch)


def test_a_tensor_of_another_device_is_refused_and_one_without_values_is_not_read(
    legal: dict[str, Batch], torch: Any
) -> None:
    class Elsewhere(CpuKernels):
        """Kernels of a device that is not here; they are not reached."""

    kernels = Checked(Elsewhere("npu-flash", "npu"))
    with pytest.raises(
        KernelArgumentError, match=r"^q: is on cpu, the kernels run on npu; move it with \.to\('npu'\)$"
    ):
        kernels.prefill(**legal["prefill"])
    meta = {name: value.to("meta") if hasattr(value, "to") else value for name, value in legal["paged_decode"].items()}
    assert kernels.paged_decode(**meta).device.type == "meta"
    with pytest.raises(KernelArgumentError, match=r"^block_table: is on cpu, the kernels run on npu"):
        kernels.paged_decode(**{**meta, "block_table": legal["paged_decode"]["block_table"]})
    with pytest.raises(KernelArgumentError, match=r"^block_table: has 4 columns of 16 tokens"):
        kernels.paged_decode(**{**meta, "context_lens": [3, 65, 16]})


def test_nothing_is_called_with_a_refused_argument(legal: dict[str, Batch], torch: Any) -> None:
    batch = _slots(5, 99, 6)(torch, legal["write_kv"])
    with pytest.raises(KernelArgumentError):
        CHECKED.write_kv(**batch)
    assert not batch["k_cache"].any()
