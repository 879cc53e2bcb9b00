"""The NPU kernels against the float64 reference, over ops that do on the CPU what their documents say.

No NPU is here, so this tells whether *our* calls ask for the right thing (layouts, lengths, masks, windows, slots,
order of results), if the ops do what is documented of them. It says nothing of a device.
"""

from __future__ import annotations

import sys
from typing import Any

import pytest

from hbmtwin.kernels.attention import npu, npu_cache, npu_fia
from hbmtwin.kernels.attention.backends import BackendUnavailable
from hbmtwin.kernels.attention.checked import Checked
from hbmtwin.kernels.attention.interface import AttentionShape
from hbmtwin.kernels.attention.npu import NpuKernels
from hbmtwin.kernels.attention.npu_cache import PAGED_ATTENTION, RESHAPE_AND_CACHE
from hbmtwin.kernels.attention.npu_choice import NpuChoice, choice_for
from hbmtwin.kernels.attention.npu_fia import FIA, FIA_V2, FUSION
from hbmtwin.kernels.attention.reference import ReferenceKernels
from hbmtwin.kernels.attention.validator import KernelArgumentError

from .npu_documented_ops import DocumentedOps

LIMIT = 4e-3
GARBAGE = 50.0
"""In what may not be read. Finite: of NaN the ops' documents ask for none in a cache."""
KINDS = {
    "a2": ("a2", choice_for("a2")),
    "version 2, ATB": ("a3", NpuChoice(FIA_V2, FIA_V2, FIA_V2, FIA_V2, RESHAPE_AND_CACHE)),
    "fusion": ("a2", choice_for("a2")._replace(prefill=FUSION)),
    "310p": ("310p", choice_for("310p")),
}
SHAPES = {
    "packed": AttentionShape(8, 2, 128, 128, "float16"),
    "padded": AttentionShape(14, 2, 64, 64, "float16"),
}
Q_LENS, LENS = [3, 3, 1, 1, 20, 1], [3, 3, 9, 9, 150, 129]


@pytest.fixture(params=KINDS.values(), ids=KINDS)
def kernels(request: pytest.FixtureRequest, torch: Any, monkeypatch: pytest.MonkeyPatch) -> NpuKernels:
    monkeypatch.setitem(sys.modules, "torch_npu", DocumentedOps(torch).module())
    monkeypatch.setenv("ATB_HOME_PATH", "/nowhere")
    made = NpuKernels(*request.param)
    monkeypatch.setattr(made, "device", "cpu")
    return made


def distance(kernels: Any, method: str, arguments: dict[str, Any]) -> float:
    made = getattr(Checked(kernels), method)(**arguments).double()
    far = (made - getattr(ReferenceKernels(), method)(**arguments)).abs().max()
    return float(far.nan_to_num(float("inf")))


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("window", [0, 1, 7])
def test_every_method(kernels: NpuKernels, shape: AttentionShape, window: int, batches: Any) -> None:
    assert distance(kernels, "prefill", batches.packed(shape, Q_LENS, LENS, window)) < LIMIT
    assert distance(kernels, "decode", batches.padded(shape, LENS, window, garbage=GARBAGE)) < LIMIT
    for q_lens in (Q_LENS, [1] * len(LENS)):
        paged = batches.paged(shape, LENS, 128, q_lens, window, garbage=GARBAGE)
        assert distance(kernels, "paged_prefill", paged) < LIMIT
    assert distance(kernels, "paged_decode", batches.paged(shape, LENS, 128, window=window, garbage=GARBAGE)) < LIMIT


@pytest.mark.parametrize("per_head", [False, True], ids=["per token", "per token and head"])
@pytest.mark.parametrize("window", [0, 7])
def test_int8(kernels: NpuKernels, per_head: bool, window: int, batches: Any) -> None:
    plain = batches.paged(SHAPES["packed"], LENS, 128, window=window, garbage=GARBAGE)
    quantised = batches.int8(plain, per_head=per_head)
    if kernels.family == "310p":
        with pytest.raises(BackendUnavailable, match="takes no scales of an INT8 cache; use npu_fused"):
            kernels.paged_decode(**quantised)
    else:
        assert distance(kernels, "paged_decode", quantised) < LIMIT


@pytest.mark.parametrize("slots", ["int32", "int64"])
def test_a_write_lands_in_its_slots(kernels: NpuKernels, slots: str, torch: Any) -> None:
    new, cache = torch.randn(5, 2, 64).half(), torch.zeros(3, 128, 2, 64).half()
    values = torch.zeros_like(cache)
    at = torch.tensor([0, 383, 128, 5, 200], dtype=getattr(torch, slots))
    kernels.write_kv(new, -new, cache, values, slots=at)
    assert cache.view(-1, 2, 64)[at.long()].equal(new)
    assert values.equal(-cache)
    assert cache.ne(0).any(-1).any(-1).sum() == 5


@pytest.mark.parametrize("per_head", [False, True], ids=["per token", "per token and head"])
def test_an_int8_write_keeps_what_it_wrote(kernels: NpuKernels, per_head: bool, torch: Any) -> None:
    if kernels.family == "310p":
        pytest.skip("INT8 caches are for FIA")
    new, cache = torch.randn(5, 2, 64).half(), torch.zeros(3, 128, 2, 64, dtype=torch.int8)
    values, scales = torch.zeros_like(cache), torch.zeros((3, 2, 128) if per_head else (3, 128))
    at = torch.tensor([0, 383, 128, 5, 200])
    kernels.write_kv_int8(new, -new, cache, values, scales, scales.clone(), slots=at)
    factor = scales.transpose(1, 2) if per_head else scales[..., None]
    kept = (cache * factor[..., None]).view(-1, 2, 64)[at]
    assert float((kept - new).abs().max()) < 0.03
    assert values.equal(-cache)


def test_atb_reads_blocks_where_it_is_chosen(kernels: NpuKernels, batches: Any) -> None:
    chosen = NpuKernels(kernels.family, kernels.choice._replace(paged_decode=PAGED_ATTENTION))
    chosen.device = "cpu"
    assert distance(chosen, "paged_decode", batches.paged(SHAPES["packed"], LENS, 128, garbage=GARBAGE)) < LIMIT
    with pytest.raises(BackendUnavailable, match="no mask and so no window"):
        chosen.paged_decode(**batches.paged(SHAPES["packed"], LENS, 128, window=3))


def test_an_op_of_atb_without_nnal_says_what_to_install(
    kernels: NpuKernels, torch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ATB_HOME_PATH")
    chosen = NpuKernels(kernels.family, kernels.choice._replace(write=RESHAPE_AND_CACHE))
    new, cache = torch.zeros(1, 2, 64), torch.zeros(1, 128, 2, 64)
    with pytest.raises(BackendUnavailable, match=r"ATB_HOME_PATH is not set; install NNAL and source its set_env\.sh"):
        chosen.write_kv(new, new, cache, cache, slots=torch.tensor([0]))


@pytest.mark.parametrize("mistake", ["window off by one", "mask turned", "a key of the future"])
def test_a_planted_mistake_is_caught(
    mistake: str, kernels: NpuKernels, batches: Any, torch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kernels.choice.prefill != FIA:
        pytest.skip("planted in the calls of FIA's first version")
    right = npu_fia.causal
    if mistake == "window off by one":
        monkeypatch.setattr(
            npu_fia, "causal", lambda mask, window=0: right(mask, window) | {"pre_tokens": window, "sparse_mode": 4}
        )
    elif mistake == "mask turned":
        monkeypatch.setattr(npu_fia, "window_mask", lambda lens, columns, window, device: _turned(torch, lens, columns))
    else:
        monkeypatch.setattr(npu_fia, "causal", lambda mask, window=0: right(mask, window) | {"next_tokens": 1})
    packed = batches.packed(SHAPES["packed"], Q_LENS, LENS, 7)
    padded = batches.padded(SHAPES["packed"], LENS, 7, garbage=GARBAGE)
    assert distance(kernels, "prefill", packed) > LIMIT or distance(kernels, "decode", padded) > LIMIT


def _turned(torch: Any, lens: Any, columns: int) -> Any:
    """True where a query looks: the other way round."""
    key = torch.arange(columns)[None]
    return (key < torch.tensor(lens)[:, None])[:, None, None, :]


@pytest.fixture
def latent(torch: Any) -> dict[str, Any]:
    """Arguments of ``mla_paged_decode``."""
    made = {"q": (2, 16, 512), "q_rope": (2, 16, 64), "latent_cache": (4, 128, 1, 512), "rope_cache": (4, 128, 1, 64)}
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(*shape, generator=generator).half() for name, shape in made.items()} | {
        "block_table": torch.tensor([[2, 0], [1, 3]], dtype=torch.int32),
        "context_lens": [200, 7],
        "scale": 0.04,
    }


@pytest.mark.parametrize("op", [FIA, FIA_V2])
def test_mla_decodes_over_one_latent_for_keys_and_values(
    op: str, kernels: NpuKernels, latent: dict[str, Any], torch: Any
) -> None:
    if kernels.family != "a2":
        pytest.skip("once is enough")
    chosen = NpuKernels("a2", kernels.choice._replace(paged_decode=op))
    made = chosen.mla_paged_decode(**latent)
    keys = torch.cat((latent["latent_cache"], latent["rope_cache"]), -1)
    lens = {name: latent[name] for name in ("block_table", "context_lens", "scale")}
    right = ReferenceKernels().paged_decode(
        torch.cat((latent["q"], latent["q_rope"]), -1), keys, keys[..., :512], **lens
    )
    assert made.shape == right.shape
    assert float((made.double() - right).abs().max()) < LIMIT


def test_mla_prefills_with_expanded_heads(kernels: NpuKernels, torch: Any) -> None:
    if kernels.family != "a2":
        pytest.skip("once is enough")
    generator = torch.Generator().manual_seed(0)
    q, q_rope, k, k_rope, v = (
        torch.randn(tokens, 16, width, generator=generator).half()
        for tokens, width in ((12, 128), (12, 64), (20, 128), (20, 64), (20, 128))
    )
    lens: dict[str, Any] = {"q_lens": [5, 7], "kv_lens": [5, 15], "scale": 0.07}
    made = NpuKernels("a2", kernels.choice._replace(prefill=FIA)).mla_prefill(q, q_rope, k, k_rope, v, **lens)
    right = ReferenceKernels().prefill(torch.cat((q, q_rope), -1), torch.cat((k, k_rope), -1), v, **lens)
    assert float((made.double() - right).abs().max()) < LIMIT


def test_a_call_is_looked_at_again_when_a_length_or_a_shape_is_another(
    torch: Any, monkeypatch: pytest.MonkeyPatch, batches: Any
) -> None:
    monkeypatch.setitem(sys.modules, "torch_npu", DocumentedOps(torch).module())
    looked: list[str] = []
    monkeypatch.setattr(npu, "check_call", lambda op, arguments, family: looked.append(op))
    monkeypatch.setattr(npu, "MAX_HELD", 2)
    kernels = NpuKernels("a2", choice_for("a2"))
    first, second = (batches.padded(SHAPES["packed"], lens) for lens in ([9, 150], [9, 151]))
    for arguments in (first, first, second, first):
        kernels.decode(**arguments)
    assert len(looked) == 2
    kernels.decode(**batches.padded(SHAPES["padded"], [9, 150]))
    kernels.decode(**first)
    assert len(looked) == 4


def test_new_tokens_may_be_views_of_one_product_and_caches_may_not(kernels: NpuKernels, torch: Any) -> None:
    product = torch.randn(2, 8 + 2 + 2, 128).half()
    q, k, v = product.split([8, 2, 2], dim=1)
    lens: dict[str, Any] = {"q_lens": [1, 1], "kv_lens": [1, 1], "scale": 0.1}
    made = kernels.prefill(q, k, v, **lens)
    assert float((made.double() - ReferenceKernels().prefill(q, k, v, **lens)).abs().max()) < LIMIT
    cache, values, slots = (
        torch.zeros(2, 128, 2, 128).half(),
        torch.zeros(2, 128, 2, 128).half(),
        torch.tensor([0, 129]),
    )
    kernels.write_kv(k, v, cache, values, slots=slots)
    assert cache.view(-1, 2, 128)[slots].equal(k)
    table = torch.tensor([[0], [1]], dtype=torch.int32)
    paged: dict[str, Any] = {"block_table": table, "context_lens": [1, 2], "scale": 0.1}
    right = ReferenceKernels().paged_decode(q, cache, values, **paged)
    assert float((kernels.paged_decode(q, cache, values, **paged).double() - right).abs().max()) < LIMIT
    if kernels.choice.write == npu_cache.SCATTER:
        with pytest.raises(KernelArgumentError, match="key_cache: npu_scatter_pa_kv_cache: contiguous"):
            kernels.write_kv(k, v, cache.transpose(0, 1).contiguous().transpose(0, 1), values, slots=slots)
