"""Which op does what on which family, and what is told where there is none. Needs no torch."""

from __future__ import annotations

import pytest

from hbmtwin.kernels.attention.backends import BackendUnavailable
from hbmtwin.kernels.attention.npu_choice import NpuChoice, choice_for, family_of
from hbmtwin.kernels.attention.npu_fia import packs
from hbmtwin.kernels.attention.npu_validator import FAMILIES
from hbmtwin.kernels.capability_use import FAMILIES as CAPABILITY_FAMILIES

FIA = "npu_fused_infer_attention_score"


@pytest.mark.parametrize(
    ("soc", "family"),
    [
        ("Ascend910B1", "a2"),
        ("Ascend910B2C", "a2"),
        ("Ascend910B4-1", "a2"),
        ("Ascend910_9392", "a3"),
        ("Ascend910_9362", "a3"),
        ("Ascend310P3", "310p"),
        ("Ascend910A", "910a"),
        ("Ascend910B", "910a"),
    ],
)
def test_the_family_of_a_device_by_its_runtime_name(soc: str, family: str) -> None:
    assert family_of(soc) == family
    assert family in CAPABILITY_FAMILIES


@pytest.mark.parametrize("soc", ["Ascend950PR_9579", "Ascend910", "Ascend310B1", "NVIDIA H200"])
def test_a_device_of_no_known_family_is_refused_by_name(soc: str) -> None:
    with pytest.raises(BackendUnavailable, match=f"^npu: no attention op is known for '{soc}'; known are Atlas A2, A3"):
        family_of(soc)


def test_what_is_called_where_nobody_chooses() -> None:
    on_a2 = NpuChoice(FIA, FIA, FIA, FIA, "npu_scatter_pa_kv_cache")
    assert choice_for("a2") == choice_for("a3") == on_a2
    assert choice_for("310p") == NpuChoice(
        *("npu_prompt_flash_attention", "npu_incre_flash_attention") * 2, "_npu_reshape_and_cache"
    )
    with pytest.raises(BackendUnavailable, match="no fused attention op is documented for 910a; use Atlas A2, A3"):
        choice_for("910a")


@pytest.mark.parametrize("family", ["a2", "a3", "310p"])
def test_each_chosen_op_is_for_that_family(family: str) -> None:
    assert {family in FAMILIES[op] for op in choice_for(family)} == {True}


@pytest.mark.parametrize(
    ("head_dim", "v_head_dim", "grouped", "packed"),
    [
        (128, 128, True, True),
        (192, 128, True, True),
        (192, 192, False, True),
        (64, 64, False, True),
        (64, 64, True, False),
        (256, 256, True, False),
        (128, 64, False, False),
    ],
)
def test_heads_that_the_packed_layout_takes(head_dim: int, v_head_dim: int, grouped: bool, packed: bool) -> None:
    assert packs(head_dim, v_head_dim, grouped=grouped) is packed
